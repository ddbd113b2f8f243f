"""Check that a file system stores a checkpoint correctly, and measure its speed.

`python -m bert_dp.measure.disk DIR` writes, verifies, loads and removes a checkpoint, and prints a JSON line.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import torch

from bert_dp.parallel import State
from bert_dp.training import checkpoint
from bert_dp.training.process import follow_launcher


def main(folder: Path, num_bytes: int = 32 * 2**20) -> None:
    """Check the file system of `folder`. Raise OSError or RuntimeError if it damages a checkpoint."""
    follow_launcher()
    parts = [torch.randint(0, 2**31, (num_bytes // 8,), dtype=torch.int64) for _ in range(2)]
    state: State = {"model": {"w": parts[0]}, "optimizer": {"w": parts[1]}, "scaler": {}}
    with tempfile.TemporaryDirectory(prefix=".bert-dp-", dir=folder) as place:
        start = time.perf_counter()
        path = checkpoint.save_checkpoint(Path(place), 0, state, {}, keep=1)
        problem = checkpoint.check(path)
        loaded = checkpoint.load_tensors(path)
        seconds = time.perf_counter() - start
        same = (torch.equal(loaded[part]["w"], state[part]["w"]) for part in ("model", "optimizer"))
        if problem or not all(same):
            raise RuntimeError(problem or f"{path}: the data read differ from the data written")
    size = 2 * num_bytes
    result = {"bytes": size, "seconds": seconds, "mb_per_s": size / seconds / 1e6}
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
