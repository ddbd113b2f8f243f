"""A learning rate at one global batch carried to another by the published rules; no trial is run."""

from __future__ import annotations

import re

from bert_dp.config import Config, ConfigError
from bert_dp.config.rates import UNTUNED_BATCH, UNTUNED_LR
from launcher.results import Transfer, TransferRule

SQRT = "arXiv 2205.10287"
LINEAR = "arXiv 1706.02677"
UNTUNED = "arXiv 1904.00962"


def parse(text: str) -> tuple[int, int]:
    """`256->4096` as two batches. Raises ConfigError."""
    found = re.fullmatch(r"\s*(\d{1,9})\s*->\s*(\d{1,9})\s*", text)
    batches = (int(found[1]), int(found[2])) if found else (0, 0)
    if not min(batches):
        raise ConfigError(
            [f"--transfer: {text!r} is not of the form '256->4096', two global batches; quote it"]
        )
    return batches


def transfer(config: Config, lr: float, source: str, before: int, after: int) -> Transfer:
    """`transfer` of tune.json: `lr`, tuned at global batch `before`, at `after` by each rule.

    sqrt (Adam): lr sqrt(k), with 1 - beta -> k (1 - beta) and eps -> eps / sqrt(k), for k = after / before;
    null where a beta would fall below 0. linear (SGD): lr k. untuned_lamb: of the batch alone.
    """
    optim, k = config.optim, after / before
    root = k**0.5
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
            lr=UNTUNED_LR * (after / UNTUNED_BATCH) ** 0.5,
            source=UNTUNED,
            equation=f"{UNTUNED_LR * (after / UNTUNED_BATCH) ** 0.5:.4g} = {UNTUNED_LR:g} x "
            f"sqrt({after} / {UNTUNED_BATCH})",
        ),
    ]
    names = {"none": None, "sqrt": "sqrt", "linear": "linear"}
    ours = "untuned_lamb" if optim.lr == "auto" else names[optim.lr_scaling]
    return Transfer(
        from_batch=before,
        to_batch=after,
        ratio=k,
        lr=lr,
        lr_source=source,
        optimizer=optim.name,
        rules=rules,
        ours=ours,
    )


def lines(carried: Transfer) -> list[str]:
    """What is printed of `transfer`'s result."""
    before, after = carried.from_batch, carried.to_batch
    out = [
        f"learning rate {carried.lr:g} ({carried.lr_source}), taken as tuned at global batch {before}, "
        f"at {after}:"
    ]
    for rule in carried.rules:
        out.append(f"  {rule.rule:<13} {rule.equation}  ({rule.for_}, {rule.source})")
        if rule.eps is not None:
            betas = ", ".join(
                f"{name} {beta:.4g}" if beta is not None else f"no {name} (it would be below 0)"
                for name, beta in (("beta1", rule.beta1), ("beta2", rule.beta2))
            )
            out.append(
                f"  {'':<13} the paper's rule also sets {betas} and eps {rule.eps:.3g}; "
                "optim.lr_scaling does not"
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
