"""Test configs/slurm.sbatch under a real Slurm: saving, requeueing and resuming of jobs."""

import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bert_dp.config import shipped_configs
from bert_dp.files import read_lines
from tests.e2e.cli import step_reached, wait_for, write_config
from tests.faults.harness import broken
from tests.helpers import read_json
from tests.nodes.harness import FULL
from tests.nodes.slurm import Slurm, missing, slurm

SCRIPT = shipped_configs() / "slurm.sbatch"
STEPS = 80
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing())]


class Jobs:
    """Slurm jobs that train, slowed by a tenth of a second per step."""

    def __init__(self, controller: Slurm, config: Path):
        self.slurm, self._config = controller, config
        programs = f"{Path(sys.executable).parent}:{controller.environ['PATH']}"
        controller.environ |= broken("slow", rank=0, seconds=0.05)
        controller.environ |= {"OMP_NUM_THREADS": "1", "PATH": programs}

    def submit(self, name: str, *options: str, more: tuple[str, ...] = ()) -> tuple[str, Path]:
        """Submit a run with `more` settings; return the number of the job and the run directory."""
        run_dir = self.slurm.folder / name
        words = ["--parsable", f"--output={run_dir}.log", *options, str(SCRIPT), str(self._config), *more]
        return self.slurm.ask("sbatch", *words, RUN_DIR=str(run_dir)), run_dir

    def fact(self, job: str, name: str) -> str:
        """Return a field of `scontrol show job`."""
        found = re.search(rf"\b{name}=(\S*)", self.slurm.ask("scontrol", "show", "job", job))
        return found[1] if found else ""

    def wait(self, job: str, name: str, value: str, seconds: float = 180.0) -> None:
        wait_for(lambda: self.fact(job, name) == value, seconds)

    def wait_for_all(self) -> None:
        wait_for(lambda: not self.slurm.ask("squeue", "--noheader"), 180.0)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> Iterator[Jobs]:
    folder = tmp_path_factory.mktemp("slurm")
    config = write_config(folder / "made", shards, f"compile=off schedule.steps={STEPS}")
    with slurm(folder) as controller:
        yield Jobs(controller, config)


def losses(run_dir: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in read_lines(run_dir / "metrics.jsonl")]


def test_a_preempted_job_is_saved_requeued_and_resumed_bit_equal(jobs: Jobs) -> None:
    """The job has two nodes, which Slurm stops and starts together."""
    undisturbed, whole = jobs.submit("whole", "--nodes=2", more=("--nproc", "1"))
    job, run_dir = jobs.submit("preempted", "--nodes=2", f"--dependency={undisturbed}", more=("--nproc", "1"))
    wait_for(step_reached(run_dir, 5), seconds=180)
    jobs.slurm.ask("sbatch", "--partition=high", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
    jobs.wait(job, "Restarts", "1")
    stopped = read_json(run_dir / "summary.json")
    assert (stopped["status"], stopped["signal"]) == ("stopped", signal.SIGTERM)
    assert 5 <= stopped["step"] < STEPS
    assert stopped["checkpoint"] == f"checkpoints/step-{stopped['step']:08d}"
    jobs.wait(job, "JobState", "COMPLETED", 240.0)
    end = read_json(run_dir / "summary.json")
    assert (end["status"], end["step"], end["since_step"]) == ("done", STEPS, stopped["step"])
    assert losses(run_dir) == losses(whole)
    name = f"checkpoints/step-{STEPS:08d}/model.safetensors"
    assert (run_dir / name).read_bytes() == (whole / name).read_bytes()


def test_a_cancelled_job_is_saved_and_neither_it_nor_a_failed_job_is_requeued(jobs: Jobs) -> None:
    job, run_dir = jobs.submit("cancelled")
    bad, _ = jobs.submit("bad", more=("schedule.steps=-1",))
    wait_for(step_reached(run_dir, 5), seconds=180)
    jobs.slurm.ask("scancel", job)
    jobs.wait_for_all()
    stopped = read_json(run_dir / "summary.json")
    assert (stopped["status"], stopped["signal"]) == ("stopped", signal.SIGTERM)
    assert (run_dir / stopped["checkpoint"] / "manifest.json").is_file()
    assert [jobs.fact(job, name) for name in ("JobState", "Restarts")] == ["CANCELLED", "0"]
    facts = [jobs.fact(bad, name) for name in ("JobState", "Restarts", "ExitCode")]
    assert facts == ["FAILED", "0", "2:0"]


def test_the_warning_before_the_time_limit_requeues_a_job(jobs: Jobs) -> None:
    """Slurm may send its warning a minute early. CI sends the signal itself; `make nodes` waits for Slurm."""
    limit = ("--time=2", "--signal=USR1@60") if FULL else ()
    job, run_dir = jobs.submit("limited", *limit, more=("schedule.steps=100000",))
    wait_for(step_reached(run_dir, 5), seconds=180)
    if not FULL:
        jobs.slurm.ask("scancel", "--signal=USR1", job)
    jobs.wait(job, "Restarts", "1")
    stopped = read_json(run_dir / "summary.json")
    assert (stopped["status"], stopped["signal"]) == ("stopped", signal.SIGUSR1)
    began = len(losses(run_dir))
    wait_for(step_reached(run_dir, began + 1), seconds=180)
    jobs.slurm.ask("scancel", job)
    jobs.wait_for_all()
    assert read_json(run_dir / "summary.json")["since_step"] == stopped["step"]


@pytest.mark.skipif(not FULL, reason="takes minutes, so it runs in make nodes")
@pytest.mark.parametrize("lost", [0, 1])
def test_a_job_that_loses_a_node_is_requeued(jobs: Jobs, lost: int) -> None:
    job, run_dir = jobs.submit(f"lost-{lost}", "--nodes=2", more=("--nproc", "1", "run.hang_after_s=6"))
    wait_for(step_reached(run_dir, 5), seconds=180)
    for process in jobs.slurm.cluster.on(lost):
        process.kill()
    jobs.wait(job, "Restarts", "1")
    jobs.slurm.start_node(lost)
    jobs.wait(job, "JobState", "COMPLETED", 240.0)
    assert read_json(run_dir / "summary.json")["status"] == "done"
