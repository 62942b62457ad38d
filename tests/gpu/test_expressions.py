"""Masks that are expressions, on a GPU: beside the definition, through gradients, whatever their tensors hold.

pytest -n 4 tests/gpu/test_expressions.py
"""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import attention_oracle  # noqa: E402
import gradient_oracle  # noqa: E402
import known_functions  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402

from codegen.arch import ARCHS  # noqa: E402
from codegen.library import find_spec  # noqa: E402
from codegen.patterns.block_lists import expression_of  # noqa: E402
from codegen.select.backward import backward_archs  # noqa: E402
from runtime import block_sparse_attention, load_kernel  # noqa: E402
from runtime.expressions.evaluate import evaluate  # noqa: E402
from runtime.patterns import (  # noqa: E402
    BlockLists,
    scored_of,
    split_tensors,
)

LISTS: Any = BlockLists
DTYPES = (torch.float16, torch.bfloat16)
ATOL = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DOCUMENTS = "doc[batch, q_idx] == doc[batch, kv_idx] and q_idx >= kv_idx"
WRITTEN = [ARCHS[name].compute_capability for name in backward_archs()]
HERE = torch.cuda.get_device_capability() if torch.cuda.is_available() else WRITTEN[0]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def qkv(batch: int, heads: int, q_len: int, kv_len: int, d: int, dtype: Any) -> list[Any]:
    return [torch.randn(batch, heads, n, d, device="cuda").to(dtype) for n in (q_len, kv_len, kv_len)]


def lists(q_len: int, kv_len: int, mask: Any, aux: Any = None, block: tuple[int, int] = (64, 64)) -> Any:
    """Every other block of random ones is full, the others are partial."""
    rows, columns = -(-q_len // block[0]), -(-kv_len // block[1])
    order = torch.rand(1, 1, rows, columns, device="cuda").argsort(-1).int()
    half = columns // 2
    counts = torch.full((1, 1, rows), columns - half, dtype=torch.int32, device="cuda")
    full = (torch.full_like(counts, half), order[..., columns - half :].contiguous()) if half else ()
    made = LISTS(counts, order[..., : columns - half].contiguous(), *full, block=block, mask=mask, aux=aux)
    return pytree.tree_map(lambda t: t if t is None else t.cuda(), made)


def seen_by(pattern: Any, q: Any, k: Any) -> Any:
    own, aux = split_tensors(scored_of(pattern), pattern.index_tensors())
    return attention_oracle.times_seen(pattern.spec_json, own, (*q.shape[:3], k.shape[2]), None, aux)


def check(tensors: list[Any], pattern: Any) -> None:
    q, k, v = tensors
    right, right_lse = attention_oracle.attention(q, k, v, seen_by(pattern, q, k))
    out, lse = block_sparse_attention(q, k, v, pattern, return_lse=True)
    torch.testing.assert_close(out.float(), right, atol=ATOL[q.dtype], rtol=0)
    torch.testing.assert_close(lse, right_lse, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", known_functions.MASKS)
def test_functions_as_users_write_them(name: str, head_dim: int, dtype: Any) -> None:
    n = known_functions.LENGTH
    tensors = qkv(known_functions.BATCH, known_functions.HEADS, n, n, head_dim, dtype)
    check(tensors, lists(n, n, known_functions.MASKS[name]))


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("block", [(64, 64), (128, 128), (128, 64)])
@pytest.mark.parametrize(("q_len", "kv_len"), [(1000, 1000), (77, 900), (900, 333), (1, 500)])
def test_lengths(q_len: int, kv_len: int, block: tuple[int, int], head_dim: int) -> None:
    q_doc, kv_doc = (torch.randint(0, 3, (2, n), dtype=torch.int32) for n in (q_len, kv_len))
    text = "q_doc[batch, q_idx] == kv_doc[batch, kv_idx] and (q_idx + head) % 5 != kv_idx % 3"
    pattern = lists(q_len, kv_len, text, {"q_doc": q_doc, "kv_doc": kv_doc}, block)
    check(qkv(2, 4, q_len, kv_len, head_dim, torch.bfloat16), pattern)


def test_windows_of_an_image() -> None:
    """natten: 64 x 64 positions, 13 x 13 neighbors."""
    near = "abs(min(max({q}, 6), 57) - {k}) <= 6"
    axes = (("q_idx // 64", "kv_idx // 64"), ("q_idx % 64", "kv_idx % 64"))
    text = " and ".join(near.format(q=q, k=k) for q, k in axes)
    check(qkv(1, 2, 4096, 4096, 128, torch.float16), lists(4096, 4096, text, block=(128, 128)))


def test_tensors_of_every_type_and_stride() -> None:
    wide = torch.randint(-5, 5, (2, 4, 300, 40), device="cuda")
    aux = {
        "a": torch.rand(4) > 0.2,
        "b": wide[:, :, :, 7].permute(2, 0, 1)[::1],
        "c": torch.randn(8),
        "g": torch.randn(300, 3)[:, 1].bfloat16(),
        "h": torch.randn(1, 300).half().expand(2, 300),
        "n": torch.tensor(3, dtype=torch.int64),
    }
    text = "a[head] and (b[q_idx, batch, head] > n - 4 or c[q_idx - kv_idx] + g[kv_idx] < tanh(h[batch, q_idx]))"
    check(qkv(2, 4, 300, 300, 64, torch.float16), lists(300, 300, text, aux))


def test_an_index_beyond_an_end_is_that_ends() -> None:
    index = torch.tensor([-(2**31), 2**31 - 1, -1, 3, 4, 0, 2], dtype=torch.int32).repeat(50)[:300]
    text = "table[at[kv_idx]] or q_idx * q_idx * kv_idx * 977 < 0"
    check(qkv(2, 2, 300, 300, 64, torch.float16), lists(300, 300, text, {"table": torch.rand(4) > 0.5, "at": index}))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_kernels_by_mma_sync(head_dim: int) -> None:
    doc, (q, k, v) = torch.randint(0, 3, (2, 300), dtype=torch.int32), qkv(2, 4, 300, 300, head_dim, torch.float16)
    pattern = lists(300, 300, DOCUMENTS, {"doc": doc})
    fields = {"op": "attention", "arch": "sm_89", "head_dim": head_dim, "pattern": pattern.spec_pattern()}
    own, aux = split_tensors(scored_of(pattern), pattern.index_tensors())
    found = load_kernel(find_spec(fields), forward_compatible=True)(q, k, v, *own, aux=aux)
    right, _ = attention_oracle.attention(q, k, v, seen_by(pattern, q, k))
    torch.testing.assert_close(found[0].float(), right, atol=2e-3, rtol=0)


@pytest.mark.skipif(HERE not in WRITTEN, reason=f"gradients are written for {', '.join(backward_archs())}")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("block", [(64, 64), (128, 128)])
def test_gradients(block: tuple[int, int], deterministic: bool, head_dim: int, dtype: Any) -> None:
    doc, reach = torch.randint(0, 3, (2, 500), dtype=torch.int32).sort(-1).values, torch.tensor([3, 100, 400, 500])
    text = f"({DOCUMENTS}) and q_idx - kv_idx < reach[head]"
    pattern = lists(500, 500, text, {"doc": doc, "reach": reach}, block)
    tensors = [t.requires_grad_() for t in qkv(2, 4, 500, 500, head_dim, dtype)]
    dout = torch.randn_like(tensors[0])
    out = block_sparse_attention(*tensors, pattern, deterministic=deterministic)
    found = torch.autograd.grad(out, tensors, dout)
    right, theirs, rounded = (
        of(*tensors, pattern, dout) for of in (gradient_oracle.exact, gradient_oracle.by_sdpa, gradient_oracle.rounded)
    )
    gradient_oracle.assert_near(found, right, theirs, rounded, noise=gradient_oracle.noise(*tensors, dout))


def test_graphs_read_the_tensors_of_each_replay() -> None:
    doc = torch.randint(0, 3, (2, 300), dtype=torch.int32, device="cuda")
    tensors, pattern = qkv(2, 4, 300, 300, 64, torch.float16), lists(300, 300, DOCUMENTS, {"doc": doc})
    block_sparse_attention(*tensors, pattern)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = block_sparse_attention(*tensors, pattern)
    for each in pattern.aux.values():
        each.copy_(torch.randint(0, 3, (2, 300), dtype=torch.int32, device="cuda"))
    graph.replay()
    assert torch.equal(out, block_sparse_attention(*tensors, pattern))
    spec = pattern.spec_pattern()
    places = {"batch": 0, "head": 0, "q_idx": 5, "kv_idx": 3, "q_len": 300, "kv_len": 300}
    assert evaluate(expression_of(spec["mask"], spec["aux"]), places, pattern.aux).dim() == 0
