"""The backend of SGLang on a GPU, beside the definition."""

from __future__ import annotations

import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import sglang_stand_in as stand_in  # noqa: E402

BF16, HALF, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
HEADS, KV_HEADS = 8, 2
ROWS, LENGTHS, QUERIES = [5, 0, 3], [500, 300, 5], [300, 200, 5]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def operands(tokens: int, d: int, dtype: Any) -> Any:
    """Q, K and V as SGLang passes them: views of one tensor."""
    rows = torch.randn(tokens, (HEADS + 2 * KV_HEADS) * d, device="cuda").to(dtype)
    q, k, v = rows.split([HEADS * d, KV_HEADS * d, KV_HEADS * d], -1)
    return q, k.view(tokens, KV_HEADS, d), v.view(tokens, KV_HEADS, d)


def backend_of(monkeypatch: pytest.MonkeyPatch, model: list[Any], page_size: int, **settings: Any) -> Any:
    """A backend and its runner, on the current GPU."""
    module = stand_in.install(monkeypatch, deterministic=settings.pop("deterministic", False))
    runner = stand_in.runner_of(model, page_size, slots=8192, device="cuda", **settings)
    return module.PagedBackend(runner), runner


def close(out: Any, expected: Any) -> None:
    torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("window", [-1, 100])
@pytest.mark.parametrize(("dtype", "d"), [(BF16, 128), (HALF, 64), (BF16, 256), (HALF, 192)])
def test_prompts_and_steps_are_right(
    monkeypatch: pytest.MonkeyPatch, dtype: Any, d: int, window: int, page_size: int
) -> None:
    layer = stand_in.RadixAttention(HEADS, KV_HEADS, d, sliding_window_size=window, scaling=d**-0.5)
    backend, runner = backend_of(monkeypatch, [layer], page_size, dtype=dtype)
    for queries, forward in ((QUERIES, backend.forward_extend), ([1, 1, 1], backend.forward_decode)):
        batch, (q, k, v) = stand_in.batch_of(runner, ROWS, LENGTHS, queries), operands(sum(queries), d, dtype)
        backend.init_forward_metadata(batch)
        out = forward(q, k, v, layer, batch)
        close(out, stand_in.right(runner, layer, q, ROWS, LENGTHS, queries))


@pytest.mark.parametrize("window", [-1, 100])
@pytest.mark.parametrize("lengths", [[200, 90, 5], [300, 90, 200]], ids=["without a prefix", "behind a prefix"])
@pytest.mark.parametrize(("dtype", "d"), [(BF16, 128), (HALF, 64), (BF16, 256)])
def test_prompts_in_small_pages_are_right(
    monkeypatch: pytest.MonkeyPatch, dtype: Any, d: int, lengths: list[int], window: int
) -> None:
    """They are computed as packed sequences."""
    layer = stand_in.RadixAttention(HEADS, KV_HEADS, d, sliding_window_size=window, scaling=d**-0.5)
    backend, runner = backend_of(monkeypatch, [layer], 1, dtype=dtype)
    queries = [200, 90, 5]
    batch, (q, k, v) = stand_in.batch_of(runner, ROWS, lengths, queries), operands(sum(queries), d, dtype)
    backend.init_forward_metadata(batch)
    assert backend.forward_metadata.packed is not None
    out = backend.forward_extend(q, k, v, layer, batch)
    close(out, stand_in.right(runner, layer, q, ROWS, lengths, queries))


@pytest.mark.parametrize("deterministic", [False, True])
def test_sinks_and_softcaps_are_right(monkeypatch: pytest.MonkeyPatch, deterministic: bool) -> None:
    layer = stand_in.RadixAttention(HEADS, KV_HEADS, 64, logit_cap=20.0)
    backend, runner = backend_of(monkeypatch, [layer], 16, deterministic=deterministic)
    sinks = torch.randn(HEADS, device="cuda").bfloat16()
    for queries in (QUERIES, [1, 1, 1]):
        batch, (q, k, v) = stand_in.batch_of(runner, ROWS, LENGTHS, queries), operands(sum(queries), 64, BF16)
        backend.init_forward_metadata(batch)
        out = backend.forward_extend(q, k, v, layer, batch, sinks=sinks)
        close(out, stand_in.right(runner, layer, q, ROWS, LENGTHS, queries, sinks=sinks))


def test_deterministic_results_do_not_depend_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = stand_in.RadixAttention(HEADS, KV_HEADS, 128)
    backend, runner = backend_of(monkeypatch, [layer], 16, deterministic=True)
    batch, (q, k, v) = stand_in.batch_of(runner, ROWS, LENGTHS, [1, 1, 1]), operands(3, 128, BF16)
    backend.init_forward_metadata(batch)
    whole = backend.forward_decode(q, k, v, layer, batch)
    for i, (row, length) in enumerate(zip(ROWS, LENGTHS, strict=True)):
        one = stand_in.batch_of(runner, [row], [length], [1])
        backend.init_forward_metadata(one)
        alone = backend.forward_decode(q[i : i + 1], None, None, layer, one)
        assert torch.equal(alone, whole[i : i + 1])


@pytest.mark.parametrize("d", [64, 128, 256])
def test_an_e4m3_cache_is_right(monkeypatch: pytest.MonkeyPatch, d: int) -> None:
    scales = {"k_scale": torch.tensor(0.5, device="cuda"), "v_scale": torch.tensor(0.75, device="cuda")}
    layer = stand_in.RadixAttention(HEADS, KV_HEADS, d, scaling=d**-0.5, **scales)
    backend, runner = backend_of(monkeypatch, [layer], 64, cache=E4M3)
    for queries in (QUERIES, [1, 1, 1]):
        batch, (q, k, v) = stand_in.batch_of(runner, ROWS, LENGTHS, queries), operands(sum(queries), d, BF16)
        backend.init_forward_metadata(batch)
        out = backend.forward_extend(q, k, v, layer, batch)
        close(out, stand_in.right(runner, layer, q, ROWS, LENGTHS, queries))


@pytest.mark.parametrize("page_size", [1, 16])
def test_one_graph_serves_other_requests_and_padding(monkeypatch: pytest.MonkeyPatch, page_size: int) -> None:
    """Captured once for 4 requests, as SGLang does; a replay finds its tables and slots by itself."""
    model = [stand_in.RadixAttention(HEADS, KV_HEADS, 128, i, sliding_window_size=(-1, 40)[i]) for i in range(2)]
    backend, runner = backend_of(monkeypatch, model, page_size, pool=stand_in.WindowPool)
    order = torch.randperm(8192 // page_size)[:, None] * page_size + torch.arange(page_size)
    runner.token_to_kv_pool.mapping[:-1] = order.flatten()
    backend.init_cuda_graph_state(4, 4)
    batch, (q, k, v) = stand_in.batch_of(runner, [0] * 4, [1] * 4, [1] * 4), operands(4, 128, BF16)

    def step() -> list[Any]:
        backend.init_forward_metadata_in_graph(batch)
        return [backend.forward_decode(q, k, v, layer, batch) for layer in model]

    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = step()
    for rows, lengths, real in (
        ([5, 1, 7, 2], [500, 40, 1, 300], 4),
        ([3, 6, 0, 0], [77, 512, 1, 1], 2),
        ([4, 0, 0, 0], [9, 1, 1, 1], 1),
    ):
        live = stand_in.batch_of(runner, rows, lengths, [1] * 4)
        for name in ("req_pool_indices", "seq_lens", "out_cache_loc"):
            getattr(batch, name).copy_(getattr(live, name))
        for out in outs:
            out.fill_(float("nan"))
        backend.init_forward_metadata_out_graph(batch)
        graph.replay()
        for layer, out in zip(model, outs, strict=True):
            expected = stand_in.right(runner, layer, q[:real], rows[:real], lengths[:real], [1] * real)
            close(out[:real], expected)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("window", [-1, 100])
@pytest.mark.parametrize("mode", ["TARGET_VERIFY", "DRAFT_EXTEND_V2"])
def test_drafts_are_right(monkeypatch: pytest.MonkeyPatch, mode: str, window: int, page_size: int) -> None:
    layer = stand_in.RadixAttention(HEADS, KV_HEADS, 128, sliding_window_size=window)
    backend, runner = backend_of(monkeypatch, [layer], page_size, drafts=4)
    batch, (q, k, v) = stand_in.batch_of(runner, ROWS, LENGTHS, [4] * 3, mode), operands(12, 128, BF16)
    backend.init_forward_metadata(batch)
    out = backend.forward_extend(q, k, v, layer, batch)
    close(out, stand_in.right(runner, layer, q, ROWS, LENGTHS, [4] * 3))


@pytest.mark.parametrize("several", [False, True], ids=["verification", "steps of a draft model"])
def test_one_graph_serves_drafts(monkeypatch: pytest.MonkeyPatch, several: bool) -> None:
    """Captured once for 4 requests: a verification of 4 drafts each, or 3 steps of a draft model."""
    layer = stand_in.RadixAttention(HEADS, KV_HEADS, 128)
    one, runner = backend_of(monkeypatch, [layer], 16, drafts=4)
    module: Any = sys.modules[stand_in.KEPT]
    backend = module.PagedDraftBackend(runner, 4) if several else one
    steps, queries = (backend.attn_backends, 1) if several else ([backend], 4)
    backend.init_cuda_graph_state(4, 16)
    mode = "DECODE" if several else "TARGET_VERIFY"
    batch = stand_in.batch_of(runner, [0] * 4, [8] * 4, [queries] * 4, mode)
    q, _, _ = operands(4 * queries, 128, BF16)

    def run() -> list[Any]:
        backend.init_forward_metadata_in_graph(batch)
        return [each.forward_extend(q, None, None, layer, batch) for each in steps]

    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = run()
    for rows, lengths in (([5, 1, 7, 2], [500, 40, 6, 300]), ([3, 6, 4, 0], [77, 508, 30, 5])):
        live = stand_in.batch_of(runner, rows, lengths, [queries] * 4, mode)
        for name in ("req_pool_indices", "seq_lens"):
            getattr(batch, name).copy_(getattr(live, name))
        backend.init_forward_metadata_out_graph(batch)
        graph.replay()
        for step, out in enumerate(outs):
            keys = [n + step + 1 for n in lengths] if several else lengths
            close(out, stand_in.right(runner, layer, q, rows, keys, [queries] * 4))
