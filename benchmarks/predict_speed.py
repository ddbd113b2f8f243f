"""The order in which `bert-dp predict` computes a file's examples, beside plainer ones: SST-2's dev set.

    python benchmarks/predict_speed.py --glue PLACE [--model crammed-rope] [--json FILE]

PLACE is a folder or tar with SST-2/train.tsv, by whose sentences a tokenizer of the model's size is trained,
and SST-2/dev.tsv, whose sentences are computed. The weights are initial ones. The same model computes the
same tokens in one process:

    by length        as predict does: longest first, batches of at most as many tokens as it takes
    in order         as they stand in the file, 32 a batch, each padded to its longest
    in order, large  as they stand in the file, as many a batch as would fit if all were the longest

Tokenising is in none of them. The ways take turns, in an order drawn anew in each round from a fixed seed; a
round before the first is left out. Ratios are paired within a round. All three must give the same encodings.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch

from benchmarks import step_speed
from benchmarks.export_speed import aligned, make_run, subject_of, tell
from benchmarks.step_speed import spread, with_range
from bert_dp import predict
from bert_dp.config import ConfigError
from bert_dp.devices import keep_freed_memory
from bert_dp.examples.glue import GlueData

PLAIN_BATCH = 32
SORTED, ORDER, LARGE = "by length", "in order", "in order, large"
QUICK_WORDS = ("ship", "sailed", "past", "seven", "grey", "islands", "while", "rain", "fell", "on", "harbour")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--glue", type=Path, metavar="PLACE", help="folder or tar that holds SST-2")
    add("--model", default="crammed-rope", help="shipped configuration (default: %(default)s)")
    add("--rounds", type=int, default=5)
    add("--threads", type=int, default=len(os.sched_getaffinity(0)))
    add("--seed", type=int, default=0, help="of the weights and of the order of the ways")
    add("--date", help="for the record, as YYYY-MM-DD")
    add("--json", metavar="FILE", help="write environment and raw figures here")
    add("--quick", action="store_true", help="a tiny model and made-up sentences, two rounds")
    o = parser.parse_args(arguments)
    if o.quick:
        o.model, o.rounds = "small-text", 2
    elif o.glue is None:
        parser.error("--glue: name the folder or tar that holds SST-2, or use --quick")
    o.device = "cpu"  # as step_speed.py's functions ask
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


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    o = parse(arguments)
    try:
        train, dev = sentences(o)
    except ConfigError as error:
        sys.exit("\n".join(error.issues))
    torch.set_num_threads(o.threads)
    keep_freed_memory()  # as predict does
    with tempfile.TemporaryDirectory(prefix="predict-speed-") as scratch:
        run = make_run(Path(scratch) / "run", subject_of(o.model, o).config, train)
        predictor, encoder = predict.open_predictor(str(run))
    ids, offsets, _ = encoder.encode([(text,) for text in dev])
    rows = np.split(ids, offsets[1:-1])
    longest = max(map(len, rows))
    fits = predict.BATCH_TOKENS // longest

    def by_length(some: Sequence[Any] = rows) -> Any:
        return predict.outputs_of(predictor, some, encoder.special["pad"], "cls")

    def in_order(size: int) -> Any:
        return np.concatenate([by_length(rows[i : i + size]) for i in range(0, len(rows), size)])

    ways: dict[str, Callable[[], Any]] = {
        SORTED: by_length,
        ORDER: lambda: in_order(PLAIN_BATCH),
        LARGE: lambda: in_order(fits),
    }
    reference = by_length()
    apart = {way: float(np.abs(compute() - reference).max()) for way, compute in ways.items()}
    assert max(apart.values()) < 1e-3, f"the ways do not compute the same: {apart}"
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    order, rng = list(ways), random.Random(o.seed)
    for turn in range(o.rounds):
        rng.shuffle(order)
        for way in order:
            start = time.perf_counter()
            ways[way]()
            seconds[way].append(time.perf_counter() - start)
        tell(f"round {turn + 1} of {o.rounds}")
    lengths = [len(row) for row in rows]
    o.glue = o.glue and o.glue.name  # no path of this machine in a record
    result = {
        "environment": step_speed.environment(o, ("torch", "numpy", "tokenizers")),
        "examples": len(rows),
        "tokens": sum(lengths),
        "longest": longest,
        "batch_tokens": predict.BATCH_TOKENS,
        "ways": {
            way: {
                "padded_tokens": padded_tokens(way, lengths, fits),
                "seconds": seconds[way],
                "examples_per_s": spread([len(rows) / s for s in seconds[way]]),
                "time_over_by_length": spread(
                    [s / own for s, own in zip(seconds[way], seconds[SORTED], strict=True)]
                ),
                "difference": apart[way],
            }
            for way in ways
        },
    }
    show(result)
    if o.json:
        Path(o.json).write_text(json.dumps(result, indent=1) + "\n")
    return result


def padded_tokens(way: str, lengths: Sequence[int], fits: int) -> int:
    """That are computed, padding included."""
    if way == SORTED:
        batches = [[lengths[i] for i in index] for index in predict.batches(np.array(lengths))]
    else:
        size = PLAIN_BATCH if way == ORDER else fits
        batches = [list(lengths[i : i + size]) for i in range(0, len(lengths), size)]
    return sum(max(batch) * len(batch) for batch in batches)


def show(result: dict[str, Any]) -> None:
    rows = [["way", "examples/s", "tokens with padding", f"x {SORTED}"]]
    for way, found in result["ways"].items():
        rows.append(
            [
                way,
                with_range(found["examples_per_s"], 1),
                str(found["padded_tokens"]),
                with_range(found["time_over_by_length"], 2),
            ]
        )
    print("\n".join(aligned(rows)))
    print(
        f"{result['examples']} examples, {result['tokens']} tokens, the longest has {result['longest']}; "
        f"x {SORTED} = time of the row / time {SORTED}, median of the rounds (min-max)"
    )


if __name__ == "__main__":
    main()
