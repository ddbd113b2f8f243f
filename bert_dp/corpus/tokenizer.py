"""The tokenizer: normalisation, training, loading, special tokens. Torch-free.

Recipe (cramming, `tokenizer_preparation.py`): WordPiece of 32768, split at white space and punctuation, `##`,
the normaliser in the tokenizer itself, so that a tokenizer.json carries it.
"""

from __future__ import annotations

import collections
import json
import re
import unicodedata
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Literal

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from bert_dp import record
from bert_dp.config import MAX_VOCAB_SIZE, ConfigError
from bert_dp.config.stored import read_regular

SPECIALS = ("<pad>", "<s>", "</s>", "<unk>", "<cls>", "<sep>", "<mask>")  # ids 0..6
UNK = SPECIALS[3]
ROLES = ("pad", "unk", "cls", "sep", "mask")
ROBERTA = {"cls": "<s>", "sep": "</s>"}
PREFIX = "##"
MAX_ALPHABET = 1000  # characters; rarer ones become <unk>
SPACES = re.compile(" {2,}")


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
        return _assemble(models.WordPiece(learnt["vocab"], unk_token=UNK), with_normalizer)
    merges = [tuple(pair) for pair in learnt["merges"]]
    bpe = models.BPE(learnt["vocab"], merges, unk_token=UNK, continuing_subword_prefix=PREFIX)
    return _assemble(bpe, with_normalizer)


def _assemble(model: models.Model, with_normalizer: bool) -> Tokenizer:
    """The tokenizer around a model: normaliser, split into words, special tokens, decoder."""
    tokenizer = Tokenizer(model)
    if with_normalizer:
        tokenizer.normalizer = normalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(prefix=PREFIX)
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.post_processor = _frame(
        tokenizer, {"cls": SPECIALS.index("<cls>"), "sep": SPECIALS.index("<sep>")}
    )
    return tokenizer


def _frame(tokenizer: Tokenizer, special: Mapping[str, int]) -> processors.TemplateProcessing:
    """<cls> A <sep> and <cls> A <sep> B <sep>, as examples of finetuning are."""
    cls, sep = (tokenizer.id_to_token(special[role]) for role in ("cls", "sep"))
    return processors.TemplateProcessing(
        single=[cls, "$A", sep],
        pair=[cls, "$A", sep, "$B:1", f"{sep}:1"],
        special_tokens=[(cls, special["cls"]), (sep, special["sep"])],
    )


def framing_as_trained(path: Path, special: Mapping[str, int]) -> Tokenizer | None:
    """The tokenizer at `path` with the frame of our examples; None where it has that frame already. One made
    elsewhere may have another: RoBERTa's puts </s></s> between two texts."""
    tokenizer = load(path)
    cls, sep = special["cls"], special["sep"]
    text = tokenizer.encode("a", add_special_tokens=False).ids
    if tokenizer.encode("a", "a").ids == [cls, *text, sep, *text, sep] and (
        tokenizer.encode("a").ids == [cls, *text, sep]
    ):
        return None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.post_processor = _frame(tokenizer, special)
    return tokenizer


def load(path: Path) -> Tokenizer:
    """Read a tokenizer.json. Raises ConfigError when it is not one or its ids do not fit in 16 bits."""
    try:
        tokenizer = Tokenizer.from_str(read_regular(path, record.MAX_JSON_BYTES).decode())
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
    ids_by_role, missing = {}, []
    for role in ROLES:
        spellings = [f"<{role}>", f"[{role.upper()}]", *([ROBERTA[role]] if role in ROBERTA else [])]
        ids = [i for i in map(tokenizer.token_to_id, spellings) if i is not None]
        if ids:
            ids_by_role[role] = ids[0]
        else:
            missing.append(
                f"data.tokenizer: {name}: has no token {' or '.join(spellings)}; add it or train a tokenizer"
            )
    if missing:
        raise ConfigError(missing)
    return ids_by_role


def first_ordinary(tokenizer: Tokenizer, specials: dict[str, int]) -> int:
    """`num_special`: ids from here on may replace a token at random.

    A tokenizer may keep its special tokens at the end (ModernBERT); those in the upper half are not counted,
    and a random replacement then hits one of them a few times in 50 000.
    """
    special_ids = {*specials.values(), *(tokenizer.token_to_id(s) for s in SPECIALS)}
    return 1 + max((i for i in special_ids if i is not None and i < size(tokenizer) / 2), default=-1)


def normalizer_json() -> str:
    """`normalizer()` as it stands in a tokenizer.json."""
    bare = Tokenizer(models.WordPiece(unk_token=UNK))
    bare.normalizer = normalizer()
    return json.dumps(json.loads(bare.to_str())["normalizer"])
