"""Labels or encodings of a file's examples: `python -m bert_dp.predict RUN FILE` writes a JSON line for each.

The lines stand in the order of the file; examples of about one length are computed together, always in the
precision of the weights.

Axes: N examples that are held at once, B of a batch, S tokens of its longest, L outputs of an example.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
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
from bert_dp.corpus import readers
from bert_dp.corpus.builder import shown_progress
from bert_dp.corpus.command import run_command
from bert_dp.corpus.pipeline import Progress
from bert_dp.examples.encode import Encoder
from bert_dp.examples.own import read_table
from bert_dp.examples.table import Columns
from bert_dp.export import foreign
from bert_dp.measure.peak import use_all_cores
from bert_dp.model import CrammedBert
from bert_dp.rank_process import RunFailed
from bert_dp.record.exported import is_exported, read_exported

HELD = 8192  # examples that are sorted by length among each other
BATCH_TOKENS = 8192  # of one forward pass, padding included
DIGITS = 6  # after the point, of what is written

Texts = Sequence[tuple[str, ...]]
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Subject:
    """What predicts: a run, or what was exported of one."""

    place: Path
    """A checkpoint, or an exported directory."""
    finetune: FinetuneConfig | None
    """null of a pretrained run."""
    encoder: Encoder


def find_subject(run: str) -> Subject:
    """Of a run, of a checkpoint or of an exported directory, without its weights. Raises ConfigError."""
    place = Path(run)
    if is_exported(place):
        about = read_exported(place)
        return Subject(
            place, about.finetune, Encoder.load(place / checkpoint.TOKENIZER, about.sequence_length)
        )
    path = checkpoint.resolve(run)
    config = resolve([record.read_checkpoint_facts(path).config])
    encoder = Encoder.load(pretrained.tokenizer_of(path), config.data.sequence_length)
    return Subject(path, config.finetune if config.objective.name == "finetune" else None, encoder)


@dataclasses.dataclass(frozen=True)
class Predictor:
    """The model of a Subject."""

    compute: Callable[[Tensor, Tensor], Tensor]
    """Token ids and which of them are real, each [B, S], to logits [B, L] of a finetuned run or hidden states
    [B, S, H]."""
    finetune: FinetuneConfig | None
    """null of a pretrained run."""


def open_predictor(run: str) -> tuple[Predictor, Encoder]:
    """Of a run, of a checkpoint or of an exported directory. Raises ConfigError."""
    subject = find_subject(run)
    return predictor_at(subject.place), subject.encoder


def predictor_at(place: Path, threads: int = 0) -> Predictor:
    """`place`: of a Subject. `threads`: of ONNX Runtime, 0 = its own choice; what else computes has torch's.

    Raises ConfigError.
    """
    if not is_exported(place):
        model, _, config = pretrained.load_with_config(place)
        return of_model(model, config.finetune)
    about = read_exported(place)
    try:
        kind = "classifier" if about.kind == "classifier" else "encoder"
        by_arrays = foreign.open_directory(place, about.format, kind, threads)
    except foreign.Unusable as error:
        raise ConfigError([str(error)]) from None

    def compute(ids_BS: Tensor, real_BS: Tensor) -> Tensor:
        return torch.from_numpy(by_arrays(ids_BS.numpy(), real_BS.long().numpy()))

    return Predictor(compute, about.finetune)


def of_model(model: CrammedBert | Classifier, finetune: FinetuneConfig) -> Predictor:
    """Of a model of ours, on the GPU where there is one."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device)
    inner = model if isinstance(model, Classifier) else model.model

    def compute(ids_BS: Tensor, real_BS: Tensor) -> Tensor:
        with torch.inference_mode():
            out: Tensor = inner(ids_BS.to(device), real_BS.to(device))
        return out

    return Predictor(compute, finetune if isinstance(model, Classifier) else None)


def predict(
    run: str, texts: Texts, pooling: str | None, tell: Progress, count: int = 1, threads: int | None = None
) -> Iterator[dict[str, Any]]:
    """Of each example, in their order, its index and what the run makes of it: see `labelled`; a pretrained
    one `encoding`, the hidden states pooled by `pooling` (mean, or cls). `count`: of the processes that
    compute, each with `threads` (None: one a core).

    Raises ConfigError for a run that cannot be used, RunFailed where its outputs are not finite.
    """
    subject = find_subject(run)
    encoder = subject.encoder
    how = (encoder.special["pad"], pooling)
    cut = done = index = 0

    def ask(first: int) -> list[tuple[NDArray[np.int64], instances.Wait]]:
        """Of the examples that are held from `first` on, in batches."""
        nonlocal cut
        ids, offsets, truncated = encoder.encode(texts[first : first + HELD])
        cut += truncated
        rows = np.split(ids, offsets[1:-1])
        return [(index_B, submit([rows[i] for i in index_B])) for index_B in batches(np.diff(offsets))]

    with instances.answering(functools.partial(open_answer, subject.place, how, threads), count) as submit:
        for asked in one_ahead(map(ask, range(0, len(texts), HELD))):
            outputs = []
            for index_B, wait in asked:
                outputs.append(wait())
                done += len(index_B)
                tell("examples", done, len(texts))
            order_N = np.concatenate([index_B for index_B, _ in asked])
            for output_L in np.concatenate(outputs)[np.argsort(order_N)]:
                yield {"index": index, **shown(output_L, subject.finetune)}
                index += 1
    if cut:
        tell(f"{cut} of {len(texts)} examples were cut to {encoder.length} tokens", 0, None)


def open_answer(place: Path, how: tuple[int, str | None], threads: int | None) -> instances.Answer:
    """Rows of tokens to outputs, in this process and from now on with its threads. `how`: pad and pooling of
    `outputs_of`. Raises ConfigError."""
    use_all_cores()
    if threads is not None:
        torch.set_num_threads(threads)
    predictor = predictor_at(place, threads or 0)
    return lambda rows: outputs_of(predictor, rows, *how)


def one_ahead(items: Iterable[T]) -> Iterator[T]:
    """Each once the next one is there: so that something is asked while an answer is dealt with."""
    before: list[T] = []
    for item in items:
        yield from before
        before = [item]
    yield from before


def shown(output_L: NDArray[np.float64], finetune: FinetuneConfig | None) -> dict[str, Any]:
    """What a line says of an example."""
    if finetune is None:
        return {"encoding": output_L.round(DIGITS).tolist()}
    return labelled(output_L, finetune)


def outputs_of(
    predictor: Predictor, rows: Sequence[NDArray[np.uint16]], pad: int, pooling: str | None
) -> NDArray[np.float64]:
    """[N, L]: logits, or pooled hidden states. `rows`: the tokens of each example, <cls> first.

    The mean of a pretrained run, which has never seen a <cls>, is over what stands behind it.
    """
    encodes = predictor.finetune is None
    if encodes and pooling != "cls":
        rows = [row[1:] for row in rows]
    lengths_N = np.array([len(row) for row in rows])
    parts, order = [], []
    for index_B in batches(lengths_N):
        ids_BS = np.full((len(index_B), lengths_N[index_B].max()), pad, np.int64)
        for place, index in enumerate(index_B):
            ids_BS[place, : lengths_N[index]] = rows[index]
        real_BS = torch.from_numpy(np.arange(ids_BS.shape[1]) < lengths_N[index_B, None])
        outputs = predictor.compute(torch.from_numpy(ids_BS), real_BS)
        if encodes:
            outputs = pool(outputs, real_BS.to(outputs.device), pooling or "mean")
        parts.append(outputs.double().cpu().numpy())
        order.append(index_B)
    found: NDArray[np.float64] = np.concatenate(parts)[np.argsort(np.concatenate(order))]
    if not np.isfinite(found).all():
        raise RunFailed("what the run makes of some examples is not finite: it has diverged", "not_finite")
    return found


def batches(lengths_N: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """The examples by length, longest first: at most BATCH_TOKENS tokens with padding, or one example."""
    order_N = np.argsort(-lengths_N, kind="stable")
    while len(order_N):
        count = max(1, BATCH_TOKENS // int(lengths_N[order_N[0]]))
        yield order_N[:count]
        order_N = order_N[count:]


def labelled(logits_L: NDArray[np.float64], finetune: FinetuneConfig) -> dict[str, Any]:
    """`score` of a regression; else `label`, the likeliest, or `labels`, those likelier than not, and the
    `probabilities` of all by name."""
    if finetune.kind == "regression":
        return {"score": round(float(logits_L[0]), DIGITS)}
    names = finetune.labels
    if finetune.kind == "multi_label":
        share_L = np.exp(-np.logaddexp(0.0, -logits_L))
        what: dict[str, Any] = {"labels": [name for name, x in zip(names, logits_L, strict=True) if x > 0]}
    else:
        share_L = np.exp(logits_L - logits_L.max())
        share_L /= share_L.sum()
        what = {"label": names[int(logits_L.argmax())]}
    return {**what, "probabilities": dict(zip(names, share_L.round(DIGITS).tolist(), strict=True))}


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
            raise ConfigError([issue.replace(copy.name, "stdin") for issue in error.issues]) from None


def read_file(file: str, columns: Sequence[str]) -> Texts:
    """As `read_texts`."""
    path = Path(file).expanduser()
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
        except BrokenPipeError:  # its reader has enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
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
    arguments = parser.parse_args(argv)

    def answer() -> tuple[str, int]:
        texts = read_texts(arguments.file, arguments.column)
        with shown_progress() as tell, destination(arguments.out) as file:
            how = (arguments.pooling, tell, arguments.instances, arguments.threads)
            for line in predict(arguments.run, texts, *how):
                file.write(json.dumps(line) + "\n")
        return "", 0

    return run_command(answer)


if __name__ == "__main__":
    sys.exit(main())
