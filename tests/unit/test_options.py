"""How the text of an option becomes a value, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from bert_dp.config.profile import parse_profile
from launcher import options, results
from launcher.evaluate import finetune
from launcher.plan import inputs, scaling
from launcher.plan.question import Question
from launcher.run import restarts, train
from tests.e2e.cli import here, refused, tiny


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (options.counts, "1", (1,)),
        (options.counts, "1,2, 4", (1, 2, 4)),
        (options.counts, "1..8", (1, 2, 4, 8)),
        (options.counts, "3..20", (3, 6, 12, 20)),
        (options.counts, "2,2,1", (2, 1)),
        (options.counts, "4..4", (4,)),
        (options.modes, "both", ("weak", "strong")),
        (options.counts, "1000000", (1_000_000,)),
        (options.engines, "zero1, ddp,ddp", ("zero1", "ddp")),
        (options.engines, "deepspeed,deepspeed-3", ("deepspeed-1", "deepspeed-3")),
        (options.seconds, "90s", 90),
        (options.seconds, "5m", 300),
        (options.seconds, "1.5h", 5400),
        (options.seconds, " 2 m", 120),
        (options.two_batches, " 256 -> 4096", (256, 4096)),
        (options.launcher, "torchrun", "torchrun"),
        (options.names, "RTE, CoLA,RTE", ("RTE", "CoLA")),
        (options.rates, "3e-4, 1e-4,0.0003", (1e-4, 3e-4)),
        (options.starts, "RTE=MNLI, MRPC = MNLI", (("RTE", "MNLI"), ("MRPC", "MNLI"))),
    ],
)
def test_a_text_and_its_value(parse: Callable[[str], Any], text: str, value: object) -> None:
    assert parse(text) == value


REFUSED = {
    options.counts: ("", *"0 1,0 -1 1.5 a 4..2 0..8 1.. 1,,2 9999999 1..9999999".split()),
    options.modes: ("medium", ""),
    options.engines: ("ddp,magic", "", "deepspeed-9"),
    options.seconds: ("", "5", "0s", "-5m", "5 days", "nan s", "1e99h", "m", "9" * 400 + "s"),
    options.two_batches: ("256", "256->", "0->4", "a->b", "256->4096->8", "1->" + "9" * 400),
    options.launcher: ("mpirun", ""),
    options.names: ("", "RTE,", ",RTE"),
    options.rates: ("", "fast", "0", "1e-4,3", "nan", "1e-4,"),
    options.starts: ("", "RTE", "RTE=", "RTE=MNLI=QNLI", "RTE=MNLI,RTE=QNLI"),
}


@pytest.mark.parametrize(
    ("parse", "text"), [(parse, text) for parse, each in REFUSED.items() for text in each]
)
def test_what_is_refused(parse: Callable[[str], Any], text: str) -> None:
    with pytest.raises(typer.BadParameter):
        parse(text)


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (
            "scale --gpus 4..2",
            "--nproc: '4..2' is not a list like 1,2,4 or a range like 1..1024; the first must be",
        ),
        ("scale --mode medium", "--mode: unknown mode medium; choose from weak, strong, both"),
        ("scale --engines ddp,magic,x", "--engines: unknown engine magic, x; choose from ddp, zero1"),
        ("scale --repeats 0", "--repeats: "),
        ("tune batch --budget 5", "--budget: expected a duration such as 90s, 5m or 1h, not '5'"),
        ("tune lr --transfer 5", "--transfer: '5' is not of the form '256->4096'"),
        (
            "train --launcher mpirun",
            "--launcher: unknown launcher mpirun; choose from torchrun, accelerate, deepspeed",
        ),
        ("plan scaling --tensor 1.5", "--tensor: '1.5' is not a list"),
        ("train --elastic", "--elastic: only a restart changes the number of ranks; add --max-restarts K"),
        ("tune lr --tokens 1e15", "--tokens: 1000000000000000.0 is not below 1e+15"),
    ],
)
def test_the_line_names_the_option_the_value_and_a_fix(command: str, line: str) -> None:
    said = refused(*command.split())
    assert said.startswith(f"error: {line}")
    assert len(said.splitlines()) == 1


# --- what the verbs hand on


@pytest.mark.parametrize(
    ("command", "settings"),
    [
        (
            "scale --gpus 2,1 --mode weak --engines zero1,ddp --tensor 1 --launcher accelerate --repeats 4 "
            "--steps 7 --warm-up 3 --accumulation 2 --no-synthetic",
            {
                **{
                    "gpus": [1, 2],
                    "modes": ["weak"],
                    "engines": ["zero1", "ddp"],
                    "tensor": [1],
                    "repeats": 4,
                },
                **{"launcher": "accelerate", "steps": 7, "warm_up": 3, "accumulation": 2, "synthetic": False},
            },
        ),
        (
            "tune lr --nproc 2 --rates 4 --seeds 2 --tokens 2048 --budget 90s --launcher accelerate",
            {"ranks": 2, "rates": 4, "seeds": 2, "tokens": 2048, "budget_s": 90.0, "launcher": "accelerate"},
        ),
        (
            "tune batch --gpus 1 --budget 90s --memory 3 --launcher accelerate",
            {"ranks": 1, "budget_s": 90.0, "memory": 3.0, "launcher": "accelerate", "sizes": [1, 2, 4, 8]},
        ),
    ],
)
def test_every_option_stands_in_the_plan(
    shards: Path, tmp_path: Path, command: str, settings: dict[str, Any]
) -> None:
    place = ("--out", str(tmp_path / "out"), "--dry-run", "--json")
    done = here(*command.split(), "quickstart", *tiny(shards, "run.device=cpu"), *place)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    told = plan.get("settings", plan)
    assert {name: told[name] for name in settings} == settings


@pytest.mark.parametrize(
    ("command", "elastic"),
    [("train quickstart --elastic --profile 2:4", True), ("finetune RUN --task RTE --data .", False)],
)
def test_a_run_is_started_as_its_options_say(
    monkeypatch: pytest.MonkeyPatch, command: str, elastic: bool
) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(train, "train", lambda _, **options: asked.append(options) or 3)
    monkeypatch.setattr(finetune, "load", lambda *_, **__: None)
    options = "--nproc 2 --launcher accelerate --run-dir place --resume never --max-restarts 5 --dry-run"
    assert here(*command.split(), *options.split()).returncode == 3
    (told,) = asked
    expected = {"nproc": "2", "launcher": "accelerate", "run_dir": Path("place"), "resume": "never"}
    assert {name: told[name] for name in expected} == expected
    assert (told["dry_run"], told["policy"]) == (True, restarts.Policy(5, elastic))
    if elastic:
        assert told["profile"] == parse_profile("2:4", "0")


def test_every_option_of_a_prediction_counts() -> None:
    source = "--model bert-base --seq-per-s 400 --micro 32 --gpu V100-16G"
    fabric = "--gpus 4,16 --link nvlink2 --inter ib-hdr --gpus-per-node 4 --nics 2 --bucket-mib 50"
    model = "--engine zero1 --tensor 2 --accumulation 3 --reduce-dtype bf16"
    done = here("plan", "scaling", *f"{source} {fabric} {model}".split(), "--json")
    asked = Question((4, 16), "nvlink2", "ib-hdr", 4, 2, "zero1", (2,), (3,), 50.0, "bf16")
    expected = scaling.answer(inputs.from_rate("bert-base", 400, 32, 3, "V100-16G"), asked)
    assert done.stdout == results.to_json(expected)
