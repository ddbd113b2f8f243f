"""The memory line: fake tensors against real ones, and what each setting must do to it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from bert_dp.config import Config, load_config
from bert_dp.cost import GIB, memory_estimate_gib, num_parameters
from bert_dp.measure.memory_line import PARTS, choose_device, memory_line
from bert_dp.measure.memory_trace import count_step

CONFIGS = Path(__file__).parents[2] / "configs"
SMALL = [
    "model.vocab_size=512",
    "model.hidden_size=64",
    "model.num_layers=2",
    "model.num_heads=4",
    "model.intermediate_size=128",
    "data.sequence_length=32",
]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def small(*settings: str) -> Config:
    return load_config(CONFIGS / "crammed-bert.yaml", ["precision=fp32", "run.device=cpu", *SMALL, *settings])


@pytest.mark.parametrize(
    ("settings", "ranks"),
    [
        ([], 1),
        ([], 2),
        (["precision=bf16"], 1),
        (["precision=fp64"], 1),
        (["optim.name=lamb"], 1),
        (["optim.name=muon"], 1),
        (["model.head=dense", "model.position=rope", "model.bias=true"], 1),
        (["parallel.activation_checkpointing=true"], 1),
    ],
)
def test_a_real_step_at_a_third_batch_lies_on_the_line(settings: list[str], ranks: int) -> None:
    config = small(*settings)
    line = memory_line(config, ranks, (8, 16))
    assert (line["source"], line["why"]) == ("fake tensors", None)
    device, precision = choose_device(config)
    real = count_step(
        config, precision, device, 24, accumulation=2, keeps_gradients=ranks > 1, tensors=nullcontext()
    )
    peak = real.history()[0].sum(axis=1).max()
    assert line["intercept_bytes"] + 24 * line["bytes_per_sequence"] == pytest.approx(peak, rel=0.01)


def test_small_steps_give_the_line_of_large_ones() -> None:
    """In bf16 a narrow and a wide gradient of the embedding lead in a small step, not in a large one."""
    config = small("precision=bf16", "model.vocab_size=4096")
    near, far = (memory_line(config, 1, sizes) for sizes in ((2, 4), (64, 128)))
    assert near["bytes_per_sequence"] == pytest.approx(far["bytes_per_sequence"], rel=1e-3)
    assert near["intercept_bytes"] == pytest.approx(far["intercept_bytes"], rel=1e-3)
    assert near["intercept_bytes"] + 2 * near["bytes_per_sequence"] < near["peak_bytes"][0]


def test_parts_sum_to_the_peak_and_state_is_what_the_model_needs() -> None:
    config = small()
    line = memory_line(config, 1, (16, 32))  # at 8 another operation leads
    assert tuple(line["parts"]) == PARTS
    for batch, peak in zip(line["sizes"], line["peak_bytes"], strict=True):
        assert sum(a + c * batch for a, c in line["parts"].values()) == pytest.approx(peak, rel=1e-6)
    parameters = num_parameters(config.model, config.data.sequence_length)
    assert line["parts"]["weights"] == [4 * parameters, 0]
    assert line["parts"]["gradients"] == [4 * parameters, 0]
    assert line["parts"]["optimizer"] == [pytest.approx(8 * parameters, rel=0.01), 0]
    assert line["parts"]["activations"][1] > 0
    # at least the log-probabilities and their gradient, fp32, of every predicted position
    assert line["parts"]["logits"][1] >= 2 * 4 * config.num_masked * config.model.vocab_size


def test_gradients_freed_after_a_step_are_not_at_the_peak_of_the_next() -> None:
    one = ["batch.global_size=16", "batch.micro_size=16", "batch.ramp_fraction=0", "batch.ramp_quantum=null"]
    free, kept = (
        memory_line(small(*one, e), 1, (16, 32)) for e in ("parallel.engine=single", "parallel.engine=ddp")
    )
    assert free["parts"]["gradients"][0] < 0.1 * kept["parts"]["gradients"][0]
    assert free["peak_bytes"][1] < kept["peak_bytes"][1]


def test_settings_that_save_memory_lower_the_line() -> None:
    whole, narrow, again = (
        memory_line(small(*s), 1, (8, 16))
        for s in ([], ["precision=bf16"], ["parallel.activation_checkpointing=true"])
    )
    assert narrow["parts"]["activations"][1] < 0.75 * whole["parts"]["activations"][1]
    assert again["bytes_per_sequence"] < 0.8 * whole["bytes_per_sequence"]


def test_zero1_divides_the_optimizer_among_its_ranks() -> None:
    ddp, zero1 = (memory_line(small(f"parallel.engine={e}"), 4, (8, 16)) for e in ("ddp", "zero1"))
    assert zero1["parts"]["optimizer"][0] == pytest.approx(ddp["parts"]["optimizer"][0] / 4, rel=0.01)
    assert zero1["parts"]["activations"] == ddp["parts"]["activations"]
    assert (ddp["state"], zero1["state"]) == ("counted", "cost.py: zero1 on 4 ranks")


def test_without_torchs_private_modules_the_formula_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "bert_dp.measure.memory_trace")
    monkeypatch.setitem(sys.modules, "torch._subclasses.fake_tensor", None)
    line = memory_line(small(), 1, (8, 16))
    assert line["source"] == "formula"
    assert "fake_tensor" in line["why"]
    total = sum(a + 16 * c for a, c in line["parts"].values())
    assert total == pytest.approx(line["peak_bytes"][1], rel=1e-6)
    narrow = small("parallel.tensor=2", "precision=bf16")
    line = memory_line(narrow, 2, (8, narrow.batch.micro_size))
    assert line["source"] == "formula"
    estimate = sum(memory_estimate_gib(narrow, "bf16", 2).values()) * GIB  # autocast's narrow weights too
    assert line["peak_bytes"][1] == pytest.approx(estimate, rel=1e-6)


def test_main_allocates_no_model(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("base: crammed-bert\nprecision: fp32\n")
    code = (
        "import sys, resource, bert_dp.measure.memory_line as m; assert m.main(sys.argv[1:]) == 0; "
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    arguments = [str(config), "1", "64", "128"]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
    )
    line, kib = done.stdout.splitlines()
    found = json.loads(line)
    assert found["source"] == "fake tensors"
    assert found["peak_bytes"][1] > 10 * 2**30
    assert int(kib) * 1024 < 1.2 * 2**30
