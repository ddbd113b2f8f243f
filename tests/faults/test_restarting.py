"""Rows 18, 19 and 26: many launchers at once, a crash loop, and random faults for half an hour."""

import math
import random
import time
from pathlib import Path

import psutil
import pytest
import yaml

from bert_dp.files import STARTED_AGAIN
from tests.e2e.cli import begin, members, train, wait_for
from tests.faults.harness import FULL, broken, observe, rounds
from tests.helpers import logged, read_json, read_lines
from tests.parity.runs import state, train_runs, write_run

INTERVAL = 20  # steps between two checkpoints of row 26


def test_row_18_simultaneous_launchers_do_not_collide(tmp_path: Path, shards: Path) -> None:
    count = 8 if FULL else 2
    for number in rounds(1, 20):
        together = [begin(shards, tmp_path / f"run-{number}-{k}") for k in range(count)]
        texts = [process.communicate(timeout=300) for process in together]
        assert [process.returncode for process in together] == [0] * count, texts
        observe(18, launchers=count)


def test_row_19_a_crash_loop_ends_and_keeps_its_logs(run_dir: Path, shards: Path) -> None:
    done = train(
        shards,
        run_dir,
        "schedule.steps=20 checkpoint.every_steps=2",
        nproc=1,
        options=("--max-restarts", "50"),
        code=1,
        **broken("raise", rank=0, step=1),
    )
    assert "not restarted: 3 consecutive failures without a new checkpoint" in done.stdout
    summary = read_json(run_dir / "summary.json")
    attempts = len(summary["restarts"]) + 1
    assert attempts <= 4
    assert "ValueError: injected by a test" in summary["failure"]["message"]
    log = (run_dir / "logs" / "rank-0.log").read_text()
    assert log.count("ValueError: injected by a test") == attempts
    assert log.count(STARTED_AGAIN) == attempts - 1
    observe(19, attempts=attempts)


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"] if FULL else ["torchrun"])
def test_row_19_an_elastic_run_restarts_with_fewer_ranks(tmp_path: Path, shards: Path, launcher: str) -> None:
    run_dir = tmp_path / "run"
    train(
        shards,
        run_dir,
        "schedule.steps=8 checkpoint.every_steps=2",
        nproc=4,
        options=("--max-restarts", "1", "--elastic", "--launcher", launcher),
        **broken("kill", rank=3, step=4, once=str(tmp_path / "once")),
    )
    restarts = read_json(run_dir / "summary.json")["restarts"]
    assert [(restart["step"], restart["ranks"]) for restart in restarts] == [(4, 2)]
    sizes = logged(run_dir, "world_size")
    assert sizes == [4] * 4 + [2] * 4  # 8 = micro 2 x accumulation x 3 has no solution
    assert {line["global_batch"] for line in read_lines(run_dir / "metrics.jsonl")} == {8}


def test_row_26_random_kills_under_restart_reach_the_same_weights(tmp_path: Path, shards: Path) -> None:
    """Kill a rank, stop a rank for 2 s, or kill and restart the launcher; three times in the short form. A
    kill loses the steps since the newest complete checkpoint; another one may be unfinished."""
    dice = random.Random(26 if FULL else 141)  # 141: the first three faults are of different kinds
    steps, every, pause, faults = (40_000, 30.0, 1800.0, math.inf) if FULL else (200, 0.0, math.inf, 3)
    settings = [f"schedule.steps={steps}", f"checkpoint.every_steps={INTERVAL}"]
    settings += [] if FULL else ["compile=off"]
    run_dir, lost = tmp_path / "soak", []
    again = ("--max-restarts", "1000")
    console = (tmp_path / "console").open("w+")  # a file, because a pipe could fill up
    process = begin(shards, run_dir, *settings, options=again, stdout=console)
    begun, due = time.monotonic(), INTERVAL
    try:
        while time.monotonic() - begun < pause and len(lost) < faults and process.poll() is None:
            workers = [m for m in members(run_dir) if is_rank(m)]
            if not workers or not due < len(lines_so_far(run_dir)) < steps:  # the run restarts or ends
                time.sleep(0.1)
                continue
            what = dice.choice(["rank", "rank", "pause", "launcher"])
            if what == "launcher":
                process.kill()
                process.communicate()
                wait_for(lambda: not members(run_dir), seconds=60)
                lost.append(steps_to_lose(run_dir))
                process = begin(shards, run_dir, *settings, options=again, stdout=console)
            elif what == "rank":
                victim = dice.choice(workers)
                victim.kill()
                psutil.wait_procs([victim], timeout=5)
                lost.append(steps_to_lose(run_dir))
            else:
                victim = dice.choice(workers)
                victim.suspend()
                time.sleep(2.0)
                victim.resume()
                lost.append(0)
            due = len(lines_so_far(run_dir))
            observe(26, what=what, step=due, lost=lost[-1], minutes=(time.monotonic() - begun) / 60)
            time.sleep(every * (0.5 + dice.random()))
        errors = process.communicate(timeout=1800)[1]
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    console.seek(0)
    assert process.returncode == 0, [console.read()[-5000:], errors]
    assert lost
    assert max(lost) <= 2 * INTERVAL + 1
    assert logged(run_dir, "step") == list(range(1, steps + 1))
    whole = write_run(tmp_path / "whole", yaml.safe_load((run_dir / "config.yaml").read_text()))
    train_runs(2, [whole])
    one, other = state(whole, steps), state(run_dir, steps)  # weights and optimizer state
    assert one.keys() == other.keys()
    assert [name for name in one if not one[name].equal(other[name])] == []


def is_rank(process: psutil.Process) -> bool:
    try:
        words = process.cmdline()
        return "-m" in words and words[words.index("-m") + 1] == "bert_dp.worker"
    except psutil.Error:
        return False


def steps_to_lose(run_dir: Path) -> int:
    """Return the number of logged steps after the newest complete checkpoint."""
    whole = [int(path.name.removeprefix("step-")) for path in (run_dir / "checkpoints").glob("step-????????")]
    return max(0, len(lines_so_far(run_dir)) - max(whole, default=0))


def lines_so_far(run_dir: Path) -> list[str]:
    path = run_dir / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []
