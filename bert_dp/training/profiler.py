"""Trace steps with torch.profiler; write RUN/profile/rank-N.json.gz files, which Perfetto can open."""

import sys
from pathlib import Path

from torch.profiler import profile

from bert_dp.config.checks import ProfilePlan
from bert_dp.training.distributed import HostCollectives
from bert_dp.training.metrics import Meter
from bert_dp.training.process import HeartbeatWriter


class StepTrace:
    """Profiler of the steps and ranks in `plan`; None = do nothing. Every rank has an instance."""

    def __init__(
        self, plan: ProfilePlan | None, comm: HostCollectives, run_dir: Path, heartbeat: HeartbeatWriter
    ):
        self._plan, self._comm, self._folder = plan, comm, run_dir / "profile"
        self._heartbeat = heartbeat
        self._profiler: profile | None = None
        self._first: int | None = None
        """First step of the current recording."""
        self.steps: list[int] | None = None
        """First and last recorded step, identical on every rank; None before the recording ends."""
        self.failed_writes = 0

    def reached(self, step: int, meter: Meter, *, at_end: bool = False) -> None:
        """Start or stop recording if the plan requires it. `step`: last completed step. `at_end`: stop in any
        case. Step times exclude the time that this takes. Collective."""
        plan = self._plan
        if plan is None:
            return
        begins = self._first is None and plan.first - 1 <= step < plan.last and not at_end
        ends = self._first is not None and (step == plan.last or at_end)
        if not (begins or ends):
            return
        self._heartbeat.enter("save", step)  # writing a trace of many operators can take a long time
        with meter.paused():
            if begins:
                self._first = step + 1
                if self._comm.world.rank in plan.ranks:
                    self._profiler = profile()
                    self._profiler.start()
            else:
                self._end(step)
            self._comm.barrier()

    def _end(self, last: int) -> None:
        first, self._first = self._first or 1, None
        if self._profiler is not None:
            self._profiler.stop()
        if last < first:
            return
        self.steps = [first, last]
        if self._profiler is not None:
            try:
                self._folder.mkdir(exist_ok=True)
                trace = self._folder / f"rank-{self._comm.world.rank}.json.gz"
                self._profiler.export_chrome_trace(str(trace))
            except OSError as error:  # a full disk must not stop the run
                self.failed_writes += 1
                sys.stdout.write(f"warning: the profile could not be written: {error}\n")
