"""Test the formatting of numbers."""

import math

import pytest

from launcher.report import formats
from launcher.report.formats import NA

SI = {
    "45.2 k tokens/s": (45_231, "tokens/s"),
    "1 k x": (999.6, "x"),
    "1 M": (999_999,),
    "2.5 G": (2.5e9,),
    "0.123 steps/s": (0.1234, "steps/s"),
    "0 steps/s": (0, "steps/s"),
    "21 MJ": (2.1e7, "J"),
    "12 J": (12.0, "J"),
}
DURATIONS = {0.0123: "12 ms", 0.9999: "1.0 s", 119.97: "2 min 00 s", 3599.6: "1 h 00 min"}
DURATIONS |= {7500: "2 h 05 min", 86_399: "1 d 00 h", 266_400: "3 d 02 h"}
STEP_TIMES = {
    0.0123: "12.3 ms",
    4.6: "4.60 s",
    0.9999: "1.00 s",
    123.4: "123 s",
    4567.0: "4567 s",
    0.0: "0 s",
}
CASES = {
    formats.format_count: {1234567: "1,234,567"},
    formats.format_gib: {1.239: "1.24 GiB"},
    formats.format_percent: {0.4567: "45.7 %"},
    formats.format_nats: {6.25: "6.2500 nats"},
    formats.format_lr: {1e-3: "1.00e-03"},
    formats.format_duration: DURATIONS,
    formats.format_step_time: STEP_TIMES,
    formats.format_ratio: {1.9: "1.90", 17.56: "17.6", 1024.0: "1,024", 9.999: "10.0"},
    formats.format_word: {(1, "a"): "1; a", False: "no"},
}


@pytest.mark.parametrize("formatter", CASES, ids=lambda formatter: formatter.__name__)
def test_each_formatter_formats_its_values(formatter):
    assert {value: formatter(value) for value in CASES[formatter]} == CASES[formatter]


def test_numbers_are_formatted_with_their_units():
    assert {formats.format_si(*given): given for given in SI.values()} == SI
    assert formats.format_interval([0.5, 1], formats.format_percent) == "50.0 % to 100.0 %"
    assert formats.format_interval(None, formats.format_percent) == NA
    assert (formats.count_of(1, "rank"), formats.count_of(2000, "rank")) == ("1 rank", "2,000 ranks")


@pytest.mark.parametrize("value", [None, math.nan, math.inf, "text", True, [1]])
def test_a_value_that_is_not_a_number_is_shown_as_not_available(value):
    shown = [text for unit, text in formats.FORMATS.items() if unit != "word"]
    assert {text(value) for text in shown} == {NA}
