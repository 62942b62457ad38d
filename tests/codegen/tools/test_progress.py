"""What commands tell while they run, and what is left of it when they end early."""

from __future__ import annotations

import io
import json
import sys
import threading

import pytest
import typer

from codegen.tools import progress
from codegen.tools.report import report


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_takes_less_than_two_seconds_tells_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert progress.FIRST == 2.0
    assert list(progress.steps("counting", range(3), str)) == [0, 1, 2]
    assert capsys.readouterr() == ("", "")


def test_what_takes_longer_tells_what_it_is_at(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "FIRST", 0.01)
    told = threading.Event()
    write = sys.stderr.write
    monkeypatch.setattr(sys.stderr, "write", lambda text: (write(text), told.set())[0])
    for item in progress.steps("counting", range(3), lambda item: f"number {item}"):
        if item == 1:
            told.clear()
            monkeypatch.setattr(progress, "EVERY", 0.01)
            assert told.wait(30)
    captured = capsys.readouterr()
    assert captured.out == "" and "counting 2 of 3: number 1 (0 s)\n" in captured.err


def test_a_terminal_has_a_bar_that_goes_away(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    for item in progress.steps("counting", range(2), lambda item: f"number {item}"):
        sys.stdout.write(f"row {item}\n")
    assert capsys.readouterr().out == "row 0\nrow 1\n"  # a pipe, which the bar leaves alone
    assert "counting" in terminal.getvalue() and "\x1b[2K" in terminal.getvalue()


@pytest.mark.parametrize("ending", [None, KeyboardInterrupt(), RuntimeError("a defect"), typer.Exit(1)])
def test_a_report_is_printed_whatever_ends_it(ending: BaseException | None, capsys: pytest.CaptureFixture[str]) -> None:
    def use() -> None:
        with report(as_json=True) as told:
            told.row({"name": "first"}, "the first")
            told.note("total", 1, "one in all")
            told.say("that is all")
            if ending is not None:
                raise ending

    if ending is None:
        use()
    else:
        with pytest.raises(type(ending)):
            use()
    whole = ending is None or isinstance(ending, typer.Exit)
    assert json.loads(capsys.readouterr().out) == {"complete": whole, "rows": [{"name": "first"}], "total": 1}


def test_the_progress_of_a_report_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever holds the error holds the loop's frame too."""
    before = set(threading.enumerate())  # those of earlier tests may end at any time
    with pytest.raises(KeyboardInterrupt) as caught, report(as_json=False) as told:
        for _ in told.steps("counting", range(3), str):
            assert len(set(threading.enumerate()) - before) == 1
            raise KeyboardInterrupt
    assert caught.value and not set(threading.enumerate()) - before


def test_rows_are_printed_as_they_come(capsys: pytest.CaptureFixture[str]) -> None:
    with report(as_json=False) as told:
        told.row({"name": "first"}, "the first")
        assert capsys.readouterr().out == "the first\n"
        told.note("total", 1, "one in all")
    assert capsys.readouterr().out == "one in all\n"
