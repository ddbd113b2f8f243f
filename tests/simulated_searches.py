"""Simulated throughput and loss curves with the noise of real trials, for the searches of `tune`.

Every number follows from the index of the curve, the trial and the number of its run, so that two searches
that run the same trial see the same result.
"""

import dataclasses
import math
import random
from collections.abc import Mapping, Sequence

CURVES = 200
SHAPES = ("rising", "saturating", "flat", "dip", "falling")
# Standard deviations of the logarithm of a size's throughput between runs of 40 steps: the range of three
# rounds of the sweep in benchmarks/RESULTS.md, "The micro batch found beside a sweep", over 1.693. The
# intervals of its tries, of a third of a run each, put the stretches of a run at half of that.
RUN_SD = (0.110, 0.184, 0.072, 0.145, 0.013, 0.109)
STRETCH = 5  # steps that share a slow or a fast moment
STEP_SD = 0.03
UPDATE_SHARE = 0.05  # of a step of the fastest size


@dataclasses.dataclass(frozen=True)
class ThroughputCurve:
    """Throughput and memory against the micro batch, on `dp` replicas at the global batch `global_size`."""

    index: int
    shape: str
    global_size: int
    dp: int
    sizes: tuple[int, ...]
    pass_s: Mapping[int, float]
    """Micro batch -> seconds per sequence of a replica."""
    update_s: float
    run_sd: Mapping[int, float]
    startup_s: float
    budget_s: float
    constant_gib: float
    bend_sequences: float
    """Below it the peak stays as it is at this size: that of the optimizer step."""
    gib_per_sequence: float
    limit_gib: float | None

    def peak_gib(self, micro: int) -> float:
        return self.constant_gib + self.gib_per_sequence * max(micro, self.bend_sequences)

    def fits(self, micro: int, share: float = 1.0) -> bool:
        return self.limit_gib is None or self.peak_gib(micro) <= share * self.limit_gib

    def samples_per_s(self, micro: int) -> float:
        """Expected throughput of all replicas at the global batch."""
        return self.global_size / (self.pass_s[micro] * self.global_size / self.dp + self.update_s)

    def steps(self, micro: int, samples: int, count: int, run: int) -> list[tuple[float, float]]:
        """(seconds of a step, of its forward and backward passes) of the steps of run number `run`."""
        draw = random.Random(f"{self.index}/{micro}/{run}")
        sd = self.run_sd[micro]
        pace, passes = draw.gauss(0, sd), self.pass_s[micro] * samples / self.dp
        out, moment = [], 0.0
        for step in range(count):
            if step % STRETCH == 0:
                moment = draw.gauss(0, sd / 2)
            times = math.exp(pace + moment + draw.gauss(0, STEP_SD))
            out.append(((passes + self.update_s) * times, passes * times))
        return out

    def allowed(self) -> list[int]:
        """Sizes that leave a tenth of the memory free."""
        return [m for m in self.sizes if self.fits(m, 0.9)] or [self.sizes[0]]

    def loss(self, micro: int) -> float:
        """Share of the best throughput that this size loses; 1 where it does not fit."""
        best = max(self.samples_per_s(m) for m in self.allowed())
        return 1 - self.samples_per_s(micro) / best if self.fits(micro) else 1.0

    def equally_often(self, runs: int, steps: int, samples: int) -> int:
        """The size with the best mean when `runs` runs are dealt out to all sizes in turn."""
        sizes, times = self.allowed(), dict[int, list[float]]()
        for k in range(runs):
            micro = sizes[k % len(sizes)]
            timed = self.steps(micro, samples, steps, k // len(sizes))
            scale = self.global_size / samples - 1
            times.setdefault(micro, []).append(sum(s + scale * p for s, p in timed) / steps)
        return min(times, key=lambda micro: sum(times[micro]) / len(times[micro]))


def throughput_curve(index: int) -> ThroughputCurve:
    draw = random.Random(f"throughput {index}")
    shape = SHAPES[index % len(SHAPES)]
    dp, global_size = draw.choice([(2, 64), (2, 512), (4, 256), (8, 1024), (2, 96)])
    most = global_size // dp
    sizes = tuple(m for m in range(1, most + 1) if most % m == 0)
    half = draw.uniform(0.3, 4)
    power = draw.uniform(0.1, 0.4)
    dip, peak = draw.choice(sizes[len(sizes) // 2 :]), draw.choice(sizes[len(sizes) // 2 :])

    def speed(m: int) -> float:
        if shape == "rising":
            return m**power
        if shape == "flat":
            return 1 + draw.uniform(-0.01, 0.01)
        value = m / (m + half)
        if shape == "dip" and m == dip:
            value *= draw.uniform(0.7, 0.85)
        if shape == "falling" and m > peak:
            value *= (peak / m) ** draw.uniform(0.1, 0.3)
        return value

    step_s = draw.uniform(0.3, 0.8)  # of the global batch at the best size
    speeds = {m: speed(m) for m in sizes}
    top = max(speeds.values())
    pass_s = {m: (1 - UPDATE_SHARE) * step_s * dp / global_size * top / value for m, value in speeds.items()}
    constant, each, bend = draw.uniform(0.3, 2), 10 ** draw.uniform(-3, -1), draw.uniform(0, most / 8)
    limit = None
    if draw.random() < 0.5:
        limit = (constant + each * max(bend, draw.choice(sizes[len(sizes) // 3 :]))) * draw.uniform(1.12, 1.5)
    return ThroughputCurve(
        index=index,
        shape=shape,
        global_size=global_size,
        dp=dp,
        sizes=sizes,
        pass_s=pass_s,
        update_s=UPDATE_SHARE * step_s,
        run_sd={m: draw.choice(RUN_SD) for m in sizes},
        startup_s=draw.uniform(3, 8),
        budget_s=draw.choice([120.0, 180.0, 300.0]),
        constant_gib=constant,
        bend_sequences=bend,
        gib_per_sequence=each,
        limit_gib=limit,
    )


@dataclasses.dataclass(frozen=True)
class LossCurve:
    """Held-out loss against the learning rate of whole and shorter runs, which diverge above an edge."""

    index: int
    best_lr: float
    """Best rate of whole runs."""
    shift: float
    """Octaves by which runs of 1/8 of the tokens like a higher rate."""
    below: float
    """Nats per squared octave below the best rate."""
    above: float
    edge: float
    range_edge: float
    """Where the range test breaks, which is not where whole runs do; above 1: nowhere."""
    seed_sd: float
    unigram: float = 7.0

    def mean(self, lr: float, share: float = 1.0) -> float:
        """Expected loss in nats; infinite where runs diverge."""
        if lr > self.edge:
            return math.inf
        shorter = -math.log2(share)
        away = math.log2(lr / self.best_lr) - self.shift * shorter / 3
        rise = (self.below if away < 0 else self.above) * away**2
        return min(4.0 + 0.4 * shorter + rise, self.unigram + 0.2)

    def loss(self, lr: float, share: float, seed: int) -> float | None:
        """Loss of one run; None where it diverges."""
        mean = self.mean(lr, share)
        if mean == math.inf:
            return None
        common = random.Random(f"{self.index}/{share}/{seed}").gauss(0, self.seed_sd)
        own = random.Random(f"{self.index}/{lr:.6g}/{share}/{seed}").gauss(0, self.seed_sd)
        return mean + (common + own) / math.sqrt(2)

    def range_points(self, steps: int) -> list[tuple[float, float | None, int]]:
        """(rate, training loss, skipped steps) of each step of a range test."""
        draw = random.Random(f"range {self.index}")
        points: list[tuple[float, float | None, int]] = []
        for k in range(steps):
            lr = 1e-4 ** (1 - k / steps)
            loss = 7.5 + 2.0 * math.exp(-k / 25) + draw.gauss(0, 0.05)
            if lr > self.range_edge:
                loss += 2 * math.log2(lr / self.range_edge)
            points.append((lr, loss, 0))
        return points

    def gap(self, chosen: float, rates: Sequence[float]) -> float:
        """Nats by which the chosen rate is worse than the best of `rates`."""
        return self.mean(chosen) - min(self.mean(rate) for rate in rates)


def loss_curve(index: int) -> LossCurve:
    draw = random.Random(f"loss {index}")
    best = 10 ** draw.uniform(-3.5, -1.5)
    edge = best * 2 ** draw.uniform(0.7, 4)
    below = 10 ** draw.uniform(-2, -0.8)
    return LossCurve(
        index=index,
        best_lr=best,
        shift=draw.uniform(-0.3, 1.2),
        below=below,
        above=below * draw.uniform(0.7, 3),
        edge=edge,
        range_edge=2.0 if draw.random() < 0.1 else edge * 2 ** draw.uniform(-0.5, 1),
        seed_sd=10 ** draw.uniform(-2.5, -1.7),
    )


def ladder(top: float, count: int = 5, extensions: int = 3) -> list[float]:
    """Every rate that a search of `count` rates from `top` downwards could come to."""
    return [top * 2.0**-k for k in range(-extensions, count + extensions)]


def quality(losses: Sequence[float], bound: float) -> dict[str, float]:
    """Count the losses within the bound, and return their 95th percentile too."""
    return {
        "within": sum(loss <= bound for loss in losses),
        "p95": round(sorted(losses)[math.ceil(0.95 * len(losses)) - 1], 4),
    }
