"""The memory line (`python -m bert_dp.measure.memory_line`) against real runs, on the 120 M model.

    python benchmarks/memory_line.py [--ranks 1,2] [--batches 2,4,8] [--steps 3] [--set a.b=v] [--json FILE]

Predicted peak of a rank = line + what a real run at micro batch 1 shows beyond the line; measured = the
greatest resident set of a rank of `bert-dp train` (on a GPU: reserved by the allocator), a process for each
run. Every run takes two micro batches a step of synthetic data and writes no checkpoint. Beside it the tensor
bytes of a real step, counted as the fake one's are.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import records
from bert_dp.config import dump_config, load_config, shipped_configs
from bert_dp.measure.memory_line import choose_device
from bert_dp.measure.memory_trace import count_step
from tests.shards import write_shards

MIB = 2**20


def measure(run_dir: Path, settings: list[str], ranks: int) -> float:
    """Peak memory in bytes of the greatest rank of one run."""
    done = records.train_crammed(run_dir, settings, ranks)
    if done.returncode:
        raise RuntimeError(done.stdout[-800:] + done.stderr[-800:])
    return json.loads((run_dir / "summary.json").read_text())["peak_memory_gib"] * 2**30


def predict(config: Path, ranks: int, batches: list[int]) -> dict[str, Any]:
    words = [str(config), str(ranks), *map(str, batches)]
    command = [sys.executable, "-m", "bert_dp.measure.memory_line", *words]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def tensor_bytes(config: Path, ranks: int, batch: int) -> int:
    """Peak of a real step's tensors."""
    loaded = load_config(config)
    device, precision = choose_device(loaded)
    trace = count_step(
        loaded, precision, device, batch, accumulation=2, keeps_gradients=ranks > 1, tensors=nullcontext()
    )
    return int(trace.history()[0].sum(axis=1).max())


def compare(root: Path, ranks: int, batches: list[int], settings: list[str]) -> dict[str, Any]:
    """The line, the constant, and every batch's prediction beside its measurement."""

    def of_batch(batch: int) -> list[str]:
        return [*settings, f"batch.micro_size={batch}", f"batch.global_size={2 * batch * ranks}"]

    config = root / f"config-{ranks}.yaml"
    config.write_text(dump_config(load_config(shipped_configs() / "crammed-bert.yaml", of_batch(1))))
    line = predict(config, ranks, [batches[0], 2 * batches[-1]])

    def at(batch: int) -> float:
        return line["intercept_bytes"] + batch * line["bytes_per_sequence"]

    first = measure(root / f"{ranks}-1", of_batch(1), ranks)
    constant = first - at(1)
    rows = []
    for batch in batches:
        measured, predicted = measure(root / f"{ranks}-{batch}", of_batch(batch), ranks), constant + at(batch)
        rows.append(
            {
                "micro_batch": batch,
                "measured_bytes": measured,
                "predicted_bytes": predicted,
                "error": predicted / measured - 1,
                "line_bytes": at(batch),
            }
        )
        print(
            f"{ranks} ranks, micro batch {batch:3}: measured {measured / MIB:6.0f} MiB, predicted "
            f"{predicted / MIB:6.0f} MiB ({rows[-1]['error']:+.1%})",
            flush=True,
        )
    real = tensor_bytes(config, ranks, batches[0])
    counted = real / line["peak_bytes"][0] - 1
    print(f"{ranks} ranks, micro batch {batches[0]}: tensors of a real step {counted:+.3%} of the fake one's")
    return {
        "ranks": ranks,
        "line": line,
        "measured_at_1_bytes": first,
        "constant_bytes": constant,
        "rows": rows,
        "real_tensor_bytes": real,
    }


def main() -> None:
    parser = records.make_parser(__doc__, "--set", "--json")
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--batches", default="2,4,8")
    parser.add_argument("--steps", type=int, default=3)
    o = parser.parse_args()
    batches = [int(b) for b in o.batches.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        shards = write_shards(root / "shards", length=128, train=256)
        settings = [
            f"data.path={shards}",
            "data.synthetic=true",
            f"schedule.steps={o.steps}",
            *records.SHORT_RUN,
            "checkpoint.keep=0",
            "eval.max_sequences=8",
            *o.settings,
        ]
        runs = [compare(root, int(ranks), batches, settings) for ranks in o.ranks.split(",")]
    environment = records.environment(platform=platform.platform(), libc=" ".join(platform.libc_ver()))
    records.write(o.json, {"environment": environment, "runs": runs})


if __name__ == "__main__":
    main()
