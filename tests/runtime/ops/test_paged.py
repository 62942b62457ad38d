"""paged_attention without a GPU: what reaches a launch, what is refused by name, its operator, and warm calls."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from scripts import imported

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from runtime import KeyLists, paged_attention, paged_workspace  # noqa: E402
from runtime.driver import launch  # noqa: E402
from runtime.errors import ArgumentError  # noqa: E402
from runtime.kernels.attention import AttentionResult  # noqa: E402
from runtime.kernels.paged_attention import UNBOUNDED, PagedAttentionKernel, Window, WorkspaceBytes  # noqa: E402
from runtime.ops import paged, paged_calls  # noqa: E402
from runtime.patterns import Causal, Dense, PrefixLM, SinkWindow, SlidingWindow  # noqa: E402

HALF, BF16, E4M3 = torch.float16, torch.bfloat16, torch.float8_e4m3fn
PAGES, SIZE, HEADS, KV_HEADS, D = 12, 16, 8, 2, 64
LENGTHS = (40, 3, 64)


@pytest.fixture
def driver() -> Iterator[ModuleType]:
    """A stand-in driver: calls with tensors of the CPU reach it."""
    with imported("pretended") as module, module.pretended():
        yield module


@pytest.fixture
def launches(driver: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Parameters of the launches so far, by name."""
    found: list[dict[str, Any]] = []

    def launched(self: Any, signature: Any, addresses: Any, stream: int, *, prologue: bool = True) -> None:
        del stream, prologue
        layout = self.layout
        values: dict[str, Any] = dict(addresses)
        for name, kind in layout.types.items():
            if kind in ("i32", "i64", "f32"):
                (values[name],) = struct.unpack_from(launch._FORMATS[kind], signature.block, layout.offsets[name])
        found.append(values)

    monkeypatch.setattr(launch.LoadedKernel, "launch", launched)
    return found


def int32(*values: int) -> Any:
    return torch.tensor(values, dtype=torch.int32)


def call(dtype: Any = HALF, cache: Any = None, **changes: Any) -> dict[str, Any]:
    """Arguments of a call: three requests of one query each."""
    kind = dtype if cache is None else cache
    shape = (PAGES, SIZE, KV_HEADS, D)
    given: dict[str, Any] = {"q": torch.randn(3, HEADS, D).to(dtype), "pattern": Causal()}
    given |= {name: torch.randn(shape).to(kind) for name in ("k_cache", "v_cache")}
    given |= {"block_table": torch.arange(PAGES, dtype=torch.int32).view(3, 4), "seq_lens": int32(*LENGTHS)}
    return given | changes


class Watch(TorchDispatchMode):
    """A mode that keeps the names of the operators that it sees.

    Attributes:
        seen: the names.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        self.seen.append(str(function))
        return function(*arguments, **(named or {}))


# What reaches a launch


def test_a_launch_has_the_sizes_and_strides_of_a_call(launches: list[dict[str, Any]]) -> None:
    given = call()
    out = paged_attention(**given)
    assert out.shape == given["q"].shape and out.dtype == HALF and out.is_contiguous()
    (found,) = launches
    assert found["q"] == given["q"].data_ptr() and found["out"] == out.data_ptr() and found["lse"] == 0
    assert (found["batch"], found["total_q"], found["request_queries"]) == (3, 3, 1)
    assert (found["kv_heads"], found["group"], found["max_keys"], found["pages"]) == (KV_HEADS, 4, 64, PAGES)
    assert (found["page_shift"], found["page_mask"]) == (4, 15)
    assert [found[f"{axis}_chunks"] for axis in ("page", "token", "head")] == [256, 16, 8]
    assert (found["window_left"], found["window_right"], found["sink_keys"]) == (UNBOUNDED, 0, 0)
    assert found["cu_seqlens_q"] == found["lists"] == found["sink"] == found["most_parts"] == 0
    assert found["counters"] and found["partials"]


@pytest.mark.parametrize(
    ("pattern", "numbers"),
    [
        (Dense(), (UNBOUNDED, UNBOUNDED, 0)),
        (Causal(), (UNBOUNDED, 0, 0)),
        (SlidingWindow(5, 2), (5, 2, 0)),
        (SinkWindow(4, 100), (100, 0, 4)),
    ],
    ids=["dense", "causal", "sliding_window", "sink_window"],
)
def test_patterns_are_numbers_of_a_launch(
    launches: list[dict[str, Any]], pattern: Any, numbers: tuple[int, ...]
) -> None:
    paged_attention(**call(pattern=pattern))
    assert tuple(launches[0][name] for name in ("window_left", "window_right", "sink_keys")) == numbers


def test_caches_may_be_views(launches: list[dict[str, Any]]) -> None:
    """Heads first, K and V of one tensor, K and V in one row, every other page."""
    both = torch.zeros(PAGES, 2, SIZE, KV_HEADS, D).half()
    rows = torch.zeros(PAGES, SIZE, KV_HEADS, 2 * D).half()
    heads_first = torch.zeros(2, PAGES, KV_HEADS, SIZE, D).half()
    apart = torch.zeros(2, 2 * PAGES, SIZE, KV_HEADS, D).half()[:, ::2]
    expected = (
        (both.unbind(1), "NHD", [512, 16, 8]),
        (rows.split(D, -1), "NHD", [512, 32, 16]),
        (heads_first.unbind(), "HND", [256, 8, 128]),
        (apart.unbind(), "NHD", [512, 16, 8]),
    )
    for (k, v), layout, chunks in expected:
        paged_attention(**call(k_cache=k, v_cache=v, layout=layout))
        found = launches[-1]
        assert [found[f"{axis}_chunks"] for axis in ("page", "token", "head")] == chunks
        assert (found["k_cache"], found["v_cache"]) == (k.data_ptr(), v.data_ptr())
    assert len(launches) == len(expected)


def test_without_a_table_a_page_is_a_request(launches: list[dict[str, Any]]) -> None:
    k = torch.zeros(3, 50, KV_HEADS, D).half()
    paged_attention(**call(k_cache=k, v_cache=k.clone(), block_table=None))
    found = launches[0]
    assert (found["batch"], found["max_keys"], found["page_shift"], found["block_table"]) == (3, 50, 31, 0)


def test_lists_and_counts_have_strides(launches: list[dict[str, Any]]) -> None:
    lists = KeyLists(torch.zeros(KV_HEADS, 3, 20, dtype=torch.int32)[:, :, :9], torch.zeros(1, 3).int().expand(2, 3), 4)
    paged_attention(**call(pattern=lists))
    found = launches[0]
    assert (found["list_heads"], found["list_head_stride"], found["list_token_stride"]) == (KV_HEADS, 60, 20)
    assert (found["list_length"], found["entry_shift"]) == (9, 2)
    assert (found["count_head_stride"], found["count_token_stride"]) == (0, 1)
    assert found["list_steps"] == 1 and found["token_tiles"] == 1


def test_factors_of_heads_and_of_tokens(launches: list[dict[str, Any]]) -> None:
    of_heads = torch.ones(KV_HEADS)
    paged_attention(**call(BF16, E4M3, k_scale=of_heads, v_scale=torch.ones(1)))
    found = launches[-1]
    assert (found["k_scale_stride"], found["v_scale_stride"], found["scale_by_token"]) == (1, 0, 0)
    shape, heads_first = (PAGES, SIZE, KV_HEADS, D), (PAGES, KV_HEADS, SIZE, D)
    for layout, of in (("NHD", shape), ("HND", heads_first)):
        k, scale = torch.zeros(of).to(E4M3), torch.ones(of[:3])
        for _ in range(2):
            paged_attention(**call(k_cache=k, v_cache=k.clone(), layout=layout, k_scale=scale, v_scale=scale.clone()))
            found = launches[-1]
            strides = [found[f"scale_{axis}_stride"] for axis in ("page", "token", "head")]
            assert strides == [32, *((2, 1) if layout == "NHD" else (1, 16))] and found["scale_by_token"] == 1


def test_factors_of_the_other_order_are_refused_in_later_calls_too(launches: list[dict[str, Any]]) -> None:
    """A kept launch is that of the given strides, not of the view that the kernel takes."""
    k = torch.zeros(PAGES, KV_HEADS, SIZE, D).to(E4M3)
    right, wrong = torch.ones(PAGES, KV_HEADS, SIZE), torch.ones(PAGES, KV_HEADS, SIZE).transpose(1, 2)
    given = call(k_cache=k, v_cache=k.clone(), layout="HND")
    paged_attention(**given, k_scale=right, v_scale=right.clone())
    with pytest.raises(ArgumentError, match=r"^k_scale: has shape \(12, 2, 16\), expected"):
        paged_attention(**given, k_scale=wrong, v_scale=wrong.clone().transpose(1, 2).contiguous().transpose(1, 2))
    assert len(launches) == 1


def test_out_lse_and_workspace(launches: list[dict[str, Any]]) -> None:
    out, memory = torch.empty(3, HEADS, D).half(), torch.zeros(1 << 22, dtype=torch.uint8)
    result = paged_attention(**call(), out=out, workspace=memory, return_lse=True, sink=torch.zeros(HEADS))
    assert isinstance(result, AttentionResult) and result.out is out and result.lse is not None
    assert result.lse.shape == (HEADS, 3) and result.lse.dtype == torch.float32
    found = launches[0]
    assert found["out"] == out.data_ptr() and found["lse"] == result.lse.data_ptr()
    assert found["counters"] == memory.data_ptr() and memory.data_ptr() < found["partials"]
    assert found["partials"] % 16 == 0


def test_out_counts_as_changed(launches: list[dict[str, Any]]) -> None:
    out = torch.empty(3, HEADS, D).half()
    for calls in (1, 2):
        paged_attention(**call(), out=out)
        assert out._version == calls and len(launches) == calls


def test_a_warm_call_with_its_own_memory_allocates_nothing(launches: list[dict[str, Any]]) -> None:
    given = call(out=torch.empty(3, HEADS, D).half(), workspace=torch.zeros(1 << 22, dtype=torch.uint8))
    paged_attention(**given)
    names = ("q", "k_cache", "v_cache", "block_table", "seq_lens", "out", "workspace")
    ((_, kept),) = next(iter(paged_calls._launches._kept.values()))
    with Watch() as watch:  # around the launch alone: a call in a mode goes through the operator
        kept(tuple(given[name] for name in names))
    assert watch.seen == [] and len(launches) == 2


def test_a_tensor_that_is_given_twice_keeps_its_launch(launches: list[dict[str, Any]]) -> None:
    cache, factor = torch.zeros(12, 16, KV_HEADS, D).to(torch.float8_e4m3fn), torch.ones(1)
    given = call() | {"k_cache": cache, "v_cache": cache, "k_scale": factor, "v_scale": factor}
    with patch.object(PagedAttentionKernel, "_check", autospec=True, side_effect=PagedAttentionKernel._check) as check:
        for _ in range(3):
            paged_attention(**given)
    assert check.call_count == 1 and len(launches) == 3
    assert all(each["v_scale"] == factor.data_ptr() and each["v_cache"] == cache.data_ptr() for each in launches)


def test_batch_invariant_calls_have_counters_for_each_tile(launches: list[dict[str, Any]]) -> None:
    paged_attention(**call(), batch_invariant=True)
    assert launches[0]["most_parts"] == 16


def test_a_workspace_serves_calls_of_its_sizes(launches: list[dict[str, Any]]) -> None:
    for invariant in (False, True):
        kernel = paged_calls._kernel(None, "fp16", "same", D)
        with patch("runtime.kernels.paged_attention.entered", lambda index: nullcontext()):
            size = kernel.workspace_bytes(
                torch.device("cpu"), batch=3, tokens=3, heads=HEADS, kv_heads=KV_HEADS, batch_invariant=invariant
            ).total
        memory = torch.zeros(size, dtype=torch.uint8)
        paged_attention(**call(), workspace=memory, batch_invariant=invariant)
        with pytest.raises(ArgumentError, match=rf"^workspace: has {size - 16} bytes, expected at least {size}"):
            paged_attention(**call(), workspace=memory[:-16], batch_invariant=invariant)
    assert len(launches) == 2


def test_calls_that_share_a_workspace_leave_the_counters_of_each_other(
    launches: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No call writes sums where another has counters, whatever kinds and sizes share a workspace."""
    device = torch.device("cpu")
    many = {"batch": 40, "tokens": 300, "heads": HEADS, "kv_heads": KV_HEADS}
    with (
        patch("runtime.kernels.paged_attention.entered", lambda index: nullcontext()),
        patch("runtime.kernels.paged_prefill.entered", lambda index: nullcontext()),
        patch.object(paged_calls, "arch_of", lambda device: "sm_90a"),
    ):
        divides = paged_calls._prefill_kernel(None, "fp16", D, 4, cache="same", sink=False, softcap=None)
        monkeypatch.setattr(paged_calls, "_dividing_kernels", lambda index, head_dim: (divides,))
        monkeypatch.setattr(paged_calls, "verified_packs", lambda *kind, **options: frozenset({1, 4}))
        size = paged_calls.bytes_of_workspace(device, D, many, batch_invariant=True)
        parts = [
            paged_calls._kernel(None, "fp16", cache, D).workspace_bytes(device, **many, batch_invariant=invariant)
            for cache in ("same", "e4m3")
            for invariant in (False, True)
        ]
        parts.append(divides.workspace_bytes(device))
    counters = max(part.counters for part in parts)
    memory = torch.zeros(size, dtype=torch.uint8)
    for invariant in (False, True):
        paged_attention(**call(), workspace=memory, batch_invariant=invariant)
    with patch.object(paged_calls, "arch_of", lambda device: "sm_90a"):
        chunk, table = torch.zeros(96, HEADS, D).half(), torch.zeros(3, 512, dtype=torch.int32)
        paged_attention(**call(q=chunk, block_table=table, seq_lens=None), workspace=memory)
    assert launches[-1].pop("splits") > 1
    launches[-1]["counters"] = launches[-1].pop("scheduler")
    assert len({part.counters for part in parts}) > 1
    for launched in launches:
        assert launched["counters"] == memory.data_ptr()
        assert launched["partials"] >= memory.data_ptr() + counters


# What is refused


def expanded_out() -> Any:
    return torch.zeros(1, HEADS, D).half().expand(3, HEADS, D)


def shared() -> dict[str, Any]:
    memory = torch.zeros(PAGES * SIZE * KV_HEADS * D).half()
    return {"k_cache": memory.view(PAGES, SIZE, KV_HEADS, D), "out": memory[: 3 * HEADS * D].view(3, HEADS, D)}


def cache(*shape: int, dtype: Any = HALF) -> dict[str, Any]:
    return {name: torch.zeros(shape).to(dtype) for name in ("k_cache", "v_cache")}


def both(tensor: Any) -> dict[str, Any]:
    return {"k_cache": tensor, "v_cache": tensor.clone(memory_format=torch.preserve_format)}


def lists(*shape: int, **more: Any) -> KeyLists:
    return KeyLists(torch.zeros(shape, dtype=torch.int32), **more)


def elsewhere(*shape: int) -> Any:
    """Integers on another device."""
    return torch.zeros(shape, dtype=torch.int32, device="meta")


def bytes_at(offset: int) -> Any:
    return torch.zeros((1 << 22) + 32, dtype=torch.uint8)[offset:]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "q type": ({"q": torch.zeros(3, HEADS, D)}, r"^q: is torch.float32, expected torch.float16 or torch.bfloat16"),
    "q rank": ({"q": torch.zeros(3, HEADS, D, 1).half()}, r"^q: has shape \(3, 8, 64, 1\), expected \(tokens, heads"),
    "q head_dim": ({"q": torch.zeros(3, HEADS, 80).half()}, r"^q: has head_dim 80, expected 64, 128, 192, 256 with"),
    "q rows": ({"q": torch.zeros(3, HEADS, 100).half()[..., :64]}, r"^q: has stride 100 in dimension 1; strides must"),
    "q columns": ({"q": torch.zeros(3, D, HEADS).half().mT}, r"^q: has stride 8 in its last dimension"),
    "q tokens": ({"q": torch.zeros(4, HEADS, D).half()}, r"^q: has 4 tokens for 3 requests: pass cu_seqlens_q"),
    "q no tensor": ({"q": 3}, r"^q: is int, expected a torch.Tensor"),
    "no cache": ({"k_cache": None}, r"^k_cache: is NoneType, expected a torch.Tensor"),
    "cache type": (
        cache(PAGES, SIZE, KV_HEADS, D, dtype=BF16),
        r"^k_cache: is torch.bfloat16, expected q's type, torch",
    ),
    "cache e5m2": (cache(PAGES, SIZE, KV_HEADS, D, dtype=torch.float8_e5m2), r"^k_cache: is torch.float8_e5m2"),
    "one cache": ({"v_cache": torch.zeros(PAGES, SIZE, KV_HEADS, D).to(E4M3)}, r"^v_cache: is torch.float8_e4m3fn, k"),
    "cache rank": (cache(PAGES, SIZE, D), r"^k_cache: has shape \(12, 16, 64\), expected \(pages, page_size, kv_heads"),
    "HND rank": ({**cache(PAGES, SIZE, D), "layout": "HND"}, r"^k_cache: .*expected \(pages, kv_heads, page_size"),
    "cache head_dim": (cache(PAGES, SIZE, KV_HEADS, 128), r"^k_cache: has head_dim 128, q has 64"),
    "heads": (cache(PAGES, SIZE, 3, D), r"^k_cache: has 3 heads, q has 8: expected a divisor"),
    "page size": (cache(PAGES, 24, KV_HEADS, D), r"^k_cache: has pages of 24 tokens, expected a power of two"),
    "v shape": ({"v_cache": torch.zeros(PAGES + 1, SIZE, KV_HEADS, D).half()}, r"^v_cache: has shape and strides"),
    "v strides": (
        {"v_cache": torch.zeros(PAGES, KV_HEADS, SIZE, D).half().transpose(1, 2)},
        r"^v_cache: has shape and",
    ),
    "odd strides": (both(torch.zeros(PAGES, SIZE, KV_HEADS, D + 4).half()[..., :D]), r"^k_cache: has stride 68 in dim"),
    "e4m3 strides": (
        both(torch.zeros(PAGES, SIZE, KV_HEADS, D + 8).to(E4M3)[..., :D]),
        r"^k_cache: has stride 72 in dimension 2; strides must be multiples of 16",
    ),
    "columns apart": (
        both(torch.zeros(PAGES, SIZE, KV_HEADS, 2 * D).half()[..., ::2]),
        r"^k_cache: has stride 2 in its",
    ),
    "e4m3 192": (
        {"q": torch.zeros(3, 8, 192).half(), **cache(PAGES, SIZE, 2, 192, dtype=E4M3)},
        r"^q: has head_dim 192",
    ),
    "table type": (
        {"block_table": torch.zeros(3, 4, dtype=torch.int64)},
        r"^block_table: is torch.int64, .*to\(torch.i",
    ),
    "table rank": ({"block_table": int32(1, 2, 3)}, r"^block_table: has shape \(3,\), expected \(batch, most pages"),
    "table rows": ({"block_table": torch.zeros(3, 8).int()[:, ::2]}, r"^block_table: has stride 2 in its last dim"),
    "empty table": ({"block_table": torch.zeros(3, 0).int()}, r"^block_table: is empty: \(3, 0\)"),
    "table": ({"block_table": [1]}, r"^block_table: is list, expected a torch.Tensor"),
    "lengths": ({"seq_lens": int32(1, 2)}, r"^seq_lens: has shape \(2,\), expected \(batch 3\)"),
    "length type": (
        {"seq_lens": torch.ones(3)},
        r"^seq_lens: is torch.float32, expected torch.int32: pass seq_lens.to",
    ),
    "lengths apart": ({"seq_lens": torch.zeros(6).int()[::2]}, r"^seq_lens: has stride 2"),
    "bounds": ({"cu_seqlens_q": int32(0, 1, 2)}, r"^cu_seqlens_q: has shape \(3,\), expected \(batch \+ 1: 4\)"),
    "bounds type": ({"cu_seqlens_q": int32(0, 1, 2, 3).long()}, r"^cu_seqlens_q: is torch.int64"),
    "pattern": ({"pattern": "causal"}, r"^pattern: is str; allowed over pages: dense, causal, sliding_window, sink_w"),
    "prefix": ({"pattern": PrefixLM(int32(1))}, r"^pattern: is prefix_lm; allowed over pages"),
    "align": ({"pattern": Causal(align="top_left")}, r"^pattern: has align top_left, expected bottom_right"),
    "list heads": ({"pattern": lists(3, 3, 4)}, r"^pattern.indices: has shape \(3, 3, 4\), expected \(kv_heads 1 or 2"),
    "list tokens": ({"pattern": lists(2, 4, 4)}, r"^pattern.indices: has shape \(2, 4, 4\), .*tokens 3"),
    "no entries": ({"pattern": lists(2, 3, 0)}, r"^pattern.indices: has 0 entries per list, expected 1 to"),
    "list columns": ({"pattern": KeyLists(torch.zeros(2, 3, 8).int()[..., ::2])}, r"^pattern.indices: has stride 2"),
    "layout": ({"layout": "NDH"}, r"^layout: is 'NDH', expected NHD or HND"),
    "scale": ({"scale": -1.0}, r"^scale: is -1"),
    "scale nan": ({"scale": float("nan")}, r"^scale: is nan"),
    "softcap": ({"softcap": 0.0}, r"^softcap: is 0.0, expected a number from 0.001 to 1000"),
    "softcap word": ({"softcap": "odd"}, r"^softcap: is str, expected a number"),
    "sink heads": ({"sink": torch.zeros(2)}, r"^sink: has shape \(2,\), expected \(heads 8\)"),
    "k_scale": ({"k_scale": torch.ones(1)}, r"^k_scale: is given, but the cache is fp16, which has no scale"),
    "return_lse": ({"return_lse": 1}, r"^return_lse: is 1, expected True or False"),
    "batch_invariant": ({"batch_invariant": None}, r"^batch_invariant: is None, expected True or False"),
    "validate": ({"validate": "yes"}, r"^validate: is 'yes', expected True or False"),
    "out shape": ({"out": torch.zeros(3, HEADS, 2 * D).half()}, r"^out: has shape \(3, 8, 128\), expected \(tokens 3"),
    "out rows": ({"out": torch.zeros(3, HEADS, 100).half()[..., :D]}, r"^out: has stride 100 in dimension 1"),
    "out expanded": ({"out": expanded_out()}, r"^out: is expanded in dimension 0: its elements"),
    "out shared": (shared(), r"^out: overlaps k_cache in memory; it must lie elsewhere"),
    "table elsewhere": (
        {"block_table": elsewhere(3, 4)},
        r"^block_table: is on meta, q is on cpu: pass block_table.to\(q.device\)",
    ),
    "lengths elsewhere": ({"seq_lens": elsewhere(3)}, r"^seq_lens: is on meta, q is on cpu: pass seq_lens.to"),
    "bounds elsewhere": ({"cu_seqlens_q": elsewhere(4)}, r"^cu_seqlens_q: is on meta, q is on cpu: pass cu_seqlens_q"),
    "lists elsewhere": ({"pattern": KeyLists(elsewhere(2, 3, 4))}, r"^pattern.indices: is on meta, q is on cpu"),
    "counts elsewhere": (
        {"pattern": KeyLists(torch.zeros(2, 3, 4).int(), elsewhere(2, 3))},
        r"^pattern.counts: is on meta, q is on cpu",
    ),
    "k_scale elsewhere": (
        {**cache(PAGES, SIZE, KV_HEADS, D, dtype=E4M3), "k_scale": torch.ones(1, device="meta")},
        r"^k_scale: is torch.float32 on meta, expected torch.float32 on cpu",
    ),
    "v_scale elsewhere": (
        {
            **cache(PAGES, SIZE, KV_HEADS, D, dtype=E4M3),
            "k_scale": torch.ones(PAGES, SIZE, KV_HEADS),
            "v_scale": torch.ones(PAGES, SIZE, KV_HEADS, device="meta"),
        },
        r"^v_scale: is torch.float32 on meta, expected torch.float32 on cpu",
    ),
    "workspace type": (
        {"workspace": torch.zeros(1 << 22).int()},
        r"^workspace: is torch.int32 \(4194304,\) on cpu, exp",
    ),
    "workspace size": ({"workspace": bytes_at(0)[:64]}, r"^workspace: has 64 bytes, expected at least \d+, contiguous"),
    "workspace apart": (
        {"workspace": bytes_at(0)[::2]},
        r"^workspace: has \d+ bytes, expected at least \d+, contiguous",
    ),
    "workspace place": (
        {"workspace": bytes_at(1)},
        r"^workspace: starts at address 0x\w+, which is not a multiple of 16",
    ),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("warm", [False, True], ids=["first", "later"])
def test_bad_arguments_are_named_before_a_launch(launches: list[dict[str, Any]], name: str, warm: bool) -> None:
    changes, says = WRONG[name]
    if warm:
        paged_attention(**call())
        paged_attention(**call(), out=torch.empty(3, HEADS, D).half())
        paged_attention(**call(), workspace=bytes_at(0))
        paged_attention(**call(pattern=lists(2, 3, 4)))
    before = len(launches)
    with pytest.raises(ArgumentError, match=says):
        paged_attention(**call(**changes))
    assert len(launches) == before


def test_addresses_are_checked_in_each_call(launches: list[dict[str, Any]]) -> None:
    """Calls that differ from an earlier one in addresses alone."""
    memory = torch.zeros(3 * HEADS * D + 8).half()
    aligned, odd = (memory[i:][: 3 * HEADS * D].view(3, HEADS, D) for i in (0, 1))
    paged_attention(**call(q=aligned))
    for name in ("q", "out"):
        with pytest.raises(ArgumentError, match=rf"^{name}: starts at address"):
            paged_attention(**call(**{name: odd}))
    table = torch.zeros(3 * HEADS * D // 2, dtype=torch.int32)
    inside = table.view(torch.float16).view(3, HEADS, D)
    paged_attention(**call(out=torch.empty(3, HEADS, D).half()))
    with pytest.raises(ArgumentError, match=r"^out: overlaps block_table in memory"):
        paged_attention(**call(block_table=table[:12].view(3, 4), out=inside))
    with pytest.raises(ArgumentError, match=r"^workspace: overlaps q in memory"):
        big = torch.zeros(1 << 22, dtype=torch.uint8)
        paged_attention(**call(q=big[: 3 * HEADS * D * 2].view(torch.float16).view(3, HEADS, D), workspace=big))
    with pytest.raises(ArgumentError, match=r"^workspace: overlaps q in memory"):
        other = torch.zeros(3, HEADS, D).half()
        paged_attention(**call(q=other, workspace=big))
        paged_attention(**call(q=big[: 3 * HEADS * D * 2].view(torch.float16).view(3, HEADS, D), workspace=big))
    assert len(launches) == 3


FREED = int32(0, -1, 99, *range(3, 12)).view(3, 4)
VALUES: dict[str, tuple[dict[str, Any], str | None]] = {
    "right": ({}, None),
    "falling": ({"cu_seqlens_q": int32(0, 2, 1, 3)}, r"^cu_seqlens_q: falls from 2 to 1 at entry 2; expected rising"),
    "behind": ({"cu_seqlens_q": int32(0, 2, 2, 4)}, r"^cu_seqlens_q: falls from 4 to 3 at the 3 tokens, after entry 3"),
    "before": ({"cu_seqlens_q": int32(-1, 2, 2, 3)}, r"^cu_seqlens_q: falls from 0 to -1 at entry 0"),
    "long": ({"seq_lens": int32(1, 65, 2)}, r"^seq_lens: has 65 for request 1, expected 0 to 64, the keys that its"),
    "negative": ({"seq_lens": int32(1, 5, -2)}, r"^seq_lens: has -2 for request 2"),
    "page": (
        {"block_table": int32(*range(11), 12).view(3, 4)},
        r"^block_table: has page 12 at \[2, 3\], expected 0 to 11",
    ),
    "unused": ({"block_table": int32(0, 1, 2, -9, 4, *[99] * 3, 8, 9, 10, 11).view(3, 4)}, None),
    "all used": (
        {"block_table": int32(0, 1, 2, -9, *range(4, 12)).view(3, 4), "seq_lens": None},
        r"^block_table: has page -9 at \[0, 3\]",
    ),
    "outside of windows": ({"block_table": FREED, "seq_lens": None, "pattern": SlidingWindow(15)}, None),
    "in the window of a draft": (
        {"block_table": FREED, "seq_lens": None, "pattern": SlidingWindow(15), "cu_seqlens_q": int32(0, 2, 2, 3)},
        r"^block_table: has page 99 at \[0, 2\]",
    ),
    "in a window": (
        {"block_table": FREED, "seq_lens": None, "pattern": SlidingWindow(16)},
        r"^block_table: has page 99 at \[0, 2\]",
    ),
    "of sinks": (
        {"block_table": FREED, "seq_lens": None, "pattern": SinkWindow(17, 15)},
        r"^block_table: has page -1 at \[0, 1\]",
    ),
    "no table": (
        {"block_table": None, **cache(3, 40, KV_HEADS, D), "seq_lens": int32(1, 41, 2)},
        r"^seq_lens: has 41 f",
    ),
}


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("name", VALUES)
def test_values_are_checked_on_request(launches: list[dict[str, Any]], name: str, layout: str) -> None:
    changes, says = VALUES[name]
    given = call(**changes)
    if layout == "HND":
        given |= {each: given[each].transpose(1, 2).contiguous() for each in ("k_cache", "v_cache")}
    paged_attention(**given, layout=layout)  # not by default: any values are harmless
    with pytest.raises(ArgumentError, match=says) if says else nullcontext():
        paged_attention(**given, layout=layout, validate=True)
    assert len(launches) == (1 if says else 2)


@pytest.mark.parametrize("name", WRONG)
def test_shapes_are_checked_before_values(launches: list[dict[str, Any]], name: str) -> None:
    changes, says = WRONG[name]
    with pytest.raises(ArgumentError, match=says):
        paged_attention(**{"validate": True, **call(**changes)})
    assert not launches


def test_lists_are_checked_when_they_are_made() -> None:
    for changes, says in (
        ({"indices": [1]}, r"^indices: is list"),
        ({"indices": torch.zeros(2, 3, 4)}, r"^indices: is torch.float32, expected torch.int32: pass indices.to"),
        ({"indices": torch.zeros(3, 4).int()}, r"^indices: has shape \(3, 4\), expected \(kv_heads or 1, tokens, ent"),
        ({"counts": torch.zeros(3, 2).int()}, r"^counts: is torch.int32 \(3, 2\), expected torch.int32 \(2, 3\)"),
        ({"counts": 3}, r"^counts: is int"),
        *(({"keys": keys}, r"^keys: is .*, expected one of 1, 2, 4") for keys in (3, 0, 512, True, 1.0, "4", None)),
    ):
        with pytest.raises(ArgumentError, match=says):
            KeyLists(**{"indices": torch.zeros(2, 3, 4).int(), **changes})


def test_a_kernel_object_checks_what_the_function_fills_in(launches: list[dict[str, Any]]) -> None:
    kernel: Any = paged_calls._kernel(None, "fp16", "same", D)
    given = call()
    del given["pattern"]
    for changes, says in (
        ({"window": (1, 2, 3)}, r"^window: is "),
        ({"window": Window(-1)}, r"^window: is .*expected a Window of integers from 0 to 536870912"),
        ({"window": Window(2**31)}, r"^window: is "),
        ({"window": Window(1.5)}, r"^window: is "),
        ({"entry_keys": 3, "lists": torch.zeros(2, 3, 4).int()}, r"^entry_keys: is 3, expected one of 1, 2"),
        ({"entry_keys": True}, r"^entry_keys: is True"),
        ({"softcap": -1.0}, r"^softcap: is -1.0, expected a positive number"),
        ({"softcap": [1]}, r"^softcap: is list"),
        ({"scale": 0}, r"^scale: is 0"),
        ({"batch_invariant": 2}, r"^batch_invariant: is 2"),
        ({"return_lse": None}, r"^return_lse: is None"),
        ({"counts": torch.zeros(2, 3).int()}, r"^counts: is given without lists"),
        ({"q": torch.zeros(3, HEADS, 128).half()}, r"^q: has head_dim 128, expected 64"),
    ):
        with pytest.raises(ArgumentError, match=says):
            kernel(**{**given, **changes})
    assert not launches
    kernel(**given)
    assert len(launches) == 1


def test_factors_that_do_not_fit_are_refused(launches: list[dict[str, Any]]) -> None:
    of_tokens = torch.ones(PAGES, SIZE, KV_HEADS)
    for changes, says in (
        ({"k_scale": torch.ones(3)}, r"^k_scale: has shape \(3,\), expected \(1,\), \(kv_heads 2,\) or \(pages 12"),
        ({"v_scale": torch.ones(1).double()}, r"^v_scale: is torch.float64 on cpu, expected torch.float32"),
        ({"k_scale": 0.5}, r"^k_scale: is float, expected a torch.Tensor"),
        ({"k_scale": of_tokens}, r"^v_scale: has shape and strides None, k_scale has"),
        ({"k_scale": of_tokens, "v_scale": torch.ones(1)}, r"^v_scale: has shape and strides \(\(1,\), \(1,\)\)"),
        ({"k_scale": of_tokens, "v_scale": of_tokens.mT.contiguous().mT}, r"^v_scale: has shape and strides"),
    ):
        with pytest.raises(ArgumentError, match=says):
            paged_attention(**call(BF16, E4M3), **changes)
    assert not launches


def test_work_that_32_bits_do_not_count_is_refused(launches: list[dict[str, Any]]) -> None:
    table = torch.zeros(1, 1).int().expand(1, 1 << 20).contiguous()
    q = torch.zeros(1, 1, 1).half().expand(40000, HEADS, D).contiguous()
    with pytest.raises(ArgumentError, match=r"^q: has 40000 tokens of 1 requests, for up to 16777216 keys each"):
        paged_attention(**call(q=q, block_table=table, seq_lens=None), batch_invariant=True)
    with pytest.raises(ArgumentError, match=r"^block_table: has room for \d+ keys of a request, expected 1073741824"):
        paged_attention(**call(block_table=torch.empty(1, 1 << 27, dtype=torch.int32).expand(3, -1)))
    assert not launches


def test_a_first_call_in_a_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    paged_calls._kernel.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ArgumentError, match=r"^q: is in a CUDA graph capture, and the first call"):
        paged_calls._kernel(0, "fp16", "same", D)


SIZES: dict[str, Any] = {"batch": 3, "tokens": 3, "heads": 8, "kv_heads": 2, "head_dim": 64}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"batch": 0}, r"^batch: is 0, expected an integer from 1 to"),
        ({"tokens": True}, r"^tokens: is True"),
        ({"heads": 10**5000}, r"^heads: is "),
        ({"kv_heads": 3}, r"^kv_heads: is 3, expected a divisor of the 8 heads"),
        ({"head_dim": 80}, r"^head_dim: is 80, expected one of 64, 128, 192, 256"),
        ({"head_dim": 64.0}, r"^head_dim: is 64.0"),
        ({"batch_invariant": 1}, r"^batch_invariant: is 1"),
        ({"device": "cpu"}, r"^device: is cpu, expected a CUDA device"),
        ({"device": "cuda:99"}, r"^device: is 'cuda:99', torch sees 8 CUDA devices"),
        ({"device": 1.5}, r"^device: is 1.5"),
    ],
)
def test_sizes_of_a_workspace_are_checked(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], says: str) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    with pytest.raises(ArgumentError, match=says):
        paged_workspace(**{**SIZES, "device": "cuda:0", **changes})


@pytest.mark.parametrize(("arch", "caches"), [("sm_80", ["same"]), ("sm_90a", ["same", "e4m3"])])
def test_a_workspace_is_for_the_caches_of_its_device(
    monkeypatch: pytest.MonkeyPatch, arch: str, caches: list[str]
) -> None:
    asked: list[str] = []

    class Kernel:
        def workspace_bytes(self, *given: Any, batch_invariant: bool, **named: Any) -> WorkspaceBytes:
            return WorkspaceBytes(64, 16) if batch_invariant else WorkspaceBytes(16, 80)

    def kernel(index: int, dtype: str, cache: str, head_dim: int) -> Kernel:
        asked.append(cache)
        return Kernel()

    monkeypatch.setattr(paged_calls, "arch_of", lambda device: arch)
    monkeypatch.setattr(paged_calls, "_kernel", kernel)
    split = SimpleNamespace(workspace_bytes=lambda device: WorkspaceBytes(32, 112))
    found = (split,) if arch == "sm_90a" else ()
    monkeypatch.setattr(paged_calls, "_dividing_kernels", lambda index, head_dim: found)
    partials = 112 if arch == "sm_90a" else 80
    sizes = {name: size for name, size in SIZES.items() if name != "head_dim"}
    assert paged_calls.bytes_of_workspace(torch.device("cuda", 0), 64, sizes, batch_invariant=False) == (
        144 if arch == "sm_90a" else 96
    )
    assert asked == caches
    asked.clear()
    assert paged_calls.bytes_of_workspace(torch.device("cuda", 0), 64, sizes, batch_invariant=True) == 64 + partials
    assert asked == caches


# Operators


def test_gradients_are_refused(launches: list[dict[str, Any]]) -> None:
    for name in ("q", "k_cache", "v_cache"):
        given = call()
        given[name].requires_grad_()
        with pytest.raises(ArgumentError, match=rf"^{name}: requires a gradient, and attention over pages has no back"):
            paged_attention(**given)
        with torch.no_grad():
            paged_attention(**given)
    assert len(launches) == 3


def test_the_operators_reach_the_same_launch(launches: list[dict[str, Any]]) -> None:
    """A dispatch mode sees the operator, whose call is like that of the function."""
    seen: list[str] = []
    out = torch.empty(3, HEADS, D).half()
    options = {"softcap": 3.0, "sink": torch.zeros(HEADS)}
    for more in ({}, {"out": out}, {"return_lse": True}, {"pattern": lists(2, 3, 4, keys=4)}):
        given = {**call(), **options, **more}
        with Watch() as watch:
            by_operator = paged_attention(**given)
        seen += watch.seen
        directly = paged_attention(**given)
        one, other = launches[-2:]
        fixed = {"out", "lse", "counters", "partials"}
        assert {k: v for k, v in one.items() if k not in fixed} == {k: v for k, v in other.items() if k not in fixed}
        assert type(by_operator) is type(directly)
        assert one["out"] == (by_operator.out if "return_lse" in more else by_operator).data_ptr()
    names = [name for name in seen if "paged" in name]
    plain, into = (f"sparse_kernel_codegen.paged_attention{end}.default" for end in ("", "_out"))
    assert names == [plain, into, plain, plain]


def fakes(dtype: Any = BF16, kind: Any = E4M3) -> dict[str, Any]:
    def made(*shape: int, dtype: Any) -> Any:
        return torch.empty(shape, dtype=dtype, device="cuda")

    given = {"q": made(5, 8, 128, dtype=dtype), "pattern": Causal(), "block_table": made(5, 7, dtype=torch.int32)}
    return given | {name: made(9, 64, 2, 128, dtype=kind) for name in ("k_cache", "v_cache")}


def test_fakes_have_the_shapes_of_results() -> None:
    with FakeTensorMode():
        found = paged_attention(**fakes(), return_lse=True)
        assert isinstance(found, AttentionResult) and found.lse is not None
        assert found.out.shape == (5, 8, 128) and found.out.dtype == BF16 and found.out.device.type == "cuda"
        assert found.lse.shape == (8, 5) and found.lse.dtype == torch.float32
        assert paged_attention(**fakes()).shape == (5, 8, 128)
        out = torch.empty_like(fakes()["q"])
        assert paged_attention(**fakes(), out=out) is out
        with pytest.raises(ArgumentError, match=r"^v_cache: is torch.bfloat16, k_cache is torch.float8"):
            paged_attention(**{**fakes(), "v_cache": fakes(kind=BF16)["v_cache"]})


def test_autocast_casts_queries_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the type of the cache, or to autocast's for a cache in e4m3."""
    with FakeTensorMode():
        for dtype, kind, to in ((torch.float32, BF16, BF16), (BF16, HALF, HALF), (torch.float32, E4M3, HALF)):
            with pytest.raises(ArgumentError, match=r"^(q|k_cache): is "):
                paged_attention(**fakes(dtype, kind))
            with monkeypatch.context() as patched:  # torch turns autocast off without a GPU
                patched.setattr(paged, "any_autocast", lambda: True)
                patched.setattr(torch, "is_autocast_enabled", lambda device: True)
                patched.setattr(torch, "get_autocast_dtype", lambda device: HALF)
                assert paged_attention(**fakes(dtype, kind)).dtype == to
                with pytest.raises(ArgumentError, match=r"^q: is torch.float64"):
                    paged_attention(**fakes(torch.float64, kind))


def test_calls_are_compiled_as_one_graph(launches: list[dict[str, Any]]) -> None:
    """With fullgraph=True, over a real call of the operator; other lengths of tensors with the same shapes too."""
    given = call(out=None)

    def step(q: Any, k: Any, v: Any, table: Any, lengths: Any, indices: Any) -> Any:
        plain = paged_attention(q, k, v, SlidingWindow(100), block_table=table, seq_lens=lengths)
        found = paged_attention(
            q, k, v, KeyLists(indices, keys=16), block_table=table, seq_lens=lengths, return_lse=True
        )
        assert isinstance(found, AttentionResult)
        return plain + found.out, found.lse

    tensors = [given[name] for name in ("q", "k_cache", "v_cache", "block_table", "seq_lens")]
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    out, lse = compiled(*tensors, torch.zeros(2, 3, 4).int())
    assert out.shape == (3, HEADS, D) and lse.shape == (HEADS, 3) and len(launches) == 2
    assert launches[0]["window_left"] == 100 and launches[1]["entry_shift"] == 4
    compiled(*tensors, torch.ones(2, 3, 4).int())
    assert len(launches) == 4


def test_opcheck_finds_nothing_wrong(launches: list[dict[str, Any]]) -> None:
    given = call()
    tensors = [given[name] for name in ("q", "k_cache", "v_cache", "block_table", "seq_lens")]
    numbers = {"window": [100, 0, 0], "entry_keys": 1}
    tests = ("test_schema", "test_faketensor")
    operators = torch.ops.sparse_kernel_codegen
    torch.library.opcheck(operators.paged_attention.default, (*tensors, *[None] * 7), numbers, test_utils=tests)
    out = torch.empty_like(given["q"])
    into = (*tensors, *[None] * 6, out, None)
    torch.library.opcheck(operators.paged_attention_out.default, into, numbers, test_utils=tests)


def test_transformed_calls_are_refused_by_name(launches: list[dict[str, Any]]) -> None:
    given = call()
    q = given.pop("q")
    with pytest.raises(ArgumentError, match=r"^q, k_cache and v_cache: one of them is mapped by torch.vmap: pass all"):
        torch.vmap(lambda one: paged_attention(one, **given))(torch.stack([q, q]))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(ArgumentError, match=r"tangent"):
        paged_attention(torch.autograd.forward_ad.make_dual(q, q), **given)
    assert not launches


def test_other_devices_are_named() -> None:
    with pytest.raises(ArgumentError, match=r"^q: is on cpu, expected a CUDA device"):
        paged_attention(**call())
    with FakeTensorMode():
        given = fakes()
        with pytest.raises(ArgumentError, match=r"^k_cache: is on cuda:1, q is on cuda:0"):
            paged_attention(**{**given, "k_cache": given["k_cache"].to("cuda:1")})
