"""FP8 products of BSR matrices by mma.sync without a GPU: sources run on the host (tests/support/host_mma_fp8.py)."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import host_bsr_fp8  # noqa: E402
from bsr_fp8_specs import PRODUCTS, SAMPLED  # noqa: E402
from host_streams import pretend_stream  # noqa: E402

from codegen.library import find_spec  # noqa: E402
from codegen.render import generate  # noqa: E402
from runtime.kernels import arguments, bsr_arguments, bsr_preparation, bsr_scales, bsr_sddmm, bsr_spmm  # noqa: E402
from runtime.verify import bsr_sddmm as verified_sddmm  # noqa: E402
from runtime.verify import bsr_spmm as verified_spmm  # noqa: E402

RUNS = platform.machine() == "x86_64" and shutil.which("g++") is not None
pytestmark = [
    pytest.mark.skipif(not RUNS, reason="needs g++, and the registers of an x86-64"),
    pytest.mark.filterwarnings("ignore:Sparse"),
]
CPU = torch.device("cpu")
SPMM_CASES = (
    verified_spmm.Case("small", block_rows=2, block_columns=4, n=200),
    verified_spmm.Case("wild", block_rows=2, block_columns=4, n=77, strided=True, own_out=True, wild=True),
    verified_spmm.Case("batch", block_rows=2, block_columns=3, n=136, batch=2, repeated=True),
)
SDDMM_CASES = (
    verified_sddmm.Case("small", block_rows=3, block_columns=5, k=200),
    verified_sddmm.Case("wild", block_rows=3, block_columns=4, k=77, strided=True, own_out=True, wild=True),
    verified_sddmm.Case("one_a_row", block_rows=7, block_columns=3, k=256, row_counts="one", index_dtype=torch.int32),
)


@pytest.fixture(autouse=True)
def _on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_stream(monkeypatch)
    for module in (arguments, bsr_arguments, bsr_preparation, bsr_scales, bsr_sddmm, bsr_spmm):
        if hasattr(module, "check_tensor"):
            monkeypatch.setattr(module, "check_tensor", lambda *arguments, **named: None)


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_those_of_the_definition(name: str, recorded: Callable[..., None], tmp_path: Path) -> None:
    named = find_spec(PRODUCTS[name])
    recorded(generate(named).source, repr(SPMM_CASES))
    kernel = host_bsr_fp8.HostSpmm(named, tmp_path)
    for number, case in enumerate(SPMM_CASES):
        kernel.host.late, kernel.host.order = number % 2 == 0, number
        outcome = verified_spmm.run_case(kernel, case, CPU)
        assert outcome.passed, outcome


@pytest.mark.parametrize("name", SAMPLED)
def test_sampled_products_are_those_of_the_definition(name: str, recorded: Callable[..., None], tmp_path: Path) -> None:
    named = find_spec(SAMPLED[name])
    recorded(generate(named).source, repr(SDDMM_CASES))
    kernel = host_bsr_fp8.HostSddmm(named, tmp_path)
    for number, case in enumerate(SDDMM_CASES):
        kernel.host.late, kernel.host.order = number % 2 == 0, number
        outcome = verified_sddmm.run_case(kernel, case, CPU)
        assert outcome.passed, outcome


@pytest.mark.parametrize(
    ("stem", "was", "instead"),
    [
        ("l4_e4m3_bsr_spmm_b64", "cp_async_wait<kStages - 2>()", "cp_async_wait<kStages>()"),
        ("l4_e4m3_bsr_spmm_b64", "slice * 2 * kChunk) + i", "slice * kChunk) + i"),
        ("l4_e4m3_bsr_spmm_b64", "__ldg(p.a_scale) * ", ""),
        ("l4_e4m3_bsr_spmm_b64", "accumulators[i][j][element] += product", "accumulators[i][j][element] = product"),
        ("l4_e4m3_bsr_sddmm_b64", "cp_async_wait<kStages - 2>()", "cp_async_wait<kStages>()"),
        ("l4_e4m3_bsr_sddmm_b64", "lane / 8 % 2);", "lane / 16);"),
        ("l4_e4m3_bsr_sddmm_b64", "b_row < 0 ? 0 : bytes", "bytes"),
        ("l4_e4m3_bsr_spmm_b128_block_scales", "first_block + (step + 1) / kBlockSteps", "first_block"),
        ("l4_e4m3_bsr_spmm_b128_block_scales", "is_there ? scale_bytes : 0", "is_there ? max(scale_bytes - 4, 0) : 0"),
        ("l4_e4m3_bsr_spmm_b128_block_scales", "element % 2 == 0 ? scale.x : scale.y", "scale.x"),
        (
            "l4_e4m3_bsr_spmm_b128_block_scales",
            "const Scales scales(b_scales + stage * kTileN,",
            "const Scales scales(b_scales,",
        ),
        ("l4_e4m3_bsr_sddmm_b128_row_scales", "scales.of_a[i][element / 2]", "scales.of_a[i][0]"),
        ("l4_e4m3_bsr_sddmm_b128_row_scales", "scales + k / kScaleDepth * scale_stride", "scales"),
        ("l4_e4m3_bsr_sddmm_b128_row_scales", "p.b_scale + max(b_row, 0)", "p.b_scale + of_b"),
        ("l4_e4m3_bsr_sddmm_b128_row_scales", "stage * stage_scales", "stage * kAScaleBytes / 2"),
    ],
)
def test_what_is_wrong_shows(stem: str, was: str, instead: str, recorded: Callable[..., None], tmp_path: Path) -> None:
    named = find_spec(stem)
    source = generate(named).source
    assert source.count(was) == 1
    made, cases, verified = (
        (host_bsr_fp8.HostSpmm, SPMM_CASES, verified_spmm)
        if "spmm" in stem
        else (host_bsr_fp8.HostSddmm, SDDMM_CASES, verified_sddmm)
    )
    changed = source.replace(was, instead)
    recorded(changed, repr(cases))
    kernel = made(named, tmp_path, changed)  # type: ignore[operator]
    assert not all(verified.run_case(kernel, case, CPU).passed for case in cases)  # type: ignore[attr-defined]
