"""Display the progress of a run that bert-dp's launcher did not start, and write its report.

Rank 0 starts `python -m launcher.run.follow RUN RANKS LOCAL_RANKS` as a child process. When rank 0 exits, the
child's standard input closes."""

import os
import select
import sys
import time
from pathlib import Path

import psutil

from bert_dp import files
from bert_dp.config import ConfigError, load_config
from bert_dp.files.ledger import read_ledger
from bert_dp.files.models import Failure
from launcher.log import console as make_console
from launcher.log import logger, masked_command
from launcher.machine import environment
from launcher.run.loggers import Loggers
from launcher.run.processes import POLL_S, outcome_of
from launcher.run.train import close_run
from launcher.watch import failure
from launcher.watch.display import Display


def main(run_dir: Path, ranks: int, here: int) -> None:
    """Display the run until rank 0 exits. Then complete summary.json, and write and show the report."""
    os.nice(19)  # gives priority to the ranks
    rank_0, memory, console = psutil.Process(os.getppid()), failure.MemoryWatch(), make_console()
    began_s, command = rank_0.create_time(), masked_command(rank_0.cmdline())
    config, log = load_config(run_dir / "config.yaml"), logger(console, as_json=False)
    machine = {**environment.probe(run_dir).to_json(), "command": command, "launcher": None}
    files.write_json(run_dir / "environment.json", machine)  # rank 0 adds its device and library versions
    log(f"run directory: {run_dir}")
    with Loggers(run_dir, config.log.to, log), Display(run_dir, console, config) as display:
        os.write(0, b"\n")  # tells rank 0 to continue, because the display is ready
        while not select.select([0], [], [], POLL_S)[0]:
            display.poll()
        display.poll()
    unknown = Failure(kind="no_cause", message="rank 0 exited without a summary")
    gone = failure.RankExit(0, None, time.monotonic_ns())  # only the parent of rank 0 can read the exit code
    logs = run_dir / "logs"
    cause = failure.first_cause(logs, "", (gone,), failure.recorded_errors(logs)) or unknown
    cause = failure.explain(cause, run_dir, ranks, memory.facts(), here)
    ended = outcome_of(run_dir, cause, unknown, ())
    facts: dict[str, object] = {"command_s": time.time() - began_s}
    try:
        facts["spent"] = read_ledger(run_dir).total()
    except ConfigError as error:
        log(f"warning: {error}")
    close_run(run_dir, ended.failure, console, **facts)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
