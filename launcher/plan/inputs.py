"""What a scaling prediction starts from: a measured profile, or a rate and the layers of a model."""

from __future__ import annotations

import dataclasses
import json
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_dp.config import ConfigError, ModelConfig, load_config
from bert_dp.cost import num_parameters
from launcher.plan import timeline
from launcher.plan.hardware import constant, hardware
from launcher.plan.links import GB, Curve, curve
from launcher.plan.predict import Profile, default_spread, with_micro
from launcher.plan.timeline import Gradient
from launcher.runs import number

_BERT: dict[str, Any] = {
    "vocab_size": 30_522, "position": "learned", "mlp": "gelu", "bias": True, "head": "dense"
}  # fmt: skip
MODELS = {
    "bert-base": ModelConfig(**_BERT, hidden_size=768, num_layers=12, num_heads=12, intermediate_size=3072),
    "bert-large": ModelConfig(**_BERT, hidden_size=1024, num_layers=24, num_heads=16, intermediate_size=4096),
}
POSITIONS = 512  # of BERT's learned ones, whatever the sequence length
ADAM_BYTES = 28  # per parameter: reads p, g, m, v, writes p, m, v in fp32
BACKWARD = 2 / 3  # of a micro batch: every product of the forward pass has two in the backward pass
NARROW = {"bf16": 2.0, "fp16": 2.0, "fp64": 8.0}


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
    cells: Sequence[Mapping[str, Any]] = ()
    """Measured cells of the same benchmark, to set beside the prediction."""

    def slowdown(self, ranks: int) -> float:
        """As measured; between and beyond, that of the next smaller count."""
        known = [count for count in self.slowdowns if count <= ranks]
        return self.slowdowns[max(known)] if known else 1.0


def from_file(path: Path, model: str | None = None) -> Source:
    """scaling.json or profile.json; `model` gives the shape that tensor parallelism needs. Raises
    ConfigError."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError([f"--from: {path} cannot be read ({error.strerror}); give scaling.json or "
                           "profile.json of `bert-dp scale`"]) from None  # fmt: skip
    except ValueError as error:
        raise ConfigError([f"--from: {path} is not JSON ({error})"]) from None
    return from_data(data, str(path), model)


def from_data(data: Any, name: str, model: str | None = None) -> Source:
    """The same of what such a file holds."""
    whole = data if isinstance(data, dict) else {}
    profile = whole.get("profile", whole)
    if not isinstance(profile, dict) or "gradients" not in profile:
        raise ConfigError([f"--from: {name} holds no profile (gradients with ready_s); give what "
                           "`bert-dp scale` writes, or --model with --seq-per-s and --micro"])  # fmt: skip
    shape = find_model(model)[0] if model else None
    try:
        return _source(whole, profile, name, shape)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError([f"--from: {name} is damaged ({type(error).__name__}: {error})"]) from None


def _source(
    whole: Mapping[str, Any], profile: Mapping[str, Any], name: str, shape: ModelConfig | None
) -> Source:
    measured = _profile(profile, shape)
    curves = {c.ranks: c for c in (_curve(link) for link in whole.get("links") or ()) if c}
    accumulation = int((whole.get("settings") or {}).get("accumulation") or 1)
    device = str(profile.get("device", "GPU"))
    notes = [f"profile of {device}, {profile.get('precision', 'precision not told')}: {name}"]
    cells = [cell for cell in whole.get("cells") or () if cell.get("status") == "ok"]
    alone = next((c for c in cells if c["id"] == whole.get("baseline")), None)
    if alone and (median := number((alone.get("step_time_s") or {}).get("median"))):
        micro_s = (median - measured.optimizer_s) / int(alone["accumulation"])
        if micro_s > 0:
            measured = with_micro(measured, micro_s)
            notes.append(f"one rank's step is the measured one, {median:.4g} s (cell {alone['id']})")
    slowdowns = _slowdowns(cells)
    if slowdowns:
        counts = ", ".join(f"{n}: x {s:.3f}" for n, s in sorted(slowdowns.items()))
        notes.append(f"computation slowed as the measured ceiling says ({counts}), beyond as the last")
    return Source(measured, accumulation, default_spread(device), tuple(notes), curves, slowdowns, cells)


def from_rate(model: str, seq_per_s: float, micro: int, accumulation: int, gpu: str | None) -> Source:
    """No profile: one rank's sequences per second, and readiness from the layers. Raises ConfigError."""
    shape, length, count = find_model(model)
    optimizer_s = 0.0
    notes = [
        f"{seq_per_s:g} sequences/s on one rank at accumulation {accumulation}; readiness from the layers"
    ]
    if gpu is None:
        notes.append("optimizer time not told apart from the micro batches: give --gpu")
    elif gpu not in hardware().gpus:
        raise ConfigError(
            [f"--gpu: {gpu!r} is not in hardware.yaml; use one of {', '.join(hardware().gpus)}"]
        )
    else:
        bandwidth = hardware().gpus[gpu].memory_gb_s * GB * constant("memory_reach")
        optimizer_s = count * ADAM_BYTES / bandwidth
        notes.append(f"optimizer {1000 * optimizer_s:.1f} ms: fused AdamW at {gpu}'s memory bandwidth")
    micro_s = micro / seq_per_s - optimizer_s / accumulation
    if micro_s <= 0:
        raise ConfigError([f"--seq-per-s: {seq_per_s:g} leaves no time beside the optimizer; check --micro"])
    gradients = timeline.from_layers(shape, length, 4.0, BACKWARD * micro_s)
    profile = Profile(
        micro_s, BACKWARD * micro_s, optimizer_s, tuple(gradients), micro, length,
        layers=shape.num_layers, hidden_size=shape.hidden_size, activation_bytes=2.0,
    )  # fmt: skip
    return Source(profile, accumulation, constant("device_spread"), tuple(notes))


def find_model(name: str) -> tuple[ModelConfig, int, int]:
    """(shape, sequence length, parameters) of bert-base, bert-large or a configuration."""
    if name in MODELS:
        return MODELS[name], 128, num_parameters(MODELS[name], POSITIONS)
    from launcher.training import find_config

    config = load_config(find_config(name, None))
    length = config.data.sequence_length
    return config.model, length, num_parameters(config.model, length)


def _profile(data: Mapping[str, Any], shape: ModelConfig | None) -> Profile:
    def above_zero(value: object, what: str) -> float:
        found = number(value)
        if found is None or found <= 0:
            raise ValueError(f"{what} is {value!r}, not a number above 0")
        return found

    gradients = []
    for g in data["gradients"]:
        ready = number(g["ready_s"])
        if ready is None or ready < 0:
            raise ValueError(f"ready_s of {g.get('name')} is {g['ready_s']!r}")
        gradients.append(Gradient(above_zero(g["bytes"], f"bytes of {g.get('name')}"), ready))
    size, parameters = sum(g.size for g in gradients), number(data.get("parameters"))
    width = above_zero(size, "the size of all gradients") / parameters if parameters else 4.0
    blocks = {found[1] for g in data["gradients"] if (found := re.search(r"\.(\d+)\.", str(g.get("name"))))}
    backward_s = above_zero(data["backward_s"], "backward_s")
    micro_s = data.get("micro_s")
    if micro_s is None:
        micro_s = backward_s + above_zero(data["forward_s"], "forward_s")
    return Profile(
        above_zero(micro_s, "micro_s"), backward_s, number(data.get("optimizer_s")) or 0.0, tuple(gradients),
        int(above_zero(data["micro_batch"], "micro_batch")),
        int(above_zero(data["sequence_length"], "sequence_length")), layers=len(blocks),
        hidden_size=shape.hidden_size if shape else 0,
        activation_bytes=NARROW.get(str(data.get("precision")), 4.0),
        parameter_bytes=width, gradient_bytes=width,
    )  # fmt: skip


def _curve(link: Mapping[str, Any]) -> Curve | None:
    points = [(float(p["bytes"]), float(p["seconds"])) for p in link["points"]]
    return curve(int(link["world_size"]), points) if points else None


def _slowdowns(cells: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    found: dict[int, list[float]] = {}
    for cell in cells:
        ceiling = number(cell.get("ceiling_efficiency"))
        if ceiling and cell.get("kind", "run") == "run" and cell.get("tensor", 1) == 1:
            found.setdefault(int(cell["world_size"]), []).append(1 / ceiling)
    return {ranks: statistics.median(values) for ranks, values in found.items()}
