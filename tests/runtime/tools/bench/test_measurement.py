"""Measuring, as far as it goes without a GPU: workloads, their work, what peers compute, medians."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, get_type_hints

import pytest

torch = pytest.importorskip("torch")

from codegen.library import find_spec  # noqa: E402
from codegen.parse import parse_spec  # noqa: E402
from codegen.spec import AttentionSpec  # noqa: E402
from runtime.operators import OPERATORS, part  # noqa: E402
from runtime.tools.bench import measurement  # noqa: E402

BLOCK_LISTS = "h100_block_lists"
pytestmark = pytest.mark.filterwarnings("ignore:Sparse")


KERNEL = {
    "compiled": SimpleNamespace(named=SimpleNamespace(stem="ours")),
    "spec": SimpleNamespace(op="attention"),
}
"""What of a kernel ``measure`` reads."""


def doubled(x: Any) -> Any:
    return x * 2


def test_a_peer_is_compiled_for_every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    compilations = []

    def backend(graph: Any, inputs: list[Any]) -> Any:
        compilations.append([tuple(x.shape) for x in inputs if hasattr(x, "shape")])
        return graph.forward

    def workload(size: int) -> measurement.Workload:
        compiled = torch.compile(doubled, backend=backend, dynamic=False)
        peers = {"peer": lambda: compiled(torch.ones(size))}
        return measurement.Workload(shape=str(size), flops=1e9, call=lambda: None, peers=peers, peer_flops={})

    def timed(calls: dict[str, Any]) -> dict[str, float]:
        for call in calls.values():
            call()
        return dict.fromkeys(calls, 1.0)

    monkeypatch.setattr(measurement, "workload_of", lambda spec: workload)
    monkeypatch.setattr(measurement, "single_calls", timed)
    kernels = torch._dynamo.config.recompile_limit + 4
    for size in range(1, kernels + 1):
        kernel: Any = type("Kernel", (int,), KERNEL)(size)
        (record,) = measurement.measure(kernel)
        assert (record.shape, record.peer, record.tflops) == (str(size), "peer", 1.0)
    assert len(compilations) == kernels


class OnCpu(torch.overrides.TorchFunctionMode):  # type: ignore[name-defined,misc]
    """Makes on the CPU, in fp32, what is asked for on a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        if kwargs.get("dtype") is torch.float16:
            kwargs["dtype"] = torch.float32
        return func(*args, **kwargs)


@pytest.fixture
def on_cpu() -> Iterator[None]:
    torch.manual_seed(0)
    with OnCpu():
        yield


class Kernel:
    """Stands for a kernel: its spec, and what it was called with."""

    def __init__(self, name: str) -> None:
        self.spec: Any = find_spec(name).spec
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __call__(self, *tensors: Any, **more: Any) -> None:
        self.calls.append((tensors, more))

    def prepare(self, operand: Any, size: int, **how: Any) -> Any:
        return operand, size, how


def dense(matrix: Any) -> Any:
    rows, cols = matrix.values().shape[1:]
    out = torch.zeros(matrix.shape)
    crow, col = matrix.crow_indices().tolist(), matrix.col_indices().tolist()
    for row in range(len(crow) - 1):
        for i in range(crow[row], crow[row + 1]):
            out[row * rows : (row + 1) * rows, col[i] * cols : (col[i] + 1) * cols] += matrix.values()[i]
    return out


def test_speed_is_work_over_time_and_a_dense_peer_does_more(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = {"dense": lambda: None, "sparse": lambda: None}
    load = measurement.Workload("a shape", 6e12, lambda: None, peers, {"dense": 30e12})
    times = {"ours": 2.00004, "dense": 5.0, "sparse": 4.0}
    monkeypatch.setattr(measurement, "workload_of", lambda spec: lambda kernel: load)
    monkeypatch.setattr(measurement, "single_calls", lambda calls: {name: times[name] for name in calls})
    kernel: Any = SimpleNamespace(**KERNEL)
    found = [record.model_dump() for record in measurement.measure(kernel)]
    own = {"shape": "a shape", "milliseconds": 2.0, "tflops": 2999.9}
    assert found == [
        {**own, "peer": "dense", "peer_milliseconds": 5.0, "peer_tflops": 6000.0},
        {**own, "peer": "sparse", "peer_milliseconds": 4.0, "peer_tflops": 1500.0},
    ]


@pytest.mark.parametrize(
    ("name", "more"),
    [("b128", {}), ("b128_bias_gelu", {}), ("b128_transposed", {}), ("b128_accumulate", {}), ("b64x128", {})],
)
@pytest.mark.usefixtures("on_cpu")
def test_workload_of_bsr_times_dense(name: str, more: dict[str, Any]) -> None:
    kernel = Kernel(f"h100_bsr_spmm_{name}")
    load = measurement.bsr_workload(kernel, size=512, row_blocks=2, columns=64)  # type: ignore[arg-type]
    load.call()
    ((((a, *prepared), b), given),) = kernel.calls
    spec = kernel.spec
    rows, cols = spec.block.rows, spec.block.cols
    assert load.shape == f"M512 K512 N64, 2 blocks {rows}x{cols} a row"
    assert load.flops == 2.0 * 512 * 2 * cols * 64 and load.peer_flops == {"cuBLAS, dense A": 2.0 * 512 * 512 * 64}
    assert prepared == [64, {"effort": "best"}]
    assert (given["bias"] is not None) == (spec.epilogue is not None) and (given["c"] is not None) == spec.accumulate
    assert all(len(set(row)) == 2 for row in a.col_indices().view(-1, 2).tolist())
    square = not spec.transpose_a and rows == cols
    assert list(load.peers) == [*(["torch A @ B (BSR)"] if square else []), "cuBLAS, dense A"]
    assert load.peers["cuBLAS, dense A"]().shape == (512, 64)
    if square:  # it does all that the kernel does
        expected = dense(a) @ b
        expected = expected + given["c"] if spec.accumulate else expected
        expected = torch.nn.functional.gelu(expected + given["bias"][:, None]) if spec.epilogue else expected
        torch.testing.assert_close(load.peers["torch A @ B (BSR)"](), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("on_cpu")
def test_workload_of_a_sampled_product() -> None:
    kernel = Kernel("h100_bsr_sddmm_b64")
    load = measurement.sddmm_workload(kernel, size=512, row_blocks=3, depth=128)  # type: ignore[arg-type]
    load.call()
    (((a, b, pattern), _),) = kernel.calls
    assert load.shape == "M512 N512 K128, 3 blocks 64x64 a row"
    assert load.flops == 2.0 * (8 * 3 * 64 * 64) * 128 and load.peer_flops == {"cuBLAS, dense C": 2.0 * 512 * 512 * 128}
    gathered, whole = load.peers["torch.bmm of gathered blocks"](), load.peers["cuBLAS, dense C"]()
    torch.testing.assert_close(whole, a @ b.T)
    for i, column in enumerate(pattern.col_indices().tolist()):
        row = i // 3
        part = whole[row * 64 : (row + 1) * 64, column * 64 : (column + 1) * 64]
        torch.testing.assert_close(gathered[i], part, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["h100_bsr_spgemm_b128_balanced", "h100_bsr_spgemm_b128_bsr"])
@pytest.mark.usefixtures("on_cpu")
def test_workload_of_bsr_times_bsr(name: str) -> None:
    kernel = Kernel(name)
    load = measurement.spgemm_workload(kernel, size=1024, row_blocks=3)  # type: ignore[arg-type]
    load.call()
    (((a, b, pattern), _),) = kernel.calls
    stored = [dense(matrix)[::128, ::128] != 0 for matrix in (a, b)]
    met = stored[0].double() @ stored[1].double()
    if pattern is not None:
        met *= measurement.blocks_stored(pattern)
        assert measurement.blocks_stored(pattern).sum(1).tolist() == [3.0] * 8
    assert load.flops == 2.0 * float(met.sum()) * 128**3
    assert load.peer_flops == {"torch A @ dense B": 2.0 * 24 * 128**2 * 1024, "cuBLAS, dense": 2.0 * 1024**3}
    assert load.shape.endswith("A, B and C" if pattern is not None else "a row of A and B")
    assert load.peers["cuBLAS, dense"]().shape == (1024, 1024)


@pytest.mark.usefixtures("on_cpu")
def test_workload_of_a_copy() -> None:
    kernel = Kernel("h100_tile_copy_tma")
    load = measurement.copy_workload(kernel, size=64)  # type: ignore[arg-type]
    load.call()
    (((x,), given),) = kernel.calls
    assert torch.equal(load.peers["torch copy_"](), x) and given["out"] is load.peers["torch copy_"]()
    assert load.flops == 0 and load.shape == f"64 x 64, {2 * x.nbytes / 1e6:.0f} MB read and written"


def test_repeated_blocks_are_counted() -> None:
    crow, col = torch.tensor([0, 3, 3, 4]), torch.tensor([1, 0, 1, 2])
    matrix = torch.sparse_bsr_tensor(crow, col, torch.ones(4, 2, 4), size=(6, 12), check_invariants=False)
    assert measurement.blocks_stored(matrix).tolist() == [[1, 2, 0], [0, 0, 0], [0, 0, 1]]


@pytest.mark.parametrize(
    "name",
    [
        *("h100_topk32", "h100_topk32_gqa8_b64", "h100_topk32_b64_ordered", "h100_causal", "h100_window2k"),
        "h100_prefix_lm",
        BLOCK_LISTS,
    ],
)
@pytest.mark.usefixtures("on_cpu")
def test_work_of_attention_counts_the_pairs_that_are_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, heads, length = Kernel(name), 8, 4096
    monkeypatch.setattr(measurement, "flex_call", lambda *given, **more: lambda: (given, more))
    monkeypatch.setattr(measurement, "flex_mask", lambda spec, length, indices: indices)
    load = measurement.attention_workload(kernel, heads, length)  # type: ignore[arg-type]
    load.call()
    (((q, k, v, *indices), given),) = kernel.calls
    spec = kernel.spec
    if spec.query_grouping == "given":
        ((*indices, prepared_for, how),) = indices
        assert prepared_for == length and not how
    packs = heads // spec.pack_gqa
    assert q.shape == given["out"].shape == (1, heads, length, spec.head_dim) and k.shape == v.shape
    assert k.shape[1] == packs and load.shape.startswith(f"B1 H{heads} S{length} d{spec.head_dim}, ")
    position, block = torch.arange(length), spec.pattern.fixed_block
    pairs = 0
    if block is None:
        values = spec.pattern.values_of(indices)
        seen = spec.pattern.visible(position[:, None], position[None], length, length, values)
        assert all(0 < int(value) < length for value in values.values())
        pairs = heads * int(seen.sum())
    elif spec.pattern.kind == "topk":
        assert indices[0].shape == (1, packs, length // block.q, 32)
        assert all(len(set(entry)) == 32 and max(entry) < length // block.kv for entry in indices[0][0, 0].tolist())
        pairs = heads * length * 32 * block.kv
    else:
        counts, partial, full_counts, full = indices
        rows = length // block.q
        assert counts.unique().tolist() == [1] and partial[0, 1, :, 0].tolist() == list(range(rows))
        for row in range(rows):  # only earlier blocks, none twice
            listed = full[0, 1, row, : full_counts[0, 1, row]].tolist()
            assert len(set(listed)) == len(listed) == min(row, 31) and all(0 <= entry < row for entry in listed)
        diagonal = block.q * (block.q + 1) // 2 if spec.pattern.mask == "causal" else block.q * block.kv
        pairs = heads * (rows * diagonal + sum(min(row, 31) for row in range(rows)) * block.q * block.kv)
    assert load.flops == 4.0 * spec.head_dim * pairs
    assert list(load.peers) == (["SDPA flash", "SDPA cuDNN"] if spec.pattern.kind == "causal" else ["FlexAttention"])
    assert load.peer_flops == {} and given["sink"] is None


@pytest.mark.usefixtures("on_cpu")
def test_a_sink_and_a_cap_are_the_peers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel("h100_causal")
    kernel.spec = attention_spec("causal", sink=True, softcap=30.0)
    monkeypatch.setattr(measurement, "flex_mask", lambda *given: "a mask")
    monkeypatch.setattr(measurement, "flex_call", lambda *given, **more: lambda: (given, more))
    load = measurement.attention_workload(kernel, 2, 128)  # type: ignore[arg-type]
    load.call()
    (((q, k, v), given),) = kernel.calls
    tensors, more = load.peers["FlexAttention"]()
    assert all(one is two for one, two in zip(tensors, (q, k, v, "a mask"), strict=True))
    assert given["sink"].shape == (2,) and more["sink"] is given["sink"]
    assert float(more["score_mod"](torch.tensor(1e9), 0, 0, 0, 0)) == 30.0


@pytest.mark.usefixtures("on_cpu")
def test_a_score_is_given_its_tensors_and_stands_alone() -> None:
    kernel = Kernel("h100_causal_alibi")
    load = measurement.attention_workload(kernel, 2, 128)  # type: ignore[arg-type]
    load.call()
    ((_, given),) = kernel.calls
    assert load.peers == {} and {name: each.shape for name, each in given["aux"].items()} == {"slope": (2,)}
    assert measurement.aux_of(attention_spec("causal"), {}, torch.device("cpu")) == {}


@pytest.mark.usefixtures("on_cpu")
def test_beside_lists_of_a_few_rows_a_peer_sees_every_key() -> None:
    kernel = Kernel("h100_topk16_gqa16_q1")
    load = measurement.attention_workload(kernel, 16, 512)  # type: ignore[arg-type]
    (every,) = load.peers
    assert load.peer_flops == {every: 4.0 * kernel.spec.head_dim * 16 * 512 * 512} and "every key" in every
    assert load.peers[every]().shape == (1, 16, 512, kernel.spec.head_dim)


def attention_spec(kind: str, **more: Any) -> AttentionSpec:
    spec = parse_spec({"op": "attention", "arch": "sm_90a", "head_dim": 64, "pattern": {"kind": kind}, **more})
    assert isinstance(spec, AttentionSpec)
    return spec


def test_sdpa_stands_beside_what_it_computes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (torch.randn(1, 2, 32, 64) for _ in range(3))
    used: list[Any] = []
    monkeypatch.setattr(measurement, "sdpa_kernel", lambda backend: used.append(backend) or contextlib.nullcontext())
    for kind in ("dense", "causal"):
        calls = measurement.sdpa_calls(attention_spec(kind), q, k, v)
        assert list(calls) == ["SDPA flash", "SDPA cuDNN"]
        scores = q @ k.mT * 64**-0.5
        if kind == "causal":
            scores = scores.masked_fill(torch.ones(32, 32).triu(1).bool(), -torch.inf)
        for call in calls.values():
            torch.testing.assert_close(call(), scores.softmax(-1) @ v, rtol=1e-3, atol=1e-4)
        assert used[-2:] == [measurement.SDPBackend.FLASH_ATTENTION, measurement.SDPBackend.CUDNN_ATTENTION]
    assert list(measurement.sdpa_calls(attention_spec("dense", arch="sm_89"), q, k, v)) == ["SDPA flash"]
    for other in ({"softcap": 2.0}, {"sink": True}, {"pack_gqa": 2}):
        assert measurement.sdpa_calls(attention_spec("dense", **other), q, k, v) == {}
    window = {"kind": "sliding_window", "left": 3, "right": 0}
    assert measurement.sdpa_calls(attention_spec("dense", pattern=window), q, k, v) == {}


@pytest.mark.parametrize("name", ["h100_topk32_gqa8_b64", BLOCK_LISTS, "h100_window2k", "h100_prefix_lm"])
@pytest.mark.usefixtures("on_cpu")
def test_flex_is_given_the_same_pairs(name: str) -> None:
    spec: Any = find_spec(name).spec
    heads, length = 8, 4096
    packs, block = heads // spec.pack_gqa, spec.pattern.fixed_block
    indices = () if block is None else measurement.pattern_lists(spec, packs, length)
    if spec.pattern.kind == "prefix_lm":
        indices = (torch.tensor([700, 0, 2000], dtype=torch.int32),)
    mask = measurement.flex_mask(spec, length, indices)
    position = torch.arange(length)

    def visible_to(batch: int) -> Any:
        values = {name: tensor[batch] for name, tensor in spec.pattern.values_of(indices).items()}
        return spec.pattern.visible(position[:, None], position[None], length, length, values).expand(length, length)

    if block is None:
        for batch in range(mask.shape[0]):
            assert torch.equal(mask.mask_mod(batch, 0, position[:, None], position[None]), visible_to(batch))
        assert mask.shape[0] == (len(indices[0]) if indices else 1)
        return
    size, rows = (block.q, block.kv), length // block.q
    assert size == mask.BLOCK_SIZE and mask.full_kv_indices.shape == (1, heads, rows, length // block.kv)
    for head, row in ((0, 3), (heads - 1, rows - 1)):
        full = mask.full_kv_indices[0, head, row, : mask.full_kv_num_blocks[0, head, row]].tolist()
        partial = mask.kv_indices[0, head, row, : mask.kv_num_blocks[0, head, row]].tolist()
        pack = head // spec.pack_gqa
        if len(indices) == 1:
            assert (full, partial) == (indices[0][0, pack, row].tolist(), [])
        else:
            assert (full, partial) == (indices[3][0, pack, row, : indices[2][0, pack, row]].tolist(), [row])


def test_flex_caps_logits_and_takes_a_sink(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = attention_spec("dense", softcap=2.0)
    capped = measurement.score_mod(spec)
    assert capped is not None and measurement.score_mod(attention_spec("dense")) is None
    score = torch.tensor([-9.0, 0.5, 30.0])
    torch.testing.assert_close(capped(score, 0, 0, 0, 0), 2 * torch.tanh(score / 2))
    q, k, v, sink = torch.randn(1, 4, 8, 64), torch.randn(1, 2, 8, 64), torch.randn(1, 2, 8, 64), torch.randn(4)
    logits = q @ k.repeat_interleave(2, 1).mT * 64**-0.5
    seen: list[dict[str, Any]] = []

    def flex(q: Any, k: Any, v: Any, **options: Any) -> Any:
        seen.append(options)
        return logits.softmax(-1) @ v.repeat_interleave(4 // v.shape[1], 1), logits.logsumexp(-1)

    monkeypatch.setattr(torch, "compile", lambda function, dynamic: flex)
    mask: Any = SimpleNamespace(BLOCK_SIZE=(64, 32))
    found = measurement.flex_call(q, k, v, mask, score_mod=capped, sink=sink)()
    weights = torch.cat([logits, sink[None, :, None, None].expand(1, 4, 8, 1)], -1).softmax(-1)[..., :-1]
    torch.testing.assert_close(found, weights @ v.repeat_interleave(2, 1), rtol=1e-3, atol=1e-4)
    assert seen[0]["score_mod"] is capped and seen[0]["block_mask"] is mask and seen[0]["enable_gqa"]
    assert seen[0]["kernel_options"] == {"BLOCK_M": 64, "BLOCK_N": 32}
    mask.BLOCK_SIZE = (128, 128)
    measurement.flex_call(q, q, q, mask)()
    assert seen[1]["kernel_options"] is None and not seen[1]["enable_gqa"]


def test_every_operator_has_the_workload_of_its_kernels() -> None:
    for operator in OPERATORS.values():
        assert get_type_hints(part(operator.workload))["kernel"] is part(operator.kernel)


@pytest.mark.parametrize(("mask", "diagonal"), [("causal", 64 * 65 // 2), ("bits", 64 * 65 // 2), ("none", 64 * 64)])
def test_pairs_of_block_lists(mask: str, diagonal: int) -> None:
    spec = attention_spec("dense", pattern={"kind": "block_lists", "block": {"q": 64, "kv": 64}, "mask": mask})
    counts = torch.tensor([[[0, 1, 2, 2]]])
    assert measurement.pairs_of_head(spec, 256, (counts, counts, counts, counts)) == 4 * diagonal + 5 * 64 * 64
