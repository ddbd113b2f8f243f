"""Test `bert-dp eval glue` on a tiny run and two tiny tasks: resuming after a kill, and the result files."""

import json
import signal
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cli import accepted, bert_dp, interrupted, refused, trials_done
from tests.glue_fixture import write_two_tasks
from tests.helpers import read_json, read_lines
from tests.runs_to_export import tiny_config, write_run

SETTINGS = ["precision=fp32", "compile=off", "finetune.head_size=8", "schedule.epochs=1"]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Use an empty cache of prepared examples."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BERT_DP_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a pretrained run with checkpoints at steps 0 and 3."""
    folder = tmp_path_factory.mktemp("pretrained") / "tiny"
    write_run(folder, tiny_config(), step=0)
    return write_run(folder, tiny_config())


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_two_tasks(tmp_path_factory.mktemp("glue"))


def command(run: Path, data: Path, out: Path, *more: str) -> list[str]:
    return ["eval", "glue", str(run), *SETTINGS, f"--data={data}", f"--out={out}", "--seeds=2", *more]


@pytest.fixture(scope="module")
def out(run: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an evaluation that was killed after its first trial and then completed."""
    where = tmp_path_factory.mktemp("evaluated") / "out"
    evaluation = command(run, data, where)
    killed = interrupted(evaluation, where, signal.SIGKILL, lambda: trials_done(where))
    assert killed.returncode == -signal.SIGKILL
    assert not (where / "glue.json").exists()
    before = trials_done(where)
    whole = bert_dp(*evaluation)
    assert "trials already done" in whole.stdout
    assert before.items() <= trials_done(where).items(), "a completed trial ran again"
    ended = [read_json(path)["status"] for path in where.glob("trials/*/summary.json")]
    assert ended == ["done"] * 4
    return where


@pytest.fixture(scope="module")
def found(out: Path) -> dict[str, Any]:
    return read_json(out / "glue.json")


def started_from(out: Path, trial: dict[str, Any]) -> Any:
    """Return the initial weights of a trial as its summary records them."""
    return read_json(out / "trials" / trial["trial"] / "summary.json")["init_from"]


def test_every_score_is_computed_from_its_trials(found: dict[str, Any], out: Path) -> None:
    assert (found["status"], found["average"], found["ranks"]) == ("complete", None, 1)
    assert [task["task"] for task in found["tasks"]] == ["RTE", "WNLI"]
    for task in found["tasks"]:
        summaries = [read_json(out / "trials" / t["trial"] / "summary.json") for t in task["trials"]]
        scores = [summary["heldout"]["scores"]["dev/accuracy"] for summary in summaries]
        (score,) = task["scores"]
        assert score["seeds"] == scores
        assert score["median"] == statistics.median(scores)
        assert [summary["step"] for summary in summaries] == [24 // 16] * 2
        rows = read_lines(out / "trials" / task["trials"][0]["trial"] / "predictions.jsonl")
        dev = [row for row in rows if row["split"] == "dev"]
        right = sum(max((0, 1), key=row["logits"].__getitem__) == row["label"] for row in dev)
        assert scores[0] == pytest.approx(right / len(dev))
    rte = found["tasks"][0]
    assert rte["scores"][0]["majority"] == 5 / 8  # 5 of the 8 dev examples are `entailment`
    first = started_from(out, rte["trials"][0])
    assert {name: first[name] for name in ("checkpoint", "sha256")}.items() <= found["start"].items()
    assert found["left_out"]["CoLA"] == "no CoLA/train.tsv, CoLA/dev.tsv in --data"


def test_a_completed_evaluation_runs_no_trial_again_and_has_a_page(
    run: Path, data: Path, out: Path, found: dict[str, Any], tmp_path: Path
) -> None:
    before = trials_done(out)
    again = accepted(*command(run, data, out, "--json"))
    assert json.loads(again)["tasks"] == found["tasks"]
    assert trials_done(out) == before
    accepted("report", str(out), "--out", str(tmp_path / "page.html"))
    shown = (tmp_path / "page.html").read_text()
    for words in ("subset", "recipe head, cls pooling, from step 3", "no CoLA/train.tsv"):
        assert words in shown
    assert "contains another evaluation (optim.lr" in refused(*command(run, data, out, "optim.lr=1e-4"))


def test_an_older_checkpoint_of_a_run_is_evaluated(run: Path, data: Path, tmp_path: Path) -> None:
    """Users evaluate several checkpoints of a run to compare score and loss."""
    first = run / "checkpoints" / "step-00000000"
    out = tmp_path / "out"
    found = json.loads(bert_dp(*command(first, data, out, "--tasks=RTE", "--seeds=1", "--json")).stdout)
    assert (found["start"]["step"], found["start"]["checkpoint"]) == (0, str(first))
    weights = read_json(first / "manifest.json")["files"]["model.safetensors"]["sha256"]
    for trial in found["tasks"][0]["trials"]:
        assert started_from(out, trial)["sha256"] == weights
    newest = read_json(run / "checkpoints" / "step-00000003" / "manifest.json")
    assert newest["files"]["model.safetensors"]["sha256"] != weights


def test_a_dry_run_and_bad_input_start_nothing(run: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    accepted(*command(run, data, out, "--dry-run"))
    for more, line in (
        ("--tasks=MNLI,rte", "--tasks: MNLI needs MNLI/train.tsv"),
        ("--nproc=3", "batch.global_size"),
        ("finetune.labels=[a,b]", "finetune.labels: determined by the other arguments"),
        ("batch.micro_size=5", "batch.global_size"),
    ):
        assert line in refused(*command(run, data, out, more))
    assert "contains no checkpoint" in refused("eval", "glue", str(tmp_path), "--data", str(data))
    assert not out.exists()
