"""Variants measured in turn: their processes, their order, medians and ratios over rounds, a table."""

from __future__ import annotations

import contextlib
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
ENDING_S = 10.0  # that a process has to end by itself
Answer = Callable[..., dict[str, Any]]


class Child:
    """The process of a variant, which has told its facts."""

    def __init__(self, name: str, run: Callable[..., None], *arguments: Any):
        context = multiprocessing.get_context("spawn")
        self._name = name
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=run, args=(*arguments, theirs))
        self._process.start()
        theirs.close()

    def receive(self) -> dict[str, Any]:
        answer: dict[str, Any] = self._pipe.recv()
        if "error" in answer:
            raise RuntimeError(f"{self._name}: {answer['error']}")
        return answer

    def ask(self, *question: Any) -> dict[str, Any]:
        self._pipe.send(question)
        return self.receive()

    def quit(self) -> None:
        """Ask it to end."""
        self._pipe.send(None)

    def end(self, seconds: float) -> None:
        self._process.join(seconds)
        if self._process.is_alive():
            self._process.terminate()


@contextlib.contextmanager
def children() -> Iterator[Callable[..., Child]]:
    """What starts Children, all of which end with the block."""
    started: list[Child] = []
    seconds = 0.0  # after an error they end at once

    def start(name: str, run: Callable[..., None], *arguments: Any) -> Child:
        started.append(Child(name, run, *arguments))
        return started[-1]

    try:
        yield start
        for child in started:
            child.quit()
        seconds = ENDING_S
    finally:
        for child in started:
            child.end(seconds)


@contextlib.contextmanager
def telling_errors(pipe: Connection) -> Iterator[None]:
    """In a child: an error in the block goes to the parent."""
    warnings.simplefilter("ignore")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        yield
    except Exception as error:
        pipe.send({"error": f"{type(error).__name__}: {error}"[:2000]})


def serve(facts: dict[str, Any], answer: Answer, pipe: Connection) -> None:
    """In a child: tell `facts`, then answer until the parent asks it to end."""
    pipe.send(facts)
    while (question := pipe.recv()) is not None:
        pipe.send(answer(*question))


@contextlib.contextmanager
def variables(extra: Mapping[str, str]) -> Iterator[None]:
    """Environment of a child; its libc reads it when it starts."""
    before = dict(os.environ)
    os.environ.update(extra)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


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
