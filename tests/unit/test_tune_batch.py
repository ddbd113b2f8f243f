"""`tune batch` without runs: sizes, memory line, choice, goodput, cache, what trials are worth."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from bert_dp import record
from bert_dp.config import Config, ConfigError, resolve
from bert_dp.cost import GIB
from launcher import results
from launcher.output import Output
from launcher.results import BatchMemory, MemoryLineFile, SizeResult, TimedRun, TuneBatch
from launcher.run.trials import Outcome, Runner, Slot, Trial
from launcher.tune import batch, cache, curve, sizes
from launcher.tune.batch_search import BatchSearch
from launcher.tune.batch_trials import BatchTrials, Question, alloc_retries
from launcher.tune.curve import Rate
from tests import tune_fixture


def config(global_size: int = 64, **batch: Any) -> Config:
    return resolve(
        [
            {
                "data": {"sources": ["builtin"]},
                "schedule": {"steps": 9},
                "precision": "fp32",
                "batch": {"global_size": global_size, "micro_size": 1, **batch},
            }
        ]
    )


# --- sizes


def test_only_micro_batches_that_keep_the_declared_global_batch() -> None:
    assert sizes.dividing(config(48), 2) == [1, 2, 3, 4, 6, 8, 12, 24]
    assert sizes.dividing(config(48), 1)[-1] == 48
    ramped = config(64, ramp_fraction=0.5, ramp_quantum=16)
    assert sizes.dividing(ramped, 2) == [1, 2, 4, 8]
    with pytest.raises(ConfigError, match="global_size: 7 is not a multiple"):
        sizes.dividing(config(7), 2)


def test_thin_keeps_the_ends_and_even_ratios() -> None:
    every = sizes.dividing(config(2**14), 2)
    assert len(every) == 14
    kept = sizes.thin(every, 8)
    assert len(kept) == 8
    assert (kept[0], kept[-1]) == (1, 2**13)
    ratios = [b / a for a, b in itertools.pairwise(kept)]
    assert max(ratios) <= 4
    assert sizes.thin([3, 5], 8) == [3, 5]


def test_every_trial_takes_as_many_sequences_and_divides_the_declared_batch() -> None:
    chosen = [4, 6, 16]
    assert sizes.samples_per_step(chosen, 2) == 96
    assert all(96 % (micro * 2) == 0 for micro in chosen)


def test_the_memory_line_goes_through_the_measured_point_and_leaves_a_tenth_free() -> None:
    line = MemoryLineFile(intercept_bytes=2 * GIB, bytes_per_sequence=GIB / 4)
    memory = BatchMemory(limit_gib=10.0, spare=0.1, line=line)
    assert memory.predicted_gib(8) == 4.0
    memory = memory.model_copy(update={"constant_gib": 1.0})
    assert (memory.predicted_gib(8), memory.predicted_gib(16)) == (5.0, 7.0)
    most = memory.largest_size()
    assert memory.predicted_gib(most) <= 9.0 < memory.predicted_gib(most + 1)
    assert memory.model_copy(update={"limit_gib": 1.0}).largest_size() == 0


# --- the choice


def made(micro: int, rate: float, spread: float = 0.001, runs: int = 1, samples: int = 64) -> SizeResult:
    """Steps about samples / rate seconds, of which an update is a fifth."""
    step = samples / rate
    steps = [step * (1 + spread * ((i * 7) % 5 - 2)) for i in range(12)]
    run = TimedRun(name="r", step_s=steps, forward_backward_s=[0.8 * s for s in steps], peak_gib=[1.0])
    return SizeResult(micro_batch=micro, accumulation=1, status="ok", runs=[run] * runs)


def rates(**known: float) -> list[Rate]:
    return [curve.rate(made(int(name[1:]), value), 64, 64) for name, value in known.items()]


def test_the_smallest_within_three_per_cent_of_the_best() -> None:
    choice = curve.choose(rates(m4=80, m8=98, m16=100, m32=99))
    assert (choice.micro_batch, choice.best_micro_batch) == (8, 16)
    assert choice.share_of_best == pytest.approx(0.98, abs=1e-3)
    assert not choice.flat
    assert choice.not_settled == []


def test_a_flat_curve_is_said_to_be_flat() -> None:
    choice = curve.choose(rates(m1=99, m8=100, m16=98.5))
    assert choice.flat
    assert choice.micro_batch == 1
    assert "flat" in choice.why


def test_a_single_size_is_not_called_flat() -> None:
    assert not curve.choose(rates(m4=80)).flat


def test_a_size_that_may_reach_the_line_is_measured_again_and_otherwise_named() -> None:
    wide = [curve.rate(made(4, 96.5, spread=0.05), 64, 64), *rates(m8=100, m16=99)]
    assert wide[0].low < 97 < wide[0].high
    assert curve.open_sizes(wide) == [4, 8]
    assert curve.choose(wide).not_settled == [4]
    assert curve.open_sizes(rates(m4=80, m8=100, m16=99)) == []


def test_in_doubt_the_larger_micro_batch_is_chosen() -> None:
    """A median within 3 % whose interval reaches far down is no ground for a smaller one."""
    sharp, vague = (curve.rate(made(8, 98, spread), 64, 64) for spread in (0.002, 0.08))
    best = curve.rate(made(16, 100), 64, 64)
    assert vague.median >= 0.97 * best.median
    assert vague.low < 0.94 * best.median
    assert curve.choose([sharp, best]).micro_batch == 8
    assert curve.choose([vague, best]).micro_batch == 16
    assert curve.choose([vague, best]).not_settled == [8]


def test_the_interval_covers_the_rate_and_narrows_with_runs() -> None:
    one, three = (curve.rate(made(4, 100, 0.05, runs), 64, 64) for runs in (1, 3))
    assert one.low < 100 < one.high
    assert three.high - three.low < (one.high - one.low) / 2


def test_a_trial_of_fewer_sequences_counts_its_update_once() -> None:
    """A step of 64: 0.64 s, of which 0.128 s update; a step of 640 takes 10 x 0.512 + 0.128 s."""
    small = curve.rate(made(4, 100, spread=0.0), 64, 640)
    assert small.median == pytest.approx(640 / (10 * 0.512 + 0.128))


def test_a_trial_of_fewer_sequences_counts_its_reduction_once() -> None:
    """A step of 64: 0.512 s of passes, of which 0.112 s the reduction that they did not cover."""
    size = made(4, 100, spread=0.0)
    size.runs[:] = [run.model_copy(update={"exposed_s": 0.112}) for run in size.runs]
    small = curve.rate(size, 64, 640)
    assert small.median == pytest.approx(640 / (10 * 0.4 + 0.112 + 0.128))
    assert curve.parts(size) == pytest.approx((0.4, 0.64))


def test_the_spread_of_the_best_counts_as_well_as_that_of_the_smaller() -> None:
    sharp = curve.rate(made(8, 98, 0.002), 64, 64)
    vague = curve.rate(made(16, 100, 0.08), 64, 64)
    assert curve.choose([sharp, vague]).micro_batch == 16
    assert curve.choose([sharp, vague]).not_settled == [8]
    assert curve.open_sizes([sharp, vague]) == [8, 16]


# --- goodput


def test_goodput_is_throughput_times_what_a_sequence_is_worth() -> None:
    found = curve.goodput(
        micro_s=0.1,
        update_s=0.1,
        per_pass=8,
        global_size=64,
        noise=200.0,
        interval=[100.0, 400.0],
        sizes=[8, 16, 32, 64, 128, 256],
    )
    by_size = {point.global_batch: point for point in found.points}
    assert by_size[64].efficiency == 1.0
    assert by_size[64].goodput == by_size[64].samples_per_s == pytest.approx(64 / 0.9)
    assert by_size[128].efficiency == pytest.approx(264 / 328)
    for size, point in by_size.items():  # maximum of B / (B x 0.0125 + 0.1) / (B + 200): B = sqrt(1600)
        assert point.low <= point.goodput <= point.high, size
    assert found.recommended == 32
    assert found.recommended_interval == [32, 64]
    assert not found.at_edge
    cut = curve.goodput(
        micro_s=0.1,
        update_s=0.1,
        per_pass=8,
        global_size=64,
        noise=200.0,
        interval=[100.0, 400.0],
        sizes=[32, 64, 128],
    )
    assert (cut.recommended, cut.at_edge) == (32, True)
    assert found.gain == pytest.approx(by_size[32].goodput / by_size[64].goodput - 1)


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
    return kind(out, out, [Slot()], [], launcher="torchrun", on_gpu=False, log=lambda line: None)


def made_gib(micro: int, rank: int) -> float:
    return 0.5 + 0.02 * micro + 0.4 * rank


def test_a_search_goes_by_the_rank_that_takes_most(tmp_path: Path) -> None:
    """Of 1.6 GiB a tenth is spare: 27 sequences fit beside 0.9 GiB, 47 would beside the 0.5 of rank 0."""
    line = {"intercept_bytes": 0, "bytes_per_sequence": 0.02 * GIB, "parts": {}}
    (tmp_path / "memory_line.json").write_text(json.dumps(line))
    question = Question(
        config(64), 2, (1, 2, 4, 8, 16, 32), 600.0, 1.6, "--memory", "torchrun", False, "fp32"
    )
    search = BatchSearch(question, tmp_path, runner(MadeRunner, tmp_path), lambda line: None)
    search.run()
    memory = search.memory
    assert (memory.predicted_limit, memory.verified) == (27, 27)
    for tried in memory.tried:
        assert tried.rank == 1
        assert tried.measured_gib == pytest.approx(made_gib(tried.micro_batch, 1))
    assert [size.micro_batch for size in search.size_results()] == [1, 2, 4, 8, 16]
    assert all(size.status == "ok" for size in search.size_results())
    for size in search.size_results():
        assert size.measured_gib == pytest.approx(made_gib(size.micro_batch, 1))


@pytest.mark.parametrize(
    ("peaks", "retries", "status"),
    [([0.5, 0.9], 0, "ok"), ([0.5, 1.1], 0, "over"), ([0.5, 0.9], 3, "thrash"), ([0.5, 0.9], None, "ok")],
)
def test_one_rank_over_its_limit_or_a_thrashing_allocator_rejects_the_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, peaks: list[float], retries: int | None, status: str
) -> None:
    question = Question(config(8), 2, (1, 2), 60.0, 1.0, "--memory", "torchrun", False, "fp32")
    batches = BatchTrials(question, tmp_path, runner(Runner, tmp_path))
    trial = batches.trial("t", 2, 8, 4)
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
        write_steps(trial.directory, lines, rank)
    monkeypatch.setattr(Runner, "run_one", lambda self, trial: Outcome("ok", 2.0))
    measured = batches.measure(trial, 1)
    assert measured.status == status
    assert (measured.peak_gib, batches.used_s) == (peaks, 2.0)
    assert measured.run is not None
    assert len(measured.run.step_s) == 3
    if status == "over":
        assert "1.10 GiB is above the 1.00 GiB" in measured.why


def test_a_trial_keeps_the_users_settings_and_saves_nothing(tmp_path: Path) -> None:
    noisy = resolve([config(8).model_dump(mode="json"), {"log": {"noise_scale": True}}])
    question = Question(noisy, 2, (1, 2), 60.0, 1.0, "--memory", "torchrun", False, "fp32")
    trial = BatchTrials(question, tmp_path, runner(Runner, tmp_path)).trial("t", 2, 8, 4)
    assert trial.config.model == question.config.model
    assert trial.config.optim == question.config.optim
    assert (trial.config.batch.micro_size, trial.config.batch.global_size) == (2, 8)
    assert trial.config.checkpoint.keep == 0
    assert trial.config.log.step_times
    assert not trial.config.log.noise_scale
    assert trial.data_bytes == 2 * GIB, "an allocation fails a gibibyte above the limit"


@pytest.mark.parametrize(("budget_s", "taken"), [(60.0, True), (120.0, True), (30.0, False)])
def test_a_search_goes_on_with_a_greater_budget_only(tmp_path: Path, budget_s: float, taken: bool) -> None:
    """A search that could not settle its choice advises one."""
    question = Question(config(8), 2, (1, 2), 60.0, 1.0, "--memory", "torchrun", False, "fp32")
    results.write(tmp_path / batch.PLAN, batch.plan_of(question))
    plan = batch.plan_of(dataclasses.replace(question, budget_s=budget_s))
    output = Output(tmp_path, "search", batch.PLAN, plan, batch.FIXED, batch.GROWS)
    assert (output.issues() == []) == taken


# --- the cache

MACHINE = {"gpus": [], "cpu_model": "a CPU", "affinity_cores": 2, "versions": {"torch": "2"}}


def key(settings: Config, machine: dict[str, Any] | None = None, ranks: int = 2) -> str:
    question = Question(
        settings, ranks, (1,), 60.0, 4.0, "this machine", "torchrun", False, settings.precision
    )
    return cache.key(question, machine or MACHINE)


def test_the_key_follows_all_that_decides_and_nothing_else() -> None:
    base = key(config())
    assert key(config(micro_size=4)) == base
    for name, value in (("precision", "bf16"), ("compile", "on")):
        assert key(config().model_copy(update={name: value})) != base
    assert key(config(), {**MACHINE, "versions": {"torch": "3"}}) != base
    assert key(config(), {**MACHINE, "cpu_model": "another"}) != base
    assert key(config(), ranks=1) != base
    assert key(config(128)) != base
    longer = config().data.model_copy(update={"sequence_length": 512})
    assert key(config().model_copy(update={"data": longer})) != base


def test_what_the_cache_answers_trains_the_users_own_configuration() -> None:
    mine = config(64).model_copy(update={"optim": config().optim.model_copy(update={"lr": 7e-5})})
    question = Question(mine, 2, (1, 2), 60.0, None, "", "torchrun", False, "fp32")
    known = TuneBatch.model_validate(
        tune_fixture.batch(config_hash="of another", config={}) | {"choice": chosen(2)}
    )
    found = batch.from_cache(known, question)
    assert found.cached
    assert found.config["optim"]["lr"] == 7e-5
    assert (found.noise, found.goodput) == (None, None), "of other data or weights"
    assert found.choice == known.choice
    same = known.model_copy(update={"config_hash": mine.hash()})
    assert batch.from_cache(same, question).noise == known.noise


def chosen(micro: int) -> dict[str, Any]:
    return tune_fixture.batch()["choice"] | {"micro_batch": micro}


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
