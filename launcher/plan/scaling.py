"""Predict throughput by number of GPUs, and the gain from changed settings (`bert-dp plan scaling`)."""

import dataclasses
import difflib
import itertools
import shlex
import statistics
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_dp.config import Config, ConfigError, Issue, ModelConfig, load_config
from bert_dp.config.load import find_config
from bert_dp.config.schema import divisors
from bert_dp.cost import flops_per_token, num_parameters, peak_flops
from launcher import results
from launcher.plan import step_model
from launcher.plan.step_model import AllReduceCurve, Fabric, Scenario, constant, find_link, hardware, predict
from launcher.report.formats import count_of, format_change, format_count, format_percent
from launcher.report.page import Quantity, Report, ReportSection, Table, Verdict, table, words
from launcher.scale import models
from launcher.scale.models import CellMeasurement, PredictedRow, Prediction, Scaling, StepProfile
from launcher.stats import is_measurable

ENGINES = ("ddp", "zero1", "fsdp")
GPU_LINKS, NODE_LINKS = ("nvlink", "pcie"), ("net", "tcp")  # kinds of links within and between nodes
BOUNDS = ("no stragglers", "perfect overlap")  # ideals that no setting achieves; their gain is an upper bound
ADAM_BYTES = 28  # bytes per parameter: AdamW reads p, g, m, v and writes p, m, v in fp32
MIN_MICRO_S = 1e-8
BACKWARD = 2 / 3  # share of a micro batch's time: the backward pass has two matmuls for each forward one
SOURCE_HINT = (
    "pass scaling.json from `bert-dp scale`, or --model with --seq-per-s and --micro (`bert-dp train CONFIG "
    "--dry-run --gpu NAME` estimates tokens/s; divide by data.sequence_length for sequences/s)"
)
CPU_WITH_GPU_LINK = (
    "The profile was measured on a CPU, whose steps are far longer than a GPU's, but --link connects GPUs: "
    "the predicted efficiency is too high. Profile one GPU instead, or pass --seq-per-s, --micro and --gpu."
)
_BERT: dict[str, Any] = {
    "vocab_size": 30_522,
    "position": "learned",
    "max_positions": 512,
    "mlp": "gelu",
    "bias": True,
    "head": "dense",
}
MODELS = {
    "bert-base": ModelConfig(**_BERT, hidden_size=768, num_layers=12, num_heads=12, intermediate_size=3072),
    "bert-large": ModelConfig(**_BERT, hidden_size=1024, num_layers=24, num_heads=16, intermediate_size=4096),
}
BERT_SEQUENCE_LENGTH, BERT_MASK_RATE = 128, 0.15


@dataclasses.dataclass(frozen=True)
class PlanSpec:
    """Options of `bert-dp plan scaling`."""

    gpus: tuple[int, ...]
    link: str | None = None
    inter: str | None = None
    gpus_per_node: int | None = None
    nics: int = 1
    engine: str = "ddp"
    tensor: tuple[int, ...] = (1,)
    accumulation: tuple[int, ...] = ()

    @property
    def per_node(self) -> int:
        """GPUs per node. Default: 8, or all GPUs if --inter is absent and --link is absent or a loopback."""
        if self.gpus_per_node is not None:
            return self.gpus_per_node
        local = self.link is None or find_link(self.link).kind == "loopback"
        return max(self.gpus) if local and self.inter is None else 8


@dataclasses.dataclass(frozen=True)
class PlanSource:
    """Profile of one rank, and the other inputs of a prediction."""

    profile: StepProfile
    accumulation: int = 1
    notes: tuple[str, ...] = ()  # origin of the figures, and assumptions
    spread: float = 0.0  # standard deviation / mean of the ranks' speeds
    curves: Mapping[int, AllReduceCurve] = dataclasses.field(default_factory=dict)
    """Measured all-reduce times within one machine, by world size."""
    slowdowns: Mapping[int, float] = dataclasses.field(default_factory=dict)
    """Slowdown of computation, 1 / measured ceiling efficiency, by world size."""
    cells: Sequence[CellMeasurement] = ()  # cells measured by the same benchmark
    flops_per_token: float | None = None
    peak_flops: float | None = None

    def slowdown(self, ranks: int) -> float:
        """Return the slowdown at the largest measured number of ranks <= `ranks`, or 1 if there is none."""
        smaller = [count for count in self.slowdowns if count <= ranks]
        return self.slowdowns[max(smaller)] if smaller else 1.0


def predict_scaling(source: PlanSource, spec: PlanSpec) -> Prediction:
    """Predict a row for each accumulation, tensor size and number of GPUs, and compare the measured cells
    with their predictions. Raises ConfigError if the options are invalid."""
    if issues := _option_issues(source, spec):
        raise ConfigError(issues)
    rows = [
        _row(source, scenario_of(source, spec, ranks, tensor, accumulation))
        for accumulation, tensor, ranks in itertools.product(
            spec.accumulation or (source.accumulation,), spec.tensor, spec.gpus
        )
        if ranks % tensor == 0
    ]
    if not rows:
        message = f"no tensor size in {list(spec.tensor)} divides any number of GPUs in {list(spec.gpus)}"
        raise ConfigError([Issue("--tensor", "does_not_divide", message, spec.tensor, "--nproc")])
    micro = source.profile.micro_batch
    of_gpus = spec.link is not None and find_link(spec.link).kind in GPU_LINKS
    return Prediction(
        engine=spec.engine,
        warnings=[CPU_WITH_GPU_LINK] if of_gpus and _is_cpu(source.profile.device) else [],
        assumptions=[
            *source.notes,
            f"weak scaling: every replica keeps its micro batch of {micro} and its accumulation",
            f"ranks wait for the slowest; their speeds vary by {format_percent(source.spread)} (one sigma)",
            f"overlap hides {format_percent(constant('overlap_gain'))} of the time that ideal overlap hides",
        ],
        rows=rows,
        measured=[line for cell in source.cells if (line := _compared(source, spec, cell))],
    )


def predict_measured(scaling: Scaling) -> Prediction | None:
    """Predict a benchmark's cells from its measurements. Returns None if its profile or a link is missing."""
    try:
        source = source_of(scaling, "scaling.json")
        return predict_scaling(source, PlanSpec(tuple(sorted({c.world_size for c in scaling.cells}))))
    except ConfigError:
        return None


def scenario_of(
    source: PlanSource, spec: PlanSpec, ranks: int, tensor: int = 1, accumulation: int = 1
) -> Scenario:
    """Return the scenario of one row. Without --link, it contains the all-reduce times measured over the
    smallest number of ranks that is at least `ranks` or, if there is none, over the largest number."""
    curve = None
    if spec.link is None and source.curves:
        curve = source.curves[min((n for n in source.curves if n >= ranks), default=max(source.curves))]
    intra, inter = (find_link(name) if name else None for name in (spec.link, spec.inter))
    return Scenario(
        Fabric(spec.per_node, intra, inter, spec.nics, curve),
        ranks,
        spec.engine,
        tensor,
        accumulation,
        spread=source.spread,
        slowdown=source.slowdown(min(ranks, spec.per_node)),
        first_bucket=step_model.FIRST_BUCKET if spec.engine == "ddp" else None,
    )


def _row(source: PlanSource, scenario: Scenario) -> PredictedRow:
    row = predict(source.profile, scenario)
    mfu = None
    if source.peak_flops and source.flops_per_token:
        mfu = row.tokens_per_s * source.flops_per_token / (row.world_size * source.peak_flops)
    return row.model_copy(update={"mfu": mfu, "levers": levers(source.profile, scenario)})


def levers(profile: StepProfile, scenario: Scenario) -> list[models.Lever]:
    """Return the relative gain in tokens/s from each change, largest first (0.1: 10 % more tokens/s). A
    larger micro batch is assumed to take the same time per sequence."""
    if scenario.ranks == 1:
        return []
    change = dataclasses.replace
    changes = {
        "2 x accumulation": (profile, change(scenario, accumulation=2 * scenario.accumulation)),
        "2 x micro batch": (step_model.with_micro_batch(profile, 2 * profile.micro_batch), scenario),
        "2 x link speed": (profile, change(scenario, fabric=change(scenario.fabric, speed=2.0))),
        "no stragglers": (profile, change(scenario, spread=0.0)),
        "perfect overlap": (profile, change(scenario, overlap=True, gain=1.0)),
    }
    if scenario.engine != "fsdp":  # fsdp has no buckets
        changes["no overlap: one bucket"] = profile, change(scenario, overlap=False)
        changes["2 x bucket size"] = profile, change(scenario, bucket_bytes=2 * scenario.bucket_bytes)
    if scenario.engine == "ddp" and profile.width > 2:
        changes["16-bit gradients"] = profile, change(scenario, sent_bytes=2.0)
    now = predict(profile, scenario).tokens_per_s
    rates = {name: predict(*changed).tokens_per_s for name, changed in changes.items()}
    gains = [
        models.Lever(lever=name, gain=rate / now - 1, tokens_per_s=rate, bound=name in BOUNDS)
        for name, rate in rates.items()
        if name not in BOUNDS or rate >= now  # many overlapped buckets may be slower than one without overlap
    ]
    return sorted(gains, key=lambda lever: -lever.gain)


def _compared(source: PlanSource, spec: PlanSpec, cell: CellMeasurement) -> models.ComparedCell | None:
    """Compare a measured cell with its prediction, which uses measured links if there are any. Returns None
    if the cell cannot be predicted."""
    engine = "ddp" if cell.engine == "single" else cell.engine
    own = dataclasses.replace(spec, engine=engine, gpus=(cell.world_size,))
    if source.curves:
        own = dataclasses.replace(own, link=None, inter=None, gpus_per_node=None)
    if cell.kind != "run" or cell.tokens_per_s is None or engine not in ENGINES or _link_issues(source, own):
        return None
    scenario = scenario_of(source, own, cell.world_size, cell.tensor, cell.accumulation)
    row = predict(step_model.with_micro_batch(source.profile, cell.micro_batch), scenario)
    interval = cell.step_time_s.ci95 if cell.step_time_s else None
    return models.ComparedCell(
        cell=cell.id,
        predicted_step_s=row.step_time_s,
        measured_step_s=cell.step_s,
        ci95=interval,
        within=interval[0] <= row.step_time_s <= interval[1] if interval else None,
        predicted_efficiency=row.efficiency,
        measured_efficiency=cell.efficiency,
        measured_efficiency_ci95=cell.efficiency_ci95,
        repeats=len(cell.repeats),
    )


def _is_cpu(device: str) -> bool:
    return device.upper().startswith("CPU")


# --- options


def _option_issues(source: PlanSource, spec: PlanSpec) -> list[Issue]:
    """Check that required options are given, and that values are known and fit each other and the source."""
    links = hardware()["links"]
    if issues := [*unknown_issues("--link", spec.link, links), *unknown_issues("--inter", spec.inter, links)]:
        return issues
    if spec.inter is not None and max(spec.gpus) <= spec.per_node:
        message = f"{max(spec.gpus)} GPUs fit in one node of {spec.per_node}"
        hint = "request more GPUs, or pass --gpus-per-node"
        issues.append(Issue("--inter", "no_effect", message, spec.inter, "--gpus-per-node", hint))
    issues += _link_issues(source, spec)
    heads = source.profile.num_heads
    hint = f"use one of {', '.join(map(str, divisors(heads)))}"
    message = f"does not divide the model's {heads} attention heads"
    return issues + [
        Issue("--tensor", "does_not_divide", f"{size} {message}", size, "model.num_heads", hint)
        for size in spec.tensor
        if heads % size
    ]


def unknown_issues(setting: str, value: str | None, names: Collection[str]) -> list[Issue]:
    """Check that a name is known. The hint lists the names that start with it, or else the closest ones."""
    if value is None or value in names:
        return []
    close = [name for name in names if name.lower().startswith(value.lower())]
    kinds = {name.partition("-")[0].lower() for name in names}  # e.g. h100 from H100-SXM-80G
    for kind in [] if close else difflib.get_close_matches(value.lower(), kinds, n=1, cutoff=0.4):
        close = [name for name in names if name.lower().startswith(kind)]
    hint = f"did you mean {' or '.join(close)}?" if close else f"use one of {', '.join(names)}"
    return [Issue(setting, "unknown", f"{value!r} is not known", value, hint=hint)]


def _link_issues(source: PlanSource, spec: PlanSpec) -> list[Issue]:
    """Check that each required link is given or measured."""
    most, per_node = max(spec.gpus), spec.per_node
    if per_node < most and spec.inter is None:
        setting, reason = "--inter", f"{most} GPUs need more than one node of {per_node}"
    elif spec.link is None and min(most, per_node) > 1 and (per_node < most or not source.curves):
        setting, reason = "--link", f"not measured for {most} GPUs"
    else:
        return []
    between = setting == "--inter"
    names = [name for name in hardware()["links"] if (find_link(name).kind in NODE_LINKS) == between]
    hint = f"use one of {', '.join(names)}"
    return [Issue(setting, "missing", f"not given, and {reason}", hint=hint)]


# --- sources


def find_source(
    path: Path | None,
    model: str | None,
    seq_per_s: float | None,
    micro: int | None,
    gpu: str | None,
    accumulation: int,
) -> PlanSource:
    """Return the source selected by the options: a file of measurements or a rate. Raises ConfigError."""
    if path is not None:
        rate = {"--model": model, "--seq-per-s": seq_per_s, "--micro": micro, "--gpu": gpu}
        message = "cannot be combined with --from, which gives a measured speed"
        if issues := [Issue(o, "conflict", message, v, "--from") for o, v in rate.items() if v is not None]:
            raise ConfigError(issues)
        try:
            return source_of(results.read(path, Scaling), str(path))
        except ConfigError as error:
            raise ConfigError([issue.within("--from") for issue in error.issues]) from None
    if model is None or seq_per_s is None or micro is None:
        raise ConfigError([Issue("--from", "missing", "not given", hint=SOURCE_HINT)])
    return source_of_rate(model, seq_per_s, micro, accumulation, gpu)


def source_of(scaling: Scaling, name: str) -> PlanSource:
    """Convert benchmark results into a PlanSource. Raises ConfigError if file `name` contains no profile."""
    profile = scaling.profile
    if profile is None:
        raise ConfigError([Issue(name, "missing", "contains no step-time profile", hint=Scaling.hint)])
    notes = [f"profile of {profile.device}, {profile.precision}: {name}"]
    cells = [cell for cell in scaling.cells if cell.status == "ok"]
    if (alone := scaling.alone()) and alone.step_s is not None and alone.step_s > profile.optimizer_s:
        # unlike the profile, the measured step includes data loading and logging
        micro_s = (alone.step_s - profile.optimizer_s) / alone.accumulation
        profile = step_model.with_micro_s(profile, micro_s * profile.micro_batch / alone.micro_batch)
        notes.append(f"one rank's step time is measured: {alone.step_s:.4g} s (cell {alone.id})")
    ceilings: dict[int, list[float]] = {}
    for cell in cells:
        share = cell.ceiling_efficiency if is_measurable(cell.ceiling_efficiency_ci95) else None
        if share and cell.kind == "run" and cell.tensor == 1:
            # at least 1: a smaller value is noise or a slow baseline
            ceilings.setdefault(cell.world_size, []).append(max(1.0, 1 / share))
    slowdowns = {ranks: statistics.median(values) for ranks, values in ceilings.items()}
    if slowdowns:
        counts = ", ".join(f"{n}: x {s:.3f}" for n, s in sorted(slowdowns.items()))
        notes.append(f"slowdown of N ranks: 1 / ceiling efficiency ({counts}; more ranks: the last factor)")
    curves = {
        # sorted, so that the dict keeps the longest of several times measured for one size
        each.world_size: AllReduceCurve(
            each.world_size, dict(sorted((float(point.bytes), point.seconds) for point in each.points))
        )
        for each in scaling.links
        if each.points
    }
    if curves:
        notes.append(
            f"without --link, all-reduce times are those measured over {', '.join(map(str, curves))} ranks"
        )
    peak = peak_flops(profile.device, profile.precision)
    if peak:
        notes.append(f"MFU: share of {peak / 1e12:g} TFLOP/s per GPU ({profile.device}, {profile.precision})")
    return PlanSource(
        profile,
        scaling.settings.accumulation or 1,
        tuple(notes),
        # ranks on a CPU share one device; the ceiling already includes their differences
        0.0 if _is_cpu(profile.device) else constant("device_spread"),
        curves,
        slowdowns,
        cells,
        scaling.settings.flops_per_token,
        peak,
    )


def source_of_rate(
    model: str, seq_per_s: float, micro: int, accumulation: int, gpu: str | None
) -> PlanSource:
    """Derive a source from a model's layers and one rank's sequences per second. Raises ConfigError."""
    gpus = hardware()["gpus"]
    if issues := unknown_issues("--gpu", gpu, gpus):
        raise ConfigError(issues)
    shape, length, mask_rate = find_model(model)
    device, optimizer_s = "GPU", 0.0
    adam = "included in the micro-batch time; pass --gpu to separate it"
    if gpu is not None:
        device = gpus[gpu]["device"]
        bytes_s = gpus[gpu]["memory_gb_s"] * step_model.GB * constant("memory_reach")
        optimizer_s = num_parameters(shape, length) * ADAM_BYTES / bytes_s
        adam = f"{1000 * optimizer_s:.1f} ms, fused AdamW at {gpu}'s memory bandwidth"
    micro_s = micro / seq_per_s - optimizer_s / accumulation
    if not micro_s > MIN_MICRO_S:
        message = f"{seq_per_s:g} sequences/s is too high: no time would remain for the micro batches"
        raise ConfigError([Issue("--seq-per-s", "out_of_range", message, seq_per_s, "--micro")])
    precision = "bf16" if gpu is None or peak_flops(device, "bf16") else "fp16"
    profile = estimated_profile(device, precision, micro, length, shape, micro_s, optimizer_s)
    flops = flops_per_token(shape, length, mask_rate)
    settings = models.ScalingSettings(accumulation=accumulation, flops_per_token=flops)
    name = f"estimated from the layers of {model} and {seq_per_s:g} sequences/s; optimizer {adam}"
    return source_of(Scaling(profile=profile, settings=settings), name)


def estimated_profile(
    device: str,
    precision: str,
    micro_batch: int,
    sequence_length: int,
    model: ModelConfig,
    micro_s: float,
    optimizer_s: float,
) -> StepProfile:
    """Estimate a rank's profile from its times. The layers determine the gradients' sizes and ready times."""
    parameters = num_parameters(model, sequence_length)
    return StepProfile(
        device=device,
        precision=precision,
        micro_batch=micro_batch,
        sequence_length=sequence_length,
        **model.model_dump(include={"num_layers", "hidden_size", "num_heads"}),
        micro_s=micro_s,
        backward_s=BACKWARD * micro_s,
        optimizer_s=optimizer_s,
        gradients=step_model.layer_gradients(model, parameters, 4.0, BACKWARD * micro_s),
    )


def load_named(option: str, name: str) -> Config:
    """Load a configuration by name or path. Raises ConfigError, whose issues name `option`."""
    try:
        return load_config(find_config(name))
    except ConfigError as error:
        raise ConfigError([issue.within(option) for issue in error.issues]) from None


def find_model(name: str) -> tuple[ModelConfig, int, float]:
    """Return a model, its sequence length and mask rate. `name`: bert-base, bert-large or a configuration.
    Raises ConfigError for any other name."""
    if name in MODELS:
        return MODELS[name], BERT_SEQUENCE_LENGTH, BERT_MASK_RATE
    config = load_named("--model", name)
    return config.model, config.data.sequence_length, config.objective.mask_rate


# --- report

ROW = (
    Quantity("tensor", "tensor", "count"),
    Quantity("accumulation", "accum.", "count"),
    Quantity("step_time_s", "step", "seconds"),
    Quantity("exposed_comm_fraction", "exposed", "percent"),
    Quantity("efficiency", "efficiency", "percent"),
    Quantity("mfu", "MFU", "percent"),
    Quantity("tokens_per_s", "tokens/s"),
)


def plan_page(prediction: Prediction, config: str | None = None) -> Report:
    """Report predictions, gains for the largest number of GPUs, measured cells and assumptions.

    `config`: configuration of the model, for the suggested `scale` command.
    """
    rows = prediction.rows
    last = max(rows, key=lambda row: row.world_size)
    levers = [
        words(lever.lever, format_change(lever.gain), "upper bound, not achievable" if lever.bound else "")
        for lever in last.levers
    ]
    counts = ",".join(dict.fromkeys(str(row.world_size) for row in rows[:4]))
    # omit columns without information
    same = {"tensor": all(row.tensor == 1 for row in rows), "MFU": not any(row.mfu for row in rows)}
    columns = [quantity for quantity in ROW if not same.get(quantity.head)]
    best = Quantity(_best_change, "best change", "word")
    tables = [
        table([(format_count(row.world_size), row) for row in rows], [*columns, best], corner="GPUs"),
        Table(levers, title=f"Gain from one change on {count_of(last.world_size, 'GPU')}"),
        models.compared(prediction, "Predicted and measured"),
    ]
    wrong = [cell.cell for cell in prediction.measured if cell.within is False]
    text = f"Do not use this prediction: its step time lies outside the 95 % interval of {', '.join(wrong)}."
    verdicts = [Verdict("warn", text)] if wrong else []
    return Report(
        "bert-dp: predicted scaling",
        verdicts=[*verdicts, *(Verdict("warn", text) for text in prediction.warnings)],
        sections=[ReportSection("", tables=tables, notes=prediction.assumptions)],
        next="" if config is None else f"bert-dp scale {shlex.quote(config)} --nproc {counts}",
    )


def _best_change(row: PredictedRow) -> str:
    best = next((lever for lever in row.levers if not lever.bound), None)
    return f"{format_change(best.gain)} {best.lever}" if best else ""
