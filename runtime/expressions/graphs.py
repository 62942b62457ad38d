"""Constants of torch.compile, worked out while it traces: texts, which are the same in each call of a graph."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def constant_in_graphs(function: Function) -> Function:
    """Let torch.compile call a function of constants while it traces, in place of tracing it.

    As ``torch.compiler.assume_constant_result`` does, which imports the compiler, a second long.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_in_graphs
def json_text(value: Any) -> str:
    """Return a value as JSON."""
    return json.dumps(value)


def constant(number: int) -> int:
    """Return a number; while torch.compile traces, one that its graph is made for."""
    return range(number).stop if torch.compiler.is_dynamo_compiling() else number
