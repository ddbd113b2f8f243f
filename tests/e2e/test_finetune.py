"""`bert-dp finetune` and `distill` as a user runs them, from a pretrained run and files of examples."""

import json
import re
import shutil
from pathlib import Path

import pytest

import bert_dp as package
from bert_dp.files import PREDICTIONS
from bert_dp.model.bilstm import BiLstm
from bert_dp.model.classifier import Classifier
from launcher import job
from launcher.cli.reports import report_of
from tests.e2e.cli import TINY, bert_dp, here, refused
from tests.glue_fixture import write_two_tasks
from tests.helpers import CONFIGS, read_json, read_lines, write_files, write_lines

WORDS = "the cat sat on a mat and the dog ran off with an old red hat in the rain today".split()
ANIMALS = ("the cat sat on {},meow", "the dog sat on {},woof")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps on a few sentences, with a tokenizer of its own."""
    folder = tmp_path_factory.mktemp("pretrained")
    lines = [" ".join([*WORDS[i % 7 : i % 7 + 9], str(i)]) for i in range(400)]
    (folder / "text.txt").write_text("\n".join(lines))
    build = ("data.build.max_tokens_per_char=0", "data.build.held_out_fraction=0.1", "eval.max_sequences=8")
    sources = f"data.sources=[{folder / 'text.txt'}]"
    done = bert_dp("train", sources, *TINY, *build, "--nproc", "1", "--run-dir", str(folder / "run"))
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """train.csv and dev.csv: which animal a sentence is of."""
    folder = tmp_path_factory.mktemp("files")
    for name, count in (("train", 24), ("dev", 7)):
        rows = [f"{ANIMALS[i % 2].format(WORDS[i % 9])}\n" for i in range(count)]
        (folder / f"{name}.csv").write_text("".join(["sentence,animal\n", *rows]))
    return folder


OWN = ("--train", "train.csv", "--dev", "dev.csv", "--text", "sentence", "--label", "animal")


def test_a_run_is_finetuned_and_says_what_it_scores(run_dir: Path, files: Path, tmp_path: Path) -> None:
    plain = here("finetune", str(run_dir), "schedule.epochs=2", *OWN, "--dry-run", cwd=files)
    assert plain.returncode == 0, plain.stderr
    assert "24 examples" in plain.stdout
    done = bert_dp("finetune", str(run_dir), "schedule.epochs=2", *OWN, "--run-dir", str(tmp_path), cwd=files)
    assert done.returncode == 0, done.stderr
    told = read_json(tmp_path / "summary.json")
    assert (told["step"], told["world_size"], told["micro_batch"]) == (3, 2, 8)
    score = told["heldout"]["scores"]["dev/accuracy"]
    assert f"Done after step 3: dev accuracy {score:.4f}, dev f1 " in done.stdout
    lines = read_lines(tmp_path / PREDICTIONS)
    assert [line["label"] for line in lines] == [0, 1, 0, 1, 0, 1, 0]
    model, _ = package.load(tmp_path)
    assert model.head.classifier.out_features == 2
    again = here("train", "--run-dir", str(tmp_path))
    assert again.returncode == 0, again.stderr
    assert "this run is complete" in again.stdout


def test_a_share_of_train_is_dev_and_every_seed_is_a_run(run_dir: Path, tmp_path: Path) -> None:
    rows = [f"{ANIMALS[i % 2].format(f'{i} mats')}\n" for i in range(24)]
    (tmp_path / "mine.csv").write_text("text,label\n" + "".join(rows))
    asked = ("--train", str(tmp_path / "mine.csv"), "--dev-fraction", "0.25", "--seeds", "2", "--nproc", "1")
    done = bert_dp("finetune", str(run_dir), *asked, "--run-dir", str(tmp_path), "schedule.epochs=1")
    assert done.returncode == 0, done.stderr
    runs = [package.read_run(tmp_path / f"seed-{k}") for k in (0, 1)]
    assert [run.config.run.seed for run in runs] == [0, 1]
    assert runs[0].config.data.path == runs[1].config.data.path
    heldout = runs[0].summary.heldout
    assert (heldout.examples, heldout.f1_average) == (6, "binary")
    assert heldout.baseline["dev/accuracy"] == 0.5  # three of each class
    scores = [run.results["scores"]["dev/accuracy"] for run in runs]
    assert re.search(rf"^dev accuracy +{sum(scores) / 2:.4f} \u00b1 ", done.stdout, re.MULTILINE)
    report = report_of([tmp_path / "seed-0"])
    assert report.tiles[0].label == "dev accuracy"
    assert "always the most frequent label: 50.0 %" in report.tiles[0].note
    (classes,) = [section for section in report.sections if section.title == "Classes"]
    by_class, matrix = classes.tables
    assert [row.label for row in matrix.rows] == ["meow", "woof"]
    counts = [[int(cell.text) for cell in row.cells] for row in matrix.rows]
    assert [sum(row) for row in counts] == [3, 3]
    assert (counts[0][0] + counts[1][1]) / 6 == pytest.approx(scores[0])
    assert [row.cells[-1].text for row in by_class.rows] == ["3", "3"]


REFUSED = {
    "dev twice": ((*OWN, "--dev-fraction", "0.1"), "--dev-fraction: "),
    "no data": ((), "--task: "),
    "task without data": (("--task", "RTE"), "--data: "),
    "two kinds": (("--task", "RTE", "--data", ".", "--train", "x"), "--train: "),
    "no label": (("--train", "train.csv", "--dev", "dev.csv", "--text", "sentence"), "no label 'label'"),
    "dev alone": (("--dev", "dev.csv"), "--train: "),
    "unknown column": ((*OWN[:-1], "colour"), "colour"),
    "missing file": (("--train", "none.csv", *OWN[2:]), "none.csv"),
    "batch": ((*OWN, "batch.global_size=7"), "batch.global_size: 7 is not a multiple"),
    "ramp": ((*OWN, "batch.ramp_fraction=0.5", "batch.ramp_quantum=16"), "batch.ramp_fraction: 0.5"),
    "tokens": ((*OWN, "schedule.tokens=1000"), "schedule.tokens: 1000, but examples differ in length"),
    "other shape": ((*OWN, "model.num_layers=3"), "model.num_layers: 3, but run.init_from"),
    "another task's data": ((*OWN, "data.path=/x"), "data.path: "),
    "other weights": ((*OWN, "run.init_from=/x"), "run.init_from: "),
    "a word": ((*OWN, "colour"), "colour: expected a setting a.b=value"),
    "vocabulary": ((*OWN, "--init", "random", "model.vocab_size=60"), "model.vocab_size: 60"),
}
IN_THE_FILES = ("no label", "unknown column", "missing file")


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_before_anything_starts(
    name: str, run_dir: Path, files: Path, tmp_path: Path
) -> None:
    arguments, told = REFUSED[name]
    place = tmp_path / "run"
    asked = ("finetune", str(run_dir), *arguments, "--run-dir", str(place))
    if name in IN_THE_FILES:  # said by the process that reads them
        done = bert_dp(*asked, cwd=files)
        assert done.returncode == 2
        assert told in done.stderr
    else:
        assert told in refused(*asked, cwd=files)
    assert not place.exists()


def test_a_run_without_tokenizer_or_checkpoint_is_refused(run_dir: Path, files: Path, tmp_path: Path) -> None:
    bare = shutil.copytree(run_dir, tmp_path / "bare")
    for path in bare.rglob("tokenizer.json"):
        path.unlink()
    for place, told in ((tmp_path / "none", "does not exist"), (files, "contains no checkpoint")):
        assert told in refused("finetune", str(place), *OWN, cwd=files)
    told = f"copy the tokenizer.json of its shards to {bare / 'tokenizer.json'}"
    write_two_tasks(tmp_path / "glue")
    for arguments in (
        ("finetune", str(bare), *OWN),
        ("eval", "glue", str(bare), "--data", str(tmp_path / "glue")),
        ("predict", str(bare), "dev.csv", "--text", "sentence"),
    ):
        said = refused(*arguments, cwd=files)
        assert told in said or f"{bare}/checkpoints/step-00000000/tokenizer.json: No such file" in said
        assert all(line.startswith("error: ") for line in said.splitlines())
    assert read_json(run_dir / "summary.json")["status"] == "done"


def test_without_scikit_learn_nothing_starts(
    run_dir: Path, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "has_package", lambda name: name != "sklearn")
    said = refused("finetune", str(run_dir), *OWN, cwd=files)
    assert "objective.name: scoring needs sklearn and scipy; `pip install " in said


# --- distillation


PLAIN = ("--train", "train.csv", "--dev", "dev.csv")
PAIRS = ("--train", "train-pairs.csv", "--dev", "dev-pairs.csv")
OTHER = ("--train", "train-other.csv", "--dev", "dev-other.csv")
DRAWN = ("--copies", "3", "--replace", "mlm", "--embeddings", "teacher", "distill.alpha=0.5")
SHORT = ("schedule.epochs=1", "batch.global_size=16", "batch.micro_size=4", "precision=fp32")


@pytest.fixture(scope="module")
def folder(run_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs `crammed`, `teacher` and `pairs` beside the files that they learned from."""
    folder = tmp_path_factory.mktemp("distill")
    for name, count in (("train", 24), ("dev", 7)):
        rows = [(f"the {('cat', 'dog')[i % 2]} sat on {WORDS[i % 9]}", "ab"[i % 2]) for i in range(count)]
        for kind, header, more in (("", "", ""), ("-pairs", ",text_pair", "the rain,"), ("-other", "", "c")):
            lines = [f"text{header},label", *(f"{text},{more}{label}" for text, label in rows)]
            write_files(folder, {f"{name}{kind}.csv": "\n".join(lines)})
    logits = ({"text": f"the {WORDS[i % 15]} ran {i}", "logits": [i % 2, 1.5]} for i in range(30))
    write_lines(folder / "logits.jsonl", logits)
    (folder / "runs").mkdir()
    (folder / "runs/crammed").symlink_to(run_dir)
    for name, files in (("teacher", PLAIN), ("pairs", PAIRS)):
        asked = ("finetune", "runs/crammed", "schedule.epochs=1", *files, "--nproc", "1")
        done = bert_dp(*asked, "--run-dir", f"runs/{name}", cwd=folder)
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
    said = distilled(folder, "lstm", "runs/teacher", *PLAIN, *DRAWN)
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
    distilled(folder, "small", "runs/teacher", *PLAIN, *small)
    model, _ = package.load(folder / "small")
    assert isinstance(model, Classifier)
    assert read_json(folder / "small/summary.json")["init_from"]["tensors"] > 10
    said = distilled(folder, "any", "runs/crammed", *PLAIN, "--teacher-logits", "logits.jsonl")
    assert "transfer set: 30 texts" in said
    assert "teacher's logits" not in said


def test_a_distillation_that_cannot_be_is_refused(folder: Path, tmp_path: Path) -> None:
    of_teacher, plain = ("runs/teacher", *PLAIN), ("--replace", "none")
    for told, *arguments in (
        ("TEACHER: runs/crammed is a pretrained run", "runs/crammed", *PLAIN),
        ("TEACHER: none does not exist", "none", *PLAIN),
        ("TEACHER: the teacher has labels", "runs/teacher", *OTHER, *plain),
        ("TEACHER: the teacher has pair False", "runs/teacher", *PAIRS, *plain),
        ("--copies: ", *of_teacher, "--teacher-logits", "logits.jsonl", "--copies", "2"),
        ("needs a BiLSTM", *of_teacher, "--student", "quickstart", "--embeddings", "teacher"),
        ("--embeddings: none.txt is not a file", *of_teacher, "--embeddings", "none.txt"),
    ):
        assert told in refused("distill", *arguments, "--run-dir", str(tmp_path / "run"), cwd=folder)
    assert not (tmp_path / "run").exists()
