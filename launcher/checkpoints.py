"""`bert-dp checkpoints`: verify the checkpoints of a run."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert_dp import files
from bert_dp.config import ConfigError, Issue
from bert_dp.cost import GIB
from launcher.report.numbers import count_of
from launcher.report.page import Column, Report, ReportSection, Table, TableRow, Verdict, cell, show_report
from launcher.run.trials import heldout_losses

if TYPE_CHECKING:
    from rich.console import Console


def verify(run: Path, *, as_json: bool, console: Console) -> int:
    """Verify and show every checkpoint, newest first; return 1 if one is damaged. Raises ConfigError where
    there is none."""
    paths = files.list_checkpoints(run / "checkpoints")
    if not paths:
        message = f"{run} holds no checkpoint" if run.exists() else f"{run} does not exist"
        hint = "name the directory of a run, which has checkpoints/"
        raise ConfigError([Issue("RUN", "not_found", message, str(run), hint=hint)])
    losses = heldout_losses(run)
    checkpoints = [_describe(path, losses) for path in paths]
    if as_json:
        sys.stdout.write(json.dumps(files.finite(checkpoints), indent=1) + "\n")
    else:
        show_report(console, checkpoints_report(checkpoints))
    return 1 if any(each["problem"] for each in checkpoints) else 0


def _describe(path: Path, losses: Mapping[int, float]) -> dict[str, Any]:
    """Verify one checkpoint; `problem` is null if it is sound. `losses`: held-out loss by step."""
    from bert_dp.training import checkpoint

    facts, num_bytes = None, None
    with contextlib.suppress(OSError, ValueError):  # a run that goes on may remove it meanwhile
        num_bytes = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
        facts = files.read_checkpoint_facts(path)
    return {
        "name": path.name,
        "step": facts and facts.step,
        "samples": facts and facts.samples,
        "bytes": num_bytes,
        "problem": checkpoint.check(path),
        "heldout_loss": facts and losses.get(facts.step),
    }


def checkpoints_report(checkpoints: Sequence[Mapping[str, Any]]) -> Report:
    """Build the table of the checkpoints, newest first, with a verdict for each damaged one."""
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
    heads = [*map(Column, ("step", "samples", "held-out loss", "size")), Column("files", text=True)]
    return Report(
        "bert-dp: checkpoints",
        verdicts=damaged or [sound],
        sections=[ReportSection("", tables=[Table(rows, heads, corner="checkpoint")])],
    )
