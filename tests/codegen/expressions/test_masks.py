"""Masks of specs that are expressions: what is accepted, in one spelling, and what the oracle makes of them."""

from __future__ import annotations

import re
from typing import Any

import pytest

from codegen.errors import SpecError
from codegen.library import find_spec
from codegen.planning import plan_for
from codegen.render import render_plan
from codegen.spec import AttentionSpec

BLOCKS = {"q": 128, "kv": 128}
DOCUMENTS = "q_doc[batch, q_idx] == kv_doc[batch, kv_idx] and q_idx >= kv_idx"
AUX = {"q_doc": "int32[batch, q_len]", "kv_doc": "int32[batch, kv_len]"}


def fields(mask: Any, aux: Any = None, **more: Any) -> dict[str, Any]:
    pattern = {"kind": "block_lists", "block": BLOCKS, "mask": mask, **({} if aux is None else {"aux": aux})}
    return {"op": "attention", "arch": "sm_90a", "head_dim": 128, "pattern": pattern, **more}


def spec_of(mask: Any, aux: Any = None, **more: Any) -> AttentionSpec:
    found = find_spec(fields(mask, aux, **more)).spec
    assert isinstance(found, AttentionSpec)
    return found


def source_of(mask: str, aux: Any = None, **more: Any) -> str:
    return render_plan(plan_for(find_spec(fields(mask, aux, **more))))


def test_the_hash_is_of_the_tree_and_not_of_its_spelling() -> None:
    spelt = "( q_doc [batch,q_idx]==kv_doc[batch , kv_idx] ) and ((q_idx) >= kv_idx)"
    turned = dict(reversed([("q_doc", "int32[ batch,q_len ]"), ("kv_doc", "int32[batch,kv_len]")]))
    assert spec_of(spelt, turned).hash == spec_of(DOCUMENTS, AUX).hash
    assert spec_of("q_idx > kv_idx").hash != spec_of("q_idx >= kv_idx").hash


def test_a_spec_without_an_expression_is_as_it_was() -> None:
    assert "aux" not in spec_of("causal").canonical_json()
    assert spec_of("causal", {}).hash == spec_of("causal").hash


@pytest.mark.parametrize(
    ("mask", "aux", "message"),
    [
        ("casual", None, "column 1"),
        ("q_idx - kv_idx", None, "its type is int; expected a Boolean expression"),
        ("q_idx < 0", None, "pattern.mask: is 'q_idx < 0'; it hides every pair"),
        ("kv_idx // (q_idx - 3) == 1", None, "kv_idx // (q_idx - 3) may divide by zero"),
        ("score > 0.0", None, "column 1"),
        (DOCUMENTS, {**AUX, "more": "fp32[heads]"}, "more"),
        ("causal", AUX, "this mask takes no aux tensors: leave them out"),
        (DOCUMENTS, {**AUX, "q_doc": "int33[batch, q_len]"}, "pattern.aux"),
        ("t[kv_idx] == 1", {"t": "int32[kv_len, 2]"}, "has 1 indices here"),
        ("1); x = (2", None, "pattern.mask"),
        (3, None, "pattern.mask"),
    ],
)
def test_what_is_refused(mask: Any, aux: Any, message: str) -> None:
    with pytest.raises(SpecError) as error:
        find_spec(fields(mask, aux))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_head_of_a_packed_row_is_refused() -> None:
    assert spec_of("q_idx >= kv_idx - 3", pack_gqa=4).pack_gqa == 4
    for mask, aux in (("head % 2 == 0", None), ("t[head] > 0", {"t": "int32[heads]"})):
        with pytest.raises(SpecError, match="pack_gqa: is 4; an expression depends on the head"):
            find_spec(fields(mask, aux, pack_gqa=4))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_89"])
def test_the_source_has_the_expression_as_a_function_with_its_text(arch: str) -> None:
    source = source_of(DOCUMENTS, AUX, arch=arch)
    assert f"//   {DOCUMENTS}\n__device__ __forceinline__ bool visible(" in source
    assert "return (q_doc_of_row == kv_doc_of_column) & (query >= key);" in source
    assert "aux_q_doc_stride1" in source and "aux_q_doc_size1" not in source, (
        "indices that are inside are not held to it"
    )


def test_an_index_that_may_leave_a_tensor_is_held_to_it() -> None:
    source = source_of("t[q_idx - kv_idx] > 0", {"t": "int32[100]"})
    assert "clamp_index(query - key, 100)" in source


@pytest.mark.parametrize("arch", ["sm_90a", "sm_89"])
@pytest.mark.parametrize("gradients", ["dq", "dkdv"])
def test_gradients_ask_the_same_function(gradients: str, arch: str) -> None:
    source = source_of(DOCUMENTS, AUX, op="attention_backward", arch=arch, gradients=gradients)
    assert f"//   {DOCUMENTS}\n__device__ __forceinline__ bool visible(" in source
    assert "return (q_doc_of_row == kv_doc_of_column) & (query >= key);" in source
    assert len(re.findall(r"\bvisible\(p, batch, head, ", source)) == 1


def test_attention_by_wmma_has_none() -> None:
    with pytest.raises(SpecError, match=r"pattern\.mask: is an expression; attention with wmma does not support it"):
        plan_for(find_spec(fields(DOCUMENTS, AUX, arch="sm_89", mma="wmma")))
