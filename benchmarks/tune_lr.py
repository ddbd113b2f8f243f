"""`bert-dp tune lr` beside a full grid of the same rates: what it finds, and what it costs.

    python benchmarks/tune_lr.py --out DIR [--config quickstart] [--set a.b=v ...] [--tokens N] [--json FILE]

First the search (DIR/search), then a grid (DIR/grid): every rate that the search's first rung had, spaced 2x
and at least five, with the same seeds, each to the whole budget, as ordinary trials by the same means, as
many at a time. Both go on where they were stopped. Losses do not depend on how busy the machine is; seconds
do: they are summed over the trials (records until 2026-11-26: the wall clock of both parts).

    gap     nats: mean over the seeds of the search's rate, less that of the grid's best (goal: at most 0.02)
    tokens  trained by the search over those of the grid (goal: below 0.5); the same of the seconds
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import records
from bert_dp import files
from bert_dp.config import Config
from launcher import job
from launcher.machine import environment
from launcher.run import trials
from launcher.run.trials import Stopped, Trial
from launcher.tune import FILE, lr

GOAL_NATS, GOAL_TOKENS = 0.02, 0.5
TOKENS = 1_200_000  # about two minutes of one rank on one core, as long as the quickstart trains
RATES = 5
OUTCOME = ("name", "lr", "seed", "status", "reason", "heldout_loss", "tokens", "seconds")
KEPT = ("settings", "tokens", "range_test", "rungs", "choice", "trained_tokens", "ranks", "at_a_time")


def parse() -> argparse.Namespace:
    parser = records.make_parser(__doc__, "--set", "--date", "--json")
    add = parser.add_argument
    add("--out", type=Path, required=True)
    add("--config", default="quickstart")
    add("--tokens", type=int, default=TOKENS, help="of a whole run")
    add("--seeds", type=int, default=3)
    return parser.parse_args()


def search(o: argparse.Namespace) -> dict[str, Any]:
    """tune.json of `bert-dp tune lr`, as a user runs it."""
    options = ["--tokens", str(o.tokens), "--seeds", str(o.seeds), "--rates", str(RATES)]
    options += ["--out", str(o.out / "search"), *records.set_options(o.settings)]
    records.bert_dp("tune", "lr", o.config, *options)
    result = files.read_json(o.out / "search" / FILE)
    assert result is not None
    return result


def ladder_of(searched: dict[str, Any]) -> list[float]:
    """The rates of the grid: those of the first rung, downwards to RATES of them."""
    rates = sorted({trial["lr"] for trial in searched["rungs"][0]["trials"]}, reverse=True)
    while len(rates) < RATES:
        rates.append(rates[-1] / 2)
    return rates


def grid(o: argparse.Namespace, config: Config, shards: Path, searched: dict[str, Any]) -> dict[str, Any]:
    """Every rate with every seed at the whole budget."""
    out = o.out / "grid"
    out.mkdir(parents=True, exist_ok=True)
    tokens, seeds = searched["tokens"], searched["rungs"][-1]["seeds"]
    todo = []
    for seed in seeds:
        for rate in ladder_of(searched):
            name = lr.trial_name(rate, tokens, seed)
            settings = lr.trial_config(config, shards, rate, tokens, seed)
            todo.append(Trial(out / "trials" / name, settings, searched["ranks"]))
    machine = environment.probe()
    on_gpu = bool(machine.gpus) and config.run.device != "cpu"
    slots = trials.device_slots(
        searched["ranks"],
        gpus=len(machine.gpus) if on_gpu else 0,
        cores=int(machine.usable_cores),
        most=searched["at_a_time"],
    )
    outcomes = []
    try:
        with trials.runner(out, slots, launcher="torchrun", on_gpu=on_gpu, log=print) as runs:
            for trial, ended in runs.run(todo):
                outcome = lr.read_trial(trial, ended)
                outcomes.append(outcome)
                print(
                    f"[{len(outcomes)}/{len(todo)}] {trial.name}: {outcome.status} {outcome.heldout_loss}",
                    flush=True,
                )
    except Stopped as stop:
        sys.exit(128 + stop.number)
    outcomes.sort(key=lambda outcome: (-outcome.lr, outcome.seed))
    lines = [{name: getattr(outcome, name) for name in OUTCOME} for outcome in outcomes]
    return {"seconds": sum(outcome.seconds for outcome in outcomes), "trials": lines}


def means(trials: list[dict[str, Any]]) -> dict[float, float]:
    """Rate -> mean over the seeds, where every seed has a loss."""
    out = {}
    for rate in {trial["lr"] for trial in trials}:
        mine = [trial for trial in trials if trial["lr"] == rate]
        if all(trial["status"] == "ok" for trial in mine):
            out[rate] = statistics.fmean(trial["heldout_loss"] for trial in mine)
    return dict(sorted(out.items()))


def compare(searched: dict[str, Any], full: dict[str, Any]) -> dict[str, Any]:
    """The figures of the record, from the trials alone."""
    by_rate = means(full["trials"])
    best = min(by_rate, key=lambda rate: by_rate[rate])
    chosen = searched["choice"]["lr"]
    last = searched["rungs"][-1]["trials"]
    tokens = sum(trial["tokens"] for trial in full["trials"])
    return {
        "chosen_lr": chosen,
        "chosen_nats": means(last)[chosen],
        "grid_means": [list(pair) for pair in by_rate.items()],
        "grid_best_lr": best,
        "grid_best_nats": by_rate[best],
        "gap_nats": means(last)[chosen] - by_rate[best],
        "tokens": searched["trained_tokens"],
        "grid_tokens": tokens,
        "token_ratio": searched["trained_tokens"] / tokens,
        "seconds": searched["seconds"],
        "grid_seconds": full["seconds"],
        "second_ratio": searched["seconds"] / full["seconds"],
        "trial_second_ratio": _trial_seconds(searched["rungs"]) / _trial_seconds([full]),
        "goal_nats": GOAL_NATS,
        "goal_tokens": GOAL_TOKENS,
    }


def _trial_seconds(rungs: list[dict[str, Any]]) -> float:
    """Summed over trials, the range test left out: what does not depend on how many run at a time."""
    return sum(trial["seconds"] for rung in rungs for trial in rung["trials"])


def main() -> None:
    o = parse()
    o.out = o.out.resolve()
    config = job.load(o.config, o.settings).config
    searched = search(o)
    full = grid(o, config, job.prepare_data(config), searched)
    figures = compare(searched, full)
    print(
        f"chosen {figures['chosen_lr']:g}: {figures['chosen_nats']:.4f} nats; the grid's best "
        f"{figures['grid_best_lr']:g}: {figures['grid_best_nats']:.4f}; gap {figures['gap_nats']:+.4f} "
        f"(goal {GOAL_NATS})"
    )
    for rate, mean in figures["grid_means"]:
        print(f"  {rate:<10g} {mean:.4f}")
    seconds = f"{figures['seconds']:.0f} and {figures['grid_seconds']:.0f}"
    print(
        f"tokens {figures['token_ratio']:.3f} of the grid's (goal {GOAL_TOKENS}), seconds "
        f"{figures['second_ratio']:.3f}: {seconds}"
    )
    machine = records.probed_machine(o.date)
    result = {
        "environment": machine,
        "command": machine["command"],
        "commit": machine["git_commit"],
        "config_hash": config.hash(),
        "data_hash": searched["data_hash"],
        "figures": figures,
        "search": {key: searched[key] for key in KEPT},
        "grid": full,
    }
    records.write(o.json, result)


if __name__ == "__main__":
    main()
