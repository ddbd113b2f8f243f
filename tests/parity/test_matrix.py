"""Test promise 1 for every engine, optimizer, number of ranks and tensor-parallel size."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from bert_dp.config import ENGINES, OPTIMIZERS
from tests.helpers import logged, read_json
from tests.parity import matrix
from tests.parity.matrix import Cell, Deviation
from tests.parity.runs import evals, installed, losses, metrics, parallel, settings, state, train_named
from tests.tensors import bits, largest_relative_error


def ci_cells() -> list[Cell]:
    """Select cells of every engine x optimizer and engine x (ranks, tensor), in all precisions."""
    chosen = {}
    for cell in matrix.cells():
        if matrix.excuse(cell) is not None or cell.form != "eager":
            continue
        if cell.task == "toy":
            chosen[str(cell)] = cell if cell.ranks == 2 or cell.engine in ("ddp", "fsdp") else None
            continue
        chosen.setdefault((cell.engine, cell.optimizer), cell if cell.ranks == 2 else None)
        if cell.ranks == 2 and cell.accumulation == 3 and cell.precision == "fp32":
            chosen[cell.engine, cell.optimizer] = cell
        exact = cell.precision == "fp64" or cell.engine.startswith("deepspeed")
        if exact and cell.optimizer == "adamw" and cell.accumulation == (3 if cell.tensor > 1 else 1):
            chosen[cell.engine, cell.ranks, cell.tensor] = cell
        if cell.optimizer == "lamb" and cell.tensor == 2 and cell.ranks == 4 and cell.accumulation == 1:
            chosen["lamb", cell.engine, cell.precision] = cell
    return sorted({cell for cell in chosen.values() if cell is not None})


CELLS = ci_cells()
FIRST = {
    cell.engine: cell for cell in reversed(CELLS) if (cell.ranks, cell.tensor, cell.task) == (2, 1, "mlm")
}
"""engine -> its cell of the quick tests. All have two ranks, so that they share one spawn."""


@pytest.fixture(scope="module")
def deviations(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[Cell, Deviation | str]:
    """Train the cells of all selected tests and return their deviations."""
    calls = [
        item.callspec
        for item in request.session.items
        if item.getparent(pytest.Module) is request.node and hasattr(item, "callspec")
    ]
    wanted = {call.params["cell"] for call in calls if "cell" in call.params}
    return dict(matrix.run_cells(sorted(wanted), tmp_path_factory.mktemp("matrix")))


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "cell",
    [pytest.param(cell, marks=pytest.mark.quick if cell in FIRST.values() else ()) for cell in CELLS],
    ids=str,
)
def test_parity(deviations: dict[Cell, Deviation | str], cell: Cell) -> None:
    outcome = deviations[cell]
    assert isinstance(outcome, Deviation), outcome
    assert outcome.problems(cell) == []


@pytest.mark.quick
def test_the_matrix_has_every_engine_and_optimizer() -> None:
    """Each engine and optimizer of the configuration has cells with every number of ranks and tensor size."""
    engines = set(ENGINES) - {"single", "independent"}
    eager = {cell for cell in matrix.cells() if cell.form == "eager"}
    compiled = set(matrix.compiled_cells())
    assert {cell.engine.partition("-")[0] for cell in eager} == engines
    assert {c.optimizer for c in eager} == set(OPTIMIZERS)
    assert len(eager) == 8 * 3 * 6 * 2 * 2 + 8 * 3
    assert {cell.engine.partition("-")[0] for cell in compiled} == engines | {"single"}
    assert {cell.form for cell in compiled} == set(matrix.FORMS) - {"eager"}
    assert [cell for cell in compiled if cell.refusal() is not None] == []
    assert set(matrix.cells()) == eager | compiled
    assert {c.engine for c in CELLS} == set(matrix.ENGINES) == set(FIRST)


@pytest.mark.quick
def test_exactly_the_unsupported_cells_are_refused() -> None:
    for cell in matrix.cells():
        wrapped = cell.engine.startswith(("deepspeed", "accelerate"))
        deepspeed = cell.engine.startswith("deepspeed")
        wrong = (
            (cell.tensor > 1 and (wrapped or cell.optimizer == "muon"))
            or (cell.optimizer == "muon" and (deepspeed or cell.engine == "fsdp"))
            or (cell.optimizer == "lamb" and deepspeed and cell.engine != "deepspeed-0")
            or (deepspeed and cell.precision == "fp64")
        )
        assert (cell.refusal() is not None) == wrong, (cell, cell.refusal())


# engine, ranks and tensor of each start of a run
OWN_ENGINES = "zero1 2 1, fsdp 4 2, ddp 2 2, fsdp 2 1, zero1 4 2, single 1 1, ddp 4 1, zero1 4 1"
WRAPPED = "ddp 2 1, deepspeed-3 2 1, accelerate 2 1, deepspeed-1 2 1"
LAMB = {"precision": "fp64", "optim": {"name": "lamb", "lr": 1e-2}}


@pytest.mark.parametrize(
    ("parts", "own", "loss", "weights"), [(OWN_ENGINES, LAMB, 1e-9, 1e-9), (WRAPPED, {}, 1e-5, 1e-4)]
)
def test_a_checkpoint_of_any_engine_resumes_in_any_other(
    shards: Path, tmp_path: Path, parts: str, own: dict[str, Any], loss: float, weights: float
) -> None:
    chain = [(engine, int(ranks), int(tensor)) for engine, ranks, tensor in map(str.split, parts.split(","))]
    if len(installed(*(engine for engine, *_ in chain))) < len(chain):
        pytest.skip("a package that an engine wraps is not installed")

    def config(steps: int, engine: str, tensor: int) -> dict[str, Any]:
        schedule = {"steps": steps, "name": "constant"}
        return settings(shards, own, schedule=schedule, parallel=parallel(engine, tensor=tensor))

    last, whole, moving = 4 * len(chain), tmp_path / "whole", tmp_path / "moving"
    train_named(tmp_path, {"whole": (1, config(last, "single", 1))})
    for number, (engine, ranks, tensor) in enumerate(chain, 1):
        train_named(tmp_path, {"moving": (ranks, config(4 * number, engine, tensor))})
    lines = list(zip(metrics(whole), metrics(moving), strict=True))
    assert len(lines) == last
    for a, b in lines:
        assert a["loss"] == pytest.approx(b["loss"], abs=loss), a["step"]
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=loss), a["step"]
    one, many = state(whole, last), state(moving, last)
    assert {key: (t.shape, t.dtype) for key, t in one.items()} == {
        key: (t.shape, t.dtype) for key, t in many.items()
    }
    assert largest_relative_error(many, one) < weights
    assert largest_relative_error(one, state(moving, 4)) > 0.1, "a stale state could not be detected"


BAD = (*((name, 2, 1) for name in matrix.ENGINES), ("ddp", 2, 2), ("zero1", 4, 2), ("fsdp", 4, 2))
"""(engine, ranks, tensor)."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
def test_a_bad_gradient_on_one_rank_skips_the_step_on_all(
    shards: Path, tmp_path: Path, optimizer: str
) -> None:
    """The loss is NaN, then infinite, which leaves the state unchanged. A run that resumes after both steps
    ends bit-equal."""
    common = {"schedule": {"steps": 7}, "optim": {"name": optimizer}}
    common["checkpoint"] = {"every_steps": 1, "keep": 99}
    runs = {}
    for engine, ranks, tensor in BAD:
        precision = "fp32" if engine.startswith("deepspeed") else "fp64"
        if matrix.excuse(Cell(engine, optimizer, ranks, tensor, precision, 1)) is None:
            own = {"precision": precision, "parallel": parallel(engine, tensor=tensor)}
            runs[f"{engine}-{ranks}-{tensor}"] = (ranks, settings(shards, common, own))
    train_named(tmp_path, runs, poison=(1, range(3, 5)))
    again = {f"{name}/again": run for name, run in runs.items()}
    train_named(tmp_path, again, resume="../checkpoints/step-00000005")
    for name in runs:
        run_dir = tmp_path / name
        before, after, end = (state(run_dir, step) for step in (3, 5, 7))
        assert bits(before) == bits(after), name
        assert not any(before[key].equal(end[key]) for key in before), name
        assert bits(state(run_dir / "again", 7)) == bits(end), name
        assert logged(run_dir / "again", "grad_norm") == logged(run_dir, "grad_norm")[5:], name
        assert logged(run_dir, "skipped_steps") == [0, 0, 0, 1, 2, 2, 2], name
        if name.startswith("deepspeed"):
            assert read_json(run_dir / "deepspeed.json")["zero_optimization"]["stage"] == int(name[10])


OPTIONS: dict[str, tuple[int, dict[str, Any], float]] = {
    "ddp small buckets": (2, {"engine": "ddp", "bucket_mib": 0.01}, 1e-10),
    "ddp static graph": (2, {"engine": "ddp", "static_graph": True}, 1e-10),
    "ddp bf16 reduced": (2, {"engine": "ddp", "reduce_dtype": "bf16"}, 2e-2),
    "zero1 small buckets": (2, {"engine": "zero1", "bucket_mib": 0.01}, 1e-10),
    "accelerate small buckets": (2, {"engine": "accelerate", "bucket_mib": 0.01}, 1e-10),
    "ddp recomputed": (2, {"engine": "ddp", "activation_checkpointing": True}, 1e-10),
    "fsdp recomputed": (2, {"engine": "fsdp", "activation_checkpointing": True}, 1e-10),
    "fsdp hybrid": (4, {"engine": "fsdp", "fsdp_replicas": 2}, 1e-10),
    "fsdp hybrid with tensor": (4, {"engine": "fsdp", "fsdp_replicas": 2, "tensor": 2}, 1e-10),
    "tensor recomputed": (4, {"engine": "ddp", "tensor": 4, "activation_checkpointing": True}, 1e-10),
}
"""name -> (ranks, parallel section, tolerance of the loss)."""


@pytest.fixture(scope="module")
def option_runs(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    common = {"precision": "fp64", "schedule": {"steps": 10}, "optim": {"name": "lamb", "lr": 1e-2}}
    common["model"] = {"num_heads": 4}
    runs = {"single": (1, settings(shards, common))}
    for name, (ranks, own, _) in OPTIONS.items():
        if installed(own["engine"]):
            runs[name] = (ranks, settings(shards, common, parallel=own))
    return train_named(tmp_path_factory.mktemp("options"), runs)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_parallel_option_keeps_the_losses_of_one_process(option_runs: Path, name: str) -> None:
    _, own, tolerance = OPTIONS[name]
    if not installed(own["engine"]):
        pytest.skip("accelerate is not installed")
    pairs = list(zip(losses(option_runs / name), losses(option_runs / "single"), strict=True))
    assert len(pairs) == 10
    far = max(abs(a - b) for a, b in pairs)
    assert far < tolerance
    if tolerance > 1e-10:  # a reduction in 16 bits must change the loss
        assert far > 1e-9


def test_a_run_compiled_by_inductor_equals_the_eager_run(shards: Path, tmp_path: Path) -> None:
    """test_compiled.py checks the captured graphs; `make parity` compiles runs of all engines."""
    common, parallel = {"schedule": {"steps": 5}}, {"tensor": {"tensor": 2}, "fsdp": {"engine": "fsdp"}}
    runs = {name: (2, settings(shards, common, compile="on", parallel=own)) for name, own in parallel.items()}
    train_named(tmp_path, {"eager": (1, settings(shards, common)), **runs})
    for name in runs:
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "eager"), abs=1e-5), name


NARROW = (("ddp", 1), ("zero1", 1), ("fsdp", 1), ("ddp", 2), ("fsdp", 2))
SIXTEEN_BITS: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "residual": {"precision": "bf16", "model": {"residual_dtype": "bf16"}},
}
REDUCED = "fp16-ddp-1-sent"
"""Run whose gradients are also reduced in fp16, under the loss scale."""


@pytest.fixture(scope="module")
def narrow_runs(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train root/<name>-<engine>-<tensor> on two ranks, and root/<name>-single-1 in one process."""
    common = {"schedule": {"name": "constant", "steps": 30}}
    sent = {"engine": "ddp", "reduce_dtype": "fp16"}
    runs = {REDUCED: (2, settings(shards, common, precision="fp16", parallel=sent))}
    for (name, own), (engine, tensor) in itertools.product(SIXTEEN_BITS.items(), (("single", 1), *NARROW)):
        config = settings(shards, common, own, parallel={"engine": engine, "tensor": tensor})
        runs[f"{name}-{engine}-{tensor}"] = (1 if engine == "single" else 2, config)
    return train_named(tmp_path_factory.mktemp("narrow"), runs)


def test_gradients_are_reduced_in_16_bits_under_the_loss_scale(narrow_runs: Path) -> None:
    wide, sent = (losses(narrow_runs / name) for name in ("fp16-ddp-1", REDUCED))
    assert sent == pytest.approx(wide, abs=5e-3)
    assert sent != wide
    assert metrics(narrow_runs / REDUCED)[-1]["skipped_steps"] == 0


@pytest.mark.parametrize("name", SIXTEEN_BITS)
def test_engines_agree_in_16_bits(narrow_runs: Path, name: str) -> None:
    """Runs use autocast and, in fp16, one loss scale for all ranks. Losses differ by rounding only."""
    one = narrow_runs / f"{name}-single-1"
    assert max(losses(one)) - min(losses(one)) > 0.08  # while engines may differ by 0.005
    for engine, tensor in NARROW:
        run = narrow_runs / f"{name}-{engine}-{tensor}"
        assert losses(run) == pytest.approx(losses(one), abs=5e-3), (engine, tensor)
        assert evals(run)[-1]["loss"] == pytest.approx(evals(one)[-1]["loss"], abs=5e-3), (engine, tensor)
        assert metrics(run)[-1]["skipped_steps"] == 0
        assert read_json(run / "summary.json")["precision"] == SIXTEEN_BITS[name]["precision"]
