"""Check the pages in a real browser: no console errors, every figure drawn, no overlapping texts."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.report.html import write
from launcher.report.page import Axis, ReferenceLine, Report
from launcher.scale.scale_page import scale_page
from tests.browser import COLLISIONS, FIGURES, OVERFLOW, Browser
from tests.report_fixture import HOSTILE, with_strings
from tests.scaling_fixture import scaling
from tests.unit.test_reports import MAKERS
from tests.unit.test_scale_page import parsed

MANY = ("ddp", "zero1", "fsdp", "accelerate", "deepspeed")
SIZES = (1, 2, 4, 8, 16, 32, 64, 512)


def hostile(text: str) -> str:
    return f"{HOSTILE}<b>{text}</b>{'x' * 200}" if text else ""


def hostile_scaling(path: Path) -> Report:
    """Make the scaling page with hostile strings, except in the fixed labels of axes and reference lines."""
    return with_strings(MAKERS["scaling"](path), hostile, but=(Axis, ReferenceLine))


REPORTS: dict[str, tuple[int, Callable[[Path], Report]]] = {
    "scaling": (7, MAKERS["scaling"]),
    "large": (4, lambda path: scale_page(parsed(scaling(engines=MANY, sizes=SIZES)))),
    "one": (3, lambda path: scale_page(parsed(scaling(engines=(), sizes=(1,))))),
    "scaling, begun": (0, MAKERS["scaling, begun"]),
    "hostile": (7, hostile_scaling),
    "run": (6, MAKERS["run"]),
    "runs": (6, MAKERS["runs"]),
    "batch": (2, MAKERS["batch"]),
    "rate": (2, MAKERS["rate"]),
}
"""Number of figures and maker of each page."""


BROKEN = {
    "script": "<script>console.log('ran')</script>",
    "image": "<img src='https://example.invalid/pixel.png'>",
    "style sheet": "<link rel='stylesheet' href='https://example.invalid/style.css'>",
    "event": "<svg onload='1'></svg>",
}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    for name, (_, make) in REPORTS.items():
        write(make(folder / name), folder / f"{name}.html")
    return {name: folder / f"{name}.html" for name in REPORTS}


def expected(path: Path) -> list[str]:
    return re.findall(r'role="img" aria-label="([^"]*)"', path.read_text())


def unfold(browser: Browser) -> None:
    """Open every section, because a folded section is drawn only when it is opened."""
    browser.evaluate("document.querySelectorAll('details.section').forEach(d => { d.open = true; })")
    browser.evaluate("new Promise(drawn => setTimeout(drawn, 100))")


def faults(browser: Browser) -> list[str]:
    """Return the faults of the page that is open."""
    found = list(browser.errors)
    found += [
        f"{f['label']}: {f['width']} x {f['height']}"
        for f in browser.evaluate(FIGURES)
        if f["width"] < 200 or f["height"] < 20
    ]
    found += [f"texts overlap: {pair}" for pair in browser.evaluate(COLLISIONS)]
    if browser.evaluate(OVERFLOW) > 0:
        found.append("wider than the window")
    return found


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [400, 1200])
@pytest.mark.parametrize("name", REPORTS)
def test_a_page_is_sound(browser: Browser, pages: dict[str, Path], name: str, width: int, dark: bool) -> None:
    browser.open(pages[name], width, dark)
    unfold(browser)
    assert faults(browser) == []
    assert len(browser.evaluate(FIGURES)) == len(expected(pages[name]))
    background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(17, 21, 27)" if dark else "rgb(246, 247, 249)")


def test_each_page_has_the_expected_number_of_figures(pages: dict[str, Path]) -> None:
    """`expected` reads the labels from the page itself, so these counts detect a missing figure."""
    counts = {name: count for name, (count, _) in REPORTS.items()}
    assert {name: len(expected(path)) for name, path in pages.items()} == counts


def test_a_figure_follows_the_theme_and_its_switch(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["run"])
    first = "document.querySelector('.plot')"
    assert browser.evaluate(f"{first}.layout.paper_bgcolor") == "#ffffff"
    assert browser.evaluate(f"{first}.layout.xaxis.type") == "linear"
    browser.evaluate("document.querySelector('.switch input').click()")
    assert browser.evaluate(f"{first}.layout.xaxis.type") == "log"
    buttons = f"[...{first}.querySelectorAll('.modebar-btn')].map(a => a.dataset.title)"
    assert browser.evaluate(buttons) == ["Download plot as a PNG", "Download plot as SVG", "Reset axes"]
    picture = f"Plotly.toImage({first}, {{format: 'FORMAT'}}).then(url => url.slice(0, 14))"
    assert browser.evaluate(picture.replace("FORMAT", "png")) == "data:image/png"
    assert browser.evaluate(picture.replace("FORMAT", "svg")) == "data:image/svg"
    assert browser.errors == []
    browser.open(pages["run"], dark=True)
    assert browser.evaluate(f"{first}.layout.paper_bgcolor") == "#1a2029"


@pytest.mark.parametrize("name", ["scaling", "large"])
def test_a_printed_page_is_sound(browser: Browser, pages: dict[str, Path], name: str) -> None:
    browser.open(pages[name], 720, dark=True, media="print")
    unfold(browser)
    assert faults(browser) == []
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_page_is_detected(
    browser: Browser, pages: dict[str, Path], name: str, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.html"
    broken.write_text(pages["one"].read_text().replace("</main>", f"{BROKEN[name]}</main>"))
    browser.open(broken)
    assert browser.errors
