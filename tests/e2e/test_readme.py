"""Run every command of README.md and docs/ at tiny size, and check that files and targets in them exist."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bert_dp.config import shipped_configs
from tests.e2e.cli import TINY, here
from tests.glue_fixture import write_two_tasks
from tests.helpers import write_files

ROOT = Path(__file__).parents[2]
PAGES = (
    "training evaluating finetuning export data definitions engines scaling tuning planning failures python "
    "files benchmarks logging cluster"
).split()
# pages without commands, and pages whose commands other tests run
OTHER_PAGES = [
    str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").glob("*.md")) if path.stem not in PAGES
]
TEXTS = {
    "README.md": (ROOT / "README.md").read_text(),
    **{f"docs/{name}.md": (ROOT / "docs" / f"{name}.md").read_text() for name in PAGES},
}
COMMANDS = list(
    dict.fromkeys(  # each command once, in the order of the pages
        line.partition("#")[0].strip()
        for text in TEXTS.values()
        for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
        for line in block.splitlines()
    )
)
OWN_FILES = re.compile(r"`((?:bert_dp|launcher|tests|benchmarks|configs)/[\w./-]+)`")
SHRINK = [part for item in (*TINY, "model.vocab_size=400") for part in ("--set", item)]
SMALLER = {
    "train": SHRINK,
    "scale": [*SHRINK, "--dry-run"],  # test_scale.py runs it
    "tune batch": [*SHRINK, "--set", "batch.micro_size=auto", "--dry-run"],
    "tune lr": [*SHRINK, "--tokens", "1024", "--dry-run"],
    "finetune": ["--dry-run"],  # test_finetune.py runs it
    "eval glue": ["--dry-run"],  # test_glue.py runs it
    "data build": ["--vocab-size", "400", "--sequence-length", "16", "data.build.held_out_fraction=0.1"],
}
# options of `train` that other tests use in real runs
DRY = ("--profile", "--max-restarts", "--after-save", "log.to=")
# words of a corpus in the working directory, so that the documented commands run unchanged
WORDS = (
    "the crew of the old ship sailed past seven grey islands while rain fell on every quiet harbour and "
    "nobody on shore saw the lamp that burned below deck"
).split()


def write_corpus(folder: Path) -> None:
    lines = (
        " ".join(WORDS[(i * j + i) % len(WORDS)] for j in range(1, 60)) + f" number {i}"
        for i in range(1, 600)
    )
    write_files(folder, {"corpus/part.txt": "\n".join(lines)})


def smaller(command: str, folder: Path) -> list[str]:
    """Return the command's arguments at tiny size, with a budget of a few steps and expanded globs."""
    words = shlex.split(command)[1:]
    verb = next((name for name in SMALLER if " ".join(words).startswith(name)), "")
    if verb == "train":
        words = [word for word in words if not word.startswith("schedule.")]
    files = [sorted(str(p.relative_to(folder)) for p in folder.glob(w)) if "*" in w else [w] for w in words]
    words = [word for group in files for word in group]
    builds = words[0] in ("train", "scale", "tune") or words[:2] == ["data", "build"]
    if builds and "data.path=shards" not in words:
        words += ["data.build.max_tokens_per_char=0"]  # a small vocabulary splits words into many tokens
    more = list(SMALLER.get(verb, []))
    if verb == "train":
        steps = 13 if "--profile" in words else 4 if words[1:2] == ["--run-dir"] else 2  # 4: resumes a run
        dry = any(word.startswith(DRY) for word in words)
        more += ["--set", f"schedule.steps={steps}", *["--dry-run"] * dry]
    return [*words, *more]


def stand_in(arguments: list[str], folder: Path) -> None:
    """Write the files that later commands read, because a dry run does not write them."""
    if arguments[0] == "scale":
        out = folder / arguments[arguments.index("--out") + 1]
        out.mkdir(parents=True)
        shutil.copy(ROOT / "benchmarks/raw/2026-11-21-scaling/scaling.json", out)
    if "log.to=tensorboard" in arguments:
        shutil.copytree(folder / "runs/first", folder / "runs/logged")


def test_documented_commands_run_in_order(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    write_two_tasks(tmp_path / "glue")
    for name in ("train", "dev"):
        rows = [f"the {WORDS[i]},{('sea', 'land')[i % 2]}" for i in range(20)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["body,topic", *rows]))
    documented = [command for command in COMMANDS if command.startswith("bert-dp ")]
    assert len(documented) >= 15
    for command in documented:
        arguments = smaller(command, tmp_path)
        done = here(*arguments, cwd=tmp_path, BERT_DP_CACHE=str(tmp_path / "cache"))
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        stand_in(arguments, tmp_path)
    (python,) = re.findall(r"```python\n(.*?)```", TEXTS["README.md"], re.DOTALL)
    subprocess.run([sys.executable, "-P", "-c", python], cwd=tmp_path, check=True, timeout=120)


@pytest.mark.quick
def test_documented_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = {target for text in TEXTS.values() for target in re.findall(r"`make ([\w-]+)", text)}
    targets = named | {command.split()[1] for command in COMMANDS if command.startswith("make ")}
    assert {"train", "test", "parity", "faults"} <= targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.quick
@pytest.mark.parametrize(
    "name", [*TEXTS, *OTHER_PAGES, "CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/README.md"]
)
def test_documents_name_only_existing_files(name: str) -> None:
    text = (ROOT / name).read_text()
    links = [link for link in re.findall(r"\]\(([\w./-]+)\)", text) if not link.startswith("http")]
    for path in [ROOT / own for own in OWN_FILES.findall(text)] + [(ROOT / name).parent / x for x in links]:
        assert path.exists(), path


@pytest.mark.quick
def test_every_shipped_configuration_is_described() -> None:
    named = set(re.findall(r"^\| `([\w-]+)` \|", TEXTS["docs/training.md"], re.MULTILINE))
    assert {path.stem for path in shipped_configs().glob("*.yaml")} == named


@pytest.mark.quick
def test_the_index_names_every_page() -> None:
    index = (ROOT / "docs/README.md").read_text()
    linked = set(re.findall(r"\]\(([\w.-]+)\)", index))
    assert linked == {path.name for path in (ROOT / "docs").iterdir()} - {"README.md"}
