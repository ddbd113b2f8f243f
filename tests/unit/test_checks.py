"""Test the checks before a run: batch sizes, engines, data, settings without effect, and resuming."""

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert_dp.config import ENGINES, BatchConfig, Config, ConfigError, Issue, no_effect, read_manifest
from bert_dp.config.batch import batch_at, batch_layout, progress_at, with_budget
from bert_dp.config.checks import changed_settings, init_issues, residual_issues
from bert_dp.config.schema import OnlyWith, all_settings
from tests.helpers import issues_of, make_config, raised_issues
from tests.shards import write_shards


def named_in(line: str, before: str) -> list[int]:
    """Return the numbers that a line proposes after the words `before`."""
    numbers = re.findall(r"\d+", line.partition(before)[2].partition("(")[0])
    assert numbers
    return [int(number) for number in numbers]


# --- the batch


@given(global_size=st.integers(1, 4096), micro=st.integers(1, 64), ranks=st.integers(1, 16))
def test_batch_layout_is_exact_or_proposes_exact_batches(global_size: int, micro: int, ranks: int) -> None:
    config = make_config(batch={"global_size": global_size, "micro_size": micro})
    per_pass = micro * ranks
    if global_size % per_pass == 0:
        layout = batch_layout(config, ranks)
        assert layout.micro_size * layout.grad_accum_steps * layout.dp == layout.global_size == global_size
        assert layout.dp == layout.world_size == ranks
        return
    (issue,) = raised_issues(batch_layout, config, ranks)
    assert (issue.setting, issue.kind, issue.value) == ("batch.global_size", "does_not_divide", global_size)
    low = global_size // per_pass * per_pass
    named = named_in(str(issue), "nearest multiples: ")
    assert named == [n for n in (low, low + per_pass) if n]
    for near in named:
        batch_layout(make_config(batch={"global_size": near, "micro_size": micro}), ranks)


@given(
    accumulation=st.integers(1, 48),
    micro=st.integers(1, 8),
    ranks=st.integers(1, 6),
    quantum=st.integers(1, 400),
)
def test_ramp_quantum_must_be_a_whole_number_of_micro_batches(
    accumulation: int, micro: int, ranks: int, quantum: int
) -> None:
    global_size = accumulation * micro * ranks
    batch = {"global_size": global_size, "micro_size": micro, "ramp_fraction": 0.5, "ramp_quantum": quantum}
    if global_size % quantum:
        line = issues_of(make_config, batch=batch)[0]
        assert all(global_size % n == 0 for n in named_in(line, "; use "))
    elif quantum % (micro * ranks):
        (line,) = issues_of(batch_layout, make_config(batch=batch), ranks)
        assert line.startswith("batch.ramp_quantum: ")
        for near in named_in(line, "nearest multiples: "):
            batch_layout(make_config(batch={**batch, "ramp_quantum": near}), ranks)
    else:
        assert batch_layout(make_config(batch=batch), ranks).grad_accum_steps == accumulation


@pytest.mark.parametrize(("tensor", "dp", "accumulation"), [(1, 4, 16), (2, 2, 32), (4, 1, 64)])
def test_the_batch_counts_replicas_not_ranks(tensor: int, dp: int, accumulation: int) -> None:
    layout = batch_layout(make_config(f"parallel.tensor={tensor}"), 4)
    assert (layout.tensor, layout.dp, layout.grad_accum_steps) == (tensor, dp, accumulation)
    assert str(layout) == f"global batch 8192 = micro 128 x accumulation {accumulation} x dp {dp}"


def ramp(quantum: int | None, fraction: float = 0.6, size: int = 8192) -> BatchConfig:
    return BatchConfig(global_size=size, micro_size=1, ramp_fraction=fraction, ramp_quantum=quantum)


@pytest.mark.parametrize(
    ("batch", "sizes"),
    [  # sequences by progress; the first case is the recipe's
        (ramp(512), {0.0: 512, 0.1: 1536, 0.3: 4608, 0.5624: 7680, 0.5626: 8192, 0.57: 8192, 1.0: 8192}),
        (ramp(None, 0.0), {0.0: 8192, 0.5: 8192, 1.0: 8192}),
        (ramp(4, 0.0, 16), {0.0: 16, 1.0: 16}),
        (ramp(4, 0.5, 16), {0.0: 4, 0.12: 4, 0.13: 8, 0.37: 12, 0.375: 16, 0.5: 16, 1.0: 16}),
    ],
)
def test_the_ramp_grows_by_whole_quanta(batch: BatchConfig, sizes: dict[float, int]) -> None:
    assert {f: batch_at(batch, f) for f in sizes} == sizes


@pytest.mark.parametrize(
    ("budget", "progress"), [("steps=8", 0.25), ("tokens=4096", 0.3125), ("hours=0.5", 0.2), ("steps=1", 1.0)]
)
def test_progress_is_the_consumed_share_of_the_budget(budget: str, progress: float) -> None:
    config = make_config(f"schedule.{budget}")
    assert progress_at(config, step=2, samples=10, spent=360.0) == pytest.approx(progress)
    assert progress_at(config, step=99, samples=10**6, spent=1e6) == 1.0


# --- unsupported combinations


# Two lines per case: ranks and settings; then setting, kind and `other` of the issue, and alternative fixes.
REFUSED = """
4: parallel.engine=single
    parallel.engine conflict --nproc; fix: parallel.engine=ddp
1: parallel.engine=independent
    parallel.engine conflict --nproc; fix: parallel.engine=single
2: parallel.engine=accelerate parallel.tensor=2
    parallel.tensor unsupported parallel.engine; fix: parallel.engine=ddp parallel.engine=fsdp
4: parallel.engine=ddp parallel.tensor=3 model.vocab_size=32760
    parallel.tensor does_not_divide --nproc; fix: parallel.tensor=2 parallel.tensor=4
1: parallel.engine=ddp parallel.tensor=2
    parallel.tensor does_not_divide --nproc; fix: parallel.tensor=1
8: parallel.tensor=8 model.num_heads=12
    model.num_heads does_not_divide parallel.tensor; fix: model.num_heads=8 model.num_heads=16
3: parallel.tensor=3 model.hidden_size=36 model.num_heads=4 model.intermediate_size=48 model.vocab_size=96
    model.num_heads does_not_divide parallel.tensor; fix: model.num_heads=3 model.num_heads=6
3: parallel.tensor=3 model.hidden_size=32 model.num_heads=2 model.intermediate_size=48 model.vocab_size=96
    model.num_heads does_not_divide parallel.tensor; fix:
2: parallel.engine=ddp parallel.tensor=2 model.intermediate_size=1535
    model.intermediate_size does_not_divide parallel.tensor; fix: model.intermediate_size=1536
8: parallel.engine=fsdp parallel.tensor=4 model.vocab_size=30522
    model.vocab_size does_not_divide parallel.tensor; fix: model.vocab_size=30520 model.vocab_size=30524
4: parallel.engine=fsdp parallel.fsdp_replicas=3
    parallel.fsdp_replicas does_not_divide --nproc; fix: parallel.fsdp_replicas=2 parallel.fsdp_replicas=4
4: parallel.engine=fsdp parallel.tensor=2 parallel.fsdp_replicas=4
    parallel.fsdp_replicas does_not_divide --nproc; fix: parallel.fsdp_replicas=1 parallel.fsdp_replicas=2
2: optim.name=muon parallel.engine=fsdp
    optim.name conflict parallel.engine; fix: parallel.engine=ddp parallel.engine=zero1
2: optim.name=muon parallel.engine=ddp parallel.tensor=2
    optim.name conflict parallel.tensor; fix: parallel.tensor=1
2: optim.name=lamb parallel.engine=deepspeed
    optim.name conflict parallel.engine; fix: parallel.engine=zero1 parallel.zero_stage=0
2: parallel.reduce_dtype=fp16
    parallel.reduce_dtype conflict precision; fix: parallel.reduce_dtype=bf16 precision=fp16
2: parallel.engine=deepspeed precision=fp64
    precision unsupported parallel.engine; fix: precision=fp32 precision=bf16
1: precision=fp32 model.residual_dtype=bf16
    model.residual_dtype conflict precision; fix: precision=auto precision=bf16 model.residual_dtype=full
1: precision=fp16 model.residual_dtype=bf16
    model.residual_dtype conflict precision; fix: precision=bf16
1: precision=fp64 model.residual_dtype=bf16
    model.residual_dtype conflict precision; fix: precision=bf16
2: log.noise_scale=true parallel.engine=fsdp
    log.noise_scale unsupported parallel.engine; fix: parallel.engine=ddp parallel.engine=zero1
2: log.noise_scale=true parallel.engine=ddp parallel.tensor=2
    log.noise_scale unsupported parallel.tensor; fix: parallel.tensor=1
1: log.noise_scale=true batch.micro_size=8 batch.global_size=8
    log.noise_scale conflict batch.micro_size; fix: batch.micro_size=4 batch.global_size=16
1: log.noise_scale=true batch.micro_size=1 batch.global_size=1
    log.noise_scale conflict batch.micro_size; fix: log.noise_scale=false
1: objective.name=finetune data.path=/x finetune.labels=[a]
    finetune.labels missing None; fix: finetune.labels=[a,b] finetune.kind=multi_label
1: objective.name=finetune data.path=/x finetune.kind=multi_label
    finetune.labels missing None; fix: finetune.labels=[a] finetune.kind=regression
"""


def layout_issues(config: Config, ranks: int) -> list[Issue]:
    """Return the issues of `batch_layout`, except for a global batch that the ranks do not divide."""
    try:
        batch_layout(config, ranks)
    except ConfigError as error:
        return [issue for issue in error.issues if issue.setting != "batch.global_size"]
    return []


@pytest.mark.parametrize("row", re.findall(r"(\d+): (.+)\n +(.+); fix:(.*)\n", REFUSED))
def test_unsupported_combinations_are_refused_with_a_fix(row: tuple[str, ...]) -> None:
    ranks, settings, facts, fixes = int(row[0]), row[1].split(), row[2].split(), row[3].split()
    (issue,) = layout_issues(make_config(*settings), ranks)
    assert [issue.setting, issue.kind, str(issue.other)] == facts
    for fix in fixes:
        assert layout_issues(make_config(*settings, fix), ranks) == [], fix


def test_all_unsupported_combinations_are_reported_at_once() -> None:
    settings = (
        "parallel.engine=deepspeed parallel.tensor=4 model.num_heads=6 model.intermediate_size=10 "
        "model.vocab_size=30 optim.name=muon precision=fp64 batch.global_size=9 batch.micro_size=2"
    )
    named = (
        "batch.global_size parallel.tensor parallel.tensor model.num_heads model.intermediate_size "
        "model.vocab_size optim.name precision"
    )
    issues = raised_issues(batch_layout, make_config(*settings.split()), 2)
    assert [issue.setting for issue in issues] == named.split()


@pytest.mark.parametrize(
    ("settings", "ranks"),
    [
        ("", 3),
        ("parallel.engine=single precision=fp64 optim.name=muon", 1),
        ("parallel.engine=independent", 2),
        ("optim.name=muon parallel.engine=zero1", 4),
        ("optim.name=lamb parallel.engine=ddp parallel.tensor=2", 4),
        ("optim.name=lamb parallel.engine=fsdp parallel.tensor=4 parallel.fsdp_replicas=2", 8),
        ("optim.name=lamb parallel.engine=deepspeed parallel.zero_stage=0 precision=bf16", 2),
        ("parallel.engine=deepspeed parallel.zero_stage=3 precision=fp32", 2),
        ("log.noise_scale=true parallel.engine=single", 1),
        ("log.noise_scale=true batch.micro_size=4 batch.global_size=8", 2),
    ],
)
def test_supported_combinations_are_accepted(settings: str, ranks: int) -> None:
    assert layout_issues(make_config(*settings.split()), ranks) == []


# --- the data


def test_shards_that_do_not_match_the_configuration_are_refused(tmp_path: Path) -> None:
    manifest = read_manifest(write_shards(tmp_path, length=32, vocab_size=101, train=4, held_out=1))
    for vocab_size in (101, 102):
        fits = make_config("data.path=/x", "data.sequence_length=32", f"model.vocab_size={vocab_size}")
        assert manifest.issues(fits) == []
    other = make_config("data.path=/x", "data.sequence_length=64", "model.vocab_size=100")
    assert [(i.setting, i.kind, i.value, i.other) for i in manifest.issues(other)] == [
        ("data.sequence_length", "conflict", 64, "data.path"),
        ("model.vocab_size", "conflict", 100, "data.path"),
    ]


# --- settings without effect


IDLE = {
    # settings: pairs of a setting without effect and the setting that disables it
    "batch.ramp_quantum=512": "batch.ramp_quantum batch.ramp_fraction",
    "run.init_keeps=moments": "run.init_keeps run.init_from",
    "run.init_keeps=moments run.init_from=/w": "",
    "schedule.name=constant schedule.warmup_fraction=0.1 schedule.decay_fraction=0.1": (
        "schedule.warmup_fraction schedule.name schedule.decay_fraction schedule.name"
    ),
    "schedule.name=cosine schedule.decay_fraction=0.1": "schedule.decay_fraction schedule.name",
    "schedule.name=wsd schedule.warmup_fraction=0.5 schedule.decay_fraction=0.5": "",
    "model.rope_theta=1e4 model.position=learned": "model.rope_theta model.position",
    "model.norm=rmsnorm model.norm_bias=false": "model.norm_bias model.norm",
    "model.norm=rmsnorm model.norm_bias=true": "",
    "checkpoint.keep=0 checkpoint.every_steps=5": "checkpoint.every_steps checkpoint.keep",
    "data.path=/x data.tokenizer=/t data.build.normalize=false data.build.dedup=near": (
        "data.tokenizer data.sources data.build.normalize data.tokenizer"
    ),
    "data.tokenizer=/t data.build.normalize=false data.build.tokenizer_model=byte_bpe": (
        "data.build.normalize data.tokenizer data.build.tokenizer_model data.tokenizer"
    ),
    "data.tokenizer=/t": "",
    "data.build.near_threshold=0.5": "data.build.near_threshold data.build.dedup",
    "data.synthetic=true data.workers=2": "data.workers data.synthetic",
    "finetune.head_size=8": "finetune.head_size objective.name",
    "parallel.zero_stage=2": "parallel.zero_stage parallel.engine",
    "parallel.engine=deepspeed parallel.zero_stage=2": "",
    "optim.momentum=0.9 optim.lr_batch=8": ("optim.lr_batch optim.lr_scaling optim.momentum optim.name"),
    "optim.name=muon optim.momentum=0.9": "",
    "": "",
}


@pytest.mark.parametrize("settings", IDLE)
def test_settings_without_effect_are_named(settings: str) -> None:
    issues = no_effect(make_config(*settings.split()))
    words = IDLE[settings].split()
    assert sorted((i.setting, i.other) for i in issues) == sorted(zip(words[::2], words[1::2], strict=True))
    assert {issue.kind for issue in issues} <= {"no_effect"}


def test_only_with_marks_name_existing_settings() -> None:
    named = {m.setting for _, _, marks in all_settings() for m in marks if isinstance(m, OnlyWith)}
    assert named <= {path for path, _, _ in all_settings()}


def test_settings_that_an_engine_ignores_have_no_effect() -> None:
    given = {"bucket_mib": 3.0, "reduce_dtype": "bf16", "static_graph": True}
    reads = {"auto": {*given}, "ddp": {*given}, "zero1": {"bucket_mib"}, "accelerate": {"bucket_mib"}}
    for engine in (*ENGINES, "auto"):
        idle = {f"parallel.{name}" for name in given if name not in reads.get(engine, ())}
        config = make_config(parallel={"engine": engine, **given})
        assert {issue.setting for issue in no_effect(config)} == idle, engine


# --- resuming, and starting from weights


@pytest.mark.parametrize(
    "settings",
    [
        "schedule.steps=99",
        "schedule.hours=1",
        "schedule.dollars=1 run.price_per_device_hour=2 run.watts_per_device=9 run.pue=2",
        "data.path=/x data.workers=3",
        "parallel.engine=ddp batch.micro_size=32 compile='off'",
        "log.every_steps=1 checkpoint.keep=9 eval.every_steps=5",
        "run.device=cpu run.init_from=/w run.hang_after_s=5 run.end_hung_after_s=0",
        "run.deterministic=true run.max_skipped_in_a_row=7 run.init_keeps=moments data.sources=[x]",
    ],
)
def test_budget_ranks_and_logging_may_change_on_resume(settings: str) -> None:
    assert changed_settings(make_config().model_dump(mode="json"), make_config(*settings.split())) == []


def test_settings_that_may_not_change_on_resume_are_named_with_both_values() -> None:
    old = make_config().model_dump(mode="json")
    changes = {
        "batch.global_size": (8192, 4096),
        "data.build.dedup": ("exact", "none"),
        "data.sequence_length": (128, 64),
        "data.shuffle": (True, False),
        "data.tokenizer": (None, "t.json"),
        "model.num_layers": (16, 2),
        "optim.beta1": (0.9, 0.5),
        "optim.clip": (0.5, 1.0),
        "precision": ("fp32", "bf16"),
        "run.seed": (0, 1),
        "schedule.name": ("budget_triangle", "linear"),
    }
    changed = make_config(*(f"{key}={after}" for key, (_, after) in changes.items()))
    issues = changed_settings(old, changed)
    assert {issue.setting: issue.value for issue in issues} == {k: after for k, (_, after) in changes.items()}
    assert all(repr(before) in i.message for i, (before, _) in zip(issues, changes.values(), strict=True))


def test_a_bf16_residual_stream_needs_bf16_blocks_even_if_auto_is_resolved_later() -> None:
    assert residual_issues(make_config("precision=auto"), "fp32") == []
    assert len(residual_issues(make_config("model.residual_dtype=bf16", "precision=auto"), "fp32")) == 1


def test_weights_of_another_model_are_refused() -> None:
    def unfit(old: dict[str, Any], *settings: str) -> list[str]:
        return [issue.setting for issue in init_issues("/w", old, make_config(*settings))]

    old = make_config().model_dump(mode="json")
    free = "model.dropout=0.1 model.norm_eps=1e-5 model.rope_theta=1e4 data.sequence_length=64".split()
    free += ["model.attention_dropout=0.1", "model.residual_dtype=bf16", "precision=bf16"]
    assert unfit(old, *free) == []
    assert unfit(old, "model.num_heads=6", "model.norm=rmsnorm") == ["model.num_heads", "model.norm"]
    learned = make_config("model.position=learned").model_dump(mode="json")
    assert unfit(learned, "model.position=learned", "data.sequence_length=64") == ["data.sequence_length"]
    other = ["optim.name=lamb", "run.init_from=/w"]
    assert unfit(old, *other) == []
    assert unfit(old, *other, "run.init_keeps=moments") == ["optim.name"]


def test_a_budget_in_epochs_becomes_whole_sequences_or_whole_finetuning_steps() -> None:
    """Finetuning drops the last incomplete batch of the budget but takes at least one step."""
    for epochs, samples, tokens in ((2.5, 101, 252 * 128), (3.0, 7, 21 * 128), (1e-6, 10, 128)):
        budget = with_budget(make_config(f"schedule.epochs={epochs}"), samples).schedule
        assert (budget.tokens, budget.epochs, budget.steps) == (tokens, None, None)
    in_steps = make_config("schedule.steps=7")
    assert with_budget(in_steps, 10) is in_steps
    settings = "objective.name=finetune data.path=/x batch.global_size=16 batch.micro_size=4".split()
    for samples, steps in ((31, 3), (32, 4), (3, 1)):
        budget = with_budget(make_config(*settings, "schedule.epochs=2"), samples).schedule
        assert (budget.steps, budget.epochs) == (steps, None)
