"""The tokenizer: normalisation, training, loading, and the processes that encode. Torch-free.

Recipe (cramming, `tokenizer_preparation.py`): WordPiece of 32768, split at white space and punctuation, `##`,
the normaliser in the tokenizer itself, so that a tokenizer.json carries it.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import json
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import threading
import unicodedata
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from bert_dp.config import MAX_VOCAB_SIZE, ConfigError
from bert_dp.sources import require

SPECIALS = ("<pad>", "<s>", "</s>", "<unk>", "<cls>", "<sep>", "<mask>")  # ids 0..6
UNK = SPECIALS[3]
ROLES = ("pad", "unk", "cls", "sep", "mask")
ROBERTA = {"cls": "<s>", "sep": "</s>"}
PREFIX = "##"
MAX_ALPHABET = 1000  # characters; rarer ones become <unk>
NUM_PERMUTATIONS = 128  # of a MinHash sketch
SHINGLE_WORDS = 5
SPACES = re.compile(" {2,}")


@dataclasses.dataclass(frozen=True)
class Encoding:
    """How a batch of texts is encoded; travels to every process."""

    tokenizer_json: str
    sep: int
    """Id put after every document."""
    max_tokens_per_char: float
    near: bool
    """Also make the MinHash sketches for near dedup."""
    seed: int


@dataclasses.dataclass(frozen=True)
class Encoded:
    """The D kept documents of a batch, in order."""

    ids: np.ndarray  # [T] uint16, each document followed by sep
    lengths: np.ndarray  # [D] int64, tokens with sep
    keys: np.ndarray  # [D] uint64, hash of the text
    sketches: list[Any]  # [D] rensa.RMinHash, or empty
    read: int
    empty: int
    filtered: int


def normalize(text: str) -> str:
    """What `normalizer()` does, in Python; 1.4x the speed of encoding with the normaliser left in."""
    text = text.replace("``", '"').replace("''", '"')
    if text.isascii():
        text = text.lower()
    else:
        text = unicodedata.normalize("NFD", text).lower().encode("ascii", "ignore").decode("ascii")
    return SPACES.sub(" ", text)


def normalizer() -> normalizers.Normalizer:
    """TeX-style quote pairs to ", NFD, lowercase, strip accents, drop non-ASCII, collapse spaces."""
    return normalizers.Sequence(
        [
            normalizers.Replace("``", '"'),
            normalizers.Replace("''", '"'),
            normalizers.NFD(),
            normalizers.Lowercase(),
            normalizers.StripAccents(),
            normalizers.Replace(Regex(r"[^\x00-\x7F]+"), ""),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]
    )


def document_key(text: str, seed: int) -> int:
    """64-bit hash of a document: the same for texts that differ in case and white space only."""
    lower = text.lower()
    if (
        not lower.isprintable() or "  " in lower
    ):  # a white space other than one blank; the test is the cheaper part
        lower = " ".join(lower.split())
    digest = hashlib.blake2b(lower.strip().encode(), digest_size=8, key=seed.to_bytes(8, "little"))
    return int.from_bytes(digest.digest(), "little")


def train(
    sample: Iterable[str], *, model: Literal["wordpiece", "bpe"], vocab_size: int, with_normalizer: bool
) -> Tokenizer:
    """Train a tokenizer of at most `vocab_size` tokens (fewer when the sample has fewer pieces).

    The same sample gives the same tokenizer. `tokenizers` alone does not: it numbers the `##` letters in the
    order of a hash map and breaks ties by number (its issue 1794), so here they are numbered beforehand.
    """
    texts = [normalize(text) if with_normalizer else text for text in sample]
    letters = collections.Counter(chain.from_iterable(texts))
    for space in [c for c in letters if c.isspace()]:
        del letters[space]
    most = min(MAX_ALPHABET, (vocab_size - len(SPECIALS)) // 3)  # as letter, as ## letter, and room for words
    alphabet = sorted(sorted(letters, key=lambda c: (-letters[c], c))[:most])
    inner = [PREFIX + c for c in alphabet]
    trainer_class, empty_model = {
        "wordpiece": (trainers.WordPieceTrainer, models.WordPiece(unk_token=UNK)),
        "bpe": (trainers.BpeTrainer, models.BPE(unk_token=UNK, continuing_subword_prefix=PREFIX)),
    }[model]
    learner = Tokenizer(empty_model)
    learner.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainer_class(
        vocab_size=vocab_size,
        special_tokens=[*SPECIALS, *inner],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        continuing_subword_prefix=PREFIX,
        show_progress=False,
    )
    learner.train_from_iterator(texts, trainer)
    learnt = json.loads(learner.to_str())["model"]
    if model == "wordpiece":
        return _dress(models.WordPiece(learnt["vocab"], unk_token=UNK), with_normalizer)
    merges = [tuple(pair) for pair in learnt["merges"]]
    bpe = models.BPE(learnt["vocab"], merges, unk_token=UNK, continuing_subword_prefix=PREFIX)
    return _dress(bpe, with_normalizer)


def _dress(model: models.Model, with_normalizer: bool) -> Tokenizer:
    tokenizer = Tokenizer(model)
    if with_normalizer:
        tokenizer.normalizer = normalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(prefix=PREFIX)
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<cls> $A <sep>",
        pair="<cls> $A <sep> $B:1 <sep>:1",
        special_tokens=[(name, SPECIALS.index(name)) for name in ("<cls>", "<sep>")],
    )
    return tokenizer


def load(path: Path) -> Tokenizer:
    """Read a tokenizer.json. Raises ConfigError when it is not one or its ids do not fit in 16 bits."""
    try:
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError([f"data.tokenizer: {path}: cannot be read ({error.strerror})"]) from None
    except Exception as error:  # tokenizers raises plain Exception
        why = " ".join(str(error).split())[:200]
        raise ConfigError([f"data.tokenizer: {path}: not a tokenizer.json ({why})"]) from None
    if size(tokenizer) > MAX_VOCAB_SIZE:
        what = f"{size(tokenizer)} tokens, at most {MAX_VOCAB_SIZE} fit"
        raise ConfigError([f"data.tokenizer: {path}: {what} in 16 bits; use a smaller tokenizer"])
    return tokenizer


def size(tokenizer: Tokenizer) -> int:
    """One more than the largest id: the rows that an embedding needs."""
    return 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)


def special_ids(tokenizer: Tokenizer, name: str) -> dict[str, int]:
    """Ids by role: pad, unk, cls, sep, mask as `<role>`, `[ROLE]`, or RoBERTa's `<s>` and `</s>`.

    Raises ConfigError with every role that the tokenizer `name` lacks.
    """
    found, missing = {}, []
    for role in ROLES:
        spellings = [f"<{role}>", f"[{role.upper()}]", *([ROBERTA[role]] if role in ROBERTA else [])]
        ids = [i for i in map(tokenizer.token_to_id, spellings) if i is not None]
        if ids:
            found[role] = ids[0]
        else:
            missing.append(
                f"data.tokenizer: {name}: has no token {' or '.join(spellings)}; add it or train a tokenizer"
            )
    if missing:
        raise ConfigError(missing)
    return found


def first_ordinary(tokenizer: Tokenizer, specials: dict[str, int]) -> int:
    """`num_special`: ids from here on may replace a token at random.

    A tokenizer may keep its special tokens at the end (ModernBERT); those in the upper half are not counted,
    and a random replacement then hits one of them a few times in 50 000.
    """
    known = {*specials.values(), *(tokenizer.token_to_id(s) for s in SPECIALS)}
    return 1 + max((i for i in known if i is not None and i < size(tokenizer) / 2), default=-1)


def make_encoder(settings: Encoding) -> Callable[[list[str]], Encoded]:
    """The function that turns a list of texts into their tokens, keys and sketches, in one process."""
    tree = json.loads(settings.tokenizer_json)
    own = tree["normalizer"] is not None and tree["normalizer"] == json.loads(_own_normalizer_json())
    if own:
        tree["normalizer"] = None
    tokenizer = Tokenizer.from_str(json.dumps(tree))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = True  # "<mask>" in a text is text
    rensa = require("rensa", "dedup", "data.build.dedup: near") if settings.near else None
    rate = settings.max_tokens_per_char

    def encode(texts: list[str]) -> Encoded:
        plain = [normalize(text) for text in texts] if own else texts
        rows = [e.ids for e in tokenizer.encode_batch_fast(plain, add_special_tokens=False)]
        full = [i for i, row in enumerate(rows) if row]
        kept = [i for i in full if not rate or len(rows[i]) < rate * len(texts[i])]
        for i in kept:
            rows[i].append(settings.sep)
        lengths = np.fromiter((len(rows[i]) for i in kept), np.int64, len(kept))
        ids = np.fromiter(chain.from_iterable(rows[i] for i in kept), np.uint16, int(lengths.sum()))
        keys = np.fromiter((document_key(texts[i], settings.seed) for i in kept), np.uint64, len(kept))
        sketches = []
        if rensa is not None:
            shingles = [_shingles(texts[i]) for i in kept]
            sketches = rensa.RMinHash.from_token_sets(shingles, NUM_PERMUTATIONS, settings.seed)
        return Encoded(
            ids, lengths, keys, sketches, len(texts), len(texts) - len(full), len(full) - len(kept)
        )

    return encode


def _own_normalizer_json() -> str:
    bare = Tokenizer(models.WordPiece(unk_token=UNK))
    bare.normalizer = normalizer()
    return json.dumps(json.loads(bare.to_str())["normalizer"])


def _shingles(text: str) -> list[str]:
    words = text.lower().split()
    return [" ".join(words[i : i + SHINGLE_WORDS]) for i in range(max(1, len(words) - SHINGLE_WORDS + 1))]


def encode_all(
    batches: Iterable[list[str]], settings: Encoding, processes: int
) -> Generator[Encoded, None, None]:
    """Encode batches in `processes` spawned processes (1 = in this one); results in the order of the batches.

    At most three batches per process are held. The processes end with this one, however it ends.
    """
    if processes == 1:
        encode = make_encoder(settings)
        for batch in batches:
            with single_threaded():
                encoded = encode(batch)
            yield encoded
        return
    pool = ProcessPoolExecutor(
        processes, multiprocessing.get_context("spawn"), initializer=_start, initargs=(settings,)
    )
    pending: collections.deque[Future[Encoded]] = collections.deque()
    try:
        for batch in batches:
            pending.append(pool.submit(_encode, batch))
            if len(pending) == 3 * processes:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool:
        raise RuntimeError("a tokenising process died (memory full?); try fewer processes") from None
    finally:
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def single_threaded() -> Iterator[None]:
    """Rust threads of `tokenizers` off: many processes or many threads, never both."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        del os.environ["TOKENIZERS_PARALLELISM"]
        if before is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = before


def _start(settings: Encoding) -> None:
    """First call in a spawned process: end with the parent, leave Ctrl-C to it, load the tokenizer once."""
    global _encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _encoder = make_encoder(settings)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


_encoder: Callable[[list[str]], Encoded] | None = None  # of a spawned process


def _encode(texts: list[str]) -> Encoded:
    assert _encoder is not None
    return _encoder(texts)
