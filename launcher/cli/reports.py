"""Define the verbs `report`, `runs`, `checkpoints` and `doctor`."""

from __future__ import annotations

import contextlib
import dataclasses
import json as jsonlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from bert_dp import files
from bert_dp.config import ConfigError, Issue
from bert_dp.cost import GIB
from launcher.cli import options as opt
from launcher.log import logger

if TYPE_CHECKING:
    from launcher.report.page import Report


def report(
    run_dirs: Annotated[
        list[Path], Argument(help="One or more runs or GLUE evaluations, or a single benchmark or search.")
    ],
    out: Annotated[Path | None, Option(help="HTML file; default: DIR/report.html.")] = None,
    json: Annotated[bool, Option("--json", help="Print JSON instead of writing a page.")] = False,
    log_to: Annotated[
        Sequence[str],
        opt.parsed(opt.loggers, "NAME,...", "Send the runs to wandb, mlflow, tensorboard or trackio."),
    ] = (),
) -> int:
    """Write an HTML report on runs, GLUE evaluations, a benchmark or a search."""
    from bert_dp.files import PAGE
    from launcher.report import html
    from launcher.report.page import show_end, show_report
    from launcher.run.loggers import send_run

    if json and out is not None:
        raise ConfigError([Issue("--out", "conflict", "--json writes no page", out, "--json")])
    if log_to and (others := [d for d in run_dirs if not (d / "config.yaml").exists()]):
        raise ConfigError([_no_run("--log-to", directory) for directory in others])
    target = out or run_dirs[0] / PAGE
    report = report_of(run_dirs)
    if json:
        typer.echo(jsonlib.dumps(files.finite(dataclasses.asdict(report)), indent=1))
    else:
        if issues := html.page_issues("--out", target):
            raise ConfigError(issues)
        try:
            html.write(report, target)
        except FileNotFoundError as error:
            raise ConfigError([Issue("--out", "not_found", str(error))]) from None
    code = max(send_run(run_dir, log_to, logger(opt.console(), json)) for run_dir in run_dirs)
    if not json:
        (show_report if len(run_dirs) > 1 else show_end)(opt.console(), report, target)
    return code


def report_of(run_dirs: Sequence[Path]) -> Report:
    """Build the report on one or more directories from their result files. Raise ConfigError if a directory
    contains no result or the directories cannot be compared."""
    from launcher import evaluate, results, tune
    from launcher.evaluate.glue_scores import Glue, compare_report, glue_report
    from launcher.report.run_page import of_directories
    from launcher.scale import scale_page
    from launcher.scale.models import Scaling
    from launcher.tune.tune_page import tune_page

    pages = {
        evaluate.FILE: lambda path: glue_report(results.read(path, Glue)),
        scale_page.FILE: lambda path: scale_page.scale_page(results.read(path, Scaling), path.parent),
        tune.FILE: tune_page,
    }
    kinds = {path: next((name for name in pages if (path / name).exists()), None) for path in run_dirs}
    first, (kind, *others) = run_dirs[0], dict.fromkeys(kinds.values())
    if others:
        names = ", ".join(f"{path} ({name or 'a run or no result'})" for path, name in kinds.items())
        message = f"runs can be compared only with runs, and GLUE evaluations only with each other: {names}"
        raise ConfigError([Issue("RUN_DIRS", "conflict", message)])
    if kind is None:
        if missing := [d for d in run_dirs if not (d / "config.yaml").exists()]:
            raise ConfigError([_no_run("RUN_DIRS", directory) for directory in missing])
        return of_directories(run_dirs)
    if len(run_dirs) == 1:
        return pages[kind](first / kind)
    if kind != evaluate.FILE:
        raise ConfigError([Issue("RUN_DIRS", "conflict", f"pass one directory with {kind}, not several")])
    return compare_report(run_dirs)


def _no_run(setting: str, path: Path) -> Issue:
    """Return the issue for a `path` that is not a run directory. The hint lists runs inside `path`."""
    runs = sorted(child.parent.name for child in path.glob("*/config.yaml"))
    hint = f"choose a run in it: {', '.join(runs[:3])}" if runs else None
    return Issue(setting, "not_found", f"{path} is not a run directory (no config.yaml in it)", hint=hint)


def runs(
    directory: Annotated[
        Path, Argument(metavar="DIR", show_default=False, help="Directory of runs; default: runs.")
    ] = Path("runs"),
    json: opt.Json = False,
) -> int:
    """List the runs in a directory, newest first.

    With --json, each record also contains all settings of its run.
    """
    from launcher.report import run_files
    from launcher.report.page import Quantity, Report, ReportSection, show_report, table

    if not directory.is_dir():
        raise ConfigError([Issue("DIR", "not_found", f"{directory} is not a directory", str(directory))])
    rows = run_files.list_runs(directory)
    if json:
        typer.echo(jsonlib.dumps(files.finite(rows), indent=1))
        return 0
    quantities = [
        Quantity("status", "status", "word"),
        Quantity("step", "step", "count"),
        Quantity("tokens", "tokens"),
        Quantity("loss", "training loss", "ratio"),
        Quantity("heldout_loss", "held-out loss", "ratio"),
        Quantity("tokens_per_s", "tokens/s, all ranks"),
        Quantity("age_s", "age", "duration"),
    ]
    listed = table([(row["run"], row) for row in rows], quantities, corner="run")
    show_report(opt.console(), Report("", sections=[ReportSection("", tables=[listed])]))
    if not rows:
        typer.echo(f"{directory} contains no runs")
    return 0


def checkpoints(
    run: Annotated[Path, Argument(metavar="RUN", show_default=False, help="Run directory.")],
    json: opt.Json = False,
) -> int:
    """Verify the checkpoints of a run against their hashes.

    The exit code is 1 if a checkpoint is damaged.
    """
    from launcher.report.page import show_result
    from launcher.run.trials import heldout_losses

    paths = files.list_checkpoints(run / "checkpoints")
    if not paths:
        message = f"{run} contains no checkpoint" if run.exists() else f"{run} does not exist"
        hint = "pass a run directory, which contains checkpoints/"
        raise ConfigError([Issue("RUN", "not_found", message, str(run), hint=hint)])
    losses = heldout_losses(run)
    found = [_describe(path, losses) for path in paths]
    show_result(opt.console(), found, lambda: checkpoints_report(found), as_json=json)
    return 1 if any(each["problem"] for each in found) else 0


def _describe(path: Path, losses: Mapping[int, float]) -> dict[str, Any]:
    """Verify and describe a checkpoint (`problem`: None if it is intact). `losses`: step -> held-out loss."""
    from bert_dp.training import checkpoint

    facts, num_bytes = None, None
    with contextlib.suppress(OSError, ValueError):  # an active run may remove the checkpoint at any time
        num_bytes = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
        facts = files.read_checkpoint_facts(path)
    return {
        "name": path.name,
        "step": facts and facts.step,
        "samples": facts and facts.samples,
        "bytes": num_bytes,
        "problem": checkpoint.check(path),
        "heldout_loss": facts and losses.get(facts.step),
    }


def checkpoints_report(checkpoints: Sequence[Mapping[str, Any]]) -> Report:
    """Build the report on a run's checkpoints, with one verdict per damaged checkpoint."""
    from launcher.report.formats import count_of
    from launcher.report.page import Quantity, Report, ReportSection, Verdict, table

    advice = ["Remove the checkpoint; a run resumes from the newest intact one."]
    damaged = [
        Verdict("fail", f"damaged: {each['problem']}", advice) for each in checkpoints if each["problem"]
    ]
    sound = Verdict("ok", f"{count_of(len(checkpoints), 'checkpoint')}; every file matches its hash")
    quantities: list[Quantity] = [
        Quantity("step", "step", "count"),
        Quantity("samples", "samples", "count"),
        Quantity("heldout_loss", "held-out loss", "nats"),
        Quantity(lambda each: each["bytes"] and each["bytes"] / GIB, "size", "gib"),
        Quantity(lambda each: "damaged" if each["problem"] else "verified", "files", "word"),
    ]
    listed = table([(each["name"], each) for each in checkpoints], quantities, corner="checkpoint")
    return Report(
        "bert-dp: checkpoints", verdicts=damaged or [sound], sections=[ReportSection("", tables=[listed])]
    )


def doctor(
    run_dir: Annotated[Path | None, Option(help="Directory for runs; default: working directory.")] = None,
    data: Annotated[Path | None, Option(help="With several nodes: shards that every node must have.")] = None,
    nnodes: opt.Nnodes = None,
    node_rank: opt.NodeRank = None,
    rendezvous: opt.Rendezvous = None,
    interface: opt.Interface = None,
    json: opt.Json = False,
) -> int:
    """Check this machine before a run.

    Checks devices, links, NUMA, memory, limits, disk, loopback, versions, a checkpoint round trip and an
    all-reduce, and takes less than 30 s. With several nodes, node 0 also compares the nodes' versions, data
    and clocks, checks that they share --run-dir, and measures each link. Exits with 1 if a run would fail.
    """
    from launcher.machine import doctor as checks
    from launcher.report.page import show_result
    from launcher.run.check_nodes import check
    from launcher.run.nodes import find_place

    place, code = find_place(nnodes, node_rank, rendezvous, interface), 0
    if place is None and data is not None:
        raise ConfigError([Issue("--data", "no_effect", "has no effect on one node", hint="add --nnodes")])
    machine, findings = checks.doctor(run_dir)
    if place is not None:
        more, code = check(place, run_dir or Path(), data, logger(opt.console(), json))
        findings += more
    facts = {"environment": machine.to_json(), "findings": [f.__dict__ for f in findings]}
    show_result(
        opt.console(), facts, lambda: checks.doctor_report(machine, findings), as_json=json, titled=True
    )
    return 1 if any(f.level == "fail" for f in findings) else code
