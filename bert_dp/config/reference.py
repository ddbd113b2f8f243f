"""docs/settings.md from the schema: `python -m bert_dp.config.reference > docs/settings.md`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Literal, TypeGuard, get_args, get_origin

from pydantic import AfterValidator
from pydantic.fields import FieldInfo

from bert_dp.config.schema import Config, KeyOf, Section


def settings_reference() -> str:
    """Every setting with its type, bounds, default and meaning, as Markdown tables by section."""
    lines = [
        "# Settings",
        "",
        "Every setting, made from `bert_dp/config/schema.py`: `a.b` is key `b` of section `a` in YAML.",
    ]
    for title, section in sections(Config):
        lines += [
            "",
            f"## {title or 'Top level'}",
            "",
            "| setting | values | default | |",
            "|---|---|---|---|",
        ]
        for name, field in section.model_fields.items():
            if not is_section(field.annotation):
                path = f"{title}.{name}" if title else name
                meaning = " ".join((field.description or "").split()).replace("|", "\\|")
                lines.append(f"| `{path}` | {values(field)} | {default(field)} | {meaning} |")
    return "\n".join(lines) + "\n"


def sections(section: type[Section], path: str = "") -> Iterator[tuple[str, type[Section]]]:
    """A section and those within it, by their paths."""
    yield path, section
    for name, field in section.model_fields.items():
        if is_section(field.annotation):
            yield from sections(field.annotation, f"{path}.{name}" if path else name)


def is_section(annotation: object) -> TypeGuard[type[Section]]:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def values(field: FieldInfo) -> str:
    """What may be given, in words: a type with its bounds, or the names."""
    for part in field.metadata:
        if isinstance(part, AfterValidator) and isinstance(part.func, KeyOf):
            return ", ".join(f"`{name}`" for name in part.func.names)
    return type_name(field.annotation) + bounds(field)


def type_name(annotation: object) -> str:
    names = {int: "whole number", float: "number", bool: "true, false", str: "text", type(None): "null"}
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    if annotation in names:
        return names[annotation]
    if get_origin(annotation) is tuple:
        return f"list of {type_name(get_args(annotation)[0])}"
    return " or ".join(
        dict.fromkeys(
            type_name(part) for part in get_args(annotation) if hasattr(part, "__mro__") or get_args(part)
        )
    )


def bounds(field: FieldInfo) -> str:
    signs = {"Ge": ">=", "Gt": ">", "Le": "<=", "Lt": "<"}
    limits = []
    for part in field.metadata:
        kind = type(part).__name__
        if kind in signs:
            limits.append(f"{signs[kind]} {getattr(part, kind.lower()):g}")
    return f", {' and '.join(limits)}" if limits else ""


def default(field: FieldInfo) -> str:
    return f"`{json.dumps(field.default).strip(chr(34))}`"


if __name__ == "__main__":
    sys.stdout.write(settings_reference())
