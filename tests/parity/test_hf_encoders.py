"""Check that N ranks continue pretraining a transformers encoder like one rank, starting from its loss."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bert_dp.config import read_manifest
from bert_dp.data.stream import MlmBatch, Shards, held_out_batches, training_batch
from tests.parity.runs import evals, losses, settings, state, train_named
from tests.shards import write_shards
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
"""transformers class -> settings. Bert keeps its default dropout of 0.1."""
CELLS: dict[str, dict[str, Any]] = {
    "ddp": {"engine": "ddp"},
    "zero1": {"engine": "zero1"},
    "fsdp": {"engine": "fsdp"},
    "tensor": {"engine": "ddp", "tensor": 2},
}


@pytest.fixture(scope="module")
def runs(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train root/FAMILY-CELL on two ranks, and root/FAMILY-single on one."""
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
def test_two_ranks_train_the_model_of_one(runs: Path, family: str, cell: str) -> None:
    one, many = runs / f"{family}-single", runs / f"{family}-{cell}"
    assert losses(many) == pytest.approx(losses(one), abs=1e-10)
    wanted, found = state(one, STEPS), state(many, STEPS)
    assert wanted.keys() == found.keys()
    assert (wanted["head.decoder_bias"] != 0).any()
    assert largest_relative_error(found, wanted) < 1e-9


def test_pretraining_continues_from_the_loss_that_transformers_computes(tmp_path: Path) -> None:
    """A BERT that transformers trained on one text continues on a text with another order of words."""
    size = {"vocab_size": 24, "train": 512, "held_out": 64}
    first, second = (write_shards(tmp_path / f"{seed}", **size, seed=seed) for seed in (0, 1))
    torch.manual_seed(0)
    bert = transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)).eval()  # without dropout

    def loss_of(batch: MlmBatch) -> Tensor:
        logits_PV = bert(input_ids=batch.ids_BS).logits.flatten(0, 1)[batch.positions_P]
        return F.cross_entropy(logits_PV, batch.labels_P)

    texts = Shards(first, read_manifest(first), "train")
    optimizer = torch.optim.AdamW(bert.parameters(), lr=3e-3)
    for step in range(300):
        loss = loss_of(training_batch(texts, np.arange(16) + 16 * step, seed=0, num_masked=4, shuffle=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 2.75, "the loss is not below ln 17, the entropy of random words"
    bert.save_pretrained(tmp_path / "bert")
    held_out = held_out_batches(
        Shards(second, read_manifest(second), "held_out"),
        **{"micro_size": 16, "num_masked": 2, "max_sequences": 64, "dp_rank": 0, "dp_size": 1},
    )
    with torch.inference_mode():
        expected = torch.stack([loss_of(batch) for batch in held_out]).mean().item()
    common = {"run": {"init_from": f"hf:{tmp_path / 'bert'}"}, "batch": {"global_size": 16, "micro_size": 16}}
    still = {"schedule": {"steps": 1}, "optim": {"lr": 1e-20, "weight_decay": 0.0}}
    runs = {
        "start": settings(second, **common, **still),
        "end": settings(second, **common, schedule={"steps": 300}, optim={"lr": 3e-3}),
    }
    train_named(tmp_path, {name: (1, config) for name, config in runs.items()})
    ((start,), end) = evals(tmp_path / "start"), evals(tmp_path / "end")[-1]
    assert start["loss"] == pytest.approx(expected, abs=1e-5)
    assert end["loss"] < expected - 0.5
