"""Every shipped configuration as a graph for ONNX Runtime, at its own widths and two layers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from bert_dp.config import Config, Kind, shipped_configs
from bert_dp.export import check, foreign, trace
from bert_dp.export.whole import Source, open_run
from bert_dp.record.exported import Exported
from tests.runs_to_export import config_of, finetuned, write_run

NAMES = [path.stem for path in sorted(shipped_configs().glob("*.yaml")) if path.stem != "glue"]
CONFIGS: dict[str, tuple[Config, Kind]] = {
    **{name: (config_of(name), "mlm") for name in NAMES},
    "recipe": (finetuned(config_of("quickstart"), "recipe"), "classifier"),
    "recipe, mean": (finetuned(config_of("quickstart"), "recipe", pooling="mean"), "classifier"),
    "rms, encoder": (config_of("small-text"), "encoder"),
}


def source_of(folder: Path, config: Config, kind: Kind) -> Source:
    return open_run(write_run(folder / "run", config), encoder=kind == "encoder")


def about(source: Source, form: str) -> Exported:
    config = source.config
    return Exported(
        format=form,  # type: ignore[arg-type]
        kind=source.kind,
        run="",
        weights_sha256="0" * 64,
        step=1,
        sequence_length=config.data.sequence_length,
        vocab_size=config.model.vocab_size,
        parameters=1,
        pad=source.special["pad"],
    )


def differences(source: Source, exported: Exported, compute: foreign.Compute) -> list[float]:
    """Of each batch that `export check` compares."""
    batches = check.make_batches(source, exported)
    lengths = {batch[0].shape[1] for batch in batches}
    assert lengths == {5, 37, 128, source.config.data.sequence_length}
    rows = [
        check.compare(batch, check.reference(source, *batch), compute(*batch), exported, 1e-4)
        for batch in batches
    ]
    assert all(row["top1"] in (None, 1) for row in rows)
    return [row["difference"] for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_onnx_runtime_computes_the_same(tmp_path: Path, name: str) -> None:
    pytest.importorskip("onnxruntime")
    source = source_of(tmp_path, *CONFIGS[name])
    trace.write_onnx(source, tmp_path, int8=False)
    compute = foreign.open_onnx(tmp_path, source.kind)
    assert max(differences(source, about(source, "onnx"), compute)) < 1e-4


@pytest.mark.slow
def test_a_masked_language_model_as_onnx_is_an_encoder_too(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    source = source_of(tmp_path, *CONFIGS["quickstart"])
    trace.write_onnx(source, tmp_path, int8=False)
    ids_BS = np.array([[7, 8, 9, 10]])
    found = foreign.open_onnx(tmp_path, "encoder")(ids_BS, np.ones_like(ids_BS))
    with torch.inference_mode():
        assert found == pytest.approx(source.model.model(torch.from_numpy(ids_BS)).numpy(), abs=1e-4)


@pytest.mark.slow
def test_eight_bits_are_near_and_not_the_same(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    source = source_of(tmp_path, *CONFIGS["crammed-bert"])
    for int8 in (False, True):
        (tmp_path / str(int8)).mkdir()
        trace.write_onnx(source, tmp_path / str(int8), int8=int8)
    whole, small = (tmp_path / str(int8) / "model.onnx" for int8 in (False, True))
    assert small.stat().st_size < 0.4 * whole.stat().st_size
    exported = about(source, "onnx")
    (batch, *_) = check.make_batches(source, exported)
    found = foreign.open_onnx(small.parent, source.kind)(*batch)
    row = check.compare(batch, check.reference(source, *batch), found, exported, None)
    assert 1e-4 < row["difference"] < 0.1


@pytest.mark.slow
def test_a_norm_without_a_mean_is_one_operator_and_the_source_keeps_its_precision(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    source = source_of(tmp_path, *CONFIGS["rms, encoder"])
    trace.trace(source, torch.bfloat16)
    assert {parameter.dtype for parameter in source.model.parameters()} == {torch.float32}
    trace.write_onnx(source, tmp_path, int8=False)
    kinds = [node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node]
    norms = [kind for kind in kinds if kind.endswith("SimplifiedLayerNormalization")]
    assert len(norms) == 2 * source.config.model.num_layers + 2  # of the blocks, the embedding and the last
    assert "ReduceMean" not in kinds
