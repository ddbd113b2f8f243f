"""`bert-dp tune lr --transfer`: carry a learning rate from one global batch to another by published rules."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bert_dp.config import Config, ConfigError, Issue, load_config, parse_overrides, peak_lr, resolve
from bert_dp.config.batch import UNTUNED_BATCH, UNTUNED_LR
from launcher import job, results
from launcher.log import PLAIN, show
from launcher.tune import FILE, with_settings
from launcher.tune.lr import tuned_config
from launcher.tune.lr_search import Transfer, TransferRule, TuneLr

if TYPE_CHECKING:
    from rich.console import Console

SQRT = "arXiv 2205.10287"
LINEAR = "arXiv 1706.02677"
UNTUNED = "arXiv 1904.00962"


def carry(
    name: str | None,
    overrides: Sequence[str],
    before: int,
    after: int,
    out: Path | None,
    *,
    dry_run: bool,
    as_json: bool,
    console: Console,
) -> int:
    """Carry the configuration's rate, or the one found in OUT, from global batch `before` to `after`.

    Adds the result to OUT/tune.json, unless it is a dry run. Returns the exit code; raises ConfigError.
    """
    config = load_config(job.find_config(name), overrides)
    if out is None:
        lr = peak_lr(with_settings(config, batch={"global_size": before})).value
        carried = transfer(config, lr, "the configuration's", before, after)
    else:
        path = out / FILE
        tuned = results.find(path, TuneLr)
        if tuned is None or tuned.choice is None:
            hint = "drop --out to carry the configuration's rate"
            raise ConfigError(
                [Issue("--out", "not_found", f"{path} holds no chosen learning rate", hint=hint)]
            )
        config = Config.model_validate_json(json.dumps(tuned.config))
        if before != config.batch.global_size:
            message = f"{path} was tuned at global batch {config.batch.global_size}, not {before}"
            raise ConfigError([Issue("--transfer", "conflict", message, before, str(path))])
        if resolve([tuned.config, parse_overrides(overrides)]).optim != config.optim:
            message = f"the search in {out} had another `optim`"
            raise ConfigError(
                [Issue("optim", "conflict", message, other="--out", hint="drop --set or --out")]
            )
        lr = tuned.choice.lr
        carried = transfer(tuned_config(config, lr), lr, str(path), before, after)
        if not dry_run:
            results.write(path, tuned.model_copy(update={"transfer": carried}))
    if as_json:
        sys.stdout.write(results.to_json(carried))
    else:
        for line in lines(carried):
            show(console, line, **PLAIN)
    return 0


def transfer(config: Config, lr: float, source: str, before: int, after: int) -> Transfer:
    """Return `lr`, tuned at global batch `before`, at `after` by each rule.

    sqrt (Adam): lr sqrt(k), with 1 - beta -> k (1 - beta) and eps -> eps / sqrt(k), for k = after / before;
    null where a beta would fall below 0. linear (SGD): lr k. untuned_lamb: of the batch alone.
    """
    optim, k = config.optim, after / before
    root, untuned = k**0.5, UNTUNED_LR * (after / UNTUNED_BATCH) ** 0.5
    betas = {name: 1 - k * (1 - getattr(optim, name)) for name in ("beta1", "beta2")}
    rules = [
        TransferRule(
            rule="sqrt",
            for_="Adam and AdamW",
            lr=lr * root,
            source=SQRT,
            equation=f"{lr * root:.4g} = {lr:g} x sqrt({after} / {before})",
            **{name: beta if beta >= 0 else None for name, beta in betas.items()},
            eps=optim.eps / root,
        ),
        TransferRule(
            rule="linear",
            for_="SGD",
            lr=lr * k,
            source=LINEAR,
            equation=f"{lr * k:.4g} = {lr:g} x {after} / {before}",
        ),
        TransferRule(
            rule="untuned_lamb",
            for_="LAMB",
            lr=untuned,
            source=UNTUNED,
            equation=f"{untuned:.4g} = {UNTUNED_LR:g} x sqrt({after} / {UNTUNED_BATCH})",
        ),
    ]
    scaling = None if optim.lr_scaling == "none" else optim.lr_scaling
    return Transfer(
        from_batch=before,
        to_batch=after,
        lr=lr,
        lr_source=source,
        rules=rules,
        ours="untuned_lamb" if optim.lr == "auto" else scaling,
    )


def lines(carried: Transfer) -> list[str]:
    """Return the lines to print."""
    before, after = carried.from_batch, carried.to_batch
    out = [
        f"learning rate {carried.lr:g} ({carried.lr_source}), as tuned at global batch {before}, at {after}:"
    ]
    for rule in carried.rules:
        out.append(f"  {rule.rule:<13} {rule.equation}  ({rule.for_}, {rule.source})")
        if rule.eps is not None:
            betas = {"beta1": rule.beta1, "beta2": rule.beta2}
            also = [f"{name} {'below 0' if x is None else f'{x:.4g}'}" for name, x in betas.items()]
            out.append(
                f"  {'':<13} the paper sets {', '.join(also)}, eps {rule.eps:.3g}, unlike optim.lr_scaling"
            )
    if carried.ours == "untuned_lamb":
        out.append("the configuration follows untuned_lamb (optim.lr: auto)")
    elif carried.ours is None:
        out.append(
            f"the configuration keeps its rate at every batch (optim.lr_scaling: none); for the sqrt "
            f"rule optim.lr_scaling=sqrt and optim.lr_batch={before}"
        )
    else:
        out.append(f"the configuration follows {carried.ours} (optim.lr_scaling)")
    return out
