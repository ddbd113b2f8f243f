"""What state.json of a checkpoint holds beside the tensors, for tests that save one themselves."""

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
