"""A pretrained model for use: from a run, its newest good checkpoint or one checkpoint; what is refused."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import bert_dp
from bert_dp.data import tokenizer
from tests.helpers import issues_of

ROOT = Path(__file__).parents[1]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run, with a tokenizer."""
    path = shutil.copytree(ROOT / "fixtures/stopped-run", tmp_path / "run")
    words = tokenizer.train(["a cat sat on a mat"], model="wordpiece", vocab_size=60, with_normalizer=True)
    words.save(str(path / "tokenizer.json"))
    return path


def test_weights_mode_and_tokenizer(run_dir: Path) -> None:
    model, words = bert_dp.load(str(run_dir))
    saved = load_file(run_dir / "checkpoints/step-00000012/model.safetensors")
    assert model.state_dict().keys() == saved.keys()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items())
    assert not model.training
    assert words.encode("a cat", add_special_tokens=False).tokens == ["a", "cat"]
    ids = torch.arange(8).reshape(2, 4)
    with torch.inference_mode():
        hidden, logits = model.model(ids), model(ids, torch.arange(8))
        torch.testing.assert_close(model(ids, torch.tensor([5]))[0], logits[5])
    assert hidden.shape[:2] == (2, 4)
    assert logits.shape == (8, len(saved["model.embeddings.tok_embeddings.weight"]))


def test_of_a_run_the_newest_good_checkpoint_and_of_a_checkpoint_itself(run_dir: Path) -> None:
    good = run_dir / "checkpoints/step-00000012"
    torn = shutil.copytree(good, run_dir / "checkpoints/step-00000013")
    (torn / "model.safetensors").write_bytes(b"torn")
    expected = dict(bert_dp.load(good)[0].named_parameters())
    model, _ = bert_dp.load(run_dir)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.named_parameters())
    (line,) = issues_of(bert_dp.load, torn)
    assert str(torn) in line
    wide = shutil.copytree(ROOT / "fixtures/step-00000003", run_dir / "checkpoints/step-00000003")
    assert {tensor.dtype for tensor in bert_dp.load(wide)[0].parameters()} == {torch.float64}


def test_what_cannot_be_loaded_is_named(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "no valid checkpoint" in issues_of(bert_dp.load, tmp_path / "empty")[0]
    (run_dir / "tokenizer.json").write_text("{}")
    assert "not a tokenizer.json" in issues_of(bert_dp.load, run_dir)[0]
    (run_dir / "tokenizer.json").unlink()
    (line,) = issues_of(bert_dp.load, run_dir)
    assert line.endswith(f"copy the tokenizer.json of its shards to {run_dir / 'tokenizer.json'}")
