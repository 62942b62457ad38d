"""Layouts, plans and what is kept between calls: whatever they are given, and whatever mode the first call is in."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from runtime.distributed import (  # noqa: E402
    Layout,
    SendPlan,
    agreement,
    context_parallel_attention,
    keys_received,
    local_lists,
    plan_sends,
    shared_keys,
)
from runtime.distributed.agreement import MOST_AGREED, State, state_of  # noqa: E402
from runtime.distributed.lists import blocks_of  # noqa: E402
from runtime.distributed.placements import Placed  # noqa: E402
from runtime.distributed.strided import strided_lists  # noqa: E402
from runtime.errors import ArgumentError  # noqa: E402
from runtime.kept import made_once  # noqa: E402
from runtime.patterns import Dense, Strided, TopK  # noqa: E402

ODD: tuple[Any, ...] = (None, "x", -1, 1.5, True, 10**30, float("nan"), (), [None], {}, object(), torch.zeros(2))


def outcomes(call: Any, *, may_pass: bool = False) -> None:
    """Hold a call to a result or an ArgumentError."""
    try:
        call()
    except ArgumentError:
        return
    assert may_pass


def test_layouts_refuse_what_they_cannot_take_by_name() -> None:
    layout, part = Layout.zigzag(2), torch.zeros(1, 1, 8, 2)
    plan = SendPlan(((0, 1), (1, 0)), ((0, 1), (1, 0)), block=8, pairs=1, blocks=2)
    for odd in ODD:
        for call in (
            lambda o=odd: Layout(o),
            lambda o=odd: Layout((o,)),
            lambda o=odd: Layout(((o,), (0,))),
            lambda o=odd: Layout.contiguous(o),
            lambda o=odd: Layout.zigzag(o),
            lambda o=odd: Layout.balanced([1.0, 2.0], o),
            lambda o=odd: layout.spans(o, 8),
            lambda o=odd: layout.chunk_size(o),
            lambda o=odd: layout.positions(0, o),
            lambda o=odd: layout.shard(o, 0),
            lambda o=odd: layout.shard(part, o),
            lambda o=odd: layout.shard(part, 0, o),
            lambda o=odd: layout.join(o),
            lambda o=odd: layout.join([part, o]),
            lambda o=odd: layout.join([part, part], o),
            lambda o=odd: plan.traffic(o, 8),
            lambda o=odd: plan.traffic(0, o),
            lambda o=odd: keys_received(o, layout, 0, 8, 8),
            lambda o=odd: keys_received(Dense(), o, 0, 8, 8),
            lambda o=odd: keys_received(Dense(), layout, o, 8, 8),
            lambda o=odd: keys_received(Dense(), layout, 0, 8, o),
            lambda o=odd: local_lists(o, layout, 0),
            lambda o=odd: local_lists(Dense(), o, 0),
            lambda o=odd: local_lists(Dense(), layout, o),
            lambda o=odd: context_parallel_attention(part, part, part, Dense(), o),
            lambda o=odd: plan_sends(part, part, Dense(), o),
            lambda o=odd: shared_keys(part, o),
        ):
            outcomes(call, may_pass=odd is ODD[2] or odd is True)  # -1: the last dimension; True: the chunk 1
        outcomes(lambda o=odd: Layout.balanced(o, 2), may_pass=isinstance(odd, torch.Tensor))


@pytest.fixture
def group() -> Any:
    """Return a group of which this process is the only rank."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield dist.new_group([0])
    dist.destroy_process_group()


def test_what_is_kept_of_a_group_is_bounded_and_goes_with_it(group: Any) -> None:
    state = state_of(group)
    for number in range(3 * MOST_AGREED):
        state.remember((number,))
    assert len(state.agreed) == MOST_AGREED and (3 * MOST_AGREED - 1,) in state.agreed and (0,) not in state.agreed
    for _ in range(50):  # rounds leave no keys
        agreement.agree(group, "rounds", {"number": 1})
    assert len(state.written) == 2
    memory = torch.zeros(3)
    state.memory["keys"] = SimpleNamespace(here=memory)
    gone = weakref.ref(memory)
    del memory, state
    dist.destroy_process_group(group)
    with pytest.raises(ArgumentError, match="mesh_or_group: was the group"):
        plan_sends(*[torch.zeros(1, 1, 8, 8)] * 2, Dense(), group)
    state_of(dist.group.WORLD)
    gc.collect()
    assert gone() is None, "a group that is destroyed, be it held, keeps no memory"


def test_a_state_is_one_of_a_group() -> None:
    first, second = State(None), State(None)
    first.go_on()
    first.attempts = 2
    assert first.round != second.round and first.round.endswith("1.2")


@pytest.mark.parametrize("mode", ["inference", "meta", "fake"])
def test_what_is_made_once_is_not_of_the_first_mode(mode: str) -> None:
    size, stride = 64, {"inference": 3, "meta": 4, "fake": 5}[mode]
    layout, cpu = Layout.zigzag(2), torch.device("cpu")
    pattern, length = Strided(stride=stride, local=1, block=size), 8 * stride * size  # which no other test has
    contexts = {"inference": torch.inference_mode, "meta": lambda: torch.device("meta"), "fake": FakeTensorMode}
    with contexts[mode]():
        strided_lists(pattern, layout, 0, (length, length), cpu)
        blocks_of(layout, 0, length, size, cpu)
        assert layout.positions(0, length).device.type == ("meta" if mode == "meta" else "cpu")
        found = layout.join([torch.zeros(1, 1, length // 2, 1, device="cpu")] * 2)
        assert found.device == cpu
    tensors = [*strided_lists(pattern, layout, 0, (length, length), cpu).index_tensors()]
    tensors.append(blocks_of(layout, 0, length, size, cpu))
    for tensor in tensors:
        assert tensor is not None
        assert type(tensor) is torch.Tensor and tensor.device == cpu and not tensor.is_inference()
        torch.ones(1, requires_grad=True).mul(tensor.float()).sum().backward()
    assert blocks_of(layout, 0, length, size, cpu) is tensors[-1], "it is kept"
    assert torch.equal(layout.join([layout.positions(r, length)[None] for r in range(2)], 1)[0], torch.arange(length))


def test_what_is_made_once_is_of_no_transform_and_bounded() -> None:
    made: list[int] = []

    @made_once(2)
    def counted(number: int, device: torch.device) -> torch.Tensor:
        made.append(number)
        return torch.arange(number, device=device)

    cpu, inside = torch.device("cpu"), []
    torch.func.grad(lambda x: (inside.append(counted(1, cpu)), x.sum())[1])(torch.ones(2))
    first = counted(1, cpu)
    assert inside[0] is not first and made == [1, 1], "what a transform makes is its own"
    assert not torch._C._functorch.is_functorch_wrapped_tensor(first)
    assert counted(1, cpu) is first and counted(2, cpu) is counted(2, cpu) and made == [1, 1, 2]
    counted(3, cpu)
    assert counted(2, cpu) is not None and made == [1, 1, 2, 3]
    assert counted(1, cpu) is not first, "the oldest one is replaced"


def test_sinks_of_all_heads_beside_dtensors_of_some() -> None:
    from torch.distributed.tensor import Replicate, Shard

    mesh = SimpleNamespace(get_local_rank=lambda dim: {0: 7, 1: 1}[dim])
    q = torch.zeros(1, 2, 8, 8)
    where = Placed((q, q, q), 2, None, mesh, (Shard(2), Shard(1)), 4)
    every = torch.arange(4.0, requires_grad=True)
    found = where.sink(every)
    assert found.tolist() == [2.0, 3.0]
    found.sum().backward()
    assert every.grad is not None and every.grad.tolist() == [0, 0, 1, 1]
    own = torch.zeros(2)
    assert where.sink(own) is own and where.sink(None) is None and where.sink("x") == "x"
    assert Placed((q, q, q), 2, None, mesh, (Shard(2), Replicate()), 2).sink(own) is own


def test_lists_of_a_rank_keep_their_numbers() -> None:
    every = TopK(torch.arange(8, dtype=torch.int32).view(1, 1, 4, 2))
    with pytest.raises(ArgumentError, match="rank: is 2, expected an integer from 0 to 1"):
        local_lists(every, Layout.zigzag(2), 2)
