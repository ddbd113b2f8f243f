"""Load and run an exported model with the libraries of its format, without importing bert-dp.

`python -I load_exported.py DIR IN OUT` reads the arrays of all batches (ids-0, mask-0, types-0 if the
model has token types, ids-1 ...) from the safetensors file IN, writes output-0 ... to OUT and prints a JSON
line with fields of ExportCheck. `bert-dp predict` calls `open_directory`. Axes: B sequences, S positions.
"""

import json
import logging
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

Array = NDArray[Any]
Compute = Callable[..., Array]
"""Function that maps (input_ids, attention_mask[, token_type_ids]), int64 [B, S], to the first output."""
INPUTS, ARRAYS = ("input_ids", "attention_mask", "token_type_ids"), ("ids", "mask", "types")

OUTPUTS = {
    "mlm": ("logits", "last_hidden_state"),
    "classifier": ("logits",),
    "encoder": ("last_hidden_state",),
}
"""Names of the outputs of each kind of model, in order. The first output is compared."""
AUTO = {
    "mlm": "AutoModelForMaskedLM",
    "classifier": "AutoModelForSequenceClassification",
    "encoder": "AutoModel",
}
UNUSABLE = 2  # exit code if a directory cannot be loaded


class Unusable(RuntimeError):
    """Error for a directory that cannot be loaded. The message is one line."""


def open_directory(directory: Path, form: str, kind: str) -> Compute:
    """Load a model and return a function that computes the output OUTPUTS[kind][0]. A masked language model
    can also be opened as an encoder. Raise Unusable if the directory cannot be loaded."""
    try:
        return {"hf": open_hf, "onnx": open_onnx, "aoti": open_aoti}[form](directory, kind)
    except Unusable:
        raise
    except Exception as error:  # for a damaged file, every library raises its own errors
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise Unusable(f"DIR: {directory} cannot be loaded ({reason}); export the run again") from None


def open_hf(directory: Path, kind: str) -> Compute:
    """Load the model with transformers. Raise Unusable if a parameter is missing or has the wrong shape."""
    model, missing, _ = load_hf(directory, kind)
    if absent := [name for name in missing if "pooler." not in name]:  # no output needs the pooler
        raise Unusable(
            f"DIR: {directory}: model.safetensors has no {', '.join(absent[:3])} of the shape that "
            "config.json specifies; export the run again"
        )
    return compute_hf(model, kind)


def load_hf(directory: Path, kind: str) -> tuple[Any, list[str], list[str]]:
    """Return the model, the names of parameters that model.safetensors lacks or stores in the wrong shape,
    and the names of unexpected parameters in model.safetensors."""
    for name in ("torchao", "torch.utils._pytree"):  # transformers imports these if they are installed
        logging.getLogger(name).setLevel(logging.ERROR)  # they log every CUDA library that cannot be loaded
    import transformers

    transformers.logging.set_verbosity_error()  # the caller reports what was not loaded
    transformers.logging.disable_progress_bar()
    auto = getattr(transformers, AUTO[kind])
    model, loaded = auto.from_pretrained(
        directory,
        local_files_only=True,
        trust_remote_code=False,
        ignore_mismatched_sizes=True,  # the caller reports wrong shapes
        output_loading_info=True,
    )
    missing = {*loaded["missing_keys"], *(key[0] for key in loaded["mismatched_keys"])}
    return model.eval(), sorted(missing), sorted(loaded["unexpected_keys"])


def compute_hf(model: Any, kind: str) -> Compute:
    """Return a function that computes the output OUTPUTS[kind][0] with a transformers model."""
    import torch

    def compute(*arrays: Array) -> Array:
        with torch.inference_mode():
            outputs = model(**dict(zip(INPUTS, map(torch.from_numpy, arrays), strict=False)))
        return getattr(outputs, OUTPUTS[kind][0]).float().numpy()

    return compute


def open_onnx(directory: Path, kind: str) -> Compute:
    """Load the model with ONNX Runtime on the CPU. Nodes that do not contribute to the output are skipped."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = len(os.sched_getaffinity(0))
    file, providers = directory / "model.onnx", ["CPUExecutionProvider"]
    session = onnxruntime.InferenceSession(file, options, providers=providers)
    run_options = onnxruntime.RunOptions()
    run_options.only_execute_path_to_fetches = True

    def compute(*arrays: Array) -> Array:
        inputs = dict(zip(INPUTS, arrays, strict=False))
        (first,) = session.run(OUTPUTS[kind][:1], inputs, run_options)
        return first

    return compute


def open_aoti(directory: Path, kind: str) -> Compute:
    """Load the model with the AOTInductor runtime of torch."""
    import torch

    package = torch._inductor.aoti_load_package(str(directory / "model.pt2"))
    exported_kind = json.loads((directory / "export.json").read_text())["kind"]
    index = OUTPUTS[exported_kind].index(OUTPUTS[kind][0])

    def compute(*arrays: Array) -> Array:
        with torch.inference_mode():
            outputs = package(*map(torch.from_numpy, arrays))
        return outputs[index].float().numpy()

    return compute


def reload(directory: Path, form: str, kind: str, scratch: Path) -> tuple[Compute, dict[str, Any]]:
    """Load, save and reload the model; an AOTInductor model is only loaded. Return a function that runs the
    reloaded model, and the fields of ExportCheck that describe the first load ({} unless `form` is hf)."""
    if form == "hf":
        model, missing, unexpected = load_hf(directory, kind)
        model.save_pretrained(scratch)
        facts = {
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "stored_parameters": sum(t.size for t in load_file(directory / "model.safetensors").values()),
            "not_loaded": [*missing, *unexpected],
        }
        return open_hf(scratch, kind), facts
    if form == "onnx":
        import onnx

        onnx.save(onnx.load(directory / "model.onnx"), scratch / "model.onnx")
        return open_onnx(scratch, kind), {}
    return open_aoti(directory, kind), {}


def main(directory: Path, inputs: Path, out: Path) -> int:
    """Run the model on the batches in `inputs`. Return the exit code: UNUSABLE if loading fails, else 0."""
    for name in ("bert_dp", "launcher"):
        sys.modules[name] = None  # type: ignore[assignment]  # blocks these imports
    # hide torch's message that it cannot import the handlers that bert-dp registers
    logging.getLogger("torch.distributed.elastic.rendezvous.registry").setLevel(logging.ERROR)
    about = json.loads((directory / "export.json").read_text())
    form, kind = about["format"], about["kind"]
    given = load_file(inputs)
    count = sum(name.startswith("ids-") for name in given)
    batches = [[given[f"{name}-{i}"] for name in ARRAYS if f"{name}-{i}" in given] for i in range(count)]
    try:
        compute = open_directory(directory, form, kind)
    except Unusable as error:
        sys.stdout.write(f"{error}\n")
        return UNUSABLE
    outputs = [compute(*batch) for batch in batches]
    with tempfile.TemporaryDirectory() as scratch:
        reloaded, facts = reload(directory, form, kind, Path(scratch))
        facts["again"] = max(
            float(np.abs(reloaded(*batch) - output).max())
            for batch, output in zip(batches, outputs, strict=True)
        )
    save_file({f"output-{i}": np.ascontiguousarray(output) for i, output in enumerate(outputs)}, out)
    packages = {"hf": ("torch", "transformers"), "onnx": ("onnxruntime",), "aoti": ("torch",)}[form]
    facts["versions"] = {"python": platform.python_version(), **{name: version(name) for name in packages}}
    sys.stdout.write(json.dumps(facts) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
