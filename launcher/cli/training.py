"""Define the verbs `train`, `finetune`, `distill`, `configs`, `data build` and `data inspect`."""

import dataclasses
import json as jsonlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Argument, Option

from bert_dp.config import ConfigError, Issue, hf_directory, native_class, native_issues
from bert_dp.config.checks import parse_profile
from bert_dp.config.load import find_config, load_config, micro_is_auto, read_yaml, shipped_configs
from launcher.cli import options as opt
from launcher.log import print_error, runnable


def train(
    words: opt.Words = None,
    set_: opt.Set = None,
    nproc: opt.Nproc = "auto",
    launcher: opt.Launcher = "torchrun",
    run_dir: opt.RunDir = None,
    resume: opt.Resume = "auto",
    max_restarts: opt.MaxRestarts = 0,
    elastic: Annotated[
        bool, Option("--elastic", help="Restart with fewer ranks if a rank was killed or lost its GPU.")
    ] = False,
    after_save: Annotated[
        Sequence[str],
        opt.parsed(opt.program, "'CMD ARGS'", "Run this command with the path of each new checkpoint."),
    ] = (),
    dry_run: opt.DryRun = False,
    gpu: Annotated[
        str | None,
        Option(help="With --dry-run: assume --nproc GPUs (auto: 1) of this type, such as H100-SXM-80G."),
    ] = None,
    force: opt.Force = False,
    allow_code: Annotated[
        bool, Option("--allow-code", help="Allow the Python files named by `task` and `optim.name` to run.")
    ] = False,
    profile: Annotated[
        str | None, Option(metavar="FIRST:END", help="Steps to profile; 10:13 means steps 10, 11 and 12.")
    ] = None,
    profile_ranks: Annotated[
        str | None, Option(metavar="N,...", help="Ranks to profile; default: 0.")
    ] = None,
    nnodes: opt.Nnodes = None,
    node_rank: opt.NodeRank = None,
    rendezvous: opt.Rendezvous = None,
    interface: opt.Interface = None,
) -> int:
    """Pretrain a model.

    By default, training takes two minutes and uses the built-in text. Under Slurm, Kubeflow or SkyPilot,
    --nnodes, --node-rank and --rendezvous take their defaults from that system's environment variables.
    """
    from launcher import job
    from launcher.run import train
    from launcher.run.nodes import find_place
    from launcher.run.restarts import RunOptions

    config, settings = opt.split_words(words, set_)
    place = find_place(nnodes, node_rank, rendezvous, interface)
    issues = []
    if place is not None and nproc == "auto":
        nproc = place.nproc
    if elastic and not max_restarts:
        hint = "add --max-restarts K"
        issues.append(Issue("--elastic", "no_effect", "has no effect without restarts", hint=hint))
    if profile_ranks is not None and profile is None:
        issues.append(Issue("--profile-ranks", "no_effect", "has no effect without --profile FIRST:END"))
    if gpu is not None and not dry_run:
        message = "has no effect without --dry-run: a real run uses the GPUs of this machine"
        issues.append(Issue("--gpu", "no_effect", message, gpu, "--dry-run", "add --dry-run"))
    if issues:
        raise ConfigError(issues)
    profiled = None if profile is None else parse_profile(profile, profile_ranks or "0")
    common = (nproc, run_dir, resume, dry_run, launcher, max_restarts, elastic, force, profiled, place)
    options, overrides = RunOptions(*common, after_save), settings
    if micro_is_auto(job.find_config(config, run_dir), settings):
        if place is not None:
            message, hint = "auto is supported on one node only", "run `bert-dp tune batch` first"
            raise ConfigError([Issue("batch.micro_size", "unsupported", message, "auto", "--nnodes", hint)])
        from launcher.tune.batch import resolve_auto_batch

        overrides, failed = resolve_auto_batch(config, settings, options, opt.console())
        if failed:
            return failed
        if not dry_run:  # a trial or an earlier run used this size, so the memory estimate must not refuse it
            options = dataclasses.replace(options, force=True)
    loaded = job.load(config, overrides, run_dir, allow_code=allow_code)
    if gpu is not None:
        from launcher.plan import dry_run as gpu_plan

        loaded = gpu_plan.on_gpus(loaded, gpu, nproc)
    code = train.train(loaded, options, opt.console())
    if gpu is not None and code == 0:
        gpu_plan.print_speed(loaded, gpu, opt.console(), nodes=place.nodes if place else 1)
    return code


def finetune(
    run: Annotated[Path, Argument(help="Pretrained run or checkpoint, or hf:DIR.", show_default=False)],
    words: opt.Settings = None,
    task: opt.GlueTask = None,
    data: opt.GlueData = None,
    train: opt.TrainFile = None,
    dev: opt.DevFile = None,
    test: Annotated[str | None, Option(metavar="FILE", help="Examples to predict labels for.")] = None,
    dev_fraction: Annotated[
        float | None,
        Option(min=0.001, max=0.9, metavar="F", help="Stratified share of --train to use as the dev set."),
    ] = None,
    seeds: Annotated[int, Option(min=1, max=100, help="Number of runs, each with a different seed.")] = 1,
    text: opt.TextColumn = None,
    text_pair: opt.PairColumn = None,
    label: opt.LabelColumn = None,
    kind: opt.LabelKinds = None,
    init: opt.Init = "checkpoint",
    nproc: opt.Nproc = "auto",
    launcher: opt.Launcher = "torchrun",
    run_dir: opt.RunDir = None,
    resume: opt.Resume = "auto",
    max_restarts: opt.MaxRestarts = 0,
    dry_run: opt.DryRun = False,
    force: opt.Force = False,
    set_: opt.Set = None,
) -> int:
    """Train a classifier or regressor from a pretrained run.

    Uses the training loop of `train`: N ranks train the same model as one rank. The last line of the output
    shows the scores. predictions.jsonl in the run directory holds predictions for all but the train split.
    """
    from launcher.evaluate import finetune as finetuning
    from launcher.report.page import show_report
    from launcher.run import train as training
    from launcher.run.restarts import RunOptions

    settings = opt.settings_after_run(words, set_)
    source = finetuning.source_of(
        task,
        data or (),
        {"train": train, "dev": dev, "test": test},
        {"text": text, "text-pair": text_pair, "label": label, "kind": kind},
        dev_fraction,
    )
    loaded = finetuning.load(run, source, settings, nproc=nproc, random_weights=init == "random")
    planned = finetuning.by_seed(loaded, run_dir, seeds)
    for job, place in planned:
        options = RunOptions(nproc, place, resume, dry_run, launcher, max_restarts, force=force)
        code = training.train(job, options, opt.console())
        if code or dry_run:
            return code
    if seeds > 1:
        report = finetuning.seeds_report([place for _, place in planned if place])
        show_report(opt.console(), report, titled=True)
    return 0


def distill(
    teacher: Annotated[
        Path,
        Argument(
            metavar="TEACHER",
            show_default=False,
            help="Finetuned run. With --teacher-logits: any run; the student uses its tokenizer.",
        ),
    ],
    words: Annotated[
        list[str] | None,
        Argument(metavar="SETTING=VALUE", show_default=False, help="Overrides for configs/distill.yaml."),
    ] = None,
    student: Annotated[
        str, Option(metavar="bilstm|CONFIG|RUN", help="BiLSTM, model of CONFIG, or model and weights of RUN.")
    ] = "bilstm",
    task: opt.GlueTask = None,
    data: opt.GlueData = None,
    train: opt.TrainFile = None,
    dev: opt.DevFile = None,
    text: opt.TextColumn = None,
    text_pair: opt.PairColumn = None,
    label: opt.LabelColumn = None,
    kind: opt.LabelKinds = None,
    teacher_logits: Annotated[
        str | None,
        Option(metavar="FILE", help="JSONL file with text, text_pair (for pairs) and any model's logits."),
    ] = None,
    copies: Annotated[
        int | None,
        Option(min=0, metavar="K", help="Augmented copies per training example; default: 20 (pairs: 10)."),
    ] = None,
    replace: Annotated[
        Literal["pos", "mlm", "none"],
        Option(help="Replacement words: same part of speech (pos), from a language model (mlm), or none."),
    ] = "pos",
    embeddings: Annotated[
        str, Option(metavar="random|teacher|FILE", help="Initial embedding of a BiLSTM; FILE: word vectors.")
    ] = "random",
    nproc: opt.Nproc = "auto",
    run_dir: opt.RunDir = None,
    dry_run: opt.DryRun = False,
    set_: opt.Set = None,
) -> int:
    """Train a small student on the logits of a finetuned run.

    The finetuned model (the teacher) computes logits once, for the training examples and for augmented copies
    of them. The training loop of `train` then trains the student on these logits.
    """
    from launcher.evaluate import distill as distilling
    from launcher.evaluate import finetune as finetuning
    from launcher.run import train as training
    from launcher.run.restarts import RunOptions

    settings = opt.settings_after_run(words, set_)
    source = finetuning.source_of(
        task,
        data or (),
        {"train": train, "dev": dev},
        {"text": text, "text-pair": text_pair, "label": label, "kind": kind},
    )
    prepared = distilling.load(
        teacher,
        source,
        settings,
        teacher_logits=teacher_logits,
        copies=copies,
        replace=replace,
        student=student,
        embeddings=embeddings,
        nproc=nproc,
        dry_run=dry_run,
    )
    options = RunOptions(nproc=nproc, run_dir=run_dir, dry_run=dry_run)
    return training.train(prepared, options, opt.console())


def configs(
    name: Annotated[str | None, Argument(help="Configuration to print, or slurm.sbatch.")] = None,
) -> int:
    """List the shipped configurations, or print one.

    The list shows the transformers class of each model. The last entry is the Slurm script, slurm.sbatch.
    """
    scripts = {path.name: path for path in shipped_configs().glob("*.sbatch")}
    if name is not None:
        typer.echo((scripts.get(name) or find_config(name)).read_text(), nl=False)
        return 0
    typer.echo(f"{'configuration':<18} {'transformers':<20} description")
    for path in sorted(shipped_configs().glob("*.yaml")):
        summary = path.read_text().partition("\n")[0].removeprefix("# ")
        config = load_config(path, ["data.path=shards", "run.init_from=null", "batch.micro_size=1"])
        name = "-" if native_issues(config, "mlm") else native_class(config.model)
        if config.has_examples or hf_directory(read_yaml(path).get("run", {}).get("init_from")):
            name = "same as source"  # that is, the class of the model that training starts from
        typer.echo(f"{path.stem:<18} {name:<20} {summary}")
    for name, path in scripts.items():
        typer.echo(f"{name:<18} {'-':<20} {path.read_text().splitlines()[1].removeprefix('# ')}")
    print_error(f"next: {runnable('bert-dp train quickstart --dry-run')}")
    return 0


def data_build(
    words: Annotated[list[str], Argument(metavar="SOURCE | SETTING=VALUE", help=opt.TEXTS)],
    out: Annotated[Path, Option(help="Output directory.")],
    vocab_size: Annotated[
        int | None, Option(help="Vocabulary size of the tokenizer to train; default: 32,768.")
    ] = None,
    sequence_length: Annotated[int, Option(help="Tokens per sequence.")] = 128,
    tokenizer: Annotated[str | None, Option(help="Existing tokenizer.json; default: train one.")] = None,
    format: opt.Format = "auto",
    text_key: opt.TextKey = "text",
    set_: opt.Set = None,
    processes: Annotated[
        int | None, Option(min=1, max=4096, help="Tokenizing processes; default: at most one per core.")
    ] = None,
    force: Annotated[bool, Option("--force", help="Replace the contents of OUT.")] = False,
) -> int:
    """Build token shards from text.

    Filters and deduplicates the text, trains a tokenizer, tokenizes the text and packs the tokens into
    shards. A manifest records the hash of each shard. The settings data.build.NAME adjust these steps.
    """
    from launcher import datasets

    # match the whole setting name, because a path may also contain =, as in data/lang=en/
    settings = [word for word in words if re.match(r"[a-z_]+\.[a-z_.]+=", word)]
    options = [f"data.build.source_format={format}", f"data.build.text_field={jsonlib.dumps(text_key)}"]
    return datasets.build(
        [word for word in words if word not in settings],
        out,
        vocab_size=vocab_size,
        sequence_length=sequence_length,
        tokenizer=tokenizer,
        overrides=[*options, *settings, *(set_ or [])],
        processes=processes,
        force=force,
        console=opt.console(),
    )


def data_inspect(
    directory: Annotated[Path, Argument(help="Directory written by `bert-dp data build`.")],
    json: opt.Json = False,
) -> int:
    """Verify the hashes of token shards. Show counts, entropies and sample texts."""
    from launcher import datasets

    return datasets.inspect(directory, as_json=json, console=opt.console())
