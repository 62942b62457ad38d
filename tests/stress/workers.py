"""Processes that do one task after another, of which each may fail, hang or kill its process: the others go on."""

from __future__ import annotations

import multiprocessing
import queue
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

Work = Callable[[Any], Any]
# A process that another thread forks meanwhile would inherit the far end of the pipe, which then never ends: a process
# that died would seem to hang.
_ONE_START = threading.Lock()


@dataclass(frozen=True)
class Answer:
    """What became of a task.

    Attributes:
        task: the task.
        found: what the work returned; None if it did not return.
        failure: how it ended otherwise (a traceback, ``hung`` or ``died``), or "".
    """

    task: Any
    found: Any
    failure: str = ""


def _serve(connection: Connection, work: Work) -> None:
    """Do what is asked for until nobody asks; an exception ends the process, as CUDA may be of no use after it."""
    with suppress(EOFError):
        while True:
            task = connection.recv()
            try:
                answer = Answer(task, work(task))
            except BaseException:
                connection.send(Answer(task, None, traceback.format_exc()))
                return
            connection.send(answer)


class _Worker:
    """A process that is started when there is something to do, and anew after a failure."""

    def __init__(self, work: Work, patience: float, start_method: str) -> None:
        self._work, self._patience = work, patience
        self._context: Any = multiprocessing.get_context(start_method)
        self._process: Any = None
        self._connection: Any = None

    def do(self, task: Any) -> Answer:
        """Do a task; it fails if that takes longer than there is patience for, or ends the process."""
        if self._process is None:
            with _ONE_START:
                self._connection, theirs = self._context.Pipe()
                self._process = self._context.Process(target=_serve, args=(theirs, self._work), daemon=True)
                self._process.start()
                theirs.close()
        try:
            self._connection.send(task)
            if self._connection.poll(self._patience):
                answer: Answer = self._connection.recv()
            else:
                answer = Answer(task, None, f"hung: no answer within {self._patience:g} s")
        except (EOFError, OSError):
            self._process.join(10)
            answer = Answer(task, None, f"died: the process ended with exit code {self._process.exitcode}")
        if answer.failure:
            self.stop()
        return answer

    def stop(self) -> None:
        """End the process, whatever it does."""
        if self._process is not None:
            self._connection.close()
            self._process.kill()
            self._process.join(60)
            self._process = None


def answers(
    tasks: Iterable[Any], work: Work, jobs: int, patience: float, start_method: str = "spawn"
) -> Iterator[Answer]:
    """Yield what becomes of each task, in the order in which they end.

    Args:
        tasks: can be pickled, as can what the work returns of them.
        work: a function that the processes import.
        jobs: how many processes.
        patience: seconds that a task may take; the first one of a process includes its start.
        start_method: of multiprocessing; ``spawn`` where CUDA is used.
    """
    waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
    ended: queue.SimpleQueue[Answer] = queue.SimpleQueue()
    count = 0
    for task in tasks:
        waiting.put(task)
        count += 1

    def run() -> None:
        worker = _Worker(work, patience, start_method)
        with suppress(queue.Empty):
            while True:
                ended.put(worker.do(waiting.get_nowait()))
        worker.stop()

    threads = [threading.Thread(target=run, daemon=True) for _ in range(min(jobs, count))]
    for thread in threads:
        thread.start()
    for _ in range(count):
        yield ended.get()
    for thread in threads:
        thread.join()
