"""Run the commands and code blocks of the recipe pages at tiny size, and check the recipe configurations."""

import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bert_dp.config import load_config, shipped_configs
from tests.e2e.cli import TINY, accepted, bert_dp, start, step_reached, wait_for
from tests.e2e.test_readme import ROOT, WORDS, write_corpus
from tests.helpers import read_json

SMALL = [item for item in TINY if not item.startswith("schedule.")]  # MORE sets the budget of each verb
MORE = {
    "data build": ["--vocab-size", "400", "--sequence-length", "16", "data.build.max_tokens_per_char=0"],
    "train": [*SMALL, "model.vocab_size=400", "schedule.hours=null", "schedule.steps=4"],
    "finetune": ["schedule.epochs=1"],
    "scale": [*SMALL, "model.vocab_size=400", *"--steps 2 --warm-up 1 --repeats 1".split()],
    "tune batch": [
        *SMALL,
        *("model.vocab_size=400", "batch.micro_size=auto", "schedule.hours=null", "schedule.steps=8"),
    ],
    "tune lr": ["--rates", "3", "--seeds", "1"],
}
SIZES = {"1,2,4,8": "1,2", "8": "2", "10m": "30s", "2h": "2m"}  # two ranks and short searches


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a corpus, labelled texts and texts to label."""
    write_corpus(tmp_path)
    rows = [f"the {WORDS[i % len(WORDS)]} {i},{('sea', 'land')[i % 2]}" for i in range(60)]
    (tmp_path / "train.csv").write_text("\n".join(["text,label", *rows]))
    (tmp_path / "new.csv").write_text("text\nthe old ship\n")
    return tmp_path


def commands(page: str) -> list[list[str]]:
    """Return the words of each `bert-dp` command, at tiny size except for dry runs of absent GPUs."""
    found = []
    for block in re.findall(r"```bash\n(.*?)```", (ROOT / f"docs/{page}.md").read_text(), re.DOTALL):
        for line in block.splitlines():
            _, *words = shlex.split(line)
            verb = next((verb for verb in MORE if " ".join(words).startswith(verb)), "")
            if "--gpu" in words:
                words += ["data.sequence_length=16", "model.vocab_size=400"]  # sizes of the shards
            else:
                words = [SIZES.get(word, word) for word in words] + MORE.get(verb, [])
            found.append(words)
    return found


def run(folder: Path, words: list[str]) -> None:
    globs = [sorted(map(str, folder.glob(word))) if "*" in word else [word] for word in words]
    verb = bert_dp if words[0] in ("train", "finetune", "scale", "tune") else accepted
    verb(*(word for group in globs for word in group), cwd=folder, **cache(folder))


def cache(folder: Path) -> dict[str, str]:
    return {"BERT_DP_CACHE": str(folder / "cache")}


def test_own_text_becomes_a_transformers_classifier(folder: Path) -> None:
    pytest.importorskip("transformers")
    for words in commands("own-text"):
        run(folder, words)
    assert read_json(folder / "runs/classifier/seed-2/summary.json")["status"] == "done"
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/own-text.md").read_text(), re.DOTALL)
    code = [sys.executable, "-P", "-c", block]
    done = subprocess.run(code, cwd=folder, check=True, timeout=180, text=True, capture_output=True)
    assert re.search(r"'label': '(sea|land)'", done.stdout)


def test_a_node_is_measured_and_tuned_and_training_resumes_after_a_kill(folder: Path) -> None:
    shards = ["data", "build", "corpus/*.txt", "--out", "shards", *MORE["data build"]]
    *before, train = [shards, *commands("one-node")]
    before.remove(["doctor"])  # test_readme.py runs it
    for words in before:
        run(folder, words)
    assert read_json(folder / "scaling/scaling.json")["cells"]
    train = [*train, "schedule.steps=400", "checkpoint.every_steps=5"]
    directory = folder / "runs/node"
    process = start(*train, cwd=folder, **cache(folder))
    wait_for(step_reached(directory, 20))
    process.send_signal(signal.SIGKILL)
    process.wait()
    run(folder, train)
    summary = read_json(directory / "summary.json")
    assert (summary["status"], summary["step"], summary["world_size"]) == ("done", 400, 2)
    assert summary["since_step"] >= 5, "the run did not resume from a checkpoint"


@pytest.mark.quick
def test_recipes_for_more_gpus_train_the_same_model() -> None:
    """Micro batch and hours differ; on two nodes, the ramp and the reduction differ as well."""
    one, eight, two = (
        load_config(shipped_configs() / f"{name}.yaml", ["data.path=shards", "batch.micro_size=128"])
        for name in ("one-gpu", "eight-gpus", "two-nodes")
    )
    for name in ("model", "objective", "optim", "data"):
        assert getattr(one, name) == getattr(eight, name) == getattr(two, name)
    assert one.batch == eight.batch
    assert (one.schedule.hours, eight.schedule.hours, two.schedule.hours) == (24, 24 / 8, 24 / 16)
