"""Attention over pages without a GPU: generated sources run on the host, thread by thread (host_paged.py)."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import host_paged  # noqa: E402
import paged_garbage  # noqa: E402
from host_streams import pretend_stream  # noqa: E402

from codegen.library import find_spec  # noqa: E402
from codegen.paged_cases import PagedCase  # noqa: E402
from codegen.render import generate  # noqa: E402
from runtime.verify import paged_attention as verified  # noqa: E402

RUNS = platform.machine() == "x86_64" and shutil.which("g++") is not None
pytestmark = pytest.mark.skipif(not RUNS, reason="needs g++, and the registers of an x86-64")
CPU = torch.device("cpu")
DECODE = PagedCase("decode", (150, 1, 0, 33), (1, 1, 1, 1), heads=4, kv_heads=2, page_size=16, packed=False)
CASES = (
    DECODE,
    PagedCase("queries", (90, 40, 7), (2, 9, 3), heads=6, kv_heads=2, page_size=8, layout="HND", before=2),
    replace(DECODE, name="window", window=(30, 4), sink_keys=5, sinks=True, softcap=2.0),
    PagedCase("lists", (100, 30), (2, 1), heads=4, kv_heads=2, entries=9, entry_keys=4, counted=True, page_size=32),
    PagedCase("rows", (70, 20), (1, 3), page_size=0, layout="rows", kv_heads=1, heads=4, head_lists=False, entries=40),
    replace(DECODE, name="invariant", kv_lens=(2500, 40), q_lens=(1, 1), batch_invariant=True, page_size=128),
)
OF_TOKENS = replace(DECODE, name="token_scales", token_scales=True)
SPOILED = (
    replace(DECODE, name="spoiled", spoiled=True),
    replace(DECODE, name="spoiled_window", window=(30, 0), spoiled=True),
    replace(DECODE, name="spoiled_sinks", window=(30, 0), sink_keys=5, spoiled=True),
    PagedCase("spoiled_drafts", (150, 40, 7), (2, 9, 3), heads=6, window=(20, 3), page_size=8, spoiled=True),
    PagedCase(
        "spoiled_sinks_of_drafts",
        (190, 90),
        (3, 1),
        4,
        page_size=16,
        layout="rows",
        window=(40, 0),
        sink_keys=70,
        spoiled=True,
    ),
    PagedCase("spoiled_lists", (100, 30), (1, 4), entries=9, entry_keys=8, page_size=16, spoiled=True),
    PagedCase(
        "spoiled_window_of_lists", (100, 30), (1, 4), entries=60, window=(30, 0), sink_keys=3, page_size=4, spoiled=True
    ),
    PagedCase("repeated", (100, 30), (2, 1), heads=4, entries=8, entry_keys=4, repeated=True, page_size=32),
)
SPOILED_OF_TOKENS = replace(SPOILED[3], name="spoiled_token_scales", sink_keys=5, token_scales=True)
KERNELS: tuple[dict[str, Any], ...] = (
    {"dtype": "bf16", "head_dim": 64, "tile": {"m": 16, "n": 32}, "stages": 3},
    {"dtype": "fp16", "head_dim": 128, "tile": {"m": 16, "n": 16}, "stages": 2},
    {"dtype": "fp16", "head_dim": 64, "tile": {"m": 32, "n": 16}, "stages": 4},
    {"dtype": "bf16", "head_dim": 64, "cache": "e4m3", "tile": {"m": 16, "n": 64}, "stages": 3},
    {"dtype": "fp16", "head_dim": 128, "cache": "e4m3", "tile": {"m": 16, "n": 32}, "stages": 2},
)


@pytest.fixture(autouse=True)
def _on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_stream(monkeypatch)
    host_paged.on_cpu(monkeypatch)


def words(fields: dict[str, Any]) -> str:
    return "_".join(str(fields[name]) for name in ("dtype", "head_dim", "cache", "tile") if name in fields)


def spec_of(fields: dict[str, Any]) -> Any:
    return find_spec({"op": "paged_attention", "arch": "sm_89", **fields})


def check(kernel: host_paged.HostKernel, case: PagedCase) -> None:
    spec = kernel.spec
    inputs = verified.inputs_of(case, spec, CPU)
    right, right_lse = verified.oracle(case, spec, inputs)
    out = torch.full_like(inputs.q, float("nan"))
    _, lse = kernel(inputs.q, inputs.k, inputs.v, **inputs.options, out=out, return_lse=True)
    inside = slice(inputs.bounds[0], inputs.bounds[-1])
    close = 1e-2 if spec.dtype == "bf16" else 2e-3
    torch.testing.assert_close(out[inside].double(), right[inside], atol=close, rtol=close, msg=case.describe())
    assert lse is not None
    torch.testing.assert_close(lse[:, inside].double(), right_lse[:, inside], atol=2e-3, rtol=1e-3)
    assert out[: inputs.bounds[0]].isnan().all() and out[inputs.bounds[-1] :].isnan().all()


@pytest.mark.parametrize("fields", KERNELS, ids=words)
def test_results_are_those_of_the_definition(
    fields: dict[str, Any], recorded: Callable[..., None], tmp_path: Path
) -> None:
    named = spec_of(fields)
    cases = (*CASES, *([OF_TOKENS] if "cache" in fields else []))
    recorded(generate(named).source, repr(cases))
    kernel = host_paged.HostKernel(named, tmp_path)
    for order, case in enumerate(cases):
        for late in (True, False):
            kernel.host.late, kernel.host.order = late, order
            check(kernel, case)


@pytest.mark.parametrize("fields", KERNELS, ids=words)
def test_what_no_query_sees_may_hold_anything(
    fields: dict[str, Any], recorded: Callable[..., None], tmp_path: Path
) -> None:
    """NaN in K, V and factors, and numbers of any page in the table."""
    named = spec_of(fields)
    cases = (*SPOILED, *([SPOILED_OF_TOKENS] if "cache" in fields else []))
    recorded(generate(named).source, repr(cases))
    kernel = host_paged.HostKernel(named, tmp_path)
    for order, case in enumerate(cases):
        kernel.host.late, kernel.host.order = order % 2 == 0, order
        check(kernel, case)


@pytest.mark.parametrize(
    ("was", "instead"),
    [
        ("!is_seen(p) ||", ""),
        ("(position >= any_first)", "(position >= seen_first)"),
        ("(position >= any_first)", "(position > any_first)"),
        ("(position <= any_last)", "(position <= seen_last)"),
        ("| (position < p.sink_keys)", ""),
        ("| (position < p.sink_keys)", "| (position <= p.sink_keys)"),
    ],
    ids=["all", "the first row", "the first key", "the last row", "sinks", "the last sink"],
)
def test_a_wrong_bound_of_what_is_read_shows(
    was: str, instead: str, recorded: Callable[..., None], tmp_path: Path
) -> None:
    named = spec_of(KERNELS[0])
    source = generate(named).source
    assert source.count(was) == 1
    changed = source.replace(was, instead)
    recorded(changed, repr(SPOILED))
    kernel = host_paged.HostKernel(named, tmp_path, source=changed)
    with pytest.raises(AssertionError):
        for case in SPOILED:
            check(kernel, case)


def test_the_width_of_lists_has_no_effect_up_to_16384_keys(recorded: Callable[..., None], tmp_path: Path) -> None:
    """On the bits of batch-invariant results; above, parts are longer."""
    named = spec_of(KERNELS[0])
    case = PagedCase("lists", (9000, 3000), (1, 2), 4, page_size=16, entries=100, entry_keys=16, batch_invariant=True)
    recorded(generate(named).source, repr(case))
    kernel = host_paged.HostKernel(named, tmp_path)
    inputs = verified.inputs_of(case, kernel.spec, CPU)
    lists = inputs.options.pop("lists")
    results = []
    for width in (case.entries, 300, 16384 // case.entry_keys, 20000 // case.entry_keys):
        wide = torch.full((*lists.shape[:2], width), -1, dtype=torch.int32)
        wide[..., : case.entries] = lists
        results.append(kernel(inputs.q, inputs.k, inputs.v, lists=wide, **inputs.options).out)
    assert [torch.equal(result, results[0]) for result in results] == [True, True, True, False]


@pytest.mark.parametrize("heads", [2, 6])
def test_threads_of_other_rows_add_parts_too(heads: int, recorded: Callable[..., None], tmp_path: Path) -> None:
    """A request of few rows and many parts: two or four slices of threads add them."""
    named = spec_of(KERNELS[0])
    case = PagedCase("one request", (2400,), (1,), heads=heads, kv_heads=1, page_size=16)
    recorded(generate(named).source, repr(case))
    check(host_paged.HostKernel(named, tmp_path, blocks=40), case)


@pytest.mark.parametrize("fields", [KERNELS[0], KERNELS[3]], ids=words)
def test_tables_lengths_and_lists_may_hold_anything(
    fields: dict[str, Any], recorded: Callable[..., None], tmp_path: Path
) -> None:
    """Every load lies in a tensor, which the host checks; memory around the result stays as it was."""
    named = spec_of(fields)
    recorded(generate(named).source)
    kernel = host_paged.HostKernel(named, tmp_path)
    for seed in range(24):
        kernel.host.order = seed
        paged_garbage.check(kernel, seed)
