"""How a run ended: the verdict, the closing table of the console, and every number with its denominator."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from launcher.report import (
    NA,
    fold,
    format_count,
    format_duration,
    format_energy,
    format_gib,
    format_nats,
    format_percent,
    format_si,
    pairs,
    safe,
)
from launcher.runs import TRAIN_PARTS, WALL_PARTS, Run, load, number, other, times

if TYPE_CHECKING:
    from rich.console import Group


@dataclasses.dataclass(frozen=True)
class Row:
    section: str
    label: str
    value: str
    note: str = ""
    """The denominator or scope of the value."""


def verdict(run: Run) -> tuple[Literal["ok", "warn", "fail"], str]:
    """How the run ended, in one sentence."""
    facts, step = run.facts, f"step {format_count(run.facts.get('step'))}"
    if not run.finished:
        return "warn", f"No end recorded: still running, or killed. Last logged: {step}."
    if facts.get("status") == "failed":
        cause = (str(facts.get("cause") or "cause not recorded").strip().splitlines() or [""])[0]
        return "fail", f"Failed at {step} (exit code {facts.get('exit_code', NA)}): {cause}"
    if facts.get("status") == "stopped":
        saved = " after a checkpoint" if facts.get("checkpoint") else ""
        return "warn", f"Stopped by {_signal(facts.get('signal'))}{saved} at {step}."
    loss, entropy = number(facts.get("heldout_loss")), number(facts.get("unigram_entropy_nats"))
    tail = "held-out loss not recorded."
    if loss is not None:
        tail = f"held-out loss {format_nats(loss)}"
        if entropy is not None:
            below = loss < entropy
            tail += (
                f", {format_nats(abs(entropy - loss))} {'below' if below else 'above'} the unigram entropy"
            )
            tail += "." if below else ": the model does not use context yet."
    level: Literal["ok", "warn"] = "ok" if facts.get("status") == "done" else "warn"
    return level, f"{str(facts.get('status')).capitalize()} after {step}: {tail}"


def closing_table(run_dir: Path) -> Group:
    """The closing table of a run as a rich renderable, at most 80 columns; works on a crashed run too."""
    from rich.console import Group
    from rich.text import Text

    run = load(run_dir)
    return Group(
        Text(safe(verdict(run)[1]), style="bold"),
        pairs(closing_rows(run)),
        *[Text(safe(note)) for note in run.missing],
    )


def closing_rows(run: Run) -> list[tuple[str, str]]:
    """(label, value with its denominator); what was not recorded and is not missed has no row."""
    facts, parts = run.facts, times(run.facts)
    skipped, energy, mfu = (number(facts.get(k)) for k in ("skipped_steps", "energy_j", "mfu"))
    step, count = number(facts.get("step")), number(facts.get("world_size"))
    per_rank = format_si(facts.get("tokens_per_s_per_gpu"))
    compiled = {"True": "compiled", "False": "eager"}.get(str(facts.get("compiled")), "")
    page = run.path / "report.html"
    rows = [
        (
            "held-out loss",
            fold(
                [
                    format_nats(facts.get("heldout_loss")),
                    f"unigram entropy {format_nats(facts.get('unigram_entropy_nats'))}",
                    f"ln V {format_nats(facts.get('uniform_entropy_nats'))}",
                ]
            ),
        ),
        ("training loss", f"{format_nats(facts.get('final_loss'))} per masked token of all ranks, last step"),
        ("steps", f"{format_count(step)} x {_batch_equation(facts)}"),
        ("", f"{format_count(facts.get('tokens'))} tokens, {format_count(facts.get('samples'))} samples"),
        (
            "model",
            fold(
                [
                    f"{format_si(facts.get('parameters'))} parameters",
                    str(facts.get("precision") or ""),
                    compiled,
                ]
            ),
        ),
        (
            "throughput",
            f"{format_si(facts.get('tokens_per_s'), 'tokens/s')} over {ranks(facts)}"
            + (f", {per_rank} per {unit(facts).split()[-1]}" if count and count > 1 else ""),
        ),
        ("", format_si(facts.get("samples_per_s"), "samples/s")),
        (
            "",
            f"{format_si(facts.get('steps_per_s'), 'steps/s')}; "
            f"{format_si(facts.get('global_steps_per_s'), 'global steps/s')} = "
            f"x {_batch_equation(facts, short=True)}",
        ),
        ("MFU", f"{NA}, peak of this device unknown" if mfu is None else f"{format_percent(mfu)} of peak"),
        ("train", _train_split(parts)),
        ("wall (rank 0)", _wall_split(parts)),
        ("peak memory", f"{format_gib(facts.get('peak_memory_gib'))}, greatest of {ranks(facts)}"),
        ("checkpoint", str(facts.get("checkpoint") or NA)),
        ("report", _shortest(page) if page.exists() else NA),
    ]
    if skipped:
        rows.insert(
            4,
            ("skipped steps", f"{format_count(skipped)} = {_share(skipped, step)}, gradient norm not finite"),
        )
    if failed := number(facts.get("failed_saves")):
        rows.insert(-1, ("failed saves", f"{format_count(failed)}, see the log"))
    if spikes := number(facts.get("loss_spikes")):
        rows.insert(4, ("loss spikes", f"{format_count(spikes)} logged losses far above the ones before"))
    if slow := _straggler(facts):
        rows.insert(-3, ("straggler", slow))
    if energy is not None:
        rows.insert(-2, ("energy", f"{format_energy(energy)} of {ranks(facts)}"))
    return rows


def _straggler(facts: Mapping[str, Any]) -> str:
    """The rank that the others wait for, where there is one."""
    found = facts.get("straggler")
    if not isinstance(found, Mapping):
        return ""
    rank, ratio, lost = (number(found.get(key)) for key in ("rank", "ratio", "seconds_per_step"))
    if rank is None or ratio is None:
        return ""
    return (
        f"rank {rank:.0f}: own work {ratio:.2f} x the others' median, {format_duration(lost)} lost per step"
    )


def _train_split(parts: Mapping[str, float]) -> str:
    """Seconds of training and the share of each of its parts."""
    if not parts.get("train"):
        return format_duration(parts.get("train"))
    inner = {name.replace(" + ", "+"): parts.get(key) for key, name in TRAIN_PARTS.items()}
    shares = [f"{name} {_share(s, parts['train'])}" for name, s in {**inner, "other": other(parts)}.items()]
    return fold(shares, f"{format_duration(parts['train'])}: ")


def _wall_split(parts: Mapping[str, float]) -> str:
    wall = sum(parts[k] for k in WALL_PARTS if k in parts) or None
    named = [f"{part} {format_duration(parts.get(part))}" for part in WALL_PARTS]
    return fold(named, f"{format_duration(wall)}: ") if wall else NA


def _share(part: float | None, whole: float | None) -> str:
    return format_percent(part / whole) if whole and part is not None else NA


def _shortest(path: Path) -> str:
    """`path` from here, when it lies below."""
    relative = os.path.relpath(path)
    return str(path.absolute()) if relative.startswith("..") else relative


def detail_rows(run: Run) -> list[Row]:
    """Every number of a run with its denominator, for the page."""
    return [
        *_outcome_rows(run),
        *_work_rows(run.facts),
        *_speed_rows(run.facts),
        *_time_rows(run.facts),
        *_resource_rows(run),
    ]


def _outcome_rows(run: Run) -> list[Row]:
    facts, section = run.facts, "Outcome"
    loss, unigram, uniform = (
        number(facts.get(k)) for k in ("heldout_loss", "unigram_entropy_nats", "uniform_entropy_nats")
    )
    return [
        Row(section, "status", str(facts.get("status") or NA), f"exit code {facts.get('exit_code', NA)}"),
        Row(
            section,
            "cause",
            str((facts.get("cause") if facts.get("status") == "failed" else "") or "none recorded"),
        ),
        *(_failure_rows(facts) if facts.get("status") == "failed" else []),
        Row(section, "held-out loss", format_nats(loss), "mean over held-out masked tokens"),
        Row(
            section,
            "unigram entropy",
            format_nats(unigram),
            f"model without context; {_gap(loss, unigram)}",
        ),
        Row(section, "ln V", format_nats(uniform), f"a uniform guess; {_gap(loss, uniform)}"),
        Row(
            section,
            "training loss, last",
            format_nats(facts.get("final_loss")),
            "mean over masked tokens, all ranks",
        ),
    ]


def _failure_rows(facts: Mapping[str, Any]) -> list[Row]:
    """Of a failed run: where, why and what to do, and what followed."""
    place = " ".join(str(facts[key]) for key in ("where", "source") if facts.get(key))
    named = [
        ("at", [place] if place else []),
        ("why", facts.get("explanation")),
        ("fix", facts.get("fix")),
        ("consequence", facts.get("consequences")),
        ("log", [facts.get("log")]),
    ]
    return [
        Row("Outcome", label, str(line))
        for label, lines in named
        if isinstance(lines, list)
        for line in lines
        if line
    ]


def _work_rows(facts: Mapping[str, Any]) -> list[Row]:
    section, step, skipped = "Work", number(facts.get("step")), number(facts.get("skipped_steps"))
    share = format_percent(skipped / step) if step and skipped is not None else NA
    return [
        Row(section, "optimizer steps", format_count(step), f"one step = {_batch_equation(facts)}"),
        Row(section, "samples", format_count(facts.get("samples")), "sequences over all ranks"),
        Row(section, "tokens", format_count(facts.get("tokens")), "over all ranks"),
        Row(
            section, "skipped steps", format_count(skipped), f"{share} of the steps; gradient norm not finite"
        ),
        Row(
            section,
            "parameters",
            format_si(facts.get("parameters")),
            f"precision {facts.get('precision', NA)}",
        ),
    ]


def _speed_rows(facts: Mapping[str, Any]) -> list[Row]:
    section, over = "Throughput", f"summed over {ranks(facts)}"
    micro = f"{_batch_equation(facts, short=True)} micro batches per optimizer step"
    mfu, ratio = number(facts.get("mfu")), number(facts.get("straggler_ratio"))
    return [
        Row(section, "optimizer steps", format_si(facts.get("steps_per_s"), "steps/s"), "of the whole job"),
        Row(section, "global steps", format_si(facts.get("global_steps_per_s"), "global steps/s"), micro),
        Row(section, "samples", format_si(facts.get("samples_per_s"), "samples/s"), over),
        Row(section, "tokens", format_si(facts.get("tokens_per_s"), "tokens/s"), over),
        Row(
            section,
            "tokens per device",
            format_si(facts.get("tokens_per_s_per_gpu"), "tokens/s"),
            f"tokens/s divided by {ranks(facts)}",
        ),
        Row(
            section,
            "straggler ratio",
            NA if ratio is None else f"{ratio:.2f}",
            "own work of the slowest rank / median of the others, before any gradient reduction",
        ),
        Row(
            section,
            "MFU",
            format_percent(mfu),
            "model FLOPs / peak of the device" if mfu is not None else "peak of this device unknown",
        ),
    ]


def _time_rows(facts: Mapping[str, Any]) -> list[Row]:
    section, parts = "Time (rank 0)", times(facts)
    wall = sum(parts[k] for k in WALL_PARTS if k in parts) or None
    rows = [Row(section, "wall", format_duration(wall), " + ".join(WALL_PARTS))]
    names = ["setup", "compile", "train", *TRAIN_PARTS, "other", "eval", "save"]
    shares = {**parts, **({"other": other(parts)} if "train" in parts else {})}
    for name in names:
        seconds = shares.get(name)
        share = format_percent(seconds / wall) if wall and seconds is not None else NA
        inside = name == "other" or name in TRAIN_PARTS
        note = f"{share} of wall{', part of train' if inside else ''}"
        rows.append(Row(section, TRAIN_PARTS.get(name, name), format_duration(seconds), note))
    return rows


def _resource_rows(run: Run) -> list[Row]:
    facts, section = run.facts, "Resources and files"
    energy, tokens = number(facts.get("energy_j")), number(facts.get("tokens"))
    per_token = (
        f"{format_energy(energy / tokens * 1e6)} per million tokens" if energy is not None and tokens else NA
    )
    return [
        Row(section, "peak memory", format_gib(facts.get("peak_memory_gib")), f"greatest of {ranks(facts)}"),
        Row(section, "energy", format_energy(energy), f"{per_token}, {ranks(facts)}"),
        Row(section, "checkpoint", str(facts.get("checkpoint") or NA), "in the run directory"),
    ]


def _batch_equation(facts: Mapping[str, Any], short: bool = False) -> str:
    sizes = [number(facts.get(key)) for key in ("global_batch", "micro_batch", "accumulation")]
    whole, micro, accumulation = sizes
    dp = whole / (micro * accumulation) if whole and micro and accumulation else None
    dp = dp if dp is not None and dp.is_integer() else None
    product = f"accumulation {format_count(accumulation)} x dp {format_count(dp)}"
    if short:
        return product
    return f"global batch {format_count(whole)} = micro {format_count(micro)} x {product}"


def unit(facts: Mapping[str, Any]) -> str:
    return "CPU rank" if str(facts.get("device", "")).lower().startswith("cpu") else "GPU"


def ranks(facts: Mapping[str, Any]) -> str:
    count = number(facts.get("world_size"))
    return (
        f"{format_count(count)} {unit(facts) if facts.get('device') else 'rank'}{'' if count == 1 else 's'}"
    )


def _gap(loss: float | None, entropy: float | None) -> str:
    if loss is None or entropy is None:
        return "difference n/a"
    return f"held-out loss is {format_nats(abs(entropy - loss))} {'below' if loss < entropy else 'above'}"


def _signal(recorded: object) -> str:
    value = number(recorded)
    known = {s.value: s.name for s in signal.Signals}
    return known.get(int(value), f"signal {int(value)}") if value is not None else "a signal"
