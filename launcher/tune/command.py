"""`bert-dp tune`: one verb, one call."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from launcher.display import warn_of_ordinary_secrets
from launcher.options import ConfigName, Json, Launcher, Set, console
from launcher.tune import lr_command

tune_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Find the per-GPU batch and the learning rate."
)


@tune_app.command()
def batch(
    config: ConfigName = None,
    gpus: Annotated[
        str, typer.Option(help="Ranks of every trial: auto (every GPU, or 2 CPU ranks).")
    ] = "auto",
    budget: Annotated[str, typer.Option(help="Time for all trials, about: 90s, 5m, 1h.")] = "5m",
    memory: Annotated[
        float | None,
        typer.Option(help="GiB that a rank may use; default: its device, or its share of the host."),
    ] = None,
    launcher: Launcher = "torchrun",
    set_: Set = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory; the same one goes on. Default: tune/NAME-batch-DATE-TIME.")
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Measure again what the cache already knows.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, print the sizes, start nothing.")
    ] = False,
    json: Json = False,
) -> None:
    """The smallest micro batch within 3 % of the best throughput, by real runs with all ranks.

    The global batch stays as it is declared; accumulation follows. Also: what a rank's memory is made of, the
    gradient noise scale, and which global batch would make the most of each sample.
    """
    from launcher.tune import batch as search

    warn_of_ordinary_secrets()
    raise typer.Exit(
        search.tune_batch(
            config,
            set_ or [],
            gpus=gpus,
            budget=budget,
            memory_gib=memory,
            launcher=launcher,
            out=out,
            fresh=fresh,
            dry_run=dry_run,
            as_json=json,
            console=console(),
        )
    )


tune_app.command("lr")(lr_command.lr)
