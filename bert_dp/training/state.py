"""The state of a run: one value that the loop changes, equal on every rank. Torch-free."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from bert_dp.files import CheckpointFacts
from bert_dp.files.models import Failure, FailureKind

SAVED = ("step", "samples", "elapsed_s", "skipped_steps", "loss_spikes", "recent_losses")


@dataclasses.dataclass
class TrainState:
    """The fields of SAVED are in state.json of a checkpoint; the others belong to this start alone."""

    step: int = 0
    """Optimizer steps done."""
    samples: int = 0
    """Taken from the stream."""
    elapsed_s: float = 0.0
    """Reading of rank 0's clock, when this was last saved."""
    skipped_steps: int = 0
    """Count at the last line of metrics.jsonl or the last save; the meter counts on the device."""
    loss_spikes: int = 0
    recent_losses: list[float] = dataclasses.field(default_factory=list)
    """Logged losses that the next is compared with."""
    progress: float = 0.0
    """f at the beginning of the last step; `lr` and `global_batch` follow it."""
    lr: float = 0.0
    global_batch: int = 0
    logged_step: int = 0
    final_loss: float | None = None
    heldout: Mapping[str, Any] | None = None
    """The last measurements on held-out data, `loss` among them."""
    evaluated_step: int | None = None
    """Step of `heldout`."""
    eval_s: float = 0.0
    """Seconds spent in evaluations."""
    abort_reason: Failure | None = None
    """Failure for which the run must end."""

    @classmethod
    def from_checkpoint(cls, facts: CheckpointFacts) -> TrainState:
        """Return the state in which the run goes on from a checkpoint."""
        return cls(logged_step=facts.step, **{name: getattr(facts, name) for name in SAVED})

    def request_abort(self, message: str | None, kind: FailureKind) -> None:
        """End the run for this reason, unless it is None or there is one already."""
        if message is not None and self.abort_reason is None:
            self.abort_reason = Failure(message=message, kind=kind)

    def saved(self) -> dict[str, Any]:
        """Return the fields of state.json."""
        return {name: getattr(self, name) for name in SAVED}
