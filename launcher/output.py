"""Where a verb writes: its directory is held, what it was begun with is kept, and its result published.

A verb that measures goes on in its output directory where an earlier call ended: what it was begun with must
not change, nor the machine, its versions and the data, or the figures would not compare.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from bert_dp import record
from bert_dp.config import Config, ConfigError, Issue, differing_settings, read_manifest
from bert_dp.config.manifest import Manifest
from bert_dp.record.models import StoredFile
from launcher import results
from launcher.job import prepare_data
from launcher.log import masked_command
from launcher.machine import environment
from launcher.report.console import show_report
from launcher.report.html import write_or_warn
from launcher.report.model import Report
from launcher.report.run_report import PAGE
from launcher.results import PlanFile, TimedPlanFile

if TYPE_CHECKING:
    from rich.console import Console

P = TypeVar("P", bound=PlanFile)
T = TypeVar("T", bound=TimedPlanFile)
COMPARED = ("torch", "accelerate", "deepspeed", "bert-dp")  # versions that figures depend on


def place_issues(directory: Path, option: str) -> list[str]:
    """Why nothing can be written to a directory, made or not; at most one line. Raises OSError."""
    existing = next(p for p in (directory, *directory.parents) if p.exists())
    if not existing.is_dir():
        return [f"{option}: {directory} cannot be made, {existing} is a file"]
    if not os.access(existing, os.W_OK | os.X_OK):
        return [f"{option}: {existing} cannot be written; choose another directory"]
    return []


@contextlib.contextmanager
def claim(directory: Path, lock: str, option: str, what: str) -> Iterator[None]:
    """Make a directory of ours and hold it. Where nothing was written, nothing is left.

    Raises ConfigError, naming `option`, when it cannot be written or another `what` holds it.
    """
    is_new = not directory.exists()
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        held = record.lock(directory / lock)
    except OSError as error:
        raise ConfigError([f"{option}: {directory} cannot be written ({error.strerror})"]) from None
    if held is None:
        raise ConfigError([f"{option}: {directory} is in use by another {what}; choose another directory"])
    with held:
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                if os.listdir(directory) == [lock]:
                    (directory / lock).unlink()
                    if is_new:
                        directory.rmdir()


@dataclasses.dataclass(frozen=True)
class Session(Generic[P]):
    """A verb at work in its output directory."""

    machine: dict[str, Any]
    """`Environment.to_json()`"""
    plan: P
    """What the directory was begun with, as its file holds it."""
    data_hash: str

    def facts(self) -> dict[str, Any]:
        """What every result file says of where and with what it was measured."""
        return {
            "environment": self.machine,
            "config_hash": self.plan.config_hash,
            "data_hash": self.data_hash,
            "command": masked_command(sys.argv),
        }


@dataclasses.dataclass(frozen=True)
class DataSession(Session[P]):
    """The same, with its shards."""

    shards: Path
    manifest: Manifest


class KeptPlan(Generic[T]):
    """A plan in its file, with what is settled once and must not change when going on, and the seconds of
    all calls."""

    def __init__(self, path: Path, plan: T):
        self.path, self.plan, self._since = path, plan, time.monotonic()

    def save(self, **more: Any) -> None:
        """Add `more`, and the seconds since the last time."""
        now = time.monotonic()
        seconds = self.plan.seconds + now - self._since
        self.plan = self.plan.model_copy(update={**more, "seconds": seconds})
        self._since = now
        results.write(self.path, self.plan)


@dataclasses.dataclass(frozen=True)
class Output(Generic[P]):
    """The --out directory of a verb that goes on where it was ended."""

    path: Path
    what: str
    """It holds: a grid, a search."""
    file: str
    """Name of the file that holds what it was begun with."""
    plan: P
    """What it is begun with now."""
    fixed: tuple[str, ...]
    """Fields of `plan` that must not change."""
    grows: tuple[str, ...] = ()
    """Numbers among them (`field` or `field.name`) that may be greater than before."""

    def issues(self) -> list[str]:
        """Why the directory cannot be taken; one line each."""
        try:
            if issues := place_issues(self.path, "--out"):
                return issues
            names = os.listdir(self.path) if self.path.exists() else []
        except OSError as error:
            return [f"--out: {self.path} cannot be used ({error.strerror})"]
        if all(name.startswith(".") for name in names):
            return []
        before = results.find(self.path / self.file, type(self.plan))
        if before is None:
            return [f"--out: {self.path} is not empty and holds no {self.what}; choose another directory"]
        then, now = _flat(before, self.fixed), _flat(self.plan, self.fixed)
        if cut := sorted(name for name in then.keys() - now.keys() if then[name]):
            return [
                f"--out: {self.path} was begun with settings that this version does not have "
                f"({', '.join(cut)}); choose another directory"
            ]
        differ = [name for name in now if then.get(name) != now[name]]
        if changed := [n for n in differ if n not in self.grows or not _grown(then.get(n), now[n])]:
            told = [_difference(name, then.get(name), now[name]) for name in changed if name != "config_hash"]
            if "config_hash" in changed:
                settings = differing_settings(before.config, self.plan.config) if before.config else []
                told = [*[_difference(*each) for each in settings], *told] or ["another configuration"]
            return [
                f"--out: {self.path} holds another {self.what} ({'; '.join(told)}); choose another "
                "directory, or go on with the options it was begun with"
            ]
        return []

    def claim(self) -> AbstractContextManager[None]:
        """Hold the directory. Raises ConfigError."""
        return claim(self.path, ".lock", "--out", self.what)

    def begin(
        self, config: Config, data_issues: Callable[[Manifest], Sequence[Issue]] = lambda manifest: ()
    ) -> DataSession[P]:
        """Prepare the data; note what is run, and where. Raises ConfigError, also for `data_issues`, and when
        the directory was begun on another machine, with other versions or other data."""
        shards = prepare_data(config)
        manifest = read_manifest(shards)
        if issues := data_issues(manifest):
            raise ConfigError(issues)
        session = self.begin_with(manifest.hash)
        return DataSession(session.machine, session.plan, session.data_hash, shards, manifest)

    def begin_with(self, data_hash: str) -> Session[P]:
        """The same of data that is prepared."""
        machine = environment.probe(self.path).to_json()
        here = identity(machine, data_hash)
        before = results.find(self.path / self.file, type(self.plan))
        then = here if before is None or before.machine is None else before.machine
        differ = [
            f"{key}: {then.get(key)} then, {here[key]} now" for key in here if then.get(key) != here[key]
        ]
        if differ:
            raise ConfigError(
                [
                    f"--out: {self.path} was started with another machine, versions or data "
                    f"({'; '.join(differ)}); the results would not be comparable; choose another directory"
                ]
            )
        options = {name: getattr(self.plan, name) for name in self.fixed}
        plan = (before or self.plan).model_copy(update={**options, "machine": here})
        results.write(self.path / self.file, plan)
        record.write_json(self.path / "environment.json", {**machine, "command": masked_command(sys.argv)})
        return Session(machine, plan, data_hash)

    def print_plan(self, *, as_json: bool) -> None:
        """The end of a dry run: with --json what would be run."""
        if as_json:
            sys.stdout.write(results.to_json(self.plan))


def publish(file: StoredFile, report: Report, out: Path, *, as_json: bool, console: Console) -> None:
    """The page of a result in `out`, and what the verb prints: the file as JSON, or the report."""
    has_page = write_or_warn(report, out / PAGE)
    if as_json:
        sys.stdout.write(results.to_json(file))
        return
    show_report(console, report, out / PAGE if has_page else None)


def identity(machine: Mapping[str, Any], data_hash: object) -> dict[str, Any]:
    """What must be the same in every run of a directory: else its figures do not compare."""
    return {
        "cpu": machine["cpu_model"],
        "cores": machine["affinity_cores"],
        "gpus": [[gpu["name"], gpu["driver"]] for gpu in machine["gpus"]],
        "versions": {name: machine["versions"].get(name) for name in COMPARED},
        "data": data_hash,
    }


def _flat(plan: PlanFile, fields: Sequence[str]) -> dict[str, Any]:
    """The values of `fields`, those of a mapping by `field.name`."""
    flat: dict[str, Any] = {}
    for field in fields:
        value = getattr(plan, field)
        flat |= {f"{field}.{n}": v for n, v in value.items()} if isinstance(value, dict) else {field: value}
    return flat


def _difference(name: str, then: object, now: object) -> str:
    """In words; a long value is not shown."""
    if isinstance(then, list | dict) or isinstance(now, list | dict):
        return f"{name} differs"
    return f"{name}: {then} then, {now} now"


def _grown(then: object, now: object) -> bool:
    return isinstance(then, int | float) and isinstance(now, int | float) and then < now
