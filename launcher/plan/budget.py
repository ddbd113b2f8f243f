"""Plan what hours, dollars or energy buy: a model size, its tokens and its loss, each with its interval."""

# ruff: noqa: RUF012 (pydantic copies a default)

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Literal, NamedTuple

from bert_dp.config import Config, ConfigError, Issue, ModelConfig
from bert_dp.config.schema import divisors
from bert_dp.cost import memory_estimate_gib, num_parameters
from bert_dp.files.models import StoredFile, StoredModel
from launcher.plan import gpu_speed
from launcher.plan.frontier import Fit, LossLaw
from launcher.plan.scaling import BACKWARD
from launcher.plan.step_model import Fabric, Scenario, constant, find_link, hardware, layer_gradients, predict
from launcher.results import Interval
from launcher.scale.models import StepProfile

Origin = Literal["measured", "fitted", "published", "assumed", "stated"]
Unit = Literal["hours", "dollars", "kwh"]

WIDE, DEEP = 64, 48  # width / layers of the two shapes; BERT-base and the crammed BERT have 64 and 48
WIDTHS = (*range(64, 512, 32), *range(512, 1024, 64), *range(1024, 4097, 128))
MEMORY_SHARE = 0.9  # of a device's memory that a micro batch may fill
MAX_EPOCHS = 4  # repeats of the data that are worth nearly as much as new text (arXiv 2305.16264)
MLM_MIN_FLOPS = 2.2e15  # below it the loss of masked LMs leaves its power law (arXiv 2305.17266)
MAX_EXTRAPOLATION = 100.0  # of the largest budget that was fitted
SHAPE = ("hidden_size", "num_layers", "num_heads", "intermediate_size")


def _by_ratio(ratio: float) -> Callable[[float], float]:
    return lambda flops: math.sqrt(flops / 6 / ratio)


# published answers: the best parameters of a budget in FLOPs, and their source
PUBLISHED: Mapping[str, tuple[Callable[[float], float], str]] = {
    "20 tokens a parameter": (_by_ratio(20), "autoregressive LMs, arXiv 2203.15556"),
    "200 tokens": (_by_ratio(200), "Dervishi et al., EMNLP 2025: 10 x the autoregressive ratio"),
    "2000 tokens": (_by_ratio(2000), "Dervishi et al., EMNLP 2025: 100 x the autoregressive ratio"),
    "N ~ C^0.75": (
        lambda flops: 1.16e9 * (flops / 1e21) ** 0.749,
        "protein masked LMs, Cheng et al., NeurIPS 2024; arXiv 2406.07249 has C^0.27",
    ),
}
DISAGREE = (
    "published answers for masked LMs differ by more than ten times, and none is chosen: fit your own runs "
    "(plan fit), or give --tokens-per-parameter"
)
SMALL = (
    "{flops:.2g} FLOP: below {least:g} the loss of masked LMs leaves its power law (arXiv 2305.17266), and a "
    "small model's optimum says little about a large one's"
)
MANY_EPOCHS = (
    "{epochs:.1f} epochs: beyond {most} repeated text is worth less and less (arXiv 2305.16264), and masked "
    "LMs overfit it"
)


class PlannedFigure(StoredModel):
    """A figure of a plan with its 95 % interval and where it comes from."""

    name: str
    value: float | None
    ci95: Interval | None = None
    origin: Origin
    note: str = ""


class PlannedModel(StoredModel):
    """A model for the budget: a shape near the best size, half or twice of it, or a published answer."""

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

    @property
    def shape(self) -> dict[str, int]:
        """Settings of `model` that differ between sizes."""
        return {name: getattr(self, name) for name in SHAPE}


class BudgetPlan(StoredFile):
    """Output of `bert-dp plan --json`."""

    hint: ClassVar[str] = "run `bert-dp plan` again"
    schema_version: Literal[1] = 1
    unit: Unit
    amount: float
    hours: float
    figures: list[PlannedFigure]
    models: list[PlannedModel]
    is_chosen: bool
    """The first of the models is the answer; false: they are published answers that disagree."""
    warnings: list[str] = []

    def figure(self, name: str) -> PlannedFigure:
        """Return a figure by its name."""
        return next(figure for figure in self.figures if figure.name == name)


class Rate(NamedTuple):
    """Tokens/s of all devices together, and the factor of its 95 % interval."""

    tokens_per_s: float
    factor: float
    origin: Origin
    note: str


@dataclasses.dataclass(frozen=True)
class Costs:
    """Costs of an hour of one device; None = not known."""

    gpus: int
    price: float | None = None  # dollars
    watts: float | None = None
    pue: float = 1.0
    grams_per_kwh: float | None = None
    notes: Mapping[str, tuple[Origin, str]] = dataclasses.field(default_factory=dict)
    """Origin and source of `dollars`, `kwh` and `co2_kg`."""

    def hours(self, unit: Unit, amount: float) -> float:
        """Convert a budget into hours. Raises ConfigError where the price or the power is missing."""
        if unit == "hours":
            return amount
        per_hour = self.per_hour(unit)
        if per_hour is None:
            option = "--price" if unit == "dollars" else "--watts"
            message = f"a budget in {unit} needs it, and none is known for this device"
            raise ConfigError([Issue(option, "missing", message, None, f"--{unit}")])
        return amount / per_hour

    def per_hour(self, unit: Unit) -> float | None:
        """Return the dollars or kWh of an hour of all devices."""
        if unit == "dollars":
            return None if self.price is None else self.price * self.gpus
        return None if self.watts is None else self.watts * self.gpus * self.pue / 1e3


def family(base: ModelConfig, aspect: float = DEEP) -> list[ModelConfig]:
    """Return models of the base's kind by ascending width, with width / layers near `aspect`."""
    wide = base.intermediate_size / base.hidden_size
    return [
        base.model_copy(
            update={
                "hidden_size": width,
                "num_layers": max(2, round(width / aspect)),
                "num_heads": width // (32 if width < 512 else 64),
                "intermediate_size": max(64, round(width * wide / 64) * 64),
            }
        )
        for width in WIDTHS
    ]


def solve_above_tip(hours_of: Callable[[float], float], low: float, high: float, hours: float) -> float:
    """Return the size in [low, high] whose best training takes `hours`.

    hours_of is U-shaped: below a tipping size a smaller model uses the device less well and takes longer. The
    solution is on the branch above it. Raises ValueError with the least hours where `hours` is below them,
    or with the most where it is above what `high` takes.
    """
    left, right = math.log(low), math.log(high)
    golden = (math.sqrt(5) - 1) / 2
    while right - left > 1e-9:  # golden-section search for the tipping size
        a, b = right - golden * (right - left), left + golden * (right - left)
        if hours_of(math.exp(a)) <= hours_of(math.exp(b)):
            right = b
        else:
            left = a
    tip = math.exp(left)
    least, most = hours_of(tip), hours_of(high)
    if not least <= hours <= most:
        raise ValueError(least if hours < least else most)
    left, right = math.log(tip), math.log(high)
    for _ in range(100):
        middle = (left + right) / 2
        if hours_of(math.exp(middle)) < hours:
            left = middle
        else:
            right = middle
    return math.exp(left)


# --- speed


def gpu_memory_gib(gpu: str) -> float:
    """Return the memory of a GPU of hardware.yaml, which its name ends with."""
    found = re.search(r"-(\d+)G$", gpu)
    assert found is not None
    return float(found[1])


def micro_batch_that_fits(config: Config, precision: str, gpu: str, world_size: int) -> int | None:
    """Return the largest micro batch that divides the global batch and its ramp and whose estimate fits the
    GPU; None where one sequence does not."""
    batch = config.batch
    whole = math.gcd(batch.global_size, batch.ramp_quantum or batch.global_size)
    best = None
    for micro in divisors(max(1, whole // world_size)):
        tried = config.model_copy(update={"batch": batch.model_copy(update={"micro_size": micro})})
        if sum(memory_estimate_gib(tried, precision, world_size).values()) > MEMORY_SHARE * gpu_memory_gib(
            gpu
        ):
            break
        best = micro
    return best


def gpu_rate(config: Config, gpu: str, gpus: int, link: str | None, precision: str) -> Rate:
    """Predict the tokens/s of a configuration on GPUs that were not measured. Raises ConfigError where not
    even one sequence fits."""
    micro = micro_batch_that_fits(config, precision, gpu, gpus)
    if micro is None:
        message = f"not one sequence of this model fits {gpu}"
        raise ConfigError([Issue("--gpu", "out_of_range", message, gpu)])
    model, length = config.model, config.data.sequence_length
    work = gpu_speed.work_of(model, length, config.objective.mask_rate, micro, precision, config.optim.name)
    speed = gpu_speed.speed_of(gpu, precision)
    assert speed is not None
    time = gpu_speed.estimate(work, speed)
    accumulation = max(1, config.batch.global_size // (micro * gpus))
    backward_s = BACKWARD * time.micro_s
    profile = StepProfile(
        device=hardware()["gpus"][gpu]["device"],
        precision=precision,
        micro_batch=micro,
        sequence_length=length,
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_heads=model.num_heads,
        micro_s=time.micro_s,
        backward_s=backward_s,
        optimizer_s=time.optimizer_s,
        gradients=layer_gradients(model, num_parameters(model, length), 4.0, backward_s),
    )
    fabric = Fabric(gpus, find_link(link) if link else None)
    spread = constant("device_spread") if gpus > 1 else 0.0
    row = predict(profile, Scenario(fabric, gpus, accumulation=accumulation, spread=spread))
    note = f"roofline of {gpu} in {precision}, micro batch {micro}, fitted to published rows"
    return Rate(row.tokens_per_s, time.factor, "fitted", note)


def measured_rate(parameters: float, rates: Mapping[float, float], source: str) -> Rate:
    """Interpolate measured tokens/s by parameters, in logarithms, and extrapolate by the nearest two.

    The interval is twice the root mean square error of each inner size left out, at least 5 %,
    and its square for each factor of e beyond the sizes.
    """
    sizes = sorted(rates)

    def at(size: float, known: Sequence[float]) -> float:
        i = min(max(bisect.bisect_left(known, size), 1), len(known) - 1)
        low, high = known[i - 1], known[i]
        share = math.log(size / low) / math.log(high / low)
        return math.log(rates[low]) * (1 - share) + math.log(rates[high]) * share

    errors = [at(s, [k for k in sizes if k != s]) - math.log(rates[s]) for s in sizes[1:-1]]
    spread = math.sqrt(sum(e * e for e in errors) / len(errors)) if errors else 0.0
    beyond = max(0.0, math.log(sizes[0] / parameters), math.log(parameters / sizes[-1]))
    factor = math.exp(max(0.05, 2 * spread) * (1 + beyond))
    return Rate(math.exp(at(parameters, sizes)), factor, "measured", source)


# --- the plan


def make_plan(
    base: Config,
    unit: Unit,
    amount: float,
    costs: Costs,
    rate_of: Callable[[Config], Rate],
    fit: Fit | None = None,
    tokens_available: float | None = None,
    tokens_per_parameter: float | None = None,
    keep_model: bool = False,
) -> BudgetPlan:
    """Plan a budget. `rate_of`: tokens/s of a configuration, which raises ConfigError where it does not fit.

    Without a law, a ratio and keep_model it returns the published answers. Raises ConfigError for a budget
    below what any size needs, or above what the largest size can use.
    """
    hours = costs.hours(unit, amount)
    models = [base.model] if keep_model else family(base.model)
    rates = [rate_of(with_model(base, models[0]))]
    with contextlib.suppress(ConfigError):  # the largest ones do not fit the device
        for model in models[1:]:
            rates.append(rate_of(with_model(base, model)))
    models = models[: len(rates)]
    sizes = [num_parameters(model, base.data.sequence_length) for model in models]
    wanted, warnings, figures = {"as configured": float(sizes[0])}, [], []
    is_chosen = keep_model or fit is not None or tokens_per_parameter is not None
    if not is_chosen:
        wanted = _published_sizes(sizes, rates, hours)
        warnings = [DISAGREE]
    elif not keep_model:
        budget_of = _budget_of(fit.law if fit else None, tokens_per_parameter)
        best = _solve(sizes, rates, budget_of, hours, unit, costs)
        wanted = {"deep": best, "wide": best, "half the size": best / 2, "twice the size": 2 * best}
    target = next(iter(wanted.values()))
    rate = rates[_nearest(sizes, target)]
    flops = 6 * target * rate.tokens_per_s * hours * 3600
    if fit is not None and not keep_model:
        spread = fit.law.exponent * math.log(rate.factor)
        found = _fitted("best parameters", fit, lambda law: math.log(law.best_parameters(flops)), spread)
        sizes_ci95 = [math.exp(end) for end in found.ci95 or ()]
        figures.append(found.model_copy(update={"value": math.exp(found.value or 0.0), "ci95": sizes_ci95}))
        figures.append(_fitted_loss("best loss", fit, lambda law: law.best_loss(flops), flops, rate))
        warnings += _fit_warnings(fit, flops)
    shapes = {"wide": family(base.model, WIDE)}
    planned = []
    for name, size in wanted.items():
        choices = shapes.get(name, models)
        model = choices[_nearest([num_parameters(m, base.data.sequence_length) for m in choices], size)]
        try:
            planned.append(_planned_model(name, with_model(base, model), rate_of, hours, fit))
        except ConfigError:  # it does not fit the device
            if not planned:
                raise
    tokens = planned[0].tokens
    if flops < MLM_MIN_FLOPS:
        warnings.append(SMALL.format(flops=flops, least=MLM_MIN_FLOPS))
    if tokens_available and is_chosen:
        epochs = _times(tokens, 1 / tokens_available, "epochs", f"over {tokens_available:.3g} tokens")
        figures.append(epochs)
        if (epochs.value or 0.0) > MAX_EPOCHS:
            warnings.append(MANY_EPOCHS.format(epochs=epochs.value, most=MAX_EPOCHS))
    ends: list[float] | None = [flops / rate.factor, flops * rate.factor] if is_chosen else None
    note = "6 x parameters x tokens"
    compute = PlannedFigure(name="compute", value=flops, ci95=ends, origin=rate.origin, note=note)
    if is_chosen:
        step = base.batch.global_size * base.data.sequence_length
        note = f"of {base.batch.global_size} sequences, as configured"
        figures += [tokens, _times(tokens, 1 / step, "steps", note)]
    return BudgetPlan(
        unit=unit,
        amount=amount,
        hours=hours,
        figures=[compute, *_cost_figures(costs, hours), *figures],
        models=planned,
        is_chosen=is_chosen,
        warnings=warnings,
    )


def with_model(config: Config, model: ModelConfig) -> Config:
    """Return the configuration with another model."""
    return config.model_copy(update={"model": model})


def _cost_figures(costs: Costs, hours: float) -> list[PlannedFigure]:
    """Return hours, dollars, kWh and CO2; null where a factor is not known."""
    figures = [PlannedFigure(name="hours", value=hours, origin="stated")]
    for unit in ("dollars", "kwh"):
        per_hour = costs.per_hour(unit)
        origin, note = costs.notes.get(unit, ("stated", ""))
        value = None if per_hour is None else hours * per_hour
        figures.append(PlannedFigure(name=unit, value=value, origin=origin, note=note))
    kwh, grams = figures[-1].value, costs.grams_per_kwh
    origin, note = costs.notes.get("co2_kg", ("stated", ""))
    co2 = None if kwh is None or grams is None else kwh * grams / 1e3
    return [*figures, PlannedFigure(name="co2_kg", value=co2, origin=origin, note=note)]


def _budget_of(law: LossLaw | None, ratio: float | None) -> Callable[[float], float]:
    """Return the FLOPs for which a number of parameters is the best."""
    if ratio is not None:
        return lambda parameters: 6 * ratio * parameters**2
    assert law is not None
    scale = law.best_parameters(1.0)
    return lambda parameters: math.pow(parameters / scale, 1 / law.exponent)


def _solve(
    sizes: Sequence[int],
    rates: Sequence[Rate],
    budget_of: Callable[[float], float],
    hours: float,
    unit: Unit,
    costs: Costs,
) -> float:
    """Return the parameters whose best training takes `hours` on these devices."""
    logs = [math.log(n) for n in sizes]

    def hours_of(parameters: float) -> float:
        i = min(max(bisect.bisect_left(logs, math.log(parameters)), 1), len(logs) - 1)
        share = (math.log(parameters) - logs[i - 1]) / (logs[i] - logs[i - 1])
        low, high = (math.log(rates[j].tokens_per_s) for j in (i - 1, i))
        return budget_of(parameters) / (6 * parameters) / math.exp(low + share * (high - low)) / 3600

    try:
        return solve_above_tip(hours_of, sizes[0], sizes[-1], hours)
    except ValueError as error:
        bound = float(error.args[0])
        amount = bound if unit == "hours" else bound * (costs.per_hour(unit) or math.nan)
        word = "least" if bound > hours else "most"
        message = f"no size of {sizes[0]:,} to {sizes[-1]:,} parameters is the best one for it"
        hint = f"the {word} that one is: {amount:.3g} {unit}"
        raise ConfigError([Issue(f"--{unit}", "out_of_range", message, hours, hint=hint)]) from None


def _nearest(sizes: Sequence[float], target: float) -> int:
    return min(range(len(sizes)), key=lambda i: abs(math.log(sizes[i] / target)))


def _planned_model(
    name: str, config: Config, rate_of: Callable[[Config], Rate], hours: float, fit: Fit | None
) -> PlannedModel:
    rate = rate_of(config)
    parameters = num_parameters(config.model, config.data.sequence_length)
    tokens = rate.tokens_per_s * hours * 3600
    ends = [tokens / rate.factor, tokens * rate.factor]
    loss = None
    if fit is not None:
        flops = 6 * parameters * tokens
        loss = _fitted_loss("loss", fit, lambda law: law.loss(parameters, tokens), flops, rate)
    return PlannedModel(
        name=name,
        **{setting: getattr(config.model, setting) for setting in SHAPE},
        parameters=parameters,
        tokens_per_s=rate.tokens_per_s,
        tokens=PlannedFigure(name="tokens", value=tokens, ci95=ends, origin=rate.origin, note=rate.note),
        loss=loss,
        note=PUBLISHED.get(name, (None, ""))[1],
    )


def _times(figure: PlannedFigure, factor: float, name: str, note: str) -> PlannedFigure:
    ends = [end * factor for end in figure.ci95 or ()] or None
    value = (figure.value or 0.0) * factor
    return PlannedFigure(name=name, value=value, ci95=ends, origin=figure.origin, note=note)


def _fitted(name: str, fit: Fit, value: Callable[[LossLaw], float], more: float) -> PlannedFigure:
    """Return a value of the law with its interval, widened by `more` at each end."""
    middle, (low, high) = fit.estimate(value)
    half = math.hypot((high - low) / 2, more)
    note, ends = f"{len(fit.runs)} own runs", [middle - half, middle + half]
    return PlannedFigure(name=name, value=middle, ci95=ends, origin="fitted", note=note)


def _fitted_loss(
    name: str, fit: Fit, value: Callable[[LossLaw], float], flops: float, rate: Rate
) -> PlannedFigure:
    """Return a loss, its interval widened by what the interval of the speed moves it."""
    moved = abs(fit.law.best_loss(flops / rate.factor) - fit.law.best_loss(flops))
    return _fitted(name, fit, value, moved)


def _fit_warnings(fit: Fit, flops: float) -> list[str]:
    warnings = []
    beyond = flops / fit.budgets[-1]
    if beyond > MAX_EXTRAPOLATION:
        warnings.append(
            f"{beyond:.0f} x the largest budget that was fitted: beyond {MAX_EXTRAPOLATION:g} x is a guess"
        )
    if fit.others:
        sizes = ", ".join(f"{law.best_parameters(flops):.3g}" for law in fit.others)
        warnings.append(f"another law fits the runs nearly as well: best size {sizes} parameters")
    return warnings


def _published_sizes(sizes: Sequence[int], rates: Sequence[Rate], hours: float) -> dict[str, float]:
    """Return the best number of parameters by each published answer, at the speed of that size."""
    found = {}
    for name, (best, _) in PUBLISHED.items():
        flops = 6 * sizes[0] * rates[0].tokens_per_s * hours * 3600
        for _ in range(50):  # the speed depends on the size
            size = min(max(best(flops), sizes[0]), sizes[-1])
            rate = rates[_nearest(sizes, size)].tokens_per_s
            flops = math.sqrt(flops * 6 * size * rate * hours * 3600)
        found[name] = size
    return found
