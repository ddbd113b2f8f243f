"""Facts of a checkpoint's state.json, for tests that save a checkpoint."""

from typing import Any

FACTS: dict[str, Any] = {
    "samples": 0,
    "elapsed_s": 0.0,
    "config": {},
    "data_hash": "0" * 64,
    "compiled": False,
    "device": "cpu",
    "precision": "fp32",
    "scaler": {},
}
