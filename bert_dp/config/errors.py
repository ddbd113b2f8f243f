"""Define ConfigError and Issue. An Issue is a problem with a setting, option, file or package. Also read
untrusted files, which must be regular and of limited size, and report each of their problems in one line."""

import contextlib
import dataclasses
import errno
import hashlib
import importlib
import importlib.metadata
import os
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

MAX_JSON_BYTES = 2**28  # maximum size of a JSON file; the manifest of 4 GB of shards takes 20 KB
Count = Annotated[int, Field(ge=0, lt=2**63)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

IssueKind = Literal[
    "missing",  # a required value, file or column was not given
    "unknown",  # no setting, task, column or format has this name
    "wrong_type",
    "out_of_range",
    "conflict",  # the value contradicts the setting, option or file in `other`
    "no_effect",  # the setting or option in `other` disables this one
    "does_not_divide",  # the value is not a divisor, or not a multiple, of another value
    "not_found",  # the file or directory does not exist or cannot be opened
    "exists",  # the output directory is in use or contains other files
    "damaged",  # the contents of a file violate its format
    "needs_package",
    "unsupported",  # valid, but not implemented for this combination or this machine
]


@dataclasses.dataclass(frozen=True)
class Issue:
    """One problem that the user can fix."""

    setting: str
    """Setting (dotted name), option or file; empty if none applies."""
    kind: IssueKind
    message: str
    value: Any = None
    other: str | None = None
    """Other setting, option or file that is involved in the problem."""
    hint: str | None = None
    """Suggested fix."""

    def __str__(self) -> str:
        line = f"{self.setting}: {self.message}" if self.setting else self.message
        return f"{line}; {self.hint}" if self.hint else line

    def within(self, outer: str) -> Self:
        """Return a copy whose setting is `outer` and whose message starts with the original setting."""
        inner = f"{self.setting}: {self.message}" if self.setting else self.message
        return dataclasses.replace(self, setting=outer, message=inner)

    def to_json(self) -> dict[str, Any]:
        """Return the fields that are not None, as JSON values."""
        fields = {name: value for name, value in vars(self).items() if value is not None}
        if not isinstance(self.value, str | int | float | bool | None):
            fields["value"] = str(self.value)
        return fields


class ConfigError(ValueError):
    """Error raised for unusable input. `issues` contains every problem that was found."""

    def __init__(self, issues: Sequence[Issue]):
        self.issues = tuple(issues)
        super().__init__("\n".join(map(str, self.issues)))

    def __reduce__(self) -> tuple[type[Self], tuple[tuple[Issue, ...]]]:
        return type(self), (self.issues,)  # by default, unpickling would call __init__ with the text


def require(module: str, extra: str, what: str) -> Any:
    """Import and return an optional module. If it is missing, raises ConfigError with a command that installs
    `extra`. `what`: setting, file or command that needs the module; it may end in `: VALUE` or `: USE`."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        setting, _, use = what.partition(": ")
        message, hint = f"{use} needs {package}".strip(), install_command(extra)
        raise ConfigError([Issue(setting, "needs_package", message, package, hint=hint)]) from None


def install_command(extra: str) -> str:
    """Return a command that installs the requirements of an extra, such as `pip install 'rensa>=0.5'`. If
    bert-dp is not installed, its requirements are unknown, and the command installs the package `extra`."""
    lines: list[str] = []
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        lines = importlib.metadata.requires("bert-dp") or []
    of_extra = re.compile(rf"""(.*);.*extra == ["']{extra}["']""")
    needed = [match[1].strip() for line in lines if (match := of_extra.match(line))]
    return "pip install " + " ".join(f"'{name}'" for name in needed or [extra])


# --- untrusted files


class StoredModel(BaseModel):
    """Base class for stored data. Types are strict, numbers are finite, and unknown keys are ignored."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False, defer_build=True)


def problem_lines(error: ValidationError) -> list[str]:
    """Return a line for each of the first eight problems with a file: key, problem, and value if scalar."""
    lines = []
    for problem in error.errors()[:8]:
        path = ascii(".".join(map(str, problem["loc"])))[1:-1][:80]
        line = problem["msg"].removeprefix("Value error, ")  # pydantic adds this prefix
        if isinstance(problem["input"], (str, int, float, type(None))):
            line += f", got {ascii(problem['input'])[:80]}"
        lines.append(f"{path}: {line}" if path else line)
    return lines


@contextlib.contextmanager
def refusing(setting: str, what: str = "", hint: str | None = None) -> Iterator[None]:
    """Convert an error from reading a file (OSError, ValueError, RecursionError) to a ConfigError. `setting`:
    the file, or the setting or option that names it. In the latter case, `what` is the file or the part of
    the file that is read. Each message starts with `what`."""
    problems: list[str] = []
    kind: IssueKind = "damaged"
    try:
        yield
    except ConfigError:
        raise
    except OSError as error:
        kind, problems = "not_found", [f"cannot be read ({error.strerror or error})"]
    except ValidationError as error:
        problems = problem_lines(error)
    except RecursionError:
        problems = ["is nested too deeply"]
    except ValueError as error:
        problems = [str(error)]
    if problems:
        prefix = f"{what}: " if what else ""
        raise ConfigError([Issue(setting, kind, prefix + problem, hint=hint) for problem in problems])


def read_regular(path: Path, most_bytes: int) -> bytes:
    """Read a regular file of at most `most_bytes`. Raises OSError if the path is invalid, the file
    is larger, or the file is not regular (a pipe or a device may be endless)."""
    try:
        file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    except ValueError as error:  # the path contains a NUL or cannot be encoded
        raise OSError(errno.EINVAL, str(error), str(path)) from None
    with file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if status.st_size > most_bytes:
            raise OSError(errno.EFBIG, f"larger than {most_bytes} bytes", str(path))
        return file.read(status.st_size)


def sha256(path: Path) -> str:
    """Return the hex SHA-256 of a file. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
