"""Choose a model for a budget in hours, dollars or kWh; predict its token count and loss (`bert-dp plan`)."""

# ruff: noqa: RUF012 (pydantic copies mutable defaults)

import contextlib
import dataclasses
import datetime
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from pydantic import Field

from bert_dp import files
from bert_dp.config import Config, ConfigError, Issue, batch_layout, dump_config, peak_lr, read_yaml
from bert_dp.config.schema import BUDGETS, ModelConfig, PlannedFigure, PredictedName
from bert_dp.cost import num_parameters
from bert_dp.files.models import StoredFile, StoredModel
from launcher import results
from launcher.plan import gpu_speed, planner_page
from launcher.plan.frontier import Frontier, LossLaw
from launcher.plan.gpu_speed import Rate
from launcher.plan.scaling import load_named, unknown_issues
from launcher.plan.step_model import hardware, interpolate
from launcher.report import html
from launcher.report.formats import format_count, format_si
from launcher.report.page import Quantity, Report, ReportSection, Table, Verdict, table, words

Unit = Literal["hours", "dollars", "kwh"]
Origin = Literal["published", "stated"]  # origin of a cost; stated: given as an option

PRICES, GRID = (Path(__file__).with_name(name) for name in ("prices.yaml", "grid.yaml"))
OLD_DAYS = 180  # age in days above which a price or CO2 value causes a warning
WIDE, DEEP = 64, 48  # width / layers of wide models (as in BERT-base) and deep ones (as in the crammed BERT)
WIDTHS = (*range(64, 512, 32), *range(512, 1024, 64), *range(1024, 4097, 128))
MAX_EPOCHS = 4  # up to this many epochs, repeated text is nearly as good as new text (arXiv 2305.16264)
MLM_MIN_FLOPS = 2.2e15  # below this compute, masked LMs deviate from their power law (arXiv 2305.17266)
MAX_EXTRAPOLATION = 100.0  # multiple of the largest fitted budget above which a plan is unreliable
SHAPE = {"hidden_size", "num_layers", "num_heads", "intermediate_size"}

# published scaling laws: the best number of parameters for a budget in FLOPs, and the source of the law
PUBLISHED: Mapping[str, tuple[Callable[[float], float], str]] = {
    "20 tokens per parameter": (lambda c: math.sqrt(c / 120), "autoregressive LMs, arXiv 2203.15556"),
    "200 tokens": (
        lambda c: math.sqrt(c / 1200),
        "Dervishi et al., EMNLP 2025: 10 x the autoregressive ratio",
    ),
    "2000 tokens": (lambda c: math.sqrt(c / 12000), "Dervishi et al.: 100 x the autoregressive ratio"),
    "N ~ C^0.75": (
        lambda c: 1.16e9 * (c / 1e21) ** 0.749,
        "protein masked LMs, Cheng et al., NeurIPS 2024; arXiv 2406.07249 reports C^0.27",
    ),
}
DISAGREE = (
    "published scaling laws give sizes that differ by about a factor of ten, so no size is chosen: fit "
    "your own runs (`bert-dp plan fit`), or pass --tokens-per-parameter"
)
MANY_EPOCHS = (
    "{:.1f} epochs: after {}, repeated text is worth less and less (arXiv 2305.16264), and masked LMs "
    "overfit to it"
)


class PlannedModel(StoredModel):
    """A candidate model with its number of training tokens and its predicted loss."""

    name: str
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    parameters: int
    tokens_per_s: float
    tokens: PlannedFigure
    loss: PlannedFigure | None = None
    note: str = ""


class BudgetPlan(StoredFile):
    """Output of `bert-dp plan --json`."""

    hint: ClassVar[str] = "run `bert-dp plan` again"
    schema_version: Literal[1] = 1
    unit: Unit
    amount: float
    hours: float
    figures: dict[str, PlannedFigure]
    models: list[PlannedModel]
    is_chosen: bool  # true: the first model is the answer; false: the published scaling laws disagree
    warnings: list[str] = []


class SourcedValue(StoredFile):
    """An entry of prices.yaml or grid.yaml."""

    hint: ClassVar[str] = "give value, unit, date and source"
    value: float = Field(ge=0)
    unit: str
    date: datetime.date = Field(strict=False)
    source: str = Field(min_length=1)


@dataclasses.dataclass(frozen=True)
class Costs:
    """Number of devices, price and power of one device, PUE, and CO2 per kWh. Unknown values are None."""

    gpus: int
    price: float | None = None  # dollars per hour
    watts: float | None = None
    pue: float = 1.0  # data-center power / power of the machines
    grams_per_kwh: float | None = None
    notes: Mapping[str, tuple[Origin, str]] = dataclasses.field(default_factory=dict)
    """Origin of each known cost and a note about it. Keys: `dollars`, `kwh` or `co2_kg`."""

    @property
    def per_hour(self) -> dict[str, float | None]:
        """Return the hourly costs of all devices: hours (always 1), dollars, kWh, kg CO2; None = unknown."""
        kw = None if self.watts is None else self.watts * self.gpus * self.pue / 1e3
        grams = self.grams_per_kwh
        return {
            "hours": 1.0,
            "dollars": None if self.price is None else self.price * self.gpus,
            "kwh": kw,
            "co2_kg": None if kw is None or grams is None else kw * grams / 1e3,
        }

    def hours(self, unit: str, amount: float) -> float:
        """Convert a budget into hours. Raises ConfigError if the price or the power is missing."""
        per_hour = self.per_hour[unit]
        if per_hour is None:
            option = "--price" if unit == "dollars" else "--watts"
            message = f"required for a budget in {unit}; no value is known for this device"
            raise ConfigError([Issue(option, "missing", message, None, f"--{unit}")])
        return amount / per_hour

    def figures(self, hours: float) -> dict[str, PlannedFigure]:
        """Return the costs of `hours` of training: hours, dollars, kWh, kg of CO2. Unknown costs are None."""
        found = {}
        for name, rate in self.per_hour.items():
            origin, note = self.notes.get(name, ("stated", ""))
            value = None if rate is None else rate * hours
            found[name] = PlannedFigure(value=value, origin=origin, note=note)
        return found


@dataclasses.dataclass(frozen=True)
class BudgetOptions:
    """Options of `bert-dp plan`."""

    hours: float | None = None
    dollars: float | None = None
    kwh: float | None = None
    gpu: str | None = None
    gpus: int = 1
    config: str = "crammed-bert"
    frontier: Path | None = None
    from_: Path | None = None
    tokens_per_parameter: float | None = None
    keep_model: bool = False
    tokens_available: float | None = None
    precision: str = "bf16"
    price: float | None = None
    watts: float | None = None
    pue: float = 1.0
    grid: str | None = None
    g_per_kwh: float | None = None

    def budget(self) -> tuple[Unit, float]:
        """Return the unit and amount of the budget. Raises ConfigError if none or several are given."""
        amounts: dict[Unit, float | None] = {"hours": self.hours, "dollars": self.dollars, "kwh": self.kwh}
        given = [(unit, amount) for unit, amount in amounts.items() if amount is not None]
        if len(given) != 1:
            message = "give exactly one of --hours, --dollars, --kwh"
            raise ConfigError([Issue("--hours", "missing", message, None, "--dollars")])
        return given[0]

    def issues(self, frontier: Frontier | None) -> list[Issue]:
        """Return one issue per unknown, missing or conflicting option."""
        gpus, missing = hardware()["gpus"], self.gpu is None and self.from_ is None
        issues = [
            *unknown_issues("--gpu", self.gpu, gpus),
            *unknown_issues("--grid", self.grid, sourced_values(GRID)),
        ]
        if missing and (frontier is None or len(frontier.rates()) < 3):
            message = "required unless --from gives the speed, or --frontier the speed of three or more sizes"
            issues.append(Issue("--gpu", "missing", message, hint=f"use one of {', '.join(gpus)}"))
        if self.gpu and self.gpu in gpus and gpu_speed.peak_of(self.gpu, self.precision) is None:
            message = f"{self.gpu} does not support {self.precision}"
            issues.append(Issue("--precision", "unsupported", message, self.precision, "--gpu", "use fp16"))
        if self.from_ is not None and not self.keep_model:
            message, hint = "gives the speed of only one model size", "add --keep-model"
            issues.append(Issue("--from", "conflict", message, str(self.from_), "--keep-model", hint))
        if self.from_ is not None and self.gpu is not None:
            message, hint = "--from already gives a measured speed", "pass --price and --watts instead"
            issues.append(Issue("--gpu", "conflict", message, self.gpu, "--from", hint))
        if frontier is None:
            return issues
        if self.tokens_per_parameter is not None:
            message = "the ratio already follows from the frontier"
            issues.append(Issue("--tokens-per-parameter", "conflict", message, None, "--frontier"))
        if frontier.contradicts:
            message = "its scaling law does not match the runs it was fitted to; see `bert-dp plan fit`"
            issues.append(Issue("--frontier", "unsupported", message, str(self.frontier)))
        if missing and frontier.world_size not in (None, self.gpus):
            message = f"the frontier's runs used --nproc {frontier.world_size}; no other number was measured"
            issues.append(Issue("--nproc", "conflict", message, self.gpus, "--frontier"))
        return issues

    def rate_of(self, base: Config, frontier: Frontier | None) -> Callable[[Config], Rate]:
        """Return a function that maps a configuration to its speed. The speed is read from --from, estimated
        for --gpu or interpolated between the frontier's runs. Raises ConfigError if --from was measured with
        another model, sequence length, precision or number of devices."""
        gpu = self.gpu
        if self.from_ is not None:
            measured = gpu_speed.recorded_rate(self.from_, base, self.precision, self.gpus)
            return lambda config: measured
        if gpu is not None:
            return lambda config: gpu_speed.gpu_rate(config, gpu, self.gpus, self.precision)
        assert frontier is not None
        rates = frontier.rates()
        source = f"the frontier's runs of {len(rates)} sizes on {frontier.device}"
        return lambda config: gpu_speed.measured_rate(size_of(config), rates, source)

    def costs(self, today: datetime.date) -> tuple[Costs, list[str]]:
        """Return the costs with their origins, and a warning for each outdated price or CO2 value."""
        warnings: list[str] = []
        values = {"dollars": self.price, "kwh": self.watts, "co2_kg": self.g_per_kwh}
        notes: dict[str, tuple[Origin, str]] = {
            name: ("stated", f"{value:g} from the command line")
            for name, value in values.items()
            if value is not None
        }
        for name, key, path in (("dollars", self.gpu, PRICES), ("co2_kg", self.grid, GRID)):
            listed = sourced_values(path).get(key or "")
            if listed is None or values[name] is not None:
                continue
            values[name] = listed.value
            notes[name] = "published", f"{listed.value:g} {listed.unit}, {listed.date}: {listed.source}"
            if (days := (today - listed.date).days) > OLD_DAYS:
                warnings.append(f"{key}: {listed.value:g} {listed.unit} is {days} days old ({listed.source})")
        if values["kwh"] is None and self.gpu is not None:
            watts = values["kwh"] = float(hardware()["gpus"][self.gpu]["watts"])
            notes["kwh"] = "published", f"{watts:g} W, the maximum board power; override with --watts"
        return Costs(self.gpus, values["dollars"], values["kwh"], self.pue, values["co2_kg"], notes), warnings


def plan_budget(
    options: BudgetOptions, out: Path, page: Path | None = None, today: datetime.date | None = None
) -> tuple[BudgetPlan, Path | None]:
    """Plan training for a budget; return the plan, and the path of the configuration if one was written.

    Writes the configuration to `out` if a size was chosen, and an HTML planner to `page`. Raises ConfigError.
    """
    unit, amount = options.budget()
    base = load_named("--config", options.config)
    frontier = results.read(options.frontier, Frontier) if options.frontier else None
    issues = [*options.issues(frontier), *folder_issues("--out", out)]
    if page is not None:
        issues += html.page_issues("--page", page) or folder_issues("--page", page)
    if issues:
        raise ConfigError(issues)
    costs, warnings = options.costs(today or datetime.date.today())
    plan = make_plan(options, base, costs, options.rate_of(base, frontier), frontier)
    plan.warnings.extend(warnings)
    if plan.is_chosen:
        config = _configuration(options, base, plan, costs)
        batch_layout(config, options.gpus)  # raises ConfigError if the batch cannot be split among the ranks
        files.write_text(out, dump_config(config))
    if page is not None:
        prices = {name: found.value for name, found in sourced_values(PRICES).items()}
        data = planner_page.planner_data(family(base), frontier, prices, costs.pue, costs.grams_per_kwh)
        sizes = options.frontier or "your tokens-per-parameter ratio"
        origin = f"model and batch of {options.config}; best sizes from {sizes}"
        state = unit, amount, options.gpu, options.gpus, costs.price
        files.write_text(page, planner_page.planner_html(data, origin, plan.warnings, *state))
    return plan, out if plan.is_chosen else None


def folder_issues(option: str, path: Path) -> list[Issue]:
    """Check that the folder of an output file exists."""
    if path.absolute().parent.is_dir():
        return []
    message = f"the folder {path.parent} does not exist"
    return [Issue(option, "not_found", message, str(path), hint="create it, or choose another path")]


def sourced_values(path: Path) -> dict[str, SourcedValue]:
    """Read prices.yaml or grid.yaml. Raises ConfigError for a value without a date or source."""
    rows = dict(read_yaml(path)).items()
    return {str(name): results.parse(row, SourcedValue, f"{path}: {name}") for name, row in rows}


def _configuration(options: BudgetOptions, base: Config, plan: BudgetPlan, costs: Costs) -> Config:
    """Return the configuration for the chosen size; add its learning rate and micro batch to the plan."""
    shape = plan.models[0].model_dump(include=SHAPE)
    config = base.model_copy(update={"model": base.model.model_copy(update=shape)})
    rate = peak_lr(base).value * base.model.hidden_size / config.model.hidden_size
    lr, micro = float(f"{rate:.3g}"), base.batch.micro_size
    size = PlannedFigure(value=micro, origin="stated", note="as configured")
    if (gpu := options.gpu) is not None:
        micro = gpu_speed.micro_batch_that_fits(config, options.precision, gpu, options.gpus) or micro
        size = PlannedFigure(value=micro, origin="fitted", note="largest that fits in 90 % of the memory")
    rule = "configured learning rate x configured width / chosen width"
    plan.figures["learning rate"] = PlannedFigure(value=lr, origin="assumed", note=rule)
    plan.figures["micro batch"] = size
    loss = plan.models[0].loss or PlannedFigure(value=None, origin="fitted", note="no frontier")
    figures = {**plan.figures, "loss": loss}
    changes: dict[str, dict[str, Any]] = {
        "schedule": {**dict.fromkeys(BUDGETS), plan.unit: plan.amount},
        "run": {
            "price_per_device_hour": costs.price or None,
            "watts_per_device": costs.watts,
            "pue": costs.pue,
            "grams_co2_per_kwh": costs.grams_per_kwh,
        },
        "optim": {"lr": lr},
        "batch": {"micro_size": micro},
    }
    sections = {name: getattr(config, name).model_copy(update=of) for name, of in changes.items()}
    prediction = {name: figures[name] for name in get_args(PredictedName)}
    return config.model_copy(update={**sections, "prediction": prediction})


# --- the plan


def make_plan(
    options: BudgetOptions,
    base: Config,
    costs: Costs,
    rate_of: Callable[[Config], Rate],
    fit: Frontier | None = None,
) -> BudgetPlan:
    """Plan training for a budget.

    Without a frontier, tokens_per_parameter or keep_model, published scaling laws determine the sizes.
    `rate_of` returns a configuration's tokens/s, or raises ConfigError if the model does not fit the device.

    Raises ConfigError if the budget is too small for every size, or larger than the largest size can use.
    """
    unit, amount = options.budget()
    keep_model, ratio = options.keep_model, options.tokens_per_parameter
    hours, fitted = costs.hours(unit, amount), None if keep_model else fit
    configs = [base] if keep_model else family(base)
    rates = gpu_speed.rates_that_fit(configs, rate_of) or [rate_of(configs[0])]
    configs = configs[: len(rates)]
    sizes = [size_of(config) for config in configs]
    is_chosen = keep_model or fit is not None or ratio is not None
    warnings = [] if is_chosen else [DISAGREE]
    if keep_model:
        wanted = {"as configured": float(sizes[0])}
    elif not is_chosen:
        wanted = _published_sizes(sizes, rates, hours)
    else:
        hours_of = []  # hours to train each size on its best number of tokens
        for n, each in zip(sizes, rates, strict=True):
            enough = (ratio or 0.0) * n if fit is None else fit.law.best_budget(n) / (6 * n)
            hours_of.append(enough / each.tokens_per_s / 3600)
        best = _solve(sizes, hours_of, hours, unit, costs)
        wanted = {"deep": best, "wide": best, "half the size": best / 2, "twice the size": 2 * best}
    target = next(iter(wanted.values()))
    rate = rates[nearest(sizes, target)]
    tokens = rate.tokens_per_s * hours * 3600
    flops = 6 * target * tokens
    compute = _rated(flops, rate, "6 x parameters x tokens")
    figures = {"compute": compute if is_chosen else compute.model_copy(update={"ci95": None})}
    figures |= costs.figures(hours)
    if fitted is not None:
        spread = fitted.law.exponent * math.log(rate.factor)
        figures["best parameters"] = _fitted(
            fitted, lambda law: math.log(law.best_parameters(flops)), spread, math.exp
        )
        figures["best loss"] = _fitted_loss(fitted, lambda law: law.best_loss(flops), flops, rate)
        warnings += _fit_warnings(fitted, flops)
    planned: dict[ModelConfig, PlannedModel] = {}
    for name, size in wanted.items():
        shapes = family(base, WIDE) if name == "wide" else configs
        config = shapes[nearest([size_of(each) for each in shapes], size)]
        with contextlib.suppress(ConfigError):  # a wide model may not fit the device
            # setdefault: for a small budget, deep and wide can be the same two-layer model
            planned.setdefault(config.model, _planned_model(name, config, rate_of(config), hours, fit))
    if flops < MLM_MIN_FLOPS:
        warnings.append(small(flops))
    if (available := options.tokens_available) and is_chosen:
        epochs = tokens / available
        figures["epochs"] = _rated(epochs, rate, f"over {format_si(available, 'tokens')}")
        if epochs > MAX_EPOCHS:
            warnings.append(MANY_EPOCHS.format(epochs, MAX_EPOCHS))
    models = list(planned.values())
    if is_chosen:
        batch = base.batch.global_size
        count = tokens / (batch * base.data.sequence_length)
        steps = _rated(count, rate, f"batches of {batch} sequences, as configured")
        figures |= {"tokens": models[0].tokens, "steps": steps}
    return BudgetPlan(
        unit=unit,
        amount=amount,
        hours=hours,
        figures=figures,
        models=models,
        is_chosen=is_chosen,
        warnings=warnings,
    )


def family(base: Config, aspect: float = DEEP) -> list[Config]:
    """Return copies of `base` with models of ascending width, each with width / layers close to `aspect`."""
    ratio = base.model.intermediate_size / base.model.hidden_size
    family = []
    for width in WIDTHS:
        shape = {
            "hidden_size": width,
            "num_layers": max(2, round(width / aspect)),
            "num_heads": width // (32 if width < 512 else 64),
            "intermediate_size": max(64, round(width * ratio / 64) * 64),
        }
        family.append(base.model_copy(update={"model": base.model.model_copy(update=shape)}))
    return family


def size_of(config: Config) -> int:
    """Return the number of parameters of a configuration's model."""
    return num_parameters(config.model, config.data.sequence_length)


def nearest(sizes: Sequence[float], target: float) -> int:
    """Return the index of the size closest to `target` on a log scale."""
    return min(range(len(sizes)), key=lambda i: abs(math.log(sizes[i] / target)))


def solve_above_tip(sizes: Sequence[float], hours_of: Sequence[float], hours: float) -> float:
    """Return the size whose optimal training takes `hours`.

    `sizes` are ascending. `hours_of` gives the hours that the optimal training of each size takes; values in
    between are interpolated in log-log space. The curve of hours over size is U-shaped, because very small
    models use the device inefficiently; the result is on its rising branch. If there is no such size, raises
    ValueError with the feasible hours that are closest to `hours`.
    """
    least, most = min(hours_of), hours_of[-1]
    if not least <= hours <= most:
        raise ValueError(least if hours < least else most)
    below = max(i for i, each in enumerate(hours_of) if each <= hours)
    if below == len(sizes) - 1:
        return sizes[-1]
    return interpolate(hours, dict(zip(hours_of[below : below + 2], sizes[below : below + 2], strict=True)))


def _solve(sizes: Sequence[int], hours_of: Sequence[float], hours: float, unit: Unit, costs: Costs) -> float:
    """Return the best size, or raise ConfigError with the smallest or largest feasible budget as the hint."""
    try:
        return solve_above_tip(sizes, hours_of, hours)
    except ValueError as error:
        bound = float(error.args[0])
        word = "least" if bound > hours else "most"
        message = f"no model of {sizes[0]:,} to {sizes[-1]:,} parameters is optimal for this budget"
        hint = f"pass at {word} {bound * (costs.per_hour[unit] or math.nan):.3g} {unit}"
        raise ConfigError([Issue(f"--{unit}", "out_of_range", message, hours, hint=hint)]) from None


def small(flops: float) -> str:
    """Return the warning for compute below MLM_MIN_FLOPS."""
    least = format_si(MLM_MIN_FLOPS, "FLOP")
    return f"{format_si(flops, 'FLOP')}: masked LMs follow no power law below {least} (arXiv 2305.17266)"


def _published_sizes(sizes: Sequence[int], rates: Sequence[Rate], hours: float) -> dict[str, float]:
    """Return the size that each published scaling law recommends for `hours` of training.

    A law maps compute to the best size, but the compute spent in `hours` depends on the size. The result is
    the size that is closest to the best size for its own compute.
    """
    spent = [6 * size * rate.tokens_per_s * hours * 3600 for size, rate in zip(sizes, rates, strict=True)]
    found = {}
    for name, (best, _) in PUBLISHED.items():
        distances = [abs(math.log(best(c) / size)) for c, size in zip(spent, sizes, strict=True)]
        found[name] = float(sizes[distances.index(min(distances))])
    return found


def _planned_model(name: str, config: Config, rate: Rate, hours: float, fit: Frontier | None) -> PlannedModel:
    parameters, tokens = size_of(config), rate.tokens_per_s * hours * 3600
    loss = None
    if fit is not None:
        loss = _fitted_loss(fit, lambda law: law.loss(parameters, tokens), 6 * parameters * tokens, rate)
    return PlannedModel(
        name=name,
        **config.model.model_dump(include=SHAPE),
        parameters=parameters,
        tokens_per_s=rate.tokens_per_s,
        tokens=_rated(tokens, rate, rate.note),
        loss=loss,
        note=PUBLISHED.get(name, (None, ""))[1],
    )


def _rated(value: float, rate: Rate, note: str) -> PlannedFigure:
    """Return `value`, which is proportional to the speed, as a figure with the speed's relative interval."""
    ends = [value / rate.factor, value * rate.factor]
    return PlannedFigure(value=value, ci95=ends, origin=rate.origin, note=note)


def _fitted(
    fit: Frontier, value: Callable[[LossLaw], float], more: float, shown: Callable[[float], float] = float
) -> PlannedFigure:
    """Return shown(value(law)) as a figure. `more` widens the interval of value(law) in quadrature."""
    middle, (low, high) = fit.estimate(value)
    half = math.hypot((high - low) / 2, more)
    ends, note = [shown(middle - half), shown(middle + half)], f"{len(fit.runs)} completed runs"
    return PlannedFigure(value=shown(middle), ci95=ends, origin="fitted", note=note)


def _fitted_loss(fit: Frontier, value: Callable[[LossLaw], float], flops: float, rate: Rate) -> PlannedFigure:
    """Return a predicted loss. Its interval accounts for the uncertainty in the predicted speed."""
    return _fitted(fit, value, abs(fit.law.best_loss(flops / rate.factor) - fit.law.best_loss(flops)))


def _fit_warnings(fit: Frontier, flops: float) -> list[str]:
    warnings = []
    beyond = flops / fit.budgets[-1]
    if beyond > MAX_EXTRAPOLATION:
        warnings.append(
            f"the compute is {beyond:.0f} x the largest fitted budget; "
            f"above {MAX_EXTRAPOLATION:g} x, the plan is unreliable"
        )
    if fit.others:
        sizes = ", ".join(format_si(law.best_parameters(flops)) for law in fit.others)
        warnings.append(f"best size by other laws that fit the runs nearly as well: {sizes} parameters")
    return warnings


# --- the report


def budget_page(plan: BudgetPlan, written: Path | None) -> Report:
    """Return a report with the figures and the models or, if none is chosen, sizes from published laws."""
    rows = [
        words(name, figure_text(name, f), f"{f.origin}{': ' if f.note else ''}{f.note}")
        for name, f in plan.figures.items()
        if f.value is not None
    ]
    columns: list[Quantity] = [
        Quantity(lambda model: f"{model.num_layers} x {model.hidden_size}", "layers x width", "word"),
        Quantity("parameters", "parameters"),
        Quantity(lambda model: figure_text("tokens", model.tokens), "tokens", "word"),
        Quantity(lambda model: model.loss and figure_text("loss", model.loss), "loss", "word"),
        Quantity("note", "" if plan.is_chosen else "source", "word"),
    ]
    models = [(model.name, model) for model in plan.models]
    hint = "Pass --frontier FILE, --tokens-per-parameter N or --keep-model to choose a size."
    not_written = (
        [] if written else [Verdict("info", "No size was chosen, so no configuration was written.", [hint])]
    )
    title = "Models for the budget" if plan.is_chosen else "Sizes from published scaling laws (none chosen)"
    return Report(
        "bert-dp: budget plan",
        verdicts=[*(Verdict("warn", text) for text in plan.warnings), *not_written],
        sections=[
            ReportSection(
                "", tables=[Table(rows, title="Plan"), table(models, columns, title=title, corner="model")]
            )
        ],
        next=f"bert-dp train {written} --dry-run" if written else "",
    )


def figure_text(name: str, figure: PlannedFigure) -> str:
    """Format the value of a figure with its interval, if any."""

    def one(value: float) -> str:
        if name == "compute":
            return format_si(value, "FLOP")
        if name in ("tokens", "best parameters"):
            return format_si(value)
        return format_count(round(value)) if value >= 1e4 else f"{value:.4g}"

    text = one(figure.value or 0.0)
    return f"{text} ({' to '.join(map(one, figure.ci95))})" if figure.ci95 else text
