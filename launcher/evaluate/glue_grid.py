"""What `eval glue` runs: the tasks whose files are there, and a trial for each task, rate and seed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from bert_dp.config import CheckpointConfig, Config, ConfigError, ExamplesManifest, peak_lr, read_examples
from launcher import children
from launcher.evaluate import finetune
from launcher.evaluate.finetune import Pretrained, glue_source
from launcher.results import GlueOptions
from launcher.run.read_run import heldout_losses
from launcher.run.trials import Trial

RATE_TASKS = ("CoLA", "MRPC", "STS-B", "RTE")  # small ones
RATE_SHARE = 0.1  # of train, by which a rate is chosen: never by dev
NOT_HERE = ("checkpoint", "log.to", "log.tensorboard")
"""Settings of a run that its trials have not: they are not kept, and no service is told of them."""


@dataclasses.dataclass(frozen=True)
class Task:
    """A task with its prepared directory."""

    path: Path
    manifest: ExamplesManifest

    @property
    def name(self) -> str:
        return self.manifest.task

    @property
    def dev(self) -> list[str]:
        """The splits whose scores count, whether or not a test file has labels too."""
        return [name for name in self.manifest.splits if name.startswith("dev")]


@dataclasses.dataclass(frozen=True)
class Grid:
    """What is measured of a run, and with which settings."""

    start: Pretrained
    overrides: tuple[str, ...]
    options: GlueOptions
    base: Config
    """Of every trial, but for what its task brings."""
    precision: str
    """Of every trial."""
    on_gpu: bool
    """Where every trial runs."""
    tasks: Mapping[str, Task]
    rate_tasks: Mapping[str, Task]
    """Those that choose the rate, with a part of train in place of dev."""
    left_out: Mapping[str, str]
    """Task -> why it is not evaluated."""

    @property
    def seeds(self) -> list[int]:
        return [self.base.run.seed + k for k in range(self.options.seeds)]

    @property
    def weights(self) -> Path | None:
        """That a trial begins with; None = random ones."""
        return None if self.options.init == "random" else self.start.checkpoint

    @property
    def heldout_loss(self) -> float | None:
        """Nats, of the checkpoint that trials start from, where the pretraining evaluated it."""
        run = self.start.checkpoint.parent.parent
        return heldout_losses(run).get(self.start.step) if self.weights is not None else None

    @property
    def every_task(self) -> list[Task]:
        """Every prepared directory; a task that also chooses the rate has two."""
        return [*self.tasks.values(), *self.rate_tasks.values()]


def missing_files(data: Sequence[Path]) -> dict[str, list[str]]:
    """Task of GLUE, in GLUE's order -> its train and dev files that `data` lacks. Raises ConfigError."""
    words = [word for place in data for word in ("--data", str(place))]
    return dict(children.asked("bert_dp.examples", ["missing", *words], "looking for GLUE's files"))


def choose_tasks(
    missing: Mapping[str, Sequence[str]], options: GlueOptions
) -> tuple[GlueOptions, dict[str, str]]:
    """The options with every task named, and why the others are left out. Raises ConfigError."""
    available = [task for task, files in missing.items() if not files]
    tasks = options.tasks or available
    unknown = [
        f"{option}: {task} is no task of GLUE; choose from {', '.join(missing)}"
        for option, names in (("--tasks", options.tasks), ("--rate-tasks", options.rate_tasks))
        for task in names
        if task not in missing
    ]
    if unknown:
        raise ConfigError(unknown)
    issues = [
        f"--tasks: {task}: no {', '.join(missing[task])} in --data; add --data with the folder or tar that "
        "has it"
        for task in tasks
        if missing[task]
    ]
    if not tasks:
        issues.append("--data: holds no task of GLUE; name a folder or tar with CoLA/train.tsv and the like")
    rate_tasks = options.rate_tasks or [task for task in RATE_TASKS if task in available]
    if not options.rates:
        issues += ["--rate-tasks: choose a rate, but --rates names none"] if options.rate_tasks else []
        rate_tasks = []
    elif not rate_tasks:
        issues.append(f"--rates: none of {', '.join(RATE_TASKS)} is there; name others with --rate-tasks")
    issues += [
        f"--rate-tasks: {task}: no {', '.join(missing[task])} in --data"
        for task in rate_tasks
        if missing[task]
    ]
    issues += init_task_issues(options.init_task, tasks, options.init)
    if issues:
        raise ConfigError(issues)
    left_out = {
        task: f"no {', '.join(files)} in --data" if files else "not among --tasks"
        for task, files in missing.items()
        if task not in tasks
    }
    ordered = [task for task in missing if task in tasks]
    return options.model_copy(update={"tasks": ordered, "rate_tasks": list(rate_tasks)}), left_out


def init_task_issues(init_task: Mapping[str, str], tasks: Sequence[str], init: str) -> list[str]:
    """Why these tasks cannot start from those; one line each."""
    issues = []
    for task, source in init_task.items():
        named = f"--init-task: {task}={source}"
        issues += [
            f"{named}: {name} is not evaluated; add it to --tasks"
            for name in (task, source)
            if name not in tasks
        ]
        if source in init_task:
            issues.append(f"{named}: {source} starts from {init_task[source]} itself; only one may follow")
    if init_task and init == "random":
        issues.append("--init-task: is not from random weights; drop it or --init random")
    return issues


def setting_issues(overrides: Sequence[str], rates: Sequence[float]) -> list[str]:
    """Settings that this verb sets itself; one line each."""
    names = finetune.setting_names(overrides)
    issues = finetune.setting_issues(overrides)
    issues += [
        f"{name}: has no effect, as an evaluation keeps no checkpoints and sends nothing; leave it out"
        for name in names
        if f"{name}.".startswith(tuple(f"{own}." for own in NOT_HERE))
    ]
    if rates:
        chosen = ("optim.lr", "optim.lr_scaling", "optim.lr_batch")
        issues += [f"{name}: --rates chooses the rate; give one of them" for name in names if name in chosen]
    return issues


def prepare(start: Pretrained, task: str, data: Sequence[Path], length: int, dev_share: float = 0.0) -> Task:
    """From the cache or made now. Raises ConfigError."""
    path = finetune.prepare(start, glue_source(task, data), length, dev_share)
    return Task(path, read_examples(path))


def configure(grid: Grid, task: Task, weights: Path | None) -> Config:
    """Of the task, as it would be trained. Raises ConfigError."""
    config = finetune.configuration(grid.start, grid.overrides, weights, task.path, task.manifest)
    return finetune.sized_micro_batches(config, grid.options.ranks, grid.overrides, on_gpu=grid.on_gpu)


def make_trial(grid: Grid, out: Path, task: Task, lr: float | None, seed: int, weights: Path | None) -> Trial:
    """One finetuning run of `task`. `lr`: None = the configuration's. Its checkpoint is kept where a task
    starts from it."""
    config = configure(grid, task, weights)
    chooses_rate = task.manifest.dev_share > 0
    optim = config.optim
    if lr is not None:
        optim = optim.model_copy(update={"lr": lr, "lr_scaling": "none", "lr_batch": None})
    keeps = not chooses_rate and task.name in grid.options.init_task.values()
    config = config.model_copy(
        update={
            "run": config.run.model_copy(update={"seed": seed}),
            "optim": optim,
            "checkpoint": CheckpointConfig(keep=int(keeps)),
            "log": config.log.model_copy(update={"to": (), "tensorboard": False}),
            "precision": grid.precision,
        }
    )
    name = f"{'rate-' if chooses_rate else ''}{task.name}-lr-{peak_lr(config).value}-s{seed}"
    return Trial(out / "trials" / name, config, grid.options.ranks)


def rounds(grid: Grid) -> list[list[Task]]:
    """Tasks that start from RUN, then those that start from one of them; the longest first, so that the
    devices end together."""
    tasks = sorted(grid.tasks.values(), key=lambda task: -task.manifest.num_samples)
    followers = grid.options.init_task
    parts = [[t for t in tasks if t.name not in followers], [t for t in tasks if t.name in followers]]
    return [part for part in parts if part]
