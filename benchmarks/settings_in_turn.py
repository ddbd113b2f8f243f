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
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import records  # noqa: E402

FACTS = ("precision", "step", "tokens", "tokens_per_s", "final_loss", "heldout_loss", "heldout")


def train(asked: argparse.Namespace, setting: str, seed: int, run_dir: Path) -> dict[str, Any]:
    """The facts of summary.json of one run."""
    settings = [*asked.set, setting, f"run.seed={seed}", "checkpoint.every_steps=0"]
    pairs = [part for each in settings for part in ("--set", each)]
    command = [sys.executable, "-m", "launcher", "train", asked.config, *pairs]
    command += ["--nproc", str(asked.ranks), "--run-dir", str(run_dir)]
    subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=True)
    summary = json.loads((run_dir / "summary.json").read_text())
    return {name: summary[name] for name in FACTS}


def spread(values: list[float], digits: int) -> str:
    """Median (least to most)."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--config", default="quickstart")
    parser.add_argument("--a", required=True, metavar="a.b=v")
    parser.add_argument("--b", required=True, metavar="a.b=v")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=v")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    rounds: list[dict[str, Any]] = []
    for number, seed in enumerate(int(text) for text in asked.seeds.split(",")):
        ways = {"a": asked.a, "b": asked.b}
        order = ["a", "b"] if number % 2 == 0 else ["b", "a"]
        found = {way: train(asked, ways[way], seed, asked.out / f"seed-{seed}-{way}") for way in order}
        rounds.append({"seed": seed, **found})
    ratios = [each["b"]["tokens_per_s"] / each["a"]["tokens_per_s"] for each in rounds]
    differences = [each["b"]["heldout_loss"] - each["a"]["heldout_loss"] for each in rounds]
    for way, setting in (("a", asked.a), ("b", asked.b)):
        rates = [each[way]["tokens_per_s"] for each in rounds]
        print(f"{setting:24} {spread(rates, 0)} tokens/s over {asked.ranks} ranks")
    print(f"ratio of tokens/s, B / A: {spread(ratios, 3)}")
    print(
        f"held-out loss, B - A: mean {statistics.mean(differences):+.4f} nats ({min(differences):+.4f} "
        f"to {max(differences):+.4f}), seeds {asked.seeds}"
    )
    if asked.json:
        figures = {"ratios": ratios, "loss_differences": differences, "rounds": rounds}
        asked.json.write_text(
            json.dumps({"environment": records.environment(None), **figures}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
