"""The benchmark of engines' attention layers, as far as it goes without a GPU: calls, oracles, and tables of pages."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from scripts import imported

torch = pytest.importorskip("torch")

import oracle_kernel  # noqa: E402
import paged_oracle  # noqa: E402

from codegen.library import find_spec  # noqa: E402
from codegen.receipts import source_sha256  # noqa: E402
from codegen.render import render  # noqa: E402
from runtime.integrations import transformers_packed  # noqa: E402
from runtime.integrations.sglang import layers as sglang_layers  # noqa: E402
from runtime.integrations.sglang import selections as sglang_selections  # noqa: E402
from runtime.integrations.vllm import layers as vllm_layers  # noqa: E402
from runtime.integrations.vllm import selections  # noqa: E402

CPU = torch.device("cpu")
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "engines_h200.jsonl"


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with imported("engines") as module:
        yield module


@pytest.fixture(scope="module")
def page(script: ModuleType) -> Any:
    return script.engines_page


@pytest.fixture(scope="module")
def rows(script: ModuleType) -> Any:
    import engines_rows

    return engines_rows


@pytest.fixture(autouse=True)
def no_stand_in_is_left() -> Iterator[None]:
    """SGLang's settings are stand-ins in this script; other tests look for SGLang itself."""
    before = set(sys.modules)
    yield
    for name in [each for each in sys.modules if each.partition(".")[0] == "sglang" and each not in before]:
        del sys.modules[name]


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of kernels by the definition, on an H100 that there need not be."""
    torch.manual_seed(0)
    for module in (vllm_layers, sglang_layers, selections, sglang_selections, transformers_packed):
        monkeypatch.setattr(module, "paged_attention", paged_oracle.attend)
    monkeypatch.setattr(vllm_layers.Layer, "prepare", lambda self, dtype, sink: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    oracle_kernel.install(monkeypatch)


def small(rows: Any, row: Any) -> Any:
    """The row with small sizes, in proportion."""
    model = row.model._replace(heads=4, kv_heads=4 if row.model.heads == row.model.kv_heads else 2, head_dim=64)
    sizes = row.sizes
    if isinstance(sizes, rows.Pages):
        lengths, queries = (40, 7, 33, 30), tuple(n if n < 16 else 30 for n in sizes.queries[-4:])
        queries = (1, 1, 1, 30) if len(set(sizes.queries)) > 1 else queries
        lengths = lengths if max(queries) < 16 or min(queries) == 1 else (40,)
        window = None if sizes.window is None else rows.Window(2, 9)
        sizes = rows.Pages(lengths, queries[: len(lengths)], sizes.page, window)
    elif isinstance(sizes, rows.Video):
        sizes = sizes._replace(grid=(5, 9, 10), window=(1, 2, 1), sparsity=0.5)
    elif isinstance(sizes, rows.Prompt):
        sizes = rows.Prompt(200, None if sizes.window is None else rows.Window(4, 30))
    else:
        lists = {"entries": 2, "entry_keys": sizes.entry_keys}
        shape = {"heads": 4, "kv_heads": 2, "head_dim": 64, "queries": min(sizes.queries, 5)}
        sizes = replace(sizes, lengths=(768, 768) if sizes.queries == 1 else (768,), **shape, **lists)
    return replace(row, model=model, sizes=sizes)


def test_rows_have_names_of_their_own_and_a_page(script: ModuleType, page: Any) -> None:
    names = [row.name for row in script.ROWS]
    assert len(set(names)) == len(names) == 26
    for row in script.ROWS:
        assert row.page in page.PAGES and row.tokens > 0
        json.dumps(row.shape)


@pytest.mark.usefixtures("computed")
def test_calls_compute_what_the_oracle_does(script: ModuleType, rows: Any) -> None:
    """Ours by each adapter, and torch's peers. Those of a wheel are not called without it."""
    seen = set()
    for full in script.ROWS:
        row = small(rows, full)
        problem = rows.make_problem(row, CPU)
        made = script.calls_of(row, problem, None)
        assert not made.failed, (row.name, made.failed)
        errors, wrong = script.checked(problem, made.calls, made.all_keys)
        assert not wrong and set(errors) == set(made.calls) and script.OURS in errors, (row.name, wrong)
        seen |= {(row.page, label) for label in errors}
    peers = {("transformers", "SDPA over gathered keys"), ("transformers", "SDPA"), ("diffusers", "SDPA, all keys")}
    assert peers <= seen


@pytest.mark.usefixtures("computed")
def test_a_pattern_shows(script: ModuleType, rows: Any) -> None:
    """Fewer keys than the model's make another result, so that a call without the pattern gets no time."""
    for full in script.ROWS:
        if getattr(full.sizes, "window", None) is None or getattr(full.sizes, "pattern", "window") == "dense":
            continue
        problem = rows.make_problem(small(rows, full), CPU)
        call, _ = script.engines_calls.ours(problem)
        errors, wrong = script.checked(problem, {"ours": call}, {"ours": True})
        assert not errors and "wrong result" in wrong["ours"], full.name


def test_peers_of_a_wheel_are_called_where_they_compute_the_layer(script: ModuleType, tmp_path: Path) -> None:
    labels = {row.name: list(script.engines_calls.peers_of(row, tmp_path)) for row in script.ROWS}
    assert labels["vllm: Llama 3 8B, 64 steps over 4096 keys"] == ["FA3"]
    assert labels["vllm: Llama 3 8B, the same, policy: window of 4096 and 4 first keys"] == ["FA3, all keys"]
    assert labels["vllm: Qwen4Exp, 32 steps over lists of 2048 tokens"] == ["vLLM Triton"]
    assert labels["sglang-diffusion: Wan 2.1 14B, VSA, a tenth of the tiles"] == ["SDPA, all keys", "FA3, all keys"]
    assert labels["diffusers: Wan 2.1 14B, the model's own attention"] == ["SDPA"]
    row = next(
        row for row in script.ROWS if row.name == "sglang: MiniMax M3, 32 steps over lists of 16 blocks, bf16 cache"
    )
    assert labels[row.name] == []
    for path in (script.engines_calls.BLOCKS / "decode" / "topk_sparse.py", script.engines_calls.TOKENS):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).touch()
    assert list(script.engines_calls.peers_of(row, tmp_path)) == ["SGLang Triton"]


def test_each_call_reaches_the_driver_and_its_kernels_are_recorded(
    script: ModuleType, rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a driver that takes launches and runs none, the heads of the models, and short sequences."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    monkeypatch.setattr(vllm_layers.Layer, "prepare", lambda self, dtype, sink: None)
    with imported("pretended") as pretended:
        for row in script.ROWS:
            short = replace(small(rows, row), model=row.model)
            if not isinstance(row.sizes, (rows.Pages, rows.Video, rows.Prompt)):
                heads = {"heads": row.sizes.heads, "kv_heads": row.sizes.kv_heads, "head_dim": row.sizes.head_dim}
                short = replace(short, sizes=replace(short.sizes, **heads))
            problem = rows.make_problem(short, CPU)
            with pretended.pretended(), script.launched() as found:
                script.engines_calls.ours(problem)[0]()
            assert found, row.name
            head_dim = {spec.head_dim for spec in found.values() if spec.op in ("attention", "paged_attention")}
            assert head_dim == {row.model.head_dim}, row.name


def made_up(row: Any, times: dict[str, tuple[float, float]], **more: Any) -> dict[str, Any]:
    """A record with microseconds in a graph and back to back, by label."""
    results = {
        label: {"graph_milliseconds": graph / 1e3, "back_to_back_milliseconds": eager / 1e3, "error": 1e-3}
        for label, (graph, eager) in times.items()
    }
    named = find_spec("h100_paged_d128")
    kernel = {"name": named.stem, "receipt": True, "spec": json.loads(named.spec.canonical_json())}
    kernel["source_sha256"] = source_sha256(render(named))
    about = {"device": "a GPU", "driver": "1", "versions": {"torch": "2"}, "date": "2026-01-02"}
    model = {"model": row.model.name, "source": row.model.source, "layers": row.model.layers}
    model["heads"] = [row.model.heads, row.model.kv_heads, row.model.head_dim]
    named_row = {"name": row.name, "page": row.page, "text": row.text, "dtype": "bf16", "tokens": row.tokens}
    return {
        **{**named_row, **model, "adapter": "an entry", "kernels": [kernel], "results": results, "failed": {}},
        **about,
        **more,
    }


def test_a_table_has_a_row_for_each_other_call(script: ModuleType, page: Any) -> None:
    steps, windowed, batch = (
        next(row for row in script.ROWS if text in row.name)
        for text in ("vllm: Llama 3 8B, 64 steps", "policy", "continuous batching")
    )
    records = [
        made_up(steps, {"ours": (250.0, 260.0), "FA3": (249.5, 270.0)}),
        made_up(windowed, {"ours": (50.0, 60.0)}, failed={"FA3, all keys": "ValueError: no"}),
    ]
    text = page.text_of(records, lambda record: "policy" not in record["name"])
    assert "| Llama 3 8B: 64 steps over 4096 keys | 250 | 256,000 | FA3 | 250 | **0.998** | 260 / 270 |" in text
    assert "first keys† | 50.0 | 320,000 | - | - | - | 60.0 / - |" in text
    assert "[Llama 3 8B](https://huggingface.co/meta-llama/Meta-Llama-3-8B/blob/main/config.json) (32 heads of 128" in (
        text.replace("\n", " ")
    )
    assert (
        "No time: FA3, all keys in vllm: Llama 3 8B" in text.replace("\n", " ") and "Timed as ours: an entry." in text
    )
    two = {"ours": (50.0, 60.0), "FA3": (60.0, 80.0), "SDPA over gathered keys": (500.0, 510.0)}
    text = page.text_of([made_up(batch, two)], lambda record: True)
    assert "|  |  |  | SDPA over gathered keys | 500 | 10.00 | 60.0 / 510 |" in text
    assert page.text_of([], lambda record: True) == page.UNMEASURED
    with pytest.raises(SystemExit, match="another, driver 1, 2026"):
        page.text_of([*records, {**records[0], "device": "another"}], lambda record: True)


def test_pages_are_written_between_markers(script: ModuleType, page: Any, tmp_path: Path) -> None:
    file = tmp_path / "engines.jsonl"
    record = made_up(script.ROWS[0], {"ours": (250.0, 260.0)})
    file.write_text(json.dumps(record) + "\n")
    for name in set(page.PAGES.values()):
        (tmp_path / name).write_text((page.GUIDE / name).read_text(encoding="utf-8"), encoding="utf-8")
    assert page.write(file, tmp_path, check=True) == 1
    assert page.write(file, tmp_path) == 0 and page.write(file, tmp_path, check=True) == 0
    assert "64 steps over 4096 keys | 250 |" in (tmp_path / "vllm.md").read_text(encoding="utf-8")
    assert page.UNMEASURED in (tmp_path / "sglang.md").read_text(encoding="utf-8")


def test_committed_pages_are_those_of_the_committed_results(page: Any) -> None:
    assert page.write(RESULTS, check=True) == 0


def test_rows_are_appended_until_the_budget_is_spent(
    script: ModuleType, page: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    monkeypatch.setattr(script, "environment", lambda _: {"device": "a GPU", "driver": "1", "versions": {}})
    monkeypatch.setattr(script, "free_memory", lambda: None)
    file = tmp_path / "engines.jsonl"

    def record(row: Any, folder: Any, seconds: float) -> dict[str, Any]:
        if "Wan" in row.name:
            raise RuntimeError("out of memory")
        return made_up(row, {"ours": (10.0, 12.0)})

    script.measure(script.parse(["--json", str(file), "--only", "transformers*", "--only", "diffusers*"]), record)
    found = page.read(file)
    assert len(found) == 5 and found[-1]["failed"] == {"ours": "RuntimeError: out of memory"}
    assert all(text for of_page in page.texts(found, lambda _: True).values() for text in of_page.values())
    script.measure(script.parse(["--budget", "-1"]), record)
    assert "not run: vllm: Llama 3 8B, 64 steps over 4096 keys, " in capsys.readouterr().out
