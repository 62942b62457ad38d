"""Selection of key blocks: its plan, what a call checks, and an oracle that sees a wrong list."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from codegen.errors import SpecError
from codegen.library import find_spec
from codegen.planning import plan_for
from codegen.problem import SelectShape

torch = pytest.importorskip("torch")

from torch._subclasses import FakeTensorMode  # noqa: E402

from runtime import select_topk_blocks  # noqa: E402
from runtime.driver.launch import ParameterLayout  # noqa: E402
from runtime.errors import ArgumentError  # noqa: E402
from runtime.kernels import select_topk  # noqa: E402
from runtime.verify.select_topk import CASES, Case, gap, ranks, run_case, selected  # noqa: E402

SLOTS = 132
CPU = torch.device("cpu")


def kernel_of(name: str = "h100_select_topk") -> tuple[select_topk.SelectTopkKernel, dict[str, Any]]:
    """A kernel whose launches are only noted down."""
    named = find_spec(name)
    plan, seen = plan_for(named), {}

    def signature(device: Any, tiles: int, numbers: dict[str, int], tensors: Any, **more: Any) -> None:
        ParameterLayout.of(plan.params).pack(numbers)  # raises where a number is on one side only
        seen.update(numbers, tiles=tiles, **more)

    loaded = SimpleNamespace(signature=signature, slots=lambda index: SLOTS)
    return select_topk.SelectTopkKernel(SimpleNamespace(named=named, plan=plan), loaded), seen  # type: ignore[arg-type]


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select_topk, "check_tensor", lambda *arguments: None)


def checked(q: Any, k: Any, **changes: Any) -> dict[str, Any]:
    kernel, seen = kernel_of()
    asked = {"block_q": 128, "block_kv": 128, "topk": 8, "causal": True, "always_first": 0, "always_last": 0}
    kernel._check(q, k, select_topk._Selection(**{**asked, **changes}))
    return seen


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("tile.m", {"tile": {"m": 16, "n": 64}}),
        ("tile.n", {"tile": {"m": 32, "n": 48}}),
        ("stages", {"stages": 2}),
        ("mma", {"mma": "wmma"}),
    ],
)
def test_what_it_is_not_written_for_is_refused(field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=rf"^{field}: "):
        plan_for(find_spec({"op": "select_topk", "arch": "sm_90a", **changes}))


@pytest.mark.parametrize(("q_len", "heads", "warps"), [(32768, 16, 4), (32768, 32, 8), (1024, 1, 1)])
def test_thread_blocks_suffice_for_all_sms_where_that_can_be(q_len: int, heads: int, warps: int) -> None:
    args = plan_for(find_spec("h100_select_topk")).problem(
        SelectShape(1, heads, heads, q_len, q_len, 128, 128, 128), SLOTS
    )
    assert args.block is not None and args.block.threads == 32 * warps
    assert args.tiles == heads * -(-q_len // 128 // (4 * warps))


@pytest.mark.parametrize("arch", ["h100", "l4"])
def test_a_launch_has_no_more_shared_memory_than_the_plan_says(arch: str) -> None:
    plan = plan_for(find_spec(f"{arch}_select_topk"))
    for kv_len in (16, 4096, 40_000, 57_000):
        args = plan.problem(SelectShape(1, 64, 1, 65536, kv_len, 64, 16, 16), SLOTS)
        assert args.block is not None and args.block.shared_bytes <= plan.shared_bytes, kv_len


def test_a_call_knows_every_number(on_cpu: None) -> None:
    q, k = torch.empty((2, 6, 1001, 72)), torch.empty((2, 2, 777, 72))
    seen = checked(q, k, block_q=48, block_kv=80)
    assert (seen["query_blocks"], seen["key_blocks"], seen["heads_per_kv_head"]) == (21, 10, 3)
    assert seen["prologue_grid"] == 2 * 6 * 21 + 2 * 2 * 10
    shape, memory = seen["extra"]
    assert shape == (2, 6, 21, 8) and memory.scratch == 4 * 72 * seen["prologue_grid"]


@pytest.mark.parametrize(
    ("q_shape", "k_shape", "message"),
    [
        ((1, 2, 8, 12), (1, 2, 8, 12), "q: has head_dim 12, expected a multiple of 8 up to 256"),
        ((1, 2, 8, 264), (1, 2, 8, 264), "q: has head_dim 264"),
        ((1, 2, 8, 16), (1, 3, 8, 16), "k: has 3 heads, q has 2"),
        ((1, 2, 8, 16), (1, 2, 8, 24), "k: "),
        ((2, 2, 8, 16), (1, 2, 8, 16), "k: "),
        ((1, 1, 8, 16), (1, 1, 8_000_000, 16), "block: makes 62500 blocks of 8000000 keys"),
    ],
)
def test_tensors_that_do_not_fit(on_cpu: None, q_shape: Any, k_shape: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        checked(torch.empty(q_shape, device="meta"), torch.empty(k_shape, device="meta"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"block": (0, 64)}, r"block: is \(0, 64\), expected"),
        ({"block": 64}, "block: is 64"),
        ({"block": (64, 64.0)}, "block: is"),
        ({"topk": 0}, "topk: is 0, expected"),
        ({"topk": True}, "topk: is True"),
        ({"always": (32,)}, "always: has 32, expected numbers of blocks from -32 to 31"),
        ({"always": (0, -33)}, "always: has -33"),
        ({"always": 1.5}, "always: has 1.5"),
    ],
)
def test_numbers_that_are_none(arguments: dict[str, Any], message: str) -> None:
    x = torch.empty((1, 1, 128, 64))
    with pytest.raises(ArgumentError, match=message):
        kernel_of()[0](x, x, **{"block": (64, 64), "topk": 1, **arguments})


def test_blocks_from_either_end_are_bits() -> None:
    assert select_topk._always((0, 2, -1)) == (5, 1)
    assert select_topk._always((31, -32)) == (-(2**31), -(2**31))


def by_definition(q: Any, k: Any, case: Case) -> Any:
    """A kernel of a few lines, in fp32."""
    return selected(ranks(q.float(), k.float(), case).float(), case.topk)


SMALL = [case for case in CASES if case.q_len * case.kv_len <= 1024 * 1024]


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_a_right_selection_passes(case: Case) -> None:
    kernel = SimpleNamespace(spec=find_spec("h100_select_topk").spec)
    outcome = run_case(lambda_kernel(kernel, lambda q, k: by_definition(q, k, case)), case, CPU)
    assert outcome.passed, outcome


def lambda_kernel(kernel: Any, call: Any) -> Any:
    """Something that is called as a kernel is, and has its spec."""

    class Called:
        spec = kernel.spec

        def __call__(self, q: Any, k: Any, *arguments: Any, **more: Any) -> Any:
            return call(q, k)

    return Called()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda lists: lists.flip(-1),
        lambda lists: lists.clamp(min=0),
        lambda lists: lists.long(),
        lambda lists: torch.where(lists == lists.amax(-1, keepdim=True), lists + 1, lists),
        lambda lists: lists.masked_fill(lists == lists.amax(-1, keepdim=True), -1),
    ],
    ids=["order", "no padding", "type", "another block", "one too few"],
)
def test_a_wrong_selection_fails(wrong: Any) -> None:
    case = Case("wrong", 512, 512, (64, 64), 5, causal=True)
    kernel = SimpleNamespace(spec=find_spec("h100_select_topk").spec)
    assert not run_case(lambda_kernel(kernel, lambda q, k: wrong(by_definition(q, k, case))), case, CPU).passed


def test_equal_products_are_taken_by_number() -> None:
    ranked = torch.tensor([[1.0, 3.0, 3.0, -math.inf, 3.0]], dtype=torch.float64)
    assert selected(ranked, 2).tolist() == [[1, 2]]
    assert selected(ranked, 6).tolist() == [[0, 1, 2, 4, -1, -1]]
    assert gap(torch.tensor([[1, 4]], dtype=torch.int32), ranked, 2) == 0.0
    assert gap(torch.tensor([[0, 1]], dtype=torch.int32), ranked, 2) == 2.0


def listed(scores: list[float], last: int, case: Case) -> list[int]:
    """The blocks of one query block, whose last query stands at key ``last``."""
    blocks = [n for n in range(len(scores)) if not case.causal or n * case.block[1] <= last]
    own = max(last, -1) // case.block[1]
    first = [n for n in blocks if n in case.always or n - own - 1 in [a for a in case.always if a < 0]]
    others = sorted((n for n in blocks if n not in first), key=lambda n: (-scores[n], n))
    found = sorted([*sorted(first), *others][: case.topk])
    return found + [-1] * (case.topk - len(found))


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    st.tuples(*[st.tuples(st.integers(0, 5), st.sampled_from([1, 2, 4]))] * 2),
    st.sampled_from([(8, 8), (4, 16), (16, 4)]),
    st.integers(1, 8),
    st.booleans(),
    st.lists(st.integers(-3, 3), max_size=3, unique=True),
    st.integers(0, 2**31 - 1),
)
def test_the_oracle_beside_plain_loops(
    counts: Any, lengths: Any, block: tuple[int, int], topk: int, causal: bool, always: list[int], seed: int
) -> None:
    q_len, kv_len = (whole * size + rest for (whole, rest), size in zip(lengths, block, strict=True))
    case = Case("drawn", q_len, kv_len, block, topk, *counts, causal=causal, always=tuple(always))
    draw = torch.Generator().manual_seed(seed)
    # Small whole numbers, and a power of 2 in each block, so that many products are equal and all are exact.
    q, k = (
        torch.randint(-1, 2, (1, heads, length, 4), generator=draw).float()
        for heads, length in zip(counts, (q_len, kv_len), strict=True)
    )
    found = selected(ranks(q, k, case), topk)
    for h, row in itertools.product(range(counts[0]), range(found.shape[2])):
        keys = k[0, h // (counts[0] // counts[1])].split(block[1])
        first = row * block[0]
        mean = q[0, h, first : first + block[0]].mean(0)
        scores = [float((mean * some.mean(0)).sum()) for some in keys]
        last = min(first + block[0], q_len) - 1 + kv_len - q_len
        assert found[0, h, row].tolist() == listed(scores, last, case)


def test_an_operator_without_values() -> None:
    """What torch.compile and torch.export see."""
    with FakeTensorMode():
        q, k = torch.empty(2, 6, 1001, 72, device="cuda"), torch.empty(2, 2, 777, 72, device="cuda")
        found = select_topk_blocks(q, k, (48, 80), 5, causal=True)
    assert (found.shape, found.dtype, found.device.type) == ((2, 6, 21, 5), torch.int32, "cuda")


def test_tensors_on_the_cpu_are_refused() -> None:
    x = torch.zeros(1, 1, 64, 64, dtype=torch.float16)
    with pytest.raises(ArgumentError, match="q: is on cpu, expected a CUDA device"):
        select_topk_blocks(x, x, (64, 64), 1, causal=True)
    with pytest.raises(ArgumentError, match="always: has 40"):
        select_topk_blocks(x, x, (64, 64), 1, causal=True, always=(40,))


def test_a_number_that_is_always_taken_may_stand_alone() -> None:
    with FakeTensorMode():
        q = torch.empty(1, 2, 256, 64, dtype=torch.float16, device="cuda")
        for always in (3, (3,), [3, -1]):
            assert select_topk_blocks(q, q, (64, 64), 2, causal=True, always=always).shape == (1, 2, 4, 2)
        for always in (None, 1.5, "3", True, {3}, object(), torch.tensor(3), 32):
            with pytest.raises(ArgumentError, match="always: has "):
                select_topk_blocks(q, q, (64, 64), 2, causal=True, always=always)
