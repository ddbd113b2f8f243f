"""Test the files, the results and the refusals of `bert-dp train`."""

import gzip
import hashlib
import json
import shutil
from pathlib import Path

import pytest
import yaml

from bert_dp.config import dump_config, load_config
from tests.e2e.cli import TINY, accepted, bert_dp, refused, resume_run, tiny, train
from tests.helpers import PRETRAINING, RECIPES, logged, read_json, read_lines
from tests.parity.runs import train_runs, write_run
from tests.shards import edited_manifest


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> tuple[Path, str]:
    """Return a run of two steps on two ranks and its console output."""
    run_dir = tmp_path_factory.mktemp("first") / "a run with spaces"
    done = bert_dp("train", "quickstart", *tiny(shards, "log.to=[tensorboard]"), "--run-dir", str(run_dir))
    return run_dir, done.stdout


def sent(run_dir: Path, tag: str) -> list[int]:
    """Return the steps of a scalar that the last start sent to TensorBoard."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(max((run_dir / "tensorboard").iterdir())))
    events.Reload()
    assert events.Tags()["tensors"] == ["config", "summary"]
    return [event.step for event in events.Scalars(tag)]


@pytest.mark.quick
def test_a_run_writes_all_its_files(first: tuple[Path, str]) -> None:
    run_dir, output = first
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
    assert (sent(run_dir, "loss"), sent(run_dir, "heldout_loss")) == ([1, 2], [2])
    summary = read_json(run_dir / "summary.json")
    assert (summary["status"], summary["step"], summary["world_size"]) == ("done", 2, 2)
    assert summary["accumulation"] * summary["micro_batch"] * summary["world_size"] == summary["global_batch"]
    for text in ("held-out", "unigram", "ln V", "tokens/s", "global steps/s", "MFU", "report.html"):
        assert text in output, text
    for line in read_lines(run_dir / "metrics.jsonl"):
        assert line["tokens_per_s"] == pytest.approx(line["samples_per_s"] * 16)
        assert line["tokens_per_s_per_gpu"] == pytest.approx(line["tokens_per_s"] / 2)
        assert line["global_steps_per_s"] == pytest.approx(line["steps_per_s"] * line["accumulation"] * 2)
        assert line["tokens"] == line["samples"] * 16 == line["step"] * 8 * 16


@pytest.mark.quick
def test_a_run_resumes_on_another_number_of_ranks(first: tuple[Path, str], tmp_path: Path) -> None:
    run_dir = shutil.copytree(first[0], tmp_path / "a run with spaces", symlinks=True)
    more = resume_run(run_dir, "schedule.steps=4")
    assert "resuming from step-00000002" in more.stdout
    assert logged(run_dir, "step") == [1, 2, 3, 4]
    assert logged(run_dir, "world_size") == [2, 2, 1, 1]
    starts, spent = read_json(run_dir / "ledger.json")["starts"], read_json(run_dir / "summary.json")["spent"]
    assert [start["devices"] for start in starts] == [2, 1]
    assert starts[0]["seconds"] < spent["seconds"] <= starts[0]["seconds"] + starts[1]["seconds"]
    assert sent(run_dir, "loss") == [1, 2, 3, 4]


def test_a_dry_run_converts_a_budget_in_epochs_to_tokens(shards: Path, tmp_path: Path) -> None:
    """The shards have 96 sequences of 16 tokens; the length of sources that are not built is unknown."""
    arguments = ("train", "quickstart", "schedule.epochs=2.5", "--dry-run")
    assert f"{240 * 16:,} tokens" in accepted(*arguments, *tiny(shards, "schedule.steps=null"))
    output = accepted(*arguments, BERT_DP_CACHE=str(tmp_path / "cache"))
    assert "2.5 epochs of the data, which is not built yet" in output


def test_weights_of_another_tokenizer_are_refused(
    first: tuple[Path, str], shards: Path, tmp_path: Path
) -> None:
    foreign = shutil.copytree(shards, tmp_path / "foreign")
    (foreign / "tokenizer.json").write_text("{ }")
    with edited_manifest(foreign) as edited:
        edited["tokenizer"]["sha256"] = hashlib.sha256(b"{ }").hexdigest()
    options = ("--set", f"run.init_from={first[0]}")
    done = train(foreign, tmp_path / "third", nproc=1, options=options, code=2)
    assert "data.tokenizer" in done.stdout + done.stderr


@pytest.mark.parametrize("config", [*PRETRAINING, *RECIPES], ids=lambda p: p.stem)
def test_every_shipped_configuration_trains(tmp_path: Path, shards: Path, config: Path) -> None:
    """The verb accepts the configuration, and a rank trains its resolved form."""
    more = "run.init_from=null"  # the run of the first phase does not exist
    accepted("train", str(config), *tiny(shards, more), "--nproc", "1", "--dry-run", cwd=tmp_path)
    resolved = dump_config(load_config(config, [*TINY, f"data.path={shards}", more]))
    run_dir = write_run(tmp_path / "run", yaml.safe_load(resolved))
    train_runs(1, [run_dir])
    assert read_json(run_dir / "summary.json")["step"] == 2


BAD = {
    "no such file": (["--set", "model.vocab_size=64", "no-such.yaml"], ["no-such.yaml"]),
    "unknown key": (["--set", "optim.lrr=1"], ["optim.lrr", "did you mean optim.lr?"]),
    "batch does not divide": (
        ["--set", "batch.global_size=10", "--nproc", "2"],
        ["batch.global_size", "nearest", "8, 12"],
    ),
    "wrong length": (["--set", "data.sequence_length=32"], ["data.sequence_length", "16"]),
    "two budgets": (["--set", "schedule.hours=1.0"], ["schedule", "steps", "hours"]),
    "no price": (
        ["--set", "schedule.steps=null", "--set", "schedule.dollars=1.0"],
        ["run.price_per_device_hour", "dollars"],
    ),
    "gpus": (["--set", "run.device=cuda"], ["run.device", "cuda"]),
    "resume from nothing": (["--resume", "/nowhere"], ["--resume", "/nowhere"]),
}


@pytest.mark.quick
@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_before_anything_starts(tmp_path: Path, shards: Path, name: str) -> None:
    if name == "gpus" and Path("/dev/nvidia0").exists():
        pytest.skip("this machine has a GPU")
    extra, texts = BAD[name]
    run = ("train", "quickstart", *tiny(shards), *extra, "--run-dir", str(tmp_path / "run"))
    output = refused(*run, cwd=tmp_path)
    assert all(text in output for text in texts), output
    assert not (tmp_path / "run").exists(), "a refused run left a directory"


@pytest.mark.quick
def test_a_dry_run_prints_the_batch_equation_and_starts_nothing(tmp_path: Path) -> None:
    options = ["--set", "data.sources=[builtin]", "--nproc", "4", "--dry-run"]
    output = accepted("train", "crammed-bert", *options, "--force", cwd=tmp_path)  # skips the memory check
    equation = "8192 = micro 128 x accumulation 16 x dp 4"
    for text in (equation, "119,589,889 parameters", "622.9 MFLOP", "GiB", "24 h"):
        assert text in output, text
    assert not list(tmp_path.iterdir())


def test_profiling_does_not_change_the_run(first: tuple[Path, str], shards: Path, tmp_path: Path) -> None:
    plain, run_dir = first[0], tmp_path / "run"
    train(shards, run_dir, options=("--profile", "2:3", "--profile-ranks", "1"))
    assert sorted(path.name for path in (run_dir / "profile").iterdir()) == ["rank-1.json.gz"]
    with gzip.open(run_dir / "profile" / "rank-1.json.gz") as file:
        assert json.load(file)["traceEvents"]
    assert read_json(run_dir / "summary.json")["profiled_steps"] == [2, 2]
    assert logged(run_dir, "loss") == logged(plain, "loss")
    assert "profile" not in (run_dir / "config.yaml").read_text()
