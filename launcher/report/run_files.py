"""Read the files of a run, even if the run crashed. Tolerate missing, truncated and damaged files."""

import contextlib
import dataclasses
import fcntl
import itertools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bert_dp import files
from bert_dp.config import Config, ConfigError, flat, read_yaml, resolve
from bert_dp.config.errors import problem_lines
from bert_dp.config.schema import PlannedFigure, PredictedName
from bert_dp.files.models import HeldOut, Summary
from launcher.report.formats import number

WALL_PARTS = ("setup", "compile", "train", "eval", "save")  # sum to the wall time; `train` covers TRAIN_PARTS
TRAIN_PARTS = {"data_wait": "data wait", "forward_backward": "forward + backward", "optimizer": "optimizer"}
NUM_STRETCHES = 500  # a long log is split into about this many parts; at most five lines of each are kept


@dataclasses.dataclass(frozen=True)
class RunFiles:
    """Contents of a run directory."""

    path: Path
    name: str
    finished: bool  # True if summary.json is valid
    summary: Summary  # summary.json, completed with the last lines of the logs
    metrics: list[dict[str, Any]]
    evals: list[dict[str, Any]]
    config: dict[str, Any]
    environment: dict[str, Any]
    missing: list[str]  # descriptions of missing and damaged files
    heldout: HeldOut  # results of the last evaluation
    training_unit: str  # unit of the training loss
    prediction: Mapping[PredictedName, PlannedFigure]  # figures predicted by `bert-dp plan`


def load(run_dir: Path) -> RunFiles:
    """Read the files of a run directory; list missing and damaged files in `missing`."""
    missing: list[str] = []
    summary = _summary(run_dir / "summary.json", missing)
    settings: dict[str, Any] = {}
    if (path := run_dir / "config.yaml").exists():
        try:
            settings = {str(key): value for key, value in read_yaml(path).items()}
        except ConfigError as error:
            problems = [str(issue).removeprefix(f"{path}: ") for issue in error.issues]
            missing += [f"config.yaml is damaged: {problem}" for problem in problems]
    environment = files.read_json(run_dir / "environment.json") or {}
    config = None
    with contextlib.suppress(ConfigError):
        config = resolve([settings])
    was_logged = summary is None or summary.step >= (config.log.every_steps if config else 1)
    expected = ["config.yaml", "environment.json", *["metrics.jsonl"] * was_logged]
    missing += [f"{name} is missing" for name in expected if not (run_dir / name).exists()]
    metrics, evals = (_lines(run_dir / name, missing) for name in ("metrics.jsonl", "evals.jsonl"))
    completed = _completed(summary, _logged(run_dir, metrics, evals, config, environment))
    heldout = completed.heldout or HeldOut()
    if completed.heldout is None and config is not None and config.objective.name != "mlm":
        heldout = HeldOut(loss_unit=config.loss_unit, examples=0)
    return RunFiles(
        path=run_dir,
        name=files.printable(run_dir.absolute().name),
        finished=summary is not None,
        summary=completed,
        metrics=metrics,
        evals=evals,
        config=settings,
        environment=environment,
        missing=missing,
        heldout=heldout,
        training_unit=heldout.loss_unit if config is None else config.training_loss_unit,
        prediction=(config.prediction if config else None) or {},
    )


def list_runs(directory: Path) -> list[dict[str, Any]]:
    """Return a flat record for each run in a directory, most recently changed first. A record contains the
    run's progress, then its settings. `age_s`: seconds since its config, metrics or summary last changed."""
    rows = []
    for path in (file.parent for file in directory.glob("*/config.yaml")):
        run = load(path)
        summary = run.summary
        written = [path / name for name in ("config.yaml", "metrics.jsonl", "summary.json")]
        changed_s = max(file.stat().st_mtime for file in written if file.exists())
        rows.append(
            {
                "run": run.name,
                "directory": str(path.resolve()),
                "status": "running" if is_running(path) else summary.status if run.finished else "killed",
                "step": summary.step,
                "tokens": summary.tokens,
                "loss": summary.final_loss,
                "heldout_loss": summary.heldout_loss,
                "tokens_per_s": summary.tokens_per_s,
                "age_s": max(0.0, time.time() - changed_s),
                **(run.heldout.scores or {}),
                **flat(run.config),
            }
        )
    return sorted(rows, key=lambda row: row["age_s"])


def is_running(run_dir: Path) -> bool:
    """Return True if a rank holds the lock of the run directory."""
    with contextlib.suppress(FileNotFoundError), (run_dir / ".lock").open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _summary(path: Path, missing: list[str]) -> Summary | None:
    """Read summary.json. If it cannot be read, return None and add the problem to `missing`."""
    problem = "missing or truncated"
    if (data := files.read_json(path)) is not None:
        try:
            return Summary.model_validate(data)
        except ValidationError as error:
            problem = f"damaged ({problem_lines(error)[0]})"
    missing.insert(0, f"summary.json is {problem}: the numbers come from the last lines of the logs")
    return None


def _completed(summary: Summary | None, logged: Summary) -> Summary:
    """Return `summary` with its gaps filled from `logged`, the summary built from the other files. A run that
    is killed, or stops before its last evaluation, leaves gaps."""
    if summary is None:
        return logged
    unknown = {name for name, value in summary if value in (None, [], {})}
    if summary.samples is not None:  # rank 0 wrote this summary, so only the last evaluation can be missing
        is_later = summary.status != "done" and summary.heldout_loss is None
        unknown = {"heldout", "heldout_loss", "heldout_step"} if is_later else set()
    return summary.model_copy(update={name: getattr(logged, name) for name in unknown})


def _logged(
    run_dir: Path,
    metrics: Sequence[dict[str, Any]],
    evals: Sequence[dict[str, Any]],
    config: Config | None,
    environment: Mapping[str, Any],
) -> Summary:
    """Build a summary without summary.json, from the other files of the run."""
    last, newest = metrics[-1] if metrics else {}, evals[-1] if evals else None
    known: dict[str, Any] = {key: last[key] for key in Summary.model_fields if key in last}
    known["final_loss"] = last.get("loss")
    if newest is not None:
        known |= {"heldout_loss": newest.get("loss"), "heldout": newest, "heldout_step": newest.get("step")}
    if checkpoints := files.list_checkpoints(run_dir / "checkpoints"):
        known["checkpoint"] = f"checkpoints/{checkpoints[0].name}"
    worker = environment.get("worker")
    worker = worker if isinstance(worker, dict) else {}
    known.setdefault("world_size", worker.get("world_size"))
    if config is not None:
        known["precision"] = worker.get("precision") if config.precision == "auto" else config.precision
        gpus = [] if config.run.device == "cpu" else environment.get("gpus") or []
        known["device"] = gpus[0].get("name") if gpus else "CPU" if environment else None
    try:
        return Summary.model_validate({"status": "stopped", **known})
    except ValidationError:
        return Summary(status="stopped")


def _lines(path: Path, missing: list[str]) -> list[dict[str, Any]]:
    """Sample the lines of a log. From each of about NUM_STRETCHES parts, keep the first and last lines, the
    first line without a loss, and the lines with the lowest and highest loss, so that spikes stay visible."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        num_lines = sum(1 for _ in file)
    lines = files.read_lines(path)
    kept: list[dict[str, Any]] = []
    num_read = 0
    while part := list(itertools.islice(lines, max(1, num_lines // NUM_STRETCHES))):
        num_read += len(part)
        losses = {i: number(line.get("loss")) for i, line in enumerate(part)}
        finite = [(loss, i) for i, loss in losses.items() if loss is not None]
        chosen = {0, len(part) - 1, *[i for i, loss in losses.items() if loss is None][:1]}
        chosen |= {choose(finite)[1] for choose in (min, max) if finite}
        kept += [part[i] for i in sorted(chosen)]
    if num_lines != num_read or not num_lines:
        missing.append(f"{path.name} is truncated or empty: {num_read:,} complete lines read")
    return kept
