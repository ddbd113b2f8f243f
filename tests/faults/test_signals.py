"""Rows 4 to 6: a killed launcher, stop signals, and a stop signal in every phase of a run."""

import random
import signal
import time
from pathlib import Path

import psutil
import pytest
import yaml

from tests.e2e.cli import begin, is_alive, members, step_reached, wait_for
from tests.faults.harness import FULL, broken, observe, rounds
from tests.helpers import logged, read_json, read_lines
from tests.parity.runs import train_runs, write_run

ENDLESS = ("schedule.steps=100000", "checkpoint.every_steps=5", "compile=off")
LOGGED = (*ENDLESS, "log.to=[tensorboard]")  # a child of the launcher sends the records


def scratch_of(process: psutil.Process) -> list[Path]:
    """Return the launcher's temporary directories, which the environment of its children names."""
    return [
        Path(value).parent
        for child in process.children(recursive=True)
        for name, value in child.environ().items()
        if name == "BERT_DP_INIT_FILE"
    ]


@pytest.mark.parametrize(
    ("is_stopped", "full"), [pytest.param(False, 50, marks=pytest.mark.quick), (True, 10)]
)
def test_row_04_no_process_survives(tmp_path: Path, shards: Path, is_stopped: bool, full: int) -> None:
    """A stopped rank, which cannot notice the end of its launcher, and a waiting torchrun are also ended."""
    for number in rounds(1, full):
        run_dir = tmp_path / f"run-{number}"
        process = begin(shards, run_dir, *LOGGED)
        wait_for(step_reached(run_dir, 2 + number % 5))
        assert len(members(run_dir)) == 3  # torchrun and two ranks
        family = psutil.Process(process.pid).children(recursive=True)
        assert any("launcher.run.loggers" in member.cmdline() for member in family)
        scratch = {path for path in scratch_of(psutil.Process(process.pid)) if path.exists()}
        assert len(scratch) == 1
        if is_stopped:
            next(m for m in members(run_dir) if m.environ().get("RANK") == "1").suspend()
        process.kill()
        started = time.monotonic()
        process.communicate()
        wait_for(lambda family=family: not any(map(is_alive, family)), seconds=30)
        observe(4, stopped_rank=is_stopped, seconds=time.monotonic() - started)
        assert not members(run_dir)
        assert not any(path.exists() for path in scratch)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"] if FULL else ["SIGINT"])
def test_row_05_one_signal_saves_a_checkpoint(tmp_path: Path, shards: Path, name: str) -> None:
    """The short form tests SIGINT, because row 6 sends the other signals."""
    number = signal.Signals[name]
    for attempt in rounds(1, 10):
        run_dir = tmp_path / f"run-{attempt}"
        process = begin(shards, run_dir, *ENDLESS)
        family: list[psutil.Process] = []
        wait_for(step_reached(run_dir, 2))
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        started = time.monotonic()
        out, err = process.communicate(timeout=90)
        observe(5, signal=name, seconds=time.monotonic() - started)
        assert process.returncode == 128 + number, out + err
        assert not any(is_alive(p) for p in family)
        summary = read_json(run_dir / "summary.json")
        assert (summary["status"], summary["signal"]) == ("stopped", number)
        assert (run_dir / summary["checkpoint"] / "manifest.json").exists()
        state = read_json(run_dir / summary["checkpoint"] / "state.json")
        assert state["step"] == summary["step"] == read_lines(run_dir / "metrics.jsonl")[-1]["step"]


def test_row_05_a_second_signal_ends_the_run_at_once(tmp_path: Path, shards: Path) -> None:
    for attempt in rounds(1, 10):
        run_dir = tmp_path / f"run-{attempt}"
        process = begin(
            shards, run_dir, *ENDLESS, **broken("sleep", place="step", step=6)
        )  # after one signal, the run would wait for this rank
        wait_for(step_reached(run_dir, 6))
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        time.sleep(1.0)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)  # the second signal may differ from the first
        started = time.monotonic()
        process.communicate(timeout=60)
        observe(5, signal="two", seconds=time.monotonic() - started)
        assert process.returncode in (130, 143)
        assert not any(is_alive(p) for p in family)


PLACES = {  # the step that sleeps in this place, so that the signal arrives during the sleep, and the signal
    "compile": (0, signal.SIGTERM),
    "step": (4, signal.SIGHUP),
    "eval": (4, signal.SIGUSR1),
    "data": (4, signal.SIGTERM),
    "save": (4, signal.SIGTERM),
}


@pytest.mark.parametrize("place", PLACES)
def test_row_06_a_stop_anywhere_leaves_a_valid_checkpoint(tmp_path: Path, shards: Path, place: str) -> None:
    step, number = PLACES[place]
    for attempt in rounds(1, 20):
        run_dir = tmp_path / f"{place}-{attempt}"
        marker = tmp_path / f"{place}-{attempt}-reached"
        pause = 2.0 + random.Random(attempt).random()
        rank = 0 if place == "save" else 1
        fault = broken("sleep", rank=rank, seconds=pause, once=str(marker), place=place, step=step)
        process = begin(shards, run_dir, *ENDLESS, "eval.every_steps=5", **fault)
        wait_for(marker.exists)
        time.sleep(random.Random(attempt + 1).random())
        process.send_signal(number)
        out, err = process.communicate(timeout=90)
        assert process.returncode == 128 + number, out + err
        summary = read_json(run_dir / "summary.json")
        assert (summary["status"], summary["signal"]) == ("stopped", number)
        last = read_lines(run_dir / "metrics.jsonl")[-1]["step"] if summary["step"] else 0
        state = read_json(run_dir / summary["checkpoint"] / "state.json")
        assert state["step"] == summary["step"] == last  # no completed step is lost
        observe(6, place=place, step=summary["step"])
        config = yaml.safe_load((run_dir / "config.yaml").read_text())
        write_run(run_dir, {**config, "schedule": {**config["schedule"], "steps": state["step"] + 2}})
        train_runs(2, [run_dir])
        assert logged(run_dir, "step") == list(range(1, state["step"] + 3))
