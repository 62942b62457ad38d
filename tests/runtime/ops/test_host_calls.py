"""How many Python functions a call enters before the driver, once calls like it were made: what it costs the host."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
from scripts import imported

pytest.importorskip("torch")

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")
MOST = {
    "bsr_matmul, BsrMatrix": 15,
    "bsr_matmul, of a kernel's prepare": 19,
    "bsr_matmul, torch.sparse_bsr": 18,
    "bsr_matmul, transpose_a": 15,
    "bsr_matmul, bias and relu": 15,
    "bsr_matmul, c and beta": 15,
    "bsr_sddmm, BsrMatrix": 17,
    "bsr_sddmm, torch.sparse_bsr": 24,
    "BlockSparseLinear, no_grad": 28,
    "BlockSparseLinear, with gradients": 34,
    "block_sparse_attention": 24,
    "block_sparse_attention, lists": 25,
    "block_sparse_attention, out": 27,
    "block_sparse_attention, sink and lse": 24,
    "block_sparse_attention, a score": 29,
    "block_sparse_attention, a score that reads a tensor": 31,
    "block_sparse_attention, operands in FP8": 27,
}
"""Python functions that a call of benchmarks/host_calls.py enters. A lower count is to be written here; a higher one
costs each call a tenth of a microsecond for each function."""
SPARE = 2
"""A result at another address than the last one takes two functions more; those of torch differ between versions."""


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with imported("host_calls") as module:
        yield module


def test_a_call_like_an_earlier_one_enters_few_functions(script: ModuleType) -> None:
    with script.pretended():
        found = {row.name: script.python_calls(row.call) for row in (*script.products(), *script.attention())}
    assert found.keys() == MOST.keys()
    wrong = {name: count for name, count in found.items() if not MOST[name] - 2 * SPARE <= count <= MOST[name] + SPARE}
    assert not wrong, f"expected {MOST}"


def test_the_table_has_a_row_for_each_call(script: ModuleType) -> None:
    timed = {"python_calls": 20, "us": 6.449}
    report = {
        "rows": [{"name": "a call", "function": timed, "object": {"python_calls": 36, "us": 7.0}}],
        "versions": {"python": "3.11", "torch": "2.9"},
        "processor": "a processor",
        "date": "2030-01-02",
    }
    first, *_, last = script.host_page.calls_table(report).splitlines()
    assert first.endswith("a processor; python 3.11, torch 2.9; 2030-01-02.") and "No GPU" in first
    assert last == "| a call | 20 | 36 | 6.4 | 7.0 |"
    assert script.host_page.calls_table(None) == script.host_page.UNMEASURED
