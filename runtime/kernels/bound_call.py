"""Base of kernel objects: attributes, name in messages, and signatures of calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, TypeVar, cast

import torch

from codegen.plan import Plan
from codegen.problem import LaunchArgs
from codegen.spec import SpecBase
from runtime.compile.compiler import Compiled
from runtime.driver.launch import LoadedKernel, Signature
from runtime.kernels.arguments import TORCH_DTYPES, Signatures, View
from runtime.kernels.sharing import SharedKernel

S = TypeVar("S", bound=SpecBase)


class BoundCall(SharedKernel, Generic[S]):
    """A kernel object that checks calls and binds them to a signature once per key.

    A call enters the context of its device, looks up its key with ``_bound``, makes the signature of a new key with
    ``_check``, allocates its results, and launches.

    Attributes:
        compiled: source, plan, code and compiler log.
        spec: the spec.
    """

    _argument_names: tuple[str, ...] = ()
    """Names of the arguments in ``repr``."""

    def __init__(self, compiled: Compiled, loaded: LoadedKernel) -> None:
        self.compiled = compiled
        self.spec = cast(S, compiled.plan.spec)
        self._plan: Plan = compiled.plan
        self._loaded = loaded
        self._dtype, self._output = TORCH_DTYPES[self.spec.dtype], TORCH_DTYPES[compiled.plan.output]
        self._signatures = Signatures()

    def __repr__(self) -> str:
        names = ", ".join(self._argument_names)
        return f"<{self._plan.spec.op} kernel {self.compiled.named.stem}({names}) for {self.spec.arch}>"

    def _bound(self, key: Any) -> Any:
        """Look up the signature of an earlier call with the same key; None for a new key."""
        last, bound = self._signatures.last
        return bound if key == last else self._signatures.find(key)

    def _signature(
        self,
        device: torch.device,
        args: LaunchArgs,
        values: Mapping[str, int | float],
        tensors: Mapping[str, View] | None = None,
        extra: Any = None,
    ) -> Signature:
        """Bind a checked call.

        Args:
            device: device of the call.
            args: launch arguments that follow from the problem's shape.
            values: number parameters in addition to ``args``.
            tensors: shape and strides of each tensor with a tensor map.
            extra: data that later calls find in the signature.
        """
        return self._loaded.signature(
            device.index,
            args.tiles,
            {**args.numbers, **values},
            tensors or {},
            extra=extra,
            prologue_grid=args.prologue_grid,
            epilogue_grid=args.epilogue_grid,
            size=args.block,
        )
