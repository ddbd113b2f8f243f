"""Tests of terminal output: no control characters and no secrets."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert_dp.files import CONTROL, safe
from launcher.cli import options, reports
from launcher.log import logger, print_error, show
from launcher.watch.display import readable
from tests.e2e.cli import ended, here
from tests.report_fixture import shown

OSC = "\x1b]0;title\x07"
EVIL = f"\x1b[31mred\x1b[0m{OSC}\x9b2J\u202egpj\r\x08"


@given(st.text(st.sampled_from("a[]0;m\\\n\x1b\x07\x9b\u202e"), max_size=20))
def test_safe_removes_control_characters_and_is_idempotent(text: str) -> None:
    assert not CONTROL.search(safe(text))
    assert safe(safe(text)) == safe(text)
    assert safe(text) == text or CONTROL.search(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"a\x1b[1;31mb\x1b[0m{OSC}", "ab"),
        ("a\x1b]0;never ended", "a\ufffd]0;never ended"),  # otherwise it would hide the rest
        ("a\x9b2J\x1bc", "a\ufffd2J\ufffdc"),
        ("invoice\u202egpj.exe", "invoice\ufffdgpj.exe"),
        ("a\tb\nc", "a\tb\nc"),
    ],
)
def test_safe_removes_or_replaces_escape_sequences(text: str, expected: str) -> None:
    assert safe(text) == expected


def test_every_path_to_the_console_is_safe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "s3cret-1")
    console = options.console()
    show(console, f"{EVIL} s3cret-1", markup=False)
    print_error(f"error: {EVIL} s3cret-1")
    logger(console, as_json=True)(f"{EVIL} s3cret-1")
    shown = capsys.readouterr()
    for text in (shown.out, shown.err, readable(f"x{EVIL} s3cret-1")):
        assert not CONTROL.search(text)
        assert "red" in text or "gpj" in text
        assert "s3cret-1" not in text


@pytest.mark.parametrize(
    "arguments",
    [["train", EVIL], ["train", "evil.yaml"], ["scale", "--nproc", EVIL], ["report", "evil"], [EVIL]],
)
def test_hostile_names_do_not_reach_the_terminal(
    tmp_path: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("evil.yaml").write_text(json.dumps({f"model{EVIL}": 1, "optim": {"name": EVIL}}))
    Path("evil").mkdir()
    done = ended(here(*arguments), 2)
    assert not re.search(CONTROL, done.stdout + done.stderr)
    assert "Traceback" not in done.stderr
    assert done.stderr


def test_checkpoints_are_listed_with_their_losses_and_sizes() -> None:
    first = {"name": "step-20", "step": 20, "samples": 160, "heldout_loss": 6.25, "bytes": 3 * 2**29}
    other = {"name": "step-10", "step": 10, "samples": 80, "heldout_loss": None, "bytes": None}
    lines = shown(reports.checkpoints_report([{**first, "problem": None}, {**other, "problem": "x: torn"}]))
    rows = [line.split() for line in lines if "step-" in line]
    assert rows[0] == ["step-20", "20", "160", "6.2500", "nats", "1.50", "GiB", "verified"]
    assert (rows[1][:3], rows[1][-1]) == (["step-10", "10", "80"], "damaged")
