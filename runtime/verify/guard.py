"""Guard bands: bytes of a known pattern before and after every tensor of a kernel, checked after a call.

A write outside a tensor changes its band or another tensor's band; a read outside gets NaN, or -1 in indices.
Arguments, new results and LSEs, counters and scratch memory have bands. Other allocations of BSR products (a row-major
copy of B, packed A) and the results of ``prepare`` have none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from codegen.problem import COUNTER_BYTES
from runtime.driver import workspace
from runtime.prepare.prepared import PreparedBsr

BAND = 1 << 16  # bytes: a tile of 128 rows of 256 elements
OUTPUTS = ("out", "out_scales")  # arguments that a call writes
POISON = 0xFF  # NaN in fp16, bf16 and fp32, -1 in integers

# Allocators (runtime.driver.allocate) and their devices.
_MAKERS = {"_empty_strided_cuda": "cuda", "_empty_strided_cpu": "cpu"}
_torch_makers: Any = torch._C._dynamo.guards


@dataclass(frozen=True)
class _Held:
    """A tensor between its bands.

    Attributes:
        name: name for messages.
        buffer: uint8, the bands with the tensor's bytes between them.
        original: bytes of the input that it copies; None for an output.
        is_zero: whether it must be all zeros after a call.
    """

    name: str
    buffer: torch.Tensor
    original: torch.Tensor | None = None
    is_zero: bool = False

    @property
    def inside(self) -> torch.Tensor:
        """Its bytes without the bands."""
        return self.buffer[BAND:-BAND]

    def faults(self) -> Iterator[str]:
        """Yield descriptions of a call's forbidden writes."""
        for where, band in (("before", self.buffer[:BAND].flip(0)), ("behind", self.buffer[-BAND:])):
            places = (band != POISON).nonzero()
            if places.numel():
                first = int(places[0])
                yield f"wrote {places.numel()} bytes {where} {self.name}, the nearest {first} bytes away"
        if self.original is not None and not torch.equal(self.inside, self.original):
            yield f"wrote into {self.name}"
        if self.is_zero and bool(self.inside.any()):
            yield f"left nonzero values in {self.name}"


def _span(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes from a tensor's first element to its last, including gaps between strided elements."""
    count = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((count,), (1,)).view(torch.uint8)


def _faults(held: list[_Held]) -> list[str]:
    """Descriptions of a call's faults; without faults it synchronizes only once."""
    bands = [band for each in held for band in (each.buffer[:BAND], each.buffer[-BAND:])]
    changed = [(torch.cat(bands) != POISON).any()]
    changed += [(each.inside != each.original).any() for each in held if each.original is not None]
    changed += [each.inside.any() for each in held if each.is_zero]
    return [fault for each in held for fault in each.faults()] if bool(torch.stack(changed).any()) else []


class _Call:
    """The tensors of a call with their bands."""

    def __init__(self) -> None:
        self.held: list[_Held] = []
        self._copies: dict[Any, torch.Tensor] = {}
        self._outs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def make(self, name: str, size: int, device: Any, **more: Any) -> torch.Tensor:
        """Allocate ``size`` bytes between bands."""
        buffer = torch.full((size + 2 * BAND,), POISON, dtype=torch.uint8, device=device)
        self.held.append(_Held(name, buffer, **more))
        return self.held[-1].inside

    def copy(self, name: str, tensor: torch.Tensor, *, written: bool = False) -> torch.Tensor:
        """Copy a tensor to memory between bands; ``finish`` copies outputs back."""
        if tensor.layout == torch.sparse_bsr:
            parts = (tensor.crow_indices(), tensor.col_indices(), tensor.values())
            names = ("crow_indices", "col_indices", "values")
            crow, col, values = (self.copy(f"{name}.{of}()", part) for of, part in zip(names, parts, strict=True))
            return torch.sparse_bsr_tensor(
                crow, col, values, size=tensor.shape, device=values.device, check_invariants=False
            )
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() == 0 or key in self._copies:
            return self._copies.get(key, tensor)
        source = _span(tensor)
        inside = self.make(name, source.numel(), tensor.device, original=None if written else source)
        inside.copy_(source)
        if written:
            self._outs.append((tensor, inside))
        found = self._copies[key] = inside.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
        return found

    def new(self, maker: str, shape: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
        """Allocate a new tensor of NaN between bands, instead of torch's allocator."""
        count = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        inside = self.make(f"a new tensor {tuple(shape)}", count * dtype.itemsize, _MAKERS[maker])
        return inside.view(dtype).as_strided(shape, strides)

    def counters(self, device: torch.device, stream: int, number: int) -> torch.Tensor:
        """Allocate counters, all 0, instead of the workspace's."""
        del stream
        return self.make("counters", number * COUNTER_BYTES, device, is_zero=True).zero_().view(torch.int32)

    def scratch(self, device: torch.device, size: int) -> torch.Tensor:
        """Allocate scratch memory of NaN, instead of the workspace's."""
        return self.make("scratch memory", size, device)

    def finish(self, result: Any) -> Any:
        """Copy outputs back, and return the result with the caller's tensors in it."""
        for tensor, inside in self._outs:
            _span(tensor).copy_(inside)
        if isinstance(result, tuple):
            return type(result)(*(self._callers(part) if isinstance(part, torch.Tensor) else part for part in result))
        if result.layout == torch.sparse_bsr:
            crow, col, values = result.crow_indices(), result.col_indices(), self._callers(result.values())
            return torch.sparse_bsr_tensor(
                crow, col, values, size=result.shape, device=values.device, check_invariants=False
            )
        return self._callers(result)

    def _callers(self, result: torch.Tensor) -> torch.Tensor:
        return next((tensor for tensor, inside in self._outs if inside.data_ptr() == result.data_ptr()), result)


_call: _Call | None = None  # the call that is being made
_real: dict[str, Callable[..., torch.Tensor]] = {}


def _new(maker: str, shape: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
    """Make a new tensor. Kernels keep this function, so that it also works outside a guarded call."""
    return _real[maker](shape, strides, dtype) if _call is None else _call.new(maker, shape, strides, dtype)


_NEW = {maker: partial(_new, maker) for maker in _MAKERS}


@contextmanager
def _in_place_of_torchs(call: _Call) -> Iterator[None]:
    """Make the runtime take new tensors, counters and scratch memory from a call."""
    global _call
    before = workspace.counters, workspace.scratch
    for maker in _MAKERS:
        if hasattr(_torch_makers, maker):
            _real.setdefault(maker, getattr(_torch_makers, maker))
            setattr(_torch_makers, maker, _NEW[maker])
    workspace.counters, workspace.scratch, _call = call.counters, call.scratch, call
    try:
        yield
    finally:
        (workspace.counters, workspace.scratch), _call = before, None
        for maker, real in _real.items():
            setattr(_torch_makers, maker, real)


class Guarded:
    """A kernel whose calls get copies of their arguments between guard bands. For one thread, outside captures.

    Attributes:
        faults: out-of-bounds writes and modified inputs of its calls so far.
    """

    def __init__(self, kernel: Any) -> None:
        self.spec, self.compiled = kernel.spec, kernel.compiled
        self.faults: list[str] = []
        self._kernel = kernel
        self._prepared = _Call()  # matrices of prepared operands

    def prepare(self, a: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        """Prepare a copy of a matrix between guard bands, which is kept."""
        return self._kernel.prepare(self._prepared.copy("a", a), *arguments, **named)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call the kernel and check the bands."""
        call = _Call()

        def given(name: str, value: Any) -> Any:
            if isinstance(value, dict):  # aux tensors
                return {key: given(f"{name}[{key!r}]", each) for key, each in value.items()}
            if isinstance(value, PreparedBsr) or not isinstance(value, torch.Tensor):
                return value
            return call.copy(name, value, written=name in OUTPUTS)

        # Outputs first, so that an input that is also an output, such as c of a product, maps to the same tensor.
        order = sorted(named, key=lambda name: name not in OUTPUTS)
        by_name = {name: given(name, named[name]) for name in order}
        with _in_place_of_torchs(call):
            positional = [given(f"argument {number}", value) for number, value in enumerate(arguments)]
            result = self._kernel(*positional, **by_name)
        result = call.finish(result)
        found = _faults([*call.held, *self._prepared.held])
        self.faults += [fault for fault in found if fault not in self.faults]
        return result
