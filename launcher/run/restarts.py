"""Whether and how a failed run is started again: from its newest checkpoint, ever later, not for ever."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from bert_dp import record
from bert_dp.config import Config, ConfigError, batch_layout
from bert_dp.record.models import Failure, Restart, Summary
from launcher import results
from launcher.machine import environment
from launcher.report.numbers import count_of
from launcher.run import processes
from launcher.watch.failure import first_line

WITHOUT_PROGRESS = 3
"""Failures in a row, with no newer checkpoint in between, after which starting again is pointless."""

Start = Callable[[int, str], processes.RunResult]
"""(ranks, resume) -> how that attempt ended."""


@dataclasses.dataclass(frozen=True)
class Policy:
    max_restarts: int = 0
    elastic: bool = False
    """Go on with fewer ranks when one was killed or a GPU has gone."""


ONCE = Policy()


def supervise(
    start: Start,
    config: Config,
    run_dir: Path,
    ranks: int,
    resume: str,
    policy: Policy,
    log: Callable[[str], None],
    sleep: Callable[[float], int] | None = None,
) -> processes.RunResult:
    """Run to its end, or until restarting is over. Each restart stands in summary.json under `restarts`.

    A run that ended by itself, by bad input or by a signal to the launcher is never started again, nor is one
    that failed while it was to stop.
    `sleep(seconds)` returns the stop signal that came meanwhile, or 0.
    """
    past: list[Restart] = []
    idle = 0
    while True:
        before = saved(run_dir)
        result = start(ranks, resume)
        failure = result.failure
        if failure is None or result.exit_code != 1 or result.signal or len(past) == policy.max_restarts:
            break
        if failure.agreed:
            log("not started again: the ranks ended the run together, and would again")
            break
        after = saved(run_dir)
        idle = 0 if after.step > before.step else idle + 1
        if idle == WITHOUT_PROGRESS:
            log(f"not started again: {idle} failures without a newer checkpoint")
            break
        fewer = ranks_left(config, ranks, failure) if policy.elastic else ranks
        wait_s = 2.0**idle
        if after != before or resume == "never":  # else the one that was named has not been read yet
            resume = "auto"
        place = f"step {after.step}" if after.step >= 0 else "the start"
        log(
            f"restart {len(past) + 1} of {policy.max_restarts} in {wait_s:.0f} s on "
            f"{count_of(fewer, 'rank')} from {place}: {first_line(failure.headline())}"
        )
        past.append(
            Restart(
                date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                step=after.step,
                ranks=fewer,
                cause=failure.headline(),
                failure_kind=failure.kind,
            )
        )
        ranks = fewer
        if stop := (sleep or wait_for_signal)(wait_s):
            result = processes.RunResult(128 + stop, failure, stop)
            break
    if past:
        waited = {"status": "stopped", "signal": result.signal} if result.exit_code > 128 else {}
        note(run_dir, {**waited, "restarts": past})
    return result


class Saved(NamedTuple):
    """The newest checkpoint."""

    step: int
    """-1: there is none."""
    made_ns: int = 0
    """A step may be saved again."""


def saved(run_dir: Path) -> Saved:
    newest = record.newest_checkpoint_facts(run_dir)
    if newest is None:
        return Saved(-1)
    path, facts = newest
    return Saved(facts.step, path.stat().st_mtime_ns if path.exists() else 0)


def ranks_left(config: Config, ranks: int, failure: Failure) -> int:
    """The greatest number of ranks that the batch divides over, without the killed one or the lost GPUs."""
    count = environment.num_gpus() if config.run.device != "cpu" else 0
    most = min(ranks, count) if count else ranks
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
    """Sleep; the number of a stop signal that came, which ends the sleep, or 0."""
    with processes.stop_signals() as came:
        end = time.monotonic() + seconds
        while not came and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, processes.POLL_S))
    return came[0] if came else 0


def note(run_dir: Path, facts: dict[str, object]) -> None:
    """Add what only the launcher knows to summary.json."""
    summary = results.find(run_dir / "summary.json", Summary)
    if summary is not None:
        with contextlib.suppress(OSError):  # a full disk: the console has said it
            results.write(run_dir / "summary.json", summary.model_copy(update=facts))
