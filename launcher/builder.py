"""What every HTML page shares: head, style, cards, tiles, tables. Self-contained: no script, no network."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_dp.record import safe
from launcher.plots import NUM_COLOURS

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
# by which a page of any version is known
START = (
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy"'
)


def document(title: str, body: Iterable[str]) -> str:
    """A whole page; `body` is HTML, `title` is text."""
    return safe(
        f'{START} content="{POLICY}"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>"
        f"<h1>{escape(title)}</h1>{''.join(body)}</main></body></html>\n"
    )


def target_issues(path: Path) -> list[str]:
    """Why a page may not be written to `path`, which it would replace; one line each."""
    try:
        if not path.exists():
            return []
        if not path.is_file():
            return [f"--out: {path} is not a regular file; name a file to write"]
        with path.open("rb") as file:
            own = file.read(len(START)) in (START.encode(), b"")
    except OSError as error:
        return [f"--out: {path} cannot be written ({error.strerror})"]
    return [] if own else [f"--out: {path} is no page of bert-dp and would be replaced; name another file"]


def escape(text: str) -> str:
    """Text as HTML, also inside an attribute."""
    return html.escape(text)


def sub(text: str) -> str:
    """A line below the title."""
    return f'<p class="sub">{escape(text)}</p>'


def note(text: str) -> str:
    """What a reader must know, below a figure."""
    return f'<p class="note">{escape(text)}</p>'


def card(title: str, content: str, extra: str = "") -> str:
    """A box with a heading; `content` and `extra` (beside the heading) are HTML."""
    return f'<section class="card">{extra}<h2>{escape(title)}</h2>{content}</section>'


def plot_grid(cards: Iterable[str]) -> str:
    """Cards side by side where the page is wide enough."""
    return f'<div class="plots">{"".join(cards)}</div>'


def verdict_card(level: str, text: str, notes: Iterable[str] = (), name: str = "", after: str = "") -> str:
    """`level`: ok, warn, fail, or nothing for a plain statement; `after` is HTML below the notes."""
    listed = "".join(f"<li>{escape(note)}</li>" for note in notes)
    named = f"<strong>{escape(name)}</strong> " if name else ""
    shown = f"<ul>{listed}</ul>" if listed else ""
    return f'<div class="verdict {level}">{named}{escape(text)}{shown}{after}</div>'


def tiles(items: Iterable[tuple[str, str, str]]) -> str:
    """(name, value, denominator or scope) as big figures."""
    cards = (
        f'<div class="card"><span class="note">{escape(name)}</span><b>{escape(value)}</b>'
        f'<span class="note">{escape(note)}</span></div>'
        for name, value, note in items
    )
    return f'<div class="tiles">{"".join(cards)}</div>'


def table(lines: Iterable[str], kind: str = "") -> str:
    """Rows of HTML as a table that scrolls by itself where it is too wide; `numbers`: small and aligned."""
    named = f' class="{kind}"' if kind else ""
    return f'<div class="scroll"><table{named}>{"".join(lines)}</table></div>'


def head(names: Sequence[str]) -> str:
    """The first row of a table: an empty corner and a name for each column."""
    return f"<tr><td></td>{''.join(f'<th>{escape(name)}</th>' for name in names)}</tr>"


def row(name: str, values: Iterable[str]) -> str:
    """A row of a table: its name and its values."""
    return f"<tr><th>{escape(name)}</th>{''.join(f'<td>{escape(value)}</td>' for value in values)}</tr>"


def details(title: str, content: str) -> str:
    """A card that opens on a click; `content` is HTML."""
    return f'<details class="card"><summary>{escape(title)}</summary>{content}</details>'


def record_text(content: Mapping[str, Any], after: str = "") -> str:
    """A nested record as YAML, and text `after` it."""
    import yaml

    text = yaml.safe_dump(dict(content), sort_keys=False) if content else "not recorded"
    return f"<pre>{escape(text)}{escape(after)}</pre>"


def environment_text(environment: Mapping[str, Any]) -> str:
    """The environment as YAML, with the table of the GPUs' links as it was printed."""
    rest = {key: value for key, value in environment.items() if key != "gpu_topology"}
    return record_text(rest, str(environment.get("gpu_topology") or ""))


def machine_line(environment: Mapping[str, Any], *front: str) -> str:
    """Where and with what: `front`, then processor, torch, commit and date as far as they are known."""
    versions = environment.get("versions")
    torch = versions.get("torch") if isinstance(versions, Mapping) else None
    commit = str(environment.get("git_commit") or "")[:10]
    dirty = " + uncommitted changes" if environment.get("git_dirty") else ""
    parts = [
        *front,
        str(environment.get("cpu_model") or ""),
        f"torch {torch}" if torch is not None else "",
        f"commit {commit}{dirty}" if commit else "",
        str(environment.get("date") or ""),
    ]
    return " \u00b7 ".join(part for part in parts if part)


LIGHT = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#8a8a8a", "#d9c800")
_DARK = ("#3d9be0", "#f0ad1e", "#1fb88a", "#f0723c", "#dd92ba", "#7cc8f2", "#a5a5a5", "#f0e442")


def _palette(colours: Sequence[str]) -> str:
    return "".join(f"--c{i}:{colour};" for i, colour in enumerate(colours))


_COLOUR_RULES = "".join(
    f".f{i}{{fill:var(--c{i})}}svg .l{i}{{stroke:var(--c{i})}}" for i in range(NUM_COLOURS)
)

STYLE = f"""
:root{{color-scheme:light dark;--page:#f6f7f9;--card:#fff;--ink:#1c2430;--soft:#5b6675;--rule:#dde2e8;
--ok:#0b7a4b;--warn:#9a6700;--fail:#b3261e;{_palette(LIGHT)}}}
@media (prefers-color-scheme:dark){{:root{{--page:#11151b;--card:#1a2029;--ink:#e6eaf0;--soft:#9aa6b5;
--rule:#2d3642;--ok:#4cc38a;--warn:#e0b13c;--fail:#ff8a80;{_palette(_DARK)}}}}}
*{{box-sizing:border-box}}
body{{margin:0;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,"Segoe UI",Roboto,Arial,sans-serif}}
main{{max-width:1120px;margin:0 auto;padding:28px 20px 48px}}
h1{{font-size:24px;margin:0;overflow-wrap:anywhere}}h2{{font-size:16px;margin:0 0 10px}}
.sub,.note,.legend{{color:var(--soft)}}.sub{{margin:2px 0}}.sub+.verdict{{margin-top:16px}}
.card,.verdict{{background:var(--card);border:1px solid var(--rule);border-radius:8px}}
.card,.verdict{{padding:16px;margin:0 0 16px;min-width:0;overflow-wrap:anywhere}}
.verdict{{border-left:5px solid var(--soft);padding:12px 16px;overflow-wrap:anywhere}}
.verdict ul{{margin:6px 0 0;padding-left:20px;color:var(--soft)}}
.verdict.ok{{border-left-color:var(--ok)}}.verdict.warn{{border-left-color:var(--warn)}}
.verdict.fail{{border-left-color:var(--fail)}}
.tiles{{display:grid;grid-template-columns:repeat(auto-fit,minmax(190px,1fr));gap:0 16px}}
.tiles b{{display:block;font-size:22px;font-variant-numeric:tabular-nums}}.tiles .note{{font-size:13px}}
.plots{{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(480px,100%),1fr));gap:0 16px}}
svg{{display:block;width:100%;height:auto}}svg text{{fill:var(--soft);font-size:13px}}
svg .label,svg .name{{fill:var(--ink)}}svg .white{{fill:#fff}}svg .black{{fill:#111}}
svg path{{fill:none;stroke-width:1.8;stroke-linejoin:round}}svg .dash{{stroke-dasharray:6 4}}{_COLOUR_RULES}
svg .grid{{stroke:var(--rule);stroke-width:1}}svg .axis{{stroke:var(--soft);stroke-width:1}}
svg .level{{stroke:var(--soft);stroke-width:1.2;stroke-dasharray:2 4}}
svg .soft{{stroke:var(--soft);stroke-width:1.4;stroke-dasharray:5 4}}
svg .fine{{stroke:var(--soft);stroke-width:1.6;stroke-dasharray:2 4}}
svg .band{{opacity:.2;stroke:none}}svg .whisker{{stroke-width:1.3}}
.halo{{paint-order:stroke;stroke:var(--card);stroke-width:4px}}
.figure .row{{margin:0 0 8px;break-inside:avoid}}.figure .name{{overflow-wrap:anywhere;font-size:14px}}
svg.flow{{overflow:visible}}.row+svg.flow{{margin-bottom:6px}}
svg line{{stroke-width:1.6}}svg .median{{stroke:var(--ink);stroke-width:2}}
.figure .label,.panel .note{{font-size:13px}}
.panels{{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(300px,100%),1fr));gap:14px 28px}}
.panel .name{{margin-bottom:4px}}.panel{{break-inside:avoid}}
.rank{{display:grid;grid-template-columns:30px 1fr}}
.rank span{{font-size:12px;line-height:1;color:var(--soft);align-self:center}}
.legend{{display:flex;flex-wrap:wrap;gap:2px 16px;font-size:13px;margin-top:6px}}
.legend span{{display:inline-flex;align-items:center;gap:6px;overflow-wrap:anywhere}}
svg.key{{width:22px;flex:none}}
.scales{{float:right;font-size:13px;color:var(--soft)}}.scales input{{margin:0 4px 0 10px}}
.card:has(.to-log:checked) .linear,.card:has(.to-linear:checked) .log{{display:none}}
.empty{{color:var(--soft);font-style:italic}}.scroll{{overflow-x:auto}}
table{{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}}
th,td{{text-align:left;vertical-align:top;padding:5px 14px 5px 0;border-top:1px solid var(--rule)}}
td{{font-weight:600;overflow-wrap:anywhere}}tbody th{{font-weight:500;white-space:nowrap}}
.numbers{{font-size:13px}}.numbers td{{text-align:right;font-weight:400;overflow-wrap:normal}}
.numbers td{{white-space:nowrap}}.numbers tr:first-child th{{font-weight:600;text-align:right}}
.numbers tr:first-child th{{overflow-wrap:normal;vertical-align:bottom;white-space:normal;line-height:1.25}}
.numbers th,.numbers td{{padding:4px 10px 4px 0}}
.numbers th:first-child{{position:sticky;left:0;background:var(--card);max-width:240px}}
.numbers th:first-child{{white-space:normal;overflow-wrap:anywhere;min-width:min(175px,28vw)}}
.pairs th{{white-space:normal;width:min(320px,42vw)}}p.note{{font-size:13px;margin:8px 0 0}}
h3{{font-size:14px;margin:18px 0 4px}}
tr.section th{{padding-top:16px;border:0;color:var(--soft);font-size:12px;letter-spacing:.06em}}
td .note,td.note{{font-weight:400;font-size:13px}}td .note{{display:block}}
td.note{{color:var(--soft);width:60%}}summary{{cursor:pointer;font-weight:600}}
pre{{overflow:auto;white-space:pre-wrap;overflow-wrap:anywhere}}
pre{{font:12.5px/1.45 ui-monospace,Menlo,Consolas,monospace}}
@media (max-width:560px){{main{{padding:16px 10px}}.card,.verdict{{padding:12px}}
svg[role=img] text{{font-size:14px}}}}
@media print{{:root{{--page:#fff;--card:#fff;--ink:#000;--soft:#444;--rule:#ccc;{_palette(LIGHT)}}}
body{{font-size:11px}}main{{max-width:none;padding:0}}.scales{{display:none}}
.card,.verdict{{break-inside:avoid}}.plots{{grid-template-columns:1fr 1fr}}
svg[role=img] text{{font-size:14px}}.tiles{{grid-template-columns:repeat(4,1fr)}}.tiles b{{font-size:17px}}
.scroll{{overflow:visible}}.numbers{{font-size:8px}}.numbers td{{white-space:normal}}
.numbers th,.numbers td{{padding:2px 5px 2px 0}}.numbers th:first-child{{position:static;min-width:70px}}}}
"""
