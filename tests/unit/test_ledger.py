"""Tests of the ledger: a run's dollars and energy over all its starts, with counters that wrap or restart."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from bert_dp import files
from bert_dp.config import RunConfig
from bert_dp.files import ledger
from bert_dp.files.ledger import EnergyCounter, Ledger, Spending, budget_issues, energy_counters, read_ledger
from tests.helpers import make_config, raised_issues


class Clock:
    """A clock that the test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def zone(root: Path, name: str, joules: float, label: str = "package-0") -> Path:
    """Write a powercap zone of Linux whose counter wraps at 10 J. Return its directory."""
    directory = root / name
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "name").write_text(f"{label}\n")
    (directory / "energy_uj").write_text(f"{joules * 1e6:.0f}\n")
    (directory / "max_energy_range_uj").write_text("10000000\n")
    return directory


def test_dollars_are_price_times_devices_times_time_over_all_starts(tmp_path: Path) -> None:
    clock = Clock()
    first = Ledger(tmp_path, 2, RunConfig(price_per_device_hour=3.6), now=clock, began_s=clock.now - 10)
    clock.now += 1790
    first.use(2)  # a restart on the same number of devices
    first.use(1)
    clock.now += 100
    first.update()
    second = Ledger(tmp_path, 1, RunConfig(price_per_device_hour=7.2), now=clock)
    clock.now += 400
    spent = second.update()
    assert spent == read_ledger(tmp_path).total()
    assert spent.dollars == pytest.approx(3.6 * 2 * 0.5 + 3.6 * 100 / 3600 + 7.2 * 400 / 3600)
    assert spent.seconds == pytest.approx(2300)
    assert spent.device_hours == pytest.approx((2 * 1800 + 500) / 3600)
    assert (spent.kwh, spent.co2_kg, spent.energy_origin) == (None, None, None)
    assert [start.devices for start in read_ledger(tmp_path).starts] == [2, 1, 1]


def test_a_thread_keeps_the_file_up_to_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "EVERY_S", 0.001)
    clock = Clock()
    with Ledger(tmp_path, 1, RunConfig(), now=clock):
        clock.now += 5.0
        while read_ledger(tmp_path).total().seconds < 5.0:
            pass
        clock.now += 2.0
    assert read_ledger(tmp_path).total().seconds == 7.0


def test_stated_power_is_labelled_and_multiplied_by_pue(tmp_path: Path) -> None:
    clock = Clock()
    run = RunConfig(watts_per_device=300.0, pue=1.5, grams_co2_per_kwh=400.0)
    book = Ledger(tmp_path, 4, run, now=clock)
    clock.now += 3600
    spent = book.update()
    assert (spent.kwh, spent.energy_origin) == (pytest.approx(4 * 0.3 * 1.5), "stated")
    assert spent.co2_kg == pytest.approx(1.8 * 0.4)
    assert read_ledger(tmp_path).kwh_per_s == pytest.approx(1.8 / 3600)


def test_rapl_counts_whole_packages_once_and_survives_a_wrap(tmp_path: Path) -> None:
    root, clock = tmp_path / "powercap", Clock()
    (root / "intel-rapl").mkdir(parents=True)
    zone(root, "intel-rapl-mmio:0", 1.0)  # the same package through another interface
    zone(root, "intel-rapl:0:0", 1.0, "core")  # a part of the package
    zone(root, "intel-rapl:0", 9.0)
    counters = energy_counters([], root)
    assert [(counter.origin, counter.read_j()) for counter in counters] == [("rapl", 9.0)]
    book = Ledger(tmp_path, 2, RunConfig(watts_per_device=100.0), counters, now=clock)
    for joules in (9.9, 0.4):
        clock.now += 2
        zone(root, "intel-rapl:0", joules)
        spent = book.update()
    assert (spent.kwh, spent.energy_origin) == (pytest.approx(1.4 / 3.6e6), "rapl")
    assert read_ledger(tmp_path).kwh_per_s == pytest.approx(1.4 / 4 / 3.6e6)


def test_the_next_reading_covers_a_failed_one_and_an_unreadable_counter_is_left_out(tmp_path: Path) -> None:
    root = tmp_path / "powercap"
    directory = zone(root, "intel-rapl:0", 1.0)
    book = Ledger(tmp_path, 1, RunConfig(), energy_counters([], root), now=Clock())
    (directory / "energy_uj").write_text("")
    book.update()
    zone(root, "intel-rapl:0", 3.0)
    assert book.update().kwh == pytest.approx(2 / 3.6e6)
    (directory / "energy_uj").unlink()
    assert energy_counters([], root) == energy_counters([], tmp_path / "absent") == []


def test_nvml_counts_each_gpu_by_its_index(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetTotalEnergyConsumption=lambda index: 1000 * index,  # mJ
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    counters = energy_counters([0, 2])
    assert [(counter.origin, counter.read_j()) for counter in counters] == [("nvml", 0.0), ("nvml", 2.0)]


def test_an_nvml_counter_restarts_with_its_driver(tmp_path: Path) -> None:
    readings = iter([5.0, 8.0, 2.0])
    book = Ledger(tmp_path, 1, RunConfig(), [EnergyCounter("nvml", readings.__next__)], now=Clock())
    book.update()
    assert book.update().kwh == pytest.approx((3 + 2) / 3.6e6)


def test_a_missing_ledger_is_empty_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    assert read_ledger(tmp_path).starts == []
    for damaged in ('{"schema_version": 2}', "{", "[]"):
        files.write_text(tmp_path / ledger.LEDGER, damaged)
        assert raised_issues(Ledger, tmp_path, 1, RunConfig())[0].kind == "damaged"


def test_the_spent_share_is_extrapolated_at_the_last_rate_and_keeps_a_reserve(tmp_path: Path) -> None:
    clock = Clock()
    book = Ledger(tmp_path, 1, RunConfig(price_per_device_hour=3600.0), now=clock)  # 1 dollar per second
    clock.now += 10
    book.update()
    spending = Spending(tmp_path, "dollars", 110.0, end_s=10.0)
    assert spending.share(clock.now) == pytest.approx(10 / 100)
    assert spending.share(clock.now + 3) == pytest.approx(13 / 100)
    spending.evaluation_s = 50.0
    assert spending.share(clock.now + 3) == pytest.approx(13 / 50)
    assert spending.share(clock.now + 40) == 1.0
    (tmp_path / ledger.LEDGER).write_text("{")  # half written, or unreadable on a file server
    assert spending.share(clock.now + 30) == pytest.approx(40 / 50)
    with pytest.raises(OSError, match="kwh"):
        Spending(tmp_path, "kwh", 1.0, end_s=0.0).share(clock.now)


COUNTER = EnergyCounter("nvml", lambda: 1.0)


@pytest.mark.parametrize(
    ("settings", "counters", "missing"),
    [
        ("schedule.dollars=1", [COUNTER], "run.price_per_device_hour"),
        ("schedule.kwh=1", [], "run.watts_per_device"),
        ("schedule.kwh=1 run.watts_per_device=9", [], None),
        ("schedule.kwh=1", [COUNTER], None),
        ("schedule.hours=1", [], None),
    ],
)
def test_a_budget_needs_a_price_or_a_power(tmp_path: Path, settings, counters, missing) -> None:
    issues = budget_issues(make_config(*settings.split()), tmp_path, counters)
    found = [(issue.setting, issue.kind, issue.other) for issue in issues]
    assert found == ([(missing, "missing", settings.partition("=")[0])] if missing else [])


def test_a_run_that_began_without_a_price_has_no_budget_in_dollars(tmp_path: Path) -> None:
    Ledger(tmp_path, 1, RunConfig()).update()
    (issue,) = budget_issues(make_config("schedule.dollars=1", "run.price_per_device_hour=2"), tmp_path, [])
    assert (issue.setting, issue.kind) == ("schedule.dollars", "conflict")
