"""Gradients of block_sparse_attention on a GPU: beside float64 and SDPA, bit for bit, and under torch's machinery.

pytest -n 0 tests/gpu/test_attention_gradients.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import gradient_oracle  # noqa: E402
from kept_calls import forget  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from codegen.arch import ARCHS  # noqa: E402
from codegen.select.backward import backward_archs  # noqa: E402
from runtime import ArgumentError, block_sparse_attention, merge_attention  # noqa: E402
from runtime.ops.attention_extras import Extras  # noqa: E402
from runtime.ops.attention_gradients import attend_backward  # noqa: E402
from runtime.patterns import (  # noqa: E402
    BlockLists,
    Causal,
    Dense,
    PrefixLM,
    SinkWindow,
    SlidingWindow,
    Strided,
    TopK,
    scored_of,
)

WRITTEN = [ARCHS[name].compute_capability for name in backward_archs()]
HERE = torch.cuda.get_device_capability() if torch.cuda.is_available() else WRITTEN[0]
pytestmark = pytest.mark.skipif(HERE not in WRITTEN, reason=f"gradients are written for {', '.join(backward_archs())}")
LENGTH = 1024
DTYPES = (torch.float16, torch.bfloat16)
OPERATORS = torch.ops.sparse_kernel_codegen


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()


def qkv(
    q_len: int = LENGTH,
    kv_len: int = LENGTH,
    heads: int = 4,
    kv_heads: int = 4,
    head_dim: int = 128,
    dtype: Any = torch.bfloat16,
) -> list[Any]:
    shapes = (heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len)
    return [torch.randn(2, h, n, head_dim, device="cuda").to(dtype).requires_grad_() for h, n in shapes]


def ints(*shape: int, most: int) -> Any:
    return torch.randint(0, most, shape, dtype=torch.int32, device="cuda")


def drawn(heads: int, rows: int, blocks: int, entries: int) -> Any:
    """Return lists of different blocks."""
    return torch.rand(2, heads, rows, blocks, device="cuda").argsort(-1)[..., :entries].to(torch.int32).contiguous()


def topk(
    block: tuple[int, int] = (128, 128), heads: int = 4, q_len: int = LENGTH, kv_len: int = LENGTH, entries: int = 3
) -> TopK:
    return TopK(drawn(heads, -(-q_len // block[0]), -(-kv_len // block[1]), entries), block=block)


def block_lists(block: tuple[int, int] = (128, 128), mask: Any = "causal", heads: int = 4) -> BlockLists:
    """Return lists of which some are empty."""
    rows, blocks = -(-LENGTH // block[0]), -(-LENGTH // block[1])
    partial, full = drawn(heads, rows, blocks, 4), drawn(1, rows, blocks, 3)
    counts, full_counts = ints(2, heads, rows, most=5), ints(2, 1, rows, most=3)
    counts[:, :, 1], full_counts[:, :, 1] = 0, 0
    return BlockLists(counts, partial, full_counts, full, block=block, mask=mask)


def bit_lists(block: tuple[int, int] = (128, 128), heads: int = 4) -> BlockLists:
    """Return lists whose partial blocks have random bits."""
    lists = block_lists(block, mask="none", heads=heads)
    words = (*lists.kv_indices.shape, block[0] * block[1] // 32)
    bits = torch.randint(-(2**31), 2**31, words, device="cuda").to(torch.int32)
    full = lists.full_kv_num_blocks, lists.full_kv_indices
    return BlockLists(lists.kv_num_blocks, lists.kv_indices, *full, block=block, mask="bits", mask_bits=bits)


def lengths(*values: int) -> Any:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


PATTERNS: dict[str, Callable[[], Any]] = {
    "dense": Dense,
    "causal": Causal,
    "top left": lambda: Causal(align="top_left"),
    "window": lambda: SlidingWindow(200, 50),
    "sink window": lambda: SinkWindow(70, 200),
    "sink window, both sides": lambda: SinkWindow(130, 100, 50),
    "strided": lambda: Strided(3, 1, block=64),
    "strided, both sides": lambda: Strided(3, 1, block=128, causal=False),
    "strided by 64, both sides": lambda: Strided(2, 0, block=64, causal=False),
    "prefix": lambda: PrefixLM(lengths(0, 391)),
    "prefix, out of range": lambda: PrefixLM(lengths(-5, 5000)),
    "topk": topk,
    "topk 64 x 64": lambda: topk((64, 64), entries=5),
    "topk 64 x 128": lambda: topk((64, 128)),
    "topk 128 x 64": lambda: topk((128, 64)),
    "topk, shared": lambda: topk(heads=1),
    "topk, repeated": lambda: TopK(ints(2, 4, 8, 6, most=3)),
    "topk, out of range": lambda: TopK(ints(2, 4, 8, 6, most=13) - 2),
    "lists": lambda: block_lists(mask="none"),
    "causal lists": block_lists,
    "causal lists 64 x 64": lambda: block_lists((64, 64)),
    "bits": bit_lists,
    "bits 64 x 64": lambda: bit_lists((64, 64)),
    "bits 128 x 64": lambda: bit_lists((128, 64)),
    "bits 64 x 128, shared": lambda: bit_lists((64, 128), heads=1),
    "bits 256 x 64": lambda: bit_lists((256, 64)),
    "256 x 64": lambda: topk((256, 64)),
    "192 x 192": lambda: topk((192, 192)),
}


OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "softcap": lambda: {"softcap": 1.5},
    "sink": lambda: {"sink": torch.tensor([0.5, -3.0, 5.0, 9.0], device="cuda", requires_grad=True)},
    "kv_lengths": lambda: {"kv_lengths": lengths(333, 900)},
    "no keys": lambda: {"kv_lengths": lengths(0, 1)},
    "one length": lambda: {"kv_lengths": lengths(640)},
    "all": lambda: {
        name: value for kind in ("softcap", "sink", "kv_lengths") for name, value in OPTIONS[kind]().items()
    },
}


def gradients(tensors: list[Any], pattern: Any, dout: Any, **options: Any) -> tuple[Any, ...]:
    out = block_sparse_attention(*tensors, pattern, **options)
    return torch.autograd.grad(out, tensors, dout)


def check(tensors: list[Any], pattern: Any, **options: Any) -> None:
    dout, sink = torch.randn_like(tensors[0]), options.get("sink")
    leaves = tensors if sink is None else [*tensors, sink]
    out = block_sparse_attention(*tensors, pattern, **options)
    found = torch.autograd.grad(out, leaves, dout)
    options.pop("deterministic", None)
    right = gradient_oracle.exact(*tensors, pattern, dout, **options)
    if sink is not None:
        gradient_oracle.assert_sink_near(found[3], *tensors, pattern, dout, **options)
        found, right = found[:3], {name: right[name] for name in gradient_oracle.NAMES}
    theirs = gradient_oracle.by_sdpa(*tensors, pattern, dout, **options)
    rounded = gradient_oracle.rounded(*tensors, pattern, dout, **options)
    noise = gradient_oracle.noise(*tensors, dout, options.get("scale"))
    gradient_oracle.assert_near(found, right, theirs, rounded, noise=noise)
    seen = gradient_oracle.seen_by(pattern, *tensors[:2], options.get("kv_lengths"))
    by_heads = seen.unflatten(1, (tensors[1].shape[1], -1)).sum((2, 3))
    assert not found[0][seen.sum(-1) == 0].any(), "a query without keys has no gradient"
    assert not found[1][by_heads == 0].any() and not found[2][by_heads == 0].any(), "nor has a key that nobody sees"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("name", PATTERNS)
def test_patterns(name: str, head_dim: int, dtype: Any) -> None:
    check(qkv(head_dim=head_dim, dtype=dtype), PATTERNS[name]())


@pytest.mark.parametrize(("q_len", "kv_len"), [(1000, 1000), (77, 900), (900, 333), (1, 500)])
@pytest.mark.parametrize(
    "make",
    [
        Dense,
        Causal,
        lambda: SlidingWindow(100, 3),
        lambda: SinkWindow(4, 100),
        lambda: SinkWindow(200, 60, 40),
        lambda: Strided(3, 1, block=64),
        lambda: Strided(2, 1, block=128, causal=False),
        lambda: PrefixLM(lengths(17, 300)),
    ],
    ids=["dense", "causal", "window", "sink window", "sinks of several blocks", "strided", "strided both", "prefix"],
)
def test_lengths(q_len: int, kv_len: int, make: Any) -> None:
    """With fewer keys than queries some rows of causal attention are empty."""
    check(qkv(q_len, kv_len), make())


@pytest.mark.parametrize(("q_len", "kv_len"), [(1000, 1000), (77, 900), (900, 333)])
def test_lengths_of_lists(q_len: int, kv_len: int) -> None:
    check(qkv(q_len, kv_len), topk((64, 64), q_len=q_len, kv_len=kv_len))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", ["causal", "prefix", "strided", "causal lists", "bits"])
def test_options(name: str, options: str, head_dim: int, dtype: Any) -> None:
    check(qkv(kv_heads=2, head_dim=head_dim, dtype=dtype), PATTERNS[name](), **OPTIONS[options]())


@pytest.mark.parametrize("options", ["softcap", "kv_lengths", "all"])
@pytest.mark.parametrize("name", ["dense", "window", "sink window", "topk", "topk 64 x 64", "lists", "bits 64 x 64"])
def test_options_with_other_patterns(name: str, options: str) -> None:
    check(qkv(), PATTERNS[name](), **OPTIONS[options]())


@pytest.mark.parametrize(
    "make", [Causal, Dense, lambda: topk((64, 64)), bit_lists], ids=["causal", "dense", "topk", "bits"]
)
def test_what_is_behind_the_length_has_no_effect(make: Any) -> None:
    """Not even NaN, in K or in V: what a batch has there is cleared before dQ takes it, and its own gradient is 0."""
    tensors, pattern, given = qkv(), make(), {"kv_lengths": lengths(77, 1000)}
    dout = torch.randn_like(tensors[0])
    q, k, v = (t.detach() for t in tensors)
    behind = torch.arange(LENGTH, device="cuda")[:, None] >= given["kv_lengths"][:, None, None, None]
    out, lse = block_sparse_attention(
        q, k.masked_fill(behind, 0), v.masked_fill(behind, 0), pattern, return_lse=True, **given
    )
    call, found = OPERATORS.block_sparse_attention_backward, []
    for value in (0.0, torch.nan, torch.inf):
        filled = k.masked_fill(behind, value), v.masked_fill(behind, value)
        indices = list(pattern.index_tensors())
        found.append(call(dout, q, *filled, out, lse, None, indices, None, given["kv_lengths"], pattern.spec_json)[:3])
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))
    for gradient in found[0][1:]:
        assert not gradient[behind.expand_as(gradient)].any()


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    "make", [Dense, Causal, lambda: SlidingWindow(left=70, right=0)], ids=["dense", "causal", "window"]
)
def test_keys_behind_the_last_one_have_no_weight_beside_logits_far_below_zero(make: Any, head_dim: int) -> None:
    """What fills a tile up has logits of 0, whose weights would be infinite beside these."""
    q, k, v = qkv(200, 200, head_dim=head_dim)
    with torch.no_grad():
        q.mul_(0.1).add_(2.0 * (150 / head_dim) ** 0.5 * head_dim**0.25 / 2)
        k.mul_(0.1).sub_(2.0 * (150 / head_dim) ** 0.5 * head_dim**0.25 / 2)
    check([q, k, v], make())


@pytest.mark.parametrize("options", ["none", "all"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", [name for name in PATTERNS if "strided" not in name and "prefix" not in name])
def test_sums_in_any_order(name: str, head_dim: int, options: str) -> None:
    """dK and dV have one order all the same."""
    tensors, pattern = qkv(heads=8, kv_heads=2, head_dim=head_dim), PATTERNS[name]()
    if pattern.index_tensors() and pattern.index_tensors()[0].shape[1] == 4:
        tensors = qkv(head_dim=head_dim)  # lists of four heads
    given: dict[str, Any] = {"softcap": 1.5, "kv_lengths": lengths(333, 900)} if options == "all" else {}
    check(tensors, pattern, deterministic=False, **given)
    dout = torch.randn_like(tensors[0])
    first, again = (gradients(tensors, pattern, dout, deterministic=False, **given) for _ in range(2))
    assert torch.equal(first[1], again[1]) and torch.equal(first[2], again[2])


def test_block_masks_and_documents_have_gradients() -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    document = torch.cat([torch.full((n,), i, device="cuda") for i, n in enumerate((300, 37, 500, 187))])

    def sees(b: Any, h: Any, query: Any, key: Any) -> Any:
        return (document[query] == document[key]) & (key <= query)

    mask = create_block_mask(sees, None, None, LENGTH, LENGTH, device="cuda")
    tensors = qkv(kv_heads=2)
    dout = torch.randn_like(tensors[0])
    found = torch.autograd.grad(block_sparse_attention(*tensors, mask), tensors, dout)
    place = torch.arange(LENGTH, device="cuda")
    seen = sees(0, 0, place[:, None], place).to(torch.int32).expand(2, 4, LENGTH, LENGTH)
    leaves = [t.detach().double().requires_grad_() for t in tensors]
    out, _ = gradient_oracle.dense(*leaves, seen)
    right = dict(zip(gradient_oracle.NAMES, torch.autograd.grad(out, leaves, dout.double()), strict=True))
    gradient_oracle.assert_near(found, right)


def test_sinks_alone_have_a_gradient() -> None:
    q, k, v = (t.detach() for t in qkv())
    sink, dout = torch.randn(4, device="cuda", requires_grad=True), torch.randn_like(q)
    (found,) = torch.autograd.grad(block_sparse_attention(q, k, v, Causal(), sink=sink), sink, dout)
    gradient_oracle.assert_sink_near(found, q, k, v, Causal(), dout, sink=sink)


def test_a_loss_of_the_log_sum_exp_with_sinks() -> None:
    tensors, given = qkv(), OPTIONS["all"]()
    dout, dlse = torch.randn_like(tensors[0]), torch.randn(2, 4, LENGTH, device="cuda")
    out, lse = block_sparse_attention(*tensors, Causal(), return_lse=True, **given)
    found = torch.autograd.grad((out.float() * dout.float()).sum() + (lse * dlse).sum(), [*tensors, given["sink"]])
    right = gradient_oracle.exact(*tensors, Causal(), dout, dlse, **given)
    gradient_oracle.assert_near(found[:3], {name: right[name] for name in gradient_oracle.NAMES})
    gradient_oracle.assert_sink_near(found[3], *tensors, Causal(), dout, dlse, **given)


@pytest.mark.parametrize("head_dim", [8, 72, 80, 120, 136, 160, 200, 248])
def test_head_sizes_that_are_filled_up(head_dim: int) -> None:
    check(qkv(500, 500, head_dim=head_dim), Causal(), scale=0.2)


@pytest.mark.parametrize("head_dim", [96, 192, 256])
def test_head_sizes_with_grouped_heads_and_odd_lengths(head_dim: int) -> None:
    """Few keys make all steps of a ring wait; with more queries than keys some rows of causal attention are empty."""
    for q_len, kv_len in ((77, 900), (900, 333), (1, 500), (33, 7)):
        check(qkv(q_len, kv_len, heads=6, kv_heads=2, head_dim=head_dim), Causal())
        check(qkv(q_len, kv_len, heads=6, kv_heads=2, head_dim=head_dim), SlidingWindow(100, 3))
    check(qkv(heads=8, kv_heads=2, head_dim=head_dim), topk(heads=2))
    check(qkv(heads=8, kv_heads=2, head_dim=head_dim), topk((64, 64), heads=8))


@pytest.mark.parametrize(("heads", "kv_heads", "list_heads"), [(8, 2, 2), (8, 2, 4), (8, 2, 8), (6, 2, 2), (8, 1, 1)])
def test_grouped_heads(heads: int, kv_heads: int, list_heads: int) -> None:
    check(qkv(heads=heads, kv_heads=kv_heads), topk((64, 64), heads=list_heads))
    check(qkv(heads=heads, kv_heads=kv_heads), Causal())


def shared_lists() -> TopK:
    """Lists of 5120 keys, equal in all sequences and heads."""
    lists = torch.rand(40, 40, device="cuda").argsort(-1)[:, :6].to(torch.int32)
    return TopK(lists.expand(2, 1, 40, 6).contiguous())


@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize(
    "make", [Dense, Causal, lambda: SlidingWindow(700, 0), shared_lists], ids=["dense", "causal", "window", "lists"]
)
def test_the_place_of_a_head_has_no_effect(make: Any, head_dim: int) -> None:
    """Kernels interleave the tiles of some K/V heads: of 26 with 40 tiles each, the last group is not full."""
    tensors, pattern = qkv(5120, 5120, heads=26, kv_heads=13, head_dim=head_dim), make()
    places = torch.randperm(26, device="cuda")

    def moved(tensor: Any) -> Any:
        """The K/V heads of both sequences in other places, with their query heads."""
        return tensor.unflatten(1, (13, -1)).flatten(0, 1)[places].unflatten(0, (2, 13)).flatten(1, 2)

    with torch.no_grad():  # the result of a head may depend on its place: the last tiles divide their keys
        out, lse = block_sparse_attention(*tensors, pattern, return_lse=True)
        given = [*tensors, torch.randn_like(out), out, lse]
        right, found = (
            attend_backward(
                *operands[:3],
                tuple(pattern.index_tensors()),
                scored_of(pattern),
                extras=Extras(),
                **dict(zip(("dout", "out", "lse"), operands[3:], strict=True)),
            )[:3]
            for operands in (given, [moved(t) for t in given])
        )
    assert all(map(torch.equal, found, map(moved, right)))


def test_strided_operands() -> None:
    packed = torch.randn(2, LENGTH, 3, 4, 128, device="cuda").bfloat16()
    tensors = [packed[:, :, i].transpose(1, 2).requires_grad_() for i in range(3)]
    check(tensors, topk())
    shared = [torch.randn(1, 4, LENGTH, 128, device="cuda").bfloat16().expand(2, -1, -1, -1) for _ in range(2)]
    check([tensors[0], *(t.requires_grad_() for t in shared)], Causal())


def test_gradients_that_no_kernel_can_read_are_copied() -> None:
    tensors = qkv()
    block_sparse_attention(*tensors, Causal()).sum().backward()  # one expanded element
    right = gradient_oracle.exact(*tensors, Causal(), torch.ones_like(tensors[0]))
    gradient_oracle.assert_near([t.grad for t in tensors], right)


@pytest.mark.parametrize("name", ["causal", "causal lists"])
def test_a_loss_may_depend_on_the_log_sum_exp(name: str) -> None:
    tensors, pattern = qkv(), PATTERNS[name]()
    dout, dlse = torch.randn_like(tensors[0]), torch.randn(2, 4, LENGTH, device="cuda")
    out, lse = block_sparse_attention(*tensors, pattern, return_lse=True)
    some = torch.where(lse > -torch.inf, lse, 0.0)
    found = torch.autograd.grad((out.float() * dout.float()).sum() + (some * dlse).sum(), tensors)
    gradient_oracle.assert_near(found, gradient_oracle.exact(*tensors, pattern, dout, dlse))


def test_parts_of_the_keys_that_are_merged_have_the_gradients_of_the_whole() -> None:
    q, k, v = qkv()
    dout = torch.randn_like(q)
    halves = [
        block_sparse_attention(q, k[:, :, part], v[:, :, part], Dense(), return_lse=True)
        for part in (slice(512), slice(512, None))
    ]
    out, _ = merge_attention(*halves[0], *halves[1])  # type: ignore[arg-type]
    found = torch.autograd.grad(out, (q, k, v), dout)
    right = gradient_oracle.exact(q, k, v, Dense(), dout)
    for gradient, name in zip(found, gradient_oracle.NAMES, strict=True):  # more roundings than of one call
        error = float((gradient.double() - right[name]).abs().max() / right[name].abs().max())
        assert error < 6 * gradient_oracle.ROUNDOFF[torch.bfloat16], name


def long_lists() -> TopK:
    """Return lists of 2048 keys with a block that counts twice."""
    lists = drawn(8, 32, 32, 6)
    lists[..., 1] = lists[..., 0]
    return TopK(lists, block=(64, 64))


def long_bits() -> BlockLists:
    """Return lists of 2048 keys with random bits."""
    counts, lists = ints(2, 8, 16, most=5), drawn(8, 16, 16, 4)
    bits = torch.randint(-(2**31), 2**31, (2, 8, 16, 4, 512), device="cuda").to(torch.int32)
    return BlockLists(counts, lists, mask="bits", mask_bits=bits)


@pytest.mark.parametrize("options", ["none", "all"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize(
    "make",
    [Dense, Causal, lambda: SlidingWindow(500, 20), long_lists, long_bits],
    ids=["dense", "causal", "window", "lists", "bits"],
)
def test_a_hundred_runs_beside_a_busy_stream_have_the_same_bits(make: Any, head_dim: int, options: str) -> None:
    tensors, pattern = qkv(2048, 2048, heads=8, kv_heads=2, head_dim=head_dim), make()
    dout, leaves, given = torch.randn_like(tensors[0]), [*tensors], {}
    if options == "all":
        sink = torch.randn(8, device="cuda", requires_grad=True)
        leaves, given = [*tensors, sink], {"softcap": 3.0, "sink": sink, "kv_lengths": lengths(700, 2000)}

    def gradients_again() -> tuple[Any, ...]:
        return torch.autograd.grad(block_sparse_attention(*tensors, pattern, **given), leaves, dout)

    first = gradients_again()
    busy, work = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda").bfloat16()
    for run in range(100):
        with torch.cuda.stream(busy):
            for _ in range(run % 5):
                work = (work @ work).clamp(-1, 1)
        assert all(map(torch.equal, first, gradients_again())), f"run {run}"
    torch.cuda.synchronize()


def test_opcheck() -> None:
    q, k, v = qkv(512, 512)
    lists = topk(q_len=512, kv_len=512)
    for pattern in (Causal(), lists):
        tensors = list(pattern.index_tensors())
        inputs = (q, k, v, tensors, None, None, None, pattern.spec_json)
        torch.library.opcheck(OPERATORS.block_sparse_attention.default, inputs, {"lse": True})
        out, lse = block_sparse_attention(q, k, v, pattern, return_lse=True)
        given = [t.detach() for t in (torch.randn_like(q), q, k, v, out, lse)]
        for dlse in (None, torch.randn_like(lse)):
            arguments = (*given, dlse, tensors, None, None, pattern.spec_json)
            torch.library.opcheck(OPERATORS.block_sparse_attention_backward.default, arguments)


def step(q: Any, k: Any, v: Any, pattern: Any) -> Any:
    return block_sparse_attention(q * 2, k, v, pattern).float().pow(2).mean()


def assert_same_step(found: Any, tensors: list[Any], pattern: Any) -> None:
    """Compare with eager: the compiler rounds what stands around the attention in another way."""
    right = torch.autograd.grad(step(*tensors, pattern), tensors)
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other, atol=1.6e-2 * float(other.abs().max()), rtol=0)


@pytest.mark.own_allocator
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("name", ["causal", "causal lists", "256 x 64"])
def test_compile_takes_a_training_step_whole(name: str, mode: str) -> None:
    compiled = torch.compile(step, fullgraph=True, mode=mode)
    for _ in range(4):
        tensors, pattern = qkv(), PATTERNS[name]()
        torch.compiler.cudagraph_mark_step_begin()
        compiled(*tensors, pattern).backward()
        assert_same_step([t.grad.clone() for t in tensors], tensors, pattern)
    torch._dynamo.reset()


@pytest.mark.own_allocator
def test_graphs_of_both_passes_read_the_lists_of_each_replay() -> None:
    tensors, pattern = qkv(), topk()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            torch.autograd.grad(step(*tensors, pattern), tensors)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = torch.autograd.grad(step(*tensors, pattern), tensors)
    for _ in range(3):
        pattern.kv_indices.copy_(topk().kv_indices)
        with torch.no_grad():
            tensors[0].copy_(torch.randn_like(tensors[0]))
        graph.replay()
        right = torch.autograd.grad(step(*tensors, pattern), tensors)
        assert all(map(torch.equal, found, right))


def test_the_first_backward_pass_cannot_be_captured() -> None:
    tensors = qkv()
    forget()
    step(*tensors, Causal())  # the forward alone
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(ArgumentError, match="make one call before the capture"), torch.cuda.graph(graph):
        torch.autograd.grad(step(*tensors, Causal()), tensors)
    torch.cuda.synchronize()


def test_checkpoint_and_autocast() -> None:
    tensors, pattern = qkv(), topk()
    right = torch.autograd.grad(step(*tensors, pattern), tensors)
    found = torch.autograd.grad(checkpoint(step, *tensors, pattern, use_reentrant=False), tensors)
    assert all(map(torch.equal, found, right))
    wide = [t.detach().float().requires_grad_() for t in tensors]
    dout = torch.randn_like(tensors[0])
    with torch.autocast("cuda", torch.bfloat16):
        out = block_sparse_attention(*wide, pattern)
    found = torch.autograd.grad(out, wide, dout)
    for one, other in zip(found, gradients(tensors, pattern, dout), strict=True):
        assert one.dtype == torch.float32 and torch.equal(one, other.float())


def test_lists_that_change_between_the_passes_are_noticed() -> None:
    pattern = topk()
    out = block_sparse_attention(*qkv(), pattern)
    pattern.kv_indices.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_rows_of_another_call_are_refused() -> None:
    q, k, v = (t.detach() for t in qkv())
    out, lse = block_sparse_attention(q, k, v, Causal(), return_lse=True)
    call = OPERATORS.block_sparse_attention_backward
    for given, message in (
        ((out, q, k, v, out, lse[:, :, 1:].contiguous()), r"lse: has shape \(2, 4, 1023\)"),
        ((out, q, k, v, out[:, :, 1:], lse), r"out: has shape \(2, 4, 1023, 128\)"),
        ((out.half(), q, k, v, out, lse), r"dout: is torch\.float16"),
        ((out, q, k, v, out, lse.cpu()), "lse: is on cpu"),
    ):
        with pytest.raises(ArgumentError, match=message):
            call(*given, None, [], None, None, Causal().spec_json)
