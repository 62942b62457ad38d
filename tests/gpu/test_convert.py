"""Converters on a GPU: without a synchronization, in a CUDA graph, compiled, and what attention makes of the result."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from convert_cases import BATCH, CASES, Case  # noqa: E402

import runtime  # noqa: E402
from runtime import ArgumentError, convert  # noqa: E402
from runtime.patterns import BlockLists  # noqa: E402

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
HEAD_DIM = 64
TOLERANCE = 2e-3  # of fp16, as `codegen verify` has it


@contextmanager
def no_synchronization() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def on_gpu(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(tensor.cuda() for tensor in tensors)


def parts(pattern: Any) -> list[Any]:
    """The tensors of a pattern, also the flag of lists that are too short."""
    tensors = [*pattern.index_tensors(), getattr(pattern, "overflow", None)]
    return [tensor for tensor in tensors if tensor is not None]


def assert_same(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for there, here in zip(found, expected, strict=True):
        assert torch.equal(there.cpu(), here)


@every_case
def test_as_on_the_cpu_without_a_synchronization(case: Case) -> None:
    tensors = on_gpu(case.tensors())
    with no_synchronization():
        pattern = case.pattern(*tensors)
    assert_same(parts(pattern), parts(case.pattern(*case.tensors())))
    q_len, kv_len = case.lengths
    with no_synchronization():
        pairs = convert.to_token_mask(pattern, q_len=q_len, kv_len=kv_len, batch=BATCH, heads=case.heads)
    assert torch.equal(pairs.cpu(), case.expected())


def turned(tensor: Any) -> Any:
    """Other values that are legal where the given ones are: boundaries moved, everything else with rows in reverse."""
    return tensor.flip(-2) if tensor.dim() > 1 else tensor - tensor.clamp(max=1)


@every_case
def test_a_graph_follows_its_inputs(case: Case) -> None:
    """Captured with one set of inputs, replayed with another one."""
    first = case.tensors()
    other = tuple(turned(tensor) for tensor in first)
    tensors = on_gpu(first)
    case.pattern(*tensors)  # what is made once, before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pattern = case.pattern(*tensors)
    for inputs in (first, other):
        for tensor, values in zip(tensors, inputs, strict=True):
            tensor.copy_(values)
        graph.replay()
        assert_same(parts(pattern), parts(case.pattern(*inputs)))


@pytest.mark.parametrize("name", ["flex_causal_documents", "q2k_block_sizes", "token_mask", "documents_causal"])
def test_compiled(name: str) -> None:
    (case,) = [case for case in CASES if case.name == name]
    torch.compiler.reset()  # else the lengths of the case before are taken for variables
    compiled = torch.compile(lambda *tensors: parts(case.pattern(*tensors)), fullgraph=True)
    assert_same(compiled(*on_gpu(case.tensors())), parts(case.pattern(*case.tensors())))


def attention(q: Any, k: Any, v: Any, visible: Any) -> tuple[Any, Any]:
    """Result and LSE in float64; a row that sees no key has 0 and -inf."""
    q, k, v = (x.double() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    logits = (q @ k.transpose(2, 3) / HEAD_DIM**0.5).masked_fill(~visible, -torch.inf)
    return torch.softmax(logits, -1).nan_to_num(0) @ v, logits.logsumexp(-1)


def inputs_of(case: Case) -> tuple[Any, Any, Any]:
    generator = torch.Generator("cuda").manual_seed(1)
    sizes = ((case.heads, case.lengths[0]), (case.kv_heads, case.lengths[1]), (case.kv_heads, case.lengths[1]))
    q, k, v = (
        torch.randn(BATCH, heads, length, HEAD_DIM, dtype=torch.float16, device="cuda", generator=generator)
        for heads, length in sizes
    )
    return q, k, v


@every_case
def test_attention(case: Case) -> None:
    pattern = case.pattern(*on_gpu(case.tensors()))
    q, k, v = inputs_of(case)
    found = runtime.block_sparse_attention(q, k, v, pattern, return_lse=True, validate=True)
    out, lse = attention(q, k, v, case.expected().cuda())
    assert (found.out.double() - out).abs().max() <= TOLERANCE
    seen = lse > -torch.inf
    assert torch.equal(found.lse > -torch.inf, seen)
    assert (found.lse.double() - lse)[seen].abs().max() <= TOLERANCE


def test_attention_of_documents_chosen_in_a_graph() -> None:
    """Boundaries change between replays: conversion and attention both follow."""
    (case,) = [case for case in CASES if case.name == "documents_causal"]
    q, k, v = inputs_of(case)
    boundaries = on_gpu(case.tensors())[0]

    def step() -> Any:
        return runtime.block_sparse_attention(q, k, v, case.pattern(boundaries))

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for moved in (boundaries.clone(), (boundaries + 7).clamp(max=case.lengths[1])):
        boundaries.copy_(moved)
        graph.replay()
        visible = convert.to_token_mask(case.pattern(boundaries), q_len=case.lengths[0], kv_len=case.lengths[1])
        assert (out.double() - attention(q, k, v, visible)[0]).abs().max() <= TOLERANCE


def test_validation_reports_lists_that_are_too_short() -> None:
    blocks = torch.ones(2, 4, dtype=torch.bool, device="cuda")
    pattern = convert.from_bool_blocks(blocks, block=(64, 64), max_blocks=3)
    assert isinstance(pattern, BlockLists)
    q = torch.randn(1, 1, 128, HEAD_DIM, dtype=torch.float16, device="cuda")
    k = torch.randn(1, 1, 256, HEAD_DIM, dtype=torch.float16, device="cuda")
    with pytest.raises(ArgumentError):
        runtime.block_sparse_attention(q, k, k, pattern, validate=True)


def test_validation_reports_padding_that_is_not_on_the_right() -> None:
    keys = torch.ones(2, 256, dtype=torch.bool, device="cuda")
    keys[1, :3] = False
    q = torch.randn(2, 1, 128, HEAD_DIM, dtype=torch.float16, device="cuda")
    k = torch.randn(2, 1, 256, HEAD_DIM, dtype=torch.float16, device="cuda")
    lengths = convert.kv_lengths_from_mask(keys)
    with pytest.raises(ArgumentError, match="kv_lengths"):
        runtime.block_sparse_attention(q, k, k, runtime.patterns.Dense(), kv_lengths=lengths, validate=True)
    pattern = convert.from_key_mask(keys, q_len=128)
    found = runtime.block_sparse_attention(q, k, k, pattern)
    expected, _ = attention(q, k, k, keys[:, None, None].expand(2, 1, 128, 256))
    assert (found.double() - expected).abs().max() <= TOLERANCE
