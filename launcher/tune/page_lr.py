"""The part of the page of tune.json that a search of the learning rate has."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from launcher import builder
from launcher.builder import card, escape
from launcher.report.numbers import (
    NA,
    format_count,
    format_duration,
    format_lr,
    format_nats,
    format_percent,
    format_si,
)
from launcher.scaling import page as scaling_page
from launcher.scaling import tables, view
from launcher.scaling.view import Column
from launcher.tune import figures_lr
from launcher.tune.figures_lr import Candidate

TRIAL = (
    Column("optimizer", "optimizer", view.format_word),
    Column("weight_decay", "weight decay", format_si),
    Column("lr", "learning rate", format_lr),
    Column("seed", "seed", format_count),
    Column("status", "status", view.format_word),
    Column("heldout_loss", "held-out loss", format_nats),
    Column("tokens", "tokens", format_si),
    Column("seconds", "time", format_duration),
)


def _four(nats: object) -> str:
    """A loss where the head of the table has the unit."""
    return format_nats(nats).removesuffix(" nats")


FINALIST = (
    Column("mean", "mean", _four),
    Column("low", "least", _four),
    Column("high", "greatest", _four),
    Column("above", "above", _four),
    Column("seeds", "seeds", format_count),
)
RULE = (
    Column("for", "for", view.format_word),
    Column("lr", "learning rate", format_lr),
    Column("equation", "equation", view.format_word),
    Column("beta1", "beta1", format_si),
    Column("beta2", "beta2", format_si),
    Column("eps", "eps", format_lr),
    Column("source", "source", view.format_word),
)
SETTINGS = (
    Column("ranks", "ranks of a trial", format_count),
    Column("at_a_time", "trials at a time", format_count),
    Column("cost.trials", "trials", format_count),
    Column("seconds", "time", format_duration),
    Column("cost.tokens", "tokens trained", format_si),
    Column("cost.grid_tokens", "tokens of the full grid", format_si),
    Column("unigram_entropy_nats", "unigram entropy", format_nats),
)


def method(tune: Mapping[str, Any]) -> str:
    """What was searched, in one line."""
    rungs, final = len(figures_lr.rungs(tune)), figures_lr.last(tune)
    return " \u00b7 ".join(
        [
            f"range test, {rungs} rungs up to {format_si(final.get('tokens'), 'tokens')}",
            f"{format_count(view.at(tune, 'cost.trials'))} trials in {format_duration(tune.get('seconds'))}",
        ]
    )


def body(tune: Mapping[str, Any]) -> list[str]:
    """Verdict, tiles, figures and tables, as HTML."""
    shown = (figures_lr.by_rate(tune), figures_lr.range_test(tune), figures_lr.curves(tune))
    return [
        _verdict(tune),
        builder.tiles(_tiles(tune)),
        builder.plot_grid([*(scaling_page.plot(figure) for figure in shown), _finalists(tune)]),
        _trials(tune),
        _transfer(tune),
    ]


def _verdict(tune: Mapping[str, Any]) -> str:
    choice = view.mapped(tune.get("choice"))
    if choice.get("lr") is None:
        return builder.verdict_card(
            "warn", "No learning rate was chosen.", filter(None, [*_left_out(tune), _lost(tune)])
        )
    text = f"Learning rate {format_lr(choice.get('lr'))} ({choice.get('optimizer') or NA}, weight decay "
    text += (
        f"{format_si(choice.get('weight_decay'))}): held-out loss {format_nats(choice.get('heldout_loss'))}, "
    )
    text += f"mean of {format_count(choice.get('seeds'))} seeds ({_band(choice)})"
    tied = ", ".join(_entry(entry) for entry in view.listed(choice.get("tied")))
    notes = [
        f"Cannot be told apart from {tied}." if tied else "",
        _edge(choice),
        *_left_out(tune),
        _lost(tune),
        "To use it: bert-dp train OUT/tuned.yaml (OUT: the directory of tune.json).",
    ]
    return builder.verdict_card("warn" if choice.get("at_edge") is True else "ok", text, filter(None, notes))


def _edge(choice: Mapping[str, Any]) -> str:
    if choice.get("at_edge") is not True:
        return ""
    side = {"low": "lower", "high": "higher"}.get(str(choice.get("edge_side")), "one")
    return f"Edge of the grid: no worse rate was measured on the {side} side, so the best one may lie beyond."


def _left_out(tune: Mapping[str, Any]) -> list[str]:
    found = view.mapped(view.mapped(tune.get("settings")).get("left_out"))
    return [f"{name} was left out: {why}." for name, why in found.items()]


def _lost(tune: Mapping[str, Any]) -> str:
    """How many trials have no loss, by status."""
    every = [str(trial.get("status")) for rung in figures_lr.rungs(tune) for trial in figures_lr.trials(rung)]
    words = {"diverged": "diverged", "oom": "out of memory", "failed": "failed"}
    found = [
        f"{format_count(every.count(status))} {word}" for status, word in words.items() if status in every
    ]
    return f"Of {format_count(len(every))} trials: {', '.join(found)}." if found else ""


def _share(tune: Mapping[str, Any]) -> str:
    """What the search trained, of the full grid."""
    tokens, grid = (view.value(tune, f"cost.{key}") for key in ("tokens", "grid_tokens"))
    share = format_percent(tokens / grid) if tokens is not None and grid else NA
    return f"{share} of the full grid's {format_si(grid)}"


def _band(choice: Mapping[str, Any]) -> str:
    low, high = (view.value(choice, f"band.{end}") for end in view.ENDS)
    return NA if low is None or high is None else f"{low:.4f} to {high:.4f}"


def _entry(entry: object) -> str:
    """[optimizer, weight decay, rate] in words."""
    parts = view.listed(entry)
    if len(parts) != 3:
        return str(entry)
    return f"{format_lr(parts[2])} ({parts[0]}, weight decay {format_si(parts[1])})"


def _tiles(tune: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    choice, test = view.mapped(tune.get("choice")), figures_lr.range_test_of(tune)
    edge = view.value(test, "edge")
    entropy = format_nats(tune.get("unigram_entropy_nats"))
    low, high = (view.value(choice, f"band.{end}") for end in view.ENDS)
    spread = None if low is None or high is None else high - low
    return [
        ("Learning rate", format_lr(choice.get("lr")), f"peak; {choice.get('optimizer') or 'optimizer n/a'}"),
        ("Held-out loss", format_nats(choice.get("heldout_loss")), f"unigram entropy {entropy}"),
        (
            "Spread over seeds",
            format_nats(spread),
            f"{_band(choice)}; standard deviation {format_nats(choice.get('sd'))}",
        ),
        (
            "Divergence edge",
            format_lr(edge) if edge is not None else "none found",
            str(test.get("why") or "no range test recorded"),
        ),
        ("Tokens trained", format_si(view.at(tune, "cost.tokens")), _share(tune)),
    ]


def _finalists(tune: Mapping[str, Any]) -> str:
    choice, final = view.mapped(tune.get("choice")), figures_lr.last(tune)
    found = sorted(figures_lr.candidates(final), key=lambda c: c.mean if math.isfinite(c.mean) else math.inf)
    chosen = [choice.get("optimizer"), choice.get("weight_decay"), choice.get("lr")]
    best = next((c.mean for c in found if c.is_entry(chosen)), math.nan)

    def told(candidate: Candidate) -> str:
        tied = any(candidate.is_entry(entry) for entry in view.listed(choice.get("tied")))
        word = " (chosen)" if candidate.is_entry(chosen) else " (tied)" if tied else ""
        return f"{figures_lr.name(tune, candidate)}{word}"

    rows = [
        {
            "mean": c.mean,
            "low": min(c.losses, default=None),
            "high": max(c.losses, default=None),
            "seeds": len(c.losses),
            "above": c.mean - best,
        }
        for c in found
    ]
    why = str(choice.get("why") or "")
    note = builder.note(f"Held-out loss over the seeds, nats. {f'Chosen: {why}.' if why else ''}")
    return card("Last rung", tables.grid(rows, FINALIST, [told(c) for c in found]) + note)


def _trials(tune: Mapping[str, Any]) -> str:
    """Every trial, by rung, and why some have no loss."""
    parts = []
    for number_, rung in enumerate(figures_lr.rungs(tune), 1):
        found = figures_lr.trials(rung)
        kept = ", ".join(_entry(entry) for entry in view.listed(rung.get("kept")))
        head = f"Rung {number_}: {format_si(rung.get('tokens'), 'tokens')}"
        parts.append(
            f"<h3>{escape(head)}</h3>{tables.grid(found, TRIAL, [str(t.get('trial')) for t in found])}"
        )
        parts.append(builder.note(f"Went on: {kept}.") if kept and rung.get("last") is not True else "")
    every = [trial for rung in figures_lr.rungs(tune) for trial in figures_lr.trials(rung)]
    causes = [
        builder.row(str(trial.get("trial")), [f"{trial.get('status')}: {trial['cause']}"])
        for trial in every
        if trial.get("cause")
    ]
    ends = f"<h3>Trials without a loss</h3>{builder.table(causes, 'pairs')}" if causes else ""
    return card("All trials", ("".join(parts) or '<p class="empty">no trial recorded</p>') + ends)


def _transfer(tune: Mapping[str, Any]) -> str:
    """The rate at another global batch by the published rules."""
    found = view.mapped(tune.get("transfer"))
    if not found:
        return ""
    rules = [rule for rule in view.listed(found.get("rules")) if isinstance(rule, Mapping)]
    names = [
        str(rule.get("rule")) + (" (as configured)" if rule.get("rule") == found.get("ours") else "")
        for rule in rules
    ]
    batches = [format_count(found.get(key)) for key in ("from_batch", "to_batch")]
    text = f"{format_lr(found.get('lr'))} at global batch {batches[0]}, by each rule at {batches[1]}. "
    text += "The paper of sqrt also moves the betas and eps; optim.lr_scaling does not."
    return card(
        f"Transfer from global batch {batches[0]} to {batches[1]}",
        tables.grid(rules, RULE, names) + builder.note(text),
    )
