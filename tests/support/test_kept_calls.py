"""``forget`` drops all loaded kernels and what leads to them; tests on a GPU drop them by it alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripts import imported

torch = pytest.importorskip("torch")

from kept_calls import forget  # noqa: E402

from runtime import block_sparse_attention, bsr_matmul, bsr_sddmm, patterns  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")
GPU_TESTS = Path(__file__).resolve().parents[1] / "gpu"
BY_HAND = re.compile(r"\b_(loaded|kernel_of|routes|permitted|samplers)\b\.(cache_clear|clear|last = )")


def half(*shape: int, learned: bool = False) -> Any:
    return torch.randn(shape).bfloat16().requires_grad_(learned)


def lists() -> Any:
    return patterns.TopK(torch.zeros(1, 2, 2, 2, dtype=torch.int32))


def attention(pattern: Any, learned: bool = True, **options: Any) -> None:
    out = block_sparse_attention(*(half(1, 2, 256, 64, learned=learned) for _ in range(3)), pattern, **options)
    if learned:
        out.float().sum().backward()


def matrix() -> Any:
    pointers, columns = torch.tensor([0, 1, 2]), torch.tensor([0, 1])
    return torch.sparse_bsr_tensor(pointers, columns, half(2, 64, 64), (128, 128))


CALLS: dict[str, Callable[[], Any]] = {
    "attention": lambda: attention(patterns.Causal(), learned=False),
    "attention and its gradients": lambda: attention(patterns.Causal()),
    "attention over lists and its gradients": lambda: attention(lists()),
    "in any order": lambda: attention(lists(), deterministic=False),
    "bsr_matmul": lambda: bsr_matmul(matrix(), half(128, 64)),
    "bsr_sddmm": lambda: bsr_sddmm(half(128, 64), half(128, 64), matrix()),
}


@pytest.mark.parametrize("call", CALLS)
def test_the_next_call_loads_its_kernels_again(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    with imported("pretended") as script:
        make = script.kernel_object

        def counted(named: Any) -> Any:
            loaded.append(named.stem)
            return make(named)

        monkeypatch.setattr(script, "kernel_object", counted)
        with script.pretended():
            CALLS[call]()
            first = sorted(loaded)
            assert first
            CALLS[call]()
            assert sorted(loaded) == first
            forget()
            CALLS[call]()
            assert sorted(loaded) == sorted(2 * first)


def test_gpu_tests_drop_no_cache_by_hand() -> None:
    """A cache that is dropped alone may decide nothing: others keep the kernels that it had loaded."""
    found = {path.name for path in GPU_TESTS.glob("*.py") if BY_HAND.search(path.read_text(encoding="utf-8"))}
    assert not found, f"use kept_calls.forget in {found}"
