"""Connect the ranks: rendezvous, collectives for host values, and the shared clock."""

import dataclasses
import datetime
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous as torch_rendezvous

from bert_dp.config import ConfigError, Issue
from bert_dp.config.checks import spread_issues
from bert_dp.files import INIT_FILE
from bert_dp.files.ledger import Spending
from bert_dp.files.models import Failure
from bert_dp.training.devices import HostAndDevice, own_host_and_device
from bert_dp.training.process import World

TIMEOUT = datetime.timedelta(minutes=30)


class HostCollectives:
    """Collectives for small host values, over a gloo group that is not used for gradients. Every rank must
    call the same methods in the same order. `group`: None for a single rank."""

    def __init__(self, world: World, group: dist.ProcessGroup | None):
        self.world = world
        self._group = group

    def all_gather(self, values: Sequence[float]) -> Tensor:
        """Gather every rank's values: [world size, len(values)] float64."""
        mine = torch.tensor(values, dtype=torch.float64)
        if self._group is None:
            return mine[None]
        parts = [torch.empty_like(mine) for _ in range(self.world.size)]
        dist.all_gather(parts, mine, group=self._group)
        return torch.stack(parts)

    def max_async(self, values: Sequence[float]) -> Callable[[], list[float]]:
        """Start an elementwise max reduction over ranks; return a function that waits for the result."""
        mine = torch.tensor(values, dtype=torch.float64)
        if self._group is None:
            return mine.tolist
        work = dist.all_reduce(mine, dist.ReduceOp.MAX, group=self._group, async_op=True)

        def wait() -> list[float]:
            assert work is not None
            work.wait()
            return mine.tolist()

        return wait

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's JSON value on every rank. Collective."""
        if self._group is None:
            return value
        mine = value if self.world.rank == 0 else None
        return gather_json(mine, self._group, torch.device("cpu"))[0]

    def from_rank_0(self, setting: str, choose: Callable[[], Any]) -> Any:
        """Call `choose` on rank 0 and return its result (a JSON value) on every rank. If `choose` raises
        ConfigError, raise the same error on every rank, as an error of `setting`. Collective."""
        value, issues = None, list[dict[str, Any]]()
        if self.world.rank == 0:
            try:
                value = choose()
            except ConfigError as error:
                issues = [issue.within(setting).to_json() for issue in error.issues]
        value, issues = self.broadcast([value, issues])
        if issues:
            raise ConfigError([Issue(**issue) for issue in issues])
        return value

    def broadcast_failure(self, failure: Failure | None) -> Failure | None:
        """Return rank 0's `failure` (or None) on every rank. Collective."""
        data = self.broadcast(None if failure is None else failure.model_dump(mode="json"))
        return None if data is None else Failure.model_validate(data)

    def barrier(self) -> None:
        self.all_gather([0.0])


def gather_json(value: Any, group: dist.ProcessGroup | None, device: torch.device) -> list[Any]:
    """Gather every rank's JSON value, in the order of the group's ranks. `device` must be one that the group
    supports. Collective. torch's object collectives would unpickle, and thus could execute, a peer's data."""
    data = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8, device=device)
    sizes = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device=device)
    sizes[dist.get_rank(group)] = len(data)
    dist.all_reduce(sizes, group=group)
    parts = [data.new_zeros(int(sizes.max())) for _ in sizes]
    mine = data.new_zeros(int(sizes.max()))
    mine[: len(data)] = data
    dist.all_gather(parts, mine, group=group)
    return [json.loads(bytes(part[:size].tolist())) for part, size in zip(parts, sizes.tolist(), strict=True)]


def rendezvous(world: World, device: torch.device) -> tuple[dist.Store, tuple[HostAndDevice, ...]]:
    """Return the store that all ranks share, and each rank's host and device. Does not create a process group
    yet: NCCL fails or hangs if two ranks share a GPU, so call `check_places` first. Collective."""
    mine = own_host_and_device(device)
    if world.size == 1:
        return dist.HashStore(), (mine,)
    path, attempt = os.environ.get(INIT_FILE), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    url = "env://" if path is None else f"file://{path}-{attempt}"
    store, _, _ = next(torch_rendezvous(url, world.rank, world.size, timeout=TIMEOUT))
    store.set_timeout(TIMEOUT)
    store.set(f"place-{world.rank}", json.dumps(dataclasses.astuple(mine)))
    if world.rank == 0:
        each = [json.loads(store.get(f"place-{rank}")) for rank in range(world.size)]
        store.set("places", json.dumps(each))
    return store, tuple(HostAndDevice(*fields) for fields in json.loads(store.get("places")))


def check_places(places: Sequence[HostAndDevice], sets: Mapping[str, int]) -> None:
    """Raise ConfigError if ranks share a GPU, which NCCL rejects, or if ranks that must share a node are on
    different nodes. `sets`: result of `rank_sets` in config/checks.py."""
    issues = spread_issues([place.node for place in places], sets)
    for shared in dict.fromkeys(places):
        ranks = [rank for rank, place in enumerate(places) if place == shared]
        if shared.gpu is not None and len(ranks) > 1:
            host = shared.node.partition("/")[0]
            message = f"ranks {', '.join(map(str, ranks))} share one GPU, {shared.gpu} on {host}"
            hint = "start one rank per GPU (--nproc), or give each task one GPU (srun --gpus-per-task=1)"
            issues.append(Issue("run.device", "conflict", message, shared.gpu, "--nproc", hint))
    if issues:
        raise ConfigError(issues)


def connect(
    world: World, device: torch.device, store: dist.Store | None = None, *, group_of_one: bool = False
) -> HostCollectives:
    """Join the process group (nccl on GPUs, gloo on CPUs) and create the gloo group for host values. `store`:
    None = call `rendezvous`. `group_of_one`: True if the engine needs a group even for a single rank."""
    if world.size == 1 and not group_of_one:
        return HostCollectives(world, None)
    if store is None:
        store, _ = rendezvous(world, device)
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=dist.PrefixStore("ranks", store),
        rank=world.rank,
        world_size=world.size,
        timeout=TIMEOUT,
        device_id=device if on_gpu else None,
    )
    return HostCollectives(world, dist.new_group(backend="gloo", timeout=TIMEOUT))


def recent_collectives(count: int = 200) -> list[dict[str, Any]]:
    """List the collectives among the last `count` operations in each of torch's flight recorders, oldest
    first per recorder; [] if torch has no recorders. The key `sizes` holds the input shapes."""
    collectives: list[dict[str, Any]] = []
    # private functions of torch: the first dumps the flight recorder of gloo, the second that of NCCL
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(torch._C._distributed_c10d, name, None)
        entries = json.loads(dump()).get("entries", []) if dump else []
        collectives += [
            {
                "group": str(entry["process_group"][0]),
                "sequence": entry["collective_seq_id"],
                "operation": entry["profiling_name"].partition(":")[2].removeprefix("_"),
                "sizes": entry.get("input_sizes", []),
                "state": entry.get("state", "unknown"),
            }
            for entry in entries[-count:]
            if not entry.get("is_p2p")
        ]
    return collectives


def disconnect() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


@dataclasses.dataclass(frozen=True)
class Stop:
    """Request to stop the run. After a signal, a checkpoint is saved first. A failure overrides a signal."""

    signal: int = 0
    failed: bool = False

    def __bool__(self) -> bool:
        return self.failed or self.signal != 0


class SharedClock:
    """Clock that sends rank 0's elapsed seconds, and any rank's stop request, to all ranks. With `spending`,
    it also sends the spent share of a budget in dollars or kWh; `exchange` then returns this share instead of
    the seconds.

    `exchange` returns the values sent one step earlier and sends new ones, so that no step waits for them.
    Rank 0 sends the expected start of the next step: now plus the duration of the last completed step.
    """

    def __init__(
        self,
        comm: HostCollectives,
        elapsed_s: float = 0.0,
        now: Callable[[], float] = time.monotonic,
        spending: Spending | None = None,
    ):
        self._comm = comm
        self._now = now
        self._origin = now() - elapsed_s
        self.spending = spending
        self._shared = 0.0 if spending else elapsed_s  # last result of `exchange`
        self.shared_elapsed_s = elapsed_s
        """Rank 0's elapsed seconds, as last received by `exchange`; identical on every rank."""
        self._step_began_s = elapsed_s
        self._step_s: float | None = None  # None until the first step has ended
        self._pending: Callable[[], list[float]] | None = None

    def elapsed_s(self) -> float:
        """Return this rank's elapsed seconds. They differ between ranks, so use them only in records."""
        return self._now() - self._origin

    def spent(self, elapsed_s: float) -> float:
        """Return the share of the budget spent after `elapsed_s` seconds. Without `spending`, or on a rank
        other than 0, return `elapsed_s` itself."""
        if self.spending is None or self._comm.world.rank != 0:
            return elapsed_s
        return max(self._shared, self.spending.share(self._origin + elapsed_s))

    def spent_s(self) -> float:
        """Return the elapsed seconds to save in a checkpoint. Without `spending`, they are at least the
        seconds that `exchange` last returned, a prediction that can be ahead of the clock: progress must
        not decrease when the run is resumed."""
        return self.elapsed_s() if self.spending else max(self.elapsed_s(), self._shared)

    def exchange(self, stop: Stop) -> tuple[float, Stop]:
        """Return the amount spent (seconds or share) at the start of this step, and any rank's stop request.
        The amount never decreases. The first call returns the initial `elapsed_s` or, with `spending`, rank
        0's share. The first two calls wait for the other ranks: before the first step has ended, rank 0
        cannot predict when the next step starts. Collective."""
        self._step_began_s = self.elapsed_s()
        if self._pending is None:
            self._send(self.shared_elapsed_s if self._step_s is None else self._step_began_s, stop)
        spent, self.shared_elapsed_s, wanted = self._receive()
        self._shared = max(self._shared, spent)
        if self._step_s is not None:
            self._send(self._step_began_s + self._step_s, stop)
        return self._shared, wanted

    def end_step(self) -> float:
        """Record and return the step's duration (since `exchange`). Call this before evaluating or saving."""
        self._step_s = self.elapsed_s() - self._step_began_s
        return self._step_s

    def has_time_for(self, pause: Literal["evaluation_s", "end_s"]) -> bool:
        """Return whether an evaluation or a save fits a budget in dollars or kWh without touching the
        reserve (see `Spending`). Return True for other budgets. `pause`: field of `spending` that holds
        the expected duration in seconds. Collective."""
        if self.spending is None:
            return True
        end_s = self.elapsed_s() + getattr(self.spending, pause)
        return bool(self._comm.broadcast(self.spent(end_s) < 1.0))

    def pause_since(self, began_s: float) -> float:
        """Return the seconds since `began_s` on rank 0's clock, identical on every rank. Collective."""
        return float(self._comm.broadcast(self.elapsed_s() - began_s))

    def read_again(self, stop: Stop) -> None:
        """Replace the pending exchange after a pause (evaluation or save), because its amount spent was
        computed before the pause. Does nothing without `spending`. Collective."""
        if self.spending is not None and self._pending is not None:
            self._receive()
            self._send(self.elapsed_s(), stop)

    def poll_stop(self, stop: Stop) -> Stop:
        """Exchange only the stop request, between steps and without reading the clock. Collective."""
        if self._pending is None:
            self._send(self.shared_elapsed_s, stop)
            return self._receive()[2]
        _, elapsed_s, wanted = self._receive()
        self._send(elapsed_s, stop)
        return wanted

    def finish(self) -> None:
        if self._pending is not None:
            self._receive()

    def _send(self, elapsed_s: float, stop: Stop) -> None:
        """Start an exchange, to which rank 0 contributes the amount spent and the elapsed seconds."""
        mine = (self.spent(elapsed_s), elapsed_s) if self._comm.world.rank == 0 else (0.0, 0.0)
        self._pending = self._comm.max_async([*mine, float(stop.signal), float(stop.failed)])

    def _receive(self) -> tuple[float, float, Stop]:
        """Await the pending exchange; return the amount spent, the elapsed seconds and the stop request."""
        assert self._pending is not None
        spent, elapsed_s, signal, failed = self._pending()
        self._pending = None
        return spent, elapsed_s, Stop(int(signal), bool(failed))
