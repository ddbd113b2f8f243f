"""`bert-dp tune lr`: the learning rate from short complete runs, and its transfer to another global batch."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bert_dp import record
from bert_dp.config import Config, ConfigError, batch_layout, dump_config, load_config, peak_lr, with_budget
from launcher import job, results
from launcher.log import PLAIN, Log, logger, show
from launcher.report.html import write_or_warn
from launcher.report.run_report import PAGE
from launcher.results import LrOptions, LrPlanFile, LrSettings, MeasureStatus, RangeTest, TuneLr
from launcher.run import trials
from launcher.run.trials import Stopped
from launcher.tune import FILE, ladder, rate_trials, transfer
from launcher.tune.rate_report import rate_report
from launcher.tune.rate_search import SHORT, AllFailed, Question, RateSearch

if TYPE_CHECKING:
    from rich.console import Console

STATE = "search.json"
FIXED = ("kind", "config_hash", "settings")


def tune(
    name: str | None,
    overrides: Sequence[str],
    settings: LrOptions,
    *,
    out: Path | None,
    dry_run: bool,
    as_json: bool,
    console: Console,
) -> int:
    """Returns the exit code. Raises ConfigError before any trial starts, with everything that is wrong."""
    asked = job.load(name, overrides)
    config = asked.config
    ranks = settings.ranks or config.parallel.tensor
    folder = asked.directory(out, "tune", "lr")
    output = job.Output(folder, "search", STATE, plan_of(config, settings), FIXED)
    issues = [*asked.issues(folder, "--out"), *asked.device_issues(ranks)]
    issues += setting_issues(config, settings, ranks)
    if issues := [*dict.fromkeys(issues), *output.issues()]:
        raise ConfigError(issues)

    log = logger(console, as_json)
    describe(config, settings, ranks, folder, log, overrides)
    if dry_run:
        output.print_plan(as_json=as_json)
        return 0
    with output.claim():
        on_gpu = asked.gpus > 0
        precision = trials.trial_precision(config, asked.machine, [config.parallel.engine], on_gpu=on_gpu)
        code, tuned = run_locked(config, settings, ranks, output, precision=precision, on_gpu=on_gpu, log=log)
        job.publish(tuned, rate_report(tuned, folder), folder, as_json=as_json, console=console)
    return code


def plan_of(config: Config, settings: LrOptions) -> LrPlanFile:
    """search.json as a search begins."""
    return LrPlanFile(
        config_hash=config.hash(), config=config.model_dump(mode="json"), settings=results.plain(settings)
    )


def setting_issues(config: Config, settings: LrOptions, ranks: int) -> list[str]:
    """Why these options cannot be searched with this configuration; one line each."""
    issues: list[str] = []
    optim = config.optim.model_copy(update=rate_trials.as_it_stands(1.0))
    try:
        batch_layout(config.model_copy(update={"optim": optim}), ranks)
    except ConfigError as error:
        issues += error.issues
    if config.run.seed + settings.seeds > 2**63:
        issues.append(
            f"run.seed: {config.run.seed} leaves no room for --seeds {settings.seeds}, which count "
            "on from it; use a smaller one"
        )
    full = settings.tokens or rate_trials.full_tokens(config)
    size = rate_trials.step_tokens(config)
    least = SHORT * size
    if full is not None and full < least:
        option = "--tokens" if settings.tokens else "schedule"
        issues.append(
            f"{option}: {full:,} tokens are fewer than {SHORT} steps of {size:,}, and the first "
            f"rung trains 1/{SHORT} of them; at least {least:,}"
        )
    return issues


def describe(
    config: Config, settings: LrOptions, ranks: int, folder: Path, log: Log, overrides: Sequence[str]
) -> None:
    """What is about to run."""
    s = settings
    log(f"learning rate search: {folder}")
    log(
        f"{s.rates} rates spaced 2x at 1/{SHORT} of the whole run, {ladder.FINALISTS} x {s.seeds} seeds at "
        f"all of it; {batch_layout(config, ranks)}"
    )
    if config.optim.lr != "auto" and any(item.partition("=")[0].strip() == "optim.lr" for item in overrides):
        log("warning: --set optim.lr has no effect: it is what is searched")


def run_locked(
    config: Config,
    settings: LrOptions,
    ranks: int,
    output: job.Output[LrPlanFile],
    *,
    precision: str,
    on_gpu: bool,
    log: Log,
) -> tuple[int, TuneLr]:
    """The search, and (exit code, tune.json); also what there is of it when a signal came. `precision`: of
    every trial."""
    out, begun = output.path, output.begin(config)
    if not begun.manifest.held_out.sequences:
        raise ConfigError(
            [
                f"data: {begun.shards} holds no held-out documents, by whose loss rates are chosen; "
                "raise data.build.held_out_fraction"
            ]
        )
    most = max(settings.rates, ladder.FINALISTS * settings.seeds)
    slots = trials.device_slots(
        ranks,
        gpus=len(begun.machine["gpus"]) if on_gpu else 0,
        cores=int(begun.machine["usable_cores"]),
        most=most,
    )
    manifest = begun.manifest
    declared = with_budget(config, manifest.train.sequences)
    question = Question(
        declared, settings, ranks, begun.shards, manifest.unigram_entropy_nats, len(slots), precision
    )
    file = job.KeptPlan(out / STATE, begun.plan)
    status: MeasureStatus = "complete"
    stopped, why = 0, None
    with trials.runner(out, slots, launcher=settings.launcher, on_gpu=on_gpu, log=log) as runs:
        doing = RateSearch(question, runs, file, log)
        try:
            doing.run()
        except Stopped as stop:
            status, stopped = "partial", stop.number
            log(f"stopped: {out} holds what was measured; the same command goes on")
        except AllFailed as failed:
            status, why = "failed", str(failed)
    file.save()
    tuned = document(doing, file.plan, status, why, begun)
    earlier = results.find(out / FILE, TuneLr)
    if earlier is not None and earlier.choice == tuned.choice:
        tuned = tuned.model_copy(update={"transfer": earlier.transfer})
    results.write(out / FILE, tuned)
    if tuned.choice is not None:
        record.write_text(out / "tuned.yaml", dump_config(rate_trials.tuned_config(config, tuned.choice.lr)))
    return (128 + stopped if stopped else 1 if tuned.status == "failed" else 0), tuned


def document(
    doing: RateSearch, plan: LrPlanFile, status: MeasureStatus, why: str | None, begun: job.Begun[LrPlanFile]
) -> TuneLr:
    """tune.json."""
    q, rungs, test = doing.q, doing.rungs, doing.range_test
    config, settings = q.config, q.settings
    choice = ladder.choose(rungs) if status == "complete" else None
    trials_ = [trial for rung in rungs for trial in rung.trials]
    first = {trial.lr for trial in rungs[0].trials} if rungs else set()
    return TuneLr(
        status="failed" if status == "complete" and choice is None else status,
        why=why,
        date=time.strftime("%Y-%m-%d"),
        seconds=plan.seconds,
        **begun.facts()
        | {"environment": {**begun.machine, "launcher": settings.launcher}, "config_hash": config.hash()},
        config=config.model_dump(mode="json"),
        settings=LrSettings(
            **{**results.plain(settings), "tokens": doing.tokens},
            tokens_why=plan.tokens_why,
            optimizers=[config.optim.name],
            weight_decays=[config.optim.weight_decay],
            seeds_used=list(q.seeds),
        ),
        ranks=q.ranks,
        at_a_time=q.at_a_time,
        unigram_entropy_nats=q.unigram,
        range_test=RangeTest(
            optimizer=config.optim.name,
            points=[(lr, loss) for lr, loss, _ in test.points],
            edge=test.edge.lr,
            why=test.edge.why,
            trial=test.trial,
        )
        if test
        else None,
        rungs=rungs,
        choice=choice,
        cost=results.LrCost(
            tokens=doing.range_tokens + sum(trial.tokens for trial in trials_),
            grid_tokens=len(first) * settings.seeds * doing.tokens,
            trials=len(trials_) + bool(doing.range_tokens),
        ),
    )


def carry(
    name: str | None,
    overrides: Sequence[str],
    before: int,
    after: int,
    out: Path | None,
    *,
    as_json: bool,
    console: Console,
) -> int:
    """The configuration's rate, or the one found in OUT, at global batch `before`, carried to `after`. Adds
    it to OUT/tune.json. Returns the exit code; raises ConfigError."""
    config = load_config(job.find_config(name), overrides)
    path = None if out is None else out / FILE
    tuned = None if path is None else results.find(path, TuneLr)
    at_before = config.model_copy(update={"batch": config.batch.model_copy(update={"global_size": before})})
    source, lr = "the configuration's", peak_lr(at_before).value
    if path is not None:
        if tuned is None or tuned.choice is None:
            raise ConfigError(
                [f"--out: {path} holds no chosen learning rate; drop --out to carry the configuration's"]
            )
        config = Config.model_validate_json(json.dumps(tuned.config))
        if before != config.batch.global_size:
            raise ConfigError(
                [f"--transfer: {path} was tuned at global batch {config.batch.global_size}, not {before}"]
            )
        lr = tuned.choice.lr
        config, source = rate_trials.tuned_config(config, lr), str(path)
    carried = transfer.transfer(config, lr, source, before, after)
    if path is not None and tuned is not None:
        tuned = tuned.model_copy(update={"transfer": carried})
        results.write(path, tuned)
        write_or_warn(rate_report(tuned, path.parent), path.with_name(PAGE))
    if as_json:
        sys.stdout.write(results.to_json(carried))
    else:
        for line in transfer.lines(carried):
            show(console, line, **PLAIN)
    return 0
