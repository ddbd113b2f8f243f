"""The records that a run has left, read and checked."""

from __future__ import annotations

import dataclasses
import itertools
import signal
from pathlib import Path
from typing import Literal

from bert_dp import record
from bert_dp.config import Config
from bert_dp.record.models import FailureKind, Summary
from launcher import results

Ended = Literal["ok", "oom", "failed"]
OUTSIDE: tuple[FailureKind, ...] = ("disk", "peer_gone")
KILLS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PARTS = ("data_wait_s", "forward_backward_s", "own_work_s", "optimizer_s", "step_s", "host_s")
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError)  # raised by read_repeat


@dataclasses.dataclass(frozen=True)
class Repeat:
    """The timed steps of one run: per rank, per step, in seconds."""

    name: str
    parts: dict[str, list[list[float]]]
    """Name of PARTS -> [rank][step]."""
    memory_gib: list[float]
    exposed_s: list[float]
    """DDP's own samples: seconds of reductions that no backward pass covered, of rank 0; [] without DDP."""
    curve: list[tuple[int, float]]
    """(tokens, loss) of each logged step whose loss is finite."""
    summary: Summary


def read_summary(directory: Path) -> Summary | None:
    """Read the summary.json of a run; None if there is none, or a damaged one."""
    return results.find(directory / "summary.json", Summary)


def heldout_losses(directory: Path) -> dict[int, float]:
    """Read the held-out loss in nats of each evaluation of a run, by step."""
    evaluations = record.read_lines(directory / "evals.jsonl")
    return {line["step"]: line["loss"] for line in evaluations if "loss" in line}


def ended(directory: Path) -> Ended | None:
    """Return how a run ended; None if it has not, or a signal stopped it."""
    summary = read_summary(directory)
    if summary is None or summary.signal:
        return None
    if summary.status == "done":
        return "ok"
    return "oom" if summary.out_of_memory else "failed"


def from_outside(directory: Path) -> bool:
    """Return True for a run whose end says nothing of its settings.

    It wrote no summary, a signal stopped it, its disk failed, or a rank was killed for another reason than
    memory.
    """
    summary = read_summary(directory)
    if summary is None or summary.signal:
        return True
    if (failure := summary.failure) is None:
        return False
    is_killed = failure.killed_by in KILLS and not (failure.memory and failure.memory.oom_kills)
    return failure.kind in OUTSIDE or is_killed


def cause(directory: Path) -> str:
    """Return the reason for the end of a run that did not end well."""
    summary = read_summary(directory)
    if summary is None:
        return "both attempts ended without writing summary.json"
    return summary.failure.headline() if summary.failure else "its records are not whole"


def failure_kind(directory: Path) -> FailureKind:
    """Return the kind of failure of a run that did not end well."""
    summary = read_summary(directory)
    return summary.failure.kind if summary and summary.failure else "no_cause"


def is_whole(directory: Path, ranks: int, config: Config) -> bool:
    """Return False if step times or predictions that the configuration asks for are missing."""
    if config.objective.name == "finetune" and not (directory / record.PREDICTIONS).is_file():
        return False
    try:
        if config.log.step_times:
            read_repeat(directory, ranks, 0, config.schedule.steps or 0)
    except UNREADABLE:
        return False
    return True


def read_repeat(directory: Path, ranks: int, warm_up: int, steps: int) -> Repeat:
    """Read the steps after the warm-up. Raises UNREADABLE if the records lack a step of a rank."""
    parts: dict[str, list[list[float]]] = {name: [] for name in PARTS}
    memory, exposed = [], []
    for rank in range(ranks):
        path = directory / "steps" / f"rank-{rank}.jsonl"
        lines = list(record.read_lines(path))
        for name in PARTS:
            seconds = [float(s) for s in itertools.chain.from_iterable(line[name] for line in lines)]
            if len(seconds) != warm_up + steps:
                raise ValueError(f"{path}: {len(seconds)} steps, {warm_up + steps} were to be taken")
            parts[name].append(seconds[warm_up:])
        memory.append(max(float(line["peak_memory_gib"]) for line in lines))
        if rank == 0:
            samples = [line.get("ddp_exposed_s") for line in lines if line["step"] > warm_up]
            exposed = [float(s) for s in samples if s is not None]
    if min(min(each) for each in parts["step_s"]) <= 0:
        raise ValueError(f"{directory}: a step of no time")
    logged = record.read_lines(directory / "metrics.jsonl")
    curve = [(int(line["tokens"]), float(line["loss"])) for line in logged if line["loss"] is not None]
    summary = read_summary(directory) or Summary(status="done")
    return Repeat(directory.name, parts, memory, exposed, curve, summary)
