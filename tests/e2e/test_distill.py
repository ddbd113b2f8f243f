"""`bert-dp distill` as a user runs it: a pretrained run, its finetuned one, and students of that."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

import bert_dp as package
from bert_dp.model.bilstm import BiLstm
from bert_dp.model.classifier import Classifier
from tests.e2e.cli import TINY, bert_dp, here, refused
from tests.helpers import read_json, read_lines

WORDS = "the cat sat on a mat and the dog ran off with an old red hat in the rain today".split()
OWN = ("--train", "train.csv", "--dev", "dev.csv")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs `crammed`, `teacher` and `pairs` beside the files that they learned from."""
    folder = tmp_path_factory.mktemp("distill")
    lines = [" ".join([*WORDS[i % 7 : i % 7 + 9], str(i)]) for i in range(400)]
    (folder / "text.txt").write_text("\n".join(lines))
    for name, count in (("train", 24), ("dev", 7)):
        rows = [(f"the {('cat', 'dog')[i % 2]} sat on {WORDS[i % 9]}", "ab"[i % 2]) for i in range(count)]
        table = ["text,label", *(",".join(row) for row in rows)]
        (folder / f"{name}.csv").write_text("\n".join(table) + "\n")
        table = ["text,text_pair,label", *(f"{text},the rain,{label}" for text, label in rows)]
        (folder / f"{name}-pairs.csv").write_text("\n".join(table) + "\n")
        (folder / f"{name}-other.csv").write_text("\n".join(["text,label", *(f"{t},{x}c" for t, x in rows)]))
    build = ("data.build.max_tokens_per_char=0", "data.build.held_out_fraction=0.1", "--nproc", "1")
    done = bert_dp("train", "data.sources=[text.txt]", *TINY, *build, "--run-dir", "runs/crammed", cwd=folder)
    assert done.returncode == 0, done.stderr
    for name, files in (("teacher", OWN), ("pairs", PAIRS)):
        asked = ("finetune", "runs/crammed", "schedule.epochs=1", *files, "--nproc", "1")
        done = bert_dp(*asked, "--run-dir", f"runs/{name}", cwd=folder)
        assert done.returncode == 0, done.stderr
    with (folder / "logits.jsonl").open("w") as file:
        for i in range(30):
            file.write(json.dumps({"text": f"the {WORDS[i % 15]} ran {i}", "logits": [i % 2, 1.5]}) + "\n")
    return folder


PAIRS = ("--train", "train-pairs.csv", "--dev", "dev-pairs.csv")
DRAWN = ("--copies", "3", "--replace", "mlm", "--embeddings", "teacher", "distill.alpha=0.5")
SHORT = ("schedule.epochs=1", "batch.global_size=16", "batch.micro_size=4", "precision=fp32")


def distilled(folder: Path, name: str, *arguments: str) -> str:
    done = bert_dp("distill", *arguments, *SHORT, "--run-dir", name, cwd=folder)
    assert done.returncode == 0, done.stderr + done.stdout
    assert 0 <= read_json(folder / name / "summary.json")["heldout"]["scores"]["dev/accuracy"] <= 1
    assert [line["label"] for line in read_lines(folder / name / "predictions.jsonl")] == [0, 1] * 3 + [0]
    return done.stderr


def test_a_bilstm_learns_on_two_ranks_from_masks_and_words_of_the_pretrained_run(folder: Path) -> None:
    said = distilled(folder, "lstm", "runs/teacher", *OWN, *DRAWN)
    assert "transfer set: " in said
    assert "warning: the student is larger than the teacher" in said
    model, _ = package.load(folder / "lstm")
    assert isinstance(model, BiLstm)
    assert (model.embedding.weight.shape[1], model.left_to_right.hidden_size) == (32, 150)
    asked = bert_dp("predict", "lstm", "dev.csv", "--text", "text", cwd=folder)
    assert [json.loads(line)["label"] in "ab" for line in asked.stdout.splitlines()] == [True] * 7


def test_pairs_and_a_pretrained_student(folder: Path) -> None:
    distilled(folder, "of-pairs", "runs/pairs", *PAIRS, "--replace", "none")
    model, _ = package.load(folder / "of-pairs")
    assert model.pair
    assert model.dense.in_features == 8 * 150
    small = ("--copies", "1", "--replace", "none", "--student", "runs/crammed")
    distilled(folder, "small", "runs/teacher", *OWN, *small)
    model, _ = package.load(folder / "small")
    assert isinstance(model, Classifier)
    assert read_json(folder / "small/summary.json")["init_from"]["tensors"] > 10


def test_logits_of_any_model(folder: Path) -> None:
    said = distilled(folder, "any", "runs/crammed", *OWN, "--teacher-logits", "logits.jsonl")
    assert "transfer set: 30 texts" in said
    assert "teacher's logits" not in said


REFUSED = {
    "pretrained": (("runs/crammed", *OWN), "TEACHER: runs/crammed is a pretrained run"),
    "no run": (("none", *OWN), "TEACHER: none does not exist"),
    "labels": (
        ("runs/teacher", "--train", "train-other.csv", "--dev", "dev-other.csv", "--replace", "none"),
        "TEACHER: the teacher has labels",
    ),
    "pairs": (("runs/teacher", *PAIRS, "--replace", "none"), "TEACHER: the teacher has pair False"),
    "two sources": (
        ("runs/teacher", *OWN, "--teacher-logits", "logits.jsonl", "--copies", "2"),
        "--copies: ",
    ),
    "embeddings": (
        ("runs/teacher", *OWN, "--student", "quickstart", "--embeddings", "teacher"),
        "--embeddings: goes with a BiLSTM",
    ),
    "vectors": (("runs/teacher", *OWN, "--embeddings", "none.txt"), "--embeddings: none.txt is no file"),
}
ROOT = Path(__file__).parents[2]


def test_the_commands_of_the_page_run(folder: Path) -> None:
    (block,) = re.findall(r"```bash\n(.*?)```", (ROOT / "docs/distilling.md").read_text(), re.DOTALL)
    commands = [line.split()[1:] for line in block.splitlines()]
    assert [words[0] for words in commands] == ["distill"] * 3 + ["predict"]
    for words in commands[:3]:
        done = here(*words, "--dry-run", cwd=folder)
        assert done.returncode == 0, done.stderr
    (folder / "runs/student").symlink_to(folder / "lstm")
    done = here(*commands[3], cwd=folder)
    assert done.returncode == 0, done.stderr


IN_THE_FILES = ("labels", "pairs")  # said once they have been read


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_before_anything_starts(name: str, folder: Path, tmp_path: Path) -> None:
    arguments, told = REFUSED[name]
    asked = ("distill", *arguments, "--run-dir", str(tmp_path / "run"))
    if name in IN_THE_FILES:
        done = bert_dp(*asked, cwd=folder)
        assert done.returncode == 2
        assert told in done.stderr
    else:
        assert told in refused(*asked, cwd=folder)
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(find_spec("HanTa") is not None, reason="it is installed")
def test_the_extra_of_the_tagger_is_named(folder: Path) -> None:
    assert "--replace: pos needs HanTa" in refused("distill", "runs/teacher", *OWN, cwd=folder)
    assert here("distill", "runs/teacher", *OWN, "--copies", "0", "--dry-run", cwd=folder).returncode == 0
