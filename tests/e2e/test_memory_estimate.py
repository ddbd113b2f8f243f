"""Compare the memory estimate of a dry run with the peak memory of the run."""

import re
from pathlib import Path

import pytest

from bert_dp.config import bf16_units
from tests.e2e.cli import accepted, bert_dp
from tests.helpers import read_json
from tests.shards import write_shards

VOCABULARY = {"quickstart": 4096, "small-text": 8192}
MAX_ERROR = 0.2  # fraction of the peak


@pytest.mark.parametrize(
    "precision",
    ["fp32", pytest.param("bf16", marks=pytest.mark.skipif(not bf16_units(), reason="bf16 is emulated"))],
)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("config", VOCABULARY)
def test_a_dry_run_estimates_the_peak_memory_of_a_cpu_rank(
    tmp_path: Path, config: str, ranks: int, precision: str
) -> None:
    shards = write_shards(tmp_path / "shards", vocab_size=VOCABULARY[config], length=128, train=256)
    settings = f"data.path={shards} schedule.steps=3 run.device=cpu compile=off precision={precision}"
    run = ("train", config, *settings.split(), f"--nproc={ranks}", "--run-dir", str(tmp_path / "run"))
    output = accepted(*run, "--dry-run")
    estimate = re.search(r"^memory  about ([\d.]+) GiB per rank", output, re.MULTILINE)
    assert estimate is not None, output
    bert_dp(*run, timeout=600)
    peak_gib = read_json(tmp_path / "run" / "summary.json")["peak_memory_gib"]
    assert float(estimate[1]) == pytest.approx(peak_gib, rel=MAX_ERROR)
