"""Which directory a run may take as its own, and what it goes on from there."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from bert_dp import record
from bert_dp.config import Config, Issue, changed_settings, hf_directory, progress_at
from bert_dp.record.models import Summary
from launcher import results
from launcher.job import Job, exposure_issues, input_issues
from launcher.output import place_issues

LOCK = ".launcher.lock"
BESIDE_A_RUN = (".*", "slurm-*.out", "lost+found")  # what may stand where a run begins, and logs/
# beside its logs
FILES = (
    *("config.yaml", "tokenizer.json", "metrics.jsonl", "evals.jsonl", ".lock", LOCK),
    *("summary.json", "environment.json", "deepspeed.json", "hang.txt", "report.html"),
)
LOGS = (
    *("rank-*.log", "rank-*.error.json", "rank-*.stack", "rank-*.collectives.json", "nccl-trace-rank-*"),
    *("torchrun.log", "accelerate.log", "deepspeed.log", "trial.log", "loggers.log"),
)


def start_issues(job: Job, run_dir: Path, resume: str) -> list[Issue | str]:
    """Why a run cannot start there; one line each. One that goes on needs the weights that it began with no
    more."""
    config = job.config
    if checkpoint_to_resume(run_dir, resume) is not None:
        config = config.model_copy(update={"run": config.run.model_copy(update={"init_from": None})})
    issues: list[Issue | str] = [*input_issues(config), *exposure_issues(job.config, run_dir, "--run-dir")]
    return [*issues, *run_dir_issues(run_dir, job.config, resume)]


def run_dir_issues(run_dir: Path, config: Config, resume: str) -> Sequence[Issue | str]:
    """Why this directory cannot take this run; one line each."""
    if issues := place_issues(run_dir, "--run-dir"):
        return issues
    has_run = any((run_dir / "checkpoints").glob("step-*")) or (run_dir / "metrics.jsonl").exists()
    if not has_run and anyone_writes(run_dir):
        return [
            f"--run-dir: {run_dir} can be written by every user, who could exchange its checkpoints; "
            f"chmod o-w it, or choose another directory"
        ]
    if (strange := foreign_files(run_dir)) and not holds_run(run_dir):
        names = ", ".join(strange[:3]) + (f" and {len(strange) - 3} more" if len(strange) > 3 else "")
        return [
            f"--run-dir: {run_dir} holds {names} but no run, and a run would write among what is yours; "
            f"choose a new directory, for example {run_dir / 'run'}"
        ]
    if wrong := wrong_kinds(run_dir):
        return [
            f"--run-dir: {path} is not {kind}, as a run needs there; move it away" for path, kind in wrong
        ]
    if resume not in ("auto", "never") and record.newest_checkpoint_facts(Path(resume)) is None:
        return [f"--resume: {resume} holds no checkpoint; use auto, never, or a checkpoint's directory"]
    if has_run and resume == "never":
        return [f"--resume never: {run_dir} already holds a run; choose another --run-dir"]
    checkpoint = checkpoint_to_resume(run_dir, resume)
    return change_issues(checkpoint[1], config, resume) if checkpoint else []


def holds_run(run_dir: Path) -> bool:
    """Whether an earlier start has made this its run directory. A lock alone is none: a start that
    was refused late leaves one, and what came there since is the user's."""
    if (run_dir / "checkpoints").is_dir() and record.newest_checkpoint_facts(run_dir) is not None:
        return True
    facts = record.read_json(run_dir / "environment.json") or {}
    return "launcher" in facts and any((run_dir / name).exists() for name in (LOCK, "config.yaml"))


def foreign_files(run_dir: Path) -> list[str]:
    """Names in a directory that stand in the way of a new run: all but BESIDE_A_RUN and an empty place for
    checkpoints, such as a disk of their own. In logs/ only what bears the name of a log of ours does."""

    def is_harmless(path: Path) -> bool:
        if path.name == "checkpoints":
            return path.is_dir() and {p.name for p in path.iterdir()} <= {"lost+found"}
        if path.name == "logs":
            return path.is_dir() and not any(map(is_log, path.iterdir()))
        return any(fnmatch.fnmatchcase(path.name, pattern) for pattern in BESIDE_A_RUN)

    with contextlib.suppress(OSError):  # what may not be read is not written into either
        return sorted(path.name for path in run_dir.iterdir() if not is_harmless(path))
    return []


def is_log(path: Path) -> bool:
    """Return whether a file in logs/ has the name of one that a run writes."""
    return any(fnmatch.fnmatchcase(path.name, pattern) for pattern in LOGS)


def wrong_kinds(run_dir: Path) -> list[tuple[Path, str]]:
    """Paths a run writes to and what each should be but is not: a link would be followed out of the
    directory, a pipe would hang. `checkpoints` and `logs` may be links, to a disk of their own."""
    logs, beats, checkpoints = (run_dir / name for name in ("logs", "heartbeats", "checkpoints"))
    files = [run_dir / name for name in FILES]
    files += sorted(filter(is_log, logs.iterdir())) if logs.is_dir() else ()
    files += sorted(beats.glob("rank-*")) if beats.is_dir() else ()
    wrong = [(path, "a regular file") for path in files if path.is_symlink() or not path.is_file()]
    wrong += [(path, "a directory") for path in (checkpoints, logs, beats) if not path.is_dir()]
    wrong += [(beats, "a directory")] if beats.is_symlink() and beats.is_dir() else []
    return [(path, kind) for path, kind in wrong if os.path.lexists(path)]


def anyone_writes(directory: Path) -> bool:
    return directory.is_dir() and bool(directory.stat().st_mode & stat.S_IWOTH)


def checkpoint_to_resume(run_dir: Path, resume: str) -> tuple[Path, record.CheckpointFacts] | None:
    """The checkpoint that this run would go on from; unverified."""
    if resume == "never":
        return None
    return record.newest_checkpoint_facts(run_dir if resume == "auto" else Path(resume))


def resume_issues(run_dir: Path, config: Config, resume: str, data_hash: str) -> list[Issue]:
    """Why the checkpoint that this run would go on from does not fit; one line each."""
    checkpoint = checkpoint_to_resume(run_dir, resume)
    if checkpoint is None:
        missing = Issue("--resume", "not_found", f"{resume} holds no checkpoint", resume)
        return [] if resume in ("auto", "never") else [missing]
    path, facts = checkpoint
    issues = change_issues(facts, config, resume)
    if facts.data_hash != data_hash:
        hashes = f"({facts.data_hash[:16]}, these are {data_hash[:16]})"
        message = f"{path.name} was trained on other data {hashes}"
        issues.append(Issue("data", "conflict", message, hint=undo(resume)))
    return issues


def undo(resume: str) -> str:
    """What to do about a checkpoint that does not fit."""
    return f"undo it or choose another {'--run-dir' if resume == 'auto' else '--resume'}"


def change_issues(facts: record.CheckpointFacts, config: Config, resume: str) -> list[Issue]:
    """Find what a checkpoint's run may not change and `config` does."""
    before, now = facts.config.get("run", {}).get("init_from"), config.run.init_from
    # a first phase that was removed since, or moved
    gone = now is None and before is not None and not (hf_directory(before) or Path(before)).exists()
    moved = facts.init_from is not None and now is not None and holds_weights(now, facts.init_from.sha256)
    issues = changed_settings(facts.config, config)
    if before != now and not gone and not moved:
        message = "the run began with {}, now {}".format(*(s or "random weights" for s in (before, now)))
        issues.append(Issue("run.init_from", "conflict", message, now))
    return [dataclasses.replace(issue, hint=undo(resume)) for issue in issues]


def holds_weights(source: str, sha256: str) -> bool:
    """Whether a checkpoint, or one of a run, has these weights, by their hash."""
    path = Path(source)
    for checkpoint in (path, *record.list_checkpoints(path / "checkpoints")):
        with contextlib.suppress(OSError, ValueError, KeyError):
            if record.weights_hash(checkpoint) == sha256:
                return True
    return False


def is_complete(run_dir: Path, config: Config, resume: str) -> bool:
    """Whether the run has ended by itself and its newest checkpoint has spent the budget."""
    summary = results.find(run_dir / "summary.json", Summary)
    newest = record.newest_checkpoint_facts(run_dir)
    if resume != "auto" or summary is None or newest is None or summary.status != "done":
        return False
    facts = newest[1]
    return progress_at(config, facts.step, facts.samples, facts.elapsed_s) >= 1.0
