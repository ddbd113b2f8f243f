"""What is said of the data before a run and after a build: how much there is, how often it is passed over."""

from __future__ import annotations

from pathlib import Path

import pytest

from bert_dp.config import read_manifest
from launcher.datasets import built_lines
from launcher.run.describe import describe_data
from tests.helpers import make_config


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (("schedule.steps=30", "batch.global_size=64"), "the run passes over them 20 times"),
        (("schedule.tokens=768",), "the run reads 50.0 % of them"),
        (("schedule.hours=1",), "96 sequences of 16 tokens"),
        (
            ("schedule.steps=30", "batch.ramp_fraction=0.5", "batch.ramp_quantum=64"),
            "96 sequences of 16 tokens",
        ),
    ],
)
def test_the_data_is_described_with_its_passes(shards: Path, settings: tuple[str, ...], line: str) -> None:
    """96 sequences of 16 tokens."""
    config = make_config(*settings, "data.sequence_length=16")
    described = describe_data(config, read_manifest(shards))
    assert described.startswith("96 sequences of 16 tokens")
    assert described.endswith(line)


def test_before_it_is_built_nothing_is_claimed() -> None:
    assert describe_data(make_config(), None) == "not built yet; built when the run starts"


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (("model.vocab_size=64", "batch.global_size=96"), None),
        (("model.vocab_size=128", "batch.global_size=8"), None),  # padded
        (("model.vocab_size=512", "batch.global_size=8"), "model.vocab_size: 512 is 8.0 x the 64 tokens of "),
        (("model.vocab_size=64", "batch.global_size=480"), "batch.global_size: 480 is 5.0 x the 96 training"),
    ],
)
def test_what_fits_but_is_hardly_meant_is_a_warning(
    shards: Path, settings: tuple[str, ...], line: str | None
) -> None:
    warnings = read_manifest(shards).warnings(make_config(*settings, "data.sequence_length=16"))
    assert len(warnings) == (line is not None)
    assert all(warning.startswith(line or "") for warning in warnings)


def test_a_build_ends_with_what_it_made_and_the_next_command(shards: Path) -> None:
    manifest = read_manifest(shards).model_copy(update={"dropped": {"empty": 3, "exact_duplicate": 0}})
    made, left_out, following = built_lines(Path("out"), manifest, 4096)
    assert made == "out: 96 training and 20 held-out sequences of 16 tokens, from 116 documents"
    assert left_out == "dropped: 3 without a token; vocabulary: 64 tokens (4,096 asked; the text has no more)"
    assert following == "next: bert-dp train data.path=out data.sequence_length=16 model.vocab_size=64"
