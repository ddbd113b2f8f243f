"""Set up a rank's world, signals and log before torch is imported; write its heartbeat and records.

The heartbeat is a memory-mapped file, which the launcher may read. The rank writes it without a system call
and never waits for a reader. Torch-free.
"""

import atexit
import contextlib
import dataclasses
import faulthandler
import gc
import io
import mmap
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import IO, Any, NoReturn

from bert_dp import files
from bert_dp.config import ConfigError, Issue
from bert_dp.files.models import FailureKind

GC_THRESHOLD = 100_000  # new objects per collection; each block recomputed in backward adds 7 (about 0.5 KB)


class RunFailed(RuntimeError):
    """Error that is printed without a traceback, because its message gives the cause. In training, rank 0
    raises it after all ranks have stopped together."""

    def __init__(self, cause: str, failure_kind: FailureKind = "error"):
        super().__init__(cause)
        self.failure_kind = failure_kind


class Signals:
    """First stop signal received after `catch`. The training loop reads it in every step."""

    def __init__(self) -> None:
        self.received = 0

    def catch(self) -> None:
        for number in files.honoured(files.STOP_SIGNALS):
            signal.signal(number, self._remember)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Delay automatic garbage collection in the `with` block until there are GC_THRESHOLD new objects.
    Otherwise each rank would pause at a different step, and the other ranks would wait for it. An explicit
    gc.collect() still works, but ignores the objects that exist on entry."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


class TolerantFile(io.FileIO):
    """Raw output file that counts failed writes and discards their data, instead of raising OSError."""

    failed_writes = 0
    """Number of failed writes to this process's log, for summary.json."""

    def __init__(self, descriptor: int):
        super().__init__(descriptor, "w", closefd=False)

    def write(self, data: Any) -> int:
        with contextlib.suppress(OSError):
            written: int | None = super().write(data)
            if written is not None:  # None: a non-blocking pipe is full
                return written
        TolerantFile.failed_writes += 1
        return len(data)


class LogStream(io.TextIOWrapper):
    """Text stream to a file descriptor. Masks secrets, flushes after each line and never raises OSError."""

    def __init__(self, descriptor: int):
        raw = io.BufferedWriter(TolerantFile(descriptor))
        super().__init__(raw, "utf-8", "backslashreplace", line_buffering=True)
        self._secrets = files.secret_values(os.environ)

    def write(self, text: str) -> int:
        super().write(files.hide(text, self._secrets))
        return len(text)


class Records:
    """Writer that appends lines to the record files in a run directory."""

    def __init__(self, run_dir: Path, log_rank0: Callable[[str], None]):
        self._run_dir, self._log = run_dir, log_rank0
        self._incomplete: set[str] = set()
        self.failed_writes = 0

    def append(self, name: str, line: Mapping[str, Any]) -> None:
        """Append `line` (with key `step`) to file `name`. Log a warning at the file's first failed write."""
        try:
            files.append_line(self._run_dir / name, line)
        except OSError as error:
            self.failed_writes += 1
            if name not in self._incomplete:
                self._incomplete.add(name)
                self._log(f"warning: could not write step {line['step']} to {name}: {error}")


def redirect_output(rank: int) -> None:
    """Append this process's output to $BERT_DP_LOG_DIR/rank-N.log if the variable is set. Begin with a
    separator line if the log is not empty. Count failed writes. On SIGUSR2, append stacks to rank-N.stack."""
    sys.stdout, sys.stderr = LogStream(1), LogStream(2)
    if folder := os.environ.get(files.LOG_DIR):
        try:
            log = os.open(Path(folder) / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError:
            TolerantFile.failed_writes += 1
        else:
            os.dup2(log, 1)
            os.dup2(log, 2)
            if os.fstat(log).st_size:
                sys.stdout.write(f"{files.STARTED_AGAIN}\n")
            os.close(log)
    faulthandler.enable()
    show_stacks_on_signal(rank)


def show_stacks_on_signal(rank: int) -> None:
    """On SIGUSR2, append the stacks of all threads to $BERT_DP_LOG_DIR/rank-N.stack (stderr if the variable
    is unset), even while C code holds the interpreter lock."""
    file: IO[str] = sys.stderr
    if folder := os.environ.get(files.LOG_DIR):
        with contextlib.suppress(OSError):  # the disk may be full
            file = open(Path(folder) / f"rank-{rank}.stack", "a")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)


def follow_launcher() -> None:
    """Exit as soon as the launcher has exited, for whatever reason. torchrun starts each worker in a separate
    session, so nothing else would stop this process. Does nothing without a launcher."""
    pid = int(os.environ.get(files.LAUNCHER_PID, "0"))
    if not pid:
        return
    try:
        descriptor = os.pidfd_open(pid)
        same = files.start_ticks(pid) == os.environ.get(files.LAUNCHER_START)
    except OSError:
        same = False
    if not same:
        os._exit(1)

    def watch() -> None:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)  # readable once the launcher has exited
        poller.poll()
        os._exit(1)

    threading.Thread(target=watch, name="follow-launcher", daemon=True).start()


def exit_process(code: int) -> NoReturn:
    """Run the exit handlers and exit with `code`, without finalizing the interpreter. A gloo thread that
    releases a tensor takes the interpreter lock; if this happens during finalization, the process aborts."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


ALIVE_EVERY_S = 1.0
PID, STEP, PHASE, DONE, PROGRESS, PROGRESS_NS, ALIVE = files.BEAT_SLOTS.values()


class HeartbeatWriter:
    """Writer of one rank's heartbeat; `files.Heartbeat` defines the fields."""

    def __init__(self, path: Path):
        self._memory = _map(path)
        self._slots = memoryview(self._memory).cast("q")
        self._slots[PID] = os.getpid()
        self._silence: tuple[float, Callable[[int], None]] | None = None
        self._stopped = threading.Event()
        self.enter("setup")
        self._slots[ALIVE] += 1
        threading.Thread(target=self._live, name="heartbeat", daemon=True).start()

    def enter(self, phase: str, step: int | None = None) -> None:
        """Enter a phase (one of files.PHASES) in optimizer step `step` (None = unchanged). Reset the count of
        completed units of work, except between the phases of one step (files.IN_STEP)."""
        slots = self._slots
        if step is not None:
            slots[STEP] = step
        if step is not None or phase not in files.IN_STEP:
            slots[DONE] = 0
        slots[PHASE] = files.PHASES.index(phase)
        slots[PROGRESS] += 1
        slots[PROGRESS_NS] = time.monotonic_ns()

    def progress(self) -> None:
        """Count a completed unit of work: a micro batch or an evaluation batch."""
        slots = self._slots
        slots[DONE] += 1
        slots[PROGRESS] += 1
        slots[PROGRESS_NS] = time.monotonic_ns()

    def on_silence(self, after_s: float, report: Callable[[int], None]) -> None:
        """Make the heartbeat's thread call `report(progress)` when there has been no progress for `after_s`
        seconds. It calls `report` again only if progress has been made in the meantime."""
        self._silence = after_s, report

    def close(self) -> None:
        """Stop the thread; the file remains."""
        self._stopped.set()

    def _live(self) -> None:
        slots, reported = self._slots, -1
        while not self._stopped.wait(ALIVE_EVERY_S):
            slots[ALIVE] += 1
            if self._silence is None:
                continue
            after_s, report = self._silence
            progress, silent_s = slots[PROGRESS], (time.monotonic_ns() - slots[PROGRESS_NS]) / 1e9
            if silent_s >= after_s and progress != reported:
                reported = progress
                with contextlib.suppress(Exception):  # a failed report must not end this thread
                    report(progress)


def _map(path: Path) -> mmap.mmap:
    """Create and map a file of zeros; if this fails, map anonymous memory. The file is not sparse,
    because storing to a sparse file would kill the rank with SIGBUS if the disk were full. An earlier run's
    file is replaced, not truncated, because the earlier process may still write to it."""
    try:
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_bytes(bytes(files.BEAT_BYTES))
        with path.open("r+b") as file:
            return mmap.mmap(file.fileno(), files.BEAT_BYTES)
    except (OSError, ValueError):  # ValueError: the file is too short
        return mmap.mmap(-1, files.BEAT_BYTES)


# for each program that starts ranks: its variables for rank, local rank, world size and local world size
_SCHEMES = (
    ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),  # torchrun, accelerate, deepspeed
    # Slurm: a batch script also has SLURM_PROCID and SLURM_NTASKS, but only srun sets SLURM_STEP_*
    ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"),
    (  # Open MPI
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
)


@dataclasses.dataclass(frozen=True)
class World:
    rank: int
    local_rank: int
    size: int
    local_size: int


def read_world(environ: Mapping[str, str]) -> World:
    """Read the world from the first of _SCHEMES whose rank and world size are set; if there is none, return a
    world of one rank. Raises ConfigError if a value is not an integer or is out of range."""
    for rank, local_rank, size, local_size in _SCHEMES:
        if rank not in environ or size not in environ:
            continue
        try:
            world = World(
                int(environ[rank]),
                int(environ.get(local_rank, environ[rank])),
                int(environ[size]),
                _local_size(environ, local_size, environ[size]),
            )
        except ValueError:
            message = f"this variable, {size}, the local rank and the local size must be integers"
            raise ConfigError([Issue(rank, "wrong_type", message)]) from None
        if not 0 <= world.rank < world.size:
            message = f"{world.rank} is outside {size}={world.size}"
            raise ConfigError([Issue(rank, "out_of_range", message, world.rank, size)])
        if not 0 <= world.local_rank < world.local_size <= world.size:
            message = f"{world.local_rank} and {local_size}={world.local_size} do not fit {size}={world.size}"
            raise ConfigError([Issue(local_rank, "conflict", message, world.local_rank, size)])
        return world
    return World(0, 0, 1, 1)


def _local_size(environ: Mapping[str, str], name: str, default: str) -> int:
    """Return the number of ranks on this node. Slurm's variable lists all nodes: 4(x2),1 means 4 ranks on
    each of two nodes and 1 on the third. Raises ValueError for any other format."""
    if name == "LOCAL_WORLD_SIZE":
        default = environ.get("LOCAL_SIZE", default)  # deepspeed's name for this variable
    nodes: list[int] = []
    for part in environ.get(name, default).split(","):
        count, _, times = part.rstrip(")").partition("(x")
        nodes += [int(count)] * int(times or 1)
    node = int(environ.get("SLURM_NODEID", "0")) if len(nodes) > 1 else 0
    return nodes[min(node, len(nodes) - 1)]


def check_rendezvous(world: World, environ: Mapping[str, str]) -> None:
    """Raise ConfigError if there are several ranks, but neither bert-dp's rendezvous file nor an address."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
    if world.size > 1 and files.INIT_FILE not in environ and missing:
        message = f"not set, but {world.size} ranks need an address for their rendezvous"
        hint = "set MASTER_ADDR=127.0.0.1 (on several machines: rank 0's host) and any free MASTER_PORT"
        raise ConfigError([Issue(" and ".join(missing), "missing", message, hint=hint)])


def standard_variables(world: World, gpu: int | None) -> dict[str, str]:
    """Return RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE for packages that read only these and use
    LOCAL_RANK as the GPU index. `gpu`: this rank's GPU index (0 if it sees only one GPU); None on a CPU."""
    named = world if gpu is None else dataclasses.replace(world, local_rank=gpu)
    return dict(zip(_SCHEMES[0], map(str, dataclasses.astuple(named)), strict=True))
