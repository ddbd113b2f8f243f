"""scaling.json and profile.json as the prediction reads them: every field that it uses, checked. What it does
not use is ignored; null is what was not measured."""

from __future__ import annotations

import reprlib
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from bert_dp.config import ConfigError

SHOWN = 5  # problems of one file
LATE = 1.05  # ready times over the backward pass: two clocks
Count = Annotated[int, Field(gt=0, le=10**9)]
Seconds = Annotated[float, Field(ge=1e-9, le=1e9)]
Bytes = Annotated[float, Field(ge=1, le=1e18)]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)


class GradientFacts(_Part):
    name: str | None = None
    bytes: Bytes
    ready_s: Annotated[float, Field(ge=0)]


class ProfileFacts(_Part):
    """What bert_dp/measure/profiling.py measures."""

    device: str = "GPU"
    precision: str | None = None
    micro_batch: Count
    sequence_length: Count
    parameters: Count | None = None
    micro_s: Seconds | None = None
    forward_s: Seconds | None = None
    backward_s: Seconds
    optimizer_s: Annotated[float, Field(ge=0, le=1e9)] | None = None
    gradients: list[GradientFacts] = Field(min_length=1)
    num_layers: Count | None = None
    hidden_size: Count | None = None
    num_heads: Count | None = None

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.micro_s is None and self.forward_s is None:
            raise ValueError("micro_s: missing, and forward_s too")
        if self.backward_s > self.whole_s:
            raise ValueError(f"backward_s: {self.backward_s:g} is above micro_s, {self.whole_s:g}")
        for gradient in self.gradients:
            if gradient.ready_s > LATE * self.backward_s:
                raise ValueError(
                    f"ready_s of {gradient.name}: {gradient.ready_s:g} is above backward_s, "
                    f"{self.backward_s:g}"
                )
        if not 1 <= self.width <= 8:
            raise ValueError(f"parameters: {self.parameters} for gradients of {self.size:g} bytes")
        if self.hidden_size and self.num_heads and self.hidden_size % self.num_heads:
            raise ValueError(f"num_heads: {self.num_heads} does not divide hidden_size {self.hidden_size}")
        return self

    @property
    def whole_s(self) -> float:
        """Of a micro batch."""
        return self.micro_s if self.micro_s is not None else self.backward_s + (self.forward_s or 0.0)

    @property
    def size(self) -> float:
        """Bytes of all gradients."""
        return sum(gradient.bytes for gradient in self.gradients)

    @property
    def width(self) -> float:
        """Bytes of a number."""
        return self.size / self.parameters if self.parameters else 4.0


class PointFacts(_Part):
    bytes: Bytes
    seconds: Seconds


class LinkFacts(_Part):
    world_size: Annotated[int, Field(ge=2, le=10**9)]
    points: list[PointFacts]


class StepTime(_Part):
    median: Seconds | None = None
    mean: Seconds | None = None
    ci95: Annotated[list[Seconds], Field(min_length=2, max_length=2)] | None = None
    """Of the mean."""

    @model_validator(mode="after")
    def _ascends(self) -> Self:
        if self.ci95 is not None and self.ci95[0] > self.ci95[1]:
            raise ValueError(f"ci95: {self.ci95} does not ascend")
        return self

    @property
    def typical(self) -> float | None:
        """The mean, which is what the interval is of; the median of a file that has none."""
        return self.mean if self.mean is not None else self.median


class CellFacts(_Part):
    """One cell of the grid. A run that failed has no figures."""

    id: str
    engine: str
    kind: str = "run"
    status: str
    world_size: Count
    tensor: Count = 1
    micro_batch: Count | None = None
    accumulation: Count
    tokens_per_s: Annotated[float, Field(gt=0)] | None = None
    step_time_s: StepTime | None = None
    efficiency: Annotated[float, Field(gt=0)] | None = None
    ceiling_efficiency: Annotated[float, Field(ge=0.001, le=1000)] | None = None

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.world_size % self.tensor:
            raise ValueError(f"tensor: {self.tensor} does not divide world_size {self.world_size}")
        return self

    @property
    def step_s(self) -> float | None:
        return self.step_time_s.typical if self.step_time_s else None


class SettingsFacts(_Part):
    accumulation: Count | None = None
    flops_per_token: Annotated[float, Field(gt=0, le=1e18)] | None = None


class Document(_Part):
    settings: SettingsFacts | None = None
    cells: list[CellFacts] | None = None
    links: list[LinkFacts] | None = None
    profile: ProfileFacts

    def alone(self) -> CellFacts | None:
        """The run of one rank without a process group; of several the one with the settings'
        accumulation."""
        found = [
            cell
            for cell in self.cells or ()
            if (cell.engine, cell.kind, cell.status, cell.world_size) == ("single", "run", "ok", 1)
            and cell.step_s is not None
        ]
        wanted = self.settings.accumulation if self.settings else None
        return next((c for c in found if c.accumulation == wanted), found[0] if found else None)


def read_document(data: Any, name: str) -> Document:
    """`data`: what the file called `name` holds. Raises ConfigError that names the file and the fields."""
    whole = data if isinstance(data, dict) else {}
    bare = "profile" not in whole
    profile = whole if bare else whole["profile"]
    if not isinstance(profile, dict) or "gradients" not in profile:
        raise ConfigError(
            [
                f"--from: {name} holds no profile (gradients with ready_s); give what "
                "`bert-dp scale` writes, or --model with --seq-per-s and --micro"
            ]
        )
    try:
        return Document.model_validate({"profile": profile} if bare else whole)
    except ValidationError as error:
        issues = [_told(dict(e), skip=int(bare)) for e in error.errors(include_url=False)]
    if len(issues) > SHOWN:
        issues[SHOWN:] = [f"and {len(issues) - SHOWN} more"]
    raise ConfigError([f"--from: {name} is damaged: {issue}" for issue in issues])


def _told(error: dict[str, Any], skip: int) -> str:
    """Where, what, and the value; a check of several fields names its own in the message."""
    place = ".".join(str(part) for part in error["loc"][skip:])
    text = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] in ("missing", "value_error"):
        return f"{place}: {text}" if place else text
    return f"{place}: {text}, not {reprlib.repr(error['input'])}"
