"""Tests of the memory check: which estimates are refused and which only give a warning."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from bert_dp.config import Config, ConfigError, load_config, resolve
from bert_dp.cost import rank_memory_gib
from launcher import job
from launcher.machine import environment
from launcher.machine.environment import Environment, Gpu
from launcher.run import train
from launcher.run.restarts import RunOptions

OPTIONS = ("run.device=cpu", "precision=fp32", "batch.micro_size=32")
MACHINE = environment.probe()


def small() -> Config:
    return load_config(job.find_config("quickstart"), OPTIONS)


def host(gib: float) -> Environment:
    return dataclasses.replace(MACHINE, memory_available_gib=gib, memory_limit_gib=None, gpus=())


Dry = Callable[..., tuple[tuple[str, ...], str]]


@pytest.fixture
def dry_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Dry:
    """Return a function that dry-runs the quickstart on a machine and returns (issues, output)."""

    def run(
        machine: Environment, *more: str, ranks: int = 2, force: bool = False, device: str = "cpu"
    ) -> tuple[tuple[str, ...], str]:
        monkeypatch.setattr(environment, "probe", lambda *_: machine)
        run_dir, console = tmp_path / "run", Console(width=400)
        loaded = job.load(None, [*OPTIONS, f"run.device={device}", *more], run_dir)
        options = RunOptions(str(ranks), run_dir, dry_run=True, force=force)
        issues: tuple[str, ...] = ()
        try:
            assert train.train(loaded, options, console) == 0
        except ConfigError as error:
            issues = tuple(map(str, error.issues))
        assert not run_dir.exists()
        return issues, capsys.readouterr().out

    return run


PARTS = rank_memory_gib(small(), "fp32", 2, on_gpu=False)
TOTAL = sum(PARTS.values())


def test_a_model_whose_state_alone_is_too_large_is_refused(dry_run: Dry) -> None:
    state = sum(PARTS[name] for name in train.MEMORY_STATE)
    huge = ("model.num_layers=10000", "model.hidden_size=4096", "model.num_heads=32")
    for gib, settings in ((2 * state * 0.99, ()), (64.0, huge)):
        (issue,), output = dry_run(host(gib), *settings)
        assert "--force" in issue
        assert "memory  about" in output, "a refused dry run prints the estimate"


@pytest.mark.parametrize(
    ("times", "refused", "warned"), [(1.26, 1, 0), (1.24, 0, 1), (1.01, 0, 1), (0.99, 0, 0)]
)
def test_each_rank_may_use_a_share_of_the_host(dry_run: Dry, times: float, refused: int, warned: int) -> None:
    issues, output = dry_run(host(2 * TOTAL / times))
    lines = [line for line in output.splitlines() if line.startswith("warning: batch.micro_size")]
    assert (len(issues), len(lines)) == (refused, warned)
    for line in (*issues, *lines):
        assert "host memory, shared by 2 ranks" in line
        match = re.search(r"batch.micro_size=(\d+)", line)
        assert match is not None, line
        batch = {"micro_size": int(match[1])}
        smaller = resolve([small().model_dump(mode="json"), {"batch": batch}])
        assert sum(rank_memory_gib(smaller, "fp32", 2, on_gpu=False).values()) < TOTAL / times


def test_force_turns_the_refusal_into_a_warning(dry_run: Dry) -> None:
    for gib in (1e-6, 2 * TOTAL / 2):
        issues, output = dry_run(host(gib), force=True)
        assert issues == ()
        assert len([line for line in output.splitlines() if line.startswith("warning: ")]) == 1


def test_the_estimate_is_compared_with_the_free_memory_of_a_gpu(dry_run: Dry) -> None:
    def machine(free: float | None, total: float | None = 100.0) -> Environment:
        gpus = (Gpu(0, "a", total, None, free_gib=free), Gpu(1, "a", total, None, free_gib=100.0))
        return dataclasses.replace(host(1e-6), gpus=gpus)

    assert dry_run(machine(50.0), device="cuda")[0] == ()
    issues, _ = dry_run(machine(0.01), device="cuda")
    assert "of GPU 0" in issues[0] or "a rank has 0.0 GiB" in issues[0]
    assert dry_run(machine(0.01), device="cuda", ranks=1)[0]
    assert dry_run(machine(None, None), device="cuda", ranks=1)[0] == (), (
        "unknown GPU memory gives no warning"
    )
