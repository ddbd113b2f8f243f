"""Row 11: the disk of the run directory is full, so that no record can be written either."""

import contextlib
import sys
import time
from pathlib import Path

import pytest

from bert_dp import files
from tests.e2e.cli import begin, command, step_reached, train_command, wait_for
from tests.faults.harness import needs_mount, on_small_disk
from tests.helpers import logged, read_lines


def fill(filler: Path) -> None:
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass


def fill_and_free(place: Path, shards: Path) -> None:
    """Fill the small file system while the run trains, free it, and check that the run completes."""
    run_dir, filler = place / "run", place / "filler"
    process = begin(shards, run_dir, "schedule.steps=400", "checkpoint.every_steps=20", "compile=off")
    wait_for(step_reached(run_dir, 5), 300)
    fill(filler)
    seen = len(read_lines(run_dir / "metrics.jsonl"))

    def step() -> int:
        beat = files.read_heartbeat(files.heartbeat_path(run_dir, 0))
        return beat.step if beat else 0

    wait_for(lambda: process.poll() is not None or step() > seen + 60)
    filler.unlink()
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, output + errors
    assert " to metrics.jsonl: " in output
    steps = logged(run_dir, "step")
    assert steps == sorted(set(steps))
    assert steps[-1] == 400
    assert len(steps) < 400
    summary = files.read_json(run_dir / "summary.json") or {}
    assert (summary["status"], summary["step"]) == ("done", 400)
    assert summary["checkpoint"] == "checkpoints/step-00000400"
    assert summary["failed_writes"] > 0


def fill_and_stay(place: Path, shards: Path) -> None:
    """Fill the file system until the end of the run: all steps complete, and the last checkpoint fails."""
    run_dir, filler = place / "run", place / "filler"
    process = begin(shards, run_dir, "schedule.steps=40", "checkpoint.every_steps=10", "compile=off", nproc=1)
    wait_for(step_reached(run_dir, 3), 300)
    fill(filler)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 1, output + errors
    assert "Traceback" not in output + errors, output + errors
    beat = files.read_heartbeat(files.heartbeat_path(run_dir, 0))
    assert beat.step == 40
    first = next(line for line in output.splitlines() if line.startswith("failed: "))
    assert "No space left on device" in first
    warnings = [line for line in output.splitlines() if line.startswith("warning: ")]
    assert sum("to metrics.jsonl" in line for line in warnings) <= 1, output
    assert sum("could not be saved" in line for line in warnings) <= 1, output


@needs_mount
@pytest.mark.parametrize("how", ["free", "stay"])
def test_row_11_a_full_disk_does_not_end_the_run(tmp_path: Path, shards: Path, how: str) -> None:
    place = tmp_path / "small"
    command = (sys.executable, "-m", "tests.faults.test_full_disk", str(place), str(shards), how)
    done = on_small_disk(place, "6m", *command)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_mount
def test_row_11_a_start_on_a_full_disk_names_the_error(tmp_path: Path, shards: Path) -> None:
    place = tmp_path / "small"
    fill = ("sh", "-c", 'head -c 1m /dev/zero > "$0/filler"; exec "$@"', str(place))
    done = on_small_disk(place, "40k", *fill, *command(*train_command(shards, place / "run")))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "No space left on device" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


if __name__ == "__main__":
    started = time.monotonic()
    {"free": fill_and_free, "stay": fill_and_stay}[sys.argv[3]](Path(sys.argv[1]), Path(sys.argv[2]))
    sys.stdout.write(f"{time.monotonic() - started:.0f} s\n")
