"""N ranks distil what one rank distils, into a BiLSTM and into a transformer, with dropout on."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from bert_dp.examples.table import LOGITS
from tests.example_files import label_names, write_examples
from tests.parity.runs import settings, summary, train_run
from tests.parity.test_finetune import assert_same

STEPS, TRAIN = 12, 40
LSTM = {"lstm_size": 12, "num_layers": 1, "num_heads": 1, "dropout": 0.1}
TRANSFORMER = {"num_heads": 4, "dropout": 0.1, "attention_dropout": 0.1}
CELLS: dict[str, tuple[dict[str, Any], int, int, str]] = {
    "lstm-n2": (LSTM, 2, 2, "auto"),
    "lstm-n4": (LSTM, 4, 2, "auto"),
    "lstm-zero1-n2": (LSTM, 2, 4, "zero1"),
    "lstm-fsdp-n2": (LSTM, 2, 4, "fsdp"),
    "transformer-n2": (TRANSFORMER, 2, 2, "auto"),
}
"""Student, ranks, micro batch and engine."""


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared examples, beside the logits of a teacher in two parts."""
    folder = write_examples(tmp_path_factory.mktemp("examples"), train=TRAIN)
    logits = np.random.default_rng(0).normal(size=(TRAIN, 3)).astype(np.float32)
    for part in range(2):
        save_file({"logits": logits[part * 20 :][:20]}, folder / LOGITS.format(part))
    return folder


def distilling(
    examples: Path, model: dict[str, Any], micro_size: int = 8, engine: str = "auto"
) -> dict[str, Any]:
    own: dict[str, Any] = {
        "data": {"sequence_length": 32},
        "objective": {"name": "distill"},
        "finetune": {"labels": label_names("single_label"), "head_size": 24},
        "distill": {"logits": str(examples), "alpha": 0.25},
        "model": model,
        "batch": {"global_size": 8, "micro_size": micro_size},
        "parallel": {"engine": engine},
        "schedule": {"steps": STEPS, "name": "cosine"},
        "eval": {"every_steps": 0},
        "precision": "fp64",
    }
    return settings(examples, own)


@pytest.fixture(scope="module")
def one_rank(examples: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("one")
    models = {"lstm": LSTM, "transformer": TRANSFORMER}
    return {name: train_run(folder / name, distilling(examples, model)) for name, model in models.items()}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.quick if name == "lstm-n2" else ()) for name in CELLS]
)
def test_n_ranks_distil_alike(name: str, examples: Path, one_rank: dict[str, Path], tmp_path: Path) -> None:
    model, ranks, micro_size, engine = CELLS[name]
    base = one_rank[name.partition("-")[0]]
    run = train_run(tmp_path, distilling(examples, model, micro_size, engine), ranks)
    assert_same(run, base, loss=1e-10, weights=1e-10, steps=STEPS)
    assert summary(run)["heldout"]["examples"] == 11
