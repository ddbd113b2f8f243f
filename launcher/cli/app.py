"""Register the verbs, run the command line, and turn a failure into a message and an exit code."""

import errno
import faulthandler
import io
import json
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from bert_dp import __version__, files
from bert_dp.config import ConfigError, Issue
from bert_dp.files.reaper import ISSUES_FILE
from bert_dp.training.process import RunFailed
from launcher.cli import evaluation, planning, reports, training, tuning
from launcher.log import print_error

SHARED = ("report", "data", "export")  # write with the user's umask; all other verbs write private files

BAD_PATH = (errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR)

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _group(name: str, help: str, **verbs: Callable[..., int]) -> None:
    """Register the two-word verbs `bert-dp NAME VERB` of a group."""
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
_group("tune", "Find the micro batch and the learning rate.", batch=tuning.tune_batch, lr=tuning.tune_lr)


def _exit_on_signal(number: int, frame: object) -> None:
    """Exit with 128 + `number`; ignore later signals, so that unfinished output is always removed."""
    for later in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(later, lambda *_: None)
    sys.exit(128 + number)


def main() -> None:
    """Run the command line and exit with 0 (success), 1 (failure), 2 (bad input) or 128 + signal number."""
    os.environ["PYTHONSAFEPATH"] = "1"  # so that child processes import nothing from the working directory
    faulthandler.enable(file=2)
    for number in files.honoured((signal.SIGTERM, signal.SIGHUP)):
        signal.signal(number, _exit_on_signal)
    sys.exit(exit_code(lambda: app(prog_name="bert-dp", standalone_mode=False)))


def exit_code(command: Callable[[], int | None]) -> int:
    """Run a typer command line and return its exit code. Prints each problem as one line on stderr, and an
    unexpected exception with its traceback."""
    code = 0
    try:
        if not_utf8 := [a for a in sys.argv[1:] if any("\ud800" <= c <= "\udfff" for c in a)]:
            # because a UTF-8 file could not store the argument
            raise ConfigError([Issue("", "wrong_type", f"argument {a!a} is not UTF-8") for a in not_utf8])
        code = command() or 0
        sys.stdout.flush()  # so that a closed pipe is detected here, not at interpreter exit
        return code
    except (BrokenPipeError, SystemExit) as end:  # click turns a BrokenPipeError into SystemExit(1)
        broken = end.__context__ if isinstance(end, SystemExit) and end.code == 1 else end
        if not isinstance(broken, BrokenPipeError):
            raise
        if not _has_no_reader(sys.stdout) or _has_no_reader(sys.stderr):  # the verb may not have finished
            print_error(f"error: {broken.strerror}")
            return 1
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code
    except ConfigError as error:
        issues = json.dumps({"issues": [issue.to_json() for issue in error.issues]}) + "\n"
        if "--json" in sys.argv:
            sys.stdout.write(issues)
        if path := os.environ.get(ISSUES_FILE):
            Path(path).write_text(issues)
        for issue in error.issues:
            print_error(f"error: {' '.join(str(issue).splitlines())}")
        return 2
    except KeyboardInterrupt:
        return 130
    except RunFailed as error:
        print_error(f"error: {error}")
        return 1
    except MemoryError:
        print_error("error: out of memory; free some memory, or raise `ulimit -v`")
        return 1
    except OSError as error:
        path = f"{error.filename}: " if error.filename else ""
        print_error(f"error: {path}{error.strerror or error}")
        return 2 if error.errno in BAD_PATH else 1
    except Exception as error:
        if hasattr(error, "show") and hasattr(error, "exit_code"):  # typer's error for a wrong command line
            print_error(_usage_error(error))
            return int(error.exit_code)
        print_error(traceback.format_exc().rstrip())
        return 1


def _has_no_reader(stream: TextIO) -> bool:
    """Return True if a stream is a pipe or a socket whose other end is closed."""
    poller = select.poll()
    poller.register(stream, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poller.poll(0))


def _usage_error(error: Any) -> str:
    """Format a usage error as one line, option first; for a group without a verb, return the group's help."""
    shown = io.StringIO()
    error.show(shown)
    if "Error: " not in shown.getvalue():
        return shown.getvalue().rstrip()
    if isinstance(error, typer.BadParameter) and error.param is not None and error.message:
        return f"error: {error.param.opts[0]}: {error.message.removeprefix('Value error, ').rstrip('.')}"
    verb = error.ctx.command_path if error.ctx else "bert-dp"
    return f"error: {error.format_message().rstrip('.')}; see `{verb} --help`"
