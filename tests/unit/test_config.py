"""Configuration: precedence, strictness, the batch equation, and what a user is told when it does not fit."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from bert_dp.config import (
    MAX_VOCAB_SIZE,
    BatchConfig,
    Config,
    ConfigError,
    batch_at,
    batch_layout,
    changed_settings,
    data_issues,
    dump_config,
    load_config,
    no_effect,
    num_masked,
    parse_overrides,
    progress_at,
    read_manifest,
    resolve,
    setting_paths,
)
from bert_dp.config.checks import parallel_issues
from launcher.job import absolute
from launcher.run.train import expected_steps
from tests.shards import write_shards

CONFIGS = Path(__file__).parents[2] / "configs"
BASE = ("data.sources=[builtin]", "schedule.steps=10")


def make(*overrides: str, base: tuple[str, ...] = BASE) -> Config:
    return load_config(None, [*base, *overrides])


def issues(*overrides: str, base: tuple[str, ...] = BASE) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        make(*overrides, base=base)
    return caught.value.issues


def write(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text)
    return path


# --- precedence


def test_defaults_then_yaml_then_set(tmp_path: Path) -> None:
    path = write(
        tmp_path, "data: {sources: [builtin]}\nschedule: {steps: 10}\noptim: {lr: 2e-3, beta1: 0.5}\n"
    )
    config = load_config(path, ["optim.lr=3e-3", "run.seed=7"])
    assert config.optim.lr == 3e-3  # --set over YAML
    assert config.optim.beta1 == 0.5  # YAML over default
    assert config.optim.beta2 == 0.98  # default
    assert config.run.seed == 7  # --set over default


def test_last_of_two_equal_overrides_wins() -> None:
    assert make("run.seed=1", "run.seed=2").run.seed == 2


def test_deeper_levels_merge_and_do_not_replace() -> None:
    config = resolve(
        [
            {"data": {"sources": ["builtin"], "build": {"dedup": "near"}}, "schedule": {"steps": 1}},
            {"data": {"build": {"near_threshold": 0.5}}},
        ]
    )
    assert (config.data.build.dedup, config.data.build.near_threshold) == ("near", 0.5)
    assert config.data.sources == ("builtin",)


def test_resolve_leaves_its_levels_as_they_were() -> None:
    levels: list[dict[str, Any]] = [
        {"data": {"sources": ["builtin"]}, "schedule": {"steps": 1, "name": "linear"}},
        {"schedule": {"tokens": 4096}, "data": {"path": "x"}},
    ]
    before = json.dumps(levels)
    resolve(levels)
    assert json.dumps(levels) == before


@pytest.mark.parametrize(
    ("low", "high", "kept"),
    [
        ("steps: 10", "schedule.tokens=4096", {"tokens": 4096}),
        ("tokens: 4096", "schedule.hours=0.5", {"hours": 0.5}),
        ("hours: 2", "schedule.steps=3", {"steps": 3}),
    ],
)
def test_higher_budget_displaces_lower(tmp_path: Path, low: str, high: str, kept: dict[str, Any]) -> None:
    path = write(tmp_path, f"data: {{sources: [builtin]}}\nschedule: {{{low}, name: cosine}}\n")
    schedule = load_config(path, [high]).schedule
    assert {k: v for k in ("steps", "tokens", "hours") if (v := getattr(schedule, k)) is not None} == kept
    assert schedule.name == "cosine"  # only the group's members are displaced


@pytest.mark.parametrize(
    ("low", "high", "path", "sources"),
    [
        ("path: /a", "data.sources=[builtin]", None, ("builtin",)),
        ("sources: [builtin]", "data.path=/b", "/b", None),
    ],
)
def test_higher_data_source_displaces_lower(
    tmp_path: Path, low: str, high: str, path: str | None, sources: tuple[str, ...] | None
) -> None:
    file = write(tmp_path, f"data: {{{low}, sequence_length: 64}}\nschedule: {{steps: 1}}\n")
    data = load_config(file, [high]).data
    assert (data.path, data.sources, data.sequence_length) == (path, sources, 64)


def test_two_of_a_group_at_one_level_are_an_error(tmp_path: Path) -> None:
    path = write(tmp_path, "data: {sources: [builtin], path: /a}\nschedule: {steps: 1, hours: 2}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert caught.value.issues == (
        "schedule: steps and hours are both set; keep one",
        "data: path and sources are both set; keep one",
    )
    assert "schedule: steps and tokens are both set; keep one" in issues(
        "schedule.tokens=4096", base=("data.sources=[builtin]", "schedule.steps=10")
    )


def test_null_at_a_higher_level_displaces_nothing_else(tmp_path: Path) -> None:
    """`schedule.steps=null` takes the budget away; it does not pick another."""
    path = write(tmp_path, "data: {sources: [builtin]}\nschedule: {steps: 1}\n")
    with pytest.raises(ConfigError, match=r"exactly one of steps, tokens, hours, epochs \(got none\)"):
        load_config(path, ["schedule.steps=null"])


def test_no_budget_and_no_data_are_named() -> None:
    with pytest.raises(ConfigError, match=r"schedule: set exactly one of steps, tokens, hours, epochs"):
        load_config(None, ["data.sources=[builtin]"])
    with pytest.raises(ConfigError, match=r"set exactly one of data\.path, data\.sources \(got none\)"):
        load_config(None, ["schedule.steps=1"])
    assert any("data.sources is empty" in line for line in issues("data.sources=[]"))


# --- reading values


@pytest.mark.parametrize(
    ("text", "value"), [("1e-3", 1e-3), ("1E5", 1e5), ("0.001", 0.001), ("1.5e+2", 150.0), (".5e-1", 0.05)]
)
def test_floats_of_yaml_1_2(tmp_path: Path, text: str, value: float) -> None:
    assert make(f"optim.lr={text}").optim.lr == value
    path = write(tmp_path, f"data: {{sources: [builtin]}}\nschedule: {{steps: 1}}\noptim: {{lr: {text}}}\n")
    assert load_config(path).optim.lr == value


def test_a_whole_number_is_a_float_where_one_is_asked() -> None:
    assert make("optim.clip=1").optim.clip == 1.0


@pytest.mark.parametrize("text", ["1e", "e5", "1e5x", "abc1e3"])
def test_what_only_looks_like_a_float_stays_a_string(text: str) -> None:
    assert parse_overrides([f"a={text}"]) == {"a": text}


def test_duplicate_keys_are_refused_at_every_depth(tmp_path: Path) -> None:
    for text in ("run: {seed: 1}\nrun: {seed: 2}\n", "run: {seed: 1, seed: 2}\n"):
        with pytest.raises(ConfigError, match="duplicate key"):
            load_config(write(tmp_path, text))
    with pytest.raises(ConfigError, match="duplicate key"):
        make("run={seed: 1, seed: 2}")


@pytest.mark.parametrize(
    "payload",
    [
        "!!python/object/apply:os.system ['touch {canary}']",
        "!!python/object/new:subprocess.Popen [['touch', '{canary}']]",
        "!!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path ['{canary}']]",
        "!!python/name:os.system",
        "!!python/module:os",
    ],
)
def test_python_tags_are_refused_and_nothing_runs(tmp_path: Path, payload: str) -> None:
    canary = tmp_path / "canary"
    text = payload.format(canary=canary)
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_config(write(tmp_path, f"data: {text}\n"))
    with pytest.raises(ConfigError, match="not a YAML value"):
        make(f"run.seed={text}")
    assert not canary.exists()


@pytest.mark.parametrize("value", ["on", "off", "auto"])
def test_compile_can_be_set_as_documented(tmp_path: Path, value: str) -> None:
    assert make(f"compile={value}").compile == value
    path = write(tmp_path, f"data: {{sources: [builtin]}}\nschedule: {{steps: 1}}\ncompile: {value}\n")
    assert load_config(path).compile == value


# --- refusals


@pytest.mark.parametrize(
    ("override", "path", "hint"),
    [
        ("optim.learning_rate=1", "optim.learning_rate", None),
        ("batch.global_sizes=8", "batch.global_sizes", "batch.global_size"),
        ("optm.lr=1", "optm", None),
        ("model.hiden_size=8", "model.hiden_size", "model.hidden_size"),
        ("data.build.dedupe=none", "data.build.dedupe", "data.build.dedup"),
        ("optim.seed=1", "optim.seed", "run.seed"),
        ("precison=fp32", "precison", "precision"),
    ],
)
def test_unknown_setting_is_named_in_full_with_a_suggestion(
    override: str, path: str, hint: str | None
) -> None:
    (line,) = issues(override)
    assert line.startswith(f"{path}: unknown setting")
    if hint is not None:
        assert line.endswith(f"did you mean {hint}?")


def test_all_problems_come_at_once() -> None:
    lines = issues("optim.lr=abc", "model.num_layers=0", "nonsense.key=1", "run.device=gpu")
    assert len(lines) == 4
    for path in ("optim.lr", "model.num_layers", "nonsense", "run.device"):
        assert sum(line.startswith(f"{path}: ") for line in lines) == 1


@pytest.mark.parametrize(
    ("override", "path"),
    [
        ("schedule.steps=true", "schedule.steps"),
        ("schedule.steps=1.5", "schedule.steps"),
        ("schedule.steps='10'", "schedule.steps"),
        ("schedule.steps=0", "schedule.steps"),
        ("schedule.steps=-3", "schedule.steps"),
        ("schedule.steps=[1]", "schedule.steps"),
        ("schedule.steps={a: 1}", "schedule.steps"),
        ("optim.lr=abc", "optim.lr"),
        ("optim.lr=true", "optim.lr"),
        ("optim.lr=.nan", "optim.lr"),
        ("optim.lr=.inf", "optim.lr"),
        ("optim.lr=-.inf", "optim.lr"),
        ("optim.lr=0", "optim.lr"),
        ("optim.lr=null", "optim.lr"),
        ("optim.lr=2020-01-01", "optim.lr"),
        ("optim=3", "optim"),
        ("data.shuffle=1", "data.shuffle"),
        ("data.sources=[1]", "data.sources.0"),
        ("run.seed=9223372036854775808", "run.seed"),
        ("run.seed=-1", "run.seed"),
        ("objective.mask_rate=1", "objective.mask_rate"),
        ("model.dropout=1", "model.dropout"),
        ("run.device=gpu", "run.device"),
        ("precision=float32", "precision"),
    ],
)
def test_wrong_values_are_refused_with_their_path(override: str, path: str) -> None:
    lines = issues(override)
    assert any(line.startswith(f"{path}: ") for line in lines), lines


def test_a_wrong_choice_suggests_the_right_one() -> None:
    (line,) = issues("precision=float16")
    assert "did you mean fp16?" in line
    (line,) = issues("parallel.engine=dpd")
    assert "did you mean ddp?" in line


@pytest.mark.parametrize("item", ["optim.lr", "=3", "", " =1"])
def test_override_without_a_key_or_a_value_sign(item: str) -> None:
    (line,) = issues(item)
    assert "expected a.b=value" in line


@pytest.mark.parametrize("item", ["a..b=1", ".lr=1", "optim.=1", "optim.lr.x=1"])
def test_override_with_a_broken_path_is_refused(item: str) -> None:
    assert issues(item)


def test_override_of_a_scalar_and_of_a_part_of_it_is_refused() -> None:
    """The second cannot apply once the first has made `optim` a number: never silently something else."""
    with pytest.raises(ConfigError):
        make("optim=3", "optim.lr=1e-3")


def test_override_below_a_scalar_does_not_land_beside_it() -> None:
    with pytest.raises(ConfigError):
        make("batch.global_size=8", "batch.global_size.micro_size=4")


def test_vocabulary_must_fit_uint16() -> None:
    assert MAX_VOCAB_SIZE == 65_535
    assert make(f"model.vocab_size={MAX_VOCAB_SIZE}").model.vocab_size == 65_535
    (line,) = issues("model.vocab_size=65536")
    assert line.startswith("model.vocab_size: ")
    assert "65535" in line


@given(hidden=st.integers(8, 2000), heads=st.integers(1, 64))
def test_heads_must_divide_and_the_named_ones_do(hidden: int, heads: int) -> None:
    overrides = [*BASE, "model.position=learned", f"model.hidden_size={hidden}", f"model.num_heads={heads}"]
    if hidden % heads == 0:
        assert load_config(None, overrides).model.num_heads == heads
        return
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    (line,) = caught.value.issues
    named = [int(n) for n in re.findall(r"\d+", line.partition("; use ")[2].partition("(got")[0])]
    assert named
    assert all(hidden % n == 0 for n in named)


def test_even_sizes_where_positions_need_them() -> None:
    assert any(
        "even head size" in line
        for line in issues("model.hidden_size=9", "model.num_heads=3", "model.position=rope")
    )
    assert any("even hidden_size" in line for line in issues("model.hidden_size=9", "model.num_heads=3"))


def test_mask_rate_must_mask_something() -> None:
    (line,) = issues("objective.mask_rate=0.01", "data.sequence_length=16")
    assert "masks no position" in line
    assert num_masked(0.25, 128) == 32
    assert num_masked(0.15, 128) == 19
    assert num_masked(0.5, 9) == 5  # halves up


def test_wsd_parts_must_fit_in_the_budget() -> None:
    (line,) = issues("schedule.name=wsd", "schedule.warmup_fraction=0.5", "schedule.decay_fraction=0.6")
    assert "above 1" in line
    assert make("schedule.name=wsd", "schedule.warmup_fraction=0.5", "schedule.decay_fraction=0.5")


# --- the file itself


def test_missing_file_and_directory(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read") as caught:
            load_config(path)
        assert caught.value.issues[0].startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe\x00\x01\x80", "not valid YAML"),
        (bytes(range(256)), "not valid YAML"),
        (b"a: [1, 2", "not valid YAML"),
        (b"\x00", "not valid YAML"),
        (b"", "expected a mapping of settings, got NoneType"),
        (b"- 1\n- 2\n", "expected a mapping of settings, got list"),
        (b"hello", "expected a mapping of settings, got str"),
        (b"a: 1\n---\nb: 2\n", "not valid YAML"),
        (b"x" * 1_000_001, "larger than 1000000 bytes"),
    ],
)
def test_file_that_is_no_configuration(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(path)
    assert len(caught.value.issues) == 1
    assert "\n" not in caught.value.issues[0]
    assert caught.value.issues[0].startswith(f"{path}: ")


@pytest.mark.parametrize("text", ["? [a, b]\n: 1\n", "? {a: 1}\n: 1\n", "1: 2\n", "null: 1\n", "true: 1\n"])
def test_keys_that_are_not_names_are_a_configuration_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError):
        load_config(write(tmp_path, text))


@pytest.mark.parametrize("text", ["a: &a [*a]\n", "run: &r {seed: *r}\n"])
def test_a_value_that_contains_itself_is_a_configuration_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError):
        load_config(write(tmp_path, text))


def test_deep_nesting_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        load_config(write(tmp_path, "a: " + "[" * 5000 + "]" * 5000))


def test_aliases_are_refused_because_they_can_grow_without_bound(tmp_path: Path) -> None:
    levels = "".join(f"x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 9)}]\n" for i in range(1, 12))
    with pytest.raises(ConfigError, match="aliases are not supported"):
        load_config(write(tmp_path, "x0: &x0 [1]\n" + levels))


# --- round trip, hash, names


SAMPLES = [
    (),
    (
        "data.path=/x",
        "schedule.hours=1.5",
        "optim.lr=1e-3",
        "batch.ramp_fraction=0.6",
        "batch.ramp_quantum=512",
    ),
    (
        "schedule.tokens=100000",
        "model.position=rope",
        "optim.eps=1e-12",
        "precision=fp64",
        "run.init_from=/w",
    ),
]


@pytest.mark.parametrize("overrides", SAMPLES)
def test_dump_and_load_give_the_same_configuration(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    levels = [{"data": {"sources": ["builtin"]}, "schedule": {"steps": 10}}, parse_overrides(overrides)]
    config = resolve(levels)
    path = write(tmp_path, dump_config(config))
    again = load_config(path)
    assert again == config
    assert again.hash() == config.hash()
    assert dump_config(again) == dump_config(config)


@given(
    lr=st.floats(1e-12, 1e3),
    eps=st.floats(1e-30, 1.0),
    seed=st.integers(0, 2**63 - 1),
    path=st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), min_size=1, max_size=20),
)
def test_round_trip_is_exact_for_any_value(lr: float, eps: float, seed: int, path: str) -> None:
    config = resolve(
        [
            {
                "data": {"path": path},
                "schedule": {"steps": 1},
                "optim": {"lr": lr, "eps": eps},
                "run": {"seed": seed},
            }
        ]
    )
    from bert_dp.config.load import ConfigLoader

    assert resolve([yaml.load(dump_config(config), Loader=ConfigLoader)]) == config


def test_every_shipped_configuration_loads() -> None:
    shipped = sorted(CONFIGS.glob("**/*.yaml"))
    assert shipped
    for path in shipped:
        config = load_config(path)
        assert no_effect(config) == [], path
        batch_layout(config, 1 if config.parallel.engine == "single" else 2)


def test_hash_is_stable_and_feels_every_setting() -> None:
    config = make()
    assert config.hash() == make().hash()
    assert re.fullmatch(r"[0-9a-f]{16}", config.hash())
    seen = {config.hash()}
    for change in (
        "run.seed=1",
        "optim.lr=2e-3",
        "log.every_steps=3",
        "data.build.dedup=none",
        "compile='off'",
    ):
        seen.add(make(change).hash())
    assert len(seen) == 6


def test_the_hash_of_an_older_version_stays() -> None:
    """Output directories hold it and go on only with the same."""
    assert make().hash() == "b1e5f365a8d0bf85"
    epochs = make(base=("data.sources=[builtin]", "schedule.epochs=2"))
    assert len({make().hash(), make("run.init_keeps=moments").hash(), epochs.hash()}) == 3


def test_hash_does_not_depend_on_how_a_value_came(tmp_path: Path) -> None:
    path = write(tmp_path, "schedule: {steps: 10}\ndata: {sources: [builtin]}\noptim: {lr: 0.001}\n")
    assert load_config(path).hash() == make("optim.lr=1e-3").hash() == make().hash()


# DESIGN section 4 without parallel.tensor and parallel.zero_stage, whose engines do not exist yet
PROMISED = {
    "run.seed",
    "run.device",
    "run.init_from",
    "data.path",
    "data.sources",
    "data.tokenizer",
    "data.sequence_length",
    "data.workers",
    "model.vocab_size",
    "model.hidden_size",
    "model.num_layers",
    "model.num_heads",
    "model.intermediate_size",
    "model.position",
    "model.mlp",
    "model.norm",
    "model.bias",
    "model.dropout",
    "objective.mask_rate",
    "batch.global_size",
    "batch.micro_size",
    "batch.ramp_fraction",
    "batch.ramp_quantum",
    "schedule.name",
    "schedule.steps",
    "schedule.tokens",
    "schedule.hours",
    "optim.name",
    "optim.lr",
    "optim.weight_decay",
    "optim.clip",
    "parallel.engine",
    "precision",
    "compile",
    "checkpoint.every_steps",
    "checkpoint.keep",
    "eval.every_steps",
    "log.every_steps",
}


def test_the_promised_settings_exist() -> None:
    paths = list(setting_paths())
    assert set(paths) >= PROMISED
    assert len(paths) == len(set(paths))


def test_setting_paths_name_exactly_what_a_dump_holds() -> None:
    def flat(tree: dict[str, Any], prefix: str = "") -> list[str]:
        return [
            p
            for k, v in tree.items()
            for p in (flat(v, f"{prefix}{k}.") if isinstance(v, dict) else [prefix + k])
        ]

    assert sorted(setting_paths()) == sorted(flat(yaml.safe_load(dump_config(make()))))


def test_configuration_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        make().optim.lr = 1.0  # type: ignore[misc]


# --- the batch equation


sizes = st.integers(1, 4096)


@given(global_size=sizes, micro=st.integers(1, 64), ranks=st.integers(1, 16))
def test_batch_layout_holds_or_names_batches_that_divide(global_size: int, micro: int, ranks: int) -> None:
    config = make(f"batch.global_size={global_size}", f"batch.micro_size={micro}")
    per_pass = micro * ranks
    if global_size % per_pass == 0:
        plan = batch_layout(config, ranks)
        assert plan.micro_size * plan.grad_accum_steps * plan.dp == plan.global_size == global_size
        assert plan.dp == plan.world_size == ranks
        assert (
            str(plan) == f"global batch {global_size} = micro {micro} x accumulation {plan.grad_accum_steps} "
            f"x dp {ranks}"
        )
        return
    with pytest.raises(ConfigError) as caught:
        batch_layout(config, ranks)
    (line,) = caught.value.issues
    assert line.startswith("batch.global_size: ")
    named = [int(n) for n in re.findall(r"\d+", line.partition("nearest that are: ")[2].partition("(")[0])]
    low = global_size // per_pass * per_pass
    assert named == [n for n in (low, low + per_pass) if n]
    for near in named:
        batch_layout(make(f"batch.global_size={near}", f"batch.micro_size={micro}"), ranks)


@given(
    accumulation=st.integers(1, 48),
    micro=st.integers(1, 8),
    ranks=st.integers(1, 6),
    quantum=st.integers(1, 400),
)
def test_ramp_quantum_must_be_whole_micro_batches(
    accumulation: int, micro: int, ranks: int, quantum: int
) -> None:
    global_size, per_pass = accumulation * micro * ranks, micro * ranks
    base = (f"batch.global_size={global_size}", f"batch.micro_size={micro}", "batch.ramp_fraction=0.5")
    if global_size % quantum:
        lines = issues(*base, f"batch.ramp_quantum={quantum}")
        named = [int(n) for n in re.findall(r"\d+", lines[0].partition("; use ")[2].partition("(got")[0])]
        assert named
        assert all(global_size % n == 0 for n in named)
        return
    config = make(*base, f"batch.ramp_quantum={quantum}")
    if quantum % per_pass == 0:
        assert batch_layout(config, ranks).grad_accum_steps == accumulation
        return
    with pytest.raises(ConfigError) as caught:
        batch_layout(config, ranks)
    (line,) = caught.value.issues
    assert line.startswith("batch.ramp_quantum: ")
    named = [int(n) for n in re.findall(r"\d+", line.partition("nearest that are: ")[2])]
    assert named
    for near in named:
        batch_layout(make(*base, f"batch.ramp_quantum={near}"), ranks)


def test_ramp_needs_a_quantum_that_divides() -> None:
    (line,) = issues("batch.ramp_fraction=0.5")
    assert "ramp_quantum must be too" in line
    (line,) = issues("batch.ramp_fraction=0.5", "batch.ramp_quantum=3000")
    assert line.startswith("batch: ")
    assert "ramp_quantum 3000 does not divide global_size 8192; use 2048 or 4096" in line


def test_single_engine_runs_one_rank() -> None:
    config = make("parallel.engine=single", "batch.micro_size=128")
    assert batch_layout(config, 1).grad_accum_steps == 64
    with pytest.raises(ConfigError, match="single runs one rank, got --nproc 2; use ddp"):
        batch_layout(config, 2)


def test_both_batch_problems_are_told_together() -> None:
    config = make("parallel.engine=single", "batch.global_size=10", "batch.micro_size=4")
    with pytest.raises(ConfigError) as caught:
        batch_layout(config, 2)
    assert [line.partition(":")[0] for line in caught.value.issues] == [
        "batch.global_size",
        "parallel.engine",
    ]


def ramp(quantum: int | None, fraction: float = 0.6) -> BatchConfig:
    return BatchConfig(global_size=8192, micro_size=128, ramp_fraction=fraction, ramp_quantum=quantum)


@pytest.mark.parametrize(("f", "size"), [(0.0, 512), (0.1, 1536), (0.3, 4608), (0.57, 8192), (1.0, 8192)])
def test_recipe_ramp_golden_values(f: float, size: int) -> None:
    assert batch_at(ramp(512), f) == size


def test_recipe_ramp_reaches_the_full_batch_at_its_last_quantum() -> None:
    full = next(i for i in range(10_001) if batch_at(ramp(512), i / 10_000) == 8192) / 10_000
    assert full == pytest.approx(0.6 * 7680 / 8192, abs=1e-4)  # 0.5625
    assert batch_at(ramp(512), 0.5624) == 7680


def test_coarse_quantum_gives_two_levels() -> None:
    assert {batch_at(ramp(4096), i / 1000) for i in range(1001)} == {4096, 8192}


def test_no_ramp_is_the_global_batch() -> None:
    assert {batch_at(ramp(None, 0.0), i / 10) for i in range(11)} == {8192}


@given(
    quantum=st.sampled_from([1, 2, 64, 512, 1024, 4096, 8192]),
    fraction=st.floats(0.01, 1.0),
    f=st.floats(0.0, 1.0),
    g=st.floats(0.0, 1.0),
)
def test_ramp_is_whole_quanta_within_bounds_and_never_falls(
    quantum: int, fraction: float, f: float, g: float
) -> None:
    config = ramp(quantum, fraction)
    low, high = sorted((f, g))
    first, second = batch_at(config, low), batch_at(config, high)
    assert first <= second
    for size in (first, second):
        assert size % quantum == 0
        assert quantum <= size <= 8192
    assert batch_at(config, 1.0) == 8192


# --- what is idle, what differs, what the data says


@pytest.mark.parametrize(
    ("overrides", "setting"),
    [
        (["batch.ramp_quantum=512"], "batch.ramp_quantum"),
        (["schedule.warmup_fraction=0.1"], "schedule.warmup_fraction"),
        (["schedule.name=constant", "schedule.warmup_fraction=0.1"], "schedule.warmup_fraction"),
        (["schedule.decay_fraction=0.1"], "schedule.decay_fraction"),
        (["schedule.name=cosine", "schedule.decay_fraction=0.1"], "schedule.decay_fraction"),
        (["model.rope_theta=1e4"], "model.rope_theta"),
        (["model.norm=rmsnorm", "model.norm_bias=false"], "model.norm_bias"),
        (["data.tokenizer=/t", "data.build.tokenizer_model=bpe"], "data.build.tokenizer_model"),
        (["data.build.order=unigram"], "data.build.order"),
        (["data.build.near_threshold=0.5"], "data.build.near_threshold"),
        (["parallel.engine=single", "parallel.bucket_mib=3"], "parallel.bucket_mib"),
    ],
)
def test_an_idle_setting_is_named(overrides: list[str], setting: str) -> None:
    (line,) = no_effect(make(*overrides))
    assert setting in line
    assert "no effect" in line


@pytest.mark.parametrize(
    ("override", "setting"),
    [
        ("data.tokenizer=/t", "data.tokenizer"),
        ("data.build.normalize=false", "data.build.normalize"),
        ("data.build.dedup=near", "data.build.dedup"),
        ("data.build.held_out_fraction=0.1", "data.build.held_out_fraction"),
    ],
)
def test_build_settings_are_idle_with_built_shards(override: str, setting: str) -> None:
    (line,) = no_effect(make(override, base=("data.path=/x", "schedule.steps=1")))
    assert line.startswith(f"{setting} has no effect with data.path")


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["batch.ramp_quantum=512", "batch.ramp_fraction=0.5"],
        ["schedule.name=wsd", "schedule.warmup_fraction=0.1", "schedule.decay_fraction=0.3"],
        ["model.position=rope", "model.rope_theta=1e4"],
        ["model.norm_bias=false"],
        ["data.build.order=unigram", "data.shuffle=false"],
        ["data.build.dedup=near", "data.build.near_threshold=0.5"],
        ["parallel.engine=ddp", "parallel.bucket_mib=3"],
    ],
)
def test_a_setting_with_an_effect_is_not_named(overrides: list[str]) -> None:
    assert no_effect(make(*overrides)) == []


def test_a_dumped_configuration_complains_of_nothing(tmp_path: Path) -> None:
    """config.yaml of a run sets everything explicitly; the defaults in it are not idle settings."""
    assert no_effect(load_config(write(tmp_path, dump_config(make())))) == []


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("optim.lr=2e-3", "optim.lr"),
        ("batch.global_size=4096", "batch.global_size"),
        ("run.seed=1", "run.seed"),
        ("data.sequence_length=64", "data.sequence_length"),
        ("data.shuffle=false", "data.shuffle"),
        ("model.num_layers=2", "model.num_layers"),
        ("schedule.name=linear", "schedule.name"),
        ("precision=bf16", "precision"),
    ],
)
def test_a_changed_setting_is_named_on_resume(override: str, key: str) -> None:
    (line,) = changed_settings(make().model_dump(mode="json"), make(override))
    assert line.startswith(f"{key}: the run has ")


@pytest.mark.parametrize(
    "override",
    [
        "schedule.steps=99",
        "parallel.engine=ddp",
        "log.every_steps=1",
        "checkpoint.keep=9",
        "eval.every_steps=5",
        "run.device=cpu",
        "data.workers=3",
        "compile='off'",
        "run.hang_after_s=5",
        "run.end_hung_after_s=0",
    ],
)
def test_budget_ranks_and_logging_may_change_on_resume(override: str) -> None:
    assert changed_settings(make().model_dump(mode="json"), make(override, base=BASE)) == []


def test_another_budget_unit_and_data_place_may_change_on_resume() -> None:
    after = make(base=("data.path=/x", "schedule.hours=1"))
    assert changed_settings(make().model_dump(mode="json"), after) == []


def test_a_setting_an_older_run_lacks_had_its_default() -> None:
    before = make().model_dump(mode="json")
    del before["optim"]["clip"]
    assert changed_settings(before, make()) == []
    (line,) = changed_settings(before, make("optim.clip=1.0"))
    assert line == "optim.clip: the run has 0.5, now 1.0"


def test_what_in_the_shards_does_not_fit(tmp_path: Path) -> None:
    config = make("data.sequence_length=64", "model.vocab_size=100")

    def found(length: int, vocab_size: int) -> list[str]:
        place = write_shards(tmp_path / f"{length}-{vocab_size}", length=length, vocab_size=vocab_size)
        return [line.partition(":")[0] for line in data_issues(config, read_manifest(place))]

    assert found(64, 100) == found(64, 99) == []
    assert found(128, 101) == ["data.sequence_length", "model.vocab_size"]


# --- what an engine cannot do


TENSOR = ("parallel.engine=ddp", "parallel.tensor=2")
REFUSED: dict[str, tuple[tuple[str, ...], int, str, tuple[tuple[str, ...], ...]]] = {
    # overrides, --nproc, the line, and what it tells to change, each by itself enough
    "single": (
        ("parallel.engine=single",),
        4,
        "parallel.engine: single runs one rank, got --nproc 4; use ddp",
        (("parallel.engine=ddp",),),
    ),
    "tensor with accelerate": (
        ("parallel.engine=accelerate", "parallel.tensor=2"),
        2,
        "parallel.tensor: 2 works with ddp, zero1 and fsdp, not with accelerate",
        (("parallel.engine=ddp",), ("parallel.engine=zero1",), ("parallel.engine=fsdp",)),
    ),
    "tensor with deepspeed": (
        ("parallel.engine=deepspeed", "parallel.tensor=4"),
        4,
        "parallel.tensor: 4 works with ddp, zero1 and fsdp, not with deepspeed",
        (("parallel.engine=ddp",), ("parallel.engine=zero1",), ("parallel.engine=fsdp",)),
    ),
    "tensor and ranks": (
        ("parallel.engine=ddp", "parallel.tensor=3", "model.vocab_size=32760"),
        4,
        "parallel.tensor: 3 does not divide --nproc 4; use 2 or 4",
        (("parallel.tensor=2",), ("parallel.tensor=4",)),
    ),
    "more tensor ranks than ranks": (
        TENSOR,
        1,
        "parallel.tensor: 2 does not divide --nproc 1; use 1",
        (("parallel.tensor=1",),),
    ),
    "heads": (
        ("parallel.tensor=8", "model.num_heads=12"),
        8,
        "model.num_heads: 12 is not a multiple of parallel.tensor 8; nearest that are: 8, 16",
        (("model.num_heads=8",), ("model.num_heads=16",)),
    ),
    "fewer heads than ranks": (
        (*TENSOR, "model.num_heads=1"),
        2,
        "model.num_heads: 1 is not a multiple of parallel.tensor 2; nearest that are: 2",
        (("model.num_heads=2",),),
    ),
    "intermediate": (
        (*TENSOR, "model.intermediate_size=1535"),
        2,
        "model.intermediate_size: 1535 is not a multiple of parallel.tensor 2; nearest that are: 1534, 1536",
        (("model.intermediate_size=1534",), ("model.intermediate_size=1536",)),
    ),
    "vocabulary": (
        ("parallel.engine=fsdp", "parallel.tensor=4", "model.vocab_size=30522"),
        8,
        "model.vocab_size: 30522 is not a multiple of parallel.tensor 4; nearest that are: 30520, 30524",
        (("model.vocab_size=30520",), ("model.vocab_size=30524",)),
    ),
    "replicas without fsdp": (
        ("parallel.engine=zero1", "parallel.fsdp_replicas=2"),
        4,
        "parallel.fsdp_replicas: 2 needs parallel.engine: fsdp",
        (("parallel.engine=fsdp",),),
    ),
    "replicas and ranks": (
        ("parallel.engine=fsdp", "parallel.fsdp_replicas=3"),
        4,
        "parallel.fsdp_replicas: 3 does not divide 4 replicas; use 2 or 4",
        (("parallel.fsdp_replicas=2",), ("parallel.fsdp_replicas=4",)),
    ),
    "replicas beside tensor": (
        ("parallel.engine=fsdp", "parallel.tensor=2", "parallel.fsdp_replicas=4"),
        4,
        "parallel.fsdp_replicas: 4 does not divide 2 replicas; use 1 or 2",
        (("parallel.fsdp_replicas=1",), ("parallel.fsdp_replicas=2",)),
    ),
    "muon with fsdp": (
        ("optim.name=muon", "parallel.engine=fsdp"),
        2,
        "optim.name: muon multiplies whole matrices and parallel.engine: fsdp divides them; use ddp or zero1",
        (("parallel.engine=ddp",), ("parallel.engine=zero1",)),
    ),
    "muon with deepspeed": (
        ("optim.name=muon", "parallel.engine=deepspeed"),
        2,
        "optim.name: muon multiplies whole matrices and parallel.engine: deepspeed divides them; use ddp or "
        "zero1",
        (("parallel.engine=ddp",), ("parallel.engine=zero1",)),
    ),
    "muon with tensor": (
        ("optim.name=muon", *TENSOR),
        2,
        "optim.name: muon multiplies whole matrices and parallel.tensor: 2 divides them; use "
        "parallel.tensor: 1",
        (("parallel.tensor=1",),),
    ),
    "lamb with zero": (
        ("optim.name=lamb", "parallel.engine=deepspeed"),
        2,
        "optim.name: lamb needs norms of whole tensors and DeepSpeed ZeRO flattens them; use "
        "parallel.engine: zero1, or parallel.zero_stage: 0",
        (("parallel.engine=zero1",), ("parallel.zero_stage=0",)),
    ),
    "deepspeed in fp64": (
        ("parallel.engine=deepspeed", "precision=fp64"),
        2,
        "precision: fp64 is not supported with parallel.engine: deepspeed; use fp32 or bf16",
        (("precision=fp32",), ("precision=bf16",)),
    ),
    "deepspeed in fp16": (
        ("parallel.engine=deepspeed", "precision=fp16"),
        1,
        "precision: fp16 is not supported with parallel.engine: deepspeed; use fp32 or bf16",
        (("precision=fp32",), ("precision=bf16",)),
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_an_engine_cannot_do_is_refused_with_what_helps(what: str) -> None:
    """Setting, value and fix in one line, nothing else; and what the line names does help."""
    overrides, ranks, line, fixes = REFUSED[what]
    config = make(*overrides)
    assert parallel_issues(config, ranks) == [line]
    with pytest.raises(ConfigError) as caught:
        batch_layout(config, ranks)
    assert line in caught.value.issues
    for fix in fixes:
        assert parallel_issues(make(*overrides, *fix), ranks) == [], fix


def test_everything_that_an_engine_cannot_do_is_told_at_once() -> None:
    config = make(
        "parallel.engine=deepspeed",
        "parallel.tensor=4",
        "model.num_heads=6",
        "model.intermediate_size=10",
        "model.vocab_size=30",
        "parallel.fsdp_replicas=2",
        "optim.name=muon",
        "precision=fp64",
    )
    settings = [line.partition(":")[0] for line in parallel_issues(config, 2)]
    assert settings == [
        "parallel.tensor",
        "parallel.tensor",
        "model.num_heads",
        "model.intermediate_size",
        "model.vocab_size",
        "parallel.fsdp_replicas",
        "optim.name",
        "precision",
    ]


@pytest.mark.parametrize(
    ("overrides", "ranks"),
    [
        ((), 3),
        (("parallel.engine=single", "precision=fp64", "optim.name=muon"), 1),
        (("optim.name=muon",), 4),
        (("optim.name=muon", "parallel.engine=zero1"), 4),
        (("optim.name=muon", "parallel.engine=accelerate"), 2),
        (("optim.name=lamb", *TENSOR), 4),
        (("optim.name=lamb", "parallel.engine=fsdp", "parallel.tensor=4", "parallel.fsdp_replicas=2"), 8),
        (("optim.name=lamb", "parallel.engine=deepspeed", "parallel.zero_stage=0", "precision=bf16"), 2),
        (("parallel.engine=deepspeed", "parallel.zero_stage=3", "precision=fp32"), 2),
        (("parallel.tensor=4",), 4),
    ],
)
def test_what_an_engine_can_do_is_not_refused(overrides: tuple[str, ...], ranks: int) -> None:
    assert parallel_issues(make(*overrides), ranks) == []


@pytest.mark.parametrize(("tensor", "dp", "accumulation"), [(1, 4, 16), (2, 2, 32), (4, 1, 64)])
def test_the_batch_counts_replicas_not_ranks(tensor: int, dp: int, accumulation: int) -> None:
    plan = batch_layout(make(f"parallel.tensor={tensor}"), 4)
    assert (plan.world_size, plan.tensor, plan.dp, plan.grad_accum_steps) == (4, tensor, dp, accumulation)
    assert str(plan) == f"global batch 8192 = micro 128 x accumulation {accumulation} x dp {dp}"


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ("parallel.engine=zero1", "parallel.zero_stage=2"),
            "parallel.zero_stage has no effect with parallel.engine: zero1",
        ),
        (
            ("parallel.engine=fsdp", "parallel.reduce_dtype=bf16"),
            "parallel.reduce_dtype has no effect with parallel.engine: fsdp",
        ),
        (
            ("parallel.engine=zero1", "parallel.static_graph=true"),
            "parallel.static_graph has no effect with parallel.engine: zero1",
        ),
        (("optim.name=lamb", "optim.momentum=0.9"), "optim.momentum has no effect with optim.name: lamb"),
    ],
)
def test_what_an_engine_or_optimizer_does_not_read_is_named(overrides: tuple[str, ...], line: str) -> None:
    assert no_effect(make(*overrides)) == [line]


@pytest.mark.parametrize(
    ("hidden", "heads", "tensor", "fits"), [(32, 2, 3, "3, with a model.hidden_size"), (36, 4, 3, "3, 6")]
)
def test_heads_named_for_tensor_parallelism_divide_the_hidden_size(
    hidden: int, heads: int, tensor: int, fits: str
) -> None:
    config = load_config(
        None,
        [
            "data.path=x",
            "schedule.steps=1",
            f"model.hidden_size={hidden}",
            f"model.num_heads={heads}",
            "model.intermediate_size=48",
            "model.vocab_size=96",
            f"parallel.tensor={tensor}",
        ],
    )
    with pytest.raises(ConfigError) as caught:
        batch_layout(config, tensor)
    (line,) = caught.value.issues
    assert line.partition("nearest that are: ")[2].startswith(fits)


@given(
    tokens=st.integers(1, 60_000),
    length=st.sampled_from([8, 13, 128]),
    quanta=st.integers(1, 12),
    quantum=st.integers(1, 9),
    fraction=st.sampled_from([0.0, 0.05, 0.3, 0.77, 1.0]),
)
def test_the_steps_of_a_budget_in_tokens_are_those_that_the_ranks_take(
    tokens: int, length: int, quanta: int, quantum: int, fraction: float
) -> None:
    config = make(
        "data.sources=[builtin]",
        f"schedule.tokens={tokens}",
        f"data.sequence_length={length}",
        f"batch.global_size={quanta * quantum}",
        f"batch.ramp_quantum={quantum}",
        f"batch.ramp_fraction={fraction}",
        base=(),
    )
    steps = samples = 0
    while (progress := progress_at(config, steps, samples, 0.0)) < 1.0:
        samples += batch_at(config.batch, progress)
        steps += 1
    assert expected_steps(config) == steps


def test_every_path_of_a_run_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/data/me")
    given = "data.sources=[texts/*.txt, builtin, 'hub:a/b']"
    config = absolute(make(given, "data.tokenizer=~/tokenizer.json", "run.init_from=runs/first"))
    assert config.data.sources == (f"{tmp_path}/texts/*.txt", "builtin", "hub:a/b")
    assert config.data.tokenizer == "/data/me/tokenizer.json"
    assert config.run.init_from == f"{tmp_path}/runs/first"
    built = make("data.path=shards", base=BASE[1:])
    assert absolute(built).data.path == f"{tmp_path}/shards"
