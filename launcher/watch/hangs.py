"""Which rank holds the others up: stacks, states and collectives of a run that stands still -> a verdict, a
report. Pure functions; heartbeats.py gathers what they judge.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from bert_dp.config import ENGINES
from bert_dp.record import IN_STEP, PHASES, Beat, is_own_code

UNHEARD_S = 3.0  # a rank beats about once a second; a busy machine may delay that
STACK_LINES = 12
FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$')
# functions of ours that do nothing but wait for a collective that was started before
WAITS = {
    ("bert_dp/dist.py", "wait"): "a side-group exchange",
    **{place: what for facts in ENGINES.values() for place, what in facts.waits.items()},
}
# these wait for a collective, or work: a backward pass reduces on its way, a device may be busy or stuck
UNSURE = {
    ("autograd/graph.py", "_engine_run_backward"): "the backward pass and its reductions",
    ("cuda/__init__.py", "synchronize"): "the device",
}


# of torch.compile: a finetuning compiles each padded length when it comes, in the middle of a step
COMPILES = (
    "torch/_dynamo/convert_frame.py",
    "torch/_inductor/async_compile.py",
    "torch/_inductor/codecache.py",
    "torch/_inductor/cpp_builder.py",
)
BEGUN = ("started", "completed")  # states of collectives that GPUs have; those under gloo stay "scheduled"
UNEVEN = ("scatter", "all_to_all", "alltoall", "alltoall_base")  # whose inputs may differ by rank


@dataclasses.dataclass(frozen=True)
class Frame:
    path: str
    line: int
    function: str

    @property
    def own(self) -> bool:
        """Code of this project or of its user, not of Python or a package."""
        return is_own_code(self.path)

    def __str__(self) -> str:
        return f"{self.path}:{self.line} in {self.function}"


@dataclasses.dataclass(frozen=True)
class Witness:
    """What could be learned of one rank of a run that makes no progress."""

    rank: int
    beat: Beat
    silent_s: float
    """Without progress."""
    unheard_s: float
    """Since its heartbeat thread last ran."""
    state: str = "S"
    """Of its process, as proc_pid_stat(5) has it."""
    kernel_wait: str = ""
    """The kernel function it waits in, where that may be read."""
    stack: tuple[Frame, ...] = ()
    """Of its main thread, innermost first."""
    collectives: tuple[Mapping[str, Any], ...] = ()
    """As bert_dp.dist.recent_collectives has them."""

    @property
    def stopped(self) -> bool:
        return self.state in ("T", "t")

    @property
    def frozen(self) -> bool:
        """Its process runs no Python, though no signal has stopped it."""
        has_begun = self.beat.pid != 0
        return has_begun and not self.stopped and self.unheard_s >= max(UNHEARD_S, self.silent_s / 2)

    @property
    def phase(self) -> str:
        return PHASES[self.beat.phase]

    @property
    def on_gpu(self) -> bool:
        return any(entry["state"] in BEGUN for entry in self.collectives)

    @property
    def where(self) -> Frame | None:
        return next((frame for frame in self.stack if frame.own), self.stack[0] if self.stack else None)


@dataclasses.dataclass(frozen=True)
class Verdict:
    ranks: tuple[int, ...]
    """Those that hold the others up; () when nobody stands out."""
    why: str


def parse_stack(text: str) -> tuple[Frame, ...]:
    """The main thread's frames, innermost first, of what faulthandler wrote: it comes last."""
    blocks = re.split(r"^(?:Current thread|Thread) .*$", text, flags=re.MULTILINE)
    matches = (FRAME.match(line) for line in blocks[-1].splitlines())
    return tuple(Frame(m[1], int(m[2]), m[3]) for m in matches if m and not m[1].startswith("<frozen"))


def waits_in(stack: Sequence[Frame]) -> tuple[int, str]:
    """(2, collective) while it waits in one, (1, what) where that cannot be told from work, else (0, "")."""
    for frame in stack:
        for table, sureness in ((WAITS, 2), (UNSURE, 1)):
            for (path, function), what in table.items():
                if frame.path.endswith(path) and frame.function == function:
                    return sureness, what
        if frame.path.endswith("torch/distributed/distributed_c10d.py") and not frame.function.startswith(
            "_"
        ):
            return 2, frame.function
    return 0, ""


def compiles(stack: Sequence[Frame]) -> bool:
    """Whether torch.compile is at work, not what it has compiled."""
    return any(frame.path.endswith(COMPILES) for frame in stack)


def find_culprit(witnesses: Sequence[Witness]) -> Verdict:
    """The surest evidence first: stopped, frozen, collectives not started, place in the step, stacks.

    A rank on a GPU runs ahead of it: its place is what it has passed on, its collectives tell what is done.
    """
    if stopped := [w for w in witnesses if w.stopped]:
        by = (
            "a debugger"
            if all(w.state == "t" for w in stopped)
            else "a signal (SIGSTOP); SIGCONT lets it go on"
        )
        return Verdict(_numbers(stopped), f"stopped by {by}")
    # one that is steps further than a rank which can be heard waits for that one: a launch holds the GIL
    # while a GPU's queue is full
    reached = min((w.beat.step for w in witnesses if not w.frozen), default=None)
    if frozen := [w for w in witnesses if w.frozen and (reached is None or w.beat.step <= reached)]:
        return Verdict(_numbers(frozen), _why_frozen(frozen[0]))
    if len(witnesses) == 1:
        return Verdict(_numbers(witnesses), "makes no progress")
    recorded = {w.rank: w.collectives for w in witnesses}
    for on_gpu in (False, True):
        if (verdict := compare_collectives(recorded, on_gpu=on_gpu)) is not None:
            return verdict
    first, last = (choose(w.beat.place for w in witnesses) for choose in (min, max))
    if first != last:
        behind = [w for w in witnesses if w.beat.place == first]
        ahead = next(w for w in witnesses if w.beat.place == last)
        return Verdict(_numbers(behind), f"behind the others, which are {_place(ahead)}")
    sure = {w.rank: waits_in(w.stack)[0] for w in witnesses if w.stack}
    if sure and min(sure.values()) < max(sure.values()):
        least = min(sure.values())
        return Verdict(
            tuple(r for r in sure if sure[r] == least), "not in the collective that the others wait in"
        )
    return Verdict((), "no rank stands out: all wait at the same place")


def _numbers(witnesses: Sequence[Witness]) -> tuple[int, ...]:
    return tuple(w.rank for w in witnesses)


def _why_frozen(witness: Witness) -> str:
    if witness.state == "D":
        function = f" in {witness.kernel_wait}" if witness.kernel_wait else ""
        return f"not schedulable: stuck in the kernel{function}"
    return "not schedulable: holds the interpreter lock (GIL), or gets no processor"


def compare_collectives(
    recorded: Mapping[int, Sequence[Mapping[str, Any]]], *, on_gpu: bool = False
) -> Verdict | None:
    """From each rank's recent collectives: who has not started one that others are in, or started another;
    with `on_gpu` by what their GPUs have begun, of all that ranks have passed on.

    A rank that is behind only because it waits for one in another group (tensor parallelism) is not named.
    None when the records show no difference, or nothing was recorded.
    """
    if on_gpu:
        recorded = {rank: [e for e in all_ if e["state"] in BEGUN] for rank, all_ in recorded.items()}
    has_not = "has on its GPU not begun" if on_gpu else "has not started"
    missing: dict[int, str] = {}
    waiting: set[int] = set()
    groups = {str(entry["group"]) for entries in recorded.values() for entry in entries}
    for group in sorted(groups):
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
            what = f"{_name(ranks[ahead[0]][newest])}, in which {_list(ahead)} {_verb(ahead, 'wait')}"
            missing.update({rank: what for rank in last if last[rank] < newest})
    culprits = [rank for rank in missing if rank not in waiting]
    if culprits:
        return Verdict(tuple(culprits), f"{has_not} {missing[culprits[0]]}")
    if missing:
        each = "; ".join(f"rank {rank} {has_not} {what}" for rank, what in sorted(missing.items()))
        return Verdict(tuple(sorted(missing)), f"they wait for each other: {each}")
    return None


def _mismatch(ranks: Mapping[int, Mapping[int, Mapping[str, Any]]]) -> Verdict | None:
    """The first collective of a group that is not the same on all ranks that started it."""
    for number in sorted({n for entries in ranks.values() for n in entries}):
        kinds: dict[str, list[int]] = {}
        for rank, entries in ranks.items():
            if number in entries:
                kinds.setdefault(_name(entries[number]), []).append(rank)
        if len(kinds) > 1:
            fewest = min(kinds.values(), key=len)
            most = max(map(len, kinds.values()))
            odd = fewest if len(fewest) < most else sorted(rank for who in kinds.values() for rank in who)
            each = ", ".join(f"{_list(who)} {_verb(who, 'call')} {name}" for name, who in kinds.items())
            return Verdict(tuple(odd), f"mismatched collectives, number {number} of their group: {each}")
    return None


def _name(entry: Mapping[str, Any]) -> str:
    """Operation and sizes of a collective, which must be alike on all ranks."""
    if entry["operation"] in UNEVEN:
        return str(entry["operation"])
    return f"{entry['operation']} of {entry['sizes']}"


def _list(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _verb(ranks: Sequence[int], verb: str) -> str:
    return verb if len(ranks) > 1 else f"{verb}s"


def _place(witness: Witness) -> str:
    if witness.phase in ("setup", "compile"):
        return f"in {witness.phase}"
    how = "passed to the GPU" if witness.on_gpu else "done"
    done = f", {witness.beat.done} micro batches {how}" if witness.phase in IN_STEP else ""
    return f"in step {witness.beat.step} ({witness.phase}{done})"


def headline(witnesses: Sequence[Witness], verdict: Verdict, *, name_ranks: bool = True) -> str:
    """The hang in one sentence: the cause of a run that ends of it. Without its ranks where they are said."""
    named = [w for w in witnesses if w.rank in verdict.ranks]
    who = f": {_list(verdict.ranks)}" if named and name_ranks else ""
    seconds = max(w.silent_s for w in named or witnesses)
    place = _place((named or list(witnesses))[0])
    return f"hang{who} {place}: {verdict.why} (no progress for {seconds:.0f} s)"


def report(witnesses: Sequence[Witness], verdict: Verdict) -> list[str]:
    """The lines of a hang's report: the named ranks with their stacks, then one line for each other."""
    lines = [headline(witnesses, verdict)]
    named = [w for w in witnesses if w.rank in verdict.ranks]
    for witness in named:
        lines.append(
            f"  rank {witness.rank} at {witness.where}"
            if witness.where
            else f"  rank {witness.rank}: no stack available"
        )
        lines += [f"    | {frame}" for frame in witness.stack[:STACK_LINES]]
    for witness in witnesses:
        if witness not in named:
            lines.append(f"  rank {witness.rank} {_place(witness)}{_doing(witness)}")
    return lines


def _doing(witness: Witness) -> str:
    sure, what = waits_in(witness.stack)
    place = f" ({witness.where})" if witness.where else ""
    return f": waits in {what}{place}" if sure else place
