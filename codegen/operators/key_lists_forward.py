"""The record of attention over lists of keys, for many queries."""

from __future__ import annotations

from codegen.key_list_cases import CASES
from codegen.operators.record import Operator
from codegen.plans import key_lists_forward
from codegen.problem import KeyListsShape
from codegen.select.default_tables import KEY_LISTS_FORWARD
from codegen.spec import KeyListsForwardSpec

KEY_LISTS_FORWARD_OPERATOR = Operator(
    model=KeyListsForwardSpec,
    shape=KeyListsShape,
    kernel=lambda spec: key_lists_forward,
    rows=KEY_LISTS_FORWARD,
    features=lambda spec: (None, {"keys": spec.entry_keys}),
    stem=lambda spec: [
        *(["paged"] if spec.layout == "paged" else []),
        f"d{spec.head_dim}",
        f"b{spec.entry_keys}",
        f"g{spec.group}",
    ],
    title=lambda spec: f"attention over lists of {spec.entry_keys} keys, d {spec.head_dim}, groups of {spec.group}",
    computes=lambda spec: ("dtype", "layout", "head_dim", "entry_keys", "group"),
    cases=lambda plan, spec: [case.name for case in CASES],
    random_shapes=True,
    tolerance=1.0,  # errors are fractions of the allowed error
)
