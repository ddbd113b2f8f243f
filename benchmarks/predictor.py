"""Compare `bert-dp plan scaling` with published tables.

    python benchmarks/predictor.py [--rows FILE] [--verbose] [--sensitivity] [--leave-one-out] [--json FILE]

Each series is calibrated only on its row with the fewest GPUs, the base row, which gives the time of a micro
batch. Links, memory and all constants come from launcher/plan/hardware.yaml. Every other row is predicted.
Prints the error of the efficiency in points, by tier and source, with and without the rows that communication
cannot explain (published_rows.DO_NOT_FIT); the rows with large errors; and the error of predicting efficiency
1 everywhere. --sensitivity varies device_spread and overlap_gain. --leave-one-out chooses both for each
source from all other sources.
"""

import argparse
import collections
import dataclasses
import datetime
import math
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import published_rows, records
from benchmarks.published_rows import Constants, NotPredictable, Row, TrialOutcome

GOAL_P90 = 8.0  # points of efficiency
SPREADS, GAINS = (0.0, 0.0075, 0.015, 0.0225, 0.03), (0.0, 0.21, 0.5, 1.0)
TIERS: dict[str, tuple[str, Callable[[Row], bool]]] = {
    "A": ("no overlap, one NIC", lambda r: r["id"].startswith("dlperf-pt-FP32-")),
    "B": (
        "64-256 GPUs, accumulation 4-1",
        lambda r: r["id"].startswith("dle22-AMP-s128-strong") and int(r["gpus"]) >= 64,
    ),
    "C": (
        "256 and 1024 GPUs, flat all-reduce",
        lambda r: r["id"].startswith("dle19-mn-DGX2H-s128") and int(r["gpus"]) >= 256,
    ),
    "D": ("fine-tuning, overlap on", lambda r: "-squad-" in r["id"]),
    "E": ("too little bandwidth, values read from a chart", lambda r: r["id"].startswith("onebit-adam-")),
}


def family(row: Row) -> str:
    """Return the project that published a row."""
    return re.split(r"[@:\s(]", row["source"])[0] + " " + row["framework"].split()[0]


def predict_all(rows: list[Row], constants: Constants) -> tuple[list[TrialOutcome], list[tuple[Row, str]]]:
    """Return the outcomes of all rows except base rows, and the unpredictable rows with their reasons."""
    done, refused = [], []
    for row in rows:
        if row["gpus"] == row["base_gpus"]:
            continue
        try:
            done.append(published_rows.outcome(row, rows, constants))
        except NotPredictable as reason:
            refused.append((row, str(reason)))
    return done, refused


def errors(outcomes: Sequence[TrialOutcome]) -> dict[str, Any]:
    """Summarize the absolute errors of the efficiency in percentage points."""
    points = sorted(abs(o.points) for o in outcomes)
    if not points:
        return {"rows": 0, "median": None, "p90": None, "max": None, "bias": None}
    return {
        "rows": len(points),
        "median": statistics.median(points),
        "p90": points[math.ceil(0.9 * len(points)) - 1],
        "max": points[-1],
        "bias": statistics.mean(o.points for o in outcomes),
    }


def kept(outcomes: Sequence[TrialOutcome]) -> list[TrialOutcome]:
    return [o for o in outcomes if o.dropped is None]


def sensitivity(rows: list[Row]) -> list[dict[str, Any]]:
    """Return the headline errors for a grid of device_spread and overlap_gain."""
    return [
        {"device_spread": s, "overlap_gain": g, **errors(kept(predict_all(rows, Constants(s, g))[0]))}
        for s in SPREADS
        for g in GAINS
    ]


def leave_one_out(rows: list[Row]) -> list[dict[str, Any]]:
    """Return the errors of each source with the constants of the lowest median + p90 / 2 on all others."""
    grid = {(s, g): kept(predict_all(rows, Constants(s, g))[0]) for s in SPREADS for g in GAINS}
    sources: list[dict[str, Any]] = []
    pooled: list[TrialOutcome] = []
    for name in sorted({family(o.row) for o in next(iter(grid.values()))}):

        def cost(pair: tuple[float, float], name: str = name) -> float:
            others = errors([o for o in grid[pair] if family(o.row) != name])
            return float(others["median"] + others["p90"] / 2)

        best = min(grid, key=cost)
        own = [o for o in grid[best] if family(o.row) == name]
        pooled += own
        sources.append({"source": name, "device_spread": best[0], "overlap_gain": best[1], **errors(own)})
    return [*sources, {"source": "all", "device_spread": None, "overlap_gain": None, **errors(pooled)}]


def tier_figures(outcomes: Sequence[TrialOutcome]) -> dict[str, Any]:
    out = {}
    for tier, (what, includes) in TIERS.items():
        mine = [o for o in outcomes if includes(o.row)]
        speed = sorted(abs(o.predicted / o.measured - 1) for o in mine)
        middle, top = (statistics.median(speed), speed[-1]) if speed else (None, None)
        out[tier] = {"what": what, **errors(mine), "throughput_median": middle, "throughput_max": top}
    return out


def result(rows: list[Row], o: argparse.Namespace) -> dict[str, Any]:
    constants = Constants()
    outcomes, refused = predict_all(rows, constants)
    sources = collections.defaultdict(list)
    for outcome in kept(outcomes):
        sources[family(outcome.row)].append(outcome)
    date = o.date or datetime.date.today().isoformat()
    return {
        "environment": {"date": date, "rows": len(rows)},
        "constants": dataclasses.asdict(constants),
        "headline": errors(kept(outcomes)),
        "efficiency_1": errors([dataclasses.replace(outcome, predicted=1.0) for outcome in kept(outcomes)]),
        "with_dropped": errors(outcomes),
        "tiers": tier_figures(outcomes),
        "sources": {name: errors(mine) for name, mine in sorted(sources.items())},
        "sensitivity": sensitivity(rows) if o.sensitivity else None,
        "leave_one_out": leave_one_out(rows) if o.leave_one_out else None,
        "rows": [line(outcome) for outcome in outcomes],
        "not_predictable": [{"id": row["id"], "reason": reason} for row, reason in refused],
    }


def line(o: TrialOutcome) -> dict[str, Any]:
    return {
        "id": o.row["id"],
        "gpus": int(o.row["gpus"]),
        "measured": round(o.measured, 4),
        "predicted": round(o.predicted, 4),
        "error_points": round(o.points, 2),
        "measured_step_s": round(published_rows.step_s(o.row), 5),
        "step_s": round(o.step_s, 5),
        "dropped": o.dropped,
    }


def show(name: str, e: dict[str, Any]) -> None:
    if not e["rows"]:
        print(f"{name:44} no rows")
        return
    print(f"{name:44} {e['rows']:4} {e['median']:7.2f} {e['p90']:7.2f} {e['max']:7.1f} {e['bias']:+7.2f}")


def report(figures: dict[str, Any], verbose: bool) -> None:
    print(f"{'absolute error of the efficiency, points':44} rows  median     p90     max    bias")
    show("all rows except those of DO_NOT_FIT", figures["headline"])
    show("the same rows, predicted as efficiency 1", figures["efficiency_1"])
    show("with rows that communication cannot explain", figures["with_dropped"])
    for tier, e in figures["tiers"].items():
        show(f"tier {tier}: {e['what']}", e)
        if e["rows"]:
            speed = f"{100 * e['throughput_median']:.1f} % median, {100 * e['throughput_max']:.1f} % maximum"
            print(f"{'':8}error of the throughput: {speed}")
    for name, e in figures["sources"].items():
        show(name, e)
    for title in ("sensitivity", "leave_one_out"):
        for e in figures[title] or []:
            show(f"{e.get('source', '')} spread {e['device_spread']} gain {e['overlap_gain']}".strip(), e)
    lines = sorted(figures["rows"], key=lambda r: -abs(r["error_points"]))
    for r in lines if verbose else [r for r in lines if abs(r["error_points"]) > GOAL_P90]:
        print(
            f"{r['id']:38} measured {r['measured']:.3f} predicted {r['predicted']:.3f} "
            f"{r['error_points']:+6.1f}  {r['dropped'] or ''}"
        )
    reasons = collections.Counter(r["reason"] for r in figures["not_predictable"])
    for reason, count in reasons.most_common():
        print(f"not predictable, {count} rows: {reason}")


def main() -> None:
    parser = records.make_parser(__doc__, "--date", "--json")
    parser.add_argument("--rows", type=Path, default=published_rows.ROWS, help="CSV file of published rows")
    parser.add_argument("--sensitivity", action="store_true", help="vary the constants")
    parser.add_argument("--leave-one-out", action="store_true", help="leave out one source at a time")
    parser.add_argument("--verbose", action="store_true", help="print all rows")
    o = parser.parse_args()
    figures = result(published_rows.read(o.rows), o)
    report(figures, o.verbose)
    records.write(o.json, figures)


if __name__ == "__main__":
    main()
