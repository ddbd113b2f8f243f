"""The precision of a rank: width of its parameters and of autocast."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from bert_dp.config import bf16_units, decide_precision


@dataclasses.dataclass(frozen=True)
class Precision:
    """Width of the parameters and of autocast (None = no autocast)."""

    name: str
    parameters: torch.dtype
    autocast: torch.dtype | None

    def context(self, device: torch.device) -> AbstractContextManager[Any]:
        return torch.autocast(device.type, self.autocast) if self.autocast else nullcontext()


def precision_of(name: str) -> Precision:
    """Return the widths of fp64, fp32, bf16 or fp16."""
    wide = torch.float64 if name == "fp64" else torch.float32
    return Precision(name, wide, {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name))


def has_bf16(device: torch.device) -> bool:
    """Return whether the device multiplies bf16 itself."""
    if device.type == "cpu":
        return bool(bf16_units())
    return torch.cuda.get_device_capability(device) >= (8, 0)


def choose_precision(setting: str, device: torch.device, engine: str = "auto") -> Precision:
    """Choose the precision of a process that runs alone; ranks agree on one (`setup.agree_precision`)."""
    on_gpu = device.type == "cuda"
    native = setting == "auto" and has_bf16(device)
    return precision_of(decide_precision(setting, [engine], on_gpu=on_gpu, has_bf16=native))


def inference_precision(setting: str, device: torch.device) -> Precision:
    """Choose the precision of a model that only predicts: auto = bf16 on a GPU that multiplies it, else fp32.
    fp32 means no autocast: the precision of the weights, whatever it is."""
    if setting == "auto":
        setting = "bf16" if device.type == "cuda" and has_bf16(device) else "fp32"
    return precision_of(setting)


def allow_tf32(precision: Precision, device: torch.device) -> None:
    """Multiply fp32 matrices in TF32 on a GPU beside bf16 or fp16; an fp32 run, whose MFU divides by the fp32
    peak, multiplies in fp32."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("highest" if precision.name == "fp32" else "high")
