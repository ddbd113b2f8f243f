"""The only formatter of numbers; and the tables of the console that are not a run's own.

Every number is printed with its unit and what it is divided by; what is not known prints as n/a, never as 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bert_dp.record import safe
from launcher.runs import number

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from launcher.doctor import Finding
    from launcher.environment import Environment

NA = "n/a"
ETA_LINES = 20  # logged steps over which the remaining time is extrapolated
VALUE_COLUMNS = 63  # of a value beside its label in 80 columns
SAMPLE_CHARS = 300
DROPPED = {
    "empty": "without a token",
    "tokens_per_char": "with too many tokens per character",
    "exact_duplicate": "exact duplicates",
    "near_duplicate": "near duplicates",
}


def format_si(value: object, unit: str = "") -> str:
    """Three significant digits with k, M, G or T: 45,231 tokens/s -> `45.2 k tokens/s`."""
    n = number(value)
    if n is None:
        return NA
    rounded = float(f"{n:.3g}")
    for prefix, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(rounded) >= scale:
            return f"{_three(rounded / scale)} {prefix}{' ' if unit else ''}{unit}"
    return f"{_three(rounded)} {unit}".rstrip()


def format_count(value: object) -> str:
    """A whole number with separators."""
    n = number(value)
    return NA if n is None else f"{n:,.0f}"


def format_gib(value: object) -> str:
    """Memory given in GiB."""
    n = number(value)
    return NA if n is None else f"{n:.2f} GiB"


def format_percent(fraction: object) -> str:
    """A fraction of 1 as per cent."""
    n = number(fraction)
    return NA if n is None else f"{100 * n:.1f} %"


def format_nats(value: object) -> str:
    """A loss or an entropy, in nats per predicted token."""
    n = number(value)
    return NA if n is None else f"{n:.4f} nats"


def format_energy(joules: object) -> str:
    """Joules with a prefix: `21 MJ`."""
    return re.sub(r"(?<=[TGMk]) J$", "J", format_si(joules, "J"))


def format_lr(value: object) -> str:
    """A learning rate."""
    n = number(value)
    return NA if n is None else f"{n:.2e}"


def format_lr_tick(value: object) -> str:
    """A learning rate on an axis: `1e-3`, `2.5e-4`."""
    n = number(value)
    return NA if n is None else f"{n:.1e}".replace(".0e", "e").replace("e-0", "e-").replace("e+0", "e+")


def format_duration(seconds: object) -> str:
    """`120 ms`, `12.3 s`, `12 min 05 s`, `2 h 05 min`, `3 d 02 h`."""
    s = number(seconds)
    if s is None:
        return NA
    if s < 0.9995:
        return f"{1000 * s:.0f} ms" if s else "0 s"
    if s < 119.95:
        return f"{s:.1f} s"
    if round(s) < 3600:
        return "{} min {:02d} s".format(*divmod(round(s), 60))
    if round(s / 60) < 24 * 60:
        return "{} h {:02d} min".format(*divmod(round(s / 60), 60))
    return "{} d {:02d} h".format(*divmod(round(s / 3600), 24))


def format_step_time(seconds: object) -> str:
    """Seconds of a step with three significant digits, so that steps can be compared: `12.3 ms`, `1.23 s`."""
    s = number(seconds)
    if s is None:
        return NA
    if s == 0:
        return "0 s"
    scaled, unit = (1000 * s, "ms") if abs(s) < 0.9995 else (s, "s")
    return f"{_three(scaled) if abs(scaled) >= 999.5 else f'{scaled:#.3g}'.rstrip('.')} {unit}"


def format_time_tick(seconds: float) -> str:
    """A round time on an axis: `50 ms`, `1.5 s`."""
    scaled, unit = (1000 * seconds, "ms") if 0 < abs(seconds) < 0.9995 else (seconds, "s")
    return f"{_three(scaled)} {unit}"


def format_ratio(value: object) -> str:
    """A ratio around one, or a speed-up, with three digits: `1.90`, `17.6`, `1,024`."""
    n = number(value)
    return NA if n is None else f"{n:,.{2 if abs(n) < 9.995 else 1 if abs(n) < 99.95 else 0}f}"


def format_eta(seconds: object) -> str:
    """A remaining time: below a second it is no more than `<1 s`."""
    s = number(seconds)
    return "<1 s" if s is not None and s < 1 else format_duration(s)


def progress_line(metrics: Mapping[str, Any], *, eta: float | None = None) -> str:
    """One line of metrics.jsonl for the console; `eta` in seconds."""
    world = format_count(metrics.get("world_size"))
    return " | ".join(
        (
            f"step {format_count(metrics.get('step'))}",
            format_percent(metrics.get("progress")),
            f"loss {format_nats(metrics.get('loss'))}",
            f"lr {format_lr(metrics.get('lr'))}",
            f"{format_si(metrics.get('tokens_per_s'), 'tokens/s')} over {world} ranks",
            f"{format_si(metrics.get('global_steps_per_s'), 'global steps/s')}",
            f"left {format_eta(eta)}",
        )
    )


def eta_s(lines: Sequence[Mapping[str, Any]], hours: float | None = None) -> float | None:
    """Seconds left: what remains of a budget in hours, else at the pace of the last lines of metrics.jsonl.

    None until the lines tell.
    """
    if hours is not None and lines:
        done = number(lines[-1].get("progress"))
        return None if done is None else (1 - done) * hours * 3600
    recent = [(number(line.get("elapsed_s")), number(line.get("progress"))) for line in lines[-ETA_LINES:]]
    known = [(t, f) for t, f in recent if t is not None and f is not None]
    while len(known) > 1 and known[0] >= known[-1]:
        known.pop(0)  # before a resume the clock or the progress stood higher
    if len(known) < 2 or known[-1][1] <= known[0][1]:
        return None
    (start, done), (now, progress) = known[0], known[-1]
    return max(0.0, (1 - progress) * (now - start) / (progress - done))


def findings_table(environment: Environment, findings: Sequence[Finding]) -> Table:
    """What `doctor` found as a rich renderable: the machine, each finding, its consequence and fix."""
    from rich.table import Table
    from rich.text import Text

    gpus = ", ".join(f"{gpu.name} {format_gib(gpu.memory_gib)}" for gpu in environment.gpus) or "no GPU"
    machine = f"{environment.cpu_model}, {environment.usable_cores:g} usable cores, {gpus}"
    table = Table(
        title=Text(safe(machine)), box=None, title_justify="left", pad_edge=False, show_header=False
    )
    for finding in findings:
        colour = {"ok": "green", "warn": "yellow", "fail": "red"}[finding.level]
        text = Text(safe(finding.what))
        if finding.level != "ok":
            text.append(safe(f"\n  causes: {finding.consequence}\n  fix: {finding.fix}"), style="dim")
        table.add_row(Text(finding.level, style=f"bold {colour}"), text)
    return table


def shards_table(facts: Mapping[str, Any]) -> Group:
    """What `data inspect` found as a rich renderable: counts, entropies, tokens, samples, problems."""
    from rich.console import Group
    from rich.text import Text

    manifest = facts["manifest"]
    problems = [Text(safe(f"damaged: {problem}"), style="bold red") for problem in facts["problems"]]
    sound = [] if problems else [Text("sound: every hash and token id checked", style="green")]
    samples = []
    for i, sample in enumerate(facts["samples"], 1):
        cut = f"{sample[:SAMPLE_CHARS]} ..." if len(sample) > SAMPLE_CHARS else sample
        samples.append(Text.assemble((f"sample {i}  ", "bold"), safe(cut).replace("\n", " ")))
    dropped = [
        f"{format_count(n)} {DROPPED.get(stage, stage)}" for stage, n in manifest["dropped"].items() if n
    ]
    shares = [f"{t['token']} {format_percent(t['share'])}" for t in facts["frequent_tokens"]]
    rows = [
        ("sequence", f"{format_count(manifest['sequence_length'])} tokens"),
        ("vocabulary", f"{format_count(manifest['vocab_size'])} tokens"),
        ("unigram entropy", f"{format_nats(manifest['unigram_entropy_nats'])} per held-out token"),
        ("ln V", f"{format_nats(manifest['uniform_entropy_nats'])}, a uniform guess"),
        ("per document", f"{format_si(facts['tokens_per_document'], 'tokens')} on average, training set"),
        ("dropped", fold(dropped) or "no document"),
        ("frequent", fold(shares)),
    ]
    return Group(*problems, *sound, _splits_table(manifest), pairs(rows), *samples)


def _splits_table(manifest: Mapping[str, Any]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("split")
    for name in ("documents", "tokens", "sequences", "files"):
        table.add_column(name, justify="right")
    for name, split in (("train", manifest["train"]), ("held-out", manifest["held_out"])):
        counts = (split["documents"], split["tokens"], split["sequences"], len(split["shards"]))
        table.add_row(name, *[format_count(n) for n in counts])
    return table


def pairs(rows: Sequence[tuple[str, str]]) -> Table:
    """Labels and values, at most 80 columns when the values are folded."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(style="bold", overflow="fold")
    for label, value in rows:
        table.add_row(label, Text(safe(value)))
    return table


def fold(parts: Sequence[str], start: str = "") -> str:
    """Parts joined by commas, broken between parts into lines that fit beside a label."""
    lines = [start]
    for part in filter(None, parts):
        if len(lines[-1]) + len(part) + 1 > VALUE_COLUMNS and lines[-1].strip():
            lines.append("")
        lines[-1] += f"{part}, "
    return "\n".join(line.rstrip() for line in lines).removesuffix(",")


def _three(value: float) -> str:
    text = f"{value:.3g}"
    return f"{value:.0f}" if "e+" in text else text
