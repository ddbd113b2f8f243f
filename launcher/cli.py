"""The command line: one verb, one call."""

from __future__ import annotations

import dataclasses
import faulthandler
import json as jsonlib
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from bert_dp import __version__, record
from bert_dp.config import ConfigError, Issue, find_config, shipped_configs
from bert_dp.config.checks import parse_profile
from launcher.errors import DISK_FAILED, exit_code
from launcher.log import complain, logger
from launcher.options import (
    TEXTS,
    ExportOut,
    Force,
    Format,
    GlueData,
    Init,
    Json,
    Launcher,
    MaxRestarts,
    Nproc,
    Precision,
    Resume,
    Run,
    Set,
    Settings,
    TextKey,
    WithoutHead,
    Words,
    console,
    counts_option,
    dry_run_option,
    engines,
    loggers,
    modes,
    names,
    out_option,
    parsed,
    rates,
    run_dir_option,
    seconds,
    settings_after_run,
    shipped_names,
    split_words,
    starts,
    two_batches,
)

if TYPE_CHECKING:
    from launcher.report.model import Report

MOST_TOKENS = 1e15
RATES, SEEDS = 5, 3  # of `tune lr`
SHARED = ("report", "data", "export")
"""Verbs that write where the user says, with the user's umask; the others write privately."""

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Pretrain a crammed BERT on every GPU of this machine, and know what each one contributed.",
)


def _group(name: str, help: str) -> typer.Typer:
    """Verbs of two words: `bert-dp NAME VERB`."""
    group = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help=help)
    app.add_typer(group, name=name)
    return group


data_app = _group("data", "Build and inspect token shards.")
eval_app = _group("eval", "Measure a run after training.")
export_app = _group("export", "Write a run as what other programs load.")
plan_app = _group("plan", "Predict what hardware would give, before it is bought.")
tune_app = _group("tune", "Find the micro batch and the learning rate.")


def _version(show: bool) -> None:
    if show:
        typer.echo(f"bert-dp {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    if context.invoked_subcommand not in SHARED:
        record.keep_private()


@app.command(short_help="Pretrain; without arguments two minutes on built-in text.")
def train(
    words: Words = None,
    set_: Set = None,
    nproc: Nproc = "auto",
    launcher: Launcher = "torchrun",
    run_dir: Annotated[Path | None, run_dir_option("runs/NAME")] = None,
    resume: Resume = "auto",
    max_restarts: MaxRestarts = 0,
    elastic: Annotated[
        bool,
        typer.Option("--elastic", help="Restart with fewer ranks when one was killed or a GPU was lost."),
    ] = False,
    dry_run: Annotated[bool, dry_run_option("everything, print the plan")] = False,
    force: Force = False,
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="FIRST:END",
            help="Record these optimizer steps with torch.profiler; 10:13 is steps 10, 11 and 12.",
        ),
    ] = None,
    profile_ranks: Annotated[
        str | None, typer.Option(metavar="N,...", help="Ranks that --profile records, by commas; default: 0.")
    ] = None,
) -> int:
    """Pretrain. Without arguments: the quickstart, two minutes on the built-in corpus."""
    from launcher import job
    from launcher.run import restarts, train
    from launcher.tune import auto

    config, settings = split_words(words, set_)
    if elastic and not max_restarts:
        raise ConfigError(["--elastic: only a restart changes the number of ranks; add --max-restarts K"])
    if profile_ranks is not None and profile is None:
        raise ConfigError(["--profile-ranks: records nothing without --profile FIRST:END; add it"])
    plan = None if profile is None else parse_profile(profile, profile_ranks or "0")
    overrides, failed = auto.resolve_auto_batch(
        config,
        settings,
        nproc=nproc,
        run_dir=run_dir,
        resume=resume,
        launcher=launcher,
        dry_run=dry_run,
        console=console(),
        profile=plan,
    )
    if failed:
        return failed
    searched = overrides != settings and not dry_run  # a micro batch that was measured needs no estimate
    return train.train(
        job.load(config, overrides, run_dir),
        nproc=nproc,
        launcher=launcher,
        run_dir=run_dir,
        resume=resume,
        dry_run=dry_run,
        console=console(),
        policy=restarts.Policy(max_restarts, elastic),
        force=force or searched,
        profile=plan,
    )


@app.command(short_help="Train a classifier or regressor from a pretrained run.")
def finetune(
    run: Annotated[Path, typer.Argument(help="Pretrained run, or a checkpoint of one.", show_default=False)],
    words: Settings = None,
    task: Annotated[str | None, typer.Option(metavar="NAME", help="A GLUE task, with --data.")] = None,
    data: GlueData = None,
    train: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Your own examples: CSV, TSV, JSONL, Parquet or hub:NAME."),
    ] = None,
    dev: Annotated[str | None, typer.Option(metavar="FILE", help="Examples that are scored.")] = None,
    test: Annotated[
        str | None, typer.Option(metavar="FILE", help="Examples to predict, scored if labelled.")
    ] = None,
    text: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Column with the text; default: text.")
    ] = None,
    text_pair: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN",
            help="Column with the second text of a pair; default: text_pair, where there is one.",
        ),
    ] = None,
    label: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Column with the label; default: label.")
    ] = None,
    kind: Annotated[
        Literal["single_label", "multi_label", "regression"] | None,
        typer.Option(help="What a label is; default: single_label."),
    ] = None,
    init: Init = "checkpoint",
    nproc: Nproc = "auto",
    launcher: Launcher = "torchrun",
    run_dir: Annotated[Path | None, run_dir_option("runs/RUN-TASK")] = None,
    resume: Resume = "auto",
    max_restarts: MaxRestarts = 0,
    dry_run: Annotated[bool, dry_run_option("everything, print the plan")] = False,
    force: Force = False,
    set_: Set = None,
) -> int:
    """A classifier or regressor from a pretrained run, by the loop that pretrains: N ranks train what one
    trains. The last line names its scores; RUN/predictions.jsonl has what was predicted of each example.
    """
    from launcher.evaluate import finetune as finetuning
    from launcher.run import restarts
    from launcher.run import train as training

    settings = settings_after_run(words, set_)
    source = finetuning.source_of(
        task,
        data or (),
        {"train": train, "dev": dev, "test": test},
        {"text": text, "text-pair": text_pair, "label": label, "kind": kind},
    )
    return training.train(
        finetuning.load(run, source, settings, nproc=nproc, random_weights=init == "random"),
        nproc=nproc,
        launcher=launcher,
        run_dir=run_dir,
        resume=resume,
        dry_run=dry_run,
        console=console(),
        policy=restarts.Policy(max_restarts, False),
        force=force,
    )


@data_app.command("build", short_help="Make token shards of text.")
def data_build(
    sources: Annotated[list[str], typer.Argument(help=TEXTS)],
    out: Annotated[Path, typer.Option(help="Directory to write.")],
    vocab_size: Annotated[
        int | None, typer.Option(help="Size of the tokenizer to train; default: 32,768.")
    ] = None,
    sequence_length: Annotated[int, typer.Option(help="Tokens per sequence.")] = 128,
    tokenizer: Annotated[str | None, typer.Option(help="Use this tokenizer.json; train none.")] = None,
    format: Format = "auto",
    text_key: TextKey = "text",
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="name=v",
            help="Override a build option (data.build.NAME of a config); repeatable.",
        ),
    ] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, max=4096, help="Tokenising processes; default: one per core.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace what OUT holds.")] = False,
) -> int:
    """Corpus -> filter -> dedup -> tokenizer -> packed shards with a manifest of hashes."""
    from launcher import datasets

    return datasets.build(
        sources,
        out,
        vocab_size=vocab_size,
        sequence_length=sequence_length,
        tokenizer=tokenizer,
        overrides=[f"source_format={format}", f"text_field={jsonlib.dumps(text_key)}", *(set_ or [])],
        processes=processes,
        force=force,
        console=console(),
    )


@data_app.command("inspect", short_help="Verify shards and show what is in them.")
def data_inspect(
    directory: Annotated[Path, typer.Argument(help="Directory made by data build.")], json: Json = False
) -> int:
    """Verify every hash; show counts, entropy, frequent tokens and samples."""
    from launcher import datasets

    return datasets.inspect(directory, as_json=json, console=console())


@app.command(short_help="List the configurations that come with bert-dp, or print one.")
def configs(
    name: Annotated[
        str | None,
        typer.Argument(help="Print this one; without it all are listed.", autocompletion=shipped_names),
    ] = None,
) -> None:
    """The configurations that come with bert-dp: their names and what each is, or the text of one."""
    if name is not None:
        typer.echo(find_config(name).read_text(), nl=False)
        return
    for path in sorted(shipped_configs().glob("*.yaml")):
        what = path.read_text().partition("\n")[0].removeprefix("# ")
        typer.echo(f"{path.stem:<18} {what}")
    complain("next: bert-dp train NAME --dry-run")


@app.command(short_help="Verify the checkpoints of a run.")
def checkpoints(
    run: Annotated[Path, typer.Argument(metavar="RUN", show_default=False, help="Run directory.")],
    json: Json = False,
) -> int:
    """Verify every checkpoint of a run by its hashes, and show how far each is. Exit code 1 when one is
    damaged."""
    from launcher import checkpoints

    return checkpoints.verify(run, as_json=json, console=console())


@app.command(short_help="Check this machine before a run does.")
def doctor(
    run_dir: Annotated[Path | None, typer.Option(help="Where runs would be written; default: here.")] = None,
    json: Json = False,
) -> int:
    """What this machine is, and what could go wrong: devices, links, NUMA, memory, limits, disk, ports,
    versions, a checkpoint written and read back, a short all-reduce. Under 30 s; exit code 1 when a run
    would fail.
    """
    from launcher.machine import doctor as checks
    from launcher.report.console import show_report

    machine, findings = checks.doctor(run_dir)
    if json:
        facts = {"environment": machine.to_json(), "findings": [f.__dict__ for f in findings]}
        typer.echo(jsonlib.dumps(facts, indent=1))
    else:
        show_report(console(), checks.doctor_report(machine, findings), titled=True)
    return 1 if any(f.level == "fail" for f in findings) else 0


@app.command(short_help="Measure how the throughput grows with the ranks.")
def scale(
    words: Words = None,
    nproc: Annotated[
        Sequence[int], counts_option("Numbers of ranks, by commas; default: 1,2.", "--nproc", "--gpus")
    ] = (1, 2),
    mode: Annotated[
        Sequence[Literal["weak", "strong"]],
        parsed(modes, "MODE", "weak (same batch per rank; the default), strong (same global batch) or both."),
    ] = ("weak",),
    engine: Annotated[
        Sequence[str],
        parsed(
            engines,
            "NAME,...",
            "ddp (the default), zero1, fsdp, accelerate, deepspeed-0 to -3, by commas.",
            "--engines",
        ),
    ] = ("ddp",),
    tensor: Annotated[
        Sequence[int], counts_option("Ranks that share one replica, by commas; default: 1.")
    ] = (1,),
    launcher: Launcher = "torchrun",
    repeats: Annotated[int, typer.Option(min=1, max=1000, help="Runs of each cell, in random order.")] = 3,
    steps: Annotated[int, typer.Option(min=2, help="Timed optimizer steps of a run.")] = 50,
    warm_up: Annotated[int, typer.Option(min=1, help="Steps before them, which do not count.")] = 20,
    accumulation: Annotated[
        int | None, typer.Option(min=1, help="Micro batches per step in weak mode; default 1.")
    ] = None,
    synthetic: Annotated[bool, typer.Option(help="Also run the first engine without the loader.")] = True,
    set_: Set = None,
    out: Annotated[Path | None, out_option("scaling/NAME")] = None,
    dry_run: Annotated[bool, dry_run_option("every cell, print the grid")] = False,
    json: Json = False,
) -> int:
    """Benchmark: a grid of real runs, efficiency against one rank with its interval, and what costs it.

    Beside the cells that are asked for: one rank without a process group (the baseline), ddp on one rank, and
    for every N the ceiling, N independent copies.
    """
    from launcher.plan.scaling import predict_measured
    from launcher.scale import benchmark, grid

    config, overrides = split_words(words, set_)
    if accumulation is not None and "weak" not in mode:
        raise ConfigError(
            [
                Issue(
                    "--accumulation",
                    "no_effect",
                    "strong scaling derives it from batch.global_size",
                    accumulation,
                    "--mode",
                    "use --mode weak",
                )
            ]
        )
    settings = grid.Settings(
        gpus=tuple(sorted(nproc)),
        modes=tuple(mode),
        engines=tuple(engine),
        tensor=tuple(tensor),
        launcher=launcher,
        repeats=repeats,
        steps=steps,
        warm_up=warm_up,
        accumulation=accumulation,
        synthetic=synthetic,
    )
    return benchmark.scale(
        config,
        overrides,
        settings,
        out=out,
        dry_run=dry_run,
        as_json=json,
        console=console(),
        predict=predict_measured,
    )


@tune_app.command("batch", short_help="Find the micro batch of a rank by real runs.")
def tune_batch(
    words: Words = None,
    nproc: Annotated[
        str, typer.Option("--nproc", "--gpus", help="Ranks of every trial: auto (every GPU, or 2 CPU ranks).")
    ] = "auto",
    budget: Annotated[
        float, parsed(seconds, "TIME", "Time for all trials, about: 90s, 5m (the default), 1h.")
    ] = 300.0,
    memory: Annotated[
        float | None,
        typer.Option(help="GiB that a rank may use; default: its device, or its share of the host."),
    ] = None,
    launcher: Launcher = "torchrun",
    set_: Set = None,
    out: Annotated[Path | None, out_option("tune/NAME-batch")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Ignore cached results.")] = False,
    dry_run: Annotated[bool, dry_run_option("everything, print the sizes")] = False,
    json: Json = False,
) -> int:
    """The smallest micro batch within 3 % of the best throughput, by real runs with all ranks.

    The global batch stays as it is declared; accumulation follows. Also: the memory of a rank, the gradient
    noise scale, and the global batch that would make the most of each sample.
    """
    from launcher.tune import batch as search

    config, overrides = split_words(words, set_)
    return search.tune_batch(
        config,
        overrides,
        search.BatchOptions(nproc, budget, memory, launcher),
        out=out,
        fresh=fresh,
        dry_run=dry_run,
        as_json=json,
        console=console(),
    )


@tune_app.command("lr", short_help="Find the learning rate by short complete runs.")
def tune_lr(
    words: Words = None,
    nproc: Annotated[
        int | None,
        typer.Option(
            "--nproc", "--ranks", min=1, help="Ranks of a trial; default: as few as one replica needs."
        ),
    ] = None,
    rates: Annotated[int, typer.Option(min=3, max=20, help="Rates of the first rung, spaced 2x.")] = RATES,
    seeds: Annotated[int, typer.Option(min=1, max=100, help="Seeds of each finalist.")] = SEEDS,
    tokens: Annotated[
        float | None,
        typer.Option(min=1, help="Tokens of a run in the last rung; default: of the configured run."),
    ] = None,
    budget: Annotated[
        float | None, parsed(seconds, "TIME", "90s, 30m or 2h: shorten the runs to fit.")
    ] = None,
    transfer: Annotated[
        Sequence[int] | None,
        parsed(
            two_batches,
            "'B1->B2'",
            "Run nothing: carry the rate at global batch B1, of the configuration or of the search in --out.",
        ),
    ] = None,
    launcher: Launcher = "torchrun",
    set_: Set = None,
    out: Annotated[Path | None, out_option("tune/NAME-lr")] = None,
    dry_run: Annotated[bool, dry_run_option("everything, print the search")] = False,
    json: Json = False,
) -> int:
    """Learning rate: a range test for the divergence edge, a ladder of rates on short runs, and the best of
    them on whole runs with several seeds, by held-out loss. Writes tune.json and tuned.yaml, which `train`
    takes.
    """
    from launcher.tune import lr as search
    from launcher.tune.lr_search import LrOptions

    config, overrides = split_words(words, set_)
    if transfer is not None:
        from launcher.tune.transfer import carry

        given = {
            "--nproc": nproc is not None,
            "--rates": rates != RATES,
            "--seeds": seeds != SEEDS,
            "--tokens": tokens is not None,
            "--budget": budget is not None,
        }
        if idle := [option for option, is_given in given.items() if is_given]:
            raise ConfigError([f"{option}: --transfer runs nothing; leave {option} out" for option in idle])
        before, after = transfer
        return carry(config, overrides, before, after, out, dry_run=dry_run, as_json=json, console=console())
    if tokens is not None and not tokens < MOST_TOKENS:
        raise ConfigError([f"--tokens: {tokens} is not below {MOST_TOKENS:g}"])
    settings = LrOptions(
        ranks=nproc,
        rates=rates,
        seeds=seeds,
        launcher=launcher,
        tokens=None if tokens is None else int(tokens),
        budget_s=budget,
    )
    return search.tune_lr(
        config, overrides, settings, out=out, dry_run=dry_run, as_json=json, console=console()
    )


@plan_app.command("scaling", short_help="Predict step time and efficiency of N GPUs.")
def plan_scaling(
    nproc: Annotated[
        Sequence[int],
        counts_option("Numbers of GPUs: 1,2,4,8 or 1..1024 (doubling); default: 1..8.", "--nproc", "--gpus"),
    ] = (1, 2, 4, 8),
    from_: Annotated[
        Path | None, typer.Option("--from", help="scaling.json or profile.json of a measured run.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Without --from: bert-base, bert-large or a configuration.")
    ] = None,
    seq_per_s: Annotated[
        float | None, typer.Option(min=1e-3, max=1e9, help="Without --from: sequences/s on one GPU.")
    ] = None,
    micro: Annotated[
        int | None, typer.Option(min=1, max=10**6, help="Without --from: its micro batch.")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="Without --from: A100-80G, ...; for the optimizer's time.")
    ] = None,
    link: Annotated[
        str | None, typer.Option(help="Within a node: nvlink4, pcie4, ...; default: as measured.")
    ] = None,
    inter: Annotated[str | None, typer.Option(help="Between nodes: ib-ndr, ethernet100, ...")] = None,
    gpus_per_node: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="GPUs in one node; default: 8, or all of them without --inter where the link is measured.",
        ),
    ] = None,
    nics: Annotated[int, typer.Option(min=1, help="NICs per node.")] = 1,
    engine: Annotated[Literal["ddp", "zero1", "fsdp"], typer.Option(help="Engine to predict.")] = "ddp",
    tensor: Annotated[Sequence[int], counts_option("Tensor-parallel sizes: 1,2; default: 1.")] = (1,),
    accumulation: Annotated[
        Sequence[int], counts_option("Micro batches per step: 1,4; default: as measured.")
    ] = (),
    reduce_dtype: Annotated[
        Literal["full", "bf16", "fp16"], typer.Option(help="Precision in which gradients are sent.")
    ] = "full",
    bucket_mib: Annotated[
        float | None,
        typer.Option(min=1e-3, help="Size of a gradient bucket; default: 25, of ddp's first one 1."),
    ] = None,
    json: Json = False,
) -> None:
    """Step time and efficiency of N GPUs from one GPU's profile, and which change would help most."""
    from launcher import results
    from launcher.plan import scaling
    from launcher.plan.plan_page import plan_page
    from launcher.report.console import show_report

    source = scaling.find_source(from_, model, seq_per_s, micro, gpu, (*accumulation, 1)[0])
    spec = scaling.PlanSpec(
        tuple(nproc),
        link,
        inter,
        gpus_per_node,
        nics,
        engine,
        tuple(tensor),
        tuple(accumulation),
        bucket_mib,
        reduce_dtype,
    )
    prediction = scaling.predict_scaling(source, spec)
    if json:
        typer.echo(results.to_json(prediction), nl=False)
    else:
        config = model if from_ is None and model not in scaling.MODELS else None
        show_report(console(), plan_page(prediction, config))


@eval_app.command("glue", short_help="Finetune and score every task of GLUE with several seeds.")
def eval_glue(
    run: Run,
    words: Settings = None,
    data: GlueData = None,
    tasks: Annotated[
        Sequence[str], parsed(names, "NAME,...", "Default: every task whose files are there.")
    ] = (),
    seeds: Annotated[int, typer.Option(min=1, max=100, help="Runs of each task; the median counts.")] = 5,
    rates_: Annotated[
        Sequence[float],
        parsed(
            rates,
            "RATE,...",
            "Choose one for all tasks, on a tenth of train; default: the recipe's.",
            "--rates",
        ),
    ] = (),
    rate_tasks: Annotated[
        Sequence[str], parsed(names, "NAME,...", "Tasks that choose it; default: CoLA, MRPC, STS-B and RTE.")
    ] = (),
    init_task: Annotated[
        Sequence[tuple[str, str]],
        parsed(starts, "RTE=MNLI,...", "Start a task from the finetuned run of another one."),
    ] = (),
    init: Init = "checkpoint",
    ranks_per_job: Annotated[
        int,
        typer.Option(
            "--ranks-per-job",
            "--nproc",
            min=1,
            help="Ranks of a run; runs go side by side on the devices that are left.",
        ),
    ] = 1,
    launcher: Launcher = "torchrun",
    out: Annotated[Path | None, out_option("eval/RUN-glue")] = None,
    dry_run: Annotated[bool, dry_run_option("everything, print the tasks")] = False,
    json: Json = False,
    set_: Set = None,
) -> int:
    """GLUE: every task finetuned with several seeds, and the median of each on its dev set, beside what a
    constant answer scores. Writes glue.json, a page, and files for GLUE's server where test files are there.
    """
    from launcher.evaluate import glue
    from launcher.evaluate.glue_scores import GlueOptions

    settings = settings_after_run(words, set_)
    if not data:
        raise ConfigError(["--data: name the folder or archive with GLUE's files"])
    options = GlueOptions(
        tasks=list(tasks),
        seeds=seeds,
        rates=list(rates_),
        rate_tasks=list(rate_tasks),
        init=init,
        init_task=dict(init_task),
        ranks=ranks_per_job,
        launcher=launcher,
    )
    return glue.evaluate(
        run, settings, options, data, out=out, dry_run=dry_run, as_json=json, console=console()
    )


@eval_app.command("mlm", short_help="Measure the held-out loss of a run on any text.")
def eval_mlm(
    run: Run,
    texts: Annotated[list[str], typer.Argument(metavar="TEXT...", help=TEXTS)],
    documents: Annotated[
        str, typer.Option(help="What ends a document of plain text: line or blank_line.")
    ] = "line",
    format: Format = "auto",
    text_key: TextKey = "text",
    max_bytes: Annotated[
        int | None,
        typer.Option(min=1, help="Stop after the document that reaches so many; default: read all."),
    ] = None,
    precision: Precision = "auto",
    json: Json = False,
) -> int:
    """Held-out loss on any text: of single tokens, by what the model saw in their place, and of whole words
    in bits per byte, by which runs with other vocabularies compare. Intervals are over documents."""
    from launcher.evaluate import text_loss

    options = {"documents": documents, "source_format": format, "text_field": text_key}
    return text_loss.evaluate(
        run, texts, options, max_bytes=max_bytes, precision=precision, as_json=json, console=console()
    )


@app.command(short_help="Label or encode the examples of a file.")
def predict(
    run: Run,
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="An example a line, a table (CSV, TSV, JSONL, Parquet), hub:NAME, or - for stdin.",
        ),
    ],
    text: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Column with the text of a table; default: text.")
    ] = None,
    text_pair: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Column with the second text of a pair.")
    ] = None,
    pooling: Annotated[
        Literal["mean", "cls"] | None,
        typer.Option(
            help="How a pretrained run encodes: the mean over the tokens (the default), or the first."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File to write; default: stdout.")] = None,
    instances: Annotated[
        int,
        typer.Option(
            min=1, max=1024, metavar="N", help="Processes that compute, each with a copy of the model."
        ),
    ] = 1,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1, max=1024, metavar="T", help="CPU threads of each process; default: its share of the cores."
        ),
    ] = None,
    precision: Precision = "auto",
) -> int:
    """A JSON line for each example of a file: labels with probabilities by a finetuned run, or its score;
    encodings by a pretrained one.
    """
    from launcher.evaluate import predict as predicting

    columns = predicting.Columns(text, text_pair)
    return predicting.predict(
        run,
        file,
        columns,
        pooling=pooling,
        out=out,
        instances=instances,
        threads=threads,
        precision=precision,
    )


@export_app.command("hf", short_help="Write what transformers loads.")
def export_hf(run: Run, out: ExportOut, encoder: WithoutHead = False) -> int:
    """A directory that transformers loads without code of ours: ModernBERT, EuroBERT or RobertaPreLayerNorm,
    whichever has the run's positions and norm, with tokenizer and model card."""
    from launcher.evaluate import export

    return export.export("hf", run, out, encoder=encoder, console=console())


@export_app.command("onnx", short_help="Write an ONNX file.")
def export_onnx(
    run: Run,
    out: ExportOut,
    encoder: WithoutHead = False,
    int8: Annotated[
        bool, typer.Option("--int8", help="Weights of 8 bits: ONNX Runtime's dynamic quantisation.")
    ] = False,
) -> int:
    """A directory with model.onnx, for any batch and any length up to the run's; of any run."""
    from launcher.evaluate import export

    options = ["--int8"] if int8 else []
    return export.export("onnx", run, out, encoder=encoder, options=options, console=console())


@export_app.command("aoti", short_help="Write an AOTInductor package.")
def export_aoti(
    run: Run,
    out: ExportOut,
    encoder: WithoutHead = False,
    bf16: Annotated[bool, typer.Option("--bf16", help="Weights and products in bf16.")] = False,
    int8: Annotated[
        bool, typer.Option("--int8", help="Products of the linear layers in 8 bits, by torchao.")
    ] = False,
) -> int:
    """A directory with model.pt2, compiled by AOTInductor for processors like this one, for Python or C++; of
    any run."""
    from launcher.evaluate import export

    precision = [flag for flag, given in (("--bf16", bf16), ("--int8", int8)) if given]
    return export.export("aoti", run, out, encoder=encoder, options=precision, console=console())


@export_app.command("check", short_help="Compare an exported directory with its run.")
def export_check(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", show_default=False, help="Made by `bert-dp export`.")
    ],
    run: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN", help="Its run, where that is not found by its name here, in runs or beside DIR."
        ),
    ] = None,
    json: Json = False,
) -> int:
    """Compares an exported directory with its run, on batches of several sizes and lengths: the directory is
    loaded in a process without our code. Exit code 1 when the two differ."""
    from launcher.evaluate import export

    return export.check(directory, run, as_json=json, console=console())


@app.command(short_help="Make the page of a run, a benchmark, a search or an evaluation.")
def report(
    run_dirs: Annotated[
        list[Path],
        typer.Argument(help="One run, several to compare, one benchmark, search or GLUE evaluation."),
    ],
    out: Annotated[
        Path | None, typer.Option(help="HTML file; default: report.html in the first run.")
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print what the page would show as JSON; write no page.")
    ] = False,
    log_to: Annotated[
        Sequence[str],
        parsed(loggers, "NAME,...", "Also send the runs to tensorboard, wandb, mlflow or trackio."),
    ] = (),
) -> int:
    """One self-contained HTML page of a run, a comparison of runs, a scaling benchmark, a search (tune) or an
    evaluation on GLUE."""
    from launcher.report.console import show_end
    from launcher.report.run_report import PAGE
    from launcher.run.loggers import send_run

    if json and out is not None:
        raise ConfigError(["--out: --json writes no page; leave one of the two out"])
    if log_to and (others := [d for d in run_dirs if not (d / "config.yaml").exists()]):
        raise ConfigError([f"--log-to: {d} is not a run directory (no config.yaml)" for d in others])
    target = out or run_dirs[0] / PAGE
    report = report_of(run_dirs)
    if json:
        typer.echo(jsonlib.dumps(record.finite(dataclasses.asdict(report)), indent=1))
    else:
        write_page(report, target)
    code = max(send_run(run_dir, log_to, logger(console(), json)) for run_dir in run_dirs)
    if not json:
        show_end(console(), report, target)
    return code


def write_page(report: Report, target: Path) -> None:
    """Raises ConfigError where it cannot be written, but OSError of a full or failing disk."""
    from launcher.report import html

    if issues := html.target_issues(target):
        raise ConfigError(issues)
    try:
        html.write(report, target)
    except OSError as error:
        if error.errno in DISK_FAILED:
            raise
        raise ConfigError([f"--out: {error.filename} cannot be written ({error.strerror})"]) from None


def report_of(run_dirs: Sequence[Path]) -> Report:
    """What these directories hold. Raises ConfigError for what is none of ours, or not to be compared."""
    from launcher import evaluate, results, tune
    from launcher.evaluate.glue_page import compare_report, glue_report
    from launcher.evaluate.glue_scores import Glue
    from launcher.report.run_report import of_directories
    from launcher.scale.models import Scaling
    from launcher.scale.scale_page import FILE, scale_page
    from launcher.tune.tune_page import tune_page

    kinds: dict[str, tuple[str, Callable[[Path], Report]]] = {  # of directories, by the file of their result
        FILE: ("a scaling benchmark", lambda path: scale_page(results.read(path, Scaling), path.parent)),
        tune.FILE: ("a search", tune_page),
        evaluate.FILE: ("an evaluation", lambda path: glue_report(results.read(path, Glue))),
    }
    files = [d / name for d in run_dirs for name in kinds if (d / name).exists()]
    if len(run_dirs) > 1 and [path.name for path in files] == [evaluate.FILE] * len(run_dirs):
        return compare_report(run_dirs)
    if files:
        what, read = kinds[files[0].name]
        unfinished = [d for d in run_dirs if not (d / evaluate.FILE).exists()]
        if files[0].name == evaluate.FILE and unfinished:
            raise ConfigError(
                [
                    f"RUN_DIR: {d} holds no finished evaluation (no {evaluate.FILE}); one that was stopped "
                    "goes on with the same `bert-dp eval glue` command"
                    for d in unfinished
                ]
            )
        if len(run_dirs) > 1:
            raise ConfigError([f"RUN_DIR: {files[0].parent} is {what}; its page is made of it alone"])
        return read(files[0])
    if missing := [d for d in run_dirs if not (d / "config.yaml").exists()]:
        raise ConfigError([no_run(d) for d in missing])
    return of_directories(run_dirs)


def no_run(path: Path) -> str:
    """Why this is not a run directory, and which one may be meant."""
    hint = f"; name the directory, {path.parent}" if path.is_file() else ""
    if path.is_dir() and (runs := sorted(child.parent.name for child in path.glob("*/config.yaml"))):
        hint = f"; it holds runs, name one: {', '.join(runs[:3])}"
    return f"RUN_DIR: {path} is not a run directory (no config.yaml in it){hint}"


def _leave(number: int, frame: object) -> None:
    """Exit with 128 + n; a second signal does not interrupt the removal of unfinished output."""
    for later in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(later, lambda *_: None)
    sys.exit(128 + number)


def main() -> None:
    """Entry point. Exit codes: 0 done, 2 bad input, 1 failed, 128 + signal."""
    record.open_missing_descriptors()
    faulthandler.enable(file=2)
    for number in record.heeded((signal.SIGTERM, signal.SIGHUP)):
        signal.signal(number, _leave)
    sys.exit(exit_code(lambda: app(standalone_mode=False)))


if __name__ == "__main__":
    main()
