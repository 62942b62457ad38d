"""NaN and infinity behind the ends of sequences, in every shipped kernel with lengths or packed sequences."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import spoiled_ends  # noqa: E402

from codegen.library import NamedSpec, find_spec, shipped_specs  # noqa: E402
from codegen.planning import plan_for  # noqa: E402
from codegen.spec import AttentionBackwardSpec, AttentionSpec  # noqa: E402
from codegen.varlen_cases import VarlenCase  # noqa: E402
from runtime import load_kernel  # noqa: E402
from runtime.verify.attention import Case  # noqa: E402

CASE = Case("behind", batch=4, heads=4, kv_heads=2, q_len=333, kv_len=700, lists="padded", counts="edges")
SEQUENCES = VarlenCase(
    *("behind", (333, 0, 1, 129, 64, 700), (333, 0, 130, 129, 64, 700)),
    **{"heads": 4, "kv_heads": 2, "before": 37, "after": 150, "sinks": "none", "window": (100, 30), "sink_keys": 10},
)
FP8_SPECS = (
    {"pattern": {"kind": "dense"}},
    {"pattern": {"kind": "causal"}, "head_dim": 192},
    {"pattern": {"kind": "topk", "k": 5, "block": {"q": 128, "kv": 128}}},
    {"pattern": {"kind": "topk", "k": 9, "block": {"q": 64, "kv": 64}}, "scale_rows": {"q": 64, "k": 64}},
)


def of_attention(named: NamedSpec) -> bool:
    return isinstance(named.spec, AttentionSpec | AttentionBackwardSpec)


LENGTHS = [n for n in shipped_specs() if of_attention(n) and getattr(n.spec, "kv_lengths", False)]
PACKED = [n for n in shipped_specs() if of_attention(n) and getattr(n.spec, "layout", "") == "varlen"]


def skip_on_older(named: NamedSpec) -> None:
    if torch.cuda.get_device_capability() < plan_for(named).arch.compute_capability:
        pytest.skip(f"{named.stem} is written for a newer device")


@pytest.mark.parametrize("named", LENGTHS, ids=lambda named: named.stem)
def test_what_is_behind_the_length_has_no_effect(named: NamedSpec) -> None:
    skip_on_older(named)
    kernel = load_kernel(named, forward_compatible=True)
    wrong = spoiled_ends.wrong_behind_lengths(kernel, CASE, torch.device("cuda", 0))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("named", PACKED, ids=lambda named: named.stem)
def test_what_is_around_a_sequence_has_no_effect(named: NamedSpec) -> None:
    skip_on_older(named)
    kernel = load_kernel(named, forward_compatible=True)
    wrong = spoiled_ends.wrong_around_sequences(kernel, SEQUENCES, torch.device("cuda", 0))
    assert not wrong, "\n".join(wrong)


@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs sm_90")
@pytest.mark.parametrize("fields", FP8_SPECS, ids=str)
def test_what_is_behind_the_length_has_no_effect_in_fp8(fields: dict[str, object]) -> None:
    common = {"op": "attention", "arch": "sm_90a", "dtype": "e4m3", "head_dim": 128, "kv_lengths": True}
    named = find_spec({**common, **fields})
    wrong = spoiled_ends.wrong_behind_lengths_in_fp8(load_kernel(named), CASE, torch.device("cuda", 0))
    assert not wrong, "\n".join(wrong)
