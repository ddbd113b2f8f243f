"""The learning rate search on made loss surfaces, its arithmetic, its configurations and what it refuses."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from rich.console import Console

from bert_dp import record
from bert_dp.config import Config, ConfigError, batch_layout, dump_config, load_config, peak_lr
from launcher import job, results
from launcher.machine import environment
from launcher.machine.environment import Environment
from launcher.output import KeptPlan, Output
from launcher.results import LrOptions
from launcher.run import trials
from launcher.run.trials import Outcome, Runner, Slot, Stopped, Trial, earlier_outcome
from launcher.tune import ladder, lr, rate_trials, transfer
from launcher.tune.rate_report import rate_report
from tests.e2e.cli import TINY
from tests.report_fixture import shown
from tests.shards import edited_manifest, write_shards

STEPS, STEP = 1600, 128  # of the configured run; tokens of one step
WHOLE = STEPS * STEP
EDGE = 0.064
Surface = Callable[[Config], float | str]


@pytest.fixture(autouse=True)
def prepared(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data is there: no process is started for it."""
    monkeypatch.setattr("launcher.output.prepare_data", lambda config: Path(config.data.path))


def asked(config: Config) -> job.Job:
    return job.Job("tiny", config, machine())


@functools.cache
def machine() -> Environment:
    return environment.probe(Path())


def output(out: Path, config: Config, settings: LrOptions = LrOptions()) -> Output:  # noqa: B008
    return Output(out, "search", lr.STATE, lr.plan_of(config, settings), lr.FIXED)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("shards") / "s")


def make(shards: Path, *overrides: str) -> Config:
    return load_config(None, [*TINY, f"data.path={shards}", f"schedule.steps={STEPS}", *overrides])


# --- a runner that writes the records of a made loss surface in place of training


class MadeRunner(Runner):
    """Ends every trial at once as `surface` says; `limit` trials, then a Ctrl-C."""

    def __init__(self, out: Path, surface: Surface, limit: float = math.inf, rate: float = 1e4):
        self.out, self.surface, self.limit, self.rate = out, surface, limit, rate
        self.ran: list[str] = []

    def run(self, trials: Iterable[Trial]) -> Iterator[tuple[Trial, Outcome]]:
        for trial in reversed([*trials]):  # they may end in any order
            if earlier_outcome(trial) is None:
                if len(self.ran) >= self.limit:
                    raise Stopped(2)
                self.ran.append(trial.name)
                self._train(trial)
            outcome = earlier_outcome(trial)
            assert outcome is not None
            yield trial, outcome

    def _train(self, trial: Trial) -> None:
        directory, config = trial.directory, trial.config
        directory.mkdir(parents=True, exist_ok=True)
        record.write_text(directory / "config.yaml", dump_config(config))
        tokens = config.schedule.tokens or (config.schedule.steps or 0) * STEP
        if config.schedule.name == "exponential":
            count = config.schedule.steps or 0
            for k in range(count):
                rate = 1e-4 ** (1 - k / count)
                loss = 6 - 20 * rate if rate < EDGE else 9.0
                line = {"step": k + 1, "lr": rate, "loss": loss, "skipped_steps": 0}
                record.append_line(directory / "metrics.jsonl", line)
        loss = self.surface(config)
        facts: dict[str, Any] = {
            "status": "done",
            "heldout_loss": loss,
            "cause": None,
            "tokens": tokens,
            "tokens_per_s": self.rate,
            "time_s": {"setup": 1.0, "compile": 1.0, "train": tokens / self.rate, "eval": 0.5, "save": 0.0},
        }
        if isinstance(loss, str):
            kind = {"failure_kind": "host_memory"} if loss == "oom" else {}
            facts |= {"status": "failed", "heldout_loss": None, "cause": loss, **kind}
        record.write_json(directory / "summary.json", facts)


def valley(best: float, curvature: float = 0.1) -> Surface:
    """Lowest at `best`; shorter runs learn less and like a higher rate; seeds differ, the same for all."""

    def surface(config: Config) -> float | str:
        if config.schedule.name == "exponential":
            return 5.0
        tokens = config.schedule.tokens or 0
        shift = 0.25 * math.log2(WHOLE / tokens)
        away = math.log2(float(config.optim.lr) / best) - shift
        return 2.5 + 0.05 * math.log2(WHOLE / tokens) + curvature * away**2 + 0.01 * config.run.seed

    return surface


def searched(
    shards: Path,
    out: Path,
    surface: Surface,
    settings: LrOptions = LrOptions(),  # noqa: B008
    *overrides: str,
    limit: float = math.inf,
    rate: float = 1e4,
) -> tuple[int, dict[str, Any], MadeRunner, list[str]]:
    """(exit code, tune.json, what ran the trials, what was said)."""
    out.mkdir(exist_ok=True)
    made = MadeRunner(out, surface, limit, rate)
    code, found, said = run_search(made, make(shards, *overrides), settings)
    return code, found, made, said


def run_search(
    made: MadeRunner,
    config: Config,
    settings: LrOptions = LrOptions(),  # noqa: B008
) -> tuple[int, dict[str, Any], list[str]]:
    """(exit code, tune.json, what was said) of a search whose trials `made` runs."""
    said: list[str] = []
    with mock.patch.object(trials, "runner", return_value=contextlib.nullcontext(made)):
        tune, code = lr.search(asked(config), settings, 1, output(made.out, config, settings), said.append)
    said += shown(rate_report(tune, made.out), 200)
    found = results.plain(tune)
    assert found == json.loads((made.out / "tune.json").read_text())
    return code, found, said


# --- the whole search


def test_a_rate_within_the_ladder_is_found_for_less_than_half_a_grid(shards: Path, tmp_path: Path) -> None:
    code, found, pool, said = searched(shards, tmp_path / "out", valley(0.004))
    assert (code, found["status"]) == (0, "complete")
    assert found["range_test"]["edge"] == pytest.approx(EDGE, rel=0.6)
    first, last = found["rungs"]
    rates = sorted({trial["lr"] for trial in first["trials"]})
    assert [b / a for a, b in itertools.pairwise(rates)] == pytest.approx([2] * (len(rates) - 1))
    assert [rung["tokens"] for rung in found["rungs"]] == [WHOLE // 8, WHOLE]
    assert [c[2] for c in first["kept"]] == [t["lr"] for t in last["trials"]][:2]
    chosen = found["choice"]["lr"]
    told = {(t["lr"], t["seed"]) for t in last["trials"]}
    assert told == {(chosen, 0), (chosen, 1), (chosen, 2), (chosen / 2, 0), (2 * chosen, 0)}
    assert sum("nats behind after one seed: left out" in line for line in said) == 2
    assert found["choice"]["tied"] == []
    assert abs(math.log2(chosen / 0.004)) <= 0.5  # the nearest of the ladder
    assert chosen == min(rates, key=lambda rate: abs(math.log2(rate / 0.004)))
    assert found["choice"]["edge_side"] is None
    cost = found["cost"]
    assert cost["tokens"] == sum(t["tokens"] for r in found["rungs"] for t in r["trials"]) + 100 * STEP
    assert cost["grid_tokens"] == 5 * 3 * WHOLE
    assert cost["tokens"] < 0.4 * cost["grid_tokens"]
    assert cost["trials"] == len(pool.ran) == 11
    assert any("12 trials" in line for line in said)
    tuned = load_config(tmp_path / "out" / "tuned.yaml")
    assert tuned == make(shards, f"optim.lr={chosen!r}")


def test_a_whole_run_that_likes_a_rate_between_the_finalists_is_told_so(shards: Path, tmp_path: Path) -> None:
    """Short runs like the rates on both sides of the one that whole runs like."""
    plain = valley(0.004)
    chosen = searched(shards, tmp_path / "plain", plain)[1]["choice"]["lr"]

    def surface(config: Config) -> float | str:
        short = config.schedule.tokens == WHOLE // 8
        beside = config.optim.lr in (chosen / 2, 2 * chosen)
        return float(plain(config)) + (0.9 if short and not beside else 0.0)

    _, found, *_ = searched(shards, tmp_path / "out", surface)
    assert {c[2] for c in found["rungs"][0]["kept"]} == {chosen / 2, 2 * chosen}
    assert found["choice"]["lr"] == chosen


def test_finalists_that_are_close_train_every_seed(shards: Path, tmp_path: Path) -> None:
    _, found, *_ = searched(shards, tmp_path / "out", valley(0.004, curvature=0.01))
    last = found["rungs"][-1]
    seeds = {
        rate: [t["seed"] for t in last["trials"] if t["lr"] == rate]
        for rate in {t["lr"] for t in last["trials"]}
    }
    assert sorted(map(len, seeds.values())) == [1, 3, 3]
    assert seeds[found["choice"]["lr"]] == [0, 1, 2]
    assert found["cost"]["tokens"] < 0.6 * found["cost"]["grid_tokens"]


def test_a_finalist_left_out_comes_back_when_the_best_turns_out_worse(shards: Path, tmp_path: Path) -> None:
    plain = valley(0.004)
    _, found, *_ = searched(shards, tmp_path / "plain", plain)
    chosen = found["choice"]["lr"]

    def surface(config: Config) -> float | str:
        unlucky = config.schedule.tokens == WHOLE and config.optim.lr == chosen and config.run.seed
        return float(plain(config)) + (1.0 if unlucky else 0.0)

    _, found, *_ = searched(shards, tmp_path / "out", surface)
    assert found["choice"]["lr"] != chosen
    assert found["choice"]["seeds"] == 3
    assert {t["seed"] for t in found["rungs"][-1]["trials"] if t["lr"] == found["choice"]["lr"]} == {0, 1, 2}


@pytest.mark.parametrize(("best", "side"), [(0.05, "high"), (0.00001, "low")])
def test_the_edge_of_the_grid_is_flagged(shards: Path, tmp_path: Path, best: float, side: str) -> None:
    _, found, _, said = searched(shards, tmp_path / "out", valley(best))
    rates = sorted({trial["lr"] for trial in found["rungs"][0]["trials"]})
    edge = found["range_test"]["edge"]
    assert max(rates) <= edge
    if side == "low":
        assert len(rates) == 5 + ladder.EXTENSIONS
    assert found["choice"]["edge_side"] == side
    assert found["choice"]["lr"] == (max(rates) if side == "high" else min(rates))
    assert any("edge of the grid" in line for line in said)


def test_what_diverges_and_what_fails_is_out_and_told(shards: Path, tmp_path: Path) -> None:
    plain = valley(0.004)

    def surface(config: Config) -> float | str:
        rate = float(config.optim.lr)
        if config.schedule.name != "exponential" and rate > 0.008:
            return "5 steps in a row up to step 9 had a gradient that is not finite and were skipped"
        return "RuntimeError: broken" if rate < 0.0015 else plain(config)

    code, found, _, said = searched(shards, tmp_path / "out", surface)
    states = {t["lr"]: t["status"] for t in found["rungs"][0]["trials"]}
    assert code == 0
    assert {rate: s for rate, s in states.items() if rate > 0.008} != {}
    assert all(s == "diverged" for rate, s in states.items() if rate > 0.008)
    assert all(s == "failed" for rate, s in states.items() if rate < 0.0015)
    assert any("broken" in line and "failed" in line for line in said)
    assert 0.0015 <= found["choice"]["lr"] <= 0.008


def test_finalists_that_diverge_in_the_whole_run_give_way(shards: Path, tmp_path: Path) -> None:
    plain = valley(0.008)

    def surface(config: Config) -> float | str:
        long = config.schedule.tokens == WHOLE and float(config.optim.lr) > 0.0035
        return "3 steps had a gradient that is not finite" if long else plain(config)

    code, found, *_ = searched(shards, tmp_path / "out", surface)
    assert code == 0
    assert found["choice"]["lr"] <= 0.0035
    assert {t["status"] for t in found["rungs"][-1]["trials"]} == {"diverged", "ok"}


@pytest.mark.parametrize("part", ["trials", "range test"])
def test_a_search_in_which_everything_fails_has_failed(shards: Path, tmp_path: Path, part: str) -> None:
    plain = valley(0.004)

    def surface(config: Config) -> float | str:
        spared = part == "trials" and config.schedule.name == "exponential"
        return plain(config) if spared else "oom"

    code, found, _, said = searched(shards, tmp_path / "out", surface)
    assert (code, found["status"], found["choice"]) == (1, "failed", None)
    assert any("oom" in line for line in said)
    assert not (tmp_path / "out" / "tuned.yaml").exists()


def test_a_stopped_search_goes_on_where_it_was(shards: Path, tmp_path: Path) -> None:
    whole = searched(shards, tmp_path / "whole", valley(0.004))[1]
    code, found, first, said = searched(shards, tmp_path / "out", valley(0.004), limit=8)
    assert (code, found["status"], found["choice"]) == (130, "partial", None)
    assert any("the same command goes on" in line for line in said)
    code, found, second, _ = searched(shards, tmp_path / "out", valley(0.004))
    assert (code, found["status"]) == (0, "complete")
    assert not set(first.ran) & set(second.ran)
    assert len(first.ran) + len(second.ran) == 11
    assert (found["choice"], found["rungs"]) == (whole["choice"], whole["rungs"])
    assert searched(shards, tmp_path / "out", valley(0.004))[2].ran == []


# --- the length of a run


def test_hours_become_tokens_at_the_measured_speed_once(shards: Path, tmp_path: Path) -> None:
    items = [item for item in TINY if not item.startswith("schedule")]
    config = load_config(None, [*items, f"data.path={shards}", "schedule.hours=0.01"])
    assert rate_trials.full_tokens(config) is None
    out = tmp_path / "out"
    out.mkdir()
    for rate in (1e4, 2e4):  # a machine that is faster in the second call
        made = MadeRunner(out, valley(0.004), rate=rate)
        _, found, said = run_search(made, config)
        assert found["settings"]["tokens"] == round(0.01 * 3600 * 1e4 / STEP) * STEP
        assert any("0.01 h at the measured 10 k tokens/s of 1 rank" in line for line in said)
    assert made.ran == []


def test_a_budget_shortens_the_runs_and_says_so(shards: Path, tmp_path: Path) -> None:
    long = searched(shards, tmp_path / "long", valley(0.004), LrOptions(budget_s=1e6))[1]
    assert long["settings"]["tokens"] == WHOLE
    out, found, _, said = searched(shards, tmp_path / "short", valley(0.004), LrOptions(budget_s=60))
    tokens = found["settings"]["tokens"]
    assert out == 0
    assert STEP * 8 < tokens < WHOLE
    assert tokens % STEP == 0
    assert any("for --budget" in line for line in said)
    # what the pool says a trial takes: set-up 2 s, an evaluation of 0.5 s or four, tokens at 1e4 a second
    at_a_time = found["at_a_time"]
    batches = [(5, tokens / 8, 2.5), (7, tokens, 4)]
    seconds = sum(math.ceil(n / at_a_time) * (fixed + each / 1e4) for n, each, fixed in batches)
    used = 2 + 100 * STEP / 1e4 + 0.5
    step_s = sum(math.ceil(n / at_a_time) for n, *_ in batches) * STEP / 1e4
    assert seconds + used == pytest.approx(60, abs=step_s)


def test_tokens_of_a_run_count_its_ramp(shards: Path) -> None:
    assert rate_trials.full_tokens(make(shards)) == WHOLE
    ramp = make(shards, "batch.ramp_fraction=0.5", "batch.ramp_quantum=2")
    assert WHOLE * 0.75 < (rate_trials.full_tokens(ramp) or 0) < WHOLE


# --- trials


def test_a_trial_is_a_whole_run_of_its_length(shards: Path) -> None:
    config = make(
        shards,
        "optim.lr_scaling=sqrt",
        "optim.lr_batch=2",
        "log.tensorboard=true",
        "checkpoint.every_steps=5",
        "parallel.engine=ddp",
        "optim.name=lamb",
        "optim.weight_decay=0.1",
    )
    trial = rate_trials.trial_config(config, Path("/shards"), 0.003, 40 * STEP, 7, last=True)
    assert (trial.schedule.name, trial.schedule.tokens) == (config.schedule.name, 40 * STEP)
    assert peak_lr(trial).value == 0.003
    assert (trial.optim.name, trial.optim.weight_decay, trial.run.seed) == ("lamb", 0.1, 7)
    assert (trial.data.path, trial.data.sources) == ("/shards", None)
    assert (trial.checkpoint.keep, trial.eval.every_steps, trial.log.tensorboard) == (0, 10, False)
    assert (trial.batch, trial.model, trial.parallel) == (config.batch, config.model, config.parallel)
    assert batch_layout(trial, 1).global_size == config.batch.global_size
    short = rate_trials.trial_config(config, Path("/shards"), 0.003, 40 * STEP, 7, last=False)
    assert short.eval.every_steps == 0, "at its end alone"
    ramp = make(shards, "batch.ramp_fraction=0.5", "batch.ramp_quantum=2")
    part = (rate_trials.full_tokens(ramp) or 0) // 4
    quarter = rate_trials.trial_config(ramp, Path("/shards"), 0.003, part, 7, last=True).schedule
    assert (quarter.steps, quarter.tokens) == ((ramp.schedule.steps or 0) // 4, None), "as the run ramps"
    in_tokens = ramp.model_copy(
        update={"schedule": ramp.schedule.model_copy(update={"steps": None, "tokens": 400 * STEP})}
    )
    ramped = rate_trials.trial_config(in_tokens, Path("/shards"), 0.003, 40 * STEP, 7, last=True)
    assert ramped.eval.every_steps > 40 // 4, "a ramp has more steps for as many tokens"
    assert Config.model_validate_json(trial.model_dump_json()) == trial


def test_a_range_test_has_the_whole_batch_from_the_start(shards: Path) -> None:
    config = make(shards, "batch.ramp_fraction=0.5", "batch.ramp_quantum=2")
    test = rate_trials.range_config(config, shards, 60)
    assert (test.schedule.name, test.schedule.steps, test.schedule.tokens) == ("exponential", 60, None)
    assert (test.batch.ramp_fraction, test.log.every_steps, test.optim.lr) == (0, 1, 1.0)
    assert rate_trials.range_steps(config, None) == 100
    hours = config.schedule.model_copy(update={"steps": None, "tokens": None, "hours": 0.03})
    brief = config.model_copy(update={"schedule": hours})
    assert rate_trials.range_steps(brief, None) == rate_trials.RANGE_LEAST
    assert rate_trials.range_steps(config, 10**9) == 100
    assert rate_trials.range_steps(config, 800 * STEP) == 50
    assert rate_trials.range_steps(config, 8 * STEP) == rate_trials.RANGE_LEAST


def test_a_tuned_configuration_has_the_rate_at_its_own_batch(shards: Path) -> None:
    config = make(shards, "optim.lr_scaling=sqrt", "optim.lr_batch=2")
    tuned = rate_trials.tuned_config(config, 0.003)
    assert peak_lr(tuned).value == 0.003
    assert (tuned.optim.lr_scaling, tuned.optim.lr_batch) == ("sqrt", config.batch.global_size)
    automatic = make(shards, "optim.name=lamb", "optim.lr=auto")
    assert peak_lr(rate_trials.tuned_config(automatic, 0.003)).value == 0.003


def test_a_trial_has_devices_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    slots = trials.device_slots(2, gpus=5, cores=64, most=9)
    assert slots == [Slot(gpus=("0", "1")), Slot(gpus=("2", "3"))]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-ab, 1")
    slots = trials.device_slots(1, gpus=3, cores=64, most=9)
    assert slots == [Slot(gpus=("3",)), Slot(gpus=("GPU-ab",)), Slot(gpus=("1",))]
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    slots = trials.device_slots(1, gpus=0, cores=8, most=3)  # more cores than trials
    assert slots == [Slot(cores=(0, 1)), Slot(cores=(2, 3)), Slot(cores=(4, 5))]
    assert trials.device_slots(2, gpus=0, cores=4, most=9) == [
        Slot(cores=(0, 1, 2, 3)),
        Slot(cores=(4, 5, 6, 7)),
    ]
    assert trials.device_slots(16, gpus=0, cores=8, most=9) == [Slot(cores=tuple(range(8)))]


@pytest.mark.parametrize(
    ("facts", "status"),
    [
        ({"cause": "no words", "failure_kind": "not_finite"}, "diverged"),
        ({"cause": "a gradient that is not finite", "failure_kind": "error"}, "failed"),
        ({"cause": "all 3 steps had a gradient that is not finite"}, "diverged"),
        ({"cause": "no words"}, "failed"),
    ],
)
def test_a_trial_has_diverged_by_the_kind_of_its_failure(
    shards: Path, tmp_path: Path, facts: dict[str, str], status: str
) -> None:
    """The third is of an older program, which wrote no kind."""
    record.write_json(tmp_path / "summary.json", {"status": "failed", "exit_code": 1, "step": 3, **facts})
    found = rate_trials.read_trial(make(shards), tmp_path, "failed", 0.1, 0, 1.0)
    assert (found.status, found.tokens, found.cause) == (status, 3 * STEP, facts["cause"])
    assert found.failure_kind == ("not_finite" if status == "diverged" else "error")


# --- transfer


def test_transfer_follows_the_papers(shards: Path) -> None:
    config = make(shards, "optim.beta1=0.99", "optim.beta2=0.999", "optim.eps=1e-8")
    found = transfer.transfer(config, 1e-3, "x", 256, 4096)
    root, straight, untuned = found.rules
    assert (found.ratio, found.ours) == (16, None)
    assert root.lr == pytest.approx(4e-3)
    assert root.beta1 == pytest.approx(0.84)
    assert root.beta2 == pytest.approx(0.984)
    assert root.eps == pytest.approx(2.5e-9)
    assert straight.lr == pytest.approx(1.6e-2)
    assert untuned.lr == pytest.approx(5 / (2**1.5 * 1e3))
    down = transfer.transfer(config, 1e-3, "x", 4096, 256).rules[0]
    assert down.lr == pytest.approx(2.5e-4)
    assert transfer.transfer(config, 1e-3, "x", 1, 128).rules[0].beta1 is None
    ours = make(shards, "optim.lr_scaling=sqrt", "optim.lr_batch=8")
    assert transfer.transfer(ours, 1e-3, "x", 8, 16).ours == "sqrt"


def test_transfer_takes_the_rate_that_was_found(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    found = searched(shards, out, valley(0.004))[1]
    options = [f"data.path={shards}", *TINY]
    code = transfer.carry("quickstart", options, 8, 32, out, as_json=True, console=Console())
    assert code == 0
    told = json.loads(capsys.readouterr().out)
    assert told["rules"][0]["lr"] == pytest.approx(2 * found["choice"]["lr"])
    assert json.loads((out / "tune.json").read_text())["transfer"] == told
    assert searched(shards, out, valley(0.004))[1]["transfer"] == told
    another = {**found, "choice": {**found["choice"], "lr": 0.5}, "transfer": told}
    record.write_json(out / "tune.json", another)
    assert searched(shards, out, valley(0.004))[1]["transfer"] is None, "it was another rate's"
    transfer.carry(
        "quickstart", [*options, "optim.lr=0.5"], 8, 32, None, as_json=False, console=Console(width=200)
    )
    assert "sqrt          1 = 0.5 x sqrt(32 / 8)" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="tuned at global batch 8, not 16"):
        transfer.carry("quickstart", options, 16, 32, out, as_json=False, console=Console())
    scaled = [*options, "optim.lr=0.004", "optim.lr_scaling=sqrt", "optim.lr_batch=8"]
    transfer.carry("quickstart", scaled, 32, 128, None, as_json=False, console=Console(width=200))
    assert "0.016 = 0.008 x sqrt(128 / 32)" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="holds no chosen learning rate"):
        transfer.carry("quickstart", options, 8, 32, tmp_path, as_json=False, console=Console())


# --- refusals


@pytest.mark.parametrize(
    ("settings", "overrides", "line"),
    [
        (LrOptions(tokens=7 * STEP), (), "--tokens: 896 tokens are fewer than 8 steps of 128"),
        (LrOptions(seeds=2), (f"run.seed={2**63 - 1}",), "run.seed: 9223372036854775807 leaves no room"),
        (LrOptions(), ("schedule.steps=7",), "schedule: 896 tokens are fewer than 8 steps"),
        (LrOptions(), ("batch.micro_size=3",), "batch.global_size: 8 is not a multiple"),
        (LrOptions(), ("optim.name=muon", "parallel.engine=fsdp"), "optim.name: muon"),
    ],
)
def test_what_cannot_be_searched(
    shards: Path, settings: LrOptions, overrides: tuple[str, ...], line: str
) -> None:
    found = lr.setting_issues(make(shards, *overrides), settings, 1)
    assert len(found) == 1
    assert found[0].startswith(line)


def test_data_without_held_out_documents_is_refused(tmp_path: Path) -> None:
    bare = write_shards(tmp_path / "s")
    with edited_manifest(bare) as edited:
        edited["held_out"] = {"sequences": 0, "tokens": 0, "documents": 0, "shards": []}
    with pytest.raises(ConfigError, match="no held-out documents"):
        lr.search(asked(make(bare)), LrOptions(), 1, output(tmp_path, make(bare)), print)


def test_a_search_counts_its_seconds_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([100.0, 107.0, 112.0])
    monkeypatch.setattr("launcher.output.time", SimpleNamespace(monotonic=lambda: next(now)))
    file = KeptPlan(tmp_path / "search.json", results.LrPlanFile(config_hash="x", settings={}, seconds=30.0))
    file.save()
    file.save()
    assert results.read(tmp_path / "search.json", results.LrPlanFile).seconds == 30.0 + 12.0
