"""What a collective costs: a ring or a tree over two levels of links, or a measured curve. Seconds and bytes.

A ring over the GPUs of several nodes enters and leaves each node once, through all its NICs together, so its
slowest hop decides: bus bandwidth = min(link within the node, sum of the NICs). This, the latencies and the
choice of the faster of ring and tree are NCCL's own model (src/graph/tuning.cc).
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Sequence

from launcher.plan.hardware import Latency, Link, hardware

GB = 1e9
PLATEAU = 1.9  # a ring over nodes waits that much longer per hop with large messages (NCCL tuning.cc)
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

    def seconds(self, size: float) -> float:
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

    def latency(self, inter: bool) -> Latency:
        link = self.inter if inter else (self.intra or self.inter)
        assert link is not None
        return hardware().latencies[link.kind]

    def replicas(self, tensor: int) -> Fabric:
        """What the ranks of one gradient reduction see when `tensor` neighbours share a replica: each node
        holds fewer of them, and as many groups share its NICs."""
        if tensor == 1:
            return self
        per_node = max(1, self.gpus_per_node // tensor)
        inter = self.inter and self.inter.model_copy(update={"gb_s": self.inter.gb_s / tensor})
        return dataclasses.replace(self, gpus_per_node=per_node, inter=inter, curve=None)

    def seconds(self, size: float, ranks: int, kind: str = "all_reduce") -> float:
        """Of one collective of `size` bytes per rank over `ranks` ranks."""
        if ranks <= 1 or size <= 0:
            return 0.0
        traversals = TRAVERSALS[kind]
        volume = traversals * (ranks - 1) / ranks * size
        if self.curve is not None and self.nodes(ranks) == 1:
            measured = 2 * (self.curve.ranks - 1) / self.curve.ranks
            return self.curve.seconds(size) * (traversals * (ranks - 1) / ranks) / measured
        bus = self.bus_gb_s(ranks) * GB
        ring = self._ring_latency(ranks, traversals) + volume / bus
        tree = self._tree_latency(ranks) if kind == "all_reduce" else None
        return ring if tree is None else min(ring, tree + 2 * size / (bus * TREE_SHARE))

    def rooted_seconds(self, size: float, ranks: int) -> float:
        """Of a reduce to one rank or a broadcast from it: a pipelined chain, each byte once over each hop."""
        if ranks <= 1 or size <= 0:
            return 0.0
        if self.curve is not None and self.nodes(ranks) == 1:
            measured = 2 * (self.curve.ranks - 1) / self.curve.ranks
            return self.curve.seconds(size) / measured
        return self._ring_latency(ranks, 1) + size / (self.bus_gb_s(ranks) * GB)

    def all_to_all_seconds(self, size: float, ranks: int) -> float:
        """Every rank sends each other one its part of `size` bytes: unlike a ring, all of a node's ranks
        cross its NICs with most of what they hold."""
        if ranks <= 1 or size <= 0:
            return 0.0
        bus = self.bus_gb_s(ranks) * GB
        local = min(ranks, self.gpus_per_node)
        outside = local * size * (ranks - local) / ranks
        return self.latency(inter=outside > 0).start + (outside or size * (local - 1) / ranks) / bus

    def _ring_latency(self, ranks: int, traversals: int) -> float:
        nodes = self.nodes(ranks)
        across = traversals * (nodes - 1)
        within = traversals * (ranks - 1) - across
        near = self.latency(inter=False)
        if nodes == 1:
            return near.start + within * near.hop
        return PLATEAU * (near.start + within * near.hop + across * self.latency(inter=True).hop)

    def _tree_latency(self, ranks: int) -> float | None:
        nodes = self.nodes(ranks)
        near, far = self.latency(inter=False).tree, self.latency(inter=True).tree if nodes > 1 else 0.0
        if near is None or far is None:
            return None
        return 2 * ((min(ranks, self.gpus_per_node) - 1) * near + math.log2(nodes) * far)


def bus_bandwidth(size: float, seconds: float, ranks: int) -> float:
    """GB/s, comparable over numbers of ranks (nccl-tests, doc/PERFORMANCE.md)."""
    return 2 * (ranks - 1) / ranks * size / seconds / GB


def curve(ranks: int, points: Sequence[tuple[float, float]]) -> Curve:
    """Sorted, one time per size. Raises ValueError for less than one point or a time that is not above 0."""
    ordered = dict(sorted(points))
    if not ordered or ranks < 2 or min(ordered) <= 0 or min(ordered.values()) <= 0:
        raise ValueError("a curve needs points of positive size and time over at least 2 ranks")
    return Curve(ranks, tuple(ordered.items()))
