"""The case table of `codegen verify`, one test a kernel and case. A failure prints how to repeat it."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from codegen.library import NamedSpec, find_spec, shipped_names  # noqa: E402
from codegen.planning import plan_for  # noqa: E402
from runtime.kernel import Kernel, load_kernel  # noqa: E402
from runtime.verify.common import summary  # noqa: E402
from runtime.verify.run import run_case, verification_of  # noqa: E402


def cases_of(named: NamedSpec) -> tuple[Any, ...]:
    return verification_of(named.spec).cases(plan_for(named), named.spec)


BSR = {"op": "bsr_spmm", "arch": "sm_90a"}
PAIRS = [(name, case) for name in shipped_names() for case in cases_of(find_spec(name))]


@cache
def kernel_of(name: str) -> Kernel:
    return load_kernel(name, forward_compatible=True)


def skip_if_newer_than_the_device(named: NamedSpec) -> None:
    needed = plan_for(named).arch.compute_capability
    if torch.cuda.get_device_capability() < needed:
        pytest.skip(f"{named.stem} is written for sm_{needed[0]}{needed[1]}")


@pytest.mark.parametrize(("name", "case"), PAIRS, ids=[f"{name}-{case.name}" for name, case in PAIRS])
def test_case(name: str, case: Any) -> None:
    named = find_spec(name)
    skip_if_newer_than_the_device(named)
    outcome = run_case(kernel_of(name), case, torch.device("cuda", 0))
    assert outcome.passed, f"{outcome}\nrepeat: pytest tests/gpu/test_cases.py -k {name}-{case.name}"


OF_ATTENTION = [name for name in shipped_names() if find_spec(name).spec.op.startswith("attention")]


@pytest.mark.parametrize("name", OF_ATTENTION)
def test_random_shapes(name: str) -> None:
    skip_if_newer_than_the_device(find_spec(name))
    kernel, device = kernel_of(name), torch.device("cuda", 0)
    shapes = verification_of(kernel.spec).random_cases(kernel.spec)
    outcome = summary("random_shapes", [run_case(kernel, case, device) for case in shapes])
    assert outcome.passed, f"{outcome}\nrepeat: pytest tests/gpu/test_cases.py -k 'random_shapes and {name}'"


TESTS = Path(__file__).parents[1]
# What no shipped spec is: small blocks by mma.sync on sm_90a, and sampled ones by WGMMA; BSR x dense with B stored by
# columns, and scheduled dynamically with other rings than shipped ones have, and with accumulate.
UNSHIPPED_BSR: list[dict[str, Any]] = [
    *(
        {"op": op, "mma": "mma", "block": {"rows": size, "cols": size}, "dtype": dtype}
        for op, size, dtype in (
            ("bsr_sddmm", 32, "fp16"),
            ("bsr_sddmm", 16, "bf16"),
            ("bsr_spgemm", 32, "bf16"),
            ("bsr_spgemm", 16, "fp16"),
        )
    ),
    *(
        {"op": "bsr_sddmm", "block": {"rows": rows, "cols": cols}, **more}
        for rows, cols, more in (
            (32, 32, {"dtype": "bf16"}),
            (32, 32, {"tile": {"m": 32, "n": 256, "k": 64}, "ctas_per_sm": 2}),
            (16, 16, {"dtype": "bf16", "tile": {"m": 16, "n": 128, "k": 64}, "ctas_per_sm": 3}),
            (16, 16, {"tile": {"m": 16, "n": 512, "k": 64}}),
            (16, 32, {"dtype": "bf16", "tile": {"m": 16, "n": 128, "k": 64}, "stages": 5}),
            (32, 16, {}),
            (64, 128, {"a_layout": "column_major", "b_layout": "column_major"}),
            (128, 64, {"a_layout": "column_major", "dtype": "bf16"}),
            (128, 64, {"b_layout": "column_major", "tile": {"m": 128, "n": 128, "k": 64}}),
        )
    ),
    *(
        {"block": {"rows": rows, "cols": cols}, "b_layout": "column_major", **more}
        for rows, cols, more in (
            (128, 128, {}),
            (64, 64, {"dtype": "bf16"}),
            (64, 128, {"tile": {"m": 64, "n": 128, "k": 64}, "epilogue": {"bias": True}}),
            (128, 64, {"scheduler": "dynamic", "accumulate": True, "stages": 3}),
            (32, 32, {}),
            (16, 16, {"tile": {"m": 16, "n": 512, "k": 32}, "stages": 3, "ctas_per_sm": 2}),
            (16, 32, {"scheduler": "dynamic", "accumulate": True, "tile": {"m": 16, "n": 128, "k": 32}}),
            (32, 16, {"tile": {"m": 32, "n": 1024, "k": 16}, "stages": 3, "dtype": "bf16"}),
            (64, 128, {"transpose_a": True, "dtype": "bf16", "epilogue": {"bias": True}}),
            (128, 64, {"transpose_a": True, "tile": {"m": 64, "n": 128, "k": 64}}),
            (64, 128, {"tile": {"m": 128, "n": 128, "k": 64}, "dtype": "bf16"}),
            (128, 64, {"mma": "mma", "dtype": "bf16"}),
            (32, 64, {"mma": "mma", "tile": {"m": 32, "n": 512, "k": 16}}),
            (16, 128, {"mma": "mma", "tile": {"m": 16, "n": 128, "k": 64}, "stages": 2}),
            (64, 64, {"mma": "mma", "tile": {"m": 64, "n": 128, "k": 32}}),
            (64, 16, {"mma": "wmma", "copy": "cp_async"}),
            *(
                (rows, cols, {"b_layout": "row_major", "tile": {"m": 384, "n": 128, "k": cols}, "stages": 3, **more})
                for rows, cols, more in ((16, 16, {"dtype": "bf16"}), (16, 32, {}), (32, 16, {"stages": 2}))
            ),
            (256, 112, {"mma": "wmma", "copy": "tma", "tile": {"m": 256, "n": 128, "k": 112}, "stages": 2}),
            (16, 64, {"mma": "wmma", "copy": "ld_global", "dtype": "bf16", "tile": {"m": 16, "n": 64, "k": 64}}),
        )
    ),
    *(
        {"block": {"rows": size, "cols": size}, "scheduler": "dynamic", **more}
        for size, more in (
            (128, {"tile": {"m": 128, "n": 256, "k": 32}, "stages": 2}),  # the ring holds no block: asks at the end
            (128, {"accumulate": True, "stages": 3}),
            (64, {"tile": {"m": 64, "n": 256, "k": 64}, "stages": 4, "epilogue": {"bias": True, "activation": "silu"}}),
            (32, {"tile": {"m": 32, "n": 256, "k": 128}, "stages": 2, "accumulate": True}),
            (16, {"tile": {"m": 16, "n": 512, "k": 32}, "stages": 3, "ctas_per_sm": 2}),
        )
    ),
    # By mma.sync and WMMA every block size and type; tiles and options whose siblings are shipped.
    *json.loads((TESTS / "unshipped_bsr.json").read_text(encoding="utf-8")),
]


@pytest.mark.parametrize("fields", UNSHIPPED_BSR, ids=lambda fields: find_spec(BSR | fields).stem)
def test_unshipped_bsr(fields: dict[str, Any]) -> None:
    named, device = find_spec(BSR | fields), torch.device("cuda", 0)
    skip_if_newer_than_the_device(named)
    kernel = load_kernel(BSR | fields, forward_compatible=True)
    outcomes = [run_case(kernel, case, device) for case in cases_of(named)]
    wrong = [outcome for outcome in outcomes if not outcome.passed]
    assert not wrong, "\n".join(map(str, wrong))


# Tiles that no shipped spec has: their cases run here, not by `codegen verify`.
UNSHIPPED = json.loads((TESTS / "unshipped_attention.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("fields", UNSHIPPED, ids=lambda fields: find_spec(fields).stem)
def test_unshipped_tiles(fields: dict[str, Any]) -> None:
    named, device = find_spec(fields), torch.device("cuda", 0)
    skip_if_newer_than_the_device(named)
    kernel = load_kernel(fields, forward_compatible=True)
    shapes = verification_of(kernel.spec).random_cases(kernel.spec)
    outcomes = [run_case(kernel, case, device) for case in (*cases_of(named), *shapes)]
    wrong = [outcome for outcome in outcomes if not outcome.passed]
    assert not wrong, "\n".join(map(str, wrong))
