"""A run's model as a graph that needs no code of ours, for any batch and any length up to the run's: as ONNX,
or compiled by AOTInductor."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path

import torch
from torch.export import Dim, ExportedProgram

from bert_dp.export.whole import OUTPUTS, Source

INPUTS = ("input_ids", "attention_mask")
MAX_BATCH = 2**16


def trace(source: Source, dtype: torch.dtype = torch.float32) -> ExportedProgram:
    """The graph; outputs are fp32 whatever `dtype` it computes in."""
    most = source.config.data.sequence_length
    ids_BS = torch.full((2, min(7, most - 1)), source.special["mask"])  # no size of 1, which would be fixed
    mask_BS = torch.ones_like(ids_BS)
    sizes = {0: Dim("batch", max=MAX_BATCH), 1: Dim("length", max=most)}
    with torch.no_grad():
        return torch.export.export(
            source.whole().to(dtype), (ids_BS, mask_BS), dynamic_shapes=dict.fromkeys(INPUTS, sizes)
        )


def write_onnx(source: Source, folder: Path, *, int8: bool) -> None:
    """FOLDER/model.onnx. `int8`: products with weights of 8 bits, those of the activations chosen as it runs
    (ONNX Runtime's dynamic quantisation)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            trace(source),
            dynamo=True,
            input_names=list(INPUTS),
            output_names=list(OUTPUTS[source.kind]),
            verbose=False,
        )
    assert program is not None
    path = folder / "model.onnx"
    if not int8:
        program.save(path, external_data=False)
        return
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        whole = Path(scratch) / "model.onnx"
        program.save(whole, external_data=False)
        quantize_dynamic(whole, path, weight_type=QuantType.QInt8, per_channel=True)


def write_aoti(source: Source, folder: Path, *, bf16: bool) -> None:
    """FOLDER/model.pt2, compiled for processors like this one. Needs g++."""
    program = trace(source, torch.bfloat16 if bf16 else torch.float32)
    torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "model.pt2"))
