"""Trials of a batch search: their configuration, their budget, and what they are worth."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bert_dp import record
from bert_dp.config import Config
from bert_dp.cost import GIB
from launcher.report.numbers import format_gib
from launcher.results import SizeStatus, TimedRun
from launcher.run.read_run import cause, read_repeat
from launcher.run.trials import Outcome, Runner, Trial, timed_config

GUARD_GIB = 1.0  # above a rank's memory: address space that is private and never touched


@dataclasses.dataclass(frozen=True)
class Question:
    """What `bert-dp tune batch` was asked for."""

    config: Config
    ranks: int
    sizes: tuple[int, ...]
    """Micro batches that divide, ascending."""
    budget_s: float
    limit_gib: float | None
    """What a rank may use; None = not known."""
    limit_of: str
    launcher: str
    on_gpu: bool
    precision: str
    """Of every trial."""

    @property
    def asked_gib(self) -> float | None:
        """The limit where it is the user's."""
        return self.limit_gib if self.limit_of == "--memory" else None

    @property
    def dp(self) -> int:
        """Replicas."""
        return max(1, self.ranks // self.config.parallel.tensor)


class BatchTrials:
    """Trials of a search, one after the other.

    `used_s`: seconds of the budget that they took, also in earlier calls; `startup_s`: what a trial takes
    beside its steps; `sequence_s`: what a sequence takes at best.
    """

    def __init__(self, question: Question, out: Path, runs: Runner):
        self.q, self._out, self._runs = question, out, runs
        self.warm_up = 10 if question.on_gpu else 3
        self.used_s = self.startup_s = self.sequence_s = 0.0

    def trial(self, name: str, micro: int, global_size: int, steps: int, *, noise: bool = False) -> Trial:
        """The user's configuration at this batch, for so many steps, with nothing saved."""
        config = timed_config(
            self.q.config,
            on_gpu=self.q.on_gpu,
            steps=steps,
            global_size=global_size,
            micro_size=micro,
            noise_scale=noise,
            precision=self.q.precision,
        )
        limit = self.q.limit_gib
        guard = None if self.q.on_gpu or limit is None else int((limit + GUARD_GIB) * GIB)
        return Trial(self._out / "trials" / name, config, self.q.ranks, data_bytes=guard)

    def run(self, trial: Trial) -> Outcome:
        """Its time counts as used. Raises Stopped."""
        outcome = self._runs.run_one(trial)
        self.used_s += outcome.seconds
        return outcome

    def judged(self, trial: Trial, status: SizeStatus, warm_up: int, steps: int) -> SizeStatus:
        """A run that ended well may still have taken too much: over the limit, or the allocator thrashed."""
        if status != "ok":
            return status
        run = self.timed(trial, warm_up, steps)
        if self.q.limit_gib is not None and max(run.peak_gib) > self.q.limit_gib:
            return "over"
        return "thrash" if run.alloc_retries else "ok"

    def why(self, trial: Trial, status: str) -> str:
        """What a status of `judged` that is not ok means."""
        if status == "over":
            peak = max(peak_gib(trial.directory, self.q.ranks))
            return f"its peak of {format_gib(peak)} is above the {format_gib(self.q.limit_gib)} of a rank"
        if status == "thrash":
            return "the GPU's allocator had to free what it kept to go on"
        return cause(trial.directory)

    def timed(self, trial: Trial, warm_up: int, steps: int) -> TimedRun:
        """Its steps after the warm-up. Raises ValueError or KeyError when its records are not whole."""
        directory = trial.directory
        repeat = read_repeat(directory, self.q.ranks, warm_up, steps)
        parts = repeat.parts
        exposed_s = statistics.median(repeat.exposed_s) if repeat.exposed_s else 0.0
        return TimedRun(
            name=trial.name,
            step_s=parts["step_s"][0],
            forward_backward_s=parts["forward_backward_s"][0],
            peak_gib=repeat.memory_gib,
            exposed_s=exposed_s,
            alloc_retries=alloc_retries(directory, self.q.ranks, warm_up),
        )

    def step_s(self, samples: int) -> float:
        """What a step of so many sequences takes, by the best rate seen."""
        return samples * self.sequence_s

    def left(self, share: float) -> float:
        """Seconds of this share of the budget that are not used yet."""
        return max(0.0, share * self.q.budget_s - self.used_s)


def peak_gib(directory: Path, ranks: int) -> list[float]:
    """Of each rank, as far as it has told."""
    peaks = []
    for rank in range(ranks):
        lines = list(record.read_lines(directory / "steps" / f"rank-{rank}.jsonl"))
        peaks.append(max(float(line["peak_memory_gib"]) for line in lines))
    return peaks


def alloc_retries(directory: Path, ranks: int, warm_up: int) -> int | None:
    """How often the GPU's allocator failed and tried again after the warm-up, of the rank with most; None on
    a CPU."""
    most: int | None = None
    for rank in range(ranks):
        lines = list(record.read_lines(directory / "steps" / f"rank-{rank}.jsonl"))
        counts: Sequence[tuple[int, Any]] = [(line["step"], line.get("alloc_retries")) for line in lines]
        retries = [(step, int(count)) for step, count in counts if count is not None]
        if retries:
            before = max((count for step, count in retries if step <= max(warm_up, retries[0][0])), default=0)
            most = max(most or 0, retries[-1][1] - before)
    return most
