"""The verb `tune lr`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bert_dp.config import ConfigError
from launcher.display import warn_of_ordinary_secrets
from launcher.options import ConfigName, Json, Launcher, Set, console

MOST_TOKENS = 1e15


def lr(
    config: ConfigName = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Ranks of a trial; default: as few as one replica needs.")
    ] = None,
    rates: Annotated[int, typer.Option(min=3, max=20, help="Rates of the first rung, spaced 2x.")] = 5,
    seeds: Annotated[int, typer.Option(min=1, max=100, help="Seeds of each finalist.")] = 3,
    tokens: Annotated[
        float | None, typer.Option(min=1, help="Of a run in the last rung; default: of the configured run.")
    ] = None,
    budget: Annotated[
        str | None, typer.Option(metavar="TIME", help="90s, 30m or 2h: shorten the runs to fit.")
    ] = None,
    transfer: Annotated[
        str | None,
        typer.Option(metavar="'B1->B2'", help="Run nothing: the rate at global batch B1, carried to B2."),
    ] = None,
    launcher: Launcher = "torchrun",
    set_: Set = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory; the same one goes on. Default: tune/NAME-lr-DATE-TIME.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, print the search, start nothing.")
    ] = False,
    json: Json = False,
) -> None:
    """Learning rate: a range test for the divergence edge, a ladder of rates on short runs, and the best of
    them on whole runs with several seeds, by held-out loss. Writes tune.json and tuned.yaml, which `train`
    takes.
    """
    from launcher.tune import lr as search
    from launcher.tune import sizes

    warn_of_ordinary_secrets()
    if transfer is not None:
        raise typer.Exit(search.carry(config, set_ or [], transfer, out, as_json=json, console=console()))
    if tokens is not None and not tokens < MOST_TOKENS:
        raise ConfigError([f"--tokens: {tokens} is not below {MOST_TOKENS:g}"])
    settings = search.Settings(
        ranks=ranks,
        rates=rates,
        seeds=seeds,
        launcher=launcher,
        tokens=None if tokens is None else int(tokens),
        budget_s=None if budget is None else sizes.seconds(budget, "--budget"),
    )
    raise typer.Exit(
        search.tune(config, set_ or [], settings, out=out, dry_run=dry_run, as_json=json, console=console())
    )
