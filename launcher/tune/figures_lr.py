"""What each figure of a search of the learning rate shows, as data."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from launcher import plots
from launcher.report.numbers import format_lr, format_lr_tick, format_si, number
from launcher.scaling import view
from launcher.scaling.figures import Figure
from launcher.tune.figures_batch import positive

CEILING = 1.5  # times the first loss of a range test: what lies above is drawn there
RATE = "learning rate, log scale"
LOSS = "held-out loss (nats per masked token)"

Trial = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """The trials of one rung that differ by seed alone."""

    optimizer: str
    weight_decay: float | None
    lr: float
    trials: Sequence[Trial]

    @property
    def losses(self) -> list[float]:
        """Of the seeds that ended well."""
        found = [number(t.get("heldout_loss")) for t in self.trials if t.get("status") == "ok"]
        return [loss for loss in found if loss is not None]

    @property
    def mean(self) -> float:
        """NaN unless every seed has a loss."""
        whole = self.losses and len(self.losses) == len(self.trials)
        return statistics.fmean(self.losses) if whole else math.nan

    def is_entry(self, entry: object) -> bool:
        """Whether [optimizer, weight_decay, lr] of `kept` or `tied` means this one."""
        return view.listed(entry) == [self.optimizer, self.weight_decay, self.lr]


def rungs(tune: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [rung for rung in view.listed(tune.get("rungs")) if isinstance(rung, Mapping)]


def trials(rung: Mapping[str, Any]) -> list[Trial]:
    return [trial for trial in view.listed(rung.get("trials")) if isinstance(trial, Mapping)]


def candidates(rung: Mapping[str, Any]) -> list[Candidate]:
    """Of a rung, by rate; trials without a rate are left out."""
    found: dict[tuple[str, float | None, float], list[Trial]] = {}
    for trial in trials(rung):
        rate = positive(trial, "lr")
        if rate is not None:
            key = str(trial.get("optimizer")), number(trial.get("weight_decay")), rate
            found.setdefault(key, []).append(trial)
    made = [Candidate(*key, members) for key, members in found.items()]
    return sorted(made, key=lambda c: (c.optimizer, c.weight_decay or 0.0, c.lr))


def last(tune: Mapping[str, Any]) -> Mapping[str, Any]:
    """The rung that decides; the longest so far where it has not begun."""
    found = rungs(tune)
    return next((rung for rung in found if rung.get("last") is True), found[-1] if found else {})


def ladder(tune: Mapping[str, Any], candidate: Candidate) -> str:
    """Optimizer and weight decay, as far as they differ within the search."""
    every = [c for rung in rungs(tune) for c in candidates(rung)]
    words = [candidate.optimizer] if len({c.optimizer for c in every}) > 1 else []
    if len({c.weight_decay for c in every}) > 1:
        words.append(f"weight decay {format_si(candidate.weight_decay)}")
    return ", ".join(words)


def name(tune: Mapping[str, Any], candidate: Candidate) -> str:
    """What tells it from the others of the search."""
    return ", ".join(filter(None, [format_lr(candidate.lr), ladder(tune, candidate)]))


def by_rate(tune: Mapping[str, Any]) -> Figure:
    """Held-out loss against the rate, a line for each rung; of the last one the seeds and their band."""
    series: list[plots.Series] = []
    diverged: list[float] = []
    final = last(tune)
    for rung in rungs(tune):
        found = candidates(rung)
        diverged += [c.lr for c in found if any(t.get("status") == "diverged" for t in c.trials)]
        groups: dict[str, list[Candidate]] = {}
        for candidate in found:
            groups.setdefault(ladder(tune, candidate), []).append(candidate)
        for label, members in groups.items():
            seeds = len(view.listed(rung.get("seeds"))) or 1
            told = f"{format_si(rung.get('tokens'), 'tokens')}, {seeds} seed{'' if seeds == 1 else 's'}"
            told, index = ", ".join(filter(None, [told, label])), len(series)
            many = rung is final and any(len(c.losses) > 1 for c in members)
            band = [(c.lr, min(c.losses), max(c.losses)) for c in members if c.losses] if many else []
            series.append(plots.Series(told, [(c.lr, c.mean) for c in members], index, "shaped", band))
            if many:
                dots = [(c.lr, loss) for c in members for loss in c.losses]
                series.append(
                    plots.Series("a seed of the last rung", dots, index + plots.NUM_COLOURS, "dots")
                )
    known = [loss for s in series for _, loss in s.points if math.isfinite(loss)]
    if diverged and known:
        top = max(known) + 0.08 * ((max(known) - min(known)) or 1.0)
        dots = [(rate, top) for rate in sorted(set(diverged))]
        series.append(plots.Series("diverged (drawn at the top)", dots, 14, "dots"))
    x, y = plots.Axis(RATE, format_lr_tick, log=True, pad=0.05), plots.Axis(LOSS, format_si)
    rate = positive(tune, "choice.lr")
    marks = [plots.Mark(rate, f"chosen: {format_lr(rate)}")] if rate else []
    note = "Lines: mean over the seeds. Band and whiskers: least and greatest. The axis does not start at 0."
    return Figure("Held-out loss against learning rate", series, x, y, marks=marks, note=note)


def range_test_of(tune: Mapping[str, Any]) -> Mapping[str, Any]:
    """The range test of the chosen optimizer; without a choice the first."""
    tests = [
        view.mapped(tune.get("range_test")),
        *map(view.mapped, view.listed(tune.get("other_range_tests"))),
    ]
    chosen = view.mapped(tune.get("choice")).get("optimizer")
    return next((test for test in tests if test.get("optimizer") == chosen), tests[0])


def range_test(tune: Mapping[str, Any]) -> Figure:
    """Training loss while the rate rises, and where it breaks."""
    found = range_test_of(tune)
    pairs = [
        (number(pair[0]), number(pair[1]))
        for pair in map(view.listed, view.listed(found.get("points")))
        if len(pair) == 2
    ]
    points = [
        (rate, math.nan if loss is None else loss) for rate, loss in pairs if rate is not None and rate > 0
    ]
    known = [loss for _, loss in points if math.isfinite(loss)]
    ceiling = CEILING * known[0] if known else math.inf
    cut = any(loss > ceiling for loss in known) and ceiling > 0
    if cut:
        points = [(rate, min(loss, ceiling) if math.isfinite(loss) else loss) for rate, loss in points]
    edge = positive(found, "edge")
    marks = [plots.Mark(edge, f"divergence edge: {format_lr(edge)}")] if edge else []
    note = f"The rate rises with every step; {_why(found, edge)}"
    note += f" Losses above {format_si(ceiling)} are drawn there." if cut else ""
    x, y = (
        plots.Axis(RATE, format_lr_tick, log=True),
        plots.Axis("training loss (nats per masked token)", format_si),
    )
    return Figure("Range test", [plots.Series("training loss", points, 0)], x, y, marks=marks, note=note)


def curves(tune: Mapping[str, Any]) -> Figure:
    """Held-out loss over tokens of every trial of the last rung, a colour for each candidate."""
    series = []
    for index, candidate in enumerate(candidates(last(tune))):
        for trial in candidate.trials:
            pairs = [view.listed(pair) for pair in view.listed(trial.get("curve"))]
            ends = [(number(pair[0]), number(pair[1])) for pair in pairs if len(pair) == 2]
            points = [(t, math.nan if loss is None else loss) for t, loss in ends if t is not None]
            series.append(plots.Series(name(tune, candidate), points, index))
    entropy = number(tune.get("unigram_entropy_nats"))
    levels = [plots.Level(f"unigram entropy {entropy:.2f}", entropy)] if entropy is not None else []
    x, y = plots.Axis("tokens", format_si), plots.Axis(LOSS, format_si)
    note = "Every trial is a complete schedule; one line for each seed."
    return Figure("Learning curves of the last rung", series, x, y, levels, note=note)


def _why(found: Mapping[str, Any], edge: float | None) -> str:
    why = found.get("why")
    if edge is None:
        return f"{why or 'no edge was recorded'}."
    return f"edge at {format_lr(edge)}{f': {why}' if why else ''}."
