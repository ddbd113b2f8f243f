"""Reads the ranks' heartbeats about once a second; names the rank that holds a run up, ends a hung run."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import signal
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from bert_dp.record import PHASES, Beat, ask_for_collectives, heartbeat_path, read_beat, read_json
from launcher.watch import hangs
from launcher.watch.hangs import Verdict, Witness

LOOK_EVERY_S = 1.0
UNWATCHED_S = (
    5.0  # of the time between two looks no more than this counts: we may have been stopped ourselves
)
ANSWER_S = 3.0  # for stacks and records to come
REPORT_AT = 0.8  # share of the limit at which evidence is gathered, so that the report is out by the limit
PATIENT_S = 300.0  # where nothing beats for long though all is well
COMPILING_S = 30.0  # until a rank that compiles is looked at again
PATIENT = ("setup", "compile", "save", "done")
ABSENT = Beat(*[0] * len(dataclasses.fields(Beat)))  # a rank that has not begun


@dataclasses.dataclass(frozen=True)
class Hang:
    """Why a hung run was ended."""

    rank: int | None
    message: str
    where: str | None
    log: Path
    report: tuple[str, ...]


@dataclasses.dataclass
class Pulse:
    """One rank as the watch has seen it: its last beat, and when (on the watch's clock) it last changed."""

    beat: Beat
    moved_s: float
    heard_s: float


class Watch:
    """Call `poll` often. The report goes to `say`, line by line, and to RUN/hang.txt.

    A rank is silent while its heartbeat shows no progress. A hang is: all are silent, or one is that is
    stopped or frozen, for max(hang_after_s, 3 median steps). In set-up, compilation and saving, and until a
    first step is done, all may be silent for PATIENT_S; also while a rank compiles, as its stack shows.
    """

    def __init__(
        self, run_dir: Path, log: Callable[[str], None], *, hang_after_s: float, end_hung_after_s: float
    ) -> None:
        self._run_dir, self._log = run_dir, log
        self._hang_after_s, self._end_after_s = hang_after_s, end_hung_after_s
        self._looked = time.monotonic()
        self._clock_s = 0.0
        self._pulses: dict[int, Pulse] = {}
        self._steps: collections.deque[float] = collections.deque(maxlen=50)  # seconds per step
        self._completed, self._completed_s = 0, 0.0
        self.hang: Hang | None = None
        """The one that was reported, while the run stands still."""
        self._hung_since_s = self._reported_s = self._next_look_s = 0.0

    def poll(self, workers: Mapping[int, psutil.Process], now: float | None = None) -> Hang | None:
        """Look at the ranks that are there, if it is time; the hang when the run is to be ended for it.

        `now`: seconds on the monotonic clock; default: the clock.
        """
        now = time.monotonic() if now is None else now
        if now - self._looked < LOOK_EVERY_S or not workers:
            return None
        self._clock_s += min(now - self._looked, UNWATCHED_S)
        self._looked = now
        self._read(workers)
        if self.hang is not None:
            return self._follow_hang()
        if self._is_hung(workers):
            self._report(workers)
        return None

    def _beat(self, rank: int, worker: psutil.Process) -> Beat:
        beat = read_beat(heartbeat_path(self._run_dir, rank))
        return ABSENT if beat is None or beat.pid != worker.pid else beat

    def _read(self, workers: Mapping[int, psutil.Process]) -> None:
        clock = self._clock_s
        self._pulses = {rank: pulse for rank, pulse in self._pulses.items() if rank in workers}
        for rank, worker in workers.items():
            beat = self._beat(rank, worker)
            pulse = self._pulses.setdefault(rank, Pulse(beat, clock, clock))
            if beat.progress != pulse.beat.progress:
                pulse.moved_s = clock
            if beat.alive != pulse.beat.alive:
                pulse.heard_s = clock
            pulse.beat = beat
        self._time_steps()

    def _time_steps(self) -> None:
        """Seconds per step since the last look at which a step was complete."""
        beats = [pulse.beat for pulse in self._pulses.values()]
        step = min(beat.step for beat in beats)
        if any(PHASES[beat.phase] in ("setup", "compile") for beat in beats):
            self._completed, self._completed_s = step, self._clock_s
        elif step - 1 > self._completed:
            self._steps.append((self._clock_s - self._completed_s) / (step - 1 - self._completed))
            self._completed, self._completed_s = step - 1, self._clock_s

    def _silent_s(self, rank: int) -> float:
        return self._clock_s - self._pulses[rank].moved_s

    def _witness(self, rank: int) -> Witness:
        pulse = self._pulses[rank]
        return Witness(rank, pulse.beat, self._silent_s(rank), self._clock_s - pulse.heard_s)

    def _is_hung(self, workers: Mapping[int, psutil.Process]) -> bool:
        started = [rank for rank, pulse in self._pulses.items() if pulse.beat is not ABSENT]
        if not started or self._clock_s < self._next_look_s:
            return False  # nothing to go by: workers that start, or that have no place for a heartbeat
        median = statistics.median(self._steps) if self._steps else 0.0
        limit = REPORT_AT * max(self._hang_after_s, 3 * median)
        phases = {PHASES[pulse.beat.phase] for pulse in self._pulses.values()}
        patient = bool(phases & set(PATIENT)) or not self._steps
        if min(map(self._silent_s, started)) >= (max(limit, PATIENT_S) if patient else limit):
            return True
        long = [rank for rank in started if self._silent_s(rank) >= limit]
        return any(self._is_still(rank, workers[rank]) for rank in long)

    def _is_still(self, rank: int, worker: psutil.Process) -> bool:
        """Stopped, or frozen; imports and loading hold the interpreter lock for long, so set-up may."""
        witness = dataclasses.replace(self._witness(rank), state=process_state(worker.pid))
        return witness.stopped or (witness.frozen and witness.phase != "setup")

    def _report(self, workers: Mapping[int, psutil.Process]) -> None:
        witnesses = examine(self._run_dir, workers, [self._witness(rank) for rank in sorted(self._pulses)])
        verdict = hangs.find_culprit(witnesses)
        before = {rank: self._pulses[rank].beat.progress for rank in verdict.ranks or self._pulses}
        if any(self._beat(rank, workers[rank]).progress != count for rank, count in before.items()):
            return  # it went on while we looked
        if any(hangs.compiles(w.stack) and w.silent_s < PATIENT_S for w in witnesses):
            self._next_look_s = self._clock_s + COMPILING_S
            return
        lines = hangs.report(witnesses, verdict)
        self.hang = self._hang_of(witnesses, verdict, lines)
        self._reported_s = self._clock_s
        self._hung_since_s = min(pulse.moved_s for pulse in self._pulses.values())
        ending = (
            f"the run is ended in {self._end_after_s:.0f} s" if self._end_after_s else "the run is not ended"
        )
        self._tell([*lines, f"  {ending} unless it goes on; saved in {self._run_dir / 'hang.txt'}"])

    def _hang_of(self, witnesses: list[Witness], verdict: Verdict, lines: list[str]) -> Hang:
        named = [w for w in witnesses if w.rank in verdict.ranks]
        frame = named[0].where if named else None
        place = f"{frame.path}:{frame.line}" if frame else None
        rank = named[0].rank if len(named) == 1 else None
        message = hangs.headline(witnesses, verdict, name_ranks=rank is None)
        log = self._run_dir / "logs" / f"rank-{rank or 0}.log"
        return Hang(rank, message, place, log, tuple(lines[1:]))

    def _follow_hang(self) -> Hang | None:
        assert self.hang is not None
        if all(pulse.moved_s > self._reported_s for pulse in self._pulses.values()):
            self._tell([f"goes on after {self._clock_s - self._hung_since_s:.0f} s"])
            self.hang = None
            return None
        over = self._end_after_s and self._clock_s - self._reported_s >= self._end_after_s
        return self.hang if over else None

    def _tell(self, lines: list[str]) -> None:
        with contextlib.suppress(OSError), (self._run_dir / "hang.txt").open("a", encoding="utf-8") as file:
            file.write(time.strftime("%Y-%m-%d %H:%M:%S\n") + "".join(f"{line}\n" for line in lines))
        for line in lines:
            self._log(line)


def examine(
    run_dir: Path, workers: Mapping[int, psutil.Process], witnesses: Sequence[Witness]
) -> list[Witness]:
    """The witnesses with their processes' states, and the stacks and collectives of those that can answer.

    Takes up to ANSWER_S.
    """
    examined = {
        w.rank: dataclasses.replace(
            w, state=process_state(workers[w.rank].pid), kernel_wait=_kernel_wait(workers[w.rank].pid)
        )
        for w in witnesses
    }
    able = [rank for rank, w in examined.items() if w.beat.pid and not w.stopped]  # else SIGUSR2 would end it
    stacks = {rank: Growth(run_dir / "logs" / f"rank-{rank}.stack") for rank in able}
    awake = {rank: examined[rank].beat.asked + 1 for rank in able if not examined[rank].frozen}
    for rank in able:
        with contextlib.suppress(OSError, psutil.Error):
            if rank in awake:
                ask_for_collectives(heartbeat_path(run_dir, rank), awake[rank])
            workers[rank].send_signal(signal.SIGUSR2)
    deadline = time.monotonic() + ANSWER_S
    while time.monotonic() < deadline:
        time.sleep(0.1)
        settled = [stack.settled() for stack in stacks.values()]
        if all(settled) and all(_answered(run_dir, rank) >= number for rank, number in awake.items()):
            break
    for rank, stack in stacks.items():
        examined[rank] = dataclasses.replace(examined[rank], stack=hangs.parse_stack(stack.text()))
    for rank, number in awake.items():
        if _answered(run_dir, rank) >= number:
            answer = read_json(run_dir / "logs" / f"rank-{rank}.collectives.json") or {}
            examined[rank] = dataclasses.replace(
                examined[rank], collectives=tuple(answer.get("collectives", ()))
            )
    return list(examined.values())


class Growth:
    """What is added to a file from now on; nothing where it cannot be read."""

    def __init__(self, path: Path):
        self._path = path
        self._start = self._size = self._bytes()

    def _bytes(self) -> int:
        try:
            return self._path.stat().st_size
        except OSError:
            return 0

    def settled(self) -> bool:
        """Whether something was added, and nothing since the last call."""
        before, self._size = self._size, self._bytes()
        return self._size == before > self._start

    def text(self) -> str:
        with contextlib.suppress(OSError), self._path.open("rb") as file:
            file.seek(self._start)
            return file.read().decode("utf-8", "replace")
        return ""


def _answered(run_dir: Path, rank: int) -> int:
    beat = read_beat(heartbeat_path(run_dir, rank))
    return beat.answered if beat else 0


def process_state(pid: int) -> str:
    """One letter, as proc_pid_stat(5) has it; "X" when the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "X"


def _kernel_wait(pid: int) -> str:
    """The kernel function that the process waits in; "" where that may not be read or it runs."""
    try:
        name = Path(f"/proc/{pid}/wchan").read_text().strip()
    except OSError:
        return ""
    return "" if name == "0" else name
