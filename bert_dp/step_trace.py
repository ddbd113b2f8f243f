"""torch.profiler over steps of a run: RUN/profile/rank-N.json.gz, a trace for Perfetto, and rank-N.json."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bert_dp import record
from bert_dp.config.profile import ProfilePlan
from bert_dp.dist import Comm
from bert_dp.heartbeat import HeartbeatWriter
from bert_dp.lines import WriteErrors
from bert_dp.metrics import Meter
from bert_dp.record.models import ProfiledOperator, ProfileFile

MOST_OPERATORS = 20


class StepTrace:
    """Every rank has one; those that the plan names record. Without a plan (None) nobody does."""

    def __init__(
        self,
        plan: ProfilePlan | None,
        comm: Comm,
        device: torch.device,
        run_dir: Path,
        heartbeat: HeartbeatWriter,
        write_errors: WriteErrors,
    ):
        self._plan, self._comm, self._device, self._folder = plan, comm, device, run_dir / "profile"
        self._heartbeat, self._write_errors = heartbeat, write_errors
        self._profiler: Any = None
        self._begun_s = 0.0
        self._first: int | None = None
        """The first step that is being recorded."""
        self.steps: list[int] | None = None
        """First and last step that was recorded, on whichever rank."""

    def reached(self, step: int, meter: Meter, *, at_end: bool = False) -> None:
        """Between steps, when `step` of them are done: begin or end where the plan says so, as no part of a
        step's time; at the run's end, end in any case. Collective."""
        plan, first = self._plan, self._first
        if plan is None:
            return
        if first is None:
            due = plan.first - 1 <= step < plan.last and not at_end
        else:
            due = step == plan.last or at_end
        if not due:
            return
        self._heartbeat.enter("save", step)  # a trace of many operators takes long to write
        with meter.paused():
            if first is None:
                self._begin(step + 1, plan)
            else:
                self._end(first, step)
            self._comm.barrier()

    def _begin(self, first: int, plan: ProfilePlan) -> None:
        self._first = first
        if self._comm.world.rank in plan.ranks:
            on_gpu = self._device.type == "cuda"
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
            self._profiler = profile(activities=activities)
            self._profiler.start()
            self._begun_s = time.perf_counter()

    def _end(self, first: int, last: int) -> None:
        wall_s = time.perf_counter() - self._begun_s
        self._first, profiler, self._profiler = None, self._profiler, None
        if profiler is not None:
            profiler.stop()
        if last < first:
            return
        self.steps = [first, last]
        if profiler is not None:
            try:
                self._write(profiler, wall_s, self.steps)
            except OSError as error:  # a full disk ends no run
                self._write_errors.note(error)
                sys.stdout.write(f"warning: the profile could not be written: {error}\n")

    def _write(self, profiler: Any, wall_s: float, steps: list[int]) -> None:
        """Raises OSError."""
        rank, on_gpu = self._comm.world.rank, self._device.type == "cuda"
        self._folder.mkdir(exist_ok=True)
        trace = self._folder / f"rank-{rank}.json.gz"
        write_trace(profiler, trace)
        facts = ProfileFile(
            rank=rank,
            steps=steps,
            device=self._device.type,
            wall_s=wall_s,
            idle_share=idle_share(profiler.events(), on_gpu, wall_s),
            operators=top_operators(profiler.key_averages(), on_gpu),
            trace=trace.name,
        )
        record.write_json(trace.with_suffix("").with_suffix(".json"), facts.model_dump(mode="json"))


def write_trace(profiler: Any, path: Path) -> None:
    """Whole or not at all under its name. Raises OSError."""
    temporary = path.with_name(f".{path.name.removesuffix('.json.gz')}.tmp.json.gz")
    try:
        profiler.export_chrome_trace(str(temporary))
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def idle_share(events: Iterable[Any], on_gpu: bool, wall_s: float) -> float:
    """The share of `wall_s` in which the GPU ran no kernel, copy or fill; on a CPU, in which this rank was in
    no operator or collective."""
    device = DeviceType.CUDA if on_gpu else DeviceType.CPU
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == device and not event.is_user_annotation
    )
    busy_us, until = 0.0, float("-inf")
    for start, end in spans:
        busy_us += max(0.0, end - max(start, until))
        until = max(until, end)
    return max(0.0, 1 - busy_us / 1e6 / wall_s)  # two clocks


def top_operators(averages: Iterable[Any], on_gpu: bool) -> list[ProfiledOperator]:
    """The operators with the most time of their own, on the GPU or else on the CPU, without what they call. A
    kernel counts for the operator that launched it, and stands in no line of its own."""
    operators = [
        ProfiledOperator(
            name=str(each.key),
            calls=each.count,
            self_s=(each.self_device_time_total if on_gpu else each.self_cpu_time_total) / 1e6,
        )
        for each in averages
        if each.device_type == DeviceType.CPU and not each.is_user_annotation
    ]
    ranked = sorted(operators, key=lambda operator: operator.self_s, reverse=True)
    return [operator for operator in ranked[:MOST_OPERATORS] if operator.self_s > 0]
