"""block_sparse_attention without a GPU: everything but the kernels, which the definition stands for."""

from __future__ import annotations

import math
import sys
import time
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, get_args

import pytest

torch = pytest.importorskip("torch")

import attention_oracle  # noqa: E402
import oracle_kernel  # noqa: E402

from codegen.errors import SpecError  # noqa: E402
from codegen.patterns.block_lists import BlockLists as BlockListsSpec  # noqa: E402
from codegen.select import choose  # noqa: E402
from codegen.select.problem import rounded  # noqa: E402
from codegen.spec import AttentionSpec  # noqa: E402
from runtime import ArgumentError, DeviceError, explain_attention, patterns  # noqa: E402
from runtime.kernels import arguments  # noqa: E402
from runtime.kernels.attention import AttentionKernel  # noqa: E402
from runtime.ops import attention, attention_calls, attention_choice  # noqa: E402

# Also with fields and arguments of other types.
Dense, PrefixLM = patterns.Dense, patterns.PrefixLM
Causal: Any = patterns.Causal
SlidingWindow, SinkWindow, Strided = patterns.SlidingWindow, patterns.SinkWindow, patterns.Strided
TopK: Any = patterns.TopK
BlockLists: Any = patterns.BlockLists
block_sparse_attention: Any = attention.block_sparse_attention
needs_bits = pytest.mark.skipif(
    "bits" not in get_args(BlockListsSpec.model_fields["mask"].annotation), reason="no kernel has mask: bits"
)
needs_lengths = pytest.mark.skipif("kv_lengths" not in AttentionSpec.model_fields, reason="no kernel has kv_lengths")


@pytest.fixture(autouse=True)
def loaded(monkeypatch: pytest.MonkeyPatch) -> Any:
    return oracle_kernel.install(monkeypatch)


def qkv(q_len: int = 300, kv_len: int = 300, heads: int = 4, kv_heads: int = 4, head_dim: int = 64) -> list[Any]:
    shapes = (heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len)
    return [torch.randn(2, h, n, head_dim).bfloat16() for h, n in shapes]


def ints(*shape: int, most: int = 3) -> Any:
    return torch.randint(0, most, shape, dtype=torch.int32)


def expected(q: Any, k: Any, v: Any, pattern: Any, kv_lengths: Any = None, **options: Any) -> Any:
    shape = (*q.shape[:3], k.shape[2])
    seen = attention_oracle.times_seen(pattern.spec_json, pattern.index_tensors(), shape, kv_lengths)
    return attention_oracle.attention(q, k, v, seen, **options)


def assert_right(tensors: list[Any], pattern: Any, **options: Any) -> None:
    out, lse = block_sparse_attention(*tensors, pattern, return_lse=True, **options)
    q, k, v = tensors
    right, right_lse = expected(q, k, v, pattern, **options)
    torch.testing.assert_close(out.float(), right, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(lse, right_lse)
    assert torch.equal(block_sparse_attention(*tensors, pattern, **options), out)


PATTERNS = {
    "dense": Dense,
    "causal": Causal,
    "top left": lambda: Causal(align="top_left"),
    "window": lambda: SlidingWindow(100, 20),
    "sink window": lambda: SinkWindow(4, 100),
    "strided": lambda: Strided(stride=3, local=1, block=64),
    "prefix": lambda: PrefixLM(torch.tensor([10, 250], dtype=torch.int32)),
    "topk": lambda: TopK(ints(2, 4, 3, 2)),
    "topk, shared": lambda: TopK(ints(1, 1, 3, 2)),
    "lists": lambda: BlockLists(ints(2, 4, 3), ints(2, 4, 3, 2)),
    "causal lists": lambda: BlockLists(ints(1, 4, 3), ints(1, 4, 3, 2), ints(2, 1, 3), ints(2, 1, 3, 2), mask="causal"),
    "large blocks": lambda: TopK(ints(2, 4, 2, 2, most=5), block=(256, 64)),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_each_pattern_is_computed_by_the_kernel_of_its_spec(name: str, loaded: Any) -> None:
    assert_right(qkv(), PATTERNS[name]())
    (kernel,) = loaded.values()
    assert set(kernel.asked_lse) == {False, True}


def test_a_block_mask_is_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    seen: list[Any] = []

    def from_block_mask(block_mask: Any, **options: Any) -> Any:
        seen.append((block_mask, options))
        return Causal()

    monkeypatch.setitem(sys.modules, "runtime.convert", SimpleNamespace(from_block_mask=from_block_mask))
    block_mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 300, 400, device="cpu", BLOCK_SIZE=256)
    q, k, v = qkv(300, 400)
    assert torch.equal(block_sparse_attention(q, k, v, block_mask), block_sparse_attention(q, k, v, Causal()))
    assert seen == [(block_mask, {"q_len": 300, "kv_len": 400, "target": (128, 128)})]


def test_options_reach_the_kernel(loaded: Any) -> None:
    tensors, sink = qkv(), torch.randn(4)
    assert_right(tensors, Causal(), scale=0.3, softcap=5.0, sink=sink)
    assert all(kernel.spec.sink and kernel.spec.softcap == 5 for kernel in loaded.values())


@needs_lengths
def test_keys_beyond_a_length_are_hidden() -> None:
    lengths = torch.tensor([0, 111], dtype=torch.int32)
    for name in ("causal", "topk", "causal lists", "large blocks"):
        assert_right(qkv(), PATTERNS[name](), kv_lengths=lengths)


def test_rows_without_keys_are_zero() -> None:
    q, k, v = qkv(300, 100)
    out, lse = block_sparse_attention(q, k, v, Causal(), return_lse=True)
    assert not out[:, :, :200].any() and bool((lse[:, :, :200] == -math.inf).all())


@pytest.mark.parametrize(("list_heads", "packed"), [(2, 4), (4, 2), (8, 1), (1, 1)])
def test_lists_of_kv_heads_are_shared_by_their_query_heads(list_heads: int, packed: int, loaded: Any) -> None:
    assert_right(qkv(heads=8, kv_heads=2), TopK(ints(2, list_heads, 5, 2, most=5), block=(64, 64)))
    assert {kernel.spec.pack_gqa for kernel in loaded.values()} == {packed}


def test_lists_of_kv_heads_are_repeated_where_no_tile_holds_their_heads(loaded: Any) -> None:
    assert_right(qkv(heads=6, kv_heads=2), TopK(ints(2, 2, 3, 2)))
    assert {kernel.spec.pack_gqa for kernel in loaded.values()} == {1}


def test_lists_of_single_queries_fill_a_tile_with_heads(loaded: Any) -> None:
    assert_right(qkv(40, heads=16, kv_heads=1), TopK(ints(2, 1, 40, 2, most=5), block=(1, 64)))
    assert {kernel.spec.pack_gqa for kernel in loaded.values()} == {16}


@needs_bits
@pytest.mark.parametrize("block", [(1, 64), (64, 16), (8, 32)])
def test_small_blocks_are_merged(block: tuple[int, int], loaded: Any) -> None:
    rows, blocks = -(-100 // block[0]), -(-300 // block[1])
    for heads in (2, 8):
        order = torch.rand(2, heads, rows, blocks).argsort(-1)[..., :3].to(torch.int32)
        assert_right(qkv(100, heads=8, kv_heads=2), TopK(order, block=block))
    assert {kernel.spec.pattern.kind for kernel in loaded.values()} == {"block_lists"}


def test_calls_of_near_lengths_share_a_kernel_and_what_was_seen_is_not_chosen_again(
    loaded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for length in (290, 300, 310, 384):
        block_sparse_attention(*qkv(length, length), Dense())
    assert len(loaded) == 1
    monkeypatch.setattr(attention_calls, "resolve", None)
    block_sparse_attention(*qkv(300, 300), Dense())


def test_classes_with_the_same_spec_share_a_kernel_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def load(named: Any, *, device: Any) -> Any:
        made.append((named.spec.pattern.kind, device))
        return AttentionKernel.__new__(AttentionKernel)

    monkeypatch.setattr(attention_calls, "load_kernel", load)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    named = choose({"op": "attention", "arch": "sm_90a", "head_dim": 64, "pattern": {"kind": "dense"}}).named
    devices = [torch.device("cuda", index) for index in (0, 1)]
    attention_calls._loaded.cache_clear()
    kernels = [attention_calls._loaded(named, device) for device in (*devices, *devices)]
    attention_calls._loaded.cache_clear()
    assert kernels[:2] == kernels[2:] and kernels[0] is not kernels[1]
    assert made == [("dense", device) for device in devices]
    current, capturing = [0], 1  # a stream of the second device, which is not torch's current one, is captured

    @contextmanager
    def entered(device: Any) -> Any:
        current.append(device.index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", entered)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[-1] == capturing)
    attention_calls._loaded(named, devices[0])
    attention_calls._loaded.cache_clear()
    with pytest.raises(ArgumentError, match="make one call before the capture"):
        attention_calls._loaded(named, devices[1])


def test_sizes_are_rounded_up_in_two_steps_to_an_octave() -> None:
    sizes = [rounded(size) for size in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 4096, 4097, 6145)]
    assert sizes == [1, 2, 3, 4, 6, 6, 8, 8, 12, 12, 16, 4096, 6144, 8192]


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "SIGNATURES_KEPT", 3)
    for length in range(64, 72):
        block_sparse_attention(*qkv(length, length), Dense())
        assert len(attention_calls._routes) <= 3


def test_head_sizes_between_those_of_kernels_are_filled_up(loaded: Any) -> None:
    assert_right(qkv(head_dim=88), Dense())
    assert {kernel.spec.head_dim for kernel in loaded.values()} == {96}


def test_out_is_written() -> None:
    tensors = qkv()
    out = torch.empty_like(tensors[0])
    assert block_sparse_attention(*tensors, Dense(), out=out) is out
    assert torch.equal(out, block_sparse_attention(*tensors, Dense()))


@pytest.fixture
def autocast() -> Any:
    """Turn autocast of GPUs on, which torch.autocast does only where there is one."""
    dtype = torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    yield
    torch.set_autocast_enabled("cuda", False)
    torch.set_autocast_dtype("cuda", dtype)


def test_autocast_casts_as_it_does_for_sdpa(autocast: None, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [t.float() for t in qkv()]
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert block_sparse_attention(*tensors, Dense()).dtype == torch.bfloat16
    assert block_sparse_attention(*(t.half() for t in tensors), Dense()).dtype == torch.bfloat16
    assert block_sparse_attention(tensors[0].half(), *tensors[1:], Dense()).dtype == torch.bfloat16
    with pytest.raises(ArgumentError, match=r"q: is torch\.float64"):
        block_sparse_attention(*(t.double() for t in tensors), Dense())
    torch.set_autocast_enabled("cuda", False)
    with pytest.raises(ArgumentError, match=r"q: is torch\.float32, expected torch\.float16 or torch\.bfloat16"):
        block_sparse_attention(*tensors, Dense())


def test_another_device_is_not_taken_for_one_that_kernels_are_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA B200")
    with pytest.raises(
        DeviceError, match="NVIDIA B200 is sm_100, for which no kernels are written; there are some for"
    ):
        attention_choice.arch_of(torch.device("cuda", 0))
    for capability, arch in (((9, 0), "sm_90a"), ((8, 9), "sm_89"), ((8, 0), "sm_80"), ((12, 0), "sm_120")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert attention_choice.arch_of(torch.device("cuda", 0)) == arch


def lists(**changes: Any) -> dict[str, Any]:
    q, k, v = qkv()
    return {"q": q, "k": k, "v": v, "pattern": TopK(ints(2, 4, 3, 2)), **changes}


def strange() -> Any:
    return torch.randn(2, 4, 300, 64).bfloat16()


WRONG: dict[str, tuple[Any, str]] = {
    "no tensor": (lambda: lists(q=3), r"q: is int, expected a torch\.Tensor"),
    "dtype": (lambda: lists(q=strange().double()), r"q: is torch\.float64, expected torch\.float16 or torch\.bfloat16"),
    "mixed dtypes": (lambda: lists(k=strange().half()), r"k: is torch\.float16, q is torch\.bfloat16"),
    "mixed devices": (lambda: lists(v=strange().to("meta")), r"v: is on meta, q is on cpu"),
    "rank": (lambda: lists(q=strange()[0]), r"q: has 3 dimensions"),
    "heads": (lambda: lists(q=torch.randn(2, 6, 300, 64).bfloat16()), r"k: has 4 heads, q has 6: not a multiple"),
    "batch": (lambda: lists(k=strange()[:1]), r"k: has shape \(1, 4, 300, 64\), expected \(batch 2"),
    "head size": (
        lambda: dict.fromkeys("qkv", torch.randn(2, 4, 300, 60).half()),
        r"q: has head size 60, expected a mul",
    ),
    "large head": (lambda: dict.fromkeys("qkv", torch.randn(1, 1, 9, 264).half()), r"q: has head size 264"),
    "no pattern": (
        lambda: lists(pattern="causal"),
        r"pattern: is 'causal', expected an object of sparse_kernel_codegen\.patterns or a",
    ),
    "float indices": (lambda: lists(pattern=TopK(torch.zeros(2, 4, 3, 2))), r"kv_indices: is torch\.float32, expected"),
    "long indices": (lambda: lists(pattern=TopK(ints(2, 4, 3, 2).long())), r"pass kv_indices\.to\(torch\.int32\)"),
    "lists elsewhere": (
        lambda: lists(pattern=TopK(ints(2, 4, 3, 2).to("meta"))),
        r"kv_indices: is on meta, q is on cpu: pass kv_indices\.to\(q\.device\)",
    ),
    "other blocks": (
        lambda: lists(pattern=TopK(ints(2, 4, 5, 2))),
        r"kv_indices: has lists of 5 query blocks, q has 300 queries: 3 blocks of 128; other lengths or block sizes\?",
    ),
    "heads of lists": (lambda: lists(pattern=TopK(ints(2, 3, 3, 2))), r"kv_indices: has shape .*heads 1 or 4"),
    "list no tensor": (lambda: lists(pattern=TopK([1, 2])), r"kv_indices: is list, expected a torch\.Tensor"),
    "scale": (lambda: lists(scale=-1.0), r"scale: is -1\.0, expected"),
    "softcap": (lambda: lists(softcap=0), r"softcap: is 0, expected a number from 0\.001 to 1000"),
    "softcap, list": (lambda: lists(softcap=[1]), r"softcap: is list, expected a number"),
    "sink": (lambda: lists(sink=torch.zeros(3)), r"sink: has shape \(3,\), expected \(heads 4\)"),
    "sink dtype": (lambda: lists(sink=torch.zeros(4).half()), r"sink: is torch\.float16"),
    "lengths": (lambda: lists(kv_lengths=ints(2).long()), r"kv_lengths: is torch\.int64, expected torch\.int32"),
    "out shape": (lambda: lists(out=strange()[:1]), r"out: has shape"),
    "unknown block": (
        lambda: lists(pattern=TopK(ints(2, 4, 3, 2), block=(128, 100))),
        r"block: is \(128, 100\); allowed",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_each_wrong_argument_is_named(name: str, loaded: Any) -> None:
    make, message = WRONG[name]
    arguments = {"pattern": Dense(), **make()}
    with pytest.raises(ArgumentError, match=message):
        block_sparse_attention(**arguments)
    assert not loaded


def test_a_call_like_one_before_is_checked_as_well() -> None:
    block_sparse_attention(**lists())
    with pytest.raises(ArgumentError, match=r"pass kv_indices\.to\(q\.device\)"):
        block_sparse_attention(**lists(pattern=TopK(ints(2, 4, 3, 2).to("meta"))))
    arguments = lists()
    for name in ("q", "k", "v"):
        arguments["out"] = arguments[name]
        with pytest.raises(ArgumentError, match=f"out: overlaps {name} in memory"):
            block_sparse_attention(**arguments)
    memory = torch.zeros(2, 8, 300, 64).bfloat16()
    with pytest.raises(ArgumentError, match="out: overlaps q in memory"):
        block_sparse_attention(**lists(q=memory[:, :4], out=memory[:, 4:]))


def test_values_are_checked_on_demand(loaded: Any) -> None:
    split = TopK(torch.full((2, 4, 2, 2), 5, dtype=torch.int32), block=(256, 64))
    block_sparse_attention(**lists(pattern=split))
    with pytest.raises(ArgumentError, match="kv_indices: is 5 at batch 0, head 0, row 0, column 0; allowed: 0 to 4"):
        block_sparse_attention(**lists(pattern=split), validate=True)
    cut = BlockLists(ints(2, 4, 3), ints(2, 4, 3, 2), overflow=torch.ones(1, dtype=torch.int32))
    block_sparse_attention(**lists(pattern=cut))
    with pytest.raises(ArgumentError, match="pattern: has lists that are cut off"):
        block_sparse_attention(**lists(pattern=cut), validate=True)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SlidingWindow(-1), "left: is -1; input should be greater than or equal to 0"),
        (lambda: SinkWindow(0, 5), "sink: is 0"),
        (lambda: Strided(1, 2), "stride: is 1"),
        (lambda: Strided(4, 2, block=32), "block: is 32"),
        (lambda: Causal(align="left"), "align: is 'left'"),
        (lambda: TopK(ints(1, 1, 1, 1), block=64), r"block: is 64, expected \(queries, keys\)"),
        (lambda: BlockLists(ints(1), ints(1), mask="bits"), "mask_bits: is missing, and mask is 'bits'"),
        (lambda: BlockLists(ints(1), ints(1), mask_bits=ints(1)), "mask_bits: is given, and mask is 'none'"),
        (lambda: BlockLists(ints(1), ints(1), ints(1)), "full_kv_num_blocks and full_kv_indices: belong together"),
        (lambda: BlockLists(ints(1), ints(1), mask="no"), "mask: is 'no'"),
    ],
)
def test_patterns_check_their_fields(make: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()


def test_patterns_are_those_of_specs() -> None:
    for make in PATTERNS.values():
        pattern = make()
        fields = pattern.spec_pattern()
        if isinstance(fields.get("block"), dict) and fields["block"]["q"] > 128:
            continue
        spec = choose({"op": "attention", "arch": "sm_90a", "head_dim": 64, "pattern": fields}, {"q_len": 300}).spec
        assert isinstance(spec, AttentionSpec) and spec.pattern.kind == pattern.kind
        names = [tensor.name for tensor in spec.pattern.index_tensors]
        assert [getattr(pattern, name) for name in names][: len(pattern.index_tensors())] == list(
            pattern.index_tensors()
        )


def test_patterns_are_pytrees_of_their_tensors() -> None:
    from torch.utils import _pytree as pytree

    pattern = BlockLists(ints(2, 4, 3), ints(2, 4, 3, 2), block=(64, 64), mask="causal")
    copy = pytree.tree_map(lambda leaf: leaf if leaf is None else leaf.clone(), pattern)
    assert type(copy) is BlockLists and copy.spec_json == pattern.spec_json and copy is not pattern
    assert torch.equal(copy.kv_indices, pattern.kv_indices) and copy.kv_indices is not pattern.kv_indices
    leaves, spec = pytree.tree_flatten((SlidingWindow(3), pattern))
    assert sum(leaf is not None for leaf in leaves) == 2
    again = pytree.treespec_loads(pytree.treespec_dumps(spec))
    assert pytree.tree_unflatten(leaves, again)[1].spec_json == pattern.spec_json


def test_an_option_without_a_kernel_is_told_by_its_field() -> None:
    arguments = lists(pattern=Strided(3, 1, block=64), kv_lengths=ints(2))
    if "kv_lengths" not in AttentionSpec.model_fields:
        with pytest.raises(SpecError, match="kv_lengths"):
            block_sparse_attention(**arguments)


def test_what_is_above_the_kernel_costs_little_time(loaded: Any) -> None:
    arguments = lists()
    block_sparse_attention(**arguments)
    (kernel,) = loaded.values()
    result = kernel(
        *(arguments[n] for n in "qkv"),
        *arguments["pattern"].index_tensors(),
        scale=None,
        out=None,
        sink=None,
        return_lse=False,
        validate=False,
    )
    kernel.__class__.__call__, call = lambda *_, **__: result, kernel.__class__.__call__
    try:
        times = []
        for _ in range(300):
            began = time.perf_counter()
            block_sparse_attention(**arguments)
            times.append(time.perf_counter() - began)
    finally:
        kernel.__class__.__call__ = call
    assert min(times) < 50e-6, f"{1e6 * min(times):.1f} us"


def meta(heads: int = 16, kv_heads: int = 16, length: int = 8192, head_dim: int = 128) -> list[Any]:
    q, kv = (torch.empty(1, h, length, head_dim, device="meta", dtype=torch.bfloat16) for h in (heads, kv_heads))
    return [q, kv, kv]


def test_the_choice_is_explained_without_a_gpu() -> None:
    told = explain_attention(*meta(head_dim=88), Causal(), arch="sm_90a", return_lse=True)
    assert told.choice.spec.lse and told.shape_class.head_dim == 96  # type: ignore[union-attr]
    assert told.padding == pytest.approx(1 / 12)
    lines = str(told).splitlines()
    assert lines[0] == f"kernel: {told.choice.named.stem} (sm_90a, bf16, d 96)"
    assert lines[1:3] == told.provenance["O"].lines() and lines[3].startswith("rule: ")
    assert lines[4] == "class of shapes: batch 1, heads 16, kv_heads 16, q_len 8192, kv_len 8192"
    assert lines[5] == "head size: 88 is filled up to 96: 8% of the products"
    assert lines[-1].startswith("dense attention of a library: ")


def test_keys_without_heads_are_refused() -> None:
    with pytest.raises(ArgumentError, match="k: has 0 heads, q has 16: not a multiple"):
        explain_attention(*meta(kv_heads=0), Causal(), arch="sm_90a")


def test_the_choice_says_what_becomes_of_lists_and_heads() -> None:
    lists = torch.empty(1, 2, 32, 20, dtype=torch.int32, device="meta")
    told = str(explain_attention(*meta(kv_heads=2), TopK(lists, block=(256, 64)), arch="sm_90a"))
    assert "lists: blocks of 256 x 64 are split into blocks of 128 x 64, in each call" in told
    assert "heads: 8 query heads that share their lists fill a tile together" in told
    told = str(explain_attention(*meta(heads=6, kv_heads=2), TopK(lists, block=(256, 64)), arch="sm_90a"))
    assert "lists: each head is repeated 3 times, in each call; blocks of" in told


def test_the_kernel_is_the_measured_one_with_and_without_an_lse() -> None:
    tensors = [t.expand(2, -1, -1, -1) for t in meta()]
    with_lse, without = (explain_attention(*tensors, Dense(), arch="sm_90a", return_lse=lse) for lse in (True, False))
    assert with_lse == without and with_lse.choice.rule == "measured"
    assert with_lse.choice.spec.lse  # type: ignore[union-attr]


def test_what_cannot_be_explained_is_told_as_a_call_would() -> None:
    with pytest.raises(ArgumentError, match="arch: is missing: q is on meta"):
        explain_attention(*meta(), Dense())
    with pytest.raises(ArgumentError, match="arch: is 'sm_91'"):
        explain_attention(*meta(), Dense(), arch="sm_91")
    with pytest.raises(ArgumentError, match="q: has head size 60"):
        explain_attention(*meta(head_dim=60), Dense(), arch="sm_90a")
