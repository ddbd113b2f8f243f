"""Tests of `precision: auto`: launcher and ranks choose alike by device, engine and checkpoint."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from bert_dp import files
from bert_dp.config import ENGINES, bf16_units, decide_precision, dump_config
from bert_dp.training import build, devices
from launcher import job
from launcher.machine import environment
from launcher.machine.environment import Environment, precision_of
from launcher.report import run_files
from launcher.run import train
from launcher.run.restarts import RunOptions
from launcher.run.train import check_memory
from launcher.run.trials import trial_precision
from launcher.scale.grid import Grid, Settings
from launcher.tune import batch
from launcher.watch.failure import explain_memory, suggest_micro_batch
from tests.helpers import make_config, write_files
from tests.ranks import OneOf
from tests.states import FACTS
from tests.tensors import CPU

MACHINE = dataclasses.replace(environment.probe(), gpus=(), memory_available_gib=64.0, memory_limit_gib=None)
WITH = dataclasses.replace(MACHINE, bf16_units=("amx_bf16", "avx512_bf16"))
WITHOUT = dataclasses.replace(MACHINE, bf16_units=())
AUTO = make_config("precision=auto", "run.device=cpu")


@pytest.mark.parametrize(
    ("line", "units"),
    [
        ("flags\t\t: fpu avx512_bf16 amx_bf16 amx_tile", ("amx_bf16", "avx512_bf16")),
        ("flags : fpu avx512f avx512_bf16", ("avx512_bf16",)),
        ("flags : fpu avx512f avx512_bf16x", ()),
        ("flags : fpu avx2\npower management: amx_bf16", ()),
        ("Features : fp asimd bf16 i8mm", ()),
    ],
)
def test_bf16_units_are_flags_of_cpuinfo(tmp_path: Path, line: str, units: tuple[str, ...]) -> None:
    text = f"processor\t: 0\nmodel name\t: a CPU\n{line}\n\nprocessor\t: 1\n{line}\n"
    root = write_files(tmp_path, {"proc/cpuinfo": text})
    assert bf16_units(root) == units
    assert environment.probe(root=root).bf16_units == units


@pytest.mark.parametrize(
    ("setting", "on_gpu", "has_bf16", "kept", "chosen"),
    [
        ("auto", False, True, None, "bf16"),
        ("auto", False, False, None, "fp32"),
        ("auto", True, True, None, "bf16"),
        ("auto", True, False, None, "fp16"),
        ("auto", False, False, "bf16", "bf16"),
        ("auto", False, True, "fp32", "fp32"),
        ("fp32", False, True, "bf16", "fp32"),
        ("bf16", False, False, None, "bf16"),
    ],
)
def test_auto_precision(setting: str, on_gpu: bool, has_bf16: bool, kept: str | None, chosen: str) -> None:
    for engine in ("ddp", "deepspeed"):
        assert decide_precision(setting, [engine], on_gpu=on_gpu, has_bf16=has_bf16, kept=kept) == chosen


def test_an_engine_without_bf16_decides_for_all_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = dataclasses.replace(ENGINES["deepspeed"], refused_precisions=("fp64", "fp16", "bf16"))
    monkeypatch.setitem(ENGINES, "deepspeed", facts)
    assert decide_precision("auto", ["ddp", "deepspeed"], on_gpu=False, has_bf16=True) == "fp32"
    assert decide_precision("auto", ["ddp", "zero1"], on_gpu=False, has_bf16=True) == "bf16"
    assert trial_precision(AUTO, WITH, ["ddp", "deepspeed"], on_gpu=False) == "fp32"


@pytest.mark.parametrize(
    ("able", "settings", "kept", "name"),
    [
        ([True, True], (), None, "bf16"),
        ([True, False], (), None, "fp32"),
        ([False, True], (), None, "fp32"),
        ([True, True], ("precision=fp32",), None, "fp32"),
        ([True], (), "fp32", "fp32"),
        ([True, False], (), "bf16", "bf16"),  # a resumed run keeps its precision
    ],
)
def test_ranks_compute_in_bf16_only_if_all_of_them_can(
    monkeypatch: pytest.MonkeyPatch, able: list[bool], settings: tuple[str, ...], kept: str | None, name: str
) -> None:
    monkeypatch.setattr(devices, "bf16_units", lambda: ("amx_bf16",) if able[0] else ())
    resumed: Any = kept and SimpleNamespace(facts=SimpleNamespace(precision=kept))
    config = make_config("precision=auto", *settings)
    comm = OneOf(0, len(able), lambda own: [own, *([of] for of in able[1:])])
    rank: Any = SimpleNamespace(config=config, comm=comm, device=CPU)
    assert build.agree_precision(rank, resumed).name == name


@pytest.mark.parametrize(
    ("capability", "chosen"), [((7, 5), "fp16"), ((8, 0), "bf16"), ((8, 9), "bf16"), ((9, 0), "bf16")]
)
def test_auto_is_bf16_on_gpus_since_ampere(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], chosen: str
) -> None:
    queried: list[Any] = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda of: (queried.append(of), capability)[1])
    gpu = torch.device("cuda", 3)
    assert devices.choose_precision("auto", gpu).name == chosen
    assert queried == [gpu], "a machine may have GPUs of two kinds"


@pytest.mark.parametrize(("machine", "chosen"), [(WITH, "bf16"), (WITHOUT, "fp32")])
def test_launcher_and_ranks_use_the_same_precision(
    machine: Environment, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "bf16_units", lambda: machine.bf16_units)
    assert devices.choose_precision(AUTO.precision, CPU).name == chosen
    assert check_memory(AUTO, 2, machine, on_gpu=False).precision == chosen
    assert check_memory(AUTO, 2, machine, on_gpu=False, kept="fp64").precision == "fp64"
    assert precision_of(AUTO, machine.bf16_units, on_gpu=True) == "bf16"
    options = Settings((1, 2), ("weak",), ("ddp", "zero1"), (1,), "torchrun", 1, 2, 1, None)
    grid = Grid(AUTO, options, machine, on_gpu=False)
    assert {grid.config_of(cell).precision for cell in grid.cells} == {chosen}
    assert (grid.config, grid.precision) == (AUTO, chosen)
    loaded = batch.job.Job("it", AUTO, machine)
    spec = batch.search_spec(loaded, batch.BatchOptions("1", 1.0, 1.0, "torchrun"))
    assert (spec.precision, spec.config.precision) == (chosen, "auto")


def test_memory_advice_uses_the_precision_of_the_machine(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(dump_config(AUTO))
    for machine in (WITH, WITHOUT):
        files.write_json(tmp_path / "environment.json", machine.to_json())
        advised = explain_memory(tmp_path, 1, "", on_host=True, here=1)[0][-1]
        for name in ("bf16", "fp32"):
            fits = suggest_micro_batch(AUTO, name, 1, MACHINE.memory_gib, on_gpu=False)[0]
            assert (advised == fits) == (name == ("bf16" if machine is WITH else "fp32"))


def test_a_dry_run_shows_the_chosen_precision_and_warns_of_emulation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("BERT_DP_CACHE", str(tmp_path / "cache"))
    run_dir = tmp_path / "run"

    def dry_run(machine: Environment, *settings: str) -> tuple[str, bool]:
        """Return the precision of the estimate, and True if there is a warning."""
        monkeypatch.setattr(environment, "probe", lambda *_: machine)
        loaded, console = job.load(None, ["run.device=cpu", *settings], run_dir), Console(width=400)
        assert train.train(loaded, RunOptions("1", run_dir, dry_run=True), console) == 0
        shown = capsys.readouterr().out
        return shown.partition("(estimate, ")[2].partition(",")[0], "bf16 is emulated on this CPU" in shown

    assert dry_run(WITH) == dry_run(WITH, "precision=bf16") == ("bf16", False)
    assert dry_run(WITHOUT) == ("fp32", False)
    assert dry_run(WITHOUT, "precision=bf16") == ("bf16", True)
    config = job.load(None, ["run.device=cpu"]).config
    facts = {**FACTS, "step": 1, "precision": "bf16", "config": config.model_dump(mode="json")}
    write_files(run_dir / "checkpoints/step-00000001", {"state.json": json.dumps(facts)})
    assert dry_run(WITHOUT)[0] == "bf16", "a resumed run keeps its precision"


def test_a_run_without_a_summary_reports_the_precision_of_its_ranks(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(dump_config(AUTO))
    facts: dict[str, Any]
    for facts, chosen in (({}, None), ({"worker": "x"}, None), ({"worker": {"precision": "bf16"}}, "bf16")):
        files.write_json(tmp_path / "environment.json", facts)
        assert run_files.load(tmp_path).summary.precision == chosen


@pytest.mark.parametrize(
    ("name", "device", "allowed"),
    [
        ("bf16", "cuda", "high"),
        ("fp16", "cuda", "high"),
        ("fp32", "cuda", "highest"),
        ("bf16", "cpu", "medium"),
    ],
)
def test_fp32_products_use_tf32_only_in_16_bit_runs(name: str, device: str, allowed: str) -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        devices.allow_tf32(devices.precision_of(name), torch.device(device))
        assert torch.get_float32_matmul_precision() == allowed
    finally:
        torch.set_float32_matmul_precision(before)
