"""Define the options that several verbs share, and the parsers of option values."""

import importlib.util
import re
import shlex
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, BadParameter, Option

from bert_dp.config import ConfigError, Issue, benchmark_names, engine_facts
from bert_dp.config.errors import install_command
from bert_dp.config.schema import MAX_SECONDS, parse_duration
from launcher.job import VerbOptions, logger_issues
from launcher.log import console as console
from launcher.run.starters import launcher_problem

MAX_GPUS = 1_000_000
TEXTS = "Files, directories or globs (text, JSONL, Parquet; .gz, .xz, .zst), hub:NAME, or builtin."


def parsed(parse: Callable[[str], Any], metavar: str, help: str, *names: str) -> Any:
    """Make an option. `parse` converts the text or raises BadParameter. `names` replace the default name."""

    def value_of(text: Any) -> Any:
        return parse(text) if isinstance(text, str) else text  # a default is already converted

    return Option(*names, parser=value_of, metavar=metavar, show_default=False, help=help)


def counts(text: str) -> tuple[int, ...]:
    """Parse a list such as `1,2,4`, or a range whose values double up to its end: `1..6` means 1, 2, 4, 6."""
    problem = f"{text!r} is not a list (1,2,4) or range (1..1024) of numbers up to {MAX_GPUS:,}"
    if not re.fullmatch(r"\s*\d{1,7}\s*((,\s*\d{1,7}\s*)*|\.\.\s*\d{1,7}\s*)", text):
        raise BadParameter(problem)
    if ".." in text:
        first, last = map(int, text.split(".."))
        doubled = [first << k for k in range(20) if 0 < first << k < last]
        values = [*doubled, last] if 0 < first <= last else [0]
    else:
        values = [int(part) for part in text.split(",")]
    if not all(0 < value <= MAX_GPUS for value in values):
        raise BadParameter(problem)
    return tuple(dict.fromkeys(values))


def words(text: str) -> tuple[str, ...]:
    """Parse a comma-separated list of names; drop repeated names."""
    found = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
    if not all(found):
        raise BadParameter(f"{text!r} is not a comma-separated list of names")
    return found


def engines(text: str) -> tuple[str, ...]:
    """Parse the names of installed engines; `deepspeed` means `deepspeed-1`."""
    known = benchmark_names()
    names = [f"{name}-1" if f"{name}-1" in known else name for name in words(text)]
    if unknown := [name for name in names if name not in known]:
        raise BadParameter(f"unknown engine {', '.join(unknown)}; choose from {', '.join(known)}")
    for package in sorted({engine_facts(name).package or "" for name in names} - {""}):
        if importlib.util.find_spec(package) is None:
            raise BadParameter(f"{package} needs `{install_command(package)}`")
    return tuple(dict.fromkeys(names))


def loggers(text: str) -> tuple[str, ...]:
    """Parse the names of installed logging services."""
    names = words(text)
    if issues := logger_issues(names, ""):
        raise BadParameter("; ".join(map(str, issues)))
    return names


def seconds(text: str) -> float:
    """Parse a duration above 0; return seconds."""
    try:
        value = 0.0 if re.match(r"\s*(-|0+\s*$)", text) else parse_duration(text)
    except ValueError as error:
        raise BadParameter(str(error)) from None
    if not 0 < value <= MAX_SECONDS:
        raise BadParameter(f"{text!r} must be a duration above 0 and at most {MAX_SECONDS:g} s, e.g. 5m")
    return value


def hours(text: str) -> float:
    """Parse a number of hours, or a duration such as 90m; return hours."""
    return seconds(f"{text}h" if text.strip().replace(".", "", 1).isdecimal() else text) / 3600


def program(text: str) -> tuple[str, ...]:
    """Split a command into words as a shell would, and check that its program exists."""
    try:
        found = shlex.split(text)
    except ValueError as error:
        raise BadParameter(f"{text!r}: {error}") from None
    if not found or shutil.which(found[0]) is None:
        raise BadParameter(f"{text!r} does not start with the name of an executable program")
    return tuple(found)


def launcher(text: str) -> str:
    """Check that a launcher is known and installed."""
    if problem := launcher_problem(text):
        raise BadParameter(problem)
    return text


# --- arguments and options of the verbs

CONFIG_HELP = "Configuration (YAML file or name from `bert-dp configs`; default: quickstart) and settings."
Words = Annotated[
    list[str] | None, Argument(metavar="CONFIG | SETTING=VALUE", show_default=False, help=CONFIG_HELP)
]
Settings = Annotated[
    list[str] | None,
    Argument(metavar="SETTING=VALUE", show_default=False, help="Settings that override the verb's defaults."),
]
Set = Annotated[
    list[str] | None, Option("--set", metavar="a.b=v", help="Another way to write SETTING=VALUE; repeatable.")
]
Run = Annotated[
    Path,
    Argument(metavar="RUN", show_default=False, help="Run (its newest checkpoint is used) or checkpoint."),
]
Nproc = Annotated[str, Option(help="Number of ranks; auto: one per GPU, or 2 on a CPU.")]
Launcher = Annotated[
    str, parsed(launcher, "NAME", "Program that starts the ranks: torchrun (default), accelerate, deepspeed.")
]
Tensor = Annotated[Sequence[int], parsed(counts, "N,...", "Tensor-parallel sizes; default: 1.")]
RunDir = Annotated[Path | None, Option(help="Run directory; default: runs/NAME-DATE-TIME.")]
Resume = Annotated[str, Option(help="auto, never, or the path of a checkpoint or run to resume.")]
MaxRestarts = Annotated[
    int, Option(min=0, metavar="K", help="Restart a failed run up to K times from its newest checkpoint.")
]
Nnodes = Annotated[int | None, Option(min=1, metavar="N", help="Number of nodes; run this command on each.")]
NodeRank = Annotated[int | None, Option(metavar="K", help="Rank of this node, from 0.")]
Rendezvous = Annotated[str | None, Option(metavar="HOST:PORT", help="Address of node 0.")]
Interface = Annotated[
    str | None, Option(metavar="IF", help="Network interface; default: the one that routes to HOST.")
]
Force = Annotated[bool, Option("--force", help="Start even if the run is estimated not to fit in memory.")]
GlueTask = Annotated[str | None, Option("--task", metavar="NAME", help="GLUE task; needs --data.")]
GlueData = Annotated[list[Path] | None, Option(help="Folder or archive with the GLUE files; repeatable.")]
TrainFile = Annotated[
    str | None, Option(metavar="FILE", help="Training examples (CSV, TSV, JSONL, Parquet, hub:NAME).")
]
DevFile = Annotated[str | None, Option(metavar="FILE", help="Dev set, used to compute the scores.")]
TextColumn = Annotated[str | None, Option(metavar="COLUMN", help="Text column; default: text.")]
PairColumn = Annotated[
    str | None, Option(metavar="COLUMN", help="Column of the second text; default: text_pair.")
]
LabelColumn = Annotated[str | None, Option(metavar="COLUMN", help="Label column; default: label.")]
LabelKinds = Annotated[
    Literal["single_label", "multi_label", "regression"] | None,
    Option(help="Kind of label; default: single_label."),
]
Init = Annotated[
    Literal["checkpoint", "random"], Option(help="Initial weights; random: baseline without pretraining.")
]
Format = Annotated[str, Option(help="Format of all files: text, jsonl, parquet, or auto (by suffix).")]
TextKey = Annotated[str, Option(help="JSON field or Parquet column with the text; a.b if nested.")]
Precision = Annotated[
    Literal["auto", "fp32", "bf16"],
    Option(help="fp32: no autocast; bf16: autocast; auto: bf16 if the GPU supports it, else fp32."),
]
Out = Annotated[
    Path | None, Option(help="Directory to create or resume; default: a new one in scaling/, tune/ or eval/.")
]
ExportOut = Annotated[Path, Option("--out", metavar="DIR", help="Output directory; must be new or empty.")]
WithoutHead = Annotated[bool, Option("--encoder", help="Export only the encoder, without the task head.")]
DryRun = Annotated[bool, Option("--dry-run", help="Check everything and print the plan, but start nothing.")]
Json = Annotated[bool, Option("--json", help="Print JSON instead of a table.")]


def measuring(out: Path | None, dry_run: bool, json: bool) -> VerbOptions:
    """Return the options that all measuring verbs share."""
    return VerbOptions(out, dry_run, json, console())


def split_words(words: Sequence[str] | None, overrides: Sequence[str] | None) -> tuple[str | None, list[str]]:
    """Split a verb's arguments into the configuration and the settings, and append the settings from --set.
    Raises ConfigError if there is more than one configuration."""
    names = [word for word in words or [] if "=" not in word]
    if len(names) > 1:
        message = f"more than one configuration: {', '.join(names)}"
        raise ConfigError([Issue("CONFIG", "conflict", message, hint="pass one; give settings as a.b=value")])
    settings = [word for word in words or [] if "=" in word]
    return names[0] if names else None, [*settings, *(overrides or [])]


def settings_after_run(words: Sequence[str] | None, overrides: Sequence[str] | None) -> list[str]:
    """Return the settings of a verb that takes RUN. Raises ConfigError if a configuration is given too."""
    name, settings = split_words(words, overrides)
    if name is not None:
        raise ConfigError([Issue(name, "wrong_type", "expected a setting of the form a.b=value after RUN")])
    return settings
