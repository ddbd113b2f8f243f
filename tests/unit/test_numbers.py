"""The formatter of numbers."""

import math

import pytest

from launcher.report import numbers
from launcher.report.numbers import NA


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (numbers.format_si(45_231, "tokens/s"), "45.2 k tokens/s"),
        (numbers.format_si(999.6, "x"), "1 k x"),
        (numbers.format_si(999_999), "1 M"),
        (numbers.format_si(2.5e9), "2.5 G"),
        (numbers.format_si(0.1234, "steps/s"), "0.123 steps/s"),
        (numbers.format_si(0, "steps/s"), "0 steps/s"),
        (numbers.format_count(1234567), "1,234,567"),
        (numbers.format_gib(1.239), "1.24 GiB"),
        (numbers.format_percent(0.4567), "45.7 %"),
        (numbers.format_nats(6.25), "6.2500 nats"),
        (numbers.format_lr(1e-3), "1.00e-03"),
        (numbers.format_si(2.1e7, "J"), "21 MJ"),
        (numbers.format_si(12.0, "J"), "12 J"),
        (numbers.format_duration(0.0123), "12 ms"),
        (numbers.format_duration(0.9999), "1.0 s"),
        (numbers.format_duration(119.97), "2 min 00 s"),
        (numbers.format_duration(3599.6), "1 h 00 min"),
        (numbers.format_duration(7500), "2 h 05 min"),
        (numbers.format_duration(86_399), "1 d 00 h"),
        (numbers.format_duration(266_400), "3 d 02 h"),
        (numbers.format_step_time(0.0123), "12.3 ms"),
        (numbers.format_step_time(4.6), "4.60 s"),
        (numbers.format_step_time(0.9999), "1.00 s"),
        (numbers.format_step_time(123.4), "123 s"),
        (numbers.format_step_time(4567.0), "4567 s"),
        (numbers.format_step_time(None), NA),
        (numbers.format_step_time(0.0), "0 s"),
        (numbers.format_ratio(1.9), "1.90"),
        (numbers.format_ratio(17.56), "17.6"),
        (numbers.format_ratio(1024.0), "1,024"),
        (numbers.format_ratio(9.999), "10.0"),
        (numbers.format_interval([0.5, 1], numbers.format_percent), "50.0 % to 100.0 %"),
        (numbers.format_interval(None, numbers.format_percent), NA),
        (numbers.format_word([1, "a"]), "1; a"),
        (numbers.format_word(False), "no"),
        (numbers.count_of(1, "rank"), "1 rank"),
        (numbers.count_of(2000, "rank"), "2,000 ranks"),
    ],
)
def test_format(text, expected):
    assert text == expected


@pytest.mark.parametrize("value", [None, math.nan, math.inf, "text", True, [1]])
def test_what_is_not_a_number_is_not_zero(value):
    formats = [text for unit, text in numbers.FORMATS.items() if unit != "word"]
    assert {text(value) for text in formats} == {NA}
