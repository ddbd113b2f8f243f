"""The scores of `eval glue` as a section of a model card, where an evaluation of the run is found."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from launcher import results
from launcher.evaluate import FILE
from launcher.evaluate.finetune import Pretrained
from launcher.evaluate.glue import start_of
from launcher.evaluate.glue_report import how_text, label, remark
from launcher.report.numbers import count_of, format_count, format_lr, format_points
from launcher.results import Glue, GlueTask

HEAD = ("task", "median", "deviation", "majority", "dev examples", "remark")


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
    rows = [_line(row) for task in tasks for row in _rows(task, start.run.name)]
    told = f"Dev sets, out of 100; median over {count_of(glue.settings.seeds, 'seed')}. "
    told += f"{how_text(glue)}; rate {format_lr(glue.lr)}."
    if glue.average is not None and len(tasks) == len(glue.tasks):
        told += f" Average of its nine numbers: {format_points(glue.average)}."
    if glue.status != "complete":
        told += " The evaluation was not finished."
    return "\n".join(["## GLUE", "", told, "", _line(HEAD), _line(["---"] * len(HEAD)), *rows, ""])


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


def _rows(task: GlueTask, trial: str) -> Iterator[tuple[str, ...]]:
    """One for each metric; of a trial its own score is remarked."""
    examples = {split.name: split.examples for split in task.splits}
    own = next((each.scores for each in task.trials if each.trial == trial), {})
    for score in task.scores:
        remarks = [remark(task, score)]
        if score.name in own:
            remarks.append(f"this run: {format_points(own[score.name])}")
        yield (
            label(task, score),
            format_points(score.median),
            format_points(score.sd),
            format_points(score.majority),
            format_count(examples.get(score.split)),
            ", ".join(filter(None, remarks)),
        )


def _line(cells: tuple[str, ...] | list[str]) -> str:
    return f"| {' | '.join(cells)} |"
