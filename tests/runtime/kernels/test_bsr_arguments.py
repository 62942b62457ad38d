"""Checks of BSR arguments that need no GPU: every message names the argument, what it was and what is allowed."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.kernels.bsr_arguments import check_prepared

torch = pytest.importorskip("torch")

from codegen.spec import BlockShape  # noqa: E402
from runtime.errors import ArgumentError  # noqa: E402
from runtime.kernels.arguments import call_key  # noqa: E402
from runtime.kernels.bsr_arguments import check_indices, check_structure, check_values  # noqa: E402
from runtime.prepare.matrix import check_layout  # noqa: E402

CPU = torch.device("cpu")
BLOCK = BlockShape(rows=2, cols=4)
pytestmark = [pytest.mark.nvrtc, pytest.mark.filterwarnings("ignore:Sparse BSR tensor support")]


def bsr(crow: list[int], col: list[int], size: tuple[int, int] = (6, 12), dtype: Any = torch.float16) -> Any:
    values = torch.ones(len(col), 2, 4, dtype=dtype)
    indices = (torch.tensor(crow), torch.tensor(col, dtype=torch.int64))
    return torch.sparse_bsr_tensor(*indices, values, size=size, check_invariants=False)


@pytest.mark.parametrize("value", [None, torch.ones(4, 4), torch.ones(4, 4).to_sparse()])
def test_what_is_no_bsr_tensor(value: Any) -> None:
    with pytest.raises(ArgumentError, match=r"pattern: is .*, expected a torch\.sparse_bsr tensor"):
        check_layout("pattern", value)


def test_a_whole_matrix_passes() -> None:
    a = bsr([0, 2, 2, 3], [2, 0, 1])
    check_layout("a", a)
    check_structure("a", a, BLOCK, CPU)
    check_values("a", a, torch.float16)
    check_indices("a", a)


def test_blocks_of_another_shape_or_device() -> None:
    a = bsr([0, 1, 1, 1], [0])
    with pytest.raises(ArgumentError, match=r"a: has blocks of \(2, 4\), this kernel takes \(4, 4\)"):
        check_structure("a", a, BlockShape(rows=4, cols=4), CPU)
    with pytest.raises(ArgumentError, match="a: is on cpu, the other arguments are on meta"):
        check_structure("a", a, BLOCK, torch.device("meta"))


def test_a_matrix_of_more_rows_than_32_bits_can_number() -> None:
    rows = 2**20  # of blocks that are not stored
    parts = (torch.zeros(2**10 + 2, dtype=torch.int32), torch.zeros(0, dtype=torch.int32), torch.zeros(0, rows, 4))
    a = torch.sparse_bsr_tensor(*parts, size=(2**30 + rows, 4), check_invariants=False)
    with pytest.raises(ArgumentError, match=r"a: has shape \(1074790400, 4\), with a dimension above 2\^30"):
        check_structure("a", a, BlockShape.model_construct(rows=rows, cols=4), CPU)


def test_values_of_another_type_or_with_a_gradient() -> None:
    with pytest.raises(ArgumentError, match=r"b: is torch\.float32, this kernel takes torch\.float16"):
        check_values("b", bsr([0, 1, 1, 1], [0], dtype=torch.float32), torch.float16)
    with pytest.raises(ArgumentError, match="b: requires a gradient"):
        check_values("b", bsr([0, 1, 1, 1], [0]).requires_grad_(), torch.float16)


@pytest.mark.parametrize(
    ("crow", "col", "message"),
    [
        ([0, 2, 1, 3], [0, 1, 2], r"b\.crow_indices\(\): must ascend from 0 to the number of stored blocks, 3"),
        ([0, 1, 2, 2], [0, 1, 2], r"b\.crow_indices\(\): must ascend"),
        ([0, 1, 2, 3], [0, 3, 2], r"b\.col_indices\(\): ranges from 0 to 3, allowed: 0 to 2"),
        ([0, 1, 2, 3], [0, -1, 2], r"b\.col_indices\(\): ranges from -1 to 2"),
        ([0, 1, 3, 3], [2, 1, 0], r"b\.col_indices\(\): does not rise in block row 1"),
        ([0, 0, 0, 2], [1, 1], r"b\.col_indices\(\): does not rise in block row 2"),
    ],
)
def test_indices_that_are_wrong(crow: list[int], col: list[int], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        check_indices("b", bsr(crow, col), rising=True)


@pytest.mark.parametrize(("crow", "col"), [([0, 1, 2, 3], [2, 1, 0]), ([0, 0, 3, 3], [0, 1, 2]), ([0, 0, 0, 0], [])])
def test_indices_that_rise_in_each_row(crow: list[int], col: list[int]) -> None:
    check_indices("b", bsr(crow, col), rising=True)


def test_a_call_is_known_by_all_but_its_addresses() -> None:
    a, b = torch.ones(4, 8), torch.zeros(4, 8)
    assert call_key(a, None) == call_key(b, None)
    assert len({call_key(a), call_key(a.T), call_key(a.half()), call_key(a[:2]), call_key(None)}) == 5
    assert call_key(3) is None


INDICES = (torch.tensor([0, 1, 2, 2]), torch.tensor([0, 1]))
VALUES = torch.ones(2, 2, 4, dtype=torch.float16)


@pytest.mark.parametrize(
    ("crow", "col", "size", "message"),
    [
        (INDICES[0][:3], INDICES[1], (6, 12), r"a\.crow_indices\(\): has shape \(3,\), expected \(4,\), one for each"),
        (INDICES[0], INDICES[1][:1], (6, 12), r"a\.col_indices\(\): has shape \(1,\), expected \(2,\)"),
        (INDICES[0], INDICES[1].int(), (6, 12), r"a\.col_indices\(\): is torch\.int32, a\.crow_indices\(\) is"),
        (INDICES[0].short(), INDICES[1].short(), (6, 12), r"a\.crow_indices\(\): is torch\.int16, expected torch\.int"),
        (INDICES[0], INDICES[1].repeat_interleave(2)[::2], (6, 12), r"a\.col_indices\(\): has strides \(2,\)"),
        (INDICES[0], INDICES[1], (7, 12), r"a: has shape \(7, 12\), expected a multiple of its blocks, \(2, 4\)"),
        (INDICES[0], INDICES[1], (6, 13), r"a: has shape \(6, 13\), expected a multiple"),
        (INDICES[0], INDICES[1], (0, 12), r"a: is empty: \(0, 12\)"),
    ],
)
def test_parts_that_do_not_fit_each_other(crow: Any, col: Any, size: tuple[int, int], message: str) -> None:
    a = torch.sparse_bsr_tensor(crow, col, VALUES, size=size, check_invariants=False)
    with pytest.raises(ArgumentError, match=message):
        check_structure("a", a, BLOCK, CPU)


def test_a_batch_of_sparse_matrices() -> None:
    batch = [part[None] for part in (*INDICES, VALUES)]
    a = torch.sparse_bsr_tensor(*batch, size=(1, 6, 12), check_invariants=False)
    with pytest.raises(ArgumentError, match=r"a: has 3 dimensions \(1, 6, 12\), expected 2"):
        check_structure("a", a, BLOCK, CPU)


def test_values_that_are_not_contiguous() -> None:
    a = torch.sparse_bsr_tensor(*INDICES, VALUES.mT.contiguous().mT, size=(6, 12), check_invariants=False)
    with pytest.raises(ArgumentError, match=r"a\.values\(\): has strides \(8, 1, 2\), expected a contiguous tensor"):
        check_values("a", a, torch.float16)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_both_types_of_indices_pass(index: Any) -> None:
    a = torch.sparse_bsr_tensor(*(part.to(index) for part in INDICES), VALUES, size=(6, 12), check_invariants=False)
    check_structure("a", a, BLOCK, CPU)
    check_indices("a", a, rising=True)


def test_more_blocks_than_32_bits_can_number() -> None:
    meta = torch.device("meta")

    def stored(blocks: int) -> Any:
        indices = (torch.empty(4, device=meta).long(), torch.empty(blocks, device=meta).long())
        values = torch.empty(blocks, 2, 4, dtype=torch.float16, device=meta)
        return torch.sparse_bsr_tensor(*indices, values, size=(6, 12), check_invariants=False)

    check_structure("a", stored(2**31 - 1), BLOCK, meta)
    with pytest.raises(ArgumentError, match=r"a: has 2147483648 stored blocks, 2\^31 or more"):
        check_structure("a", stored(2**31), BLOCK, meta)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(3).int(), r"index\.entries: is torch\.int32 \(3,\) on cpu, expected torch\.int32 \(3, 2\) on cpu"),
        (torch.zeros(3, 2), r"index\.entries: is torch\.float32"),
        (torch.zeros(3, 2, device="meta").int(), r"index\.entries: is torch\.int32 \(3, 2\) on meta, .* on cpu"),
        (torch.zeros(2, 3).int().T, r"index\.entries: has strides \(1, 3\)"),
    ],
)
def test_what_was_prepared_for_another_matrix(tensor: Any, message: str) -> None:
    check_prepared("index", {"entries": torch.zeros(3, 2).int()}, ((3, 2),), CPU)
    with pytest.raises(ArgumentError, match=message):
        check_prepared("index", {"entries": tensor}, ((3, 2),), CPU)
