"""Test rank variables, rendezvous, collectives of host values, and the shared clock."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from bert_dp.config.checks import rank_sets
from bert_dp.measure import all_reduce
from bert_dp.training import distributed
from bert_dp.training.devices import HostAndDevice, own_host_and_device
from bert_dp.training.distributed import HostCollectives, SharedClock, Stop, check_places, connect, disconnect
from bert_dp.training.process import World, check_rendezvous, read_world, standard_variables
from tests.helpers import issues_of, make_config, raised_issues
from tests.ranks import run_ranks
from tests.tensors import CPU

TORCHRUN = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
DEEPSPEED = {key: value for key, value in TORCHRUN.items() if key != "LOCAL_WORLD_SIZE"}
NODE_TASKS = "SLURM_STEP_TASKS_PER_NODE"
SLURM = {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "4", NODE_TASKS: "2"}
OPEN_MPI = {
    f"OMPI_COMM_WORLD_{name}": value
    for name, value in {"RANK": "2", "LOCAL_RANK": "0", "SIZE": "6", "LOCAL_SIZE": "2"}.items()
}
LONE = World(0, 0, 1, 1)


# --- rank variables


@pytest.mark.parametrize(
    ("environ", "world"),
    [
        ({}, LONE),
        ({"PATH": "/bin", "RANK": "1"}, LONE),  # an incomplete set of variables is ignored
        (TORCHRUN, World(5, 1, 8, 4)),
        (SLURM, World(3, 1, 4, 2)),
        (OPEN_MPI, World(2, 0, 6, 2)),
        ({**SLURM, **TORCHRUN}, World(5, 1, 8, 4)),  # torchrun inside a Slurm job
        ({**OPEN_MPI, **SLURM}, World(3, 1, 4, 2)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, World(1, 1, 2, 2)),
        ({**SLURM, NODE_TASKS: "2(x2)"}, World(3, 1, 4, 2)),
        ({**SLURM, "SLURM_LOCALID": "0", NODE_TASKS: "3,1", "SLURM_NODEID": "1"}, World(3, 0, 4, 1)),
        ({**SLURM, NODE_TASKS: "1(x2),2", "SLURM_NODEID": "2"}, World(3, 1, 4, 2)),
        ({**DEEPSPEED, "LOCAL_SIZE": "4"}, World(5, 1, 8, 4)),
        ({**TORCHRUN, "LOCAL_SIZE": "2"}, World(5, 1, 8, 4)),
        ({k: v for k, v in SLURM.items() if k != NODE_TASKS}, World(3, 1, 4, 4)),
        # sbatch sets these in its script too, but only srun starts ranks
        ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4"}, LONE),
    ],
)
def test_the_world_is_read_from_every_launchers_variables(environ: dict[str, str], world: World) -> None:
    assert read_world(environ) == world


@pytest.mark.parametrize(
    ("scheme", "changed"),
    [
        (TORCHRUN, {"RANK": ""}),
        (TORCHRUN, {"WORLD_SIZE": "2.0"}),
        (TORCHRUN, {"RANK": "8"}),
        (SLURM, {"SLURM_PROCID": "4"}),
        (OPEN_MPI, {"OMPI_COMM_WORLD_SIZE": "many"}),
        (TORCHRUN, {"LOCAL_RANK": "4"}),
        (TORCHRUN, {"LOCAL_WORLD_SIZE": "0"}),
    ],
)
def test_invalid_rank_variables_are_named(scheme: dict[str, str], changed: dict[str, str]) -> None:
    (line,) = issues_of(read_world, {**scheme, **changed})
    assert next(iter(scheme)) in line


@pytest.mark.parametrize("world", [LONE, World(5, 1, 8, 4), World(3, 0, 4, 1)])
def test_packages_that_read_only_torchruns_variables_see_the_same_world(world: World) -> None:
    assert standard_variables(world, None).keys() == TORCHRUN.keys()
    assert read_world({**SLURM, **standard_variables(world, None)}) == world
    assert standard_variables(world, 0) == {**standard_variables(world, None), "LOCAL_RANK": "0"}


def test_several_ranks_without_a_rendezvous_are_refused() -> None:
    two, here = World(0, 0, 2, 2), {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    check_rendezvous(LONE, {})
    check_rendezvous(two, here)
    check_rendezvous(two, {"BERT_DP_INIT_FILE": "/x/store"})
    for environ, missing in (
        ({}, "MASTER_ADDR and MASTER_PORT"),
        ({**here, "MASTER_PORT": ""}, "MASTER_PORT"),
        ({"MASTER_PORT": "29500"}, "MASTER_ADDR"),
    ):
        (issue,) = raised_issues(check_rendezvous, two, environ)
        assert issue.setting == missing


def test_each_attempt_has_its_own_rendezvous_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """When torchrun restarts ranks, the old file still exists and lists the failed ranks as present."""
    calls: list[Any] = []

    def of_torch(url: str, rank: int, size: int, timeout: Any) -> Any:
        store = torch.distributed.HashStore()
        store.set("place-1", json.dumps(["n2/1", None]))
        calls.append((url, rank, size, timeout))
        yield store, rank, size

    monkeypatch.setattr(distributed, "torch_rendezvous", of_torch)
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    monkeypatch.setenv("BERT_DP_INIT_FILE", "/x/store")
    _, places = distributed.rendezvous(World(0, 0, 2, 1), CPU)
    assert places == (own_host_and_device(CPU), HostAndDevice("n2/1", None))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    distributed.rendezvous(World(0, 0, 2, 1), CPU)
    monkeypatch.delenv("BERT_DP_INIT_FILE")
    distributed.rendezvous(World(0, 0, 2, 1), CPU)
    urls = ("file:///x/store-0", "file:///x/store-3", "env://")
    assert calls == [(url, 0, 2, distributed.TIMEOUT) for url in urls]


@pytest.mark.parametrize(
    ("device", "backend", "bound"),
    [(CPU, "gloo", None), (torch.device("cuda", 1), "nccl", torch.device("cuda", 1))],
)
def test_gradients_use_nccl_on_gpus_and_everything_else_uses_gloo(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, backend: str, bound: torch.device | None
) -> None:
    """Both groups have one timeout, because a group that times out first names the wrong collective."""
    begun: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(
        torch.distributed, "init_process_group", lambda name, **how: begun.append((name, how))
    )
    monkeypatch.setattr(torch.distributed, "new_group", lambda backend, **how: begun.append((backend, how)))
    world = World(3, 1, 4, 2)
    assert connect(world, device, torch.distributed.HashStore()).world == world
    (main, how), side = begun
    assert (main, how["device_id"], how["timeout"]) == (backend, bound, distributed.TIMEOUT)
    assert (how["rank"], how["world_size"]) == (3, 4)
    assert side == ("gloo", {"timeout": distributed.TIMEOUT})


# --- hosts and devices


def test_ranks_that_share_a_gpu_are_refused() -> None:
    here = [
        HostAndDevice("n1/1", "0000:1a:00.0"),
        HostAndDevice("n1/1", "0000:1b:00.0"),
        HostAndDevice("n2/2", "0000:1a:00.0"),
    ]
    check_places(here, {})
    check_places([HostAndDevice("n1/1", None)] * 3, {})  # CPU ranks share a machine
    (issue,) = raised_issues(check_places, [*here, here[1], HostAndDevice("n1/3", "0000:1a:00.0")], {})
    assert (issue.setting, issue.value) == ("run.device", "0000:1b:00.0")


@pytest.mark.parametrize(
    ("nodes", "spread"), [("aabb", None), ("aaaabb", None), ("abab", "ranks 0, 1 "), ("aaab", "ranks 2, 3 ")]
)
def test_the_ranks_of_a_replica_or_a_shard_set_must_share_a_node(nodes: str, spread: str | None) -> None:
    places = [HostAndDevice(f"{node}/0", f"0000:{i:02x}:00.0") for i, node in enumerate(nodes)]
    check_places(places, {})
    hybrid = make_config("parallel.engine=fsdp", f"parallel.fsdp_replicas={len(nodes) // 2}")
    for sets in ({"parallel.tensor": 2}, {**rank_sets(hybrid, len(nodes)), "parallel.tensor": 1}):
        if spread is None:
            check_places(places, sets)
            continue
        (issue,) = raised_issues(check_places, places, sets)
        assert (issue.setting, issue.value, spread in issue.message) == (max(sets, key=sets.get), 2, True)


# --- communication


def test_a_lone_rank_needs_no_process_group() -> None:
    comm = connect(LONE, CPU)
    assert not torch.distributed.is_initialized()
    check_comm(comm, [7.5])
    check_clock(comm)


def check_comm(comm: HostCollectives, values: list[float]) -> None:
    """Check every collective; rank r contributes `values[r]`."""
    rank, size = comm.world.rank, comm.world.size
    gathered = comm.all_gather([values[rank], float(rank)])
    assert gathered.dtype == torch.float64
    assert gathered.tolist() == [[value, float(r)] for r, value in enumerate(values)]
    third = comm.all_gather([1 / 3 + rank])
    assert third.flatten().tolist() == [1 / 3 + r for r in range(size)]  # doubles stay unrounded
    assert comm.max_async([float(rank), -float(rank), values[rank]])() == [float(size - 1), 0.0, max(values)]
    for value in ({"a": [1, None, "ü"], "rank": 0}, "", [], None, "x" * 10_000):
        assert comm.broadcast(value if rank == 0 else "not this") == value
    comm.barrier()


class FakeTime:
    """Clock whose origin and rate differ between ranks."""

    def __init__(self, start: float, rate: float):
        self.value, self.rate = start, rate

    def __call__(self) -> float:
        return self.value

    def pass_(self, seconds: float) -> None:
        self.value += seconds * self.rate


def check_clock(comm: HostCollectives) -> None:
    """Check the clock of a run resumed at 50 s: seven steps, and an evaluation of 100 s after the third."""
    rank, size = comm.world.rank, comm.world.size
    now = FakeTime(start=1000.0 * (rank + 1), rate=1.0 + rank)
    clock = SharedClock(comm, elapsed_s=50.0, now=now)
    now.pass_(3.0)  # before the first step
    ticks = []
    for step_s, pause_s in ((7, 0), (20, 0), (10, 100), (10, 0), (1000, 0), (10, 0), (10, 0)):
        ticks.append(clock.exchange(Stop()))
        now.pass_(step_s)
        clock.end_step()
        now.pass_(pause_s)
    clock.finish()
    # the saved value, a reading, then rank 0's previous reading plus the step before it; never decreasing
    expected = [(seconds, Stop()) for seconds in (50.0, 60.0, 67.0, 100.0, 200.0, 210.0, 2200.0)]
    assert ticks == expected
    assert comm.all_gather([t for t, _ in ticks]).tolist() == [[t for t, _ in expected]] * size
    assert clock.elapsed_s() == 50.0 + 1170.0 * (1.0 + rank)  # each rank's own reading
    assert (clock.shared_elapsed_s, clock.pause_since(50.0)) == (2200.0, 1170.0)  # from rank 0
    assert clock.spent_s() == max(2200.0, clock.elapsed_s())
    assert clock.exchange(Stop())[0] == 2200.0, "the clock must not decrease"
    clock.finish()
    clock.finish()  # a second call has no effect


def exchanged(comm: HostCollectives, *stops: Stop) -> list[Stop]:
    """Return the stop requests that are received when this rank sends `stops` one after the other."""
    clock = SharedClock(comm, now=lambda: 0.0)
    received = []
    for stop in stops:
        received.append(clock.exchange(stop)[1])
        clock.end_step()
    clock.finish()
    return received


def check_signal(comm: HostCollectives, sender: int) -> None:
    """Check that a signal on one rank reaches all ranks at the next exchange."""
    sent = [Stop(15 if comm.world.rank == sender and i >= 2 else 0) for i in range(5)]
    signals = [float(stop.signal) for stop in exchanged(comm, *sent)]
    assert comm.all_gather(signals).tolist() == [[0.0, 0.0, 0.0, 15.0, 15.0]] * comm.world.size


def check_polling(comm: HostCollectives) -> None:
    """Check that `poll_stop` exchanges no time, so that the next `exchange` returns the time already sent."""
    now = FakeTime(start=0.0, rate=1.0)
    clock = SharedClock(comm, now=now)
    mine = Stop(15 if comm.world.rank == comm.world.size - 1 else 0)
    clock.exchange(Stop())
    now.pass_(10.0)
    clock.end_step()
    assert clock.poll_stop(Stop()) == Stop()
    assert clock.poll_stop(mine) == Stop(15)  # no time was sent in advance
    assert clock.exchange(Stop()) == (10.0, Stop())
    now.pass_(10.0)
    clock.end_step()
    signals = [clock.poll_stop(mine).signal for _ in range(3)]
    elapsed, stop = clock.exchange(Stop())
    clock.finish()
    assert (signals, elapsed, stop) == ([0, 15, 15], 20.0, Stop(15))


def check_two_signals(comm: HostCollectives) -> None:
    """Check that ranks with different signals agree on one, and that a failure is exchanged separately."""
    mine = Stop(10 + comm.world.rank, failed=comm.world.rank == comm.world.size - 1)
    assert exchanged(comm, mine, mine) == [Stop(9 + comm.world.size, failed=True)] * 2
    assert Stop(failed=True)
    assert Stop(15)
    assert not Stop()


def check_values(comm: HostCollectives) -> None:
    """Check that `gather_json` returns the values of all ranks, of any length, in rank order."""
    rank, size = comm.world.rank, comm.world.size
    values = [{"rank": r, "text": "ü" * 100 * r, "none": None} for r in range(size)]
    assert distributed.gather_json(values[rank], None, CPU) == values
    assert distributed.gather_json([], None, CPU) == [[]] * size


def check_bus_bandwidth(comm: HostCollectives) -> None:
    """Check the definition of nccl-tests: a ring of N ranks sends 2 (N - 1) / N bytes for each byte."""
    result, size = all_reduce._time_all_reduce(4096, 0.0, CPU), comm.world.size
    sent = result["bytes"] * 2 * (size - 1) / size
    assert result["busbw_gb_s"] == pytest.approx(sent / result["seconds_median"] / 1e9)


def check_everything() -> None:
    world = read_world(os.environ)
    node = own_host_and_device(CPU).node
    distributed.own_host_and_device = lambda device: HostAndDevice(node, f"gpu {world.rank}")  # type: ignore[assignment]
    store, places = distributed.rendezvous(world, CPU)
    assert places == tuple(HostAndDevice(node, f"gpu {rank}") for rank in range(world.size))
    comm = connect(world, CPU, store)
    check_comm(comm, [3.5, -1.25, 1e300][: world.size])
    check_clock(comm)
    for sender in range(world.size):
        check_signal(comm, sender)
    check_two_signals(comm)
    check_polling(comm)
    check_values(comm)
    check_bus_bandwidth(comm)
    comm.barrier()
    disconnect()
    disconnect()  # a second call has no effect


@pytest.mark.parametrize("size", [2, 3])
def test_several_ranks_communicate_and_share_a_clock(size: int) -> None:
    run_ranks(size, check_everything)  # raises the error of any rank


def test_a_process_group_of_one_rank_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.delenv("BERT_DP_INIT_FILE", raising=False)
    comm = connect(LONE, CPU, group_of_one=True)
    try:
        assert torch.distributed.get_world_size() == 1
        check_comm(comm, [7.5])
        check_clock(comm)
        check_signal(comm, 0)
        check_values(comm)
    finally:
        disconnect()
    assert list(tmp_path.iterdir()) == []  # no temporary file is left
    assert not torch.distributed.is_initialized()


def test_recent_collectives_are_the_newest_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {"process_group": ["7", "a name"], "profiling_name": "gloo:_all_gather"}
    entries: list[Any] = [{**entry, "collective_seq_id": number} for number in range(5)]
    entries[-1] |= {"state": "started", "input_sizes": [[3, 2]]}
    entries[-2]["is_p2p"] = False
    recorded = json.dumps({"entries": entries})
    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_fr_trace_json", lambda: recorded, raising=False)
    monkeypatch.delattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", raising=False)
    common = {"group": "7", "operation": "all_gather"}
    assert distributed.recent_collectives(2) == [
        {**common, "sequence": 3, "sizes": [], "state": "unknown"},
        {**common, "sequence": 4, "sizes": [[3, 2]], "state": "started"},
    ]
    entries[-1]["is_p2p"] = True  # not a collective, so the other ranks have no entry with this number
    recorded = json.dumps({"entries": entries})
    assert [each["sequence"] for each in distributed.recent_collectives()] == [0, 1, 2, 3]
