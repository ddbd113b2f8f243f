"""Checks before anything starts: settings that do not fit together, have no effect or have changed."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from bert_dp.config.engines import OPTIMIZERS, EngineFacts, engine_facts, engines_with, sharded
from bert_dp.config.error import ConfigError, Issue
from bert_dp.config.native import native_head
from bert_dp.config.schema import (
    BUDGETS,
    MAX_VOCAB_SIZE,
    BuildConfig,
    Config,
    FinetuneConfig,
    ModelConfig,
    Section,
    divisors,
    nearest_divisors,
)

FREE_ON_RESUME = (
    *(f"schedule.{name}" for name in BUDGETS),
    "batch.micro_size",
    "parallel",
    "log",
    "checkpoint",
    "eval",
    "compile",
    "run.device",
    "run.deterministic",
    "run.init_from",
    "run.init_keeps",
    "run.max_skipped_in_a_row",
    "run.hang_after_s",
    "run.end_hung_after_s",
    "data.workers",
    "data.path",
    "data.sources",
)

FREE_FROM_WEIGHTS = (
    "model.dropout",
    "model.attention_dropout",
    "model.norm_eps",
    "model.rope_theta",
    "model.residual_dtype",
)


def parallel_issues(config: Config, world_size: int) -> list[Issue]:
    """Check that this engine can train this model with this optimizer on `world_size` ranks."""
    parallel, optim = config.parallel, config.optim.name
    engine, tensor = parallel.engine, parallel.tensor
    facts = engine_facts(engine)
    issues = []
    if facts.max_ranks is not None and world_size > facts.max_ranks:
        message = f"{engine} runs one rank, got --nproc {world_size}"
        issues.append(Issue("parallel.engine", "conflict", message, engine, "--nproc", "use ddp"))
    if world_size < facts.min_ranks:
        message = f"{engine} needs at least {facts.min_ranks} ranks, got --nproc {world_size}"
        issues.append(Issue("parallel.engine", "conflict", message, engine, "--nproc", "use single"))
    if tensor > 1:
        issues += _tensor_issues(config, facts, world_size)
    if parallel.fsdp_replicas > 1:
        issues += _replica_issues(config, facts, world_size)
    needs = OPTIMIZERS[optim].needs
    if needs == "whole_tensors" and (tensor > 1 or not facts.whole_tensors):
        other, hint = (
            (f"parallel.tensor: {tensor}", "use parallel.tensor: 1")
            if tensor > 1
            else (f"parallel.engine: {engine}", "use ddp or zero1")
        )
        message = f"{optim} multiplies whole matrices and {other} divides them"
        issues.append(Issue("optim.name", "conflict", message, optim, other.partition(":")[0], hint))
    if needs == "tensor_norms" and facts.flattens and sharded(engine, parallel.zero_stage):
        message = f"{optim} needs the norms of whole tensors and DeepSpeed ZeRO flattens them"
        hint = "use parallel.engine: zero1, or parallel.zero_stage: 0"
        issues.append(Issue("optim.name", "conflict", message, optim, "parallel.engine", hint))
    if "reduce_dtype" in facts.settings and parallel.reduce_dtype == "fp16" and config.precision != "fp16":
        message = f"fp16 loses small gradients without a loss scale, and precision is {config.precision}"
        hint = "use parallel.reduce_dtype: bf16, or precision: fp16"
        issues.append(Issue("parallel.reduce_dtype", "conflict", message, "fp16", "precision", hint))
    if config.precision in facts.refused_precisions:
        message = f"{config.precision} is not supported with parallel.engine: {engine}"
        hint = "use fp32 or bf16"
        issues.append(Issue("precision", "unsupported", message, config.precision, "parallel.engine", hint))
    return issues


def residual_issues(config: Config, precision: str) -> list[Issue]:
    """Check that the residual stream can be in bf16 under `precision` (auto: not decided yet)."""
    if config.model.residual_dtype == "full" or precision in ("auto", "bf16"):
        return []
    decided = " (auto)" if config.precision == "auto" else ""
    message = f"bf16 needs blocks that compute in bf16, and precision{decided} is {precision}"
    hint = "use model.residual_dtype: full, or precision: bf16"
    return [Issue("model.residual_dtype", "conflict", message, "bf16", "precision", hint)]


def _replica_issues(config: Config, facts: EngineFacts, world_size: int) -> list[Issue]:
    name, replicas = "parallel.fsdp_replicas", config.parallel.fsdp_replicas
    if "fsdp_replicas" not in facts.settings:
        message = f"{replicas} needs parallel.engine: fsdp"
        return [Issue(name, "conflict", message, replicas, "parallel.engine")]
    dp = world_size // config.parallel.tensor
    if dp % replicas:
        message, hint = f"{replicas} does not divide {dp} replicas", f"use {nearest_divisors(dp, replicas)}"
        return [Issue(name, "does_not_divide", message, replicas, "--nproc", hint)]
    return []


def _tensor_issues(config: Config, facts: EngineFacts, world_size: int) -> list[Issue]:
    engine, tensor = config.parallel.engine, config.parallel.tensor
    issues = []
    if not facts.tensor:
        message = f"{tensor} works with {engines_with(tensor=True)}, not with {engine}"
        issues.append(Issue("parallel.tensor", "unsupported", message, tensor, "parallel.engine"))
    if world_size % tensor:
        message, hint = (
            f"{tensor} does not divide --nproc {world_size}",
            f"use {nearest_divisors(world_size, tensor)}",
        )
        issues.append(Issue("parallel.tensor", "does_not_divide", message, tensor, "--nproc", hint))
    for name in ("num_heads", "intermediate_size", "vocab_size"):
        if (size := getattr(config.model, name)) % tensor:
            message = f"{size} is not a multiple of parallel.tensor {tensor}"
            hint = f"nearest that are: {_near_multiples(config.model, name, tensor)}"
            issues.append(Issue(f"model.{name}", "does_not_divide", message, size, "parallel.tensor", hint))
    return issues


def _near_multiples(model: ModelConfig, name: str, tensor: int) -> str:
    """Sizes near model.`name` that `tensor` divides; a number of heads divides the hidden size too."""
    size = getattr(model, name)
    multiples = [size // tensor * tensor, -(-size // tensor) * tensor]
    most = MAX_VOCAB_SIZE if name == "vocab_size" else size + tensor
    condition = ""
    if name == "num_heads":
        most = model.hidden_size
        if heads := [n for n in divisors(model.hidden_size) if n % tensor == 0]:
            multiples = [*[n for n in heads if n < size][-1:], *[n for n in heads if n > size][:1]]
        else:
            condition = f", with a model.hidden_size that is a multiple, not {model.hidden_size}"
    return ", ".join(str(n) for n in multiples if 0 < n <= most) + condition


def finetune_issues(config: Config) -> list[Issue]:
    """Check the settings that do not go with objective.name: finetune."""
    if config.objective.name != "finetune":
        return []
    issues = []
    labels, kind = config.finetune.labels, config.finetune.kind
    if kind != "regression" and len(labels) < 1 + (kind == "single_label"):
        hint = "name them, or use `bert-dp finetune`, which takes them from the data"
        issues.append(
            Issue("finetune.labels", "missing", f"{len(labels)} of a {kind} task", len(labels), hint=hint)
        )
    if config.finetune.head == "native":
        try:
            native_head(config.model)
        except ConfigError as error:
            issues += error.issues
    if config.batch.ramp_fraction:
        message = (
            f"{config.batch.ramp_fraction}, but batches of finetuning are sorted by length inside one global "
            "batch, whose size must not change"
        )
        issues.append(
            Issue(
                "batch.ramp_fraction",
                "conflict",
                message,
                config.batch.ramp_fraction,
                "objective.name",
                "use 0",
            )
        )
    if config.schedule.tokens is not None:
        hint = "use schedule.epochs or schedule.steps"
        issues.append(
            Issue(
                "schedule.tokens",
                "unsupported",
                "examples differ in length",
                config.schedule.tokens,
                "objective.name",
                hint,
            )
        )
    return issues


def noise_issues(config: Config, dp: int) -> list[Issue]:
    """Check that log.noise_scale can be measured on `dp` replicas."""
    parallel, batch = config.parallel, config.batch
    if not config.log.noise_scale:
        return []
    facts = engine_facts(parallel.engine)
    if parallel.tensor > 1 or not facts.noise_scale:
        name = "engine" if parallel.tensor == 1 else "tensor"
        message = (
            f"true, but gradients at two batch sizes are not visible under parallel.{name}: "
            f"{getattr(parallel, name)}"
        )
        hint = "use ddp, zero1 or single with parallel.tensor: 1, or log.noise_scale: false"
        return [Issue("log.noise_scale", "unsupported", message, True, f"parallel.{name}", hint)]
    if dp == 1 and batch.global_size <= batch.micro_size:
        fits = [n for n in divisors(batch.global_size) if n < batch.global_size]
        fix = f"batch.micro_size: {fits[-1]}, " if fits else ""
        message = "true, but one replica with accumulation 1 has one batch and two are compared"
        hint = f"use {fix}more ranks, or log.noise_scale: false"
        return [Issue("log.noise_scale", "conflict", message, True, "batch.micro_size", hint)]
    return []


def no_effect(config: Config, ranks: int | None = None) -> list[str]:
    """One line for each setting that was given explicitly and changes nothing in this run. `ranks`: where
    their number is known."""
    data, build, name, engine = config.data, config.data.build, config.schedule.name, config.parallel.engine
    if engine == "auto" and ranks == 1:
        engine = "single"
    finetunes = config.objective.name == "finetune"
    built, from_path = data.sources is not None, data.path is not None
    own_tokenizer = built and data.tokenizer is not None
    with_engine, with_optimizer = f"with parallel.engine: {engine}", f"with optim.name: {config.optim.name}"
    facts = engine_facts(engine)
    # setting, whether it is idle here, and why
    rules: tuple[tuple[str, bool, str], ...] = (
        ("run.init_keeps", config.run.init_from is None, "without run.init_from"),
        ("batch.ramp_quantum", config.batch.ramp_fraction == 0, ": batch.ramp_fraction is 0"),
        (
            "schedule.warmup_fraction",
            name in ("budget_triangle", "constant", "exponential"),
            f"with schedule.name: {name}",
        ),
        ("schedule.decay_fraction", name != "wsd", f"with schedule.name: {name}"),
        (
            "model.rope_theta",
            config.model.position != "rope",
            f"with model.position: {config.model.position}",
        ),
        ("model.norm_bias", config.model.norm == "rmsnorm", "with model.norm: rmsnorm"),
        *(
            (f"checkpoint.{field}", config.checkpoint.keep == 0, ": checkpoint.keep is 0, nothing is saved")
            for field in ("every_steps", "on_error")
        ),
        *(
            (f"finetune.{field}", not finetunes, f"with objective.name: {config.objective.name}")
            for field in FinetuneConfig.model_fields
        ),
        *(
            (setting, finetunes, "with objective.name: finetune")
            for setting in ("objective.mask_rate", "data.shuffle", "eval.max_sequences")
        ),
        ("finetune.head_size", config.finetune.head == "native", "with finetune.head: native"),
        *((f"data.{field}", data.synthetic, "with data.synthetic: true") for field in ("shuffle", "workers")),
        ("data.tokenizer", from_path, "with data.path: the shards carry their tokenizer"),
        *((f"data.build.{field}", from_path, "with data.path") for field in BuildConfig.model_fields),
        ("data.build.tokenizer_model", own_tokenizer, ": data.tokenizer is given"),
        ("data.build.normalize", own_tokenizer, ": data.tokenizer is given"),
        (
            "data.build.near_threshold",
            built and build.dedup != "near",
            f"with data.build.dedup: {build.dedup}",
        ),
        *(
            (f"parallel.{field}", field not in facts.settings, with_engine)
            for field in ("bucket_mib", "reduce_dtype", "static_graph", "zero_stage")
        ),
        *(
            (f"optim.{field}", field not in OPTIMIZERS[config.optim.name].settings, with_optimizer)
            for row in OPTIMIZERS.values()
            for field in row.settings
        ),
        ("optim.lr_batch", config.optim.lr_scaling == "none", "with optim.lr_scaling: none"),
    )
    return [
        f"{setting} has no effect{'' if why.startswith(':') else ' '}{why}"
        for setting, is_idle, why in rules
        if is_idle and _is_given(config, setting.partition(":")[0])
    ]


def _is_given(config: Config, setting: str) -> bool:
    """Whether a setting was given explicitly, and not its default."""
    *sections, name = setting.split(".")
    section: Section = functools.reduce(getattr, sections, config)
    default = type(section).model_fields[name].default
    return name in section.model_fields_set and getattr(section, name) != default


def changed_settings(old: dict[str, Any], new: Config) -> list[str]:
    """Settings that differ and may not on resume: all but budget, N, micro batch, engine, logging and the
    place of the data."""
    free = tuple(f"{name}." for name in FREE_ON_RESUME)
    return [
        f"{key}: the run has {before!r}, now {after!r}"
        for key, before, after in differing_settings(old, new.model_dump(mode="json"))
        if not f"{key}.".startswith(free)
    ]


def differing_settings(old: dict[str, Any], new: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """(setting, its old value, its new value) of two saved configurations."""
    before, after = flat(_complete(old)), flat(new)
    return [
        (key, before.get(key), after.get(key))
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    ]


def init_issues(source: str, old: dict[str, Any], new: Config) -> list[str]:
    """Why weights trained under the configuration `old` are not this model's; one line each.

    Shapes alone do not tell: another number of heads, or another norm, loads and means nothing.
    """
    before, after = flat(_complete(old)), flat(new.model_dump(mode="json"))
    fixed = [name for name in after if name.startswith("model.") and name not in FREE_FROM_WEIGHTS]
    if new.model.position == "learned":
        fixed.append("data.sequence_length")
    if new.run.init_keeps == "moments":
        fixed.append("optim.name")
    return [
        f"{name}: {after[name]!r}, but run.init_from {source} was trained with {before.get(name)!r}; set "
        f"{name}={before.get(name)} or start from other weights"
        for name in fixed
        if before.get(name) != after[name]
    ]


def _complete(old: dict[str, Any]) -> dict[str, Any]:
    """A saved configuration; a setting that this version added had its default then."""
    with contextlib.suppress(ValidationError):
        return Config.model_validate_json(json.dumps(old)).model_dump(mode="json")
    return old


def flat(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """The values of nested mappings by `key.key`."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{above}{key}"
        leaves |= flat(value, f"{path}.") if isinstance(value, Mapping) else {path: value}
    return leaves
