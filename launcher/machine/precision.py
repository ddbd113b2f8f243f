"""In what ranks will compute here, and how fast this CPU multiplies bf16, as `doctor` has measured."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_dp import record
from bert_dp.config import BF16_UNITS, Config, decide_precision
from launcher import results
from launcher.machine.environment import Environment
from launcher.report.numbers import format_ratio, format_si
from launcher.results import MatmulRatio


def precision_of(config: Config, bf16_units: Sequence[str], *, on_gpu: bool, kept: str | None = None) -> str:
    """What `precision` is expected to be where it is auto: a GPU, which only its rank asks, is taken to have
    bf16. `kept`: of the checkpoint that the run goes on from."""
    has_bf16 = on_gpu or bool(bf16_units)
    engines = [config.parallel.engine]
    return decide_precision(config.precision, engines, on_gpu=on_gpu, has_bf16=has_bf16, kept=kept)


def ratio_file() -> Path:
    """Where `doctor` keeps what it has measured: below $BERT_DP_CACHE or ~/.cache/bert-dp."""
    return record.cache_root() / "matmul_ratio.json"


def keep_ratio(measured: Mapping[str, Any], machine: Environment) -> MatmulRatio:
    """What bert_dp.measure.bf16_ratio has printed. Raises ConfigError when that is something else, and
    OSError, also where the cache is not to be trusted."""
    facts = {"date": datetime.date.today().isoformat(), "cpu": identity(machine)}
    ratio = results.parse({**measured, **facts}, MatmulRatio, ratio_file().name)
    if issues := record.cache_issues():
        raise PermissionError(issues[0])
    ratio_file().parent.mkdir(parents=True, exist_ok=True)
    results.write(ratio_file(), ratio)
    return ratio


def kept_ratio(machine: Environment) -> MatmulRatio | None:
    """What `doctor` has measured last, if it was of this CPU."""
    ratio = None if record.cache_issues() else results.find(ratio_file(), MatmulRatio)
    return ratio if ratio is not None and ratio.cpu == identity(machine) else None


def identity(machine: Environment) -> list[str]:
    """Of a CPU, as far as its matmul rates go."""
    return [machine.cpu_model, *machine.bf16_units]


def in_words(ratio: MatmulRatio) -> str:
    """The ratio with its denominator."""
    bf16, fp32 = (format_si(flops, "FLOP/s") for flops in (ratio.bf16_flops, ratio.fp32_flops))
    return f"{format_ratio(ratio.ratio)} x its fp32 matmul rate ({bf16} against {fp32})"


def emulated_warnings(config: Config, machine: Environment, *, on_gpu: bool) -> list[str]:
    """Why ranks on this CPU would be slow in the precision that was asked for; at most one line."""
    if config.precision != "bf16" or on_gpu or machine.bf16_units:
        return []
    ratio = kept_ratio(machine)
    how = (
        f"runs at {in_words(ratio)}, measured by bert-dp doctor on {ratio.date}"
        if ratio is not None
        else "is slower than fp32; bert-dp doctor measures by how much"
    )
    return [
        f"precision: bf16 is emulated on this CPU, which has no {' or '.join(BF16_UNITS)}, and {how}; "
        "use auto or fp32"
    ]
