"""Rows 9 to 11, 15 and 16: killed and failing saves, damaged checkpoints, gradients that are not finite, and
a loss spike.

SIGKILL keeps the page cache, so these tests cannot check the order of fsync and rename. Row 9 checks that no
incomplete checkpoint is loaded and that only the checkpoint that is being written is lost.
"""

import functools
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bert_dp.config import load_config
from bert_dp.cost import num_parameters
from bert_dp.parallel import State
from bert_dp.training import checkpoint
from launcher import job
from tests.e2e.cli import command, resume_run, tiny, train
from tests.faults.harness import broken, needs_mount, observe, on_small_disk, rounds
from tests.faults.killed_saver import state_of
from tests.helpers import logged
from tests.parity.runs import installed, parallel, settings, state, summary, train_runs, write_run
from tests.ranks import run_ranks
from tests.states import FACTS
from tests.wrapped_task import PoisonedTask

ROOT = Path(__file__).parents[2]
FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "manifest.json")


def steps_kept(folder: Path) -> list[int]:
    return [int(p.name[5:13]) for p in checkpoint.list_checkpoints(folder)]


# --- row 9


Kill = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def kill() -> Iterator[Kill]:
    """Return a function that sends a request to `tests.faults.killed_saver` and returns its answer."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.faults.killed_saver"],
        cwd=ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )

    def order(folder: Path, **what: Any) -> dict[str, Any]:
        process.stdin.write(json.dumps({"folder": str(folder), **what}) + "\n")
        process.stdin.flush()
        answer: dict[str, Any] = json.loads(process.stdout.readline())
        return answer

    yield order
    process.communicate(timeout=60)


def same(a: State, b: State) -> bool:
    return all(a[p].keys() == b[p].keys() and all(torch.equal(a[p][k], b[p][k]) for k in a[p]) for p in a)


def newest(folder: Path, ended: dict[str, Any]) -> int:
    """Return the step of the checkpoint that would be loaded, after checking its content and its step."""
    path, _ = checkpoint.newest_valid(folder)
    if path is None:
        assert ended["done"] == 0, "a save returned, but no checkpoint is valid"
        return 0
    state, facts = checkpoint.load(path)
    assert same(state, state_of(facts.step))
    assert facts.samples == facts.step
    assert max(1, ended["done"]) <= facts.step <= ended["begun"]
    return facts.step


def test_row_09_a_kill_at_a_random_moment_of_a_save_loses_only_that_save(tmp_path: Path, kill: Kill) -> None:
    start = time.monotonic()
    kill(tmp_path, saves=5)
    pace = (time.monotonic() - start) / 5
    loaded = 5
    lost = 0
    for number in rounds(10, 200):
        after_s = random.Random(number).uniform(0.0, 4 * pace)
        ended = kill(tmp_path, saves=1000, after_s=after_s)
        assert ended["killed"]
        if not ended["begun"]:  # killed before its first save
            ended = {**ended, "begun": loaded, "done": loaded}
        now = newest(tmp_path, {**ended, "done": max(ended["done"], loaded)})
        lost += ended["begun"] - now
        loaded = now
        observe(9, round=number, killed_after_s=after_s, begun=ended["begun"], loaded=now)
    assert lost <= len(rounds(10, 200)), "a kill loses at most one save"


def test_row_09_a_kill_before_a_change_of_the_disk_loses_at_most_one_save(tmp_path: Path, kill: Kill) -> None:
    """Kill a save, which also prunes, before each of its writes, fsyncs, renames and removals."""
    kill(tmp_path, saves=2)
    loaded, event = 2, 0
    outcomes = set()
    while True:
        ended = kill(tmp_path, saves=1, event=event)
        now = newest(tmp_path, {**ended, "done": max(ended["done"], loaded)})
        outcomes.add(now - loaded)
        loaded = now
        observe(9, event=event, **ended)
        if not ended["killed"]:
            break
        event += 1
    assert event >= 12, "too few events were counted"
    assert outcomes == {0, 1}, "some kills come before the rename, some after it"


def test_row_09b_a_kill_on_a_slow_disk_loses_at_most_the_save_in_progress(tmp_path: Path, kill: Kill) -> None:
    """Every fsync takes 0.1 s longer."""
    kill(tmp_path, saves=2)
    loaded = 2
    for number in rounds(3, 40):
        after_s = random.Random(number).uniform(0.0, 2.0)
        ended = kill(tmp_path, saves=1000, after_s=after_s, fsync_s=0.1)
        loaded = newest(tmp_path, {**ended, "done": max(ended["done"], loaded)}) if ended["begun"] else loaded
        observe(9, variant="b", killed_after_s=after_s, loaded=loaded)


def test_row_09_and_10_a_run_resumes_from_the_checkpoint_before_a_killed_or_damaged_one(
    run_dir: Path, shards: Path
) -> None:
    settings = ("schedule.steps=8", "checkpoint.every_steps=2")
    fault = broken("kill", rank=0, place="save", step=5)
    killed = train(shards, run_dir, *settings, nproc=1, code=1, **fault)
    assert "signal 9" in killed.stdout
    assert checkpoint.newest_valid(run_dir / "checkpoints")[0] == run_dir / "checkpoints" / "step-00000004"
    again = train(shards, run_dir, *settings, nproc=1)
    assert "resuming from step-00000004" in again.stdout
    assert logged(run_dir, "step") == list(range(1, 9))
    left = {p.name for p in (run_dir / "checkpoints").iterdir()}
    assert left == {"step-00000006", "step-00000008"}
    damage(run_dir / "checkpoints" / "step-00000008" / "optimizer.safetensors", random.Random(0))
    again = resume_run(run_dir, "schedule.steps=10")
    assert "checkpoint skipped" in again.stdout
    assert "step-00000008/optimizer.safetensors" in again.stdout
    assert "resuming from step-00000006" in again.stdout


# --- row 10


def damage(file: Path, draw: random.Random) -> str:
    """Truncate the file at a random byte or flip a random bit, and describe the change."""
    data = bytearray(file.read_bytes())
    if draw.random() < 0.5:
        length = draw.randrange(len(data))
        file.write_bytes(data[:length])
        return f"cut to {length} of {len(data)} bytes"
    place, bit = draw.randrange(len(data)), draw.randrange(8)
    data[place] ^= 1 << bit
    file.write_bytes(data)
    return f"bit {bit} of byte {place} flipped"


def test_row_10_a_damaged_checkpoint_is_named_and_the_previous_one_loaded(tmp_path: Path) -> None:
    for step in (1, 2):
        checkpoint.save_checkpoint(tmp_path, step, state_of(step), {**FACTS, "samples": step}, 9)
    older, whole = tmp_path / "step-00000001", tmp_path / "step-00000002"
    for number in rounds(12, 100):
        draw = random.Random(number)
        file = whole / FILES[number % len(FILES)]
        before = file.read_bytes()
        how = damage(file, draw)
        path, problems = checkpoint.newest_valid(tmp_path)
        assert path == older, how
        assert len(problems) == 1
        assert whole.name in problems[0]
        assert file.name in problems[0] or file.name == "manifest.json"
        observe(10, file=file.name, how=how, said=problems[0].removeprefix(f"{tmp_path}/"))
        file.write_bytes(before)
        assert checkpoint.newest_valid(tmp_path)[0] == whole


def test_row_10_any_flipped_bit_of_the_manifest_is_detected(tmp_path: Path) -> None:
    """No hash protects the manifest, so a change of any bit must make the check fail."""
    tiny_state: State = {"model": {"w": torch.ones(2)}, "optimizer": {"w/m": torch.ones(2)}, "scaler": {}}
    path = checkpoint.save_checkpoint(tmp_path, 1, tiny_state, FACTS, 9)
    file = path / "manifest.json"
    data = file.read_bytes()
    for place in range(len(data)):
        for bit in rounds(1, 8):
            changed = bytearray(data)
            changed[place] ^= 1 << (bit + place) % 8
            file.write_bytes(changed)
            assert checkpoint.check(path) is not None, (place, bit, bytes(changed))


# --- row 11

ERRORS = {
    "full_disk": "No space left on device",
    "io_error": "Input/output error",
    "read_only": "Read-only file system",
}


@pytest.mark.parametrize("what", list(ERRORS)[: len(rounds(1, 3))])
def test_row_11_a_failed_save_does_not_end_the_run(run_dir: Path, shards: Path, what: str) -> None:
    """The save after step 6 fails; the saves before and after it succeed."""
    done = train(
        shards,
        run_dir,
        "schedule.steps=10 checkpoint.every_steps=2 checkpoint.keep=3",
        **broken(what, rank=0, place="save", step=5),
    )
    (warning,) = [line for line in done.stdout.splitlines() if "could not be saved" in line]
    for text in ("step-00000006", ERRORS[what], "newest valid checkpoint is step-00000004"):
        assert text in warning
    facts = summary(run_dir)
    assert (facts["status"], facts["failed_saves"], facts["step"]) == ("done", 1, 10)
    folder = run_dir / "checkpoints"
    assert steps_kept(folder) == [10, 8, 4]
    assert all(checkpoint.check(path) is None for path in checkpoint.list_checkpoints(folder))


EVERY_2 = "schedule.steps=4 checkpoint.every_steps=2"


@pytest.mark.parametrize(
    ("settings", "what", "lost", "good"),
    [
        (f"{EVERY_2} schedule.steps=100000 checkpoint.on_error=stop", "io_error", 6, 4),
        ("", "read_only", 0, None),  # the first save, before any training
        (EVERY_2, "io_error", 4, 2),  # the last save
    ],
)
def test_row_11_a_failed_save_can_end_the_run(
    run_dir: Path, shards: Path, settings: str, what: str, lost: int, good: int | None
) -> None:
    done = train(shards, run_dir, settings, code=1, **broken(what, rank=0, place="save", step=lost - 1))
    facts = summary(run_dir)
    assert (facts["status"], facts["exit_code"]) == ("failed", 1)
    assert f"step-{lost:08d} could not be saved" in done.stdout
    for text in (f"step-{lost:08d} could not be saved", ERRORS[what]):
        assert text in facts["failure"]["message"]
    assert (run_dir / "metrics.jsonl").exists() == (good is not None), "steps after a failed first save"
    if good is not None:
        assert f"newest valid checkpoint is step-{good:08d}" in facts["failure"]["message"]
        assert checkpoint.check(run_dir / "checkpoints" / f"step-{good:08d}") is None
        assert facts["failed_saves"] >= 1
    if settings == EVERY_2:
        assert (facts["step"], facts["failed_saves"]) == (4, 2), "one save on schedule and one at the end"
        assert facts["heldout_loss"] is not None
        assert facts["checkpoint"] == "checkpoints/step-00000002"


@needs_mount
@pytest.mark.parametrize("policy", ("continue", "stop")[: len(rounds(1, 2))])
def test_row_11_a_full_disk_keeps_its_valid_checkpoints(tmp_path: Path, shards: Path, policy: str) -> None:
    """The file system has space for the checkpoint of step 0 and two others, but not for a third."""
    run_dir, disk = tmp_path / "run", tmp_path / "run" / "checkpoints"
    run_dir.mkdir(parents=True)
    options = tiny(
        shards,
        "schedule.steps=8",
        "checkpoint.every_steps=2",
        "checkpoint.keep=9",
        f"checkpoint.on_error={policy}",
        "model.hidden_size=192",
        "model.intermediate_size=384",
    )
    config = load_config(job.find_config("quickstart"), options[1::2])
    size = 3 * 4 * num_parameters(config.model, 16)  # weights and two moments in fp32
    done = on_small_disk(
        disk,
        int(2.8 * size),
        *command("train", "quickstart", *options, "--nproc", "1", "--run-dir", str(run_dir)),
    )
    assert done.returncode == 1, done.stdout + done.stderr
    facts, left = summary(run_dir), tmp_path / "run" / "checkpoints-left"
    assert facts["status"] == "failed"
    assert "No space left on device" in facts["failure"]["message"]
    assert steps_kept(left) == [4, 2], "the two newest are kept, and the first was removed to free space"
    assert all(checkpoint.check(path) is None for path in checkpoint.list_checkpoints(left))
    assert not list(left.glob("*.tmp-*"))
    assert "newest valid checkpoint is step-00000004" in facts["failure"]["message"]
    if policy == "continue":
        assert facts["step"] == 8, "training did not continue"
        assert facts["failed_saves"] == 3, "after steps 6 and 8, and at the end"


FULL_DISK = """
import errno, pathlib, sys, torch
from bert_dp.training import checkpoint
folder = pathlib.Path(sys.argv[1])
state = {"model": {"w": torch.ones(2**17)}, "optimizer": {"w/m": torch.ones(2**17)}, "scaler": {}}
checkpoint.save_checkpoint(folder, 1, state, {}, 9)
for expected in (errno.ENOSPC, errno.EROFS):
    try:
        checkpoint.save_checkpoint(folder, 2, state, {}, 9)
    except OSError as error:
        assert error.errno == expected, error
    else:
        raise AssertionError(expected)
    assert [p.name for p in checkpoint.list_checkpoints(folder)] == ["step-00000001"]
    assert {p.name for p in folder.iterdir()} == {"step-00000001"}
    import subprocess
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
"""


@needs_mount
def test_row_11_the_errors_of_a_full_and_a_read_only_disk_are_raised(tmp_path: Path) -> None:
    """The system and safetensors raise these errors themselves, also if space runs out during a write."""
    done = on_small_disk(
        tmp_path / "disk", int(1.8 * 2**20), sys.executable, "-c", FULL_DISK, str(tmp_path / "disk")
    )
    assert done.returncode == 0, done.stderr
    assert checkpoint.check(tmp_path / "disk-left" / "step-00000001") is None


# --- row 15


@pytest.mark.parametrize("rank", (1, 0)[: len(rounds(1, 2))])
def test_row_15_one_bad_rank_skips_the_step_on_all(tmp_path: Path, shards: Path, rank: int) -> None:
    run_dir = write_run(tmp_path / "run", settings(shards, schedule={"steps": 8}))
    train_runs(2, [run_dir], poison=(rank, range(2, 6)))
    assert logged(run_dir, "skipped_steps") == [0, 0, 1, 2, 3, 4, 4, 4]
    assert summary(run_dir)["skipped_steps"] == 4


@pytest.mark.parametrize("rank", (1, 0)[: len(rounds(1, 2))])
def test_row_15_five_skipped_steps_in_a_row_stop_a_run(run_dir: Path, shards: Path, rank: int) -> None:
    train(
        shards,
        run_dir,
        "schedule.steps=100000 checkpoint.every_steps=2 log.every_steps=3",
        code=1,
        **broken("nan", rank=rank, place="step", step=4, times=100000),
    )
    facts = summary(run_dir)
    assert (facts["status"], facts["exit_code"], facts["failure"]["kind"]) == ("failed", 1, "not_finite")
    assert "5 steps in a row up to step 9 " in facts["failure"]["message"], "checked when step 9 is logged"
    for text in ("learning rate", "optim.lr", "not finite"):
        assert text in facts["failure"]["message"]
    assert facts["step"] == 10, "all ranks learn of the stop one step later"
    path, problems = checkpoint.newest_valid(run_dir / "checkpoints")
    assert (path, problems) == (run_dir / "checkpoints" / "step-00000010", [])
    assert path is not None
    state, saved = checkpoint.load(path)
    assert checkpoint.first_not_finite(state) is None
    assert saved.skipped_steps == 6


def test_row_15_a_run_that_skipped_every_step_is_not_done(tmp_path: Path, shards: Path) -> None:
    """The run has fewer steps than the five skipped steps that stop a run."""
    fault = broken("nan", rank=0, place="step", step=0, times=100000)
    done = train(shards, tmp_path, "schedule.steps=3", nproc=1, code=1, **fault)
    facts = summary(tmp_path)
    assert (facts["status"], facts["exit_code"], facts["step"]) == ("failed", 1, 3)
    assert (facts["skipped_steps"], facts["failure"]["kind"]) == (3, "not_finite")
    assert "all 3 steps were skipped because the gradient was not finite" in facts["failure"]["message"]
    assert "all 3 steps" in done.stdout + done.stderr


def _train_until_stopped(run_dirs: list[str]) -> None:
    """Train each run. The losses of rank 1 are NaN from step 3 (from 0) on, and only rank 0 exits with 1."""
    from bert_dp.training import rank as worker

    store, rank = os.environ["BERT_DP_INIT_FILE"], int(os.environ["RANK"])
    make_task = functools.partial(PoisonedTask, bad_steps=range(3, 1000)) if rank == 1 else None
    for number, run_dir in enumerate(run_dirs):
        os.environ["BERT_DP_INIT_FILE"] = f"{store}-{number}"
        assert worker.main([f"{run_dir}/config.yaml"], make_task) == (1 if rank == 0 else 0)


def test_row_15_every_engine_stops_on_all_ranks_together(tmp_path: Path, shards: Path) -> None:
    engines = ["ddp", "zero1", "fsdp", *installed("accelerate", "deepspeed-0", "deepspeed-1", "deepspeed-3")]
    runs = [
        write_run(
            tmp_path / engine,
            settings(
                shards,
                schedule={"steps": 1000},
                checkpoint={"every_steps": 4, "keep": 9},
                parallel=parallel(engine),
            ),
        )
        for engine in engines
    ]
    run_ranks(2, _train_until_stopped, [str(run_dir) for run_dir in runs])
    for run_dir in runs:
        facts = summary(run_dir)
        assert (facts["status"], facts["exit_code"], facts["step"]) == ("failed", 1, 9), run_dir.name
        assert "5 steps in a row up to step 8 " in facts["failure"]["message"], run_dir.name
        assert logged(run_dir, "skipped_steps") == [0, 0, 0, 1, 2, 3, 4, 5, 6]
        before, after = state(run_dir, 4), state(run_dir, 8)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before), "skipped steps change weights"


# --- row 16


def test_row_16_a_loss_spike_is_reported_and_training_continues(run_dir: Path, shards: Path) -> None:
    done = train(
        shards,
        run_dir,
        "schedule.steps=40 checkpoint.every_steps=30 checkpoint.keep=9",
        **broken("spike", rank=1, place="step", step=30),
    )
    (warning,) = [line for line in done.stdout.splitlines() if line.startswith("warning: loss spike")]
    assert "at step 31:" in warning
    facts = summary(run_dir)
    assert (facts["loss_spikes"], facts["skipped_steps"], facts["step"]) == (1, 0, 40)
    losses = logged(run_dir, "loss")
    assert losses[30] > 3 * losses[29]
    assert all(loss < 2 * losses[0] for loss in losses[31:])
    observe(16, losses=losses[28:34])
