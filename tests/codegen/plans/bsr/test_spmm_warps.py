"""BSR x dense by mma.sync and WMMA: what their plans work out and refuse, where tiles lie in shared memory."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from each import for_each, looped

from codegen.errors import SpecError
from codegen.library import NamedSpec, find_spec, shipped_specs
from codegen.plan import Plan
from codegen.planning import plan_for
from codegen.plans.bsr.balance import cuts_rows
from codegen.render import render_plan


def fields(**changes: Any) -> dict[str, Any]:
    return {"op": "bsr_spmm", "arch": "sm_89", "mma": "mma", "block": {"rows": 128, "cols": 128}, **changes}


def plan_of(**changes: Any) -> Plan:
    return plan_for(find_spec(fields(**changes)))


def constants(plan: Plan) -> dict[str, int]:
    return {constant.name: int(constant.value) for constant in plan.constants}


@pytest.mark.parametrize(
    ("size", "n", "k", "stages", "blocks"),
    [(128, 128, 32, 3, 2), (64, 256, 32, 2, 2), (32, 256, 32, 2, 2), (16, 256, 16, 3, 3)],
)
def test_default_tiles_let_thread_blocks_share_an_sm(size: int, n: int, k: int, stages: int, blocks: int) -> None:
    spec = {"op": "bsr_spmm", "arch": "sm_89", "block": {"rows": size, "cols": size}}
    plan = plan_for(find_spec(spec))
    assert (plan.spec.mma, plan.spec.copy_, plan.spec.stages, plan.spec.tile.model_dump()) == (
        *("mma", "cp_async", stages),
        {"m": size, "n": n, "k": k},
    )
    assert (plan.threads, plan.ctas_per_sm) == (128, blocks)


@looped
@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("block.rows", {"block": {"rows": 256, "cols": 64}}),
        ("block.cols", {"block": {"rows": 64, "cols": 112}}),
        ("tile.m", {"tile": {"m": 64, "n": 128, "k": 32}}),
        ("tile.n", {"tile": {"m": 128, "n": 64, "k": 32}}),
        ("tile.n", {"block": {"rows": 64, "cols": 64}, "tile": {"m": 64, "n": 512, "k": 32}}),
        ("tile.k", {"block": {"rows": 16, "cols": 16}, "tile": {"m": 16, "n": 256, "k": 32}}),
        ("tile.k", {"tile": {"m": 128, "n": 128, "k": 112}}),
        ("tile.k", {"block": {"rows": 64, "cols": 32}, "tile": {"m": 64, "n": 128, "k": 64}}),
        ("stages", {"stages": 1}),
        ("stages", {"stages": 7}),
        ("epilogue", {"epilogue": {"bias": True}}),
    ],
)
def test_what_mma_is_not_written_for_is_refused(field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=rf"^{field}: "):
        plan_of(**changes)


@looped
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        *itertools.product((16, 32, 64, 128), (128, 256), (16, 32, 64)),
        *itertools.product((16, 32), (512,), (16, 32)),
    ],
    ids=str,
)
def test_swizzled_tiles_of_mma(m: int, n: int, k: int) -> None:
    """The formulas of templates/bsr_spmm/mma.cu.j2: each chunk is copied once, and found without bank conflicts."""
    plan = plan_of(block={"rows": m, "cols": 64}, tile={"m": m, "n": n, "k": k}, stages=2)
    c = constants(plan)
    a_row_bytes, b_row_bytes = c["kAChunks"] * 16, c["kBChunks"] * 16

    def a_offset(row: int, chunk: int) -> int:
        return row * a_row_bytes + (chunk ^ row // c["kARowsPerLine"] % c["kAChunks"]) * 16

    def b_offset(row: int, chunk: int) -> int:
        return row * b_row_bytes + (chunk ^ row % 8) * 16

    a_tile, b_tile = {}, {}
    for thread in range(plan.threads):
        a_row, a_chunk = divmod(thread, c["kAChunks"])
        b_row, b_chunk = divmod(thread, c["kBChunks"])
        for row in range(0, m, c["kAPassRows"]) if "kAPassRows" in c else (0,) if a_row < m else ():
            a_tile[a_offset(a_row, a_chunk) + row * a_row_bytes] = (a_row + row, a_chunk)
        for row in range(0, k, c["kBPassRows"]):
            b_tile[(b_offset(b_row, b_chunk) ^ row % 8 * 16) + row * b_row_bytes] = (b_row + row, b_chunk)
    assert sorted(a_tile) == list(range(0, c["kATile"], 16))
    assert sorted(b_tile) == list(range(0, c["kBTile"], 16))

    for warp, slice_, matrix in itertools.product(range(plan.threads // 32), range(k // 16), range(4)):
        part_row = warp // c["kWarpsN"] * c["kWarpRows"]
        part_column = warp % c["kWarpsN"] * c["kWarpColumns"]
        lanes = range(8 * matrix, 8 * matrix + 8)
        for i in range(c["kWarpRows"] // 16):
            found = [
                (a_offset(part_row + lane % 16, lane // 16) ^ slice_ * 32) + i * 16 * a_row_bytes for lane in lanes
            ]
            assert [a_tile[x] for x in found] == [
                (part_row + 16 * i + lane % 16, 2 * slice_ + lane // 16) for lane in lanes
            ]
            assert len({x // 16 % 8 for x in found}) == 8
        for j in range(c["kWarpColumns"] // 16):
            found = [
                (b_offset(lane % 16, part_column // 8 + lane // 16) ^ j * 32) + slice_ * 16 * b_row_bytes
                for lane in lanes
            ]
            assert [b_tile[x] for x in found] == [
                (16 * slice_ + lane % 16, part_column // 8 + 2 * j + lane // 16) for lane in lanes
            ]
            assert len({x // 16 % 8 for x in found}) == 8


@looped
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        *itertools.product((16, 32, 64, 128), (128, 256), (16, 32, 64)),
        *itertools.product((16, 32), (512,), (16, 32)),
    ],
    ids=str,
)
def test_columns_of_b_lie_in_swizzled_tiles_of_mma_as_rows_of_a_do(m: int, n: int, k: int) -> None:
    """The formulas of mma.cu.j2 and common/bsr_steps.cuh.j2: each is copied once, read without bank conflicts."""
    plan = plan_of(block={"rows": m, "cols": 64}, tile={"m": m, "n": n, "k": k}, stages=2, b_layout="column_major")
    c = constants(plan)
    row_bytes = c["kRowChunks"] * 16
    assert row_bytes == 2 * k

    def offset(row: int, chunk: int) -> int:
        return row * row_bytes + (chunk ^ row * row_bytes // 128 % min(8, c["kRowChunks"])) * 16

    a_tile, b_tile = {}, {}
    for thread in range(plan.threads):
        row, chunk = divmod(thread, c["kRowChunks"])
        for further in range(0, n, c["kPassRows"]):
            b_tile[offset(row, chunk) + further * row_bytes] = (row + further, chunk)
        for further in range(0, m if row < m else 0, c["kPassRows"]):
            a_tile[offset(row, chunk) + further * row_bytes] = (row + further, chunk)
    assert sorted(a_tile) == list(range(0, c["kATile"], 16))
    assert sorted(b_tile) == list(range(0, c["kBTile"], 16))
    # Eight threads that follow each other write to distinct banks.
    copied = [offset(*divmod(thread, c["kRowChunks"])) // 16 % 8 for thread in range(plan.threads)]
    assert all(len(set(copied[i : i + 8])) == 8 for i in range(0, plan.threads, 8))

    for warp, slice_, matrix in itertools.product(range(plan.threads // 32), range(k // 16), range(4)):
        part_row = warp // c["kWarpsN"] * c["kWarpRows"]
        part_column = warp % c["kWarpsN"] * c["kWarpColumns"]
        lanes = range(8 * matrix, 8 * matrix + 8)
        for i in range(c["kWarpRows"] // 16):
            found = [(offset(part_row + lane % 16, lane // 16) ^ slice_ * 32) + i * 16 * row_bytes for lane in lanes]
            rows = [part_row + 16 * i + lane % 16 for lane in lanes]
            assert [a_tile[x] for x in found] == [(row, 2 * slice_ + matrix // 2) for row in rows]
            assert len({x // 16 % 8 for x in found}) == 8
        for j in range(c["kWarpColumns"] // 16):
            found = [
                (offset(part_column + lane // 16 * 8 + lane % 8, lane // 8 % 2) ^ slice_ * 32) + j * 16 * row_bytes
                for lane in lanes
            ]
            # Registers 0 and 1 of a fragment are the depth of one product, 2 and 3 that of the one beside it.
            columns = [part_column + 16 * j + matrix // 2 * 8 + i for i in range(8)]
            assert [b_tile[x] for x in found] == [(column, 2 * slice_ + matrix % 2) for column in columns]
            assert len({x // 16 % 8 for x in found}) == 8


@pytest.mark.parametrize(("mma", "size"), [("mma", 64), ("mma", 16), ("wmma", 64)])
def test_what_differs_where_b_is_stored_by_columns(mma: str, size: int) -> None:
    changes = {"mma": mma, "block": {"rows": size, "cols": size}}
    plain, plan = plan_of(**changes), plan_of(**changes, b_layout="column_major")
    assert plan.spec.tile == plain.spec.tile and plan.threads == plain.threads
    assert [param.name for param in plan.params] == [
        {"b_row_stride": "b_column_stride"}.get(param.name, param.name) for param in plain.params
    ]
    source = render_plan(plan)
    assert "B stored by columns" in source and "b_row_stride" not in source
    assert ("ldmatrix_x4_trans" in render_plan(plain)) == (mma == "mma") and "ldmatrix_x4_trans" not in source
    assert ("wmma::col_major" in source) == (mma == "wmma")


def wmma(**changes: Any) -> Plan:
    return plan_of(**{"arch": "sm_90a", "mma": "wmma", "copy": "cp_async", **changes})


def test_a_tall_wmma_tile_gives_each_warp_64_rows() -> None:
    c = constants(wmma(block={"rows": 256, "cols": 128}, tile={"m": 256, "n": 128, "k": 64}))
    assert (c["kWarpRows"], c["kWarpColumns"], c["kWarpsN"]) == (64, 64, 2)
    c = constants(wmma())
    assert (c["kWarpRows"], c["kWarpColumns"], c["kWarpsN"]) == (32, 64, 2)


@looped
@pytest.mark.parametrize(
    ("rows", "cols", "n", "k"),
    [(16, 16, 128, 16), (16, 64, 64, 64), (32, 16, 128, 16), (32, 32, 64, 32), (64, 16, 128, 16), (128, 128, 128, 32)],
)
@pytest.mark.parametrize("b_layout", ["row_major", "column_major"])
def test_wmma_copies_every_chunk_once(rows: int, cols: int, n: int, k: int, b_layout: str) -> None:
    plan = wmma(block={"rows": rows, "cols": cols}, tile={"m": rows, "n": n, "k": k}, stages=2, b_layout=b_layout)
    c = constants(plan)
    kept, length = (n, k) if b_layout == "column_major" else (k, n)
    assert (c["kBStride"], c["kBTile"]) == (length + 8, kept * (length + 8))
    for copies, elements in (("kACopies", rows * k), ("kBCopies", k * n)):
        found = [(copy * plan.threads + thread) * 8 for copy in range(c[copies]) for thread in range(plan.threads)]
        if copies == "kACopies" and plan.flags.some_copy_a:
            found = [i for i in found if i < elements]
        assert sorted(found) == list(range(0, elements, 8))
    assert plan.threads // 32 == c["kWarpsN"] * (rows // c["kWarpRows"]) and c["kWarpsN"] * c["kWarpColumns"] == n


def test_the_accumulators_of_512_x_128_are_all_registers_of_an_sm() -> None:
    assert wmma().arch.registers_per_sm == 512 * 128
    with pytest.raises(SpecError, match=r"^block\.rows: is 512; allowed with wmma: 16, 32, 64, 128, 256"):
        wmma(block={"rows": 512, "cols": 112}, tile={"m": 512, "n": 128, "k": 112})


@pytest.mark.parametrize(("n", "depths"), [(128, {16, 112}), (64, set())])
def test_steps_of_112_where_all_threads_make_as_many_copies(n: int, depths: set[int]) -> None:
    allowed = set()
    for depth in (16, 32, 64, 112):
        try:
            wmma(block={"rows": 256, "cols": 112}, tile={"m": 256, "n": n, "k": depth}, stages=2)
        except SpecError as error:
            assert error.field == ("tile.k" if depths else "tile.n")  # of 64 columns there is no depth at all
        else:
            allowed.add(depth)
    assert allowed == depths


@pytest.mark.parametrize("b_layout", ["row_major", "column_major"])
def test_tma_pads_rows_by_reading_a_chunk_more(b_layout: str) -> None:
    plan = wmma(copy="tma", tile={"m": 128, "n": 128, "k": 64}, b_layout=b_layout)
    c = constants(plan)
    assert plan.tensor_maps["a_map"].box == (c["kAStride"], 128, 1)
    assert plan.tensor_maps["b_map"].box == (c["kBStride"], 64 if b_layout == "row_major" else 128)
    assert c["kAStride"] // 8 % 2 == c["kBStride"] // 8 % 2 == 1  # chunks: rows of a fragment lie in distinct banks
    assert all(2 * tile % 128 == 0 for tile in (c["kATile"], c["kBTile"]))  # what TMA writes to is aligned
    assert not {"a", "b", "b_row_stride", "b_column_stride", "block_columns"} & {param.name for param in plan.params}


SPMM = [named for named in shipped_specs() if named.spec.op == "bsr_spmm"]


@for_each("named", lambda: SPMM, lambda named: named.stem)
def test_a_call_knows_every_number_of_its_kernel(named: NamedSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from runtime.driver.launch import ParameterLayout
    from runtime.kernels import bsr_scales, bsr_spmm
    from runtime.kernels.arguments import TORCH_DTYPES

    for module in (bsr_spmm, bsr_scales):
        monkeypatch.setattr(module, "check_tensor", lambda *arguments: None)
    plan, seen, dtype = plan_for(named), {}, TORCH_DTYPES[named.spec.dtype]

    def signature(device: Any, tiles: int, numbers: dict[str, int], tensors: Any, **blocks: Any) -> None:
        ParameterLayout.of(plan.params).pack(numbers)  # raises where a number is on one side only
        seen.update(numbers, parallel=tiles)

    loaded = SimpleNamespace(signature=signature, slots=lambda device: 0)
    kernel = bsr_spmm.BsrSpmmKernel(SimpleNamespace(named=named, plan=plan), loaded)  # type: ignore[arg-type]
    block = named.spec.block  # type: ignore[union-attr]
    values = torch.zeros((2, block.rows, block.cols), dtype=dtype)
    a = torch.sparse_bsr_tensor([0, 1, 2, 2], [1, 0], values, size=(3 * block.rows, 2 * block.cols))
    epilogue = named.spec.epilogue  # type: ignore[union-attr]
    bias = torch.zeros(3 * block.rows, dtype=dtype) if epilogue and epilogue.bias else None
    spec: Any = named.spec
    depth, height = (a.shape[0], a.shape[1]) if spec.transpose_a else (a.shape[1], a.shape[0])
    c = torch.zeros((height, 1000), dtype=dtype) if spec.accumulate else None
    by_columns = spec.b_layout == "column_major"
    b = torch.zeros((1000, depth) if by_columns else (depth, 1000), dtype=dtype)
    one = torch.ones(()) if dtype.itemsize == 1 else None
    scales = bsr_scales.Scales(one, one)
    if spec.scales == "block":
        scales = bsr_scales.Scales(torch.ones(2), torch.ones(depth // 128, 1000).mT)
    kernel._check(a, b.mT if by_columns else b, c=c, beta=1.0, bias=bias, out=None, scales=scales)
    tiles = -(-height // spec.tile.m) * -(-1000 // (spec.tile.n * plan.cluster))
    assert seen["parallel"] == tiles * plan.cluster
    # Where rows are cut, it is the device that knows how many units there are.
    assert cuts_rows(spec) or seen.get("tiles", tiles) == tiles
    assert seen.get("block_rows", 3) == 3 and seen.get("index_words", 2) == 2
