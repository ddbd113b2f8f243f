"""`bert-dp finetune`: build the configuration of a finetuning run from a pretrained run and a task's data."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bert_dp import files as record
from bert_dp.config import Config, ConfigError, ExamplesManifest, Issue, read_examples
from bert_dp.config.hf import HF, hf_directory, read_hf
from bert_dp.config.load import absolute, parse_overrides, read_levels, resolve, shipped_configs
from bert_dp.files.models import Summary
from launcher import children, job, results, stats
from launcher.machine import environment
from launcher.report.formats import count_of, format_decimals
from launcher.report.page import Report, ReportSection, Table, words

RECIPE = "finetune.yaml"

TASK = ("kind", "labels", "pair")
# settings that RUN and the task determine
DERIVED = ("data.path", "run.init_from", "objective.name", *(f"finetune.{name}" for name in TASK))


class ExamplesSource(NamedTuple):
    """Name of a task, and the options with which `bert_dp.examples.prepare` prepares its examples."""

    name: str
    options: Sequence[str]


def glue_source(task: str, data: Sequence[Path]) -> ExamplesSource:
    """Return the source of a GLUE task's examples. `data`: folders or archives with GLUE's files."""
    return ExamplesSource(task, ["--task", task, *(word for p in data for word in ("--data", str(p)))])


def source_of(
    task: str | None,
    data: Sequence[Path],
    files: Mapping[str, str | None],
    columns: Mapping[str, str | None],
    dev_fraction: float | None = None,
) -> ExamplesSource:
    """Return the source that the options describe: a GLUE task, or the user's `files` (train, dev, test) with
    `columns` (text, text-pair, label, kind). `dev_fraction`: fraction of the training examples to use as
    the dev set. Raise ConfigError if options are missing or conflict."""
    own = {name: value for name, value in {**files, **columns}.items() if value is not None}
    hint = "use --task and --data for a GLUE task, or --train and --dev for your own files"
    issues = []
    if task is not None:
        text = "with --task, GLUE defines the files and columns"
        issues += [Issue(f"--{name}", "conflict", text, value, "--task", hint) for name, value in own.items()]
        if not data:
            fix = "add the folder or archive with GLUE's files"
            issues.append(Issue("--data", "missing", f"--task {task} needs GLUE's files", hint=fix))
    elif data:
        issues.append(Issue("--data", "no_effect", "requires --task", other="--task", hint=hint))
    elif not own.keys() & files.keys():
        issues.append(Issue("--task", "missing", "no examples are given", hint=hint))
    else:
        if "train" not in own:
            text = "no training examples are given"
            issues.append(Issue("--train", "missing", text, hint="add --train FILE"))
        if "dev" not in own and dev_fraction is None:
            fix = "add --dev FILE, or --dev-fraction 0.1 to take examples from --train"
            issues.append(Issue("--dev", "missing", "no dev set is given", hint=fix))
    if dev_fraction is not None and (task or "dev" in own):
        other = "--task" if task else "--dev"
        text, fix = "takes the dev set from --train", f"omit --dev-fraction or {other}"
        issues.append(Issue("--dev-fraction", "conflict", text, dev_fraction, other, fix))
    if issues:
        raise ConfigError(issues)
    if task is not None:
        return glue_source(task, data)
    drawn = [] if dev_fraction is None else ["--dev-share", str(dev_fraction)]
    return ExamplesSource("own", [*(w for name, text in own.items() for w in (f"--{name}", text)), *drawn])


def by_seed(base: job.Job, run_dir: Path | None, seeds: int) -> list[tuple[job.Job, Path | None]]:
    """Return a job and a run directory for each seed: `run_dir` or, for several seeds, its subdirectories."""
    if seeds == 1:
        return [(base, run_dir)]
    folder = base.directory(run_dir, "runs")
    jobs: list[tuple[job.Job, Path | None]] = []
    for k in range(seeds):
        run = base.config.run.model_copy(update={"seed": base.config.run.seed + k})
        config = base.config.model_copy(update={"run": run})
        jobs.append((dataclasses.replace(base, config=config), folder / f"seed-{k}"))
    return jobs


def seeds_report(run_dirs: Sequence[Path]) -> Report:
    """Return the report on runs that differ only in the seed: mean scores with 95 % intervals."""
    summaries = [results.read(path / "summary.json", Summary) for path in run_dirs]
    measured = [summary.heldout.scores or {} for summary in summaries if summary.heldout]
    rows = []
    for name in dict.fromkeys(name for scores in measured for name in scores):
        values = [value for scores in measured if (value := scores.get(name)) is not None]
        half = f" \u00b1 {stats.half_width(values):.4f}" if len(values) > 1 else ""
        mean = format_decimals(statistics.fmean(values) if values else None)
        note = f"mean of {count_of(len(values), 'seed')}: {', '.join(map(format_decimals, values))}"
        rows.append(words(name.replace("/", " "), f"{mean}{half}", note))
    return Report("bert-dp: finetuning, several seeds", sections=[ReportSection("", tables=[Table(rows)])])


class Pretrained(NamedTuple):
    """Pretrained or finetuned model from which finetuning or distillation starts."""

    run: Path  # absolute path of the given run directory or checkpoint, or hf:DIR
    checkpoint: Path
    step: int  # optimizer step of the checkpoint
    config: Config
    tokenizer: Path


def find_pretrained(run: Path, option: str = "RUN") -> Pretrained:
    """Find the pretrained model at `run`: the newest checkpoint of a run directory, a checkpoint, or a
    transformers encoder (hf:DIR). `option`: name of `run` in messages. Raise ConfigError if none is found."""
    if (directory := hf_directory(str(run))) is not None:
        return _find_hf(directory.resolve())
    if not run.exists():
        hint = "pass the directory of a run"
        raise ConfigError([Issue(option, "not_found", f"{run} does not exist", str(run), hint=hint)])
    checkpoint = record.newest_checkpoint_facts(run)
    if checkpoint is None:
        hint = "choose a run that has saved a checkpoint"
        raise ConfigError([Issue(option, "missing", f"{run} contains no checkpoint", str(run), hint=hint)])
    path, facts = checkpoint
    tokenizer = record.tokenizer_of(path).resolve()
    return Pretrained(run.resolve(), path.resolve(), facts.step, resolve([facts.config]), tokenizer)


def _find_hf(directory: Path) -> Pretrained:
    with job.issues_by_option({"run.init_from": "RUN"}):
        encoder = read_hf(directory)
    if not encoder.tokenizer.is_file():
        message, hint = f"{directory} has no {encoder.tokenizer.name}", "save the tokenizer with transformers"
        raise ConfigError([Issue("RUN", "missing", message, str(directory), hint=hint)])
    run, no_data = Path(f"{HF}{directory}"), {"data": {"path": "not-prepared"}, "schedule": {"steps": 1}}
    return Pretrained(run, run, 0, resolve([encoder.level(), no_data]), encoder.tokenizer)


def setting_names(overrides: Sequence[str]) -> list[str]:
    """Return the names of the settings in overrides of the form `a.b=value`."""
    return [item.partition("=")[0].strip() for item in overrides]


def setting_issues(overrides: Sequence[str], derived: Sequence[str] = ()) -> list[Issue]:
    """Return an issue for each override of a setting in DERIVED or `derived`."""
    text = "determined by the other arguments"
    return [
        Issue(name, "conflict", text, other="RUN", hint="omit this setting")
        for name in setting_names(overrides)
        if name in (*DERIVED, *derived)
    ]


def configuration(
    start: Pretrained,
    overrides: Sequence[str],
    init_from: Path | None,
    path: Path | None = None,
    manifest: ExamplesManifest | None = None,
    *,
    recipe: str = RECIPE,
) -> Config:
    """Resolve the configuration of a finetuning run. Its levels, in order of increasing precedence, are the
    model and sequence length of the pretrained run, the recipe, the kind and labels of the data at `path`
    (None = not yet prepared), `init_from`, and the overrides. `init_from`: run or checkpoint with the initial
    weights; None = random weights. Raise ConfigError if the configuration is invalid."""
    model = start.config.model.model_dump(mode="json")
    levels: list[dict[str, Any]] = [
        {"model": model, "data": {"sequence_length": start.config.data.sequence_length}},
        *read_levels(shipped_configs() / recipe),
        task_level(path, manifest),
    ]
    if init_from is not None:
        levels.append({"run": {"init_from": str(init_from)}})
    return resolve([*levels, parse_overrides(overrides)])


def task_level(path: Path | None, manifest: ExamplesManifest | None) -> dict[str, Any]:
    """Return the settings that prepared examples determine. Both arguments are None before preparation."""
    task = {} if manifest is None else {name: getattr(manifest, name) for name in TASK}
    return {"data": {"path": str(path or "not-prepared")}, "finetune": task}


def prepare(start: Pretrained, source: ExamplesSource, sequence_length: int, seed: int = 0) -> Path:
    """Prepare the examples, unless they are cached, and return their directory. A dev set sampled from
    the training examples depends on `seed`. Raise ConfigError if the examples are unusable."""
    arguments = ["prepare", "--tokenizer", str(start.tokenizer), "--length", str(sequence_length)]
    arguments += ["--seed", str(seed), *source.options]  # a seed in source.options takes precedence
    return Path(children.ask_module("bert_dp.examples.prepare", arguments, "preparing the examples"))


def sized_micro_batches(config: Config, ranks: int, overrides: Sequence[str], *, on_gpu: bool) -> Config:
    """Set the micro batch size to a replica's share of the global batch, unless `overrides` set the size.

    Keep the configured size if the share is not an integer. On a CPU, also keep it if it divides the share:
    a micro batch is padded to its longest example and examples are sorted by length, so a smaller micro
    batch contains less padding (benchmarks/RESULTS.md). Examples are short, so the share fits in GPU memory.
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
    """Prepare the examples and return the finetuning job. Raise ConfigError if the input is unusable."""
    if issues := setting_issues(overrides):
        raise ConfigError(issues)
    start = find_pretrained(run)
    machine = environment.probe(Path())
    weights = None if random_weights else start.run
    checked = configuration(start, overrides, weights)
    name = f"{start.run.name}-{source.name}"
    ranks = job.Job(name, checked, machine).choose_ranks(nproc)
    path = prepare(start, source, checked.data.sequence_length, checked.run.seed)
    manifest = read_examples(path)
    config = configuration(start, overrides, weights, path, manifest)
    on_gpu = job.Job(name, config, machine).gpus > 0
    sized = sized_micro_batches(config, ranks, overrides, on_gpu=on_gpu)
    return job.Job(name, absolute(sized), machine)
