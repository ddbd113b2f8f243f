"""Output directories of verbs that measure: locking, continuing an earlier call, writing the result.

A verb continues in its output directory only with the same options, machine, versions and data; otherwise the
figures would not compare.
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


def place_issues(directory: Path, option: str) -> list[Issue]:
    """Find the reason why `directory` cannot be created or written; at most one. Raises OSError."""
    existing = next(p for p in (directory, *directory.parents) if p.exists())
    if not existing.is_dir():
        return [Issue(option, "exists", f"{directory} cannot be made, {existing} is a file")]
    if not os.access(existing, os.W_OK | os.X_OK):
        return [Issue(option, "not_found", f"{existing} cannot be written", hint="choose another directory")]
    return []


@contextlib.contextmanager
def claim(directory: Path, lock: str, option: str, what: str) -> Iterator[None]:
    """Create and lock an output directory. On exit, remove the lock and the directory if it is still empty.

    Raises ConfigError, naming `option`, if it cannot be written or another `what` uses it.
    """
    is_new = not directory.exists()
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        held = record.lock(directory / lock)
    except OSError as error:
        message = f"{directory} cannot be written ({error.strerror})"
        raise ConfigError([Issue(option, "not_found", message)]) from None
    if held is None:
        message = f"{directory} is in use by another {what}"
        raise ConfigError([Issue(option, "exists", message, hint="choose another directory")])
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
    """A measurement in progress."""

    machine: dict[str, Any]
    """`Environment.to_json()`"""
    plan: P
    data_hash: str

    def facts(self) -> dict[str, Any]:
        """Return the fields of a result file that name the machine, the configuration and the data."""
        return {
            "environment": self.machine,
            "config_hash": self.plan.config_hash,
            "data_hash": self.data_hash,
            "command": masked_command(sys.argv),
        }


@dataclasses.dataclass(frozen=True)
class DataSession(Session[P]):
    """A measurement in progress on shards."""

    shards: Path
    manifest: Manifest


class KeptPlan(Generic[T]):
    """A plan with its file, and the seconds of all calls."""

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
    """The --out directory of a verb that can continue an earlier call."""

    path: Path
    what: str
    """The contents in words: grid, search, evaluation."""
    file: str
    """Name of the plan's file."""
    plan: P
    fixed: tuple[str, ...]
    """Fields of `plan` that must not change."""
    grows: tuple[str, ...] = ()
    """Numbers among them (`field` or `field.name`) that may increase."""

    def issues(self) -> list[Issue]:
        """Find the reason why this verb cannot use the directory; at most one."""
        hint = "choose another directory"
        try:
            if issues := place_issues(self.path, "--out"):
                return issues
            names = os.listdir(self.path) if self.path.exists() else []
        except OSError as error:
            return [Issue("--out", "not_found", f"{self.path} cannot be used ({error.strerror})")]
        if all(name.startswith(".") for name in names):
            return []
        before = results.find(self.path / self.file, type(self.plan))
        if before is None:
            message = f"{self.path} is not empty and holds no {self.what}"
            return [Issue("--out", "exists", message, hint=hint)]
        then, now = _flat(before, self.fixed), _flat(self.plan, self.fixed)
        changed = [n for n in now if then.get(n) != now[n] and not (n in self.grows and then[n] < now[n])]
        if not changed:
            return []
        settings = differing_settings(before.config, self.plan.config) if "config_hash" in changed else []
        differ = [*settings, *((n, then.get(n), now[n]) for n in changed if n != "config_hash")]
        message = f"{self.path} holds another {self.what} ({'; '.join(_difference(*d) for d in differ)})"
        return [Issue("--out", "exists", message, hint=f"{hint}, or continue with its options")]

    def claim(self) -> AbstractContextManager[None]:
        """Lock the directory. Raises ConfigError."""
        return claim(self.path, ".lock", "--out", self.what)

    def begin(
        self, config: Config, data_issues: Callable[[Manifest], Sequence[Issue]] = lambda manifest: ()
    ) -> DataSession[P]:
        """Prepare the data and begin.

        Raises ConfigError for issues of the data, and if the machine, versions or data differ from before.
        """
        shards = prepare_data(config)
        manifest = read_manifest(shards)
        if issues := data_issues(manifest):
            raise ConfigError(issues)
        session = self.begin_with(manifest.hash)
        return DataSession(session.machine, session.plan, session.data_hash, shards, manifest)

    def begin_with(self, data_hash: str) -> Session[P]:
        """Write the plan and the environment, with data that is prepared. Raises ConfigError as `begin`."""
        machine = environment.probe(self.path).to_json()
        here = identity(machine, data_hash)
        before = results.find(self.path / self.file, type(self.plan))
        then = here if before is None or before.machine is None else before.machine
        if differ := [
            _difference(key, then.get(key), here[key]) for key in here if then.get(key) != here[key]
        ]:
            message = f"{self.path} was begun with another machine, versions or data ({'; '.join(differ)})"
            raise ConfigError([Issue("--out", "exists", message, hint="choose another directory")])
        options = {name: getattr(self.plan, name) for name in self.fixed}
        plan = (before or self.plan).model_copy(update={**options, "machine": here})
        results.write(self.path / self.file, plan)
        record.write_json(self.path / "environment.json", {**machine, "command": masked_command(sys.argv)})
        return Session(machine, plan, data_hash)

    def print_plan(self, *, as_json: bool) -> None:
        """Print the plan at the end of a dry run with --json."""
        if as_json:
            sys.stdout.write(results.to_json(self.plan))


def publish(file: StoredFile, report: Report, out: Path, *, as_json: bool, console: Console) -> None:
    """Write the page of a result to `out`, and print the file as JSON or the report."""
    has_page = write_or_warn(report, out / PAGE)
    if as_json:
        sys.stdout.write(results.to_json(file))
        return
    show_report(console, report, out / PAGE if has_page else None)


def identity(machine: Mapping[str, Any], data_hash: object) -> dict[str, Any]:
    """Return the facts that must be equal for figures to compare."""
    return {
        "cpu": machine["cpu_model"],
        "cores": machine["affinity_cores"],
        "gpus": [[gpu["name"], gpu["driver"]] for gpu in machine["gpus"]],
        "versions": {name: machine["versions"].get(name) for name in COMPARED},
        "data": data_hash,
    }


def _flat(plan: PlanFile, fields: Sequence[str]) -> dict[str, Any]:
    """Return the values of `fields`, those of a mapping as `field.name`."""
    flat: dict[str, Any] = {}
    for field in fields:
        value = getattr(plan, field)
        flat |= {f"{field}.{n}": v for n, v in value.items()} if isinstance(value, dict) else {field: value}
    return flat


def _difference(name: str, then: object, now: object) -> str:
    if isinstance(then, list | dict) or isinstance(now, list | dict):
        return f"{name} differs"
    return f"{name}: {then} then, {now} now"
