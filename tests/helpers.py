"""Helpers that many tests share. This module does not import torch."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from bert_dp.config import Config, ConfigError, Issue, parse_overrides, resolve

CONFIGS = Path(__file__).parents[1] / "configs"
OF_ANY_MODEL = ("finetune", "glue", "distill")
"""Names of the configurations without a model."""
RECIPES = [CONFIGS / f"{name}.yaml" for name in ("one-gpu", "eight-gpus", "two-nodes", "continued")]
"""Configurations that train the model of another configuration or of the user."""
PRETRAINING = [
    path for path in sorted({*CONFIGS.glob("*.yaml")} - {*RECIPES}) if path.stem not in OF_ANY_MODEL
]
BASE: dict[str, Any] = {"data": {"sources": ["builtin"]}, "schedule": {"steps": 10}, "precision": "fp32"}
TINY_MODEL = {"vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 2, "intermediate_size": 32}


def make_config(*settings: str, **sections: Any) -> Config:
    """Return a minimal configuration with `sections` as in a file and `settings` as after `--set`."""
    return resolve([BASE, sections, parse_overrides(settings)])


def failed(message: str, kind: str = "error", **facts: Any) -> dict[str, Any]:
    """Return summary.json of a run that failed."""
    return {"status": "failed", "failure": {"message": message, "kind": kind, **facts}}


def raised_issues(function: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[Issue, ...]:
    """Return the issues of the ConfigError that this call must raise."""
    with pytest.raises(ConfigError) as caught:
        function(*arguments, **options)
    return caught.value.issues


def issues_of(function: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[str, ...]:
    """Return the lines of the ConfigError that this call must raise."""
    return tuple(map(str, raised_issues(function, *arguments, **options)))


def write_files(root: Path, files: Mapping[str, str]) -> Path:
    """Write texts to paths relative to `root`, and return `root`."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def tiny_run(shards: Path, **sections: Any) -> Config:
    """Return a configuration of a tiny model on shards of `write_shards`."""
    data = {"path": str(shards), "sequence_length": 16, **sections.pop("data", {})}
    base = {"model": TINY_MODEL, "batch": {"global_size": 4, "micro_size": 4}, "compile": "off"}
    return make_config(**{**base, "data": data, **sections})


def logged(run_dir: Path, key: str) -> list[Any]:
    """Return the value of `key` in every line of metrics.jsonl."""
    return [line[key] for line in read_lines(run_dir / "metrics.jsonl")]


def write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
