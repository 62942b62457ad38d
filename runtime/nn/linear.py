"""BlockSparseLinear: a linear layer whose weights are stored in blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from runtime.errors import ArgumentError
from runtime.nn.blocks import checked_block, largest_blocks, mask_indices
from runtime.ops.bsr import bsr_matmul
from runtime.prepare.bsr_matrix import BsrMatrix, prepare_bsr
from runtime.prepare.matrix import check_layout


class BlockSparseLinear(nn.Module):  # type: ignore[misc, unused-ignore]
    """y = x W^T + bias, of whose W (out_features, in_features) some blocks are stored; the others are 0 and stay so.

    Kernels compute y^T = W x^T: the columns of x^T are the rows of x, which are read where they are, and y is the
    transpose of what is written, so that its features are not contiguous (``y.contiguous()`` copies it). The next
    ``BlockSparseLinear`` reads that without a copy, and what an activation makes of it if tokens are a multiple of 8; x
    of other strides is copied. The gradient of x takes dy by rows or by columns alike; that of W copies x and dy,
    transposed.

    Optimisers work on ``values``. Places of the blocks are buffers, saved in the state, and do not change in training.

    Attributes:
        values: parameter (stored blocks, rows, cols): the stored blocks of W.
        bias: parameter (out_features,), or None.
        crow_indices: int32 buffer (block rows + 1,): first block of each block row of W, and one more.
        col_indices: int32 buffer (stored blocks,): block column of each block.
        in_features: columns of W.
        out_features: rows of W.
        block: rows and columns of a block.
    """

    values: nn.Parameter
    crow_indices: torch.Tensor
    col_indices: torch.Tensor

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Make a layer of a weight; see ``from_linear`` and ``from_mask`` for others.

        Args:
            weight: (out_features, in_features), layout torch.sparse_bsr, floating point. Its values are copied.
            bias: (out_features,), of the weight's type and on its device.

        Raises:
            ArgumentError: naming what does not fit.
        """
        super().__init__()
        check_layout("weight", weight)
        with torch.no_grad():
            prepared = prepare_bsr(weight.detach())
        self.out_features, self.in_features = prepared.shape
        self.block = (prepared.values.shape[1], prepared.values.shape[2])
        self._check_bias(bias, weight)
        self.values = nn.Parameter(prepared.values.clone())
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone())
        self.register_buffer("crow_indices", prepared.crow_indices.to(torch.int32, copy=True))
        self.register_buffer("col_indices", prepared.col_indices.to(torch.int32, copy=True))
        self._keep(prepared)

    def _check_bias(self, bias: Any, weight: torch.Tensor) -> None:
        """Check a bias beside the weight.

        Raises:
            ArgumentError: for another shape, type or device.
        """
        if bias is None:
            return
        wanted = ((self.out_features,), weight.dtype, weight.device)
        if not isinstance(bias, torch.Tensor) or (tuple(bias.shape), bias.dtype, bias.device) != wanted:
            what = type(bias).__name__
            if isinstance(bias, torch.Tensor):
                what = f"{tuple(bias.shape)} {bias.dtype} on {bias.device}"
            raise ArgumentError("bias", f"is {what}, expected {wanted[0]} {wanted[1]} on {wanted[2]}")

    def _keep(self, prepared: BsrMatrix) -> None:
        """Keep what follows from the places of the blocks, in buffers that are not saved."""
        self._how, self._orders = prepared.how, len(prepared.order)
        self._indices = len(prepared.index)
        for name, tensors in (("order", prepared.order), ("index", prepared.index)):
            for i, tensor in enumerate(tensors):
                self.register_buffer(f"_{name}_{i}", tensor, persistent=False)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, block: int | tuple[int, int], *, density: float | None = None, mask: Any = None
    ) -> BlockSparseLinear:
        """Make a layer of a dense one: of its blocks with the largest norms, or of those that a mask says.

        Args:
            linear: the dense layer; its weights and bias are copied.
            block: rows and columns of a block, or both in one number; they divide the features.
            density: share of the blocks that is kept, above 0 up to 1: those with the largest sums of squares (in
                float32), of ties the first. At least one block is kept.
            mask: bool (block rows, block columns), on any device: the blocks that are kept.

        Returns:
            A layer of the same features, type and device, with new parameters.

        Raises:
            ArgumentError: naming what does not fit; unless one of density and mask is given.
        """
        if not isinstance(linear, nn.Linear):
            raise ArgumentError("linear", f"is {type(linear).__name__}, expected a torch.nn.Linear")
        if (density is None) == (mask is None):
            raise ArgumentError("density", "and mask: one of them is expected")
        weight = linear.weight.detach()
        size = checked_block(block, weight.shape)
        kept = largest_blocks(weight, size, density) if density is not None else mask
        return cls(_stored(weight, size, kept), None if linear.bias is None else linear.bias.detach())

    @classmethod
    def from_mask(
        cls,
        mask: torch.Tensor,
        block: int | tuple[int, int],
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float16,
    ) -> BlockSparseLinear:
        """Make a layer with new weights where a mask says.

        They are uniform within 1 / sqrt(inputs that an output has in the mean), as those of ``torch.nn.Linear`` are
        within 1 / sqrt(in_features); so is the bias.

        Args:
            mask: bool (block rows, block columns): the blocks that W has.
            block: rows and columns of a block, or both in one number.
            bias: whether there is one.
            device: of the layer; by default that of the mask.
            dtype: of the weights and the bias.

        Returns:
            A layer of block columns * cols inputs and block rows * rows outputs.

        Raises:
            ArgumentError: naming what does not fit.
        """
        rows, cols = checked_block(block, None)
        crow, col = mask_indices(mask, None, torch.device(mask.device if device is None else device))
        blocks, features = mask.shape, (mask.shape[0] * rows, mask.shape[1] * cols)
        bound = (max(1, col.shape[0]) * cols / blocks[0]) ** -0.5
        values = torch.empty((col.shape[0], rows, cols), device=crow.device, dtype=dtype).uniform_(-bound, bound)
        weight = torch.sparse_bsr_tensor(crow, col, values, size=features, check_invariants=False)
        own = torch.empty(features[0], device=crow.device, dtype=dtype).uniform_(-bound, bound) if bias else None
        return cls(weight, own)

    @property
    def weight(self) -> BsrMatrix:
        """W, as ``bsr_matmul`` takes it; ``weight.to_sparse()`` is it as torch has it."""
        order = tuple(getattr(self, f"_order_{i}") for i in range(self._orders))
        index = tuple(getattr(self, f"_index_{i}") for i in range(self._indices))
        return BsrMatrix(self.values, self.crow_indices, self.col_indices, self.in_features, order, index, self._how)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T + bias.

        Args:
            x: (..., in_features), the weights' type (under ``torch.autocast`` any floating-point type).

        Returns:
            (..., out_features), whose features are not contiguous.

        Raises:
            ArgumentError: as ``bsr_matmul``, and for another number of features.
        """
        if x.shape[-1] != self.in_features:
            raise ArgumentError("x", f"has shape {tuple(x.shape)}, expected (..., in_features {self.in_features})")
        tokens = x.reshape(-1, self.in_features)
        y = bsr_matmul(self.weight, tokens.mT, bias=self.bias, arrange=True).mT
        return y.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Return the sizes, the density and the bias, as ``repr`` of the layer has them."""
        rows, cols = self.block
        blocks = (self.out_features // rows) * (self.in_features // cols)
        density = f"{self.values.shape[0]} of {blocks} blocks of {rows} x {cols}"
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, {density}, bias={self.bias is not None}"

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        """Load a state, whose blocks may lie elsewhere if they are as many; of one with others load nothing."""
        errors = arguments[-1]
        for name in ("values", "crow_indices", "col_indices"):
            own, given = getattr(self, name), state_dict.get(prefix + name, None)
            if given is not None and given.shape != own.shape:
                errors.append(
                    f"size mismatch for {prefix}{name}: {tuple(given.shape)}, the layer has {tuple(own.shape)}"
                )
                return
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        if self.crow_indices.is_meta:
            return  # there is nothing to prepare yet
        with torch.no_grad():
            parts = self.crow_indices, self.col_indices, self.values.detach()
            size = (self.out_features, self.in_features)
            self._keep(prepare_bsr(torch.sparse_bsr_tensor(*parts, size=size, check_invariants=False)))


def _stored(weight: torch.Tensor, block: tuple[int, int], mask: Any) -> torch.Tensor:
    """Return the blocks of a dense weight that a mask says, layout torch.sparse_bsr."""
    rows, cols = block
    crow, col = mask_indices(mask, (weight.shape[0] // rows, weight.shape[1] // cols), weight.device)
    blocks = weight.unflatten(0, (-1, rows)).unflatten(2, (-1, cols)).transpose(1, 2)
    values = blocks[mask.to(weight.device)]
    return torch.sparse_bsr_tensor(crow, col, values, size=weight.shape, check_invariants=False)
