"""`bert-dp checkpoints`: what a run could go on from, or be exported from."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert_dp import record
from bert_dp.cost import GIB
from launcher import children
from launcher.report.console import show_report
from launcher.report.model import Column, Report, ReportSection, Table, TableRow, Verdict
from launcher.report.numbers import count_of
from launcher.report.parts import cell
from launcher.run.read_run import heldout_losses

if TYPE_CHECKING:
    from rich.console import Console


def verify(run: Path, *, as_json: bool, console: Console) -> int:
    """Returns 0, 1 when a checkpoint is damaged, 2 when `run` has none."""
    code, found = children.capture_json("bert_dp.measure.verify_checkpoints", [str(run)])
    if found is None:
        return code or 1
    losses = heldout_losses(run)
    checkpoints = [{**each, "heldout_loss": losses.get(each["step"])} for each in found]
    if as_json:
        sys.stdout.write(json.dumps(record.finite(checkpoints), indent=1) + "\n")
    else:
        show_report(console, checkpoints_report(checkpoints))
    return 1 if any(each["problem"] for each in checkpoints) else 0


def checkpoints_report(checkpoints: Sequence[Mapping[str, Any]]) -> Report:
    """A row for each checkpoint, newest first; what is wrong with those that are damaged."""
    advice = ["Remove it; a run goes on from the newest checkpoint that is sound."]
    damaged = [
        Verdict("fail", f"damaged: {each['problem']}", advice) for each in checkpoints if each["problem"]
    ]
    sound = Verdict("ok", f"{count_of(len(checkpoints), 'checkpoint')}, every file as its hash says")
    rows = [
        TableRow(
            each["name"],
            [
                cell(each["step"], "count"),
                cell(each["samples"], "count"),
                cell(each["heldout_loss"], "nats"),
                cell(each["bytes"] and each["bytes"] / GIB, "gib"),
                cell("damaged" if each["problem"] else "verified", "word"),
            ],
        )
        for each in checkpoints
    ]
    heads = [
        Column("step"),
        Column("samples"),
        Column("held-out loss"),
        Column("size"),
        Column("files", text=True),
    ]
    return Report(
        "bert-dp: checkpoints",
        verdicts=damaged or [sound],
        sections=[ReportSection("", tables=[Table(rows, heads, corner="checkpoint")])],
    )
