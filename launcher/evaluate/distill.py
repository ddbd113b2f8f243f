"""`bert-dp distill`: prepare the transfer set, the teacher's logits and the student's configuration."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bert_dp import files
from bert_dp.config import Config, ConfigError, Issue
from bert_dp.config.errors import sha256
from bert_dp.config.load import absolute, find_config, parse_overrides, read_yaml, resolve, shipped_configs
from bert_dp.config.manifest import TRAIN, ExamplesManifest, hash_json, read_examples
from bert_dp.cost import flops_per_token, num_parameters
from launcher import children, job
from launcher.evaluate import finetune
from launcher.evaluate.finetune import ExamplesSource, Pretrained
from launcher.log import print_error
from launcher.machine import environment
from launcher.report.formats import format_count

RECIPE = "distill.yaml"
LSTM_SIZES = {"QQP": 300}  # hidden units by task in Tang et al. 2019; 150 for other tasks
EMBEDDING_SIZE = 300  # size of the word2vec vectors in Tang et al. 2019
DERIVED = ("distill.logits", "distill.embeddings")
COPIES = {False: 20, True: 10}  # augmented copies per example; the key is True if examples are text pairs


def load(
    run: Path,
    source: ExamplesSource,
    overrides: Sequence[str],
    *,
    teacher_logits: str | None,
    copies: int | None,
    replace: str,
    student: str,
    embeddings: str,
    nproc: str,
    dry_run: bool,
) -> job.Job:
    """Prepare the transfer set, label it with the teacher, and return the job that trains the student.
    `dry_run` skips labelling. Raise ConfigError if the input is unusable."""
    if issues := finetune.setting_issues(overrides, DERIVED):
        raise ConfigError(issues)
    teacher, is_file = finetune.find_pretrained(run, "TEACHER"), teacher_logits is not None
    if not is_file and not teacher.config.has_examples:
        message, hint = f"{run} was pretrained but not finetuned", "run `bert-dp finetune` on it first"
        raise ConfigError([Issue("TEACHER", "wrong_type", message, str(run), hint=hint)])
    levels = student_levels(student, embeddings, teacher, source.name)
    machine = environment.probe(Path())
    name = f"{teacher.run.name}-{Path(student).stem}-{source.name}"
    checked = resolve([*levels, finetune.task_level(None, None), parse_overrides(overrides)])
    ranks = job.Job(name, checked, machine).choose_ranks(nproc)
    made = transfer_options(teacher_logits, copies, replace, teacher, checked.run.seed)
    transfer = source._replace(options=[*source.options, *made])
    path = finetune.prepare(teacher, transfer, checked.data.sequence_length)
    manifest = read_examples(path)
    if not is_file and (issues := list(label_issues(teacher.config, manifest))):
        raise ConfigError(issues)
    facts = {"weights": files.weights_hash(teacher.checkpoint), "examples": manifest.hash}
    logits = path if is_file else files.cache_root() / f"logits-{hash_json(facts)[:20]}"
    derived = {**finetune.task_level(path, manifest), "distill": {"logits": str(logits)}}
    config = resolve([*levels, derived, parse_overrides(overrides)])
    on_gpu = job.Job(name, config, machine).gpus > 0
    describe_transfer_set(None if is_file else teacher.config, config, manifest)
    if not is_file and not dry_run:
        command = [str(teacher.checkpoint), str(path), str(logits), "cuda" if on_gpu else "cpu"]
        shares = [[*command, str(rank), str(ranks)] for rank in range(ranks)]
        children.ask_modules("bert_dp.evaluation.teacher", shares, "computing the teacher's logits")
    sized = finetune.sized_micro_batches(config, ranks, overrides, on_gpu=on_gpu)
    return job.Job(name, absolute(sized), machine)


def student_levels(student: str, embeddings: str, teacher: Pretrained, task: str) -> list[dict[str, Any]]:
    """Return those levels of the student's configuration that do not depend on the examples. `student`:
    `bilstm`, a pretrained run (source of the model and weights), or a configuration (source of the model;
    the weights are random). Raise ConfigError if `student` or `embeddings` is unusable."""
    rows, length = teacher.config.model.vocab_size, teacher.config.data.sequence_length
    recipe, data = read_yaml(shipped_configs() / RECIPE), {"sequence_length": length}
    if student == "bilstm":
        model = {"hidden_size": EMBEDDING_SIZE, "lstm_size": LSTM_SIZES.get(task, 150)}
        model |= {"vocab_size": rows, "num_layers": 1, "num_heads": 1}
        if embeddings == "random":
            return [{"model": model, "data": data}, recipe]
        path = Path(embeddings)
        if embeddings == "teacher":
            path, model["hidden_size"] = teacher.checkpoint, teacher.config.model.hidden_size
        elif not path.is_file():
            raise ConfigError([Issue("--embeddings", "not_found", f"{path} is not a file", embeddings)])
        return [{"model": model, "data": data, "distill": {"embeddings": str(path.resolve())}}, recipe]
    if embeddings != "random":
        raise ConfigError([Issue("--embeddings", "no_effect", "requires a BiLSTM", embeddings, "--student")])
    if files.newest_checkpoint_facts(Path(student)) is None:
        model = {**read_yaml(find_config(student)).get("model", {}), "vocab_size": rows}
        return [{"model": model, "data": data}, recipe]
    start = finetune.find_pretrained(Path(student))
    if sha256(start.tokenizer) != sha256(teacher.tokenizer):
        message = f"{student} and the teacher have different tokenizers"
        raise ConfigError([Issue("--student", "conflict", message, student, "TEACHER")])
    data = {"sequence_length": min(length, start.config.data.sequence_length)}
    model = start.config.model.model_dump(mode="json")
    return [{"model": model, "data": data, "run": {"init_from": str(start.run)}}, recipe]


def transfer_options(
    logits: str | None, copies: int | None, replace: str, teacher: Pretrained, seed: int
) -> list[str]:
    """Return the options with which bert_dp.examples.prepare makes the transfer set. Raise ConfigError if
    options conflict or the model that replaces words is missing."""
    if logits is not None:
        if copies is not None:
            message = "the transfer set is exactly the texts of --teacher-logits"
            raise ConfigError([Issue("--copies", "conflict", message, copies, "--teacher-logits")])
        return ["--teacher-logits", logits]
    count = COPIES[teacher.config.finetune.pair] if copies is None else copies
    options = ["--copies", str(count), "--seed", str(seed), "--replace", replace]
    if replace != "mlm" or not count:
        return options
    start = teacher.config.run.init_from
    if (found := files.newest_checkpoint_facts(Path(start)) if start else None) is None:
        message = f"the run from which the teacher was finetuned ({start}) has no checkpoint"
        raise ConfigError([Issue("--replace", "not_found", message, "mlm", hint="use pos or none")])
    return [*options, "--replacing-model", str(found[0].resolve())]


def label_issues(teacher: Config, manifest: ExamplesManifest) -> Iterator[Issue]:
    """Yield an issue for each difference between the teacher's task and the examples' task."""
    for name in finetune.TASK:
        expected, found = getattr(teacher.finetune, name), getattr(manifest, name)
        if (expected := list(expected) if name == "labels" else expected) != found:
            message = f"the teacher has {name} {expected}, but the examples have {found}"
            hint = "pass data for the teacher's task"
            yield Issue("TEACHER", "conflict", message, expected, f"finetune.{name}", hint)


def describe_transfer_set(teacher: Config | None, config: Config, manifest: ExamplesManifest) -> None:
    """Print the size of the transfer set and the cost of labelling it; warn if the student is larger than the
    teacher. If the logits are given, `teacher` is None and only the size is printed."""
    train, length = manifest.splits[TRAIN], config.data.sequence_length
    counts = f"{format_count(train.examples)} texts, {format_count(train.copies)} of them augmented copies"
    line = f"transfer set: {counts}, {format_count(train.tokens)} tokens"
    if teacher is None:
        print_error(line)
        return
    flop = train.tokens * flops_per_token(teacher.model, length, 0.0) / 3  # forward pass: a third of a step
    print_error(f"{line}; the teacher's forward passes take {flop / 1e12:.3g} TFLOP")
    student_size, teacher_size = (num_parameters(each.model, length) for each in (config, teacher))
    print_error(f"parameters: teacher {format_count(teacher_size)}, student {format_count(student_size)}")
    if student_size > teacher_size:
        print_error("warning: the student is larger than the teacher")
