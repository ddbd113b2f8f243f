"""Label or encode the examples in a file, and write one JSON line per example, in the order of the file.
Examples of similar length share a batch.

Axes: N examples in memory, B examples in a batch, S tokens in its longest example, L outputs per example.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from bert_dp import files
from bert_dp.config import ConfigError, FinetuneConfig, Issue
from bert_dp.config.hf import EXPORTED
from bert_dp.config.manifest import WARNED_LOSS, lost_words
from bert_dp.data import readers
from bert_dp.data.build import Progress, shown_progress
from bert_dp.examples.prepare import ExampleEncoder
from bert_dp.examples.table import Columns, read_table
from bert_dp.exporting import load_exported
from bert_dp.files.run_facts import TYPES, read_exported, require_loaders
from bert_dp.measure.matmul_peak import use_all_cores
from bert_dp.model.bert import CrammedBert
from bert_dp.model.classifier import pair_types, pool
from bert_dp.model.load import RunModel, load_checkpoint
from bert_dp.training import checkpoint
from bert_dp.training.devices import allow_tf32, inference_precision
from bert_dp.training.process import RunFailed

SORTED_EXAMPLES = 8192  # number of examples that are sorted by length together
# tokens per forward pass, including padding: a GPU needs many tokens to be busy; a CPU needs few, and small
# batches have less padding (benchmarks/RESULTS.md)
BATCH_TOKENS = {"cuda": 65_536, "cpu": 1024}
DIGITS = 6  # decimal places in the output

Texts = Sequence[tuple[str, ...]]
Compute = Callable[[Tensor, Tensor], Tensor]
"""Function that takes token ids and a mask of real tokens, each [B, S], and returns the logits [B, L] of a
finetuned model or the hidden states [B, S, H] of a pretrained model."""


@dataclasses.dataclass(frozen=True)
class Predictor:
    """Loaded model and everything needed to apply it to texts."""

    path: Path
    """Checkpoint or exported directory of the model."""
    finetune: FinetuneConfig | None
    """Settings of a finetuned run; None for a pretrained run."""
    encoder: ExampleEncoder
    compute: Compute
    device: torch.device


def predict_file(
    run: Path,
    file: str,
    *,
    text: str | None = None,
    text_pair: str | None = None,
    out: Path | None = None,
    precision: str = "auto",
) -> None:
    """Write one JSON line per example in `file` to the new file `out`, or to stdout. `text`, `text_pair`:
    names of the columns to read if `file` is a table. `run`, `precision`: see `open_predictor`. Raise
    ConfigError if an argument is unusable, RunFailed if outputs are not finite."""
    if out is not None and out.exists():
        raise ConfigError([Issue("--out", "exists", f"{out} exists", str(out), hint="choose a new file")])
    use_all_cores()
    predictor = open_predictor(run.expanduser(), precision)
    first_column = "text" if text is None and text_pair is not None else text
    texts = read_texts(file, [column for column in (first_column, text_pair) if column is not None])
    with shown_progress() as progress:
        lines = predict(predictor, texts, progress)
        first = next(lines)  # bad input is refused here, before a directory is created for --out
        with destination(out) as stream:
            for line in itertools.chain([first], lines):
                stream.write(json.dumps(line) + "\n")


def open_predictor(run: Path, precision: str = "auto") -> Predictor:
    """Load a run, a checkpoint or an exported directory. `precision`: see inference_precision. An exported
    model runs on the CPU, in the precision chosen at export. Raise ConfigError if `run` cannot be loaded."""
    if not (run / EXPORTED).is_file():
        loaded = load_checkpoint(checkpoint.resolve(str(run)))
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        encoder = ExampleEncoder.load(files.tokenizer_of(loaded.path), loaded.config.data.sequence_length)
        finetune = loaded.config.finetune if loaded.config.has_examples else None
        sep = encoder.special["sep"] if loaded.config.model.takes_types else None
        compute = on_device(loaded.model, device, precision, sep)
        return Predictor(loaded.path, finetune, encoder, compute, device)
    exported = read_exported(run)
    if precision != "auto":
        message = f"{precision} cannot be set: {run} was exported with fixed precision ({exported.precision})"
        hint = "omit --precision, or pass the original run"
        raise ConfigError([Issue("--precision", "conflict", message, precision, "RUN", hint)])
    require_loaders(exported, "predict")
    encoder = ExampleEncoder.load(run / files.TOKENIZER, exported.sequence_length)
    kind = "classifier" if exported.kind == "classifier" else "encoder"
    try:
        compute_arrays = load_exported.open_directory(run, exported.format, kind)
    except load_exported.Unusable as error:
        raise ConfigError([Issue("", "unsupported", str(error))]) from None

    def compute_tensors(ids_BS: Tensor, real_BS: Tensor) -> Tensor:
        inputs = [ids_BS, real_BS.long()]
        if TYPES in exported.inputs:
            inputs.append(pair_types(ids_BS, encoder.special["sep"]))
        return torch.from_numpy(compute_arrays(*(each.numpy() for each in inputs)))

    return Predictor(run, exported.finetune, encoder, compute_tensors, torch.device("cpu"))


def on_device(
    model: RunModel, device: torch.device, precision: str = "auto", sep: int | None = None
) -> Compute:
    """Move a model to a device and return a `Compute`. `sep`: separator id if the model takes token types."""
    chosen = inference_precision(precision, device)
    allow_tf32(chosen, device)
    model.to(device)
    inner = model.model if isinstance(model, CrammedBert) else model

    def compute(ids_BS: Tensor, real_BS: Tensor) -> Tensor:
        with torch.inference_mode(), chosen.context(device):
            types = {} if sep is None else {"types_BS": pair_types(ids_BS, sep).to(device)}
            return inner(ids_BS.to(device), real_BS.to(device), **types)

    return compute


def predict(predictor: Predictor, texts: Texts, progress: Progress) -> Iterator[dict[str, Any]]:
    """Yield one dictionary per example, in order. It contains `index` and a result: a finetuned run's labels
    (see `labelled`), or a pretrained run's `encoding`, the mean of the hidden states. An example in
    which at least one text has no tokens gets `"tokens": 0` instead of a result.

    Raise ConfigError if no example can have a result, RunFailed if outputs are not finite.
    """
    finetune = predictor.finetune
    # pretraining does not use <cls>, so a pretrained model encodes texts without it
    encoder = dataclasses.replace(predictor.encoder, has_cls=finetune is not None)
    if not encoder.has_tokens(texts):
        message = f"with the tokenizer of {predictor.path}, every example has a text without tokens"
        hint = "choose a run whose tokenizer supports the writing system of the texts"
        raise ConfigError([Issue("FILE", "conflict", message, other="RUN", hint=hint)])
    truncated = letters = lost_letters = 0
    textless: set[int] = set()
    for first in range(0, len(texts), SORTED_EXAMPLES):
        encoded = encoder.encode(texts[first : first + SORTED_EXAMPLES])
        truncated += encoded.truncated
        letters += encoded.letters
        lost_letters += encoded.lost_letters
        textless.update((first + encoded.textless).tolist())
        rows = np.split(encoded.ids, encoded.offsets[1:-1])
        report = lambda done, first=first: progress("examples", first + done, len(texts))  # noqa: E731
        max_tokens = BATCH_TOKENS[predictor.device.type]
        outputs_NL = outputs_of(predictor.compute, rows, encoder.special["pad"], max_tokens, report)
        for index, output_L in enumerate(outputs_NL, first):
            if index in textless:
                yield {"index": index, "tokens": 0}
            elif finetune is None:
                yield {"index": index, "encoding": output_L.round(DIGITS).tolist()}
            else:
                yield {"index": index, **labelled(output_L, finetune)}
    if lost_letters > WARNED_LOSS * letters:
        cause = f"the tokenizer of {predictor.path} does not support them"
        progress(f"warning: FILE: {lost_words(lost_letters, letters)}, because {cause}", 0, 0)
    if textless:
        first_textless = f"the first has index {min(textless)}"
        without = f"{len(textless)} of {len(texts)} examples have a text without tokens"
        progress(f"{without}, so they have no result ({first_textless})", 0, 0)
    if truncated:
        progress(f"{truncated} of {len(texts)} examples were cut to {encoder.length} tokens", 0, 0)


def outputs_of(
    compute: Compute,
    rows: Sequence[NDArray[np.uint16]],
    pad: int,
    max_tokens: int,
    progress: Callable[[int], None] = lambda _: None,
) -> NDArray[np.float64]:
    """Return the outputs [N, L] in the order of `rows`: each example's logits or mean hidden state. `rows`:
    each example's token ids. `max_tokens`: see `batches`. `progress` receives the number of completed
    examples. Raise RunFailed if an output is not finite."""
    together = [*batches(np.array([len(row) for row in rows], np.int64), max_tokens)]
    outputs = []
    for index_B in together:
        ids_BS, real_BS = padded([rows[i] for i in index_B], pad)
        found = compute(ids_BS, real_BS)
        if found.dim() == 3:
            found = pool(found, real_BS.to(found.device), "mean")
        outputs.append(found.double().cpu().numpy())
        if not np.isfinite(outputs[-1]).all():
            raise RunFailed("the outputs of some examples are not finite: the run has diverged", "not_finite")
        progress(sum(map(len, outputs)))
    return np.concatenate(outputs)[np.argsort(np.concatenate(together))]


def padded(rows: Sequence[NDArray[np.uint16]], pad: int) -> tuple[Tensor, Tensor]:
    """Return padded token ids and a mask of real tokens, each [B, S]."""
    tensors = [torch.from_numpy(row.astype(np.int64)) for row in rows]
    ids_BS = pad_sequence(tensors, batch_first=True, padding_value=pad)
    length_B1 = torch.tensor([[len(row)] for row in rows])
    return ids_BS, torch.arange(ids_BS.shape[1]) < length_B1


def batches(lengths_N: NDArray[np.int64], max_tokens: int) -> Iterator[NDArray[np.int64]]:
    """Yield the indices of the examples in each batch, longest example first. A batch contains up to
    `max_tokens` tokens, including padding, or a single longer example."""
    order_N = np.argsort(-lengths_N, kind="stable")
    while len(order_N):
        count = max(1, max_tokens // int(lengths_N[order_N[0]]))
        yield order_N[:count]
        order_N = order_N[count:]


def labelled(logits_L: NDArray[np.float64], finetune: FinetuneConfig) -> dict[str, Any]:
    """Return the `score` for regression. Otherwise, return the `probabilities` of all labels by name, and
    the most probable `label` or, for multi_label, all `labels` with a probability above 50 %."""
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
    """Read one or two texts per example: a line of a text file, or the `columns` of a table row. Raise
    ConfigError if the file cannot be read or a text is empty."""
    path = Path(os.path.expanduser(file))
    is_hub = file.startswith("hub:")
    if columns or is_hub or readers.FORMATS.get(readers.suffixes(path)[0]) != "text":
        return [row.texts for row in read_table(file, Columns(tuple(columns) or ("text",)), "test").rows]
    texts = []
    for number, line in readers.lines(path):
        if not line.strip():
            message = f"line {number} is empty"
            raise ConfigError([Issue(file, "missing", message, hint="delete it: every line is an example")])
        texts.append((line,))
    if not texts:
        raise ConfigError([Issue(file, "missing", "contains no examples")])
    return texts


@contextlib.contextmanager
def destination(out: Path | None) -> Iterator[TextIO]:
    """Yield stdout or a file that becomes `out` when complete. Raise ConfigError if it cannot be created."""
    if out is None:
        try:
            yield sys.stdout
            sys.stdout.flush()
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # discards buffered output
            if not isinstance(error, BrokenPipeError):  # a broken pipe is expected if the reader stops early
                raise
        return
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent)
    except OSError as error:
        message = f"{out.parent} is not writable ({error.strerror})"
        hint = "choose a path in another directory"
        raise ConfigError([Issue("--out", "not_found", message, str(out), hint=hint)]) from None
    with folder as name:
        path = Path(name) / out.name
        with path.open("w", encoding="utf-8") as file:
            yield file
        path.rename(out)
