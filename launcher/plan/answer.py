"""From the options of `bert-dp plan` to its answer: speeds, prices, and the configuration that is written."""

from __future__ import annotations

import dataclasses
import datetime
import difflib
from collections.abc import Callable, Collection, Mapping
from datetime import date
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from bert_dp import files
from bert_dp.config import (
    Config,
    ConfigError,
    Issue,
    batch_layout,
    dump_config,
    load_config,
    peak_lr,
    read_yaml,
)
from bert_dp.config.load import find_config
from bert_dp.cost import num_parameters, peak_flops
from bert_dp.files.models import StoredFile
from launcher import results
from launcher.plan import budget, planner_page
from launcher.plan.budget import BudgetPlan, Costs, Origin, PlannedFigure, Rate, Unit
from launcher.plan.fit import FrontierFile
from launcher.plan.step_model import hardware
from launcher.report.html import may_replace

PRICES, GRID = (Path(__file__).with_name(name) for name in ("prices.yaml", "grid.yaml"))
OLD_DAYS = 180  # from which the age of a price is said
NAMES: Mapping[Unit, str] = {"hours": "--hours", "dollars": "--dollars", "kwh": "--kwh"}


class SourcedValue(StoredFile):
    """An entry of prices.yaml or grid.yaml."""

    hint: ClassVar[str] = "give value, unit, date and source"
    value: float = Field(ge=0)
    unit: str
    date: datetime.date = Field(strict=False)
    source: str = Field(min_length=1)


def sourced_values(path: Path) -> dict[str, SourcedValue]:
    """Read a file of values with their sources. Raises ConfigError for one without date or source."""
    rows = dict(read_yaml(path)).items()
    return {str(name): results.parse(row, SourcedValue, f"{path}: {name}") for name, row in rows}


@dataclasses.dataclass(frozen=True)
class BudgetOptions:
    """Options of `bert-dp plan`."""

    budgets: Mapping[str, float]
    gpu: str | None = None
    gpus: int = 1
    config: str = "crammed-bert"
    frontier: Path | None = None
    tokens_per_parameter: float | None = None
    keep_model: bool = False
    tokens_available: float | None = None
    link: str | None = None
    precision: str = "bf16"
    price: float | None = None
    watts: float | None = None
    pue: float = 1.0
    grid: str | None = None
    g_per_kwh: float | None = None


def base_config(name: str) -> Config:
    """Load a configuration by name or path. Raises ConfigError."""
    try:
        return load_config(find_config(name))
    except ConfigError as error:
        raise ConfigError([issue.within("--config") for issue in error.issues]) from None


def check_folder(option: str, path: Path) -> None:
    """Raise ConfigError when there is no folder to write a file in."""
    if not path.absolute().parent.is_dir():
        message = f"{path.parent} is no folder"
        raise ConfigError([Issue(option, "not_found", message, str(path), hint="name a file in one that is")])


def plan_budget(
    options: BudgetOptions, out: Path, page: Path | None = None, today: date | None = None
) -> tuple[BudgetPlan, Path | None]:
    """Plan a budget; write the configuration to `out`, if a size was chosen, and the calculator to `page`.
    Raises ConfigError."""
    unit, amount = _budget(options)
    base = base_config(options.config)
    frontier = results.read(options.frontier, FrontierFile) if options.frontier else None
    if issues := _issues(options, frontier):
        raise ConfigError(issues)
    if page is not None:
        check_folder("--page", page)
    if page is not None and not may_replace(page):
        message, hint = f"{page} is no page of bert-dp and would be replaced", "name another file"
        raise ConfigError([Issue("--page", "exists", message, str(page), hint=hint)])
    check_folder("--out", out)
    costs, warnings = _costs(options, today or date.today())
    fit = frontier.fit() if frontier else None
    plan = budget.make_plan(
        base,
        unit,
        amount,
        costs,
        _rate_of(options, base, frontier),
        fit,
        options.tokens_available,
        options.tokens_per_parameter,
        options.keep_model,
    )
    plan.warnings.extend(warnings)
    if plan.is_chosen:
        config = _configuration(options, base, plan)
        batch_layout(config, options.gpus)  # raises where the batch does not divide
        lr, micro = float(config.optim.lr), float(config.batch.micro_size)
        rule = "rate of the configuration x its width / this width"
        fits = "that fits 90 % of memory"
        plan.figures.append(PlannedFigure(name="learning rate", value=lr, origin="assumed", note=rule))
        plan.figures.append(PlannedFigure(name="micro batch", value=micro, origin="fitted", note=fits))
        files.write_text(out, dump_config(config))
    if page is not None:
        prices = {name: found.value for name, found in sourced_values(PRICES).items()}
        data = planner_page.planner_data(base, fit, costs, prices)
        origin = (
            f"model and batch of {options.config}; sizes by {options.frontier or 'a ratio of your choice'}"
        )
        text = planner_page.planner_html(
            data, origin, plan.warnings, unit, amount, options.gpu, options.gpus, costs.price
        )
        files.write_text(page, text)
    return plan, out if plan.is_chosen else None


def _budget(options: BudgetOptions) -> tuple[Unit, float]:
    if len(options.budgets) != 1:
        given = ", ".join(f"--{name}" for name in options.budgets) or "none"
        message = f"give exactly one of {', '.join(NAMES.values())} (got {given})"
        raise ConfigError([Issue("--hours", "missing", message, None, "--dollars")])
    [(unit, amount)] = options.budgets.items()
    return unit, amount  # type: ignore[return-value]


def _issues(options: BudgetOptions, frontier: FrontierFile | None) -> list[Issue]:
    issues = []
    if options.gpu is None and (frontier is None or len(frontier.rates()) < 3):
        message = "not given, and no frontier has measured the speed of three sizes"
        issues.append(Issue("--gpu", "missing", message, hint=f"use one of {', '.join(hardware()['gpus'])}"))
    issues += _unknown("--gpu", options.gpu, hardware()["gpus"])
    issues += _unknown("--link", options.link, hardware()["links"])
    issues += _unknown("--grid", options.grid, sourced_values(GRID))
    if options.gpu in hardware()["gpus"]:
        device = hardware()["gpus"][options.gpu]["device"]
        if peak_flops(device, options.precision) is None:
            message = f"{options.gpu} does not multiply {options.precision}"
            issues.append(
                Issue("--precision", "unsupported", message, options.precision, "--gpu", "use fp16")
            )
    both = {"--frontier": options.frontier, "--tokens-per-parameter": options.tokens_per_parameter}
    if None not in both.values():
        message = "the frontier says it"
        issues.append(Issue("--tokens-per-parameter", "conflict", message, None, "--frontier"))
    if frontier is not None and frontier.contradicts:
        message = "its law does not describe its runs; see `bert-dp plan fit`"
        issues.append(Issue("--frontier", "unsupported", message, str(options.frontier)))
    if options.gpu is None and frontier is not None and frontier.world_size not in (None, options.gpus):
        message = f"the runs of the frontier had {frontier.world_size}, and no other number was measured"
        issues.append(Issue("--gpus", "conflict", message, options.gpus, "--frontier"))
    return issues


def _unknown(setting: str, value: str | None, names: Collection[str]) -> list[Issue]:
    if value is None or value in names:
        return []
    close = difflib.get_close_matches(value, list(names), n=1, cutoff=0.3)
    hint = f"did you mean {close[0]}?" if close else f"use one of {', '.join(names)}"
    return [Issue(setting, "unknown", f"{value!r} is not known", value, hint=hint)]


def _rate_of(options: BudgetOptions, base: Config, frontier: FrontierFile | None) -> Callable[[Config], Rate]:
    """Return the speed of a configuration: as the frontier's runs measured it, or by the GPU's roofline."""
    if options.gpu is None:
        assert frontier is not None
        rates, length = frontier.rates(), base.data.sequence_length
        source = f"{len(rates)} sizes of the frontier's runs on {frontier.device}"
        return lambda config: budget.measured_rate(float(num_parameters(config.model, length)), rates, source)
    gpu = options.gpu
    link = options.link or (hardware()["gpus"][gpu]["link"] if options.gpus > 1 else None)
    return lambda config: budget.gpu_rate(config, gpu, options.gpus, link, options.precision)


def _costs(options: BudgetOptions, today: date) -> tuple[Costs, list[str]]:
    """Return the costs with the origin of each factor, and warnings about old ones."""
    warnings: list[str] = []
    notes: dict[str, tuple[Origin, str]] = {}

    def factor(name: str, given: float | None, listed: SourcedValue | None, key: object) -> float | None:
        if given is not None:
            notes[name] = "stated", f"{given:g} as given"
            return given
        if listed is None:
            return None
        notes[name] = "published", f"{listed.value:g} {listed.unit}, {listed.date}: {listed.source}"
        if (days := (today - listed.date).days) > OLD_DAYS:
            warnings.append(f"{key}: {listed.value:g} {listed.unit} is {days} days old ({listed.source})")
        return listed.value

    price = factor("dollars", options.price, sourced_values(PRICES).get(options.gpu or ""), options.gpu)
    grid = sourced_values(GRID).get(options.grid or "")
    grams = factor("co2_kg", options.g_per_kwh, grid, options.grid)
    watts = factor("kwh", options.watts, None, None)
    if watts is None and options.gpu is not None:
        watts = float(hardware()["gpus"][options.gpu]["watts"])
        notes["kwh"] = "published", f"{watts:g} W, the board's greatest; give --watts"
    return Costs(options.gpus, price, watts, options.pue, grams, notes), warnings


def _configuration(options: BudgetOptions, base: Config, plan: BudgetPlan) -> Config:
    """Return the configuration of the chosen size, with the budget and a micro batch that fits."""
    model = base.model.model_copy(update=plan.models[0].shape)
    micro = base.batch.micro_size
    if options.gpu is not None:
        sized = budget.with_model(base, model)
        micro = budget.micro_batch_that_fits(sized, options.precision, options.gpu, options.gpus) or micro
    none = dict.fromkeys(("steps", "tokens", "hours", "epochs"))
    schedule = base.schedule.model_copy(update={**none, "hours": plan.hours})
    ratio = base.model.hidden_size / model.hidden_size
    optim = base.optim.model_copy(update={"lr": float(f"{peak_lr(base).value * ratio:.3g}")})
    return base.model_copy(
        update={
            "model": model,
            "schedule": schedule,
            "optim": optim,
            "batch": base.batch.model_copy(update={"micro_size": micro}),
        }
    )
