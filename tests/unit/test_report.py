"""Formatting, the closing table and the HTML page, of whole, crashed and hostile run directories."""

import html.parser
import json
import math
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from bert_dp import record
from launcher import closing, page, plots, report, runs
from launcher.doctor import Finding
from launcher.environment import probe

VOID = {"meta", "input", "br"}
NA = report.NA


def metrics(step: int, **changes) -> record.Metrics:
    values = {
        "step": step,
        "samples": 64 * step,
        "tokens": 8192 * step,
        "epoch": 0,
        "progress": step / 100,
        "loss": 8.0 - step / 50,
        "lr": 1e-3,
        "grad_norm": 1.0,
        "global_batch": 64,
        "micro_batch": 16,
        "accumulation": 2,
        "world_size": 2,
        "step_time_s": 0.5,
        "steps_per_s": 2.0,
        "global_steps_per_s": 8.0,
        "samples_per_s": 128.0,
        "tokens_per_s": 16384.0,
        "tokens_per_s_per_gpu": 8192.0,
        "mfu": None,
        "data_wait_s": 0.01,
        "forward_backward_s": 0.4,
        "optimizer_s": 0.05,
        "peak_memory_gib": 1.25,
        "elapsed_s": step / 2,
        "skipped_steps": 0,
    }
    return record.Metrics(**{**values, **changes})


SUMMARY = {
    "status": "done",
    "exit_code": 0,
    "cause": None,
    "signal": None,
    "step": 100,
    "samples": 6400,
    "tokens": 819200,
    "final_loss": 6.0,
    "heldout_loss": 6.25,
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
    "time_s": {
        "setup": 10.0,
        "compile": 5.0,
        "train": 75.0,
        "data_wait": 3.0,
        "forward_backward": 60.0,
        "optimizer": 9.0,
        "eval": 6.0,
        "save": 4.0,
    },
}


def make_run(path: Path, num_lines: int = 10, summary: dict | None = None, **config) -> Path:
    path.mkdir(parents=True)
    for i in range(1, num_lines + 1):
        record.append_line(path / "metrics.jsonl", metrics(10 * i))
    record.append_line(path / "evals.jsonl", record.Evaluation(100, 819200, 6.25, 0.25, 4096, 50.0))
    record.write_json(path / "summary.json", {**SUMMARY, **(summary or {})})
    record.write_text(path / "config.yaml", json.dumps({"optim": {"lr": 1e-3}, **config}))
    record.write_json(path / "environment.json", probe(path).to_json())
    return path


class Checker(html.parser.HTMLParser):
    """Fails on a tag that is not closed; collects attributes that could load something."""

    def __init__(self):
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.links: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.links += [
            f"{k}={v}" for k, v in attrs if k in ("href", "src", "srcset", "action") or k.startswith("on")
        ]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def check(text: str) -> Checker:
    checker = Checker()
    checker.feed(text)
    checker.close()
    assert checker.open == []
    assert checker.links == []
    assert "script" not in checker.tags
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(svg)
    text.encode("utf-8")
    return checker


def shown(run_dir: Path) -> str:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(closing.closing_table(run_dir))
    return console.export_text()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (report.format_si(45_231, "tokens/s"), "45.2 k tokens/s"),
        (report.format_si(999.6, "x"), "1 k x"),
        (report.format_si(999_999), "1 M"),
        (report.format_si(2.5e9), "2.5 G"),
        (report.format_si(0.1234, "steps/s"), "0.123 steps/s"),
        (report.format_si(0, "steps/s"), "0 steps/s"),
        (report.format_count(1234567), "1,234,567"),
        (report.format_gib(1.239), "1.24 GiB"),
        (report.format_percent(0.4567), "45.7 %"),
        (report.format_nats(6.25), "6.2500 nats"),
        (report.format_lr(1e-3), "1.00e-03"),
        (report.format_energy(2.1e7), "21 MJ"),
        (report.format_energy(12.0), "12 J"),
        (report.format_duration(0.0123), "12 ms"),
        (report.format_duration(0.9999), "1.0 s"),
        (report.format_duration(119.97), "2 min 00 s"),
        (report.format_duration(3599.6), "1 h 00 min"),
        (report.format_duration(7500), "2 h 05 min"),
        (report.format_duration(86_399), "1 d 00 h"),
        (report.format_duration(266_400), "3 d 02 h"),
    ],
)
def test_format(text, expected):
    assert text == expected


@pytest.mark.parametrize("value", [None, math.nan, math.inf, "text", True, [1]])
def test_what_is_not_a_number_is_not_zero(value):
    formats = (report.format_si, report.format_count, report.format_gib, report.format_percent)
    more = (report.format_nats, report.format_lr, report.format_duration, report.format_energy)
    assert {f(value) for f in (*formats, *more)} == {NA}


def test_progress_line():
    line = report.progress_line(json.loads(json.dumps(metrics(10).__dict__)), eta=125)
    for part in (
        "step 10",
        "10.0 %",
        "7.8000 nats",
        "1.00e-03",
        "16.4 k tokens/s over 2 ranks",
        "8 global steps/s",
        "left 2 min 05 s",
    ):
        assert part in line
    assert "left n/a" in report.progress_line({})
    assert "left <1 s" in report.progress_line({}, eta=0.007)


def test_eta():
    lines = [{"elapsed_s": 10.0 + t, "progress": t / 100} for t in range(1, 51)]
    assert report.eta_s(lines) == pytest.approx(50)
    assert report.eta_s(lines[:1]) is None
    assert report.eta_s([]) is None
    assert report.eta_s([{"elapsed_s": 1.0, "progress": 0.5}, {"elapsed_s": 2.0, "progress": 0.5}]) is None
    assert report.eta_s([{"elapsed_s": 1.0, "progress": None}, *lines]) == pytest.approx(50)
    resumed = [{"elapsed_s": 90.0, "progress": 0.9}, *lines[:10]]
    assert report.eta_s(resumed) == pytest.approx(90)


def test_a_failed_run_tells_where_why_and_what_to_do(tmp_path):
    facts = {
        "status": "failed",
        "cause": "rank 1: no",
        "where": "a.py:1",
        "source": "in f: g()",
        "log": "l",
        "explanation": ["so"],
        "fix": ["do", "or do"],
        "consequences": 7,
    }
    rows = closing.detail_rows(runs.load(make_run(tmp_path / "run", summary=facts)))
    told = [(r.label, r.value) for r in rows if r.section == "Outcome"][1:7]
    assert told == [
        ("cause", "rank 1: no"),
        ("at", "a.py:1 in f: g()"),
        ("why", "so"),
        ("fix", "do"),
        ("fix", "or do"),
        ("log", "l"),
    ]


def test_every_number_stands_beside_its_denominator(tmp_path):
    run = make_run(tmp_path / "run", summary={"energy_j": 4096.0})
    rows = {(r.section, r.label): f"{r.value} | {r.note}" for r in closing.detail_rows(runs.load(run))}
    expected = {
        ("Outcome", "held-out loss"): "6.2500 nats | mean over held-out masked tokens",
        (
            "Outcome",
            "unigram entropy",
        ): "6.7500 nats | model without context; held-out loss is 0.5000 nats below",
        ("Outcome", "ln V"): "8.3178 nats | a uniform guess; held-out loss is 2.0678 nats below",
        ("Work", "optimizer steps"): "100 | one step = global batch 64 = micro 16 x accumulation 2 x dp 2",
        ("Work", "skipped steps"): "2 | 2.0 % of the steps; gradient norm not finite",
        (
            "Throughput",
            "global steps",
        ): "8 global steps/s | accumulation 2 x dp 2 micro batches per optimizer step",
        ("Throughput", "samples"): "128 samples/s | summed over 2 CPU ranks",
        ("Throughput", "tokens"): "16.4 k tokens/s | summed over 2 CPU ranks",
        ("Throughput", "tokens per device"): "8.19 k tokens/s | tokens/s divided by 2 CPU ranks",
        ("Throughput", "MFU"): "n/a | peak of this device unknown",
        ("Time (rank 0)", "wall"): "100.0 s | setup + compile + train + eval + save",
        ("Time (rank 0)", "train"): "75.0 s | 75.0 % of wall",
        ("Time (rank 0)", "data wait"): "3.0 s | 3.0 % of wall, part of train",
        ("Time (rank 0)", "other"): "3.0 s | 3.0 % of wall, part of train",
        ("Resources and files", "peak memory"): "1.25 GiB | greatest of 2 CPU ranks",
        ("Resources and files", "energy"): "4.1 kJ | 5 kJ per million tokens, 2 CPU ranks",
    }
    for key, value in expected.items():
        assert rows[key] == value


def lines_of(renderable, width: int = 80) -> list[str]:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(renderable)
    return [line.rstrip() for line in console.export_text().splitlines()]


def test_closing_table_is_compact_and_folds_between_parts(tmp_path):
    lines = lines_of(closing.closing_table(make_run(tmp_path / "run")))
    assert len(lines) <= 22
    text = "\n".join(lines)
    for part in (
        "held-out loss  6.2500 nats, unigram entropy 6.7500 nats, ln V 8.3178 nats",
        "100 x global batch 64 = micro 16 x accumulation 2 x dp 2",
        "16.4 k tokens/s over 2 CPU ranks, 8.19 k per rank",
        "2 steps/s; 8 global steps/s = x accumulation 2 x dp 2",
        "75.0 s: data wait 4.0 %, forward+backward 80.0 %,\n",
        "optimizer 12.0 %, other 4.0 %",
        "setup 10.0 s, compile 5.0 s, train 75.0 s, eval 6.0 s,\n",
        "n/a, peak of this device unknown",
        "skipped steps  2 = 2.0 %, gradient norm not finite",
    ):
        assert part in text
    assert "energy" not in text
    assert "cause" not in text
    quiet = "\n".join(lines_of(closing.closing_table(make_run(tmp_path / "b", summary={"skipped_steps": 0}))))
    assert "skipped" not in quiet
    for text in ("failed saves", "loss spikes"):
        assert text not in quiet
    told = {"failed_saves": 3, "loss_spikes": 1, "skipped_steps": 0}
    loud = "\n".join(lines_of(closing.closing_table(make_run(tmp_path / "told", summary=told))))
    assert "failed saves   3, see the log" in loud
    assert "loss spikes    1 logged losses far above" in loud
    used = closing.closing_table(make_run(tmp_path / "c", summary={"energy_j": 2.1e7}))
    assert "21 MJ of 2 CPU ranks" in "\n".join(lines_of(used))


def test_closing_table_names_the_report_and_keeps_hostile_markup_as_text(tmp_path):
    run = make_run(
        tmp_path / "run", summary={"status": "failed", "exit_code": 1, "cause": "[red]boom\x1b[31m"}
    )
    page.write([run], run / "report.html")
    text = shown(run)
    assert "[red]boom" in text
    assert "\x1b" not in text
    assert "report.html" in text.replace("\n", "")
    assert "checkpoints/step-00000100" in text


@pytest.mark.parametrize(
    ("change", "level", "words"),
    [
        ({}, "ok", "0.5000 nats below the unigram entropy."),
        ({"heldout_loss": 7.0}, "ok", "above the unigram entropy: the model does not use context yet"),
        ({"heldout_loss": None}, "ok", "not recorded"),
        (
            {"status": "failed", "exit_code": 1, "cause": "OOM on rank 1\nmore"},
            "fail",
            "exit code 1): OOM on rank 1",
        ),
        ({"status": "stopped", "signal": 15}, "warn", "Stopped by SIGTERM after a checkpoint at step 100."),
    ],
)
def test_verdict(tmp_path, change, level, words):
    found, text = closing.verdict(runs.load(make_run(tmp_path / "run", summary=change)))
    assert found == level
    assert words in text


def test_page_is_well_formed_and_self_contained(tmp_path):
    whole = page.html([make_run(tmp_path / "run")])
    checker = check(whole)
    assert not re.search(r"https?://", whole)
    assert "link" not in checker.tags
    for words in (
        "Done after step 100",
        "unigram entropy 6.75",
        "ln V 8.32",
        "8.19 k tokens/s",
        "loss (nats",
        "elapsed (s)",
        "prefers-color-scheme",
        "to-log",
        "lr: 0.001",
    ):
        assert words in whole


def test_comparison_names_the_runs_and_what_differs(tmp_path):
    runs = [make_run(tmp_path / "a" / "run"), make_run(tmp_path / "b" / "run", run={"seed": 7})]
    whole = page.html(runs)
    check(whole)
    for words in (
        "2 runs compared",
        "run (1)",
        "run (2)",
        "run.seed",
        "run (1): training",
        "run (2): held-out",
    ):
        assert words in whole
    differing = re.search(r"Settings that differ.*?</section>", whole, re.DOTALL)
    assert differing is not None
    assert "optim.lr" not in differing[0]


def test_hostile_strings_are_escaped(tmp_path):
    evil = "<script>alert(1)</script>\"'&\x00\x1b[0m\ud800"
    run = make_run(
        tmp_path / "x<script>y",
        summary={"status": "failed", "cause": evil, "device": evil},
        note="</pre>" + evil,
    )
    (run / "environment.json").write_text(
        json.dumps({"cpu_model": evil, "versions": {"torch": evil}, "HF_TOKEN": "hf_x"})
    )
    page.write([run, run], tmp_path / "out" / "page.html")
    whole = (tmp_path / "out" / "page.html").read_text(encoding="utf-8")
    check(whole)
    assert "&lt;script&gt;" in whole
    assert "<script" not in whole
    assert "hf_x" not in whole
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["page.html"]


def test_crashed_run_renders_and_says_what_is_missing(tmp_path):
    run = make_run(tmp_path / "run", num_lines=3)
    for name in ("summary.json", "evals.jsonl", "environment.json"):
        (run / name).unlink()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 40, "los')
    whole = page.html([run])
    check(whole)
    torn = "metrics.jsonl is torn or empty: 3 whole lines read"
    for words in ("No end recorded", "Last logged: step 30", torn):
        assert words in whole
    for name in ("summary.json", "evals.jsonl", "environment.json"):
        assert f"{name} is missing" in whole
    assert "7.4000 nats" in shown(run)


@pytest.mark.parametrize("num_lines", [0, 1])
def test_almost_empty_runs_render(tmp_path, num_lines):
    run = tmp_path / "run"
    run.mkdir()
    if num_lines:
        record.append_line(run / "metrics.jsonl", metrics(1))
    check(page.html([run]))
    assert NA in shown(run)


def test_files_of_the_wrong_type_render(tmp_path):
    run = make_run(tmp_path / "run")
    (run / "metrics.jsonl").write_text('null\n[1]\n{"tokens": "x", "loss": {}}\n{"tokens": 5, "loss": NaN}\n')
    (run / "summary.json").write_text('{"status": 3, "time_s": [], "step": "x", "world_size": null}')
    (run / "config.yaml").write_text("- not\n- a mapping\n")
    (run / "environment.json").write_text('{"versions": 3, "gpus": "x"}')
    whole = page.html([run])
    check(whole)
    assert "config.yaml is damaged: expected a mapping" in whole
    shown(run)


def test_lost_and_not_finite_losses_are_gaps(tmp_path):
    run = make_run(tmp_path / "run")
    record.append_line(run / "metrics.jsonl", metrics(110, loss=math.nan))
    record.append_line(run / "metrics.jsonl", metrics(120))
    whole = page.html([run])
    check(whole)
    assert "nan" not in re.sub(r"<style>.*?</style>", "", whole).lower()


def test_downsample_keeps_ends_and_spikes():
    points = [(float(i), 1000.0 if i == 7777 else math.nan if i % 100 == 3 else 1.0) for i in range(100_000)]
    kept = plots.downsample(points)
    assert len(kept) <= plots.MAX_POINTS
    assert kept[0] == points[0]
    assert kept[-1] == points[-1]
    assert (7777.0, 1000.0) in kept
    assert [p[0] for p in kept] == sorted(p[0] for p in kept)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("values", [[5.0], [5.0, 5.0], [0.0, 1e-9], [1.0, 1e12], [-3.0, 4.0]])
def test_line_plot_of_any_range(values, log):
    axis = plots.Axis("x", report.format_si, log=log)
    series = [plots.Series("s", list(zip(values, values, strict=True)), 0)]
    svg = ElementTree.fromstring(plots.line_plot("t", series, axis, plots.Axis("y", report.format_si)))
    assert len([e for e in svg.iter("text")]) >= 4


def test_findings_table(tmp_path):
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    findings = [Finding("ok", "python"), Finding("fail", "no torch", "ranks stop", "pip install [torch]")]
    console.print(report.findings_table(probe(tmp_path), findings))
    text = console.export_text()
    assert "causes: ranks stop" in text
    assert "fix: pip install [torch]" in text


FACTS = {
    "manifest": {
        "sequence_length": 128,
        "vocab_size": 4096,
        "unigram_entropy_nats": 6.75,
        "uniform_entropy_nats": 8.3178,
        "train": {"documents": 1200, "tokens": 128_000, "sequences": 1000, "shards": [{}]},
        "held_out": {"documents": 12, "tokens": 1280, "sequences": 10, "shards": [{}]},
        "dropped": {"empty": 3, "tokens_per_char": 0, "exact_duplicate": 7, "near_duplicate": 0},
    },
    "tokens_per_document": 106.7,
    "frequent_tokens": [{"token": f"[red]{i}", "id": i, "share": 0.05} for i in range(20)],
    "samples": ["a [bold]sample[/bold]\x1b[31m\nof text", "x" * 1000],
    "problems": [],
}


def test_shards_table():
    lines = lines_of(report.shards_table(FACTS))
    text = "\n".join(lines)
    for words in (
        "sound: every hash",
        "1,200",
        "128,000",
        "1,000",
        "6.7500 nats per held-out token",
        "8.3178 nats",
        "107 tokens on average",
        "3 without a token, 7 exact duplicates",
        "[red]0 5.0 %, [red]1 5.0 %",
        "a [bold]sample[/bold] of text",
    ):
        assert words in text
    assert "x" * 301 not in text.replace("\n", "")


def test_shards_table_names_the_damaged_file_in_red():
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    problem = "train-00000.bin: expected SHA-256 ab, found cd [x]"
    console.print(report.shards_table({**FACTS, "problems": [problem]}))
    shown_table = console.export_text(styles=True)
    assert f"\x1b[1;31mdamaged: {problem}" in shown_table
    assert "sound" not in shown_table
