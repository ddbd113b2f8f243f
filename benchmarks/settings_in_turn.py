"""Two ways of one run in turn: tokens/s and held-out loss of `bert-dp train` under setting A and under B.

    python benchmarks/settings_in_turn.py OUT [--config quickstart] --a precision=fp32 --b precision=bf16
        [--set a.b=v ...] [--seeds 0,1,2] [--ranks 2] [--json FILE]

A round trains both with the same seed, in an order swapped every round; give `--set schedule.steps=N`, so
that both do the same steps. Printed: tokens/s over all ranks of both, median and range of the rounds, the
ratio B / A by round, and the difference of the held-out losses by seed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import records
from benchmarks.turns import ratios, spread, with_range

FACTS = ("precision", "step", "tokens", "tokens_per_s", "final_loss", "heldout_loss", "heldout")


def train(o: argparse.Namespace, setting: str, seed: int, run_dir: Path) -> dict[str, Any]:
    """The facts of summary.json of one run."""
    settings = records.set_options([*o.settings, setting, f"run.seed={seed}", "checkpoint.every_steps=0"])
    records.bert_dp("train", o.config, *settings, "--nproc", str(o.ranks), "--run-dir", str(run_dir))
    summary = json.loads((run_dir / "summary.json").read_text())
    return {name: summary[name] for name in FACTS}


def main() -> None:
    parser = records.make_parser(__doc__, "--set", "--json")
    parser.add_argument("out", type=Path)
    parser.add_argument("--config", default="quickstart")
    parser.add_argument("--a", required=True, metavar="a.b=v")
    parser.add_argument("--b", required=True, metavar="a.b=v")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--ranks", type=int, default=2)
    o = parser.parse_args()
    rounds: list[dict[str, Any]] = []
    ways = {"a": o.a, "b": o.b}
    for number, seed in enumerate(map(int, o.seeds.split(","))):
        order = list(ways) if number % 2 == 0 else list(ways)[::-1]
        runs = {way: train(o, ways[way], seed, o.out / f"seed-{seed}-{way}") for way in order}
        rounds.append({"seed": seed, **runs})
    rates = {way: [each[way]["tokens_per_s"] for each in rounds] for way in ways}
    gains = ratios(rates["b"], rates["a"])
    differences = [each["b"]["heldout_loss"] - each["a"]["heldout_loss"] for each in rounds]
    for way, setting in ways.items():
        print(f"{setting:24} {with_range(spread(rates[way]), 0)} tokens/s over {o.ranks} ranks")
    print(f"ratio of tokens/s, B / A: {with_range(spread(gains), 3)}")
    print(
        f"held-out loss, B - A: mean {statistics.mean(differences):+.4f} nats ({min(differences):+.4f} "
        f"to {max(differences):+.4f}), seeds {o.seeds}"
    )
    figures = {"ratios": gains, "loss_differences": differences, "rounds": rounds}
    records.write(o.json, {"environment": records.environment(), **figures})


if __name__ == "__main__":
    main()
