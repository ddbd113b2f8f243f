"""Render a Report as a self-contained HTML file, with Jinja2 for text and plotly's script for figures.

The content security policy allows only the page's own scripts, which it identifies by hash.
"""

import base64
import functools
import hashlib
import json
from pathlib import Path
from typing import Any

from bert_dp import files
from bert_dp.config import Issue
from launcher.log import print_error
from launcher.report.figures import drawing
from launcher.report.page import Report

TEMPLATES = Path(__file__).parent / "templates"
# every bert-dp page starts with these bytes
START = (
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy"'
)
MAX_NOTES = 6  # notes shown per verdict; further notes are collapsed


def html(report: Report) -> str:
    """Render a report as an HTML page."""
    figures = [figure for section in report.sections for figure in section.figures if not figure.is_empty]
    drawings = [drawing(figure) for figure in figures]
    return render(
        "page.html",
        "page.js",
        _plotly(),
        report=report,
        shown=MAX_NOTES,
        numbered=figures,
        drawings=json.dumps(drawings, allow_nan=False).replace("<", "\\u003c"),
    )


def render(template: str, script: str, library: str = "", **values: Any) -> str:
    """Render a template. The page can run only `script` (a file name) and `library` (JavaScript source)."""
    own = _read(script)
    digests = [hashlib.sha256(text.encode()).digest() for text in (library, own) if text]
    allowed = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    policy = f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:"
    page: str = _template(template).render(
        policy=policy, start=START, style=_read("page.css"), script=own, **values
    )
    # Jinja would copy the library (10 MB). "<" in text is escaped, so only the template contains "<library>"
    return page.replace("<library>", library)


def write(report: Report, out: Path) -> None:
    """Write the page of a report to `out` atomically. Raises OSError if it cannot be written."""
    out.parent.mkdir(parents=True, exist_ok=True)
    files.write_text(out, html(report))


def write_or_warn(report: Report, out: Path) -> bool:
    """Write the page of a report. If that fails, warn and return False, so that the results are not lost."""
    try:
        write(report, out)
    except OSError as error:
        print_error(f"warning: the page {out} was not written: {error.strerror or error}")
        return False
    return True


def page_issues(option: str, path: Path) -> list[Issue]:
    """Check that `path` may be overwritten: it is absent, an empty file or a bert-dp page."""
    if not path.exists():
        return []
    if path.is_file():
        with path.open("rb") as file:
            if file.read(len(START)) in (START.encode(), b""):
                return []
    message = f"{path} is not a bert-dp page and would be overwritten"
    return [Issue(option, "exists", message, str(path), hint="choose another path")]


@functools.cache
def _template(name: str) -> Any:
    import jinja2

    def printable(value: object) -> object:
        return value if hasattr(value, "__html__") else files.safe(str(value))

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        finalize=printable,
    )
    return environment.get_template(name)


@functools.cache
def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def _read(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")
