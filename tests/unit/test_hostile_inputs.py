"""Test hostile input: the refusal is one line with exit code 2, immediate and in little memory, and no file
is written. A test that hangs fails, because the command would hang for the user."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from bert_dp.config.schema import all_settings
from bert_dp.data import readers
from tests.e2e.cli import here, refused
from tests.helpers import raised_issues

BASE = ("train", "quickstart", "--nproc", "1", "--dry-run", "--set", "precision=fp32")
LONG = "9" * 400


@pytest.fixture(autouse=True)
def empty_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Run the test in a directory that must stay empty. An alarm ends a test that hangs."""

    def hangs(*_: object) -> None:
        raise AssertionError("the test hangs")

    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
    assert not list(folder.iterdir()), "no file may be written"


def refuse(arguments: tuple[str, ...], *parts: str) -> None:
    """Check that a command is refused with exit code 2 and one short line that contains `parts`."""
    line = refused(*arguments)
    assert line.startswith("error: "), line
    assert (line.count("\n"), len(line) < 1000) == (1, True), line
    assert all(part in line for part in parts), line


def test_hostile_settings_and_options_are_refused(tmp_path: Path) -> None:
    """test_config.py has many more invalid configurations."""
    for named, setting in (
        ("schedule.tokens", "schedule.tokens=1e30"),
        ("schedule.steps", "schedule.steps=" + "9" * 5000),
        ("optim.lr", f"optim.lr={LONG}"),
        ("3000 parts", ".".join("a" * 3000) + "=1"),
        ("not valid YAML", "a=" + "[" * 3000),
        ("data.sources", "data.sources=" + "[" * 100 + "]" * 100),
        ("data.path", 'data.path="a\\0b"'),
        ("Invalid JSON", 'run.init_from="\\ud800"'),
        ("run.init_from", f"run.init_from={'a/' * 4000}"),
        ("not UTF-8", "run.init_from=\udcff"),
        ("unknown setting", "no.such." + "x" * 5000 + "=1"),
    ):
        refuse((*BASE, "--set", setting), named)
    name = "a" * 256
    for option in (("--nproc", LONG), ("--run-dir", name), ("--run-dir", "\udcff"), ("--resume", name)):
        refuse((*BASE, *option))
    for count in ("0", LONG):
        refuse(("data", "build", "builtin", "--out", "x", "--processes", count))
    refuse(("train", name, *BASE[2:]))
    path = tmp_path / "config.yaml"
    path.write_text("a: &a [x]\nb: [*a, *a]\n")
    refuse(("train", str(path), *BASE[2:]), "aliases")


def test_paths_that_are_not_regular_files_are_refused(tmp_path: Path) -> None:
    """Reading a pipe or a device can block or never end."""
    os.mkfifo(tmp_path / "pipe")
    for path in (str(tmp_path / "pipe"), "/dev/zero", str(tmp_path)):
        refuse(("train", path, *BASE[2:]), path, "cannot be read")
        refuse((*BASE, "--set", f"data.tokenizer={path}"), "data.tokenizer", path)
        refuse((*BASE, "--set", f"run.init_from={path}"), "run.init_from", "contains no checkpoint")
        refuse((*BASE, "--resume", path), "--resume", "contains no checkpoint")
        refuse(("plan", "scaling", "--from", path), "--from", path)
        (issue,) = raised_issues(readers.file_hash, Path(path))
        assert (issue.setting, issue.kind) == (path, "unsupported")
    (tmp_path / "state").mkdir()
    os.mkfifo(tmp_path / "state" / "state.json")
    refuse((*BASE, "--resume", str(tmp_path / "state")), "--resume", "contains no checkpoint")
    refuse((*BASE, "--set", f"data.path={tmp_path / 'state'}"), "data.path")


def test_a_very_long_schedule_is_computed_immediately() -> None:
    ramp = ("--set", "batch.ramp_fraction=0.5", "--set", "batch.ramp_quantum=16")
    done = here(*BASE, "--set", "schedule.tokens=1000000000000000", *ramp)
    assert (done.returncode, done.stderr) == (0, "")
    assert "= 1,000,000,000,000,000 tokens" in done.stdout


def test_every_integer_setting_has_an_upper_bound() -> None:
    counts = {path: field for path, field, _ in all_settings() if field.annotation in (int, int | None)}
    assert len(counts) > 20
    for path, field in counts.items():
        assert any(hasattr(rule, "le") or hasattr(rule, "lt") for rule in field.metadata), path


@pytest.mark.parametrize("name", ["config.yaml", "summary.json", "metrics.jsonl", "environment.json"])
@pytest.mark.parametrize(
    "content",
    [
        b"a: &a [x]\nb: &b [*a, *a]\n"
        + b"".join(b"%c: &%c [*%c, *%c, *%c]\n" % (i + 1, i + 1, i, i, i) for i in range(ord("b"), ord("y"))),
        b'{"a": ' * 400 + b"1" + b"}" * 400,
        b'{"step": ' + b"9" * 4000 + b"}\n",
        b"{}\n",
    ],
    ids=lambda content: repr(content[:12]),
)
def test_a_report_of_a_damaged_run_is_written(tmp_path: Path, name: str, content: bytes) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text("schedule: {steps: 1}\n")
    (folder / name).write_bytes(content)
    done = here("report", str(folder))
    assert (done.returncode, done.stderr) == (0, "")
    assert (folder / "report.html").exists()


def test_a_report_replaces_only_a_page_of_bert_dp(tmp_path: Path) -> None:
    """A project may have its own config.yaml and report.html, and root could replace a device."""
    for name in ("config.yaml", "report.html"):
        (tmp_path / name).write_text("mine: 1\n")
    (tmp_path / "link.html").symlink_to("report.html")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "null").symlink_to("/dev/null")
    refuse(("report", str(tmp_path)), "report.html", "not a bert-dp page")
    for name in ("config.yaml", "report.html", "link.html", "pipe", "null", ""):
        refuse(("report", str(tmp_path), "--out", str(tmp_path / name)), "not a bert-dp page")
    assert [(tmp_path / name).read_text() for name in ("config.yaml", "link.html")] == ["mine: 1\n"] * 2
    assert [(tmp_path / name).is_symlink() for name in ("link.html", "null")] == [True, True]
    assert (tmp_path / "pipe").is_fifo()
    page = tmp_path / "page.html"
    for _ in range(2):  # the second report replaces the page of the first
        assert here("report", str(tmp_path), "--out", str(page)).returncode == 0
    assert "<html" in page.read_text()
