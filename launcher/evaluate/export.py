"""`bert-dp export`: checked here, written and compared by `python -m bert_dp.export`, shown as a Report."""

from __future__ import annotations

import importlib.util
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bert_dp.config import ConfigError, Issue, native_issues
from bert_dp.config.error import install_command
from bert_dp.record.exported import ExportFormat, read_exported
from launcher import children, results
from launcher.evaluate.finetune import Pretrained, find_pretrained
from launcher.log import PLAIN, show
from launcher.output import place_issues
from launcher.report.console import show_report
from launcher.report.model import Cell, Report, Section, Table, Verdict
from launcher.report.numbers import count_of, format_count
from launcher.report.parts import words
from launcher.report.quantities import Computed, Quantity, table
from launcher.results import ExportCheck

if TYPE_CHECKING:
    from rich.console import Console

NEEDS: dict[ExportFormat, tuple[str, ...]] = {
    "hf": (),
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
    "aoti": (),
}
"""Packages that writing a format takes."""
LOADS: dict[ExportFormat, tuple[str, ...]] = {
    "hf": ("transformers",),
    "onnx": ("onnx", "onnxruntime"),
    "aoti": (),
}
"""Packages that loading it takes."""
BATCH = (
    Quantity("length", "length", "count"),
    Quantity("outputs", "outputs", "count"),
    Computed(lambda row: Cell(f"{row.difference:.1e}", exact=row.difference), "difference"),
    Quantity("top1", "same top 1", "percent"),
)
NOTE = (
    "difference: the largest of any output, over the largest output where that is above 1. The sequences "
    "of a batch differ in length; padding is not compared."
)


def export(
    form: ExportFormat, run: Path, out: Path, *, encoder: bool, options: Sequence[str] = (), console: Console
) -> int:
    """`options`: of the format, as `python -m bert_dp.export` takes them. Returns the exit code. Raises
    ConfigError."""
    start = find_pretrained(run.expanduser())
    out = out.expanduser().absolute()
    issues: list[Issue | str] = [*package_issues(f"export {form}", NEEDS[form]), *_out_issues(out)]
    if form == "aoti":
        issues += _aoti_issues(options)
    if form == "hf":
        issues += _hf_issues(start, encoder)
    if issues:
        raise ConfigError(issues)
    flags = [*(["--encoder"] if encoder else []), *options]
    command = shlex.join(["bert-dp", "export", form, start.run.name, "--out", out.name, *flags])
    arguments = [form, "--out", str(out), f"--command={command}", *flags, "--", str(start.run)]
    code = children.run_module("bert_dp.export", arguments).returncode
    if code == 0:
        exported = read_exported(out)
        what = f"{exported.architecture or form}, {exported.precision}, {exported.kind}"
        sizes = f"{format_count(exported.parameters)} parameters, step {format_count(exported.step)}"
        show(console, f"{out}: {what}, {sizes}", **PLAIN)
        show(console, f"next: bert-dp export check {shlex.quote(str(out))}", **PLAIN)
    return code


def package_issues(what: str, packages: Sequence[str], extra: str = "export") -> list[str]:
    """At most one line, which names the extra that has what is missing."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if not missing:
        return []
    return [f"{what} needs {' and '.join(missing)}, of the extra {extra}; {install_command(extra)}"]


def _hf_issues(start: Pretrained, encoder: bool) -> list[Issue]:
    is_classifier = start.config.objective.name == "finetune"
    return native_issues(start.config, "encoder" if encoder else "classifier" if is_classifier else "mlm")


def _aoti_issues(options: Sequence[str]) -> list[str]:
    issues = []
    if shutil.which("g++") is None:
        issues.append("export aoti compiles by g++, which is not installed; install it, or export onnx")
    if len(options) > 1:
        issues.append(f"{' and '.join(options)} are two precisions; give one of them")
    elif "--int8" in options:
        issues += package_issues("export aoti --int8", ["torchao"], "int8")
    return issues


def _out_issues(out: Path) -> Sequence[Issue | str]:
    """Why nothing can be written there; at most one line."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        return [f"--out: {out} is not an empty directory; name a new one"]
    return place_issues(out.parent, "--out")


def check(directory: Path, run: Path | None, *, as_json: bool, console: Console) -> int:
    """Exit code 0 if the directory computes what its run computes, else 1. Raises ConfigError."""
    directory = directory.expanduser()
    exported = read_exported(directory)
    if issues := package_issues("export check", LOADS[exported.format]):
        raise ConfigError(issues)
    arguments = ["check", *(["--run", str(run.expanduser())] if run else []), "--", str(directory)]
    code, data = children.capture_json("bert_dp.export", arguments)
    if data is None:
        return code or 1
    comparison = results.parse(data, ExportCheck, "the comparison")
    if as_json:
        sys.stdout.write(results.to_json(comparison))
    else:
        show_report(console, check_report(comparison), titled=True)
    return code


def check_report(check: ExportCheck) -> Report:
    """The differences by batch and length, and what decides."""
    rows = [(f"{row.batch}", row) for row in check.rows]
    largest = max(row.difference for row in check.rows)
    allowed = "not judged, as it is no fp32"
    if check.tolerance is not None:
        allowed = f"{check.tolerance:.0e} is allowed"
    facts = [
        words("what", f"{check.architecture or check.format} ({check.kind}, {check.precision})"),
        words("largest difference", f"{largest:.1e}", allowed),
        words("saved and loaded again", f"{check.again:.1e}", "difference from what was loaded first"),
        words("parameters", _parameters(check), f"{format_count(check.run_parameters)} in the run"),
        words("not loaded", ", ".join(check.not_loaded[:8]) or "none"),
        words("checkpoint", check.checkpoint),
        words("loaded by", ", ".join(f"{name} {version}" for name, version in check.versions.items())),
    ]
    verdict = Verdict("ok", "The directory computes what the run computes.")
    if check.tolerance is None:
        verdict = Verdict("ok", f"Measured and not judged, as {check.precision} is no fp32.")
    if not check.ok:
        verdict = Verdict("fail", "The directory does not compute what the run computes.")
    return Report(
        "bert-dp: an exported directory beside its run",
        verdicts=[verdict],
        sections=[Section("", tables=[table(rows, BATCH, corner="batch"), Table(facts)], notes=[NOTE])],
    )


def _parameters(check: ExportCheck) -> str | None:
    if check.parameters is None or check.stored_parameters is None:
        return None
    return (
        f"{count_of(check.parameters, 'number')} loaded, {count_of(check.stored_parameters, 'number')} stored"
    )
