"""The benchmark of decoding over a KV cache, as far as it goes without a GPU: rows, oracles and its page."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from scripts import imported

from codegen.library import find_spec
from codegen.receipts import source_sha256
from codegen.render import render

torch = pytest.importorskip("torch")

CPU = torch.device("cpu")
SHAPES = {
    "dense": {"lengths": (40, 7, 33), "page": 8},
    "equal": {"lengths": (32, 32), "page": 16},
    "contiguous": {"work": "contiguous", "lengths": (48, 48), "page": 0},
    "MSA": {"work": "MSA", "lengths": (64, 64), "page": 16, "queries": 2, "entries": 2, "entry_keys": 16},
    "QSA": {"work": "QSA", "lengths": (64, 64, 64), "page": 16, "entries": 5, "entry_keys": 4},
}


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with imported("serving") as module:
        yield module


@pytest.fixture(scope="module")
def rows(script: ModuleType) -> Any:
    """The script's module of rows: the one that its classes are of."""
    import serving_rows

    return serving_rows


@pytest.fixture(scope="module")
def page(script: ModuleType) -> Any:
    return script.serving_page


def small(rows: Any, name: str) -> Any:
    """Inputs of a small row."""
    fields = {"work": "dense", "batch": name, "heads": 4, "kv_heads": 2, "head_dim": 16, **SHAPES[name]}
    torch.manual_seed(0)
    return rows.make_inputs(rows.Row(**fields), CPU)


def test_the_rows_have_names_of_their_own(script: ModuleType) -> None:
    names = [row.name for row in script.ROWS]
    assert len(set(names)) == len(names) == 46
    for row in script.ROWS:
        assert row.shape["lengths"] == [[length, row.lengths.count(length)] for length in dict.fromkeys(row.lengths)]
        json.dumps(row.shape)


def seen_keys(inputs: Any, head: int, token: int) -> list[int]:
    """Positions of the keys that a query sees, one by one."""
    row, request = inputs.row, token // inputs.row.queries
    if inputs.lists is None:
        return list(range(row.lengths[request]))
    lists = inputs.lists.indices[head if inputs.lists.indices.shape[0] > 1 else 0, token].tolist()
    return [entry * row.entry_keys + i for entry in lists for i in range(row.entry_keys)]


@pytest.mark.parametrize("name", SHAPES)
def test_the_oracle_is_attention_over_the_keys_of_tables_and_lists(rows: Any, name: str) -> None:
    inputs = small(rows, name)
    row, found = inputs.row, inputs.exact()
    read = set()
    for token in range(len(inputs.q)):
        request = token // row.queries
        for head in range(row.heads):
            own = head // (row.heads // row.kv_heads)
            keys = seen_keys(inputs, own, token)
            assert len(keys) > 1 and max(keys) <= row.lengths[request] - row.queries + token % row.queries
            read |= {(request, own, key) for key in keys}
            places = [(request, key) for key in keys]
            if inputs.table is not None:
                places = [(int(inputs.table[request, key // row.page]), key % row.page) for key in keys]
            k, v = (torch.stack([cache[*place, own] for place in places]).float() for cache in (inputs.k, inputs.v))
            weights = (k @ inputs.q[token, head].float() * row.head_dim**-0.5).softmax(0)
            assert torch.allclose(found[token, head], weights @ v, atol=1e-5)
    assert inputs.bytes_read() == len(read) * 2 * row.head_dim * 2


def test_the_cache_of_msa_has_both_in_a_row(rows: Any) -> None:
    inputs = small(rows, "MSA")
    assert inputs.rows.shape[1:] == (2, 16, 32) and torch.equal(inputs.k[3, 5, 1], inputs.rows[3, 1, 5, :16])
    assert torch.equal(inputs.v[3, 5, 1], inputs.rows[3, 1, 5, 16:])


@pytest.mark.parametrize("name", ["equal", "contiguous"])
def test_sdpa_computes_the_same(script: ModuleType, rows: Any, name: str) -> None:
    import serving_peers

    inputs = small(rows, name)
    assert (serving_peers.sdpa(inputs)().float() - inputs.exact()).abs().max() < 1e-2
    with pytest.raises(ValueError, match="different lengths"):
        serving_peers.sdpa(small(rows, "dense"))


@pytest.mark.parametrize("name", SHAPES)
def test_our_call_has_the_layout_of_its_tensors(
    script: ModuleType, rows: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, given = small(rows, name), {}

    def attend(q: Any, k: Any, v: Any, pattern: Any, **options: Any) -> Any:
        given.update(options, k=k, v=v, pattern=pattern)
        return options["out"]

    monkeypatch.setattr(script, "paged_attention", attend)
    monkeypatch.setattr(script, "paged_workspace", lambda **sizes: sizes)
    assert torch.isnan(script.ours(inputs, batch_invariant=True)()).all()
    axis = {"NHD": 2, "HND": 1}[given["layout"]]
    assert given["k"].shape[axis] == 2 and given["v"].stride() == given["k"].stride()
    assert given["workspace"]["tokens"] == len(inputs.q) and given["batch_invariant"]
    assert type(given["pattern"]) is type(inputs.pattern)


def test_the_front_door_has_the_keys_of_contiguous_rows(
    script: ModuleType, rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = small(rows, "contiguous")

    def attend(q: Any, k: Any, v: Any, pattern: Any, *, out: Any) -> Any:
        assert type(pattern).__name__ == "Causal" and out.shape == q.shape
        return out.copy_(torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True))

    monkeypatch.setattr(script, "block_sparse_attention", attend)
    assert (script.front_door(inputs)().float() - inputs.exact()).abs().max() < 1e-2


def test_peers_are_called_where_they_compute_the_same(script: ModuleType, tmp_path: Path) -> None:
    import serving_peers

    labels = {
        row.name: [label for label, _ in script.makers_of(row, tmp_path) if label != "FA4"] for row in script.ROWS
    }
    own = ["ours", "ours, batch_invariant"]
    assert labels["dense 64x4K h32:8 page 64"] == [*own, "SDPA, contiguous", "FA3"]
    assert labels["dense 1x64K+31x4K h32:8 page 64"] == [*own, "FA3"]
    assert labels["MSA batch 8, 1 query h64:4 e4m3"] == labels["QSA batch 1 h24:2"] == [*own, "vLLM Triton"]
    assert labels["front door 16x8K h32:8"] == ["ours", "SDPA, contiguous", "FA3"]
    with pytest.raises(SystemExit, match=r"lacks vllm/vllm_flash_attn/_vllm_fa3_C\.abi3\.so"):
        serving_peers.check_folder(tmp_path)


def test_a_wrong_result_gets_no_time(script: ModuleType, rows: Any) -> None:
    inputs = small(rows, "dense")

    def broken(_: Any) -> Any:
        raise RuntimeError("no such symbol")

    makers = [
        ("ours", lambda inputs: inputs.exact),
        ("zero", lambda inputs: lambda: torch.zeros_like(inputs.q)),
        ("transposed", lambda inputs: lambda: inputs.exact().transpose(0, 1)),
        ("broken", broken),
    ]
    calls, errors, failed = script.checked(inputs, makers)
    assert set(calls) == {"ours"} and errors == {"ours": 0.0}
    assert failed["zero"] == "wrong result: off by 1.0e+00 of the largest element"
    assert "the result has shape (4, 3, 16)" in failed["transposed"]
    assert failed["broken"] == "RuntimeError: no such symbol"


def made_up(row: Any, times: dict[str, tuple[float, float]], **more: Any) -> dict[str, Any]:
    """A record with microseconds in a graph and of single calls by label."""
    results = {
        label: {
            "graph_milliseconds": graph / 1e3,
            "milliseconds": single / 1e3,
            "back_to_back_milliseconds": graph / 1e3,
            "host_microseconds": 11.12,
            "gigabytes_per_second": 4.2e6 / graph,
            "error": 1e-3,
        }
        for label, (graph, single) in times.items()
    }
    about = {"device": "a GPU", "driver": "1", "versions": {"torch": "2"}, "date": "2026-01-02"}
    named = find_spec("h100_paged_d128")
    kernel = {"name": named.stem, "receipt": True, "spec": json.loads(named.spec.canonical_json())}
    kernel["source_sha256"] = source_sha256(render(named))
    sizes = {"name": row.name, "work": row.work, "shape": row.shape, "bytes": 1, "kernels": [kernel]}
    return {**sizes, "results": results, "failed": {}, **about, **more}


def test_the_page_has_a_table_for_each_kind_of_work(script: ModuleType, page: Any) -> None:
    dense, contiguous, lists = (
        next(row for row in script.ROWS if row.work == work) for work in ("dense", "contiguous", "MSA")
    )
    own = {"ours": (100.0, 110.0), "ours, batch_invariant": (90.0, 111.0)}
    records = [
        made_up(dense, {**own, "SDPA, contiguous": (150.0, 151.0), "FA3": (99.8, 105.0)}),
        made_up(contiguous, own, failed={"FA3": "ValueError: no"}),
        made_up(lists, {"ours": (5.0, 7.5), "vLLM Triton": (6.25, 9.0)}, kernels=[{"name": "other", "receipt": False}]),
    ]
    text = page.text_of(records, lambda record: record["work"] != "contiguous")
    assert (
        "| `dense 64x4K h32:8 page 64` | 100 | 42000 | FA3 | 99.8 | **0.998** | 110 / 105 | 100 / 99.8 | 11.1 / 11.1 "
        "| 90.0 |" in text
    )
    assert "| `contiguous 16x8K h32:8`† | 100 | 42000 | - | - | - | 110 / - | 100 / - | 11.1 / - | 90.0 |" in text
    assert "| `MSA batch 1, 1 query h64:4 bf16`‡ | 5.0 | 840000 | vLLM Triton | 6.2 | 1.25 | 7.5 / 9.0 |" in text
    assert "‡: the kernel had no receipt when this row was measured" in text
    assert "1 of 2 rows with a peer take as long as the best peer, or less. Slower: `dense 64x4K" in text
    assert "## Lists of tokens" not in text and text.index("## Pages") < text.index("## Lists of blocks")
    assert "- `contiguous 16x8K h32:8`: FA3: ValueError: no" in text
    assert all(len(line) <= 120 for line in text.splitlines() if not line.startswith("|"))
    other = {**records[0], "device": "another"}
    with pytest.raises(SystemExit, match="a GPU, driver 1 and of another, driver 1"):
        page.text_of([other, *records], lambda _: True)
    with pytest.raises(SystemExit, match="of no machine"):
        page.text_of([], lambda _: True)


def test_rows_are_appended_and_the_last_one_counts(
    script: ModuleType, page: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    monkeypatch.setattr(script, "environment", lambda _: {"device": "a GPU", "driver": "1", "versions": {"torch": "2"}})
    monkeypatch.setattr(script, "free_memory", lambda: None)
    file, calls = tmp_path / "serving.jsonl", []

    def record(row: Any, folder: Any, seconds: float) -> dict[str, Any]:
        calls.append(row.name)
        if row.work == "QSA":
            raise RuntimeError("out of memory")
        return made_up(row, {"ours": (10.0 * len(calls), 12.0)})

    options = script.parse(["--json", str(file), "--only", "contiguous*", "--only", "QSA batch 1 *"])
    script.measure(options, record)
    script.measure(options, record)
    found = page.read(file)
    assert [each["name"] for each in found] == ["contiguous 16x8K h32:8", "contiguous 64x4K h64:8", "QSA batch 1 h24:2"]
    assert [each["results"].get("ours", {}).get("graph_milliseconds") for each in found] == [0.04, 0.05, None]
    assert found[2]["failed"] == {"ours": "RuntimeError: out of memory"}
    assert "contiguous 16x8K h32:8; ours 40.0/12.0/40.0 us, 105000 GB/s, host 11.1" in capsys.readouterr().out
    page.write(file, tmp_path / "notebook" / "serving.md")
    written = (tmp_path / "notebook" / "serving.md").read_text(encoding="utf-8")
    assert "# Attention over a KV cache" in written and "†" not in written and "‡" not in written
    script.measure(script.parse(["--budget", "-1"]), record)
    assert "not run: dense 64x4K h32:8 page 64, " in capsys.readouterr().out


def test_rows_cannot_be_changed(rows: Any, script: ModuleType) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        script.ROWS[0].page = 1
