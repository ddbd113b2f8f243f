"""Compute a teacher's logits for a transfer set, and sample words from a masked language model.

`python -m bert_dp.evaluation.teacher CHECKPOINT EXAMPLES OUT DEVICE K N` computes share K of N (K from 0);
the launcher starts one process per share. Axes: as in bert_dp.evaluation.prediction, plus P (predicted
positions) and V (tokens in the vocabulary; in sums_PV, only the ordinary ones).
"""

import os
import sys
from pathlib import Path
from random import Random

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file

from bert_dp import files
from bert_dp.config import ConfigError, Issue, read_examples
from bert_dp.config.manifest import TRAIN
from bert_dp.data import tokenizer as tokens
from bert_dp.data.build import run_command, shown_progress
from bert_dp.evaluation.prediction import BATCH_TOKENS, batches, on_device, outputs_of, padded
from bert_dp.examples.augment import HOLE_ID
from bert_dp.examples.table import LOGITS, Examples
from bert_dp.model.bert import CrammedBert
from bert_dp.model.load import load_checkpoint

EXAMPLES_PER_FILE = 4096  # an interruption loses at most one file of results per process


def main(checkpoint: str, examples: str, out: str, device: str, share: str, of: str) -> str:
    """Compute one share of the logits and return `out`. Raise the same errors as `compute_share`."""
    files.set_private_umask()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(of)))
    where = torch.device("cuda", int(share)) if device == "cuda" else torch.device("cpu")
    compute_share(Path(checkpoint), Path(examples), Path(out), int(share), int(of), where)
    return out


def compute_share(
    checkpoint: Path, examples: Path, out: Path, share: int, of: int, device: torch.device
) -> None:
    """Compute and write one share of the training examples' logits: each missing file whose number modulo
    `of` equals `share`. The contents of a file do not depend on `of`. Raise ConfigError if an input is
    unusable, RunFailed if logits are not finite."""
    manifest = read_examples(examples)
    train = Examples.open(examples, manifest, TRAIN)
    loaded, special = load_checkpoint(checkpoint), manifest.special_tokens
    sep = special.sep if loaded.config.model.takes_types else None
    compute = on_device(loaded.model, device, sep=sep)
    out.mkdir(parents=True, exist_ok=True)
    with shown_progress() as progress:
        for part, first in enumerate(range(0, len(train), EXAMPLES_PER_FILE)):
            path = out / LOGITS.format(part)
            if part % of != share or path.exists():
                continue
            rows = [train.tokens(i) for i in range(first, min(first + EXAMPLES_PER_FILE, len(train)))]
            logits_NL = outputs_of(compute, rows, special.pad, BATCH_TOKENS[device.type])
            unfinished = path.with_name(f".{path.name}")
            save_file({"logits": logits_NL.astype(np.float32)}, unfinished)
            unfinished.rename(path)
            if share == 0:
                progress("teacher's logits", first + len(rows), len(train))


def fill_holes(checkpoint: Path, ids: NDArray[np.uint16], offsets: NDArray[np.int64], seed: int) -> None:
    """Replace each HOLE_ID in the examples, in place, with an ordinary token that the checkpoint's masked
    language model samples. Raise ConfigError if the checkpoint holds another kind of model."""
    loaded = load_checkpoint(checkpoint)
    if not isinstance(loaded.model, CrammedBert):
        message = f"{checkpoint} is not a masked language model"
        raise ConfigError([Issue("--replace", "conflict", message, "mlm", hint="use --replace pos or none")])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, special = loaded.model.to(device), tokens.special_ids(loaded.tokenizer, str(checkpoint))
    ordinary = slice(tokens.first_ordinary(loaded.tokenizer, special), tokens.size(loaded.tokenizer))
    # pretraining does not use <cls>, so the model does not receive it
    rows = [row[1:] for row in np.split(ids, offsets[1:-1]) if (row == HOLE_ID).any()]
    for index_B in batches(np.array([len(row) for row in rows], np.int64), BATCH_TOKENS[device.type]):
        chosen = [rows[i] for i in index_B]
        ids_BS, real_BS = padded(chosen, special["pad"])
        hole_BS = ids_BS == HOLE_ID
        seen_BS = ids_BS.masked_fill(hole_BS, special["mask"])
        # the random numbers depend only on the seed and the example
        draws = [Random(seed.to_bytes(8, "little") + row.tobytes()) for row in chosen]  # noqa: S311 (no secret)
        counts = hole_BS.sum(1).tolist()
        uniform_P = [draw.random() for draw, count in zip(draws, counts, strict=True) for _ in range(count)]
        with torch.inference_mode():
            positions_P = hole_BS.flatten().nonzero()[:, 0]
            logits_PV = model(seen_BS.to(device), positions_P.to(device), None, real_BS.to(device))
            sums_PV = logits_PV[:, ordinary].double().softmax(-1).cumsum(-1)
            at_P1 = torch.tensor(uniform_P, device=device)[:, None] * sums_PV[:, -1:]
            drawn_P = ordinary.start + torch.searchsorted(sums_PV, at_P1)[:, 0]
        for row, drawn in zip(chosen, drawn_P.cpu().split(counts), strict=True):
            row[row == HOLE_ID] = drawn.numpy()


if __name__ == "__main__":
    sys.exit(run_command(lambda: main(*sys.argv[1:])))
