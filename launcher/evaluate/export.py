"""`bert-dp export`: export a run to formats that other programs load, and compare an export with its run."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.children import kernel_caches
from launcher.log import PLAIN, print_error, runnable, show
from launcher.report.formats import format_count, format_percent
from launcher.report.page import Report, ReportSection, Table, Verdict, show_result, words

if TYPE_CHECKING:
    from rich.console import Console

    from bert_dp.exporting.check import ExportCheck
    from bert_dp.files.run_facts import ExportFormat, ExportPrecision


def export(
    form: ExportFormat, run: Path, out: Path, *, encoder: bool, precision: ExportPrecision, console: Console
) -> int:
    """Export a run to the new directory `out` and print a summary. Raise ConfigError if `run` is unusable."""
    os.environ |= kernel_caches()  # otherwise torch stores compiled kernels in a temporary directory
    from bert_dp.exporting import source as write
    from bert_dp.measure.matmul_peak import use_all_cores

    use_all_cores()
    run = run.expanduser().resolve()
    source = write.open_run(run, encoder=encoder)
    if source.facts.step == 0:
        print_error("warning: RUN has completed no training step, so the export has its initial weights")
    out = out.expanduser().absolute()
    flags = [*(["--encoder"] if encoder else []), *([f"--{precision}"] if precision != "fp32" else [])]
    command = shlex.join(["bert-dp", "export", form, run.name, "--out", out.name, *flags])
    exported = write.export(source, form, out, command=command, precision=precision)
    description = f"{exported.architecture or form}, {exported.precision}, {exported.kind}"
    sizes = f"{format_count(exported.parameters)} parameters, step {format_count(exported.step)}"
    show(console, f"{out}: {description}, {sizes}", **PLAIN)
    following = f"bert-dp export check {shlex.quote(str(out))} --run {shlex.quote(str(run))}"
    show(console, f"next: {runnable(following)}", **PLAIN)
    return 0


def check(directory: Path, run: Path | None, *, as_json: bool, console: Console) -> int:
    """Compare an export with its run and show the result. Return 1 if the outputs or parameters disagree,
    else 0. Raise ConfigError if the export or the run is unusable, and RunFailed if the export cannot run."""
    from bert_dp.exporting.check import check as compare
    from bert_dp.measure.matmul_peak import use_all_cores

    use_all_cores()
    comparison = compare(directory.expanduser(), run and run.expanduser())
    show_result(console, comparison, lambda: check_report(comparison), as_json=as_json, titled=True)
    return 0 if comparison.ok else 1


def check_report(check: ExportCheck) -> Report:
    """Return the report of a comparison, with a verdict and the worst values over all batches."""
    shares = [row.top1 for row in check.rows if row.top1 is not None]
    allowed = "no limit: only fp32 exports have one"
    if check.tolerance is not None:
        allowed = f"relative to the largest output if that output exceeds 1; limit {check.tolerance:.0e}"
    loaded = None
    if check.parameters is not None and check.stored_parameters is not None:
        loaded = f"{format_count(check.parameters)} loaded, {format_count(check.stored_parameters)} stored"
    facts = [
        words("export", f"{check.architecture or check.format} ({check.kind}, {check.precision})"),
        words("largest difference", f"{max(row.difference for row in check.rows):.1e}", allowed),
        words("same top prediction", format_percent(min(shares)) if shares else None, "in the worst batch"),
        words("difference after reload", f"{check.again:.1e}", "with the export saved and loaded again"),
        words("parameters", loaded, f"{format_count(check.run_parameters)} in the run"),
        words("not loaded", ", ".join(check.not_loaded[:8]) or "none"),
        words("checkpoint", check.checkpoint),
        words("loaded by", ", ".join(f"{name} {version}" for name, version in check.versions.items())),
    ]
    verdict = Verdict("ok", "The export reproduces the outputs of the run.")
    if check.tolerance is None:
        verdict = Verdict("ok", f"In {check.precision}, differences are reported, but no limit applies.")
    if not check.ok:
        verdict = Verdict("fail", "The export does not reproduce the outputs of the run.")
    title = "bert-dp: export compared with its run"
    return Report(title, verdicts=[verdict], sections=[ReportSection("", tables=[Table(facts)])])
