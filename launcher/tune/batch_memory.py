"""The memory of a batch search: which sizes fit, by the line, by a pilot and by real steps at the limit."""

from __future__ import annotations

import math
from typing import Any

from bert_dp.cost import flops_per_token
from launcher.log import Log
from launcher.report.numbers import format_count, format_gib
from launcher.results import BatchMemory, TriedSize
from launcher.run.trials import TrialsFailed
from launcher.tune.batch_trials import CURVE_SHARE, BatchTrials, Measured, Question

SPARE = 0.1  # of a rank's memory that the choice leaves free
MEMORY_STEPS = 3
PILOT_FLOPS = {"cuda": 1e13, "cpu": 5e10}  # of a micro batch: tens of milliseconds, and a second of a core
VERIFY = (1.0, 0.9, 0.8)  # of the largest predicted micro batch


class MemorySearch:
    """`memory` is what has been found, also when the search is stopped."""

    def __init__(self, question: Question, trials: BatchTrials, log: Log):
        self.q, self._trials, self._log = question, trials, log
        self.memory = BatchMemory(limit_gib=question.limit_gib, limit_of=question.limit_of, spare=SPARE)

    def run(self) -> list[int]:
        """The sizes that fit. Raises Stopped, and TrialsFailed when none does."""
        self._remember(line=self._trials.count_memory())
        self._pilot()
        return self._verified(self._predicted_to_fit())

    def _pilot(self) -> None:
        """A few real steps with all ranks: what the line does not count, and what a sequence costs."""
        micro, smallest = self._pilot_size(), self.q.sizes[0]
        measured = self._measure("pilot", micro)
        if measured.status == "oom" and micro > smallest:
            self.note(micro, measured)
            self._log(f"memory: micro batch {micro}: {measured.status}")
            micro, measured = smallest, self._measure("pilot-smallest", smallest)
        if measured.run is None:
            raise TrialsFailed(f"micro batch {micro} does not run: {measured.why}")
        self.note(micro, measured)
        steps_s, peak = measured.run.step_s, max(measured.peak_gib)
        self._trials.startup_s = max(0.0, measured.seconds - sum(steps_s))
        self._trials.sequence_s = min(steps_s) / self._samples(micro)
        self._remember(constant_gib=peak - self.memory.predicted_gib(micro))
        start, sequence = self.memory.predicted_gib(0), self.memory.predicted_gib(1)
        self._log(
            f"memory: {format_gib(start)} + {sequence - start:.4f} GiB a sequence; micro batch {micro} took "
            f"{format_gib(peak)}"
        )

    def _pilot_size(self) -> int:
        """Large enough to keep the device busy, so that its rate tells what others will take; half of the
        memory at most, by the line alone."""
        config = self.q.config
        sequence = config.data.sequence_length
        flops = flops_per_token(config.model, sequence, config.objective.mask_rate) * sequence
        room = math.inf if self.q.limit_gib is None else self.q.limit_gib / 2
        busy = PILOT_FLOPS["cuda" if self.q.on_gpu else "cpu"] / flops
        fit = [size for size in self.q.sizes if size <= busy and self.memory.predicted_gib(size) <= room]
        return max(fit, default=self.q.sizes[0])

    def _predicted_to_fit(self) -> list[int]:
        """The sizes that the memory allows by the line."""
        limit = self.q.limit_gib
        if limit is None:
            return list(self.q.sizes)
        most = self.memory.largest_size()
        self._remember(predicted_limit=most)
        fitting = [size for size in self.q.sizes if size <= most]
        if not fitting:
            smallest = self.q.sizes[0]
            raise TrialsFailed(
                f"micro batch {smallest} takes {format_gib(self.memory.predicted_gib(smallest))} of the "
                f"{format_gib(limit)} that a rank may use, of which {100 * SPARE:.0f} % stay free; use "
                "zero1 or fsdp, parallel.activation_checkpointing, more ranks, or a smaller model"
            )
        self._log(
            f"memory: {format_gib(limit)} a rank ({self.q.limit_of}) allow micro batch {format_count(most)} "
            f"with {100 * SPARE:.0f} % spare"
        )
        return fitting

    def _verified(self, fitting: list[int]) -> list[int]:
        """Where memory limits: those of the sizes that real steps at the predicted limit, then at 0.9 and 0.8
        of it, show to fit."""
        predicted = self.memory.predicted_limit
        if predicted is None or fitting[-1] == self.q.sizes[-1]:
            return fitting
        for micro in (max(1, int(share * predicted)) for share in VERIFY):
            seconds = (MEMORY_STEPS + 1) * self._trials.step_s(self._samples(micro))
            if seconds > self._trials.left(CURVE_SHARE) / 3:
                self._log(f"memory: real steps at micro batch {micro} do not fit the budget; not verified")
                return fitting
            measured = self._measure(f"verify-{micro}", micro)
            self.note(micro, measured)
            self._log(f"memory: micro batch {micro}: {measured.status}")
            if measured.status == "ok":
                self._remember(verified=micro)
                break
        largest = self.memory.verified or int(VERIFY[-1] * predicted) - 1
        return [size for size in fitting if size <= largest] or fitting[:1]

    def _measure(self, name: str, micro: int) -> Measured:
        trial = self._trials.trial(name, micro, self._samples(micro), MEMORY_STEPS)
        return self._trials.measure(trial, 0)

    def _samples(self, micro: int) -> int:
        """Sequences of a step: it accumulates once."""
        return 2 * micro * self.q.dp

    def note(self, micro: int, measured: Measured) -> None:
        """The memory of a trial; nothing is predicted before the pilot has run."""
        peaks, is_piloted = measured.peak_gib, self.memory.constant_gib is not None
        tried = TriedSize(
            micro_batch=micro,
            status=measured.status,
            predicted_gib=self.memory.predicted_gib(micro) if is_piloted else None,
            measured_gib=max(peaks, default=None),
            rank=peaks.index(max(peaks)) if peaks else None,
        )
        self._remember(tried=[*self.memory.tried, tried])

    def _remember(self, **facts: Any) -> None:
        self.memory = self.memory.model_copy(update=facts)
