"""`bert-dp tune`: choose the micro batch and the learning rate by short training runs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bert_dp import files
from bert_dp.config import Config, dump_config
from launcher import results
from launcher.job import Output

FILE = "tune.json"
TUNED = "tuned.yaml"
PLAN = "plan.json"


class SearchPlan(results.PlanFile):
    """plan.json: the options with which a search was started."""

    settings: dict[str, Any]


def search_output(folder: Path, config: Config, settings: dict[str, Any], *grows: str) -> Output[SearchPlan]:
    """Return the output directory of a search. A later call may increase only the settings `grows`."""
    plan = SearchPlan(config_hash=config.hash(), config=config.model_dump(mode="json"), settings=settings)
    fixed = ("config_hash", "settings")
    return Output(folder, "search", PLAN, plan, fixed, tuple(f"settings.{name}" for name in grows))


def with_settings(config: Config, **sections: Mapping[str, Any]) -> Config:
    """Return the configuration with these settings, by section, without checking them."""
    changed = {name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    return config.model_copy(update=changed)


def write_tuned(tune: results.TuneFile, tuned: Config | None, out: Path) -> None:
    """Write tune.json, and tuned.yaml if something was chosen. Raises OSError."""
    results.write(out / FILE, tune)
    if tuned is not None:
        files.write_text(out / TUNED, dump_config(tuned))
