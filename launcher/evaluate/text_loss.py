"""`bert-dp eval mlm`: measure and report the losses of one or more runs on any text."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert_dp.config import ConfigError, Issue, resolve
from bert_dp.cost import student
from launcher import results
from launcher.job import issues_by_option
from launcher.report.formats import count_of, format_count, format_decimals, format_percent
from launcher.report.page import Report, ReportSection, Table, TableCell, TableRow, show_result, words

if TYPE_CHECKING:
    from rich.console import Console

    from bert_dp.evaluation.text_loss import TextLoss

OPTIONS = {
    "data.sources": "TEXT",
    "data.build.documents": "--documents",
    "data.build.source_format": "--format",
    "data.build.text_field": "--text-key",
}
"""Setting -> argument of `eval mlm` that sets it."""


def is_run(path: str) -> bool:
    """Return True if `path` is a run directory or a checkpoint."""
    return any((Path(path).expanduser() / name).exists() for name in ("checkpoints", "model.safetensors"))


def evaluate(
    run: Path,
    texts: Sequence[str],
    options: Mapping[str, str],
    *,
    precision: str,
    as_json: bool,
    console: Console,
) -> int:
    """Measure `run`, and any runs at the start of `texts`, on the remaining texts. Return the exit code.

    `options`: settings of data.build. `precision`: auto, fp32 or bf16. Raise ConfigError if a run or text is
    unusable, and RunFailed if a loss is not finite.
    """
    from bert_dp.data.build import shown_progress
    from bert_dp.evaluation.text_loss import text_loss
    from bert_dp.measure.matmul_peak import use_all_cores

    settings: dict[str, Any] = {"data": {"build": dict(options)}, "schedule": {"steps": 1}}
    runs = [str(run), *itertools.takewhile(is_run, texts)]
    texts = texts[len(runs) - 1 :]
    if late := [text for text in texts if is_run(text)]:
        message, hint = f"{late[0]} is a run", "put all runs before the first text"
        raise ConfigError([Issue("TEXT", "wrong_type", message, late[0], "RUN", hint)])
    if not texts:
        raise ConfigError([Issue("TEXT", "missing", "no text is given after the runs")])
    settings["data"]["sources"] = list(texts)
    use_all_cores()
    with issues_by_option(OPTIONS), shown_progress() as progress:
        build = resolve([settings]).data.build
        losses = [text_loss(os.path.expanduser(each), texts, build, progress, precision) for each in runs]
    found = [results.plain(loss) for loss in losses]
    many = len(losses) > 1
    show_result(
        console,
        found if many else found[0],
        lambda: comparison(losses) if many else text_report(losses[0]),
        as_json=as_json,
        titled=True,
    )
    return 0


def comparison(losses: Sequence[TextLoss]) -> Report:
    """Return a report that compares runs on the same text, sorted by ascending bits per byte."""
    from bert_dp.evaluation.text_loss import difference

    def bits(loss: TextLoss) -> float:
        return math.inf if loss.hidden.bits_per_byte is None else loss.hidden.bits_per_byte

    best, *_ = ranked = sorted(losses, key=bits)
    rows = []
    for loss in ranked:
        hidden, predicted = loss.hidden, loss.predicted
        more = "" if loss is best else _with_interval(*difference(best.hidden, hidden), hidden.documents)
        cells = [
            _with_interval(hidden.bits_per_byte, hidden.bits_per_byte_se, hidden.documents),
            more,
            _with_interval(predicted.loss, predicted.loss_se, predicted.documents),
            format_count(loss.vocab_size),
            format_count(loss.step),
        ]
        rows.append(TableRow(loss.run, [TableCell(text) for text in cells]))
    heads = ["pseudo-bits per byte", "difference from the first", "nats per token", "vocabulary", "step"]
    basis = f"{count_of(best.hidden.words, 'hidden word')} in {count_of(best.documents, 'document')}"
    notes = [
        f"Every run is measured on the same {basis}. \u00b1: half-width of the 95 % interval over documents; "
        "differences are paired by document. Nats per token are comparable only between equal vocabularies."
    ]
    section = ReportSection("", tables=[Table(rows, heads, corner="run")], notes=notes)
    return Report("bert-dp: masked language models on text", sections=[section])


def text_report(loss: TextLoss) -> Report:
    """Return a report on one run that shows each loss with its denominator."""
    predicted, hidden = loss.predicted, loss.hidden
    share = f"mean over {count_of(predicted.tokens, 'token')}, {format_percent(loss.mask_rate)} of all tokens"
    facts = [
        words(
            "loss per token, nats",
            _with_interval(predicted.loss, predicted.loss_se, predicted.documents),
            f"{share}; {format_percent(predicted.accuracy)} correct",
        ),
        words(
            "pseudo-bits per byte",
            _with_interval(hidden.bits_per_byte, hidden.bits_per_byte_se, hidden.documents),
            f"over {count_of(hidden.bytes, 'byte')} in {count_of(hidden.words, 'hidden word')} "
            f"({count_of(hidden.tokens, 'token')}) of {count_of(hidden.documents, 'document')}, "
            f"{format_percent(loss.mask_rate)} of all words",
        ),
        words(
            "text",
            count_of(loss.documents, "document"),
            f"{count_of(loss.bytes, 'byte')}, {count_of(loss.words, 'word')}, "
            f"{count_of(loss.tokens, 'token')} including separators",
        ),
        words(
            "model",
            f"{loss.run}, step {loss.step}",
            f"vocabulary of {format_count(loss.vocab_size)}, sequences of {loss.sequence_length} tokens, "
            f"{loss.precision} on {loss.device}",
        ),
    ]
    notes = ["\u00b1: half-width of the 95 % interval over documents; a single document has none."]
    if hidden.words_without_token or hidden.unknown_tokens:  # text that the tokenizer drops costs no bits
        notes.append(
            f"{count_of(hidden.words_without_token, 'hidden word')} without a token and "
            f"{count_of(hidden.unknown_tokens, 'unknown token')} make the bits per byte too low."
        )
    if loss.documents_without_tokens:
        notes.append(f"Number of documents without tokens: {format_count(loss.documents_without_tokens)}.")
    section = ReportSection("", tables=[Table(facts)], notes=notes)
    return Report("bert-dp: masked language model on text", sections=[section])


def _with_interval(mean: float | None, se: float | None, documents: int) -> str:
    half = "" if se is None else f" \u00b1 {format_decimals(student(documents - 1) * se)}"
    return format_decimals(mean) + half
