"""`bert-dp plan fit`: the loss law of completed runs or of a table, as frontier.json and a report."""

# ruff: noqa: RUF012 (pydantic copies a default)

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from bert_dp import files
from bert_dp.config import Config, ConfigError, Issue, dump_config, load_config
from bert_dp.config.errors import read_regular
from bert_dp.cost import num_parameters
from bert_dp.files.models import StoredFile, StoredModel, Summary
from launcher import results
from launcher.plan.budget import MLM_MIN_FLOPS, family, with_model
from launcher.plan.frontier import MIN_BUDGETS, MIN_RUNS, CompletedRun, Fit, LossLaw
from launcher.report.numbers import format_count, format_si
from launcher.report.page import Report, ReportSection, Table, Verdict, words

FILE = "frontier.json"
MAX_CONTRADICTION = 2.0
SAME_BUDGET = 1.25  # runs whose compute differs by less belong to one budget
COLUMNS = ("budget_flops", "parameters", "loss", "tokens")
DESIGN_SIZES = 4  # of each budget, from 0.35 to 2.8 times the middle one
DESIGN_BUDGETS = 4  # each twice the one before


class FittedRun(StoredModel):
    """A run that the law was fitted to."""

    name: str
    budget_flops: float
    parameters: float
    tokens: float
    loss: float
    parameters_without_embedding: float | None = None
    tokens_per_s: float | None = None
    hours: float | None = None
    """Of its steps, evaluations and saves."""


class StoredLaw(StoredModel):
    """L(N, D) = E + A N^-a + B D^-b."""

    E: float
    A: float
    B: float
    a: float
    b: float

    @property
    def exponent(self) -> float:
        """Power of the budget by which the best number of parameters grows."""
        return self.b / (self.a + self.b)


class FrontierFile(StoredFile):
    """frontier.json: runs, the law fitted to them, and its resampled copies."""

    hint: ClassVar[str] = "`bert-dp plan fit` writes it anew"
    schema_version: Literal[1] = 1
    flops: float
    """FLOPs per parameter and token that relate budget, parameters and tokens."""
    law: StoredLaw
    draws: list[StoredLaw]
    left_out: list[StoredLaw]
    others: list[StoredLaw] = []
    runs: list[FittedRun] = Field(min_length=MIN_RUNS)
    exponent: float
    exponent_ci95: results.Interval
    exponent_without_embedding: float | None = None
    parabola_exponent: float | None = None
    contradiction: float | None = None
    """Median factor between the law's best size and the parabola's, of the budgets that have both; a law that
    is off by more than MAX_CONTRADICTION does not describe the runs."""
    outside: list[float] = []
    """Budgets whose minimum lies outside their runs."""
    mask_rate: float | None = None
    sequence_length: int | None = None
    data_hash: str | None = None
    device: str | None = None
    world_size: int | None = None

    def fit(self) -> Fit:
        """Return the fit for estimates."""

        def law(stored: StoredLaw) -> LossLaw:
            return LossLaw(**stored.model_dump(), flops=self.flops)

        return Fit(
            tuple(CompletedRun(r.budget_flops, r.parameters, r.loss, r.tokens) for r in self.runs),
            law(self.law),
            tuple(map(law, self.draws)),
            tuple(map(law, self.left_out)),
            tuple(map(law, self.others)),
        )

    @property
    def contradicts(self) -> bool:
        """True if the law's best sizes are far from those of the runs themselves."""
        return self.contradiction is not None and self.contradiction > MAX_CONTRADICTION

    def rates(self) -> dict[float, float]:
        """Return measured tokens/s by parameters, of the runs that have them; the mean of equal sizes."""
        found: dict[float, list[float]] = {}
        for run in self.runs:
            if run.tokens_per_s:
                found.setdefault(run.parameters, []).append(run.tokens_per_s)
        return {size: sum(values) / len(values) for size, values in found.items()}


@dataclasses.dataclass(frozen=True)
class RunSet:
    """Runs to fit and what they have in common."""

    runs: tuple[FittedRun, ...]
    mask_rate: float | None = None
    sequence_length: int | None = None
    data_hash: str | None = None
    device: str | None = None
    world_size: int | None = None


def read_runs(directories: Sequence[Path]) -> RunSet:
    """Read completed pretraining runs of one corpus and one mask rate. Raises ConfigError."""
    issues: list[Issue] = []
    runs: list[FittedRun] = []
    common: dict[str, tuple[object, str]] = {}
    for directory in directories:
        try:
            summary = results.read(directory / "summary.json", Summary)
            config = load_config(directory / "config.yaml")
        except ConfigError as error:
            issues += error.issues
            continue
        found = files.newest_checkpoint_facts(directory)
        facts = {
            "objective.mask_rate": config.objective.mask_rate,
            "data": found[1].data_hash if found else None,
            "data.sequence_length": config.data.sequence_length,
        }
        for setting, value in facts.items():
            first, of = common.setdefault(setting, (value, str(directory)))
            if value != first:
                message = f"{directory} has {value}, {of} {first}: their losses do not compare"
                issues.append(Issue(setting, "conflict", message, value, of))
        if summary.status != "done" or config.objective.name != "mlm" or summary.heldout_loss is None:
            message = f"{directory} is no finished pretraining run with a held-out loss ({summary.status})"
            hint = "its learning rate has not decayed: run it to its end, or leave it out"
            issues.append(Issue("RUNS", "unsupported", message, str(directory), hint=hint))
        elif summary.parameters and summary.tokens:
            times = summary.time_s
            embedding = config.model.vocab_size * config.model.hidden_size
            runs.append(
                FittedRun(
                    name=directory.name,
                    budget_flops=6.0 * summary.parameters * summary.tokens,
                    parameters=summary.parameters,
                    tokens=summary.tokens,
                    loss=summary.heldout_loss,
                    parameters_without_embedding=summary.parameters - embedding,
                    tokens_per_s=summary.tokens_per_s,
                    hours=sum(times.get(part, 0.0) for part in ("train", "eval", "save")) / 3600,
                )
            )
    if issues:
        raise ConfigError(issues)
    last = results.read(directories[-1] / "summary.json", Summary)
    return RunSet(
        tuple(runs),
        config.objective.mask_rate,
        config.data.sequence_length,
        found[1].data_hash if found else None,
        last.device,
        last.world_size,
    )


def read_table(path: Path) -> RunSet:
    """Read a CSV with budget_flops, parameters, loss and, optionally, tokens. Raises ConfigError."""
    try:
        text = read_regular(path, files.MAX_JSON_BYTES).decode("utf-8-sig")
        rows = list(csv.DictReader(io.StringIO(text)))
    except (OSError, ValueError) as error:
        raise ConfigError([Issue("--table", "not_found", f"{path}: {error}", str(path))]) from None
    if missing := [name for name in COLUMNS[:3] if not rows or name not in rows[0]]:
        message = f"{path} has no column {', '.join(missing)}"
        raise ConfigError([Issue("--table", "missing", message, str(path), hint=f"use {', '.join(COLUMNS)}")])
    runs = []
    for line, row in enumerate(rows, 2):
        try:
            budget, parameters, loss = (float(row[name]) for name in COLUMNS[:3])
            tokens = float(row.get("tokens") or budget / (6 * parameters))
            if not all(0 < v < math.inf for v in (budget, parameters, loss, tokens)):
                raise ValueError("not a number above 0")
        except (ValueError, TypeError, ZeroDivisionError) as error:
            message = f"line {line} of {path}: {error}"
            raise ConfigError([Issue("--table", "damaged", message, str(path))]) from None
        name = f"line {line}"
        runs.append(
            FittedRun(name=name, budget_flops=budget, parameters=parameters, tokens=tokens, loss=loss)
        )
    return RunSet(tuple(runs))


def grouped(runs: Iterable[FittedRun]) -> list[FittedRun]:
    """Give runs of nearly equal compute one budget, the geometric mean of theirs."""
    groups: list[list[FittedRun]] = []
    for run in sorted(runs, key=lambda r: r.budget_flops):
        if groups and run.budget_flops < SAME_BUDGET * groups[-1][0].budget_flops:
            groups[-1].append(run)
        else:
            groups.append([run])
    budgets = [math.exp(sum(math.log(r.budget_flops) for r in group) / len(group)) for group in groups]
    return [
        run.model_copy(update={"budget_flops": budget})
        for budget, group in zip(budgets, groups, strict=True)
        for run in group
    ]


def fit_runs(runs: RunSet) -> FrontierFile:
    """Fit the law. Raises ConfigError for too few runs."""
    from launcher.plan import loss_fit

    rows = grouped(runs.runs)
    completed = [CompletedRun(r.budget_flops, r.parameters, r.loss, r.tokens) for r in rows]
    fit = loss_fit.fit(completed)
    exponent, interval = fit.estimate(lambda law: law.exponent)
    without = None
    if all(r.parameters_without_embedding for r in rows):
        smaller = [
            dataclasses.replace(c, parameters=r.parameters_without_embedding or 0.0)
            for c, r in zip(completed, rows, strict=True)
        ]
        without = loss_fit.fit(smaller, draws=2).law.exponent
    minima = loss_fit.parabola_minima(completed)
    inside = {budget: minimum for budget, minimum in minima.items() if minimum[1]}

    def stored(law: LossLaw) -> StoredLaw:
        return StoredLaw(E=law.E, A=law.A, B=law.B, a=law.a, b=law.b)

    return FrontierFile(
        flops=fit.law.flops,
        law=stored(fit.law),
        draws=list(map(stored, fit.draws)),
        left_out=list(map(stored, fit.left_out)),
        others=list(map(stored, fit.others)),
        runs=rows,
        exponent=exponent,
        exponent_ci95=list(interval),
        exponent_without_embedding=without,
        parabola_exponent=loss_fit.parabola_exponent(inside) if len(inside) >= MIN_BUDGETS else None,
        contradiction=_contradiction(fit.law, inside),
        outside=[budget for budget in fit.budgets if budget not in inside],
        mask_rate=runs.mask_rate,
        sequence_length=runs.sequence_length,
        data_hash=runs.data_hash,
        device=runs.device,
        world_size=runs.world_size,
    )


def _contradiction(law: LossLaw, minima: Mapping[float, tuple[float, bool]]) -> float | None:
    if not minima:
        return None
    logs = [abs(math.log(law.best_parameters(budget) / best)) for budget, (best, _) in minima.items()]
    return math.exp(statistics.median(logs))


def fit_page(found: FrontierFile) -> Report:
    """Return the law, its exponents and the runs by budget."""
    law, (low, high) = found.law, found.exponent_ci95
    verdicts = []
    if found.contradicts:
        text = (
            f"The law does not describe these runs: its best sizes are off by x {found.contradiction:.1f} "
            "from those of the runs of each budget. Repeated data or unfinished runs do this."
        )
        verdicts.append(Verdict("fail", text))
    if found.outside:
        budgets = ", ".join(f"{budget:.3g} FLOP" for budget in found.outside)
        text = f"The best size of {budgets} lies outside its runs: add smaller or larger models there."
        verdicts.append(Verdict("warn", text))
    if found.others:
        text = "Another law fits nearly as well (sum of losses within 10 %): the optimum is not pinned down."
        verdicts.append(Verdict("warn", text, [f"exponent {o.exponent:.3f}" for o in found.others]))
    if found.runs[-1].budget_flops < MLM_MIN_FLOPS:
        text = (
            f"All runs are below {MLM_MIN_FLOPS:g} FLOP, where the loss of masked LMs leaves its power law "
            "(arXiv 2305.17266): extrapolate with care."
        )
        verdicts.append(Verdict("warn", text))
    parabola = "" if found.parabola_exponent is None else f"{found.parabola_exponent:.3f}"
    without = "" if found.exponent_without_embedding is None else f"{found.exponent_without_embedding:.3f}"
    laws = [
        words("loss", f"{law.E:.3f} + {law.A:.3g} N^-{law.a:.3f} + {law.B:.3g} D^-{law.b:.3f} nats"),
        words("best N grows as C to", f"{found.exponent:.3f}", f"95 %: {low:.3f} to {high:.3f}"),
        words("without the embedding", without),
        words("by parabolas", parabola, "a cross-check, biased also without noise (arXiv 2603.22339)"),
    ]
    rows = []
    for budget, group in itertools.groupby(found.runs, key=lambda r: r.budget_flops):
        best = min(group, key=lambda r: r.loss)
        law_best = found.fit().law.best_parameters(budget)
        text = f"{format_count(round(best.parameters))} parameters, {best.loss:.3f} nats"
        rows.append(words(f"{budget:.3g} FLOP", text, f"the law's best: {format_si(law_best)}"))
    tables = [Table(laws, title="Law"), Table(rows, title="Best run of each budget")]
    return Report(
        "bert-dp: compute frontier",
        verdicts=verdicts,
        sections=[ReportSection("", tables=tables)],
        next=f"bert-dp plan --hours 24 --frontier {FILE}",
    )


def design(base: Config, hours: float, tokens_per_s: float, out: Path) -> list[Path]:
    """Write the configurations of runs to fit that take `hours` together, and return their paths.

    tokens_per_s: of the base's model on this machine; others are taken to be as fast per FLOP. The middle
    size of each budget is that of 20 tokens a parameter.
    """
    flops_s = 6.0 * num_parameters(base.model, base.data.sequence_length) * tokens_per_s
    models = family(base.model)
    sizes = [num_parameters(model, base.data.sequence_length) for model in models]
    whole = hours * 3600 * flops_s / DESIGN_SIZES
    least = whole / (2**DESIGN_BUDGETS - 1)
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for k in range(DESIGN_BUDGETS):
        budget = least * 2**k
        middle = math.sqrt(budget / 6 / 20)
        for j in range(DESIGN_SIZES):
            wanted = middle * 2 ** (j - DESIGN_SIZES / 2 + 0.5)
            i = min(range(len(sizes)), key=lambda i: abs(math.log(sizes[i] / wanted)))
            tokens = round(budget / 6 / sizes[i])
            schedule = base.schedule.model_copy(
                update=dict.fromkeys(("steps", "hours", "epochs")) | {"tokens": tokens}
            )
            config = with_model(base, models[i]).model_copy(update={"schedule": schedule})
            path = out / f"budget-{k}-width-{models[i].hidden_size}.yaml"
            files.write_text(path, dump_config(config))
            written.append(path)
    return written
