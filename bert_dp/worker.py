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
from typing import IO, TYPE_CHECKING

from bert_dp import record
from bert_dp.config import ConfigError, batch_plan, load_config, with_budget
from bert_dp.heartbeat import Heartbeat
from bert_dp.lifeline import (
    RunFailed,
    Signals,
    follow_launcher,
    record_error,
    redirect_output,
    show_stacks_on_signal,
)
from bert_dp.world import World, check_meeting_point, read_world

if TYPE_CHECKING:
    from bert_dp.tasks import MakeTask


def main(argv: list[str] | None = None, make_task: MakeTask | None = None) -> int:
    """Exit codes: 0 done or stopped after a checkpoint, 2 bad input, 1 failed.

    `make_task`: of a task that the configuration cannot name; None = the one that it names.
    """
    record.open_missing_descriptors()
    record.keep_private()
    signals = Signals()
    arguments = parse_arguments(argv)
    try:
        world = read_world(os.environ)
        check_meeting_point(world, os.environ)
    except ConfigError as error:
        sys.stderr.write(record.printable(f"error: {error}\n"))
        return 2
    redirect_output(world.rank)
    show_stacks_on_signal(world.rank)
    follow_launcher()
    with contextlib.ExitStack() as at_end:  # once an error has been recorded
        try:
            run(arguments, world, signals, make_task, at_end)
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


def run(
    arguments: argparse.Namespace,
    world: World,
    signals: Signals,
    make_task: MakeTask | None,
    at_end: contextlib.ExitStack,
) -> None:
    """One rank from its environment to its summary. Raises ConfigError for bad input, RunFailed on rank 0
    when all ranks have ended the run together; the other ranks then return.

    After an error the process group is left to the process's end: a peer that sees its connections close
    would otherwise report first.
    """
    started = time.monotonic()
    from bert_dp import dist, energy, parallel, setup, tasks, train
    from bert_dp.summary import write_summary

    config = load_config(arguments.config)
    run_dir = (arguments.run_dir or arguments.config.parent).resolve()
    if arguments.run_dir is not None:
        run_dir.mkdir(parents=True, exist_ok=True)
    plan = batch_plan(config, world.size)
    device = dist.choose_device(config.run.device, world)
    lock = lock_run(run_dir) if world.rank == 0 else None
    heartbeat = Heartbeat(record.heartbeat_path(run_dir, world.rank))
    placed = setup.bind(config, device, world)
    engine = parallel.engine_name(config.parallel, world.size)
    task = (make_task or tasks.make_task)(config, device)
    data = task.open_data()  # before the ranks meet: a corpus may take longer than a collective may
    config = with_budget(config, data.num_samples)
    heartbeat.progress()
    comm = dist.connect(world, device, group_of_one=engine != "single")
    heartbeat.answer_with(lambda: write_collectives(run_dir, world.rank))
    heartbeat.progress()
    setup.check_same_data(comm, data)
    resume = setup.find_resume(config, run_dir, comm, device, data, arguments.resume)
    heartbeat.progress()
    job, start = setup.assemble(
        config, plan, run_dir, comm, device, task, data, resume, heartbeat, lambda: signals.received
    )
    at_end.callback(job.saver.close)  # a checkpoint that is being written outlives an error
    setup.describe(job, placed, resume)
    setup.write_environment(job, placed)
    setup_s = time.monotonic() - started
    heartbeat.enter("compile", resume.counters.step)
    train.dry_run(job)
    setup.restore(job, resume, start)
    resume = dataclasses.replace(resume, state=None)  # or a whole state stays on the host of every rank
    del start
    dry_run_s = time.monotonic() - started - setup_s
    setup.say(comm, f"ready: set-up {setup_s:.1f} s, dry run {dry_run_s:.1f} s")
    failure = train.save(job, resume.counters, resume.counters.elapsed_s)  # before hours are spent
    if failure is None:
        clock = dist.SharedClock(comm, resume.counters.elapsed_s)
        before_j = energy.joules(device)
        outcome = train.train(job, resume.counters, clock)
        write_summary(job, resume.counters, outcome, setup_s, dry_run_s, before_j)
        failure = outcome.failure
    heartbeat.enter("done")
    job.stream.close()
    with contextlib.suppress(RuntimeError):  # all is written; a peer that has left first is no failure
        comm.barrier()  # no rank ends while another still saves
    dist.disconnect()
    heartbeat.close()
    if lock is not None:
        lock.close()
    if failure is not None and world.rank == 0:
        raise RunFailed(failure)


def write_collectives(run_dir: Path, rank: int) -> None:
    """What a reader of the heartbeat has asked for: logs/rank-N.collectives.json."""
    from bert_dp import dist

    found = {"rank": rank, "collectives": dist.recent_collectives()}
    record.write_json(run_dir / "logs" / f"rank-{rank}.collectives.json", found)


def lock_run(run_dir: Path) -> IO[str]:
    """Hold the run directory while this process lives. Raises ConfigError when another run holds it."""
    held = record.lock(run_dir / ".lock")
    if held is None:
        raise ConfigError([f"--run-dir {run_dir}: in use by another run; choose another directory"])
    return held


if __name__ == "__main__":
    code = main()
    if code:  # peers may be gone: leave without the process group's own farewell
        sys.stdout.flush()
        os._exit(code)
