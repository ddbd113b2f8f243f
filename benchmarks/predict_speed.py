"""The order in which `bert-dp predict` computes a file's examples, beside plainer ones: SST-2's dev set.

    python benchmarks/predict_speed.py --glue PLACE [--model crammed-rope] [--json FILE]

PLACE is a folder or tar with SST-2/train.tsv, by whose sentences a tokenizer of the model's size is trained,
and SST-2/dev.tsv, whose sentences are computed. The weights are initial ones. The same model computes the
same tokens in one process:

    by length          as predict does: longest first, batches of at most as many tokens as it takes here
    by length, large   the same, in batches of as many tokens as it takes on a GPU
    in order, 32       as they stand in the file, 32 a batch, each padded to its longest
    in order, 128      the same, 128 a batch

Tokenising is in none of them. The ways take turns, in an order drawn anew in each round from a fixed seed; a
round before the first is left out. Ratios are paired within a round. All must give the same encodings.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks import records, turns
from benchmarks.export_speed import make_run, subject_of
from benchmarks.turns import aligned, ratios, spread, tell, with_range
from bert_dp.config import ConfigError
from bert_dp.evaluation import prediction
from bert_dp.examples.glue import GlueData
from bert_dp.training.devices import keep_freed_memory

SORTED, LARGE = "by length", "by length, large"
LARGE_TOKENS = 8192
IN_ORDER = {"in order, 32": 32, "in order, 128": 128}
QUICK_WORDS = ("ship", "sailed", "past", "seven", "grey", "islands", "while", "rain", "fell", "on", "harbour")


def parse() -> argparse.Namespace:
    parser = records.make_parser(__doc__, "--date", "--json")
    add = parser.add_argument
    add("--glue", type=Path, metavar="PLACE", help="folder or tar that holds SST-2")
    add("--model", default="crammed-rope", help="shipped configuration (default: %(default)s)")
    add("--rounds", type=int, default=5)
    add("--threads", type=int, default=len(os.sched_getaffinity(0)))
    add("--seed", type=int, default=0, help="of the weights and of the order of the ways")
    add("--quick", action="store_true", help="a tiny model and made-up sentences, two rounds")
    o = parser.parse_args()
    if o.quick:
        o.model, o.rounds = "small-text", 2
    elif o.glue is None:
        parser.error("--glue: name the folder or tar that holds SST-2, or use --quick")
    return o


def sentences(o: argparse.Namespace) -> tuple[list[str], list[str]]:
    """(those of train, those of dev). Raises ConfigError."""
    if o.quick:
        rng = random.Random(o.seed)
        made = [" ".join(rng.choices(QUICK_WORDS, k=rng.randint(1, 12))) for _ in range(1500)]
        return made, made
    tables = GlueData("SST-2", (o.glue,)).read(train_only=False).tables
    train, dev = ([row.texts[0] for row in tables[split].rows] for split in ("train", "dev"))
    return train, dev


def main() -> None:
    o = parse()
    try:
        train, dev = sentences(o)
    except ConfigError as error:
        sys.exit("\n".join(map(str, error.issues)))
    torch.set_num_threads(o.threads)
    keep_freed_memory()  # as predict does
    with tempfile.TemporaryDirectory(prefix="predict-speed-") as scratch:
        run = make_run(Path(scratch) / "run", subject_of(o.model, o).config, train)
        predictor = prediction.open_predictor(run, "fp32")
        compute, encoder = predictor.compute, predictor.encoder
    encoded = encoder.encode([(text,) for text in dev])
    rows = np.split(encoded.ids, encoded.offsets[1:-1])
    lengths = np.array([len(row) for row in rows])
    budgets = {SORTED: prediction.BATCH_TOKENS[predictor.device.type], LARGE: LARGE_TOKENS}
    ways: dict[str, list[NDArray[np.int64]]] = {
        **{way: list(prediction.batches(lengths, budget)) for way, budget in budgets.items()},
        **{
            way: np.split(np.arange(len(rows)), range(size, len(rows), size))
            for way, size in IN_ORDER.items()
        },
    }

    def outputs_of(batches: Sequence[NDArray[np.int64]]) -> NDArray[np.float64]:
        pad = encoder.special["pad"]
        outputs = [prediction.outputs_of(compute, [rows[i] for i in index], pad) for index in batches]
        return np.concatenate(outputs)[np.argsort(np.concatenate(batches))]

    reference = outputs_of(ways[SORTED])
    differences = {way: float(np.abs(outputs_of(each) - reference).max()) for way, each in ways.items()}
    assert max(differences.values()) < 1e-3, f"the ways do not compute the same: {differences}"
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for number, order in enumerate(turns.orders(ways, o.rounds, o.seed), 1):
        for way in order:
            start = time.perf_counter()
            outputs_of(ways[way])
            seconds[way].append(time.perf_counter() - start)
        tell(f"round {number} of {o.rounds}")
    o.glue = o.glue and o.glue.name  # no path of this machine in a record
    result = {
        "environment": records.environment_of(o, ("torch", "numpy", "tokenizers")),
        "examples": len(rows),
        "tokens": int(lengths.sum()),
        "longest": int(lengths.max()),
        "batch_tokens": budgets,
        "ways": {
            way: {
                "padded_tokens": sum(int(lengths[i].max()) * len(i) for i in ways[way]),
                "seconds": seconds[way],
                "examples_per_s": spread([len(rows) / s for s in seconds[way]]),
                "time_over_by_length": spread(ratios(seconds[way], seconds[SORTED])),
                "difference": differences[way],
            }
            for way in ways
        },
    }
    show(result)
    records.write(o.json, result)


def show(result: dict[str, Any]) -> None:
    rows = [["way", "examples/s", "tokens with padding", f"x {SORTED}"]]
    for way, figures in result["ways"].items():
        rate, ratio = (figures[key] for key in ("examples_per_s", "time_over_by_length"))
        rows.append([way, with_range(rate, 1), str(figures["padded_tokens"]), with_range(ratio, 2)])
    print("\n".join(aligned(rows)))
    print(
        f"{result['examples']} examples, {result['tokens']} tokens, the longest has {result['longest']}; "
        f"x {SORTED} = time of the row / time {SORTED}, median of the rounds (min-max)"
    )


if __name__ == "__main__":
    main()
