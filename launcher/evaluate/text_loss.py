"""`bert-dp eval mlm`: checked here, measured by `python -m bert_dp.measure.text_loss`, shown as a Report."""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bert_dp.config import ConfigError, resolve
from bert_dp.quantiles import student
from launcher import children, results
from launcher.evaluate.finetune import find_pretrained
from launcher.job import issues_by_option
from launcher.report.console import show_report
from launcher.report.model import Report, Section, Table
from launcher.report.numbers import count_of, format_count, format_decimals, format_percent
from launcher.report.parts import words
from launcher.report.quantities import Computed, Quantity, table
from launcher.results import HiddenWords, TextLoss

if TYPE_CHECKING:
    from rich.console import Console

OPTIONS = {
    "data.build.documents": "--documents",
    "data.build.source_format": "--format",
    "data.build.text_field": "--text-key",
}
"""Settings that options of `eval mlm` give."""
SEEN = {"all": "all of them", "mask": "<mask>", "random": "a random token", "original": "the token itself"}


def _half_width(se: float | None, documents: int) -> float | None:
    """Of the 95 % interval of a mean over so many documents."""
    return None if se is None else student(documents - 1) * se


PREDICTED = (
    Quantity("loss", "loss", "nats"),
    Computed(lambda row: _half_width(row.loss_se, row.documents), "\u00b1", "decimals"),
    Quantity("accuracy", "guessed", "percent"),
    Quantity("tokens", "tokens", "count"),
    Quantity("documents", "documents", "count"),
)


def evaluate(
    run: Path,
    texts: Sequence[str],
    options: Mapping[str, str],
    *,
    max_bytes: int | None,
    precision: str,
    as_json: bool,
    console: Console,
) -> int:
    """`options`: settings of data.build. `precision`: auto, fp32 or bf16. Returns the exit code. Raises
    ConfigError."""
    settings = {"data": {"sources": list(texts), "build": dict(options)}, "schedule": {"steps": 1}}
    with issues_by_option(OPTIONS):
        build = resolve([settings]).data.build
    start = find_pretrained(run.expanduser())
    issues = text_issues(texts)
    if start.config.objective.name != "mlm":
        source = start.config.run.init_from or "a pretrained run"
        issues.append(f"RUN: {run} was finetuned and predicts no tokens; name {source}")
    if issues:
        raise ConfigError(issues)
    arguments = ["--options", build.model_dump_json(), "--precision", precision]
    if max_bytes is not None:
        arguments += ["--max-bytes", str(max_bytes)]
    arguments += ["--", str(start.run), *texts]
    code, data = children.capture_json("bert_dp.measure.text_loss", arguments)
    if code or data is None:
        return code or 1
    loss = results.parse(data, TextLoss, "the measurement")
    if as_json:
        sys.stdout.write(results.to_json(loss))
    else:
        show_report(console, text_report(loss), titled=True)
    return 0


def text_issues(texts: Sequence[str]) -> list[str]:
    """Names that stand for no file; one line each."""
    issues = []
    for text in texts:
        path = Path(os.path.expanduser(text))
        if (
            text == "builtin"
            or text.startswith("hub:")
            or path.exists()
            or glob.glob(str(path), recursive=True)
        ):
            continue
        issues.append(f"TEXT: {text} matches no file; name a file, a directory, a glob, hub:NAME or builtin")
    return issues


def text_report(loss: TextLoss) -> Report:
    """The losses by what the model saw, and the bits per byte, each with what it is a mean of."""
    hidden = loss.hidden
    losses = table(
        [(SEEN[row.seen], row) for row in loss.predicted],
        PREDICTED,
        title=f"Loss of predicted tokens, {format_percent(loss.mask_rate)} of all, by what the model saw",
        corner="saw",
    )
    facts = [
        words("pseudo-bits per byte", _bits(hidden), _basis(hidden)),
        words(
            "text",
            count_of(loss.documents, "document"),
            f"{count_of(loss.bytes, 'byte')}, {count_of(loss.words, 'word')}, "
            f"{count_of(loss.tokens, 'token')} with their separators",
        ),
        words(
            "model",
            f"{loss.run}, step {loss.step}",
            f"vocabulary of {format_count(loss.vocab_size)}, sequences of {loss.sequence_length} tokens, "
            f"{loss.precision} on {loss.device}",
        ),
    ]
    return Report(
        "bert-dp: masked language model on text",
        sections=[Section("", tables=[losses, Table(facts)], notes=_notes(loss))],
    )


def _bits(hidden: HiddenWords) -> str:
    width = _half_width(hidden.bits_per_byte_se, hidden.documents)
    return format_decimals(hidden.bits_per_byte) + (
        "" if width is None else f" \u00b1 {format_decimals(width)}"
    )


def _basis(hidden: HiddenWords) -> str:
    """What the bits are divided by."""
    return (
        f"of {count_of(hidden.bytes, 'byte')} in {count_of(hidden.words, 'hidden word')} "
        f"({count_of(hidden.tokens, 'token')}) of {count_of(hidden.documents, 'document')}, "
        f"{format_percent(hidden.rate)} of the words hidden"
    )


def _notes(loss: TextLoss) -> list[str]:
    """Explain the intervals, and count the text that the tokenizer drops, which costs it no bit."""
    hidden = loss.hidden
    notes = ["\u00b1: half of a 95 % interval over documents, each drawn as a whole; n/a of one document."]
    if hidden.words_without_token or hidden.unknown_tokens:
        notes.append(
            f"{count_of(hidden.words_without_token, 'hidden word')} without a token and "
            f"{count_of(hidden.unknown_tokens, 'unknown token')} cost fewer bits than their text holds."
        )
    if loss.first_without_tokens is not None:
        notes.append(
            f"No token is left of {format_count(loss.documents_without_tokens)} of the "
            f"{count_of(loss.documents, 'document')} (first: index {loss.first_without_tokens})."
        )
    return notes
