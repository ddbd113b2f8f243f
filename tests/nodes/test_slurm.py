"""configs/slurm.sbatch under a real Slurm: what is saved, requeued and resumed, and what is not."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bert_dp.config import shipped_configs
from bert_dp.files import read_lines
from tests.e2e.cli import step_reached, train, wait_for, write_config
from tests.faults.harness import FULL, broken
from tests.helpers import read_json
from tests.nodes import slurm

SCRIPT = shipped_configs() / "slurm.sbatch"
STEPS = 120
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(slurm.missing()), reason=f"no {', '.join(slurm.missing())}"),
]


class Cluster:
    """A cluster whose jobs run `bert-dp train` with a tenth of a second more a step."""

    def __init__(self, environ: dict[str, str], folder: Path, config: Path):
        self._folder, self._config = folder, config
        programs = str(Path(sys.executable).parent)
        self._environ = {**environ, **broken("slow", rank=0, seconds=0.05), "OMP_NUM_THREADS": "1"}
        self._environ["PATH"] = f"{programs}:{environ['PATH']}"

    def ask(self, *command: str) -> str:
        return slurm.ask(self._environ, *command)

    def submit(self, name: str, *options: str, more: tuple[str, ...] = ()) -> tuple[str, Path]:
        """Submit a training with `more` settings; return the number of the job and the run directory."""
        run_dir = self._folder / name
        log = f"--output={run_dir}.log"
        self._environ["RUN_DIR"] = str(run_dir)
        words = ["--parsable", log, *options, str(SCRIPT), str(self._config), "--nproc", "2", *more]
        return self.ask("sbatch", *words), run_dir

    def fact(self, job: str, name: str) -> str:
        """Return a field of `scontrol show job`."""
        found = re.search(rf"\b{name}=(\S*)", self.ask("scontrol", "show", "job", job))
        return found[1] if found else ""

    def wait(self, job: str, name: str, value: str, seconds: float = 90.0) -> None:
        wait_for(lambda: self.fact(job, name) == value, seconds)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("slurm")
    config = write_config(folder / "made", shards, f"compile=off schedule.steps={STEPS}")
    with slurm.cluster(folder) as environ:
        yield Cluster(environ, folder, config)


def losses(run_dir: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in read_lines(run_dir / "metrics.jsonl")]


def test_preemption_saves_requeues_and_goes_on_as_if_undisturbed(
    cluster: Cluster, shards: Path, tmp_path: Path
) -> None:
    job, run_dir = cluster.submit("preempted")
    wait_for(step_reached(run_dir, 5), seconds=120)
    cluster.ask("sbatch", "--partition=high", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
    cluster.wait(job, "Restarts", "1")
    stopped = read_json(run_dir / "summary.json")
    assert (stopped["status"], stopped["signal"]) == ("stopped", signal.SIGTERM)
    assert 5 <= stopped["step"] < STEPS
    assert stopped["checkpoint"] == f"checkpoints/step-{stopped['step']:08d}"
    cluster.wait(job, "JobState", "COMPLETED")
    end = read_json(run_dir / "summary.json")
    assert (end["status"], end["step"], end["since_step"]) == ("done", STEPS, stopped["step"])
    train(shards, tmp_path / "whole", f"compile=off schedule.steps={STEPS} log.every_steps=1")
    assert losses(run_dir) == losses(tmp_path / "whole")
    name = f"checkpoints/step-{STEPS:08d}/model.safetensors"
    assert (run_dir / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_scancel_saves_and_is_not_requeued_nor_is_a_failure(cluster: Cluster) -> None:
    job, run_dir = cluster.submit("cancelled")
    bad, _ = cluster.submit("bad", more=("schedule.steps=-1",))
    wait_for(step_reached(run_dir, 5), seconds=120)
    cluster.ask("scancel", job)
    wait_for(lambda: not cluster.ask("squeue", "--noheader"))  # both have ended
    stopped = read_json(run_dir / "summary.json")
    assert (stopped["status"], stopped["signal"]) == ("stopped", signal.SIGTERM)
    assert (run_dir / stopped["checkpoint"] / "manifest.json").is_file()
    assert [cluster.fact(job, name) for name in ("JobState", "Restarts")] == ["CANCELLED", "0"]
    facts = [cluster.fact(bad, name) for name in ("JobState", "Restarts", "ExitCode")]
    assert facts == ["FAILED", "0", "2:0"]


def test_the_warning_before_the_time_limit_requeues(cluster: Cluster) -> None:
    """Slurm's own warning comes up to a minute early; here it is sent, and `make nodes` waits for it."""
    limit = ("--time=2", "--signal=USR1@60") if FULL else ()
    job, run_dir = cluster.submit("limited", *limit, more=("schedule.steps=100000",))
    wait_for(step_reached(run_dir, 5), seconds=120)
    if not FULL:
        cluster.ask("scancel", "--signal=USR1", job)
    cluster.wait(job, "Restarts", "1", 150)
    stopped = read_json(run_dir / "summary.json")
    assert (stopped["status"], stopped["signal"]) == ("stopped", signal.SIGUSR1)
    began = len(losses(run_dir))
    wait_for(step_reached(run_dir, began + 1))
    cluster.ask("scancel", job)
    wait_for(lambda: not cluster.ask("squeue", "--noheader"))
    assert read_json(run_dir / "summary.json")["since_step"] == stopped["step"]
