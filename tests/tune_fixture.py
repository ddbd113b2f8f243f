"""tune.json of both searches, made up."""

from __future__ import annotations

from typing import Any

from bert_dp.files.models import NoiseScale
from launcher import results
from launcher.tune import lr_search, throughput
from launcher.tune.lr_search import LrOptions, LrTrial, RangeTest, Rung, TuneLr
from launcher.tune.throughput import (
    BatchChoice,
    BatchMemory,
    MemoryLine,
    MemoryTrial,
    SizeResult,
    TimedRun,
    TuneBatch,
)
from tests.helpers import make_config
from tests.scaling_fixture import ENVIRONMENT

NOISE, DECLARED, DP = 310.0, 16, 2  # sequences
INTERVAL = [255.0, 391.0]
STEP_S = {2: (0.12, 0.13), 4: (0.1, 0.11), 8: (0.08, 0.078)}  # of the runs of each size
TOO_LARGE = 12
COMMON: dict[str, Any] = {
    "date": "2026-11-24",
    "environment": ENVIRONMENT,
    "config_hash": make_config().hash(),
    "config": make_config().model_dump(mode="json"),
    "data_hash": "d" * 16,
}


def timed_run(name: str, step_s: float, peak_gib: float = 0.25) -> TimedRun:
    steps = [step_s * (1 + 0.01 * k) for k in range(-2, 3)]
    return TimedRun(
        name=name,
        step_s=steps,
        forward_backward_s=[0.8 * s for s in steps],
        data_wait_s=[0.0] * len(steps),
        peak_gib=[peak_gib, peak_gib - 0.01],
    )


def batch(*, inconclusive: str = "", **changes: Any) -> dict[str, Any]:
    """A choice between three sizes, one that is too large, a noise scale or why it is `inconclusive`.
    `changes` replace whole entries."""
    peaks = {micro: 0.2 + 0.0125 * micro for micro in STEP_S}
    runs = {m: [timed_run(f"micro-{m}-r{k}", s, peaks[m]) for k, s in enumerate(STEP_S[m])] for m in STEP_S}
    rates = {m: [throughput.run_rate(run, DECLARED, DECLARED) for run in each] for m, each in runs.items()}
    means = {m: throughput.mean_rate(rates, m) for m in rates}
    sizes = [
        SizeResult(
            micro_batch=m,
            accumulation=DECLARED // m // DP,
            samples_per_s=means[m],
            samples_per_s_ci95=throughput.rate_interval(rates, m),
            relative=means[m] / max(means.values()),
            measured_gib=peaks[m],
            runs=runs[m],
        )
        for m in runs
    ]
    trials = [MemoryTrial(micro_batch=m, status="ok", peak_gib=gib) for m, gib in peaks.items()]
    noise = NoiseScale(verdict="inconclusive", reason=inconclusive)
    if not inconclusive:
        estimate: dict[str, Any] = {
            "noise_scale": NOISE,
            "interval": INTERVAL,
            "trace": 0.62,
            "grad_sq": 0.002,
        }
        noise = NoiseScale(verdict="ok", steps=170, **estimate)
    tune = TuneBatch(
        **COMMON,
        command=["bert-dp", "tune", "batch"],
        seconds=41.5,
        ranks=2,
        global_batch=DECLARED,
        memory=BatchMemory(
            limit_gib=0.5,
            line=MemoryLine(intercept_gib=0.2, gib_per_sequence=0.0125),
            trials=[*trials, MemoryTrial(micro_batch=TOO_LARGE, status="oom", peak_gib=None)],
        ),
        sizes=sizes,
        order=[2, 4, 8, 8, 4, 2],
        trial_samples=DECLARED,
        choice=BatchChoice(
            micro_batch=8,
            accumulation=1,
            samples_per_s=means[8],
            fastest_micro_batch=8,
            share_of_best=1.0,
            not_settled=[],
            limited_by="global batch",
        ),
        noise=noise,
    )
    return {**results.plain(tune), **changes}


def unmeasured() -> dict[str, Any]:
    """A search of the micro batch that was stopped before its first trial ended."""
    none = dict.fromkeys(("choice", "noise", "seconds"))
    return batch(status="partial", memory={}, sizes=[], order=[], trial_samples=0, **none)


def trial(lr: float, seed: int, tokens: int, loss: float | None) -> LrTrial:
    status, cause = ("ok", None) if loss is not None else ("diverged", "5 steps in a row were skipped")
    facts: dict[str, Any] = {"status": status, "cause": cause, "heldout_loss": loss}
    return LrTrial(
        trial=f"lr-{lr:g}-t{tokens}-s{seed}", lr=lr, seed=seed, tokens=tokens, seconds=2.5, **facts
    )


def lr(**changes: Any) -> dict[str, Any]:
    """Two rungs, a rate that has diverged, a finalist of one seed. `changes` replace whole entries."""
    short = [trial(0.0285, 0, 1024, 4.9111), trial(0.057, 0, 1024, 4.9032), trial(0.114, 0, 1024, None)]
    whole = [trial(0.057, 0, 8192, 4.7074), trial(0.0285, 0, 8192, 5.0091), trial(0.057, 1, 8192, 4.9367)]
    rungs = [
        Rung(tokens=1024, seeds=[0], trials=short),
        Rung(tokens=8192, seeds=[0, 1], trials=[*whole, trial(0.114, 0, 8192, None)]),
    ]
    points = [(0.001, 5.5), (0.01, 5.0), (0.1, 5.2), (0.3, 9.0), (0.4, None)]
    tune = TuneLr(
        **COMMON,
        command=["bert-dp", "tune", "lr"],
        seconds=23.0,
        ranks=1,
        settings=LrOptions(rates=3, seeds=2),
        tokens=8192,
        at_a_time=2,
        unigram_entropy_nats=5.0251,
        range_test=RangeTest(points=points, edge=0.3, reason="the loss rose 4 nats"),
        rungs=rungs,
        choice=lr_search.choose_rate(rungs),
        trained_tokens=36864,
    )
    return {**results.plain(tune), **changes}
