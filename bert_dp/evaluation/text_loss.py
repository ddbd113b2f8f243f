"""Measure the loss of a pretrained model on any text.

As in training, sequences are cut from the concatenated documents, each followed by <sep>. The model reads
them twice. The first time, it predicts single tokens. The second time, it predicts hidden words, and the loss
in bits per byte is comparable across vocabularies. Whether a token is predicted depends only on the document
and the token's position in it. Whether a word is hidden depends only on the document and the word's index.
Axes: D documents, T tokens in total, P predicted tokens, W words in a document.
"""

import contextlib
import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from tokenizers import Tokenizer

from bert_dp.config import BuildConfig, ConfigError, Issue
from bert_dp.config.errors import Count, StoredModel
from bert_dp.data import readers as inputs
from bert_dp.data import tokenizer as tokens
from bert_dp.data.build import Progress, read_documents, source_record
from bert_dp.data.stream import GOLDEN, U64, hash64, mix64
from bert_dp.files import SCHEMA_VERSION
from bert_dp.model.bert import CrammedBert
from bert_dp.model.load import load_checkpoint
from bert_dp.tasks.mlm import EVAL_MASK_RATE
from bert_dp.training import checkpoint
from bert_dp.training.devices import allow_tf32, inference_precision
from bert_dp.training.process import RunFailed

WORD = re.compile(r"\S+")
TOKENS, WORDS = 6, 7  # identifiers of random streams that training does not use


class WordCounts(NamedTuple):
    """Word counts of one document, or arrays [D] of the counts for all documents."""

    words: Any
    hidden: Any
    hidden_bytes: Any
    """Number of UTF-8 bytes in the hidden words, without the white space around them."""
    without_token: Any
    """Number of hidden words for which the tokenizer produces no token."""


@dataclasses.dataclass(frozen=True)
class Text:
    """Tokens of D concatenated documents, each followed by <sep>."""

    ids_T: NDArray[np.uint16]
    seen_T: NDArray[np.uint16]
    """Tokens that the model receives when it predicts the tokens marked in `drawn_T`."""
    drawn_T: NDArray[np.bool_]
    hidden_T: NDArray[np.bool_]
    """True for tokens of hidden words."""
    document_T: NDArray[np.int32]
    bytes: int
    """Number of UTF-8 bytes in all documents."""
    counts_D: WordCounts


def read(documents: Iterable[str], tokenizer: Tokenizer, special: dict[str, int]) -> Text:
    """Tokenize all documents, and draw tokens to predict and words to hide. `special`: token ids by role."""
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = True  # "<mask>" in a document is ordinary text
    ordinary = (tokens.first_ordinary(tokenizer, special), tokens.size(tokenizer))
    parts, counts, size = [], [], 0
    for batch in tokens.in_batches(documents):
        for text, encoded in zip(batch, tokenizer.encode_batch(batch, add_special_tokens=False), strict=True):
            key = inputs.document_key(text)
            ids_T = np.array([*encoded.ids, special["sep"]], np.uint16)
            seen_T, drawn_T = draw_tokens(ids_T, key, special["mask"], ordinary)
            hidden_T, words = hide_words(text, encoded.offsets, key)
            parts.append((ids_T, seen_T, drawn_T, np.append(hidden_T, False)))
            counts.append(words)
            size += len(text.encode())
    document_T = np.repeat(np.arange(len(parts), dtype=np.int32), [len(ids_T) for ids_T, *_ in parts])
    ids_T, seen_T, drawn_T, hidden_T = (np.concatenate(each) for each in zip(*parts, strict=True))
    counts_D = WordCounts(*np.array(counts, np.int64).T)
    return Text(ids_T, seen_T, drawn_T, hidden_T, document_T, size, counts_D)


def draw_tokens(
    ids_T: NDArray[np.uint16], key: int, mask_id: int, ordinary: tuple[int, int]
) -> tuple[NDArray[np.uint16], NDArray[np.bool_]]:
    """Return the tokens that the model receives, and a mask of the tokens to predict. Each token is predicted
    with probability EVAL_MASK_RATE. For a predicted token, the model receives <mask> (80 %), a random token
    in `range(*ordinary)` (10 %), or the token itself (10 %)."""
    random_T = hash64(key, TOKENS, np.arange(len(ids_T)))
    share_T = mix64(random_T + GOLDEN)
    drawn_T = random_T < U64(int(EVAL_MASK_RATE * 2.0**64))
    first, end = ordinary
    others_T = (mix64(share_T + GOLDEN) % U64(end - first)).astype(np.uint16) + np.uint16(first)
    tenth_T = share_T % U64(10)
    changed_T = np.select([tenth_T == 0, tenth_T == 1], [others_T, ids_T], np.uint16(mask_id))
    return np.where(drawn_T, changed_T, ids_T), drawn_T


def hide_words(
    text: str, offsets: Sequence[tuple[int, int]], key: int
) -> tuple[NDArray[np.bool_], WordCounts]:
    """Return a mask of the tokens that share a character with a hidden word, and the word counts. Each word
    is hidden with probability EVAL_MASK_RATE. `offsets`: start and end of each token in `text`."""
    spans_W2 = np.array([word.span() for word in WORD.finditer(text)], np.int64).reshape(-1, 2)
    starts_W, ends_W = spans_W2.T
    drawn_W = hash64(key, WORDS, np.arange(len(spans_W2))) < U64(int(EVAL_MASK_RATE * 2.0**64))
    begin_T, end_T = np.array(offsets, np.int64).reshape(-1, 2).T
    first_T = np.searchsorted(ends_W, begin_T, side="right")  # words first_T to last_T - 1 overlap the token
    last_T = np.maximum(np.searchsorted(starts_W, end_T, side="left"), first_T)
    drawn_before_W = np.concatenate([[0], np.cumsum(drawn_W)])
    has_token_W = np.zeros(len(spans_W2) + 1, np.int64)
    np.add.at(has_token_W, first_T, 1)
    np.add.at(has_token_W, last_T, -1)
    without_token_W = drawn_W & (np.cumsum(has_token_W)[:-1] == 0)
    counts = WordCounts(
        words=len(spans_W2),
        hidden=int(drawn_W.sum()),
        hidden_bytes=sum(len(text[a:b].encode()) for a, b in spans_W2[drawn_W].tolist()),
        without_token=int(without_token_W.sum()),
    )
    return drawn_before_W[last_T] > drawn_before_W[first_T], counts


# approximate number of tokens per forward pass: many on a GPU, to keep it busy; only 15 % of them get logits
BATCH_TOKENS = {"cuda": 65_536, "cpu": 8192}


class PredictedTokens(StoredModel):
    """Results of predicting single tokens."""

    tokens: Count
    documents: Count
    loss: float
    """Mean cross entropy in nats per predicted token."""
    loss_se: float | None
    """Standard error of `loss`, with documents as the sampling units; null if `documents` is 1."""
    accuracy: float
    """Share of predicted tokens for which the model gives the correct token the highest probability."""


class HiddenWords(StoredModel):
    """Results of predicting whole words. All tokens of a word are hidden at once."""

    words: Count
    """Number of hidden words. It does not depend on the vocabulary, because words are drawn, not tokens."""
    words_without_token: Count
    """Number of hidden words without a token. `bytes` includes their bytes, but their loss is 0 bits."""
    bytes: Count
    """Number of UTF-8 bytes in the hidden words."""
    documents: Count
    tokens: Count
    unknown_tokens: Count
    bits_per_byte: float | None
    bits_per_byte_se: float | None
    bits_D: list[float] = Field([], exclude=True)
    """Total loss in bits of the hidden words of each document, for `difference`; not printed."""
    bytes_D: list[int] = Field([], exclude=True)


class TextLoss(StoredModel):
    """Result of `eval mlm`, as printed by --json."""

    schema_version: int = SCHEMA_VERSION
    run: str
    step: int
    """Optimizer step of the checkpoint."""
    vocab_size: int
    sequence_length: int
    device: str
    precision: str
    sources: list[dict[str, Any]]
    """For each source, its name, size in bytes, SHA-256 and number of documents."""
    documents: Count
    documents_without_tokens: Count
    """Number of documents for which the tokenizer produces no token; each has only its separator."""
    tokens: Count
    """Number of tokens, including a separator after each document."""
    words: Count
    """Number of words, counted as runs of characters between white space."""
    bytes: Count
    """Number of UTF-8 bytes in the documents."""
    mask_rate: float
    """Probability with which each token is drawn for `predicted`, and each word for `hidden`."""
    predicted: PredictedTokens
    hidden: HiddenWords


def text_loss(
    run: str, texts: Sequence[str], options: BuildConfig, progress: Progress, precision: str = "auto"
) -> TextLoss:
    """Measure the loss of one checkpoint, or of the newest valid checkpoint of a run, on the documents in
    `texts`. `precision`: see inference_precision. Raise ConfigError if the run or a text is unusable,
    RunFailed if the loss is not finite."""
    resolved = inputs.resolve(texts, options)
    loaded = load_checkpoint(checkpoint.resolve(run))
    path, facts, config, model = loaded.path, loaded.facts, loaded.config, loaded.model
    if not isinstance(model, CrammedBert):
        hint = f"choose {config.run.init_from or 'a pretrained run'}"
        message = f"{run} is a finetuned run and has no masked-token head"
        raise ConfigError([Issue("RUN", "unsupported", message, run, hint=hint)])
    special = tokens.special_ids(loaded.tokenizer, str(path))
    if (size := tokens.size(loaded.tokenizer)) > config.model.vocab_size:
        message = f"the tokenizer of {path} has {size} tokens, but the model has {config.model.vocab_size}"
        hint = "copy tokenizer.json from the shards of the run into the checkpoint"
        raise ConfigError([Issue("RUN", "conflict", message, size, "model.vocab_size", hint)])
    records = [source_record(source) for source in resolved]
    progress("tokenize", 0, None)
    with contextlib.closing(read_documents(resolved, records)) as documents:
        text = read(documents, loaded.tokenizer, special)
    lengths_D = np.bincount(text.document_T)
    textless = int((lengths_D == 1).sum())  # documents that consist only of <sep>
    if textless == len(lengths_D):
        message = f"the tokenizer of {path} produces no tokens for the text"
        hint = "choose a run whose tokenizer supports the writing system of the text"
        raise ConfigError([Issue("TEXT", "conflict", message, other="RUN", hint=hint)])
    if not text.drawn_T.any():
        message = f"none of the {len(text.ids_T)} tokens was drawn for prediction (rate {EVAL_MASK_RATE:.0%})"
        raise ConfigError([Issue("TEXT", "out_of_range", message, len(text.ids_T), hint="pass more text")])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device)
    chosen = inference_precision(precision, device)
    allow_tf32(chosen, device)
    length = config.data.sequence_length
    with chosen.context(device):
        predicted = token_losses(model, text, length, progress)
        hidden = word_losses(model, text, length, special, progress)
    return TextLoss(
        run=run,
        step=facts.step,
        vocab_size=size,
        sequence_length=length,
        device=device.type,
        precision=str(chosen.autocast or next(model.parameters()).dtype).removeprefix("torch."),
        sources=records,
        documents=len(lengths_D),
        documents_without_tokens=textless,
        tokens=len(text.ids_T),
        words=int(text.counts_D.words.sum()),
        bytes=text.bytes,
        mask_rate=EVAL_MASK_RATE,
        predicted=predicted,
        hidden=hidden,
    )


def token_losses(model: CrammedBert, text: Text, length: int, progress: Progress) -> PredictedTokens:
    """Compute the mean loss and the accuracy for the single tokens marked in `text.drawn_T`."""
    loss_P, hit_P = scores(model, text.seen_T, text.ids_T, text.drawn_T, length, "tokens", progress)
    document_P = text.document_T[text.drawn_T]
    count_D = np.bincount(document_P)
    mean, se = ratio(np.bincount(document_P, loss_P), count_D)
    assert mean is not None
    return PredictedTokens(
        tokens=len(loss_P),
        documents=int((count_D > 0).sum()),
        loss=mean,
        loss_se=se,
        accuracy=float(hit_P.mean()),
    )


def word_losses(
    model: CrammedBert, text: Text, length: int, special: dict[str, int], progress: Progress
) -> HiddenWords:
    """Compute the loss of hidden words in bits per byte. The model receives <mask> for all their tokens."""
    hidden_T, counts_D = text.hidden_T, text.counts_D
    seen_T = np.where(hidden_T, np.uint16(special["mask"]), text.ids_T)
    loss_P, _ = scores(model, seen_T, text.ids_T, hidden_T, length, "words", progress)
    bits_D = np.bincount(text.document_T[hidden_T], loss_P / math.log(2), len(counts_D.words))
    mean, se = ratio(bits_D, counts_D.hidden_bytes)
    return HiddenWords(
        words=int(counts_D.hidden.sum()),
        words_without_token=int(counts_D.without_token.sum()),
        bytes=int(counts_D.hidden_bytes.sum()),
        documents=int((counts_D.hidden_bytes > 0).sum()),
        tokens=int(hidden_T.sum()),
        unknown_tokens=int((text.ids_T[hidden_T] == special["unk"]).sum()),
        bits_per_byte=mean,
        bits_per_byte_se=se,
        bits_D=bits_D.tolist(),
        bytes_D=counts_D.hidden_bytes.tolist(),
    )


def difference(first: HiddenWords, second: HiddenWords) -> tuple[float | None, float | None]:
    """Return the bits per byte of `second` minus those of `first`, and the standard error of this difference,
    with documents as the sampling units."""
    return ratio(np.array(second.bits_D) - np.array(first.bits_D), np.array(first.bytes_D))


def scores(
    model: CrammedBert,
    seen_T: NDArray[np.uint16],
    ids_T: NDArray[np.uint16],
    predicted_T: NDArray[np.bool_],
    length: int,
    stage: str,
    progress: Progress,
) -> NDArray[np.float64]:
    """Return an array [2, P]: the cross entropy of each predicted token in nats, and 1 if the model ranks the
    token first, else 0. Raise RunFailed if a loss is not finite."""
    device = next(model.parameters()).device
    parts = [np.empty((2, 0))]
    for begin, end, width in pieces(len(ids_T), length, BATCH_TOKENS[device.type]):
        progress(stage, begin, len(ids_T))
        rows_BS = torch.from_numpy(seen_T[begin:end].astype(np.int64).reshape(-1, width))
        positions_P = np.flatnonzero(predicted_T[begin:end])
        labels_P = torch.from_numpy(ids_T[begin:end][positions_P].astype(np.int64))
        with torch.inference_mode():
            logits_PV = model(rows_BS.to(device), torch.from_numpy(positions_P).to(device))
            parts.append(model.vocabulary.score(logits_PV, labels_P.to(device)).double().cpu().numpy())
    progress(stage, len(ids_T), len(ids_T))
    loss_and_hit_2P = np.concatenate(parts, axis=1)
    if not np.isfinite(loss_and_hit_2P).all():
        raise RunFailed("the loss of some tokens is not finite: the run has diverged", "not_finite")
    return loss_and_hit_2P


def pieces(count: int, length: int, max_tokens: int) -> Iterator[tuple[int, int, int]]:
    """Split `count` tokens into batches of about `max_tokens`; yield (begin, end, tokens per sequence)."""
    whole, step = count // length * length, max(1, max_tokens // length) * length
    for begin in range(0, whole, step):
        yield begin, min(begin + step, whole), length
    if whole < count:
        yield whole, count, count - whole


def ratio(sum_D: NDArray[Any], count_D: NDArray[Any]) -> tuple[float | None, float | None]:
    """Return sum(sum_D) / sum(count_D) and its standard error, with documents as the sampling units (Cochran
    1977, 2.11). Both are None if every count is 0; the error is None if only one count is nonzero."""
    total, documents = count_D.sum(), int((count_D > 0).sum())
    if not total:
        return None, None
    mean = float(sum_D.sum() / total)
    if documents < 2:
        return mean, None
    squares = np.square(sum_D - mean * count_D).sum()
    return mean, float(math.sqrt(squares * documents / (documents - 1)) / total)
