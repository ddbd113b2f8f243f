"""What a scaling prediction starts from: a measured profile, or a rate and the layers of a model."""

from __future__ import annotations

import dataclasses
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_dp.config import Config, ConfigError, ModelConfig, load_config
from bert_dp.cost import flops_per_token, num_parameters, peak_flops
from launcher import results
from launcher.plan import timeline
from launcher.plan.device import Device
from launcher.plan.hardware import Gpu, constant, hardware
from launcher.plan.links import GB, Curve, curve
from launcher.plan.predict import Profile, default_spread, with_micro
from launcher.plan.timeline import Gradient
from launcher.results import Cell

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
BERT_MASK_RATE = 0.15
POSITIONS = 512  # of BERT's learned ones, whatever the sequence length
ADAM_BYTES = 28  # per parameter: reads p, g, m, v, writes p, m, v in fp32
BACKWARD = 2 / 3  # of a micro batch: every product of the forward pass has two in the backward pass
RATES = 1e-6, 1e9  # sequences/s that one rank may have
MAX_MICRO = 1_000_000
SAME = 0.01  # by which the parameters of --model and of the profile may differ
NARROW = {"bf16": 2.0, "fp16": 2.0, "fp64": 8.0}
GIVE = (
    "give what `bert-dp scale` writes, scaling.json or profile.json, or --model with --seq-per-s and --micro"
)


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
    cells: Sequence[Cell] = ()
    """Measured cells of the same benchmark, to set beside the prediction."""
    device: Device | None = None

    def slowdown(self, ranks: int) -> float:
        """As measured; between and beyond, that of the next smaller count."""
        smaller = [count for count in self.slowdowns if count <= ranks]
        return self.slowdowns[max(smaller)] if smaller else 1.0


def choose(
    path: Path | None,
    model: str | None,
    seq_per_s: float | None,
    micro: int | None,
    gpu: str | None,
    accumulation: int,
) -> Source:
    """From the options of the verb: a measured file, or a rate. Raises ConfigError."""
    rate = {"--gpu": gpu, "--seq-per-s": seq_per_s, "--micro": micro}
    if path is not None:
        if given := [option for option, value in rate.items() if value is not None]:
            raise ConfigError(
                [
                    f"{option}: is for a prediction without --from; the file has been measured, "
                    f"so leave {option} out"
                    for option in given
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
        data = results.load(path, GIVE)
        measured = read_measured(data, str(path))
    except ConfigError as error:
        raise ConfigError([f"--from: {issue}" for issue in error.issues]) from None
    return from_scaling(measured, str(path), model)


def read_measured(data: Any, name: str) -> results.Scaling:
    """What scaling.json holds, or profile.json, which is the profile of one without cells. Raises
    ConfigError."""
    if isinstance(data, dict) and "gradients" in data:
        return results.Scaling(profile=results.parse(data, results.Profile, name))
    if not isinstance(data, dict) or "profile" not in data:
        raise ConfigError([f"{name} holds no profile; {GIVE}"])
    return results.parse(data, results.Scaling, name)


def from_scaling(scaling: results.Scaling, name: str, model: str | None = None) -> Source:
    """The same of what the file called `name` holds."""
    facts = scaling.profile
    if facts is None:
        raise ConfigError([f"--from: {name} holds no profile; {GIVE}"])
    measured = _profile(facts, _shape(model, facts, name) if model else None)
    links = [link for link in scaling.links if link.points]
    curves = {
        link.world_size: curve(link.world_size, [(p.bytes, p.seconds) for p in link.points]) for link in links
    }
    settings = scaling.settings
    notes = [f"profile of {facts.device}, {facts.precision or 'precision not told'}: {name}"]
    cells = [cell for cell in scaling.cells if cell.status == "ok"]
    measured = _as_measured(measured, scaling, notes)
    slowdowns = _slowdowns(cells)
    if slowdowns:
        counts = ", ".join(f"{n}: x {s:.3f}" for n, s in sorted(slowdowns.items()))
        notes.append(f"computation slowed as the measured ceiling says ({counts}), beyond as the last")
    flops = settings.flops_per_token
    if flops is None and model:
        flops = _model_flops(model)
    precision = facts.precision or ""
    # its memory does not matter: one rank with the whole state has been measured on it
    device = Device(facts.device, precision, peak_flops(facts.device, precision), flops)
    return Source(
        measured,
        settings.accumulation or 1,
        default_spread(facts.device),
        tuple(notes),
        curves,
        slowdowns,
        cells,
        device,
    )


def _as_measured(profile: Profile, scaling: results.Scaling, notes: list[str]) -> Profile:
    """As fast as the run of one rank, which loads data and logs too."""
    alone = scaling.alone()
    if alone is None or alone.step_s is None:
        return profile
    micro_s = (alone.step_s - profile.optimizer_s) / alone.accumulation
    if micro_s <= 0:
        return profile
    notes.append(f"one rank's step is the measured one, {alone.step_s:.4g} s (cell {alone.id})")
    return with_micro(profile, micro_s * profile.micro_batch / alone.micro_batch)


def from_rate(model: str, seq_per_s: float, micro: int, accumulation: int, gpu: str | None) -> Source:
    """No profile: one rank's sequences per second, and readiness from the layers. Raises ConfigError."""
    if not RATES[0] <= seq_per_s <= RATES[1]:
        raise ConfigError([f"--seq-per-s: {seq_per_s:g} is not between {RATES[0]:g} and {RATES[1]:g}"])
    if not 0 < micro <= MAX_MICRO:
        raise ConfigError([f"--micro: {micro} is not between 1 and {MAX_MICRO:,}"])
    shape, length, count = find_model(model)
    optimizer_s = 0.0
    notes = [
        f"{seq_per_s:g} sequences/s on one rank at accumulation {accumulation}; readiness from the layers"
    ]
    device = None
    if gpu is None:
        notes.append("optimizer time not told apart from the micro batches: give --gpu")
    else:
        card = _find_gpu(gpu)
        optimizer_s = count * ADAM_BYTES / (card.memory_gb_s * GB * constant("memory_reach"))
        notes.append(f"optimizer {1000 * optimizer_s:.1f} ms: fused AdamW at {gpu}'s memory bandwidth")
        precision = "bf16" if card.peak("bf16") else "fp16"
        device = Device(gpu, precision, card.peak(precision), _model_flops(model), card.memory_gib)
    micro_s = micro / seq_per_s - optimizer_s / accumulation
    if micro_s <= 0:
        raise ConfigError([f"--seq-per-s: {seq_per_s:g} leaves no time beside the optimizer; check --micro"])
    gradients = timeline.from_layers(shape, length, 4.0, BACKWARD * micro_s)
    profile = Profile(
        micro_s,
        BACKWARD * micro_s,
        optimizer_s,
        tuple(gradients),
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


def _model_flops(name: str) -> float:
    """Of a token, forward and backward."""
    if name in MODELS:
        return flops_per_token(MODELS[name], find_model(name)[1], BERT_MASK_RATE)
    config = _configuration(name)
    return flops_per_token(config.model, config.data.sequence_length, config.objective.mask_rate)


def find_model(name: str) -> tuple[ModelConfig, int, int]:
    """(shape, sequence length, parameters) of bert-base, bert-large or a configuration."""
    if name in MODELS:
        return MODELS[name], 128, num_parameters(MODELS[name], POSITIONS)
    config = _configuration(name)
    length = config.data.sequence_length
    return config.model, length, num_parameters(config.model, length)


def _configuration(name: str) -> Config:
    from launcher.job import find_config

    return load_config(find_config(name))


def _shape(model: str, facts: results.Profile, name: str) -> ModelConfig:
    """Raises ConfigError when it is not the model that was profiled."""
    shape, _, count = find_model(model)
    if facts.parameters and abs(count / facts.parameters - 1) > SAME:
        raise ConfigError(
            [
                f"--model: {model} has {count:,} parameters, the profile in {name} "
                f"{facts.parameters:,}; name the configuration that was measured"
            ]
        )
    return shape


def _profile(facts: results.Profile, shape: ModelConfig | None) -> Profile:
    blocks = {number[1] for g in facts.gradients if (number := re.search(r"\.(\d+)\.", g.name or ""))}
    return Profile(
        facts.whole_s,
        facts.backward_s,
        facts.optimizer_s or 0.0,
        tuple(Gradient(g.bytes, g.ready_s) for g in facts.gradients),
        facts.micro_batch,
        facts.sequence_length,
        layers=shape.num_layers if shape else facts.num_layers or len(blocks),
        hidden_size=shape.hidden_size if shape else facts.hidden_size or 0,
        heads=shape.num_heads if shape else facts.num_heads or 0,
        activation_bytes=NARROW.get(facts.precision or "", 4.0),
        parameter_bytes=facts.width,
        gradient_bytes=facts.width,
    )


def _slowdowns(cells: Sequence[Cell]) -> dict[int, float]:
    """At least 1: that N copies are faster than as many lone ranks is noise, or a slow baseline."""
    times: dict[int, list[float]] = {}
    for cell in cells:
        if cell.ceiling_efficiency and cell.kind == "run" and cell.tensor == 1:
            times.setdefault(cell.world_size, []).append(max(1.0, 1 / cell.ceiling_efficiency))
    return {ranks: statistics.median(values) for ranks, values in times.items()}
