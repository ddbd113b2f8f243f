"""Lines of several ranks become one stream: copies once, order kept, floods counted."""

from __future__ import annotations

import random

import pytest

from launcher.watch.merge_lines import WAIT_S, WINDOW_LINES, WINDOW_S, Collapser, name_ranks


def test_what_all_say_is_said_once_and_at_once() -> None:
    merged = Collapser(4)
    for rank in range(3):
        merged.add(rank, "warning: old", 0.0)
    assert merged.release(0.1) == []
    merged.add(3, "warning: old", 0.2)
    assert merged.release(0.2) == ["warning: old (x4)"]


def test_what_some_say_waits_and_names_them() -> None:
    merged = Collapser(4)
    merged.add(0, "mine", 0.0)
    merged.add(2, "theirs", 0.0)
    merged.add(1, "theirs", 0.1)
    merged.add(0, "some", 0.1)
    merged.add(2, "some", 0.1)
    assert merged.release(WAIT_S / 2) == []
    assert merged.release(WAIT_S + 0.1) == ["mine", "[ranks 1-2] theirs", "[ranks 0,2] some"]


def test_a_late_copy_stands_for_itself() -> None:
    merged = Collapser(2)
    merged.add(0, "late", 0.0)
    assert merged.release(1.0) == ["late"]
    merged.add(1, "late", 1.0)
    assert merged.release(2.0) == ["[rank 1] late"]


def test_a_lone_rank_has_neither_prefix_nor_count() -> None:
    merged = Collapser(1)
    merged.add(0, "alone", 0.0)
    merged.add(0, "", 0.0)
    merged.add(0, "alone", 0.0)
    assert merged.release(0.0) == ["alone", "alone"]


def test_copies_do_not_turn_a_ranks_order_around() -> None:
    merged = Collapser(2)
    for rank, line in ((0, "a"), (0, "b"), (1, "b"), (1, "a")):
        merged.add(rank, line, 0.0)
    assert merged.release(1.0) == ["a", "b (x2)", "[rank 1] a"]


@pytest.mark.parametrize("seed", range(20))
def test_every_rank_is_heard_in_its_order(seed: int) -> None:
    """What is shown, taken apart again, is exactly what each rank said."""
    chance, ranks = random.Random(seed), 3
    said: dict[int, list[str]] = {rank: [] for rank in range(ranks)}
    merged, shown, now = Collapser(ranks), [], 0.0
    for _ in range(150):
        rank = chance.randrange(ranks)
        line = chance.choice("abcd")
        said[rank].append(line)
        merged.add(rank, line, now)
        now += chance.choice([0.0, 0.0, 0.3])
        shown += merged.release(now)
    shown += merged.release(now, everything=True)
    heard: dict[int, list[str]] = {rank: [] for rank in range(ranks)}
    for text in shown:
        names, line = {0}, text
        if text.endswith(f" (x{ranks})"):
            names, line = set(range(ranks)), text[0]
        elif text.startswith("["):
            listed, _, line = text[1:].partition("] ")
            names = next(set(n) for n in ({1}, {2}, {0, 1}, {0, 2}, {1, 2}) if name_ranks(n) == listed)
        for rank in names:
            heard[rank].append(line)
    assert heard == said


def test_a_flood_is_counted() -> None:
    merged = Collapser(4)
    for number in range(WINDOW_LINES + 12_034):
        merged.add(3, f"line {number}", 0.0)
    merged.add(0, "still heard", 0.1)
    shown = merged.release(1.0)
    assert len(shown) == WINDOW_LINES + 1
    assert shown[-1] == "still heard"
    assert merged.release(WINDOW_S - 1) == []
    assert merged.release(WINDOW_S) == ["rank 3: 12,034 more lines, see logs/rank-3.log"]
    merged.add(3, "quiet again", WINDOW_S)
    assert merged.release(WINDOW_S + 1) == ["[rank 3] quiet again"]
    assert merged.release(10 * WINDOW_S, everything=True) == []


def test_lines_that_were_not_read_are_counted_too() -> None:
    merged = Collapser(1)
    merged.count(0, 1, 0.0)
    assert merged.release(0.0, everything=True) == ["rank 0: 1 more line, see logs/rank-0.log"]


def test_a_flood_of_all_ranks_is_bounded_and_dropped_on_demand() -> None:
    merged = Collapser(8)
    for number in range(5_000):
        for rank in range(8):
            merged.add(rank, f"{rank} {number}", 0.0)
    assert len(merged._held) == 8 * WINDOW_LINES
    merged.drop()
    assert merged.release(99.0, everything=True) == []


def test_our_own_line_keeps_its_place() -> None:
    merged = Collapser(2)
    merged.add(0, "ready", 0.0)
    merged.note("step 1", 0.1)
    assert merged.release(0.2) == []
    assert merged.release(WAIT_S) == ["ready", "step 1"]
    merged.note("step 2", 1.0)
    assert merged.release(1.0) == ["step 2"]


def test_names_of_ranks() -> None:
    assert name_ranks([2]) == "rank 2"
    assert name_ranks([3, 1, 2]) == "ranks 1-3"
    assert name_ranks([0, 2, 3, 5]) == "ranks 0,2-3,5"
