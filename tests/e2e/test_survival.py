"""Check that no data are lost if a run is stopped early, refused, repeated or logged, or its reader ends."""

import shutil
import signal
from pathlib import Path

import psutil
import pytest

from tests.e2e.cli import (
    begin,
    is_alive,
    members,
    processes_of,
    refused,
    resume_run,
    start,
    step_reached,
    tiny,
    train,
    wait_for,
)
from tests.helpers import logged, read_json
from tests.shards import write_shards


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> Path:
    """Return a run of 4 steps on 1 rank with a checkpoint at every step."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    train(shards, run_dir, "schedule.steps=4", "checkpoint.every_steps=1", "checkpoint.keep=9", nproc=1)
    return run_dir


def files(run_dir: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(run_dir)): p.read_bytes()
        for p in run_dir.rglob("*")
        if p.is_file() and not p.name.endswith(".lock")
    }


def test_a_refused_resume_changes_nothing(finished: Path, tmp_path: Path) -> None:
    before = files(finished)
    other = write_shards(tmp_path / "other", seed=1)
    for extra, text in (
        (["--set", f"data.path={other}"], "trained on different data"),
        (["--set", "optim.lr=0.5"], "optim.lr"),
        (["--resume", str(tmp_path)], "contains no checkpoint"),
    ):
        assert text in refused("train", "--run-dir", str(finished), "--set", "schedule.steps=9", *extra)
        assert files(finished) == before


def test_a_complete_run_is_shown_and_not_changed(finished: Path) -> None:
    before = files(finished)
    again = resume_run(finished)
    assert "this run is complete" in again.stdout
    assert files(finished) == before


def test_going_back_to_a_checkpoint_sets_later_ones_aside(finished: Path, run_dir: Path) -> None:
    shutil.copytree(finished, run_dir)
    early = run_dir / "checkpoints" / "step-00000002"
    resume_run(run_dir, "schedule.steps=3", "checkpoint.keep=1", options=("--resume", str(early)))
    assert logged(run_dir, "step") == [1, 2, 3]
    kept = sorted(p.name for p in (run_dir / "checkpoints").iterdir() if ".abandoned-" not in p.name)
    assert kept == ["step-00000003"]


def test_a_signal_during_start_up_is_not_lost(run_dir: Path, shards: Path) -> None:
    process = begin(shards, run_dir, "schedule.steps=100000")
    wait_for(lambda: (run_dir / "logs" / "torchrun.log").exists())
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143
    assert not members(run_dir)


def test_only_one_of_two_launchers_runs_and_it_survives_its_reader(run_dir: Path, shards: Path) -> None:
    both = [begin(shards, run_dir, "schedule.steps=60", nproc=1) for _ in range(2)]
    second = wait_for(lambda: next((process for process in both if process.poll() is not None), None))
    errors = second.communicate()[1]
    assert second.returncode == 2, errors
    assert "in use" in errors
    (first,) = [process for process in both if process is not second]
    first.stdout.readline()
    first.stdout.close()
    assert first.wait(timeout=120) == 0
    summary = read_json(run_dir / "summary.json")
    assert (summary["status"], summary["step"]) == ("done", 60)


def test_the_processes_of_a_build_end_with_it(tmp_path: Path) -> None:
    text = tmp_path / "big.txt"
    text.write_text(
        "".join(f"document {i} tells of {i * i} grey ships and {i % 97} lamps\n" for i in range(400_000))
    )
    process = start(
        "data", "build", str(text), "--out", str(tmp_path / "out"), "data.build.max_tokens_per_char=0"
    )

    def family() -> list[psutil.Process]:
        return psutil.Process(process.pid).children(recursive=True)

    wait_for(lambda: len(family()) > 1)
    workers = family()
    process.kill()
    process.communicate()
    wait_for(lambda: not any(map(is_alive, workers)), seconds=10)
    assert not (tmp_path / "out").exists()


@pytest.mark.quick
@pytest.mark.parametrize("where", ["/proc/none", "/etc/passwd/run"])
def test_a_directory_that_cannot_be_made_is_refused(shards: Path, where: str) -> None:
    assert "--run-dir" in refused("train", "quickstart", *tiny(shards), "--run-dir", where)


ENDLESS = ("schedule.steps=100000", "log.to=[tensorboard]", "compile=off")


def is_sent(run_dir: Path) -> bool:
    """Return True if steps are logged; from then on only the launcher's signals reach the logging process."""
    return step_reached(run_dir, 2)() and any((run_dir / "tensorboard").rglob("events*"))


def test_a_stop_signal_to_every_process_keeps_the_summary(run_dir: Path, shards: Path) -> None:
    process = begin(shards, run_dir, *ENDLESS)
    wait_for(lambda: is_sent(run_dir))
    family = psutil.Process(process.pid).children(recursive=True)
    assert any("launcher.run.loggers" in member.cmdline() for member in family)
    for member in (process, *family):
        member.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 143, output + errors
    assert "warning" not in output + errors
    summary = read_json(run_dir / "summary.json")
    events = b"".join(path.read_bytes() for path in (run_dir / "tensorboard").rglob("events*"))
    assert f"| summary/step | {summary['step']} |".encode() in events
    assert processes_of(run_dir) == []
