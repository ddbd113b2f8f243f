"""Restart a failed run from its newest checkpoint, with exponential back-off, up to a limit."""

import dataclasses
import datetime
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bert_dp import files
from bert_dp.config import Config, ConfigError, batch_layout
from bert_dp.config.checks import ProfilePlan
from bert_dp.files.models import Failure, Restart, Summary
from launcher.machine import environment
from launcher.report.formats import count_of
from launcher.run import processes
from launcher.run.nodes import Place
from launcher.watch.failure import first_line

WITHOUT_PROGRESS = 3  # no restart after this many consecutive failures without a checkpoint of a later step


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """Options of `bert-dp train`, as described in its help."""

    nproc: str = "auto"
    run_dir: Path | None = None
    resume: str = "auto"
    dry_run: bool = False
    launcher: str = "torchrun"
    max_restarts: int = 0
    elastic: bool = False  # restart with fewer ranks after a rank was killed or a GPU was lost
    force: bool = False  # start even if the memory is expected to be insufficient
    profile: ProfilePlan | None = None  # steps to profile
    place: Place | None = None  # this node of a multi-node run; None = a run on one node
    after_save: Sequence[str] = ()  # command to run with the path of each new checkpoint


class Restarts:
    """Decide after each attempt whether to restart the run. List the restarts in summary.json.

    A run is not restarted if it completed, had unusable input, or was stopping because of a signal to the
    launcher. `sleep(seconds)` waits and returns the stop signal received during the wait, or 0.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        ranks: int,
        options: RunOptions,
        log: Callable[[str], None],
        sleep: Callable[[float], int] | None = None,
    ):
        self.next: tuple[int, str] | None = ranks, options.resume
        """Number of ranks and value of --resume of the next attempt; None = the run has ended."""
        self._config, self._run_dir, self._options, self._log = config, run_dir, options, log
        self._sleep = sleep or wait_for_signal
        self._newest = newest_checkpoint(run_dir)
        self._idle = 0  # consecutive attempts without a checkpoint of a later step
        self._past: list[Restart] = []

    def after(self, ended: processes.RunOutcome) -> processes.RunOutcome:
        """Set `next` after an attempt, and wait if the run is to be restarted. Return the run's outcome."""
        assert self.next is not None, "the run has ended"
        (ranks, resume), self.next = self.next, None
        before, after = self._newest, newest_checkpoint(self._run_dir)
        self._newest, self._idle = after, 0 if after[0] > before[0] else self._idle + 1
        if (failure := self._restartable(ended)) is None:
            return self._end(ended)
        if self._options.elastic:
            ranks = ranks_left(self._config, ranks, failure)
        wait_s = 2.0**self._idle
        if after != before or resume == "never":  # otherwise, nothing was saved, so `resume` stays as it is
            resume = "auto"
        place, headline = f"step {after[0]}" if after[0] >= 0 else "the start", failure.headline()
        self._log(
            f"restart {len(self._past) + 1} of {self._options.max_restarts} in {wait_s:.0f} s on "
            f"{count_of(ranks, 'rank')} from {place}: {first_line(headline)}"
        )
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        kind = failure.kind
        self._past.append(Restart(date=date, step=after[0], ranks=ranks, cause=headline, failure_kind=kind))
        if stop := self._sleep(wait_s):
            stopped = Summary(status="stopped", signal=stop)
            processes.complete_summary(self._run_dir, status=stopped.status, signal=stop)
            return self._end(processes.RunOutcome(stopped.exit_code, failure, stop))
        self.next = ranks, resume
        return ended

    def _restartable(self, ended: processes.RunOutcome) -> Failure | None:
        """Return the failure if the run may be restarted, else None."""
        failure, is_last = ended.failure, len(self._past) == self._options.max_restarts
        if failure is None or ended.exit_code != 1 or ended.signal or is_last:
            return None
        if failure.agreed:
            reason = "all ranks stopped together for a reason that would recur"
        elif failure.kind == "node_lost":
            reason = "a node is lost"
        elif self._idle == WITHOUT_PROGRESS:
            reason = f"{self._idle} consecutive failures without a new checkpoint"
        else:
            return failure
        self._log(f"not restarted: {reason}")
        return None

    def _end(self, outcome: processes.RunOutcome) -> processes.RunOutcome:
        if self._past:
            processes.complete_summary(self._run_dir, restarts=self._past)
        return outcome


def newest_checkpoint(run_dir: Path) -> tuple[int, int]:
    """Return the newest checkpoint's step and mtime (ns), or (-1, 0). A step saved again gets a new mtime."""
    newest = files.newest_checkpoint_facts(run_dir)
    if newest is None:
        return -1, 0
    path, facts = newest
    return facts.step, path.stat().st_mtime_ns if path.exists() else 0


def ranks_left(config: Config, ranks: int, failure: Failure) -> int:
    """Return the number of ranks for the restart. If GPUs were lost or a rank was killed, it is the largest
    number of the remaining ranks that can share the batch. Otherwise, or if there is none, it is `ranks`."""
    gpus = len(environment.find_gpus()[0]) if config.run.device != "cpu" else 0
    most = min(ranks, gpus) if gpus else ranks
    if most == ranks and failure.killed_by is not None:
        most = ranks - 1
    for count in range(most, 0, -1):
        try:
            batch_layout(config, count)
        except ConfigError:
            continue
        return count
    return ranks


def wait_for_signal(seconds: float) -> int:
    """Sleep for `seconds` or until a stop signal arrives. Return the signal, or 0."""
    with processes.stop_signals() as received:
        end = time.monotonic() + seconds
        while not received and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, processes.POLL_S))
    return received[0] if received else 0
