"""Trials of a batch search: their configuration, their time, and what they have come to."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bert_dp import record
from bert_dp.config import Config, dump_config
from bert_dp.cost import GIB
from bert_dp.record.models import FailureKind
from launcher import results
from launcher.log import Log
from launcher.report.numbers import format_gib
from launcher.results import MemoryLineFile, SizeStatus, TimedRun
from launcher.run.read_run import cause, failure_kind, read_repeat
from launcher.run.trials import Runner, Trial, TrialsFailed, timed_config
from launcher.tune.sizes import with_micro

CURVE_SHARE, SETTLE_SHARE = 0.7, 0.85  # of the budget, for the first round and until the choice is settled
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
    def user_limit_gib(self) -> float | None:
        """The limit where it is the user's."""
        return self.limit_gib if self.limit_of == "--memory" else None

    @property
    def dp(self) -> int:
        """Replicas."""
        return max(1, self.ranks // self.config.parallel.tensor)


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a trial has come to."""

    seconds: float
    """From its start to its end."""
    status: SizeStatus
    why: str = ""
    """Why the status is not ok."""
    failure_kind: FailureKind | None = None
    """Of one that is oom or failed."""
    peak_gib: list[float] = dataclasses.field(default_factory=list)
    """Of each rank; [] where one has not recorded its own."""
    run: TimedRun | None = None
    """Where all steps were taken."""


class BatchTrials:
    """Trials of a search, one after the other.

    `used_s`: seconds of the budget that they took, also in earlier calls; `startup_s`: what a trial takes
    beside its steps; `sequence_s`: what a sequence takes at best.
    """

    def __init__(self, question: Question, runs: Runner, log: Log):
        self.q, self._runs, self._log = question, runs, log
        self.warm_up = 10 if question.on_gpu else 3
        self.used_s = self.startup_s = self.sequence_s = 0.0

    def count_memory(self) -> MemoryLineFile:
        """The line that the memory of a rank follows, counted without running, unless an earlier call has.
        Raises TrialsFailed, and Stopped."""
        path = self._runs.out / "memory_line.json"
        if (line := results.find(path, MemoryLineFile)) is not None:
            return line
        self._log("memory: tracing a step at two sizes (nothing allocated)")
        config = self._runs.scratch / "memory_line.yaml"
        record.write_text(config, dump_config(with_micro(self.q.config, self.q.sizes[0])))
        arguments = [str(config), str(self.q.ranks), "2", "4"]
        lines = self._runs.helper("bert_dp.measure.memory_line", arguments)
        if not lines:
            raise TrialsFailed("bert_dp.measure.memory_line failed; its message stands above")
        line = results.parse(lines[-1], MemoryLineFile, path.name)
        results.write(path, line)
        return line

    def trial(self, name: str, micro: int, samples: int, steps: int, *, noise: bool = False) -> Trial:
        """The user's configuration at this micro batch, for so many steps of `samples` sequences, with
        nothing saved."""
        config = timed_config(
            self.q.config,
            on_gpu=self.q.on_gpu,
            steps=steps,
            global_size=samples,
            micro_size=micro,
            noise_scale=noise,
            precision=self.q.precision,
        )
        limit = self.q.limit_gib
        guard = None if self.q.on_gpu or limit is None else int((limit + GUARD_GIB) * GIB)
        return Trial(self._runs.out / "trials" / name, config, self.q.ranks, data_bytes=guard)

    def measure(self, trial: Trial, warm_up: int) -> Measured:
        """Run it, unless an earlier call has; its steps after the warm-up are timed. Its time counts as used.
        Raises Stopped."""
        outcome, directory = self._runs.run_one(trial), trial.directory
        self.used_s += outcome.seconds
        if outcome.status != "ok":
            return Measured(
                outcome.seconds,
                outcome.status,
                cause(directory),
                failure_kind(directory),
                recorded_peaks(directory, self.q.ranks),
            )
        run = timed_run(trial, warm_up)
        status, why = self._judge(run)
        return Measured(outcome.seconds, status, why, None, run.peak_gib, run)

    def _judge(self, run: TimedRun) -> tuple[SizeStatus, str]:
        """A run that ended well may still have taken too much: over the limit, or the allocator thrashed."""
        limit, peak = self.q.limit_gib, max(run.peak_gib)
        if limit is not None and peak > limit:
            return "over", f"its peak of {format_gib(peak)} is above the {format_gib(limit)} of a rank"
        if run.alloc_retries:
            return "thrash", "the GPU's allocator had to free what it kept to go on"
        return "ok", ""

    def step_s(self, samples: int) -> float:
        """What a step of so many sequences takes, by the best rate seen."""
        return samples * self.sequence_s

    def run_s(self, steps: int, samples: int) -> float:
        """What a trial of so many timed steps takes."""
        return self.startup_s + (self.warm_up + steps) * self.step_s(samples)

    def left(self, share: float) -> float:
        """Seconds of this share of the budget that are not used yet."""
        return max(0.0, share * self.q.budget_s - self.used_s)


def timed_run(trial: Trial, warm_up: int) -> TimedRun:
    """The steps of a whole trial after the warm-up."""
    steps = (trial.config.schedule.steps or 0) - warm_up
    repeat = read_repeat(trial.directory, trial.ranks, warm_up, steps)
    return TimedRun(
        name=trial.name,
        step_s=repeat.parts["step_s"][0],
        forward_backward_s=repeat.parts["forward_backward_s"][0],
        peak_gib=repeat.memory_gib,
        exposed_s=statistics.median(repeat.exposed_s or [0.0]),
        data_wait_s=repeat.parts["data_wait_s"][0],
        alloc_retries=alloc_retries(trial.directory, trial.ranks, warm_up),
    )


def recorded_peaks(directory: Path, ranks: int) -> list[float]:
    """Peak memory of each rank, GiB; [] where one has not recorded its own."""
    peaks = [[line["peak_memory_gib"] for line in step_lines(directory, rank)] for rank in range(ranks)]
    return [max(each) for each in peaks] if all(peaks) else []


def alloc_retries(directory: Path, ranks: int, warm_up: int) -> int | None:
    """How often the GPU's allocator failed and tried again after the warm-up, of the rank with most; None on
    a CPU."""
    retries = []
    for rank in range(ranks):
        lines = [(line["step"], line.get("alloc_retries")) for line in step_lines(directory, rank)]
        counts = [(step, count) for step, count in lines if count is not None]
        if counts:
            before = max(count for step, count in counts if step <= max(warm_up, counts[0][0]))
            retries.append(counts[-1][1] - before)
    return max(retries, default=None)


def step_lines(directory: Path, rank: int) -> Iterator[dict[str, Any]]:
    """What a rank has recorded of its steps."""
    return record.read_lines(directory / "steps" / f"rank-{rank}.jsonl")
