"""Rows 7 and 8: a rank that sleeps, is stopped or holds the interpreter lock; a mismatched collective; a slow
rank; and no alarm where all is well.
"""

import random
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from tests.e2e.cli import begin, processes_of, train, wait_for
from tests.faults.harness import FULL, broken, observe, rounds
from tests.helpers import read_json, read_lines

LIMIT_S = 30.0 if FULL else 8.0
WHY = {"sleep": "has not started", "stop": "stopped by a signal (SIGSTOP)", "gil": "not responding"}


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path) -> Iterator[None]:
    """A stopped process follows nobody: whatever a failed test leaves is ended here."""
    yield
    left = processes_of(tmp_path)
    for process in left:
        process.kill()
    psutil.wait_procs(left, timeout=10)
    assert left == []


def hang_limits(limit_s: float = LIMIT_S, end_s: float = 1.0) -> tuple[str, str]:
    return f"run.hang_after_s={limit_s}", f"run.end_hung_after_s={end_s}"


def silence_of(report: str) -> float:
    """Seconds of silence at the report."""
    match = re.search(r"no progress for (\d+) s", report)
    assert match
    return float(match[1])


def hang_once(tmp_path: Path, shards: Path, what: str, rank: int, ranks: int, place: str) -> None:
    run_dir = tmp_path / f"{what}-{rank}-{ranks}-{place}"
    done = train(
        shards,
        run_dir,
        *hang_limits(),
        "schedule.steps=100000",
        "eval.every_steps=3",
        "batch.global_size=16",
        nproc=ranks,
        code=1,
        timeout=600,
        **broken(what, rank=rank, place=place, step=2 if place == "eval" else 3),  # evaluated after step 2
    )
    report = next(line for line in done.stdout.splitlines() if line.startswith("hang"))
    assert f"rank {rank} in step" in report
    assert WHY[what] in report or (what == "sleep" and ("behind" in report or "not in the coll" in report))
    if what != "stop":
        assert f"  rank {rank} at {Path(__file__).parent / 'inject' / 'sitecustomize.py'}:" in done.stdout
    assert report.partition(":")[2].strip() in (run_dir / "hang.txt").read_text()
    summary = read_json(run_dir / "summary.json")
    assert summary["status"] == "failed"
    assert summary["failure"]["rank"] == rank
    assert summary["failure"]["message"].startswith("hang in step")
    silence = silence_of(report)
    observe(7, what=what, rank=rank, ranks=ranks, place=place, limit_s=LIMIT_S, silence_s=silence)
    assert silence <= 3 * LIMIT_S


@pytest.mark.parametrize("what", sorted(WHY) if FULL else ["gil", "stop"])  # the pause below is a sleep
def test_row_07_a_hung_rank_is_named_and_the_run_ended(tmp_path: Path, shards: Path, what: str) -> None:
    cases = [(rank, ranks, place) for place in ("step", "data") for ranks in (2, 4) for rank in (0, 1)]
    if not FULL:
        cases = random.Random(what).sample(cases[:2], 1)
    for rank, ranks, place in cases:
        hang_once(tmp_path, shards, what, rank, ranks, place)


@pytest.mark.skipif(not FULL, reason="the short form hangs in a step alone")
def test_row_07_a_hang_in_evaluation(tmp_path: Path, shards: Path) -> None:
    for rank in (0, 1):
        hang_once(tmp_path, shards, "sleep", rank, 2, "eval")


def test_row_07_a_pause_is_reported_and_its_end_too(run_dir: Path, shards: Path) -> None:
    train(shards, run_dir, *hang_limits(4.0, 600.0), "schedule.steps=4", **broken("sleep", seconds=8))
    said = (run_dir / "hang.txt").read_text()
    assert said.count("hang: rank 1 in step 4 (phase step") == 1
    assert f"  rank 1 at {Path(__file__).parent / 'inject' / 'sitecustomize.py'}:" in said
    assert re.search(r"continues after \d+ s", said)
    assert read_json(run_dir / "summary.json")["status"] == "done"


def test_row_07_a_hung_run_that_is_ended_by_hand_tells_its_hang(run_dir: Path, shards: Path) -> None:
    process = begin(shards, run_dir, *hang_limits(end_s=600.0), "schedule.steps=100000", **broken("stop"))
    wait_for((run_dir / "hang.txt").exists)
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(1)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    card = said.splitlines()
    card = card[next(i for i, line in enumerate(card) if line.startswith("failed: SIGINT")) :]
    assert any(line.startswith("  why: no progress: rank 1: hang in step") for line in card)
    summary = read_json(run_dir / "summary.json")
    assert "rank 1" in summary["failure"]["explanation"][0]


def test_row_07_no_false_alarm(run_dir: Path, shards: Path) -> None:
    """Healthy steps with evaluation and saving, and in the full form with compilation."""
    steps = len(rounds(400, 10_000))
    often = f"eval.every_steps={steps // 20} checkpoint.every_steps={steps // 10}"
    settings = (*hang_limits(10.0), f"schedule.steps={steps}", often, f"compile={'on' if FULL else 'off'}")
    done = train(shards, run_dir, *settings, timeout=3600)
    assert read_lines(run_dir / "metrics.jsonl")[-1]["step"] == steps
    assert (run_dir / "heartbeats" / "rank-1").exists()  # or there was nothing to watch
    alarms = (run_dir / "hang.txt").read_text() if (run_dir / "hang.txt").exists() else ""
    observe(7, healthy_steps=steps, false_alarms=alarms.count("hang"))
    assert alarms == ""
    assert "hang" not in done.stdout


def test_row_07_a_straggler_is_named(run_dir: Path, shards: Path) -> None:
    done = train(
        shards, run_dir, "schedule.steps=20 log.every_steps=7", **broken("slow", rank=1, seconds=0.1)
    )
    summary = read_json(run_dir / "summary.json")
    assert summary["straggler"]["rank"] == 1
    assert summary["straggler"]["ratio"] == summary["straggler_ratio"] > 2
    observe(7, straggler_seconds_per_step=summary["straggler"]["seconds_per_step"])
    assert 0.1 <= summary["straggler"]["seconds_per_step"] <= 2.0  # 0.2 s were injected
    assert re.search(r"straggler\s+rank 1\b.*compute time", done.stdout)


def mismatch_once(tmp_path: Path, shards: Path, rank: int, device: str) -> str:
    run_dir = tmp_path / f"rank-{rank}"
    done = train(
        shards,
        run_dir,
        *hang_limits(),
        f"schedule.steps=100000 run.device={device} compile='off'",
        code=1,
        **broken("mismatch", rank=rank),
    )
    report = next(line for line in done.stdout.splitlines() if line.startswith("hang"))
    observe(8, rank=rank, device=device, limit_s=LIMIT_S, silence_s=silence_of(report))
    assert silence_of(report) <= LIMIT_S + 20
    return report


def test_row_08_a_mismatched_collective_is_named(tmp_path: Path, shards: Path) -> None:
    for rank in rounds(1, 2):
        report = mismatch_once(tmp_path, shards, rank, "cpu")
        assert "mismatched collectives" in report
        assert re.search(rf"rank {1 - rank} calls all_reduce of \[\[\d+\]\]", report)
        assert f"rank {rank} calls broadcast of [[3]]" in report


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_row_08_a_mismatched_collective_is_named_under_nccl(tmp_path: Path, shards: Path) -> None:
    report = mismatch_once(tmp_path, shards, 1, "cuda")
    assert "mismatched collectives" in report
    assert "rank 1 calls broadcast" in report
