"""Run many short training runs (trials) in child processes, one at a time on each set of devices (slot).

Each process is `python -m launcher.run.trials DIR RANKS '{fields of RankStart}' [BYTES]`. BYTES limits its
memory. A trial that finished in an earlier start of the command is not repeated; its records are checked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Literal

from bert_dp import files
from bert_dp.config import Config, ConfigError, dump_config, load_config, resolve
from bert_dp.config.checks import decide_precision, residual_issues
from bert_dp.files.models import FailureKind, Summary
from bert_dp.files.reaper import reaper
from launcher import children, results
from launcher.log import Log, print_error
from launcher.machine.environment import Environment
from launcher.report.formats import format_duration
from launcher.results import MeasureStatus
from launcher.run import processes
from launcher.run.starters import RankStart
from launcher.watch import hangs

TrialStatus = Literal["ok", "oom", "failed"]
OUTSIDE: tuple[FailureKind, ...] = ("disk", "peer_gone")  # kinds of failure that the settings do not cause
KILLS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # signals from outside the run
PARTS = ("data_wait_s", "forward_backward_s", "compute_before_reduction_s", "optimizer_s", "step_s", "host_s")
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError)  # errors that read_repeat may raise


@dataclasses.dataclass(frozen=True)
class Repeat:
    """Step times, memory and loss curve of one run."""

    name: str
    parts: dict[str, list[list[float]]]  # name in PARTS -> seconds, [rank][step]
    memory_gib: list[float]  # peak of each rank
    # reduction time that does not overlap the backward pass, sampled by DDP on rank 0; [] without DDP
    exposed_s: list[float]
    curve: list[tuple[int, float]]  # (tokens, loss) of each logged step with a finite loss
    summary: Summary


def read_summary(directory: Path) -> Summary | None:
    """Read the summary.json of a run; return None if it is absent or damaged."""
    return results.find(directory / "summary.json", Summary)


def heldout_losses(directory: Path) -> dict[int, float]:
    """Read the held-out losses (nats) of a run, by step."""
    evaluations = files.read_lines(directory / "evals.jsonl")
    return {line["step"]: line["loss"] for line in evaluations if "loss" in line}


def ended(directory: Path) -> TrialStatus | None:
    """Return the status of a run, or None if the run has not finished or was stopped by a signal."""
    summary = read_summary(directory)
    if summary is None or summary.signal:
        return None
    if summary.status == "done":
        return "ok"
    return "oom" if summary.out_of_memory else "failed"


def cause(directory: Path) -> str:
    """Return the reason why a run did not complete."""
    summary = read_summary(directory)
    if summary is None:
        return "both attempts ended without writing summary.json"
    return summary.failure.headline() if summary.failure else "its records are incomplete"


def failure_kind(directory: Path) -> FailureKind:
    """Return the kind of failure of a run that did not complete."""
    summary = read_summary(directory)
    return summary.failure.kind if summary and summary.failure else "no_cause"


def read_repeat(directory: Path, ranks: int, warm_up: int, steps: int) -> Repeat:
    """Read the records of a run of `warm_up` + `steps` steps; the times exclude the warm-up. Raise an error
    in UNREADABLE if a rank recorded a different number of steps or if a value is damaged."""
    parts: dict[str, list[list[float]]] = {name: [] for name in PARTS}
    memory, exposed = [], []
    for rank in range(ranks):
        path = directory / "steps" / f"rank-{rank}.jsonl"
        lines = list(files.read_lines(path))
        for name in PARTS:
            seconds = [float(s) for s in itertools.chain.from_iterable(line[name] for line in lines)]
            if len(seconds) != warm_up + steps:
                raise ValueError(f"{path}: {len(seconds)} steps instead of {warm_up + steps}")
            parts[name].append(seconds[warm_up:])
        memory.append(max(float(line["peak_memory_gib"]) for line in lines))
        if rank == 0:
            samples = [line.get("ddp_exposed_s") for line in lines if line["step"] > warm_up]
            exposed = [float(s) for s in samples if s is not None]
    if min(min(each) for each in parts["step_s"]) <= 0:
        raise ValueError(f"{directory}: a step took no time")
    logged = files.read_lines(directory / "metrics.jsonl")
    curve = [(int(line["tokens"]), float(line["loss"])) for line in logged if line["loss"] is not None]
    summary = read_summary(directory) or Summary(status="done")
    return Repeat(directory.name, parts, memory, exposed, curve, summary)


PROGRESS_S = 30.0  # interval between progress lines
SCRATCH = ".scratch"
TRIAL_FILE = "trial.json"  # file that holds the duration of a finished trial
TRIES = 2  # maximum attempts at a trial; only an outside cause or incomplete records lead to a second
LOG_LINES = 10  # maximum number of lines in the metrics.jsonl of a timed run


class Stopped(Exception):
    """Raised after stop signal `number` has ended the trials."""

    def __init__(self, number: int):
        self.number = number


class TrialsFailed(Exception):
    """Raised if the trials yield no result. The message gives the reason."""


@dataclasses.dataclass(frozen=True)
class SearchOutcome:
    """Outcome of all trials of a command."""

    status: MeasureStatus
    reason: str | None = None
    exit_code: int = 0


def run_to_end(run: Callable[[], None], out: Path, log: Log) -> SearchOutcome:
    """Call `run`, which runs the trials of a command, and return their outcome. `out`: output directory."""
    try:
        run()
    except Stopped as stop:
        log(f"stopped: the results so far are in {out}; the same command resumes from them")
        return SearchOutcome("partial", exit_code=128 + stop.number)
    except TrialsFailed as failed:
        return SearchOutcome("failed", str(failed), 1)
    return SearchOutcome("complete")


@dataclasses.dataclass(frozen=True)
class Slot:
    """Devices for one trial at a time: CPU cores or GPUs."""

    cores: tuple[int, ...] | None = None  # None = all
    gpus: tuple[str, ...] | None = None  # names as in CUDA_VISIBLE_DEVICES; None = all


def device_slots(ranks: int, *, gpus: int, cores: int, most: int) -> list[Slot]:
    """Divide the devices into at most `most` slots for trials of `ranks` ranks each. `gpus`: number of
    visible GPUs; 0 = trials run on CPU cores. `cores`: number of usable cores."""
    count = max(1, min((gpus or cores) // ranks, most))
    if gpus:
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = [n.strip() for n in shown.split(",")][:gpus] if shown else [str(k) for k in range(gpus)]
        return [Slot(gpus=tuple(names[k * ranks : (k + 1) * ranks])) for k in range(count)]
    usable = sorted(os.sched_getaffinity(0))
    share = len(usable) // count
    return [Slot(cores=tuple(usable[k * share : (k + 1) * share])) for k in range(count)]


@dataclasses.dataclass(frozen=True)
class Trial:
    """One run of `config` on `ranks` ranks in its own directory."""

    directory: Path
    config: Config
    ranks: int
    cores: tuple[int, ...] | None = None  # cores that its ranks share; None = cores of the slot
    data_bytes: int | None = None  # limit on each process's writable private memory; None = no limit

    @property
    def name(self) -> str:
        return self.directory.name


@dataclasses.dataclass(frozen=True)
class TrialOutcome:
    status: TrialStatus
    seconds: float  # duration of the trial


def trial_precision(config: Config, machine: Environment, engines: Sequence[str], *, on_gpu: bool) -> str:
    """Choose one precision for all trials and engines of a command. On GPUs, it may remain auto, because only
    a rank can query the GPU's generation. Raise ConfigError if the model does not permit this precision."""
    precision: str = config.precision
    if not on_gpu:
        precision = decide_precision(precision, engines, on_gpu=False, has_bf16=bool(machine.bf16_units))
    if issues := residual_issues(config, precision):
        raise ConfigError(issues)
    return precision


def timed_config(
    config: Config,
    *,
    on_gpu: bool,
    steps: int,
    global_size: int,
    micro_size: int,
    noise_scale: bool = False,
    **sections: Any,
) -> Config:
    """Derive the configuration of a short timed run with these batch sizes. The run has no batch ramp
    or checkpoints, and evaluates only at the end. It compiles the model only if a full run would.
    `sections`: values of further top-level settings or sections."""
    compiled = config.compile
    batch = {"global_size": global_size, "micro_size": micro_size, "ramp_fraction": 0.0, "ramp_quantum": None}
    changes: dict[str, Any] = {
        "batch": batch,
        "schedule": {"steps": steps},
        "compile": "off" if compiled == "auto" and not on_gpu else compiled,
        "checkpoint": {"keep": 0, "every_steps": 0},
        "eval": {"every_steps": 0, "max_sequences": micro_size},
        "log": {
            "every_steps": max(1, -(-steps // LOG_LINES)),
            "step_times": True,
            "to": [],
            "noise_scale": noise_scale,
        },
    }
    return resolve([config.model_dump(mode="json"), {**changes, **sections}])


def earlier_outcome(trial: Trial) -> TrialOutcome | None:
    """Return the outcome of this trial in an earlier start of the command; None if the trial must be run. The
    earlier configuration may differ only in the data's path; `Output.begin_with` compares the data's hash."""
    try:
        before = load_config(trial.directory / "config.yaml")
    except (OSError, ConfigError):
        return None
    data = before.data.model_copy(update={"path": trial.config.data.path})
    return _outcome(trial) if before.model_copy(update={"data": data}) == trial.config else None


def _outcome(trial: Trial) -> TrialOutcome | None:
    """Return the outcome of a trial. Return None if its records are incomplete, or if it ended for a
    reason that is independent of its settings, for example a signal."""
    directory, config = trial.directory, trial.config
    status, summary = ended(directory), read_summary(directory)
    if status is None or summary is None:
        return None
    if status == "ok" and config.has_examples and not (directory / files.PREDICTIONS).is_file():
        return None
    try:
        if status == "ok" and config.log.step_times:
            read_repeat(directory, trial.ranks, 0, config.schedule.steps or 0)
    except UNREADABLE:
        return None
    if failure := summary.failure:
        is_killed = failure.killed_by in KILLS and not (failure.memory and failure.memory.oom_kills)
        if is_killed or failure.kind in OUTSIDE:
            return None
    seconds = sum(summary.time_s.values())
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        seconds = float(files.parse_json((directory / TRIAL_FILE).read_bytes())["seconds"])
    return TrialOutcome(status, seconds)


class Progress:
    """Progress of a command's trials: the number of finished trials and the estimated time left."""

    def __init__(self, expected: Sequence[float], log: Log, at_a_time: int = 1):
        """`expected`: relative duration of every planned trial, in any unit."""
        self._log, self._total, self._left, self._at_a_time = log, len(expected), sum(expected), at_a_time
        self._done, self._run, self._seconds = 0, 0.0, 0.0

    def skip(self, share: float) -> None:
        """Count a trial that is skipped or ran in an earlier start. `share`: its relative duration."""
        self._done += 1
        self._left -= share

    def ended(self, share: float, seconds: float, text: str) -> None:
        """Count a trial that has just run for `seconds`, and log `text`, which describes its result."""
        self.skip(share)
        self._run += share
        self._seconds += seconds
        pace = self._seconds / max(self._run, 1e-9) / self._at_a_time
        left_s = self._left * pace
        left = f"; {format_duration(left_s)} left" if left_s >= 1 else ""
        self._log(f"[{self._done}/{max(self._total, self._done)}] {text}{left}")


@dataclasses.dataclass
class _Running:
    trial: Trial
    slot: Slot
    process: subprocess.Popen[str]
    log: IO[str]
    started_s: float
    due_s: float  # time of the trial's next progress line


@contextlib.contextmanager
def runner(out: Path, slots: Sequence[Slot], *, launcher: str, on_gpu: bool, log: Log) -> Iterator[Runner]:
    """Provide a Runner in a `with` block. Stop signals are recorded instead of ending this process. Children
    exit with this process, even if it is killed. On exit from the block, remove OUT/.scratch."""
    scratch = out / SCRATCH
    scratch.mkdir(exist_ok=True)
    try:
        with reaper(scratch), processes.stop_signals() as signals:
            yield Runner(out, slots, signals, launcher, on_gpu, log)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@dataclasses.dataclass
class Runner:
    """Scheduler that runs each trial in a free slot."""

    out: Path
    slots: Sequence[Slot]
    signals: Sequence[int]  # stop signals received so far; the list grows
    launcher: str
    on_gpu: bool
    log: Log

    @property
    def scratch(self) -> Path:
        """Return the directory for temporary files, which `runner` removes at the end."""
        return self.out / SCRATCH

    def run(self, trials: Iterable[Trial]) -> Iterator[tuple[Trial, TrialOutcome]]:
        """Run trials; yield each trial with its outcome when it has finished.

        Do not repeat trials that finished in an earlier start. Take the next trial only when a slot is free,
        because it may depend on earlier outcomes. Raise Stopped after a signal, once all trials have ended.
        """
        queue, free = iter(trials), list(self.slots)
        tries: dict[Path, int] = {}
        running: list[_Running] = []
        sent = 0
        try:
            while True:
                while free and not self.signals and (trial := next(queue, None)) is not None:
                    if (outcome := earlier_outcome(trial)) is not None:
                        yield trial, outcome
                    else:
                        running.append(self._start(trial, free.pop(0)))
                if not running:
                    break
                for number in self.signals[sent:]:
                    for each in running:
                        each.process.send_signal(number)
                sent = len(self.signals)
                for each in [r for r in running if r.process.poll() is not None]:
                    running.remove(each)
                    each.log.close()
                    seconds, place = time.monotonic() - each.started_s, each.trial.directory
                    files.write_json(place / TRIAL_FILE, {"seconds": seconds})
                    outcome = _outcome(each.trial)
                    tries[place] = tries.get(place, 0) + 1
                    if outcome is None and self.signals:
                        continue
                    if outcome is None and tries[place] < TRIES:
                        self.log(f"  {each.trial.name}: interrupted or incomplete; restarted")
                        running.append(self._start(each.trial, each.slot))
                        continue
                    free.append(each.slot)
                    yield each.trial, outcome or TrialOutcome("failed", seconds)
                self._log_progress(running)
                time.sleep(processes.POLL_S)
        finally:
            for each in running:
                each.process.kill()  # the trial's reaper then kills the ranks
                each.process.wait()
                each.log.close()
        if self.signals:
            raise Stopped(self.signals[0])

    def run_one(self, trial: Trial) -> TrialOutcome:
        """Run one trial and return its outcome. Raise Stopped after a stop signal."""
        [(_, outcome)] = self.run([trial])
        return outcome

    def helper(self, module: str, arguments: Sequence[str], cores: Sequence[int] | None = None) -> list[Any]:
        """Run a module; return the JSON objects it prints. Warn if it fails. Raise Stopped after a signal."""
        hidden = {} if self.on_gpu else {"CUDA_VISIBLE_DEVICES": ""}
        with processes.confined(cores):
            process = children.start_module(
                module,
                list(arguments),
                scratch=str(self.scratch),
                environ=hidden,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
        with process:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    text = process.communicate(timeout=processes.POLL_S)[0]
                    break
                if self.signals:
                    process.kill()
        if self.signals:
            raise Stopped(self.signals[0])
        if process.returncode:
            print_error(f"warning: {module} {children.describe_exit_code(process.returncode, '')}")
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")]

    def _start(self, trial: Trial, slot: Slot) -> _Running:
        directory = trial.directory
        shutil.rmtree(directory, ignore_errors=True)
        (directory / "logs").mkdir(parents=True, mode=0o700)
        files.write_text(directory / "config.yaml", dump_config(trial.config))
        if (facts := self.out / "environment.json").exists():
            shutil.copy(facts, directory)
        options = {"launcher": self.launcher, "on_gpu": self.on_gpu, "cores": trial.cores or slot.cores}
        limit = [] if trial.data_bytes is None else [str(trial.data_bytes)]
        log = (directory / "logs" / "trial.log").open("w")
        process = children.start_module(
            "launcher.run.trials",
            [str(directory), str(trial.ranks), json.dumps(options), *limit],
            scratch=str(self.scratch),
            environ={} if slot.gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(slot.gpus)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        now = time.monotonic()
        return _Running(trial, slot, process, log, now, now + PROGRESS_S)

    def _log_progress(self, running: Sequence[_Running]) -> None:
        """Log the step of each running trial every PROGRESS_S seconds."""
        now = time.monotonic()
        for each in running:
            if now < each.due_s:
                continue
            each.due_s = now + PROGRESS_S
            step, steps = 0, each.trial.config.schedule.steps
            for line in files.read_lines(each.trial.directory / "metrics.jsonl"):
                step = line["step"]
            of = f" of {steps}" if steps else ""
            passed = format_duration(now - each.started_s)
            self.log(f"  {each.trial.name}: step {step}{of}, running for {passed}")


def main(arguments: Sequence[str]) -> int:
    """Run one trial: train with DIR/config.yaml on RANKS ranks. Return the exit code of the run."""
    directory, ranks, options, *limit = arguments
    for size in map(int, limit):  # with a limit, allocations fail before the kernel kills a process
        resource.setrlimit(resource.RLIMIT_DATA, (size, size))
    config = load_config(Path(directory) / "config.yaml")
    start = RankStart(int(ranks), ["--resume", "never"], **json.loads(options))
    watch = hangs.Watch(Path(directory), print, config.run)
    result = processes.run(Path(directory), start, watch=watch)
    if result.failure is not None:
        print(result.failure.headline())  # noqa: T201 (the trial's log)
    return result.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
