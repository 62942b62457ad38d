"""Optional tensors and numbers of attention: one value, which most modules pass on without naming its fields."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from codegen.spec import AttentionSpec  # noqa: E402
from runtime.ops.attention_extras import NUMBER_SCHEMA, TENSOR_SCHEMA, TENSORS, Extras, Features  # noqa: E402

RUNTIME = Path(__file__).parents[3] / "runtime"
PASS_ON = {
    "ops": (
        *("attention_autograd", "attention_calls", "attention_checks", "attention_choice", "attention_differentiated"),
        *("attention_fp8", "attention_fp8_operator", "attention_gradients", "attention_launches", "attention_operator"),
    ),
    "distributed": ("context", "heads", "inputs", "operators", "plan"),
}
"""Modules between the public functions and the kernels."""


def test_modules_between_call_and_kernel_do_not_name_a_field() -> None:
    modules = [RUNTIME / folder / f"{name}.py" for folder, names in PASS_ON.items() for name in names]
    naming = [module.name for module in modules if re.search(r"\bkv_lengths\b", module.read_text())]
    assert not naming, "pass Extras on as a whole (docs/reference/adding.md)"


def test_the_schema_of_operators_has_the_fields_in_their_order() -> None:
    names = [part.split()[1].removesuffix("=None") for part in f"{TENSOR_SCHEMA}, {NUMBER_SCHEMA}".split(", ")]
    assert tuple(names) == Extras._fields and Extras._fields[0] == "sink"
    assert TENSOR_SCHEMA.count("Tensor?") == TENSORS


def test_features_are_fields_of_the_spec() -> None:
    assert set(Features._fields) <= AttentionSpec.model_fields.keys()
    assert Extras().features().fields() == {}
    extras = Extras(torch.zeros(4), torch.zeros(1, dtype=torch.int32), softcap=30)
    assert extras.features().fields() == {"softcap": 30.0, "sink": True, "kv_lengths": True}


def test_the_arguments_of_an_operator_are_extras() -> None:
    sink, options = torch.zeros(4), {"scale": 0.5, "lse": True}
    extras = Extras.of([sink, None], options)
    assert extras == Extras(sink, None, 0.5, None) and options == {"lse": True}
    assert {**extras.tensors(), **extras.numbers()} == extras._asdict()


def test_lengths_are_the_last_index_tensor() -> None:
    lists, lengths = torch.zeros(1), torch.zeros(1, dtype=torch.int32)
    assert Extras().indices((lists,), 3) == (lists,)
    assert Extras(kv_lengths=lengths).indices((lists,), 3) == (lists, None, lengths)
