"""Tests of configurations by name, of base files, and of settings on the command line."""

import json
import re
from pathlib import Path

import pytest

from bert_dp.config.errors import install_command
from bert_dp.config.load import find_config, load_config, micro_is_auto, setting_paths, shipped_configs
from launcher.cli.options import split_words
from tests.e2e.cli import here
from tests.helpers import issues_of, raised_issues, write_files
from tests.report_fixture import make_run
from tests.settings_reference import settings_reference

ROOT = Path(__file__).parents[2]


def test_a_file_overrides_its_base_at_every_level(tmp_path: Path) -> None:
    files = {
        "low.yaml": "base: quickstart\nmodel: {num_layers: 3}\noptim: {lr: 0.5}\n",
        "top.yaml": "base: low.yaml\noptim: {lr: 0.25}\nschedule: {tokens: 1000}\n",
    }
    write_files(tmp_path, files)
    quickstart = load_config(shipped_configs() / "quickstart.yaml")
    config = load_config(tmp_path / "top.yaml", ["model.num_heads=1"])
    assert (config.optim.lr, config.model.num_layers, config.model.num_heads) == (0.25, 3, 1)
    assert config.model.hidden_size == quickstart.model.hidden_size
    assert (config.schedule.tokens, config.schedule.steps) == (1000, None)  # tokens replace the base's budget


def test_an_auto_micro_batch_may_be_set_at_any_level(tmp_path: Path) -> None:
    """A number at a higher level replaces `auto`."""
    files = {
        "low.yaml": "base: quickstart\nbatch: {micro_size: auto}\n",
        "top.yaml": "base: low.yaml\nbatch: {global_size: 8}\n",
        "number.yaml": "base: low.yaml\nbatch: {micro_size: 4}\n",
    }
    write_files(tmp_path, files)
    found = {name: micro_is_auto(tmp_path / name) for name in files}
    assert found == {"low.yaml": True, "top.yaml": True, "number.yaml": False}
    assert not micro_is_auto(tmp_path / "top.yaml", ["batch.micro_size=2"])
    assert micro_is_auto(tmp_path / "number.yaml", ["batch.micro_size=auto"])
    assert not micro_is_auto(find_config("quickstart"))
    (issue,) = raised_issues(load_config, tmp_path / "top.yaml")
    assert issue.setting == "batch.micro_size"


@pytest.mark.parametrize("base", ["b.yaml", "a.yaml", "[x]", "quickstrat"])
def test_an_invalid_base_is_refused(tmp_path: Path, base: str) -> None:
    write_files(tmp_path, {"a.yaml": f"base: {base}", "b.yaml": "base: a.yaml"})
    (issue,) = issues_of(load_config, tmp_path / "a.yaml")
    assert issue.startswith(str(tmp_path))
    assert "base: " in issue


def test_a_configuration_is_found_by_name_and_a_misspelt_name_gets_a_suggestion(tmp_path: Path) -> None:
    (tmp_path / "quickstart").mkdir()  # a directory of this name does not hide the configuration
    for name in ("quickstart", "configs/quickstart.yaml"):
        assert find_config(name, tmp_path) == shipped_configs() / "quickstart.yaml"
    (issue,) = raised_issues(find_config, "quickstrat")
    assert (issue.setting, issue.kind, issue.hint) == ("quickstrat", "not_found", "did you mean quickstart?")


def test_arguments_with_an_equals_sign_are_settings() -> None:
    assert split_words(["quickstart", "a.b=1", "c=d=e"], ["f=2"]) == ("quickstart", ["a.b=1", "c=d=e", "f=2"])
    assert split_words(["a.b=1"], None) == (None, ["a.b=1"])
    assert split_words(None, None) == (None, [])
    (issue,) = issues_of(split_words, ["one", "two"], None)
    assert issue.startswith("CONFIG: more than one configuration: one, two")


@pytest.mark.parametrize(
    "extra", ["accelerate", "deepspeed", "dedup", "mlflow", "tensorboard", "trackio", "wandb", "zstd"]
)
def test_install_commands_name_the_packages_of_an_extra(extra: str) -> None:
    package = {"dedup": "rensa", "mlflow": "mlflow-skinny", "zstd": "zstandard"}.get(extra, extra)
    assert re.fullmatch(rf"pip install '{package}>=[\d.]+'", install_command(extra))


def test_a_json_report_contains_the_numbers_and_writes_no_page(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    report = json.loads(here("report", str(run), "--json").stdout)
    tiles = {tile["label"]: tile["cells"][0]["text"] for tile in report["tiles"]}
    assert (report["verdicts"][0]["level"], tiles["held-out loss"]) == ("ok", "6.2500 nats ± 0.0392")
    assert not (run / "report.html").exists()


def test_the_settings_reference_matches_the_schema() -> None:
    """`python -m tests.settings_reference > docs/settings.md` regenerates the reference."""
    reference = settings_reference()
    assert (ROOT / "docs" / "settings.md").read_text() == reference
    assert set(re.findall(r"^\| `([\w.]+)` \|", reference, re.MULTILINE)) == set(setting_paths())
    assert "| `optim.lr` | number or `auto` | `0.001` | Peak learning rate." in reference


def test_a_path_that_is_not_a_run_is_refused_with_a_hint(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "first")
    for path, hint in (
        (tmp_path / "runs", "choose a run in it: first"),
        (run / "config.yaml", "(no config.yaml in it)"),
    ):
        done = here("report", str(path))
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert done.stderr.rstrip().endswith(hint)
