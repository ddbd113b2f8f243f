"""Detect a hang: read the ranks' heartbeats about once a second, report a hang, end a run that stays hung."""

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

from bert_dp.record import PHASES, Heartbeat, heartbeat_path, read_heartbeat, read_json
from bert_dp.record.models import Failure
from launcher.watch import hangs
from launcher.watch.hangs import HangDiagnosis, RankSnapshot

LOOK_EVERY_S = 1.0
UNWATCHED_S = 5.0  # the most that counts of the time between two looks: this process may have been stopped
ANSWER_S = 3.0  # for stacks and records to come
REPORT_AT = 0.8  # share of the limit at which evidence is gathered, so that the report is out by the limit
PATIENT_S = 300.0  # where nothing beats for long though all is well
COMPILING_S = 30.0  # until a rank that compiles is looked at again
PATIENT = ("setup", "compile", "save", "done")
ABSENT = Heartbeat()  # of a rank that has not begun


@dataclasses.dataclass
class RankActivity:
    """The last heartbeat of a rank, and when (on the watch's clock) it last changed."""

    heartbeat: Heartbeat
    moved_s: float
    heard_s: float


class Watch:
    """Watches the ranks' heartbeats; call `poll` often. Reports go to `log` by lines, and to RUN/hang.txt.

    A rank is silent while its heartbeat shows no progress. A run hangs when all ranks are silent, or one is
    that is stopped or frozen, for max(hang_after_s, 3 median steps). In set-up, compilation and saving, and
    until a first step is done, all may be silent for PATIENT_S; also while a rank compiles, by its stack.
    """

    def __init__(
        self, run_dir: Path, log: Callable[[str], None], *, hang_after_s: float, end_hung_after_s: float
    ) -> None:
        self._run_dir, self._log = run_dir, log
        self._hang_after_s, self._end_after_s = hang_after_s, end_hung_after_s
        self._looked = time.monotonic()
        self._clock_s = 0.0
        self._ranks: dict[int, RankActivity] = {}
        self._steps: collections.deque[float] = collections.deque(maxlen=50)  # seconds per step
        self._completed, self._completed_s = 0, 0.0
        self.hang: Failure | None = None
        """The hang that was reported, while the run makes no progress."""
        self._hung_since_s = self._reported_s = self._next_look_s = 0.0

    def poll(self, workers: Mapping[int, psutil.Process], now: float | None = None) -> Failure | None:
        """Look at the ranks (rank -> process) if it is time. Returns the hang when the run is to be ended.

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

    def _heartbeat(self, rank: int, worker: psutil.Process) -> Heartbeat:
        beat = read_heartbeat(heartbeat_path(self._run_dir, rank))
        return ABSENT if beat is None or beat.pid != worker.pid else beat

    def _read(self, workers: Mapping[int, psutil.Process]) -> None:
        clock = self._clock_s
        self._ranks = {rank: activity for rank, activity in self._ranks.items() if rank in workers}
        for rank, worker in workers.items():
            beat = self._heartbeat(rank, worker)
            activity = self._ranks.setdefault(rank, RankActivity(beat, clock, clock))
            if beat.progress != activity.heartbeat.progress:
                activity.moved_s = clock
            if beat.alive != activity.heartbeat.alive:
                activity.heard_s = clock
            activity.heartbeat = beat
        self._time_steps([activity.heartbeat for activity in self._ranks.values()])

    def _time_steps(self, beats: Sequence[Heartbeat]) -> None:
        """Note the seconds per step since the last look at which a step was complete."""
        step = min(beat.step for beat in beats)
        if any(PHASES[beat.phase] in ("setup", "compile") for beat in beats):
            self._completed, self._completed_s = step, self._clock_s
        elif step - 1 > self._completed:
            self._steps.append((self._clock_s - self._completed_s) / (step - 1 - self._completed))
            self._completed, self._completed_s = step - 1, self._clock_s

    def _snapshot(self, rank: int, worker: psutil.Process) -> RankSnapshot:
        activity, clock = self._ranks[rank], self._clock_s
        silent_s, unheard_s = clock - activity.moved_s, clock - activity.heard_s
        return RankSnapshot(rank, activity.heartbeat, silent_s, unheard_s, process_state(worker.pid))

    def _is_hung(self, workers: Mapping[int, psutil.Process]) -> bool:
        started = [rank for rank, activity in self._ranks.items() if activity.heartbeat != ABSENT]
        if not started or self._clock_s < self._next_look_s:
            return False  # nothing to go by: workers that start, or that have no place for a heartbeat
        limit = REPORT_AT * max(self._hang_after_s, 3 * statistics.median(self._steps or [0.0]))
        phases = {PHASES[activity.heartbeat.phase] for activity in self._ranks.values()}
        patient = bool(phases & set(PATIENT)) or not self._steps
        snapshots = [self._snapshot(rank, workers[rank]) for rank in started]
        if min(s.silent_s for s in snapshots) >= (max(limit, PATIENT_S) if patient else limit):
            return True
        # imports and loading hold the interpreter lock for long, so a rank may freeze in set-up
        return any(
            s.silent_s >= limit and (s.stopped or (s.frozen and s.phase != "setup")) for s in snapshots
        )

    def _report(self, workers: Mapping[int, psutil.Process]) -> None:
        snapshots = [self._snapshot(rank, workers[rank]) for rank in sorted(self._ranks)]
        snapshots = add_evidence(self._run_dir, workers, snapshots)
        diagnosis = hangs.find_culprit(snapshots)
        before = {rank: self._ranks[rank].heartbeat.progress for rank in diagnosis.ranks or self._ranks}
        if any(self._heartbeat(rank, workers[rank]).progress != count for rank, count in before.items()):
            return  # it went on while we looked
        if any(hangs.compiles(s.stack) and s.silent_s < PATIENT_S for s in snapshots):
            self._next_look_s = self._clock_s + COMPILING_S
            return
        lines = hangs.report(snapshots, diagnosis)
        self.hang = self._failure(snapshots, diagnosis, lines[1:])
        self._reported_s = self._clock_s
        self._hung_since_s = min(activity.moved_s for activity in self._ranks.values())
        end = f"ended in {self._end_after_s:.0f} s" if self._end_after_s else "not ended"
        self._tell([*lines, f"  the run is {end} unless it goes on; saved in {self._run_dir / 'hang.txt'}"])

    def _failure(
        self, snapshots: Sequence[RankSnapshot], diagnosis: HangDiagnosis, report: list[str]
    ) -> Failure:
        named = [s for s in snapshots if s.rank in diagnosis.ranks]
        frame = named[0].where if named else None
        rank = named[0].rank if len(named) == 1 else None
        return Failure(
            kind="hang",
            rank=rank,
            message=hangs.headline(snapshots, diagnosis, name_ranks=rank is None),
            where=f"{frame.path}:{frame.line}" if frame else None,
            log=str(self._run_dir / "logs" / f"rank-{rank or 0}.log"),
            log_tail=report,
        )

    def _follow_hang(self) -> Failure | None:
        if all(activity.moved_s > self._reported_s for activity in self._ranks.values()):
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


def add_evidence(
    run_dir: Path, workers: Mapping[int, psutil.Process], snapshots: Sequence[RankSnapshot]
) -> list[RankSnapshot]:
    """Add kernel waits, and the stacks and collectives of the ranks that can write them. Takes up to
    ANSWER_S."""
    able = [s for s in snapshots if s.heartbeat.pid and not s.stopped]  # SIGUSR2 would end one not begun
    stacks = {s.rank: Growth(run_dir / "logs" / f"rank-{s.rank}.stack") for s in able}
    for s in able:
        with contextlib.suppress(psutil.Error):
            workers[s.rank].send_signal(signal.SIGUSR2)
    deadline = time.monotonic() + ANSWER_S
    while time.monotonic() < deadline:
        time.sleep(0.1)
        settled = [stack.settled() for stack in stacks.values()]
        if all(settled) and all(s.frozen or recorded_collectives(run_dir, s) is not None for s in able):
            break
    return [
        dataclasses.replace(
            s,
            kernel_wait=_kernel_wait(workers[s.rank].pid),
            stack=hangs.parse_stack(stacks[s.rank].text()) if s.rank in stacks else (),
            collectives=recorded_collectives(run_dir, s) or (),
        )
        for s in snapshots
    ]


def recorded_collectives(run_dir: Path, snapshot: RankSnapshot) -> hangs.Collectives | None:
    """Read the collectives that the rank wrote in this silence; None where it wrote none."""
    facts = read_json(run_dir / "logs" / f"rank-{snapshot.rank}.collectives.json") or {}
    beat = snapshot.heartbeat
    is_current = (facts.get("pid"), facts.get("progress")) == (beat.pid, beat.progress)
    return tuple(facts["collectives"]) if is_current else None


class Growth:
    """Reads what is added to a file from now on; nothing where it cannot be read."""

    def __init__(self, path: Path):
        self._path = path
        self._start = self._size = self._bytes()

    def _bytes(self) -> int:
        try:
            return self._path.stat().st_size
        except OSError:
            return 0

    def settled(self) -> bool:
        """Return whether something was added, and nothing since the last call."""
        before, self._size = self._size, self._bytes()
        return self._size == before > self._start

    def text(self) -> str:
        with contextlib.suppress(OSError), self._path.open("rb") as file:
            file.seek(self._start)
            return file.read().decode("utf-8", "replace")
        return ""


def process_state(pid: int) -> str:
    """Read the state of a process, a letter as in proc_pid_stat(5); "X" when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "X"


def _kernel_wait(pid: int) -> str:
    """Read the kernel function that a process waits in; "" where that may not be read or it runs."""
    try:
        name = Path(f"/proc/{pid}/wchan").read_text().strip()
    except OSError:
        return ""
    return "" if name == "0" else name
