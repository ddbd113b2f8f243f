"""The benchmark scripts run and their figures follow from their raw records. Timings decide nothing."""

from __future__ import annotations

import gzip
import json
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import first_token, gpu, records, tune_lr, turns
from benchmarks.records import set_options
from bert_dp.config import read_examples
from bert_dp.model.bert import build_model
from tests.e2e.cli import TINY, tiny
from tests.glue_fixture import write_two_tasks
from tests.helpers import read_json
from tests.resumable import code_version
from tests.runs_to_export import config_of, write_run

ROOT = Path(__file__).resolve().parents[2]
WORDS = "the crew of old ship sailed past seven grey islands while rain fell on every quiet harbour".split()


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("BERT_DP_CACHE", str(tmp_path_factory.mktemp("cache")))


def run(script: str, options: str, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, f"benchmarks/{script}.py", *options.split(), *more]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=500, check=False)


def record_of(tmp_path: Path, script: str, options: str, *more: str) -> tuple[dict[str, Any], str]:
    """The record that a script wrote, which names no path of this machine, and what it said."""
    record = tmp_path / "record.json"
    done = run(script, options, *more, "--json", str(record))
    assert done.returncode == 0, done.stderr
    assert str(tmp_path) not in record.read_text()
    return read_json(record), done.stdout


def printed(script: str, options: str, *more: str) -> Any:
    """The record of a script that prints it."""
    done = run(script, options, *more)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("script", "options", "error"),
    [
        ("step_speed", "--variants ours:eager:fp8", "unknown variant 'ours:eager:fp8'"),
        ("step_speed", "--variants ours:eager,cramming:eager", "cramming:eager needs --cramming"),
        (
            "finetune_speed",
            "OUT --corpus a.txt --data glue --variants trainer:dynamic",
            "must hold ours:plain",
        ),
        ("export_speed", "--lengths 256", "--lengths 256: crammed-rope takes at most 128"),
        ("export_speed", "--threads 9999", "--threads 9999: this process has"),
    ],
)
def test_what_cannot_be_measured_is_refused(script, options, error, tmp_path):
    done = run(script, options.replace("OUT", str(tmp_path / "out")))
    assert (done.returncode, error in done.stderr) == (2, True), done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_step_speed_quick(tmp_path):
    pytest.importorskip("transformers")
    result, said = record_of(tmp_path, "step_speed", "--quick --profile --date 2000-01-02")
    assert result["environment"]["date"] == "2000-01-02"
    variants = result["variants"]
    probe = variants.pop("matmul:eager")
    assert variants.keys() == {"ours:eager", "bert:eager", "modernbert:eager"}
    for name, variant in variants.items():
        assert len(variant["rounds"]) == len(probe["rounds"]) == 2
        assert f"\n{name} " in said
        # all variants learn the same thing: they start at a uniform guess of 128 tokens
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
    write_text(tmp_path)
    sizes = (*TINY[1:8], "model.vocab_size=300", "batch.ramp_fraction=0", "eval.max_sequences=8")
    build = ("data.build.max_tokens_per_char=0", "data.build.held_out_fraction=0.1")
    settings = set_options([*sizes, *build, f"data.sources=[{tmp_path}/text.txt]"])
    options = "--minutes 0.03 --variants ours,modernbert"
    result, said = record_of(tmp_path, "hf_trainer", options, str(tmp_path / "out"), *settings)
    ours, theirs = (result["variants"][name] for name in ("ours", "modernbert"))
    fewer = min((ours, theirs), key=lambda variant: variant["tokens"])
    assert fewer["loss_at_equal_tokens"] == fewer["heldout_loss"]
    assert theirs["evals"][0][1] > theirs["heldout_loss"], "it learns"
    assert "modernbert " in said


SMALL = ("model.vocab_size=300", "model.hidden_size=32", "model.num_heads=2", "model.intermediate_size=48")
TO_PRETRAIN = (
    *SMALL,
    "data.sequence_length=32",
    "data.build.max_tokens_per_char=0",
    "data.build.held_out_fraction=0.1",
)


def write_text(folder: Path) -> None:
    """text.txt."""
    words = random.Random(0)
    lines = (" ".join(words.choices(WORDS, k=40)) + f" number {i}" for i in range(300))
    (folder / "text.txt").write_text("\n".join(lines))


@pytest.mark.slow
def test_finetune_speed_quick(tmp_path):
    pytest.importorskip("transformers")
    write_text(tmp_path)
    write_two_tasks(tmp_path / "glue")
    places = ["--corpus", str(tmp_path / "text.txt"), "--data", str(tmp_path / "glue")]
    more = [str(tmp_path / "out"), *set_options(TO_PRETRAIN), *places]
    result, said = record_of(tmp_path, "finetune_speed", "--quick --threads 1 --task RTE", *more)
    variants = result["variants"].values()
    assert len(variants) == 8
    assert len({variant["parameters"] for variant in variants}) == 1, "the same model"
    # once each over the same examples
    (tokens,) = {sum(turn["tokens"] for turn in variant["rounds"]) for variant in variants}
    assert tokens == read_examples(tmp_path / "out" / "examples").splits["train"].tokens
    assert "compiled, with dropout: " in said
    assert "ours over trainer:grouped" in said


@pytest.mark.slow
def test_finetune_claim_quick(tmp_path):
    write_text(tmp_path)
    write_two_tasks(tmp_path / "glue")
    sizes = (*TO_PRETRAIN, "model.num_layers=1", f"data.sources=[{tmp_path}/text.txt]")
    batch = ("batch.global_size=8", "batch.micro_size=2", "eval.max_sequences=8")
    places = ["--data", str(tmp_path / "glue"), "--out", str(tmp_path / "out")]
    more = [*set_options([*sizes, *batch]), *places]
    options = "--quick --tasks RTE --arms one,four"
    result, said = record_of(tmp_path, "finetune_claim", options, *more)
    assert result["status"] == "complete"
    assert "4 of 4 parts to run, expected" in said
    assert {name: run["ranks"] for name, run in result["pretrainings"].items()} == {"four-0": 4, "one-0": 1}
    for number, accumulation in (("one", 4), ("four", 1)):
        summary = read_json(tmp_path / f"out/pretrained/{number}-0/summary.json")
        assert (summary["step"], summary["accumulation"]) == (4096 // (8 * 32), accumulation)
    glue = {arm: read_json(tmp_path / f"out/glue/{arm}-0/glue.json") for arm in ("one", "four")}
    assert (glue["one"]["ranks"], glue["four"]["ranks"]) == (1, 4)
    assert result["against_one"]["four"]["flips"]["all"]["of"] == 8
    before = {path: path.stat().st_mtime for path in tmp_path.glob("out/glue/*/glue.json")}
    again, said = record_of(tmp_path, "finetune_claim", options, *more)
    assert "0 of 4 parts to run" in said
    assert again["against_one"] == result["against_one"]
    assert {path: path.stat().st_mtime for path in before} == before
    other = run("finetune_claim", options.replace("RTE", "WNLI"), *more)
    assert (other.returncode, "holds another comparison (tasks differ)" in other.stderr) == (2, True)


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
        assert row["difference"] < 1e-4, "it computes something else"
        assert set(row["points"]) == {"1x8", "1x16", "2x8", "2x16"}


@pytest.mark.slow
def test_predict_speed_quick(tmp_path):
    result, said = record_of(tmp_path, "predict_speed", "--quick --threads 1")
    assert "by length " in said
    ways = result["ways"]
    padded = [ways[way]["padded_tokens"] for way in ("by length", "in order, 32", "in order, 128")]
    assert result["tokens"] <= padded[0] < padded[1] < padded[2]


def test_the_first_token_of_initial_weights_looks_everywhere_alike(tmp_path):
    """And with no weights at all exactly so."""
    run_dir = write_run(tmp_path / "run", config_of("small-text"))
    data = str(write_two_tasks(tmp_path / "glue"))
    result, said = record_of(tmp_path, "first_token", f"{run_dir} --task RTE --glue {data} --examples 5")
    assert result["examples"] == 5
    assert "run, layer 1" in said
    assert result["layers"]["initial weights"][0] == pytest.approx(result["equal"], abs=0.01)
    model = build_model(config_of("small-text").model, 16, 0)
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.attn.Wqkv.weight)
    ids = [torch.tensor([4, 9, 8, 5, 7, 5]), torch.tensor([4, 9, 5, 7, 7, 7, 7, 7, 7, 5])]
    counts = {"near": (6, 8), "first text": (3, 2), "second text": (2, 7)}
    expected = {part: (one / 6 + two / 10) / 2 for part, (one, two) in counts.items()}
    assert first_token.equal_shares(ids, 5) == pytest.approx(expected)
    assert list(first_token.shares(model, ids, 5)) == [pytest.approx(expected)] * 2


@pytest.mark.slow
def test_tokenize_speed_of_the_builtin_text():
    result = printed("tokenize_speed", "--repeats 1 --processes 2 --vocab-size 500")
    rates = {name: kinds["warm"]["all"] for name, kinds in result["bytes_per_s_per_core"].items()}
    assert set(rates) == {"alone_1", "ours_1", "alone_2_at_once", "ours_2"}


@pytest.mark.slow
def test_peer_faults_of_a_killed_rank(tmp_path):
    result, said = record_of(tmp_path, "peer_faults", "--faults kill --launchers bert-dp,torchrun")
    ours, peer = result["runs"]
    assert (ours["launcher"], peer["launcher"]) == ("bert-dp", "torchrun")
    assert all(seen["trained"] and seen["exit_code"] and seen["lines"] for seen in (ours, peer))
    assert ours["left_alive"] == []
    assert ours["cause_in_line"] is not None
    assert ours["rank_in_line"] is not None
    assert f"| kill | bert-dp | {ours['exit_code']} |" in said


SMALL_MODEL = "--layers 1 --hidden 24 --vocab 128 --micro 1"
SMALL_RUNS = {
    # script: options, and what its record names
    "checkpoint_stall": (f"{SMALL_MODEL} --steps 4 --every 2 --rounds 2 --folder OUT", "none beside"),
    "communication": (f"{SMALL_MODEL} --accumulation 2 --rounds 3", "ceiling ours accelerate deepspeed-1"),
    "engines": ("--engines single,ddp --rounds 1 --steps 3", "single ddp"),
    "startup": ("--rounds 1 --ranks 1", "bert-dp torchrun"),
}


@pytest.mark.slow
@pytest.mark.parametrize("script", SMALL_RUNS)
def test_a_small_run_leaves_its_record_and_no_file_beside_it(tmp_path, script):
    (out := tmp_path / "out").mkdir()
    options, named = SMALL_RUNS[script]
    more = set_options(SMALL) if script == "engines" else []
    result, _ = record_of(tmp_path, script, options.replace("OUT", str(out)), *more)
    assert all(f'"{name}"' in json.dumps(result) for name in named.split())
    assert not list(out.iterdir())


@pytest.mark.slow
def test_optimizer_speed_small():
    out = printed("optimizer_speed", "--rounds 1 --layers 1")
    assert out["adamw"]["ratio_to_adamw_median"] == 1.0
    assert out["lamb"]["seconds_median"] > 0


def test_predictor_on_some_rows(tmp_path):
    """Its figures follow from its rows; a file of other rows is read as well."""
    published = (ROOT / "benchmarks/published/published_bert_throughput.csv").read_text().splitlines()
    rows = tmp_path / "rows.csv"
    series = ("dlperf-pt-FP32-", "onebit-adam-tcp-", "mlperf2.0-H3C")
    rows.write_text("\n".join([published[0], *(line for line in published if line.startswith(series))]))
    options = "--sensitivity --leave-one-out --verbose --date 2000-01-02 --rows"
    result, said = record_of(tmp_path, "predictor", options, str(rows))
    errors = [abs(row["error_points"]) for row in result["rows"]]
    assert len(errors) == result["headline"]["rows"] == 7
    assert result["headline"]["median"] == pytest.approx(statistics.median(errors), abs=0.01)
    assert len(result["not_predictable"]) == 4
    assert len(result["sensitivity"]) == 20
    assert "dlperf-pt-FP32-b32-16" in said


@pytest.mark.parametrize("name", ["tune-lr", "tune-lr-three-rungs"])
def test_tune_lr_figures_follow_from_the_trials(name):
    recorded = read_json(ROOT / f"benchmarks/raw/2026-11-22-{name}.json")
    figures = {"seconds": "seconds", "trained_tokens": "tokens"}
    searched = {**recorded["search"], **{name: recorded["figures"][key] for name, key in figures.items()}}
    assert tune_lr.compare(searched, recorded["grid"]) == recorded["figures"]
    rates = {trial["lr"] for trial in recorded["grid"]["trials"]}
    assert tune_lr.ladder_of(searched) == sorted(rates, reverse=True)


def test_the_commit_is_known_without_git(tmp_path, monkeypatch):
    monkeypatch.delenv("BERT_DP_COMMIT", raising=False)
    head = records.git("rev-parse", "HEAD")
    assert records.commit() == head
    assert len(head) == 40
    monkeypatch.setattr(records, "ROOT", tmp_path)
    assert records.commit() == "", "no repository"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert records.commit() == "", "no git"
    (tmp_path / ".gpukit").mkdir()
    (tmp_path / ".gpukit" / "COMMIT").write_text("abc1\n")
    assert records.commit() == "abc1"
    by_file = code_version(["launcher"])
    monkeypatch.setenv("BERT_DP_COMMIT", "def2")
    assert records.environment()["commit"] == records.probed_machine(None)["git_commit"] == "def2"
    assert code_version(["launcher"]) != by_file


def test_kernels_of_a_trace_are_added_by_name_and_their_gaps_are_idle(tmp_path):
    events = [
        ("kernel", "a", 0, 2000),
        ("kernel", "b", 1000, 5000),  # beside the first
        ("gpu_memcpy", "a", 9000, 1000),
        ("cpu_op", "c", 0, 20000),
    ]
    trace = [{"cat": kind, "name": name, "ts": ts, "dur": us} for kind, name, ts, us in events]
    (tmp_path / "t.json.gz").write_bytes(gzip.compress(json.dumps({"traceEvents": trace}).encode()))
    assert gpu.kernel_times(tmp_path / "t.json.gz") == {
        "wall_s": 0.02,
        "idle_share": pytest.approx(1 - 7 / 20),
        "gpu_ms": 8.0,
        "launches": 3,
        "kernels_ms": {"b": 5.0, "a": 3.0},
    }


@pytest.mark.slow
def test_tune_batch_small(tmp_path, shards):
    more = [str(tmp_path / "out"), *tiny(shards, "batch.global_size=2", "batch.micro_size=auto")]
    result = printed("tune_batch", "--gpus 1 --tries 1 --budget 5s --rounds 1 --steps 3", *more)
    assert str(tmp_path) not in json.dumps(result), "no path of this machine in a record"
    medians = {int(micro): each["samples_per_s_median"] for micro, each in result["sweep"].items()}
    assert sorted(medians) == [1, 2]
    (found,) = result["tries"]
    assert found["share_of_sweeps_best"] == medians[found["micro_batch"]] / max(medians.values())
    assert result["within_3_percent"] == (found["share_of_sweeps_best"] >= 0.97)


@pytest.mark.slow
def test_settings_in_turn_figures_follow_from_the_rounds(tmp_path, shards):
    settings = tiny(shards, "schedule.steps=4", "eval.every_steps=4")
    options = [str(tmp_path / "out"), "--a", "optim.lr=1e-3", "--b", "optim.lr=2e-3", *settings]
    result, said = record_of(tmp_path, "settings_in_turn", "--seeds 5 --ranks 1", *options)
    (turn,) = result["rounds"]
    assert turn["a"]["step"] == turn["b"]["step"] == 4
    assert result["loss_differences"] == [turn["b"]["heldout_loss"] - turn["a"]["heldout_loss"]] != [0.0]
    assert "seeds 5" in said
