"""A search of the learning rate as a Report, from tune.json, partial or whole."""

from __future__ import annotations

import math
from pathlib import Path

from bert_dp.record.models import HeldOut
from launcher.report import heldout
from launcher.report.measured import settings_sections, status_verdicts, subtitle
from launcher.report.model import Axis, Figure, Line, Mark, Report, Rule, Section, Table, Tile, Verdict
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
from launcher.report.quantities import Computed, Quantity, table
from launcher.results import RangeTest, Rung, Transfer, TrialStatus, TuneLr
from launcher.tune import FILE, ladder
from launcher.tune.search import train_command

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


def rate_report(tune: TuneLr, folder: Path) -> Report:
    """The choice, figures and every trial. `folder` holds tune.json."""
    final, cost = _last(tune), tune.cost
    longest = format_si(final.tokens or None, "tokens")
    method = [
        f"range test, {count_of(len(tune.rungs), 'rung')} up to {longest}",
        f"{count_of(cost and cost.trials, 'trial')} in {format_duration(tune.seconds)}",
    ]
    settings = [
        (name, value) for name, value in tune.settings.model_dump().items() if value not in (None, [], {})
    ]
    return Report(
        "bert-dp: tuned learning rate",
        subtitle(tune, method),
        [*status_verdicts(tune, FILE), _choice(tune, folder), *_lost(tune), *_cost(tune)],
        _tiles(tune),
        [
            Section("", [loss_figure(tune), range_figure(tune), curves_figure(tune)], console=False),
            Section("Last rung", tables=[_finalists(tune)]),
            Section("All trials", tables=_trials(tune), console=False),
            *([_transfer(tune.transfer)] if tune.transfer else []),
            *settings_sections(tune, SETTINGS, settings),
        ],
        next=train_command(folder) if tune.choice else "",
    )


# --- findings


def _choice(tune: TuneLr, folder: Path) -> Verdict:
    choice, held_out = tune.choice, _heldout(tune)
    if choice is None:
        return Verdict("warn", f"No learning rate was chosen; the logs stand below {folder / 'trials'}.")
    loss = heldout.loss_text(choice.heldout_loss, held_out, losses_of(_last(tune), choice.lr))
    text = (
        f"Learning rate {_named(choice.optimizer, choice.weight_decay, choice.lr)}: held-out loss "
        f"{loss}, mean of {count_of(choice.seeds, 'seed')} "
        f"({format_interval(choice.band, format_nats)})."
    )
    tied = ", ".join(_named(*entry) for entry in choice.tied)
    side = {"low": "lower", "high": "higher"}.get(choice.edge_side or "", "one")
    notes = [
        f"Chosen: {choice.why}." if choice.why else "",
        f"Cannot be told apart from {tied}." if tied else "",
        f"Edge of the grid: no worse rate was measured on the {side} side, so the best one may lie beyond."
        if choice.at_edge
        else "",
        heldout.too_small(held_out, _lead(tune)) or "",
    ]
    return Verdict("warn" if choice.at_edge else "ok", text, [*filter(None, notes)])


def _heldout(tune: TuneLr) -> HeldOut:
    """What the losses are measured on, with the interval of one trial of the chosen rate."""
    chosen = tune.choice.lr if tune.choice else None
    return next((t.heldout for t in _last(tune).trials if t.lr == chosen and t.heldout), HeldOut())


def _lead(tune: TuneLr) -> float | None:
    """Nats by which the chosen rate is ahead of the next one."""
    final = _last(tune)
    order = ladder.ranked(final)
    return final.mean(order[1]) - final.mean(order[0]) if len(order) > 1 else None


def _lost(tune: TuneLr) -> list[Verdict]:
    """The trials without a loss."""
    every = tune.trials
    counts = {word: sum(t.status == status for t in every) for status, word in LOST.items()}
    notes = [f"{t.trial}: {t.status}: {t.cause}" for t in every if t.cause]
    lost = ", ".join(f"{format_count(n)} {word}" for word, n in counts.items() if n)
    return [Verdict("info", f"Of {count_of(len(every), 'trial')}: {lost}.", notes)] if lost else []


def _cost(tune: TuneLr) -> list[Verdict]:
    if tune.cost is None or not tune.cost.grid_tokens:
        return []
    share = f"{format_percent(tune.cost.tokens / tune.cost.grid_tokens)} of the full grid's"
    text = f"Trained {format_si(tune.cost.tokens, 'tokens')}, {share} {format_si(tune.cost.grid_tokens)}."
    return [Verdict("info", text)]


def _named(optimizer: str, weight_decay: float, lr: float) -> str:
    return f"{format_lr(lr)} ({optimizer}, weight decay {format_si(weight_decay)})"


def _tiles(tune: TuneLr) -> list[Tile]:
    choice, test, cost = tune.choice, tune.range_test, tune.cost
    band = choice.band if choice else None
    spread = format_nats(band[1] - band[0] if band else None)
    share = format_percent(cost.tokens / cost.grid_tokens if cost and cost.grid_tokens else None)
    return [
        Tile("Learning rate", format_lr(choice and choice.lr), f"peak; {choice.optimizer if choice else NA}"),
        Tile(
            "Held-out loss",
            format_nats(choice and choice.heldout_loss),
            f"{heldout.basis(_heldout(tune))}; unigram entropy {format_nats(tune.unigram_entropy_nats)}",
        ),
        Tile(
            "Spread over seeds",
            spread,
            f"{format_interval(band, format_nats)}; standard deviation {format_nats(choice and choice.sd)}",
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


def losses_of(rung: Rung, lr: float) -> list[float]:
    """Of the seeds that ended well."""
    return [score for score in rung.scores(lr) if score < math.inf]


def mean_of(rung: Rung, lr: float) -> float | None:
    """None unless every seed has a loss."""
    mean = rung.mean(lr)
    return mean if mean < math.inf else None


def loss_figure(tune: TuneLr) -> Figure:
    """Held-out loss against the rate, a line for each rung; of the last one the seeds and their band."""
    lines: list[Line] = []
    for rung in tune.rungs:
        lines += _ladder(rung, rung is _last(tune), len(lines))
    diverged = sorted({trial.lr for trial in tune.trials if trial.status == "diverged"})
    losses = [loss for line in lines for loss in line.values]
    if diverged and losses:
        top = max(losses) + 0.08 * ((max(losses) - min(losses)) or 1.0)
        lines.append(Line("diverged (drawn at the top)", diverged, [top] * len(diverged), 3, "marks"))
    rates = sorted({trial.lr for trial in tune.trials})
    return Figure(
        "Held-out loss against learning rate",
        lines,
        Axis("learning rate", "lr", log=True, ticks=rates if len(rates) <= MANY_RATES else ()),
        Axis(LOSS, "nats"),
        marks=[Mark(f"chosen: {format_lr(tune.choice.lr)}", tune.choice.lr)] if tune.choice else [],
        note="Lines: mean over the seeds. Band and whiskers: least and greatest. The axis does not start at "
        "0.",
    )


def _ladder(rung: Rung, last: bool, colour: int) -> list[Line]:
    name = f"{format_si(rung.tokens, 'tokens')}, {count_of(len(rung.seeds) or 1, 'seed')}"
    losses = {lr: losses_of(rung, lr) for lr in rung.rates}
    several = last and any(len(each) > 1 for each in losses.values())
    low, high = (
        [end(each, default=None) for each in losses.values()] if several else [] for end in (min, max)
    )
    lines = [Line(name, rung.rates, [mean_of(rung, lr) for lr in losses], colour, "both", low, high)]
    if several:
        seeds = [(lr, loss) for lr, each in losses.items() for loss in each]
        x, y = [lr for lr, _ in seeds], [loss for _, loss in seeds]
        lines.append(Line("a seed of the last rung", x, y, colour, "marks"))
    return lines


def range_figure(tune: TuneLr) -> Figure:
    """Training loss while the rate rises, and where it breaks."""
    test = tune.range_test or RangeTest(points=[])
    losses = [loss for _, loss in test.points]
    ceiling = CEILING * next((loss for loss in losses if loss is not None), 0.0)
    drawn = [None if loss is None else min(loss, ceiling) for loss in losses]
    why = test.why or ("" if test.edge else "no edge was recorded")
    at_edge = f"edge at {format_lr(test.edge)}{f': {why}' if why else ''}" if test.edge else why
    note = f"The rate rises with every step; {at_edge}."
    note += f" Losses above {format_ratio(ceiling)} are drawn there." if drawn != losses else ""
    return Figure(
        "Range test",
        [Line("training loss", [lr for lr, _ in test.points], drawn)],
        Axis("learning rate", "lr", log=True),
        Axis("training loss (nats per masked token)", "nats"),
        marks=[Mark(f"divergence edge: {format_lr(test.edge)}", test.edge)] if test.edge else [],
        note=note,
    )


def curves_figure(tune: TuneLr) -> Figure:
    """Held-out loss over tokens of every trial of the last rung, a colour for each rate."""
    final, entropy = _last(tune), tune.unigram_entropy_nats
    lines = [
        Line(format_lr(lr), [t for t, _ in trial.curve], [loss for _, loss in trial.curve], index)
        for index, lr in enumerate(final.rates)
        for trial in final.trials
        if trial.lr == lr
    ]
    return Figure(
        "Learning curves of the last rung",
        lines,
        Axis("tokens"),
        Axis(LOSS, "nats"),
        levels=[Rule(f"unigram entropy {format_ratio(entropy)}", entropy)] if entropy is not None else [],
        note="Every trial is a complete schedule; one line for each seed.",
    )


def _last(tune: TuneLr) -> Rung:
    """The rung that decides; the longest so far where it has not begun."""
    return next((rung for rung in tune.rungs if rung.last), tune.rungs[-1] if tune.rungs else Rung(tokens=0))


# --- tables


def _finalists(tune: TuneLr) -> Table:
    """The rates of the last rung, best first."""
    final, choice = _last(tune), tune.choice
    best = mean_of(final, choice.lr) if choice else None
    marks = {lr: " (tied)" for _, _, lr in (choice.tied if choice else ())}
    marks |= {choice.lr: " (chosen)"} if choice else {}

    def above(lr: float) -> float | None:
        mean = mean_of(final, lr)
        return None if mean is None or best is None else mean - best

    columns = [
        Computed(lambda lr: mean_of(final, lr), "mean", "nats"),
        Computed(lambda lr: min(losses_of(final, lr), default=None), "least", "nats"),
        Computed(lambda lr: max(losses_of(final, lr), default=None), "greatest", "nats"),
        Computed(above, "above", "nats"),
        Computed(lambda lr: len(losses_of(final, lr)), "seeds", "count"),
    ]
    rates = [(f"{format_lr(lr)}{marks.get(lr, '')}", lr) for lr in sorted(final.rates, key=final.mean)]
    return table(rates, columns, corner="held-out loss", empty="no trial recorded")


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
    configured = {transfer.ours: " (as configured)"}
    rules = [(f"{rule.rule}{configured.get(rule.rule, '')}", rule) for rule in transfer.rules]
    note = (
        f"{format_lr(transfer.lr)} at global batch {before}, by each rule at {after}. "
        "The paper of sqrt also moves the betas and eps; optim.lr_scaling does not."
    )
    title = f"Transfer from global batch {before} to {after}"
    return Section(title, tables=[table(rules, RULE, corner="rule")], notes=[note], console=False)
