"""Test the files, the checks and the refusals of `bert-dp export`."""

import json
import math
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from bert_dp import load
from bert_dp.config import Config
from bert_dp.config.errors import sha256
from bert_dp.exporting.check import ExportCheck
from bert_dp.files.run_facts import MODEL_FILES
from tests.e2e.cli import accepted, bert_dp, ended, here, interrupted, refused
from tests.helpers import logged, read_json, read_lines, write_files
from tests.runs_to_export import WORDS, config_of, finetuned, write_run

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs g++")
NAMES = {"rope": "crammed-rope", "rms": "small-text", "simple": "bert-simple", "crammed": "crammed-bert"}
SMALL = {"hidden_size": 48, "num_heads": 4, "intermediate_size": 40}
RUNS: dict[str, Config] = {name: config_of(shipped, model=SMALL) for name, shipped in NAMES.items()}
RUNS["rope-labels"] = finetuned(RUNS["rope"], "native", pooling="mean")
RUNS["recipe-labels"] = finetuned(RUNS["crammed"], "recipe")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a run of each configuration into one folder."""
    folder = tmp_path_factory.mktemp("export")
    for name, config in RUNS.items():
        write_run(folder / name, config)
    return folder


def export(form: str, run: Path, out: Path, *options: str) -> Path:
    done = bert_dp("export", form, str(run), "--out", str(out), *options)
    assert not re.search(r"^(W\d{4}|WARNING)|Warning:", done.stderr, re.MULTILINE), done.stderr
    return out


def check(directory: Path, run: Path) -> ExportCheck:
    output = accepted("export", "check", str(directory), "--json", "--run", str(run))
    return ExportCheck.model_validate_json(output)


def assert_proven(found: ExportCheck, tolerance: float) -> None:
    assert found.ok
    assert {(row.batch, row.length) for row in found.rows} == {
        (batch, length) for batch in (1, 3, 8) for length in (5, 37, 128)
    }
    assert max(row.difference for row in found.rows) < tolerance
    assert found.again <= tolerance
    assert not found.not_loaded


@pytest.mark.parametrize(
    ("form", "name", "options", "architecture"),
    [
        pytest.param("hf", "rms", (), "EuroBERT", marks=pytest.mark.quick),
        ("hf", "simple", ("--encoder",), "RobertaPreLayerNorm"),
        ("hf", "rope-labels", (), "ModernBERT"),
        ("onnx", "crammed", (), None),
        ("onnx", "recipe-labels", (), None),
    ],
)
def test_the_target_library_loads_an_export_and_reproduces_the_outputs(
    runs: Path, tmp_path: Path, form: str, name: str, options: tuple[str, ...], architecture: str | None
) -> None:
    pytest.importorskip({"hf": "transformers", "onnx": "onnxruntime"}[form])
    out = export(form, runs / name, tmp_path / "out", *options)
    if form == "onnx":
        assert b".py" not in (out / "model.onnx").read_bytes(), "stack trace in the model"
    found = check(out, runs / name)
    assert found.architecture == architecture
    assert_proven(found, 1e-5 if form == "hf" else 1e-4)
    assert found.parameters == found.stored_parameters
    if architecture == "ModernBERT":
        assert found.parameters == found.run_parameters


@pytest.mark.parametrize(
    ("form", "name", "precision"),
    [("onnx", "recipe-labels", "int8"), pytest.param("aoti", "rms", "bf16", marks=needs_compiler)],
)
def test_a_lower_precision_is_measured_without_a_tolerance(
    runs: Path, tmp_path: Path, form: str, name: str, precision: str
) -> None:
    pytest.importorskip({"onnx": "onnxruntime", "aoti": "torch"}[form])
    found = check(export(form, runs / name, tmp_path / "out", f"--{precision}"), runs / name)
    assert (found.precision, found.tolerance, found.ok) == (precision, None, True)
    assert 1e-4 < max(row.difference for row in found.rows) < 0.1


def test_the_exported_directory_has_a_config_a_tokenizer_and_a_card(runs: Path, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    run = shutil.copytree(runs / "rope-labels", tmp_path / "rope-labels")
    heldout = {"loss": 0.5, "scores": {"dev/accuracy": 0.75}}
    (run / "summary.json").write_text(json.dumps({"status": "done", "heldout_step": 3, "heldout": heldout}))
    (run / "environment.json").write_text(json.dumps({"command": ["bert-dp", "finetune", "runs/a"]}))
    out = export("hf", run, tmp_path / "out")
    files = "README.md config.json export.json model.safetensors tokenizer.json tokenizer_config.json"
    assert sorted(path.name for path in out.iterdir()) == files.split()
    config = AutoConfig.from_pretrained(out)
    assert config.id2label == {0: "sea", 1: "land", 2: "sky"}
    assert config.rope_parameters["full_attention"]["rope_theta"] == RUNS["rope"].model.rope_theta
    assert set(config.layer_types) == {"full_attention"}
    old = read_json(out / "config.json")
    assert (old["global_attn_every_n_layers"], old["local_attention"]) == (1, 256)
    assert old["global_rope_theta"] == old["local_rope_theta"] == RUNS["rope"].model.rope_theta
    tokenizer = AutoTokenizer.from_pretrained(out)
    encoded = tokenizer(["an old ship", "rain"], ["on grey islands", "fell"], padding=True)
    assert set(encoded) == {"input_ids", "attention_mask"}
    assert encoded["input_ids"][0][0] == tokenizer.cls_token_id == 4
    assert encoded["input_ids"][1][-1] == tokenizer.pad_token_id == config.pad_token_id
    card = (out / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\npipeline_tag: text-classification\n")
    for value in ("bert-dp export hf rope-labels", "bert-dp finetune runs/a", "0" * 64, "0.7500"):
        assert value in card


def predicted(run: Path, file: Path, place: Path, *options: str) -> list[dict[str, Any]]:
    accepted("predict", str(run), str(file), "--out", str(place), *options)
    return read_lines(place)


@needs_compiler
def test_every_format_reproduces_the_dev_score_of_the_run(runs: Path, tmp_path: Path) -> None:
    """The reference is predictions.jsonl, which finetuning wrote."""
    for package in ("transformers", "onnxruntime", "sklearn"):
        pytest.importorskip(package)
    topics = ("sea", "land", "sky")
    for name, count in (("train", 24), ("dev", 40)):
        rows = [f"{' '.join(WORDS[i % 9 : i % 9 + 1 + i % 5])},{topics[i % 3]}" for i in range(count)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["body,topic", *rows]) + "\n")
    run = tmp_path / "run"
    data = ["--train", "train.csv", "--dev", "dev.csv", "--text", "body", "--label", "topic"]
    how = ["schedule.epochs=20", "optim.lr=2e-3", "precision=fp32", "--nproc", "1"]
    bert_dp("finetune", str(runs / "rope"), *data, *how, "--run-dir", str(run), cwd=tmp_path)
    score = read_json(run / "summary.json")["heldout"]["scores"]["dev/accuracy"]
    reference = read_lines(run / "predictions.jsonl")
    names = read_json(export("hf", run, tmp_path / "hf") / "config.json")["id2label"]
    answers = [names[str(line["logits"].index(max(line["logits"])))] for line in reference]
    assert len(set(answers)) > 1
    for form in ("run", "hf", "onnx", "aoti"):
        place = tmp_path / form
        if not place.exists():
            export(form, run, place)
        lines = predicted(place, tmp_path / "dev.csv", tmp_path / f"{form}.jsonl", "--text", "body")
        assert [line["label"] for line in lines] == answers, form
        for line, before in zip(lines, reference, strict=True):
            exps = [math.exp(x) for x in before["logits"]]
            shares = {names[str(i)]: x / sum(exps) for i, x in enumerate(exps)}
            assert line["probabilities"] == pytest.approx(shares, abs=2e-5 if form == "run" else 1e-4)
        right = [line["label"] == topics[i % 3] for i, line in enumerate(lines)]
        assert sum(right) / len(right) == pytest.approx(score, abs=1e-9), form


@pytest.mark.quick
def test_the_check_fails_for_a_different_model(runs: Path, tmp_path: Path) -> None:
    """The model differs in one constant, whose effect initial weights would hide."""
    pytest.importorskip("transformers")
    out = export("hf", runs / "rms", tmp_path / "out")
    config = read_json(out / "config.json")
    config["rope_parameters"]["rope_theta"] = 10_000.0
    (out / "config.json").write_text(json.dumps(config))
    about = read_json(out / "export.json")
    about["files"]["config.json"] = sha256(out / "config.json")
    (out / "export.json").write_text(json.dumps(about))
    shown = ended(here("export", "check", out.name, "--run", str(runs / "rms"), cwd=tmp_path), 1)
    assert "does not reproduce the outputs of the run" in shown.stdout
    largest = re.search(r"largest difference +([\d.e-]+)", shown.stdout)
    assert largest is not None
    assert float(largest[1]) > 1e-3


@pytest.mark.quick
def test_an_impossible_export_is_refused(runs: Path, tmp_path: Path) -> None:
    write_files(tmp_path, {"full/a": ""})
    position = "model.position: scaled_sinusoidal"
    for form, name, options, message in (
        ("hf", "crammed", (), f"{position}, but no transformers class combines it with model.norm"),
        ("hf", "recipe-labels", ("--encoder",), position),
        ("hf", "nowhere", (), "does not exist"),
        ("aoti", "rope", ("--int8",), "--int8"),
    ):
        errors = refused("export", form, str(runs / name), "--out", str(tmp_path / "out"), *options)
        assert message in errors
        assert errors.count("\n") == 1
    assert "--out: " in refused("export", "hf", str(runs / "rope"), "--out", str(tmp_path / "full"))
    assert [path.name for path in tmp_path.iterdir()] == ["full"], "a refused export left a file"


@pytest.mark.quick
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_no_half_written_directory(runs: Path, tmp_path: Path, number: int) -> None:
    pytest.importorskip("onnxruntime")
    words = ["export", "onnx", str(runs / "rope"), "--out", str(tmp_path / "out")]
    done = interrupted(words, tmp_path, number, lambda: list(tmp_path.glob(".out.building-*")))
    assert done.returncode == 128 + number, done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def write_exported(folder: Path, form: str) -> None:
    """Write an exported directory with a damaged model file and a config.json of one key."""
    counts = dict.fromkeys(("step", "sequence_length", "vocab_size", "parameters", "pad"), 64)
    hashes = dict.fromkeys(("weights_sha256", "tokenizer_sha256"), "0" * 64)
    files = {"config.json": '{"model_type": "modernbert"}', MODEL_FILES[form]: "torn"}  # type: ignore[index]
    files["tokenizer.json"] = Tokenizer(WordLevel({"a": 0}, "a")).to_str()
    write_files(folder, files)
    about = {"format": form, "kind": "mlm", "run": "x", **hashes, **counts}
    about["files"] = {name: sha256(folder / name) for name in files}
    write_files(folder, {"export.json": json.dumps(about)})


@pytest.mark.quick
def test_missing_packages_are_named(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_exported(tmp_path, "hf")
    for name in ("onnx", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)
    for command, package in (
        (("export", "onnx", str(runs / "rope"), "--out", str(tmp_path / "out")), "onnx"),
        (("export", "check", str(tmp_path)), "transformers"),
        (("predict", str(tmp_path), str(tmp_path / "export.json")), "transformers"),
    ):
        assert re.search(rf": needs {package}; pip install .*'{package}", refused(*command))


@pytest.mark.quick
def test_a_directory_with_a_missing_or_damaged_file_is_refused(tmp_path: Path) -> None:
    for number, (file, begin, message) in enumerate(
        (
            ("export.json", "torn", "export.json: "),
            ("export.json", '{"schema_version": 2, ', "schema_version: "),
            ("model.onnx", None, "has no model.onnx; export the run again"),
            ("tokenizer.json", None, "has no tokenizer.json; export the run again"),
            ("model.onnx", "T", "model.onnx is not the exported file (its SHA-256 differs)"),
        )
    ):
        folder = tmp_path / f"{number}"
        write_exported(folder, "onnx")
        about = (folder / file).read_text()
        (folder / file).unlink()
        if begin is not None:
            (folder / file).write_text(begin + about[1:])
        for verb in (("predict", str(folder), __file__), ("export", "check", str(folder))):
            errors = refused(*verb)
            assert message in errors
            assert errors.count("\n") == 1


def test_export_warns_of_an_untrained_run_and_refuses_a_damaged_one(runs: Path, tmp_path: Path) -> None:
    write_run(tmp_path / "new", RUNS["rms"], step=0)
    done = ended(here("export", "hf", str(tmp_path / "new"), "--out", str(tmp_path / "out")), 0)
    assert done.stderr.startswith("warning: RUN ")
    broken = shutil.copytree(runs / "rms", tmp_path / "broken")
    (broken / "checkpoints/step-00000003/model.safetensors").write_bytes(b"torn")
    assert "but the manifest lists" in refused("export", "hf", str(broken), "--out", str(tmp_path / "none"))
    assert not (tmp_path / "none").exists()
    assert str(tmp_path) not in "".join(p.read_text() for p in (tmp_path / "out").glob("*.*[nd]"))
    accepted("export", "check", str(tmp_path / "out"))  # finds the run next to the directory
    shutil.move(tmp_path / "new", tmp_path / "moved")
    for options in ((), ("--run", str(runs / "rope"))):
        assert refused("export", "check", str(tmp_path / "out"), *options).startswith("error: --run: ")


@needs_compiler
def test_aotinductor_reproduces_the_outputs_in_python_and_cpp(runs: Path, tmp_path: Path) -> None:
    """The C++ runner is the code of docs/export.md."""
    out = export("aoti", runs / "crammed", tmp_path / "out")
    assert_proven(check(out, runs / "crammed"), 1e-4)
    texts = [" ".join(WORDS[: n + 1]) for n in range(len(WORDS))]
    (tmp_path / "a.txt").write_text("\n".join(texts))
    expected, found = (
        predicted(place, tmp_path / "a.txt", tmp_path / f"{place.name}.jsonl")
        for place in (runs / "crammed", out)
    )
    assert [line["index"] for line in expected] == list(range(len(WORDS)))
    for ours, other in zip(expected, found, strict=True):
        assert other["index"] == ours["index"]
        assert other["encoding"] == pytest.approx(ours["encoding"], abs=1e-4)
    if shutil.which("cmake") is None:
        pytest.skip("cmake is not installed, so the runner cannot be built")
    text = (Path(__file__).parents[2] / "docs/export.md").read_text()
    for kind, name in (("cpp", "runner.cpp"), ("cmake", "CMakeLists.txt")):
        (code,) = re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL)
        (tmp_path / name).write_text(code)
    prefix = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    for command in (["cmake", "-S", ".", "-B", "build", prefix], ["cmake", "--build", "build"]):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    ids = [4, 17, 6, 23, 5]
    words = ["build/runner", "out/model.pt2", *map(str, ids)]
    output = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    model, _ = load(runs / "crammed")
    with torch.inference_mode():
        best = model(torch.tensor([ids]), torch.arange(len(ids))).max(-1)
    rows = [line.split() for line in output.splitlines()]
    assert [int(row[0]) for row in rows] == best.indices.tolist()
    assert [float(row[1]) for row in rows] == pytest.approx(best.values.tolist(), abs=1e-3)


def test_a_run_starts_from_an_export_as_from_the_run_itself(runs: Path, shards: Path, tmp_path: Path) -> None:
    """The losses are identical, and a setting that does not match the export is refused by name."""
    out = export("hf", runs / "rope", tmp_path / "out")
    shape = "schedule.steps=2 log.every_steps=1 batch.global_size=8 batch.micro_size=4"
    model = [f"model.{key}={json.dumps(value)}" for key, value in RUNS["rope"].model.model_dump().items()]
    settings = [*shape.split(), *model, f"data.path={shards}", "precision=fp32", "data.sequence_length=16"]

    def train(name: str, start: str, code: int = 0) -> str:
        place = ("--nproc", "1", "--run-dir", str(tmp_path / name))
        done = bert_dp("train", "quickstart", *settings, f"run.init_from={start}", *place, code=code)
        return done.stdout + done.stderr

    output = train("foreign", f"hf:{out}", code=2)
    assert f"data.tokenizer: the data uses a different tokenizer than {out}" in output
    (out / "tokenizer.json").unlink()
    train("exported", f"hf:{out}")
    init_from = read_json(tmp_path / "exported/summary.json")["init_from"]
    assert init_from["tensors"] == init_from["of"]
    train("own", str(runs / "rope"))
    assert logged(tmp_path / "own", "loss") == logged(tmp_path / "exported", "loss")
    assert logged(tmp_path / "own", "step") == [1, 2], "a start from weights counts from 1"
    errors = refused("train", "quickstart", *settings, f"run.init_from=hf:{out}", "model.norm_eps=1e-6")
    assert f"model.norm_eps: 1e-06, but {out} has 1e-05" in errors
