"""`bert-dp tune lr`: the learning rate from short complete runs."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bert_dp.config import Config, ConfigError, Manifest, batch_layout, with_budget
from launcher import job, results
from launcher.log import Log, logger
from launcher.output import DataSession, KeptPlan, Output, publish
from launcher.results import LrOptions, LrPlanFile, LrSettings, TuneLr
from launcher.run import trials
from launcher.run.trials import Ending, run_to_end
from launcher.tune import FILE, ladder, rate_trials
from launcher.tune.rate_report import rate_report
from launcher.tune.rate_search import SHORT, Question, RateSearch
from launcher.tune.search import with_settings, write

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
    setup = job.load(name, overrides)
    config = setup.config
    ranks = settings.ranks or config.parallel.tensor
    folder = setup.directory(out, "tune", "lr")
    output = Output(folder, "search", STATE, plan_of(config, settings), FIXED)
    issues = [*setup.issues(folder, "--out"), *setup.device_issues(ranks)]
    issues += setting_issues(config, settings, ranks)
    if issues := [*dict.fromkeys(issues), *output.issues()]:
        raise ConfigError(issues)

    log = logger(console, as_json)
    for line in setup.device_warnings():
        log(f"warning: {line}")
    describe(config, settings, ranks, folder, log, overrides)
    if dry_run:
        output.print_plan(as_json=as_json)
        return 0
    with output.claim():
        tuned, code = measure(setup, settings, ranks, output, log)
        publish(tuned, rate_report(tuned, folder), folder, as_json=as_json, console=console)
    return code


def plan_of(config: Config, settings: LrOptions) -> LrPlanFile:
    """search.json as a search begins."""
    return LrPlanFile(
        config_hash=config.hash(), config=config.model_dump(mode="json"), settings=results.plain(settings)
    )


def setting_issues(config: Config, settings: LrOptions, ranks: int) -> list[str]:
    """Why these options cannot be searched with this configuration; one line each."""
    issues: list[str] = []
    try:
        batch_layout(with_settings(config, optim=rate_trials.as_it_stands(1.0)), ranks)
    except ConfigError as error:
        issues += map(str, error.issues)
    if config.run.seed + settings.seeds > 2**63:
        issues.append(
            f"run.seed: {config.run.seed} leaves no room for --seeds {settings.seeds}, which count "
            "on from it; use a smaller one"
        )
    return [*issues, *_budget_issues(config, settings)]


def _budget_issues(config: Config, settings: LrOptions) -> list[str]:
    """Why the whole run is too short for two rungs, if its tokens are known."""
    full = settings.tokens or rate_trials.full_tokens(config)
    size = rate_trials.step_tokens(config)
    least = SHORT * size
    if full is None or full >= least:
        return []
    option = "--tokens" if settings.tokens else "schedule"
    return [
        f"{option}: {full:,} tokens are fewer than {SHORT} steps of {size:,}, and the first "
        f"rung trains 1/{SHORT} of them; at least {least:,}"
    ]


def _data_issues(config: Config, settings: LrOptions, manifest: Manifest) -> list[str]:
    """Why rates cannot be searched on this data; only it tells the tokens of schedule.epochs."""
    issues = _budget_issues(with_budget(config, manifest.train.sequences), settings)
    if not manifest.held_out.sequences:
        issues.append(
            "data: no held-out documents are there, by whose loss rates are chosen; raise "
            "data.build.held_out_fraction"
        )
    return issues


def describe(
    config: Config, settings: LrOptions, ranks: int, folder: Path, log: Log, overrides: Sequence[str]
) -> None:
    """What is about to run."""
    log(f"learning rate search: {folder}")
    log(
        f"{settings.rates} rates spaced 2x at 1/{SHORT} of the whole run, {ladder.FINALISTS} x "
        f"{settings.seeds} seeds at all of it; {batch_layout(config, ranks)}"
    )
    if config.optim.lr != "auto" and any(item.partition("=")[0].strip() == "optim.lr" for item in overrides):
        log("warning: --set optim.lr has no effect: it is what is searched")


def measure(
    setup: job.Job, settings: LrOptions, ranks: int, output: Output[LrPlanFile], log: Log
) -> tuple[TuneLr, int]:
    """tune.json and the exit code; also what there is when a signal came. Goes on where an earlier call
    ended."""
    config, out, on_gpu = setup.config, output.path, setup.gpus > 0
    session = output.begin(config, lambda manifest: _data_issues(config, settings, manifest))
    manifest = session.manifest
    slots = trials.device_slots(
        ranks,
        gpus=setup.gpus,
        cores=int(session.machine["usable_cores"]),
        most=max(settings.rates, ladder.FINALISTS * settings.seeds),
    )
    question = Question(
        with_budget(config, manifest.train.sequences),
        settings,
        ranks,
        session.shards,
        manifest.unigram_entropy_nats,
        len(slots),
        trials.trial_precision(config, setup.machine, [config.parallel.engine], on_gpu=on_gpu),
    )
    plan = KeptPlan(out / STATE, session.plan)
    with trials.runner(out, slots, launcher=settings.launcher, on_gpu=on_gpu, log=log) as runs:
        search = RateSearch(question, runs, plan, log)
        ending = run_to_end(search.run, out, log)
    plan.save()
    tuned = document(search, ending, session)
    before = results.find(out / FILE, TuneLr)
    if before is not None and before.choice == tuned.choice:
        tuned = tuned.model_copy(update={"transfer": before.transfer})
    write(tuned, rate_trials.tuned_config(config, tuned.choice.lr) if tuned.choice else None, out)
    return tuned, ending.exit_code


def document(search: RateSearch, ending: Ending, session: DataSession[LrPlanFile]) -> TuneLr:
    """tune.json."""
    q, rungs, plan = search.q, search.rungs, search.plan.plan
    config, tokens = q.config, plan.tokens or 0
    trained = [trial.tokens for rung in rungs for trial in rung.trials]
    return TuneLr(
        status=ending.status,
        why=ending.why,
        date=datetime.date.today().isoformat(),
        seconds=plan.seconds,
        **session.facts()
        | {"environment": {**session.machine, "launcher": q.settings.launcher}, "config_hash": config.hash()},
        config=config.model_dump(mode="json"),
        settings=LrSettings(
            **{**results.plain(q.settings), "tokens": tokens},
            tokens_why=plan.tokens_why,
            optimizers=[config.optim.name],
            weight_decays=[config.optim.weight_decay],
            seeds_used=list(q.seeds),
        ),
        ranks=q.ranks,
        at_a_time=q.at_a_time,
        unigram_entropy_nats=q.unigram,
        range_test=search.range_test,
        rungs=rungs,
        choice=ladder.choose(rungs) if ending.status == "complete" else None,
        cost=results.LrCost(
            tokens=search.range_tokens + sum(trained),
            grid_tokens=len(rungs[0].rates if rungs else ()) * q.settings.seeds * tokens,
            trials=len(trained) + bool(search.range_tokens),
        ),
    )
