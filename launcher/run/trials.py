"""Short runs that a verb needs, each a process of its own, as many at a time as there are slots; gone on with
where an earlier call ended."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from bert_dp import record
from bert_dp.config import (
    Config,
    ConfigError,
    decide_precision,
    dump_config,
    load_config,
    residual_issues,
    resolve,
)
from launcher import children, results
from launcher.log import Log, complain
from launcher.machine.environment import Environment
from launcher.report.numbers import format_duration, format_eta
from launcher.results import MeasureStatus
from launcher.run import processes
from launcher.run.read_run import Ended, ended, from_outside, is_whole, read_summary
from launcher.run.reaper import reaper

PROGRESS_S = 30.0
SCRATCH = ".scratch"
TRIAL_FILE = "trial.json"
TRIES = 2  # of a trial that something outside has ended, or whose records are not whole
LOG_LINES = 10  # of metrics.jsonl in a measured run
HELPER_TIMEOUT_S = 900.0


class Stopped(Exception):
    """A signal came; `number` says which."""

    def __init__(self, number: int):
        self.number = number


class TrialsFailed(Exception):
    """What was asked cannot be answered by any trial; the text says why."""


@dataclasses.dataclass(frozen=True)
class Ending:
    """How the trials of a verb have ended."""

    status: MeasureStatus
    why: str | None = None
    exit_code: int = 0


def run_to_end(run: Callable[[], None], out: Path, log: Log) -> Ending:
    """All trials of a verb that writes to `out`, unless a signal comes or they fail."""
    try:
        run()
    except Stopped as stop:
        log(f"stopped: {out} holds what was measured; the same command goes on")
        return Ending("partial", exit_code=128 + stop.number)
    except TrialsFailed as failed:
        return Ending("failed", str(failed), 1)
    return Ending("complete")


@dataclasses.dataclass(frozen=True)
class Slot:
    """The devices of one trial at a time: cores of this machine, or GPUs by CUDA's names; None = all."""

    cores: tuple[int, ...] | None = None
    gpus: tuple[str, ...] | None = None


def device_slots(ranks: int, *, gpus: int, cores: int, most: int) -> list[Slot]:
    """The devices of each trial, no more than `most` trials at a time. `gpus`: visible ones, 0 = CPU ranks;
    `cores`: that we may use, shared out evenly."""
    if gpus:
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = [n.strip() for n in shown.split(",")][:gpus] if shown else [str(k) for k in range(gpus)]
        count = max(1, min(gpus // ranks, most))
        return [Slot(gpus=tuple(names[k * ranks : (k + 1) * ranks])) for k in range(count)]
    ours = sorted(os.sched_getaffinity(0))
    count = max(1, min(cores // ranks, most))
    share = len(ours) // count
    return [Slot(cores=tuple(ours[k * share : (k + 1) * share])) for k in range(count)]


@dataclasses.dataclass(frozen=True)
class Trial:
    """One run: `directory` is made to train `config` on `ranks` ranks."""

    directory: Path
    config: Config
    ranks: int
    cores: tuple[int, ...] | None = None
    """Of its slot's, those that its ranks share; None = all of them."""
    data_bytes: int | None = None
    """Limit of each process's writable private memory; None = none."""

    @property
    def name(self) -> str:
        return self.directory.name


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a trial has ended."""

    status: Ended
    seconds: float
    """From its start to its end."""


def trial_precision(config: Config, machine: Environment, engines: Sequence[str], *, on_gpu: bool) -> str:
    """What every trial of a verb has as its `precision`, so that all compute alike, whatever their engine. On
    GPUs it may stay auto: they are those of one machine, and only a rank can ask of what generation. Raises
    ConfigError for a model that needs another one."""
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
    """`config` for a short run whose steps are timed: at this batch, without a ramp, with nothing saved or
    evaluated, and compiled as the run itself would be. `sections`: more settings."""
    compiled = config.compile
    own: dict[str, Any] = {
        "batch": {
            "global_size": global_size,
            "micro_size": micro_size,
            "ramp_fraction": 0.0,
            "ramp_quantum": None,
        },
        "schedule": {"steps": steps},
        "compile": "off" if compiled == "auto" and not on_gpu else compiled,
        "checkpoint": {"keep": 0, "every_steps": 0},
        "eval": {"every_steps": 0, "max_sequences": micro_size},
        "log": {
            "every_steps": max(1, -(-steps // LOG_LINES)),
            "step_times": True,
            "to": [],
            "tensorboard": False,
            "noise_scale": noise_scale,
        },
    }
    return resolve([config.model_dump(mode="json"), {**own, **sections}])


def earlier_outcome(trial: Trial) -> Outcome | None:
    """How this very trial ended in an earlier call; None: it is to be run (again). Where its data lies says
    nothing: what a directory was begun with has the data's hash."""
    try:
        before = load_config(trial.directory / "config.yaml")
    except (OSError, ConfigError):
        return None
    data = before.data.model_copy(update={"path": trial.config.data.path})
    same = before.model_copy(update={"data": data}) == trial.config
    return _outcome(trial) if same else None


def _outcome(trial: Trial) -> Outcome | None:
    """How the run of a trial has ended; None where that says nothing of its settings."""
    directory = trial.directory
    status, summary = ended(directory), read_summary(directory)
    if status is None or summary is None or from_outside(directory):
        return None
    if status == "ok" and not is_whole(directory, trial.ranks, trial.config):
        return None
    file = results.find(directory / TRIAL_FILE, results.TrialFile)
    return Outcome(status, file.seconds if file else sum(summary.time_s.values()))


class Progress:
    """Says each result, how many there are, and the time left by the pace of the trials of this call."""

    def __init__(self, expected: Sequence[float], log: Log, at_a_time: int = 1):
        """`expected`: of every trial that is planned, its share of the time, in any unit."""
        self._log, self._total, self._left, self._at_a_time = log, len(expected), sum(expected), at_a_time
        self._done, self._here, self._seconds = 0, 0.0, 0.0

    def expect(self, share: float) -> None:
        """One more trial than was planned."""
        self._total += 1
        self._left += share

    def had(self, share: float) -> None:
        """A trial that needs no time: an earlier call has run it, or it is left out."""
        self._done += 1
        self._left -= share

    def ended(self, share: float, seconds: float, text: str) -> None:
        """A trial that this call has run, and what it took."""
        self.had(share)
        self._here += share
        self._seconds += seconds
        pace = self._seconds / max(self._here, 1e-9) / self._at_a_time
        left = format_eta(max(0.0, self._left) * pace)
        self._log(f"[{self._done}/{max(self._total, self._done)}] {text}; left {left}")


@dataclasses.dataclass
class _Running:
    trial: Trial
    slot: Slot
    process: subprocess.Popen[str]
    log: IO[str]
    started_s: float
    """On the monotonic clock."""
    due: float
    """When its progress is said next."""


@contextlib.contextmanager
def runner(out: Path, slots: Sequence[Slot], *, launcher: str, on_gpu: bool, log: Log) -> Iterator[Runner]:
    """Runs trials within the block: stop signals are noted, no process outlives this one however it ends, and
    what processes leave behind in OUT/.scratch goes at the end."""
    scratch = out / SCRATCH
    scratch.mkdir(exist_ok=True)
    try:
        with reaper(scratch, children.launcher_marks()), processes.stop_signals() as signals:
            yield Runner(out, slots, signals, launcher, on_gpu, log)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@dataclasses.dataclass
class Runner:
    """Starts trials and follows them."""

    out: Path
    slots: Sequence[Slot]
    signals: Sequence[int]
    """Those that have come, growing."""
    launcher: str
    on_gpu: bool
    log: Log

    @property
    def scratch(self) -> Path:
        """What processes leave behind; it goes at the end."""
        return self.out / SCRATCH

    def run(self, trials: Iterable[Trial]) -> Iterator[tuple[Trial, Outcome]]:
        """Each trial with its outcome as it ends; its records are in its directory.

        One that an earlier call has ended with the same configuration is not run again, unless something
        outside ended it. The next trial is taken when a slot is free, so that `trials` may follow from what
        has ended. Raises Stopped once a signal has come and every trial has ended.
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
                    outcome = self._end(each)
                    tries[each.trial.directory] = tries.get(each.trial.directory, 0) + 1
                    if outcome is None and self.signals:
                        continue
                    if outcome is None and tries[each.trial.directory] < TRIES:
                        self.log(f"  {each.trial.name}: ended from outside; once more")
                        running.append(self._start(each.trial, each.slot))
                        continue
                    free.append(each.slot)
                    yield each.trial, outcome or Outcome("failed", time.monotonic() - each.started_s)
                self._say_progress(running)
                time.sleep(processes.POLL_S)
        finally:
            for each in running:
                each.process.kill()  # its own reaper ends its ranks
                each.process.wait()
                each.log.close()
        if self.signals:
            raise Stopped(self.signals[0])

    def run_one(self, trial: Trial) -> Outcome:
        """Raises Stopped."""
        [(_, outcome)] = self.run([trial])
        return outcome

    def helper(self, module: str, arguments: Sequence[str], cores: Sequence[int] | None = None) -> list[Any]:
        """The JSON lines that `python -m module` printed; its stderr has told why it failed.

        Raises Stopped for a signal."""
        with processes.confined(cores):
            process = children.start_module(
                module,
                list(arguments),
                stdout=subprocess.PIPE,
                start_new_session=True,
                scratch=str(self.scratch),
                environ={} if self.on_gpu else {"CUDA_VISIBLE_DEVICES": ""},
            )
        deadline = time.monotonic() + HELPER_TIMEOUT_S
        while True:
            try:
                text = process.communicate(timeout=processes.POLL_S)[0]
                break
            except subprocess.TimeoutExpired:
                if self.signals or time.monotonic() > deadline:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
        if self.signals:
            raise Stopped(self.signals[0])
        if process.returncode:
            complain(f"warning: {module} {children.ending(process.returncode, '')}")
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")]

    def _start(self, trial: Trial, slot: Slot) -> _Running:
        directory = trial.directory
        shutil.rmtree(directory, ignore_errors=True)
        (directory / "logs").mkdir(parents=True, mode=0o700)
        record.write_text(directory / "config.yaml", dump_config(trial.config))
        if (facts := self.out / "environment.json").exists():
            shutil.copy(facts, directory)
        arguments = [str(directory), "--nproc", str(trial.ranks), "--launcher", self.launcher]
        arguments += ["--on-gpu"] if self.on_gpu else []
        if (cores := trial.cores or slot.cores) is not None:
            arguments += ["--cores", ",".join(map(str, cores))]
        arguments += [] if trial.data_bytes is None else ["--data-bytes", str(trial.data_bytes)]
        log = (directory / "logs" / "trial.log").open("w")
        process = children.start_module(
            "launcher.run.trial_process",
            arguments,
            scratch=str(self.scratch),
            environ={} if slot.gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(slot.gpus)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        now = time.monotonic()
        return _Running(trial, slot, process, log, now, now + PROGRESS_S)

    def _end(self, each: _Running) -> Outcome | None:
        each.log.close()
        file = results.TrialFile(seconds=time.monotonic() - each.started_s)
        results.write(each.trial.directory / TRIAL_FILE, file)
        return _outcome(each.trial)

    def _say_progress(self, running: Sequence[_Running]) -> None:
        """How far each trial is, now and then."""
        now = time.monotonic()
        for each in running:
            if now < each.due:
                continue
            each.due = now + PROGRESS_S
            step, steps = 0, each.trial.config.schedule.steps
            for line in record.read_lines(each.trial.directory / "metrics.jsonl"):
                step = line["step"]
            of = f" of {steps}" if steps else ""
            self.log(
                f"  {each.trial.name}: step {step}{of}, running for {format_duration(now - each.started_s)}"
            )
