"""The search of `tune batch`: its memory, runs for the throughput curve, one run for the noise scale."""

from __future__ import annotations

import math
import random
import statistics
from typing import Any

from bert_dp import record
from bert_dp.config import Config, ConfigError, batch_layout
from bert_dp.record.models import NoiseScale
from launcher.log import Log
from launcher.report.numbers import format_gib, format_si
from launcher.results import BatchChoice, Drift, Goodput, Noise, NoisePair, SizeResult
from launcher.run.read_run import cause, read_summary
from launcher.run.trials import Runner, TrialsFailed
from launcher.tune import curve, sizes
from launcher.tune.batch_memory import MemorySearch
from launcher.tune.batch_trials import CURVE_SHARE, SETTLE_SHARE, BatchTrials, Question
from launcher.tune.curve import Rate

FEWEST_STEPS, MOST_STEPS = 6, 60  # timed, of a run
NOISE_STEPS = 400
FEWEST_NOISE_STEPS = 60  # 50 must be left once skipped ones are out
MOST_RUNS = 5  # of one size


class BatchSearch:
    """Measures. What follows from the measurements is computed when it is asked for, so that a search that is
    stopped tells what it has come to."""

    def __init__(self, question: Question, runs: Runner, log: Log):
        self.q, self._log = question, log
        self.trials = BatchTrials(question, runs, log)
        self._memory = MemorySearch(question, self.trials, log)
        self._sizes: dict[int, SizeResult] = {}
        """Those of the throughput curve, ascending."""
        self._samples = 0
        """Sequences of a step of their trials."""
        self._order: list[int] = []
        self._limited_by = "global batch"
        self.noise: Noise | None = None

    def run(self) -> None:
        """Raises Stopped for a signal and TrialsFailed when no size runs."""
        self._measure(self._memory.run())
        self._measure_noise()

    @property
    def facts(self) -> dict[str, Any]:
        """Fields of TuneBatch."""
        choice, memory = self.choice(), self._memory.memory
        if choice is not None:
            memory = memory.model_copy(update={"parts_gib": memory.parts_at(choice.micro_batch)})
        return {
            "memory": memory,
            "sizes": self.size_results() if self._order else None,
            "choice": choice,
            "noise": self.noise,
            "goodput": self._goodput(choice),
            "order": self._order or None,
            "trial_samples": self._samples if self._order else None,
            "drift": self._drift(),
        }

    # --- throughput

    def _measure(self, fitting: list[int]) -> None:
        """Each size once in random order, the first once more at the end; then those that are still open."""
        if fitting[-1] < self.q.sizes[-1]:
            self._limited_by = "memory"
        chosen, self._samples = self._affordable(fitting)
        self._sizes = {
            micro: SizeResult(
                micro_batch=micro,
                accumulation=self.q.config.batch.global_size // (micro * self.q.dp),
                trial_accumulation=self._samples // (micro * self.q.dp),
                status="ok",
                predicted_gib=self._memory.memory.predicted_gib(micro),
            )
            for micro in chosen
        }
        order = random.Random(0).sample(chosen, len(chosen))  # noqa: S311 (an order, no secret)
        order += order[:1] if len(order) > 1 else []
        self._log(
            f"throughput: micro batches {', '.join(map(str, chosen))}, {self._samples} sequences a step"
        )
        for place, micro in enumerate(order, 1):
            self._run_size(micro, f"{place}/{len(order)}")
        while again := [m for m in curve.open_sizes(self.rates()) if len(self._sizes[m].runs) < MOST_RUNS]:
            if self.trials.left(SETTLE_SHARE) < len(again) * self.trials.run_s(FEWEST_STEPS, self._samples):
                break
            for micro in again:
                self._run_size(micro, "again")

    def _affordable(self, fitting: list[int]) -> tuple[list[int], int]:
        """Sizes, and sequences of a trial's step, that the budget has time for.

        Where steps are what takes the time the largest sizes go, until FEWEST are left; then the smallest:
        they are seldom the choice.
        """
        while True:
            kept = sizes.thin(fitting, sizes.MOST)
            samples = sizes.samples_per_step(kept, self.q.dp)
            run_s, left_s = self.trials.run_s(FEWEST_STEPS, samples), self.trials.left(CURVE_SHARE)
            steps_s = run_s - self.trials.startup_s
            count = int(left_s / run_s) - 2  # the first again, and one that is close
            few = len(fitting) <= sizes.FEWEST and len(fitting) * steps_s <= left_s
            if count >= sizes.FEWEST or few or len(fitting) == 1 or steps_s < self.trials.startup_s:
                return kept[-max(count, sizes.FEWEST) :], samples
            fitting, self._limited_by = fitting[:-1], "budget"

    def _run_size(self, micro: int, place: str) -> None:
        size, warm_up = self._sizes[micro], self.trials.warm_up
        if size.status != "ok":
            return
        steps = self._steps_of_next_run()
        name = f"micro-{micro}-r{len(size.runs)}"
        trial = self.trials.trial(name, micro, self._samples, warm_up + steps)
        measured = self.trials.measure(trial, warm_up)
        self._order.append(micro)
        self._memory.note(micro, measured)
        run = measured.run
        if run is None or measured.status != "ok":
            facts = {field: getattr(measured, field) for field in ("status", "why", "failure_kind")}
            self._sizes[micro] = size.model_copy(update=facts)
            self._log(f"[{place}] micro batch {micro}: {measured.status}: {measured.why}")
            return
        peak = max(run.peak_gib)
        facts = {"runs": [*size.runs, run], "measured_gib": max(peak, size.measured_gib or 0.0)}
        self._sizes[micro] = size.model_copy(update=facts)
        mean_s = statistics.fmean(run.step_s)
        self.trials.sequence_s = min(self.trials.sequence_s, mean_s / self._samples)
        speed = format_si(self._rate(self._sizes[micro]).median, "sequences/s")
        self._log(f"[{place}] micro batch {micro}: {speed}, {steps} steps, peak {format_gib(peak)}")

    def _steps_of_next_run(self) -> int:
        """Timed ones: what the first round's time has left, shared among its runs and two that may follow."""
        runs = max(2, len(self._sizes) + 3 - len(self._order))
        each_s = self.trials.left(CURVE_SHARE) / runs - self.trials.startup_s
        steps = int(each_s / self.trials.step_s(self._samples)) - self.trials.warm_up
        return min(MOST_STEPS, max(FEWEST_STEPS, steps))

    def rates(self) -> list[Rate]:
        """Of every size that ran, ascending."""
        return [self._rate(size) for size in self._sizes.values() if size.status == "ok" and size.runs]

    def _rate(self, size: SizeResult) -> Rate:
        return curve.rate(size, self._samples, self.q.config.batch.global_size)

    def choice(self) -> BatchChoice | None:
        """None before the end of the first round, and where no size ran."""
        rates = self.rates()
        if not rates or any(size.status == "ok" and not size.runs for size in self._sizes.values()):
            return None
        choice = curve.choose(rates, on_gpu=self.q.on_gpu)
        micro, why = choice.micro_batch, choice.why
        if micro == min(self._sizes) > self.q.sizes[0]:
            why = f"{why}; smaller ones were not tried"
        accumulation = self._sizes[micro].accumulation
        decided = {"why": why, "limited_by": self._limited_by, "accumulation": accumulation}
        return choice.model_copy(update=decided)

    def size_results(self) -> list[SizeResult]:
        """Every size so far, ascending."""
        rates = {rate.micro: rate for rate in self.rates()}
        best = max((rate.median for rate in rates.values()), default=math.nan)
        measured = {
            micro: {
                "samples_per_s": rate.median,
                "samples_per_s_ci95": [rate.low, rate.high],
                "relative": rate.median / best,
            }
            for micro, rate in rates.items()
        }
        return [size.model_copy(update=measured.get(micro, {})) for micro, size in self._sizes.items()]

    def _drift(self) -> Drift | None:
        """The size that ran first, against its run at the end of the first round."""
        runs = self._sizes[self._order[0]].runs if self._order else []
        if len(runs) < 2:
            return None
        first, last = (self._samples / statistics.fmean(run.step_s) for run in runs[:2])
        return Drift(micro_batch=self._order[0], first=first, last=last, ratio=last / first)

    # --- noise scale and goodput

    def _measure_noise(self) -> None:
        choice = self.choice()
        if choice is None:
            whys = [f"micro batch {size.micro_batch}: {size.why}" for size in self._sizes.values()]
            raise TrialsFailed("; ".join(whys))
        micro, config = choice.micro_batch, self.q.config
        if self.q.dp == 1 and choice.accumulation == 1:  # two batches are compared
            micro = max((size for size in self.q.sizes if size < micro), default=micro)
        step_s = config.batch.global_size / choice.samples_per_s
        steps = max(1, min(NOISE_STEPS, int((self.trials.left(1.0) - self.trials.startup_s) / step_s)))
        trial = self.trials.trial("noise", micro, config.batch.global_size, steps, noise=True)
        if (why := self._no_noise(trial.config, steps)) is not None:
            self.noise = Noise(verdict="inconclusive", why=why)
            self._log(f"noise scale: not measured: {why}")
            return
        self._log(f"noise scale: {steps} steps of the declared batch")
        measured = self.trials.measure(trial, 0)
        summary = read_summary(trial.directory)
        estimate = summary.noise_scale if summary else None
        if measured.run is None or estimate is None:
            estimate = NoiseScale(verdict="inconclusive", why=cause(trial.directory))
        lines = record.read_lines(trial.directory / "noise.jsonl")
        self.noise = Noise(
            **estimate.model_dump(),
            of_steps=steps,
            init_from=config.run.init_from,
            pairs=[NoisePair.model_validate(line) for line in lines],
        )

    def _no_noise(self, config: Config, steps: int) -> str | None:
        """Why the noise scale cannot be measured here."""
        try:
            batch_layout(config, self.q.ranks)
        except ConfigError as error:
            return str(error.issues[0])
        if steps < FEWEST_NOISE_STEPS:
            return f"the budget leaves {steps} steps, {FEWEST_NOISE_STEPS} are needed; raise --budget"
        return None

    def _goodput(self, choice: BatchChoice | None) -> Goodput | None:
        """None without a noise scale."""
        noise = self.noise
        if choice is None or noise is None or noise.noise_scale is None or noise.interval is None:
            return None
        size, declared = self._sizes[choice.micro_batch], self.q.config.batch.global_size
        passes_s, step_s = curve.parts(size)
        per_pass = size.micro_batch * self.q.dp
        return curve.goodput(
            micro_s=passes_s / (size.trial_accumulation or 1),
            update_s=step_s - passes_s,
            per_pass=per_pass,
            global_size=declared,
            noise=noise.noise_scale,
            interval=noise.interval,
            sizes=curve.batch_sizes(per_pass, declared),
        )
