"""The benchmark of masks of bits, as far as it goes without a GPU: its lists and bits, its table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from scripts import imported

from codegen.library import find_spec

torch = pytest.importorskip("torch")

from codegen.patterns import Block  # noqa: E402
from runtime.verify.mask_bits import visible_pairs  # noqa: E402


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with imported("bit_masks") as module:
        yield module


@pytest.mark.parametrize("documents", [1, 6])
def test_lists_and_bits_are_the_mask(script: ModuleType, documents: int) -> None:
    row = script.Row(1024, documents)
    sees = script.mask_mod(row, "cpu")
    counts, partial, full_counts, full, bits = script.lists_of(sees, row.length, "cpu")
    key = torch.arange(row.length)
    expected = sees(0, 0, key[:, None], key[None, :])
    block, blocks = Block(q=128, kv=128), row.length // 128

    def used(lists: Any, counts: Any) -> Any:
        return torch.arange(lists.shape[3]) < counts[..., None]

    of_full = torch.full((*full.shape, 512), -1, dtype=torch.int32)
    found = visible_pairs(bits, partial, used(partial, counts), block, blocks)
    found = found + visible_pairs(of_full, full, used(full, full_counts), block, blocks)
    assert torch.equal(found[0, 0], expected.double())
    assert bits.shape == (*partial.shape, 512) and bits.dtype == partial.dtype == torch.int32
    assert int(full_counts.sum()) > 0 and int(counts.sum()) > (0 if documents == 1 else blocks)


def test_documents_are_uneven_and_the_same_each_time(script: ModuleType) -> None:
    for row in script.CASES:
        lengths = script.document_of(row, "cpu").bincount()
        assert len(lengths) == row.documents and int(lengths.sum()) == row.length
        assert int(lengths.min()) >= script.SHORTEST
        assert row.documents == 1 or lengths.max() > 4 * lengths.min()
    assert len({row.name for row in script.CASES}) == len(script.CASES)


def test_a_result_of_the_mask_is_told_from_another(script: ModuleType) -> None:
    row = script.Row(512, 3)
    sees = script.mask_mod(row, "cpu")
    q, k, v = (torch.randn(1, 2, row.length, script.HEAD_DIM) for _ in range(3))
    key = torch.arange(row.length)
    error = script.error_of(row, sees, q, k, v)
    right = torch.nn.functional.scaled_dot_product_attention(q, k, v, sees(0, 0, key[:, None], key[None, :]))
    wrong = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert error(script.BITS, right) < 1e-5 < 0.1 < error(script.BITS, wrong)
    assert error(script.CAUSAL, wrong) == 0.0  # another mask, by intent


def test_kernels_are_shipped_and_differ_in_the_mask_alone(script: ModuleType) -> None:
    bits, causal = (find_spec(script.KERNELS[label]).spec for label in (script.BITS, script.CAUSAL))
    assert (bits.pattern.mask, causal.pattern.mask) == ("bits", "causal")  # type: ignore[union-attr]
    same = causal.pattern.model_copy(update={"mask": "bits"})  # type: ignore[union-attr]
    assert bits == causal.model_copy(update={"pattern": same})


def test_the_table_compares_with_no_mask(script: ModuleType, tmp_path: Path, capsys: Any) -> None:
    results = {
        label: {"milliseconds": ms, "back_to_back_milliseconds": 2 * ms} for label, ms in (("bits", 1.1), ("none", 1.0))
    }
    row = {"name": "a row", "partial": 3, "full": 4, "results": results, "failed": {"FlexAttention": "no"}}
    report = {"device": "a device", "driver": "580.0", "date": "2030-01-02", "rows": [row]}
    assert script.table_rows(report)[0] == ["a row", "3 partial, 4 full", "bits", "1100.0 / 2200.0", "1.100 / 1.100"]
    file = tmp_path / "bits.json"
    file.write_text(json.dumps(report))
    script.main(["--from", str(file)])
    assert "a row: FlexAttention has no time: no" in capsys.readouterr().out
    del results["none"]
    assert script.table_rows(report)[0][-1] == "- / -"
