"""The benchmark of published models' shapes, as far as it goes without a GPU: its table, oracles and page."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
from each import for_each
from scripts import imported

from codegen.library import find_spec
from codegen.receipts import source_sha256
from codegen.render import render
from runtime.verify.rows import carried_over

torch = pytest.importorskip("torch")

SVG = "{http://www.w3.org/2000/svg}"
SIZES = {"headline": True}
PATTERNS = {
    "dense": ({"kind": "dense"}, {"q_len": 100, "kv_len": 70}),
    "causal": ({"kind": "causal"}, {"q_len": 64, "kv_len": 100}),
    "window": ({"kind": "window", "left": 10, "right": 3}, {"q_len": 130}),
    "sink window": ({"kind": "sink_window", "sink": 20, "left": 10, "right": 9}, {"q_len": 130}),
    "documents": ({"kind": "documents", "tokens": 80, "equal": False}, {"q_len": 640}),
    "log-normal documents": ({"kind": "documents", "tokens": 80, "equal": False, "sigma": 1.0}, {"q_len": 640}),
    "whole documents": ({"kind": "documents", "tokens": 64, "causal": False}, {"q_len": 256}),
    "topk": ({"kind": "topk", "block": 64, "blocks": 4, "shared": 0.5}, {"q_len": 640}),
    "tiles": ({"kind": "tiles", "tile": 128, "grid": [2, 2, 3], "window": [1, 1, 3]}, {"q_len": 1536}),
    "causal topk": ({"kind": "causal_topk", "block": 64, "unit": 2, "units": 3}, {"q_len": 704}),
    "of K/V heads": ({"kind": "causal_topk", "block": 64, "units": 4, "lists": "kv_heads"}, {"q_len": 704}),
}
CPU = torch.device("cpu")
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "models_h200.jsonl"


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with imported("models") as module:
        yield module


@pytest.fixture(scope="module")
def problems(script: ModuleType) -> Any:
    """The script's module of problems: the one that its classes are of."""
    import model_problems

    return model_problems


@pytest.fixture(scope="module")
def peers(script: ModuleType) -> Any:
    import model_peers

    return model_peers


def attention_row(problems: Any, name: str, *, backward: bool = False, **more: Any) -> Any:
    """A small row of a pattern."""
    pattern, sizes = PATTERNS[name]
    fields = {"name": "small", "model": "A model", "layer": "a layer", "source": "https://a.b/c.json"}
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 16, "pattern": pattern, "sizes": [{**sizes, **SIZES}]}
    problem = problems.AttentionProblem.model_validate({**fields, **shape, **more})
    return problems.AttentionRow(problem, problem.sizes[0], backward)


def product_row(problems: Any, activations: str, *, backward: bool = False) -> Any:
    fields = {"name": "small", "model": "A model", "layer": "a layer", "source": "https://a.b/c.json"}
    size = {"block": 16, "sparsity": 0.5, "tokens": 8}
    shape = {"rows": 64, "columns": 96, "activations": activations, "sizes": [size]}
    problem = problems.ProductProblem.model_validate({**fields, **shape})
    return problems.ProductRow(problem, problem.sizes[0], backward)


def test_the_table_has_problems_with_sources(problems: Any) -> None:
    table = problems.table()
    every = [*table.attention, *table.products]
    assert len(every) == 41 and len({problem.name for problem in every}) == 41
    for problem in every:
        assert problem.source.scheme == "https" and problem.source.host, problem.name
        assert problem.checked and all(": " in where for where in problem.checked), problem.name
        assert sum(size.headline for size in problem.sizes) == 1, problem.name
        other = [size for size in problem.sizes if size.gradients and not size.headline]
        assert len(other) == (1 if problem.name == "llama3-8b-packed" else 0), problem.name
        assert len(problem.sizes) >= 3, f"{problem.name} has fewer than three sizes"
    rows = problems.rows()
    assert len({row.name for row in rows}) == len(rows)
    assert 10 <= sum(row.backward for row in rows) <= 18 and 123 <= sum(not row.backward for row in rows) <= 130


def test_a_size_with_a_pattern_has_that_of_its_own_length(problems: Any) -> None:
    """Lists, tiles and bands follow from a length by what the sources say."""
    rows = {row.name: row for row in problems.rows() if not row.backward}
    for problem in problems.table().attention:
        for size in problem.sizes:
            assert size.pattern is None or type(size.pattern) is type(problem.pattern), problem.name
            row = rows[f"{problem.name}-{size.label}"]
            pattern = row.problem.pattern
            assert pattern == (size.pattern or problem.pattern)
            if isinstance(pattern, problems.RandomBlocks):  # the share of the first size, rounded up
                first = problem.sizes[0]
                share = round(problem.pattern.blocks * problem.pattern.block / first.q_len, 1)
                assert pattern.blocks == math.ceil(share * size.q_len / pattern.block), row.name
            if isinstance(pattern, problems.Tiles):
                assert pattern.tile * math.prod(pattern.grid) == size.q_len, row.name
            if isinstance(pattern, problems.BandWithSink):  # three tenths of all pairs
                width = math.ceil(size.q_len * (1 - math.sqrt(0.7)) / 128) * 128
                assert pattern.left == pattern.right == width and size.q_len % pattern.sink == 0, row.name


def test_products_have_every_block_sparsity_and_width(problems: Any) -> None:
    sizes = [size for problem in problems.table().products for size in problem.sizes]
    assert {size.block for size in sizes} == {16, 32, 64, 128}
    assert {size.sparsity for size in sizes} == {0.3, 0.5, 0.7, 0.9}
    assert {size.tokens for size in sizes} == {1, 8, 64, 512, 8192}


@cache
def records() -> dict[str, Any]:
    """Rows that were measured."""
    return {each["name"]: each for each in map(json.loads, RESULTS.read_text(encoding="utf-8").splitlines())}


def all_rows() -> list[Any]:
    with imported("model_problems") as module:
        return [(module, row) for row in module.rows()]


@for_each("each", all_rows, lambda each: each[1].name)
def test_the_front_door_takes_each_row(each: Any) -> None:
    module, row = each
    inputs = row.inputs(torch.device("meta"))
    found = inputs.explain(gradients=row.backward, arch="sm_90a")
    named = found.kernels["O"] if hasattr(found, "kernels") else found.choice.named
    assert named.spec.dtype == row.problem.dtype
    if isinstance(row, module.AttentionRow):
        if not row.backward and row.name in records():
            record = records()[row.name]
            taken = named.stem in {kernel["name"] for kernel in record["kernels"]}
            assert record.get("calls_take") == (None if taken else named.stem), "python benchmarks/models.py --choices"
        assert row.problem.heads % row.problem.kv_count == 0
        if inputs.lists is not None:
            assert row.size.q_len % inputs.lists.block == 0 and row.size.keys % inputs.lists.block == 0
    else:
        assert row.problem.rows % row.size.block == 0 and row.problem.columns % row.size.block == 0


def drawn(mask: Any, inputs: Any, head: int) -> Any:
    """FlexAttention's mask as a matrix of bools."""
    queries, keys = torch.arange(inputs.size.q_len)[:, None], torch.arange(inputs.size.keys)[None]
    if inputs.lists is None:
        return mask.mask_mod(0, head, queries, keys).expand(inputs.size.q_len, inputs.size.keys)
    found, size = torch.zeros((inputs.size.q_len, inputs.size.keys), dtype=torch.bool), inputs.lists.block
    counts = (mask.kv_num_blocks, mask.full_kv_num_blocks)
    for kind, (count, lists) in enumerate(zip(counts, (mask.kv_indices, mask.full_kv_indices), strict=True)):
        for row in range(inputs.size.q_len // size):
            for column in lists[0, head, row, : count[0, head, row]].tolist():
                at = (slice(row * size, (row + 1) * size), slice(column * size, (column + 1) * size))
                found[at] |= True if kind else mask.mask_mod(0, head, queries[at[0]], keys[:, at[1]])
    return found


@for_each("name", lambda: PATTERNS)
def test_peers_and_the_oracle_see_the_same_pairs(problems: Any, peers: Any, name: str) -> None:
    torch.manual_seed(0)
    inputs = attention_row(problems, name).inputs(CPU)
    seen = [inputs.visible(head, torch.arange(inputs.size.q_len)) for head in range(4)]
    assert sum(int(matrix.sum()) for matrix in seen) == inputs.pairs()
    assert all(bool(matrix.any(1).all()) for matrix in seen)
    if (mask := peers.flex_mask(inputs)) is not None:
        for head in range(4):
            assert torch.equal(drawn(mask, inputs, head), seen[head])


def test_shared_entries_are_shared_by_four_lists(problems: Any) -> None:
    inputs = attention_row(problems, "topk").inputs(CPU)
    listed = [set(entries.tolist()) for entries in inputs.lists.full[0, 0]]
    for first in range(0, len(listed), 4):
        group = listed[first : first + 4]
        assert len(set.intersection(*group)) >= 2 and all(len(entries) == 4 for entries in group)


def front_door(inputs: Any, **changes: Any) -> Any:
    """What the front door computes, in float32 and in torch."""

    def call(q: Any, k: Any, v: Any, pattern: Any, *, sink: Any = None) -> Any:
        assert pattern is inputs.pattern
        heads = []
        for head in range(q.shape[1]):
            own = head // (q.shape[1] // k.shape[1])
            scores = q[:, head].float() @ k[:, own].float().mT * q.shape[3] ** -0.5 * changes.get("scale", 1.0)
            scores = scores.masked_fill(~inputs.visible(head, torch.arange(q.shape[2])), -torch.inf)
            if sink is not None:
                scores = torch.cat((scores, sink[head].expand(*scores.shape[:2], 1)), 2)
            heads.append(scores.softmax(-1)[..., : k.shape[2]] @ v[:, own].float())
        return torch.stack(heads, 1).to(q.dtype)

    return call


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("sink", [False, True])
def test_a_right_result_passes_and_a_wrong_one_does_not(
    script: Any, problems: Any, monkeypatch: pytest.MonkeyPatch, backward: bool, sink: bool
) -> None:
    torch.manual_seed(1)
    for name in PATTERNS:
        row = attention_row(problems, name, backward=backward, sink=sink)
        inputs = row.inputs(CPU)
        for scale, right in ((1.0, True), (1.5, False)):
            monkeypatch.setattr(script, "block_sparse_attention", front_door(inputs, scale=scale))
            errors, wrong = script.checked(row, inputs, {script.OURS: script.ours(inputs)})
            assert (list(errors), list(wrong)) == (([script.OURS], []) if right else ([], [script.OURS])), (name, wrong)


def test_lengths_of_log_normal_documents(problems: Any) -> None:
    torch.manual_seed(0)
    pattern = problems.Documents(kind="documents", tokens=1000, equal=False, sigma=1.0)
    lengths = torch.cat([pattern.boundaries(1 << 20).diff()[:-1] for _ in range(4)]).double()
    assert 900 < float(lengths.median()) < 1100 and 0.9 < float(lengths.log().std()) < 1.1
    bounds = pattern.boundaries(1000)
    assert bounds.dtype == torch.int32 and (int(bounds[0]), int(bounds[-1])) == (0, 1000)
    assert bool((bounds.diff() > 0).all())
    wide = problems.Documents(kind="documents", tokens=1, equal=False, sigma=3.0)
    assert bool((wide.boundaries(50).diff() > 0).all())


def packed_front_door(inputs: Any, taken: list[Any], scale: float = 1.0) -> Any:
    """What ``varlen_attention`` and peers compute of packed documents, in float32 and in torch."""

    def call(q: Any, k: Any, v: Any, *pattern: Any, cu_seqlens_q: Any, **options: Any) -> Any:
        taken.extend((q, k, v))
        parts = []
        for first, end in pairwise(cu_seqlens_q.tolist()):
            mine = [t[first:end].float().transpose(0, 1) for t in (q, k, v)]
            repeated = [t.repeat_interleave(len(mine[0]) // len(t), 0) for t in mine]
            scores = repeated[0] @ repeated[1].mT * q.shape[2] ** -0.5 * scale
            hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
            parts.append((scores.masked_fill(hidden, -torch.inf).softmax(-1) @ repeated[2]).transpose(0, 1))
        return torch.cat(parts).to(q.dtype)

    return call


@pytest.mark.parametrize("backward", [False, True])
def test_calls_of_packed_documents_take_packed_leaves(
    script: Any, problems: Any, peers: Any, monkeypatch: pytest.MonkeyPatch, backward: bool
) -> None:
    """So that nothing but the call is timed: gradients of views of larger leaves would be filled and copied."""
    torch.manual_seed(1)
    pattern, sizes = PATTERNS["log-normal documents"]
    row = attention_row(problems, "log-normal documents", backward=backward, pattern={**pattern, "packed": True})
    inputs = row.inputs(CPU)
    assert inputs.is_packed() and "sigma" in script.shape_of(row)["shape"]["pattern"]
    for scale, right in ((1.0, True), (1.5, False)):
        taken: list[Any] = []
        function = packed_front_door(inputs, taken, scale)
        monkeypatch.setattr(script, "varlen_attention", function)
        library = SimpleNamespace(
            flash_attn_varlen_func=lambda *given, function=function, **more: (function(*given, **more), None)
        )
        for find in ("find_fa3", "find_fa4"):
            monkeypatch.setattr(peers, find, lambda library=library: library)
        calls = {script.OURS: script.ours(inputs), "FA4": peers.fa4(inputs)}
        calls |= {} if backward else {"FA3 (bf16)": peers.fa3(inputs)}
        errors, wrong = script.checked(row, inputs, calls)
        assert set(errors) == (set(calls) if right else set()) and set(wrong) == (set() if right else set(calls))
        assert all(t.dim() == 3 and t.shape[0] == sizes["q_len"] and t.is_contiguous() for t in taken)
        assert all(t.is_leaf and t.requires_grad == backward for t in taken)


@pytest.mark.parametrize("activations", ["tokens", "features"])
@pytest.mark.parametrize("backward", [False, True])
def test_products_are_compared_with_their_own_matrix(
    script: Any, problems: Any, peers: Any, monkeypatch: pytest.MonkeyPatch, activations: str, backward: bool
) -> None:
    def product(weight: Any, b: Any, missing: float = 1.0) -> Any:
        counts = weight.crow_indices.diff().long()
        block_rows = torch.arange(len(counts)).repeat_interleave(counts)
        size = weight.values.shape[1]
        out = torch.zeros((len(counts), size, b.shape[1]))
        blocks = b.unflatten(0, (-1, size))[weight.col_indices.long()]
        return out.index_add(0, block_rows, weight.values.float() @ blocks.float() * missing).flatten(0, 1).to(b.dtype)

    torch.manual_seed(2)
    row = product_row(problems, activations, backward=backward)
    inputs = row.inputs(CPU)
    monkeypatch.setattr(script, "bsr_matmul", product)
    calls = {script.OURS: script.ours(inputs), "cuBLAS, dense": peers.cublas(inputs)}
    errors, wrong = script.checked(row, inputs, calls)
    assert list(errors) == [script.OURS, "cuBLAS, dense"] and not wrong
    monkeypatch.setattr(script, "bsr_matmul", lambda weight, b: product(weight, b, 0.9))
    errors, wrong = script.checked(row, inputs, {script.OURS: script.ours(inputs)})
    assert list(wrong) == [script.OURS]
    assert row.flops(inputs) == (2 if backward else 1) * 2 * 12 * 16 * 16 * 8


def test_a_row_that_cannot_run_says_why(
    script: Any, problems: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without a GPU our call and the peers' fail: each is in the record, with its reason."""
    packages = {"FA4", "cuDNN BSA", "FlexAttention FLASH"}
    monkeypatch.setattr(script, "PEERS", [peer for peer in script.PEERS if peer.label in packages])
    real = problems.AttentionInputs.explain
    monkeypatch.setattr(
        problems.AttentionInputs, "explain", lambda self, *, gradients: real(self, gradients=gradients, arch="sm_90a")
    )
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(script, "times_of", lambda calls, **options: ({label: {} for label in calls}, {}))
    record = script.record_of(attention_row(problems, "causal topk"), every=False, seconds=0.1, device="cpu")
    assert set(record["failed"]) == {"ours", "FA4", "FlexAttention FLASH"} and not record["results"]
    (kernel,) = record["kernels"]
    assert kernel["computes"] == "O" and kernel["name"] and kernel["source_sha256"] is None
    file = tmp_path / "models.jsonl"
    file.write_text(json.dumps(record, allow_nan=False) + "\n")
    assert carried_over(file).text == file.read_text()  # as codegen migrate reads it


def test_calls_take_turns_when_the_host_is_timed(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(script, "host_microseconds", lambda call: float(len(made.append(call()) or made)))
    calls = {"ours": lambda: "ours", "FA4": lambda: "FA4", "slow": lambda: "slow"}
    found = script.host_times(calls, {"slow"})
    turns = script.HOST_REPEATS
    assert made == ["ours", "FA4", "slow", *["ours", "FA4"] * (turns - 1)]
    assert {label: len(times) for label, times in found.items()} == {"ours": turns, "FA4": turns, "slow": 1}


def test_rows_are_chosen_by_name_part_and_direction(script: Any, tmp_path: Path) -> None:
    def names(*arguments: str) -> list[str]:
        return [row.name for row in script.chosen_rows(script.parse(arguments))]

    headline = names()
    assert (
        len(headline) == 41 + len(names("--backward"))
        and len(names("--all", "--backward")) == 18
        and len(names("--all")) > len(headline)
    )
    assert names("--only", "llama3-70b-*") == ["llama3-70b-8192", "llama3-70b-4096", "llama3-70b-2048"]
    parts = [names("--part", f"{i}/3") for i in (1, 2, 3)]
    assert sorted(name for names_of_part in parts for name in names_of_part) == sorted(headline)
    done = tmp_path / "models.jsonl"
    first = script.shape_of(script.chosen_rows(script.parse([]))[0])
    done.write_text(json.dumps(first) + "\n")
    assert names("--json", str(done)) == headline[1:]
    assert names("--json", str(done), "--again") == headline


def test_a_broken_context_ends_the_run(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The row that broke it is in the file, so that the next run begins behind it."""

    def broken() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    about = {"device": "a GPU", "driver": "1", "versions": {}}
    monkeypatch.setattr(script, "environment", lambda packages: about)
    monkeypatch.setattr(script, "record_of", lambda *row, **options: broken())
    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    file = tmp_path / "models.jsonl"
    options = script.parse(["--json", str(file), "--only", "gpt2-*"])
    first, *others = [row.name for row in script.chosen_rows(options)]
    with pytest.raises(SystemExit, match=f"a call of {first} broke the CUDA context"):
        script.measure(options)
    (record,) = map(json.loads, file.read_text().splitlines())
    assert record["failed"] == {"ours": "RuntimeError: an illegal memory access was encountered"}
    assert [row.name for row in script.chosen_rows(options)] == others
    file.write_text(json.dumps({**record, "shape": {**record["shape"], "q_len": 1}}) + "\n")
    assert [row.name for row in script.chosen_rows(options)] == [first, *others]


def kernel(stem: str, *, receipt: bool = True, source: str | None = None) -> dict[str, Any]:
    """The kernel of a row, by default measured with the source of today."""
    named = find_spec(stem)
    found = {"name": stem, "computes": "O", "receipt": receipt, "results": {}}
    spec = json.loads(named.spec.canonical_json())
    return found | {"spec": spec, "source_sha256": source or source_sha256(render(named))}


def record(name: str, ours: float, theirs: float, **more: Any) -> dict[str, Any]:
    """A row of a page, with made-up times."""

    def times(single: float, many: float, graph: float | None, host: float) -> dict[str, float]:
        found = {"milliseconds": single, "back_to_back_milliseconds": many, "host_microseconds": host}
        return found if graph is None else found | {"graph_milliseconds": graph}

    results = {
        "ours": times(ours, ours, ours, 12.0),
        "FA4": times(theirs, theirs * 1.1, None, 70.0),
        "SDPA": times(theirs * 2, theirs, theirs, 11.0),
    }
    return {
        **{"name": name, "model": "A model", "layer": "a layer", "source": "https://a.b/c", "assumed": []},
        **{"headline": True, "backward": False, "device": "a GPU", "driver": "1", "date": "2026-01-01"},
        "versions": {"torch": "2"},
        "kernels": [kernel("h100_dense")],
        "results": results,
        "failed": {},
        **more,
    }


@pytest.fixture(scope="module")
def page(script: ModuleType) -> Any:
    import models_page

    return models_page


def test_the_page_has_ratios_to_the_best_peer_of_each_timing(page: Any) -> None:
    records = [
        record("ahead", 1.0, 1.25),
        record("behind", 1.0, 0.9, kernels=[kernel("h100_causal", receipt=False)]),
        record(
            "late", 1.0, 1.2, headline=False, kernels=[kernel("h100_dense"), kernel("h100_causal", source="0" * 64)]
        ),
        record("nothing", 1.0, 1.0, results={}, failed={"ours": "ValueError: no"}),
    ]
    text = page.text_of(records, page.is_current)
    assert "## Logits with" not in text and "## Logits with" in page.text_of(records, page.is_current, None, records)
    assert "| `ahead` | 1,000 / 1,000 | FA4 / SDPA | 1,250 / 1,250 | 1.25 / 1.25 |" in text
    assert "| `behind`‡ | 1,000 / 1,000 | FA4 / SDPA | 900 / 900 | **0.90 / 0.90** |" in text
    assert "2 of 3 rows are as fast as the best peer, or faster, in both timings. Slower in one: `behind`" in text
    assert page.ratios(record("nearly", 1.0, 0.997)) == "**0.997 / 0.997**"
    assert "| `late`† |" in text and "| `nothing` | - / - | - | - / - | - |" in text
    assert "| `ahead` | 1,000 | 1,250 | 1.25 | 12.0 | 11.0 |" in text
    assert "- `nothing`: ours: ValueError: no" in text
    assert all(len(line.encode()) <= 200 for line in text.splitlines())


def test_the_page_links_to_what_limits_rows_behind_a_peer(page: Any) -> None:
    import model_limits

    heading, rows = next(iter(model_limits.SECTIONS.items()))
    records = [record(rows[0], 1.0, 0.9), record("new", 1.0, 0.9), record("ahead", 1.0, 1.25)]
    text = page.text_of([*records, record(rows[1], 1.0, 1.25)], page.is_current)
    lines = text[text.index("## Limits") : text.index("## In a CUDA graph")].splitlines()
    link = f"[{heading}]({model_limits.NOTES}#{model_limits.anchor(heading)})"
    assert lines[4:6] == [f"- {link}: `{rows[0]}`", f"- {model_limits.UNEXPLAINED}: `new`"]
    assert "## Limits" not in page.text_of(records[2:], page.is_current)


def test_rows_with_a_limit_are_in_the_table_and_the_notes_have_their_sections(problems: Any, page: Any) -> None:
    import model_limits

    explained = [name for names in model_limits.SECTIONS.values() for name in names]
    assert len(set(explained)) == len(explained) and set(explained) <= {row.name for row in problems.rows()}
    notes = (page.PAGE.parent / model_limits.NOTES).read_text(encoding="utf-8").splitlines()
    headings = {line.lstrip("#").strip() for line in notes if line.startswith("#")}
    assert set(model_limits.SECTIONS) <= headings


def test_each_row_behind_a_peer_is_under_the_limits_of_the_page(script: ModuleType, page: Any) -> None:
    """Of the committed page: one without an explanation is named as such."""
    import model_limits

    text = page.PAGE.read_text(encoding="utf-8")
    section = text[text.index("## Limits") : text.index("## In a CUDA graph")]
    results = Path(script.__file__).parent / "results" / "models_h200.jsonl"
    listed = [each for each in page.read(results) if script.OURS in each["results"]]
    behind = {each["name"] for each in listed if page.is_behind(each)}
    explained = {name for names in model_limits.SECTIONS.values() for name in names}
    assert all(f"`{name}`" in section for name in behind)
    assert (model_limits.UNEXPLAINED in section) == bool(behind - explained)


def test_the_page_marks_rows_that_were_measured_with_other_numbers(page: Any) -> None:
    records = [record(name, 1.0, 1.25, shape={"q_len": 64}) for name in ("kept", "changed", "gone")]
    today = {"kept": records[0], "changed": {**records[1], "shape": {"q_len": 96}, "layer": "a new layer"}}
    text = page.text_of(records, page.is_current, today)
    assert all(name in text for name in ("| `kept` |", "| `changed`§ |", "| `gone`§ |", "§: measured before"))
    assert "- `changed`: A model, a new layer" in text
    assert "§" not in page.text_of(records, page.is_current)


def test_the_picture_has_a_dot_for_each_timing(page: Any) -> None:
    records = [record("ahead", 1.0, 1.25), record("far", 1.0, 5.0), record("other", 1.0, 9.0, headline=False)]
    drawing = ElementTree.fromstring(page.picture(records))
    dots = [each for each in drawing.iter(f"{SVG}circle") if float(each.attrib["cy"]) > page.TOP]
    places = [float(dot.attrib["cx"]) for dot in dots]
    per_unit = page.SPAN / (page.WIDEST_RATIO - page.LEAST_RATIO)
    assert places[:2] == pytest.approx([page.LEFT + (1.25 - page.LEAST_RATIO) * per_unit] * 2, abs=0.01)
    assert places[2:] == [page.LEFT + page.SPAN] * 2
    assert {text.text for text in drawing.iter(f"{SVG}text")} >= {"ahead", "far", "5.0", "single calls", "back to back"}


def test_of_two_rows_with_a_name_the_later_one_counts(page: Any, tmp_path: Path) -> None:
    file, written = tmp_path / "models.jsonl", tmp_path / "models.md"
    rows = [record("a", 1.0, 2.0), record("b", 1.0, 2.0), record("a", 1.0, 3.0)]
    file.write_text("".join(json.dumps(each) + "\n" for each in rows))
    assert [(each["name"], page.ratio(each, page.SINGLE)) for each in page.read(file)] == [("a", 3.0), ("b", 2.0)]
    page.write(file, written)
    assert "| `a` | 1,000 / 1,000 | FA4 / SDPA | 3,000 / 3,000 | 3.00 / 3.00 |" in written.read_text()
    assert ElementTree.parse(written.with_suffix(".svg"))
    with pytest.raises(SystemExit, match="of one, please"):
        page.text_of([record("a", 1.0, 2.0), record("b", 1.0, 2.0, device="another")], bool)
