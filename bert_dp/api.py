"""Run bert-dp's commands from Python. Each command runs as a child process, `python -P -m launcher`, and the
function that started it returns the results.

This module does not import `launcher`, so that a user's own launcher.py is neither executed nor shadowed. The
caller's signal handlers, umask, threads and standard streams stay unchanged.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from pydantic import ValidationError

from bert_dp import files
from bert_dp.config import Config, ConfigError, Issue, Manifest, load_config
from bert_dp.files.models import Failure, Summary, kind_of_text
from bert_dp.files.reaper import ISSUES_FILE, child_environment, describe_exit_code, module_command, reaper
from bert_dp.files.run_facts import EXPORTED, ExportFormat

PathLike = str | os.PathLike[str]
Paths = PathLike | Sequence[PathLike]
Settings = Mapping[str, Any] | None
OnLog = Callable[[dict[str, Any]], object]
Launcher = Literal["torchrun", "accelerate", "deepspeed"]
ERROR, FAILED = "error: ", "failed: "  # prefixes of the lines that report bad input or a failure
# notebooks set FORCE_COLOR, which would make a command draw progress bars as on a terminal
NO_TERMINAL = {"FORCE_COLOR": "", "TTY_COMPATIBLE": "0"}


@dataclasses.dataclass(frozen=True)
class Run(os.PathLike[str]):
    """Snapshot of a run directory. It can be passed to any function that accepts the path of a run."""

    directory: Path
    config: Config | None = dataclasses.field(repr=False)
    """Resolved settings from config.yaml, such as `run.config.optim.lr`; None if the file cannot be read."""
    summary: Summary | None = dataclasses.field(repr=False)
    """Contents of summary.json; None if the run is in progress or was killed."""
    checkpoint: Path | None
    """Path of the newest checkpoint, or None."""
    report: Path | None
    """Path of report.html, or None."""
    metrics: list[dict[str, Any]] = dataclasses.field(repr=False)
    """Records in metrics.jsonl, one per logged step; pass the list to `pandas.DataFrame` for a table."""
    evals: list[dict[str, Any]] = dataclasses.field(repr=False)
    """Records in evals.jsonl, one per held-out evaluation."""

    def __fspath__(self) -> str:
        return str(self.directory)

    @property
    def results(self) -> dict[str, Any]:
        """Return the last held-out evaluation's results: the loss and, for a finetuned run, its scores."""
        heldout = self.summary.heldout if self.summary is not None else None
        return {} if heldout is None else heldout.model_dump(mode="json", exclude_none=True)


@dataclasses.dataclass(frozen=True)
class Result(os.PathLike[str]):
    """Results of a command as JSON values, and the directory that the command wrote to or read from."""

    directory: Path
    results: Any = dataclasses.field(repr=False)

    def __fspath__(self) -> str:
        return str(self.directory)


class TrainingFailed(RuntimeError):
    """Error raised if a run starts but then fails. The message contains the cause and suggested fixes."""

    def __init__(self, failure: Failure, run: Run):
        super().__init__(failure, run)
        self.failure = failure
        self.cause = failure.headline()
        self.kind = failure.kind
        self.run = run

    def __str__(self) -> str:
        place = [f"at {self.failure.where}"] if self.failure.where else []
        return "\n".join([self.cause, *place, *self.failure.fix, f"run: {self.run.directory}"])


def train(
    config: PathLike | None = None,
    *,
    nproc: int | Literal["auto"] = "auto",
    settings: Settings = None,
    run_dir: PathLike | None = None,
    resume: PathLike = "auto",
    launcher: Launcher = "torchrun",
    allow_code: bool = False,
    on_log: OnLog | None = None,
    quiet: bool = False,
) -> Run:
    """Pretrain a model as `bert-dp train` does. `config`: a file, or the name of a shipped configuration.

    `settings` override the configuration; the keys are dotted or nested: `{"schedule.steps": 20}`. `run_dir`
    defaults to runs/NAME-DATE-TIME; if it contains a run, that run resumes. `allow_code` permits execution of
    the Python files named in `task` and `optim.name`. `on_log` is called in this process with each new record
    in metrics.jsonl; its first exception is printed, and the run continues. The command's output is written
    to sys.stdout unless `quiet` is true. After an interrupt, the ranks finish their step and save a
    checkpoint; a second interrupt stops them immediately. If this process is killed, the run stops.

    Raises ConfigError, with a list of all issues, if the input is bad; TrainingFailed if the run fails; and
    KeyboardInterrupt after an interrupt.
    """
    directory = _directory(run_dir, "runs", Path("quickstart" if config is None else config).stem)
    options = {"nproc": nproc, "launcher": launcher, "run_dir": directory, "resume": os.fspath(resume)}
    named = [] if config is None else [config]
    arguments = _arguments("train", named, settings, **options, allow_code=allow_code)
    return _train(arguments, directory, quiet, on_log)


def finetune(
    run: PathLike,
    *,
    settings: Settings = None,
    run_dir: PathLike | None = None,
    on_log: OnLog | None = None,
    quiet: bool = False,
    **options: Any,
) -> Run:
    """Finetune a pretrained run on a classification or regression task. `options`: options of `bert-dp
    finetune`, such as `task` and `data`, or `train`, `dev` and `label`. For the other arguments, see train().
    `results["scores"]` has keys such as "dev/f1". If `seeds` > 1, `run_dir` contains one directory per run,
    such as seed-0, for read_run(), and the returned Run has no results."""
    directory = _directory(run_dir, "runs", f"{Path(run).name}-{options.get('task') or 'own'}")
    arguments = _arguments("finetune", [run], settings, **options, run_dir=directory)
    return _train(arguments, directory, quiet, on_log)


def evaluate(
    run: Paths,
    texts: Paths = (),
    *,
    settings: Settings = None,
    out: PathLike | None = None,
    quiet: bool = False,
    **options: Any,
) -> Result:
    """Measure the held-out loss of one or several runs on `texts`. Without `texts`, evaluate one run on
    GLUE and write the results to the directory `out`. `options`: options of `bert-dp eval mlm` or of `bert-dp
    eval glue`, such as `data`. Raises ConfigError and RuntimeError."""
    first, *_ = named = _path_list(run)
    verb, place = "eval mlm", _absolute(first)
    if not texts:
        verb, place = "eval glue", _directory(out, "eval", Path(first).name)
        options["out"] = place
    arguments = _arguments(verb, [*named, *_path_list(texts)], settings, **options, json=True)
    return Result(place, json.loads(_run_verb(arguments, quiet)))


def predict(
    run: PathLike,
    examples: PathLike | Sequence[str | tuple[str, str]],
    *,
    quiet: bool = False,
    **options: Any,
) -> Result:
    """Label or encode `examples` (a file, texts or pairs of texts) with a run or the directory of an export.
    `results` contains one record per example. `options`: options of `bert-dp predict`. Raises ConfigError and
    RuntimeError."""
    with tempfile.TemporaryDirectory() as scratch:
        out, file = Path(scratch) / "out.jsonl", Path(scratch) / "in.jsonl"
        if isinstance(examples, str | os.PathLike):
            file = Path(examples)
        else:
            pairs = [(each,) if isinstance(each, str) else each for each in examples]
            names = ("text", "text_pair")[: max(map(len, pairs), default=1)]
            lines = (json.dumps(dict(zip(names, pair, strict=True))) for pair in pairs)
            file.write_text("".join(f"{line}\n" for line in lines))
            options |= {name: name for name in names}
        _run_verb(_arguments("predict", [run, file], **options, out=out), quiet)
        return Result(_absolute(run), [json.loads(line) for line in out.read_text().splitlines()])


def export(
    run: PathLike, out: PathLike, format: ExportFormat = "hf", *, quiet: bool = False, **options: Any
) -> Result:
    """Export a run to the new directory `out`. `results`: contents of export.json. `options`: options of
    `bert-dp export FORMAT`. Raises ConfigError and RuntimeError."""
    _run_verb(_arguments(f"export {format}", [run], **options, out=out), quiet)
    return Result(_absolute(out), files.read_json(_absolute(out) / EXPORTED))


def build_data(
    sources: Paths, out: PathLike, *, settings: Settings = None, quiet: bool = False, **options: Any
) -> Result:
    """Build token shards from the texts in `sources`, and write them to the directory `out`. `results`
    is the manifest of the shards. `settings`: data.build settings, by their full names. `options`: options of
    `bert-dp data build`. Raises ConfigError and RuntimeError."""
    _run_verb(_arguments("data build", _path_list(sources), settings, **options, out=out), quiet)
    return Result(_absolute(out), files.read_json(_absolute(out) / Manifest.file_name))


def runs(directory: PathLike = "runs") -> list[dict[str, Any]]:
    """Return a list with a flat record for each run in a directory, most recently changed first. The keys of
    a record include all settings. `pandas.DataFrame` accepts the list. Raises ConfigError."""
    rows: list[dict[str, Any]] = json.loads(_run_verb(_arguments("runs", [directory], json=True), True))
    return rows


def read_run(directory: PathLike) -> Run:
    """Read a run directory, even while the run is active. Raises ConfigError if config.yaml is missing."""
    path = _absolute(directory)
    if not (path / "config.yaml").is_file():
        raise ConfigError([Issue(str(path), "not_found", "not a run directory (no config.yaml)")])
    return _read(path)


def overrides(settings: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield each setting as `a.b=value`, with the value in JSON, which is valid YAML. Raises TypeError."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from overrides(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}={json.dumps(value, ensure_ascii=False, default=_plain)}"


def _plain(value: Any) -> Any:
    """Convert a numpy or torch number, or a path, to a JSON value."""
    return value.item() if hasattr(value, "item") else os.fspath(value)


def _read(directory: Path) -> Run:
    newest = files.newest_checkpoint_facts(directory) if (directory / "checkpoints").is_dir() else None
    page, config = directory / files.PAGE, None
    with contextlib.suppress(ConfigError):
        config = load_config(directory / "config.yaml")
    return Run(
        directory=directory,
        config=config,
        summary=_summary(directory),
        checkpoint=newest[0] if newest else None,
        report=page if page.is_file() else None,
        metrics=list(files.read_lines(directory / "metrics.jsonl")),
        evals=list(files.read_lines(directory / "evals.jsonl")),
    )


def _summary(directory: Path) -> Summary | None:
    with contextlib.suppress(ValidationError):
        return Summary.model_validate(files.read_json(directory / "summary.json"))
    return None


def _absolute(path: PathLike) -> Path:
    return Path(path).expanduser().resolve()


def _directory(given: PathLike | None, folder: str, name: str) -> Path:
    return _absolute(Path(folder) / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}" if given is None else given)


def _path_list(paths: Paths) -> list[str]:
    return [os.fspath(each) for each in ([paths] if isinstance(paths, str | os.PathLike) else paths)]


def _arguments(verb: str, names: Sequence[PathLike], settings: Settings = None, **options: Any) -> list[str]:
    """Return the arguments of a command. None and False omit an option; True adds it without a value."""
    arguments = verb.split()
    for name, value in {**options, "set": [*overrides(settings or {})]}.items():
        for each in value if isinstance(value, list | tuple) else [value]:
            if each is not None and each is not False:
                arguments += [f"--{name.replace('_', '-')}", *([] if each is True else [str(each)])]
    return [*arguments, "--", *(os.fspath(name) for name in names)]


def _train(arguments: list[str], directory: Path, quiet: bool, on_log: OnLog | None) -> Run:
    """Run a command that trains, and return the run in `directory`. Raises the same exceptions as `train`."""
    before = _summary(directory)
    ended = _follow(arguments, quiet=quiet, poll=on_log and _follower(directory, on_log))
    if ended.interrupted and ended.code != 1:
        raise KeyboardInterrupt(f"stopped; the same call with run_dir={str(directory)!r} resumes the run")
    run = _read(directory)
    if ended.code == 0:
        return run
    summary = None if run.summary == before else run.summary  # an unchanged summary is from an earlier start
    failure = summary.failure if summary is not None else None
    raise TrainingFailed(failure or _printed_failure(ended), run)


def _run_verb(arguments: list[str], quiet: bool) -> str:
    """Run a command other than train or finetune, and return its output. Raises ConfigError, RuntimeError
    and KeyboardInterrupt."""
    ended = _follow(arguments, quiet=quiet)
    if ended.interrupted:
        raise KeyboardInterrupt
    if ended.code:
        raise RuntimeError(_printed_failure(ended).message)
    return ended.output


def _follower(directory: Path, call: OnLog) -> Callable[[], None]:
    """Return a function that passes new metrics records to `call` and prints `call`'s first exception."""
    tail, failed = files.Tail(directory / "metrics.jsonl", skip_present=True), list[Exception]()

    def poll() -> None:
        while (found := tail.lines())[0]:
            for line in [] if found[1] else found[0]:  # if the file was replaced, these lines are old
                try:
                    call(json.loads(line))
                except Exception as error:
                    if not failed:
                        sys.stderr.write(f"on_log failed; the run continues:\n{traceback.format_exc()}")
                    failed.append(error)

    return poll


def _printed_failure(ended: _Outcome) -> Failure:
    """Describe the failure of a command, using its exit code and its last message."""
    if ended.code < 0:
        return Failure(message=describe_exit_code(ended.code, ""), kind="killed")
    if ended.code > 128:
        return Failure(message=f"{signal.Signals(ended.code - 128).name}: stopped", kind="stopped")
    heads = [line for line in ended.lines if line.startswith((FAILED, ERROR))]
    cause = (heads or [f"exit code {ended.code}"])[-1].removeprefix(FAILED).removeprefix(ERROR)
    return Failure(message=cause, kind=kind_of_text(cause))


class _Outcome(NamedTuple):
    code: int  # -N: killed by signal N
    lines: list[str]
    interrupted: bool = False
    output: str = ""


def _follow(arguments: list[str], *, quiet: bool = False, poll: Callable[[], None] | None = None) -> _Outcome:
    """Run a command, print its messages and return its outcome. Raises ConfigError for exit code 2."""
    printed: list[str] = []
    interrupted = False
    has_output = arguments[0] not in ("train", "finetune")
    with tempfile.TemporaryDirectory() as scratch, reaper(Path(scratch)):
        issues, output = Path(scratch) / "issues.json", Path(scratch) / "output"
        with output.open("w") as file:
            process = subprocess.Popen(
                [*module_command("launcher"), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file if has_output else subprocess.PIPE,
                stderr=subprocess.PIPE if has_output else subprocess.STDOUT,
                text=True,
                errors="replace",
                env={**os.environ, **NO_TERMINAL, **child_environment(), ISSUES_FILE: str(issues)},
                start_new_session=True,  # an interrupt reaches only this process, which forwards it
            )
        stream: IO[str] | None = process.stderr if has_output else process.stdout
        assert stream is not None
        try:
            while process.returncode is None:
                try:
                    for line in stream:
                        printed.append(line.rstrip("\n"))
                        if not quiet:
                            sys.stdout.write(line)
                            sys.stdout.flush()
                        if poll is not None:
                            poll()
                    process.wait()
                except KeyboardInterrupt:
                    interrupted = True
                    _signal(process, signal.SIGINT)
        finally:
            if process.poll() is None:  # printing raised an error
                _signal(process, signal.SIGTERM)
                process.wait()
            stream.close()
        if process.returncode == 2:
            found = json.loads(issues.read_text())["issues"] if issues.exists() else []
            messages = [line.removeprefix(ERROR) for line in printed if line.startswith(ERROR)] or printed
            raise ConfigError(
                [Issue(**issue) for issue in found] or [Issue("", "unsupported", line) for line in messages]
            )
        return _Outcome(process.returncode, printed, interrupted, output.read_text(errors="replace"))


def _signal(process: subprocess.Popen[str], number: int) -> None:
    """Send a signal to the command and all processes in its process group, as a terminal does."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
