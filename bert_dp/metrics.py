"""Device-side sums and timers of the steps since the last log line -> one sync, one gather, one record."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bert_dp.config import BatchLayout
from bert_dp.devices import alloc_retries, peak_memory_gib, synchronize
from bert_dp.dist import Comm
from bert_dp.record import Metrics
from bert_dp.train_state import TrainState

PHASES = ("forward_backward", "optimizer")
TIMED = (*PHASES, "own_work")
STRAGGLER_RATIO = 1.2  # from here on a rank is named
STRAGGLER_STEPS = 10  # over fewer steps nobody is: one pause would name a rank


Mark = Any
"""A point in time: a CUDA event on a GPU, seconds of the clock on a CPU."""


class Timers:
    """Seconds of each step, whole and by phase: CUDA events on a GPU (read at the next drain, no sync)."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._started: dict[str, Mark] = {}
        self._phases: list[tuple[str, Mark, Mark]] = []
        self._finished: list[tuple[list[tuple[str, Mark, Mark]], Mark, Mark, float]] = []
        self.restart()

    def restart(self) -> None:
        """The next step begins here: what lies before it is no part of it."""
        self._step_start, self._host_start = self.mark(), time.perf_counter()

    def start(self, name: str) -> None:
        """From here to `stop` the time counts as `name`, one of TIMED."""
        self._started[name] = self.mark()

    def stop(self, name: str) -> None:
        """The other end of `start`."""
        self._phases.append((name, self._started.pop(name), self.mark()))

    def end_step(self) -> None:
        """A step ends here and the next begins."""
        host_s = time.perf_counter() - self._host_start
        phases, start = self._phases, self._step_start
        if self._cuda and phases and not phases[-1][1].query():
            host_s = 0.0  # the device has not come to the last phase: it does not wait for the host
        self._phases = []
        self.restart()
        self._finished.append((phases, start, self._step_start, host_s))

    def mark(self) -> Mark:
        """Now, on the device's clock."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, begin: Mark, end: Mark) -> float:
        """Seconds; the device must be synchronised."""
        return begin.elapsed_time(end) / 1e3 if self._cuda else end - begin

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block as one of TIMED."""
        self.start(name)
        yield
        self.stop(name)

    def drain(self) -> dict[str, list[float]]:
        """Name -> seconds of each step that has ended since the last drain: TIMED, `step` (the whole step)
        and `host` (until its last operation was enqueued; 0 where a GPU still had most of it before it, as
        the host may then have waited for room in its queue). The device must be synchronised."""
        steps = []
        for phases, begin, end, host_s in self._finished:
            seconds = dict.fromkeys(TIMED, 0.0) | {"step": self.between(begin, end), "host": host_s}
            for name, start, stop in phases:
                seconds[name] += self.between(start, stop)
            steps.append(seconds)
        self._finished.clear()
        return {name: [step[name] for step in steps] for name in (*TIMED, "step", "host")}


def straggler(own_work_s: Sequence[float], steps: int) -> tuple[float | None, dict[str, float] | None]:
    """(ratio of the slowest rank's own work to the median of the others', the straggler or None).

    own_work_s: seconds of each rank over `steps` steps. A straggler is rank, ratio and the seconds per step
    that the others wait for it. (None, None) for a lone rank or before the first step.
    """
    if len(own_work_s) < 2 or not steps:
        return None, None
    slowest = max(own_work_s)
    rank = list(own_work_s).index(slowest)
    others = statistics.median([*own_work_s[:rank], *own_work_s[rank + 1 :]])
    if others <= 0:
        return None, None
    ratio = slowest / others
    if ratio <= STRAGGLER_RATIO or steps < STRAGGLER_STEPS:
        return ratio, None
    return ratio, {"rank": rank, "ratio": ratio, "seconds_per_step": (slowest - others) / steps}


def exposed_waits(waits_s: Sequence[float], phases: Mapping[str, Sequence[float]]) -> list[float]:
    """Seconds of each step in which the device waited for data: a host waits while its GPU still computes,
    and only what the phases leave of the step is lost. `phases`: see `Timers.drain`."""
    busy = zip(*(phases[name] for name in PHASES), strict=True)
    return [
        min(wait, max(0.0, step - sum(parts)))
        for wait, step, parts in zip(waits_s, phases["step"], busy, strict=True)
    ]


class Meter:
    """Accumulates between log lines; `totals` (seconds, of all real steps) feed the summary."""

    def __init__(
        self,
        comm: Comm,
        device: torch.device,
        layout: BatchLayout,
        *,
        tokens_per_sample: float,
        flops_per_token: float,
        peak_flops: float | None,
        skipped: int = 0,
    ):
        """`tokens_per_sample`: without padding; `skipped`: steps that the run has skipped before."""
        self._comm, self._device, self._layout = comm, device, layout
        self._tokens_per_sample = tokens_per_sample
        self._flops_per_token, self._peak_flops = flops_per_token, peak_flops
        self.timers = Timers(device)
        self.totals = dict.fromkeys(("train_s", "data_wait_s", *(f"{p}_s" for p in PHASES)), 0.0)
        self.own_work_s = [0.0] * layout.world_size
        """Seconds of each rank before any reduction, of all real steps."""
        self.total_steps = self.total_samples = self.total_micro = 0
        self.skipped = torch.tensor(skipped, dtype=torch.int64, device=device)
        self._row, self._longest_row = torch.zeros_like(self.skipped), torch.zeros_like(self.skipped)
        self.steps: dict[str, Any] = {}
        """A line of steps/rank-N.jsonl: this rank's steps of the last flush."""
        self.skipped_in_a_row = 0
        """The longest row of skipped steps that reached into those of the last line."""
        self.start(0.0)

    def start(self, wait_s: float) -> None:
        """Begin timing; `wait_s` is the stream's data wait so far."""
        self._start = time.perf_counter()
        self._paused_s = 0.0
        self._steps = self._samples = self._micro = 0
        self._waits = [wait_s]
        self.timers.restart()

    def observe(self, loss: Tensor, norm: Tensor, samples: int, grad_accum_steps: int, wait_s: float) -> None:
        """Device scalars of one step: this replica's share of the mean loss, the reduced norm; the stream's
        data wait so far. No sync."""
        self._loss, self._norm = loss, norm
        bad = ~norm.isfinite()
        self.skipped += bad
        self._row.add_(1).mul_(bad)
        torch.maximum(self._longest_row, self._row, out=self._longest_row)
        self._steps += 1
        self._samples += samples
        self._micro += grad_accum_steps * self._layout.dp
        self._waits.append(wait_s)
        self.timers.end_step()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Evaluation and saving are not part of a step's time."""
        synchronize(self._device)
        start = time.perf_counter()
        yield
        synchronize(self._device)
        self._paused_s += time.perf_counter() - start
        self.timers.restart()

    def flush(self, state: TrainState, *, epoch: int, progress: float, elapsed_s: float) -> Metrics:
        """One sync point, one gather; the line is the same on every rank, but for its clock. Collective."""
        synchronize(self._device)
        ranks = self._gather(state.step, time.perf_counter() - self._start - self._paused_s)
        loss = ranks[:: self._layout.tensor, 0].sum().item()  # the ranks of a replica hold the same share
        memory = ranks[:, 1].max().item()
        names = ("data_wait_s", "forward_backward_s", "optimizer_s")
        split = dict(zip(names, ranks[0, 2:5].tolist(), strict=True))
        self.own_work_s = [s + t for s, t in zip(self.own_work_s, ranks[:, 5].tolist(), strict=True)]
        seconds = ranks[0, 6].item()
        self.totals["train_s"] += seconds
        for name, value in split.items():
            self.totals[name] += value
        self.total_steps += self._steps
        self.total_samples += self._samples
        self.total_micro += self._micro
        rates = self.rates(self._steps, self._samples, self._micro, seconds)
        line = Metrics(
            step=state.step,
            samples=state.samples,
            tokens=self.tokens(state.samples),
            epoch=epoch,
            progress=progress,
            loss=loss,
            lr=state.lr,
            grad_norm=float(self._norm),
            global_batch=state.global_batch,
            micro_batch=self._layout.micro_size,
            accumulation=state.global_batch // self._layout.samples_per_micro_step,
            world_size=self._layout.world_size,
            step_time_s=seconds / self._steps,
            **rates,
            **{name: value / self._steps for name, value in split.items()},
            peak_memory_gib=memory,
            elapsed_s=elapsed_s,
            skipped_steps=int(self.skipped),
        )
        self.skipped_in_a_row = int(self._longest_row)
        self._longest_row.zero_()
        self.start(self._waits[-1])
        return line

    def _gather(self, step: int, seconds: float) -> Tensor:
        """[N, 7] of every rank since the last line: loss share, peak memory in GiB, and seconds of data wait,
        TIMED and all. Leaves this rank's own steps in `steps`."""
        phases, memory_gib = self.timers.drain(), peak_memory_gib(self._device)
        waits = exposed_waits([b - a for a, b in itertools.pairwise(self._waits)], phases)
        parts = {f"{name}_s": each for name, each in phases.items()}
        self.steps = {
            "step": step,
            "data_wait_s": waits,
            **parts,
            "peak_memory_gib": memory_gib,
            "alloc_retries": alloc_retries(self._device),
        }
        sums = [sum(phases[name]) for name in TIMED]
        return self._comm.all_gather([float(self._loss), memory_gib, sum(waits), *sums, seconds])

    def tokens(self, samples: int) -> int:
        """Tokens of so many samples; examples that differ in length count as if each had the mean length."""
        return round(samples * self._tokens_per_sample)

    def rates(self, steps: int, samples: int, micro: int, seconds: float) -> dict[str, Any]:
        """Throughput over all replicas; `micro` = micro-batch steps summed over replicas."""
        tokens_per_s = samples * self._tokens_per_sample / seconds
        per_gpu = tokens_per_s / self._layout.world_size
        return {
            "steps_per_s": steps / seconds,
            "global_steps_per_s": micro / seconds,
            "samples_per_s": samples / seconds,
            "tokens_per_s": tokens_per_s,
            "tokens_per_s_per_gpu": per_gpu,
            "mfu": per_gpu * self._flops_per_token / self._peak_flops if self._peak_flops else None,
        }

    def total_rates(self) -> dict[str, Any]:
        """Rates over all real steps of this process; all None before the first flush."""
        if not self.total_steps:
            return dict.fromkeys(self.rates(1, 1, 1, 1.0))
        return self.rates(self.total_steps, self.total_samples, self.total_micro, self.totals["train_s"])


# What torch's DDP counts of its own reductions is private to torch, so every reader may find nothing.
DDP_SECONDS = {
    "comm_s": "avg_backward_comm_time",
    "overlap_s": "avg_backward_compute_comm_overlap_time",
    "compute_s": "avg_backward_compute_time",
}


def sample_communication(model: Any, every_steps: int) -> None:
    """Let DDP time one step in so many, beside its first ten; on a GPU each costs a synchronisation."""
    choose = getattr(model, "_set_ddp_runtime_logging_sample_rate", None)
    if choose is not None:
        choose(every_steps)


def exposed_communication_s(model: Any) -> float | None:
    """Seconds of reductions that no backward pass covered, in the step that DDP timed last."""
    data = _ddp_logging_data(model)
    comm, overlap = data.get("backward_comm_time"), data.get("backward_compute_comm_overlap_time")
    return None if comm is None or overlap is None else (comm - overlap) / 1e9


def communication_summary(model: Any) -> dict[str, Any] | None:
    """`ddp` of summary.json; None under other engines."""
    data = _ddp_logging_data(model)
    if not data:
        return None
    sizes = data.get("rebuilt_bucket_sizes") or data.get("bucket_sizes") or ""
    seconds = {name: data[key] / 1e9 if data.get(key) else None for name, key in DDP_SECONDS.items()}
    return {"bucket_bytes": [int(size) for size in sizes.split(",") if size.strip()], **seconds}


def _ddp_logging_data(model: Any) -> dict[str, Any]:
    read = getattr(model, "_get_ddp_logging_data", None)
    return dict(read()) if read is not None else {}
