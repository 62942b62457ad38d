"""The small problems for the sanitizer fit the kernels that they are for: every shipped kernel takes its call."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from each import every_source
from scripts import imported

from codegen.dtypes import FP8
from codegen.library import NamedSpec
from codegen.spec import AttentionBackwardSpec, AttentionSpec

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = Path(__file__).resolve().parents[1] / "gpu" / "small_call.py"
    spec = importlib.util.spec_from_file_location("small_call", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_without_a_gpu_it_is_one_line(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(script.sys, "argv", ["small_call.py", "h100_topk32"])
    with pytest.raises(SystemExit) as caught:
        script.main()
    assert caught.value.code == "error: a call needs a GPU, and torch sees none; nothing was run"


@pytest.fixture(scope="module")
def pretended() -> Iterator[ModuleType]:
    """A stand-in driver: calls reach it with the checks of their kernels."""
    with imported("pretended") as module, module.pretended():
        yield module


@pytest.mark.filterwarnings("ignore:Sparse")
@every_source
def test_a_kernel_takes_its_small_call(script: ModuleType, pretended: ModuleType, named: NamedSpec) -> None:
    kernel = pretended.kernel_object(named)
    script.call(kernel, "cpu")
    if script.garbage.has_indices(named.spec):
        positional, more = script.arguments_of(named.spec, "cpu")
        given = script.garbage.spoil(named.spec, positional, 0)
        for arguments in (given.given, given.proper):
            if script.garbage.is_product(named.spec):
                script.garbage.product(kernel, arguments, more)
            else:
                kernel(*arguments, **more)


@pytest.mark.filterwarnings("ignore:Sparse")
@every_source
def test_a_small_problem_has_what_a_call_takes(script: ModuleType, named: NamedSpec) -> None:
    spec: Any = named.spec
    positional, more = script.arguments_of(spec, "cpu")
    if script.paged_garbage.is_over_pages(spec):
        q, keys, values = positional
        assert keys.shape == values.shape and q.shape[1] % keys.shape[2] == 0 and q.shape[2] == keys.shape[3]
        assert (set(more) >= {"k_scale", "v_scale"}) == (spec.cache == "e4m3")
        return
    if spec.op in ("key_lists_forward", "key_lists_backward"):
        q, k, v = positional
        assert q.shape[1] == k.shape[-2] * spec.group and k.shape == v.shape
        assert more["lists"].shape[:2] == (k.shape[-2], q.shape[0])
        return
    if isinstance(spec, AttentionSpec):
        q, k, v, *indices = positional
        assert q.shape[1] % (k.shape[1] * spec.pack_gqa) == 0
        assert k.shape == (v.mT.shape if spec.dtype in FP8 else v.shape)
        scales = {"q_scale", "k_scale", "v_scale"} if spec.dtype in FP8 else set()
        packed = spec.layout == "varlen"
        required = [t for t in spec.index_tensors if (packed or not t.optional) and t.name not in more]
        assert len(indices) == len(required)
        assert set(more.pop("aux", {})) == {tensor.name for tensor in spec.aux_tensors}
        numbers = {number.argument for number in spec.pattern.call_numbers} if spec.pattern.is_general else set()
        assert {name for name in script.NUMBERS if more.pop(name, None) is not None} == numbers
        assert set(more) - {"kv_lengths"} == scales | ({"sink"} if spec.sink else set()) | {
            tensor.name for tensor in spec.index_tensors if tensor.of_entries
        }
        if "mask_bits" in more:
            block, entries = spec.pattern.fixed_block, indices[1].shape
            assert more["mask_bits"].shape == (*entries, block.q * block.kv // 32)
        heads = q.shape[1] // spec.pack_gqa
        assert all(
            tensor.dtype == torch.int32
            and (tensor.shape == q.shape[:1] if which.per_batch else tensor.dim() == 1 or tensor.shape[1] in (1, heads))
            for which, tensor in zip(required, indices, strict=True)
        )
        return
    if isinstance(spec, AttentionBackwardSpec):
        q, k, v, *indices = positional
        assert more["out"].shape == more["dout"].shape == q.shape and more["lse"].shape == q.shape[:3]
        given = {t.name for t, tensor in zip(spec.forward.index_tensors, indices, strict=False) if tensor is not None}
        assert k.shape == v.shape and given == {
            t.name for t in spec.forward.index_tensors if spec.layout == "varlen" or not t.optional
        }
        return
    if spec.op == "block_mask":
        assert set(more["aux"]) == {tensor.name for tensor in spec.aux_tensors} and min(positional) > 1
        return
    if spec.op in ("quantize", "tile_copy", "select_topk"):
        assert positional[0].shape[-1] % 8 == 0
        return
    assert all(
        tensor.values().shape[1:] == (spec.block.rows, spec.block.cols)
        for tensor in positional
        if tensor.layout == torch.sparse_bsr
    )
    if spec.op == "bsr_spmm":
        a, b = positional
        assert {more.pop(name).dtype for name in ("scale_a", "scale_b") if spec.dtype in FP8} <= {torch.float32}
        assert a.shape[0 if spec.transpose_a else 1] == b.shape[0]
        assert set(more) == {
            name for name, has in (("c", spec.accumulate), ("bias", spec.epilogue and spec.epilogue.bias)) if has
        }
    elif spec.op == "bsr_sddmm":
        a, b, pattern = positional
        assert (a.shape[0], b.shape[0]) == pattern.shape and a.shape[1] == b.shape[1]
        assert set(more) == ({"scale_a", "scale_b"} if spec.dtype in FP8 else set())
    else:
        a, b, *patterns = positional
        assert a.shape[1] == b.shape[0] and len(patterns) == (spec.output == "bsr")
        assert all(pattern.shape == (a.shape[0], b.shape[1]) for pattern in patterns)
