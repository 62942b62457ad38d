"""Which kernel computes a product: narrow tiles for few columns, and none without a receipt if another has one."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from codegen.library import NamedSpec
from codegen.spec import BsrSpmmSpec
from runtime.ops import bsr_choice
from runtime.ops.bsr_choice import Product


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
