"""Check that N ranks finetune and distil the same model as one rank, with dropout."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from bert_dp.examples.table import LOGITS
from bert_dp.files import PREDICTIONS
from tests.example_files import label_names, write_examples
from tests.helpers import read_lines
from tests.parity.runs import losses, settings, state, summary, train_run, train_runs, write_run
from tests.shards import write_shards
from tests.tensors import bits, largest_relative_error

STEPS, HALF = 50, 20
MODEL = {"num_heads": 4}
GLOBAL = 8
CELLS: dict[str, tuple[int, dict[str, Any]]] = {
    "single-acc4": (1, {"batch": {"micro_size": 2}}),
    "ddp-n2": (2, {"batch": {"micro_size": 4}}),
    "ddp-n2-acc2": (2, {"batch": {"micro_size": 2}}),
    "zero1-n2": (2, {"batch": {"micro_size": 2}, "parallel": {"engine": "zero1"}}),
    "fsdp-n2": (2, {"batch": {"micro_size": 4}, "parallel": {"engine": "fsdp"}}),
    "tensor2": (2, {"batch": {"micro_size": 8}, "parallel": {"tensor": 2}}),
    "fsdp-n2-acc2": (2, {"batch": {"micro_size": 2}, "parallel": {"engine": "fsdp"}}),
    "tensor2-acc2": (2, {"batch": {"micro_size": 4}, "parallel": {"tensor": 2}}),
    "recomputed": (2, {"batch": {"micro_size": 4}, "parallel": {"activation_checkpointing": True}}),
    "ddp-n4": (4, {"batch": {"micro_size": 2}}),
    "ddp-n4-acc2": (4, {"batch": {"micro_size": 1}}),
    "zero1-n4": (4, {"batch": {"micro_size": 2}, "parallel": {"engine": "zero1"}}),
    "fsdp-n4": (4, {"batch": {"micro_size": 1}, "parallel": {"engine": "fsdp"}}),
    "tensor2-n4": (4, {"batch": {"micro_size": 2}, "parallel": {"tensor": 2}}),
}
QUICK = ("single-acc4", "ddp-n2", "tensor2")
NARROW = ("single-acc4", "ddp-n2-acc2", "zero1-n2", "fsdp-n2", "tensor2", "ddp-n4")


def finetuning(
    examples: Path, pretrained: Path, kind: str = "single_label", **sections: Any
) -> dict[str, Any]:
    own: dict[str, Any] = {
        "run": {"init_from": str(pretrained)},
        "data": {"sequence_length": 32},
        "objective": {"name": "finetune"},
        "finetune": {"kind": kind, "labels": label_names(kind), "head_size": 24, "pooling": "mean"},
        "model": {**MODEL, "dropout": 0.1, "attention_dropout": 0.1},
        "batch": {"global_size": GLOBAL, "micro_size": GLOBAL},
        "schedule": {"steps": STEPS, "name": "cosine"},
        "eval": {"every_steps": 0},
        "checkpoint": {"keep": 9, "every_steps": HALF},
        "precision": "fp64",
    }
    return settings(examples, own, **sections)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pretrained")
    shards = write_shards(folder / "shards", length=32)
    config = settings(shards, data={"sequence_length": 32}, model=MODEL, schedule={"steps": 3})
    return train_run(folder / "run", config)


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_examples(tmp_path_factory.mktemp("examples"), test=5)


@pytest.fixture(scope="module")
def one_rank(pretrained: Path, examples: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_run(tmp_path_factory.mktemp("one") / "run", finetuning(examples, pretrained))


@pytest.fixture(scope="module")
def one_narrow(pretrained: Path, examples: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = finetuning(examples, pretrained, precision="fp32")
    return train_run(tmp_path_factory.mktemp("narrow") / "run", config)


def assert_same(run: Path, base: Path, loss: float, weights: float, steps: int = STEPS) -> None:
    """Compare losses of all steps, weights, and the labels and logits of all predictions."""
    assert len(losses(run)) == steps
    assert losses(run) == pytest.approx(losses(base), rel=loss)
    assert largest_relative_error(state(run, steps), state(base, steps)) <= weights
    assert summary(run)["heldout"]["examples"] == summary(base)["heldout"]["examples"]
    predicted, expected = (read_lines(each / PREDICTIONS) for each in (run, base))
    assert [(p["split"], p["index"], p["label"]) for p in predicted] == [
        (p["split"], p["index"], p["label"]) for p in expected
    ]
    for found, wanted in zip(predicted, expected, strict=True):
        assert found["logits"] == pytest.approx(wanted["logits"], rel=weights, abs=weights)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.quick if n in QUICK else ()) for n in CELLS]
)
def test_n_ranks_finetune_the_model_of_one_rank(
    name: str, pretrained: Path, examples: Path, one_rank: Path, tmp_path: Path
) -> None:
    ranks, sections = CELLS[name]
    run = train_run(tmp_path, finetuning(examples, pretrained, **sections), ranks)
    assert_same(run, one_rank, loss=1e-12, weights=1e-12)


@pytest.mark.parametrize("name", NARROW)
def test_n_ranks_finetune_the_model_of_one_rank_in_fp32(
    name: str, pretrained: Path, examples: Path, one_narrow: Path, tmp_path: Path
) -> None:
    ranks, sections = CELLS[name]
    run = train_run(tmp_path, finetuning(examples, pretrained, precision="fp32", **sections), ranks)
    assert_same(run, one_narrow, loss=1e-5, weights=1e-5)


def test_compiled_runs_agree(pretrained: Path, examples: Path, one_rank: Path, tmp_path: Path) -> None:
    """Batches have two padded lengths, with and without padding, and zero1 keeps weights in buckets. torch's
    own kernels take seconds, inductor's take minutes."""
    runs = [
        write_run(
            tmp_path / engine,
            finetuning(
                examples, pretrained, compile="on", batch={"micro_size": 2}, parallel={"engine": engine}
            ),
        )
        for engine in ("ddp", "zero1")
    ]
    train_runs(2, runs, backend="aot_eager")
    for run in runs:
        assert summary(run)["compiled"]
        assert_same(run, one_rank, loss=1e-10, weights=1e-10)


@pytest.mark.parametrize("kind", ["multi_label", "regression"])
def test_other_kinds_of_labels_agree(kind: str, pretrained: Path, tmp_path: Path) -> None:
    examples = write_examples(tmp_path / "examples", kind=kind)
    runs = []
    for ranks, micro in ((1, 8), (2, 2)):
        config = finetuning(examples, pretrained, kind, batch={"micro_size": micro})
        runs.append(train_run(tmp_path / f"n{ranks}", config, ranks))
    assert_same(runs[1], runs[0], loss=1e-12, weights=1e-12)
    scores = summary(runs[0])["heldout"]["scores"]
    assert set(scores) == ({"dev/f1"} if kind == "multi_label" else {"dev/pearson", "dev/spearman"})


@pytest.mark.parametrize("name", ["ddp-n2-acc2", "zero1-n2", "fsdp-n2", "tensor2"])
def test_a_resumed_run_ends_bit_equal(name: str, pretrained: Path, examples: Path, tmp_path: Path) -> None:
    config = finetuning(examples, pretrained, **CELLS[name][1])
    whole = train_run(tmp_path / "whole", config, 2)
    again = train_run(tmp_path / "again", config, 2, resume=str(whole / "checkpoints" / f"step-{HALF:08d}"))
    assert bits(state(whole, STEPS)) == bits(state(again, STEPS))
    assert (whole / PREDICTIONS).read_text() == (again / PREDICTIONS).read_text()
    assert summary(again)["init_from"] == summary(whole)["init_from"]


@pytest.mark.quick
def test_every_encoder_tensor_is_loaded_and_only_the_head_is_new(one_rank: Path, pretrained: Path) -> None:
    start, source = state(one_rank, 0), state(pretrained, 3)
    encoder = {name for name in start if name.startswith("model.")}
    for name in encoder:
        torch.testing.assert_close(start[name], source[name].to(start[name].dtype), rtol=0, atol=0)
    init = summary(one_rank)["init_from"]
    assert init["tensors"] == len(encoder)
    assert init["of"] == len(encoder) + 4  # dense and classifier, with their biases
    assert init["sha256"] in (pretrained / "checkpoints/step-00000003/manifest.json").read_text()


@pytest.mark.quick
def test_a_finetuned_run_learns_and_its_score_follows_from_its_predictions(one_rank: Path) -> None:
    steps, heldout = losses(one_rank), summary(one_rank)["heldout"]
    assert sum(steps[-5:]) < 0.8 * sum(steps[:5])
    assert heldout["examples"] == 11
    assert 0 <= heldout["scores"]["dev/accuracy"] <= 1
    lines = read_lines(one_rank / PREDICTIONS)
    assert [line["split"] for line in lines] == ["dev"] * 11 + ["test"] * 5
    assert all(line["label"] is None for line in lines[11:])
    right = sum(line["logits"].index(max(line["logits"])) == line["label"] for line in lines[:11])
    assert heldout["scores"]["dev/accuracy"] == pytest.approx(right / 11)


LSTM = {"lstm_size": 12, "num_layers": 1, "num_heads": 1, "attention_dropout": 0.0}
STUDENTS: dict[str, tuple[dict[str, Any], int, int, str]] = {
    "lstm-n2": (LSTM, 2, 2, "auto"),
    "lstm-n4": (LSTM, 4, 2, "auto"),
    "lstm-zero1-n2": (LSTM, 2, 4, "zero1"),
    "lstm-fsdp-n2": (LSTM, 2, 4, "fsdp"),
    "transformer-n2": ({}, 2, 2, "auto"),
}
"""Name -> model, ranks, micro batch and engine."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.quick if name == "lstm-n2" else ()) for name in STUDENTS]
)
def test_n_ranks_distil_the_model_of_one_rank(name: str, examples: Path, tmp_path: Path) -> None:
    """The students are a BiLSTM and a transformer; the logits are in two files."""
    logits = np.random.default_rng(0).normal(size=(2, 20, 3)).astype(np.float32)
    for part in range(2):
        save_file({"logits": logits[part]}, tmp_path / LOGITS.format(part))
    model, *cell = STUDENTS[name]
    own = {
        "run": {"init_from": None},
        "objective": {"name": "distill"},
        "distill": {"logits": str(tmp_path), "alpha": 0.25},
        "schedule": {"steps": 12, "name": "cosine"},
        "model": model,
    }
    runs = []
    for ranks, micro, engine in ((1, GLOBAL, "auto"), cell):
        sizes = {"batch": {"micro_size": micro}, "parallel": {"engine": engine}}
        config = finetuning(examples, Path(), **own, **sizes)
        runs.append(train_run(tmp_path / f"n{len(runs)}", config, ranks))
    assert_same(runs[1], runs[0], loss=1e-10, weights=1e-10, steps=12)
