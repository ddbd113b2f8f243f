"""Call bert-dp from Python with real ranks, interrupt and kill the caller, and run the code of docs/python.md
and of the notebook at tiny size."""

import ast
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.nn.functional as F
import yaml

import bert_dp
from tests.e2e.cli import TINY, Done, assert_none_left, ended, open_to_others, step_reached, umask, wait_for
from tests.helpers import read_json, write_files

ROOT = Path(__file__).parents[2]
WORDS = "returns the of list a string object when if it is given with all items and values in order".split()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Return settings, without a budget, that shrink any run to seconds on a small text."""
    folder = tmp_path_factory.mktemp("text")
    words = random.Random(0)
    text = "\n\n".join(" ".join(words.choices(WORDS, k=60)) + f" number {i}" for i in range(400))
    (folder / "part.txt").write_text(text)
    settings = {key: yaml.safe_load(value) for key, _, value in (item.partition("=") for item in TINY)}
    settings |= {"model.vocab_size": 200, "data.sources": [str(folder / "part.txt")]}
    settings |= {"data.build": {"max_tokens_per_char": 0, "held_out_fraction": 0.1}}
    del settings["schedule.steps"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BERT_DP_CACHE", str(folder / "cache"))
        yield settings


def run_script(folder: Path) -> Done:
    words = [sys.executable, "script.py"]
    return ended(subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=300), 0)


def process_state() -> tuple[Any, ...]:
    """Return the state of this process that a call must not change."""
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)]
    return (handlers, os.sched_getaffinity(0), dict(os.environ), Path.cwd())


def test_a_run_trains_in_a_thread_and_its_model_is_loaded(
    tmp_path: Path, small: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run"
    with umask(0o002), ThreadPoolExecutor(1) as pool:
        before = process_state()
        run = pool.submit(
            bert_dp.train, "quickstart", nproc=2, settings={**small, "schedule.steps": 6}, run_dir=path
        ).result()
        assert process_state() == before
        (tmp_path / "mine").touch()
        assert (tmp_path / "mine").stat().st_mode & 0o777 == 0o664  # the umask of this process
    assert open_to_others(path) == []
    assert (run.summary.status, run.summary.world_size) == ("done", 2)
    assert [line["step"] for line in run.metrics] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in run.evals] == [6]
    assert run.checkpoint == path / "checkpoints/step-00000006"
    assert run.report is not None
    assert run == bert_dp.read_run(path)
    assert "Done after step 6" in capsys.readouterr().out
    assert "--set" in read_json(path / "environment.json")["command"]

    model, tokenizer = bert_dp.load(run)
    assert not model.training
    text = tokenizer.encode("returns the <mask> of the list", add_special_tokens=False)
    ids = torch.tensor([text.ids, text.ids])
    masked = (ids == tokenizer.token_to_id("<mask>")).flatten().nonzero().flatten()
    with torch.inference_mode():
        hidden, logits = model.model(ids), model(ids, masked)
    assert masked.tolist() == [2, 2 + len(text.ids)]
    assert hidden.shape == (2, len(text.ids), 32)
    assert logits.shape == (2, 200)
    same, _ = bert_dp.load(run.checkpoint)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), same.parameters(), strict=True))

    again = bert_dp.train(run_dir=path, nproc=1, settings={"schedule": {"steps": 8}})
    assert [line["step"] for line in again.metrics] == list(range(1, 9))
    assert run.metrics[-1]["step"] == 6, "a Run must not change"


OWN_LAUNCHER = """
import json, sys
import bert_dp
seen = []
def on_log(line):
    seen.append(line["step"])
    raise ValueError("raised by the caller")
small = json.load(open("small.json"))
(part,) = small.pop("data.sources")
shards = bert_dp.build_data(
    part, "shards", settings={"data.build": small.pop("data.build")}, quiet=True,
    vocab_size=200, sequence_length=16,
)
run = bert_dp.train(
    "quickstart", nproc=1, settings={**small, "data.path": shards, "schedule.steps": 3}, run_dir="a",
    on_log=on_log, quiet=True,
)
tuned = bert_dp.finetune(
    run, train="train.csv", dev="train.csv", nproc=1, quiet=True, run_dir="runs/tuned",
    settings={"schedule.steps": 2, "precision": "fp32", "batch": {"global_size": 4, "micro_size": 4}},
)
text = bert_dp.evaluate(run, part, quiet=True)
pairs = bert_dp.predict(run, [("the list", "a string"), ("all items", "in order")], quiet=True)
labels = bert_dp.predict(tuned, "text.txt", quiet=True)
exported = bert_dp.export(tuned, "exported", "onnx", quiet=True)
assert not {"launcher", "torch"} & set(sys.modules)
print(json.dumps({
    "seen": seen, "train": run.results["loss"], "steps": run.config.schedule.steps,
    "finetune": tuned.results["scores"],
    "evaluate": text.results["predicted"]["loss"], "pairs": [*map(sorted, pairs.results)],
    "labels": [each["label"] for each in labels.results], "export": exported.results["format"],
    "data": shards.results["train"]["sequences"], "rows": [row["run"] for row in bert_dp.runs()],
    "places": [each.directory.name for each in (shards, run, tuned, text, labels, exported)],
}))
"""


def test_every_function_works_next_to_a_users_launcher_module(tmp_path: Path, small: dict[str, Any]) -> None:
    write_files(
        tmp_path,
        {
            "launcher.py": "open('executed', 'w')",
            "small.json": json.dumps(small),
            "script.py": OWN_LAUNCHER,
            "text.txt": "returns the list\nall items in order\n" * 20,
            "train.csv": "text,label\n" + "the list,a\nin order,b\n" * 4,
        },
    )
    done = run_script(tmp_path)
    assert not (tmp_path / "executed").exists()
    results = json.loads(done.stdout)  # quiet: nothing else is printed
    assert results["seen"] == [1, 2, 3]
    assert done.stderr.count("ValueError: raised by the caller") == 1
    assert 0 < results["train"] < 10
    assert results["steps"] == 3
    assert 0 < results["evaluate"] < 10
    assert 0 <= results["finetune"]["dev/accuracy"] <= 1
    assert results["pairs"] == [["encoding", "index"]] * 2
    assert set(results["labels"]) <= {"a", "b"}
    assert (results["export"], results["rows"]) == ("onnx", ["tuned"])
    assert results["data"] > 100
    assert results["places"] == ["shards", "a", "tuned", "a", "tuned", "exported"]


def test_twenty_steps_match_plain_torch(tmp_path: Path, small: dict[str, Any]) -> None:
    """Recompute loss, clipping, schedule and AdamW in fp64 as docs/definitions.md defines them, from the
    weights at step 0 and `bert_dp.batches`, without the training loop, the engine and the optimizer."""
    settings = {key: value for key, value in small.items() if not key.startswith("batch.")} | {
        "schedule": {"steps": 20, "name": "linear", "warmup_fraction": 0.1},
        "batch": {"global_size": 16, "micro_size": 2, "ramp_fraction": 0.6, "ramp_quantum": 4},
        "optim": {"lr": 2e-2, "clip": 0.5, "weight_decay": 0.1, "eps": 1e-8},
        "precision": "fp64",
    }
    run = bert_dp.train("quickstart", nproc=2, settings=settings, run_dir=tmp_path / "run")
    assert len({line["global_batch"] for line in run.metrics}) == 4
    assert max(line["grad_norm"] for line in run.metrics) > 1.0  # so that gradients are clipped

    model, _ = bert_dp.load(run.directory / "checkpoints/step-00000000")
    first, second = ({name: torch.zeros_like(p) for name, p in model.named_parameters()} for _ in range(2))
    for line in run.metrics:
        step = line["step"]
        f = (step - 1) / 20
        lr = 2e-2 * (f / 0.1 if f < 0.1 else 1 - (f - 0.1) / 0.9)
        model.zero_grad()
        drawn = list(bert_dp.batches(run, step))
        targets = sum(len(batch.labels_P) for batch in drawn)
        losses = [
            F.cross_entropy(model(batch.ids_BS, batch.positions_P), batch.labels_P, reduction="sum") / targets
            for batch in drawn
        ]
        loss = torch.stack(losses).sum()
        loss.backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        norm = torch.cat([g.flatten() for g in grads.values()]).norm()
        assert line["loss"] == pytest.approx(loss.item(), abs=1e-9)
        assert line["grad_norm"] == pytest.approx(norm.item(), rel=1e-9)
        assert line["lr"] == pytest.approx(lr, rel=1e-12)
        with torch.no_grad():
            for name, p in model.named_parameters():
                g = grads[name] / max(1.0, norm.item() / 0.5)
                first[name] = 0.9 * first[name] + 0.1 * g
                second[name] = 0.98 * second[name] + 0.02 * g * g
                root = (second[name] / (1 - 0.98**step)).sqrt() + 1e-8
                decay = 0.0 if "bias" in name or "norm" in name else 0.1
                p -= lr * (decay * p + first[name] / (1 - 0.9**step) / root)


SCRIPT = """
import signal, sys
import bert_dp
print("this script has begun", flush=True)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores SIGINT
handlers = [signal.getsignal(n) for n in range(1, 32)]
try:
    bert_dp.train({arguments})
except KeyboardInterrupt as error:
    assert [signal.getsignal(n) for n in range(1, 32)] == handlers
    print("interrupted:", error)
"""


@contextlib.contextmanager
def begin(folder: Path, settings: dict[str, Any]) -> Iterator[subprocess.Popen[str]]:
    """Start a script without a __main__ guard that trains endlessly, and kill it on exit."""
    endless = {**settings, "schedule.steps": 1_000_000, "compile": "off"}
    arguments = f"'quickstart', nproc=2, settings={endless!r}, run_dir={str(folder / 'run')!r}"
    (folder / "script.py").write_text(SCRIPT.format(arguments=arguments))
    process = subprocess.Popen(
        [sys.executable, str(folder / "script.py")], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        wait_for(lambda: step_reached(folder / "run", 3)() or process.poll() is not None)
        assert process.poll() is None, process.communicate()
        yield process
    finally:
        process.kill()


def test_an_interrupt_stops_the_run_after_a_checkpoint(tmp_path: Path, small: dict[str, Any]) -> None:
    with begin(tmp_path, small) as process:
        groups = {os.getpgid(child.pid) for child in psutil.Process(process.pid).children(recursive=True)}
        assert process.pid not in groups  # otherwise the verb would get the interrupt twice and end at once
        os.killpg(process.pid, signal.SIGINT)  # as a terminal and a notebook's server send it
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert output.count("this script has begun") == 1
    assert re.search(r"^SIGINT: stopping", output, re.MULTILINE)
    assert output.splitlines()[-1].startswith("interrupted: stopped; the same call with run_dir=")
    run = bert_dp.read_run(tmp_path / "run")
    assert (run.summary.status, run.summary.exit_code) == ("stopped", 130)
    assert run.checkpoint == tmp_path / f"run/checkpoints/step-{run.summary.step:08d}"
    assert run.summary.step >= 3
    assert_none_left(tmp_path / "run")


def test_a_killed_caller_leaves_no_process(tmp_path: Path, small: dict[str, Any]) -> None:
    with begin(tmp_path, small) as process:
        process.kill()
        process.communicate()
    assert_none_left(tmp_path / "run", seconds=30)


SHRUNK = """
import bert_dp
whole = bert_dp.train
def shrunk(config=None, *, settings, nproc="auto", **options):
    given = settings if config is None else {{**{small!r}, **settings}}
    return whole(config, nproc=1, settings=given, **options)
bert_dp.train = shrunk
"""  # runs before the code of the documentation


def test_the_python_code_of_the_documentation_runs(tmp_path: Path, small: dict[str, Any]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/python.md").read_text(), re.DOTALL)
    assert len(blocks) == 7
    shutil.copy(small["data.sources"][0], tmp_path / "text.txt")
    (tmp_path / "script.py").write_text("\n".join([SHRUNK.format(small=small), *blocks]))
    done = run_script(tmp_path)
    assert re.search(r"^schedule\.stepz: .*schedule\.steps\b", done.stdout, re.MULTILINE)  # as on the page
    run = bert_dp.read_run(tmp_path / "runs/python")
    assert run.metrics[-1]["step"] == 40  # the run was resumed
    *_, words = (line for line in done.stdout.splitlines() if line.startswith("["))
    assert len(ast.literal_eval(words)) == 5  # candidates for the mask
    assert done.stdout.splitlines()[-4:] == ["torch.Size([2, 16]) torch.Size([8])"] * 4  # 8 sequences


def test_the_notebook_runs(tmp_path: Path, small: dict[str, Any]) -> None:
    import nbclient
    import nbformat

    notebook = nbformat.read(ROOT / "docs/first-run.ipynb", as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "the notebook must contain no outputs"
    notebook.cells.insert(0, nbformat.v4.new_code_cell(SHRUNK.format(small=small)))
    client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    lines = "".join(output.get("text", "") for output in outputs)
    assert "step 1 |" in lines
    assert "Done after step" in lines
    assert "\x1b" not in lines  # no progress bar without a terminal
    assert len(ast.literal_eval(outputs[-1]["data"]["text/plain"])) == 5
    assert bert_dp.read_run(tmp_path / "runs/notebook").report is not None
