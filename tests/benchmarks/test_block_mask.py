"""The benchmark of block lists, as far as it goes without a GPU: its masks, its table."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from scripts import imported

torch = pytest.importorskip("torch")

from codegen.patterns.block_lists import expression_of  # noqa: E402
from runtime.expressions.masks import mask_of  # noqa: E402
from runtime.patterns import BlockLists  # noqa: E402
from runtime.verify.block_mask import lists_of, seen_pairs  # noqa: E402


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with imported("block_mask") as module:
        yield module


def test_texts_and_functions_are_the_same_masks(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, small in (("WINDOW", 100), ("PREFIX", 300), ("WIDTH", 32)):
        monkeypatch.setattr(script, name, small)
    length, place = 1024, torch.arange(1024)
    doc = script.documents_of(length, "cpu")
    assert len(doc.unique()) == script.DOCUMENTS
    for mask in script.MASKS.values():
        text = mask.text.replace("4096", "100").replace("3000", "300").replace("256", "32").replace("249", "25")
        found = mask_of(text, {"doc": doc} if "doc" in text else None)
        sizes = {"batch": 1, "heads": 1, "q_len": length, "kv_len": length}
        seen = seen_pairs(expression_of(found.text, found.declared), sizes, found.tensors, torch.device("cpu"))
        assert torch.equal(seen[0, 0], mask.sees(length, doc)(0, 0, place[:, None], place[None, :]))


def test_lists_that_differ_are_told(script: ModuleType) -> None:
    def listed(seen: Any) -> BlockLists:
        return BlockLists(*lists_of(seen, (64, 64)))

    seen = torch.ones(1, 1, 256, 256, dtype=torch.bool).tril()
    other = seen.clone()
    other[..., 0, 200] = True
    assert script.differences(listed(seen), listed(seen)) == 0
    assert script.differences(listed(seen), listed(other)) == 1


def test_the_table(script: ModuleType) -> None:
    times = {"milliseconds": 0.05, "back_to_back_milliseconds": 0.06}
    record = {"name": "S1", "partial": 3, "full": 4, "results": {script.OURS: times}, "failed": {}}
    rows = script.table_rows({"rows": [record]})
    assert rows == [["S1", "3 partial, 4 full", script.OURS, "50.0 / 60.0"]]
