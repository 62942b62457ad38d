"""New tensors of the package do not depend on torch's default dtype: vLLM changes it while it loads a model."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAKERS = {"zeros", "ones", "empty", "empty_strided", "rand", "randn", "linspace"}
"""Functions of torch whose results have the default dtype if none is named."""


def of_default_dtype(text: str) -> Iterator[str]:
    """Calls without a dtype."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        module = node.func.value
        makes = isinstance(module, ast.Name) and module.id == "torch" and node.func.attr in MAKERS
        if makes and "dtype" not in {keyword.arg for keyword in node.keywords}:
            yield ast.unparse(node)


def test_a_call_without_a_dtype_is_found() -> None:
    assert [*of_default_dtype("x = torch.zeros(3, device=d)\ny = torch.empty(2, dtype=t)")] == [
        "torch.zeros(3, device=d)"
    ]


def test_new_tensors_have_a_dtype() -> None:
    files = sorted((ROOT / "runtime").rglob("*.py"))
    found = {
        str(file.relative_to(ROOT)): calls
        for file in files
        if not {"verify", "tools"} & set(file.parts) and (calls := [*of_default_dtype(file.read_text("utf-8"))])
    }
    assert len(files) > 200 and found == {}
