"""Check that a new engine or a new optimizer needs only one file and one row of a table."""

import os
from pathlib import Path

from tests.e2e.cli import train
from tests.helpers import logged
from tests.parity.runs import losses

ENGINE = "from bert_dp.parallel.ddp import make\n"
OPTIMIZER = """
import torch

from bert_dp.optim import parameter_groups


def make(config, named, model, *, compiled, precision):
    return torch.optim.SGD(parameter_groups(named, config.weight_decay, model.is_decayed), lr=0.0, fused=True)
"""
# adds the two rows and makes the two files importable in every process of the run
SITE = """
import importlib.abc, importlib.util, pathlib, sys

from bert_dp.config.engines import ENGINES, OPTIMIZERS, EngineFacts, OptimizerFacts

ENGINES["toy"] = EngineFacts(min_ranks=2)
OPTIMIZERS["toy"] = OptimizerFacts()
FILES = {"bert_dp.parallel.toy": "engine.py", "bert_dp.optim.toy": "optimizer.py"}


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in FILES:
            return importlib.util.spec_from_file_location(name, pathlib.Path(__file__).parent / FILES[name])


sys.meta_path.insert(0, Finder())
"""


def test_a_toy_engine_and_a_toy_optimizer_train(tmp_path: Path, shards: Path) -> None:
    files = {"engine.py": ENGINE, "optimizer.py": OPTIMIZER, "sitecustomize.py": SITE}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    toy = ("optim.name=toy", "optim.lr=0.5", "schedule.steps=4", "schedule.name=constant", "compile=off")
    train(shards, tmp_path / "two", "parallel.engine=toy", *toy, PYTHONPATH=path)
    train(shards, tmp_path / "ddp", "parallel.engine=ddp", *toy, PYTHONPATH=path)
    assert losses(tmp_path / "two") == losses(tmp_path / "ddp")
    assert logged(tmp_path / "two", "loss")[-1] < logged(tmp_path / "two", "loss")[0]
    done = train(shards, tmp_path / "one", "parallel.engine=toy", *toy, nproc=1, code=2, PYTHONPATH=path)
    assert "parallel.engine: toy needs at least 2 ranks" in done.stderr
