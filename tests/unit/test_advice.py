"""What a failure is said to mean, and settings that really bring a run below its memory."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from bert_dp import files
from bert_dp.config import Config, batch_layout, dump_config, load_config, shipped_configs
from bert_dp.cost import GIB, memory_estimate_gib
from bert_dp.files.models import Failure, RunMemory, kind_of_text
from launcher.watch.advice import MEANING, SPARE, explain, what_fits


def memory_of(peaks: dict[str, float], oom_kills: int | None, counter: str | None) -> RunMemory:
    return RunMemory(peaks_gib=peaks, oom_kills=oom_kills, counter=counter)


NONE = memory_of({}, 0, "memory.events")
CUDA = (
    "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 10.00 "
    "GiB of which 1.00 GiB is free. Process 7 has 3.00 GiB memory in use. Including non-PyTorch memory, this "
    "process has 6.00 GiB memory in use."
)
ALONE = (
    "OutOfMemoryError: CUDA out of memory. GPU 1 has a total capacity of 8192.00 MiB of which 5 MiB is free."
)
HOST = (
    "RuntimeError: [enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 99 bytes."
)


def config(*overrides: str) -> Config:
    batch = "batch.global_size=512 batch.micro_size=128 batch.ramp_fraction=0 batch.ramp_quantum=null"
    return load_config(shipped_configs() / "crammed-bert.yaml", [*batch.split(), *overrides])


def size(of: Config, world: int) -> float:
    return sum(memory_estimate_gib(of, "bf16", world).values())


def applied(base: Config, fix: str) -> Config:
    """The configuration after the `--set` options of a fix."""
    pairs = re.findall(r"--set (\S+)=(\S+)", fix)
    assert pairs, fix
    tree = base.model_dump(mode="json")
    for name, value in pairs:
        section, key = name.split(".")
        tree[section][key] = yaml.safe_load(value)
    return Config.model_validate(tree, strict=False)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("capacity", [2.5, 4.0, 6.0, 10.0])
def test_what_is_advised_fits_divides_and_keeps_the_global_batch(world: int, capacity: float) -> None:
    base = config()
    equation, fixes = what_fits(base, "bf16", world, capacity, on_gpu=True)
    assert f"there are {capacity:.2f} GiB" in equation
    changed = applied(base, fixes[0])
    assert batch_layout(changed, world).global_size == base.batch.global_size
    assert size(changed, world) <= (1 - SPARE) * capacity
    assert fixes[0].endswith(f"the global batch of 512 stays): about {size(changed, world):.2f} GiB")
    before, after = (512 // (of.batch.micro_size * world) for of in (base, changed))
    assert f" (accumulation {before} -> {after}, the" in fixes[0]
    only_micro = {"batch.micro_size"} == {name for name, _ in re.findall(r"--set (\S+)=(\S+)", fixes[0])}
    larger = changed.model_copy(
        update={"batch": changed.batch.model_copy(update={"micro_size": 2 * changed.batch.micro_size})}
    )
    if only_micro:  # micro batches of 512 / world are powers of two: the next one is the double
        assert size(larger, world) > (1 - SPARE) * capacity


def test_the_equation_is_the_estimate() -> None:
    base = config()
    equation, _ = what_fits(base, "bf16", 2, None, on_gpu=True)
    line = r"([\d.]+) GiB \+ ([\d.]+) GiB a sequence x micro batch (\d+) = ([\d.]+) GiB"
    fixed, slope, micro, total = map(float, re.findall(line, equation)[0])
    assert fixed + slope * micro == pytest.approx(total, abs=0.02)
    assert total == pytest.approx(size(base, 2), abs=0.01)


def test_an_estimate_that_fits_did_not_so_less_is_advised() -> None:
    base = config("batch.micro_size=8")
    equation, fixes = what_fits(base, "bf16", 1, 1000.0, on_gpu=True)
    assert "more was taken than the estimate counts" in equation
    assert size(applied(base, fixes[0]), 1) <= (1 - SPARE) * size(base, 1)
    for times, fits in ((1.05, True), (0.95, False)):
        equation, _ = what_fits(base, "bf16", 1, times * size(base, 1), on_gpu=True)
        assert ("more was taken" in equation) == fits


def test_where_one_sequence_is_too_much_the_engine_is_changed_or_nothing_fits() -> None:
    base = config("optim.name=adamw")
    fixed = size(config("batch.micro_size=1"), 4)
    _, fixes = what_fits(base, "bf16", 4, fixed, on_gpu=True)
    assert "parallel.engine=zero1" in fixes[0]
    assert "activation_checkpointing" not in fixes[0].partition("parallel.engine")[0]
    _, fixes = what_fits(base, "bf16", 4, 0.1, on_gpu=True)
    assert fixes[0].startswith("nothing fits by the estimate: a smaller model")


def raised(message: str) -> Failure:
    return Failure(rank=0, message=message, kind=kind_of_text(message))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text(dump_config(config()))
    facts = {
        "gpus": [{"memory_gib": 12.0}, {"memory_gib": 16.0}],
        "memory_gib": 64.0,
        "memory_limit_gib": 20.0,
    }
    files.write_json(tmp_path / "environment.json", facts)
    return tmp_path


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (CUDA, "there are 7.00 GiB"),
        (CUDA.replace("6.00", "8.50"), "there are 10.00 GiB"),
        (ALONE, "there are 8.00 GiB"),
        ("AcceleratorError: CUDA error: out of memory", "there are 12.00 GiB"),
    ],
)
def test_a_device_out_of_memory_says_what_to_lower(run_dir: Path, message: str, said: str) -> None:
    explained = explain(raised(message), run_dir, 1, NONE)
    assert said in explained.explanation[-1]
    assert explained.fix[0].startswith("--set batch.micro_size=")
    assert explained.memory is None
    others = "other processes hold 3.00 GiB of its 10.00 GiB (`nvidia-smi` names them)"
    assert (others in explained.explanation) == (message == CUDA)


def test_a_host_out_of_memory_shares_it_between_the_ranks(run_dir: Path) -> None:
    (run_dir / "config.yaml").write_text(dump_config(config("run.device=cpu")))
    explained = explain(raised(HOST), run_dir, 2, NONE)
    assert explained.explanation[0] == "control group's limit 20.00 GiB / 2 ranks = 10.00 GiB a rank"
    assert "there are 10.00 GiB" in explained.explanation[1]
    assert explained.memory is NONE
    files.write_json(run_dir / "environment.json", {"memory_gib": 64.0})
    whole = explain(raised(HOST), run_dir, 4, NONE).explanation[0]
    assert whole == "machine 64.00 GiB / 4 ranks = 16.00 GiB a rank"
    (run_dir / "config.yaml").write_text(dump_config(config()))
    files.write_json(run_dir / "environment.json", {"gpus": [{"memory_gib": 12.0}]})
    assert explain(raised(HOST), run_dir, 2, NONE).fix[0].startswith("on GPUs the host holds")


def test_a_kill_for_want_of_memory_is_told_from_one_by_someone(run_dir: Path) -> None:
    (run_dir / "config.yaml").write_text(dump_config(config("run.device=cpu")))
    killed = Failure(rank=1, message="killed by signal 9 (SIGKILL)", killed_by=signal.SIGKILL)
    peaks = {"rank 1": 3.5}
    explained = explain(killed, run_dir, 2, memory_of(peaks, 2, "memory.events"))
    assert (explained.message, explained.kind) == (
        "killed by signal 9 (SIGKILL): host out of memory",
        "host_memory",
    )
    assert explained.explanation[0] == (
        "the kernel killed 2 processes for want of host memory (oom_kill in "
        "memory.events); its memory peaked at 3.50 GiB"
    )
    assert explained.fix[0].startswith("--set batch.micro_size=")
    assert explained.memory is not None
    one = explain(killed, run_dir, 2, memory_of(peaks, 1, "memory.events"))
    assert one.explanation[0].startswith("the kernel killed 1 process for want")
    by_someone = explain(killed, run_dir, 2, memory_of(peaks, 0, "memory.events"))
    assert (by_someone.message, by_someone.kind) == (killed.message, killed.kind)
    assert tuple(by_someone.explanation) == (
        "from outside: no out-of-memory kill was counted; its memory peaked at 3.50 GiB",
    )
    unknown = explain(killed, run_dir, 2, memory_of({}, None, None))
    assert "no oom_kill counter can be read; it ended before its memory was seen" in unknown.explanation[0]


@pytest.mark.parametrize("number", MEANING)
def test_a_crash_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(total=8 * GIB, used=6 * GIB, free=GIB))
    explained = explain(Failure(rank=0, message="killed", killed_by=number), tmp_path, 1, NONE)
    assert explained.explanation[0].startswith(MEANING[number][0])
    assert ("/dev/shm has 1.00 GiB free" in explained.explanation[0]) == (number == signal.SIGBUS)
    assert explained.fix == [MEANING[number][1]]


@pytest.mark.parametrize("message", ["ValueError: no", HOST])
def test_without_a_configuration_nothing_is_made_up(tmp_path: Path, message: str) -> None:
    explained = explain(raised(message), tmp_path, 1, NONE)
    assert (explained.message, explained.explanation, explained.fix) == (message, [], [])
