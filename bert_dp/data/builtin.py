"""Read the corpus in every CPython: docstrings of the standard library and help topics. Torch-free."""

from __future__ import annotations

import ast
import functools
import sysconfig
import warnings
from pathlib import Path

from bert_dp.config import ConfigError, Issue

# the library's own tests are not documentation, and site-packages differs from machine to machine
NOT_DOCUMENTATION = frozenset(
    ("site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "turtledemo", "__pycache__")
)


@functools.cache
def documents() -> tuple[str, ...]:
    """Return docstrings of the standard library and help topics, about 2 MB; parsed, never run."""
    root = Path(sysconfig.get_paths()["stdlib"])
    texts: list[str] = []
    for path in sorted(root.rglob("*.py")):
        if not NOT_DOCUMENTATION.isdisjoint(path.relative_to(root).parts):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # old escape sequences in the library
                tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, OSError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                texts.append(ast.get_docstring(node) or "")
            elif isinstance(node, ast.Dict) and path.name == "topics.py":
                texts += [
                    v.value for v in node.values if isinstance(v, ast.Constant) and isinstance(v.value, str)
                ]
    if sum(map(len, texts)) < 100_000:
        message = f"builtin: {root} holds no library sources"
        raise ConfigError([Issue("data.sources", "not_found", message, hint="name a text file instead")])
    return tuple(texts)
