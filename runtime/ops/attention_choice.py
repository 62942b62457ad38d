"""Which kernel computes a call of ``block_sparse_attention``: chosen by the class of its shapes, by codegen.select.

A class has everything that a spec says, and the sizes that the choice depends on, rounded: batch, lengths and the
entries of a list to the next of 1, 2, 3, 4, 6, 8, 12, 16, 24, ... So at most two kernels are chosen from one power of
two of a length to the next, most often one; heads are exact.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from codegen.arch import ARCHS
from codegen.errors import SpecError
from codegen.patterns import PatternBase
from codegen.scored_pattern import ScoredPattern
from codegen.select import Choice, choose
from codegen.select.problem import rounded
from codegen.select.shipped import Verified
from codegen.spec import NARROW_HEADS, AttentionSpec
from codegen.wording import alternatives
from runtime.errors import ArgumentError, DeviceError, UnverifiedError
from runtime.kernels.arguments import TORCH_DTYPES
from runtime.ops.attention_extras import Features
from runtime.ops.block_sizes import BlockFit, Tensors, block_fit
from runtime.receipts import mode, permit

HEAD_DIMS = (64, 96, 128, 192, 256)
"""Head sizes that kernels are made for: others are filled up to the next."""
DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16"}
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
CLASSES_KEPT = 256
LIST_RANK = 3  # of counts; lists have one dimension more, their entries
_PACKS = (64, 32, 16, 8, 4, 2)
_FEW_QUERIES = 16  # of a block: below, a tile is filled by query heads that share their lists


class Fp8Call(NamedTuple):
    """Parameters of a call with FP8 inputs that select its kernel.

    Attributes:
        output: type of the result.
        q_rows: queries that share a scale.
        k_rows: keys that do.
    """

    output: torch.dtype
    q_rows: int
    k_rows: int

    def fields(self) -> dict[str, Any]:
        """Fields of the spec."""
        return {"output": DTYPES[self.output], "scale_rows": {"q": self.q_rows, "k": self.k_rows}}


class Call(NamedTuple):
    """Properties of a call that select its kernel.

    Attributes:
        scored: the pattern and the score.
        list_shape: of the first index tensor; () without.
        q_shape: (batch, heads, q_len, head_dim).
        k_shape: (batch, kv_heads, kv_len, head_dim).
        dtype: of q, k and v.
        device: of q.
        features: of the optional tensors and numbers.
        mode: that of ``runtime.receipts.mode``.
        fp8: parameters of FP8 inputs; None for 16-bit ones.
    """

    scored: ScoredPattern
    list_shape: tuple[int, ...]
    q_shape: tuple[int, ...]
    k_shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device | None
    features: Features
    mode: bool | None = None
    fp8: Fp8Call | None = None


@dataclass(frozen=True)
class ShapeClass:
    """A class of calls that share a kernel.

    Attributes:
        scored: pattern and score of the spec.
        arch: architecture of the device.
        device_name: as torch has it; None if there is no device.
        dtype: of inputs and outputs.
        head_dim: of the kernel.
        features: of the optional tensors and numbers of the calls.
        pad_heads: whether their heads are filled up by a kernel that does not copy by TMA, which does so by itself.
        pack_gqa: query heads that share their lists.
        batch, heads, kv_heads, q_len, kv_len, list_length: sizes, rounded; None: not known.
        fp8: parameters of FP8 inputs; None for 16-bit ones.
        verified_only: whether kernels without a receipt are refused.
    """

    scored: ScoredPattern
    arch: str
    device_name: str | None
    dtype: str
    head_dim: int
    features: Features
    pad_heads: bool
    pack_gqa: int
    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    list_length: int | None
    fp8: Fp8Call | None = None
    verified_only: bool = False

    def fields(self) -> dict[str, Any]:
        """Fields of the spec that define the problem, without options that are off."""
        options: dict[str, Any] = {"pad_heads": self.pad_heads, "score": self.scored.score_fields}
        return {
            "op": "attention",
            **{name: getattr(self, name) for name in ("arch", "dtype", "head_dim", "pack_gqa")},
            "pattern": self.scored.pattern_fields,
            **self.features.fields(),
            **{name: value for name, value in options.items() if value},
            **({} if self.fp8 is None else self.fp8.fields()),
        }

    def sizes(self) -> dict[str, int]:
        """Known sizes, by name."""
        names = ("batch", "heads", "kv_heads", "q_len", "kv_len", "list_length")
        sizes = {name: getattr(self, name) for name in names}
        return {name: size for name, size in sizes.items() if size is not None}


@dataclass(frozen=True)
class Resolution:
    """How a call is computed.

    Attributes:
        shape_class: the class that the call is of.
        choice: the kernel, and the reason.
        fit: how the caller's lists become those of the kernel; None where they are the same.
        repeated: how often each head of the lists is repeated.
    """

    shape_class: ShapeClass
    choice: Choice
    fit: BlockFit | None
    repeated: int

    def lists_of(self) -> Callable[[Tensors, int, int], Tensors] | None:
        """Function from the caller's index tensors, q_len and kv_len to the kernel's; None if they are the same."""
        fit, repeated = self.fit, self.repeated
        place = placed(self.shape_class.scored.pattern, self.kernel_pattern)
        if fit is None and repeated == 1 and place is None:
            return None

        def arranged(tensors: Tensors, q_len: int, kv_len: int) -> Tensors:
            if repeated > 1:
                tensors = tuple(
                    t if t is None or t.shape[1] == 1 else t.repeat_interleave(repeated, 1) for t in tensors
                )
            if fit is not None:
                tensors = fit.apply(tensors, q_len, kv_len)
            return tensors if place is None else place(tensors)

        return arranged

    @property
    def kernel_pattern(self) -> PatternBase:
        """The pattern of the kernel's spec."""
        spec = self.choice.spec
        assert isinstance(spec, AttentionSpec)
        return spec.pattern


def placed(pattern: PatternBase, kernel: PatternBase) -> Callable[[Tensors], Tensors] | None:
    """Function from a pattern's index tensors to those of a kernel for a wider one; None if they are the same.

    Counts that a kernel may do without are left out: then all entries count.
    """
    names, own = [[tensor.name for tensor in each.index_tensors] for each in (kernel, pattern)]
    if names == own:
        return None
    places = [own.index(name) if name in own else None for name in names]
    return lambda tensors: tuple(None if place is None else tensors[place] for place in places)


def arch_of(device: torch.device) -> str:
    """The architecture whose kernels a device runs.

    Raises:
        DeviceError: if none are written for it. Those of another architecture are not taken instead.
    """
    capability = torch.cuda.get_device_capability(device)
    for name, arch in ARCHS.items():
        if arch.compute_capability == capability:
            return name
    here = f"{torch.cuda.get_device_name(device)} is sm_{capability[0]}{capability[1]}"
    raise DeviceError(f"{here}, for which no kernels are written; there are some for {', '.join(ARCHS)}")


def kernel_head_dim(head_dim: int) -> int:
    """The head size of the kernel.

    Raises:
        ArgumentError: if no kernel takes it.
    """
    if head_dim % 8 or not 0 < head_dim <= HEAD_DIMS[-1]:
        raise ArgumentError("q", f"has head size {head_dim}, expected a multiple of 8 up to {HEAD_DIMS[-1]}")
    return next(size for size in HEAD_DIMS if size >= head_dim)


def resolve(call: Call, arch: str, device_name: str | None) -> Resolution:
    """Choose the kernel of a call.

    Raises:
        ArgumentError: naming the argument, where no kernel computes it.
        SpecError: the same, of the pattern's numbers and of options.
        UnverifiedError: with ``verified_only``, where no kernel with a receipt does.
    """
    if arch not in ARCHS:
        raise ArgumentError("arch", f"is {arch!r}; {alternatives(arch, list(ARCHS))}")
    packed = _packed_heads(call)
    try:
        return _resolved(call, arch, device_name, packed)
    except SpecError as error:
        if packed == 1 or error.field != "pack_gqa":
            raise
        return _resolved(call, arch, device_name, 1)
    except UnverifiedError:
        if packed == 1:
            raise
        with suppress(UnverifiedError):
            return _resolved(call, arch, device_name, 1)
        raise


def _resolved(call: Call, arch: str, device_name: str | None, packed: int) -> Resolution:
    """Choose the kernel of a call with so many heads packed, where its blocks need not be merged."""
    (batch, heads, q_len, head_dim), (_, kv_heads, kv_len, _) = call.q_shape, call.k_shape
    fit = block_fit(call.scored, arch, packed)
    if fit is not None and fit.merges and packed > 1:
        packed, fit = 1, block_fit(call.scored, arch, 1)
    list_heads = call.list_shape[1] if len(call.list_shape) > 1 else 1
    width = call.list_shape[3] if len(call.list_shape) > LIST_RANK else 0
    pads = head_dim not in HEAD_DIMS and not any(how.copy == "tma" for how in ARCHS[arch].of("attention"))
    if pads and call.fp8 is not None:
        sizes = ", ".join(map(str, HEAD_DIMS))
        raise ArgumentError("q", f"has head size {head_dim}; kernels of FP8 for {arch} have {sizes}")
    shape_class = ShapeClass(
        scored=call.scored if fit is None else fit.fitted(call.scored),
        arch=arch,
        device_name=device_name,
        dtype=_NAMES[call.dtype],
        head_dim=kernel_head_dim(head_dim),
        features=call.features,
        pad_heads=pads,
        pack_gqa=packed,
        batch=rounded(batch),
        heads=heads,
        kv_heads=kv_heads,
        q_len=rounded(q_len),
        kv_len=rounded(kv_len),
        list_length=rounded(width) if width and fit is None else None,
        fp8=call.fp8,
        verified_only=mode.by_environment() if call.mode is None else call.mode,
    )
    repeated = 1 if list_heads == 1 else heads // packed // list_heads
    shape_class, choice = _with_fewest_columns(shape_class, head_dim)
    return Resolution(shape_class, choice, fit, repeated)


def _with_fewest_columns(shape_class: ShapeClass, head_dim: int) -> tuple[ShapeClass, Choice]:
    """The class and its kernel: one for heads of NARROW_HEADS if it is shipped, or one for the next of HEAD_DIMS."""
    has_tma = any(how.copy == "tma" for how in ARCHS[shape_class.arch].of("attention"))
    if HEAD_DIMS[0] < head_dim <= NARROW_HEADS and has_tma and shape_class.fp8 is None:
        narrow = replace(shape_class, head_dim=NARROW_HEADS)
        with suppress(SpecError, UnverifiedError):
            choice = chosen(narrow)
            if choice.named.is_shipped:
                return narrow, choice
    return shape_class, chosen(shape_class)


def _packed_heads(call: Call) -> int:
    """Query heads in a tile that share their lists, where lists are those of K/V heads or of all heads."""
    if len(call.list_shape) < LIST_RANK:
        return 1
    heads, kv_heads, list_heads = call.q_shape[1], call.k_shape[1], call.list_shape[1]
    if list_heads == 1 < kv_heads:
        few_queries = call.scored.block is not None and call.scored.block.q < _FEW_QUERIES
        return next((pack for pack in _PACKS if heads // kv_heads % pack == 0), 1) if few_queries else 1
    packed = heads // list_heads
    return packed if packed in _PACKS else 1


@lru_cache(maxsize=CLASSES_KEPT)
def chosen(shape_class: ShapeClass) -> Choice:
    """Choose the kernel of a class; whether it stores the log-sum-exp is an argument of its calls."""
    fields, sizes = shape_class.fields(), shape_class.sizes()

    def choice(verified: Verified | None) -> Choice:
        return choose(fields, sizes, device=shape_class.device_name, general=True, verified=verified)

    return permit.chosen(choice) if shape_class.verified_only else choice(None)
