"""Test configurations: precedence, strict parsing, files, and refusals of invalid settings."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from bert_dp.config import MAX_VOCAB_SIZE, dump_config, load_config, no_effect, num_masked, resolve
from bert_dp.config.batch import batch_at, batch_layout, progress_at
from bert_dp.config.load import SYNONYMS, ConfigLoader, micro_is_auto, parse_overrides, setting_paths
from launcher.job import absolute
from launcher.run.train import expected_steps
from tests.helpers import BASE, CONFIGS, OF_ANY_MODEL, issues_of, make_config, raised_issues

LEAST = "data: {sources: [builtin]}\nschedule: {steps: 1}\n"


def kinds_of(function: Callable[..., Any], *arguments: Any) -> list[tuple[str, str]]:
    """Return the setting and kind of each issue that the call raises."""
    return [(issue.setting, issue.kind) for issue in raised_issues(function, *arguments)]


def write(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text)
    return path


# --- precedence


def test_defaults_then_yaml_then_set(tmp_path: Path) -> None:
    path = write(tmp_path, f"{LEAST}optim: {{lr: 2e-3, beta1: 0.5}}\n")
    config = load_config(path, ["optim.lr=3e-3", "run.seed=1", "run.seed=7"])
    assert config.optim.lr == 3e-3  # a.b=value over YAML
    assert config.optim.beta1 == 0.5  # YAML over default
    assert config.optim.beta2 == 0.98  # default
    assert config.run.seed == 7  # the last of two wins


@pytest.mark.parametrize(
    ("low", "high", "kept"),
    [
        ("schedule: {name: cosine, steps: 10}", "schedule.tokens=4096", {"name": "cosine", "tokens": 4096}),
        ("schedule: {tokens: 4096}", "schedule.hours=0.5", {"hours": 0.5}),
        ("schedule: {hours: 2}", "schedule.steps=3", {"steps": 3}),
        ("data: {path: /a, shuffle: false}", "data.sources=[x]", {"shuffle": False, "sources": ("x",)}),
        ("data: {sources: [x]}", "data.path=/b", {"path": "/b"}),
    ],
)
def test_an_overriding_budget_or_data_source_replaces_only_its_alternative(
    tmp_path: Path, low: str, high: str, kept: dict[str, Any]
) -> None:
    path = write(tmp_path, yaml.safe_dump({**BASE, **yaml.safe_load(low)}))
    section = getattr(load_config(path, [high]), low.partition(":")[0])
    assert section.model_dump(exclude_defaults=True) == kept


def test_exactly_one_budget_and_one_data_source_are_required(tmp_path: Path) -> None:
    """`schedule.steps=null` removes the budget and does not select another one."""
    path = write(tmp_path, "data: {sources: [builtin], path: /a}\nschedule: {steps: 1, hours: 2}\n")
    assert kinds_of(load_config, path) == [("schedule", "conflict"), ("data", "conflict")]
    assert kinds_of(make_config, "schedule.steps=10", "schedule.tokens=4096") == [("schedule", "conflict")]
    assert kinds_of(load_config, None, ["data.sources=[builtin]"]) == [("schedule", "conflict")]
    least = write(tmp_path, LEAST)
    assert kinds_of(load_config, least, ["schedule.steps=null"]) == [("schedule", "conflict")]
    (line,) = issues_of(load_config, None, ["schedule.steps=1"])
    assert "set exactly one of data.path, data.sources" in line


# --- reading values


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("optim.lr=1e-3", 1e-3),
        ("optim.lr=1E5", 1e5),
        ("optim.lr=0.001", 0.001),
        ("optim.lr=1.5e+2", 150.0),
        ("optim.lr=.5e-1", 0.05),
        ("optim.clip=1", 1.0),  # an integer where a float is expected
        ("batch.global_size=1e2", 100),  # scientific notation where a count is expected
        ("log.to=wandb", ("wandb",)),  # a single value where a list is expected
        ("compile=on", "on"),  # words that YAML 1.1 reads as booleans
        ("compile=off", "off"),
        ("compile=auto", "auto"),
        (f"model.vocab_size={MAX_VOCAB_SIZE}", 65_535),
    ],
)
def test_a_value_is_parsed_alike_from_a_file_and_from_set(tmp_path: Path, setting: str, value: Any) -> None:
    path, _, text = setting.rpartition("=")
    section, _, name = path.rpartition(".")
    file = write(tmp_path, LEAST + (f"{section}: {{{name}: {text}}}\n" if section else f"{name}: {text}\n"))
    for config in (make_config(setting), load_config(file)):
        part = getattr(config, section) if section else config
        assert getattr(part, name) == value
        assert type(getattr(part, name)) is type(value)


@pytest.mark.parametrize("text", ["1e", "e5", "1e5x", "abc1e3", "010", "1:30", "yes", "off", "2020-01-01"])
def test_text_that_only_resembles_a_number_stays_text(text: str) -> None:
    assert parse_overrides([f"a={text}"]) == {"a": text}


@pytest.mark.parametrize("tag", ["python/object/apply:os.system", "python/object/new:subprocess.Popen"])
def test_python_tags_are_refused_and_not_executed(tmp_path: Path, tag: str) -> None:
    text = f"!!{tag} ['touch {tmp_path}/canary']"
    assert kinds_of(load_config, file := write(tmp_path, f"data: {text}\n")) == [(str(file), "damaged")]
    assert kinds_of(make_config, f"run.seed={text}") == [(f"run.seed={text}", "wrong_type")]
    assert not (tmp_path / "canary").exists()


# --- refusals


WRONG_VALUES = {
    "schedule.steps": ["true", "1.5", "'10'", "0", "[1]", "{a: 1}"],
    "optim.lr": ["abc", "true", ".nan", ".inf", "0", "null", "2020-01-01", "automatic"],
    "optim": ["3"],
    "optim.name": ["sgd"],
    "data.shuffle": ["1"],
    "data.sources": ["7"],
    "run.seed": ["9223372036854775808", "-1"],
    "precision": ["float32"],
    "objective.mask_rate": ["1"],
}


@pytest.mark.parametrize("path", WRONG_VALUES)
def test_a_wrong_value_is_refused_with_its_path(path: str) -> None:
    for value in WRONG_VALUES[path]:
        (line,) = issues_of(make_config, f"{path}={value}")
        assert line.startswith(f"{path}: ")


def test_a_dotted_yaml_key_names_a_nested_setting(tmp_path: Path) -> None:
    text = "optim.lr: 0.25\noptim: {clip: 0.5}\ndata.build.dedup: none\ndata: {sources: [builtin]}\n"
    config = load_config(file := write(tmp_path, text), ["schedule.steps=1"])
    assert (config.optim.lr, config.optim.clip, config.data.build.dedup) == (0.25, 0.5, "none")
    file.write_text("schedule.tokens: 1000\n")
    assert load_config(file, ["schedule.steps=1", "data.sources=[builtin]"]).schedule.tokens is None
    file.write_text("optim.lr: 0.25\noptim: {lr: 0.5}\nprecision: fp32\nprecision.x: 1\noptim.lrr.x: 1\n")
    assert kinds_of(load_config, file) == [
        (f"{file}: {key}", "conflict") for key in ("optim.lr", "precision.x")
    ]


def test_every_synonym_maps_to_a_setting() -> None:
    settings = list(setting_paths())
    assert {name for names in SYNONYMS.values() for name in names} <= set(settings)
    assert not set(SYNONYMS) & {name.rpartition(".")[2] for name in settings}


UNKNOWN = {
    "optim.learning_rate=1": "optim.lr",
    "learning_rate=1": "optim.lr",
    "batch.batch_size=8": "batch.global_size or batch.micro_size",
    "train={batch_size: 8, lr: 1}": "batch.global_size or batch.micro_size or optim.lr",
    "schedule.warmup=2": "schedule.warmup_fraction",
    "schedule.stepz=2": "schedule.steps",
    "log.every=2": "log.every_steps",
    "batch.global_sizes=8": "batch.global_size",
    "optm.lr=1": "optim.lr",
    "data.build.dedupe=none": "data.build.dedup",
    "optim.seed=1": "run.seed",
    "precision=float16": "fp16",
    "parallel.engine=dpd": "ddp",
}


@pytest.mark.parametrize("given", UNKNOWN)
def test_an_unknown_setting_or_value_is_refused_with_the_nearest_one(given: str) -> None:
    (issue,) = raised_issues(make_config, given)
    assert (issue.kind, issue.hint) == ("unknown", f"did you mean {UNKNOWN[given]}?")


REFUSED = [
    # settings, then setting and kind of the only issue
    ("data.sources=[1]", "data.sources.0", "wrong_type"),
    ("data.sources=[]", "", "conflict"),
    ("objective.mask_rate=0.01 data.sequence_length=16", "", "conflict"),
    ("model.vocab_size=65536", "model.vocab_size", "out_of_range"),
    ("model.hidden_size=9 model.num_heads=3", "model", "conflict"),
    ("model.hidden_size=9 model.num_heads=3 model.position=rope", "model", "conflict"),
    ("schedule.name=wsd schedule.warmup_fraction=0.5 schedule.decay_fraction=0.6", "schedule", "conflict"),
    ("batch.ramp_fraction=0.5", "batch", "conflict"),
    ("batch.ramp_fraction=0.5 batch.ramp_quantum=3000", "batch", "conflict"),
    ("run.hang_after_s=0s", "run.hang_after_s", "out_of_range"),
    ("schedule.hours=3w", "schedule.hours", "conflict"),
    ("optim.lr", "optim.lr", "wrong_type"),
    ("=3", "=3", "wrong_type"),
    ("a..b=1", "a", "unknown"),
    (".lr=1", "", "unknown"),
    ("optim.lr.x=1", "optim.lr", "conflict"),
    ("optim=3 optim.lr=1e-3", "optim.lr=1e-3", "wrong_type"),  # the second cannot apply to the first
]


@pytest.mark.parametrize(("settings", "setting", "kind"), REFUSED)
def test_a_refusal_names_its_setting(settings: str, setting: str, kind: str) -> None:
    assert kinds_of(make_config, *settings.split()) == [(setting, kind)]


def test_a_time_is_a_duration_or_a_number_in_the_unit_of_its_setting() -> None:
    times = "schedule.hours=1.5d checkpoint.every_minutes=90s run.hang_after_s=2m run.end_hung_after_s=7"
    config = make_config(*times.split())
    assert (config.schedule.hours, config.checkpoint.every_minutes) == (36.0, 1.5)
    assert (config.run.hang_after_s, config.run.end_hung_after_s) == (120.0, 7.0)


def test_all_problems_are_reported_at_once() -> None:
    wrong = ("optim.lr=abc", "model.num_layers=0", "nonsense.key=1", "run.device=gpu")
    settings = sorted(setting for setting, _ in kinds_of(make_config, *wrong))
    assert settings == ["model.num_layers", "nonsense", "optim.lr", "run.device"]


def test_the_number_of_masked_positions_rounds_halves_up() -> None:
    assert [num_masked(*sizes) for sizes in ((0.25, 128), (0.15, 128), (0.5, 9))] == [32, 19, 5]


# --- the file itself


GROWING = "x0: &x0 [1]\n" + "".join(f"x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 9)}]\n" for i in range(1, 12))


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xfe\x00\x01\x80",
        b"",
        b"- 1\n- 2\n",
        b"a: 1\n---\nb: 2\n",
        b"x" * 1_000_001,
        b"run: {seed: 1}\nrun: {seed: 2}\n",
        GROWING.encode(),
        b"a: &a [*a]\n",
        b"a: " + b"[" * 5000 + b"]" * 5000,
        b"? [a, b]\n: 1\n",
        b"null: 1\n",
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_file_that_is_not_a_configuration_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    assert kinds_of(load_config, path) == [(str(path), "not_found" if len(content) > 10**6 else "damaged")]
    for missing in (tmp_path / "none.yaml", tmp_path):
        assert kinds_of(load_config, missing) == [(str(missing), "not_found")]


@given(st.binary() | st.text("{}[]:,-?&*!|>'\"%@` \n#ab01.", max_size=40).map(str.encode))
def test_any_bytes_give_a_configuration_or_one_line_for_each_error(content: bytes) -> None:
    with tempfile.NamedTemporaryFile(suffix=".yaml") as file:
        file.write(content)
        file.flush()
        for line in issues_of(load_config, file.name):  # every file is refused because none has a budget
            assert "\n" not in line


# --- round trip, hash, names


@given(
    lr=st.floats(1e-12, 1e3),
    eps=st.floats(1e-30, 1.0),
    seed=st.integers(0, 2**63 - 1),
    path=st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), min_size=1, max_size=20),
)
def test_round_trip_is_exact_for_any_value(lr: float, eps: float, seed: int, path: str) -> None:
    config = make_config(data={"path": path}, optim={"lr": lr, "eps": eps}, run={"seed": seed})
    assert resolve([yaml.load(dump_config(config), Loader=ConfigLoader)]) == config


def test_every_shipped_configuration_loads() -> None:
    shipped = sorted(CONFIGS.glob("**/*.yaml"))
    assert shipped
    for path in shipped:
        own = ["data.path=examples", "finetune.labels=[a, b]"] if path.stem in OF_ANY_MODEL else []
        own += ["run.init_from=null"] if path.stem == "continued" else []  # the user provides its weights
        own += ["batch.micro_size=1"] if micro_is_auto(path) else []
        config = load_config(path, own)
        assert no_effect(config) == [], path
        batch_layout(config, 1 if config.parallel.engine == "single" else 2)


def test_the_hash_depends_on_every_setting_but_not_on_the_source_of_a_value(tmp_path: Path) -> None:
    """An output directory stores the hash, and only a configuration with an equal hash may continue there."""
    plain = make_config("precision=auto")
    assert plain.hash() == make_config("precision=auto").hash()
    path = write(tmp_path, "schedule: {steps: 10}\ndata: {sources: [builtin]}\noptim: {lr: 0.001}\n")
    assert load_config(path).hash() == make_config("precision=auto", "optim.lr=1e-3").hash() == plain.hash()
    assert plain.hash() != make_config("precision=fp32").hash()
    changes = ["run.seed=1", "optim.lr=2e-3", "log.every_steps=3", "data.build.dedup=none", "compile='off'"]
    changes += ["run.init_keeps=moments", "schedule.epochs=2", "data.build.text_field=body"]
    changes += ["data.build.documents=blank_line"]
    assert len({make_config().hash(), *(make_config(change).hash() for change in changes)}) == 10


# --- use by the launcher


@given(
    tokens=st.integers(1, 60_000),
    length=st.sampled_from([8, 13, 128]),
    quanta=st.integers(1, 12),
    quantum=st.integers(1, 9),
    fraction=st.sampled_from([0.0, 0.05, 0.3, 0.77, 1.0]),
)
def test_the_launcher_predicts_the_steps_that_ranks_take_for_a_token_budget(
    tokens: int, length: int, quanta: int, quantum: int, fraction: float
) -> None:
    batch = {"global_size": quanta * quantum, "ramp_quantum": quantum, "ramp_fraction": fraction}
    config = make_config(f"schedule.tokens={tokens}", data={"sequence_length": length}, batch=batch)
    steps = samples = 0
    while (progress := progress_at(config, steps, samples, 0.0)) < 1.0:
        samples += batch_at(config.batch, progress)
        steps += 1
    assert expected_steps(config) == steps


def test_every_path_of_a_run_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/data/me")
    given = "data.sources=[texts/*.txt, builtin, 'hub:a/b']"
    config = absolute(make_config(given, "data.tokenizer=~/tokenizer.json", "run.init_from=runs/first"))
    assert config.data.sources == (f"{tmp_path}/texts/*.txt", "builtin", "hub:a/b")
    assert config.data.tokenizer == "/data/me/tokenizer.json"
    assert config.run.init_from == f"{tmp_path}/runs/first"
    assert absolute(make_config("data.path=shards")).data.path == f"{tmp_path}/shards"
