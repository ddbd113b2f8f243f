"""What a run directory holds, as far as it goes: a whole run, a crashed one, a foreign or torn file."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bert_dp import record
from launcher.redact import redact

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")  # may not reach a terminal, XML or UTF-8
WALL_PARTS = ("setup", "compile", "train", "eval", "save")  # disjoint; the parts of train are below
TRAIN_PARTS = {"data_wait": "data wait", "forward_backward": "forward + backward", "optimizer": "optimizer"}


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run directory holds. `facts` is summary.json or, without one, what the last lines tell."""

    path: Path
    name: str
    finished: bool
    facts: dict[str, Any]
    metrics: list[dict[str, Any]]
    evals: list[dict[str, Any]]
    config: dict[str, Any]
    environment: dict[str, Any]
    missing: list[str]


def load(run_dir: Path) -> Run:
    """Read whatever is there; what is not is named in `missing`."""
    missing = [f"{n} is missing" for n in ("metrics.jsonl", "evals.jsonl", "config.yaml", "environment.json")
               if not (run_dir / n).exists()]  # fmt: skip
    metrics, evals = (_lines(run_dir / name, missing) for name in ("metrics.jsonl", "evals.jsonl"))
    summary = record.read_json(run_dir / "summary.json")
    facts = dict(summary or {})
    if summary is None:
        missing.insert(0, "summary.json is missing or torn: numbers come from the last lines of the logs")
        last = metrics[-1] if metrics else {}
        facts = {
            **last,
            "final_loss": last.get("loss"),
            "heldout_loss": evals[-1].get("loss") if evals else None,
        }
    return Run(
        path=run_dir,
        name=CONTROL.sub("?", run_dir.absolute().name),
        finished=summary is not None,
        facts=facts,
        metrics=metrics,
        evals=evals,
        config=redact(_yaml(run_dir / "config.yaml", missing)),
        environment=redact(record.read_json(run_dir / "environment.json") or {}),
        missing=missing,
    )


def times(facts: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of rank 0 by part, as far as they were recorded."""
    parts = facts.get("time_s")
    items = parts.items() if isinstance(parts, dict) else ()
    return {key: value_s for key, value in items if (value_s := number(value)) is not None}


def other(times: Mapping[str, float]) -> float:
    """Seconds of train outside its named parts; clocks of host and device may overlap by a little."""
    return max(0.0, times.get("train", 0.0) - sum(times.get(part, 0.0) for part in TRAIN_PARTS))


def number(value: object) -> float | None:
    """A finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def _lines(path: Path, missing: list[str]) -> list[dict[str, Any]]:
    lines = [line for line in record.read_lines(path) if isinstance(line, dict)]
    if path.exists():
        whole = path.read_bytes().count(b"\n")
        if not path.read_bytes().endswith(b"\n") or whole != len(lines):
            missing.append(f"{path.name} is torn or empty: {len(lines)} whole lines read")
    return lines


def _yaml(path: Path, missing: list[str]) -> dict[str, Any]:
    import yaml

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError:
        return {}
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError):
        data = None
    if not isinstance(data, dict):
        missing.append(f"{path.name} is not a YAML mapping")
        return {}
    return {str(key): value for key, value in data.items()}
