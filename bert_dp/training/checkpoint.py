"""Write and verify checkpoints: canonical (unsharded) state as safetensors and JSON, with SHA-256 hashes.

    checkpoints/step-00000100/  model.safetensors optimizer.safetensors state.json manifest.json

A checkpoint is written to a temporary directory, which is renamed when it is complete. A run resumes from the
newest checkpoint that passes verification. Rank 0 writes in a background thread, whose long operations
(safetensors since 0.8, SHA-256, fsync, the search for NaN) release Python's GIL.
"""

import concurrent.futures
import contextlib
import dataclasses
import errno
import json
import os
import re
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from bert_dp import files as record
from bert_dp.config import CheckpointConfig, ConfigError, Issue
from bert_dp.config.errors import MAX_JSON_BYTES, read_regular, sha256
from bert_dp.files import CheckpointFacts, list_checkpoints
from bert_dp.files.models import Failure, FailureKind, kind_of_error
from bert_dp.parallel import State

VERSION = 1  # version of the manifest's format
MAX_SAVE_SHARE = 0.01  # maximum share of run time that saves may take if checkpoint.every_minutes is set
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
SAVED = ("step", "samples", "elapsed_s", "skipped_steps", "loss_spikes", "recent_losses")


@dataclasses.dataclass
class TrainState:
    """Progress of a run. state.json stores the fields in SAVED; a resumed run resets the other fields."""

    step: int = 0
    """Number of completed optimizer steps."""
    samples: int = 0
    """Number of samples taken from the stream."""
    elapsed_s: float = 0.0
    """Elapsed seconds on rank 0's clock at the last save."""
    skipped_steps: int = 0
    """Steps skipped up to the last log line or save. The current number is `Meter.skipped`, on the device."""
    loss_spikes: int = 0
    recent_losses: list[float] = dataclasses.field(default_factory=list)
    """Most recently logged finite losses, with which the next logged loss is compared."""
    lr: float = 0.0
    """Learning rate of the last step."""
    global_batch: int = 0
    """Number of samples in the last step."""
    logged_step: int = 0
    final_loss: float | None = None
    heldout: Mapping[str, Any] | None = None
    """Latest measurements on held-out data, including `loss`."""
    evaluated_step: int | None = None
    """Step at which `heldout` was measured."""
    eval_s: float = 0.0
    """Seconds spent on evaluations."""
    abort_reason: Failure | None = None
    """Reason to end the run; None = continue."""

    @classmethod
    def from_checkpoint(cls, facts: CheckpointFacts) -> Self:
        """Create the state of a run that resumes from a checkpoint."""
        return cls(logged_step=facts.step, **{name: getattr(facts, name) for name in SAVED})

    def request_abort(self, message: str | None, kind: FailureKind) -> None:
        """Set `abort_reason`, unless `message` is None or a reason is already set."""
        if message is not None and self.abort_reason is None:
            self.abort_reason = Failure(message=message, kind=kind)

    def saved(self) -> dict[str, Any]:
        """Return the fields in SAVED."""
        return {name: getattr(self, name) for name in SAVED}


def save_checkpoint(
    folder: Path, step: int, state: State, facts: dict[str, Any], keep: int, trusted: Collection[Path] = ()
) -> Path:
    """Write the checkpoint `folder`/step-NNNNNNNN, then call `prune` with `keep` and `trusted`. All files are
    synced to disk before the directory gets its final name. Rank 0 only. Raises OSError."""
    final = path_of(folder, step)
    temporary = folder / f"{final.name}.tmp-{uuid.uuid4().hex[:8]}"
    temporary.mkdir()
    try:
        _write_tensors(state["model"], temporary / "model.safetensors")
        _write_tensors(state["optimizer"], temporary / "optimizer.safetensors")
        scaler = {name: value.item() for name, value in state["scaler"].items()}
        (temporary / "state.json").write_text(json.dumps({**facts, "step": step, "scaler": scaler}, indent=1))
        if (tokenizer := folder.parent / record.TOKENIZER).is_file():
            shutil.copyfile(tokenizer, temporary / record.TOKENIZER)
        files = {
            p.name: {"bytes": p.stat().st_size, "sha256": sha256(p)} for p in sorted(temporary.iterdir())
        }
        manifest = {"version": VERSION, "files": files}
        (temporary / "manifest.json").write_text(json.dumps(manifest, indent=1))
        for path in temporary.iterdir():
            _fsync(path)
        _fsync(temporary)
        if final.exists():  # from an earlier run in this directory
            _remove(final)
        temporary.rename(final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _fsync(folder)
    _fsync(folder.parent)
    prune(folder, keep, (final, *trusted))
    return final


def _write_tensors(tensors: dict[str, Any], path: Path) -> None:
    """Write a safetensors file. Raises OSError with the error number from safetensors' message."""
    try:
        save_file(tensors, path)
    except SafetensorError as error:
        match = re.search(r"os error (\d+)", str(error))
        if match is None:
            raise
        number = int(match[1])
        raise OSError(number, os.strerror(number), str(path)) from None


def first_not_finite(state: State) -> str | None:
    """Return the name of the first weight or optimizer tensor with a NaN or infinity; None = all finite."""
    for part in ("model", "optimizer"):
        for name, tensor in state[part].items():
            if not tensor.is_floating_point() or not tensor.numel():
                continue
            if not torch.stack(tensor.aminmax()).isfinite().all():  # aminmax propagates NaN
                return name
    return None


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def _step_of(path: Path) -> int:
    return int(path.name[len("step-") :].partition(".")[0])


def prune(folder: Path, keep: int, trusted: Collection[Path] = ()) -> None:
    """Remove the temporary directories of interrupted saves, and all but the `keep` newest checkpoints.
    Checkpoints renamed by `set_aside_after` are removed once a checkpoint of the same or a later step exists.
    A complete checkpoint is removed only if two newer ones (one if `keep` is 1) are valid. `trusted`:
    checkpoints known to be valid, which are not read again."""
    for path in folder.glob("step-*.tmp-*"):
        shutil.rmtree(path, ignore_errors=True)
    listed = list_checkpoints(folder)
    for path in folder.glob("step-*.abandoned-*"):
        if listed and _step_of(path) <= _step_of(listed[0]):
            _remove(path)
    good = 0
    for place, path in enumerate(listed):
        if place >= keep and good >= min(keep, 2):
            _remove(path)
        elif len(listed) > keep:
            good += path in trusted or check(path) is None


def _remove(path: Path) -> None:
    """Rename a checkpoint, then remove it, so that a partly removed checkpoint does not look complete."""
    with contextlib.suppress(OSError):
        path = path.rename(path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex[:8]}"))
    shutil.rmtree(path, ignore_errors=True)


def set_aside_after(folder: Path, step: int) -> None:
    """Rename checkpoints of steps after `step`, so that a run resumed at `step` ignores them. Rank 0 only."""
    for path in list_checkpoints(folder):
        if _step_of(path) > step:
            path.rename(folder / f"{path.name}.abandoned-{uuid.uuid4().hex[:8]}")


def check(path: Path) -> str | None:
    """Compare a checkpoint's files with its manifest's sizes and hashes; return the first problem or None."""
    try:
        manifest = json.loads(read_regular(path / "manifest.json", MAX_JSON_BYTES))
        if manifest["version"] != VERSION:
            return f"{path}: manifest version {manifest['version']} is not supported (expected {VERSION})"
        if missing := {"model.safetensors", "optimizer.safetensors", "state.json"} - manifest["files"].keys():
            return f"{path}: the manifest does not list {', '.join(sorted(missing))}"
        for name, expected in manifest["files"].items():
            file = path / Path(name).name
            size = file.stat().st_size
            if not file.is_file():  # reading a pipe could block forever
                return f"{file}: not a regular file"
            if size != expected["bytes"]:
                return f"{file}: {size} bytes, but the manifest lists {expected['bytes']}"
            if sha256(file) != expected["sha256"]:
                return f"{file}: SHA-256 differs from the manifest's"
    except OSError as error:
        return f"{error.filename or path}: {error.strerror or error}"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"{path / 'manifest.json'}: invalid manifest ({type(error).__name__}: {error})"
    return None


def newest_valid(folder: Path) -> tuple[Path | None, list[str]]:
    """Return the newest valid checkpoint (None if there is none) and the first problem in each newer one."""
    problems: list[str] = []
    for path in list_checkpoints(folder):
        if (problem := check(path)) is None:
            return path, problems
        problems.append(problem)
    return None, problems


def load(path: Path) -> tuple[State, CheckpointFacts]:
    """Load the unsharded state into host memory; read state.json. Raises ConfigError if a file is damaged."""
    try:
        facts = record.read_checkpoint_facts(path)
        state = load_tensors(path)
        if not state["optimizer"] and facts.step > facts.skipped_steps:
            raise ValueError(f"optimizer.safetensors is empty after {facts.step} steps")
    except (OSError, ValueError, SafetensorError) as error:
        message = f"not a checkpoint ({type(error).__name__}: {error})"
        raise ConfigError([Issue(str(path), "damaged", message)]) from None
    state["scaler"] = {k: torch.tensor(v, dtype=torch.float64) for k, v in facts.scaler.items()}
    return state, facts


def load_tensors(path: Path) -> State:
    """Load weights and optimizer state without verification. Raises OSError, ValueError, SafetensorError."""
    return {part: load_file(path / f"{part}.safetensors") for part in ("model", "optimizer")}


def state_issues(path: Path, state: State, model: nn.Module) -> list[Issue]:
    """List up to eight differences between a loaded checkpoint and `model`. Weights must have the model's
    names, types and shapes; an optimizer tensor must be a scalar or have its parameter's type and shape."""
    expected, weights, lines = model.state_dict(), state["model"], list[str]()
    if absent := sorted(expected.keys() - weights.keys()):
        lines.append(f"model.safetensors has no {', '.join(absent)}")
    for name, tensor in weights.items():
        if name not in expected:
            lines.append(f"the model has no tensor {name!a}")
        elif kind(tensor) != kind(expected[name]):
            lines.append(f"{name}: expected {kind(expected[name])}, found {kind(tensor)}")
    stepped = {key: key.rpartition("/")[0] for key in state["optimizer"]}
    parameters = [name for name, _ in model.named_parameters()]
    if stepped and (absent := sorted(set(parameters) - set(stepped.values()))):
        lines.append(f"optimizer.safetensors has no state for {', '.join(absent)}")
    for key, name in stepped.items():
        tensor = state["optimizer"][key]
        if name not in expected:
            lines.append(f"{key!a} in optimizer.safetensors: the model has no such parameter")
        elif tensor.dim() and kind(tensor) != kind(expected[name]):
            lines.append(f"{key}: expected {kind(expected[name])}, found {kind(tensor)}")
    return [Issue(str(path), "conflict", line[:400]) for line in lines[:8]]


def kind(tensor: Tensor) -> str:
    """Format a tensor's type and shape, as in `float32 (3, 5)`."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def resolve(source: str) -> Path:
    """Return the checkpoint at path `source`, or the newest valid one if `source` is a run directory or its
    checkpoints directory. Warns on stderr about newer, damaged ones. Raises ConfigError if none is valid."""
    path = Path(source)
    if (path / "manifest.json").exists():
        if problem := check(path):
            raise ConfigError([Issue("", "damaged", problem)])
        return path
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    newest, problems = newest_valid(folder)
    if newest is None:
        message = "contains no valid checkpoint" if path.exists() else "does not exist"
        missing = Issue(source, "not_found", message, hint="pass a run directory or a checkpoint")
        raise ConfigError([missing, *(Issue("", "damaged", problem) for problem in problems)])
    for problem in problems:
        sys.stderr.write(f"warning: {problem}; using {newest.name}\n")
    return newest


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class SaveTimer:
    """Schedule of checkpoints. All ranks must pass equal arguments, so that they make equal decisions.
    `elapsed_s`: seconds on the shared clock when the newest checkpoint was saved."""

    def __init__(self, settings: CheckpointConfig, elapsed_s: float):
        self._every_steps, self._shortest_s = settings.every_steps, settings.every_minutes * 60
        self._by_time = settings.every_minutes > 0 and settings.keep > 0
        self._interval_s, self._saved_s = self._shortest_s, elapsed_s
        self._has_grown = False

    def is_due(self, step: int, elapsed_s: float) -> bool:
        by_steps = self._every_steps > 0 and step % self._every_steps == 0
        return by_steps or (self._by_time and elapsed_s - self._saved_s >= self._interval_s)

    def saved(self, elapsed_s: float, pause_s: float) -> str | None:
        """Record a save at `elapsed_s` that paused training for `pause_s` seconds. Return a log line for
        the first save that makes the interval longer than checkpoint.every_minutes, else None."""
        self._saved_s, self._interval_s = elapsed_s, max(self._shortest_s, pause_s / MAX_SAVE_SHARE)
        if not self._by_time or self._has_grown or self._interval_s == self._shortest_s:
            return None
        self._has_grown = True
        return (
            f"a save takes {pause_s:.1f} s, more than 1 % of checkpoint.every_minutes; "
            f"the next save follows in {self._interval_s / 60:.1f} minutes"
        )


class NotFiniteError(ValueError):
    """Error for a state that contains a NaN or an infinity and therefore must not be saved."""

    failure_kind: FailureKind = "not_finite"


class AsyncCheckpointer:
    """Writes checkpoints, one at a time, in a background thread. Every rank has an instance, but only rank
    0 writes. A failed save is counted and leaves earlier checkpoints intact."""

    def __init__(
        self,
        folder: Path,
        settings: CheckpointConfig,
        *,
        log_rank0: Callable[[str], None],
        saved_step: int | None,
    ):
        self._folder, self._settings, self._log = folder, settings, log_rank0
        self.saved_step = saved_step
        """Step of the run's newest complete checkpoint (last `save` if checkpoint.keep is 0) or None."""
        self.failed_saves = self.failed_writes = 0
        self.stall_s = 0.0
        """Total seconds for which training paused to gather states and to wait for earlier writes."""
        self.abort_reason: Failure | None = None
        """If checkpoint.on_error is `stop`: failure of the first unsuccessful save, which ends the run."""
        self.problem: Failure | None = None
        """Failure of the last save; None if that save succeeded."""
        self._writing: Future[None] | None = None
        self._trusted: set[Path] = set()

    @property
    def newest(self) -> Path | None:
        if self.saved_step is None or self._settings.keep == 0:
            return None
        return path_of(self._folder, self.saved_step)

    def save(self, step: int, gather: Callable[[], State | None], metadata: dict[str, Any]) -> None:
        """Gather the state and start writing it. First wait for an earlier write, so that host memory never
        holds two states. If checkpoint.keep is 0, only set `saved_step`. Collective."""
        if self._settings.keep == 0:
            self.saved_step = step
            return
        self.wait()
        start = time.perf_counter()
        state = gather()
        if state is not None:
            writer = ThreadPoolExecutor(1, "checkpoint-writer")
            self._writing = writer.submit(self._write, step, state, metadata)
            # end the thread after the write, because it has OpenMP threads of its own: with more threads
            # than cores, GCC's OpenMP suspends waiting threads, which slows a step on CPUs by 4 %
            writer.shutdown(wait=False)
        self.stall_s += time.perf_counter() - start

    def wait(self) -> int | None:
        """Wait for a pending write; return `saved_step`. Re-raises an unexpected error of the write."""
        self.close()
        if self._writing is not None:
            self._writing.result()
        return self.saved_step

    def close(self) -> None:
        """Wait for a pending write."""
        if self._writing is not None:
            start = time.perf_counter()
            concurrent.futures.wait([self._writing])
            self.stall_s += time.perf_counter() - start

    def _write(self, step: int, state: State, metadata: dict[str, Any]) -> None:
        keep = self._settings.keep
        try:
            name = first_not_finite(state)
            if name is not None:
                raise NotFiniteError(f"{name} contains a value that is not finite")
            self._folder.mkdir(exist_ok=True)
            try:
                path = save_checkpoint(self._folder, step, state, metadata, keep, self._trusted)
            except OSError as error:
                if error.errno not in DISK_FULL:
                    raise
                prune(self._folder, min(keep, 2), self._trusted)  # free space for a second try
                path = save_checkpoint(self._folder, step, state, metadata, keep, self._trusted)
        except (OSError, NotFiniteError) as error:
            self._failed(step, error)
        else:
            self._trusted.add(path)
            self.saved_step, self.problem = step, None

    def _failed(self, step: int, error: OSError | NotFiniteError) -> None:
        """Count a failed save; log a warning unless the previous save failed as well."""
        self.failed_saves += 1
        if isinstance(error, OSError):
            self.failed_writes += 1
        newest = "there is no valid checkpoint yet"
        if self.saved_step is not None:
            newest = f"the newest valid checkpoint is {path_of(self._folder, self.saved_step).name}"
        message = f"{path_of(self._folder, step).name} could not be saved: {error}; {newest}"
        if self.problem is None:
            self._log(f"warning: {message}")
        self.problem = Failure(message=message, kind=kind_of_error(error))
        if self._settings.on_error == "stop":
            self.abort_reason = self.abort_reason or self.problem
