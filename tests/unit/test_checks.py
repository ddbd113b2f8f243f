"""What is said before anything starts, word for word."""

from pathlib import Path
from typing import Any

import pytest

from bert_dp.config import (
    BatchConfig,
    Config,
    ConfigError,
    batch_at,
    batch_layout,
    changed_settings,
    data_issues,
    init_issues,
    no_effect,
    progress_at,
    read_manifest,
    resolve,
)
from bert_dp.config.checks import parallel_issues
from tests.shards import write_shards

SOURCES = {"data": {"sources": ["builtin"]}}
SHARDS = {"data": {"path": "/x"}}


def config(*sections: dict[str, Any], base: dict[str, Any] = SOURCES) -> Config:
    return resolve([base, {"schedule": {"steps": 8}}, *sections])


def batch(global_size: int, micro: int, **more: Any) -> dict[str, Any]:
    return {"batch": {"global_size": global_size, "micro_size": micro, **more}}


def refused(made: Config, ranks: int) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        batch_layout(made, ranks)
    assert str(caught.value) == "\n".join(caught.value.issues)
    return caught.value.issues


# --- the batch


@pytest.mark.parametrize(("size", "near"), [(7, "6, 12"), (5, "6"), (13, "12, 18")])
def test_a_batch_that_does_not_divide(size: int, near: str) -> None:
    assert refused(config(batch(size, 3)), 2) == (
        f"batch.global_size: {size} is not a multiple of batch.micro_size 3 x 2 replicas = 6; nearest that "
        f"are: {near} (or change batch.micro_size or --nproc)",
    )


def test_a_ramp_that_does_not_divide() -> None:
    ramp = {"ramp_fraction": 0.5, "ramp_quantum": 16}
    assert refused(config(batch(144, 3, **ramp)), 2) == (
        "batch.ramp_quantum: 16 is not a multiple of batch.micro_size 3 x 2 replicas = 6; nearest that are: "
        "18, 12",
    )
    assert batch_layout(config(batch(72, 3, ramp_quantum=9)), 2).grad_accum_steps == 12  # no ramp
    assert batch_layout(config(batch(72, 3, ramp_fraction=0.5, ramp_quantum=12)), 2).grad_accum_steps == 12


def test_the_plan_counts_replicas() -> None:
    plan = batch_layout(config(batch(24, 3), {"parallel": {"tensor": 2}}), 4)
    assert plan.model_dump() == {
        "world_size": 4,
        "tensor": 2,
        "dp": 2,
        "micro_size": 3,
        "grad_accum_steps": 4,
        "global_size": 24,
    }
    assert str(plan) == "global batch 24 = micro 3 x accumulation 4 x dp 2"


@pytest.mark.parametrize(
    ("f", "size"), [(0.0, 4), (0.12, 4), (0.13, 8), (0.37, 12), (0.375, 16), (0.5, 16), (1.0, 16)]
)
def test_the_ramp_grows_by_whole_quanta(f: float, size: int) -> None:
    ramp = BatchConfig(global_size=16, micro_size=1, ramp_fraction=0.5, ramp_quantum=4)
    assert batch_at(ramp, f) == size
    assert batch_at(BatchConfig(global_size=16, micro_size=1, ramp_quantum=4), f) == 16
    whole = BatchConfig(global_size=16, micro_size=1, ramp_fraction=1.0, ramp_quantum=4)
    assert [batch_at(whole, x) for x in (0.0, 0.26, 0.51, 0.8)] == [4, 8, 12, 16]


@pytest.mark.parametrize(
    ("budget", "progress"),
    [({"steps": 8}, 0.25), ({"tokens": 4096}, 0.3125), ({"hours": 0.5}, 0.2), ({"steps": 1}, 1.0)],
)
def test_progress_is_consumed_over_declared(budget: dict[str, Any], progress: float) -> None:
    made = resolve([SOURCES, {"schedule": budget}])
    assert progress_at(made, step=2, samples=10, elapsed_s=360.0) == pytest.approx(progress)
    assert progress_at(made, step=99, samples=10**6, elapsed_s=1e6) == 1.0


# --- engines and the noise scale


def test_engines_that_do_not_fit_the_number_of_ranks() -> None:
    single, independent = ({"parallel": {"engine": name}} for name in ("single", "independent"))
    assert parallel_issues(config(single), 2) == [
        "parallel.engine: single runs one rank, got --nproc 2; use ddp"
    ]
    assert parallel_issues(config(independent), 1) == [
        "parallel.engine: independent is for two ranks and more; use single"
    ]
    assert parallel_issues(config(single), 1) == parallel_issues(config(independent), 2) == []


@pytest.mark.parametrize(
    ("engine", "tensor", "what"),
    [
        ("fsdp", 1, "parallel.engine: fsdp"),
        ("ddp", 2, "parallel.tensor: 2"),
        ("fsdp", 2, "parallel.tensor: 2"),
    ],
)
def test_an_engine_that_hides_its_gradients_has_no_noise_scale(engine: str, tensor: int, what: str) -> None:
    made = config(
        batch(8, 2), {"parallel": {"engine": engine, "tensor": tensor}, "log": {"noise_scale": True}}
    )
    assert refused(made, 2) == (
        f"log.noise_scale: true, gradients at two batches are not seen under {what}; use ddp, zero1 or "
        "single with parallel.tensor: 1, or log.noise_scale: false",
    )


@pytest.mark.parametrize(("size", "fix"), [(8, "batch.micro_size: 4, "), (1, "")])
def test_one_batch_a_step_has_no_noise_scale(size: int, fix: str) -> None:
    made = config(batch(size, size), {"log": {"noise_scale": True}})
    assert refused(made, 1) == (
        "log.noise_scale: true, one replica with accumulation 1 has one batch and two are compared; use "
        f"{fix}more ranks, or log.noise_scale: false",
    )


@pytest.mark.parametrize(
    ("engine", "ranks", "micro"),
    [("auto", 1, 4), ("single", 1, 4), ("ddp", 1, 4), ("ddp", 2, 4), ("zero1", 2, 4), ("auto", 2, 4)],
)
def test_where_the_noise_scale_can_be_measured(engine: str, ranks: int, micro: int) -> None:
    made = config(batch(8, micro), {"parallel": {"engine": engine}, "log": {"noise_scale": True}})
    assert batch_layout(made, ranks).grad_accum_steps == 8 // micro // ranks


# --- the data


def test_shards_that_do_not_fit(tmp_path: Path) -> None:
    shards = write_shards(tmp_path, length=32, vocab_size=101, train=4, held_out=1)
    fitting = {"data": {"path": "/x", "sequence_length": 32}, "model": {"vocab_size": 101}}
    assert data_issues(config(base=fitting), read_manifest(shards)) == []
    other = {"data": {"path": "/x", "sequence_length": 64}, "model": {"vocab_size": 100}}
    assert data_issues(config(base=other), read_manifest(shards)) == [
        "data.sequence_length: 64, but /x holds sequences of 32; set data.sequence_length=32 or build again",
        "model.vocab_size: 100 is below the tokenizer's 101 in /x; set model.vocab_size=101 or more",
    ]
    built = config({"data": {"sequence_length": 64}})
    assert "the built shards holds sequences of 32" in data_issues(built, read_manifest(shards))[0]


# --- what has no effect

TOKENIZER = {"data": {"tokenizer": "/t"}}


@pytest.mark.parametrize(
    ("section", "base", "lines"),
    [
        (
            {"batch": {"ramp_quantum": 512}},
            SOURCES,
            ["batch.ramp_quantum has no effect: batch.ramp_fraction is 0"],
        ),
        (
            {"schedule": {"name": "constant", "warmup_fraction": 0.1, "decay_fraction": 0.1}},
            SOURCES,
            [
                "schedule.warmup_fraction has no effect with schedule.name: constant",
                "schedule.decay_fraction has no effect with schedule.name: constant",
            ],
        ),
        (
            {"schedule": {"name": "exponential", "warmup_fraction": 0.1}},
            SOURCES,
            ["schedule.warmup_fraction has no effect with schedule.name: exponential"],
        ),
        (
            {"schedule": {"warmup_fraction": 0.1}},
            SOURCES,
            ["schedule.warmup_fraction has no effect with schedule.name: budget_triangle"],
        ),
        ({"schedule": {"name": "linear", "warmup_fraction": 0.1}}, SOURCES, []),
        (
            {"model": {"rope_theta": 1e4, "position": "learned"}},
            SOURCES,
            ["model.rope_theta has no effect with model.position: learned"],
        ),
        (
            {"model": {"norm": "rmsnorm", "norm_bias": False}},
            SOURCES,
            ["model.norm_bias has no effect with model.norm: rmsnorm"],
        ),
        ({"model": {"norm": "rmsnorm", "norm_bias": True}}, SOURCES, []),
        (
            {"checkpoint": {"keep": 0, "every_steps": 5}},
            SOURCES,
            ["checkpoint.every_steps has no effect: checkpoint.keep is 0, nothing is saved"],
        ),
        ({"checkpoint": {"keep": 1, "every_steps": 5}}, SOURCES, []),
        (
            {"data": {"tokenizer": "/t", "build": {"normalize": False, "order": "unigram"}}},
            SHARDS,
            [
                "data.tokenizer has no effect with data.path: the shards carry their tokenizer",
                "data.build.normalize has no effect with data.path",
                "data.build.order has no effect with data.path",
            ],
        ),
        (
            {
                "model": {"rope_theta": 1e4},
                "data": {"tokenizer": "/t", "build": {"normalize": False, "tokenizer_model": "bpe"}},
            },
            SOURCES,
            [
                "model.rope_theta has no effect with model.position: scaled_sinusoidal",
                "data.build.tokenizer_model has no effect: data.tokenizer is given",
                "data.build.normalize has no effect: data.tokenizer is given",
            ],
        ),
        (TOKENIZER, SOURCES, []),
        (
            {"data": {"build": {"order": "unigram", "near_threshold": 0.5}}},
            SOURCES,
            [
                "data.build.order: unigram has no effect while data.shuffle is true",
                "data.build.near_threshold has no effect with data.build.dedup: exact",
            ],
        ),
        ({"data": {"build": {"order": "unigram"}, "shuffle": False}}, SOURCES, []),
        (
            {"parallel": {"engine": "fsdp", "bucket_mib": 3.0, "reduce_dtype": "bf16", "static_graph": True}},
            SOURCES,
            [
                "parallel.bucket_mib has no effect with parallel.engine: fsdp",
                "parallel.reduce_dtype has no effect with parallel.engine: fsdp",
                "parallel.static_graph has no effect with parallel.engine: fsdp",
            ],
        ),
        (
            {"parallel": {"zero_stage": 2}},
            SOURCES,
            ["parallel.zero_stage has no effect with parallel.engine: auto"],
        ),
        ({"parallel": {"engine": "deepspeed", "zero_stage": 2}}, SOURCES, []),
        (
            {"optim": {"momentum": 0.9, "lr_batch": 8}},
            SOURCES,
            [
                "optim.momentum has no effect with optim.name: adamw",
                "optim.lr_batch has no effect with optim.lr_scaling: none",
            ],
        ),
        ({"optim": {"name": "muon", "momentum": 0.9}}, SOURCES, []),
    ],
)
def test_what_was_given_and_changes_nothing(
    section: dict[str, Any], base: dict[str, Any], lines: list[str]
) -> None:
    assert no_effect(config(section, base=base)) == lines


@pytest.mark.parametrize("engine", ["auto", "ddp", "zero1", "accelerate", "deepspeed", "independent"])
def test_which_engine_reads_what(engine: str) -> None:
    given = {"bucket_mib": 3.0, "reduce_dtype": "bf16", "static_graph": True}
    idle = [
        line.split()[0].removeprefix("parallel.")
        for line in no_effect(config({"parallel": {"engine": engine, **given}}))
    ]
    assert set(given) - set(idle) == {
        "auto": set(given),
        "ddp": set(given),
        "zero1": {"bucket_mib"},
        "accelerate": {"bucket_mib"},
    }.get(engine, set())


# --- going on, and starting from weights


def test_what_may_not_change_on_resume_is_named_with_both_values() -> None:
    old = config().model_dump(mode="json")
    free = {
        "schedule": {"steps": 99},
        "parallel": {"engine": "ddp"},
        "log": {"every_steps": 3},
        "checkpoint": {"keep": 5},
        "eval": {"every_steps": 3},
        "compile": "on",
        "run": {"device": "cpu", "init_from": "/w", "hang_after_s": 5.0},
        "data": {"workers": 2},
    }
    assert changed_settings(old, config(free)) == []
    changed = config(
        {"optim": {"clip": 1.0, "beta1": 0.5}, "data": {"sequence_length": 64}, "precision": "fp32"}
    )
    assert changed_settings(old, changed) == [
        "data.sequence_length: the run has 128, now 64",
        "optim.beta1: the run has 0.9, now 0.5",
        "optim.clip: the run has 0.5, now 1.0",
        "precision: the run has 'auto', now 'fp32'",
    ]
    del old["model"]["dropout"]  # an older version's
    assert changed_settings(old, config()) == []
    old["model"]["gone"] = 1  # a newer version's: taken as it stands
    assert changed_settings(old, config()) == [
        "model.dropout: the run has None, now 0.0",
        "model.gone: the run has 1, now None",
    ]


def test_weights_of_another_model_are_refused() -> None:
    old = config().model_dump(mode="json")
    same = config(
        {"model": {"dropout": 0.1, "norm_eps": 1e-5, "rope_theta": 1e4}, "data": {"sequence_length": 64}}
    )
    assert init_issues("/w", old, same) == []
    heads = config({"model": {"num_heads": 6, "norm": "rmsnorm"}})
    assert init_issues("/w", old, heads) == [
        "model.num_heads: 6, but run.init_from /w was trained with 12; set model.num_heads=12 or start from "
        "other weights",
        "model.norm: 'rmsnorm', but run.init_from /w was trained with 'layernorm'; set model.norm=layernorm "
        "or start from other weights",
    ]
    learned = {"model": {"position": "learned"}}
    shorter = config(learned, {"data": {"sequence_length": 64}})
    assert init_issues("/w", config(learned).model_dump(mode="json"), shorter) == [
        "data.sequence_length: 64, but run.init_from /w was trained with 128; set data.sequence_length=128 "
        "or start from other weights"
    ]
