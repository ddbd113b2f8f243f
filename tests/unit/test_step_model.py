"""Tests of the scaling model by hand: links of round numbers, a wire of 1 ms per byte, and real links."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from bert_dp.config import ModelConfig
from bert_dp.cost import linear_parameters, num_parameters
from launcher.plan import step_model
from launcher.plan.step_model import Fabric, LinkSpec, Scenario, exposed_s, find_link, outlast, predict
from launcher.scale.models import StepProfile

MS = 1e-3
NEAR, FAR, TCP = (LinkSpec(kind, gb_s, 1.0) for kind, gb_s in (("nvlink", 100), ("net", 10), ("tcp", 10)))
LOOP = LinkSpec("loopback", 1, 1.0)
NODE, NODES = Fabric(4, NEAR), Fabric(4, NEAR, FAR, 2)
REAL = Fabric(8, find_link("nvlink4"), find_link("ib-ndr"), 8)
SIMPLE, LL128 = (step_model.find_protocols("nvlink")[name] for name in ("simple", "ll128"))


class Wire:
    """A link without latency: 1 ms per byte for an all-reduce, half of it for one-way collectives."""

    def seconds(self, size: float, ranks: int, kind: str = "all_reduce") -> float:
        return size * MS * (1.0 if kind == "all_reduce" else 0.5)

    def replicas(self, tensor: int) -> Wire:
        return self


def made(*gradients: tuple[float, float], **changes: Any) -> StepProfile:
    """Return a profile of three blocks: forward 0.8 s, backward 1.2 s, optimizer 0.4 s, 1,000 parameters."""
    times = {"micro_s": 2.0, "backward_s": 1.2, "optimizer_s": 0.4, "parameters": 1000}
    sizes = {"micro_batch": 8, "sequence_length": 16, "num_layers": 3, "hidden_size": 4, "precision": "bf16"}
    listed = [{"bytes": size, "ready_s": ready} for size, ready in gradients]
    return StepProfile(**{**times, **sizes, "gradients": listed, **changes})


PROFILE = made((1000, 0.4), (2000, 0.8), (1000, 1.2))


def ask(ranks: int, **options: Any) -> Scenario:
    fabric: Any = Wire()
    plain = {"bucket_bytes": 2500, "first_bucket": None, "gain": 1.0}
    return Scenario(fabric, ranks, **{**plain, **options})


def test_the_bus_is_as_fast_as_its_slowest_hop() -> None:
    assert [NODES.nodes(n) for n in (1, 4, 5, 8, 9)] == [1, 1, 2, 2, 3]
    assert (NODE.bus_gb_s(4), NODES.bus_gb_s(4), NODES.bus_gb_s(5)) == (100, 100, 20)
    assert Fabric(4, NEAR, FAR, 20).bus_gb_s(8) == 100
    assert Fabric(4, None, FAR).bus_gb_s(8) == 10
    by_count = LinkSpec("nvlink", 1, 1.0, gpus_gb_s={2: 30, 4: 70, 8: 90})
    assert [Fabric(4, by_count, FAR, 50).bus_gb_s(n) for n in (2, 4, 8)] == [30, 70, 70]
    between = LinkSpec("net", 1, 1.0, gpus_gb_s={2: 3, 8: 9})
    assert Fabric(4, NEAR, between).bus_gb_s(8) == 3  # two nodes take part
    twice = Fabric(4, by_count, FAR, 50, speed=2)
    assert [twice.bus_gb_s(n) for n in (2, 8)] == [60, 140]


def test_tensor_parallel_neighbours_share_node_and_nics() -> None:
    halves = NODES.replicas(2)
    assert (halves.gpus_per_node, halves.nics, halves.bus_gb_s(4)) == (2, 1, 10)
    assert NODES.replicas(8).gpus_per_node == 1
    assert Fabric(5, NEAR, nics=4).replicas(2) == Fabric(2, NEAR, nics=2)


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "rooted"])
@pytest.mark.parametrize("size", [2**k for k in range(4, 32, 3)])
@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_a_collective_takes_the_fastest_protocol_of_ring_and_tree(nodes: int, size: int, kind: Any) -> None:
    """Nodes of 8 have NVLink 4, with 8 x NDR between them. A ring of N ranks sends 1 / N of the message
    2 (N - 1) times; a tree sends it both ways at 0.9 of the speed. Between nodes, large ring messages wait
    1.9 x as long."""
    ranks, times = 8 * nodes, 2 if kind == "all_reduce" else 1
    bus = min(450 * 0.8, 8 * 50 * 0.96 if nodes > 1 else 450) * 1e9
    share = 1.0 if kind == "rooted" else times * (ranks - 1) / ranks
    seconds = []
    for name, inside in step_model.find_protocols("nvlink").items():
        outside = step_model.find_protocols("net")[name]
        across = times * (nodes - 1)
        latency = inside.start + (times * (ranks - 1) - across) * inside.hop + across * outside.hop
        wait = 1.9 if nodes > 1 and name == "simple" else 1.0
        seconds.append(wait * latency + share * size / (bus * inside.share))
        if kind == "all_reduce":
            levels = 7 * inside.tree + math.log2(nodes) * outside.tree
            seconds.append(inside.tree_start + 2 * levels + 2 * size / (0.9 * bus * inside.share))
    assert REAL.seconds(size, ranks, kind) == pytest.approx(min(seconds), rel=1e-9)


def test_a_protocol_needs_both_levels() -> None:
    """TCP has no LL128, so even 8 bytes over 2 nodes use the simple protocol. Loopback has no tree."""
    simple = step_model.find_protocols("tcp")["simple"]
    tree = SIMPLE.tree_start + 2 * simple.tree + 2 * 8 / (10e9 * 0.9)
    assert Fabric(1, NEAR, TCP).seconds(8, 2) == pytest.approx(tree, rel=1e-12)
    hop = step_model.find_protocols("loopback")["simple"].hop
    assert Fabric(4, LOOP).seconds(8, 4) == pytest.approx(6 * hop + 1.5 * 8 / 1e9, rel=1e-12)
    assert Fabric(1, NEAR, LOOP).seconds(8, 2) > 0
    assert Fabric(4, None, FAR).seconds(8, 8) > 0
    assert NODE.seconds(8, 4) == pytest.approx(LL128.tree_start + 6 * LL128.tree, rel=1e-3)


def test_a_measured_curve_replaces_the_model_within_its_node() -> None:
    curve = step_model.AllReduceCurve(4, {1e6: 3e-3, 4e6: 12e-3})
    fabric = dataclasses.replace(NODES, curve=curve)
    bus = 2 * 3 / 4  # factor of the measured all-reduce
    assert fabric.seconds(1e6, 4) == pytest.approx(3e-3)
    assert fabric.seconds(1e6, 2) == pytest.approx(3e-3 / bus)
    assert fabric.seconds(1e6, 4, "reduce_scatter") == pytest.approx(1.5e-3)
    assert fabric.seconds(1e6, 3, "rooted") == pytest.approx(3e-3 / bus)
    assert fabric.seconds(1e6, 8) == NODES.seconds(1e6, 8)
    assert dataclasses.replace(fabric, speed=2).seconds(1e6, 4) == pytest.approx(1.5e-3)
    assert fabric.seconds(1e6, 1) == fabric.seconds(0, 4) == NODE.seconds(1e6, 1) == 0


def test_a_curve_is_interpolated_in_logarithms() -> None:
    curve = step_model.AllReduceCurve(2, {1.0: 1.0, 16.0: 32.0, 4.0: 16.0})
    assert [curve.seconds(size) for size in (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)] == pytest.approx(
        [1, 1, 4, 16, 16 * math.sqrt(2), 32, 64]
    )


def test_blocks_are_ready_at_even_intervals_and_the_rest_at_the_end() -> None:
    sizes = {"num_layers": 3, "hidden_size": 64, "num_heads": 4, "intermediate_size": 128, "vocab_size": 512}
    model = ModelConfig(**sizes, position="learned")
    found = step_model.layer_gradients(model, num_parameters(model, 32), 2.0, 8.0)
    block = linear_parameters(model) / 3
    assert [g.ready_s for g in found] == [2.0, 4.0, 6.0, 8.0]
    assert [g.bytes / 2 for g in found] == [*[block] * 3, num_parameters(model, 32) - 3 * block]


def test_only_the_first_bucket_may_be_smaller_and_none_is_empty() -> None:
    gradients = [(2.0, t) for t in (4.0, 1.0, 2.0, 3.0)]
    assert step_model.fuse(gradients, 4.0, first=2.0) == [(2, 1), (4, 3), (2, 4)]
    assert step_model.fuse(gradients, 4.0) == [(4, 2), (4, 4)]
    assert step_model.fuse([*gradients, (9.0, 5.0)], 4.0)[-1] == (9, 5), "a tensor is never split"
    assert step_model.fuse([], 4.0) == []


def test_a_reduction_waits_for_its_bucket_and_the_previous_reduction() -> None:
    buckets = [(1, 1.0), (3, 1.5), (2, 9.0)]
    # 1-2, 2-5, 9-11: 6 s in all, of which 1 s is after the backward pass of 10 s
    assert outlast(buckets, 10.0, float, gain=1.0) == pytest.approx(1.0)
    assert outlast(buckets, 10.0, float, gain=0.5) == pytest.approx(6 - 0.5 * 5)
    assert outlast(buckets, 2.0, float, gain=1.0) == pytest.approx(6.0)  # at most all of them
    assert outlast([(0.5, 0.0), (0.25, 0.0)], 0.8, float, gain=1.0) == 0


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        # buckets of 3000 B at 0.8 s and 1000 B at 1.2 s: 0.8-3.8 and 3.8-4.8; the passes end at 1.2
        ({}, 3.6),
        # half of the 0.4 s that could be hidden is hidden
        ({"gain": 0.5}, 3.8),
        # 1000 B at 0.4 s and 3000 B at 1.2 s: 0.4-1.4 and 1.4-4.4
        ({"first_bucket": 1000}, 3.2),
        # one bucket: 1.2-5.2
        ({"bucket_bytes": 10**6}, 4.0),
        ({"overlap": False}, 4.0),
        # half of the bytes, in one bucket: 1.2-3.2
        ({"sent_bytes": 2.0}, 2.0),
        ({"sent_bytes": 2.0, "overlap": False}, 2.0),
        # everything is ready 1.5 x later: 1.2-4.2 and 4.2-5.2; the passes end at 1.8
        ({"slowdown": 1.5}, 3.4),
        # to the owners 0.8-2.3 and 2.3-2.8, of which 1.6 s are exposed; back 4000 B at 0.5 ms each
        ({"engine": "zero1"}, 1.6 + 2.0),
    ],
)
def test_gradients_are_sent_once_per_step(accumulation: int, options: dict[str, Any], seconds: float) -> None:
    assert exposed_s(PROFILE, ask(4, accumulation=accumulation, **options)) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("accumulation", "gain", "seconds"),
    [
        # Four blocks, including the embedding: a gather or scatter of 1000 B takes 0.5 s, forward 0.2 s and
        # backward 0.3 s. Without overlap: 4 x 0.5 forward, 4 x 0.5 backward, 4 x 0.5 scatter.
        (1, 0.0, 2.0 + 2.0 + 2.0),
        (3, 0.0, 3 * 2.0 + 3 * 2.0 + 2.0),
        # The first gather is exposed. The others overlap with a block: 0.3 s late in forward, 0.2 s in
        # backward, and with the scatter 0.5 + 0.5 - 0.3 s late.
        (1, 1.0, (0.5 + 3 * 0.3) + (1.0 + 3 * 0.7)),
        (3, 1.0, 3 * (0.5 + 3 * 0.3) + 2 * (0.5 + 3 * 0.2) + (1.0 + 3 * 0.7)),
        (3, 0.5, (14.0 + 9.5) / 2),
    ],
)
def test_fsdp_gathers_twice_per_micro_batch_and_scatters_once_per_step(accumulation, gain, seconds) -> None:
    scenario = ask(4, engine="fsdp", accumulation=accumulation, gain=gain)
    assert exposed_s(PROFILE, scenario) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("precision", "once", "gain", "hidden"),
    [("bf16", 1.024, 0.0, 0.0), ("bf16", 1.024, 1.0, 0.15), ("fp32", 2.048, 1.0, 0.15)],
)
def test_a_step_of_two_replicas_of_two_ranks(precision: str, once: float, gain: float, hidden: float) -> None:
    """Accumulation is 3, everything is 1.5 x slower, and the slowest of 4 ranks is 10.49 % behind. Reducing
    activations of 8 x 16 x 4 numbers takes `once`, 4 times per block and once for the embedding; half of
    a block's backward pass (0.15 s) hides a part. The gradients form one bucket, ready at the end."""
    profile = PROFILE.model_copy(update={"precision": precision})
    options = {"tensor": 2, "accumulation": 3, "slowdown": 1.5, "spread": 0.1, "gain": gain}
    row = predict(profile, ask(4, **options))
    compute, optimizer = 3 * 2.0 * 1.5 / 2, 0.4 * 1.5 / 2
    straggler = (compute + optimizer) * 0.1049
    activations = 3 * (3 * (4 * once - hidden) + once)
    exposed = activations + 2000 * MS
    assert list(row.split_s.model_dump().values()) == pytest.approx(
        [compute, optimizer, straggler, exposed], rel=1e-3
    )
    assert row.step_time_s == pytest.approx(sum(row.split_s.model_dump().values()))
    assert row.exposed_comm_fraction == pytest.approx(exposed / row.step_time_s)
    assert row.global_batch == 2 * 3 * 8
    assert row.tokens_per_s == pytest.approx(48 * 16 / row.step_time_s)
    assert row.efficiency == pytest.approx(48 / row.step_time_s / (4 * 3 * 8 / (3 * 2.0 + 0.4)))
    assert row.speedup == pytest.approx(4 * row.efficiency)
    assert exposed_s(profile, ask(2, **options)) == pytest.approx(activations)


@pytest.mark.parametrize(
    ("engine", "ranks", "seconds"), [("ddp", 4, 0.4), ("fsdp", 4, 0.1), ("zero1", 4, 0.2), ("zero1", 2, 0.2)]
)
def test_the_optimizer_time_follows_the_engines_sharding(engine: str, ranks: int, seconds: float) -> None:
    """The largest tensor has half of all elements, so that more than two owners save no time."""
    assert predict(PROFILE, ask(ranks, engine=engine)).split_s.optimizer == pytest.approx(seconds)
    even = made(*[(1000, 0.4)] * 8)
    assert predict(even, ask(ranks, engine="zero1")).split_s.optimizer == pytest.approx(0.4 / ranks)


def crammed(micro_s: float = 0.1) -> StepProfile:
    """Return the estimated profile of the crammed BERT."""
    model, backward_s = ModelConfig(), micro_s * 2 / 3
    gradients = step_model.layer_gradients(model, num_parameters(model, 128), 4.0, backward_s)
    times = {"micro_s": micro_s, "backward_s": backward_s, "optimizer_s": 0.005}
    sizes = {"micro_batch": 128, "sequence_length": 128, "num_layers": 16, "hidden_size": 768}
    return StepProfile(**times, **sizes, gradients=gradients)


@pytest.mark.parametrize("engine", ["ddp", "zero1", "fsdp"])
def test_one_rank_equals_the_measurement_and_infinitely_fast_links_lose_nothing(engine: str) -> None:
    row = predict(crammed(), Scenario(REAL, 1, engine, accumulation=4, spread=0.05))
    assert row.step_time_s == 4 * 0.1 + 0.005
    assert (row.split_s.exposed_comm, row.split_s.straggler, row.efficiency) == (0, 0, 1)
    endless = Fabric(10**6, find_link("nvlink4"), speed=1e15)
    far = predict(crammed(10.0), Scenario(endless, 4, engine, accumulation=4))
    assert far.efficiency == pytest.approx(1, abs=5e-4)
    assert predict(crammed(10.0), Scenario(endless, 4, engine, spread=0.02)).efficiency < 0.99


@pytest.mark.parametrize(("ranks", "expected"), [(1, 0), (2, 0.564), (8, 1.424), (100, 2.508)])
def test_the_slowest_of_many_ranks(ranks: int, expected: float) -> None:
    """`expected` is the mean of the maximum of `ranks` standard normal variables."""
    assert step_model.slowest(ranks, 0.0) == 1
    assert step_model.slowest(ranks, 1.0) - 1 == pytest.approx(expected, abs=0.03 if ranks > 1 else 0)
