"""Calls of attention kernels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from codegen.problem import AttentionShape
from codegen.spec import AttentionSpec
from runtime.checks import check_flag
from runtime.compile.compiler import Compiled
from runtime.driver.allocate import allocator
from runtime.driver.context import entered, is_elsewhere
from runtime.driver.enqueue import enqueue
from runtime.driver.launch import LoadedKernel, Signature
from runtime.driver.workspace import Memory
from runtime.errors import ArgumentError
from runtime.kernels.arguments import (
    KV_AXES,
    Q_AXES,
    TMA_ALIGNMENT,
    aux_in_order,
    call_key,
    check_addresses,
    check_extent,
    check_head_dim,
    check_keys,
    check_memory,
    check_output,
    check_scale,
    check_shape,
    check_sink,
    check_sink_values,
    check_sizes,
    check_strides,
    check_tensor,
    row_strides,
    written,
)
from runtime.kernels.attention_indices import IndexArguments
from runtime.kernels.attention_launch import AttentionLaunch, Layout, Outputs, extent
from runtime.kernels.aux_tensors import AuxArguments
from runtime.kernels.bound_call import BoundCall
from runtime.kernels.pattern_numbers import PatternNumbers
from runtime.prepare.prepared import PreparedLists
from runtime.prepare.query_grouping import find_query_order

SCALES = ("q_scale", "k_scale", "v_scale")
"""Arguments of FP8 kernels."""
_LOG2_E = math.log2(math.e)


class AttentionResult(NamedTuple):
    """What a call of an attention kernel returns.

    Attributes:
        out: (batch, heads, q_len, d), the result: as q.
        lse: float32 (batch, heads, q_len), the natural logarithm of each row's sum of exp(logit); None with
            ``return_lse=False``.
    """

    out: torch.Tensor
    lse: torch.Tensor | None


class _PlainOptions(NamedTuple):
    """The options of a call that are no tensors, checked: a part of its key.

    Attributes:
        scale: the softmax scale; None for the default.
        return_lse: whether the log-sum-exp is computed.
        numbers: those that the pattern leaves to the call, in the order of ``PatternNumbers.params``.
    """

    scale: float | None
    return_lse: bool
    numbers: tuple[int, ...]


def layout_like(tensor: torch.Tensor, dtype: torch.dtype) -> Layout:
    """Return the layout of a new tensor like one: the same, where TMA can write it, else contiguous."""
    like = torch.empty_like(tensor, dtype=dtype, device="meta")
    if like.stride() != tensor.stride():
        like = torch.empty(tensor.shape, dtype=dtype, device="meta")
    return tuple(like.shape), like.stride(), like.dtype


def packed_layout_like(tensor: torch.Tensor, dtype: torch.dtype) -> Layout:
    """Return the layout of a new (1, heads, tokens, d) tensor, a view of one like the (tokens, heads, d) of another."""
    (tokens, heads, d), (of_token, of_head, of_element), _ = layout_like(tensor[0].transpose(0, 1), dtype)
    return (1, heads, tokens, d), (tokens * heads * d, of_head, of_token, of_element), dtype


def _first(indices: tuple[torch.Tensor | None, ...]) -> torch.Tensor:
    """The first index tensor that is given: counts may be left out, the list behind them not."""
    return next(tensor for tensor in indices if tensor is not None)


class AttentionKernel(BoundCall[AttentionSpec]):
    """softmax(scale * Q K^T) V over the key blocks of the spec's pattern.

    Call it with q, k, v and the pattern's index tensors (see :meth:`__call__`). Calls run on torch's current stream,
    do not synchronize and can be captured in a CUDA graph.

    Attributes:
        compiled: source, plan, code and compiler log.
        spec: the spec.
    """

    def __init__(self, compiled: Compiled, loaded: LoadedKernel) -> None:
        super().__init__(compiled, loaded)
        self._pads_heads = bool(self._plan.tensor_maps) or self.spec.pad_heads
        self._order_is_given = self.spec.query_grouping == "given"
        self._indices = self.spec.index_tensors
        others = ("scale", "out", "sink", "return_lse", "window", "sink_keys", "validate", "aux")
        self._aux = AuxArguments(self.spec, compiled.plan)
        self._aux_params = self._aux.params
        self._arguments = IndexArguments(self.spec, compiled.named.stem, others)
        self._index_names = self._arguments.names
        self._argument_names = ("q", "k", "v", *self._index_names)
        self._takes_scales = self.spec.is_fp8
        self._has_lse = self.spec.lse
        self._numbers = PatternNumbers(self.spec.pattern, compiled.named.stem)
        self._layout_like = packed_layout_like if self.spec.layout == "varlen" else layout_like

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *indices: torch.Tensor | PreparedLists | None,
        scale: float | None = None,
        out: torch.Tensor | None = None,
        sink: torch.Tensor | None = None,
        return_lse: bool | None = None,
        window: tuple[int, int] | None = None,
        sink_keys: int | None = None,
        validate: bool = False,
        aux: Mapping[str, torch.Tensor] | None = None,
        **named_indices: torch.Tensor | PreparedLists | None,
    ) -> AttentionResult:
        """Compute attention.

        Args:
            q: (batch, heads, q_len, d), the spec's dtype; the last dimension contiguous, other strides any multiple of
                16 bytes. d is the spec's head_dim. Kernels for sm_90a, and others whose spec says ``pad_heads:
                true``, take any multiple of 8 up to that.
            k: (batch, kv_heads, kv_len, d); heads is a multiple of kv_heads.
            v: as k.
            indices: the index tensors, int32, in the order of ``spec.index_tensors`` (or by name):
                for ``topk`` kv_indices (batch|1, heads|1, ceil(q_len / block.q), k), with any k, also 0, if the spec
                leaves k out; for ``block_lists``
                kv_num_blocks (batch|1, heads|1, ceil(q_len / block.q)), kv_indices (..., any) and, both or
                neither, full_kv_num_blocks and full_kv_indices; with ``mask: bits`` also mask_bits (batch|1, heads|1,
                ceil(q_len / block.q), any, block.q * block.kv / 32), the words of a block contiguous: bit c % 32 of
                word r * (block.kv / 32) + c // 32 of the i-th entry is 1 if query r of the query block sees key c of
                its i-th partial block. It has as many entries as kv_num_blocks counts at most, which may be fewer than
                kv_indices has. Shorter lists of ``topk`` are filled up with -1 at
                their end. Out-of-range entries count as blocks without keys; ``validate`` refuses others than those.
                A tensor with one value for each batch is (batch|1,); a value out of range counts as the nearest in it.
                Where the spec packs heads, lists are of packs: heads / pack_gqa instead of heads. Then, if the
                spec says ``query_grouping: given``, query_order (batch|1, heads|1, ceil(q_len / block.q)), which has
                each query block once: those of a tile are neighbors in it. The result of a query block that it leaves
                out is not written; an entry out of range names none. What :meth:`prepare` returns stands for kv_indices
                and query_order. Whatever these tensors hold, nothing outside the arguments is read or written.
            named_indices: the same tensors by name.
            kv_lengths: (by name, or as the last of ``indices``) int32 (batch|1,), if the spec says ``kv_lengths:
                true``: keys from that number on are hidden from all queries of the batch. The pattern stays aligned to
                the last key of k. What k and v hold behind a length has no effect, except NaN and infinity in v
                in FP8 kernels for sm_89 and sm_120.
            scale: softmax scale, from 1e-37 to 1e38; by default 1 / sqrt(d).
            sink: float32 (heads,), from -6e29 to 6e29, if the spec says ``sink: true``: a logit that joins the sum of
                each row of its head, as a key without a value would.
            out: (batch, heads, q_len, d) to write into, same rules as q; allocated like q by default.
            return_lse: whether the log-sum-exp is computed; by default as the spec's ``lse`` says. A kernel whose spec
                says ``lse: false`` has none.
            window: (left, right), the keys that a query sees before and after its own, each from 0 to 2^24, if the
                spec's ``sliding_window`` or ``sink_window`` leaves them out.
            sink_keys: the keys at the beginning that every later query sees, from 0 to 2^24, if the spec's
                ``sink_window`` leaves them out.
            validate: also check the values of the index tensors and of the sink. Costs a kernel and a synchronization.
            aux: the tensors of the spec's expressions by name, of the types and sizes that it declares, (batch, q_len)
                say, any strides; a size of batch, heads, q_len or kv_len may be 1, for all. An index beyond an end is
                that end's.

        Returns:
            (out, lse); lse is None without ``return_lse``, else (batch, heads, q_len) float32, the natural logarithm of
            each row's sum of exp(logit): scale * q.k, or what the spec's softcap makes of it. A row that sees no key
            has out 0 and lse -inf; with a sink, lse is then the sink.

        Raises:
            ArgumentError: naming the argument, before anything is launched.
        """
        if is_elsewhere(q):
            with entered(q.device.index):
                options: dict[str, Any] = {"scale": scale, "out": out, "sink": sink, "return_lse": return_lse}
                options |= {"window": window, "sink_keys": sink_keys, "validate": validate, "aux": aux}
                return self(q, k, v, *indices, **{**options, **named_indices})
        scales: tuple[Any, ...] = self._take_scales(named_indices) if self._takes_scales else ()
        given = self._arguments.gather(indices, named_indices) if named_indices else indices
        tensors: tuple[Any, ...] = self._unprepared(given) if given and isinstance(given[0], PreparedLists) else given
        looked_up = aux_in_order(aux, self._aux.declared) if aux or self._aux_params else ()
        plain = self._plain_options(scale, return_lse, window, sink_keys)
        key = (plain, call_key(q, k, v, out, sink, *tensors, *looked_up, *scales))
        signature = self._bound(key)
        if signature is None:
            options = {"aux": looked_up, "scales": scales, "out": out, "sink": sink, **plain._asdict()}
            checked = self._check(q, k, v, indices=tensors, **options)
            signature = self._signatures.keep(key, checked)
        if validate:
            self._arguments.check_values(q, k, tensors)
            check_sink_values(sink)
            self._check_values(scales)
        outputs: Outputs = signature.extra
        out = outputs.allocate(*outputs.out_layout) if out is None else written(out)
        at_q, at_k, at_v, at_out = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()
        if (at_q | at_k | at_v | at_out) % TMA_ALIGNMENT:
            check_addresses({"q": at_q, "k": at_k, "v": at_v, "out": at_out})
        addresses = {"q": at_q, "k": at_k, "v": at_v, "o": at_out, **outputs.left_out}
        for name, tensor in zip(self._index_names, tensors, strict=False):  # those left out may be the last ones
            if tensor is not None:
                addresses[name] = tensor.data_ptr()
        if looked_up:
            addresses |= zip(self._aux_params, [tensor.data_ptr() for tensor in looked_up], strict=True)
        if scales:
            addresses.update((name, tensor.data_ptr()) for name, tensor in zip(SCALES, scales, strict=False))
        if sink is not None:
            addresses["sink"] = sink.data_ptr()
        lse = None
        if outputs.lse_layout is not None:
            lse = outputs.allocate(*outputs.lse_layout)
            addresses["lse"] = lse.data_ptr()
        enqueue(self._loaded, signature, addresses, q.device, outputs.memory)
        return AttentionResult(out, lse)

    def prepare(self, kv_indices: torch.Tensor, kv_len: int) -> PreparedLists:
        """Prepare lists of key blocks for this kernel, once for many calls.

        With ``query_grouping: given`` that is an order in which the query blocks of a tile have many key blocks in
        common: finding it takes longer than a call, and synchronizes. Otherwise it is nothing.

        Args:
            kv_indices: (batch, heads, query_blocks, k) int32, the lists of calls to come, as ``topk`` has them.
            kv_len: keys of a head.

        Returns:
            What calls take instead of ``kv_indices``.

        Raises:
            ArgumentError: naming the argument; also if the spec's pattern is not ``topk``.
        """
        if self._index_names[:1] != ("kv_indices",):
            kind = self.spec.pattern.kind
            raise ArgumentError("kv_indices", f"is not prepared for {self.compiled.named.stem}: its pattern is {kind}")
        block = self.spec.pattern.fixed_block
        assert block is not None
        length = self._indices[0].dims[3]
        check_tensor("kv_indices", kv_indices, torch.int32, 4)
        lengths = None if length == "any" else (int(length),)
        sizes = [("batch", None), ("heads", None), ("query_blocks", None), ("k", lengths)]
        check_shape("kv_indices", kv_indices.shape, sizes)
        if not isinstance(kv_len, int) or kv_len < 1:
            raise ArgumentError("kv_len", f"is {kv_len}, expected the number of keys of a head, 1 or more")
        if not self._order_is_given:
            return PreparedLists(kv_indices)
        if is_elsewhere(kv_indices):
            with entered(kv_indices.device.index):
                return self.prepare(kv_indices, kv_len)
        return PreparedLists(kv_indices, find_query_order(kv_indices, -(-kv_len // block.kv), self._plan.sub_tiles))

    def _unprepared(self, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the index tensors that prepared lists, the first of those given, stand for, and the others."""
        lists, rest = given[0], given[1:]
        if (lists.query_order is not None) != self._order_is_given:
            has, takes = ("no", "one") if lists.query_order is None else ("an", "none")
            what = f"it has {has} order of query blocks, {self.compiled.named.stem} takes {takes}"
            raise ArgumentError("kv_indices", f"is prepared for another kernel: {what}")
        if not self._order_is_given:
            return (lists.kv_indices, *rest)
        if rest and rest[0] is not None:
            raise ArgumentError("query_order", "is given twice: kv_indices has one, as it is prepared")
        return (lists.kv_indices, lists.query_order, *rest[1:])

    def _bind_checked(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *indices: torch.Tensor | None,
        scale: float | None,
        out: torch.Tensor | None,
        sink: torch.Tensor | None,
        return_lse: bool,
        aux: Mapping[str, torch.Tensor],
        window: tuple[int, int] | None = None,
        sink_keys: int | None = None,
    ) -> None:
        """Bind a call whose operands ``runtime.ops`` has checked, so that the call itself does not repeat that.

        Args:
            q, k, v, scale, out, sink, return_lse: as of a call; ``runtime.ops`` has checked them.
            indices, window, sink_keys, aux: as of a call; they are checked here.

        Raises:
            ArgumentError: as a call.
        """
        looked_up = aux_in_order(aux, self._aux.declared)
        plain = self._plain_options(scale, return_lse, window, sink_keys)
        key = (plain, call_key(q, k, v, out, sink, *indices, *looked_up))
        with entered(q.device.index) if is_elsewhere(q) else nullcontext():
            options: dict[str, Any] = {"aux": looked_up, "out": out, "sink": sink, "checked": True, **plain._asdict()}
            self._signatures.keep(key, self._check(q, k, v, indices=indices, **options))

    def _bound_launch(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *indices: torch.Tensor | None,
        tensors: tuple[torch.Tensor, ...],
        scale: float | None,
        out: torch.Tensor | None,
        sink: torch.Tensor | None,
        return_lse: bool,
        aux: Mapping[str, torch.Tensor],
        scales: tuple[torch.Tensor, ...] = (),
        window: tuple[int, int] | None = None,
        sink_keys: int | None = None,
    ) -> AttentionLaunch | None:
        """The launch of a call that was made just before, for ``runtime.ops``.

        Args:
            q, k, v, indices, scale, out, sink, return_lse, aux, scales, window, sink_keys: as of that call.
            tensors: those that later calls pass: all others, then q, k, v, and out if it is given.

        Returns:
            The launch; None if the kernel reads a tensor that is none of those.
        """
        looked_up = aux_in_order(aux, self._aux.declared)
        plain = self._plain_options(scale, return_lse, window, sink_keys)
        signature = self._bound((plain, call_key(q, k, v, out, sink, *indices, *looked_up, *scales)))
        read = [("q", q), ("k", k), ("v", v), ("o", out), ("sink", sink), *zip(SCALES, scales, strict=False)]
        read += [*zip(self._index_names, indices, strict=False), *zip(self._aux_params, looked_up, strict=True)]
        names = {id(tensor): name for name, tensor in read if tensor is not None}
        if signature is None or not names.keys() <= set(map(id, tensors)):
            return None
        return AttentionLaunch(
            self._loaded,
            signature,
            signature.extra,
            tuple(names.get(id(tensor), "") for tensor in tensors),
            len(tensors) - (3 if out is None else 4),
            () if out is None else tuple(map(extent, tensors)),
            AttentionResult,
        )

    def _check(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        indices: tuple[Any, ...],
        scale: Any,
        out: Any,
        sink: Any,
        return_lse: bool,
        numbers: tuple[int, ...] = (),
        aux: tuple[Any, ...] = (),
        scales: tuple[Any, ...] = (),
        checked: bool = False,
    ) -> Signature:
        """Check a call of a new signature, less operands that are ``checked``, and bind it."""
        if not checked:
            self._check_operands(q, k, v, out=out, sink=sink)
        self._check_limits(q, k, v)
        batch, heads, q_len, d = q.shape
        kv_heads, kv_len = k.shape[1:3]
        like, strides, dtype = self._layout_like(q, self._output)
        written = torch.empty_strided(like, strides, dtype=dtype, device="meta") if out is None else out
        if sink is not None and not self.spec.sink:
            raise ArgumentError("sink", f"is given, but the spec of {self.compiled.named.stem} says sink: false")
        index_values = self._arguments.check(q, indices) | self._aux.check(q, kv_len, aux)
        index_values |= self._check_scales(q, k, scales)
        factor = 1 / math.sqrt(d) if scale is None else float(scale)
        batches, list_heads = (0, 0) if self.spec.pattern.fixed_block is None else _first(indices).shape[:2]
        slots = 0 if self._plan.stream_k is None else self._loaded.slots(q.device.index)
        length = 0 if self._plan.stream_k is None else int(index_values.get("kv_indices_length", 0))
        lists = batches, list_heads, length
        sequences = self._arguments.sequences(indices)
        if sequences and batch != 1:
            raise ArgumentError("q", f"has a batch of {batch}; packed sequences are (1, heads, tokens, head_dim)")
        of_pattern = self._numbers.of_shape(numbers)
        shape = AttentionShape(batch, heads, kv_heads, q_len, kv_len, *lists, **of_pattern, sequences=sequences)
        args = self._plan.problem(shape, slots)
        if args.numbers["tiles"] >= 2**31:
            what = f"more than 2^31 tiles of {self._plan.tile_queries} queries"
            raise ArgumentError("q", f"has shape {tuple(q.shape)}: {what}")
        values: dict[str, int | float] = {**index_values, "scale_log2": factor * _LOG2_E}
        tensors = {"q": q, "k": k, "v": v, "o": written}
        names = {param.name for param in self._plan.params}
        values |= {name: stride for name, stride in row_strides(**tensors).items() if name in names}
        if "head_chunks" in names:
            values["head_chunks"] = d * q.element_size() // TMA_ALIGNMENT
        check_memory(q=q, k=k, v=v)
        mapped = {name: (tuple(t.shape), t.stride()) for name, t in self._mapped(tensors).items()}
        given = dict(zip(self._index_names, indices, strict=False)) | {"sink": sink}
        outputs = self._outputs(q, given, Memory.of(args), return_lse=return_lse)
        return self._signature(q.device, args, values, mapped, outputs)

    def _plain_options(self, scale: Any, return_lse: Any, window: Any, sink_keys: Any) -> _PlainOptions:
        """Check those options of a call that are no tensors, and fill in defaults.

        Raises:
            ArgumentError: for a ``return_lse`` that is no bool, or True where the kernel has no log-sum-exp; as
                ``check_scale`` and ``PatternNumbers.checked``.
        """
        if scale is not None:
            check_scale(scale)
        if return_lse is None:
            return_lse = self._has_lse
        elif return_lse is not False and return_lse is not self._has_lse:
            check_flag("return_lse", return_lse)
            raise ArgumentError("return_lse", f"is True, but the spec of {self.compiled.named.stem} says lse: false")
        if not self._numbers.params and window is None and sink_keys is None:
            return _PlainOptions(scale, return_lse, ())
        return _PlainOptions(scale, return_lse, self._numbers.checked(window, sink_keys))

    def _check_operands(self, q: Any, k: Any, v: Any, *, out: Any, sink: Any) -> None:
        """Check the operands of a call: types, shapes, strides."""
        check_tensor("q", q, self._dtype, 4)
        check_tensor("k", k, self._dtype, 4, q.device)
        check_tensor("v", v, self._dtype, 4, q.device)
        check_head_dim(q.shape, self.spec.head_dim, padded=self._pads_heads, element=q.element_size())
        check_keys(q, k)
        self._check_v(v, k)
        self._check_strides(q, k, v)
        if out is not None:
            check_tensor("out", out, self._output, 4, q.device)
            check_sizes("out", out, Q_AXES, q.shape)
            check_strides("out", out)
            check_output("out", out)
        if self.spec.sink:
            check_sink(sink, q.shape[1], q.device)

    def _check_limits(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Check what this kernel alone asks of its operands: the packs of heads, the reach of its offsets."""
        packed, group = self.spec.pack_gqa, q.shape[1] // k.shape[1]
        if group % packed:
            has = f"has {q.shape[1]} heads, {group} for each of k"
            raise ArgumentError("q", f"{has}: this kernel packs {packed}, so a multiple of that")
        for name, tensor in ((self._argument_names[1], k), (self._argument_names[2], v)):
            if self._plan.kv_bytes is not None:
                check_extent(name, tensor, self._plan.kv_bytes)

    def _check_v(self, v: torch.Tensor, k: torch.Tensor) -> None:
        check_sizes("v", v, KV_AXES, k.shape)

    def _take_scales(self, named: dict[str, Any]) -> tuple[Any, ...]:
        """Take the scales of FP8 inputs out of the arguments by name, in the order of SCALES."""
        return tuple(named.pop(name) for name in SCALES)

    def _check_scales(self, q: torch.Tensor, k: torch.Tensor, scales: tuple[Any, ...]) -> dict[str, int]:
        """Check the scales of FP8 inputs, which other kernels lack, and return their kernel parameters."""
        del q, k, scales
        return {}

    def _check_values(self, scales: tuple[Any, ...]) -> None:
        """Check the values of those scales (synchronizes)."""

    def _outputs(self, q: torch.Tensor, given: Mapping[str, Any], memory: Memory, *, return_lse: bool) -> Outputs:
        """Outputs of calls with a checked signature, by the index tensors and the sink of the call."""
        batch, heads, q_len, _ = q.shape
        lse_layout = ((batch, heads, q_len), (heads * q_len, q_len, 1), torch.float32)
        return Outputs(
            self._layout_like(q, self._output),
            lse_layout if return_lse else None,
            allocator(q.device),
            {"lse": 0} | dict.fromkeys((name for name in (*self._index_names, "sink") if given.get(name) is None), 0),
            memory,
        )

    def _mapped(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors as the tensor maps address them.

        Where a tile's rows are queries and heads, q and o are (batch, packs, q_len, heads of a pack, d).
        """
        maps, mapped = self._plan.tensor_maps, dict(tensors)
        if maps and len(maps["q_map"].box) == 5:
            packs = (-1, self.spec.pack_gqa)
            mapped |= {name: tensors[name].unflatten(1, packs).transpose(2, 3) for name in ("q", "o")}
        return mapped

    def _check_strides(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        for name, tensor in zip(self._argument_names[:3], (q, k, v), strict=True):
            check_strides(name, tensor)
