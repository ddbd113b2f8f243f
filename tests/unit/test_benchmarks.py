"""Test that benchmark scripts run and derive their figures from raw records. No test depends on timings."""

import copy
import gzip
import json
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu, records, turns
from benchmarks.records import set_options
from bert_dp.config import dump_config, resolve
from tests.e2e.cli import TINY
from tests.example_files import write_examples
from tests.helpers import read_json
from tests.resumable import code_version
from tests.runs_to_export import VOCABULARY, config_of, finetuned, write_run

ROOT = Path(__file__).resolve().parents[2]
WORDS = "the crew of old ship sailed past seven grey islands while rain fell on every quiet harbour".split()


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("BERT_DP_CACHE", str(tmp_path_factory.mktemp("cache")))


def run(script: str, options: str, *more: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, f"benchmarks/{script}.py", *options.split(), *more]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=500, check=False)
    assert done.returncode == code, done.stderr
    return done


def record_of(tmp_path: Path, script: str, options: str, *more: str) -> tuple[dict[str, Any], str]:
    """Return a script's record, which must not contain a path of this machine, and its output."""
    record = tmp_path / "record.json"
    done = run(script, options, *more, "--json", str(record))
    assert str(tmp_path) not in record.read_text()
    return read_json(record), done.stdout


@pytest.mark.parametrize(
    ("script", "options", "error"),
    [
        ("step_speed", "--variants ours:eager:fp8", "unknown variant 'ours:eager:fp8'"),
        ("step_speed", "--variants ours:eager,cramming:eager", "cramming:eager needs --cramming"),
        ("export_speed", "--lengths 256", "--lengths 256: crammed-rope takes at most 128"),
        ("student_speed", "no-run", "no-run: does not exist"),
        ("student_speed", "no-run --batches 0", "--batches 0: not a list of positive"),
        ("export_speed", "--threads 9999", "--threads 9999: this process has"),
    ],
)
def test_options_that_cannot_be_measured_are_refused(script, options, error):
    assert error in run(script, options, code=2).stderr


@pytest.mark.slow
def test_step_speed_quick(tmp_path):
    pytest.importorskip("transformers")
    result, output = record_of(tmp_path, "step_speed", "--quick --date 2000-01-02")
    assert result["environment"]["date"] == "2000-01-02"
    variants = result["variants"]
    probe = variants.pop("matmul:eager")
    assert variants.keys() == {"ours:eager", "bert:eager", "modernbert:eager"}
    for name, variant in variants.items():
        assert len(variant["rounds"]) == len(probe["rounds"]) == 2
        assert f"\n{name} " in output
        # every variant starts at the loss of a uniform guess over 128 tokens, ln 128 = 4.85
        assert 4.5 < variant["first_loss"] < 5.5
        times = [[turn["step_time_s"] for turn in v["rounds"]] for v in (variant, variants["ours:eager"])]
        ratio = statistics.median(turns.ratios(*times))
        assert variant["ours_over_this"]["ours:eager"]["median"] == pytest.approx(ratio)
    # 6 N_linear + 12 L S H + 6 H V p
    expected = 6 * (4 * 32 * 32 + 3 * 32 * 32) + 12 * 16 * 32 + 6 * 32 * 128 * 0.25
    assert variants["ours:eager"]["flops_per_token"] == expected


@pytest.mark.slow
def test_hf_trainer_small(tmp_path):
    pytest.importorskip("transformers")
    words = random.Random(0)
    lines = (" ".join(words.choices(WORDS, k=40)) + f" number {i}" for i in range(300))
    (tmp_path / "text.txt").write_text("\n".join(lines))
    sizes = (*TINY[1:8], "model.vocab_size=300", "batch.ramp_fraction=0", "eval.max_sequences=8")
    build = ("data.build.max_tokens_per_char=0", "data.build.held_out_fraction=0.1")
    settings = set_options([*sizes, *build, f"data.sources=[{tmp_path}/text.txt]"])
    options = "--minutes 0.03 --variants ours,modernbert"
    result, output = record_of(tmp_path, "hf_trainer", options, str(tmp_path / "out"), *settings)
    ours, theirs = (result["variants"][name] for name in ("ours", "modernbert"))
    fewer = min((ours, theirs), key=lambda variant: variant["tokens"])
    assert fewer["loss_at_equal_tokens"] == fewer["heldout_loss"]
    assert theirs["evals"][0][1] > theirs["heldout_loss"], "the loss must fall"
    assert "modernbert " in output


@pytest.mark.slow
def test_export_speed_quick(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("onnxruntime")
    result, _ = record_of(tmp_path, "export_speed", "--quick --threads 1 --date 2000-01-02")
    assert result["absent"] == {}
    model = result["models"]["small-text"]
    assert set(model["exports"]) == {"hf", "onnx", "onnx-fused"}
    del model["rows"]["matmul:eager:fp32"]
    programs = {"ours:eager", "transformers:eager", "onnxruntime:plain", "onnxruntime:fused"}
    assert set(model["rows"]) == {f"{program}:fp32" for program in programs}
    for row in model["rows"].values():
        assert row["difference"] < 1e-4, "the outputs must agree"
        assert set(row["points"]) == {"1x8", "1x16", "2x8", "2x16"}


@pytest.mark.slow
def test_student_speed_small(tmp_path):
    examples = write_examples(tmp_path / "examples", dev=6, vocab_size=VOCABULARY)
    classifier = finetuned(config_of("crammed-bert"), "recipe", head_size=12).model_dump(mode="json")
    sizes = {"lstm_size": 9, "num_layers": 1, "num_heads": 1, "hidden_size": 16}
    student = {"objective": {"name": "distill"}, "model": sizes, "data": {"path": str(examples)}}
    config = resolve([classifier, student])
    run_dir = write_run(tmp_path / "student", config)
    (run_dir / "config.yaml").write_text(dump_config(config))
    options = "--large quickstart --batches 1,4 --rounds 3"
    result, output = record_of(tmp_path, "student_speed", options, str(run_dir))
    assert result["examples"] == 6
    assert set(result["points"]) == {"1", "4"}
    for size, point in result["points"].items():
        large, small = (point["seconds"][name] for name in ("large", "student"))
        assert point["ratio"]["median"] == statistics.median(turns.ratios(large, small))
        assert f"{size}  " in output


@pytest.mark.slow
def test_optimizer_speed_small():
    out = json.loads(run("optimizer_speed", "--rounds 1 --layers 1").stdout)
    assert out["adamw"]["ratio_to_adamw_median"] == 1.0
    assert out["lamb"]["seconds_median"] > 0


def test_predictor_derives_its_figures_from_the_given_rows(tmp_path):
    published = (ROOT / "benchmarks/published/published_bert_throughput.csv").read_text().splitlines()
    rows = tmp_path / "rows.csv"
    series = ("dlperf-pt-FP32-", "onebit-adam-tcp-", "mlperf2.0-H3C")
    rows.write_text("\n".join([published[0], *(line for line in published if line.startswith(series))]))
    options = "--sensitivity --leave-one-out --verbose --date 2000-01-02 --rows"
    result, output = record_of(tmp_path, "predictor", options, str(rows))
    errors = [abs(row["error_points"]) for row in result["rows"]]
    assert len(errors) == result["headline"]["rows"] == 7
    assert result["headline"]["median"] == pytest.approx(statistics.median(errors), abs=0.01)
    ideal = [100 * abs(1 - row["measured"]) for row in result["rows"]]
    assert result["efficiency_1"]["median"] == pytest.approx(statistics.median(ideal), abs=0.01)
    assert len(result["not_predictable"]) == 4
    assert len(result["sensitivity"]) == 20
    assert "dlperf-pt-FP32-b32-16" in output


def test_a_child_process_answers_until_an_error_that_contains_its_name():
    with turns.Child("divides", copy.copy, ({"ready": 1}, divmod)) as child:
        assert child.facts == {"ready": 1}
        assert child.measure(7, 2) == (3, 1)
        with pytest.raises(RuntimeError, match="divides: ZeroDivisionError: "):
            child.measure(1, 0)
    with (
        pytest.raises(RuntimeError, match="gone: FileNotFoundError: "),
        turns.Child("gone", open, "/no/file"),
    ):
        pass


def test_the_commit_is_known_without_git(tmp_path, monkeypatch):
    monkeypatch.delenv("BERT_DP_COMMIT", raising=False)
    head = records.git("rev-parse", "HEAD")
    assert records.commit() == head
    assert len(head) == 40
    monkeypatch.setattr(records, "ROOT", tmp_path)
    assert records.commit() == "", "there is no repository"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert records.commit() == "", "git is not installed"
    (tmp_path / ".gpukit").mkdir()
    (tmp_path / ".gpukit" / "COMMIT").write_text("abc1\n")
    assert records.commit() == "abc1"
    by_file = code_version(["launcher"])
    monkeypatch.setenv("BERT_DP_COMMIT", "def2")
    assert records.environment()["git_commit"] == "def2"
    assert code_version(["launcher"]) != by_file


def test_kernel_times_are_summed_by_name_and_gaps_count_as_idle(tmp_path):
    kernels = [("kernel", "a", 0, 2000), ("kernel", "b", 1000, 5000)]  # overlapping in time
    events = [*kernels, ("gpu_memcpy", "a", 9000, 1000), ("cpu_op", "c", 0, 20000)]
    trace = [{"cat": kind, "name": name, "ts": ts, "dur": us} for kind, name, ts, us in events]
    (tmp_path / "t.json.gz").write_bytes(gzip.compress(json.dumps({"traceEvents": trace}).encode()))
    assert gpu.kernel_times(tmp_path / "t.json.gz") == {
        "wall_s": 0.02,
        "idle_share": pytest.approx(1 - 7 / 20),
        "gpu_ms": 8.0,
        "launches": 3,
        "kernels_ms": {"b": 5.0, "a": 3.0},
    }
