"""The formatter of numbers."""

import math

import pytest

from launcher.report import formats
from launcher.report.formats import NA


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (formats.format_si(45_231, "tokens/s"), "45.2 k tokens/s"),
        (formats.format_si(999.6, "x"), "1 k x"),
        (formats.format_si(999_999), "1 M"),
        (formats.format_si(2.5e9), "2.5 G"),
        (formats.format_si(0.1234, "steps/s"), "0.123 steps/s"),
        (formats.format_si(0, "steps/s"), "0 steps/s"),
        (formats.format_count(1234567), "1,234,567"),
        (formats.format_gib(1.239), "1.24 GiB"),
        (formats.format_percent(0.4567), "45.7 %"),
        (formats.format_nats(6.25), "6.2500 nats"),
        (formats.format_lr(1e-3), "1.00e-03"),
        (formats.format_si(2.1e7, "J"), "21 MJ"),
        (formats.format_si(12.0, "J"), "12 J"),
        (formats.format_duration(0.0123), "12 ms"),
        (formats.format_duration(0.9999), "1.0 s"),
        (formats.format_duration(119.97), "2 min 00 s"),
        (formats.format_duration(3599.6), "1 h 00 min"),
        (formats.format_duration(7500), "2 h 05 min"),
        (formats.format_duration(86_399), "1 d 00 h"),
        (formats.format_duration(266_400), "3 d 02 h"),
        (formats.format_step_time(0.0123), "12.3 ms"),
        (formats.format_step_time(4.6), "4.60 s"),
        (formats.format_step_time(0.9999), "1.00 s"),
        (formats.format_step_time(123.4), "123 s"),
        (formats.format_step_time(4567.0), "4567 s"),
        (formats.format_step_time(None), NA),
        (formats.format_step_time(0.0), "0 s"),
        (formats.format_ratio(1.9), "1.90"),
        (formats.format_ratio(17.56), "17.6"),
        (formats.format_ratio(1024.0), "1,024"),
        (formats.format_ratio(9.999), "10.0"),
        (formats.format_interval([0.5, 1], formats.format_percent), "50.0 % to 100.0 %"),
        (formats.format_interval(None, formats.format_percent), NA),
        (formats.format_word([1, "a"]), "1; a"),
        (formats.format_word(False), "no"),
        (formats.count_of(1, "rank"), "1 rank"),
        (formats.count_of(2000, "rank"), "2,000 ranks"),
    ],
)
def test_format(text, expected):
    assert text == expected


@pytest.mark.parametrize("value", [None, math.nan, math.inf, "text", True, [1]])
def test_what_is_not_a_number_is_not_zero(value):
    shown = [text for unit, text in formats.FORMATS.items() if unit != "word"]
    assert {text(value) for text in shown} == {NA}
