"""Lists of single queries on a GPU: results and gradients beside float64, bit for bit, and under torch's machinery.

pytest -n 8 tests/gpu/test_key_lists.py
"""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from codegen.arch import ARCHS  # noqa: E402
from codegen.key_list_cases import CASES, KeyListCase, cases_of  # noqa: E402
from codegen.library import find_spec  # noqa: E402
from codegen.plans import key_lists_forward as forward_plans  # noqa: E402
from codegen.select import key_lists as select  # noqa: E402
from codegen.select.key_lists import FORWARD, gradient_archs, gradient_fields  # noqa: E402
from runtime import KeyLists, paged_attention, varlen_attention  # noqa: E402
from runtime.kernel import load_kernel  # noqa: E402
from runtime.kernels.arguments import Signatures  # noqa: E402
from runtime.kernels.launches import Launches  # noqa: E402
from runtime.ops import key_list_calls, key_list_gradients, paged_calls  # noqa: E402
from runtime.verify import key_lists as verified  # noqa: E402
from runtime.verify.common import poisoned_memory  # noqa: E402
from runtime.verify.run import run_case  # noqa: E402

WRITTEN = [ARCHS[name].compute_capability for name in gradient_archs()]
HERE = torch.cuda.get_device_capability() if torch.cuda.is_available() else WRITTEN[0]
pytestmark = pytest.mark.skipif(HERE not in WRITTEN, reason=f"gradients are written for {', '.join(gradient_archs())}")
CUDA = torch.device("cuda")
KINDS = [
    {"head_dim": head_dim, "keys": keys, "group": group}
    for head_dim, keys, group in ((128, 128, 16), (128, 128, 4), (128, 64, 8), (64, 128, 8), (64, 64, 4), (64, 64, 16))
]
SMALL_BLOCKS = [
    {"head_dim": head_dim, "keys": keys, "group": group}
    for head_dim, keys, group in (
        *((128, keys, group) for keys in (16, 32) for group in (4, 8, 16)),
        *((64, keys, group) for keys, group in ((16, 16), (16, 4), (32, 8), (32, 16))),
    )
]
"""Kinds of gradients alone."""
STEP = KeyListCase("step", (1000, 0, 129, 1), (1200, 9, 129, 33), entries=6, before=11, shared_block=True)


@pytest.fixture(autouse=True)
def _without_receipts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls take kernels that have no receipt yet."""
    for module in (key_list_calls, key_list_gradients, paged_calls):
        monkeypatch.setattr(module, "has_receipt", lambda fields: True)


def name_of(kind: dict[str, int]) -> str:
    return "d{head_dim}-b{keys}-g{group}".format(**kind)


def inputs_of(case: KeyListCase, kind: dict[str, int], dtype: Any = torch.bfloat16) -> verified.Inputs:
    return verified.inputs_of(case, **kind, dtype=dtype, device=CUDA)


def attend(inputs: verified.Inputs, keys: int, **options: Any) -> tuple[list[Any], Any]:
    """Operands that require gradients, and what a call returns for them."""
    operands = [t.clone().requires_grad_() for t in inputs[:3]]
    bounds = {"cu_seqlens_q": inputs.cu_seqlens_q, "cu_seqlens_k": inputs.cu_seqlens_k}
    pattern = KeyLists(inputs.lists, inputs.counts, keys)
    return operands, varlen_attention(*operands, pattern, **bounds, **options)


def step(inputs: verified.Inputs, case: KeyListCase, keys: int, **options: Any) -> tuple[Any, ...]:
    """Result and gradients of a training step, of tokens in sequences."""
    operands, found = attend(inputs, keys, **options)
    inside = slice(case.before, inputs.q.shape[0] - case.before)
    return (found.detach()[inside], *torch.autograd.grad(found[inside], operands, inputs.dout[inside]))


@pytest.mark.parametrize("kind", KINDS + SMALL_BLOCKS, ids=name_of)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_step_has_the_gradients_of_the_definition(kind: dict[str, int], dtype: Any) -> None:
    inputs = inputs_of(STEP, kind, dtype)
    right = verified.oracle(STEP, inputs, kind["keys"])
    with poisoned_memory():
        out, *gradients = step(inputs, STEP, kind["keys"])
    expected = right.out[STEP.before : -STEP.before]
    torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=2e-2)
    for name, found in zip(("dq", "dk", "dv"), gradients, strict=True):
        exact = right.gradients[name]
        close = float(exact.abs().max()) * 2e-2
        torch.testing.assert_close(
            found.double(), exact, atol=close, rtol=2e-2, msg=lambda text, name=name: f"{name}: {text}"
        )
        assert not found[right.unseen[name]].any()


@pytest.mark.parametrize("kind", KINDS + SMALL_BLOCKS, ids=name_of)
def test_all_cases(kind: dict[str, int]) -> None:
    sizes = {"head_dim": kind["head_dim"], "entry_keys": kind["keys"], "group": kind["group"]}
    kernel = load_kernel(find_spec(gradient_fields("sm_90a", "bf16", **sizes)))
    cases = cases_of(kind["keys"])
    failed = [outcome for case in cases if not (outcome := run_case(kernel, case, CUDA)).passed]
    assert not failed


def forward_kernel(kind: dict[str, int], layout: str = "varlen") -> Any:
    sizes = {"head_dim": kind["head_dim"], "entry_keys": kind["keys"], "group": kind["group"]}
    return load_kernel(find_spec({"op": FORWARD, "arch": "sm_90a", "dtype": "bf16", "layout": layout, **sizes}))


def forget_calls(kernel: Any) -> None:
    """Let the next call of a kernel divide its queries anew."""
    kernel._signatures, kernel._launches = Signatures(), Launches()


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
@pytest.mark.parametrize("layout", ["varlen", "paged"])
@pytest.mark.parametrize("slice_bytes", [forward_plans.SLICE_BYTES, 1 << 21], ids=["one slice", "slices"])
def test_all_cases_of_the_forward(
    kind: dict[str, int], layout: str, slice_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward_plans, "SLICE_BYTES", slice_bytes)
    kernel = forward_kernel(kind, layout)
    forget_calls(kernel)
    failed = [outcome for case in CASES if not (outcome := run_case(kernel, case, CUDA)).passed]
    forget_calls(kernel)
    assert not failed


@pytest.mark.parametrize("kind", KINDS[:2], ids=name_of)
def test_results_have_the_same_bits_for_any_slices(kind: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many thread blocks at a time, whose spare warps read what the launch before has written."""
    kernel = forward_kernel(kind)
    inputs = inputs_of(KeyListCase("slices", (9000, 300), (9000, 300), entries=16, shared_block=True), kind)
    options = {name: getattr(inputs, name) for name in ("cu_seqlens_q", "cu_seqlens_k", "lists")}
    found = []
    for slice_bytes in (1 << 40, 1 << 26, 1 << 24, 1 << 26):
        monkeypatch.setattr(forward_plans, "SLICE_BYTES", slice_bytes)
        forget_calls(kernel)
        with poisoned_memory():
            found.append(kernel(inputs.q, inputs.k, inputs.v, **options))
    forget_calls(kernel)
    for rows in found[1:]:
        assert torch.equal(rows.out, found[0].out) and torch.equal(rows.lse, found[0].lse)


@pytest.mark.parametrize("least", [0, 1 << 40], ids=["by key blocks", "by queries"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_both_ways_of_a_forward_have_the_results_of_the_definition(
    case: KeyListCase, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(select, "LEAST_QUERIES", least)
    inputs = inputs_of(case, KINDS[0])
    right = verified.oracle(case, inputs, 128)
    inside = slice(case.before, inputs.q.shape[0] - case.before)
    with torch.no_grad():
        _, found = attend(inputs, 128, return_lse=True, scale=case.scale)
    torch.testing.assert_close(found.out[inside].double(), right.out[inside], atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(found.lse[:, inside].double(), right.lse[:, inside], atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("kind", [KINDS[0], SMALL_BLOCKS[2]], ids=name_of)
def test_gradients_have_the_same_bits_beside_a_busy_stream(kind: dict[str, int]) -> None:
    case = KeyListCase("bits", (4000, 300), (4000, 300), entries=16, shared_block=True)
    inputs = inputs_of(case, kind)
    first = step(inputs, case, kind["keys"])
    other, work = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    for _ in range(100):
        with torch.cuda.stream(other):
            for _ in range(5):
                work = torch.tanh(work @ work)
        assert all(map(torch.equal, first, step(inputs, case, kind["keys"])))


@pytest.mark.parametrize("kind", [KINDS[0], SMALL_BLOCKS[2]], ids=name_of)
def test_steps_compile_and_are_captured(kind: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "LEAST_QUERIES", 0)
    case = KeyListCase("captured", (500, 200), (500, 200), entries=5)
    inputs = inputs_of(case, kind)
    first = step(inputs, case, kind["keys"])
    torch._dynamo.reset()
    pattern = KeyLists(inputs.lists, None, kind["keys"])
    operands = [t.clone().requires_grad_() for t in inputs[:3]]

    @torch.compile(fullgraph=True)
    def attended(q: Any, k: Any, v: Any) -> Any:
        return varlen_attention(q, k, v, pattern, cu_seqlens_q=inputs.cu_seqlens_q)

    out = attended(*operands)
    assert all(map(torch.equal, first, (out.detach(), *torch.autograd.grad(out, operands, inputs.dout))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(inputs, case, kind["keys"])
    other = inputs_of(KeyListCase("others", case.q_lens, case.kv_lens, entries=5), kind)
    for mine, its in zip(inputs, other, strict=True):
        if mine is not None:
            mine.copy_(its)
    graph.replay()
    assert all(map(torch.equal, found, step(other, case, kind["keys"])))


@pytest.mark.parametrize("seed", range(32))
def test_bounds_and_lists_may_hold_anything(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing hangs, and what is read and written lies in tensors."""
    monkeypatch.setattr(select, "LEAST_QUERIES", 0)
    kinds = KINDS + SMALL_BLOCKS
    kind = kinds[seed % len(kinds)]
    case = KeyListCase(f"garbage {seed}", (300, 100), (300, 100), entries=9, wild=True, counted=True)
    inputs = inputs_of(case, kind)
    draw = torch.Generator(device="cuda").manual_seed(seed)
    wide = torch.randint(-(2**31), 2**31 - 1, (2, 3), generator=draw, device="cuda").int()
    near = torch.randint(-50, 500, (2, 3), generator=draw, device="cuda").int()
    of_q, of_k = wide if seed % 2 else near
    odd = inputs._replace(cu_seqlens_q=of_q, cu_seqlens_k=of_k)
    operands, out = attend(odd, kind["keys"])
    torch.autograd.grad(out, operands, inputs.dout)
    torch.cuda.synchronize()


def call_over_pages(case: KeyListCase, kind: dict[str, int], page_size: int, **options: Any) -> tuple[Any, Any]:
    """Inputs, and what a call over pages returns for them."""
    inputs = inputs_of(case, kind)
    k, v, table, lengths = verified.pages_of(case, inputs, page_size)
    pattern = KeyLists(inputs.lists, inputs.counts, kind["keys"])
    options |= {"block_table": table, "seq_lens": lengths, "cu_seqlens_q": inputs.cu_seqlens_q}
    return inputs, paged_attention(inputs.q, k, v, pattern, **options)


@pytest.mark.parametrize("page_size", [16, 32, 64, 128, 256])
def test_calls_over_pages_have_the_results_of_packed_ones(page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit; a captured call takes other lists."""
    monkeypatch.setattr(select, "LEAST_QUERIES", 0)
    kind, case = KINDS[0], KeyListCase("pages", (1000, 300), (3000, 300), entries=9, counted=True)
    inputs, found = call_over_pages(case, kind, page_size, return_lse=True)
    with torch.no_grad():
        _, packed = attend(inputs, kind["keys"], return_lse=True)
    assert torch.equal(found.out, packed.out) and torch.equal(found.lse, packed.lse)
    k, v, table, lengths = verified.pages_of(case, inputs, page_size)
    options = {"block_table": table, "seq_lens": lengths, "cu_seqlens_q": inputs.cu_seqlens_q}
    pattern = KeyLists(inputs.lists, inputs.counts, kind["keys"])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_attention(inputs.q, k, v, pattern, **options)
    inputs.lists.copy_(inputs.lists.flip(1))
    graph.replay()
    assert torch.equal(out, paged_attention(inputs.q, k, v, pattern, **options))


@pytest.mark.parametrize("seed", range(10))
def test_tables_and_lengths_may_hold_anything(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing hangs, and what is read and written lies in tensors."""
    monkeypatch.setattr(select, "LEAST_QUERIES", 0)
    kind, case = KINDS[seed % len(KINDS)], KeyListCase(f"garbage {seed}", (300, 100), (900, 100), entries=9, wild=True)
    inputs = inputs_of(case, kind)
    k, v, table, _ = verified.pages_of(case, inputs, 64)
    draw = torch.Generator(device="cuda").manual_seed(seed)
    wide = torch.randint(-(2**31), 2**31 - 1, table.shape, generator=draw, device="cuda").int()
    odd = torch.where(torch.rand(table.shape, generator=draw, device="cuda") < 0.5, wide, table)
    lengths = torch.randint(-(2**31), 2**31 - 1, (2,), generator=draw, device="cuda").int()
    options = {"block_table": odd, "seq_lens": lengths, "cu_seqlens_q": inputs.cu_seqlens_q}
    paged_attention(inputs.q, k, v, KeyLists(inputs.lists, None, kind["keys"]), **options)
    torch.cuda.synchronize()


def test_two_streams_transpose_lists_at_a_time() -> None:
    """Thread blocks of the transposition wait for each other, of their own launch only."""
    kind = KINDS[0]
    kernel, streams = forward_kernel(kind), [torch.cuda.Stream() for _ in range(3)]
    inputs = inputs_of(KeyListCase("streams", (6000,), (6000,), entries=16), kind)
    options = {name: getattr(inputs, name) for name in ("cu_seqlens_q", "cu_seqlens_k", "lists")}
    right = kernel(inputs.q, inputs.k, inputs.v, **options)
    torch.cuda.synchronize()
    for _ in range(20):
        found = []
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(kernel(inputs.q, inputs.k, inputs.v, **options))
        torch.cuda.synchronize()
        assert all(torch.equal(rows.out, right.out) and torch.equal(rows.lse, right.lse) for rows in found)
