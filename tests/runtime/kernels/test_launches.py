"""Which tensors are like those of an earlier call."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from runtime.kernels import launches  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(params=["compiled", "python"])
def kept(request: Any, monkeypatch: pytest.MonkeyPatch) -> launches.Launches:
    """No launches yet, with the check of torch and with the one in Python."""
    if request.param == "python":
        monkeypatch.setattr(launches, "_compiled_guards", None)
    return launches.Launches()


def tensor(*shape: int) -> Any:
    return torch.zeros(*shape or (3, 4))


class Subclass(torch.Tensor):
    pass


UNLIKE = {
    "another size": lambda: tensor(3, 5),
    "another rank": lambda: tensor(3, 4, 1),
    "other strides": lambda: tensor(4, 3).mT,
    "another dtype": lambda: tensor().double(),
    "another device": lambda: tensor().to("meta"),
    "a gradient": lambda: tensor().requires_grad_(),
    "a parameter": lambda: torch.nn.Parameter(tensor(), requires_grad=False),
    "a subclass": lambda: tensor().as_subclass(Subclass),
}
NO_DENSE_TENSOR = {
    "None": lambda: None,
    "a number": lambda: 3,
    "sparse": lambda: tensor().to_sparse(),
    "sparse rows": lambda: tensor().to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([tensor()]),
    "opaque": lambda: tensor().to_mkldnn(),
}


def test_only_like_tensors_have_the_launch(kept: launches.Launches) -> None:
    def launch(tensors: Any) -> None:
        return None

    other = tensor(2)
    kept.keep("key", (tensor(), other), launch)
    assert kept.find("key", (tensor(), other)) is launch and kept.find("key", (torch.ones(3, 4), tensor(2))) is launch
    assert kept.find("another key", (tensor(), other)) is None
    for name, make in UNLIKE.items():
        assert kept.find("key", (make(), other)) is None, name
        kept.keep(name, (make(), other), launch)
        assert kept.find(name, (make(), other)) is launch, name
        assert kept.find(name, (tensor(), other)) is None, name
    for name, make in NO_DENSE_TENSOR.items():
        for tensors in ((make(), other), (tensor(), make())):
            try:
                assert kept.find("key", tensors) is None, name
            except (RuntimeError, TypeError):
                continue  # as it says it does


def test_several_launches_of_a_key_are_kept_and_the_oldest_goes(kept: launches.Launches) -> None:
    makes = [
        lambda dtype=dtype: tensor().to(dtype)
        for dtype in (torch.half, torch.float, torch.double, torch.int, torch.long)
    ]
    for number, make in enumerate(makes):
        kept.keep("key", (make(),), lambda tensors, number=number: number)
    found = [kept.find("key", (make(),)) for make in makes]
    assert [None if launch is None else launch(()) for launch in found] == [None, 1, 2, 3, 4]
    kept.keep("key", (tensor(7),), None)
    checked_each_time = kept.find("key", (tensor(7),))
    assert checked_each_time is not None and checked_each_time(()) is None


def test_keys_are_bounded(kept: launches.Launches) -> None:
    for number in range(launches.KEYS_KEPT + 10):
        kept.keep(number, (tensor(),), None)
    assert kept.find(0, (tensor(),)) is None and kept.find(launches.KEYS_KEPT + 9, (tensor(),)) is not None
    assert len(kept._kept) <= launches.KEYS_KEPT
    kept.clear()
    assert kept.find(launches.KEYS_KEPT + 9, (tensor(),)) is None


def test_a_launch_keeps_no_tensor_alive(kept: launches.Launches) -> None:
    held = tensor()
    seen = weakref.ref(held)
    kept.keep("key", (held,), None)
    del held
    assert seen() is None
