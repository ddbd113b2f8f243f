"""`python -m tests.export_all`: export every shipped configuration at full size in every supported format,
and public encoders in the format `hf`.

Each model has random weights, and no parameter keeps its initial value. `bert-dp export check` compares the
export with the run without using bert-dp's code. The export of a public encoder is also loaded through
run.init_from, and every weight must be equal. The interpreter that --transformers4 names repeats the check
for models of which transformers 4.57 has a class. Each result is a line of OUT/results.jsonl; a cell that
passed with this code is not run again. OUT/record.json is written at the end.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

from benchmarks.records import environment, make_parser
from bert_dp import files
from bert_dp.config import Config, ConfigError, native_class, read_hf, read_yaml, resolve, shipped_configs
from bert_dp.exporting.check import check
from bert_dp.model.hf import load_hf
from bert_dp.training.process import RunFailed
from tests.helpers import PRETRAINING, write_files
from tests.resumable import ROOT, Results
from tests.runs_to_export import write_run

OLD_CLASSES = ("ModernBERT", "RobertaPreLayerNorm")  # classes that transformers 4.57 has
FORMATS = ("hf", "onnx", "aoti")
BERT = {"model_type": "bert", "vocab_size": 30_522, "max_position_embeddings": 512, "pad_token_id": 0}
# with padding id 0, as in the tokenizer of these runs: 513 positions instead of the public 514
ROBERTA = {"model_type": "roberta", "vocab_size": 50_265, "max_position_embeddings": 513, "pad_token_id": 0}
ROBERTA |= {"type_vocab_size": 1, "layer_norm_eps": 1e-5}
MODERNBERT = {"model_type": "modernbert", "vocab_size": 50_368, "local_attention": 128}
PUBLIC = {  # config.json, layers, width, heads, intermediate size
    "bert-base-uncased": (BERT, 12, 768, 12, 3072),
    "bert-large-uncased": (BERT, 24, 1024, 16, 4096),
    "roberta-base": (ROBERTA, 12, 768, 12, 3072),
    "roberta-large": (ROBERTA, 24, 1024, 16, 4096),
    "ModernBERT-base": (MODERNBERT, 22, 768, 12, 1152),
    "ModernBERT-large": (MODERNBERT, 28, 1024, 16, 2624),
}
SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")


class Cell(NamedTuple):
    """An export of a model in one format, loaded by one interpreter."""

    configs: tuple[str, ...]
    """Names of the configurations that train this model."""
    form: str
    python: str
    """Path of the interpreter that loads the export; empty for the current interpreter."""

    def __str__(self) -> str:
        return f"{self.configs[0]} {self.form}{' transformers4' if self.python else ''}"


def config_of(name: str) -> Config:
    """Return a shipped configuration without its run.init_from."""
    return resolve([read_yaml(shipped_configs() / f"{name}.yaml"), {"run": {"init_from": None}}])


def public_config(name: str) -> Config:
    """Return the configuration of a run that starts from a public encoder; its weights are not needed."""
    settings, *sizes = PUBLIC[name]
    with tempfile.TemporaryDirectory() as folder:
        written = {**settings, **dict(zip(SIZES, sizes, strict=True))}
        write_files(Path(folder), {"config.json": json.dumps(written), "model.safetensors": ""})
        level = read_hf(Path(folder)).level()
    return resolve([level, {"data": {"path": "shards"}, "schedule": {"steps": 1}}])


def models() -> dict[tuple[str, ...], Config]:
    """Map each group of names with the same model and sequence length to one configuration."""
    names_of: dict[str, list[str]] = {}
    for path in PRETRAINING:
        config = config_of(path.stem)
        key = config.model.model_dump_json(exclude={"dropout", "attention_dropout"})
        names_of.setdefault(f"{key} {config.data.sequence_length}", []).append(path.stem)
    shipped = {tuple(names): config_of(names[0]) for names in names_of.values()}
    return shipped | {(name,): public_config(name) for name in PUBLIC}


def cells(old_python: str | None) -> Iterator[Cell]:
    """Yield a cell for each model and each format that supports the model."""
    for names, config in models().items():
        name = native_class(config.model)
        for form in FORMATS:
            if name is not None if form == "hf" else names[0] not in PUBLIC:
                yield Cell(names, form, "")
        if old_python and name in OLD_CLASSES:
            yield Cell(names, "hf", old_python)


def measure(cell: Cell, run: Path, out: Path) -> dict[str, Any]:
    """Export a cell. Return the results of `export check` and the size of the model file, or the problem."""
    start = time.monotonic()
    command = [sys.executable, "-m", "launcher", "export", cell.form, str(run), "--out", str(out)]
    if not out.exists():
        done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            return {"cell": str(cell), "ok": False, "problem": done.stderr[-2000:]}
    size = max(path.stat().st_size for path in out.iterdir())
    try:
        if (name := cell.configs[0]) in PUBLIC:
            loaded, _ = load_hf(out, public_config(name), None)
            saved = load_file(next(run.glob("checkpoints/*/model.safetensors")))
            if differ := [key for key in saved if not torch.equal(saved[key], loaded[key])]:
                return {"cell": str(cell), "ok": False, "problem": f"loaded differently: {differ}"}
        found = check(out, run, cell.python or sys.executable)
    except (ConfigError, RunFailed) as error:
        return {"cell": str(cell), "ok": False, "problem": str(error)}
    compared = found.model_dump(mode="json", exclude={"checkpoint"})
    facts = {"cell": str(cell), "configs": cell.configs, "model_bytes": size}
    return {**facts, **compared, "seconds": round(time.monotonic() - start)}


def run_all(wanted: Sequence[Cell], work: Path, results: Results) -> None:
    """Run each cell that has not passed yet in the folder `work`. The cells of a model share its run, and the
    cells of a format share its export."""
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


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    more = {"metavar": "PYTHON", "help": "interpreter with transformers 4.57"}
    parser.add_argument("--transformers4", type=os.path.abspath, **more)
    parser.add_argument("--only", metavar="CONFIG", action="append", help="use only this model; repeatable")
    parser.add_argument("--format", choices=FORMATS, action="append", help="use only this format; repeatable")
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
    lines = [results.newest[str(cell)] for cell in wanted]
    files.write_json(out / "record.json", {"environment": environment(command="make export"), "cells": lines})
    return 0 if all(line["ok"] for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
