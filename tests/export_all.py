"""`python -m tests.export_all`: every shipped configuration at full size, in every format that holds it.

A run of each has random weights, every parameter off its first value; it is exported and compared by `bert-dp
export check`, which loads the directory without our code. What transformers 4.57 has a class for is compared
there too, by the interpreter that --transformers4 names. Results go to OUT/results.jsonl, a line each; what
has passed there with this code is not done again. Then OUT/record.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.records import commit
from bert_dp import files
from bert_dp.config import Config, ConfigError, native_class, read_yaml, resolve, shipped_configs
from bert_dp.exporting.check import check
from bert_dp.training.process import RunFailed
from launcher.machine.environment import versions
from tests.resumable import ROOT, Results
from tests.runs_to_export import write_run

OLD_CLASSES = ("ModernBERT", "RobertaPreLayerNorm")  # that transformers 4.57 has
FORMATS = ("hf", "onnx", "aoti")


@dataclasses.dataclass(frozen=True)
class Cell:
    """A model in a format, loaded by one environment."""

    configs: tuple[str, ...]
    """Names of the configurations that train this very model."""
    form: str
    python: str
    """The interpreter that loads it; empty = this one."""

    def __str__(self) -> str:
        return f"{self.configs[0]} {self.form}{' transformers4' if self.python else ''}"


def config_of(name: str) -> Config:
    """A shipped configuration, which does not ask for an earlier run."""
    return resolve([read_yaml(shipped_configs() / f"{name}.yaml"), {"run": {"init_from": None}}])


def models() -> dict[tuple[str, ...], Config]:
    """Names of configurations -> one of them; those with the same model and length are one."""
    names_of: dict[str, list[str]] = {}
    for path in sorted(shipped_configs().glob("*.yaml")):
        if path.stem not in ("glue", "distill"):  # of any model
            config = config_of(path.stem)
            key = f"{config.model.model_dump_json(exclude={'dropout', 'attention_dropout'})}"
            names_of.setdefault(f"{key} {config.data.sequence_length}", []).append(path.stem)
    return {tuple(names): config_of(names[0]) for names in names_of.values()}


def cells(old_python: str | None) -> Iterator[Cell]:
    """Of each model those of the formats that hold it."""
    for names, config in models().items():
        name = native_class(config.model)
        for form in FORMATS:
            if form != "hf" or name is not None:
                yield Cell(names, form, "")
        if old_python and name in OLD_CLASSES:
            yield Cell(names, "hf", old_python)


def measure(cell: Cell, run: Path, out: Path) -> dict[str, Any]:
    """What `export check` finds, and how large the model file is; else why there is nothing."""
    start = time.monotonic()
    command = [sys.executable, "-m", "launcher", "export", cell.form, str(run), "--out", str(out)]
    if not out.exists():
        done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            return {"cell": str(cell), "ok": False, "problem": done.stderr[-2000:]}
    size = max(path.stat().st_size for path in out.iterdir())
    try:
        found = check(out, run, cell.python or sys.executable)
    except (ConfigError, RunFailed) as error:
        return {"cell": str(cell), "ok": False, "problem": str(error)}
    compared = found.model_dump(mode="json", exclude={"checkpoint"})
    facts = {"cell": str(cell), "configs": cell.configs, "model_bytes": size}
    return {**facts, **compared, "seconds": round(time.monotonic() - start)}


def run_all(wanted: Sequence[Cell], work: Path, results: Results) -> None:
    """Each cell that has not passed yet; a model's cells share its run, and formats their directory. `work`:
    a folder of theirs."""
    waiting = [cell for cell in wanted if not results.has_passed(str(cell))]
    for names, config in models().items():
        group = [cell for cell in waiting if cell.configs == names]
        shutil.rmtree(work, ignore_errors=True)
        if group:
            write_run(work / names[0], config)
        for cell in group:
            result = results.add(measure(cell, work / names[0], work / cell.form))
            print(f"{cell}: {'ok' if result['ok'] else result.get('problem', 'differs')}", flush=True)
        shutil.rmtree(work, ignore_errors=True)


def write_record(results: Sequence[dict[str, Any]], path: Path) -> None:
    environment = {
        "command": "make export",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": versions(),
    }
    files.write_json(path, {"environment": environment, "cells": list(results)})


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--transformers4", type=os.path.abspath, metavar="PYTHON", help="interpreter with transformers 4.57"
    )
    parser.add_argument("--only", metavar="CONFIG", action="append", help="this model; repeatable")
    parser.add_argument("--format", choices=FORMATS, action="append", help="this format; repeatable")
    parser.add_argument("--out", type=Path, default=ROOT / ".export", help="default: .export")
    options = parser.parse_args(argv)
    wanted = [
        cell
        for cell in cells(options.transformers4)
        if (options.only is None or set(options.only) & set(cell.configs))
        and (options.format is None or cell.form in options.format)
    ]
    out = options.out.resolve()
    results = Results(out, "cell", lambda result: result["ok"], code_of=("launcher", "bert_dp", "configs"))
    run_all(wanted, out / "work", results)
    newest = results.newest
    lines = [newest[str(cell)] for cell in wanted]
    write_record(lines, out / "record.json")
    return 0 if all(line["ok"] for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
