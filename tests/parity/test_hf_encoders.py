"""N ranks continue the pretraining of an encoder of transformers as one rank does."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.runs import losses, settings, state, train_named
from tests.tensors import largest_relative_error

transformers = pytest.importorskip("transformers")

STEPS = 5
SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"intermediate_size": 48, "max_position_embeddings": 40}
FAMILIES: dict[str, dict[str, Any]] = {
    "Bert": {},
    "Roberta": {"pad_token_id": 1, "type_vocab_size": 1, "hidden_dropout_prob": 0.0},
    "ModernBert": {
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0),
        "local_attention": 6,
    },
}
"""BERT drops a tenth of its states and probabilities."""
CELLS: dict[str, dict[str, Any]] = {
    "ddp": {"engine": "ddp"},
    "zero1": {"engine": "zero1"},
    "fsdp": {"engine": "fsdp"},
    "tensor": {"engine": "ddp", "tensor": 2},
}


@pytest.fixture(scope="module")
def runs(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """root/FAMILY-CELL on two ranks, and root/FAMILY-single."""
    root = tmp_path_factory.mktemp("encoders")
    runs = {}
    for family, own in FAMILIES.items():
        torch.manual_seed(0)
        config = getattr(transformers, f"{family}Config")(**SIZES, **own)
        getattr(transformers, f"{family}ForMaskedLM")(config).save_pretrained(root / family)
        common = {
            "run": {"init_from": f"hf:{root / family}"},
            "precision": "fp64",
            "schedule": {"steps": STEPS},
            "eval": {"every_steps": 0},
        }
        runs[f"{family}-single"] = (1, settings(shards, common))
        for name, parallel in CELLS.items():
            runs[f"{family}-{name}"] = (2, settings(shards, common, parallel=parallel))
    return train_named(root, runs)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_train_what_one_trains(runs: Path, family: str, cell: str) -> None:
    one, many = runs / f"{family}-single", runs / f"{family}-{cell}"
    assert losses(many) == pytest.approx(losses(one), abs=1e-10)
    wanted, found = state(one, STEPS), state(many, STEPS)
    assert wanted.keys() == found.keys()
    assert (wanted["head.decoder_bias"] != 0).any()
    assert largest_relative_error(found, wanted) < 1e-9
