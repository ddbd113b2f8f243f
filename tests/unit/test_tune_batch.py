"""Tests of `tune batch` without processes: the search on made-up records, trials and the cache."""

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bert_dp import files
from bert_dp.config import Config, dump_config
from bert_dp.cost import GIB
from launcher import results
from launcher.job import Job, VerbOptions
from launcher.log import Log
from launcher.machine import environment
from launcher.run.restarts import RunOptions
from launcher.run.trials import PARTS, Runner, SearchOutcome, Slot, Trial, TrialOutcome, TrialsFailed
from launcher.tune import PLAN, batch
from launcher.tune.batch import BatchOptions, BatchSearch, BatchSearchSpec
from launcher.tune.throughput import TuneBatch
from tests import tune_fixture
from tests.e2e.cli import TINY
from tests.helpers import failed, make_config
from tests.states import FACTS

SETTINGS = [item for item in TINY if "micro_size" not in item]


def config(global_size: int = 64) -> Config:
    return make_config("precision=fp32", batch={"global_size": global_size, "micro_size": 1})


def spec_of(given: Config, budget_s: float = 60.0, launcher: str = "torchrun", **changes: Any) -> Any:
    """Return the specification of a search on two CPU ranks of 1 GiB each."""
    options = BatchOptions("2", budget_s, 1.0, launcher)
    return dataclasses.replace(BatchSearchSpec(given, options, 2, (1, 2), 1.0, False, "fp32"), **changes)


@pytest.mark.parametrize(("memory_gib", "limit"), [(3.0, 3.0), (None, 8.0)])
def test_a_rank_may_use_the_requested_memory_or_its_share(memory_gib: float | None, limit: float) -> None:
    here = dataclasses.replace(environment.probe(), gpus=[], memory_available_gib=16.0, memory_limit_gib=None)
    for nproc in ("2", "auto"):
        options = BatchOptions(nproc, 90.0, memory_gib, "accelerate")
        spec = batch.search_spec(Job("tiny", config(), here), options)
        assert (spec.ranks, spec.sizes, spec.limit_gib) == (2, (1, 2, 4, 8, 16, 32), limit)
        assert (spec.on_gpu, spec.precision) == (False, "fp32")
        settings = {"nproc": 2, "budget_s": 90.0, "memory_gib": memory_gib, "launcher": "accelerate"}
        assert batch.output_of(spec, Path()).plan.settings == settings


def found(**changes: Any) -> TuneBatch:
    """Return a search that has chosen 8 sequences with 4 GiB."""
    size = {"micro_batch": 8, "status": "ok", "peak_gib": 4.0, "runs": 1}
    choice = tune_fixture.batch()["choice"] | {"micro_batch": 8, "limited_by": "memory"}
    return TuneBatch.model_validate(
        tune_fixture.batch(**{"sizes": [size], "memory_limit_gib": 5.0, "choice": choice, **changes})
    )


def test_an_auto_micro_batch_is_the_runs_own_a_cached_or_a_new_one(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BERT_DP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(batch.job, "prepare_data", lambda config: Path(config.data.path))
    given: list[dict[str, Any]] = []

    def search(name: str, overrides: list[str], options: BatchOptions, how: VerbOptions) -> int:
        given.append({"options": options, "overrides": overrides, **how._asdict()})
        assert how.out is not None
        how.out.mkdir(parents=True, exist_ok=True)
        done = found(status="failed" if exit_code else "complete", choice=tune_fixture.batch()["choice"])
        results.write(how.out / "tune.json", done)
        return exit_code

    monkeypatch.setattr(batch, "tune_batch", search)
    (tmp_path / "auto.yaml").write_text("batch: {micro_size: auto}\n")
    settings = [f"data.path={shards}", "run.device=cpu", *SETTINGS]

    def resolve(*more: str, **changes: Any) -> tuple[list[str], int, str]:
        run = RunOptions("2", **{"launcher": "accelerate", **changes})
        name, console = str(tmp_path / "auto.yaml"), Console(width=200)
        overrides, code = batch.resolve_auto_batch(name, [*settings, *more], run, console)
        return overrides, code, capsys.readouterr().out

    assert resolve(dry_run=True)[:2] == ([*settings, "batch.micro_size=1"], 0)
    assert given == []
    exit_code = 1
    assert resolve()[:2] == (settings, 1)
    exit_code = 0
    overrides, code, logged = resolve()
    assert (overrides[-1], code) == ("batch.micro_size=8", 0)
    assert "auto = 8, measured just now" in logged
    (failed, done) = given
    assert failed["out"] == done["out"], "a failed search is resumed"
    assert done["options"] == BatchOptions("2", 300.0, None, "accelerate")
    assert (done["overrides"], done["dry_run"]) == (settings, False)
    for more in ([], ["optim.lr=0.5"]):  # settings that keep the speed
        assert "auto = 8, measured on 2026-11-24" in resolve(*more)[2]
    assert len(given) == 2
    resolve("optim.name=lamb")
    assert len({each["out"].parent for each in given}) == 2
    (run_dir := tmp_path / "run").mkdir()
    (run_dir / "config.yaml").write_text(dump_config(make_config("batch.micro_size=2")))
    assert "auto = 2, as in this run's config.yaml" in resolve(run_dir=run_dir)[2]
    saved = {**FACTS, "step": 1, "config": make_config("batch.micro_size=8").model_dump(mode="json")}
    files.write_json(run_dir / "state.json", saved)
    assert "auto = 8, as in the run given by --resume" in resolve(resume=str(run_dir))[2]


class MadeRunner(Runner):
    """A runner that writes the records of trials: a step takes 0.01 s plus 0.01 s per sequence of a replica,
    and rank 1 uses 0.4 GiB more than rank 0. The noise scale run sets `noise_batch`."""

    noise_batch: tuple[int, int] | None = None
    speedup = 0  # power of the micro batch in the speed of a step
    lost = (1000, "", "")  # smallest micro batch that fails, kind of failure, status

    def run_one(self, trial: Trial) -> TrialOutcome:
        batch, steps = trial.config.batch, trial.config.schedule.steps or 0
        least, kind, status = self.lost
        (trial.directory / "steps").mkdir(parents=True, exist_ok=True)
        if batch.micro_size >= least:
            files.write_json(trial.directory / "summary.json", failed("rank 1: no memory", kind))
            return TrialOutcome(status, 1.0)
        step_s = (0.01 + 0.01 * batch.global_size / trial.ranks) / batch.micro_size**self.speedup
        shares = dict.fromkeys(PARTS, 1.0) | {"data_wait_s": 0.0, "forward_backward_s": 0.8}
        for rank in range(trial.ranks):
            times = {name: [share * step_s] * steps for name, share in shares.items()}
            line = {"step": steps, **times, "peak_memory_gib": made_gib(batch.micro_size, rank)}
            (trial.directory / "steps" / f"rank-{rank}.jsonl").write_text(json.dumps(line) + "\n")
        if trial.name == "noise":
            assert trial.config.log.noise_scale
            self.noise_batch = (batch.global_size, batch.micro_size)
            estimate = {"verdict": "ok", "noise_scale": 100.0, "interval": [80.0, 130.0], "steps": 390}
            files.write_json(trial.directory / "summary.json", {"status": "done", "noise_scale": estimate})
        return TrialOutcome("ok", 1.0)


class PreferringRunner(MadeRunner):
    """A runner whose largest micro batch is by far the fastest."""

    speedup = 1


class LosingRunner(MadeRunner):
    """A runner that is out of memory at micro batches of 10 sequences and more."""

    lost = (10, "device_memory", "oom")


class FailingRunner(MadeRunner):
    lost = (0, "error", "failed")


def runner(kind: type[Runner], out: Path) -> Any:
    return kind(out, [Slot()], [], launcher="torchrun", on_gpu=False, log=lambda line: None)


def made_gib(micro: int, rank: int) -> float:
    return 0.5 + 0.02 * micro + 0.4 * rank


def searched(runs: Runner, log: Log = print, **changes: Any) -> TuneBatch:
    """Return tune.json of a search on two ranks of 1.6 GiB."""
    plain = {"sizes": (1, 2, 4, 8, 16, 32), "budget_s": 600.0, "limit_gib": 1.6}
    spec = spec_of(config(), **{**plain, **changes})
    search = BatchSearch(spec, runs, log)
    search.run()
    return search.result(SearchOutcome("complete"), {})


def test_a_search_follows_the_rank_with_the_most_memory(tmp_path: Path) -> None:
    """In nine tenths of 1.6 GiB, 16 sequences fit on rank 1 (+ 0.9 GiB) and 32 on rank 0 (+ 0.5 GiB)."""
    tune = searched(runner(MadeRunner, tmp_path))
    assert tune.memory_line is not None
    assert tune.memory_line.intercept_gib == pytest.approx(0.9)
    assert tune.memory_line.gib_per_sequence == pytest.approx(0.02)
    for tried in (*tune.memory_trials, *tune.trials):
        assert tried.peak_gib == pytest.approx(made_gib(tried.micro_batch, 1))
    assert [size.micro_batch for size in tune.sizes] == [1, 2, 4, 8, 16]
    for size in tune.sizes:
        assert (size.status, size.peak_gib) == ("ok", pytest.approx(made_gib(size.micro_batch, 1)))
    assert (tune.choice.micro_batch, tune.choice.limited_by) == (1, "memory"), "equal speeds"


@pytest.mark.parametrize(
    ("budget_s", "limited_by", "sizes"),
    [(60.0, "memory", [1, 2, 4, 8, 16]), (12.0, "memory", [4, 8, 16]), (4.0, "budget", [1, 2, 4])],
)
def test_a_search_keeps_to_its_budget(tmp_path: Path, budget_s, limited_by, sizes) -> None:
    logged: list[str] = []
    tune = searched(runner(MadeRunner, tmp_path), logged.append, budget_s=budget_s)
    assert tune.choice.limited_by == limited_by
    assert [size.micro_batch for size in tune.sizes] == sizes
    assert [trial.micro_batch for trial in tune.trials][: len(sizes)] == sizes, "sizes ascend"
    assert {trial.samples for trial in tune.trials} == {2 * sizes[-1]}
    assert tune.seconds <= budget_s + 1.0, "at most a start-up over"
    assert len(logged) > len(tune.trials)
    assert tune.noise.verdict == ("ok" if budget_s == 60 else "inconclusive"), "no time left"


@pytest.mark.parametrize(("budget_s", "timed"), [(1.9, 2), (1.0, 1), (0.5, 0)])
def test_no_trial_starts_after_one_and_a_quarter_of_the_budget(tmp_path: Path, budget_s, timed) -> None:
    """A trial takes 1 s. The memory trial is timed itself if there is no time for another trial."""
    logged = list[str]()
    tune = searched(runner(MadeRunner, tmp_path), logged.append, budget_s=budget_s)
    assert (len(tune.memory_trials), len(tune.trials)) == (int(timed > 0), max(1, timed))
    assert tune.seconds <= 1.25 * budget_s + 1.0
    assert tune.choice.limited_by == "budget"
    assert any("the budget allows at most" in line for line in logged)


@pytest.mark.parametrize(("ranks", "most", "micro"), [(2, 32, 32), (1, 64, 32), (1, 32, 32)])
def test_two_batches_are_compared_for_the_noise_scale(tmp_path: Path, ranks, most, micro) -> None:
    """A single replica whose micro batch is the global batch uses the next smaller micro batch."""
    sizes, runs = tuple(2**k for k in range(most.bit_length())), runner(PreferringRunner, tmp_path)
    tune = searched(runs, ranks=ranks, sizes=sizes, limit_gib=None)
    assert (tune.choice.micro_batch, tune.choice.limited_by) == (most, "global batch")
    assert runs.noise_batch == (64, micro)
    assert (tune.noise.noise_scale, tune.noise.interval, tune.noise.steps) == (100.0, [80.0, 130.0], 390)


@pytest.mark.parametrize(
    ("kind", "status", "code"), [(MadeRunner, "complete", 0), (FailingRunner, "failed", 1)]
)
def test_the_result_records_the_search_and_its_outcome(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Runner], status: str, code: int
) -> None:
    monkeypatch.setattr("launcher.job.prepare_data", lambda config: shards)
    made = runner(kind, tmp_path)
    monkeypatch.setattr(batch.trials, "runner", lambda *_, **options: contextlib.nullcontext(made))
    given = config().model_copy(update={"parallel": config().parallel.model_copy(update={"tensor": 2})})
    two = spec_of(given, limit_gib=2.0, budget_s=500.0)
    tune, exit_code = batch.measure(two, batch.output_of(two, tmp_path), print)
    assert (tune.status, exit_code) == (status, code)
    assert (tune.ranks, two.dp, tune.config["parallel"]["tensor"], tune.global_batch) == (2, 1, 2, 64)
    assert tune.seconds == len(list(tmp_path.glob("trials/*")))
    assert ("rank 1: no memory" in (tune.reason or "")) == bool(code)


def test_a_size_that_is_out_of_memory_is_a_result_and_no_larger_one_runs(tmp_path: Path) -> None:
    """The formula underestimates these runs, so that 32 is the second memory trial."""
    tune = searched(runner(LosingRunner, tmp_path), limit_gib=16.0)
    (lost,) = (trial for trial in tune.trials if trial.status != "ok")
    assert (lost.micro_batch, lost.status, lost.reason) == (16, "oom", "rank 1: no memory")
    assert lost.peak_gib is None
    assert (tune.sizes[-1].micro_batch, tune.sizes[-1].status) == (16, "oom")
    assert (tune.choice.micro_batch, tune.choice.limited_by) == (1, "memory")


def test_if_no_timed_size_fits_smaller_ones_are_timed(tmp_path: Path) -> None:
    """The budget allows three sizes, and the largest ones that the memory line allows are out of memory."""
    sizes = (1, 2, 4, 8, 16, 32, 64, 128)
    tune = searched(runner(LosingRunner, tmp_path), limit_gib=16.0, budget_s=11.0, sizes=sizes)
    assert {size.micro_batch for size in tune.sizes if size.status == "ok"} <= {1, 2, 4, 8}
    assert tune.choice is not None


def test_a_model_that_does_not_fit_is_refused_with_its_peak(tmp_path: Path) -> None:
    with pytest.raises(TrialsFailed, match=r"micro batch 1 .*0\.92 GiB"):
        searched(runner(MadeRunner, tmp_path), limit_gib=1.0)


@pytest.mark.parametrize(
    ("peaks", "status"), [([0.5, 0.9], "ok"), ([0.5, 1.1], "over"), ([1.1, 0.5], "over")]
)
def test_one_rank_over_its_limit_rejects_the_size(peaks: list[float], status: str) -> None:
    search = BatchSearch(spec_of(config(2), sizes=(1,), limit_gib=1.0), runner(Runner, Path()), print)
    trial = search._add(tune_fixture.timed_trial(1, 0, 0.1, peaks_gib=peaks), search.trials)
    assert search.trials == [trial]
    assert (trial.status, "1.10 GiB" in (trial.reason or "")) == (status, status == "over")


@pytest.mark.parametrize(
    ("changes", "guard", "warm_up"),
    [({}, 2 * GIB, 3), ({"limit_gib": None}, None, 3), ({"on_gpu": True}, None, 10)],
)
def test_a_trial_keeps_the_users_settings_and_a_cpu_rank_its_limit(
    tmp_path: Path, changes: dict[str, Any], guard: int | None, warm_up: int
) -> None:
    """On CPU ranks, allocations fail 1 GiB above the limit. A GPU is limited by its own memory."""
    noisy = make_config("log.noise_scale=true", "batch.global_size=8")
    spec = spec_of(noisy, **changes)
    trial = BatchSearch(spec, runner(Runner, tmp_path), print).trial("t", 2, 8, 4)
    assert (trial.config.model, trial.config.optim) == (noisy.model, noisy.optim)
    assert (trial.config.batch.micro_size, trial.config.batch.global_size) == (2, 8)
    assert (trial.config.log.step_times, trial.config.log.noise_scale) == (True, False)
    assert (trial.data_bytes, spec.warm_up) == (guard, warm_up)


@pytest.mark.parametrize(("budget_s", "taken"), [(60.0, True), (120.0, True), (30.0, False)])
def test_a_search_resumes_only_with_a_larger_budget(tmp_path: Path, budget_s: float, taken: bool) -> None:
    """An unsettled search advises a larger budget."""
    results.write(tmp_path / PLAN, batch.output_of(spec_of(config(8)), tmp_path).plan)
    output = batch.output_of(spec_of(config(8), budget_s=budget_s), tmp_path)
    assert (output.issues() == []) == taken


MACHINE = {"gpus": [], "cpu_model": "a CPU", "affinity_cores": 2, "versions": {"torch": "2"}}


def key(given: Config, machine: dict[str, Any] = MACHINE, **changes: Any) -> str:
    return batch.cache_key(spec_of(given, **{"precision": given.precision, **changes}), MACHINE | machine)


def test_the_cache_key_follows_only_what_affects_the_speed() -> None:
    base = key(config())
    decides = ["optim.name=lamb", "log.noise_scale=true", "objective.mask_rate=0.3", "model.num_layers=3"]
    decides += ["run.deterministic=true", "data.workers=3", "compile=on", "precision=fp64"]
    decides += ["data.sequence_length=64", "batch.global_size=128"]
    for setting in (*decides, "optim.lr=0.5", "run.seed=3", "schedule.steps=9", "batch.micro_size=4"):
        settings = ["precision=fp32", "batch.micro_size=1", "batch.global_size=64", setting]
        assert (key(make_config(*settings)) != base) == (setting in decides), setting
    for machine in ({"versions": {"torch": "3"}}, {"cpu_model": "another"}):
        assert key(config(), machine) != base
    for changes in ({"launcher": "accelerate"}, {"ranks": 1}):
        assert key(config(), **changes) != base, changes
    assert key(config(), limit_gib=2.0) == base, "the limit is checked after the look-up"
    cards = [{"name": "A", "driver": "1", "memory_gib": 80.0, "index": k} for k in range(2)]
    kinds: list[dict[str, Any]] = [{}, {"name": "B"}, {"driver": "2"}]
    machines = [{"gpus": [{**card, **change} for card in cards]} for change in kinds]
    assert len({key(config(), machine) for machine in machines}) == 3


@pytest.mark.parametrize(
    ("changes", "limit_gib", "valid"),
    [
        ({}, 5.0, True),
        ({}, None, True),
        ({}, 3.9, False),  # no longer fits
        ({}, 5.6, False),  # a larger size would fit
        ({}, 5.4, True),  # hardly more memory
        ({"choice": None}, 5.0, False),
        ({"status": "partial"}, 5.0, False),
        ({"memory_limit_gib": None}, 5.0, False),
        ({"choice": tune_fixture.batch()["choice"]}, 50.0, True),  # not limited by memory
    ],
)
def test_a_cached_choice_is_valid_while_no_larger_one_fits(changes, limit_gib, valid) -> None:
    assert batch.is_still_valid(found(**changes), limit_gib) == valid
