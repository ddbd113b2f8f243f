"""`bert-dp` and `python -m launcher`: Ctrl-C during the imports is an ending like any other."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point."""
    try:
        from launcher.cli.app import main
    except KeyboardInterrupt:
        sys.exit(130)
    main()


if __name__ == "__main__":
    main()
