"""README.md of an exported directory: a model card, from what the run has written down."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bert_dp import __version__, record
from bert_dp.export.as_function import Source
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
NEEDS = {"EuroBERT": "Its class exists from transformers 5 on.", "aoti": "It runs on CPUs of the same kind."}
PRETRAINED = (
    "It was pretrained on running text whose documents end with the separator, without a classification "
    "token at the front: `tokenizer(text, add_special_tokens=False)` is what it has seen."
)
NOT_SIMILAR = "Its encodings were not trained for similarity."
SENTENCES = (
    'It is a directory of sentence-transformers too (`SentenceTransformer("DIR")`): the mean over the '
    "tokens, the classification token and the separator among them. It was not trained for similarity."
)


def card(exported: Exported, source: Source, command: str) -> str:
    """Return the model card as Markdown. `command`: what made the directory."""
    notes = [NEEDS.get(exported.architecture or exported.format)]
    if exported.kind == "encoder":
        notes.insert(0, SENTENCES if exported.format == "hf" else NOT_SIMILAR)
    if source.config.objective.name == "mlm":
        notes.insert(0, PRETRAINED)
    parts = [
        f"---\nlibrary_name: {LIBRARIES[exported.format]}\npipeline_tag: {TAGS[exported.kind]}\n"
        "tags: [bert, bert-dp]\n---\n",
        f"# {source.run_name}\n",
        f"{exported.parameters:,} parameters, at most {exported.sequence_length} tokens, made by bert-dp "
        f"{__version__}: `{command}`.\n",
        USAGE[exported.format].format(auto=AUTO[exported.kind], output=OUTPUTS[exported.kind][0]),
        *(f"{note}\n" for note in notes if note),
        "| trained | |\n|---|---|\n"
        + "".join(f"| {name} | {text} |\n" for name, text in training_facts(source)),
    ]
    return "\n".join(parts)


def training_facts(source: Source) -> Iterator[tuple[str, str]]:
    """What is known of the training, as far as the run's directory still has it."""
    run, config = source.checkpoint.parent.parent, source.config
    environment = record.read_json(run / "environment.json") or {}
    if command := environment.get("command"):
        yield "command", f"`{shlex.join(record.without_folders(str(word)) for word in command)}`"
    yield "steps", f"{source.facts.step:,}"
    yield "samples", f"{source.facts.samples:,}"
    if config.objective.name == "mlm":
        yield "tokens", f"{source.facts.samples * config.data.sequence_length:,}"
    yield "data", f"sha256 {source.facts.data_hash}"
    if source.facts.init_from is not None:
        yield "began with", f"weights with sha256 {source.facts.init_from.sha256}"
    summary = _summary(run)
    if summary is None or summary.step != source.facts.step:
        return
    is_of_the_end = _is_of_the_end(summary)
    scores = summary.heldout.scores if is_of_the_end and summary.heldout else None
    for name, value, unit in (
        ("loss of the last step", summary.final_loss, config.loss_unit),
        ("held-out loss", summary.heldout_loss if is_of_the_end else None, config.loss_unit),
        ("unigram entropy", summary.unigram_entropy_nats, "nats"),
    ):
        if value is not None:
            yield name, f"{value:.4f} {unit}"
    for name, value in (scores or {}).items():
        yield name, "not defined" if value is None else f"{value:.4f}"


def _is_of_the_end(summary: Summary) -> bool:
    """Whether what was measured on held-out data is of the last step: a signal ends a run between two.
    An older file names no step, and only a run that is done was evaluated at its last."""
    if summary.heldout_step is None:
        return summary.status == "done"
    return summary.heldout_step == summary.step


def _summary(run: Path) -> Summary | None:
    """summary.json; None where there is none, or a damaged one."""
    try:
        return Summary.model_validate(record.read_json(run / "summary.json"))
    except ValueError:
        return None


def tokenizer_files(source: Source) -> dict[str, Any]:
    """tokenizer_config.json as PreTrainedTokenizerFast reads it, beside tokenizer.json."""
    roles = {f"{role}_token": source.tokenizer.id_to_token(i) for role, i in source.special.items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": source.config.data.sequence_length,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        **roles,
    }
