"""Record the transcripts of all verbs, or of those that are named: `python -m tests.transcripts --record`."""

import argparse
import tempfile
from pathlib import Path

from tests.transcripts import VERBS, Stage, recorded


def main() -> None:
    """Record the verbs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", nargs="*", metavar="VERB", required=True)
    verbs = parser.parse_args().record or list(VERBS)
    with tempfile.TemporaryDirectory() as folder:
        stage = Stage(Path(folder))
        for verb in verbs:
            recorded(verb, "help").write_text(stage.help_and_refusal(verb))
            if VERBS[verb][0]:
                recorded(verb, "success").write_text(stage.success(verb))


if __name__ == "__main__":
    main()
