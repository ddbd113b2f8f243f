"""Start one worker per rank; follow them, pass signals on, end them, and say how the run ended."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import psutil

from bert_dp import record
from bert_dp.record.models import Failure, Summary
from launcher import results
from launcher.children import ending, launcher_marks
from launcher.log import Log, complain
from launcher.run.reaper import reaper
from launcher.run.starters import start_command, start_environment
from launcher.run.workers import Workers, kill_tree, send
from launcher.watch import advice, failure
from launcher.watch.heartbeats import Hang, Watch
from launcher.watch.memory import MemoryWatch

POLL_S = 0.2
KILL_AFTER_FAILURE_S, SAVE_AFTER_FAILURE_S = 5.0, 25.0  # torchrun itself kills after 30
LAUNCHER_SAID_BYTES = 2**20
SAME_S = 0.05  # the same signal so soon is the same stop: `timeout` sends to a process and to its group
ONE_STOP_S = 0.5  # a hangup this near to the first signal is the same stop: a closing terminal sends several


@dataclasses.dataclass(frozen=True)
class RunResult:
    exit_code: int
    failure: Failure | None
    signal: int = 0
    """The first stop signal that came, also when it is not what ended the run; 0 = none."""


@contextlib.contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Within the block stop signals are only noted, in the list that this gives: a hangup within ONE_STOP_S
    of the first, and its like within SAME_S, are that one. What this process was told to ignore, as by nohup,
    stays ignored."""
    came: list[int] = []
    first_s = -math.inf

    def note(number: int, frame: object) -> None:
        nonlocal first_s
        now = time.monotonic()
        near = ONE_STOP_S if signal.SIGHUP in (number, *came[:1]) else SAME_S if came[:1] == [number] else 0.0
        if came and now - first_s < near:
            return
        first_s = first_s if came else now
        came.append(number)

    previous = {number: signal.signal(number, note) for number in record.heeded(record.STOP_SIGNALS)}
    try:
        yield came
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def run(
    run_dir: Path,
    nproc: int,
    resume: str,
    on_poll: Callable[[], None],
    *,
    log: Log = complain,
    launcher: str = "torchrun",
    on_gpu: bool = False,
    grace_s: float = 300.0,
    watch: Watch | None = None,
    cores: Collection[int] | None = None,
    options: Sequence[str] = (),
) -> RunResult:
    """Train RUN/config.yaml on `nproc` ranks of this node, started by `launcher`, and return how it ended.

    `on_poll` is called several times a second until a rank has failed. The first stop signal is said in
    `log` and passed to every worker, which checkpoints at its next step and ends; the second, or `grace_s`
    seconds, kills.
    Whatever happens, no process of the run is left. Writes summary.json when the workers could not. `watch`
    may end a hung run. The workers share `cores`, by default all that we may use. `options`: more of each
    worker's.
    """
    logs = run_dir / "logs"
    logs.mkdir(exist_ok=True)
    for stale in (
        *logs.glob("rank-*.error.json"),
        *run_dir.glob("heartbeats/rank-*"),
        run_dir / "summary.json",
    ):
        stale.unlink(missing_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="bert-dp-"))
    worker = [str(run_dir / "config.yaml"), "--resume", resume, *options]
    launcher_log = logs / f"{launcher}.log"
    offset = launcher_log.stat().st_size if launcher_log.exists() else 0
    memory = MemoryWatch()
    with confined(cores):  # the threads of a rank are counted from its cores
        environ = start_environment(launcher, run_dir, scratch, nproc, on_gpu=on_gpu, grace_s=grace_s)
    with stop_signals() as pending:  # until all is told: one that comes last must not cost the summary
        try:
            with reaper(scratch, launcher_marks()):
                with launcher_log.open("ab") as output, confined(cores):
                    process = subprocess.Popen(
                        start_command(launcher, nproc, scratch, worker),
                        env=environ,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                        start_new_session=True,  # a terminal's Ctrl-C is ours to pass on
                    )
                workers = Workers(process, nproc)
                try:
                    hang = _follow(process, workers, run_dir, pending, on_poll, log, grace_s, memory, watch)
                finally:
                    kill_tree(process, workers)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        launcher_said = _text_since(launcher_log, offset)
        unknown = Failure(
            kind="no_cause",
            message=f"{launcher}: {ending(process.returncode, 'and no summary')}",
            log=str(launcher_log),
            log_tail=failure.tail_of(launcher_said),
            explanation=_describe_hang(watch.hang if watch is not None else None),
        )
        cause = failure.decide_cause(logs, launcher_said, workers.exits, unknown, hang=hang)
        if cause is not None:
            cause = advice.explain(cause, run_dir, nproc, memory.facts())
        return _result(run_dir, cause, unknown, pending)


def _follow(
    process: subprocess.Popen[bytes],
    workers: Workers,
    run_dir: Path,
    pending: list[int],
    on_poll: Callable[[], None],
    log: Log,
    grace_s: float,
    memory: MemoryWatch,
    watch: Watch | None,
) -> Hang | None:
    """Follow the ranks until the launcher ends, a second signal comes, or the time to stop is over.

    A batch system may signal every process of a job, and deepspeed's runner dies of it at once: its workers
    then still have their time to save. Returns a hang when the run is ended for it.
    """
    signalled: set[psutil.Process] = set()
    deadline: float | None = None
    last_s = 0.0  # until then a save that is under way may end
    failed = False
    left_behind = _unfinished(run_dir)
    while (ended := process.poll()) is None or (workers.present() and -ended in record.STOP_SIGNALS):
        if ended is not None and not pending:
            pending.append(-ended)
        if len(pending) >= 2:
            return None
        if pending:
            if deadline is None:
                name = signal.Signals(pending[0]).name
                log(f"{name}: stopping; the ranks save after their step. A second signal ends them at once")
            deadline = deadline or time.monotonic() + grace_s
            for worker in workers.present():
                if worker not in signalled:  # it may have started after the signal came
                    signalled.add(worker)
                    send(worker, pending[0])
        failed = failed or _has_failed(run_dir, workers)
        if deadline is None and failed:
            failed_s = time.monotonic()
            deadline, last_s = failed_s + KILL_AFTER_FAILURE_S, failed_s + SAVE_AFTER_FAILURE_S
        is_over = deadline is not None and (now := time.monotonic()) > deadline
        if is_over and (now > last_s or _unfinished(run_dir) <= left_behind):
            return None
        if not failed:  # else the cause is told first
            on_poll()
        if watch is not None and (deadline is None or pending) and (hang := watch.poll(workers.by_rank())):
            return hang
        memory.sample(workers.by_rank())
        workers.wait(POLL_S)
    if not _has_failed(run_dir, workers):
        on_poll()
    return None


def _has_failed(run_dir: Path, workers: Workers) -> bool:
    """Whether a rank has recorded an error, or has ended before the summary was written. Not where nothing
    can be read now: a file server that does not answer has lost nothing."""
    with contextlib.suppress(OSError):
        if any((run_dir / "logs").glob("rank-*.error.json")):
            return True
        return bool(workers.exits) and not (run_dir / "summary.json").exists()
    return False


def _unfinished(run_dir: Path) -> set[Path]:
    """Checkpoints that are being written, or were when their rank was killed."""
    with contextlib.suppress(OSError):
        return set((run_dir / "checkpoints").glob("step-*.tmp-*"))
    return set()


def _text_since(log: Path, offset: int) -> str:
    """What this start of the launcher has added to its log, the last LAUNCHER_SAID_BYTES at most."""
    with log.open("rb") as file:
        file.seek(max(offset, log.stat().st_size - LAUNCHER_SAID_BYTES))
        text = file.read().decode("utf-8", "replace")
    return record.hide(text, record.secret_values(os.environ))  # summary.json quotes it


def _result(run_dir: Path, cause: Failure | None, unknown: Failure, pending: list[int]) -> RunResult:
    """Complete summary.json, or write it if no rank could. `unknown` is the failure if no rank's end explains
    the end of the run.

    A stop signal does not hide a failure with another cause: such a run has failed.
    """
    stop = pending[0] if pending else 0
    summary = results.find(run_dir / "summary.json", Summary)
    if summary is not None and summary.status != "failed":  # written after all was saved
        return RunResult(summary.exit_code, None, stop)
    if stop and summary is None and not _failed_anyway(cause):
        message = f"{signal.Signals(stop).name}: stopped before this run's next checkpoint"
        cause = unknown.model_copy(update={"message": message, "log_tail": [], "kind": "stopped"})
    cause = cause or unknown
    step = 0
    for line in record.read_lines(run_dir / "metrics.jsonl"):
        step = line["step"]
    facts = {"failure": cause, "signal": stop or None, "step": step}
    summary = (summary or Summary(status="failed")).model_copy(update=facts)
    try:
        results.write(run_dir / "summary.json", summary)
    except OSError as error:
        cause = failure.of_a_disk(cause, run_dir, error)
    return RunResult(summary.exit_code, cause, stop)


def _describe_hang(hang: Hang | None) -> list[str]:
    """Describe the hang of a run that was stopped while it hung."""
    if hang is None:
        return []
    who = "" if hang.rank is None else f"rank {hang.rank}: "
    place = f" at {hang.where}" if hang.where else ""
    return [f"no progress: {who}{hang.message}{place}; stacks in hang.txt"]


def _failed_anyway(cause: Failure | None) -> bool:
    """Return False if a stop signal, or the exits of other ranks after it, explain this cause."""
    if cause is None or cause.killed_by in record.STOP_SIGNALS:
        return False
    return cause.kind not in ("no_cause", "peer_gone")


@contextlib.contextmanager
def confined(cores: Collection[int] | None) -> Iterator[None]:
    """What is started within the block runs on these cores; None = on all that we may use."""
    before = os.sched_getaffinity(0)
    if cores is not None:
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
