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
PARTS = ("data_wait_s", "forward_backward_s", "own_work_s", "optimizer_s", "step_s", "host_s")


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
    """summary.json of a run; None when there is none, or a damaged one."""
    return results.find(directory / "summary.json", Summary)


def heldout_losses(directory: Path) -> dict[int, float]:
    """Step -> held-out loss in nats, of each evaluation of a run."""
    evaluations = record.read_lines(directory / "evals.jsonl")
    return {line["step"]: line["loss"] for line in evaluations if "loss" in line}


def ended(directory: Path) -> Ended | None:
    """How a run says it has ended; None when it has not, or a signal ended it."""
    summary = read_summary(directory)
    if summary is None or summary.signal:
        return None
    if summary.status == "done":
        return "ok"
    return "oom" if summary.out_of_memory else "failed"


def from_outside(directory: Path) -> bool:
    """Whether something outside has ended this run, which says nothing of its settings: no summary was
    written, its disk or its directory failed, or a rank was killed and memory was not why."""
    summary = read_summary(directory)
    if summary is None or summary.signal or (summary.failure and summary.failure.kind in OUTSIDE):
        return True
    failure = summary.failure
    killed = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    if failure is None or failure.killed_by not in killed:
        return False
    return not (failure.memory and failure.memory.oom_kills)


def cause(directory: Path) -> str:
    """Why a run ended as it did, in its own words."""
    summary = read_summary(directory)
    if summary is None:
        return "both attempts ended without writing summary.json"
    return summary.failure.headline() if summary.failure else "its records are not whole"


def failure_kind(directory: Path) -> FailureKind:
    """The kind of failure of a run that did not end well."""
    summary = read_summary(directory)
    return summary.failure.kind if summary and summary.failure else "no_cause"


def is_whole(directory: Path, ranks: int, config: Config) -> bool:
    """Whether the times of every step of every rank are there, where the configuration asks for them, and the
    predictions of a finetuning."""
    if config.objective.name == "finetune" and not (directory / record.PREDICTIONS).is_file():
        return False
    if not config.log.step_times:
        return True
    try:
        read_repeat(directory, ranks, 0, config.schedule.steps or 0)
    except (ValueError, KeyError, TypeError, AttributeError):
        return False
    return True


def read_repeat(directory: Path, ranks: int, warm_up: int, steps: int) -> Repeat:
    """Raises ValueError, KeyError or TypeError when the records do not hold every step of every rank."""
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
