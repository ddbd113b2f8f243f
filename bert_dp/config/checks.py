"""Find settings that conflict, have no effect, or differ from those of a saved run. Also choose the precision
and the transformers class, read CPU features, and check the options for profiling."""

import contextlib
import dataclasses
import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from bert_dp.config import schema
from bert_dp.config.engines import ENGINES, OPTIMIZERS, engine_facts, optimizer_facts, sharded
from bert_dp.config.errors import ConfigError, Issue
from bert_dp.config.schema import Config, FinetuneConfig, ModelConfig, OnlyWith, divisors, nearest_divisors

Kind = Literal["mlm", "classifier", "encoder"]
"""Kind of exported model. mlm and classifier include their head; encoder has no head."""
BF16_UNITS = ("amx_bf16", "avx512_bf16")  # names of CPU flags in /proc/cpuinfo


def parallel_issues(config: Config, world_size: int) -> Iterator[Issue]:
    """Check that the engine can train the model with the optimizer on `world_size` ranks."""
    parallel, optim = config.parallel, config.optim.name
    engine, tensor = parallel.engine, parallel.tensor
    facts = engine_facts(engine)
    if facts.max_ranks is not None and world_size > facts.max_ranks:
        message = f"{engine} supports only one rank, got --nproc {world_size}"
        yield Issue("parallel.engine", "conflict", message, engine, "--nproc", "use ddp")
    if world_size < facts.min_ranks:
        message = f"{engine} needs at least {facts.min_ranks} ranks, got --nproc {world_size}"
        yield Issue("parallel.engine", "conflict", message, engine, "--nproc", "use single")
    if tensor > 1 and config.task is None:
        yield from _tensor_issues(config, world_size)
    dp, replicas = world_size // tensor, parallel.fsdp_replicas
    if "fsdp_replicas" in facts.settings and dp % replicas:
        message, hint = f"{replicas} does not divide dp = {dp}", f"use {nearest_divisors(dp, replicas)}"
        yield Issue("parallel.fsdp_replicas", "does_not_divide", message, replicas, "--nproc", hint)
    needs = optimizer_facts(optim).needs
    if needs == "replicas" and (tensor > 1 or engine not in ("auto", "single", "ddp")):
        message, hint = "a custom optimizer needs unsharded replicas", "use ddp without parallel.tensor"
        yield Issue("optim.name", "unsupported", message, optim, "parallel.engine", hint)
    if config.task is not None and tensor > 1:
        message = f"{tensor} works only with bert-dp's own models"
        yield Issue("parallel.tensor", "unsupported", message, tensor, "task", "use 1")
    if needs == "whole_tensors" and (tensor > 1 or not facts.whole_tensors):
        other, value, hint = "parallel.engine", str(engine), "use ddp or zero1"
        if tensor > 1:
            other, value, hint = "parallel.tensor", str(tensor), "use parallel.tensor: 1"
        message = f"{optim} multiplies whole matrices, but {other}: {value} shards them"
        yield Issue("optim.name", "conflict", message, optim, other, hint)
    if needs == "tensor_norms" and facts.flattens and sharded(engine, parallel.zero_stage):
        message = f"{optim} needs the norms of whole tensors, but DeepSpeed ZeRO flattens the tensors"
        hint = "use parallel.engine: zero1, or parallel.zero_stage: 0"
        yield Issue("optim.name", "conflict", message, optim, "parallel.engine", hint)
    if "reduce_dtype" in facts.settings and parallel.reduce_dtype == "fp16" and config.precision != "fp16":
        message = f"fp16 loses small gradients unless the loss is scaled, but precision is {config.precision}"
        hint = "use parallel.reduce_dtype: bf16, or precision: fp16"
        yield Issue("parallel.reduce_dtype", "conflict", message, "fp16", "precision", hint)
    if config.model.lstm_size:
        stage_3 = engine == "deepspeed" and parallel.zero_stage == 3
        for is_refused, setting, instead in (
            (tensor > 1, "parallel.tensor", "1"),
            (optim == "muon", "optim.name", "adamw"),
            (stage_3, "parallel.zero_stage", "1"),
        ):
            if is_refused:
                refused = value_at(config, setting)
                message, hint = f"{refused} is not supported for a BiLSTM", f"use {instead}"
                yield Issue(setting, "unsupported", message, refused, "model.lstm_size", hint)
    if config.precision in facts.refused_precisions:
        message = f"{config.precision} is not supported with parallel.engine: {engine}"
        hint = "use fp32 or bf16"
        yield Issue("precision", "unsupported", message, config.precision, "parallel.engine", hint)


def rank_sets(config: Config, world_size: int) -> dict[str, int]:
    """Return {setting: number of consecutive ranks that must share a node}. These ranks communicate in every
    layer, because each of them holds a part of the same weights."""
    parallel = config.parallel
    sets = {"parallel.tensor": parallel.tensor}
    if "fsdp_replicas" in engine_facts(parallel.engine).settings and parallel.fsdp_replicas > 1:
        sets["parallel.fsdp_replicas"] = world_size // parallel.fsdp_replicas
    return sets


def spread_issues(nodes: Sequence[str], sets: Mapping[str, int]) -> list[Issue]:
    """Check that each group of ranks that must share a node does so. `sets`: group sizes from rank_sets.
    `nodes`: each rank's node, as a name or as HOST/BOOT_ID; messages omit the boot ID."""
    issues = []
    for setting, size in sets.items():
        for first in range(0, len(nodes), size):
            over = dict.fromkeys(nodes[first : first + size])
            if len(over) > 1:
                ranks = ", ".join(map(str, range(first, first + size)))
                hosts = ", ".join(node.partition("/")[0] for node in over)
                message = f"each group of {size} ranks must share a node, but ranks {ranks} are on {hosts}"
                hint = f"on each node, start a multiple of {size} ranks with consecutive numbers"
                issues.append(Issue(setting, "conflict", message, size, hint=hint))
                break
    return issues


def residual_issues(config: Config, precision: str) -> list[Issue]:
    """Check that `precision` permits model.residual_dtype; auto does, because it is resolved later."""
    if config.model.residual_dtype == "full" or precision in ("auto", "bf16"):
        return []
    decided = " (auto)" if config.precision == "auto" else ""
    message = f"bf16 needs blocks that compute in bf16, but precision{decided} is {precision}"
    hint = "use model.residual_dtype: full, or precision: bf16"
    return [Issue("model.residual_dtype", "conflict", message, "bf16", "precision", hint)]


def _tensor_issues(config: Config, world_size: int) -> Iterator[Issue]:
    engine, tensor = config.parallel.engine, config.parallel.tensor
    if not engine_facts(engine).tensor:
        able = ", ".join(name for name, facts in ENGINES.items() if facts.tensor)
        message = f"{tensor} works only with {able}, not with {engine}"
        yield Issue("parallel.tensor", "unsupported", message, tensor, "parallel.engine")
    if world_size % tensor:
        message = f"{tensor} does not divide --nproc {world_size}"
        hint = f"use {nearest_divisors(world_size, tensor)}"
        yield Issue("parallel.tensor", "does_not_divide", message, tensor, "--nproc", hint)
    for name in ("num_heads", "intermediate_size", "vocab_size"):
        if (size := getattr(config.model, name)) % tensor:
            message = f"{size} is not a multiple of parallel.tensor {tensor}"
            hint = f"use parallel.tensor {nearest_divisors(size, tensor)}"
            yield Issue(f"model.{name}", "does_not_divide", message, size, "parallel.tensor", hint)


def finetune_issues(config: Config) -> Iterator[Issue]:
    """Find settings that conflict with training on labelled examples."""
    if not config.has_examples:
        return
    count, kind = len(config.finetune.labels), config.finetune.kind
    if kind != "regression" and count < 1 + (kind == "single_label"):
        hint = "list the labels, or use `bert-dp finetune`, which reads them from the data"
        yield Issue("finetune.labels", "missing", f"too few labels for {kind}: {count}", count, hint=hint)
    if config.distill.loss == "kl" and kind != "single_label":
        message, hint = f"kl needs a softmax over the classes, but the task is {kind}", "use mse"
        yield Issue("distill.loss", "conflict", message, "kl", "finetune.kind", hint)
    try:
        finetuned_head(config.model, config.finetune)
    except ConfigError as error:
        yield from error.issues
    for path, reason, hint in (
        ("batch.ramp_fraction", "with labelled examples, the global batch is constant", "use 0"),
        ("schedule.tokens", "labelled examples vary in length", "use schedule.epochs or schedule.steps"),
    ):
        if value := value_at(config, path):
            yield Issue(path, "conflict", f"{value}, but {reason}", value, "objective.name", hint)


def noise_issues(config: Config, dp: int) -> Iterator[Issue]:
    """Check that a run with log.noise_scale can measure the noise scale on `dp` replicas."""
    parallel, batch = config.parallel, config.batch
    if not config.log.noise_scale:
        return
    if parallel.tensor > 1 or not engine_facts(parallel.engine).noise_scale:
        name = "engine" if parallel.tensor == 1 else "tensor"
        under = f"parallel.{name}: {getattr(parallel, name)}"
        message = f"true, but {under} does not expose gradients at two batch sizes"
        hint = "use parallel.tensor: 1 with ddp, zero1 or single, or use log.noise_scale: false"
        yield Issue("log.noise_scale", "unsupported", message, True, f"parallel.{name}", hint)
    elif dp == 1 and batch.global_size <= batch.micro_size:
        fits = [n for n in divisors(batch.global_size) if n < batch.global_size]
        fix = f"batch.micro_size: {fits[-1]}, " if fits else ""
        message = "true, but one replica without gradient accumulation has gradients at only one batch size"
        hint = f"use {fix}more ranks, or log.noise_scale: false"
        yield Issue("log.noise_scale", "conflict", message, True, "batch.micro_size", hint)


def no_effect(config: Config, ranks: int | None = None) -> list[Issue]:
    """Find settings that were set explicitly but have no effect. `ranks`: number of ranks; None = unknown."""
    parallel, optim = config.parallel, config.optim
    engine = "single" if parallel.engine == "auto" and ranks == 1 else parallel.engine
    choices: dict[str, tuple[str, str, tuple[str, ...], Mapping[str, Any]]] = {
        "parallel": ("parallel.engine", engine, engine_facts(engine).settings, ENGINES),
        "optim": ("optim.name", optim.name, optimizer_facts(optim.name).settings, OPTIMIZERS),
    }
    issues: list[Issue] = []
    for path, field, marks in schema.all_settings():
        section, _, name = path.rpartition(".")
        given = (value_at(config, section) if section else config).model_fields_set
        if name not in given or value_at(config, path) == field.default:
            continue
        rules = [mark for mark in marks if isinstance(mark, OnlyWith)]
        idle = [(r.setting, value) for r in rules if not r.applies(value := value_at(config, r.setting))]
        if section in choices:
            chooser, choice, read, table = choices[section]
            if name not in read and any(name in row.settings for row in table.values()):
                idle.append((chooser, choice))
        if idle:
            other, value = idle[0]
            message = f"has no effect with {other}: {_yaml_word(value)}"
            issues.append(Issue(path, "no_effect", message, value_at(config, path), other))
    return issues


def value_at(config: Config, path: str) -> Any:
    """Return the value of a dotted setting."""
    return functools.reduce(getattr, path.split("."), config)


def _yaml_word(value: object) -> str:
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def changed_settings(old: dict[str, Any], new: Config) -> list[Issue]:
    """Find settings that differ from a saved configuration but must not change when the run resumes."""
    free = {path for path, _, marks in schema.all_settings() if schema.FREE_ON_RESUME in marks}
    return [
        Issue(key, "conflict", f"{after!r}, but the run has {before!r}", after)
        for key, before, after in differing_settings(old, new.model_dump(mode="json"))
        if key not in free and key.partition(".")[0] not in free
    ]


def differing_settings(old: dict[str, Any], new: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return (setting, old value, new value) for each difference between two saved configurations."""
    before, after = flat(old), flat(new)
    return [
        (key, before.get(key), after.get(key))
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    ]


def init_issues(source: str, old: dict[str, Any], new: Config) -> list[Issue]:
    """Find settings that must match `old`, the configuration of the run that trained the weights, but differ.
    Equal shapes do not suffice: if num_heads differs, the weights load but give wrong outputs."""
    before, after = flat(old), flat(new.model_dump(mode="json"))
    of_model = [(path, marks) for path, _, marks in schema.all_settings() if path.startswith("model.")]
    fixed = [path for path, marks in of_model if schema.FREE_FROM_WEIGHTS not in marks]
    if new.model.position == "learned" and new.model.max_positions is None:
        fixed.append("data.sequence_length")
    if new.run.init_keeps == "moments":
        fixed.append("optim.name")
    issues = []
    if (own := old.get("task")) != new.task:
        message = f"the weights were trained with task: {_yaml_word(own)}"
        issues.append(Issue("run.init_from", "conflict", message, source, "task", "choose another run"))
    for name in fixed:
        if (was := before.get(name)) != after[name]:
            message = f"{after[name]!r}, but run.init_from {source} was trained with {was!r}"
            hint = f"set {name}={was} or start from other weights"
            issues.append(Issue(name, "conflict", message, after[name], "run.init_from", hint))
    return issues


def flat(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Flatten nested mappings into one mapping with keys such as `a.b`."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{above}{key}"
        leaves |= flat(value, f"{path}.") if isinstance(value, Mapping) else {path: value}
    return leaves


# --- transformers classes

_CLASSES = {
    ("rope", "layernorm", "pre"): "ModernBERT",
    ("rope", "rmsnorm", "pre"): "EuroBERT",
    ("learned", "layernorm", "pre"): "RobertaPreLayerNorm",
    ("learned", "layernorm", "post"): "BERT",
}
# transformers class -> {`model` setting: the only value that the class supports}
_FIXED: dict[str, dict[str, Any]] = {
    "ModernBERT": {"mlp": "geglu", "first_attention_norm": False, "token_types": 0},
    "EuroBERT": {"mlp": "geglu", "first_attention_norm": True, "token_types": 0, "local_attention": 0},
}
_BERTS = ("BERT", "RoBERTa", "RobertaPreLayerNorm")
_FIXED |= {name: {"mlp": "gelu", "first_attention_norm": True, "local_attention": 0} for name in _BERTS}
_USE_ONNX = "use `bert-dp export onnx`, which supports any run"


def native_class(model: ModelConfig) -> str | None:
    """Return the transformers architecture that has the model's position and norm settings, or None."""
    name = _CLASSES.get((model.position, model.norm, model.norm_position))
    return "RoBERTa" if name == "BERT" and model.position_offset else name


def finetuned_head(model: ModelConfig, finetune: FinetuneConfig) -> str:
    """Return the kind of classification head: "recipe", or the transformers architecture that defines the
    head. Raises ConfigError for finetune.head: native if no transformers architecture matches the model."""
    name = native_class(model)
    if finetune.head == "native" and name is None:
        other = f"model.position: {model.position} with model.norm: {model.norm}"
        message, hint = f"native, but transformers has no class for {other}", "use finetune.head: recipe"
        raise ConfigError([Issue("finetune.head", "conflict", message, "native", "model.position", hint)])
    return "recipe" if finetune.head == "recipe" or name is None else name


def native_issues(config: Config, kind: Kind) -> list[Issue]:
    """Find settings that prevent an export to a transformers class."""
    model, finetune = config.model, config.finetune
    name = native_class(model)
    if model.lstm_size:
        message, hint = "transformers has no class for a BiLSTM", "use `bert-dp export onnx`"
        return [Issue("model.lstm_size", "unsupported", message, model.lstm_size, hint=hint)]
    if name is None:
        message = f"{model.position}, but no transformers class combines it with model.norm: {model.norm}"
        return [Issue("model.position", "unsupported", message, model.position, "model.norm", _USE_ONNX)]
    if kind == "classifier" and finetune.head == "recipe":
        message = "recipe, but no transformers class has this head"
        hint = f"finetune with finetune.head: native, or {_USE_ONNX}"
        return [Issue("finetune.head", "unsupported", message, finetune.head, hint=hint)]
    fixed = {f"model.{field}": only for field, only in _FIXED[name].items()}
    if kind == "mlm":
        fixed["model.head"] = "none" if name == "EuroBERT" else "dense"
        if name == "EuroBERT":
            fixed["model.decoder_bias"] = False
    if kind == "classifier" and name in _BERTS:
        fixed["finetune.pooling"] = "cls"
    issues = []
    for path, only in fixed.items():
        if (value := value_at(config, path)) != only:
            message = f"{_yaml_word(value)}, but {name} supports only {_yaml_word(only)}"
            without_head = ", or --encoder, which omits the head" if path == "model.head" else ""
            issues.append(Issue(path, "unsupported", message, value, hint=_USE_ONNX + without_head))
    return issues


def export_formats(config: Config) -> str:
    """List the export formats available for a run, and the settings that no transformers class supports."""
    if config.task is not None:
        return "none, because the model belongs to a custom task"
    if config.model.lstm_size:
        return "ONNX"
    name, graphs = native_class(config.model), "ONNX, AOTInductor"
    if not (issues := native_issues(config, "classifier" if config.has_examples else "mlm")):
        return f"transformers {name}, {graphs}"
    if not native_issues(config, "encoder"):
        graphs += f", transformers {name} without the head"
    return f"{graphs}; no transformers class supports {', '.join(issue.setting for issue in issues)}"


def decide_precision(
    setting: str, engines: Iterable[str], *, on_gpu: bool, has_bf16: bool, kept: str | None = None
) -> str:
    """Resolve the precision `setting`. auto becomes `kept`, the checkpoint's precision, if given; else bf16
    if the devices (`has_bf16`) and all `engines` support it; else fp16 on GPUs and fp32 on CPUs."""
    if setting != "auto":
        return setting
    if kept is not None:
        return kept
    if has_bf16 and not any("bf16" in engine_facts(engine).refused_precisions for engine in engines):
        return "bf16"
    return "fp16" if on_gpu else "fp32"


def cpu_field(name: str, root: Path = Path("/")) -> str:
    """Return a field of the first CPU in /proc/cpuinfo, such as "flags" or "model name"; "" if the field
    cannot be found. `root`: the directory that contains proc/."""
    text = ""
    with contextlib.suppress(OSError):
        text = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    field = re.search(rf"^{name}\s*:(.*)$", text, re.MULTILINE)
    return field[1].strip() if field else ""


def bf16_units(root: Path = Path("/")) -> tuple[str, ...]:
    """Return the BF16_UNITS that this machine's CPU has; () if /proc/cpuinfo is missing."""
    flags = cpu_field("flags", root).split()
    return tuple(unit for unit in BF16_UNITS if unit in flags)


# --- `train --profile 10:13 --profile-ranks 0,1`


@dataclasses.dataclass(frozen=True)
class ProfilePlan:
    """Ranks and steps to record with torch.profiler. `first`, `last`: step numbers as in metrics.jsonl."""

    first: int
    last: int
    ranks: tuple[int, ...]

    def options(self, world_size: int) -> list[str]:
        """Return the worker's profiling options for ranks below `world_size`; [] if no such rank exists."""
        ranks = ",".join(str(rank) for rank in self.ranks if rank < world_size)
        return ["--profile", f"{self.first}:{self.last + 1}", "--profile-ranks", ranks] if ranks else []


def parse_profile(steps: str, ranks: str) -> ProfilePlan:
    """Parse steps such as `10:13` (steps 10 to 12) and ranks such as `0,1`. Raises ConfigError."""
    span = re.fullmatch(r"(\d{1,12}):(\d{1,12})", steps.strip())
    first, end = (int(span[1]), int(span[2])) if span else (0, 0)
    if not 1 <= first < end:
        message, hint = f"{steps[:40]!a} is not FIRST:END with 1 <= FIRST < END", "10:13 means steps 10 to 12"
        raise ConfigError([Issue("--profile", "wrong_type", message, hint=hint)])
    if re.fullmatch(r"\d{1,12}(,\d{1,12})*", ranks.replace(" ", "")) is None:
        message = f"{ranks[:40]!a} is not a list of ranks such as 0,1"
        raise ConfigError([Issue("--profile-ranks", "wrong_type", message)])
    return ProfilePlan(first, end - 1, tuple(sorted(map(int, set(ranks.split(","))))))


def profile_issues(plan: ProfilePlan, world_size: int, *, steps: int | None, done: int = 0) -> list[Issue]:
    """Find steps in `plan` that the run does not execute, and ranks that it does not have. `steps`: last step
    of the run; None = unknown. `done`: step of the checkpoint from which the run resumes."""
    issues = []
    if steps is not None and plan.last > steps:
        message, hint = f"step {plan.last} is after the last step ({steps})", f"use END <= {steps + 1}"
        issues.append(Issue("--profile", "out_of_range", message, plan.last, hint=hint))
    if plan.first <= done:
        message, hint = f"step {plan.first} is already done", f"use FIRST >= {done + 1}"
        issues.append(Issue("--profile", "out_of_range", message, plan.first, hint=hint))
    if missing := [rank for rank in plan.ranks if rank >= world_size]:
        message = f"no rank {', '.join(map(str, missing))}; the ranks are 0 to {world_size - 1}"
        issues.append(Issue("--profile-ranks", "out_of_range", message, missing[0]))
    return issues
