"""NaN and infinity behind the ends of sequences, on sm_90a without a GPU: sources run on the host, thread by thread.

A weight of 0 times NaN is NaN, so a kernel clears what its blocks hold behind an end.
"""

from __future__ import annotations

import platform
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import host_gradients  # noqa: E402
import host_kernel  # noqa: E402
import host_sm90a  # noqa: E402
import spoiled_ends  # noqa: E402
from host_streams import pretend_stream  # noqa: E402

from codegen.library import NamedSpec, find_spec  # noqa: E402
from codegen.render import generate  # noqa: E402
from codegen.spec import AttentionSpec  # noqa: E402
from codegen.varlen_cases import VarlenCase  # noqa: E402
from runtime.kernels import arguments, attention, attention_backward, attention_fp8  # noqa: E402
from runtime.verify.attention import Case  # noqa: E402

RUNS = platform.machine() == "x86_64" and shutil.which("g++") is not None
pytestmark = pytest.mark.skipif(not RUNS, reason="needs g++, and the registers of an x86-64")
CPU = torch.device("cpu")
CASE = Case("behind", batch=4, heads=2, kv_heads=1, q_len=150, kv_len=333, lists="padded", counts="edges")
SEQUENCES = VarlenCase(
    *("behind", (70, 0, 1, 64, 33), (70, 0, 130, 64, 33)),
    **{"heads": 2, "kv_heads": 1, "before": 5, "after": 70, "sinks": "none", "window": (40, 3), "sink_keys": 10},
)
TOPK = {"kind": "topk", "k": 9, "block": {"q": 64, "kv": 64}}
COOPERATIVE = {"schedule": "cooperative"}
LENGTHS: dict[str, str | dict[str, Any]] = {
    "causal": "h100_causal_kv_lengths",
    "dense, heads of 64": "h100_dense_d64_kv_lengths",
    "parts of keys": {"pattern": {"kind": "dense"}, "kv_splits": 2, **COOPERATIVE, "tile": {"m": 64, "n": 64}},
    "packed heads": {"pattern": {"kind": "dense"}, "pack_gqa": 2, "sink": True},
    "strided": {"pattern": {"kind": "strided", "stride": 5, "local": 2, "block": 64}},
    "lists": {"pattern": TOPK},
    "two blocks of a step": {"pattern": TOPK, "tile": {"m": 64, "n": 128}},
    "two lists": {"pattern": {"kind": "block_lists", "block": {"q": 64, "kv": 128}, "mask": "causal"}},
    "shared loads": {"pattern": TOPK, "share_kv_loads": True, **COOPERATIVE, "tile": {"m": 128, "n": 64}},
}
FP8: dict[str, dict[str, Any]] = {
    "dense": {"pattern": {"kind": "dense"}},
    "lists": {"pattern": {"kind": "topk", "k": 5, "block": {"q": 128, "kv": 128}}},
    "lists of 64": {"pattern": TOPK | {"k": 5}, "scale_rows": {"q": 64, "k": 64}},
    "heads of 192": {"pattern": {"kind": "causal"}, "head_dim": 192},
}
PACKED = ("h100_varlen_causal_d64", "h100_varlen_window", "h100_varlen_lists128", "h100_varlen_causal_short")
GRADIENTS_OF_LENGTHS = ("h100_dense_kv_lengths_dq", "h100_dense_kv_lengths_dkdv", "h100_lengths_dq_dkdv")
PACKED_GRADIENTS = (
    *("h100_varlen_causal_d96_dq", "h100_varlen_causal_d256_dq", "h100_varlen_lists128_causal_d64_dq"),
    *("h100_varlen_window_d64_dkdv", "h100_varlen_causal_d256_dkdv", "h100_varlen_lists128_causal_d64_dkdv"),
    *("h100_varlen_dense_d64_dq_dkdv", "h100_varlen_causal_d80_dq_dkdv"),
    *("l4_varlen_causal_d64_dq", "l4_varlen_window_dkdv"),
)


@pytest.fixture(autouse=True)
def _on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_stream(monkeypatch)
    for module in (arguments, attention, attention_fp8, attention_backward):
        monkeypatch.setattr(module, "check_tensor", lambda *given: None)


def named(fields: str | dict[str, Any]) -> NamedSpec:
    if isinstance(fields, str):
        return find_spec(fields)
    return find_spec({"op": "attention", "arch": "sm_90a", "head_dim": 128, "kv_lengths": True, **fields})


def source_of(spec: NamedSpec) -> str:
    """A source whose two instructions that only shared loads have are C++."""
    source = generate(spec).source
    arrive = re.compile(r"(void mbarrier_arrive\(uint32 barrier, int arrivals\)) \{\n.*?\n\}\n", re.DOTALL)
    in_turn = r"\1 {\n  while (arrivals-- > 0) mbarrier_arrive(barrier);\n}\n"
    add = "inline unsigned __reduce_add_sync(unsigned lanes, unsigned value) {\n" + (
        "  for (int i = 16; i > 0; i /= 2) value += __shfl_xor_sync(lanes, value, i);\n  return value;\n}\n"
    )
    return arrive.sub(in_turn + add, source)


@pytest.mark.parametrize("name", LENGTHS)
def test_behind_the_lengths_of_batches(name: str, recorded: Callable[..., None], tmp_path: Path) -> None:
    spec = named(LENGTHS[name])
    source = source_of(spec)
    recorded(source, repr(CASE))
    kernel = host_sm90a.HostAttention(spec, tmp_path, source)
    assert not (wrong := spoiled_ends.wrong_behind_lengths(kernel, CASE, CPU)), "\n".join(wrong)


@pytest.mark.parametrize("name", FP8)
def test_behind_the_lengths_of_batches_in_fp8(name: str, recorded: Callable[..., None], tmp_path: Path) -> None:
    spec, case = named({"dtype": "e4m3", **FP8[name]}), replace(CASE, kv_len=533)
    recorded(generate(spec).source, repr(case))
    kernel = host_sm90a.HostKernel(spec, tmp_path)
    assert not (wrong := spoiled_ends.wrong_behind_lengths_in_fp8(kernel, case, CPU)), "\n".join(wrong)


@pytest.mark.parametrize("name", PACKED)
def test_around_packed_sequences(name: str, recorded: Callable[..., None], tmp_path: Path) -> None:
    spec = named(name)
    recorded(generate(spec).source, repr(SEQUENCES))
    kernel = host_sm90a.HostAttention(spec, tmp_path)
    assert not (wrong := spoiled_ends.wrong_around_sequences(kernel, SEQUENCES, CPU)), "\n".join(wrong)


@pytest.mark.parametrize("name", GRADIENTS_OF_LENGTHS)
def test_gradients_behind_the_lengths_of_batches(name: str, recorded: Callable[..., None], tmp_path: Path) -> None:
    spec = named(name)
    recorded(generate(spec).source, repr(CASE))
    kernel = host_gradients.HostKernel(spec, tmp_path)
    assert not (wrong := spoiled_ends.wrong_behind_lengths(kernel, CASE, CPU)), "\n".join(wrong)


@pytest.mark.parametrize("name", PACKED_GRADIENTS)
def test_gradients_around_packed_sequences(name: str, recorded: Callable[..., None], tmp_path: Path) -> None:
    spec = named(name)
    recorded(generate(spec).source, repr(SEQUENCES))
    host = host_gradients if name.startswith("h100") else host_kernel
    kernel = host.HostKernel(spec, tmp_path)
    assert not (wrong := spoiled_ends.wrong_around_sequences(kernel, SEQUENCES, CPU)), "\n".join(wrong)


@pytest.mark.parametrize(
    ("name", "was", "instead"),
    [
        ("h100_varlen_causal_d64", "clear_rows<kTileN, kKvGroupBytes>(v,", "static_cast<void>(v,"),
        ("h100_varlen_causal_d64", "max(first, 0) * kRowBytes", "(max(first, 0) + 1) * kRowBytes"),
        ("h100_varlen_lists128_causal_d64_dq", "kVOffset - kKOffset>(", "0>("),
        ("h100_varlen_window_d64_dkdv", "clear_rows<kTileM", "if (false) clear_rows<kTileM"),
    ],
    ids=["V", "the first row behind", "V of dQ", "Q and dO"],
)
def test_what_is_not_cleared_shows(
    name: str, was: str, instead: str, recorded: Callable[..., None], tmp_path: Path
) -> None:
    spec = named(name)
    source = generate(spec).source
    assert was in source
    changed = source.replace(was, instead)
    recorded(changed, repr(SEQUENCES))
    make: Any = host_sm90a.HostAttention if isinstance(spec.spec, AttentionSpec) else host_gradients.HostKernel
    assert spoiled_ends.wrong_around_sequences(make(spec, tmp_path, changed), SEQUENCES, CPU)


@pytest.mark.parametrize(
    ("fields", "was", "instead"),
    [
        ("h100_dense_d64_kv_lengths", "clear_rows<kTileN, kKvGroupBytes>(v,", "static_cast<void>(v,"),
        ("h100_dense_kv_lengths_dq", "clear_rows<kTileN", "if (false) clear_rows<kTileN"),
        ({"dtype": "e4m3", **FP8["dense"]}, "word = without_hidden(word, lane, keys_there);", ""),
        ({"dtype": "e4m3", **FP8["dense"]}, "key >= kv_end ? 1.0f : ", ""),
    ],
    ids=["V", "K and V of dQ", "a part of V^T", "scales of K"],
)
def test_what_is_not_cleared_behind_a_length_shows(
    fields: Any, was: str, instead: str, recorded: Callable[..., None], tmp_path: Path
) -> None:
    spec = named(fields)
    source, case = generate(spec).source, replace(CASE, kv_len=533)
    assert was in source
    changed = source.replace(was, instead)
    recorded(changed, repr(case))
    if isinstance(fields, dict):
        kernel: Any = host_sm90a.HostKernel(spec, tmp_path, changed)
        assert spoiled_ends.wrong_behind_lengths_in_fp8(kernel, case, CPU)
        return
    make: Any = host_sm90a.HostAttention if isinstance(spec.spec, AttentionSpec) else host_gradients.HostKernel
    assert spoiled_ends.wrong_behind_lengths(make(spec, tmp_path, changed), case, CPU)
