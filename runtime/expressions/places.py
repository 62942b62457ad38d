"""Source locations in a user's function."""

from __future__ import annotations

import functools
import inspect
import linecache
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch

import codegen
from codegen.errors import MOST_OF_MESSAGE, MOST_OF_PLACE
from codegen.wording import one_line
from runtime.errors import ArgumentError

_NOT_THE_USERS = tuple(f"{Path(str(each)).parent}{os.sep}" for each in (__file__, codegen.__file__, torch.__file__))


def users_frames(caller: CodeType) -> Iterator[FrameType]:
    """Yield the frames of user code, innermost first, in the call that ``caller`` makes."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not caller:
        if _is_the_users(frame.f_code):
            yield frame
        frame = frame.f_back


def _is_the_users(code: CodeType) -> bool:
    return not code.co_filename.startswith(_NOT_THE_USERS)


def line_of_frame(frame: FrameType) -> str:
    """File, line number and source line of a frame."""
    return _line(frame.f_code.co_filename, frame.f_lineno)


def line_of_error(error: BaseException) -> str:
    """Innermost line of user code in an error's traceback; "" for none."""
    found, trace = "", error.__traceback__
    while isinstance(trace, TracebackType):
        if _is_the_users(trace.tb_frame.f_code):
            found = _line(trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        trace = trace.tb_next
    return found


def line_of_function(function: Any) -> str:
    """Location of a function's definition; "" without source."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    called = function if hasattr(function, "__code__") else vars(type(function)).get("__call__")
    code = getattr(called, "__code__", None)
    return _line(code.co_filename, code.co_firstlineno) if isinstance(code, CodeType) else ""


def _line(file: str, line: int) -> str:
    text = linecache.getline(file, line).strip()
    return f"{one_line(file, MOST_OF_PLACE)}:{line}" + (f" ({one_line(text)})" if text else "")


def refused(argument: str, place: str, what: str) -> ArgumentError:
    """Error that names the function, the line, the operation and a remedy."""
    return ArgumentError(argument, one_line(f"{place}: {what}" if place else what, MOST_OF_MESSAGE))
