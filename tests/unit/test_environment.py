"""Test the probe of the machine with fake kernel files and a fake nvidia-smi, every finding of doctor, and
findings about links between GPUs from tables of nvidia-smi."""

import dataclasses
import json
import math
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from bert_dp.cost import GIB
from launcher import children
from launcher.cli.app import app
from launcher.machine import doctor
from launcher.machine.doctor import diagnose, link_findings
from launcher.machine.environment import Environment, Gpu, cgroup_limit, find_gpus, probe
from launcher.run.starters import RankStart, start_environment
from tests.e2e.cli import wait_for
from tests.helpers import raised_issues, write_files

CSV = """0, GPU-aaaa1111, NVIDIA H100 80GB HBM3, 81559, 81000, 570.124.06, 00000000:1A:00.0, Disabled
1, GPU-bbbb2222, NVIDIA H100 80GB HBM3, 81559, 20480, 570.124.06, 00000000:3D:00.0, Disabled
2, GPU-bbcc3333, NVIDIA H100 80GB HBM3, [N/A], [N/A], 570.124.06, 00000000:B1:00.0, Disabled
"""


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """Return a function that installs a shell script as nvidia-smi, before the system tools on PATH."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def install(script: str) -> None:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (folder / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    return install


GOOD = dataclasses.replace(
    probe(),
    python="3.12.1",
    affinity_cores=32,
    cpu_quota_cores=None,
    numa_cores={"0": 16, "1": 16},
    memory_available_gib=200.0,
    memory_limit_gib=None,
    shm_gib=64.0,
    disk_free_gib=500.0,
    max_processes=None,
    cuda_visible_devices=None,
    gpu_error=None,
    gpus=(Gpu(0, "H100", 80.0, "570", 0), Gpu(1, "H100", 80.0, "570", 1)),
    gpus_present=2,
    versions={"torch": "2.13.0+cu130"},
)


def test_the_probe_is_json_and_contains_no_host_name(tmp_path):
    facts = probe(tmp_path / "not" / "yet" / "there").to_json()
    text = json.dumps(facts)
    assert f'"{socket.gethostname()}"' not in text
    assert facts["usable_cores"] >= 0.1
    assert facts["disk_free_gib"] > 0
    assert facts["versions"]["pydantic"]


@pytest.mark.parametrize(("group", "limit"), [(99, None), (8, 8.0)])
def test_total_free_and_limited_resources_are_distinguished(tmp_path, monkeypatch, group, limit):
    def disk(path):
        shm = Path(path).name == "shm"
        return SimpleNamespace(total=(7 if shm else 100) * GIB, free=(2 if shm else 30) * GIB)

    monkeypatch.setattr("shutil.disk_usage", disk)
    memory = SimpleNamespace(total=16 * GIB, available=4 * GIB)
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (2**16, 2**20))
    files = {"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/memory.max": f"{group * GIB}\n"}
    facts = probe(tmp_path, write_files(tmp_path, files))
    assert (facts.memory_gib, facts.memory_available_gib, facts.memory_limit_gib) == (16, 4, limit)
    assert (facts.shm_gib, facts.disk_free_gib) == (7, 30)
    assert (facts.affinity_cores, facts.max_processes) == (2, 2**16), "the soft limit is the one that applies"


def test_gpus_are_read_from_nvidia_smi(smi):
    smi(f"cat <<'END'\n{CSV}END")
    facts = probe()
    assert len(facts.gpus) == facts.gpus_present == 3
    assert facts.gpus[0] == Gpu(0, "NVIDIA H100 80GB HBM3", 81559 / 1024, "570.124.06", None, 81000 / 1024)
    assert facts.gpus[2].memory_gib is None
    assert facts.rank_memory(1, True) == (81000 / 1024, "free on GPU 0, which has 79.6 GiB")
    assert facts.rank_memory(2, True) == (20.0, "free on GPU 1, which has 79.6 GiB"), "the smaller one"
    full = dataclasses.replace(facts, gpus=(dataclasses.replace(facts.gpus[0], free_gib=0.0),))
    assert full.rank_memory(1, True)[0] == 0.0
    unknown = dataclasses.replace(facts, gpus=facts.gpus[2:])
    assert unknown.rank_memory(1, True) == (None, "the GPUs")
    assert facts.rank_memory(4, False)[0] == facts.usable_memory_gib / 4
    assert "GPU-aaaa" not in json.dumps(facts.to_json()["gpus"])
    smi(f"cat <<'END'\n{CSV.replace('Disabled', 'Enabled')}END")
    divided = probe()
    ((name, memory_gib),) = [(gpu.name, gpu.memory_gib) for gpu in divided.gpus]  # CUDA shows one instance
    assert (name, memory_gib, divided.gpus_present) == ("NVIDIA H100 80GB HBM3 (MIG)", None, 3)


def test_cuda_visible_devices_is_respected(smi, monkeypatch):
    smi(f"cat <<'END'\n{CSV}END")
    chosen = {"1,0": [1, 0], "1,0,1,2": [1, 0], "0,7,1": [0], "GPU-bbbb": [1], "MIG-x": [0]}
    for selection in ("", "-1", "GPU-bb", *chosen):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", selection)
        gpus = find_gpus()[0]
        assert [gpu.index for gpu in gpus] == chosen.get(selection, []), selection
    assert (gpus[0].memory_gib, gpus[0].free_gib) == (None, None), "the memory of a MIG instance is unknown"


def test_the_numa_node_of_a_gpu_and_its_usable_cores_are_read(smi, tmp_path):
    smi(f"cat <<'END'\n{CSV}END")
    core = min(os.sched_getaffinity(0))
    files = {
        "sys/bus/pci/devices/0000:1a:00.0/numa_node": "1\n",
        "sys/bus/pci/devices/0000:3d:00.0/numa_node": "-1\n",
        f"sys/devices/system/node/node0/cpu{core}/online": "1\n",
        "sys/devices/system/node/node1/cpulist": "9000\n",
    }
    facts = probe(root=write_files(tmp_path, files))
    assert [gpu.numa_node for gpu in facts.gpus] == [1, None, None]
    assert facts.numa_cores == {"0": 1, "1": 0}
    assert any(f.level == "warn" and f.message.startswith("NUMA") for f in diagnose(facts))


def test_a_broken_driver_is_a_finding_and_gpus_are_read_from_its_proc_files(smi, tmp_path, monkeypatch):
    smi("echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
    files = {
        "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat",
        "proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: \t\t NVIDIA A100\nGPU UUID: GPU-1\n",
    }
    root = write_files(tmp_path, files)
    facts = probe(root=root)
    assert facts.gpus == (Gpu(0, "NVIDIA A100", None, "535.104.05"),)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1")
    assert probe(root=root).gpus == facts.gpus
    finding = next(f for f in diagnose(facts) if f.level == "fail" and "driver" in f.message)
    assert "version mismatch" in finding.message


GROUP_V2 = {
    "proc/self/cgroup": "0::/slice/job\n",
    "sys/fs/cgroup/slice/cpu.max": "150000 100000\n",
    "sys/fs/cgroup/slice/job/cpu.max": "max 100000\n",
    "sys/fs/cgroup/slice/job/memory.max": f"{3 * 2**30}\n",
    "sys/fs/cgroup/slice/pids.max": "64\n",
    "sys/fs/cgroup/slice/job/pids.max": "max\n",
}
GROUP_V1 = {
    "proc/self/cgroup": "4:memory:/job\n1:cpu,cpuacct:/job\n",
    "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "-1\n",
    "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
    "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "9223372036854771712\n",
}


@pytest.mark.parametrize(
    ("files", "limits"),
    [
        (GROUP_V2, (1.5, 3 * 2**30, 64)),  # the tightest ancestor
        (GROUP_V1, (None, None, None)),
        (GROUP_V1 | {"sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "50000\n"}, (0.5, None, None)),
        ({}, (None, None, None)),
    ],
)
def test_the_limits_of_control_groups_are_read(tmp_path, files, limits):
    root = write_files(tmp_path, files)
    assert tuple(cgroup_limit(root, name) for name in ("cpu", "memory", "pids")) == limits
    facts = probe(root=root)
    assert facts.usable_cores <= (limits[0] or math.inf)
    assert limits[2] is None or facts.max_processes == limits[2]


def test_the_git_commit_and_dirty_flag_are_read(tmp_path):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@x"]
    assert probe(tmp_path).git_commit is None
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "x"], check=True)
    clean = probe(tmp_path)
    assert len(clean.git_commit or "") == 40
    assert clean.git_dirty is False
    (tmp_path / "new").write_text("x")
    assert probe(tmp_path).git_dirty is True


@pytest.mark.parametrize(
    ("change", "level", "word"),
    [
        ({"shm_gib": 0.9}, "warn", "shared memory"),
        ({"shm_gib": None}, "warn", "shared memory"),
        ({"disk_free_gib": None}, "warn", "free disk"),
        ({"disk_free_gib": 4.9}, "warn", "free disk"),
        ({"memory_available_gib": 3.9}, "warn", "memory: 3.9"),
        ({"memory_limit_gib": 2.0}, "warn", "memory: 2.0"),
        ({"max_processes": 2047}, "warn", "process limit: 2047"),
        ({"affinity_cores": 1}, "warn", "cores"),
        ({"cpu_quota_cores": 1.5}, "warn", "cores"),
        ({"numa_cores": {"0": 0, "1": 16}}, "warn", "NUMA nodes: 2; usable: 0 cores of node 0"),
        ({"versions": {}}, "fail", "torch is not installed"),
        ({"versions": {"torch": "2.10.9"}}, "fail", "torch 2.10.9"),
        ({"versions": {"torch": "2.13.0+cpu"}}, "fail", "torch build: CPU; visible GPUs: 2"),
        ({"gpus": GOOD.gpus[:1], "cuda_visible_devices": "0"}, "warn", "GPUs: 1 of 2"),
        ({"gpus": (), "gpus_present": 0, "cuda_visible_devices": "0"}, "warn", "GPUs: none"),
        ({"gpu_error": "Failed to initialize NVML"}, "fail", "GPU driver: Failed to initialize NVML"),
        ({"gpu_error": f"{children.NO_ANSWER} 8 s"}, "warn", "GPU driver: could not be tested, no answer"),
    ],
)
def test_each_finding_has_a_consequence_and_a_fix(change, level, word):
    bad = [f for f in diagnose(dataclasses.replace(GOOD, **change)) if f.level != "ok"]
    assert [f.level for f in bad] == [level]
    assert word in bad[0].message
    assert bad[0].consequence
    assert bad[0].fix


def test_a_good_machine_has_no_findings():
    no_gpu = dataclasses.replace(GOOD, gpus=(), gpus_present=0, shm_gib=0.0, versions={"torch": "2.13.0+cpu"})
    as_many_cores_as_ranks = dataclasses.replace(no_gpu, affinity_cores=2, cpu_quota_cores=2.0)
    just = {"max_processes": 2048, "disk_free_gib": 5.0, "memory_available_gib": 4.0, "affinity_cores": 2}
    least = [
        dataclasses.replace(GOOD, shm_gib=1.0, **just, versions={"torch": torch})
        for torch in ("2.11.0+cu130", "2.11.1")
    ]
    for machine in (GOOD, no_gpu, as_many_cores_as_ranks, *least):
        assert {f.level for f in diagnose(machine)} == {"ok"}


def has_ended(pid: str) -> bool:
    status = Path("/proc") / pid / "stat"
    return not status.exists() or status.read_text().split()[2] == "Z"


@pytest.fixture
def fake_module(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def make(source: str) -> str:
        (tmp_path / "fake_dist.py").write_text(source)
        return "fake_dist"

    return make


REDUCED = {"world_size": 2, "backend": "gloo", "bytes": 2**22, "seconds_median": 0.004, "busbw_gb_s": 1.05}
FAST, SLOW = ({"bytes": 2**26, "seconds": s, "mb_per_s": 67.1 / s} for s in (0.5, 2.0))
FULL = "import pathlib, sys; (pathlib.Path(sys.argv[1]) / 'x').write_text(''); raise OSError('full')"


def printing(answer: object) -> str:
    return f"print('noise'); print({json.dumps(answer)!r})"


@pytest.mark.parametrize(
    ("check", "source", "level", "words"),
    [
        ("reduce", printing(REDUCED), "ok", "2 gloo ranks, 4.0 MiB in 4.00 ms, 1.05 GB/s"),
        ("reduce", "raise RuntimeError('no gloo here')", "fail", "no gloo here"),
        ("reduce", "print('hi')", "fail", "the test printed no result"),
        ("save", printing(FAST), "ok", "64 MiB in 0.50 s, 134 MB/s"),
        ("save", printing(SLOW), "warn", "34 MB/s"),
        ("save", FULL, "fail", "OSError: full"),
    ],
)
def test_measured_reductions_and_saves_become_findings(fake_module, tmp_path, check, source, level, words):
    module = fake_module(source)
    finding = (
        doctor.all_reduce(20, module)
        if check == "reduce"
        else doctor.checkpoint(tmp_path / "not" / "yet", 20, module)
    )
    assert (finding.level, words in finding.message) == (level, True)
    assert not list(tmp_path.glob(".bert-dp-doctor-*"))


def test_compiled_kernels_are_cached_outside_the_temporary_directories(fake_module, tmp_path, monkeypatch):
    variable, cache = "TORCHINDUCTOR_CACHE_DIR", tmp_path / "cache"
    monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("BERT_DP_CACHE", str(cache))
    name = fake_module(f"import os; print(os.environ[{variable!r}])")
    process = children.start_module(name, [], stdout=subprocess.PIPE, scratch=str(tmp_path / "a"))
    of_ranks = start_environment(RankStart(1, [], on_gpu=True), tmp_path, tmp_path / "b")
    assert process.communicate()[0].strip() == of_ranks[variable] == str(cache / "kernels")
    assert (cache / "kernels").is_dir()
    monkeypatch.setenv(variable, "mine")
    assert children.kernel_caches() == {variable: "mine"}
    cache.chmod(0o777)  # other users could insert code into the cache
    assert children.kernel_caches() == {}
    monkeypatch.setenv("BERT_DP_CACHE", str(tmp_path / "file" / "below"))
    (tmp_path / "file").write_text("")
    assert children.kernel_caches() == {}


def test_a_system_command_returns_its_output_or_the_reason_of_its_failure(tmp_path):
    shell = ["sh", "-c"]
    assert children.run_command([*shell, "echo a; echo b >&2"], 20) == ("a", None)
    assert children.run_command([*shell, "exit 7"], 20) == (None, "exit code 7")
    lines = "echo out; for n in 1 2 3 4; do echo $n >&2; done; exit 1"
    assert children.run_command([*shell, lines], 20) == (None, "2 | 3 | 4")
    assert children.run_command([*shell, "echo out; exit 1"], 20) == (None, "out")
    missing = str(tmp_path / "none")
    assert children.run_command([missing], 20) == (None, f"{missing}: No such file or directory")
    group = [sys.executable, "-I", "-S", "-c", "import os; print(os.getpgid(0))"]
    assert children.run_command(group, 20)[0] != str(os.getpgid(0)), "Ctrl-C must not reach the command"


def test_the_answer_refusal_or_failure_of_a_module_is_passed_on(fake_module):
    issue = {"setting": "a.b", "kind": "conflict", "message": "is odd", "value": 1, "other": "c", "hint": "x"}
    assert children.ask_module(fake_module("print('the answer')"), [], "asking") == "the answer"
    refusal = fake_module(f"print({json.dumps([issue])!r}); raise SystemExit(2)")
    assert [each.to_json() for each in raised_issues(children.ask_module, refusal, [], "asking")] == [issue]
    for source, message in (
        ("raise SystemExit(4)", "asking exited with code 4"),
        ("import os; os.kill(os.getpid(), 9)", r"asking killed by signal 9 \(SIGKILL\); out of memory"),
        ("import os; os.kill(os.getpid(), 11)", r"asking killed by signal 11 \(SIGSEGV\)"),
    ):
        with pytest.raises(SystemExit, match=f"error: {message}"):
            children.ask_module(fake_module(source), [], "asking")


def test_all_reduce_timeout_ends_the_grandchildren_and_shows_stderr(fake_module, tmp_path):
    """A timeout is only a warning, because the machine may be busy."""
    source = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
print("rank 1 is late", file=sys.stderr, flush=True)
time.sleep(600)
"""
    finding = doctor.all_reduce(3, fake_module(source))
    assert (finding.level, "fail" in finding.consequence) == ("warn", False)
    assert "could not be tested, no answer within 3 s | rank 1 is late" in finding.message
    wait_for(lambda: has_ended((tmp_path / "pid").read_text()), seconds=5)


def test_doctor_saves_a_checkpoint_in_the_given_run_directory(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "all_reduce", lambda: doctor.Finding("ok", "all-reduce"))
    _, (*_, loopback, checkpoint, _) = doctor.doctor(Path("/proc/runs"))
    assert (loopback.level, checkpoint.level) == ("ok", "fail")
    assert doctor.checkpoint(tmp_path, 100).level in ("ok", "warn")  # a busy disk is slow
    assert not list(tmp_path.iterdir())


def test_the_modules_of_a_killed_doctor_end(fake_module, tmp_path):
    """A killed doctor cannot stop its modules, so they watch the pid that is in their environment."""
    name = fake_module(
        "import os, time; from bert_dp.training.process import follow_launcher; follow_launcher()\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    )
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    code = f"from launcher.machine import doctor; doctor.all_reduce(60, {name!r})"
    process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path})
    pid = wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    process.kill()
    process.wait()
    wait_for(lambda: has_ended(pid))


@pytest.mark.parametrize(("level", "code"), [("ok", 0), ("warn", 0), ("fail", 1)])
def test_doctor_fails_only_when_a_run_would(monkeypatch, capsys, level, code):
    monkeypatch.setattr(doctor, "doctor", lambda run_dir: (GOOD, [doctor.Finding(level, "something")]))
    assert (app(["doctor"], standalone_mode=False) or 0) == code
    assert "something" in capsys.readouterr().out


TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV12\tSYS\tSYS\tPXB\t0-23,48-71\t0\t\tN/A
GPU1\tNV12\t X \tSYS\tSYS\tPXB\t0-23,48-71\t0\t\tN/A
GPU2\tSYS\tSYS\t X \tPIX\tSYS\t24-47,72-95\t1\t\tN/A
GPU3\tSYS\tSYS\tPIX\t X \tSYS\t24-47,72-95\t1\t\tN/A
NIC0\tPXB\tPXB\tSYS\tSYS\t X \t\t\t\t

Legend:
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
"""
P2P = """\
 \tGPU0\tGPU1\tGPU2\tGPU3\t
 GPU0\tX\tOK\tOK\tCNS\t
 GPU1\tOK\tX\tOK\tOK\t
 GPU2\tOK\tOK\tX\tOK\t
 GPU3\tCNS\tOK\tOK\tX\t

Legend:
  CNS  = Chipset not supported
"""


def with_gpus(*indices: int) -> Environment:
    gpus = tuple(Gpu(index, "H100", 80.0, None) for index in indices)
    return dataclasses.replace(probe(), gpus=gpus, gpu_topology=TOPOLOGY)


def test_findings_on_slow_links_and_disabled_p2p_name_their_pairs_of_visible_gpus() -> None:
    (near,) = link_findings(with_gpus(2, 3), P2P)
    assert (near.level, near.message.partition(": ")[2]) == ("ok", "PIX 2-3")
    assert link_findings(with_gpus(5, 6), "No devices were found") == []
    far, p2p = link_findings(with_gpus(0, 1, 2, 3), P2P)
    assert (far.level, p2p.level) == ("warn", "warn")
    assert far.message.endswith("NV12 0-1; PIX 2-3; SYS 0-2 0-3 1-2 1-3")
    assert p2p.message.endswith("CNS 0-3")
