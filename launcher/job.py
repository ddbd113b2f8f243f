"""Resolve the configuration, devices, data and output directory for verbs that start runs.

A measuring verb (`scale`, `tune`, `eval glue`) runs many trials and locks its output directory. It resumes an
earlier call only if machine, versions, data and options are the same (some counts may increase), because
otherwise the results would not be comparable.
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
from bert_dp.config import MAX_RANKS, Config, ConfigError, Issue, engine_facts, install_command
from bert_dp.config.checks import differing_settings, flat, init_issues
from bert_dp.config.hf import hf_directory, hf_issues, tokenizer_issues
from bert_dp.config.load import absolute, dump_config, load_config, shipped_configs
from bert_dp.config.load import find_config as find_named_config
from bert_dp.config.manifest import Manifest, read_data, read_manifest
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


CPU_RANKS = 2  # number of ranks for --nproc auto if no GPU is used


@dataclasses.dataclass(frozen=True)
class Job:
    """Configuration of a verb, with absolute paths, and the machine on which the verb runs."""

    name: str  # start of default directory names, for example the configuration file's name without suffix
    config: Config
    machine: Environment
    allow_code: bool = False  # True: the user's Python files (`task`, `optim.name`) may be executed

    @property
    def gpus(self) -> int:
        """Return the number of visible GPUs that ranks may use; 0 if ranks run on CPU cores."""
        return 0 if self.config.run.device == "cpu" else len(self.machine.gpus)

    def choose_ranks(self, nproc: str) -> int:
        """Return the number of ranks for `nproc` (auto or a number). Raise ConfigError if it is invalid."""
        if issues := self.device_issues(1):
            raise ConfigError(issues)
        if nproc == "auto":
            return self.gpus or CPU_RANKS
        if not re.fullmatch("[0-9]{1,9}", nproc) or not 1 <= (ranks := int(nproc)) <= MAX_RANKS:
            message = f"must be auto or a whole number from 1 to {MAX_RANKS}"
            raise ConfigError([Issue("--nproc", "out_of_range", message, nproc)])
        if issues := self.device_issues(ranks):
            raise ConfigError(issues)
        return ranks

    def device_issues(self, ranks: int, option: str = "--nproc") -> list[Issue]:
        """Return one issue if `ranks` ranks, a number set by `option`, need more GPUs than are visible."""
        if self.config.run.device == "cuda" and not self.gpus:
            hint = "use run.device=cpu or auto"
            return [Issue("run.device", "unsupported", "is cuda, but no GPU is visible", hint=hint)]
        if self.gpus and ranks > self.gpus:
            hint = f"use {option} {self.gpus}, or run.device=cpu"
            message = f"{ranks} ranks need a GPU each, but the number of visible GPUs is {self.gpus}"
            return [Issue(option, "out_of_range", message, ranks, hint=hint)]
        return []

    def device_warnings(self) -> list[str]:
        """Return one warning if CUDA_VISIBLE_DEVICES names GPUs but selects no usable one, otherwise []."""
        machine = self.machine
        if self.config.run.device == "cpu" or not machine.names_absent_gpus:
            return []
        return [
            f"CUDA_VISIBLE_DEVICES={machine.cuda_visible_devices} selects no usable GPU (this machine has "
            f"{machine.gpus_present}), so ranks use CPU cores; correct the variable, or set run.device=cpu"
        ]

    def directory(self, given: Path | None, folder: str, kind: str = "") -> Path:
        """Return the absolute path of `given` or, if it is None, of FOLDER/NAME-KIND-DATE-TIME."""
        name = "-".join([*filter(None, (self.name, kind)), time.strftime("%Y%m%d-%H%M%S")])
        return (given or Path(folder) / name).resolve()


@contextlib.contextmanager
def issues_by_option(options: Mapping[str, str]) -> Iterator[None]:
    """Name options, not settings, in ConfigErrors raised in a `with` block. `options`: setting -> option."""
    try:
        yield
    except ConfigError as error:
        named = [dataclasses.replace(i, setting=options.get(i.setting, i.setting)) for i in error.issues]
        raise ConfigError(named) from None


def load(
    name: str | None, overrides: Sequence[str], run_dir: Path | None = None, *, allow_code: bool = False
) -> Job:
    """Load configuration `name` (see `find_config`) with `overrides`. Raise ConfigError if it is invalid."""
    path = find_config(name, run_dir)
    config = absolute(load_config(path, overrides))
    return Job(path.stem, config, environment.probe(run_dir or Path()), allow_code)


def find_config(name: str | None, run_dir: Path | None = None) -> Path:
    """Return the path of configuration `name`; by default, config.yaml in `run_dir` if that file exists,
    else quickstart.yaml. Raise ConfigError if `name` is not a configuration."""
    if name is not None:
        path = find_named_config(name)
        if (path / "config.yaml").exists():
            message, hint = f"{name} is a run directory", f"resume it with --run-dir {name}"
            raise ConfigError([Issue("CONFIG", "wrong_type", message, hint=hint)])
        return path
    own = run_dir / "config.yaml" if run_dir else None
    return own if own and own.exists() else shipped_configs() / "quickstart.yaml"


def input_issues(config: Config, *, allow_code: bool = False) -> list[Issue]:
    """Return an issue for each missing or incompatible file or package that the configuration needs."""
    issues = code_issues(config, allowed=allow_code)
    data, init_from, engine = config.data, config.run.init_from, config.parallel.engine
    hf_model = hf_directory(init_from)

    def missing(setting: str, message: str, hint: str | None = None) -> None:
        issues.append(Issue(setting, "not_found", message, hint=hint))

    paths = {"data.path": data.path, "data.tokenizer": data.tokenizer, "run.init_from": init_from}
    for setting, text in {**paths, "data.sources": " ".join(data.sources or ())}.items():
        if name := files.secret_in(text or "", os.environ):
            message = f"contains the value of ${name}, which looks like a secret, and the run would save it"
            issues.append(Issue(setting, "conflict", message, None, name, "use a path without it"))
    if config.task is not None:  # only the ranks can check the data of a custom task
        pass
    elif data.path is not None:
        try:
            manifest = read_data(config, Path(data.path))
            issues += manifest.issues(config)
            if hf_model is not None and hf_model.exists():
                issues += tokenizer_issues(hf_model, manifest.tokenizer.sha256)
        except ConfigError as error:
            issues += [issue.within("data.path") for issue in error.issues]
    else:
        issues += files.cache_issues()
    for source in data.sources or ():
        known = source == "builtin" or source.startswith("hub:") or os.path.exists(source)
        if not known and not glob.glob(source, recursive=True):
            missing("data.sources", f"{source} matches no file", "pass a file, a glob or `builtin`")
    if data.tokenizer is not None and not Path(data.tokenizer).is_file():
        missing("data.tokenizer", f"{data.tokenizer} is not a file")
    if init_from is not None and not Path(hf_model or init_from).exists():
        missing("run.init_from", f"{hf_model or init_from} does not exist")
    elif hf_model is not None:
        issues += hf_issues(hf_model, config)
    elif init_from is not None:
        checkpoint = files.newest_checkpoint_facts(Path(init_from))
        if checkpoint is None:
            hint = "choose a checkpoint or a run directory"
            missing("run.init_from", f"{init_from} contains no checkpoint", hint)
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
        message = "this engine trains a separate model on each rank; only `bert-dp scale` can use it"
        issues.append(Issue("parallel.engine", "unsupported", message, engine, hint="use ddp"))
    return issues


def logger_issues(names: Iterable[str], setting: str) -> list[Issue]:
    """Return an issue about `setting` for each logging service that is unknown or not installed."""
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
    """Return the shard directory, or None if none exists. Raise ConfigError if the sources are unusable."""
    if config.data.path is not None:
        return Path(config.data.path)
    found = _run_data_build(config, "find")
    return Path(found) if found else None


def prepare_data(config: Config) -> Path:
    """Check the shards and return their directory. Build the shards from `data.sources` if necessary. Raise
    ConfigError if the data is unusable."""
    if config.has_examples:  # each rank checks its examples
        return Path(config.data.path or "")
    return Path(_run_data_build(config, "ensure"))


def _run_data_build(config: Config, verb: str) -> str:
    """Run `python -m bert_dp.data.build VERB` and return its output. Raise ConfigError if it finds issues."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(dump_config(config))
        file.flush()
        return children.ask_module("bert_dp.data.build", [verb, file.name], "preparing the data")


P = TypeVar("P", bound=PlanFile)
COMPARED = ("torch", "accelerate", "deepspeed", "bert-dp")  # packages whose versions affect the results


def place_issues(directory: Path, option: str) -> list[Issue]:
    """Return one issue for `option` unless `directory` is writable. Raise OSError on a read error."""
    existing = next(p for p in (directory, *directory.parents) if p.exists())
    if not existing.is_dir():
        return [Issue(option, "exists", f"{directory} cannot be created: {existing} is a file")]
    if not os.access(existing, os.W_OK | os.X_OK):
        return [Issue(option, "not_found", f"{existing} is not writable", hint="choose another directory")]
    return []


@contextlib.contextmanager
def lock_output_dir(directory: Path, lock: str, option: str, what: str) -> Iterator[None]:
    """Create and lock an output directory. On exit, if the directory contains only the lock file, remove
    the file, and also the directory if it did not exist before. Raise ConfigError for `option` if the
    directory is not writable or is in use. `what`: noun for messages."""
    is_new = not directory.exists()
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        held = files.lock(directory / lock)
    except OSError as error:
        message = f"{directory} is not writable ({error.strerror})"
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
    """Output directory (--out) of a measuring verb. A later call can resume an interrupted call."""

    path: Path
    what: str  # noun for messages: grid, search, evaluation
    file: str  # file name of the plan
    plan: P
    fixed: tuple[str, ...]  # fields of `plan` that must not change between calls
    grows: tuple[str, ...] = ()  # numbers in fixed fields (`field` or `field.name`) that may increase

    def issues(self) -> list[Issue]:
        """Return one issue unless the verb can use the directory. Raise OSError on a read error."""
        hint = "choose another directory"
        if issues := place_issues(self.path, "--out"):
            return issues
        if not self.path.exists() or all(name.startswith(".") for name in os.listdir(self.path)):
            return []
        before = results.find(self.path / self.file, type(self.plan))
        if before is None:
            message = f"{self.path} is not empty and contains no {self.what}"
            return [Issue("--out", "exists", message, hint=hint)]
        then, now = (flat({name: getattr(p, name) for name in self.fixed}) for p in (before, self.plan))
        changed = [n for n in now if then.get(n) != now[n] and not (n in self.grows and then[n] < now[n])]
        if not changed:
            return []
        settings = differing_settings(before.config, self.plan.config) if "config_hash" in changed else []
        differ = [*settings, *((n, then.get(n), now[n]) for n in changed if n != "config_hash")]
        message = f"{self.path} contains another {self.what} ({'; '.join(_difference(*d) for d in differ)})"
        return [Issue("--out", "exists", message, hint=f"{hint}, or repeat the earlier options to resume")]

    def lock(self) -> AbstractContextManager[None]:
        """Lock the directory in a `with` block. Raise ConfigError if it is not writable or in use."""
        return lock_output_dir(self.path, ".lock", "--out", self.what)

    def begin(
        self, config: Config, data_issues: Callable[[Manifest], Sequence[Issue]] = lambda manifest: ()
    ) -> tuple[dict[str, Any], Path, Manifest]:
        """Prepare the data and call `begin_with`. Return its result, the shard directory and the manifest.
        Raise ConfigError if the data is unusable, or if `begin_with` raises it."""
        shards = prepare_data(config)
        manifest = read_manifest(shards)
        if issues := data_issues(manifest):
            raise ConfigError(issues)
        return self.begin_with(manifest.hash), shards, manifest

    def begin_with(self, data_hash: str) -> dict[str, Any]:
        """Write the plan and environment.json. Return the result fields that identify machine, configuration
        and data. Raise ConfigError if machine, versions or data have changed since an earlier call."""
        machine = environment.probe(self.path).to_json()
        here = identity(machine, data_hash)
        before = results.find(self.path / self.file, type(self.plan))
        then = here if before is None or before.machine is None else before.machine
        if differ := [
            _difference(key, then.get(key), here[key]) for key in here if then.get(key) != here[key]
        ]:
            message = f"machine, versions or data of {self.path} have changed ({'; '.join(differ)})"
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
    """Options common to all measuring verbs, and the console."""

    out: Path | None
    dry_run: bool
    as_json: bool
    console: Console

    def log(self, setup: Job) -> Log:
        """Print the device warnings of the job, and return a function that prints a line."""
        log = logger(self.console, self.as_json)
        for line in setup.device_warnings():
            log(f"warning: {line}")
        return log

    def measure(self, output: Output[P], run: Callable[[], tuple[StoredFile, Report, int]]) -> int:
        """Lock the directory, call `run`, write its report, print its result and return its exit code. In a
        dry run, print the plan if JSON is requested, and return 0."""
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
    """Return the hardware, versions and data hash that must be equal for results to be comparable."""
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
    return f"{name}: {then} before, {now} now"
