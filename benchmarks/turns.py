"""Variants measured in turn: their processes, their order, medians and ratios over rounds, a table."""

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

# else glibc gives large tensors back to the kernel when they are freed, and pays the page faults again
KEEP = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**36), "MALLOC_TOP_PAD_": str(2**26)}
Prepared = tuple[dict[str, Any], Callable[..., dict[str, Any]]]
"""Facts about a variant, and the function that answers questions to it."""


class Child:
    """The process of a variant, which ends with the `with` block. `prepare(*arguments)` runs in it."""

    def __init__(self, name: str, prepare: Callable[..., Prepared], *arguments: Any):
        context = multiprocessing.get_context("spawn")
        self._name = name
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, prepare, arguments))
        self._process.start()
        theirs.close()

    def __enter__(self) -> Child:
        self.facts = self._receive()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.join()

    def ask(self, *question: Any) -> dict[str, Any]:
        self._pipe.send(question)
        return self._receive()

    def _receive(self) -> dict[str, Any]:
        answer: dict[str, Any] = self._pipe.recv()
        if "error" in answer:
            raise RuntimeError(f"{self._name}: {answer['error']}")
        return answer


def _serve(pipe: Connection, prepare: Callable[..., Prepared], arguments: Sequence[Any]) -> None:
    """In a child: send the facts, then the answer to each question; an error goes to the parent as text."""
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
    """The names in an order drawn anew in each round."""
    order, rng = list(names), random.Random(seed)
    for _ in range(rounds):
        rng.shuffle(order)
        yield list(order)


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """By round."""
    return [a / b for a, b in zip(over, under, strict=True)]


def with_range(values: Mapping[str, float], digits: int) -> str:
    return "{median:.{d}f} ({min:.{d}f}-{max:.{d}f})".format(**values, d=digits)


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The lines of a table."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
