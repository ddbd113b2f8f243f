"""One trial: `python -m launcher.run.trial_process DIR --nproc N` trains DIR/config.yaml like `train` does.

A process of its own, so that several run at a time and none can spoil the next.
"""

from __future__ import annotations

import argparse
import resource
import sys
from pathlib import Path

from bert_dp.config import load_config
from launcher.run import processes
from launcher.watch import heartbeats


def main(argv: list[str] | None = None) -> int:
    """Run the trial. Returns the exit code of `processes.run`."""
    parser = argparse.ArgumentParser(
        prog="python -m launcher.run.trial_process", description="One short run of a verb."
    )
    parser.add_argument("directory", type=Path, help="holds config.yaml")
    parser.add_argument("--nproc", type=int, required=True, help="ranks")
    parser.add_argument("--launcher", default="torchrun", help="torchrun, accelerate or deepspeed")
    parser.add_argument("--on-gpu", action="store_true", help="a GPU per rank")
    parser.add_argument("--cores", help="that the ranks share, by commas; default: all")
    parser.add_argument("--data-bytes", type=int, help="limit of each process's writable private memory")
    arguments = parser.parse_args(argv)
    if arguments.data_bytes is not None:  # an allocation fails before the kernel has to kill
        resource.setrlimit(resource.RLIMIT_DATA, (arguments.data_bytes, arguments.data_bytes))
    run = load_config(arguments.directory / "config.yaml").run
    watched = heartbeats.Watch(
        arguments.directory, print, hang_after_s=run.hang_after_s, end_hung_after_s=run.end_hung_after_s
    )
    result = processes.run(
        arguments.directory,
        arguments.nproc,
        "never",
        lambda: None,
        launcher=arguments.launcher,
        on_gpu=arguments.on_gpu,
        watch=watched,
        cores=[int(core) for core in arguments.cores.split(",")] if arguments.cores else None,
    )
    if result.failure is not None:
        print(result.failure.headline())  # noqa: T201 (the trial's log)
    return result.exit_code


if __name__ == "__main__":
    sys.exit(main())
