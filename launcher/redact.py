"""Settings, command lines and the files of a run without their secrets."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_dp import record
from bert_dp.record import REDACTED, hide, is_ordinary, is_secret, secret_values

CHUNK = 2**20  # bytes of a log looked at together
CONTEXT = 32  # bytes before a match that a form looks at
# what a run writes and a secret may reach, by folder and name. Not config.yaml, which is checked before the
# run (`setting_issues`), nor what holds numbers alone: a changed byte would break it
WRITTEN = {
    "": ("summary.json", "environment.json", "deepspeed.json", "hang.txt", "report.html"),
    "logs": (
        "rank-*.log",
        "rank-*.error.json",
        "rank-*.stack",
        "rank-*.collectives.json",
        "nccl-trace-rank-*",
        "torchrun.log",
        "accelerate.log",
        "deepspeed.log",
        "trial.log",
        "loggers.log",
    ),
}
UNFINISHED = re.compile(r"\.(.+)\.[0-9a-f]{8}")  # what `record.write_text` leaves when it is killed
# keys of JSON files whose strings are text; all others hold numbers and words that are read again
FREE_TEXT = frozenset(
    (
        *("cause", "message", "bad_input", "why", "explanation", "fix", "consequences", "gpu_error"),
        *("where", "source", "log", "log_tail", "command"),
    )
)


def redact(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """A copy without the values whose key names a secret or that have the form of one; nested too."""
    return {key: _redact_value(key, value) for key, value in mapping.items()}


def redact_argv(argv: Sequence[str]) -> list[str]:
    """A command line without secrets: `--token=abc`, `TOKEN=abc`, `--api-key abc` and `Authorization: Bearer
    abc` lose their values."""
    return _split_argv(argv)[0]


def secrets(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Value -> name of whatever no file of a run may hold: of the environment and of the command line."""
    given = {value: name for name, value in _split_argv(argv)[1] if not is_ordinary(value)}
    return secret_values(environ) | given


def ordinary_secrets(environ: Mapping[str, str] = os.environ) -> list[str]:
    """A line that names the variables which hold a secret by their name but too ordinary a value to hide."""
    names = {
        name
        for value, name in record.named_secrets(environ).items()
        if is_ordinary(value)
        and value == environ[name]
        and not re.fullmatch(r"\s*|[\d.]+|true|false|yes|no|on|off|none|null", value, re.IGNORECASE)
    }
    if not names:
        return []
    return [
        f"{', '.join(sorted(names))}: looks like a secret, but is a common word or shorter than "
        f"{record.MIN_SECRET} characters, so it cannot be removed from logs; use a longer value"
    ]


def setting_issues(settings: Mapping[str, str | None], hidden: Mapping[str, str]) -> list[str]:
    """Settings that hold a secret and would be written to a file; one line each, without the secret."""
    issues = []
    for setting, text in settings.items():
        names = dict.fromkeys(name for value, name in hidden.items() if text and value in text)
        issues += [
            f"{setting}: holds the value of {name}, by its name a secret, and would be written down; use a "
            f"path without it, or unset {name}"
            for name in names
        ]
        if text and not names and (shown := hide(text)) != text:
            issues.append(
                f"{setting}: {shown} holds a password or a token, and would be written down; use a path "
                "without it"
            )
    return issues


def scrub(run_dir: Path, hidden: Iterable[str]) -> list[str]:
    """Overwrite the secrets in the files that a run writes; returns what could not be, a line each.

    Once the ranks have ended: an error or a log may hold what a library printed. In a log every byte keeps
    its place, so no space is needed and no reader loses its own; of JSON the text alone is written anew. No
    link is followed, and no file with several hard links is changed.
    """
    hidden = set(hidden)
    forms = {form for secret in hidden for form in record.written_forms(secret)}
    ordered = sorted((form.encode("utf-8", "surrogateescape") for form in forms), key=len, reverse=True)
    links = [run_dir / folder for folder in WRITTEN if folder and (run_dir / folder).is_symlink()]
    failed = [f"{link}: may hold a secret (a link is not followed)" for link in links]
    for path in written_files(run_dir):
        try:
            if path.suffix == ".json" and (facts := record.read_json(path)) is not None:
                if (clean := without_secrets(facts, hidden)) != facts:
                    record.write_json(path, clean)
            else:
                _overwrite(path, ordered)
        except OSError as error:
            failed.append(f"{path}: may hold a secret ({error.strerror})")
    return failed


def is_log(path: Path) -> bool:
    """Whether a file in logs/ has the name of one that a run writes."""
    return any(fnmatch.fnmatchcase(path.name, pattern) for pattern in WRITTEN["logs"])


def written_files(run_dir: Path) -> Iterator[Path]:
    """The regular files below `run_dir` that a run writes by name, but numbers alone and checkpoints."""
    for folder, patterns in WRITTEN.items():
        directory = run_dir / folder
        if folder and directory.is_symlink():
            continue
        for path in sorted(directory.iterdir()) if directory.is_dir() else ():
            name = unfinished[1] if (unfinished := UNFINISHED.fullmatch(path.name)) else path.name
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
                with contextlib.suppress(OSError):  # it has gone
                    if stat.S_ISREG(path.lstat().st_mode):
                        yield path


def without_secrets(value: Any, hidden: Iterable[str], *, is_text: bool = False) -> Any:
    """JSON without the secrets in its texts (FREE_TEXT). Keys, numbers and words that are read again stay."""
    if isinstance(value, str):
        return hide(value, hidden if is_text else ())
    if isinstance(value, dict):
        return {k: without_secrets(item, hidden, is_text=k in FREE_TEXT) for k, item in value.items()}
    if isinstance(value, list):
        return [without_secrets(item, hidden, is_text=is_text) for item in value]
    return value


def _overwrite(path: Path, forms: Sequence[bytes]) -> None:
    """Every occurrence of `forms` (longest first) and of what has the form of one, also across chunks."""
    longest = max([record.LONGEST_FORM, *map(len, forms)])
    searches = [(mark.encode(), re.compile(form.encode())) for mark, form in record.SECRET_FORMS]
    if forms:
        searches.append((b"", re.compile(b"|".join(map(re.escape, forms)))))

    def find(data: bytes, since: int) -> Iterator[tuple[int, int, int]]:
        """Where a match begins, where its secret begins and ends."""
        lower = data.lower()
        for mark, form in searches:
            if mark in lower and (mark or any(text in data for text in forms)):
                for match in form.finditer(data, since):
                    yield match.start(), *match.span(match.lastindex or 0)

    window, start, since, more = b"", 0, 0, True  # the window begins at byte `start`; done before `since`
    with contextlib.ExitStack() as files:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        file, out = files.enter_context(open(descriptor, "rb")), -1
        while more:
            chunk = file.read(CHUNK)
            more, window = bool(chunk), window + chunk
            whole = len(window) - longest + 1 if more else len(window)  # what begins before it is not cut
            done = since
            for first, begin, end in sorted(find(window, since)):
                if first >= whole:
                    break
                if end <= done:
                    continue
                if out < 0:
                    if os.fstat(descriptor).st_nlink > 1:
                        raise OSError(0, "it has several hard links and stays as it is")
                    out = os.open(path, os.O_WRONLY | os.O_NOFOLLOW)
                    files.callback(os.close, out)
                begin = max(begin, done)
                os.pwrite(out, REDACTED.encode()[: end - begin].ljust(end - begin, b"*"), start + begin)
                done = end
            since = max(done, whole, 0)
            cut = max(0, since - CONTEXT)
            window, start, since = window[cut:], start + cut, since - cut


def _split_argv(argv: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """The command line without its secrets, and these by name."""
    shown: list[str] = []
    values: list[tuple[str, str]] = []
    for before, item in zip(("", *argv), argv, strict=False):
        named = re.match(r"([^=:\s]+)(=|:\s*)(.+)", item, re.DOTALL)
        if named and is_secret(named[1], named[3]):
            values += [(named[1], part) for part in (named[3], *named[3].split()[-1:])]
            item = f"{named[1]}{named[2]}{REDACTED}"
        elif (
            re.fullmatch(r"-[^=]*|(?i:bearer)", before)
            and is_secret(before, item)
            and not item.startswith("--")
        ):
            values.append((before, item))
            item = REDACTED
        shown.append(hide(item))
    return shown, values


def _redact_value(key: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return redact(value)
    if is_secret(key, value):
        return REDACTED
    if isinstance(value, (list, tuple)):
        return [_redact_value("", v) for v in value]
    return hide(value) if isinstance(value, str) else value
