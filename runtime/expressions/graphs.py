"""Constants computed while torch.compile traces: texts that are the same in each call of a graph."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def constant_in_graphs(function: Function) -> Function:
    """Let torch.compile call a function of constants at trace time instead of tracing it.

    Like ``torch.compiler.assume_constant_result``, which would import the compiler and take a second.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_in_graphs
def json_text(value: Any) -> str:
    """A value as JSON."""
    return json.dumps(value)


def constant(number: int) -> int:
    """A number; while torch.compile traces, a number for which the graph is specialized."""
    return range(number).stop if torch.compiler.is_dynamo_compiling() else number
