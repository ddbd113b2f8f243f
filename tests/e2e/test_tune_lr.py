"""Test `bert-dp tune lr` on real trials: resume after an interrupt and a kill, and train with the result."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cli import accepted, bert_dp, interrupted, refused, tiny, trials_done
from tests.helpers import logged, read_json, read_lines

STEPS, STEP = 32, 128  # steps of the configured run; tokens per step


def command(shards: Path, out: Path, *more: str) -> list[str]:
    options = [*tiny(shards, f"schedule.steps={STEPS}"), *"--rates 3 --seeds 1".split()]
    return ["tune", "lr", "quickstart", *options, "--out", str(out), *more]


@pytest.fixture(scope="module")
def out(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a search that got Ctrl-C in its second trial, was killed later, and then completed."""
    folder = tmp_path_factory.mktemp("tuning") / "out"
    search = command(shards, folder)
    stopped = interrupted(search, folder, signal.SIGINT, lambda: trials_done(folder))
    assert stopped.returncode == 130
    assert "the same command resumes" in stopped.stdout
    partial = read_json(folder / "tune.json")
    assert (partial["status"], partial["choice"]) == ("partial", None)
    assert not (folder / "tuned.yaml").exists()
    before = trials_done(folder)
    killed = interrupted(search, folder, signal.SIGKILL, lambda: len(trials_done(folder)) >= len(before) + 2)
    assert killed.returncode == -signal.SIGKILL
    before |= trials_done(folder)
    assert "trials already done" in bert_dp(*search).stdout
    assert before.items() <= trials_done(folder).items(), "a completed trial ran again"
    return folder


@pytest.fixture(scope="module")
def tune(out: Path) -> dict[str, Any]:
    return read_json(out / "tune.json")


def test_the_choice_follows_from_the_records_of_the_trials(tune: dict[str, Any], out: Path) -> None:
    assert (tune["status"], tune["kind"], tune["ranks"]) == ("complete", "lr", 1)
    rungs = tune["rungs"]
    first, last = rungs[0], rungs[-1]
    assert (first["tokens"], last["tokens"]) == (STEPS // 8 * STEP, STEPS * STEP)
    for trial in [trial for rung in rungs for trial in rung["trials"]]:
        directory = out / "trials" / trial["name"]
        summary = read_json(directory / "summary.json")
        assert trial["heldout_loss"] == summary["heldout_loss"]
        assert trial["tokens"] == summary["tokens"]
        (line,) = read_lines(directory / "evals.jsonl")
        assert line["loss"] == trial["heldout_loss"]
        rates = logged(directory, "lr")
        count = trial["tokens"] // STEP  # the schedule is a triangle over the trial's own budget
        factors = [min(0.25 + k / count, 4 * (1 - k / count)) for k in range(count)]
        assert rates == pytest.approx([trial["lr"] * factor for factor in factors])
        assert not list((directory / "checkpoints").glob("step-*"))
    best = min(last["trials"], key=lambda trial: trial["heldout_loss"])
    assert tune["choice"]["lr"] == best["lr"]
    assert tune["choice"]["heldout_loss"] == best["heldout_loss"]
    losses = {trial["lr"]: trial["heldout_loss"] for trial in first["trials"]}
    assert {trial["lr"] for trial in last["trials"]} >= set(sorted(losses, key=lambda rate: losses[rate])[:2])
    edge = tune["range_test"]["edge"]
    assert edge is None or max(trial["lr"] for trial in first["trials"]) <= edge
    rising = [rate for rate, _ in tune["range_test"]["points"]]
    assert rising[0] == pytest.approx(1e-4)
    assert rising == sorted(rising)


def test_a_complete_search_runs_nothing_again(shards: Path, out: Path, tune: dict[str, Any]) -> None:
    before = trials_done(out)
    printed = json.loads(accepted(*command(shards, out, "--json")))
    assert (printed["choice"], printed["rungs"]) == (tune["choice"], tune["rungs"])
    assert trials_done(out) == before
    other = refused(*command(shards, out, "--seeds", "2"))
    assert "contains another search (settings.seeds: " in other


def test_the_tuned_configuration_repeats_its_trial(out: Path, tune: dict[str, Any], tmp_path: Path) -> None:
    run, choice, affinity = tmp_path / "run", tune["choice"], os.sched_getaffinity(0)
    (best,) = (trial for trial in tune["rungs"][-1]["trials"] if trial["lr"] == choice["lr"])
    worker = read_json(out / "trials" / best["name"] / "environment.json")["worker"]
    os.sched_setaffinity(0, sorted(affinity)[: worker["threads_per_rank"]])  # rounding depends on threads
    try:
        bert_dp("train", str(out / "tuned.yaml"), "--nproc", "1", "--run-dir", str(run))
    finally:
        os.sched_setaffinity(0, affinity)
    rates = logged(run, "lr")
    assert len(rates) == STEPS
    assert max(rates) == pytest.approx(choice["lr"], rel=0.1)
    assert read_json(run / "summary.json")["heldout_loss"] == choice["heldout_loss"]


@pytest.mark.quick
def test_a_dry_run_and_bad_input_start_nothing(shards: Path, tmp_path: Path) -> None:
    assert "3 rates, a factor of 2 apart" in accepted(*command(shards, tmp_path / "out", "--dry-run"))
    assert not (tmp_path / "out").exists()
    bad = refused(*command(shards, tmp_path, "--tokens", "5"))
    assert "error: --tokens: 5 tokens make fewer than 8 steps" in bad
    (tmp_path / "mine.txt").write_text("x")
    assert "is not empty and contains no search" in refused(*command(shards, tmp_path))
