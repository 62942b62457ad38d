"""No function has more than a few ways through it, those that its conditions and comprehensions make counted too."""

from __future__ import annotations

import ast
from pathlib import Path

from each import for_each

PROJECT = Path(__file__).resolve().parents[2]
PACKAGES = ("codegen", "runtime", "sparse_kernel_codegen")
MODULES = sorted(path for folder in PACKAGES for path in (PROJECT / folder).rglob("*.py"))
MOST = 20
# ruff counts statements (C901); a plan can be one statement with dozens of conditional expressions.
ONE_MORE = (ast.If, ast.IfExp, ast.For, ast.While, ast.ExceptHandler, ast.Assert, ast.match_case, ast.Lambda)


def complexity(function: ast.AST) -> int:
    """Cyclomatic complexity as McCabe has it: one, and one more for each place where the way divides."""
    total = 1
    for node in ast.walk(function):
        if isinstance(node, ONE_MORE):
            total += 1
        elif isinstance(node, ast.BoolOp):
            total += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            total += 1 + len(node.ifs)
    return total


def test_ways_are_counted() -> None:
    text = "def f(x):\n  if x and x > 1 or not x: return [y for y in x if y]\n  return 1 if x else 2"
    assert complexity(ast.parse(text).body[0]) == 1 + 1 + 2 + 2 + 1


@for_each("path", lambda: MODULES, lambda path: path.relative_to(PROJECT).as_posix())
def test_no_function_has_too_many_ways_through_it(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = {node.name: complexity(node) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert not {name: ways for name, ways in found.items() if ways > MOST}
