"""Runs the grid: one real run per cell and repeat, then the links, one rank's profile, the matmul rate."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bert_dp import record
from bert_dp.config import ConfigError, dump_config
from launcher import processes, results, watch
from launcher.display import complain
from launcher.report.numbers import format_duration, format_si
from launcher.scaling.grid import Cell, Grid
from launcher.scaling.raw import ended, read_summary, result, run_dir

Say = Callable[[str], None]

SWEEP = tuple(4**k for k in range(6, 14))  # bytes: 4 KiB to 64 MiB
LINK_S = 0.3  # per size
HELPER_TIMEOUT_S = 900.0
PROGRESS_S = 30.0
SCRATCH = ".scratch"


class Stopped(Exception):
    """A signal came; `number` says which."""

    def __init__(self, number: int):
        self.number = number


def run_grid(grid: Grid, out: Path, *, on_gpu: bool, say: Say) -> None:
    """Every run that has not ended yet. A cell that failed or ran out of memory is not repeated: that is its
    result. Raises Stopped."""
    todo = list(grid.order(len(grid.cells)))
    begun, done = time.monotonic(), 0
    states = {pair: result(grid, pair[0], run_dir(out, *pair))[0] for pair in todo}
    left = [pair for pair in todo if states[pair] is None]
    if len(left) < len(todo):
        say(f"going on: {len(todo) - len(left)} of {len(todo)} runs are there")
    for place, (cell, repeat) in enumerate(todo, 1):
        if states[cell, repeat] is not None:
            continue
        if any(states.get((cell, r)) in ("oom", "failed") for r in range(grid.settings.repeats)):
            left.remove((cell, repeat))
            continue
        told = run_cell(grid, cell, run_dir(out, cell, repeat), on_gpu=on_gpu, say=say)
        states[cell, repeat] = ended(run_dir(out, cell, repeat))
        done += 1
        rest = (time.monotonic() - begun) / done * max(0, len(left) - done)
        say(f"[{place}/{len(todo)}] {cell.id} repeat {repeat}: {told}; left {format_duration(rest)}")
    for (cell, repeat), how in states.items():
        if how in ("oom", "failed"):
            say(f"{cell.id}: {how}; to run it again remove {run_dir(out, cell, repeat)}")


def run_cell(grid: Grid, cell: Cell, directory: Path, *, on_gpu: bool, say: Say) -> str:
    """One run, and how it went in words. Raises Stopped."""
    if directory.exists():
        shutil.rmtree(directory)
    directory.mkdir(parents=True, mode=0o700)
    config = grid.config_of(cell)
    record.write_text(directory / "config.yaml", dump_config(config))
    watched = watch.Watch(
        directory, say, hang_after_s=config.run.hang_after_s, end_hung_after_s=config.run.end_hung_after_s
    )
    steps = grid.settings.warm_up + grid.settings.steps
    progress = Progress(directory, cell.id, steps, say)
    with record.HeldDirectory(directory) as held:
        result = processes.run(
            held,
            cell.world_size,
            "never",
            progress,
            launcher=grid.settings.launcher,
            on_gpu=on_gpu,
            watch=watched,
            cores=None if on_gpu else cores_of(cell.world_size, max(grid.settings.gpus)),
        )
    if result.signal:
        raise Stopped(result.signal)
    how = ended(directory)
    if how != "ok":
        return f"{how}: {result.failure.headline() if result.failure else 'no cause known'}"
    summary = read_summary(directory)
    rate = format_si(summary.tokens_per_s if summary else None, "tokens/s")
    return f"{rate} over {cell.world_size} ranks, warm-up included"


class Progress:
    """Called several times a second while a run goes on: says now and then how far it is."""

    def __init__(self, directory: Path, name: str, steps: int, say: Say, every_s: float = PROGRESS_S):
        self._path, self._name, self._steps, self._say = directory / "metrics.jsonl", name, steps, say
        self._every_s, self._due = every_s, time.monotonic() + every_s
        self._begun = time.monotonic()

    def __call__(self) -> None:
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + self._every_s
        step = 0
        for line in record.read_lines(self._path):
            step = line["step"]
        running = format_duration(now - self._begun)
        self._say(f"  {self._name}: step {step} of {self._steps}, running for {running}")


def cores_of(ranks: int, most: int) -> list[int]:
    """The cores that `ranks` CPU ranks may use so that each has as many as one of `most` ranks: on a CPU the
    device is a share of the cores. All of them when there are fewer cores than ranks."""
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // most
    return cores[: ranks * share] if share else cores


def measure_links(grid: Grid, out: Path, say: Say) -> None:
    """links-N.json: all-reduces over each number of ranks, at a sweep of sizes and DDP's real buckets."""
    for count in sorted({c.world_size for c in grid.cells if c.world_size > 1}):
        path = out / f"links-{count}.json"
        if (link := results.find(path, results.Link)) is not None and link.points:
            continue
        buckets = bucket_sizes(grid, out, count)
        sizes = sorted({*SWEEP, *buckets})
        say(f"links: all-reduce over {count} ranks at {len(sizes)} sizes")
        arguments = [str(count), str(LINK_S), *map(str, sizes)]
        lines = helper("bert_dp.measure.all_reduce", arguments, out, cores=None)
        points = [
            results.LinkPoint(
                bytes=p["bytes"],
                seconds=p["seconds_median"],
                busbw_gb_s=p["busbw_gb_s"],
                algbw_gb_s=p["bytes"] / p["seconds_median"] / 1e9,
                repeats=p["repeats"],
                bucket=any(abs(p["bytes"] - size) < 8 for size in buckets),
            )
            for p in lines
        ]
        if points:
            link = results.Link(world_size=count, backend=lines[0]["backend"], points=points)
            results.write(path, link)


def bucket_sizes(grid: Grid, out: Path, count: int) -> list[int]:
    """Bytes of each bucket that DDP reduced over `count` ranks."""
    for cell in grid.cells:
        if cell.world_size == count and cell.kind == "run" and cell.tensor == 1:
            summary = read_summary(run_dir(out, cell, 0))
            if summary is not None and summary.ddp is not None and summary.ddp.bucket_bytes:
                return sorted({*summary.ddp.bucket_bytes})
    return []


def measure_profile(grid: Grid, out: Path, *, on_gpu: bool, say: Say) -> None:
    """profile.json: one rank's step, taken apart."""
    if results.find(out / "profile.json", results.Profile) is not None:
        return
    lone = next(cell for cell in grid.cells if cell.engine == "single")
    config = grid.config_of(lone)
    batch = config.batch.model_copy(update={"global_size": config.batch.micro_size})
    data = config.data.model_copy(update={"synthetic": True})
    path = out / SCRATCH / "profile.yaml"
    path.parent.mkdir(exist_ok=True)
    record.write_text(path, dump_config(config.model_copy(update={"batch": batch, "data": data})))
    say("profile: when each gradient is ready")
    lines = helper("bert_dp.measure.profiling", [str(path)], out, cores=None if on_gpu else _one_share(grid))
    _keep(lines, results.Profile, out / "profile.json")


def measure_peak(grid: Grid, out: Path, *, on_gpu: bool, say: Say) -> None:
    """peak.json: the matmul rate of one rank's device."""
    if results.find(out / "peak.json", results.PeakFile) is not None:
        return
    say("peak: the matmul rate of one device")
    cores = None if on_gpu else _one_share(grid)
    lines = helper("bert_dp.measure.peak", [grid.config.precision, "2"], out, cores=cores)
    _keep(lines, results.PeakFile, out / "peak.json")


def _keep(lines: Sequence[Any], model: type[results.StoredFile], path: Path) -> None:
    """Write the last line that a helper printed; one that contradicts itself is told, and not kept."""
    if lines:
        try:
            results.write(path, results.parse(lines[-1], model, path.name))
        except ConfigError as error:
            complain(f"warning: {error}")


def helper(
    module: str, arguments: Sequence[str], out: Path, cores: Sequence[int] | None
) -> list[dict[str, Any]]:
    """The JSON lines that `python -m module` printed; [] when it failed, which its stderr has told.

    What it leaves behind lies in OUT/.scratch, which goes with it. Raises Stopped for a signal.
    """
    scratch = out / SCRATCH
    scratch.mkdir(exist_ok=True)
    try:
        with processes.stop_signals() as came, processes.confined(cores):
            process = processes.start_module(
                module, list(arguments), stdout=subprocess.PIPE, start_new_session=True, scratch=str(scratch)
            )
            text = _follow(process, came)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if came:
        raise Stopped(came[0])
    if process.returncode:
        complain(f"warning: {module} ended with exit code {process.returncode}")
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def _follow(process: subprocess.Popen[str], came: Sequence[int]) -> str:
    """What it prints, to its end, a signal's or the time's; then none of its processes is left."""
    deadline = time.monotonic() + HELPER_TIMEOUT_S
    while True:
        try:
            return process.communicate(timeout=processes.POLL_S)[0]
        except subprocess.TimeoutExpired:
            if came or time.monotonic() > deadline:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                return process.communicate()[0]


def _one_share(grid: Grid) -> list[int]:
    return cores_of(1, max(grid.settings.gpus))
