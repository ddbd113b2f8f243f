"""Record the searches of this commit on the simulated curves: python tests/record_searches.py FILE."""

# ruff: noqa
# mypy: ignore-errors
import json, sys, statistics, random, dataclasses
from types import SimpleNamespace
from pathlib import Path

sys.path.insert(0, ".")
from bert_dp.cost import GIB
from tests import simulated_searches as sim
from tests.helpers import make_config, TINY_MODEL
from launcher.results import *
from launcher.run.trials import Outcome, TrialsFailed
from launcher.tune import batch_trials, batch_search, batch_memory, rate_search, rate_trials, ladder
from launcher.tune.batch_trials import BatchTrials, Question, Measured
from launcher.tune.batch_search import BatchSearch


def old_batch(c):
    over = []
    runs_of = {}

    def trial(self, name, micro, samples, steps, *, noise=False):
        return SimpleNamespace(name=name, micro=micro, samples=samples, steps=steps)

    def measure(self, t, warm_up):
        timed_run = t.name.startswith("micro-")
        k = runs_of.get(t.micro, 0) if timed_run else 1000 + len(over)
        if timed_run:
            runs_of[t.micro] = k + 1
        steps = c.steps(min(c.sizes, key=lambda m: abs(m - t.micro)), t.samples, t.steps, k)
        peak = c.peak_gib(t.micro)
        seconds = c.startup_s + sum(s for s, _ in steps)
        self.used_s += seconds
        if not c.fits(t.micro):
            over.append(t.micro)
            if peak > c.limit_gib + 1:
                return Measured(seconds, "oom", "oom", "device_memory", [])
        run = TimedRun(
            name=t.name,
            step_s=[s for s, _ in steps][warm_up:],
            forward_backward_s=[p for _, p in steps][warm_up:],
            peak_gib=[peak],
        )
        status, why = self._judge(run)
        return Measured(seconds, status, why, None, run.peak_gib, run)

    BatchTrials.trial, BatchTrials.measure = trial, measure
    err = random.Random(f"line {c.index}").uniform(0.97, 1.03)
    BatchTrials.count_memory = lambda self: MemoryLineFile(
        intercept_bytes=0, bytes_per_sequence=c.gib_per_sequence * GIB * err
    )
    config = make_config(
        "precision=fp32",
        model=TINY_MODEL,
        data={"sequence_length": 16},
        batch={"global_size": c.global_size, "micro_size": 1},
    )
    q = Question(config, c.dp, c.sizes, c.budget_s, c.limit_gib, "--memory", "torchrun", False, "fp32")
    s = BatchSearch(q, None, lambda line: None)
    try:
        s._measure(s._memory.run())
    except TrialsFailed as e:
        return None, over, runs_of, s
    ch = s.choice()
    return (ch.micro_batch if ch else None), over, runs_of, s


losses, equal, nruns, overs, failed = [], [], [], 0, 0
for i in range(sim.CURVES):
    c = sim.throughput_curve(i)
    micro, over, runs_of, s = old_batch(c)
    n = sum(runs_of.values())
    if micro is None:
        failed += 1
        losses.append(1.0)
        equal.append(c.loss(c.equally_often(8, 20, c.global_size)))
        continue
    steps = round(statistics.fmean(len(r.step_s) for z in s._sizes.values() for r in z.runs))
    losses.append(max(0.0, c.loss(micro)))
    equal.append(c.loss(c.equally_often(n, steps, s._samples)))
    nruns.append(n)
    overs += len(over)
print(
    "old batch",
    sim.quality(losses, 0.03),
    "equal",
    sim.quality(equal, 0.03),
    "runs",
    statistics.fmean(nruns),
    "over",
    overs,
    "failed",
    failed,
)
by = {}
for i, (a, b) in enumerate(zip(losses, equal)):
    by.setdefault(sim.SHAPES[i % 5], []).append((a <= 0.03, b <= 0.03))
print({k: (sum(a for a, _ in v), sum(b for _, b in v)) for k, v in by.items()})
BATCH = {
    "old": sim.quality(losses, 0.03),
    "equal": sim.quality(equal, 0.03),
    "runs": round(statistics.fmean(nruns), 2),
    "above_limit": overs,
}

WHOLE = 1600 * 128


def old_lr(c):
    config = make_config(
        model=TINY_MODEL,
        data={"sequence_length": 16},
        batch={"global_size": 8, "micro_size": 2},
        schedule={"steps": 1600},
    )
    q = rate_search.Question(config, LrOptions(), 1, Path("/x"), c.unigram, 2, "fp32")
    plan = SimpleNamespace(plan=SimpleNamespace(tokens=None, tokens_why=None))

    def save(**more):
        plan.plan.__dict__.update(more)

    plan.save = save

    class Runs:
        out = Path("/x")

        def run_one(self, t):
            return Outcome("ok", 10.0)

        def run(self, ts):
            for t in ts:
                yield t, Outcome("ok", 10.0)

    def read_trial(t, outcome):
        lr, seed, tokens = float(t.config.optim.lr), t.config.run.seed, t.config.schedule.tokens
        loss = c.loss(lr, tokens / WHOLE, seed)
        return LrTrial(
            trial=t.name,
            lr=lr,
            weight_decay=0.01,
            optimizer="adamw",
            seed=seed,
            status="ok" if loss is not None else "diverged",
            cause=None if loss is not None else "x",
            heldout_loss=loss,
            tokens=tokens,
        )

    rate_search.earlier_outcome = lambda t: None
    rate_trials.read_trial = read_trial
    rate_trials.range_points = lambda d: c.range_points(100)
    rate_search.read_summary = lambda d: None
    s = rate_search.RateSearch(q, Runs(), plan, lambda line: None)
    try:
        s.run()
    except TrialsFailed:
        return None, s
    ch = ladder.choose(s.rungs)
    return (ch.lr if ch else None), s


gaps, ntr = [], []
for i in range(sim.CURVES):
    c = sim.loss_curve(i)
    lr, s = old_lr(c)
    if lr is None:
        gaps.append(9.0)
        continue
    top = ladder.first_ladder(s.range_test, 5)[0]
    gaps.append(c.gap(lr, sim.ladder(top)))
    ntr.append(sum(len(r.trials) for r in s.rungs))
print("old lr", sim.quality(gaps, 0.02), statistics.fmean(ntr), sum(g == 9 for g in gaps))
LR = {"old": sim.quality(gaps, 0.02), "trials": round(statistics.fmean(ntr), 2)}
Path(sys.argv[1]).write_text(json.dumps({"curves": sim.CURVES, "batch": BATCH, "lr": LR}, indent=1) + "\n")
