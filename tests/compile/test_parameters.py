"""The runtime's byte layout of Params is the compiler's."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("torch")

from codegen.library import NamedSpec, shipped_specs
from codegen.plan import i32, pointer, tensor_map
from codegen.plans import plan_for
from codegen.render import render
from runtime.compiler import run_nvrtc
from runtime.launch import ParameterLayout


def offsets_of_compiler(declarations: str, fields: list[str], arch: str) -> tuple[list[int], int]:
    """Return the offset of each field of Params, and its size, as NVRTC has them."""
    values = [f"(int)((const char*)&p.{field} - (const char*)&p)" for field in fields] + ["(int)sizeof(Params)"]
    stores = "".join(f"  out[{i}] = {value};\n" for i, value in enumerate(values))
    source = f'{declarations}\nextern "C" __global__ void k(int* out, Params p) {{\n{stores}}}\n'
    code, _ = run_nvrtc(source, "params.cu", "ptx", (f"--gpu-architecture={arch}",))
    ptx = code.decode()
    numbers = dict(re.findall(r"mov\.[bu]32\s+(%r\d+), (\d+);", ptx))
    found = re.findall(r"st\.global\.[bu]32\s+\[%rd\d+(?:\+(\d+))?\], (%r\d+|\d+);", ptx)
    by_place = {int(place or 0) // 4: int(numbers.get(value, value)) for place, value in found}
    assert len(by_place) == len(values), ptx
    *offsets, size = (by_place[i] for i in range(len(values)))
    return offsets, size


@pytest.mark.parametrize("named", shipped_specs(), ids=lambda named: named.stem)
def test_the_compiler_lays_params_out_in_the_same_way(named: NamedSpec) -> None:
    layout = ParameterLayout.of(plan_for(named).params)
    # The declarations suffice: everything up to the end of the struct, less the headers.
    source = render(named)
    source = source[: source.index("};", source.index("struct Params")) + 2]
    source = re.sub(r"#include.*", "struct __half; struct __nv_bfloat16;", source)
    offsets, size = offsets_of_compiler(source, list(layout.offsets), named.spec.arch)
    assert dict(zip(layout.offsets, offsets, strict=True)) == dict(layout.offsets)
    assert size == layout.size


def test_tensor_maps_are_aligned_and_numbers_packed_where_they_belong() -> None:
    layout = ParameterLayout.of((i32("n", ""), tensor_map("map", ""), pointer("p", "int", ""), i32("m", "")))
    assert dict(layout.offsets) == {"n": 0, "map": 64, "p": 192, "m": 200}
    assert layout.size == 256
    block = layout.pack({"n": 5, "m": -1})
    assert block[:4] == b"\5\0\0\0" and block[200:204] == b"\xff\xff\xff\xff"
    assert not any(block[4:200]) and not any(block[204:])


@pytest.mark.parametrize("values", [{"n": 1}, {"n": 1, "m": 2, "extra": 3}])
def test_a_parameter_that_one_side_does_not_know_is_an_error(values: dict[str, int]) -> None:
    layout = ParameterLayout.of((i32("n", ""), i32("m", "")))
    with pytest.raises(AssertionError, match="are on one side only"):
        layout.pack(values)
