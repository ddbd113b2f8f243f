"""The micro batch that `bert-dp tune batch` chooses, beside a sweep of every size that divides.

    python benchmarks/tune_batch.py OUT [--config quickstart] [--tries 3] [--budget 3m] [--rounds 5]
                                    [--steps 40] [--gpus 2] [--set a.b=v ...]

Each try is the verb itself; between the tries the sweep runs rounds, every size once in random
order. The figure of a try: the sweep's throughput (median over its rounds) of the size chosen, over that of
the sweep's best. Goes on where it was ended. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import records, turns
from bert_dp import files
from launcher import job
from launcher.cli import options
from launcher.machine import environment
from launcher.run import trials
from launcher.run.trials import Slot
from launcher.tune import FILE, batch, throughput
from launcher.tune.batch import BatchOptions, BatchSearchSpec, BatchTrials

WARM_UP = 5


def main() -> None:
    parser = records.make_parser(__doc__, "--set")
    parser.add_argument("out", type=Path)
    parser.add_argument("--config", default="quickstart")
    parser.add_argument("--tries", type=int, default=3)
    parser.add_argument("--budget", default="3m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--gpus", default="2")
    o = parser.parse_args()
    out = o.out.resolve()
    (out / "sweep").mkdir(parents=True, exist_ok=True)
    asked = BatchOptions(o.gpus, options.seconds(o.budget), None, "torchrun")
    spec = batch.search_spec(batch.load(o.config, o.settings), asked)
    job.prepare_data(spec.config)
    rounds: list[dict[int, float]] = []
    tries = []
    for number in range(1, o.tries + 1):
        tries.append(search(o, out / f"try-{number - 1}"))
        while len(rounds) < o.rounds * number // o.tries:
            rounds.append(sweep(spec, out / "sweep", len(rounds), o.steps))
    print(json.dumps(result(spec, tries, rounds), indent=1))


def search(o: argparse.Namespace, out: Path) -> dict[str, Any]:
    """tune.json of one call of the verb."""
    if (files.read_json(out / FILE) or {}).get("status") != "complete":
        options = ["--gpus", o.gpus, "--budget", o.budget, "--out", str(out)]
        records.bert_dp("tune", "batch", o.config, *records.set_options(o.settings), *options)
    result = files.read_json(out / FILE)
    assert result is not None
    return result


def sweep(spec: BatchSearchSpec, out: Path, number: int, steps: int) -> dict[int, float]:
    """Sequences per second of every size, each in a run of its own at the declared global batch."""
    rates: dict[int, float] = {}
    with trials.runner(out, [Slot()], launcher="torchrun", on_gpu=spec.on_gpu, log=lambda line: None) as runs:
        batches = BatchTrials(spec, runs)
        for micro in random.Random(number).sample(spec.sizes, len(spec.sizes)):
            global_size = spec.config.batch.global_size
            name = f"micro-{micro}-round-{number}"
            measured = batches.time_steps(name, micro, global_size, WARM_UP, steps)
            if measured.step_s:
                rates[micro] = global_size / statistics.fmean(measured.step_s)
            turns.tell(f"round {number}, micro {micro}: {measured.status} {rates.get(micro, 0):.1f}/s")
    return rates


def result(
    spec: BatchSearchSpec, tries: list[dict[str, Any]], rounds: list[dict[int, float]]
) -> dict[str, Any]:
    """The record: every round's rates, each try's choice, and what it reaches of the sweep's best."""
    rates = {micro: [each[micro] for each in rounds if micro in each] for micro in spec.sizes}
    medians = {micro: statistics.median(values) for micro, values in rates.items() if values}
    best = max(medians.values())
    chosen = [tried["choice"]["micro_batch"] for tried in tries]
    shares = [medians[micro] / best for micro in chosen]
    machine = environment.probe(records.ROOT).to_json()
    kept = ("cpu_model", "affinity_cores", "git_commit", "versions")
    return {
        "date": tries[0]["date"],
        "environment": {key: machine[key] for key in kept},
        "model": spec.config.model.model_dump(mode="json"),
        "global_batch": spec.config.batch.global_size,
        "ranks": spec.ranks,
        "budget_s": spec.options.budget_s,
        "sweep": {
            str(micro): {"samples_per_s_median": medians.get(micro), "samples_per_s": values}
            for micro, values in rates.items()
        },
        "tries": [
            {
                "micro_batch": micro,
                "share_of_sweeps_best": share,
                "seconds": tried["seconds"],
                "trials": len(tried["trials"]),
                "not_settled": tried["choice"]["not_settled"],
                "curve": {
                    str(s["micro_batch"]): [s["samples_per_s"], *(s["samples_per_s_ci95"] or [None, None])]
                    for s in tried["sizes"]
                    if s["samples_per_s"]
                },
            }
            for micro, share, tried in zip(chosen, shares, tries, strict=True)
        ],
        "within_3_percent": sum(share >= 0.97 for share in shares),
        "sizes_considered": len(throughput.sizes_to_time(spec.sizes)),
    }


if __name__ == "__main__":
    main()
