"""What a run has spent: dollars and energy over its starts, from counters that wrap and start again."""

from pathlib import Path

import pytest

from bert_dp import files
from bert_dp.files import ledger
from bert_dp.files.ledger import Ledger, NvmlCounter, Prices, RaplCounter, read_spent


class Clock:
    """A clock that is set by hand."""

    def __init__(self, now: float = 100.0):
        self.now = now

    def __call__(self) -> float:
        return self.now


def package(root: Path, name: str, micro_joules: int, most: int = 10_000_000) -> Path:
    directory = root / name
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "name").write_text("package-0\n" if ":0:" not in name else "core\n")
    (directory / "energy_uj").write_text(f"{micro_joules}\n")
    (directory / "max_energy_range_uj").write_text(f"{most}\n")
    return directory


def test_dollars_are_price_times_devices_times_time_over_all_starts(tmp_path: Path) -> None:
    clock = Clock()
    first = Ledger(tmp_path, 2, Prices(3.6), now=clock)
    clock.now += 1800
    first.update()
    second = Ledger(tmp_path, 1, Prices(7.2), now=clock)  # fewer devices, another price
    clock.now += 500
    second.update()
    spent = read_spent(tmp_path)
    assert spent is not None
    assert spent.dollars == pytest.approx(3.6 * 2 * 0.5 + 7.2 * 500 / 3600)
    assert spent.seconds == pytest.approx(2300)
    assert spent.device_hours == pytest.approx((2 * 1800 + 500) / 3600)
    assert spent.after("dollars", clock.now + 10) == pytest.approx(spent.dollars + 7.2 * 10 / 3600)
    assert (spent.kwh, spent.co2_kg, spent.energy_origin) == (None, None, None)
    assert spent.after("kwh", clock.now) != spent.after("kwh", clock.now), "not known"


def test_a_start_without_a_price_leaves_the_sum_unknown(tmp_path: Path) -> None:
    Ledger(tmp_path, 1, Prices(1.0), now=Clock()).update()
    Ledger(tmp_path, 1, Prices(), now=Clock()).update()
    spent = read_spent(tmp_path)
    assert spent is not None
    assert spent.dollars is None


def test_stated_power_is_labelled_and_includes_the_building(tmp_path: Path) -> None:
    clock = Clock()
    book = Ledger(tmp_path, 4, Prices(None, 300.0, 1.5, 400.0), now=clock)
    clock.now += 3600
    book.update()
    spent = read_spent(tmp_path)
    assert spent is not None
    assert (spent.kwh, spent.energy_origin) == (pytest.approx(4 * 0.3 * 1.5), "stated")
    assert spent.co2_kg == pytest.approx(1.8 * 0.4)
    assert spent.kwh_per_s == pytest.approx(1.8 / 3600)


def test_rapl_counts_whole_packages_and_survives_a_wrap(tmp_path: Path) -> None:
    root, clock = tmp_path / "powercap", Clock()
    directory = package(root, "intel-rapl:0", 9_000_000)
    package(root, "intel-rapl:0:0", 1)  # a part of the package, which would count twice
    counters = ledger.energy_counters([], root)
    assert [counter.origin for counter in counters] == ["rapl"]
    book = Ledger(tmp_path, 2, Prices(None, 100.0), counters, now=clock)
    for micro_joules in (9_900_000, 400_000):  # over the range of 10 J
        clock.now += 1
        package(root, directory.name, micro_joules)
        book.update()
    spent = read_spent(tmp_path)
    assert spent is not None
    assert spent.kwh == pytest.approx(1.4 / 3.6e6)
    assert spent.energy_origin == "rapl"


def test_a_counter_that_may_not_be_read_counts_nothing(tmp_path: Path) -> None:
    directory = package(tmp_path / "powercap", "intel-rapl:0", 1)
    (directory / "energy_uj").unlink()
    assert ledger.energy_counters([], tmp_path / "powercap") == []
    assert ledger.energy_counters([], tmp_path / "absent") == []


def test_an_nvml_counter_starts_again_with_its_driver(tmp_path: Path) -> None:
    readings = iter([5_000, 8_000, 2_000])
    clock = Clock()
    book = Ledger(tmp_path, 1, Prices(), [NvmlCounter(lambda: next(readings))], now=clock)
    for _ in range(2):
        clock.now += 1
        book.update()
    spent = read_spent(tmp_path)
    assert spent is not None
    assert spent.kwh == pytest.approx((3 + 2) / 3.6e6)


def test_a_reading_that_fails_is_made_up_for_by_the_next(tmp_path: Path) -> None:
    directory = package(tmp_path / "powercap", "intel-rapl:0", 1_000_000)
    clock = Clock()
    book = Ledger(tmp_path, 1, Prices(), [RaplCounter(directory)], now=clock)
    (directory / "energy_uj").write_text("")
    book.update()
    package(tmp_path / "powercap", "intel-rapl:0", 3_000_000)
    book.update()
    spent = read_spent(tmp_path)
    assert spent is not None
    assert spent.kwh == pytest.approx(2 / 3.6e6)


def test_no_ledger_or_a_damaged_one_is_none(tmp_path: Path) -> None:
    assert read_spent(tmp_path) is None
    (tmp_path / ledger.LEDGER).write_text("{")
    assert read_spent(tmp_path) is None
    files.write_json(tmp_path / ledger.LEDGER, {"schema_version": 2, "starts": [{}]})
    assert read_spent(tmp_path) is None
