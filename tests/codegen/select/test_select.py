"""The choice of a kernel: the table of measurements first, then the nearest problem, then the rules."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from each import every_spec, for_each

from codegen.dtypes import FP8
from codegen.errors import SpecError
from codegen.library import find_spec, shipped_specs
from codegen.parse import parse_spec
from codegen.planning import plan_for, plan_of
from codegen.select import AttentionProblem, BsrProblem, choose, parse_problem
from codegen.select.calibration import DOUBT, predicted
from codegen.select.candidates import candidates
from codegen.select.choice import STRIDED_COLUMNS, WORTH
from codegen.select.distance import distance
from codegen.select.estimate import estimate
from codegen.select.problem import problem_fields, problem_of, said_by, tuning_of
from codegen.select.shipped import Verified
from codegen.select.table import (
    TABLE,
    Dense,
    Measurement,
    TableError,
    Timing,
    measurements,
    merged,
    place_of,
    read_rows,
    shared,
    written,
)
from codegen.spec import UnchosenSpec

CAUSAL = {"op": "attention", "arch": "sm_90a", "head_dim": 128, "pattern": {"kind": "causal"}}
SPMM = {"op": "bsr_spmm", "arch": "sm_90a", "block": {"rows": 64, "cols": 64}}
SIZES = {"m": 4096, "n": 64, "k": 4096, "density": 0.25, "evenness": 1.0}
WIDE, NARROW = "h100_bsr_spmm_b64", "h100_bsr_spmm_b64_few_columns"
BALANCED = "h100_bsr_spmm_b64_balanced"
H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"


def row(figures: dict[str, float], device: str = H100, dense: float | None = None, **sizes: Any) -> Measurement:
    """Return a row of BSR x dense with blocks of 64."""
    prepared: dict[str, Any] = {BALANCED: "rows"}
    return Measurement(
        problem=parse_problem({**SPMM, **SIZES, **sizes}),
        device=device,
        date="2026-01-01",
        source="test",
        kernels=tuple(Timing(spec=k, single_us=us, prepared=prepared.get(k)) for k, us in figures.items()),
        dense=None if dense is None else Dense(name="cuBLAS", single_us=dense),
    )


def chosen(problem: Any, *rows: Measurement, **more: Any) -> str:
    return choose(problem, rows=rows, **more).named.stem


# The committed table


def test_every_row_has_a_kernel_that_can_be_planned_for_its_problem() -> None:
    assert len(measurements()) > 100
    for each in measurements():
        for timing in each.kernels:
            fields = {**each.problem.fields(), **timing.tuning}
            plan_of(parse_spec(fields), "row")
            if isinstance(timing.spec, str):
                assert find_spec(timing.spec).spec.arch == each.problem.arch


def test_the_table_is_in_one_spelling_and_its_kernels_in_order() -> None:
    assert TABLE.read_text(encoding="utf-8") == written(measurements())
    for each in measurements():
        assert list(each.costs()) == sorted(each.costs()), each.source


def test_the_choice_for_a_measured_problem_is_the_fastest_of_its_row_or_a_shipped_kernel_as_fast() -> None:
    for each in measurements():
        prepared = {"prepared": "packed"} if isinstance(each.problem, BsrProblem) else {}
        problem = each.problem.model_copy(update=prepared)
        choice = choose(problem, device=each.device)
        if choice.spec.model_dump().get("b_layout") == "strided" and problem.b_layout != "strided":
            assert problem.n <= STRIDED_COLUMNS  # a kernel of other problems
            continue
        assert choice.rule == "measured" and each in choice.rows
        if len(choice.rows) == 1:
            fastest = each.kernels[0]
            if tuning_of(choice.spec) != fastest.tuning:
                (cost,) = [
                    cost
                    for timing, cost in zip(each.kernels, each.costs(), strict=True)
                    if timing.tuning == tuning_of(choice.spec)
                ]
                assert choice.named.is_shipped and cost <= WORTH * each.costs()[0]


def test_a_near_row_with_times_of_all_shipped_kernels_decides() -> None:
    """The model expects the tile of 192 rows to be faster, which two factors of two away was not."""
    fields = {"op": "attention", "arch": "sm_90a", "dtype": "bf16", "head_dim": 96}
    sizes = {"heads": 32, "kv_heads": 32, "q_len": 4096, "kv_len": 4096}
    window = {"kind": "sliding_window", "left": 2046, "right": 0}
    one, four, sixteen = (parse_problem({**fields, "pattern": window, **sizes, "batch": n}) for n in (1, 4, 16))
    timings = (Timing(spec="h100_window_d96_m128", single_us=160.0), Timing(spec="h100_window_d96", single_us=190.0))
    near = Measurement(problem=one, device="a GPU", date="2026-01-01", source="test", kernels=timings)
    choice = choose(four, rows=(*measurements_without(one), near), general=True)
    assert (choice.named.stem, choice.rule) == ("h100_window_d96_m128_bf16", "nearest")
    assert choose(sixteen, rows=(*measurements_without(one), near), general=True).rule == "predicted"
    lacking = near.model_copy(update={"kernels": timings[1:]})
    assert choose(four, rows=(*measurements_without(one), lacking), general=True).rule == "predicted"


def measurements_without(problem: Any) -> tuple[Measurement, ...]:
    """The rows of the table of other patterns and head sizes than those of a problem."""
    return tuple(row for row in measurements() if row.problem.key() != problem.key())


def test_devices_share_a_row_where_they_agree() -> None:
    assert shared(measurements()) and len(shared(measurements())) == len(measurements())


@pytest.mark.parametrize(
    ("line", "says"), [("{}", r"rows.jsonl:2: problem: Field required"), ("[", r"rows.jsonl:2: .*JSON")]
)
def test_a_line_that_is_no_row_is_told_by_its_number(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{row({WIDE: 1.0}).line()}\n{line}\n")
    with pytest.raises(TableError, match=says):
        read_rows(path)


def test_a_kernel_is_more_than_a_few_fields() -> None:
    with pytest.raises(ValueError, match="no tile or no stages"):
        Timing(spec={"stages": 2}, single_us=1.0)


def test_a_time_is_of_the_chosen_kernel_or_called_its_siblings() -> None:
    one = row({WIDE: 1.0})
    old = one.model_copy(update={"kernels": (one.kernels[0].model_copy(update={"earlier_source": True}),)})
    problem = parse_problem({**SPMM, **SIZES})
    changed = choose(problem, rows=(old,))
    assert changed.reason.endswith("test; the time is of this kernel, whose source has changed since")
    own = choose(problem, rows=(one,))
    assert own.reason.endswith("2026-01-01, test; the time is of this kernel")
    assert own.timed is not None and (own.timed.named, own.timed.chosen) == (own.named, True)
    other = choose(parse_problem({**SPMM, **SIZES, "dtype": "bf16"}), rows=(one,))
    assert other.reason.endswith(f"test; the time is of a similar kernel, {WIDE}")
    assert other.timed is not None and (other.timed.named.stem, other.timed.chosen) == (WIDE, False)
    assert other.named != other.timed.named
    strange = one.model_copy(update={"kernels": (Timing(spec={"tile": {"m": 3}, "stages": 2}, single_us=1.0),)})
    assert choose(problem, rows=(strange, one)).timed == own.timed


def test_rows_of_a_problem_are_merged_by_kernel_the_latest_last() -> None:
    early = row({WIDE: 5.0, NARROW: 3.0}, dense=9.0)
    late = row({WIDE: 2.0}).model_copy(update={"date": "2026-02-01", "source": "later"})
    (found,) = merged([late, early])
    assert [(each.spec, each.single_us) for each in found.kernels] == [(WIDE, 2.0), (NARROW, 3.0)]
    assert (found.source, found.date) == ("test; later", "2026-02-01") and found.dense == early.dense


@pytest.mark.parametrize(
    ("second", "kept"),
    [
        ({WIDE: 10.2, NARROW: 10.0}, 1),  # the first one's choice loses 2% there
        ({WIDE: 10.4, NARROW: 10.0}, 2),  # 4%
        ({NARROW: 10.0}, 1),  # not measured there, and the first knows that it is faster
        ({BALANCED: 9.0}, 2),  # nothing is known of both
    ],
)
def test_a_second_device_has_a_row_where_its_choice_differs(second: dict[str, float], kept: int) -> None:
    first = row({WIDE: 10.0, NARROW: 12.0})
    rows = [first, row(second, H200), row({WIDE: 1.0}, n=9999)]
    assert sum(each.problem == first.problem for each in shared(rows)) == kept


# Choices


def test_the_fastest_kernel_of_a_measured_problem() -> None:
    rows = (row({NARROW: 5.0, WIDE: 6.0}), row({WIDE: 50.0, NARROW: 60.0}, n=8192))
    for n, stem in ((64, NARROW), (8192, WIDE)):
        choice = choose(parse_problem({**SPMM, **SIZES, "n": n}), rows=rows)
        assert (choice.named.stem, choice.rule) == (stem, "measured")
        assert choice.named.path is not None and "NVIDIA H100 80GB HBM3, 2026-01-01, test" in choice.reason


def test_the_nearest_measured_problem() -> None:
    rows = (row({NARROW: 5.0}), row({WIDE: 50.0}, n=8192))
    for n, stem in ((16, NARROW), (512, NARROW), (1024, WIDE), (1 << 20, WIDE)):  # 724 is in the middle
        choice = choose(parse_problem({**SPMM, **SIZES, "n": n}), rows=rows)
        assert (choice.named.stem, choice.rule) == (stem, "nearest")
        assert choice.reason.startswith("not measured; the nearest measured problem is")


def test_up_to_8_columns_take_the_kernel_for_any_strides() -> None:
    rows = (row({NARROW: 5.0}), row({WIDE: 50.0}, n=1))
    for layout, n in (("row_major", 1), ("column_major", 8)):
        choice = choose(parse_problem({**SPMM, **SIZES, "n": n, "b_layout": layout}), rows=rows)
        assert choice.named.stem == "h100_bsr_spmm_b64_n8"
        assert choice.reason.startswith(
            "with up to 8 columns B and C are read and written as they are, with any strides"
        )
        assert STRIDED_COLUMNS == 8
    for other in ({"n": 9}, {"transpose_a": True}, {"n": None}, {"block": {"rows": 8, "cols": 8}}, {"dtype": "e4m3"}):
        choice = choose(parse_problem({**SPMM, **SIZES, "n": 1, "b_layout": "column_major", **other}))
        assert choice.spec.b_layout == "column_major", other
    fused = {"n": 1, "accumulate": True, "epilogue": {"activation": "gelu", "bias": True}}
    choice = choose(parse_problem({**SPMM, **SIZES, **fused}))
    assert choice.spec.b_layout == "strided" and choice.spec.tile == find_spec("h100_bsr_spmm_b64_n8").spec.tile
    with pytest.raises(SpecError, match="no kernel with a receipt computes"):
        choose(parse_problem({**SPMM, **SIZES, "n": 1}), verified=Verified(lambda named: False))
    by_rows = choose(parse_problem({**SPMM, **SIZES, "n": 1}), verified=Verified(lambda named: named.stem == NARROW))
    assert by_rows.named.stem == NARROW
    # A partial spec says how B is stored, whatever its problem.
    assert choose(SPMM, {**SIZES, "n": 1}, rows=rows).spec.b_layout == "row_major"


def test_unknown_sizes_take_the_kernel_that_loses_least() -> None:
    rows = (
        row({NARROW: 5.0, WIDE: 6.0}),
        row({WIDE: 50.0, NARROW: 75.0}, n=8192),
        row({WIDE: 9.0, NARROW: 9.1}, n=1024),
    )
    assert chosen(parse_problem(SPMM), *rows) == WIDE
    assert chosen(parse_problem({**SPMM, "n": 64}), *rows) == NARROW


def test_a_kernel_that_was_not_measured_somewhere_does_not_win_there() -> None:
    rows = (row({NARROW: 5.0}), row({WIDE: 50.0}, n=8192), row({WIDE: 9.0}, n=1024))
    assert chosen(parse_problem(SPMM), *rows) == WIDE


def test_both_figures_count_where_all_kernels_have_both() -> None:
    two = row({WIDE: 10.0, NARROW: 9.9})
    times = zip(two.kernels, (10.0, 14.0), strict=True)
    both = two.model_copy(update={"kernels": tuple(t.model_copy(update={"back_to_back_us": b}) for t, b in times)})
    problem = parse_problem({**SPMM, **SIZES})
    assert (chosen(problem, two), chosen(problem, both)) == (NARROW, WIDE)


def test_the_rows_of_the_device_come_first() -> None:
    rows = (row({NARROW: 5.0, WIDE: 6.0}, H100), row({WIDE: 5.0, NARROW: 7.0}, H200))
    problem = parse_problem({**SPMM, **SIZES})
    assert chosen(problem, *rows, device=H100) == NARROW and chosen(problem, *rows, device=H200) == WIDE


def test_what_is_written_is_never_changed() -> None:
    rows = (row({NARROW: 5.0, WIDE: 6.0}),)
    assert chosen({**SPMM, "tile": {"n": 512}}, *rows) == WIDE
    assert chosen({**SPMM, "stages": 6}, *rows) == NARROW
    other = choose({**SPMM, "stages": 2}, SIZES, rows=rows)
    assert (other.rule, other.spec.stages) == ("default", 2)
    assert other.spec == parse_spec({**SPMM, "stages": 2})
    whole = {**SPMM, "tile": {"m": 64, "n": 256, "k": 64}, "stages": 3}
    found = choose(whole, SIZES, rows=rows)
    assert (found.rule, found.spec) == ("written", parse_spec(whole))


@every_spec
def test_shipped_specs_are_what_their_files_say(named: Any) -> None:
    choice = choose(named.stem)
    assert (choice.named, choice.rule) == (named, "written")
    assert choose(named.spec).spec == named.spec


def test_the_rules_are_what_parse_spec_says() -> None:
    # Hashes of specs do not depend on measurements: only choose asks the table.
    choice = choose(CAUSAL, rows=())
    assert (choice.rule, choice.reason) == ("default", "not measured: the plan's default")
    assert choice.spec == parse_spec(CAUSAL) and choose(CAUSAL).spec != choice.spec


def test_a_kernel_that_needs_prepared_rows_is_for_problems_that_have_them() -> None:
    gathered = "h100_bsr_spmm_b16_gathered"
    small = {**SPMM, "block": {"rows": 16, "cols": 16}}
    problem = parse_problem({**small, **SIZES})
    kernels = (
        Timing(spec=gathered, single_us=1.0, prepared="rows"),
        Timing(spec="h100_bsr_spmm_b16_balanced", single_us=2.0, prepared="rows"),
        Timing(spec="h100_bsr_spmm_b16", single_us=3.0),
    )
    one = row({WIDE: 1.0}).model_copy(update={"problem": problem, "kernels": kernels})
    slower = Timing(spec=gathered, single_us=5.0, prepared="packed")  # of two figures of a kernel the better one counts
    kernels = (*kernels, slower)
    one = one.model_copy(update={"kernels": kernels})
    expected = {"none": "h100_bsr_spmm_b16", None: "h100_bsr_spmm_b16_balanced", "rows": gathered, "packed": gathered}
    for prepared, stem in expected.items():
        assert chosen(problem.model_copy(update={"prepared": prepared}), one) == stem


def test_a_dense_product_that_is_faster_is_told() -> None:
    rows = (row({WIDE: 5.0}, dense=4.0), row({WIDE: 5.0}, dense=6.0, n=8192))
    told = choose(parse_problem({**SPMM, **SIZES}), rows=rows)
    assert told.dense == "cuBLAS 4 us (the measured kernel 5 us)" and told.named.stem == WIDE
    assert choose(parse_problem({**SPMM, **SIZES, "n": 8192}), rows=rows).dense == ""


def test_a_row_of_the_other_16_bit_type_counts_after_one_of_the_own_type() -> None:
    twin, far = row({NARROW: 5.0}), row({WIDE: 50.0}, n=8192, dtype="bf16")
    own = row({WIDE: 5.0}, dtype="bf16")
    bf16 = parse_problem({**SPMM, **SIZES, "dtype": "bf16"})
    for rows, kernel in (((twin,), NARROW), ((twin, far), NARROW), ((twin, own), WIDE)):
        choice = choose(bf16, rows=rows)
        assert tuning_of(choice.spec) == tuning_of(find_spec(kernel).spec) and choice.spec.dtype == "bf16"
        assert choice.rule == "measured"


def test_other_blocks_are_not_compared() -> None:
    other = parse_problem({**SPMM, **SIZES, "block": {"rows": 64, "cols": 32}})
    assert choose(other, rows=(row({WIDE: 1.0}),)).rule == "default"


def test_a_shipped_kernel_where_nothing_like_it_was_measured() -> None:
    strided = {"kind": "strided", "stride": 4, "local": 3, "block": 128}
    choice = choose(parse_problem({**CAUSAL, "pattern": strided}), rows=())
    assert tuning_of(choice.spec) == tuning_of(find_spec("h100_strided").spec)
    assert (choice.rule, choice.reason) == ("shipped", "not measured: the shipped kernel for similar problems")
    several = parse_problem({**SPMM, **SIZES})
    assert choose(several, rows=()).named.stem == NARROW  # by the model
    assert choose(several.model_copy(update={"n": None}), rows=()).rule == "default"
    assert choose(parse_problem({**CAUSAL, "head_dim": 64, "pattern": strided}), rows=()).rule == "default"
    assert choose({**CAUSAL, "pattern": strided, "stages": 1}, rows=()).rule == "default"


def test_the_model_is_calibrated_by_rows_of_other_problems() -> None:
    problem = parse_problem({**SPMM, **SIZES})
    slow, fast, *others = [named.stem for named in candidates(problem) if named.path is not None][:4]
    near = problem.model_copy(update={"n": 2 * SIZES["n"]})
    table = {slow: 9.0, fast: 1.0, **dict.fromkeys(others, 5.0)}
    choice = choose(problem, rows=(row(table).model_copy(update={"problem": near}),))
    assert (choice.named.stem, choice.rule) == (fast, "predicted")
    assert str(near) in choice.reason and "calibrated" in choice.reason
    # The same problem was measured: nothing is predicted.
    assert choose(near, rows=(row(table).model_copy(update={"problem": near}),)).rule == "measured"
    # Sizes that the model needs are not known: the nearest row.
    unknown = problem.model_copy(update={"m": None})
    other = near.model_copy(update={"k": 2 * SIZES["k"]})
    assert choose(unknown, rows=(row(table).model_copy(update={"problem": other}),)).rule == "nearest"


def test_a_kernel_that_no_row_has_is_doubted() -> None:
    problem = parse_problem({**SPMM, **SIZES})
    kernels = {named.stem: named for named in candidates(problem)[:2]}
    expected = predicted(problem, kernels, ())
    for label, named in kernels.items():
        guess = estimate(plan_of(named.spec, "test"), problem)
        assert guess is not None
        assert expected[label] == pytest.approx(guess.microseconds * math.exp(DOUBT))


def test_options_take_the_tuning_of_the_plain_kernel() -> None:
    problem = parse_problem({**SPMM, **SIZES, "epilogue": {"activation": "gelu"}})
    choice = choose(problem, rows=(row({NARROW: 5.0}),))
    assert tuning_of(choice.spec) == tuning_of(find_spec(NARROW).spec)
    assert choice.spec.epilogue is not None and choice.rule == "nearest"  # type: ignore[union-attr]


def test_masks_of_block_lists_share_rows() -> None:
    block = {"q": 128, "kv": 128}
    problems = [
        AttentionProblem(head_dim=128, pattern={"kind": "block_lists", "block": block, "mask": mask})
        for mask in ("none", "causal", "bits")
    ]
    choices = [choose(problem) for problem in problems]
    assert [choice.rule for choice in choices] == ["measured"] * 3
    assert [choice.spec.pattern.mask for choice in choices] == ["none", "causal", "bits"]  # type: ignore[union-attr]
    assert len({str(tuning_of(choice.spec)) for choice in choices}) == 1
    assert [choice.named.stem for choice in choices[1:]] == ["h100_block_lists", "h100_lists128_bits"]


def test_a_kernel_that_has_no_plan_for_the_problem_is_passed_over() -> None:
    much = {**tuning_of(find_spec(WIDE).spec), "stages": 8}
    with pytest.raises(SpecError, match="shared memory"):
        plan_for(find_spec({**SPMM, **much}))
    near = row({WIDE: 5.0}).model_copy(update={"kernels": (Timing(spec=much, single_us=1.0),)})
    assert chosen(parse_problem({**SPMM, **SIZES}), near, row({NARROW: 5.0}, n=8192)) == NARROW


def test_sm_89_is_chosen_by_the_model() -> None:
    small = {**CAUSAL, "arch": "sm_89", "heads": 8, "q_len": 1024, "kv_len": 1024}
    choice = choose(parse_problem(small))
    assert choice.rule in ("model", "shipped")
    plan_for(choice.named)
    assert choose(parse_problem({**CAUSAL, "arch": "sm_89"})).rule in ("default", "shipped")  # it needs sizes


# Problems


def test_a_spec_and_a_problem_that_contradict_one_another() -> None:
    with pytest.raises(SpecError, match=r"problem.head_dim: is 64, but 128 in the spec"):
        choose(CAUSAL, AttentionProblem(head_dim=64, pattern=parse_spec(CAUSAL).pattern))  # type: ignore[union-attr]
    with pytest.raises(SpecError, match=r"problem.dtype: is 'bf16', but 'fp16' in the spec"):
        choose("h100_causal", {"dtype": "bf16"})
    with pytest.raises(SpecError, match=r"problem.dtype: is 'bf16'"):
        choose(CAUSAL, {"dtype": "bf16", "heads": 4})
    with pytest.raises(SpecError, match="problem: is given, but a tile_copy is not"):
        choose("h100_tile_copy_tma", {"m": 1})
    with pytest.raises(SpecError, match=r"problem.heads: is 0; input should be greater"):
        choose(CAUSAL, {"heads": 0})
    with pytest.raises(SpecError, match=r"problem.head: is not a field of a problem; did you mean heads"):
        choose(CAUSAL, {"head": 4})


def test_the_lengths_of_rows() -> None:
    problem = BsrProblem.of_lengths([1, 1, 1, 5], op="bsr_spmm", block={"rows": 64, "cols": 64}, k=1024, n=16)
    assert (problem.m, problem.density, problem.evenness) == (256, 8 / 64, 2.5)
    across = BsrProblem.of_lengths([2, 2], op="bsr_sddmm", block={"rows": 32, "cols": 16}, n=64, k=128)
    assert (across.m, across.density, across.evenness) == (64, 0.5, 1.0)
    turned = BsrProblem.of_lengths([2, 2], op="bsr_spmm", block={"rows": 32, "cols": 32}, m=64, transpose_a=True)
    assert (turned.k, turned.density) == (64, 1.0)
    empty = BsrProblem.of_lengths([0, 0], op="bsr_spmm", block={"rows": 64, "cols": 64}, k=1024)
    assert (empty.density, empty.evenness) == (0.0, 1.0) and choose(empty).named
    with pytest.raises(SpecError, match="row_lengths: is empty"):
        BsrProblem.of_lengths([], op="bsr_spmm", block={"rows": 64, "cols": 64}, k=1024)
    with pytest.raises(SpecError, match="k: is missing"):
        BsrProblem.of_lengths([1], op="bsr_spmm", block={"rows": 64, "cols": 64})


@for_each("named", lambda: [each for each in shipped_specs() if each.spec.dtype not in FP8], lambda each: each.stem)
def test_a_spec_is_its_problem_and_its_tuning(named: Any) -> None:
    if isinstance(named.spec, UnchosenSpec):
        with pytest.raises(SpecError, match=f"op: is {named.spec.op}"):
            said_by(named.spec)
        return
    problem = problem_of(named.spec)
    assert parse_spec({**problem.fields(), **tuning_of(named.spec)}) == named.spec
    assert distance(problem, problem) == 0


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("op=bsr_spmm,block=64,m=4096,density=0.3", {"op": "bsr_spmm", "block": {"rows": 64, "cols": 64}, "m": 4096}),
        (
            "head_dim=64, pattern=topk, pattern.k=8, pattern.block=128",
            {"op": "attention", "pattern": {"kind": "topk", "k": 8, "block": {"q": 128, "kv": 128}}},
        ),
        ("op=bsr_spmm,block.rows=64,block.cols=128,accumulate=true", {"block": {"rows": 64, "cols": 128}}),
    ],
)
def test_problems_of_a_command_line(text: str, fields: dict[str, Any]) -> None:
    read = problem_fields(text)
    assert {name: read[name] for name in fields} == fields
    assert parse_problem({"arch": "sm_90a", **read})


@pytest.mark.parametrize("text", ["m", "m=", "=4", "m=4,m=5", "m=4,m.x=5"])
def test_a_command_line_that_is_no_problem(text: str) -> None:
    with pytest.raises(SpecError, match="problem"):
        problem_fields(text)


# The model


def test_more_waves_and_more_steps_take_longer() -> None:
    plan = plan_for(find_spec("h100_bsr_spmm_b128"))
    base = {"op": "bsr_spmm", "block": {"rows": 128, "cols": 128}, "m": 8192, "n": 4096, "k": 8192, "density": 0.25}

    def time(**changes: Any) -> float:
        found = estimate(plan, parse_problem({**base, **changes}))
        assert found is not None
        return found.microseconds

    assert time(n=8192) > time() and time(k=16384) > time() and time(density=0.5) > time()
    assert time(evenness=4.0) > time()
    assert estimate(plan, parse_problem({**base, "density": None})) is None


def test_a_narrow_problem_wants_a_narrow_tile() -> None:
    problem = parse_problem({**SPMM, **SIZES, "n": 16})
    narrow, wide = (estimate(plan_for(find_spec(stem)), problem) for stem in (NARROW, WIDE))
    assert narrow is not None and wide is not None and narrow.microseconds < wide.microseconds


def test_choices_can_be_read_as_json() -> None:
    line = json.loads(row({WIDE: 1.0}).line())
    assert list(line) == ["problem", "device", "date", "source", "kernels"] and line["problem"]["op"] == "bsr_spmm"


# Who asks


def test_a_kernel_is_loaded_by_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel: Any = pytest.importorskip("runtime.kernel", exc_type=ImportError)
    monkeypatch.setattr(kernel.torch.cuda, "is_available", lambda: False)
    sizes = {"batch": 1, "heads": 16, "kv_heads": 16, "q_len": 1024, "kv_len": 1024}
    for given in ((CAUSAL, sizes), (parse_problem({**CAUSAL, **sizes}),)):
        with pytest.raises(kernel.DeviceError, match=r"^h100_causal_few_tiles cannot be loaded"):
            kernel.load_kernel(*given)
    whole = {**CAUSAL, "tile": {"m": 128, "n": 128}, "stages": 2}
    stem = f"attention_sm_90a_fp16_d128_causal_{parse_spec(whole).hash[:8]}"
    with pytest.raises(kernel.DeviceError, match=rf"^{stem} cannot be loaded"):
        kernel.load_kernel(whole, sizes)
    with pytest.raises(SpecError, match=r"problem.head_dim: is 64"):
        kernel.load_kernel("h100_causal", {"head_dim": 64})


def test_figures_are_those_of_results() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(TABLE.parents[2] / "benchmarks")
        script: Any = pytest.importorskip("measurement_rows", exc_type=ImportError)
        patch.setattr(script, "date_of", lambda _: "2026-01-01")
        rows = {place_of(each): each for each in script.converted({})}
    compared = 0
    for each in measurements():
        if each.source.startswith(script.TUNED) or place_of(each) not in rows:
            continue
        found = {(t.label, t.prepared): (t.single_us, t.back_to_back_us) for t in rows[place_of(each)].kernels}
        for timing in each.kernels:
            figures = (timing.single_us, timing.back_to_back_us)
            assert found.get((timing.label, timing.prepared), figures) == figures, each.source
            compared += 1
    assert compared, "run: python benchmarks/measurement_rows.py"


@pytest.mark.parametrize(
    ("fields", "stem"),
    [
        ({"pattern": {"kind": "dense"}}, "h100_e4m3_dense"),
        ({"pattern": {"kind": "causal"}}, "h100_e4m3_causal"),
        ({"pattern": {"kind": "topk", "k": 32, "block": {"q": 128, "kv": 128}}}, "h100_e4m3_topk32"),
        ({"pattern": {"kind": "dense"}, "head_dim": 64}, "h100_e4m3_dense_d64"),
    ],
)
def test_rows_of_16_bits_say_nothing_of_fp8(fields: dict[str, Any], stem: str) -> None:
    given = {"op": "attention", "arch": "sm_90a", "dtype": "e4m3", "head_dim": 128, **fields}
    choice = choose(given, {"batch": 1, "heads": 16, "q_len": 32768, "kv_len": 32768})
    assert (choice.named.stem, choice.rule) == (stem, "default") and "e4m3 was measured" in choice.reason
