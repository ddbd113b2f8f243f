"""What one change would make of a predicted rate."""

from __future__ import annotations

import dataclasses

from launcher.plan.links import Fabric
from launcher.plan.step_model import Profile, Scenario, predict, with_gradient_bytes, with_micro_batch
from launcher.scale.models import Lever

BOUNDS = ("no stragglers", "perfect overlap")
OF_BUCKETS = ("no overlap: one bucket", "2 x bucket size")  # which fsdp has none of


def levers(profile: Profile, scenario: Scenario) -> list[Lever]:
    """`gain` = tokens/s over tokens/s now, less one; best first. A `bound` is no setting: it says what is
    lost there. A greater batch is as fast per sequence."""
    if scenario.ranks == 1:
        return []
    change = dataclasses.replace
    changes: dict[str, tuple[Profile, Scenario]] = {
        "2 x accumulation": (profile, change(scenario, accumulation=2 * scenario.accumulation)),
        "2 x micro batch": (with_micro_batch(profile, 2 * profile.micro_batch), scenario),
        "2 x link speed": (profile, change(scenario, fabric=_faster(scenario.fabric))),
        "no overlap: one bucket": (profile, change(scenario, overlap=False)),
        "2 x bucket size": (profile, change(scenario, bucket_bytes=2 * scenario.bucket_bytes)),
        "no stragglers": (profile, change(scenario, spread=0.0)),
        "perfect overlap": (profile, change(scenario, overlap=True, gain=1.0)),
    }
    if scenario.engine == "fsdp":
        changes = {name: changed for name, changed in changes.items() if name not in OF_BUCKETS}
    if profile.gradient_bytes > 2 and scenario.engine == "ddp":
        changes["16-bit gradients"] = with_gradient_bytes(profile, 2.0), scenario
    now = predict(profile, scenario).tokens_per_s
    rates = {name: predict(*changed).tokens_per_s for name, changed in changes.items()}
    gains = [
        Lever(lever=name, gain=rate / now - 1, tokens_per_s=rate, bound=name in BOUNDS)
        for name, rate in rates.items()
        if name not in BOUNDS or rate >= now  # one bucket without overlap may beat many that overlap
    ]
    return sorted(gains, key=lambda lever: -lever.gain)


def _faster(fabric: Fabric) -> Fabric:
    """Twice as fast; of a measured curve the latency too."""
    return dataclasses.replace(
        fabric,
        intra=fabric.intra and fabric.intra.scaled(2),
        inter=fabric.inter and fabric.inter.scaled(2),
        curve=fabric.curve and fabric.curve.scaled(2),
    )
