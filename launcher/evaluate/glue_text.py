"""The scores of `eval glue` as a section of a model card, where an evaluation of the run is found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from launcher import results
from launcher.evaluate import FILE
from launcher.evaluate.finetune import Pretrained
from launcher.evaluate.glue import start_of
from launcher.evaluate.glue_report import SCORES, ScoreRow, how_text, remark, scores_table
from launcher.report.numbers import count_of, format_lr, format_points
from launcher.report.quantities import Computed
from launcher.results import Glue, GlueTask


def glue_text(start: Pretrained) -> str:
    """Markdown: of a trial of `eval glue` its task, of a pretrained run all tasks of its newest evaluation;
    empty where there is none."""
    if start.run.parent.name == "trials":
        glue = results.find(start.run.parent.parent / FILE, Glue)
        tasks = [task for task in glue.tasks if _has(task, start.run.name)] if glue else []
    else:
        glue = _evaluation_of(start)
        tasks = glue.tasks if glue else []
    if glue is None or not tasks:
        return ""
    text = f"Dev sets, out of 100; median over {count_of(glue.settings.seeds, 'seed')}. "
    text += f"{how_text(glue)}; rate {format_lr(glue.lr)}."
    if glue.average is not None and len(tasks) == len(glue.tasks):
        text += f" Average of its nine numbers: {format_points(glue.average)}."
    if glue.status != "complete":
        text += " The evaluation was not finished."
    return "\n".join(["## GLUE", "", text, "", *_lines(tasks, start.run.name), ""])


def _evaluation_of(start: Pretrained) -> Glue | None:
    """The newest that began with these weights, in eval here or beside the run's folder, or beside the
    run."""
    folders = (Path("eval"), start.run.parent.parent / "eval", start.run.parent)
    files = {file.resolve() for folder in folders for file in folder.glob(f"*/{FILE}")}
    sha256 = start_of(start).sha256
    for file in sorted(files, key=lambda file: file.stat().st_mtime, reverse=True):
        glue = results.find(file, Glue)
        if glue and sha256 and glue.start.sha256 == sha256 and glue.settings.init == "checkpoint":
            return glue
    return None


def _has(task: GlueTask, trial: str) -> bool:
    return any(each.trial == trial for each in task.trials)


def _lines(tasks: Sequence[GlueTask], trial: str) -> list[str]:
    """The first columns of the report's table, and remarks; of a trial its own score is remarked."""

    def remarks(row: ScoreRow) -> str:
        own = next((each.scores for each in row.task.trials if each.trial == trial), {})
        this = f"this run: {format_points(own[row.score.name])}" if row.score.name in own else ""
        return ", ".join(filter(None, (remark(row), this)))

    table = scores_table(tasks, [*SCORES[:4], Computed(remarks, "remark", "word")])
    heads = [table.corner, *(column.head for column in table.columns)]
    rows = [[row.label, *(cell.text for cell in row.cells)] for row in table.rows]
    return [f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows)]
