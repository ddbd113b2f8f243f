"""`bert-dp tune batch`: check, search, write tune.json and tuned.yaml, tell."""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bert_dp import record
from bert_dp.config import Config, ConfigError, dump_config
from launcher import job, results
from launcher.log import logger
from launcher.redact import redact_argv
from launcher.results import BatchPlanFile, MeasureStatus, TuneBatch
from launcher.run import trials
from launcher.run.trials import Slot, Stopped
from launcher.tune import FILE, cache, sizes
from launcher.tune.batch_report import batch_report
from launcher.tune.batch_search import BatchSearch, NothingFits
from launcher.tune.batch_trials import Question

if TYPE_CHECKING:
    from rich.console import Console

PLAN = "plan.json"
FIXED = tuple(name for name in BatchPlanFile.model_fields if name != "machine")
GROWS = ("budget_s",)


def tune_batch(
    name: str | None,
    overrides: Sequence[str],
    *,
    nproc: str,
    budget_s: float,
    memory_gib: float | None,
    launcher: str,
    out: Path | None,
    fresh: bool,
    dry_run: bool,
    as_json: bool,
    console: Console,
) -> int:
    """Returns the exit code. Raises ConfigError, before any trial starts, with everything that is wrong."""
    asked = load(name, overrides)
    question = ask(asked, nproc=nproc, budget_s=budget_s, memory_gib=memory_gib, launcher=launcher)
    folder = asked.directory(out, "tune", "batch")
    output = job.Output(folder, "search", PLAN, plan_of(question), FIXED, GROWS)
    if issues := [*job.exposure_issues(question.config, folder, "--out"), *output.issues()]:
        raise ConfigError(issues)

    log = logger(console, as_json)
    for line in describe(question, folder):
        log(line)
    if dry_run:
        output.print_plan(as_json=as_json)
        return 0
    key = cache.key(question, asked.machine.to_json())
    kept = None if fresh else cache.find(key, question.budget_s, question.limit_gib)
    with output.claim():
        if kept is not None and not (folder / "trials").exists():
            log(f"from the cache: found on {kept.date}; --fresh measures again")
            tune, code = from_cache(kept, question), 0
            results.write(folder / PLAN, output.plan)
        else:
            tune, code = search(question, output, log)
        write(tune, folder)
        if tune.status == "complete" and not tune.cached:
            try:
                cache.keep(key, tune)
            except OSError as error:
                log(f"warning: the cache cannot be written ({error}); the next search measures again")
        job.publish(tune, batch_report(tune, folder), folder, as_json=as_json, console=console)
    return code


def load(name: str | None, overrides: Sequence[str], run_dir: Path | None = None) -> job.Job:
    """The configuration, whatever micro batch it has: that is what is searched. Raises ConfigError."""
    return job.load(name, [*overrides, "batch.micro_size=1"], run_dir)


def ask(asked: job.Job, *, nproc: str, budget_s: float, memory_gib: float | None, launcher: str) -> Question:
    """The question of these options. Raises ConfigError."""
    config, on_gpu = asked.config, asked.gpus > 0
    count = asked.choose_ranks(nproc)
    fitting = tuple(sizes.dividing(config, count))
    issues = job.input_issues(config)
    if memory_gib is not None and not 0 < memory_gib < float("inf"):
        issues.append(f"--memory: {memory_gib} GiB is not enough for anything; give a number above 0")
    if issues:
        raise ConfigError(issues)
    limit, limit_of = memory_gib, "--memory"
    if limit is None:
        limit, limit_of = asked.machine.rank_memory(count, on_gpu)
    precision = trials.trial_precision(config, asked.machine, [config.parallel.engine], on_gpu=on_gpu)
    return Question(config, count, fitting, budget_s, limit, limit_of, launcher, on_gpu, precision)


def plan_of(question: Question) -> BatchPlanFile:
    """plan.json: what a directory was begun with."""
    return BatchPlanFile(
        config_hash=question.config.hash(),
        ranks=question.ranks,
        sizes=list(question.sizes),
        budget_s=question.budget_s,
        memory=question.asked_gib,
        launcher=question.launcher,
    )


def describe(question: Question, folder: Path) -> list[str]:
    """What is about to be searched."""
    shown = sizes.thin(question.sizes, sizes.MOST)
    what = "GPUs" if question.on_gpu else "CPU ranks"
    eager = question.config.compile == "auto" and not question.on_gpu
    how = "; trials run eager: compile=on compiles them" if eager else ""
    return [
        f"batch search: {folder}",
        f"{question.ranks} {what}, global batch {question.config.batch.global_size} as declared; of "
        f"{len(question.sizes)} micro batches that divide it, up to {', '.join(map(str, shown))}; "
        f"budget about {question.budget_s:.0f} s{how}",
    ]


def from_cache(kept: TuneBatch, question: Question) -> TuneBatch:
    """tune.json of a search that an earlier one answers: the user's own configuration, and of another data
    set, seed or schedule no noise scale."""
    config = question.config
    mine = {
        "cached": True,
        "command": redact_argv(sys.argv),
        "config_hash": config.hash(),
        "config": config.model_dump(mode="json"),
    }
    other = {} if kept.config_hash == config.hash() else {"noise": None, "goodput": None}
    return kept.model_copy(update={**mine, **other})


def search(
    question: Question, output: job.Output[BatchPlanFile], log: Callable[[str], None]
) -> tuple[TuneBatch, int]:
    """tune.json and the exit code. Goes on where an earlier call ended."""
    out, begun = output.path, output.begin(question.config)
    status: MeasureStatus = "complete"
    why, code = None, 0
    with trials.runner(out, [Slot()], launcher=question.launcher, on_gpu=question.on_gpu, log=log) as runs:
        doing = BatchSearch(question, out, runs, log)
        try:
            doing.run()
        except Stopped as stop:
            status, code = "partial", 128 + stop.number
            log(f"stopped: {out} holds what was measured; the same command goes on")
        except NothingFits as error:
            status, why, code = "failed", str(error), 1
            log(f"error: {why}")
    config = question.config
    return TuneBatch(
        status=status,
        why=why,
        date=datetime.date.today().isoformat(),
        seconds=doing.runs.used_s,
        budget_s=question.budget_s,
        **begun.facts(),
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
        **doing.facts,
    ), code


def write(tune: TuneBatch, out: Path) -> None:
    """tune.json, and tuned.yaml of a choice. Raises OSError."""
    results.write(out / FILE, tune)
    if tune.choice:
        config = Config.model_validate_json(json.dumps(tune.config))
        chosen = sizes.with_micro(config, tune.choice.micro_batch)
        record.write_text(out / "tuned.yaml", dump_config(chosen))
