"""Define options, commands and records that the benchmark scripts share."""

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bert_dp.files import without_folders
from launcher.machine.environment import probe

ROOT = Path(__file__).resolve().parent.parent
OPTIONS: dict[str, dict[str, Any]] = {
    "--set": {"dest": "settings", "action": "append", "default": [], "metavar": "a.b=v"},
    "--date": {"help": "date of the record, as YYYY-MM-DD (default: today)"},
    "--json": {"type": Path, "metavar": "FILE", "help": "file for the environment and the raw figures"},
}
TUNED = ("MALLOC_", "GLIBC_", "THP_", "OMP_", "MKL_", "KMP_", "LD_PRELOAD", "TORCHINDUCTOR_")
"""Prefixes of environment variables that affect speed."""


def make_parser(description: str | None, *options: str) -> argparse.ArgumentParser:
    """Create a parser with some of OPTIONS; its help keeps the line breaks of the description."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in options:
        parser.add_argument(name, **OPTIONS[name])
    return parser


def check_names(parser: argparse.ArgumentParser, option: str, text: str, choices: Iterable[str]) -> list[str]:
    """Split a comma-separated list of names. Exits if a name is not among the choices."""
    names = text.split(",")
    if unknown := set(names) - set(choices):
        parser.error(f"{option}: {', '.join(sorted(unknown))} is not one of {', '.join(choices)}")
    return names


def set_options(settings: Iterable[str]) -> list[str]:
    """Return `--set SETTING` for each setting."""
    return [part for setting in settings for part in ("--set", setting)]


def bert_dp(*words: str) -> None:
    """Run a verb of this checkout with its output on stderr. Exits if the verb fails or is stopped."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command, environ = [sys.executable, "-m", "launcher", *words], {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, env=environ, stdout=sys.stderr, check=False)
    if done.returncode:
        print(f"error: bert-dp {shlex.join(words)} exited with code {done.returncode}", file=sys.stderr)
        sys.exit(done.returncode if done.returncode > 0 else 1)


def git(*arguments: str) -> str:
    """Run a git command in this checkout and return its output; "" if git or the repository is absent."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return "" if done.returncode else done.stdout.strip()


def commit() -> str:
    """Return the commit of this checkout from $BERT_DP_COMMIT, from git, or from the file .gpukit/COMMIT of
    a copy without .git (`make gpu-kit`). "" = unknown."""
    if found := os.environ.get("BERT_DP_COMMIT") or git("rev-parse", "HEAD"):
        return found
    file = ROOT / ".gpukit" / "COMMIT"
    return file.read_text().strip() if file.exists() else ""


def environment(date: str | None = None, **facts: Any) -> dict[str, Any]:
    """Return the contents of environment.json for this machine, with folders removed from the command, plus
    the date (None = today), the load average and `facts`."""
    machine = probe(ROOT).to_json()
    for package in ("onnx", "onnxruntime"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            machine["versions"][package] = importlib.metadata.version(package)
    return {
        **machine,
        "git_commit": commit() or None,
        "command": [without_folders(word) for word in machine["command"]],
        "date": date or datetime.date.today().isoformat(),
        "load_average": os.getloadavg(),
        **facts,
    }


def environment_of(o: argparse.Namespace, hidden: Iterable[str] = ()) -> dict[str, Any]:
    """Return `environment` with the variables that affect speed, and all options except those in `hidden`."""
    left_out = {"json", "date", *hidden}
    return environment(
        o.date,
        variables={name: value for name, value in os.environ.items() if name.startswith(TUNED)},
        settings={name: value for name, value in vars(o).items() if name not in left_out},
    )


def write(path: Path | None, record: dict[str, Any]) -> None:
    """Write the record if --json named a file."""
    if path is not None:
        path.write_text(json.dumps(record, indent=1) + "\n")
