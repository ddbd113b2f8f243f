"""The step of N ranks from that of one: T = (accumulation x T_micro + T_optimizer) x slowest rank + exposed.

Pure functions, seconds and bytes. What a rank sends is what our engines send (bert_dp/parallel): DDP one
all-reduce a step; ZeRO-1 a reduction to each tensor's owner, and the weights back after the step; FSDP the
blocks' weights for each micro batch and a reduce-scatter a step; tensor parallelism four all-reduces of the
activations per block and micro batch.
"""

from __future__ import annotations

import dataclasses
import statistics

from bert_dp.cost import GIB
from launcher.plan import timeline
from launcher.plan.hardware import constant
from launcher.plan.links import Fabric
from launcher.plan.timeline import Gradient

ENGINES = ("ddp", "zero1", "fsdp")
TENSOR_REDUCTIONS = 4  # of the activations, per block: two forward, two backward (arXiv 1909.08053)
MOMENTS = 2  # of Adam, per parameter


@dataclasses.dataclass(frozen=True)
class Profile:
    """One rank, measured alone. Seconds of one micro batch and of one optimizer step."""

    micro_s: float
    backward_s: float
    optimizer_s: float
    gradients: tuple[Gradient, ...]
    micro_batch: int
    sequence_length: int
    layers: int = 0
    hidden_size: int = 0
    heads: int = 0
    """Of attention; tensor parallelism divides them. 0 here and above: not known."""
    activation_bytes: float = 4.0
    """Bytes of an activation and of a gathered weight, per number."""
    parameter_bytes: float = 4.0
    """Bytes of a parameter as the optimizer holds it."""
    gradient_bytes: float = 4.0
    """Bytes of a gradient as it is sent."""

    @property
    def gradient_size(self) -> float:
        return sum(gradient.size for gradient in self.gradients)

    @property
    def weight_size(self) -> float:
        return self.gradient_size / self.gradient_bytes * self.parameter_bytes


@dataclasses.dataclass(frozen=True)
class Scenario:
    """How many ranks train, how, and over which links."""

    fabric: Fabric
    ranks: int = 1
    engine: str = "ddp"
    """One of ENGINES."""
    tensor: int = 1
    accumulation: int = 1
    spread: float = 0.0
    """Standard deviation / mean of the ranks' speed; all wait for the slowest."""
    slowdown: float = 1.0
    """Of the computation when all devices of a machine work: shared memory bandwidth, power (its ceiling)."""
    bucket_bytes: float = timeline.BUCKET
    first_bucket: float | None = timeline.FIRST_BUCKET
    overlap: bool = True
    """Reductions run beside the backward pass; False: one bucket after it."""
    gain: float = 0.21
    """Share of the hidden communication time that is gained (hardware.yaml, overlap_gain)."""

    @property
    def replicas(self) -> int:
        return self.ranks // self.tensor


@dataclasses.dataclass(frozen=True)
class PredictedStep:
    """A step of N ranks; seconds. The parts sum to `step_s`."""

    ranks: int
    step_s: float
    compute_s: float
    optimizer_s: float
    straggler_s: float
    exposed_s: float
    tokens_per_s: float
    efficiency: float
    """tokens/s over N x tokens/s of one rank with the same accumulation."""


def predict(profile: Profile, scenario: Scenario) -> PredictedStep:
    """Raises ValueError when the tensor size does not divide the ranks."""
    if scenario.ranks % scenario.tensor:
        raise ValueError(f"tensor {scenario.tensor} does not divide {scenario.ranks} ranks")
    a = scenario.accumulation
    compute = a * profile.micro_s * scenario.slowdown / scenario.tensor
    optimizer = profile.optimizer_s * scenario.slowdown * _optimizer_share(profile, scenario)
    slow = slowest(scenario.ranks, scenario.spread)
    straggler = (compute + optimizer) * (slow - 1)
    exposed = exposed_s(profile, scenario)
    step = compute + optimizer + straggler + exposed
    tokens = scenario.replicas * a * profile.micro_batch * profile.sequence_length
    alone = a * profile.micro_batch * profile.sequence_length / (a * profile.micro_s + profile.optimizer_s)
    return PredictedStep(
        scenario.ranks,
        step,
        compute,
        optimizer,
        straggler,
        exposed,
        tokens / step,
        tokens / step / (scenario.ranks * alone),
    )


def slowest(ranks: int, spread: float) -> float:
    """Expected time of the slowest of `ranks` normally distributed ones / the mean (Blom 1958)."""
    return 1 + spread * statistics.NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))


def exposed_s(profile: Profile, scenario: Scenario) -> float:
    """Seconds of a step that only communication takes."""
    seconds = 0.0
    if scenario.tensor > 1:
        seconds += scenario.accumulation * _tensor_s(profile, scenario)
    if scenario.replicas > 1:
        seconds += (
            _fsdp_s(profile, scenario) if scenario.engine == "fsdp" else _reduction_s(profile, scenario)
        )
    return seconds


def _optimizer_share(profile: Profile, scenario: Scenario) -> float:
    """Of the whole optimizer step that the busiest rank does: ZeRO-1 divides by whole tensors, so that is at
    least the largest one."""
    share = 1 / scenario.tensor
    if scenario.engine == "fsdp":
        return share / scenario.replicas
    if scenario.engine == "zero1":
        largest = max(gradient.size for gradient in profile.gradients) / profile.gradient_size
        return share * max(1 / scenario.replicas, largest)
    return share


def _reduction_s(profile: Profile, scenario: Scenario) -> float:
    """Gradients, once a step; with ZeRO-1 the weights come back after it, which nothing hides."""
    fabric, n, t = scenario.fabric.replicas(scenario.tensor), scenario.replicas, scenario.tensor

    def reduction(size: float) -> float:
        return fabric.rooted_seconds(size, n) if scenario.engine == "zero1" else fabric.seconds(size, n)

    scale = scenario.slowdown / t
    gradients = [Gradient(g.size / t, g.ready * scale) for g in profile.gradients]
    backward = profile.backward_s * scale
    if scenario.overlap:
        fused = timeline.buckets(gradients, scenario.bucket_bytes, scenario.first_bucket)
        seconds = timeline.exposed(fused, backward, reduction, scenario.gain)
    else:
        seconds = reduction(profile.gradient_size / t)
    if scenario.engine == "zero1":
        parts = max(1, round(profile.weight_size / t / scenario.bucket_bytes))
        seconds += parts * fabric.rooted_seconds(profile.weight_size / t / parts, n)
    return seconds


def _fsdp_s(profile: Profile, scenario: Scenario) -> float:
    """Weights are gathered block by block, forward and again backward, one block ahead of the computation, in
    every micro batch; gradients go by reduce-scatter in the last. The rest of the model is one more block."""
    fabric, n, t = scenario.fabric.replicas(scenario.tensor), scenario.replicas, scenario.tensor
    blocks = max(1, profile.layers) + 1
    numbers = profile.gradient_size / profile.gradient_bytes / t
    gather = fabric.seconds(profile.weight_size / t / blocks, n, "all_gather")
    scatter = fabric.seconds(numbers * profile.gradient_bytes / blocks, n, "reduce_scatter")
    scale = scenario.slowdown / t / blocks
    forward, backward = (profile.micro_s - profile.backward_s) * scale, profile.backward_s * scale
    a = scenario.accumulation
    seconds = 0.0
    for communication, computation, times in (
        (gather, forward, a),
        (gather, backward, a - 1),
        (gather + scatter, backward, 1),
    ):
        ideal = communication + (blocks - 1) * max(0.0, communication - computation)
        whole = blocks * communication
        seconds += times * (whole - scenario.gain * (whole - ideal))
    return seconds


def _tensor_s(profile: Profile, scenario: Scenario) -> float:
    """All-reduces of the activations in one micro batch: exposed, but for the backward ones beside the
    product that gives the weight's gradient, half of a block's backward time."""
    t = scenario.tensor
    size = profile.micro_batch * profile.sequence_length * profile.hidden_size * profile.activation_bytes
    once = scenario.fabric.seconds(size, t)
    blocks = max(1, profile.layers)
    half = TENSOR_REDUCTIONS // 2
    window = profile.backward_s * scenario.slowdown / t / blocks / 2
    hidden = scenario.gain * min(half * once, window)
    look_up = once
    return blocks * (TENSOR_REDUCTIONS * once - hidden) + look_up


def state_gib(profile: Profile, scenario: Scenario) -> float:
    """Weights, gradients and optimizer state of one rank, GiB, as the engine divides them; a lower bound,
    without activations. fsdp keeps whole gradients between the micro batches of a step."""
    weights = profile.weight_size / scenario.tensor
    optimizer, gradients, n = MOMENTS * weights, weights, scenario.replicas
    if scenario.engine in ("zero1", "fsdp"):
        optimizer /= n
    if scenario.engine == "fsdp":
        weights /= n
        gradients = gradients if scenario.accumulation > 1 else gradients / n
    return (weights + gradients + optimizer) / GIB


def with_micro(profile: Profile, micro_s: float) -> Profile:
    """The same profile, faster or slower: backward and ready times in proportion."""
    scale = micro_s / profile.micro_s
    gradients = tuple(Gradient(g.size, g.ready * scale) for g in profile.gradients)
    return dataclasses.replace(
        profile, micro_s=micro_s, backward_s=profile.backward_s * scale, gradients=gradients
    )


def with_micro_batch(profile: Profile, micro_batch: int) -> Profile:
    """The same profile with another micro batch, as fast per sequence."""
    scaled = with_micro(profile, profile.micro_s * micro_batch / profile.micro_batch)
    return dataclasses.replace(scaled, micro_batch=micro_batch)


def with_gradient_bytes(profile: Profile, width: float) -> Profile:
    """The same profile with gradients sent in at most `width` bytes per number."""
    if width >= profile.gradient_bytes:
        return profile
    share = width / profile.gradient_bytes
    gradients = tuple(Gradient(g.size * share, g.ready) for g in profile.gradients)
    return dataclasses.replace(profile, gradients=gradients, gradient_bytes=width)


def default_spread(device: str) -> float:
    """Of the speed of devices of one kind; a CPU's ranks are one device's parts and differ by its ceiling."""
    return 0.0 if device.lower().startswith("cpu") else constant("device_spread")
