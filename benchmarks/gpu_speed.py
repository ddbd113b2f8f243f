"""Fit the constants of launcher/plan/gpu_speed.py to published single-GPU rows, and print the fit's errors.

python benchmarks/gpu_speed.py          # errors of each source by a fit without its rows
python benchmarks/gpu_speed.py --yaml   # constants for hardware.yaml
"""

import math
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import yaml

from benchmarks.published_rows import GPUS, Row, accumulation, read
from launcher.plan import gpu_speed
from launcher.plan.gpu_speed import GpuStep
from launcher.plan.scaling import BERT_MASK_RATE, MODELS
from launcher.plan.step_model import GB, hardware

# start value of each constant, and the width of its prior in natural logarithms
START: dict[str, tuple[float, float]] = {
    "matmul_share.16-bit": (0.5, 0.2),
    "matmul_share.tf32": (0.6, 0.2),
    "matmul_share.fp32": (0.85, 0.1),
    "memory_traffic.eager": (1.0, 0.3),
    "memory_traffic.compiled": (0.7, 0.3),
    "memory_traffic.graph": (3.0, 0.5),
    "memory_traffic.fused": (0.6, 0.3),
    "launch_s.eager": (1e-4, 0.7),
    "launch_s.compiled": (1e-4, 0.7),
    "launch_s.graph": (1e-4, 0.7),
    "launch_s.fused": (1e-4, 0.7),
    "tokens": (300.0, 1.0),
    "optimizer_traffic": (1.0, 0.5),
}
NOISE = 0.15  # standard deviation of the logarithm of a published rate
TF32_PEAK = {"A100": 156e12}  # NVIDIA A100 data sheet (2021)
UNKNOWN_ACCUMULATION = 64
FUSED = (
    "Paddle",
    "OneFlow",
    "MXNet+Horovod",
    "PyTorch DDP",
    "PyTorch (DLE 2021/22)",
    "PyTorch NVIDIA MLPerf",
)


class Measured(NamedTuple):
    """A published row for a single GPU."""

    row: Row
    step: GpuStep
    framework: str
    accumulation: int
    seconds: float  # time of a micro batch and its share of the optimizer step


def framework_class(name: str) -> str:
    """Return the class of a framework: eager, graph, compiled, or fused (hand-written fused kernels)."""
    if "XLA" in name or name.startswith("TF2+"):
        return "compiled"
    if name.startswith("TF"):
        return "graph"
    return "fused" if name in FUSED or name.startswith("DeepSpeed") else "eager"


def measured(row: Row) -> Measured | None:
    """Convert a published row; return None if it has several GPUs or states no shapes."""
    if row["gpus"] != "1" or row["model"] not in MODELS or not row["seq_len"].isdigit():
        return None
    precision = {"AMP": "fp16", "FP16": "fp16"}.get(row["precision"], row["precision"].lower())
    gpu = GPUS.get(row["gpu"], row["gpu"])
    device = hardware()["gpus"][gpu]
    peak = gpu_speed.peak_of(gpu, precision)
    if peak is None:
        peak, precision = TF32_PEAK[device["device"]], "tf32"
    optimizer = "lamb" if "LAMB" in row["optimizer"] else "adamw"
    rate = BERT_MASK_RATE if row["task"] == "pretrain" else 0.01
    micro = int(float(row["micro_batch"]))
    model, length, bytes_s = MODELS[row["model"]], int(row["seq_len"]), device["memory_gb_s"] * GB
    step = GpuStep(model, length, rate, micro, precision, optimizer, peak, bytes_s)
    steps = accumulation(row) if row["accum"] else UNKNOWN_ACCUMULATION
    return Measured(row, step, framework_class(row["framework"]), steps, micro / float(row["seq_per_s"]))


def device_of(row: Measured) -> tuple[float, float, str]:
    """Return a key that identifies the device and precision of a row."""
    return row.step.peak, row.step.memory, row.step.precision


def predicted_s(row: Measured, constants: dict[str, Any]) -> float:
    """Predict the time of a micro batch and its share of the optimizer step, in seconds."""
    micro_s, optimizer_s = gpu_speed.estimate(row.step, row.framework, constants)
    return micro_s + optimizer_s / row.accumulation


def nested(values: dict[str, float]) -> dict[str, Any]:
    """Convert names such as `a.b` to nested dictionaries."""
    tree: dict[str, Any] = {"spread": 0.0}
    for name, value in values.items():
        group, _, key = name.partition(".")
        if key:
            tree.setdefault(group, {})[key] = float(value)
        else:
            tree[group] = float(value)
    return tree


def fit(rows: list[Measured]) -> dict[str, Any]:
    """Fit all constants by robust least squares of logarithms. A source of n rows has the weight sqrt(n)."""
    from scipy.optimize import least_squares

    start = np.log([value for value, _ in START.values()])
    widths = np.array([width for _, width in START.values()])
    counts = Counter(row.row["source"] for row in rows)

    def residuals(x: Any) -> Any:
        constants = nested(dict(zip(START, np.exp(x), strict=True)))
        each = [
            math.log(predicted_s(row, constants) / row.seconds) / NOISE / counts[row.row["source"]] ** 0.25
            for row in rows
        ]
        return np.concatenate([each, (x - start) / widths])

    return nested(dict(zip(START, np.exp(least_squares(residuals, start, loss="soft_l1").x), strict=True)))


def left_out_errors(rows: list[Measured]) -> list[tuple[Measured, bool, float]]:
    """Return (row, seen, error) for each row. `seen`: another source has the row's device and precision;
    `error`: ln(predicted / measured rate) by a fit without the row's source."""
    errors = []
    for source in sorted({row.row["source"] for row in rows}):
        others = [row for row in rows if row.row["source"] != source]
        constants, seen = fit(others), {device_of(row) for row in others}
        errors += [
            (row, device_of(row) in seen, math.log(row.seconds / predicted_s(row, constants)))
            for row in rows
            if row.row["source"] == source
        ]
    return errors


def floor(rows: list[Measured]) -> float:
    """Return the median deviation of rows with equal inputs from their mean, which no fit can explain."""
    groups: dict[object, list[float]] = {}
    for row in rows:
        groups.setdefault((row.step, row.framework), []).append(row.seconds)
    alike = [math.log(s) - np.mean(np.log(g)) for g in groups.values() if len(g) > 1 for s in g]
    return float(np.median(np.abs(alike)))


def main() -> None:
    rows = [found for row in read() if (found := measured(row))]
    errors = left_out_errors(rows)
    for seen in (True, False):
        each = [abs(math.expm1(error)) for _, known, error in errors if known == seen]
        if each:
            name = "seen in another source" if seen else "unseen"
            print(
                f"device {name}: {len(each)} rows, median {np.median(each):.1%}, "
                f"90th percentile {np.percentile(each, 90):.1%}"
            )
    print(f"rows with equal inputs differ by {floor(rows):.1%} (median)")
    constants = fit(rows)
    constants["spread"] = float(np.std([error for *_, error in errors]))
    if "--yaml" in sys.argv:
        print(yaml.safe_dump({"gpu_speed": constants}, sort_keys=False))
    else:
        for row, known, error in sorted(errors, key=lambda each: -abs(each[2]))[:12]:
            print(f"{math.expm1(error):+.0%} {'seen' if known else 'unseen'} {row.row['id']} {row.framework}")


if __name__ == "__main__":
    main()
