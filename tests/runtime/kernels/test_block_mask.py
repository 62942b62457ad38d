"""Block lists of masks: the plan, what a call checks, and the generated source run on the host, thread by thread."""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from codegen.errors import SpecError
from codegen.library import find_spec
from codegen.planning import plan_for
from codegen.problem import BlockMaskShape
from codegen.render import generate, render

torch = pytest.importorskip("torch")

import host_block_mask  # noqa: E402
import known_functions  # noqa: E402
from host_streams import pretend_stream  # noqa: E402
from torch._subclasses import FakeTensorMode  # noqa: E402
from torch.nn.attention import flex_attention as flex  # noqa: E402

from codegen.patterns.block_lists import expression_of  # noqa: E402
from runtime import create_block_mask  # noqa: E402
from runtime.block_maps import map_of  # noqa: E402
from runtime.errors import ArgumentError  # noqa: E402
from runtime.ops import block_mask as ops  # noqa: E402
from runtime.patterns import BlockLists  # noqa: E402
from runtime.verify import block_mask as verified  # noqa: E402

CPU = torch.device("cpu")
RUNS = platform.machine() == "x86_64" and shutil.which("g++") is not None
on_the_host = pytest.mark.skipif(not RUNS, reason="needs g++, and the registers of an x86-64")
DOCUMENTS = "doc[batch, q_idx] == doc[batch, kv_idx] and q_idx >= kv_idx"
LISTS = {"kind": "block_lists", "block": {"q": 64, "kv": 32}}


def fields(mask: str, **aux: str) -> dict[str, Any]:
    return {"op": "block_mask", "arch": "sm_90a", "pattern": {**LISTS, "mask": mask, "aux": aux}}


@pytest.fixture(autouse=True)
def _without_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Lets calls on the CPU run the kernel on the host."""
    pretend_stream(monkeypatch)

    @lru_cache
    def kernel(index: None, pattern: str) -> host_block_mask.HostKernel:
        named = find_spec({"op": "block_mask", "arch": "sm_90a", "pattern": json.loads(pattern)})
        (tmp_path / named.stem).mkdir()
        return host_block_mask.HostKernel(named, tmp_path / named.stem)

    monkeypatch.setattr(ops, "_kernel", kernel)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "device_of", lambda device, tensors: CPU)


def check(pattern: BlockLists, batch: int, heads: int, q_len: int, kv_len: int) -> None:
    spec, sizes = pattern.spec_pattern(), {"batch": batch, "heads": heads, "q_len": q_len, "kv_len": kv_len}
    seen = verified.seen_pairs(expression_of(spec["mask"], spec.get("aux", {})), sizes, pattern.aux or {}, CPU)
    lists = (pattern.kv_num_blocks, pattern.kv_indices, pattern.full_kv_num_blocks, pattern.full_kv_indices)
    for found, right in zip(lists, verified.lists_of(seen, pattern.block), strict=True):
        assert found is not None and torch.equal(found, right)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tile": {"n": 64}}, "tile.n: is 64; allowed: 128, 256"),
        ({"stages": 2}, "stages: is 2"),
        ({"mma": "wmma"}, "mma: wmma is not possible here"),
        ({"pattern": {"kind": "causal"}}, "pattern.kind: is causal; allowed: block_lists"),
        ({"pattern": {**LISTS, "mask": "causal"}}, "pattern.mask: is not an expression"),
        ({"pattern": {**LISTS, "mask": "q_idx < 0"}}, "pattern.mask: .*it hides every pair"),
    ],
)
def test_what_it_is_not_written_for_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        plan_for(find_spec({**fields("q_idx >= kv_idx"), **changes}))


def test_a_launch() -> None:
    args = plan_for(find_spec("h100_block_mask")).problem(BlockMaskShape(2, 16, 131072, 131000))
    assert args.numbers["list_heads"] == 1
    assert (args.numbers["rows"], args.numbers["blocks"], args.numbers["words"]) == (2048, 4096, 32)
    assert (args.tiles, args.prologue_grid, args.epilogue_grid) == (2048 * 4, 512, 256)
    assert args.scratch == dict.fromkeys(("row_ranges", "column_ranges"), 2048 * 16) | dict.fromkeys(
        ("partial_blocks", "full_blocks"), 2048 * 32 * 4
    )


def test_what_a_source_does_not_need_is_not_in_it() -> None:
    source = render(find_spec(fields("q_idx >= kv_idx")))
    assert "_ranges(const" not in source and "RowRanges" not in source and "float_range" not in source
    assert plan_for(find_spec(fields("q_idx >= kv_idx"))).prologue is None


def test_one_text_for_all_architectures() -> None:
    texts = [render(find_spec({**fields("q_idx >= kv_idx"), "arch": arch})) for arch in ("sm_89", "sm_90a")]
    ours, theirs = (
        text.partition("\n\n")[2].replace(arch, "") for text, arch in zip(texts, ("sm_89", "sm_90a"), strict=True)
    )
    stems = [find_spec({**fields("q_idx >= kv_idx"), "arch": arch}).stem for arch in ("sm_89", "sm_90a")]
    assert ours.replace(stems[0].replace("sm_89", ""), "") == theirs.replace(stems[1].replace("sm_90a", ""), "")


SMALL: tuple[verified.Case, ...] = (
    verified.Case("odd_lengths", 141, 277),
    verified.Case("no_order", 200, 333, ascending=False),
    verified.Case("several_thread_blocks_of_a_row", 10, 33000),
    *(case for case in verified.CASES if case.q_len * case.kv_len * case.batch < 10**5),
)


@on_the_host
def test_cases(recorded: Callable[..., None], tmp_path: Path) -> None:
    named = find_spec("h100_block_mask")
    recorded(generate(named).source, repr(SMALL))
    kernel = host_block_mask.HostKernel(named, tmp_path)
    for order, case in enumerate(SMALL):
        kernel.host.order = order
        outcome = verified.run_case(kernel, case, CPU)
        assert outcome.passed, outcome


@on_the_host
@pytest.mark.parametrize(
    ("was", "instead"),
    [
        ("i = queries.low + warp;", "i = queries.low + warp + kWarps;"),
        ("any_hides = __syncthreads_or(hides)", "any_hides = hides"),
        ("list[entries + __popc(listed & lanes_before)]", "list[entries + __popc(listed) - 1]"),
    ],
    ids=["queries", "a vote", "a place"],
)
def test_what_is_missing_shows(was: str, instead: str, recorded: Callable[..., None], tmp_path: Path) -> None:
    """A pair is hidden that one lane of one warp looks at."""
    named = find_spec(fields("q_idx != 3 or kv_idx != 21"))
    source = generate(named).source
    assert source.count(was) == 1
    changed = source.replace(was, instead)
    recorded(changed)
    kernel = host_block_mask.HostKernel(named, tmp_path, changed)
    assert not verified.run_case(kernel, verified.Case("missing", 130, 100), CPU).passed


@on_the_host
@pytest.mark.parametrize("name", ["of_the_head", "natten"])
def test_functions_as_users_write_them(name: str, on_cpu: None) -> None:
    sizes = (known_functions.BATCH, known_functions.HEADS, known_functions.LENGTH, known_functions.LENGTH)
    check(create_block_mask(known_functions.MASKS[name], *sizes, BLOCK_SIZE=(8, 16)), *sizes)


@on_the_host
def test_numbers_and_what_is_none(on_cpu: None) -> None:
    time = torch.rand(2, 300).cumsum(-1)
    time[0, 17], time[1, 200:] = torch.nan, torch.inf
    text = "abs(time[batch, q_idx] - time[batch, kv_idx]) * 0.5 < 10.0 and time[batch, q_idx] >= time[batch, kv_idx]"
    check(create_block_mask(text, 2, 3, 300, 300, BLOCK_SIZE=(16, 16), aux={"time": time}), 2, 3, 300, 300)


def test_an_operator_without_values() -> None:
    """What torch.compile and torch.export see."""
    pattern = json.dumps(
        {
            **LISTS,
            "mask": DOCUMENTS.replace("doc[batch, kv", "kv_doc[batch, kv"),
            "aux": {"doc": "int32[batch, q_len]", "kv_doc": "int32[batch, kv_len]"},
        }
    )
    with FakeTensorMode():
        doc = torch.empty(2, 1000, dtype=torch.int32, device="cuda")
        found = torch.ops.sparse_kernel_codegen.create_block_mask(
            [doc, doc], pattern=pattern, batch=2, heads=4, q_len=1000, kv_len=1000, device=torch.device("cuda", 0)
        )
    assert [tuple(each.shape) for each in found] == [(2, 1, 16), (2, 1, 16, 32)] * 2
    assert all(each.dtype == torch.int32 and each.device == torch.device("cuda", 0) for each in found)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"B": 0}, r"B: is 0, expected a whole number from 1 to 2\^30"),
        ({"H": True}, "H: is True"),
        ({"Q_LEN": 1.5}, "Q_LEN: is 1.5"),
        ({"KV_LEN": 2**31}, "KV_LEN: is 2147483648"),
        ({"KV_LEN": None}, "KV_LEN: is None"),
        ({"B": None}, "B: is None, but the mask depends on the batch: pass their number"),
        ({"BLOCK_SIZE": 256}, "BLOCK_SIZE: is 256, expected a number or .*128"),
        ({"BLOCK_SIZE": (128, 100)}, r"BLOCK_SIZE: is \(128, 100\), expected"),
        ({"mask_mod": "causal"}, "mask_mod: is 'causal': .*causal"),
        ({"mask_mod": lambda b, h, q, k: q, "aux": None}, "mask: its type is int"),
        ({"mask_mod": 3}, "mask_mod: is int, expected a function or an expression"),
        ({"aux": {}}, "mask_mod: .*doc"),
        ({"aux": {"doc": torch.zeros(9, 64, dtype=torch.int32)}}, r"aux\['doc_kv'\]: has shape \(9, 64\)"),
        ({"device": "meta"}, "device: is meta, expected a CUDA device"),
        ({"device": "nothing"}, "device: is 'nothing'"),
        ({"separate_full_blocks": False}, "separate_full_blocks: is False, expected True"),
        ({"compute_dq_write_order": True}, "compute_dq_write_order: is True, expected False"),
        ({"dq_kv_order": False}, "dq_kv_order: is False, expected True"),
        ({"block": (64, 64), "BLOCK_SIZE": 64}, "block: was passed together with BLOCK_SIZE"),
        ({"blocks": (64, 64)}, "blocks: is not an argument"),
    ],
)
def test_what_is_no_call(changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "device" not in changes:
        monkeypatch.setattr(ops, "device_of", lambda device, tensors: CPU)
    given: dict[str, Any] = {"B": 1, "H": 1, "Q_LEN": 64, "KV_LEN": 64, "mask_mod": DOCUMENTS}
    given |= {"aux": {"doc": torch.zeros(1, 64, dtype=torch.int32)}, **changes}
    with pytest.raises((ArgumentError, SpecError), match=message):
        create_block_mask(**given)


def test_earlier_names_of_arguments_warn() -> None:
    new = create_block_mask("q_idx >= kv_idx", 1, 1, 100, 90, BLOCK_SIZE=(64, 32), device="cpu")
    with pytest.warns(DeprecationWarning, match="mask is now mask_mod, batch is now B"):
        old = create_block_mask(
            mask="q_idx >= kv_idx", batch=1, heads=1, q_len=100, kv_len=90, block=(64, 32), device="cpu"
        )
    assert old.block == new.block == (64, 32) and old.spec_json == new.spec_json
    for one, other in zip(old.index_tensors(), new.index_tensors(), strict=True):
        assert one is not None and other is not None and torch.equal(one, other)


@pytest.mark.parametrize("block", [(4, 32), (8, 16)])
def test_lists_on_a_cpu_are_those_of_torch(block: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every mask of FlexAttention's users, in several parts of rows, with one batch or head for all where it may.

    torch counts blocks that the sequence ends in as partial.
    """
    monkeypatch.setattr(ops, "PAIRS_AT_ONCE", 1 << 12)
    length = known_functions.LENGTH
    sizes = (known_functions.BATCH, known_functions.HEADS, length, length)
    rows, columns = (-(-length // size) for size in block)
    for name, mask in known_functions.MASKS.items():
        made = create_block_mask(mask, *sizes, device="cpu", BLOCK_SIZE=block)
        right = flex.create_block_mask(mask, *sizes, device="cpu", BLOCK_SIZE=block)
        given: list[Any] = [*made.index_tensors()[:4]]
        some, full = (map_of(given[i], given[i + 1], columns).expand(*sizes[:2], rows, columns) for i in (0, 2))
        of_torch: list[Any] = [right.kv_num_blocks, right.kv_indices, right.full_kv_num_blocks, right.full_kv_indices]
        torch_some, torch_full = (map_of(of_torch[i], of_torch[i + 1], columns) for i in (0, 2))
        assert torch.equal(some | full, torch_some | torch_full), name
        inside = (slice(None), slice(None), slice(length // block[0]), slice(length // block[1]))
        assert torch.equal(full[inside], torch_full[inside]), name
        assert not (some & full).any(), name


def test_a_mask_for_all_batches_and_heads() -> None:
    made = create_block_mask(lambda b, h, q, k: q >= k, None, None, 300, 300, "cpu")
    assert made.kv_indices.shape == (1, 1, 3, 3) and made.block == (128, 128)


def test_more_blocks_than_are_counted_are_refused(on_cpu: None) -> None:
    with pytest.raises(ArgumentError, match="batch: is 1048576"):
        create_block_mask("q_idx >= kv_idx + batch", 2**20, 1, 2**20, 2**20)


class _Fake:
    """Stands for a kernel: what it returns has the shapes, and nothing else, of lists."""

    def __init__(self, index: Any, pattern: str) -> None:
        self.pattern = pattern
        names = json.loads(pattern).get("aux", {})
        self.spec = SimpleNamespace(aux_tensors=[SimpleNamespace(name=name) for name in names])

    def __call__(self, batch: int, heads: int, q_len: int, kv_len: int, *, aux: Any, device: Any) -> Any:
        made = list(aux.values()), self.pattern
        sizes = {"batch": batch, "heads": heads, "q_len": q_len, "kv_len": kv_len}
        return tuple(each.zero_() for each in ops._fake(made[0], pattern=made[1], **sizes, device=device))


@pytest.mark.parametrize("mask", ["q_idx >= kv_idx + 3", DOCUMENTS, "slope[head] * float(q_idx - kv_idx) < 9.0"])
def test_one_graph_makes_the_lists_of_all_lengths(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "device_of", lambda device, tensors: CPU)
    monkeypatch.setattr(ops, "_kernel", _Fake)
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    def lists(doc: Any, slope: Any) -> Any:
        aux = {name: each for name, each in (("doc", doc), ("slope", slope)) if name in mask}
        made = create_block_mask(mask, doc.shape[0], 4, doc.shape[1], doc.shape[1], aux=aux, BLOCK_SIZE=(64, 32))
        return made.kv_indices, made.spec_json, [made.aux[name].shape for name in made.aux or {}]

    torch._dynamo.reset()
    compiled = torch.compile(lists, fullgraph=True, dynamic=True, backend=backend)
    for length in range(200, 1200, 100):
        given = torch.zeros(2, length, dtype=torch.int32), torch.ones(4)
        right, found = lists(*given), compiled(*given)
        assert found[0].shape == right[0].shape and found[1:] == right[1:]
    assert len(graphs) == 1
