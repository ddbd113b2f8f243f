"""`doctor`: what this machine will do to a run, what it will cause and how to fix it. Torch-free."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import socket
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from bert_dp.config import ConfigError
from bert_dp.record import cache_root
from launcher.children import NO_ANSWER, module_command, run_command
from launcher.machine import gpu_links
from launcher.machine.environment import Environment, existing, probe
from launcher.machine.gpu_links import Links
from launcher.machine.precision import in_words, keep_ratio
from launcher.report.model import Report, Verdict
from launcher.report.numbers import format_gib

MIN_PYTHON, MAX_PYTHON, MIN_TORCH = (3, 11), (3, 13), (2, 11)
GPU_FREE = 0.95  # of a GPU's memory: the driver itself keeps less than the rest
DOCTOR_LIMIT_S = 28.0
MIN_ALL_REDUCE_S = 3.0
MIN_CHECKPOINT_MB_S = 50.0

Level = Literal["ok", "warn", "fail"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of `doctor`: what was seen and, unless it is ok, what it will cause and how to fix it."""

    level: Level
    what: str
    consequence: str = ""
    fix: str = ""


def doctor_report(machine: Environment, findings: Sequence[Finding]) -> Report:
    """The machine in one line, and each finding with its consequence and its fix."""
    gpus = ", ".join(f"{gpu.name} {format_gib(gpu.memory_gib)}" for gpu in machine.gpus) or "no GPU"
    title = f"{machine.cpu_model}, {machine.usable_cores:g} usable cores, {gpus}"
    return Report(
        title,
        verdicts=[
            Verdict(f.level, f.what, () if f.level == "ok" else (f"causes: {f.consequence}", f"fix: {f.fix}"))
            for f in findings
        ],
        next="" if any(f.level == "fail" for f in findings) else "bert-dp train --dry-run",
    )


def doctor(run_dir: Path | None = None) -> tuple[Environment, list[Finding]]:
    """The machine, and what it will do to a run, in under 30 s; `run_dir` is where the run would be written.

    Every process that it starts has ended when it returns, and ends with it when it is killed.
    """
    deadline = time.monotonic() + DOCTOR_LIMIT_S
    target = run_dir or Path()
    env = probe(target)
    findings = diagnose(env)
    if len(env.gpus) > 1:
        findings += link_findings(gpu_links.query(), [gpu.index for gpu in env.gpus])
    findings.append(_loopback())
    findings += [_writable("run directory", target), _writable("cache directory", cache_root())]
    findings.append(checkpoint(target, (deadline - time.monotonic()) / 2))
    findings.append(all_reduce(deadline - time.monotonic(), gpus=len(env.gpus)))
    if not env.gpus:
        findings.append(bf16(env, deadline - time.monotonic()))
    return env, findings


def diagnose(env: Environment) -> list[Finding]:
    """The findings that follow from the facts in `env` alone."""
    return [*_version_findings(env), *_gpu_findings(env), *_host_findings(env)]


def _finding(good: bool, what: str, consequence: str, fix: str, level: Level = "warn") -> Finding:
    """`level`: of what is not good."""
    return Finding("ok", what) if good else Finding(level, what, consequence, fix)


def _version_findings(env: Environment) -> list[Finding]:
    torch = env.versions.get("torch")
    findings = [
        _finding(
            MIN_PYTHON <= _version(env.python) <= MAX_PYTHON,
            f"python {env.python}",
            "supported are 3.11 to 3.13; imports or runs may fail",
            "make a virtual environment with python 3.13",
            "fail",
        ),
        _finding(
            torch is not None and _version(torch) >= MIN_TORCH,
            f"torch {torch or 'is not installed'}",
            "2.11 or newer is needed; every rank stops at start",
            "pip install 'torch>=2.11'",
            "fail",
        ),
    ]
    if env.gpus and "+cpu" in (torch or ""):
        what = f"torch {torch} is a CPU build beside {len(env.gpus)} GPUs"
        fix = "install the CUDA build of the same version"
        findings.append(Finding("fail", what, "the GPUs stay unused", fix))
    return findings


def _gpu_findings(env: Environment) -> list[Finding]:
    findings = []
    if env.gpu_error:
        fix = "reboot after a driver update; in a container pass --gpus all"
        findings.append(Finding("fail", f"GPU driver: {env.gpu_error}", "ranks cannot open a GPU", fix))
    names = ", ".join(["", *sorted({gpu.name for gpu in env.gpus})])
    visible = f"{len(env.gpus)} of {env.gpus_present} visible{names}"
    findings.append(
        _finding(
            len(env.gpus) == env.gpus_present and not env.names_absent_gpus,
            f"GPUs: {visible if env.gpus_present else 'none, ranks use the CPU'}",
            f"CUDA_VISIBLE_DEVICES={env.cuda_visible_devices} "
            + ("names no GPU that is there" if env.names_absent_gpus else "leaves the others idle"),
            "unset it to use all",
        )
    )
    for gpu in env.gpus:
        free, total = gpu.free_gib, gpu.memory_gib
        if free is not None and total is not None and free < GPU_FREE * total:
            low = Finding(
                "warn",
                f"GPU {gpu.index}: {free:.1f} of {total:.1f} GiB are free",
                "out of memory where an idle GPU is not, and every rank as slow as this one",
                "end its processes (nvidia-smi); or CUDA_VISIBLE_DEVICES without it",
            )
            findings.append(low)
    findings.append(
        _finding(
            not env.gpus or (env.shm_gib is not None and env.shm_gib >= 1),
            f"shared memory (/dev/shm): {_size(env.shm_gib, 2)}",
            "NCCL between GPUs of one node fails with a bus error or cannot start",
            "start the container with --shm-size=8g or --ipc=host",
        )
    )
    return findings


def _size(gib: float | None, decimals: int = 1) -> str:
    return "not known" if gib is None else f"{gib:.{decimals}f} GiB"


def _host_findings(env: Environment) -> list[Finding]:
    ranks, kind = len(env.gpus) or 2, "GPU" if env.gpus else "CPU"
    locked_mib = None if env.locked_memory_gib is None else env.locked_memory_gib * 1024
    return [
        _finding(
            env.usable_memory_gib >= 4,
            f"memory: {env.usable_memory_gib:.1f} GiB available",
            "ranks may be killed by the kernel without a message (exit code -9)",
            "stop other programs, raise the container's memory limit, or lower --nproc",
        ),
        _finding(
            env.disk_free_gib is not None and env.disk_free_gib >= 5,
            f"free disk: {_size(env.disk_free_gib)}",
            "a checkpoint may not fit; the run stops at its first save",
            "free space, choose another --run-dir, or lower checkpoint.keep",
        ),
        _finding(
            env.open_files >= 1024,
            f"open files: limit {env.open_files}",
            "'too many open files' with many ranks or shards",
            "ulimit -n 65536 before the start",
        ),
        _finding(
            env.usable_cores >= ranks,
            f"cores: {env.usable_cores:g} usable for {ranks} {kind} ranks",
            "ranks share cores, so all wait for the slowest one",
            "add cores, or start fewer with --nproc",
        ),
        _finding(
            env.swap_used_gib < 0.5,
            f"swap: {env.swap_used_gib:.1f} GiB in use",
            "steps become slow and uneven when a rank's memory is swapped",
            "free memory, then swapoff -a",
        ),
        _finding(
            env.omp_num_threads is None,
            f"OMP_NUM_THREADS: {env.omp_num_threads or 'not set'}",
            "a rank takes no more threads than it says, also where it has more cores",
            "unset it unless the number is meant",
        ),
        _numa_finding(env),
        _finding(
            env.max_processes is None or env.max_processes >= 2048,
            f"processes: limit {_limit(env.max_processes)}",
            "'resource temporarily unavailable': every thread of a rank counts, some 50 and more a rank",
            "ulimit -u 16384 before the start, or raise the container's pids limit",
        ),
        _finding(
            not env.gpus or locked_mib is None or locked_mib >= 1,
            f"locked memory: limit {_limit(locked_mib, ' MiB')}",
            "drivers cannot register the buffers of GPUs or InfiniBand",
            "ulimit -l unlimited before the start",
        ),
    ]


def _numa_finding(env: Environment) -> Finding:
    nodes = sorted({gpu.numa_node for gpu in env.gpus if gpu.numa_node is not None})
    bare = [str(node) for node in nodes if not env.numa_cores.get(str(node))]
    cores = ", ".join(f"{count} cores of node {node}" for node, count in env.numa_cores.items())
    near = f"; GPUs at node {', '.join(map(str, nodes))}" if nodes else ""
    return _finding(
        not bare,
        f"NUMA nodes: {env.numa_nodes}, usable {cores or 'unknown'}{near}",
        f"no core of node {' or '.join(bare)} is usable: ranks reach their GPU over the socket link",
        "allow cores of that node (Slurm: --cpus-per-gpu or --gpu-bind; container: --cpuset-cpus)",
    )


def _limit(value: float | None, unit: str = "") -> str:
    return "none" if value is None else f"{value:g}{unit}"


def link_findings(links: Links, gpus: Sequence[int]) -> list[Finding]:
    """What the links between the visible GPUs (by their index) will do to a reduction."""
    findings = []
    if paths := {pair: kind for pair, kind in links.paths.items() if set(pair) <= set(gpus)}:
        by_kind = {kind: [p for p in paths if paths[p] == kind] for kind in sorted(set(paths.values()))}
        slow = by_kind.get("SYS", []) + by_kind.get("NODE", [])
        findings.append(
            _finding(
                not slow,
                f"GPU links: {', '.join(f'{_path(k)} between {_pairs(v)}' for k, v in by_kind.items())}",
                f"gradients between {_pairs(slow)} cross host bridges: reductions run at the pace of these",
                "choose near GPUs by CUDA_VISIBLE_DEVICES, or accumulate more micro batches per step",
            )
        )
    if links.p2p:
        off = {pair: why for pair, why in links.p2p.items() if set(pair) <= set(gpus) and why != "OK"}
        reasons = ", ".join(sorted({gpu_links.NO_P2P.get(why, why) for why in off.values()}))
        findings.append(
            _finding(
                not off,
                f"P2P: {f'off between {_pairs(list(off))} ({reasons})' if off else 'on between all GPUs'}",
                "each transfer goes through the host's memory, or NCCL hangs",
                "turn ACS and the IOMMU off in the BIOS; else NCCL_P2P_DISABLE=1 ends a hang",
            )
        )
    counts = {gpu: count for gpu, count in links.nvlinks.items() if gpu in gpus}
    if most := max((active for active, _ in counts.values()), default=0):
        bad = [f"GPU {gpu} has {active} of {all_}" for gpu, (active, all_) in counts.items() if active < most]
        findings.append(
            _finding(
                not bad,
                f"NVLink: {', '.join(bad) or f'{most} active on each GPU'}",
                "every reduction runs at the pace of that GPU",
                "look for Xid errors in dmesg; reset the GPU, check its bridge and the fabric manager",
            )
        )
    return findings


def _path(kind: str) -> str:
    return f"{kind[2:]} NVLinks" if kind.startswith("NV") else gpu_links.PATHS.get(kind, kind)


def _pairs(pairs: Sequence[tuple[int, int]]) -> str:
    shown = ", ".join(f"{a}-{b}" for a, b in sorted(pairs)[:6])
    return f"{shown}, ..." if len(pairs) > 6 else shown


def checkpoint(target: Path, timeout_s: float, module: str = "bert_dp.measure.disk") -> Finding:
    """A checkpoint written, verified and loaded by `python -m module` where `target` is or would be made."""
    consequence = "a run stops, or loses its work, at its first checkpoint"
    fix = "choose another --run-dir; free space and rights are above, dmesg names a failing disk"
    try:
        with tempfile.TemporaryDirectory(prefix=".bert-dp-doctor-", dir=existing(target)) as folder:
            measured, error = _json_of(module, [folder], timeout_s)
    except OSError as problem:
        return Finding("fail", f"checkpoint round trip: {problem.strerror}", consequence, fix)
    try:
        mib, seconds, rate = measured["bytes"] / 2**20, measured["seconds"], measured["mb_per_s"]
    except (KeyError, TypeError):
        return _unanswered("checkpoint round trip", error, consequence, fix)
    return _finding(
        rate >= MIN_CHECKPOINT_MB_S,
        f"checkpoint round trip: {mib:.0f} MiB in {seconds:.2f} s, {rate:.0f} MB/s",
        f"1.4 GB, of a model of 120 M parameters, take {1400 / rate:.0f} s to write and verify",
        "choose a faster disk by --run-dir, or a larger checkpoint.every_steps",
    )


def all_reduce(timeout_s: float, module: str = "bert_dp.measure.all_reduce", *, gpus: int = 0) -> Finding:
    """A short all-reduce of `python -m module`: between all GPUs if there are several, else two CPU ranks."""
    fix = f"run `python -m {module}` to see the whole message"
    if timeout_s < MIN_ALL_REDUCE_S:
        what = f"all-reduce: not measured, {timeout_s:.0f} s were left"
        return Finding("warn", what, "it is not known whether ranks can talk to each other", fix)
    r, error = _json_of(module, [], timeout_s)
    try:
        what = (
            f"all-reduce: {r['world_size']} {r['backend']} ranks, {r['bytes'] / 2**20:.1f} MiB in "
            f"{r['seconds_median'] * 1e3:.2f} ms, {r['busbw_gb_s']:.2f} GB/s bus bandwidth"
        )
        return Finding("ok", what)
    except (KeyError, TypeError):
        consequence = "ranks cannot talk to each other: every run on more than one rank will fail"
        return _unanswered("all-reduce", error, consequence, fix, gpus=gpus)


def bf16(env: Environment, timeout_s: float, module: str = "bert_dp.measure.bf16_ratio") -> Finding:
    """Whether `precision: auto` is bf16 on this CPU, and what `python -m module` measures of it, which later
    warnings quote."""
    what = f"bf16: {', '.join(env.bf16_units) or 'no unit on this CPU, so precision: auto is fp32'}"
    has_time = timeout_s > MIN_ALL_REDUCE_S
    measured, error = _json_of(module, [], timeout_s) if has_time else (None, "no time was left")
    try:
        ratio = keep_ratio(measured or {}, env)
    except (ConfigError, OSError) as problem:
        return Finding("ok", f"{what}; its matmul rate is not known ({error or problem})")
    return _finding(
        not env.bf16_units or ratio.ratio >= 1,
        f"{what}; it multiplies bf16 at {in_words(ratio)}",
        "precision: auto is bf16 here, which is slower than fp32",
        "precision=fp32; ask again when the machine is idle",
    )


def _unanswered(check: str, error: str | None, consequence: str, fix: str, *, gpus: int = 0) -> Finding:
    """A failure; but only a warning where time ran out while other work kept every core busy, or many GPUs
    had to be opened."""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if error is not None and error.startswith(NO_ANSWER) and gpus > 1:
        what = f"{check}: {error}; opening {gpus} GPUs takes long"
        return Finding("warn", what, f"if not for that, {consequence}", "ask again, or train two ranks")
    if error is not None and error.startswith(NO_ANSWER) and load > cores:
        what = f"{check}: {error}; other work keeps {cores} cores busy (load {load:.1f})"
        return Finding("warn", what, f"if not for that, {consequence}", "ask again when the machine is idle")
    return Finding("fail", f"{check}: {error or 'no result line'}", consequence, fix)


def _json_of(module: str, arguments: list[str], timeout_s: float) -> tuple[Any, str | None]:
    """The last JSON object that `python -m module` printed, or None and why there is none."""
    output, error = run_command([*module_command(module), *arguments], timeout_s)
    lines = [line for line in (output or "").splitlines() if line.startswith("{")]
    try:
        return json.loads(lines[-1]), None
    except (IndexError, ValueError):
        return None, error


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
        if not (standing := next(p for p in (path, *path.absolute().parents) if p.exists())).is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{standing} is no directory")
        with tempfile.TemporaryFile(dir=existing(path)) as file:
            file.write(b"x")
        return Finding("ok", f"{role}: writable")
    except OSError as error:
        return Finding(
            "fail",
            f"{role} {path}: {error.strerror}",
            "the run stops at start",
            "make it writable or choose another (--run-dir, BERT_DP_CACHE)",
        )


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])
