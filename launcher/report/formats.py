"""Format numbers for display. Unknown numbers are shown as n/a, never as 0."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Literal

NA = "n/a"
SYMBOLS = {"B", "FLOP", "FLOP/s", "J"}  # units written without a space after the SI prefix
HUGE = 1e300  # quotients of numbers above this, or below its inverse, may overflow


def number(value: object) -> float | None:
    """Convert a number to a float; magnitudes below 1 / HUGE become 0. Return None if the magnitude is above
    HUGE, or if `value` is not a number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= HUGE:
        return None
    return float(value) if abs(value) >= 1 / HUGE else 0.0


def format_si(value: object, unit: str = "") -> str:
    """Round to three significant digits and add an SI prefix (k to Z): `45.2 k tokens/s`, `21 MJ`."""
    n = number(value)
    if n is None:
        return NA
    rounded = float(f"{n:.3g}")
    for prefix, scale in zip("ZEPTGMk", (1e21, 1e18, 1e15, 1e12, 1e9, 1e6, 1e3), strict=True):
        if abs(rounded) >= scale:
            gap = "" if unit in SYMBOLS or not unit else " "
            return f"{_three(rounded / scale)} {prefix}{gap}{unit}"
    return f"{_three(rounded)} {unit}".rstrip()


def _known(text: Callable[[float], str]) -> Callable[[object], str]:
    """Wrap a formatter of floats so that it accepts any value; non-numbers become n/a."""

    @functools.wraps(text)
    def formatter(value: object) -> str:
        n = number(value)
        return NA if n is None else text(n)

    return formatter


def _scaled(scale: float, digits: str, unit: str = "") -> Callable[[object], str]:
    """Return a formatter that multiplies by `scale`, applies the format `digits` and appends the unit."""
    return _known(lambda n: f"{scale * n:{digits}}{unit}")


format_count = _scaled(1, ",.0f")  # an integer with thousands separators
format_gib = _scaled(1, ".2f", " GiB")  # memory given in GiB
format_percent = _scaled(100, ".1f", " %")  # a fraction, shown as a percentage
format_change = _scaled(100, "+.1f", " %")  # a relative change, with its sign: `+4.2 %`
format_points = _scaled(100, ".1f")  # a score up to 1, multiplied by 100 as in GLUE tables
format_decimals = _scaled(1, ".4f")  # an accuracy, a correlation, or an error whose unit is given elsewhere
format_nats = _scaled(1, ".4f", " nats")  # a loss or an entropy
format_lr = _scaled(1, ".2e")  # a learning rate


@_known
def format_duration(seconds: float) -> str:
    """Format a duration: `120 ms`, `12.3 s`, `12 min 05 s`, `2 h 05 min`, `3 d 02 h`."""
    if seconds < 0.9995:
        return f"{1000 * seconds:.0f} ms" if seconds else "0 s"
    if seconds < 119.95:
        return f"{seconds:.1f} s"
    if round(seconds) < 3600:
        return "{} min {:02d} s".format(*divmod(round(seconds), 60))
    if round(seconds / 60) < 24 * 60:
        return "{} h {:02d} min".format(*divmod(round(seconds / 60), 60))
    return "{} d {:02d} h".format(*divmod(round(seconds / 3600), 24))


@_known
def format_step_time(seconds: float) -> str:
    """Format a step time, given in seconds, with three significant digits: `12.3 ms`, `1.23 s`."""
    if seconds == 0:
        return "0 s"
    scaled, unit = (1000 * seconds, "ms") if abs(seconds) < 0.9995 else (seconds, "s")
    return f"{_three(scaled) if abs(scaled) >= 999.5 else f'{scaled:#.3g}'.rstrip('.')} {unit}"


@_known
def format_ratio(ratio: float) -> str:
    """Format a ratio or speed-up with at least three digits: `1.90`, `17.6`, `1,024`."""
    return f"{ratio:,.{2 if abs(ratio) < 9.995 else 1 if abs(ratio) < 99.95 else 0}f}"


def format_interval(interval: object, text: Callable[[object], str]) -> str:
    """Format both ends of an interval: `93.1 % to 95.8 %`."""
    return " to ".join(map(text, interval)) if isinstance(interval, list) else NA


def format_word(value: object) -> str:
    """Format a name or a list of names; format a boolean as yes or no."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return "; ".join(map(str, value)) or "none"
    return NA if value is None else str(value)


def count_of(count: object, noun: str) -> str:
    """Format a count with its noun: `1 rank`, `2 ranks`."""
    return f"{format_count(count)} {noun}{'' if number(count) == 1 else 's'}"


def unit_of(name: str) -> Unit:
    """Derive the unit of a metric from the last part of its name, e.g. seconds from `step_time_s`."""
    units: dict[str, Unit] = {"s": "seconds", "gib": "gib", "share": "percent", "steps": "count"}
    return units.get(name.rpartition("_")[2], "si")


def _three(value: float) -> str:
    text = f"{value:.3g}"
    return f"{value:.0f}" if "e+" in text else text


Unit = Literal[
    "si", "count", "percent", "points", "decimal", "nats", "lr", "gib", "seconds", "ratio", "word", "duration"
]
FORMATS: Mapping[Unit, Callable[[object], str]] = {
    "si": format_si,
    "count": format_count,
    "percent": format_percent,
    "points": format_points,
    "nats": format_nats,
    "decimal": format_decimals,
    "lr": format_lr,
    "gib": format_gib,
    "seconds": format_step_time,
    "ratio": format_ratio,
    "word": format_word,
    "duration": format_duration,
}
