"""What hardware.yaml holds, validated: GPUs, links, latencies and the constants of the scaling model."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from bert_dp.config import ConfigError, read_yaml
from bert_dp.cost import peak_flops

FILE = Path(__file__).parent / "hardware.yaml"
Kind = Literal["nvlink", "pcie", "net", "tcp", "loopback"]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


class _Entry(_Strict):
    source: str = Field(min_length=8)


class Gpu(_Entry):
    device: str
    """Name by which bert_dp.cost knows its peak."""
    memory_gib: float = Field(gt=0)
    memory_gb_s: float = Field(gt=0)

    def peak(self, precision: str) -> float | None:
        """FLOP/s, from the only table there is."""
        return peak_flops(self.device, precision)


class Link(_Entry):
    kind: Kind
    gb_s: float = Field(gt=0)
    reach: float = Field(gt=0, le=1.1)
    gpus_gb_s: Mapping[int, float] = {}

    def bus_gb_s(self, gpus: int) -> float:
        """Bus bandwidth of a large all-reduce, GB/s, that `gpus` GPUs or NICs' nodes get."""
        measured = [count for count in self.gpus_gb_s if count <= gpus]
        return (self.gpus_gb_s[max(measured)] if measured else self.gb_s) * self.reach

    def scaled(self, factor: float) -> Link:
        """A link of `factor` times the bandwidth and the same latencies."""
        by_count = {gpus: factor * rate for gpus, rate in self.gpus_gb_s.items()}
        return self.model_copy(update={"gb_s": factor * self.gb_s, "gpus_gb_s": by_count})


class Protocol(_Strict):
    """Seconds; see the comment in the file."""

    start: float = Field(ge=0)
    hop: float = Field(ge=0)
    tree_start: float = Field(ge=0)
    tree: float | None = Field(ge=0)
    share: float = Field(gt=0, le=1)


class Latency(_Entry):
    protocols: Mapping[Literal["simple", "ll128"], Protocol]


class Constant(_Entry):
    value: float
    unit: str


class Hardware(_Strict):
    gpus: Mapping[str, Gpu]
    links: Mapping[str, Link]
    latencies: Mapping[Kind, Latency]
    constants: Mapping[Literal["device_spread", "overlap_gain", "memory_reach"], Constant]


@cache
def hardware() -> Hardware:
    """The shipped file."""
    return Hardware.model_validate(read_yaml(FILE))


def constant(name: Literal["device_spread", "overlap_gain", "memory_reach"]) -> float:
    """The value of a constant; its unit and source stand beside it in the file."""
    return hardware().constants[name].value


def find_link(name: str, setting: str) -> Link:
    """Raises ConfigError that names `setting` and the nearest link."""
    links = hardware().links
    if name not in links:
        close = difflib.get_close_matches(name, links, n=1, cutoff=0.4)
        hint = f"did you mean {close[0]}?" if close else f"use one of {', '.join(links)}"
        raise ConfigError([f"{setting}: unknown link {name!r}; {hint}"])
    return links[name]
