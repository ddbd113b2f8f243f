"""Find, check, hash and load custom code that a setting names as `FILE.py:function`. Torch-free."""

import ast
import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bert_dp.config.errors import Issue, read_regular, sha256
from bert_dp.config.schema import CODE, Config

MAX_CODE_BYTES = 10_000_000


def code_of(config: Config) -> dict[str, str]:
    """Return {setting: value} for the settings whose value is `FILE.py:function`."""
    named = {"task": config.task, "optim.name": config.optim.name}
    return {setting: text for setting, text in named.items() if text is not None and CODE.fullmatch(text)}


def code_issues(config: Config, *, allowed: bool) -> list[Issue]:
    """Check that custom code is `allowed` and defines the functions in the settings. No code is executed."""
    issues = []
    for setting, text in code_of(config).items():
        file, function = split_code(text)
        if not allowed:
            message, hint = f"{text} would be executed", "read the file, then add --allow-code"
            issues.append(Issue(setting, "unsupported", message, text, "--allow-code", hint))
        elif not file.is_file():
            issues.append(Issue(setting, "not_found", f"no such file: {file}", text))
        else:
            try:
                tree = ast.parse(read_regular(file, MAX_CODE_BYTES))
            except (SyntaxError, ValueError) as error:
                issues.append(Issue(setting, "damaged", f"{file} is not valid Python ({error})", text))
                continue
            if function not in {getattr(node, "name", None) for node in tree.body}:
                issues.append(Issue(setting, "not_found", f"{file} does not define {function}", text))
    return issues


def split_code(text: str) -> tuple[Path, str]:
    """Split `FILE.py:function` into file and function name."""
    file, _, function = text.rpartition(":")
    return Path(file), function


def code_hashes(config: Config) -> dict[str, str]:
    """Return {setting: SHA-256 of its code file}. Raises OSError."""
    return {setting: sha256(split_code(text)[0]) for setting, text in code_of(config).items()}


def changed_code(saved: Mapping[str, str], config: Config) -> list[Issue]:
    """Find code files that have changed since a checkpoint was saved. `saved`: its {setting: hash}."""
    return [
        Issue(
            setting,
            "conflict",
            f"the SHA-256 of the code is {digest[:16]}, but the checkpoint records {saved[setting][:16]}",
            digest,
        )
        for setting, digest in code_hashes(config).items()
        if saved.get(setting) not in (None, digest)
    ]


def load_function(text: str) -> Callable[..., Any]:
    """Execute the file of `FILE.py:function` and return the function. The caller must check --allow-code."""
    file, function = split_code(text)
    name = f"own_code_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None  # Python has a loader for files that end in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module in sys.modules
    spec.loader.exec_module(module)
    loaded: Callable[..., Any] = getattr(module, function)
    return loaded
