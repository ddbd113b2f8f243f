"""`bert-dp eval mlm`: measure the held-out loss of a run on any text, and show it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bert_dp.config import resolve
from bert_dp.files.quantiles import student
from launcher import results
from launcher.job import issues_by_option
from launcher.report.numbers import count_of, format_count, format_decimals, format_percent
from launcher.report.page import Computed, Quantity, Report, ReportSection, Table, show_report, table, words

if TYPE_CHECKING:
    from rich.console import Console

    from bert_dp.evaluation.text_loss import HiddenWords, TextLoss

OPTIONS = {
    "data.sources": "TEXT",
    "data.build.documents": "--documents",
    "data.build.source_format": "--format",
    "data.build.text_field": "--text-key",
}
"""Settings that arguments of `eval mlm` give."""
SEEN = {"all": "all of them", "mask": "<mask>", "random": "a random token", "original": "the token itself"}


def _half_width(se: float | None, documents: int) -> float | None:
    """Return half of the 95 % interval of a mean over so many documents."""
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
    """Measure a run on `texts` and show its losses; return the exit code.

    `options`: settings of data.build. `precision`: auto, fp32 or bf16. Raises ConfigError and RunFailed.
    """
    from bert_dp.data.build import shown_progress
    from bert_dp.evaluation.text_loss import text_loss
    from bert_dp.measure.matmul_peak import use_all_cores

    settings = {"data": {"sources": list(texts), "build": dict(options)}, "schedule": {"steps": 1}}
    use_all_cores()
    with issues_by_option(OPTIONS), shown_progress() as tell:
        build = resolve([settings]).data.build
        loss = text_loss(str(run.expanduser()), texts, build, max_bytes, tell, precision)
    if as_json:
        sys.stdout.write(results.to_json(loss))
    else:
        show_report(console, text_report(loss), titled=True)
    return 0


def text_report(loss: TextLoss) -> Report:
    """Build the table of losses by what the model saw, and the bits per byte, each with its denominator."""
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
        sections=[ReportSection("", tables=[losses, Table(facts)], notes=_notes(loss))],
    )


def _bits(hidden: HiddenWords) -> str:
    width = _half_width(hidden.bits_per_byte_se, hidden.documents)
    return format_decimals(hidden.bits_per_byte) + (
        "" if width is None else f" \u00b1 {format_decimals(width)}"
    )


def _basis(hidden: HiddenWords) -> str:
    """Name the denominator of the bits per byte."""
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
