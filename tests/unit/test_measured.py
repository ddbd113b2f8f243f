"""Tests of the machine measurements, the step profile and the choice to compile."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bert_dp.measure import disk, matmul_peak, profile_step
from bert_dp.measure.profile_step import lone_trainer
from bert_dp.model.load import is_compiled
from bert_dp.training import checkpoint
from tests.helpers import TINY_MODEL, make_config
from tests.tensors import CPU


def test_a_matrix_product_counts_two_operations_per_multiplication(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)

    def product(x: torch.Tensor, w: torch.Tensor) -> None:
        assert (x.shape, w.shape) == ((8, 2), (4, 2))
        clock.now += 0.5

    monkeypatch.setattr(matmul_peak, "time", clock)
    monkeypatch.setattr(matmul_peak, "product", product)
    rate = matmul_peak.matmul_rate((8, 4, 2), CPU, torch.float32, 5.0)
    assert rate == 2 * 8 * 4 * 2 / 0.5


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32), ("fp64", torch.float64)]
)
def test_the_matmul_peak_is_measured_in_the_dtype_of_the_precision(
    precision: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[tuple[torch.dtype, float]] = []

    def flops(device: torch.device, dtype: torch.dtype, seconds: float) -> float:
        calls.append((dtype, seconds))
        return 3e9

    monkeypatch.setattr(matmul_peak, "matmul_flops", flops)
    monkeypatch.setattr(matmul_peak, "use_all_cores", lambda: None)
    matmul_peak.main(precision, 0.25)
    result = json.loads(capsys.readouterr().out)
    assert (result["matmul_flops"], result["precision"]) == (3e9, precision)
    assert calls == [(dtype, 0.25)]


def test_disk_speed_is_measured_with_a_verified_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both halves of the data count, a MB is 1e6 bytes, and no file remains."""
    clock = iter([10.0, 10.5, 11.0, 11.5, 12.0, 12.5])
    monkeypatch.setattr(disk, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    disk.main(tmp_path, 2**20)
    result = json.loads(capsys.readouterr().out)
    assert result == {"bytes": 2**21, "seconds": 0.5, "mb_per_s": 2**21 / 0.5 / 1e6}
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(checkpoint, "check", lambda path: "w: other bytes")
    with pytest.raises(RuntimeError, match="w: other bytes"):
        disk.main(tmp_path, 2**16)
    monkeypatch.setattr(checkpoint, "check", lambda path: None)
    load = checkpoint.load_tensors
    halves = {"w": torch.zeros(1, dtype=torch.int64)}
    monkeypatch.setattr(checkpoint, "load_tensors", lambda path: {**load(path), "optimizer": halves})
    with pytest.raises(RuntimeError, match="the data read differ from the data written"):
        disk.main(tmp_path, 2**16)


class Ticks:
    """A clock that advances by one second at each reading."""

    now = 0.0

    def mark(self) -> float:
        self.now += 1
        return self.now

    def between(self, begin: float, end: float) -> float:
        return end - begin


def test_the_profile_of_a_step(shards: Path, tmp_path: Path) -> None:
    """One gradient becomes ready in each second of the backward pass."""
    config = make_config(
        data={"path": str(shards), "sequence_length": 16},
        model=TINY_MODEL,
        batch={"global_size": 4, "micro_size": 2},
        compile="off",
    )
    clock: Any = Ticks()
    with lone_trainer(config, tmp_path) as trainer:
        result = profile_step.measure(trainer, clock)
        count = len(list(trainer.bare_model.parameters()))
    assert (result["micro_s"], result["backward_s"], result["optimizer_s"]) == (count + 2.0, count + 1.0, 1.0)
    assert [gradient["ready_s"] for gradient in result["gradients"]] == [*range(1, count + 1)]
    assert sum(gradient["bytes"] for gradient in result["gradients"]) == 4 * result["parameters"]


@pytest.mark.parametrize(
    ("settings", "compiled"),
    [
        ("compile=auto", ("cuda",)),
        ("compile=auto parallel.engine=deepspeed parallel.zero_stage=3", ()),
        ("compile='on'", ("cpu", "cuda")),
        ("compile='off'", ()),
    ],
)
def test_compile_auto_compiles_only_on_a_gpu(settings: str, compiled: tuple[str, ...]) -> None:
    config = make_config(*settings.split())
    assert tuple(device for device in ("cpu", "cuda") if is_compiled(config, device)) == compiled
