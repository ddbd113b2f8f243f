"""`doctor`: what this machine will do to a run, what it will cause and how to fix it. Torch-free."""

from __future__ import annotations

import dataclasses
import json
import re
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal

from bert_dp.record import cache_root
from launcher.environment import Environment, existing, probe, run_command

MIN_PYTHON, MAX_PYTHON, MIN_TORCH = (3, 11), (3, 13), (2, 11)
DOCTOR_LIMIT_S = 29.0

# A check: good?, level if not, what was seen, what it will cause, how to fix it.
Check = tuple[bool, Literal["warn", "fail"], str, str, str]


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of `doctor`: what was seen and, unless it is ok, what it will cause and how to fix it."""

    level: Literal["ok", "warn", "fail"]
    what: str
    consequence: str = ""
    fix: str = ""


def doctor(run_dir: Path | None = None) -> list[Finding]:
    """What this machine will do to a run, in under 30 s; `run_dir` is where the run would be written."""
    deadline = time.monotonic() + DOCTOR_LIMIT_S
    target = run_dir or Path()
    findings = diagnose(probe(target))
    findings += [_loopback(), _writable("run directory", target), _writable("cache directory", cache_root())]
    return [*findings, all_reduce(max(5.0, deadline - time.monotonic()))]


def diagnose(env: Environment) -> list[Finding]:
    """The findings that follow from the facts in `env` alone."""
    checks = [*_version_checks(env), *_gpu_checks(env), *_host_checks(env)]
    return [
        Finding("ok", what) if good else Finding(level, what, *then) for good, level, what, *then in checks
    ]


def _version_checks(env: Environment) -> list[Check]:
    torch, supported = env.versions.get("torch"), MIN_PYTHON <= _version(env.python) <= MAX_PYTHON
    checks: list[Check] = [
        (supported, "fail", f"python {env.python}", "supported are 3.11 to 3.13; imports or runs may fail",
         "make a virtual environment with python 3.13"),
        (torch is not None and _version(torch) >= MIN_TORCH, "fail", f"torch {torch or 'is not installed'}",
         "2.11 or newer is needed; every rank stops at start", "pip install 'torch>=2.11'"),
    ]  # fmt: skip
    if env.gpus and "+cpu" in (torch or ""):
        checks.append((False, "fail", f"torch {torch} is a CPU build beside {len(env.gpus)} GPUs",
                       "the GPUs stay unused", "install the CUDA build of the same version"))  # fmt: skip
    return checks


def _gpu_checks(env: Environment) -> list[Check]:
    visible, shm = len(env.gpus), float("inf") if env.shm_gib is None else env.shm_gib
    checks: list[Check] = []
    if env.gpu_error:
        checks.append((False, "fail", f"GPU driver: {env.gpu_error}", "ranks cannot open a GPU",
                       "reboot after a driver update; in a container pass --gpus all"))  # fmt: skip
    names = ", ".join(["", *sorted({gpu.name for gpu in env.gpus})])
    seen = (
        f"{visible} of {env.gpus_present} visible{names}" if env.gpus_present else "none, ranks use the CPU"
    )
    checks.append((visible == env.gpus_present, "warn", f"GPUs: {seen}",
                   f"CUDA_VISIBLE_DEVICES={env.cuda_visible_devices} leaves the others idle",
                   "unset it to use all"))  # fmt: skip
    if visible:
        checks.append((shm >= 1, "warn", f"shared memory (/dev/shm): {shm:.2f} GiB",
                       "NCCL between GPUs of one node fails with a bus error or cannot start",
                       "start the container with --shm-size=8g or --ipc=host"))  # fmt: skip
    return checks


def _host_checks(env: Environment) -> list[Check]:
    cores, disk = env.usable_cores, float("inf") if env.disk_free_gib is None else env.disk_free_gib
    ranks = f"{len(env.gpus) or 2} {'GPU' if env.gpus else 'CPU'} ranks"
    return [
        (env.usable_memory_gib >= 4, "warn", f"memory: {env.usable_memory_gib:.1f} GiB available",
         "ranks may be killed by the kernel without a message (exit code -9)",
         "stop other programs, raise the container's memory limit, or lower --nproc"),
        (disk >= 5, "warn", f"disk: {disk:.1f} GiB free",
         "a checkpoint may not fit; the run stops at its first save",
         "free space, choose another --run-dir, or lower checkpoint.keep"),
        (env.open_files >= 1024, "warn", f"open files: limit {env.open_files}",
         "'too many open files' with many ranks or shards", "ulimit -n 65536 before the start"),
        (cores >= (len(env.gpus) or 2), "warn", f"cores: {cores:g} usable for {ranks}",
         "ranks share cores, so all wait for the slowest one", "add cores, or start fewer with --nproc"),
        (env.swap_used_gib < 0.5, "warn", f"swap: {env.swap_used_gib:.1f} GiB in use",
         "steps become slow and uneven when a rank's memory is swapped", "free memory, then swapoff -a"),
        (env.omp_num_threads is None, "warn", f"OMP_NUM_THREADS: {env.omp_num_threads or 'not set'}",
         "ranks take cores / ranks threads whatever it says; other OpenMP libraries follow it",
         "unset it unless the number is meant"),
        (env.numa_nodes == 1, "warn", f"NUMA nodes: {env.numa_nodes}",
         "a rank on a far node reaches its GPU and its memory over the socket link",
         "compare a run under numactl --cpunodebind=K --membind=K (K: NUMA column of nvidia-smi topo -m)"),
    ]  # fmt: skip


def all_reduce(timeout_s: float, module: str = "bert_dp.dist") -> Finding:
    """A short all-reduce of `python -m module` in its own process group, which ends with this call."""
    consequence = "ranks cannot talk to each other: every run on more than one rank will fail"
    fix = f"run `python -m {module}` to see the whole message"
    output, error = run_command([sys.executable, "-m", module], timeout_s)
    try:
        r = json.loads([line for line in (output or "").splitlines() if line.startswith("{")][-1])
        what = (f"all-reduce: {r['world_size']} {r['backend']} ranks, {r['bytes'] / 2**20:.1f} MiB in "
                f"{r['seconds_median'] * 1e3:.2f} ms, {r['busbw_gb_s']:.2f} GB/s bus bandwidth")  # fmt: skip
        return Finding("ok", what)
    except (IndexError, KeyError, TypeError, ValueError):
        return Finding("fail", f"all-reduce: {error or 'no result line'}", consequence, fix)


def _loopback() -> Finding:
    try:
        with socket.socket() as listener, socket.socket() as client:
            listener.bind(("127.0.0.1", 0))
            listener.listen(1)
            client.settimeout(5)
            client.connect(listener.getsockname())
        return Finding("ok", "loopback: 127.0.0.1 accepts connections")
    except OSError as error:
        return Finding("fail", f"loopback: {error}", "ranks of one node cannot meet", "ip link set lo up")


def _writable(role: str, path: Path) -> Finding:
    try:
        with tempfile.TemporaryFile(dir=existing(path)) as file:
            file.write(b"x")
        return Finding("ok", f"{role}: writable")
    except OSError as error:
        return Finding("fail", f"{role} {path}: {error.strerror}", "the run stops at start",
                       "make it writable or choose another (--run-dir, BERT_DP_CACHE)")  # fmt: skip


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])
