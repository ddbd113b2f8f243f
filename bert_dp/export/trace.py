"""A run's model as a graph that needs no code of ours, for any batch and any length up to the run's: as ONNX,
or compiled by AOTInductor."""

from __future__ import annotations

import contextlib
import copy
import logging
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.export import Dim, ExportedProgram

from bert_dp.config import ModelConfig, cpu_field
from bert_dp.config.error import require
from bert_dp.export.as_function import Source
from bert_dp.export.foreign import OUTPUTS
from bert_dp.record.exported import ExportPrecision

INPUTS = ("input_ids", "attention_mask")
MAX_BATCH = 2**16


def trace(source: Source, precision: ExportPrecision = "fp32") -> ExportedProgram:
    """The graph; outputs are fp32 whatever `precision` it computes in. Raises ConfigError where int8 lacks
    torchao."""
    most = source.config.data.sequence_length
    ids_BS = torch.full((2, min(7, most - 1)), source.special["mask"])  # no size of 1, which would be fixed
    mask_BS = torch.ones_like(ids_BS)
    sizes = {0: Dim("batch", max=MAX_BATCH), 1: Dim("length", max=most)}
    model: nn.Module = source.whole()
    if precision != "fp32":
        model = copy.deepcopy(model)  # the source keeps its own
        model = model.to(torch.bfloat16) if precision == "bf16" else quantize(model)
    with torch.no_grad():
        return torch.export.export(model, (ids_BS, mask_BS), dynamic_shapes=dict.fromkeys(INPUTS, sizes))


def quantize(model: nn.Module) -> nn.Module:
    """`model` with weights of 8 bits in its linear layers, scaled by row, and activations of 8 bits there,
    scaled by token as it runs (torchao's dynamic quantisation). The table of the embeddings stays in fp32,
    with the logits of tokens that it gives. Raises ConfigError without torchao."""
    quantization = require("torchao.quantization", "int8", "--int8")
    quantization.quantize_(model, quantization.Int8DynamicActivationInt8WeightConfig())
    return require("torchao.utils", "int8", "--int8").unwrap_tensor_subclass(model)


@contextlib.contextmanager
def hushed() -> Iterator[None]:
    """Without warnings of the exporters: of packages and CUDA libraries that are not there, of deprecations,
    of other formats."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@hushed()
def write_onnx(source: Source, folder: Path, *, int8: bool, fused: bool | None = None) -> None:
    """FOLDER/model.onnx. `int8`: products with weights of 8 bits, those of the activations chosen as it runs
    (ONNX Runtime's dynamic quantisation). `fused`: rewritten by ONNX Runtime's transformer optimizer; None =
    where that is faster (benchmarks/export_speed.py)."""
    program = torch.onnx.export(
        trace(source),
        dynamo=True,
        input_names=list(INPUTS),
        output_names=list(OUTPUTS[source.kind]),
        verbose=False,
    )
    assert program is not None
    path = folder / "model.onnx"
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        whole = Path(scratch) / "model.onnx" if int8 else path
        program.save(whole, external_data=False)
        if source.config.model.norm == "rmsnorm" if fused is None else fused:
            fuse(whole, source.config.model)
        if int8:
            from onnxruntime.quantization import QuantType, quantize_dynamic

            quantize_dynamic(whole, path, weight_type=QuantType.QInt8, per_channel=True)


def fuse(path: Path, model: ModelConfig) -> dict[str, int]:
    """Rewrites an ONNX file by the transformer optimizer of ONNX Runtime. How many operators of each kind
    that it makes are in it then."""
    from onnxruntime.transformers.fusion_options import FusionOptions
    from onnxruntime.transformers.optimizer import optimize_model

    options = FusionOptions("bert")
    # it fails on a LayerNorm without a bias; where the runtime loads the file it fuses what it can anyway
    options.enable_skip_layer_norm = model.norm == "rmsnorm" or model.norm_bias
    sizes = {"num_heads": model.num_heads, "hidden_size": model.hidden_size}
    optimized = optimize_model(str(path), optimization_options=options, **sizes)
    optimized.save_model_to_file(str(path))
    return {name: count for name, count in optimized.get_fused_operator_statistics().items() if count}


@hushed()
def write_aoti(source: Source, folder: Path, precision: ExportPrecision = "fp32") -> None:
    """FOLDER/model.pt2, compiled for processors like this one and any number of threads. Needs g++, and int8
    torchao, which loading it does not. Raises ConfigError."""
    program = trace(source, precision)
    settings = {
        "cpp.dynamic_threads": True,
        # constant weights, laid out for oneDNN; else fp32 products are MKL's, which are faster on Intel CPUs
        "freezing": precision != "fp32" or cpu_field("vendor_id") == "AuthenticAMD",
    }
    with torch.no_grad():  # else nothing is frozen
        torch._inductor.aoti_compile_and_package(
            program, package_path=str(folder / "model.pt2"), inductor_configs=settings
        )
