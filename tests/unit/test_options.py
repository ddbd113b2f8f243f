"""How the text of an option becomes a value, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import typer

from launcher import options
from tests.e2e.cli import refused


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
        (options.engines, "zero1, ddp,ddp", ("zero1", "ddp")),
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
    ],
)
def test_the_line_names_the_option_the_value_and_a_fix(command: str, line: str) -> None:
    said = refused(*command.split())
    assert said.startswith(f"error: {line}")
    assert len(said.splitlines()) == 1
