"""What a collective costs: a ring or a tree over two levels of links, or a measured curve. Seconds and bytes.

A ring over the GPUs of several nodes enters and leaves each node once, through all its NICs together, so its
slowest hop decides: bus bandwidth = min(link within the node, sum of the NICs). This, the latencies and the
choice of the faster of ring and tree are NCCL's own model (src/graph/tuning.cc).
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Iterable
from typing import Self

from launcher.plan.hardware import Link, Protocol, hardware

GB = 1e9
PLATEAU = 1.9  # a ring over nodes waits longer per hop with large messages, protocol Simple (NCCL tuning.cc)
TREE_SHARE = 0.9  # of a ring's bandwidth that a tree gets (NCCL tuning.cc)
TRAVERSALS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}


@dataclasses.dataclass(frozen=True)
class Curve:
    """Measured all-reduce times over `ranks` ranks: (bytes, seconds), by size.

    Between two sizes the logarithm of the time is linear in that of the size. Below the smallest size the
    time stays the smallest's (latency); above the greatest it grows in proportion (bandwidth).
    """

    ranks: int
    points: tuple[tuple[float, float], ...]

    @classmethod
    def through(cls, ranks: int, points: Iterable[tuple[float, float]]) -> Self:
        """From points in any order; of several at one size the slowest counts."""
        return cls(ranks, tuple(dict(sorted(points)).items()))

    def scaled(self, factor: float) -> Curve:
        """`factor` times as fast at every size."""
        return Curve(self.ranks, tuple((size, seconds / factor) for size, seconds in self.points))

    def seconds(self, size: float) -> float:
        """Of `size` bytes."""
        sizes = [point[0] for point in self.points]
        if size <= sizes[0]:
            return self.points[0][1]
        if size >= sizes[-1]:
            return self.points[-1][1] * size / sizes[-1]
        i = bisect.bisect_right(sizes, size)
        (s0, t0), (s1, t1) = self.points[i - 1], self.points[i]
        share = math.log(size / s0) / math.log(s1 / s0)
        return math.exp(math.log(t0) + share * math.log(t1 / t0))


@dataclasses.dataclass(frozen=True)
class Fabric:
    """How ranks reach each other. Ranks fill one node after the other."""

    gpus_per_node: int
    intra: Link | None
    """None = not known, and then slower than nothing: only usable where `inter` is slower than any."""
    inter: Link | None = None
    nics: int = 1
    """Per node."""
    curve: Curve | None = None
    """Where it was measured over as many ranks, it is used instead; its bus bandwidth for other counts
    within one node."""

    def nodes(self, ranks: int) -> int:
        return math.ceil(ranks / self.gpus_per_node)

    def bus_gb_s(self, ranks: int) -> float:
        """Of a large all-reduce over `ranks` ranks, GB/s."""
        within = [self.intra.bus_gb_s(min(ranks, self.gpus_per_node))] if self.intra else []
        if self.nodes(ranks) > 1:
            if self.inter is None:
                raise ValueError(
                    f"{ranks} ranks fill {self.nodes(ranks)} nodes, and no link between nodes is known"
                )
            return min([*within, self.inter.bus_gb_s(self.nodes(ranks)) * self.nics])
        if not within:
            raise ValueError("the link within a node is not known")
        return within[0]

    def replicas(self, tensor: int) -> Fabric:
        """What the ranks of one gradient reduction see when `tensor` neighbours share a replica: each node
        holds fewer of them, and as many groups share its NICs."""
        if tensor == 1:
            return self
        per_node = max(1, self.gpus_per_node // tensor)
        return dataclasses.replace(
            self, gpus_per_node=per_node, inter=self.inter and self.inter.scaled(1 / tensor)
        )

    def seconds(self, size: float, ranks: int, kind: str = "all_reduce") -> float:
        """Of one collective of `size` bytes per rank over `ranks` ranks."""
        if ranks <= 1 or size <= 0:
            return 0.0
        traversals = TRAVERSALS[kind]
        return self._fastest(size, ranks, traversals, traversals * (ranks - 1) / ranks, kind == "all_reduce")

    def rooted_seconds(self, size: float, ranks: int) -> float:
        """Of a reduce to one rank or a broadcast from it: a pipelined chain, each byte once over each hop."""
        return self._fastest(size, ranks, 1, 1.0) if ranks > 1 and size > 0 else 0.0

    def _fastest(self, size: float, ranks: int, traversals: int, share: float, tree: bool = False) -> float:
        """Of the protocols, as a ring or perhaps a tree. `share`: of the bytes that cross each link."""
        if self.curve is not None and self.nodes(ranks) == 1:
            measured = 2 * (self.curve.ranks - 1) / self.curve.ranks
            return self.curve.seconds(size) * share / measured
        bus = self.bus_gb_s(ranks) * GB
        times: list[float] = []
        for near, far in self.protocols(ranks):
            times.append(self._ring_latency(ranks, traversals, near, far) + share * size / (bus * near.share))
            latency = self._tree_latency(ranks, near, far)
            if tree and latency is not None:
                times.append(latency + 2 * size / (bus * TREE_SHARE * near.share))
        return min(times)

    def protocols(self, ranks: int) -> list[tuple[Protocol, Protocol]]:
        """Latencies of those that both levels know: (within a node, between nodes)."""
        outer = self.inter if self.nodes(ranks) > 1 else self.intra
        inner = self.intra or outer
        assert inner is not None
        assert outer is not None
        latencies = hardware().latencies
        near, far = latencies[inner.kind].protocols, latencies[outer.kind].protocols
        return [(near[name], far[name]) for name in near if name in far]

    def _ring_latency(self, ranks: int, traversals: int, near: Protocol, far: Protocol) -> float:
        nodes = self.nodes(ranks)
        across = traversals * (nodes - 1)
        steps = (traversals * (ranks - 1) - across) * near.hop + across * far.hop
        plateau = PLATEAU if nodes > 1 and near.share == 1 else 1.0
        return plateau * (near.start + steps)

    def _tree_latency(self, ranks: int, near: Protocol, far: Protocol) -> float | None:
        if near.tree is None or far.tree is None:
            return None
        levels = (min(ranks, self.gpus_per_node) - 1) * near.tree + math.log2(self.nodes(ranks)) * far.tree
        return near.tree_start + 2 * levels
