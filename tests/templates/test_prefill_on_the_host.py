"""Prefill over pages without a GPU: the generated source runs on the host, thread by thread (host_prefill.py)."""

from __future__ import annotations

import platform
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import host_prefill  # noqa: E402
from host_streams import pretend_stream  # noqa: E402

from codegen.library import find_spec  # noqa: E402
from codegen.paged_cases import PagedCase  # noqa: E402
from codegen.plans.attention import split_kv  # noqa: E402
from codegen.render import generate  # noqa: E402
from codegen.spec import AttentionSpec  # noqa: E402
from runtime.driver import workspace  # noqa: E402
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


PACKED_CASES = (
    PagedCase("few_queries", (300, 70), (40, 33), heads=8, kv_heads=1, page_size=16),
    PagedCase("two_packs", (90, 0, 33), (31, 9, 0), heads=16, kv_heads=1, page_size=64, layout="HND"),
    PagedCase("shared", (200, 70), (17, 5), heads=16, kv_heads=2, page_size=32, shared=True, before=3),
    PagedCase("window", (300,), (70,), heads=8, kv_heads=1, page_size=16, window=(60, 2), sink_keys=5),
    PagedCase("spoiled", (290, 33), (30, 33), heads=8, kv_heads=1, page_size=16, layout="rows", spoiled=True),
    PagedCase("without_keys", (0, 3), (5, 20), heads=8, kv_heads=1, page_size=64),
    PagedCase("no_pages", (100, 7), (64, 7), heads=8, kv_heads=1, page_size=0),
)
PACKED = (
    {"head_dim": 64, "pack_gqa": 8, "sink": True},
    {"head_dim": 64, "pack_gqa": 2, "dtype": "bf16"},
    {"head_dim": 128, "pack_gqa": 4, "dtype": "bf16"},
    {"head_dim": 192, "pack_gqa": 2},
    {"head_dim": 256, "pack_gqa": 2, "dtype": "bf16", "softcap": 50.0},
    {"head_dim": 64, "sink": True, "softcap": 3.0},
    {"head_dim": 128, "pack_gqa": 4, "dtype": "bf16", "cache": "e4m3"},
    {"head_dim": 64, "pack_gqa": 8, "sink": True, "cache": "e4m3"},
)
SPLIT_CASES = (
    PagedCase("one_tile", (700,), (20,), heads=8, kv_heads=1, page_size=16),
    PagedCase("short_and_long", (600, 30, 0, 200), (9, 30, 5, 0), heads=8, kv_heads=1, page_size=64, layout="HND"),
    PagedCase("sink_window", (900,), (33,), heads=8, kv_heads=1, page_size=32, window=(300, 4), sink_keys=70),
    PagedCase("spoiled", (600,), (30,), heads=8, kv_heads=1, page_size=16, layout="rows", spoiled=True),
)
SPLIT = (
    {"head_dim": 64, "pack_gqa": 8, "sink": True},
    {"head_dim": 192, "pack_gqa": 2, "dtype": "bf16"},
    {"head_dim": 64},
    {"head_dim": 128, "pack_gqa": 4, "dtype": "bf16", "cache": "e4m3"},
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


@pytest.mark.parametrize("fields", PACKED, ids=str)
def test_packed_heads_sinks_and_caps_are_those_of_the_definition(
    fields: dict[str, Any], recorded: Callable[..., None], tmp_path: Path
) -> None:
    named = find_spec({**FIELDS, "dtype": "fp16", **fields})
    spec = named.spec
    assert isinstance(spec, AttentionSpec)
    cases = [replace(case, sinks=spec.sink, softcap=spec.softcap) for case in PACKED_CASES]
    recorded(generate(named).source, repr(cases))
    kernel = host_prefill.HostKernel(named, tmp_path)
    for order, case in enumerate(cases):
        kernel.host.late, kernel.host.order = order % 2 == 0, order
        check(kernel, case)


def splits_of_launches(kernel: host_prefill.HostKernel, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Parts of a tile of the launches from here on."""
    found: list[int] = []
    launch, offset = kernel.host.launch, kernel.host.layout.offsets["splits"]

    def launched(signature: Any, *rest: Any, **named: Any) -> None:
        found.extend(struct.unpack_from("i", signature.block, offset))
        launch(signature, *rest, **named)

    monkeypatch.setattr(kernel.host, "launch", launched)
    return found


@pytest.mark.parametrize("fields", SPLIT, ids=str)
def test_parts_of_the_keys_are_added_in_order(
    fields: dict[str, Any], recorded: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With parts of 64 keys or more, so that short requests have several; in any order of thread blocks."""
    monkeypatch.setattr(split_kv, "LEAST_KEYS", 64)
    named = find_spec({**FIELDS, "dtype": "fp16", "split_kv": True, "tile": {"m": 128, "n": 64}, **fields})
    spec = named.spec
    assert isinstance(spec, AttentionSpec)
    cases = [replace(case, sinks=spec.sink) for case in SPLIT_CASES]
    recorded(generate(named).source, repr(cases))
    kernel = host_prefill.HostKernel(named, tmp_path, blocks=40)
    splits = splits_of_launches(kernel, monkeypatch)
    for order, case in enumerate(cases):
        kernel.host.late, kernel.host.order = order % 2 == 0, order
        check(kernel, case)
    assert len(splits) == len(cases) and min(splits) > 1
    assert not any(counters.any() for counters in workspace._counters.values())


@pytest.mark.parametrize(
    ("was", "instead"),
    [
        ("const int number = skipped + i;", "const int number = i;"),
        ("row_sum[0] += state.z * weight[0];", "row_sum[0] = state.z * weight[0];"),
        ("part < parts ? end - first : 0", "part < parts ? end - first - (part == 1) : 0"),
        ("if (*is_last) *counter = 0;", ""),
    ],
    ids=["the keys of a part", "the sum of parts", "all keys", "counters"],
)
def test_what_is_wrong_with_parts_shows(
    was: str, instead: str, recorded: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(split_kv, "LEAST_KEYS", 64)
    named = find_spec({**FIELDS, "dtype": "fp16", "split_kv": True, **SPLIT[0], "tile": {"m": 128, "n": 64}})
    source = generate(named).source
    assert was in source
    changed = source.replace(was, instead, 1)
    case = replace(SPLIT_CASES[0], sinks=True)
    recorded(changed, repr(case))
    kernel = host_prefill.HostKernel(named, tmp_path, changed, blocks=40)
    kernel.host.late = False
    with pytest.raises(AssertionError):
        for _ in range(2):
            check(kernel, case)


@pytest.mark.parametrize(
    ("was", "instead"),
    [
        ("row % kPackGqa * p.o_head_stride", "row % 2 * p.o_head_stride"),
        ("first_query + (row + j / 2 % 2 * 8) / kPackGqa", "first_query + row + j / 2 % 2 * 8"),
        ("tile.head) * kPackGqa + row % kPackGqa", "tile.head) * kPackGqa"),
        ("tile.head * kPackGqa + packed_head", "tile.head * kPackGqa"),
    ],
    ids=["rows of O", "the query of a row", "rows of the LSE", "the sink of a head"],
)
def test_what_is_wrong_with_packs_shows(was: str, instead: str, recorded: Callable[..., None], tmp_path: Path) -> None:
    named = find_spec({**FIELDS, "dtype": "fp16", "head_dim": 64, "pack_gqa": 8, "sink": True})
    source = generate(named).source
    assert was in source
    changed = source.replace(was, instead, 1)
    cases = [replace(case, sinks=True) for case in PACKED_CASES[:2]]
    recorded(changed, repr(cases))
    kernel = host_prefill.HostKernel(named, tmp_path, changed)
    kernel.host.late = False
    with pytest.raises(AssertionError):
        for case in cases:
            check(kernel, case)


def test_a_sink_of_minus_infinity_adds_nothing(recorded: Callable[..., None], tmp_path: Path) -> None:
    named = find_spec({**FIELDS, "dtype": "fp16", "head_dim": 64, "pack_gqa": 8, "sink": True})
    case = PagedCase("sinks", (70, 0), (20, 9), heads=8, kv_heads=1, sinks=True)
    recorded(generate(named).source, repr(case))
    kernel = host_prefill.HostKernel(named, tmp_path)
    inputs = verified.inputs_of(case, kernel.spec, CPU)
    inputs.options["sink"].fill_(float("-inf"))
    right, _ = verified.oracle(replace(case, sinks=False), kernel.spec, inputs)
    out, lse = kernel(inputs.q, inputs.k, inputs.v, **inputs.options, return_lse=True)
    torch.testing.assert_close(out.double(), right, atol=2e-3, rtol=2e-3)
    assert lse is not None and (lse[:, 20:] == float("-inf")).all()


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


E4M3_CASES = (
    *CASES,
    PagedCase("token_scales", (300, 70), (150, 70), heads=2, kv_heads=1, page_size=16, token_scales=True),
    PagedCase("of_heads", (290,), (140,), heads=4, kv_heads=2, layout="HND", window=(77, 3), token_scales=True),
)


@pytest.mark.parametrize(("head_dim", "dtype"), [(64, "fp16"), (128, "bf16")])
def test_an_e4m3_cache_is_converted(head_dim: int, dtype: str, recorded: Callable[..., None], tmp_path: Path) -> None:
    named = find_spec({**FIELDS, "head_dim": head_dim, "dtype": dtype, "cache": "e4m3"})
    recorded(generate(named).source, repr(E4M3_CASES))
    kernel = host_prefill.HostKernel(named, tmp_path)
    for order, (case, late) in enumerate(product(E4M3_CASES, (True, False))):
        kernel.host.late, kernel.host.order = late, order
        check(kernel, case)


@pytest.mark.parametrize("factor", [-0.5, 0.0], ids=["negative", "zero"])
def test_a_factor_of_keys_may_have_any_sign(factor: float, recorded: Callable[..., None], tmp_path: Path) -> None:
    named = find_spec({**FIELDS, "head_dim": 64, "dtype": "bf16", "cache": "e4m3"})
    recorded(generate(named).source, f"{CASES[0]} {factor}")
    kernel = host_prefill.HostKernel(named, tmp_path)
    inputs = verified.inputs_of(CASES[0], kernel.spec, CPU)
    inputs.options["k_scale"].fill_(factor)
    right, right_lse = verified.oracle(CASES[0], kernel.spec, inputs)
    out, lse = kernel(inputs.q, inputs.k, inputs.v, **inputs.options, return_lse=True)
    torch.testing.assert_close(out.double(), right, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(lse.double(), right_lse, atol=2e-3, rtol=1e-3)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("was", "instead"),
    [
        ("there & visible.contain(key + row + lane_row)", "there"),
        ("(key < end) &", "(key <= end) &"),
        ("(place ^ row % 8 * 16)", "place"),
        ("cp_async_wait<kBatches - 1>();", "cp_async_wait<kBatches>();"),
        ("inverse[0] *= v_factor, inverse[1] *= v_factor;", ""),
        ("if (p.scale_by_token) scale_columns(s, shared + kKScalesOffset", "if (false) scale_columns(s, shared"),
        ("kVScalesOffset + v_state.index * kTileN * 4", "kVScalesOffset"),
    ],
    ids=["unseen rows", "the last key", "the swizzle", "codes", "V", "keys", "values"],
)
def test_what_is_wrong_with_codes_shows(was: str, instead: str, recorded: Callable[..., None], tmp_path: Path) -> None:
    named = find_spec({**FIELDS, "head_dim": 128, "dtype": "fp16", "cache": "e4m3"})
    source = generate(named).source
    assert was in source
    changed = source.replace(was, instead)
    recorded(changed, repr(E4M3_CASES))
    kernel = host_prefill.HostKernel(named, tmp_path, changed)
    with pytest.raises(AssertionError):
        for case in E4M3_CASES:
            check(kernel, case)
