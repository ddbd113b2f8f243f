"""Run one rank: `python -m bert_dp.worker CONFIG --run-dir DIR`."""

import os
import sys

from bert_dp.files import LAUNCHER_PID
from bert_dp.training.rank import main

if __name__ == "__main__":
    code = main(standalone=LAUNCHER_PID not in os.environ)
    if code:  # skip the shutdown of the process group, because peers may have exited
        sys.stdout.flush()
        os._exit(code)
