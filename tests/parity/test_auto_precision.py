"""Test `precision: auto` on two ranks with and without bf16 units, also after resuming from a checkpoint."""

from pathlib import Path

import pytest

from tests.helpers import read_json
from tests.parity.runs import metrics, settings, train_named

LATER = 4  # steps of a resumed run, whose first start has 2
STARTS: tuple[tuple[str, int, tuple[bool, bool]], ...] = (  # run, steps, whether each rank has bf16 units
    ("both", 2, (True, True)),
    ("one", 2, (True, False)),
    ("none", 2, (False, False)),
    ("both", LATER, (False, False)),
    ("none", LATER, (True, True)),
)


@pytest.fixture(scope="module")
def runs(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("auto")
    for name, steps, units in STARTS:
        config = settings(shards, precision="auto", schedule={"name": "constant", "steps": steps})
        train_named(root, {name: (2, config)}, bf16_units=units)
    return root


@pytest.mark.parametrize(("name", "precision"), [("both", "bf16"), ("one", "fp32"), ("none", "fp32")])
def test_ranks_share_a_supported_precision_and_a_run_keeps_it(runs: Path, name: str, precision: str) -> None:
    run_dir = runs / name
    assert read_json(run_dir / "summary.json")["precision"] == precision
    assert read_json(run_dir / "environment.json")["worker"]["precision"] == precision
    for path in (run_dir / "checkpoints").glob("step-*/state.json"):
        facts = read_json(path)
        assert (facts["precision"], facts["config"]["precision"]) == (precision, "auto")


def test_the_loss_shows_which_precision_was_used(runs: Path) -> None:
    both, one, none = (
        [line["loss"] for line in metrics(runs / name)[:2]] for name in ("both", "one", "none")
    )
    assert one == none != both
    assert both == pytest.approx(none, abs=5e-3)
    assert len(metrics(runs / "both")) == LATER
