"""The section of a model card with the scores of `eval glue`: which evaluation it is of, and what it says."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from bert_dp.record import without_folders
from launcher import results
from launcher.evaluate.finetune import Pretrained, find_pretrained
from launcher.evaluate.glue import start_of
from launcher.evaluate.glue_text import glue_text
from launcher.results import GlueOptions, GlueStart
from tests.glue_fixture import evaluation, scored_task
from tests.runs_to_export import config_of, write_run

SMALL = {"hidden_size": 16, "num_heads": 2, "intermediate_size": 16}


def write_evaluation(folder: Path, start: GlueStart, *, age_s: int = 0, **changes: Any) -> None:
    seeds = [0.5, 0.625, 0.75]
    tasks = [scored_task(name, seeds, official=name == "RTE", examples=1277) for name in ("RTE", "WNLI")]
    glue = evaluation(folder, tasks, seeds=3).model_copy(update={"start": start, **changes})
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "glue.json"
    results.write(file, glue)
    os.utime(file, (file.stat().st_mtime - age_s,) * 2)


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pretrained:
    """A pretrained run in runs of the current folder."""
    monkeypatch.chdir(tmp_path)
    return find_pretrained(write_run(tmp_path / "runs" / "a", config_of("quickstart", model=SMALL)))


def test_a_checkpoint_is_known_as_that_of_its_run(start: Pretrained) -> None:
    assert start_of(find_pretrained(start.checkpoint)) == start_of(start)


def test_a_pretrained_run_has_every_task_of_its_newest_evaluation(start: Pretrained, tmp_path: Path) -> None:
    assert glue_text(start) == ""
    own = start_of(start)
    write_evaluation(tmp_path / "eval" / "old", own, age_s=99, average=0.25)
    write_evaluation(tmp_path / "runs" / "other", own.model_copy(update={"sha256": "1" * 64}), average=0.125)
    random = GlueOptions(seeds=3, init="random")
    write_evaluation(tmp_path / "eval" / "random", own, settings=random, average=0.375)
    (tmp_path / "eval" / "damaged").mkdir()
    (tmp_path / "eval" / "damaged" / "glue.json").write_text("{")
    assert "Average of its nine numbers: 25.0." in glue_text(start)
    write_evaluation(tmp_path / "eval" / "new", own, status="partial")
    text = glue_text(start)
    assert text.startswith("## GLUE\n\nDev sets, out of 100; median over 3 seeds. recipe head, cls pooling, ")
    assert text.splitlines()[2].endswith("rate 4.00e-05. The evaluation was not finished.")
    assert text.splitlines()[4:] == [
        "| task | median | deviation | majority | dev examples | remark |",
        "| --- | --- | --- | --- | --- | --- |",
        "| RTE accuracy | 62.5 | 12.5 | 40.0 | 1,277 |  |",
        "| WNLI accuracy | 62.5 | 12.5 | 40.0 | 1,277 | subset |",
    ]


def test_an_evaluation_is_found_here_and_beside_the_run(
    start: Pretrained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for place in ("here/eval/one", "eval/one", "runs/one"):
        assert glue_text(start) == ""
        write_evaluation(tmp_path / place, start_of(start))
        assert "| RTE accuracy | 62.5 |" in glue_text(start), place
        shutil.rmtree(tmp_path / place)


def test_a_trial_has_its_own_task_and_score(start: Pretrained, tmp_path: Path) -> None:
    write_evaluation(tmp_path / "eval" / "all", start_of(start), average=0.5)
    trial = write_run(tmp_path / "eval/all/trials/WNLI-s2", config_of("quickstart", model=SMALL))
    text = glue_text(find_pretrained(trial))
    assert "| WNLI accuracy | 62.5 | 12.5 | 40.0 | 1,277 | subset, this run: 75.0 |\n" in text
    assert "RTE" not in text
    assert "Average" not in text


@pytest.mark.parametrize(
    ("word", "cut"),
    [
        ("/usr/local/bin/bert-dp", "bert-dp"),
        ("run.init_from=hf:/data/models/rope", "run.init_from=hf:rope"),
        ("data.sources=[/data/a/x.txt,/data/y.txt]", "data.sources=[x.txt,y.txt]"),
        ("runs/crammed", "runs/crammed"),
        ("../runs/crammed", "../runs/crammed"),
        ("--lr=1/2", "--lr=1/2"),
    ],
)
def test_a_card_names_files_and_not_where_they_are(word: str, cut: str) -> None:
    assert without_folders(word) == cut
