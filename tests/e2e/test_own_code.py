"""Run the user's own code of docs/own-code.md on 1 and 2 ranks. The code is refused without --allow-code,
and verbs that only read a run never execute it."""

import re
from pathlib import Path

import pytest

import bert_dp as api
from bert_dp.config import ConfigError
from tests.e2e.cli import TINY, accepted, bert_dp, refused
from tests.helpers import logged, read_json

ROOT = Path(__file__).parents[2]
NAMES = ("lion.py", "next_byte.py")
MORE = ("schedule.steps=4", "schedule.name=constant", "optim.lr=1e-3", "precision=fp64", "eval.every_steps=2")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write both examples and a text to a folder, and train each example on one and on two ranks."""
    folder = tmp_path_factory.mktemp("own")
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/own-code.md").read_text(), re.DOTALL)
    for name, block in zip(NAMES, blocks, strict=True):
        (folder / name).write_text(block)
    lines = [f"the crew of ship {i} sailed past {i * i} grey islands and {i % 7} reefs\n" for i in range(300)]
    (folder / "text.txt").write_text("".join(lines))
    settings = {"data.build": {"max_tokens_per_char": 0, "held_out_fraction": 0.1}}
    options = {"vocab_size": 100, "sequence_length": 16, "settings": settings, "quiet": True}
    shards = api.build_data(folder / "text.txt", folder / "shards", **options)
    assert shards.results["vocab_size"] == 100
    for nproc in (1, 2):
        for run in ("lion", "byte"):
            place = ("--nproc", str(nproc), "--run-dir", f"{run}-{nproc}", "--allow-code")
            bert_dp(*words(run), *place, cwd=folder)
    return folder


def words(run: str) -> list[str]:
    own = {
        "lion": ["optim.name=lion.py:make", "data.path=shards", "model.vocab_size=100"],
        "byte": ["task=next_byte.py:Task", "data.path=text.txt"],
    }
    return ["train", "quickstart", *TINY, *MORE, *own[run]]


@pytest.mark.parametrize("run", ["lion", "byte"])
def test_two_ranks_train_the_model_of_one(place: Path, run: str) -> None:
    one, two = (api.read_run(place / f"{run}-{n}") for n in (1, 2))
    for name in ("loss", "grad_norm"):
        assert logged(one.directory, name) == pytest.approx(logged(two.directory, name), rel=1e-9)
    assert [line["loss"] for line in one.evals] == pytest.approx(
        [line["loss"] for line in two.evals], rel=1e-9
    )
    assert max(logged(one.directory, "grad_norm")) > 0.5  # gradients are clipped
    assert one.summary.mfu is None


@pytest.mark.parametrize(("run", "setting"), [("lion", "optim.name"), ("byte", "task")])
def test_own_code_runs_only_if_allowed_and_unchanged(
    place: Path, tmp_path: Path, run: str, setting: str
) -> None:
    """An argument, a YAML file or a run directory names the code; the run records its hash."""
    new = ("--run-dir", str(tmp_path / "new"))
    wanted = f"{setting}: "
    assert refused(*words(run), *new, cwd=place).startswith(f"error: {wanted}")
    (tmp_path / "own.yaml").write_text((place / f"{run}-1/config.yaml").read_text())
    for arguments in (
        ("train", str(tmp_path / "own.yaml"), *new),
        ("train", "--run-dir", str(place / f"{run}-1")),
    ):
        assert "--allow-code" in refused(*arguments)
    assert "--allow-code" in refused("scale", str(tmp_path / "own.yaml"), "--nproc", "1", "--dry-run")
    assert not (tmp_path / "new").exists()
    (hashed,) = read_json(place / f"{run}-1/environment.json")["worker"]["code"].items()
    assert hashed[0] == setting
    file = place / NAMES[run == "byte"]
    text = file.read_text()
    on = ("train", "--run-dir", str(place / f"{run}-2"), "schedule.steps=6", "--allow-code")
    try:
        file.write_text(f"{text}\nopen('executed', 'w')\n")
        assert hashed[1][:16] in refused(*on)
        file.write_text("def (")
        assert wanted in refused(*words(run), *new, "--allow-code", cwd=place)
        file.write_text("other = 1\n")
        assert "does not define" in refused(*words(run), *new, "--allow-code", cwd=place)
    finally:
        file.write_text(text)
    assert not (place / "executed").exists()
    bert_dp(*on, "--nproc", "2")
    assert api.read_run(place / f"{run}-2").summary.step == 6


def test_verbs_that_read_a_run_never_import_own_code(place: Path, tmp_path: Path) -> None:
    texts = {name: (place / name).read_text() for name in NAMES}
    (tmp_path / "lines.txt").write_text("the crew\n")
    try:
        for name in NAMES:
            (place / name).write_text("raise SystemExit('executed')\n")
        assert api.load(place / "lion-1")[0].training is False
        accepted("predict", str(place / "lion-1"), str(tmp_path / "lines.txt"))
        for run in ("lion-1", "byte-1"):
            accepted("report", str(place / run))
        with pytest.raises(ConfigError, match=r"^task: "):
            api.load(place / "byte-1")
        assert "task: " in refused("export", "hf", str(place / "byte-1"), "--out", str(tmp_path / "out"))
    finally:
        for name, text in texts.items():
            (place / name).write_text(text)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        ("optim.name=lion.py", "optim.name"),
        ("task=next_byte", "task"),
        ("task=next_byte.py:Task schedule.epochs=1", ""),
        ("optim.name=lion.py:make parallel.engine=zero1", "optim.name"),
        ("task=next_byte.py:Task parallel.tensor=2", "parallel.tensor"),
        ("task=nowhere.py:Task", "task"),
    ],
)
def test_invalid_settings_of_own_code_are_refused(tmp_path: Path, settings: str, setting: str) -> None:
    for name in NAMES:
        (tmp_path / name).write_text("def make(): ...\nclass Task: ...\n")
    errors = refused("train", *settings.split(), "--allow-code", "--nproc", "2", "--dry-run", cwd=tmp_path)
    assert errors.startswith(f"error: {setting}")


@pytest.mark.quick
def test_an_optimizer_whose_state_cannot_be_saved_is_refused() -> None:
    import torch

    from bert_dp.optim import check_steps

    class Counts(torch.optim.Optimizer):
        def step(self) -> None:
            for p in self.param_groups[0]["params"]:
                self.state[p]["step"] = 1

    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = Counts([parameter], {"lr": 1.0})
    check_steps(optimizer)
    optimizer.found_inf = torch.ones(())
    optimizer.grad_scale = torch.ones(())
    optimizer.step()  # skips the step
    assert not optimizer.state
    optimizer.found_inf = torch.zeros(())
    with pytest.raises(ConfigError, match=r"optim\.name"):
        optimizer.step()
