"""Time per step and peak memory of every engine on the 120 M model, beside `cost.py`'s estimate.

    python benchmarks/engines.py [--ranks 2] [--rounds 2] [--steps 5] [--engines ddp,zero1,...] [--set a.b=v]

Real runs of `bert-dp train`, each engine in turn, on synthetic shards that it makes; a step's time is
metrics.jsonl's step_time_s, the first step left out. Peak memory is the greatest resident set of a rank (on
a GPU: reserved by the allocator) before the closing checkpoint gathers the whole state. Prints a table and,
with --json, the raw figures.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import records
from benchmarks.turns import tell
from bert_dp.config import load_config
from bert_dp.cost import memory_estimate_gib
from tests.shards import write_shards

ENGINES = {
    "single": ["parallel.engine=single"],
    "ddp": ["parallel.engine=ddp"],
    "ddp-bf16": ["parallel.engine=ddp", "parallel.reduce_dtype=bf16"],
    "zero1": ["parallel.engine=zero1"],
    "fsdp": ["parallel.engine=fsdp"],
    "tensor": ["parallel.engine=ddp", "parallel.tensor=2"],
    "accelerate": ["parallel.engine=accelerate"],
    **{f"deepspeed-{z}": ["parallel.engine=deepspeed", f"parallel.zero_stage={z}"] for z in range(4)},
}


def train(root: Path, name: str, settings: list[str], ranks: int, number: int) -> dict[str, Any]:
    """One run; its step times, peak memory and estimate."""
    run_dir = root / f"{name}-{number}"
    ranks = 1 if name == "single" else ranks
    done = records.train_crammed(run_dir, settings, ranks)
    if done.returncode:
        return {"engine": name, "failed": done.stdout[-800:] + done.stderr[-800:]}
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()][1:]
    summary = json.loads((run_dir / "summary.json").read_text())
    config = load_config(run_dir / "config.yaml")
    return {
        "engine": name,
        "ranks": ranks,
        "step_time_s": [line["step_time_s"] for line in lines],
        "optimizer_s": [line["optimizer_s"] for line in lines],
        "peak_memory_gib": lines[-1]["peak_memory_gib"],
        "estimate_gib": memory_estimate_gib(config, summary["precision"], ranks),
        "losses": [line["loss"] for line in lines],
    }


def main() -> None:
    parser = records.make_parser(__doc__, "--set", "--json")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--engines", default=",".join(ENGINES))
    o = parser.parse_args()
    names = records.check_names(parser, "--engines", o.engines, ENGINES)
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        shards = write_shards(root / "shards", length=128, train=256)
        common = [
            f"data.path={shards}",
            f"schedule.steps={o.steps}",
            "batch.global_size=4",
            "batch.micro_size=1",
            "log.every_steps=1",
            *records.SHORT_RUN,
            *o.settings,
        ]
        for number in range(o.rounds):
            for name in names:
                runs.append(train(root, name, [*common, *ENGINES[name]], o.ranks, number))
                tell(f"round {number + 1} {name}: {runs[-1].get('failed', 'done')}")
    report(names, runs)
    records.write(o.json, {"environment": records.environment(), "runs": runs})


def report(names: list[str], runs: list[dict[str, Any]]) -> None:
    def medians(name: str, key: str) -> list[float]:
        return [statistics.median(run[key]) for run in runs if run["engine"] == name and key in run]

    base = medians("ddp", "step_time_s") if "ddp" in names else None
    print(
        f"{'engine':12} {'step s':>8} {'rounds':>12} {'/ ddp':>6} {'optimizer s':>12} {'peak GiB':>9} "
        f"{'estimate':>9}"
    )
    for name in names:
        times = medians(name, "step_time_s")
        if not times:
            print(f"{name:12} failed")
            continue
        ratio = statistics.median(a / b for a, b in zip(times, base, strict=True)) if base else float("nan")
        peak = max(run["peak_memory_gib"] for run in runs if run["engine"] == name)
        estimate = sum(next(run["estimate_gib"] for run in runs if run["engine"] == name).values())
        spread = f"{min(times):.2f}-{max(times):.2f}"
        optimizer_s = statistics.median(medians(name, "optimizer_s"))
        print(
            f"{name:12} {statistics.median(times):8.2f} {spread:>12} {ratio:6.2f} {optimizer_s:12.2f} "
            f"{peak:9.2f} {estimate:9.2f}"
        )


if __name__ == "__main__":
    main()
