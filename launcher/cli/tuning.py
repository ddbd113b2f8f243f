"""Define the verbs `scale`, `tune batch` and `tune lr`."""

from collections.abc import Sequence
from typing import Annotated, Literal

from typer import Option

from bert_dp.config import ConfigError, Issue
from launcher.cli import options as opt

MAX_TOKENS = 1e15


def scale(
    words: opt.Words = None,
    nproc: Annotated[Sequence[int], opt.parsed(opt.counts, "N,...", "Numbers of ranks; default: 1,2.")] = (
        1,
        2,
    ),
    mode: Annotated[
        Literal["weak", "strong", "both"],
        Option(help="Keep the batch per rank (weak) or the global batch (strong) constant."),
    ] = "weak",
    engine: Annotated[
        Sequence[str],
        opt.parsed(opt.engines, "NAME,...", "ddp (default), zero1, fsdp, deepspeed-1, ...", "--engines"),
    ] = ("ddp",),
    tensor: opt.Tensor = (1,),
    launcher: opt.Launcher = "torchrun",
    repeats: Annotated[int, Option(min=1, max=1000, help="Runs per grid cell; their order is random.")] = 3,
    steps: Annotated[int, Option(min=2, help="Timed optimizer steps per run.")] = 50,
    warm_up: Annotated[int, Option(min=1, help="Untimed steps before the timed ones.")] = 20,
    accumulation: Annotated[int | None, Option(min=1, help="Micro batches per step; default: 1.")] = None,
    set_: opt.Set = None,
    out: opt.Out = None,
    dry_run: opt.DryRun = False,
    json: opt.Json = False,
) -> int:
    """Measure scaling efficiency with a grid of real runs.

    The grid also contains controls: one rank without a process group (the baseline), ddp on one rank and,
    for every N > 1 in --nproc, N independent one-rank runs at the same time (the ceiling), if they fit.
    """
    from launcher.plan.scaling import predict_measured
    from launcher.scale import benchmark, grid

    config, overrides = opt.split_words(words, set_)
    if accumulation is not None and mode == "strong":
        message, hint = "strong scaling derives the accumulation from batch.global_size", "use --mode weak"
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
    return benchmark.scale(config, overrides, settings, opt.measuring(out, dry_run, json), predict_measured)


def tune_batch(
    words: opt.Words = None,
    nproc: Annotated[str, Option(help="Ranks per trial: auto or a number.")] = "auto",
    budget: Annotated[
        float, opt.parsed(opt.seconds, "TIME", "Total time of the trials: 90s, 5m (default), 1h.")
    ] = 300.0,
    memory: Annotated[float | None, Option(help="Memory per rank in GiB; default: all free memory.")] = None,
    launcher: opt.Launcher = "torchrun",
    set_: opt.Set = None,
    out: opt.Out = None,
    dry_run: opt.DryRun = False,
    json: opt.Json = False,
) -> int:
    """Find the best micro batch per rank with real runs.

    On a GPU, the result is the fastest micro batch. On a CPU, it is the smallest one within 3 % of the
    fastest. The gradient accumulation is adjusted to keep the global batch unchanged. The search also
    measures the memory per rank and the gradient noise scale.
    """
    from launcher.tune import batch as search

    config, overrides = opt.split_words(words, set_)
    options = search.BatchOptions(nproc, budget, memory, launcher)
    return search.tune_batch(config, overrides, options, opt.measuring(out, dry_run, json))


def tune_lr(
    words: opt.Words = None,
    nproc: Annotated[int | None, Option(min=1, help="Ranks per trial; default: one replica's ranks.")] = None,
    rates: Annotated[
        int, Option(min=3, max=20, help="Number of learning rates in the first rung, a factor of 2 apart.")
    ] = 5,
    seeds: Annotated[int, Option(min=1, max=100, help="Seeds per learning rate in the last rung.")] = 3,
    tokens: Annotated[
        float | None, Option(min=1, help="Number of tokens in a whole run; default: as configured.")
    ] = None,
    budget: Annotated[
        float | None, opt.parsed(opt.seconds, "TIME", "Total time (90s, 30m, 2h); runs are shortened to fit.")
    ] = None,
    launcher: opt.Launcher = "torchrun",
    set_: opt.Set = None,
    out: opt.Out = None,
    dry_run: opt.DryRun = False,
    json: opt.Json = False,
) -> int:
    """Find the best learning rate with runs that complete their schedule.

    A range test finds the rate at which training diverges. The first rung tries lower rates in short runs.
    The last rung compares the best rates by the held-out loss of whole runs with several seeds. Writes
    tune.json, and tuned.yaml for `train`.
    """
    from launcher.plan.dry_run import speed_here
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
    return search.tune_lr(config, overrides, options, opt.measuring(out, dry_run, json), speed_here)
