"""The answer of `plan scaling` as a Report."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from launcher.report.model import Report, Section, Table, Verdict
from launcher.report.numbers import count_of, format_change, format_count
from launcher.report.parts import words
from launcher.report.quantities import Computed, Quantity, Ratio, table
from launcher.scale.models import PredictedRow, Prediction

ROW = (
    Quantity("tensor", "tensor", "count"),
    Quantity("accumulation", "accum.", "count"),
    Quantity("step_time_s", "step", "seconds"),
    Quantity("exposed_comm_fraction", "exposed", "percent"),
    Quantity("efficiency", "efficiency", "percent"),
    Quantity("mfu", "MFU", "percent"),
    Quantity("tokens_per_s", "tokens/s"),
)
MEASURED = (
    Quantity("predicted_step_s", "step predicted", "seconds"),
    Quantity("measured_step_s", "measured", "seconds"),
    Quantity("predicted_efficiency", "efficiency predicted", "percent"),
    Ratio("measured_efficiency", "measured", "percent", "measured_efficiency_ci95"),
    Quantity("within", "within the interval", "word"),
)


def plan_report(answer: Prediction, config: str | None = None) -> Report:
    """The rows, the levers at the greatest number of GPUs, measured cells, and what was assumed. `config`:
    that of the model, which `scale` can measure."""
    last = max(answer.rows, key=lambda row: row.world_size)
    levers = [
        words(lever.lever, format_change(lever.gain), "an upper bound, no setting" if lever.bound else "")
        for lever in last.levers
    ]
    what = f"What one change would do on {count_of(last.world_size, 'GPU')}"
    counts = ",".join(dict.fromkeys(str(row.world_size) for row in answer.rows[:4]))
    measured = [(cell.cell, cell) for cell in answer.measured]
    tables = [
        _rows(answer.rows),
        Table(levers, title=what),
        table(measured, MEASURED, title="Predicted beside measured", corner="cell"),
    ]
    return Report(
        "bert-dp: predicted scaling",
        verdicts=[Verdict("warn", text) for text in answer.warnings],
        sections=[Section("", tables=tables, notes=answer.assumptions)],
        next="" if config is None else f"bert-dp scale {shlex.quote(config)} --nproc {counts}",
    )


def _rows(rows: Sequence[PredictedRow]) -> Table:
    """Without columns that say the same of every row, and with the lever that gains most."""
    same = {"tensor": all(row.tensor == 1 for row in rows), "mfu": not any(row.mfu for row in rows)}
    shown = [quantity for quantity in ROW if not same.get(quantity.path)]
    best = Computed(_best_change, "best change", "word")
    return table([(format_count(row.world_size), row) for row in rows], [*shown, best], corner="GPUs")


def _best_change(row: PredictedRow) -> str:
    best = next((lever for lever in row.levers if not lever.bound), None)
    return f"{format_change(best.gain)} {best.lever}" if best else ""
