"""verified_only: kernels without a receipt are refused, or the nearest one with a receipt that computes the same."""

from __future__ import annotations

import asyncio
import json
import pickle
import shlex
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import bsr_oracle  # noqa: E402
import oracle_kernel  # noqa: E402

import runtime  # noqa: E402
from codegen import provenance  # noqa: E402
from codegen.errors import SpecError  # noqa: E402
from codegen.library import NamedSpec, find_spec  # noqa: E402
from codegen.receipts import Receipt, receipt_path, write_receipt  # noqa: E402
from codegen.render import render  # noqa: E402
from codegen.select import choose  # noqa: E402
from codegen.select.backward import backward_kernels  # noqa: E402
from codegen.select.shipped import Verified  # noqa: E402
from runtime import (  # noqa: E402
    ArgumentError,
    ToolchainError,
    UnverifiedError,
    block_sparse_attention,
    explain_attention,
    explain_matmul,
    load_kernel,
    verified_only,
)
from runtime import kernel as loading  # noqa: E402
from runtime.ops import attention_calls, attention_choice, attention_gradients, bsr_choice  # noqa: E402
from runtime.patterns import Causal  # noqa: E402
from runtime.receipts import mode, own, permit  # noqa: E402

Make = Callable[[NamedSpec, str], Receipt]
Keep = Callable[..., None]
PROBLEM = {"op": "attention", "arch": "sm_90a", "dtype": "bf16", "head_dim": 64, "pattern": {"kind": "causal"}}
SPMM = {"op": "bsr_spmm", "arch": "sm_90a", "dtype": "fp16", "block": {"rows": 64, "cols": 64}}


@pytest.fixture(autouse=True)
def _by_environment() -> Iterator[None]:
    """The mode of a process that has not chosen a kernel yet, and nothing remembered of other modes."""
    caches = (mode.by_environment, attention_choice.chosen, attention_gradients.gradient_choice, bsr_choice.resolve)
    for each in caches:
        each.cache_clear()
    yield
    for each in caches:
        each.cache_clear()


@pytest.fixture
def keep(receipt: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Keep:
    """Writes receipts of kernels into the user's folder; there are no others."""
    monkeypatch.setattr(provenance, "GENERATED", tmp_path / "generated")
    monkeypatch.setenv("CODEGEN_RECEIPTS", str(tmp_path / "mine"))

    def write(*kernels: NamedSpec) -> None:
        for named in kernels:
            path = receipt_path(named, own.folder())
            own.make(path.parent)
            first = None if named.twin_of is None else receipt(named.main, "another source")
            write_receipt(named, receipt(named, render(named)), path, None if first is None else lambda x=first: x)
            path.with_suffix(".cu").write_text(render(named.main))
            own.protect(path)

    return write


def kernel(**fields: Any) -> NamedSpec:
    return choose({**PROBLEM, **fields}).named


# The mode


def test_it_is_off_by_default_and_on_within_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CODEGEN_VERIFIED_ONLY", raising=False)
    assert not mode.is_on() and mode.mode() is None
    with verified_only():
        assert mode.is_on()
        with verified_only(False):
            assert not mode.is_on()
            with verified_only():
                assert mode.is_on()
        assert mode.is_on()
    assert not mode.is_on()
    with pytest.raises(KeyError), verified_only():
        raise KeyError
    assert not mode.is_on()


@pytest.mark.parametrize(("value", "on"), [("1", True), ("0", False), ("", False)])
def test_the_environment_decides_for_the_process(value: str, on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODEGEN_VERIFIED_ONLY", value)
    assert mode.is_on() is on
    monkeypatch.setenv("CODEGEN_VERIFIED_ONLY", "0" if on else "1")
    assert mode.is_on() is on, "what is remembered depends on it"
    with verified_only(not on):
        assert mode.is_on() is not on


def test_other_values_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODEGEN_VERIFIED_ONLY", "yes")
    with pytest.raises(
        ToolchainError, match=r"CODEGEN_VERIFIED_ONLY is 'yes'; expected 1 \(refuses kernels without a receipt\)"
    ):
        mode.is_on()
    for value in (1, None, "1"):
        with pytest.raises(ArgumentError, match=r"on: is .*, expected True or False"):
            verified_only(value)  # type: ignore[arg-type]


def test_it_is_of_one_thread_and_of_one_task() -> None:
    seen: list[bool] = []

    async def within(event: asyncio.Event) -> bool:
        with verified_only():
            event.set()
            await asyncio.sleep(0.01)
            return mode.is_on()

    async def beside(event: asyncio.Event) -> bool:
        await event.wait()
        return mode.is_on()

    async def both() -> list[bool]:
        event = asyncio.Event()
        return await asyncio.gather(within(event), beside(event))

    assert asyncio.run(both()) == [True, False]
    with verified_only():
        thread = threading.Thread(target=lambda: seen.append(mode.is_on()))
        thread.start()
        thread.join()
    assert seen == [False]


def test_what_one_mode_loaded_another_loads_anew() -> None:
    made: list[str] = []

    @mode.kept_by_mode(2)
    def kernel(name: str) -> str:
        """Load a kernel."""
        made.append(name)
        return name

    assert kernel("a") == kernel("a") == "a" and made == ["a"] and kernel.__doc__ == "Load a kernel."
    with verified_only():
        assert kernel("a") == kernel("a") == "a" and made == ["a", "a"]
    kernel("a")
    assert made == ["a", "a"]
    kernel("b")
    kernel("a")
    with verified_only():
        kernel("a")
    assert made == ["a", "a", "b", "a"]
    kernel.cache_clear()
    kernel("a")
    assert made == ["a", "a", "b", "a", "a"]


# Loading


def test_load_kernel_refuses_a_kernel_without_a_receipt_and_says_what_makes_one(keep: Keep) -> None:
    named = kernel(softcap=25.0)
    with verified_only(), pytest.raises(UnverifiedError) as caught:
        load_kernel(named)
    error = caught.value
    assert (error.kernel, error.spec_hash) == (named.stem, named.spec.hash) and error.reason == "no receipt"
    assert str(error).startswith(f"{named.stem} (spec hash {named.spec.hash}) is refused by verified_only ")
    assert error.sibling and f"the nearest shipped kernel is {error.sibling}" in str(error)
    assert shlex.split(error.remedy) == ["codegen", "verify", named.spec.canonical_json()]
    assert find_spec(shlex.split(error.remedy)[2]) == named
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.remedy, again.sibling) == (str(error), error.remedy, error.sibling)


def test_load_kernel_takes_a_kernel_with_a_receipt(keep: Keep) -> None:
    named = kernel(softcap=25.0)
    keep(named)
    with verified_only(), pytest.raises(runtime.DeviceError, match=r"torch sees no CUDA device|is written for"):
        load_kernel(named)


def test_load_kernel_of_a_problem_takes_the_best_kernel_with_a_receipt(
    keep: Keep, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[NamedSpec] = []
    real = loading.generate
    monkeypatch.setattr(loading, "generate", lambda named: loaded.append(named) or real(named))
    first = kernel(softcap=25.0)
    other = find_spec({**json.loads(first.spec.canonical_json()), "stages": first.spec.stages - 1})
    fields = {**PROBLEM, "softcap": 25.0}
    with verified_only(), pytest.raises(UnverifiedError, match=first.stem):
        load_kernel(fields)
    keep(other)
    with verified_only(), pytest.raises(runtime.DeviceError):
        load_kernel(fields)
    assert loaded == [other]
    with verified_only(), pytest.raises(UnverifiedError, match=first.stem):
        load_kernel(first)  # a whole spec stays what it is
    with pytest.raises(runtime.DeviceError):
        load_kernel(fields)
    assert loaded == [other, first]


def test_the_command_of_a_file_names_the_folder_where_the_runtime_looks(
    keep: Keep, write_yaml: Callable[..., Path]
) -> None:
    path = write_yaml("op: attention\narch: sm_89\nhead_dim: 64\npattern: {kind: causal}\nsoftcap: 25.0\n")
    with verified_only(), pytest.raises(UnverifiedError) as caught:
        load_kernel(path)
    assert caught.value.remedy == f"codegen verify kernel.yaml --out {own.folder()}"
    assert permit.verify_command(find_spec("h100_causal")) == "codegen verify h100_causal"


def test_a_stale_receipt_is_told(keep: Keep, receipt: Make) -> None:
    named = kernel(softcap=25.0)
    keep(named)
    receipt(named, "another source").write(receipt_path(named, own.folder()))
    with verified_only(), pytest.raises(UnverifiedError, match="the source changed after the receipt was written"):
        load_kernel(named)


# The choice


def test_a_choice_among_kernels_with_receipts_has_no_others() -> None:
    first = choose(PROBLEM).named
    others = [find_spec({**json.loads(first.spec.canonical_json()), "stages": stages}) for stages in (1, 2, 3)]
    own_kernels = tuple(named for named in others if named.spec != first.spec)
    held = {named.spec.hash for named in own_kernels[:1]}
    verified = Verified(lambda named: named.spec.hash in held, own_kernels)
    for problem in (None, {"batch": 2, "heads": 16, "q_len": 16384, "kv_len": 16384}, {"heads": 3, "q_len": 999}):
        for general in (False, True):
            choice = choose(PROBLEM, problem, general=general, verified=verified)
            assert choice.named.spec == own_kernels[0].spec
            assert "receipt" in choice.reason or choice.rule in ("measured", "nearest")
    with pytest.raises(SpecError, match="no kernel with a receipt computes"):
        choose({**PROBLEM, "softcap": 25.0}, verified=verified)
    with pytest.raises(SpecError, match="no kernel with a receipt computes"):
        choose({**SPMM, "arch": "sm_89"}, verified=verified)


def test_a_kernel_that_needs_a_prepared_matrix_does_not_do_for_one_that_is_not() -> None:
    gathered = find_spec("h100_bsr_spmm_b64_balanced")
    verified = Verified(lambda named: named == gathered)
    sizes = {"m": 4096, "n": 64, "k": 4096, "density": 0.25, "evenness": 1.0}
    assert choose(SPMM, {**sizes, "prepared": "rows"}, verified=verified).named == gathered
    with pytest.raises(SpecError, match="no kernel with a receipt"):
        choose(SPMM, {**sizes, "prepared": "none"}, verified=verified)


def test_gradients_are_taken_from_kernels_with_receipts() -> None:
    pattern = find_spec("h100_causal_dq_dkdv").spec.pattern  # type: ignore[union-attr]
    options = {"arch": "sm_90a", "dtype": "fp16", "head_dim": 128}
    whole = backward_kernels(pattern, **options)
    assert whole.dq_dkdv is not None
    apart = backward_kernels(pattern, **options, holds=lambda named: named in (whole.dq, whole.dkdv))
    assert apart.dq_dkdv is None and apart.of_a_step() == [whole.dq, whole.dkdv]
    in_any_order = backward_kernels(pattern, **{**options, "head_dim": 64}, deterministic=False)
    ordered = backward_kernels(pattern, **{**options, "head_dim": 64})
    assert in_any_order.dq_dkdv != ordered.dq_dkdv
    held = [ordered.dq_dkdv]
    found = backward_kernels(pattern, **{**options, "head_dim": 64}, deterministic=False, holds=held.__contains__)
    assert found.dq_dkdv == ordered.dq_dkdv
    assert backward_kernels(pattern, **options, holds=lambda _: False) == whole


# Calls


def qkv() -> tuple[Any, ...]:
    return tuple(torch.randn(1, 2, 128, 64).bfloat16() for _ in range(3))


def kernel_of_call() -> NamedSpec:
    """The kernel of a call of ``qkv()``, whatever has a receipt."""
    q = torch.empty(1, 2, 128, 64, dtype=torch.bfloat16, device="meta")
    return explain_attention(q, q, q, Causal(), arch="sm_90a").choice.named


def test_a_call_is_refused_and_what_is_remembered_stays_in_its_mode(
    keep: Keep, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle_kernel.install(monkeypatch)
    tensors, named = qkv(), kernel_of_call()
    right = block_sparse_attention(*tensors, Causal())
    for _ in range(2):
        with verified_only(), pytest.raises(UnverifiedError, match=named.stem):
            block_sparse_attention(*tensors, Causal())
        assert torch.equal(block_sparse_attention(*tensors, Causal()), right)
    keep(named)
    with verified_only():
        assert torch.equal(block_sparse_attention(*tensors, Causal()), right)
    assert len(attention_calls._routes) == 2


def test_a_call_takes_the_nearest_kernel_with_a_receipt_and_explains_it(
    keep: Keep, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = oracle_kernel.install(monkeypatch)
    named = kernel_of_call()
    other = find_spec({**json.loads(named.spec.canonical_json()), "stages": named.spec.stages - 1})
    keep(other)
    tensors = qkv()
    with verified_only():
        block_sparse_attention(*tensors, Causal())
        q = torch.empty(1, 2, 128, 64, dtype=torch.bfloat16, device="meta")
        told = explain_attention(q, q, q, Causal(), arch="sm_90a")
    assert set(loaded) == {other.spec.canonical_json()} and told.choice.spec == other.spec
    assert told.choice.reason.endswith(f"; {named.stem} was skipped because it has no receipt")
    assert told.provenance["O"].is_verified and f"\nreceipt: {own.folder()}/" in str(told)
    block_sparse_attention(*tensors, Causal())
    assert set(loaded) == {other.spec.canonical_json(), named.spec.canonical_json()}


def test_a_backward_pass_has_the_mode_of_its_forward_pass(keep: Keep, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle_kernel.install(monkeypatch)
    q = torch.empty(1, 2, 128, 64, dtype=torch.bfloat16, device="meta")
    told = explain_attention(q, q, q, Causal(), arch="sm_90a", gradients=True)
    assert told.gradients is not None
    keep(told.choice.named)
    tensors = [t.requires_grad_() for t in qkv()]
    with verified_only(), pytest.raises(UnverifiedError, match=told.gradients.of_a_step()[0].stem):
        block_sparse_attention(*tensors, Causal())
    out = block_sparse_attention(*tensors, Causal())
    with verified_only():
        out.sum().backward()  # of a forward pass outside of the mode
    keep(*told.gradients.of_a_step())
    with verified_only():
        out = block_sparse_attention(*tensors, Causal())
    seen: list[bool | None] = []
    real = attention_gradients.chosen_for
    monkeypatch.setattr(attention_gradients, "chosen_for", lambda *a, **k: seen.append(mode.mode()) or real(*a, **k))
    thread = threading.Thread(target=lambda: out.sum().backward())
    thread.start()
    thread.join()
    assert seen == [True]
    with verified_only():
        found = explain_attention(q, q, q, Causal(), arch="sm_90a", gradients=True).provenance
    assert found["O"].is_verified and found["dQ, dK and dV"].is_verified


def test_a_product_without_a_fused_kernel_is_computed_by_a_bare_one_with_a_receipt(
    keep: Keep, monkeypatch: pytest.MonkeyPatch
) -> None:
    bsr_oracle.install(monkeypatch, "sm_90a")
    mask = torch.ones(4, 4)
    blocks = torch.kron(mask, torch.ones(64, 64)).half().to_sparse_bsr((64, 64))
    b, bias = torch.randn(256, 64).half(), torch.randn(256).half()
    plain = explain_matmul(blocks, b, arch="sm_90a")
    with verified_only(), pytest.raises(UnverifiedError):
        explain_matmul(blocks, b, arch="sm_90a", bias=bias)
    keep(plain.choice.named)
    right = runtime.bsr_matmul(blocks, b, bias=bias)
    with verified_only():
        told = explain_matmul(blocks, b, arch="sm_90a", bias=bias)
        found = runtime.bsr_matmul(blocks, b, bias=bias)
    assert told.choice.named == plain.choice.named and not told.products["C"].fused
    assert told.provenance["C"].is_verified and "\n  receipt: " in str(told) and "\n  source: " in str(told)
    torch.testing.assert_close(found, right, atol=0.1, rtol=1e-2)
    assert explain_matmul(blocks, b, arch="sm_90a", bias=bias).products["C"].fused


def test_what_is_prepared_for_a_kernel_is_refused_without_its_receipt(keep: Keep) -> None:
    named = find_spec("h100_bsr_spmm_b64_balanced")
    fields: dict[str, Any] = {"op": "bsr_spmm", "arch": "sm_90a", "device_name": None, "dtype": "fp16"}
    sizes: dict[str, Any] = {"block": (64, 64), "rows": 256, "columns": 256, "width": 64, "stored": 8}
    product = bsr_choice.Product(**fields, **sizes, kernel=named.spec.canonical_json(), verified_only=True)
    with pytest.raises(UnverifiedError, match=named.stem):
        bsr_choice.resolve(product)
    keep(named)
    assert bsr_choice.resolve(product).choice.named == named


def test_exported_kernels_need_a_verified_receipt_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Path] = []
    monkeypatch.setattr(permit, "check_exported", asked.append)
    monkeypatch.setattr(loading, "_load_exported", lambda *_: None)
    load_kernel(tmp_path)
    with verified_only():
        load_kernel(tmp_path)
    assert asked == [tmp_path]


def test_the_mode_costs_a_call_less_than_a_tenth_of_a_microsecond() -> None:
    import timeit

    assert min(timeit.repeat(mode.mode, number=100_000, repeat=20)) / 100_000 < 1e-7
