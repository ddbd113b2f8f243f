"""Run one rank: `python -m bert_dp.worker RUN/config.yaml`.

torchrun, accelerate launch, deepspeed, srun or mpirun starts this command. `bert-dp train` uses one of the
first three.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from bert_dp import files
from bert_dp.config import ConfigError, Issue, absolute, batch_layout, load_config, with_budget
from bert_dp.config.checks import parse_profile, profile_issues, rank_sets
from bert_dp.config.own_code import code_issues
from bert_dp.config.schema import METERED
from bert_dp.files.ledger import EXIT_S, Ledger, Spending, budget_issues
from bert_dp.files.models import Failure, kind_of_error
from bert_dp.training import process
from bert_dp.training.follower import Follower
from bert_dp.training.process import Signals, World

if TYPE_CHECKING:
    from bert_dp.tasks import MakeTask

SWITCH_S = 5e-4  # thread switch interval; Python's default (5 ms) delays prefetching when steps are short
EXIT_WAIT_S = 60.0  # maximum wait for a killed process to exit; a file server or a GPU may delay its exit


def run_process() -> None:
    """Run one rank in this process; exit with the code that `main` returns."""
    code = main(standalone=files.LAUNCHER_PID not in os.environ)
    if code:  # skip the exit handlers, because torch's may wait minutes for its compile workers
        sys.stdout.flush()
        os._exit(code)
    process.exit_process(0)


def main(
    argv: list[str] | None = None, make_task: MakeTask | None = None, *, standalone: bool = False
) -> int:
    """Run one rank. Return 0 if `run` returned, 2 for bad input, 1 for any other error. `make_task`: creates
    a task that the configuration cannot select; None = create the configured task.
    `standalone`: bert-dp's launcher did not start the run, so rank 0 manages and displays it."""
    files.set_private_umask()
    signals = Signals()
    signals.catch()
    arguments = parse_arguments(argv)
    try:
        world = process.read_world(os.environ)
        process.check_rendezvous(world, os.environ)
    except ConfigError as error:
        sys.stderr.write(files.printable(f"error: {error}\n"))
        return 2
    process.redirect_output(world.rank)
    process.follow_launcher()
    sys.setswitchinterval(SWITCH_S)
    with contextlib.ExitStack() as at_end:  # its callbacks run after any error has been recorded
        try:
            run(arguments, world, signals, make_task, at_end, standalone=standalone)
        except BaseException as error:
            record_error(world.rank, error)
            return 2 if isinstance(error, ConfigError) else 1
    return 0


def record_error(rank: int, error: BaseException) -> None:
    """Write the error to $BERT_DP_LOG_DIR/rank-N.error.json, then to the log. The order matters: when the
    launcher finds the file, it stops showing the log, so that it can report the cause first."""
    secrets = files.secret_values(os.environ)  # a library's error message may contain secrets
    folder = os.environ.get(files.LOG_DIR)
    if folder:
        path = Path(folder) / f"rank-{rank}.error.json"
        with contextlib.suppress(OSError):  # if the disk is full, the error goes only to the log
            files.write_json(path, failure_of(rank, error, secrets).model_dump(mode="json"))
    if isinstance(error, ConfigError):
        text = "".join(f"error: {issue}\n" for issue in error.issues)
    elif isinstance(error, process.RunFailed):  # the message gives the cause, so a traceback would not help
        text = f"error: {error}\n"
    else:
        text = "".join(traceback.format_exception(error))
    sys.stderr.write(files.safe(files.hide(text, secrets)))


def failure_of(rank: int, error: BaseException, secrets: Iterable[str]) -> Failure:
    """Describe an exception, with the innermost frame of bert-dp's or the user's code."""
    agreed = isinstance(error, process.RunFailed)
    frames = [] if agreed else traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if files.is_own_code(frame.filename)]
    frame = (own or frames)[-1] if frames else None
    name, text = type(error).__name__, files.hide(str(error), secrets)
    issues = [i.to_json() for i in error.issues] if isinstance(error, ConfigError) else []
    return Failure(
        kind=kind_of_error(error),
        message=text if agreed else f"{name}: {text}" if text else name,
        rank=rank,
        time_ns=time.monotonic_ns(),  # time since boot: one clock for all processes of a node, never set back
        error_type=name,
        where=f"{frame.filename}:{frame.lineno}" if frame else None,
        source=files.hide(f"in {frame.name}: {frame.line}", secrets) if frame and frame.line else None,
        issues=[
            {k: files.hide(v, secrets) if isinstance(v, str) else v for k, v in i.items()} for i in issues
        ],
        agreed=agreed,
    )


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bert_dp.worker", description="Run one rank.")
    parser.add_argument("config", type=Path, help="YAML file with a complete configuration")
    parser.add_argument("--run-dir", type=Path, help="run directory; default: the YAML file's directory")
    parser.add_argument("--resume", default="auto", help="auto | never | path of a checkpoint or run")
    parser.add_argument("--allow-code", action="store_true", help="run the code named by task and optim.name")
    parser.add_argument("--profile", metavar="FIRST:END", help="steps to profile; 10:13 means 10, 11 and 12")
    parser.add_argument("--profile-ranks", default="0", metavar="N,...", help="ranks to profile; default: 0")
    # passed by deepspeed
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def run(
    arguments: argparse.Namespace,
    world: World,
    signals: Signals,
    make_task: MakeTask | None,
    at_end: contextlib.ExitStack,
    *,
    standalone: bool,
) -> None:
    """Run one rank, from loading its configuration to writing its summary. Raises ConfigError for bad input.
    If all ranks have agreed that the run failed, rank 0 raises RunFailed and the others return. After an
    error, the process group stays open until the process exits, so that no other rank reports closed
    connections before this rank reports the error."""
    started = time.monotonic()
    from bert_dp import parallel, tasks
    from bert_dp.training import build, devices, distributed
    from bert_dp.training.loop import Rank, dry_run, save, train
    from bert_dp.training.summary import write_summary

    config = absolute(load_config(arguments.config))
    if issues := code_issues(config, allowed=arguments.allow_code):
        raise ConfigError(issues)
    run_dir = (arguments.run_dir or arguments.config.parent).resolve()
    if arguments.run_dir is not None:
        run_dir.mkdir(parents=True, exist_ok=True)
    layout = batch_layout(config, world.size)
    plan = None
    if arguments.profile is not None:
        plan = parse_profile(arguments.profile, arguments.profile_ranks)
        if issues := profile_issues(plan, world.size, steps=config.schedule.steps):
            raise ConfigError(issues)
    device = devices.choose_device(config.run.device, world)
    if world.rank == 0:
        lock_run(run_dir, at_end)
    follower = at_end.enter_context(Follower(run_dir, world)) if standalone and world.rank == 0 else None
    if world.rank == 0 and files.LAUNCHER_PID not in os.environ:  # otherwise the launcher writes the ledger
        if issues := budget_issues(config, run_dir, []):
            raise ConfigError(issues)
        at_end.enter_context(Ledger(run_dir, world.size, config.run))
    heartbeats = os.environ.get(files.HEARTBEATS)
    heartbeat = process.HeartbeatWriter(files.heartbeat_path(run_dir, world.rank, heartbeats))
    devices.use_device(device, deterministic=config.run.deterministic)
    engine = parallel.engine_name(config.parallel, world.size)
    task = (make_task or tasks.make_task)(config, device)
    data = task.open_data()  # before the rendezvous: building shards may outlast a collective's timeout
    config = with_budget(config, data.num_samples)
    heartbeat.progress()
    store, places = distributed.rendezvous(world, device)
    distributed.check_places(places, rank_sets(config, world.size))
    placed = devices.set_affinity(device, world, places)
    comm = distributed.connect(world, device, store, group_of_one=engine != "single")

    def report(progress: int) -> None:
        """Write logs/rank-N.collectives.json. `progress`: current progress count in the heartbeat."""
        facts = {"pid": os.getpid(), "progress": progress, "collectives": distributed.recent_collectives()}
        files.write_json(run_dir / "logs" / f"rank-{world.rank}.collectives.json", facts)

    heartbeat.on_silence(config.run.hang_after_s / 2, report)
    heartbeat.progress()
    build.check_same_data(comm, data)
    rank = Rank(config, layout, run_dir, comm, device, task, data, heartbeat, signals)
    resumed = build.select_checkpoint(rank, arguments.resume)
    if standalone:  # all checks have passed, so files may be written now
        if follower is not None:
            follower.start(config)
        comm.barrier()
        os.environ[files.LOG_DIR] = str(run_dir / "logs")
        process.redirect_output(world.rank)
    heartbeat.progress()
    trainer, state, tensors = build.build_trainer(rank, resumed, plan)
    at_end.callback(trainer.checkpointer.close)  # complete a pending checkpoint after an error
    build.describe(trainer, placed, resumed)
    build.write_environment(trainer, placed)
    setup_s = time.monotonic() - started
    heartbeat.enter("compile", state.step)
    dry_run(trainer, tensors)
    devices.restart_peak_memory(device)
    build.cut_records_back(trainer, state, resumed)
    del resumed, tensors  # otherwise every rank would keep an unsharded state in host memory
    dry_run_s = time.monotonic() - started - setup_s
    trainer.log_rank0(f"ready: set-up {setup_s:.1f} s, trial step {dry_run_s:.1f} s")
    before_s = time.monotonic()
    failure = save(trainer, state, state.elapsed_s, wait=True)  # detect a failing save before training starts
    if failure is None:
        unit = config.schedule.unit
        spending: Spending | None = None
        if unit in METERED:
            # time reserved for the last save and the exit. Exiting also stops the processes that set-up
            # started, so it takes longer after a long set-up.
            end_s = time.monotonic() - before_s + max(EXIT_S, setup_s / 2)
            spending = Spending(run_dir, unit, getattr(config.schedule, unit), end_s)
        before_j = devices.joules(device)
        with process.gc_paused():
            result = train(trainer, state, distributed.SharedClock(comm, state.elapsed_s, spending=spending))
        write_summary(trainer, state, result, setup_s, dry_run_s, before_j)
        failure = result.failure
    heartbeat.enter("done")
    trainer.stream.close()
    with contextlib.suppress(RuntimeError):  # this rank's files are written; an exited peer does no harm
        comm.barrier()  # let no rank exit while another rank is saving
    distributed.disconnect()
    heartbeat.close()
    if failure is not None and world.rank == 0:
        raise process.RunFailed(failure.message, failure.kind)


def lock_run(run_dir: Path, until: contextlib.ExitStack) -> None:
    """Lock the run directory; closing `until` releases the lock. Raises ConfigError if another run has locked
    it. Under bert-dp's launcher, which holds RUN_LOCK itself, lock only .lock, and wait up to EXIT_WAIT_S for
    it. The wait is needed because a rank 0 that the launcher has killed holds .lock until it has exited."""
    has_launcher = files.LAUNCHER_PID in os.environ
    end = time.monotonic() + (EXIT_WAIT_S if has_launcher else 0.0)
    for name in (".lock",) if has_launcher else (files.RUN_LOCK, ".lock"):
        while (lock := files.lock(run_dir / name)) is None:
            if time.monotonic() >= end:
                message, hint = f"{run_dir} is in use by another run", "choose another directory"
                raise ConfigError([Issue("--run-dir", "exists", message, str(run_dir), hint=hint)])
            time.sleep(0.2)
        until.enter_context(lock)
