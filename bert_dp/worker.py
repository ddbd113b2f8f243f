"""main() of one rank: `python -m bert_dp.worker RUN/config.yaml`. Reads like a table of contents.

torchrun, accelerate launch and deepspeed start it, by `bert-dp train` or without it; so do srun and mpirun.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import sys
import time
from pathlib import Path
from typing import IO

from bert_dp import record
from bert_dp.config import ConfigError, batch_plan, load_config
from bert_dp.lifeline import Signals, follow_launcher, record_error, redirect_output
from bert_dp.world import World, check_meeting_point, read_world


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 done or stopped after a checkpoint, 2 bad input, 1 failed."""
    signals = Signals()
    arguments = parse_arguments(argv)
    try:
        world = read_world(os.environ)
        check_meeting_point(world, os.environ)
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    redirect_output(world.rank)
    follow_launcher()
    try:
        run(arguments, world, signals)
    except ConfigError as error:
        record_error(world.rank, error)
        return 2
    except BaseException as error:
        record_error(world.rank, error)
        return 1
    return 0


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bert_dp.worker", description="One rank of a run.")
    parser.add_argument("config", type=Path, help="resolved configuration, usually RUN/config.yaml")
    parser.add_argument("--run-dir", type=Path, help="default: the directory of the configuration")
    parser.add_argument("--resume", default="auto", help="auto | never | path of a checkpoint or run")
    # deepspeed passes it
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def run(arguments: argparse.Namespace, world: World, signals: Signals) -> None:
    """One rank from its environment to its summary. Raises ConfigError for bad input.

    After an error the process group is left to the process's end: a peer that sees its connections close
    would otherwise report first.
    """
    started = time.monotonic()
    from bert_dp import dist, parallel, setup, train
    from bert_dp.summary import write_summary

    config = load_config(arguments.config)
    run_dir = (arguments.run_dir or arguments.config.parent).resolve()
    plan = batch_plan(config, world.size)
    device = dist.choose_device(config.run.device, world)
    lock = lock_run(run_dir) if world.rank == 0 else None
    placed = setup.bind(config, device, world)
    engine = parallel.engine_name(config.parallel, world.size)
    comm = dist.connect(world, device, group_of_one=engine != "single")
    corpus = setup.open_data(config, comm)
    resume = setup.find_resume(config, run_dir, comm, device, corpus, arguments.resume)
    job, start = setup.assemble(config, plan, run_dir, comm, device, corpus, resume, lambda: signals.received)
    setup.describe(job, placed, resume)
    setup.write_environment(job, placed)
    setup_s = time.monotonic() - started
    train.dry_run(job)
    setup.restore(job, resume, start)
    resume = dataclasses.replace(resume, state=None)  # or a whole state stays on the host of every rank
    del start
    dry_run_s = time.monotonic() - started - setup_s
    setup.say(comm, f"ready: set-up {setup_s:.1f} s, dry run {dry_run_s:.1f} s")
    clock = dist.SharedClock(comm, resume.counters.elapsed_s)
    outcome = train.train(job, resume.counters, clock)
    job.stream.close()
    write_summary(job, resume.counters, outcome, corpus.manifest, setup_s, dry_run_s)
    with contextlib.suppress(RuntimeError):  # all is written; a peer that has left first is no failure
        comm.barrier()  # no rank ends while another still saves
    dist.disconnect()
    if lock is not None:
        lock.close()


def lock_run(run_dir: Path) -> IO[str]:
    """Hold the run directory while this process lives. Raises ConfigError when another run holds it."""
    run_dir.mkdir(parents=True, exist_ok=True)
    held = record.lock(run_dir / ".lock")
    if held is None:
        raise ConfigError([f"--run-dir {run_dir}: in use by another run; choose another directory"])
    return held


if __name__ == "__main__":
    code = main()
    if code:  # peers may be gone: leave without the process group's own farewell
        sys.stdout.flush()
        os._exit(code)
