"""Test how workers start and end, with a fake clock: the time to save, repeated signals, and the reaper that
kills the workers of a dead launcher."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import psutil
import pytest
from rich.console import Console

from bert_dp import files
from bert_dp.config import dump_config
from bert_dp.files import reaper
from bert_dp.files.models import Failure
from launcher.run import processes
from launcher.run.peers import Order
from launcher.run.starters import RankStart, start_command, start_environment
from launcher.watch.display import Display
from launcher.watch.failure import RankExit, RanksEnded
from tests.helpers import make_config, read_json, write_files, write_lines

STUBBORN = """
import signal, sys, time
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda n, _: print(n, file=open("signals", "a"), flush=True))
open("ready", "w").close()
while True:
    time.sleep(0.01)
"""
LAUNCHER = (
    "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1], '-m', 'bert_dp.worker'])"
)
RAISE = (
    "import json; json.dump({'rank': 1, 'time_ns': 1, 'message': 'RuntimeError: no', 'kind': 'host_memory'}, "
    "open('logs/rank-1.error.json', 'w'))"
)
ENDLESS = 500  # seconds after which a run counts as endless


class Clock:
    """Clock that advances by a second at each reading, or stands still until the file `waits_for` exists."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waits_for: Path | None = None
        self.sleep, self.monotonic_ns = time.sleep, time.monotonic_ns

    def monotonic(self) -> float:
        if self.waits_for is None or self.waits_for.exists():
            self.now += 1
        assert self.now < ENDLESS, "the run was not ended"
        return self.now


def start_with(monkeypatch: pytest.MonkeyPatch, place: Path, *words: str) -> None:
    """Replace the tool that starts the ranks by `python WORDS` in the directory `place`."""
    monkeypatch.chdir(place)
    monkeypatch.setattr(processes, "start_command", lambda *_: [sys.executable, *words])


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Prepare a run with one worker that records its signals and never ends, and return its clock."""
    clock = Clock()
    start_with(monkeypatch, tmp_path, "-c", LAUNCHER, STUBBORN)
    monkeypatch.setattr(processes, "time", clock)
    monkeypatch.setattr(processes, "POLL_S", 0.01)
    return clock


def raised(rank: int, **facts: Any) -> None:
    """Write the error file of a failed rank."""
    facts = {"error_type": "ValueError", "message": "ValueError: no", **facts}
    path = Path("logs") / f"rank-{rank}.error.json"
    path.write_text(json.dumps({"rank": rank, "time_ns": 1, **facts}))


def once_ready(act: Callable[[], None]) -> Callable[[], None]:
    """Return a poll callback that calls `act` once, at the first poll after the worker is ready."""
    done: list[bool] = []

    def on_poll() -> None:
        if not done and Path("ready").exists():
            done.append(True)
            act()

    return on_poll


def stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_worker_that_never_ends_is_killed_after_the_grace_period(tmp_path: Path, clock: Clock) -> None:
    clock.waits_for = tmp_path / "signals"
    lines: list[str] = []
    ended = processes.run(tmp_path, RankStart(1, [], grace_s=100.0), once_ready(stop), log=lines.append)
    assert (ended.exit_code, ended.signal) == (128 + signal.SIGTERM, signal.SIGTERM)
    assert [line.partition(";")[0] for line in lines] == ["SIGTERM: stopping"], "logged only once"
    assert 100 < clock.now < 110
    assert (tmp_path / "signals").read_text() == "15\n"  # the signal was forwarded once


HUP, TERM, INT = signal.SIGHUP, signal.SIGTERM, signal.SIGINT


@pytest.mark.parametrize(
    ("sent", "counted"),
    [
        # the shell and the kernel both send SIGHUP
        ([(HUP, 1.0), (HUP, 1.1), (TERM, 1.4), (INT, 1.5)], [HUP, INT]),
        ([(TERM, 1.0), (TERM, 1.01), (HUP, 1.1), (TERM, 1.7), (TERM, 1.8)], [TERM, TERM, TERM]),
    ],
)
def test_signals_in_quick_succession_count_as_one(
    monkeypatch: pytest.MonkeyPatch, sent: list[tuple[int, float]], counted: list[int]
) -> None:
    """A closing terminal and `timeout` send several signals at once; a later signal comes from the user."""
    times = iter([now for _, now in sent])
    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=lambda: next(times)))
    with processes.stop_signals() as came:
        for number, _ in sent:
            os.kill(os.getpid(), number)
    assert came == counted


def test_a_signal_ignored_by_nohup_does_not_stop_a_run() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with processes.stop_signals() as came:
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGUSR1)
        assert came == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_save_in_progress_when_a_rank_fails_may_finish(tmp_path: Path, clock: Clock) -> None:
    unfinished = [tmp_path / "checkpoints" / f"step-0000000{step}.tmp-0" for step in (2, 3)]
    unfinished[0].mkdir(parents=True)  # left by a rank that was killed earlier
    processes.run(tmp_path, RankStart(1, []), once_ready(lambda: raised(1)))
    soon = clock.now
    assert soon < processes.KILL_AFTER_FAILURE_S + 10 < processes.SAVE_AFTER_FAILURE_S
    for path in (*tmp_path.glob("logs/*.error.json"), tmp_path / "ready"):
        path.unlink()

    def fail() -> None:
        unfinished[1].mkdir()
        raised(1)

    processes.run(tmp_path, RankStart(1, []), once_ready(fail))
    took = clock.now - soon
    assert processes.SAVE_AFTER_FAILURE_S < took < processes.SAVE_AFTER_FAILURE_S + 10


def test_an_unresponsive_file_server_does_not_end_a_run(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal ends the run when the server answers again. The display reads from the same server."""
    glob, failed = Path.glob, list[str]()

    def unanswered(path: Path, pattern: str) -> Iterator[Path]:
        if pattern != "rank-*.error.json" or len(failed) >= 20:
            return glob(path, pattern)
        failed.append(pattern)
        if len(failed) == 20:
            stop()
        raise OSError(5, "Input/output error")

    config = make_config("schedule.steps=9")
    with Display(tmp_path, Console(file=io.StringIO()), config) as display:
        begin = once_ready(lambda: monkeypatch.setattr(Path, "glob", unanswered))

        def on_poll() -> None:
            begin()
            display.poll()

        ended = processes.run(tmp_path, RankStart(1, [], grace_s=50.0), on_poll)
        monkeypatch.undo()
    assert len(failed) == 20
    assert (ended.exit_code, ended.signal) == (128 + signal.SIGTERM, signal.SIGTERM)


@pytest.mark.parametrize("is_stopping", [False, True])
def test_ranks_that_outlive_a_failed_rank_are_killed_soon(
    tmp_path: Path, clock: Clock, is_stopping: bool
) -> None:
    """The cause is the error of the failed rank. The other ranks get no signal to stop, unless the run was
    already stopping. The summary of an earlier start is ignored."""
    (tmp_path / "summary.json").write_text(json.dumps({"status": "done", "exit_code": 0}))

    def end() -> None:
        if is_stopping:
            stop()
            clock.waits_for = tmp_path / "signals"
        raised(1)

    fail = once_ready(end)

    def on_poll() -> None:
        assert not list(tmp_path.glob("logs/*.error.json")), "no poll may follow the error of a rank"
        fail()

    ended = processes.run(tmp_path, RankStart(1, [], grace_s=100.0), on_poll)
    assert (ended.exit_code, ended.failure.headline()) == (1, "rank 1: ValueError: no")
    assert processes.KILL_AFTER_FAILURE_S < clock.now < 2 * processes.KILL_AFTER_FAILURE_S
    assert (tmp_path / "signals").exists() == is_stopping


def test_a_hang_takes_precedence_over_the_error_of_another_rank(tmp_path: Path, clock: Clock) -> None:
    """The failure names the log of torchrun if the hung rank has no log."""
    log = tmp_path / "logs" / "rank-2.log"
    hang = Failure(kind="hang", rank=2, message="hang in step 3", log=str(log), log_tail=["  | frame"])

    def poll(workers: Any) -> bool:
        raised(1)
        return bool(workers) and Path("ready").exists()

    watch: Any = SimpleNamespace(hang=hang, ends=True, poll=poll)
    ended = processes.run(tmp_path, RankStart(1, []), watch=watch)
    assert ended.failure.headline() == "rank 2: hang in step 3"
    assert (ended.failure.log, ended.failure.log_tail) == (str(log.with_name("torchrun.log")), [])
    log.touch()
    assert processes.run(tmp_path, RankStart(1, []), watch=watch).failure == hang


def test_records_of_an_earlier_start_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run also deletes its temporary directory."""
    request: list[Any] = []

    def command(*given: Any) -> list[str]:
        request.extend(given)
        (given[1] / "workers").touch()
        return [sys.executable, "-c", "print('now'); raise SystemExit(3)"]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(processes, "start_command", command)
    write_files(tmp_path, {"logs/torchrun.log": "earlier\n", "heartbeats/rank-5": "earlier"})
    write_lines(tmp_path / "metrics.jsonl", [{"step": 10}, {"step": 20}])
    raised(0)
    ended = processes.run(tmp_path, RankStart(3, ["--resume", "never"]))
    assert ended.failure.log_tail == ["now"]
    assert ended.failure.headline() == "torchrun: exited with code 3 without a summary"
    assert (tmp_path / "logs" / "torchrun.log").read_text() == f"earlier\n{files.STARTED_AGAIN}\nnow\n"
    assert not list(tmp_path.glob("heartbeats/*"))
    assert read_json(tmp_path / "summary.json")["step"] == 20
    assert (request[0].launcher, request[0].nproc) == ("torchrun", 3)
    assert not request[1].exists()
    assert request[2] == [str(tmp_path / "config.yaml"), "--resume", "never"]


@pytest.mark.parametrize(("exit_ns", "first"), [(99, 0), (101, 1)])
def test_a_torchrun_on_another_node_is_the_cause_unless_one_of_its_ranks_failed_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exit_ns: int, first: int
) -> None:
    start_with(monkeypatch, tmp_path, "-c", "raise SystemExit(1)")
    (tmp_path / "config.yaml").touch()

    def collect(this: RanksEnded) -> dict[int, RanksEnded]:
        other = {"failed_ns": 100, "exits": [RankExit(1, 3, exit_ns)]}
        return {k: this.model_copy(update=changes) for k, changes in enumerate(({"failed_ns": None}, other))}

    nodes = mock.Mock(counts=[1, 1], collect=collect, begin=lambda start, _: start)
    nodes.exchange.return_value = Order(failed=False, over=False)
    nodes.blame.side_effect = lambda cause, *_: (cause, 1)
    ended = processes.run(tmp_path, RankStart(2, []), nodes=nodes)
    cause, _, failed_first = nodes.blame.call_args.args
    assert (ended.exit_code, cause.rank, failed_first) == (1, 1, first)


def test_a_run_polls_once_more_after_its_end_and_a_failure_names_the_memory_per_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_with(monkeypatch, tmp_path, "-c", end := "open('last', 'w'); raise SystemExit(3)")
    seen: list[bool] = []
    processes.run(tmp_path, RankStart(2, []), lambda: seen.append(Path("last").exists()))
    assert seen[-1]
    (tmp_path / "config.yaml").write_text(dump_config(make_config("run.device=cpu")))
    files.write_json(tmp_path / "environment.json", {"memory_gib": 64.0})
    start_with(monkeypatch, tmp_path, "-c", f"{RAISE}; {end}")
    ended = processes.run(tmp_path, RankStart(2, []))
    assert ended.failure.explanation[0] == "machine memory 64.00 GiB / 2 ranks = 32.00 GiB per rank"


def test_the_tool_that_starts_ranks_may_end_long_after_a_worker(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = "import os, time\nopen('ready', 'w').close()\nwhile not os.path.exists('go'): time.sleep(0.01)"
    tool = (
        f"{LAUNCHER}\nimport os, time\nwhile not os.path.exists('end'): time.sleep(0.01)\nopen('over', 'w')"
    )
    start_with(monkeypatch, tmp_path, "-c", tool, worker)
    polls = [0]

    def on_poll() -> None:
        polls[0] += Path("ready").exists()
        if polls[0] == 5:
            files.write_json(tmp_path / "summary.json", {"status": "done", "exit_code": 0})
            Path("go").touch()
        if polls[0] == 60:
            Path("end").touch()

    assert processes.run(tmp_path, RankStart(1, []), on_poll).exit_code == 0
    assert Path("over").exists()


# --- the reaper of a killed launcher


def test_the_reaper_repeats_until_no_process_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process has already ended, one starts during the first round, and one must be killed twice."""
    (tmp_path / "scratch").mkdir()
    rounds, killed, handled, naps = [[404, 11], [11, 12], []], list[Any](), set[Any](), list[float]()

    def read(*_: int) -> bytes:
        ignored = {(number, signal.SIG_IGN) for number in (HUP, INT, TERM, signal.SIGUSR1)}
        assert handled == ignored, "the reaper must ignore the signals that end the launcher"
        return b""

    def kill(*given: int) -> None:
        killed.append(given)
        if given[0] == 404:
            raise ProcessLookupError

    fakes = {"os.read": read, "os.kill": kill, "time.sleep": naps.append}
    for name, fake in {**fakes, "signal.signal": lambda *given: handled.add(given)}.items():
        monkeypatch.setattr(f"bert_dp.files.reaper.{name}", fake)
    monkeypatch.setattr(reaper, "marked", lambda marks: rounds.pop(0) if marks == ("RUN=1",) else [])
    reaper.reap(str(tmp_path / "scratch"), "RUN=1")
    assert killed == [(pid, signal.SIGKILL) for pid in (404, 11, 11, 12)]
    assert naps[0] == reaper.PATIENCE_S  # ranks first get time to end without a signal
    assert not (tmp_path / "scratch").exists()


def test_a_reaper_has_none_of_the_launchers_marks_and_ends_with_its_block(tmp_path: Path) -> None:
    mark = f"BERT_DP_TEST_MARK={tmp_path}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(*mark.split("="))
        patch.setattr(reaper, "launcher_marks", lambda: [mark])
        before = set(psutil.Process().children())
        with contextlib.suppress(KeyError), reaper.reaper(tmp_path / "scratch"):
            (child,) = set(psutil.Process().children()) - before
            assert "BERT_DP_TEST_MARK" not in child.environ()
            raise KeyError
    assert not child.is_running()


def test_only_processes_with_every_mark_are_found(tmp_path: Path) -> None:
    """A pid can be reused with another start time, and another pid can have an equal start time."""
    marks = [f"PID={tmp_path}", f"START={tmp_path}"]
    command = [sys.executable, "-I", "-S", "-c", "import sys; sys.stdin.read()"]
    with contextlib.ExitStack() as started:
        bearers = [
            started.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, env=dict(m.split("=", 1) for m in borne))
            )
            for borne in (marks, marks[:1], marks[1:], [])
        ]
        assert reaper.marked(marks) == [bearers[0].pid]


def test_a_wait_for_workers_is_in_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """poll(2) takes milliseconds; given seconds, it would wake the launcher 5,000 times a second."""
    poller = mock.Mock(**{"poll.return_value": []})
    monkeypatch.setattr(processes.select, "poll", lambda: poller)
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        processes.Workers(process, 0).wait(0.2)
    poller.poll.assert_called_once_with(200.0)


def test_ranks_get_a_clean_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Network interfaces and variables of an outer launcher are replaced. The user's limit of threads and the
    user's settings of torch's flight recorder are kept."""
    foreign = {"PET_NNODES", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID", "ACCELERATE_USE_CPU"}
    always = f"""
        TORCH_FR_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1 TORCH_NCCL_ENABLE_TIMING=1
        TORCH_FR_DUMP_TEMP_FILE={tmp_path}/logs/nccl-trace-rank- BERT_DP_LOG_DIR={tmp_path}/logs
        TORCH_ELASTIC_SHUTDOWN_TIMEOUT=300 GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo"""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", *foreign):
        monkeypatch.setenv(name, "eth0")
    for name in ("OMP_NUM_THREADS", "TORCH_FR_BUFFER_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    for tool, ranks, own in (
        ("torchrun", 1, "OMP_NUM_THREADS=8"),
        ("accelerate", 16, f"OMP_NUM_THREADS=1 PET_RDZV_ENDPOINT={tmp_path}/agent PET_RDZV_ID=bert-dp"),
        ("deepspeed", 3, "OMP_NUM_THREADS=2 DS_ACCELERATOR=cpu"),
    ):
        environ = start_environment(RankStart(ranks, [], tool, grace_s=299.7), tmp_path, tmp_path)
        assert {*f"{always} {own}".split()} <= {f"{name}={value}" for name, value in environ.items()}
        assert not foreign & environ.keys()
        assert ("PET_RDZV_ENDPOINT" in environ) == (tool == "accelerate")
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "0")
    on_gpu = start_environment(RankStart(3, [], "deepspeed", on_gpu=True), tmp_path, tmp_path)
    assert (on_gpu["OMP_NUM_THREADS"], on_gpu["TORCH_FR_BUFFER_SIZE"]) == ("5", "0")
    assert "DS_ACCELERATOR" not in on_gpu


@pytest.mark.parametrize("visible", [None, "", "3,1"])
def test_each_tool_starts_the_requested_ranks_on_the_users_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None
) -> None:
    """No tool need be installed. deepspeed sets CUDA_VISIBLE_DEVICES, so its command restores the value."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    worker = ["run/config.yaml", "--resume", "auto"]
    for tool, options in {
        "torchrun": "--nnodes=1 --nproc-per-node=3 --rdzv-endpoint={}/agent --rdzv-backend=bert-dp-file",
        "accelerate": "--config_file={}/accelerate.json --rdzv_backend=bert-dp-file",
        "deepspeed": "--num_gpus=3 --hostfile={}/none --master_addr=127.0.0.1",
    }.items():
        command = start_command(RankStart(3, [], tool), tmp_path, worker)
        assert {*options.format(tmp_path).split(), "bert_dp.worker"} < {*command}
        assert command[-3:] == worker
    settings = read_json(tmp_path / "accelerate.json")
    wanted = {"num_processes": 3, "num_machines": 1, "mixed_precision": "no", "main_process_ip": "127.0.0.1"}
    assert wanted.items() <= settings.items()
    restored = ["-u", "CUDA_VISIBLE_DEVICES"] if visible is None else [f"CUDA_VISIBLE_DEVICES={visible}"]
    place = command.index("env") + 1  # in deepspeed's command
    assert command[place : place + len(restored) + 1] == [*restored, sys.executable]


TOOL = (  # the worker stays a zombie
    "import subprocess, sys, time; "
    "child = subprocess.Popen([sys.executable, '-c', sys.argv[1], '-m', 'bert_dp.worker']); time.sleep(600)"
)


@pytest.mark.parametrize(
    ("end", "cause"),
    [
        ("sys.exit(7)", "exited with code 7 without recording an error"),
        ("os.kill(os.getpid(), 9)", "killed by signal 9 (SIGKILL)"),
    ],
)
def test_the_exit_code_or_signal_of_a_worker_is_reported(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, end: str, cause: str
) -> None:
    worker = f"import os, sys, time\nwhile not os.path.exists('seen'): time.sleep(0.01)\n{end}"
    start_with(monkeypatch, tmp_path, "-c", TOOL, worker)
    monkeypatch.setenv("RANK", "2")
    watch: Any = SimpleNamespace(hang=None, ends=False, poll=lambda workers: workers and Path("seen").touch())
    ended = processes.run(tmp_path, RankStart(1, []), watch=watch)
    assert ended.failure.headline() == f"rank 2: {cause}"
