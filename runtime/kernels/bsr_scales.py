"""Scales of the operands of BSR products in FP8: what a call is given of them, checked."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from codegen.dtypes import FP8
from codegen.spec import BsrSddmmSpec, BsrSpmmSpec
from runtime.errors import ArgumentError
from runtime.kernels.arguments import TMA_ALIGNMENT, check_address, check_shape, check_tensor

SCALE_DEPTH = 128  # rows of B, and columns of a block of A, that share a scale of their own
STEP = TMA_ALIGNMENT // 4  # scales that a row of them is a multiple of


class Scales(NamedTuple):
    """The scales of a call; None for kernels that have none.

    Attributes:
        a: of A.
        b: of B.
    """

    a: torch.Tensor | None
    b: torch.Tensor | None

    @property
    def addresses(self) -> dict[str, int]:
        """Return where they are, by parameter."""
        if self.a is None or self.b is None:
            return {}
        return {"a_scale": self.a.data_ptr(), "b_scale": self.b.data_ptr()}

    def of_matrix(self, i: int) -> Scales:
        """Return those of a matrix of a batch."""
        return self if self.b is None or self.b.dim() < 3 else Scales(self.a, self.b[i])


NO_SCALES = Scales(None, None)


def have_scales(spec: BsrSpmmSpec | BsrSddmmSpec) -> bool:
    """Return whether calls of a kernel take scales."""
    return spec.dtype in FP8


def by_block(spec: BsrSpmmSpec | BsrSddmmSpec) -> bool:
    """Return whether blocks have scales of their own."""
    return isinstance(spec, BsrSpmmSpec) and spec.scales == "block"


def check_scales(
    spec: BsrSpmmSpec | BsrSddmmSpec, stem: str, scales: Scales, sizes: tuple[int, int, int], device: torch.device
) -> None:
    """Check the scales of a call.

    Args:
        spec: of the kernel.
        stem: its name.
        scales: what the call was given.
        sizes: stored blocks of A, columns of B, rows of B.
        device: of the other arguments.

    Raises:
        ArgumentError: for the first thing that is wrong.
    """
    for name, scale in (("scale_a", scales.a), ("scale_b", scales.b)):
        if not have_scales(spec):
            if scale is not None:
                raise ArgumentError(name, f"is not an argument of {stem}: only kernels in FP8 have scales")
            continue
        if scale is None:
            raise ArgumentError(
                name, f"is missing: {_expected(spec, name, sizes)}; a number is its code times its scale"
            )
        if by_block(spec):
            _check_of_blocks(name, scale, sizes, device)
        else:
            _check_of_tensor(name, scale, device)


def check_scale_values(scales: Scales) -> None:
    """Check that all scales are positive and finite (synchronises).

    Raises:
        ArgumentError: with the first one that is not.
    """
    for name, scale in (("scale_a", scales.a), ("scale_b", scales.b)):
        if scale is not None:
            wrong = scale[~((scale > 0) & scale.isfinite())].flatten()[:1].tolist()
            if wrong:
                raise ArgumentError(name, f"has {wrong[0]}, expected positive finite numbers")


def scale_tensors(spec: BsrSpmmSpec, scales: Scales) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the shapes and strides in which tensor maps see the scales."""
    if scales.b is None or not by_block(spec):
        return {}
    return {"b_scale": (tuple(scales.b.mT.shape), scales.b.mT.stride())}


def check_scale_address(spec: BsrSpmmSpec, scales: Scales) -> None:
    """Check where the scales of B are that are read through a tensor map.

    Raises:
        ArgumentError: with the address.
    """
    if scales.b is not None and by_block(spec):
        check_address("scale_b", scales.b.data_ptr())


def _expected(spec: BsrSpmmSpec | BsrSddmmSpec, name: str, sizes: tuple[int, int, int]) -> str:
    """Return what a scale is expected to be, in words."""
    blocks, columns, depth = sizes
    if not by_block(spec):
        return "a float32 tensor () or (1,)"
    if name == "scale_a":
        return f"float32 (stored blocks {blocks},)"
    return f"float32 (N {columns}, K / {SCALE_DEPTH} {depth // SCALE_DEPTH}), N contiguous"


def _check_of_tensor(name: str, scale: Any, device: torch.device) -> None:
    """Check the one scale of an operand; of one element strides do not matter."""
    is_tensor = isinstance(scale, torch.Tensor)
    if is_tensor and (scale.dim() > 1 or scale.numel() != 1):
        raise ArgumentError(name, f"has shape {tuple(scale.shape)}, expected one scale: () or (1,)")
    check_tensor(name, scale.reshape(1) if is_tensor else scale, torch.float32, 1, device)


def _check_of_blocks(name: str, scale: Any, sizes: tuple[int, int, int], device: torch.device) -> None:
    """Check the scales of A's stored blocks, or of B's columns."""
    blocks, columns, depth = sizes
    if name == "scale_a":
        if (
            blocks == 0
            and isinstance(scale, torch.Tensor)
            and (tuple(scale.shape), scale.dtype) == ((0,), torch.float32)
        ):
            return  # none is read
        check_tensor(name, scale, torch.float32, 1, device)
        check_shape(name, scale.shape, [("stored blocks", (blocks,))])
        if blocks > 1 and scale.stride(0) != 1:
            raise ArgumentError(name, f"has stride {scale.stride(0)}, expected a contiguous tensor")
        return
    check_tensor(name, scale, torch.float32, 2, device)
    check_shape(name, scale.shape, [("N", (columns,)), (f"K / {SCALE_DEPTH}", (depth // SCALE_DEPTH,))])
    if (columns > 1 and scale.stride(0) != 1) or (scale.shape[1] > 1 and scale.stride(1) % STEP):
        raise ArgumentError(
            name,
            f"has strides {scale.stride()}; those of neighbouring columns of B lie side by side, and those of the next "
            f"{SCALE_DEPTH} rows begin at a multiple of {STEP}: pass scale.mT.contiguous().mT, of N padded so",
        )
