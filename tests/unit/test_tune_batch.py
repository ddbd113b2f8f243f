"""`tune batch` without processes: the search on records made up, trials, cache."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from bert_dp import record
from bert_dp.config import Config, dump_config, load_config
from bert_dp.cost import GIB
from launcher import results
from launcher.job import Job
from launcher.log import Log
from launcher.machine import environment
from launcher.output import Output
from launcher.run.trials import Ending, Outcome, Runner, Slot, Trial, TrialsFailed
from launcher.tune import auto, batch, cache, throughput
from launcher.tune.batch import BatchOptions, BatchSearch, BatchSearchSpec, BatchTrials, alloc_retries
from launcher.tune.throughput import TuneBatch
from tests import tune_fixture
from tests.e2e.cli import TINY
from tests.helpers import failed, make_config, raised_issues, read_json
from tests.states import FACTS


def config(global_size: int = 64, **batch: Any) -> Config:
    return make_config("precision=fp32", batch={"global_size": global_size, "micro_size": 1, **batch})


def spec_of(asked: Config, **changes: Any) -> BatchSearchSpec:
    """On two CPU ranks of 1 GiB each."""
    plain = BatchSearchSpec(asked, 2, (1, 2), 60.0, 1.0, "--memory", "torchrun", False, "fp32")
    return dataclasses.replace(plain, **changes)


# --- what is asked


def job_of(asked: Config) -> Job:
    here = dataclasses.replace(environment.probe(), gpus=[], memory_available_gib=16.0, memory_limit_gib=None)
    return Job("tiny", asked, here)


@pytest.mark.parametrize(
    ("memory_gib", "limit", "limit_of", "mine"),
    [(3.0, 3.0, "--memory", 3.0), (None, 8.0, "this machine / 2 ranks", None)],
)
def test_a_rank_may_use_what_is_asked_or_its_share(
    memory_gib: float | None, limit: float, limit_of: str, mine: float | None
) -> None:
    options = BatchOptions("2", 90.0, memory_gib, "accelerate")
    found = batch.search_spec(job_of(config(64)), options)
    assert (found.ranks, found.sizes, found.budget_s) == (2, (1, 2, 4, 8, 16, 32), 90.0)
    assert (found.limit_gib, found.limit_of, found.user_limit_gib) == (limit, limit_of, mine)
    assert (found.launcher, found.on_gpu, found.precision) == ("accelerate", False, "fp32")
    plan = batch.plan_of(found)
    assert (plan.ranks, plan.sizes, plan.budget_s, plan.memory) == (2, list(found.sizes), 90.0, mine)
    assert batch.search_spec(job_of(config(64)), dataclasses.replace(options, nproc="auto")).ranks == 2


@pytest.mark.parametrize("memory_gib", [0.0, -1.0, float("inf"), float("nan")])
def test_memory_that_is_none_is_refused(memory_gib: float) -> None:
    options = BatchOptions("2", 90.0, memory_gib, "torchrun")
    (issue,) = raised_issues(batch.search_spec, job_of(config(64)), options)
    assert (issue.setting, issue.kind) == ("--memory", "out_of_range")
    assert issue.value is memory_gib


def test_micro_size_auto_is_the_runs_own_the_cached_or_the_found_one(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BERT_DP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(auto.job, "prepare_data", lambda config: Path(config.data.path))
    asked: list[dict[str, Any]] = []

    def search(name: str, overrides: list[str], options: BatchOptions, **rest: Any) -> int:
        asked.append({"options": options, "overrides": overrides, **rest})
        size = {"micro_batch": 4, "accumulation": 1, "status": "ok", "measured_gib": 0.1}
        found = tune_fixture.batch(choice=chosen(4), budget_s=300.0, sizes=[size], date="2026-11-24")
        rest["out"].mkdir(parents=True, exist_ok=True)
        results.write(rest["out"] / "tune.json", TuneBatch.model_validate(found))
        return exit_code

    exit_code = 1
    monkeypatch.setattr(batch, "tune_batch", search)
    (tmp_path / "auto.yaml").write_text("batch: {micro_size: auto}\n")
    settings = [f"data.path={shards}", "run.device=cpu", *(item for item in TINY if "micro_size" not in item)]

    def resolve(
        run_dir: Path | None = None, *, dry_run: bool = False, resume: str = "auto"
    ) -> tuple[list[str], int, str]:
        options: dict[str, Any] = {"nproc": "2", "resume": resume, "launcher": "accelerate"}
        overrides, code = auto.resolve_auto_batch(
            str(tmp_path / "auto.yaml"), settings, run_dir=run_dir, dry_run=dry_run,
            console=Console(width=200), **options,
        )  # fmt: skip
        return overrides, code, capsys.readouterr().out

    overrides, code, said = resolve(dry_run=True)
    assert (overrides, code, asked) == ([*settings, "batch.micro_size=1"], 0, [])
    assert said == "batch.micro_size: auto = 1, for this dry run; a search of 5 min would find the best\n"
    assert resolve()[:2] == (settings, 1)
    exit_code = 0
    overrides, code, said = resolve()
    assert (overrides[-1], code) == ("batch.micro_size=4", 0)
    assert said.startswith("batch.micro_size: auto = 4, measured just now; ")
    assert said.rstrip().endswith("report.html")
    (failed, done) = asked
    assert failed["out"] == done["out"], "a search that was ended goes on"
    assert done["options"] == BatchOptions("2", 300.0, None, "accelerate")
    assert (done["overrides"], done["dry_run"], done["fresh"]) == (settings, False, False)
    found = results.read(done["out"] / "tune.json", TuneBatch)
    cache.keep(done["out"].parent.name, found)
    assert resolve()[2] == "batch.micro_size: auto = 4, measured on 2026-11-24\n"
    cache.keep(done["out"].parent.name, found.model_copy(update={"budget_s": 10.0}))
    assert resolve()[2] == "batch.micro_size: auto = 4, measured on 2026-11-24\n", "however short it was"
    assert len(asked) == 2
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text(dump_config(make_config("batch.micro_size=2")))
    assert resolve(run_dir)[2] == "batch.micro_size: auto = 2, as this run has it\n"
    saved = {**FACTS, "step": 1, "config": make_config("batch.micro_size=8").model_dump(mode="json")}
    record.write_json(run_dir / "state.json", saved)
    said = resolve(resume=str(run_dir))[2]
    assert said == "batch.micro_size: auto = 8, as the run of --resume has it\n"


class Searching:
    """`tune batch` with searches that end at once as `status` says; `kept`: what came into the cache."""

    def __init__(self, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv("BERT_DP_CACHE", str(tmp_path / "cache"))
        self.really_keep = cache.keep
        monkeypatch.setattr(batch, "measure", self.measure)
        monkeypatch.setattr(batch.cache, "keep", self.keep)
        self.settings = [f"data.path={shards}", "run.device=cpu", "precision=fp32", *TINY]
        self.kept, self.searches, self.status, self.is_full = list[TuneBatch](), 0, "complete", False

    def measure(self, question: BatchSearchSpec, output: Output[Any], log: Log) -> tuple[TuneBatch, int]:
        self.searches += 1
        size = {"micro_batch": 4, "accumulation": 1, "status": "ok", "measured_gib": 0.1}
        known = {"choice": chosen(4), "budget_s": question.budget_s, "sizes": [size], "status": self.status}
        known |= {"memory": {"limit_gib": question.limit_gib}, "date": "2026-11-24"}
        known |= {"config": question.config.model_dump(mode="json")}
        tune = TuneBatch.model_validate(tune_fixture.batch(**known))
        return tune, 0 if self.status == "complete" else 130

    def keep(self, name: str, tune: TuneBatch) -> None:
        if self.is_full:
            raise OSError("no space left")
        self.kept.append(tune)
        self.really_keep(name, tune)

    def tune(self, out: Path, *, fresh: bool = False, budget_s: float = 60.0, as_json: bool = False) -> int:
        options = BatchOptions("2", budget_s, 1.0, "torchrun")
        how: dict[str, Any] = {"dry_run": False, "as_json": as_json, "console": Console(width=200)}
        return batch.tune_batch("quickstart", self.settings, options, out=out, fresh=fresh, **how)


def test_a_whole_search_answers_the_next_one_that_asks_the_same(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Searching(shards, tmp_path, monkeypatch)
    made.status = "partial"
    assert made.tune(tmp_path / "stopped") == 130
    assert (made.searches, made.kept) == (1, []), "what was stopped answers nothing"
    made.status = "complete"
    assert made.tune(tmp_path / "whole") == 0
    assert (made.searches, len(made.kept)) == (2, 1)
    capsys.readouterr()
    assert made.tune(tmp_path / "again") == 0
    assert "from the cache: measured on 2026-11-24; --fresh measures again" in capsys.readouterr().out
    assert (made.searches, len(made.kept)) == (2, 1)
    again = results.read(tmp_path / "again" / "tune.json", TuneBatch)
    assert (again.cached, again.choice.micro_batch) == (True, 4)
    assert load_config(tmp_path / "again" / "tuned.yaml").batch.micro_size == 4
    assert (tmp_path / "again" / batch.PLAN).exists(), "so that it can be called again"
    assert made.tune(tmp_path / "longer", budget_s=61.0) == 0
    assert made.tune(tmp_path / "fresh", fresh=True) == 0
    (tmp_path / "begun" / "trials").mkdir(parents=True)
    results.write(
        tmp_path / "begun" / batch.PLAN, results.read(tmp_path / "again" / batch.PLAN, batch.BatchPlanFile)
    )
    assert made.tune(tmp_path / "begun") == 0
    assert made.searches == 5, "more time, --fresh, and a search that goes on"


def test_a_cache_that_cannot_be_written_costs_no_result(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Searching(shards, tmp_path, monkeypatch)
    made.is_full = True
    assert made.tune(tmp_path / "out", as_json=True) == 0
    told = capsys.readouterr()
    assert "warning: the cache cannot be written (no space left)" in told.err
    assert json.loads(told.out)["choice"]["micro_batch"] == 4
    assert (tmp_path / "out" / "tuned.yaml").exists()


# --- records of trials


def write_steps(directory: Path, lines: list[dict[str, Any]], rank: int = 0) -> None:
    (directory / "steps").mkdir(parents=True, exist_ok=True)
    path = directory / "steps" / f"rank-{rank}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_allocator_retries_count_after_the_warm_up_only(tmp_path: Path) -> None:
    write_steps(tmp_path, [{"step": 3, "alloc_retries": 2}, {"step": 9, "alloc_retries": 2}], rank=0)
    write_steps(tmp_path, [{"step": 3, "alloc_retries": 1}, {"step": 9, "alloc_retries": 4}], rank=1)
    assert alloc_retries(tmp_path, 1, 3) == 0
    assert alloc_retries(tmp_path, 2, 3) == 3
    write_steps(tmp_path, [{"step": 9, "alloc_retries": None}])
    assert alloc_retries(tmp_path, 1, 3) is None


class MadeRunner(Runner):
    """Trials that write what real ones would: a step takes 0.01 s and 0.01 s a sequence of a replica, the
    second rank 0.4 GiB more than the first."""

    def run_one(self, trial: Trial) -> Outcome:
        batch, steps = trial.config.batch, trial.config.schedule.steps or 0
        step_s = 0.01 + 0.01 * batch.global_size / trial.ranks
        parts = {"data_wait_s": 0.0, "forward_backward_s": 0.8, "own_work_s": 0.7, "optimizer_s": 0.1}
        shares = {**parts, "step_s": 1.0, "host_s": 1.0}
        for rank in range(trial.ranks):
            line = {
                "step": steps,
                **{name: [share * step_s] * steps for name, share in shares.items()},
                "peak_memory_gib": made_gib(batch.micro_size, rank),
                "alloc_retries": None,
            }
            write_steps(trial.directory, [line], rank)
        return Outcome("ok", 1.0)


def runner(kind: type[Runner], out: Path) -> Runner:
    return kind(out, [Slot()], [], launcher="torchrun", on_gpu=False, log=lambda line: None)


def made_gib(micro: int, rank: int) -> float:
    return 0.5 + 0.02 * micro + 0.4 * rank


ENDING = Ending("complete")
SESSION: Any = SimpleNamespace(facts=dict)


def searched(out: Path, kind: type[Runner], log: Log = print, **changes: Any) -> TuneBatch:
    """What tune.json holds of a search on two ranks of 1.6 GiB."""
    plain = {"sizes": (1, 2, 4, 8, 16, 32), "budget_s": 600.0, "limit_gib": 1.6}
    spec = spec_of(config(64), **{**plain, **changes})
    search = BatchSearch(spec, BatchTrials(spec, runner(kind, out)), log)
    search.run()
    return search.result(ENDING, SESSION)


def test_a_search_goes_by_the_rank_that_takes_most(tmp_path: Path) -> None:
    """Nine tenths of 1.6 GiB: 16 sequences fit beside 0.9 GiB, 32 would beside the 0.5 of rank 0."""
    tune = searched(tmp_path, MadeRunner)
    assert tune.memory.line is not None
    assert tune.memory.line.intercept_gib == pytest.approx(0.9)
    assert tune.memory.line.gib_per_sequence == pytest.approx(0.02)
    for tried in tune.memory.trials:
        assert tried.peak_gib == pytest.approx(made_gib(tried.micro_batch, 1))
    assert max(tune.order) == 16
    assert [size.micro_batch for size in tune.sizes] == [1, 2, 4, 8, 16]
    for size in tune.sizes:
        assert (size.status, size.accumulation) == ("ok", 64 // (size.micro_batch * 2))
        assert size.measured_gib == pytest.approx(made_gib(size.micro_batch, 1))
    assert (tune.choice.micro_batch, tune.choice.limited_by) == (1, "memory"), "all are as fast"
    assert tune.memory.parts_gib["activations"] > 0


@pytest.mark.parametrize(
    ("budget_s", "limited_by", "sizes"),
    [(60.0, "memory", [1, 2, 4, 8, 16]), (12.0, "memory", [4, 8, 16]), (4.0, "budget", [1, 2, 4])],
)
def test_a_search_keeps_to_its_budget(
    tmp_path: Path, budget_s: float, limited_by: str, sizes: list[int]
) -> None:
    said: list[str] = []
    tune = searched(tmp_path, MadeRunner, said.append, budget_s=budget_s)
    assert tune.choice.limited_by == limited_by
    assert [size.micro_batch for size in tune.sizes] == sizes
    assert tune.order[: len(sizes)] == sizes, "ascending"
    assert tune.trial_samples == 2 * sizes[-1]
    assert tune.seconds <= budget_s + 1.0, "by a start-up at most"
    assert len(said) > len(tune.order)


class NoisyRunner(MadeRunner):
    """The run for the noise scale measures one; noise.json: at what batches."""

    def run_one(self, trial: Trial) -> Outcome:
        outcome, batch = super().run_one(trial), trial.config.batch
        if trial.name == "noise":
            facts = {"batch": [batch.global_size, batch.micro_size, trial.config.log.noise_scale]}
            record.write_json(self.out / "noise.json", facts)
            estimate = {"verdict": "ok", "noise_scale": 100.0, "interval": [80.0, 130.0], "steps": 390}
            record.write_json(trial.directory / "summary.json", {"status": "done", "noise_scale": estimate})
        return outcome


def test_the_noise_scale_is_of_the_declared_batch_and_goodput_follows_from_it(tmp_path: Path) -> None:
    tune = searched(tmp_path, NoisyRunner)
    noise = tune.noise
    assert (noise.noise_scale, noise.interval) == (100.0, [80.0, 130.0])
    assert (noise.steps, noise.of_steps) == (390, 400)
    assert read_json(tmp_path / "noise.json")["batch"] == [64, 1, True]
    step_s = 0.01 + 0.01 * tune.trial_samples / 2
    expected = throughput.goodput(
        micro_s=0.8 * step_s / (tune.trial_samples / 2),
        update_s=0.2 * step_s,
        per_pass=2,
        global_size=64,
        noise=100.0,
        interval=[80.0, 130.0],
    )
    assert tune.goodput.recommended == expected.recommended
    assert tune.goodput.gain == pytest.approx(expected.gain)


def test_without_time_for_it_the_noise_scale_is_inconclusive(tmp_path: Path) -> None:
    tune = searched(tmp_path, NoisyRunner, budget_s=12.0)
    assert (tune.noise.verdict, tune.noise.noise_scale, tune.goodput) == ("inconclusive", None, None)
    assert not (tmp_path / "noise.json").exists()


@pytest.mark.parametrize(("ranks", "most", "micro"), [(2, 32, 32), (1, 64, 32), (1, 32, 32)])
def test_two_batches_are_compared_for_the_noise_scale(
    tmp_path: Path, ranks: int, most: int, micro: int
) -> None:
    """One replica that takes the declared batch at once measures it at the next smaller micro batch."""
    sizes = tuple(2**k for k in range(most.bit_length()))
    tune = searched(tmp_path, PreferringRunner, ranks=ranks, sizes=sizes, limit_gib=None, limit_of="")
    assert tune.choice.micro_batch == most
    assert read_json(tmp_path / "noise.json")["batch"] == [64, micro, True]
    assert tune.choice.limited_by == "global batch"


def scale_steps(trial: Trial, factor: Callable[[int], float]) -> None:
    """Multiply the recorded steps by a factor of their number."""
    for path in (trial.directory / "steps").iterdir():
        line = json.loads(path.read_text())
        for name in ("step_s", "forward_backward_s"):
            line[name] = [s * factor(k) for k, s in enumerate(line[name])]
        path.write_text(json.dumps(line) + "\n")


class PreferringRunner(NoisyRunner):
    """The largest micro batch is by far the fastest."""

    def run_one(self, trial: Trial) -> Outcome:
        outcome = super().run_one(trial)
        scale_steps(trial, lambda step: 1 / trial.config.batch.micro_size)
        return outcome


class FailingRunner(MadeRunner):
    def run_one(self, trial: Trial) -> Outcome:
        super().run_one(trial)
        record.write_json(trial.directory / "summary.json", failed("rank 0: no"))
        return Outcome("failed", 1.0)


@pytest.mark.parametrize(
    ("kind", "status", "code"), [(NoisyRunner, "complete", 0), (FailingRunner, "failed", 1)]
)
def test_the_result_says_what_was_searched_and_how_it_ended(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Runner], status: str, code: int
) -> None:
    monkeypatch.setattr("launcher.output.prepare_data", lambda config: shards)
    made, said = runner(kind, tmp_path), list[str]()
    monkeypatch.setattr(batch.trials, "runner", lambda *_, **options: contextlib.nullcontext(made))
    asked = config(64).model_copy(update={"parallel": config().parallel.model_copy(update={"tensor": 2})})
    two = spec_of(asked, sizes=(1, 2), limit_gib=2.0, launcher="accelerate", budget_s=500.0)
    output = Output(tmp_path, "search", batch.PLAN, batch.plan_of(two), batch.FIXED, batch.GROWS)
    tune, exit_code = batch.measure(two, output, said.append)
    assert (tune.status, exit_code) == (status, code)
    assert (tune.ranks, tune.dp, tune.config["parallel"]["tensor"]) == (2, 1, 2)
    assert (tune.global_batch, tune.sequence_length, tune.budget_s) == (64, asked.data.sequence_length, 500.0)
    assert tune.seconds == len(list(tmp_path.glob("trials/*")))
    assert ("rank 0: no" in (tune.why or "")) == bool(code)
    assert (f"error: {tune.why}" in said) == bool(code)


class LosingRunner(MadeRunner):
    """What takes more than 10 sequences is out of memory."""

    def run_one(self, trial: Trial) -> Outcome:
        ended = super().run_one(trial)
        if trial.config.batch.micro_size <= 10:
            return ended
        record.write_json(trial.directory / "summary.json", failed("rank 1: no memory", "device_memory"))
        return Outcome("oom", 1.0)


def test_a_size_that_is_out_of_memory_is_a_result_and_no_larger_one_runs(tmp_path: Path) -> None:
    """The formula knows little of these runs, so 32 is the second memory trial."""
    tune = searched(tmp_path, LosingRunner, limit_gib=16.0)
    lost = [(t.micro_batch, t.status, t.peak_gib) for t in tune.memory.trials if t.status != "ok"]
    assert lost[-1] == (16, "oom", None)
    last = tune.sizes[-1]
    assert (last.micro_batch, last.status, last.failure_kind) == (16, "oom", "device_memory")
    assert last.why == "rank 1: no memory"
    assert 32 not in tune.order
    assert (tune.choice.micro_batch, tune.choice.limited_by) == (1, "memory")


def test_if_no_timed_size_fits_smaller_ones_are_timed(tmp_path: Path) -> None:
    """The budget has time for three sizes, of which the largest that the line allows are out of memory."""
    tune = searched(
        tmp_path, LosingRunner, limit_gib=16.0, budget_s=11.0, sizes=(1, 2, 4, 8, 16, 32, 64, 128)
    )
    assert {size.micro_batch for size in tune.sizes if size.status == "ok"} <= {1, 2, 4, 8}
    assert tune.choice is not None


@pytest.mark.parametrize(("limit_gib", "second"), [(None, 16), (1.6, 8), (1.05, 2)])
def test_the_second_memory_trial_takes_half_of_the_room(
    tmp_path: Path, limit_gib: float | None, second: int
) -> None:
    """By a formula of 0.02 GiB a sequence beside the 0.92 GiB of the first trial."""

    class Known(BatchSearchSpec):
        def formula_gib(self, micro: int) -> dict[str, float]:
            return {"activations": 0.02 * micro}

    spec = Known(**vars(spec_of(config(64), sizes=(1, 2, 4, 8, 16, 32), budget_s=600.0, limit_gib=limit_gib)))
    search = BatchSearch(spec, BatchTrials(spec, runner(MadeRunner, tmp_path)), print)
    search.run()
    first, then, *_ = search.memory.trials
    assert (first.micro_batch, then.micro_batch) == (1, second)


def test_a_model_that_does_not_fit_is_refused_with_its_peak(tmp_path: Path) -> None:
    with pytest.raises(TrialsFailed, match=r"micro batch 1 .*0\.92 GiB"):
        searched(tmp_path, MadeRunner, limit_gib=1.0)


class UnsteadyRunner(MadeRunner):
    """The larger of two sizes is faster by a hundredth, and runs differ by a tenth."""

    def run_one(self, trial: Trial) -> Outcome:
        outcome = super().run_one(trial)
        pace = 0.99 if trial.config.batch.micro_size == 32 else 1.0
        is_odd = trial.name[-1] in "13579"
        scale_steps(trial, lambda step: pace * (0.9 if is_odd else 1.0))
        return outcome


@pytest.mark.parametrize(("budget_s", "runs"), [(6000.0, 6), (12.0, 4)])
def test_the_fastest_two_run_again_a_few_times_while_there_is_time(
    tmp_path: Path, budget_s: float, runs: int
) -> None:
    changes: dict[str, Any] = {"sizes": (16, 32), "limit_gib": None, "limit_of": ""}
    tune = searched(tmp_path, UnsteadyRunner, budget_s=budget_s, **changes)
    assert max(len(size.runs) for size in tune.sizes) == runs
    assert tune.choice.micro_batch == 32
    assert tune.choice.not_settled == [16]
    assert len(tune.order) == sum(len(size.runs) for size in tune.sizes)


@pytest.mark.parametrize(
    ("peaks", "retries", "status", "why"),
    [
        ([0.5, 0.9], 0, "ok", None),
        ([0.5, 1.1], 0, "over", "its peak of 1.10 GiB is above the 1.00 GiB of a rank"),
        ([0.5, 0.9], 3, "thrash", "the GPU's allocator freed its cache and tried again"),
        ([0.5, 0.9], None, "ok", None),
    ],
)
def test_one_rank_over_its_limit_or_a_thrashing_allocator_rejects_the_size(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    peaks: list[float],
    retries: int | None,
    status: str,
    why: str | None,
) -> None:
    monkeypatch.setattr(Runner, "run_one", lambda self, trial: Outcome("ok", 2.0))
    batches = BatchTrials(spec_of(config(8)), runner(Runner, tmp_path))
    directory = tmp_path / "trials" / "t"
    parts = ("data_wait_s", "forward_backward_s", "own_work_s", "optimizer_s", "step_s", "host_s")
    for rank, peak in enumerate(peaks):
        lines = [
            {
                "step": 2 * k,
                **{part: [0.1, 0.1] for part in parts},
                "peak_memory_gib": peak,
                "alloc_retries": None if retries is None else (retries if k == 2 else 0),
            }
            for k in (1, 2)
        ]
        write_steps(directory, lines, rank)
    measured = batches.time_steps("t", 2, 8, 1, 3)
    assert (measured.status, measured.why) == (status, why)
    assert measured.seconds == 2.0
    assert measured.run is not None
    assert (measured.run.peak_gib, len(measured.run.step_s)) == (peaks, 3)


def test_a_trial_keeps_the_users_settings_and_saves_nothing(tmp_path: Path) -> None:
    noisy = make_config("log.noise_scale=true", "batch.global_size=8")
    trial = BatchTrials(spec_of(noisy), runner(Runner, tmp_path)).trial("t", 2, 8, 4)
    assert (trial.config.model, trial.config.optim) == (noisy.model, noisy.optim)
    assert (trial.config.batch.micro_size, trial.config.batch.global_size) == (2, 8)
    assert trial.config.checkpoint.keep == 0
    assert trial.config.log.step_times
    assert not trial.config.log.noise_scale
    assert trial.data_bytes == 2 * GIB, "an allocation fails a gibibyte above the limit"


@pytest.mark.parametrize(
    ("changes", "guard", "warm_up"),
    [({}, 2 * GIB, 3), ({"limit_gib": None}, None, 3), ({"on_gpu": True}, None, 10)],
)
def test_memory_is_guarded_on_a_cpu_with_a_limit_alone(
    tmp_path: Path, changes: dict[str, Any], guard: int | None, warm_up: int
) -> None:
    """A GPU's own memory is its limit; it needs more steps before it runs evenly."""
    spec = spec_of(config(8), **changes)
    trial = BatchTrials(spec, runner(Runner, tmp_path)).trial("t", 2, 8, 4)
    assert (trial.data_bytes, spec.warm_up) == (guard, warm_up)


@pytest.mark.parametrize(("budget_s", "taken"), [(60.0, True), (120.0, True), (30.0, False)])
def test_a_search_goes_on_with_a_greater_budget_only(tmp_path: Path, budget_s: float, taken: bool) -> None:
    """A search that could not settle its choice advises one."""
    results.write(tmp_path / batch.PLAN, batch.plan_of(spec_of(config(8))))
    plan = batch.plan_of(spec_of(config(8), budget_s=budget_s))
    output = Output(tmp_path, "search", batch.PLAN, plan, batch.FIXED, batch.GROWS)
    assert (output.issues() == []) == taken


# --- the cache

MACHINE = {"gpus": [], "cpu_model": "a CPU", "affinity_cores": 2, "versions": {"torch": "2"}}


def key(asked: Config, machine: dict[str, Any] = MACHINE, ranks: int = 2) -> str:
    return cache.key(spec_of(asked, ranks=ranks, precision=asked.precision), machine)


def test_the_key_follows_all_that_decides_and_nothing_else() -> None:
    base = key(config())
    assert key(config(micro_size=4)) == base
    assert re.fullmatch("[0-9a-f]{16}", base)
    longer = config().data.model_copy(update={"sequence_length": 512})
    for changes in ({"precision": "bf16"}, {"compile": "on"}, {"data": longer}):
        assert key(config().model_copy(update=changes)) != base
    for machine in ({"versions": {"torch": "3"}}, {"cpu_model": "another"}):
        assert key(config(), MACHINE | machine) != base
    assert key(config(), ranks=1) != base
    assert key(config(128)) != base
    decides = ["optim.name=lamb", "log.noise_scale=true", "objective.mask_rate=0.3", "model.num_layers=3"]
    decides += ["run.deterministic=true", "data.workers=3"]
    for setting in (*decides, "optim.lr=0.5", "run.seed=3", "schedule.steps=9"):
        changed = make_config("precision=fp32", setting, "batch.micro_size=1", "batch.global_size=64")
        assert (key(changed) != base) == (setting in decides), setting
    cards = [{"name": "A", "driver": "1", "memory_gib": 80.0, "index": k} for k in range(2)]
    asked = spec_of(config())
    for changes in ({"launcher": "accelerate"}, {"limit_gib": 2.0}, {"on_gpu": True}):
        assert cache.key(spec_of(config(), **changes), MACHINE) != cache.key(asked, MACHINE), changes
    machines = [MACHINE | {"gpus": [{**card, **change} for card in cards]}
                for change in ({}, {"name": "B"}, {"driver": "2"}, {"memory_gib": 40.0})]  # fmt: skip
    assert len({cache.key(spec_of(config(), on_gpu=True), machine) for machine in machines}) == 4
    assert len({cache.key(asked, machine) for machine in machines}) == 1, "of CPU ranks"
    ours = {"limit_of": "this machine / 2 ranks"}
    free = [cache.key(spec_of(config(), limit_gib=gib, **ours), MACHINE) for gib in (1.0, 2.0)]
    assert free[0] == free[1], "what is free now is judged when it is found"


def chosen(micro: int) -> dict[str, Any]:
    return tune_fixture.batch()["choice"] | {"micro_batch": micro}


def test_what_the_cache_answers_trains_the_users_own_configuration() -> None:
    mine = make_config("optim.lr=7e-5")
    known = TuneBatch.model_validate(
        tune_fixture.batch(config_hash="of another", config={}, choice=chosen(2))
    )
    tune = batch.from_cache(known, spec_of(mine))
    assert tune.cached
    assert tune.config["optim"]["lr"] == 7e-5
    assert (tune.noise, tune.goodput) == (None, None), "of other data or weights"
    assert tune.choice == known.choice
    same = known.model_copy(update={"config_hash": mine.hash()})
    assert batch.from_cache(same, spec_of(mine)).noise == known.noise


def test_a_cached_search_answers_only_what_had_as_much_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BERT_DP_CACHE", str(tmp_path))
    assert cache.find("k", 60, None) is None
    size = {"micro_batch": 8, "accumulation": 1, "status": "ok", "measured_gib": 4.0}
    known = tune_fixture.batch(
        choice=chosen(8) | {"limited_by": "memory"}, budget_s=60.0, memory={"limit_gib": 5.0}, sizes=[size]
    )
    whole = TuneBatch.model_validate(known)
    cache.keep("k", whole)
    assert cache.find("k", 60, 5.0) is not None
    assert cache.find("k", 60, None) is not None
    assert cache.find("k", 61, 5.0) is None
    assert cache.find("k", 60, 3.9) is None, "it does not fit any more"
    assert cache.find("k", 60, 5.6) is None, "more would fit"
    assert cache.find("k", 60, 5.4) is not None, "hardly more"
    free = whole.model_copy(update={"choice": whole.choice.model_copy(update={"limited_by": "budget"})})
    cache.keep("free", free)
    assert cache.find("free", 60, 50.0) is not None, "memory was not what bounded it"
    assert cache.path_of("k") == tmp_path / "tune" / "k.json"
    cache.path_of("k").write_text('{"choice"')
    assert cache.find("k", 1, None) is None
    for torn in ({"choice": None}, {"budget_s": "60"}, {"memory": []}, {"sizes": {}}, {"choice": [8]}):
        record.write_json(cache.path_of("k"), {**known, **torn})
        assert cache.find("k", 1, 5.0) is None
    cache.keep("k", whole)
    tmp_path.chmod(0o777)
    assert cache.find("k", 60, 5.0) is None, "anyone could have written it"
    with pytest.raises(PermissionError, match="every user"):
        cache.keep("k", whole)
