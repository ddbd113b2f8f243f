"""Runs trials, as many at a time as there are slots; goes on where an earlier call ended."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from bert_dp import record
from bert_dp.config import Config, ConfigError, dump_config, load_config
from bert_dp.record import LAUNCHER_PID, LAUNCHER_START, start_ticks
from bert_dp.record_models import FailureKind
from launcher import processes, results
from launcher.reaper import reaper
from launcher.report.numbers import format_duration
from launcher.scaling.measure import Say, Stopped
from launcher.scaling.raw import Ended, ended, read_summary

PROGRESS_S = 30.0
SCRATCH = ".scratch"
TOOK = "trial.json"
TRIES = 2  # of a trial that something outside has ended


@dataclasses.dataclass(frozen=True)
class Slot:
    """The devices of one trial: cores of this machine, or GPUs by CUDA's names; None = all."""

    cores: tuple[int, ...] | None = None
    gpus: tuple[str, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Trial:
    """One run: OUT/trials/NAME trains `config` on `ranks` ranks."""

    name: str
    config: Config
    ranks: int
    data_bytes: int | None = None
    """Limit of each process's writable private memory; None = none."""


@dataclasses.dataclass
class _Running:
    trial: Trial
    slot: Slot
    process: subprocess.Popen[str]
    log: IO[str]
    begun: float
    due: float


class Pool:
    """Trials below one directory. `spent_s`: seconds in which at least one ran, in this call."""

    def __init__(self, out: Path, slots: Sequence[Slot], *, launcher: str, on_gpu: bool, say: Say):
        self.out, self.launcher, self.on_gpu, self.say = out, launcher, on_gpu, say
        self._slots = list(slots)
        self.spent_s = 0.0
        self.started = 0

    def directory(self, trial: Trial) -> Path:
        return self.out / "trials" / trial.name

    def seconds(self, trial: Trial) -> float:
        """What it took from its start to its end, also in an earlier call."""
        took = results.find(self.directory(trial) / TOOK, results.TrialFile)
        return took.seconds if took else 0.0

    def run(self, trials: Sequence[Trial]) -> dict[str, Ended]:
        """Name -> ok, oom or failed, of every trial; see `outcomes`."""
        return {trial.name: state for trial, state in self.outcomes(trials)}

    def outcomes(self, trials: Sequence[Trial]) -> Iterator[tuple[Trial, Ended]]:
        """Each trial with ok, oom or failed as it ends; it has its records in its directory.

        One that an earlier call has ended with the same configuration is not run again, unless something
        outside ended it. Raises Stopped once a signal has come and every trial has ended.
        """
        waiting = []
        for trial in trials:
            if (state := self.ended(trial)) is None:
                waiting.append(trial)
            else:
                yield trial, state
        if not waiting:
            return
        tries = dict.fromkeys([trial.name for trial in waiting], 0)
        running: list[_Running] = []
        free = list(self._slots)
        begun = time.monotonic()
        marks = [f"{LAUNCHER_PID}={os.getpid()}", f"{LAUNCHER_START}={start_ticks(os.getpid())}"]
        with self._scratch() as scratch, reaper(scratch, marks), processes.stop_signals() as came:
            sent = 0
            try:
                while running or (waiting and not came):
                    while waiting and free and not came:
                        running.append(self._start(waiting.pop(0), free.pop(0), scratch))
                    for number in came[sent:]:
                        for each in running:
                            each.process.send_signal(number)
                    sent = len(came)
                    for each in [r for r in running if r.process.poll() is not None]:
                        running.remove(each)
                        free.append(each.slot)
                        each.log.close()
                        took = results.TrialFile(seconds=time.monotonic() - each.begun)
                        results.write(self.directory(each.trial) / TOOK, took)
                        name = each.trial.name
                        tries[name] += 1
                        if (state := self._outcome(each)) is not None:
                            yield each.trial, state
                        elif came:
                            continue
                        elif tries[name] >= TRIES:
                            yield each.trial, "failed"
                        else:
                            self.say(f"  {name}: ended from outside; once more")
                            waiting.insert(0, each.trial)
                    self._tell(running)
                    time.sleep(processes.POLL_S)
            finally:
                for each in running:
                    each.process.kill()  # its own reaper ends its ranks
                    each.process.wait()
        self.spent_s += time.monotonic() - begun if any(tries.values()) else 0.0
        self.started += sum(tries.values())
        if came:
            raise Stopped(came[0])

    def ended(self, trial: Trial) -> Ended | None:
        """How this very trial ended in an earlier call; None = it is to be run."""
        directory = self.directory(trial)
        with contextlib.suppress(ConfigError):  # compared as settings: an older file lacks newer ones
            same = load_config(directory / "config.yaml") == trial.config
            if same and (directory / TOOK).exists():
                return None if from_outside(directory) else ended(directory)
        return None

    def _outcome(self, each: _Running) -> Ended | None:
        directory = self.directory(each.trial)
        return None if from_outside(directory) else ended(directory)

    @contextlib.contextmanager
    def _scratch(self) -> Iterator[Path]:
        scratch = self.out / SCRATCH
        scratch.mkdir(exist_ok=True)
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _start(self, trial: Trial, slot: Slot, scratch: Path) -> _Running:
        directory = self.directory(trial)
        shutil.rmtree(directory, ignore_errors=True)
        (directory / "logs").mkdir(parents=True, mode=0o700)
        record.write_text(directory / "config.yaml", dump_config(trial.config))
        if (facts := self.out / "environment.json").exists():
            shutil.copy(facts, directory)
        arguments = [str(directory), "--nproc", str(trial.ranks), "--launcher", self.launcher]
        arguments += ["--on-gpu"] if self.on_gpu else []
        arguments += [] if trial.data_bytes is None else ["--data-bytes", str(trial.data_bytes)]
        log = (directory / "logs" / "trial.log").open("w")
        environ = {} if slot.gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(slot.gpus)}
        with processes.confined(slot.cores):
            process = processes.start_module(
                "launcher.tune.trial",
                arguments,
                scratch=str(scratch),
                environ=environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        now = time.monotonic()
        return _Running(trial, slot, process, log, now, now + PROGRESS_S)

    def _tell(self, running: Sequence[_Running]) -> None:
        """How far each trial is, now and then."""
        now = time.monotonic()
        for each in running:
            if now < each.due:
                continue
            each.due = now + PROGRESS_S
            step = 0
            for line in record.read_lines(self.directory(each.trial) / "metrics.jsonl"):
                step = line["step"]
            self.say(f"  {each.trial.name}: step {step}, running for {format_duration(now - each.begun)}")


def from_outside(directory: Path) -> bool:
    """Whether something outside has ended this trial, which says nothing of its settings: no summary was
    written, or a rank was killed and memory was not why."""
    summary = read_summary(directory)
    if summary is None or summary.signal:
        return True
    killed = summary.killed_by in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    return killed and not summary.oom_kills


def cause(directory: Path) -> str:
    """Why a trial ended as it did, in its own words."""
    summary = read_summary(directory)
    if summary is None:
        return "it ended without a word, twice"
    return summary.cause or "its records are not whole"


def failure_kind(directory: Path) -> FailureKind:
    """The kind of a trial that did not end well."""
    summary = read_summary(directory)
    return (summary and summary.failure_kind) or "no_cause"
