"""BERT-GPU's claim, on models that this machine can train: 1 and 4 ranks give the same model downstream.

    python benchmarks/finetune_claim.py --out DIR --data GLUE [--data ...] [--config small-text]
        [--set a.b=v ...] [--tokens 1000000] [--pretrainings 3] [--tasks MRPC,RTE,STS-B,CoLA] [--seeds 1]
        [--epochs 5] [--finetune-set a.b=v ...] [--arms one,four,control,bert-gpu] [--finetune-only]
        [--precision fp32] [--json FILE]

Models are pretrained and finetuned by `bert-dp train` and `bert-dp eval glue`, every arm with the same seeds:

    one       pretrained on 1 rank, finetuned on 1 rank
    four      pretrained on 4 ranks, finetuned on 4 ranks, the same global batches
    control   as one, with another accumulation both times: what rounding alone does
    bert-gpu  pretrained as BERT-GPU does on 4 GPUs: 4 x the batch at the same rate and the same number of
              steps, so 4 x the tokens; finetuned on 1 rank, as it finetunes on none

The same command goes on after a kill; more --pretrainings, --seeds and --arms are added to what is there.
Losses and predictions do not depend on how busy the machine is. --finetune-only finetunes all arms but
bert-gpu from the first pretraining of one, in fp32. With --precision fp64 no prediction may flip.

Against one, over the same pretraining seeds k, finetuning seeds s and dev examples:

    difference  of each task's metric, mean over (k, s); STS-B by Pearson, and in no pooled figure
    flips       dev examples that get another label
    pooled      accuracy over the dev examples of all tasks with labels, mean over (k, s), and its paired
                standard error over examples (paired_difference)

The claim: the pooled accuracy of four is within 0.1 points of one's. If more than 1 % of the control's
predictions flip, rounding alone moves single tasks by more than that: then 0.1 points cannot be shown, and
what is asked is twice the paired standard error.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import records
from benchmarks.records import bert_dp, set_options
from bert_dp import files
from bert_dp.config import Config, ConfigError, load_config, read_examples
from launcher import job, results
from launcher.evaluate import FILE, finetune
from launcher.evaluate.glue_scores import Glue, GlueTask
from launcher.report.formats import format_duration
from launcher.run.trials import read_summary

POINT = 0.001  # the claim's 0.1 points, as a share
MANY_FLIPS = 0.01
FIXED = ("config", "settings", "finetune_settings", "tokens", "tasks", "epochs", "precision", "finetune_only")
CALIBRATION_STEPS = 20
REGRESSIONS = {"pearson", "spearman"}
Run = tuple[int, int]
"""(seed of the pretraining, seed of the finetuning)."""
Answers = Mapping[tuple[str, int], tuple[float | None, float | None]]
"""(split, index) -> (answer, label) of the labelled dev examples."""
Seed = TypeVar("Seed", bound=Hashable)


@dataclasses.dataclass(frozen=True)
class Arm:
    """How the models of an arm are trained."""

    ranks: int = 1
    settings: tuple[str, ...] = ()
    """Of pretraining, beside everyone's."""
    finetune_ranks: int = 1
    finetune_settings: tuple[str, ...] = ()
    times: int = 1
    """Batch and tokens of pretraining over one's."""


def arms_of(config: Config) -> dict[str, Arm]:
    """`config`: of the pretraining."""
    size, micro = config.batch.global_size, config.batch.micro_size
    other = 2 * micro if size % (2 * micro) == 0 else max(1, micro // 2)
    return {
        "one": Arm(),
        "four": Arm(ranks=4, finetune_ranks=4),
        "control": Arm(settings=(f"batch.micro_size={other}",), finetune_settings=("batch.micro_size=4",)),
        "bert-gpu": Arm(ranks=4, settings=(f"batch.global_size={4 * size}",), times=4),
    }


def parse() -> argparse.Namespace:
    parser = records.make_parser(__doc__, "--set", "--date", "--json")
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder; the same one goes on")
    add(
        "--data",
        action="append",
        required=True,
        type=Path,
        help="folder or tar with GLUE's files; repeatable",
    )
    add("--config", default="small-text", help="of the pretraining")
    add("--tokens", type=int, default=24_000_000, help="of a pretraining of one")
    add("--pretrainings", type=int, default=3, help="seeds of it")
    add("--tasks", default="CoLA,SST-2,MRPC,STS-B,QNLI,RTE,WNLI")
    add("--seeds", type=int, default=1, help="of each finetuning")
    add("--epochs", type=float, default=5.0, help="of each finetuning")
    add("--finetune-set", dest="finetune_settings", action="append", default=[], metavar="a.b=v")
    add("--arms", default="one,four,control,bert-gpu")
    add("--finetune-only", action="store_true")
    add("--precision", choices=("fp32", "fp64"), default="fp32")
    add("--quick", action="store_true", help="one seed, one epoch, 4,096 tokens: shows that it works")
    o = parser.parse_args()
    if o.quick:
        vars(o).update(tokens=4096, pretrainings=1, seeds=1, epochs=1.0)
    o.out, o.data = o.out.resolve(), [path.resolve() for path in o.data]
    o.tasks = o.tasks.split(",")
    try:
        config = load_config(job.find_config(o.config), [*o.settings, *common_settings(o, o.tokens)])
    except ConfigError as error:
        parser.error(str(error))
    o.every_arm = arms_of(config)
    o.arms = records.check_names(parser, "--arms", o.arms, o.every_arm)
    if "one" not in o.arms:
        parser.error("--arms: must hold one, with which the others are compared")
    if o.finetune_only:
        o.arms = [arm for arm in o.arms if arm != "bert-gpu"]  # it differs in its pretraining alone
        o.pretrainings = 1
    for setting in (*o.settings, *o.finetune_settings):
        if setting.startswith(("schedule.", "precision", "run.seed")):
            parser.error(f"{setting}: follows from --tokens, --epochs, --precision and the seeds")
    before = files.read_json(o.out / "settings.json")
    fixed = {name: getattr(o, name) for name in FIXED}
    if before is not None and (differ := [name for name in FIXED if before.get(name) != fixed[name]]):
        parser.error(f"--out: {o.out} holds another comparison ({', '.join(differ)} differ); name a new one")
    o.out.mkdir(parents=True, exist_ok=True)
    files.write_json(o.out / "settings.json", fixed)
    return o


def common_settings(o: argparse.Namespace, tokens: int) -> list[str]:
    """Of every pretraining. Eager, as whether compiling pays is decided by the clock."""
    precision = "fp32" if o.finetune_only else o.precision
    return [f"schedule.tokens={tokens}", f"precision={precision}", "compile=off"]


# ---- what is run ----


@dataclasses.dataclass(frozen=True)
class Work:
    """A run of `bert-dp`."""

    name: str
    command: Sequence[str]
    seconds: float
    """Expected."""
    is_done: Callable[[], bool]


def pretrained(o: argparse.Namespace, arm: str, number: int) -> Path:
    """The run that finetuning `number` of an arm begins with."""
    folder: Path = o.out / "pretrained" / f"{'one' if o.finetune_only else arm}-{number}"
    return folder


def evaluated(o: argparse.Namespace, arm: str, number: int) -> Path:
    folder: Path = o.out / "glue" / f"{arm}-{number}"
    return folder


def pretrain_command(o: argparse.Namespace, arm: Arm, number: int, run: Path, tokens: int) -> list[str]:
    settings = [*o.settings, *common_settings(o, tokens), *arm.settings, f"run.seed={number}"]
    return ["train", o.config, *set_options(settings), "--nproc", str(arm.ranks), "--run-dir", str(run)]


def finetune_arguments(o: argparse.Namespace) -> list[str]:
    """Of every finetuning: settings, and where its examples are."""
    places = [part for path in o.data for part in ("--data", str(path))]
    return [*o.finetune_settings, f"precision={o.precision}", "compile=off", *places]


def evaluate_command(o: argparse.Namespace, name: str, number: int) -> list[str]:
    arm = o.every_arm[name]
    settings = [*finetune_arguments(o), f"schedule.epochs={o.epochs}", *arm.finetune_settings]
    options = ["--tasks", ",".join(o.tasks), "--seeds", str(o.seeds)]
    options += ["--ranks-per-job", str(arm.finetune_ranks), "--out", str(evaluated(o, name, number))]
    return ["eval", "glue", str(pretrained(o, name, number)), *settings, *options]


def is_pretrained(run: Path) -> bool:
    summary = read_summary(run)
    return summary is not None and summary.status == "done"


def predicted_answer(logits: Sequence[float | None]) -> float | None:
    """The index of the greatest logit, or the score of a regression; None if a logit is not finite."""
    finite = [logit for logit in logits if logit is not None]
    if len(finite) < len(logits):
        return None
    return finite[0] if len(finite) == 1 else float(finite.index(max(finite)))


def glue_of(folder: Path) -> Glue | None:
    """What there is of an evaluation."""
    return results.read(folder / FILE, Glue) if (folder / FILE).is_file() else None


def is_evaluated(folder: Path, seeds: int) -> bool:
    glue = glue_of(folder)
    return glue is not None and glue.status == "complete" and glue.settings.seeds >= seeds


def calibrate(o: argparse.Namespace) -> dict[str, Any]:
    """Rates of 1 rank in short runs, measured once, by which times are expected."""
    path = o.out / "calibration.json"
    if (measured := files.read_json(path)) is not None:
        return measured
    config = load_config(job.find_config(o.config), o.settings)
    tokens = CALIBRATION_STEPS * config.batch.global_size * config.data.sequence_length
    base_dir, tuned_dir = (o.out / "calibration" / name for name in ("pretrained", "finetuned"))
    start_s = time.monotonic()
    bert_dp(*pretrain_command(o, Arm(), 0, base_dir, min(tokens, o.tokens)))
    base = finetune.find_pretrained(base_dir)
    length = base.config.data.sequence_length
    task_tokens = {}
    for name in o.tasks:
        prepared = finetune.prepare(base, finetune.glue_source(name, o.data), length)
        task_tokens[name] = {split: part.tokens for split, part in read_examples(prepared).splits.items()}
    small = min(o.tasks, key=lambda name: sum(task_tokens[name].values()))
    settings = [*finetune_arguments(o), f"schedule.steps={CALIBRATION_STEPS}"]
    options = ["--task", small, "--nproc", "1", "--run-dir", str(tuned_dir)]
    finetune_start_s = time.monotonic()
    bert_dp("finetune", str(base_dir), *settings, *options)
    finetune_s = time.monotonic() - finetune_start_s
    pretraining, finetuning = read_summary(base_dir), read_summary(tuned_dir)
    assert pretraining is not None
    assert finetuning is not None
    computing_s = sum(finetuning.time_s.get(key, 0.0) for key in ("train", "eval"))
    measured = {
        "seconds": time.monotonic() - start_s,
        "pretraining_tokens_per_s": pretraining.tokens_per_s,
        "finetuning_tokens_per_s": finetuning.tokens_per_s,
        "start_s": max(0.0, finetune_s - computing_s),
        "tokens": task_tokens,
    }
    files.write_json(path, measured)
    return measured


def plan(o: argparse.Namespace, rates: Mapping[str, Any]) -> list[Work]:
    """Everything, in order: all arms of a pretraining seed, then the next seed. Ranks share the cores, so
    tokens take as long on 4; starting takes as much longer as there are ranks to a core. A token of dev or
    test has only its forward pass, a third of the work."""
    cores = len(os.sched_getaffinity(0))
    parts = [rates["tokens"][task] for task in o.tasks]
    trained = sum(o.epochs * part["train"] for part in parts)
    evaluated_only = sum(sum(part.values()) - part["train"] for part in parts)
    computed = o.seeds * (trained + evaluated_only / 3)
    trials = len(o.tasks) * o.seeds
    works: dict[str, Work] = {}
    for number in range(o.pretrainings):
        for name in o.arms:
            arm = o.every_arm[name]
            run, folder = pretrained(o, name, number), evaluated(o, name, number)
            source = o.every_arm["one"] if o.finetune_only else arm
            tokens = source.times * o.tokens
            starts = max(1.0, source.ranks / cores)
            pretraining = Work(
                f"pretraining {run.name}",
                pretrain_command(o, source, number, run, tokens),
                tokens / rates["pretraining_tokens_per_s"] + rates["start_s"] * starts,
                functools.partial(is_pretrained, run),
            )
            starts = trials * arm.finetune_ranks / cores
            finetuning = Work(
                f"finetuning {folder.name}",
                evaluate_command(o, name, number),
                computed / rates["finetuning_tokens_per_s"] + rates["start_s"] * starts,
                functools.partial(is_evaluated, folder, o.seeds),
            )
            works.setdefault(pretraining.name, pretraining)
            works[finetuning.name] = finetuning
    return list(works.values())


def run_all(o: argparse.Namespace, works: Sequence[Work]) -> None:
    """What is not done yet; the figures of what there is after each evaluation."""
    todo = [work for work in works if not work.is_done()]
    expected = sum(work.seconds for work in todo)
    print(
        f"{len(todo)} of {len(works)} parts to run, expected {format_duration(expected)} by the rates of "
        "short runs on 1 rank; ranks beyond the cores are slower than that",
        flush=True,
    )
    start_s = time.monotonic()
    for number, work in enumerate(todo, 1):
        bert_dp(*work.command)
        spent, done = time.monotonic() - start_s, sum(each.seconds for each in todo[:number])
        left = spent / done * (expected - done)
        print(
            f"[{number}/{len(todo)}] {work.name}: {format_duration(spent)} so far, about "
            f"{format_duration(left)} left",
            flush=True,
        )
        if work.name.startswith("finetuning"):
            write(o, figures_of(o))


# ---- two sets of predictions side by side ----


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """A glue.json and the folder that holds its trials."""

    folder: Path
    glue: Glue

    @property
    def tasks(self) -> dict[str, GlueTask]:
        return {task.task: task for task in self.glue.tasks}

    def answers(self, task: str) -> dict[int, Answers]:
        """Return the predictions of each seed whose trial has scores."""
        trials = [trial for trial in self.tasks[task].trials if trial.status == "ok"]
        return {trial.seed: read_dev_answers(self.folder / "trials" / trial.trial) for trial in trials}


def read_dev_answers(trial: Path) -> Answers:
    """Return the answer and the label of each labelled dev example. A labelled test file is left out."""
    lines = map(files.parse_json, (trial / files.PREDICTIONS).read_bytes().splitlines())
    return {
        (line["split"], line["index"]): (predicted_answer(line["logits"]), line["label"])
        for line in lines
        if line["label"] is not None and line["split"].startswith("dev")
    }


@dataclasses.dataclass(frozen=True)
class Flips:
    """Dev examples that get another answer, summed over the seeds that both have."""

    flipped: int
    of: int

    @property
    def share(self) -> float | None:
        return self.flipped / self.of if self.of else None


def flips(one: Mapping[Seed, Answers], other: Mapping[Seed, Answers]) -> Flips:
    """Count the flips over the same seeds and the same examples."""
    pairs = [
        (answer, other[seed][key][0])
        for seed, answers in one.items()
        if seed in other
        for key, (answer, _) in answers.items()
        if key in other[seed]
    ]
    return Flips(sum(a != b for a, b in pairs), len(pairs))


def pooled_accuracy(by_task: Sequence[Mapping[Seed, Answers]]) -> float | None:
    """Return the share of right answers over the dev sets of all tasks, the mean over the seeds that every
    task has."""
    seeds = set.intersection(*(set(answers) for answers in by_task)) if by_task else set()
    shares = []
    for seed in seeds:
        pairs = [pair for answers in by_task for pair in answers[seed].values()]
        shares.append(statistics.fmean(_is_right(pair) for pair in pairs))
    return statistics.fmean(shares) if shares else None


@dataclasses.dataclass(frozen=True)
class Paired:
    """A difference of pooled accuracies; shares of 1."""

    difference: float
    standard_error: float | None
    """None for a single example."""
    examples: int
    seeds: int


def paired_difference(
    one: Sequence[Mapping[Seed, Answers]], other: Sequence[Mapping[Seed, Answers]]
) -> Paired | None:
    """Return how much more accurate `other` is than `one` over the dev sets of all tasks; each has an entry
    per task. None if no seed or no example is shared.

    Of the n examples that both have, over the k seeds that every task has in both, with right = 1 or 0,

        d_i = sum over the seeds of (right of `other` - right of `one`) / k
        difference = sum of d_i / n
        standard error = sqrt(sum of (d_i - difference)^2 / (n (n - 1)))

    This is the standard error of a paired comparison over examples: it says how other dev examples would
    change the difference of these runs, not how other pretraining would.
    """
    sides = [set(answers) for answers in (*one, *other)]
    seeds = set.intersection(*sides) if sides else set()
    gains = [
        statistics.fmean(_is_right(b[seed][key]) - _is_right(a[seed][key]) for seed in seeds)
        for a, b in zip(one, other, strict=True)
        for key in (set.intersection(*(set(x[seed]) for x in (a, b) for seed in seeds)) if seeds else ())
    ]
    if not gains:
        return None
    spread = statistics.stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else None
    return Paired(statistics.fmean(gains), spread, len(gains), len(seeds))


def _is_right(pair: tuple[float | None, float | None]) -> int:
    answer, label = pair
    return int(answer == label)


# ---- the figures, from the evaluations alone ----


@dataclasses.dataclass(frozen=True)
class Measured:
    """The evaluations of an arm that there are, by the number of their pretraining."""

    evaluations: dict[int, Evaluation]

    def answers(self, task: str) -> dict[Run, Answers]:
        return {
            (number, seed): answers
            for number, each in self.evaluations.items()
            for seed, answers in each.answers(task).items()
        }

    def scores(self, task: str, metric: str) -> dict[Run, float]:
        """Of the runs that have one."""
        return {
            (number, trial.seed): trial.scores[metric]
            for number, each in self.evaluations.items()
            for trial in each.tasks[task].trials
            if metric in trial.scores
        }


def read_arm(o: argparse.Namespace, arm: str) -> Measured:
    folders = {number: evaluated(o, arm, number) for number in range(o.pretrainings)}
    glues = {number: glue_of(folder) for number, folder in folders.items()}
    return Measured({n: Evaluation(folders[n], glue) for n, glue in glues.items() if glue is not None})


def metrics_of(one: Measured) -> dict[str, list[str]]:
    """Task -> "split/metric"s, the one that counts first."""
    tasks = next(iter(one.evaluations.values())).tasks
    return {name: [score.name for score in task.scores] for name, task in tasks.items()}


def is_regression(metrics: Sequence[str]) -> bool:
    return bool(REGRESSIONS & {name.partition("/")[2] for name in metrics})


def describe_arm(arm: Measured, metrics: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Mean of each metric over the runs and deviation of a run; trials that failed, and those that gave every
    example the same answer, which cannot flip but by all of them."""
    tasks: dict[str, Any] = {}
    for task, names in metrics.items():
        for name in names:
            scores = arm.scores(task, name)
            values = list(scores.values())
            tasks[f"{task} {name}"] = {
                "runs": [[*run, score] for run, score in sorted(scores.items())],
                "mean": statistics.fmean(values) if values else None,
                "sd": statistics.stdev(values) if len(values) > 1 else None,
            }
    trials = [trial for each in arm.evaluations.values() for task in each.glue.tasks for trial in task.trials]
    return {
        "pretrainings": sorted(arm.evaluations),
        "trials": len(trials),
        "failed": [trial.trial for trial in trials if trial.status != "ok"],
        "one_class": [trial.trial for trial in trials if trial.one_class],
        "scores": tasks,
    }


def compare(one: Measured, other: Measured, metrics: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """`other` less `one`; shares of 1."""
    differences: dict[str, float | None] = {}
    for task, names in metrics.items():
        for name in names:
            a, b = one.scores(task, name), other.scores(task, name)
            gains = [b[run] - a[run] for run in a if run in b]
            differences[f"{task} {name}"] = statistics.fmean(gains) if gains else None
    labelled = [task for task, names in metrics.items() if not is_regression(names)]
    pairs = {task: (one.answers(task), other.answers(task)) for task in labelled}
    by_task = {task: flips(a, b) for task, (a, b) in pairs.items()}
    every = Flips(sum(each.flipped for each in by_task.values()), sum(each.of for each in by_task.values()))
    paired = paired_difference([a for a, _ in pairs.values()], [b for _, b in pairs.values()])
    by_pretraining = {}
    for number in sorted(one.evaluations.keys() & other.evaluations.keys()):
        sides = [Measured({number: each.evaluations[number]}) for each in (one, other)]
        alone = paired_difference(*([side.answers(task) for task in labelled] for side in sides))
        by_pretraining[number] = None if alone is None else alone.difference
    return {
        "differences": differences,
        "flips": {
            task: {"flipped": each.flipped, "of": each.of, "share": each.share}
            for task, each in {**by_task, "all": every}.items()
        },
        "pooled": None if paired is None else dataclasses.asdict(paired),
        "pooled_accuracy": [pooled_accuracy([pair[k] for pair in pairs.values()]) for k in (0, 1)],
        "pooled_by_pretraining": by_pretraining,
    }


def judge(against: Mapping[str, Any], precision: str) -> dict[str, Any]:
    """Whether the claim holds, and what was asked."""
    if precision == "fp64":
        flipped = {a: each["flips"]["all"]["flipped"] for a, each in against.items() if a != "bert-gpu"}
        text = ", ".join(f"{arm} {count}" for arm, count in flipped.items())
        return {"holds": not any(flipped.values()), "text": f"no flip in fp64; flipped: {text}"}
    four, control = against.get("four"), against.get("control")
    if four is None or control is None or four["pooled"] is None:
        return {"holds": None, "text": "not judged: needs the arms four and control"}
    gap, error = four["pooled"]["difference"], four["pooled"]["standard_error"]
    share = control["flips"]["all"]["share"]
    difference = f"4 ranks less 1: {100 * gap:+.2f} points of pooled accuracy"
    of = f"{len(control['pooled_by_pretraining'])} of {len(four['pooled_by_pretraining'])} pretrainings"
    rounding = f"rounding alone flips {100 * share:.2f} % (control, {of})"
    if share <= MANY_FLIPS:
        return {"holds": abs(gap) <= POINT, "limit": POINT, "text": f"{difference}, 0.1 allowed; {rounding}"}
    limit = None if error is None else 2 * error
    holds = None if limit is None else abs(gap) <= limit
    allowed = "n/a" if limit is None else f"{100 * limit:.2f}"
    reason = f"0.1 points cannot be shown, as {rounding}"
    text = f"{difference}, {allowed} allowed (twice the paired standard error): {reason}"
    return {"holds": holds, "limit": limit, "text": text}


def figures_of(o: argparse.Namespace) -> dict[str, Any]:
    """Of what there is."""
    arms = {arm: measured for arm in o.arms if (measured := read_arm(o, arm)).evaluations}
    if "one" not in arms:
        return {}
    one = arms["one"]
    metrics = metrics_of(one)
    against = {arm: compare(one, other, metrics) for arm, other in arms.items() if arm != "one"}
    runs = {pretrained(o, arm, n) for arm in arms for n in range(o.pretrainings)}
    summaries = {run.name: read_summary(run) for run in sorted(runs)}
    return {
        "pretrainings": {
            name: {"tokens": s.tokens, "steps": s.step, "ranks": s.world_size, "heldout_loss": s.heldout_loss}
            for name, s in summaries.items()
            if s is not None
        },
        "arms": {arm: describe_arm(measured, metrics) for arm, measured in arms.items()},
        "against_one": against,
        "verdict": judge(against, o.precision),
    }


def write(o: argparse.Namespace, figures: Mapping[str, Any], whole: bool = False) -> None:
    content = {
        "status": "complete" if whole else "partial",
        "environment": records.probed_machine(o.date),
        "settings": {
            **{name: getattr(o, name) for name in (*FIXED, "pretrainings", "seeds", "arms")},
            "settings": [files.without_folders(setting) for setting in o.settings],
        },
        "calibration": files.read_json(o.out / "calibration.json"),
        **figures,
    }
    for path in (o.out / "claim.json", o.json):
        records.write(path, content)


def show(figures: Mapping[str, Any]) -> None:
    """Points, out of 100."""

    def points(value: float | None, sign: str = "") -> str:
        return "n/a" if value is None else f"{100 * value:{sign}.2f}"

    print("pretraining      ranks        tokens   steps  held-out loss")
    for name, run in figures["pretrainings"].items():
        loss = "n/a" if run["heldout_loss"] is None else f"{run['heldout_loss']:.5f}"
        print(f"{name:16} {run['ranks']:5} {run['tokens']:13,} {run['steps']:7,}  {loss:>13}")
    one, against = figures["arms"]["one"]["scores"], figures["against_one"]
    heads = "".join(f" {arm:>10}" for arm in against)
    print(f"\n{'metric, less that of one':28} {'one':>8} {'deviation':>10}{heads}")
    for name, score in one.items():
        cells = "".join(f" {points(each['differences'][name], '+'):>10}" for each in against.values())
        print(f"{name:28} {points(score['mean']):>8} {points(score['sd']):>10}{cells}")
    print(f"\n{'flipped predictions, %':48}{heads}")
    for task in next(iter(against.values()))["flips"] if against else ():
        cells = "".join(f" {points(each['flips'][task]['share']):>10}" for each in against.values())
        print(f"{task:48}{cells}")
    print()
    for arm, described in figures["arms"].items():
        if described["failed"] or described["one_class"]:
            print(
                f"{arm}: of {described['trials']} finetunings {len(described['failed'])} failed, "
                f"{len(described['one_class'])} gave every example the same answer"
            )
    for arm, each in against.items():
        pooled, alone = each["pooled"], each["pooled_by_pretraining"].values()
        if pooled is None:
            continue
        print(
            f"pooled accuracy, {arm} less one: {points(pooled['difference'], '+')}, paired standard error "
            f"{points(pooled['standard_error'])} over {pooled['examples']:,} examples, mean of "
            f"{pooled['seeds']} runs ({', '.join(points(gap, '+') for gap in alone)} by pretraining)"
        )
    verdict = figures["verdict"]
    word = {True: "holds", False: "does not hold", None: "open"}[verdict["holds"]]
    print(f"{word}: {verdict['text']}")


def main() -> None:
    o = parse()
    run_all(o, plan(o, calibrate(o)))
    figures = figures_of(o)
    write(o, figures, whole=True)
    show(figures)


if __name__ == "__main__":
    main()
