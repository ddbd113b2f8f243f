"""Which steps of which ranks torch.profiler records: `train --profile 10:13 --profile-ranks 0,1`."""

from __future__ import annotations

import dataclasses
import re

from bert_dp.config.error import ConfigError

MAX_DIGITS = 12


@dataclasses.dataclass(frozen=True)
class ProfilePlan:
    """Steps `first` to `last`, counted from 1 as in metrics.jsonl, on `ranks`."""

    first: int
    last: int
    ranks: tuple[int, ...]

    def options(self, world_size: int) -> list[str]:
        """For the command line of a worker, which `parse_profile` reads: of the ranks that there are, which a
        restart may have fewer of; none where none of them is left."""
        ranks = ",".join(str(rank) for rank in self.ranks if rank < world_size)
        return ["--profile", f"{self.first}:{self.last + 1}", "--profile-ranks", ranks] if ranks else []


def parse_profile(steps: str, ranks: str) -> ProfilePlan:
    """`10:13` = steps 10, 11 and 12; `0,1` = two ranks. Raises ConfigError."""
    issues = []
    number = rf"\d{{1,{MAX_DIGITS}}}"
    span = re.fullmatch(rf"({number}):({number})", steps.strip())
    first, end = (int(span[1]), int(span[2])) if span else (0, 0)
    if span is None:
        issues.append(f"--profile: {steps[:40]!a} is not FIRST:END; 10:13 is steps 10, 11 and 12")
    elif first < 1:
        issues.append("--profile: steps are counted from 1; begin with 1")
    elif end <= first:
        issues.append(
            f"--profile: {steps} is no step, the end is not included; use {first}:{first + 1} for one"
        )
    if re.fullmatch(rf"{number}(,{number})*", ranks.replace(" ", "")) is None:
        issues.append(f"--profile-ranks: {ranks[:40]!a} is not a list of ranks such as 0,1")
    if issues:
        raise ConfigError(issues)
    named = {int(rank) for rank in ranks.split(",")}
    return ProfilePlan(first, end - 1, tuple(sorted(named)))


def profile_issues(plan: ProfilePlan, world_size: int, *, steps: int | None, done: int = 0) -> list[str]:
    """Why a run of `world_size` ranks and `steps` steps (None = not known before it ends) that goes on after
    `done` of them has not these; one line each."""
    issues = []
    if steps is not None and plan.last > steps:
        issues.append(f"--profile: step {plan.last} is beyond this run's {steps}; end at {steps + 1} at most")
    if plan.first <= done:
        issues.append(
            f"--profile: step {plan.first} is done, the run goes on with step {done + 1}; begin there"
        )
    if missing := [rank for rank in plan.ranks if rank >= world_size]:
        names = ", ".join(map(str, missing))
        issues.append(f"--profile-ranks: no rank {names}, this run has 0 to {world_size - 1}")
    return issues
