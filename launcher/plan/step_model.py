"""Predict the step time of N ranks from the profile of one rank and the links between them.

    step = (accumulation x micro batch + optimizer) x factor of the slowest rank + exposed communication

The functions are pure, with times in seconds and sizes in bytes. docs/definitions.md lists the equations,
which cover the messages sent by `bert_dp/parallel`. hardware.yaml lists GPUs, links, latencies and constants.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from bert_dp.config import ModelConfig, read_yaml
from bert_dp.cost import linear_parameters
from launcher.scale.models import MeasuredGradient, PredictedRow, PredictedSplit, StepProfile

FILE = Path(__file__).with_name("hardware.yaml")
GB, MIB = 1e9, 2**20
FIRST_BUCKET, BUCKET = 1 * MIB, 25 * MIB  # default bucket sizes of torch's DDP
PLATEAU = 1.9  # latency factor for large messages in multi-node rings with NCCL's Simple protocol (tuning.cc)
TREE_SHARE = 0.9  # bandwidth of a tree / bandwidth of a ring (NCCL tuning.cc)
TENSOR_REDUCTIONS = 4  # all-reduces of activations per block: two forward, two backward (arXiv 1909.08053)
ACTIVATION_BYTES = {"bf16": 2, "fp16": 2, "fp64": 8}  # bytes per value; 4 in other precisions
Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "rooted"]


@cache
def hardware() -> dict[str, Any]:
    """Read hardware.yaml."""
    return dict(read_yaml(FILE))


def constant(name: str) -> float:
    """Return the value of a constant in hardware.yaml."""
    return float(hardware()["constants"][name]["value"])


@dataclasses.dataclass(frozen=True)
class LinkSpec:
    """An entry of `links` in hardware.yaml."""

    kind: str
    gb_s: float
    reach: float
    source: str = ""
    gpus_gb_s: Mapping[int, float] = dataclasses.field(default_factory=dict)

    def bus_gb_s(self, count: int) -> float:
        """Return the bus bandwidth of a large all-reduce over `count` GPUs or nodes, in GB/s."""
        measured = [n for n in self.gpus_gb_s if n <= count]
        return (self.gpus_gb_s[max(measured)] if measured else self.gb_s) * self.reach


@cache
def find_link(name: str) -> LinkSpec:
    """Return the named link from hardware.yaml."""
    return LinkSpec(**hardware()["links"][name])


class ProtocolSpec(NamedTuple):
    """A protocol on one kind of link: latencies in seconds, and the share of bandwidth that carries data."""

    start: float
    hop: float
    tree_start: float
    tree: float | None
    share: float


@cache
def find_protocols(kind: str) -> dict[str, ProtocolSpec]:
    """Return the protocols of one kind of link, by protocol name."""
    rows = hardware()["latencies"][kind]["protocols"]
    return {name: ProtocolSpec(**row) for name, row in rows.items()}


def interpolate(x: float, points: Mapping[float, float]) -> float:
    """Interpolate `points` (x -> y) linearly in log-log space, or extrapolate from the nearest two points."""
    known = sorted(points)
    i = min(max(bisect.bisect_left(known, x), 1), len(known) - 1)
    low, high = known[i - 1], known[i]
    share = math.log(x / low) / math.log(high / low)
    return points[low] * math.pow(points[high] / points[low], share)


@dataclasses.dataclass(frozen=True)
class AllReduceCurve:
    """Measured times of all-reduces over `ranks` ranks; `points` maps sizes in bytes to seconds."""

    ranks: int
    points: Mapping[float, float]

    def seconds(self, size: float) -> float:
        """Interpolate the time. Below the measured sizes it is constant; above, proportional to `size`."""
        least, greatest = min(self.points), max(self.points)
        if size <= least:
            return self.points[least]
        if size >= greatest:
            return self.points[greatest] * size / greatest
        return interpolate(size, self.points)


@dataclasses.dataclass(frozen=True)
class Fabric:
    """Links between ranks. Ranks fill one node after another.

    A ring over the GPUs of several nodes enters and leaves each node once, through all NICs of the node, so
    bus bandwidth = min(link within the node, sum of the NICs). The bandwidth, the latencies and the choice
    between ring and tree follow NCCL's tuning model (src/graph/tuning.cc).
    """

    gpus_per_node: int
    intra: LinkSpec | None  # None if unknown but faster than `inter`
    inter: LinkSpec | None = None
    nics: float = 1  # NICs per node
    curve: AllReduceCurve | None = None  # used instead of `intra` if one node holds all ranks
    speed: float = 1.0  # multiplies every bandwidth and divides the times of `curve`

    def nodes(self, ranks: int) -> int:
        """Return the number of nodes that `ranks` ranks occupy."""
        return math.ceil(ranks / self.gpus_per_node)

    def bus_gb_s(self, ranks: int) -> float:
        """Return the bus bandwidth of a large all-reduce, in GB/s."""
        rates = [self.intra.bus_gb_s(min(ranks, self.gpus_per_node))] if self.intra else []
        if self.nodes(ranks) > 1 and self.inter:
            rates.append(self.inter.bus_gb_s(self.nodes(ranks)) * self.nics)
        return self.speed * min(rates)

    def replicas(self, tensor: int) -> Fabric:
        """Return the part of the fabric that one gradient reduction can use. A replica consists of `tensor`
        neighbouring ranks. A reduction includes one rank per replica; `tensor` reductions share the NICs."""
        per_node = max(1, self.gpus_per_node // tensor)
        return dataclasses.replace(self, gpus_per_node=per_node, nics=self.nics / tensor)

    def seconds(self, size: float, ranks: int, kind: Collective = "all_reduce") -> float:
        """Return the seconds that a collective of `size` bytes per rank takes.

        Ranks in one node use `curve`, if set. Otherwise the fastest protocol and algorithm apply. "rooted" is
        a reduce to one rank or a broadcast from one rank along a chain that sends each byte once per hop.
        """
        if ranks <= 1 or size <= 0:
            return 0.0
        traversals = 2 if kind == "all_reduce" else 1
        share = 1.0 if kind == "rooted" else traversals * (ranks - 1) / ranks
        nodes = self.nodes(ranks)
        if self.curve is not None and nodes == 1:
            measured_share = 2 * (self.curve.ranks - 1) / self.curve.ranks
            return self.curve.seconds(size) / self.speed * share / measured_share
        bus = self.bus_gb_s(ranks) * GB
        across = traversals * (nodes - 1)
        times = []
        for near, far in self.protocols(ranks):
            latency = near.start + (traversals * (ranks - 1) - across) * near.hop + across * far.hop
            plateau = PLATEAU if nodes > 1 and near.share == 1 else 1.0
            times.append(plateau * latency + share * size / (bus * near.share))
            if kind == "all_reduce" and near.tree is not None and far.tree is not None:
                levels = (min(ranks, self.gpus_per_node) - 1) * near.tree + math.log2(nodes) * far.tree
                sending = 2 * size / (bus * TREE_SHARE * near.share)
                times.append(near.tree_start + 2 * levels + sending)
        return min(times)

    def protocols(self, ranks: int) -> list[tuple[ProtocolSpec, ProtocolSpec]]:
        """Return the specs (within a node, between nodes) of each protocol that both link kinds support."""
        outer = self.inter if self.nodes(ranks) > 1 else self.intra
        inner = self.intra or outer
        assert inner is not None
        assert outer is not None
        near, far = find_protocols(inner.kind), find_protocols(outer.kind)
        return [(near[name], far[name]) for name in near if name in far]


@dataclasses.dataclass(frozen=True)
class Scenario:
    """Number of ranks, their parallelism, and the links between them."""

    fabric: Fabric
    ranks: int = 1
    engine: str = "ddp"  # ddp, zero1 or fsdp
    tensor: int = 1
    accumulation: int = 1
    spread: float = 0.0  # relative standard deviation of the ranks' speeds; all wait for the slowest
    slowdown: float = 1.0  # factor on compute time when all devices are busy: 1 / the ceiling efficiency
    bucket_bytes: float = BUCKET
    first_bucket: float | None = FIRST_BUCKET
    sent_bytes: float = math.inf  # maximum bytes sent per gradient element
    overlap: bool = True  # True: reduce during the backward pass; False: reduce a single bucket after it
    gain: float = dataclasses.field(default_factory=lambda: constant("overlap_gain"))
    """Communication time that overlap hides, relative to the time that ideal overlap would hide."""

    @property
    def replicas(self) -> int:
        """Number of replicas of the model."""
        return self.ranks // self.tensor


def predict(profile: StepProfile, scenario: Scenario) -> PredictedRow:
    """Predict the step of a scenario. The tensor size must divide the number of ranks."""
    a, n = scenario.accumulation, scenario.ranks
    compute = a * profile.micro_s * scenario.slowdown / scenario.tensor
    optimizer = profile.optimizer_s * scenario.slowdown * _optimizer_share(profile, scenario)
    straggler = (compute + optimizer) * (slowest(n, scenario.spread) - 1)
    exposed = exposed_s(profile, scenario)
    step = compute + optimizer + straggler + exposed
    batch = scenario.replicas * a * profile.micro_batch
    alone = a * profile.micro_batch / (a * profile.micro_s + profile.optimizer_s)  # sequences/s of one rank
    efficiency = batch / step / (n * alone)
    return PredictedRow(
        world_size=n,
        tensor=scenario.tensor,
        accumulation=a,
        global_batch=batch,
        step_time_s=step,
        split_s=PredictedSplit(
            forward_backward=compute, optimizer=optimizer, straggler=straggler, exposed_comm=exposed
        ),
        exposed_comm_fraction=exposed / step,
        tokens_per_s=batch * profile.sequence_length / step,
        speedup=efficiency * n,
        efficiency=efficiency,
    )


def slowest(ranks: int, spread: float) -> float:
    """Return the expected maximum of `ranks` normally distributed step times with mean 1 (Blom 1958)."""
    return 1 + spread * statistics.NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))


def with_micro_s(profile: StepProfile, micro_s: float, micro_batch: int | None = None) -> StepProfile:
    """Return the profile as if a micro batch took `micro_s` seconds. `micro_batch`: new size, if changed."""
    scale = micro_s / profile.micro_s
    gradients = [
        MeasuredGradient.model_construct(bytes=g.bytes, ready_s=g.ready_s * scale) for g in profile.gradients
    ]
    changes = {"micro_s": micro_s, "backward_s": profile.backward_s * scale, "gradients": gradients}
    return profile.model_copy(update={**changes, "micro_batch": micro_batch or profile.micro_batch})


def with_micro_batch(profile: StepProfile, micro_batch: int) -> StepProfile:
    """Return the profile with a different micro batch and the same time per sequence."""
    return with_micro_s(profile, profile.micro_s * micro_batch / profile.micro_batch, micro_batch)


def layer_gradients(
    model: ModelConfig, parameters: int, width: float, backward_s: float
) -> list[MeasuredGradient]:
    """Estimate the sizes and ready times of a model's gradients. `width`: bytes per element.

    The gradients of the blocks are ready at equal intervals in the backward pass. The embedding's gradient,
    which covers all remaining `parameters`, is ready last, because the decoder is tied to the embedding.
    """
    blocks, inside = model.num_layers, linear_parameters(model)
    sizes = [*[inside / blocks] * blocks, parameters - inside]
    return [
        MeasuredGradient(bytes=size * width, ready_s=(i + 1) / (blocks + 1) * backward_s)
        for i, size in enumerate(sizes)
    ]


def _optimizer_share(profile: StepProfile, scenario: Scenario) -> float:
    """Return the busiest rank's share of the optimizer step."""
    share = 1.0 if scenario.engine == "ddp" else 1 / scenario.replicas
    if scenario.engine == "zero1":  # ZeRO-1 assigns whole tensors to ranks
        share = max(share, max(gradient.bytes for gradient in profile.gradients) / profile.size)
    return share / scenario.tensor


def exposed_s(profile: StepProfile, scenario: Scenario) -> float:
    """Return the seconds of exposed communication per step."""
    seconds = 0.0
    if scenario.tensor > 1:
        seconds += scenario.accumulation * _tensor_s(profile, scenario)
    if scenario.replicas > 1:
        seconds += (_fsdp_s if scenario.engine == "fsdp" else _reduction_s)(profile, scenario)
    return seconds


def _reduction_s(profile: StepProfile, scenario: Scenario) -> float:
    """Return the exposed seconds of a step's gradient reduction and, with ZeRO-1, weight broadcast."""
    fabric, n, t = scenario.fabric.replicas(scenario.tensor), scenario.replicas, scenario.tensor
    kind: Collective = "rooted" if scenario.engine == "zero1" else "all_reduce"
    width = min(1.0, scenario.sent_bytes / profile.width) / t
    if scenario.overlap:
        scale = scenario.slowdown / t
        buckets = fuse(
            [(g.bytes * width, g.ready_s * scale) for g in profile.gradients],
            scenario.bucket_bytes,
            scenario.first_bucket,
        )
        backward_s = profile.backward_s * scale
        seconds = outlast(buckets, backward_s, lambda size: fabric.seconds(size, n, kind), scenario.gain)
    else:
        seconds = fabric.seconds(profile.size * width, n, kind)
    if scenario.engine == "zero1":
        weights = profile.size / t
        parts = max(1, round(weights / scenario.bucket_bytes))
        seconds += parts * fabric.seconds(weights / parts, n, "rooted")
    return seconds


Bucket = tuple[float, float]
"""(bytes reduced together, seconds from the start of the backward pass until these bytes are ready)"""


def fuse(gradients: Sequence[Bucket], size: float, first: float | None = None) -> list[Bucket]:
    """Fuse gradients, in the order in which they are ready, into buckets of at least `size` bytes.

    If `first` is given, it replaces `size` for the first bucket. The last bucket may be smaller. No tensor is
    split. A bucket is ready when its last tensor is ready.
    """
    buckets: list[Bucket] = []
    total = last = 0.0
    for number, ready in sorted(gradients, key=lambda gradient: gradient[1]):
        total, last = total + number, ready
        if total >= (first if first is not None and not buckets else size):
            buckets.append((total, last))
            total = 0.0
    return [*buckets, (total, last)] if total else buckets


def outlast(
    buckets: Sequence[Bucket], backward_s: float, duration: Callable[[float], float], gain: float
) -> float:
    """Return the exposed seconds of reductions that overlap with the backward pass.

    Each reduction starts when its bucket is ready and the previous reduction is done. Overlap hides only the
    share `gain` of the time that it could hide. `duration` maps a reduction's bytes to seconds.
    """
    end = total = 0.0
    for size, ready in buckets:
        seconds = duration(size)
        end = max(ready, end) + seconds
        total += seconds
    ideal = min(total, max(0.0, end - backward_s))
    return total - gain * (total - ideal)


def _fsdp_s(profile: StepProfile, scenario: Scenario) -> float:
    """Return the exposed seconds of FSDP, which gathers weights one block ahead and scatters gradients."""
    fabric, n, t = scenario.fabric.replicas(scenario.tensor), scenario.replicas, scenario.tensor
    blocks = profile.num_layers + 1  # the embedding counts as a block
    gather = fabric.seconds(profile.size / t / blocks, n, "all_gather")
    scatter = fabric.seconds(profile.size / t / blocks, n, "reduce_scatter")
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


def _tensor_s(profile: StepProfile, scenario: Scenario) -> float:
    """Return the exposed seconds of the activations' all-reduces in one micro batch."""
    t, blocks = scenario.tensor, profile.num_layers
    numbers = profile.micro_batch * profile.sequence_length * profile.hidden_size
    once = scenario.fabric.seconds(numbers * ACTIVATION_BYTES.get(profile.precision, 4), t)
    # the backward all-reduces overlap with the weight gradients, which take half of a block's backward time
    window = profile.backward_s * scenario.slowdown / t / blocks / 2
    hidden = scenario.gain * min(TENSOR_REDUCTIONS // 2 * once, window)
    return blocks * (TENSOR_REDUCTIONS * once - hidden) + once  # one more for the embedding lookup
