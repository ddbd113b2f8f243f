"""What a scaling prediction starts from: a measured profile, or a rate and the layers of a model."""

from __future__ import annotations

import dataclasses
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bert_dp.config import ConfigError, ModelConfig, load_config
from bert_dp.config.shipped import find_config
from bert_dp.cost import flops_per_token, num_parameters, peak_flops
from launcher import results
from launcher.plan import timeline
from launcher.plan.hardware import Gpu, constant, hardware
from launcher.plan.links import GB, Curve
from launcher.plan.step_model import PredictedStep, Profile, default_spread, with_micro
from launcher.plan.timeline import Gradient
from launcher.scale.models import CellMeasurement, Scaling, StepProfile
from launcher.stats import is_measurable

_BERT: dict[str, Any] = {
    "vocab_size": 30_522,
    "position": "learned",
    "mlp": "gelu",
    "bias": True,
    "head": "dense",
}
MODELS = {
    "bert-base": ModelConfig(**_BERT, hidden_size=768, num_layers=12, num_heads=12, intermediate_size=3072),
    "bert-large": ModelConfig(**_BERT, hidden_size=1024, num_layers=24, num_heads=16, intermediate_size=4096),
}
BERT_SEQUENCE_LENGTH = 128
BERT_MASK_RATE = 0.15
POSITIONS = 512  # of BERT's learned ones, whatever the sequence length
ADAM_BYTES = 28  # per parameter: reads p, g, m, v, writes p, m, v in fp32
BACKWARD = 2 / 3  # of a micro batch: every product of the forward pass has two in the backward pass
RATES = 1e-6, 1e9  # sequences/s that one rank may have
MAX_MICRO = 1_000_000
SAME = 0.01  # by which the parameters of --model and of the profile may differ
ACTIVATION_BYTES = {"bf16": 2.0, "fp16": 2.0, "fp64": 8.0}  # of a number; of other precisions 4
GIVE = (
    "give what `bert-dp scale` writes, scaling.json or profile.json, or --model with --seq-per-s and --micro"
)


@dataclasses.dataclass(frozen=True)
class Device:
    """What one device can do and hold; None where it is not known."""

    name: str
    precision: str
    peak_flops: float | None
    """FLOP/s at `precision`."""
    flops_per_token: float | None
    """Of the model."""
    memory_gib: float | None = None

    def mfu(self, step: PredictedStep) -> float | None:
        """Model FLOPs per second over the peak of all devices."""
        if not self.peak_flops or not self.flops_per_token:
            return None
        return step.tokens_per_s * self.flops_per_token / (step.ranks * self.peak_flops)

    def holds(self, state_gib: float) -> bool | None:
        """Whether a rank's weights, gradients and optimizer fit at all."""
        return None if self.memory_gib is None else state_gib < self.memory_gib


@dataclasses.dataclass(frozen=True)
class Source:
    """Where the numbers come from."""

    profile: Profile
    accumulation: int
    spread: float
    """Default standard deviation / mean of the ranks' speed."""
    notes: tuple[str, ...]
    """What was taken from where, and what was assumed."""
    curves: Mapping[int, Curve] = dataclasses.field(default_factory=dict)
    """Measured all-reduces within one machine, by world size."""
    slowdowns: Mapping[int, float] = dataclasses.field(default_factory=dict)
    """1 / measured ceiling efficiency, by world size."""
    cells: Sequence[CellMeasurement] = ()
    """Measured cells of the same benchmark, to set beside the prediction."""
    device: Device | None = None

    def slowdown(self, ranks: int) -> float:
        """As measured; between and beyond, that of the next smaller count."""
        smaller = [count for count in self.slowdowns if count <= ranks]
        return self.slowdowns[max(smaller)] if smaller else 1.0


class Model(NamedTuple):
    """bert-base, bert-large or the model of a configuration."""

    shape: ModelConfig
    sequence_length: int
    parameters: int
    flops_per_token: float
    """Forward and backward."""


def find_model(name: str) -> Model:
    """Raises ConfigError when `name` is no configuration either."""
    if name in MODELS:
        shape, length, positions, mask_rate = MODELS[name], BERT_SEQUENCE_LENGTH, POSITIONS, BERT_MASK_RATE
    else:
        try:
            config = load_config(find_config(name))
        except ConfigError as error:
            also = f"; or {' or '.join(MODELS)}"
            raise ConfigError([f"--model: {issue}{also}" for issue in error.issues]) from None
        shape, mask_rate = config.model, config.objective.mask_rate
        length = positions = config.data.sequence_length
    return Model(shape, length, num_parameters(shape, positions), flops_per_token(shape, length, mask_rate))


def choose(
    path: Path | None,
    model: str | None,
    seq_per_s: float | None,
    micro: int | None,
    gpu: str | None,
    accumulation: int,
) -> Source:
    """From the options of the verb: a measured file, or a rate. Raises ConfigError."""
    if path is not None:
        rate = {"--gpu": gpu, "--seq-per-s": seq_per_s, "--micro": micro}
        if needless := [option for option, value in rate.items() if value is not None]:
            raise ConfigError(
                [
                    f"{option}: is for a prediction without --from; the file has been measured, "
                    f"so leave {option} out"
                    for option in needless
                ]
            )
        return from_file(path, model)
    if model is None or seq_per_s is None or micro is None:
        raise ConfigError(
            [
                "--from: give scaling.json or profile.json of a measured run; or --model, "
                "--seq-per-s and --micro, each above 0"
            ]
        )
    return from_rate(model, seq_per_s, micro, accumulation, gpu)


def from_file(path: Path, model: str | None = None) -> Source:
    """scaling.json or profile.json; `model` gives the shape that tensor parallelism needs. Raises
    ConfigError."""
    try:
        scaling = read_measured(results.load(path, GIVE), str(path))
    except ConfigError as error:
        raise ConfigError([f"--from: {issue}" for issue in error.issues]) from None
    return from_scaling(scaling, str(path), model)


def read_measured(data: Any, name: str) -> Scaling:
    """What scaling.json holds, or profile.json, which is the profile of one without cells. Raises
    ConfigError."""
    if isinstance(data, dict) and "gradients" in data:
        return Scaling(profile=results.parse(data, StepProfile, name))
    if not isinstance(data, dict) or "profile" not in data:
        raise ConfigError([f"{name} holds no profile; {GIVE}"])
    return results.parse(data, Scaling, name)


def from_scaling(scaling: Scaling, name: str, model: str | None = None) -> Source:
    """The same of what the file called `name` holds."""
    measured = scaling.profile
    if measured is None:
        raise ConfigError([f"--from: {name} holds no profile; {GIVE}"])
    known = find_model(model) if model else None
    if known and measured.parameters and abs(known.parameters / measured.parameters - 1) > SAME:
        raise ConfigError(
            [
                f"--model: {model} has {known.parameters:,} parameters, the profile in {name} "
                f"{measured.parameters:,}; name the configuration that was measured"
            ]
        )
    notes = [f"profile of {measured.device}, {measured.precision or 'precision not told'}: {name}"]
    cells = [cell for cell in scaling.cells if cell.status == "ok"]
    profile = _as_fast_as_its_run(_profile(measured, known and known.shape), scaling, notes)
    if slowdowns := _slowdowns(cells):
        counts = ", ".join(f"{n}: x {s:.3f}" for n, s in sorted(slowdowns.items()))
        notes.append(f"computation slowed as the measured ceiling says ({counts}), beyond as the last")
    if any(not is_measurable(cell.ceiling_efficiency_ci95) for cell in cells):
        notes.append(
            "ceilings whose interval is wider than a factor of two are left out: measure more repeats"
        )
    points = {link.world_size: [(p.bytes, p.seconds) for p in link.points] for link in scaling.links}
    flops = scaling.settings.flops_per_token or (known and known.flops_per_token)
    precision = measured.precision or ""
    return Source(
        profile,
        scaling.settings.accumulation or 1,
        default_spread(measured.device),
        tuple(notes),
        {ranks: Curve.through(ranks, each) for ranks, each in points.items() if each},
        slowdowns,
        cells,
        # its memory does not matter: one rank with the whole state has been measured on it
        Device(measured.device, precision, peak_flops(measured.device, precision), flops),
    )


def _profile(measured: StepProfile, shape: ModelConfig | None) -> Profile:
    """With the numbers of `shape` in place of those that the file has or lacks."""
    blocks = {number[1] for g in measured.gradients if (number := re.search(r"\.(\d+)\.", g.name or ""))}
    return Profile(
        measured.whole_s,
        measured.backward_s,
        measured.optimizer_s or 0.0,
        tuple(Gradient(g.bytes, g.ready_s) for g in measured.gradients),
        measured.micro_batch,
        measured.sequence_length,
        layers=shape.num_layers if shape else measured.num_layers or len(blocks),
        hidden_size=shape.hidden_size if shape else measured.hidden_size or 0,
        heads=shape.num_heads if shape else measured.num_heads or 0,
        activation_bytes=ACTIVATION_BYTES.get(measured.precision or "", 4.0),
        parameter_bytes=measured.width,
        gradient_bytes=measured.width,
    )


def _as_fast_as_its_run(profile: Profile, scaling: Scaling, notes: list[str]) -> Profile:
    """As fast as the run of one rank, which loads data and logs too; `notes` then says so."""
    alone = scaling.alone()
    if alone is None or alone.step_s is None:
        return profile
    micro_s = (alone.step_s - profile.optimizer_s) / alone.accumulation
    if micro_s <= 0:
        return profile
    notes.append(f"one rank's step is the measured one, {alone.step_s:.4g} s (cell {alone.id})")
    return with_micro(profile, micro_s * profile.micro_batch / alone.micro_batch)


def _slowdowns(cells: Sequence[CellMeasurement]) -> dict[int, float]:
    """At least 1: that N copies are faster than as many lone ranks is noise, or a slow baseline."""
    times: dict[int, list[float]] = {}
    for cell in cells:
        measured = cell.ceiling_efficiency and is_measurable(cell.ceiling_efficiency_ci95)
        if cell.ceiling_efficiency and measured and cell.kind == "run" and cell.tensor == 1:
            times.setdefault(cell.world_size, []).append(max(1.0, 1 / cell.ceiling_efficiency))
    return {ranks: statistics.median(values) for ranks, values in times.items()}


def from_rate(model: str, seq_per_s: float, micro: int, accumulation: int, gpu: str | None) -> Source:
    """No profile: one rank's sequences per second, and readiness from the layers. Raises ConfigError."""
    if not RATES[0] <= seq_per_s <= RATES[1]:
        raise ConfigError([f"--seq-per-s: {seq_per_s:g} is not between {RATES[0]:g} and {RATES[1]:g}"])
    if not 0 < micro <= MAX_MICRO:
        raise ConfigError([f"--micro: {micro} is not between 1 and {MAX_MICRO:,}"])
    shape, length, parameters, flops = find_model(model)
    optimizer_s, device = 0.0, None
    notes = [
        f"{seq_per_s:g} sequences/s on one rank at accumulation {accumulation}; when each gradient "
        "is ready is estimated from the layers"
    ]
    if gpu is None:
        notes.append("optimizer time not told apart from the micro batches: give --gpu")
    else:
        card = _find_gpu(gpu)
        optimizer_s = parameters * ADAM_BYTES / (card.memory_gb_s * GB * constant("memory_reach"))
        notes.append(f"optimizer {1000 * optimizer_s:.1f} ms: fused AdamW at {gpu}'s memory bandwidth")
        precision = "bf16" if card.peak("bf16") else "fp16"
        device = Device(gpu, precision, card.peak(precision), flops, card.memory_gib)
    micro_s = micro / seq_per_s - optimizer_s / accumulation
    if micro_s <= 0:
        raise ConfigError([f"--seq-per-s: {seq_per_s:g} leaves no time beside the optimizer; check --micro"])
    backward_s = BACKWARD * micro_s
    profile = Profile(
        micro_s,
        backward_s,
        optimizer_s,
        tuple(timeline.from_layers(shape, parameters, 4.0, backward_s)),
        micro,
        length,
        layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        heads=shape.num_heads,
        activation_bytes=2.0,
    )
    return Source(profile, accumulation, constant("device_spread"), tuple(notes), device=device)


def _find_gpu(name: str) -> Gpu:
    """Raises ConfigError."""
    gpus = hardware().gpus
    if name not in gpus:
        raise ConfigError([f"--gpu: {name!r} is not in hardware.yaml; use one of {', '.join(gpus)}"])
    return gpus[name]
