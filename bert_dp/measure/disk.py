"""Check that a file system keeps a checkpoint, and measure how fast.

`python -m bert_dp.measure.disk DIR`: write, verify by hash, load, compare, remove; print one JSON line.
"""

from __future__ import annotations

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
    """Raise OSError or RuntimeError when the file system does not keep the checkpoint."""
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
            raise RuntimeError(problem or f"{path}: what was read differs from what was written")
    size = 2 * num_bytes
    result = {"bytes": size, "seconds": seconds, "mb_per_s": size / seconds / 1e6}
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
