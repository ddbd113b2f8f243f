"""`bert-dp finetune`: the configuration of a finetuning run, from a pretrained run and a task's data."""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bert_dp import record
from bert_dp.config import (
    Config,
    ConfigError,
    ExamplesManifest,
    Issue,
    parse_overrides,
    read_examples,
    read_yaml,
    resolve,
    shipped_configs,
)
from launcher import children, job
from launcher.machine import environment

RECIPE = "glue.yaml"

OURS = ("data.path", "run.init_from", "finetune.kind", "finetune.labels", "objective.name")
"""Settings that follow from RUN and its task."""


class ExamplesSource(NamedTuple):
    """Name a task and the options by which its examples are prepared."""

    name: str
    options: Sequence[str]
    """Of `python -m bert_dp.examples.prepare prepare`."""


def glue_source(task: str, data: Sequence[Path]) -> ExamplesSource:
    """GLUE's own files in `data`, folders or archives."""
    return ExamplesSource(
        task, ["--task", task, *(part for place in data for part in ("--data", str(place)))]
    )


def source_of(
    task: str | None, data: Sequence[Path], files: Mapping[str, str | None], columns: Mapping[str, str | None]
) -> ExamplesSource:
    """Return the source that options name: a task of GLUE, or a user's files, described by `files` (train,
    dev, test) and `columns` (text, text-pair, label, kind). Raises ConfigError."""
    own = {name: value for name, value in {**files, **columns}.items() if value is not None}
    issues = []
    if task is not None:
        fix = "leave it out, or name your own files by --train and --dev"
        text = "GLUE defines the files and columns of --task"
        issues += [Issue(f"--{name}", "conflict", text, value, "--task", fix) for name, value in own.items()]
        if not data:
            fix = "add the folder or archive with GLUE's files"
            issues.append(Issue("--data", "missing", f"--task {task} needs GLUE's files", hint=fix))
    elif data:
        fix = "name a task, or your own files by --train and --dev"
        issues.append(Issue("--data", "no_effect", "goes with --task", other="--task", hint=fix))
    elif not own.keys() & files.keys():
        fix = "name a GLUE task with --data, or your own files by --train and --dev"
        issues.append(Issue("--task", "missing", "no examples are named", hint=fix))
    else:
        absent = [name for name in ("train", "dev") if name not in own]
        issues += [Issue(f"--{name}", "missing", "own files take --train and --dev") for name in absent]
    if issues:
        raise ConfigError(issues)
    if task is not None:
        return glue_source(task, data)
    return ExamplesSource("own", [part for name, value in own.items() for part in (f"--{name}", value)])


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """What finetuning begins with."""

    run: Path
    checkpoint: Path
    """Its newest."""
    step: int
    """Of the checkpoint."""
    config: Config
    tokenizer: Path


def find_pretrained(run: Path) -> Pretrained:
    """A run, or a checkpoint of one. Raises ConfigError, naming what is missing."""
    if not run.exists():
        fix = "name the directory of a pretrained run"
        raise ConfigError([Issue("RUN", "not_found", f"{run} does not exist", str(run), hint=fix)])
    checkpoint = record.newest_checkpoint_facts(run)
    if checkpoint is None:
        fix = "name a run that has saved one"
        raise ConfigError([Issue("RUN", "missing", f"{run} holds no checkpoint", str(run), hint=fix)])
    path, facts = checkpoint
    tokenizer = record.tokenizer_of(path).resolve()
    return Pretrained(run.resolve(), path.resolve(), facts.step, resolve([facts.config]), tokenizer)


def setting_names(overrides: Sequence[str]) -> list[str]:
    """Return the names of settings a.b=value."""
    return [item.partition("=")[0].strip() for item in overrides]


def setting_issues(overrides: Sequence[str]) -> list[Issue]:
    """Return the given settings that follow from RUN and the task."""
    names, text = setting_names(overrides), "follows from RUN and the task"
    return [Issue(name, "conflict", text, other="RUN", hint="leave it out") for name in names if name in OURS]


def configuration(
    start: Pretrained,
    overrides: Sequence[str],
    init_from: Path | None,
    path: Path | None = None,
    manifest: ExamplesManifest | None = None,
) -> Config:
    """The model and length of the pretrained run, then the recipe, then the kind and labels of the data at
    `path`, then the settings that were given. Without data: to be checked before any is prepared.
    `init_from`: a run or checkpoint; None = random weights. Raises ConfigError."""
    model = start.config.model.model_dump(mode="json")
    levels: list[dict[str, Any]] = [
        {"model": model, "data": {"sequence_length": start.config.data.sequence_length}},
        read_yaml(shipped_configs() / RECIPE),
        {"data": {"path": str(path or "not-prepared")}},
    ]
    if init_from is not None:
        levels.append({"run": {"init_from": str(init_from)}})
    if manifest is not None:
        levels.append({"finetune": {"kind": manifest.kind, "labels": manifest.labels}})
    return resolve([*levels, parse_overrides(overrides)])


def prepare(start: Pretrained, source: ExamplesSource, sequence_length: int, dev_share: float = 0.0) -> Path:
    """Prepare the examples, or find them in the cache; return the directory. Raises ConfigError without
    issues, as the child process has printed them."""
    arguments = ["prepare", "--tokenizer", str(start.tokenizer), "--length", str(sequence_length)]
    arguments += ["--dev-share", str(dev_share)] if dev_share else []
    done = children.run_module(
        "bert_dp.examples.prepare", [*arguments, *source.options], stdout=subprocess.PIPE
    )
    children.check(done.returncode, "preparing the examples")
    return Path(done.stdout.strip())


def sized_micro_batches(config: Config, ranks: int, overrides: Sequence[str], *, on_gpu: bool) -> Config:
    """With the micro batch of this device, where batch.micro_size is not given and the global batch divides.

    Examples are short, so a replica's share of a global batch fits a GPU. On a CPU it stays in parts of the
    configuration's size where they divide it: sorted by length, each is padded to its own longest example
    (benchmarks/RESULTS.md).
    """
    replicas = max(1, ranks // config.parallel.tensor)
    is_set = "micro_size" in parse_overrides(overrides).get("batch", {})
    share, left = divmod(config.batch.global_size, replicas)
    if is_set or left or not (on_gpu or share % config.batch.micro_size):
        return config
    return resolve([config.model_dump(mode="json"), {"batch": {"micro_size": share}}])


def load(
    run: Path, source: ExamplesSource, overrides: Sequence[str], *, nproc: str, random_weights: bool
) -> job.Job:
    """A job that `train` takes. Raises ConfigError."""
    if issues := setting_issues(overrides):
        raise ConfigError(issues)
    start = find_pretrained(run)
    machine = environment.probe(Path())
    weights = None if random_weights else start.run
    checked = configuration(start, overrides, weights)
    name = f"{start.run.name}-{source.name}"
    ranks = job.Job(name, checked, machine).choose_ranks(nproc)
    path = prepare(start, source, checked.data.sequence_length)
    manifest = read_examples(path)
    config = configuration(start, overrides, weights, path, manifest)
    on_gpu = job.Job(name, config, machine).gpus > 0
    sized = sized_micro_batches(config, ranks, overrides, on_gpu=on_gpu)
    return job.Job(name, job.absolute(sized), machine)
