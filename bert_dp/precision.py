"""How wide a rank computes."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class Precision:
    """Width of the parameters and of autocast (None = no autocast)."""

    name: str
    parameters: torch.dtype
    autocast: torch.dtype | None

    def context(self, device: torch.device) -> AbstractContextManager[Any]:
        return torch.autocast(device.type, self.autocast) if self.autocast else nullcontext()


def choose_precision(setting: str, device: torch.device) -> Precision:
    """auto = bf16 on a GPU with native bf16, fp16 with a gradient scaler on an older one, fp32 on a CPU."""
    if setting == "auto":
        if device.type == "cpu":
            setting = "fp32"
        else:
            setting = "bf16" if torch.cuda.get_device_capability(device) >= (8, 0) else "fp16"
    wide = torch.float64 if setting == "fp64" else torch.float32
    return Precision(setting, wide, {"bf16": torch.bfloat16, "fp16": torch.float16}.get(setting))
