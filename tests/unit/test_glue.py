"""An evaluation on GLUE from made trials: scores, medians, the average, the rate, submissions, the report."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest

from bert_dp.config import Config, ConfigError
from launcher import results
from launcher.evaluate import glue_grid, glue_scores
from launcher.evaluate.glue_compare import Paired, compare_report, paired_difference, paired_text
from launcher.evaluate.glue_grid import Task, choose_tasks
from launcher.evaluate.glue_report import glue_report
from launcher.evaluate.glue_run import GlueRun, NoRate
from launcher.evaluate.submissions import write_submissions
from launcher.results import Glue, GlueOptions, GlueTask, GlueTrial
from launcher.run.trials import Outcome, Stopped, Trial
from tests.glue_fixture import MadeRunner, evaluation, make_grid, make_task, measured, scores_of, write_trial
from tests.helpers import issues_of
from tests.report_fixture import shown, unfolded

EIGHT = ["CoLA", "SST-2", "MRPC", "STS-B", "QQP", "MNLI", "QNLI", "RTE"]


def trial_of(task: Task, tmp_path: Path, seed: int = 0) -> Trial:
    grid = make_grid(GlueOptions(tasks=[task.name]))
    return glue_grid.make_trial(grid, tmp_path, task, None, seed, None)


def read(trial: Trial, task: Task) -> GlueTrial:
    return glue_scores.read_trial(trial, Outcome("ok", 2.0), task, 4e-5)


# --- one trial


def test_a_trial_has_the_scores_of_its_summary(tmp_path: Path) -> None:
    task = make_task("MNLI")
    trial = trial_of(task, tmp_path)
    write_trial(trial, task, {"dev_matched/accuracy": 0.5, "dev_mismatched/accuracy": 0.75})
    found = read(trial, task)
    assert (found.status, found.one_class) == ("ok", [])
    assert found.scores == {"dev_matched/accuracy": 0.5, "dev_mismatched/accuracy": 0.75}
    before = found.predictions_sha256
    write_trial(trial, task, found.scores, lambda config, split, i: [1.0, float(i)])
    assert read(trial, task).predictions_sha256 != before


@pytest.mark.parametrize("scores", [{}, {"dev_matched/accuracy": 0.5}, None])
def test_a_trial_without_all_its_scores_has_failed(tmp_path: Path, scores: dict[str, Any] | None) -> None:
    task = make_task("MNLI")
    trial = trial_of(task, tmp_path)
    write_trial(trial, task, scores or {}, **({"heldout": None} if scores is None else {}))
    found = read(trial, task)
    assert (found.status, found.scores) == ("failed", {})
    assert "dev_mismatched/accuracy" in str(found.cause)


def test_a_score_that_is_not_defined_is_none(tmp_path: Path) -> None:
    task = make_task("STS-B")
    trial = trial_of(task, tmp_path)
    write_trial(trial, task, {"dev/pearson": math.nan, "dev/spearman": None}, lambda *_: [1.0])
    found = read(trial, task)
    assert (found.status, found.scores) == ("failed", {})
    assert str(found.cause).startswith("no dev/pearson, dev/spearman")


def test_predictions_that_lack_an_example_are_none(tmp_path: Path) -> None:
    task = make_task("RTE")
    trial = trial_of(task, tmp_path)
    write_trial(trial, task, scores_of(task, 0.5))
    path = trial.directory / "predictions.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    assert read(trial, task).status == "failed"
    path.unlink()
    assert read(trial, task).status == "failed"


def test_one_answer_for_every_example_is_flagged(tmp_path: Path) -> None:
    task = make_task("MNLI")
    trial = trial_of(task, tmp_path)
    write_trial(
        trial,
        task,
        scores_of(task, 0.5),
        lambda config, split, i: [1.0, float(split == "dev_matched" and i == 3) * 2],
    )
    assert read(trial, task).one_class == ["dev_mismatched"]


def test_a_trial_that_failed_has_no_score(tmp_path: Path) -> None:
    task = make_task("RTE")
    trial = trial_of(task, tmp_path)
    write_trial(trial, task, scores_of(task, 0.9), status="failed", cause="loss is NaN")
    found = glue_scores.read_trial(trial, Outcome("failed", 2.0), task, 4e-5)
    assert (found.status, found.cause, found.scores) == ("failed", "loss is NaN", {})


# --- over the seeds


def made(name: str, values: list[float | None], **task: Any) -> GlueTask:
    """A task whose trials scored these values in every metric; None: failed."""
    source = make_task(name, **task)
    trials = [
        GlueTrial(trial=f"{name}-s{seed}", lr=4e-5, seed=seed, status="ok", scores=scores_of(source, value))
        if value is not None
        else GlueTrial(trial=f"{name}-s{seed}", lr=4e-5, seed=seed, status="failed", cause="NaN")
        for seed, value in enumerate(values)
    ]
    majority = {split: dict.fromkeys(source.manifest.metrics, 0.4) for split in source.dev}
    return glue_scores.task_result(source, trials[::-1], majority, None)


def test_the_median_and_the_deviation_are_over_the_seeds_that_have_a_score() -> None:
    (score,) = made("RTE", [0.5, None, 0.7, 0.55]).scores
    assert score.seeds == [0.5, None, 0.7, 0.55]
    assert score.median == 0.55
    assert score.sd == pytest.approx(statistics.stdev([0.5, 0.7, 0.55]))
    assert score.majority == 0.4
    assert not score.is_whole
    (alone,) = made("RTE", [0.5]).scores
    assert (alone.median, alone.sd) == (0.5, None)
    (none,) = made("RTE", [None]).scores
    assert (none.median, none.sd, none.seeds) == (None, None, [None])


def test_the_median_trial_is_one_of_the_trials() -> None:
    assert made("RTE", [0.5, 0.9, 0.7]).median_trial == "RTE-s2"
    assert made("RTE", [0.5, 0.9, 0.7, 0.6]).median_trial == "RTE-s3"  # the lower of the middle two
    assert made("RTE", [0.7, 0.7, 0.7]).median_trial == "RTE-s1"
    assert made("RTE", [None]).median_trial is None


def test_the_average_is_the_mean_of_nine_numbers() -> None:
    values = {name: 0.1 * k for k, name in enumerate(EIGHT, 1)}
    tasks = [made(name, [value] * 3) for name, value in values.items()]
    average, why = glue_scores.average([*tasks, made("WNLI", [0.0])])
    assert why == []
    assert average == pytest.approx((sum(values.values()) + values["MNLI"]) / 9)


@pytest.mark.parametrize(
    ("name", "task", "why"),
    [
        ("QQP", made("QQP", [0.5], official=False), "QQP is a subset of GLUE's rows"),
        ("CoLA", made("CoLA", [0.5, None]), "CoLA lacks the score of a seed"),
        ("MNLI", None, "MNLI is not evaluated"),
    ],
)
def test_there_is_no_average_without_all_of_them(name: str, task: GlueTask | None, why: str) -> None:
    whole = {each: made(each, [0.5, 0.5]) for each in EIGHT}
    tasks = [task if each == name else whole[each] for each in EIGHT]
    assert glue_scores.average([each for each in tasks if each]) == (None, [why])


# --- which trials run


def options(*tasks: str, **more: Any) -> GlueOptions:
    return GlueOptions(tasks=list(tasks), **{"seeds": 2, **more})


def ran(runner: MadeRunner) -> list[str]:
    return [trial.name for trial in runner.ran]


def test_every_task_runs_with_every_seed_and_the_results_are_in_order(tmp_path: Path) -> None:
    tasks = {name: make_task(name, examples=n) for name, n in (("RTE", 4), ("MRPC", 40))}
    runner = MadeRunner(tmp_path, tasks.values(), lambda name, config: 0.5 + config.run.seed / 10)
    doing = GlueRun(make_grid(options("MRPC", "RTE"), tasks.values()), runner, print)
    doing.run()
    assert sorted(ran(runner)) == [f"{name}-lr-4e-05-s{seed}" for name in ("MRPC", "RTE") for seed in (0, 1)]
    assert glue_grid.rounds(doing.grid) == [[tasks["MRPC"], tasks["RTE"]]]
    assert doing.lr == 4e-5
    (score,) = glue_scores.task_result(tasks["RTE"], doing.trials["RTE"], {}, None).scores
    assert score.seeds == [0.5, 0.6]
    for trial in runner.ran:
        config = trial.config
        assert config.run.init_from == "/run/checkpoints/step-00000005"
        assert (config.checkpoint.keep, config.precision) == (0, "fp32")


def test_one_rate_is_chosen_for_all_on_a_tenth_of_train(tmp_path: Path) -> None:
    tasks = {name: make_task(name) for name in ("RTE", "MRPC", "CoLA")}
    tenths = {name: make_task(name, dev_share=0.1) for name in ("MRPC", "CoLA")}
    best = {("MRPC", 1e-4): 0.5, ("CoLA", 1e-4): 0.9, ("MRPC", 3e-4): 0.8, ("CoLA", 3e-4): 0.5}

    def surface(name: str, config: Config) -> float:
        return best[name, float(config.optim.lr)]

    runner = MadeRunner(
        tmp_path, [*tasks.values(), *tenths.values()], lambda n, c: 0.1 if n == "RTE" else surface(n, c)
    )
    asked = options("CoLA", "MRPC", "RTE", rates=[1e-4, 3e-4], rate_tasks=["MRPC", "CoLA"])
    doing = GlueRun(make_grid(asked, tasks.values(), tenths.values()), runner, print)
    doing.run()
    assert [(rate.lr, rate.scores, rate.mean) for rate in doing.rates] == [
        (1e-4, {"MRPC": 0.5, "CoLA": 0.9}, pytest.approx(0.7)),
        (3e-4, {"MRPC": 0.8, "CoLA": 0.5}, pytest.approx(0.65)),
    ]
    assert doing.lr == 1e-4
    assert {t.config.optim.lr for t in runner.ran[4:]} == {1e-4}
    assert sorted(ran(runner)[:4]) == [
        f"rate-{n}-lr-{lr}-s0" for n in ("CoLA", "MRPC") for lr in (0.0001, 0.0003)
    ]
    assert all("-0.1" in str(t.config.data.path) for t in runner.ran[:4])
    assert all("-0.1" not in str(t.config.data.path) for t in runner.ran[4:])


def test_a_rate_with_a_failed_trial_is_not_chosen(tmp_path: Path) -> None:
    tenths = {"RTE": make_task("RTE", dev_share=0.1)}
    asked = options("RTE", rates=[1e-4, 3e-4], rate_tasks=["RTE"])

    def run(surface: dict[float, float | str], folder: str) -> GlueRun:
        tasks = {"RTE": make_task("RTE")}
        runner = MadeRunner(
            tmp_path / folder, [*tasks.values(), *tenths.values()], lambda _, c: surface[float(c.optim.lr)]
        )
        return GlueRun(make_grid(asked, tasks.values(), tenths.values()), runner, print)

    doing = run({1e-4: 0.1, 3e-4: "loss is NaN"}, "one")
    doing.run()
    assert doing.lr == 1e-4
    same = run({1e-4: 0.5, 3e-4: 0.5}, "same")
    same.run()
    assert same.lr == 1e-4
    none = run({1e-4: "loss is NaN", 3e-4: "loss is NaN"}, "none")
    with pytest.raises(NoRate):
        none.run()
    assert [rate.mean for rate in none.rates] == [None, None]
    trials = {name: made(name, [value]).trials[0] for name, value in (("RTE", 0.9), ("CoLA", None))}
    rate = glue_scores.rate_score(3e-4, trials, {"RTE": "dev/accuracy", "CoLA": "dev/mcc"})
    assert (rate.scores, rate.mean) == ({"RTE": 0.9, "CoLA": None}, None)


def test_a_task_starts_from_the_finetuned_run_of_the_same_seed(tmp_path: Path) -> None:
    tasks = {name: make_task(name) for name in ("MNLI", "RTE")}
    runner = MadeRunner(
        tmp_path, tasks.values(), lambda n, c: "loss is NaN" if (n, c.run.seed) == ("MNLI", 1) else 0.5
    )
    doing = GlueRun(
        make_grid(options("MNLI", "RTE", init_task={"RTE": "MNLI"}), tasks.values()), runner, print
    )
    doing.run()
    assert sorted(ran(runner)) == ["MNLI-lr-4e-05-s0", "MNLI-lr-4e-05-s1", "RTE-lr-4e-05-s0"]
    by_name = {trial.name: trial.config for trial in runner.ran}
    assert by_name["RTE-lr-4e-05-s0"].run.init_from == str(tmp_path / "trials" / "MNLI-lr-4e-05-s0")
    assert by_name["MNLI-lr-4e-05-s0"].checkpoint.keep == 1
    assert by_name["RTE-lr-4e-05-s0"].checkpoint.keep == 0
    (failed,) = [trial for trial in doing.trials["RTE"] if trial.seed == 1]
    assert (failed.status, failed.scores) == ("failed", {})
    assert "MNLI-lr-4e-05-s1" in str(failed.cause)


def test_what_was_stopped_goes_on(tmp_path: Path) -> None:
    tasks = {name: make_task(name) for name in ("RTE", "MRPC")}
    first = MadeRunner(tmp_path, tasks.values(), lambda *_: 0.5, limit=3)
    stopped = GlueRun(make_grid(options("MRPC", "RTE"), tasks.values()), first, print)
    with pytest.raises(Stopped):
        stopped.run()
    assert sum(len(trials) for trials in stopped.trials.values()) == 3
    second = MadeRunner(tmp_path, tasks.values(), lambda *_: 0.5)
    doing = GlueRun(make_grid(options("MRPC", "RTE"), tasks.values()), second, print)
    doing.run()
    assert (len(first.ran), len(second.ran)) == (3, 1)
    assert {name: len(trials) for name, trials in doing.trials.items()} == {"RTE": 2, "MRPC": 2}


# --- what is refused


MISSING: dict[str, list[str]] = {
    **{name: [] for name in EIGHT},
    "QQP": ["QQP/train.tsv", "QQP/dev.tsv"],
    "WNLI": [],
}


def test_every_task_that_is_there_is_taken_in_order() -> None:
    found, left_out = choose_tasks(MISSING, GlueOptions())
    assert found.tasks == [name for name in MISSING if name != "QQP"]
    assert left_out == {"QQP": "no QQP/train.tsv, QQP/dev.tsv in --data"}
    found, left_out = choose_tasks(MISSING, GlueOptions(tasks=["RTE", "CoLA"], rates=[1e-4]))
    assert (found.tasks, found.rate_tasks) == (["CoLA", "RTE"], ["CoLA", "MRPC", "STS-B", "RTE"])
    assert left_out["MNLI"] == "not among --tasks"


@pytest.mark.parametrize(
    ("asked", "issue"),
    [
        ({"tasks": ["cola"]}, "--tasks: cola is no task of GLUE"),
        ({"tasks": ["QQP"]}, "--tasks: QQP: no QQP/train.tsv, QQP/dev.tsv in --data"),
        ({"rate_tasks": ["RTE"]}, "--rate-tasks: choose a rate, but --rates names none"),
        ({"rates": [1e-4], "rate_tasks": ["QQP"]}, "--rate-tasks: QQP: no QQP/train.tsv"),
        ({"init_task": {"RTE": "QQP"}}, "--init-task: RTE=QQP: QQP is not evaluated"),
        ({"init_task": {"RTE": "MNLI", "MNLI": "SST-2"}}, "MNLI starts from SST-2 itself"),
        ({"init_task": {"RTE": "RTE"}}, "RTE starts from RTE itself"),
        ({"init_task": {"RTE": "MNLI"}, "init": "random"}, "--init-task: is not from random weights"),
    ],
)
def test_what_cannot_be_run_is_refused(asked: dict[str, Any], issue: str) -> None:
    assert any(
        line.startswith(issue) or issue in line
        for line in issues_of(choose_tasks, MISSING, GlueOptions(**asked))
    )


def test_data_without_a_task_is_refused() -> None:
    nothing = {name: [f"{name}/train.tsv"] for name in MISSING}
    with pytest.raises(ConfigError, match="holds no task of GLUE"):
        choose_tasks(nothing, GlueOptions())


def test_settings_that_follow_from_the_task_are_refused() -> None:
    (path, rate) = glue_grid.setting_issues(["data.path=/x", "optim.lr=1e-3", "schedule.epochs=1"], [1e-4])
    assert path.startswith("data.path: follows from RUN and the task")
    assert rate.startswith("optim.lr: is what --rates chooses")
    assert glue_grid.setting_issues(["optim.lr=1e-3", "finetune.pooling=mean"], []) == []


# --- files for GLUE's server


def test_a_submission_has_names_of_labels_in_order(tmp_path: Path) -> None:
    task = make_task("MNLI", test=3)
    trial = trial_of(task, tmp_path)
    write_trial(
        trial, task, scores_of(task, 0.5), lambda config, split, i: [float(split == "test_matched"), i - 0.5]
    )
    assert write_submissions(tmp_path, trial.directory, task.manifest) == (
        ["submission/MNLI-m.tsv", "submission/MNLI-mm.tsv"],
        None,
    )
    assert (tmp_path / "submission" / "MNLI-m.tsv").read_text().splitlines() == [
        "index\tprediction",
        "0\tentailment",
        "1\tentailment",
        "2\tnot_entailment",
    ]
    assert (tmp_path / "submission" / "MNLI-mm.tsv").read_text().splitlines()[2] == "1\tnot_entailment"


def test_similarities_are_clipped_in_the_submission_alone(tmp_path: Path) -> None:
    task = make_task("STS-B", test=3)
    trial = trial_of(task, tmp_path)
    write_trial(trial, task, scores_of(task, 0.5), lambda config, split, i: [[-0.25, 2.5, 7.0, 1.0][i]])
    before = (trial.directory / "predictions.jsonl").read_bytes()
    assert write_submissions(tmp_path, trial.directory, task.manifest) == (["submission/STS-B.tsv"], None)
    lines = (tmp_path / "submission" / "STS-B.tsv").read_text().splitlines()
    assert lines[1:] == ["0\t0.000", "1\t2.500", "2\t5.000"]
    assert (trial.directory / "predictions.jsonl").read_bytes() == before


def test_a_task_without_a_test_file_says_so(tmp_path: Path) -> None:
    task = make_task("RTE")
    trial = trial_of(task, tmp_path)
    write_trial(trial, task, scores_of(task, 0.5))
    assert write_submissions(tmp_path, trial.directory, task.manifest) == ([], "no test file in --data")
    assert not (tmp_path / "submission").exists()


def test_a_prediction_that_is_not_finite_is_not_submitted(tmp_path: Path) -> None:
    task = make_task("RTE", test=3)
    trial = trial_of(task, tmp_path)
    write_trial(trial, task, scores_of(task, 0.5))
    path = trial.directory / "predictions.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[-1]["logits"] = [None, 0.0]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    written, why = write_submissions(tmp_path, trial.directory, task.manifest)
    assert written == []
    assert why is not None
    assert "not finite" in why


# --- the table


def test_the_file_comes_back_as_it_was(tmp_path: Path) -> None:
    glue = evaluation(tmp_path, [made("RTE", [0.5, None]), made("MNLI", [0.5, 0.7])])
    results.write(tmp_path / "glue.json", glue)
    assert results.read(tmp_path / "glue.json", Glue) == glue


def test_the_table_has_what_a_number_must_not_be_read_without(tmp_path: Path) -> None:
    constant = made("MRPC", [0.68, 0.68], official=False)
    flagged = [trial.model_copy(update={"one_class": ["dev"]}) for trial in constant.trials]
    tasks = [
        constant.model_copy(update={"trials": flagged}),
        made("MNLI", [0.5, 0.7]),
        made("RTE", [0.25, None]).model_copy(update={"init_task": "MNLI"}),
    ]
    glue = evaluation(tmp_path, tasks, init_task={"RTE": "MNLI"})
    (table,) = glue_report(glue).sections[0].tables
    assert table.title == "recipe head, cls pooling, from step 5"
    rows = {row.label: [cell.text for cell in row.cells] for row in table.rows}
    assert list(rows) == [
        "MRPC accuracy",
        "MRPC F1",
        "MNLI matched accuracy",
        "MNLI mismatched accuracy",
        "RTE accuracy (from MNLI)",
    ]
    assert rows["MNLI matched accuracy"] == ["60.0", "14.1", "40.0", "4", "25.0 %", "1", "", "50.0, 70.0"]
    assert rows["MRPC F1"][-2] == "subset, one answer in 2 of 2"
    assert rows["RTE accuracy (from MNLI)"] == [
        "25.0",
        "n/a",
        "40.0",
        "4",
        "25.0 %",
        "1",
        "1 of 2 failed",
        "25.0, n/a",
    ]
    text = unfolded(shown(glue_report(glue), width=200))
    for words in (
        "No GLUE average",
        "MRPC is a subset of GLUE's rows",
        "CoLA is not evaluated",
        "RTE lacks the score of a seed",
        "1 of 6 trials failed and have no score",
        "2 of 6 trials gave every example of a dev set the same answer",
        "Started from the finetuned run of another task: RTE from MNLI",
    ):
        assert words in text


def test_the_average_names_its_numbers(tmp_path: Path) -> None:
    glue = evaluation(tmp_path, [made(name, [0.5, 0.7]) for name in EIGHT])
    first = glue_report(glue).verdicts[0]
    assert first.text.startswith(
        "GLUE average 60.0 on the dev sets: mean of nine numbers, each the median of 2"
    )
    assert "MNLI dev_mismatched/accuracy" in first.notes[0]
    assert "WNLI" not in first.notes[0]


# --- side by side


def test_flipped_predictions_and_pooled_accuracy_are_over_the_same_examples(tmp_path: Path) -> None:
    tasks = {"RTE": make_task("RTE", examples=10), "MRPC": make_task("MRPC", examples=30)}
    tasks["STS-B"] = make_task("STS-B", examples=10)
    measured(tmp_path / "a", tasks, lambda name, seed, i: 0, 0, 1)
    measured(tmp_path / "b", tasks, lambda name, seed, i: int(name == "RTE" and seed == 1 and i < 3), 0, 1, 2)
    report = compare_report([tmp_path / "a", tmp_path / "b"])
    (flipped,) = report.sections[1].tables
    cells = {row.label: (row.cells[0].text, row.cells[0].note) for row in flipped.rows}
    assert cells == {
        "RTE": ("15.0 %", "3 of 20, over the seeds of both"),
        "MRPC": ("0.0 %", "0 of 60, over the seeds of both"),
        "all of them": ("3.8 %", "3 of 80, over the seeds of both"),
    }
    # every label is 0: of 40 examples 3 are wrong in one seed of three
    assert report.verdicts[0].notes == [
        "a: 100.00 of 40 examples",
        "b: 97.50 of 40 examples",
        # of the seeds of both, 0 and 1: three of 40 examples are wrong in one of two
        "b - a: -3.75, paired standard error 2.11 (40 examples, mean of 2 seeds)",
    ]
    (scores,) = report.sections[0].tables
    row = next(row for row in scores.rows if row.label == "RTE accuracy")
    assert [cell.text for cell in row.cells] == ["n/a", "55.0 \u00b1 7.1", "60.0 \u00b1 10.0", "+5.0"]
    assert "STS-B Pearson" in [row.label for row in scores.rows]


def test_the_paired_standard_error_by_hand() -> None:
    def right(*examples: int) -> Any:
        return {("dev", i): (float(right), 1.0) for i, right in enumerate(examples)}

    # two seeds, three examples of one task and one of another: gains 1/2, 0, -1 and 1
    one = [{0: right(0, 1, 1), 1: right(0, 0, 1)}, {0: right(0), 1: right(0), 2: right(1)}]
    other = [{0: right(1, 0, 0), 1: right(0, 1, 0), 2: right(1, 1, 1)}, {0: right(1), 1: right(1)}]
    found = paired_difference(one, other)
    assert found is not None
    assert (found.examples, found.seeds) == (4, 2)
    assert found.difference == 0.125  # (0.5 + 0 - 1 + 1) / 4
    squares = 0.375**2 + 0.125**2 + 1.125**2 + 0.875**2
    assert found.standard_error == pytest.approx(math.sqrt(squares / (4 * 3)))
    assert paired_text(found) == "+12.50, paired standard error 42.70 (4 examples, mean of 2 seeds)"
    swapped = paired_difference(other, one)
    assert swapped is not None
    assert (swapped.difference, swapped.standard_error) == (-0.125, found.standard_error)
    alone = paired_difference([{0: right(0)}], [{0: right(1)}])
    assert alone == Paired(1.0, None, 1, 1)
    assert paired_difference([{0: right(0)}], [{1: right(1)}]) is None
    assert paired_difference([], []) is None


def test_what_does_not_compare_is_refused(tmp_path: Path) -> None:
    measured(tmp_path / "a", {"RTE": make_task("RTE")}, lambda *_: 0, 0)
    measured(tmp_path / "b", {"MRPC": make_task("MRPC")}, lambda *_: 0, 0)
    measured(tmp_path / "c", {"RTE": make_task("RTE", dev_share=0.1)}, lambda *_: 0, 0)
    for other, issue in (("b", "no task in common"), ("c", "has other data of RTE")):
        with pytest.raises(ConfigError, match=issue):
            compare_report([tmp_path / "a", tmp_path / other])
    (path,) = (tmp_path / "a").glob("trials/*/predictions.jsonl")
    path.write_text(path.read_text().replace("-1.0", "1.0"))
    with pytest.raises(ConfigError, match="evaluate again"):
        compare_report([tmp_path / "a", tmp_path / "a"])
