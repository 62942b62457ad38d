"""Sampled products and BSR x BSR by mma.sync and WMMA: what their plans work out and refuse, where tiles lie."""

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

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")

OPS = ("bsr_sddmm", "bsr_spgemm")
SIZES = (16, 32, 64, 128)


def plan_of(op: str, size: int = 128, **changes: Any) -> Plan:
    fields = {"op": op, "arch": "sm_89", "block": {"rows": size, "cols": size}}
    return plan_for(find_spec({**fields, **changes}))


def constants(plan: Plan) -> dict[str, int]:
    return {constant.name: int(constant.value) for constant in plan.constants}


@looped
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_120"])
@pytest.mark.parametrize(("op", "mma", "size"), [*itertools.product(OPS, ("mma", "wmma"), SIZES)])
def test_default_tiles_let_thread_blocks_share_an_sm(arch: str, op: str, mma: str, size: int) -> None:
    plan = plan_of(op, size, arch=arch, mma=mma)
    assert (plan.spec.copy_, plan.spec.schedule, plan.template) == ("cp_async", "multistage", f"{op}/{mma}.cu.j2")
    assert plan.ctas_per_sm >= 2
    assert plan.ctas_per_sm * (plan.shared_bytes + 1024) <= plan.arch.shared_memory_per_sm
    assert plan.registers.needed <= plan.registers.limit


@pytest.mark.parametrize("op", OPS)
def test_mma_is_what_a_spec_gets_that_names_no_instruction(op: str) -> None:
    assert plan_of(op).spec.mma == "mma"


@looped
@pytest.mark.parametrize(
    ("op", "field", "changes"),
    [
        *((op, "block.rows", {"size": size}) for op in OPS for size in (8, 256)),
        *((op, "block.cols", {"block": {"rows": 64, "cols": 128}}) for op in OPS),
        *((op, "tile.m", {"tile": {"m": 64, "n": 128, "k": 32}}) for op in OPS),
        *((op, "tile.n", {"tile": {"m": 128, "n": 256, "k": 32}}) for op in OPS),
        *((op, "tile.k", {"tile": {"m": 128, "n": 128, "k": 48}}) for op in OPS),
        *((op, "stages", {"stages": stages}) for op in OPS for stages in (1, 7)),
        ("bsr_sddmm", "tile.k", {"size": 16, "tile": {"m": 16, "n": 128, "k": 32}}),
        ("bsr_spgemm", "tile.k", {"size": 16, "tile": {"m": 16, "n": 16, "k": 32}}),
    ],
)
@pytest.mark.parametrize("mma", ["mma", "wmma"])
def test_what_the_kernels_are_not_written_for_is_refused(
    op: str, field: str, changes: dict[str, Any], mma: str
) -> None:
    with pytest.raises(SpecError, match=rf"^{field}: .*\d"):
        plan_of(op, **{"mma": mma, **changes})


def swizzled(chunks: int, row: int, chunk: int) -> int:
    """The formula of templates/common/bsr_steps.cuh.j2."""
    return (row * chunks + (chunk ^ row // max(1, 8 // chunks) % min(8, chunks))) * 16


def copied(chunks: int, rows: int, threads: int) -> dict[int, tuple[int, int]]:
    """Where each (row, chunk) of a tile goes, if every thread copies one chunk of each so many rows."""
    pass_rows = threads // chunks
    return {
        swizzled(chunks, *divmod(thread, chunks)) + row * chunks * 16: (thread // chunks + row, thread % chunks)
        for thread in range(threads)
        for row in range(0, rows, pass_rows)
    }


def check_matrices(tile: dict[int, tuple[int, int]], addresses: list[int], wanted: list[tuple[int, int]]) -> None:
    """Each lane of an ldmatrix finds its chunk, and 8 lanes read from all banks."""
    assert [tile[address] for address in addresses] == wanted
    for first in range(0, 32, 8):
        assert len({address // 16 % 8 for address in addresses[first : first + 8]}) == 8


SDDMM_TILES = [(128, 128, 32), (64, 256, 32), (64, 128, 64), (32, 256, 64), (32, 128, 32), (16, 128, 64), (16, 256, 64)]


@pytest.mark.parametrize(("m", "n", "k"), SDDMM_TILES)
def test_swizzled_tiles_of_a_sampled_product(m: int, n: int, k: int) -> None:
    plan = plan_of("bsr_sddmm", m, tile={"m": m, "n": n, "k": k}, stages=2)
    c = constants(plan)
    chunks = c["kRowChunks"]
    assert c["kPassRows"] * chunks == plan.threads and c["kPassRows"] % 8 == m % c["kPassRows"] == 0
    a_tile, b_tile = (copied(chunks, rows, plan.threads) for rows in (m, n))
    assert sorted(a_tile) == list(range(0, c["kATile"], 16)) and sorted(b_tile) == list(range(0, c["kBTile"], 16))
    for warp, slice_ in itertools.product(range(plan.threads // 32), range(k // 16)):
        part_row, part_column = warp // c["kWarpsN"] * c["kWarpRows"], warp % c["kWarpsN"] * c["kWarpColumns"]
        for i in range(c["kWarpRows"] // 16):
            a = [(swizzled(chunks, part_row + x % 16, x // 16) ^ slice_ * 32) + i * 256 * chunks for x in range(32)]
            check_matrices(a_tile, a, [(part_row + 16 * i + x % 16, 2 * slice_ + x // 16) for x in range(32)])
        for j in range(c["kWarpColumns"] // 16):
            rows = [part_column + x // 16 * 8 + x % 8 for x in range(32)]
            b = [(swizzled(chunks, r, x // 8 % 2) ^ slice_ * 32) + j * 256 * chunks for x, r in enumerate(rows)]
            check_matrices(b_tile, b, [(r + 16 * j, 2 * slice_ + x // 8 % 2) for x, r in enumerate(rows)])


@looped
@pytest.mark.parametrize(("block", "k"), [(b, k) for b in SIZES for k in (16, 32, 64) if k <= b])
def test_swizzled_tiles_of_a_product_of_two_sparse_matrices(block: int, k: int) -> None:
    plan = plan_of("bsr_spgemm", block, tile={"m": block, "n": block, "k": k}, stages=2)
    c = constants(plan)
    a_chunks, b_chunks = k // 8, block // 8
    assert (c["kAPassRows"], c["kBPassRows"]) == (plan.threads // a_chunks, plan.threads // b_chunks)
    assert c["kAPassRows"] % 8 == c["kBPassRows"] % 8 == 0
    a_tile, b_tile = copied(a_chunks, block, plan.threads), copied(b_chunks, k, plan.threads)
    assert sorted(a_tile) == list(range(0, c["kATile"], 16)) and sorted(b_tile) == list(range(0, c["kBTile"], 16))
    for warp, slice_ in itertools.product(range(plan.threads // 32), range(k // 16)):
        part_row, part_column = warp // c["kWarpsN"] * c["kWarpRows"], warp % c["kWarpsN"] * c["kWarpColumns"]
        for i in range(c["kWarpRows"] // 16):
            a = [(swizzled(a_chunks, part_row + x % 16, x // 16) ^ slice_ * 32) + i * 256 * a_chunks for x in range(32)]
            check_matrices(a_tile, a, [(part_row + 16 * i + x % 16, 2 * slice_ + x // 16) for x in range(32)])
        for j in range(c["kWarpColumns"] // 16):
            first = part_column // 8
            b = [(swizzled(b_chunks, x % 16, first + x // 16) ^ j * 32) + slice_ * 256 * b_chunks for x in range(32)]
            check_matrices(b_tile, b, [(16 * slice_ + x % 16, first + 2 * j + x // 16) for x in range(32)])


@looped
@pytest.mark.parametrize(
    ("mma", "size", "k"), [(m, b, k) for m in ("mma", "wmma") for b in SIZES for k in (16, 32, 64)]
)
def test_counts_lie_behind_the_staging_and_before_the_list(mma: str, size: int, k: int) -> None:
    if k > size:
        pytest.skip("a step is no deeper than a block")
    plan = plan_of("bsr_spgemm", size, mma=mma, tile={"m": size, "n": size, "k": k}, stages=2)
    regions = {region.name: region for region in plan.shared}
    counts, staging, listed = regions["Counts"], regions["Staging"], regions["List"]
    assert staging.offset + staging.bytes <= counts.offset
    assert counts.offset + counts.bytes <= listed.offset or listed.offset + listed.bytes <= counts.offset


@pytest.mark.parametrize("size", SIZES)
def test_a_run_has_a_bit_for_each_tile(size: int) -> None:
    assert 4 <= constants(plan_of("bsr_spgemm", size))["kRunTiles"] <= 32


SHIPPED = [named for named in shipped_specs() if named.spec.op in OPS]


@for_each("named", lambda: SHIPPED, lambda named: named.stem)
def test_a_call_knows_every_number_of_its_kernel(named: NamedSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from runtime.driver.launch import ParameterLayout
    from runtime.kernels import bsr_scales, bsr_sddmm, bsr_spgemm
    from runtime.kernels.arguments import TORCH_DTYPES

    for module in (bsr_sddmm, bsr_scales):
        monkeypatch.setattr(module, "check_tensor", lambda *arguments: None)
    plan, seen = plan_for(named), {}

    def signature(device: Any, tiles: int, numbers: dict[str, int], tensors: Any, **more: Any) -> None:
        ParameterLayout.of(plan.params).pack(numbers)  # raises where a number is on one side only
        seen.update(numbers, grid=tiles)

    compiled, loaded = SimpleNamespace(named=named, plan=plan), SimpleNamespace(signature=signature)
    spec: Any = named.spec
    size, tile, dtype = spec.block.rows, spec.tile, TORCH_DTYPES[spec.dtype]
    if spec.op == "bsr_sddmm":
        values = torch.zeros((5, size, size))
        pattern = torch.sparse_bsr_tensor([0, 3, 3, 5], [0, 1, 2, 3, 0], values, size=(3 * size, 4 * size))
        a, b = torch.zeros((3 * size, 80), dtype=dtype), torch.zeros((4 * size, 96), dtype=dtype)
        kernel: Any = bsr_sddmm.BsrSddmmKernel(compiled, loaded)  # type: ignore[arg-type]
        one = torch.ones(()) if dtype.itemsize == 1 else None
        scales = bsr_scales.Scales(one, one)
        if bsr_scales.by_row(spec):
            scales = bsr_scales.Scales(*(torch.ones((matrix.shape[0], 1)) for matrix in (a, b)))
        a, b = a[:, :77], b[:, :77]
        a, b = (
            x if layout == "row_major" else x.mT.contiguous().mT
            for x, layout in ((a, spec.a_layout), (b, spec.b_layout))
        )
        kernel._check(a, b, pattern, None, scales)
        assert seen["grid"] == -(-5 // (tile.n // size)) and seen["steps"] == -(-77 // tile.k)
        assert (seen["block_rows"], seen["blocks"]) == (3, 5)
        if spec.mma != "wgmma":
            assert [seen[name] for name in ("k", "block_columns", "a_row_stride", "b_row_stride")] == [77, 4, 80, 96]
        return
    kernel = bsr_spgemm.BsrSpgemmKernel(compiled, loaded)  # type: ignore[arg-type]
    values = torch.zeros((2, size, size), dtype=dtype)
    monkeypatch.setattr(bsr_spgemm, "check_structure", lambda *arguments: None)
    monkeypatch.setattr(bsr_spgemm, "check_out", lambda *arguments: None)

    def matrix(rows: int, columns: int) -> Any:
        crow = torch.tensor([0, 2, *[2] * (rows - 1)])
        real = torch.sparse_bsr_tensor(crow, [0, 1], values, size=(rows * size, columns * size))
        parts = ("values", "crow_indices", "col_indices", "shape", "requires_grad")
        return SimpleNamespace(device=SimpleNamespace(type="cuda", index=0), **{p: getattr(real, p) for p in parts})

    if spec.output == "bsr":
        kernel._check(matrix(3, 2), matrix(2, 35), matrix(3, 35), None)
        assert (seen["grid"], seen["inner_blocks"], seen["block_rows"], seen["blocks"]) == (2, 2, 3, 2)
        return
    kernel._check(matrix(3, 2), matrix(2, 35), None, torch.zeros((3 * size, 36 * size), dtype=dtype))
    runs = -(-35 // constants(plan).get("kRunTiles", 1))
    assert (seen["grid"], seen["inner_blocks"], seen["column_blocks"]) == (3 * runs, 2, 35)
    assert seen.get("row_runs", 35) == runs and seen.get("tiles", 3 * 35) == 3 * 35
    assert seen.get("c_row_stride", 36 * size) == 36 * size
