"""Fit the loss law to completed runs or to a table of runs, and report the fit (`bert-dp plan fit`)."""

import csv
import dataclasses
import io
import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bert_dp import files
from bert_dp.config import ConfigError, Issue, load_config
from bert_dp.config.errors import read_regular, refusing
from bert_dp.files.models import Summary
from launcher import results
from launcher.plan.budget import MLM_MIN_FLOPS, small
from launcher.plan.frontier import MIN_BUDGETS, CompletedRun, Frontier
from launcher.report.formats import format_count, format_si
from launcher.report.page import Report, ReportSection, Table, Verdict, words

FILE = "frontier.json"
SAME_BUDGET = 1.25  # runs share a budget if their compute is below this multiple of the group's lowest
COLUMNS = ("budget_flops", "parameters", "loss", "tokens")
CONTRADICTS = (
    "The law does not describe these runs: its best sizes and those found with a parabola per budget differ "
    "by a factor of {:.1f} (median over budgets). Repeated data or unfinished runs can cause this."
)
OUTSIDE = "The sizes of the runs do not enclose the best size for {}: add smaller or larger models."
OTHERS = "Another law fits nearly as well (sum of Huber losses within 10 %), so the optimum is uncertain."


def read_runs(directories: Sequence[Path]) -> tuple[list[CompletedRun], dict[str, Any]]:
    """Read completed pretraining runs, their common properties, and the last run's device and world size.
    Raises ConfigError if a run is incomplete, or if the corpus, mask rate or sequence length differs."""
    issues: list[Issue] = []
    runs: list[CompletedRun] = []
    common: dict[str, tuple[object, str]] = {}
    for directory in directories:
        try:
            summary = results.read(directory / "summary.json", Summary)
            config = load_config(directory / "config.yaml")
        except ConfigError as error:
            issues += error.issues
            continue
        checkpoint = files.newest_checkpoint_facts(directory)
        facts = {
            "mask_rate": ("objective.mask_rate", config.objective.mask_rate),
            "data_hash": ("data", checkpoint[1].data_hash if checkpoint else None),
            "sequence_length": ("data.sequence_length", config.data.sequence_length),
        }
        for name, (setting, value) in facts.items():
            first, of = common.setdefault(name, (value, str(directory)))
            if value != first:
                message = f"{directory} has {value}, but {of} has {first}: their losses are not comparable"
                issues.append(Issue(setting, "conflict", message, value, of))
        objective = config.task or config.objective.name
        if summary.status != "done" or objective != "mlm" or summary.heldout_loss is None:
            message = f"{directory} is not a complete pretraining run with a held-out loss ({summary.status})"
            hint = "leave it out, or resume it until its learning rate has fully decayed"
            issues.append(Issue("RUNS", "unsupported", message, str(directory), hint=hint))
        elif (size := summary.parameters) and (tokens := summary.tokens):
            rest = size - config.model.vocab_size * config.model.hidden_size
            loss, rate = summary.heldout_loss, summary.tokens_per_s
            runs.append(CompletedRun(6.0 * size * tokens, size, loss, tokens, directory.name, rest, rate))
    if issues:
        raise ConfigError(issues)
    shared = {name: value for name, (value, _) in common.items()}
    return runs, {**shared, "device": summary.device, "world_size": summary.world_size}


def read_table(path: Path) -> list[CompletedRun]:
    """Read runs from a CSV file with COLUMNS (`tokens` is optional). Raises ConfigError if it is invalid."""
    with refusing("--table", str(path)):
        text = read_regular(path, files.MAX_JSON_BYTES).decode("utf-8-sig")
        rows = list(csv.DictReader(io.StringIO(text)))
    if missing := [name for name in COLUMNS[:3] if not rows or name not in rows[0]]:
        message = f"{path} has no column {', '.join(missing)}"
        raise ConfigError([Issue("--table", "missing", message, str(path), hint=f"use {', '.join(COLUMNS)}")])
    runs = []
    for line, row in enumerate(rows, 2):
        with refusing("--table", f"line {line} of {path}"):
            budget, size, loss = (float(row[name] or "") for name in COLUMNS[:3])
            tokens = float(row.get("tokens") or (size and budget / (6 * size)))
            if not (min(budget, size, loss, tokens) > 0 and math.isfinite(budget + size + loss + tokens)):
                raise ValueError("budget_flops, parameters, loss and tokens must be finite and above 0")
            runs.append(CompletedRun(budget, size, loss, tokens, f"line {line}"))
    return runs


def grouped(runs: Iterable[CompletedRun]) -> list[CompletedRun]:
    """Group runs of nearly equal compute, and set each run's budget to the geometric mean over its group."""
    groups: list[list[CompletedRun]] = []
    for run in sorted(runs, key=lambda r: r.budget_flops):
        if not groups or run.budget_flops >= SAME_BUDGET * groups[-1][0].budget_flops:
            groups.append([])
        groups[-1].append(run)
    return [
        dataclasses.replace(run, budget_flops=statistics.geometric_mean(r.budget_flops for r in group))
        for group in groups
        for run in group
    ]


def fit_runs(runs: Iterable[CompletedRun], facts: dict[str, Any] | None = None) -> Frontier:
    """Fit the loss law. `facts`: other Frontier fields. Raises ConfigError for too few runs or budgets."""
    from launcher.plan import loss_fit

    rows = grouped(runs)
    found = loss_fit.fit(rows)
    exponent, interval = found.estimate(lambda law: law.exponent)
    without = None
    if all(row.parameters_without_embedding for row in rows):
        smaller = [dataclasses.replace(r, parameters=r.parameters_without_embedding or 0.0) for r in rows]
        without = loss_fit.fit(smaller, draws=2).law.exponent
    minima = loss_fit.parabola_minima(rows)
    inside = {budget: best for budget, (best, is_inside) in minima.items() if is_inside}
    off = [abs(math.log(found.law.best_parameters(budget) / best)) for budget, best in inside.items()]
    more = {
        "exponent": exponent,
        "exponent_ci95": list(interval),
        "exponent_without_embedding": without,
        "parabola_exponent": loss_fit.parabola_exponent(inside) if len(inside) >= MIN_BUDGETS else None,
        "contradiction": math.exp(statistics.median(off)) if off else None,
        "outside": [budget for budget in found.budgets if budget not in inside],
    }
    return found.model_copy(update={**more, **(facts or {})})


def fit_page(found: Frontier) -> Report:
    """Return a report with the law, its exponents and the best run for each budget."""
    verdicts = []
    if found.contradicts:
        verdicts.append(Verdict("fail", CONTRADICTS.format(found.contradiction)))
    if found.outside:
        budgets = ", ".join(format_si(budget, "FLOP") for budget in found.outside)
        verdicts.append(Verdict("warn", OUTSIDE.format(budgets)))
    if found.others:
        verdicts.append(Verdict("warn", OTHERS, [f"exponent {law.exponent:.3f}" for law in found.others]))
    if (most := found.budgets[-1]) < MLM_MIN_FLOPS:
        verdicts.append(Verdict("warn", small(most)))

    def power(value: float | None) -> str:
        return "" if value is None else f"{value:.3f}"

    law, interval = found.law, " to ".join(map(power, found.exponent_ci95 or ()))
    laws = [
        words("loss", f"{law.E:.3f} + {law.A:.3g} N^-{law.a:.3f} + {law.B:.3g} D^-{law.b:.3f} nats"),
        words("exponent x in best N ~ C^x", power(found.exponent), f"95 %: {interval}"),
        words("x without embedding parameters", power(found.exponent_without_embedding)),
        words(
            "x found by parabolas",
            power(found.parabola_exponent),
            "a cross-check; biased even without noise (arXiv 2603.22339)",
        ),
    ]
    rows = []
    for budget, group in itertools.groupby(found.runs, key=lambda r: r.budget_flops):
        best = min(group, key=lambda r: r.loss)
        text = f"{format_count(round(best.parameters))} parameters, {best.loss:.3f} nats"
        note = f"best size by the law: {format_si(law.best_parameters(budget))}"
        rows.append(words(format_si(budget, "FLOP"), text, note))
    tables = [Table(laws, title="Law"), Table(rows, title="Best run for each budget")]
    sections, follow = [ReportSection("", tables=tables)], f"bert-dp plan --hours 24 --frontier {FILE}"
    return Report("bert-dp: compute frontier", verdicts=verdicts, sections=sections, next=follow)
