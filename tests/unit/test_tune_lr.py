"""Tests of the learning rate search on synthetic loss surfaces: results, configurations and refusals."""

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
from rich.console import Console

from bert_dp import files
from bert_dp.config import BatchConfig, Config, batch_at, batch_layout, dump_config, load_config, peak_lr
from launcher import job, results
from launcher.job import VerbOptions
from launcher.machine import environment
from launcher.plan.dry_run import speed_here
from launcher.run import trials
from launcher.run.trials import Slot, Trial, TrialOutcome
from launcher.tune import lr, search_output
from launcher.tune.lr_search import LrOptions, TuneLr
from launcher.tune.tune_page import lr_page
from tests.e2e.cli import TINY
from tests.glue_fixture import WritingRunner
from tests.helpers import failed, raised_issues, read_json
from tests.report_fixture import shown
from tests.shards import edited_manifest, write_shards

STEPS, STEP = 1600, 128  # steps of the configured run; tokens per step
WHOLE = STEPS * STEP
EDGE = 0.064
TOKENS_PER_S = 1e4
Surface = Callable[[Config], float | str]
Run = Callable[..., "Searched"]


@pytest.fixture(autouse=True, scope="module")
def prepared_data() -> Iterator[None]:
    """Use the given shards, so that no process is started to prepare data."""
    with mock.patch("launcher.job.prepare_data", lambda config: Path(config.data.path)):
        yield


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("shards") / "s")


def make(shards: Path, *overrides: str, budget: str = f"steps={STEPS}") -> Config:
    items = [item for item in TINY if not item.startswith("schedule")]
    return load_config(None, [*items, f"data.path={shards}", f"schedule.{budget}", *overrides])


class MadeRunner(WritingRunner):
    """A runner whose trials end with the loss or the failure that `surface` returns."""

    surface: Surface

    def write(self, trial: Trial) -> None:
        directory, config = trial.directory, trial.config
        directory.mkdir(parents=True, exist_ok=True)
        files.write_text(directory / "config.yaml", dump_config(config))
        count = config.schedule.steps or 0
        tokens = config.schedule.tokens or count * STEP
        if is_range_test(config):
            for k in range(count):
                rate = 1e-4 ** (1 - k / count)
                loss = 6 - 20 * rate if rate < EDGE else 9.0
                line = {"step": k + 1, "lr": rate, "loss": loss, "skipped_steps": 0}
                files.append_line(directory / "metrics.jsonl", line)
        loss = self.surface(config)
        time_s = {"setup": 1.0, "compile": 1.0, "train": tokens / TOKENS_PER_S, "eval": 0.5}
        facts: dict[str, Any] = {"status": "done", "heldout_loss": loss, "tokens": tokens}
        facts |= {"tokens_per_s": TOKENS_PER_S, "time_s": time_s}
        if isinstance(loss, str):
            kind = "host_memory" if loss == "oom" else "not_finite" if "not finite" in loss else "error"
            facts |= {"heldout_loss": None, **failed(loss, kind)}
        files.write_json(directory / "summary.json", facts)


def is_range_test(config: Config) -> bool:
    return config.schedule.name == "exponential"


def valley(config: Config) -> float:
    """Return a loss with its minimum at 0.004, or higher for shorter runs. A seed shifts all losses alike."""
    if is_range_test(config):
        return 5.0
    shorter = math.log2(WHOLE / (config.schedule.tokens or 0))
    away = math.log2(float(config.optim.lr) / 0.004) - 0.25 * shorter
    return 2.5 + 0.05 * shorter + 0.1 * away**2 + 0.01 * config.run.seed


class Searched(NamedTuple):
    exit_code: int
    tune: TuneLr
    ran: list[str]
    out: Path


def search(
    config: Config,
    out: Path,
    surface: Surface = valley,
    settings: LrOptions = LrOptions(),  # noqa: B008
    limit: float = math.inf,
) -> Searched:
    out.mkdir(exist_ok=True)
    made = MadeRunner(out, limit)
    made.surface = surface
    output = search_output(out, config, results.plain(settings))
    slots = [Slot(cores=(k,)) for k in range(2)]
    with (
        mock.patch.object(trials, "runner", return_value=contextlib.nullcontext(made)),
        mock.patch.object(trials, "device_slots", return_value=slots),
    ):
        tune, code = lr.measure(job.Job("tiny", config, probe()), settings, 1, output, print)
    assert results.plain(tune) == read_json(out / "tune.json")
    assert shown(lr_page(tune, out), 200)
    return Searched(code, tune, [trial.name for trial in made.ran], out)


probe = functools.cache(environment.probe)


@pytest.fixture
def run(shards: Path, tmp_path: Path) -> Run:
    return functools.partial(search, make(shards), tmp_path)


@pytest.fixture(scope="module")
def whole(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Searched:
    """Return a complete search of the valley with a sufficient budget."""
    out = tmp_path_factory.mktemp("whole") / "out"
    return search(make(shards), out, settings=LrOptions(budget_s=1e6))


def test_a_rate_is_found_at_less_than_half_the_cost_of_a_grid(whole: Searched, shards: Path) -> None:
    tune, chosen = whole.tune, whole.tune.choice.lr
    assert (whole.exit_code, tune.status) == (0, "complete")
    assert tune.range_test.edge == pytest.approx(EDGE, rel=0.6)
    rates = whole.tune.rungs[0].rates
    assert [b / a for a, b in itertools.pairwise(rates)] == pytest.approx([2] * (len(rates) - 1))
    assert [rung.tokens for rung in tune.rungs] == [WHOLE // 8, WHOLE]
    assert whole.tune.rungs[0].ranked()[:2] == [t.lr for t in whole.tune.rungs[-1].trials][:2]
    trained = {(t.lr, t.seed) for t in whole.tune.rungs[-1].trials}
    assert trained == {(chosen, 0), (chosen, 1), (chosen, 2), (chosen / 2, 0), (2 * chosen, 0)}
    assert abs(math.log2(chosen / 0.004)) <= 0.5  # the nearest rate of the ladder
    assert chosen == min(rates, key=lambda rate: abs(math.log2(rate / 0.004)))
    assert (whole.tune.choice.tied, whole.tune.choice.edge_side) == ([], None)
    trained = sum(t.tokens for t in tune.trials)
    assert trained + 100 * STEP < 0.4 * 5 * 3 * WHOLE
    assert len(whole.ran) == 11
    assert load_config(whole.out / "tuned.yaml") == make(shards, f"optim.lr={chosen!r}")


def test_diverged_and_failed_rates_are_excluded_and_reported(run: Run) -> None:
    def surface(config: Config) -> float | str:
        rate = float(config.optim.lr)
        if not is_range_test(config) and rate > 0.008:
            return "5 steps in a row up to step 9 were skipped because the gradient was not finite"
        return "RuntimeError: broken" if rate < 0.0015 else valley(config)

    result = run(surface)
    assert result.exit_code == 0
    assert {t.status for t in result.tune.rungs[0].trials if t.lr > 0.008} == {"diverged"}
    assert {t.status for t in result.tune.rungs[0].trials if t.lr < 0.0015} <= {"failed"}
    assert {t.reason for t in result.tune.rungs[0].trials if t.status == "failed"} <= {"RuntimeError: broken"}
    assert 0.0015 <= result.tune.choice.lr <= 0.008


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ("range test", "range-test: oom: oom"),
        ("short", "in the first rung, every rate has a failed or diverged run"),
        ("whole", "in the last rung, every rate has a failed or diverged run"),
    ],
)
def test_a_search_without_successful_trials_fails(run: Run, part: str, reason: str) -> None:
    def surface(config: Config) -> float | str:
        kind = "whole" if config.schedule.tokens == WHOLE else "short"
        return "oom" if part == ("range test" if is_range_test(config) else kind) else valley(config)

    result = run(surface)
    assert (result.exit_code, result.tune.status, result.tune.reason) == (1, "failed", reason)
    assert result.tune.choice is None
    assert not (result.out / "tuned.yaml").exists()


def test_a_stopped_search_resumes(whole: Searched, run: Run) -> None:
    first, second = run(limit=7), run()
    assert (first.exit_code, first.tune.status, first.tune.choice) == (130, "partial", None)
    assert (second.exit_code, second.tune.status) == (0, "complete")
    assert not set(first.ran) & set(second.ran)
    assert len(first.ran) + len(second.ran) == 11
    assert second.tune.seconds == whole.tune.seconds
    assert (second.tune.choice, second.tune.rungs) == (whole.tune.choice, whole.tune.rungs)
    assert run().ran == []


def test_hours_become_tokens_at_the_measured_speed_once(shards: Path, tmp_path: Path) -> None:
    config = make(shards, budget="hours=0.01")
    assert lr.full_tokens(config) is None
    for count in (11, 0):  # trials of the first and of the second call
        result = search(config, tmp_path)
        assert result.tune.tokens == round(0.01 * 3600 * TOKENS_PER_S / STEP) * STEP
        assert len(result.ran) == count


@pytest.mark.parametrize("unit", ["dollars", "kwh"])
def test_dollars_and_kwh_need_the_tokens_of_a_whole_run(shards: Path, unit: str) -> None:
    config = make(shards, budget=f"{unit}=0.01")
    (issue,) = lr.length_issues(config, LrOptions())
    assert (issue.setting, issue.kind, issue.other) == ("--tokens", "missing", f"schedule.{unit}")
    assert lr.length_issues(config, LrOptions(tokens=10**6)) == []
    assert lr.trial_config(config, shards, 1e-3, 10**6, 0).schedule.unit == "tokens"


def test_epochs_count_the_sequences_of_the_training_set(shards: Path, tmp_path: Path) -> None:
    tune = search(make(shards, budget="epochs=20"), tmp_path).tune
    samples, length = 20 * 96, 16  # of the training set
    assert tune.tokens == tune.rungs[1].tokens == samples * length


def verb(shards: Path, out: Path, options: LrOptions, *overrides: str, dry_run: bool) -> int:
    settings = [*TINY, f"data.path={shards}", "run.device=cpu", "schedule.steps=80", *overrides]
    return lr.tune_lr("quickstart", settings, options, VerbOptions(out, dry_run, True, Console()))


@pytest.mark.parametrize(
    ("budget", "options", "gpus", "expected"),
    [
        ("hours=0.5", LrOptions(), 0, "as long as 4.4 runs of 0.5 hours, 2 h 11 min"),
        ("steps=80", LrOptions(), 0, "then 12 trials, 2 at a time: as long as 4.4 runs of 10.2 k tokens; "),
        ("epochs=2", LrOptions(rates=3, seeds=1), 0, "6 trials, 2 at a time: as long as 2.2 runs of 2 ep"),
        ("steps=80", LrOptions(budget_s=600), 0, "limited to 10 min 00 s in total"),
        ("tokens=1e9", LrOptions(), 1, "as long as 7.6 runs of 1 G tokens, "),
    ],
)
def test_a_dry_run_shows_how_long_the_search_takes(shards: Path, budget, options, gpus, expected) -> None:
    cards = tuple(environment.Gpu(k, "NVIDIA H100 80GB HBM3", 79.0, None) for k in range(gpus))
    here = dataclasses.replace(environment.probe(), gpus=cards, affinity_cores=2, cpu_quota_cores=None)
    text = lr.length_text(job.Job("q", make(shards, budget=budget), here), options, 1, speed_here)
    assert expected in text
    assert ("(" in text) == bool(gpus), "an estimate for a GPU has an interval"


def test_a_budget_shortens_the_runs(whole: Searched, run: Run) -> None:
    assert whole.tune.tokens == WHOLE
    result = run(settings=LrOptions(budget_s=60))
    tokens, at_a_time = result.tune.tokens or 0, result.tune.at_a_time or 0
    assert result.exit_code == 0
    assert STEP * 8 < tokens < WHOLE
    assert tokens % STEP == 0
    # a trial of the runner takes 2 s for set-up, 0.5 s for evaluation and 1 s per 1e4 tokens
    batches = [(5, tokens / 8, 2.5), (7, tokens, 2.5)]
    seconds = sum(math.ceil(n / at_a_time) * (fixed + each / TOKENS_PER_S) for n, each, fixed in batches)
    used = 2 + 100 * STEP / TOKENS_PER_S + 0.5
    step_s = sum(math.ceil(n / at_a_time) for n, *_ in batches) * STEP / TOKENS_PER_S
    assert seconds + used == pytest.approx(60, abs=step_s)


@pytest.mark.parametrize(
    ("steps", "fraction", "quantum"), [(1, 0.5, 2), (7, 0.3, 1), (1000, 1.0, 3), (37, 0.9, 8)]
)
def test_the_tokens_of_a_ramp_are_counted(shards: Path, steps: int, fraction: float, quantum: int) -> None:
    config = make(shards, f"schedule.steps={steps}")
    batch = BatchConfig(global_size=24, micro_size=1, ramp_fraction=fraction, ramp_quantum=quantum)
    sizes = [batch_at(batch, step / steps) for step in range(steps)]
    ramp = config.model_copy(update={"batch": batch})
    assert lr.full_tokens(ramp) == sum(sizes) * config.data.sequence_length


def test_a_trial_is_a_complete_run_of_its_length(shards: Path) -> None:
    scaled = "optim.name=lamb optim.weight_decay=0.1 optim.lr_scaling=sqrt optim.lr_batch=2"
    config = make(shards, *scaled.split(), "checkpoint.every_steps=5", "parallel.engine=ddp")
    trial = lr.trial_config(config, Path("/shards"), 0.003, 40 * STEP, 7)
    assert (trial.schedule.name, trial.schedule.tokens) == (config.schedule.name, 40 * STEP)
    assert peak_lr(trial).value == 0.003
    assert (trial.optim.name, trial.optim.weight_decay, trial.run.seed) == ("lamb", 0.1, 7)
    assert (trial.data.path, trial.data.sources) == ("/shards", None)
    assert (trial.checkpoint.keep, trial.eval.every_steps) == (0, 0)
    assert (trial.batch, trial.model, trial.parallel) == (config.batch, config.model, config.parallel)
    assert batch_layout(trial, 1).global_size == config.batch.global_size
    ramp = make(shards, "batch.ramp_fraction=0.5", "batch.ramp_quantum=2")
    part = (lr.full_tokens(ramp) or 0) // 4
    quarter = lr.trial_config(ramp, Path("/shards"), 0.003, part, 7).schedule
    assert (quarter.steps, quarter.tokens) == ((ramp.schedule.steps or 0) // 4, None), "part of the ramp"
    assert Config.model_validate_json(trial.model_dump_json()) == trial


def test_a_range_test_uses_the_full_batch_from_the_start(shards: Path) -> None:
    config = make(shards, "batch.ramp_fraction=0.5", "batch.ramp_quantum=2")
    test = lr.range_config(config, shards, 60)
    assert (test.schedule.name, test.schedule.steps, test.schedule.tokens) == ("exponential", 60, None)
    assert (test.batch.ramp_fraction, test.log.every_steps, test.optim.lr) == (0, 1, 1.0)
    assert lr.range_steps(config, None) == 100
    assert lr.range_steps(config, 10**9) == 100
    assert lr.range_steps(config, 800 * STEP) == 50
    assert lr.range_steps(config, 8 * STEP) == lr.MIN_RANGE_STEPS


def test_a_tuned_configuration_has_the_rate_at_its_own_batch(shards: Path) -> None:
    config = make(shards, "optim.lr_scaling=sqrt", "optim.lr_batch=2")
    tuned = lr.tuned_config(config, 0.003)
    assert peak_lr(tuned).value == 0.003
    assert (tuned.optim.lr_scaling, tuned.optim.lr_batch) == ("sqrt", config.batch.global_size)
    automatic = make(shards, "optim.name=lamb", "optim.lr=auto")
    assert peak_lr(lr.tuned_config(automatic, 0.003)).value == 0.003


@pytest.mark.parametrize(
    ("visible", "ranks", "gpus", "cores", "most", "slots"),
    [
        (None, 2, 5, 64, 9, [Slot(gpus=("0", "1")), Slot(gpus=("2", "3"))]),
        ("3,GPU-ab, 1", 1, 3, 64, 9, [Slot(gpus=(name,)) for name in ("3", "GPU-ab", "1")]),
        (None, 1, 0, 8, 3, [Slot((0, 1)), Slot((2, 3)), Slot((4, 5))]),  # more cores than trials
        (None, 2, 0, 4, 9, [Slot((0, 1, 2, 3)), Slot((4, 5, 6, 7))]),
        (None, 16, 0, 8, 9, [Slot(tuple(range(8)))]),
    ],
)
def test_each_trial_has_its_own_devices(
    monkeypatch: pytest.MonkeyPatch, visible, ranks, gpus, cores, most, slots
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    assert trials.device_slots(ranks, gpus=gpus, cores=cores, most=most) == slots


@pytest.mark.parametrize(
    ("facts", "ended", "status"),
    [
        (failed("no words", "not_finite"), "failed", "diverged"),
        (failed("a gradient that is not finite"), "failed", "failed"),
        (failed("no words", "no_cause"), "failed", "failed"),
        ({"status": "done"}, "ok", "diverged"),  # without a finite held-out loss
        ({"status": "done", "heldout_loss": 4.5}, "ok", "ok"),
    ],
)
def test_divergence_follows_from_the_kind_of_failure(
    shards: Path, tmp_path: Path, facts: dict[str, Any], ended: Any, status: str
) -> None:
    files.write_json(tmp_path / "summary.json", {"step": 3, **facts})
    result = lr.read_trial(Trial(tmp_path, make(shards), 1), TrialOutcome(ended, 1.5))
    assert result.status == status
    assert result.reason == facts.get("failure", {}).get("message", None if status == "ok" else result.reason)
    assert (result.seconds, result.tokens, result.heldout_loss) == (1.5, 3 * STEP, facts.get("heldout_loss"))


@pytest.mark.parametrize(
    ("options", "overrides", "setting", "kind"),
    [
        (LrOptions(tokens=7 * STEP), (), "--tokens", "out_of_range"),
        (LrOptions(), ("schedule.steps=7",), "schedule", "out_of_range"),
        (LrOptions(), ("batch.micro_size=3",), "batch.global_size", "does_not_divide"),
        (LrOptions(), ("optim.name=muon", "parallel.engine=fsdp"), "optim.name", "conflict"),
    ],
)
def test_invalid_input_is_refused(shards: Path, tmp_path: Path, options, overrides, setting, kind) -> None:
    (issue,) = raised_issues(verb, shards, tmp_path, options, *overrides, dry_run=True)
    assert (issue.setting, issue.kind) == (setting, kind)
    assert setting != "--tokens" or issue.value == 7 * STEP


@pytest.mark.parametrize("budget", ["epochs=0.0001", "hours=1e-5"])
def test_too_short_runs_are_refused_when_the_data_and_the_speed_are_known(
    shards: Path, tmp_path: Path, budget: str
) -> None:
    (issue,) = raised_issues(search, make(shards, budget=budget), tmp_path / "out")
    assert (issue.setting, issue.kind) == ("schedule", "out_of_range")
    if "epochs" in budget:
        assert list((tmp_path / "out").iterdir()) == [], "more epochs can use the same directory"


def test_data_without_held_out_documents_is_refused(tmp_path: Path) -> None:
    bare = write_shards(tmp_path / "s")
    with edited_manifest(bare) as edited:
        edited["held_out"] = {"sequences": 0, "tokens": 0, "documents": 0, "shards": []}
    (issue,) = raised_issues(search, make(bare), tmp_path / "out")
    assert (issue.setting, issue.kind) == ("data", "missing")
