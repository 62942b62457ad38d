"""What an epilogue adds to the plans of BSR x dense kernels."""

from __future__ import annotations

from codegen.plan import Param, pointer
from codegen.spec import BsrSpmmSpec


def epilogue_params(spec: BsrSpmmSpec) -> tuple[Param, ...]:
    """Return the parameters that the epilogue reads."""
    if spec.epilogue is None or not spec.epilogue.bias:
        return ()
    return (pointer("bias", "unsigned short", f"added to C, one {spec.dtype} for each row (M)"),)


def epilogue_values(spec: BsrSpmmSpec) -> dict[str, int | str | bool]:
    """Return what the templates ask: whether a bias is added, the activation's name, and C as a formula."""
    if spec.epilogue is None:
        return {"adds_bias": False, "activation": "none", "formula": "A B"}
    product = "A B + bias" if spec.epilogue.bias else "A B"
    activation = spec.epilogue.activation
    formula = product if activation == "none" else f"{activation}({product})"
    return {"adds_bias": spec.epilogue.bias, "activation": activation, "formula": formula}


def epilogue_summary(spec: BsrSpmmSpec) -> tuple[tuple[str, str], ...]:
    """Return the line for ``explain``, if there is an epilogue."""
    if spec.epilogue is None:
        return ()
    return (("epilogue", f"C = {epilogue_values(spec)['formula']}, in fp32"),)
