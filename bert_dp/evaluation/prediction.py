"""Label or encode the examples of a file, a JSON line for each, in the order of the file.

Examples of about one length are computed together. A line that was computed in bf16 says so.

Axes: N examples that are held at once, B of a batch, S tokens of its longest, L outputs of an example.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bert_dp import files
from bert_dp.config import ConfigError, FinetuneConfig, Issue, resolve
from bert_dp.config.manifest import WARNED_LOSS, lost_words
from bert_dp.data import readers
from bert_dp.data.build import Progress, shown_progress
from bert_dp.examples.prepare import ExampleEncoder
from bert_dp.examples.table import Columns, read_table
from bert_dp.exporting import load_exported
from bert_dp.files.run_facts import is_exported, read_exported, require_loaders
from bert_dp.measure.matmul_peak import use_all_cores
from bert_dp.model import build
from bert_dp.model.bert import CrammedBert
from bert_dp.model.classifier import Classifier, pool
from bert_dp.training import checkpoint
from bert_dp.training.devices import allow_tf32, inference_precision
from bert_dp.training.process import RunFailed

HELD = 8192  # examples that are sorted by length among each other
# of one forward pass, padding included: a GPU needs many to be busy; a core is busy with few, and then fewer
# are padding (benchmarks/RESULTS.md)
GPU_BATCH_TOKENS = 65_536
CPU_BATCH_TOKENS = 1024
DIGITS = 6  # after the point, of what is written

Texts = Sequence[tuple[str, ...]]
Compute = Callable[[Tensor, Tensor], Tensor]
"""Token ids and a mask of the real ones, each [B, S], to logits [B, L] of a finetuned run or hidden states
[B, S, H]."""


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """A model that predicts, without its weights."""

    path: Path
    """A checkpoint that was verified, or an exported directory."""
    finetune: FinetuneConfig | None
    """None of a pretrained run."""
    encoder: ExampleEncoder


def predict_file(
    run: Path,
    file: str,
    *,
    text: str | None = None,
    text_pair: str | None = None,
    pooling: str | None = None,
    out: Path | None = None,
    threads: int | None = None,
    precision: str = "auto",
) -> None:
    """Write a line for each example of `file`, to a new file `out` or to stdout.

    `run`: a run, a checkpoint or an exported directory. `text` and `text_pair`: columns of a table.
    `threads`: by default one for each core. The rest as in `predict`. Raises ConfigError and RunFailed.
    """
    if text_pair is not None and text is None:
        message = "goes with --text, the column of the first text"
        raise ConfigError([Issue("--text-pair", "missing", message, text_pair, "--text")])
    if out is not None and out.exists():
        raise ConfigError([Issue("--out", "exists", f"{out} exists", str(out), hint="name a new file")])
    source = find_source(run.expanduser())
    if precision != "auto" and is_exported(source.path):
        message = f"{precision} is for runs, and {run} was exported in {read_exported(source.path).precision}"
        raise ConfigError(
            [Issue("--precision", "conflict", message, precision, "RUN", "leave it out, or name the run")]
        )
    if pooling is not None and source.finetune is not None:
        message = f"{run} was finetuned with pooling: {source.finetune.pooling} and gives labels"
        raise ConfigError([Issue("--pooling", "conflict", message, pooling, "RUN", "leave it out")])
    texts = read_texts(file, [column for column in (text, text_pair) if column is not None])
    use_all_cores()
    if threads is not None:
        torch.set_num_threads(threads)
    with shown_progress() as progress:
        lines = predict(source, texts, pooling, progress, threads or 0, precision)
        first = next(lines)  # bad input is refused before a folder is made for --out
        with destination(out) as stream:
            for line in itertools.chain([first], lines):
                stream.write(json.dumps(line) + "\n")


def find_source(path: Path) -> ModelSource:
    """Find a model, its labels and its tokenizer. Raises ConfigError."""
    if is_exported(path):
        exported = read_exported(path)
        require_loaders(exported, "predict")
        encoder = ExampleEncoder.load(path / files.TOKENIZER, exported.sequence_length)
        return ModelSource(path, exported.finetune, encoder)
    path = checkpoint.resolve(str(path))
    config = resolve([files.read_checkpoint_facts(path).config])
    encoder = ExampleEncoder.load(files.tokenizer_of(path), config.data.sequence_length)
    return ModelSource(path, config.finetune if config.objective.name == "finetune" else None, encoder)


def device_of(path: Path) -> torch.device:
    """Choose the GPU if there is one; exported models compute on the CPU. `path`: of a ModelSource."""
    return torch.device("cuda" if torch.cuda.is_available() and not is_exported(path) else "cpu")


def open_model(path: Path, threads: int = 0, precision: str = "auto") -> Compute:
    """Load the model of a ModelSource. `threads`: of ONNX Runtime, 0 = its own choice; the others have
    torch's. `precision`: see inference_precision; an exported model has its own.

    Raises ConfigError.
    """
    if not is_exported(path):
        return on_device(build.load_checkpoint(path).model, device_of(path), precision)
    exported = read_exported(path)
    kind = "classifier" if exported.kind == "classifier" else "encoder"
    try:
        compute_arrays = load_exported.open_directory(path, exported.format, kind, threads)
    except load_exported.Unusable as error:
        raise ConfigError([Issue("", "unsupported", str(error))]) from None

    def compute(ids_BS: Tensor, real_BS: Tensor) -> Tensor:
        return torch.from_numpy(compute_arrays(ids_BS.numpy(), real_BS.long().numpy()))

    return compute


def on_device(model: CrammedBert | Classifier, device: torch.device, precision: str = "auto") -> Compute:
    """Move a model of ours to a device and return it as `Compute`."""
    chosen = inference_precision(precision, device)
    allow_tf32(chosen, device)
    model.to(device)
    inner = model if isinstance(model, Classifier) else model.model

    def compute(ids_BS: Tensor, real_BS: Tensor) -> Tensor:
        with torch.inference_mode(), chosen.context(device):
            outputs: Tensor = inner(ids_BS.to(device), real_BS.to(device))
        return outputs

    return compute


def predict(
    source: ModelSource,
    texts: Texts,
    pooling: str | None,
    progress: Progress,
    threads: int = 0,
    precision: str = "auto",
) -> Iterator[dict[str, Any]]:
    """Yield a line for each example, in order: `index`, and the labels of a finetuned run (see `labelled`) or
    the `encoding` of a pretrained one, its hidden states pooled by `pooling` (mean, which None is too, or
    cls); `precision` where autocast has narrowed it. An example with a text without a token has `tokens`: 0
    instead. `threads` and `precision`: see open_model.

    Raises ConfigError for a model that cannot be used and if no example has tokens, RunFailed if outputs are
    not finite.
    """
    finetune = source.finetune
    pooling = (pooling or "mean") if finetune is None else None
    # a pretrained run has never seen a <cls>, so the mean is over rows without one
    encoder = dataclasses.replace(source.encoder, has_cls=pooling != "mean")
    if not encoder.has_tokens(texts):
        message = f"the tokenizer of {source.path} keeps no token of its texts"
        hint = "name a run that knows their script"
        raise ConfigError([Issue("FILE", "conflict", message, other="RUN", hint=hint)])
    compute = open_model(source.path, threads, precision)
    device = device_of(source.path)
    narrow = not is_exported(source.path) and inference_precision(precision, device).autocast
    computed = {"precision": "bf16"} if narrow else {}
    truncated = done = letters = lost_letters = 0
    textless: set[int] = set()
    for first in range(0, len(texts), HELD):
        encoded = encoder.encode(texts[first : first + HELD])
        truncated += encoded.truncated
        letters += encoded.letters
        lost_letters += encoded.lost_letters
        textless.update((first + encoded.textless).tolist())
        rows = np.split(encoded.ids, encoded.offsets[1:-1])
        together = [*batches(np.diff(encoded.offsets), batch_tokens(device))]
        outputs = []
        for index_B in together:
            outputs.append(outputs_of(compute, [rows[i] for i in index_B], encoder.special["pad"], pooling))
            done += len(index_B)
            progress("examples", done, len(texts))
        for index, output_L in enumerate(in_order(outputs, together), first):
            if index in textless:
                yield {"index": index, "tokens": 0}
            elif finetune is None:
                yield {"index": index, "encoding": output_L.round(DIGITS).tolist(), **computed}
            else:
                yield {"index": index, **labelled(output_L, finetune), **computed}
    if lost_letters > WARNED_LOSS * letters:
        known = f"the tokenizer of {source.path} does not know them"
        progress(f"warning: FILE: {lost_words(lost_letters, letters)}, as {known}", 0, 0)
    if textless:
        first_textless = f"the first has index {min(textless)}"
        without = f"{len(textless)} of {len(texts)} examples have a text without a token"
        progress(f"{without} and no result ({first_textless})", 0, 0)
    if truncated:
        progress(f"{truncated} of {len(texts)} examples were cut to {encoder.length} tokens", 0, 0)


def outputs_of(
    compute: Compute, rows: Sequence[NDArray[np.uint16]], pad: int, pooling: str | None
) -> NDArray[np.float64]:
    """Compute [B, L]: logits, or hidden states pooled by `pooling` (None of a finetuned run). `rows`: the
    tokens of each example of a batch.
    """
    lengths_B = np.array([len(row) for row in rows])
    ids_BS = np.full((len(rows), lengths_B.max()), pad, np.int64)
    for ids_S, row in zip(ids_BS, rows, strict=True):
        ids_S[: len(row)] = row
    real_BS = torch.from_numpy(np.arange(ids_BS.shape[1]) < lengths_B[:, None])
    outputs = compute(torch.from_numpy(ids_BS), real_BS)
    if pooling is not None:
        outputs = pool(outputs, real_BS.to(outputs.device), pooling)
    outputs_BL: NDArray[np.float64] = outputs.double().cpu().numpy()
    if not np.isfinite(outputs_BL).all():
        raise RunFailed("the outputs of some examples are not finite: the run has diverged", "not_finite")
    return outputs_BL


def batch_tokens(device: torch.device) -> int:
    """Return the tokens of one forward pass, padding included."""
    return GPU_BATCH_TOKENS if device.type == "cuda" else CPU_BATCH_TOKENS


def batches(lengths_N: NDArray[np.int64], most: int) -> Iterator[NDArray[np.int64]]:
    """Yield the indices of examples by length, longest first: at most `most` tokens with padding, or one
    example."""
    order_N = np.argsort(-lengths_N, kind="stable")
    while len(order_N):
        count = max(1, most // int(lengths_N[order_N[0]]))
        yield order_N[:count]
        order_N = order_N[count:]


def in_order(outputs: Sequence[NDArray[np.float64]], of: Sequence[NDArray[np.int64]]) -> NDArray[np.float64]:
    """Concatenate the outputs of all batches, whose examples `of` names, in the order of the examples:
    [N, L]."""
    outputs_NL: NDArray[np.float64] = np.concatenate(outputs)[np.argsort(np.concatenate(of))]
    return outputs_NL


def labelled(logits_L: NDArray[np.float64], finetune: FinetuneConfig) -> dict[str, Any]:
    """Return the `score` of a regression; else `label`, the likeliest, or `labels`, those likelier than not,
    and the `probabilities` of all by name."""
    if finetune.kind == "regression":
        return {"score": round(float(logits_L[0]), DIGITS)}
    names = finetune.labels
    if finetune.kind == "multi_label":
        probability_L = np.exp(-np.logaddexp(0.0, -logits_L))
        answer: dict[str, Any] = {"labels": [name for name, x in zip(names, logits_L, strict=True) if x > 0]}
    else:
        probability_L = np.exp(logits_L - logits_L.max())
        probability_L /= probability_L.sum()
        answer = {"label": names[int(logits_L.argmax())]}
    return {**answer, "probabilities": dict(zip(names, probability_L.round(DIGITS).tolist(), strict=True))}


def read_texts(file: str, columns: Sequence[str]) -> Texts:
    """Read the one or two texts of each example: the lines of a text file, or `columns` of a table. `-` is
    stdin: lines, or with columns JSON records.

    Raises ConfigError for what cannot be read, and for an empty text.
    """
    if file != "-":
        return read_file(file, columns)
    with tempfile.NamedTemporaryFile(suffix=".jsonl" if columns else ".txt") as copy:
        shutil.copyfileobj(sys.stdin.buffer, copy)
        copy.flush()
        try:
            return read_file(copy.name, columns)
        except ConfigError as error:
            issues = [
                dataclasses.replace(
                    issue,
                    setting=issue.setting.replace(copy.name, "stdin"),
                    message=issue.message.replace(copy.name, "stdin"),
                )
                for issue in error.issues
            ]
            raise ConfigError(issues) from None


def read_file(file: str, columns: Sequence[str]) -> Texts:
    """Read the texts of a file that has a name; see `read_texts`."""
    path = Path(os.path.expanduser(file))
    is_hub = file.startswith("hub:")
    if columns or is_hub or readers.FORMATS.get(readers.suffixes(path)[0]) != "text":
        return [row.texts for row in read_table(file, Columns(tuple(columns) or ("text",)), "test").rows]
    texts = []
    for number, line in readers.lines(path):
        if not line.strip():
            message = f"line {number} is empty"
            raise ConfigError([Issue(file, "missing", message, hint="drop it, as each line is an example")])
        texts.append((line,))
    if not texts:
        raise ConfigError([Issue(file, "missing", "holds no example")])
    return texts


@contextlib.contextmanager
def destination(out: Path | None) -> Iterator[TextIO]:
    """Open stdout, or a file that appears whole or not at all. Raises ConfigError if its folder cannot be
    written."""
    if out is None:
        try:
            yield sys.stdout
            sys.stdout.flush()
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is left in the buffer
            if not isinstance(error, BrokenPipeError):  # its reader has enough
                raise
        return
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent)
    except OSError as error:
        message = f"{out.parent} cannot be written ({error.strerror})"
        hint = "name a file elsewhere"
        raise ConfigError([Issue("--out", "not_found", message, str(out), hint=hint)]) from None
    with folder as name:
        path = Path(name) / out.name
        with path.open("w", encoding="utf-8") as file:
            yield file
        path.rename(out)
