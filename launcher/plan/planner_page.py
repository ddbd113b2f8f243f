"""The budget planner as one HTML file that needs no network: sliders, and the calculator in its script."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from bert_dp.config import Config, ConfigError
from bert_dp.cost import num_parameters, peak_flops, student
from launcher.plan.budget import Costs, family, gpu_rate, with_model
from launcher.plan.frontier import Fit
from launcher.plan.step_model import hardware
from launcher.report import html

COUNTS = (1, 2, 4, 8)
PRECISION = "bf16"


def planner_data(base: Config, fit: Fit | None, costs: Costs, prices: Mapping[str, float]) -> dict[str, Any]:
    """Return what the page computes from: sizes, the tokens/s of each on each number of each GPU, prices, and
    the law with its resampled copies."""
    models = family(base.model)
    sizes = [num_parameters(model, base.data.sequence_length) for model in models]
    devices: dict[str, Any] = {}
    for name, row in hardware()["gpus"].items():
        if peak_flops(row["device"], PRECISION) is None:
            continue
        rates: dict[int, list[float]] = {}
        for count in COUNTS:
            rates[count] = []
            for model in models:
                link = row["link"] if count > 1 else None
                try:
                    rate = gpu_rate(with_model(base, model), name, count, link, PRECISION)
                except ConfigError:
                    break  # this and all larger ones do not fit
                rates[count].append(rate.tokens_per_s)
        devices[name] = {"rates": rates, "watts": row["watts"], "price": prices.get(name)}
    data: dict[str, Any] = {
        "sizes": sizes,
        "devices": devices,
        "pue": costs.pue,
        "grams_per_kwh": costs.grams_per_kwh,
        "flops": 6.0,
        "law": None,
        "draws": [],
        "left_out": [],
        "student": 0.0,
    }
    if fit is not None:
        data |= {
            "flops": fit.law.flops,
            "law": dataclasses.asdict(fit.law),
            "draws": [dataclasses.asdict(law) for law in fit.draws],
            "left_out": [dataclasses.asdict(law) for law in fit.left_out],
            "student": student(max(1, len(fit.budgets) - 2)),
        }
    return data


def planner_html(
    data: dict[str, Any],
    origin: str,
    warnings: Sequence[str] = (),
    unit: str = "hours",
    amount: float = 24.0,
    gpu: str | None = None,
    count: int = 1,
    price: float | None = None,
) -> str:
    """Render the page with these values chosen."""
    devices = list(data["devices"])
    gpu = gpu if gpu in devices else devices[0]
    state = {
        "unit": unit,
        "amount": round(math.log10(amount), 2),
        "gpu": gpu,
        "count": count,
        "price": price if price is not None else data["devices"][gpu]["price"] or 0,
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
