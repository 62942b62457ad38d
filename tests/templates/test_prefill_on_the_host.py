"""Prefill over pages without a GPU: the generated source runs on the host, thread by thread (host_prefill.py)."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import host_prefill  # noqa: E402
from host_streams import pretend_stream  # noqa: E402

from codegen.library import find_spec  # noqa: E402
from codegen.paged_cases import PagedCase  # noqa: E402
from codegen.render import generate  # noqa: E402
from runtime.verify import paged_attention as verified  # noqa: E402

RUNS = platform.machine() == "x86_64" and shutil.which("g++") is not None
pytestmark = pytest.mark.skipif(not RUNS, reason="needs g++, and the registers of an x86-64")
CPU = torch.device("cpu")
FIELDS = {"op": "attention", "layout": "paged", "arch": "sm_90a", "pattern": {"kind": "sink_window"}}
CASES = (
    PagedCase("chunk", (300, 70), (150, 70), heads=2, kv_heads=1, page_size=64),
    PagedCase("small_pages", (300, 20), (90, 0), heads=2, kv_heads=2, page_size=16, layout="HND"),
    PagedCase("spoiled", (290, 33), (60, 33), heads=2, kv_heads=1, page_size=32, layout="rows", spoiled=True),
    PagedCase(
        "spoiled_window", (400,), (40,), heads=1, kv_heads=1, page_size=128, window=(77, 3), sink_keys=5, spoiled=True
    ),
    PagedCase("no_pages", (200, 7), (130, 7), heads=1, kv_heads=1, page_size=0, before=3),
)


@pytest.fixture(autouse=True)
def _on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_stream(monkeypatch)
    host_prefill.on_cpu(monkeypatch)


def check(kernel: host_prefill.HostKernel, case: PagedCase) -> None:
    inputs = verified.inputs_of(case, kernel.spec, CPU)
    right, right_lse = verified.oracle(case, kernel.spec, inputs)
    out = torch.full_like(inputs.q, float("nan"))
    _, lse = kernel(inputs.q, inputs.k, inputs.v, **inputs.options, out=out, return_lse=True)
    inside = slice(inputs.bounds[0], inputs.bounds[-1])
    close = 1e-2 if kernel.spec.dtype == "bf16" else 2e-3
    torch.testing.assert_close(out[inside].double(), right[inside], atol=close, rtol=close, msg=case.describe())
    assert lse is not None
    torch.testing.assert_close(lse[:, inside].double(), right_lse[:, inside], atol=2e-3, rtol=1e-3)
    assert out[: inputs.bounds[0]].isnan().all() and out[inputs.bounds[-1] :].isnan().all()


@pytest.mark.parametrize(("head_dim", "dtype"), [(64, "fp16"), (128, "bf16"), (192, "fp16")])
def test_results_are_those_of_the_definition(
    head_dim: int, dtype: str, recorded: Callable[..., None], tmp_path: Path
) -> None:
    named = find_spec({**FIELDS, "head_dim": head_dim, "dtype": dtype})
    recorded(generate(named).source, repr(CASES))
    kernel = host_prefill.HostKernel(named, tmp_path)
    for order, (case, late) in enumerate(product(CASES, (True, False))):
        kernel.host.late, kernel.host.order = late, order
        check(kernel, case)


@pytest.mark.parametrize(
    ("was", "instead"),
    [
        ("if (all || !some)", "if (true)"),
        ("page = next_page;", "page = page_of_lane(p, tile, visible, 0);"),
        ("page >= pages);", "page > pages);"),
    ],
    ids=["unseen rows", "the page of a step", "hidden pages"],
)
def test_what_is_wrong_shows(was: str, instead: str, recorded: Callable[..., None], tmp_path: Path) -> None:
    named = find_spec({**FIELDS, "head_dim": 64, "dtype": "fp16"})
    source = generate(named).source
    assert was in source
    changed = source.replace(was, instead, 1)
    recorded(changed, repr(CASES))
    kernel = host_prefill.HostKernel(named, tmp_path, changed)
    kernel.host.late = False
    with pytest.raises(AssertionError):
        for case in CASES:
            check(kernel, case)
