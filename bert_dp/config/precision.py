"""What `precision: auto` is: one rule for the launcher, which estimates and warns, and for ranks."""

from __future__ import annotations

from collections.abc import Iterable

from bert_dp.config.engines import engine_facts


def decide_precision(
    setting: str, engines: Iterable[str], *, on_gpu: bool, has_bf16: bool, kept: str | None = None
) -> str:
    """`setting`; where it is auto: `kept`, which a checkpoint was trained in, else bf16 where every rank's
    device multiplies it (`has_bf16`) and every engine takes it, else fp16 on a GPU and fp32 on a CPU."""
    if setting != "auto":
        return setting
    if kept is not None:
        return kept
    if has_bf16 and not any("bf16" in engine_facts(engine).refused_precisions for engine in engines):
        return "bf16"
    return "fp16" if on_gpu else "fp32"
