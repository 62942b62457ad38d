"""C header of an exported kernel: macros, and the parameter struct with assertions of its offsets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from codegen.tools.descriptor import KernelFacts, LaunchRecord, TensorMapRecord
from codegen.wording import in_comment

_C_TYPES = {
    "tensor_map": "{symbol}_tensor_map",
    "pointer": "CUdeviceptr",
    "i64": "int64_t",
    "i32": "int32_t",
    "f32": "float",
}


def c_header(facts: KernelFacts, launch: LaunchRecord | None) -> str:
    """Text of the header; it requires cuda.h, and C11 or C++11."""
    prefix = facts.symbol.upper()
    lines = [
        f"/* {facts.symbol}: data for its launch, as in kernel.json next to this file.",
        " * Written by `codegen export`; docs/guide/export.md of sparse-kernel-codegen describes it. Do not edit. */",
        f"#ifndef {prefix}_H",
        f"#define {prefix}_H",
        "",
        "#include <cuda.h>",
        "#include <stddef.h>",
        "#include <stdint.h>",
        "",
        *_dialect(prefix),
        "",
        *_defines(prefix, _macros(facts)),
        "",
        "/* Constants of the source that the comments below refer to. */",
        *_defines(prefix, ((name, _literal(value)) for name, value in facts.constants.items())),
        "",
        *(line for told in facts.tensor_maps for line in (*_tensor_map(prefix, told), "")),
        *_struct(facts),
        "",
        *(_launch(prefix, launch) if launch is not None else ()),
        f"#endif /* {prefix}_H */",
    ]
    return "\n".join(lines) + "\n"


def _macros(facts: KernelFacts) -> Iterator[tuple[str, object]]:
    yield "SYMBOL", f'"{facts.symbol}"'
    yield "COMPUTE_CAPABILITY_MAJOR", facts.compute_capability[0]
    yield "COMPUTE_CAPABILITY_MINOR", facts.compute_capability[1]
    yield "BLOCK", facts.block[0]
    yield "DYNAMIC_SHARED_BYTES", facts.dynamic_shared_bytes
    yield "CLUSTER", facts.cluster[0]
    yield "CTAS_PER_SM", facts.grid.ctas_per_sm
    yield "PERSISTENT", int(facts.grid.persistent)
    yield "EVEN_ROUNDS", int(facts.grid.even_rounds)
    if facts.prologue is not None:
        yield "PROLOGUE_SYMBOL", f'"{facts.prologue.symbol}"'
        yield "PROLOGUE_BLOCK", facts.prologue.block[0]
        yield "PROLOGUE_DYNAMIC_SHARED_BYTES", facts.prologue.dynamic_shared_bytes
        yield (
            "PROLOGUE_PROGRAMMATIC_STREAM_SERIALIZATION",
            int(facts.prologue.programmatic_stream_serialization),
        )
    if facts.epilogue is not None:
        yield "EPILOGUE_SYMBOL", f'"{facts.epilogue.symbol}"'
        yield "EPILOGUE_BLOCK", facts.epilogue.block[0]


def _tensor_map(prefix: str, told: TensorMapRecord) -> list[str]:
    """Macros of the arguments of cuTensorMapEncodeTiled that the kernel fixes."""
    name = told.param.upper()
    dims = ", ".join(told.global_dim)
    return [
        f"/* {told.param}: tensor map of {told.tensor}, globalDim {{{_words(dims)}}}. */",
        *_defines(
            f"{prefix}_{name}",
            [
                ("DATA_TYPE", told.data_type),
                ("RANK", told.rank),
                ("BOX_DIM", _braces(told.box_dim)),
                ("ELEMENT_STRIDES", _braces(told.element_strides)),
                ("INTERLEAVE", told.interleave),
                ("SWIZZLE", told.swizzle),
                ("L2_PROMOTION", told.l2_promotion),
                ("OOB_FILL", told.oob_fill),
            ],
        ),
    ]


def _struct(facts: KernelFacts) -> list[str]:
    """The parameter struct and assertions of its layout."""
    name = f"{facts.symbol}_params"
    lines = _tensor_map_type(facts) if facts.tensor_maps else []
    lines += ["/* The kernel's only parameter, by value. */", f"struct {name} {{"]
    for param in facts.params:
        kind = _C_TYPES[param.type].format(symbol=facts.symbol)
        lines.append(f"  {kind} {param.name}; /* {_words(param.what)} */")
    checks = [(f"sizeof(struct {name}) == {facts.params_bytes}", "size")]
    checks += [(f"offsetof(struct {name}, {param.name}) == {param.offset}", param.name) for param in facts.params]
    prefix = facts.symbol.upper()
    return [
        *lines,
        "};",
        "",
        *(f'{prefix}_ASSERT({check}, "{what}");' for check, what in checks),
    ]


def _tensor_map_type(facts: KernelFacts) -> list[str]:
    """Type of a tensor map with the kernel's alignment: cuda.h of CUDA 13 aligns CUtensorMap to 128 bytes."""
    prefix = facts.symbol.upper()
    return [
        "/* The bytes of a CUtensorMap: encode one and copy it (its alignment depends on the CUDA version). */",
        "typedef struct {",
        f"  {prefix}_ALIGNAS(64) unsigned char bytes[128];",
        f"}} {facts.symbol}_tensor_map;",
        "",
    ]


def _dialect(prefix: str) -> list[str]:
    """Macros that differ between C and C++."""
    return [
        "#ifdef __cplusplus",
        f"#define {prefix}_ASSERT static_assert",
        f"#define {prefix}_ALIGNAS alignas",
        "#else",
        f"#define {prefix}_ASSERT _Static_assert",
        f"#define {prefix}_ALIGNAS _Alignas",
        "#endif",
    ]


def _launch(prefix: str, launch: LaunchRecord) -> list[str]:
    """Launch of the problem of the given shape."""
    macros: list[tuple[str, object]] = [(f"SHAPE_{name.upper()}", size) for name, size in launch.shape.items()]
    macros += [
        ("LAUNCH_SM_COUNT", launch.sm_count),
        ("LAUNCH_GRID", launch.grid[0]),
        ("LAUNCH_BLOCK", launch.block[0]),
        ("LAUNCH_DYNAMIC_SHARED_BYTES", launch.dynamic_shared_bytes),
    ]
    if launch.prologue_grid is not None:
        macros.append(("LAUNCH_PROLOGUE_GRID", launch.prologue_grid[0]))
    if launch.epilogue_grid is not None:
        macros.append(("LAUNCH_EPILOGUE_GRID", launch.epilogue_grid[0]))
    macros += [(f"WORKSPACE_{name.upper()}_BYTES", size) for name, size in launch.workspace.items()]
    assigned = [f"    (params)->{name} = {value}; \\" for name, value in launch.numbers.items()]
    return [
        "/* A launch of a problem of this shape, on a device with this number of multiprocessors. */",
        *_defines(prefix, macros),
        "",
        "/* Sets the parameters that depend on the shape. */",
        f"#define {prefix}_SET_NUMBERS(params) \\",
        "  do { \\",
        *assigned,
        "  } while (0)",
        "",
    ]


def _defines(prefix: str, macros: Iterable[tuple[str, object]]) -> list[str]:
    return [f"#define {prefix}_{name} {value}" for name, value in macros]


def _literal(value: float) -> str:
    """Number as a C literal; true is 1."""
    return f"{value!r}f" if isinstance(value, float) else str(int(value))


def _braces(values: Iterable[int]) -> str:
    return f"{{{', '.join(map(str, values))}}}"


def _words(text: str) -> str:
    """Text that cannot end its comment."""
    return in_comment(text).replace("*/", "* /")
