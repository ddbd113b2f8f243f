"""Energy that a rank's GPU has used, where its driver counts it (extra `energy`, nvidia-ml-py)."""

from __future__ import annotations

from typing import Any

import torch


def joules(device: torch.device) -> float | None:
    """NVML's counter of this device, joules since its driver was loaded.

    None on a CPU, without the package, or on a GPU older than Volta.
    """
    if device.type != "cuda":
        return None
    try:
        import pynvml
    except ImportError:
        return None
    properties: Any = torch.cuda.get_device_properties(device)
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{properties.uuid}")
        return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3  # it counts mJ
    except pynvml.NVMLError:
        return None
