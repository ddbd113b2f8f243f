"""Optuna in place of the first rung's ladder: candidates asked for, losses told."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_dp.config import ConfigError
from launcher.tune.ladder import EXTENSIONS, Candidate, Edge, Outcome, first_ladder


def check() -> list[str]:
    """Why Optuna cannot be used; one line, or none."""
    try:
        import optuna  # noqa: F401
    except ImportError:
        return ["--trials: needs `pip install 'bert-dp[tune]'`"]
    return []


class Study:
    """TPE over log-uniform rates; of several optimizers each with a range of its own.

    OUT/optuna.db is written anew from the trials' records in every call, so that a search which was
    interrupted proposes what an uninterrupted one would. Raises ConfigError without Optuna.
    """

    def __init__(
        self, path: Path, edges: Mapping[str, Edge], decays: Sequence[float], *, count: int, seed: int
    ):
        """`count`: rates of the ladder that this replaces, which says how far down to look."""
        if issues := check():
            raise ConfigError(issues)
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        path.unlink(missing_ok=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)  # several at a time
        self._study = optuna.create_study(storage=f"sqlite:///{path}", sampler=sampler, study_name="lr")
        self._failed = optuna.trial.TrialState.FAIL
        self._decays = sorted(decays)
        self._ranges: dict[str, tuple[float, float]] = {}
        for name, edge in edges.items():
            low = first_ladder(edge, count)[-1] / 2**EXTENSIONS
            self._ranges[name] = low, edge.highest if edge.lr is None else edge.lr
        self._asked: dict[Candidate, list[Any]] = {}

    def ask(self, count: int) -> list[Candidate]:
        """`count` candidates; one that was asked before may come again, and has its result already."""
        asked = []
        for _ in range(count):
            trial = self._study.ask()
            optimizer = trial.suggest_categorical("optimizer", sorted(self._ranges))
            lr = trial.suggest_float(f"lr-{optimizer}", *self._ranges[optimizer], log=True)
            decay = self._decays[0]
            if len(self._decays) > 1:
                drawn = trial.suggest_float("weight_decay", decay, self._decays[-1], log=True)
                decay = float(f"{drawn:.3g}")
            candidate = Candidate(optimizer, decay, float(f"{lr:.3g}"))
            self._asked.setdefault(candidate, []).append(trial)
            asked.append(candidate)
        return asked

    def tell(self, outcome: Outcome) -> None:
        """A diverged trial is an infinite loss; one that failed says nothing of its rate."""
        for trial in self._asked.pop(outcome.candidate, []):
            if outcome.status in ("ok", "diverged"):
                self._study.tell(trial, outcome.score)
            else:
                self._study.tell(trial, state=self._failed)
