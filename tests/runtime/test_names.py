"""Former names of the package's functions and classes."""

from __future__ import annotations

import pytest

import runtime

pytest.importorskip("torch")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("QuantisedAttention", "QuantizedAttention"),
        ("QuantisedMatrix", "QuantizedMatrix"),
        ("quantise_attention", "quantize_attention"),
        ("quantise_matrix", "quantize_matrix"),
        ("quantised_operands", "quantized_operands"),
    ],
)
def test_a_former_name_warns(old: str, new: str) -> None:
    with pytest.warns(
        DeprecationWarning, match=rf"^runtime\.{old} is deprecated: use sparse_kernel_codegen\.{new}$"
    ) as caught:
        found = getattr(runtime, old)
    assert found is getattr(runtime, new) and caught[0].filename == __file__
    assert old not in runtime.__all__
