"""Problems of a configuration, option, file or missing package, and the exception that carries them."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import re
from collections.abc import Sequence
from typing import Any, Literal

IssueKind = Literal[
    "missing",  # a value, file or column that is needed was not given
    "unknown",  # no setting, task, column or format has this name
    "wrong_type",
    "out_of_range",
    "conflict",  # with the setting or file in `other`
    "no_effect",
    "does_not_divide",
    "not_found",  # the file or directory does not exist or cannot be opened
    "exists",  # the output directory is in use or holds something else
    "damaged",  # the contents of a file are not what its format requires
    "needs_package",
    "unsupported",  # valid, but not implemented for this combination or this machine
]


@dataclasses.dataclass(frozen=True)
class Issue:
    """One problem that the user can fix."""

    setting: str
    """Dotted setting, option or file; empty if the problem belongs to none."""
    kind: IssueKind
    message: str
    value: Any = None
    other: str | None = None
    """The setting or file that it conflicts with."""
    hint: str | None = None
    """The fix."""

    def __str__(self) -> str:
        line = f"{self.setting}: {self.message}" if self.setting else self.message
        return f"{line}; {self.hint}" if self.hint else line

    def within(self, outer: str) -> Issue:
        """Return the issue as one of `outer`, the setting or file in which it was found."""
        inner = f"{self.setting}: {self.message}" if self.setting else self.message
        return dataclasses.replace(self, setting=outer, message=inner)

    def to_json(self) -> dict[str, Any]:
        """Return the fields that are set, as JSON values."""
        fields = {name: value for name, value in vars(self).items() if value is not None}
        if not isinstance(self.value, str | int | float | bool | None):
            fields["value"] = str(self.value)
        return fields


class ConfigError(ValueError):
    """Input that cannot be used. `issues` holds every problem found."""

    def __init__(self, issues: Sequence[Issue]):
        self.issues = tuple(issues)
        super().__init__("\n".join(map(str, self.issues)))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[Issue, ...]]]:
        return ConfigError, (self.issues,)  # the default would pickle the joined text


def plain_message(message: str) -> str:
    """Return pydantic's message about a value without the words that it puts before ours."""
    return message.removeprefix("Value error, ")


def require(module: str, extra: str, what: str) -> Any:
    """Import an optional package. `what`: setting, or `setting: use`, that needs it. Raises ConfigError."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        setting, _, use = what.partition(": ")
        message, hint = f"{use} needs {package}".strip(), install_command(extra)
        raise ConfigError([Issue(setting, "needs_package", message, package, hint=hint)]) from None


def install_command(extra: str) -> str:
    """Return `pip install` with the requirements of one extra of pyproject.toml, as in
    `pip install 'rensa>=0.5'`; with its bare name where the package runs without having been installed."""
    try:
        lines = importlib.metadata.requires("bert-dp") or []
    except importlib.metadata.PackageNotFoundError:
        lines = []
    of_extra = re.compile(rf"""(.*);.*extra == ["']{extra}["']""")
    needed = [match[1].strip() for line in lines if (match := of_extra.match(line))]
    return "pip install " + " ".join(f"'{name}'" for name in needed or [extra])
