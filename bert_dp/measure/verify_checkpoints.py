"""Every checkpoint of a run, verified by its hashes.

`python -m bert_dp.measure.verify_checkpoints RUN` prints a JSON list, newest first: name, step, samples,
bytes, and problem, which is null where every file is as it was written. Exit code 2 where there is none.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

from bert_dp import checkpoint, record
from bert_dp.rank_process import follow_launcher


def verify(path: Path) -> dict[str, Any]:
    """How far the run was at the checkpoint, its size, and what is wrong with it."""
    facts, num_bytes = None, None
    with contextlib.suppress(OSError, ValueError):  # a run that goes on may remove it meanwhile
        num_bytes = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
        facts = record.read_checkpoint_facts(path)
    return {
        "name": path.name,
        "step": facts and facts.step,
        "samples": facts and facts.samples,
        "bytes": num_bytes,
        "problem": checkpoint.check(path),
    }


def main(run: Path) -> int:
    follow_launcher()
    paths = record.list_checkpoints(run / "checkpoints")
    if not paths:
        why = "holds no checkpoint" if run.exists() else "does not exist"
        sys.stderr.write(f"error: RUN: {run} {why}; name the directory of a run, which has checkpoints/\n")
        return 2
    sys.stdout.write(json.dumps([verify(path) for path in paths]))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
