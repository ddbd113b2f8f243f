"""What the benchmark scripts share of their command line and their record."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bert_dp.files import without_folders
from launcher.machine.environment import PACKAGES, probe

ROOT = Path(__file__).resolve().parent.parent
OPTIONS: dict[str, dict[str, Any]] = {
    "--set": {"dest": "settings", "action": "append", "default": [], "metavar": "a.b=v"},
    "--date": {"help": "for the record, as YYYY-MM-DD (default: today)"},
    "--json": {"type": Path, "metavar": "FILE", "help": "write environment and raw figures here"},
}
TUNED = ("MALLOC_", "GLIBC_", "THP_", "OMP_", "MKL_", "KMP_", "LD_PRELOAD", "TORCHINDUCTOR_")
"""Beginnings of the environment variables that change a speed."""


def make_parser(description: str | None, *options: str) -> argparse.ArgumentParser:
    """A parser with some of OPTIONS, which shows the description as it is laid out."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in options:
        parser.add_argument(name, **OPTIONS[name])
    return parser


def check_names(parser: argparse.ArgumentParser, option: str, text: str, choices: Iterable[str]) -> list[str]:
    """The names of a list with commas; ends the program where one is not among the choices."""
    names = text.split(",")
    if unknown := set(names) - set(choices):
        parser.error(f"{option}: {', '.join(sorted(unknown))} is not one of {', '.join(choices)}")
    return names


def set_options(settings: Iterable[str]) -> list[str]:
    """`--set SETTING` for each."""
    return [part for setting in settings for part in ("--set", setting)]


def bert_dp(*words: str) -> None:
    """Run a verb of this checkout, its output on stderr; end the program where it fails or was stopped."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command, environ = [sys.executable, "-m", "launcher", *words], {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, env=environ, stdout=sys.stderr, check=False)
    if done.returncode:
        print(f"error: bert-dp {shlex.join(words)} ended with {done.returncode}", file=sys.stderr)
        sys.exit(done.returncode if done.returncode > 0 else 1)


def git(*arguments: str) -> str:
    """Output of a git command in this checkout; "" where git or the repository is absent."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return "" if done.returncode else done.stdout.strip()


def commit() -> str:
    """The commit of this checkout: $BERT_DP_COMMIT, git's answer, or the file COMMIT of a copy without .git
    (`make gpu-kit`). "" = unknown."""
    if found := os.environ.get("BERT_DP_COMMIT") or git("rev-parse", "HEAD"):
        return found
    file = ROOT / ".gpukit" / "COMMIT"
    return file.read_text().strip() if file.exists() else ""


def environment(date: str | None = None, packages: Iterable[str] = PACKAGES, **facts: Any) -> dict[str, Any]:
    """The command without folders, the date (None: today's), the machine, the commit, the versions of those
    packages that are installed, and `facts`."""
    versions = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu)
    script = Path(sys.argv[0]).name
    return {
        "command": " ".join(["python", f"benchmarks/{script}", *map(without_folders, sys.argv[1:])]),
        "date": date or datetime.date.today().isoformat(),
        "cpu": cpu,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "versions": versions,
        "commit": commit(),
        **facts,
    }


def probed_machine(date: str | None) -> dict[str, Any]:
    """All that a run's environment.json says of this machine, with the command without folders."""
    machine = probe(ROOT).to_json()
    command = [without_folders(word) for word in machine["command"]]
    return {
        **machine,
        "git_commit": commit() or None,
        "command": command,
        "date": date or datetime.date.today().isoformat(),
    }


def environment_of(
    o: argparse.Namespace, packages: Iterable[str] = PACKAGES, hidden: Iterable[str] = ()
) -> dict[str, Any]:
    """`environment` with the GPU, the variables that change a speed, and all options but those `hidden`."""
    gpu = None
    if getattr(o, "device", "cpu") == "cuda":
        import torch

        gpu = torch.cuda.get_device_name()
    left_out = {"json", "date", *hidden}
    return environment(
        o.date,
        packages,
        gpu=gpu,
        variables={name: value for name, value in os.environ.items() if name.startswith(TUNED)},
        settings={name: value for name, value in vars(o).items() if name not in left_out},
    )


def write(path: Path | None, record: dict[str, Any]) -> None:
    """The record, where --json names a file."""
    if path is not None:
        path.write_text(json.dumps(record, indent=1) + "\n")
