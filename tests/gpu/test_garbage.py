"""Whatever index tensors hold, a call ends, and what is out of range counts as tests/gpu/garbage.py says."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import key_list_garbage  # noqa: E402
import paged_garbage  # noqa: E402
from gpu import garbage, small_call  # noqa: E402

from codegen.library import NamedSpec, shipped_specs  # noqa: E402
from codegen.planning import plan_for  # noqa: E402
from runtime import load_kernel  # noqa: E402

PAGED = [named for named in shipped_specs() if paged_garbage.is_over_pages(named.spec)]
KEY_LISTS = [named for named in shipped_specs() if key_list_garbage.is_of_key_lists(named.spec)]
INDEXED = [named for named in shipped_specs() if garbage.has_indices(named.spec)]


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("named", INDEXED, ids=lambda named: named.stem)
def test_garbage_in_index_tensors_is_what_is_out_of_range(named: NamedSpec) -> None:
    if torch.cuda.get_device_capability() < plan_for(named).arch.compute_capability:
        pytest.skip(f"{named.stem} is written for a newer device")
    kernel = load_kernel(named, forward_compatible=True)
    positional, more = small_call.arguments_of(kernel.spec)
    for seed in range(small_call.ROUNDS):
        garbage.check(kernel, garbage.spoil(kernel.spec, positional, seed), more)


@pytest.mark.parametrize("named", PAGED, ids=lambda named: named.stem)
def test_garbage_in_tables_lengths_and_lists_of_pages(named: NamedSpec) -> None:
    if torch.cuda.get_device_capability() < plan_for(named).arch.compute_capability:
        pytest.skip(f"{named.stem} is written for a newer device")
    kernel = load_kernel(named, forward_compatible=True)
    for seed in range(small_call.ROUNDS):
        paged_garbage.check(kernel, seed, "cuda")


@pytest.mark.parametrize("named", KEY_LISTS, ids=lambda named: named.stem)
def test_garbage_in_lists_of_single_queries(named: NamedSpec) -> None:
    if torch.cuda.get_device_capability() < plan_for(named).arch.compute_capability:
        pytest.skip(f"{named.stem} is written for a newer device")
    kernel = load_kernel(named, forward_compatible=True)
    positional, more = small_call.arguments_of(kernel.spec)
    for seed in range(small_call.ROUNDS):
        key_list_garbage.check(kernel, positional, more, seed)
