"""Detect hangs from the ranks' heartbeats, find the ranks that block the others, and end a run that stays
hung. Blocking ranks are identified by process state, heartbeat, stack and recent collectives."""

import collections
import contextlib
import dataclasses
import os
import re
import signal
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import psutil

from bert_dp.config import ENGINES
from bert_dp.config.schema import RunConfig
from bert_dp.files import IN_STEP, PHASES, Heartbeat, heartbeat_path, is_own_code, read_heartbeat, read_json
from bert_dp.files.models import Failure
from launcher.machine.environment import process_stat, read_text

LOOK_EVERY_S = 1.0
UNWATCHED_S = 5.0  # maximum silence counted per poll; a longer gap means that this process itself was stopped
ANSWER_S = 3.0  # time limit for the ranks to write their stacks and collectives
REPORT_AT = 0.8  # collect evidence at this share of the hang limit, so that the report is out by the limit
PATIENT_S = 300.0  # minimum hang limit in the PATIENT phases, in which progress may pause for a long time
COMPILING_S = 30.0  # wait before a compiling rank is checked again
PATIENT = ("setup", "compile", "save", "done")
ABSENT = Heartbeat()  # heartbeat of a rank that has not started
UNHEARD_S = 3.0  # tolerated gap between heartbeats, which come every second, or later on a busy machine
STACK_LINES = 12
FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$')
# (file, function) -> (certainty, operation). Certainty 2: the function only waits; 1: it may also compute
WAITS = {
    ("bert_dp/training/distributed.py", "wait"): (2, "an exchange of host values"),
    **{place: (2, what) for facts in ENGINES.values() for place, what in facts.waits.items()},
    ("autograd/graph.py", "_engine_run_backward"): (1, "the backward pass and its reductions"),
    ("cuda/__init__.py", "synchronize"): (1, "a synchronization with the device"),
}
# source files of torch.compile, which also compiles during steps: finetuning pads batches to several lengths
COMPILES = (
    "torch/_dynamo/convert_frame.py",
    "torch/_inductor/async_compile.py",
    "torch/_inductor/codecache.py",
    "torch/_inductor/cpp_builder.py",
)
BEGUN = ("started", "completed")  # states of collectives that a GPU has started; gloo's stay "scheduled"
UNEVEN = ("scatter", "all_to_all", "alltoall", "alltoall_base")  # operations whose sizes may vary by rank

Collectives = Sequence[Mapping[str, Any]]
"""Recent collectives of a rank, as bert_dp.training.distributed.recent_collectives returns them."""


class Frame(NamedTuple):
    path: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line} in {self.function}"


@dataclasses.dataclass(frozen=True)
class RankSnapshot:
    """Heartbeat, process state and, during a hang, stack and collectives of a rank."""

    rank: int
    heartbeat: Heartbeat
    silent_s: float  # seconds since the last progress
    unheard_s: float  # seconds since the last heartbeat
    state: str = "S"  # state of the process, as in proc_pid_stat(5)
    stack: tuple[Frame, ...] = ()  # frames of the main thread, innermost first
    collectives: Collectives = ()

    @property
    def stopped(self) -> bool:
        return self.state in ("T", "t")

    @property
    def frozen(self) -> bool:
        """Return True if the process is executing no Python code, although no signal has stopped it."""
        has_begun = self.heartbeat.pid != 0
        return has_begun and not self.stopped and self.unheard_s >= max(UNHEARD_S, self.silent_s / 2)

    @property
    def where(self) -> Frame | None:
        """Return the innermost frame in bert-dp's or the user's code, else the innermost frame."""
        own = (frame for frame in self.stack if is_own_code(frame.path))
        return next(own, self.stack[0] if self.stack else None)

    @property
    def phase(self) -> str:
        return PHASES[self.heartbeat.phase]

    def position(self) -> str:
        """Describe the rank's position in the run: step, phase and number of micro batches done."""
        if self.phase in ("setup", "compile"):
            return f"in phase {self.phase}"
        done = f", micro batches done: {self.heartbeat.done}" if self.phase in IN_STEP else ""
        return f"in step {self.heartbeat.step} (phase {self.phase}{done})"


class HangDiagnosis(NamedTuple):
    ranks: tuple[int, ...]  # ranks that block the others; () if unknown
    reason: str


class OtherNodes(Protocol):
    """Interface to the launchers of the other nodes. The class peers.Coordinator implements it."""

    def unheard_s(self) -> float: ...
    def heartbeats(self) -> dict[int, tuple[Heartbeat, str]]: ...
    def ask_for_evidence(self) -> None: ...
    def evidence(self) -> dict[int, tuple[tuple[Frame, ...], Collectives]]: ...


class Watch:
    """Hang detector of a run. Call `poll` often; reports go to `log`, line by line, and to RUN/hang.txt.

    A rank is silent while its heartbeat shows no progress. A run hangs if all ranks, or one stopped or
    frozen rank, stay silent for the hang limit. The limit is the longer of hang_after_s and 3 median step
    times. It is at least PATIENT_S while a rank's stack shows compilation. If all ranks are silent, it is
    also at least PATIENT_S while one of them is in a PATIENT phase, and until the first step is done.
    """

    def __init__(self, run_dir: Path, log: Callable[[str], None], limits: RunConfig) -> None:
        self._run_dir, self._log, self._limits = run_dir, log, limits
        self._looked = time.monotonic()
        self._clock_s = 0.0
        self._ranks: dict[int, RankSnapshot] = {}  # as of the last poll, without stacks and collectives
        self._steps: collections.deque[float] = collections.deque(maxlen=50)  # seconds per step
        self._completed, self._completed_s = 0, 0.0
        self.hang: Failure | None = None  # the reported hang; None if there is none or the run has continued
        self.ends = False  # True if the run must be killed because of the hang
        self.heartbeats: Path | None = None  # directory of the heartbeats; None = RUN/heartbeats
        self.others: OtherNodes | None = None  # launchers of the other nodes
        self._hung_since_s = self._reported_s = self._next_look_s = 0.0

    def poll(self, workers: Mapping[int, psutil.Process], now: float | None = None) -> Failure | None:
        """Check the ranks, at most once per LOOK_EVERY_S. Return the hang if the run must be killed.
        `workers`: rank -> process. `now`: seconds on the monotonic clock; None = read the clock."""
        now = time.monotonic() if now is None else now
        if now - self._looked < LOOK_EVERY_S or not workers:
            return None
        passed_s = min(now - self._looked, UNWATCHED_S)
        self._clock_s += passed_s
        self._looked = now
        self._read(workers, passed_s)
        if self.hang is not None:
            return self._follow_hang()
        if self._is_hung():
            self._report(workers)
        return None

    def _look(self, workers: Mapping[int, psutil.Process]) -> dict[int, tuple[Heartbeat, str]]:
        """Read the heartbeat and process state of every rank."""
        others = self.others.heartbeats() if self.others else {}
        return {**others, **look(self._run_dir, workers, self.heartbeats)}

    def _read(self, workers: Mapping[int, psutil.Process], passed_s: float) -> None:
        before, clock = self._ranks, self._clock_s
        self._ranks = {}
        for rank, (beat, state) in sorted(self._look(workers).items()):
            last = before.get(rank)
            silent_s = last.silent_s + passed_s if last and beat.progress == last.heartbeat.progress else 0.0
            unheard_s = last.unheard_s + passed_s if last and beat.alive == last.heartbeat.alive else 0.0
            self._ranks[rank] = RankSnapshot(rank, beat, silent_s, unheard_s, state)
        beats = [snapshot.heartbeat for snapshot in self._ranks.values()]
        step = min(beat.step for beat in beats)
        if any(PHASES[beat.phase] in ("setup", "compile") for beat in beats):
            self._completed, self._completed_s = step, clock
        elif step - 1 > self._completed:  # mean time of the steps that have ended since _completed_s
            self._steps.append((clock - self._completed_s) / (step - 1 - self._completed))
            self._completed, self._completed_s = step - 1, clock

    def _is_hung(self) -> bool:
        started = [snapshot for snapshot in self._ranks.values() if snapshot.heartbeat != ABSENT]
        if not started or self._clock_s < self._next_look_s:
            return False  # the workers are starting or compiling, or cannot write heartbeats
        if self.others is not None and self.others.unheard_s() >= UNHEARD_S:
            return False  # a node that does not respond is reported as lost, not as hung
        limit = REPORT_AT * max(self._limits.hang_after_s, 3 * statistics.median(self._steps or [0.0]))
        patient = any(s.phase in PATIENT for s in self._ranks.values()) or not self._steps
        if min(s.silent_s for s in started) >= (max(limit, PATIENT_S) if patient else limit):
            return True
        # a rank may look frozen during set-up, because long imports and loading hold the interpreter lock
        return any(s.silent_s >= limit and (s.stopped or (s.frozen and s.phase != "setup")) for s in started)

    def _report(self, workers: Mapping[int, psutil.Process]) -> None:
        snapshots = list(self._ranks.values())
        if self.others is not None:
            self.others.ask_for_evidence()
        found = evidence(self._run_dir, workers, [s for s in snapshots if s.rank in workers])
        if self.others is not None:
            found |= self.others.evidence()
        pairs = [(s, *found.get(s.rank, ((), ()))) for s in snapshots]
        snapshots = [dataclasses.replace(s, stack=stack, collectives=all_) for s, stack, all_ in pairs]
        diagnosis = find_culprit(snapshots)
        now = self._look(workers)
        for rank in diagnosis.ranks or self._ranks:
            if rank not in now or now[rank][0].progress != self._ranks[rank].heartbeat.progress:
                return  # the rank exited or continued while the evidence was collected
        if any(compiles(s.stack) and s.silent_s < PATIENT_S for s in snapshots):
            self._next_look_s = self._clock_s + COMPILING_S
            return
        lines = report(snapshots, diagnosis)
        named = [s for s in snapshots if s.rank in diagnosis.ranks]
        frame = named[0].where if named else None
        only = named[0].rank if len(named) == 1 else None
        self.hang = Failure(
            kind="hang",
            rank=only,
            message=headline(snapshots, diagnosis, name_ranks=only is None),
            where=f"{frame.path}:{frame.line}" if frame else None,
            log=str(self._run_dir / "logs" / f"rank-{only or 0}.log"),
            log_tail=lines[1:],
        )
        self._reported_s = self._clock_s
        self._hung_since_s = self._clock_s - max(s.silent_s for s in snapshots)
        end_s = self._limits.end_hung_after_s
        action = (
            f"ends the run in {end_s:.0f} s unless the ranks continue" if end_s else "does not end the run"
        )
        self._write([*lines, f"  bert-dp {action}; this report is in {self._run_dir / 'hang.txt'}"])

    def _follow_hang(self) -> Failure | None:
        if all(s.silent_s < self._clock_s - self._reported_s for s in self._ranks.values()):
            self.report_continued()
            return None
        self.ends = 0 < self._limits.end_hung_after_s <= self._clock_s - self._reported_s
        return self.hang if self.ends else None

    def report_continued(self) -> None:
        """Report that the run continued. The launcher also calls this if a hung run ends without error."""
        self._write([f"the run continues after {self._clock_s - self._hung_since_s:.0f} s without progress"])
        self.hang = None

    def _write(self, lines: list[str]) -> None:
        with contextlib.suppress(OSError), (self._run_dir / "hang.txt").open("a", encoding="utf-8") as file:
            file.write(time.strftime("%Y-%m-%d %H:%M:%S\n") + "".join(f"{line}\n" for line in lines))
        for line in lines:
            self._log(line)


def look(
    run_dir: Path, workers: Mapping[int, psutil.Process], heartbeats: Path | None = None
) -> dict[int, tuple[Heartbeat, str]]:
    """Read the heartbeat and process state of each rank of this node."""
    seen = {}
    for rank, worker in workers.items():
        beat = read_heartbeat(heartbeat_path(run_dir, rank, heartbeats))
        is_current = beat is not None and beat.pid == worker.pid
        state = (process_stat(worker.pid) or ["X"])[0]  # X: the process is gone
        seen[rank] = (beat if beat is not None and is_current else ABSENT, state)
    return seen


def evidence(
    run_dir: Path, workers: Mapping[int, psutil.Process], snapshots: Sequence[RankSnapshot]
) -> dict[int, tuple[tuple[Frame, ...], Collectives]]:
    """Return (stack, collectives) for each rank of this node. Parts not written within ANSWER_S are empty."""
    able = [s for s in snapshots if s.heartbeat.pid and not s.stopped]  # SIGUSR2 would kill a starting rank
    stacks = {s.rank: run_dir / "logs" / f"rank-{s.rank}.stack" for s in able}
    for rank, path in stacks.items():
        with contextlib.suppress(OSError):
            os.truncate(path, 0)  # the rank appends to the file
        with contextlib.suppress(psutil.Error):
            workers[rank].send_signal(signal.SIGUSR2)
    texts: dict[int, str] = {}
    deadline = time.monotonic() + ANSWER_S
    while time.monotonic() < deadline:
        time.sleep(0.1)
        before, texts = texts, {rank: read_text(path) for rank, path in stacks.items()}
        settled = texts == before and all(texts.values())
        if settled and all(s.frozen or recorded_collectives(run_dir, s) is not None for s in able):
            break
    return {
        s.rank: (parse_stack(texts.get(s.rank, "")), recorded_collectives(run_dir, s) or ())
        for s in snapshots
    }


def recorded_collectives(run_dir: Path, snapshot: RankSnapshot) -> Collectives | None:
    """Read the collectives that the rank wrote since its last progress. Return None if it wrote none."""
    facts = read_json(run_dir / "logs" / f"rank-{snapshot.rank}.collectives.json") or {}
    beat = snapshot.heartbeat
    is_current = (facts.get("pid"), facts.get("progress")) == (beat.pid, beat.progress)
    return tuple(facts["collectives"]) if is_current else None


def parse_stack(text: str) -> tuple[Frame, ...]:
    """Return the main thread's frames, innermost first. faulthandler writes the main thread last."""
    blocks = re.split(r"^(?:Current thread|Thread) .*$", text, flags=re.MULTILINE)
    matches = (FRAME.match(line) for line in blocks[-1].splitlines())
    return tuple(Frame(m[1], int(m[2]), m[3]) for m in matches if m and not m[1].startswith("<frozen"))


def waits_in(stack: Sequence[Frame]) -> tuple[int, str]:
    """Return (certainty, operation) of the wait that a stack shows. Certainty 2: the rank only waits; 1: it
    may also be computing; 0, with operation "": the stack shows no wait."""
    for frame in stack:
        for (path, function), answer in WAITS.items():
            if frame.path.endswith(path) and frame.function == function:
                return answer
        is_torchs = frame.path.endswith("torch/distributed/distributed_c10d.py")
        if is_torchs and not frame.function.startswith("_"):
            return 2, frame.function
    return 0, ""


def compiles(stack: Sequence[Frame]) -> bool:
    """Return True if torch.compile is compiling. Running compiled code does not count."""
    return any(frame.path.endswith(COMPILES) for frame in stack)


def find_culprit(snapshots: Sequence[RankSnapshot]) -> HangDiagnosis:
    """Find the ranks that block the others. The criteria are, from the most to the least reliable: a
    stopped process, a frozen process, collectives not started, the position in the step, and the stacks.

    A rank runs ahead of its GPU. Therefore, its position includes queued work, whereas the states of its
    collectives show which ones the GPU has started.
    """
    if stopped := [s for s in snapshots if s.stopped]:
        return _named(stopped, "stopped by a signal (SIGSTOP) or a debugger; SIGCONT resumes the process")
    # a frozen rank that is steps ahead of a responding rank waits for that rank: while the GPU's queue is
    # full, a kernel launch holds the interpreter lock (GIL)
    reached = min((s.heartbeat.step for s in snapshots if not s.frozen), default=None)
    if frozen := [s for s in snapshots if s.frozen and (reached is None or s.heartbeat.step <= reached)]:
        reason = "interpreter lock (GIL) held, or no CPU time"
        if frozen[0].state == "D":
            reason = "blocked in the kernel"
        return _named(frozen, f"not responding: {reason}")
    if len(snapshots) == 1:
        return _named(snapshots, "the only rank of the run")
    recorded = {s.rank: s.collectives for s in snapshots}
    for on_gpu in (False, True):
        if (diagnosis := compare_collectives(recorded, on_gpu=on_gpu)) is not None:
            return diagnosis
    in_order = sorted(snapshots, key=lambda s: s.heartbeat.place)
    first, last = in_order[0].heartbeat.place, in_order[-1]
    if first != last.heartbeat.place:
        behind = [s for s in snapshots if s.heartbeat.place == first]
        return _named(behind, f"behind the others, which are {last.position()}")
    sure = [(waits_in(s.stack)[0], s) for s in snapshots if s.stack]
    least = min((sureness for sureness, _ in sure), default=0)
    if any(sureness > least for sureness, _ in sure):
        outside = [s for sureness, s in sure if sureness == least]
        return _named(outside, "not in the collective in which the others wait")
    return HangDiagnosis((), "the cause is unknown: all ranks wait at the same position")


def _named(snapshots: Sequence[RankSnapshot], reason: str) -> HangDiagnosis:
    return HangDiagnosis(tuple(s.rank for s in snapshots), reason)


def compare_collectives(recorded: Mapping[int, Collectives], *, on_gpu: bool = False) -> HangDiagnosis | None:
    """Find ranks that have not started a collective in which others wait, or that started a different one.

    `recorded`: rank -> recent collectives. `on_gpu`: count only collectives that the GPUs have started, not
    queued ones. With tensor parallelism, a rank may be behind in one group because it waits in another. It
    is named only if every rank that is behind also waits. Return None if the records show no difference.
    """
    if on_gpu:
        recorded = {rank: [e for e in all_ if e["state"] in BEGUN] for rank, all_ in recorded.items()}
    where = " on its GPU" if on_gpu else ""
    missing: dict[int, str] = {}
    waiting: set[int] = set()
    for group in sorted({str(entry["group"]) for entries in recorded.values() for entry in entries}):
        ranks = {
            rank: {int(e["sequence"]): e for e in entries if str(e["group"]) == group}
            for rank, entries in recorded.items()
        }
        ranks = {rank: entries for rank, entries in ranks.items() if entries}
        if (mismatch := _mismatch(ranks)) is not None:
            return mismatch
        last = {rank: max(entries) for rank, entries in ranks.items()}
        newest = max(last.values())
        ahead = [rank for rank in last if last[rank] == newest]
        if len(ahead) < len(last):
            waiting.update(ahead)
            what = f"{_name(ranks[ahead[0]][newest])}{where}, whereas {_list(ahead, 'wait')} in it"
            missing.update({rank: what for rank in last if last[rank] < newest})
    if culprits := [rank for rank in missing if rank not in waiting]:
        have = "have" if len(culprits) > 1 else "has"
        return HangDiagnosis(tuple(culprits), f"{have} not started {missing[culprits[0]]}")
    if missing:
        each = "; ".join(f"rank {rank} has not started {what}" for rank, what in sorted(missing.items()))
        return HangDiagnosis(tuple(sorted(missing)), f"the ranks wait for each other: {each}")
    return None


def _mismatch(ranks: Mapping[int, Mapping[int, Mapping[str, Any]]]) -> HangDiagnosis | None:
    """Find the first sequence number in a group at which ranks started different collectives."""
    for number in sorted({n for entries in ranks.values() for n in entries}):
        kinds: dict[str, list[int]] = {}
        for rank, entries in ranks.items():
            if number in entries:
                kinds.setdefault(_name(entries[number]), []).append(rank)
        if len(kinds) > 1:
            fewest, most = min(kinds.values(), key=len), max(map(len, kinds.values()))
            odd = fewest if len(fewest) < most else sorted(rank for who in kinds.values() for rank in who)
            each = ", ".join(f"{_list(who, 'call')} {name}" for name, who in kinds.items())
            reason = f"mismatched collectives (number {number} in their group): {each}"
            return HangDiagnosis(tuple(odd), reason)
    return None


def _name(entry: Mapping[str, Any]) -> str:
    """Describe what must match across ranks in a collective: its operation and, if not UNEVEN, its sizes."""
    if entry["operation"] in UNEVEN:
        return str(entry["operation"])
    return f"{entry['operation']} of {entry['sizes']}"


def _list(ranks: Sequence[int], verb: str = "") -> str:
    """Format ranks with a verb: `rank 1 waits`, `ranks 0, 2 wait`."""
    many = len(ranks) > 1
    shown = f"rank{'s' * many} {', '.join(map(str, ranks))}"
    return f"{shown} {verb}{'s' * (not many)}" if verb else shown


def headline(snapshots: Sequence[RankSnapshot], diagnosis: HangDiagnosis, *, name_ranks: bool = True) -> str:
    """Describe the hang in one line. `name_ranks`: include the ranks that block the others."""
    named = [s for s in snapshots if s.rank in diagnosis.ranks]
    who = f": {_list(diagnosis.ranks)}" if named and name_ranks else ""
    named = named or list(snapshots)
    silent_s = max(s.silent_s for s in named)
    return f"hang{who} {named[0].position()}: {diagnosis.reason} (no progress for {silent_s:.0f} s)"


def report(snapshots: Sequence[RankSnapshot], diagnosis: HangDiagnosis) -> list[str]:
    """Describe the hang as lines: headline, blocking ranks with their stacks, then every other rank."""
    lines, others = [headline(snapshots, diagnosis)], []
    for s in snapshots:
        if s.rank in diagnosis.ranks:
            lines.append(f"  rank {s.rank}{f' at {s.where}' if s.where else ': no stack available'}")
            lines += [f"    | {frame}" for frame in s.stack[:STACK_LINES]]
        else:
            sure, what = waits_in(s.stack)
            place = f" ({s.where})" if s.where else ""
            others.append(f"  rank {s.rank} {s.position()}{f': waits in {what}' if sure else ''}{place}")
    return lines + others
