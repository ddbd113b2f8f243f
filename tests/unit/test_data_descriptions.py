"""Test the description of data before a run: its size, the passes over it, and the length of the run."""

from pathlib import Path

from bert_dp.config import batch_layout, read_manifest, with_budget
from bert_dp.config.manifest import SourceFile
from launcher.machine import environment
from launcher.run.train import check_memory, data_warnings, describe, describe_data
from tests.helpers import make_config


def test_the_description_of_the_data_has_its_size_and_passes(shards: Path) -> None:
    for passes, settings in (
        ("20.0 passes", "schedule.steps=30 batch.global_size=64"),
        ("50.0 %", "schedule.tokens=768"),
        ("", "schedule.hours=1"),
        ("", "schedule.kwh=1"),
        ("", "schedule.steps=30 batch.ramp_fraction=0.5 batch.ramp_quantum=64"),
    ):
        config = make_config(*settings.split(), "data.sequence_length=16")
        size, _, run = describe_data(config, read_manifest(shards)).partition("; ")
        assert size == "96 sequences of 16 tokens"
        assert passes in run
        assert bool(passes) == bool(run)


def test_many_passes_over_the_data_cause_a_warning(shards: Path) -> None:
    predicted = "schedule.hours=1 prediction.tokens.value=15360 prediction.tokens.origin=fitted"
    manifest = read_manifest(shards)
    for settings, source, part in (
        ("schedule.steps=30", "a.txt", "20.0 passes over its 1,536 training tokens"),
        ("schedule.epochs=3000", "a.txt", "3,000 passes"),
        (predicted, "a.txt", "10.0 passes"),
        ("schedule.steps=30", "builtin:cpython-3.11.2", None),
        ("schedule.hours=1", "a.txt", None),
        ("schedule.steps=6", "a.txt", None),
    ):
        sizes = ("data.sequence_length=16", "batch.global_size=64", "model.vocab_size=64")
        config = with_budget(make_config(*settings.split(), *sizes), manifest.num_samples)
        read = SourceFile.model_construct(name=source)
        lines = data_warnings(config, manifest.model_copy(update={"sources": [read]}))
        assert [part in line for line in lines if part] == [True] * len(lines) == [True] * (part is not None)
        assert "e+" not in describe_data(config, manifest)


def test_the_length_of_a_run_includes_the_tokens_if_their_number_is_known() -> None:
    sizes = ("data.sequence_length=16", "batch.global_size=16", "batch.micro_size=4")
    for length, settings in (
        ("30 steps = 7,680 tokens", "schedule.steps=30"),
        ("30 steps;", "schedule.steps=30 batch.ramp_fraction=0.5 batch.ramp_quantum=8"),
        ("31 steps = 7,681 tokens", "schedule.tokens=7681 batch.ramp_fraction=0"),
        ("$5 at $2 per device hour;", "schedule.dollars=5 run.price_per_device_hour=2"),
        ("5 kWh;", "schedule.kwh=5"),
        ("30 steps;", "objective.name=finetune data.path=/x finetune.labels=[a,b] schedule.steps=30"),
    ):
        config = make_config(*settings.split(), *sizes)
        memory = check_memory(config, 2, environment.probe(), on_gpu=False)
        assert length in describe(config, batch_layout(config, 2), None, memory)[4]


def test_valid_but_implausible_sizes_cause_a_warning(shards: Path) -> None:
    for vocabulary, batch, *settings in (
        (64, 96),
        (128, 8),  # the vocabulary is padded
        (512, 8, "model.vocab_size"),
        (64, 480, "batch.global_size"),
    ):
        sizes = (f"model.vocab_size={vocabulary}", f"batch.global_size={batch}", "data.sequence_length=16")
        warnings = read_manifest(shards).warnings(make_config(*sizes))
        assert [warning.partition(":")[0] for warning in warnings] == settings
