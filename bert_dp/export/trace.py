"""Trace a run's model to a graph that needs no code of ours, for any batch and any length up to the run's:
as ONNX, or compiled by AOTInductor."""

from __future__ import annotations

import contextlib
import copy
import logging
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.export import Dim, ExportedProgram

from bert_dp.config import ConfigError, Issue, ModelConfig, cpu_field
from bert_dp.config.error import require
from bert_dp.export.as_function import ExportSource
from bert_dp.export.foreign import OUTPUTS
from bert_dp.record.exported import ExportFormat

INPUTS = ("input_ids", "attention_mask")
MAX_BATCH = 2**16


def trace(source: ExportSource, *, bf16: bool = False) -> ExportedProgram:
    """Return the graph; its outputs are fp32 also if it computes in bf16."""
    most = source.config.data.sequence_length
    ids_BS = torch.full((2, min(7, most - 1)), source.special["mask"])  # no size of 1, which would be fixed
    mask_BS = torch.ones_like(ids_BS)
    sizes = {0: Dim("batch", max=MAX_BATCH), 1: Dim("length", max=most)}
    model: nn.Module = source.module()
    if bf16:
        model = copy.deepcopy(model).to(torch.bfloat16)  # the source keeps its own
    with torch.no_grad():
        return torch.export.export(model, (ids_BS, mask_BS), dynamic_shapes=dict.fromkeys(INPUTS, sizes))


def require_tools(form: ExportFormat) -> None:
    """Import the packages that write a format, and find its compiler. Raises ConfigError."""
    for package in ("onnx", "onnxscript", "onnxruntime") if form == "onnx" else ():
        require(package, "export", "export onnx")
    if form == "aoti" and shutil.which("g++") is None:
        message = "compiles by g++, which is not installed"
        raise ConfigError([Issue("export aoti", "needs_package", message, hint="install it, or export onnx")])


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Suppress warnings of the exporters: of packages and CUDA libraries that are not there, of deprecations,
    of other formats."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@silenced()
def write_onnx(source: ExportSource, folder: Path, *, int8: bool, fused: bool | None = None) -> None:
    """Write FOLDER/model.onnx. `int8`: products with weights of 8 bits, those of the activations chosen as it
    runs (ONNX Runtime's dynamic quantisation). `fused`: rewritten by ONNX Runtime's transformer optimizer;
    None = where that is faster (benchmarks/export_speed.py)."""
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
    """Rewrite an ONNX file by the transformer optimizer of ONNX Runtime; return the number of operators of
    each kind that it makes."""
    from onnxruntime.transformers.fusion_options import FusionOptions
    from onnxruntime.transformers.optimizer import optimize_model

    options = FusionOptions("bert")
    # it fails on a LayerNorm without a bias; where the runtime loads the file it fuses what it can anyway
    options.enable_skip_layer_norm = model.norm == "rmsnorm" or model.norm_bias
    sizes = {"num_heads": model.num_heads, "hidden_size": model.hidden_size}
    optimized = optimize_model(str(path), optimization_options=options, **sizes)
    optimized.save_model_to_file(str(path))
    return {name: count for name, count in optimized.get_fused_operator_statistics().items() if count}


@silenced()
def write_aoti(source: ExportSource, folder: Path, *, bf16: bool = False) -> None:
    """Write FOLDER/model.pt2, compiled for processors like this one and any number of threads."""
    program = trace(source, bf16=bf16)
    settings = {
        "cpp.dynamic_threads": True,
        # constant weights, laid out for oneDNN; else fp32 products are MKL's, which are faster on Intel CPUs
        "freezing": bf16 or cpu_field("vendor_id") == "AuthenticAMD",
    }
    with torch.no_grad():  # else nothing is frozen
        torch._inductor.aoti_compile_and_package(
            program, package_path=str(folder / "model.pt2"), inductor_configs=settings
        )
