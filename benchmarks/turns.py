"""Run variants alternately in separate processes; compute medians and ratios over rounds; format tables."""

from __future__ import annotations

import multiprocessing
import os
import random
import statistics
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

# without these, glibc returns freed large tensors to the kernel and pays page faults for new ones
KEEP = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**36), "MALLOC_TOP_PAD_": str(2**26)}
Prepared = tuple[dict[str, Any], Callable[..., dict[str, Any]]]
"""Metadata of a variant, and the function that performs one measurement of it."""


class Child:
    """Process of a variant, which runs `prepare(*arguments)` and ends with the `with` block."""

    def __init__(self, name: str, prepare: Callable[..., Prepared], *arguments: Any):
        context = multiprocessing.get_context("spawn")
        self._name = name
        self._pipe, child_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(child_end, prepare, arguments))
        self._process.start()
        child_end.close()

    def __enter__(self) -> Child:
        self.facts = self._receive()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.join()

    def measure(self, *arguments: Any) -> dict[str, Any]:
        """Perform one measurement in the process. Raises RuntimeError with the name if it fails."""
        self._pipe.send(arguments)
        return self._receive()

    def _receive(self) -> dict[str, Any]:
        answer: dict[str, Any] = self._pipe.recv()
        if "error" in answer:
            raise RuntimeError(f"{self._name}: {answer['error']}")
        return answer


def _serve(pipe: Connection, prepare: Callable[..., Prepared], arguments: Sequence[Any]) -> None:
    """In the child, send the metadata, then the result of each measurement; send an error as text."""
    warnings.simplefilter("ignore")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        facts, answer = prepare(*arguments)
        pipe.send(facts)
        while True:
            pipe.send(answer(*pipe.recv()))
    except Exception as error:
        pipe.send({"error": f"{type(error).__name__}: {error}"[:2000]})


def orders(names: Iterable[str], rounds: int, seed: int = 0) -> Iterator[list[str]]:
    """Yield the names for each round, in a new random order."""
    order, rng = list(names), random.Random(seed)
    for _ in range(rounds):
        rng.shuffle(order)
        yield list(order)


def print_progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """Return the ratio of each round."""
    return [a / b for a, b in zip(over, under, strict=True)]


def with_range(values: Mapping[str, float], digits: int) -> str:
    return "{median:.{d}f} ({min:.{d}f}-{max:.{d}f})".format(**values, d=digits)


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
