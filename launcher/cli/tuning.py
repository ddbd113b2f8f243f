"""`scale`, `tune batch`, `tune lr` and `plan scaling`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Option

from bert_dp.config import ConfigError, Issue
from launcher.cli import options as opt

MAX_TOKENS = 1e15


def scale(
    words: opt.Words = None,
    nproc: Annotated[
        Sequence[int], opt.counts_option("Numbers of ranks; default: 1,2.", "--nproc", "--gpus")
    ] = (1, 2),
    mode: Annotated[
        Literal["weak", "strong", "both"], Option(help="Keep the batch per rank, or the global batch.")
    ] = "weak",
    engine: Annotated[
        Sequence[str],
        opt.parsed(opt.engines, "NAME,...", "ddp (default), zero1, fsdp, deepspeed-1, ...", "--engines"),
    ] = ("ddp",),
    tensor: Annotated[Sequence[int], opt.counts_option("Tensor-parallel sizes; default: 1.")] = (1,),
    launcher: opt.Launcher = "torchrun",
    repeats: Annotated[int, Option(min=1, max=1000, help="Runs of each cell, in random order.")] = 3,
    steps: Annotated[int, Option(min=2, help="Timed optimizer steps of a run.")] = 50,
    warm_up: Annotated[int, Option(min=1, help="Untimed steps before them.")] = 20,
    accumulation: Annotated[int | None, Option(min=1, help="Micro batches per step; default: 1.")] = None,
    set_: opt.Set = None,
    out: opt.Out = None,
    dry_run: opt.DryRun = False,
    json: opt.Json = False,
) -> int:
    """Measure scaling efficiency by a grid of real runs.

    Controls are added: one rank without a process group (the baseline), ddp on one rank, and for every N the
    ceiling, N independent copies.
    """
    from launcher.plan.scaling import predict_measured
    from launcher.scale import benchmark, grid

    config, overrides = opt.split_words(words, set_)
    if accumulation is not None and mode == "strong":
        message, hint = "strong scaling derives it from batch.global_size", "use --mode weak"
        raise ConfigError([Issue("--accumulation", "no_effect", message, accumulation, "--mode", hint)])
    settings = grid.Settings(
        gpus=tuple(sorted(nproc)),
        modes=("weak", "strong") if mode == "both" else (mode,),
        engines=tuple(engine),
        tensor=tuple(tensor),
        launcher=launcher,
        repeats=repeats,
        steps=steps,
        warm_up=warm_up,
        accumulation=accumulation,
    )
    return benchmark.scale(
        config,
        overrides,
        settings,
        out=out,
        dry_run=dry_run,
        as_json=json,
        console=opt.console(),
        predict=predict_measured,
    )


def tune_batch(
    words: opt.Words = None,
    nproc: Annotated[str, Option("--nproc", "--gpus", help="Ranks of a trial: auto or a number.")] = "auto",
    budget: Annotated[
        float, opt.parsed(opt.seconds, "TIME", "Time for all trials: 90s, 5m (default), 1h.")
    ] = 300.0,
    memory: Annotated[float | None, Option(help="GiB per rank; default: what is free.")] = None,
    launcher: opt.Launcher = "torchrun",
    set_: opt.Set = None,
    out: opt.Out = None,
    dry_run: opt.DryRun = False,
    json: opt.Json = False,
) -> int:
    """Find the micro batch of a rank by real runs.

    The result is the smallest micro batch within 3 % of the best throughput. The global batch stays;
    accumulation follows. Memory per rank and gradient noise scale are also shown.
    """
    from launcher.tune import batch as search

    config, overrides = opt.split_words(words, set_)
    return search.tune_batch(
        config,
        overrides,
        search.BatchOptions(nproc, budget, memory, launcher),
        out=out,
        dry_run=dry_run,
        as_json=json,
        console=opt.console(),
    )


def tune_lr(
    words: opt.Words = None,
    nproc: Annotated[
        int | None, Option("--nproc", "--ranks", min=1, help="Ranks of a trial; default: one replica's.")
    ] = None,
    rates: Annotated[int, Option(min=3, max=20, help="Rates of the first rung, spaced 2x.")] = 5,
    seeds: Annotated[int, Option(min=1, max=100, help="Seeds of each finalist.")] = 3,
    tokens: Annotated[
        float | None, Option(min=1, help="Tokens of a whole run; default: the configuration's.")
    ] = None,
    budget: Annotated[
        float | None, opt.parsed(opt.seconds, "TIME", "Shorten the runs to fit in 90s, 30m, 2h.")
    ] = None,
    launcher: opt.Launcher = "torchrun",
    set_: opt.Set = None,
    out: opt.Out = None,
    dry_run: opt.DryRun = False,
    json: opt.Json = False,
) -> int:
    """Find the learning rate by short complete runs.

    A range test finds the divergence edge, a ladder of rates on short runs follows, and the best of them are
    compared on whole runs with several seeds by held-out loss. Writes tune.json and tuned.yaml for `train`.
    """
    from launcher.tune import lr as search
    from launcher.tune.lr_search import LrOptions

    config, overrides = opt.split_words(words, set_)
    if tokens is not None and not tokens < MAX_TOKENS:
        raise ConfigError([Issue("--tokens", "out_of_range", f"must be below {MAX_TOKENS:g}", tokens)])
    options = LrOptions(
        ranks=nproc,
        rates=rates,
        seeds=seeds,
        launcher=launcher,
        tokens=None if tokens is None else int(tokens),
        budget_s=budget,
    )
    return search.tune_lr(
        config, overrides, options, out=out, dry_run=dry_run, as_json=json, console=opt.console()
    )


def plan_scaling(
    nproc: Annotated[
        Sequence[int], opt.counts_option("1,2,4,8 or 1..1024 (doubling); default: 1..8.", "--nproc", "--gpus")
    ] = (1, 2, 4, 8),
    from_: Annotated[Path | None, Option("--from", help="scaling.json of a benchmark.")] = None,
    model: Annotated[str | None, Option(help="bert-base, bert-large or a configuration.")] = None,
    seq_per_s: Annotated[
        float | None, Option(min=1e-3, help="Sequences/s on one GPU; instead of --from.")
    ] = None,
    micro: Annotated[int | None, Option(min=1, max=10**6, help="Micro batch of --seq-per-s.")] = None,
    gpu: Annotated[str | None, Option(help="Its GPU, for the optimizer's time: A100-80G, ...")] = None,
    link: Annotated[str | None, Option(help="Within a node: nvlink4, pcie4, ...; default: measured.")] = None,
    inter: Annotated[str | None, Option(help="Between nodes: ib-ndr, ethernet100, ...")] = None,
    gpus_per_node: Annotated[
        int | None, Option(min=1, help="Default: 8; all of them on one measured link.")
    ] = None,
    nics: Annotated[int, Option(min=1, help="NICs per node.")] = 1,
    engine: Annotated[Literal["ddp", "zero1", "fsdp"], Option(help="Engine to predict.")] = "ddp",
    tensor: Annotated[Sequence[int], opt.counts_option("Tensor-parallel sizes; default: 1.")] = (1,),
    accumulation: Annotated[
        Sequence[int], opt.counts_option("Micro batches per step; default: as measured.")
    ] = (),
    json: opt.Json = False,
) -> int:
    """Predict the step time and efficiency of N GPUs from one GPU's profile."""
    from launcher import results
    from launcher.plan import scaling
    from launcher.plan.scaling import plan_page
    from launcher.report.page import show_report

    source = scaling.find_source(from_, model, seq_per_s, micro, gpu, (*accumulation, 1)[0])
    spec = scaling.PlanSpec(
        tuple(nproc), link, inter, gpus_per_node, nics, engine, tuple(tensor), tuple(accumulation)
    )
    prediction = scaling.predict_scaling(source, spec)
    if json:
        typer.echo(results.to_json(prediction), nl=False)
    else:
        config = model if from_ is None and model not in scaling.MODELS else None
        show_report(opt.console(), plan_page(prediction, config))
    return 0
