"""`python -m tests.golden check|record`."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.golden.compare import differences
from tests.golden.told import told

RECORDED = Path(__file__).parent / "told.json"


def numbers() -> Any:
    """Compute the numbers of the reports."""
    with tempfile.TemporaryDirectory() as folder:
        return json.loads(json.dumps(told(Path(folder))))


def check() -> list[str]:
    """Compare the numbers with the recorded ones."""
    return differences(json.loads(RECORDED.read_text()), numbers(), "told")


if __name__ == "__main__":
    if sys.argv[1:] == ["record"]:
        RECORDED.write_text(json.dumps(numbers(), indent=1) + "\n")
    else:
        found = check()
        print("\n".join(found))
        sys.exit(bool(found))
