"""The benchmark of products with few columns, as far as it goes without a GPU: its kernels, checks and table."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from scripts import imported

from codegen.spec import BsrSpmmSpec

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with imported("few_columns") as module:
        yield module


def test_each_layer_has_a_kernel_for_its_blocks(script: ModuleType) -> None:
    for layer in script.LAYERS:
        for columns in script.COLUMNS:
            (named,) = script.kernels_for(layer, columns, ())
            assert isinstance(named.spec, BsrSpmmSpec)
            assert (named.spec.block.rows, named.spec.block.cols) == (layer.block, layer.block)
    named = script.kernels_for(script.LAYERS[0], 16, ["h100_bsr_spmm_b128_n16", "h100_bsr_spmm_b16_n16", "h100_dense"])
    assert [each.stem for each in named] == ["h100_bsr_spmm_b128_n16"]


def operands(script: ModuleType) -> Any:
    found = script.Operands.__new__(script.Operands)
    found.exact = torch.tensor([[1.0, 2.0]])
    found.out = [torch.zeros((1, 2))]
    return found


def test_a_wrong_result_gets_no_time(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "graph_microseconds", lambda calls: float(len(calls)))
    right = operands(script)
    assert script.times_of(right, [right.exact.clone], compare=True) == {
        script.COLD: 1.0,
        script.WARM: script.WARM_CALLS,
    }
    with pytest.raises(ValueError, match=r"wrong result: off by 5\.0e-01 of the largest element"):
        script.times_of(right, [lambda: right.exact - 1], compare=True)
    with pytest.raises(ValueError, match="wrong result: off by nan"):  # what was not written
        script.times_of(right, [lambda: right.out[0]], compare=True)


def test_the_table_says_what_a_row_should_take(script: ModuleType) -> None:
    layer = script.Layer(4096, 4096, 16, 0.3)
    assert layer.stored_bytes == 256 * 77 * 512 and layer.name == "4096 x 4096, blocks of 16, 30%"
    record = {"layer": layer.name, "columns": 16, "stored_bytes": 11e6, "share": 0.55, "failed": {}}
    results = {"ours": {script.COLD: 8.0, script.WARM: 6.04}}
    report = {
        **{"device": "a GPU", "driver": "1", "versions": {"torch": "2"}, "date": "today", "launch_us": 4.0},
        **{"copy_bytes_per_us": 2e6, "rows": [record | {"results": results}]},
    }
    assert "| 4096 x 4096, blocks of 16, 30% | 16 | 14.0 | 8.0 (6.0) |" in script.page.table(report)
    assert script.page.table(None) == script.page.UNMEASURED
