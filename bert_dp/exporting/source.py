"""Write the directories of `bert-dp export`. A directory appears only when it is complete.

An exported model maps token ids and a padding mask to outputs, for any batch size and any length up to the
run's sequence length. It is stored as weights for transformers or as a graph for ONNX Runtime or AOTInductor.
"""

import contextlib
import copy
import dataclasses
import itertools
import logging
import shlex
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from bert_dp import __version__, files
from bert_dp.config import ConfigError, Issue, Kind, cpu_field, native_class
from bert_dp.config.errors import require, sha256
from bert_dp.config.hf import EXPORTED
from bert_dp.data import tokenizer as tokens
from bert_dp.data.build import locked, replaced
from bert_dp.exporting.hf import settings_of, tensors_of
from bert_dp.exporting.load_exported import AUTO, OUTPUTS
from bert_dp.files.models import Summary
from bert_dp.files.run_facts import INPUTS, TYPES, Exported, ExportFormat, ExportPrecision, loaded_files
from bert_dp.model.bert import CrammedBert
from bert_dp.model.bilstm import BiLstm
from bert_dp.model.classifier import Classifier, pool
from bert_dp.model.load import LoadedCheckpoint, RunModel, load_checkpoint
from bert_dp.training import checkpoint

MAX_BATCH = 2**16


class ExportModule(nn.Module):
    """Module that maps int64 inputs [B, S] to the outputs in OUTPUTS[kind]: mlm = token logits [B, S, V]
    and hidden states [B, S, H]; classifier = label logits [B, L]; encoder = hidden states [B, S, H]."""

    def __init__(self, model: RunModel, kind: Kind):
        super().__init__()
        self.model, self.kind = model, kind

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        real_BS = attention_mask != 0
        if isinstance(self.model, BiLstm):
            return (self.model(input_ids, real_BS).float(),)
        x_BSH = self.model.model(input_ids, real_BS, token_type_ids)
        if self.kind == "encoder":
            return (x_BSH.float(),)
        if isinstance(self.model, Classifier):
            return (self.model.head(pool(x_BSH, real_BS, self.model.pooling), None).float(),)
        table_VH = self.model.model.embeddings.tok_embeddings.weight
        return self.model.head(x_BSH, table_VH, None).float(), x_BSH.float()


@dataclasses.dataclass(frozen=True)
class ExportSource(LoadedCheckpoint):
    """Checkpoint to export, with the model in fp32."""

    kind: Kind
    tokenizer_file: Path
    special: dict[str, int]
    """Ids of the special tokens by role."""

    @property
    def run_name(self) -> str:
        """Return the run directory's name or, if the checkpoint is outside a run, the checkpoint's name."""
        folder = self.path.parent
        return folder.parent.name if folder.name == "checkpoints" else self.path.name

    @property
    def inputs(self) -> tuple[str, ...]:
        return (*INPUTS, TYPES) if self.config.model.takes_types else INPUTS

    def module(self) -> ExportModule:
        """Build the module that is traced, compiled and compared."""
        return ExportModule(self.model, self.kind).eval()

    def example(self) -> tuple[Tensor, ...]:
        """Return inputs for tracing. All sizes exceed 1, because tracing treats a size of 1 as constant."""
        ids_BS = torch.full((2, min(7, self.config.data.sequence_length - 1)), self.special["mask"])
        return (ids_BS, torch.ones_like(ids_BS), torch.zeros_like(ids_BS))[: len(self.inputs)]


def open_run(run: str | Path, *, encoder: bool) -> ExportSource:
    """Load a checkpoint, or the newest valid checkpoint of a run. `encoder`: omit the head. Raise
    ConfigError if the checkpoint is unusable or, with `encoder`, holds a BiLSTM."""
    loaded = load_checkpoint(checkpoint.resolve(str(run)).resolve())
    kind: Kind = "encoder" if encoder else "mlm" if isinstance(loaded.model, CrammedBert) else "classifier"
    if encoder and not hasattr(loaded.model, "model"):
        message = f"{run} is a BiLSTM, which has no BERT encoder to export"
        raise ConfigError([Issue("--encoder", "unsupported", message, hint="omit --encoder")])
    loaded.model.float()
    file = files.tokenizer_of(loaded.path)
    special = tokens.special_ids(loaded.tokenizer, str(file))
    return ExportSource(**vars(loaded), kind=kind, tokenizer_file=file, special=special)


def export(
    source: ExportSource, form: ExportFormat, out: Path, *, command: str, precision: ExportPrecision = "fp32"
) -> Exported:
    """Export a model to the new or empty directory `out`. `command`: command line for the model card. Raise
    ConfigError if `out` is not empty, the format cannot represent the model, or a package is missing."""
    if form == "aoti" and source.config.model.lstm_size:
        message = "with torch.export, a BiLSTM would accept only one input length"
        hint = "use `bert-dp export onnx`"
        raise ConfigError([Issue("model.lstm_size", "unsupported", message, hint=hint)])
    # import before writing, because a signal during an import may end this process without cleanup
    for package in ("onnx", "onnxscript", "onnxruntime") if form == "onnx" else ():
        require(package, "export", "export onnx")
    if form == "aoti" and shutil.which("g++") is None:
        message = "needs the compiler g++, which is not installed"
        raise ConfigError([Issue("export aoti", "needs_package", message, hint="install g++ or export onnx")])
    with locked(out):
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            message, hint = f"{out} is not an empty directory", "choose a new directory"
            raise ConfigError([Issue("--out", "exists", message, str(out), hint=hint)])
        with replaced(out) as folder:
            if form == "hf":
                write_hf(source, folder)
            elif form == "onnx":
                write_onnx(source, folder, int8=precision == "int8")
            else:
                write_aoti(source, folder, bf16=precision == "bf16")
            return write_about(folder, source, form, command, precision)


def describe(source: ExportSource, form: ExportFormat, precision: ExportPrecision = "fp32") -> Exported:
    """Return the contents of export.json for `source`, with `files` empty."""
    return Exported(
        format=form,
        kind=source.kind,
        architecture=native_class(source.config.model) if form == "hf" else None,
        precision=precision,
        run=source.run_name,
        weights_sha256=files.weights_hash(source.path),
        step=source.facts.step,
        tokenizer_sha256=sha256(source.tokenizer_file),
        sequence_length=source.config.data.sequence_length,
        vocab_size=source.config.model.vocab_size,
        parameters=sum(p.numel() for p in source.model.parameters()),
        pad=source.special["pad"],
        inputs=source.inputs,
        finetune=source.config.finetune if source.kind == "classifier" else None,
    )


def write_about(
    folder: Path, source: ExportSource, form: ExportFormat, command: str, precision: ExportPrecision = "fp32"
) -> Exported:
    """Write the files that all formats have in common: the tokenizer, export.json and README.md."""
    framed = tokens.framing_as_trained(source.tokenizer_file, source.special)
    if framed is None:
        shutil.copyfile(source.tokenizer_file, folder / files.TOKENIZER)
    else:
        files.write_text(folder / files.TOKENIZER, framed.to_str(pretty=True))
    hashes = {name: sha256(folder / name) for name in loaded_files(form)}
    exported = describe(source, form, precision).model_copy(update={"files": hashes})
    roles = {f"{role}_token": source.tokenizer.id_to_token(i) for role, i in source.special.items()}
    settings = {  # read by PreTrainedTokenizerFast
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": exported.sequence_length,
        "model_input_names": list(exported.inputs),
        "clean_up_tokenization_spaces": False,
        **roles,
    }
    files.write_json(folder / "tokenizer_config.json", settings)
    files.write_json(folder / EXPORTED, exported.model_dump(mode="json"))
    files.write_text(folder / "README.md", card(exported, source, command))
    return exported


def write_hf(source: ExportSource, folder: Path) -> None:
    """Write config.json and model.safetensors for an Auto class of transformers. Raise ConfigError if no
    class can represent the model."""
    layout = (source.config, source.special, source.kind)
    files.write_json(folder / "config.json", settings_of(*layout))
    save_file(tensors_of(source.model, *layout), folder / "model.safetensors", metadata={"format": "pt"})


def trace(source: ExportSource, *, bf16: bool = False) -> ExportedProgram:
    """Trace the model. The outputs are fp32, even if the graph computes in bf16."""
    sizes = {0: Dim("batch", max=MAX_BATCH), 1: Dim("length", max=source.config.data.sequence_length)}
    model: nn.Module = source.module()
    if bf16:
        model = copy.deepcopy(model).to(torch.bfloat16)  # a copy, because `to` changes a module in place
    with torch.no_grad():
        shapes = dict.fromkeys(source.inputs, sizes)
        return torch.export.export(model, source.example(), dynamic_shapes=shapes)


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Suppress all warnings. The exporters warn about missing packages, CUDA libraries and deprecations."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@silenced()
def write_onnx(source: ExportSource, folder: Path, *, int8: bool) -> None:
    """Write FOLDER/model.onnx. `int8`: quantise the weights now, and the activations at run time (ONNX
    Runtime's dynamic quantisation)."""
    path = folder / "model.onnx"
    names: dict[str, Any] = {"input_names": [*source.inputs], "output_names": [*OUTPUTS[source.kind]]}
    if source.config.model.lstm_size:  # torch.export would make the length constant
        sizes = {name: {0: "batch", 1: "length"} for name in source.inputs}
        torch.onnx.export(source.module(), source.example(), path, dynamo=False, dynamic_axes=sizes, **names)
    else:
        program = torch.onnx.export(trace(source), dynamo=True, verbose=False, **names)
        assert program is not None
        for node in itertools.chain(program.model.graph, *program.model.functions.values()):
            node.metadata_props.clear()  # remove stack traces, which show paths on this machine
        program.save(path, external_data=False)
    if int8:
        from onnxruntime.quantization import QuantType, quantize_dynamic

        whole = path.rename(folder / "fp32.onnx")
        quantize_dynamic(whole, path, weight_type=QuantType.QInt8, per_channel=True)
        whole.unlink()


@silenced()
def write_aoti(source: ExportSource, folder: Path, *, bf16: bool = False) -> None:
    """Write FOLDER/model.pt2, compiled for this machine's kind of CPU and for any number of threads."""
    program = trace(source, bf16=bf16)
    settings = {
        "cpp.dynamic_threads": True,
        # freezing puts weights in oneDNN's layout; without it, fp32 uses MKL, which is faster on Intel CPUs
        "freezing": bf16 or cpu_field("vendor_id") == "AuthenticAMD",
    }
    with torch.no_grad():  # freezing requires that gradients are disabled
        torch._inductor.aoti_compile_and_package(
            program, package_path=str(folder / "model.pt2"), inductor_configs=settings
        )


LIBRARIES = {"hf": "transformers", "onnx": "onnx", "aoti": "pytorch"}
TAGS = {"mlm": "fill-mask", "classifier": "text-classification", "encoder": "feature-extraction"}
USAGE = {
    "hf": "    from transformers import {auto}, AutoTokenizer\n\n"
    '    model = {auto}.from_pretrained("DIR")\n'
    '    tokenizer = AutoTokenizer.from_pretrained("DIR")\n',
    "onnx": "    import onnxruntime\n\n"
    '    session = onnxruntime.InferenceSession("DIR/model.onnx")\n'
    '    session.run(["{output}"], {{{feeds}}})  # int64 [batch, length]\n',
    "aoti": "    import torch\n\n"
    '    model = torch._inductor.aoti_load_package("DIR/model.pt2")\n'
    "    model({names})  # int64 [batch, length]\n",
}
NEEDS = {"EuroBERT": "Needs transformers >= 5.\n", "aoti": "Runs only on the CPU type it was built for.\n"}
PRETRAINED = (
    "The model was pretrained on documents that end with the separator and have no classification token. "
    "Encode texts with `tokenizer(text, add_special_tokens=False)`.\n"
)


def card(exported: Exported, source: ExportSource, command: str) -> str:
    """Return the model card as Markdown. `command`: command line of `bert-dp export`."""
    parts = [
        f"---\nlibrary_name: {LIBRARIES[exported.format]}\npipeline_tag: {TAGS[exported.kind]}\n"
        "tags: [bert, bert-dp]\n---\n",
        f"# {source.run_name}\n",
        f"{exported.parameters:,} parameters, at most {exported.sequence_length} tokens, exported by bert-dp "
        f"{__version__}: `{command}`.\n",
        USAGE[exported.format].format(
            auto=AUTO[exported.kind],
            output=OUTPUTS[exported.kind][0],
            names=", ".join(exported.inputs),
            feeds=", ".join(f'"{name}": {name}' for name in exported.inputs),
        ),
        PRETRAINED if source.config.objective.name == "mlm" else "",
        NEEDS.get(exported.architecture or exported.format, ""),
        "| training | |\n|---|---|",
        *(f"| {name} | {text} |" for name, text in training_facts(source)),
    ]
    return "\n".join([*filter(None, parts), ""])


def training_facts(source: ExportSource) -> Iterator[tuple[str, str]]:
    """Yield (name, value) for each fact about the training and each score measured at the exported step."""
    run, facts = source.path.parent.parent, source.facts
    environment = files.read_json(run / "environment.json") or {}
    if command := environment.get("command"):
        yield "command", f"`{shlex.join(files.without_folders(str(word)) for word in command)}`"
    yield "steps", f"{facts.step:,}"
    yield "samples", f"{facts.samples:,}"
    yield "data", f"sha256 {facts.data_hash}"
    try:
        summary = Summary.model_validate(files.read_json(run / "summary.json"))
    except ValueError:
        return
    if summary.heldout_step != facts.step:
        return
    if summary.heldout_loss is not None:
        yield "held-out loss", f"{summary.heldout_loss:.4f} {source.config.loss_unit}"
    for name, value in ((summary.heldout and summary.heldout.scores) or {}).items():
        yield name, "not defined" if value is None else f"{value:.4f}"
