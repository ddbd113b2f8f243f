"""What torch's DDP counts of its own reductions; private to torch, so every reader may find nothing."""

from __future__ import annotations

from typing import Any

SECONDS = {
    "comm_s": "avg_backward_comm_time",
    "overlap_s": "avg_backward_compute_comm_overlap_time",
    "compute_s": "avg_backward_compute_time",
}


def sample_every(model: Any, steps: int) -> None:
    """Let DDP time one step in `steps`, beside its first ten; on a GPU each costs a synchronisation."""
    choose = getattr(model, "_set_ddp_runtime_logging_sample_rate", None)
    if choose is not None:
        choose(steps)


def exposed_s(model: Any) -> float | None:
    """Of the step that was timed last: seconds of reductions that no backward pass covered."""
    data = _read(model)
    comm, overlap = data.get("backward_comm_time"), data.get("backward_compute_comm_overlap_time")
    return None if comm is None or overlap is None else (comm - overlap) / 1e9


def summary(model: Any) -> dict[str, Any] | None:
    """`ddp` of summary.json; None under other engines."""
    data = _read(model)
    if not data:
        return None
    sizes = data.get("rebuilt_bucket_sizes") or data.get("bucket_sizes") or ""
    seconds = {name: data[key] / 1e9 if data.get(key) else None for name, key in SECONDS.items()}
    return {"bucket_bytes": [int(size) for size in sizes.split(",") if size.strip()], **seconds}


def _read(model: Any) -> dict[str, Any]:
    read = getattr(model, "_get_ddp_logging_data", None)
    return dict(read()) if read is not None else {}
