"""On sm_89 every pattern, type, head dimension and block size has a kernel that runs, by mma.sync and by WMMA.

Shipped kernels are verified, and those of tests/unshipped_*.json run in tests/gpu/test_cases.py: a value that no kernel
of these has would never run.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from codegen.block_sizes import KEYS
from codegen.dtypes import DTYPES, FP8
from codegen.library import find_spec, shipped_specs
from codegen.patterns import PATTERNS
from codegen.plans.attention import wmma as attention_wmma
from codegen.plans.bsr import sddmm_multistage as bsr_sddmm_multistage
from codegen.plans.bsr import spgemm_multistage as bsr_spgemm_multistage
from codegen.plans.bsr import spmm_mma as bsr_spmm_mma
from codegen.select.backward import BLOCK_SIZES
from codegen.select.backward import HEAD_DIMS as BACKWARD_HEAD_DIMS
from codegen.spec import AttentionBackwardSpec, AttentionSpec, Spec, TileCopySpec

UNSHIPPED = [
    fields
    for path in sorted(Path(__file__).parents[1].glob("unshipped_*.json"))
    for fields in json.loads(path.read_text(encoding="utf-8"))
]
HEAD_DIMS = (64, 96, 128, 192, 256)
WMMA_SIDES = (16, 32, 64, 128)  # not blocks of 256 rows and of 112 columns, which only the ladder on sm_90a has


def values(spec: Spec, field: str) -> set[object]:
    """The values of a spec for a field, ``block`` being both of its sides."""
    if field in ("dtype", "head_dim"):
        return {getattr(spec, field)}
    if isinstance(spec, AttentionBackwardSpec) and field == "gradients":
        return {spec.gradients}
    if isinstance(spec, AttentionSpec | AttentionBackwardSpec):
        block = spec.pattern.fixed_block
        if field == "pattern":
            return {spec.pattern.kind}
        return set() if block is None else {("q", block.q), ("kv", block.kv)}
    assert not isinstance(spec, TileCopySpec)
    return {("rows", spec.block.rows), ("cols", spec.block.cols)}


def sides(names: tuple[str, str], sizes: tuple[int, ...]) -> set[object]:
    return {(name, size) for name in names for size in sizes}


ROWS_AND_COLUMNS, QUERIES_AND_KEYS = ("rows", "cols"), ("q", "kv")


@pytest.mark.parametrize(
    ("op", "mma", "field", "wanted"),
    [
        ("attention", "mma", "pattern", set(PATTERNS)),
        ("attention", "mma", "head_dim", set(HEAD_DIMS)),
        ("attention", "mma", "block", sides(QUERIES_AND_KEYS, KEYS["mma"])),
        ("attention_backward", "mma", "gradients", {"dq", "dkdv"}),
        ("attention_backward", "mma", "pattern", {kind for kind, each in PATTERNS.items() if each.queries is not None}),
        ("attention_backward", "mma", "head_dim", set(BACKWARD_HEAD_DIMS["mma"])),
        ("attention_backward", "mma", "block", sides(QUERIES_AND_KEYS, BLOCK_SIZES)),
        ("attention", "wmma", "pattern", set(PATTERNS)),
        ("attention", "wmma", "head_dim", set(attention_wmma.HEAD_DIMS)),
        ("attention", "wmma", "block", sides(QUERIES_AND_KEYS, attention_wmma.BLOCKS)),
        ("bsr_spmm", "mma", "block", sides(ROWS_AND_COLUMNS, bsr_spmm_mma.BLOCK_SIDES)),
        ("bsr_spmm", "wmma", "block", sides(ROWS_AND_COLUMNS, WMMA_SIDES)),
        *(
            (op, mma, "block", sides(ROWS_AND_COLUMNS, tuple(sizes)))
            for op, sizes in (("bsr_sddmm", bsr_sddmm_multistage.SIZES), ("bsr_spgemm", bsr_spgemm_multistage.PARTS))
            for mma in ("mma", "wmma")
        ),
        *(
            (op, mma, "dtype", set(DTYPES) - set(FP8))
            for op in ("attention", "bsr_spmm", "bsr_sddmm", "bsr_spgemm")
            for mma in ("mma", "wmma")
        ),
        ("attention_backward", "mma", "dtype", set(DTYPES) - set(FP8)),
    ],
)
def test_every_value_has_a_kernel_that_runs(op: str, mma: str, field: str, wanted: set[object]) -> None:
    specs = [named.spec for named in (*shipped_specs(), *map(find_spec, UNSHIPPED))]
    found = [values(s, field) for s in specs if (s.op, s.arch, s.mma) == (op, "sm_89", mma)]
    assert wanted <= set().union(*found)
