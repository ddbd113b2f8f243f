"""Measure the growth of rounding differences from one rank: with two ranks, and with larger micro batches.

`python -m tests.parity.growth` prints a markdown table with the largest difference of a logged loss, in nats,
from the start to each of STEPS.
"""

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.parity.runs import losses, settings, train_named
from tests.shards import write_shards

STEPS = (20, 60, 100, 200)
RATES = (5e-3, 1e-2)  # learning rates; the parity matrix uses the first
PRECISIONS = ("fp32", "fp64")
COMPARED = {"2 ranks": (2, 2), "1 rank, micro batch 4": (1, 4)}
"""Name -> ranks, micro batch. The runs are compared with 1 rank in micro batches of 2."""


def measure(
    root: Path, steps: tuple[int, ...] = STEPS, rates: tuple[float, ...] = RATES
) -> Iterator[tuple[str, float, str, list[float]]]:
    """Yield (precision, learning rate, name in COMPARED, largest difference up to each of `steps`)."""
    shards, runs = write_shards(root / "shards"), {}
    cells, sizes = list(itertools.product(PRECISIONS, rates)), {"alone": (1, 2), **COMPARED}
    for (precision, rate), (name, (ranks, micro_size)) in itertools.product(cells, sizes.items()):
        config = settings(
            shards,
            precision=precision,
            optim={"lr": rate},
            batch={"micro_size": micro_size},
            schedule={"name": "constant", "steps": steps[-1]},
            eval={"every_steps": 0},
        )
        runs[f"{precision}-{rate:g}-{name}"] = (ranks, config)
    train_named(root, runs)
    for (precision, rate), name in itertools.product(cells, COMPARED):
        alone, other = (losses(root / f"{precision}-{rate:g}-{which}") for which in ("alone", name))
        differences = [abs(a - b) for a, b in zip(alone, other, strict=True)]
        yield precision, rate, name, [max(differences[:count]) for count in steps]


def main() -> None:
    print(f"| precision | rate | run | {' | '.join(f'{count} steps' for count in STEPS)} |")
    print("|" + "---|" * (3 + len(STEPS)))
    with tempfile.TemporaryDirectory() as root:
        for precision, rate, name, grown in measure(Path(root)):
            print(f"| {precision} | {rate:g} | {name} | {' | '.join(f'{d:.1e}' for d in grown)} |")


if __name__ == "__main__":
    main()
