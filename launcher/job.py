"""What every verb that starts runs does once: configuration, devices, output directory, data.

A verb that measures goes on in its output directory where an earlier call ended: what it was begun with must
not change, nor the machine, its versions and the data, or the figures would not compare.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from bert_dp import record
from bert_dp.config import (
    HF,
    MAX_RANKS,
    Config,
    ConfigError,
    dump_config,
    hf_directory,
    init_issues,
    load_config,
    modernbert_issues,
    read_data,
    read_manifest,
)
from bert_dp.config.extras import install_command
from bert_dp.config.manifest import Manifest
from bert_dp.config.shipped import find_config as find_named_config
from bert_dp.config.shipped import shipped_configs
from bert_dp.record.models import StoredFile
from launcher import children, results
from launcher.loggers import logger_issues
from launcher.machine import environment
from launcher.machine.environment import Environment
from launcher.redact import redact_argv, secrets, setting_issues
from launcher.report.console import show_report
from launcher.report.html import write_or_warn
from launcher.report.model import Report
from launcher.report.run_report import PAGE
from launcher.results import PlanFile, TimedPlanFile

if TYPE_CHECKING:
    from rich.console import Console

CPU_RANKS = 2  # of --nproc auto on a machine without a GPU
P = TypeVar("P", bound=PlanFile)
T = TypeVar("T", bound=TimedPlanFile)
COMPARED = ("torch", "accelerate", "deepspeed", "bert-dp")  # versions that figures depend on


@dataclasses.dataclass(frozen=True)
class Job:
    """A configuration with absolute paths, and what it would run on."""

    name: str
    """Of the configuration's file, without its suffix."""
    config: Config
    machine: Environment

    @property
    def gpus(self) -> int:
        """Visible ones that it may use; 0: its ranks run on CPU cores."""
        return 0 if self.config.run.device == "cpu" else len(self.machine.gpus)

    def choose_ranks(self, nproc: str) -> int:
        """Number of ranks; `nproc`: auto or a number. Raises ConfigError."""
        if issues := self.device_issues(1):
            raise ConfigError(issues)
        if nproc == "auto":
            return self.gpus or CPU_RANKS
        if not re.fullmatch("[0-9]{1,9}", nproc) or not 1 <= (ranks := int(nproc)) <= MAX_RANKS:
            raise ConfigError([f"--nproc: {nproc[:40]} is not auto or a whole number of 1 to {MAX_RANKS}"])
        if issues := self.device_issues(ranks):
            raise ConfigError(issues)
        return ranks

    def device_issues(self, ranks: int) -> list[str]:
        """Why this machine has no devices for so many ranks; at most one line."""
        if self.config.run.device == "cuda" and not self.gpus:
            return ["run.device: cuda, but this machine shows no GPU; use run.device=cpu or auto"]
        if self.gpus and ranks > self.gpus:
            return [
                f"--nproc: {ranks} ranks but {self.gpus} GPUs; use --nproc {self.gpus}, or "
                "--set run.device=cpu"
            ]
        return []

    def issues(self, directory: Path, option: str) -> list[str]:
        """What its configuration names and is not there, and secrets that would be written; one line each."""
        return [*input_issues(self.config), *exposure_issues(self.config, directory, option)]

    def directory(self, given: Path | None, folder: str, kind: str = "") -> Path:
        """The one that was given, else FOLDER/NAME-KIND-DATE-TIME."""
        return output_directory(given, folder, self.name, kind)


def load(name: str | None, overrides: Sequence[str], run_dir: Path | None = None) -> Job:
    """The configuration that `find_config` finds, with its overrides. Raises ConfigError."""
    path = find_config(name, run_dir)
    config = absolute(load_config(path, overrides))
    return Job(path.stem, config, environment.probe(run_dir or Path()))


def output_directory(given: Path | None, folder: str, *parts: str) -> Path:
    """The one that was given, else FOLDER/PARTS-DATE-TIME; absolute."""
    name = "-".join([*filter(None, parts), time.strftime("%Y%m%d-%H%M%S")])
    return (given or Path(folder) / name).resolve()


def find_config(name: str | None, run_dir: Path | None = None) -> Path:
    """The file of this name; without a name the run's own, else quickstart.yaml. Raises ConfigError."""
    if name is not None:
        return find_named_config(name)
    own = run_dir / "config.yaml" if run_dir else None
    return own if own and own.exists() else shipped_configs() / "quickstart.yaml"


def absolute(config: Config) -> Config:
    """The configuration with every path absolute, so that it runs the same from anywhere."""

    def full(path: str | None) -> str | None:
        return None if path is None else str(Path(path).expanduser().resolve())

    def source(name: str) -> str:
        return name if name == "builtin" or name.startswith("hub:") else str(full(name))

    data, init_from = config.data, config.run.init_from
    sources = None if data.sources is None else tuple(map(source, data.sources))
    paths = {"path": full(data.path), "sources": sources, "tokenizer": full(data.tokenizer)}
    foreign = hf_directory(init_from)
    weights = full(init_from) if foreign is None else f"{HF}{full(str(foreign))}"
    run = config.run.model_copy(update={"init_from": weights})
    return config.model_copy(update={"data": data.model_copy(update=paths), "run": run})


def input_issues(config: Config) -> list[str]:
    """Files and packages the configuration names and that are not there; one line each."""
    issues = []
    data = config.data
    if data.path is not None:
        try:
            issues += read_data(config, Path(data.path)).issues(config)
        except ConfigError as error:
            issues += [f"data.path: {issue}" for issue in error.issues]
    for source in data.sources or ():
        if source != "builtin" and not source.startswith("hub:") and not glob.glob(source, recursive=True):
            issues.append(f"data.sources: {source} matches no file; name a file, a glob or `builtin`")
    init_from, foreign = config.run.init_from, hf_directory(config.run.init_from)
    for setting, value in (("data.tokenizer", data.tokenizer), ("run.init_from", foreign or init_from)):
        if value is not None and not Path(value).exists():
            issues.append(f"{setting}: {value} does not exist")
    if data.tokenizer is not None and Path(data.tokenizer).exists() and not Path(data.tokenizer).is_file():
        issues.append(f"data.tokenizer: {data.tokenizer} is not a regular file")
    if data.path is None:
        issues += record.cache_issues()
    if foreign is not None:
        issues += modernbert_issues(foreign, config) if foreign.exists() else []
    elif init_from is not None and Path(init_from).exists():
        checkpoint = record.newest_checkpoint_facts(Path(init_from))
        issues += (
            init_issues(init_from, checkpoint[1].config, config)
            if checkpoint
            else [f"run.init_from: {init_from} holds no checkpoint; name a checkpoint or a run directory"]
        )
    issues += [f"log.to: {issue}" for issue in logger_issues(config.log.loggers)]
    engine = config.parallel.engine
    if engine in ("deepspeed", "accelerate") and not has_package(engine):
        issues.append(f"parallel.engine: {engine} needs `{install_command(engine)}`")
    if config.objective.name == "finetune" and not (has_package("sklearn") and has_package("scipy")):
        issues.append(
            f"objective.name: finetune scores with scikit-learn and scipy; `{install_command('glue')}`"
        )
    if engine == "independent":
        issues.append(
            "parallel.engine: independent trains a model of its own on every rank, which only "
            "`bert-dp scale` does, for its ceiling; use ddp"
        )
    if not has_package("torch"):
        issues.append("torch is not installed; `pip install torch`")
    return issues


def has_package(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def exposure_issues(config: Config, directory: Path, option: str) -> list[str]:
    """Settings that would carry a secret into the directory, which `option` names; one line each."""
    data = config.data
    texts = {
        "data.path": data.path,
        "data.sources": " ".join(data.sources or ()),
        option: str(directory),
        "data.tokenizer": data.tokenizer,
        "run.init_from": config.run.init_from,
    }
    return setting_issues(texts, secrets(sys.argv))


def prepare_data(config: Config) -> Path:
    """The shards' directory, checked; built from `data.sources` on first use, with progress on our stderr.

    Raises ConfigError.
    """
    if config.objective.name == "finetune":  # each rank verifies what it reads
        return Path(config.data.path or "")
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(dump_config(config))
        file.flush()
        done = children.run_module("bert_dp.corpus", ["ensure", file.name], stdout=subprocess.PIPE)
    if done.returncode == 2:
        raise ConfigError([])  # the data room has said why
    if done.returncode:
        sys.exit(f"error: preparing the data failed with exit code {done.returncode}; its message is above")
    return Path(done.stdout.strip())


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
class Taken(Generic[P]):
    """An output directory that is ours."""

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
            "command": redact_argv(sys.argv),
        }


@dataclasses.dataclass(frozen=True)
class Begun(Taken[P]):
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
            return [
                f"--out: {self.path} holds another {self.what} ({', '.join(changed)} differ); choose another "
                "directory, or go on with the options it was begun with"
            ]
        return []

    def claim(self) -> AbstractContextManager[None]:
        """Hold the directory. Raises ConfigError."""
        return claim(self.path, ".lock", "--out", self.what)

    def begin(self, config: Config) -> Begun[P]:
        """Prepare the data; note what is run, and where. Raises ConfigError, also when the directory was
        begun on another machine, with other versions or other data."""
        shards = prepare_data(config)
        manifest = read_manifest(shards)
        taken = self.begin_with(manifest.hash)
        return Begun(taken.machine, taken.plan, taken.data_hash, shards, manifest)

    def begin_with(self, data_hash: str) -> Taken[P]:
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
        record.write_json(self.path / "environment.json", {**machine, "command": redact_argv(sys.argv)})
        return Taken(machine, plan, data_hash)

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


def _grown(then: object, now: object) -> bool:
    return isinstance(then, int | float) and isinstance(now, int | float) and then < now
