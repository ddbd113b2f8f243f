"""What a run predicts of any text: `python -m bert_dp.measure.text_loss RUN TEXT...` prints one JSON line.

Sequences are cut from the concatenated documents, each followed by <sep>, as in the run's training data; what
is left at the end is one shorter sequence. They are read twice: for the loss of single tokens, and for that
of whole words, which is divided by the words' bytes so that vocabularies compare.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bert_dp import checkpoint, pretrained, record
from bert_dp.config import BuildConfig, ConfigError
from bert_dp.corpus import sources as inputs
from bert_dp.corpus import tokenizer as tokens
from bert_dp.corpus.builder import shown_progress
from bert_dp.corpus.command import run_command
from bert_dp.corpus.pipeline import Progress, read_documents, source_record
from bert_dp.measure import masked_text
from bert_dp.measure.masked_text import KINDS, MASK_RATE, Text
from bert_dp.measure.peak import use_all_cores
from bert_dp.model import CrammedBert
from bert_dp.precision import allow_tf32, inference_precision
from bert_dp.rank_process import RunFailed

# of one forward pass, about; the logits of 15 % of them are held at once. A GPU needs many tokens to be busy
BATCH_TOKENS = {"cuda": 65_536, "cpu": 8192}


def text_loss(
    run: str,
    texts: Sequence[str],
    options: BuildConfig,
    most: int | None,
    tell: Progress,
    precision: str = "auto",
) -> dict[str, Any]:
    """The object that main prints. `most`: bytes of text after which no further document is read.
    `precision`: see inference_precision.

    Raises ConfigError for a run or text that cannot be used, RunFailed where the loss is not finite.
    """
    resolved = inputs.resolve(texts, options)
    # what is read of a source may be a small part
    records = [source_record(source, hashed=most is None) for source in resolved]
    path = checkpoint.resolve(run)
    facts = record.read_checkpoint_facts(path)
    model, tokenizer, config = pretrained.load_with_config(path)
    if not isinstance(model, CrammedBert):
        raise ConfigError(
            [f"RUN: {path} predicts labels, not tokens; name the run that it was finetuned from"]
        )
    special = tokens.special_ids(tokenizer, str(path))
    if (size := tokens.size(tokenizer)) > config.model.vocab_size:
        raise ConfigError(
            [
                f"RUN: {path}: its tokenizer has {size} tokens, its model {config.model.vocab_size}; put the "
                "tokenizer.json of the run's shards there"
            ]
        )
    tell("tokenize", 0, None)
    with contextlib.closing(read_documents(resolved, records)) as documents:
        text = masked_text.read(up_to(documents, most), tokenizer, special)
    textless = text.textless_documents.tolist()
    if len(textless) == len(text.hidden_bytes_D):
        raise ConfigError(
            [f"TEXT: the tokenizer of {path} keeps no token of its text; name a run that knows it"]
        )
    if not text.kind_T.any():
        raise ConfigError(
            [
                f"TEXT: none of its {len(text.ids_T)} tokens is among the {MASK_RATE:.0%} that are drawn to "
                "be predicted; give more text"
            ]
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device)
    chosen = inference_precision(precision, device)
    allow_tf32(chosen, device)
    length = config.data.sequence_length
    with chosen.context(device):
        predicted = token_losses(model, text, length, tell)
        hidden = word_losses(model, text, length, special, tell)
    return {
        "run": run,
        "step": facts.step,
        "tokenizer": facts.tokenizer,
        "vocab_size": size,
        "sequence_length": length,
        "device": device.type,
        "precision": str(chosen.autocast or next(model.parameters()).dtype).removeprefix("torch."),
        "sources": records,
        "documents": len(text.hidden_bytes_D),
        "documents_without_tokens": len(textless),
        "first_without_tokens": textless[0] if textless else None,
        "tokens": len(text.ids_T),
        "words": text.words,
        "bytes": text.bytes,
        "mask_rate": MASK_RATE,
        "predicted": predicted,
        "hidden": hidden,
    }


def up_to(documents: Iterable[str], most: int | None) -> Iterator[str]:
    """The documents until `most` UTF-8 bytes are reached; the one that reaches them is the last."""
    size = 0
    for text in documents:
        yield text
        size += len(text.encode())
        if most is not None and size >= most:
            return


def token_losses(model: CrammedBert, text: Text, length: int, tell: Progress) -> list[dict[str, Any]]:
    """The loss of the predicted tokens, of all and by what the model saw in their place."""
    drawn_T = text.kind_T > 0
    loss_P, hit_P = scores(
        model, text.seen_T, text.ids_T, drawn_T, length, lambda n: tell("tokens", n, len(drawn_T))
    )
    kind_P, document_P = text.kind_T[drawn_T], text.document_T[drawn_T]
    rows = []
    for kind, seen in enumerate(("all", *KINDS)):
        of_P = (kind_P == kind) | (kind == 0)
        documents = len(text.hidden_bytes_D)
        count_D = np.bincount(document_P[of_P], minlength=documents)
        mean, se = ratio(np.bincount(document_P[of_P], loss_P[of_P], documents), count_D)
        rows.append(
            {
                "seen": seen,
                "tokens": int(of_P.sum()),
                "documents": int((count_D > 0).sum()),
                "loss": mean,
                "loss_se": se,
                "accuracy": float(hit_P[of_P].mean()) if of_P.any() else None,
            }
        )
    return rows


def word_losses(
    model: CrammedBert, text: Text, length: int, special: dict[str, int], tell: Progress
) -> dict[str, Any]:
    """The loss of the hidden words, each token of which the model sees as <mask>, over their bytes."""
    hidden_T = text.hidden_T
    seen_T = np.where(hidden_T, np.uint16(special["mask"]), text.ids_T)
    loss_P, _ = scores(model, seen_T, text.ids_T, hidden_T, length, lambda n: tell("words", n, len(hidden_T)))
    bits_D = np.bincount(text.document_T[hidden_T], loss_P / math.log(2), len(text.hidden_bytes_D))
    mean, se = ratio(bits_D, text.hidden_bytes_D)
    return {
        "rate": MASK_RATE,
        "words": text.hidden_words,
        "words_without_token": text.silent_words,
        "bytes": int(text.hidden_bytes_D.sum()),
        "documents": int((text.hidden_bytes_D > 0).sum()),
        "tokens": int(hidden_T.sum()),
        "unknown_tokens": int((text.ids_T[hidden_T] == special["unk"]).sum()),
        "nats": float(loss_P.sum()),
        "bits_per_byte": mean,
        "bits_per_byte_se": se,
    }


def scores(
    model: CrammedBert,
    seen_T: NDArray[np.uint16],
    ids_T: NDArray[np.uint16],
    predicted_T: NDArray[np.bool_],
    length: int,
    tell: Callable[[int], None],
) -> NDArray[np.float64]:
    """[2, P]: of each predicted token, in order, its cross entropy in nats and whether it is the best guess.

    Raises RunFailed where a loss is not finite.
    """
    device = next(model.parameters()).device
    parts = [np.empty((2, 0))]
    for begin, end, width in pieces(len(ids_T), length, BATCH_TOKENS[device.type]):
        tell(begin)
        rows_BS = torch.from_numpy(seen_T[begin:end].astype(np.int64).reshape(-1, width))
        positions_P = np.flatnonzero(predicted_T[begin:end])
        labels_P = torch.from_numpy(ids_T[begin:end][positions_P].astype(np.int64))
        with torch.inference_mode():
            logits_PV = model(rows_BS.to(device), torch.from_numpy(positions_P).to(device))
            parts.append(model.vocabulary.score(logits_PV, labels_P.to(device)).double().cpu().numpy())
    tell(len(ids_T))
    loss_and_hit_2P: NDArray[np.float64] = np.concatenate(parts, axis=1)
    if not np.isfinite(loss_and_hit_2P).all():
        raise RunFailed("the loss of some tokens is not finite: the run has diverged", "not_finite")
    return loss_and_hit_2P


def pieces(count: int, length: int, most: int) -> Iterator[tuple[int, int, int]]:
    """(first, end, tokens in each sequence) of batches of about `most` tokens, `count` in all."""
    whole, step = count // length * length, max(1, most // length) * length
    for begin in range(0, whole, step):
        yield begin, min(begin + step, whole), length
    if whole < count:
        yield whole, count, count - whole


def ratio(sum_D: NDArray[Any], count_D: NDArray[Any]) -> tuple[float | None, float | None]:
    """The mean of what was counted, and its standard error over documents, of which each is drawn as a whole:
    that of a ratio of two sums (Cochran 1977, 2.11). None of nothing; no error of one document."""
    total, documents = count_D.sum(), int((count_D > 0).sum())
    if not total:
        return None, None
    mean = float(sum_D.sum() / total)
    if documents < 2:
        return mean, None
    squares = np.square(sum_D - mean * count_D).sum()
    return mean, float(math.sqrt(squares * documents / (documents - 1)) / total)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 1 failed, 2 bad input, 128 + signal. Progress and errors go to stderr."""
    parser = argparse.ArgumentParser(prog="python -m bert_dp.measure.text_loss")
    parser.add_argument("run")
    parser.add_argument("texts", nargs="+")
    parser.add_argument("--options", default="{}", help="data.build as JSON")
    parser.add_argument("--max-bytes", type=int)
    parser.add_argument("--precision", choices=["auto", "fp32", "bf16"], default="auto")
    arguments = parser.parse_args(argv)
    use_all_cores()

    def answer() -> tuple[str, int]:
        options = BuildConfig.model_validate_json(arguments.options)
        with shown_progress() as tell:
            facts = text_loss(
                arguments.run, arguments.texts, options, arguments.max_bytes, tell, arguments.precision
            )
        return json.dumps(facts), 0

    return run_command(answer)


if __name__ == "__main__":
    sys.exit(main())
