"""Compare the outputs of an exported model with those of its run, on the same batches.

The exported model runs in a process that cannot import bert-dp. Axes: B sequences, S positions, O outputs per
position or per sequence.
"""

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
from pydantic import computed_field
from safetensors.numpy import load_file, save_file

from bert_dp import files
from bert_dp.config import ConfigError, Issue
from bert_dp.config.errors import StoredModel
from bert_dp.data import tokenizer as tokens
from bert_dp.exporting import load_exported
from bert_dp.exporting.source import ExportSource, open_run
from bert_dp.files import SCHEMA_VERSION
from bert_dp.files.run_facts import Exported, read_exported, require_loaders
from bert_dp.training import checkpoint
from bert_dp.training.process import RunFailed

BATCHES = (1, 3, 8)
LENGTHS = (5, 37, 128)  # sequence lengths to compare, besides the run's
TOLERANCES = {"hf": 1e-5, "onnx": 1e-4, "aoti": 1e-4}
"""Largest allowed `ExportBatch.difference` in fp32, per format."""

Inputs = tuple[NDArray[np.int64], ...]
"""Token ids, attention mask and, if the model has them, token types of a batch, each [B, S]."""


class ExportBatch(StoredModel):
    """Difference between a run and its export on one batch."""

    batch: int
    length: int
    outputs: int
    """Number of compared outputs. Outputs at padding are excluded."""
    difference: float
    """Largest absolute difference, divided by the run's largest absolute output if that exceeds 1."""
    top1: float | None
    """Share of positions or examples whose argmax is the same in run and export; null for hidden states."""


class ExportCheck(StoredModel):
    """Result of `export check`, as printed by --json."""

    schema_version: int = SCHEMA_VERSION
    format: str
    kind: str
    precision: str
    architecture: str | None
    checkpoint: str
    tolerance: float | None
    """Limit on `difference`; null unless the precision is fp32, because only fp32 has a limit."""
    rows: list[ExportBatch]
    parameters: int | None = None
    """Number of parameters of the loaded model; null unless the format is hf."""
    stored_parameters: int | None = None
    """Number of parameters in model.safetensors; null unless the format is hf."""
    run_parameters: int
    not_loaded: list[str] = []  # noqa: RUF012 (pydantic copies a default)
    """Names of parameters that are missing, unexpected or of the wrong shape in model.safetensors."""
    again: float
    """Largest absolute difference in the outputs after a reload (hf and onnx: after saving a copy)."""
    versions: dict[str, str]
    """Versions of Python and of the packages that loaded the exported model."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def ok(self) -> bool:
        """Return True if the parameters agree and, if there is a tolerance, the outputs are within it."""
        if self.not_loaded or self.parameters != self.stored_parameters:
            return False
        if self.tolerance is None:
            return True
        near = all(row.difference <= self.tolerance and row.top1 in (None, 1) for row in self.rows)
        return near and self.again <= self.tolerance


def check(directory: Path, run: Path | None, python: str = sys.executable) -> ExportCheck:
    """Compare an exported directory with its run. `run`: directory of the run; None = see `open_source`.
    `python`: interpreter that loads the exported model. Raise ConfigError if the directory or the run is
    unusable or the weights differ, and RunFailed if the exported model cannot be run."""
    exported = read_exported(directory)
    require_loaders(exported, "export check")
    source = open_source(directory, exported, run)
    batches = make_batches(source, exported)
    outputs, facts = compute_in_subprocess(directory, batches, python)
    tolerance = TOLERANCES[exported.format] if exported.precision == "fp32" else None
    return ExportCheck(
        format=exported.format,
        kind=exported.kind,
        precision=exported.precision,
        architecture=exported.architecture,
        checkpoint=str(source.path),
        tolerance=tolerance,
        rows=[
            compare(batch, reference(source, *batch), output, exported, tolerance)
            for batch, output in zip(batches, outputs, strict=True)
        ],
        run_parameters=exported.parameters,
        **facts,
    )


def open_source(directory: Path, exported: Exported, run: Path | None) -> ExportSource:
    """Open the run that was exported. Without `run`, look for a folder with the run's name in the
    current folder, in the parent of `directory`, and in the subfolder `runs` of each. Raise ConfigError if no
    run has the exported weights."""
    folders = (Path(), directory.absolute().parent)
    places = [folder / part / exported.run for folder in folders for part in ("", "runs")]
    for candidate in [place for place in places if place.exists()] if run is None else [run]:
        own = checkpoint.path_of(candidate / "checkpoints", exported.step)  # a run may have newer checkpoints
        try:
            path = checkpoint.resolve(str(own if own.is_dir() else candidate))
        except ConfigError as error:
            if run is None:
                continue  # this folder has the same name, but is not a run
            raise ConfigError([issue.within("--run") for issue in error.issues]) from None
        if files.weights_hash(path) == exported.weights_sha256:
            return open_run(path, encoder=exported.kind == "encoder")
    if run is not None:
        message = f"{run} does not contain the exported weights of step {exported.step}"
        raise ConfigError([Issue("--run", "conflict", message, str(run), "DIR")])
    message = f"no run {exported.run} with DIR's weights in this folder, DIR's parent or runs/ in either"
    raise ConfigError([Issue("--run", "not_found", message, hint="pass the directory of the run")])


def make_batches(source: ExportSource, exported: Exported) -> list[Inputs]:
    """Sample batches of ordinary tokens. In each, one sequence has full length, the others random lengths."""
    rng = np.random.default_rng(0)
    first = tokens.first_ordinary(source.tokenizer, source.special)
    longest = exported.sequence_length
    batches = []
    for length in sorted({min(length, longest) for length in (*LENGTHS, longest)}):
        for size in BATCHES:
            lengths_B = rng.integers(1, length + 1, size)
            lengths_B[0] = length
            mask_BS = (np.arange(length) < lengths_B[:, None]).astype(np.int64)
            ids_BS = rng.integers(min(first, exported.vocab_size - 1), exported.vocab_size, (size, length))
            types_BS = np.tile(np.arange(length) >= length // 2, (size, 1)).astype(np.int64)
            inputs = (np.where(mask_BS, ids_BS, exported.pad), mask_BS, types_BS)
            batches.append(inputs[: len(exported.inputs)])
    return batches


def reference(source: ExportSource, *inputs: NDArray[Any]) -> NDArray[Any]:
    """Return the outputs of the run's model for a batch, in fp32."""
    with torch.inference_mode():
        outputs = source.module()(*map(torch.from_numpy, inputs))
    return outputs[0].numpy()


def compute_in_subprocess(
    directory: Path, batches: Sequence[Inputs], python: str = sys.executable
) -> tuple[list[NDArray[Any]], dict[str, Any]]:
    """Run the exported model on the batches, in a separate process. Return the outputs, and the fields of
    ExportCheck that the process prints."""
    with tempfile.TemporaryDirectory() as scratch:
        inputs, results = Path(scratch) / "in.safetensors", Path(scratch) / "out.safetensors"
        arrays: dict[str, NDArray[Any]] = {}
        for i, batch in enumerate(batches):
            arrays |= {f"{name}-{i}": array for name, array in zip(load_exported.ARRAYS, batch, strict=False)}
        save_file(arrays, inputs)
        done = subprocess.run(
            [python, "-I", load_exported.__file__, str(directory.absolute()), str(inputs), str(results)],
            stdout=subprocess.PIPE,
            cwd=scratch,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            text=True,
        )
        if done.returncode == load_exported.UNUSABLE:
            raise ConfigError([Issue("", "unsupported", done.stdout.strip())])
        if done.returncode:
            raise RunFailed(f"the model in {directory} could not be run; see above", "error")
        outputs = load_file(results)
    return [outputs[f"output-{i}"] for i in range(len(batches))], json.loads(done.stdout.splitlines()[-1])


def compare(
    batch: Inputs, expected: NDArray[Any], actual: NDArray[Any], exported: Exported, tolerance: float | None
) -> ExportBatch:
    """Compare the outputs of the run and of its export for a batch. Two argmaxes count as equal if the run's
    outputs at these indices, scaled as in `ExportBatch.difference`, differ by at most twice the tolerance.
    Raise RunFailed if an output is not finite."""
    mask_BS = batch[1]
    if exported.kind != "classifier":
        expected, actual = expected[mask_BS != 0], actual[mask_BS != 0]  # outputs at padding are undefined
    if not (np.isfinite(expected).all() and np.isfinite(actual).all()):
        raise RunFailed("an output of the run or of its export is not finite", "not_finite")
    scale = max(1.0, float(np.abs(expected).max()))
    margin_N = expected.max(-1) - np.take_along_axis(expected, actual.argmax(-1)[:, None], -1)[:, 0]
    is_same_N = margin_N <= 2 * scale * (tolerance or 0.0)
    return ExportBatch(
        batch=mask_BS.shape[0],
        length=mask_BS.shape[1],
        outputs=expected.size,
        difference=float(np.abs(expected - actual).max()) / scale,
        top1=None if exported.kind == "encoder" else float(is_same_N.mean()),
    )
