"""Generate docs/settings.md from the schema: `python -m tests.settings_reference > docs/settings.md`."""

import json
import sys
from typing import Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from bert_dp.config.engines import ENGINES, OPTIMIZERS
from bert_dp.config.schema import all_settings

TYPES = {int: "whole number", float: "number", bool: "true, false", str: "text", type(None): "null"}
SIGNS = {"Ge": ">=", "Gt": ">", "Le": "<=", "Lt": "<"}
KEYS = {"optim.name": (*OPTIMIZERS,), "parallel.engine": ("auto", *ENGINES)}
HEAD = """# Settings

Every setting, generated from `bert_dp/config/schema.py`: `a.b` is key `b` of section `a` in YAML.
A time is a number in the setting's unit, or a duration: `90s`, `5m`, `1.5h`, `2d`.
"""


def settings_reference() -> str:
    """Describe every setting with its type, bounds, default and meaning, as Markdown tables by section."""
    rows: dict[str, list[str]] = {"": []}
    for path, field, _ in all_settings():
        meaning = " ".join((field.description or "").split()).replace("|", "\\|")
        default = json.dumps(field.default).strip('"')
        row = f"| `{path}` | {describe_values(path, field)} | `{default}` | {meaning} |\n"
        rows.setdefault(path.rpartition(".")[0], []).append(row)
    table = "| setting | values | default | |\n|---|---|---|---|\n"
    parts = [f"\n## {section or 'Top level'}\n\n{table}{''.join(each)}" for section, each in rows.items()]
    return HEAD + "".join(parts)


def describe_values(path: str, field: FieldInfo) -> str:
    """Describe the values of a field: its type with bounds, or the allowed names."""
    if path in KEYS:
        return ", ".join(f"`{name}`" for name in KEYS[path])
    kinds = [(type(part).__name__, part) for part in field.metadata]
    limits = [f"{SIGNS[kind]} {getattr(part, kind.lower()):g}" for kind, part in kinds if kind in SIGNS]
    return ", ".join([type_name(field.annotation), *([" and ".join(limits)] if limits else [])])


def type_name(annotation: object) -> str:
    parts = get_args(annotation)
    if annotation in TYPES:
        return TYPES[annotation]
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{value}`" for value in parts)
    if get_origin(annotation) is dict:
        return f"mapping of {type_name(parts[0])}"
    if get_origin(annotation) is tuple:
        return f"list of {type_name(parts[0])}"
    named = (type_name(part) for part in parts if hasattr(part, "__mro__") or get_args(part))
    return " or ".join(dict.fromkeys(named))


if __name__ == "__main__":
    sys.stdout.write(settings_reference())
