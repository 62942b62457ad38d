"""Spaces of candidates given by hand, the ranking of a model, and a proposed spec."""

from __future__ import annotations

from pathlib import Path

import pytest
from each import looped

from codegen.errors import CodegenError, SpecError
from codegen.library import find_spec, read_spec, shipped_specs, spec_text
from codegen.parse import parse_spec
from codegen.planning import plan_for
from codegen.select import parse_problem, proposal
from codegen.select.estimate import estimate
from codegen.select.problem import has_problem, problem_of
from codegen.select.proposal import check_writable, propose, write_proposal
from codegen.select.ranking import ranking, spearman
from codegen.select.space import MOST_POINTS, base_fields, differences, parse_axes, space
from codegen.yaml_text import read_yaml, with_values

DENSE = find_spec("h100_dense")
PROBLEM = problem_of(DENSE.spec, {"batch": 2, "heads": 16, "q_len": 8192, "kv_len": 8192})


def test_a_space_has_the_current_spec_first_and_each_legal_combination_once() -> None:
    axes = parse_axes(["tile.m=128,192", "tile.n=64,80", "stages=2,3"], DENSE.spec)
    assert axes == {"tile.m": (128, 192), "tile.n": (64, 80), "stages": (2, 3)}
    found = space(DENSE, PROBLEM, axes)
    assert found.candidates[0] is DENSE and len(found.candidates) == len(found.members) == found.points == 8
    assert len({named.spec.hash for named in found.candidates}) == 8
    outside = space(DENSE, PROBLEM, parse_axes(["tile=128x128"], DENSE.spec))
    assert [named.spec.tile.n for named in outside.candidates] == [80, 128], "the current one is tried beside"
    assert outside.candidates[1].stem == "h100_dense_short", "a shipped spec has its name"


def test_a_space_keeps_what_its_problem_does_not_say() -> None:
    named = [each for each in shipped_specs() if has_problem(each.spec)]
    lost = [each.stem for each in named if parse_spec(base_fields(each.spec, problem_of(each.spec))) != each.spec]
    assert len(named) > 250 and not lost, "the granularity of scales, say"


def test_other_fields_are_those_of_the_current_spec() -> None:
    (_, other) = space(DENSE, PROBLEM, parse_axes(["schedule=cooperative"], DENSE.spec)).candidates
    assert differences(other.spec, DENSE.spec) == {"schedule": "cooperative"}


def test_options_of_one_text_or_of_several() -> None:
    assert parse_axes(["tile.m=64,128,stages=2,3"], DENSE.spec) == parse_axes(
        ["tile.m=64, 128", "stages=2,3"], DENSE.spec
    )
    assert parse_axes(["tile=128x64,stream_k_tail=true,false"], DENSE.spec) == {
        "tile": ({"m": 128, "n": 64},),
        "stream_k_tail": (True, False),
    }


@looped
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stages=9", r"--over stages: is 9; input should be less than or equal to 8"),
        ("stages=two", r"--over stages: is 'two'; input should be a valid integer"),
        ("stages=2.5", r"--over stages: is 2.5; "),
        ("schedule=ping", r"--over schedule: is 'ping'; allowed: 'multistage', 'cooperative' or 'ping_pong'"),
        ("stage=2", r"--over stage: is not a tuning field of this spec; did you mean stages"),
        ("tile.k=2", r"--over tile.k: is not a tuning field of this spec.*tile.m"),
        ("head_dim=64", r"--over head_dim: defines what a kernel computes"),
        ("tile=128", r"--over tile: has '128'; expected MxN, such as 128x64"),
        ("tile=" + "9" * 5000 + "x64", r"--over tile: has '99999"),
        ("stages=" + "9" * 5000, r"--over stages: "),
        ("tile=axb", r"--over tile: has 'axb'"),
        ("stages=2,2", r"--over stages: has '2' twice"),
        ("stages=2,stages=3", r"--over stages: is given twice"),
        ("tile=64x64,tile.m=64", r"--over tile: is given both as a whole and by parts"),
        ("stages", r"--over: has 'stages' of 'stages'; expected FIELD=VALUE,VALUE,..."),
        ("stages=", r"--over: has 'stages=' of"),
        ("stages=2,,3", r"--over: has '' of"),
        ("", r"--over: has '' of ''"),
    ],
)
def test_fields_and_values_are_checked_by_the_model_of_specs(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        parse_axes([text], DENSE.spec)


def test_an_empty_space_says_what_ruled_out_its_candidates() -> None:
    axes = parse_axes(["tile=256x256,128x200", "stages=5,6"], DENSE.spec)
    with pytest.raises(CodegenError, match=r"none of 4 combinations is legal: .*stages rules out 2 \(.*227 KB") as told:
        space(DENSE, PROBLEM, axes)
    assert "tile.n rules out 2 (tile 128x200, stages 5: is 200; allowed: 64 to 256" in str(told.value)


def test_a_legal_space_says_what_ruled_out_the_others() -> None:
    found = space(DENSE, PROBLEM, parse_axes(["tile=192x80,128x176", "stages=2,3"], DENSE.spec))
    assert [(each.field, each.count) for each in found.ruled_out] == [("stages", 1)]
    assert found.told().startswith("3 of 4 combinations are legal; stages rules out 1 (tile 128x176, stages 3: ")


def test_a_space_that_is_too_large_is_refused_before_it_is_looked_at() -> None:
    axes = {"tile.m": tuple(range(1000)), "tile.n": tuple(range(1000))}
    with pytest.raises(CodegenError, match=rf"has 1000000 combinations; at most {MOST_POINTS}"):
        space(DENSE, PROBLEM, axes)


def test_a_kernel_that_wants_a_prepared_matrix_is_ruled_out_where_there_is_none() -> None:
    problem = parse_problem({"op": "bsr_spmm", "block": {"rows": 64, "cols": 64}, "prepared": "none"})
    current = find_spec("h100_bsr_spmm_b64")
    found = space(current, problem, parse_axes(["scheduler=static,dynamic"], current.spec))
    assert [(each.field, each.count) for each in found.ruled_out] == [("prepared", 1)]


# The model's order


def test_rank_correlation() -> None:
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    # With ties: ranks 0, 1.5, 1.5, 3 against 0, 1, 2, 3 have the correlation 4.5 / sqrt(4.5 * 5).
    assert spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(4.5 / (4.5 * 5) ** 0.5)
    assert spearman([1, 2], [1, 2]) is None and spearman([1, 1, 1], [1, 2, 3]) is None


def test_the_ranking_says_what_the_models_first_kernel_costs() -> None:
    named = space(DENSE, PROBLEM, parse_axes(["tile=192x80,192x64,128x128"], DENSE.spec)).candidates
    guesses = {each.stem: estimate(plan_for(each), PROBLEM) for each in named}
    named.sort(key=lambda each: guesses[each.stem].microseconds)  # type: ignore[union-attr]
    best = ranking(PROBLEM, named, [10.0, 20.0, 30.0])
    assert best is not None and (best.kernels, best.first, best.loss) == (3, 1, 1.0)
    assert best.spearman == pytest.approx(1)
    worse = ranking(PROBLEM, named, [30.0, 20.0, 10.0])
    assert worse is not None and (worse.first, worse.loss) == (1, 3.0) and worse.spearman == pytest.approx(-1)
    assert worse.told().endswith("-1.00 over 3 kernels; its first one takes 3.000 x the time of the fastest")
    alike = ranking(PROBLEM, [named[0], named[0], named[1]], [10.0, 20.0, 30.0])
    assert alike is not None and (alike.first, alike.loss) == (2, 1.5), "not the one that happened to be faster"
    assert ranking(PROBLEM.model_copy(update={"heads": None}), named, [1.0, 2.0, 3.0]) is None, "it needs the sizes"


# A proposed spec


def test_a_spec_file_that_is_written_anew_stays_as_it_is() -> None:
    for named in shipped_specs():
        assert named.path is not None
        text = spec_text(named.path)
        assert with_values(read_yaml(text, "x"), {}) == text, named.stem


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(spec_text(DENSE.path) + "# the end\n")  # type: ignore[arg-type]
    return path


def test_a_proposal_changes_the_tuning_and_keeps_comments(own: Path) -> None:
    mine = read_spec(own)
    others = space(mine, PROBLEM, parse_axes(["tile=128x128", "stream_k_tail=false"], mine.spec)).candidates
    found = propose(mine, others[1].spec)
    changed = [line for line in found.diff().splitlines()[2:] if line[0] in "+-"]
    assert changed == [
        "-tile: {m: 192, n: 80}",
        "+tile: {m: 128, n: 128}",
        "-stream_k_tail: true",
        "+stream_k_tail: false",
    ]
    assert found.diff().splitlines()[0] == f"--- a/{own}"
    assert write_proposal(mine, found) and read_spec(own).spec == others[1].spec
    assert own.read_text().startswith("# Dense attention") and own.read_text().endswith("# the end\n")


def test_fields_that_a_file_leaves_to_rules_are_written(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("op: attention\narch: sm_90a\nhead_dim: 128\npattern: {kind: dense}\n")
    mine = read_spec(path)
    best = space(mine, PROBLEM, parse_axes(["tile=128x96", "stages=3"], mine.spec)).candidates[1]
    text = propose(mine, best.spec).new
    assert text.endswith("stages: 3\ntile: {m: 128, n: 96}\n") or "tile: {m: 128, n: 96}\n" in text
    assert read_spec(path, text).spec == best.spec


def test_a_spec_without_a_file_is_proposed_whole_and_not_written() -> None:
    current = find_spec(DENSE.spec)
    best = space(current, PROBLEM, parse_axes(["stages=3"], current.spec)).candidates[1]
    assert "-stages: 2\n+stages: 3" in propose(current, best.spec).diff()
    with pytest.raises(CodegenError, match=r"--write: the current spec has no file; name one with --spec FILE"):
        check_writable(current)


def test_a_shipped_spec_of_an_installed_package_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    check_writable(DENSE)
    monkeypatch.setattr(proposal, "IN_SOURCE_TREE", False)
    with pytest.raises(
        CodegenError, match=r"h100_dense belongs to the installed package; copy its spec to your own file"
    ):
        check_writable(DENSE)


def test_a_file_that_has_changed_meanwhile_is_not_written(own: Path) -> None:
    mine = read_spec(own)
    best = space(mine, PROBLEM, parse_axes(["stages=3"], mine.spec)).candidates[1]
    own.write_text(own.read_text().replace("n: 80", "n: 64"))
    with pytest.raises(CodegenError, match=r"mine.yaml: has changed since it was read; run again"):
        propose(mine, best.spec)
