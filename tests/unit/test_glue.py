"""An evaluation on GLUE from made trials: scores, medians, the average, the rate, submissions, the report."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from bert_dp import record
from bert_dp.config import Config, ConfigError, peak_lr
from launcher import children, results
from launcher.evaluate import glue, glue_grid, glue_scores
from launcher.evaluate.glue import document, head_of, still_trains, trial_issues
from launcher.evaluate.glue_compare import Evaluation, Paired, compare_report, paired_difference, paired_text
from launcher.evaluate.glue_grid import Task, choose_tasks
from launcher.evaluate.glue_predictions import write_submissions
from launcher.evaluate.glue_report import glue_report
from launcher.evaluate.glue_run import GlueRun
from launcher.output import Output
from launcher.report.model import Line
from launcher.results import Glue, GlueOptions, GlueTask, GlueTrial, RateScore
from launcher.run import trials
from launcher.run.trials import Ending, Outcome, Slot, Stopped, Trial, TrialsFailed
from tests.glue_fixture import (
    MadeRunner,
    evaluation,
    make_grid,
    make_task,
    measured,
    scored_task,
    scores_of,
    write_trial,
)
from tests.helpers import issues_of, read_lines, write_lines
from tests.report_fixture import figure_of, shown, unfolded

EIGHT = ["CoLA", "SST-2", "MRPC", "STS-B", "QQP", "MNLI", "QNLI", "RTE"]


def made_trial(
    out: Path, name: str, scores: dict[str, Any] | None = None, *answers: Any, test: int = 0, **summary: Any
) -> tuple[Task, Trial]:
    """A trial that has ended, with a score of 0.5 in everything where no others are given."""
    task = make_task(name, test=test)
    trial = glue_grid.make_trial(make_grid(GlueOptions(tasks=[name])), out, task, None, 0, None)
    write_trial(trial, task, scores_of(task, 0.5) if scores is None else scores, *answers, **summary)
    return task, trial


def read(task: Task, trial: Trial) -> GlueTrial:
    return glue_scores.read_trial(trial, Outcome("ok", 2.0), task, 4e-5)


# --- one trial


def test_a_trial_has_the_scores_of_its_summary(tmp_path: Path) -> None:
    scores = {"dev_matched/accuracy": 0.5, "dev_mismatched/accuracy": 0.75}
    start = {"checkpoint": "/run/checkpoints/step-00000005", "sha256": "", "tensors": 9, "of": 11}
    trial = read(*made_trial(tmp_path, "MNLI", scores, init_from=start))
    assert (trial.status, trial.one_class, trial.scores) == ("ok", [], scores)
    assert (trial.seconds, trial.seed, trial.lr) == (2.0, 0, 4e-5)
    assert dict(trial.init_from or ()) == start
    other = read(*made_trial(tmp_path, "MNLI", scores, lambda config, split, i: [1.0, float(i)]))
    assert other.predictions_sha256 != trial.predictions_sha256


@pytest.mark.parametrize(
    ("name", "scores", "summary", "kind", "cause"),
    [
        ("MNLI", {}, {}, "not_finite", "dev_mismatched/accuracy"),
        ("MNLI", {"dev_matched/accuracy": 0.5}, {}, "not_finite", "no dev_mismatched/accuracy: a logit"),
        ("MNLI", {}, {"heldout": None}, "not_finite", "dev_mismatched/accuracy"),
        (
            "STS-B",
            {"dev/pearson": math.nan, "dev/spearman": None},
            {},
            "error",
            "no dev/pearson, dev/spearman: not defined",
        ),
    ],
)
def test_a_trial_without_all_its_scores_has_failed(
    tmp_path: Path, name: str, scores: dict[str, Any], summary: dict[str, Any], kind: str, cause: str
) -> None:
    trial = read(*made_trial(tmp_path, name, scores, **summary))
    assert (trial.status, trial.failure_kind, trial.scores) == ("failed", kind, {})
    assert cause in str(trial.cause)


def test_a_trial_whose_predictions_lack_an_example_has_failed(tmp_path: Path) -> None:
    task, trial = made_trial(tmp_path, "RTE")
    path = trial.directory / "predictions.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    assert read(task, trial).status == "failed"
    path.unlink()
    assert read(task, trial).status == "failed"


def test_one_answer_for_every_example_is_flagged(tmp_path: Path) -> None:
    def answers(config: Config, split: str, i: int) -> list[float]:
        return [1.0, 2.0 * (split == "dev_matched" and i == 3)]

    assert read(*made_trial(tmp_path, "MNLI", None, answers)).one_class == ["dev_mismatched"]


def test_a_trial_that_failed_has_no_score(tmp_path: Path) -> None:
    task, trial = made_trial(tmp_path, "RTE", status="failed", cause="loss is NaN")
    failed = glue_scores.read_trial(trial, Outcome("failed", 2.0), task, 4e-5)
    assert (failed.status, failed.cause, failed.scores) == ("failed", "loss is NaN", {})
    lost = {"status": "failed", "cause": "rank 0: no", "failure_kind": "device_memory"}
    task, trial = made_trial(tmp_path, "MRPC", **lost)
    oom = glue_scores.read_trial(trial, Outcome("oom", 2.0), task, 4e-5)
    assert (oom.status, oom.failure_kind, oom.scores) == ("oom", "device_memory", {})


# --- over the seeds


def test_the_median_and_the_deviation_are_over_the_seeds_that_have_a_score() -> None:
    (score,) = scored_task("RTE", [0.5, None, 0.7, 0.55]).scores
    assert score.seeds == [0.5, None, 0.7, 0.55]
    assert score.median == 0.55
    assert score.sd == pytest.approx(statistics.stdev([0.5, 0.7, 0.55]))
    assert score.majority == 0.4
    assert not score.is_whole
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
    whole = glue_scores.task_result(make_task("MRPC"), trials, {}, None)
    assert (whole.median_trial, whole.train_examples) == ("s1", 40)  # of the first metric


def test_the_average_is_the_mean_of_nine_numbers() -> None:
    values = {name: 0.1 * k for k, name in enumerate(EIGHT, 1)}
    tasks = [scored_task(name, [value] * 3) for name, value in values.items()]
    average, why = glue_scores.average([*tasks, scored_task("WNLI", [0.0])])
    assert why == []
    assert average == pytest.approx((sum(values.values()) + values["MNLI"]) / 9)


@pytest.mark.parametrize(
    ("name", "task", "why"),
    [
        ("QQP", scored_task("QQP", [0.5], official=False), "QQP is a subset of GLUE's rows"),
        ("CoLA", scored_task("CoLA", [0.5, None]), "CoLA lacks the score of a seed"),
        ("MNLI", None, "MNLI is not evaluated"),
    ],
)
def test_there_is_no_average_without_all_of_them(name: str, task: GlueTask | None, why: str) -> None:
    whole = {each: scored_task(each, [0.5, 0.5]) for each in EIGHT}
    tasks = [task if each == name else whole[each] for each in EIGHT]
    assert glue_scores.average([each for each in tasks if each]) == (None, [why])


# --- which trials run


def options(*tasks: str, **more: Any) -> GlueOptions:
    return GlueOptions(tasks=list(tasks), **{"seeds": 2, **more})


def glue_run(
    out: Path,
    options: GlueOptions,
    surface: Callable[[str, Config], float | str],
    tasks: Sequence[Task] = (),
    limit: int = 10**6,
    settings: Sequence[str] = (),
) -> tuple[GlueRun, MadeRunner]:
    """The trials of these options, of which none has run; `surface`: (task, configuration) -> score;
    `settings`: those that were given."""
    tasks = tasks or [make_task(name) for name in options.tasks]
    tenths = [make_task(name, dev_share=0.1) for name in options.rate_tasks]
    runner = MadeRunner(out, [*tasks, *tenths], surface, limit)
    return GlueRun(make_grid(options, tasks, tenths, settings), runner, print), runner


def test_every_task_runs_with_every_seed_and_the_results_are_in_order(tmp_path: Path) -> None:
    rte, mrpc = make_task("RTE", examples=4), make_task("MRPC", examples=40)
    measured, runner = glue_run(
        tmp_path, options("MRPC", "RTE"), lambda name, config: 0.5 + config.run.seed / 10, [rte, mrpc]
    )
    measured.run()
    names = sorted(trial.name for trial in runner.ran)
    assert names == [f"{name}-lr-4e-05-s{seed}" for name in ("MRPC", "RTE") for seed in (0, 1)]
    assert glue_grid.rounds(measured.grid) == [[mrpc, rte]]
    assert measured.lr == 4e-5
    (score,) = glue_scores.task_result(rte, measured.trials["RTE"], {}, None).scores
    assert score.seeds == [0.5, 0.6]
    for config in (trial.config for trial in runner.ran):
        assert config.run.init_from == "/run/checkpoints/step-00000005"
        assert (config.checkpoint.keep, config.precision) == (0, "fp32")


def test_one_rate_is_chosen_for_all_on_a_tenth_of_train(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scores = {("MRPC", 1e-4): 0.5, ("CoLA", 1e-4): 0.9, ("MRPC", 3e-4): 0.8, ("CoLA", 3e-4): 0.5}
    measured, runner = glue_run(
        tmp_path,
        options("CoLA", "MRPC", "RTE", rates=[1e-4, 3e-4], rate_tasks=["MRPC", "CoLA"]),
        lambda name, config: 0.1 if name == "RTE" else scores[name, float(config.optim.lr)],
        settings=["run.seed=3"],
    )
    measured.run()
    told = capsys.readouterr().out
    assert "[1/10] rate-" in told
    assert "[10/10] " in told
    assert told.splitlines()[-1].endswith("; left <1 s")
    assert [(rate.lr, rate.scores, rate.mean) for rate in measured.rates] == [
        (1e-4, {"MRPC": 0.5, "CoLA": 0.9}, pytest.approx(0.7)),
        (3e-4, {"MRPC": 0.8, "CoLA": 0.5}, pytest.approx(0.65)),
    ]
    assert measured.lr == 1e-4
    of_rate, others = runner.ran[:4], runner.ran[4:]
    assert {trial.config.optim.lr for trial in others} == {1e-4}
    assert sorted(trial.name for trial in of_rate) == [
        f"rate-{name}-lr-{lr}-s3" for name in ("CoLA", "MRPC") for lr in (0.0001, 0.0003)
    ]
    assert {trial.config.run.seed for trial in others} == {3, 4}
    assert all("-0.1" in str(trial.config.data.path) for trial in of_rate)
    assert all("-0.1" not in str(trial.config.data.path) for trial in others)


def test_the_first_metric_of_a_task_chooses_the_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F1 has the opposite order."""

    def scores(task: Task, value: float) -> dict[str, float]:
        return {"dev/accuracy": value, "dev/f1": 1 - value}

    monkeypatch.setattr("tests.glue_fixture.scores_of", scores)
    rates = options("MRPC", rates=[1e-4, 3e-4], rate_tasks=["MRPC"])
    measured, _ = glue_run(tmp_path, rates, lambda _, config: 0.9 if float(config.optim.lr) == 1e-4 else 0.25)
    measured.run()
    assert (measured.lr, [rate.mean for rate in measured.rates]) == (1e-4, [0.9, 0.25])


@pytest.mark.parametrize(
    ("ranks", "on_gpu", "given", "micro"),
    [(1, False, [], 8), (1, True, [], 16), (2, True, [], 8), (2, False, ["batch.micro_size=4"], 4)],
)
def test_a_trial_takes_the_micro_batch_of_its_device_and_ranks(
    tmp_path: Path, ranks: int, on_gpu: bool, given: list[str], micro: int
) -> None:
    task = make_task("RTE")
    grid = make_grid(options("RTE", ranks=ranks), [task], overrides=given, on_gpu=on_gpu)
    trial = glue_grid.make_trial(grid, tmp_path, task, None, 0, None)
    assert (trial.ranks, trial.config.batch.global_size) == (ranks, 16)
    assert trial.config.batch.micro_size == micro


@pytest.mark.parametrize(
    ("scores", "chosen"),
    [
        ({1e-4: 0.1, 3e-4: "loss is NaN"}, 1e-4),
        ({1e-4: 0.5, 3e-4: 0.5}, 1e-4),
        ({1e-4: "loss is NaN", 3e-4: "loss is NaN"}, None),
    ],
)
def test_a_rate_with_a_failed_trial_is_not_chosen(
    tmp_path: Path, scores: dict[float, float | str], chosen: float | None
) -> None:
    measured, _ = glue_run(
        tmp_path,
        options("RTE", rates=[*scores], rate_tasks=["RTE"]),
        lambda _, config: scores[float(config.optim.lr)],
    )
    with contextlib.nullcontext() if chosen else pytest.raises(TrialsFailed):
        measured.run()
    assert measured.lr == chosen
    assert [rate.mean for rate in measured.rates] == [
        None if isinstance(score, str) else score for score in scores.values()
    ]


def test_a_trial_takes_the_rate_as_it_is_and_goes_to_no_service(tmp_path: Path) -> None:
    asked = ("optim.lr_scaling=sqrt", "optim.lr_batch=64", "log.to=[wandb]", "log.tensorboard=true")
    mnli, tenth = make_task("MNLI"), make_task("MNLI", dev_share=0.1)
    grid = make_grid(options("MNLI", "RTE", init_task={"RTE": "MNLI"}), [mnli], [tenth], asked)
    trials = [glue_grid.make_trial(grid, tmp_path, task, 1e-4, 0, None) for task in (mnli, tenth)]
    assert [trial.name for trial in trials] == ["MNLI-lr-0.0001-s0", "rate-MNLI-lr-0.0001-s0"]
    assert [trial.config.checkpoint.keep for trial in trials] == [1, 0]
    for config in (trial.config for trial in trials):
        assert (peak_lr(config).value, config.log.to, config.log.tensorboard) == (1e-4, (), False)
    given = glue_grid.make_trial(grid, tmp_path, mnli, None, 0, None).config
    assert peak_lr(given).value == pytest.approx(4e-5 * (16 / 64) ** 0.5)


def test_a_rate_needs_the_score_of_every_task() -> None:
    trials = {name: scored_task(name, [value]).trials[0] for name, value in (("RTE", 0.9), ("CoLA", None))}
    rate = glue_scores.rate_score(3e-4, trials, {"RTE": "dev/accuracy", "CoLA": "dev/mcc"})
    assert (rate.scores, rate.mean) == ({"RTE": 0.9, "CoLA": None}, None)


def test_a_task_starts_from_the_finetuned_run_of_the_same_seed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured, runner = glue_run(
        tmp_path,
        options("MNLI", "RTE", init_task={"RTE": "MNLI"}),
        lambda name, config: "loss is NaN" if (name, config.run.seed) == ("MNLI", 1) else 0.5,
    )
    measured.run()
    configs = {trial.name: trial.config for trial in runner.ran}
    assert sorted(configs) == ["MNLI-lr-4e-05-s0", "MNLI-lr-4e-05-s1", "RTE-lr-4e-05-s0"]
    assert configs["RTE-lr-4e-05-s0"].run.init_from == str(tmp_path / "trials" / "MNLI-lr-4e-05-s0")
    assert configs["MNLI-lr-4e-05-s0"].checkpoint.keep == 1
    assert configs["RTE-lr-4e-05-s0"].checkpoint.keep == 0
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[")]
    assert told[-1].startswith("[4/4] "), "what cannot start counts as done"
    assert told[-1].endswith("; left <1 s")
    (failed,) = [trial for trial in measured.trials["RTE"] if trial.seed == 1]
    assert (failed.status, failed.scores) == ("failed", {})
    assert "MNLI-lr-4e-05-s1" in str(failed.cause)


def test_what_was_stopped_goes_on(tmp_path: Path) -> None:
    stopped, first = glue_run(tmp_path, options("MRPC", "RTE"), lambda *_: 0.5, limit=3)
    with pytest.raises(Stopped):
        stopped.run()
    assert sum(len(trials) for trials in stopped.trials.values()) == 3
    whole, second = glue_run(tmp_path, options("MRPC", "RTE"), lambda *_: 0.5)
    whole.run()
    assert (len(first.ran), len(second.ran)) == (3, 1)
    assert {name: len(trials) for name, trials in whole.trials.items()} == {"RTE": 2, "MRPC": 2}


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
    assert any(issue in line for line in issues_of(choose_tasks, MISSING, GlueOptions(**asked)))


def test_data_without_a_task_is_refused() -> None:
    nothing = {name: [f"{name}/train.tsv"] for name in MISSING}
    with pytest.raises(ConfigError, match="holds no task of GLUE"):
        choose_tasks(nothing, GlueOptions())


def test_settings_that_follow_from_the_task_are_refused() -> None:
    (path, rate) = glue_grid.setting_issues(["data.path=/x", "optim.lr=1e-3", "schedule.epochs=1"], [1e-4])
    assert path.startswith("data.path: follows from RUN and the task")
    assert rate == "optim.lr: --rates chooses the rate; give one of them"
    assert glue_grid.setting_issues(["optim.lr=1e-3", "finetune.pooling=mean"], []) == []
    assert len(glue_grid.setting_issues(["optim.lr_scaling=sqrt", "optim.lr_batch=8"], [1e-4])) == 2


@pytest.mark.parametrize("setting", ["checkpoint.keep=2", "log.to=[wandb]", "log.tensorboard=true"])
def test_settings_that_no_trial_has_are_refused(setting: str) -> None:
    name = setting.partition("=")[0]
    (issue,) = glue_grid.setting_issues([setting, "log.every_steps=5"], [])
    assert issue.startswith(f"{name}: has no effect, as an evaluation keeps no checkpoints")


def test_a_test_file_with_labels_has_no_say() -> None:
    labelled = [make_task("MRPC").manifest.splits["dev"]] * 3
    manifest = make_task("MRPC").manifest.model_copy(
        update={"splits": dict(zip(("train", "dev", "test"), labelled, strict=True))}
    )
    assert Task(Path("somewhere"), manifest).dev == ["dev"]


@pytest.mark.parametrize(("code", "error"), [(2, ConfigError), (1, SystemExit), (-9, SystemExit)])
def test_a_helper_that_fails_ends_the_verb_before_it_writes(
    monkeypatch: pytest.MonkeyPatch, code: int, error: type[BaseException]
) -> None:
    monkeypatch.setattr(children, "capture_json", lambda *_: (code, None))
    with pytest.raises(error) as raised:
        glue.majorities({"RTE": make_task("RTE")})
    assert code == 2 or "the majority baselines failed with exit code" in str(raised.value)


def test_the_seeds_end_before_the_largest_that_there_is() -> None:
    for first, room in ((2**63 - 2, True), (2**63 - 1, False)):
        issues = trial_issues(make_grid(options("RTE"), overrides=[f"run.seed={first}"]))
        assert issues == ([] if room else [f"run.seed: {first} leaves no room for 2 seeds; use less"])


def test_a_native_head_is_named_by_its_class() -> None:
    native = ["finetune.head=native", "model.position=rope", "model.norm=layernorm"]
    assert head_of(make_grid(options("RTE"), overrides=native)) == "native (ModernBERT)"


# --- files for GLUE's server


def submitted(out: Path, task: Task, trial: Trial) -> tuple[dict[str, list[str]], str | None]:
    """File -> its lines below the head, and why there is none."""
    files, why = write_submissions(out, trial.directory, task.manifest)
    lines = {name: (out / name).read_text().splitlines() for name in files}
    assert {head for head, *_ in lines.values()} <= {"index\tprediction"}
    return {name: rest for name, (_, *rest) in lines.items()}, why


def test_a_submission_has_names_of_labels_in_order(tmp_path: Path) -> None:
    def answers(config: Config, split: str, i: int) -> list[float]:
        return [float(split == "test_matched"), i - 0.5]

    assert submitted(tmp_path, *made_trial(tmp_path, "MNLI", None, answers, test=3)) == (
        {
            "submission/MNLI-m.tsv": ["0\tentailment", "1\tentailment", "2\tnot_entailment"],
            "submission/MNLI-mm.tsv": ["0\tentailment", "1\tnot_entailment", "2\tnot_entailment"],
        },
        None,
    )


def test_a_submission_is_in_the_order_of_the_test_file_whatever_that_of_the_predictions(
    tmp_path: Path,
) -> None:
    task, trial = made_trial(tmp_path, "STS-B", None, lambda *of: [of[2] / 4], test=4)
    path = trial.directory / "predictions.jsonl"
    write_lines(path, read_lines(path)[::-1])
    lines = ["0\t0.000", "1\t0.250", "2\t0.500", "3\t0.750"]
    assert submitted(tmp_path, task, trial) == ({"submission/STS-B.tsv": lines}, None)


def test_similarities_are_clipped_in_the_submission_alone(tmp_path: Path) -> None:
    task, trial = made_trial(tmp_path, "STS-B", None, lambda *of: [[-0.25, 2.5, 7.0, 1.0][of[2]]], test=3)
    before = (trial.directory / "predictions.jsonl").read_bytes()
    lines = ["0\t0.000", "1\t2.500", "2\t5.000"]
    assert submitted(tmp_path, task, trial) == ({"submission/STS-B.tsv": lines}, None)
    assert (trial.directory / "predictions.jsonl").read_bytes() == before


def test_without_a_test_file_or_a_finite_answer_there_is_no_submission(tmp_path: Path) -> None:
    assert submitted(tmp_path, *made_trial(tmp_path, "RTE")) == ({}, "no test file in --data")
    task, trial = made_trial(tmp_path, "RTE", test=3)
    path = trial.directory / "predictions.jsonl"
    lines = read_lines(path)
    lines[-1]["logits"] = [None, 0.0]
    write_lines(path, lines)
    files, why = submitted(tmp_path, task, trial)
    assert files == {}
    assert "not finite" in str(why)
    assert not (tmp_path / "submission").exists()


# --- the table


def test_the_table_has_what_a_number_must_not_be_read_without(tmp_path: Path) -> None:
    constant = scored_task("MRPC", [0.68, 0.68], official=False)
    flagged = [trial.model_copy(update={"one_class": ["dev"]}) for trial in constant.trials]
    tasks = [
        constant.model_copy(update={"trials": flagged}),
        scored_task("MNLI", [0.5, 0.7]),
        scored_task("RTE", [0.25, None]).model_copy(update={"init_task": "MNLI"}),
    ]
    tasks[1].trials[0].one_class.append("dev_mismatched")
    tasks[2].trials[0].one_class.append("dev")
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
    assert rows["MNLI mismatched accuracy"][-2] == "one answer in 1 of 2"
    assert rows["MRPC F1"][-2] == "subset, one answer in 2 of 2"
    assert {row.cells[5].note for row in table.rows} == {"of 4"}  # examples of dev, of train there are 40
    assert rows["RTE accuracy (from MNLI)"] == [
        "25.0",
        "n/a",
        "40.0",
        "4",
        "25.0 %",
        "1",
        "1 of 2 failed, one answer in 1 of 2",
        "25.0, n/a",
    ]
    text = unfolded(shown(glue_report(glue), width=200))
    for words in (
        "No GLUE average",
        "MRPC is a subset of GLUE's rows",
        "CoLA is not evaluated",
        "RTE lacks the score of a seed",
        "1 of 6 trials failed and have no score",
        "4 of 6 trials gave every example of a dev set the same answer",
        "Started from the finetuned run of another task: RTE from MNLI",
    ):
        assert words in text


def test_the_page_counts_tasks_trials_and_rates(tmp_path: Path) -> None:
    tasks = [scored_task("RTE", [0.5, None]), scored_task("CoLA", [0.5, 0.7])]
    tasks[0] = tasks[0].model_copy(update={"submissions": ["submission/RTE.tsv"]})
    tasks[1] = tasks[1].model_copy(update={"no_submission": "no test file in --data"})
    rates = [
        RateScore(lr=1e-4, scores={"RTE": 0.5}, mean=0.5, trials=scored_task("RTE", [0.5]).trials),
        RateScore(lr=3e-4, scores={"RTE": None, "CoLA": 0.25}, mean=None),
    ]
    left_out = {
        "QQP": "not among --tasks",
        "MNLI": "no MNLI/train.tsv in --data",
        "WNLI": "not among --tasks",
    }
    glue = evaluation(tmp_path, tasks).model_copy(
        update={"rates": rates, "lr": 1e-4, "left_out": left_out, "heldout_loss": 2.5}
    )
    report = glue_report(glue)
    tiles = {tile.label: (tile.text, tile.note) for tile in report.tiles}
    assert tiles["Tasks"] == ("2", "3 left out")
    assert tiles["Trials with scores"] == ("3", "of 4")
    assert tiles["Learning rate"] == (
        "1.00e-04",
        "chosen among 2 on a tenth of train; the same for every task",
    )
    parts = {section.title: section for section in report.sections}
    (found,) = parts["Rates"].tables
    assert [column.head for column in found.columns] == ["RTE", "CoLA", "mean"]
    assert [[cell.text for cell in row.cells] for row in found.rows] == [
        ["50.0", "n/a", "50.0"],
        ["n/a", "25.0", "n/a"],
    ]
    assert len(parts["All trials"].tables[0].rows) == 5
    files = {row.label: row.cells[0].text for row in parts["Submission files"].tables[0].rows}
    assert files == {"RTE": "submission/RTE.tsv", "CoLA": "no test file in --data"}
    text = unfolded(shown(report, width=120))
    assert "QQP, WNLI not among --tasks" in text
    assert "MNLI no MNLI/train.tsv in --data" in text
    settings = {row.label: row.cells[0].text for row in parts["Settings"].tables[0].rows}
    assert (settings["its held-out loss"], settings["its step"]) == ("2.5000 nats", "5")
    plain = glue_report(glue.model_copy(update={"rates": []}))
    assert "the configuration's; the same" in next(t for t in plain.tiles if t.label == "Learning rate").note


def test_a_trial_without_memory_counts_as_failed_and_the_time_is_of_several_at_once(tmp_path: Path) -> None:
    task = scored_task("RTE", [0.5, None])
    task.trials[1] = task.trials[1].model_copy(update={"status": "oom", "cause": "rank 0: no memory"})
    glue = evaluation(tmp_path, [task], ranks=4)
    report = glue_report(glue)
    (failed,) = [verdict for verdict in report.verdicts if verdict.level == "fail"]
    assert failed.text.startswith("1 of 2 trials failed and have no score")
    assert failed.notes == ["RTE-s1: oom: rank 0: no memory"]
    tiles = {tile.label: (tile.text, tile.note) for tile in report.tiles}
    assert tiles["Time"] == ("1 min 00 s" if glue.seconds >= 119.95 else "60.0 s", "2 trials at a time")
    parts = {section.title: section for section in report.sections}
    settings = {row.label: row.cells[0].text for row in parts["Settings"].tables[0].rows}
    assert (settings["ranks of a trial"], settings["trials at a time"], settings["seeds"]) == ("4", "2", "2")


class Published:
    """glue.json of trials that end at once; how many slots were asked for."""

    def __init__(self, out: Path, monkeypatch: pytest.MonkeyPatch):
        self.out, self.asked = out, dict[str, Any]()
        monkeypatch.setattr(trials, "device_slots", self.slots)
        self.patch = monkeypatch

    def slots(self, ranks: int, **asked: Any) -> list[Slot]:
        self.asked = {"ranks": ranks, **asked}
        return [Slot(), Slot()]

    def run(self, asked: GlueOptions, surface: Callable[[str, Config], float | str]) -> tuple[Glue, int]:
        tasks = [make_task(name) for name in asked.tasks]
        tenths = [make_task(name, dev_share=0.1) for name in asked.rate_tasks]
        runner = MadeRunner(self.out, [*tasks, *tenths], surface)
        self.patch.setattr(trials, "runner", lambda *_, **__: contextlib.nullcontext(runner))
        grid = make_grid(asked, tasks, tenths)
        settings = results.plain(asked)
        plan = results.GluePlanFile(config_hash="abc", settings=settings, start={}, seconds=30.0)
        output = Output(self.out, "evaluation", glue.STATE, plan, glue.FIXED, glue.GROWS)
        majority = {task.name: {"dev": {"accuracy": 0.4}} for task in tasks}
        return glue.run_locked(grid, output, majority, print)


def test_an_evaluation_is_told_as_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Published(tmp_path, monkeypatch)
    asked = options("MNLI", "RTE", ranks=2, init_task={"RTE": "MNLI"}, rates=[1e-4] * 3, rate_tasks=["RTE"])
    file, code = made.run(asked, lambda name, config: 0.5)
    assert (file.status, code, file.lr, file.at_a_time) == ("complete", 0, 1e-4, 2)
    assert (made.asked["ranks"], made.asked["gpus"], made.asked["most"]) == (2, 0, 4)
    assert [(task.task, task.init_task) for task in file.tasks] == [("MNLI", None), ("RTE", "MNLI")]
    assert file.tasks[1].no_submission == "no test file in --data"
    assert file.tasks[1].scores[0].majority == 0.4
    assert file.seconds > 30.0, "of all calls"
    assert results.plain(results.read(tmp_path / "glue.json", Glue)) == results.plain(file)
    assert results.read(tmp_path / glue.STATE, results.GluePlanFile).seconds == file.seconds


def test_an_evaluation_of_which_every_trial_failed_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Published(tmp_path, monkeypatch)
    file, code = made.run(options("RTE"), lambda name, config: "loss is NaN")
    assert (file.status, code) == ("failed", 1)
    assert str(file.why).startswith("every trial failed")
    assert (file.tasks[0].no_submission, file.average) == ("no trial has scores", None)


def test_the_average_names_its_numbers(tmp_path: Path) -> None:
    glue = evaluation(tmp_path, [scored_task(name, [0.5, 0.7]) for name in EIGHT])
    first = glue_report(glue).verdicts[0]
    assert first.text.startswith(
        "GLUE average 60.0 on the dev sets: mean of nine numbers, each the median of 2"
    )
    assert "MNLI dev_mismatched/accuracy" in first.notes[0]
    assert "WNLI" not in first.notes[0]
    grid = make_grid(GlueOptions(seeds=2))
    stopped = document(
        GlueRun(grid, MadeRunner(tmp_path, [], lambda *_: 0.5), print), glue.tasks, Ending("partial"), {}
    )
    assert (stopped.status, stopped.average) == ("partial", None)


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
    scores, seeds = report.sections[0].tables
    row = next(row for row in seeds.rows if row.label == "RTE accuracy")
    assert [cell.text for cell in row.cells] == ["20.0 %", "1", "50.0, 60.0", "50.0, 60.0, 70.0"]
    row = next(row for row in scores.rows if row.label == "RTE accuracy")
    assert [cell.text for cell in row.cells] == ["n/a", "55.0 (sd 7.1)", "60.0 (sd 10.0)", "+5.0"]
    assert "STS-B Pearson" in [row.label for row in scores.rows]


def test_a_comparison_says_what_a_number_must_not_be_read_without(tmp_path: Path) -> None:
    measured(tmp_path / "a", {"RTE": make_task("RTE", examples=10)}, lambda name, seed, i: i % 2, 0, 1)
    measured(tmp_path / "b", {"RTE": make_task("RTE", examples=10)}, lambda name, seed, i: 0, 0, 1)
    path = tmp_path / "b" / "glue.json"
    glue = results.read(path, Glue)
    glue.tasks[0] = glue.tasks[0].model_copy(update={"init_task": "MNLI", "official": False})
    results.write(path, glue)
    seeds = compare_report([tmp_path / "a", tmp_path / "b"]).sections[0].tables[1]
    (row,) = seeds.rows
    assert row.label == "RTE accuracy"
    assert [cell.note for cell in row.cells[2:]] == ["", "from MNLI, subset, one answer in 2 of 2"]


def test_a_run_that_still_trains_is_known_by_its_lock(tmp_path: Path) -> None:
    """It may remove the checkpoint that an evaluation begins with."""
    checkpoint = tmp_path / "checkpoints" / "step-00000003"
    assert not still_trains(checkpoint)
    held = record.lock(tmp_path / ".lock")
    assert held is not None
    assert still_trains(checkpoint)
    held.close()
    assert not still_trains(checkpoint)
    assert record.lock(tmp_path / ".lock") is not None, "and the question leaves no lock"


def test_labelled_test_examples_are_no_dev_examples(tmp_path: Path) -> None:
    """MRPC's test file has a column of labels."""
    measured(tmp_path / "a", {"MRPC": make_task("MRPC", examples=10)}, lambda *_: 0, 0)
    (trial,) = (tmp_path / "a" / "trials").iterdir()
    path = trial / "predictions.jsonl"
    line = read_lines(path)[0] | {"split": "test", "index": 0}
    path.write_text(path.read_text() + json.dumps(line) + "\n")
    glue = results.read(tmp_path / "a" / "glue.json", Glue)
    glue.tasks[0].trials[0] = (
        glue.tasks[0]
        .trials[0]
        .model_copy(update={"predictions_sha256": hashlib.sha256(path.read_bytes()).hexdigest()})
    )
    answers = Evaluation(tmp_path / "a", glue).answers("MRPC")[0]
    assert len(answers) == 10
    assert {split for split, _ in answers} == {"dev"}


def test_scores_are_drawn_over_the_loss_of_their_pretraining(tmp_path: Path) -> None:
    tasks = {"RTE": make_task("RTE", examples=10)}

    def evaluate(name: str, loss: float | None, score: float) -> Path:
        folder = measured(tmp_path / name, tasks, lambda *_: 0, 0, score=lambda *_: score)
        glue = results.read(folder / "glue.json", Glue).model_copy(update={"heldout_loss": loss})
        results.write(folder / "glue.json", glue)
        return folder

    late, random, early = (
        evaluate("late", 3.2, 0.7),
        evaluate("random", None, 0.5),
        evaluate("early", 4.5, 0.6),
    )
    (line,) = figure_of(compare_report([early, random, late]), "Dev score against held-out loss").traces
    assert isinstance(line, Line)
    assert (line.label, line.x, line.y) == ("RTE accuracy", [3.2, 4.5], [0.7, 0.6])
    for others in ([random], [evaluate("as late", 3.2, 0.6)]):
        report = compare_report([late, *others])
        assert figure_of(report, "Dev score against held-out loss").is_empty


def test_three_evaluations_of_one_name_share_a_task_without_failed_trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = {"RTE": make_task("RTE"), "MRPC": make_task("MRPC")}
    folders = [
        measured(tmp_path / name / "glue", {task: both[task] for task in tasks}, lambda *_: 0, 0, 1)
        for name, tasks in (("a", both), ("b", both), ("c", ["RTE"]))
    ]
    glue = results.read(folders[0] / "glue.json", Glue)
    for task in glue.tasks:
        failed = {"status": "failed", "scores": {}, "predictions_sha256": None}
        task.trials[1] = task.trials[1].model_copy(update=failed)
        task.scores[0] = task.scores[0].model_copy(update={"majority": 0.25})
    results.write(folders[0] / "glue.json", glue)
    monkeypatch.chdir(folders[0])
    report = compare_report([Path(), *folders[1:]])
    table, _ = report.sections[0].tables
    assert [row.label for row in table.rows] == ["RTE accuracy"]
    assert [column.head for column in table.columns[:3]] == ["majority", ".", str(folders[1])]
    assert table.rows[0].cells[0].text == "25.0"
    assert report.verdicts[0].notes[0] == ".: 100.00 of 4 examples"
    assert report.verdicts[0].notes[3].endswith("(4 examples, mean of 1 seed)")
    other = tmp_path / "other"
    folders[1].rename(other)
    named = compare_report([Path(), other]).sections[0].tables[0].columns
    assert [column.head for column in named] == ["majority", "glue", "other", "other - glue"]


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


def test_the_loss_of_a_start_is_that_of_its_own_step(tmp_path: Path) -> None:
    write_lines(tmp_path / "evals.jsonl", [{"step": 250, "loss": 5.25}, {"step": 500, "loss": 4.5}])
    grid = make_grid(GlueOptions(tasks=["RTE"]))
    for step, init, loss in ((250, "checkpoint", 5.25), (750, "checkpoint", None), (250, "random", None)):
        path = tmp_path / "checkpoints" / f"step-{step:08}"
        start = dataclasses.replace(grid.start, checkpoint=path, step=step)
        options = grid.options.model_copy(update={"init": init})
        assert dataclasses.replace(grid, start=start, options=options).heldout_loss == loss


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
    path.unlink()
    with pytest.raises(ConfigError, match="evaluate again"):
        compare_report([tmp_path / "a", tmp_path / "a"])
