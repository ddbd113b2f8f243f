"""The scaling model by hand, on a wire whose every byte takes a millisecond; and its limits on real links."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from bert_dp.config import ModelConfig
from bert_dp.cost import GIB, num_parameters
from launcher.plan import hardware, inputs, scaling, timeline
from launcher.plan.inputs import Device
from launcher.plan.links import Curve, Fabric
from launcher.plan.question import Question
from launcher.plan.step_model import Profile, Scenario, default_spread, exposed_s, predict, slowest, state_gib
from launcher.plan.timeline import Gradient

MS = 1e-3
LINKS = hardware.hardware().links
NODES = Fabric(8, LINKS["nvlink4"], LINKS["ib-ndr"], 8)


class Wire:
    """A millisecond a byte in an all-reduce, half of it where bytes go one way only; no latency."""

    def seconds(self, size: float, ranks: int, kind: str = "all_reduce") -> float:
        return size * MS * {"all_reduce": 1.0, "all_gather": 0.5, "reduce_scatter": 0.5}[kind]

    def rooted_seconds(self, size: float, ranks: int) -> float:
        return size * MS / 2

    def replicas(self, tensor: int) -> Wire:
        return self


GRADIENTS = (Gradient(1000, 0.4), Gradient(2000, 0.8), Gradient(1000, 1.2))  # 1,000 fp32 numbers
PROFILE = Profile(
    2.0, 1.2, 0.4, GRADIENTS, 8, 16, layers=3, hidden_size=4, activation_bytes=2.0
)  # forward 0.8 s, backward 1.2 s, optimizer 0.4 s


def ask(ranks: int, **options: Any) -> Scenario:
    fabric: Any = Wire()
    plain = {"bucket_bytes": 2500, "first_bucket": None, "gain": 1.0}
    return Scenario(fabric, ranks, **{**plain, **options})


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        # buckets of 3000 B at 0.8 s and 1000 B at 1.2 s: 0.8-3.8 and 3.8-4.8, the passes end at 1.2
        ({}, 3.6),
        # half of the hidden 0.4 s is gained
        ({"gain": 0.5}, 3.8),
        # 1000 B at 0.4 s and 3000 B at 1.2 s: 0.4-1.4 and 1.4-4.4
        ({"first_bucket": 1000}, 3.2),
        # everything in one: 1.2-5.2
        ({"bucket_bytes": 10**6}, 4.0),
        ({"overlap": False}, 4.0),
        # all is ready 1.5 x as late: 1.2-4.2 and 4.2-5.2, the passes end at 1.8
        ({"slowdown": 1.5}, 3.4),
        # to the owners 0.8-2.3 and 2.3-2.8, so 1.6; and back 4000 B, half a millisecond each
        ({"engine": "zero1"}, 1.6 + 2.0),
    ],
)
def test_gradients_go_once_a_step(accumulation: int, options: dict[str, Any], seconds: float) -> None:
    assert exposed_s(PROFILE, ask(4, accumulation=accumulation, **options)) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("accumulation", "gain", "seconds"),
    [
        # Four blocks, of which one is the embedding: gather and scatter 1000 B, 0.5 s each; forward 0.2 s and
        # backward 0.3 s. All in turn: 4 x 0.5 forward, 4 x 0.5 backward, 4 x 0.5 scatter.
        (1, 0.0, 2.0 + 2.0 + 2.0),
        (3, 0.0, 3 * 2.0 + 3 * 2.0 + 2.0),
        # The first is waited for; the next come beside a block: forward 0.3 s late, backward 0.2 s, and with
        # the scatter 0.5 + 0.5 - 0.3 late
        (1, 1.0, (0.5 + 3 * 0.3) + (1.0 + 3 * 0.7)),
        (3, 1.0, 3 * (0.5 + 3 * 0.3) + 2 * (0.5 + 3 * 0.2) + (1.0 + 3 * 0.7)),
        (3, 0.5, (14.0 + 9.5) / 2),
    ],
)
def test_fsdp_gathers_twice_a_micro_batch_and_scatters_once_a_step(
    accumulation: int, gain: float, seconds: float
) -> None:
    scenario = ask(4, engine="fsdp", accumulation=accumulation, gain=gain)
    assert exposed_s(PROFILE, scenario) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("once", "gain", "hidden"), [(1.024, 0.0, 0.0), (1.024, 1.0, 0.15), (0.064, 1.0, 2 * 0.064)]
)
def test_a_step_of_two_replicas_of_two_ranks(once: float, gain: float, hidden: float) -> None:
    """Accumulation 3, everything 1.5 x as slow, the slowest of four 10.49 % behind. Activations of 8 x 16 x 4
    numbers of 2 bytes take 1.024 s: four a block and the look-up; half of a block's backward pass, 0.15 s, or
    both that are sent in it hide. The gradients are one bucket, ready at the end."""
    profile = dataclasses.replace(PROFILE, activation_bytes=2.0 * once / 1.024)
    options = {"tensor": 2, "accumulation": 3, "slowdown": 1.5, "spread": 0.1, "gain": gain}
    step = predict(profile, ask(4, **options))
    compute, optimizer = 3 * 2.0 * 1.5 / 2, 0.4 * 1.5 / 2
    straggler = (compute + optimizer) * 0.1049
    activations = 3 * (3 * (4 * once - hidden) + once)
    exposed = activations + 2000 * MS
    assert (step.compute_s, step.optimizer_s) == pytest.approx((4.5, 0.3))
    assert step.straggler_s == pytest.approx(straggler, rel=1e-3)
    assert step.exposed_s == pytest.approx(exposed)
    assert step.step_s == pytest.approx(compute + optimizer + straggler + exposed, rel=1e-3)
    assert step.tokens_per_s == pytest.approx(2 * 3 * 8 * 16 / step.step_s)
    alone = 3 * 8 * 16 / (3 * 2.0 + 0.4)
    assert step.efficiency == pytest.approx(step.tokens_per_s / (4 * alone))
    mfu = Device("it", "bf16", peak_flops=1e4, flops_per_token=600.0).mfu(step)
    assert mfu == pytest.approx(step.tokens_per_s * 600 / 4e4)
    assert exposed_s(profile, ask(2, **options)) == pytest.approx(activations)
    with pytest.raises(ValueError, match="does not divide"):
        predict(profile, ask(3, **options))


@pytest.mark.parametrize(
    ("engine", "ranks", "seconds"), [("ddp", 4, 0.4), ("fsdp", 4, 0.1), ("zero1", 4, 0.2), ("zero1", 2, 0.2)]
)
def test_the_optimizer_is_divided_as_the_engine_divides_it(engine: str, ranks: int, seconds: float) -> None:
    """0.4 s; the largest of the tensors is half of all, so more than two owners win nothing."""
    assert predict(PROFILE, ask(ranks, engine=engine)).optimizer_s == pytest.approx(seconds)
    even = dataclasses.replace(PROFILE, gradients=(Gradient(1000, 0.4),) * 8)
    assert predict(even, ask(ranks, engine="zero1")).optimizer_s == pytest.approx(0.4 / ranks)


@pytest.mark.parametrize(
    ("engine", "ranks", "tensor", "accumulation", "numbers"),
    [
        # weights + gradients + two moments, of 1,000 parameters
        ("ddp", 4, 1, 3, 1000 + 1000 + 2000),
        ("zero1", 4, 1, 3, 1000 + 1000 + 500),
        ("fsdp", 4, 1, 1, 250 + 250 + 500),
        ("fsdp", 4, 1, 2, 250 + 1000 + 500),
        ("ddp", 4, 2, 1, 500 + 500 + 1000),
        ("zero1", 4, 2, 1, 500 + 500 + 500),  # over the two replicas, not the four ranks
    ],
)
@pytest.mark.parametrize("gradient_bytes", [4.0, 2.0])
def test_the_state_of_a_rank(
    engine: str, ranks: int, tensor: int, accumulation: int, numbers: int, gradient_bytes: float
) -> None:
    """In fp32, also where gradients are sent in 16 bits."""
    sent = tuple(Gradient(g.size * gradient_bytes / 4, g.ready) for g in GRADIENTS)
    profile = dataclasses.replace(PROFILE, gradients=sent, gradient_bytes=gradient_bytes)
    found = state_gib(profile, ask(ranks, engine=engine, tensor=tensor, accumulation=accumulation))
    assert found * GIB == pytest.approx(4 * numbers)


# --- the same on real links


def crammed(micro_s: float = 0.1) -> Profile:
    gradients = timeline.from_layers(ModelConfig(), num_parameters(ModelConfig(), 128), 4.0, micro_s * 2 / 3)
    return Profile(micro_s, micro_s * 2 / 3, 0.005, tuple(gradients), 128, 128, layers=16, hidden_size=768)


@pytest.mark.parametrize("engine", ["ddp", "zero1", "fsdp"])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_one_rank_is_exactly_what_was_measured(engine: str, accumulation: int) -> None:
    step = predict(crammed(), Scenario(NODES, 1, engine, accumulation=accumulation, spread=0.05))
    assert step.step_s == accumulation * 0.1 + 0.005
    assert step.exposed_s == step.straggler_s == 0
    assert step.efficiency == 1
    assert step.tokens_per_s == pytest.approx(accumulation * 128 * 128 / step.step_s)


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_links_without_end_lose_nothing_but_latency(engine: str) -> None:
    endless = Fabric(10**6, LINKS["nvlink4"].scaled(1e15))
    step = predict(crammed(10.0), Scenario(endless, 4, engine, accumulation=4))
    assert step.efficiency == pytest.approx(1, abs=5e-4)
    assert predict(crammed(10.0), Scenario(endless, 4, spread=0.02)).efficiency < 0.99


@pytest.mark.parametrize("engine", ["ddp", "zero1", "fsdp"])
def test_parts_sum_to_the_step_and_efficiency_falls_with_ranks(engine: str) -> None:
    alone, before = predict(crammed(), Scenario(NODES)).tokens_per_s, 1.1
    for ranks in (1, 2, 4, 8, 16, 64, 256, 1024):
        step = predict(crammed(), Scenario(NODES, ranks, engine, spread=0.015))
        parts = step.compute_s + step.optimizer_s + step.straggler_s + step.exposed_s
        assert parts == pytest.approx(step.step_s)
        assert step.efficiency == pytest.approx(step.tokens_per_s / (ranks * alone))
        if engine == "ddp":  # a divided optimizer may win more than the first ranks lose
            assert step.efficiency < before
        before = step.efficiency


@pytest.mark.parametrize(
    ("change", "better"),
    [
        ({"accumulation": 2}, True),
        ({"fabric": dataclasses.replace(NODES, nics=16)}, True),
        ({"spread": 0.0}, True),
        ({"gain": 1.0}, True),
        ({"gain": 0.0}, False),
        ({"slowdown": 1.2}, False),
    ],
)
def test_what_helps_helps(change: dict[str, Any], better: bool) -> None:
    now = Scenario(NODES, 16, spread=0.015)
    before, after = (predict(crammed(), s).efficiency for s in (now, dataclasses.replace(now, **change)))
    assert after >= before if better else after < before


@pytest.mark.parametrize(("ranks", "expected"), [(1, 0), (2, 0.564), (8, 1.424), (100, 2.508)])
def test_the_slowest_of_many(ranks: int, expected: float) -> None:
    """The expected greatest of so many standard normals."""
    assert slowest(ranks, 0.0) == 1
    assert slowest(ranks, 1.0) - 1 == pytest.approx(expected, abs=0.03 if ranks > 1 else 0)


def test_spread_of_a_cpus_ranks_is_its_ceilings_business() -> None:
    assert default_spread("CPU") == default_spread("cpu, 2 cores") == 0
    assert default_spread("NVIDIA H100 80GB HBM3") == hardware.constant("device_spread")


# --- what is asked of what was measured


def test_a_count_that_was_not_measured_has_the_curve_above_and_the_slowdown_below_it() -> None:
    curves = {n: Curve.through(n, [(1e6, 1e-3)]) for n in (2, 8)}
    source = inputs.Source(PROFILE, 1, 0.0, (), curves, {2: 1.1, 8: 1.4})
    for ranks, measured, slowdown in ((2, 2, 1.1), (4, 8, 1.1), (8, 8, 1.4), (16, 8, 1.4)):
        scenario = scaling.scenario_of(source, Question(gpus=(16,)), ranks, 1, 1)
        assert scenario.fabric.curve is not None
        assert (scenario.fabric.curve.ranks, scenario.slowdown) == (measured, slowdown)
    assert source.slowdown(1) == 1.0
    nodes = Question(gpus=(16,), link="nvlink4", inter="ib-ndr", gpus_per_node=4)
    scenario = scaling.scenario_of(source, nodes, 16, 1, 1)
    assert (scenario.slowdown, scenario.fabric.curve) == (1.1, None), "ranks slow each other within a node"


@pytest.mark.parametrize("size", [2**k for k in range(4, 32, 3)])
@pytest.mark.parametrize("nodes", [1, 2])
def test_an_all_reduce_takes_the_fastest_protocol_of_ring_and_tree(nodes: int, size: int) -> None:
    """NVLink 4 in nodes of 8, 8 x NDR between them. A ring of N ranks sends 2 (N - 1) times 1 / N of the
    message, a tree both ways at 0.9 of the speed; over nodes the ring's large messages wait 1.9 x as long."""
    ranks = 8 * nodes
    bus = min(450 * 0.8, 8 * 50 * 0.96 if nodes > 1 else 450) * 1e9
    near, far = (hardware.hardware().latencies[kind].protocols for kind in ("nvlink", "net"))
    times = []
    for name, inside in near.items():
        outside = far[name] if nodes > 1 else inside
        across = 2 * (nodes - 1)
        latency = inside.start + (2 * (ranks - 1) - across) * inside.hop + across * outside.hop
        wait = 1.9 if nodes > 1 and inside.share == 1 else 1.0
        times.append(wait * latency + 2 * (ranks - 1) / ranks * size / (bus * inside.share))
        if inside.tree is not None and outside.tree is not None:
            levels = 7 * inside.tree + (nodes - 1) * outside.tree  # log2 of one node is 0, of two 1
            times.append(inside.tree_start + 2 * levels + 2 * size / (0.9 * bus * inside.share))
    assert NODES.seconds(size, ranks) == pytest.approx(min(times), rel=1e-9)
