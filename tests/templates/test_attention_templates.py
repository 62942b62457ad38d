"""Attention templates are mostly CUDA, and what they render has nothing that only other kernels need."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from each import for_each

from codegen.library import TEMPLATES, NamedSpec, shipped_specs
from codegen.render import render

ATTENTION = TEMPLATES / "attention"
FILES = sorted(ATTENTION.rglob("*.j2"))
MOST_LINES = 250  # of a piece
# Share of the lines of a kernel's templates that have a tag, every import and macro included, or else an insertion.
MOST_LOGIC = {
    "attention/sm90a": 0.37,
    "attention/mma_sync": 0.31,
    "attention/patterns": 0.32,
    "attention_backward": 0.3,
}
LONGER = {"wmma.cu.j2"}  # a whole kernel
# Constants that are 1 by the size of a problem or a tile, or as the name of a barrier.
SIZES = {
    "kGroups": "a head of 64 is one column group",
    "kPieces": "of O's columns: few are worked on at a time where registers do not suffice for all",
    "kOGroups": "a head of 64 is one column group of O",
    "kVGroups": "steps of 128 keys and fewer are one group",
    "kScaleParts": "steps of no more keys than share a scale",
    "kQBoxes": "of rows that fill their warpgroups, Q is one copy",
    "kQPlaces": "places of Q, as many as fit",
    "kTileStages": "stages of Q, as many as fit",
    "kStages": "stages of K and V, as many as fit",
    "kSubTileWarpgroups": "warpgroups of a sub-tile of 64 rows",
    "kQSlices": "slices of Q in registers, as many as there is room for",
    "kTopK": "the shortest list",
    "kEarlyRounds": "tiles that are begun before an order is found, by the length of the lists",
    "kWarpgroupBarrier": "number of a barrier",
    "kConsumerWarpgroups": "a tile of 64 rows has one",
    "kWarpgroupQueries": "a warpgroup of the heads of one query",
    "kTileQueries": "a tile of the heads of one query",
    "kSubTileRows": "the same",
    "kBlockQueries": "the same",
}
every_file = for_each("path", lambda: FILES, lambda path: path.relative_to(ATTENTION).as_posix())


def sm_90a_kernels() -> list[NamedSpec]:
    """Shipped specs of attention on sm_90a."""
    return [named for named in shipped_specs() if named.spec.op == "attention" and named.spec.arch == "sm_90a"]


every_kernel = for_each("named", sm_90a_kernels, lambda named: named.stem)


@every_file
def test_a_template_is_short(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert path.name in LONGER or len(lines) <= MOST_LINES


@pytest.mark.parametrize("folder", MOST_LOGIC)
def test_templates_are_mostly_cuda(folder: str) -> None:
    """Every tag and every insertion counts."""
    frame = TEMPLATES / f"{folder}.cu.j2"
    paths = [*([frame] if frame.is_file() else []), *(TEMPLATES / folder).rglob("*.j2")]
    lines = [line for path in paths for line in path.read_text(encoding="utf-8").splitlines()]
    logic = [line for line in lines if "{%" in line or "{{" in line]
    assert len(logic) <= MOST_LOGIC[folder] * len(lines), f"{len(logic)} of {len(lines)} lines"


@every_kernel
def test_no_loop_or_constant_of_one_that_other_kernels_need(named: NamedSpec) -> None:
    ones = re.findall(r"^constexpr int (\w+) = 1;", render(named), re.MULTILINE)
    assert not set(ones) - SIZES.keys()


@every_kernel
def test_parameters_of_functions_are_read(named: NamedSpec) -> None:
    code = re.sub(r"//[^\n]*", "", render(named))
    for head, body in re.findall(r"^__device__ __forceinline__ ([^{;]*?\)) \{(.*?)^\}", code, re.MULTILINE | re.DOTALL):
        name = re.search(r"(\w+)\(", head)
        assert name is not None
        if name[1] in CONTRACTS:
            continue
        for parameter in re.findall(r"(\w+)(?:\)?\[[^\]]*\])*(?=,|\)$)", head[name.end() :]):
            assert re.search(rf"\b{parameter}\b", body), f"{name[1]}: {parameter}"


CONTRACTS = {  # functions whose parameters are those of all patterns, or of all scores
    "score_log2",
    "score_slope",
    "visible",
    "first_key_of",
    "last_key_of",
}
