"""Templates of BSR kernels read as CUDA: few tags; their sources have nothing that only other kernels need."""

from __future__ import annotations

import json
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from each import for_each
from jinja2 import nodes

from codegen.library import TEMPLATES, NamedSpec, find_spec, shipped_specs
from codegen.planning import plan_for
from codegen.render import Generated, environment, generate, render

MOST_TAGS = 0.12
"""Share of the lines of a template that may be tags; three lines are allowed in any."""
MORE_TAGS = {
    "common/declarations.cuh.j2": (0.48, "lists of what the plan declares: loops and little else"),
    "bsr_sddmm/mma.cu.j2": (0.13, "16 bits and FP8 side by side"),
    "bsr_spmm/mma.cu.j2": (0.20, "16 bits and FP8 side by side"),
    "bsr_spmm/mma_mainloop.cuh.j2": (0.14, "one slice or several, scales of blocks or none"),
    "bsr_spmm/wmma_loads.cuh.j2": (0.23, "by TMA, by cp.async or through registers, of B by columns or by rows"),
    "bsr_spmm/sliced_k.cuh.j2": (0.24, "three short macros, whose tags are the only ones"),
    "bsr_spmm/sm90a_swap_ab.cu.j2": (0.15, "11 of 21 are imports and includes: what differs is in the pieces"),
}
"""Templates with more, how many they have at most, and why."""
PIECES = [
    *sorted(path for folder in TEMPLATES.glob("bsr_*") for path in folder.glob("*.j2")),
    *(TEMPLATES / "common" / f"{name}.cuh.j2" for name in ("bsr", "bsr_steps", "declarations", "epilogue", "gathered")),
]


def bsr_specs() -> list[NamedSpec]:
    """Shipped specs of the operators of BSR matrices."""
    return [named for named in shipped_specs() if named.spec.op.startswith("bsr_")]


every_bsr_spec = for_each("named", bsr_specs, lambda named: named.stem)

OTHERS: list[dict[str, object]] = [
    {"like": "h100_bsr_spmm_b128_n8", "accumulate": True, "epilogue": {"bias": True, "activation": "relu"}},
    {"like": "h100_bsr_spmm_b64_pairs", "epilogue": {"bias": True, "activation": "silu"}},
    {"like": "h100_bsr_spmm_b16", "epilogue": {"bias": True}},
    {"like": "h100_bsr_spmm_b64_column_major_n64", "epilogue": {"bias": True}},
    {
        "like": "h100_bsr_spmm_b16",
        "tile": {"m": 16, "n": 512, "k": 64},
        "ctas_per_sm": 1,
        "stages": 2,
        "scheduler": "dynamic",
    },
]
"""Options that no shipped or otherwise compiled kernel has, in addition to the fields of a shipped spec."""

OF_ONE = {
    "kWarpgroupBarrier": "the number of a barrier, not of things",
    "kAGroups": "column groups of a block of 64",
    "kWarpgroupGroups": "column groups of a narrow tile's part",
    "kTileGroups": "column groups of a narrow tile",
    "kTileBlocks": "blocks of C of a tile, which may be as wide as one",
    "kStagingGroups": "no more than a part has column groups",
    "kStagingSlots": "as many as shared memory has room for",
    "kSteps": "block columns of 16 are one product deep",
    "kARowsPerLine": "rows of a deep tile are as long as a line of all banks",
    "kACopies": "a small tile is copied at once",
    "kAccumulateEvery": "a step at a time",
    "kWarpsN": "a narrow tile's warps are one above the other",
}
"""Constants that are 1, as a spec's sizes say, and why."""
THE_GRID = {"tiles", "runs"}
"""Parameters that a kernel with a thread block for each does not read: a host launches by them."""
CODE = re.compile(r"//[^\n]*")


def tags(path: Path) -> tuple[int, int]:
    """Count the lines of a template with tags, and all of them."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return sum("{%" in line for line in lines), len(lines)


@for_each("path", lambda: PIECES, lambda path: path.relative_to(TEMPLATES).as_posix())
def test_few_lines_of_a_template_are_tags(path: Path) -> None:
    with_tags, lines = tags(path)
    most, _ = MORE_TAGS.get(path.relative_to(TEMPLATES).as_posix(), (MOST_TAGS, ""))
    assert with_tags <= max(3, most * lines), f"{with_tags} of {lines} lines"


@pytest.mark.parametrize("name", MORE_TAGS)
def test_exceptions_are_needed(name: str) -> None:
    with_tags, lines = tags(TEMPLATES / name)
    assert with_tags > MOST_TAGS * lines


@cache
def generated() -> list[Generated]:
    """Sources of the shipped kernels, of those that other tests compile, and of other options."""
    compiled = json.loads((Path(__file__).parents[1] / "unshipped_bsr.json").read_text(encoding="utf-8"))
    others = [{**find_spec(str(like)).spec.model_dump(by_alias=True), **fields} for like, fields in map(_split, OTHERS)]
    return [generate(named) for named in [*bsr_specs(), *map(find_spec, [*compiled, *others])]]


def _split(fields: dict[str, object]) -> tuple[object, dict[str, object]]:
    return fields["like"], {name: value for name, value in fields.items() if name != "like"}


def test_every_template_is_used() -> None:
    used = {name for each in generated() for name in each.templates}
    assert not {path.relative_to(TEMPLATES).as_posix() for path in PIECES} - used


@cache
def lines_of_sources() -> frozenset[str]:
    return frozenset(line.strip() for each in generated() for line in each.source.splitlines())


def lines_of(template: Path) -> list[str]:
    """Lines of code of a template without tags and values, of all branches."""
    lines = []
    for output in environment().parse(template.read_text(encoding="utf-8")).find_all(nodes.Output):
        for place, node in enumerate(output.nodes):
            if isinstance(node, nodes.TemplateData):
                parts = [part.strip() for part in node.data.split("\n")]
                lines += parts[place > 0 : None if place == len(output.nodes) - 1 else -1]
    return [line for line in lines if line and not line.startswith("//")]


@for_each("path", lambda: PIECES, lambda path: path.relative_to(TEMPLATES).as_posix())
def test_every_line_of_a_template_is_used(path: Path) -> None:
    """Alternatives of one file, too, are those of a kernel."""
    unused = [line for line in lines_of(path) if line not in lines_of_sources()]
    assert not [line for line in unused if not any(line in each for each in lines_of_sources())]


def numbers(source: str) -> dict[str, int]:
    """Return the constants of a source that are written as numbers, byte offsets aside."""
    found = re.findall(r"^constexpr int (k\w+) = (\d+);", source, re.MULTILINE)
    return {name: int(value) for name, value in found if not name.endswith("Offset")}


@every_bsr_spec
def test_no_constant_is_there_for_other_kernels_alone(named: NamedSpec) -> None:
    found = numbers(render(named))
    assert len(found) > 5
    assert not {name for name, value in found.items() if value == 0} - {"kEndsWork"}  # bits of a step
    assert not {name for name, value in found.items() if value == 1} - OF_ONE.keys()


def test_constants_of_one_exist() -> None:
    found = [numbers(render(named)) for named in bsr_specs()]
    assert not {name for name in OF_ONE if not any(known.get(name) == 1 for known in found)}


@every_bsr_spec
def test_every_parameter_is_read(named: NamedSpec) -> None:
    plan, code = plan_for(named), CODE.sub("", render(named))
    unread = {param.name for param in plan.params if not re.search(rf"\bp\.{param.name}\b", code)}
    assert unread <= (set() if plan.persistent else THE_GRID)


@every_bsr_spec
def test_a_definition_is_referred_to(named: NamedSpec) -> None:
    code = CODE.sub("", render(named))
    names = re.findall(
        r"^(?:constexpr \w+|using|struct(?: alignas\(64\))?|__device__ __forceinline__ [\w:<>*& ]+?[ *&]) ?(\w+)",
        code,
        re.M,
    )
    assert len(names) > 10
    words = Counter(re.findall(r"\w+", code))
    assert not [name for name in names if words[name] < 2]


@every_bsr_spec
def test_arguments_of_device_functions_are_read(named: NamedSpec) -> None:
    """No function takes what only its namesake in other kernels needs."""
    code = CODE.sub("", render(named))
    functions = re.findall(r"^__device__ [^(;]*?(\w+)\(([^{;]*?)\) \{([^\n]*\}$|\n.*?^\})", code, re.M | re.S)
    assert functions
    for name, given, body in functions:
        for argument in re.sub(r"\[[^\]]*\]", "", given).split(","):
            found = re.findall(r"\w+", argument)
            assert not found or re.search(rf"\b{found[-1]}\b", body), (name, found[-1])


@every_bsr_spec
def test_descriptors_are_prefetched(named: NamedSpec) -> None:
    """All tensor maps that a persistent kernel copies by, those of c and of what a prologue reads aside."""
    plan, code = plan_for(named), CODE.sub("", render(named))
    maps = set(plan.tensor_maps) - {"c_in_map", "b_columns_map"}
    assert set(re.findall(r"prefetch_tensormap\(&p\.(\w+)\)", code)) == maps
