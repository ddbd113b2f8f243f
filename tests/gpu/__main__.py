"""Check that this machine's GPUs train correctly, measure their speed, and print a table.

    python -m tests.gpu [--total SECONDS] [--data SHARDS] [PART...]

Parts run in the order of the list below; `checks` selects parts that measure no time, which run concurrently.
Each part is a process group with a time limit. A part that passed with this code on this device is not run
again. DIR (--out, default .gpu) gets results.jsonl, record.json (the machine and all results), table.txt, and
folders logs/ and raw/. The exit code is 1 if a part failed or was left out, or if there is no GPU.

`--short` runs every part on the CPU at tiny size, which tests the parts but no GPU.
"""

import argparse
import contextlib
import dataclasses
import datetime
import functools
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import gpu, records
from bert_dp import files
from launcher.children import kernel_caches
from tests.gpu import checks
from tests.gpu.checks import Found, Place
from tests.resumable import ROOT, Results

SHORT_LIMIT_S = 600.0  # time limit of a part in the short form, long enough for a busy CPU
GRACE_S = 8.0  # between SIGTERM and SIGKILL
SPARE_S = 5.0  # seconds of --total that are reserved for the table
LARGEST_RAW = 2**21  # bytes; larger records are not kept
KEPT = ("*.json", "*.jsonl", "*.log", "trace.json.gz")


@dataclasses.dataclass(frozen=True)
class Part:
    run: Callable[[Place], Found]
    limit_s: float = 200.0
    least_s: float = 60.0
    """The part is not started if fewer seconds than this remain."""
    side_by_side: bool = False
    """The part may run concurrently with others, because it measures no time."""
    in_short: bool = True
    """The short form includes the part by default."""


def step(limit_s: float, *, in_short: bool = True, **options: Any) -> Part:
    return Part(functools.partial(gpu.step, **options), limit_s, in_short=in_short)


check = functools.partial(Part, side_by_side=True)
PARTS: dict[str, Part] = {
    "machine": Part(gpu.machine, least_s=20),
    "lookup": check(checks.lookup),
    "kernels": check(checks.kernels),
    "engines": check(checks.engines),
    "2-ranks-on-one-gpu": check(functools.partial(checks.one_gpu, ranks=2)),
    "4-ranks-on-one-gpu": check(functools.partial(checks.one_gpu, ranks=4)),
    "finetuning": check(checks.finetuning),
    "host-sync": check(checks.no_host_sync),
    "precisions": check(checks.precisions),
    "resume": check(checks.resume),
    "failures": check(checks.cards),
    "deepspeed": check(checks.deepspeed),
    "compile": check(gpu.compile_kernels),
    "rates": Part(gpu.rates, 90, 20),
    "step": step(240, variants=",".join((*gpu.VARIANTS, "matmul:eager"))),
    "bert": step(120, variants="ours:regions,bert:whole", micro=128, in_short=False),
    "profile": Part(gpu.profile, 110, 40),
    "pretrain": Part(gpu.pretrain, 330, 95),
    "timers": Part(checks.timers, 60, 30),
    "tune": Part(gpu.tune, 260, 110),
    "micro-512": step(
        120, variants="ours:regions,ours:narrow,matmul:eager", micro=512, accumulation=2, in_short=False
    ),
    "optimizers": Part(gpu.optimizers, 60, 20),
    "length-512": step(
        240, variants="ours:regions,modernbert:whole,matmul:eager", micro=32, sequence=512, in_short=False
    ),
    "tune-512": Part(functools.partial(gpu.tune, length=512), 260, 110, in_short=False),
    "scale": Part(gpu.scale, 900, 200),
    "trainer": Part(gpu.trainer, 400, 200, in_short=False),
}
CHECKS = tuple(name for name, part in PARTS.items() if part.side_by_side)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"checks, {', '.join(PARTS)} (default: all)")
    parser.add_argument("--short", action="store_true", help="run on the CPU at tiny size")
    parser.add_argument(
        "--total", type=float, default=math.inf, metavar="SECONDS", help="time limit of all parts"
    )
    parser.add_argument("--began", type=float, default=time.time(), help="start of --total in epoch seconds")
    parser.add_argument("--data", type=Path, metavar="SHARDS", help="real text (default: the built-in text)")
    parser.add_argument("--out", type=Path, default=ROOT / ".gpu", metavar="DIR", help="default: .gpu")
    parser.add_argument("--one", type=float, metavar="SECONDS", help=argparse.SUPPRESS)
    parser.add_argument("--devices", type=int, help=argparse.SUPPRESS)
    o = parser.parse_args()
    o.out = o.out.resolve()
    default = [name for name, part in PARTS.items() if part.in_short or not o.short]
    names = [name for word in o.parts or default for name in (CHECKS if word == "checks" else (word,))]
    if unknown := set(names) - set(PARTS):
        parser.error(f"PART: {', '.join(sorted(unknown))}: choose from checks, {', '.join(PARTS)}")
    if o.data is not None and not (o.data / "manifest.json").exists():
        parser.error(f"--data: {o.data} contains no shards; make them with `bert-dp data build`")
    if o.one:
        return run_part(names[0], o)
    device, o.devices = ("CPU, short form", 2) if o.short else gpus()
    if not o.devices:
        print("no GPU that torch can use: nothing was checked.")
        print("`python -m tests.gpu --short` runs the parts on the CPU at tiny size.")
        return 1
    return run_parts(list(dict.fromkeys(names)), device, o)


def run_parts(names: list[str], device: str, o: argparse.Namespace) -> int:
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))  # makes start_parts end its parts
    deadline = time.monotonic() + o.total - (time.time() - o.began) - SPARE_S
    results = Results(
        o.out, "part", lambda line: line["ok"], code_of=("launcher", "bert_dp", "benchmarks", "tests")
    )
    os.environ["BERT_DP_CACHE"] = str(o.out / "cache")
    os.environ.update(kernel_caches())
    facts = {"device": device, "devices": o.devices}
    waiting = [name for name in names if not results.has_passed(name, device=device)]
    for name in names:
        if name not in waiting:
            print(f"{name}: already done", flush=True)
    try:
        for name, result in start_parts(waiting, deadline, o):
            results.add({"part": name, **result, **facts})
            print(f"{name}: {state_of(result)} ({result['seconds']:.0f} s)", flush=True)
    finally:
        newest = [line for name, line in results.newest.items() if name in PARTS and line["device"] == device]
        write_record(o.out, facts, newest)
    done = {line["part"] for line in newest}
    complete = all(name in done for name in names)
    return 0 if complete and not any(line["problems"] for line in newest) else 1


def state_of(result: dict[str, Any]) -> str:
    return "; ".join(result["problems"]) or result["facts"].get("skipped") or "ok"


@dataclasses.dataclass
class Running:
    process: subprocess.Popen[bytes]
    folder: Path
    started: float
    limit_s: float


def start_parts(
    names: list[str], deadline: float, o: argparse.Namespace
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run parts in order, consecutive checks concurrently, and yield each result as soon as its part ends.
    End all running parts when the generator is closed or interrupted."""
    running: dict[str, Running] = {}
    waiting = list(names)
    overlapping = set(PARTS if o.short else CHECKS)
    slots = len(os.sched_getaffinity(0))  # a core per check, because checks are mostly Python and compilation
    try:
        while waiting or running:
            while waiting and (
                not running or (len(running) < slots and overlapping.issuperset([waiting[0], *running]))
            ):
                name, left = waiting.pop(0), deadline - time.monotonic()
                if left < (part := PARTS[name]).least_s and not (o.short and left > SPARE_S):
                    print(f"{name}: left out, only {left:.0f} s of --total remain", flush=True)
                else:
                    running[name] = start(name, min(SHORT_LIMIT_S if o.short else part.limit_s, left), o)
            for name, one in list(running.items()):
                late = time.monotonic() > one.started + one.limit_s
                if one.process.poll() is not None or late:
                    end(one.process)
                    yield name, result_of(name, running.pop(name), late, o.out)
            time.sleep(0.1)
    finally:
        for one in running.values():
            end(one.process)


def start(name: str, limit_s: float, o: argparse.Namespace) -> Running:
    """Start a part in a new process group, with its output in logs/NAME.log."""
    folder = o.out / "work" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (o.out / "logs").mkdir(exist_ok=True)
    command = [sys.executable, "-m", "tests.gpu", name, "--one", str(limit_s), "--devices", str(o.devices)]
    command += ["--out", str(o.out), *["--short"] * o.short, *(["--data", str(o.data)] if o.data else [])]
    environ = {"PYTHONUNBUFFERED": "1"}
    if o.short or name in CHECKS:
        environ |= {"OMP_NUM_THREADS": "2", "TORCHINDUCTOR_COMPILE_THREADS": "4"}
    if o.short:
        environ["TORCH_COMPILE_DISABLE"] = "1"  # compilation would take most of the time
    with (o.out / "logs" / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environ},
            start_new_session=True,
        )
    return Running(process, folder, time.monotonic(), limit_s)


def end(process: subprocess.Popen[bytes]) -> None:
    """End the process group, including processes that a finished leader left running on the GPU."""
    with contextlib.suppress(ProcessLookupError):  # no process of the group is left
        os.killpg(process.pid, signal.SIGTERM)
        until = time.monotonic() + GRACE_S
        while time.monotonic() < until:
            process.poll()
            os.killpg(process.pid, 0)
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def result_of(name: str, one: Running, late: bool, out: Path) -> dict[str, Any]:
    """Return the result of a part that has ended, and copy its records to raw/NAME."""
    found = files.read_json(one.folder / "found.json")
    if found is None or (one.process.returncode != 0 and not late):  # found.json of a late part is complete
        code = one.process.returncode
        how = f"was ended after {one.limit_s:.0f} s" if late else f"ended with exit code {code}"
        error = last_error((out / "logs" / f"{name}.log").read_text(errors="replace"))
        found = {"facts": {}, "problems": [f"{name} {how}: {error}"]}
    raw = out / "raw" / name
    shutil.rmtree(raw, ignore_errors=True)
    for path in (path for pattern in KEPT for path in one.folder.rglob(pattern)):
        if path.stat().st_size <= LARGEST_RAW or path.name == "trace.json.gz":
            (to := raw / path.relative_to(one.folder)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, to)
    shutil.rmtree(one.folder)
    return {
        **found,
        "ok": not found["problems"] and "skipped" not in found["facts"],
        "seconds": round(time.monotonic() - one.started, 1),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def last_error(text: str) -> str:
    """Return the last line of a log that names an error, or the last line if none does."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"(error|exception)\b|^failed", line, re.IGNORECASE)]
    return (errors or lines or [""])[-1][-300:]


def run_part(name: str, o: argparse.Namespace) -> int:
    """Run a part in this process and write its result to found.json."""
    folder = o.out / "work" / name
    found = PARTS[name].run(Place(o.devices, o.short, o.one, folder, o.data))
    files.write_json(folder / "found.json", dataclasses.asdict(found))
    return 0


def gpus() -> tuple[str, int]:
    """Return the name of the first GPU that torch can use, and the number of GPUs."""
    import torch

    if not torch.cuda.is_available():
        return "", 0
    return torch.cuda.get_device_name(0), torch.cuda.device_count()


def write_record(out: Path, facts: dict[str, Any], results: list[dict[str, Any]]) -> None:
    """Write record.json and table.txt, and print the table."""
    environment = records.environment(**facts)
    files.write_json(out / "record.json", {"environment": environment, "parts": results})
    lines = list(table(results, f"{facts['devices']} x {facts['device']}"))
    (out / "table.txt").write_text("\n".join(lines) + "\n")
    print("", *lines, sep="\n", flush=True)


def table(results: list[dict[str, Any]], title: str) -> Iterator[str]:
    yield title
    for result in sorted(results, key=lambda result: list(PARTS).index(result["part"])):
        state = "FAILED" if result["problems"] else "skipped" if "skipped" in result["facts"] else "ok"
        yield f"{result['part']:20} {state:7} {result['seconds']:5.0f} s"
        yield from (f"    {line}" for line in rows(result["facts"]))
        yield from (f"    ! {problem}" for problem in result["problems"])


def rows(facts: dict[str, Any], above: str = "") -> Iterator[str]:
    """Yield a line with the plain values of each (nested) dictionary."""
    plain = [
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in facts.items()
        if value is not None and not isinstance(value, dict)
    ]
    if plain:
        yield f"{above}: {', '.join(plain)}" if above else ", ".join(plain)
    for key, value in facts.items():
        if isinstance(value, dict):
            yield from rows(value, f"{above} {key}".strip())


if __name__ == "__main__":
    sys.exit(main())
