"""BSR x dense of few columns without a GPU: generated sources run on the host (tests/support/host_bsr.py)."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import host_bsr  # noqa: E402
from host_streams import pretend_stream  # noqa: E402

from codegen.library import NamedSpec, find_spec  # noqa: E402
from codegen.render import generate  # noqa: E402
from runtime.kernels import arguments, bsr_arguments, bsr_preparation, bsr_scales, bsr_spmm  # noqa: E402
from runtime.verify import bsr_spmm as verified  # noqa: E402

RUNS = platform.machine() == "x86_64" and shutil.which("g++") is not None
pytestmark = [
    pytest.mark.skipif(not RUNS, reason="needs g++, and the registers of an x86-64"),
    pytest.mark.filterwarnings("ignore:Sparse"),
]
CPU = torch.device("cpu")
CASES = (
    verified.Case("small", block_rows=2, block_columns=5, n=24),
    verified.Case("wild", block_rows=2, block_columns=7, n=77, strided=True, own_out=True, wild=True),
    verified.Case(
        "long",
        block_rows=1,
        block_columns=40,
        n=9,
        strided=True,
        own_out=True,
        row_counts="even",
        index_dtype=torch.int32,
    ),
    verified.Case("batch", block_rows=2, block_columns=3, n=16, batch=2, repeated=True),
    verified.Case("none", block_rows=2, block_columns=3, n=8, row_counts="none"),
)


def by_columns(rows: int, tile: tuple[int, int, int], **changes: Any) -> NamedSpec:
    fields = {"op": "bsr_spmm", "arch": "sm_90a", "dtype": "fp16", "b_layout": "column_major"}
    m, n, k = tile
    return find_spec({**fields, "block": {"rows": rows, "cols": rows}, "tile": {"m": m, "n": n, "k": k}, **changes})


def warp_level(rows: int, tile: tuple[int, int, int], **changes: Any) -> NamedSpec:
    return by_columns(rows, tile, mma="mma", copy="ld_global", schedule="multistage", stages=2, **changes)


SPECS: dict[str, Callable[[], NamedSpec]] = {
    "b16_n16": lambda: warp_level(16, (16, 16, 16)),
    "b32_n32": lambda: warp_level(32, (32, 32, 32), dtype="bf16"),
    "b64_n64": lambda: warp_level(64, (32, 64, 32)),
    "b16_n32_rows": lambda: warp_level(16, (16, 32, 16), b_layout="row_major"),
    "wgmma_b64_n16": lambda: by_columns(64, (64, 16, 64), stages=3),
    "wgmma_b128_n64": lambda: by_columns(128, (128, 64, 64), stages=4, dtype="bf16", ctas_per_sm=2),
    "wgmma_b128_m64_n32": lambda: by_columns(128, (64, 32, 64), stages=2),
    "wgmma_b64_n128_gelu": lambda: by_columns(
        64, (64, 128, 64), stages=4, ctas_per_sm=2, epilogue={"activation": "gelu", "bias": True}
    ),
}


@pytest.fixture(autouse=True)
def _on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_stream(monkeypatch)
    for module in (arguments, bsr_arguments, bsr_preparation, bsr_scales, bsr_spmm):
        if hasattr(module, "check_tensor"):
            monkeypatch.setattr(module, "check_tensor", lambda *arguments, **named: None)


@pytest.mark.parametrize("name", SPECS)
def test_products_are_those_of_the_definition(name: str, recorded: Callable[..., None], tmp_path: Path) -> None:
    named = SPECS[name]()
    recorded(generate(named).source, repr(CASES))
    kernel = host_bsr.HostSpmm(named, tmp_path)
    for number, case in enumerate(CASES):
        kernel.host.late, kernel.host.order = number % 2 == 0, number
        outcome = verified.run_case(kernel, case, CPU)
        assert outcome.passed, outcome


@pytest.mark.parametrize(
    ("name", "was", "instead"),
    [
        ("b32_n32", "x.b[2 * n + 1][k]", "x.b[2 * n][k]"),
        ("wgmma_b64_n16", "part < p.row_parts; ++part", "part < 1; ++part"),
        ("wgmma_b64_n16", "if (*is_last) *counter = 0;", ""),
        ("wgmma_b64_n16", "blocks * (part + 1) / p.row_parts", "blocks"),
        ("wgmma_b128_n64", "wgmma_wait<1>();", ""),
        ("wgmma_b128_m64_n32", "work.row % kBlockRows,", "0,"),
    ],
)
def test_a_fault_shows(name: str, was: str, instead: str, recorded: Callable[..., None], tmp_path: Path) -> None:
    named = SPECS[name]()
    source = generate(named).source
    assert was in source
    changed = source.replace(was, instead)
    recorded(changed, repr(CASES))
    kernel = host_bsr.HostSpmm(named, tmp_path, changed)
    kernel.host.late = True
    assert not all(verified.run_case(kernel, case, CPU).passed for case in CASES)
