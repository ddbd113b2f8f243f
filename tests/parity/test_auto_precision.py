"""Two ranks under `precision: auto`, on CPUs with and without bf16 units, and on from a checkpoint there."""

import os
from pathlib import Path
from typing import Any

import pytest

from bert_dp.training import devices
from bert_dp.training import rank as worker
from tests.helpers import read_json
from tests.parity.runs import metrics, settings, write_run
from tests.ranks import run_ranks

LATER = 4  # steps, after 2
STARTS: tuple[tuple[str, int, tuple[bool, bool]], ...] = (  # run, steps, which ranks have units
    ("both", 2, (True, True)),
    ("one", 2, (True, False)),
    ("none", 2, (False, False)),
    ("both", LATER, (False, False)),
    ("none", LATER, (True, True)),
)


def train_all(root: str) -> None:
    store, rank = os.environ["BERT_DP_INIT_FILE"], int(os.environ["RANK"])
    for number, (name, steps, units) in enumerate(STARTS):
        os.environ["BERT_DP_INIT_FILE"] = f"{store}-{number}"
        mine: Any = ("amx_bf16",) if units[rank] else ()
        devices.bf16_units = lambda mine=mine: mine
        assert worker.main([f"{root}/{name}-{steps}.yaml", "--run-dir", f"{root}/{name}"]) == 0


@pytest.fixture(scope="module")
def runs(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("auto")
    for name, steps, _ in STARTS:
        config = settings(shards, precision="auto", schedule={"name": "constant", "steps": steps})
        write_run(root / "config", config).joinpath("config.yaml").rename(root / f"{name}-{steps}.yaml")
    run_ranks(2, train_all, str(root))
    return root


@pytest.mark.parametrize(("name", "precision"), [("both", "bf16"), ("one", "fp32"), ("none", "fp32")])
def test_ranks_take_what_all_can_and_a_run_keeps_it(runs: Path, name: str, precision: str) -> None:
    run_dir = runs / name
    assert read_json(run_dir / "summary.json")["precision"] == precision
    assert read_json(run_dir / "environment.json")["worker"]["precision"] == precision
    for path in (run_dir / "checkpoints").glob("step-*/state.json"):
        facts = read_json(path)
        assert (facts["precision"], facts["config"]["precision"]) == (precision, "auto")


def test_the_loss_tells_which_it_was(runs: Path) -> None:
    both, one, none = (
        [line["loss"] for line in metrics(runs / name)[:2]] for name in ("both", "one", "none")
    )
    assert one == none != both
    assert both == pytest.approx(none, abs=5e-3)
    assert len(metrics(runs / "both")) == LATER
