"""The trials of `tune batch`: one real step for the memory, runs for the curve, one for the noise scale."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bert_dp import record
from bert_dp.config import ConfigError, batch_layout, dump_config
from bert_dp.cost import GIB, flops_per_token
from bert_dp.record.models import NoiseScale
from launcher import results
from launcher.log import Log
from launcher.report.numbers import format_count, format_gib, format_si
from launcher.results import (
    BatchChoice,
    BatchMemory,
    Drift,
    Goodput,
    MemoryLineFile,
    Noise,
    NoisePair,
    SizeResult,
    SizeStatus,
    TriedSize,
)
from launcher.run.read_run import cause, failure_kind, read_summary
from launcher.run.trials import Runner, Trial
from launcher.tune import curve, sizes
from launcher.tune.batch_trials import BatchTrials, Question, peak_gib
from launcher.tune.curve import Rate
from launcher.tune.sizes import MemoryLine

FEWEST_STEPS, MOST_STEPS = 6, 60  # timed, of a run
NOISE_STEPS = 400
FEWEST_NOISE_STEPS = 60  # 50 must be left once skipped ones are out
MOST_RUNS = 5  # of one size
CURVE_SHARE, SETTLE_SHARE = 0.7, 0.85  # of the budget, for the first round and until the choice is settled
MEMORY_STEPS = 3
PILOT_FLOPS = {"cuda": 1e13, "cpu": 5e10}  # of a micro batch: tens of milliseconds, and a second of a core
VERIFY = (1.0, 0.9, 0.8)  # of the largest predicted micro batch


class NothingFits(Exception):
    """No size could be measured; the message says why."""


class BatchSearch:
    """Asks and measures; `facts` is what tune.json holds of it, whole after every step."""

    def __init__(self, question: Question, out: Path, runs: Runner, log: Log):
        self.q, self.out, self._log = question, out, log
        self.runs, self._runner = BatchTrials(question, out, runs), runs
        self._line = MemoryLine(0, 1)
        self._curve: dict[int, SizeResult] = {}
        self._order: list[int] = []
        self._limited_by = "global batch"
        self._fitting: list[int] = []
        self._samples = 0
        self.memory: BatchMemory | None = None
        self.choice: BatchChoice | None = None
        self.noise: Noise | None = None
        self.goodput: Goodput | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """Fields of TuneBatch."""
        measured = any(size.runs or size.status != "ok" for size in self._curve.values())
        return {
            "memory": self.memory,
            "sizes": self.size_results() if measured else None,
            "choice": self.choice,
            "noise": self.noise,
            "goodput": self.goodput,
            "order": list(self._order) if measured else None,
            "trial_samples": self._samples if measured else None,
            "drift": self._drift() if measured else None,
        }

    def run(self) -> None:
        """Raises Stopped for a signal and NothingFits when no size runs."""
        self._describe_memory()
        self._pilot()
        self._fit()
        self._verify()
        self._measure()
        self._noise()

    # --- memory

    def _describe_memory(self) -> None:
        path = self.out / "memory_line.json"
        line = results.find(path, MemoryLineFile)
        if line is None:
            self._log("memory: tracing a step at two sizes (nothing allocated)")
            asked = self._runner.scratch / "memory_line.yaml"
            record.write_text(asked, dump_config(sizes.with_micro(self.q.config, self.q.sizes[0])))
            arguments = [str(asked), str(self.q.ranks), "2", "4"]
            lines = self._runner.helper("bert_dp.measure.memory_line", arguments)
            if not lines:
                raise NothingFits("bert_dp.measure.memory_line failed; its message stands above")
            try:
                line = results.parse(lines[-1], MemoryLineFile, path.name)
            except ConfigError as error:
                raise NothingFits(str(error)) from None
            results.write(path, line)
        self._line = MemoryLine(line.intercept_bytes, line.bytes_per_sequence)
        self.memory = BatchMemory(
            limit_gib=self.q.limit_gib, limit_of=self.q.limit_of, spare=sizes.SPARE, line=line
        )

    def _pilot(self) -> None:
        """A few real steps with all ranks: what the line does not count, and what a sequence costs."""
        micro, smallest = self._pilot_size(), self.q.sizes[0]
        trial = self._memory_trial("pilot", micro)
        outcome = self.runs.run(trial)
        if outcome.status == "oom" and micro > smallest:
            self._note_memory(trial, micro, outcome.status)
            self._log(f"memory: micro batch {micro}: {outcome.status}")
            micro, trial = smallest, self._memory_trial("pilot-smallest", smallest)
            outcome = self.runs.run(trial)
        if outcome.status != "ok":
            raise NothingFits(f"micro batch {micro} does not run: {cause(trial.directory)}")
        run = self.runs.timed(trial, 0, MEMORY_STEPS)
        measured = max(run.peak_gib)
        self._line = self._line.through(micro, measured)
        self.runs.startup_s = max(0.0, outcome.seconds - sum(run.step_s))
        self.runs.sequence_s = min(run.step_s) / trial.config.batch.global_size
        rank = run.peak_gib.index(measured)
        self._tried(TriedSize(micro_batch=micro, status="ok", measured_gib=measured, rank=rank))
        self._remember(constant_gib=self._line.constant / GIB)
        self._log(
            f"memory: {format_gib(self._line.gib(0))} + {self._line.slope / GIB:.4f} GiB a sequence; "
            f"micro batch {micro} took {format_gib(measured)}"
        )

    def _pilot_size(self) -> int:
        """Large enough to keep the device busy, so that its rate tells what others will take; half of the
        memory at most, by the line alone."""
        config = self.q.config
        sequence = config.data.sequence_length
        flops = flops_per_token(config.model, sequence, config.objective.mask_rate) * sequence
        room = math.inf if self.q.limit_gib is None else self.q.limit_gib / 2
        busy = PILOT_FLOPS["cuda" if self.q.on_gpu else "cpu"] / flops
        fit = [size for size in self.q.sizes if size <= busy and self._line.gib(size) <= room]
        return max(fit, default=self.q.sizes[0])

    def _fit(self) -> None:
        """Leave the sizes that the memory allows by the line."""
        self._fitting = list(self.q.sizes)
        if self.q.limit_gib is None:
            return
        most = self._line.largest(self.q.limit_gib)
        self._remember(predicted_limit=most)
        self._fitting = [size for size in self.q.sizes if size <= most]
        if not self._fitting:
            needed, smallest = self._line.gib(self.q.sizes[0]), self.q.sizes[0]
            raise NothingFits(
                f"micro batch {smallest} takes {format_gib(needed)} of the {format_gib(self.q.limit_gib)} "
                f"that a rank may use, of which {100 * sizes.SPARE:.0f} % stay free; use zero1 or fsdp, "
                "parallel.activation_checkpointing, more ranks, or a smaller model"
            )
        if self._fitting[-1] < self.q.sizes[-1]:
            self._limited_by = "memory"
        self._log(
            f"memory: {format_gib(self.q.limit_gib)} a rank ({self.q.limit_of}) allow micro batch "
            f"{format_count(most)} with {100 * sizes.SPARE:.0f} % spare"
        )

    def _verify(self) -> None:
        """Where memory limits: real steps at the predicted limit, then at 0.9 and 0.8 of it."""
        if self._limited_by != "memory" or self._memory.predicted_limit is None:
            return
        predicted = self._memory.predicted_limit
        for share in VERIFY:
            micro = max(1, int(share * predicted))
            if self.runs.step_s(2 * micro * self.q.dp) * (MEMORY_STEPS + 1) > self.runs.left(CURVE_SHARE) / 3:
                self._log(f"memory: real steps at micro batch {micro} do not fit the budget; not verified")
                return
            trial = self._memory_trial(f"verify-{micro}", micro)
            status = self.runs.judged(trial, self.runs.run(trial).status, 0, MEMORY_STEPS)
            self._note_memory(trial, micro, status)
            self._log(f"memory: micro batch {micro}: {status}")
            if status == "ok":
                self._remember(verified=micro)
                break
        largest = self._memory.verified or int(VERIFY[-1] * predicted) - 1
        self._fitting = [size for size in self._fitting if size <= largest] or self._fitting[:1]

    def _memory_trial(self, name: str, micro: int) -> Trial:
        return self.runs.trial(name, micro, 2 * micro * self.q.dp, MEMORY_STEPS)

    @property
    def _memory(self) -> BatchMemory:
        return self.memory or BatchMemory()

    def _remember(self, **facts: Any) -> None:
        self.memory = self._memory.model_copy(update=facts)

    def _tried(self, size: TriedSize) -> None:
        self._remember(tried=[*self._memory.tried, size])

    def _note_memory(self, trial: Trial, micro: int, status: SizeStatus) -> None:
        peak, rank = None, None
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            peaks = peak_gib(trial.directory, self.q.ranks)
            peak, rank = max(peaks), peaks.index(max(peaks))
        predicted = self._line.gib(micro)
        self._tried(
            TriedSize(micro_batch=micro, status=status, predicted_gib=predicted, measured_gib=peak, rank=rank)
        )

    # --- throughput

    def _measure(self) -> None:
        """Each size once in random order, the first once more at the end; then those that are still open."""
        chosen, samples = self._affordable()
        self._samples = samples
        self._curve = {
            micro: SizeResult(
                micro_batch=micro,
                accumulation=self.q.config.batch.global_size // (micro * self.q.dp),
                trial_accumulation=samples // (micro * self.q.dp),
                status="ok",
                predicted_gib=self._line.gib(micro),
            )
            for micro in chosen
        }
        order = random.Random(0).sample(chosen, len(chosen))  # noqa: S311 (an order, no secret)
        self._log(f"throughput: micro batches {', '.join(map(str, chosen))}, {samples} sequences a step")
        for place, micro in enumerate([*order, order[0]] if len(order) > 1 else order):
            self._run_size(micro, f"{place + 1}/{len(order) + (len(order) > 1)}")
        while (rates := self.rates()) and len(rates) > 1 and (unsure := curve.open_sizes(rates)):
            unsure = [micro for micro in unsure if len(self._curve[micro].runs) < MOST_RUNS]
            cost = self.runs.startup_s + (self.runs.warm_up + FEWEST_STEPS) * self.runs.step_s(samples)
            if not unsure or self.runs.left(SETTLE_SHARE) < cost * len(unsure):
                break
            for micro in unsure:
                self._run_size(micro, "again")
        self._conclude()

    def _affordable(self) -> tuple[list[int], int]:
        """Sizes, and sequences of a trial's step, that the budget has time for.

        Where steps are what takes the time the largest sizes go, until FEWEST are left; then the smallest:
        they are seldom the choice.
        """
        fitting = self._fitting
        while True:
            kept = sizes.thin(fitting, sizes.MOST)
            samples = sizes.samples_per_step(kept, self.q.dp)
            steps_s = (self.runs.warm_up + FEWEST_STEPS) * self.runs.step_s(samples)
            cost = self.runs.startup_s + steps_s
            count = int(self.runs.left(CURVE_SHARE) / cost) - 2  # the first again, and one that is close
            few = len(fitting) <= sizes.FEWEST and len(fitting) * steps_s <= self.runs.left(CURVE_SHARE)
            if count >= sizes.FEWEST or few or len(fitting) == 1 or steps_s < self.runs.startup_s:
                return kept[-max(count, sizes.FEWEST) :], samples
            fitting, self._limited_by = fitting[:-1], "budget"

    def _run_size(self, micro: int, place: str) -> None:
        size = self._curve[micro]
        if size.status != "ok":
            return
        self._order.append(micro)
        runs = len(self._curve) + 4 - len(self._order)
        each = self.runs.left(CURVE_SHARE) / max(2, runs) - self.runs.startup_s
        steps = int(each / self.runs.step_s(self._samples)) - self.runs.warm_up
        steps = min(MOST_STEPS, max(FEWEST_STEPS, steps))
        trial = self.runs.trial(
            f"micro-{micro}-r{len(size.runs)}", micro, self._samples, self.runs.warm_up + steps
        )
        status = self.runs.judged(trial, self.runs.run(trial).status, self.runs.warm_up, steps)
        self._note_memory(trial, micro, status)
        if status != "ok":
            why = self.runs.why(trial, status)
            kind = failure_kind(trial.directory) if status in ("oom", "failed") else None
            lost = {"status": status, "why": why, "failure_kind": kind}
            self._curve[micro] = size.model_copy(update=lost)
            self._log(f"[{place}] micro batch {micro}: {status}: {why}")
        else:
            run = self.runs.timed(trial, self.runs.warm_up, steps)
            size.runs.append(run)
            now = self._rate(size)
            self.runs.sequence_s = min(
                self.runs.sequence_s, sum(run.step_s) / len(run.step_s) / self._samples
            )
            speed, peak = format_si(now.median, "sequences/s"), format_gib(max(run.peak_gib))
            self._log(f"[{place}] micro batch {micro}: {speed}, {steps} steps, peak {peak}")
        self._conclude()

    def rates(self) -> list[Rate]:
        """Of every size that ran, ascending."""
        return [
            self._rate(size) for _, size in sorted(self._curve.items()) if size.status == "ok" and size.runs
        ]

    def _rate(self, size: SizeResult) -> Rate:
        return curve.rate(size, self._samples, self.q.config.batch.global_size)

    def _conclude(self) -> None:
        rates = self.rates()
        if not rates or any(size.status == "ok" and not size.runs for size in self._curve.values()):
            return  # no choice from a part of the first round
        choice = curve.choose(rates)
        micro, why = choice.micro_batch, choice.why
        if micro == min(self._curve) > self.q.sizes[0]:
            why = f"{why}; smaller ones were not tried"
        layout = batch_layout(sizes.with_micro(self.q.config, micro), self.q.ranks)
        accumulation = layout.grad_accum_steps
        decided = {"why": why, "limited_by": self._limited_by, "accumulation": accumulation}
        self.choice = choice.model_copy(update=decided)
        parts = sizes.parts_at(self._memory.line.parts, micro) if self._memory.line else {}
        self._remember(parts_gib={"program and libraries": self._line.constant / GIB, **parts})

    def size_results(self) -> list[SizeResult]:
        """Every size so far, ascending."""
        rates = {rate.micro: rate for rate in self.rates()}
        best = max((rate.median for rate in rates.values()), default=math.nan)
        sizes_ = []
        for micro, size in sorted(self._curve.items()):
            measured: dict[str, Any] = {}
            if (rate := rates.get(micro)) is not None:
                measured = {
                    "samples_per_s": rate.median,
                    "samples_per_s_ci95": [rate.low, rate.high],
                    "relative": rate.median / best,
                }
            peaks = [peak for run in size.runs for peak in run.peak_gib]
            measured["measured_gib"] = max(peaks, default=None)
            sizes_.append(size.model_copy(update=measured))
        return sizes_

    def _drift(self) -> Drift | None:
        """The size that ran first, against its run at the end of the first round."""
        runs = self._curve[self._order[0]].runs if self._order else []
        if len(runs) < 2:
            return None
        first, last = (self._samples * len(run.step_s) / sum(run.step_s) for run in runs[:2])
        return Drift(micro_batch=self._order[0], first=first, last=last, ratio=last / first)

    # --- noise scale and goodput

    def _noise(self) -> None:
        choice = self.choice
        if choice is None:
            whys = [f"micro batch {size.micro_batch}: {size.why}" for size in self._curve.values()]
            raise NothingFits("; ".join(whys))
        micro, config = choice.micro_batch, self.q.config
        if self.q.dp == 1 and choice.accumulation == 1:  # two batches are compared
            micro = max((size for size in self.q.sizes if size < micro), default=micro)
        step_s = config.batch.global_size / choice.samples_per_s
        steps = max(1, min(NOISE_STEPS, int((self.runs.left(1.0) - self.runs.startup_s) / step_s)))
        trial = self.runs.trial("noise", micro, config.batch.global_size, steps, noise=True)
        why = self._no_noise(trial, steps)
        if why is not None:
            self.noise = Noise(verdict="inconclusive", why=why)
            self._log(f"noise scale: not measured: {why}")
            return
        self._log(f"noise scale: {steps} steps of the declared batch")
        status = self.runs.run(trial).status
        summary = read_summary(trial.directory)
        estimate = summary.noise_scale if summary else None
        if status != "ok" or estimate is None:
            estimate = NoiseScale(verdict="inconclusive", why=self.runs.why(trial, status))
        lines = record.read_lines(trial.directory / "noise.jsonl")
        self.noise = Noise(
            **estimate.model_dump(),
            of_steps=steps,
            init_from=config.run.init_from,
            pairs=[NoisePair.model_validate(line) for line in lines],
        )
        if estimate.noise_scale is not None and estimate.interval is not None:
            self.goodput = self._goodput(choice, estimate.noise_scale, estimate.interval)

    def _no_noise(self, trial: Trial, steps: int) -> str | None:
        """Why the noise scale cannot be measured here."""
        try:
            batch_layout(trial.config, self.q.ranks)
        except ConfigError as error:
            return error.issues[0]
        if steps < FEWEST_NOISE_STEPS:
            return f"the budget leaves {steps} steps, {FEWEST_NOISE_STEPS} are needed; raise --budget"
        return None

    def _goodput(self, choice: BatchChoice, noise: float, interval: Sequence[float]) -> Goodput:
        config, size = self.q.config, self._curve[choice.micro_batch]
        passes_s, whole_s = curve.parts(size)
        per_pass, declared = size.micro_batch * self.q.dp, config.batch.global_size
        wanted = {per_pass * 2**k for k in range(12)} | {declared}
        wanted = {b for b in wanted if declared / 16 <= b <= declared * 16}
        return curve.goodput(
            micro_s=passes_s / (size.trial_accumulation or 1),
            update_s=whole_s - passes_s,
            per_pass=per_pass,
            global_size=declared,
            noise=noise,
            interval=interval,
            sizes=sorted(wanted),
        )
