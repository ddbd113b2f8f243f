"""Tests of parsing options, of passing them to the verbs, and of refused options."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from bert_dp.config.checks import parse_profile
from bert_dp.data import shards
from bert_dp.evaluation import prediction
from launcher import datasets, results
from launcher.cli import options
from launcher.evaluate import finetune, glue, text_loss
from launcher.evaluate.glue_scores import GlueOptions
from launcher.job import VerbOptions
from launcher.plan.scaling import PlanSpec, predict_scaling, source_of_rate
from launcher.run import loggers, train
from launcher.run.restarts import RunOptions
from launcher.tune import batch
from tests.e2e.cli import here, refused, tiny
from tests.report_fixture import make_run

VALUES: dict[Callable[[str], Any], dict[str, object]] = {
    options.counts: {"1,2, 4": (1, 2, 4), "1..8": (1, 2, 4, 8), "3..20": (3, 6, 12, 20), "2,2,1": (2, 1)}
    | {"4..4": (4,), "1000000": (1_000_000,)},
    options.engines: {
        "zero1, ddp,ddp": ("zero1", "ddp"),
        "deepspeed,deepspeed-3": ("deepspeed-1", "deepspeed-3"),
    },
    options.seconds: {"90s": 90, " 2 m": 120, "1.5h": 5400, "2d": 172_800},
    options.hours: {"8": 8, "0.5": 0.5, "90m": 1.5},
    options.launcher: {"torchrun": "torchrun"},
    options.words: {"RTE, CoLA,RTE": ("RTE", "CoLA")},
}
REFUSED = {
    options.counts: ("", *"0 1,0 -1 1.5 a 4..2 0..8 1.. 1,,2 9999999 1..9999999".split()),
    options.engines: ("ddp,magic", "", "deepspeed-9"),
    options.seconds: ("", "5", "0s", "-5m", "5 days", "nan s", "1e99h", "m", "9" * 400 + "s"),
    options.hours: ("", "0", "-1", "m", "nan", "1w"),
    options.launcher: ("mpirun", ""),
    options.program: ("", "'", "no-such-program x"),
    options.words: ("", "RTE,", ",RTE"),
}


@pytest.mark.parametrize("parse", VALUES)
def test_option_texts_are_parsed_to_values(parse: Callable[[str], Any]) -> None:
    assert {text: parse(text) for text in VALUES[parse]} == VALUES[parse]


@pytest.mark.parametrize(
    ("parse", "text"), [(parse, text) for parse, each in REFUSED.items() for text in each]
)
def test_invalid_option_texts_are_refused(parse: Callable[[str], Any], text: str) -> None:
    with pytest.raises(typer.BadParameter):
        parse(text)


def test_the_error_line_names_the_option() -> None:
    for command in (
        *("scale --nproc 4..2", "scale --engines ddp,magic,x", "scale --repeats 0"),
        *("scale --accumulation 2 --mode strong", "tune lr --tokens 1e15", "train --elastic"),
        *("train --profile-ranks 1", "report r --out j.html --json", "finetune RUN other"),
    ):
        setting = next((word for word in command.split() if word.startswith("--")), "other")
        message = refused(*command.split())
        assert message.startswith(f"error: {setting}: ")
        assert len(message.splitlines()) == 1
    assert refused("eval", "glue", "RUN").startswith("error: --data: ")


@pytest.mark.parametrize(
    ("command", "settings"),
    [
        (
            "scale --nproc 2,1 --mode weak --engines zero1,ddp --tensor 1 --repeats 4 --steps 7 --warm-up 3 "
            "--accumulation 2",
            {"gpus": [1, 2], "modes": ["weak"], "engines": ["zero1", "ddp"], "tensor": [1], "repeats": 4}
            | {"steps": 7, "warm_up": 3, "accumulation": 2},
        ),
        (
            "tune lr --nproc 2 --rates 4 --seeds 2 --tokens 2048 --budget 90s",
            {"ranks": 2, "rates": 4, "seeds": 2, "tokens": 2048, "budget_s": 90.0},
        ),
        ("tune batch --nproc 1 --budget 90s --memory 3", {"nproc": 1, "budget_s": 90.0, "memory_gib": 3.0}),
    ],
)
def test_every_option_is_recorded_in_the_plan(shards: Path, tmp_path: Path, command, settings) -> None:
    place = ("--launcher", "accelerate", "--out", str(tmp_path / "out"), "--dry-run", "--json")
    more = ["batch.micro_size=auto"] if "tune batch" in command else []
    done = here(*command.split(), "quickstart", *tiny(shards, "run.device=cpu", *more), *place)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert not (tmp_path / "out").exists()
    passed = plan.get("settings", plan)
    settings["launcher"] = "accelerate"
    assert {name: passed[name] for name in settings} == settings


PLACE = "--nproc 2 --launcher accelerate --run-dir place --resume never"


@pytest.mark.parametrize(
    ("command", "elastic"),
    [("train quickstart --elastic --profile 2:4", True), ("finetune RUN --task RTE --data .", False)],
)
def test_a_run_is_started_with_its_options(monkeypatch: pytest.MonkeyPatch, command, elastic) -> None:
    noted = calls_of(monkeypatch, train, "train")
    monkeypatch.setattr(finetune, "load", lambda *_, **__: None)
    assert here(*f"{command} {PLACE} --max-restarts 5 --dry-run --force".split()).returncode == 3
    profile = parse_profile("2:4", "0") if elastic else None
    expected = RunOptions("2", Path("place"), "never", True, "accelerate", 5, elastic, True, profile)
    assert noted[0][0][1] == expected


def test_every_option_of_plan_scaling_is_used() -> None:
    source = "--model bert-base --seq-per-s 400 --micro 32 --gpu V100-16G"
    fabric = "--nproc 4,16 --link nvlink2 --inter ib-hdr --gpus-per-node 4 --nics 2"
    model = "--engine zero1 --tensor 2 --accumulation 3"
    done = here("plan", "scaling", *f"{source} {fabric} {model}".split(), "--json")
    spec = PlanSpec((4, 16), "nvlink2", "ib-hdr", 4, 2, "zero1", (2,), (3,))
    expected = predict_scaling(source_of_rate("bert-base", 400, 32, 3, "V100-16G"), spec)
    assert done.stdout == results.to_json(expected)


Calls = list[tuple[tuple[Any, ...], dict[str, Any]]]
HOW: Any = VerbOptions(Path("o"), True, True, None)  # type: ignore[arg-type]


def calls_of(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, answer: Any = 3) -> Calls:
    """Replace a function by one that returns `answer`. Return its calls without the console."""
    calls: Calls = []

    def function(*given: Any, **named: Any) -> Any:
        given = tuple(a._replace(console=None) if isinstance(a, VerbOptions) else a for a in given)
        calls.append((given, {key: value for key, value in named.items() if key != "console"}))
        return answer

    monkeypatch.setattr(module, name, function)
    return calls


AUTO = "batch.micro_size=auto"


@pytest.mark.parametrize(
    ("more", "forced"), [("", False), ("--force", True), (AUTO, True), (f"{AUTO} --dry-run", False)]
)
def test_force_and_a_measured_batch_override_the_memory_estimate(
    monkeypatch: pytest.MonkeyPatch, more: str, forced: bool
) -> None:
    search = calls_of(monkeypatch, batch, "resolve_auto_batch", (["batch.micro_size=4"], 0))
    runs = calls_of(monkeypatch, train, "train")
    assert here(*f"train quickstart {more} {PLACE} --profile 2:4 --profile-ranks 1".split()).returncode == 3
    job, passed, _ = runs[0][0]
    assert (passed.force, passed.profile) == (forced, parse_profile("2:4", "1"))
    if "auto" not in more:
        assert search == []
        return
    ((given, _),) = search
    assert job.config.batch.micro_size == 4
    assert given[:2] == ("quickstart", ["batch.micro_size=auto"])
    assert given[2] == dataclasses.replace(passed, force=False)


def test_a_failed_batch_search_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    calls_of(monkeypatch, batch, "resolve_auto_batch", ([], 143))
    monkeypatch.setattr(train, "train", lambda *_, **__: pytest.fail("started"))
    assert here("train", "quickstart", "batch.micro_size=auto").returncode == 143


def test_finetuning_loads_what_its_options_name(monkeypatch: pytest.MonkeyPatch) -> None:
    calls_of(monkeypatch, train, "train")
    loaded = calls_of(monkeypatch, finetune, "load", None)
    files = "--train a.csv --dev b.csv --test c.csv --text q --text-pair r --label s --kind regression"
    here("finetune", "RUN", "optim.lr=1", *files.split(), "--nproc", "4", "--init", "random")
    here("finetune", "RUN", "--task", "RTE", "--data", "x", "--data", "y")
    (own, random), (known, pretrained) = loaded
    settings = ["optim.lr=1"]
    assert own == (Path("RUN"), finetune.ExamplesSource("own", files.split()), settings)
    assert known == (Path("RUN"), finetune.glue_source("RTE", [Path("x"), Path("y")]), [])
    assert random == {"nproc": "4", "random_weights": True}
    assert pretrained == {"nproc": "auto", "random_weights": False}


BUILD = {"vocab_size": 99, "sequence_length": 64, "tokenizer": "t", "processes": 2, "force": True}
EVALUATED = GlueOptions(tasks=["RTE", "CoLA"], seeds=2, init="random", ranks=4, launcher="accelerate")


def test_a_verb_passes_on_every_option_and_returns_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def handed(module: Any, name: str, command: str, code: int = 3) -> Any:
        calls = calls_of(monkeypatch, module, name)
        done = here(*command.split())
        assert done.returncode == code, done.stderr
        (call,) = calls
        return call

    command = (
        "data build a lang=en/b data.build.normalize=false --out o --vocab-size 99 --sequence-length 64 "
        "--tokenizer t --format text --text-key body --set data.build.dedup=none --processes 2 --force"
    )
    (sources, out), named = handed(datasets, "build", command)
    settings = ("source_format=text", 'text_field="body"', "normalize=false", "dedup=none")
    assert (sources, out) == (["a", "lang=en/b"], Path("o"))
    assert named == {**BUILD, "overrides": [f"data.build.{item}" for item in settings]}
    command = (
        "eval glue r optim.lr=1 --data x --data y --tasks RTE,CoLA --seeds 2 "
        "--init random --nproc 4 --launcher accelerate --out o --dry-run --json"
    )
    given = (Path("r"), ["optim.lr=1"], EVALUATED, [Path("x"), Path("y")], HOW)
    assert handed(glue, "evaluate", command) == (given, {})
    command = "eval mlm r a b --documents blank_line --format jsonl --text-key body --json"
    texts = {"documents": "blank_line", "source_format": "jsonl", "text_field": "body"}
    named = {"precision": "auto", "as_json": True}
    assert handed(text_loss, "evaluate", command) == ((Path("r"), ["a", "b"], texts), named)
    command = "predict r f --text q --text-pair s --out o --precision bf16"
    named = {"text": "q", "text_pair": "s", "out": Path("o"), "precision": "bf16"}
    assert handed(prediction, "predict_file", command, 0) == ((Path("r"), "f"), named)


@pytest.mark.parametrize("codes", [(0, 1), (1, 0), (0, 0)])
def test_the_exit_code_shows_any_run_that_was_not_sent_completely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codes: tuple[int, int]
) -> None:
    ends = {(make_run(tmp_path / str(i)), ("tensorboard",)): code for i, code in enumerate(codes)}
    noted = dict(ends)
    monkeypatch.setattr(loggers, "send_run", lambda run_dir, names, log: noted.pop((run_dir, names)))
    runs = [str(path) for path, _ in ends]
    done = here("report", *runs, "--log-to", "tensorboard", "--out", str(tmp_path / "page.html"))
    assert (done.returncode, noted) == (max(codes), {})
    assert (tmp_path / "page.html").exists()
    assert not list(tmp_path.glob("*/report.html"))


def test_damaged_shards_are_shown_and_give_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "inspect", lambda _: {"problems": ["x"]})
    done = here("data", "inspect", "d", "--json")
    assert (done.returncode, json.loads(done.stdout)) == (1, {"problems": ["x"]})
