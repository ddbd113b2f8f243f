"""Find the configuration, devices, data and output directory of a verb that starts runs.

A verb that measures locks its output directory and continues there only with the same options, machine,
versions and data; otherwise the figures would not compare.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import importlib.util
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, get_args

from bert_dp import files
from bert_dp.config import (
    MAX_RANKS,
    Config,
    ConfigError,
    Issue,
    absolute,
    differing_settings,
    dump_config,
    engine_facts,
    flat,
    hf_directory,
    hf_issues,
    init_issues,
    load_config,
    read_data,
    read_manifest,
    tokenizer_issues,
)
from bert_dp.config.errors import install_command
from bert_dp.config.load import find_config as find_named_config
from bert_dp.config.load import shipped_configs
from bert_dp.config.manifest import Manifest
from bert_dp.config.own_code import code_issues
from bert_dp.config.schema import Logger
from bert_dp.files import PAGE
from bert_dp.files.models import StoredFile
from launcher import children, results
from launcher.log import Log, logger
from launcher.machine import environment
from launcher.machine.environment import Environment
from launcher.report.html import write_or_warn
from launcher.report.page import Report, show_report
from launcher.results import PlanFile

if TYPE_CHECKING:
    from rich.console import Console


CPU_RANKS = 2  # of --nproc auto on a machine without a GPU


@dataclasses.dataclass(frozen=True)
class Job:
    """A configuration with absolute paths, and the machine."""

    name: str  # name of the configuration's file without its suffix
    config: Config
    machine: Environment
    allow_code: bool = False  # the files of `task` and `optim.name` may be executed

    @property
    def gpus(self) -> int:
        """Count the visible GPUs that the ranks may use; 0: they run on CPU cores."""
        return 0 if self.config.run.device == "cpu" else len(self.machine.gpus)

    def choose_ranks(self, nproc: str) -> int:
        """Parse `nproc`: auto or a number. Raises ConfigError."""
        if issues := self.device_issues(1):
            raise ConfigError(issues)
        if nproc == "auto":
            return self.gpus or CPU_RANKS
        if not re.fullmatch("[0-9]{1,9}", nproc) or not 1 <= (ranks := int(nproc)) <= MAX_RANKS:
            message = f"must be auto or a whole number of 1 to {MAX_RANKS}"
            raise ConfigError([Issue("--nproc", "out_of_range", message, nproc)])
        if issues := self.device_issues(ranks):
            raise ConfigError(issues)
        return ranks

    def device_issues(self, ranks: int, option: str = "--nproc") -> list[Issue]:
        """Find the reason why there is no device for each of `ranks`, as `option` requests; at most one."""
        if self.config.run.device == "cuda" and not self.gpus:
            hint = "use run.device=cpu or auto"
            return [Issue("run.device", "unsupported", "cuda, but this machine shows no GPU", hint=hint)]
        if self.gpus and ranks > self.gpus:
            hint = f"use {option} {self.gpus}, or run.device=cpu"
            return [Issue(option, "out_of_range", f"{ranks} ranks but {self.gpus} GPUs", ranks, hint=hint)]
        return []

    def device_warnings(self) -> list[str]:
        """Warn of requested GPUs that cannot be used; at most one line."""
        machine = self.machine
        if self.config.run.device == "cpu" or not machine.names_absent_gpus:
            return []
        return [
            f"CUDA_VISIBLE_DEVICES={machine.cuda_visible_devices} names no usable GPU (this machine shows "
            f"{machine.gpus_present}), so ranks use CPU cores; correct it, or say run.device=cpu"
        ]

    def directory(self, given: Path | None, folder: str, kind: str = "") -> Path:
        """Return the absolute path of `given`, or of FOLDER/NAME-KIND-DATE-TIME."""
        name = "-".join([*filter(None, (self.name, kind)), time.strftime("%Y%m%d-%H%M%S")])
        return (given or Path(folder) / name).resolve()


@contextlib.contextmanager
def issues_by_option(options: Mapping[str, str]) -> Iterator[None]:
    """Rename the settings of a ConfigError to the options that gave them. `options`: setting -> option."""
    try:
        yield
    except ConfigError as error:
        named = [dataclasses.replace(i, setting=options.get(i.setting, i.setting)) for i in error.issues]
        raise ConfigError(named) from None


def load(
    name: str | None, overrides: Sequence[str], run_dir: Path | None = None, *, allow_code: bool = False
) -> Job:
    """Load the configuration that `find_config` finds, with its overrides. Raises ConfigError."""
    path = find_config(name, run_dir)
    config = absolute(load_config(path, overrides))
    return Job(path.stem, config, environment.probe(run_dir or Path()), allow_code)


def find_config(name: str | None, run_dir: Path | None = None) -> Path:
    """Find the file of this name; without a name the run's own, or quickstart.yaml. Raises ConfigError."""
    if name is not None:
        path = find_named_config(name)
        if (path / "config.yaml").exists():
            message, hint = f"{name} is a run directory", f"continue it with --run-dir {name}"
            raise ConfigError([Issue("CONFIG", "wrong_type", message, hint=hint)])
        return path
    own = run_dir / "config.yaml" if run_dir else None
    return own if own and own.exists() else shipped_configs() / "quickstart.yaml"


def input_issues(config: Config, *, allow_code: bool = False) -> list[Issue]:
    """Find files and packages that the configuration names and that are missing or do not fit."""
    issues = code_issues(config, allowed=allow_code)
    data, init_from, engine = config.data, config.run.init_from, config.parallel.engine
    foreign = hf_directory(init_from)

    def missing(setting: str, message: str, hint: str | None = None) -> None:
        issues.append(Issue(setting, "not_found", message, hint=hint))

    paths = {"data.path": data.path, "data.tokenizer": data.tokenizer, "run.init_from": init_from}
    for setting, text in {**paths, "data.sources": " ".join(data.sources or ())}.items():
        if name := files.secret_in(text or "", os.environ):
            message = f"holds the value of {name}, a secret by its name, and would be written to a file"
            issues.append(Issue(setting, "conflict", message, None, name, "use a path without it"))
    if config.task is not None:  # only its ranks know its data
        pass
    elif data.path is not None:
        try:
            manifest = read_data(config, Path(data.path))
            issues += manifest.issues(config)
            if foreign is not None and foreign.exists():
                issues += tokenizer_issues(foreign, manifest.tokenizer.sha256)
        except ConfigError as error:
            issues += [issue.within("data.path") for issue in error.issues]
    else:
        issues += files.cache_issues()
    for source in data.sources or ():
        known = source == "builtin" or source.startswith("hub:") or os.path.exists(source)
        if not known and not glob.glob(source, recursive=True):
            missing("data.sources", f"{source} matches no file", "name a file, a glob or `builtin`")
    if data.tokenizer is not None and not Path(data.tokenizer).is_file():
        missing("data.tokenizer", f"{data.tokenizer} is no file")
    if init_from is not None and not Path(foreign or init_from).exists():
        missing("run.init_from", f"{foreign or init_from} does not exist")
    elif foreign is not None:
        issues += hf_issues(foreign, config)
    elif init_from is not None:
        checkpoint = files.newest_checkpoint_facts(Path(init_from))
        if checkpoint is None:
            hint = "name a checkpoint or a run directory"
            missing("run.init_from", f"{init_from} holds no checkpoint", hint)
        else:
            issues += init_issues(init_from, checkpoint[1].config, config)
    issues += logger_issues(config.log.to, "log.to")
    if (package := engine_facts(engine).package) is not None and not has_package(package):
        hint = f"`{install_command(package)}`"
        issues.append(Issue("parallel.engine", "needs_package", f"{engine} is not installed", hint=hint))
    if config.has_examples and not (has_package("sklearn") and has_package("scipy")):
        message, hint = "scoring needs sklearn and scipy", f"`{install_command('glue')}`"
        issues.append(Issue("objective.name", "needs_package", message, hint=hint))
    if engine == "independent":
        message = "independent trains a model on every rank, as the ceiling of `bert-dp scale`"
        issues.append(Issue("parallel.engine", "unsupported", message, engine, hint="use ddp"))
    return issues


def logger_issues(names: Iterable[str], setting: str) -> list[Issue]:
    """Find services of `log.to` that are unknown or whose package is missing."""
    known = get_args(Logger)
    issues = []
    for name in names:
        if name not in known:
            hint = f"choose from {', '.join(known)}"
            issues.append(Issue(setting, "unknown", f"unknown logger {name!r}", value=name, hint=hint))
        elif not has_package(name):
            message, hint = f"{name} is not installed", f"`{install_command(name)}`"
            issues.append(Issue(setting, "needs_package", message, value=name, hint=hint))
    return issues


def has_package(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def built_data(config: Config) -> Path | None:
    """Return the directory of the data, or None if it is not built. Raises ConfigError."""
    if config.data.path is not None:
        return Path(config.data.path)
    found = _ask_for_data(config, "find")
    return Path(found) if found else None


def prepare_data(config: Config) -> Path:
    """Check the shards and return their directory; build them from `data.sources` if necessary.

    Raises ConfigError.
    """
    if config.has_examples:  # each rank verifies what it reads
        return Path(config.data.path or "")
    return Path(_ask_for_data(config, "ensure"))


def _ask_for_data(config: Config, verb: str) -> str:
    """Run `python -m bert_dp.data.build` and return its line. Raises ConfigError."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(dump_config(config))
        file.flush()
        return children.ask_module("bert_dp.data.build", [verb, file.name], "preparing the data")


P = TypeVar("P", bound=PlanFile)
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
def lock_output_dir(directory: Path, lock: str, option: str, what: str) -> Iterator[None]:
    """Create and lock an output directory. On exit, remove the lock and the directory if it is still empty.

    Raises ConfigError, naming `option`, if it cannot be written or another `what` uses it.
    """
    is_new = not directory.exists()
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        held = files.lock(directory / lock)
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
class Output(Generic[P]):
    """The --out directory of a verb that can continue an earlier call."""

    path: Path
    what: str  # the contents in words: grid, search, evaluation
    file: str  # name of the plan's file
    plan: P
    fixed: tuple[str, ...]  # fields of `plan` that must not change
    grows: tuple[str, ...] = ()  # numbers among them (`field` or `field.name`) that may increase

    def issues(self) -> list[Issue]:
        """Find the reason why this verb cannot use the directory; at most one. Raises OSError."""
        hint = "choose another directory"
        if issues := place_issues(self.path, "--out"):
            return issues
        if not self.path.exists() or all(name.startswith(".") for name in os.listdir(self.path)):
            return []
        before = results.find(self.path / self.file, type(self.plan))
        if before is None:
            message = f"{self.path} is not empty and holds no {self.what}"
            return [Issue("--out", "exists", message, hint=hint)]
        then, now = (flat({name: getattr(p, name) for name in self.fixed}) for p in (before, self.plan))
        changed = [n for n in now if then.get(n) != now[n] and not (n in self.grows and then[n] < now[n])]
        if not changed:
            return []
        settings = differing_settings(before.config, self.plan.config) if "config_hash" in changed else []
        differ = [*settings, *((n, then.get(n), now[n]) for n in changed if n != "config_hash")]
        message = f"{self.path} holds another {self.what} ({'; '.join(_difference(*d) for d in differ)})"
        return [Issue("--out", "exists", message, hint=f"{hint}, or continue with its options")]

    def lock(self) -> AbstractContextManager[None]:
        """Lock the directory. Raises ConfigError."""
        return lock_output_dir(self.path, ".lock", "--out", self.what)

    def begin(
        self, config: Config, data_issues: Callable[[Manifest], Sequence[Issue]] = lambda manifest: ()
    ) -> tuple[dict[str, Any], Path, Manifest]:
        """Prepare the data and begin; return the facts of `begin_with`, the shards and their manifest.

        Raises ConfigError for issues of the data, and if the machine, versions or data differ from before.
        """
        shards = prepare_data(config)
        manifest = read_manifest(shards)
        if issues := data_issues(manifest):
            raise ConfigError(issues)
        return self.begin_with(manifest.hash), shards, manifest

    def begin_with(self, data_hash: str) -> dict[str, Any]:
        """Write the plan and the environment, with data that is prepared. Raises ConfigError as `begin`.

        Returns the fields of a result file that name the machine, the configuration and the data.
        """
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
        files.write_json(self.path / "environment.json", machine)
        return {
            "environment": machine,
            "config_hash": plan.config_hash,
            "data_hash": data_hash,
            "command": machine["command"],
        }


class VerbOptions(NamedTuple):
    """Options of every verb that measures, and its console."""

    out: Path | None
    dry_run: bool
    as_json: bool
    console: Console

    def log(self, setup: Job) -> Log:
        """Return the function that prints lines, after the warnings of the job."""
        log = logger(self.console, self.as_json)
        for line in setup.device_warnings():
            log(f"warning: {line}")
        return log

    def measure(self, output: Output[P], run: Callable[[], tuple[StoredFile, Report, int]]) -> int:
        """End a dry run, or lock the directory, measure and write the result; return the exit code."""
        if self.dry_run:
            if self.as_json:
                sys.stdout.write(results.to_json(output.plan))
            return 0
        with output.lock():
            file, report, exit_code = run()
            has_page = write_or_warn(report, output.path / PAGE)
            if self.as_json:
                sys.stdout.write(results.to_json(file))
            else:
                show_report(self.console, report, output.path / PAGE if has_page else None)
        return exit_code


def identity(machine: Mapping[str, Any], data_hash: object) -> dict[str, Any]:
    """Return the facts that must be equal for figures to compare."""
    return {
        "cpu": machine["cpu_model"],
        "cores": machine["affinity_cores"],
        "gpus": [[gpu["name"], gpu["driver"]] for gpu in machine["gpus"]],
        "versions": {name: machine["versions"].get(name) for name in COMPARED},
        "data": data_hash,
    }


def _difference(name: str, then: object, now: object) -> str:
    if isinstance(then, list | dict) or isinstance(now, list | dict):
        return f"{name} differs"
    return f"{name}: {then} then, {now} now"
