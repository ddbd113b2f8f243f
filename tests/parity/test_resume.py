"""Promise 3: a resumed run is bit-equal on as many ranks, and keeps its sample order on more or fewer."""

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers import logged, read_json
from tests.parity.runs import metrics, samples_by_step, settings, state, train_run, train_runs, write_run
from tests.tensors import bits

SIZES = (1, 2, 4)
MEASURED = re.compile(r".*(_s|_gib|_per_gpu)")
SAVES = {"every_steps": 14, "every_minutes": 0.25, "keep": 9}


def config(shards: Path) -> dict:
    return settings(shards, schedule={"steps": 30}, checkpoint=SAVES, model={"dropout": 0.1})


def unmeasured(line: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in line.items() if not MEASURED.fullmatch(key)}


@pytest.fixture(scope="module")
def runs(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train root/whole/N on N ranks without interruption, root/cut/N from the checkpoint of root/whole/N at
    step 14, and root/moved/N from the checkpoint of root/whole/1 at step 14."""
    root = tmp_path_factory.mktemp("resume")
    for size in SIZES:
        train_run(root / "whole" / str(size), config(shards), size, seconds_per_call=1.0)
        again = []
        for kind, origin in (("cut", size), ("moved", 1)):
            run_dir = write_run(root / kind / str(size), config(shards))
            shutil.copytree(
                root / "whole" / str(origin) / "checkpoints" / "step-00000014",
                run_dir / "checkpoints" / "step-00000014",
            )
            source = (root / "whole" / str(origin) / "metrics.jsonl").read_text().splitlines()[:17]
            (run_dir / "metrics.jsonl").write_text("\n".join(source) + '\n{"step": 18, "torn')
            again.append(run_dir)
        train_runs(size, again, seconds_per_call=1.0)
    return root


@pytest.mark.parametrize("size", SIZES)
def test_a_resume_on_as_many_ranks_is_bit_equal(runs: Path, size: int) -> None:
    whole, cut = runs / "whole" / str(size), runs / "cut" / str(size)
    for step in (28, 30):
        assert bits(state(whole, step)) == bits(state(cut, step))
    lines = list(zip(metrics(whole), metrics(cut), strict=True))
    assert len(lines) == 30, "lines after the checkpoint are replaced, a torn one too"
    for a, b in lines:
        assert unmeasured(a) == unmeasured(b)
    held_out = [read_json(run / "summary.json")["heldout_loss"] for run in (whole, cut)]
    assert held_out[0] == held_out[1]


@pytest.mark.parametrize("size", SIZES)
def test_saves_by_time_follow_the_clock_of_rank_0_from_the_checkpoint_on(runs: Path, size: int) -> None:
    """A step takes 3 s on this clock, more on others. No save follows within 200 s of one that took 2 s."""
    saved = {
        kind: sorted(int(path.name[5:]) for path in (runs / kind / str(size)).glob("checkpoints/step-*"))
        for kind in ("whole", "cut")
    }
    assert saved == {"whole": [0, 6, 14, 28, 30], "cut": [14, 20, 28, 30]}


@pytest.mark.parametrize("size", SIZES[1:])
def test_a_resume_on_another_number_of_ranks_continues_with_the_same_samples(runs: Path, size: int) -> None:
    whole, moved = runs / "whole" / "1", runs / "moved" / str(size)
    expected = samples_by_step(whole)[14:]
    seen = samples_by_step(moved)
    assert len(seen) == 16
    for a, b in zip(expected, seen, strict=True):
        assert a.keys() == b.keys()
        assert all(np.array_equal(a[i][0], b[i][0]) for i in a)
    assert logged(whole, "loss")[14:] == pytest.approx(logged(moved, "loss")[14:], abs=1e-5)
