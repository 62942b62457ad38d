"""What nobody would pass on purpose, put into each argument of a function, and kernels that compute nothing."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import bsr_oracle
import numpy as np
import oracle_kernel
import pytest
import torch
from host_streams import pretend_stream

from codegen.errors import CodegenError
from codegen.library import NamedSpec, find_spec, unnamed_stem
from codegen.parse import parse_spec
from codegen.planning import plan_for
from codegen.select import Choice
from runtime.driver import launch, tensor_map
from runtime.kernel import kernel_class
from runtime.kernels import (
    block_mask,
    bsr_arguments,
    bsr_preparation,
    bsr_scales,
    bsr_sddmm,
    bsr_spmm,
    paged_attention,
    quantize,
    select_topk,
)
from runtime.kernels.launches import Launches
from runtime.ops import block_mask as ops_block_mask
from runtime.ops import bsr_calls, bsr_choice, paged_calls
from runtime.ops import quantize as ops_quantize
from runtime.ops import select_topk as ops_select_topk

Functions = dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]]]]
"""By name a function and what makes arguments that it takes."""
CHECKED = (bsr_arguments, bsr_preparation, bsr_scales, bsr_sddmm, bsr_spmm, paged_attention, quantize, select_topk)
LENGTH = 64
CPU = torch.device("cpu")
SELECTION = {"op": "select_topk", "arch": "sm_90a"}


class Rude:
    """Answers nothing, as an array of several elements does not say whether it is true."""

    def _refuse(self, *_: Any) -> Any:
        raise ValueError("no answer")

    __bool__ = __repr__ = __len__ = __iter__ = __index__ = __int__ = __float__ = _refuse
    __eq__ = __lt__ = __gt__ = __le__ = __ge__ = __getitem__ = __contains__ = _refuse
    __hash__ = _refuse


def odd_values() -> dict[str, Any]:
    """What nobody would pass on purpose, by a name."""
    return {
        "None": None,
        "-1": -1,
        "0": 0,
        "nan": math.nan,
        "inf": math.inf,
        "huge": 10**40,
        "unprintable": 10**5000,
        "True": True,
        "str": "odd",
        "empty str": "",
        "surrogate": "\ud800",
        "zero character": "\0",
        "bytes": b"odd",
        "list": [1, 2],
        "empty list": [],
        "nested list": [[1], "odd"],
        "list of rude": [Rude(), Rude()],
        "dict": {"odd": 1},
        "dict of numbers": {1: 2},
        "set": {1, 2},
        "object": object(),
        "rude": Rude(),
        "class": Rude,
        "function": lambda: 1,
        "generator": (i for i in range(3)),
        "module": torch.nn.Linear(2, 2),
        "np.float32": np.float32(0.5),
        "np.int64": np.int64(3),
        "array": np.ones(2),
        "complex number": 1j,
        "dtype": torch.float64,
        "0-dim": torch.tensor(0.5),
        "two elements": torch.tensor([0.5, 0.25]),
        "empty": torch.empty(0),
        "integers": torch.ones(2, dtype=torch.int64),
        "truths": torch.ones(2, dtype=torch.bool),
        "complex": torch.ones(2, dtype=torch.complex64),
        "five dims": torch.zeros(1, 1, 1, 1, 1),
        "on meta": torch.zeros(1, 2, LENGTH, LENGTH, device="meta", dtype=torch.bfloat16),
        "vector on meta": torch.zeros(8, device="meta", dtype=torch.bfloat16),
        "number on meta": torch.zeros((), device="meta", dtype=torch.bfloat16),
        "sparse": torch.ones(2, 2).to_sparse(),
        "bsr": torch.ones(4, 4).to_sparse_bsr((2, 2)),
        "batch of bsr": torch.ones(2, 4, 4).to_sparse_bsr((2, 2)),
        "bsr on meta": _bsr_on_meta(),
        "learned": torch.ones(2, requires_grad=True),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "quantized": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8),
    }


def _bsr_on_meta() -> torch.Tensor:
    crow, col = torch.zeros(3, dtype=torch.int64, device="meta"), torch.zeros(2, dtype=torch.int64, device="meta")
    values = torch.zeros(2, 64, 64, dtype=torch.bfloat16, device="meta")
    return torch.sparse_bsr_tensor(crow, col, values, size=(128, 128), device="meta", check_invariants=False)


def outcomes(functions: Functions, name: str) -> Iterator[tuple[str, str, Any]]:
    """Yield each argument, each odd value that it was given, and what came of it: an exception, or None."""
    call, made = functions[name]
    for argument in made():
        for label, value in odd_values().items():
            given = made()
            try:
                call(**{**given, argument: value})
            except Exception as raised:
                yield argument, label, raised
            else:
                yield argument, label, None


def check(functions: Functions, name: str, legal: dict[str, str]) -> None:
    """Assert that a function refuses whatever an argument is not meant for by a ``CodegenError``.

    Args:
        functions: the functions.
        name: of the one.
        legal: of each odd value the arguments that some function does take it for.
    """
    functions[name][0](**functions[name][1]())  # as it is meant
    for argument, label, raised in outcomes(functions, name):
        if raised is None:
            assert argument in legal.get(label, "").split(), f"{argument}: {label} is taken"
        elif not isinstance(raised, CodegenError):
            raise AssertionError(f"{argument}: {label}") from raised


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let calls on tensors of the CPU load kernels that check what they are given, and do no more."""
    pretend_stream(monkeypatch, 7)
    for module in CHECKED:
        for name, check in (("check_tensor", oracle_kernel._check_tensor), ("check_on_gpu", bsr_oracle._check_place)):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, check)
    monkeypatch.setattr(block_mask, "entered", lambda index: nullcontext())
    monkeypatch.setattr(block_mask, "device_of", lambda device, tensors: CPU)
    monkeypatch.setattr(tensor_map.MapEncoder, "_encode", lambda self, address: struct.pack("<Q", address) * 16)
    oracle_kernel.install(monkeypatch)
    bsr_oracle.install(monkeypatch)
    monkeypatch.setattr(bsr_choice, "choose", default)
    monkeypatch.setattr(bsr_calls, "_loaded", lambda named, device: quiet(**json.loads(named.spec.canonical_json())))
    monkeypatch.setattr(
        ops_quantize, "_kernel", lambda index, spec: quiet(op="quantize", arch="sm_90a", **json.loads(spec))
    )
    monkeypatch.setattr(ops_quantize, "DEVICES", ("cpu", "cuda", "meta"))
    monkeypatch.setattr(
        ops_block_mask, "_kernel", lambda index, text: quiet(op="block_mask", arch="sm_90a", pattern=json.loads(text))
    )
    monkeypatch.setattr(ops_block_mask, "device_of", partial(device_or_cpu, ops_block_mask.device_of))
    monkeypatch.setattr(paged_calls, "_kernel", pages)
    monkeypatch.setattr(paged_calls, "_launches", Launches())
    monkeypatch.setattr(paged_calls, "check_place", lambda q: q.device.type == "cpu" or check_place(q))
    monkeypatch.setattr(paged_calls, "arch_of", lambda device: "sm_90a")
    monkeypatch.setattr(ops_select_topk, "_kernel", lambda index, dtype: quiet(**SELECTION, dtype=dtype))


check_place = paged_calls.check_place


def pages(index: int | None, dtype: str, cache: str, head_dim: int) -> Any:
    """Return the kernel of calls over pages."""
    fields = {"op": "paged_attention", "arch": "sm_90a", "dtype": dtype, "head_dim": head_dim}
    return quiet(**fields, **({} if cache == "same" else {"cache": cache}))


def device_or_cpu(device_of: Callable[..., Any], device: Any, tensors: tuple[Any, ...]) -> torch.device:
    """Return the device of a call, which may be the CPU's if none is named."""
    on_cpu = device is None and all(tensor.device == CPU for tensor in tensors)
    return CPU if on_cpu else device_of(device, tensors)


def default(given: Any, sizes: Any = None, **_: Any) -> Choice:
    """Choose the rules' default, in place of the fastest."""
    spec = parse_spec(given if isinstance(given, dict) else given.fields())
    return Choice(NamedSpec(stem=unnamed_stem(spec), spec=spec), "default", "nothing was measured here")


def quiet(**fields: Any) -> Any:
    """Return a kernel that no driver launches."""
    named = find_spec(fields)
    loaded: Any = launch.LoadedKernel.__new__(launch.LoadedKernel)
    loaded.plan = plan_for(named)
    loaded.layout = launch.ParameterLayout.of(loaded.plan.params)
    loaded.launch = lambda *_, **__: None
    loaded._sm_counts = {None: 132}
    return kernel_class(named.spec)(SimpleNamespace(named=named, plan=loaded.plan), loaded)  # type: ignore[arg-type]
