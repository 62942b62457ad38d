"""Garbage in index tensors is garbage, its proper form is proper, and a kernel that takes it otherwise is found."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from each import for_each

from codegen.library import NamedSpec, find_spec, shipped_specs
from codegen.planning import plan_for
from codegen.spec import AttentionBackwardSpec, AttentionSpec

torch = pytest.importorskip("torch")

import attention_oracle  # noqa: E402
from gpu import garbage, small_call  # noqa: E402

from runtime.kernels.arguments import TORCH_DTYPES  # noqa: E402
from runtime.kernels.attention import AttentionResult  # noqa: E402
from runtime.kernels.attention_backward import AttentionGradients  # noqa: E402
from runtime.verify.attention import Case, Inputs, oracle  # noqa: E402
from runtime.verify.bsr_sddmm import sampled  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")
INDEXED = [named for named in shipped_specs() if garbage.has_indices(named.spec)]
FORWARD = [named for named in INDEXED if not isinstance(named.spec, AttentionBackwardSpec)]
LENGTH = 300


def test_kernels_with_indices_are_those_of_lists_prefixes_and_products() -> None:
    attention = [named.spec for named in INDEXED if isinstance(named.spec, AttentionSpec)]
    kinds = {spec.pattern.kind for spec in attention if not spec.kv_lengths}
    assert kinds == {"topk", "block_lists", "prefix_lm"}
    assert {named.spec.op for named in INDEXED} == {
        "attention",
        "attention_backward",
        "bsr_spmm",
        "bsr_sddmm",
        "bsr_spgemm",
    }


@for_each("named", lambda: INDEXED, lambda named: named.stem)
def test_every_index_tensor_is_spoilt_and_row_pointers_are_not(named: NamedSpec) -> None:
    spec: Any = named.spec
    positional, _ = small_call.arguments_of(spec, "cpu")
    found = garbage.spoil(spec, positional, seed=0)
    spec = spec.forward if isinstance(spec, AttentionBackwardSpec) else spec
    if isinstance(spec, AttentionSpec):
        given = zip(found.given[3:], spec.index_tensors, strict=False)
        tensors = [tensor for tensor, what in given if not what.of_entries]
        listed = [what for what in spec.index_tensors if not what.of_entries][: len(tensors)]
        assert len(found.given) == len(found.proper)
        for tensor, what in zip(tensors, listed, strict=True):
            assert tensor.dtype == torch.int32
            if tensor.numel() > 100:
                assert tensor.min() == garbage.INT32.min and tensor.max() == garbage.INT32.max, what.name
        return
    sparse = [
        (given, proper, old)
        for given, proper, old in zip(found.given, found.proper, positional, strict=True)
        if given is not old
    ]
    assert len(sparse) == (2 if spec.op == "bsr_spgemm" and spec.output == "bsr" else 1)
    for given, proper, old in sparse:
        columns, most = given.col_indices(), old.shape[1] // old.values().shape[2]
        assert torch.equal(given.crow_indices(), old.crow_indices())
        assert int(columns.min()) < 0 and int(columns.max()) >= most and int(columns.abs().max()) <= 1 << 22
        assert int(proper.col_indices().min()) >= 0 and int(proper.col_indices().max()) < most


@for_each("named", lambda: FORWARD, lambda named: named.stem)
def test_the_type_of_a_result_is_what_the_kernel_writes(named: NamedSpec) -> None:
    spec: Any = named.spec
    assert garbage.result_type(spec) == plan_for(named).output


class Attention:
    """Stands for a kernel: the oracle, after ``spoil`` has changed the index tensors."""

    def __init__(self, name: str, spoil: Any) -> None:
        self.spec: Any = find_spec(name).spec
        self.spoil = spoil

    def __call__(self, q: Any, k: Any, v: Any, *indices: Any, out: Any) -> AttentionResult:
        taken = tuple(self.spoil(tensor, what) for tensor, what in zip(indices, self.spec.index_tensors, strict=True))
        case = Case("garbage", heads=q.shape[1], kv_heads=k.shape[1], q_len=q.shape[2], kv_len=k.shape[2])
        exact, lse, _ = oracle(self.spec, case, Inputs(q, k, v, taken, None))
        assert out.dtype == TORCH_DTYPES[self.spec.dtype]
        return AttentionResult(out.copy_(exact), lse.float())


def small_attention(name: str) -> list[Any]:
    spec: Any = find_spec(name).spec
    q, k, v = (torch.randn(1, 2, LENGTH, spec.head_dim) for _ in range(3))
    block = spec.pattern.fixed_block
    if block is None:
        return [q, k, v, torch.tensor([LENGTH], dtype=torch.int32)]
    rows, columns = -(-LENGTH // block.q), -(-LENGTH // block.kv)
    counts, lists = torch.zeros(1, 2, rows, dtype=torch.int32), torch.zeros(1, 2, rows, 32, dtype=torch.int32)
    return [q, k, v, lists] if spec.pattern.kind == "topk" else [q, k, v, counts, lists[..., :columns]]


def wrapped(tensor: Any, what: Any) -> Any:
    return tensor % 3 if what.upper == "key_blocks" else tensor.clamp(0, LENGTH)


@pytest.mark.parametrize("name", ["h100_topk32", "h100_block_lists", "h100_prefix_lm"])
def test_a_kernel_that_keeps_the_promise_passes(name: str) -> None:
    proper = Attention(name, lambda tensor, what: wrapped(tensor, what) if what.upper == "kv_len" else tensor)
    for seed in range(4):
        garbage.check(proper, garbage.spoil(proper.spec, small_attention(name), seed), {})


@pytest.mark.parametrize("name", ["h100_topk32", "h100_block_lists"])
def test_entries_that_wrap_are_found(name: str) -> None:
    wrong = Attention(name, wrapped)
    with pytest.raises(AssertionError, match="garbage changes the result"):
        garbage.check(wrong, garbage.spoil(wrong.spec, small_attention(name), 0), {})


class Gradients:
    """Stands for a gradient kernel: the definition, after ``spoil`` has changed the index tensors."""

    def __init__(self, name: str, spoil: Any) -> None:
        self.spec: Any = find_spec(name).spec
        self.spoil = spoil

    def __call__(self, q: Any, k: Any, v: Any, *indices: Any, **of_call: Any) -> AttentionGradients:
        tensors = self.spec.forward.index_tensors
        taken = tuple(self.spoil(tensor, what) for tensor, what in zip(indices, tensors, strict=True))
        seen = attention_oracle.times_seen(self.spec.pattern.model_dump_json(), taken, (*q.shape[:3], k.shape[2]))
        found = attention_oracle.gradients(q, k, v, of_call["out"], of_call["lse"], of_call["dout"], seen)
        wanted = ("dq",) if self.spec.gradients == "dq" else ("dk", "dv")
        return AttentionGradients(*(found[name] if name in wanted else None for name in ("dq", "dk", "dv")), seen)


@pytest.mark.parametrize("name", ["h100_topk_dq", "h100_topk_dkdv_bf16", "h100_lists128_causal_dkdv_bf16"])
def test_gradients_are_those_of_the_proper_lists(name: str) -> None:
    spec = find_spec(name).spec
    positional, more = small_call.arguments_of(spec, "cpu")
    found = garbage.spoil(spec, positional, 0)
    assert len(found.given) == len(found.proper) == 3 + len(spec.forward.index_tensors)  # type: ignore[union-attr]
    garbage.check(Gradients(name, lambda tensor, what: tensor), found, more)
    with pytest.raises(AssertionError, match="garbage changes a gradient"):
        garbage.check(Gradients(name, wrapped), found, more)


def test_an_order_must_be_followed() -> None:
    spec: Any = find_spec("h100_topk32_b64_ordered").spec
    positional, _ = small_call.arguments_of(spec, "cpu")
    found = garbage.spoil(spec, positional, 1)
    assert found.named is not None and bool(found.named.any()) and not bool(found.named.all())

    def kernel_that(writes: Any) -> Any:
        def call(*_: Any, out: Any) -> AttentionResult:
            out[writes.expand(out.shape[:3])] = 1.0
            return AttentionResult(out, None)

        return type("Kernel", (), {"spec": spec, "__call__": staticmethod(call)})()

    garbage.check(kernel_that(found.named), found, {})
    with pytest.raises(AssertionError, match="that is not named was written"):
        garbage.check(kernel_that(torch.ones_like(found.named)), found, {})
    with pytest.raises(AssertionError, match="that is named has no result"):
        garbage.check(kernel_that(torch.zeros_like(found.named)), found, {})


@pytest.mark.parametrize("wrong", [False, True])
def test_columns_out_of_range_are_blocks_of_zeros(wrong: bool) -> None:
    spec: Any = find_spec("l4_bsr_sddmm_b32").spec
    positional, named = small_call.arguments_of(spec, "cpu")

    def product(a: Any, b: Any, pattern: Any) -> Any:
        col, most = pattern.col_indices(), b.shape[0] // 32
        known = torch.ones_like(col, dtype=torch.bool) if wrong else (col >= 0) & (col < most)
        inside = torch.sparse_bsr_tensor(pattern.crow_indices(), col % most, pattern.values(), size=pattern.shape)
        return SimpleNamespace(values=lambda: sampled(a.double() @ b.double().T, inside, known).to(a.dtype))

    kernel = type("Kernel", (), {"spec": spec, "__call__": staticmethod(product)})()
    found = garbage.spoil(spec, positional, 0)
    if not wrong:
        garbage.check(kernel, found, named)
        return
    with pytest.raises(AssertionError, match="whose column is out of range is not zeros"):
        garbage.check(kernel, found, named)
