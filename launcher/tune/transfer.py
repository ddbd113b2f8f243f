"""`bert-dp tune lr --transfer`: carry a learning rate from one global batch to another by published rules."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert_dp.config import Config, ConfigError, Issue, load_config, parse_overrides, peak_lr, resolve
from bert_dp.config.batch import UNTUNED_BATCH, UNTUNED_LR
from launcher import job, results
from launcher.log import PLAIN, show
from launcher.tune import FILE, with_settings
from launcher.tune.lr import tuned_config
from launcher.tune.lr_search import TuneLr

if TYPE_CHECKING:
    from rich.console import Console


def carry(
    name: str | None,
    overrides: Sequence[str],
    before: int,
    after: int,
    out: Path | None,
    *,
    as_json: bool,
    console: Console,
) -> int:
    """Print the configuration's rate, or the one found in OUT, carried from global batch `before` to `after`.

    Returns the exit code; raises ConfigError.
    """
    config = load_config(job.find_config(name), overrides)
    if out is None:
        lr = peak_lr(with_settings(config, batch={"global_size": before})).value
        source = "the configuration's"
    else:
        lr, config = found_rate(out / FILE, overrides, before)
        source = str(out / FILE)
    carried = transfer(config, lr, source, before, after)
    if as_json:
        sys.stdout.write(json.dumps(carried, indent=1) + "\n")
    else:
        for line in lines(carried):
            show(console, line, **PLAIN)
    return 0


def found_rate(path: Path, overrides: Sequence[str], before: int) -> tuple[float, Config]:
    """Return the rate that a search has found at global batch `before`, and its configuration at that rate.

    Raises ConfigError.
    """
    tuned = results.find(path, TuneLr)
    if tuned is None or tuned.choice is None:
        hint = "drop --out to carry the configuration's rate"
        raise ConfigError([Issue("--out", "not_found", f"{path} holds no chosen learning rate", hint=hint)])
    config = Config.model_validate_json(json.dumps(tuned.config))
    if before != config.batch.global_size:
        message = f"{path} was tuned at global batch {config.batch.global_size}, not {before}"
        raise ConfigError([Issue("--transfer", "conflict", message, before, str(path))])
    if resolve([tuned.config, parse_overrides(overrides)]).optim != config.optim:
        message = f"the search of {path} had another `optim`"
        raise ConfigError([Issue("optim", "conflict", message, other="--out", hint="drop --set or --out")])
    return tuned.choice.lr, tuned_config(config, tuned.choice.lr)


def transfer(config: Config, lr: float, source: str, before: int, after: int) -> dict[str, Any]:
    """Return `lr`, tuned at global batch `before`, at `after` by each rule.

    sqrt (Adam): lr sqrt(k), with 1 - beta -> k (1 - beta) and eps -> eps / sqrt(k), for k = after / before;
    null where a beta would fall below 0. linear (SGD): lr k. untuned_lamb: of the batch alone.
    """
    optim, k = config.optim, after / before
    root, untuned = k**0.5, UNTUNED_LR * (after / UNTUNED_BATCH) ** 0.5
    betas = {name: 1 - k * (1 - getattr(optim, name)) for name in ("beta1", "beta2")}
    papers = [
        ("sqrt", "Adam and AdamW", "arXiv 2205.10287", lr * root, f"{lr:g} x sqrt({after} / {before})"),
        ("linear", "SGD", "arXiv 1706.02677", lr * k, f"{lr:g} x {after} / {before}"),
        (
            "untuned_lamb",
            "LAMB",
            "arXiv 1904.00962",
            untuned,
            f"{UNTUNED_LR:g} x sqrt({after} / {UNTUNED_BATCH})",
        ),
    ]
    rules: list[dict[str, Any]] = [
        {"rule": rule, "for": use, "lr": rate, "source": paper, "equation": f"{rate:.4g} = {equation}"}
        for rule, use, paper, rate, equation in papers
    ]
    rules[0] |= {name: beta if beta >= 0 else None for name, beta in betas.items()}
    rules[0]["eps"] = optim.eps / root
    scaling = None if optim.lr_scaling == "none" else optim.lr_scaling
    return {
        "from_batch": before,
        "to_batch": after,
        "lr": lr,
        "lr_source": source,
        "rules": rules,
        "ours": "untuned_lamb" if optim.lr == "auto" else scaling,
    }


def lines(carried: dict[str, Any]) -> list[str]:
    """Return the lines to print."""
    lr, before, after = carried["lr"], carried["from_batch"], carried["to_batch"]
    out = [f"learning rate {lr:g} ({carried['lr_source']}), as tuned at global batch {before}, at {after}:"]
    for rule in carried["rules"]:
        out.append(f"  {rule['rule']:<13} {rule['equation']}  ({rule['for']}, {rule['source']})")
        if "eps" in rule:
            betas = {
                name: "below 0" if rule[name] is None else f"{rule[name]:.4g}" for name in ("beta1", "beta2")
            }
            also = ", ".join(f"{name} {text}" for name, text in betas.items())
            out.append(f"  {'':<13} the paper sets {also}, eps {rule['eps']:.3g}, unlike optim.lr_scaling")
    if carried["ours"] is None:
        advice = f"for the sqrt rule optim.lr_scaling=sqrt and optim.lr_batch={before}"
        out.append(f"the configuration keeps its rate at every batch (optim.lr_scaling: none); {advice}")
    else:
        out.append(f"the configuration follows {carried['ours']} (optim.lr: auto, or optim.lr_scaling)")
    return out
