"""Tests of the learning rate rules: published values, the printed equation and refusals."""

import re
from operator import attrgetter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_dp.config import Config, load_config, peak_lr
from bert_dp.model.bert import build_model
from bert_dp.optim import lr_factor
from tests.helpers import CONFIGS, TINY_MODEL, issues_of, make_config


def value_of(equation: str) -> float:
    """Evaluate the right side of a printed equation `X = A [x] [sqrt](B / C)...` and compare it with X."""
    left, _, right = equation.partition(" = ")
    match = re.match(r"([\d.e+-]+) (?:x )?(sqrt)?\((\d+) / (\d+)\)", right)
    assert match is not None, equation
    base, root, above, below = match.groups()
    ratio = int(above) / int(below)
    value = float(base) * (ratio**0.5 if root else ratio)
    assert float(left) == pytest.approx(value, rel=1e-3)
    return value


@pytest.mark.parametrize("halvings", range(7))
def test_untuned_lamb_has_the_published_rates(halvings: int) -> None:
    """arXiv 1904.00962 lists 5 / (2^(n / 2) x 10^3) for batches from 512 to 32K."""
    batch, lr = 2**15 >> halvings, 5e-3 / 2 ** (halvings / 2)
    peak = peak_lr(make_config("optim.name=lamb", "optim.lr=auto", f"batch.global_size={batch}"))
    assert peak.value == pytest.approx(lr, rel=1e-12)
    assert value_of(peak.equation) == pytest.approx(lr, rel=1e-12)
    assert "3,125 warm-up steps" in peak.equation


# --- scaling from a tuned rate


@pytest.mark.parametrize("name", ["adamw", "lamb", "muon"])
@pytest.mark.parametrize(("rule", "power"), [("none", 0.0), ("sqrt", 0.5), ("linear", 1.0)])
@settings(deadline=None, max_examples=20)  # loading many configurations is slow
@given(lr=st.floats(1e-6, 1.0), batch=st.integers(1, 2**14), factor=st.integers(1, 64), down=st.booleans())
def test_the_rate_scales_with_the_batch_to_the_power_of_the_rule(
    name: str, rule: str, power: float, lr: float, batch: int, factor: int, down: bool
) -> None:
    at, size = (batch * factor, batch) if down else (batch, batch * factor)
    optim = {"name": name, "lr": lr, "lr_batch": at, "lr_scaling": rule}
    peak = peak_lr(make_config(optim=optim, batch={"global_size": size, "micro_size": 1}))
    assert peak.value == pytest.approx(lr * (size / at) ** power, rel=1e-12)
    if rule == "none":
        assert peak.equation.endswith(f"as given, for global batch {size}")
    else:
        assert value_of(peak.equation) == pytest.approx(peak.value, rel=1e-3)
        assert ("sqrt" in peak.equation) == (rule == "sqrt")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("lr=auto name=adamw", "lr: auto"),
        ("lr=auto name=muon", "lr: auto"),
        ("lr=auto name=lamb lr_batch=512 lr_scaling=sqrt", "lr_scaling: sqrt"),
        ("lr=auto name=lamb lr_batch=512 lr_scaling=linear", "lr_scaling: linear"),
        ("lr_scaling=sqrt", "lr_scaling: sqrt needs lr_batch"),
        ("lr_scaling=linear", "lr_scaling: linear needs lr_batch"),
    ],
)
def test_incompatible_rate_settings_are_refused(settings: str, words: str) -> None:
    (line,) = issues_of(make_config, *(f"optim.{item}" for item in settings.split()))
    assert line.startswith("optim: ")
    assert words in line


# --- the shipped large-batch runs


def peak_at(config: Config, step: int) -> float:
    assert config.schedule.steps is not None
    return peak_lr(config).value * lr_factor(config.schedule, step / config.schedule.steps)


def test_lamb_32k_has_the_published_two_phases() -> None:
    first, second = (load_config(CONFIGS / f"{name}.yaml") for name in ("lamb-32k", "lamb-32k-phase2"))
    assert (first.schedule.steps, second.schedule.steps) == (14_063, 1_562)
    assert 14_063 + 1_562 == 15_625  # all steps of the table's 32K column
    assert (first.data.sequence_length, second.data.sequence_length) == (128, 512)
    assert first.batch.global_size == second.batch.global_size == 32_768
    assert peak_lr(first).value == 5e-3
    rates = [peak_at(first, step) for step in range(14_063)]
    assert rates.index(max(rates)) == 3_125  # the warm-up of the untuned rule
    assert max(rates) == pytest.approx(5e-3, rel=1e-4)
    # phase 2 starts at the rate that one linear decay over both phases would have
    assert peak_at(second, 0) == pytest.approx(5e-3 * 1_562 / (15_625 - 3_125), rel=1e-9)


@pytest.mark.parametrize(
    ("phase", "batch", "lr", "warmup", "steps", "length"),
    [(1, 65_536, 6e-3, 0.2843, 7_038, 128), (2, 32_768, 4e-3, 0.128, 1_563, 512)],
)
def test_nvidias_two_phases_are_as_published(phase, batch, lr, warmup, steps, length) -> None:
    config = load_config(CONFIGS / f"nvidia-64k-phase{phase}.yaml")
    assert (config.batch.global_size, peak_lr(config).value) == (batch, lr)
    assert (config.schedule.warmup_fraction, config.schedule.steps) == (warmup, steps)
    assert config.data.sequence_length == length
    optim = config.optim
    assert (optim.weight_decay, optim.clip, optim.beta2, optim.eps) == (0.01, 1.0, 0.999, 1e-6)


@pytest.mark.parametrize(
    ("first", "second"), [("lamb-32k", "lamb-32k-phase2"), ("nvidia-64k-phase1", "nvidia-64k-phase2")]
)
def test_the_second_phase_can_start_from_the_first(first: str, second: str) -> None:
    """Both have the same model and tokenizer, and no tensor's shape depends on the sequence length."""
    one, two = (load_config(CONFIGS / f"{name}.yaml") for name in (first, second))
    assert two.run.init_from == f"runs/{first}"
    assert one.model == two.model
    tiny = one.model.model_copy(update=TINY_MODEL)
    weights = build_model(tiny, 16, seed=0).state_dict()
    build_model(tiny, 64, seed=1).load_state_dict(weights)
    learned = tiny.model_copy(update={"position": "learned"})
    with pytest.raises(RuntimeError, match="position_embeddings"):
        build_model(learned, 64, seed=1).load_state_dict(build_model(learned, 16, seed=0).state_dict())
    # both phases hold out the same documents
    for same in ("data.sources", "data.tokenizer", "data.build", "run.seed"):
        assert attrgetter(same)(one) == attrgetter(same)(two), same
