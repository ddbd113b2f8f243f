"""What may be shown: text without secrets and without what moves a terminal. Torch-free."""

from __future__ import annotations

import functools
import html
import json
import os
import re
import urllib.parse
from collections.abc import Iterable, Mapping

REDACTED = "<redacted>"
MIN_SECRET = 6  # characters: shorter values stand in texts by chance
WORD = re.compile(r"[A-Z]?[a-z]{,12}|[A-Z]{,12}")  # so do words
# in one word of the name of a variable or setting: PAT but not PATH, KEY but not KEYBOARD
SECRET_PART = re.compile(
    r"token(?!i[sz])|secret|credential|webhook|bearer|pwd$|dsn$|^pats?$|^connections?$|(?<!sa)creds?$"
    r"|^o?auth(?!or(?!i[sz]))|auth$|(?<!com)(?<!by)(?<!sur)(?<!ask)pass(?!e|i[nosv]|a[bg]|th|port)"
    r"|(?<!mon)(?<!don)(?<!tur)(?<!hot)key(?!b|w|n|st|map|ed)"
)
NAME_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
NO_SECRETS = ("PWD", "OLDPWD")  # the shell's own: the current folder and the one before
USER_INFO = r"/(?<=[:/]/)([^\s/?#\"'<>:@]{,256}:[^\s/\"'<>]{1,256})@"  # also where a path has lost a slash
HEADER = r"[\"']?\s{,3}[:=]\s{,3}[\"']?(?:(?i:bearer|basic|digest|token)\s{1,3})?([^\s\"',;]{6,2000})"
# what shows by its form that it is a secret: the group where there is one, else the whole match. A text
# without the mark, in lower case, holds none. Each is bounded, so that a file can be searched in pieces
SECRET_FORMS = (
    ("@", USER_INFO),
    ("@", r"://([^\s/?#\"'<>:@]{16,256})@"),  # https://TOKEN@host
    ("eyj", r"eyJ(?<![A-Za-z0-9]eyJ)[\w-]{6,1000}\.[\w-]{4,2000}\.[\w-]{,1000}"),  # JWT
    ("hf_", r"hf_(?<![A-Za-z0-9]hf_)[A-Za-z0-9]{16,256}"),
    ("gh", r"gh(?<![A-Za-z0-9]gh)[pousr]_[A-Za-z0-9]{16,256}"),
    ("github_pat_", r"github_pat_\w{16,256}"),
    ("akia", r"AKIA(?<![A-Za-z0-9]AKIA)[A-Z0-9]{16}(?![A-Za-z0-9])"),
    *(("authorization", letters + HEADER) for letters in ("uthorization", "UTHORIZATION")),
    *(
        ("bearer", rf"{letters}\s{{1,3}}((?=\S{{,256}}\d)[\w.~+/=-]{{12,2000}})")
        for letters in ("earer", "EARER")
    ),
)
LONGEST_FORM = 4096  # characters
# what may not reach a terminal, XML or UTF-8: sequences for a terminal, the characters that begin one, and
# those that turn the order of a line around
ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b\n]{,1000}(?:\x07|\x1b\\)")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def is_secret(name: str, value: object) -> bool:
    """Whether a value of this name is a secret, which must not be written down."""
    parts = [part.lower() for part in NAME_PART.findall(name)]
    if name in NO_SECRETS or value is None or not any(map(SECRET_PART.search, parts)):
        return False
    counted = "tokens" in parts or "connections" in parts
    return not (counted and re.fullmatch(r"[\d.e+_]+|null", str(value)))


def is_ordinary(value: str) -> bool:
    """Whether this value is so common in texts that hiding it would spoil them."""
    return len(value) < MIN_SECRET or WORD.fullmatch(value) is not None


def named_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """Value -> name of the variables that hold a secret by their name, and of the passwords in URLs.

    A path that exists is none: it says where a secret is kept. A value of several lines counts whole and line
    by line.
    """
    secrets: dict[str, str] = {}
    for name, value in environ.items():
        if is_secret(name, value) and not os.path.exists(os.path.expanduser(value)):
            secrets |= dict.fromkeys((value, *value.splitlines()), name)
        for match in re.finditer(USER_INFO, value):
            password = match[1].partition(":")[2]
            secrets |= dict.fromkeys((password, urllib.parse.unquote(password)), name)
    return secrets


def secret_values(environ: Mapping[str, str]) -> dict[str, str]:
    """`named_secrets` without what is ordinary."""
    return {value: name for value, name in named_secrets(environ).items() if not is_ordinary(value)}


@functools.lru_cache(1024)
def written_forms(secret: str) -> frozenset[str]:
    """The secret as it is, and as JSON, Python, HTML or a URL would write it."""
    written = (json.dumps(secret), json.dumps(secret, ensure_ascii=False), repr(secret))
    escaped = (html.escape(secret), html.escape(secret, quote=False), html.escape(written[0][1:-1]))
    quoted = urllib.parse.quote(secret, safe="", errors="surrogateescape")
    return frozenset((secret, *(text[1:-1] for text in written), *escaped, quoted))


def hide(text: str, secrets: Iterable[str] = ()) -> str:
    """`text` without the secrets, in whatever form, and without what has the form of one."""
    for form in sorted({f for secret in secrets for f in written_forms(secret)}, key=len, reverse=True):
        text = text.replace(form, REDACTED)
    lower = text.lower()
    for mark, form in SECRET_FORMS:
        if mark in lower:
            text = re.sub(form, _without_group, text)
    return text


def _without_group(match: re.Match[str]) -> str:
    start, end = match.span(match.lastindex or 0)
    whole, offset = match.group(), match.start()
    return whole[: start - offset] + REDACTED + whole[end - offset :]


def safe(text: str) -> str:
    """Foreign text for a terminal or a page: nothing in it moves a cursor, sets a title or turns a line."""
    return CONTROL.sub("\ufffd", ESCAPE.sub("", text))


def printable(text: str) -> str:
    """`safe`, and without the secrets of this process's environment."""
    return safe(hide(text, secret_values(os.environ)))


def without_folders(word: str) -> str:
    """A word of a command with absolute paths cut to their names: the others say nothing to a stranger."""
    return re.sub(r"(?<![\w.~/-])/(?:[^/\s,]+/)+(?=[^/\s,])", "", word)
