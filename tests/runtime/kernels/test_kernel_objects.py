"""Copies and pickles of kernel objects, and what autograd knows of the tensors that they write into."""

from __future__ import annotations

import ast
import copy
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from codegen.errors import CodegenError  # noqa: E402
from runtime.kernels import (  # noqa: E402
    attention,
    attention_backward,
    attention_fp8,
    block_mask,
    bsr_sddmm,
    bsr_spgemm,
    bsr_spmm,
    quantize,
    select_topk,
    tile_copy,
)
from runtime.kernels.arguments import Signatures  # noqa: E402
from runtime.kernels.sharing import KernelPickleError, SharedKernel  # noqa: E402
from runtime.prepare.bsr_matrix import parts_of  # noqa: E402
from runtime.prepare.prepared import PreparedBsr  # noqa: E402

MODULES = (
    *(attention, attention_backward, attention_fp8, block_mask, bsr_sddmm, bsr_spgemm),
    *(bsr_spmm, quantize, select_topk, tile_copy),
)


def test_copies_are_the_kernel_and_pickles_are_refused_by_name() -> None:
    classes = {each for module in MODULES for name, each in vars(module).items() if name.endswith("Kernel")}
    classes = {each for each in classes if isinstance(each, type)} - {SharedKernel}
    kinds = {each for each in classes if each.__module__.startswith("runtime.kernels.")}
    assert len(kinds) == len(MODULES)
    for kind in kinds:
        kernel: Any = kind.__new__(kind)
        kernel.compiled = SimpleNamespace(named=SimpleNamespace(stem="h100_some_kernel"))
        assert copy.copy(kernel) is kernel
        assert copy.deepcopy({"held": [kernel]})["held"][0] is kernel
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            with pytest.raises(
                KernelPickleError, match=r"h100_some_kernel: .*call sparse_kernel_codegen\.load_kernel"
            ) as caught:
                pickle.dumps(kernel, protocol)
        again = pickle.loads(pickle.dumps(caught.value))
        assert isinstance(again, CodegenError) and str(again) == str(caught.value)


def stubbed(kind: type[Any], module: Any, spec: Any, extra: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A kernel on the CPU, whose checks find nothing and whose launches write nothing."""
    kernel = kind.__new__(kind)
    kernel.spec, kernel._signatures, kernel._loaded = spec, Signatures(), None
    signature = SimpleNamespace(extra=extra)
    kernel._check = lambda *arguments, **more: signature
    for name in ("enqueue", "check_address", "check_addresses", "allocator", "check_scale_address"):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, lambda *arguments, **more: None)
    return kernel


def test_backward_refuses_a_saved_tensor_that_a_kernel_wrote_into(monkeypatch: pytest.MonkeyPatch) -> None:
    def calls() -> Any:
        x = torch.ones(1, 1, 16, 16)
        copying = stubbed(tile_copy.TileCopyKernel, tile_copy, None, None, monkeypatch)
        yield "tile_copy out", lambda out: copying(x[0, 0], out=out), torch.ones(16, 16)
        spec = SimpleNamespace(mean="none")
        quantizing = stubbed(quantize.QuantizeKernel, quantize, spec, ({}, None), monkeypatch)
        quantizing._by_columns = False
        codes, scales = torch.ones(1, 1, 16, 16), torch.ones(1, 1, 16)
        yield "quantize out", lambda out: quantizing(x, out=out, out_scales=scales), codes
        yield "quantize out_scales", lambda out: quantizing(x, out=codes, out_scales=out), scales
        matrix = torch.ones(16, 16).to_sparse_bsr((16, 16))
        sampling = stubbed(bsr_sddmm.BsrSddmmKernel, bsr_sddmm, None, None, monkeypatch)
        yield "sddmm out", lambda out: sampling(x[0, 0], x[0, 0], matrix, out=out), torch.ones(1, 16, 16)
        found = SimpleNamespace(copy_stride=None, signature=None, memory=None)
        product = stubbed(bsr_spmm.BsrSpmmKernel, bsr_spmm, None, None, monkeypatch)
        product._strided = False
        product._check = lambda *arguments, **more: found
        operand = SimpleNamespace(key=0, matrix=matrix, row_order=None, addresses={"a": 0}, values_shape=(1, 16, 16))
        more = {
            "c": None,
            "beta": 1.0,
            "bias": None,
            "scales": bsr_spmm.NO_SCALES,
            "validate": False,
            "prologue": False,
        }
        packets = torch.ones(1)
        yield (
            "spmm out",
            lambda out: product._one(operand, x[0, 0], out=out, packets=packets, **more),
            torch.ones(16, 16),
        )

    for name, call, out in calls():
        weight = torch.ones_like(out, requires_grad=True)
        loss = (weight * out).sum()  # saves out
        call(out)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        assert out._version > 0, name


def test_sparse_results_stay_on_their_device_under_a_default_one() -> None:
    matrix = parts_of(torch.ones(32, 32).to_sparse_bsr((16, 16)))
    with torch.device("meta"):
        assert matrix.to_sparse().device.type == "cpu"
        values = torch.zeros(4, 16, 16, device="cpu")
        assert PreparedBsr(matrix.to_sparse()).with_values(values).matrix.device.type == "cpu"
    calls = []
    for path in sorted((Path(__file__).resolve().parents[3] / "runtime").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.sparse_bsr_tensor":
                calls.append((path.name, node.lineno, any(word.arg == "device" for word in node.keywords)))
    assert calls and all(has_device for _, _, has_device in calls), calls
