"""Checks before anything starts: settings that do not fit together, have no effect or have changed."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from bert_dp.config.error import ConfigError
from bert_dp.config.native import native_head
from bert_dp.config.precision import REFUSED
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

OWN_WORK = ("single", "ddp", "zero1", "accelerate", "independent")  # whose ranks do not meet in the forward
FREE_FROM_WEIGHTS = (
    "model.dropout",
    "model.attention_dropout",
    "model.norm_eps",
    "model.rope_theta",
    "model.residual_dtype",
)


def has_own_work(engine: str, tensor: int) -> bool:
    """Whether the time of a rank's own work, before any reduction, tells a slow rank. Under fsdp, DeepSpeed
    and tensor parallelism the others wait for it within that time."""
    return engine in OWN_WORK and tensor == 1


def parallel_issues(config: Config, world_size: int) -> list[str]:
    """Why this engine cannot train this model with this optimizer on `world_size` ranks; one line each."""
    parallel, optim = config.parallel, config.optim.name
    engine, tensor = parallel.engine, parallel.tensor
    issues = []
    if engine == "single" and world_size > 1:
        issues.append(f"parallel.engine: single runs one rank, got --nproc {world_size}; use ddp")
    if engine == "independent" and world_size == 1:
        issues.append("parallel.engine: independent is for two ranks and more; use single")
    if tensor > 1:
        issues += _tensor_issues(config, world_size)
    if parallel.fsdp_replicas > 1:
        if engine != "fsdp":
            issues.append(f"parallel.fsdp_replicas: {parallel.fsdp_replicas} needs parallel.engine: fsdp")
        elif world_size // tensor % parallel.fsdp_replicas:
            dp = world_size // tensor
            issues.append(
                f"parallel.fsdp_replicas: {parallel.fsdp_replicas} does not divide {dp} replicas; "
                f"use {nearest_divisors(dp, parallel.fsdp_replicas)}"
            )
    if optim == "muon" and (engine in ("fsdp", "deepspeed") or tensor > 1):
        what, fix = (
            (f"parallel.engine: {engine}", "ddp or zero1")
            if tensor == 1
            else (f"parallel.tensor: {tensor}", "parallel.tensor: 1")
        )
        issues.append(f"optim.name: muon multiplies whole matrices and {what} divides them; use {fix}")
    if optim == "lamb" and engine == "deepspeed" and parallel.zero_stage > 0:
        issues.append(
            "optim.name: lamb needs norms of whole tensors and DeepSpeed ZeRO flattens them; use "
            "parallel.engine: zero1, or parallel.zero_stage: 0"
        )
    if engine in ("auto", "ddp") and parallel.reduce_dtype == "fp16" and config.precision != "fp16":
        issues.append(
            f"parallel.reduce_dtype: fp16 loses small gradients without a loss scale, which precision: "
            f"{config.precision} does not have; use parallel.reduce_dtype: bf16, or precision: fp16"
        )
    if config.precision in REFUSED.get(engine, ()):
        issues.append(
            f"precision: {config.precision} is not supported with parallel.engine: {engine}; use fp32 or bf16"
        )
    return issues


def residual_issues(config: Config, precision: str) -> list[str]:
    """Why the residual stream cannot be in bf16 under `precision` (auto: not known yet); at most one line."""
    if config.model.residual_dtype == "full" or precision in ("auto", "bf16"):
        return []
    decided = " (auto)" if config.precision == "auto" else ""
    return [
        f"model.residual_dtype: bf16 needs blocks that compute in bf16, and precision{decided} is "
        f"{precision}; use model.residual_dtype: full, or precision: bf16"
    ]


def _tensor_issues(config: Config, world_size: int) -> list[str]:
    engine, tensor = config.parallel.engine, config.parallel.tensor
    issues = []
    if engine not in ("auto", "ddp", "zero1", "fsdp"):
        issues.append(f"parallel.tensor: {tensor} works with ddp, zero1 and fsdp, not with {engine}")
    if world_size % tensor:
        near = nearest_divisors(world_size, tensor)
        issues.append(f"parallel.tensor: {tensor} does not divide --nproc {world_size}; use {near}")
    for name in ("num_heads", "intermediate_size", "vocab_size"):
        if (size := getattr(config.model, name)) % tensor:
            issues.append(
                f"model.{name}: {size} is not a multiple of parallel.tensor {tensor}; nearest that are: "
                f"{_near_multiples(config.model, name, tensor)}"
            )
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


def finetune_issues(config: Config) -> list[str]:
    """Settings that do not go with objective.name: finetune; one line each."""
    if config.objective.name != "finetune":
        return []
    issues = []
    if config.finetune.kind != "regression" and len(config.finetune.labels) < 1 + (
        config.finetune.kind == "single_label"
    ):
        issues.append(
            f"finetune.labels: {len(config.finetune.labels)} of a {config.finetune.kind} task; name them, "
            "or use `bert-dp finetune`, which takes them from the data"
        )
    if config.finetune.head == "native":
        try:
            native_head(config.model)
        except ConfigError as error:
            issues += error.issues
    if config.batch.ramp_fraction:
        issues.append(
            f"batch.ramp_fraction: {config.batch.ramp_fraction}, but batches of finetuning are sorted by "
            "length inside one global batch, whose size must not change; use 0"
        )
    if config.schedule.tokens is not None:
        issues.append("schedule.tokens: examples differ in length; use schedule.epochs or schedule.steps")
    return issues


def noise_issues(config: Config, dp: int) -> list[str]:
    """Why log.noise_scale cannot be measured on `dp` replicas; at most one line."""
    parallel, batch = config.parallel, config.batch
    if not config.log.noise_scale:
        return []
    if parallel.tensor > 1 or parallel.engine not in ("auto", "single", "ddp", "zero1"):
        what = (
            f"parallel.engine: {parallel.engine}"
            if parallel.tensor == 1
            else (f"parallel.tensor: {parallel.tensor}")
        )
        return [
            f"log.noise_scale: true, gradients at two batches are not seen under {what}; use ddp, zero1 "
            "or single with parallel.tensor: 1, or log.noise_scale: false"
        ]
    if dp == 1 and batch.global_size <= batch.micro_size:
        fits = [n for n in divisors(batch.global_size) if n < batch.global_size]
        fix = f"batch.micro_size: {fits[-1]}, " if fits else ""
        return [
            f"log.noise_scale: true, one replica with accumulation 1 has one batch and two are compared; "
            f"use {fix}more ranks, or log.noise_scale: false"
        ]
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
    with_engine = f"with parallel.engine: {engine}"
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
        (f"data.build.order: {build.order}", built and data.shuffle, "while data.shuffle is true"),
        (
            "data.build.near_threshold",
            built and build.dedup != "near",
            f"with data.build.dedup: {build.dedup}",
        ),
        ("parallel.bucket_mib", engine not in ("auto", "ddp", "zero1", "accelerate"), with_engine),
        ("parallel.reduce_dtype", engine not in ("auto", "ddp"), with_engine),
        ("parallel.static_graph", engine not in ("auto", "ddp"), with_engine),
        ("parallel.zero_stage", engine != "deepspeed", with_engine),
        ("optim.momentum", config.optim.name != "muon", f"with optim.name: {config.optim.name}"),
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
