"""Count what a run spends in seconds, dollars and energy over all its starts: ledger.json. Torch-free.

One process writes it, the launcher or, without one, rank 0: each start of the run is an entry, brought up to
date once a second, so that a start that was killed has counted too. Other processes read the sum and the
rates, which carry it on to any moment.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from bert_dp.config.errors import StoredModel
from bert_dp.files.json_lines import read_json, write_json

LEDGER = "ledger.json"
RAPL = Path("/sys/class/powercap")
EVERY_S = 5.0
EXIT_S = 2.0  # from the last save to the launcher's end


class EnergyCounter(Protocol):
    """A counter of joules that wraps or starts again at zero."""

    origin: str

    def read(self) -> float:
        """Return the joules counted. Raises OSError where it cannot be read."""

    def after_fall(self, before: float, now: float) -> float:
        """Return the joules between two readings of which the second is smaller."""


class RaplCounter:
    """Energy of one CPU package (Linux powercap), which only root may read on most machines."""

    origin = "rapl"

    def __init__(self, directory: Path):
        self._file = directory / "energy_uj"
        self._range_j = int((directory / "max_energy_range_uj").read_text()) / 1e6

    def read(self) -> float:
        return int(self._file.read_text()) / 1e6

    def after_fall(self, before: float, now: float) -> float:
        return now + self._range_j - before  # it wraps


class NvmlCounter:
    """Energy of one GPU since its driver was loaded."""

    origin = "nvml"

    def __init__(self, read_mj: Callable[[], int]):
        self._read_mj = read_mj

    def read(self) -> float:
        return self._read_mj() / 1e3

    def after_fall(self, before: float, now: float) -> float:
        return now  # the driver was loaded anew


def energy_counters(gpus: Sequence[int], root: Path = RAPL) -> list[EnergyCounter]:
    """Return the counters of these GPUs (NVML's indices), or without GPUs those of all CPU packages under
    `root`; none where one is missing or may not be read."""
    found: list[EnergyCounter] = []
    try:
        if gpus:
            import pynvml

            pynvml.nvmlInit()
            for index in gpus:
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                found.append(NvmlCounter(partial(pynvml.nvmlDeviceGetTotalEnergyConsumption, handle)))
        else:
            packages = sorted(p for p in root.glob("*") if _is_package(p))
            found.extend(map(RaplCounter, packages))
        for counter in found:
            counter.read()
    except Exception:  # no package, no driver, no right to read: the energy is stated or not known
        return []
    return found


def _is_package(directory: Path) -> bool:
    with contextlib.suppress(OSError):
        return (directory / "name").read_text().startswith("package-")
    return False


class Prices(NamedTuple):
    """What a device costs; None = not stated."""

    per_device_hour: float | None = None  # dollars
    watts_per_device: float | None = None
    pue: float = 1.0  # power of the building / power of the machines
    grams_per_kwh: float | None = None  # CO2

    @classmethod
    def of(cls, run: Any) -> Prices:
        """Return the prices of the section `run` of a configuration."""
        return cls(run.price_per_device_hour, run.watts_per_device, run.pue, run.grams_co2_per_kwh)


class Spent(StoredModel):
    """Sums over all starts of a run; None = not known for one of them."""

    seconds: float
    """From the launcher's start to its exit."""
    device_hours: float
    dollars: float | None
    """At run.price_per_device_hour."""
    kwh: float | None
    """run.pue included."""
    co2_kg: float | None
    """At run.grams_co2_per_kwh."""
    energy_origin: str | None
    """nvml, rapl (whole CPU packages) or stated (run.watts_per_device)."""
    dollars_per_s: float | None = None
    kwh_per_s: float | None = None
    at_s: float = 0.0
    """time.monotonic() at which these sums hold."""

    def after(self, unit: str, now_s: float) -> float:
        """Return the dollars or kwh spent at a moment, carried on at the last rate; NaN where not known."""
        amount, rate = getattr(self, unit), getattr(self, f"{unit}_per_s")
        if amount is None or rate is None:
            return math.nan
        return float(amount + rate * max(0.0, now_s - self.at_s))


class Ledger:
    """Writer of ledger.json for one start of a run."""

    def __init__(
        self,
        run_dir: Path,
        devices: int,
        prices: Prices,
        counters: Sequence[EnergyCounter] = (),
        now: Callable[[], float] = time.monotonic,
        began_s: float | None = None,
    ):
        self._path, self._devices, self._prices, self._now = run_dir / LEDGER, devices, prices, now
        self._counters = list(counters)
        self._readings = [counter.read() for counter in self._counters]
        self._joules = 0.0
        self._began_s = now() if began_s is None else began_s
        earlier = read_json(self._path) or {}
        self._earlier: list[dict[str, Any]] = earlier.get("starts", [])
        self._began = datetime.now(UTC).isoformat(timespec="seconds")
        self._end, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)
        self._power_kw: float | None = None
        self._last_s = self._began_s

    def start(self) -> None:
        """Write the file now and then every EVERY_S."""
        self.update()
        self._thread.start()

    def close(self) -> None:
        """Write the file for the last time."""
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()
        self.update()

    def _run(self) -> None:
        while not self._end.wait(EVERY_S):
            self.update()

    def restart(self, devices: int) -> None:
        """End the entry and begin another one, of a restart on perhaps fewer devices."""
        now = self._now()
        with self._lock:
            self._earlier.append(self._entry(now))
            self._devices, self._began_s, self._joules = devices, now, 0.0
            self._began = datetime.now(UTC).isoformat(timespec="seconds")
        self.update()

    def update(self) -> None:
        """Bring the entry of this start up to date. A failed write is tried again at the next call."""
        with self._lock:
            now = self._now()
            self._write(now, self._entry(now))

    def _write(self, now: float, entry: dict[str, Any]) -> None:
        hours = self._devices / 3600
        price, kw = self._prices.per_device_hour, self._power_kw
        rates = {
            "dollars_per_s": None if price is None else price * hours,
            "kwh_per_s": None if kw is None else kw * self._prices.pue / 3600,
            "at_s": now,
        }
        with contextlib.suppress(OSError):
            content = {"schema_version": 1, "starts": [*self._earlier, entry], "rates": rates}
            write_json(self._path, content)

    def _entry(self, now: float) -> dict[str, Any]:
        seconds = now - self._began_s
        price, watts = self._prices.per_device_hour, self._prices.watts_per_device
        joules, origin = None, None
        if self._counters:
            used = self._count()
            if now > self._last_s:
                self._power_kw = used / (now - self._last_s) / 1e3
            joules, origin = self._joules, self._counters[0].origin
        elif watts is not None:
            self._power_kw = watts * self._devices / 1e3
            joules, origin = watts * self._devices * seconds, "stated"
        self._last_s = now
        kwh = None if joules is None else joules / 3.6e6 * self._prices.pue
        grams = self._prices.grams_per_kwh
        return {
            "began": self._began,
            "seconds": seconds,
            "devices": self._devices,
            "dollars": None if price is None else price * self._devices * seconds / 3600,
            "kwh": kwh,
            "energy_origin": origin,
            "co2_kg": None if kwh is None or grams is None else kwh * grams / 1e3,
        }

    def _count(self) -> float:
        """Add what the counters moved by since the last reading; return it."""
        used = 0.0
        for i, counter in enumerate(self._counters):
            with contextlib.suppress(Exception):  # the next reading counts it
                now, before = counter.read(), self._readings[i]
                used += now - before if now >= before else counter.after_fall(before, now)
                self._readings[i] = now
        self._joules += used
        return used


class Spending:
    """What a run has spent of a budget in dollars or kWh, by its ledger, carried on at the last rate.

    `reserve_s`: seconds that are kept for the end of the run: EXIT_S, `save_s` of the last save, and its
    evaluation. The amount is scaled so that the whole budget appears spent when only they are left.
    """

    def __init__(
        self,
        run_dir: Path,
        unit: str,
        budget: float,
        save_s: float = 0.0,
        now: Callable[[], float] = time.monotonic,
    ):
        self._least_s = self.reserve_s = save_s + EXIT_S
        self._run_dir, self._unit, self._budget, self._now = run_dir, unit, budget, now
        self._read_s = -math.inf
        self._spent: Spent | None = None

    def reserve(self, evaluation_s: float) -> None:
        """Keep time for an evaluation at the end."""
        self.reserve_s = self._least_s + evaluation_s

    def amount(self, later_s: float = 0.0) -> float:
        """Return what will be spent in `later_s` seconds. Raises OSError where no ledger says it."""
        now = self._now()
        if now - self._read_s >= EVERY_S or self._spent is None:
            self._spent, self._read_s = read_spent(self._run_dir) or self._spent, now
        spent = self._spent
        rate: float | None = None if spent is None else getattr(spent, f"{self._unit}_per_s")
        if spent is None or rate is None:
            raise OSError(f"{self._run_dir / LEDGER} does not say what was spent in {self._unit}")
        left = max(self._budget - self.reserve_s * rate, 1e-3 * self._budget)
        return spent.after(self._unit, now + later_s) * self._budget / left


def read_spent(run_dir: Path) -> Spent | None:
    """Return what all starts of a run have spent; None without a ledger."""
    ledger = read_json(run_dir / LEDGER)
    if not ledger or ledger.get("schema_version") != 1 or not ledger.get("starts"):
        return None
    starts = ledger["starts"]

    def total(name: str) -> float | None:
        values = [start[name] for start in starts]
        return None if None in values else math.fsum(values)

    origins = {start["energy_origin"] for start in starts} - {None}
    return Spent(
        seconds=math.fsum(start["seconds"] for start in starts),
        device_hours=math.fsum(start["seconds"] * start["devices"] for start in starts) / 3600,
        dollars=total("dollars"),
        kwh=total("kwh"),
        co2_kg=total("co2_kg"),
        energy_origin=" and ".join(sorted(origins)) or None,
        **ledger["rates"],
    )
