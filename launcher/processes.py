"""Start one worker per rank through torchrun; follow them, pass signals on, find the first cause."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from bert_dp import record
from bert_dp.record import INIT_FILE, LAUNCHER_PID, LAUNCHER_START, LOG_DIR, start_ticks

DEVNULL = subprocess.DEVNULL
POLL_S = 0.2
KILL_AFTER_FAILURE_S = 5.0
PEER_GONE = ("closed by peer", "reset by peer", "ncclRemoteError")  # a rank only saw another one go
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@dataclasses.dataclass(frozen=True)
class Failure:
    """The first cause of a failed run."""

    rank: int | None
    message: str
    where: str | None
    log: Path | None
    tail: tuple[str, ...]
    bad_input: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class RunResult:
    exit_code: int
    failure: Failure | None


def torchrun_command(nproc: int, store: Path, worker: list[str]) -> list[str]:
    """torchrun on one node with our socket-free rendezvous."""
    return [
        sys.executable, "-m", "torch.distributed.run",
        "--nnodes=1", f"--nproc-per-node={nproc}",
        "--rdzv-backend=bert-dp-file", f"--rdzv-endpoint={store}", "--rdzv-id=bert-dp",
        *worker,
    ]  # fmt: skip


def worker_environment(run_dir: Path, scratch: Path, nproc: int) -> dict[str, str]:
    """The workers' environment: a file to meet in, loopback only, our life to follow, threads per rank."""
    cores = len(os.sched_getaffinity(0))
    return {
        **os.environ,
        INIT_FILE: str(scratch / "workers"),
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cores // nproc))),
        "TORCHELASTIC_LOG_LEVEL": "WARNING",
        LAUNCHER_PID: str(os.getpid()),
        LAUNCHER_START: start_ticks(os.getpid()),
        LOG_DIR: str(run_dir / "logs"),
    }


def run(
    run_dir: Path, nproc: int, resume: str, on_poll: Callable[[], None], *, grace_s: float = 300.0
) -> RunResult:
    """Train RUN/config.yaml on `nproc` ranks of this node and return how it ended.

    `on_poll` is called several times a second. The first stop signal is passed to every worker, which
    checkpoints at its next step and ends; the second, or `grace_s` seconds, kills. Whatever happens, no
    process of the run is left. Writes summary.json when the workers could not.
    """
    logs = run_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    for stale in (*logs.glob("rank-*.error.json"), run_dir / "summary.json"):
        stale.unlink(missing_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="bert-dp-"))
    worker = ["-m", "bert_dp.worker", str(run_dir / "config.yaml"), "--resume", resume]
    torchrun_log = logs / "torchrun.log"
    offset = torchrun_log.stat().st_size if torchrun_log.exists() else 0
    pending: list[int] = []
    previous = {number: signal.signal(number, lambda n, _: pending.append(n)) for number in STOP_SIGNALS}
    try:
        with torchrun_log.open("ab") as log:
            process = subprocess.Popen(
                torchrun_command(nproc, scratch / "agent", worker),
                env=worker_environment(run_dir, scratch, nproc),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,  # a terminal's Ctrl-C is ours to pass on
            )  # fmt: skip
        try:
            _follow(process, logs, pending, on_poll, grace_s)
        finally:
            _kill_tree(process)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        shutil.rmtree(scratch, ignore_errors=True)
    said = torchrun_log.read_bytes()[offset:].decode("utf-8", "replace")
    return _result(run_dir, said, pending)


def _follow(
    process: subprocess.Popen[bytes],
    logs: Path,
    pending: list[int],
    on_poll: Callable[[], None],
    grace_s: float,
) -> None:
    """Until torchrun ends, a second signal comes, or the time to stop is over."""
    signalled: set[psutil.Process] = set()
    deadline: float | None = None
    while process.poll() is None:
        if len(pending) >= 2:
            return
        if pending:
            deadline = deadline or time.monotonic() + grace_s
            for worker in _workers(process):
                if worker not in signalled:  # torchrun may have started it after the signal came
                    signalled.add(worker)
                    _signal(worker, pending[0])
        if deadline is None and any(logs.glob("rank-*.error.json")):
            deadline = time.monotonic() + KILL_AFTER_FAILURE_S
        if deadline is not None and time.monotonic() > deadline:
            return
        on_poll()
        time.sleep(POLL_S)
    on_poll()


def _workers(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    try:
        children = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return [child for child in children if _is_worker(child)]


def _is_worker(child: psutil.Process) -> bool:
    try:
        return "bert_dp.worker" in child.cmdline()
    except psutil.Error:
        return False


def _signal(worker: psutil.Process, number: int) -> None:
    with contextlib.suppress(psutil.Error):
        worker.send_signal(number)  # psutil checks that the pid is still the same process


def _kill_tree(process: subprocess.Popen[bytes]) -> None:
    try:
        tree = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    except psutil.NoSuchProcess:
        tree = []
    for member in tree:
        _signal(member, signal.SIGKILL)
    psutil.wait_procs(tree, timeout=10)
    process.wait()


def _result(run_dir: Path, torchrun_said: str, pending: list[int]) -> RunResult:
    summary = record.read_json(run_dir / "summary.json")
    failure = first_cause(run_dir / "logs", torchrun_said)
    if summary is not None and summary.get("status") in ("done", "stopped"):  # written after all was saved
        return RunResult(int(summary["exit_code"]), None)
    if failure is not None and failure.bad_input:
        return RunResult(2, failure)
    code = 128 + pending[0] if pending else 1
    if failure is None or pending:
        name = signal.Signals(pending[0]).name if pending else ""
        what = f"{name}: stopped before this run's next checkpoint" if pending else "ended without a summary"
        failure = Failure(None, what, None, run_dir / "logs" / "torchrun.log", (), ())
    cause = failure.message if failure.rank is None else f"rank {failure.rank}: {failure.message}"
    lines = list(record.read_lines(run_dir / "metrics.jsonl"))
    facts = {"status": "failed", "exit_code": code, "cause": cause, "where": failure.where,
             "signal": pending[0] if pending else None, "step": lines[-1]["step"] if lines else 0,
             "schema_version": record.SCHEMA_VERSION}  # fmt: skip
    with contextlib.suppress(OSError):  # a full disk must not hide the cause
        record.write_json(run_dir / "summary.json", facts)
    return RunResult(code, failure)


def first_cause(logs: Path, torchrun_said: str) -> Failure | None:
    """The earliest error that a rank recorded; a rank that died by a signal left none, and the errors of the
    others are then its consequences."""
    found = [record.read_json(path) for path in logs.glob("rank-*.error.json")]
    errors = sorted((e for e in found if e), key=lambda e: (e["bad_input"] is None, e["time_ns"]))
    causes = [e for e in errors if not any(text in e["message"] for text in PEER_GONE)]
    died = _killed_rank(torchrun_said, {e["rank"] for e in errors})
    if died is not None and not causes:
        rank, number = died
        name = signal.Signals(number).name
        return Failure(rank, f"killed by signal {number} ({name})", None, *_log_tail(logs, rank), ())
    if not errors:
        return None
    first = (causes or errors)[0]
    rank = int(first["rank"])
    return Failure(
        rank, f"{first['type']}: {first['message']}", first["where"], *_log_tail(logs, rank),
        tuple(first["bad_input"] or ()),
    )  # fmt: skip


def _log_tail(logs: Path, rank: int, lines: int = 20) -> tuple[Path, tuple[str, ...]]:
    path = logs / f"rank-{rank}.log"
    if not path.exists():
        return path, ()
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 16_384))
        text = file.read().decode("utf-8", "replace")
    return path, tuple(text.splitlines()[-lines:])


def _killed_rank(text: str, recorded: set[int]) -> tuple[int, int] | None:
    """(rank, signal) of the first worker in torchrun's report that died by a signal without a record."""
    pattern = r"rank\s*: (\d+) \(local_rank: \d+\)\s*exitcode\s*: -(\d+)"
    for rank, number in re.findall(pattern, text):
        if int(rank) not in recorded:
            return int(rank), int(number)
    return None


def run_module(module: str, arguments: list[str], **kwargs: Any) -> subprocess.CompletedProcess[str]:
    """`python -m module` to its end; for the verbs that need torch or the data room outside a run."""
    mine = {LAUNCHER_PID: str(os.getpid()), LAUNCHER_START: start_ticks(os.getpid())}
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, text=True, check=False, env={**os.environ, **mine}, **kwargs)


def capture_json(module: str, arguments: list[str]) -> tuple[int, Any]:
    """Exit code and the JSON a module printed; its stderr (progress, errors) goes straight to ours."""
    done = run_module(module, arguments, stdout=subprocess.PIPE)
    try:
        return done.returncode, json.loads(done.stdout)
    except ValueError:
        return done.returncode, None
