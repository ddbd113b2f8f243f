"""Rows 12 to 14: interrupted runs and runs with another number of ranks have the same results."""

import shutil
from pathlib import Path

import pytest
import torch

from tests.faults.harness import FULL, observe
from tests.parity.runs import metrics, samples_by_step, settings, state, train_runs, write_run
from tests.tensors import largest_relative_error

PAIRS = [(a, b) for a in (1, 2, 3, 4) for b in (1, 2, 3, 4) if a != b] if FULL else [(1, 3), (4, 2)]


def whole_run(root: Path, shards: Path, ranks: int, steps: int) -> Path:
    """Train without interruption, with a checkpoint half way."""
    common = {"schedule": {"steps": steps}, "batch": {"global_size": 12, "micro_size": 1}}
    run_dir = write_run(
        root, settings(shards, checkpoint={"every_steps": steps // 2}, eval={"every_steps": 0}, **common)
    )
    train_runs(ranks, [run_dir])
    return run_dir


def interrupted(whole: Path, copy: Path, half: int) -> Path:
    """Copy a run to the state in which a kill right after the checkpoint half way would have left it."""
    shutil.copytree(whole, copy, ignore=shutil.ignore_patterns("seen-*.npz", f"step-{2 * half:08d}"))
    return copy


@pytest.mark.parametrize("ranks", [1, 2, 3] if FULL else [3])
def test_row_12_a_resume_on_as_many_ranks_is_bit_equal(tmp_path: Path, shards: Path, ranks: int) -> None:
    """tests/parity/test_resume.py tests 1, 2 and 4 ranks."""
    steps = 200 if FULL else 12
    whole = whole_run(tmp_path / "whole", shards, ranks, steps)
    resumed = interrupted(whole, tmp_path / "resumed", steps // 2)
    train_runs(ranks, [resumed])
    a, b = state(whole, steps), state(resumed, steps)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert [x["loss"] for x in metrics(whole)] == [x["loss"] for x in metrics(resumed)]
    observe(12, ranks=ranks, steps=steps, greatest_difference=0.0)


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_row_13_any_n_sees_the_same_samples(tmp_path: Path, shards: Path, before: int, after: int) -> None:
    steps = 50 if FULL else 8
    whole = whole_run(tmp_path / "whole", shards, before, steps)
    resumed = interrupted(whole, tmp_path / "resumed", steps // 2)
    train_runs(after, [resumed])
    wanted = [sorted(step) for step in samples_by_step(whole)][steps // 2 :]
    assert [sorted(step) for step in samples_by_step(resumed)] == wanted
    deltas = [abs(a["loss"] - b["loss"]) for a, b in zip(metrics(whole), metrics(resumed), strict=True)]
    observe(13, before=before, after=after, steps=steps, greatest_loss_difference=max(deltas))
    assert max(deltas) <= 1e-5


@pytest.fixture(scope="module")
def one_step(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> Path:
    """Train runs <precision>-<ranks> of one step from the same weights."""
    root = tmp_path_factory.mktemp("one-step")
    common = {"schedule": {"steps": 1}, "batch": {"global_size": 12, "micro_size": 1}, "optim": {"clip": 0.0}}
    for ranks in (1, 2, 3, 4):
        runs = [
            write_run(root / f"{precision}-{ranks}", settings(shards, precision=precision, **common))
            for precision in ("fp32", "fp64")
        ]
        train_runs(ranks, runs)
    return root


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(("precision", "limit"), [("fp32", 1e-6), ("fp64", 1e-14)])
def test_row_14_ranks_compute_one_gradient(one_step: Path, ranks: int, precision: str, limit: float) -> None:
    """AdamW's first moment after one step is (1 - beta1) x the gradient. The error is relative to all tensors
    together, because a gradient that nearly cancels has a large error relative to itself."""
    gradients = [
        {k: v.double() for k, v in state(one_step / f"{precision}-{n}", 1).items() if k.endswith("/exp_avg")}
        for n in (1, ranks)
    ]
    one, many = (torch.cat([g[k].flatten() for k in sorted(g)]) for g in gradients)
    error = float((many - one).norm() / one.norm())
    assert len(one) == 19_841
    worst = largest_relative_error(gradients[1], gradients[0])
    observe(14, ranks=ranks, precision=precision, relative_error=error, worst_tensor=worst)
    assert error <= limit
