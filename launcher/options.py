"""Options that several verbs share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bert_dp.record import safe

if TYPE_CHECKING:
    from rich.segment import Segment

ConfigName = Annotated[
    str | None, typer.Argument(help="YAML file or the name of a shipped one; default: quickstart.")
]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="a.b=v", help="Override a setting; repeatable.")
]
Launcher = Annotated[str, typer.Option(help="Starts the ranks: torchrun, accelerate or deepspeed.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def argument_issues(arguments: Sequence[str]) -> list[str]:
    """One line for each argument that is not UTF-8: no file of ours could hold it."""
    return [f"argument {a!a} is not UTF-8" for a in arguments if any("\ud800" <= c <= "\udfff" for c in a)]


def console() -> Any:
    """A terminal, or a plain log. No control character of foreign text gets there, whatever is shown."""
    from rich.console import Console

    class SafeConsole(Console):
        def render(self, *arguments: Any, **options: Any) -> Iterator[Segment]:
            for segment in super().render(*arguments, **options):
                yield segment if segment.control else segment._replace(text=safe(segment.text))

    return SafeConsole()
