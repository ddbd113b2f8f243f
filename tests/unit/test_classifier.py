"""Test the classifier's logits and dropout, and the data and measurements of the finetuning task."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from bert_dp import files
from bert_dp.config import ConfigError, FinetuneConfig, ModelConfig, resolve
from bert_dp.data.stream import hash64, key32
from bert_dp.measure.profile_step import ALONE
from bert_dp.model.bert import initialize
from bert_dp.model.classifier import Classifier
from bert_dp.tasks import Context, finetune
from bert_dp.tasks.finetune import Finetuning
from bert_dp.training.devices import precision_of
from bert_dp.training.distributed import HostCollectives
from tests.example_files import label_names, write_examples
from tests.helpers import read_lines
from tests.tensors import CPU

LENGTH, VOCABULARY = 128, 64
SHAPE: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 48, "num_layers": 3}
SHAPE |= {"num_heads": 4, "intermediate_size": 40}
VARIANTS: dict[str, dict[str, Any]] = {
    "crammed": {},
    "ModernBERT": {"position": "rope", "norm_bias": False, "first_attention_norm": False, "head": "dense"},
    "EuroBERT": {"position": "rope", "norm": "rmsnorm", "norm_eps": 1e-6},
    "RobertaPreLayerNorm": {"position": "learned", "mlp": "gelu", "bias": True},
}


def make(variant: str, **options: Any) -> Classifier:
    head = "recipe" if variant == "crammed" else "native"
    finetuned = FinetuneConfig(labels=("a", "b", "c"), head=head, head_size=20, **options)
    return initialize(Classifier(ModelConfig(**SHAPE, **VARIANTS[variant]), LENGTH, finetuned), seed=1)


def make_examples(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(7, VOCABULARY, (len(lengths), max(lengths)), generator=g)
    real = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return ids.masked_fill(~real, 0), real


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_do_not_depend_on_padding_or_neighbours(variant: str, pooling: str) -> None:
    model = make(variant, pooling=pooling).eval()
    torch.nn.init.normal_(model.head.classifier.weight)
    lengths = [3, 9, 20]
    ids_BS, real_BS = make_examples(lengths)
    together = model(ids_BS, real_BS)
    for row, length in enumerate(lengths):
        alone = model(ids_BS[row : row + 1, :length])
        padded_ids = F.pad(ids_BS[row : row + 1, :length], (0, LENGTH - length), value=11)
        padded = model(padded_ids, torch.arange(LENGTH)[None] < length)
        torch.testing.assert_close(alone[0], together[row], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(alone, padded, rtol=1e-5, atol=1e-5)


def test_a_head_applies_dropout_only_where_its_transformers_class_does() -> None:
    """The masks of two layers differ. A head without a transformers class is refused."""
    with pytest.raises(ConfigError, match=r"finetune\.head: native, but transformers has no class"):
        Classifier(ModelConfig(**SHAPE), LENGTH, FinetuneConfig(labels=("a", "b"), head="native"))
    places = {"ModernBERT": {"classifier"}, "RobertaPreLayerNorm": {"dense", "classifier"}}
    for variant, dropping in {"crammed": {"classifier"}, "EuroBERT": set(), **places}.items():
        name = "recipe" if variant == "crammed" else "native"
        finetuned = FinetuneConfig(labels=("a", "b"), head=name, head_size=48)
        config = ModelConfig(**{**SHAPE, **VARIANTS[variant], "dropout": 0.5})
        head = initialize(Classifier(config, LENGTH, finetuned), seed=1).head.train()
        dropped: dict[str, torch.Tensor] = {}
        for layer in (head.dense, head.classifier):
            layer.register_forward_pre_hook(lambda key, given, to=dropped: to.update({key: given[0] == 0}))
        head(torch.ones(64, 48), key32(hash64(0, np.arange(64))))
        shares = [float(dropped[layer].float().mean()) for layer in (head.dense, head.classifier)]
        expected = [0.5 * (layer in dropping) for layer in ("dense", "classifier")]
        assert shares == pytest.approx(expected, abs=0.05)
        assert not dropping or not torch.equal(dropped[head.dense], dropped[head.classifier])


# --- the task


@pytest.fixture
def task(tmp_path: Any) -> Finetuning:
    path = write_examples(tmp_path, train=37, test=4)
    sections = {
        "data": {"path": str(path), "sequence_length": LENGTH},
        "model": {**SHAPE, "dropout": 0.1, "attention_dropout": 0.1},
        "objective": {"name": "finetune"},
        "finetune": {"labels": label_names("single_label"), "head_size": 20},
        "batch": {"global_size": 8, "micro_size": 4},
        "schedule": {"steps": 9},
    }
    made = finetune.make_task(resolve([sections]), CPU)
    made.open_data()
    return made


def test_each_epoch_visits_each_example_once_for_any_micro_batch(task: Finetuning) -> None:
    """With 37 examples in batches of 8, batches straddle epochs, all are full, and no example is dropped."""
    rows, keys = [], set()
    for start in range(0, 37 * 8, 8):
        halves = [task._training_batch(np.arange(start + m, start + m + 4)) for m in (0, 4)]
        whole = task._training_batch(np.arange(start, start + 8))
        assert sorted(whole.sample_ids) == list(range(start, start + 8))
        assert np.array_equal(np.concatenate([b.sample_ids for b in halves]), whole.sample_ids)
        assert torch.equal(torch.cat([b.seed_B for b in halves]), whole.seed_B)
        keys |= set(whole.seed_B.tolist())
        assert whole.real_BS is not None
        lengths = whole.real_BS.sum(1)
        assert lengths.tolist() == sorted(lengths.tolist()), "sorted by length inside the batch"
        assert all(b.ids_BS.shape[1] % 16 == 0 or b.ids_BS.shape[1] == LENGTH for b in (whole, *halves))
        texts = [tuple(ids[real].tolist()) for ids, real in zip(whole.ids_BS, whole.real_BS, strict=True)]
        rows += zip(whole.sample_ids.tolist(), texts, strict=True)
    assert len(keys) == 37 * 8, "every example needs its own dropout seed in each epoch"
    by_sample = dict(rows)
    epochs = [[by_sample[i] for i in range(e * 37, e * 37 + 37)] for e in range(8)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert epochs[0] != epochs[1], "the order must differ between epochs"


def test_the_held_out_loss_is_the_mean_over_the_examples_of_all_dev_sets(task: Finetuning) -> None:
    """As in MNLI, there are two dev sets: one with uniform and one with perfect logits. A labelled test set
    is scored but excluded from the loss."""
    dev = task._splits["dev"]
    assert dev.labels is not None
    few = type(dev)(dev.ids[: dev.offsets[3]], dev.offsets[:4], dev.labels[:3])
    task._splits["dev_more"] = few
    task._splits["test"] = few
    right_NL = 1e3 * np.eye(3)[dev.labels[:3]]
    measured = task._measure({"dev": np.zeros((11, 3)), "dev_more": right_NL, "test": right_NL})
    assert measured is not None
    assert measured["loss"] == pytest.approx(11 * math.log(3) / 14)
    assert measured["examples"] == 14
    assert set(measured["scores"]) == {"dev/accuracy", "dev_more/accuracy", "test/accuracy"}
    assert measured["scores"]["dev_more/accuracy"] == 1.0
    lost_NL = np.where(np.arange(11)[:, None] == 4, math.nan, np.zeros((11, 3)))
    lost = task._measure({"dev": lost_NL, "dev_more": right_NL})
    assert lost is not None
    assert (math.isnan(lost["loss"]), set(lost["scores"])) == (True, {"dev_more/accuracy"})


def test_predictions_cover_every_split_with_null_for_unknown_values(
    task: Finetuning, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = task.build_model(0).eval()
    with torch.no_grad():
        model.head.classifier.bias[1] = math.inf
    calls: dict[str, Any] = {"progress": lambda: None, "stopped": lambda: False}
    replica = {"dp_rank": 0, "dp_size": 1, "tensor": 1, **calls}
    context = Context(HostCollectives(ALONE, None), CPU, precision_of("fp32"), run_dir=tmp_path, **replica)
    measured = task.evaluate(model, context)
    assert measured is not None
    assert measured["scores"] == {}
    lines = read_lines(tmp_path / files.PREDICTIONS)
    labels = [*map(int, task._splits["dev"].labels), *[None] * 4]  # type: ignore[arg-type]
    places = [*(("dev", i) for i in range(11)), *(("test", i) for i in range(4))]
    assert [(line["split"], line["index"]) for line in lines] == places
    assert [line["label"] for line in lines] == labels
    assert {line["logits"][1] for line in lines} == {None}
    for i, line in enumerate(lines[11:]):  # each line has the logits of its own example
        tokens = torch.from_numpy(task._splits["test"].tokens(i).astype(np.int64))[None]
        with torch.no_grad():
            assert line["logits"][0] == pytest.approx(float(model(tokens)[0, 0]), abs=1e-5)
    again = task.evaluate(model, dataclasses.replace(context, run_dir=tmp_path / "gone"))
    assert again is not None
    assert again["examples"] == measured["examples"], "a write error must not end a run"
    assert "warning: predictions.jsonl could not be written: " in capsys.readouterr().out
    assert task.evaluate(model, dataclasses.replace(context, stopped=lambda: True)) is None
