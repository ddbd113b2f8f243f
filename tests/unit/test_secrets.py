"""Tests of secrets in texts and command lines. tests/faults/test_inputs.py checks the files of a run."""

import dataclasses
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert_dp import files
from bert_dp.config import setting_paths
from bert_dp.files import hide, is_secret, secret_values
from bert_dp.files.models import Summary
from launcher.log import masked_command
from launcher.machine.environment import Environment, probe

IN_URLS = (  # (text, the secret in it)
    ("get https://user:pa55@word@host/x failed", "user:pa55@word"),
    ("data.path: /data/me/https:/user:pa55@host/x", "user:pa55"),
    ("postgres://u:pw1@db:5432/x", "u:pw1"),
    ("//me:geheim@nas/share", "me:geheim"),
    ("https://0123456789abcdef0123@host/x", "0123456789abcdef0123"),
)
PLAIN = (
    "ssh://git@github.com/x",
    "git+ssh://git@github.com:org/repo@v1",
    "http://127.0.0.1:8080/a@b",
    "/data//corpus/a:b/c@d.txt",
    "me@host:/data/x: 12 tokens",
)


def test_passwords_in_urls_are_hidden_and_ordinary_text_stays() -> None:
    for text, secret in IN_URLS:
        shown = hide(text)
        assert shown == hide(shown) == text.replace(secret, files.REDACTED)
    assert [hide(text) for text in PLAIN] == list(PLAIN)


@given(st.lists(st.one_of(st.sampled_from(["secret-1", "secret-1-long", "geheim!"]), st.text("ab /:@."))))
def test_every_occurrence_is_hidden(parts: list[str]) -> None:
    shown = hide("\n".join(parts), ["secret-1", "secret-1-long", "geheim!"])
    assert not any(secret in shown for secret in ("secret-1", "geheim!"))


def test_secret_values_are_recognised() -> None:
    secret = {"HF_TOKEN": "hf_abcdef", "API_KEY": "abcde-f", "CERT_KEY": "-----BEGIN-----\nMIIEpAIBAAK\n"}
    words = {"PASSPHRASE": "short", "MY_KEY": "status", "DB_PASSWORD": "Memory"}
    others = {"PWD": "/not/there/now", "MAX_TOKENS": "1000000", "HOME": "/root-of-it"}
    assert secret_values({**secret, **words, **others}) == [value.strip() for value in secret.values()]


def test_secrets_are_recognised_by_name() -> None:
    secret = (
        "DB_PWD PGPASSWORD MYSQL_PWD HTTP_AUTH --auth AUTHORIZATION GCP_CREDENTIALS GITHUB_PAT SENTRY_DSN "
        "apiKey AWS_ACCESS_KEY_ID_TOKEN AWS_SECRET_ACCESS_KEY HF_TOKEN MySecret X-Api-Key model.auth"
    )
    names = (
        "PATH PYTHONPATH PATTERN COMPAT PATCH AUTHOR GIT_AUTHOR_NAME AUTHORITY XAUTHORITY KEYBOARD KEYWORDS "
        "MONKEY COMPASS BYPASS PASSED PASSIVE CREDIT SACRED tokenizer TOKENIZERS_PARALLELISM PWD OLDPWD"
    )
    assert [name for name in secret.split() if not is_secret(name)] == []
    ours = [*setting_paths(), *Summary.model_fields, *(f.name for f in dataclasses.fields(Environment))]
    assert [name for name in (*names.split(), *ours) if is_secret(name)] == []


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (["x", "--db-pwd=geheim", "TOKEN=abc"], "x --db-pwd=<redacted> TOKEN=<redacted>"),
        (["--auth", "abc", "--key"], "--auth <redacted> --key"),
        (
            ["-H", "Authorization: Bearer abc", "-H", "X-Api-Key: 12"],
            "-H Authorization: <redacted> -H X-Api-Key: <redacted>",
        ),
        (["https://me:pw@host/x", "q7Zx-81kkd"], "https://<redacted>@host/x <redacted>"),
        (["--set", "data.path=/a/b", "--set", "a.dsn=1"], "--set data.path=/a/b --set a.dsn=<redacted>"),
        (["--set", "schedule.tokens=5"], "--set schedule.tokens=5"),
        (["--secret", "--verbose", "on"], "--secret --verbose on"),
    ],
)
def test_a_command_line_is_masked(given: list[str], shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "q7Zx-81kkd")
    assert " ".join(masked_command(given)) == shown
    monkeypatch.setattr(sys, "argv", given)
    assert " ".join(probe().command) == shown
