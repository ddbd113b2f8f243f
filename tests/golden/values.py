"""What the verbs make of the directories in `made/`: one function a section, from a copy to JSON values.

A value is left out where it is a time, tells of the machine or is a sentence.
"""

from __future__ import annotations

import csv
import hashlib
import html.parser
import itertools
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from safetensors.numpy import load_file

from tests.e2e.cli import bert_dp, here
from tests.golden import made
from tests.golden import told as sayings
from tests.golden.compare import differences

VERBS = "train|scale|report|doctor|data build|data inspect|tune batch|tune lr|plan scaling".split("|")
OF_THE_CALL = ("environment", "command", "date", "config_hash", "seconds", "at_a_time")
SENTENCES = ("why", "cause", "evidence", "next", "assumptions", "tokens_why", "explanation", "flags")
TIMED = re.compile(r".*(_s|_gib|_j|_per_gpu|mfu|_ratio)|device|straggler|time_s|noise_scale|ddp")
UNIT = r" ?%| (?:[kMGT](?:B|FLOP/s|J)?|us|ms|s|min|h)\b"
NUMBER = re.compile(rf"n/a|(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?(?:{UNIT})?(?![0-9A-Za-z])")


def options(root: Path) -> Any:
    """The options of each verb."""
    found = {}
    for verb in VERBS:
        text = here(*verb.split(), "--help").stdout
        lines = re.findall(r"^ +(?:-\w, )?(--[a-z-]+)(?:(?:, | / )(--[a-z-]+))?", text, re.MULTILINE)
        found[verb] = dict.fromkeys(sorted({name for line in lines for name in line if name}), "option")
    return found


def dry_runs(root: Path) -> Any:
    """What is said before anything starts."""
    train = here("train", "tiny.yaml", "--nproc", "2", "--dry-run", cwd=root)
    ramp = "batch.ramp_fraction=0.5 batch.ramp_quantum=8 schedule.tokens=1e6 model.hidden_size=256".split()
    sets = [word for setting in ramp for word in ("--set", setting)]
    ramped = here("train", "tiny.yaml", "--nproc", "1", "--dry-run", *sets, cwd=root)
    refused = here("train", "tiny.yaml", "--nproc", "3", "--set", "model.num_heads=5", "--dry-run", cwd=root)
    verbs = {"scale": made.SCALE, "batch": made.BATCH, "lr": made.LR}
    searches = {
        name: without(answer(here(*verb, "new", "--dry-run", cwd=root), root), ("config",))
        for name, verb in verbs.items()
    }
    return {
        "train": {"exit": train.returncode, **labelled(train.stdout)},
        "train with a ramp": {"exit": ramped.returncode, **labelled(ramped.stdout)},
        "refused": {"exit": refused.returncode, "lines": len(refused.stderr.splitlines())},
        **searches,
    }


def labelled(text: str) -> dict[str, list[str]]:
    """First word of each line -> its numbers."""
    lines = [line.split(maxsplit=1) for line in text.splitlines() if not line.startswith("warning")]
    return {words[0]: NUMBER.findall(words[-1]) for words in lines if words}


def shards(root: Path) -> Any:
    """`data inspect` of shards that were built once."""
    return answer(here("data", "inspect", "shards", "--json", cwd=root), root)


def built(root: Path) -> Any:
    """`data build` of the same corpus."""
    code = bert_dp(*made.BUILD, "again", cwd=root).returncode
    manifest = json.loads((root / "again/manifest.json").read_text())
    return {"exit": code, **without(manifest, ("versions",))}


def scale(root: Path) -> Any:
    """The reduction of a whole grid, nothing of which runs again."""
    whole = measured(root, "scale", made.SCALE, "runs")
    with (root / "scale/scaling.csv").open() as file:
        rows = without(list(csv.DictReader(file)), SENTENCES)
    return {**whole, "csv": {row["id"]: {key: number_of(cell) for key, cell in row.items()} for row in rows}}


def plan(root: Path) -> Any:
    """Predictions from a measured grid, from one profile, and from the table of links and GPUs."""
    rate = "--model bert-base --seq-per-s 400 --micro 32 --gpu A100-80G"
    questions = {
        "measured": "--from scale/scaling.json --gpus 1..2",
        "profile": "--from scale/profile.json --link pcie4 --gpus 1,2,4 --engine zero1",
        "network": f"{rate} --link nvlink3 --inter ib-hdr --nics 4 --gpus 1..64",
        "tensor": f"{rate} --link nvlink3 --gpus 2,4,8 --tensor 1,2 --accumulation 1,4",
        "fsdp": f"{rate} --link pcie4 --gpus 8 --engine fsdp",
        "buckets": f"{rate} --link pcie4 --gpus 8 --bucket-mib 100",
    }
    return {
        name: answer(here("plan", "scaling", *words.split(), "--json", cwd=root), root)
        for name, words in questions.items()
    }


def batch(root: Path) -> Any:
    return tuned(root, "batch", made.BATCH)


def rate(root: Path) -> Any:
    return tuned(root, "lr", made.LR)


def tuned(root: Path, name: str, verb: tuple[str, ...]) -> Any:
    """A search's result from its trials, without one of them starting."""
    result = measured(root, name, verb, "trials")
    return {**result, "tuned.yaml": lines(root / name / "tuned.yaml", root)}


def measured(root: Path, name: str, verb: tuple[str, ...], runs: str) -> dict[str, Any]:
    """The answer of a verb called again in its directory; `kept`: nothing was run again, nothing was lost."""
    before = summaries(root / name / runs)
    done = bert_dp(*verb, name, cwd=root, timeout=500, BERT_DP_CACHE=str(root / "cache"))
    result = answer(done, root)
    after = summaries(root / name / runs)
    files = sorted(path.name for path in (root / name).iterdir() if not path.name.startswith("."))
    counts = {"kept": before.items() <= after.items(), "started": len(after) - len(before)}
    return {**counts, "files": dict.fromkeys(files, "file"), **result}


def summaries(folder: Path) -> dict[str, str]:
    """Name of each run that ended well -> hash of its summary."""
    texts = {path.parent.name: path.read_text() for path in folder.glob("*/summary.json")}
    done = {name: text for name, text in texts.items() if json.loads(text)["status"] == "done"}
    return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in done.items()}


def reports(root: Path) -> Any:
    """Label of each row of a page's tables -> the numbers in it."""
    pages = {"run": ("run",), "stopped run": ("run-stopped",), "runs": ("run", "run-stopped")}
    pages |= {name: (name,) for name in ("scale", "scale-stopped", "batch", "lr", "lr-stopped")}
    found: dict[str, Any] = {}
    for name, directories in pages.items():
        done = here("report", *directories, "--out", "page.html", cwd=root)
        assert done.returncode == 0, done.stderr
        tables = Tables()
        tables.feed((root / "page.html").read_text())
        found[name] = tables.numbers()
    return found


def told(root: Path) -> Any:
    """The sentences, tables and figures of reports of made results."""
    return sayings.told(NUMBER.findall, root / "told")


class Tables(html.parser.HTMLParser):
    """`tables`: the text of each cell of each row of each table but those of the numbers of a figure."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self._in_cell = self._of_a_figure = False
        self._has_values: set[int] = set()  # rows; the others are heads

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag == "details":
            self._of_a_figure = ("class", "numbers") in attrs
        elif self._of_a_figure:
            return
        elif tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self._has_values |= {id(self.tables[-1][-1])} if tag == "td" else set()
            self.tables[-1][-1].append("")
            self._in_cell = True

    def handle_endtag(self, tag: str) -> None:
        self._of_a_figure = self._of_a_figure and tag != "details"
        self._in_cell = self._in_cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self._in_cell:
            self.tables[-1][-1][-1] += data

    def numbers(self) -> dict[str, dict[str, list[str]]]:
        """Label of a row -> name of a column -> the numbers there, of all tables that have such a cell."""
        found: dict[str, dict[str, list[str]]] = {}
        for table in self.tables:
            columns: list[str] = []
            for row in filter(None, table):
                label, *cells = row
                if id(row) not in self._has_values:
                    columns = cells or columns  # a lone cell is a heading within the table
                    continue
                for name, cell in itertools.zip_longest(columns, cells, fillvalue=""):
                    if numbers := NUMBER.findall(cell):
                        found.setdefault(label, {}).setdefault(name, []).extend(numbers)
        return found


def train(root: Path) -> Any:
    """A run of one rank in fp32: its lines, its files, its checkpoint, its exit codes."""
    small = ("--nproc", "1", "--set", "batch.global_size=16", "--set", "schedule.steps=12")
    verb = ("train", "tiny.yaml", *small, "--run-dir", "new")
    code = bert_dp(*verb, cwd=root).returncode
    folder = root / "new"
    checkpoint = folder / "checkpoints" / "step-00000012"
    tensors = {
        f"{part}/{name}": [list(tensor.shape), str(tensor.dtype), float((tensor**2.0).sum() ** 0.5)]
        for part in ("model", "optimizer")
        for name, tensor in load_file(checkpoint / f"{part}.safetensors").items()
    }
    return {
        "exit": code,
        **recorded(folder),
        "summary": untimed(json.loads((folder / "summary.json").read_text())),
        "keys": {str(path.relative_to(folder)): keys(path) for path in files_of(folder)},
        "config.yaml": lines(folder / "config.yaml", root),
        "tensors": tensors,
        "again": bert_dp(*verb, cwd=root).returncode,
        "changed": bert_dp(*verb, "--set", "optim.lr=0.02", cwd=root).returncode,
        "never": bert_dp(*verb, "--resume", "never", cwd=root).returncode,
    }


def resumed(root: Path) -> Any:
    """A run of two ranks that was stopped goes on as if it had not been."""
    code = bert_dp(*made.TRAIN, "run-stopped", cwd=root).returncode
    now, uninterrupted = recorded(root / "run-stopped"), recorded(root / "run")
    return {"exit": code, **now, "uninterrupted": differences(uninterrupted, now)}


# Whole trials at the greatest rate amplify rounding: 4.950 to 4.980 nats by the instruction set of one CPU,
# where those at half the rate agree to 2e-7. Whether a second seed is trained follows from it.
UNSTEADY = "adamw-lr-0.114-wd-0.01-t12288-"
UNSTEADY_LOSS, UNSTEADY_SPREAD = 4.965, 0.05


def gone_on(root: Path) -> Any:
    """A grid and a search that were ended go on; what they had measured stays, as links, profile and peak."""
    for name in ("links-2.json", "profile.json", "peak.json"):
        shutil.copy(root / "scale" / name, root / "scale-stopped")
    done_before = summaries(root / "lr-stopped" / "trials")
    grid = measured(root, "scale-stopped", made.WEAK, "runs")
    search = measured(root, "lr-stopped", made.LR, "trials")
    cells = [{key: cell[key] for key in ("id", "status", "global_batch")} for cell in grid.pop("cells")]
    losses = {
        trial["trial"]: trial["heldout_loss"] for rung in search.pop("rungs") for trial in rung["trials"]
    }
    search["started"] = search["started"] == len(losses.keys() - done_before.keys())
    unsteady = [losses.pop(name) for name in list(losses) if name.startswith(UNSTEADY)]
    shown = ("exit", "kept", "started", "status", "files")
    return {
        "grid": {**{key: grid[key] for key in shown}, "cells": cells},
        "search": {
            **{key: search[key] for key in shown},
            "choice": search["choice"],
            "losses": losses,
            "unsteady": abs(unsteady[0] - UNSTEADY_LOSS) < UNSTEADY_SPREAD,
        },
    }


def doctor(root: Path) -> Any:
    done = bert_dp("doctor", "--json", cwd=root)
    facts = json.loads(done.stdout)
    found = {
        key: dict.fromkeys(sorted(value), "key") for key, value in facts.items() if isinstance(value, dict)
    }
    return {**found, "finding": dict.fromkeys(sorted(facts["findings"][0]), "key")}


def answer(done: subprocess.CompletedProcess[str], root: Path) -> dict[str, Any]:
    """The JSON that a verb printed, and its exit code."""
    assert done.stdout, done.stderr
    facts = without(json.loads(done.stdout.replace(str(root), "ROOT")), (*OF_THE_CALL, *SENTENCES))
    return {"exit": done.returncode, **facts}


def without(value: Any, names: tuple[str, ...]) -> Any:
    if isinstance(value, list):
        return [without(item, names) for item in value]
    if isinstance(value, dict):
        return {key: without(item, names) for key, item in value.items() if key not in names}
    return value


def recorded(folder: Path) -> dict[str, Any]:
    """The lines of a run without what a clock has measured."""
    names = ("metrics.jsonl", "evals.jsonl")
    return {name: [untimed(line) for line in json_lines(folder / name)] for name in names}


def untimed(facts: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in facts.items() if not TIMED.fullmatch(key) and key not in SENTENCES}


def json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def files_of(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file() and not p.name.startswith((".", "rank-")))


def keys(path: Path) -> dict[str, str]:
    """The keys of a file of JSON, of its first line if it has many; {"": "file"} of another file."""
    if path.suffix not in (".json", ".jsonl"):
        return {"": "file"}
    facts = json.loads(path.read_text()) if path.suffix == ".json" else json_lines(path)[0]
    return dict.fromkeys(sorted(facts), "key")


def lines(path: Path, root: Path) -> dict[str, str]:
    """The settings of a configuration."""
    sections = yaml.safe_load(path.read_text().replace(str(root), "ROOT"))
    return {name: json.loads(json.dumps(section)) for name, section in sections.items()}


def number_of(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


QUICK: dict[str, Callable[[Path], Any]] = {
    **{"options": options, "dry_runs": dry_runs, "shards": shards, "scale": scale, "plan": plan},
    **{"batch": batch, "rate": rate, "reports": reports, "told": told},
}
SLOW: dict[str, Callable[[Path], Any]] = {
    **{"built": built, "doctor": doctor, "train": train, "resumed": resumed, "gone_on": gone_on}
}
