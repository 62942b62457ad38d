"""Lists whose partial blocks have an expression, or a function, as their mask: one call, under torch's machinery."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import attention_oracle  # noqa: E402
import gradient_oracle  # noqa: E402
import oracle_kernel  # noqa: E402

from runtime import ArgumentError, block_sparse_attention, convert  # noqa: E402
from runtime.patterns import BlockLists, Score  # noqa: E402

BATCH, HEADS, LENGTH = 2, 4, 300
SIZES = {"q_len": LENGTH, "kv_len": LENGTH, "batch": BATCH, "heads": HEADS}
LISTS: Any = BlockLists
DOCUMENTS = "doc[batch, q_idx] == doc[batch, kv_idx] and q_idx >= kv_idx"


@pytest.fixture(autouse=True)
def loaded(monkeypatch: pytest.MonkeyPatch) -> Any:
    torch.manual_seed(0)
    torch._dynamo.reset()
    return oracle_kernel.install(monkeypatch)


def qkv() -> list[Any]:
    return [torch.randn(BATCH, HEADS, LENGTH, 64).bfloat16() for _ in range(3)]


def documents() -> Any:
    return torch.randint(0, 3, (BATCH, LENGTH), dtype=torch.int32).sort(-1).values


def lists(mask: Any, aux: Any = None, full: bool = False, block: tuple[int, int] = (128, 128)) -> Any:
    rows, columns = (-(-LENGTH // size) for size in block)
    every = torch.arange(columns, dtype=torch.int32).expand(1, 1, rows, columns).contiguous()
    counts = torch.full((1, 1, rows), columns, dtype=torch.int32)
    some = (torch.zeros_like(counts), torch.zeros_like(every)) if full else ()
    return LISTS(counts, every, *some, block=block, mask=mask, aux=aux)


def seen_by(pairs: Any) -> Any:
    return pairs.expand(BATCH, HEADS, LENGTH, LENGTH).to(torch.int32)


def places() -> tuple[Any, ...]:
    sizes = BATCH, HEADS, LENGTH, LENGTH
    return tuple(torch.arange(n).view([-1 if i == axis else 1 for i in range(4)]) for axis, n in enumerate(sizes))


def check(pattern: Any, pairs: Any) -> None:
    q, k, v = qkv()
    right, lse = attention_oracle.attention(q, k, v, seen_by(pairs))
    out, found = block_sparse_attention(q, k, v, pattern, return_lse=True)
    torch.testing.assert_close(out.float(), right, atol=2e-2, rtol=0)
    torch.testing.assert_close(found, lse)
    assert torch.equal(convert.to_token_mask(pattern, **SIZES), seen_by(pairs) > 0)


@pytest.mark.parametrize("full", [False, True])
def test_documents_by_a_text_and_by_a_function(full: bool) -> None:
    doc, (b, _, q, k) = documents(), places()
    pairs = (doc[b, q] == doc[b, k]) & (q >= k)
    check(lists(DOCUMENTS, {"doc": doc}, full), pairs)
    check(lists(lambda b, h, q, k: (doc[b, q] == doc[b, k]) & (q >= k), full=full), pairs)


def test_expressions_of_the_head_and_of_both_positions() -> None:
    reach, table = torch.tensor([3, 10, 100, 299], dtype=torch.int64), torch.rand(7) > 0.4
    _, h, q, k = places()
    distance = (q - k).clamp(0, 6)
    text = "q_idx - kv_idx <= reach[head] and table[max(q_idx - kv_idx, 0)] and q_idx >= kv_idx"
    check(lists(text, {"reach": reach, "table": table}), (q - k <= reach[h]) & table[distance] & (q >= k))


def test_an_infinity_that_a_function_has() -> None:
    reach, (_, _, q, k) = torch.randn(LENGTH), places()
    mask = lists(lambda b, h, q, k: torch.where(q > k, reach[k], -float("inf")) > -0.5)
    assert "-inf" in mask.mask
    check(mask, (q > k) & (reach[k] > -0.5))


def test_large_blocks_are_split_and_small_ones_refused() -> None:
    _, _, q, k = places()
    check(lists("(q_idx + kv_idx) % 3 != 0", block=(256, 64)), (q + k) % 3 != 0)
    small = lists("q_idx >= kv_idx", block=(64, 16))
    with pytest.raises(ArgumentError, match=r"block: is \(64, 16\), but partial blocks with an expression"):
        block_sparse_attention(*qkv(), small)


def test_a_block_mask_of_an_expression_has_the_same_pairs() -> None:
    doc, (b, h, q, k) = documents(), places()
    pattern = lists(DOCUMENTS, {"doc": doc})
    mask_mod = convert.to_block_mask(pattern, q_len=LENGTH, kv_len=LENGTH).mask_mod
    assert torch.equal(
        mask_mod(b, h, q, k).expand(BATCH, HEADS, LENGTH, LENGTH), seen_by((doc[b, q] == doc[b, k]) & (q >= k)) > 0
    )


def test_compile_reads_the_tensors_of_each_call() -> None:
    compiled = torch.compile(lambda q, k, v, p: block_sparse_attention(q * 2, k, v, p), fullgraph=True, backend="eager")
    for _ in range(2):
        (q, k, v), pattern = qkv(), lists(DOCUMENTS, {"doc": documents()})
        assert torch.equal(compiled(q, k, v, pattern), block_sparse_attention(q * 2, k, v, pattern))
    again = torch.utils._pytree.tree_map(
        lambda t: t if t is None else t.clone(), lists(DOCUMENTS, {"doc": documents()}, full=True)
    )
    assert again.spec_json == pattern.spec_json and list(again.aux) == ["doc_kv", "doc_q"]


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: lists("q_idx >= kv_id"), r"mask: is 'q_idx >= kv_id': column 10 \(\"kv_id\"\): no such name"),
        (lambda: lists("q_idx - kv_idx"), r"mask: .*its type is int"),
        (lambda: lists("q_idx < 0"), "mask: .*it hides every pair"),
        (lambda: lists(3), "mask: is int, expected 'none', 'causal', 'bits', an expression or a function"),
        (lambda: lists(DOCUMENTS, {"doc": [1]}), r"aux\['doc'\]: is list, expected a torch.Tensor"),
        (lambda: lists(DOCUMENTS, {"doc": documents().double()}), r"aux\['doc'\]: is torch.float64, expected one of"),
        (lambda: lists("causal", {"doc": documents()}), "aux: is given, and mask is 'causal'"),
        (lambda: lists(lambda b, h, q, k: q >= k, {"doc": documents()}), "aux: is given, but mask is a function"),
    ],
)
def test_what_is_refused_where_the_pattern_is_made(made: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        made()


def test_a_tensor_of_a_mask_has_no_gradient(loaded: Any) -> None:
    """It is refused where gradients are on, whatever else requires one; of one that a score reads too, it has that."""
    limit = torch.rand(HEADS, requires_grad=True)
    (q, k, v), text = qkv(), "kv_idx * limit[head] <= q_idx"
    pattern, message = (
        lists(text, {"limit": limit}),
        r"aux\['limit'\]: requires a gradient, and tensors of masks have none",
    )
    for leaf in (q, q.detach().requires_grad_()):
        with pytest.raises(ArgumentError, match=message):
            block_sparse_attention(leaf, k, v, pattern)
        with pytest.raises(ArgumentError, match=message):
            block_sparse_attention(leaf.detach(), k, v, pattern, out=torch.empty_like(q))
    assert not loaded
    right = block_sparse_attention(q, k, v, lists(text, {"limit": limit.detach()}))
    with torch.no_grad():
        assert torch.equal(block_sparse_attention(q, k, v, pattern), right)
    score = Score("score * limit[head]", aux={"limit": limit})
    block_sparse_attention(q, k, v, pattern, score=score).float().sum().backward()
    assert limit.grad is not None and bool(limit.grad.any())


@pytest.mark.parametrize(("arch", "deterministic"), [("sm_90a", True), ("sm_90a", False), ("sm_89", True)])
def test_gradients(arch: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = oracle_kernel.install(monkeypatch, arch=arch)
    doc, (b, _, q, k) = documents(), places()
    tensors, pattern = [t.requires_grad_() for t in qkv()], lists(DOCUMENTS, {"doc": doc}, full=True)
    dout = torch.randn_like(tensors[0])
    out = block_sparse_attention(*tensors, pattern, deterministic=deterministic)
    found = torch.autograd.grad(out, tensors, dout)
    leaves = [t.detach().double().requires_grad_() for t in tensors]
    dense, _ = gradient_oracle.dense(*leaves, seen_by((doc[b, q] == doc[b, k]) & (q >= k)))
    right = torch.autograd.grad(dense, leaves, dout.double())
    gradient_oracle.assert_near(found, dict(zip(gradient_oracle.NAMES, right, strict=True)))
    specs = sorted((kernel.spec.gradients, kernel.spec.arch) for kernel in loaded.gradients.values())
    assert specs == [("dkdv", arch), ("dq", arch)]
