"""Trace a run's model to a graph that needs no code of ours: ONNX, or a package of AOTInductor.

The model is one function of token ids and a padding mask, for any batch and any length up to the run's.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from bert_dp import files
from bert_dp.config import ConfigError, Issue, Kind, ModelConfig, cpu_field
from bert_dp.config.errors import require
from bert_dp.data import tokenizer as tokens
from bert_dp.exporting.load_exported import OUTPUTS
from bert_dp.files.run_facts import ExportFormat
from bert_dp.model.bert import CrammedBert
from bert_dp.model.build import LoadedCheckpoint, load_checkpoint
from bert_dp.model.classifier import Classifier, pool
from bert_dp.training import checkpoint


@dataclasses.dataclass(frozen=True)
class ExportSource(LoadedCheckpoint):
    """A checkpoint that is exported, its model in fp32."""

    kind: Kind
    """Of the model that is exported."""
    tokenizer_file: Path
    special: dict[str, int]
    """Ids by role."""

    @property
    def run_name(self) -> str:
        """Name of the run's directory; of the checkpoint's where it stands alone."""
        folder = self.path.parent
        return folder.parent.name if folder.name == "checkpoints" else self.path.name

    def module(self) -> ExportModule:
        """Build the module that is traced, compiled and compared."""
        return ExportModule(self.model, self.kind).eval()


def open_run(run: str | Path, *, encoder: bool) -> ExportSource:
    """Load the newest good checkpoint of a run, or one checkpoint. `encoder`: without its head.

    Raises ConfigError.
    """
    loaded = load_checkpoint(checkpoint.resolve(str(run)).resolve())
    kind: Kind = "encoder" if encoder else "mlm" if isinstance(loaded.model, CrammedBert) else "classifier"
    loaded.model.float()
    file = files.tokenizer_of(loaded.path)
    special = tokens.special_ids(loaded.tokenizer, str(file))
    return ExportSource(**vars(loaded), kind=kind, tokenizer_file=file, special=special)


class ExportModule(nn.Module):
    """Compute foreign.OUTPUTS of input_ids and attention_mask, each [B, S] int64: logits [B, S, V] of tokens
    or [B, L] of labels, hidden states [B, S, H]."""

    def __init__(self, model: CrammedBert | Classifier, kind: Kind):
        super().__init__()
        self.model, self.kind = model, kind

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        real_BS = attention_mask != 0
        x_BSH = self.model.model(input_ids, real_BS)
        if self.kind == "encoder":
            return (x_BSH.float(),)
        if isinstance(self.model, Classifier):
            return (self.model.head(pool(x_BSH, real_BS, self.model.pooling), None).float(),)
        table_VH = self.model.model.embeddings.tok_embeddings.weight
        return self.model.head(x_BSH, table_VH, None).float(), x_BSH.float()


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
