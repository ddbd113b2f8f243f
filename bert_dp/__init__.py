"""One rank of a bert-dp run, and what Python users call, from the modules that have it on first use."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bert_dp.config import ConfigError
    from bert_dp.model.load import load
    from bert_dp.tasks.mlm import batches
    from launcher.api import Run, TrainingFailed, read_run, train

__version__ = "0.1.0"

_HOMES = {
    "ConfigError": "bert_dp.config",
    "Run": "launcher.api",
    "TrainingFailed": "launcher.api",
    "batches": "bert_dp.tasks.mlm",
    "load": "bert_dp.model.load",
    "read_run": "launcher.api",
    "train": "launcher.api",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
