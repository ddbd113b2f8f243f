"""Tests of the gradient noise scale: the coverage of its interval, norms against norms computed from the
samples, and whole runs with and without the measurement."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bert_dp import optim
from bert_dp.model.interface import Model
from bert_dp.parallel import make_engine
from bert_dp.training import distributed
from bert_dp.training.devices import precision_of
from bert_dp.training.loop import train_step
from bert_dp.training.metrics import Timers
from bert_dp.training.noise import estimate, estimate_of_run
from bert_dp.training.process import read_world
from tests.helpers import make_config, read_json, read_lines
from tests.parity.runs import settings, state, summary, train_named
from tests.ranks import run_ranks
from tests.shards import write_shards
from tests.tensors import CPU

# --- the estimate


def draw(
    seed: int, *, steps: int, d_eff: int, replicas: int, ratio: float, grad_sq: float = 1.0
) -> tuple[np.ndarray, np.ndarray, float]:
    """Return (small_sq, big_sq, trace) of Gaussian gradients in d_eff equal directions, with b = 1,
    B = replicas and B / B_simple = ratio at |G| = 1. They are drawn through their sufficient statistics:
    the replicas' mean and the deviations from it."""
    rng = np.random.default_rng(seed)
    trace = replicas / ratio
    v = trace / d_eff / replicas  # variance of a component of the replicas' mean
    along = grad_sq**0.5 + v**0.5 * rng.standard_normal(steps)
    big = along**2 + v * rng.chisquare(d_eff - 1, steps)
    return big + v * rng.chisquare(d_eff * (replicas - 1), steps), big, trace


CELLS = [(d, r, ratio) for d in (64, 1024) for r in (2, 8) for ratio in (0.25, 2.0)]


def test_the_interval_covers_the_truth_in_95_percent_of_simulations() -> None:
    """The tolerance is three binomial standard deviations of 2,000 simulations."""
    covered, tries = 0, 0
    for (d_eff, replicas, ratio), _ in itertools.product(CELLS, range(250)):
        small, big, truth = draw(tries, steps=200, d_eff=d_eff, replicas=replicas, ratio=ratio)
        scale = estimate(small, big, 1, replicas)
        assert scale.verdict == "ok"
        assert scale.interval is not None
        assert scale.noise_scale is not None
        assert scale.interval[0] < scale.noise_scale < scale.interval[1] < 3 * truth
        covered += scale.interval[0] <= truth <= scale.interval[1]
        tries += 1
    assert covered == pytest.approx(0.95 * tries, abs=3 * math.sqrt(0.95 * 0.05 * tries))


# --- engines


MEAN, SIGMA, SIZES, NUM_STEPS = 0.5, 2.0, (24, 16, 16, 8), 3


class Linear(nn.Module):
    """A model with loss_i = <w, x_i>, so that a sample's gradient is x_i ~ N(mu, 4 I) at any weights."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.ones(size, dtype=torch.float64) for size in SIZES)

    def forward(self, x_ND: Tensor) -> Tensor:
        return (x_ND @ torch.cat(list(self.parts))).sum()


@dataclasses.dataclass(frozen=True)
class Case:
    engine: str
    ranks: int
    accumulation: int
    parallel: tuple[tuple[str, Any], ...] = ()
    precision: str = "fp64"
    micro: int = 8

    @property
    def batches(self) -> tuple[int, int]:
        """Return the small and the big batch size."""
        own = self.micro * self.accumulation
        return (self.micro if self.ranks == 1 else own), own * self.ranks

    def samples(self, step: int, rank: int) -> list[Tensor]:
        """Return a rank's micro batches of a step."""
        generator = torch.Generator().manual_seed(1000 * step + rank)
        shape = (self.accumulation, self.micro, sum(SIZES))
        return list(MEAN + SIGMA * torch.randn(shape, generator=generator, dtype=torch.float64))

    def by_hand(self) -> tuple[list[float], list[float]]:
        """Return small_sq and big_sq of each step, computed from the gradients of the samples."""
        small, big = [], []
        for step in range(1, NUM_STEPS + 1):
            own = [self.samples(step, rank) for rank in range(self.ranks)]
            parts = [own[0][0]] if self.ranks == 1 else [torch.cat(o) for o in own]
            small.append(float(np.mean([float(p.mean(0).square().sum()) for p in parts])))
            big.append(float(torch.cat([torch.cat(o) for o in own]).mean(0).square().sum()))
        return small, big


class FakeBatch:
    """A micro batch with the attributes that train_step uses."""

    sample_ids = (0,)

    def __init__(self, x_ND: Tensor):
        self.x_ND, self.num_masked = x_ND, len(x_ND)

    def to(self, device: torch.device) -> FakeBatch:
        return self


def measure(cases: Sequence[Case], out: str) -> None:
    """Write each case's lines of noise.jsonl, from train_step on the real engine with constant weights. The
    first step acts as a dry run, and the last step is skipped."""
    world = read_world(os.environ)
    comm = distributed.connect(world, CPU, group_of_one=True)
    lines = []
    for case in cases:
        parallel = {"engine": case.engine, "bucket_mib": 1e-4, **dict(case.parallel)}
        config = make_config(
            log={"noise_scale": True},
            optim={"clip": 0.5},
            batch={"micro_size": case.micro, "global_size": case.batches[1]},
            parallel=parallel,
        )
        engine: Any = make_engine(case.engine, config, world, CPU, precision=case.precision, run_dir=Path())
        model, optimizer = engine.prepare(
            Linear(), lambda n, c=config: optim.make_optimizer(c.optim, n, Model())
        )
        optim.set_lr(optimizer, 0.0)
        trainer: Any = SimpleNamespace(
            engine=engine,
            model=model,
            task=SimpleNamespace(loss=lambda m, b: m(b.x_ND)),
            device=CPU,
            precision=precision_of("fp64"),
            config=config,
            heartbeat=SimpleNamespace(progress=lambda: None),
        )
        for step in range(NUM_STEPS + 2):
            bad = float("nan") if step > NUM_STEPS and world.rank == world.size - 1 else 1.0
            batches: Any = [FakeBatch(bad * x) for x in case.samples(step, world.rank)]
            num_targets = sum(b.num_masked for b in batches) * engine.dp_size
            train_step(
                trainer, batches, grad_accum_steps=len(batches), num_targets=num_targets, timers=Timers(CPU)
            )
            if step == 0:
                engine.norm_pairs.clear()
        lines.append(engine.norm_pairs.drain(comm, NUM_STEPS + 1))
    distributed.disconnect()
    if world.rank == 0:
        Path(out).write_text(json.dumps(lines))


NARROW: Any = {"parallel": (("reduce_dtype", "bf16"),)}
CASES = {  # engines, accumulation, reduction dtypes and precisions, by number of ranks
    1: [
        Case("single", 1, 4),
        Case("ddp", 1, 4),
        Case("zero1", 1, 2),
        Case("single", 1, 1),
        Case("single", 1, 4, precision="fp16"),
    ],
    2: [
        Case("ddp", 2, 1),
        Case("ddp", 2, 2),
        Case("zero1", 2, 2),
        Case("ddp", 2, 2, parallel=(("static_graph", True),)),
        Case("ddp", 2, 2, **NARROW),
        Case("ddp", 2, 2, precision="fp16"),
        Case("zero1", 2, 1, precision="fp16"),
    ],
    4: [Case("ddp", 4, 1), Case("ddp", 4, 2), Case("zero1", 4, 2)],
}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_norms_equal_those_of_the_samples(ranks: int, tmp_path: Path) -> None:
    run_ranks(ranks, measure, CASES[ranks], str(tmp_path / "lines"))
    for case, lines in zip(CASES[ranks], read_json(tmp_path / "lines"), strict=True):
        small, big = case.batches
        if small == big:
            assert lines == []  # the small and the big batch are equal
            continue
        (line,) = lines
        small_sq, big_sq = case.by_hand()
        assert (line["step"], line["small_batch"], line["big_batch"]) == (NUM_STEPS, small, big), case
        assert line["small_sq"] == pytest.approx(small_sq, rel=1e-12), case
        narrow = case.parallel == NARROW["parallel"]
        assert line["big_sq"] == pytest.approx(big_sq, rel=5e-3 if narrow else 1e-12), case


# --- whole runs


STEPS = 60


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of the runs on-N and off-N with N = 1 and 2 ranks."""
    root = tmp_path_factory.mktemp("noise")
    common: dict[str, Any] = {
        "schedule": {"steps": STEPS},
        "eval": {"every_steps": 0},
        "precision": "fp64",
        "model": {"num_layers": 1},
        "batch": {"ramp_fraction": 0.5, "ramp_quantum": 4},
    }
    shards = write_shards(root / "shards", train=960)
    logs = {"on": {"every_steps": 7, "noise_scale": True}, "off": {"every_steps": 7}}
    runs = {
        f"{name}-{ranks}": (ranks, settings(shards, common, log=log))
        for ranks in (1, 2)
        for name, log in logs.items()
    }
    return train_named(root, runs)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_measurement_does_not_change_a_bit_of_the_weights(runs: Path, ranks: int) -> None:
    on, off = (state(runs / f"{name}-{ranks}", STEPS) for name in ("on", "off"))
    assert on.keys() == off.keys()
    assert [name for name in on if not torch.equal(on[name], off[name])] == []
    assert not (runs / f"off-{ranks}" / "noise.jsonl").exists()
    assert summary(runs / f"off-{ranks}")["noise_scale"] is None


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_line_has_the_steps_of_one_batch_size_and_the_summary_the_estimate(runs: Path, ranks: int) -> None:
    """The ramp leaves batch 4 after step 15. The step of the dry run is not counted."""
    run = runs / f"on-{ranks}"
    lines = read_lines(run / "noise.jsonl")
    assert [line["step"] for line in lines] == [7, 14, 15, 21, 28, 35, 42, 49, 56, 60]
    assert [len(line["small_sq"]) for line in lines] == [7, 7, 1, 6, 7, 7, 7, 7, 7, 4]
    assert [line["big_batch"] for line in lines] == [4] * 3 + [8] * 7
    assert [line["small_batch"] for line in lines] == ([2] * 10 if ranks == 1 else [2] * 3 + [4] * 7)
    scale = estimate_of_run(run)
    assert (scale.steps, scale.model_dump(mode="json")) == (STEPS, summary(run)["noise_scale"])
