"""The benchmark of FP8, as far as it goes without a GPU: what it checks, what a peer is given, its tables."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from scripts import imported

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with imported("fp8") as module:
        yield module


def rows_of(script: ModuleType) -> ModuleType:
    return sys.modules[script.AttentionRow.__module__]


def row_of(script: ModuleType, name: str, **sizes: Any) -> Any:
    found = next(row for row in script.ROWS if row.name == name)
    small = {"batch": 1, "length": 512, "head_dim": 64} if hasattr(found, "length") else {}
    return dataclasses.replace(found, **{**small, **sizes})


def listed(script: ModuleType) -> Any:
    return row_of(script, "topk32", blocks=2)


def seen(row: Any, lists: Any) -> Any:
    """Which keys each query of each head sees."""
    mask = torch.ones((row.batch, 16, row.length, row.length), dtype=torch.bool)
    if row.causal:
        mask = mask.tril()
    if lists is not None:
        blocks = torch.zeros((*lists.shape[:3], row.length // row.block), dtype=torch.bool).scatter_(
            3, lists.long(), True
        )
        mask = mask & blocks.repeat_interleave(row.block, 2).repeat_interleave(row.block, 3)
    return mask


def attention(q: Any, k: Any, v: Any, mask: Any, scale: float | None = None) -> Any:
    return torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), attn_mask=mask, scale=scale
    )


def test_the_work_of_the_rows(script: ModuleType) -> None:
    names = [row.name for row in script.ROWS]
    assert len(names) == len(set(names))
    dense, lists = (next(row for row in script.ROWS if row.name == name) for name in ("dense", "topk32"))
    assert dense.work == 4 * 2 * 16 * 128 * 16384**2
    assert lists.work == 4 * 16 * 128 * 32768 * 32 * 128
    assert row_of(script, "causal").pairs == 512 * 513 // 2


def test_the_kernels_of_the_rows(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "load_kernel", lambda fields: script.find_spec(fields).spec)
    for row in script.ROWS:
        if hasattr(row, "length"):
            spec = script.kernel_of(row)
            assert (spec.dtype, spec.head_dim, spec.tile.n) == ("e4m3", row.head_dim, 256 if row.block == 128 else 128)
            assert spec.pattern.kind == ("topk" if row.blocks else "causal" if row.causal else "dense")
            assert (spec.scale_rows.q, spec.scale_rows.k) == (row.block, row.block)
            if row.blocks:
                block = spec.pattern.block
                assert (spec.pattern.k, block.q, block.kv) == (row.blocks, row.block, row.block)


def test_errors_of_attention(script: ModuleType) -> None:
    for row in (row_of(script, "dense"), row_of(script, "causal"), listed(script)):
        tensors, lists = script.inputs(row, "std4", "cpu"), script.lists_of(row, "cpu")
        error = script.attention_error(row, tensors, lists)
        mask = seen(row, lists)
        assert int(mask.sum()) == 16 * row.pairs
        right = attention(*tensors, mask)
        assert error(right) < 1e-12
        assert error(1.1 * right) == pytest.approx(0.1)
        if row.name != "dense":
            assert error(attention(*tensors, None)) > script.LARGEST_RMSE
    with pytest.raises(ValueError, match="shape"):
        error(right[:, :8])


def test_data_sets_have_the_logits_that_they_say(script: ModuleType) -> None:
    for name, std in (("std1", 1.0), ("std4", 4.0)):
        q, k, _ = script.inputs(row_of(script, "dense"), name, "cpu")
        assert float((q.float() @ k.float().mT / 8).std()) == pytest.approx(std, rel=0.05)


@dataclasses.dataclass
class Quantized:
    q: Any
    k: Any
    v_t: Any
    q_scale: int = 1
    k_scale: int = 2
    v_scale: int = 3


def stand_ins(script: ModuleType, monkeypatch: pytest.MonkeyPatch, row: Any, off: dict[str, float]) -> None:
    """Kernels and the clock without a GPU: results are right times 1 + off, by what computes them."""
    make, draw = script.inputs, script.lists_of
    lists = draw(row, "cpu")
    mask = seen(row, lists)

    def call(*given: Any, out: Any) -> Any:
        if isinstance(given[0], Quantized):
            q, k, v, kind = given[0].q, given[0].k, given[0].v_t, "chosen"
        else:
            (q, k, v), kind = given[:3], "fp16"
        return out.copy_(attention(q, k, v, mask) * (1 + off.get(kind, 0.0)))

    def load(fields: dict[str, Any]) -> Any:
        assert fields["dtype"] == "e4m3" and fields["pattern"].get("k") == row.blocks

        def kernel(q: Any, k: Any, v_t: Any, *indices: Any, out: Any, **scales: Any) -> None:
            assert list(indices) == ([] if lists is None else [lists])
            assert scales == {"q_scale": 1, "k_scale": 2, "v_scale": 3}
            out.copy_(attention(q, k, v_t, mask) * (1 + off.get("fp8", 0.0)))

        return kernel

    def sdpa(q: Any, k: Any, v: Any, causal: bool = False, **options: Any) -> Any:
        if options.get("output"):
            raise RuntimeError("no engine for bf16\nsecond line")
        result = 4 * attention(q, k, v, mask) * (1 + off.get("cudnn", 0.0))
        return script.Result(lambda: result, 0.25)

    def timed(calls: dict[str, Any], work: float, *often: int) -> Any:
        return {label: {"tflops": 10.0 + i, "back_to_back_tflops": 9.0} for i, label in enumerate(calls)}

    monkeypatch.setattr(script, "inputs", lambda row, data: make(row, data, "cpu"))
    monkeypatch.setattr(script, "lists_of", lambda row: lists)
    monkeypatch.setattr(script, "quantize_attention", lambda q, k, v, **rows: Quantized(q, k, v))
    monkeypatch.setattr(script, "load_kernel", load)
    monkeypatch.setattr(script, "block_sparse_attention", call)
    monkeypatch.setattr(script, "block_sparse_attention_fp8", call)
    monkeypatch.setattr(script.fp8_peers, "cudnn_sdpa", sdpa)
    monkeypatch.setattr(script.harness, "time_calls", timed)
    monkeypatch.setattr(script.harness, "free_memory", lambda: None)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.setitem(sys.modules, "flashinfer.prefill", None)


def test_what_fails_costs_its_own_time_and_is_told(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    row = row_of(script, "dense")
    stand_ins(script, monkeypatch, row, {"fp8": 0.03, "chosen": 0.02, "cudnn": 0.06, "fp16": 0.5})
    record = script.record_of(row, ["std1", "std4"], [script.QUANTIZING])
    assert set(record["results"]) == {script.OURS, script.CHOSEN, script.SDPA, script.SDPA_BSHD}
    assert set(record["data"]) == {"std1", "std4"} and record["results"] is record["data"]["std1"]
    errors = {label: result["rmse"] for label, result in record["data"]["std4"].items()}
    assert errors[script.OURS] == pytest.approx(0.03, abs=2e-3)  # rounded to bf16 beside
    assert errors[script.CHOSEN] == pytest.approx(0.02, abs=2e-3)
    assert errors[script.SDPA] == pytest.approx(0.06, rel=1e-2)
    failed = record["failed"]
    assert "off by 5.0e-01 of the result's root mean square" in failed[f"{script.FP16} on std1"]
    assert failed[f"{script.SDPA_BF16} on std4"] == "RuntimeError: no engine for bf16"
    assert "flashinfer" in failed[f"{script.FLASHINFER} on std1"]
    assert not any(label.startswith(script.QUANTIZING) for label in failed)
    json.dumps(record)


def test_lists_go_to_block_sparse_peers(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    row = listed(script)
    stand_ins(script, monkeypatch, row, {})
    given: list[Any] = []

    def forward(q: Any, k: Any, v: Any, lists: Any, *, sparse_block_size: int) -> Any:
        given.append((q.dtype, lists.dtype, sparse_block_size))
        return {"o_tensor": attention(q, k, v, seen(row, lists))}

    cudnn = SimpleNamespace(BSA=SimpleNamespace(block_sparse_attention_fp8_forward=forward))
    monkeypatch.setitem(sys.modules, "cudnn", cudnn)
    record = script.record_of(row, ["std1"], [])
    assert set(record["results"]) == {script.OURS, script.QUANTIZING, script.CHOSEN, script.FP16, script.BSA}
    assert given and set(given) == {(torch.bfloat16, torch.int32, 128)}
    assert record["results"][script.BSA]["rmse"] < 1e-6 and not record["failed"]


class Graph:
    """A stand-in for cuDNN's: what sdpa_fp8 is said to compute, of the tensors that a call has."""

    def __init__(self, **options: Any) -> None:
        self.options, self.calls = options, 0

    def tensor(self, **described: Any) -> Any:
        return Described(**described)

    def sdpa_fp8(self, q: Any, k: Any, v: Any, *scales: Any, **options: Any) -> Any:
        self.inputs, self.attention = (q, k, v, *scales), options
        self.outputs = Described(), None, Described(), Described()
        return self.outputs

    def build(self, modes: list[str]) -> None:
        assert modes == ["A"]

    def get_workspace_size(self) -> int:
        return 0

    def execute(self, pack: dict[Any, Any], workspace: Any, handle: Any) -> None:
        self.calls += 1
        for named, tensor in pack.items():
            assert list(tensor.shape) == named.dim and list(tensor.stride()) == named.stride
            assert tensor.dtype == named.data_type
        q, k, v, of_q, of_k, of_v, of_s, to_s, to_o = (pack[name] for name in self.inputs)
        logits = (q.float() * of_q) @ (k.float() * of_k).mT * self.attention["attn_scale"]
        if self.attention["use_causal_mask"]:
            logits = logits.masked_fill(~torch.ones_like(logits, dtype=torch.bool).tril(), -math.inf)
        weights = (logits - logits.amax(-1, keepdim=True)).exp()
        codes = (weights * to_s).to(torch.float8_e4m3fn).float() * of_s
        out = codes @ (v.float() * of_v) / weights.sum(-1, keepdim=True)
        pack[self.outputs[0]].copy_(out * to_o)


class Described:
    def __init__(self, **described: Any) -> None:
        self.__dict__.update(described)

    def __getattr__(self, name: str) -> Callable[[Any], Any]:
        if not name.startswith("set_"):
            raise AttributeError(name)

        def put(value: Any) -> Any:
            setattr(self, name.removeprefix("set_"), value)
            return self

        return put


@pytest.fixture
def cudnn(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    types = {"FP8_E4M3": torch.float8_e4m3fn, "BFLOAT16": torch.bfloat16, "FLOAT": torch.float32}
    modes = SimpleNamespace(A="A")
    module = SimpleNamespace(pygraph=Graph, data_type=SimpleNamespace(**types), heur_mode=modes)
    monkeypatch.setattr(script.fp8_peers, "cudnn_handle", lambda: (module, None))


@pytest.mark.parametrize("options", [{}, {"heads_inside": True}, {"output": torch.bfloat16}, {"causal": True}])
def test_cudnn_is_given_scales_that_undo_each_other(script: ModuleType, cudnn: None, options: dict[str, Any]) -> None:
    row = row_of(script, "causal" if options.get("causal") else "dense")
    q, k, v = script.inputs(row, "std1", "cpu")
    made = script.fp8_peers.cudnn_sdpa(q, k, 3 * v, **options)
    out = made.call()
    assert out.dtype == options.get("output", torch.float8_e4m3fn)
    error = script.attention_error(row, (q, k, 3 * v), None)(made.numbers(out))
    assert 1e-3 < error < 0.08  # of codes, weights and, in e4m3, of the result
    assert not out.isnan().any()


def test_cudnn_takes_fewer_queries_than_keys(script: ModuleType, cudnn: None) -> None:
    q, k, v = (torch.randn(1, 2, length, 64).half() for length in (128, 512, 512))
    made = script.fp8_peers.cudnn_sdpa(q, k, v)
    found, exact = made.numbers(made.call()), attention(q, k, v, None)
    assert script.relative(found, exact) < 0.08


def test_flashinfer_is_given_q_k_and_v_side_by_side(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    row = row_of(script, "causal", batch=2)
    q, k, v = script.inputs(row, "std1", "cpu")

    def prefill(packed: Any, layout: str, *, out: Any, cum_seq_lens_q: Any, mask_mode: str, **given: Any) -> Any:
        assert layout == "PACKED_QKV" and mask_mode == "causal" and cum_seq_lens_q.tolist() == [0, 512, 1024]
        parts = packed.float().view(2, 512, 3, 16, 64).permute(2, 0, 3, 1, 4)
        result = attention(*parts, seen(row, None), given["bmm1_scale"]) * given["bmm2_scale"]
        return out.copy_(result.transpose(1, 2).reshape(1024, 16, 64))

    module = SimpleNamespace(trtllm_fmha_v2_prefill=prefill)
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(prefill=module))
    monkeypatch.setitem(sys.modules, "flashinfer.prefill", module)
    made = script.fp8_peers.flashinfer(q, k, v, causal=True)
    assert script.attention_error(row, (q, k, v), None)(made.numbers(made.call())) < 0.08


@pytest.mark.parametrize("name", ["BSR 128 x 128", "BSR 128 x 128, scales of blocks"])
def test_products(script: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    row, products = row_of(script, name), sys.modules[script.product_makers.__module__]
    written = dataclasses.replace(
        next(each for each in script.bsr.FP8_ROWS if each.name == row.written), columns=256, height=512, row_blocks=2
    )
    problem = script.bsr.make_problem(written, "cpu", 512)
    monkeypatch.setattr(script.bsr, "FP8_ROWS", (dataclasses.replace(written, name=row.written),))
    monkeypatch.setattr(script.bsr, "make_problem", lambda row: problem)

    class Kernel:
        def prepare(self, a: Any, columns: int, **options: Any) -> Any:
            return a

        def __call__(self, a: Any, b: Any, out: Any, scale_a: Any = None, scale_b: Any = None) -> Any:
            return out.copy_(product(a, b, scale_a, scale_b))

    def product(a: Any, b: Any, scale_a: Any, scale_b: Any) -> Any:
        scales = {} if scale_a is None else {"scale_a": scale_a, "scale_b": scale_b}
        given = dataclasses.replace(problem, a=a, b=b, scales=scales)
        return torch.cat([script.bsr.exact(given, script.OURS, i) for i in range(4)])

    def quantized(x: Any) -> Any:
        parts = x.float().view(x.shape[0], -1, 128)
        scales = parts.abs().amax(2) / 448
        return (parts / scales[:, :, None]).to(torch.float8_e4m3fn).view(x.shape), scales

    def scaled_mm(a: Any, b: Any, *scales: Any, use_fast_accum: bool, out_dtype: Any) -> Any:
        return (a.double() @ b.double()).to(out_dtype)

    monkeypatch.setattr(products, "load_kernel", lambda *given: Kernel())
    monkeypatch.setattr(script.bsr, "load_kernel", lambda *given, **options: Kernel())
    monkeypatch.setattr(products, "quantize_matrix", quantized)
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    same = {"tflops": 100.0, "back_to_back_tflops": 50.0}
    monkeypatch.setattr(script.harness, "time_calls", lambda calls, *often: {label: dict(same) for label in calls})
    record = script.record_of(row, ["std1"], [])
    assert not record["failed"]
    blocks = "blocks" in name
    assert set(record["results"]) == set(script.PRODUCTS) - (set() if blocks else {script.QUANTIZING})
    errors = {label: result["rmse"] for label, result in record["results"].items()}
    assert (0.01 < errors.pop(script.QUANTIZING) < 0.05) if blocks else True
    assert max(errors.values()) < 3e-3
    assert record["results"][rows_of(script).EQUAL]["tflops"] == 100
    assert record["results"][script.CUBE + rows_of(script).SLOW]["tflops"] == 200  # of twice the FLOPs


def report(script: ModuleType) -> dict[str, Any]:
    def result(tflops: float, rmse: float) -> dict[str, float]:
        return {"tflops": tflops, "back_to_back_tflops": tflops / 2, "rmse": rmse}

    results = {
        script.OURS: result(1050, 0.02),
        script.FP16: result(700, 2e-4),
        script.SDPA: result(900, 0.05),
        script.SDPA_BSHD: result(1000, 0.04),
    }
    dense, topk, product = (row_of(script, name) for name in ("dense", "topk32", "BSR 128 x 128"))
    begin = {"device": "a GPU", "driver": "1", "date": "2026-01-01", "versions": {}}

    def record(row: Any, kind: str, found: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
        targets = [dataclasses.asdict(target) for target in row.targets]
        return {"name": row.name, "kind": kind, "targets": targets, "results": found, "failed": {}, "data": data}

    lists = {script.OURS: result(760, 0.02)}
    rows = [
        record(dense, "attention", results, {"std1": results}),
        record(topk, "lists", lists, {"std1": lists, "std4": {}}),
        record(product, "product", {script.OURS: result(1190, 2e-3), rows_of(script).EQUAL: result(1400, 2e-3)}, {}),
    ]
    rows[1]["failed"] = {f"{script.BSA} on std1": "ModuleNotFoundError: No module named 'cudnn'"}
    return json.loads(json.dumps({**begin, "rows": rows}))  # type: ignore[no-any-return]


def test_targets_are_told_as_ratios(script: ModuleType) -> None:
    cells = script.fp8_page.target_cells(report(script))
    found = {(row, data, what): reached for row, data, _, what, reached in cells}
    assert found["dense", "std1", "1.05 times cuDNN SDPA"] == "1.00 / 1.00"  # of cuDNN's the best one
    assert found["dense", "std1", "1.45 times ours, fp16"] == "1.03 / 1.03"
    assert found["dense", "std1", "error of cuDNN SDPA, at most 1 times"] == "2.00"
    assert found["topk32", "std1", "950 TFLOPS"] == "0.80 / 0.40"
    assert found["topk32", "std1", "1.3 times cuDNN BSA, quantizing"] == "-"
    assert found["topk32", "std4", "950 TFLOPS"] == "-"
    assert found["BSR 128 x 128", "std1", "0.85 times _scaled_mm, as many FLOPs"] == "1.00 / 1.00"
    assert found["BSR 128 x 128", "std1", "0.85 times _scaled_mm, 8192 cubed"] == "-"


def test_the_page(script: ModuleType) -> None:
    page = script.fp8_page
    assert page.table(None) == "Not measured yet."
    text = page.table(report(script))
    assert "| row | data | ours | ours, fp16 | cuDNN SDPA | cuDNN SDPA, heads inside |" in text
    assert "| dense | std1 | 1050 / 525, 2.00% | 700 / 350, 0.02% |" in text
    assert "| row | data | ours | _scaled_mm, as many FLOPs |" in text
    whole = report(script)
    best, speed = whole["rows"][0], {"tflops": 1000.0, "back_to_back_tflops": 1000.0, "rmse": 0.123}
    for kind, without in (("attention", script.BSA), ("lists", script.SDPA_BF16)):
        row = row_of(script, "dense" if kind == "attention" else "topk32")
        labels = set(script.attention_makers(row, [None] * 3, None if kind == "attention" else torch.zeros(1)))
        assert without not in labels
        best |= {"kind": kind, "data": {"std1": dict.fromkeys(labels, speed)}}
        assert max(len(line.encode()) for line in page.table(whole).splitlines()) <= 200


def test_an_earlier_run_is_shown(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "fp8.json"
    path.write_text(json.dumps(report(script)), encoding="utf-8")
    script.main(["--from", str(path)])
    told = capsys.readouterr().out
    assert "0.80 / 0.40" in told and "topk32: cuDNN BSA, quantizing on std1 has no time" in told
    with pytest.raises(SystemExit):
        script.main(["--row", "no such row"])
    assert "invalid choice" in capsys.readouterr().err
