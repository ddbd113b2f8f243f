"""Secrets: which values are some, and how the files of a run lose them. Nothing else is touched."""

from __future__ import annotations

import dataclasses
import html
import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from bert_dp.config import setting_paths
from bert_dp.record import hide, is_secret, secret_values
from bert_dp.record.models import Summary
from launcher import datasets, job, redact
from launcher.machine.environment import Environment
from launcher.report.html import html as page_of
from launcher.report.run_report import of_directories
from tests.helpers import failed, issues_of, make_config, write_files

JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U"
FORMED = (  # (text, the secret in it)
    ("get https://user:pa55@word@host/x failed", "user:pa55@word"),
    ("data.path: /data/me/https:/user:pa55@host/x", "user:pa55"),
    ("postgres://u:pw1@db:5432/x", "u:pw1"),
    ("//me:geheim@nas/share", "me:geheim"),
    ("https://0123456789abcdef0123@host/x", "0123456789abcdef0123"),
    (f"jwt={JWT};", JWT),
    ("Invalid token hf_AbCdEfGhIjKlMnOpQrStUvWxYz01234567.", "hf_AbCdEfGhIjKlMnOpQrStUvWxYz01234567"),
    ("ghp_" + "a1B2" * 9, "ghp_" + "a1B2" * 9),
    ("github_pat_" + "a1B2_" * 9, "github_pat_" + "a1B2_" * 9),
    ("key AKIAIOSFODNN7EXAMPLE", "AKIAIOSFODNN7EXAMPLE"),
    ("Authorization: Bearer abc-def", "abc-def"),
    ("{'authorization': 'Basic dXNlcjpwYXNz'}", "dXNlcjpwYXNz"),
    ("sent bearer 0123-abcd.efgh", "0123-abcd.efgh"),
)
PLAIN = (
    "ssh://git@github.com/x",
    "git+ssh://git@github.com:org/repo@v1",
    "http://127.0.0.1:8080/a@b",
    "/data//corpus/a:b/c@d.txt",
    "me@host:/data/x: 12 tokens",
    "bearer authentication-scheme",
    "authorization of the user",
    "hf_transfer, hf_hub_download, ghp, AKIA",
)


def run_files(folder: Path, name: str, data: bytes) -> Path:
    path = folder / "logs" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def scrubbed(folder: Path, data: bytes, secrets: Sequence[str] = (), chunk: int = redact.CHUNK) -> bytes:
    """A rank's log without its secrets, `chunk` bytes looked at together."""
    log = run_files(folder, "rank-0.log", data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(redact, "CHUNK", chunk)
        assert redact.scrub(folder, secrets) == []
    return log.read_bytes()


@given(
    st.lists(st.one_of(st.sampled_from([b"secret-1", b"secret-1-long", b"geheim!"]), st.binary(max_size=9))),
    st.integers(1, 30),
)
def test_every_occurrence_goes_and_every_other_byte_stays(
    tmp_path_factory: pytest.TempPathFactory, parts: list[bytes], chunk: int
) -> None:
    expected = data = b"".join(parts)
    for secret in (secrets := ["secret-1-long", "secret-1", "geheim!"]):
        expected = expected.replace(
            secret.encode(), "<redacted>"[: len(secret)].ljust(len(secret), "*").encode()
        )
    assert scrubbed(tmp_path_factory.mktemp("run"), data, secrets, chunk) == expected


@given(
    st.lists(st.one_of(st.sampled_from(FORMED), st.text("ab /:@.=", max_size=9)), max_size=6),
    st.sampled_from([100, 5000]),
)
def test_what_has_the_form_of_a_secret_goes_too_wherever_a_piece_is_cut(
    tmp_path_factory: pytest.TempPathFactory, parts: list[str | tuple[str, str]], chunk: int
) -> None:
    text = "\n".join(part if isinstance(part, str) else part[0] for part in parts)
    left = scrubbed(tmp_path_factory.mktemp("run"), text.encode(), chunk=chunk)
    assert len(left) == len(text)
    for part in parts:
        assert isinstance(part, str) or part[1].encode() not in left


@pytest.mark.parametrize(("text", "secret"), FORMED)
def test_forms_of_secrets(tmp_path: Path, text: str, secret: str) -> None:
    shown = hide(text)
    assert shown == text.replace(secret, "<redacted>")
    assert hide(shown) == shown
    far, left = b"x" * 5000, "<redacted>"[: len(secret)].ljust(len(secret), "*")
    expected = far + b"\n" + text.replace(secret, left).encode() + b"\n" + far
    assert scrubbed(tmp_path, far + b"\n" + text.encode() + b"\n" + far) == expected


@pytest.mark.parametrize("chunk", [100, 5000])
def test_a_long_log_is_searched_to_its_end(tmp_path: Path, chunk: int) -> None:
    """Longer than what is looked at together; one secret is no UTF-8."""
    far, secrets = b"x" * 3000 + b"\n", ["secret-1", os.fsdecode(b"geheim\xff1")]
    left = scrubbed(tmp_path, (far + b"secret-1 geheim\xff1 AKIAIOSFODNN7EXAMPLE\n") * 5, secrets, chunk)
    assert left == (far + b"<redacte <redacte <redacted>**********\n") * 5


@pytest.mark.parametrize("text", PLAIN)
def test_ordinary_text_has_no_form_of_a_secret(tmp_path: Path, text: str) -> None:
    assert hide(text) == text
    assert scrubbed(tmp_path, text.encode()) == text.encode()


TEXTS = "message bad_input why explanation fix consequences gpu_error where source log command".split()


def test_every_file_that_a_run_writes_is_searched(tmp_path: Path) -> None:
    names = "summary.json environment.json deepspeed.json hang.txt report.html".split()
    logs = (
        "rank-0.log rank-12.error.json rank-3.stack rank-0.collectives.json nccl-trace-rank-1 torchrun.log "
    )
    logs += "accelerate.log deepspeed.log trial.log loggers.log"
    paths = [tmp_path / name for name in (*names, *(f"logs/{log}" for log in logs.split()))]
    write_files(tmp_path, {str(path.relative_to(tmp_path)): "x 123456 y" for path in paths})
    assert redact.scrub(tmp_path, ["123456"]) == []
    assert [path for path in paths if "123456" in path.read_text()] == []


def test_json_loses_them_in_its_texts_alone(tmp_path: Path) -> None:
    facts = {
        "status": "123456",
        "cause": 'said "123456"',
        "tokens": 123456,
        "log_tail": ["x123456", f"Bearer: {JWT}"],
        "memory_curve_gib": {"123456": [1.5]},
        "restarts": [{"cause": "123456", "step": 123456}],
        "other": None,
        **dict.fromkeys(TEXTS, "123456"),
    }
    (tmp_path / "summary.json").write_text(json.dumps(facts))
    (tmp_path / "config.yaml").write_text("a: 123456\n")
    (tmp_path / "hang.txt").write_text("123456")
    (tmp_path / "environment.json").write_text('{"a": "123456')
    (tmp_path / ".summary.json.0123abcd").write_text('{"cause": "123456')
    redact.scrub(tmp_path, ["123456"])
    assert json.loads((tmp_path / "summary.json").read_text()) == {
        **facts,
        "cause": 'said "<redacted>"',
        "log_tail": ["x<redacted>", "Bearer: <redacted>"],
        "restarts": [{"cause": "<redacted>", "step": 123456}],
        **dict.fromkeys(TEXTS, "<redacted>"),
    }
    for torn in ("environment.json", ".summary.json.0123abcd", "hang.txt"):
        assert "123456" not in (tmp_path / torn).read_text()
    assert (tmp_path / "config.yaml").read_text() == "a: 123456\n"  # checked before the run


def test_what_the_run_did_not_write_is_left_alone(tmp_path: Path) -> None:
    """The user's own files, checkpoints, and what lies behind a link or bears another name."""
    run = tmp_path / "run"
    mine = [".env", ".git/config", "creds.json", "logs/app.log", "logs/app.json", "src/rank-0.log"]
    mine += ["checkpoints/step-00000001/model.safetensors", "steps/rank-0.jsonl", "metrics.jsonl", "my.log"]
    for name in mine:
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text('{"cause": "secret-1"}')
    outside = tmp_path / "outside"
    outside.write_text('{"cause": "secret-1"}')
    (run / "summary.json").symlink_to(outside)
    (run / "logs" / "rank-0.log").symlink_to(outside)
    os.link(outside, run / "logs" / "rank-1.log")
    os.mkfifo(run / "logs" / "rank-2.log")
    assert redact.scrub(run, ["secret-1"]) == [
        f"{run}/logs/rank-1.log: may hold a secret (it has several hard links and stays as it is)"
    ]
    assert outside.read_text() == '{"cause": "secret-1"}'
    assert {(run / name).read_text() for name in mine} == {'{"cause": "secret-1"}'}


def test_a_link_in_place_of_logs_is_not_followed(tmp_path: Path) -> None:
    log = run_files(tmp_path / "elsewhere", "rank-0.log", b"secret-1")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "logs").symlink_to(log.parent)
    (line,) = redact.scrub(tmp_path / "run", ["secret-1"])
    assert line == f"{tmp_path}/run/logs: may hold a secret (a link is not followed)"
    assert log.read_bytes() == b"secret-1"


@pytest.mark.parametrize("secret", ["a<b>&'c\"d", "gr\u00fc\u00dfe & mehr", "p/w+d=x%y"])
@pytest.mark.parametrize("write", [str, html.escape, json.dumps, repr, lambda s: html.escape(json.dumps(s))])
def test_a_secret_in_a_log_line_that_reaches_the_page(tmp_path: Path, secret: str, write: object) -> None:
    said = f"<p>denied: {write(secret)}</p>"
    log = run_files(tmp_path, "rank-0.log", said.encode())
    facts = {**failed(said, log_tail=[said], fix=[said]), "step": 3}
    (tmp_path / "summary.json").write_text(json.dumps(facts))
    redact.scrub(tmp_path, [secret])
    shown = page_of(of_directories([tmp_path]))
    assert "denied: " in shown
    for text in (shown, log.read_text(), (tmp_path / "summary.json").read_text()):
        for form in (secret, html.escape(secret), json.dumps(secret)[1:-1], repr(secret)[1:-1]):
            assert form not in text


def test_which_values_are_secrets(tmp_path: Path) -> None:
    environ = {
        "HF_TOKEN": "hf_abcdef",
        "api_key": "abcde-f",
        "PASSPHRASE": "short",
        "MY_KEY": "status",
        "DB_PASSWORD": "Memory",
        "DATABASE_URL": "postgres://me:p%40ss-1@db/x",
        "CERT_KEY": "-----BEGIN-----\nMIIEpAIBAAK\n",
        "PWD": "/not/there/now",
        "OLDPWD": "/not/there/before",
        "TOKENIZERS_PARALLELISM": "disabled",
        "MAX_TOKENS": "1000000",
        "HOME": "/root-of-it",
        "KEY_FILE": str(tmp_path),
        "KEY_PATH": "/not/there",
    }
    assert secret_values(environ) == {
        "hf_abcdef": "HF_TOKEN",
        "abcde-f": "api_key",
        "p%40ss-1": "DATABASE_URL",
        "p@ss-1": "DATABASE_URL",
        environ["CERT_KEY"]: "CERT_KEY",
        "-----BEGIN-----": "CERT_KEY",
        "MIIEpAIBAAK": "CERT_KEY",
        "/not/there": "KEY_PATH",
    }
    assert redact.ordinary_secrets(environ) == [
        "DB_PASSWORD, MY_KEY, PASSPHRASE: looks like a secret, but is a common word or shorter than 6 "
        "characters, so it cannot be removed from logs; use a longer value"
    ]
    assert redact.ordinary_secrets({"USE_AUTH": "True", "KEY_BITS": "2048", "HF_TOKEN": "", "A": "b"}) == []
    argv = ["bert-dp", "train", "--token=abcdef7", "--api-key", "hijklm8", "--set", "schedule.tokens=1000000"]
    argv += ["-H", "Authorization: Digest realm-7 abcdef9", "--pwd=short", "--hf-token", "--force-5"]
    argv += ["--ssl-key=-----BEGIN-----\nMIIEpAIBAAK"]
    given = {
        "abcdef7": "--token",
        "hijklm8": "--api-key",
        "Digest realm-7 abcdef9": "Authorization",
        "abcdef9": "Authorization",
        "-----BEGIN-----\nMIIEpAIBAAK": "--ssl-key",
        "MIIEpAIBAAK": "--ssl-key",
    }
    assert redact.secrets(argv, {}) == given
    assert redact.secrets(argv, {"HF_TOKEN": "hf_abcdef"}) == {"hf_abcdef": "HF_TOKEN", **given}


@pytest.mark.parametrize(
    "name",
    "DB_PWD pwd --pwd PGPASSWORD SSHPASS MYSQL_PWD HTTP_AUTH --auth BASICAUTH AUTHORIZATION oauth2 AWS_CRED "
    "GCP_CREDENTIALS creds GITHUB_PAT githubPat SENTRY_DSN SLACK_WEBHOOK_URL DB_CONNECTION_STRING apiKey "
    "APIKey AWS_ACCESS_KEY_ID HF_TOKEN API_TOKENS MySecret X-Api-Key model.auth".split(),
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name, "0123-abcd")


def test_ordinary_names_are_none() -> None:
    names = (
        "PATH PYTHONPATH PATTERN COMPAT PATCH AUTHOR GIT_AUTHOR_NAME AUTHORITY XAUTHORITY KEYBOARD KEYWORDS "
        "MONKEY COMPASS BYPASS PASSED PASSIVE CREDIT SACRED tokenizer TOKENIZERS_PARALLELISM PWD OLDPWD"
    )
    assert [name for name in names.split() if is_secret(name, "0123-abcd")] == []
    ours = [*setting_paths(), *Summary.model_fields, *(f.name for f in dataclasses.fields(Environment))]
    assert [name for name in ours if is_secret(name, 8)] == []
    assert not is_secret("max_connections", 100)


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (["x", "--pwd=geheim", "TOKEN=abc"], "x --pwd=<redacted> TOKEN=<redacted>"),
        (["--auth", "abc", "--key"], "--auth <redacted> --key"),
        (
            ["-H", "Authorization: Bearer abc", "-H", "X-Api-Key: 12"],
            "-H Authorization: <redacted> -H X-Api-Key: <redacted>",
        ),
        (
            ["--auth", "Bearer", "abc", "https://me:pw@host/x"],
            "--auth <redacted> <redacted> https://<redacted>@host/x",
        ),
        (["--set", "data.path=/a/b", "--set", "a.dsn=1"], "--set data.path=/a/b --set a.dsn=<redacted>"),
        (["--set", "schedule.tokens=5"], "--set schedule.tokens=5"),
        (["--secret", "--verbose", "on"], "--secret --verbose on"),
    ],
)
def test_a_command_line_without_its_secrets(given: list[str], shown: str) -> None:
    assert " ".join(redact.redact_argv(given)) == shown


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("api_key", "12", "<redacted>"),
        ("Secret", 1, "<redacted>"),
        ("API_TOKENS", "abc", "<redacted>"),
        *((name, 1000, 1000) for name in ("tokens", "tokenizer", "tokens_per_s", "max_tokens_per_char")),
        ("api_key", ["12"], "<redacted>"),
        ("api_key", None, None),
        ("lr", 0.5, 0.5),
        ("path", "https://me:pw@host/x", "https://<redacted>@host/x"),
        ("hub", {"token": "12", "user": "me"}, {"token": "<redacted>", "user": "me"}),
        ("paths", ("a", "https://me:pw@host/x", 3), ["a", "https://<redacted>@host/x", 3]),
        (
            "hubs",
            [{"token": "12"}, [{"pwd": "34", "x": 1}]],
            [{"token": "<redacted>"}, [{"pwd": "<redacted>", "x": 1}]],
        ),
    ],
)
def test_settings_without_their_secrets(key: str, value: object, shown: object) -> None:
    assert redact.redact({key: value, "other": 1}) == {key: shown, "other": 1}


def test_each_setting_and_each_name_that_it_holds_is_told() -> None:
    hidden = {"secret-1": "MY_KEY", "secret-2": "MY_KEY", "other-3": "MY_PWD"}
    texts = {
        "a": "/x/secret-1/secret-2/other-3",
        "b": None,
        "c": "/x",
        "d": "s3://me:other-4@h",
        "e": "other-3",
    }
    issues = redact.setting_issues(texts, hidden)
    assert [line.partition(":")[0] for line in issues] == ["a", "a", "d", "e"]
    for line, word in zip(issues, ("MY_KEY", "MY_PWD", "s3://<redacted>@h holds", "MY_PWD"), strict=True):
        assert word in line
        assert not any(secret in line for secret in (*hidden, "other-4"))


def test_settings_that_hold_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["bert-dp"])
    monkeypatch.setenv("MY_KEY", "corpus")
    config = make_config()
    assert job.exposure_issues(config, tmp_path / "corpus" / "data-1:2@3", "--run-dir") == []
    data = config.data.model_copy(update={"sources": ("https://me:hunter2@host/corpus.txt",)})
    config = job.absolute(config.model_copy(update={"data": data}))
    (issue,) = job.exposure_issues(config, tmp_path, "--run-dir")
    assert issue.startswith("data.sources: ")
    assert "<redacted>@host/corpus.txt holds a password or a token" in issue
    assert "hunter2" not in issue
    monkeypatch.setenv("MY_KEY", "q7Zx-81kkd")
    for name in ("data.path", "data.tokenizer", "run.init_from"):
        (issue,) = job.exposure_issues(make_config(f"{name}=/data/q7Zx-81kkd"), tmp_path, "--run-dir")
        assert issue.startswith(f"{name}: holds the value of MY_KEY")


def test_sources_of_shards_that_hold_one(tmp_path: Path) -> None:
    (issue,) = issues_of(
        datasets.build,
        ["s3://me:hunter2@host/x.txt"],
        tmp_path / "out",
        vocab_size=64,
        sequence_length=16,
        tokenizer=None,
        overrides=[],
        processes=None,
        force=False,
        console=Console(),
    )
    assert issue.startswith("SOURCES: s3://<redacted>@host/x.txt holds a password")
    assert not list(tmp_path.iterdir())


def test_a_text_without_its_secrets() -> None:
    assert hide("a secret-1-long, a secret-1", ["secret-1", "secret-1-long"]) == "a <redacted>, a <redacted>"
    assert hide(json.dumps('pass"word'), ['pass"word']) == '"<redacted>"'
    assert hide("nothing", []) == "nothing"
