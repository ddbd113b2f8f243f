"""A search of the learning rate as a Report, from tune.json, partial or whole."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path

from launcher.report.model import (
    Axis,
    Cell,
    Column,
    Figure,
    Line,
    Mark,
    Report,
    Row,
    Rule,
    Section,
    Table,
    Tile,
    Verdict,
)
from launcher.report.numbers import (
    NA,
    count_of,
    format_count,
    format_duration,
    format_interval,
    format_lr,
    format_nats,
    format_percent,
    format_ratio,
    format_si,
)
from launcher.report.parts import cell
from launcher.report.quantities import Quantity, table
from launcher.results import LrChoice, LrTrial, RangeTest, Rung, Transfer, TrialStatus, TuneLr
from launcher.tune.search_report import ends, settings_sections, subtitle, use

CEILING = 1.5  # times the first loss of a range test: what lies above is drawn there
MANY_RATES = 8  # above, their ticks are round numbers
LOSS = "held-out loss (nats per masked token)"
LOST: dict[TrialStatus, str] = {"diverged": "diverged", "oom": "out of memory", "failed": "failed"}
TRIAL = (
    Quantity("optimizer", "optimizer", "word"),
    Quantity("weight_decay", "weight decay"),
    Quantity("lr", "learning rate", "lr"),
    Quantity("seed", "seed", "count"),
    Quantity("status", "status", "word"),
    Quantity("heldout_loss", "held-out loss", "nats"),
    Quantity("tokens", "tokens"),
    Quantity("seconds", "time", "duration"),
)
RULE = (
    Quantity("for_", "for", "word"),
    Quantity("lr", "learning rate", "lr"),
    Quantity("equation", "equation", "word"),
    Quantity("beta1", "beta1"),
    Quantity("beta2", "beta2"),
    Quantity("eps", "eps", "lr"),
    Quantity("source", "source", "word"),
)
SETTINGS = (
    Quantity("ranks", "ranks of a trial", "count"),
    Quantity("at_a_time", "trials at a time", "count"),
    Quantity("cost.trials", "trials", "count"),
    Quantity("seconds", "time", "duration"),
    Quantity("cost.tokens", "tokens trained"),
    Quantity("cost.grid_tokens", "tokens of the full grid"),
    Quantity("unigram_entropy_nats", "unigram entropy", "nats"),
)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """The trials of one rung that differ by seed alone. `label` tells it from the others of the search."""

    key: tuple[str, float, float]
    """Optimizer, weight decay, rate."""
    label: str
    trials: Sequence[LrTrial]

    @property
    def lr(self) -> float:
        return self.key[2]

    @property
    def losses(self) -> list[float]:
        """Of the seeds that ended well."""
        return [t.heldout_loss for t in self.trials if t.status == "ok" and t.heldout_loss is not None]

    @property
    def mean(self) -> float | None:
        """None unless every seed has a loss."""
        whole = self.losses and len(self.losses) == len(self.trials)
        return statistics.fmean(self.losses) if whole else None


def rate_report(tune: TuneLr, folder: Path) -> Report:
    """The choice, figures and every trial. `folder` holds tune.json."""
    final, cost = _last(tune), tune.cost
    longest = format_si(final and final.tokens, "tokens")
    method = [
        f"range test, {count_of(len(tune.rungs), 'rung')} up to {longest}",
        f"{format_count(cost and cost.trials)} trials in {format_duration(tune.seconds)}",
    ]
    asked = tune.settings.model_dump()
    settings = [(name, value) for name, value in asked.items() if value not in (None, [], {})]
    return Report(
        "bert-dp: tuned learning rate",
        subtitle(tune, method),
        [*ends(tune), _choice(tune, folder), *_lost(tune), *_cost(tune)],
        _tiles(tune),
        [
            Section("", [by_rate(tune), range_test(tune), curves(tune)], console=False),
            Section("Last rung", tables=[_finalists(tune)]),
            Section("All trials", tables=_trials(tune), console=False),
            *([_transfer(tune.transfer)] if tune.transfer else []),
            *settings_sections(tune, SETTINGS, settings),
        ],
    )


# --- findings


def _choice(tune: TuneLr, folder: Path) -> Verdict:
    choice = tune.choice
    if choice is None:
        return Verdict("warn", f"No learning rate was chosen; the logs stand below {folder / 'trials'}.")
    text = (
        f"Learning rate {_named(choice.optimizer, choice.weight_decay, choice.lr)}: held-out loss "
        f"{format_nats(choice.heldout_loss)}, mean of {count_of(choice.seeds, 'seed')} ({_band(choice)})."
    )
    tied = ", ".join(_named(*entry) for entry in choice.tied)
    side = {"low": "lower", "high": "higher"}.get(choice.edge_side or "", "one")
    notes = [
        f"Chosen: {choice.why}." if choice.why else "",
        f"Cannot be told apart from {tied}." if tied else "",
        f"Edge of the grid: no worse rate was measured on the {side} side, so the best one may lie beyond."
        if choice.at_edge
        else "",
        use(folder),
    ]
    return Verdict("warn" if choice.at_edge else "ok", text, [note for note in notes if note])


def _lost(tune: TuneLr) -> list[Verdict]:
    """The trials without a loss, and what was left out."""
    every = [trial for rung in tune.rungs for trial in rung.trials]
    counts = {word: sum(t.status == status for t in every) for status, word in LOST.items()}
    notes = [f"{t.trial}: {t.status}: {t.cause}" for t in every if t.cause]
    verdicts = [
        Verdict("warn", f"{name} was left out: {why}") for name, why in tune.settings.left_out.items()
    ]
    if any(counts.values()):
        words_ = ", ".join(f"{format_count(n)} {word}" for word, n in counts.items() if n)
        verdicts.append(Verdict("info", f"Of {format_count(len(every))} trials: {words_}.", notes))
    return verdicts


def _cost(tune: TuneLr) -> list[Verdict]:
    if tune.cost is None or not tune.cost.grid_tokens:
        return []
    share = f"{format_percent(tune.cost.tokens / tune.cost.grid_tokens)} of the full grid's"
    text = f"Trained {format_si(tune.cost.tokens, 'tokens')}, {share} {format_si(tune.cost.grid_tokens)}."
    return [Verdict("info", text)]


def _named(optimizer: str, weight_decay: float, lr: float) -> str:
    return f"{format_lr(lr)} ({optimizer}, weight decay {format_si(weight_decay)})"


def _band(choice: LrChoice) -> str:
    return format_interval(choice.band, format_nats)


def _tiles(tune: TuneLr) -> list[Tile]:
    choice, test = tune.choice, _range_test(tune)
    band = choice.band if choice else None
    spread = format_nats(band[1] - band[0] if band else None)
    cost = tune.cost
    share = format_percent(cost.tokens / cost.grid_tokens if cost and cost.grid_tokens else None)
    return [
        Tile("Learning rate", format_lr(choice and choice.lr), f"peak; {choice.optimizer if choice else NA}"),
        Tile(
            "Held-out loss",
            format_nats(choice and choice.heldout_loss),
            f"unigram entropy {format_nats(tune.unigram_entropy_nats)}",
        ),
        Tile(
            "Spread over seeds",
            spread,
            f"{_band(choice) if choice else NA}; standard deviation {format_nats(choice and choice.sd)}",
        ),
        Tile(
            "Divergence edge",
            format_lr(test.edge) if test and test.edge is not None else "none found",
            (test and test.why) or "no range test recorded",
        ),
        Tile(
            "Tokens trained",
            format_si(cost and cost.tokens),
            f"{share} of the full grid's {format_si(cost and cost.grid_tokens)}",
        ),
    ]


# --- figures


def candidates(tune: TuneLr, rung: Rung) -> list[Candidate]:
    """Of a rung, by rate; a name has the optimizer and the weight decay as far as they differ."""
    every = [trial for each in tune.rungs for trial in each.trials]
    several = len({t.optimizer for t in every}) > 1, len({t.weight_decay for t in every}) > 1
    members: dict[tuple[str, float, float], list[LrTrial]] = {}
    for trial in rung.trials:
        members.setdefault((trial.optimizer, trial.weight_decay, trial.lr), []).append(trial)
    made = []
    for key, trials in sorted(members.items()):
        names = (key[0], f"weight decay {format_si(key[1])}")
        label = ", ".join(name for name, differs in zip(names, several, strict=True) if differs)
        made.append(Candidate(key, label, trials))
    return made


def by_rate(tune: TuneLr) -> Figure:
    """Held-out loss against the rate, a line for each rung; of the last one the seeds and their band."""
    lines: list[Line] = []
    diverged: set[float] = set()
    for rung in tune.rungs:
        each = candidates(tune, rung)
        diverged |= {c.lr for c in each if any(t.status == "diverged" for t in c.trials)}
        for label in dict.fromkeys(c.label for c in each):
            ladder = [c for c in each if c.label == label]
            several = rung is _last(tune) and any(len(c.losses) > 1 for c in ladder)
            lines += _ladder(rung, label, ladder, several, len(lines))
    known = [loss for line in lines for loss in line.values]
    if diverged and known:
        top = max(known) + 0.08 * ((max(known) - min(known)) or 1.0)
        lines.append(Line("diverged (drawn at the top)", sorted(diverged), [top] * len(diverged), 3, "marks"))
    rates = sorted({trial.lr for rung in tune.rungs for trial in rung.trials})
    x = Axis("learning rate", "lr", log=True, ticks=rates if len(rates) <= MANY_RATES else ())
    y = Axis(LOSS, "nats")
    marks = [Mark(f"chosen: {format_lr(tune.choice.lr)}", tune.choice.lr)] if tune.choice else []
    note = "Lines: mean over the seeds. Band and whiskers: least and greatest. The axis does not start at 0."
    return Figure("Held-out loss against learning rate", lines, x, y, marks=marks, note=note)


def _ladder(rung: Rung, label: str, ladder: Sequence[Candidate], several: bool, colour: int) -> list[Line]:
    seeds = count_of(len(rung.seeds) or 1, "seed")
    name = ", ".join(filter(None, [format_si(rung.tokens, "tokens"), seeds, label]))
    low = [min(c.losses, default=None) for c in ladder] if several else []
    high = [max(c.losses, default=None) for c in ladder] if several else []
    lines = [Line(name, [c.lr for c in ladder], [c.mean for c in ladder], colour, "both", low, high)]
    if several:
        points = [(c.lr, loss) for c in ladder for loss in c.losses]
        x, y = [lr for lr, _ in points], [loss for _, loss in points]
        lines.append(Line("a seed of the last rung", x, y, colour, "marks"))
    return lines


def range_test(tune: TuneLr) -> Figure:
    """Training loss while the rate rises, and where it breaks."""
    test = _range_test(tune)
    points = test.points if test else []
    ceiling = CEILING * next((loss for _, loss in points if loss is not None), 0.0)
    cut = any(loss is not None and loss > ceiling for _, loss in points)
    losses = [None if loss is None else min(loss, ceiling) for _, loss in points]
    line = Line("training loss", [lr for lr, _ in points], losses)
    edge = test.edge if test else None
    marks = [Mark(f"divergence edge: {format_lr(edge)}", edge)] if edge else []
    why = (test and test.why) or ("no edge was recorded" if edge is None else "")
    at_edge = f"edge at {format_lr(edge)}{f': {why}' if why else ''}" if edge else why
    note = f"The rate rises with every step; {at_edge}."
    note += f" Losses above {format_ratio(ceiling)} are drawn there." if cut else ""
    x, y = Axis("learning rate", "lr", log=True), Axis("training loss (nats per masked token)", "nats")
    return Figure("Range test", [line], x, y, marks=marks, note=note)


def curves(tune: TuneLr) -> Figure:
    """Held-out loss over tokens of every trial of the last rung, a colour for each candidate."""
    final = _last(tune)
    lines = [
        Line(_title(c), [t for t, _ in trial.curve], [loss for _, loss in trial.curve], index)
        for index, c in enumerate(candidates(tune, final) if final else [])
        for trial in c.trials
    ]
    entropy = tune.unigram_entropy_nats
    levels = [Rule(f"unigram entropy {format_ratio(entropy)}", entropy)] if entropy is not None else []
    note = "Every trial is a complete schedule; one line for each seed."
    title = "Learning curves of the last rung"
    return Figure(title, lines, Axis("tokens"), Axis(LOSS, "nats"), levels=levels, note=note)


def _title(candidate: Candidate) -> str:
    return ", ".join(filter(None, [format_lr(candidate.lr), candidate.label]))


def _last(tune: TuneLr) -> Rung | None:
    """The rung that decides; the longest so far where it has not begun."""
    return next((rung for rung in tune.rungs if rung.last), tune.rungs[-1] if tune.rungs else None)


def _range_test(tune: TuneLr) -> RangeTest | None:
    """Of the chosen optimizer; without a choice the first."""
    tests = [*([tune.range_test] if tune.range_test else []), *tune.other_range_tests]
    chosen = tune.choice.optimizer if tune.choice else None
    return next((test for test in tests if test.optimizer == chosen), tests[0] if tests else None)


# --- tables


def _finalists(tune: TuneLr) -> Table:
    """The candidates of the last rung, best first."""
    final, choice = _last(tune), tune.choice
    each = candidates(tune, final) if final else []
    each.sort(key=lambda c: (c.mean is None, c.mean or 0.0))
    chosen = (choice.optimizer, choice.weight_decay, choice.lr) if choice else None
    best = next((c.mean for c in each if c.key == chosen), None)
    rows = []
    for c in each:
        mark = " (chosen)" if c.key == chosen else " (tied)" if choice and c.key in choice.tied else ""
        values = [c.mean, min(c.losses, default=None), max(c.losses, default=None)]
        above = None if c.mean is None or best is None else c.mean - best
        cells = [cell(value, "nats") for value in (*values, above)]
        rows.append(Row(f"{_title(c)}{mark}", [*cells, Cell(format_count(len(c.losses)))]))
    heads = ("mean", "least", "greatest", "above", "seeds")
    return Table(rows, [Column(head) for head in heads], corner="held-out loss", empty="no trial recorded")


def _trials(tune: TuneLr) -> list[Table]:
    """Every trial, by rung, and why some have no loss."""
    tables = []
    for number, rung in enumerate(tune.rungs, 1):
        kept = ", ".join(_named(*entry) for entry in rung.kept)
        went_on = f"; went on: {kept}" if kept and not rung.last else ""
        title = f"Rung {number}: {format_si(rung.tokens, 'tokens')}{went_on}"
        tables.append(table([(t.trial, t) for t in rung.trials], TRIAL, title=title, corner="trial"))
    return tables or [Table([], empty="no trial recorded")]


def _transfer(transfer: Transfer) -> Section:
    """The rate at another global batch by the published rules."""
    before, after = format_count(transfer.from_batch), format_count(transfer.to_batch)
    rules = [
        (f"{rule.rule}{' (as configured)' if rule.rule == transfer.ours else ''}", rule)
        for rule in transfer.rules
    ]
    note = f"{format_lr(transfer.lr)} at global batch {before}, by each rule at {after}. "
    note += "The paper of sqrt also moves the betas and eps; optim.lr_scaling does not."
    title = f"Transfer from global batch {before} to {after}"
    return Section(title, tables=[table(rules, RULE, corner="rule")], notes=[note], console=False)
