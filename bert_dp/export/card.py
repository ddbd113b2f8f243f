"""Write the model card (README.md) of an exported directory, from the files of its run."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from bert_dp import __version__, record
from bert_dp.export.as_function import ExportSource
from bert_dp.export.foreign import AUTO, OUTPUTS
from bert_dp.record.exported import Exported
from bert_dp.record.models import Summary

LIBRARIES = {"hf": "transformers", "onnx": "onnx", "aoti": "pytorch"}
TAGS = {"mlm": "fill-mask", "classifier": "text-classification", "encoder": "feature-extraction"}
USAGE = {
    "hf": "    from transformers import {auto}, AutoTokenizer\n\n"
    '    model = {auto}.from_pretrained("DIR")\n'
    '    tokenizer = AutoTokenizer.from_pretrained("DIR")\n',
    "onnx": "    import onnxruntime\n\n"
    '    session = onnxruntime.InferenceSession("DIR/model.onnx")\n'
    '    session.run(["{output}"], {{"input_ids": ids, "attention_mask": mask}})  # int64 [batch, length]\n',
    "aoti": "    import torch\n\n"
    '    model = torch._inductor.aoti_load_package("DIR/model.pt2")\n'
    "    model(ids, mask)  # both int64 [batch, length]\n",
}
NEEDS = {
    "EuroBERT": "Its class exists from transformers 5 on.\n",
    "aoti": "It runs on CPUs of the same kind.\n",
}
PRETRAINED = (
    "It was pretrained on running text whose documents end with the separator, without a classification "
    "token at the front: `tokenizer(text, add_special_tokens=False)` is what it has seen.\n"
)


def card(exported: Exported, source: ExportSource, command: str) -> str:
    """Return the card as Markdown. `command`: of `bert-dp export`."""
    parts = [
        f"---\nlibrary_name: {LIBRARIES[exported.format]}\npipeline_tag: {TAGS[exported.kind]}\n"
        "tags: [bert, bert-dp]\n---\n",
        f"# {source.run_name}\n",
        f"{exported.parameters:,} parameters, at most {exported.sequence_length} tokens, made by bert-dp "
        f"{__version__}: `{command}`.\n",
        USAGE[exported.format].format(auto=AUTO[exported.kind], output=OUTPUTS[exported.kind][0]),
        PRETRAINED if source.config.objective.name == "mlm" else "",
        NEEDS.get(exported.architecture or exported.format, ""),
        "| trained | |\n|---|---|",
        *(f"| {name} | {text} |" for name, text in training_facts(source)),
    ]
    return "\n".join([*filter(None, parts), ""])


def training_facts(source: ExportSource) -> Iterator[tuple[str, str]]:
    """Yield what the run's directory says of the training, and of the evaluation at this step."""
    run, facts, config = source.path.parent.parent, source.facts, source.config
    environment = record.read_json(run / "environment.json") or {}
    if command := environment.get("command"):
        yield "command", f"`{shlex.join(record.without_folders(str(word)) for word in command)}`"
    yield "steps", f"{facts.step:,}"
    yield "samples", f"{facts.samples:,}"
    if config.objective.name == "mlm":
        yield "tokens", f"{facts.samples * config.data.sequence_length:,}"
    yield "data", f"sha256 {facts.data_hash}"
    if facts.init_from is not None:
        yield "began with", f"weights with sha256 {facts.init_from.sha256}"
    try:
        summary = Summary.model_validate(record.read_json(run / "summary.json"))
    except ValueError:
        return
    if summary.heldout_step != facts.step:
        return
    if summary.heldout_loss is not None:
        yield "held-out loss", f"{summary.heldout_loss:.4f} {config.loss_unit}"
    for name, value in ((summary.heldout and summary.heldout.scores) or {}).items():
        yield name, "not defined" if value is None else f"{value:.4f}"
