"""What every wrong configuration raises."""

from __future__ import annotations

from collections.abc import Sequence

_PLAIN = (
    ("Value error, ", ""),
    ("Input should be a valid integer", "expected a whole number"),
    ("Input should be a valid number", "expected a number"),
    ("Input should be a valid string", "expected text"),
    ("Input should be a valid boolean", "expected true or false"),
    ("Input should be a valid array", "expected a list"),
    ("Input should be a valid list", "expected a list"),
    ("Input should be a valid dictionary", "expected named values"),
    ("Input should be an object", "expected named values"),
    ("Input should be greater", "expected a number greater"),
    ("Input should be less", "expected a number less"),
    ("Input should be", "expected"),
    # of the command line's options, which are text before they are numbers
    (", unable to parse string as an integer", ""),
    (", unable to parse string as a number", ""),
    (", got a number with a fractional part", ""),
    (", unable to interpret input", ""),
)


def plain_message(message: str) -> str:
    """What pydantic says of a value, as we say it."""
    for theirs, ours in _PLAIN:
        message = message.replace(theirs, ours)
    return message


class ConfigError(ValueError):
    """A configuration that cannot run. `issues` holds one line per problem, each with the full path."""

    def __init__(self, issues: Sequence[str]):
        self.issues = tuple(issues)
        super().__init__("\n".join(self.issues))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[str, ...]]]:
        return ConfigError, (self.issues,)  # how another process gets it
