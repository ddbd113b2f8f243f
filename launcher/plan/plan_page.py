"""The prediction of `plan scaling` as a Report."""

from __future__ import annotations

import shlex

from launcher.report.numbers import count_of, format_change, format_count
from launcher.report.page import (
    Computed,
    Quantity,
    Ratio,
    Report,
    ReportSection,
    Table,
    Verdict,
    table,
    words,
)
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


def plan_page(prediction: Prediction, config: str | None = None) -> Report:
    """Return the rows, the levers at the greatest number of GPUs, the measured cells, and the assumptions.

    `config`: configuration of the model, which `scale` can measure.
    """
    rows = prediction.rows
    last = max(rows, key=lambda row: row.world_size)
    levers = [
        words(lever.lever, format_change(lever.gain), "an upper bound, no setting" if lever.bound else "")
        for lever in last.levers
    ]
    counts = ",".join(dict.fromkeys(str(row.world_size) for row in rows[:4]))
    # columns that have one value in all rows are left out
    same = {"tensor": all(row.tensor == 1 for row in rows), "mfu": not any(row.mfu for row in rows)}
    columns = [quantity for quantity in ROW if not same.get(quantity.path)]
    best = Computed(_best_change, "best change", "word")
    tables = [
        table([(format_count(row.world_size), row) for row in rows], [*columns, best], corner="GPUs"),
        Table(levers, title=f"What one change would do on {count_of(last.world_size, 'GPU')}"),
        table(
            [(cell.cell, cell) for cell in prediction.measured],
            MEASURED,
            title="Predicted beside measured",
            corner="cell",
        ),
    ]
    return Report(
        "bert-dp: predicted scaling",
        verdicts=[Verdict("warn", text) for text in prediction.warnings],
        sections=[ReportSection("", tables=tables, notes=prediction.assumptions)],
        next="" if config is None else f"bert-dp scale {shlex.quote(config)} --nproc {counts}",
    )


def _best_change(row: PredictedRow) -> str:
    best = next((lever for lever in row.levers if not lever.bound), None)
    return f"{format_change(best.gain)} {best.lever}" if best else ""
