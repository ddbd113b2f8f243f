"""Measure steps, and detect loss spikes, skipped steps and divergence. Each log line costs one device sync
and one gather over the ranks."""

import itertools
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bert_dp.config import METERED, BatchLayout, Config
from bert_dp.files.models import STRAGGLER_RATIO
from bert_dp.training.checkpoint import TrainState
from bert_dp.training.devices import alloc_retries, peak_memory_gib, synchronize
from bert_dp.training.distributed import HostCollectives

PHASES = ("forward_backward", "optimizer")
TIMED = (*PHASES, "compute_before_reduction")
STRAGGLER_STEPS = 10  # minimum number of steps, so that one pause does not make a rank a straggler


Mark = Any  # point in time: a CUDA event on a GPU, seconds on a CPU


class Timers:
    """Timers of steps and their phases, in seconds. On a GPU, they use CUDA events, which `drain` reads."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._phases: list[tuple[str, Mark, Mark]] = []
        self._finished: list[tuple[list[tuple[str, Mark, Mark]], Mark, Mark, float]] = []
        self.restart()

    def restart(self) -> None:
        """Begin the next step now, so that the time since the end of the last step is not counted."""
        self._step_start, self._host_start = self.mark(), time.perf_counter()

    def count(self, name: str, begin: Mark) -> None:
        """Add the time since `begin` to the phase `name`, one of TIMED."""
        self._phases.append((name, begin, self.mark()))

    def end_step(self) -> None:
        """End the step and begin the next one."""
        host_s = time.perf_counter() - self._host_start
        phases, start = self._phases, self._step_start
        if self._cuda and phases and not phases[-1][1].query():
            host_s = 0.0  # the device has not begun the last phase, so it lags behind the host
        self._phases = []
        self.restart()
        self._finished.append((phases, start, self._step_start, host_s))

    def mark(self) -> Mark:
        """Return a mark for the current point in the device's work."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, begin: Mark, end: Mark) -> float:
        """Return the seconds between two marks; the device must be synchronised."""
        return begin.elapsed_time(end) / 1e3 if self._cuda else end - begin

    def drain(self) -> dict[str, list[float]]:
        """Return {name: seconds of each step since the last drain}. The names are those in TIMED, `step` (the
        whole step) and `host` (time to enqueue the step; 0 if the GPU lagged behind, because a full queue may
        then have blocked the host). The device must be synchronised."""
        steps = []
        for phases, begin, end, host_s in self._finished:
            seconds = dict.fromkeys(TIMED, 0.0) | {"step": self.between(begin, end), "host": host_s}
            for name, start, stop in phases:
                seconds[name] += self.between(start, stop)
            steps.append(seconds)
        self._finished.clear()
        return {name: [step[name] for step in steps] for name in (*TIMED, "step", "host")}


def straggler(
    compute_before_reduction_s: Sequence[float], steps: int
) -> tuple[float | None, dict[str, float] | None]:
    """Return the ratio of the slowest rank's compute time to the median of the others', and a description of
    the straggler: its rank, this ratio, and the seconds per step for which the others wait. Both are None if
    the ratio is undefined. The description is also None if the ratio or the number of steps is too small.
    `compute_before_reduction_s`: each rank's compute time in seconds, summed over `steps` steps."""
    if len(compute_before_reduction_s) < 2 or not steps:
        return None, None
    slowest = max(compute_before_reduction_s)
    rank = list(compute_before_reduction_s).index(slowest)
    others = statistics.median([*compute_before_reduction_s[:rank], *compute_before_reduction_s[rank + 1 :]])
    if others <= 0:
        return None, None
    ratio = slowest / others
    if ratio <= STRAGGLER_RATIO or steps < STRAGGLER_STEPS:
        return ratio, None
    return ratio, {"rank": rank, "ratio": ratio, "seconds_per_step": (slowest - others) / steps}


def exposed_waits(waits_s: Sequence[float], phases: Mapping[str, Sequence[float]]) -> list[float]:
    """Return, for each step, the seconds for which the device waited for data. The host may wait while the
    GPU still computes, so a wait is capped at the step's time outside PHASES. `phases`: see Timers.drain."""
    busy = zip(*(phases[name] for name in PHASES), strict=True)
    return [
        min(wait, max(0.0, step - sum(parts)))
        for wait, step, parts in zip(waits_s, phases["step"], busy, strict=True)
    ]


class Meter:
    """Measurements for the next log line and, in `totals` (seconds), for the summary. The dry run (see
    `loop.dry_run`) is not measured. `tokens_per_sample`: mean number of tokens, without padding. `skipped`:
    number of steps skipped before the run was resumed."""

    def __init__(
        self,
        comm: HostCollectives,
        device: torch.device,
        layout: BatchLayout,
        *,
        tokens_per_sample: float,
        flops_per_token: float | None,
        peak_flops: float | None,
        skipped: int = 0,
    ):
        self._comm, self._device, self._layout = comm, device, layout
        self._tokens_per_sample = tokens_per_sample
        self._flops_per_token, self._peak_flops = flops_per_token, peak_flops
        self.timers = Timers(device)
        self.totals = dict.fromkeys(("train_s", "data_wait_s", *(f"{p}_s" for p in PHASES)), 0.0)
        self.compute_before_reduction_s = [0.0] * layout.world_size
        """Each rank's compute time (seconds) before a step's reductions, summed over all measured steps."""
        self.total_steps = self.total_samples = self.total_micro = 0
        self.skipped = torch.tensor(skipped, dtype=torch.int64, device=device)
        self._row = torch.zeros_like(self.skipped)
        self.steps: dict[str, Any] = {}
        """Line for steps/rank-N.jsonl about the steps that the last `flush` covered."""
        self.measured: dict[str, float | None] = {}
        """Those metrics of the last log line that are also shown in summary.json and report.html."""
        self.skipped_in_a_row = 0
        """Number of consecutive skipped steps up to and including the step of the last log line."""
        self.start(0.0)

    def start(self, wait_s: float) -> None:
        """Start timing. `wait_s`: total seconds for which the host has waited for data."""
        self._start = time.perf_counter()
        self._paused_s = 0.0
        self._steps = self._samples = self._micro = 0
        self._waits = [wait_s]
        self.timers.restart()

    def observe(self, loss: Tensor, norm: Tensor, samples: int, grad_accum_steps: int, wait_s: float) -> None:
        """Record one step without a device sync. `loss` (this replica's share of the mean loss) and `norm`
        (of the reduced gradient) are device scalars; `wait_s`: see `start`."""
        self._loss, self._norm = loss, norm
        bad = ~norm.isfinite()
        self.skipped += bad
        self._row.add_(1).mul_(bad)
        self._steps += 1
        self._samples += samples
        self._micro += grad_accum_steps * self._layout.dp
        self._waits.append(wait_s)
        self.timers.end_step()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time spent in the `with` block, such as an evaluation or a save, from step times."""
        synchronize(self._device)
        start = time.perf_counter()
        yield
        synchronize(self._device)
        self._paused_s += time.perf_counter() - start
        self.timers.restart()

    def flush(self, state: TrainState, *, epoch: int, progress: float, elapsed_s: float) -> dict[str, Any]:
        """Return a line of metrics.jsonl. Times and rates are means over the steps since the previous line;
        `lr` and `global_batch` are the last step's. Takes one sync and one gather. Collective."""
        synchronize(self._device)
        ranks = self._gather(state.step, time.perf_counter() - self._start - self._paused_s)
        names = ("data_wait_s", "forward_backward_s", "optimizer_s")
        split = dict(zip(names, ranks[0, 2:5].tolist(), strict=True))
        own = zip(self.compute_before_reduction_s, ranks[:, 5].tolist(), strict=True)
        self.compute_before_reduction_s = [before + seconds for before, seconds in own]
        seconds = ranks[0, 6].item()
        for name, value in {"train_s": seconds, **split}.items():
            self.totals[name] += value
        self.total_steps += self._steps
        self.total_samples += self._samples
        self.total_micro += self._micro
        # to add a metric, add a key here: it then appears in metrics.jsonl, summary.json and report.html
        self.measured = {"grad_norm": float(self._norm)}
        line = {
            "step": state.step,
            "samples": state.samples,
            "tokens": self.tokens(state.samples),
            "epoch": epoch,
            "progress": progress,
            "loss": ranks[:: self._layout.tensor, 0].sum().item(),  # counts one rank per replica
            "lr": state.lr,
            "global_batch": state.global_batch,
            "micro_batch": self._layout.micro_size,
            "accumulation": state.global_batch // self._layout.samples_per_micro_step,
            "world_size": self._layout.world_size,
            "step_time_s": seconds / self._steps,
            **self.rates(self._steps, self._samples, self._micro, seconds),
            **{name: value / self._steps for name, value in split.items()},
            "peak_memory_gib": ranks[:, 1].max().item(),
            "elapsed_s": elapsed_s,
            "skipped_steps": int(self.skipped),
            **self.measured,
        }
        self.skipped_in_a_row = int(self._row)
        self.start(self._waits[-1])
        return line

    def _gather(self, step: int, seconds: float) -> Tensor:
        """Gather seven values per rank [N, 7]: its share of the last step's loss, its peak memory in GiB and,
        for the time since the last line, the seconds spent waiting for data, in each phase in TIMED and in
        total (`seconds`). Also set `self.steps`."""
        phases, memory_gib = self.timers.drain(), peak_memory_gib(self._device)
        waits = exposed_waits([b - a for a, b in itertools.pairwise(self._waits)], phases)
        self.steps = {
            "step": step,
            "data_wait_s": waits,
            **{f"{name}_s": each for name, each in phases.items()},
            "peak_memory_gib": memory_gib,
            "alloc_retries": alloc_retries(self._device),
        }
        sums = [sum(phases[name]) for name in TIMED]
        return self._comm.all_gather([float(self._loss), memory_gib, sum(waits), *sums, seconds])

    def tokens(self, samples: int) -> int:
        """Return the number of tokens in `samples` samples of mean length."""
        return round(samples * self._tokens_per_sample)

    def rates(self, steps: int, samples: int, micro: int, seconds: float) -> dict[str, Any]:
        """Return the throughput of all replicas. `micro`: number of micro batches, over all replicas."""
        tokens_per_s = samples * self._tokens_per_sample / seconds
        per_gpu, peak = tokens_per_s / self._layout.world_size, self._peak_flops
        return {
            "steps_per_s": steps / seconds,
            "global_steps_per_s": micro / seconds,
            "samples_per_s": samples / seconds,
            "tokens_per_s": tokens_per_s,
            "tokens_per_s_per_gpu": per_gpu,
            "mfu": per_gpu * flops / peak if (flops := self._flops_per_token) and peak else None,
        }

    def total_rates(self) -> dict[str, Any]:
        """Return the throughput over all measured steps; every value is None before the first flush."""
        if not self.total_steps:
            return dict.fromkeys(self.rates(1, 1, 1, 1.0))
        return self.rates(self.total_steps, self.total_samples, self.total_micro, self.totals["train_s"])


# The following functions use private counters of torch's DDP, which other versions of torch may lack.


def sample_communication(model: Any, every_steps: int) -> None:
    """Make DDP time the first ten steps, then every `every_steps`-th. On a GPU, a timed step costs a sync."""
    if hasattr(model, "_set_ddp_runtime_logging_sample_rate"):
        model._set_ddp_runtime_logging_sample_rate(every_steps)


def exposed_communication_s(model: Any) -> float | None:
    """Return the seconds of reduction not overlapped by backward in DDP's last timed step; None = unknown."""
    data = _ddp_logging_data(model)
    comm, overlap = data.get("backward_comm_time"), data.get("backward_compute_comm_overlap_time")
    return None if comm is None or overlap is None else (comm - overlap) / 1e9


def bucket_bytes(model: Any) -> list[int]:
    """Return the sizes of DDP's reduction buckets in bytes; empty for other engines."""
    data = _ddp_logging_data(model)
    sizes = data.get("rebuilt_bucket_sizes") or data.get("bucket_sizes") or ""
    return [int(size) for size in sizes.split(",") if size.strip()]


def _ddp_logging_data(model: Any) -> dict[str, Any]:
    return dict(model._get_ddp_logging_data()) if hasattr(model, "_get_ddp_logging_data") else {}


WINDOW = 128  # number of logged losses kept; WINDOW and SIGMAS are from OLMo-core's SkipStepOptimizer
SIGMAS = 6.0
MIN_LOSSES = 16  # logged losses needed for a meaningful standard deviation
FP16_SKIPS = 16  # additional skips allowed in fp16: each one halves the loss scale, from 2^16 down to 1


def is_spike(loss: float, recent: Sequence[float]) -> bool:
    """Return whether a logged loss is more than SIGMAS standard deviations above the mean of `recent`."""
    if len(recent) < MIN_LOSSES or not math.isfinite(loss):  # not finite: the step was skipped
        return False
    return loss > statistics.fmean(recent) + SIGMAS * statistics.pstdev(recent)


def has_diverged(heldout_loss: float, step: int) -> str | None:
    """Return the reason to stop if the held-out loss is not finite, else None."""
    if math.isfinite(heldout_loss):
        return None
    return f"the held-out loss after step {step} is {heldout_loss}: the model has diverged; lower optim.lr"


def too_many_skipped(config: Config, precision: str, in_a_row: int, step: int, lr: float) -> str | None:
    """Return the reason to stop if too many consecutive steps were skipped because the gradient was not
    finite, else None. `step`: the last skipped step; `lr`: its learning rate. Called once per log line,
    because reading `in_a_row` from the device needs a sync."""
    most = config.run.max_skipped_in_a_row
    if in_a_row < most + (FP16_SKIPS if precision == "fp16" else 0):
        return None
    return (
        f"{in_a_row} steps in a row up to step {step} were skipped because the gradient was not finite, at "
        f"learning rate {lr:.3g} (run.max_skipped_in_a_row is {most}); {_advice(config, precision)}"
    )


def nothing_learned(config: Config, precision: str, skipped: int, step: int) -> str | None:
    """Return why the run failed if all steps were skipped or the budget allowed no step, else None."""
    if not step and (unit := config.schedule.unit) in METERED:
        return f"schedule.{unit} is too small for set-up, one step and the end of the run; raise it"
    if not step or skipped < step:
        return None
    return (
        f"all {step} steps were skipped because the gradient was not finite, so the weights have not "
        f"changed; {_advice(config, precision)}"
    )


def _advice(config: Config, precision: str) -> str:
    other = " or with precision: fp32" if precision in ("fp16", "bf16") else ""
    return f"start again in a new run directory with a lower optim.lr (now {config.optim.lr}){other}"
