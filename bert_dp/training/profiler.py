"""Run torch.profiler over steps: RUN/profile/rank-N.json.gz, a trace for Perfetto, and rank-N.json."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bert_dp import files
from bert_dp.config.checks import ProfilePlan
from bert_dp.files.models import ProfiledOperator, ProfileFile
from bert_dp.training.distributed import HostCollectives
from bert_dp.training.metrics import Meter
from bert_dp.training.process import HeartbeatWriter, WriteErrors

MOST_OPERATORS = 20


class StepTrace:
    """Profiles the steps and ranks of a plan; every rank has one. Without a plan it does nothing."""

    def __init__(
        self,
        plan: ProfilePlan | None,
        comm: HostCollectives,
        device: torch.device,
        run_dir: Path,
        heartbeat: HeartbeatWriter,
        write_errors: WriteErrors,
    ):
        self._plan, self._comm, self._folder = plan, comm, run_dir / "profile"
        self._on_gpu = device.type == "cuda"
        self._heartbeat, self._write_errors = heartbeat, write_errors
        self._profiler: Any = None
        self._begun_s = 0.0
        self._first: int | None = None
        """The first step that is being recorded."""
        self.steps: list[int] | None = None
        """First and last step that was recorded, on whichever rank."""

    def reached(self, step: int, meter: Meter, *, at_end: bool = False) -> None:
        """Begin or end recording between steps, when `step` of them are done, as the plan says; at the run's
        end, end in any case. No part of a step's time. Collective."""
        plan = self._plan
        if plan is None:
            return
        begins = self._first is None and plan.first - 1 <= step < plan.last and not at_end
        ends = self._first is not None and (step == plan.last or at_end)
        if not (begins or ends):
            return
        self._heartbeat.enter("save", step)  # a trace of many operators takes long to write
        with meter.paused():
            if begins:
                self._first = step + 1
                if self._comm.world.rank in plan.ranks:
                    gpu = [ProfilerActivity.CUDA] if self._on_gpu else []
                    self._profiler = profile(activities=[ProfilerActivity.CPU, *gpu])
                    self._profiler.start()
                    self._begun_s = time.perf_counter()
            else:
                self._end(step)
            self._comm.barrier()

    def _end(self, last: int) -> None:
        wall_s = time.perf_counter() - self._begun_s
        steps, self._first = [self._first or 1, last], None
        if self._profiler is not None:
            self._profiler.stop()
        if last < steps[0]:
            return
        self.steps = steps
        if self._profiler is not None:
            try:
                self._write(wall_s, steps)
            except OSError as error:  # a full disk ends no run
                self._write_errors.note(error)
                sys.stdout.write(f"warning: the profile could not be written: {error}\n")

    def _write(self, wall_s: float, steps: list[int]) -> None:
        """Write the trace, then rank-N.json. Raises OSError."""
        rank = self._comm.world.rank
        self._folder.mkdir(exist_ok=True)
        trace = self._folder / f"rank-{rank}.json.gz"
        self._profiler.export_chrome_trace(str(trace))
        facts = ProfileFile(
            rank=rank,
            steps=steps,
            device="cuda" if self._on_gpu else "cpu",
            wall_s=wall_s,
            idle_share=idle_share(self._profiler.events(), self._on_gpu, wall_s),
            operators=top_operators(self._profiler.key_averages(), self._on_gpu),
            trace=trace.name,
        )
        files.write_json(self._folder / f"rank-{rank}.json", facts.model_dump(mode="json"))


def idle_share(events: Iterable[Any], on_gpu: bool, wall_s: float) -> float:
    """Return the share of `wall_s` in which the GPU ran no kernel, copy or fill; on a CPU, in which this rank
    was in no operator or collective."""
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
    """Return the operators with the most time of their own, without the operators that they call, on the GPU
    or else on the CPU. A kernel counts for the operator that launched it."""
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
