"""`bert-dp tune`: choose the micro batch or the learning rate with trial runs."""

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
    """Contents of plan.json: the options and the configuration of a search."""

    settings: dict[str, Any]


def search_output(
    folder: Path, config: Config, settings: dict[str, Any], *may_increase: str
) -> Output[SearchPlan]:
    """Return the output directory of a search. A later command with the same configuration and settings
    resumes the search; the settings named in `may_increase` may then be larger."""
    plan = SearchPlan(config_hash=config.hash(), config=config.model_dump(mode="json"), settings=settings)
    must_match, increasing = ("config_hash", "settings"), tuple(f"settings.{name}" for name in may_increase)
    return Output(folder, "search", PLAN, plan, must_match, increasing)


def with_settings(config: Config, **sections: Mapping[str, Any]) -> Config:
    """Return a copy of `config` with new, unvalidated values, such as `batch={"micro_size": 8}`."""
    changed = {name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    return config.model_copy(update=changed)


def write_tuned(tune: results.TuneFile, tuned: Config | None, out: Path) -> None:
    """Write tune.json and, if the search chose a value, tuned.yaml. Raise OSError if writing fails."""
    results.write(out / FILE, tune)
    if tuned is not None:
        files.write_text(out / TUNED, dump_config(tuned))
