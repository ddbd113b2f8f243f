"""`bert-dp distill` as a user runs it: a pretrained run, its finetuned one, and students of that."""

import json
import re
from pathlib import Path

import pytest

import bert_dp as package
from bert_dp.model.bilstm import BiLstm
from bert_dp.model.classifier import Classifier
from tests.e2e.cli import TINY, bert_dp, here, refused
from tests.helpers import CONFIGS, read_json, read_lines, write_files, write_lines

WORDS = "the cat sat on a mat and the dog ran off with an old red hat in the rain today".split()
OWN = ("--train", "train.csv", "--dev", "dev.csv")
PAIRS = ("--train", "train-pairs.csv", "--dev", "dev-pairs.csv")
OTHER = ("--train", "train-other.csv", "--dev", "dev-other.csv")
DRAWN = ("--copies", "3", "--replace", "mlm", "--embeddings", "teacher", "distill.alpha=0.5")
SHORT = ("schedule.epochs=1", "batch.global_size=16", "batch.micro_size=4", "precision=fp32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs `crammed`, `teacher` and `pairs` beside the files that they learned from."""
    folder = tmp_path_factory.mktemp("distill")
    texts = "\n".join(" ".join([*WORDS[i % 7 : i % 7 + 9], str(i)]) for i in range(400))
    write_files(folder, {"text.txt": texts})
    for name, count in (("train", 24), ("dev", 7)):
        rows = [(f"the {('cat', 'dog')[i % 2]} sat on {WORDS[i % 9]}", "ab"[i % 2]) for i in range(count)]
        for kind, header, more in (("", "", ""), ("-pairs", ",text_pair", "the rain,"), ("-other", "", "c")):
            lines = [f"text{header},label", *(f"{text},{more}{label}" for text, label in rows)]
            write_files(folder, {f"{name}{kind}.csv": "\n".join(lines)})
    logits = ({"text": f"the {WORDS[i % 15]} ran {i}", "logits": [i % 2, 1.5]} for i in range(30))
    write_lines(folder / "logits.jsonl", logits)
    build = ("data.build.max_tokens_per_char=0", "data.build.held_out_fraction=0.1")
    for name, asked in {
        "crammed": ("train", "data.sources=[text.txt]", *TINY, *build),
        "teacher": ("finetune", "runs/crammed", "schedule.epochs=1", *OWN),
        "pairs": ("finetune", "runs/crammed", "schedule.epochs=1", *PAIRS),
    }.items():
        done = bert_dp(*asked, "--nproc", "1", "--run-dir", f"runs/{name}", cwd=folder)
        assert done.returncode == 0, done.stderr
    return folder


def distilled(folder: Path, name: str, *arguments: str) -> str:
    done = bert_dp("distill", *arguments, *SHORT, "--run-dir", name, cwd=folder)
    assert done.returncode == 0, done.stderr + done.stdout
    assert 0 <= read_json(folder / name / "summary.json")["heldout"]["scores"]["dev/accuracy"] <= 1
    assert [line["label"] for line in read_lines(folder / name / "predictions.jsonl")] == [0, 1] * 3 + [0]
    return done.stderr


def test_a_bilstm_learns_on_two_ranks_and_the_commands_of_the_page_run(folder: Path) -> None:
    """From masks and words that the pretrained run draws."""
    said = distilled(folder, "lstm", "runs/teacher", *OWN, *DRAWN)
    assert "transfer set: " in said
    assert "warning: the student is larger than the teacher" in said
    model, _ = package.load(folder / "lstm")
    assert isinstance(model, BiLstm)
    assert (model.embedding.weight.shape[1], model.left_to_right.hidden_size) == (32, 150)
    (block,) = re.findall(
        r"```bash\n(.*?)```", (CONFIGS.parent / "docs/distilling.md").read_text(), re.DOTALL
    )
    commands = [line.split()[1:] for line in block.splitlines()]
    assert [words[0] for words in commands] == ["distill"] * 3 + ["predict"]
    for words in commands[:3]:
        done = here(*words, "--dry-run", cwd=folder)
        assert done.returncode == 0, done.stderr
    (folder / "runs/student").symlink_to(folder / "lstm")
    done = here(*commands[3], cwd=folder)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["label"] in "ab" for line in done.stdout.splitlines()] == [True] * 7


def test_pairs_a_pretrained_student_and_logits_of_any_model(folder: Path) -> None:
    distilled(folder, "of-pairs", "runs/pairs", *PAIRS, "--replace", "none")
    model, _ = package.load(folder / "of-pairs")
    assert model.pair
    assert model.dense.in_features == 8 * 150
    small = ("--copies", "1", "--replace", "none", "--student", "runs/crammed")
    distilled(folder, "small", "runs/teacher", *OWN, *small)
    model, _ = package.load(folder / "small")
    assert isinstance(model, Classifier)
    assert read_json(folder / "small/summary.json")["init_from"]["tensors"] > 10
    said = distilled(folder, "any", "runs/crammed", *OWN, "--teacher-logits", "logits.jsonl")
    assert "transfer set: 30 texts" in said
    assert "teacher's logits" not in said


def test_bad_input_is_refused_before_anything_starts(folder: Path, tmp_path: Path) -> None:
    of_teacher, plain = ("runs/teacher", *OWN), ("--replace", "none")
    for told, *arguments in (
        ("TEACHER: runs/crammed is a pretrained run", "runs/crammed", *OWN),
        ("TEACHER: none does not exist", "none", *OWN),
        ("TEACHER: the teacher has labels", "runs/teacher", *OTHER, *plain),
        ("TEACHER: the teacher has pair False", "runs/teacher", *PAIRS, *plain),
        ("--copies: ", *of_teacher, "--teacher-logits", "logits.jsonl", "--copies", "2"),
        ("needs a BiLSTM", *of_teacher, "--student", "quickstart", "--embeddings", "teacher"),
        ("--embeddings: none.txt is not a file", *of_teacher, "--embeddings", "none.txt"),
    ):
        assert told in refused("distill", *arguments, "--run-dir", str(tmp_path / "run"), cwd=folder)
    assert not (tmp_path / "run").exists()
