"""The run that a verb is asked about, before a process is started for it."""

from __future__ import annotations

from pathlib import Path

from bert_dp import record

TOKENIZER = "tokenizer.json"


def run_issues(run: Path) -> list[str]:
    """Why there is no model with its tokenizer at `run`, a run directory or a checkpoint; one line each."""
    found = record.newest_checkpoint_facts(run.expanduser())
    if found is None:
        return [f"RUN: {run} holds no checkpoint; name a run directory or a checkpoint"]
    path, _ = found
    places = (path / TOKENIZER, path.parent.parent / TOKENIZER)
    if not any(place.is_file() for place in places):
        return [f"RUN: {path} has no tokenizer; put the tokenizer.json of its shards at {places[1]}"]
    return []
