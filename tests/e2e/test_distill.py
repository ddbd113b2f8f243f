"""Test `bert-dp distill` with a pretrained run, a teacher finetuned from it, and several students."""

import json
import re
from pathlib import Path

import pytest

import bert_dp as package
from bert_dp.model.bilstm import BiLstm
from bert_dp.model.classifier import Classifier
from tests.e2e.cli import accepted, bert_dp, refused
from tests.helpers import read_json, read_lines, write_files
from tests.helpers import write_lines as write_json_lines
from tests.runs_to_export import WORDS, tiny_config, write_run

ROOT = Path(__file__).parents[2]
OWN = ("--train", "train.csv", "--dev", "dev.csv")
PAIRS = ("--train", "train-pairs.csv", "--dev", "dev-pairs.csv")
OTHER = ("--train", "train-other.csv", "--dev", "dev-other.csv")
DRAWN = ("--copies", "3", "--replace", "mlm", "--embeddings", "teacher", "distill.alpha=0.5")
SHORT = ("schedule.epochs=1", "batch.global_size=16", "batch.micro_size=4", "precision=fp32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the runs `crammed`, `teacher` and `pairs` next to their training files."""
    folder = tmp_path_factory.mktemp("distill")
    for name, count in (("train", 24), ("dev", 7)):
        rows = [(f"the {('crew', 'rain')[i % 2]} fell on {WORDS[i % 9]}", "ab"[i % 2]) for i in range(count)]
        tables = {
            "": ["text,label", *(f"{text},{label}" for text, label in rows)],
            "-pairs": ["text,text_pair,label", *(f"{text},the rain,{label}" for text, label in rows)],
            "-other": ["text,label", *(f"{text},{label}c" for text, label in rows)],
        }
        write_files(folder, {f"{name}{kind}.csv": "\n".join(lines) for kind, lines in tables.items()})
    logits = ({"text": f"the {WORDS[i % 15]} sailed {i}", "logits": [i % 2, 1.5]} for i in range(30))
    write_json_lines(folder / "logits.jsonl", logits)
    write_run(folder / "runs/crammed", tiny_config())
    for name, data in (("teacher", OWN), ("pairs", PAIRS)):
        arguments = ("finetune", "runs/crammed", "schedule.epochs=1", *data, "--nproc", "1")
        bert_dp(*arguments, "--run-dir", f"runs/{name}", cwd=folder)
    return folder


def distilled(folder: Path, name: str, *arguments: str) -> str:
    done = bert_dp("distill", *arguments, *SHORT, "--run-dir", name, cwd=folder)
    assert 0 <= read_json(folder / name / "summary.json")["heldout"]["scores"]["dev/accuracy"] <= 1
    assert [line["label"] for line in read_lines(folder / name / "predictions.jsonl")] == [0, 1] * 3 + [0]
    return done.stderr


def test_a_bilstm_trains_on_two_ranks_and_the_documented_commands_run(folder: Path) -> None:
    """The transfer set contains masks and words drawn by the pretrained run."""
    errors = distilled(folder, "lstm", "runs/teacher", *OWN, *DRAWN)
    assert "transfer set: " in errors
    assert "warning: the student is larger than the teacher" in errors
    model, _ = package.load(folder / "lstm")
    assert isinstance(model, BiLstm)
    assert (model.embedding.weight.shape[1], model.left_to_right.hidden_size) == (32, 150)
    (block,) = re.findall(r"```bash\n(.*?)```", (ROOT / "docs/distilling.md").read_text(), re.DOTALL)
    commands = [line.split()[1:] for line in block.splitlines()]
    assert [words[0] for words in commands] == ["distill"] * 3 + ["predict"]
    for words in commands[:3]:
        accepted(*words, "--dry-run", cwd=folder)
    (folder / "runs/student").symlink_to(folder / "lstm")
    labels = [json.loads(line)["label"] for line in accepted(*commands[3], cwd=folder).splitlines()]
    assert [label in "ab" for label in labels] == [True] * 7


def test_a_bilstm_reads_pairs_and_a_pretrained_run_can_be_the_student(folder: Path) -> None:
    distilled(folder, "of-pairs", "runs/pairs", *PAIRS, "--replace", "none")
    model, _ = package.load(folder / "of-pairs")
    assert model.pair
    assert model.dense.in_features == 8 * 150
    small = ("--copies", "1", "--replace", "none", "--student", "runs/crammed")
    distilled(folder, "small", "runs/teacher", *OWN, *small)
    model, _ = package.load(folder / "small")
    assert isinstance(model, Classifier)
    assert read_json(folder / "small/summary.json")["init_from"]["tensors"] > 10


def test_a_student_learns_from_a_file_of_logits(folder: Path) -> None:
    errors = distilled(folder, "any", "runs/crammed", *OWN, "--teacher-logits", "logits.jsonl")
    assert "transfer set: 30 texts" in errors
    assert "teacher's logits" not in errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("runs/crammed", *OWN), "TEACHER: runs/crammed was pretrained but not finetuned"),
        (("none", *OWN), "TEACHER: none does not exist"),
        (("runs/teacher", *OTHER, "--replace", "none"), "TEACHER: the teacher has labels"),
        (("runs/teacher", *PAIRS, "--replace", "none"), "TEACHER: the teacher has pair False"),
        (("runs/teacher", *OWN, "--teacher-logits", "logits.jsonl", "--copies", "2"), "--copies: "),
        (("runs/teacher", *OWN, "--student", "quickstart", "--embeddings", "teacher"), "requires a BiLSTM"),
        (("runs/teacher", *OWN, "--embeddings", "none.txt"), "--embeddings: none.txt is not a file"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(
    arguments: tuple[str, ...], message: str, folder: Path, tmp_path: Path
) -> None:
    assert message in refused("distill", *arguments, "--run-dir", str(tmp_path / "run"), cwd=folder)
    assert not (tmp_path / "run").exists()
