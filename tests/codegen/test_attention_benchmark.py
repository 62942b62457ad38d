"""The attention benchmark, as far as it goes without a GPU: rows, work, the exact reference, what is printed."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from codegen.library import find_spec
from codegen.render import render
from codegen.spec import AttentionSpec, parse_spec

torch = pytest.importorskip("torch")
SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "attention.py"


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPT.parent)  # as when it is run
        spec = importlib.util.spec_from_file_location("attention_benchmark", SCRIPT)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, spec.name, module)  # dataclasses look themselves up
        spec.loader.exec_module(module)
        yield module


def spec_of(fields: dict[str, Any]) -> AttentionSpec:
    spec = parse_spec(fields)
    assert isinstance(spec, AttentionSpec)
    return spec


def record(name: str, **tflops: float) -> dict[str, Any]:
    results = {label: {"milliseconds": 1.0, "tflops": value, "error": 1e-3} for label, value in tflops.items()}
    return {"name": name, "target_tflops": 700.0, "results": results, "failed": {"FA4": "ImportError: [no] FA4"}}


def test_every_row_is_a_kernel_that_can_be_built(script: ModuleType) -> None:
    assert len({row.name for row in script.ROWS}) == len(script.ROWS) == 20
    for row in script.ROWS:
        assert render(find_spec(row.fields))
        assert set(row.peers) <= set(script.PEERS)


def test_work_counts_visible_pairs(script: ModuleType) -> None:
    rows = {row.name: row for row in script.ROWS}

    def pairs(name: str, *lists: Any) -> float:
        row = replace(rows[name], length=8192)
        spec = spec_of(row.fields)
        work = script.flops(row, spec, lists, device="cpu")
        return work / (4 * row.batch * row.heads * spec.head_dim)

    assert pairs("dense_d64") == 8192**2
    assert pairs("causal") == 8192 * 8193 / 2
    assert pairs("window2k") == 2048 * 2049 / 2 + (8192 - 2048) * 2048
    assert pairs("gqa_topk32_b64", torch.zeros(1, 64, 128, 32)) == 8192 * 32 * 64
    assert pairs("topk64_b128x64", torch.zeros(1, 16, 64, 64)) == 8192 * 64 * 64


@pytest.mark.parametrize("name", ["topk32_b64", "topk64_b128x64", "window2k", "causal", "dense"])
def test_exact_is_attention_over_the_visible_pairs(script: ModuleType, name: str) -> None:
    torch.manual_seed(0)
    (row,) = (row for row in script.ROWS if row.name == name)
    spec, length, heads, kv_heads = spec_of(row.fields), 4096, 4, 2
    q, k, v = (torch.randn(1, h, length, spec.head_dim, dtype=torch.float16) for h in (heads, kv_heads, kv_heads))
    position = torch.arange(length)
    seen = spec.pattern.visible(position[:, None], position[None], length, length).expand(length, length)
    lists: tuple[Any, ...] = ()
    if (block := spec.pattern.fixed_block) is not None:
        grid = (1, heads, length // block.q, length // block.kv)
        drawn = torch.rand(grid).argsort(-1)[..., : row.fields["pattern"]["k"]]
        listed = torch.zeros(grid, dtype=torch.bool).scatter_(3, drawn, True)[0, -1]
        seen = seen & listed.repeat_interleave(block.q, 0).repeat_interleave(block.kv, 1)
        lists = (drawn.int(),)
    problem = script.Problem(spec, q, k, v, lists)
    weights = (q[0, -1].double() @ k[0, -1].double().T * spec.head_dim**-0.5).masked_fill(~seen, -torch.inf).softmax(-1)
    out = torch.zeros(q.shape, dtype=torch.float64)
    out[0, -1] = weights @ v[0, -1].double()
    assert script.largest_error(problem, out) < 1e-12
    assert script.largest_error(problem, out.half()) < script.TOLERANCE
    out[0, -1, length // 2, 0] += 0.1
    assert not script.largest_error(problem, out) <= script.TOLERANCE
    out[0, -1, 0, 0] = torch.nan
    assert not script.largest_error(problem, out) <= script.TOLERANCE
    with pytest.raises(ValueError, match="has shape"):
        script.largest_error(problem, out[:, :1])


def test_what_a_row_says(script: ModuleType) -> None:
    assert script.cells(record("x", ours=630.0, FA4=600.0, flex=400.0)) == [
        *("x", "1.000", "630", "700", "600", "FA4", "1.05", "1e-03"),
    ]
    assert script.cells(record("x", ours=630.0)) == ["x", "1.000", "630", "700", "-", "-", "-", "1e-03"]
    assert script.cells(record("x", FA4=600.0)) == ["x", "-", "-", "700", "600", "FA4", "-", "-"]


def test_shows_an_earlier_run(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"device": "a device", "driver": "580.0", "rows": [record("x", ours=1.0)]}))
    monkeypatch.setattr("sys.argv", ["attention.py", "--from", str(path)])
    script.main()
    out = capsys.readouterr().out
    assert "a device, driver 580.0" in out
    assert "x: FA4 has no time: ImportError: [no] FA4" in out


def test_arguments(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    options = script.parse_arguments(["--rows", "dense", "causal", "--peers", "fa4,sdpa", "--quick"])
    assert (options.rows, options.peers, options.quick) == (["dense", "causal"], ["fa4", "sdpa"], True)
    for wrong in (["--rows", "nothing"], ["--peers", "fa4,nothing"]):
        with pytest.raises(SystemExit, match="2"):
            script.parse_arguments(wrong)
        assert "nothing" in capsys.readouterr().err
