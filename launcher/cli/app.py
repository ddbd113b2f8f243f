"""Register the verbs, run the command line, and turn a failure into a message and an exit code."""

import faulthandler
import os
import signal
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from bert_dp import __version__, files
from launcher.cli import evaluation, planning, reports, training, tuning
from launcher.cli.exit_code import exit_code

SHARED = ("report", "data", "export")  # verbs that use the user's umask; all others write private files


app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _group(name: str, help: str, **verbs: Callable[..., int]) -> None:
    """Register a group of two-word verbs, `bert-dp NAME VERB`."""
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
    """Pretrain a crammed BERT on all GPUs of one or several nodes, and measure how throughput scales."""
    if context.invoked_subcommand not in SHARED:
        files.set_private_umask()


for verb in (
    training.train,
    training.finetune,
    training.distill,
    training.configs,
    reports.runs,
    reports.checkpoints,
    evaluation.predict,
    tuning.scale,
    reports.report,
    reports.doctor,
):
    app.command()(verb)

_group("data", "Build and inspect token shards.", build=training.data_build, inspect=training.data_inspect)
_group("eval", "Evaluate a run.", glue=evaluation.eval_glue, mlm=evaluation.eval_mlm)
_group(
    "export",
    "Export a run to formats that other programs load.",
    hf=evaluation.export_hf,
    onnx=evaluation.export_onnx,
    aoti=evaluation.export_aoti,
    check=evaluation.export_check,
)
_plans = typer.Typer(rich_markup_mode=None, invoke_without_command=True)
_plans.callback()(planning.plan)
_plans.command("fit")(planning.plan_fit)
_plans.command("scaling")(planning.plan_scaling)
app.add_typer(_plans, name="plan")
_group("tune", "Find the best micro-batch size or learning rate.", batch=tuning.tune_batch, lr=tuning.tune_lr)


def _exit_on_signal(number: int, frame: object) -> None:
    """Exit with 128 + `number`; ignore later signals, which could interrupt the removal of partial output."""
    for later in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(later, lambda *_: None)
    sys.exit(128 + number)


def main() -> None:
    """Run the command line and exit with the code that `exit_code` returns."""
    os.environ["PYTHONSAFEPATH"] = "1"  # so that child processes import nothing from the working directory
    faulthandler.enable(file=2)
    for number in files.honoured((signal.SIGTERM, signal.SIGHUP)):
        signal.signal(number, _exit_on_signal)
    sys.exit(exit_code(lambda: app(prog_name="bert-dp", standalone_mode=False)))
