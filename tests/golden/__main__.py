"""`python -m tests.golden check|record [SECTION...]`."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.golden import made
from tests.golden.compare import differences
from tests.golden.values import QUICK, SLOW

EXPECTED = Path(__file__).parent / "expected"


def values(section: str) -> Any:
    """What today's code makes of a fresh copy."""
    with tempfile.TemporaryDirectory() as folder, made.two_cores():
        return {**QUICK, **SLOW}[section](made.place(Path(folder) / "golden"))


def check(section: str) -> list[str]:
    """What differs from what was recorded."""
    expected = json.loads((EXPECTED / f"{section}.json").read_text())
    try:
        got = json.loads(json.dumps(values(section)))
    except AssertionError as error:  # a verb gave no answer
        return [f"{section}: {error}"]
    return differences(expected, got, section)


def record(section: str) -> list[str]:
    """Write what is expected from now on."""
    EXPECTED.mkdir(exist_ok=True)
    (EXPECTED / f"{section}.json").write_text(json.dumps(values(section), indent=1) + "\n")
    return []


def main(verb: str, sections: list[str]) -> int:
    found = []
    for section in sections or [*QUICK, *SLOW]:
        found += {"check": check, "record": record}[verb](section)
    print("\n".join(found))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
