"""Check this machine for `bert-dp doctor`. A problem is shown with its consequence and a fix. Torch-free."""

import dataclasses
import itertools
import json
import re
import socket
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Literal

from launcher.children import NO_ANSWER, module_command, run_command
from launcher.machine.environment import Environment, existing, probe
from launcher.report.formats import count_of, format_gib
from launcher.report.page import Report, Verdict

MIN_TORCH = (2, 11)
CHECKPOINT_S, ALL_REDUCE_S = 10.0, 14.0  # time limits; the whole command normally takes under 30 s
LINKS_S = 4.0
MIN_CHECKPOINT_MB_S = 50.0

Level = Literal["ok", "warn", "fail"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """A finding of `doctor`: an observation and, unless `level` is ok, its consequence and a fix."""

    level: Level
    message: str
    consequence: str = ""
    fix: str = ""


def doctor_report(machine: Environment, findings: Sequence[Finding]) -> Report:
    """Build the report: the machine in one line, then each finding with its consequence and fix."""
    gpus = ", ".join(f"{gpu.name} {format_gib(gpu.memory_gib)}" for gpu in machine.gpus) or "no GPU"
    title = f"{machine.cpu_model}, {machine.usable_cores:g} usable cores, {gpus}"
    return Report(
        title,
        verdicts=[
            Verdict(
                f.level, f.message, () if f.level == "ok" else (f"effect: {f.consequence}", f"fix: {f.fix}")
            )
            for f in findings
        ],
        next="" if any(f.level == "fail" for f in findings) else "bert-dp train --dry-run",
    )


def doctor(run_dir: Path | None = None) -> tuple[Environment, list[Finding]]:
    """Check the machine. The checkpoint test uses `run_dir`, by default the current directory. Child
    processes exit with this process, even if it is killed."""
    target = run_dir or Path()
    env = probe(target)
    findings = diagnose(env)
    if len(env.gpus) > 1:
        p2p = run_command(["nvidia-smi", "topo", "-p2p", "r"], LINKS_S)[0]
        findings += link_findings(env, p2p or "")
    return env, [*findings, loopback(), checkpoint(target), all_reduce()]


def _finding(good: bool, message: str, consequence: str, fix: str, level: Level = "warn") -> Finding:
    """Return a finding with level ok if `good`, otherwise with `level`, the consequence and the fix."""
    return Finding("ok", message) if good else Finding(level, message, consequence, fix)


def diagnose(env: Environment) -> list[Finding]:
    """Derive findings from `env`, without further measurements."""
    torch, gpus = env.versions.get("torch"), len(env.gpus)
    build = "CPU" if "+cpu" in (torch or "") else "GPU"
    names = ", ".join(["", *sorted({gpu.name for gpu in env.gpus})])  # names of MIG instances end in "(MIG)"
    present = env.gpus_present
    visible = f"{gpus} of {present} visible{names}" if present else "none; ranks use the CPU"
    absent = "selects no GPU of this machine" if env.names_absent_gpus else "leaves the other GPUs idle"
    ranks, kind = gpus or 2, "GPU" if gpus else "CPU"
    numa_nodes = len(env.numa_cores) or 1
    gpu_nodes = sorted({str(gpu.numa_node) for gpu in env.gpus if gpu.numa_node is not None})
    cores = ", ".join(f"{count} cores of node {node}" for node, count in env.numa_cores.items()) or "unknown"
    driver = []
    if env.gpu_error:
        fix = "if the driver was updated, reboot; if this is a container, start it with --gpus all"
        driver = [_unmeasured("GPU driver", env.gpu_error, "ranks cannot open a GPU", fix)]
    return [
        _finding(
            torch is not None and tuple(map(int, re.findall(r"\d+", torch)[:2])) >= MIN_TORCH,
            f"python {env.python}, torch {torch or 'is not installed'}",
            "every rank fails at startup, because torch 2.11 or newer is required",
            "pip install 'torch>=2.11'",
            "fail",
        ),
        _finding(
            not (env.gpus and build == "CPU"),
            f"torch build: {build}; visible GPUs: {gpus}",
            "the GPUs remain unused",
            "install the CUDA build of the same torch version",
            "fail",
        ),
        *driver,
        _finding(
            gpus == present and not env.names_absent_gpus,
            f"GPUs: {visible}",
            f"CUDA_VISIBLE_DEVICES={env.cuda_visible_devices} {absent}",
            "unset CUDA_VISIBLE_DEVICES, or disable MIG, to use all GPUs",
        ),
        _finding(
            not env.gpus or (env.shm_gib is not None and env.shm_gib >= 1),
            f"shared memory (/dev/shm): {format_gib(env.shm_gib)}",
            "NCCL may fail to connect the GPUs of a node, or may crash with a bus error",
            "start the container with --shm-size=8g or --ipc=host",
        ),
        _finding(
            env.usable_memory_gib >= 4,
            f"memory: {format_gib(env.usable_memory_gib)} available",
            "the kernel may kill ranks without a message (exit code -9)",
            "stop other programs, raise the container's memory limit, or lower --nproc",
        ),
        _finding(
            env.disk_free_gib is not None and env.disk_free_gib >= 5,
            f"free disk: {format_gib(env.disk_free_gib)}",
            "a checkpoint may not fit; the run then stops at its first save",
            "make space, choose another --run-dir, or lower checkpoint.keep",
        ),
        _finding(
            env.max_processes is None or env.max_processes >= 2048,
            f"process limit: {'none' if env.max_processes is None else env.max_processes}",
            "ranks fail with 'resource temporarily unavailable', because each has 50 or more threads",
            "run `ulimit -u 16384` first, or raise the container's pids limit",
        ),
        _finding(
            env.usable_cores >= ranks,
            f"cores: {env.usable_cores:g} usable for {count_of(ranks, f'{kind} rank')}",
            "ranks share cores, so every step waits for the slowest rank",
            "add cores, or start fewer ranks with --nproc",
        ),
        _finding(
            all(env.numa_cores.get(node) for node in gpu_nodes),
            f"NUMA nodes: {numa_nodes}; usable: {cores}; nodes with GPUs: {', '.join(gpu_nodes) or 'none'}",
            "ranks access a GPU across the link between sockets",
            "use cores of each GPU's NUMA node (Slurm: --cpus-per-gpu, --gpu-bind; container: --cpuset-cpus)",
        ),
    ]


def link_findings(env: Environment, p2p: str) -> list[Finding]:
    """Assess the links between the visible GPUs. `p2p`: output of `nvidia-smi topo -p2p r`."""
    gpus = [gpu.index for gpu in env.gpus]
    links, transfers = pairs_by_code(env.gpu_topology or "", gpus), pairs_by_code(p2p, gpus)
    findings = []
    if links:
        shown = "; ".join(f"{code} {pairs}" for code, pairs in sorted(links.items()))
        effect = "gradients cross host bridges (SYS, NODE), which slow down every reduction"
        fix = "choose nearby GPUs with CUDA_VISIBLE_DEVICES, or accumulate more micro batches per step"
        is_near = not {"SYS", "NODE"} & set(links)
        findings.append(_finding(is_near, f"GPU links (nvidia-smi topo -m): {shown}", effect, fix))
    if off := "; ".join(f"{code} {pairs}" for code, pairs in transfers.items() if code != "OK"):
        effect = "NCCL transfers data through the host's memory, or hangs"
        fix = "disable ACS and the IOMMU in the BIOS, or set NCCL_P2P_DISABLE=1 to avoid the hang"
        findings.append(Finding("warn", f"P2P is off: {off}", effect, fix))
    return findings


def pairs_by_code(text: str, gpus: Collection[int]) -> dict[str, str]:
    """Return {link code: pairs of `gpus`, such as `0-1 0-2`} from a table of `nvidia-smi topo`."""
    rows = [line.split() for line in text.splitlines()]
    cells = {row[0]: row[1:] for row in rows if row and row[0].startswith("GPU") and "X" in row}
    pairs: dict[str, list[str]] = {}
    for a, b in itertools.combinations(sorted(gpus), 2):
        if b < len(row := cells.get(f"GPU{a}", [])):
            pairs.setdefault(row[b], []).append(f"{a}-{b}")
    return {code: " ".join(each) for code, each in pairs.items()}


def loopback() -> Finding:
    """Check that 127.0.0.1 accepts connections."""
    try:
        with socket.socket() as listener, socket.socket() as client:
            listener.bind(("127.0.0.1", 0))
            listener.listen(1)
            client.settimeout(5)
            client.connect(listener.getsockname())
        return Finding("ok", "loopback: 127.0.0.1 accepts connections")
    except OSError as error:
        return Finding("fail", f"loopback: {error}", "local ranks cannot communicate", "ip link set lo up")


def checkpoint(
    target: Path, timeout_s: float = CHECKPOINT_S, module: str = "bert_dp.measure.disk"
) -> Finding:
    """Measure how long `module` takes to write, verify and load a checkpoint in `existing(target)`."""
    consequence = "a run fails, or loses its work, at its first checkpoint"
    fix = "choose another --run-dir, or check free space, permissions and disk errors (dmesg)"
    try:
        with tempfile.TemporaryDirectory(prefix=".bert-dp-doctor-", dir=existing(target)) as folder:
            measured, error = _json_of(module, [folder], timeout_s)
    except OSError as problem:
        measured, error = None, str(problem.strerror)
    if measured is None:
        return _unmeasured("checkpoint round trip", error, consequence, fix)
    mib, seconds, rate = measured["bytes"] / 2**20, measured["seconds"], measured["mb_per_s"]
    return _finding(
        rate >= MIN_CHECKPOINT_MB_S,
        f"checkpoint round trip: {mib:.0f} MiB in {seconds:.2f} s, {rate:.0f} MB/s",
        f"a checkpoint of 1.4 GB (120 M parameters) takes {1400 / rate:.0f} s to write, verify and load",
        "choose a faster disk with --run-dir, or a larger checkpoint.every_steps",
    )


def all_reduce(timeout_s: float = ALL_REDUCE_S, module: str = "bert_dp.measure.all_reduce") -> Finding:
    """Time an all-reduce with `module`: across all GPUs if there are several, else across two CPU ranks."""
    r, error = _json_of(module, [], timeout_s)
    if r is None:
        consequence = "ranks cannot communicate: every run with more than one rank will fail"
        return _unmeasured("all-reduce", error, consequence, f"run `python -m {module}` to see its messages")
    return Finding(
        "ok",
        f"all-reduce: {r['world_size']} {r['backend']} ranks, {r['bytes'] / 2**20:.1f} MiB in "
        f"{r['seconds_median'] * 1e3:.2f} ms, {r['busbw_gb_s']:.2f} GB/s bus bandwidth",
    )


def _unmeasured(check: str, error: str, consequence: str, fix: str) -> Finding:
    """Return a finding for a check without a result. A timeout is a warning: the machine may be busy."""
    if error.startswith(NO_ANSWER):
        message = f"{check}: could not be tested, {error}"
        fix = "run `bert-dp doctor` again when the machine is idle"
        return Finding("warn", message, "unknown, because nothing was measured", fix)
    return Finding("fail", f"{check}: {error}", consequence, fix)


def _json_of(module: str, arguments: list[str], timeout_s: float) -> tuple[Any, str]:
    """Run `python -m module`. Return (last JSON object printed, ""), or (None, error) after a failure."""
    output, error = run_command([*module_command(module), *arguments], timeout_s)
    lines = [line for line in (output or "").splitlines() if line.startswith("{")]
    return (json.loads(lines[-1]), "") if lines else (None, error or "the test printed no result")
