"""Test the ONNX graph of every shipped configuration's model at full width with two layers. The full size is
tested by `make export`."""

from pathlib import Path

import numpy as np
import pytest
import torch

from bert_dp.config import Config, Kind
from bert_dp.exporting import check, load_exported
from bert_dp.exporting import source as write
from bert_dp.exporting.source import ExportSource, describe, open_run
from tests.helpers import PRETRAINING
from tests.runs_to_export import config_of, finetuned, write_run

SHIPPED = {path.stem: config_of(path.stem) for path in PRETRAINING}
ONCE = {(each.model, each.data.sequence_length): name for name, each in SHIPPED.items()}.values()
"""Names of configurations that differ in model or length, not only in the schedule."""
CONFIGS: dict[str, tuple[Config, Kind]] = {
    **{name: (SHIPPED[name], "mlm") for name in ONCE},
    "recipe": (finetuned(config_of("quickstart"), "recipe"), "classifier"),
    "recipe, mean": (finetuned(config_of("quickstart"), "recipe", pooling="mean"), "classifier"),
    "rms, encoder": (config_of("small-text"), "encoder"),
    "token types": (config_of("bert-simple", model={"norm_position": "post", "token_types": 2}), "encoder"),
    "local": (config_of("crammed-rope", model={"local_attention": 16}), "encoder"),
}


def source_of(folder: Path, name: str) -> ExportSource:
    config, kind = CONFIGS[name]
    return open_run(write_run(folder / "run", config), encoder=kind == "encoder")


def difference(
    source: ExportSource, compute: load_exported.Compute, *, tolerance: float | None = None
) -> float:
    """Return the largest difference over the batches of `export check`. With a `tolerance`, also check that
    the positions of the largest outputs agree."""
    exported = describe(source, "onnx")
    batches = check.make_batches(source, exported)
    assert {ids.shape[1] for ids, *_ in batches} == {5, 37, 128, source.config.data.sequence_length}
    rows = [
        check.compare(batch, check.reference(source, *batch), compute(*batch), exported, tolerance)
        for batch in batches
    ]
    assert tolerance is None or all(row.top1 in (None, 1) for row in rows)
    return max(row.difference for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_onnx_runtime_computes_the_outputs_of_the_model(tmp_path: Path, name: str) -> None:
    pytest.importorskip("onnxruntime")
    source = source_of(tmp_path, name)
    write.write_onnx(source, tmp_path, int8=False)
    assert difference(source, load_exported.open_onnx(tmp_path, source.kind), tolerance=1e-4) < 1e-4


@pytest.mark.slow
def test_an_onnx_masked_language_model_also_serves_as_encoder_and_int8_is_close(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    source = source_of(tmp_path, "crammed-bert")
    whole, small = tmp_path / "fp32", tmp_path / "int8"
    for folder in (whole, small):
        folder.mkdir()
        write.write_onnx(source, folder, int8=folder == small)
    ids_BS = np.array([[7, 8, 9, 10]])
    hidden_BSH = load_exported.open_onnx(whole, "encoder")(ids_BS, np.ones_like(ids_BS))
    with torch.inference_mode():
        expected = source.model.model(torch.from_numpy(ids_BS)).numpy()
    assert hidden_BSH == pytest.approx(expected, abs=1e-4)
    sizes = [(folder / "model.onnx").stat().st_size for folder in (small, whole)]
    assert sizes[0] < 0.4 * sizes[1]
    assert 1e-4 < difference(source, load_exported.open_onnx(small, source.kind)) < 0.1


@pytest.mark.parametrize("name", ["token types", "local"])
def test_a_graph_has_the_inputs_and_windows_of_its_model(tmp_path: Path, name: str) -> None:
    source = source_of(tmp_path, name)
    write.trace(source, bf16=True)  # must not change the source
    assert {parameter.dtype for parameter in source.model.parameters()} == {torch.float32}
    graph = write.trace(source).module()

    def compute(*inputs: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            return graph(*map(torch.from_numpy, inputs))[0].numpy()

    assert difference(source, compute, tolerance=1e-4) < 1e-4
    assert len(check.make_batches(source, describe(source, "onnx"))[0]) == (3 if name == "token types" else 2)
