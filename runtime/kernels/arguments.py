"""Checks of call arguments. Every message names the argument, its value and the expected value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from codegen.alternatives import suggest_for
from codegen.arch import ARCHS
from codegen.dtypes import FP8
from codegen.encode_tiled import STRIDE_BYTES
from codegen.expressions.nodes import Aux
from codegen.library import NamedSpec
from codegen.wording import alternatives, shown
from runtime.checks import check_dense
from runtime.errors import ArgumentError, DeviceError

View = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides of a tensor, for a tensor map."""
TORCH_DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "fp32": torch.float32,
}
FP8_DTYPES = tuple(TORCH_DTYPES[name] for name in FP8)
ATTENTION_RANK = 4  # dimensions of q, k and v
Q_AXES = ("batch", "heads", "q_len", "head_dim")
KV_AXES = ("batch", "kv_heads", "kv_len", "head_dim")
TMA_ALIGNMENT = STRIDE_BYTES  # bytes: addresses and strides of a tensor that TMA or a 16-byte load reads
SIGNATURES_KEPT = 64  # per kernel
MAX_EXTENT = 2**30  # kernels count in 32 bits, also past the end of a dimension and in sums of two
NO_TANGENT = "has a tangent of forward-mode differentiation, which kernels do not compute: use backward, or detach it"
_functorch = torch._C._functorch.peek_interpreter_stack
_MAX_FLOAT = 3.4028234e38
_MAX_SINK = 6e29  # times log2(e); the sink of a row without keys must exceed kLeastLogit, -1e30


def has_tangent(tensor: Any) -> bool:
    """Whether a tensor has a tangent of forward-mode differentiation, which kernels do not support."""
    if forward_ad._current_level < 0 or not isinstance(tensor, torch.Tensor):
        return False
    if tensor.layout != torch.strided or tensor.is_nested:
        return False
    return tensor.is_floating_point() and forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-any-return, no-untyped-call, unused-ignore]


def is_wrapped(tensor: Any) -> bool:
    """Whether a tensor is a wrapper within a transform of torch.func."""
    return isinstance(tensor, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def call_key(*tensors: torch.Tensor | None) -> Any:
    """Build a key of everything that a call's checks examine, except addresses; None if an argument is not a dense
    tensor."""
    key: list[Any] = []
    grad = torch.is_grad_enabled()
    try:
        for t in tensors:
            key += (None,) if t is None else (type(t), t.shape, t.stride(), t.dtype, t.device, grad and t.requires_grad)
        if forward_ad._current_level >= 0:
            key += map(has_tangent, tensors)
        if _functorch() is not None:
            key += map(is_wrapped, tensors)
    except (AttributeError, RuntimeError):
        return None
    return tuple(key)


def remember(signatures: dict[Any, Any], key: Any, found: Any) -> Any:
    """Store the result of a call's checks in a small cache, and return it."""
    if len(signatures) >= SIGNATURES_KEPT:
        signatures.clear()
    signatures[key] = found
    return found


class Signatures(dict[Any, Any]):
    """Results of calls' checks, by key.

    Attributes:
        last: key and result of the last call. Comparing it with the next key costs half of a lookup, which hashes the
            key first.
    """

    last: tuple[Any, Any] = (None, None)

    def clear(self) -> None:
        """Drop all results."""
        super().clear()
        self.last = None, None

    def find(self, key: Any) -> Any:
        """Result of the checks of a call other than the last one; None for a new call."""
        found = self.get(key)
        self.last = key, found
        return found

    def keep(self, key: Any, found: Any) -> Any:
        """Store the result of a new call's checks, and return it."""
        remember(self, key, found)
        self.last = key, found
        return found


def aux_in_order(given: Mapping[str, torch.Tensor] | None, declared: tuple[Aux, ...]) -> tuple[torch.Tensor, ...]:
    """Put the aux tensors of a call in the kernel's order.

    Args:
        given: tensors by name.
        declared: tensors that the spec declares.

    Raises:
        ArgumentError: if a tensor is missing or the kernel does not have it.
    """
    given = {} if given is None else given
    try:
        found = tuple([given[aux.name] for aux in declared])
    except KeyError:
        found = ()
    if len(found) == len(given) == len(declared):
        return found
    names = [aux.name for aux in declared]
    for name in given:
        if name not in names:
            known = alternatives(name, names) if names else "; it has none"
            raise ArgumentError(f"aux[{name!r}]", f"is not a tensor of the spec's expressions{known}")
    missing = next(aux for aux in declared if aux.name not in given)
    raise ArgumentError(f"aux[{missing.name!r}]", f"is missing: {missing}")


def check_tensor(name: str, tensor: Any, dtype: torch.dtype, rank: int, device: torch.device | None = None) -> None:
    """Check one dense input: type, device, dtype, rank, emptiness, last dimension, strides.

    Raises:
        ArgumentError: for the first violation.
    """
    check_dense(name, tensor)
    if tensor.device.type != "cuda":
        raise ArgumentError(name, f"is on {tensor.device}, expected a CUDA device")
    if device is not None and tensor.device != device:
        raise ArgumentError(name, f"is on {tensor.device}, but the first argument is on {device}")
    if tensor.dtype != dtype:
        call = "quantize_attention" if rank == ATTENTION_RANK else "quantize_matrix"
        how = to_quantize(tensor.dtype, dtype, call)
        raise ArgumentError(name, f"is {tensor.dtype}, this kernel takes {dtype}{how}")
    if tensor.dim() != rank:
        raise ArgumentError(name, f"has {tensor.dim()} dimensions {tuple(tensor.shape)}, expected {rank}")
    if tensor.numel() == 0:
        raise ArgumentError(name, f"is empty: {tuple(tensor.shape)}")
    check_size(name, tensor.shape)
    refuse_gradient(name, tensor)


def check_memory(**tensors: Any) -> None:
    """Check that tensors of a call have addresses. Tensors of fake modes, transforms and tracers have none.

    Raises:
        ArgumentError: for the first tensor without an address.
    """
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
            continue
        if tensor.is_meta or tensor.numel() == 0:  # refused by the checks of devices and sizes
            continue
        try:
            address = 0 if is_wrapped(tensor) or isinstance(tensor, FakeTensor) else tensor.data_ptr()
        except RuntimeError:
            address = 0
        if address == 0:
            what = f"is a {type(tensor).__name__} without its own memory (in torch.vmap, a fake mode or a trace)"
            raise ArgumentError(name, f"{what}, which a kernel cannot read: call it outside of that")


def refuse_gradient(
    name: str, tensor: torch.Tensor, reason: str = "but this kernel has no backward; call it under torch.no_grad()"
) -> None:
    """Check that a tensor requires no gradient and has no tangent.

    Raises:
        ArgumentError: if it does, with a remedy.
    """
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(name, f"requires a gradient, {reason}")
    if has_tangent(tensor):
        raise ArgumentError(name, NO_TANGENT)


def to_quantize(given: torch.dtype, expected: torch.dtype, call: str) -> str:
    """Hint at the function that quantizes an argument for an FP8 kernel; empty if none does."""
    floats = (torch.float16, torch.bfloat16, torch.float32)
    return f": quantize it first (sparse_kernel_codegen.{call})" if expected in FP8_DTYPES and given in floats else ""


def check_size(name: str, shape: Sequence[int]) -> None:
    """Check that a kernel can index the elements of each dimension.

    Raises:
        ArgumentError: with the whole shape.
    """
    if max(shape) > MAX_EXTENT:
        raise ArgumentError(name, f"has shape {tuple(shape)}, with a dimension above 2^30 = {MAX_EXTENT}")


def check_strides(name: str, tensor: torch.Tensor) -> None:
    """Check that 16-byte loads and TMA can address a tensor.

    Raises:
        ArgumentError: naming the stride and its required divisor.
    """
    if tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
        raise ArgumentError(name, f"has stride {tensor.stride(-1)} in its last dimension, which must be contiguous")
    step = TMA_ALIGNMENT // tensor.element_size()
    for dim, (size, stride) in enumerate(zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)):
        if size > 1 and stride % step:
            raise ArgumentError(
                name,
                f"has stride {stride} in dimension {dim}; strides must be multiples of {step} elements "
                f"({TMA_ALIGNMENT} bytes): pad the rows or pass a contiguous copy",
            )


def check_extent(name: str, tensor: torch.Tensor, limit: int) -> None:
    """Check that a kernel's offsets, which have fewer bits than addresses, reach a whole tensor.

    Args:
        name: the argument.
        tensor: the tensor.
        limit: bytes that the offsets reach from the first element.

    Raises:
        ArgumentError: with the bytes from the first element to the end of the last one.
    """
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    extent = (last + 1) * tensor.element_size()
    if extent > limit:
        raise ArgumentError(
            name,
            f"extends over {extent} bytes, but this kernel reaches {limit}: pass a contiguous copy, or fewer heads",
        )


def used_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides of a tensor for a kernel that computes addresses itself; 0 for dimensions of one element.

    The strides of such dimensions are not checked, because no element depends on them. But a kernel also computes
    addresses of rows and columns beyond the last one. It reads nothing there, yet the addresses must be aligned.
    """
    return tuple(0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def row_strides(**tensors: torch.Tensor) -> dict[str, int]:
    """Used strides of attention tensors between batches, heads and rows, by kernel parameter."""
    return {
        f"{name}_{axis}_stride": stride
        for name, tensor in tensors.items()
        for axis, stride in zip(("batch", "head", "row"), used_strides(tensor)[:3], strict=True)
    }


def check_address(name: str, address: int, alignment: int = TMA_ALIGNMENT) -> None:
    """Check the alignment of a tensor's first element.

    Raises:
        ArgumentError: with the address.
    """
    if address % alignment:
        raise ArgumentError(name, f"starts at address {address:#x}, which is not a multiple of {alignment} bytes")


def check_addresses(addresses: Mapping[str, int], names: Mapping[str, str] = MappingProxyType({})) -> None:
    """Check the alignment of the first elements of tensors that TMA or 16-byte loads read.

    Args:
        addresses: addresses by parameter.
        names: argument names of parameters whose names differ.

    Raises:
        ArgumentError: with the address.
    """
    for name, address in addresses.items():
        if address % TMA_ALIGNMENT:
            check_address(names.get(name, name), address)


def check_output(name: str, tensor: torch.Tensor) -> None:
    """Check that no two elements of an output share memory.

    Raises:
        ArgumentError: if a dimension is expanded, or rows overlap.
    """
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride == 0:
            raise ArgumentError(
                name, f"is expanded in dimension {dim}: its elements share memory, so it cannot be written"
            )
    reach = 0  # offset of the last element along the dimensions with smaller strides
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            raise ArgumentError(
                name,
                f"has shape {tuple(tensor.shape)} and strides {tensor.stride()}: its elements may share memory, so it "
                "cannot be written",
            )
        reach += (size - 1) * stride


def written(tensor: torch.Tensor) -> torch.Tensor:
    """Mark a tensor that a kernel is about to write as changed, since autograd does not see the write; return it."""
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)
    return tensor


def check_overlap(name: str, tensor: torch.Tensor, output_name: str, output: torch.Tensor) -> None:
    """Check that a tensor is the output itself or is disjoint from it. Both have the same shape.

    Raises:
        ArgumentError: if they overlap otherwise, or might.
    """
    if tensor.data_ptr() == output.data_ptr() and tensor.stride() == output.stride():
        return
    size, columns = tensor.element_size(), tensor.shape[-1]
    (first, end), (output_first, output_end) = (
        (t.data_ptr(), t.data_ptr() + size * (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))))
        for t in (tensor, output)
    )
    if end <= output_first or output_end <= first:
        return
    stride = output.stride(-2)
    if tensor.stride() == output.stride() and all(step % stride == 0 for step in output.stride()[:-1]):
        offset = (output_first - first) // size % stride
        if columns <= offset <= stride - columns:  # other columns of one matrix
            return
    raise ArgumentError(name, f"overlaps {output_name}; it must be {output_name} itself or disjoint from it")


def check_shape(name: str, shape: Sequence[int], expected: Sequence[tuple[str, tuple[int, ...] | None]]) -> None:
    """Check a shape against (name of the dimension, allowed sizes or None for any) pairs.

    Raises:
        ArgumentError: with the whole shape and the expected shape.
    """
    fits = len(shape) == len(expected) and all(
        sizes is None or size in sizes for size, (_, sizes) in zip(shape, expected, strict=True)
    )
    if not fits:
        raise ArgumentError(name, f"has shape {tuple(shape)}, expected ({shape_words(expected)})")


def check_sizes(name: str, tensor: torch.Tensor, axes: Sequence[str], sizes: Sequence[int | None]) -> None:
    """Check the size of each dimension of a tensor; None allows any size.

    Raises:
        ArgumentError: with the whole shape and the expected shape.
    """
    expected = zip(axes, sizes, strict=True)
    check_shape(name, tensor.shape, [(axis, None if size is None else (size,)) for axis, size in expected])


def check_keys(q: torch.Tensor, k: torch.Tensor) -> None:
    """Check the shape of K against Q: equal batch and head dimension, and a number of heads that divides Q's.

    Raises:
        ArgumentError: naming ``k``.
    """
    check_sizes("k", k, KV_AXES, (q.shape[0], None, None, q.shape[3]))
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ArgumentError("k", f"has {k.shape[1]} heads, q has {q.shape[1]}: not a multiple")


def check_head_dim(shape: Sequence[int], head_dim: int, *, padded: bool, element: int = 2) -> None:
    """Check the head dimension of q for a kernel of head dimension ``head_dim``.

    Args:
        shape: shape of q, (batch, heads, q_len, d).
        head_dim: head dimension of the spec.
        padded: whether the kernel pads smaller heads with zeros.
        element: bytes of an element.

    Raises:
        ArgumentError: with the whole shape and the allowed values of d.
    """
    d = shape[3]
    step = TMA_ALIGNMENT // element
    if d == head_dim or (padded and d < head_dim and d % step == 0):
        return
    below = f" or a multiple of {step} below it" if padded else ""
    other = "; kernels with pad_heads: true accept smaller values" if not padded and d < head_dim else ""
    expected = f"(batch, heads, q_len, head_dim {head_dim}{below}){other}"
    raise ArgumentError("q", f"has shape {tuple(shape)}, expected {expected}")


def shape_words(expected: Sequence[tuple[str, tuple[int, ...] | None]]) -> str:
    """Description of (name of the dimension, allowed sizes or None for any) pairs."""
    return ", ".join(label if sizes is None else f"{label} {' or '.join(map(str, sizes))}" for label, sizes in expected)


def check_sink(tensor: Any, heads: int, device: torch.device) -> None:
    """Check the sink logits: a contiguous float32 tensor (heads,) on ``device``.

    Raises:
        ArgumentError: for the first violation.
    """
    if tensor is None:
        raise ArgumentError("sink", f"is missing: float32 (heads {heads},)")
    check_tensor("sink", tensor, torch.float32, 1, device)
    check_shape("sink", tensor.shape, [("heads", (heads,))])
    if heads > 1 and tensor.stride(0) != 1:
        raise ArgumentError("sink", f"has stride {tensor.stride(0)}, expected 1")


def check_sink_values(tensor: torch.Tensor | None) -> None:
    """Check that sink logits, if given, are in the range of the kernels' softmax (synchronizes).

    Raises:
        ArgumentError: with the first value out of range.
    """
    wrong = [] if tensor is None else tensor[~(tensor.abs() <= _MAX_SINK)].tolist()
    if wrong:
        raise ArgumentError("sink", f"has {wrong[0]}, expected numbers from {-_MAX_SINK:g} to {_MAX_SINK:g}")


def check_scale(scale: Any) -> float:
    """Convert the softmax scale to a float.

    Raises:
        ArgumentError: unless it is positive and, times log2(e), a finite nonzero float32.
    """
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        raise ArgumentError("scale", f"is {type(scale).__name__}, expected a number")
    if not 1e-37 <= scale <= 1e38:
        raise ArgumentError("scale", f"is {shown(scale)}, expected a number from 1e-37 to 1e38")
    return float(scale)


def check_number(name: str, value: Any) -> float:
    """Convert a number to a float.

    Raises:
        ArgumentError: unless it fits a finite float32.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ArgumentError(name, f"is {type(value).__name__}, expected a number")
    if not abs(value) <= _MAX_FLOAT:
        raise ArgumentError(name, f"is {shown(value)}, expected a finite float32")
    return float(value)


def check_device(named: NamedSpec, device: torch.device, forward_compatible: bool) -> None:
    """Check that a kernel may run on a device.

    Raises:
        DeviceError: with both architectures, and a spec for the device.
    """
    arch, have = ARCHS[named.spec.arch], torch.cuda.get_device_capability(device)
    if have == arch.compute_capability:
        return
    may_move = have > arch.compute_capability and arch.forward_compatible
    if may_move and forward_compatible:
        return
    here = f"{torch.cuda.get_device_name(device)} is sm_{have[0]}{have[1]}"
    message = f"{named.stem} is written for {arch.name}, and {here}: {suggest_for(named.spec, have)}"
    raise DeviceError(message + (", or pass forward_compatible=True to run this one through PTX" if may_move else ""))
