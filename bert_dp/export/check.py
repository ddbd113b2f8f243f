"""Is an exported directory the run that it was made from? Both compute the same batches, the directory in a
process without our code.

Axes: B sequences, S positions, O outputs of a position or of a sequence.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from bert_dp import checkpoint, record
from bert_dp.config import ConfigError
from bert_dp.corpus import tokenizer as tokens
from bert_dp.export import foreign
from bert_dp.export.as_function import ExportSource, open_run
from bert_dp.rank_process import RunFailed
from bert_dp.record.exported import Exported, read_exported

BATCHES = (1, 3, 8)
LENGTHS = (5, 37, 128)  # and the run's own
TOLERANCES = {"hf": 1e-5, "onnx": 1e-4, "aoti": 1e-4}
"""Largest difference in fp32, of outputs up to 1; of larger ones as a share of the largest."""

Batch = tuple[NDArray[np.int64], NDArray[np.int64]]


def check(directory: Path, run: Path | None, python: str = sys.executable) -> dict[str, Any]:
    """What main prints: see launcher.results.ExportCheck. `run`: its directory; None = see `run_places`.
    `python`: the interpreter that loads the directory.

    Raises ConfigError for a directory or run that cannot be used, or that is another one, and RunFailed where
    the directory cannot be loaded.
    """
    exported = read_exported(directory)
    source = open_source(directory, exported, run)
    batches = make_batches(source, exported)
    outputs, facts = compute_apart(directory, batches, python)
    tolerance = TOLERANCES[exported.format] if exported.precision == "fp32" else None
    rows = [
        compare(batch, reference(source, *batch), output, exported, tolerance)
        for batch, output in zip(batches, outputs, strict=True)
    ]
    comparison = {
        "format": exported.format,
        "kind": exported.kind,
        "precision": exported.precision,
        "architecture": exported.architecture,
        "checkpoint": str(source.checkpoint),
        "tolerance": tolerance,
        "rows": rows,
        "parameters": facts.get("parameters"),
        "stored_parameters": stored_parameters(directory),
        "run_parameters": exported.parameters,
        "not_loaded": facts.get("odd", []),
        "again": facts["again"],
        "versions": facts["versions"],
    }
    return {**comparison, "ok": is_ok(comparison)}


def is_ok(comparison: dict[str, Any]) -> bool:
    """Whether the two compute the same. A directory of another precision is measured, not judged."""
    tolerance = comparison["tolerance"]
    same_weights: bool = (
        not comparison["not_loaded"] and comparison["parameters"] == comparison["stored_parameters"]
    )
    if tolerance is None:
        return same_weights
    near = all(row["difference"] <= tolerance and row["top1"] in (None, 1) for row in comparison["rows"])
    return near and same_weights and comparison["again"] <= tolerance


def open_source(directory: Path, exported: Exported, run: Path | None) -> ExportSource:
    """The run of a directory. Raises ConfigError when it is not found or has other weights."""
    candidates = run_places(directory, exported.run) if run is None else [run]
    for candidate in candidates:
        own = checkpoint.path_of(candidate / "checkpoints", exported.step)  # it may have been trained on
        try:
            path = checkpoint.resolve(str(own if own.is_dir() else candidate))
        except ConfigError as error:
            if run is None:
                continue  # a folder of the same name that is no run
            raise ConfigError([f"--run: {issue}" for issue in error.issues]) from None
        if record.weights_hash(path) == exported.weights_sha256:
            return open_run(path, encoder=exported.kind == "encoder")
        if run is not None:
            holder = path.name if path != run else "it"
            raise ConfigError(
                [
                    f"--run: {run} has not the weights that were exported at step {exported.step} "
                    f"({holder} has others)"
                ]
            )
    raise ConfigError(
        [
            f"--run: no run {exported.run} with the weights of DIR here, in runs or beside DIR; name the run "
            "that has them"
        ]
    )


def run_places(directory: Path, name: str) -> list[Path]:
    """The runs of this name in the current folder, in runs, and beside the directory."""
    folders = (Path(), directory.absolute().parent)
    places = [folder / part / name for folder in folders for part in ("", "runs")]
    return [place for place in places if place.exists()]


def make_batches(source: ExportSource, exported: Exported) -> list[Batch]:
    """Ordinary tokens, drawn by seed; the first sequence of a batch is whole, the others of any length."""
    rng = np.random.default_rng(0)
    first = tokens.first_ordinary(source.tokenizer, source.special)
    most = exported.sequence_length
    batches = []
    for length in sorted({min(length, most) for length in (*LENGTHS, most)}):
        for size in BATCHES:
            lengths_B = rng.integers(1, length + 1, size)
            lengths_B[0] = length
            mask_BS = (np.arange(length) < lengths_B[:, None]).astype(np.int64)
            ids_BS = rng.integers(min(first, exported.vocab_size - 1), exported.vocab_size, (size, length))
            batches.append((np.where(mask_BS, ids_BS, exported.pad), mask_BS))
    return batches


def reference(
    source: ExportSource, ids_BS: NDArray[np.int64], mask_BS: NDArray[np.int64]
) -> NDArray[np.float32]:
    """What our model makes of a batch, in fp32."""
    with torch.inference_mode():
        first = source.module()(torch.from_numpy(ids_BS), torch.from_numpy(mask_BS))[0]
    output: NDArray[np.float32] = first.float().numpy()
    return output


def compute_apart(
    directory: Path, batches: Sequence[Batch], python: str = sys.executable
) -> tuple[list[NDArray[Any]], dict[str, Any]]:
    """What the directory makes of the batches in a process of its own, and what it says of itself."""
    with tempfile.TemporaryDirectory() as scratch:
        inputs, results = Path(scratch) / "in.safetensors", Path(scratch) / "out.safetensors"
        arrays = {
            f"{name}-{i}": np.ascontiguousarray(array)
            for i, batch in enumerate(batches)
            for name, array in zip(("ids", "mask"), batch, strict=True)
        }
        save_file(arrays, inputs)
        done = subprocess.run(
            [python, "-I", foreign.__file__, str(directory.absolute()), str(inputs), str(results)],
            stdout=subprocess.PIPE,
            cwd=scratch,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            text=True,
        )
        if done.returncode == foreign.UNUSABLE:
            raise ConfigError([])  # it has said why
        if done.returncode:
            raise RunFailed(f"{directory} could not be computed; see above", "error")
        outputs = load_file(results)
    return [outputs[f"output-{i}"] for i in range(len(batches))], json.loads(done.stdout.splitlines()[-1])


def compare(
    batch: Batch, ours: NDArray[Any], theirs: NDArray[Any], exported: Exported, tolerance: float | None
) -> dict[str, Any]:
    """The largest difference of a batch's outputs, over the largest of ours where that is above 1; and the
    share whose largest output is the same, which a tie within the tolerance is (None of hidden states).
    Raises RunFailed for an output that is not finite."""
    mask_BS = batch[1]
    if exported.kind != "classifier":
        ours, theirs = ours[mask_BS != 0], theirs[mask_BS != 0]  # what stands at padding says nothing
    if not (np.isfinite(ours).all() and np.isfinite(theirs).all()):
        raise RunFailed("an output of the run or of the directory is not finite", "not_finite")
    scale = max(1.0, float(np.abs(ours).max()))
    margin_N = ours.max(-1) - np.take_along_axis(ours, theirs.argmax(-1)[:, None], -1)[:, 0]
    is_same_N = margin_N <= 2 * scale * (tolerance or 0.0)
    return {
        "batch": mask_BS.shape[0],
        "length": mask_BS.shape[1],
        "outputs": ours.size,
        "difference": float(np.abs(ours - theirs).max()) / scale,
        "top1": None if exported.kind == "encoder" else float(is_same_N.mean()),
    }


def stored_parameters(directory: Path) -> int | None:
    """Numbers in model.safetensors, where there is one."""
    file = directory / "model.safetensors"
    return sum(tensor.size for tensor in load_file(file).values()) if file.is_file() else None
