"""Normalize texts, train and load tokenizers, and encode documents. Torch-free.

The default tokenizer follows the cramming recipe (its `tokenizer_preparation.py`): WordPiece with 32,768
tokens and the prefix `##`, on texts split at white space and punctuation. The normalizer, which is saved in
tokenizer.json, differs. The recipe's normalizer applies NFD, lowercases and drops non-ASCII characters,
including quotes, ligatures, white space and dashes; dropping the last two joins adjacent words. This module's
normalizer replaces all four kinds with ASCII characters before it drops the others.
"""

import collections
import dataclasses
import functools
import itertools
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import string
import threading
import unicodedata
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from bert_dp import files
from bert_dp.config import MAX_VOCAB_SIZE, BuildConfig, ConfigError, Issue, IssueKind
from bert_dp.config.errors import read_regular, require
from bert_dp.data.readers import content_key, document_key
from bert_dp.training.process import RunFailed

SPECIALS = ("<pad>", "<s>", "</s>", "<unk>", "<cls>", "<sep>", "<mask>")  # ids 0..6
UNK = SPECIALS[3]
ROLES = ("pad", "unk", "cls", "sep", "mask")
ROBERTA = {"cls": "<s>", "sep": "</s>"}
PREFIX = "##"
MAX_ALPHABET = 1000  # largest number of characters in the alphabet; words with rarer characters become <unk>
SPACES = re.compile(" {2,}")
NON_ASCII = re.compile(r"[^\x00-\x7f]+")
ASCII_LETTERS = string.ascii_letters.encode()
# These characters are replaced after NFKD and lowercasing. They are listed explicitly, because classes such
# as \s depend on the Unicode version.
WHITE_SPACE = "[\t-\r\u0085\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"
DASHES = (
    "[\u058a\u05be\u1400\u1806\u2010-\u2015\u2053\u207b\u208b\u2212\u2e17\u2e1a\u2e3a\u2e3b\u2e40\u2e5d\u301c"
    "\u3030\u30a0\ufe31\ufe32\ufe58\ufe63\uff0d\U00010d6e\U00010ead]"
)
# These symbols are replaced with a space, because they often stand between words or numbers that no space
# separates. The middle dot and the hyphenation point are excluded, because they occur inside words.
SYMBOLS = (
    "[\u00a1-\u00b6\u00b8-\u00bf\u2020-\u2026\u2030-\u205e\u20a0-\u20cf\u2100-\u2bff\u2e00-\u2e5d\u3001-\u3003"
    "\u3008-\u3020\u303d\U0001f000-\U0001faff]"
)
REPLACED = (
    (WHITE_SPACE, " "),
    (DASHES, "-"),
    ("[\u2018-\u201b\u2032\u2035\u2039\u203a]", "'"),
    ("[\u00ab\u00bb\u201c-\u201f]", '"'),
    ("\u00d7", "x"),  # multiplication sign
    ("\u2044", "/"),  # fraction slash, which NFKD also puts into vulgar fractions
    ("\u00e6", "ae"),
    ("\u0153", "oe"),
    ("\u00df", "ss"),
    ("\u00f7", "/"),  # division sign
    ("\u2264", "<="),
    ("\u2265", ">="),
    ("\u00ad", ""),  # soft hyphen, which SYMBOLS would replace with a space
    (SYMBOLS, " "),
)
NEGATED = (("\u2260", "!="), ("\u226e", ">="), ("\u226f", "<="))  # NFKD yields =, < or > plus a stroke
FRACTIONS = "\u00bc\u00bd\u00be\u2189" + "".join(map(chr, range(0x2150, 0x2160)))
RAISED = "\u00b2\u00b3\u00b9\u2070\u2074\u2075\u2076\u2077\u2078\u2079\u2120\u2122"  # raised digits, SM, TM


class _CharacterTable(dict[int, str]):
    """Map from code point to normalized text, for str.translate. It is filled on demand."""

    def __missing__(self, code: int) -> str:
        self[code] = text = normalizer().normalize_str(chr(code))
        return text


_table = _CharacterTable()


def normalize(text: str) -> str:
    """Normalize a text as `normalizer()` does, but faster, by looking up characters in a table."""
    text = text.replace("``", '"').replace("''", '"')
    if not text.isascii():
        text = NON_ASCII.sub(lambda run: run[0].translate(_table), text)
    return SPACES.sub(" ", text.translate(_table))


@functools.cache
def normalizer() -> normalizers.Normalizer:
    """Return the normalizer. It replaces TeX-style quote pairs with `"`, applies NFKD, lowercases, replaces
    characters with ASCII equivalents (REPLACED), drops other non-ASCII characters and collapses spaces.
    Except in quote pairs and runs of spaces, how a character is normalized does not depend on its neighbours;
    `normalize` relies on this."""
    return normalizers.Sequence(
        [
            normalizers.Replace("``", '"'),
            normalizers.Replace("''", '"'),
            *(normalizers.Replace(sign, ascii_text) for sign, ascii_text in NEGATED),
            # insert a space, so that 1\u00bd becomes 1 1/2, not 11/2, and 10\u00b2 becomes 10 2, not 102;
            # use one pattern per sign: a shared one would be a lookahead, which corrupts the token offsets
            *(normalizers.Replace(sign, f" {sign}") for sign in FRACTIONS + RAISED),
            normalizers.NFKD(),
            normalizers.Lowercase(),
            *(normalizers.Replace(Regex(pattern), ascii_text) for pattern, ascii_text in REPLACED),
            normalizers.Replace(Regex(r"[^\x00-\x7F]+"), ""),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]
    )


def loss_counter(tokenizer: Tokenizer, unk: int) -> Callable[[str, Sequence[int]], tuple[int, int]]:
    """Return a function that takes a text and its token ids, and returns two counts: letters (Unicode
    category L) and lost letters. A lost letter is dropped by the normalizer or is part of an `unk` token."""
    normalizer = tokenizer.normalizer

    @functools.cache
    def is_letter_and_lost(char: str) -> tuple[bool, bool]:
        is_letter = unicodedata.category(char).startswith("L")
        kept = char if normalizer is None else normalizer.normalize_str(char)
        return is_letter, is_letter and all(c.isascii() and not c.isalpha() for c in kept)

    def count_letters(text: str) -> tuple[int, int]:
        data = text.encode()
        letters, lost = len(data) - len(data.translate(None, ASCII_LETTERS)), 0
        if not text.isascii():
            for char, n in collections.Counter("".join(NON_ASCII.findall(text))).items():
                is_letter, is_lost = is_letter_and_lost(char)
                letters += n * is_letter
                lost += n * is_lost
        return letters, lost

    def count(text: str, ids: Sequence[int]) -> tuple[int, int]:
        letters, lost = count_letters(text)
        if unk in ids:
            encoded = tokenizer.encode(text, add_special_tokens=False)  # offsets refer to the original text
            for token, (start, end) in zip(encoded.ids, encoded.offsets, strict=True):
                if token == unk:
                    inside, lost_inside = count_letters(text[start:end])
                    lost += inside - lost_inside
        return letters, lost

    return count


def train(
    sample: Iterable[str], *, model: Literal["wordpiece", "byte_bpe"], vocab_size: int, with_normalizer: bool
) -> Tokenizer:
    """Train a tokenizer deterministically. It has `vocab_size` tokens, or fewer if `sample` is small."""
    texts = [normalize(text) if with_normalizer else text for text in sample]
    learn = _train_byte_bpe if model == "byte_bpe" else _train_wordpiece
    tokenizer = learn(texts, vocab_size)
    if with_normalizer:
        tokenizer.normalizer = normalizer()
    tokenizer.add_special_tokens(list(SPECIALS))
    special = {"cls": SPECIALS.index("<cls>"), "sep": SPECIALS.index("<sep>")}
    tokenizer.post_processor = _frame(tokenizer, special)
    return tokenizer


def _train_wordpiece(texts: list[str], vocab_size: int) -> Tokenizer:
    # `tokenizers` assigns ids to ## characters in hash-map order, and merges equally frequent pairs in the
    # order of their ids (tokenizers issue 1794); assigning these ids first makes the result deterministic
    letters = collections.Counter(chain.from_iterable(texts))
    for space in [c for c in letters if c.isspace()]:
        del letters[space]
    most = min(MAX_ALPHABET, (vocab_size - len(SPECIALS)) // 3)  # leaves at least a third for words
    alphabet = sorted(sorted(letters, key=lambda c: (-letters[c], c))[:most])
    learner = Tokenizer(models.WordPiece(unk_token=UNK))
    learner.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=[*SPECIALS, *(PREFIX + c for c in alphabet)],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        continuing_subword_prefix=PREFIX,
        show_progress=False,
    )
    learner.train_from_iterator(texts, trainer)
    vocabulary = json.loads(learner.to_str())["model"]["vocab"]
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=UNK))
    tokenizer.pre_tokenizer = learner.pre_tokenizer
    tokenizer.decoder = decoders.WordPiece(prefix=PREFIX)
    return tokenizer


def _train_byte_bpe(texts: list[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _frame(tokenizer: Tokenizer, special: Mapping[str, int]) -> processors.TemplateProcessing:
    """Return a post-processor that frames one text as <cls> A <sep> and two as <cls> A <sep> B <sep>."""
    cls, sep = (tokenizer.id_to_token(special[role]) for role in ("cls", "sep"))
    return processors.TemplateProcessing(
        single=[cls, "$A", sep],
        pair=[cls, "$A", sep, "$B:1", f"{sep}:1"],
        special_tokens=[(cls, special["cls"]), (sep, special["sep"])],
    )


def separators_between(tokenizer: Tokenizer, special: Mapping[str, int]) -> int | None:
    """Return the number of separators that `tokenizer` puts between two texts: 1, or 2 (RoBERTa's
    `</s></s>`), or None if it adds special tokens in another way. Its padding and truncation must be off."""
    cls, sep = special["cls"], special["sep"]
    text = tokenizer.encode("a", add_special_tokens=False).ids
    single, pair = tokenizer.encode("a").ids, tokenizer.encode("a", "a").ids
    for count in (1, 2):
        if (single, pair) == ([cls, *text, sep], [cls, *text, *[sep] * count, *text, sep]):
            return count
    return None


def framing_as_trained(path: Path, special: Mapping[str, int]) -> Tokenizer | None:
    """Return the tokenizer at `path`, changed so that it neither pads nor truncates and adds the special
    tokens that finetuning uses. Return None if it needs no change."""
    tokenizer = load(path)
    is_plain = tokenizer.padding is None and tokenizer.truncation is None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    if separators_between(tokenizer, special) is None:
        tokenizer.post_processor = _frame(tokenizer, special)
    elif is_plain:
        return None
    return tokenizer


def load(path: Path) -> Tokenizer:
    """Read a tokenizer.json. Raises ConfigError if it is invalid or needs more than MAX_VOCAB_SIZE ids."""
    try:
        tokenizer = Tokenizer.from_str(read_regular(path, files.MAX_JSON_BYTES).decode())
    except OSError as error:
        raise _refused(path, "not_found", f"cannot be read ({error.strerror})") from None
    except Exception as error:  # tokenizers raises plain Exception
        reason = " ".join(str(error).split())[:200]
        raise _refused(path, "damaged", f"not a valid tokenizer.json ({reason})") from None
    if size(tokenizer) > MAX_VOCAB_SIZE:
        message = f"needs {size(tokenizer)} token ids, but at most {MAX_VOCAB_SIZE} are supported"
        raise _refused(path, "out_of_range", message, "use a tokenizer with a smaller vocabulary")
    return tokenizer


def _refused(path: Path, kind: IssueKind, message: str, hint: str | None = None) -> ConfigError:
    return ConfigError([Issue("data.tokenizer", kind, f"{path}: {message}", str(path), hint=hint)])


def size(tokenizer: Tokenizer) -> int:
    """Return the number of rows that the token embedding needs: the largest id plus 1."""
    return 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)


def special_ids(tokenizer: Tokenizer, name: str) -> dict[str, int]:
    """Return {role: token id} for the roles pad, unk, cls, sep and mask. Tokens may be spelled `<role>` or
    `[ROLE]`; cls and sep may also be `<s>` and `</s>` (RoBERTa). Raises ConfigError listing missing roles."""
    ids_by_role, missing = {}, []
    for role in ROLES:
        spellings = [f"<{role}>", f"[{role.upper()}]", *([ROBERTA[role]] if role in ROBERTA else [])]
        ids = [i for i in map(tokenizer.token_to_id, spellings) if i is not None]
        if ids:
            ids_by_role[role] = ids[0]
        else:
            message = f"{name} has no token {' or '.join(spellings)}"
            hint = "add one, or train a tokenizer"
            missing.append(Issue("data.tokenizer", "missing", message, name, hint=hint))
    if missing:
        raise ConfigError(missing)
    return ids_by_role


def first_ordinary(tokenizer: Tokenizer, specials: dict[str, int]) -> int:
    """Return the manifest's num_special: the lowest id that masking inserts as a random token. Special tokens
    in the upper half of the ids, as in ModernBERT's tokenizer, are ignored, because too few ids lie above
    them. With such a tokenizer, a few of about 50,000 possible random tokens are special tokens."""
    special_ids = {*specials.values(), *(tokenizer.token_to_id(s) for s in SPECIALS)}
    return 1 + max((i for i in special_ids if i is not None and i < size(tokenizer) / 2), default=-1)


def max_tokens_per_char(options: BuildConfig, vocab_size: int) -> float:
    """Return data.build.max_tokens_per_char. Its default is a quadratic in log2(32,768 / vocab_size), which
    equals the recipe's 0.25 at 32,768 tokens.

    The default drops about 4 % of clean English at every vocabulary size: 3.9 to 4.4 % of 45,896 paragraphs
    of OpenStax textbooks and Wikipedia, with WordPiece vocabularies of 4,096 to 65,535 tokens trained on them
    (2026-11-27). A constant 0.25 would drop 18 % with a vocabulary of 8,192 tokens.
    """
    if options.max_tokens_per_char is not None:
        return options.max_tokens_per_char
    octaves = math.log2(32_768 / vocab_size)
    return 0.25 + 0.017 * octaves + 0.0038 * octaves**2


COUNTS = ("letters", "lost_letters", "tokens", "unknown_tokens")  # counts per source in the manifest
BATCH_DOCUMENTS, BATCH_CHARS = 1000, 2**20
NUM_PERMUTATIONS = 128  # length of a MinHash sketch
SHINGLE_WORDS = 5


@dataclasses.dataclass(frozen=True)
class EncodedDocuments:
    """D documents (T tokens) that remain of a batch of N after filtering, in their original order."""

    ids: np.ndarray  # [T] uint16, each document followed by sep
    lengths: np.ndarray  # [D] int64, number of tokens, including sep
    keys: np.ndarray  # [D] uint64, hash of the text, which determines the split
    contents: np.ndarray  # [D] uint64, hash of the token ids, equal for duplicates
    sketches: list[Any]  # [D] rensa.RMinHash; empty unless `dedup` = near
    counts: list[int]  # totals over all N documents, in the order of COUNTS
    empty: int  # number of documents without tokens
    filtered: int  # number of documents with too many tokens per character


def in_batches(documents: Iterable[str]) -> Iterator[list[str]]:
    """Yield lists of documents. A list ends at BATCH_DOCUMENTS documents or BATCH_CHARS characters."""
    batch, chars = list[str](), 0
    for text in documents:
        batch.append(text)
        chars += len(text)
        if len(batch) == BATCH_DOCUMENTS or chars >= BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def make_encoder(tokenizer_json: str, options: BuildConfig) -> Callable[[list[str]], EncodedDocuments]:
    """Return a function that encodes a list of texts in this process."""
    whole, tree = Tokenizer.from_str(tokenizer_json), json.loads(tokenizer_json)
    special = special_ids(whole, "the tokenizer")
    count_letters = loss_counter(whole, special["unk"])
    tokenizer = Tokenizer(models.WordPiece())
    tokenizer.normalizer = normalizer()
    has_our_normalizer = tree.get("normalizer") == json.loads(tokenizer.to_str())["normalizer"]
    if has_our_normalizer:  # `normalize` does the same, but faster
        tree["normalizer"] = None
    tokenizer = Tokenizer.from_str(json.dumps(tree))
    for each in (whole, tokenizer):
        each.no_padding()
        each.no_truncation()
        each.encode_special_tokens = True  # "<mask>" in a text is not a special token
    rate, near = max_tokens_per_char(options, size(whole)), options.dedup == "near"

    def encode(texts: list[str]) -> EncodedDocuments:
        normalized = [normalize(text) for text in texts] if has_our_normalizer else texts
        rows = [e.ids for e in tokenizer.encode_batch_fast(normalized, add_special_tokens=False)]
        letters, lost = map(sum, zip(*map(count_letters, texts, rows), strict=True))
        num_tokens, unknown = sum(map(len, rows)), sum(row.count(special["unk"]) for row in rows)
        full = [i for i, row in enumerate(rows) if row]
        kept = [i for i in full if not rate or len(rows[i]) < rate * len(texts[i])]
        for i in kept:
            rows[i].append(special["sep"])
        lengths = np.fromiter((len(rows[i]) for i in kept), np.int64, len(kept))
        ids = np.fromiter(chain.from_iterable(rows[i] for i in kept), np.uint16, int(lengths.sum()))
        bounds = itertools.pairwise([0, *np.cumsum(lengths).tolist()])
        contents = [content_key(ids[start:end].tobytes()) for start, end in bounds]
        shingles = [_shingles(normalized[i]) for i in kept] if near else []
        sketches = rensa().RMinHash.from_token_sets(shingles, NUM_PERMUTATIONS, 0) if near else []
        return EncodedDocuments(
            ids,
            lengths,
            keys=np.array([document_key(texts[i]) for i in kept], np.uint64),
            contents=np.array(contents, np.uint64),
            sketches=sketches,
            counts=[letters, lost, num_tokens, unknown],
            empty=len(texts) - len(full),
            filtered=len(full) - len(kept),
        )

    return encode


def rensa() -> Any:
    """Import the package rensa. Raises ConfigError if it is not installed."""
    return require("rensa", "dedup", "data.build.dedup: near")


def _shingles(text: str) -> list[str]:
    words = text.lower().split()
    return [" ".join(words[i : i + SHINGLE_WORDS]) for i in range(max(1, len(words) - SHINGLE_WORDS + 1))]


def encode_all(
    batches: Iterable[tuple[int, list[str]]], tokenizer_json: str, options: BuildConfig, processes: int
) -> Generator[tuple[int, EncodedDocuments], None, None]:
    """Encode batches of (source index, texts) in `processes` spawned processes (1: in this process), and
    yield the results in order. At most three batches per process are in memory. The spawned processes exit
    when this process ends, even if it is killed."""
    if processes == 1:
        encode = make_encoder(tokenizer_json, options)
        for index, texts in batches:
            yield index, encode(texts)
        return
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, spawn, _start, (tokenizer_json, options))
    pending: collections.deque[tuple[int, Future[EncodedDocuments]]] = collections.deque()

    def finished(most: int) -> Iterator[tuple[int, EncodedDocuments]]:
        while len(pending) > most:
            index, future = pending.popleft()
            yield index, future.result()

    try:
        for index, texts in batches:
            pending.append((index, pool.submit(_encode, texts)))
            yield from finished(3 * processes - 1)
        yield from finished(0)
    except BrokenProcessPool:
        raise RunFailed("a tokenizer process died (out of memory?); try fewer processes") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _start(tokenizer_json: str, options: BuildConfig) -> None:
    """Set up a spawned process: make it exit with its parent and ignore Ctrl-C; load the tokenizer once."""
    global _encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    _encoder = make_encoder(tokenizer_json, options)


_encoder: Callable[[list[str]], EncodedDocuments] | None = None  # set in a spawned process


def _encode(texts: list[str]) -> EncodedDocuments:
    assert _encoder is not None
    return _encoder(texts)
