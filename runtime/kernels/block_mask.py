"""Calls of kernels that make block lists."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from codegen.problem import BlockMaskShape
from codegen.spec import BlockMaskSpec
from codegen.wording import shown
from runtime.checks import named_device
from runtime.compile.compiler import Compiled
from runtime.driver.allocate import allocator, contiguous
from runtime.driver.context import entered
from runtime.driver.enqueue import enqueue
from runtime.driver.launch import LoadedKernel, Signature
from runtime.driver.workspace import Memory
from runtime.errors import ArgumentError
from runtime.kernels.arguments import MAX_EXTENT, aux_in_order, call_key, check_memory
from runtime.kernels.aux_tensors import AuxArguments
from runtime.kernels.bound_call import BoundCall

MOST_BLOCKS = 2**30
"""Most pairs of query block and KV block in all lists: kernels count them in 32 bits."""
MOST_THREAD_BLOCKS = 2**31 - 1


class BlockMaskLists(NamedTuple):
    """Block lists in the order of attention's arguments.

    Attributes:
        kv_num_blocks: int32 (batch or 1, heads or 1, query blocks), number of partial KV blocks.
        kv_indices: int32 (..., KV blocks), ascending partial KV blocks, then -1.
        full_kv_num_blocks: as ``kv_num_blocks``, for full blocks.
        full_kv_indices: as ``kv_indices``, for full blocks.
    """

    kv_num_blocks: torch.Tensor
    kv_indices: torch.Tensor
    full_kv_num_blocks: torch.Tensor
    full_kv_indices: torch.Tensor


class BlockMaskKernel(BoundCall[BlockMaskSpec]):
    """Kernel that makes the block lists of a mask.

    Attributes:
        compiled: source, plan, code and compiler log.
        spec: the spec.
    """

    _argument_names = ("batch", "heads", "q_len", "kv_len")

    def __init__(self, compiled: Compiled, loaded: LoadedKernel) -> None:
        super().__init__(compiled, loaded)
        self._aux = AuxArguments(self.spec, compiled.plan)

    def __call__(
        self,
        batch: int,
        heads: int,
        q_len: int,
        kv_len: int,
        *,
        aux: Mapping[str, torch.Tensor] | None = None,
        device: torch.device | str | int | None = None,
    ) -> BlockMaskLists:
        """Make the lists, without waiting for the GPU.

        Args:
            batch: batch size of the attention.
            heads: query heads of the attention.
            q_len: queries of a head.
            kv_len: keys of a head.
            aux: the tensors of the mask, by name, on one CUDA device, with the spec's dtypes and sizes (...).
            device: the device; by default the tensors', without tensors torch's current one.

        Returns:
            The lists. Their batch or head dimension is 1 if the mask does not depend on the batch or head.

        Raises:
            ArgumentError: naming the argument, before anything is launched.
        """
        tensors = aux_in_order(aux, self._aux.declared)
        where = device_of(device, tensors)
        shape = checked_shape(batch, heads, q_len, kv_len)
        with entered(where.index):
            return self._run(shape, tensors, where)

    def _run(self, shape: BlockMaskShape, tensors: tuple[torch.Tensor, ...], device: torch.device) -> BlockMaskLists:
        """Launch in the context of the current device."""
        key = (shape, device, call_key(*tensors))
        signature = self._bound(key)
        if signature is None:
            signature = self._signatures.keep(key, self._check(shape, tensors, device))
        sizes, memory = signature.extra
        make = allocator(device)
        counts, lists = contiguous(sizes[:3]), contiguous(sizes)
        made = BlockMaskLists(*(make(*each, torch.int32) for each in (counts, lists, counts, lists)))
        addresses = {name: tensor.data_ptr() for name, tensor in made._asdict().items()}
        addresses |= {name: tensor.data_ptr() for name, tensor in zip(self._aux.params, tensors, strict=True)}
        enqueue(self._loaded, signature, addresses, device, memory)
        return made

    def _check(self, shape: BlockMaskShape, tensors: tuple[Any, ...], device: torch.device) -> Signature:
        """Check a call of a new signature and prepare it."""
        self._aux.check_lengths({"q_len": shape.q_len, "kv_len": shape.kv_len})
        sizes = {"batch": shape.batch, "heads": shape.heads, "q_len": shape.q_len, "kv_len": shape.kv_len}
        told = self._aux.check_sizes(sizes, device, tensors)
        args = self._plan.problem(shape)
        numbers = args.numbers
        if numbers["blocks"] > MOST_BLOCKS or args.tiles > MOST_THREAD_BLOCKS:
            raise ArgumentError("batch", f"is {shape.batch}: {shape} has more blocks than kernels can count")
        heads = numbers["list_heads"]
        lists = (numbers["rows"] // heads // numbers["query_blocks"], heads, numbers["query_blocks"])
        check_memory(**{f"aux[{number}]": tensor for number, tensor in enumerate(tensors)})
        return self._signature(device, args, told, extra=((*lists, numbers["key_blocks"]), Memory.of(args)))


def device_of(device: Any, tensors: tuple[Any, ...]) -> torch.device:
    """Get the device of a call, with its number.

    Raises:
        ArgumentError: if it is not a CUDA device.
    """
    given = device if device is not None else next((t.device for t in tensors if isinstance(t, torch.Tensor)), "cuda")
    found = named_device("device", given)
    if found.type != "cuda":
        argument, preposition = ("aux", "on ") if device is None else ("device", "")
        raise ArgumentError(argument, f"is {preposition}{found}, expected a CUDA device")
    return found if found.index is not None else torch.device("cuda", torch.cuda.current_device())


def checked_shape(batch: Any, heads: Any, q_len: Any, kv_len: Any) -> BlockMaskShape:
    """Check the sizes of a call.

    Raises:
        ArgumentError: naming the first invalid size.
    """
    for name, size in (("batch", batch), ("heads", heads), ("q_len", q_len), ("kv_len", kv_len)):
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= MAX_EXTENT:
            raise ArgumentError(name, f"is {shown(size)}, expected a whole number from 1 to 2^30")
    return BlockMaskShape(batch, heads, q_len, kv_len)
