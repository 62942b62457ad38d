"""The snippets of docs/guide/integrations.md run on the CPU, with kernels that compute by the definition."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import oracle_kernel  # noqa: E402
import packed_kernel  # noqa: E402
import selection_oracle  # noqa: E402
import snippets  # noqa: E402

from runtime.integrations import choosers  # noqa: E402

PAGE = snippets.PROJECT / "docs" / "guide" / "integrations.md"
TEXT = PAGE.read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## ([^\n]*)\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL))
NEEDED = {"transformers": "transformers", "diffusers": "diffusers"}


def snippet(section: str) -> str:
    """Return the Python of a section, on the CPU."""
    fences = snippets.fences(PAGE, SECTIONS[section])
    return "".join(fence.text for fence in fences if fence.language == "python").replace('"cuda"', '"cpu"')


@pytest.fixture(autouse=True)
def loaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(choosers, "select_topk_blocks", selection_oracle.select)
    padded = oracle_kernel.install(monkeypatch)
    yield padded, packed_kernel.install(monkeypatch)


def test_all_sections_but_the_last_have_python() -> None:
    assert [name for name in SECTIONS if not snippet(name)] == ["Measured"]


@pytest.mark.parametrize("section", [name for name in SECTIONS if snippet(name)])
def test_a_section_runs(section: str, loaded: Any) -> None:
    needed = NEEDED.get(section.rpartition(" ")[2])
    if needed is not None:
        pytest.importorskip(needed)
    names: dict[str, Any] = {}
    exec(compile(snippet(section), section, "exec"), names)
    padded, packed = loaded
    assert sum(kernel.calls for kernel in padded.values()) + sum(len(kernel.calls) for kernel in packed.values()) > 0
    assert names.keys() & {"logits", "out", "noise"}
