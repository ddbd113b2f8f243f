"""`python -m tests.gpu`: is this machine's GPU right, and how fast is it? Resumable; a table at the end.

Correctness first, then speed, each check in a process of its own, on all GPUs of the machine. Results go to
.gpu/results.jsonl, a line each; a check that has passed there with this code on this GPU is not run again.
The whole record is .gpu/record.json. Exit code 1 when a check has failed, or there was no GPU to look at.

`--short` runs every check on the CPU at tiny size: it shows that the checks work, and nothing of a GPU.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bert_dp import record
from launcher.machine.environment import versions
from tests.gpu.checks import CHECKS, CORRECT, Place, read_results

ROOT = Path(__file__).parents[2]
LIMIT_S = 900


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--short", action="store_true", help="on the CPU, at tiny size")
    parser.add_argument("--only", choices=CHECKS, action="append", help="this check; repeatable")
    parser.add_argument("--out", type=Path, default=ROOT / ".gpu", help="default: .gpu")
    parser.add_argument("--one", choices=CHECKS, help=argparse.SUPPRESS)
    parser.add_argument("--devices", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    out = asked.out.resolve()
    if asked.one:
        return run_one(asked.one, out, asked.short, asked.devices)
    device, devices = ("CPU, short form", 2) if asked.short else gpus()
    if not devices:
        sys.stdout.write(
            "no GPU that torch can use: nothing was checked.\n"
            "`python -m tests.gpu --short` runs the checks themselves on the CPU, at tiny size.\n"
        )
        return 1
    out.mkdir(parents=True, exist_ok=True)
    code = code_version()
    for number, name in enumerate(asked.only or CHECKS, 1):
        known = read_results(out).get(name)
        if known and not known["problems"] and (known["code"], known["device"]) == (code, device):
            say(f"[{number}/{len(CHECKS)}] {name}: already done")
            continue
        result = run(name, out, asked.short, devices)
        result |= {"device": device, "devices": devices, "code": code}
        with (out / "results.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
        state = "; ".join(result["problems"]) or "ok"
        say(f"[{number}/{len(CHECKS)}] {name}: {state} ({result['seconds']:.0f} s)")
    results = [r for name, r in read_results(out).items() if name in CHECKS and r["device"] == device]
    write_record(out, device, devices, results)
    print_table(results, device, devices)
    return 1 if any(r["problems"] for r in results) else 0


def run(name: str, out: Path, short: bool, devices: int) -> dict[str, Any]:
    """One check in a process of its own: what it found, or how it ended."""
    folder = out / "work" / name.replace(" ", "-")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "tests.gpu", "--one", name, "--devices", str(devices), "--out", str(out)]
    start = time.monotonic()
    try:
        done = subprocess.run(
            [*command, *["--short"] * short],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
            check=False,
            env={**os.environ, "BERT_DP_CACHE": str(out / "cache")},
        )
        said, code = done.stdout, done.returncode
    except subprocess.TimeoutExpired as error:
        said, code = str(error.stdout or ""), None
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


def code_version() -> str:
    """Changes with any committed file that a check runs."""
    trees = [f"HEAD:{folder}" for folder in ("launcher", "bert_dp", "benchmarks", "tests")]
    done = subprocess.run(["git", "rev-parse", *trees], cwd=ROOT, capture_output=True, text=True, check=False)
    return hashlib.sha256(done.stdout.encode()).hexdigest()[:12]


def write_record(out: Path, device: str, devices: int, results: list[dict[str, Any]]) -> None:
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    environment = {
        "device": device,
        "devices": devices,
        "cores": os.cpu_count(),
        "commit": commit.stdout.strip(),
        "versions": versions(),
    }
    record.write_json(out / "record.json", {"environment": environment, "checks": results})


def print_table(results: list[dict[str, Any]], device: str, devices: int) -> None:
    say(f"\n{devices} x {device}")
    for result in results:
        kind = "right" if result["check"] in CORRECT else "fast"
        state = "FAILED" if result["problems"] else "ok"
        say(f"{kind:6} {result['check']:24} {state:7} {result['seconds']:6.0f} s")
        for key, value in flat(result["facts"]):
            say(f"         {key} {value:.4g}" if isinstance(value, float) else f"         {key} {value}")
        for problem in result["problems"]:
            say(f"         ! {problem}")


def flat(facts: dict[str, Any], above: str = "") -> list[tuple[str, Any]]:
    """Nested facts as (path, value), without what is null."""
    found: list[tuple[str, Any]] = []
    for key, value in facts.items():
        path = f"{above} {key}".strip()
        found += (
            flat(value, path) if isinstance(value, dict) else [(path, value)] if value is not None else []
        )
    return found


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
