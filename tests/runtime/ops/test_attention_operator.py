"""What torch sees of block_sparse_attention: one operator under compile, export, fake tensors, modes and transforms."""

from __future__ import annotations

import io
from typing import Any, ClassVar

import pytest

torch = pytest.importorskip("torch")

import attention_oracle  # noqa: E402
import oracle_kernel  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.fx.experimental.symbolic_shapes import ShapeEnv  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from runtime import ArgumentError, SpecError, block_sparse_attention, merge_attention  # noqa: E402
from runtime.ops.operators import NAMESPACE  # noqa: E402
from runtime.patterns import BlockLists, Causal, Dense, SlidingWindow, TopK  # noqa: E402

OPERATOR = torch.ops.sparse_kernel_codegen.block_sparse_attention.default
BACKWARD = torch.ops.sparse_kernel_codegen.block_sparse_attention_backward.default
OUT_OPERATOR = torch.ops.sparse_kernel_codegen.block_sparse_attention_out.default


@pytest.fixture(autouse=True)
def loaded(monkeypatch: pytest.MonkeyPatch) -> Any:
    torch._dynamo.reset()
    return oracle_kernel.install(monkeypatch)


def qkv(length: int = 256, heads: int = 2, device: str = "cpu") -> list[Any]:
    return [torch.randn(1, heads, length, 64, device=device).to(torch.bfloat16) for _ in range(3)]


def lists(length: int = 256, entries: int = 2, device: str = "cpu") -> Any:
    return torch.randint(0, length // 128, (1, 2, -(-length // 128), entries), dtype=torch.int32, device=device)


def expected(q: Any, k: Any, v: Any, pattern: Any) -> Any:
    seen = attention_oracle.times_seen(pattern.spec_json, pattern.index_tensors(), (*q.shape[:3], k.shape[2]))
    return attention_oracle.attention(q, k, v, seen)


def assert_right(result: Any, tensors: list[Any], pattern: Any) -> None:
    torch.testing.assert_close(result.float(), expected(*tensors, pattern)[0], atol=1e-2, rtol=1e-2)


class Seen(TorchDispatchMode):
    """Keeps the operators that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.append(func)
        return func(*args, **(kwargs or {}))


class Counted:
    """A backend of torch.compile that keeps its graphs, whose operators aot_eager runs."""

    def __init__(self) -> None:
        self.graphs: list[Any] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


def test_the_kernel_is_called_directly_where_nothing_else_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    from runtime.ops import attention

    monkeypatch.setattr(attention, "operator", None)
    block_sparse_attention(*qkv(), Dense())
    block_sparse_attention(torch.nn.Parameter(qkv()[0], requires_grad=False), *qkv()[1:], Dense())


def test_autograd_records_a_call_past_the_dispatcher_unless_something_watches() -> None:
    q, k, v = qkv()
    for tensor in (q, k, v):
        tensor.requires_grad_()
        plain = block_sparse_attention(q, k, v, Dense())
        with Seen() as seen:
            watched = block_sparse_attention(q, k, v, Dense())
        assert OPERATOR in seen.operators and torch.equal(plain, watched)
        names = [type(result.grad_fn).__name__ for result in (plain, watched)]
        assert names[0] == names[1] == "_AttentionBackward" and type(plain.grad_fn) is not type(watched.grad_fn)
        found = torch.autograd.grad(plain.sum(), tensor)
        with Seen() as seen:
            expected = torch.autograd.grad(block_sparse_attention(q, k, v, Dense()).sum(), tensor)
        assert torch.equal(found[0], expected[0])
        tensor.requires_grad_(False)


def test_a_backward_pass_that_is_watched_is_the_operator() -> None:
    q, k, v = qkv()
    q.requires_grad_()
    out = block_sparse_attention(q, k, v, Dense())
    with Seen() as seen:
        torch.autograd.grad(out.sum(), q)
    assert any("attention_backward" in str(name) for name in seen.operators)


def test_dispatch_modes_see_the_operator() -> None:
    tensors = qkv()
    with Seen() as seen:
        result = block_sparse_attention(*tensors, Causal())
    assert OPERATOR in seen.operators
    assert_right(result, tensors, Causal())
    with Seen() as seen:
        block_sparse_attention(*tensors, Causal(), out=torch.empty_like(tensors[0]))
    assert OUT_OPERATOR in seen.operators


def test_dispatch_modes_see_the_operator_of_the_gradients() -> None:
    tensors = [t.requires_grad_() for t in qkv()]
    with Seen() as seen:
        block_sparse_attention(*tensors, Causal()).sum().backward()
    assert [each for each in seen.operators if NAMESPACE in str(each)] == [OPERATOR, BACKWARD]
    assert all(t.grad is not None for t in tensors)


def test_function_modes_and_subclasses_see_it() -> None:
    class Tagged(torch.Tensor):
        functions: ClassVar[list[Any]] = []

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            cls.functions.append(func)
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

    q, k, v = qkv()
    block_sparse_attention(q.as_subclass(Tagged), k, v, Dense())
    assert any(NAMESPACE in str(function) for function in Tagged.functions)
    with torch.device("cpu"):  # a mode of functions
        assert_right(block_sparse_attention(q, k, v, Dense()), [q, k, v], Dense())


@pytest.mark.parametrize("lse", [False, True])
def test_fake_tensors_of_a_gpu_need_none(lse: bool, loaded: Any) -> None:
    with FakeTensorMode():
        q = torch.empty(2, 300, 4, 64, device="cuda", dtype=torch.float16).transpose(1, 2)
        k, v = (torch.empty(2, 2, 300, 64, device="cuda", dtype=torch.float16) for _ in range(2))
        pattern = TopK(torch.empty(2, 4, 3, 5, device="cuda", dtype=torch.int32))
        result = block_sparse_attention(q, k, v, pattern, return_lse=lse)
        out = result.out if lse else result  # type: ignore[attr-defined]
        assert (out.shape, out.stride(), out.dtype, out.device) == (q.shape, q.stride(), q.dtype, q.device)
        if lse:
            assert result[1].shape == (2, 4, 300) and result[1].dtype == torch.float32
        with pytest.raises(ArgumentError, match="k: is on cpu, q is on cuda:0"):
            block_sparse_attention(q, k.cpu(), v, pattern)
    assert not loaded


def test_fake_tensors_of_unknown_sizes_set_no_guards() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    def call(q: Any, k: Any, v: Any, indices: Any) -> Any:
        return block_sparse_attention(q, k, v, TopK(indices), return_lse=True)

    graph = make_fx(call, tracing_mode="symbolic")(*qkv(384), lists(384))
    assert [node.target for node in graph.graph.nodes].count(OPERATOR) == 1
    assert not [g for g in graph.shape_env.guards if "Eq" not in str(g.expr)], graph.shape_env.guards
    tensors, indices = qkv(512), lists(512)
    assert_right(graph(*tensors, indices)[0], tensors, TopK(indices))
    assert isinstance(graph.shape_env, ShapeEnv)


def test_opcheck() -> None:
    samples = [
        ((*qkv(), [], None, None, None, Dense().spec_json), {}),
        ((*qkv(), [lists()], None, None, None, TopK(lists()).spec_json), {"lse": True, "scale": 0.3}),
        ((*qkv(), [], torch.zeros(2), None, None, Causal().spec_json), {"softcap": 4.0}),
    ]
    for arguments, options in samples:
        torch.library.opcheck(OPERATOR, arguments, options)
    *inputs, spec_json = samples[1][0]
    torch.library.opcheck(OUT_OPERATOR, (*inputs, torch.empty(1, 2, 256, 64).bfloat16(), spec_json), {"lse": True})


def block_lists(length: int) -> BlockLists:
    counts = torch.randint(0, 3, (1, 2, -(-length // 128)), dtype=torch.int32)
    return BlockLists(counts, lists(length, 6), counts, lists(length, 7), mask="causal")


@pytest.mark.parametrize("inside", [False, True], ids=["pattern outside", "pattern inside"])
def test_compile_has_one_graph_whatever_the_lengths_and_lists_are(inside: bool) -> None:
    backend = Counted()

    def outer(q: Any, k: Any, v: Any, pattern: BlockLists) -> Any:
        out, lse = block_sparse_attention(q * 2, k, v, pattern, return_lse=True)
        return out + 1, lse

    def inner(q: Any, k: Any, v: Any, pattern: BlockLists) -> Any:
        made = BlockLists(*pattern.index_tensors(), mask="causal")  # type: ignore[arg-type]
        return outer(q, k, v, made)

    compiled = torch.compile(inner if inside else outer, fullgraph=True, dynamic=True, backend=backend)
    for length in (1152, 384, 640, 1100):  # at first no two sizes are equal: torch.compile would expect it of all
        tensors, pattern = qkv(length), block_lists(length)
        out, lse = compiled(*tensors, pattern)
        right, right_lse = expected(tensors[0] * 2, *tensors[1:], pattern)
        torch.testing.assert_close(out.float() - 1, right, atol=5e-2, rtol=5e-2)
        torch.testing.assert_close(lse, right_lse)
    assert len(backend.graphs) == 1
    assert OPERATOR in [node.target for node in backend.graphs[0].graph.nodes] or "block_sparse_attention" in str(
        backend.graphs[0].graph
    )


def test_compile_without_marks_takes_two_graphs_at_most() -> None:
    backend = Counted()
    compiled = torch.compile(
        lambda *tensors: block_sparse_attention(*tensors[:3], TopK(tensors[3])), backend=backend, fullgraph=True
    )
    for length, entries in ((256, 2), (384, 3), (640, 4), (512, 5)):
        tensors, indices = qkv(length), lists(length, entries)
        assert_right(compiled(*tensors, indices), tensors, TopK(indices))
    assert len(backend.graphs) <= 2


@pytest.mark.parametrize("dynamic", [None, True])
def test_compile_another_window_is_another_graph(dynamic: bool | None) -> None:
    backend = Counted()
    compiled = torch.compile(
        lambda q, k, v, left: block_sparse_attention(q, k, v, SlidingWindow(left)),
        backend=backend,
        fullgraph=True,
        dynamic=dynamic,
    )
    tensors = qkv()
    for left in (10, 100, 10):
        assert_right(compiled(*tensors, left), tensors, SlidingWindow(left))
    assert len(backend.graphs) == 2


def test_compile_writes_into_out() -> None:
    def call(q: Any, k: Any, v: Any, out: Any) -> Any:
        block_sparse_attention(q, k, v, Causal(), out=out)
        return out * 2

    tensors, out = qkv(), torch.zeros(1, 2, 256, 64).bfloat16()
    doubled = torch.compile(call, fullgraph=True, backend="aot_eager")(*tensors, out)
    assert_right(out, tensors, Causal())
    assert torch.equal(doubled, out * 2)


def test_autocast_casts_fake_tensors_of_a_gpu() -> None:
    torch.set_autocast_enabled("cuda", True)
    try:
        with FakeTensorMode():
            q = torch.empty(1, 2, 256, 64, device="cuda")
            assert block_sparse_attention(q, q.double().half(), q, Dense()).dtype == torch.get_autocast_dtype("cuda")
        compiled = torch.compile(lambda q: block_sparse_attention(q, q, q, Dense()), fullgraph=True, backend="eager")
        assert compiled(qkv()[0]).dtype == torch.bfloat16  # no GPU's: not cast
    finally:
        torch.set_autocast_enabled("cuda", False)


class Layer(torch.nn.Module):
    """A layer with lists of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("indices", lists(512))

    def forward(self, q: Any, k: Any, v: Any) -> Any:
        return block_sparse_attention(q, k, v, TopK(self.indices), return_lse=True)  # type: ignore[arg-type]


def saved(program: Any) -> Any:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


@pytest.mark.parametrize("strict", [False, True])
def test_export_is_saved_loaded_and_run(strict: bool) -> None:
    tensors = qkv(512)
    batch = torch.export.Dim("batch", min=1, max=8)
    dynamic = {name: {0: batch} for name in "qkv"}
    more = [t.expand(3, -1, -1, -1).contiguous() for t in tensors]
    program = saved(torch.export.export(Layer(), tuple(more), dynamic_shapes=dynamic, strict=strict))
    assert OPERATOR in [node.target for node in program.graph.nodes]
    pattern = TopK(program.buffers().__next__())
    for inputs in (tensors, more):
        assert_right(program.module()(*inputs)[0], inputs, pattern)


def test_export_takes_patterns_as_inputs() -> None:
    class Attention(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any, pattern: Any) -> Any:
            return block_sparse_attention(q, k, v, pattern)

    tensors, pattern = qkv(), block_lists(256)
    program = saved(torch.export.export(Attention(), (*tensors, pattern), strict=False))
    another = block_lists(256)
    assert_right(program.module()(*tensors, another), tensors, another)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("causal", "^pattern: is not JSON: "),
        ('{"kind": "sliding_window", "left": -1, "right": 0}', r"^pattern\.left: is -1; "),
        ('{"kind": "causal", "score": {"value": "score + bias"}}', r"^score\.value: is 'score \+ bias'; "),
    ],
)
def test_a_text_that_is_no_pattern_is_refused_with_values_and_without(text: str, message: str, device: str) -> None:
    tensors = [t.to(device) for t in qkv()]
    with pytest.raises(SpecError, match=message):
        OPERATOR(*tensors, [], None, None, None, text)


def test_vmap_is_refused_by_name() -> None:
    q, k, v = (t.unsqueeze(0).expand(3, -1, -1, -1, -1) for t in qkv())
    with pytest.raises(ArgumentError, match=r"q, k, v and pattern: one of them is mapped by torch\.vmap"):
        torch.vmap(lambda q, k, v: block_sparse_attention(q, k, v, Dense()))(q, k, v)
    with pytest.raises(ArgumentError, match=r"mapped by torch\.vmap"):
        torch.vmap(lambda q: OPERATOR(q, k[0], v[0], [], None, None, None, Dense().spec_json))(q)


def test_dtensors_are_refused_by_name(tmp_path: Any) -> None:
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, init_device_mesh

    if not dist.is_available():
        pytest.skip("torch has no distributed package")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        q, k, v = (DTensor.from_local(t, init_device_mesh("cpu", (1,))) for t in qkv())
        with pytest.raises(ArgumentError, match=r"is a DTensor: pass each rank's part, tensor\.to_local\(\)"):
            block_sparse_attention(q, k, v, Dense())
    finally:
        dist.destroy_process_group()


def test_compiled_calls_without_gradients_have_no_lse(loaded: Any) -> None:
    q, k, v = qkv()
    q.requires_grad_()
    with torch.no_grad():
        compiled = torch.compile(
            lambda q: block_sparse_attention(q, k, v, Dense()), fullgraph=True, backend="aot_eager"
        )
        assert_right(compiled(q), [q, k, v], Dense())
    assert [kernel.asked_lse for kernel in loaded.values()] == [[False]]


def test_merged_halves_are_the_whole() -> None:
    q, k, v = qkv()
    halves = [
        block_sparse_attention(q, k[:, :, part], v[:, :, part], Dense(), return_lse=True)
        for part in (slice(100), slice(100, None))
    ]
    out, lse = merge_attention(*halves[0], *halves[1])  # type: ignore[arg-type]
    right, right_lse = expected(q, k, v, Dense())
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), right, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(lse, right_lse)


def test_merged_sides_without_keys_have_no_weight() -> None:
    out = torch.randn(1, 1, 4, 8)
    empty, some = torch.full((1, 1, 4), -torch.inf), torch.randn(1, 1, 4)
    nothing = torch.full_like(out, torch.nan)
    for arguments in ((out, some, nothing, empty), (nothing, empty, out, some)):
        merged, lse = torch.compile(merge_attention, fullgraph=True, backend="aot_eager")(*arguments)
        assert torch.equal(merged, out) and torch.equal(lse, some)
    merged, lse = merge_attention(nothing, empty, nothing, empty)
    assert not merged.any() and torch.equal(lse, empty)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({2: torch.zeros(1, 1, 4, 9)}, r"out2: is \(1, 1, 4, 9\) torch\.float32 on cpu, out1 is \(1, 1, 4, 8\)"),
        ({3: torch.zeros(1, 1, 4).half()}, r"lse2: is \(1, 1, 4\) torch\.float16 on cpu, lse1 is"),
        ({1: torch.zeros(1, 4, 1), 3: torch.zeros(1, 4, 1)}, r"lse1: is \(1, 4, 1\) .*expected \(1, 1, 4\)"),
    ],
)
def test_what_does_not_belong_together_is_not_merged(change: dict[int, Any], message: str) -> None:
    arguments = [torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 4)] * 2
    for i, tensor in change.items():
        arguments[i] = tensor
    with pytest.raises(ArgumentError, match=message):
        merge_attention(*arguments)
