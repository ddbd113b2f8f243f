"""What a failure is said to mean, and settings that really bring a run below its memory."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from bert_dp import files
from bert_dp.config import Config, batch_layout, dump_config, load_config, shipped_configs
from bert_dp.cost import memory_estimate_gib
from bert_dp.files.models import Failure, RunMemory, kind_of_text
from launcher.watch.failure import MEANING, SPARE, explain, what_fits

NONE = RunMemory(peaks_gib={}, oom_kills=0, counter="memory.events")
CUDA = "OutOfMemoryError: CUDA out of memory. GPU 1 has a total capacity of {} of which 5 MiB is free."
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
    """The configuration after the setting of a fix."""
    (micro,) = re.findall(r"batch.micro_size=(\d+)", fix)
    return base.model_copy(update={"batch": base.batch.model_copy(update={"micro_size": int(micro)})})


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("capacity", [4.0, 6.0, 10.0])
def test_what_is_advised_fits_divides_and_keeps_the_global_batch(world: int, capacity: float) -> None:
    base = config()
    estimate, fix = what_fits(base, "bf16", world, capacity, on_gpu=True)
    assert f"{size(base, world):.2f} GiB at micro batch 128; there are {capacity:.2f} GiB" in estimate
    changed = applied(base, fix)
    assert batch_layout(changed, world).global_size == base.batch.global_size
    assert size(changed, world) <= (1 - SPARE) * capacity
    before, after = (512 // (of.batch.micro_size * world) for of in (base, changed))
    assert f" (accumulation {before} -> {after}, the" in fix
    assert fix.endswith(f"about {size(changed, world):.2f} GiB")
    larger = applied(base, f"batch.micro_size={2 * changed.batch.micro_size}")
    assert size(larger, world) > (1 - SPARE) * capacity, "micro batches of 512 / world are powers of two"


def test_an_estimate_that_fits_did_not_so_less_is_advised() -> None:
    base = config("batch.micro_size=8")
    for times, fits in ((1000.0, True), (1.05, True), (0.95, False)):
        estimate, fix = what_fits(base, "bf16", 1, times * size(base, 1), on_gpu=True)
        assert ("more was taken than the estimate counts" in estimate) == fits
        assert size(applied(base, fix), 1) <= (1 - SPARE) * size(base, 1)


def test_where_one_sequence_is_too_much_the_other_settings_are_named() -> None:
    _, fix = what_fits(config(), "bf16", 4, 0.1, on_gpu=True)
    assert fix.startswith("nothing fits")
    assert "parallel.engine=zero1" in fix


def raised(message: str) -> Failure:
    return Failure(rank=0, message=message, kind=kind_of_text(message))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text(dump_config(config()))
    gpus = [{"memory_gib": 12.0}, {"memory_gib": 16.0}]
    files.write_json(
        tmp_path / "environment.json", {"gpus": gpus, "memory_gib": 64.0, "memory_limit_gib": 20.0}
    )
    return tmp_path


@pytest.mark.parametrize(
    ("message", "gib"),
    [
        (CUDA.format("10.00 GiB"), 10),
        (CUDA.format("8192.00 MiB"), 8),
        ("AcceleratorError: CUDA error: out of memory", 12),
    ],
)
def test_a_device_out_of_memory_says_what_to_lower(run_dir: Path, message: str, gib: int) -> None:
    explained = explain(raised(message), run_dir, 1, NONE)
    assert f"there are {gib:.2f} GiB" in explained.explanation[-1]
    assert explained.fix[0].startswith("batch.micro_size=")
    assert explained.memory is None


def test_a_host_out_of_memory_shares_it_between_the_ranks(run_dir: Path) -> None:
    assert "fewer ranks" in explain(raised(HOST), run_dir, 2, NONE).fix[0], "GPUs hold the model"
    (run_dir / "config.yaml").write_text(dump_config(config("run.device=cpu")))
    explained = explain(raised(HOST), run_dir, 2, NONE)
    assert explained.explanation[0] == "control group limit 20.00 GiB / 2 ranks = 10.00 GiB a rank"
    assert "there are 10.00 GiB" in explained.explanation[1]
    assert explained.memory is NONE
    files.write_json(run_dir / "environment.json", {"memory_gib": 64.0})
    whole = explain(raised(HOST), run_dir, 4, NONE, here=2).explanation[0]  # of two nodes
    assert whole == "machine 64.00 GiB / 2 ranks = 32.00 GiB a rank"


@pytest.mark.parametrize(
    ("oom_kills", "said"),
    [(2, "for want of host memory"), (0, "from outside: no"), (None, "or by the kernel")],
)
def test_a_kill_for_want_of_memory_is_told_from_one_by_someone(
    run_dir: Path, oom_kills: int | None, said: str
) -> None:
    (run_dir / "config.yaml").write_text(dump_config(config("run.device=cpu")))
    killed = Failure(rank=1, kind="killed", message="killed by signal 9", killed_by=signal.SIGKILL)
    for peaks, peaked in (({"rank 1": 3.5}, "peaked at 3.50 GiB"), ({}, "before its memory was seen")):
        memory = RunMemory(peaks_gib=peaks, oom_kills=oom_kills, counter="memory.events")
        explained = explain(killed, run_dir, 2, memory)
        assert said in explained.explanation[0]
        assert peaked in explained.explanation[0]
        assert explained.memory is memory
        assert explained.kind == ("host_memory" if oom_kills else "killed")
        assert ("host out of memory" in explained.message) == bool(oom_kills)
        assert explained.fix[0].startswith("batch.micro_size=") == bool(oom_kills)


@pytest.mark.parametrize("number", MEANING)
def test_a_crash_is_explained(tmp_path: Path, number: int) -> None:
    explained = explain(Failure(rank=0, message="killed", killed_by=number), tmp_path, 1, NONE)
    assert (*explained.explanation, *explained.fix) == MEANING[number]


@pytest.mark.parametrize("message", ["ValueError: no", HOST])
def test_without_a_configuration_nothing_is_made_up(tmp_path: Path, message: str) -> None:
    explained = explain(raised(message), tmp_path, 1, NONE)
    assert (explained.message, explained.explanation, explained.fix) == (message, [], [])
