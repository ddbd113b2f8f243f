"""A held-out loss in words, with its interval and its denominator."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bert_dp.record.models import HeldOut
from launcher import stats
from launcher.report.numbers import (
    count_of,
    format_count,
    format_decimals,
    format_nats,
    format_percent,
    format_ratio,
    number,
)
from launcher.stats import NORMAL


def half_width(heldout: HeldOut, seeds: Sequence[float] = ()) -> float | None:
    """Return half of the 95 % interval of the loss, nats; None where it was not measured.

    `seeds`: losses of which it is the mean. All are of one text, whose error adds to that of the mean over
    the seeds as an independent one.
    """
    se = number(heldout.loss_se)
    parts = [] if se is None else [NORMAL * se]
    parts += [stats.half_width(seeds)] if len(seeds) > 1 else []
    return math.hypot(*parts) if parts else None


def loss_text(loss: float | None, heldout: HeldOut, seeds: Sequence[float] = ()) -> str:
    """Format a loss with its interval where it has one: `5.7123 nats ± 0.0312`."""
    width = half_width(heldout, seeds)
    return loss_in(heldout.loss_unit, loss) + ("" if loss is None or width is None else f" ± {width:.4f}")


def loss_in(unit: str, loss: float | None) -> str:
    """Format a loss in nats or in another unit."""
    return format_nats(loss) if unit == "nats" else f"{format_ratio(loss)} {unit}"


def basis(heldout: HeldOut) -> str:
    """Format the denominator of the loss: `4,096 masked tokens of 216 sequences, 15.0 % masked`."""
    if heldout.examples is not None:
        return count_of(heldout.examples, "example") if heldout.examples else "held-out examples"
    if heldout.masked_tokens is None:
        return "held-out masked tokens"
    sequences = f" of {count_of(heldout.sequences, 'sequence')}" if heldout.sequences else ""
    rate = f", {format_percent(heldout.mask_rate)} masked" if heldout.mask_rate else ""
    return f"{format_count(heldout.masked_tokens)} masked tokens{sequences}{rate}"


def scores_text(heldout: HeldOut) -> str | None:
    """Format the scores: `dev accuracy 0.7123, dev f1 0.8012`; None where no example is scored."""
    if heldout.scores is None:
        return None
    named = [f"{name.replace('/', ' ')} {format_decimals(score)}" for name, score in heldout.scores.items()]
    return ", ".join(named) or "no score: a logit was not finite"


def too_small(heldout: HeldOut, difference: float | None) -> str | None:
    """Return a warning where the held-out text is too small for a difference of losses, nats; else None.

    The interval is that of one loss: a difference on the same masked tokens is known better, by how much is
    not measured.
    """
    width = half_width(heldout)
    if width is None or not difference or abs(difference) >= width:
        return None
    return (
        f"The held-out text is small for a difference of {format_nats(abs(difference))}: {basis(heldout)} "
        f"give ± {width:.4f} (95 %, over sequences). Hold out more with data.build.held_out_fraction, or "
        "raise eval.max_sequences."
    )
