"""Export the Python API of bert-dp. Each name is imported on first use."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bert_dp.api import (
        Result,
        Run,
        TrainingFailed,
        build_data,
        evaluate,
        export,
        finetune,
        predict,
        read_run,
        runs,
        train,
    )
    from bert_dp.config import ConfigError
    from bert_dp.model.load import load
    from bert_dp.tasks.mlm import batches

__version__ = "0.1.0"

_API = "Result Run TrainingFailed build_data evaluate export finetune predict read_run runs train"
_MODULES = {
    **dict.fromkeys(_API.split(), "bert_dp.api"),
    "ConfigError": "bert_dp.config",
    "batches": "bert_dp.tasks.mlm",
    "load": "bert_dp.model.load",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
