"""Promise 1 over the whole matrix: every engine, optimizer, number of ranks and tensor-parallel size."""

import itertools
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from bert_dp.config import ENGINES, OPTIMIZERS
from tests.helpers import logged
from tests.parity import matrix
from tests.parity.matrix import Cell, Deviation
from tests.parity.runs import losses, metrics, settings, state, train_named, train_run
from tests.tensors import largest_relative_error


def ci_cells() -> list[Cell]:
    """Every engine x optimizer, every engine x (ranks, tensor), both precisions and accumulations."""
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
"""engine -> the cell of the quick suite; all of two ranks, so that they share one start."""


@pytest.fixture(scope="module")
def deviations(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[Cell, Deviation | str]:
    """Of the cells that are selected."""
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
def test_cell(deviations: dict[Cell, Deviation | str], cell: Cell) -> None:
    outcome = deviations[cell]
    assert isinstance(outcome, Deviation), outcome
    assert outcome.problems(cell) == []


@pytest.mark.quick
def test_no_cell_is_missing() -> None:
    """Every engine and optimizer that the configuration knows is in the matrix, at each N and tensor size."""
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
def test_refused_cells_are_those_that_cannot_be_right() -> None:
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


def test_a_checkpoint_of_any_engine_goes_on_in_any_other(shards: Path, tmp_path: Path) -> None:
    chain = (
        ("zero1", 2, 1),
        ("fsdp", 4, 2),
        ("ddp", 2, 2),
        ("fsdp", 2, 1),
        ("zero1", 4, 2),
        ("single", 1, 1),
        ("ddp", 4, 1),
        ("zero1", 4, 1),
    )
    common = {"precision": "fp64", "optim": {"name": "lamb", "lr": 1e-2}, "checkpoint": {"keep": 99}}
    common |= {"batch": {"global_size": 8, "micro_size": 2}}

    def config(steps: int, engine: str, tensor: int) -> dict:
        parallel = {"engine": engine, "tensor": tensor}
        return settings(shards, schedule={"steps": steps, "name": "constant"}, parallel=parallel, **common)

    whole = train_run(tmp_path / "whole", config(4 * len(chain), "single", 1))
    moving = tmp_path / "moving"
    for number, (engine, ranks, tensor) in enumerate(chain):
        train_run(moving, config(4 * (number + 1), engine, tensor), ranks)
    lines = list(zip(metrics(whole), metrics(moving), strict=True))
    assert len(lines) == 4 * len(chain)
    for a, b in lines:
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-9), a["step"]
    last = 4 * len(chain)
    one, many = state(whole, last), state(moving, last)
    assert one.keys() == many.keys()
    assert all(one[name].shape == many[name].shape for name in one)
    assert largest_relative_error(many, one) < 1e-9


NAN_ENGINES = (("ddp", 2, 1), ("zero1", 2, 1), ("fsdp", 2, 1), ("ddp", 2, 2), ("zero1", 4, 2), ("fsdp", 4, 2))


@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
def test_a_nan_on_one_rank_skips_the_step_on_all(shards: Path, tmp_path: Path, optimizer: str) -> None:
    """A poisoned step leaves no trace: the run equals one of which that step has learning rate 0."""
    common: dict[str, Any] = {
        "precision": "fp64",
        "schedule": {"steps": 6},
        "optim": {"name": optimizer},
        "checkpoint": {"every_steps": 1, "keep": 99},
    }
    for engine, ranks, tensor in NAN_ENGINES:
        run_dir = tmp_path / f"{engine}-{ranks}-{tensor}"
        config = settings(shards, common, parallel={"engine": engine, "tensor": tensor})
        train_run(run_dir, config, ranks, poison=(ranks - 1, range(3, 4)))
        before, after, end = (state(run_dir, step) for step in (3, 4, 6))
        assert all(before[name].equal(after[name]) for name in before), run_dir.name
        assert not all(before[name].equal(end[name]) for name in before)
        assert logged(run_dir, "skipped_steps") == [0, 0, 0, 1, 1, 1], run_dir.name


OPTIONS: dict[str, tuple[int, dict[str, object], float]] = {
    "ddp small buckets": (2, {"engine": "ddp", "bucket_mib": 0.01}, 1e-10),
    "ddp static graph": (2, {"engine": "ddp", "static_graph": True}, 1e-10),
    "ddp bf16 sent": (2, {"engine": "ddp", "reduce_dtype": "bf16"}, 2e-2),
    "zero1 small buckets": (2, {"engine": "zero1", "bucket_mib": 0.01}, 1e-10),
    "accelerate small buckets": (2, {"engine": "accelerate", "bucket_mib": 0.01}, 1e-10),
    "ddp recomputed": (2, {"engine": "ddp", "activation_checkpointing": True}, 1e-10),
    "fsdp recomputed": (2, {"engine": "fsdp", "activation_checkpointing": True}, 1e-10),
    "fsdp hybrid": (4, {"engine": "fsdp", "fsdp_replicas": 2}, 1e-10),
    "fsdp hybrid in tensor": (4, {"engine": "fsdp", "fsdp_replicas": 2, "tensor": 2}, 1e-10),
    "tensor recomputed": (4, {"engine": "ddp", "tensor": 4, "activation_checkpointing": True}, 1e-10),
}
"""name -> (ranks, parallel section, how far the loss may be from one process)."""


@pytest.fixture(scope="module")
def option_runs(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    common = {"precision": "fp64", "schedule": {"steps": 10}, "optim": {"name": "lamb", "lr": 1e-2}}
    common["model"] = {"num_heads": 4}
    runs = {"single": (1, settings(shards, common))}
    for name, (ranks, parallel, _) in OPTIONS.items():
        if parallel["engine"] != "accelerate" or find_spec("accelerate"):
            runs[name] = (ranks, settings(shards, common, parallel=parallel))
    return train_named(tmp_path_factory.mktemp("options"), runs)


@pytest.mark.parametrize("name", OPTIONS)
def test_option(option_runs: Path, name: str) -> None:
    _, parallel, tolerance = OPTIONS[name]
    if parallel["engine"] == "accelerate":
        pytest.importorskip("accelerate")
    pairs = list(zip(losses(option_runs / name), losses(option_runs / "single"), strict=True))
    assert len(pairs) == 10
    far = max(abs(a - b) for a, b in pairs)
    assert far < tolerance
    if tolerance > 1e-10:  # 16 bits on the wire must show, or nothing narrow was sent
        assert far > 1e-9


def test_a_compiled_run_is_the_eager_one(shards: Path, tmp_path: Path) -> None:
    """By inductor; what it compiles is the subject of test_compiled.py, all engines are in `make parity`."""
    common, parallel = {"schedule": {"steps": 5}}, {"tensor": {"tensor": 2}, "fsdp": {"engine": "fsdp"}}
    runs = {name: (2, settings(shards, common, compile="on", parallel=own)) for name, own in parallel.items()}
    train_named(tmp_path, {"eager": (1, settings(shards, common)), **runs})
    for name in runs:
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "eager"), abs=1e-5), name


NARROW = (("ddp", 1), ("zero1", 1), ("fsdp", 1), ("ddp", 2), ("fsdp", 2))
SENT = "fp16-ddp-1-sent"
"""Of the gradient too, under the loss scale."""


@pytest.fixture(scope="module")
def narrow_runs(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """root/<precision>-<engine>-<tensor>, and root/<precision>-single-1: of one process."""
    common = {"schedule": {"name": "constant", "steps": 30}}
    sent = {"engine": "ddp", "reduce_dtype": "fp16"}
    runs = {SENT: (2, settings(shards, common, precision="fp16", parallel=sent))}
    for precision, (engine, tensor) in itertools.product(("bf16", "fp16"), (("single", 1), *NARROW)):
        config = settings(shards, common, precision=precision, parallel={"engine": engine, "tensor": tensor})
        runs[f"{precision}-{engine}-{tensor}"] = (1 if engine == "single" else 2, config)
    return train_named(tmp_path_factory.mktemp("narrow"), runs)


def test_a_gradient_is_sent_in_16_bits_under_the_loss_scale(narrow_runs: Path) -> None:
    wide, sent = (losses(narrow_runs / name) for name in ("fp16-ddp-1", SENT))
    assert sent == pytest.approx(wide, abs=5e-3)
    assert sent != wide
    assert metrics(narrow_runs / SENT)[-1]["skipped_steps"] == 0


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_engines_agree_in_16_bits(narrow_runs: Path, precision: str) -> None:
    """Autocast, and for fp16 one loss scale for all ranks: not to a bit, as sums round in another order."""
    wanted = losses(narrow_runs / f"{precision}-single-1")
    assert max(wanted) - min(wanted) > 0.08  # against 0.005 between engines
    for engine, tensor in NARROW:
        run = narrow_runs / f"{precision}-{engine}-{tensor}"
        assert losses(run) == pytest.approx(wanted, abs=5e-3), (engine, tensor)
        assert metrics(run)[-1]["skipped_steps"] == 0
