"""Where the first token looks, in a model that was pretrained without it: attention by layer.

    python benchmarks/first_token.py RUN --task RTE --glue PLACE [--examples 300] [--json FILE]

RUN is a pretrained run or a checkpoint, PLACE a folder or tar with the files of a task of pairs. Its examples
`<cls> A <sep> B <sep>` are encoded by the run's tokenizer and computed one at a time, by the run and by a
model of its sizes with initial weights. Told is how much of the attention of `<cls>` falls on the first 8
positions, on A and on B (each with its <sep>), a mean over heads and examples, and what equal shares are.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from torch import Tensor

from benchmarks import records
from benchmarks.turns import aligned
from bert_dp.config import ConfigError, read_examples
from bert_dp.examples.table import Examples
from bert_dp.model.bert import Attention, EncoderModel, build_model, rotate
from bert_dp.model.load import load
from launcher.evaluate.finetune import find_pretrained, glue_source, prepare

NEAR = 8  # positions
PARTS = ("near", "first text", "second text")


def parse() -> argparse.Namespace:
    parser = records.make_parser(__doc__, "--date", "--json")
    add = parser.add_argument
    add("run", type=Path, metavar="RUN")
    add("--task", default="RTE", help="of pairs (default: %(default)s)")
    add("--glue", type=Path, action="append", required=True, metavar="PLACE", help="repeatable")
    add("--examples", type=int, default=300, help="of the first dev set (default: %(default)s)")
    return parser.parse_args()


def probabilities(
    attention: Attention, x_1SH: Tensor, cos_SD: Tensor | None, sin_SD: Tensor | None
) -> Tensor:
    """[A, S]: of the first position, by head; of one example."""
    length = x_1SH.shape[1]
    parts = attention.Wqkv(x_1SH)[0].chunk(3, dim=-1)[:2]
    q_ASD, k_ASD = (part.view(length, -1, attention.head_size).transpose(0, 1) for part in parts)
    if cos_SD is not None and sin_SD is not None:
        q_ASD, k_ASD = (rotate(x_ASD, cos_SD[:length], sin_SD[:length]) for x_ASD in (q_ASD, k_ASD))
    score_AS = (q_ASD[:, :1] @ k_ASD.transpose(-2, -1))[:, 0] * attention.head_size**-0.5
    return score_AS.softmax(-1)


def shares(model: EncoderModel, examples: list[Tensor], sep: int) -> Iterator[dict[str, float]]:
    """Of each layer: the mean over heads and examples."""
    found: list[list[list[float]]] = [[] for _ in model.model.layers]
    second = 0  # where the second text of the example at hand begins

    def watch(sums: list[list[float]]) -> Any:
        def before(attention: Attention, given: tuple[Any, ...]) -> None:
            p_S = probabilities(attention, *given[:3]).mean(0)
            sums.append([float(p.sum()) for p in (p_S[:NEAR], p_S[1:second], p_S[second:])])

        return before

    for layer, sums in zip(model.model.layers, found, strict=True):
        layer.get_submodule("attn").register_forward_pre_hook(watch(sums))
    with torch.inference_mode():
        for ids_S in examples:
            second = int((ids_S == sep).nonzero()[0]) + 1
            model.model(ids_S[None])
    for sums in found:
        yield dict(zip(PARTS, np.mean(sums, axis=0).tolist(), strict=True))


def equal_shares(examples: list[Tensor], sep: int) -> dict[str, float]:
    """If every position had as much."""
    counts = []
    for ids_S in examples:
        second, length = int((ids_S == sep).nonzero()[0]) + 1, len(ids_S)
        counts.append([min(NEAR, length) / length, (second - 1) / length, (length - second) / length])
    return dict(zip(PARTS, np.mean(counts, axis=0).tolist(), strict=True))


def measure(o: argparse.Namespace) -> dict[str, Any]:
    model, _ = load(o.run)
    assert isinstance(model, EncoderModel)
    start = find_pretrained(o.run)
    config, length = start.config, start.config.data.sequence_length
    path = prepare(start, glue_source(o.task, o.glue), length)
    manifest = read_examples(path)
    split = next(name for name in manifest.splits if name.startswith("dev"))
    stored = Examples.open(path, manifest, split)
    ids = [torch.from_numpy(stored.tokens(i).astype(np.int64)) for i in range(min(o.examples, len(stored)))]
    sep = manifest.special_tokens.sep
    models = {"run": model, "initial weights": build_model(config.model, length, config.run.seed).eval()}
    layers = {name: list(shares(each, ids, sep)) for name, each in models.items()}
    return {"split": split, "examples": len(ids), "equal": equal_shares(ids, sep), "layers": layers}


def main() -> None:
    o = parse()
    try:
        result = measure(o)
    except ConfigError as error:
        sys.exit("\n".join(f"error: {issue}" for issue in error.issues))
    rows = [["equal shares", *(f"{result['equal'][part]:.3f}" for part in PARTS)]]
    for name, layers in result["layers"].items():
        for i, layer in enumerate(layers):
            rows.append([f"{name}, layer {i}", *(f"{layer[part]:.3f}" for part in PARTS)])
    for line in aligned([["the first token's attention", "first 8", *PARTS[1:]], *rows]):
        print(line)
    records.write(o.json, {"environment": records.environment_of(o, hidden=("run", "glue")), **result})


if __name__ == "__main__":
    main()
