"""Record in ledger.json the seconds, dollars and energy that all starts of a run have spent. Torch-free.

The launcher (rank 0 if there is no launcher) writes the file every EVERY_S seconds, so that the spending of a
killed start counts. Rank 0 reads sums and rates from the file and extrapolates the sums to the present.
"""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, Self

from bert_dp.config.errors import ConfigError, Issue, StoredModel, read_regular, refusing
from bert_dp.config.schema import Config, RunConfig
from bert_dp.files.json_lines import MAX_JSON_BYTES, write_json

LEDGER = "ledger.json"
RAPL = Path("/sys/class/powercap")
EVERY_S = 5.0  # seconds between writes, and between reads
EXIT_S = 2.0  # minimum time in seconds that is reserved for the exit of the ranks and the launcher


class EnergyCounter(NamedTuple):
    """Energy counter of a CPU package (rapl) or a GPU (nvml), in joules."""

    origin: Literal["rapl", "nvml"]
    read_j: Callable[[], float]
    range_j: float = 0.0
    """Reading at which the counter wraps to zero; 0 = the counter resets only when the driver is loaded."""

    def between(self, before_j: float, now_j: float) -> float:
        """Return the joules that were consumed between two readings."""
        if now_j >= before_j:
            return now_j - before_j
        return now_j + (self.range_j - before_j if self.range_j else 0.0)


def energy_counters(gpus: Sequence[int], root: Path = RAPL) -> list[EnergyCounter]:
    """Return the energy counters of `gpus` (NVML indices) or, if `gpus` is empty, of all CPU packages
    listed in the directory `root`. Return [] if a counter is missing or unreadable: on most machines, only
    the superuser can read the counters of CPUs."""
    try:
        counters = _nvml_counters(gpus) if gpus else _rapl_counters(root)
        for counter in counters:
            counter.read_j()
    except Exception:  # because NVML's exception classes exist only if NVML is installed
        return []
    return counters


def _nvml_counters(gpus: Sequence[int]) -> list[EnergyCounter]:
    import pynvml

    def read_j(handle: object) -> float:
        return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3

    pynvml.nvmlInit()
    return [EnergyCounter("nvml", partial(read_j, pynvml.nvmlDeviceGetHandleByIndex(i))) for i in gpus]


def _rapl_counters(root: Path) -> list[EnergyCounter]:
    def read_j(file: Path) -> float:
        return int(file.read_text()) / 1e6

    # keys are names, because some packages are listed twice, such as intel-rapl-mmio:0 and intel-rapl:0
    zones = {file.read_text(): file.parent for file in sorted(root.glob("*/name"))}
    return [
        EnergyCounter("rapl", partial(read_j, zone / "energy_uj"), read_j(zone / "max_energy_range_uj"))
        for name, zone in zones.items()
        if name.startswith("package-")
    ]


class Spent(StoredModel):
    """Totals for one start or for all starts of a run; null = unknown."""

    seconds: float = 0.0
    """Time for which the launcher or, if there is no launcher, rank 0 ran."""
    device_hours: float = 0.0
    dollars: float | None = None
    """Device-hours times run.price_per_device_hour."""
    kwh: float | None = None
    """Energy of the devices times run.pue."""
    co2_kg: float | None = None
    """kWh times run.grams_co2_per_kwh / 1000."""
    energy_origin: str | None = None
    """Origin of `kwh`: nvml (GPUs), rapl (whole CPU packages) or stated (run.watts_per_device)."""


class Start(Spent):
    """Ledger entry for a start; restarts that change the number of devices split a start into entries."""

    began: str
    devices: int


class LedgerFile(StoredModel):
    """Contents of ledger.json."""

    schema_version: Literal[1] = 1
    starts: list[Start] = []  # noqa: RUF012 (pydantic copies mutable defaults)
    dollars_per_s: float | None = None
    kwh_per_s: float | None = None
    """`dollars_per_s` and `kwh_per_s` are averages since the newest entry began."""
    at_s: float = 0.0
    """time.monotonic() when the file was written."""

    def total(self) -> Spent:
        """Return the sums over all starts."""
        sums: dict[str, object] = {}
        for name in Spent.model_fields.keys() - {"energy_origin"}:
            values = [getattr(start, name) for start in self.starts]
            sums[name] = None if None in values else math.fsum(values)
        origins = {start.energy_origin for start in self.starts if start.energy_origin}
        return Spent.model_validate({**sums, "energy_origin": " and ".join(sorted(origins)) or None})


def read_ledger(run_dir: Path) -> LedgerFile:
    """Read ledger.json, or return an empty ledger if there is none. Raises ConfigError if it is damaged."""
    path = run_dir / LEDGER
    if not path.exists():
        return LedgerFile()
    with refusing(str(path), hint="restore the file; without it, the spending of earlier starts is lost"):
        return LedgerFile.model_validate_json(read_regular(path, MAX_JSON_BYTES))


def budget_issues(config: Config, run_dir: Path, counters: Sequence[EnergyCounter]) -> list[Issue]:
    """Return one issue if the dollars or kWh of a budget cannot be measured, otherwise an empty list."""
    unit, price, watts = config.schedule.unit, config.run.price_per_device_hour, config.run.watts_per_device
    setting = f"schedule.{unit}"
    if unit == "dollars" and price is None:
        message, hint = "is needed for a budget in dollars", "set it to the price of a device-hour in dollars"
        return [Issue("run.price_per_device_hour", "missing", message, None, setting, hint)]
    if unit == "kwh" and watts is None and not counters:
        message = "is needed for a budget in kWh, because no energy counter can be read"
        hint = "set it to the mean power of a device in watts"
        return [Issue("run.watts_per_device", "missing", message, None, setting, hint)]
    if unit in ("dollars", "kwh") and getattr(read_ledger(run_dir).total(), unit) is None:
        message, hint = f"an earlier start of this run did not record {unit}", "use another budget"
        return [Issue(setting, "conflict", message, None, str(run_dir / LEDGER), hint)]
    return []


class Ledger:
    """Writer of ledger.json during one start of a run. Raises ConfigError if the existing file is damaged."""

    def __init__(
        self,
        run_dir: Path,
        devices: int,
        run: RunConfig,
        counters: Sequence[EnergyCounter] = (),
        now: Callable[[], float] = time.monotonic,
        began_s: float | None = None,
    ):
        self._path, self._run, self._now = run_dir / LEDGER, run, now
        self._past = read_ledger(run_dir).starts
        self._counters = counters
        self._readings_j = [counter.read_j() for counter in counters]
        self._begin(devices, now() if began_s is None else began_s)
        self._lock, self._end = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._write_often, name="ledger", daemon=True)

    def __enter__(self) -> Self:
        self.update()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self.update()

    def use(self, devices: int) -> None:
        """Begin a new entry if a restart has changed the number of devices."""
        with self._lock:
            if devices != self._devices:
                now = self._now()
                self._past.append(self._entry(now))
                self._begin(devices, now)

    def update(self) -> Spent:
        """Write ledger.json, and return the totals up to now."""
        with self._lock:
            now = self._now()
            entry, price = self._entry(now), self._run.price_per_device_hour
            file = LedgerFile(
                starts=[*self._past, entry],
                dollars_per_s=None if price is None else price * self._devices / 3600,
                kwh_per_s=None if entry.kwh is None else entry.kwh / max(entry.seconds, 1.0),
                at_s=now,
            )
            with contextlib.suppress(OSError):  # the next write includes these totals
                write_json(self._path, file.model_dump(mode="json"))
            return file.total()

    def _write_often(self) -> None:
        while not self._end.wait(EVERY_S):
            self.update()

    def _begin(self, devices: int, at_s: float) -> None:
        self._devices, self._began_s, self._joules = devices, at_s, 0.0
        self._began = datetime.now(UTC).isoformat(timespec="seconds")

    def _entry(self, now: float) -> Start:
        """Return the current entry, up to `now`, with new readings of the energy counters."""
        run, seconds = self._run, now - self._began_s
        hours = seconds * self._devices / 3600
        origin: str | None = None
        for i, counter in enumerate(self._counters):
            origin = counter.origin
            with contextlib.suppress(Exception):  # the next reading includes this energy
                now_j = counter.read_j()
                self._joules += counter.between(self._readings_j[i], now_j)
                self._readings_j[i] = now_j
        if origin is None and run.watts_per_device is not None:
            origin, self._joules = "stated", run.watts_per_device * self._devices * seconds
        kwh = self._joules / 3.6e6 * run.pue if origin else None
        grams, price = run.grams_co2_per_kwh, run.price_per_device_hour
        return Start(
            began=self._began,
            devices=self._devices,
            seconds=seconds,
            device_hours=hours,
            dollars=None if price is None else price * hours,
            kwh=kwh,
            co2_kg=None if kwh is None or grams is None else kwh * grams / 1e3,
            energy_origin=origin,
        )


class Spending:
    """Reader of the spent share of a budget in dollars or kWh. The share reaches 1 when the rest
    only covers `end_s` seconds for saving and closing the run, plus `evaluation_s` for an evaluation."""

    def __init__(self, run_dir: Path, unit: str, budget: float, end_s: float):
        self._run_dir, self._unit, self._budget, self.end_s = run_dir, unit, budget, end_s
        self.evaluation_s = 0.0
        self._ledger, self._read_s = LedgerFile(), -math.inf

    def share(self, at_s: float) -> float:
        """Return the share at monotonic time `at_s`. Raises OSError if the budget's unit was not recorded."""
        if at_s - self._read_s >= EVERY_S:
            with contextlib.suppress(ConfigError):  # keep the previous ledger while the file cannot be read
                self._ledger, self._read_s = read_ledger(self._run_dir), at_s
        spent = getattr(self._ledger.total(), self._unit)
        rate = getattr(self._ledger, f"{self._unit}_per_s")
        if spent is None or rate is None:
            raise OSError(f"{self._run_dir / LEDGER} does not record {self._unit}")
        spent += rate * max(0.0, at_s - self._ledger.at_s)
        usable = self._budget - rate * (self.end_s + self.evaluation_s)
        return 1.0 if spent >= usable else float(spent / usable)
