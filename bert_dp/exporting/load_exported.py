"""Load and run an exported directory with the libraries it is made for, without our code.

`python -I load_exported.py DIR IN OUT`: IN has the batches ids-0, mask-0 and, if the model has token types,
types-0, ids-1 ... (safetensors); OUT gets output-0 ...; stdout gets a JSON line of facts. `bert-dp predict`
uses `open_directory`. Axes: B sequences, S positions.
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
"""Map input_ids, attention_mask and perhaps token_type_ids, [B, S] int64, to logits or hidden states."""
INPUTS, ARRAYS = ("input_ids", "attention_mask", "token_type_ids"), ("ids", "mask", "types")

OUTPUTS = {
    "mlm": ("logits", "last_hidden_state"),
    "classifier": ("logits",),
    "encoder": ("last_hidden_state",),
}
"""Output names of each kind of model, in order; the first output is compared."""
AUTO = {
    "mlm": "AutoModelForMaskedLM",
    "classifier": "AutoModelForSequenceClassification",
    "encoder": "AutoModel",
}
UNUSABLE = 2  # exit code for a directory that cannot be loaded


class Unusable(RuntimeError):
    """Raised for a directory that cannot be loaded; the message is one line."""


def open_directory(directory: Path, form: str, kind: str) -> Compute:
    """Return a function that computes the first output of `kind`; an exported masked language model also
    opens as an encoder. Raises Unusable."""
    try:
        return {"hf": open_hf, "onnx": open_onnx, "aoti": open_aoti}[form](directory, kind)
    except Unusable:
        raise
    except Exception as error:  # each library raises other errors for a damaged file
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise Unusable(f"DIR: {directory} cannot be loaded ({reason}); export the run again") from None


def open_hf(directory: Path, kind: str) -> Compute:
    """Open with transformers' own classes. Raises Unusable for an absent or misshapen parameter."""
    model, missing, _ = load_hf(directory, kind)
    if absent := [name for name in missing if "pooler." not in name]:  # none of our outputs needs the pooler
        raise Unusable(
            f"DIR: {directory}: model.safetensors has no {', '.join(absent[:3])} as config.json specifies; "
            "export the run again"
        )
    return compute_hf(model, kind)


def load_hf(directory: Path, kind: str) -> tuple[Any, list[str], list[str]]:
    """Return the model, the names of parameters that the file lacks or stores in another shape, and the names
    of those unknown to the model."""
    for name in ("torchao", "torch.utils._pytree"):  # imported by transformers if installed
        logging.getLogger(name).setLevel(logging.ERROR)  # they log each CUDA library that does not load
    import transformers

    transformers.logging.set_verbosity_error()  # we report what was not loaded
    transformers.logging.disable_progress_bar()
    auto = getattr(transformers, AUTO[kind])
    model, loaded = auto.from_pretrained(
        directory,
        local_files_only=True,
        trust_remote_code=False,
        ignore_mismatched_sizes=True,  # we report them
        output_loading_info=True,
    )
    missing = {*loaded["missing_keys"], *(key[0] for key in loaded["mismatched_keys"])}
    return model.eval(), sorted(missing), sorted(loaded["unexpected_keys"])


def compute_hf(model: Any, kind: str) -> Compute:
    """Return a function that computes with a transformers model."""
    import torch

    def compute(*arrays: Array) -> Array:
        with torch.inference_mode():
            outputs = model(**dict(zip(INPUTS, map(torch.from_numpy, arrays), strict=False)))
        return getattr(outputs, OUTPUTS[kind][0]).float().numpy()

    return compute


def open_onnx(directory: Path, kind: str) -> Compute:
    """Open with ONNX Runtime on the CPU, computing only what the output needs."""
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
    """Open with AOTInductor's runtime, in torch."""
    import torch

    package = torch._inductor.aoti_load_package(str(directory / "model.pt2"))
    exported_kind = json.loads((directory / "export.json").read_text())["kind"]
    index = OUTPUTS[exported_kind].index(OUTPUTS[kind][0])

    def compute(*arrays: Array) -> Array:
        with torch.inference_mode():
            outputs = package(*map(torch.from_numpy, arrays))
        return outputs[index].float().numpy()

    return compute


def again(directory: Path, form: str, kind: str, scratch: Path) -> tuple[Compute, dict[str, Any]]:
    """Load, save and reload the directory; return its function and facts of the first loading."""
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
    """Compute the batches in IN; return the exit code, UNUSABLE if the directory cannot be loaded."""
    for name in ("bert_dp", "launcher"):
        sys.modules[name] = None  # type: ignore[assignment]  # blocks these imports
    # torch logs that it cannot import the handlers that our package registers
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
        saved, facts = again(directory, form, kind, Path(scratch))
        facts["again"] = max(
            float(np.abs(saved(*batch) - output).max())
            for batch, output in zip(batches, outputs, strict=True)
        )
    save_file({f"output-{i}": np.ascontiguousarray(output) for i, output in enumerate(outputs)}, out)
    packages = {"hf": ("torch", "transformers"), "onnx": ("onnxruntime",), "aoti": ("torch",)}[form]
    facts["versions"] = {"python": platform.python_version(), **{name: version(name) for name in packages}}
    sys.stdout.write(json.dumps(facts) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
