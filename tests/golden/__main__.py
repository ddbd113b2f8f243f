"""`python -m tests.golden check|record`."""

import difflib
import json
import sys
import tempfile
from pathlib import Path

from tests.golden.told import told

RECORDED = Path(__file__).parent / "told.json"


def numbers() -> str:
    """Compute the numbers of the reports, as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        return json.dumps(told(Path(folder)), indent=1) + "\n"


def check() -> list[str]:
    """Compare the numbers with the recorded ones, line by line."""
    before, now = RECORDED.read_text().splitlines(), numbers().splitlines()
    return list(difflib.unified_diff(before, now, "recorded", "now", lineterm="", n=1))


if __name__ == "__main__":
    if sys.argv[1:] == ["record"]:
        RECORDED.write_text(numbers())
    else:
        found = check()
        print("\n".join(found))
        sys.exit(bool(found))
