"""Calls of quantize kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from codegen.fp8 import V_KEYS
from codegen.problem import QuantizeShape
from codegen.spec import QuantizeSpec
from runtime.compile.compiler import Compiled
from runtime.driver.allocate import allocator, contiguous
from runtime.driver.context import entered, is_elsewhere
from runtime.driver.enqueue import enqueue
from runtime.driver.launch import LoadedKernel, Signature
from runtime.driver.workspace import Memory
from runtime.errors import ArgumentError
from runtime.kernels.arguments import (
    TORCH_DTYPES,
    call_key,
    check_addresses,
    check_memory,
    check_output,
    check_shape,
    check_sizes,
    check_strides,
    check_tensor,
    row_strides,
    used_strides,
    written,
)
from runtime.kernels.bound_call import BoundCall

MOST_THREAD_BLOCKS = 2**31 - 1
Rotary = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of the rotary embedding."""
ROTARY_NAMES = ("rotary[0]", "rotary[1]")
_ROTARY_RANK = 3  # with a batch dimension


class Quantized(NamedTuple):
    """Result of a quantize kernel: x = codes * scales.

    Attributes:
        codes: FP8, with the shape of x. With a scale for each column: V^T, (batch, heads, head_dim, keys), with keys
            padded to a multiple of 128 by zeros and in the order of ``codegen.fp8.KEY_ORDER``.
        scales: float32 (batch, heads, rows or blocks of rows), or (batch, heads, head_dim) for columns; given scales
            are returned unchanged.
        mean: float32 (batch, heads, head_dim), subtracted from each column; None if nothing was subtracted.
        product: float32 (batch, heads, length), each row times the given mean; None without a given mean.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    mean: torch.Tensor | None = None
    product: torch.Tensor | None = None


class QuantizeKernel(BoundCall[QuantizeSpec]):
    """Kernel for FP8 codes and scales of rows, of blocks of rows, or of columns.

    Attributes:
        compiled: source, plan, code and compiler log.
        spec: the spec.
    """

    _argument_names = ("x",)

    def __init__(self, compiled: Compiled, loaded: LoadedKernel) -> None:
        super().__init__(compiled, loaded)
        self._codes = TORCH_DTYPES[self.spec.codes]
        self._by_columns, self._is_given = self.spec.scales == "channel", self.spec.scales == "given"

    def __call__(
        self,
        x: torch.Tensor,
        *,
        mean: torch.Tensor | None = None,
        scales: torch.Tensor | None = None,
        rotary: Rotary | None = None,
        out: torch.Tensor | None = None,
        out_scales: torch.Tensor | None = None,
    ) -> Quantized:
        """Quantize.

        A code is x * (1 / scale), rounded to nearest even. The scale is the group's largest finite magnitude divided by
        448 (e4m3) or 57344 (e5m2), all in float32; it is 1 for a group of zeros (below 2^-100). Infinities saturate and
        NaN stays NaN; they affect other elements only if rows are rotated.

        Args:
            x: (batch, heads, length, head_dim), the spec's dtype; the last dimension contiguous, other strides any
                multiple of 16 bytes.
            mean: float32 (batch, heads, head_dim), contiguous. With ``mean: product``: the mean of K, (batch, kv_heads,
                head_dim). With ``mean: subtract``: subtracted instead of the mean of x's rows.
            scales: float32 (batch, heads, head_dim), contiguous: column scales to use instead of x's own. With
                ``scales: given``: float32 (batch or 1, heads or 1, 1), any strides; codes times scales give the values
                (for rotated rows, the values after an orthonormal rotation). The values of scales are not checked.
            rotary: cosines and sines of the rotary embedding, which is applied first: float32 (length, head_dim / 2) or
                (batch or 1, length, head_dim / 2); the last dimension contiguous, other strides any multiple of 16
                bytes, or 0.
            out: FP8 output for the codes, (batch, heads, length, head_dim), or (batch, heads, head_dim, keys) with
                column scales; the last dimension contiguous, other strides any multiple of 16 bytes.
            out_scales: float32 output for the scales, (batch, heads, rows or blocks of rows), any strides.

        Returns:
            Codes and scales.

        Raises:
            ArgumentError: naming the argument, before anything is launched.
        """
        if is_elsewhere(x):
            with entered(x.device.index):
                return self(x, mean=mean, scales=scales, rotary=rotary, out=out, out_scales=out_scales)
        cosines, sines = (None, None) if rotary is None else pair_of(rotary)
        key = call_key(x, mean, scales, cosines, sines, out, out_scales)
        signature = self._bound(key)
        if signature is None:
            signature = self._signatures.keep(key, self._check(x, mean, scales, out, out_scales, rotary=rotary))
        shapes, memory = signature.extra
        make = allocator(x.device)
        out = make(*contiguous(shapes["codes"]), self._codes) if out is None else written(out)
        if self._by_columns:
            found = Quantized(out, make(*contiguous(shapes["scales"]), torch.float32) if scales is None else scales)
        else:
            if scales is None:
                scales = (
                    make(*contiguous(shapes["scales"]), torch.float32) if out_scales is None else written(out_scales)
                )
            product = None
            if self.spec.mean == "subtract" and mean is None:
                mean = make(*contiguous(shapes["mean"]), torch.float32)
            if self.spec.mean == "product":
                product = make(*contiguous(x.shape[:3]), torch.float32)
            found = Quantized(out, scales, mean if self.spec.mean == "subtract" else None, product)
        addresses = {"x": x.data_ptr(), "codes": out.data_ptr(), "scales": found.scales.data_ptr()}
        addresses["statistic"] = addresses["scales"] if mean is None else mean.data_ptr()
        addresses["mean"] = addresses["statistic"]
        addresses["product"] = 0 if found.product is None else found.product.data_ptr()
        check_addresses({"x": addresses["x"], "out": addresses["codes"]})
        if cosines is not None and sines is not None:
            addresses["cosines"], addresses["sines"] = cosines.data_ptr(), sines.data_ptr()
            check_addresses(dict(zip(ROTARY_NAMES, (addresses["cosines"], addresses["sines"]), strict=True)))
        enqueue(self._loaded, signature, addresses, x.device, memory)
        return found

    def _check(self, x: Any, mean: Any, scales: Any, out: Any, out_scales: Any, *, rotary: Any) -> Signature:
        """Check a call of a new signature and prepare it."""
        spec = self.spec
        check_tensor("x", x, self._dtype, 4)
        batch, heads, length, head_dim = x.shape
        if head_dim != spec.head_dim:
            raise ArgumentError("x", f"has head_dim {head_dim}, this kernel takes {spec.head_dim}")
        check_strides("x", x)
        kv_heads = self._check_mean(x, mean)
        self._check_scales(x, scales)
        self._check_rotary(x, rotary)
        shapes = self._shapes(batch, heads, length)
        if out is not None:
            check_tensor("out", out, self._codes, 4, x.device)
            last = ("head_dim", "keys") if self._by_columns else ("length", "head_dim")
            check_sizes("out", out, ("batch", "heads", *last), shapes["codes"])
            check_strides("out", out)
            check_output("out", out)
        if out_scales is not None:
            if self._by_columns or self._is_given:
                whose = "column" if self._by_columns else "given"
                raise ArgumentError("out_scales", f"is given, but this kernel has {whose} scales: leave it out")
            check_tensor("out_scales", out_scales, torch.float32, 3, x.device)
            blocks = "length" if spec.scales == "row" else f"blocks of {spec.tile.m} rows"
            check_sizes("out_scales", out_scales, ("batch", "heads", blocks), shapes["scales"])
            check_output("out_scales", out_scales)
        statistic = scales if self._by_columns else mean if spec.mean == "subtract" else None
        args = self._plan.problem(QuantizeShape(batch, heads, length, kv_heads, int(statistic is not None)))
        if args.tiles > MOST_THREAD_BLOCKS:
            raise ArgumentError("x", f"has shape {tuple(x.shape)}: needs {args.tiles} thread blocks, at most 2^31 - 1")
        strides = self._strides(x, out, scales if self._is_given else out_scales, shapes)
        strides |= {} if rotary is None else _rotary_strides(rotary)
        check_memory(x=x)
        return self._signature(x.device, args, strides, extra=(shapes, Memory.of(args)))

    def _check_scales(self, x: torch.Tensor, scales: Any) -> None:
        """Check the caller's scales."""
        batch, heads, _, head_dim = x.shape
        if self._is_given:
            if scales is None:
                raise ArgumentError("scales", f"is missing: float32 (batch {batch} or 1, heads {heads} or 1, 1)")
            check_tensor("scales", scales, torch.float32, 3, x.device)
            check_shape("scales", scales.shape, [("batch", (batch, 1)), ("heads", (heads, 1)), ("rows", (1,))])
        elif scales is not None:
            if not self._by_columns:
                raise ArgumentError("scales", "is given, but this kernel computes the scales of rows: leave it out")
            _check_statistic("scales", scales, (batch, heads, head_dim), x.device)

    def _check_rotary(self, x: torch.Tensor, rotary: Any) -> None:
        """Check cosines and sines."""
        batch, _, length, head_dim = x.shape
        half = head_dim // 2
        if self.spec.rotary == "none":
            if rotary is not None:
                raise ArgumentError("rotary", "is given, but the spec has rotary: none: leave it out")
            return
        if rotary is None:
            expected = f"float32 (length {length}, {half}) or (batch {batch} or 1, length {length}, {half})"
            raise ArgumentError("rotary", f"is missing: cosines and sines, {expected}")
        for name, tensor in zip(ROTARY_NAMES, rotary, strict=True):
            whole = isinstance(tensor, torch.Tensor) and tensor.dim() == _ROTARY_RANK
            check_tensor(name, tensor, torch.float32, _ROTARY_RANK if whole else _ROTARY_RANK - 1, x.device)
            sizes = [("batch", (batch, 1)), ("length", (length,)), ("head_dim / 2", (half,))]
            check_shape(name, tensor.shape, sizes if whole else sizes[1:])
            check_strides(name, tensor)

    def _check_mean(self, x: torch.Tensor, mean: Any) -> int:
        """Check the mean; return its heads if rows are multiplied by it, else 0."""
        batch, heads, _, head_dim = x.shape
        if self.spec.mean == "none":
            if mean is not None:
                raise ArgumentError("mean", "is given, but the spec has mean: none: leave it out")
            return 0
        if self.spec.mean == "subtract":
            if mean is not None:
                _check_statistic("mean", mean, (batch, heads, head_dim), x.device)
            return 0
        if mean is None:
            raise ArgumentError("mean", f"is missing: float32 (batch {batch}, kv_heads, head_dim {head_dim})")
        _check_statistic("mean", mean, (batch, None, head_dim), x.device)
        kv_heads = int(mean.shape[1])
        if heads % kv_heads:
            raise ArgumentError("mean", f"has {kv_heads} heads, x has {heads}: not a multiple")
        return kv_heads

    def _shapes(self, batch: int, heads: int, length: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the results."""
        head_dim = self.spec.head_dim
        of_heads = (batch, heads, head_dim)
        if self._by_columns:
            return {"codes": (*of_heads, -(-length // V_KEYS) * V_KEYS), "scales": of_heads}
        rows = 1 if self.spec.scales == "row" else self.spec.tile.m
        codes = (batch, heads, length, head_dim)
        return {"codes": codes, "scales": (batch, heads, -(-length // rows)), "mean": of_heads}

    def _strides(self, x: torch.Tensor, out: Any, scales: Any, shapes: Any) -> dict[str, int]:
        """Strides of a launch. ``scales`` are the given scales or the output for scales."""
        axes: tuple[str, ...] = ("batch", "head", "row")
        found = row_strides(x=x)
        codes = contiguous(shapes["codes"])[1] if out is None else used_strides(out)
        if self._by_columns:
            axes = ("batch", "head", "column")
        else:
            of_scales = contiguous(shapes["scales"])[1] if scales is None else used_strides(scales)
            of_axes = axes[:-1] if self._is_given else axes
            found |= {f"scales_{axis}_stride": stride for axis, stride in zip(of_axes, of_scales, strict=False)}
        return found | {f"codes_{axis}_stride": stride for axis, stride in zip(axes, codes[:3], strict=True)}


def pair_of(rotary: Any) -> Rotary:
    """Unpack cosines and sines.

    Raises:
        ArgumentError: if the argument is not a pair of tensors.
    """
    is_pair = isinstance(rotary, tuple | list) and len(rotary) == len(ROTARY_NAMES)
    if not is_pair or not all(isinstance(each, torch.Tensor) for each in rotary):
        raise ArgumentError("rotary", f"is {_shown_pair(rotary)}, expected a pair of tensors (cos, sin)")
    return rotary[0], rotary[1]


def _shown_pair(rotary: Any) -> str:
    """Description of a value that is not a pair of tensors."""
    name = type(rotary).__name__
    if not isinstance(rotary, tuple | list):
        return name
    return f"a {name} of ({', '.join(type(each).__name__ for each in rotary)})"


def _rotary_strides(rotary: Rotary) -> dict[str, int]:
    """Strides of cosines and sines; the batch stride is 0 if batches share them."""
    found: dict[str, int] = {}
    for name, tensor in zip(("cosines", "sines"), rotary, strict=True):
        batch, row = (0, *used_strides(tensor)[:-1])[-2:]
        found |= {f"{name}_batch_stride": batch, f"{name}_row_stride": row}
    return found


def _check_statistic(name: str, tensor: Any, shape: tuple[int | None, ...], device: torch.device) -> None:
    """Check a float32 statistic of columns."""
    check_tensor(name, tensor, torch.float32, 3, device)
    check_sizes(name, tensor, ("batch", "heads", "head_dim"), shape)
    if not tensor.is_contiguous():
        raise ArgumentError(name, f"has strides {tensor.stride()}, expected a contiguous tensor")
