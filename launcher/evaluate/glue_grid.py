"""The tasks that `eval glue` evaluates, and the configuration of each trial."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from bert_dp.config import (
    CheckpointConfig,
    Config,
    ConfigError,
    ExamplesManifest,
    Issue,
    peak_lr,
    read_examples,
)
from launcher import children
from launcher.evaluate import finetune
from launcher.evaluate.finetune import Pretrained
from launcher.evaluate.glue_scores import GlueOptions
from launcher.run.read_run import heldout_losses
from launcher.run.trials import Trial

RATE_TASKS = ("CoLA", "MRPC", "STS-B", "RTE")  # small ones
RATE_SHARE = 0.1  # of train, held out to choose a rate: the dev sets must have no say in it
NO_EFFECT = ("checkpoint", "log.to", "log.tensorboard")  # trials keep no checkpoint and send no records


@dataclasses.dataclass(frozen=True)
class PreparedTask:
    """A task whose examples are prepared in `path`."""

    path: Path
    manifest: ExamplesManifest

    @property
    def name(self) -> str:
        return self.manifest.task

    @property
    def train_tokens(self) -> int:
        """Tokens of an epoch, to which the time of a trial is proportional."""
        return self.manifest.splits["train"].tokens


@dataclasses.dataclass(frozen=True)
class GlueGrid:
    """What an evaluation runs."""

    start: Pretrained
    overrides: tuple[str, ...]
    options: GlueOptions
    base: Config  # of every trial, without the data of its task
    precision: str
    on_gpu: bool
    tasks: Mapping[str, PreparedTask]
    rate_tasks: Mapping[str, PreparedTask]  # they choose the rate; RATE_SHARE of train replaces their dev
    left_out: Mapping[str, str]  # task without files -> reason

    @property
    def seeds(self) -> list[int]:
        return [self.base.run.seed + k for k in range(self.options.seeds)]

    @property
    def weights(self) -> Path | None:
        """The checkpoint that trials start from; None = random weights."""
        return None if self.options.init == "random" else self.start.checkpoint

    @property
    def heldout_loss(self) -> float | None:
        """Nats, of `weights`, if the pretraining evaluated this step."""
        run = self.start.checkpoint.parent.parent
        return None if self.weights is None else heldout_losses(run).get(self.start.step)

    @property
    def every_task(self) -> list[PreparedTask]:
        """All prepared directories; a task that also chooses the rate has two."""
        return [*self.tasks.values(), *self.rate_tasks.values()]


def missing_files(data: Sequence[Path]) -> dict[str, list[str]]:
    """Return each task of GLUE, in GLUE's order, with the train and dev files that `data` lacks."""
    words = [word for place in data for word in ("--data", str(place))]
    answer = children.ask_module("bert_dp.examples.prepare", ["missing", *words], "looking for GLUE's files")
    return dict(json.loads(answer))


def choose_tasks(
    missing: Mapping[str, Sequence[str]], options: GlueOptions
) -> tuple[GlueOptions, dict[str, str]]:
    """Return the options with every task named, and the reason for each task that has no files. Raises
    ConfigError."""
    found = [task for task, files in missing.items() if not files]
    tasks = options.tasks or found
    rate_tasks = options.rate_tasks
    if options.rates and not rate_tasks:
        rate_tasks = [task for task in RATE_TASKS if task in found]
    issues = init_task_issues(options, tasks)
    for option, names in (("--tasks", tasks), ("--rate-tasks", rate_tasks)):
        for task in names:
            if task not in missing:
                text, hint = f"{task} is not a task of GLUE", f"choose from {', '.join(missing)}"
                issues.append(Issue(option, "unknown", text, task, hint=hint))
            elif missing[task]:
                text, hint = f"{task} needs {', '.join(missing[task])}", "add the place that holds it"
                issues.append(Issue(option, "not_found", text, task, "--data", hint))
    if not tasks:
        hint = "name a folder or archive with CoLA/train.tsv and so on"
        issues.append(Issue("--data", "not_found", "no task of GLUE is there", hint=hint))
    if rate_tasks and not options.rates:
        text = "tasks choose a rate only with --rates"
        issues.append(Issue("--rate-tasks", "no_effect", text, other="--rates", hint="add --rates"))
    if options.rates and not rate_tasks:
        text = f"none of {', '.join(RATE_TASKS)} is there to choose a rate"
        issues.append(Issue("--rates", "not_found", text, other="--data", hint="name tasks by --rate-tasks"))
    if issues:
        raise ConfigError(issues)
    left_out = {task: f"no {', '.join(files)} in --data" for task, files in missing.items() if files}
    ordered = [task for task in missing if task in tasks]
    return options.model_copy(update={"tasks": ordered, "rate_tasks": rate_tasks}), left_out


def init_task_issues(options: GlueOptions, tasks: Sequence[str]) -> list[Issue]:
    """Return the reasons that tasks cannot start from the finetuned runs of others."""
    issues = []
    for task, source in options.init_task.items():
        pair = f"{task}={source}"
        if absent := [name for name in (task, source) if name not in tasks]:
            text = f"{pair} needs {' and '.join(absent)} evaluated"
            issues.append(Issue("--init-task", "conflict", text, pair, "--tasks", "add it to --tasks"))
        if source in options.init_task:
            text, hint = f"{source} of {pair} starts from a task itself", "start from one that does not"
            issues.append(Issue("--init-task", "unsupported", text, pair, hint=hint))
    if options.init_task and options.init == "random":
        text = "the task that others start from is finetuned from random weights"
        issues.append(Issue("--init-task", "conflict", text, other="--init", hint="leave out one of them"))
    return issues


def setting_issues(overrides: Sequence[str], rates: Sequence[float]) -> list[Issue]:
    """Return the given settings that an evaluation ignores or sets itself."""
    issues = []
    for name in finetune.setting_names(overrides):
        if f"{name}.".startswith(tuple(f"{setting}." for setting in NO_EFFECT)):
            text = "an evaluation keeps no checkpoints and sends no records"
            issues.append(Issue(name, "no_effect", text, hint="leave it out"))
        if rates and name in ("optim.lr", "optim.lr_scaling", "optim.lr_batch"):
            text = "--rates chooses the rate"
            issues.append(Issue(name, "conflict", text, other="--rates", hint="leave out one of them"))
    return issues


def prepare(
    start: Pretrained, task: str, data: Sequence[Path], length: int, dev_share: float = 0.0
) -> PreparedTask:
    """Prepare the examples, or find them in the cache. Raises ConfigError."""
    path = finetune.prepare(start, finetune.glue_source(task, data), length, dev_share)
    return PreparedTask(path, read_examples(path))


def configure(grid: GlueGrid, task: PreparedTask, weights: Path | None) -> Config:
    """Return the finetuning configuration of a task. Raises ConfigError."""
    config = finetune.configuration(grid.start, grid.overrides, weights, task.path, task.manifest)
    return finetune.sized_micro_batches(config, grid.options.ranks, grid.overrides, on_gpu=grid.on_gpu)


def make_trial(
    grid: GlueGrid, out: Path, task: PreparedTask, lr: float | None, seed: int, weights: Path | None
) -> Trial:
    """Return one finetuning run. `lr`: None = the configuration's. It keeps a checkpoint only if another task
    starts from it."""
    config = configure(grid, task, weights)
    chooses_rate = task.manifest.dev_share > 0
    optim = config.optim
    if lr is not None:
        optim = optim.model_copy(update={"lr": lr, "lr_scaling": "none", "lr_batch": None})
    is_start = not chooses_rate and task.name in grid.options.init_task.values()
    config = config.model_copy(
        update={
            "run": config.run.model_copy(update={"seed": seed}),
            "optim": optim,
            "checkpoint": CheckpointConfig(keep=int(is_start)),
            "log": config.log.model_copy(update={"to": (), "tensorboard": False}),
            "precision": grid.precision,
        }
    )
    name = f"{'rate-' if chooses_rate else ''}{task.name}-lr-{peak_lr(config).value}-s{seed}"
    return Trial(out / "trials" / name, config, grid.options.ranks)


def rounds(grid: GlueGrid) -> list[list[PreparedTask]]:
    """Return the tasks that start from the pretrained run, then those that start from one of them; in each
    round the longest first, so that the devices finish together."""
    tasks = sorted(grid.tasks.values(), key=lambda task: -task.manifest.num_samples)
    later = grid.options.init_task
    return [[t for t in tasks if t.name not in later], [t for t in tasks if t.name in later]]
