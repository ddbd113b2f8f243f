"""`python -m tests.gpu`: is this machine's GPU right, and how fast is it? Resumable; a table at the end.

Correctness first, then speed, each check in a process of its own, on all GPUs of the machine. Results go to
.gpu/results.jsonl, a line each; a check that has passed there with this code on this GPU is not run again.
The whole record is .gpu/record.json. Exit code 1 when a check has failed, or there was no GPU to look at.

`--short` runs every check on the CPU at tiny size: it shows that the checks work, and nothing of a GPU.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bert_dp import record
from launcher.machine.environment import versions
from tests import resumable
from tests.gpu.checks import CHECKS, CORRECT, VERB_S, Place
from tests.resumable import ROOT

LIMIT_S = VERB_S + 300.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--short", action="store_true", help="on the CPU, at tiny size")
    parser.add_argument("--only", choices=CHECKS, action="append", help="this check; repeatable")
    parser.add_argument("--out", type=Path, default=ROOT / ".gpu", help="default: .gpu")
    parser.add_argument("--one", choices=CHECKS, help=argparse.SUPPRESS)
    parser.add_argument("--devices", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    out = options.out.resolve()
    if options.one:
        return run_one(options.one, out, options.short, options.devices)
    device, devices = ("CPU, short form", 2) if options.short else gpus()
    if not devices:
        print("no GPU that torch can use: nothing was checked.")
        print("`python -m tests.gpu --short` runs the checks themselves on the CPU, at tiny size.")
        return 1
    results = resumable.Results(
        out,
        "check",
        lambda result: not result["problems"],
        code_of=("launcher", "bert_dp", "benchmarks", "tests"),
    )
    for number, name in enumerate(options.only or CHECKS, 1):
        if results.has_passed(name, device=device):
            state = "already done"
        else:
            result = {**run(name, out, options.short, devices), "device": device, "devices": devices}
            results.add(result)
            state = f"{'; '.join(result['problems']) or 'ok'} ({result['seconds']:.0f} s)"
        print(f"[{number}/{len(CHECKS)}] {name}: {state}", flush=True)
    newest = [r for name, r in results.newest.items() if name in CHECKS and r["device"] == device]
    write_record(out, device, devices, newest)
    print_table(newest, device, devices)
    return 1 if any(r["problems"] for r in newest) else 0


def run(name: str, out: Path, short: bool, devices: int) -> dict[str, Any]:
    """One check in a process of its own: what it found, or how it ended."""
    folder = out / "work" / name.replace(" ", "-")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "tests.gpu", "--one", name, "--devices", str(devices), "--out", str(out)]
    start = time.monotonic()
    with subprocess.Popen(
        [*command, *["--short"] * short],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "BERT_DP_CACHE": str(out / "cache")},
        start_new_session=True,
    ) as process:
        code: int | None = None
        try:
            said, _ = process.communicate(timeout=LIMIT_S)
            code = process.returncode
        except BaseException as error:
            os.killpg(process.pid, signal.SIGTERM)  # what it has started too, which would keep the GPUs busy
            said, _ = process.communicate()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
    found = record.read_json(folder / "found.json")
    if code != 0 or found is None:
        how = f"did not end within {LIMIT_S} s" if code is None else f"ended with exit code {code}"
        last = (said.strip().splitlines() or [""])[-1]
        found = {"facts": {}, "problems": [f"the check {how}: {last[-300:]}"], "said": said[-5000:]}
    shutil.rmtree(folder)
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"check": name, **found, "seconds": round(time.monotonic() - start, 1), "date": date}


def run_one(name: str, out: Path, short: bool, devices: int) -> int:
    """In the check's own process."""
    folder = out / "work" / name.replace(" ", "-")
    found = CHECKS[name](Place(devices=devices, short=short, folder=folder))
    record.write_json(folder / "found.json", {"facts": found.facts, "problems": found.problems})
    return 0


def gpus() -> tuple[str, int]:
    """Name of the first GPU that torch can use, and how many there are."""
    import torch

    if not torch.cuda.is_available():
        return "", 0
    return torch.cuda.get_device_name(0), torch.cuda.device_count()


def write_record(out: Path, device: str, devices: int, results: list[dict[str, Any]]) -> None:
    environment = {
        "device": device,
        "devices": devices,
        "cores": os.cpu_count(),
        "commit": resumable.commit(),
        "versions": versions(),
    }
    record.write_json(out / "record.json", {"environment": environment, "checks": results})


def print_table(results: list[dict[str, Any]], device: str, devices: int) -> None:
    print(f"\n{devices} x {device}")
    for result in results:
        kind = "right" if result["check"] in CORRECT else "fast"
        state = "FAILED" if result["problems"] else "ok"
        print(f"{kind:6} {result['check']:24} {state:7} {result['seconds']:6.0f} s")
        for key, value in flat(result["facts"]):
            print(f"         {key} {value:.4g}" if isinstance(value, float) else f"         {key} {value}")
        for problem in result["problems"]:
            print(f"         ! {problem}")


def flat(facts: dict[str, Any], above: str = "") -> list[tuple[str, Any]]:
    """Nested facts as (path, value), without what is null."""
    rows: list[tuple[str, Any]] = []
    for key, value in facts.items():
        path = f"{above} {key}".strip()
        if isinstance(value, dict):
            rows += flat(value, path)
        elif value is not None:
            rows.append((path, value))
    return rows


if __name__ == "__main__":
    sys.exit(main())
