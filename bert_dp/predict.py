"""Labels or encodings of a file's examples: `python -m bert_dp.predict RUN FILE` writes a JSON line for each.

The lines stand in the order of the file; examples of about one length are computed together. A line of what
was computed in bf16 says so.

Axes: N examples that are held at once, B of a batch, S tokens of its longest, L outputs of an example.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bert_dp import checkpoint, instances, pretrained, record
from bert_dp.classifier import Classifier, pool
from bert_dp.config import ConfigError, FinetuneConfig, resolve
from bert_dp.config.manifest import WARNED_LOSS, lost_words
from bert_dp.corpus import readers
from bert_dp.corpus.builder import shown_progress
from bert_dp.corpus.command import run_command
from bert_dp.corpus.pipeline import Progress
from bert_dp.examples.custom import read_table
from bert_dp.examples.prepare import Encoder
from bert_dp.examples.table import Columns
from bert_dp.export import foreign
from bert_dp.measure.peak import use_all_cores
from bert_dp.model import CrammedBert
from bert_dp.precision import allow_tf32, inference_precision
from bert_dp.rank_process import RunFailed
from bert_dp.record.exported import is_exported, read_exported

HELD = 8192  # examples that are sorted by length among each other
# of one forward pass, padding included: a GPU needs many to be busy; a core is busy with few, and then fewer
# are padding (benchmarks/RESULTS.md)
GPU_BATCH_TOKENS = 65_536
CPU_BATCH_TOKENS = 1024
DIGITS = 6  # after the point, of what is written

Texts = Sequence[tuple[str, ...]]
Compute = Callable[[Tensor, Tensor], Tensor]
"""Token ids and which of them are real, each [B, S], to logits [B, L] of a finetuned run or hidden states
[B, S, H]."""
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """What predicts, without its weights."""

    path: Path
    """A checkpoint, or an exported directory."""
    finetune: FinetuneConfig | None
    """None of a pretrained run."""
    encoder: Encoder


def find_source(run: str) -> ModelSource:
    """Of a run, of a checkpoint or of an exported directory. Raises ConfigError."""
    path = Path(run)
    if is_exported(path):
        exported = read_exported(path)
        encoder = Encoder.load(path / record.TOKENIZER, exported.sequence_length)
        return ModelSource(path, exported.finetune, encoder)
    path = checkpoint.resolve(run)
    config = resolve([record.read_checkpoint_facts(path).config])
    encoder = Encoder.load(record.tokenizer_of(path), config.data.sequence_length)
    return ModelSource(path, config.finetune if config.objective.name == "finetune" else None, encoder)


def device_of(path: Path) -> torch.device:
    """The GPU where there is one; what is exported computes on the CPU. `path`: of a ModelSource."""
    return torch.device("cuda" if torch.cuda.is_available() and not is_exported(path) else "cpu")


def open_model(path: Path, threads: int = 0, precision: str = "auto") -> Compute:
    """`path`: of a ModelSource. `threads`: of ONNX Runtime, 0 = its own choice; all else has torch's.
    `precision`: see inference_precision; what is exported has its own.

    Raises ConfigError.
    """
    if not is_exported(path):
        return on_device(pretrained.load(path)[0], device_of(path), precision)
    exported = read_exported(path)
    kind = "classifier" if exported.kind == "classifier" else "encoder"
    try:
        compute_arrays = foreign.open_directory(path, exported.format, kind, threads)
    except foreign.Unusable as error:
        raise ConfigError([str(error)]) from None

    def compute(ids_BS: Tensor, real_BS: Tensor) -> Tensor:
        return torch.from_numpy(compute_arrays(ids_BS.numpy(), real_BS.long().numpy()))

    return compute


def on_device(model: CrammedBert | Classifier, device: torch.device, precision: str = "auto") -> Compute:
    """A model of ours as `Compute`."""
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
    run: str,
    texts: Texts,
    pooling: str | None,
    progress: Progress,
    count: int = 1,
    threads: int | None = None,
    precision: str = "auto",
) -> Iterator[dict[str, Any]]:
    """Of each example, in their order, its index and what the run makes of it: see `labelled`; a pretrained
    one `encoding`, the hidden states pooled by `pooling` (mean, which None is too, or cls); and `precision`
    where autocast has narrowed it. An example with a text of which no token is left has `tokens`: 0 instead.
    `count`: of the processes that compute, each with `threads` (None: one a core). `precision`: see
    inference_precision.

    Raises ConfigError for a run that cannot be used and where no example has tokens, RunFailed where outputs
    are not finite.
    """
    source = find_source(run)
    finetune = source.finetune
    pooling = (pooling or "mean") if finetune is None else None
    # a pretrained run has never seen a <cls>, so the mean is over rows without one
    encoder = dataclasses.replace(source.encoder, has_cls=pooling != "mean")
    if not encoder.has_tokens(texts):
        raise ConfigError(
            [f"FILE: the tokenizer of {run} keeps no token of its texts; name a run that knows their script"]
        )
    open_answer = functools.partial(
        open_outputs, source.path, encoder.special["pad"], pooling, threads, precision
    )
    device = device_of(source.path)
    narrow = not is_exported(source.path) and inference_precision(precision, device).autocast
    computed = {"precision": "bf16"} if narrow else {}
    truncated = done = index = letters = lost_letters = 0
    textless: set[int] = set()

    def submit_batches(first: int) -> list[tuple[NDArray[np.int64], instances.Wait]]:
        """The examples that are held from `first` on."""
        nonlocal truncated, letters, lost_letters
        encoded = encoder.encode(texts[first : first + HELD])
        truncated += encoded.truncated
        letters += encoded.letters
        lost_letters += encoded.lost_letters
        textless.update((first + encoded.textless).tolist())
        rows = np.split(encoded.ids, encoded.offsets[1:-1])
        together = batches(np.diff(encoded.offsets), batch_tokens(device))
        return [(index_B, submit([rows[i] for i in index_B])) for index_B in together]

    with instances.answering(open_answer, count) as submit:
        for submitted in one_ahead(map(submit_batches, range(0, len(texts), HELD))):
            outputs = []
            for index_B, wait in submitted:
                outputs.append(wait())
                done += len(index_B)
                progress("examples", done, len(texts))
            for output_L in in_order(outputs, [index_B for index_B, _ in submitted]):
                if index in textless:
                    line: dict[str, Any] = {"tokens": 0}
                elif finetune is None:
                    line = {"encoding": output_L.round(DIGITS).tolist(), **computed}
                else:
                    line = {**labelled(output_L, finetune), **computed}
                yield {"index": index, **line}
                index += 1
    if lost_letters > WARNED_LOSS * letters:
        known = f"the tokenizer of {run} does not know them"
        progress(f"warning: FILE: {lost_words(lost_letters, letters)}, as {known}", 0, 0)
    if textless:
        first = f"the first has index {min(textless)}"
        without = f"{len(textless)} of {len(texts)} examples have a text without a token"
        progress(f"{without} and no result ({first})", 0, 0)
    if truncated:
        progress(f"{truncated} of {len(texts)} examples were cut to {encoder.length} tokens", 0, 0)


def open_outputs(
    path: Path, pad: int, pooling: str | None, threads: int | None, precision: str = "auto"
) -> instances.Answer:
    """Rows of tokens to `outputs_of` them, in this process and from now on with its threads. Raises
    ConfigError."""
    use_all_cores()
    if threads is not None:
        torch.set_num_threads(threads)
    compute = open_model(path, threads or 0, precision)
    return lambda rows: outputs_of(compute, rows, pad, pooling)


def one_ahead(items: Iterable[T]) -> Iterator[T]:
    """Each item once the next one has been made, so that work is submitted while results are used."""
    before: list[T] = []
    for item in items:
        yield from before
        before = [item]
    yield from before


def outputs_of(
    compute: Compute, rows: Sequence[NDArray[np.uint16]], pad: int, pooling: str | None
) -> NDArray[np.float64]:
    """[B, L]: logits, or hidden states pooled by `pooling` (None of a finetuned run). `rows`: the tokens of
    each example of a batch.
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
        raise RunFailed("what the run makes of some examples is not finite: it has diverged", "not_finite")
    return outputs_BL


def batch_tokens(device: torch.device) -> int:
    """Of one forward pass, padding included."""
    return GPU_BATCH_TOKENS if device.type == "cuda" else CPU_BATCH_TOKENS


def batches(lengths_N: NDArray[np.int64], most: int) -> Iterator[NDArray[np.int64]]:
    """The examples by length, longest first: at most `most` tokens with padding, or one example."""
    order_N = np.argsort(-lengths_N, kind="stable")
    while len(order_N):
        count = max(1, most // int(lengths_N[order_N[0]]))
        yield order_N[:count]
        order_N = order_N[count:]


def in_order(outputs: Sequence[NDArray[np.float64]], of: Sequence[NDArray[np.int64]]) -> NDArray[np.float64]:
    """[N, L]: the outputs of all batches, whose examples `of` names, in the order of the examples."""
    outputs_NL: NDArray[np.float64] = np.concatenate(outputs)[np.argsort(np.concatenate(of))]
    return outputs_NL


def labelled(logits_L: NDArray[np.float64], finetune: FinetuneConfig) -> dict[str, Any]:
    """`score` of a regression; else `label`, the likeliest, or `labels`, those likelier than not, and the
    `probabilities` of all by name."""
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
    """The one or two texts of each example: of a text file its lines, of a table `columns`. `-` is stdin:
    lines, or with columns JSON records.

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
            raise ConfigError([str(issue).replace(copy.name, "stdin") for issue in error.issues]) from None


def read_file(file: str, columns: Sequence[str]) -> Texts:
    """As `read_texts`, of a file that has a name."""
    path = Path(os.path.expanduser(file))
    is_hub = file.startswith("hub:")
    if columns or is_hub or readers.FORMATS.get(readers.suffixes(path)[0]) != "text":
        return [row.texts for row in read_table(file, Columns(tuple(columns) or ("text",)), "test").rows]
    texts = []
    for number, line in readers.lines(path):
        if not line.strip():
            raise ConfigError([f"{file}: line {number} is empty; drop it, as each line is an example"])
        texts.append((line,))
    if not texts:
        raise ConfigError([f"{file}: holds no example"])
    return texts


@contextlib.contextmanager
def destination(out: Path | None) -> Iterator[TextIO]:
    """Stdout, or a file that appears whole or not at all."""
    if out is None:
        try:
            yield sys.stdout
            sys.stdout.flush()
        except OSError as error:
            try:
                sys.stdout.flush()
            except OSError:  # it would fail once more at the end
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if not isinstance(error, BrokenPipeError):  # its reader has enough
                raise
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as folder:
        path = Path(folder) / out.name
        with path.open("w", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        path.rename(out)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 1 failed, 2 bad input, 128 + signal. Progress and errors go to stderr."""
    parser = argparse.ArgumentParser(prog="python -m bert_dp.predict")
    parser.add_argument("run")
    parser.add_argument("file")
    parser.add_argument("--column", action="append", default=[], help="of the text; twice for pairs")
    parser.add_argument("--pooling", choices=["mean", "cls"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--instances", type=int, default=1, help="processes that compute")
    parser.add_argument("--threads", type=int, help="of each")
    parser.add_argument("--precision", choices=["auto", "fp32", "bf16"], default="auto")
    options = parser.parse_args(argv)

    def answer() -> tuple[str, int]:
        texts = read_texts(options.file, options.column)
        with shown_progress() as progress:
            lines = predict(
                options.run,
                texts,
                options.pooling,
                progress,
                options.instances,
                options.threads,
                options.precision,
            )
            first = next(lines)  # bad input is refused before a folder is made for --out
            with destination(options.out) as file:
                for line in itertools.chain([first], lines):
                    file.write(json.dumps(line) + "\n")
        return "", 0

    left = "nothing was written" if options.out else "not every text has its line"
    return run_command(answer, stopped=left)


if __name__ == "__main__":
    sys.exit(main())
