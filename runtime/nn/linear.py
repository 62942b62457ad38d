"""BlockSparseLinear: a linear layer whose weights are stored in blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from codegen.wording import shown
from runtime.checks import check_dense, check_flag, present_device
from runtime.errors import ArgumentError
from runtime.nn.blocks import check_places, checked_block, largest_blocks, mask_indices
from runtime.ops.bsr import bsr_matmul
from runtime.ops.bsr_autograd import keep_linear, linear_with_gradients
from runtime.ops.bsr_launches import find_linear
from runtime.ops.modes import is_unwatched
from runtime.prepare.bsr_matrix import BsrMatrix, prepare_bsr
from runtime.prepare.matrix import check_layout

_PLACES = ("crow_indices", "col_indices")
_STATE = ("values", "bias", *_PLACES)
_INTEGERS = (torch.int32, torch.int64)


class BlockSparseLinear(nn.Module):  # type: ignore[misc, unused-ignore]
    """y = x W^T + bias, of whose W (out_features, in_features) some blocks are stored; the others are 0 and stay so.

    Kernels compute y^T = W x^T: the columns of x^T are the rows of x, which are read where they are, and y is the
    transpose of what is written, so that its features are not contiguous (``y.contiguous()`` copies it). The next
    ``BlockSparseLinear`` reads that without a copy, and what an activation makes of it if tokens are a multiple of 8; x
    of other strides is copied. The gradient of x takes dy by rows or by columns alike; on Hopper, with blocks of 64 and
    128 rows, so does that of W, and x likewise. Elsewhere it copies what is stored by tokens, transposed.

    Optimizers work on ``values``. Places of the blocks are buffers, saved in the state, and do not change in training.
    They keep their type and their values when the layer is cast or moved, to "meta" and back with ``to_empty`` too;
    ``reset_parameters`` then draws new weights, as FSDP does for layers of ``from_mask(..., device="meta")``.

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
        if weight.is_meta:
            remedy = "BlockSparseLinear.from_mask(mask, block, device='meta') makes such a layer of a mask"
            raise ArgumentError("weight", f"is on meta, where the places of its blocks have no values: {remedy}")
        self._away: dict[str, torch.Tensor] = {}  # what index buffers held, on the CPU, while the layer is on meta
        with torch.no_grad():
            prepared = prepare_bsr(weight.detach())
        if not prepared.values.is_floating_point():
            raise ArgumentError("weight", f"is {prepared.values.dtype}, expected a floating-point type")
        block_columns = prepared.columns // prepared.values.shape[2]
        check_places(prepared.crow_indices, prepared.col_indices, block_columns)
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
        if isinstance(bias, torch.Tensor):
            check_dense("bias", bias)
        if not isinstance(bias, torch.Tensor) or (tuple(bias.shape), bias.dtype, bias.device) != wanted:
            what = type(bias).__name__
            if isinstance(bias, torch.Tensor):
                what = f"{tuple(bias.shape)} {bias.dtype} on {bias.device}"
            raise ArgumentError("bias", f"is {what}, expected {wanted[0]} {wanted[1]} on {wanted[2]}")

    def _keep(self, prepared: BsrMatrix) -> None:
        """Keep what follows from the places of the blocks, in buffers that are not saved."""
        self._how, self._orders = prepared.how, len(prepared.order)
        order, index = (
            [f"_{name}_{i}" for i in range(len(tensors))]
            for name, tensors in (("order", prepared.order), ("index", prepared.index))
        )
        self._index_names = (*_PLACES, *order, *index)  # of all buffers that say where the blocks are
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
        if nn.parameter.is_lazy(linear.weight) or linear.weight.is_meta:
            what = "is on meta" if linear.weight.is_meta else "is not initialized"
            raise ArgumentError("linear", f"{what}, so its weight has no values; from_mask needs none")
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
            device: of the layer; by default that of the mask, within ``torch.device("meta")`` meta. A layer on meta
                needs a mask on another device.
            dtype: of the weights and the bias.

        Returns:
            A layer of block columns * cols inputs and block rows * rows outputs.

        Raises:
            ArgumentError: naming what does not fit.
        """
        rows, cols = checked_block(block, None)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ArgumentError("dtype", f"is {shown(dtype)}, expected a floating-point type")
        check_flag("bias", bias)
        target = None if device is None else present_device("device", device)
        on_meta = target.type == "meta" if target is not None else torch.get_default_device().type == "meta"
        crow, col = mask_indices(mask, None, None if on_meta else target)
        features = mask.shape[0] * rows, mask.shape[1] * cols
        values = torch.empty((col.shape[0], rows, cols), device=crow.device, dtype=dtype)
        weight = torch.sparse_bsr_tensor(crow, col, values, size=features, device=crow.device, check_invariants=False)
        layer = cls(weight, torch.empty(features[0], device=crow.device, dtype=dtype) if bias else None)
        if on_meta:
            layer.to("meta")
            return layer
        layer.reset_parameters()
        return layer

    def reset_parameters(self) -> None:
        """Draw new weights and a new bias, as ``from_mask`` does; the places of the blocks stay."""
        inputs = max(1, self.values.shape[0]) * self.block[1] / max(1, self.out_features // self.block[0])
        with torch.no_grad():
            for parameter in (self.values, self.bias):
                if parameter is not None:
                    parameter.uniform_(-(inputs**-0.5), inputs**-0.5)

    @property
    def weight(self) -> BsrMatrix:
        """W, as ``bsr_matmul`` takes it; ``weight.to_sparse()`` is it as torch has it."""
        # DDP writes the same numbers into buffers before each forward pass. Autograd compares versions, not numbers,
        # and would refuse the backward pass of the one before; .data has a version of its own. torch.compile and export
        # take .data for a constant.
        places = [getattr(self, name) for name in self._index_names]
        if not torch.compiler.is_compiling():
            places = [tensor.data for tensor in places]
        crow, col, *rest = places
        order, index = tuple(rest[: self._orders]), tuple(rest[self._orders :])
        return BsrMatrix(self.values, crow, col, self.in_features, order, index, self._how)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T + bias.

        Args:
            x: (..., in_features), the weights' type (under ``torch.autocast`` any floating-point type).

        Returns:
            (..., out_features), whose features are not contiguous.

        Raises:
            ArgumentError: as ``bsr_matmul``, and for another number of features.
        """
        place = launch = None
        if not torch.compiler.is_dynamo_compiling() and is_unwatched():
            place, launch = find_linear(self, self._index_names, x)
            if launch is not None and place is not None:
                found: torch.Tensor | None = launch(place.tensors)
                if found is not None:
                    return found
        check_dense("x", x)
        if not x.dim() or x.shape[-1] != self.in_features:
            raise ArgumentError("x", f"has shape {tuple(x.shape)}, expected (..., in_features {self.in_features})")
        y = None
        if place is not None and place.matrix is not None:
            y = linear_with_gradients(place)
        if y is None:
            columns = x.reshape(-1, self.in_features).mT
            y = bsr_matmul(self.weight, columns, bias=self.bias, arrange=True).mT
            y = y.view(*x.shape[:-1], self.out_features)
        if place is not None and launch is None:
            keep_linear(place, y)
        return y

    def extra_repr(self) -> str:
        """Return the sizes, the density and the bias, as ``repr`` of the layer has them."""
        rows, cols = self.block
        blocks = (self.out_features // rows) * (self.in_features // cols)
        density = f"{self.values.shape[0]} of {blocks} blocks of {rows} x {cols}"
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, {density}, bias={self.bias is not None}"

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Change parameters and buffers as ``nn.Module`` does, but for the places of the blocks, which only move."""
        before = {name: self.get_buffer(name) for name in self._index_names}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call, unused-ignore]
        for name, old in before.items():
            new = self.get_buffer(name)
            if new is old:
                continue
            if new.is_meta:
                if not old.is_meta:
                    self._away[name] = old.cpu()
                self._buffers[name] = torch.empty_like(old, device="meta")
            elif not old.is_meta or name in self._away:  # new has other values after to_empty, and others after type
                self._buffers[name] = self._away.pop(name, old).to(new.device)
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *arguments: Any) -> None:
        """Load a state, whose blocks may lie elsewhere if they are as many; of one that does not fit load nothing."""
        errors = arguments[-1]
        given = {name: state_dict[prefix + name] for name in _STATE if prefix + name in state_dict}
        given = {name: tensor for name, tensor in given.items() if getattr(self, name) is not None}
        for name, tensor in given.items():
            shape, own_shape = getattr(tensor, "shape", None), getattr(self, name).shape
            if isinstance(tensor, torch.Tensor) and shape is not None and shape != own_shape:
                errors.append(f"size mismatch for {prefix}{name}: {tuple(shape)}, the layer has {tuple(own_shape)}")
                return
        own = self._own_places()
        try:
            self._check_state(given, assign=bool(local_metadata.get("assign_to_params_buffers", False)))
        except ArgumentError as error:
            errors.append(f"{prefix}{error}")
            return
        with (
            torch.inference_mode(False),
            torch.no_grad(),
        ):  # what is prepared is for training too, wherever it is loaded
            before, memory = tuple(tensor.clone() for tensor in own), self.values.data_ptr()
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *arguments)
        with torch.inference_mode(False), torch.no_grad():
            try:
                self._settle(in_place=self.values.data_ptr() == memory)
            except ArgumentError as error:  # put there by a hook of this layer, after the check above
                self.crow_indices, self.col_indices = before
                errors.append(f"{prefix}{error}")

    def _check_state(self, given: dict[str, Any], *, assign: bool) -> None:
        """Check a state before anything of it is loaded.

        Args:
            given: its tensors of the layer by name, with the layer's shapes.
            assign: whether its tensors replace the layer's.

        Raises:
            ArgumentError: naming the tensor.
        """
        for name, tensor in given.items():
            _check_kind(name, tensor)
            own = getattr(self, name)
            if tensor.is_meta and not own.is_meta and (name in _PLACES or not assign):
                raise ArgumentError(name, f"is on meta and has no values, the layer is on {own.device}")
        if assign:
            self._check_assigned({name: given.get(name, getattr(self, name)) for name in _STATE})
        crow, col = (given.get(name, getattr(self, name)).detach() for name in _PLACES)
        if crow.is_meta or col.is_meta:
            return
        crow, col = crow.cpu(), col.cpu()
        check_places(crow, col, self.in_features // self.block[1])
        known = not self.crow_indices.is_meta
        if known and all(torch.equal(x, own.to(x)) for x, own in zip((crow, col), self._own_places(), strict=True)):
            return
        missing = [name for name in ("values", *_PLACES) if name not in given]
        if missing:
            raise ArgumentError(missing[0], "is missing beside other places of the blocks, which move all three")

    def _own_places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Row pointers and block columns."""
        return self.crow_indices, self.col_indices

    @staticmethod
    def _check_assigned(tensors: dict[str, Any]) -> None:
        """Check that tensors make a layer together.

        Raises:
            ArgumentError: naming one that does not fit ``values``.
        """
        values = tensors["values"]
        if not values.is_contiguous():
            raise ArgumentError("values", f"has strides {tuple(values.stride())}, expected contiguous blocks")
        for name, tensor in tensors.items():
            if tensor is not None and tensor.device != values.device:
                raise ArgumentError(name, f"is on {tensor.device}, values are on {values.device}")
            if name == "bias" and tensor is not None and tensor.dtype != values.dtype:
                raise ArgumentError(name, f"is {tensor.dtype}, values are {values.dtype}")

    def _settle(self, *, in_place: bool) -> None:
        """Prepare the places that were loaded.

        Args:
            in_place: whether values were written where they are, which autograd notices. Buffers are then written too,
                so that CUDA graphs read the new places; else they are new, as backward passes may read the old ones.

        Raises:
            ArgumentError: for places that a weight cannot have.
        """
        crow, col = self._own_places()
        if crow.is_meta:
            return  # what they are is kept beside, if it is known at all
        check_places(crow, col, self.in_features // self.block[1])
        self._away.clear()
        before = {name: self.get_buffer(name) for name in self._index_names}
        self.crow_indices, self.col_indices = (x.to(torch.int32, copy=True).contiguous() for x in (crow, col))
        parts = *self._own_places(), self.values.detach()
        size = (self.out_features, self.in_features)
        weight = torch.sparse_bsr_tensor(*parts, size=size, device=crow.device, check_invariants=False)
        self._keep(prepare_bsr(weight))
        for name, old in before.items():
            new = self.get_buffer(name)
            if in_place and (old.device, old.dtype) == (new.device, new.dtype) and not old.is_inference():
                self._buffers[name] = old.copy_(new)


def _stored(weight: torch.Tensor, block: tuple[int, int], mask: Any) -> torch.Tensor:
    """Return the blocks of a dense weight that a mask says, layout torch.sparse_bsr."""
    rows, cols = block
    crow, col = mask_indices(mask, (weight.shape[0] // rows, weight.shape[1] // cols), weight.device)
    blocks = weight.unflatten(0, (-1, rows)).unflatten(2, (-1, cols)).transpose(1, 2)
    values = blocks[mask.to(weight.device)]
    return torch.sparse_bsr_tensor(crow, col, values, size=weight.shape, device=crow.device, check_invariants=False)


def _check_kind(name: str, tensor: Any) -> None:
    """Check the type of a part of a state.

    Raises:
        ArgumentError: for what is no tensor, or of a type that this part cannot have.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(name, f"is {type(tensor).__name__}, expected a torch.Tensor")
    if name in _PLACES and tensor.dtype not in _INTEGERS:
        raise ArgumentError(name, f"is {tensor.dtype}, expected torch.int32 or torch.int64")
    if name not in _PLACES and not tensor.is_floating_point():
        raise ArgumentError(name, f"is {tensor.dtype}, expected a floating-point type")
