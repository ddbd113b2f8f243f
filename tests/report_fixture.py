"""Write run directories as a rank does, and read pages and console output in tests."""

import base64
import dataclasses
import functools
import hashlib
import html.parser
import io
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from bert_dp import files
from launcher.machine.environment import probe
from launcher.report.html import html as page_of
from launcher.report.page import Figure, Report, show_report

HOSTILE = "<script>alert(1)</script>\"'&$x_1$\x00\x1b[0m\ud800"
VOID = {"meta", "input", "br"}


def evaluation(step: int, tokens: int, loss: float) -> dict[str, Any]:
    """Return a line of evals.jsonl."""
    return {"step": step, "tokens": tokens, **HELDOUT, "loss": loss, "elapsed_s": step / 2}


HELDOUT = {
    "loss": 6.25,
    "loss_se": 0.02,
    "masked_accuracy": 0.125,
    "mask_rate": 0.15,
    "masked_tokens": 4096,
    "sequences": 216,
}
TRAINING_S = {"data_wait": 3.0, "forward_backward": 60.0, "optimizer": 9.0}
SUMMARY: dict[str, Any] = {
    "status": "done",
    "exit_code": 0,
    "signal": None,
    "step": 100,
    "samples": 6400,
    "tokens": 819200,
    "final_loss": 6.0,
    "heldout_loss": 6.25,
    "heldout": HELDOUT,
    "unigram_entropy_nats": 6.75,
    "uniform_entropy_nats": math.log(4096),
    "world_size": 2,
    "device": "CPU",
    "parameters": 1_234_567,
    "global_batch": 64,
    "micro_batch": 16,
    "accumulation": 2,
    "precision": "fp32",
    "compiled": False,
    "steps_per_s": 2.0,
    "global_steps_per_s": 8.0,
    "samples_per_s": 128.0,
    "tokens_per_s": 16384.0,
    "tokens_per_s_per_gpu": 8192.0,
    "mfu": None,
    "peak_memory_gib": 1.25,
    "energy_j": None,
    "skipped_steps": 2,
    "checkpoint": "checkpoints/step-00000100",
    "time_s": {"setup": 10.0, "compile": 5.0, "train": 75.0, **TRAINING_S, "eval": 6.0, "save": 4.0},
}


def metrics(step: int, **changes: Any) -> dict[str, Any]:
    """Return a line of metrics.jsonl with the rates and sizes of the summary."""
    shared = """world_size global_batch micro_batch accumulation steps_per_s global_steps_per_s samples_per_s
        tokens_per_s tokens_per_s_per_gpu mfu peak_memory_gib"""
    return {
        **{name: SUMMARY[name] for name in shared.split()},
        "step": step,
        "samples": 64 * step,
        "tokens": 8192 * step,
        "epoch": 0,
        "progress": step / 100,
        "loss": 8.0 - step / 50,
        "lr": 1e-3,
        "grad_norm": 1.0,
        "step_time_s": 0.5,
        "data_wait_s": 0.01,
        "forward_backward_s": 0.4,
        "optimizer_s": 0.05,
        "elapsed_s": step / 2,
        "skipped_steps": 0,
        **changes,
    }


@functools.cache
def machine() -> dict[str, Any]:
    return probe(Path()).to_json()


def make_run(path: Path, num_lines: int = 10, summary: dict[str, Any] | None = None, **config: Any) -> Path:
    path.mkdir(parents=True)
    for i in range(1, num_lines + 1):
        files.append_line(path / "metrics.jsonl", metrics(10 * i))
    files.append_line(path / "evals.jsonl", evaluation(100, 819200, 6.25))
    files.write_json(path / "summary.json", {**SUMMARY, **(summary or {})})
    files.write_text(path / "config.yaml", json.dumps({"optim": {"lr": 1e-3}, **config}))
    files.write_json(path / "environment.json", machine())
    return path


class Page(html.parser.HTMLParser):
    """Parsed page: `open` are tags that are not closed, `loads` attributes that could fetch something,
    `scripts` executed scripts, `data` the figures of plotly, `text` the visible text, `labels` the labels of
    figures, `exact` the numbers with all their digits."""

    def __init__(self, text: str):
        super().__init__()
        self.open, self.loads, self.scripts, self.labels, self._texts = (list[str]() for _ in range(5))
        self.exact: set[float] = set()
        self.data: list[dict[str, Any]] = []
        self.policy = self._script = ""
        self.feed(text)
        self.close()
        self.text = " ".join(" ".join(self._texts).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.loads += [
            f"{k}={v}" for k, v in given.items() if k in ("href", "src", "srcset", "action") or k[:2] == "on"
        ]
        if tag == "script":
            self._script = given.get("type", "javascript")
        if tag == "td" and "title" in given:
            self.exact.add(float(given["title"]))
        if given.get("role") == "img":
            self.labels.append(given["aria-label"])
        if given.get("http-equiv") == "Content-Security-Policy":
            self.policy = given["content"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            if self._script == "javascript":
                self.scripts.append(data)
            else:
                self.data = json.loads(data)
        elif self.open and self.open[-1] != "style":
            self._texts.append(data)


def read_page(report: Report) -> Page:
    """Parse the page of a report, and check that its HTML is complete and that it fetches nothing."""
    text = page_of(report)
    text.encode("utf-8")
    page = Page(text)
    assert page.open == []
    assert page.loads == []
    hashes = {base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in page.scripts}
    allowed = re.findall(r"'sha256-([^']+)'", page.policy)
    assert hashes <= {*allowed}
    assert len(allowed) == 2
    rules = dict(rule.split(" ", 1) for rule in page.policy.split("; "))
    assert rules.pop("default-src") == "'none'"
    assert "unsafe" not in rules.pop("script-src")
    assert rules == {"style-src": "'unsafe-inline'", "img-src": "data: blob:"}
    drawn = [figure for figure in figures_of(report) if not figure.is_empty]
    assert len(page.data) == len(page.labels) == len(drawn)
    assert len(page.scripts) == (2 if drawn else 0)
    return page


def figures_of(report: Report) -> list[Figure]:
    return [figure for section in report.sections for figure in section.figures]


def figure_of(report: Report, title: str) -> Figure:
    return next(figure for figure in figures_of(report) if figure.title == title)


def shown(report: Report, width: int = 80) -> list[str]:
    """Return the lines that a report prints on the console."""
    console = Console(width=width, record=True, file=io.StringIO())
    show_report(console, dataclasses.replace(report, next=""), titled=True)
    return [line.rstrip() for line in console.export_text().splitlines()]


def unfolded(lines: list[str]) -> str:
    return " ".join(" ".join(lines).split())


def with_strings(value: Any, change: Callable[[str], str], but: tuple[type, ...] = ()) -> Any:
    """Return a report with all texts changed, except in classes of `but` and in fields with fixed choices."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, (list, tuple)):
        return [with_strings(item, change, but) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, *but)):
        kept = {"level", "unit", "style"}
        names = [field.name for field in dataclasses.fields(value) if field.name not in kept]
        changed = {name: with_strings(getattr(value, name), change, but) for name in names}
        return dataclasses.replace(value, **changed)
    return value
