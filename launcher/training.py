"""`bert-dp train`: check everything, write the run directory, start the ranks, show the run, close it."""

from __future__ import annotations

import glob
import importlib.util
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert_dp import record
from bert_dp.config import (
    BatchPlan,
    Config,
    ConfigError,
    batch_at,
    batch_plan,
    changed_settings,
    data_issues,
    dump_config,
    load_config,
    no_effect,
)
from bert_dp.cost import flops_per_token, memory_estimate_gib, num_parameters
from launcher import closing, environment, page, processes, report
from launcher.redact import redact_argv

if TYPE_CHECKING:
    from rich.console import Console

CPU_RANKS = 2  # of --nproc auto on a machine without a GPU
PLAIN: Any = {"markup": False, "highlight": False, "soft_wrap": True}
PLAIN_PROGRESS_S = 10.0  # between progress lines when the console is not a terminal


def shipped_configs() -> Path:
    """The directory of the configurations that come with bert-dp: in the wheel, or beside the source."""
    packaged = Path(__file__).parent / "configs"
    return packaged if packaged.is_dir() else Path(__file__).parent.parent / "configs"


def find_config(name: str | None, run_dir: Path | None) -> Path:
    """A path as it is; else a shipped configuration; without a name the run's own, else quickstart.yaml."""
    if name is None:
        own = run_dir / "config.yaml" if run_dir else None
        return own if own and own.exists() else shipped_configs() / "quickstart.yaml"
    path = Path(name)
    shipped = shipped_configs() / f"{path.stem}.yaml"
    if not path.exists() and path.parent.name in ("", "configs") and shipped.exists():
        return shipped
    return path


def choose_nproc(setting: str, config: Config) -> int:
    """Number of ranks. Raises ConfigError for more ranks than GPUs or something that is not a number."""
    gpus = 0 if config.run.device == "cpu" else environment.num_gpus()
    if config.run.device == "cuda" and gpus == 0:
        raise ConfigError(["run.device: cuda, but this machine shows no GPU; use run.device=cpu or auto"])
    if setting == "auto":
        return gpus or CPU_RANKS
    if not setting.isdecimal() or int(setting) < 1:
        raise ConfigError([f"--nproc: {setting} is not auto or a whole number of at least 1"])
    ranks = int(setting)
    if gpus and ranks > gpus:
        raise ConfigError(
            [f"--nproc: {ranks} ranks but {gpus} GPUs; use --nproc {gpus}, or --set run.device=cpu"]
        )
    return ranks


def absolute(config: Config) -> Config:
    """The configuration with every path absolute, so that it runs the same from anywhere."""

    def full(path: str | None) -> str | None:
        return None if path is None else str(Path(path).expanduser().resolve())

    def source(name: str) -> str:
        return name if name == "builtin" or name.startswith("hub:") else str(full(name))

    data = config.data
    sources = None if data.sources is None else tuple(source(s) for s in data.sources)
    changed = {"path": full(data.path), "sources": sources, "tokenizer": full(data.tokenizer)}
    run = config.run.model_copy(update={"init_from": full(config.run.init_from)})
    return config.model_copy(update={"data": data.model_copy(update=changed), "run": run})


def input_issues(config: Config) -> list[str]:
    """Files and packages the configuration names and that are not there; one line each."""
    issues = []
    data = config.data
    if data.path is not None:
        manifest = record.read_json(Path(data.path) / "manifest.json")
        if manifest is None:
            issues.append(f"data.path: {data.path} holds no manifest.json; make it with `bert-dp data build`")
        else:
            issues += data_issues(config, manifest)
    for source in data.sources or ():
        if source != "builtin" and not source.startswith("hub:") and not glob.glob(source, recursive=True):
            issues.append(f"data.sources: {source} matches no file; name a file, a glob or `builtin`")
    for setting, value in (("data.tokenizer", data.tokenizer), ("run.init_from", config.run.init_from)):
        if value is not None and not Path(value).exists():
            issues.append(f"{setting}: {value} does not exist")
    if config.log.tensorboard and importlib.util.find_spec("tensorboard") is None:
        issues.append("log.tensorboard: true needs `pip install 'bert-dp[tensorboard]'`")
    if importlib.util.find_spec("torch") is None:
        issues.append("torch is not installed; `pip install torch`")
    return issues


def run_dir_issues(run_dir: Path, config: Config, resume: str) -> list[str]:
    """Why this directory cannot take this run; one line each."""
    if run_dir.exists() and not run_dir.is_dir():
        return [f"--run-dir: {run_dir} is a file"]
    if resume not in ("auto", "never") and not Path(resume).exists():
        return [f"--resume: {resume} does not exist; use auto, never, or a checkpoint's directory"]
    if record.is_locked(run_dir):
        return [f"--run-dir: {run_dir} is in use by another run; choose another directory"]
    has_run = any((run_dir / "checkpoints").glob("step-*")) or (run_dir / "metrics.jsonl").exists()
    if not has_run:
        return []
    if resume == "never":
        return [f"--resume never: {run_dir} already holds a run; choose another --run-dir"]
    try:
        before = load_config(run_dir / "config.yaml").model_dump(mode="json")
    except ConfigError:
        return []
    return [f"{line}; undo it or choose another --run-dir" for line in changed_settings(before, config)]


def expected_steps(config: Config) -> int | None:
    """Optimizer steps of the whole run with its batch ramp; None for a budget in hours."""
    schedule = config.schedule
    if schedule.steps is not None:
        return schedule.steps
    if schedule.tokens is None:
        return None
    steps = tokens = 0
    while tokens < schedule.tokens:
        tokens += batch_at(config.batch, tokens / schedule.tokens) * config.data.sequence_length
        steps += 1
    return steps


def describe(config: Config, plan: BatchPlan, on_gpu: bool) -> list[str]:
    """The dry run's report: batch equation, model, memory, length of the run."""
    sequence = config.data.sequence_length
    precision = config.precision if config.precision != "auto" else ("bf16" if on_gpu else "fp32")
    memory = memory_estimate_gib(config, precision)
    parts = ", ".join(f"{name} {size:.2f}" for name, size in memory.items())
    flops = flops_per_token(config.model, sequence, config.objective.mask_rate)
    tokens = plan.global_size * sequence
    schedule = config.schedule
    steps = expected_steps(config)
    length = f"{schedule.hours} h on rank 0's clock" if steps is None else f"{steps:,} steps"
    if schedule.tokens is not None:
        length += f" = {schedule.tokens:,} tokens"
    elif steps is not None and config.batch.ramp_fraction == 0:
        length += f" = {steps * tokens:,} tokens"
    ramp = f", ramped in steps of {config.batch.ramp_quantum}" if config.batch.ramp_fraction else ""
    return [
        f"batch   {plan} = {tokens:,} tokens a step{ramp}",
        f"model   {num_parameters(config.model, sequence):,} parameters, {flops / 1e6:.1f} MFLOP a token",
        f"memory  about {sum(memory.values()):.2f} GiB a rank (estimate, {precision}, eager: {parts})",
        f"length  {length}; schedule {config.schedule.name}, peak lr {config.optim.lr:g}",
    ]


def prepare_data(config: Config, run_dir: Path) -> None:
    """Build `data.sources` before any rank starts, with its progress on our console. Raises ConfigError."""
    if config.data.sources is None:
        return
    code = processes.run_module(
        "bert_dp.corpus", ["ensure", str(run_dir / "config.yaml")], stdout=processes.DEVNULL
    ).returncode
    if code == 2:
        raise ConfigError([])  # the data room has said why
    if code:
        raise RuntimeError(f"building the corpus failed with exit code {code}")


class Display:
    """What the console shows while the ranks run: rank 0's lines, and one live line of progress."""

    def __init__(self, run_dir: Path, console: Console, log_offset: int):
        self._run_dir, self._console = run_dir, console
        self._log_offset, self._metrics_offset = log_offset, 0
        self._last_plain = 0.0
        self._lines: list[dict[str, Any]] = []
        self._live: Any = None

    def __enter__(self) -> Display:
        if self._console.is_terminal:
            from rich.live import Live

            self._live = Live("starting", console=self._console, refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def poll(self) -> None:
        for line in self._new_lines("logs/rank-0.log", "_log_offset"):
            self._console.print(line, **PLAIN)
        fresh = []
        for line in self._new_lines("metrics.jsonl", "_metrics_offset"):
            try:
                fresh.append(json.loads(line))
            except ValueError:
                continue
        self._lines = (self._lines + fresh)[-50:]
        if not fresh:
            return
        text = report.progress_line(self._lines[-1], eta=report.eta_s(self._lines))
        if self._live is not None:
            self._live.update(text)
        elif time.monotonic() - self._last_plain >= PLAIN_PROGRESS_S:
            self._last_plain = time.monotonic()
            self._console.print(text, **PLAIN)

    def _new_lines(self, name: str, offset: str) -> list[str]:
        path = self._run_dir / name
        if not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(getattr(self, offset))
            whole, newline, _ = file.read().rpartition(b"\n")
        setattr(self, offset, getattr(self, offset) + len(whole) + len(newline))
        return whole.decode("utf-8", "replace").splitlines() if newline else []


def train(
    name: str | None, overrides: Sequence[str], *, nproc: str, run_dir: Path | None, resume: str,
    dry_run: bool, console: Console,
) -> int:  # fmt: skip
    """Returns the exit code. Raises ConfigError, before any rank starts, with everything that is wrong."""
    path = find_config(name, run_dir)
    config = absolute(load_config(path, overrides))
    ranks = choose_nproc(nproc, config)
    plan = batch_plan(config, ranks)
    where = (run_dir or Path("runs") / time.strftime(f"{path.stem}-%Y%m%d-%H%M%S")).resolve()
    if issues := [*input_issues(config), *run_dir_issues(where, config, resume)]:
        raise ConfigError(issues)
    for line in no_effect(config):
        console.print(f"warning: {line}", style="yellow", **PLAIN)
    if dry_run:
        on_gpu = config.run.device != "cpu" and environment.num_gpus() > 0
        for line in describe(config, plan, on_gpu):
            console.print(line, **PLAIN)
        return 0
    where.mkdir(parents=True, exist_ok=True, mode=0o700)
    record.write_text(where / "config.yaml", dump_config(config))
    facts = environment.probe().to_json()
    record.write_json(where / "environment.json", {**facts, "command": redact_argv(sys.argv)})
    console.print(f"run directory: {where}", **PLAIN)
    prepare_data(config, where)
    log = where / "logs" / "rank-0.log"
    with Display(where, console, log.stat().st_size if log.exists() else 0) as display:
        result = processes.run(where, ranks, resume, display.poll)
    page.write([where], where / "report.html")
    if result.failure is not None:
        print_failure(result.failure, where, console)
    else:
        console.print(closing.closing_table(where))
    return result.exit_code


def print_failure(failure: processes.Failure, run_dir: Path, console: Console) -> None:
    """The cause first, then where, the log's last lines, and paths."""
    if failure.bad_input:
        for issue in failure.bad_input:
            console.print(f"error: {issue}", style="red", **PLAIN)
        return
    who = "" if failure.rank is None else f"rank {failure.rank}: "
    console.print(f"failed: {who}{failure.message}", style="bold red", **PLAIN)
    if failure.where:
        console.print(f"  at {failure.where}", **PLAIN)
    for line in failure.tail:
        console.print(f"  | {line}", **PLAIN)
    console.print(f"  log: {failure.log}", **PLAIN)
    console.print(f"  run: {run_dir}", **PLAIN)
