"""The directories in `made/`: with which verbs an earlier commit wrote them, and placed on this machine."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

from launcher.machine.environment import probe

HERE = Path(__file__).parent
MADE = HERE / "made"
ROOT = Path("/tmp/bert-dp-golden")  # where `made/` was written; stands for the place in its files
TRAIN = ("train", "tiny.yaml", "--nproc", "2", "--run-dir")
BUILD = (
    *("data", "build", "corpus.jsonl", "--vocab-size", "300", "--sequence-length", "32", "--processes", "1"),
    *("--set", "max_tokens_per_char=1", "--set", "held_out_fraction=0.1", "--out"),
)
SMALL_BATCH = ("--set", "batch.global_size=16")
SCALE = (
    *("scale", "tiny.yaml", "--gpus", "1,2", "--mode", "both", "--repeats", "2", "--steps", "6"),
    *("--warm-up", "2", *SMALL_BATCH, "--json", "--out"),
)
WEAK = (
    *("scale", "tiny.yaml", "--gpus", "1,2", "--repeats", "2", "--steps", "6", "--warm-up", "2"),
    *("--no-synthetic", *SMALL_BATCH, "--json", "--out"),
)
BATCH = (
    *("tune", "batch", "tiny.yaml", "--gpus", "2", "--budget", "300s", "--memory", "4", "--fresh"),
    *(*SMALL_BATCH, "--json", "--out"),
)
LR = ("tune", "lr", "tiny.yaml", "--rates", "4", "--seeds", "2", *SMALL_BATCH, "--json", "--out")

AS_WRITTEN = {"checkpoints", "shards"}  # hashed: their files stay as they are


def corpus() -> str:
    """200 documents of made-up words, a JSON line each, in which a word tells something of the next."""
    draw = random.Random(0)
    words = [
        "".join(draw.choice("bcdfglmnprst") + draw.choice("aeiou") for _ in range(draw.randint(1, 3)))
        for _ in range(150)
    ]
    lines = []
    for _ in range(200):
        place, text = draw.randrange(150), []
        for _ in range(60):
            place = (7 * place + draw.randrange(6)) % 150
            text.append(words[place])
        lines.append(json.dumps({"text": " ".join(text) + "."}))
    return "\n".join(lines) + "\n"


def prepare(root: Path) -> None:
    shutil.copy(HERE / "tiny.yaml", root)
    (root / "corpus.jsonl").write_text(corpus())


def place(root: Path) -> Path:
    """`made/` at `root` as if it had been made there, on this machine and with these versions."""
    shutil.copytree(MADE, root, dirs_exist_ok=True)
    prepare(root)
    files = [p for p in root.rglob("*") if p.is_file() and not {*p.relative_to(root).parts} & AS_WRITTEN]
    replace(files, {str(ROOT): str(root)})
    replace(files, dict(renewed(path) for path in files if path.suffix == ".json" and has_hash(path)))
    machine = probe().to_json()
    for path in (*root.glob("*/grid.json"), *root.glob("*/plan.json"), *root.glob("*/search.json")):
        facts = json.loads(path.read_text())
        facts["machine"] |= {
            "cpu": machine["cpu_model"],
            "cores": machine["affinity_cores"],
            "gpus": [[gpu["name"], gpu["driver"]] for gpu in machine["gpus"]],
            "versions": {name: machine["versions"].get(name) for name in facts["machine"]["versions"]},
        }
        path.write_text(json.dumps(facts))
    return root


def replace(files: list[Path], words: dict[str, str]) -> None:
    for path in files:
        text = before = path.read_text()
        for old, new in words.items():
            text = text.replace(old, new)
        if text != before:
            path.write_text(text)


def has_hash(path: Path) -> bool:
    facts = json.loads(path.read_text())
    return isinstance(facts, dict) and {"config", "config_hash"} <= facts.keys()


def renewed(path: Path) -> tuple[str, str]:
    """(hash of the configuration where it was made, hash of the one that stands there now), as the code that
    wrote it took them: the paths in it have changed."""
    facts = json.loads(path.read_text())
    text = json.dumps(facts["config"], sort_keys=True)
    return facts["config_hash"], hashlib.sha256(text.encode()).hexdigest()[:16]


@contextlib.contextmanager
def two_cores() -> Iterator[None]:
    """A search runs as many trials at a time as there are cores, and may decide otherwise with more."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[:2])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
