"""Options that several verbs share, and how the text of an option becomes a value."""

from __future__ import annotations

import glob
import importlib.util
import io
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from bert_dp.config import ConfigError, benchmark_names, engine_facts, shipped_configs
from bert_dp.config.error import install_command
from bert_dp.record import safe
from launcher.job import logger_issues
from launcher.run.starters import launcher_problem

if TYPE_CHECKING:
    from rich.segment import Segment

MAX_GPUS = 1_000_000

Precision = Annotated[
    Literal["auto", "fp32", "bf16"],
    typer.Option(
        help="What a run computes in: fp32 = the precision of its weights, bf16 = autocast; auto = bf16 on a "
        "GPU that multiplies it, else fp32."
    ),
]
Mode = Literal["weak", "strong"]
MODES: dict[str, tuple[Mode, ...]] = {"weak": ("weak",), "strong": ("strong",), "both": ("weak", "strong")}


def parsed(parse: Callable[[str], Any], metavar: str, help: str, *names: str) -> Any:
    """An option whose text `parse` turns into a value; it raises typer.BadParameter. Defaults are values.
    `names`: where it is not the parameter's."""

    def value_of(text: Any) -> Any:
        return parse(text) if isinstance(text, str) else text

    return typer.Option(*names, parser=value_of, metavar=metavar, show_default=False, help=help)


def counts_option(help: str, *names: str) -> Any:
    """Whole numbers by commas."""
    return parsed(counts, "N,...", help, *names)


def dry_run_option(what: str) -> Any:
    """--dry-run; `what` names what is checked and printed."""
    return typer.Option("--dry-run", help=f"Check {what}, start nothing.")


def run_dir_option(default: str) -> Any:
    """--run-dir of a verb that trains; `default`: the path before date and time."""
    return typer.Option(help=f"Run directory; default: {default}-DATE-TIME.")


def out_option(default: str) -> Any:
    """--out of a verb that goes on where it was ended; `default`: the path before date and time."""
    return typer.Option(help=f"Directory to write; named again, it goes on. Default: {default}-DATE-TIME.")


def counts(text: str) -> tuple[int, ...]:
    """`1,2,4` or `1..1024` (doubling, the end included)."""
    problem = f"{text!r} is not a list like 1,2,4 or a range like 1..1024"
    if ends := re.fullmatch(r"\s*(\d+)\s*\.\.\s*(\d+)\s*", text):
        first, last = int(ends[1]), int(ends[2])
        if not 0 < first <= last:
            raise typer.BadParameter(f"{problem}; the first must be above 0 and not above the last")
        values = []
        while first < last <= MAX_GPUS:
            values.append(first)
            first *= 2
        values.append(last)
    elif re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", text):
        values = [int(part) for part in text.split(",")]
    else:
        raise typer.BadParameter(problem)
    if not all(0 < count <= MAX_GPUS for count in values):
        raise typer.BadParameter(f"{problem}; each between 1 and {MAX_GPUS:,}")
    return tuple(dict.fromkeys(values))


def modes(text: str) -> tuple[Mode, ...]:
    """weak, strong or both."""
    if text not in MODES:
        raise typer.BadParameter(f"unknown mode {text}; choose from {', '.join(MODES)}")
    return MODES[text]


def engines(text: str) -> tuple[str, ...]:
    """`ddp,zero1` -> ("ddp", "zero1"); the first is the one that is also run without the loader."""
    known = benchmark_names()
    names = [f"{name}-1" if f"{name}-1" in known else name for name in words(text)]
    if unknown := [name or "nothing" for name in names if name not in known]:
        raise typer.BadParameter(f"unknown engine {', '.join(unknown)}; choose from {', '.join(known)}")
    for package in sorted({engine_facts(name).package or "" for name in names} - {""}):
        if importlib.util.find_spec(package) is None:
            raise typer.BadParameter(f"{package} needs `{install_command(package)}`")
    return tuple(dict.fromkeys(names))


def words(text: str) -> tuple[str, ...]:
    """What stands between commas, each once."""
    return tuple(dict.fromkeys(word.strip() for word in text.split(",")))


def loggers(text: str) -> tuple[str, ...]:
    """`wandb,mlflow` -> ("wandb", "mlflow"), each installed."""
    names = words(text)
    if issues := logger_issues(names, ""):
        raise typer.BadParameter("; ".join(map(str, issues)))
    return names


def names(text: str) -> tuple[str, ...]:
    """`CoLA,RTE` -> ("CoLA", "RTE"), each once."""
    names = words(text)
    if not all(names):
        raise typer.BadParameter(f"{text!r} is not a list of names like CoLA,RTE")
    return names


def rates(text: str) -> tuple[float, ...]:
    """`4e-5,1e-4` -> learning rates, each once, ascending."""
    try:
        rates = sorted({float(word) for word in text.split(",")})
    except ValueError:
        rates = []
    if not rates or not all(0 < rate < 1 for rate in rates):
        raise typer.BadParameter(f"{text!r} is not a list of rates between 0 and 1 like 4e-5,1e-4")
    return tuple(rates)


def starts(text: str) -> tuple[tuple[str, str], ...]:
    """`RTE=MNLI,MRPC=MNLI` -> pairs of a task and the task whose finetuned run it starts from."""
    pairs = [tuple(part.strip() for part in word.split("=")) for word in text.split(",")]
    if not all(len(pair) == 2 and all(pair) for pair in pairs) or len({p[0] for p in pairs}) < len(pairs):
        raise typer.BadParameter(f"{text!r} is not of the form RTE=MNLI,MRPC=MNLI, each task once")
    return tuple((task, source) for task, source in pairs)


def seconds(text: str) -> float:
    """`90s`, `5m` or `1h` -> seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|h)", text.strip())
    value = float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]] if match else 0.0
    if not 0 < value < math.inf:
        raise typer.BadParameter(f"expected a duration such as 90s, 5m or 1h, not {text!r}")
    return value


def two_batches(text: str) -> tuple[int, int]:
    """`256->4096` as two global batches."""
    match = re.fullmatch(r"\s*(\d{1,9})\s*->\s*(\d{1,9})\s*", text)
    batches = (int(match[1]), int(match[2])) if match else (0, 0)
    if not min(batches):
        raise typer.BadParameter(f"{text!r} is not of the form '256->4096', two global batches; quote it")
    return batches


def launcher(text: str) -> str:
    """A launcher that is installed."""
    if problem := launcher_problem(text):
        raise typer.BadParameter(problem)
    return text


def shipped_names(incomplete: str) -> list[str]:
    """What a shell offers for a configuration's name, beside its files."""
    return [path.stem for path in sorted(shipped_configs().glob(f"{glob.escape(incomplete)}*.yaml"))]


Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="CONFIG | SETTING=VALUE",
        show_default=False,
        autocompletion=shipped_names,
        help="YAML file, or a name that `bert-dp configs` lists (default: quickstart), and settings.",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SETTING=VALUE", show_default=False, help="Settings; the rest is configs/glue.yaml."
    ),
]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="a.b=v", help="The same as SETTING=VALUE; repeatable.")
]
Nproc = Annotated[str, typer.Option(help="Ranks: auto (every GPU, or 2 CPU ranks) or a number.")]
Launcher = Annotated[
    str, parsed(launcher, "NAME", "Starts the ranks: torchrun (the default), accelerate or deepspeed.")
]
Resume = Annotated[str, typer.Option(help="auto, never, or the path of a checkpoint or run.")]
MaxRestarts = Annotated[
    int, typer.Option(min=0, metavar="K", help="Start a failed run again from its newest checkpoint.")
]
Force = Annotated[
    bool, typer.Option("--force", help="Start although the memory is estimated not to suffice.")
]
Run = Annotated[
    Path,
    typer.Argument(
        metavar="RUN", show_default=False, help="Run directory (its newest checkpoint), or one checkpoint."
    ),
]
GlueData = Annotated[list[Path] | None, typer.Option(help="Folder or archive with GLUE's files; repeatable.")]
Init = Annotated[
    Literal["checkpoint", "random"],
    typer.Option(help="random = the baseline that shows what pretraining is worth."),
]
TEXTS = "Files, directories, globs (text, JSONL, Parquet; .gz .xz .zst), hub:NAME, or builtin."
Format = Annotated[
    str, typer.Option(help="Format of all files: text, jsonl or parquet; auto goes by the suffix.")
]
TextKey = Annotated[
    str,
    typer.Option(help="Field of a JSON record or column of a Parquet file that holds the text; nested: a.b."),
]
ExportOut = Annotated[Path, typer.Option("--out", metavar="DIR", help="Directory to write; new or empty.")]
WithoutHead = Annotated[
    bool, typer.Option("--encoder", help="The hidden states alone, without the head of tokens or labels.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def split_words(words: Sequence[str] | None, overrides: Sequence[str] | None) -> tuple[str | None, list[str]]:
    """The configuration among the arguments of a verb, and its settings with those of --set. Raises
    ConfigError."""
    names = [word for word in words or [] if "=" not in word]
    if len(names) > 1:
        raise ConfigError([f"CONFIG: {' and '.join(names)} are two; give one, and settings as a.b=value"])
    settings = [word for word in words or [] if "=" in word]
    return names[0] if names else None, [*settings, *(overrides or [])]


def settings_after_run(words: Sequence[str] | None, overrides: Sequence[str] | None) -> list[str]:
    """The settings of a verb whose configuration follows from its RUN. Raises ConfigError."""
    name, settings = split_words(words, overrides)
    if name is not None:
        raise ConfigError([f"{name}: expected a setting as a.b=value, after the RUN"])
    return settings


def console() -> Any:
    """A terminal, or a plain log. No control character of foreign text gets there, whatever is shown, and a
    character that its encoding lacks becomes a question mark."""
    from rich.console import Console

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")

    class SafeConsole(Console):
        def render(self, *arguments: Any, **options: Any) -> Iterator[Segment]:
            for segment in super().render(*arguments, **options):
                yield segment if segment.control else segment._replace(text=safe(segment.text))

    return SafeConsole()
