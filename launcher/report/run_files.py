"""What a run directory holds, as far as it goes: a whole run, a crashed one, a foreign or torn file."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bert_dp import record
from bert_dp.config import Config, ConfigError, read_yaml, resolve
from bert_dp.config.stored import problem_lines
from bert_dp.cost import num_parameters
from bert_dp.record.models import HeldOut, ProfileFile, Summary
from launcher.report.numbers import number

WALL_PARTS = ("setup", "compile", "train", "eval", "save")  # disjoint; the parts of train are below
NUM_STRETCHES = 500  # of a long metrics.jsonl; at most four lines of each are kept
TRAIN_PARTS = {"data_wait": "data wait", "forward_backward": "forward + backward", "optimizer": "optimizer"}


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run directory holds. `facts` is summary.json or, without one, what the last lines tell."""

    path: Path
    name: str
    finished: bool
    facts: Summary
    metrics: list[dict[str, Any]]
    evals: list[dict[str, Any]]
    config: dict[str, Any]
    environment: dict[str, Any]
    missing: list[str]
    profiles: list[ProfileFile]
    """By rank."""

    unmeasured: HeldOut
    """What the held-out loss will be, by the configuration."""

    @property
    def heldout(self) -> HeldOut:
        """What the held-out loss is the mean of, as far as it is known."""
        return self.facts.heldout or self.unmeasured


def load(run_dir: Path) -> Run:
    """Read whatever is there; what is not is named in `missing`."""
    missing: list[str] = []
    summary = _summary(run_dir / "summary.json", missing)
    config = _yaml(run_dir / "config.yaml", missing)
    environment = record.read_json(run_dir / "environment.json") or {}
    resolved = None
    with contextlib.suppress(ConfigError):
        resolved = resolve([config])
    expected = ["config.yaml", "environment.json"]
    if summary is None:
        expected += ["metrics.jsonl", "evals.jsonl"]
    elif summary.step >= (resolved.log.every_steps if resolved else 1):  # else no line was due
        expected.append("metrics.jsonl")
    missing += [f"{name} is missing" for name in expected if not (run_dir / name).exists()]
    metrics, evals = (_lines(run_dir / name, missing) for name in ("metrics.jsonl", "evals.jsonl"))
    return Run(
        path=run_dir,
        name=record.printable(run_dir.absolute().name),
        finished=summary is not None,
        facts=_completed(summary, lambda: _logged(run_dir, metrics, evals, resolved, environment)),
        metrics=metrics,
        evals=evals,
        config=config,
        environment=environment,
        missing=missing,
        profiles=_profiles(run_dir / "profile"),
        unmeasured=_unmeasured(resolved),
    )


def _unmeasured(config: Config | None) -> HeldOut:
    """The unit and the kind of a loss that no evaluation has told."""
    if config is None or config.objective.name == "mlm":
        return HeldOut()
    return HeldOut(loss_unit=config.loss_unit, examples=0)


def _profiles(folder: Path) -> list[ProfileFile]:
    """The profiles of a run's ranks; a damaged one is left out."""
    profiles = []
    for path in folder.glob("rank-*.json"):
        with contextlib.suppress(ValidationError):
            profiles.append(ProfileFile.model_validate(record.read_json(path)))
    return sorted(profiles, key=lambda profile: profile.rank)


def _summary(path: Path, missing: list[str]) -> Summary | None:
    """Read summary.json. Returns None, and names the problem in `missing`, if it cannot be read."""
    data = record.read_json(path)
    problem = "missing or torn"
    if data is not None:
        try:
            return Summary.model_validate(data)
        except ValidationError as error:
            problem = f"damaged ({problem_lines(error)[0]})"
    missing.insert(0, f"summary.json is {problem}: numbers come from the last lines of the logs")
    return None


def _completed(summary: Summary | None, logged: Callable[[], Summary]) -> Summary:
    """With what the logs tell and the summary does not: a rank that was killed could not write its own, and
    one that went on and was stopped before its next evaluation has no held-out loss."""
    if summary is None:
        return logged()
    if summary.samples is None:
        recorded = summary.model_fields_set - {name for name, value in summary if value in (None, [], {})}
        return logged().model_copy(update={name: getattr(summary, name) for name in recorded})
    if summary.status == "done" or summary.heldout_loss is not None:
        return summary
    told = logged()
    return summary.model_copy(
        update={name: getattr(told, name) for name in ("heldout_loss", "heldout", "heldout_step")}
    )


def _logged(
    run_dir: Path,
    metrics: Sequence[dict[str, Any]],
    evals: Sequence[dict[str, Any]],
    config: Config | None,
    environment: Mapping[str, Any],
) -> Summary:
    """What its other files tell of a run that left no summary, or no more than how it ended."""
    last = metrics[-1] if metrics else {}
    facts: dict[str, Any] = {key: last[key] for key in Summary.model_fields if key in last}
    facts["final_loss"] = last.get("loss")
    if evals:
        newest = evals[-1]
        facts |= {"heldout_loss": newest.get("loss"), "heldout": newest, "heldout_step": newest.get("step")}
    if checkpoints := record.list_checkpoints(run_dir / "checkpoints"):
        facts["checkpoint"] = f"checkpoints/{checkpoints[0].name}"
    if config is not None:
        if config.objective.name == "mlm":
            facts["parameters"] = num_parameters(config.model, config.data.sequence_length)
            facts["uniform_entropy_nats"] = math.log(config.model.vocab_size)
        worker = environment.get("worker")
        decided = worker.get("precision") if isinstance(worker, dict) else None
        facts["precision"] = decided if config.precision == "auto" else config.precision
        gpus = [] if config.run.device == "cpu" else environment.get("gpus") or []
        facts["device"] = gpus[0].get("name") if gpus else "CPU" if environment else None
    every = record.read_lines(run_dir / "metrics.jsonl")  # `metrics` leaves out some of a long run
    with contextlib.suppress(ValidationError, TypeError, KeyError):
        return Summary.model_validate({"status": "stopped", **facts, "time_s": _seconds(every, config)})
    return Summary(status="stopped")


def _seconds(metrics: Iterable[Mapping[str, Any]], config: Config | None) -> dict[str, float]:
    """Of the real steps and their parts: each line's mean x the steps since the line before. The first line
    of a run that goes on from another directory's checkpoint has steps of one line before it."""
    seconds = dict.fromkeys(("train", *TRAIN_PARTS), 0.0)
    before = None
    for line in metrics:
        if before is None:
            before = max(0, line["step"] - config.log.every_steps) if config else 0
        for part in seconds:
            seconds[part] += line["step_time_s" if part == "train" else f"{part}_s"] * (line["step"] - before)
        before = line["step"]
    return {} if before is None else seconds


def other(times: Mapping[str, float]) -> float:
    """Seconds of train outside its named parts; clocks of host and device may overlap by a little."""
    return max(0.0, times.get("train", 0.0) - sum(times.get(part, 0.0) for part in TRAIN_PARTS))


def _lines(path: Path, missing: list[str]) -> list[dict[str, Any]]:
    """The lines of a file of any length in little memory: all of a short one; of a long one some of each of
    NUM_STRETCHES stretches, and the last."""
    if not path.is_file():
        return []
    num_lines, whole = _count_lines(path)
    stretch = max(1, num_lines // NUM_STRETCHES)
    lines = record.read_lines(path)
    kept: list[dict[str, Any]] = []
    num_read = 0
    while part := list(itertools.islice(lines, stretch)):
        num_read += len(part)
        kept += _representative(part)
        last = part[-1]
    if kept and kept[-1] is not last:
        kept.append(last)
    if not whole or num_lines != num_read:
        missing.append(f"{path.name} is torn or empty: {format(num_read, ',')} whole lines read")
    return kept


def _representative(part: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first line of a stretch, those with its least and greatest loss, so that a spike stays visible, and
    the first without one."""
    losses = [number(line.get("loss")) for line in part]
    finite = [i for i, loss in enumerate(losses) if loss is not None]
    chosen = {0, *[i for i, loss in enumerate(losses) if loss is None][:1]}
    if finite:
        chosen |= {choose(finite, key=lambda i: losses[i] or 0.0) for choose in (min, max)}
    return [part[i] for i in sorted(chosen)]


def _count_lines(path: Path) -> tuple[int, bool]:
    """Newlines, and whether the last line has one."""
    count, last = 0, b""
    with path.open("rb") as file:
        while chunk := file.read(2**20):
            count, last = count + chunk.count(b"\n"), chunk[-1:]
    return count, last == b"\n"


def _yaml(path: Path, missing: list[str]) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return {str(key): value for key, value in read_yaml(path).items()}
    except ConfigError as error:
        missing += [
            f"{path.name} is damaged: {str(issue).removeprefix(f'{path}: ')}" for issue in error.issues
        ]
        return {}
