"""What machine is this: `probe` (environment.json), `num_gpus` (`--nproc auto`), `doctor` (what will bite).

Torch-free. Every function that reads kernel files takes `root`, the directory that holds proc/ and sys/.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import psutil

ROOT = Path("/")
GIB = 2**30
REDACTED = "<redacted>"
PACKAGES = (
    *(
        "bert-dp",
        "torch",
        "numpy",
        "tokenizers",
        "safetensors",
        "pydantic",
        "typer",
        "rich",
        "PyYAML",
        "psutil",
    ),
    *(
        "accelerate",
        "deepspeed",
        "datasets",
        "transformers",
        "nvidia-nccl-cu12",
        "nvidia-nccl-cu13",
        "triton",
    ),
)
MIN_PYTHON, MAX_PYTHON, MIN_TORCH = (3, 11), (3, 13), (2, 11)
DOCTOR_LIMIT_S = 29.0
# The setting names `tokenizer*` and a numeric `tokens*` are no secrets.
SECRET = re.compile(r"token(?!iz)|key|secret|pass", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Gpu:
    index: int
    """Position among the devices of the machine, before CUDA_VISIBLE_DEVICES."""
    name: str
    memory_gib: float | None
    driver: str | None


@dataclasses.dataclass(frozen=True)
class Environment:
    """The machine as this process may use it; `dataclasses.asdict` of it is environment.json."""

    date: str
    command: list[str]
    platform: str
    kernel: str
    python: str
    cpu_model: str
    physical_cores: int | None
    logical_cores: int
    affinity_cores: int
    cpu_quota_cores: float | None
    """Limit of the control group; None = no limit."""
    numa_nodes: int
    memory_gib: float
    memory_available_gib: float
    memory_limit_gib: float | None
    swap_used_gib: float
    shm_gib: float | None
    shm_free_gib: float | None
    disk_free_gib: float | None
    open_files: int
    omp_num_threads: str | None
    cuda_visible_devices: str | None
    gpus: tuple[Gpu, ...]
    gpus_present: int
    """Devices of the machine, the ones hidden by CUDA_VISIBLE_DEVICES included."""
    gpu_error: str | None
    """Why nvidia-smi did not answer."""
    gpu_topology: str | None
    versions: dict[str, str]
    git_commit: str | None
    git_dirty: bool | None

    @property
    def usable_cores(self) -> float:
        """Cores that this process may use: affinity and control-group quota, whichever is less."""
        return min(float(self.affinity_cores), self.cpu_quota_cores or float("inf"))

    @property
    def usable_memory_gib(self) -> float:
        """Upper bound of what a run can still get: the memory available, capped by the control group."""
        return min(self.memory_available_gib, self.memory_limit_gib or float("inf"))

    def to_json(self) -> dict[str, Any]:
        """A JSON-able object, for `record.write_json`."""
        return {**dataclasses.asdict(self), "usable_cores": self.usable_cores}


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of `doctor`: what was seen and, unless it is ok, what it will cause and how to fix it."""

    level: Literal["ok", "warn", "fail"]
    what: str
    consequence: str = ""
    fix: str = ""


def probe(path: Path = Path(), root: Path = ROOT) -> Environment:
    """The machine, the versions, and the git commit of `path`. Never raises for something that is absent."""
    gpus, present, gpu_error = _find_gpus(root)
    memory_limit = cgroup_limit(root, "memory")
    memory = psutil.virtual_memory()
    shm = _disk(root / "dev/shm")
    disk = _disk(_existing(path))
    git = ["git", "-C", str(_existing(path))]
    commit = _run([*git, "rev-parse", "HEAD"], 5)[0]
    status = _run([*git, "status", "--porcelain"], 5)[0] if commit else None
    return Environment(
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=redact_argv(sys.argv),
        platform=f"{platform.system()} {platform.machine()}",
        kernel=platform.release(),
        python=platform.python_version(),
        cpu_model=_cpu_model(root),
        physical_cores=psutil.cpu_count(logical=False),
        logical_cores=os.cpu_count() or 1,
        affinity_cores=len(os.sched_getaffinity(0)),
        cpu_quota_cores=cgroup_limit(root, "cpu"),
        numa_nodes=max(1, len(list((root / "sys/devices/system/node").glob("node[0-9]*")))),
        memory_gib=memory.total / GIB,
        memory_available_gib=memory.available / GIB,
        memory_limit_gib=None if memory_limit is None or memory_limit > memory.total else memory_limit / GIB,
        swap_used_gib=psutil.swap_memory().used / GIB,
        shm_gib=shm.total / GIB if shm else None,
        shm_free_gib=shm.free / GIB if shm else None,
        disk_free_gib=disk.free / GIB if disk else None,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        omp_num_threads=os.environ.get("OMP_NUM_THREADS"),
        cuda_visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        gpus=tuple(gpus),
        gpus_present=present,
        gpu_error=gpu_error,
        gpu_topology=_run(["nvidia-smi", "topo", "-m"], 10)[0] if gpus else None,
        versions=versions(),
        git_commit=commit,
        git_dirty=None if status is None else bool(status),
    )


def num_gpus(root: Path = ROOT) -> int:
    """GPUs that a worker will see, CUDA_VISIBLE_DEVICES respected, without importing torch."""
    return len(_find_gpus(root)[0])


def versions() -> dict[str, str]:
    """Versions of the installed packages that a run depends on."""
    found = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def cgroup_limit(root: Path, controller: Literal["cpu", "memory"]) -> float | None:
    """Limit of this process' control group and its ancestors: cores or bytes; None = unlimited. v1 and v2."""
    limits = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / (controller if controllers else "")
        parts = [p for p in path.split("/") if p and p != ".."]
        limits += [_own_limit(mount.joinpath(*parts[:n]), controller) for n in range(len(parts) + 1)]
    return min((limit for limit in limits if limit is not None), default=None)


def _own_limit(group: Path, controller: str) -> float | None:
    if controller == "cpu":
        words = _read(group / "cpu.max").split()
        words = words or [_read(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        if len(words) < 2 or not words[0].isdigit() or not words[1].isdigit():  # "max", "-1" or no such file
            return None
        return int(words[0]) / int(words[1])
    text = (_read(group / "memory.max") or _read(group / "memory.limit_in_bytes")).strip()
    return float(text) if text.isdigit() and int(text) < 2**60 else None  # v1 writes about 2**63 for no limit


def redact(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """A copy without the values whose key holds TOKEN, KEY, SECRET or PASS, in any case; nested too."""
    return {key: _redact_value(key, value) for key, value in mapping.items()}


def redact_argv(argv: Sequence[str]) -> list[str]:
    """A command line without secrets: `--token=abc`, `TOKEN=abc` and `--api-key abc` lose their values."""
    shown: list[str] = []
    for item in argv:
        name, equals, value = item.partition("=")
        before = shown[-1] if shown else ""
        if equals and _is_secret(name, value):
            item = f"{name}={REDACTED}"
        elif re.match(r"-[^=]*$", before) and _is_secret(before, item) and not item.startswith("--"):
            item = REDACTED
        shown.append(item)
    return shown


def _redact_value(key: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return redact(value)
    if _is_secret(key, value):
        return REDACTED
    if isinstance(value, (list, tuple)):
        return [_redact_value("", v) for v in value]
    return value


def _is_secret(key: str, value: Any) -> bool:
    if not SECRET.search(key):
        return False
    count = isinstance(value, (int, float, type(None))) or re.fullmatch(r"[\d.e+_]+|null", str(value))
    return not ("tokens" in key.lower() and count)


def _find_gpus(root: Path) -> tuple[list[Gpu], int, str | None]:
    """Visible GPUs, the number present, and why nvidia-smi failed. Falls back to the driver's own list."""
    devices: list[tuple[Gpu, str]] = []  # with the UUID, which CUDA_VISIBLE_DEVICES may name
    error: str | None = None
    if shutil.which("nvidia-smi"):
        query = "--query-gpu=index,uuid,name,memory.total,driver_version"
        output, error = _run(["nvidia-smi", query, "--format=csv,noheader,nounits"], 10)
        for row in csv.reader((output or "").splitlines(), skipinitialspace=True):
            if len(row) == 5 and row[0].isdigit():
                mib = float(row[3]) if row[3].replace(".", "").isdigit() else None
                devices.append((Gpu(int(row[0]), row[2], mib and mib / 1024, row[4]), row[1]))
    if not devices:
        devices = _driver_gpus(root)
    return _visible(devices, os.environ.get("CUDA_VISIBLE_DEVICES")), len(devices), error


def _driver_gpus(root: Path) -> list[tuple[Gpu, str]]:
    driver = re.search(r"Module\s+([\d.]+)", _read(root / "proc/driver/nvidia/version"))
    devices = []
    for index, folder in enumerate(sorted((root / "proc/driver/nvidia/gpus").glob("*"))):
        facts = dict(line.split(":", 1) for line in _read(folder / "information").splitlines() if ":" in line)
        name, uuid = facts.get("Model", "NVIDIA GPU").strip(), facts.get("GPU UUID", "").strip()
        devices.append((Gpu(index, name, None, driver and driver[1]), uuid))
    return devices


def _visible(devices: list[tuple[Gpu, str]], selection: str | None) -> list[Gpu]:
    """CUDA's rule: devices by index, UUID or prefix of one, up to the first entry that names none."""
    if selection is None:
        return [gpu for gpu, _ in devices]
    chosen: list[Gpu] = []
    for entry in (e.strip() for e in selection.split(",")):
        if entry.startswith("MIG-") and devices:
            found = [dataclasses.replace(devices[0][0], name=f"{devices[0][0].name} (MIG)", memory_gib=None)]
        elif entry.startswith("GPU-"):
            found = [gpu for gpu, uuid in devices if uuid.startswith(entry)]
        else:
            found = [gpu for gpu, _ in devices if str(gpu.index) == entry]
        if len(found) != 1 or found[0] in chosen:
            break
        chosen += found
    return chosen


def doctor(run_dir: Path | None = None) -> list[Finding]:
    """What this machine will do to a run, in under 30 s; `run_dir` is where the run would be written."""
    deadline = time.monotonic() + DOCTOR_LIMIT_S
    target = run_dir or Path()
    findings = diagnose(probe(target))
    findings += [_loopback(), _writable("run directory", target), _writable("cache directory", cache_dir())]
    return [*findings, all_reduce(max(5.0, deadline - time.monotonic()))]


def cache_dir() -> Path:
    """Where built corpora are cached: $BERT_DP_CACHE, by default ~/.cache/bert-dp."""
    return Path(os.environ.get("BERT_DP_CACHE") or Path.home() / ".cache" / "bert-dp")


def diagnose(env: Environment) -> list[Finding]:
    """The findings that follow from the facts in `env` alone."""
    checks = [*_version_checks(env), *_gpu_checks(env), *_host_checks(env)]
    return [
        Finding("ok", what) if good else Finding(level, what, *then) for good, level, what, *then in checks
    ]


# A check: good?, level if not, what was seen, what it will cause, how to fix it.
Check = tuple[bool, Literal["warn", "fail"], str, str, str]


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
    output, error = _run([sys.executable, "-m", module], timeout_s)
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
        with tempfile.TemporaryFile(dir=_existing(path)) as file:
            file.write(b"x")
        return Finding("ok", f"{role}: writable")
    except OSError as error:
        return Finding("fail", f"{role} {path}: {error.strerror}", "the run stops at start",
                       "make it writable or choose another (--run-dir, BERT_DP_CACHE)")  # fmt: skip


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])


def _run(argv: Sequence[str], timeout_s: float) -> tuple[str | None, str | None]:
    """Output, or None and the last lines of the error. The whole process group ends with a timeout."""
    try:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            errors="replace", start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        return None, f"{argv[0]}: {error.strerror}"
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except BaseException as error:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        lines = process.communicate()[1].strip().splitlines()
        return None, " | ".join([f"no answer within {timeout_s:.0f} s", *lines[-3:]])
    if process.returncode:
        lines = (errors.strip() or output.strip()).splitlines()
        return None, " | ".join(lines[-3:]) or f"exit code {process.returncode}"
    return output.rstrip(), None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _disk(path: Path) -> Any:
    try:
        return shutil.disk_usage(path)
    except OSError:
        return None


def _existing(path: Path) -> Path:
    """`path` or its nearest ancestor that exists."""
    path = path.absolute()
    return next((p for p in (path, *path.parents) if p.is_dir()), path)


def _cpu_model(root: Path) -> str:
    model = re.search(r"^model name\s*:\s*(.+)$", _read(root / "proc/cpuinfo"), re.MULTILINE)
    return model[1].strip() if model else platform.machine()
