"""Tests of a rank from its configuration to its summary, and of a second start from its checkpoint."""

import contextlib
import functools
import gc
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor import config as inductor

from bert_dp import files
from bert_dp.config import ConfigError, Issue
from bert_dp.files import LOG_DIR, STOP_SIGNALS
from bert_dp.files.ledger import read_ledger
from bert_dp.tasks import DatasetInfo
from bert_dp.training import build, checkpoint, devices, distributed, loop
from bert_dp.training import rank as worker
from bert_dp.training.process import GC_THRESHOLD, Signals
from tests.helpers import issues_of, logged, read_json
from tests.parity.runs import evals, settings, summary, write_run
from tests.ranks import OneOf, run_ranks
from tests.shards import write_shards
from tests.wrapped_task import PoisonedTask

HELD_OUT, LENGTH, GLOBAL, ASSEMBLE_S, DRY_RUN_S = 20, 16, 8, 5.0, 3.0


def slowed(module: Any, name: str, clock: SimpleNamespace, seconds: float) -> None:
    """Make each call of `module.name` advance the fake clock by `seconds`."""
    plain = getattr(module, name)

    def slow(*arguments: Any, **options: Any) -> Any:
        clock.now += seconds
        return plain(*arguments, **options)

    setattr(module, name, slow)


def train_twice(run_dir: str, more: dict[str, Any]) -> None:
    """Train two steps, the second with a bad gradient, and start again with the configuration `more`."""
    os.environ[LOG_DIR] = run_dir
    clock = SimpleNamespace(now=100.0)
    worker.time = SimpleNamespace(monotonic=lambda: clock.now)  # type: ignore[assignment]
    slowed(build, "build_trainer", clock, ASSEMBLE_S)
    slowed(loop, "dry_run", clock, DRY_RUN_S)
    events, plain = [], loop.train

    def train(*arguments: Any) -> Any:
        events.append(("train", gc.get_threshold()[0], clock.now))
        assert sys.getswitchinterval() == pytest.approx(5e-4)
        return plain(*arguments)

    loop.train = train
    devices.restart_peak_memory = lambda device: events.append(("peak", gc.get_threshold()[0], clock.now))
    poisoned = functools.partial(PoisonedTask, bad_steps=range(1, 2))
    assert worker.main([f"{run_dir}/config.yaml"], poisoned) == 0
    write_run(Path(run_dir), more)
    assert worker.main([f"{run_dir}/config.yaml"]) == 0
    ready = [100.0 + number * (ASSEMBLE_S + DRY_RUN_S) for number in (1, 2)]
    # peak memory is reset after the dry run, and no rank collects garbage on its own between steps
    often = gc.get_threshold()[0]
    assert events == [each for now in ready for each in (("peak", often, now), ("train", GC_THRESHOLD, now))]
    assert often < GC_THRESHOLD


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("worker")
    shards = write_shards(folder / "shards", held_out=HELD_OUT, length=LENGTH)
    parts = [
        settings(
            shards,
            schedule={"name": "constant", "steps": steps},
            batch={"global_size": GLOBAL},
            objective={"mask_rate": 0.25},
        )
        for steps in (2, 4)
    ]
    run_ranks(1, train_twice, str(write_run(folder / "run", parts[0])), parts[1])
    return folder / "run"


def test_a_resumed_run_counts_from_its_beginning(run_dir: Path) -> None:
    end = summary(run_dir)
    assert (end["step"], end["samples"], end["tokens"]) == (4, 4 * GLOBAL, 4 * GLOBAL * LENGTH)
    assert end["skipped_steps"] == 1
    assert logged(run_dir, "skipped_steps") == [0, 1, 1, 1]


def test_held_out_positions_are_15_percent_at_any_mask_rate(run_dir: Path) -> None:
    for line in evals(run_dir):
        assert line["mask_rate"] == 0.15
        assert line["masked_tokens"] == HELD_OUT * round(0.15 * LENGTH)


def test_set_up_and_dry_run_are_timed_separately(run_dir: Path) -> None:
    spent = summary(run_dir)["time_s"]
    assert (spent["setup"], spent["compile"]) == (ASSEMBLE_S, DRY_RUN_S)
    log = (run_dir / "rank-0.log").read_text()
    assert log.count(f"ready: set-up {ASSEMBLE_S} s, trial step {DRY_RUN_S} s") == 2


def test_a_restart_waits_for_a_killed_rank_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank waits under a bert-dp launcher, which excludes other runs; without one it refuses at once."""
    monkeypatch.delenv(files.LAUNCHER_PID, raising=False)
    naps: list[float] = []
    dying = files.lock(tmp_path / ".lock")
    assert dying is not None

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            dying.close()

    monkeypatch.setattr("bert_dp.training.rank.time.sleep", nap)
    with pytest.raises(ConfigError, match="in use by another run"), contextlib.ExitStack() as until:
        worker.lock_run(tmp_path, until)
    assert naps == []
    monkeypatch.setenv(files.LAUNCHER_PID, "1")
    with files.lock(tmp_path / files.RUN_LOCK), contextlib.ExitStack() as until:  # type: ignore[union-attr]
        worker.lock_run(tmp_path, until)
        assert len(naps) == 3
        assert files.lock(tmp_path / ".lock") is None


def test_only_the_first_stop_signal_counts() -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    try:
        signals = Signals()
        signals.catch()
        assert signals.received == 0
        for number in (signal.SIGUSR1, signal.SIGTERM):
            os.kill(os.getpid(), number)
        assert signals.received == signal.SIGUSR1
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
        deaf = Signals()
        deaf.catch()
        os.kill(os.getpid(), signal.SIGHUP)
        assert deaf.received == 0
    finally:
        for number, handler in zip(STOP_SIGNALS, before, strict=True):
            signal.signal(number, handler)


def build_and_connect(folder: str) -> None:
    """Start a rank without shards, and write how many data sets exist when it connects to the other rank."""
    rank, plain = os.environ["RANK"], distributed.connect
    os.environ["BERT_DP_CACHE"] = f"{folder}/cache"

    def connect(*arguments: Any, **options: Any) -> Any:
        built = list(Path(folder, "cache").glob("*/manifest.json"))
        Path(folder, f"built-{rank}").write_text(str(len(built)))
        return plain(*arguments, **options)

    distributed.connect = connect
    assert worker.main([f"{folder}/config.yaml"]) == 0


def test_a_corpus_is_built_before_the_ranks_connect(tmp_path: Path) -> None:
    """Under plain torchrun no launcher has built the data, and a build may exceed a collective's timeout."""
    words = " ".join(f"word{i % 50}" for i in range(400))
    (tmp_path / "corpus.txt").write_text("\n\n".join(f"{words} {i}" for i in range(40)))
    config = settings(tmp_path, schedule={"steps": 1}, data={"sources": [str(tmp_path / "corpus.txt")]})
    del config["data"]["path"]
    config["data"]["build"] = {"held_out_fraction": 0.2, "max_tokens_per_char": 0.0}
    run_ranks(2, build_and_connect, str(write_run(tmp_path, config)))
    assert [(tmp_path / f"built-{rank}").read_text() for rank in (0, 1)] == ["1", "1"]


def start_in_many_ways(folder: str) -> None:
    """Start a rank in many ways without the launcher, which would check some of the input first."""
    config, elsewhere = f"{folder}/config.yaml", f"{folder}/not yet/there"
    os.environ[LOG_DIR] = folder
    assert worker.main([config, "--profile", "3:4"]) == 2
    assert worker.main([config, "--profile", "1:2", "--profile-ranks", "1"]) == 2
    with files.lock(Path(folder, ".lock")):  # type: ignore[union-attr]
        assert worker.main([config]) == 2
    plain_check = build.check_same_data

    def refuse(comm: Any, data: Any) -> None:
        assert (comm.world.rank, data.num_samples) == (0, 96)
        raise ConfigError([Issue("data", "conflict", "another")])

    build.check_same_data = refuse
    assert worker.main([config]) == 2
    assert not Path(folder, "checkpoints").exists()
    build.check_same_data = plain_check
    # 3 J before the run, 40 J from the end of the dry run to the summary
    plain_train, plain_dry_run, used = loop.train, loop.dry_run, [3.0]

    def dry_run(*arguments: Any) -> None:
        beat = files.read_heartbeat(files.heartbeat_path(arguments[0].run_dir, 0))
        assert beat is not None
        assert files.PHASES[beat.phase] == "compile", "compiling may take long"
        used[0] += 1000.0
        plain_dry_run(*arguments)

    def train(*arguments: Any) -> Any:
        used[0] += 40.0
        return plain_train(*arguments)

    loop.train, loop.dry_run, devices.joules = train, dry_run, lambda device: used[0]
    assert worker.main([config, "--run-dir", elsewhere]) == 0
    assert worker.main([config, "--run-dir", f"{folder}/next", "--resume", elsewhere]) == 0
    plain_save_file = checkpoint.save_file

    def slow(*arguments: Any) -> None:
        time.sleep(0.3)
        plain_save_file(*arguments)

    def fail(lone: Any, state: Any, clock: Any) -> None:
        checkpoint.save_file = slow
        state.step = 1
        loop.save(lone, state, 1.0)
        raise RuntimeError("broken")

    loop.train = fail
    assert worker.main([config]) == 1
    saved = Path(folder, "checkpoints")
    assert checkpoint.newest_valid(saved)[0] == saved / "step-00000001"


@pytest.fixture(scope="module")
def many_ways(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ways")
    shards = write_shards(folder / "shards", train=96, length=LENGTH)
    run_dir = write_run(folder / "run", settings(shards, schedule={"steps": 2}))
    run_ranks(1, start_in_many_ways, str(run_dir))
    return run_dir


def test_a_rank_refuses_bad_input_without_a_launcher(many_ways: Path) -> None:
    """The input is missing steps and ranks to profile, a directory in use, and different data."""
    log = (many_ways / "rank-0.log").read_text()
    for line in (
        "error: --profile: step 3 is after the last step (2)",
        "error: --profile-ranks: no rank 1",
        f"error: --run-dir: {many_ways} is in use by another run",
        "error: data: another",
    ):
        assert line in log
    assert "Traceback" not in log.partition("RuntimeError: broken")[0].rpartition("error: data: another")[0]


def test_a_rank_creates_the_run_directory_and_counts_the_energy_of_the_steps(many_ways: Path) -> None:
    end = summary(many_ways / "not yet/there")
    assert (end["step"], end["energy_j"]) == (2, 40.0)
    assert not (many_ways / "metrics.jsonl").exists()
    (start,) = read_ledger(many_ways / "not yet/there").starts
    assert start.seconds > 0, "without a launcher the rank keeps the ledger"
    beat = files.read_heartbeat(files.heartbeat_path(many_ways / "next", 0))
    assert beat is not None
    assert files.PHASES[beat.phase] == "done", "otherwise the rank seems to hang"


def test_a_rank_accepts_the_option_that_deepspeed_adds() -> None:
    for option in ("--local_rank=3", "--local-rank=3"):
        arguments = worker.parse_arguments([option, "config.yaml"])
        assert (arguments.config, arguments.resume, arguments.profile) == (Path("config.yaml"), "auto", None)


def test_elapsed_time_continues_in_another_directory(many_ways: Path) -> None:
    """A time budget must not start again. The first checkpoint has the elapsed time of the resumed one."""
    states = [many_ways / name / "checkpoints/step-00000002/state.json" for name in ("not yet/there", "next")]
    before, after = (read_json(path)["elapsed_s"] for path in states)
    assert before == after > 0


def train_deterministically(folder: str) -> None:
    plain = loop.train

    def train(*arguments: Any) -> Any:
        assert torch.are_deterministic_algorithms_enabled()
        assert getattr(inductor, "deterministic", True)
        assert not torch.backends.cuda.mem_efficient_sdp_enabled()
        assert torch.backends.cudnn.deterministic
        assert not torch.utils.deterministic.fill_uninitialized_memory, "filling costs time"
        return plain(*arguments)

    loop.train = train
    assert worker.main([f"{folder}/config.yaml"]) == 0
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_a_run_can_be_made_deterministic(tmp_path: Path, shards: Path) -> None:
    write_run(tmp_path, settings(shards, schedule={"steps": 2}, run={"deterministic": True}))
    run_ranks(1, train_deterministically, str(tmp_path))


def start_misplaced(folder: str) -> None:
    """Start two ranks on one GPU, and then a replica of two ranks on two nodes. Both are bad input."""
    rank, store = os.environ["RANK"], os.environ["BERT_DP_INIT_FILE"]
    for name, place in (
        ("gpu", distributed.HostAndDevice("n/1", "0000:1a:00.0")),
        ("nodes", distributed.HostAndDevice(f"n/{rank}", None)),
    ):
        os.environ["BERT_DP_INIT_FILE"] = f"{store}-{name}"
        distributed.own_host_and_device = lambda device, place=place: place  # type: ignore[misc,assignment]
        assert worker.main([f"{folder}/{name}/config.yaml"]) == 2


def test_ranks_on_the_wrong_devices_or_nodes_are_refused(tmp_path: Path, shards: Path) -> None:
    for name, tensor in (("gpu", 1), ("nodes", 2)):
        write_run(tmp_path / name, settings(shards, schedule={"steps": 1}, parallel={"tensor": tensor}))
    run_ranks(2, start_misplaced, str(tmp_path))


def test_ranks_with_other_data_than_rank_0_are_refused() -> None:
    """Nodes may have their own caches."""
    comm = OneOf(1, 2, said="0" * 64)
    build.check_same_data(comm, DatasetInfo("0" * 64, None, 9))
    (line,) = issues_of(build.check_same_data, comm, DatasetInfo("1" * 64, None, 9))
    assert "the data has hash 1111111111111111 on rank 1, 0000000000000000 on rank 0" in line
