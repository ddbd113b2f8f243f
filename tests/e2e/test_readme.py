"""Every command of README.md runs, at tiny size; every file and configuration it names exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from launcher.job import shipped_configs
from tests.e2e.cli import TINY, bert_dp

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
COMMANDS = [
    line.partition("#")[0].strip()
    for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
]
SIZE = {"data build": ["--vocab-size", "400", "--sequence-length", "16"]}
SHRINK = [part for item in (*TINY, "model.vocab_size=400") for part in ("--set", item)]
# a corpus in the working directory, so that the commands run as they are written
WORDS = (
    "the crew of the old ship sailed past seven grey islands while rain fell on every quiet harbour and "
    "nobody on shore saw the lamp that burned below deck"
).split()


@pytest.mark.timeout(2400)
def test_commands_run_in_order(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    text = "\n".join(
        " ".join(WORDS[(i * j + i) % len(WORDS)] for j in range(1, 60)) + f" number {i}"
        for i in range(1, 600)
    )
    (tmp_path / "corpus" / "part.txt").write_text(text)
    ours = [shlex.split(command) for command in COMMANDS if command.startswith("bert-dp ")]
    assert len(ours) >= 8
    for words in ours:
        arguments = words[1:]
        if arguments[0] == "train":
            kept = [a for a in arguments if "schedule." not in a]
            kept = [
                a
                for a, following in zip(kept, [*kept[1:], ""], strict=True)
                if a != "--set" or "=" in following
            ]
            first_build = "--run-dir" in arguments and "runs/first" in arguments
            arguments = [*kept, *SHRINK, "--set", f"schedule.steps={4 if arguments[1] == '--run-dir' else 2}"]
            if first_build:
                arguments += ["--set", "data.build.max_tokens_per_char=0"]
        if arguments[0] == "scale":
            arguments += [
                *SHRINK,
                "--steps",
                "2",
                "--warm-up",
                "1",
                "--repeats",
                "1",
                "--set",
                "data.build.max_tokens_per_char=0",
            ]
        if arguments[0] == "tune":
            arguments = ["2s" if argument == "5m" else argument for argument in arguments]
            arguments += [*SHRINK, "--set", "data.build.max_tokens_per_char=0"]
            if arguments[1] == "batch":
                arguments += ["--set", "batch.global_size=2", "--set", "batch.micro_size=1"]
            if arguments[1] == "lr":
                arguments += ["--tokens", "1024", "--rates", "3", "--seeds", "1"]
        if arguments[:2] == ["data", "build"]:
            arguments = [
                *expand(arguments, tmp_path),
                *SIZE["data build"],
                "--set",
                "max_tokens_per_char=0",
                "--set",
                "held_out_fraction=0.1",
            ]
        done = bert_dp(*arguments, cwd=tmp_path, timeout=900, BERT_DP_CACHE=str(tmp_path / "cache"))
        assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}\n{done.stderr}"


def expand(arguments: list[str], folder: Path) -> list[str]:
    """What the shell does with `corpus/*.txt`."""
    out: list[str] = []
    for argument in arguments:
        out += (
            [str(p.relative_to(folder)) for p in sorted(folder.glob(argument))]
            if "*" in argument
            else [argument]
        )
    return out


@pytest.mark.quick
def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = {command.split()[1] for command in COMMANDS if command.startswith("make ")}
    assert {"train", "test"} <= targets
    for target in targets | set(re.findall(r"`make (\w+)`", README)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.quick
def test_named_files_and_configurations_exist() -> None:
    for name in re.findall(r"`((?:bert_dp|launcher|tests|benchmarks|configs)/[\w./-]+)`", README):
        assert (ROOT / name).exists(), name
    named = set(re.findall(r"^\| `([\w-]+)` \|", README, re.MULTILINE))
    assert {path.stem for path in shipped_configs().glob("*.yaml")} <= named


@pytest.mark.quick
def test_readme_has_no_placeholder() -> None:
    assert "RESULTS\n" not in README


@pytest.mark.quick
@pytest.mark.parametrize("name", ["CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/README.md"])
def test_documents_name_only_files_that_exist(name: str) -> None:
    text = (ROOT / name).read_text()
    for path in re.findall(r"`((?:bert_dp|launcher|tests|benchmarks|configs)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), path
