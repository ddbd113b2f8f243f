"""Row 25: clocks that jump, logs that are too large for memory, and metrics of a million steps."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

from tests.e2e.cli import begin, train
from tests.e2e.test_launchers import with_site
from tests.faults.harness import FULL, observe
from tests.helpers import read_json, read_lines
from tests.report_fixture import metrics

GROWTH_MB = 50
IS_BERT_DP = 'any(word in ("bert_dp.worker", "launcher") for word in sys.orig_argv)'
# the wall clock runs backwards, a hundred times as fast, and starts in another year
CLOCK = f"""
import sys, time
if {IS_BERT_DP}:
    real, real_ns, origin = time.time, time.time_ns, time.time()
    time.time = lambda: 4e8 - 100 * (real() - origin)
    time.time_ns = lambda: int(time.time() * 1e9)
"""
SECRET = "s3cret-in-a-log"
FLOOD = """
import os, sys
if os.environ.get("RANK") == "0" and "bert_dp.worker" in sys.orig_argv:
    from bert_dp.tasks import mlm
    class Flooding(mlm.MaskedLanguageModel):
        left = int(os.environ["FLOOD_BYTES"])
        def num_targets(self, first_sample, count):
            part = b"".join(b"line %06d of a library that prints too much\\n" % i for i in range(20_000))
            while self.left > 0:
                os.write(1, part)
                print(os.environ["FLOOD_TOKEN"], end="", flush=True)
                self.left -= len(part)
            return super().num_targets(first_sample, count)
    mlm.make_task = Flooding
"""
# VmHWM instead of ru_maxrss, which a process inherits from its parent
PEAK = """
import sys
def peak_mb():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 1e3
"""


def test_row_25_a_clock_that_jumps_changes_nothing(tmp_path: Path, run_dir: Path, shards: Path) -> None:
    train(shards, run_dir, "schedule.steps=5", "compile=off", nproc=1, PYTHONPATH=with_site(tmp_path, CLOCK))
    written = read_lines(run_dir / "metrics.jsonl")
    elapsed = [line["elapsed_s"] for line in written]
    assert len(written) == 5
    assert elapsed == sorted(elapsed)
    assert all(line["step_time_s"] > 0 for line in written)
    assert all(s >= 0 for s in read_json(run_dir / "summary.json")["time_s"].values())


def many_lines(path: Path, count: int) -> None:
    """Write metrics.jsonl of `count` steps with one loss spike."""
    line = metrics(0)
    with path.open("w", encoding="utf-8") as file:
        for step in range(1, count + 1):
            loss = 99.0 if step == count // 3 else 10 - 5 * step / count
            changes = {"tokens": step * 128, "loss": loss, "progress": step / count, "elapsed_s": step / 8}
            file.write(json.dumps({**line, "step": step, **changes}) + "\n")


def growth_mb(code: str, *arguments: str) -> float:
    """Return the growth of a process's peak memory, in MB, while it runs `code` after its imports."""
    imports, _, work = code.partition("---\n")
    whole = f"{PEAK}{imports}before = peak_mb()\n{work}print(peak_mb() - before)\n"
    done = subprocess.run(
        [sys.executable, "-c", whole, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return float(done.stdout.splitlines()[-1])


def test_row_25_a_million_steps_are_reported_and_cut_back_in_little_memory(tmp_path: Path) -> None:
    count = 10**6 if FULL else 5 * 10**4
    many_lines(tmp_path / "metrics.jsonl", count)
    size = (tmp_path / "metrics.jsonl").stat().st_size
    start = time.monotonic()
    report = growth_mb(
        "from pathlib import Path\nfrom launcher.report import html, run_page\n"
        "import yaml, jinja2, plotly\n---\n"
        "run = Path(sys.argv[1])\nhtml.write(run_page.of_directories([run]), run / 'report.html')\n",
        str(tmp_path),
    )
    assert "training: 99.0000 nats" in (tmp_path / "report.html").read_text()  # the spike stays visible
    cut = growth_mb(
        "from pathlib import Path\nfrom bert_dp import files\n---\n"
        "files.cut_back(Path(sys.argv[1]), int(sys.argv[2]))\n",
        str(tmp_path / "metrics.jsonl"),
        str(count - 10),
    )
    with (tmp_path / "metrics.jsonl").open("rb") as file:
        assert sum(1 for _ in file) == count - 10
    seconds = time.monotonic() - start
    observe(25, lines=count, megabytes=size / 1e6, report_mb=report, cut_back_mb=cut, seconds=seconds)
    assert report < GROWTH_MB
    assert cut < GROWTH_MB


def test_row_25_a_log_of_gigabytes_does_not_fill_the_launchers_memory(tmp_path: Path, shards: Path) -> None:
    """Rank 0 floods its log, which the console follows, and prints a secret between the lines."""
    num_bytes = 2 * 10**9 if FULL else 2 * 10**8
    run_dir = tmp_path / "run"
    environ = {"PYTHONPATH": with_site(tmp_path, FLOOD), "FLOOD_BYTES": str(num_bytes), "FLOOD_TOKEN": SECRET}
    with (tmp_path / "out").open("w") as out:  # a full pipe would block the launcher
        process = begin(shards, run_dir, "compile=off", nproc=1, stdout=out, **environ)
        log, first, peak = run_dir / "logs" / "rank-0.log", 0.0, 0.0
        launcher = psutil.Process(process.pid)
        while process.poll() is None:
            try:
                now = launcher.memory_info().rss / 1e6
            except psutil.Error:
                break
            if not log.exists() or log.stat().st_size < 10**5:
                first = now
            peak = max(peak, now)
            time.sleep(0.02)
        process.communicate()
    assert process.returncode == 0, (tmp_path / "out").read_text()[-2000:]
    assert log.stat().st_size > num_bytes
    observe(25, log_mb=log.stat().st_size / 1e6, launcher_growth_mb=peak - first)
    assert peak - first < GROWTH_MB
    done = subprocess.run(["grep", "-c", SECRET, str(log)], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "0"
    assert os.path.getsize(tmp_path / "out") < num_bytes / 10  # the console shows only a part of the log
