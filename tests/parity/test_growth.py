"""The table of how rounding grows, at a tenth of its length."""

from pathlib import Path

from tests.parity.growth import BESIDE, measure

LIMITS = {"fp32": 1e-5, "fp64": 1e-10}


def test_rounding_is_measured_in_both_precisions_beside_both_runs(tmp_path: Path) -> None:
    grown = list(measure(tmp_path, steps=(2, 20), rates=(5e-3,)))
    assert [(precision, name) for precision, _, name, _ in grown] == [(p, n) for p in LIMITS for n in BESIDE]
    for precision, _, _, distances in grown:
        assert len(distances) == 2
        assert distances[0] <= distances[1] < LIMITS[precision]
    assert max(distances[1] for *_, distances in grown) > 0, "the runs do not sum in the same order"
