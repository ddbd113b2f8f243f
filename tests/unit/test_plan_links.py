"""Times of collectives, by hand, on links of round figures."""

import dataclasses
import math

import pytest

from launcher.plan import hardware
from launcher.plan.hardware import Link
from launcher.plan.links import Curve, Fabric

NEAR = Link(kind="nvlink", gb_s=100, reach=1.0, source="a made one")
FAR = Link(kind="net", gb_s=10, reach=1.0, source="a made one")
TCP = Link(kind="tcp", gb_s=10, reach=1.0, source="a made one")
LOOP = Link(kind="loopback", gb_s=1, reach=1.0, source="a made one")
NODE = Fabric(4, NEAR)
NODES = Fabric(4, NEAR, FAR, 2)
LATENCIES = hardware.hardware().latencies
SIMPLE, LL128 = (LATENCIES["nvlink"].protocols[name] for name in ("simple", "ll128"))
NET, NET_LL128 = (LATENCIES["net"].protocols[name] for name in ("simple", "ll128"))


def test_nodes_are_filled_one_after_the_other() -> None:
    assert [NODES.nodes(n) for n in (1, 4, 5, 8, 9)] == [1, 1, 2, 2, 3]


def test_the_bus_is_as_fast_as_its_slowest_hop() -> None:
    assert (NODE.bus_gb_s(4), NODES.bus_gb_s(4), NODES.bus_gb_s(5)) == (100, 100, 20)
    assert Fabric(4, NEAR, FAR, 20).bus_gb_s(8) == 100
    assert Fabric(4, NEAR, FAR).bus_gb_s(8) == 10
    assert Fabric(4, None, FAR).bus_gb_s(8) == 10
    by_count = Link(kind="nvlink", gb_s=1, reach=1.0, gpus_gb_s={2: 30, 4: 70, 8: 90}, source="a made one")
    assert [Fabric(4, by_count, FAR, 50).bus_gb_s(n) for n in (2, 4, 8)] == [30, 70, 70]
    between = Link(kind="net", gb_s=1, reach=1.0, gpus_gb_s={2: 3, 8: 9}, source="a made one")
    assert Fabric(4, NEAR, between).bus_gb_s(8) == 3  # two nodes take part
    with pytest.raises(ValueError, match=r"^5 ranks fill 2 nodes, and no link between nodes is known$"):
        NODE.bus_gb_s(5)
    with pytest.raises(ValueError, match=r"^the link within a node is not known$"):
        Fabric(4, None, FAR).bus_gb_s(4)


def test_tensor_parallel_neighbours_share_node_and_nics() -> None:
    assert NODES.replicas(1) is NODES
    halves = NODES.replicas(2)
    assert (halves.gpus_per_node, halves.nics, halves.bus_gb_s(4)) == (2, 2, 10)
    assert NODES.replicas(8).gpus_per_node == 1
    assert NODE.replicas(2) == Fabric(2, NEAR)
    assert Fabric(5, NEAR).replicas(2) == Fabric(2, NEAR)


@pytest.mark.parametrize(("kind", "times"), [("all_reduce", 2), ("all_gather", 1), ("reduce_scatter", 1)])
def test_a_large_message_is_a_ring_of_the_simple_protocol(kind: str, times: int) -> None:
    size = 1e10
    inside = SIMPLE.start + times * 3 * SIMPLE.hop + times * 3 / 4 * size / 100e9
    assert NODE.seconds(size, 4, kind) == pytest.approx(inside, rel=1e-12)
    # one hop between the two nodes, six within them, and a plateau of 1.9
    across = 1.9 * (SIMPLE.start + times * 6 * SIMPLE.hop + times * NET.hop) + times * 7 / 8 * size / 20e9
    assert NODES.seconds(size, 8, kind) == pytest.approx(across, rel=1e-12)


def test_a_small_all_reduce_is_a_tree_and_a_gather_a_ring() -> None:
    size = 8.0
    levels = 3 * LL128.tree
    tree = LL128.tree_start + 2 * levels + 2 * size / (100e9 * 0.9 * LL128.share)
    assert NODE.seconds(size, 4) == pytest.approx(tree, rel=1e-12)
    levels = 3 * LL128.tree + math.log2(4) * NET_LL128.tree
    tree = LL128.tree_start + 2 * levels + 2 * size / (20e9 * 0.9 * LL128.share)
    assert NODES.seconds(size, 16) == pytest.approx(tree, rel=1e-12)
    ring = LL128.start + 3 * LL128.hop + 3 / 4 * size / (100e9 * LL128.share)
    assert NODE.seconds(size, 4, "all_gather") == pytest.approx(ring, rel=1e-12)


def test_a_protocol_needs_both_levels() -> None:
    """ll128 is not known over TCP, so even 8 bytes over 2 nodes go by the simple protocol."""
    simple = LATENCIES["tcp"].protocols["simple"]
    assert simple.tree is not None
    tree = SIMPLE.tree_start + 2 * simple.tree + 2 * 8 / (10e9 * 0.9)
    assert Fabric(1, NEAR, TCP).seconds(8, 2) == pytest.approx(tree, rel=1e-12)
    ring = 1.9 * (SIMPLE.start + simple.hop) + 1 / 2 * 8 / 10e9
    assert Fabric(1, NEAR, TCP).seconds(8, 2, "all_gather") == pytest.approx(ring, rel=1e-12)
    gloo = LATENCIES["loopback"].protocols["simple"]
    assert gloo.tree is None
    assert Fabric(4, LOOP).seconds(8, 4) == pytest.approx(6 * gloo.hop + 1.5 * 8 / 1e9, rel=1e-12)
    assert Fabric(1, NEAR, LOOP).seconds(8, 2) > 0  # its tree is not known between nodes
    assert Fabric(4, None, FAR).seconds(8, 8) > 0


def test_a_rooted_collective_sends_each_byte_once() -> None:
    size = 1e10
    assert NODE.rooted_seconds(size, 4) == pytest.approx(SIMPLE.start + 3 * SIMPLE.hop + size / 100e9)
    small = LL128.start + 3 * LL128.hop + 8 / (100e9 * LL128.share)
    assert NODE.rooted_seconds(8, 4) == pytest.approx(min(small, SIMPLE.start + 3 * SIMPLE.hop), rel=1e-5)
    two = SIMPLE.start + SIMPLE.hop + 1e3 / 100e9
    assert NODE.rooted_seconds(1e3, 2) == pytest.approx(
        min(two, LL128.start + LL128.hop + 1e3 / 92e9), rel=1e-12
    )


def test_a_measured_curve_goes_before_the_model_within_its_node() -> None:
    curve = Curve.through(4, [(1e6, 3e-3), (4e6, 12e-3)])
    fabric = dataclasses.replace(NODES, curve=curve)
    bus = 2 * 3 / 4  # of the measured all-reduce
    assert fabric.seconds(1e6, 4) == pytest.approx(3e-3)
    assert fabric.seconds(1e6, 2) == pytest.approx(3e-3 / bus)
    assert fabric.seconds(1e6, 4, "reduce_scatter") == pytest.approx(1.5e-3)
    assert fabric.rooted_seconds(1e6, 3) == pytest.approx(3e-3 / bus)
    assert fabric.seconds(1e6, 8) == NODES.seconds(1e6, 8)
    assert fabric.rooted_seconds(1e6, 8) == NODES.rooted_seconds(1e6, 8)


def test_nothing_to_send_takes_no_time() -> None:
    for fabric in (NODE, dataclasses.replace(NODE, curve=Curve.through(4, [(1.0, 1.0)]))):
        for seconds in (fabric.seconds, fabric.rooted_seconds):
            assert seconds(1e6, 1) == seconds(0, 4) == 0
            assert seconds(1.0, 2) > 0


def test_a_curve_is_sorted_and_of_two_times_at_one_size_takes_the_longer() -> None:
    curve = Curve.through(2, [(4.0, 2.0), (1.0, 1.0), (4.0, 3.0)])
    assert curve == Curve(2, ((1.0, 1.0), (4.0, 3.0)))
    assert curve.scaled(2) == Curve(2, ((1.0, 0.5), (4.0, 1.5)))
    assert Curve.through(2, [(0.5, 0.5)]).seconds(0.25) == 0.5


def test_between_its_points_a_curve_is_straight_in_logarithms() -> None:
    curve = Curve.through(2, [(1.0, 1.0), (4.0, 16.0), (16.0, 32.0)])
    assert [curve.seconds(size) for size in (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)] == pytest.approx(
        [1, 1, 4, 16, 16 * math.sqrt(2), 32, 64]
    )
