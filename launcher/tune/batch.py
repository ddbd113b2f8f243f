"""`bert-dp tune batch`: check, search, write tune.json and tuned.yaml, tell."""

from __future__ import annotations

import dataclasses
import datetime
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bert_dp.config import ConfigError
from launcher import job, results
from launcher.log import Log, logger, masked_command
from launcher.output import Output, publish
from launcher.results import BatchPlanFile, TuneBatch
from launcher.run import trials
from launcher.run.trials import Slot, run_to_end
from launcher.tune import cache, sizes
from launcher.tune.batch_report import batch_report
from launcher.tune.batch_search import BatchSearch
from launcher.tune.batch_trials import Question
from launcher.tune.search import write

if TYPE_CHECKING:
    from rich.console import Console

PLAN = "plan.json"
FIXED = tuple(name for name in BatchPlanFile.model_fields if name not in ("machine", "config"))
GROWS = ("budget_s",)


@dataclasses.dataclass(frozen=True)
class Options:
    """What was asked for."""

    nproc: str
    """auto or a number"""
    budget_s: float
    memory_gib: float | None
    """Of a rank; None: what its device or its share of the host has."""
    launcher: str


def tune_batch(
    name: str | None,
    overrides: Sequence[str],
    options: Options,
    *,
    out: Path | None,
    fresh: bool,
    dry_run: bool,
    as_json: bool,
    console: Console,
) -> int:
    """Returns the exit code. Raises ConfigError, before any trial starts, with everything that is wrong."""
    setup = load(name, overrides)
    question = question_of(setup, options)
    folder = setup.directory(out, "tune", "batch")
    output = Output(folder, "search", PLAN, plan_of(question), FIXED, GROWS)
    if issues := [*job.exposure_issues(question.config, folder, "--out"), *output.issues()]:
        raise ConfigError(issues)

    log = logger(console, as_json)
    for line in setup.device_warnings():
        log(f"warning: {line}")
    for line in describe(question, folder):
        log(line)
    if dry_run:
        output.print_plan(as_json=as_json)
        return 0
    key = cache.key(question, setup.machine.to_json())
    kept = None if fresh else cache.find(key, question.budget_s, question.limit_gib)
    with output.claim():
        if kept is not None and not (folder / "trials").exists():
            log(f"from the cache: found on {kept.date}; --fresh measures again")
            tune, code = from_cache(kept, question), 0
            results.write(folder / PLAN, output.plan)
        else:
            tune, code = measure(question, output, log)
        write_files(tune, question, folder)
        if tune.status == "complete" and not tune.cached:
            try:
                cache.keep(key, tune)
            except OSError as error:
                log(f"warning: the cache cannot be written ({error}); the next search measures again")
        publish(tune, batch_report(tune, folder), folder, as_json=as_json, console=console)
    return code


def load(name: str | None, overrides: Sequence[str], run_dir: Path | None = None) -> job.Job:
    """The configuration, whatever micro batch it has: that is what is searched. Raises ConfigError."""
    return job.load(name, [*overrides, "batch.micro_size=1"], run_dir)


def question_of(setup: job.Job, options: Options) -> Question:
    """The question of these options. Raises ConfigError."""
    config, on_gpu = setup.config, setup.gpus > 0
    count = setup.choose_ranks(options.nproc)
    allowed = tuple(sizes.dividing(config, count))
    issues = job.input_issues(config)
    limit, limit_of = options.memory_gib, "--memory"
    if limit is None:
        limit, limit_of = setup.machine.rank_memory(count, on_gpu)
    elif not 0 < limit < math.inf:
        issues.append(f"--memory: {limit} GiB is not enough for anything; give a number above 0")
    if issues:
        raise ConfigError(issues)
    precision = trials.trial_precision(config, setup.machine, [config.parallel.engine], on_gpu=on_gpu)
    return Question(
        config, count, allowed, options.budget_s, limit, limit_of, options.launcher, on_gpu, precision
    )


def plan_of(question: Question) -> BatchPlanFile:
    """plan.json: what a directory was begun with."""
    return BatchPlanFile(
        config_hash=question.config.hash(),
        config=question.config.model_dump(mode="json"),
        ranks=question.ranks,
        sizes=list(question.sizes),
        budget_s=question.budget_s,
        memory=question.user_limit_gib,
        launcher=question.launcher,
    )


def describe(question: Question, folder: Path) -> list[str]:
    """What is about to be searched."""
    shown = sizes.thin(question.sizes, sizes.MOST)
    what = "GPUs" if question.on_gpu else "CPU ranks"
    eager = question.config.compile == "auto" and not question.on_gpu
    how = "; trials are not compiled, compile=on compiles them" if eager else ""
    return [
        f"batch search: {folder}",
        f"{question.ranks} {what}, global batch {question.config.batch.global_size} as declared; micro "
        f"batches to try: {', '.join(map(str, shown))}, of {len(question.sizes)} that divide it; "
        f"budget about {question.budget_s:.0f} s{how}",
    ]


def from_cache(kept: TuneBatch, question: Question) -> TuneBatch:
    """tune.json of a search that an earlier one answers: the user's own configuration, and of another data
    set, seed or schedule no noise scale."""
    config = question.config
    mine = {
        "cached": True,
        "command": masked_command(sys.argv),
        "config_hash": config.hash(),
        "config": config.model_dump(mode="json"),
    }
    other = {} if kept.config_hash == config.hash() else {"noise": None, "goodput": None}
    return kept.model_copy(update={**mine, **other})


def measure(question: Question, output: Output[BatchPlanFile], log: Log) -> tuple[TuneBatch, int]:
    """tune.json and the exit code. Goes on where an earlier call ended."""
    out, session = output.path, output.begin(question.config)
    with trials.runner(out, [Slot()], launcher=question.launcher, on_gpu=question.on_gpu, log=log) as runs:
        search = BatchSearch(question, runs, log)
        ending = run_to_end(search.run, out, log)
    if ending.why:
        log(f"error: {ending.why}")
    config = question.config
    return TuneBatch(
        status=ending.status,
        why=ending.why,
        date=datetime.date.today().isoformat(),
        seconds=search.trials.used_s,
        budget_s=question.budget_s,
        **session.facts(),
        config=config.model_dump(mode="json"),
        ranks=question.ranks,
        dp=question.dp,
        tensor=config.parallel.tensor,
        engine=config.parallel.engine,
        launcher=question.launcher,
        device="cuda" if question.on_gpu else "cpu",
        global_batch=config.batch.global_size,
        sequence_length=config.data.sequence_length,
        trials=len(list(out.glob("trials/*/summary.json"))),
        **search.facts,
    ), ending.exit_code


def write_files(tune: TuneBatch, question: Question, out: Path) -> None:
    """tune.json, and tuned.yaml of a choice. Raises OSError."""
    tuned = sizes.with_micro(question.config, tune.choice.micro_batch) if tune.choice else None
    write(tune, tuned, out)
