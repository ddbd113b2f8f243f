"""The answer of `bert-dp plan` as a report."""

from __future__ import annotations

from pathlib import Path

from launcher.plan.budget import BudgetPlan, PlannedFigure
from launcher.report.numbers import format_count, format_si
from launcher.report.page import Column, Report, ReportSection, Table, TableCell, TableRow, Verdict, words


def budget_page(plan: BudgetPlan, written: Path | None) -> Report:
    """Return the figures and the models, or the published answers."""
    rows = [
        words(f.name, _text(f), f"{f.origin}{': ' if f.note else ''}{f.note}")
        for f in plan.figures
        if f.value is not None
    ]
    models = [
        TableRow(
            model.name,
            [
                TableCell(f"{model.num_layers} x {model.hidden_size}"),
                TableCell(format_si(model.parameters), exact=model.parameters),
                TableCell(_text(model.tokens)),
                TableCell(_text(model.loss) if model.loss else ""),
                TableCell(model.note),
            ],
        )
        for model in plan.models
    ]
    last = "" if plan.is_chosen else "source"
    columns = [Column(h) for h in ("layers x width", "parameters", "tokens", "loss", last)]
    title = "What the budget buys" if plan.is_chosen else "Published answers, none of which is chosen"
    tables = [Table(rows, title="Plan"), Table(models, columns, title, "model")]
    return Report(
        "bert-dp: plan of a budget",
        verdicts=[Verdict("warn", text) for text in plan.warnings],
        sections=[ReportSection("", tables=tables)],
        next=f"bert-dp train {written} --dry-run" if written else "",
    )


def _text(figure: PlannedFigure) -> str:
    """Format a value with its interval."""

    def one(value: float) -> str:
        if figure.name == "compute":
            return f"{value:.3g} FLOP"
        if figure.name in ("tokens", "best parameters"):
            return format_si(value)
        return format_count(round(value)) if value >= 1e4 else f"{value:.4g}"

    text = one(figure.value or 0.0)
    return f"{text} ({' to '.join(map(one, figure.ci95))})" if figure.ci95 else text
