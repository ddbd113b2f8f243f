"""Write the hashed lists of what CI installs, for the Python and the platform that run this (`make lock`).

.ci/build.lock: what builds packages that come as source. .ci/loggers.lock: the services of log.to and
what the launcher needs beside them, without torch. .ci/all.lock: everything else.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PIP_OPTIONS = ["--quiet", "--dry-run", "--ignore-installed", f"--constraint={ROOT / '.constraints.txt'}"]
BUILD = ["hatchling", "hatch-fancy-pypi-readme", "setuptools", "wheel"]
WITHOUT_THEIR_DEPENDENCIES = ["timm==1.0.31"]  # it asks for torchvision, whose wheel does not fit a CPU torch
LOGGERS = ("tensorboard", "wandb", "mlflow", "trackio")  # extras


def without_torch() -> list[str]:
    """What the launcher, the services and their tests need."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = [name for name in project["dependencies"] if not name.startswith("torch")]
    tests = [name for name in extras["test"] if name.startswith(("pytest", "hypothesis"))]
    return [*needed, *tests, *(name for extra in LOGGERS for name in extras[extra])]


def resolve(*requirements: str) -> list[dict[str, Any]]:
    """What pip would install into an empty environment, as its report says it."""
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        subprocess.run(
            [sys.executable, "-m", "pip", "install", *PIP_OPTIONS, f"--report={report.name}", *requirements],
            check=True,
        )
        return json.loads(Path(report.name).read_text())["install"]


def write(path: Path, installs: list[dict[str, Any]]) -> None:
    """`name==version --hash=sha256:...`, a line each, by name; our own package has no archive."""
    lines = {
        f"{i['metadata']['name'].lower()}=={i['metadata']['version']} "
        f"--hash=sha256:{i['download_info']['archive_info']['hashes']['sha256']}\n"
        for i in installs
        if "archive_info" in i["download_info"]
    }
    path.write_text("".join(sorted(lines)))


if __name__ == "__main__":
    write(ROOT / ".ci/build.lock", resolve(*BUILD))
    write(ROOT / ".ci/loggers.lock", resolve(*without_torch()))
    write(
        ROOT / ".ci/all.lock",
        resolve("--editable", f"{ROOT}[dev]") + resolve("--no-deps", *WITHOUT_THEIR_DEPENDENCIES),
    )
