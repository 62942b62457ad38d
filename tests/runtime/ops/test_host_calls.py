"""How many Python functions a call enters before the driver, once calls like it were made: what it costs the host."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from scripts import imported

torch = pytest.importorskip("torch")

from runtime import (  # noqa: E402
    ArgumentError,
    block_sparse_attention,
    bsr_matmul,
    paged_attention,
    patterns,
    prepare_bsr,
)

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")
MOST = {
    "bsr_matmul, BsrMatrix": 15,
    "bsr_matmul, of a kernel's prepare": 19,
    "bsr_matmul, torch.sparse_bsr": 18,
    "bsr_matmul, transpose_a": 15,
    "bsr_matmul, bias and relu": 15,
    "bsr_matmul, c and beta": 15,
    "bsr_sddmm, BsrMatrix": 17,
    "bsr_sddmm, torch.sparse_bsr": 24,
    "BlockSparseLinear, no_grad": 28,
    "BlockSparseLinear, with gradients": 24,
    "bsr_matmul, with gradients": 18,
    "bsr_matmul, gradients": 52,
    "BlockSparseLinear, gradients": 51,
    "block_sparse_attention": 22,
    "block_sparse_attention, lists": 21,
    "block_sparse_attention, out": 25,
    "block_sparse_attention, sink and lse": 22,
    "block_sparse_attention, a score": 24,
    "block_sparse_attention, a score that reads a tensor": 25,
    "block_sparse_attention, few queries": 22,
    "block_sparse_attention, operands in FP8": 24,
    "block_sparse_attention, gradients": 68,
    "paged_attention": 26,
    "paged_attention, out and workspace": 26,
    "paged_attention, lists": 26,
}
"""Python functions that a call of benchmarks/host_calls.py enters. A lower count is to be written here; a higher one
costs each call a tenth of a microsecond for each function."""
SPARE = 2
"""A result at another address than the last one takes two functions more; those of torch differ between versions."""


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with imported("host_calls") as module:
        yield module


def test_a_call_like_an_earlier_one_enters_few_functions(script: ModuleType) -> None:
    with script.pretended():
        rows = (*script.products(), *script.attention(), *script.pages())
        found = {row.name: script.python_calls(row.call) for row in rows}
    assert found.keys() == MOST.keys()
    wrong = {name: count for name, count in found.items() if not MOST[name] - 2 * SPARE <= count <= MOST[name] + SPARE}
    assert not wrong, f"expected {MOST}"


@pytest.mark.parametrize("block", [16, 32, 64, 128])
@pytest.mark.parametrize("tokens", [8, 64, 512])
def test_the_layout_of_b_the_block_and_the_tokens_cost_no_functions(
    script: ModuleType, block: int, tokens: int
) -> None:
    """Two more for a copy of columns of B, which kernels of blocks of 16 and 32 take, and two for an address.

    The copy and the result lie where the allocator has room: the least of some calls is of those that lie as before.
    """
    rows, columns = 2048, 1024
    crow = torch.arange(rows // block + 1, dtype=torch.int32) * 3
    col = torch.arange(3, dtype=torch.int32).repeat(rows // block)
    values = torch.zeros(len(col), block, block).bfloat16()
    weight = prepare_bsr(torch.sparse_bsr_tensor(crow, col, values, size=(rows, columns), check_invariants=False))
    by_rows, by_columns = torch.zeros(columns, tokens).bfloat16(), torch.zeros(tokens, columns).bfloat16().mT
    with script.pretended(), torch.no_grad():
        found = [
            min(script.python_calls(lambda b=b: bsr_matmul(weight, b)) for _ in range(5)) for b in (by_rows, by_columns)
        ]
    assert max(found) <= MOST["bsr_matmul, BsrMatrix"] + 4 * SPARE, found


def test_one_scale_for_both_caches_costs_no_functions(script: ModuleType) -> None:
    q, cache = torch.zeros(4, 8, 128).half(), torch.zeros(64, 2, 16, 2, 128).to(torch.float8_e4m3fn)
    options = {"block_table": torch.zeros(4, 8, dtype=torch.int32), "seq_lens": torch.full((4,), 100).int()}
    first, second = torch.ones(1), torch.ones(1)

    def counted(k_scale: Any, v_scale: Any) -> Any:
        scales = {"k_scale": k_scale, "v_scale": v_scale}
        return script.python_calls(lambda: paged_attention(q, *cache.unbind(1), patterns.Causal(), **options, **scales))

    with script.pretended():
        assert counted(first, first) <= counted(first, second)


def test_the_table_has_a_row_for_each_call(script: ModuleType) -> None:
    timed = {"python_calls": 20, "us": 6.449}
    report = {
        "rows": [{"name": "a call", "function": timed, "object": {"python_calls": 36, "us": 7.0}}],
        "versions": {"python": "3.11", "torch": "2.9"},
        "processor": "a processor",
        "date": "2030-01-02",
    }
    first, *_, last = script.host_page.calls_table(report).splitlines()
    assert first.endswith("a processor; python 3.11, torch 2.9; 2030-01-02.") and "No GPU" in first
    assert last == "| a call | 20 | 36 | 6.4 | 7.0 |"
    assert script.host_page.calls_table(None) == script.host_page.UNMEASURED


def operands(**options: Any) -> list[Any]:
    return [torch.randn(2, 4, 256, 64).bfloat16().requires_grad_(options.get(name, True)) for name in "qkv"]


def score(*, learned: bool) -> patterns.Score:
    return patterns.Score("score + slope[head]", aux={"slope": torch.ones(4, requires_grad=learned)})


OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "sink": {"sink": torch.zeros(4)},
    "sink with a gradient": {"sink": torch.zeros(4, requires_grad=True)},
    "kv_lengths": {"kv_lengths": torch.tensor([100, 250], dtype=torch.int32)},
    "softcap and scale": {"softcap": 2.0, "scale": 0.5},
    "score": {"score": patterns.Score("score + slope[head]", aux={"slope": torch.ones(4)})},
    "score with a gradient": {
        "score": patterns.Score("score + slope[head]", aux={"slope": torch.ones(4).requires_grad_()})
    },
    "any order": {"deterministic": False},
    "log-sum-exp": {"return_lse": True},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_a_step_of_training_reaches_the_driver(options: str, script: ModuleType) -> None:
    """With the kernels' own checks, which refuse gradients: those are the operator's."""
    lists = torch.zeros(2, 4, 2, 2, dtype=torch.int32)
    given = OPTIONS[options]
    aux = getattr(given.get("score"), "aux", None) or {}
    leaves = [tensor for tensor in (given.get("sink"), *aux.values()) if tensor is not None and tensor.requires_grad]
    with script.pretended():
        for pattern in (patterns.Causal(), patterns.SlidingWindow(90), patterns.TopK(lists)):
            for wanted in ("qkv", "q", "k", "v"):
                tensors = operands(**{name: name in wanted for name in "qkv"})
                for _ in range(2):
                    result = block_sparse_attention(*tensors, pattern, **given)
                    out, *lse = result if given.get("return_lse") else (result,)
                    sum(each.float().sum() for each in (out, *lse)).backward()
                has = [name for name, tensor in zip("qkv", tensors, strict=True) if tensor.grad is not None]
                assert "".join(has) == wanted
    assert all(leaf.grad is not None for leaf in leaves)


def test_the_pretended_driver_leaves_kernels_their_refusal_of_gradients(script: ModuleType) -> None:
    from pretended import kernel_object

    with script.pretended():
        kernel = kernel_object("h100_causal_d64_bf16")
        with pytest.raises(ArgumentError, match=r"^q: requires a gradient, but this kernel has no backward"):
            kernel(*operands())
        with torch.no_grad():
            kernel(*operands())


def test_a_patch_that_would_outlive_the_stand_in_is_refused(script: ModuleType) -> None:
    """Undone after it, such a patch would leave the stand-in's own attribute to later tests."""
    from runtime.ops import paged_calls

    real = paged_calls._kernel
    with pytest.raises(RuntimeError, match="_kernel was replaced within"), script.pretended():
        paged_calls._kernel = lambda *kind: None  # type: ignore[assignment]
    assert paged_calls._kernel is real
