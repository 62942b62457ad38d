"""block_sparse_attention of few queries up to the driver: the kernel, what it is given, and what takes another one."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from scripts import imported

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from codegen.select import few_queries as choice  # noqa: E402
from runtime import ArgumentError, block_sparse_attention, explain_attention, verified_only  # noqa: E402
from runtime.driver import launch  # noqa: E402
from runtime.kernels import few_queries as folded  # noqa: E402
from runtime.kernels.attention import AttentionResult  # noqa: E402
from runtime.kernels.paged_attention import UNBOUNDED  # noqa: E402
from runtime.ops import few_queries  # noqa: E402
from runtime.patterns import Causal, Dense, Score, SinkWindow, SlidingWindow, Strided  # noqa: E402

attention: Any = block_sparse_attention
BATCH, HEADS, KV_HEADS, KEYS, D = 3, 8, 2, 1024, 64
KEYS_OF_WINDOWS = ("window_left", "window_right", "sink_keys")


@pytest.fixture
def driver() -> Iterator[ModuleType]:
    with imported("pretended") as module, module.pretended():
        yield module


@pytest.fixture
def launches(driver: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The kernel and the parameters of each launch, by name."""
    found: list[dict[str, Any]] = []

    def launched(self: Any, signature: Any, addresses: Any, stream: int, *, prologue: bool = True) -> None:
        del stream, prologue
        values: dict[str, Any] = {"kernel": self.plan.stem, "signature": signature}
        values |= {name: addresses[name] for name, _ in signature.pointers}
        for name, kind in self.layout.types.items():
            if kind in ("i32", "i64", "f32"):
                (values[name],) = struct.unpack_from(launch._FORMATS[kind], signature.block, self.layout.offsets[name])
        found.append(values)

    monkeypatch.setattr(launch.LoadedKernel, "launch", launched)
    return found


def qkv(batch: int = BATCH, queries: int = 1, keys: int = KEYS, *, heads: int = HEADS, by_tokens: bool = False) -> Any:
    """q, k and v; with ``by_tokens`` transposed from (batch, length, heads, head_dim)."""

    def made(number: int, length: int) -> Any:
        if by_tokens:
            return torch.randn(batch, length, number, D).half().transpose(1, 2)
        return torch.randn(batch, number, length, D).half()

    return made(heads, queries), made(KV_HEADS, keys), made(KV_HEADS, keys)


def ints(*values: int) -> Any:
    return torch.tensor(values, dtype=torch.int32)


def is_decoded(launches: list[dict[str, Any]]) -> bool:
    return "paged" in launches[-1]["kernel"]


# What the kernel is given


def test_the_heads_of_contiguous_batches_are_those_of_one_request(launches: list[dict[str, Any]]) -> None:
    q, k, v = qkv(queries=5)
    out, lse = attention(q, k, v, Causal(), return_lse=True)
    (found,) = launches
    assert found["kernel"].startswith("paged_attention_sm_90a_fp16_d64") and out.stride() == q.stride()
    assert lse.shape == q.shape[:3] and lse.is_contiguous() and lse.dtype == torch.float32
    addresses = [found[name] for name in ("q", "k_cache", "v_cache", "out", "lse")]
    assert addresses == [tensor.data_ptr() for tensor in (q, k, v, out, lse)]
    assert (found["batch"], found["total_q"], found["request_queries"], found["max_keys"]) == (1, 5, 5, KEYS)
    assert (found["kv_heads"], found["group"]) == (BATCH * KV_HEADS, 4)
    assert (
        (found["q_token_stride"], found["q_head_stride"])
        == (D, 5 * D)
        == (
            found["out_token_stride"],
            found["out_head_stride"],
        )
    )
    assert [found[f"{axis}_chunks"] for axis in ("page", "token", "head")] == [0, 8, KEYS * 8]
    assert found["seq_lens"] == found["sink"] == found["block_table"] == found["lists"] == 0
    assert found["counters"] and found["partials"]


def test_queries_of_transposed_batches_are_tokens_of_requests(launches: list[dict[str, Any]]) -> None:
    q, k, v = qkv(queries=5, by_tokens=True)
    result = attention(q, k, v, Causal(), return_lse=True)
    (found,) = launches
    assert isinstance(result, AttentionResult) and result.out.stride() == q.stride()
    assert result.lse is not None and result.lse.is_contiguous() and result.lse.shape == q.shape[:3]
    assert (found["batch"], found["total_q"], found["request_queries"]) == (BATCH, BATCH * 5, 5)
    assert (found["q_token_stride"], found["q_head_stride"], found["out_head_stride"]) == (HEADS * D, D, D)
    row = KV_HEADS * D // 8
    assert [found[f"{axis}_chunks"] for axis in ("page", "token", "head")] == [KEYS * row, row, D // 8]


def test_queries_that_see_all_keys_are_heads_where_nothing_else_is_a_view(launches: list[dict[str, Any]]) -> None:
    q, (_, k, v) = qkv(queries=5)[0], qkv(by_tokens=True)
    attention(q, k, v, Dense())
    found = launches[-1]
    assert (found["batch"], found["total_q"], found["request_queries"]) == (BATCH, BATCH, 1)
    assert (found["kv_heads"], found["group"]) == (KV_HEADS, 4 * 5)
    assert (found["q_token_stride"], found["q_head_stride"]) == (HEADS * 5 * D, D)
    attention(q, k, v, Causal())
    assert not is_decoded(launches)


@pytest.mark.parametrize(
    ("pattern", "queries", "numbers"),
    [
        (Dense(), 2, (UNBOUNDED, UNBOUNDED, 0)),
        (Causal(), 2, (UNBOUNDED, 0, 0)),
        (Causal(), 1, (UNBOUNDED, UNBOUNDED, 0)),
        (SlidingWindow(600, 5), 2, (600, 5, 0)),
        (SinkWindow(4, 700), 1, (700, 0, 4)),
    ],
)
def test_patterns_are_windows(
    launches: list[dict[str, Any]], pattern: Any, queries: int, numbers: tuple[int, ...]
) -> None:
    attention(*qkv(queries=queries), pattern)
    assert is_decoded(launches) and tuple(launches[0][name] for name in KEYS_OF_WINDOWS) == numbers


def test_options_and_optional_tensors_reach_the_kernel(launches: list[dict[str, Any]]) -> None:
    sink, lengths = torch.zeros(HEADS), ints(1, 500, KEYS)
    tensors = qkv(by_tokens=True)
    for _ in range(2):
        attention(*tensors, Causal(), sink=sink, kv_lengths=lengths, scale=0.5, softcap=2)
        found = launches[-1]
        assert is_decoded(launches) and (found["sink"], found["seq_lens"]) == (sink.data_ptr(), lengths.data_ptr())
        assert found["softcap"] == 2.0 and found["scale_log2"] == pytest.approx(0.5 * 1.4426950408889634)
        assert (found["batch"], found["group"], found["lse"]) == (BATCH, 4, 0)
    assert launches[1]["signature"] is launches[0]["signature"]


def test_one_length_is_that_of_all_batches(launches: list[dict[str, Any]]) -> None:
    attention(*qkv(), Causal(), kv_lengths=ints(9))
    assert is_decoded(launches) and launches[-1]["batch"] == 1
    attention(*qkv(by_tokens=True), Causal(), kv_lengths=ints(9))
    assert not is_decoded(launches)  # of requests there would be one length each


def test_the_result_has_the_layout_of_q_or_is_the_output(launches: list[dict[str, Any]]) -> None:
    q, k, v = qkv(queries=2)
    packed = torch.zeros(BATCH, HEADS, 2, 3 * D).half()[..., :D]
    assert attention(packed, k, v, Causal()).is_contiguous() and is_decoded(launches)
    out = torch.empty_like(q)
    for calls in (1, 2, 3):
        assert attention(q, k, v, Causal(), out=out) is out
        assert launches[-1]["out"] == out.data_ptr() and out._version == calls
    assert is_decoded(launches)
    transposed = torch.empty(BATCH, 2, HEADS, D).half().transpose(1, 2)
    assert attention(q, k, v, Causal(), out=transposed) is transposed
    assert not is_decoded(launches)  # no view of both is (tokens, heads, head_dim)


# What takes another kernel


def test_calls_of_other_kinds_take_tiles(launches: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv(queries=2)
    wide = torch.randn(BATCH, KV_HEADS, KEYS, 2 * D).half()[..., :D]
    d96 = [torch.zeros(BATCH, number, length, 96).half() for number, length in ((HEADS, 2), (2, KEYS), (2, KEYS))]
    others: dict[str, Any] = {
        "score": lambda: attention(q, k, v, Causal(), score=Score("score + q_idx")),
        "top left": lambda: attention(q, k, v, Causal(align="top_left")),
        "strided": lambda: attention(q, k, v, Strided(3, 1, block=64)),
        "lengths of a diagonal": lambda: attention(q, k, v, Causal(), kv_lengths=ints(1, 2, 3)),
        "strides of v": lambda: attention(q, k, wide, Causal()),
        "few keys": lambda: attention(*qkv(keys=choice.LEAST_KEYS - 1), Causal()),
        "many rows": lambda: attention(*qkv(queries=17), Causal()),
        "heads of 96": lambda: attention(*d96, Causal()),
        "sinks of several batches": lambda: attention(q, k, v, Causal(), sink=torch.zeros(HEADS)),
        "a gradient": lambda: attention(q.clone().requires_grad_(), k, v, Causal()),
    }
    for name, call in others.items():
        for _ in range(2):
            call()
            assert not is_decoded(launches), name
    attention(q, k, v, Causal())
    assert is_decoded(launches)
    monkeypatch.setattr(few_queries, "has_receipt", lambda fields: False)
    attention(*qkv(queries=3), Causal())
    assert not is_decoded(launches)


def test_gradients_decide_in_later_calls_too(launches: list[dict[str, Any]]) -> None:
    q, k, v = qkv()
    learned = q.clone().requires_grad_()
    for _ in range(2):
        attention(learned, k, v, Causal(), return_lse=True)
        assert not is_decoded(launches)
        with torch.no_grad():
            attention(learned, k, v, Causal(), return_lse=True)
        assert is_decoded(launches)
        attention(q, k, v, Causal(), return_lse=True)
        assert is_decoded(launches)


def test_tensors_beyond_the_offsets_of_the_kernel_take_tiles() -> None:
    """Of sizes that no test has the memory for."""
    assert folded.reaches(((1, 2**20, 256, 64), (0, 64, 2**26, 1)), 2)
    assert not folded.reaches(((1, 2**20, 258, 64), (0, 64, 2**26, 1)), 2)
    assert not folded.reaches(((2, 2**20, 1, 64), (2**36, 64, 0, 1)), 2)


# Errors, checks and modes


def test_wrong_arguments_are_named_as_of_other_calls(launches: list[dict[str, Any]]) -> None:
    q, k, v = qkv()
    out = torch.empty_like(q)
    wrong: dict[str, tuple[dict[str, Any], str]] = {
        "v": ({"v": v[:, :, :-8]}, "v: has shape"),
        "type": ({"k": k.bfloat16()}, "k: is torch.bfloat16, q is torch.float16"),
        "strides": ({"k": torch.zeros(BATCH, KV_HEADS, KEYS, D + 4).half()[..., :D]}, "k: has stride"),
        "address": ({"q": torch.zeros(q.numel() + 1).half()[1:].view(q.shape)}, "q: .*16"),
        "address of k": ({"k": torch.zeros(k.numel() + 1).half()[1:].view(k.shape)}, "k: .*16"),
        "out": ({"out": out[..., :32]}, "out: has shape"),
        "out is q": ({"out": q}, "out: overlaps q in memory"),
        "out in k": ({"out": k.flatten()[: q.numel()].view(q.shape)}, "out: overlaps k in memory"),
        "sink": ({"sink": torch.zeros(HEADS + 1)}, "sink: has shape"),
        "lengths": ({"kv_lengths": ints(1, 2)}, "kv_lengths: has shape"),
        "scale": ({"scale": 0.0}, "scale: is 0.0"),
        "softcap": ({"softcap": 1e9}, "softcap: is"),
    }
    plain: dict[str, Any] = {"q": q, "k": k, "v": v, "pattern": Causal()}
    for warm in (False, True):
        for name, (changed, message) in wrong.items():
            if warm:
                attention(**plain, out=torch.empty_like(q))
                attention(**plain)
            count = len(launches)
            with pytest.raises(ArgumentError, match=f"^{message}"):
                attention(**{**plain, **changed})
            assert len(launches) == count, name


def test_values_are_checked_on_demand(launches: list[dict[str, Any]]) -> None:
    tensors = qkv()
    attention(*tensors, Causal(), kv_lengths=ints(5, 5, 5), validate=True)
    assert is_decoded(launches)
    with pytest.raises(ArgumentError, match="kv_lengths"):
        attention(*tensors, Causal(), kv_lengths=ints(5, 5, KEYS + 1), validate=True)
    assert len(launches) == 1


def test_the_mode_of_receipts_is_part_of_what_is_kept(launches: list[dict[str, Any]]) -> None:
    q, k, v = qkv()
    attention(q, k, v, Causal())
    with verified_only():
        attention(q, k, v, Causal())
    assert is_decoded(launches) and launches[1]["signature"] is not launches[0]["signature"]


def test_a_tensor_that_is_given_twice_is_two(launches: list[dict[str, Any]]) -> None:
    q, k, _ = qkv()
    for _ in range(2):
        attention(q, k, k, Causal())
        assert is_decoded(launches) and launches[-1]["k_cache"] == launches[-1]["v_cache"] == k.data_ptr()


def test_the_operator_and_its_fake_agree(launches: list[dict[str, Any]]) -> None:
    for by_tokens in (False, True):
        tensors = qkv(queries=2, by_tokens=by_tokens)
        with torch.autocast("cpu", enabled=False):
            real = torch.ops.sparse_kernel_codegen.block_sparse_attention(
                *tensors, [], None, None, None, Causal().spec_json, lse=True
            )
        assert is_decoded(launches)
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(tensor) for tensor in tensors]
            fake = attention(*fakes, Causal(), return_lse=True)
        for one, other in zip(real, fake, strict=True):
            assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


# The explanation


def meta(batch: int = BATCH, queries: int = 1, keys: int = 8192, head_dim: int = 128) -> list[Any]:
    shapes = (batch, HEADS, queries, head_dim), (batch, KV_HEADS, keys, head_dim)
    q, k = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes)
    return [q, k, k]


def test_the_explanation_names_the_kernel() -> None:
    told = explain_attention(*meta(), Causal(), arch="sm_90a")
    assert told.is_decoding and told.choice.named.stem == "h100_paged_d128_bf16"
    assert told.provenance["O"].is_verified and not told.tiles_reason
    assert "few queries: thread blocks divide the keys" in str(told)
    with verified_only():
        assert explain_attention(*meta(), Causal(), arch="sm_90a").choice.named == told.choice.named


@pytest.mark.parametrize(
    ("tensors", "pattern", "options", "reason"),
    [
        (meta(), Causal(), {"gradients": True}, "the call needs gradients"),
        (meta(), SlidingWindow(100), {}, "a query sees at most 101 keys, fewer than 128"),
        (meta(queries=4, batch=20), Causal(), {}, "its tiles fill the GPU"),
        (meta(head_dim=96), Causal(), {}, "no kernel for decoding with heads of 96 elements in bf16 has a receipt"),
        (meta(queries=2), Causal(), {"sink": torch.empty(HEADS, device="meta")}, "no views of its tensors are"),
    ],
)
def test_the_explanation_has_the_reason_for_another_kernel(
    tensors: list[Any], pattern: Any, options: dict[str, Any], reason: str
) -> None:
    told = explain_attention(*tensors, pattern, arch="sm_90a", **options)
    assert not told.is_decoding and told.tiles_reason.startswith(reason)
    assert f"few queries: no thread blocks divide the keys, because {reason}" in str(told)


def test_calls_with_many_queries_are_not_explained_by_few() -> None:
    told = explain_attention(*meta(queries=300), Causal(), arch="sm_90a")
    assert not told.is_decoding and "few queries" not in str(told)
