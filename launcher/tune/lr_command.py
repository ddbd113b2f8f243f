"""The verb `tune lr`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from bert_dp.config import ConfigError


def lr(
    config: Annotated[
        str | None, typer.Argument(help="YAML file or the name of a shipped one; default: quickstart.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Ranks of a trial; default: as few as one replica needs.")
    ] = None,
    rates: Annotated[int, typer.Option(min=3, help="Rates of the first rung, spaced 2x.")] = 5,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of each finalist.")] = 3,
    optimizers: Annotated[
        str | None, typer.Option(help="adamw, lamb, muon, by commas; default: the configuration's.")
    ] = None,
    weight_decays: Annotated[
        str | None, typer.Option(help="Numbers, by commas; default: the configuration's.")
    ] = None,
    trials: Annotated[
        int, typer.Option(min=0, metavar="N", help="Draw N first trials with Optuna instead (extra tune).")
    ] = 0,
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
    launcher: Annotated[
        str, typer.Option(help="Starts the ranks: torchrun, accelerate or deepspeed.")
    ] = "torchrun",
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="a.b=v", help="Override a setting; repeatable.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory; the same one goes on. Default: tuning/NAME-DATE-TIME.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, print the search, start nothing.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Learning rate: a range test for the divergence edge, then successive halving by held-out loss, several
    seeds at the end. Writes tune.json and tuned.yaml, which `train` takes.
    """
    from rich.console import Console

    from launcher.tune import lr as search

    if transfer is not None:
        raise typer.Exit(search.carry(config, set_ or [], transfer, out, as_json=json, console=Console()))
    settings = search.Settings(
        ranks=ranks, rates=rates, seeds=seeds, trials=trials, launcher=launcher,
        optimizers=tuple(_words(optimizers)), weight_decays=_numbers(weight_decays),
        tokens=None if tokens is None else int(tokens), budget_s=parse_budget(budget),
    )  # fmt: skip
    raise typer.Exit(
        search.tune(config, set_ or [], settings, out=out, dry_run=dry_run, as_json=json, console=Console())
    )


def _words(text: str | None) -> list[str]:
    return list(dict.fromkeys(word.strip() for word in text.split(","))) if text else []


def _numbers(text: str | None) -> tuple[float, ...]:
    try:
        return tuple(dict.fromkeys(float(word) for word in _words(text)))
    except ValueError:
        raise ConfigError([f"--weight-decays: {text!r} is not a list of numbers like 0.01,0.1"]) from None


def parse_budget(text: str | None) -> float | None:
    """Seconds of `90s`, `30m` or `2h`. Raises ConfigError."""
    if text is None:
        return None
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smh])\s*", text)
    value = float(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2]] if found else 0.0
    if not value:
        raise ConfigError([f"--budget: {text!r} is not a time like 90s, 30m or 2h"])
    return value
