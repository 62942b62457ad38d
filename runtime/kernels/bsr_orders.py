"""The orders of block rows that calls found for raw sparse matrices, for later calls with the same ones."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple
from weakref import ref

import torch

from runtime.driver.streams import current_stream, is_lasting
from runtime.kernels.arguments import remember


class _Known(NamedTuple):
    """A known matrix: a weak reference, its former state, and its order by the caller that found it."""

    matrix: ref[torch.Tensor]
    state: Any
    orders: dict[Any, torch.Tensor]


class OrderMemory:
    """Remembers the order of a matrix as long as the matrix lives and is not written to.

    Only an order of block rows may be remembered so. A write is seen by the matrix's version counter, which does not
    count writes to the tensors that the matrix was built of; but any order names each block row once, so that the
    result is right with an old one too. Cut block rows and transposed indices say where blocks lie.

    Each stream finds orders of its own: that of another may not be written yet. A call that is being captured finds
    its own in the graph, and leaves none: what a capture enqueues has not run. A call on a stream that may end
    before the process leaves none either: the next stream may have its handle.
    """

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}
        self._lock = threading.Lock()

    def place(self, matrix: torch.Tensor) -> Any:
        """Return where a call may look for an order and leave one; None: nowhere."""
        if matrix.is_inference() or torch.cuda.is_current_stream_capturing():
            return None  # inference tensors have no version counter
        device, stream = matrix.device, current_stream(matrix.device)
        return (device.index, stream) if is_lasting(device, stream) else None

    def find(self, matrix: torch.Tensor, key: Any, place: Any) -> torch.Tensor | None:
        """Return the order that a call at this place left; None if it left none, or the matrix is another now.

        Args:
            matrix: the matrix.
            key: what its order depends on beside its indices' values.
            place: of the call.
        """
        known, state = self._known.get(id(matrix)), (key, matrix._version)
        if known is None or known.matrix() is not matrix or known.state != state:
            return None
        return known.orders.get(place)

    def keep(self, matrix: torch.Tensor, key: Any, place: Any, order: torch.Tensor) -> None:
        """Leave an order for calls to come; the arguments are those of ``find``."""
        state, number = (key, matrix._version), id(matrix)
        with self._lock:
            known = self._known.get(number)
            if known is None or known.matrix() is not matrix or known.state != state:
                known = self._known[number] = _Known(ref(matrix, self._forget(number)), state, {})
            remember(known.orders, place, order)

    def _forget(self, number: int) -> Any:
        """Callback that drops a matrix that was freed, unless another one has its number by then."""
        everything = self._known

        def forget(gone: ref[torch.Tensor]) -> None:
            known = everything.get(number)
            if known is not None and known.matrix is gone:
                del everything[number]

        return forget
