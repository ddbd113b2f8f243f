"""Labels or encodings of a file's examples: `python -m bert_dp.predict RUN FILE` writes a JSON line for each.

The lines stand in the order of the file; examples of about one length are computed together, always in the
precision of the weights.

Axes: N examples that are held at once, B of a batch, S tokens of its longest, L outputs of an example.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
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

from bert_dp import checkpoint, pretrained
from bert_dp.classifier import Classifier, pool
from bert_dp.config import ConfigError, FinetuneConfig
from bert_dp.corpus import sources
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


@dataclasses.dataclass(frozen=True)
class Predictor:
    """A run, or what was exported of one."""

    compute: Callable[[Tensor, Tensor], Tensor]
    """Token ids and which of them are real, each [B, S], to logits [B, L] of a finetuned run or hidden states
    [B, S, H]."""
    finetune: FinetuneConfig | None
    """null of a pretrained run."""


def open_predictor(run: str) -> tuple[Predictor, Encoder]:
    """Of a run, of a checkpoint or of an exported directory. Raises ConfigError."""
    if is_exported(Path(run)):
        about = read_exported(Path(run))
        kind = "classifier" if about.kind == "classifier" else "encoder"
        by_arrays = foreign.open_directory(Path(run), about.format, kind)

        def compute(ids_BS: Tensor, real_BS: Tensor) -> Tensor:
            return torch.from_numpy(by_arrays(ids_BS.numpy(), real_BS.long().numpy()))

        tokenizer = Path(run) / checkpoint.TOKENIZER
        return Predictor(compute, about.finetune), Encoder.load(tokenizer, about.sequence_length)
    path = checkpoint.resolve(run)
    model, _, config = pretrained.load_with_config(path)
    encoder = Encoder.load(pretrained.tokenizer_of(path), config.data.sequence_length)
    return of_model(model, config.finetune), encoder


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


def predict(run: str, texts: Texts, pooling: str | None, tell: Progress) -> Iterator[dict[str, Any]]:
    """Of each example, in their order, its index and what the run makes of it: see `labelled`; a pretrained
    one `encoding`, the hidden states pooled by `pooling` (mean, or cls).

    Raises ConfigError for a run that cannot be used, RunFailed where its outputs are not finite.
    """
    predictor, encoder = open_predictor(run)
    cut = 0
    for first in range(0, len(texts), HELD):
        ids, offsets, truncated = encoder.encode(texts[first : first + HELD])
        cut += truncated
        outputs_NL = outputs_of(predictor, np.split(ids, offsets[1:-1]), encoder.special["pad"], pooling)
        for index, output_L in enumerate(outputs_NL, first):
            if predictor.finetune is not None:
                yield {"index": index, **labelled(output_L, predictor.finetune)}
            else:
                yield {"index": index, "encoding": output_L.round(DIGITS).tolist()}
        tell("examples", min(first + HELD, len(texts)), len(texts))
    if cut:
        tell(f"{cut} of {len(texts)} examples were cut to {encoder.length} tokens", 0, None)


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
    if columns or is_hub or sources.FORMATS.get(sources.suffixes(path)[0]) != "text":
        return [row.texts for row in read_table(file, Columns(tuple(columns) or ("text",)), "test").rows]
    texts = []
    for number, line in sources.lines(path):
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
    arguments = parser.parse_args(argv)
    use_all_cores()

    def answer() -> tuple[str, int]:
        texts = read_texts(arguments.file, arguments.column)
        with shown_progress() as tell, destination(arguments.out) as file:
            for line in predict(arguments.run, texts, arguments.pooling, tell):
                file.write(json.dumps(line) + "\n")
        return "", 0

    return run_command(answer)


if __name__ == "__main__":
    sys.exit(main())
