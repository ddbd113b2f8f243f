"""Compare the inference time of a distilled student with that of the 120 M model, on the same texts.

    python benchmarks/student_speed.py STUDENT [--batches 1,32,512] [--threads 1] [--rounds 5] [--json FILE]

STUDENT is a run of `distill`; the texts are its held-out examples, tokenized by its tokenizer. The large
model is `crammed-bert` with a classification head and random weights, which cost as much as trained ones.
Both compute fp32 logits in eager mode, in this process, with the same batches: neighbours in length, padded
to the longest. A round measures the models alternately at every batch size; the ratio is paired within the
round.
"""

import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks import records
from benchmarks.turns import aligned, orders, ratios, spread, with_range
from bert_dp.config import ConfigError, find_config, load_config
from bert_dp.config.manifest import read_examples
from bert_dp.evaluation.prediction import Compute, on_device, open_predictor, padded
from bert_dp.examples.table import Examples
from bert_dp.model.bert import initialize
from bert_dp.model.classifier import Classifier

LARGE = "crammed-bert"


def main() -> None:
    parser = records.make_parser(__doc__, "--json", "--date")
    parser.add_argument("student", type=Path)
    parser.add_argument("--large", default=LARGE, help="configuration of the large model")
    parser.add_argument("--batches", default="1,32,512")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    o = parser.parse_args()
    sizes = [int(size) for size in o.batches.split(",") if size.isdecimal()]
    if len(sizes) <= o.batches.count(",") or min(sizes) < 1:
        parser.error(f"--batches {o.batches}: not a list of positive whole numbers")
    try:
        student = open_predictor(o.student, "fp32")
    except ConfigError as error:
        parser.error(str(error))
    if student.finetune is None:
        parser.error(f"{o.student} is not a run of distill or finetune")
    torch.set_num_threads(o.threads)
    config = load_config(find_config(o.large))
    large = initialize(Classifier(config.model, config.data.sequence_length, student.finetune), 0).eval()
    computes = {"student": student.compute, "large": on_device(large, torch.device("cpu"), "fp32")}
    rows = held_out_rows(o.student)
    points = {}
    for size in sizes:
        points[size] = measure(computes, batches_of(rows, size), o.rounds)
        ratio = points[size]["ratio"]
        print(f"batch {size}: {with_range(ratio, 1)} times", file=sys.stderr)
    report(points, len(rows))
    record = {"environment": records.environment_of(o, ["student"]), "examples": len(rows)}
    parameters = sum(p.numel() for p in large.parameters())
    records.write(o.json, {**record, "large_parameters": parameters, "points": points})


def held_out_rows(run: Path) -> list[NDArray[np.uint16]]:
    """Return the token ids of each held-out example, shortest first."""
    path = Path(load_config(run / "config.yaml").data.path or "")
    manifest = read_examples(path)
    dev = Examples.open(path, manifest, next(name for name in manifest.splits if name != "train"))
    return sorted(np.split(dev.ids, dev.offsets[1:-1]), key=len)


def batches_of(rows: Sequence[NDArray[np.uint16]], size: int) -> list[tuple[Tensor, Tensor]]:
    return [padded(rows[start : start + size], 0) for start in range(0, len(rows), size)]


def measure(
    computes: dict[str, Compute], batches: Sequence[tuple[Tensor, Tensor]], rounds: int
) -> dict[str, Any]:
    """Return the seconds of all batches by model and round, and the ratio of the models."""
    seconds: dict[str, list[float]] = {name: [] for name in computes}
    for compute in computes.values():
        compute(*batches[-1])  # the first call of a shape costs more
    for order in orders(computes, rounds):
        for name in order:
            start = time.perf_counter()
            for ids_BS, real_BS in batches:
                computes[name](ids_BS, real_BS)
            seconds[name].append(time.perf_counter() - start)
    return {"seconds": seconds, "ratio": spread(ratios(seconds["large"], seconds["student"]))}


def report(points: dict[int, dict[str, Any]], examples: int) -> None:
    table = [["batch", "student, texts/s", "large, texts/s", "ratio (range)"]]
    for size, point in points.items():
        rates = [
            f"{examples / statistics.median(point['seconds'][name]):.1f}" for name in ("student", "large")
        ]
        table.append([str(size), *rates, with_range(point["ratio"], 1)])
    print("\n".join(aligned(table)))


if __name__ == "__main__":
    main()
