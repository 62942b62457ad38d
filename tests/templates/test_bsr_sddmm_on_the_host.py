"""Sampled products of sm_90a without a GPU: generated sources run on the host (tests/support/host_bsr.py)."""

from __future__ import annotations

import itertools
import platform
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import host_bsr  # noqa: E402
from host_streams import pretend_stream  # noqa: E402

from codegen.library import NamedSpec, find_spec  # noqa: E402
from codegen.render import generate  # noqa: E402
from runtime.kernels import arguments, bsr_arguments, bsr_scales, bsr_sddmm  # noqa: E402
from runtime.verify import bsr_sddmm as verified  # noqa: E402

RUNS = platform.machine() == "x86_64" and shutil.which("g++") is not None
pytestmark = [
    pytest.mark.skipif(not RUNS, reason="needs g++, and the registers of an x86-64"),
    pytest.mark.filterwarnings("ignore:Sparse"),
]
CPU = torch.device("cpu")
CASES = (
    verified.Case("small", block_rows=3, block_columns=5, k=128),
    verified.Case("padded_k", block_rows=2, block_columns=7, k=77, strided=True, own_out=True),
    verified.Case("wild", block_rows=3, block_columns=6, k=64, row_counts="even", wild=True, index_dtype=torch.int32),
    verified.Case("long_k", block_rows=1, block_columns=3, k=400, repeated=True),
    verified.Case("none", block_rows=2, block_columns=3, k=8, row_counts="none"),
)
LAYOUTS = ("row_major", "column_major")


def spec_of(a_layout: str, b_layout: str, rows: int, cols: int, dtype: str = "fp16") -> NamedSpec:
    fields = {"op": "bsr_sddmm", "arch": "sm_90a", "dtype": dtype, "block": {"rows": rows, "cols": cols}}
    return find_spec({**fields, "a_layout": a_layout, "b_layout": b_layout})


@pytest.fixture(autouse=True)
def _on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_stream(monkeypatch)
    for module in (arguments, bsr_arguments, bsr_scales, bsr_sddmm):
        if hasattr(module, "check_tensor"):
            monkeypatch.setattr(module, "check_tensor", lambda *arguments, **named: None)


@pytest.mark.parametrize(("rows", "cols", "dtype"), [(64, 64, "fp16"), (128, 128, "bf16"), (64, 128, "fp16")])
@pytest.mark.parametrize(("a_layout", "b_layout"), list(itertools.product(LAYOUTS, LAYOUTS)))
def test_products_are_those_of_the_definition(
    a_layout: str, b_layout: str, rows: int, cols: int, dtype: str, recorded: Callable[..., None], tmp_path: Path
) -> None:
    named = spec_of(a_layout, b_layout, rows, cols, dtype)
    recorded(generate(named).source, repr(CASES))
    kernel = host_bsr.HostSddmm(named, tmp_path)
    for number, case in enumerate(CASES):
        kernel.host.late, kernel.host.order = number % 2 == 0, number
        outcome = verified.run_case(kernel, case, CPU)
        assert outcome.passed, outcome


@pytest.mark.parametrize(
    ("was", "instead"),
    [
        ("(k * 16 * kRowBytes >> 4)", "(k * 32 >> 4)"),
        ("i / kGroupColumns * kGroupBytes", "0"),
        ("b_rows[i] + j, k", "b_rows[i], k"),
        ("wgmma_wait<1>();", ""),
    ],
)
def test_a_fault_shows(was: str, instead: str, recorded: Callable[..., None], tmp_path: Path) -> None:
    named = spec_of("column_major", "column_major", 128, 128)
    source = generate(named).source
    assert was in source
    changed = source.replace(was, instead)
    recorded(changed, repr(CASES))
    kernel = host_bsr.HostSddmm(named, tmp_path, changed)
    kernel.host.late = True
    assert not all(verified.run_case(kernel, case, CPU).passed for case in CASES)
