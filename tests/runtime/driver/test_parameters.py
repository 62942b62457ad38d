"""The runtime's byte layout of Params is the compiler's."""

from __future__ import annotations

import re
from functools import partial

import pytest
from each import check_each

pytest.importorskip("torch")

from codegen.library import NamedSpec, shipped_specs
from codegen.plan import i32, pointer, tensor_map
from codegen.planning import plan_for
from codegen.render import render
from runtime.compile.compiler import run_nvrtc
from runtime.driver.launch import ParameterLayout

pytestmark = pytest.mark.nvrtc


def declarations(named: NamedSpec) -> str:
    """A source up to the end of its Params, less the headers: all that Params depend on."""
    source = render(named)
    return re.sub(r"#include.*", "", source[: source.index("};", source.index("struct Params")) + 2])


def types_of(text: str) -> str:
    """Declarations without comments, constants and assertions: kernels with the same ones have the same Params."""
    code = re.sub(r"(?:static )?constexpr[^;]*;|static_assert[^;]*;", "", re.sub(r"//.*", "", text))
    return re.sub(r"\s+", " ", code)


def layout_of(named: NamedSpec) -> ParameterLayout:
    return ParameterLayout.of(plan_for(named).params)


def words_of_compiler(arch: str) -> dict[str, list[int]]:
    """Offsets of the fields of Params, then their size, as NVRTC has them, by the types that they are declared with.

    One compilation for all: each has its declarations in a namespace, and a kernel that takes Params and stores these.
    """
    parts, symbols = ["struct __half; struct __nv_bfloat16;"], {}
    for named in (named for named in shipped_specs() if named.spec.arch == arch):
        text = declarations(named)
        if types_of(text) in symbols:
            continue
        symbols[types_of(text)] = named.stem
        params = f"of_{named.stem}::Params"
        values = [f"(int)((const char*)&p.{field} - (const char*)&p)" for field in layout_of(named).offsets]
        stores = "".join(f"  out[{i}] = {value};\n" for i, value in enumerate([*values, f"(int)sizeof({params})"]))
        kernel = f'extern "C" __global__ void {named.stem}(int* out, {params} p) {{\n{stores}}}\n'
        parts.append(f"namespace of_{named.stem} {{\n{text}\n}}\n{kernel}")
    code, _ = run_nvrtc("\n".join(parts), "params.cu", "ptx", (f"--gpu-architecture={arch}",))
    numbers = {stem: stored(body) for stem, body in re.findall(r"\.entry (\w+)\((.*?)\n}", code.decode(), re.S)}
    return {types: numbers[stem] for types, stem in symbols.items()}


def stored(body: str) -> list[int]:
    """Return what a kernel stores, by the place where it does."""
    numbers = dict(re.findall(r"mov\.[bu]32\s+(%r\d+), (\d+);", body))
    found = re.findall(r"st\.global\.[bu]32\s+\[%rd\d+(?:\+(\d+))?\], (%r\d+|\d+);", body)
    by_place = {int(place or 0) // 4: int(numbers.get(value, value)) for place, value in found}
    assert sorted(by_place) == list(range(len(found))), body
    return [by_place[place] for place in sorted(by_place)]


def check_layout(named: NamedSpec, words: list[int]) -> None:
    layout = layout_of(named)
    *offsets, size = words
    assert dict(zip(layout.offsets, offsets, strict=True)) == dict(layout.offsets)
    assert size == layout.size


def test_the_compiler_lays_params_out_in_the_same_way() -> None:
    specs = shipped_specs()
    words = {arch: words_of_compiler(arch) for arch in {named.spec.arch for named in specs}}
    types = {named.stem: types_of(declarations(named)) for named in specs}
    check_each({each.stem: partial(check_layout, each, words[each.spec.arch][types[each.stem]]) for each in specs})


def test_tensor_maps_are_aligned_and_numbers_packed_where_they_belong() -> None:
    layout = ParameterLayout.of((i32("n", ""), tensor_map("map", "", ()), pointer("p", "int", ""), i32("m", "")))
    assert dict(layout.offsets) == {"n": 0, "map": 64, "p": 192, "m": 200}
    assert layout.size == 256
    block = layout.pack({"n": 5, "m": -1})
    assert block[:4] == b"\5\0\0\0" and block[200:204] == b"\xff\xff\xff\xff"
    assert not any(block[4:200]) and not any(block[204:])


@pytest.mark.parametrize("values", [{"n": 1}, {"n": 1, "m": 2, "extra": 3}])
def test_a_parameter_that_one_side_does_not_know_is_an_error(values: dict[str, int]) -> None:
    layout = ParameterLayout.of((i32("n", ""), i32("m", "")))
    with pytest.raises(AssertionError, match="differ between struct and call"):
        layout.pack(values)
