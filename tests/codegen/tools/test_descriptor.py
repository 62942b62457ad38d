"""What an export tells a host is what the runtime launches with: of each shipped kernel, without a GPU."""

from __future__ import annotations

import ctypes
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import drawn_specs
import pytest
from each import every_source

from codegen.encode_tiled import ELEMENT_BYTES
from codegen.errors import SpecError
from codegen.library import NamedSpec, find_spec
from codegen.operators import OPERATORS
from codegen.plan import Plan
from codegen.planning import plan_for
from codegen.spec import OPS
from codegen.tools.c_header import c_header
from codegen.tools.descriptor import KernelFacts, facts_of, launch_record
from codegen.tools.sized_launch import sized_launch, smallest_shape

torch = pytest.importorskip("torch")

from runtime.driver import launch, tensor_map  # noqa: E402
from runtime.driver.api import driver  # noqa: E402
from runtime.driver.workspace import SCRATCH_ALIGNMENT, Memory  # noqa: E402
from runtime.kernels import attention  # noqa: E402

SMS, TILES = 132, 1000


def loaded_kernel(plan: Plan) -> launch.LoadedKernel:
    """What the runtime launches a kernel by, on a device of 132 SMs that is not there."""
    loaded = launch.LoadedKernel.__new__(launch.LoadedKernel)
    loaded.plan, loaded.layout = plan, launch.ParameterLayout.of(plan.params)
    loaded._sm_counts = {0: SMS, None: SMS}  # type: ignore[dict-item]
    return loaded


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The arguments of each call of cuTensorMapEncodeTiled, which encodes nothing."""
    seen: list[tuple[Any, ...]] = []
    nothing = (ctypes.c_char * 128)()

    def call(function: Any, *arguments: Any) -> Any:
        assert function.__name__ == "cuTensorMapEncodeTiled"
        seen.append(tuple([int(each) for each in a] if isinstance(a, list) else int(a) for a in arguments))
        return SimpleNamespace(getPtr=lambda: ctypes.addressof(nothing))

    monkeypatch.setattr(tensor_map, "call", call)
    return seen


def contiguous(names: tuple[str, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of a tensor whose dimensions have different sizes; innermost first in ``names``."""
    shape = tuple(64 * (3 + i) for i in reversed(range(len(names))))
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return shape, tuple(reversed(strides))


def prepared(plan: Plan, facts: KernelFacts) -> launch.Signature:
    """What the runtime makes of a call whose numbers are all 0."""
    numbers = {param.name: 0 for param in plan.params if param.type in ("i32", "i64", "f32")}
    tensors = {told.tensor: contiguous(told.global_dim) for told in facts.tensor_maps}
    return loaded_kernel(plan).signature(0, TILES, numbers, tensors)


def grid_of(facts: KernelFacts, tiles: int, sm_count: int) -> int:
    """The rule of docs/guide/export.md."""
    grid, cluster = facts.grid, facts.cluster[0]
    if not grid.persistent:
        return tiles
    clusters, most = tiles // cluster, sm_count * grid.ctas_per_sm // cluster
    if grid.even_rounds and clusters > most:
        rounds = -(-clusters // most)
        most = -(-clusters // rounds)
    return min(clusters, most) * cluster


@every_source
def test_the_launch_is_that_of_the_runtime(named: NamedSpec) -> None:
    plan = plan_for(named)
    facts = facts_of(plan)
    config = prepared(plan, facts).config
    assert facts.block == (config.blockDimX, config.blockDimY, config.blockDimZ)
    assert facts.dynamic_shared_bytes == config.sharedMemBytes
    assert grid_of(facts, TILES // facts.cluster[0] * facts.cluster[0], SMS) == config.gridDimX
    assert (facts.symbol, facts.compute_capability) == (named.stem, plan.arch.compute_capability)
    before = facts.prologue
    assert config.numAttrs == (before is not None and before.programmatic_stream_serialization)
    if plan.prologue is not None:
        assert before is not None
        told = (before.symbol, before.block[0], before.dynamic_shared_bytes)
        assert told == (plan.prologue.symbol, plan.prologue.threads, plan.prologue.shared_bytes)
    assert KernelFacts.model_validate_json(facts.model_dump_json()) == facts


@every_source
def test_the_parameters_lie_where_the_runtime_writes_them(named: NamedSpec) -> None:
    plan = plan_for(named)
    facts = facts_of(plan)
    signature, layout = prepared(plan, facts), loaded_kernel(plan).layout
    assert facts.params_bytes == len(signature.block) == layout.size
    assert facts.params_bytes % facts.params_alignment == 0
    start = ctypes.addressof(signature.block)
    places = {param.name: (param.type, param.offset, param.size) for param in facts.params}
    assert {name: (layout.types[name], layout.offsets[name]) for name in layout.types} == {
        name: (kind, offset) for name, (kind, offset, _) in places.items()
    }
    for name, pointer in signature.pointers:
        assert places[name] == ("pointer", ctypes.addressof(pointer) - start, ctypes.sizeof(pointer))
    for place in signature.maps:
        place.place[:] = b"\xff" * len(place.place)
        kind, offset, size = places[f"{place.name}_map"]
        assert (kind, size) == ("tensor_map", len(place.place))
        assert bytes(signature.block)[offset : offset + size] == b"\xff" * size
        place.place[:] = bytes(size)
    ends = [param.offset + param.size for param in facts.params]
    assert all(end <= param.offset for end, param in zip(ends, facts.params[1:], strict=False))


@every_source
def test_tensor_maps_are_encoded_as_it_says(named: NamedSpec, encoded: list[tuple[Any, ...]]) -> None:
    plan = plan_for(named)
    facts, cuda = facts_of(plan), driver()
    encoded.clear()
    names = {"fp16": "FLOAT16", "bf16": "BFLOAT16", "fp32": "FLOAT32", "e4m3": "UINT8", "e5m2": "UINT8"}
    for place in prepared(plan, facts).maps:
        place.write(4096)
    assert len(encoded) == len(facts.tensor_maps) == len(plan.tensor_maps)
    for told, arguments in zip(facts.tensor_maps, encoded, strict=True):
        shape, strides = contiguous(told.global_dim)
        assert len(set(told.global_dim)) == told.rank == len(plan.tensor_maps[told.param].box)
        dtype = plan.tensor_maps[told.param].dtype or named.spec.dtype
        assert told.data_type == f"CU_TENSOR_MAP_DATA_TYPE_{names[dtype]}"
        assert arguments == (
            int(getattr(cuda.CUtensorMapDataType, told.data_type)),
            told.rank,
            4096,
            list(reversed(shape)),
            [ELEMENT_BYTES[dtype] * stride for stride in reversed(strides[:-1])],
            list(told.box_dim),
            list(told.element_strides),
            int(getattr(cuda.CUtensorMapInterleave, told.interleave)),
            int(getattr(cuda.CUtensorMapSwizzle, told.swizzle)),
            int(getattr(cuda.CUtensorMapL2promotion, told.l2_promotion)),
            int(getattr(cuda.CUtensorMapFloatOOBfill, told.oob_fill)),
        )
        how = plan.tensor_maps[told.param]
        assert told.swizzle.removeprefix("CU_TENSOR_MAP_SWIZZLE_") == (f"{how.swizzle}B" if how.swizzle else "NONE")
        assert told.l2_promotion == f"CU_TENSOR_MAP_L2_PROMOTION_L2_{how.promotion}B"
        assert told.box_dim == how.box


@pytest.mark.parametrize("name", ["h100_dense", "h100_topk16_gqa16_q1", "h100_causal_d64"])
def test_sizes_of_tensor_maps_are_those_of_a_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    named = find_spec(name)
    plan = plan_for(named)
    monkeypatch.setattr(attention, "check_tensor", lambda *arguments: None)
    kernel = attention.AttentionKernel(SimpleNamespace(named=named, plan=plan), loaded_kernel(plan))  # type: ignore[arg-type]
    packed, d = plan.spec.pack_gqa, plan.spec.head_dim  # type: ignore[union-attr]
    q, k = torch.zeros(3, 2 * packed, 50, d).half(), torch.zeros(3, 2, 70, d).half()
    block = plan.spec.pattern.fixed_block  # type: ignore[union-attr]
    lists = () if block is None else (torch.zeros(1, 1, -(-50 // block.q), 16, dtype=torch.int32),)
    signature = kernel._check(q, k, k, indices=lists, scale=None, out=None, sink=None, return_lse=True)
    sizes = {"head_dim": d, "q_len": 50, "kv_len": 70, "heads": 2, "kv_heads": 2, "batch": 3}
    sizes |= {"packs": 2, "heads of a pack": packed}
    dims = {place.name: place.encoder.dims for place in signature.maps}
    told = {told.tensor: tuple(sizes[name] for name in told.global_dim) for told in facts_of(plan).tensor_maps}
    assert told == dims


@every_source
def test_workspace_has_the_names_and_sizes_of_launches(named: NamedSpec) -> None:
    plan = plan_for(named)
    facts, draw = facts_of(plan), random.Random(named.stem)
    pointers = {param.name: param for param in facts.params if param.type == "pointer"}
    for record in facts.workspace:
        assert pointers[record.param].address_alignment == record.alignment
    for _ in range(20):
        sizes = drawn_sizes(plan, draw)
        sized = sized_launch(plan, sizes, draw.choice((58, 114, 132)))
        told = launch_record(sized)
        memory = Memory.of(sized.args)
        scratch = sum(-(-size // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT for size in sized.args.scratch.values())
        assert memory.scratch == scratch and all(place % SCRATCH_ALIGNMENT == 0 for _, place in memory.scratch_places)
        of_parts = sum(map(sum, (args.values() for args in (sized.args.scratch, sized.args.sums))))
        assert sum(told.workspace.values()) == 4 * memory.counters + of_parts
        assert set(told.workspace) == {record.param for record in facts.workspace}
        for record in facts.workspace:
            if record.bytes is not None:
                assert eval(record.bytes, dict(told.numbers)) == told.workspace[record.param]
        assert set(told.numbers) <= {param.name for param in facts.params}
        assert told.grid == (grid_of(facts, sized.args.tiles, sized.sm_count), 1, 1)


def drawn_sizes(plan: Plan, draw: random.Random) -> dict[str, int]:
    """A problem of a kernel: multiples of its smallest one."""
    least = {name: value for name, value in vars(smallest_shape(plan)).items() if value}
    sizes = {name: value * draw.randint(1, 40) for name, value in least.items()}
    if plan.spec.op in ("attention", "attention_backward"):
        sizes["heads"] = sizes["kv_heads"] * getattr(plan.spec, "pack_gqa", 1) * draw.randint(1, 4)
        sizes |= {"q_len": draw.randint(1, 9000), "kv_len": draw.randint(1, 9000)}
        sizes |= {name: draw.randint(0, 9000) for name in plan.spec.pattern.number_params}  # type: ignore[union-attr]
    if plan.spec.op == "attention_backward":
        sizes |= {"heads": sizes["kv_heads"] * draw.randint(1, 4), "q_len": draw.randint(1, 9000)}
    if plan.spec.op == "quantize":
        sizes["heads"] = sizes.get("kv_heads", 1) * draw.randint(1, 4)
    if plan.spec.op == "select_topk":
        sizes["heads"] = sizes["kv_heads"] * draw.randint(1, 4)
    return sizes


def test_a_launch_of_a_known_shape_is_that_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    named = find_spec("h100_causal")
    plan = plan_for(named)
    monkeypatch.setattr(attention, "check_tensor", lambda *arguments: None)
    kernel = attention.AttentionKernel(SimpleNamespace(named=named, plan=plan), loaded_kernel(plan))  # type: ignore[arg-type]
    q, k = torch.zeros(2, 8, 1000, 128).half(), torch.zeros(2, 4, 1300, 128).half()
    signature = kernel._check(q, k, k, indices=(), scale=None, out=None, sink=None, return_lse=True)
    sizes = {"batch": 2, "heads": 8, "kv_heads": 4, "q_len": 1000, "kv_len": 1300}
    told = launch_record(sized_launch(plan, sizes, SMS))
    assert told.grid[0] == signature.config.gridDimX and told.block[0] == signature.config.blockDimX
    layout = kernel._loaded.layout
    written = {
        name: int.from_bytes(bytes(signature.block)[layout.offsets[name] :][:4], "little") for name in told.numbers
    }
    assert written == told.numbers


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("h100_causal", {"head": 8}, "shape.head: is not a size of attention; did you mean heads"),
        ("h100_causal", {"batch": 0}, r"shape.batch: is 0, expected 1 to 2\^30"),
        ("h100_causal", {"q_len": 2**30 + 1}, "shape.q_len: is 1073741825, expected"),
        ("h100_causal", {"batch": None}, "shape.batch: is missing; a shape of attention has batch, heads"),
        ("h100_causal", {"heads": 6}, "shape.heads: is 6, expected a multiple of 4, the heads of K"),
        ("h100_topk32", {}, "shape.list_batches: is 0, h100_topk32 needs 1 or more"),
        (
            "h100_window",
            {"window_left": 5},
            "shape.window_right: is missing; the spec's pattern takes it from the call",
        ),
        (
            "h100_window",
            {"window_left": 2**25, "window_right": 0},
            r"shape.window_left: is 33554432, expected 0 to 1677",
        ),
        ("h100_window2k", {"window_left": 5}, "shape.window_left: is 5; the spec's pattern does not take it from"),
        ("h100_window", {"window_left": 5, "window_right": 0, "sink_keys": 1}, "shape.sink_keys: is 1; the spec's"),
    ],
)
def test_what_is_no_shape_is_refused(name: str, changes: dict[str, int | None], message: str) -> None:
    sizes = {"batch": 2, "heads": 8, "kv_heads": 4, "q_len": 100, "kv_len": 100} | changes
    with pytest.raises(SpecError, match=f"^{message}"):
        sized_launch(plan_for(find_spec(name)), {k: v for k, v in sizes.items() if v is not None}, SMS)


def test_numbers_of_a_window_are_parameters_and_sizes() -> None:
    plan = plan_for(find_spec("h100_sink_window"))
    window = {"window_left": 300, "window_right": 7, "sink_keys": 4}
    facts = facts_of(plan)
    assert {param.name: (param.type, param.size) for param in facts.params if param.name in window} == dict.fromkeys(
        window, ("i32", 4)
    )
    sizes = {"batch": 2, "heads": 8, "kv_heads": 4, "q_len": 100, "kv_len": 100, **window}
    told = launch_record(sized_launch(plan, sizes, SMS))
    assert told.shape.items() >= sizes.items() and {name: told.numbers[name] for name in window} == window
    header = c_header(facts, told)
    assert "  int32_t window_left; /* keys seen before the query's own position */" in header
    assert "(params)->sink_keys = 4;" in header
    assert "WINDOW" not in c_header(facts_of(plan_for(find_spec("h100_causal"))), None)


def test_blocks_of_a_listed_result_are_asked_for() -> None:
    plan, sizes = plan_for(find_spec("h100_bsr_spgemm_b128_bsr")), {"rows": 256, "depth": 256, "columns": 256}
    with pytest.raises(SpecError, match=r"^shape.blocks: is 0, h100_bsr_spgemm_b128_bsr needs 1 or more"):
        sized_launch(plan, sizes, SMS)
    assert sized_launch(plan, {**sizes, "blocks": 3}, SMS).grid == 3


def gradients() -> list[NamedSpec]:
    """Kernels of both gradients, with lists and without."""
    fields = {"op": "attention_backward", "arch": "sm_90a", "head_dim": 128}
    patterns = ({"kind": "causal"}, {"kind": "topk", "block": {"q": 64, "kv": 64}})
    return [find_spec({**fields, "gradients": of, "pattern": pattern}) for of in ("dq", "dkdv") for pattern in patterns]


def test_kernels_that_are_not_shipped_have_facts_and_launches(request: pytest.FixtureRequest) -> None:
    """Those that only tests have, and drawn ones, other ones each day."""
    files = sorted(Path(__file__).parents[2].glob("unshipped_*.json"))
    unshipped = [find_spec(fields) for file in files for fields in json.loads(file.read_text(encoding="utf-8"))]
    drawn = drawn_specs.draw(100, request.config.getoption("--kernel-seed")).specs
    for named in (*unshipped, *drawn, *gradients()):
        plan = plan_for(named)
        facts = facts_of(plan)
        assert KernelFacts.model_validate_json(facts.model_dump_json()) == facts, named.spec.canonical_json()
        sizes = {name: value for name, value in vars(smallest_shape(plan)).items() if value is not None}
        assert launch_record(sized_launch(plan, sizes, SMS)).grid >= facts.cluster, named.spec.canonical_json()


def test_every_operator_has_a_shape() -> None:
    assert tuple(OPERATORS) == OPS
