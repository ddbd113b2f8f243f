"""Secrets: which values count, and that no file or console line of ours holds one."""

import dataclasses
import subprocess
import sys
from pathlib import Path

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
        assert shown == text.replace(secret, files.REDACTED)
        assert hide(shown) == shown
    assert [hide(text) for text in PLAIN] == list(PLAIN)


@given(st.lists(st.one_of(st.sampled_from(["secret-1", "secret-1-long", "geheim!"]), st.text("ab /:@."))))
def test_every_occurrence_is_hidden(parts: list[str]) -> None:
    shown = hide("\n".join(parts), ["secret-1", "secret-1-long", "geheim!"])
    assert not any(secret in shown for secret in ("secret-1", "geheim!"))


def test_which_values_are_secrets() -> None:
    environ = {
        "HF_TOKEN": "hf_abcdef",
        "API_KEY": "abcde-f",
        "PASSPHRASE": "short",
        "MY_KEY": "status",
        "DB_PASSWORD": "Memory",
        "CERT_KEY": "-----BEGIN-----\nMIIEpAIBAAK\n",
        "PWD": "/not/there/now",
        "MAX_TOKENS": "1000000",
        "HOME": "/root-of-it",
    }
    assert secret_values(environ) == ["hf_abcdef", "abcde-f", "-----BEGIN-----\nMIIEpAIBAAK"]


def test_names_of_secrets() -> None:
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
def test_a_masked_command_line(given: list[str], shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "q7Zx-81kkd")
    assert " ".join(masked_command(given)) == shown
    monkeypatch.setattr(sys, "argv", given)
    assert " ".join(probe().command) == shown


def test_the_log_of_a_rank_holds_no_secret(tmp_path: Path) -> None:
    """Printed, raised, logged or warned of: the stream masks it before it is written."""
    script = (
        "import logging, os, sys, warnings\n"
        "from bert_dp.training.process import redirect_output\n"
        "redirect_output(0)\n"
        "token = os.environ['MY_TOKEN']\n"
        "print('printed', token, end='')\n"
        "sys.stderr.writelines(['line ' + token])\n"
        "warnings.warn('warned ' + token)\n"
        "logging.warning('logged %s', token)\n"
        "raise RuntimeError('raised ' + token)\n"
    )
    environ = {"MY_TOKEN": "q7Zx-81kkd", files.LOG_DIR: str(tmp_path), "PATH": ""}
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (1, b"", b"")
    said = (tmp_path / "rank-0.log").read_text()
    assert "q7Zx-81kkd" not in said
    for word in ("printed", "line", "warned", "logged", "RuntimeError: raised"):
        assert f"{word} <redacted>" in said
