"""Choose the runs of a scaling benchmark, and check them all before the first one starts."""

import dataclasses
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bert_dp.config import BUDGETS, Config, ConfigError, Issue, batch_layout, engine_facts
from launcher.machine.environment import Environment
from launcher.run.train import check_memory
from launcher.run.trials import timed_config, trial_precision
from launcher.scale.models import CellKind, GridCell, Mode

OVERRIDDEN = {
    "checkpoint.": "measured runs save no checkpoints",
    "eval.": "measured runs do not evaluate",
    "log.": "the benchmark sets the logging of its runs",
    "batch.ramp_": "each cell has a constant batch",
    "parallel.engine": "set by --engines",
    "parallel.zero_stage": "set by --engines",
    "parallel.tensor": "set by --tensor",
    **{f"schedule.{name}": "set by --steps" for name in BUDGETS},
}
"""Reason why the benchmark overrides a setting, keyed by a prefix of the setting's name."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Options of `bert-dp scale`."""

    gpus: tuple[int, ...]
    modes: tuple[Mode, ...]
    engines: tuple[str, ...]
    tensor: tuple[int, ...]
    launcher: str
    repeats: int
    steps: int  # timed optimizer steps per run
    warm_up: int  # untimed steps at the start, which fill caches and memory pools
    accumulation: int | None  # micro batches per replica and step in weak mode; None means 1


def run_dir(out: Path, cell: GridCell, repeat: int) -> Path:
    """Return the run directory of one repeat of a cell."""
    return out / "runs" / f"{cell.id}-r{repeat}"


class Grid:
    """Cells of a benchmark for one configuration, and the issues that prevent other cells from running.

    Weak mode: each rank keeps its micro batch and accumulation, so the global batch grows with the number of
    ranks. Strong mode: the global batch stays as configured, so accumulation shrinks as ranks are added.
    Each mode has two baselines on one rank, `single` and ddp. For each larger number of ranks, it also has a
    ceiling: one independent copy of the training per rank, with as many samples per rank as a data-parallel
    run. A ceiling is omitted if its batch cannot be split evenly or if the copies do not fit in memory.
    """

    def __init__(self, config: Config, settings: Settings, machine: Environment, *, on_gpu: bool):
        self.config, self.settings, self.on_gpu, self._machine = config, settings, on_gpu, machine
        engines = [engine.partition("-")[0] for engine in settings.engines]
        self.precision = trial_precision(config, machine, engines, on_gpu=on_gpu)  # precision of every cell
        self.cells: list[GridCell] = []
        self.issues: list[Issue] = []
        for mode in settings.modes:
            self._add_mode(mode)

    def _add_mode(self, mode: Mode) -> None:
        self._add(mode, "run", "single", 1)
        self._add(mode, "run", "ddp", 1)
        for ranks in self.settings.gpus:
            for engine in self.settings.engines:
                for tensor in self.settings.tensor if ranks > 1 else (1,):
                    if (engine, ranks) != ("ddp", 1):
                        self._add(mode, "run", engine, ranks, tensor)
            if ranks > 1:
                self._add(mode, "ceiling", "independent", ranks)

    def _add(self, mode: Mode, kind: CellKind, engine: str, ranks: int, tensor: int = 1) -> None:
        """Add a cell, or the issues that prevent it from running. Omit a ceiling that cannot run."""
        split = f"-tp{tensor}" if tensor > 1 else ""
        cell_id = f"{mode}-{engine if kind == 'run' else kind}-n{ranks}{split}"
        try:
            config = self._config(engine, tensor, self._global_size(mode, ranks, tensor))
            layout = batch_layout(config, ranks)
            memory = check_memory(config, ranks, self._machine, on_gpu=self.on_gpu)
            # compiled GPU steps need less memory than estimated, so check only the model state
            if issues := memory.impossible() or ([] if self.on_gpu else memory.issues()):
                raise ConfigError(issues)
        except ConfigError as error:
            if kind != "ceiling":
                where = f" (cell {cell_id})"
                self.issues += [dataclasses.replace(i, message=i.message + where) for i in error.issues]
            return
        self.cells.append(
            GridCell(
                id=cell_id,
                mode=mode,
                kind=kind,
                engine=engine,
                world_size=ranks,
                tensor=tensor,
                micro_batch=layout.micro_size,
                accumulation=layout.grad_accum_steps,
                global_batch=layout.global_size,
            )
        )

    def _global_size(self, mode: Mode, ranks: int, tensor: int) -> int:
        batch = self.config.batch
        if mode == "strong":
            return batch.global_size
        if ranks % tensor:  # each replica consists of `tensor` ranks
            message = f"{tensor} does not divide the number of ranks, {ranks}"
            raise ConfigError([Issue("--tensor", "does_not_divide", message, tensor, "--nproc")])
        return batch.micro_size * (self.settings.accumulation or 1) * (ranks // tensor)

    def _config(self, engine: str, tensor: int, global_size: int) -> Config:
        """Return the user's configuration with a cell's engine, batch and number of steps."""
        name, _, stage = engine.partition("-")
        parallel: dict[str, Any] = {"engine": name, "tensor": tensor}
        if "fsdp_replicas" not in engine_facts(name).settings:
            parallel["fsdp_replicas"] = 1
        if stage:
            parallel["zero_stage"] = int(stage)
        return timed_config(
            self.config,
            on_gpu=self.on_gpu,
            steps=self.settings.warm_up + self.settings.steps,
            global_size=global_size,
            micro_size=self.config.batch.micro_size,
            parallel=parallel,
            precision=self.precision,
        )

    def config_of(self, cell: GridCell) -> Config:
        """Return the training configuration of a cell."""
        return self._config(cell.engine, cell.tensor, cell.global_batch)

    def overridden(self, overrides: Sequence[str]) -> list[str]:
        """Return a warning for each of the user's overrides (`a.b=value`) that has no effect on any cell."""
        reasons = dict(OVERRIDDEN)
        if "strong" not in self.settings.modes:
            reason = "in weak mode, the global batch is micro batch x accumulation x replicas"
            reasons["batch.global_size"] = reason
        return [
            f"{name} has no effect: {reason}"
            for name in (item.partition("=")[0].strip() for item in overrides)
            for start, reason in reasons.items()
            if name.startswith(start)
        ]

    def order(self) -> Iterator[tuple[GridCell, int]]:
        """Yield each (cell, repeat) in execution order, which is the same each time the command starts.

        Cells are shuffled for each repeat, so that a drift in the machine's speed affects all cells alike.
        """
        draw = random.Random(len(self.cells))  # noqa: S311 (not used for security)
        for repeat in range(self.settings.repeats):
            for cell in draw.sample(self.cells, len(self.cells)):
                yield cell, repeat
