"""Additions of ``epilogue`` and ``accumulate`` to the plans of BSR x dense kernels."""

from __future__ import annotations

from codegen.flags import EpilogueFlags
from codegen.plan import Constant, Param, TensorMap, f32, pointer, tensor_map
from codegen.spec import BsrSpmmSpec


def epilogue_params(spec: BsrSpmmSpec) -> tuple[Param, ...]:
    """Parameters that the epilogue reads."""
    params: tuple[Param, ...] = ()
    if spec.accumulate:
        params += (
            tensor_map("c_in_map", "addend c", ("N", "M")),
            f32("beta", "factor of c; c is not read if it is 0"),
        )
    if spec.epilogue is not None and spec.epilogue.bias:
        params += (pointer("bias", "unsigned short", f"bias of C, one {spec.dtype} element for each row (M)"),)
    return params


def barriers(spec: BsrSpmmSpec, warpgroups: int) -> tuple[int, str]:
    """Bytes and description of a kernel's mbarriers, for ``warpgroups`` consumers."""
    kinds = [(spec.stages, "full"), (spec.stages, "empty")]
    kinds += [(warpgroups, "c_in of each warpgroup")] if spec.accumulate else []
    size = 8 * sum(count for count, _ in kinds)
    return size, f"mbarriers: {', then '.join(name for _, name in kinds)}"


def epilogue_constants(spec: BsrSpmmSpec, c_bytes: int) -> tuple[Constant, ...]:
    """Constants of c; a warpgroup loads ``c_bytes`` bytes of it."""
    return (Constant("kCInBytes", c_bytes, "bytes of c per warpgroup and tile"),) if spec.accumulate else ()


def epilogue_maps(spec: BsrSpmmSpec, c_map: TensorMap) -> dict[str, TensorMap]:
    """Tensor map of c, with the box of C."""
    return {"c_in_map": c_map} if spec.accumulate else {}


def epilogue_flags(spec: BsrSpmmSpec) -> EpilogueFlags:
    """Template parameters of the epilogue: the bias, the activation's name, and C as a formula."""
    product = "A^T B" if spec.transpose_a else "A B"
    product = f"{product} + beta c" if spec.accumulate else product
    adds_bias = spec.epilogue is not None and spec.epilogue.bias
    activation = "none" if spec.epilogue is None else spec.epilogue.activation
    finished = f"{product} + bias" if adds_bias else product
    finished = finished if activation == "none" else f"{activation}({finished})"
    return EpilogueFlags(
        adds_bias=adds_bias,
        activation=activation,
        formula=finished,
    )


def epilogue_summary(spec: BsrSpmmSpec) -> tuple[tuple[str, str], ...]:
    """Line for ``explain``, if there is an epilogue."""
    if spec.epilogue is None and not spec.accumulate:
        return ()
    return (("epilogue", f"C = {epilogue_flags(spec).formula}, in fp32"),)
