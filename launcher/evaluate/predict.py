"""`bert-dp predict`: checked here, done by `python -m bert_dp.predict`, whose lines go straight to stdout."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bert_dp.config import ConfigError, Issue
from bert_dp.record.exported import is_exported, read_exported
from launcher import children
from launcher.evaluate.export import LOADS, package_issues
from launcher.evaluate.finetune import find_pretrained
from launcher.output import place_issues


class Columns(NamedTuple):
    """Of a table, with the one or two texts of an example; None = the default."""

    text: str | None = None
    text_pair: str | None = None


def predict(
    run: Path,
    file: str,
    columns: Columns,
    *,
    pooling: str | None,
    out: Path | None,
    instances: int,
    threads: int | None,
    precision: str,
) -> int:
    """`threads`: of each instance; None = its share of the cores. `precision`: auto, fp32 or bf16. Returns
    the exit code. Raises ConfigError."""
    run = run.expanduser()
    if is_exported(run):
        exported = read_exported(run)
        place, finetune = run.absolute(), exported.finetune
        issues: list[Issue | str] = [*package_issues("predict", LOADS[exported.format])]
        if precision != "auto":
            issues.append(
                f"--precision: {precision} is for runs, and {run} was exported in {exported.precision}; "
                "leave it out, or name the run"
            )
    else:
        start = find_pretrained(run)
        is_finetuned = start.config.objective.name == "finetune"
        place, finetune, issues = start.run, start.config.finetune if is_finetuned else None, []
    issues += [*_file_issues(file), *_out_issues(out)]
    if columns.text_pair is not None and columns.text is None:
        issues.append("--text-pair: goes with --text, the column of the first text")
    if pooling is not None and finetune is not None:
        own = finetune.pooling
        issues.append(f"--pooling: {run} was finetuned with pooling: {own} and gives labels; leave it out")
    if issues:
        raise ConfigError(issues)
    arguments = [part for column in columns if column for part in ("--column", column)]
    if pooling is not None:
        arguments += ["--pooling", pooling]
    if out is not None:
        arguments += ["--out", str(out.absolute())]
    if instances > 1:
        arguments += ["--instances", str(instances)]
        threads = threads or max(1, len(os.sched_getaffinity(0)) // instances)
    if precision != "auto":
        arguments += ["--precision", precision]
    if threads is not None:
        arguments += ["--threads", str(threads)]
    return children.run_module("bert_dp.predict", [*arguments, "--", str(place), file]).returncode


def _file_issues(file: str) -> list[str]:
    if file == "-" or file.startswith("hub:") or Path(os.path.expanduser(file)).is_file():
        return []
    return [f"FILE: {file} is no file; name one, hub:NAME, or - for stdin"]


def _out_issues(out: Path | None) -> Sequence[Issue | str]:
    """Why no new file can be made there; at most one line."""
    if out is not None and out.exists():
        return [f"--out: {out} exists; name a new file"]
    return [] if out is None else place_issues(out.absolute().parent, "--out")
