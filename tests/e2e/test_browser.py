"""The pages in a real browser: no error in the console, every figure drawn, no text on top of another."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.report.html import write
from launcher.report.run_report import of_directories
from launcher.scaling import page as scaling_page
from launcher.tune import page as tune_page
from tests.browser import COLLISIONS, FIGURES, OVERFLOW, Browser, find
from tests.report_fixture import make_run
from tests.scaling_fixture import HOSTILE, nulls, scaling
from tests.tune_fixture import batch, lr, transfer

NAMES = ("both", "large", "one", "nulls", "hostile", "run", "runs", "batch", "lr")
BROKEN = {
    "script": "<script>console.log('ran')</script>",
    "image": "<img src='https://example.invalid/pixel.png'>",
    "style sheet": "<link rel='stylesheet' href='https://example.invalid/style.css'>",
    "event": "<svg onload='1'></svg>",
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = find()
    if program is None:
        pytest.skip("no chromium or google-chrome on PATH")
    with Browser(program) as found:
        yield found


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    hostile = scaling(engines=("ddp", "zero1"), failed={"weak-zero1-n4": ("failed", HOSTILE * 20)})
    for cell in hostile["cells"]:
        cell |= {"id": cell["id"] + HOSTILE + "x" * 200, "engine": cell["engine"] + HOSTILE * 3}
    data: dict[str, dict[str, Any]] = {
        "both": scaling(modes=("weak", "strong"), prediction=True),
        "large": scaling(
            engines=("ddp", "zero1", "fsdp", "accelerate", "deepspeed"), sizes=(1, 2, 4, 8, 16, 32, 64, 512)
        ),
        "one": scaling(engines=(), sizes=(1,)),
        "nulls": nulls(),
        "hostile": hostile,
    }
    for name, content in data.items():
        scaling_page.write(content, folder / f"{name}.html")
    tune_page.write(batch(), folder / "batch.html")
    tune_page.write(lr(transfer=transfer()), folder / "lr.html")
    write(of_directories([make_run(folder / "a" / "run")]), folder / "run.html")
    compared = [
        make_run(folder / name / HOSTILE.replace("\x00", "").replace("\ud800", "").replace("/", ""))
        for name in "bc"
    ]
    write(of_directories(compared), folder / "runs.html")
    return {name: folder / f"{name}.html" for name in NAMES}


def expected(path: Path) -> list[str]:
    text = path.read_text()
    return [label.replace("&#x27;", "'") for label in re.findall(r'role="img" aria-label="([^"]*)"', text)]


def faults(browser: Browser) -> list[str]:
    """What is wrong with the page that is open."""
    found = list(browser.errors)
    found += [
        f"{f['label']}: {f['width']} x {f['height']}"
        for f in browser.evaluate(FIGURES)
        if f["width"] < 200 or f["height"] < 20
    ]
    found += [f"texts meet: {pair}" for pair in browser.evaluate(COLLISIONS)]
    if browser.evaluate(OVERFLOW) > 0:
        found.append("wider than the window")
    return found


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [400, 1200])
@pytest.mark.parametrize("name", NAMES)
def test_page(browser: Browser, pages: dict[str, Path], name: str, width: int, dark: bool) -> None:
    browser.open(pages[name], width, dark)
    # what is folded, and the other of two scales, has no size until it is opened
    browser.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    browser.evaluate("document.querySelectorAll('div.log').forEach(d => { d.style.display = 'block'; })")
    assert faults(browser) == []
    assert sorted(f["label"] for f in browser.evaluate(FIGURES)) == sorted(expected(pages[name]))
    ground = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(17, 21, 27)" if dark else "rgb(246, 247, 249)")


def test_figures_are_counted(pages: dict[str, Path]) -> None:
    """The names above come from the page itself: their number is fixed, so that none is missing."""
    assert {name: len(expected(path)) for name, path in pages.items()} == {
        "both": 15,
        "large": 8,
        "one": 5,
        "nulls": 0,
        "hostile": 8,
        "run": 5,
        "runs": 5,
        "batch": 6,
        "lr": 3,
    }


@pytest.mark.parametrize("name", ["both", "large"])
def test_page_on_paper(browser: Browser, pages: dict[str, Path], name: str, tmp_path: Path) -> None:
    browser.open(pages[name], 720, dark=True, media="print")
    assert faults(browser) == []
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    browser.pdf(tmp_path / "page.pdf")
    content = (tmp_path / "page.pdf").read_bytes()
    assert content.startswith(b"%PDF")
    assert len(content) > 20_000
    assert browser.errors == []


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_page_is_noticed(
    browser: Browser, pages: dict[str, Path], name: str, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.html"
    broken.write_text(pages["one"].read_text().replace("</main>", f"{BROKEN[name]}</main>"))
    browser.open(broken)
    assert browser.errors


def test_a_figure_without_size_and_texts_that_meet_are_noticed(
    browser: Browser, pages: dict[str, Path], tmp_path: Path
) -> None:
    flat, heaped = tmp_path / "flat.html", tmp_path / "heaped.html"
    flat.write_text(pages["one"].read_text().replace("svg{display:block;", "svg{display:none;"))
    browser.open(flat)
    assert any("0 x 0" in fault for fault in faults(browser))
    heaped.write_text(
        pages["both"].read_text().replace("</style>", "svg text{font-size:40px!important}</style>")
    )
    browser.open(heaped)
    assert any("texts meet" in fault for fault in faults(browser))
    wide = tmp_path / "wide.html"
    wide.write_text(pages["one"].read_text().replace("</main>", "<p style='width:3000px'>wide</p></main>"))
    browser.open(wide)
    assert "wider than the window" in faults(browser)
    with pytest.raises(FileNotFoundError):
        browser.open(tmp_path / "none.html")
