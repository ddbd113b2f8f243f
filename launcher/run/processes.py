"""Start one worker per rank, monitor the workers, forward signals to them, and complete summary.json."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import psutil

from bert_dp import files
from bert_dp.files.models import Failure, Summary
from bert_dp.files.reaper import describe_exit_code, reaper
from launcher import results
from launcher.log import Log, print_error
from launcher.machine.environment import process_stat
from launcher.run.peers import Coordinator, Member
from launcher.run.starters import WORKER, RankStart, start_command, start_environment
from launcher.watch import failure
from launcher.watch.failure import MemoryWatch, RankExit, RanksEnded
from launcher.watch.hangs import Watch

POLL_S = 0.2  # interval between checks of the ranks
# time limits for ranks after a failure: to exit, and to finish a save; torchrun allows 30 s by default
KILL_AFTER_FAILURE_S, SAVE_AFTER_FAILURE_S = 5.0, 25.0
KILLED_S, KILLED_POLL_S = 10.0, 0.01  # time limit for killed processes to exit; interval between checks
ONE_STOP_S = 0.5  # signals within this time of the first are dropped: terminals and `timeout` send several


@dataclasses.dataclass(frozen=True)
class RunOutcome:
    exit_code: int  # as in summary.json
    failure: Failure | None
    signal: int = 0  # first stop signal received, even if it did not end the run; 0 = none


@contextlib.contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Append stop signals to the yielded list in the `with` block, instead of ending this process.

    Drop signals within ONE_STOP_S of the first one. Signals that were ignored before, for example because of
    nohup, stay ignored.
    """
    received: list[int] = []
    first_s = -math.inf

    def note(number: int, frame: object) -> None:
        nonlocal first_s
        now = time.monotonic()
        if now - first_s >= ONE_STOP_S:
            first_s = first_s if received else now
            received.append(number)

    previous = {number: signal.signal(number, note) for number in files.honoured(files.STOP_SIGNALS)}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def run(
    run_dir: Path,
    start: RankStart,
    on_poll: Callable[[], None] = lambda: None,
    *,
    log: Log = print_error,
    watch: Watch | None = None,
    nodes: Coordinator | None = None,
) -> RunOutcome:
    """Train with RUN/config.yaml on the ranks of this node, as `start` describes, and return the outcome.

    Forward the first stop signal to the workers, which save a checkpoint after their current step and exit.
    Kill them after a second signal or after `start.grace_s`. No process of the run outlives this call.
    Complete summary.json, or write it if the workers could not.

    `on_poll` is called several times a second until a rank fails. `watch` may end a hung run. `nodes`:
    connection to the launchers of the other nodes, which start their own ranks.
    """
    nproc, logs = start.nproc, run_dir / "logs"
    logs.mkdir(exist_ok=True)
    of_ranks = (*logs.glob("rank-*.error.json"), *run_dir.glob("heartbeats/rank-*"))
    for stale in (*of_ranks, run_dir / "summary.json"):
        stale.unlink(missing_ok=True)
    with stop_signals() as pending:  # a signal must not stop the summary from being written
        if nodes is not None:
            start = nodes.begin(start, (run_dir / "config.yaml").read_text(encoding="utf-8"))
            if watch is not None:
                watch.others = nodes
        ended = run_ranks(run_dir, start, pending, log, on_poll=on_poll, watch=watch, peers=nodes)
        by_node = {0: ended} if nodes is None else nodes.collect(ended)
        errors = [error for each in by_node.values() for error in each.errors]
        exits = sorted((e for each in by_node.values() for e in each.exits), key=lambda e: e.time_ns)
        output = "".join(each.said for each in by_node.values())
        # failure time -> node whose torchrun failed before any rank did and whose ranks recorded no error
        first_ns = next((rank_exit.time_ns for rank_exit in exits if rank_exit.code), math.inf)
        failed_ns = {
            each.failed_ns: k
            for k, each in by_node.items()
            if each.failed_ns and each.failed_ns < first_ns and not each.errors
        }
        failed_first = failed_ns[min(failed_ns)] if failed_ns else 0
        first = by_node[failed_first]
        hung = watch.hang if watch is not None else None
        place = f" at {hung.where}" if hung and hung.where else ""
        unknown = Failure(
            kind="no_cause",
            message=f"{start.launcher}: {describe_exit_code(first.code, 'without a summary')}",
            log=first.log,
            log_tail=first.said.splitlines()[-failure.TAIL_LINES :],
            explanation=[f"no progress: {hung.headline()}{place}; stacks in hang.txt"] if hung else [],
        )
        hang = hung if watch is not None and watch.ends else None
        cause = hang or failure.first_cause(logs, output, exits, errors)
        node, here = 0, nproc
        if nodes is not None:
            cause, node = nodes.blame(cause, unknown, failed_first)
            here = nodes.counts[node]
        if cause is not None:
            cause = failure.explain(cause, run_dir, nproc, by_node.get(node, ended).memory, here)
        elif watch is not None and hung is not None:
            watch.report_continued()
        return outcome_of(run_dir, cause, unknown, pending)


def run_ranks(
    run_dir: Path,
    start: RankStart,
    pending: list[int],
    log: Log,
    *,
    on_poll: Callable[[], None] = lambda: None,
    watch: Watch | Member | None = None,
    peers: Coordinator | Member | None = None,
) -> RanksEnded:
    """Start this node's ranks and wait for them. None of their processes outlives this call. `pending`: stop
    signals received so far; new ones are appended during the call."""
    node, logs = start.node, run_dir / "logs"
    scratch = Path(tempfile.mkdtemp(prefix="bert-dp-"))
    worker = [str(run_dir / "config.yaml"), *start.worker]
    launcher_log = logs / f"{start.launcher}.log"
    if node is not None:
        (scratch / "config.yaml").write_text(node.config, encoding="utf-8")
        worker = [str(scratch / "config.yaml"), "--run-dir", str(run_dir), *start.worker]
        launcher_log = logs / f"{start.launcher}-node-{node.place.rank}.log"
        if watch is not None:
            watch.heartbeats = scratch / "heartbeats"
    try:
        with reaper(scratch):
            with launcher_log.open("ab", buffering=0) as log_file, confined(start.cores):
                if log_file.tell():
                    log_file.write(f"{files.STARTED_AGAIN}\n".encode())
                store = node.store if node else None
                process = subprocess.Popen(
                    start_command(start, scratch, worker),
                    # inside `confined`, start_environment counts only the cores in `start.cores`
                    env=start_environment(start, run_dir, scratch),
                    stdin=subprocess.DEVNULL,
                    stdout=log_file,
                    stderr=log_file,
                    start_new_session=True,  # this process forwards Ctrl-C from the terminal
                    pass_fds=[store.fileno()] if store else [],
                )
                if store is not None:
                    store.close()
            workers = Workers(process, start.nproc)
            try:
                _follow(workers, run_dir, start, pending, on_poll, log, watch, peers)
            finally:
                failed_ns = time.monotonic_ns() if process.poll() else None
                kill_tree(workers)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    # hide secrets, because summary.json quotes the output
    output = files.hide(failure.read_end(launcher_log), files.secret_values(os.environ))
    return RanksEnded(
        code=process.returncode,
        failed_ns=failed_ns,
        said=output,
        log=str(launcher_log),
        errors=failure.recorded_errors(logs, start.ranks),
        exits=workers.exits,
        memory=workers.memory.facts(),
    )


def _follow(
    workers: Workers,
    run_dir: Path,
    start: RankStart,
    pending: list[int],
    on_poll: Callable[[], None],
    log: Log,
    watch: Watch | Member | None,
    peers: Coordinator | Member | None,
) -> None:
    """Monitor the ranks until the process that started them exits, or until they must be killed, for example
    after a second stop signal.

    A batch system may signal every process of a job. deepspeed's runner then exits at once. In this case,
    monitor its workers until they have saved a checkpoint and exited.
    """
    signalled: set[psutil.Process] = set()
    deadline: float | None = None
    last_s = 0.0  # after a failure, deadline for a save in progress
    failed = False
    left_behind = _unfinished(run_dir)
    while (ended := workers.launcher.poll()) is None or (workers.present() and -ended in files.STOP_SIGNALS):
        if ended is not None and not pending:
            pending.append(-ended)
        if len(pending) >= 2:
            return
        if peers is not None:
            order = peers.exchange(failed, pending[0] if pending else 0, left=bool(workers.exits))
            failed = failed or order.failed
            if order.signal and not pending:
                pending.append(order.signal)
            if order.over:
                return
        if pending:
            if deadline is None:
                name = signal.Signals(pending[0]).name
                log(f"{name}: stopping; the ranks save after their current step. A second signal kills them")
            deadline = deadline or time.monotonic() + start.grace_s
            for worker in set(workers.present()) - signalled:  # a worker may start after the signal
                signalled.add(worker)
                send(worker, pending[0])
        failed = failed or _has_failed(run_dir, workers, start)
        # a stop signal may also cause a failure: it kills a rank that has not installed its handler yet
        if failed and not last_s:
            failed_s = time.monotonic()
            deadline = min(deadline or math.inf, failed_s + KILL_AFTER_FAILURE_S)
            last_s = failed_s + SAVE_AFTER_FAILURE_S
        is_over = deadline is not None and (now := time.monotonic()) > deadline
        if is_over and (now > last_s or _unfinished(run_dir) <= left_behind):
            return
        if not failed:  # after a failure, display nothing until its cause is known
            on_poll()
        if watch is not None and (deadline is None or pending) and watch.poll(workers.by_rank()):
            return
        workers.wait(POLL_S)
    if not failed and not _has_failed(run_dir, workers, start):
        on_poll()


def _has_failed(run_dir: Path, workers: Workers, start: RankStart) -> bool:
    """Return whether a rank recorded an error, exited before the summary was written (node 0) or exited with
    an error code (other nodes). Return False while the files cannot be read, as when a file server hangs."""
    with contextlib.suppress(OSError):
        if failure.error_files(run_dir / "logs", start.ranks):
            return True
        if start.node is not None and start.node.place.rank:  # this node may not see a new summary yet
            return any(rank_exit.code for rank_exit in workers.exits)
        return bool(workers.exits) and not (run_dir / "summary.json").exists()
    return False


def _unfinished(run_dir: Path) -> set[Path]:
    """List unfinished checkpoints, which a rank is writing or was writing when it was killed."""
    with contextlib.suppress(OSError):
        return set((run_dir / "checkpoints").glob("step-*.tmp-*"))
    return set()


def outcome_of(run_dir: Path, cause: Failure | None, unknown: Failure, pending: Sequence[int]) -> RunOutcome:
    """Complete rank 0's summary.json, or write one if there is none, and return the outcome. `unknown`: the
    failure to report if `cause` is None. If the first stop signal in `pending` ended the run before it had a
    summary, report a failure of the kind `stopped` instead."""
    stop = pending[0] if pending else 0
    summary = results.find(run_dir / "summary.json", Summary)
    if summary is not None and summary.status != "failed":  # rank 0 wrote the summary after its last save
        return RunOutcome(summary.exit_code, None, stop)
    cause = cause or unknown
    by_stop = cause.kind in ("no_cause", "peer_gone") or cause.killed_by in files.STOP_SIGNALS
    if stop and summary is None and (cause is unknown or by_stop):
        message = f"{signal.Signals(stop).name}: stopped before this run saved its next checkpoint"
        cause = unknown.model_copy(update={"message": message, "log_tail": [], "kind": "stopped"})
    elif cause.log is not None and not Path(cause.log).exists():  # the rank has not opened its log
        cause = cause.model_copy(update={"log": unknown.log, "log_tail": unknown.log_tail})
    if summary is None:
        logged = [line["step"] for line in files.read_lines(run_dir / "metrics.jsonl")]
        beats = filter(None, map(files.read_heartbeat, (run_dir / "heartbeats").glob("rank-*")))
        by_all = min((beat.steps_done for beat in beats), default=0)
        summary = Summary(status="failed", step=max([by_all, *logged]))
    summary = summary.model_copy(update={"failure": cause, "signal": stop or None})
    try:
        results.write(run_dir / "summary.json", summary)
    except OSError as error:
        cause = failure.add_disk_error(cause, run_dir, error)
    return RunOutcome(summary.exit_code, cause, stop)


def complete_summary(run_dir: Path, **facts: object) -> None:
    """Add to summary.json, if it exists, the facts that only the launcher knows."""
    summary = results.find(run_dir / "summary.json", Summary)
    if summary is not None:
        with contextlib.suppress(OSError):  # the console reports a full disk anyway
            results.write(run_dir / "summary.json", summary.model_copy(update=facts))


@contextlib.contextmanager
def confined(cores: Collection[int] | None) -> Iterator[None]:
    """Restrict processes that start in the `with` block to these cores; None = no restriction."""
    before = os.sched_getaffinity(0)
    if cores is not None:
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class Workers:
    """Workers among the descendants of `launcher`, with their memory use and exits. Pidfds show an exit at
    once, so that the exit code can be read while the worker is a zombie, before its parent reaps it."""

    def __init__(self, launcher: subprocess.Popen[bytes], size: int):
        self.launcher, self._size = launcher, size
        self._poller = select.poll()
        self._present: dict[int, tuple[psutil.Process, int]] = {}  # pidfd -> worker, rank
        self._ended: set[psutil.Process] = set()
        self.exits: list[RankExit] = []
        self.memory = MemoryWatch()

    def present(self) -> list[psutil.Process]:
        return [worker for worker, _ in self._present.values()]

    def by_rank(self) -> dict[int, psutil.Process]:
        return {rank: worker for worker, rank in self._present.values()}

    def wait(self, seconds: float) -> None:
        """Sample the workers' memory, then wait for `seconds` or until a worker exits."""
        self.memory.sample(self.by_rank())
        if len(self._present) < self._size:
            self._find()
        for descriptor, _ in self._poller.poll(seconds * 1000):
            worker, rank = self._present.pop(descriptor)
            self._ended.add(worker)
            self.exits.append(RankExit(rank, _exit_code(worker.pid), time.monotonic_ns()))
            self._poller.unregister(descriptor)
            os.close(descriptor)

    def close(self) -> None:
        for descriptor in self._present:
            os.close(descriptor)

    def _find(self) -> None:
        seen = {*self.present(), *self._ended}
        for child in _tree(self.launcher):
            if child in seen or (rank := _rank(child)) is None:
                continue
            with contextlib.suppress(OSError):  # the worker has just exited
                descriptor = os.pidfd_open(child.pid)
                self._present[descriptor] = child, rank
                self._poller.register(descriptor, select.POLLIN)


def _tree(launcher: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """List the launcher's process and all its descendants; [] if it has exited."""
    try:
        process = psutil.Process(launcher.pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _rank(child: psutil.Process) -> int | None:
    """Return a worker's rank; None for any other process, even if a worker's command is in its arguments."""
    try:
        command = child.cmdline()
        module = command[command.index("-m") + 1] if "-m" in command[:-1] else None
        return int(child.environ().get("RANK", "0")) if module == WORKER else None
    except (psutil.Error, ValueError):
        return None


def _exit_code(pid: int) -> int | None:
    """Return a zombie's exit code, or -N for signal N; None for other processes. See proc_pid_stat(5)."""
    fields = process_stat(pid)
    if fields[:1] != ["Z"]:
        return None
    status = int(fields[49])
    return -(status & 127) if status & 127 else status >> 8


def send(worker: psutil.Process, number: int) -> None:
    """Send a signal to a worker, unless it has exited."""
    with contextlib.suppress(psutil.Error):
        worker.send_signal(number)  # psutil checks that the pid has not been reused


def kill_tree(workers: Workers) -> None:
    """Kill the launcher, its descendants and all workers. Wait for it, then up to KILLED_S for the rest."""
    tree = {*_tree(workers.launcher), *workers.present()}
    for member in tree:
        send(member, signal.SIGKILL)
    workers.launcher.wait()
    checks = round(KILLED_S / KILLED_POLL_S)
    while any(_runs(member) for member in tree) and (checks := checks - 1):
        time.sleep(KILLED_POLL_S)
    workers.close()


def _runs(process: psutil.Process) -> bool:
    """Return whether a process is running. Zombies do not count: an orphan may stay a zombie for seconds."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
