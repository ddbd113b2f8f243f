"""What an exported directory computes, by the programs it is made for and without our code.

`python -I foreign.py DIR IN OUT`: IN has the batches ids-0 and mask-0, ids-1 ... (safetensors), OUT gets
output-0 ...; stdout a JSON line of facts. Also what `bert-dp predict` computes an exported directory with.

Axes: B sequences, S positions.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Compute = Callable[[Array, Array], Array]
"""input_ids and attention_mask, each [B, S] int64, to logits or last hidden states."""

AUTO = {"mlm": "AutoModelForMaskedLM", "classifier": "AutoModelForSequenceClassification"}


def output_of(kind: str) -> str:
    return "last_hidden_state" if kind == "encoder" else "logits"


def open_directory(directory: Path, form: str, kind: str) -> Compute:
    """The first output of `kind`; an exported masked language model is opened as an encoder too."""
    return {"hf": open_hf, "onnx": open_onnx, "aoti": open_aoti}[form](directory, kind)


def open_hf(directory: Path, kind: str) -> Compute:
    """By transformers' own classes."""
    return compute_hf(load_hf(directory, kind)[0], kind)


def load_hf(directory: Path, kind: str) -> tuple[Any, list[str]]:
    """(the model, names of parameters that were not in the file or not in the model)."""
    import transformers

    auto = getattr(transformers, AUTO.get(kind, "AutoModel"))
    model, loaded = auto.from_pretrained(
        directory, local_files_only=True, trust_remote_code=False, output_loading_info=True
    )
    odd = [str(name) for part in ("missing_keys", "unexpected_keys") for name in loaded[part]]
    return model.eval(), odd


def compute_hf(model: Any, kind: str) -> Compute:
    """By a model of transformers."""
    import torch

    def compute(ids_BS: Array, mask_BS: Array) -> Array:
        with torch.inference_mode():
            ids, mask = torch.from_numpy(ids_BS), torch.from_numpy(mask_BS)
            found = model(input_ids=ids, attention_mask=mask)
        out: Array = getattr(found, output_of(kind)).float().numpy()
        return out

    return compute


def open_onnx(directory: Path, kind: str) -> Compute:
    """By ONNX Runtime on the CPU. What the output does not need is not computed."""
    import onnxruntime

    session = onnxruntime.InferenceSession(directory / "model.onnx", providers=["CPUExecutionProvider"])
    options = onnxruntime.RunOptions()
    options.only_execute_path_to_fetches = True

    def compute(ids_BS: Array, mask_BS: Array) -> Array:
        feeds = {"input_ids": ids_BS, "attention_mask": mask_BS}
        out: Array = session.run([output_of(kind)], feeds, options)[0]
        return out

    return compute


def open_aoti(directory: Path, kind: str) -> Compute:
    """By the runtime of AOTInductor, in torch."""
    import torch

    package = torch._inductor.aoti_load_package(str(directory / "model.pt2"))
    place = json.loads((directory / "export.json").read_text())["kind"] == "mlm" and kind == "encoder"

    def compute(ids_BS: Array, mask_BS: Array) -> Array:
        with torch.inference_mode():
            found = package(torch.from_numpy(ids_BS), torch.from_numpy(mask_BS))
        out: Array = found[int(place)].float().numpy()
        return out

    return compute


def again(directory: Path, form: str, kind: str, scratch: Path) -> tuple[Compute, dict[str, Any]]:
    """What the directory computes once it was loaded, saved and loaded, and facts of the first loading."""
    if form == "hf":
        model, odd = load_hf(directory, kind)
        model.save_pretrained(scratch)
        count = sum(parameter.numel() for parameter in model.parameters())
        return open_hf(scratch, kind), {"parameters": count, "odd": odd}
    if form == "onnx":
        import onnx

        onnx.save(onnx.load(directory / "model.onnx"), scratch / "model.onnx")
        return open_onnx(scratch, kind), {}
    return open_aoti(directory, kind), {}


def main(directory: Path, inputs: Path, outputs: Path) -> None:
    """See above."""
    for name in ("bert_dp", "launcher"):
        sys.modules[name] = None  # type: ignore[assignment]  # not by any means
    from safetensors.numpy import load_file, save_file

    about = json.loads((directory / "export.json").read_text())
    form, kind = about["format"], about["kind"]
    given = load_file(inputs)
    batches = [(given[f"ids-{i}"], given[f"mask-{i}"]) for i in range(len(given) // 2)]
    compute = open_directory(directory, form, kind)
    found = [compute(*batch) for batch in batches]
    with tempfile.TemporaryDirectory() as scratch:
        saved, facts = again(directory, form, kind, Path(scratch))
        facts["again"] = max(
            float(np.abs(saved(*batch) - once).max()) for batch, once in zip(batches, found, strict=True)
        )
    save_file({f"output-{i}": np.ascontiguousarray(each) for i, each in enumerate(found)}, outputs)
    sys.stdout.write(json.dumps(facts) + "\n")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
