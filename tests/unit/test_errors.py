"""Test issues and the end of a failed command: one line and an exit code."""

import errno
import json
import os
import pickle
import signal
import subprocess
import sys
import time

import pytest

from bert_dp.config import ConfigError, Issue
from bert_dp.files import CONTROL
from launcher.cli import app
from tests.e2e.cli import command, here

ISSUE = Issue("optim.lr", "out_of_range", "must be above 0", value=-1.0, hint="use 1e-3")


def test_an_issue_is_shown_as_setting_message_and_hint_and_survives_pickling_and_json() -> None:
    assert str(ISSUE) == "optim.lr: must be above 0; use 1e-3"
    assert str(ISSUE.within("a.yaml")) == "a.yaml: optim.lr: must be above 0; use 1e-3"
    assert ISSUE.within("a.yaml").kind == "out_of_range"
    assert pickle.loads(pickle.dumps(ConfigError([ISSUE]))).issues == (ISSUE,)
    fields = {"setting": "optim.lr", "kind": "out_of_range", "message": "must be above 0"}
    assert json.loads(json.dumps(ISSUE.to_json())) == {**fields, "value": -1.0, "hint": "use 1e-3"}


def test_json_output_has_the_issues_of_bad_input() -> None:
    done = here("tune", "lr", "no-such-configuration", "--json")
    assert done.returncode == 2
    (issue,) = json.loads(done.stdout)["issues"]
    assert issue["setting"] == "no-such-configuration"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("report", "error: Missing argument 'run_dirs'; see `"),
        ("train --max-restarts 3 --max-restarts x", "error: --max-restarts: "),
        ("train --nosuch", "error: No such option: --nosuch"),
        ("finetune x --kind frob", "error: --kind: 'frob' is not one of 'single_label', "),
        ("report a\nb", "error: RUN_DIRS: a b is not a run directory"),
        ("nosuch", "error: No such command 'nosuch'; see `"),
        ("configs ", "error: CONFIG: is empty; "),
    ],
)
def test_a_wrong_command_line_is_refused_in_one_line(arguments: str, line: str) -> None:
    done = here(*arguments.split(" "))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith(line)


def end_by(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> subprocess.CompletedProcess[str]:
    """Run a verb that raises `error` and return the result."""

    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr(app, "app", fail)
    return here("configs", HF_TOKEN="s3cret-1")


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (OSError(errno.ENOSPC, "No space left", "a/b"), 1, "a/b: No space left"),
        (OSError(errno.EACCES, "Permission denied", "a/b"), 2, "a/b: Permission denied"),
        (OSError(errno.EMFILE, "Too many open files"), 1, "Too many open files"),
        (MemoryError(), 1, "out of memory; free some memory, or raise `ulimit -v`"),
        (KeyboardInterrupt(), 130, None),
    ],
)
def test_an_error_of_the_machine_is_reported_in_one_line(
    error: BaseException, code: int, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = end_by(monkeypatch, error)
    assert (done.returncode, done.stderr) == (code, f"error: {words}\n" if words else "")


def test_a_traceback_contains_no_secret_and_no_control_character(monkeypatch: pytest.MonkeyPatch) -> None:
    hostile = "\x1b[31mred\x1b[0m\x1b]0;title\x07\x9b2J\u202egpj\r\x08 s3cret-1"
    done = end_by(monkeypatch, RuntimeError(hostile))
    assert done.returncode == 1
    assert "RuntimeError: red" in done.stderr
    assert "s3cret-1" not in done.stderr
    assert not CONTROL.search(done.stderr)


def test_each_problem_has_its_own_line_and_a_group_of_verbs_shows_its_usage() -> None:
    output = here("train", "quickstart", "schedule.stepz=1", "optim.lrr=1").stderr
    assert [line.partition(":")[0] for line in output.splitlines()] == ["error", "error"]
    group = here("tune")
    assert group.returncode == 2
    assert "Usage: " in group.stdout + group.stderr
    assert "error: " not in group.stderr


def test_sigterm_ends_a_verb_with_its_exit_code_after_cleanup(monkeypatch: pytest.MonkeyPatch) -> None:
    cleaned_up: list[bool] = []

    def work(**_: object) -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        finally:
            cleaned_up.append(True)

    monkeypatch.setattr(app, "app", work)
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert here("configs").returncode == 128 + signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, before)
    assert cleaned_up == [True]


PLAN = "plan scaling --model bert-base --seq-per-s 400 --micro 32 --link nvlink2 --json"


@pytest.mark.parametrize("verb", ["configs", PLAN])
def test_a_closed_standard_output_ends_a_verb_quietly(verb: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer) as closed:
        done = subprocess.run(
            command(*verb.split()), stdout=closed, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_failing_verb_and_another_broken_pipe_still_exit_with_1() -> None:
    for verb, error in (
        ("sys.stdout.write('x') and 1", ""),
        ("os.write(other, b'x')", "error: Broken pipe\n"),
    ):
        script = (
            "import os, sys; from launcher.cli.exit_code import exit_code\n"
            "reader, other = os.pipe(); os.close(reader)\n"
            + ("" if error else "os.dup2(other, 1)\n")
            + f"sys.exit(exit_code(lambda: {verb}))"
        )
        buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
        words = [sys.executable, "-c", script]
        done = subprocess.run(words, capture_output=True, text=True, check=False, env=buffered)
        assert (done.returncode, done.stderr) == (1, error), verb


def test_ctrl_c_during_imports_shows_no_traceback() -> None:
    script = (
        "import sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'launcher.cli.app': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "from launcher.__main__ import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "")
