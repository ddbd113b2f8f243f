"""The application: its verbs by group, and the entry point."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from bert_dp import __version__, files
from launcher.cli import data, evaluation, reports, training, tuning
from launcher.cli.errors import exit_code

SHARED = ("report", "data", "export")  # write where the user says, with the user's umask; others privately

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _group(name: str, help: str, **verbs: Callable[..., int]) -> None:
    """Register verbs of two words: `bert-dp NAME VERB`."""
    group = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help=help)
    for verb, function in verbs.items():
        group.command(verb)(function)
    app.add_typer(group, name=name)


def _version(show: bool) -> None:
    if show:
        typer.echo(f"bert-dp {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Pretrain a crammed BERT on every GPU of this machine, and measure what each GPU adds."""
    if context.invoked_subcommand not in SHARED:
        files.set_private_umask()


for verb in (
    training.train,
    training.finetune,
    training.configs,
    evaluation.checkpoints,
    evaluation.predict,
    tuning.scale,
    reports.report,
    reports.doctor,
):
    app.command()(verb)

_group("data", "Build and inspect token shards.", build=data.build, inspect=data.inspect)
_group("eval", "Evaluate a run.", glue=evaluation.eval_glue, mlm=evaluation.eval_mlm)
_group(
    "export",
    "Export a run to formats that other programs load.",
    hf=evaluation.export_hf,
    onnx=evaluation.export_onnx,
    aoti=evaluation.export_aoti,
    check=evaluation.export_check,
)
_group("plan", "Predict the throughput of hardware that you do not have yet.", scaling=tuning.plan_scaling)
_group("tune", "Find the micro batch and the learning rate.", batch=tuning.tune_batch, lr=tuning.tune_lr)


def _leave(number: int, frame: object) -> None:
    """Exit with 128 + n; a second signal does not interrupt the removal of unfinished output."""
    for later in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(later, lambda *_: None)
    sys.exit(128 + number)


def main() -> None:
    """Run the command line of this process. Exit codes: 0 done, 2 bad input, 1 failed, 128 + signal."""
    files.reopen_std_streams()
    os.environ["PYTHONSAFEPATH"] = "1"  # a process that a verb starts imports nothing from the current folder
    faulthandler.enable(file=2)
    for number in files.honoured((signal.SIGTERM, signal.SIGHUP)):
        signal.signal(number, _leave)
    sys.exit(exit_code(lambda: app(prog_name="bert-dp", standalone_mode=False)))
