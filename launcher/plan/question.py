"""What `bert-dp plan scaling` is asked, and what it refuses."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from bert_dp.config import ConfigError
from launcher.plan.hardware import find_link, hardware
from launcher.plan.inputs import Source
from launcher.plan.step_model import ENGINES, Profile

WIDTHS = {"full": math.inf, "bf16": 2.0, "fp16": 2.0}  # bytes per number of a gradient that is sent, at most


@dataclasses.dataclass(frozen=True)
class Question:
    """The options of the verb."""

    gpus: tuple[int, ...]
    link: str | None = None
    inter: str | None = None
    gpus_per_node: int | None = None
    nics: int = 1
    engine: str = "ddp"
    tensor: tuple[int, ...] = (1,)
    accumulation: tuple[int, ...] = ()
    bucket_mib: float | None = None
    reduce_dtype: str = "full"

    @property
    def per_node(self) -> int:
        """8 GPUs, but a measured or a loopback link joins all that are asked for. Raises ConfigError."""
        if self.gpus_per_node is not None:
            return self.gpus_per_node
        local = self.link is None or find_link(self.link, "--link").kind == "loopback"
        return max(self.gpus) if local and self.inter is None else 8


def check(source: Source, question: Question) -> None:
    """Raises ConfigError with every option that contradicts another one or the source."""
    issues = []
    if question.engine not in ENGINES:
        issues.append(f"--engine: {question.engine!r} is not modelled; use one of {', '.join(ENGINES)}")
    if question.reduce_dtype not in WIDTHS:
        issues.append(
            f"--reduce-dtype: {question.reduce_dtype!r} is not modelled; use one of {', '.join(WIDTHS)}"
        )
    for setting, value in (
        ("--gpus-per-node", question.gpus_per_node),
        ("--nics", question.nics),
        ("--bucket-mib", question.bucket_mib),
    ):
        if value is not None and not value > 0:
            issues.append(f"{setting}: {value:g} is not above 0")
    if question.reduce_dtype in ("bf16", "fp16") and question.engine != "ddp":
        issues.append(
            f"--reduce-dtype: {question.reduce_dtype} is sent by ddp alone, not by {question.engine}; leave "
            "it out, or use --engine ddp"
        )
    if question.bucket_mib is not None and question.engine == "fsdp":
        issues.append("--bucket-mib: fsdp has no buckets; leave it out, or use another --engine")
    for name, setting in ((question.link, "--link"), (question.inter, "--inter")):
        if name is not None:
            find_link(name, setting)
    issues += _link_issues(source, question)
    issues += _tensor_issues(source.profile, question.tensor)
    if issues:
        raise ConfigError(issues)


def _link_issues(source: Source, question: Question) -> list[str]:
    most, per_node, links = max(question.gpus), question.per_node, hardware().links
    if 0 < per_node < most and question.inter is None:
        between = ", ".join(name for name, link in links.items() if link.kind in ("net", "tcp"))
        return [
            f"--inter: {most} GPUs fill more than one node of {per_node}; name the link between nodes, "
            f"one of {between}"
        ]
    if question.link is None and not source.curves and min(most, per_node) > 1:
        return [
            f"--link: not given, and no measured all-reduce for {most} GPUs; use one of {', '.join(links)}"
        ]
    if question.link is None and 1 < per_node < most:
        return [f"--link: give the link within a node as well as --inter {question.inter}"]
    return []


def _tensor_issues(profile: Profile, sizes: Sequence[int]) -> list[str]:
    if max(sizes) == 1:
        return []
    if not profile.hidden_size:
        return [f"--tensor: {max(sizes)} needs the model's shape; add --model CONFIG"]
    heads = profile.heads
    divisors = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
    return [
        f"--tensor: {size} does not divide the model's {heads} attention heads (num_heads); "
        f"use one of {divisors}"
        for size in sizes
        if heads and heads % size
    ]
