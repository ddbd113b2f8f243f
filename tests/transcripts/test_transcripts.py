"""Every verb prints what its transcript has; `make transcripts` records them anew."""

from collections.abc import Iterator

import pytest
import typer.main

from launcher.cli import app
from tests.transcripts import FOLDER, VERBS, Stage, recorded


def verbs(command: typer.core.TyperGroup, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the names of all verbs."""
    for name, below in getattr(command, "commands", {}).items():
        yield from verbs(below, (*path, name))
    if not hasattr(command, "commands") or (path and command.invoke_without_command):
        yield " ".join(path)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    return Stage(tmp_path_factory.mktemp("stage"))


def test_every_verb_has_a_transcript() -> None:
    assert set(VERBS) - {""} == set(verbs(typer.main.get_command(app.app)))
    files = [
        recorded(verb, part)
        for verb, each in VERBS.items()
        for part in ("help", "success")[: 1 + bool(each[0])]
    ]
    assert sorted(files) == sorted(FOLDER.glob("*.txt"))


@pytest.mark.parametrize("verb", VERBS)
def test_help_and_refusal(stage: Stage, verb: str) -> None:
    assert stage.help_and_refusal(verb) == recorded(verb, "help").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("verb", [verb for verb, (success, _) in VERBS.items() if success])
def test_success(stage: Stage, verb: str) -> None:
    assert stage.success(verb) == recorded(verb, "success").read_text()
