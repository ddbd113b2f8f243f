"""Several processes that answer, each with a model and threads of its own."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import queue
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from bert_dp.rank_process import RunFailed, follow_launcher

CLEANING_S = 5.0  # that a process has to end by itself
Answer = Callable[[Any], Any]
Wait = Callable[[], Any]
"""For an answer, or its error."""
Submit = Callable[[Any], Wait]
"""A question on its way."""


@contextlib.contextmanager
def answering(open_answer: Callable[[], Answer], instances: int) -> Iterator[Submit]:
    """What asks whichever of so many processes is idle; one is this process itself, which answers when it is
    waited for. Each calls `open_answer`, which can be pickled, before its first answer.

    At the end of the block, by when all answers were waited for, the processes end; after an error at once.
    """
    if instances == 1:
        answer = open_answer()
        yield lambda question: functools.partial(answer, question)
        return
    idle: queue.SimpleQueue[tuple[BaseProcess, Connection]] = queue.SimpleQueue()
    started = [start(open_answer) for _ in range(instances)]
    for pair in started:
        idle.put(pair)

    def ask(question: Any) -> Any:
        process, connection = idle.get()
        try:
            connection.send(question)
            result = connection.recv()
        except (EOFError, OSError):
            process.join(1)
            raise RunFailed(
                f"an instance has ended (exit code {process.exitcode}); fewer need less memory", "error"
            ) from None
        finally:
            idle.put((process, connection))
        if isinstance(result, Exception):
            raise result
        return result

    with ThreadPoolExecutor(instances) as threads:
        try:
            yield lambda question: threads.submit(ask, question).result
            for _, connection in started:
                connection.close()
            for process, _ in started:
                process.join(CLEANING_S)
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
            for process, _ in started:
                process.terminate()


def start(open_answer: Callable[[], Answer]) -> tuple[BaseProcess, Connection]:
    """A process and our end of its pipe. Ctrl-C, which reaches it too, is left to us."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, open_answer), daemon=True)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    theirs.close()
    return process, ours


def serve(connection: Connection, open_answer: Callable[[], Answer]) -> None:
    """Answer until the other end is closed. An error is sent in place of an answer."""
    follow_launcher()
    answer: Answer | None = None
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            question = connection.recv()
            try:
                answer = answer or open_answer()
                result = answer(question)
            except Exception as error:
                result = error
            connection.send(result)
