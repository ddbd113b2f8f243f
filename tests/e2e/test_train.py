"""`bert-dp train` end to end: what it writes, how it ends, what it refuses."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest

from launcher.training import shipped_configs
from tests.e2e.cli import bert_dp, start, tiny
from tests.shards import write_shards

CONFIGS = sorted(shipped_configs().glob("*.yaml"))


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("shards") / "s")


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def members(run_dir: Path) -> list[psutil.Process]:
    """Every process that has the run directory on its command line."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if str(run_dir / "config.yaml") in (process.info["cmdline"] or []):
            found.append(process)
    return found


def wait_for(condition, seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def step_reached(run_dir: Path, step: int):
    path = run_dir / "metrics.jsonl"
    return lambda: path.exists() and path.read_text().count("\n") >= step


def test_a_run_writes_its_directory_and_a_second_one_continues_it(tmp_path: Path, shards: Path) -> None:
    run_dir = tmp_path / "a run with spaces"
    done = bert_dp("train", "quickstart", *tiny(shards, "log.tensorboard=true"), "--run-dir", str(run_dir))
    assert done.returncode == 0, done.stderr
    for name in (
        "config.yaml",
        "environment.json",
        "metrics.jsonl",
        "evals.jsonl",
        "summary.json",
        "report.html",
        "logs/rank-0.log",
        "logs/rank-1.log",
        "checkpoints/step-00000002/manifest.json",
    ):
        assert (run_dir / name).is_file(), name
    assert list((run_dir / "tensorboard").glob("events*"))
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["status"], summary["step"], summary["world_size"]) == ("done", 2, 2)
    assert summary["accumulation"] * summary["micro_batch"] * summary["world_size"] == summary["global_batch"]
    for text in ("held-out", "unigram", "ln V", "tokens/s", "global steps/s", "MFU", "report.html"):
        assert text in done.stdout, text
    for line in lines(run_dir / "metrics.jsonl"):
        assert line["tokens_per_s"] == pytest.approx(line["samples_per_s"] * 16)
        assert line["tokens_per_s_per_gpu"] == pytest.approx(line["tokens_per_s"] / 2)
        assert line["global_steps_per_s"] == pytest.approx(line["steps_per_s"] * line["accumulation"] * 2)
        assert line["tokens"] == line["samples"] * 16 == line["step"] * 8 * 16

    more = bert_dp("train", "--run-dir", str(run_dir), "--set", "schedule.steps=4", "--nproc", "1")
    assert more.returncode == 0, more.stderr + more.stdout
    assert "resuming from step-00000002" in more.stdout
    assert [line["step"] for line in lines(run_dir / "metrics.jsonl")] == [1, 2, 3, 4]
    assert [line["world_size"] for line in lines(run_dir / "metrics.jsonl")] == [2, 2, 1, 1]

    changed = bert_dp("train", "--run-dir", str(run_dir), "--set", "optim.lr=1e-4")
    assert changed.returncode == 2
    assert "optim.lr" in changed.stderr
    never = bert_dp("train", "--run-dir", str(run_dir), "--resume", "never")
    assert never.returncode == 2
    assert "already holds a run" in never.stderr

    from_weights = bert_dp(
        "train",
        "quickstart",
        *tiny(shards, f"run.init_from={run_dir}"),
        "--nproc",
        "1",
        "--run-dir",
        str(tmp_path / "second"),
    )
    assert from_weights.returncode == 0, from_weights.stderr
    first = lines(tmp_path / "second" / "metrics.jsonl")[0]
    assert first["step"] == 1

    shapes_fit = tiny(shards, f"run.init_from={run_dir}", "model.num_heads=4")
    other = bert_dp("train", "quickstart", *shapes_fit, "--dry-run")
    assert other.returncode == 2
    assert "model.num_heads: 4, but run.init_from" in other.stderr
    (tmp_path / "nothing").mkdir()
    empty = bert_dp(
        "train", "quickstart", *tiny(shards, f"run.init_from={tmp_path / 'nothing'}"), "--dry-run"
    )
    assert empty.returncode == 2
    assert "run.init_from" in empty.stderr

    foreign = shutil.copytree(shards, tmp_path / "foreign")
    manifest = json.loads((foreign / "manifest.json").read_text())
    (foreign / "tokenizer.json").write_text("{ }")
    manifest["tokenizer"]["sha256"] = hashlib.sha256(b"{ }").hexdigest()
    manifest.pop("hash")
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    (foreign / "manifest.json").write_text(
        json.dumps({**manifest, "hash": hashlib.sha256(text.encode()).hexdigest()})
    )
    words = bert_dp(
        "train",
        "quickstart",
        *tiny(foreign, f"run.init_from={run_dir}"),
        "--nproc",
        "1",
        "--run-dir",
        str(tmp_path / "third"),
    )
    assert words.returncode == 2
    assert "data.tokenizer" in words.stdout + words.stderr


@pytest.mark.parametrize("config", CONFIGS, ids=lambda p: p.stem)
def test_every_shipped_configuration_trains_two_steps_when_shrunk(
    tmp_path: Path, shards: Path, config: Path
) -> None:
    shrunk = tiny(shards, "run.init_from=null")  # a second phase has no first one here
    done = bert_dp("train", str(config), *shrunk, "--nproc", "1", "--run-dir", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr + done.stdout
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["step"] == 2


BAD = {
    "unknown key": (["--set", "optim.lrr=1"], ["optim.lrr", "did you mean optim.lr?"]),
    "wrong type": (["--set", "schedule.steps=ten"], ["schedule.steps", "ten"]),
    "batch does not divide": (
        ["--set", "batch.global_size=10", "--nproc", "2"],
        ["batch.global_size", "nearest", "8, 12"],
    ),
    "vocabulary": (["--set", "model.vocab_size=70000"], ["model.vocab_size", "65535"]),
    "missing data": (["--set", "data.path=/nowhere"], ["data.path", "/nowhere"]),
    "missing source": (
        ["--set", "data.path=null", "--set", "data.sources=[nothing/*.txt]"],
        ["data.sources", "nothing/*.txt"],
    ),
    "missing weights": (["--set", "run.init_from=/nowhere"], ["run.init_from", "/nowhere"]),
    "wrong length": (["--set", "data.sequence_length=32"], ["data.sequence_length", "16"]),
    "small vocabulary": (["--set", "model.vocab_size=32"], ["model.vocab_size", "64"]),
    "two budgets": (["--set", "schedule.hours=1.0"], ["schedule", "steps", "hours"]),
    "nproc zero": (["--nproc", "0"], ["--nproc"]),
    "nproc word": (["--nproc", "many"], ["--nproc", "auto"]),
    "gpus": (["--set", "run.device=cuda"], ["run.device", "cuda"]),
    "single with two": (["--set", "parallel.engine=single", "--nproc", "2"], ["parallel.engine"]),
    "no equals sign": (["--set", "optim.lr"], ["--set", "a.b=v"]),
    "resume from nothing": (["--resume", "/nowhere"], ["--resume", "/nowhere"]),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_refused_before_anything_starts(tmp_path: Path, shards: Path, what: str) -> None:
    if what == "gpus" and Path("/dev/nvidia0").exists():
        pytest.skip("this machine has a GPU")
    extra, texts = BAD[what]
    done = bert_dp(
        "train", "quickstart", *tiny(shards), *extra, "--run-dir", str(tmp_path / "run"), cwd=tmp_path
    )
    assert done.returncode == 2, done.stdout
    for text in texts:
        assert text in done.stderr, done.stderr
    assert not (tmp_path / "run").exists(), "nothing half-written"


def test_missing_configuration_names_the_file(tmp_path: Path) -> None:
    done = bert_dp("train", "no-such.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert "no-such.yaml" in done.stderr


def test_dry_run_prints_the_equation_and_starts_nothing(tmp_path: Path) -> None:
    done = bert_dp(
        "train", "crammed-bert", "--set", "data.sources=[builtin]", "--nproc", "4", "--dry-run", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "8192 = micro 128 x accumulation 16 x dp 4" in done.stdout
    for text in ("119,589,889 parameters", "622.9 MFLOP", "GiB", "24.0 h"):
        assert text in done.stdout, text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_checkpoints_and_the_run_goes_on_later(
    tmp_path: Path, shards: Path, number: signal.Signals
) -> None:
    run_dir = tmp_path / "run"
    options = tiny(shards, "schedule.steps=100000")
    process = start("train", "quickstart", *options, "--run-dir", str(run_dir))
    wait_for(step_reached(run_dir, 5))
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number, out + err
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["status"], summary["signal"]) == ("stopped", number)
    checkpoint = json.loads((run_dir / summary["checkpoint"] / "state.json").read_text())
    assert checkpoint["step"] == summary["step"] == lines(run_dir / "metrics.jsonl")[-1]["step"]
    assert not members(run_dir)
    steps = summary["step"] + 2
    more = bert_dp("train", "--run-dir", str(run_dir), "--set", f"schedule.steps={steps}")
    assert more.returncode == 0, more.stdout + more.stderr
    assert [line["step"] for line in lines(run_dir / "metrics.jsonl")] == list(range(1, steps + 1))


def test_sigkill_of_the_launcher_leaves_no_process(tmp_path: Path, shards: Path) -> None:
    run_dir = tmp_path / "run"
    process = start("train", "quickstart", *tiny(shards, "schedule.steps=100000"), "--run-dir", str(run_dir))
    wait_for(step_reached(run_dir, 2))
    assert len(members(run_dir)) == 3  # torchrun and two ranks
    process.kill()
    process.communicate()
    wait_for(lambda: not members(run_dir), seconds=30)


def test_a_run_directory_in_use_is_refused_and_only_loopback_listens(tmp_path: Path, shards: Path) -> None:
    run_dir = tmp_path / "run"
    process = start("train", "quickstart", *tiny(shards, "schedule.steps=100000"), "--run-dir", str(run_dir))
    try:
        wait_for(step_reached(run_dir, 2))
        sockets = [c for m in members(run_dir) for c in m.net_connections("inet") if c.status == "LISTEN"]
        assert sockets, "gloo listens somewhere"
        assert all(c.laddr.ip in ("127.0.0.1", "::1") for c in sockets), sockets
        second = bert_dp("train", "quickstart", *tiny(shards), "--run-dir", str(run_dir))
        assert second.returncode == 2
        assert "in use" in second.stderr
    finally:
        process.terminate()
        process.communicate(timeout=60)


def test_a_killed_rank_is_named_first(tmp_path: Path, shards: Path) -> None:
    run_dir = tmp_path / "run"
    process = start("train", "quickstart", *tiny(shards, "schedule.steps=100000"), "--run-dir", str(run_dir))
    wait_for(step_reached(run_dir, 2))
    ranks = [m for m in members(run_dir) if m.environ().get("RANK") == "1"]
    ranks[0].kill()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "rank 1: killed by signal 9 (SIGKILL)" in "".join(out.splitlines(keepends=True)[-30:]), out + err
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "failed"
    assert not members(run_dir)
