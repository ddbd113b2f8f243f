"""Secrets overwritten in the files of a run, wherever they stand in them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert_dp.record import hide, secret_values
from launcher import redact


@given(
    st.lists(st.one_of(st.sampled_from([b"secret-1", b"secret-1-long", b"geheim"]), st.binary(max_size=9))),
    st.integers(1, 30),
)
def test_every_occurrence_goes_and_every_other_byte_stays(
    tmp_path_factory: pytest.TempPathFactory, parts: list[bytes], chunk: int
) -> None:
    folder = tmp_path_factory.mktemp("run")
    secrets = [b"secret-1-long", b"secret-1", b"geheim"]
    data = b"".join(parts)
    (folder / "rank-0.log").write_bytes(data)
    expected = data
    for secret in secrets:
        expected = expected.replace(secret, b"<redacted>"[: len(secret)].ljust(len(secret), b"*"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(redact, "CHUNK", chunk)
        assert redact.scrub(folder, [s.decode() for s in secrets]) == []
    assert (folder / "rank-0.log").read_bytes() == expected


def test_json_stays_json_and_numbers_stay(tmp_path: Path) -> None:
    facts = {"cause": 'said "123456"', "tokens": 123456, "list": [{"123456": "x123456"}], "other": None}
    (tmp_path / "summary.json").write_text(json.dumps(facts))
    (tmp_path / "config.yaml").write_text("a: 123456\n")
    (tmp_path / "torn.json").write_text('{"a": "123456')
    redact.scrub(tmp_path, ["123456"])
    assert json.loads((tmp_path / "summary.json").read_text()) == {
        "cause": 'said "<redacted>"',
        "tokens": 123456,
        "list": [{"<redacted>": "x<redacted>"}],
        "other": None,
    }
    assert "123456" not in (tmp_path / "torn.json").read_text()
    assert (tmp_path / "config.yaml").read_text() == "a: 123456\n"  # checked before the run


def test_checkpoints_and_what_lies_behind_links_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "model.safetensors").write_text("secret-1")
    (tmp_path / "outside").write_text("secret-1")
    (tmp_path / "run" / "link").symlink_to(tmp_path / "outside")
    os.mkfifo(tmp_path / "run" / "pipe")
    assert redact.scrub(tmp_path / "run", ["secret-1"]) == []
    assert (tmp_path / "outside").read_text() == "secret-1"
    assert (tmp_path / "run" / "checkpoints" / "model.safetensors").read_text() == "secret-1"


def test_which_values_are_secrets(tmp_path: Path) -> None:
    environ = {
        "HF_TOKEN": "hf_abcdef",
        "api_key": "abcdef",
        "PASSPHRASE": "short",
        "TOKENIZERS_PARALLELISM": "disabled",
        "MAX_TOKENS": "1000000",
        "HOME": "/root-of-it",
        "KEY_FILE": str(tmp_path),
        "KEY_PATH": "/not/there",
    }
    assert secret_values(environ) == {"hf_abcdef": "HF_TOKEN", "abcdef": "api_key", "/not/there": "KEY_PATH"}
    argv = ["bert-dp", "train", "--token=abcdefg", "--api-key", "hijklmn", "--set", "schedule.tokens=1000000"]
    assert redact.secrets(argv, {}) == {"abcdefg": "--token", "hijklmn": "--api-key"}


def test_a_text_without_its_secrets() -> None:
    assert hide("a secret-1-long, a secret-1", ["secret-1", "secret-1-long"]) == "a <redacted>, a <redacted>"
    assert hide(json.dumps('pass"word'), ['pass"word']) == '"<redacted>"'
    assert hide("nothing", []) == "nothing"
