"""Test `bert-dp finetune` with a pretrained run and files of labelled examples."""

import re
import shutil
from pathlib import Path

import pytest

import bert_dp as package
from bert_dp.files import PREDICTIONS
from launcher import job
from launcher.cli.reports import report_of
from tests.e2e.cli import accepted, bert_dp, refused
from tests.glue_fixture import write_two_tasks
from tests.helpers import read_json, read_lines
from tests.runs_to_export import WORDS, tiny_config, write_run

PLACES = ("the old crew fell on {},land", "the old ship sailed past {},sea")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("pretrained") / "run", tiny_config())


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write train.csv and dev.csv, whose label is the place that a sentence mentions."""
    folder = tmp_path_factory.mktemp("files")
    for name, count in (("train", 24), ("dev", 7)):
        rows = [f"{PLACES[i % 2].format(WORDS[i % 9])}\n" for i in range(count)]
        (folder / f"{name}.csv").write_text("".join(["sentence,place\n", *rows]))
    return folder


OWN = ("--train", "train.csv", "--dev", "dev.csv", "--text", "sentence", "--label", "place")


def test_finetuning_prints_and_records_the_dev_score(run_dir: Path, files: Path, tmp_path: Path) -> None:
    arguments = ("finetune", str(run_dir), "schedule.epochs=2", *OWN)
    assert "24 examples" in accepted(*arguments, "--dry-run", cwd=files)
    done = bert_dp(*arguments, "--run-dir", str(tmp_path), cwd=files)
    summary = read_json(tmp_path / "summary.json")
    assert (summary["step"], summary["world_size"], summary["micro_batch"]) == (3, 2, 8)
    score = summary["heldout"]["scores"]["dev/accuracy"]
    assert f"Done after step 3: dev accuracy {score:.4f}, dev f1 " in done.stdout
    lines = read_lines(tmp_path / PREDICTIONS)
    assert [line["label"] for line in lines] == [0, 1, 0, 1, 0, 1, 0]
    model, _ = package.load(tmp_path)
    assert model.head.classifier.out_features == 2
    assert "this run is complete" in accepted("train", "--run-dir", str(tmp_path))


def test_dev_is_a_fraction_of_train_and_each_seed_is_a_run(run_dir: Path, tmp_path: Path) -> None:
    rows = [f"{PLACES[i % 2].format(f'{i} islands')}\n" for i in range(24)]
    (tmp_path / "mine.csv").write_text("text,label\n" + "".join(rows))
    data = ("--train", str(tmp_path / "mine.csv"), "--dev-fraction", "0.25", "--seeds", "2", "--nproc", "1")
    done = bert_dp("finetune", str(run_dir), *data, "--run-dir", str(tmp_path), "schedule.epochs=1")
    runs = [package.read_run(tmp_path / f"seed-{k}") for k in (0, 1)]
    assert [run.config.run.seed for run in runs] == [0, 1]
    assert runs[0].config.data.path == runs[1].config.data.path
    heldout = runs[0].summary.heldout
    assert (heldout.examples, heldout.f1_average) == (6, "binary")
    assert heldout.baseline["dev/accuracy"] == 0.5  # three of each class
    scores = [run.results["scores"]["dev/accuracy"] for run in runs]
    assert re.search(rf"^dev accuracy +{sum(scores) / 2:.4f} \u00b1 ", done.stdout, re.MULTILINE)
    report = report_of([tmp_path / "seed-0"])
    assert report.tiles[0].label == "dev/accuracy"
    assert "a constant prediction scores 0.5000" in report.tiles[0].cells[0].note
    (classes,) = [section for section in report.sections if section.title == "Classes"]
    by_class, matrix = classes.tables
    assert [row.label for row in matrix.rows] == ["land", "sea"]
    counts = [[int(cell.text) for cell in row.cells] for row in matrix.rows]
    assert [sum(row) for row in counts] == [3, 3]
    assert (counts[0][0] + counts[1][1]) / 6 == pytest.approx(scores[0])
    assert [row.cells[-1].text for row in by_class.rows] == ["3", "3"]


REFUSED = {
    "dev twice": ((*OWN, "--dev-fraction", "0.1"), "--dev-fraction: "),
    "no data": ((), "--task: "),
    "task without data": (("--task", "RTE"), "--data: "),
    "task and files": (("--task", "RTE", "--data", ".", "--train", "x"), "--train: "),
    "no column": (("--train", "train.csv", "--dev", "dev.csv", "--text", "sentence"), "label column 'label'"),
    "dev without train": (("--dev", "dev.csv"), "--train: "),
    "unknown column": ((*OWN[:-1], "colour"), "colour"),
    "missing file": (("--train", "none.csv", *OWN[2:]), "none.csv"),
    "batch": ((*OWN, "batch.global_size=7"), "batch.global_size: 7 is not a multiple"),
    "ramp": ((*OWN, "batch.ramp_fraction=0.5", "batch.ramp_quantum=16"), "batch.ramp_fraction: 0.5"),
    "tokens": ((*OWN, "schedule.tokens=1000"), "schedule.tokens: 1000, but labelled examples vary in length"),
    "other shape": ((*OWN, "model.num_layers=3"), "model.num_layers: 3, but run.init_from"),
    "another task's data": ((*OWN, "data.path=/x"), "data.path: "),
    "other weights": ((*OWN, "run.init_from=/x"), "run.init_from: "),
    "not a setting": ((*OWN, "colour"), "colour: expected a setting of the form a.b=value"),
    "vocabulary": ((*OWN, "--init", "random", "model.vocab_size=60"), "model.vocab_size: 60"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_before_anything_starts(
    name: str, run_dir: Path, files: Path, tmp_path: Path
) -> None:
    arguments, message = REFUSED[name]
    arguments = ("finetune", str(run_dir), *arguments, "--run-dir", str(tmp_path / "run"))
    assert message in refused(*arguments, cwd=files)
    assert not (tmp_path / "run").exists()


def test_a_run_without_its_tokenizer_is_refused(run_dir: Path, files: Path, tmp_path: Path) -> None:
    bare = shutil.copytree(run_dir, tmp_path / "bare")
    for path in bare.rglob("tokenizer.json"):
        path.unlink()
    message = f"copy the tokenizer.json of the run's shards to {bare / 'tokenizer.json'}"
    write_two_tasks(tmp_path / "glue")
    for arguments in (
        ("finetune", str(bare), *OWN),
        ("eval", "glue", str(bare), "--data", str(tmp_path / "glue")),
        ("predict", str(bare), "dev.csv", "--text", "sentence"),
    ):
        errors = refused(*arguments, cwd=files)
        assert message in errors or f"{bare}/checkpoints/step-00000003/tokenizer.json: No such file" in errors
        assert all(line.startswith("error: ") for line in errors.splitlines())


def test_a_directory_without_a_run_is_refused(files: Path, tmp_path: Path) -> None:
    for place, message in ((tmp_path / "none", "does not exist"), (files, "contains no checkpoint")):
        assert message in refused("finetune", str(place), *OWN, cwd=files)


def test_without_scikit_learn_nothing_starts(
    run_dir: Path, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "has_package", lambda name: name != "sklearn")
    errors = refused("finetune", str(run_dir), *OWN, cwd=files)
    assert "objective.name: scoring needs sklearn and scipy; `pip install " in errors
