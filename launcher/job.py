"""What every verb that starts runs does once: configuration, devices, data."""

from __future__ import annotations

import dataclasses
import glob
import importlib.util
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import get_args

from bert_dp import record
from bert_dp.config import (
    HF,
    MAX_RANKS,
    Config,
    ConfigError,
    Issue,
    dump_config,
    engine_facts,
    hf_directory,
    init_issues,
    load_config,
    modernbert_issues,
    read_data,
)
from bert_dp.config.error import install_command
from bert_dp.config.load import find_config as find_named_config
from bert_dp.config.load import shipped_configs
from bert_dp.config.schema import Logger
from launcher import children
from launcher.log import secret_issues
from launcher.machine import environment
from launcher.machine.environment import Environment

CPU_RANKS = 2  # of --nproc auto on a machine without a GPU


@dataclasses.dataclass(frozen=True)
class Job:
    """A configuration with absolute paths, and what it would run on."""

    name: str
    """Of the configuration's file, without its suffix."""
    config: Config
    machine: Environment

    @property
    def gpus(self) -> int:
        """Number of visible GPUs that it may use; 0: its ranks run on CPU cores."""
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

    def device_issues(self, ranks: int, option: str = "--nproc") -> list[str]:
        """Why this machine has no devices for so many ranks, which `option` asks for; at most one line."""
        if self.config.run.device == "cuda" and not self.gpus:
            return ["run.device: cuda, but this machine shows no GPU; use run.device=cpu or auto"]
        if self.gpus and ranks > self.gpus:
            return [
                f"{option}: {ranks} ranks but {self.gpus} GPUs; use {option} {self.gpus}, or "
                "--set run.device=cpu"
            ]
        return []

    def device_warnings(self) -> list[str]:
        """At most one line on GPUs that were asked for and cannot be used."""
        machine = self.machine
        if self.config.run.device == "cpu" or not machine.names_absent_gpus:
            return []
        return [
            f"CUDA_VISIBLE_DEVICES={machine.cuda_visible_devices} names no usable GPU (this machine shows "
            f"{machine.gpus_present}), so ranks use CPU cores; correct it, or say --set run.device=cpu"
        ]

    def issues(self, directory: Path, option: str) -> list[Issue | str]:
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
        path = find_named_config(name)
        if (path / "config.yaml").exists():
            raise ConfigError([f"CONFIG: {name} is a run directory; go on with it by --run-dir {name}"])
        return path
    own = run_dir / "config.yaml" if run_dir else None
    return own if own and own.exists() else shipped_configs() / "quickstart.yaml"


def absolute(config: Config) -> Config:
    """The configuration with every path absolute, so that it runs the same from anywhere."""

    def full(path: str | None) -> str | None:
        return None if path is None else str(Path(os.path.expanduser(path)).resolve())

    def source(name: str) -> str:
        return name if name == "builtin" or name.startswith("hub:") else str(full(name))

    data, init_from = config.data, config.run.init_from
    sources = None if data.sources is None else tuple(map(source, data.sources))
    paths = {"path": full(data.path), "sources": sources, "tokenizer": full(data.tokenizer)}
    foreign = hf_directory(init_from)
    weights = full(init_from) if foreign is None else f"{HF}{full(str(foreign))}"
    run = config.run.model_copy(update={"init_from": weights})
    return config.model_copy(update={"data": data.model_copy(update=paths), "run": run})


def input_issues(config: Config) -> list[Issue | str]:
    """Files and packages the configuration names and that are not there; one line each."""
    issues: list[Issue | str] = []
    data = config.data
    if data.path is not None:
        try:
            issues += read_data(config, Path(data.path)).issues(config)
        except ConfigError as error:
            issues += [issue.within("data.path") for issue in error.issues]
    for source in data.sources or ():
        known = source == "builtin" or source.startswith("hub:") or os.path.exists(source)
        if not known and not glob.glob(source, recursive=True):
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
    issues += logger_issues(config.log.loggers, "log.to")
    engine = config.parallel.engine
    if (package := engine_facts(engine).package) is not None and not has_package(package):
        issues.append(f"parallel.engine: {engine} needs `{install_command(package)}`")
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


def exposure_issues(config: Config, directory: Path, option: str) -> list[Issue | str]:
    """Find settings that would carry a secret into the directory, which `option` names."""
    data = config.data
    texts = {
        "data.path": data.path,
        "data.sources": " ".join(data.sources or ()),
        option: str(directory),
        "data.tokenizer": data.tokenizer,
        "run.init_from": config.run.init_from,
    }
    return [*secret_issues(texts)]


def built_data(config: Config) -> Path | None:
    """The directory of the data, if it is built. Raises ConfigError."""
    if config.data.path is not None:
        return Path(config.data.path)
    found = _ask_for_data(config, "find")
    return Path(found) if found else None


def prepare_data(config: Config) -> Path:
    """The shards' directory, checked; built from `data.sources` on first use, with progress on our stderr.

    Raises ConfigError.
    """
    if config.objective.name == "finetune":  # each rank verifies what it reads
        return Path(config.data.path or "")
    return Path(_ask_for_data(config, "ensure"))


def _ask_for_data(config: Config, verb: str) -> str:
    """What `python -m bert_dp.corpus` answers. Raises ConfigError."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(dump_config(config))
        file.flush()
        done = children.run_module("bert_dp.corpus", [verb, file.name], stdout=subprocess.PIPE)
    children.check(done.returncode, "preparing the data")
    return done.stdout.strip()
