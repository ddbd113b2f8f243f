"""The searches of `tune` on simulated curves, beside those that they replaced and beside an even allocation.

tests/simulated_searches.json is the record of the searches that they replaced on the same curves.
"""

import dataclasses
from pathlib import Path
from typing import Any

from bert_dp.files.models import NoiseScale
from launcher.run.trials import TrialsFailed
from launcher.tune import lr, lr_search
from launcher.tune.batch import BatchOptions, BatchSearch, BatchSearchSpec
from launcher.tune.lr import LrSearch, LrSearchSpec
from launcher.tune.lr_search import LrOptions, LrTrial, RangeTest, Rung
from launcher.tune.throughput import BatchTrial
from tests import simulated_searches as simulated
from tests.helpers import TINY_MODEL, make_config, read_json
from tests.simulated_searches import LossCurve, ThroughputCurve

REPLACED = read_json(Path(simulated.__file__).with_suffix(".json"))
SLACK = 5  # of 200 curves
MAX_LOSS, MAX_P95, MAX_GAP_NATS = 0.03, 0.10, 0.02
NO_CHOICE_NATS = 9.0
STEPS = 1600  # of a whole run


class SimulatedSearch(BatchSearch):
    """A search whose steps and memory follow a curve, by a memory formula that is off by up to 25 %."""

    def __init__(self, curve: ThroughputCurve):
        config = make_config(model=TINY_MODEL, batch={"global_size": curve.global_size, "micro_size": 1})
        options = BatchOptions("2", curve.budget_s, curve.limit_gib, "torchrun")
        spec = BatchSearchSpec(config, options, curve.dp, curve.sizes, curve.limit_gib, False, "fp32")
        gib = (0.8 + 0.45 * (curve.index % 7) / 6) * curve.gib_per_sequence
        object.__setattr__(spec, "formula_gib", lambda micro: gib * micro)
        no_runs: Any = None
        super().__init__(spec, no_runs, lambda line: None)
        self.curve, self.timed, self.above_limit = curve, list[tuple[int, int]](), 0
        self.run()

    def time_steps(self, name: str, micro: int, samples: int, warm_up: int, steps: int) -> BatchTrial:
        curve = self.curve
        number = 1000 if name.startswith("memory") else sum(m == micro for m, _ in self.timed)
        times = curve.steps(micro, samples, warm_up + steps, number)
        if warm_up:
            self.timed.append((micro, steps))
        self.above_limit += not curve.fits(micro)
        return BatchTrial(
            name=name,
            micro_batch=micro,
            samples=samples,
            seconds=curve.startup_s + sum(step for step, _ in times),
            status="ok",
            peaks_gib=[curve.peak_gib(micro)],
            step_s=[step for step, _ in times[warm_up:]],
            forward_backward_s=[passes for _, passes in times[warm_up:]],
            data_wait_s=[0.0] * steps,
        )

    def noise_scale(self, micro: int, steps: int) -> tuple[float, NoiseScale]:
        return 0.0, NoiseScale(verdict="inconclusive", reason="simulated")


def test_the_micro_batch_is_at_least_as_good_as_before_and_as_an_even_allocation() -> None:
    losses, even, above_limit, over_budget = list[float](), list[float](), 0, 0
    for index in range(simulated.CURVES):
        curve = simulated.throughput_curve(index)
        search = SimulatedSearch(curve)
        choice, runs = search.choice(), len(search.timed)
        assert choice is not None
        losses.append(max(0.0, curve.loss(choice.micro_batch)))
        steps = round(sum(steps for _, steps in search.timed) / runs)
        even.append(curve.loss(curve.equally_often(runs, steps, search.samples)))
        above_limit += search.above_limit
        over_budget += search.used_s > 1.05 * curve.budget_s
    found, evenly = simulated.quality(losses, MAX_LOSS), simulated.quality(even, MAX_LOSS)
    assert found["within"] >= evenly["within"]
    assert found["within"] >= REPLACED["batch"]["old"]["within"] - SLACK
    assert found["p95"] <= MAX_P95
    assert above_limit <= REPLACED["batch"]["above_limit"] / 2
    assert over_budget == 0


def test_slow_starts_do_not_carry_a_search_far_beyond_its_budget() -> None:
    for index in range(0, simulated.CURVES, 5):
        curve = simulated.throughput_curve(index)
        slow = dataclasses.replace(curve, startup_s=5 + index % 35, budget_s=60.0)
        search = SimulatedSearch(slow)
        longest_s = max(trial.seconds for trial in (*search.memory_trials, *search.trials))
        assert search.used_s <= 1.25 * 60.0 + longest_s
        assert search.choice() is not None


class SimulatedLrSearch(LrSearch):
    """Trains nothing: the losses follow a curve."""

    def __init__(self, curve: LossCurve):
        config = make_config(
            model=TINY_MODEL, batch={"global_size": 8, "micro_size": 2}, schedule={"steps": STEPS}
        )
        spec = LrSearchSpec(config, LrOptions(), 1, Path(), curve.unigram, 2, "fp32")
        no_runs: Any = None
        super().__init__(spec, no_runs, lambda line: None)
        self.curve, self.whole = curve, STEPS * lr.step_tokens(config)
        points = curve.range_points(100)
        edge, reason = lr_search.find_edge(points)
        self.test = RangeTest(points=[(rate, loss) for rate, loss, _ in points], edge=edge, reason=reason)

    def _train(self, rung: Rung, runs: Any) -> None:
        for rate, seed in runs:
            loss = self.curve.loss(rate, rung.tokens / self.whole, seed)
            status: Any = "ok" if loss is not None else "diverged"
            rung.trials.append(
                LrTrial(name="t", lr=rate, seed=seed, status=status, heldout_loss=loss, tokens=rung.tokens)
            )
        rung.trials[:] = lr_search.mark_diverged(rung.trials, self.curve.unigram)


def test_the_rate_is_at_least_as_good_as_before() -> None:
    gaps, trials = list[float](), 0
    for index in range(simulated.CURVES):
        search = SimulatedLrSearch(simulated.loss_curve(index))
        try:
            search.train_rungs(search.test, search.whole)
        except TrialsFailed:
            gaps.append(NO_CHOICE_NATS)
            continue
        choice = lr_search.choose_rate(search.rungs)
        assert choice is not None
        rates = simulated.ladder(lr_search.first_ladder(search.test, 5)[0])
        gaps.append(search.curve.gap(choice.lr, rates))
        trials += sum(len(rung.trials) for rung in search.rungs)
    found = simulated.quality(gaps, MAX_GAP_NATS)
    assert found["within"] >= REPLACED["lr"]["old"]["within"] - SLACK
    assert trials / simulated.CURVES <= 1.1 * REPLACED["lr"]["trials"]
