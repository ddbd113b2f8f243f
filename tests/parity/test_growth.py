"""Test the table of growing rounding differences at a tenth of its length."""

from pathlib import Path

from tests.parity.growth import COMPARED, measure

LIMITS = {"fp32": 1e-5, "fp64": 1e-10}


def test_rounding_differences_grow_within_limits_in_both_precisions(tmp_path: Path) -> None:
    grown = list(measure(tmp_path, steps=(2, 20), rates=(5e-3,)))
    assert [(p, name) for p, _, name, _ in grown] == [(p, name) for p in LIMITS for name in COMPARED]
    for precision, _, _, differences in grown:
        assert len(differences) == 2
        assert differences[0] <= differences[1] < LIMITS[precision]
    assert max(differences[1] for *_, differences in grown) > 0, "all runs sum in the same order"
