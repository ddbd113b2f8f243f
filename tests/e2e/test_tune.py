"""`bert-dp tune batch` on real runs: stopped, killed and gone on with, too large; `micro_size: auto`."""

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from bert_dp.config import load_config
from launcher.tune import batch, throughput
from launcher.tune.throughput import BatchTrial
from tests.e2e.cli import accepted, bert_dp, interrupted, processes_of, refused, start, tiny, wait_for
from tests.faults.harness import broken
from tests.helpers import read_json, read_lines


def command(shards: Path, out: Path, *more: str) -> list[str]:
    options = "--nproc 2 --budget 120s --out".split()
    return ["tune", "batch", "quickstart", *tiny(shards, "batch.micro_size=auto"), *options, str(out), *more]


@pytest.fixture(scope="module")
def out(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A search that had a Ctrl-C in its first trial, was killed in its second, and whose next trial lost a
    rank to SIGKILL."""
    folder = tmp_path_factory.mktemp("tune") / "out"
    search = command(shards, folder)

    def running(name: str) -> list[Path]:
        return list(folder.glob(f"trials/{name}/heartbeats/rank-1"))

    stopped = interrupted(search, folder, signal.SIGINT, lambda: running("memory-1"), patience_s=0.0)
    assert stopped.returncode == 130, stopped.stdout + stopped.stderr
    assert "the same command resumes" in stopped.stdout
    partial = read_json(folder / "tune.json")
    assert (partial["status"], partial["choice"]) == ("partial", None)
    assert not (folder / "tuned.yaml").exists()

    interrupted(search, folder, signal.SIGKILL, lambda: running("micro-*"))
    pilot = (folder / "trials" / "memory-1" / "metrics.jsonl").read_text()
    process = start(*search)

    def a_rank() -> list[psutil.Process]:
        lines = [(p, " ".join(p.info["cmdline"] or ())) for p in processes_of(folder / "trials")]
        ranks = [(p, line) for p, line in lines if "-m bert_dp.worker " in line and "micro-" in line]
        return [p for p, line in ranks if "torch.distr" not in line]

    os.kill(wait_for(a_rank)[0].pid, signal.SIGKILL)
    printed, errors = process.communicate(timeout=240)
    assert process.returncode == 0, printed + errors
    assert "interrupted or incomplete; restarted" in printed
    assert (folder / "trials" / "memory-1" / "metrics.jsonl").read_text() == pilot, "a whole trial ran again"
    return folder


@pytest.fixture(scope="module")
def tune(out: Path) -> dict[str, Any]:
    return read_json(out / "tune.json")


def test_the_rates_the_memory_and_the_choice_follow_from_the_raw_steps(
    tune: dict[str, Any], out: Path
) -> None:
    assert tune["status"] == "complete"
    sizes = [size["micro_batch"] for size in tune["sizes"]]
    assert sizes == [1, 2, 4][-len(sizes) :], "a slow machine has no time for the smaller ones"
    assert [trial["micro_batch"] for trial in tune["trials"]][: len(sizes)] == sizes, "ascending"
    rates: dict[int, list[float]] = {}
    for trial in tune["trials"]:
        assert trial["status"] == "ok", trial["reason"]
        directory = out / "trials" / trial["name"]
        batch = load_config(directory / "config.yaml").batch
        assert (batch.micro_size, batch.global_size) == (trial["micro_batch"], trial["samples"])
        lines = read_lines(directory / "steps" / "rank-0.jsonl")
        assert [s for line in lines for s in line["step_s"]][3:] == trial["step_s"]
        rate = throughput.run_rate(BatchTrial.model_validate(trial), tune["global_batch"])
        rates.setdefault(trial["micro_batch"], []).append(rate)
    for size in tune["sizes"]:
        assert size["samples_per_s"] == pytest.approx(throughput.mean_rate(rates, size["micro_batch"]))
    choice, line = tune["choice"], tune["memory_line"]
    chosen = choice["micro_batch"]
    assert chosen == throughput.choose_size(rates)[0]
    assert chosen * choice["accumulation"] * 2 == tune["global_batch"] == 8
    peak_gib = next(size["peak_gib"] for size in tune["sizes"] if size["micro_batch"] == chosen)
    assert peak_gib == pytest.approx(line["intercept_gib"] + line["gib_per_sequence"] * chosen, rel=0.1)
    tried = [trial["micro_batch"] for trial in tune["memory_trials"]]
    assert tried == [1, 4][: len(tried)], "a slow machine has no time for the second one"
    assert tune["memory_limit_gib"] > 0
    assert load_config(out / "tuned.yaml").batch.micro_size == chosen
    assert (out / "report.html").read_text().startswith("<!doctype html>")


def test_micro_size_auto_searches_once_and_only_for_a_run_that_can_start(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "AUTO_BUDGET_S", 5.0)
    monkeypatch.setenv("BERT_DP_CACHE", str(tmp_path / "cache"))
    options = tiny(shards, "batch.micro_size=auto", "batch.global_size=2")
    run = ["train", "quickstart", *options, "--nproc", "2"]
    assert "none contains no checkpoint" in refused(*run, "--resume", str(tmp_path / "none"))
    assert not (tmp_path / "cache").exists()
    said = accepted(*run, "--run-dir", str(tmp_path / "a"))
    assert "batch.micro_size: auto = 1, measured just now" in said
    assert load_config(tmp_path / "a" / "config.yaml").batch.micro_size == 1
    again = accepted(*run, "--dry-run")
    assert "auto = 1, measured on" in again
    assert "= micro 1 x " in again
    assert "batch.micro_size: only `bert-dp train`" in refused("scale", "quickstart", *options, "--dry-run")


def test_a_size_that_takes_too_much_is_a_result(shards: Path, tmp_path: Path) -> None:
    """A rank of this model takes more than 0.2 GiB whatever its batch."""
    assert "0.20 GiB" in bert_dp(*command(shards, tmp_path / "o", "--memory", "0.2"), code=1).stdout
    result = read_json(tmp_path / "o" / "tune.json")
    assert result["status"] == "failed"
    assert result["choice"] is None
    assert not (tmp_path / "o" / "tuned.yaml").exists()


def test_out_of_memory_on_one_rank_is_the_result_of_its_size(shards: Path, tmp_path: Path) -> None:
    """Rank 1 of the first run that takes a fifth step; the memory trials take three."""
    fault = broken("cuda_oom", rank=1, step=4, once=str(tmp_path / "once"))
    bert_dp(*command(shards, tmp_path / "o", "--budget", "80s", "--set", "batch.global_size=4"), **fault)
    result = read_json(tmp_path / "o" / "tune.json")
    states = {size["micro_batch"]: size["status"] for size in result["sizes"]}
    lost = result["trials"][0]
    hit = lost["micro_batch"]
    assert states == {micro: "oom" if micro == hit else "ok" for micro in (1, 2)}
    assert "rank 1" in lost["reason"]
    assert "out of memory" in lost["reason"]
    assert result["choice"]["micro_batch"] != hit


@pytest.mark.quick
def test_bad_input_is_refused_before_anything_starts(shards: Path, tmp_path: Path) -> None:
    for more, said in (("--budget 0s", "--budget: '0s'"), ("--memory -1", "--memory: -1")):
        assert said in refused(*command(shards, tmp_path / "o"), *more.split())
    assert "batch.micro_size: " in refused(*command(shards, tmp_path / "o"), "--set", "batch.micro_size=0")
    assert not (tmp_path / "o").exists()
