"""The lines of metrics.jsonl and evals.jsonl, and summary.json: written, read, cut back. Torch-free."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import functools
import html
import json
import math
import os
import re
import stat
import struct
import sys
import sysconfig
import urllib.parse
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from bert_dp.config.stored import Count, Sha256, problem_lines, read_regular

SCHEMA_VERSION = 1

# environment variables by which the launcher tells its workers what a user-started worker does without
INIT_FILE = "BERT_DP_INIT_FILE"  # a file to meet in; without it env:// (MASTER_ADDR, MASTER_PORT)
LOG_DIR = "BERT_DP_LOG_DIR"  # where rank-N.log and rank-N.error.json go
STARTED_AGAIN = "-- started again --"  # a line of rank-N.log
LAUNCHER_PID = "BERT_DP_LAUNCHER_PID"
LAUNCHER_START = "BERT_DP_LAUNCHER_START"  # see start_ticks

MAX_JSON_BYTES = 2**28
MAX_JSON_DEPTH = 32  # of nested objects and lists; ours have less than ten
MAX_WHOLE = 2**64  # no count, size or time in ns is as large

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
CHECKPOINT_NAME = re.compile(r"step-(\d{8,})(\.old-\w+)?")  # one that is whole, and no run has left behind


@dataclasses.dataclass(frozen=True)
class Metrics:
    """One line of metrics.jsonl. Times and rates are means over the steps since the previous line."""

    step: int
    samples: int
    tokens: int
    epoch: int
    progress: float
    loss: float
    lr: float
    grad_norm: float
    global_batch: int
    micro_batch: int
    accumulation: int
    world_size: int
    step_time_s: float
    steps_per_s: float
    global_steps_per_s: float
    samples_per_s: float
    tokens_per_s: float
    tokens_per_s_per_gpu: float
    mfu: float | None
    data_wait_s: float
    forward_backward_s: float
    optimizer_s: float
    peak_memory_gib: float
    elapsed_s: float
    skipped_steps: int


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """One line of evals.jsonl: mean cross entropy in nats over `masked_tokens` held-out positions."""

    step: int
    tokens: int
    loss: float
    mask_rate: float
    masked_tokens: int
    elapsed_s: float


PHASES = ("setup", "compile", "data", "step", "log", "evaluate", "save", "done")


@dataclasses.dataclass(frozen=True)
class Beat:
    """RUN/heartbeats/rank-N: one 64-bit integer per field, in this order and the machine's byte order, so
    that each is stored and read whole. Clocks are CLOCK_MONOTONIC, the same for all processes of a machine.
    """

    pid: int
    step: int
    phase: int
    """Index into PHASES."""
    done: int
    """Pieces of work since the phase began: micro batches, evaluation batches."""
    progress: int
    """Rises with every phase and every piece of work."""
    progress_ns: int
    """When it last rose."""
    alive: int
    """Rises about once a second while the process is scheduled and its interpreter lock is given up."""
    alive_ns: int
    asked: int
    """The one field a reader writes: the number of a request for the rank's recent collectives."""
    answered: int
    """The request that was answered last, in logs/rank-N.collectives.json."""
    lost_writes: int
    """Writes to the log and the records that failed."""
    write_errno: int
    """How the last of them failed, as errno(3) has it."""

    @property
    def place(self) -> tuple[int, int, int]:
        """How far the rank is, to be compared with that of other ranks."""
        return self.step, self.phase, self.done


BEAT_SLOTS = {field.name: i for i, field in enumerate(dataclasses.fields(Beat))}
BEAT_BYTES = 8 * len(BEAT_SLOTS)


def heartbeat_path(run_dir: Path, rank: int) -> Path:
    return run_dir / "heartbeats" / f"rank-{rank}"


def read_beat(path: Path) -> Beat | None:
    """What a rank last said of itself; None before it has begun."""
    try:
        return Beat(*struct.unpack(f"@{len(BEAT_SLOTS)}q", path.read_bytes()))
    except (OSError, struct.error):
        return None


def ask_for_collectives(path: Path, number: int) -> None:
    """Let the rank of this heartbeat answer request `number`. Raises OSError."""
    file = os.open(path, os.O_WRONLY)
    try:
        os.pwrite(file, struct.pack("@q", number), 8 * BEAT_SLOTS["asked"])
    finally:
        os.close(file)


def append_line(path: Path, record: Metrics | Evaluation | Mapping[str, Any]) -> None:
    """Append one flat JSON line, whole or not at all. A non-finite number becomes null: JSON has none.

    Raises OSError.
    """
    facts = record if isinstance(record, Mapping) else dataclasses.asdict(record)
    line = (json.dumps(_finite(dict(facts)), allow_nan=False) + "\n").encode()
    with path.open("ab", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            if file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        except OSError:
            file.truncate(size)  # what follows a torn line would not be read
            raise


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a JSONL file, objects that have a `step` each; one torn by a crash, or damaged, ends
    the iteration. Nothing when there is no such regular file. Raises OSError when it cannot be read."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            try:
                facts = parse_json(line)
            except ValueError:
                return
            if not isinstance(facts, dict) or type(facts.get("step")) is not int:
                return
            yield facts


def cut_back(path: Path, step: int) -> None:
    """Drop torn lines and lines after `step`, atomically; a file of any size in little memory."""
    if path.exists():
        kept = (json.dumps(line) + "\n" for line in read_lines(path) if line["step"] <= step)
        write_text(path, kept)


def write_json(path: Path, data: Any) -> None:
    """Atomic: a reader sees the old file or the whole new one."""
    write_text(path, json.dumps(_finite(data), indent=1, allow_nan=False) + "\n")


def write_text(path: Path, text: str | Iterable[str]) -> None:
    """Atomic: temporary file in the same directory, fsync, rename. `text`: whole, or in parts."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.writelines([text] if isinstance(text, str) else text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in `path`, or None when it is absent, not JSON or none that `parse_json` takes."""
    try:
        data = parse_json(read_regular(path, MAX_JSON_BYTES))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def parse_json(text: bytes | str) -> Any:
    """JSON in UTF-8. Raises ValueError for anything else, and for what no file of ours has and what readers
    stumble over: whole numbers of MAX_WHOLE and more, nesting deeper than MAX_JSON_DEPTH."""
    try:
        data = json.loads(text if isinstance(text, str) else text.decode(), parse_int=_whole_number)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    level = [data]
    for _ in range(MAX_JSON_DEPTH):
        inside = (v.values() if isinstance(v, dict) else v for v in level if isinstance(v, (dict, list)))
        if not (level := [value for values in inside for value in values]):
            return data
    raise ValueError("nested too deeply")


def _whole_number(text: str) -> int:
    if len(text) > len(str(-MAX_WHOLE)) or abs(number := int(text)) >= MAX_WHOLE:
        raise ValueError(f"a whole number of {len(text)} digits")
    return number


def lock(path: Path) -> IO[str] | None:
    """Hold the lock file at `path` until the returned file is closed; None when another process holds it.

    Raises OSError when the file cannot be written.
    """
    file = path.open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


class HeldDirectory:
    """A directory that stays open: whether its path still leads to it, and where it is if not. A context.

    Raises OSError when there is none.
    """

    def __init__(self, path: Path):
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)

    def __enter__(self) -> HeldDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def now(self) -> Path | None:
        """Where the directory is; None when it was deleted, or moved where this process cannot see it."""
        if self._is_at(self.path):
            return self.path
        path = Path(os.readlink(f"/proc/self/fd/{self._descriptor}"))
        return path if self._is_at(path) else None

    def lost(self) -> str | None:
        """What became of the directory when its path leads there no more; else None."""
        now = self.now()
        if now == self.path:
            return None
        what = f"moved to {now}" if now else "deleted" if self._is_deleted() else "moved away or deleted"
        return f"the run directory {self.path} was {what} during the run"

    def _is_at(self, path: Path) -> bool:
        """Also when that cannot be known now: a file server that does not answer has lost nothing."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), path.stat())
        except OSError as error:
            return error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)

    def _is_deleted(self) -> bool:
        try:
            return os.fstat(self._descriptor).st_nlink == 0
        except OSError as error:
            return error.errno == errno.ESTALE


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, newest first; one set aside by a save comes after its replacement."""
    if not folder.is_dir():
        return []
    found = [
        (int(m[1]), not m[2], p)
        for p in folder.iterdir()
        if (m := CHECKPOINT_NAME.fullmatch(p.name)) and p.is_dir()
    ]
    return [path for *_, path in sorted(found, reverse=True)]


class CheckpointFacts(BaseModel):
    """state.json of a checkpoint: how far the run was, and what it was. Unknown keys are left out."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")
    step: Count
    samples: Count
    elapsed_s: FiniteFloat = Field(ge=0)
    skipped_steps: Count = 0
    loss_spikes: Count = 0
    recent_losses: list[FiniteFloat] = []
    config: dict[str, Any]
    data_hash: Sha256
    tokenizer: Sha256 | None = None
    """SHA-256 of the tokenizer's file; older checkpoints do not tell."""
    compiled: bool
    device: Literal["cpu", "cuda"]
    precision: Literal["fp64", "fp32", "bf16", "fp16"]
    scaler: dict[str, FiniteFloat]


def read_checkpoint_facts(path: Path) -> CheckpointFacts:
    """state.json of the checkpoint `path`. Raises OSError or ValueError, which says what is wrong."""
    file = path / "state.json"
    if file.exists() and not file.is_file():
        raise ValueError(f"{file.name}: not a regular file")
    try:
        return CheckpointFacts.model_validate(json.loads(file.read_text(encoding="utf-8")))
    except ValidationError as error:
        raise ValueError("; ".join(f"{file.name}: {line}" for line in problem_lines(error))) from None
    except RecursionError:
        raise ValueError(f"{file.name}: nested too deep") from None


def newest_checkpoint_facts(where: Path) -> tuple[Path, CheckpointFacts] | None:
    """The facts of a checkpoint, or of the newest one in a run or checkpoints directory; unverified."""
    folder = where / "checkpoints" if (where / "checkpoints").is_dir() else where
    for path in [where, *list_checkpoints(folder)]:
        with contextlib.suppress(OSError, ValueError):
            return path, read_checkpoint_facts(path)
    return None


def start_ticks(pid: int) -> str:
    """Start time of a process in clock ticks since boot: with the pid it names one process for good.

    Raises OSError when there is none.
    """
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def is_own_code(filename: str) -> bool:
    """Whether a stack frame of this file is ours or the user's: not of Python, torch or another package."""
    if filename.startswith(str(Path(__file__).parent) + os.sep):
        return True  # also when bert_dp itself is installed among the packages
    libraries = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    within = any(filename.startswith(library + os.sep) for library in libraries)
    foreign = within or "site-packages" in filename or "dist-packages" in filename
    return not foreign and not filename.startswith("<")


def is_secret(name: str, value: object) -> bool:
    """Whether what bears this name must not be written down."""
    parts = [part.lower() for part in NAME_PART.findall(name)]
    if name in NO_SECRETS or value is None or not any(map(SECRET_PART.search, parts)):
        return False
    counted = "tokens" in parts or "connections" in parts
    return not (counted and re.fullmatch(r"[\d.e+_]+|null", str(value)))


def is_ordinary(value: str) -> bool:
    """Whether this value stands in texts by chance, so that hiding it would spoil them."""
    return len(value) < MIN_SECRET or WORD.fullmatch(value) is not None


def named_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """Value -> name of the variables that hold a secret by their name, and of the passwords in URLs.

    A path that exists is none: it says where a secret is kept. A value of several lines counts whole and line
    by line.
    """
    found: dict[str, str] = {}
    for name, value in environ.items():
        if is_secret(name, value) and not os.path.exists(os.path.expanduser(value)):
            found |= dict.fromkeys((value, *value.splitlines()), name)
        for match in re.finditer(USER_INFO, value):
            password = match[1].partition(":")[2]
            found |= dict.fromkeys((password, urllib.parse.unquote(password)), name)
    return found


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


def open_missing_descriptors() -> None:
    """Let stdin, stdout and stderr be /dev/null where they are closed, here and in every child.

    Else the next file that is opened takes their place, and what is printed ends in it, or the process does.
    """
    while (file := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(file, True)
    os.close(file)
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115


def cache_root() -> Path:
    """Where built corpora are cached: $BERT_DP_CACHE, by default ~/.cache/bert-dp."""
    return Path(os.environ.get("BERT_DP_CACHE") or Path.home() / ".cache" / "bert-dp")


def cache_issues() -> list[str]:
    """Why the cache is not to be trusted; one line each, none where there is no cache yet."""
    root = cache_root()
    try:
        status = root.stat()
    except OSError:
        return []
    who = "" if status.st_uid in (os.geteuid(), 0) else f"belongs to another user (uid {status.st_uid})"
    if status.st_mode & stat.S_IWOTH:
        who = "can be written by every user"
    own = "set BERT_DP_CACHE to a directory of your own"
    return [f"BERT_DP_CACHE: {root} {who}, so what is kept there cannot be trusted; {own}"] if who else []


def keep_private() -> None:
    """What this process and its children make from here on is for this user alone, whatever the umask was."""
    os.umask(0o077)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return value
