"""Engines that wrap another package: a bad gradient on one rank, checkpoints from one engine to another."""

import importlib.util
import json
import os
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bert_dp import optim
from bert_dp.config import ConfigError, resolve
from bert_dp.measure.profile_step import ALONE
from bert_dp.model import bert
from bert_dp.parallel import deepspeed, make_engine
from bert_dp.training import distributed
from bert_dp.training.process import read_world
from tests.helpers import read_json
from tests.parity.runs import BASE, _train_all, metrics, parallel, settings, state, write_run
from tests.ranks import run_ranks
from tests.tensors import CPU, bits, largest_relative_error

STAGES = ("deepspeed-0", "deepspeed-1", "deepspeed-2", "deepspeed-3")
ENGINES = ("accelerate", *STAGES)
CHAIN = ("ddp", "deepspeed-3", "accelerate", "deepspeed-1")
STEPS, EVERY = 25, 6
BAD = (float("nan"), float("inf"))


def installed(*engines: str) -> list[str]:
    """Those whose package is there."""
    return [e for e in engines if e == "ddp" or importlib.util.find_spec(e.partition("-")[0])]


def needs(*engines: str) -> None:
    missing = set(engines) - set(installed(*engines))
    if packages := sorted({engine.partition("-")[0] for engine in missing}):
        pytest.skip(f"not installed: {', '.join(packages)}")


def _steps(engine_name: str, folder: str, script: Sequence[float]) -> tuple[list[float], Any]:
    """One step for each entry of `script`, 1.0 or what rank 1's first loss is multiplied by.

    Returns the norms and, on rank 0, the canonical state after them.
    """
    world, device = read_world(os.environ), CPU
    os.environ["BERT_DP_INIT_FILE"] += "-next"
    distributed.connect(world, device)
    own = {"data": {"sources": ["builtin"]}, "parallel": parallel(engine_name)}
    config = resolve([BASE, own, {"optim": {"lr": 1e-2, "clip": 0.5}}])
    engine = make_engine(
        engine_name.partition("-")[0], config, world, device, precision="fp32", run_dir=Path(folder)
    )

    def make_optimizer(named: Any) -> torch.optim.Optimizer:
        return optim.make_optimizer(config.optim, named, bare)

    bare = bert.build_model(config.model, 16, 0)
    wrapped, optimizer = engine.prepare(bare, make_optimizer)
    optim.set_lr(optimizer, 1e-2)
    norms = []
    good_steps = 0
    for factor in script:
        good_steps += factor == 1.0
        for micro in (0, 1):
            seed = 1000 * good_steps + 10 * micro + engine.dp_rank
            ids = torch.randint(7, 64, (2, 16), generator=torch.Generator().manual_seed(seed))
            positions = torch.arange(0, 32, 8)
            with engine.accumulate(last=micro == 1):
                loss = wrapped(ids, positions, ids.flatten()[positions]) / 16
                if micro == 0 and engine.dp_rank == 1:
                    loss = loss * factor
                engine.backward(loss)
        norms.append(float(engine.step(config.optim.clip)))
        if engine_name == "accelerate":  # views of DDP's buckets: freed, they would stand twice
            assert all(p.grad is not None and not p.grad.any() for p in bare.parameters())
    gathered = engine.gather_state()
    distributed.disconnect()
    return norms, gathered


def _spoil(engines: list[str], folder: str) -> None:
    rank = int(os.environ["RANK"])
    for name in engines:
        norms, spoilt = _steps(name, folder, (1.0, *BAD, 1.0))
        plain_norms, plain = _steps(name, folder, (1.0, 1.0))
        first = _steps(name, folder, (1.0, *BAD))[1]
        result: dict[str, Any] = {"norms": norms, "plain_norms": plain_norms}
        if rank == 0:
            both = [{**s["model"], **s["optimizer"]} for s in (spoilt, plain, first)]
            result["differing"] = [k for k in both[0] if not torch.equal(both[0][k], both[1][k])]
            result["moved"] = [k for k in both[0] if not torch.equal(both[0][k], both[2][k])]
            result["steps"] = sorted({float(v) for k, v in both[2].items() if k.endswith("/step")})
            result["keys"] = len(both[0])
        (Path(folder) / f"{name}-{rank}.json").write_text(json.dumps(result))


@pytest.fixture(scope="module")
def spoilt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """<engine>-<rank>.json of two ranks: what steps with and without bad ones between them gave."""
    folder = tmp_path_factory.mktemp("spoilt")
    if engines := installed(*ENGINES):
        run_ranks(2, _spoil, engines, str(folder))
    return folder


@pytest.mark.parametrize("engine", ENGINES)
def test_a_bad_gradient_on_one_rank_skips_the_step_on_all(spoilt: Path, engine: str) -> None:
    needs(engine)
    ranks = [read_json(spoilt / f"{engine}-{rank}.json") for rank in (0, 1)]
    for result in ranks:
        finite = [torch.tensor(norm).isfinite().item() for norm in result["norms"]]
        assert finite == [True, False, False, True], "step() says which were skipped"
        assert [result["norms"][0], result["norms"][3]] == result["plain_norms"]
    result = ranks[0]
    assert result["steps"] == [1.0], "step counters stand still"
    assert result["differing"] == [], "weights, moments and counters are as if the bad steps had not been"
    assert len(result["moved"]) == result["keys"], "and the next good step moves all of them"


def _resume(runs: list[tuple[str, str]]) -> None:
    """Train each run directory from the checkpoint beside it, one after the other in the same ranks."""
    for run_dir, origin in runs:
        _train_all([run_dir], {"resume": origin})


@pytest.fixture(scope="module")
def runs(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """root/<i>-<engine>: CHAIN, each from the checkpoint i x EVERY of the one before it, to the end.
    root/whole-<stage>, root/cut-<stage>: uninterrupted, and resumed from its checkpoint at 2 x EVERY."""
    root = tmp_path_factory.mktemp("wrapped")

    def run(name: str, engine: str, origin: str, step: int) -> tuple[str, str]:
        schedule = {"steps": STEPS, "name": "cosine"}
        config = settings(
            shards, schedule=schedule, checkpoint={"every_steps": EVERY}, parallel=parallel(engine)
        )
        write_run(root / name, config)
        return str(root / name), str(root / origin / f"checkpoints/step-{step:08d}") if origin else "never"

    chain = [
        run(f"{i}-{e}", e, f"{i - 1}-{CHAIN[i - 1]}" if i else "", i * EVERY) for i, e in enumerate(CHAIN)
    ]
    again = [
        pair
        for stage in STAGES
        for pair in (
            run(f"whole-{stage}", stage, "", 0),
            run(f"cut-{stage}", stage, f"whole-{stage}", 2 * EVERY),
        )
    ]
    whole = len(installed(*CHAIN)) == len(CHAIN)
    run_ranks(2, _resume, (chain if whole else []) + (again if installed(*STAGES) else []))
    return root


def test_a_checkpoint_goes_from_engine_to_engine(runs: Path) -> None:
    """ddp -> ZeRO 3 -> accelerate -> ZeRO 1 trains what ddp alone trains."""
    needs(*CHAIN)
    whole = runs / f"0-{CHAIN[0]}"
    for i, engine in enumerate(CHAIN):
        later = metrics(runs / f"{i}-{engine}")
        assert [line["step"] for line in later] == list(range(i * EVERY + 1, STEPS + 1))
        for line, expected in zip(later, metrics(whole)[i * EVERY :], strict=True):
            assert line["loss"] == pytest.approx(expected["loss"], abs=1e-5)
            assert line["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    end, expected = state(runs / f"{len(CHAIN) - 1}-{CHAIN[-1]}", STEPS), state(whole, STEPS)
    assert largest_relative_error(end, expected) < 1e-4  # weights, moments and step counters
    assert {k: v.dtype for k, v in end.items()} == {k: v.dtype for k, v in expected.items()}
    start = state(whole, EVERY)
    assert largest_relative_error(expected, start) > 0.1, "the tolerances could not see a stale state"


@pytest.mark.parametrize("engine", STAGES)
def test_resume_under_deepspeed_is_bit_equal(runs: Path, engine: str) -> None:
    needs(engine)
    whole, cut = runs / f"whole-{engine}", runs / f"cut-{engine}"
    assert bits(state(whole, STEPS)) == bits(state(cut, STEPS))
    assert read_json(whole / "deepspeed.json")["zero_optimization"]["stage"] == int(engine[-1])


def test_deepspeed_refuses_the_fp16_that_auto_chose(tmp_path: Path) -> None:
    """On a GPU without bf16; the configuration alone, checked before, says only auto."""
    config = resolve([BASE, {"data": {"sources": ["builtin"]}, "parallel": {"engine": "deepspeed"}}])
    with pytest.raises(ConfigError, match="precision: auto means fp16"):
        deepspeed.Engine(config, ALONE, CPU, precision="fp16", run_dir=tmp_path)


def test_a_missing_package_is_told_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ModuleNotFoundError("No module named 'hjson'", name="hjson")

    monkeypatch.setitem(sys.modules, "bert_dp.parallel.deepspeed", types.SimpleNamespace(Engine=broken))
    config = resolve([{**BASE, "data": {"sources": ["builtin"]}}])
    with pytest.raises(ConfigError, match=r"needs hjson, from `pip install 'deepspeed>="):
        make_engine("deepspeed", config, ALONE, CPU, precision="fp32", run_dir=tmp_path)
