"""Test `eval glue` on simulated trials: scores, medians, the average, the learning rate, and comparisons."""

import contextlib
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bert_dp.config import peak_lr
from launcher import results
from launcher.evaluate import glue, glue_scores
from launcher.evaluate.glue import GluePlanFile, choose_tasks, result_file
from launcher.evaluate.glue_scores import Glue, GlueOptions, GlueTask, GlueTrial, compare_report, glue_report
from launcher.job import Output
from launcher.run import trials
from launcher.run.trials import SearchOutcome, TrialOutcome
from tests.glue_fixture import MadeRunner, make_grid, make_task, scored_task, write_glue, write_trial
from tests.helpers import raised_issues, write_lines

EIGHT = ["CoLA", "SST-2", "MRPC", "STS-B", "QQP", "MNLI", "QNLI", "RTE"]


def read(out: Path, name: str, scores: dict[str, Any], **summary: Any) -> GlueTrial:
    """Write a finished trial and read it."""
    task = make_task(name)
    trial = glue.make_trial(make_grid(GlueOptions(tasks=[name])), out, task, 0)
    write_trial(trial, scores, **summary)
    return glue_scores.read_trial(trial, TrialOutcome("ok", 2.0), task.manifest)


def refusals(function: Callable[..., Any], *arguments: Any) -> list[tuple[str, str, object, str | None]]:
    """Return setting, kind, value and conflicting setting of each issue that is raised."""
    return [(i.setting, i.kind, i.value, i.other) for i in raised_issues(function, *arguments)]


def test_a_trial_has_the_scores_of_its_summary(tmp_path: Path) -> None:
    scores = {"dev_matched/accuracy": 0.5, "dev_mismatched/accuracy": 0.75}
    trial = read(tmp_path, "MNLI", scores, one_class=["dev_mismatched", "test_matched"])
    assert (trial.status, trial.one_class, trial.scores) == ("ok", ["dev_mismatched"], scores)
    assert (trial.trial, trial.seed, trial.lr) == ("MNLI-lr-4e-05-s0", 0, 4e-5)


@pytest.mark.parametrize(
    ("name", "scores", "summary", "cause"),
    [
        ("MNLI", {"dev_matched/accuracy": 0.5}, {}, "no dev_mismatched/accuracy"),
        ("MNLI", {}, {"heldout": None}, "no dev_matched/accuracy, dev_mismatched/accuracy"),
        ("STS-B", {"dev/pearson": math.nan, "dev/spearman": None}, {}, "no dev/pearson, dev/spearman"),
    ],
)
def test_a_trial_without_all_its_scores_has_failed(
    tmp_path: Path, name: str, scores: dict[str, Any], summary: dict[str, Any], cause: str
) -> None:
    trial = read(tmp_path, name, scores, **summary)
    assert (trial.status, trial.scores) == ("failed", {})
    assert str(trial.cause).startswith(cause)


def test_the_median_and_the_deviation_use_only_seeds_with_a_score() -> None:
    (score,) = scored_task("RTE", [0.5, None, 0.7, 0.55]).scores
    assert score.seeds == [0.5, None, 0.7, 0.55]
    assert score.median == 0.55
    assert score.sd == pytest.approx(statistics.stdev([0.5, 0.7, 0.55]))
    assert score.majority == 0.4
    (alone,) = scored_task("RTE", [0.5]).scores
    assert (alone.median, alone.sd) == (0.5, None)
    (none,) = scored_task("RTE", [None]).scores
    assert (none.median, none.sd, none.seeds) == (None, None, [None])


def test_the_median_trial_is_one_of_the_trials() -> None:
    assert scored_task("RTE", [0.5, 0.9, 0.7]).median_trial == "RTE-s2"
    assert scored_task("RTE", [0.5, 0.9, 0.7, 0.6]).median_trial == "RTE-s3"  # the lower of the middle two
    assert scored_task("RTE", [0.7, 0.7, 0.7]).median_trial == "RTE-s1"
    assert scored_task("RTE", [None]).median_trial is None
    both = [{"dev/accuracy": 0.1 * i, "dev/f1": 0.1 * i * (3 - i)} for i in (1, 2, 3)]  # F1: 0.2, 0.2, 0
    trials = [GlueTrial(trial=f"s{i}", lr=1, seed=i, status="ok", scores=x) for i, x in enumerate(both)]
    whole = glue_scores.score_task(make_task("MRPC").manifest, trials)
    assert whole.median_trial == "s1"  # by the first metric


def test_the_average_is_the_mean_of_nine_scores_with_the_metrics_of_the_recipe() -> None:
    metrics = {"CoLA": "mcc", "MRPC": "f1", "STS-B": "pearson", "QQP": "f1"}
    values = {name: 0.1 * k for k, name in enumerate(EIGHT)}  # CoLA 0
    tasks = []
    for name, value in values.items():
        task, metric = make_task(name), metrics.get(name, "accuracy")
        names = [score.name for score in scored_task(name, [0.0]).scores]
        scores = {each: value if each.endswith(f"/{metric}") else 0.95 for each in names}
        trial = GlueTrial(trial="a", lr=1e-4, seed=0, status="ok", scores=scores)
        tasks.append(glue_scores.score_task(task.manifest, [trial]))
    average, lacking = glue_scores.average([*tasks, scored_task("WNLI", [0.0])])
    assert lacking == []
    assert average == pytest.approx((sum(values.values()) + values["MNLI"]) / 9)
    grid = make_grid(GlueOptions(seeds=2))
    whole, stopped = (result_file(grid, tasks, SearchOutcome(end), {}) for end in ("complete", "partial"))
    assert (whole.average, glue_report(whole).verdicts[0].level) == (average, "ok")
    assert (stopped.status, stopped.average) == ("partial", None)


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("QQP", scored_task("QQP", [0.5], official=False)),
        ("CoLA", scored_task("CoLA", [0.5, None])),
        ("MNLI", None),
    ],
)
def test_there_is_no_average_without_every_task_and_seed(name: str, task: GlueTask | None) -> None:
    whole = {each: scored_task(each, [0.5, 0.5]) for each in EIGHT}
    tasks = [task if each == name else whole[each] for each in EIGHT]
    assert glue_scores.average([each for each in tasks if each]) == (None, [name])


def options(*tasks: str) -> GlueOptions:
    return GlueOptions(tasks=list(tasks), seeds=2)


def test_a_trial_scales_its_learning_rate_and_logs_to_no_service(tmp_path: Path) -> None:
    given = ("optim.lr_scaling=sqrt", "optim.lr_batch=64", "log.to=[wandb]")
    mnli = make_task("MNLI")
    config = glue.make_trial(make_grid(options("MNLI"), [mnli], given), tmp_path, mnli, 0).config
    assert (config.checkpoint.keep, config.log.to) == (0, ())
    assert peak_lr(config).value == pytest.approx(4e-5 * (16 / 64) ** 0.5)


@pytest.mark.parametrize(
    ("scores", "status", "code"), [([0.5, 0.6], "complete", 0), ([None, None], "failed", 1)]
)
def test_every_task_runs_with_every_seed_and_the_status_follows_from_the_trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scores: list[float | None], status: str, code: int
) -> None:
    tasks = [make_task("MRPC", examples=40), make_task("RTE", examples=4)]
    runner = MadeRunner(tmp_path, tasks, lambda name, config: scores[config.run.seed] or "loss is NaN")
    monkeypatch.setattr(trials, "runner", lambda *_, **__: contextlib.nullcontext(runner))
    plan = GluePlanFile(config_hash="abc", settings={}, start={})
    output = Output(tmp_path, "evaluation", glue.STATE, plan, glue.MUST_MATCH, glue.MAY_INCREASE)
    file, ended = glue.run_trials(make_grid(options("MRPC", "RTE"), tasks), output, print)
    assert (file.status, ended, file.average) == (status, code, None)
    assert [task.task for task in file.tasks] == ["MRPC", "RTE"]
    assert [score.seeds for task in file.tasks for score in task.scores] == [scores] * 3
    failures = [f"{trial.trial}: failed: loss is NaN" for task in file.tasks for trial in task.trials]
    assert glue_report(file).verdicts[-1].notes == (failures if code else ())
    assert file.seconds == sum(trial.seconds for task in file.tasks for trial in task.trials) > 0
    assert results.plain(results.read(tmp_path / "glue.json", Glue)) == results.plain(file)
    names = sorted(trial.name for trial in runner.ran)
    assert names == [f"{name}-lr-4e-05-s{seed}" for name in ("MRPC", "RTE") for seed in (0, 1)]
    for config in (trial.config for trial in runner.ran):
        assert config.run.init_from == "/run/checkpoints/step-00000005"
        assert (config.checkpoint.keep, config.precision) == (0, "fp32")


MISSING = {name: ["QQP/train.tsv", "QQP/dev.tsv"] if name == "QQP" else [] for name in (*EIGHT, "WNLI")}


def test_available_tasks_are_chosen_in_order() -> None:
    found, left_out = choose_tasks(MISSING, GlueOptions())
    assert found.tasks == [name for name in MISSING if name != "QQP"]
    assert left_out == {"QQP": "no QQP/train.tsv, QQP/dev.tsv in --data"}
    found, left_out = choose_tasks(MISSING, GlueOptions(tasks=["RTE", "CoLA"]))
    assert found.tasks == ["CoLA", "RTE"]
    assert list(left_out) == ["QQP"]


def test_tasks_that_cannot_be_run_are_refused() -> None:
    unknown, absent = ("--tasks", "unknown", "cola", None), ("--tasks", "not_found", "QQP", "--data")
    assert refusals(choose_tasks, MISSING, options("cola", "QQP")) == [unknown, absent]
    nothing = {name: [f"{name}/train.tsv"] for name in MISSING}
    assert refusals(choose_tasks, nothing, GlueOptions()) == [("--data", "not_found", None, None)]


def test_settings_that_an_evaluation_ignores_are_refused() -> None:
    issues = glue.setting_issues(["checkpoint.keep=2", "log.to=[wandb]", "log.every_steps=5", "optim.lr=1"])
    assert [issue.setting for issue in issues] == ["checkpoint.keep", "log.to"]


def test_the_held_out_loss_of_a_start_is_from_its_own_step(tmp_path: Path) -> None:
    write_lines(tmp_path / "evals.jsonl", [{"step": 250, "loss": 5.25}, {"step": 500, "loss": 4.5}])
    for step, init, loss in ((250, "checkpoint", 5.25), (750, "checkpoint", None), (250, "random", None)):
        grid = make_grid(GlueOptions(tasks=["RTE"], init=init))
        path = tmp_path / "checkpoints" / f"step-{step:08}"
        grid = grid._replace(start=grid.start._replace(checkpoint=path, step=step))
        assert result_file(grid, [], SearchOutcome("complete"), {}).heldout_loss == loss


def test_evaluations_that_are_not_comparable_are_refused(tmp_path: Path) -> None:
    a = write_glue(tmp_path / "a", scored_task("RTE", [0.5]))
    b = write_glue(tmp_path / "b", scored_task("MRPC", [0.5]))
    c = write_glue(tmp_path / "c", scored_task("RTE", [0.5], dev_share=0.1))
    assert refusals(compare_report, [a, b]) == [(str(b), "conflict", None, str(a))]
    assert refusals(compare_report, [a, c]) == [(str(c), "conflict", "RTE", str(a))]
