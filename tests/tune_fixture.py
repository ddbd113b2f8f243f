"""Make tune.json of both searches with invented numbers."""

from typing import Any

from bert_dp.files.models import NoiseScale
from launcher import results
from launcher.run.trials import SearchOutcome
from launcher.tune import lr_search
from launcher.tune.batch import BatchOptions, BatchSearch, BatchSearchSpec
from launcher.tune.lr_search import LrOptions, LrTrial, RangeTest, Rung, TuneLr
from launcher.tune.throughput import BatchTrial, MemoryLine
from tests.helpers import make_config
from tests.scaling_fixture import ENVIRONMENT

DECLARED = 16  # sequences
SIZES = (2, 4, 8)
STEP_S = {2: (0.12, 0.13), 4: (0.1, 0.11), 8: (0.08, 0.078)}  # seconds per step of the runs of each size
COMMON: dict[str, Any] = {
    "date": "2026-11-24",
    "environment": ENVIRONMENT,
    "config_hash": make_config().hash(),
    "config": make_config().model_dump(mode="json"),
    "data_hash": "d" * 16,
}


def timed_trial(micro: int, number: int, step_s: float, **changes: Any) -> BatchTrial:
    """Return a trial with five steps of the declared batch on two ranks."""
    steps, peak_gib = [step_s * (1 + 0.01 * k) for k in range(-2, 3)], 0.2 + 0.0125 * micro
    trial = BatchTrial(
        name=f"micro-{micro}-r{number}",
        micro_batch=micro,
        samples=DECLARED,
        seconds=5.0,
        status="ok",
        peaks_gib=[peak_gib, peak_gib - 0.01],
        step_s=steps,
        forward_backward_s=[0.8 * s for s in steps],
        data_wait_s=[0.0] * len(steps),
    )
    return trial.model_copy(update=changes)


def batch(*, inconclusive: str = "", **changes: Any) -> dict[str, Any]:
    """Return tune.json with a choice between three sizes and a noise scale, or the reason why the noise scale
    is `inconclusive`. `changes` replace whole entries."""
    config = make_config(batch={"global_size": DECLARED, "micro_size": 8})
    spec = BatchSearchSpec(config, BatchOptions("2", 60.0, 0.5, "torchrun"), 2, SIZES, 0.5, False, "fp32")
    no_runs: Any = None
    search = BatchSearch(spec, no_runs, print)
    search.sizes, search.used_s = list(SIZES), 41.5
    search.memory_trials = [timed_trial(m, 0, 0.1) for m in (2, 4)]
    search.trials = [timed_trial(m, k, s) for m, each in STEP_S.items() for k, s in enumerate(each)]
    search.line = MemoryLine(intercept_gib=0.2, gib_per_sequence=0.0125)
    search.noise = NoiseScale(verdict="ok", steps=170, noise_scale=310.0, interval=[255.0, 391.0])
    if inconclusive:
        search.noise = NoiseScale(verdict="inconclusive", reason=inconclusive)
    found = search.result(SearchOutcome("complete"), {"command": ["bert-dp", "tune", "batch"]})
    return {**results.plain(found), **COMMON, **changes}


def unmeasured() -> dict[str, Any]:
    """Return tune.json of a micro batch search that was stopped before its first trial ended."""
    nothing = {"choice": None, "noise": None, "seconds": None, "memory_limit_gib": None, "memory_line": None}
    return batch(status="partial", memory_trials=[], sizes=[], trials=[], **nothing)


def trial(lr: float, seed: int, tokens: int, loss: float | None) -> LrTrial:
    status, reason = ("ok", None) if loss is not None else ("diverged", "5 steps in a row were skipped")
    facts: dict[str, Any] = {"status": status, "reason": reason, "heldout_loss": loss}
    return LrTrial(name=f"lr-{lr:g}-t{tokens}-s{seed}", lr=lr, seed=seed, tokens=tokens, seconds=2.5, **facts)


def lr(**changes: Any) -> dict[str, Any]:
    """Return tune.json with two rungs, a diverged rate and a finalist of one seed, updated by `changes`."""
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
        range_test=RangeTest(points=points, edge=0.3, reason="the loss rose 4 nats"),
        rungs=rungs,
        choice=lr_search.choose_rate(rungs),
    )
    return {**results.plain(tune), **changes}
