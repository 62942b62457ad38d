"""Questions of ``codegen new --interactive``, one for each unknown field of a problem."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import typer

from codegen.devices import arch_of
from codegen.errors import CodegenError
from codegen.patterns import PATTERNS, Block
from codegen.select.problem import AttentionProblem, parse_problem
from codegen.tools.new import pattern_fields
from codegen.wording import one_line

Answer = TypeVar("Answer")
HEADS = (64, 96, 128, 192, 256)
SIZES = ("batch", "heads", "kv_heads", "q_len", "kv_len")


def ask(question: str, read: Callable[[str], Answer], default: str = "") -> Answer:
    """Ask until an answer can be parsed; errors are printed, and the question is repeated.

    Raises:
        CodegenError: if the input ends.
    """
    while True:
        typer.echo(f"{question}{f' [{default}]' if default else ''}: ", nl=False, err=True)
        line = sys.stdin.readline()
        if not line:
            typer.echo(err=True)
            raise CodegenError("the input ended before all questions were answered; nothing was written")
        try:
            return read(line.strip() or default)
        except CodegenError as error:
            typer.echo(f"  {error}", err=True)


def ask_device() -> str:
    """Ask for a GPU."""

    def read(text: str) -> str:
        arch_of(text)
        return text

    return ask("Device, such as H100, L4 or RTX 4090", read, "H100")


def ask_head_dim() -> int:
    """Ask for the head dimension."""
    return int(ask(f"Head dimension ({', '.join(map(str, HEADS))})", _number("head_dim", HEADS), "128"))


def ask_pattern(head_dim: int) -> str:
    """Ask for a pattern and its fields; return it in the syntax of ``--pattern``."""

    def read_kind(text: str) -> str:
        if text not in PATTERNS:
            raise CodegenError(f"expected one of {', '.join(PATTERNS)}")
        return text

    while True:
        kind = ask(f"Pattern ({', '.join(PATTERNS)})", read_kind, "causal")
        text = kind
        for name, field in PATTERNS[kind].model_fields.items():
            if name == "kind" or not field.is_required():
                continue
            hint = ", one number if square, in elements" if field.annotation is Block else ""
            text += f",{name}={ask(f'  {name} ({field.description}{hint})', _number(name))}"
        if kind == "topk":
            k = ask("  k (key blocks per query block; if empty, the width of the lists)", _number("k", empty=True))
            text += f",k={k}" if k else ""
        try:
            parse_problem({"op": "attention", "head_dim": head_dim, "pattern": pattern_fields(text)})
        except CodegenError as error:
            typer.echo(f"  {one_line(str(error))}", err=True)
        else:
            return text


def ask_sizes() -> str:
    """Ask for the sizes that decide which kernel is fast; return the known ones in the syntax of ``--problem``."""
    told = {}
    for name in SIZES:
        what = AttentionProblem.model_fields[name].description
        told[name] = ask(f"{name}: {what} (empty if unknown)", _number(name, empty=True))
    return ",".join(f"{name}={value}" for name, value in told.items() if value)


def _number(name: str, allowed: tuple[int, ...] = (), *, empty: bool = False) -> Callable[[str], Any]:
    """A function that parses a number, or None for an empty answer if that is allowed."""

    def read(text: str) -> int | None:
        if not text and empty:
            return None
        if not (text.isascii() and text.isdigit() and len(text) <= 9):
            raise CodegenError(f"{name} must be a number")
        if allowed and int(text) not in allowed:
            raise CodegenError(f"{name} must be one of {', '.join(map(str, allowed))}")
        return int(text)

    return read
