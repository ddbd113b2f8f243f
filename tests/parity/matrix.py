"""The parity matrix: every engine x optimizer x N x tensor, each run or refused by name."""

from __future__ import annotations

import collections
import dataclasses
import importlib.util
import itertools
import json
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bert_dp.config import ConfigError, batch_layout, resolve
from tests.parity.runs import BASE, evals, metrics, settings, state, train_runs, write_run
from tests.parity.toy import ToyTask
from tests.shards import write_shards
from tests.tensors import largest_relative_error

ENGINES = ("ddp", "zero1", "fsdp", "accelerate", "deepspeed-0", "deepspeed-1", "deepspeed-2", "deepspeed-3")
OPTIMIZERS = ("adamw", "lamb", "muon")
PRECISIONS = ("fp32", "fp64")
ACCUMULATIONS = (1, 3)
WORLDS = ((1, 1), (2, 1), (4, 1), (2, 2), (4, 2), (4, 4))
"""(ranks, tensor)."""
STEPS, EVAL_STEPS = 20, 10


@dataclasses.dataclass(frozen=True, order=True)
class Cell:
    engine: str
    optimizer: str
    ranks: int
    tensor: int
    precision: str
    accumulation: int
    task: str = "mlm"
    """toy = tests/parity/toy.py, whose micro batches have unequal numbers of targets."""

    def __str__(self) -> str:
        tensor = f"-tensor{self.tensor}" if self.tensor > 1 else ""
        toy = "toy-" if self.task == "toy" else ""
        name = f"{toy}{self.engine}-{self.optimizer}-n{self.ranks}{tensor}"
        return f"{name}-{self.precision}-acc{self.accumulation}"

    def settings(self) -> dict[str, Any]:
        """Sections over BASE: the same global batches whatever the engine and N, ramped."""
        engine, _, stage = self.engine.partition("-")
        parallel: dict[str, Any] = {"engine": engine, "tensor": self.tensor}
        if stage:
            parallel["zero_stage"] = int(stage)
        dp = self.ranks // self.tensor
        micro = GLOBAL // (self.accumulation * dp)
        return {
            "parallel": parallel,
            "optim": {"name": self.optimizer, "lr": RATES[self.optimizer], "clip": 0.5, "eps": 1e-6},
            "precision": self.precision,
            "batch": {
                "global_size": GLOBAL,
                "micro_size": micro,
                "ramp_fraction": 0.5,
                "ramp_quantum": GLOBAL // self.accumulation,
            },
            "schedule": {"steps": STEPS, "name": "cosine"},
            "model": {"num_heads": 4},
            "log": {"every_steps": 1},
            "eval": {"every_steps": EVAL_STEPS},
        }

    def refusal(self) -> str | None:
        """Why this cell does not exist, in the words of the configuration's own check."""
        sections = {**BASE, **self.settings(), "data": {"sources": ["builtin"]}}
        sections["model"] = {**BASE["model"], **self.settings()["model"]}
        try:
            batch_layout(resolve([sections]), self.ranks)
        except ConfigError as error:
            return str(error)
        return None


GLOBAL = 12
PER_SPAWN = 20
MAKE_TASK = {"mlm": None, "toy": ToyTask}
RATES = {"adamw": 5e-3, "lamb": 2e-2, "muon": 5e-3}


def cells() -> Iterator[Cell]:
    """All of them, refused ones included."""
    for engine, optimizer, (ranks, tensor), precision, accumulation in itertools.product(
        ENGINES, OPTIMIZERS, WORLDS, PRECISIONS, ACCUMULATIONS
    ):
        yield Cell(engine, optimizer, ranks, tensor, precision, accumulation)
    for engine, ranks in itertools.product(ENGINES, (1, 2, 4)):
        precision = "fp32" if engine.startswith("deepspeed") else "fp64"
        yield Cell(engine, "adamw", ranks, 1, precision, 3, "toy")


@dataclasses.dataclass(frozen=True)
class Deviation:
    """Greatest distance of a cell's run from the run of one process."""

    loss: float
    grad_norm: float
    """Relative."""
    weights: float
    """Of any weight or optimizer tensor, relative in L2."""
    heldout_loss: float
    """Or its standard error; infinite when another number of held-out positions was counted."""

    def problems(self, cell: Cell) -> list[str]:
        """What is beyond its tolerance."""
        exact = cell.precision == "fp64"
        limits = {"loss": 1e-5, "grad_norm": 1e-5, "weights": 1e-4, "heldout_loss": 1e-5}
        values = dataclasses.asdict(self)
        return [
            f"{cell}: {name} {values[name]:.2e} is not below {1e-10 if exact else limit:.0e}"
            for name, limit in limits.items()
            if not values[name] < (1e-10 if exact else limit)
        ]


def excuse(cell: Cell) -> str | None:
    """Why this cell does not run here: refused by the configuration, or a package is absent."""
    package = cell.engine.partition("-")[0]
    if package in ("deepspeed", "accelerate") and importlib.util.find_spec(package) is None:
        return f"skipped: {package} is not installed"
    refused = cell.refusal()
    return None if refused is None else f"refused: {refused}"


def run_cells(wanted: Sequence[Cell], root: Path) -> Iterator[tuple[Cell, Deviation | str]]:
    """Train each cell, several in one spawn of ranks; yields its deviation, or what it failed with."""
    shards = write_shards(root / "shards")
    for ranks, task in itertools.product((1, 2, 4), MAKE_TASK):
        group = [cell for cell in wanted if (cell.ranks, cell.task) == (ranks, task)]
        for start in range(0, len(group), PER_SPAWN):
            yield from _run_chunk(group[start : start + PER_SPAWN], root, shards)


def _run_chunk(chunk: Sequence[Cell], root: Path, shards: Path) -> list[tuple[Cell, Deviation | str]]:
    make_task = MAKE_TASK[chunk[0].task]
    missing = {_baseline(cell, root): cell for cell in chunk}
    missing = {path: cell for path, cell in missing.items() if not (path / "summary.json").exists()}
    if missing:
        lone = [dataclasses.replace(cell, engine="single", ranks=1, tensor=1) for cell in missing.values()]
        alone = [write_run(p, settings(shards, **c.settings())) for p, c in zip(missing, lone, strict=True)]
        train_runs(1, alone, make_task=make_task)
    runs = [write_run(root / str(cell), settings(shards, **cell.settings())) for cell in chunk]
    try:
        train_runs(chunk[0].ranks, runs, make_task=make_task)
    except Exception as error:
        if len(chunk) > 1:
            return [found for cell in chunk for found in _run_chunk([cell], root, shards)]
        return [(chunk[0], str(error)[-2000:])]
    return [(cell, compare(run, _baseline(cell, root))) for cell, run in zip(chunk, runs, strict=True)]


def _baseline(cell: Cell, root: Path) -> Path:
    """The run of one process that this cell must equal."""
    return root / f"{cell.task}-single-{cell.optimizer}-{cell.precision}-acc{cell.accumulation}"


def compare(run: Path, base: Path) -> Deviation:
    lines = list(zip(metrics(run), metrics(base), strict=True))
    held_out = list(zip(evals(run), evals(base), strict=True))
    assert (len(lines), len(held_out)) == (STEPS, STEPS // EVAL_STEPS)
    counts = ("masked_tokens", "sequences", "targets")
    counted = all(a.get(key) == b.get(key) for a, b in held_out for key in counts)
    return Deviation(
        max(abs(a["loss"] - b["loss"]) for a, b in lines),
        max(abs(a["grad_norm"] - b["grad_norm"]) / b["grad_norm"] for a, b in lines),
        largest_relative_error(state(run, STEPS), state(base, STEPS)),
        max(abs(a[key] - b[key]) for a, b in held_out for key in ("loss", "loss_se") if key in b)
        if counted
        else math.inf,
    )


def main() -> int:
    """Every cell, resumed where the last call stopped; results in .parity/results.jsonl, then a summary."""
    folder = Path(".parity")
    folder.mkdir(exist_ok=True)
    results = folder / "results.jsonl"
    known = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    done = {line["cell"] for line in known}
    waiting = [cell for cell in cells() if excuse(cell) is None and str(cell) not in done]
    with tempfile.TemporaryDirectory() as root, results.open("a") as file:
        for number, (cell, found) in enumerate(run_cells(waiting, Path(root)), 1):
            bad = found.problems(cell) if isinstance(found, Deviation) else [found]
            facts = dataclasses.asdict(found) if isinstance(found, Deviation) else {}
            file.write(json.dumps({"cell": str(cell), **facts, "problems": bad}) + "\n")
            file.flush()
            print(f"{number}/{len(waiting)} {cell}: {'; '.join(bad) or 'equal'}", flush=True)
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    excused = collections.Counter(excuse(cell) for cell in cells())
    failed = [line for line in lines if line["problems"]]
    print(f"{len(lines)} cells ran, {len(failed)} failed; not run:")
    for reason, count in excused.items():
        if reason is not None:
            print(f"{count:4} {reason}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
