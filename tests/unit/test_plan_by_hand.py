"""`bert-dp plan` by hand: three small cases on a wire whose every byte takes a millisecond."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from bert_dp.config import resolve
from bert_dp.cost import GIB, linear_parameters, memory_estimate_gib, num_parameters
from launcher.plan import hardware, inputs, links, scaling
from launcher.plan.inputs import Device
from launcher.plan.predict import Profile, Scenario, exposed_s, predict, state_gib
from launcher.plan.question import Question
from launcher.plan.timeline import Gradient

MS = 1e-3


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


@pytest.mark.parametrize(("gain", "hidden"), [(0.0, 0.0), (1.0, 0.15)])
def test_a_step_of_two_replicas_of_two_ranks(gain: float, hidden: float) -> None:
    """Accumulation 3, everything 1.5 x as slow, the slowest of four 10.49 % behind. Activations of 8 x 16 x 4
    numbers of 2 bytes, 1.024 s: four a block and the look-up; half of a block's backward pass, 0.15 s, hides
    them. The gradients are one bucket, ready at the end."""
    scenario = ask(4, tensor=2, accumulation=3, slowdown=1.5, spread=0.1, gain=gain)
    found = predict(PROFILE, scenario)
    compute, optimizer = 3 * 2.0 * 1.5 / 2, 0.4 * 1.5 / 2
    straggler = (compute + optimizer) * 0.1049
    exposed = 3 * (3 * (4 * 1.024 - hidden) + 1.024) + 2000 * MS
    assert (found.compute_s, found.optimizer_s) == pytest.approx((4.5, 0.3))
    assert found.straggler_s == pytest.approx(straggler, rel=1e-3)
    assert found.exposed_s == pytest.approx(exposed)
    assert found.step_s == pytest.approx(compute + optimizer + straggler + exposed, rel=1e-3)
    assert found.tokens_per_s == pytest.approx(2 * 3 * 8 * 16 / found.step_s)
    alone = 3 * 8 * 16 / (3 * 2.0 + 0.4)
    assert found.efficiency == pytest.approx(found.tokens_per_s / (4 * alone))
    mfu = Device("it", "bf16", peak_flops=1e4, flops_per_token=600.0).mfu(found)
    assert mfu == pytest.approx(found.tokens_per_s * 600 / 4e4)


def test_the_optimizer_is_divided_as_the_engine_divides_it() -> None:
    """0.4 s; the largest of the tensors is half of all, so more than two owners win nothing."""
    wanted = {("ddp", 4): 0.4, ("fsdp", 4): 0.1, ("zero1", 4): 0.2, ("zero1", 2): 0.2}
    for (engine, ranks), seconds in wanted.items():
        assert predict(PROFILE, ask(ranks, engine=engine)).optimizer_s == pytest.approx(seconds), engine


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


@pytest.mark.parametrize(
    ("engine", "tensor", "global_size", "shares"),
    [
        # of weights, gradients and optimizer, over the 4 ranks of a job
        ("ddp", 1, 4, (1, 1, 1)),
        ("zero1", 1, 4, (1, 1, 1 / 4)),
        ("zero1", 2, 4, (1, 1, 1 / 2)),
        ("fsdp", 1, 4, (1 / 4, 1 / 4, 1 / 4)),
        ("fsdp", 1, 8, (1 / 4, 1, 1 / 4)),  # whole gradients between micro batches
    ],
)
def test_the_estimate_before_a_run_divides_over_the_replicas(
    engine: str, tensor: int, global_size: int, shares: tuple[float, float, float]
) -> None:
    model = {"vocab_size": 40, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "intermediate_size": 20}
    config = resolve(
        [
            {
                "data": {"sources": ["builtin"], "sequence_length": 8},
                "schedule": {"steps": 1},
                "model": model,
                "batch": {"micro_size": 1, "global_size": global_size},
                "parallel": {"engine": engine, "tensor": tensor},
            }
        ]
    )
    shape = config.model
    divided = linear_parameters(shape) + 40 * 16  # what tensor parallelism divides
    own = num_parameters(shape, 8) - divided + divided / tensor
    gathered = 40 * 16 + 2 * linear_parameters(shape) / 2 if engine == "fsdp" else 0
    found = memory_estimate_gib(config, "fp32", 4)
    weights, gradients, optimizer = shares
    assert found["weights"] * GIB == pytest.approx(4 * (own * weights + gathered))
    assert found["gradients"] * GIB == pytest.approx(4 * (own * gradients + gathered * (gradients < 1)))
    assert found["optimizer"] * GIB == pytest.approx(4 * 2 * own * optimizer)


# --- what is asked of what was measured


def test_a_count_that_was_not_measured_has_the_curve_above_and_the_slowdown_below_it() -> None:
    curves = {n: links.Curve.through(n, [(1e6, 1e-3)]) for n in (2, 8)}
    source = inputs.Source(PROFILE, 1, 0.0, (), curves, {2: 1.1, 8: 1.4})
    for ranks, measured, slowdown in ((2, 2, 1.1), (4, 8, 1.1), (8, 8, 1.4), (16, 8, 1.4)):
        scenario = scaling.scenario_of(source, Question(gpus=(16,)), ranks, 1, 1)
        assert scenario.fabric.curve is not None
        assert (scenario.fabric.curve.ranks, scenario.slowdown) == (measured, slowdown)
    assert source.slowdown(1) == 1.0


def test_a_rate_is_given_back_by_one_rank_at_its_own_accumulation() -> None:
    """AdamW reads four and writes three fp32 numbers a parameter, at the memory's speed, once a step."""
    source = inputs.from_rate("bert-large", 580, 256, 4, "A100-80G")
    gpu = hardware.hardware().gpus["A100-80G"]
    count = num_parameters(inputs.MODELS["bert-large"], 512)
    speed = gpu.memory_gb_s * 1e9 * hardware.constant("memory_reach")
    assert source.profile.optimizer_s == pytest.approx(count * (4 + 3) * 4 / speed)
    (row,) = scaling.answer(source, Question(gpus=(1,))).rows
    assert row.samples_per_s == pytest.approx(580)


@pytest.mark.parametrize("size", [2**k for k in range(4, 32, 3)])
@pytest.mark.parametrize("nodes", [1, 2])
def test_an_all_reduce_takes_the_fastest_protocol_of_ring_and_tree(nodes: int, size: int) -> None:
    """NVLink 4 in nodes of 8, 8 x NDR between them. A ring of N ranks sends 2 (N - 1) times 1 / N of the
    message, a tree both ways at 0.9 of the speed; over nodes the ring's large messages wait 1.9 x as long."""
    link, nic = (hardware.hardware().links[name] for name in ("nvlink4", "ib-ndr"))
    ranks = 8 * nodes
    bus = min(450 * 0.8, 8 * 50 * 0.96 if nodes > 1 else 450) * 1e9
    near, far = (hardware.hardware().latencies[e.kind].protocols for e in (link, nic))
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
    found = links.Fabric(8, link, nic, 8).seconds(size, ranks)
    assert found == pytest.approx(min(times), rel=1e-9)
