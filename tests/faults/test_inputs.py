"""Rows 21 to 24: damaged data, hostile files, secrets, and access to a run from outside."""

import contextlib
import functools
import json
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file, save_file

from bert_dp.config.manifest import manifest_hash
from bert_dp.data.readers import file_hash
from launcher.machine import doctor
from launcher.run import trials
from tests.e2e.cli import (
    accepted,
    begin,
    bert_dp,
    here,
    members,
    refused,
    resume_run,
    step_reached,
    tiny,
    train,
    train_command,
    wait_for,
)
from tests.e2e.test_launchers import TOOLS, with_site
from tests.faults.harness import observe, rounds
from tests.helpers import logged, read_json, write_files
from tests.shards import write_shards


@pytest.fixture(scope="module")
def run_with_secrets(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> tuple[Path, str]:
    """Return a run of 2 steps in an environment with secrets, and its output."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    run_dir.mkdir(mode=0o700)
    (run_dir / ".env").write_text(f"HF_TOKEN={SECRETS['HF_TOKEN']}\n")
    done = train(shards, run_dir, nproc=1, **SECRETS, **ORDINARY)
    return run_dir, done.stdout + done.stderr


@pytest.fixture(scope="module")
def finished(run_with_secrets: tuple[Path, str]) -> Path:
    """Return a run of 2 steps, which a test must copy before changing it."""
    return run_with_secrets[0]


# --- row 21


def damage(directory: Path, what: str, number: int) -> tuple[str, str]:
    """Change a file in a directory of shards, and return its hashes before and after the change."""
    file = directory / {"tokens": "train-00000.bin", "held-out": "held_out-00000.bin"}.get(
        what, "tokenizer.json"
    )
    if what == "manifest":
        manifest = read_json(directory / "manifest.json")
        before = manifest["hash"]
        manifest["num_special"] += 1
        (directory / "manifest.json").write_text(json.dumps(manifest))
        return before[:16], manifest_hash(manifest)[:16]
    before, data = file_hash(file), bytearray(file.read_bytes())
    data[random.Random(number).randrange(len(data))] ^= 1 << number % 8
    file.write_bytes(data)
    return before[:16], file_hash(file)[:16]


@pytest.mark.parametrize("what", ["tokens", "held-out", "tokenizer", "manifest"])
def test_row_21_changed_data_are_refused_before_step_0_with_both_hashes(tmp_path: Path, what: str) -> None:
    for number in rounds(1, 10):
        directory = write_shards(tmp_path / f"shards-{number}")
        before, after = damage(directory, what, number)
        start = time.monotonic()
        done = train(directory, tmp_path / f"run-{number}", code=2)
        observe(21, what=what, seconds=time.monotonic() - start)
        assert before in done.stderr, done.stderr
        assert after in done.stderr, done.stderr
        assert "Traceback" not in done.stderr
        assert not (tmp_path / f"run-{number}" / "metrics.jsonl").exists()
        assert here("data", "inspect", str(directory)).returncode != 0


def test_row_21_a_run_does_not_resume_with_other_data(tmp_path: Path, shards: Path, finished: Path) -> None:
    run_dir = shutil.copytree(finished, tmp_path / "run")
    other = write_shards(tmp_path / "other", seed=1)
    hashes = [read_json(d / "manifest.json")["hash"][:16] for d in (shards, other)]
    output = refused(*train_command(other, run_dir, "schedule.steps=4"))
    assert all(value in output for value in hashes), output


# --- row 22


class Hostile:
    def __init__(self, canary: Path):
        self.canary = canary

    def __reduce__(self):
        return os.system, (f"touch {self.canary}",)


def update_manifest(file: Path) -> None:
    """Update the checkpoint's manifest for a changed file, as an attacker who knows the format would."""
    manifest = read_json(file.with_name("manifest.json"))
    manifest["files"][file.name] = {"bytes": file.stat().st_size, "sha256": file_hash(file)}
    file.with_name("manifest.json").write_text(json.dumps(manifest))


def test_the_hostile_pickle_executes_its_command(tmp_path: Path) -> None:
    """With a harmless pickle, the next two tests would pass without checking anything."""
    pickle.loads(pickle.dumps(Hostile(tmp_path / "canary")))
    assert (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        *((f"{name}.safetensors", None, "checkpoint") for name in ("model", "optimizer")),
        ("state.json", None, "checkpoint"),
        (
            "model.safetensors",
            lambda tensors: {name: tensor.double() for name, tensor in tensors.items()},
            "expected float32 .* found float64",
        ),
        ("optimizer.safetensors", lambda tensors: {}, r"optimizer\.safetensors is empty after 2 steps"),
    ],
)
def test_row_22_a_checkpoint_with_a_pickle_or_odd_tensors_is_refused(
    tmp_path: Path, finished: Path, file: str, change: Any, message: str
) -> None:
    """`change` maps the file's tensors to others; None replaces the file with a pickle."""
    run_dir, canary = shutil.copytree(finished, tmp_path / "run"), tmp_path / "canary"
    checkpoint = max((run_dir / "checkpoints").glob("step-" + "[0-9]" * 8))
    path = checkpoint / file
    if change is None:
        path.write_bytes(pickle.dumps(Hostile(canary)))
    else:
        save_file(change(load_file(path)), path)
    update_manifest(path)
    named = () if change else ("--resume", str(checkpoint))
    done = resume_run(run_dir, "schedule.steps=4", options=named, code=2)
    assert re.search(message, done.stdout + done.stderr), done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    if file == "model.safetensors" and change is None:
        assert "resuming" not in resume_run(run_dir, "schedule.steps=4", code=None).stdout
    assert not canary.exists()


@pytest.mark.parametrize("tag", ["!!python/object/apply:os.system", "!!python/object/new:os.system"])
def test_row_22_yaml_that_would_run_a_command_is_refused(tmp_path: Path, shards: Path, tag: str) -> None:
    canary = tmp_path / "canary"
    text = f'schedule:\n  steps: {tag} ["touch {canary}"]\n'
    (tmp_path / "evil.yaml").write_text(text)
    option = f'schedule.steps={tag} ["touch {canary}"]'
    stored = tmp_path / "stored"
    stored.mkdir()
    (stored / "config.yaml").write_text(text)
    commands = [
        ["train", str(tmp_path / "evil.yaml")],
        ["train", "quickstart", *tiny(shards), "--set", option],
        ["train", "--run-dir", str(stored)],
    ]
    for command in commands:
        refused(*command, cwd=tmp_path)
    accepted("report", str(stored))
    worker = [sys.executable, "-m", "bert_dp.worker", str(stored / "config.yaml")]
    assert subprocess.run(worker, capture_output=True, check=False).returncode == 2
    assert not canary.exists()


# --- modules of the current folder are never imported

MODULES = ("random", "json", "numpy", "psutil", "tokenizers", "torch", "safetensors", "yaml")
PACKAGES = ("launcher", "bert_dp", "accelerate", "deepspeed")
CODE = "open({marker!r}, 'a').write(__name__ + ' ')\nraise ImportError('a file of the current folder')\n"

Executed = Callable[[], str]


@pytest.fixture
def executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Executed:
    """Fill the current folder with modules that record their import; return a reader of the record."""
    folder, marker = tmp_path / "here", tmp_path / "executed"
    names = [*(f"{name}.py" for name in MODULES), *(f"{name}/__init__.py" for name in PACKAGES)]
    write_files(folder, dict.fromkeys(names, CODE.format(marker=str(marker))))
    monkeypatch.chdir(folder)
    return lambda: marker.read_text() if marker.exists() else ""


def test_doctor_data_build_and_scale_import_nothing_from_the_current_folder(
    tmp_path: Path, executed: Executed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The all-reduce of doctor gets a longer time limit, because the machine may be busy."""
    monkeypatch.setattr(doctor, "all_reduce", functools.partial(doctor.all_reduce, 300.0))
    found = here("doctor", "--run-dir", str(tmp_path))
    assert executed() == ""
    assert found.returncode in (0, 1), found.stderr
    assert "all-reduce: 2 gloo ranks" in found.stdout
    text = tmp_path / "a.txt"
    text.write_text("".join(f"one line of words, number {i}\n" for i in range(2000)))
    options = "--vocab-size 64 --sequence-length 16 --processes 2 data.build.max_tokens_per_char=0".split()
    options += ["data.build.held_out_fraction=0.2"]
    done = here("data", "build", str(text), "--out", str(tmp_path / "out"), *options)
    assert executed() == ""
    assert done.returncode == 0, done.stdout + done.stderr
    with trials.runner(tmp_path, [], launcher="torchrun", on_gpu=False, log=print) as runs:
        (line,) = runs.helper("bert_dp.measure.disk", [str(tmp_path)])
    assert executed() == ""
    assert line["bytes"] > 0


# --- row 23

SECRETS = {
    "HF_TOKEN": "hf_AbCdEfGhIjKl",
    "api_key": 'with "quotes" & <tags>',
    "MY_SECRET": "gr\u00fc\u00dfe-geheim",
    "DB_PASSWORD": "713905284",
    "WANDB_API_KEY": "0f1e2d3c4b5a",
    "DB_PWD": "p@55/w0rd",
    "SLACK_WEBHOOK": "https://hooks.example/T0/B0/x1",
}
ORDINARY = {"MY_KEY": "status", "A_PWD": "memory", "B_TOKEN": "torchrun", "C_AUTH": "done", "D_PAT": "ddp"}
LEAK = """
import os, sys
if os.environ.get("RANK") == "1" and "bert_dp.worker" in sys.orig_argv:
    from bert_dp.tasks import mlm
    class Leaking(mlm.MaskedLanguageModel):
        def num_targets(self, first_sample, count):
            values = [os.environ[name] for name in os.environ["LEAKED"].split()]
            print("request failed:", *values, "x" * (1 << 20), *values, flush=True)
            raise RuntimeError("401 for " + " ".join(values))
    mlm.make_task = Leaking
"""


def leaks(run_dir: Path) -> list[str]:
    """Return the files of a run that contain a secret as plain text or escaped as in JSON or HTML."""
    leaked = []
    for path in (p for p in run_dir.rglob("*") if p.is_file()):
        data = path.read_bytes()
        for name, value in SECRETS.items():
            forms = {value, json.dumps(value)[1:-1], value.replace("&", "&amp;").replace("<", "&lt;")}
            leaked += [f"{path.relative_to(run_dir)}: {name}" for form in forms if form.encode() in data]
    return leaked


def test_row_23_no_file_of_a_run_contains_a_secret(run_with_secrets: tuple[Path, str]) -> None:
    """Ordinary words in variables named like secrets are not redacted, and a user's file is not changed."""
    run_dir, output = run_with_secrets
    assert leaks(run_dir) == [".env: HF_TOKEN"]
    summary = read_json(run_dir / "summary.json")
    assert (summary["status"], summary["exit_code"]) == ("done", 0)
    assert summary["peak_memory_gib"] > 0
    for name in ("summary.json", "environment.json", "report.html"):
        assert "redacted" not in (run_dir / name).read_text()
    assert run_dir.stat().st_mode & 0o777 == 0o700
    assert not [value for value in SECRETS.values() if value in output]


def test_row_23_secrets_in_errors_and_logs_of_failed_runs_are_redacted(tmp_path: Path, shards: Path) -> None:
    run_dir = tmp_path / "run"
    environ = {**SECRETS, "LEAKED": " ".join(SECRETS), "PYTHONPATH": with_site(tmp_path, LEAK)}
    done = train(shards, run_dir, "compile=off", code=1, **environ)
    assert "401 for" in (run_dir / "logs" / "rank-1.error.json").read_text()  # the fault was injected
    assert "request failed:" in (run_dir / "logs" / "rank-1.log").read_text()
    assert "401 for" in (run_dir / "summary.json").read_text()
    assert "401 for" in done.stdout
    assert not [v for v in SECRETS.values() if v in done.stdout + done.stderr]
    assert leaks(run_dir) == []
    bert_dp("report", str(run_dir))
    assert leaks(run_dir) == []


def test_row_23_a_setting_that_contains_a_secret_is_refused(tmp_path: Path, shards: Path) -> None:
    place = write_shards(tmp_path / SECRETS["HF_TOKEN"])
    output = refused(*train_command(place, tmp_path / "run"), **SECRETS)
    assert output.startswith("error: data.path: ")
    assert "HF_TOKEN" in output
    assert SECRETS["HF_TOKEN"] not in output
    assert not (tmp_path / "run").exists()


def test_row_23_no_other_user_can_write_a_run_directory(tmp_path: Path, shards: Path, finished: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    assert "is writable by every user" in refused(*train_command(shards, tmp_path / "open"))
    assert not list((tmp_path / "open").iterdir())
    existing = shutil.copytree(finished, tmp_path / "run")
    existing.chmod(0o777)
    again = train(shards, existing)  # runs must also resume on file systems without modes
    assert "is writable by every user" in again.stdout


# --- row 24


def listening(process: psutil.Process) -> set[tuple[str, int]]:
    """Return (address, port) of every socket on which a process of the run listens."""
    addresses = set()
    with contextlib.suppress(psutil.Error):
        for member in [process, *process.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                addresses |= {
                    c.laddr for c in member.net_connections("inet") if c.status == psutil.CONN_LISTEN
                }
    return {(address.ip, address.port) for address in addresses}


@pytest.mark.parametrize("launcher", TOOLS)
def test_row_24_a_run_listens_on_loopback_only_and_resumes_after_a_stop(
    tmp_path: Path, shards: Path, executed: Executed, launcher: str
) -> None:
    """Read the sockets 20 times a second until the third step, then send SIGTERM. No module of the current
    folder is imported."""
    run_dir, options = tmp_path / "a run", ("--launcher", launcher)
    process = begin(shards, run_dir, "schedule.steps=100000", "compile=off", options=options)
    seen: set[tuple[str, int]] = set()
    whole = psutil.Process(process.pid)

    def third_step() -> bool:
        seen.update(listening(whole))
        assert process.poll() is None, process.communicate()
        return step_reached(run_dir, 3)()

    try:
        wait_for(third_step, seconds=180)
    finally:
        process.terminate()
        out, err = process.communicate(timeout=120)
    observe(24, launcher=launcher, sockets=len(seen))
    assert seen, "no socket was seen, although gloo listens on one"
    assert {address for address, _ in seen} <= {"127.0.0.1", "::1"}, seen
    assert process.returncode == 143, out + err
    assert f"launcher: {launcher}" in out
    assert not members(run_dir)
    summary = read_json(run_dir / "summary.json")
    assert (summary["status"], summary["signal"], summary["world_size"]) == ("stopped", signal.SIGTERM, 2)
    assert (run_dir / summary["checkpoint"] / "manifest.json").is_file()
    steps = summary["step"] + 2
    resume_run(run_dir, f"schedule.steps={steps}", nproc=2, options=options)
    assert logged(run_dir, "step") == list(range(1, steps + 1))
    assert read_json(run_dir / "summary.json")["status"] == "done"
    assert read_json(run_dir / "environment.json")["launcher"] == launcher
    assert (run_dir / "logs" / "rank-1.log").exists()
    assert executed() == ""
