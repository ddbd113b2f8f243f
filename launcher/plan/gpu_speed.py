"""Estimate the speed of a GPU from its name, or read a measured speed.

    seconds = matmul FLOPs / (peak x share) x (1 + TOKENS / tokens) + bytes / bandwidth + layers x launch

benchmarks/gpu_speed.py fits the constants to published measurements of single GPUs. The constants are share,
TOKENS, the optimizer's memory traffic, and each framework's memory traffic and launch time. hardware.yaml
lists them under `gpu_speed`, with the spread of the estimate's errors.
"""

import contextlib
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from bert_dp.config import Config, ConfigError, Issue, ModelConfig, load_config
from bert_dp.config.schema import divisors
from bert_dp.cost import flops_per_token, memory_estimate_gib, num_parameters, peak_flops
from bert_dp.files.models import Summary
from launcher import results
from launcher.plan.scaling import ENGINES, estimated_profile
from launcher.plan.step_model import GB, Fabric, Scenario, constant, find_link, hardware, interpolate, predict
from launcher.scale.models import PredictedRow, Scaling, StepProfile

FRAMEWORK = "compiled"  # by default, the constants for torch.compile apply
PASSES, ATTENTION_PASSES = 60, 24  # values moved per token and layer: 60 x width + 24 x heads x length
MEMORY_SHARE = 0.9  # share of device memory that a micro batch may fill
MIN_SPREAD = 0.05  # minimum half-width of the 95 % interval of ln(measured rate)
OPTIMIZER_BYTES = {"adamw": 28, "lamb": 52, "muon": 28}  # bytes per parameter that a fused optimizer moves


class GpuStep(NamedTuple):
    """Inputs of `estimate`: a model, its micro batch, precision and optimizer, and the speed of a GPU."""

    model: ModelConfig
    length: int  # tokens per sequence
    mask_rate: float
    micro_batch: int  # sequences
    precision: str
    optimizer: str
    peak: float  # peak of matrix products, FLOP/s
    memory: float  # memory bandwidth, bytes/s


def peak_of(gpu: str, precision: str) -> float | None:
    """Return the peak FLOP/s of a GPU listed in hardware.yaml, or None if unknown for this precision."""
    return peak_flops(hardware()["gpus"][gpu]["device"], precision)


def estimate(
    step: GpuStep, framework: str = FRAMEWORK, constants: Mapping[str, Any] | None = None
) -> tuple[float, float]:
    """Estimate the seconds per micro batch and per optimizer update. `constants` replace hardware.yaml's."""
    known, model = constants or hardware()["gpu_speed"], step.model
    tokens = step.micro_batch * step.length
    is_narrow = step.precision in ("bf16", "fp16")
    share = known["matmul_share"]["16-bit" if is_narrow else step.precision]
    flops = tokens * flops_per_token(model, step.length, step.mask_rate)
    matmul = flops / (step.peak * share) * (1 + known["tokens"] / tokens)
    bytes_s = step.memory * constant("memory_reach")
    numbers = PASSES * model.hidden_size + ATTENTION_PASSES * model.num_heads * step.length
    moved = tokens * model.num_layers * numbers * (2 if is_narrow else 4)
    memory = moved * known["memory_traffic"][framework] / bytes_s
    launch = model.num_layers * known["launch_s"][framework]
    optimizer_bytes = num_parameters(model, step.length) * OPTIMIZER_BYTES[step.optimizer]
    return matmul + memory + launch, optimizer_bytes * known["optimizer_traffic"] / bytes_s


# --- tokens per second of a configuration


class Rate(NamedTuple):
    """Tokens/s of all devices. Dividing and multiplying by `factor` gives the ends of the 95 % interval."""

    tokens_per_s: float
    factor: float
    origin: Literal["measured", "fitted"]
    note: str


def micro_batch_that_fits(config: Config, precision: str, gpu: str, world_size: int) -> int | None:
    """Return the largest micro batch that is estimated to fit in the GPU's memory and divides each replica's
    share of the global batch and of the ramp quantum. Returns None if not even one sequence fits."""
    batch = config.batch
    quantum = batch.ramp_quantum if batch.ramp_fraction > 0 else None
    whole = math.gcd(batch.global_size, quantum or batch.global_size)
    best = None
    for micro in divisors(max(1, whole * config.parallel.tensor // world_size)):
        tried = config.model_copy(update={"batch": batch.model_copy(update={"micro_size": micro})})
        if sum(memory_estimate_gib(tried, precision, world_size).values()) > MEMORY_SHARE * memory_gib(gpu):
            break
        best = micro
    return best


def memory_gib(gpu: str) -> float:
    """Return the memory of a GPU in GiB, parsed from the end of its name in hardware.yaml."""
    return float(gpu.rpartition("-")[2].removesuffix("G"))


def rates_that_fit(configs: Iterable[Config], rate_of: Callable[[Config], Rate]) -> list[Rate]:
    """Return the rates of `configs`, which ascend in size, up to the largest that fits the device."""
    rates = []
    with contextlib.suppress(ConfigError):
        for config in configs:
            rates.append(rate_of(config))
    return rates


def gpu_rate(config: Config, gpu: str, gpus: int, precision: str) -> Rate:
    """Predict the tokens/s of a configuration on `gpus` GPUs with the largest micro batch that fits. Raises
    ConfigError if not even one sequence fits."""
    micro = micro_batch_that_fits(config, precision, gpu, gpus)
    if micro is None:
        message = f"not even one sequence of this model fits in the memory of {gpu}"
        raise ConfigError([Issue("--gpu", "out_of_range", message, gpu)])
    row, factor = predicted_step(config, gpu, gpus, precision, micro)
    note = f"roofline of {gpu} in {precision}, micro batch {micro}, fitted to published measurements"
    return Rate(row.tokens_per_s, factor, "fitted", note)


def link_of(gpu: str, gpus: int) -> str | None:
    """Return the name of the link between the GPUs of a node, or None for one GPU."""
    return str(hardware()["gpus"][gpu]["link"]) if gpus > 1 else None


def predicted_step(
    config: Config, gpu: str, gpus: int, precision: str, micro: int
) -> tuple[PredictedRow, float]:
    """Predict a step of a configuration; return the prediction and the factor of its 95 % interval."""
    model, length = config.model, config.data.sequence_length
    row, peak = hardware()["gpus"][gpu], peak_of(gpu, precision)
    assert peak is not None
    work = config.objective.mask_rate, micro, precision, config.optim.name
    times = estimate(GpuStep(model, length, *work, peak, row["memory_gb_s"] * GB))
    profile = estimated_profile(row["device"], precision, micro, length, model, *times)
    link = link_of(gpu, gpus)
    scenario = Scenario(
        Fabric(gpus, find_link(link) if link else None),
        gpus,
        config.parallel.engine if config.parallel.engine in ENGINES else "ddp",
        config.parallel.tensor,
        max(1, config.batch.global_size * config.parallel.tensor // (micro * gpus)),
        constant("device_spread") if gpus > 1 else 0.0,
    )
    return predict(profile, scenario), math.exp(1.96 * hardware()["gpu_speed"]["spread"])


def recorded_rate(path: Path, config: Config, precision: str, ranks: int) -> Rate:
    """Read the tokens/s from a run directory, or from a benchmark's scaling.json (its fastest matching cell).
    Raises ConfigError if the model, sequence length, precision or number of devices differs."""
    if not path.exists():
        raise ConfigError([Issue("--from", "not_found", f"{path} does not exist", str(path))])

    def shape(of: ModelConfig | StepProfile | None, count: int | None) -> str:
        layers = f"{of.num_layers} x {of.hidden_size} with {of.num_heads} heads" if of else "no profile"
        return f"{layers}, {count or 0:,} parameters"

    rates: Mapping[int | None, float | None]
    found: tuple[str, int | None, str | None]
    if path.is_dir():
        summary = results.read(path / "summary.json", Summary)
        trained = load_config(path / "config.yaml")
        model = shape(trained.model, summary.parameters)
        found = model, trained.data.sequence_length, summary.precision
        rates = {summary.world_size: summary.tokens_per_s}
        note = f"{path}: {summary.device}, micro batch {summary.micro_batch}"
    else:
        scaling = results.read(path, Scaling)
        settings, model = scaling.settings, shape(scaling.profile, scaling.settings.parameters)
        found = model, settings.sequence_length, settings.precision
        # fastest completed data-parallel cell for each number of ranks
        ran = [c for c in scaling.cells if (c.status, c.kind, c.tensor) == ("ok", "run", 1)]
        cells = {c.world_size: c for c in sorted(ran, key=lambda c: c.tokens_per_s or 0.0)}
        rates = {count: cell.tokens_per_s for count, cell in cells.items()}
        note = f"{path}: {settings.device}" + (f", cell {cells[ranks].id}" if ranks in cells else "")
    length = config.data.sequence_length
    wanted = shape(config.model, num_parameters(config.model, length)), length, precision
    issues = [
        Issue(setting, "conflict", f"{path} was measured with {measured}, not {needed}", needed, "--from")
        for setting, measured, needed in zip(
            ("model", "data.sequence_length", "--precision"), found, wanted, strict=True
        )
        if measured != needed
    ]
    if ranks not in rates:
        counts = " or ".join(map(str, rates))
        message, hint = f"the number of devices in {path} is {counts}, not {ranks}", f"use --nproc {counts}"
        issues.append(Issue("--nproc", "conflict", message, ranks, "--from", hint))
    rate = rates.get(ranks)
    if not issues and not rate:
        issues = [Issue("--from", "missing", f"{path} contains no measured tokens/s", str(path))]
    if issues:
        raise ConfigError(issues)
    return Rate(rate or 0.0, math.exp(MIN_SPREAD), "measured", note)


def measured_rate(parameters: float, rates: Mapping[float, float], source: str) -> Rate:
    """Estimate the tokens/s of a model size by log-log interpolation. `rates`: parameters -> tokens/s.

    The half-width of the 95 % interval of ln(tokens/s) is twice the leave-one-out RMS error over the inner
    sizes, but at least 0.05. Outside the measured range, the tokens/s are extrapolated from the two nearest
    sizes, and the half-width is multiplied by 1 + |ln(parameters / nearest size)|.
    """
    sizes = sorted(rates)
    others = ((size, {k: v for k, v in rates.items() if k != size}) for size in sizes[1:-1])
    errors = [math.log(interpolate(size, rest) / rates[size]) for size, rest in others]
    spread = math.sqrt(statistics.fmean(e**2 for e in errors)) if errors else 0.0
    beyond = max(0.0, math.log(sizes[0] / parameters), math.log(parameters / sizes[-1]))
    factor = math.exp(max(MIN_SPREAD, 2 * spread) * (1 + beyond))
    return Rate(interpolate(parameters, rates), factor, "measured", source)
