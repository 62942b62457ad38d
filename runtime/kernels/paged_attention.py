"""Calls of kernels of attention over pages."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeVar

import torch

from codegen.problem import COUNTER_BYTES, LaunchArgs, PagedShape
from codegen.spec import AttentionSpec, KeyListsForwardSpec, PagedAttentionSpec
from codegen.wording import shown
from runtime.checks import check_dense, check_flag
from runtime.compile.compiler import Compiled
from runtime.driver.allocate import allocator, contiguous
from runtime.driver.context import entered, is_elsewhere
from runtime.driver.enqueue import enqueue
from runtime.driver.launch import LoadedKernel, Signature
from runtime.driver.workspace import NO_MEMORY, Memory
from runtime.errors import ArgumentError
from runtime.kernels.arguments import (
    MAX_EXTENT,
    TORCH_DTYPES,
    check_addresses,
    check_memory,
    check_number,
    check_output,
    check_scale,
    check_shape,
    check_sink,
    check_strides,
    check_tensor,
    refuse_gradient,
    written,
)
from runtime.kernels.attention import AttentionResult
from runtime.kernels.attention_launch import extent
from runtime.kernels.bound_call import BoundCall
from runtime.kernels.launches import Launch, Launches
from runtime.kernels.paged_values import check_paged_values

S = TypeVar("S", AttentionSpec, PagedAttentionSpec, KeyListsForwardSpec)
CHUNK_BYTES = 16
"""Unit of the strides of a cache: the bytes of one copy."""
PACKED_RANK = 3
"""Dimensions of packed K and V: (tokens, kv_heads, head_dim)."""
UNBOUNDED = 2**29
"""Keys of a window without a bound; no window has more."""
UNPAGED_SHIFT = 31
"""Page shift with which every key lies in the first page of its request."""
MAX_UNITS = 2**31
"""Units of work that a kernel cannot count."""
MOST_CHUNKS = 2**32 - 1
"""Chunks of a cache at most; the kernel's offsets have 32 bits."""
ENTRY_KEYS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Keys that an entry of a list can stand for."""
WORKSPACE_ALIGNMENT = CHUNK_BYTES
"""Bytes to which a workspace and its parts are aligned: those of one load."""
ALIGNED = ("q", "k_cache", "v_cache", "out", "workspace")
"""Tensors that begin at multiples of 16 bytes."""
INVARIANT_PARTS = 16
"""Most parts of a tile in batch-invariant calls."""


TENSORS = (
    "q",
    "k_cache",
    "v_cache",
    "block_table",
    "seq_lens",
    "cu_seqlens_q",
    "lists",
    "counts",
    "sink",
    "k_scale",
    "v_scale",
    "out",
    "workspace",
)
"""Tensors of a call, in order."""
Given = tuple[Any, ...]
"""The tensors of a call, None for those that are not given."""


class Window(NamedTuple):
    """Keys that a query sees, besides the lists.

    Attributes:
        left: keys before its own position.
        right: keys after it.
        sink: keys at the beginning, which later queries see too.
    """

    left: int = UNBOUNDED
    right: int = 0
    sink: int = 0


class Options(NamedTuple):
    """Arguments of a call that are not tensors.

    Attributes:
        window: keys that each query sees, besides the lists.
        entry_keys: keys of an entry of a list.
        scale: softmax scale, or None for the default.
        softcap: cap of the logits, or None.
        batch_invariant: whether keys are divided by the length of their request alone.
        return_lse: whether the log-sum-exp is wanted.
    """

    window: Window
    entry_keys: int
    scale: float | None
    softcap: float | None
    batch_invariant: bool
    return_lse: bool


class WorkspaceBytes(NamedTuple):
    """Bytes of a workspace.

    Counters are at its beginning and sums at its end. Calls with other numbers of counters and sums then share a
    workspace: in one that has room for the most of both, no call writes sums over the counters of another.

    Attributes:
        counters: of finished parts.
        partials: sums of parts.
    """

    counters: int
    partials: int

    @classmethod
    def of(cls, args: LaunchArgs) -> WorkspaceBytes:
        """Bytes of a launch."""
        counters = -(-sum(args.counters.values()) * COUNTER_BYTES // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT
        return cls(counters, sum(args.scratch.values()))

    @property
    def total(self) -> int:
        """Bytes of both."""
        return self.counters + self.partials

    def with_room_for(self, other: WorkspaceBytes) -> WorkspaceBytes:
        """Bytes of a workspace that serves the calls of both."""
        return WorkspaceBytes(*map(max, self, other))


class Bound(NamedTuple):
    """What later calls of a signature need.

    Attributes:
        memory: workspaces of the launch, besides that of the call.
        places: (pointer parameter, name of the tensor in which it lies, byte offset from the tensor's address).
    """

    memory: Memory
    places: tuple[tuple[str, str, int], ...] = ()


class PagedKernel(BoundCall[S]):
    """A kernel of attention over K and V in pages: its call.

    Attributes:
        compiled: source, plan, code and compiler log.
        spec: the spec.
    """

    _argument_names = ("q", "k_cache", "v_cache", "block_table", "seq_lens")

    def __init__(self, compiled: Compiled, loaded: LoadedKernel) -> None:
        super().__init__(compiled, loaded)
        self._launches = Launches()

    def __call__(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *,
        block_table: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        window: Window = Window(),  # noqa: B008 - immutable
        lists: torch.Tensor | None = None,
        counts: torch.Tensor | None = None,
        entry_keys: int = 1,
        scale: float | None = None,
        softcap: float | None = None,
        sink: torch.Tensor | None = None,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        return_lse: bool = False,
        batch_invariant: bool = False,
        workspace: torch.Tensor | None = None,
    ) -> AttentionResult:
        """Compute attention.

        Args:
            q: (tokens, heads, head_dim), the spec's dtype; the last dimension contiguous, other strides multiples of 8
                elements.
            k_cache: (pages, page_size, kv_heads, head_dim), q's dtype or e4m3, as the spec has it; any strides that are
                multiples of 16 bytes. page_size is a power of two. Without ``block_table``: (batch, keys, kv_heads,
                head_dim). Packed: (key tokens, kv_heads, head_dim), with ``seq_lens`` and ``cu_seqlens_q``.
            v_cache: as k_cache, with the same strides.
            block_table: int32 (batch, most pages of a request): the pages of each request; its rows are contiguous. For
                packed K int32 (batch,): the first key of each request.
            seq_lens: int32 (batch,), contiguous: keys of each request; by default all that its row has room for.
            cu_seqlens_q: int32 (batch + 1,), contiguous: first token of each request, then the end of the last one; by
                default all requests have the same number of tokens.
            window: keys that each query sees. The last query of a request has the position of its last key.
            lists: int32 (kv_heads or 1, tokens, entries), rows contiguous: of the keys in the window, each query sees
                those of its entries. Entry e stands for keys e * entry_keys to (e + 1) * entry_keys - 1; negative ones
                and those behind the last key count as absent. A repeated entry counts as often as it is there.
            counts: int32 (kv_heads or 1, tokens): entries of each list that count, from the first one on.
            entry_keys: keys of an entry, a power of two up to 256.
            scale: softmax scale; by default 1 / sqrt(head_dim).
            softcap: cap of the logits.
            sink: float32 (heads,), a logit that joins the sum of each row of its head.
            k_scale: float32 (1,), (kv_heads,) or (pages, page_size, kv_heads), the factors of an e4m3 k_cache.
            v_scale: the same for v_cache; factors of tokens have the strides of k_scale.
            out: (tokens, heads, head_dim), where to write the result; it overlaps no other tensor.
            return_lse: whether to return the log-sum-exp too.
            batch_invariant: whether the keys of a request are divided by its own length alone, so that results have the
                same bits whatever else is in the batch. Lists of more than 16,384 keys are divided by the number of
                their entries, absent ones too.
            workspace: uint8 (bytes,), contiguous: memory of calls that do not overlap, 0 before the first one
                (``workspace_bytes``). By default a call allocates it, and in a CUDA graph also clears a part of it.

        Returns:
            The result (tokens, heads, head_dim) in q's dtype, 0 for a query that sees no key, and the log-sum-exp,
            float32 (heads, tokens), -inf for such a query. Tokens of no request are not written.

        Raises:
            ArgumentError: naming the argument, before anything is launched.
        """
        given = (
            q,
            k_cache,
            v_cache,
            block_table,
            seq_lens,
            cu_seqlens_q,
            lists,
            counts,
            sink,
            k_scale,
            v_scale,
            out,
            workspace,
        )
        options = Options(window, entry_keys, scale, softcap, batch_invariant, return_lse)
        return self.attend(given, options)

    def attend(self, given: Given, options: Options) -> AttentionResult:
        """Compute attention.

        Args:
            given: the tensors of a call, in the order of ``TENSORS``; None for those that are not given.
            options: its other arguments.

        Returns:
            As a call.

        Raises:
            ArgumentError: as of a call.
        """
        absent, present = given_of(given)
        launch: Launch | None = None
        key: Any = None
        try:
            key = options, absent, torch.is_grad_enabled()
            launch = self._launches.find(key, present)
        except (AttributeError, RuntimeError, TypeError, ValueError):
            key = None
        result: AttentionResult | None = None if launch is None else launch(present)
        if result is not None:
            return result
        launch, result = self.attend_checked(given, options)
        if key is not None:
            self._launches.keep(key, present, launch)
        return result

    def attend_checked(
        self, given: Given, options: Options, *, validate: bool = False
    ) -> tuple[Launch, AttentionResult]:
        """Check a call and compute it.

        Args:
            given: the tensors of a call, in the order of ``TENSORS``; None for those that are not given.
            options: its other arguments.
            validate: whether to check the values of tables, lengths and bounds too (synchronizes).

        Returns:
            The launch of calls with tensors like these, and the result. The launch takes the given tensors, in order,
            and returns None if another device is current. It uses addresses alone: views of the same addresses serve
            too.

        Raises:
            ArgumentError: as of a call.
        """
        if is_elsewhere(given[0]):
            with entered(given[0].device.index):
                return self.attend_checked(given, options, validate=validate)
        launch = self._launch(given, options, validate=validate)
        result = launch(given_of(given)[1])
        assert result is not None
        return launch, result

    def _launch(self, given: Given, options: Options, *, validate: bool) -> Launch:
        """Check a call; return the launch of calls with tensors like these."""
        tensors = dict(zip(TENSORS, given, strict=True))
        signature = self._check(tensors, options)
        if validate:
            check_paged_values(tensors, options.window.left, options.window.sink)
        bound: Bound = signature.extra
        q, submit = tensors["q"], self._submit
        device, dtype = q.device, q.dtype
        names = tuple(name for name, tensor in tensors.items() if tensor is not None)
        rest = dict.fromkeys((name for name, tensor in tensors.items() if tensor is None), 0) | {"lse": 0}
        has_out, has_workspace = tensors["out"] is not None, tensors["workspace"] is not None
        kept = [name for name, given in (("out", has_out), ("workspace", has_workspace)) if given]
        extents = {name: extent(tensors[name]) for name in names} if kept else {}
        result, of_rows = contiguous(q.shape), contiguous((q.shape[1], q.shape[0]))
        allocate, lse_wanted, out_place = allocator(device), options.return_lse, names.index("out") if has_out else 0

        def launch(given: tuple[torch.Tensor, ...]) -> AttentionResult | None:
            if is_elsewhere(given[0]):
                return None
            addresses = rest.copy()
            for name, tensor in zip(names, given, strict=True):
                addresses[name] = tensor.data_ptr()
            for name in kept:
                check_apart(addresses, extents, name)
            if has_out:
                out = written(given[out_place])
            else:
                out = allocate(*result, dtype)
                addresses["out"] = out.data_ptr()
            lse = None
            if lse_wanted:
                lse = allocate(*of_rows, torch.float32)
                addresses["lse"] = lse.data_ptr()
            bits = addresses["q"] | addresses["k_cache"] | addresses["v_cache"] | addresses["out"]
            if (bits | addresses["workspace"]) % CHUNK_BYTES:
                check_addresses({name: addresses[name] for name in ALIGNED})
            for name, other, offset in bound.places:
                addresses[name] = addresses[other] + offset
            submit(signature, addresses, device)
            return AttentionResult(out, lse)

        return launch

    def _submit(self, signature: Signature, addresses: dict[str, int], device: torch.device) -> None:
        """Launch a call on torch's current stream."""
        enqueue(self._loaded, signature, addresses, device, signature.extra.memory)

    def _check(self, tensors: dict[str, Any], options: Options) -> Signature:
        """Check a call of a new signature and prepare it; ``extra`` of the signature is a ``Bound``.

        Args:
            tensors: the tensors of the call by the names of ``TENSORS``; None for those that are not given.
            options: its other arguments.
        """
        raise NotImplementedError


class PagedAttentionKernel(PagedKernel[PagedAttentionSpec]):
    """Kernel that computes attention of a few queries of each request over K and V in pages.

    Attributes:
        compiled: source, plan, code and compiler log.
        spec: the spec.
    """

    def workspace_bytes(
        self, device: torch.device, *, batch: int, tokens: int, heads: int, kv_heads: int, batch_invariant: bool = False
    ) -> WorkspaceBytes:
        """Bytes of the workspace of a call.

        Args:
            device: device of the call.
            batch: requests.
            tokens: queries of all requests.
            heads: query heads.
            kv_heads: heads of K and V.
            batch_invariant: as of the call. Otherwise only the device matters.

        Returns:
            The bytes. With lists, a call needs as many as without them if there is a request for each token.

        Raises:
            DeviceError: if the device cannot be entered.
        """
        parts = INVARIANT_PARTS if batch_invariant else 0
        shape = PagedShape(batch, tokens, heads, kv_heads, most_parts=parts)
        with entered(device.index):
            return WorkspaceBytes.of(self._plan.problem(shape, self._loaded.slots(device.index)))

    def _check(self, tensors: dict[str, Any], options: Options) -> Signature:
        """Check a call of a new signature and prepare it."""
        q, k_cache, table, out, workspace = (
            tensors[name] for name in ("q", "k_cache", "block_table", "out", "workspace")
        )
        check_tensor("q", q, self._dtype, 3)
        tokens, heads, d = q.shape
        if d != self.spec.head_dim:
            raise ArgumentError("q", f"has head_dim {d}, expected {self.spec.head_dim}")
        check_strides("q", q)
        softcap = check_paged_options(options)
        cache = TORCH_DTYPES["e4m3"] if self.spec.cache == "e4m3" else self._dtype
        packed = isinstance(k_cache, torch.Tensor) and k_cache.dim() == PACKED_RANK
        if packed:
            tensors = _as_one_page(tensors)
            k_cache = tensors["k_cache"]
        strides = check_cache(q, k_cache, tensors["v_cache"], cache)
        kv_heads = k_cache.shape[2]
        batch, max_keys = _check_packed(tensors) if packed else check_requests(tensors)
        lists = check_lists(tensors["lists"], tensors["counts"], options.entry_keys, q, kv_heads)
        if tensors["sink"] is not None:
            check_sink(tensors["sink"], heads, q.device)
        scales = check_cache_scales(tensors, self.spec)
        if out is not None:
            check_paged_out(out, q)
        check_memory(**{name: tensor for name, tensor in tensors.items() if tensor is not None})
        parts = INVARIANT_PARTS if options.batch_invariant else 0
        list_length = lists.pop("list_length")
        shape = PagedShape(batch, tokens, heads, kv_heads, max_keys, list_length, options.entry_keys, parts)
        args = self._plan.problem(shape, self._loaded.slots(q.device.index))
        if args.units >= MAX_UNITS:
            has = f"has {tokens} tokens of {batch} requests, for up to {max_keys} keys each"
            raise ArgumentError("q", f"{has}: more work than one call counts, pass fewer requests or a narrower table")
        memory = Memory.of(args)
        places: tuple[tuple[str, str, int], ...] = ()
        if workspace is not None:
            size = WorkspaceBytes.of(args)
            check_workspace(tensors, size.total)
            end = workspace.numel() // WORKSPACE_ALIGNMENT * WORKSPACE_ALIGNMENT
            places = ("counters", "workspace", 0), ("partials", "workspace", end - size.partials)
            memory = NO_MEMORY
        scale = 1 / math.sqrt(d) if options.scale is None else check_scale(options.scale)
        values = {
            **token_strides("q", q),
            **(token_strides("out", out) if out is not None else {"out_token_stride": heads * d, "out_head_stride": d}),
            **strides,
            **_decode_pages(k_cache, table, strides, packed=packed),
            "max_keys": max_keys,
            "request_queries": tokens // batch,
            "window_left": options.window.left,
            "window_right": options.window.right,
            "sink_keys": options.window.sink,
            **lists,
            "scale_log2": scale * math.log2(math.e),
            "softcap": softcap,
            **scales,
        }
        return self._signature(q.device, args, values, extra=Bound(memory, places))


def _as_one_page(tensors: dict[str, Any]) -> dict[str, Any]:
    """Packed K and V as one page that has the tokens of all requests."""
    of_one = {name: tensors[name][None] for name in ("k_cache", "v_cache") if isinstance(tensors[name], torch.Tensor)}
    return {**tensors, **of_one}


def _check_packed(tensors: dict[str, Any]) -> tuple[int, int]:
    """Check the bounds of packed K and V; return the number of requests and the keys of one at most."""
    q, starts = tensors["q"], tensors["block_table"]
    _check_integers("block_table", starts, q, [("batch", None)])
    batch = int(starts.shape[0])
    for name, words, size in (("seq_lens", "batch", batch), ("cu_seqlens_q", "batch + 1:", batch + 1)):
        _check_integers(name, tensors[name], q, [(words, (size,))])
    return batch, int(tensors["k_cache"].shape[1])


def _decode_pages(k_cache: torch.Tensor, table: Any, strides: dict[str, int], *, packed: bool) -> dict[str, int]:
    """What the kernel's addresses of keys depend on, besides strides of heads and tokens.

    Packed K is one where each token begins a page without an end: the table has the page of each request's first key.
    """
    if packed:
        numbers = {"pages": k_cache.shape[1], "page_chunks": strides["token_chunks"], "table_stride": 1}
        return {**numbers, "page_shift": UNPAGED_SHIFT, "page_mask": 2**31 - 1}
    return page_numbers(k_cache, table)


def page_numbers(k_cache: torch.Tensor, table: torch.Tensor | None) -> dict[str, int]:
    """Numbers of the pages by kernel parameter."""
    pages, page_size = k_cache.shape[:2]
    if table is None:
        return {"pages": pages, "page_shift": UNPAGED_SHIFT, "page_mask": 2**31 - 1, "table_stride": 0}
    shift = page_size.bit_length() - 1
    return {"pages": pages, "page_shift": shift, "page_mask": page_size - 1, "table_stride": table.stride(0)}


def given_of(given: Given) -> tuple[tuple[bool, ...], tuple[torch.Tensor, ...]]:
    """Which tensors of a call are absent, and the others.

    A tensor that is given twice, such as one scale for K and V, comes as two: launches are kept for distinct tensors.
    """
    present = [tensor for tensor in given if tensor is not None]
    if len(set(map(id, present))) < len(present):
        first: dict[int, int] = {}
        for i, tensor in enumerate(present):
            if first.setdefault(id(tensor), i) != i:
                present[i] = tensor.detach()
    return tuple([tensor is None for tensor in given]), tuple(present)


def check_apart(addresses: dict[str, int], extents: dict[str, int], written_one: str) -> None:
    """Check that a tensor that the kernel writes lies outside of all others."""
    first = addresses[written_one]
    end = first + extents[written_one]
    for name, size in extents.items():
        if addresses[name] < end and first < addresses[name] + size and name != written_one:
            raise ArgumentError(written_one, f"overlaps {name} in memory; it must lie elsewhere")


def check_workspace(tensors: dict[str, Any], size: int) -> None:
    """Check the memory of a call."""
    workspace, device = tensors["workspace"], tensors["q"].device
    check_dense("workspace", workspace)
    if workspace.dtype != torch.uint8 or workspace.device != device or workspace.dim() != 1:
        found = f"is {workspace.dtype} {tuple(workspace.shape)} on {workspace.device}"
        raise ArgumentError("workspace", f"{found}, expected torch.uint8 (bytes,) on {device}")
    if workspace.numel() < size or not workspace.is_contiguous():
        raise ArgumentError("workspace", f"has {workspace.numel()} bytes, expected at least {size}, contiguous")
    others = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    addresses = {name: tensor.data_ptr() for name, tensor in others.items()}
    check_apart(addresses, {name: extent(tensor) for name, tensor in others.items()}, "workspace")


def check_paged_options(options: Options) -> float:
    """Check what a call has beside its tensors, but for the scale; return the softcap, 0 without one."""
    for name in ("batch_invariant", "return_lse"):
        check_flag(name, getattr(options, name))
    window = options.window
    numbers = window if isinstance(window, Window) else ()
    if not numbers or any(isinstance(n, bool) or not isinstance(n, int) or not 0 <= n <= UNBOUNDED for n in numbers):
        raise ArgumentError("window", f"is {shown(window)}, expected a Window of integers from 0 to {UNBOUNDED}")
    entry_keys = options.entry_keys
    if isinstance(entry_keys, bool) or not isinstance(entry_keys, int) or entry_keys not in ENTRY_KEYS:
        raise ArgumentError("entry_keys", f"is {shown(entry_keys)}, expected one of {', '.join(map(str, ENTRY_KEYS))}")
    if options.softcap is None:
        return 0.0
    softcap = check_number("softcap", options.softcap)
    if not softcap > 0:
        raise ArgumentError("softcap", f"is {softcap}, expected a positive number")
    return softcap


def check_requests(tensors: dict[str, Any]) -> tuple[int, int]:
    """Check pages, lengths and bounds; return the number of requests and the keys of one at most."""
    q, table = tensors["q"], tensors["block_table"]
    pages, page_size = tensors["k_cache"].shape[:2]
    batch = pages if table is None else _check_table(table, q, page_size)
    max_keys = page_size if table is None else table.shape[1] * page_size
    if max_keys > MAX_EXTENT:
        room = f"has room for {max_keys} keys of a request"
        raise ArgumentError("block_table", f"{room}, expected {MAX_EXTENT} or less")
    for name, words, size in (("seq_lens", "batch", batch), ("cu_seqlens_q", "batch + 1:", batch + 1)):
        if tensors[name] is not None:
            _check_integers(name, tensors[name], q, [(words, (size,))])
    tokens = q.shape[0]
    if tensors["cu_seqlens_q"] is None and tokens % batch:
        raise ArgumentError("q", f"has {tokens} tokens for {batch} requests: pass cu_seqlens_q, or as many for each")
    return batch, max_keys


def check_paged_out(out: Any, q: torch.Tensor) -> None:
    """Check the tensor to write into."""
    check_tensor("out", out, q.dtype, 3, q.device)
    tokens, heads, d = q.shape
    check_shape("out", out.shape, [("tokens", (tokens,)), ("heads", (heads,)), ("head_dim", (d,))])
    check_strides("out", out)
    check_output("out", out)


def token_strides(name: str, tensor: torch.Tensor) -> dict[str, int]:
    """Token and head strides by kernel parameter, 0 for a dimension of one element."""
    sizes = zip(("token", "head"), tensor.shape[:2], tensor.stride()[:2], strict=True)
    return {f"{name}_{axis}_stride": 0 if size == 1 else stride for axis, size, stride in sizes}


def check_cache(q: torch.Tensor, k_cache: Any, v_cache: Any, dtype: torch.dtype) -> dict[str, int]:
    """Check K and V; return the strides that they share, in chunks."""
    for name, tensor in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_tensor(name, tensor, dtype, 4, q.device)
        check_strides(name, tensor)
    heads, d = q.shape[1:]
    kv_heads = k_cache.shape[2]
    if k_cache.shape[3] != d:
        raise ArgumentError("k_cache", f"has head_dim {k_cache.shape[3]}, q has {d}")
    if heads % kv_heads:
        raise ArgumentError("k_cache", f"has {kv_heads} heads, q has {heads}: expected a divisor of those")
    if v_cache.shape != k_cache.shape or v_cache.stride() != k_cache.stride():
        of_v, of_k = ((tuple(tensor.shape), tensor.stride()) for tensor in (v_cache, k_cache))
        raise ArgumentError("v_cache", f"has shape and strides {of_v}, k_cache has {of_k}: expected the same")
    chunk = CHUNK_BYTES // k_cache.element_size()
    found = {}
    last = 0
    for name, size, stride in zip(("page", "token", "head"), k_cache.shape, k_cache.stride(), strict=False):
        found[f"{name}_chunks"] = 0 if size == 1 else stride // chunk
        last += (size - 1) * (stride // chunk)
    if last >= MOST_CHUNKS:
        raise ArgumentError(
            "k_cache", f"spans {last * CHUNK_BYTES} bytes, expected less than {MOST_CHUNKS * CHUNK_BYTES}"
        )
    for name, chunks in found.items():
        if not 0 <= chunks < 2**31:
            raise ArgumentError(
                "k_cache", f"has a stride of {chunks * chunk} ({name}), expected less than {2**31 * chunk}"
            )
    return found


def _check_integers(
    name: str, tensor: Any, q: torch.Tensor, expected: list[tuple[str, tuple[int, ...] | None]]
) -> None:
    """Check an int32 tensor, whose last dimension is contiguous."""
    check_dense(name, tensor)
    if tensor.dtype != torch.int32:
        raise ArgumentError(name, f"is {tensor.dtype}, expected torch.int32: pass {name}.to(torch.int32)")
    if tensor.device != q.device:
        raise ArgumentError(name, f"is on {tensor.device}, q is on {q.device}: pass {name}.to(q.device)")
    check_shape(name, tensor.shape, expected)
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ArgumentError(name, f"has stride {tensor.stride(-1)} in its last dimension, which must be contiguous")


def _check_table(table: Any, q: torch.Tensor, page_size: int) -> int:
    """Check a page table; return the number of requests."""
    if page_size & (page_size - 1):
        raise ArgumentError("k_cache", f"has pages of {page_size} tokens, expected a power of two")
    _check_integers("block_table", table, q, [("batch", None), ("most pages of a request", None)])
    if table.numel() == 0:
        raise ArgumentError("block_table", f"is empty: {tuple(table.shape)}")
    return int(table.shape[0])


def check_lists(lists: Any, counts: Any, entry_keys: Any, q: torch.Tensor, kv_heads: int) -> dict[str, int]:
    """Check the lists; return their numbers."""
    names = ("list_heads", "list_head_stride", "list_token_stride", "count_head_stride", "count_token_stride")
    numbers = dict.fromkeys((*names, "list_length"), 0)
    if lists is None:
        if counts is not None:
            raise ArgumentError("counts", "is given without lists")
        return numbers
    heads = ("kv_heads", tuple(sorted({1, kv_heads})))
    _check_integers("lists", lists, q, [heads, ("tokens", (q.shape[0],)), ("entries", None)])
    if not 1 <= lists.shape[2] <= MAX_EXTENT // entry_keys:
        most = MAX_EXTENT // entry_keys
        raise ArgumentError("lists", f"has {lists.shape[2]} entries per list, expected 1 to {most}")
    numbers["list_heads"], _, numbers["list_length"] = lists.shape
    numbers["list_head_stride"], numbers["list_token_stride"] = lists.stride()[:2]
    if counts is not None:
        _check_integers("counts", counts, q, [("heads of lists", (lists.shape[0],)), ("tokens", (q.shape[0],))])
        numbers["count_head_stride"], numbers["count_token_stride"] = counts.stride()
    return numbers


def check_cache_scales(tensors: dict[str, Any], spec: PagedAttentionSpec | AttentionSpec) -> dict[str, int]:
    """Check the factors of K and V; return their numbers, none for a cache without factors."""
    q, k_cache, given = tensors["q"], tensors["k_cache"], {name: tensors[name] for name in ("k_scale", "v_scale")}
    if spec.cache != "e4m3":
        for name, scale in given.items():
            if scale is not None:
                raise ArgumentError(name, f"is given, but the cache is {spec.dtype}, which has no scale")
        return {}
    pages, page_size, kv_heads, _ = k_cache.shape
    numbers = dict.fromkeys(("k_scale_stride", "v_scale_stride", "scale_by_token"), 0)
    numbers |= dict.fromkeys(("scale_page_stride", "scale_token_stride", "scale_head_stride"), 0)
    for name, scale in given.items():
        if scale is None:
            continue
        check_dense(name, scale)
        if scale.dtype != torch.float32 or scale.device != q.device:
            raise ArgumentError(name, f"is {scale.dtype} on {scale.device}, expected torch.float32 on {q.device}")
        if tuple(scale.shape) not in ((1,), (kv_heads,), (pages, page_size, kv_heads)):
            allowed = f"(1,), (kv_heads {kv_heads},) or (pages {pages}, page_size {page_size}, kv_heads {kv_heads})"
            raise ArgumentError(name, f"has shape {tuple(scale.shape)}, expected {allowed}")
        refuse_gradient(name, scale)
        if scale.dim() == 1:
            numbers[f"{name}_stride"] = 0 if scale.shape[0] == 1 else int(scale.stride(0))
    k_scale, v_scale = given.values()
    by_token = [scale is not None and scale.dim() > 1 for scale in given.values()]
    if any(by_token):
        if not all(by_token) or k_scale.stride() != v_scale.stride():
            of_v = None if v_scale is None else (tuple(v_scale.shape), v_scale.stride())
            of_k = None if k_scale is None else (tuple(k_scale.shape), k_scale.stride())
            raise ArgumentError("v_scale", f"has shape and strides {of_v}, k_scale has {of_k}: expected the same")
        names = ("scale_page_stride", "scale_token_stride", "scale_head_stride")
        numbers |= dict(zip(names, k_scale.stride(), strict=True), scale_by_token=1)
    return numbers
