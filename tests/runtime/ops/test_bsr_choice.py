"""Which kernel computes a product: narrow tiles for few columns, and none without a receipt if another has one."""

from __future__ import annotations

import re
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from codegen.library import NamedSpec  # noqa: E402
from codegen.spec import BsrSpmmSpec  # noqa: E402
from runtime import explain_matmul  # noqa: E402
from runtime.ops import bsr_choice  # noqa: E402
from runtime.ops.bsr_choice import Product  # noqa: E402


def product(block: int, width: int, **changes: Any) -> Product:
    rows, columns = 14336, 4096
    stored = rows // block * (columns // block) // 2
    fields: dict[str, Any] = {"evenness": 1.1, "ordered": True, "by_columns": True, **changes}
    return Product("bsr_spmm", "sm_90a", "NVIDIA H200", "bf16", (block, block), rows, columns, width, stored, **fields)


@pytest.fixture(autouse=True)
def _forget() -> Any:
    bsr_choice.resolve.cache_clear()
    yield
    bsr_choice.resolve.cache_clear()


def chosen(block: int, width: int, **changes: Any) -> BsrSpmmSpec:
    spec = bsr_choice.resolve(product(block, width, **changes)).choice.spec
    assert isinstance(spec, BsrSpmmSpec)
    return spec


@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_few_columns_take_narrow_tiles(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bsr_choice.permit, "is_verified", lambda named: True)
    for width in (12, 16, 32, 64):
        spec = chosen(block, width)
        assert spec.b_layout == "column_major" and spec.tile.n <= 64
        assert (spec.mma, spec.copy_) == (("wgmma", "tma") if block >= 64 else ("mma", "ld_global"))
    assert chosen(block, 1024).tile.n >= 128, "wider products take wider tiles"


def test_a_shipped_kernel_without_a_receipt_gives_way_to_one_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_verified(named: NamedSpec) -> bool:
        return named.is_shipped and "column_major_n" not in named.stem

    monkeypatch.setattr(bsr_choice.permit, "is_verified", is_verified)
    found = bsr_choice.resolve(product(128, 64)).choice
    assert found.spec.tile.n == 256 and "was skipped because it has no receipt" in found.reason
    # No kernel of this layout has a receipt: the unverified one is chosen, as explain_matmul says.
    assert chosen(16, 64).mma == "mma"


@pytest.mark.parametrize(
    ("block", "stored", "tokens", "by_columns", "faster"),
    [(32, 96, 4096, False, True), (32, 8, 4096, False, False), (16, 128, 128, True, True), (64, 8, 1024, True, False)],
)
def test_the_explanation_has_both_figures_where_a_dense_product_is_faster(
    block: int, stored: int, tokens: int, by_columns: bool, faster: bool
) -> None:
    """Of the measured matrices, the one of similar density decides, and the line names it."""
    rows = columns = 4096
    crow = torch.arange(rows // block + 1, dtype=torch.int32) * stored
    col = torch.arange(stored, dtype=torch.int32).repeat(rows // block)
    values = torch.zeros(len(col), block, block).half()
    a = torch.sparse_bsr_tensor(crow, col, values, size=(rows, columns), check_invariants=False)
    b = torch.zeros(tokens, columns).half().mT if by_columns else torch.zeros(columns, tokens).half()
    (line,) = (each for each in str(explain_matmul(a, b, arch="sm_90a")).splitlines() if "dense product" in each)
    figures = rf": cuBLAS, dense [\d.]+ us \(the measured kernel [\d.]+ us\), for bsr_spmm, blocks {block} x {block}, "
    assert bool(re.search(figures, line)) == faster, line
    assert ("no measured row near has a faster one" in line) != faster, line
