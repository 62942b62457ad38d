"""Scales of the operands of BSR products in FP8: what a call is given of them, checked."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from codegen.spec import BsrSddmmSpec, BsrSpmmSpec
from runtime.errors import ArgumentError
from runtime.kernels.arguments import TMA_ALIGNMENT, View, check_address, check_shape, check_tensor

SCALE_DEPTH = 128  # of K: elements of a row of A or a column of B that share a scale of their own
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
    """Whether calls of a kernel take scales."""
    return spec.is_fp8


def by_block(spec: BsrSpmmSpec | BsrSddmmSpec) -> bool:
    """Whether each stored block of A, and each column of B, has its own scales."""
    return spec.scales == "block"


def by_row(spec: BsrSpmmSpec | BsrSddmmSpec) -> bool:
    """Whether each row of both operands has its own scale."""
    return spec.scales == "row"


def check_scales(
    spec: BsrSpmmSpec | BsrSddmmSpec, stem: str, scales: Scales, sizes: tuple[int, int, int], device: torch.device
) -> None:
    """Check the scales of a call.

    Args:
        spec: of the kernel.
        stem: its name.
        scales: what the call was given.
        sizes: stored blocks of A, or its rows where they have scales; those of C's columns; K.
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
        outer = "N" if name == "scale_b" else "M"
        if not by_block(spec) and not by_row(spec):
            _check_of_tensor(name, scale, device)
        elif by_block(spec) and name == "scale_a":
            _check_of_stored_blocks(name, scale, sizes[0], device)
        else:
            _check_of_depths(name, scale, (outer, sizes[1 if outer == "N" else 0], sizes[2]), device)


def check_scale_values(scales: Scales) -> None:
    """Check that all scales are positive and finite (synchronizes).

    Raises:
        ArgumentError: with the first one that is not.
    """
    for name, scale in (("scale_a", scales.a), ("scale_b", scales.b)):
        if scale is not None:
            wrong = scale[~((scale > 0) & scale.isfinite())].flatten()[:1].tolist()
            if wrong:
                raise ArgumentError(name, f"has {wrong[0]}, expected positive finite numbers")


def _mapped(spec: BsrSpmmSpec | BsrSddmmSpec, scales: Scales) -> dict[str, torch.Tensor]:
    """Return the scales that are read through tensor maps, by argument."""
    found = {"scale_a": scales.a if by_row(spec) else None, "scale_b": scales.b}
    if not by_block(spec) and not by_row(spec):
        return {}
    return {name: scale for name, scale in found.items() if scale is not None}


def scale_tensors(spec: BsrSpmmSpec | BsrSddmmSpec, scales: Scales) -> dict[str, View]:
    """Shapes and strides of the scales in their tensor maps."""
    names = {"scale_a": "a_scale", "scale_b": "b_scale"}
    return {names[name]: (tuple(scale.mT.shape), scale.mT.stride()) for name, scale in _mapped(spec, scales).items()}


def scale_strides(scales: Scales) -> dict[str, int]:
    """Elements from the scales of 128 elements of K to those of the next, for kernels with that parameter."""
    found = {"a_scale_stride": scales.a, "b_scale_stride": scales.b}
    return {name: scale.stride(1) for name, scale in found.items() if scale is not None and scale.dim() == 2}


def check_scale_address(spec: BsrSpmmSpec | BsrSddmmSpec, scales: Scales) -> None:
    """Check where the scales are that are read through tensor maps.

    Raises:
        ArgumentError: with the address.
    """
    for name, scale in _mapped(spec, scales).items():
        check_address(name, scale.data_ptr())


def _expected(spec: BsrSpmmSpec | BsrSddmmSpec, name: str, sizes: tuple[int, int, int]) -> str:
    """Expected shape and type of a scale, in words."""
    first, columns, depth = sizes
    if not by_block(spec) and not by_row(spec):
        return "a float32 tensor () or (1,)"
    if by_block(spec) and name == "scale_a":
        return f"float32 (stored blocks {first},)"
    outer = f"N {columns}" if name == "scale_b" else f"M {first}"
    return f"float32 ({outer}, K / {SCALE_DEPTH} {-(-depth // SCALE_DEPTH)}), {outer[0]} contiguous"


def _check_of_tensor(name: str, scale: Any, device: torch.device) -> None:
    """Check the one scale of an operand; of one element strides do not matter."""
    is_tensor = isinstance(scale, torch.Tensor)
    if is_tensor and (scale.dim() > 1 or scale.numel() != 1):
        raise ArgumentError(name, f"has shape {tuple(scale.shape)}, expected one scale: () or (1,)")
    check_tensor(name, scale.reshape(1) if is_tensor else scale, torch.float32, 1, device)


def _check_of_stored_blocks(name: str, scale: Any, blocks: int, device: torch.device) -> None:
    """Check the scales of A's stored blocks."""
    if blocks == 0 and isinstance(scale, torch.Tensor) and (tuple(scale.shape), scale.dtype) == ((0,), torch.float32):
        return  # none is read
    check_tensor(name, scale, torch.float32, 1, device)
    check_shape(name, scale.shape, [("stored blocks", (blocks,))])
    if blocks > 1 and scale.stride(0) != 1:
        raise ArgumentError(name, f"has stride {scale.stride(0)}, expected a contiguous tensor")


def _check_of_depths(name: str, scale: Any, sizes: tuple[str, int, int], device: torch.device) -> None:
    """Check scales of 128 elements of K each, of rows of A or columns of B: how those are called, how many; K."""
    outer, lines, depth = sizes
    check_tensor(name, scale, torch.float32, 2, device)
    check_shape(name, scale.shape, [(outer, (lines,)), (f"K / {SCALE_DEPTH}", (-(-depth // SCALE_DEPTH),))])
    if (lines > 1 and scale.stride(0) != 1) or (scale.shape[1] > 1 and scale.stride(1) % STEP):
        raise ArgumentError(
            name,
            f"has strides {scale.stride()}; those of neighbors along {outer} lie side by side, and those of the next "
            f"{SCALE_DEPTH} of K begin at a multiple of {STEP}: pass scale.mT.contiguous().mT, of {outer} padded so",
        )
