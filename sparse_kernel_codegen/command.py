"""Entry point of the ``codegen`` command."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
from typing import Any, NoReturn

INTERRUPTED = 130
"""The exit code of a command that Ctrl-C ended, as shells give it."""


class _CtrlC:
    """What is done with SIGINT, from the first import to the end of the process."""

    def __init__(self) -> None:
        self.came = False

    def listen(self) -> None:
        """Take SIGINT, unless it is ignored, as of a command in the background."""
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._raise)
            sys.unraisablehook = self._unraisable
            # Runs as the last one: what is left then has no Python to run a handler with, and the command is done.
            atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)

    def _raise(self, *_: Any) -> NoReturn:
        self.came = True
        raise KeyboardInterrupt

    def _unraisable(self, found: Any) -> None:
        # Raised where nothing catches it, as in a finalizer: the command goes on to its end, and then has this status.
        if not isinstance(found.exc_value, KeyboardInterrupt):
            sys.__unraisablehook__(found)

    def last(self) -> None:
        """Leave at once from here on: threads are waited for, and nothing catches an exception."""
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._leave)

    def _leave(self, *_: Any) -> NoReturn:
        _say("" if self.came else "interrupted")
        os._exit(INTERRUPTED)


def main() -> None:
    """Run the command line. Ctrl-C ends it with one line and status 130 at any moment."""
    ctrl_c = _CtrlC()
    ctrl_c.listen()
    status: Any = INTERRUPTED
    line = "interrupted"
    try:
        _run()
    except SystemExit as error:
        status = error.code
        line = "" if status == INTERRUPTED else line  # the command line has told it
    except BaseException:
        if not ctrl_c.came:  # else another error that it became
            raise
    ctrl_c.last()
    if ctrl_c.came:
        _say(line)
        status = INTERRUPTED
    raise SystemExit(_flushed(status))


def _say(line: str) -> None:
    """Write a line to standard error, which may be closed."""
    if line:
        with contextlib.suppress(OSError):
            os.write(2, f"{line}\n".encode())


def _flushed(status: Any) -> Any:
    """Write out what is left of standard output, and return the exit code: another one where that fails."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else it is tried again at the end, with a traceback
        if not status:
            _say(f"error: standard output: {error.strerror}")
            return 2
    return status


def _run() -> None:
    # Ctrl-C while these are imported is one line too
    from sparse_kernel_codegen._names import foreign  # noqa: PLC0415

    if (error := foreign()) is not None:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(2)
    from runtime.cli import main as run  # noqa: PLC0415 - not before the names are known to be ours

    run()
