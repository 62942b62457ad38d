"""The record of the gradients of attention over lists of keys."""

from __future__ import annotations

from codegen.key_list_cases import cases_of
from codegen.operators.record import Operator
from codegen.plans.backward import key_lists
from codegen.problem import KeyListsShape
from codegen.select.default_tables import KEY_LISTS_BACKWARD
from codegen.spec import KeyListsBackwardSpec

KEY_LISTS_BACKWARD_OPERATOR = Operator(
    model=KeyListsBackwardSpec,
    shape=KeyListsShape,
    kernel=lambda spec: key_lists,
    rows=KEY_LISTS_BACKWARD,
    features=lambda spec: (None, {"keys": key_lists.tile_keys(spec.entry_keys)}),
    stem=lambda spec: [f"d{spec.head_dim}", f"b{spec.entry_keys}", f"g{spec.group}"],
    title=lambda spec: f"gradients over lists of {spec.entry_keys} keys, d {spec.head_dim}, groups of {spec.group}",
    computes=lambda spec: ("dtype", "head_dim", "entry_keys", "group"),
    cases=lambda plan, spec: [case.name for case in cases_of(spec.entry_keys)],
    random_shapes=True,
    tolerance=1.0,  # errors are fractions of the allowed error
)
