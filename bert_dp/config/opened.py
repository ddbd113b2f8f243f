"""What the data of a run say of themselves: shards of text, or labelled examples."""

from __future__ import annotations

from pathlib import Path

from bert_dp.config.examples import ExamplesManifest, examples_issues, read_examples
from bert_dp.config.manifest import Manifest, data_issues, data_warnings, read_manifest
from bert_dp.config.schema import Config


def read_data(config: Config, directory: Path) -> Manifest | ExamplesManifest:
    """What lies in `directory`, of the kind that the objective reads. Raises ConfigError."""
    return read_examples(directory) if config.objective.name == "finetune" else read_manifest(directory)


def fit_issues(config: Config, data: Manifest | ExamplesManifest) -> list[str]:
    """What in the data does not fit the configuration; one line each."""
    if isinstance(data, ExamplesManifest):
        return examples_issues(config, data)
    return data_issues(config, data)


def fit_warnings(config: Config, data: Manifest | ExamplesManifest) -> list[str]:
    """What fits but is hardly meant; one line each."""
    return data_warnings(config, data) if isinstance(data, Manifest) else []
