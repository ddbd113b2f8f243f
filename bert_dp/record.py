"""The lines of metrics.jsonl and evals.jsonl, and summary.json: written, read, cut back. Torch-free."""

from __future__ import annotations

import dataclasses
import fcntl
import html
import json
import math
import os
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

SCHEMA_VERSION = 1

# environment variables by which the launcher tells its workers what a user-started worker does without
INIT_FILE = "BERT_DP_INIT_FILE"  # a file to meet in; without it env:// (MASTER_ADDR, MASTER_PORT)
LOG_DIR = "BERT_DP_LOG_DIR"  # where rank-N.log and rank-N.error.json go
LAUNCHER_PID = "BERT_DP_LAUNCHER_PID"
LAUNCHER_START = "BERT_DP_LAUNCHER_START"  # see start_ticks

REDACTED = "<redacted>"
# of a variable or setting; the settings `tokenizer*` and a numeric `tokens*` are no secrets
SECRET_NAME = re.compile(r"token(?!iz)|key|secret|pass", re.IGNORECASE)
MIN_SECRET = 6  # characters: shorter values stand in texts by chance


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


@dataclasses.dataclass(frozen=True)
class Summary:
    """summary.json: how a run ended. Rates are over the real steps, warm-up of set-up excluded."""

    status: str
    """done | stopped (by a signal, after a checkpoint) | failed"""
    exit_code: int
    cause: str | None
    signal: int | None
    step: int
    samples: int
    tokens: int
    final_loss: float | None
    heldout_loss: float | None
    unigram_entropy_nats: float | None
    uniform_entropy_nats: float | None
    world_size: int
    device: str
    parameters: int
    global_batch: int
    micro_batch: int
    accumulation: int
    precision: str
    compiled: bool
    steps_per_s: float | None
    global_steps_per_s: float | None
    samples_per_s: float | None
    tokens_per_s: float | None
    tokens_per_s_per_gpu: float | None
    mfu: float | None
    peak_memory_gib: float | None
    energy_j: float | None
    skipped_steps: int
    checkpoint: str | None
    time_s: dict[str, float]
    """Of rank 0's wall clock: setup, compile, train, data_wait, forward_backward, optimizer, eval, save."""
    schema_version: int = SCHEMA_VERSION


def append_line(path: Path, record: Metrics | Evaluation) -> None:
    """Append one flat JSON line and flush. A non-finite number becomes null: JSON has none."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(_finite(dataclasses.asdict(record)), allow_nan=False) + "\n")


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a JSONL file; a line torn by a crash ends the iteration."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            try:
                yield json.loads(line)
            except ValueError:
                return


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
    """The object in `path`, or None when it is absent or not JSON."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


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


def newest_checkpoint_facts(where: Path) -> tuple[Path, dict[str, Any]] | None:
    """state.json of a checkpoint, or of the newest one in a run or checkpoints directory; unverified."""
    folder = where / "checkpoints" if (where / "checkpoints").is_dir() else where
    for path in [where, *sorted(folder.glob(f"step-{'[0-9]' * 8}*"), reverse=True)]:
        facts = read_json(path / "state.json")
        if facts is not None and isinstance(facts.get("config"), dict):
            return path, facts
    return None


def start_ticks(pid: int) -> str:
    """Start time of a process in clock ticks since boot: with the pid it names one process for good.

    Raises OSError when there is none.
    """
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def is_secret(name: str, value: object) -> bool:
    """Whether what bears this name must not be written down."""
    if not SECRET_NAME.search(name):
        return False
    count = isinstance(value, (int, float, type(None))) or re.fullmatch(r"[\d.e+_]+|null", str(value))
    return not ("tokens" in name.lower() and count)


def secret_values(environ: Mapping[str, str]) -> dict[str, str]:
    """Value -> name of the variables called *TOKEN*, *KEY*, *SECRET* or *PASS*; short values are left out.

    A path that exists is none: it says where a secret is kept.
    """
    return {
        value: name for name, value in environ.items()
        if len(value) >= MIN_SECRET and is_secret(name, value)
        and not (value.startswith("/") and os.path.exists(value))
    }  # fmt: skip


def hide(text: str, secrets: Iterable[str]) -> str:
    """`text` without the secrets, also as JSON or HTML would write them."""
    for secret in sorted(secrets, key=len, reverse=True):
        for form in dict.fromkeys((secret, json.dumps(secret)[1:-1], html.escape(secret))):
            text = text.replace(form, REDACTED)
    return text


def cache_root() -> Path:
    """Where built corpora are cached: $BERT_DP_CACHE, by default ~/.cache/bert-dp."""
    return Path(os.environ.get("BERT_DP_CACHE") or Path.home() / ".cache" / "bert-dp")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return value
