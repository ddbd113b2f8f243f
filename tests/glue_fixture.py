"""Make small GLUE files, prepared tasks, and trials as a rank writes them. All numbers are invented."""

import abc
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_dp import files
from bert_dp.config import Config, dump_config
from bert_dp.config.manifest import ExamplesManifest, with_hash
from launcher import results
from launcher.evaluate import finetune, glue_scores
from launcher.evaluate.finetune import Pretrained
from launcher.evaluate.glue import GlueGrid, PreparedTask, result_file
from launcher.evaluate.glue_scores import Glue, GlueOptions, GlueTask, GlueTrial
from launcher.run.trials import Runner, SearchOutcome, Slot, Stopped, Trial, TrialOutcome, earlier_outcome
from tests.example_files import split_facts
from tests.helpers import failed, make_config, write_files
from tests.shards import SPECIAL

METRICS = {
    "CoLA": ["mcc"],
    "MRPC": ["accuracy", "f1"],
    "STS-B": ["pearson", "spearman"],
    "QQP": ["accuracy", "f1", "auc"],
}
SHA = hashlib.sha256(b"").hexdigest()


def make_task(name: str, *, official: bool = True, examples: int = 4, dev_share: float = 0.0) -> PreparedTask:
    """Make a task with `examples` examples in each dev set and ten times as many in train."""
    dev = ["dev_matched", "dev_mismatched"] if name == "MNLI" else ["dev"]
    counts = {"train": 10 * examples, **dict.fromkeys(dev, examples)}
    splits = {
        split: split_facts(
            f"{split}.safetensors",
            sha256=SHA,
            examples=count,
            tokens=5 * count,
            truncated=count // 4,
            has_labels=True,
            in_train=None if split == "train" else 2,
            baseline=None if split not in dev else dict.fromkeys(METRICS.get(name, ["accuracy"]), 0.4),
        )
        for split, count in counts.items()
    }
    regression = name == "STS-B"
    facts = {
        "task": name,
        "kind": "regression" if regression else "single_label",
        "labels": [] if regression else ["entailment", "not_entailment"],
        "metrics": METRICS.get(name, ["accuracy"]),
        "sequence_length": 16,
        "vocab_size": 64,
        "special_tokens": {role: SPECIAL[role] for role in ("pad", "cls", "sep")},
        "tokenizer": {"file": "tokenizer.json", "sha256": SHA},
        "splits": splits,
        "official": official and not dev_share,
        "dev_share": dev_share,
    }
    given = with_hash(ExamplesManifest, facts) | {
        "hash": hashlib.sha256(f"{name}{dev_share}".encode()).hexdigest()
    }
    return PreparedTask(Path(f"/prepared/{name}-{dev_share:g}"), ExamplesManifest.model_validate(given))


def make_grid(
    options: GlueOptions, tasks: Iterable[PreparedTask] = (), overrides: Sequence[str] = ()
) -> GlueGrid:
    """Make the grid of a run at /run, whose files are not read. `overrides` are the user's settings."""
    model = make_config("schedule.steps=1")
    start = Pretrained(Path("/run"), Path("/run/checkpoints/step-00000005"), 5, model, Path("/run/t.json"))
    weights = None if options.init == "random" else start.checkpoint
    base = finetune.configuration(start, overrides, weights)
    named = {task.manifest.task: task for task in tasks}
    left_out = {"WNLI": "no WNLI/train.tsv in --data"}
    return GlueGrid(start, tuple(overrides), options, weights, base, "fp32", False, named, left_out)


def write_trial(
    trial: Trial, scores: Mapping[str, float | None], one_class: Sequence[str] = (), **summary: Any
) -> None:
    """Write the files that a finished run leaves in the directory of a trial."""
    directory = trial.directory
    directory.mkdir(parents=True, exist_ok=True)
    files.write_text(directory / "config.yaml", dump_config(trial.config))
    (directory / "predictions.jsonl").write_text("")
    heldout = {"loss": 0.5, "examples": 4, "scores": dict(scores), "one_class": list(one_class)}
    (directory / "summary.json").write_text(json.dumps({"status": "done", "heldout": heldout, **summary}))
    (directory / "trial.json").write_text('{"seconds": 2.0}')


def scores_of(task: PreparedTask, value: float) -> dict[str, float | None]:
    """Return `value` for every metric of every dev set."""
    splits = glue_scores.dev_splits(task.manifest)
    return {f"{split}/{metric}": value for split in splits for metric in task.manifest.metrics}


class WritingRunner(Runner, abc.ABC):
    """Runner that ends each trial at once with the records of `write`, and stops after `limit` trials."""

    def __init__(self, out: Path, limit: float = math.inf):
        self.out, self.limit, self.slots, self.ran = out, limit, [Slot()], list[Trial]()

    @abc.abstractmethod
    def write(self, trial: Trial) -> None:
        """Write the records of a trial that has ended."""

    def run(self, trials: Iterable[Trial]) -> Iterator[tuple[Trial, TrialOutcome]]:
        for trial in reversed([*trials]):  # trials may end in any order
            if earlier_outcome(trial) is None:
                if len(self.ran) >= self.limit:
                    raise Stopped(2)
                self.ran.append(trial)
                self.write(trial)
            outcome = earlier_outcome(trial)
            assert outcome is not None
            yield trial, outcome


class MadeRunner(WritingRunner):
    """Runner whose trials end with the score or the failure message that `surface` returns."""

    def __init__(
        self, out: Path, tasks: Iterable[PreparedTask], surface: Callable[[str, Config], float | str]
    ):
        super().__init__(out)
        self.tasks, self.surface = {str(task.path): task for task in tasks}, surface

    def write(self, trial: Trial) -> None:
        task = self.tasks[str(trial.config.data.path)]
        found = self.surface(task.manifest.task, trial.config)
        if isinstance(found, str):
            write_trial(trial, {}, **failed(found, "not_finite"))
        else:
            write_trial(trial, scores_of(task, found))


def scored_task(name: str, values: list[float | None], **task: Any) -> GlueTask:
    """Return a task whose trials have these values in every metric; None is a failed trial."""
    source, trials = make_task(name, **task), []
    for seed, value in enumerate(values):
        end: dict[str, Any] = {"status": "failed", "cause": "NaN"}
        if value is not None:
            end = {"status": "ok", "scores": scores_of(source, value)}
        trials.append(GlueTrial(trial=f"{name}-s{seed}", lr=4e-5, seed=seed, **end))
    return glue_scores.score_task(source.manifest, trials[::-1])


def evaluation(tasks: Sequence[GlueTask]) -> Glue:
    grid = make_grid(GlueOptions(tasks=[task.task for task in tasks], seeds=2))
    return result_file(grid, tasks, SearchOutcome("complete"), {})


def write_glue(folder: Path, *tasks: GlueTask) -> Path:
    folder.mkdir(parents=True)
    results.write(folder / "glue.json", evaluation(tasks))
    return folder


def write_two_tasks(folder: Path, train: int = 24, dev: int = 8, test: int = 3) -> Path:
    """Write small files of RTE, which has a test set, and WNLI, which has none."""
    words = "the cat dog sat ran on under a mat bed".split()
    columns = ["index", "sentence1", "sentence2", "label"]
    for task, split, count in (
        *(("RTE", "train", train), ("RTE", "dev", dev), ("RTE", "test", test)),
        *(("WNLI", "train", train), ("WNLI", "dev", dev)),
    ):
        lines = ["\t".join(columns[:3] if split == "test" else columns)]
        for i in range(count):
            texts = [" ".join(words[(i * k) % 10] for k in (1, 3, 7)), words[i % 10]]
            label = str(i % 2) if task == "WNLI" else "entailment" if i % 3 else "not_entailment"
            lines.append("\t".join([str(i), *texts, *[label] * (split != "test")]))
        write_files(folder, {f"{task}/{split}.tsv": "\n".join([*lines, ""])})
    return folder
