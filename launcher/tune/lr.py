"""`bert-dp tune lr`: the learning rate from short complete runs, and its transfer to another global batch."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert_dp import record
from bert_dp.config import (
    Config,
    ConfigError,
    OptimConfig,
    batch_layout,
    dump_config,
    load_config,
    peak_lr,
    read_manifest,
    with_budget,
)
from launcher import environment, outdir, results, starters, training
from launcher.display import PLAIN, show, teller
from launcher.redact import redact_argv
from launcher.report.console import ConsoleReport
from launcher.report.html import write_or_warn
from launcher.report.run_report import PAGE
from launcher.results import LrPlanFile, TuneLr, TuneStatus
from launcher.scaling.benchmark import identity
from launcher.tune import FILE, ladder, lr_trials, search, transfer
from launcher.tune.halving import RUNGS, STATE, AllFailed, RangeTest, Search, Settings
from launcher.tune.ladder import Candidate, Outcome, Rung
from launcher.tune.lr_trials import device_slots
from launcher.tune.rate_report import rate_report
from launcher.tune.trials import Pool, Say, Stopped

if TYPE_CHECKING:
    from rich.console import Console

DEFAULT_CONFIG = "quickstart"
FIXED = ("kind", "config_hash", "settings")


def tune(
    name: str | None,
    overrides: Sequence[str],
    settings: Settings,
    *,
    out: Path | None,
    dry_run: bool,
    as_json: bool,
    console: Console,
) -> int:
    """Returns the exit code. Raises ConfigError before any trial starts, with everything that is wrong."""
    path = training.find_config(name or DEFAULT_CONFIG, None)
    config = training.absolute(load_config(path, overrides))
    gpus = 0 if config.run.device == "cpu" else environment.num_gpus()
    ranks = settings.ranks or config.parallel.tensor
    where = (out or Path("tune") / f"{path.stem}-lr-{time.strftime('%Y%m%d-%H%M%S')}").resolve()
    asked = plan_of(config, settings)
    issues = [*starters.launcher_issues(settings.launcher), *training.input_issues(config)]
    issues += [*training.exposure_issues(config, where), *rank_issues(config, ranks, gpus)]
    issues += setting_issues(config, settings, ranks)
    if issues := [*dict.fromkeys(issues), *outdir.issues(where, STATE, "search", asked, FIXED)]:
        raise ConfigError(issues)

    say = teller(console, as_json)
    describe(config, settings, ranks, where, say, overrides)
    if dry_run:
        if as_json:
            sys.stdout.write(results.to_json(asked))
        return 0
    directory = training.prepare_data(config)
    with training.claim(where, ".lock", "--out", "search"):
        code, found = run_locked(config, settings, ranks, where, directory, on_gpu=gpus > 0, say=say)
        report = rate_report(found, where)
        has_page = write_or_warn(report, where / PAGE)
    if as_json:
        sys.stdout.write(results.to_json(found))
    else:
        show(console, ConsoleReport(report))
        if has_page:
            show(console, f"page: {where / PAGE}", **PLAIN)
    return code


def plan_of(config: Config, settings: Settings) -> LrPlanFile:
    """search.json as a search begins."""
    return LrPlanFile(
        config_hash=config.hash(), config=config.model_dump(mode="json"), settings=asdict_json(settings)
    )


def asdict_json(settings: Settings) -> dict[str, Any]:
    """JSON values only, so that they compare with what was read back."""
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(settings)))
    return plain


def rank_issues(config: Config, ranks: int, gpus: int) -> list[str]:
    """Why a trial cannot have so many ranks on this machine."""
    if config.run.device == "cuda" and not gpus:
        return ["run.device: cuda, but this machine shows no GPU; use run.device=cpu or auto"]
    if gpus and ranks > gpus:
        return [f"--ranks: {ranks} ranks but {gpus} GPUs; use fewer, or --set run.device=cpu"]
    return []


def setting_issues(config: Config, settings: Settings, ranks: int) -> list[str]:
    """Why these options cannot be searched with this configuration; one line each."""
    issues = search.check() if settings.trials else []
    known = typing.get_args(OptimConfig.model_fields["name"].annotation)
    for name in settings.optimizers or (config.optim.name,):
        if name not in known:
            issues.append(f"--optimizers: {name!r} is not one of {', '.join(known)}")
            continue
        optim = config.optim.model_copy(update={"name": name, "lr": 1.0, "lr_scaling": "none"})
        try:
            batch_layout(config.model_copy(update={"optim": optim}), ranks)
        except ConfigError as error:
            issues += [line.replace("--nproc", "--ranks") for line in error.issues]
    if any(not 0 <= decay < 1 for decay in settings.weight_decays):
        issues.append("--weight-decays: numbers of at least 0 and below 1")
    elif settings.trials and len(settings.weight_decays) > 1 and min(settings.weight_decays) == 0:
        issues.append("--weight-decays: 0 has no logarithm to draw from; leave it out, or drop --trials")
    if config.run.seed + settings.seeds > 2**63:
        issues.append(
            f"run.seed: {config.run.seed} leaves no room for --seeds {settings.seeds}, which count "
            "on from it; use a smaller one"
        )
    full = settings.tokens or lr_trials.full_tokens(config)
    size = lr_trials.step_tokens(config)
    least = RUNGS[0] * size
    if full is not None and full < least:
        option = "--tokens" if settings.tokens else "schedule"
        issues.append(
            f"{option}: {full:,} tokens are fewer than {RUNGS[0]} steps of {size:,}, and the first "
            f"rung trains 1/{RUNGS[0]} of them; at least {least:,}"
        )
    return issues


def describe(
    config: Config, settings: Settings, ranks: int, where: Path, say: Say, overrides: Sequence[str]
) -> None:
    """What is about to run."""
    s = settings
    say(f"learning rate search: {where}")
    first = f"{s.trials} trials drawn by Optuna" if s.trials else f"{s.rates} rates spaced 2x"
    count = s.trials or s.rates * max(1, len(s.optimizers)) * max(1, len(s.weight_decays))
    num_second = ladder.num_second(count, drawn=s.trials > 0)
    second = f"the best {num_second} at 1/{RUNGS[1]}, " if num_second else ""
    for what, values in (("optimizers", s.optimizers), ("weight decays", s.weight_decays)):
        first += f" x {len(values)} {what}" if len(values) > 1 and not s.trials else ""
    say(
        f"{first} at 1/{RUNGS[0]} of the whole run, {second}{ladder.FINALISTS} x "
        f"{s.seeds} seeds at all of it; {batch_layout(config, ranks)}"
    )
    if config.optim.lr != "auto" and any(item.partition("=")[0].strip() == "optim.lr" for item in overrides):
        say("warning: --set optim.lr has no effect: it is what is searched")


def run_locked(
    config: Config,
    settings: Settings,
    ranks: int,
    out: Path,
    shards: Path,
    *,
    on_gpu: bool,
    say: Say,
    make_pool: Callable[..., Pool] = Pool,
) -> tuple[int, TuneLr]:
    """The search, and (exit code, tune.json); also what there is of it when a signal came. `make_pool`: what
    runs the trials."""
    machine = environment.probe(out)
    manifest = read_manifest(shards)
    if not manifest.held_out.sequences:
        raise ConfigError(
            [
                f"data: {shards} holds no held-out documents, by whose loss rates are chosen; "
                "raise data.build.held_out_fraction"
            ]
        )
    here = identity(machine.to_json(), manifest.hash)
    before = results.find(out / STATE, LrPlanFile)
    outdir.check_machine(out, before, here)
    state = before or plan_of(config, settings).model_copy(update={"machine": here})
    results.write(out / STATE, state)
    facts = {**machine.to_json(), "command": redact_argv(sys.argv), "launcher": settings.launcher}
    record.write_json(out / "environment.json", facts)
    axes = max(1, len(settings.optimizers)) * max(1, len(settings.weight_decays))
    most = max(settings.trials or settings.rates * axes, ladder.FINALISTS * settings.seeds)
    slots = device_slots(
        ranks, gpus=len(machine.gpus) if on_gpu else 0, cores=int(machine.usable_cores), most=most
    )
    pool = make_pool(out, slots, launcher=settings.launcher, on_gpu=on_gpu, say=say)
    entropy = manifest.unigram_entropy_nats
    resolved = with_budget(config, manifest.train.sequences)
    doing = Search(
        resolved, settings, ranks, pool, len(slots), shards=shards, unigram=entropy, state=state, say=say
    )
    status: TuneStatus = "complete"
    stopped, why = 0, None
    try:
        doing.run()
    except Stopped as stop:
        status, stopped = "partial", stop.number
        say(f"stopped: {out} holds what was measured; the same command goes on")
    except AllFailed as failed:
        status, why = "failed", str(failed)
    doing.keep()
    found = document(doing, status, why, facts, manifest.hash)
    earlier = results.find(out / FILE, TuneLr)
    if earlier is not None and earlier.choice == found.choice:
        found = found.model_copy(update={"transfer": earlier.transfer})
    results.write(out / FILE, found)
    if found.choice is not None:
        tuned = lr_trials.tuned_config(config, candidate_of(found.choice))
        record.write_text(out / "tuned.yaml", dump_config(tuned))
    return (128 + stopped if stopped else 1 if found.status == "failed" else 0), found


def candidate_of(choice: results.LrChoice) -> Candidate:
    return Candidate(choice.optimizer, choice.weight_decay, choice.lr)


def document(
    doing: Search, status: TuneStatus, why: str | None, facts: dict[str, Any], data_hash: str
) -> TuneLr:
    """tune.json."""
    config, rungs = doing.config, doing.rungs
    choice = ladder.choose(rungs, any_decay=doing.settings.trials > 0) if status == "complete" else None
    outcomes = [outcome for rung in rungs for outcome in rung.outcomes]
    first = {o.candidate for o in rungs[0].outcomes} if rungs else set()
    ranges = list(doing.range_tests.values())
    trained = doing.left_out_tokens + sum(o.tokens for o in outcomes)
    trained += sum(t.summary.tokens or 0 for t in ranges)
    settings = {
        **asdict_json(doing.settings),
        "optimizers": list(doing.optimizers),
        "left_out": doing.left_out,
        "weight_decays": list(doing.decays),
        "tokens": doing.tokens,
        "tokens_why": doing.state.tokens_why,
        "seeds_used": list(doing.seeds),
    }
    return TuneLr(
        status="failed" if status == "complete" and choice is None else status,
        why=why,
        date=time.strftime("%Y-%m-%d"),
        seconds=doing.state.seconds,
        environment={key: value for key, value in facts.items() if key != "command"},
        config_hash=config.hash(),
        config=config.model_dump(mode="json"),
        data_hash=data_hash,
        command=facts["command"],
        settings=results.LrSettings.model_validate(settings),
        ranks=doing.ranks,
        at_a_time=doing.at_a_time,
        unigram_entropy_nats=doing.unigram,
        range_test=_range_facts(ranges[0]) if ranges else None,
        other_range_tests=[_range_facts(test) for test in ranges[1:]],
        rungs=[_rung_facts(rung) for rung in rungs],
        choice=choice,
        cost=results.LrCost(
            tokens=trained,
            grid_tokens=len(first) * doing.settings.seeds * doing.tokens,
            trials=len(outcomes) + len(ranges) + len(doing.left_out),
        ),
    )


def _range_facts(test: RangeTest) -> results.RangeTest:
    return results.RangeTest(
        optimizer=test.optimizer,
        points=[(lr, loss) for lr, loss, _ in test.points],
        edge=test.edge.lr,
        why=test.edge.why,
        trial=test.trial,
    )


def _rung_facts(rung: Rung) -> results.Rung:
    return results.Rung(
        tokens=rung.tokens,
        seeds=list(rung.seeds),
        last=rung.last,
        trials=[_trial_facts(outcome) for outcome in rung.outcomes],
        kept=list(rung.kept),
    )


def _trial_facts(o: Outcome) -> results.LrTrial:
    return results.LrTrial(
        trial=o.trial,
        **o.candidate._asdict(),
        seed=o.seed,
        status=o.status,
        failure_kind=o.failure_kind,
        cause=o.cause,
        heldout_loss=o.heldout_loss,
        tokens=o.tokens,
        seconds=o.seconds,
        curve=list(o.curve),
    )


def carry(
    name: str | None,
    overrides: Sequence[str],
    batches: str,
    out: Path | None,
    *,
    as_json: bool,
    console: Console,
) -> int:
    """`--transfer`: the configuration's rate, or the one found in OUT, at another global batch. Adds it to
    OUT/tune.json. Returns the exit code; raises ConfigError."""
    before, after = transfer.parse(batches)
    config = load_config(training.find_config(name or DEFAULT_CONFIG, None), overrides)
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
        config, source = lr_trials.tuned_config(config, candidate_of(tuned.choice)), str(path)
        lr = tuned.choice.lr
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
