"""Extract what reports show for fixed results: the cells of tables with their notes, the numbers in sentences
and the data of figures. `python -m tests.golden record` records them again after a change of words."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_dp import files
from launcher import results
from launcher.evaluate.glue_scores import compare_report, glue_report
from launcher.plan.scaling import plan_page
from launcher.report.formats import number
from launcher.report.page import Bars, Figure, Line, Report, Table
from launcher.report.run_page import of_directories
from launcher.scale import models
from launcher.scale.scale_page import scale_page
from launcher.tune.lr_search import TuneLr
from launcher.tune.throughput import TuneBatch
from launcher.tune.tune_page import batch_page, lr_page
from tests import tune_fixture
from tests.glue_fixture import evaluation, scored_task, write_glue
from tests.helpers import failed
from tests.plan_fixture import plan, source
from tests.report_fixture import figures_of, make_run
from tests.scaling_fixture import ENVIRONMENT, scaling

UNIT = r" ?%| (?:[kMGT](?:B|FLOP/s|J)?|us|ms|s|min|h)\b"
NUMBER = re.compile(rf"n/a|(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?(?:{UNIT})?(?![0-9A-Za-z])")
WHERE = {"rank": 1, "where": "a.py:1", "source": "in f: g()", "log": "l"}
CAUSE = failed("no", explanation=["so"], fix=["do", "or do"], consequences=["rank 2 followed"], **WHERE)
FAILED = {**CAUSE, "step": 90}
RARE = {"energy_j": 2.1e7, "straggler_ratio": 1.5, "mfu": 0.375, "loss_spikes": 3, "failed_saves": 2}
RARE |= {"straggler": {"rank": 1, "ratio": 1.5, "seconds_per_step": 0.25}, "profiled_steps": [10, 12]}
SPENT = {"device_hours": 2.0, "dollars": 7.2, "kwh": 1.43, "co2_kg": 0.572, "energy_origin": "stated"}
RARE |= {"spent": SPENT, "metrics": {"host_memory_gib": 1.5, "lost_share": 0.25}, "since_step": 90}
RARE |= {"command_s": 121.25, "restarts": [{"date": "d", "step": 5, "ranks": 2, "cause": "c"}]}
SCORED = {"loss": 0.5, "loss_unit": "squared error", "scores": {"dev/accuracy": 0.8, "dev/f1": 0.75}}
SCORED |= {"examples": 100, "f1_average": "macro", "baseline": {"dev/accuracy": 0.6}}
PEAK = {"datasheet_flops": 9.89e14, "matmul_flops": 6.5e11, "precision": "bf16"}
LOST: dict[str, tuple[str, str | None]] = {"weak-zero1-n4": ("oom", "no"), "weak-ddp-n4": ("pending", None)}


def run(path: Path, summary: Mapping[str, Any]) -> Path:
    """A run directory that tells nothing of this machine."""
    made = make_run(path, summary=dict(summary), run={"seed": len(path.name)})
    files.write_json(made / "environment.json", ENVIRONMENT)
    return made


def of_scaling(**options: Any) -> Report:
    whole = results.parse(scaling(**options), models.Scaling, "scaling.json")
    return scale_page(whole, Path("OUT"))


def of_batch(**changes: Any) -> Report:
    return batch_page(TuneBatch.model_validate(tune_fixture.batch(**changes)), Path("OUT"))


def of_rate(**changes: Any) -> Report:
    return lr_page(TuneLr.model_validate(tune_fixture.lr(**changes)), Path("OUT"))


def of_glue() -> Report:
    """Subsets, failed trials, and trials with one answer only."""
    mrpc, mnli = scored_task("MRPC", [0.68, 0.68], official=False), scored_task("MNLI", [0.5, 0.7])
    rte = scored_task("RTE", [0.25, None])
    for trial in (*mrpc.trials, rte.trials[0]):
        trial.one_class.append("dev")
    mnli.trials[0].one_class.append("dev_mismatched")
    changes = {"left_out": {"QQP": "not among --tasks"}, "heldout_loss": 2.5}
    return glue_report(evaluation([mrpc, mnli, rte]).model_copy(update=changes))


def of_comparison(path: Path) -> Report:
    """A difference is of the seeds that have a score in both: +0.1, +0.2 and +0.05 have the mean 0.1167 and
    the deviation 0.0764, times 4.303 / sqrt(3)."""
    tasks = {
        "a": [scored_task("RTE", [0.5, 0.6, 0.7, None, 0.6]), scored_task("CoLA", [0.5])],
        "b": [scored_task("RTE", [0.6, 0.8, 0.75, 0.75, None], official=False)],
        "c": [scored_task("RTE", [None, 0.25])],
        "d": [scored_task("RTE", [None])],
    }
    return compare_report([write_glue(path / name, *each) for name, each in tasks.items()])


REPORTS: dict[str, Callable[[Path], Report]] = {
    "run": lambda path: of_directories([run(path / "run", {"command_s": 121.25})]),
    "finetuned run": lambda path: of_directories([run(path / "run", {"heldout": SCORED, "compiled": True})]),
    "unusual run": lambda path: of_directories([run(path / "run", RARE)]),
    "runs": lambda path: of_directories(
        [run(path / "a", {}), run(path / "failed", FAILED), run(path / "other", {"heldout_loss": 6.26})]
    ),
    "scaling": lambda path: of_scaling(modes=("weak", "strong"), prediction=True, peak=PEAK),
    "partial scaling": lambda path: of_scaling(failed=LOST, status="partial", profile=None),
    "batch": lambda path: of_batch(),
    "doubted batch": lambda path: of_batch(inconclusive="w"),
    "rate": lambda path: of_rate(),
    "rate without a choice": lambda path: of_rate(choice=None, range_test=None),
    "plan": lambda path: plan_page(plan(source(), 1, 2, 4)),
    "glue": lambda path: of_glue(),
    "glue compared": of_comparison,
}


def told(folder: Path) -> dict[str, Any]:
    """Map each report to its numbers."""
    return {name: _of_report(make(folder / name.replace(" ", "-"))) for name, make in REPORTS.items()}


def numbers_in(*texts: str) -> str:
    return " | ".join(" ".join(NUMBER.findall(text)) for text in texts)


def _of_report(report: Report) -> dict[str, Any]:
    tables = [(s.title, t) for s in report.sections if not s.folded for t in s.tables]
    return {
        "subtitle": numbers_in(*report.subtitle),
        "tiles": {
            tile.label: numbers_in(*(f"{c.text} {c.note}" for c in tile.cells)) for tile in report.tiles
        },
        "verdicts": [f"{v.level} {numbers_in(v.text, *v.notes)}" for v in report.verdicts],
        "notes": {s.title: numbers_in(*s.notes) for s in report.sections if s.notes},
        "tables": {f"{section}/{table.title}": _of_table(table) for section, table in tables},
        "figures": {figure.title: _of_figure(figure) for figure in figures_of(report)},
        "next": " ".join(report.next.split()[:3]),
    }


def _of_table(table: Table) -> dict[str, str]:
    heads = {"": " | ".join(table.columns)} if table.columns else {}
    return heads | {
        f"{row.topic} {row.label}".strip(): " | ".join(
            f"{cell.text}; {cell.note}" if cell.note else cell.text for cell in row.cells
        )
        for row in table.rows
    }


def _of_figure(figure: Figure) -> dict[str, Any]:
    rules = [f"{rule.label}: {rule.value:.5g}" for rule in (*figure.levels, *figure.marks)]
    axes = [(a.unit, str(a.log), str(a.from_zero), _sum(a.ticks)) for a in (figure.x, figure.y)]
    return {
        "axes": [" ".join(axis) for axis in axes],
        "note": numbers_in(figure.note),
        "rows and rules": " | ".join((*figure.rows, *rules)),
        "traces": [f"{trace.label}: {_drawn(trace)}" for trace in figure.traces],
    }


def _drawn(trace: Line | Bars) -> str:
    if isinstance(trace, Line):
        series = map(_sum, (trace.x, trace.y, trace.low, trace.high))
        return " | ".join((trace.style, str(trace.colour), *series))
    return " | ".join((_sum(trace.parts), *trace.texts))


def _sum(values: Sequence[float | None]) -> str:
    """How many, and a sum that follows each value and its place."""
    placed = ((number(value) or 0.0) * (place + 1) for place, value in enumerate(values))
    return f"{len(values)} values {math.fsum(placed):.5g}"
