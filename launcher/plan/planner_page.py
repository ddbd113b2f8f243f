"""Render the budget planner as a self-contained HTML page, which recalculates in the browser."""

import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from bert_dp.config import Config
from bert_dp.cost import num_parameters
from launcher.plan.frontier import Frontier
from launcher.plan.gpu_speed import gpu_rate, peak_of, rates_that_fit
from launcher.plan.step_model import hardware
from launcher.report import html

COUNTS = (1, 2, 4, 8)
PRECISION = "bf16"


def planner_data(
    configs: Sequence[Config],
    fit: Frontier | None,
    prices: Mapping[str, float],
    pue: float = 1.0,
    grams_per_kwh: float | None = None,
) -> dict[str, Any]:
    """Return the input of the page: sizes, tokens/s for each size by GPU and number of GPUs, prices, and the
    law with the fits to resampled runs. `configs`: one configuration per size, in ascending order."""
    devices = {}
    for name, row in hardware()["gpus"].items():
        if peak_of(name, PRECISION) is None:
            continue
        rates = {}
        for count in COUNTS:
            rate_of = partial(gpu_rate, gpu=name, gpus=count, precision=PRECISION)
            rates[count] = [rate.tokens_per_s for rate in rates_that_fit(configs, rate_of)]
        devices[name] = {"rates": rates, "watts": row["watts"], "price": prices.get(name)}
    law: dict[str, Any] = {"law": None}
    if fit is not None:
        law = fit.model_dump(mode="json", include={"law", "draws", "left_out"}) | {"student": fit.student}
    return {
        "sizes": [num_parameters(each.model, each.data.sequence_length) for each in configs],
        "devices": devices,
        "pue": pue,
        "grams_per_kwh": grams_per_kwh,
        **law,
    }


def planner_html(
    data: Mapping[str, Any],
    origin: str,
    warnings: Sequence[str] = (),
    unit: str = "hours",
    amount: float = 24.0,
    gpu: str | None = None,
    count: int = 1,
    price: float | None = None,
) -> str:
    """Render the page. `data`: see planner_data. `unit` and the parameters after it fill the input fields."""
    devices = data["devices"]
    gpu = gpu if gpu in devices else next(iter(devices))
    state = {
        "unit": unit,
        "amount": round(math.log10(amount), 2),
        "gpu": gpu,
        "count": count,
        "price": price if price is not None else devices[gpu]["price"] or 0,
        "ratio": round(math.log10(200), 2),
    }
    return html.render(
        "plan.html",
        "plan.js",
        state=state,
        devices=devices,
        counts=COUNTS,
        origin=origin,
        warnings=warnings,
        has_law=data["law"] is not None,
        data=json.dumps(data, allow_nan=False).replace("<", "\\u003c"),
    )
