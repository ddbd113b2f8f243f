"""Run the parity matrix: every engine x optimizer x ranks x tensor, except refused combinations; and every
engine compiled, in fp32 and bf16, with dropout, recomputation and a static graph."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import itertools
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bert_dp.config import ConfigError, batch_layout, resolve
from tests.parity.runs import BASE, evals, installed, metrics, parallel, settings, state, train_named
from tests.parity.toy import ToyTask
from tests.resumable import Results
from tests.shards import write_shards
from tests.tensors import largest_relative_error

ENGINES = ("ddp", "zero1", "fsdp", "accelerate", "deepspeed-0", "deepspeed-1", "deepspeed-2", "deepspeed-3")
COMPILED_ENGINES = ("ddp", "zero1", "fsdp", "accelerate", "deepspeed-1")
OPTIMIZERS = ("adamw", "lamb", "muon")
PRECISIONS = ("fp32", "fp64")
ACCUMULATIONS = (1, 3)
WORLDS = ((1, 1), (2, 1), (4, 1), (2, 2), (4, 2), (4, 4))
"""(ranks, tensor)."""
STEPS, EVAL_STEPS = 20, 10


@dataclasses.dataclass(frozen=True, order=True)
class Cell:
    """A run of the parity matrix."""

    engine: str
    optimizer: str
    ranks: int
    tensor: int
    precision: str
    accumulation: int
    task: str = "mlm"
    """toy = tests/parity/toy.py, whose micro batches have unequal numbers of targets."""
    form: str = "eager"
    """Key of FORMS."""

    def __str__(self) -> str:
        tensor = f"-tensor{self.tensor}" if self.tensor > 1 else ""
        toy = "toy-" if self.task == "toy" else ""
        name = f"{toy}{self.engine}-{self.optimizer}-n{self.ranks}{tensor}"
        form = "" if self.form == "eager" else f"-{self.form}"
        return f"{name}-{self.precision}-acc{self.accumulation}{form}"

    def baseline(self) -> Cell:
        """Return the cell of one process that this cell must equal. For one process in bf16, this is
        the cell of one process in fp32."""
        return dataclasses.replace(
            self,
            engine="single",
            ranks=1,
            tensor=1,
            precision="fp32" if self.engine == "single" else self.precision,
            form=self.form.partition("-")[0],
        )

    def settings(self) -> dict[str, Any]:
        """Return sections over BASE. All cells have the same global batches, with a ramp."""
        dp = self.ranks // self.tensor
        micro = GLOBAL // (self.accumulation * dp)
        sections: dict[str, Any] = {
            "parallel": parallel(self.engine, tensor=self.tensor),
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
        for name, section in FORMS[self.form].items():
            sections[name] = {**sections[name], **section} if isinstance(section, dict) else section
        return sections

    def refusal(self) -> str | None:
        """Return the message with which the configuration's check refuses this cell, or None."""
        try:
            batch_layout(resolve([BASE, self.settings(), {"data": {"sources": ["builtin"]}}]), self.ranks)
        except ConfigError as error:
            return str(error)
        return None


GLOBAL = 12
COMPILED = {"compile": "on", "model": {"num_heads": 4, "dropout": 0.1}}
FORMS: dict[str, dict[str, Any]] = {
    "eager": {},
    "compiled": COMPILED,
    "compiled-recomputed": {**COMPILED, "parallel": {"activation_checkpointing": True}},
    "compiled-static": {**COMPILED, "parallel": {"static_graph": True}},
}
PER_SPAWN = 20
MAKE_TASK = {"mlm": None, "toy": ToyTask}
RATES = {"adamw": 5e-3, "lamb": 2e-2, "muon": 5e-3}


def cells() -> Iterator[Cell]:
    """Yield all cells, including those that the configuration refuses."""
    for engine, optimizer, (ranks, tensor), precision, accumulation in itertools.product(
        ENGINES, OPTIMIZERS, WORLDS, PRECISIONS, ACCUMULATIONS
    ):
        yield Cell(engine, optimizer, ranks, tensor, precision, accumulation)
    for engine, ranks in itertools.product(ENGINES, (1, 2, 4)):
        precision = "fp32" if engine.startswith("deepspeed") else "fp64"
        yield Cell(engine, "adamw", ranks, 1, precision, 3, "toy")
    yield from compiled_cells()


def compiled_cells() -> Iterator[Cell]:
    """Yield compiled cells of two ranks, also with LAMB, whose step is compiled too."""
    yield Cell("single", "adamw", 1, 1, "bf16", 3, form="compiled")
    for precision in ("fp32", "bf16"):
        for engine, tensor in (*((e, 1) for e in COMPILED_ENGINES), ("ddp", 2), ("fsdp", 2)):
            for form in ("compiled", "compiled-recomputed"):
                yield Cell(engine, "adamw", 2, tensor, precision, 3, form=form)
        yield Cell("ddp", "adamw", 2, 1, precision, 3, form="compiled-static")
    for engine, tensor in (("zero1", 1), ("fsdp", 1), ("ddp", 2)):
        yield Cell(engine, "lamb", 2, tensor, "fp32", 3, form="compiled")


@dataclasses.dataclass(frozen=True)
class Deviation:
    """Largest differences between a cell's run and the run of one process."""

    loss: float
    grad_norm: float
    """Relative difference."""
    weights: float
    """Relative L2 difference of the weight or optimizer tensor that differs most."""
    heldout_loss: float
    """Difference of the loss or its standard error; infinite if the numbers of held-out positions differ."""

    def problems(self, cell: Cell) -> list[str]:
        """Return a line for each difference that is not below its tolerance."""
        limits = TOLERANCES["bf16 against fp32" if cell.engine == "single" else cell.precision]
        return [
            f"{cell}: {name} {value:.2e} is not below {limits[name]:.0e}"
            for name, value in dataclasses.asdict(self).items()
            if not value < limits[name]
        ]


TOLERANCES = {
    "fp64": {"loss": 1e-10, "grad_norm": 1e-10, "weights": 1e-10, "heldout_loss": 1e-10},
    "fp32": {"loss": 1e-5, "grad_norm": 1e-5, "weights": 1e-4, "heldout_loss": 1e-5},
    "bf16": {"loss": 5e-3, "grad_norm": 5e-2, "weights": 5e-2, "heldout_loss": 5e-3},
    "bf16 against fp32": {"loss": 1e-2, "grad_norm": 1e-1, "weights": 1e-1, "heldout_loss": 1e-2},
}


def excuse(cell: Cell) -> str | None:
    """Return the reason why this cell cannot run (refused, or a package is missing), or None."""
    if not installed(cell.engine):
        return f"skipped: {cell.engine.partition('-')[0]} is not installed"
    refused = cell.refusal()
    return None if refused is None else f"refused: {refused}"


def run_cells(wanted: Sequence[Cell], root: Path, **options: Any) -> Iterator[tuple[Cell, Deviation | str]]:
    """Train each cell, several in one spawn of ranks, and yield its deviation or its error message. `options`
    are passed to `train_runs` for the cells, but not for the runs of one process."""
    shards = write_shards(root / "shards")
    for ranks, task in itertools.product((1, 2, 4), MAKE_TASK):
        group = [cell for cell in wanted if (cell.ranks, cell.task) == (ranks, task)]
        for start in range(0, len(group), PER_SPAWN):
            yield from _run_chunk(group[start : start + PER_SPAWN], root, shards, options)


def _run_chunk(
    chunk: Sequence[Cell], root: Path, shards: Path, options: dict[str, Any]
) -> list[tuple[Cell, Deviation | str]]:
    make_task = MAKE_TASK[chunk[0].task]
    alone = {f"alone/{cell.baseline()}": cell.baseline() for cell in chunk}
    missing = {name: lone for name, lone in alone.items() if not (root / name / "summary.json").exists()}
    runs = {name: (1, settings(shards, lone.settings())) for name, lone in missing.items()}
    train_named(root, runs, make_task=make_task)
    runs = {str(cell): (cell.ranks, settings(shards, cell.settings())) for cell in chunk}
    try:
        train_named(root, runs, make_task=make_task, **options)
    except Exception as error:
        if len(chunk) > 1:
            return [found for cell in chunk for found in _run_chunk([cell], root, shards, options)]
        return [(chunk[0], str(error)[-2000:])]
    return [(cell, compare(root / str(cell), root / f"alone/{cell.baseline()}")) for cell in chunk]


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
    """Run each selected cell that has not passed with this code, add it to .parity/results.jsonl, and print a
    summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", nargs="?", default="", help="run the cells with this text in their names")
    text = parser.parse_args().text
    results = Results(Path(".parity"), "cell", lambda result: not result["problems"], code_of=["bert_dp"])
    selected = [cell for cell in cells() if text in str(cell)]
    runnable = [cell for cell in selected if excuse(cell) is None]
    waiting = [cell for cell in runnable if not results.has_passed(str(cell))]
    with tempfile.TemporaryDirectory() as root:
        for number, (cell, outcome) in enumerate(run_cells(waiting, Path(root)), 1):
            problems = outcome.problems(cell) if isinstance(outcome, Deviation) else [outcome]
            facts = dataclasses.asdict(outcome) if isinstance(outcome, Deviation) else {}
            results.add({"cell": str(cell), **facts, "problems": problems})
            print(f"{number}/{len(waiting)} {cell}: {'; '.join(problems) or 'equal'}", flush=True)
    newest = [results.newest[str(cell)] for cell in runnable]
    excused = collections.Counter(excuse(cell) for cell in selected)
    failed = [line for line in newest if line["problems"]]
    print(f"{len(newest)} cells ran, {len(failed)} failed; not run:")
    for reason, count in excused.items():
        if reason is not None:
            print(f"{count:4} {reason}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
