"""docs/settings.md from the schema: `python -m tests.settings_reference > docs/settings.md`."""

from __future__ import annotations

import json
import sys
from typing import Literal, get_args, get_origin

from pydantic import AfterValidator
from pydantic.fields import FieldInfo

from bert_dp.config.schema import KeyOf, all_settings

TYPES = {int: "whole number", float: "number", bool: "true, false", str: "text", type(None): "null"}
SIGNS = {"Ge": ">=", "Gt": ">", "Le": "<=", "Lt": "<"}


def settings_reference() -> str:
    """Describe every setting with its type, bounds, default and meaning, as Markdown tables by section."""
    rows: dict[str, list[str]] = {"": []}
    for path, field, _ in all_settings():
        meaning = " ".join((field.description or "").split()).replace("|", "\\|")
        default = json.dumps(field.default).strip('"')
        row = f"| `{path}` | {describe_values(field)} | `{default}` | {meaning} |"
        rows.setdefault(path.rpartition(".")[0], []).append(row)
    lines = [
        "# Settings",
        "",
        "Every setting, made from `bert_dp/config/schema.py`: `a.b` is key `b` of section `a` in YAML.",
    ]
    for section, of_section in rows.items():
        title = f"## {section or 'Top level'}"
        lines += ["", title, "", "| setting | values | default | |", "|---|---|---|---|", *of_section]
    return "\n".join(lines) + "\n"


def describe_values(field: FieldInfo) -> str:
    """Describe the values of a field: a type with its bounds, or the names."""
    limits = []
    for part in field.metadata:
        kind = type(part).__name__
        if isinstance(part, AfterValidator) and isinstance(part.func, KeyOf):
            return ", ".join(f"`{name}`" for name in part.func.names)
        if kind in SIGNS:
            limits.append(f"{SIGNS[kind]} {getattr(part, kind.lower()):g}")
    return ", ".join([type_name(field.annotation), *([" and ".join(limits)] if limits else [])])


def type_name(annotation: object) -> str:
    """Describe a type in words."""
    parts = get_args(annotation)
    if annotation in TYPES:
        return TYPES[annotation]
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{value}`" for value in parts)
    if get_origin(annotation) is tuple:
        return f"list of {type_name(parts[0])}"
    named = (type_name(part) for part in parts if hasattr(part, "__mro__") or get_args(part))
    return " or ".join(dict.fromkeys(named))


if __name__ == "__main__":
    sys.stdout.write(settings_reference())
