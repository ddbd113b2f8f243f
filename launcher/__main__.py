"""Entry point of `bert-dp` and `python -m launcher`. Ctrl-C during the imports prints no traceback."""

import sys


def main() -> None:
    """Run the command-line interface."""
    try:
        from launcher.cli.app import main
    except KeyboardInterrupt:
        sys.exit(130)
    main()


if __name__ == "__main__":
    main()
