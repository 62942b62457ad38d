"""A test that loops fails where one of its things does, and names all that do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from each import check_each, every_spec, for_each, kind_of, looped, some_of_each_kind

from codegen.library import NamedSpec, shipped_names, shipped_specs

SEEN: list[object] = []
CASES: list[object] = []


@for_each("number", lambda: range(4))
@pytest.mark.parametrize("power", [1, 2])
def test_each_thing_is_checked_beside_fixtures_and_parameters(number: int, power: int, tmp_path: Path) -> None:
    SEEN.append((number, power, tmp_path.is_dir()))
    assert number**power in (number, number * number)
    if number == 3:
        assert SEEN[-4:] == [(each, power, True) for each in range(4)]


@looped
@pytest.mark.parametrize(("a", "b"), [(1, 2), pytest.param(3, 4, id="three")])
@pytest.mark.parametrize("c", [5, 6], ids=lambda c: f"c{c}")
def test_a_loop_has_the_cases_of_its_marks(a: int, b: int, c: int, attention: dict[str, Any]) -> None:
    assert "seen" not in attention, "each case has a copy"
    attention["seen"] = True
    CASES.append((a, b, c))
    assert [(1, 2, 5), (3, 4, 5), (1, 2, 6), (3, 4, 6)][: len(CASES)] == CASES


def test_a_failing_case_is_named_by_its_parameters() -> None:
    @looped
    @pytest.mark.parametrize(("a", "b"), [(1, "x"), pytest.param(3, "y", id="three")])
    @pytest.mark.parametrize("c", [5, 6])
    def fails(a: int, b: str, c: int) -> None:
        assert (a, c) == (1, 5)

    with pytest.raises(AssertionError) as caught:
        fails()
    lines = str(caught.value).splitlines()
    assert lines[0] == "3 of 4 fail" and [line.split(":")[0] for line in lines[1:]] == ["5-three", "6-1-'x'", "6-three"]


def test_two_things_of_one_name_are_told_apart() -> None:
    @for_each("number", lambda: [1, 2, 3], lambda number: "odd" if number % 2 else "even")
    def fails(number: int) -> None:
        assert number == 1

    with pytest.raises(AssertionError, match=r"2 of 3 fail\neven: .*\nodd#2: "):
        fails()


@every_spec
def test_every_shipped_spec_is_one_of_them(named: NamedSpec) -> None:
    assert named.stem in shipped_names()


def test_all_failures_are_named_with_reason_and_place() -> None:
    def check(number: int) -> None:
        if number == 3:
            pytest.skip("not this one")
        if number == 4:
            pytest.fail("on purpose")
        assert 10 // number > 5, "it is large\nand more"

    with pytest.raises(AssertionError) as caught:
        check_each({f"n{number}": lambda number=number: check(number) for number in range(5)})  # type: ignore[misc]
    lines = str(caught.value).splitlines()
    assert lines[0] == "3 of 5 fail"
    assert [line.split(" (")[0] for line in lines[1:]] == [
        "n0: ZeroDivisionError: integer division or modulo by zero",
        "n2: it is large",
        "n4: Failed: on purpose",
    ]
    assert all("(test_each.py:" in line for line in lines[1:3])
    assert isinstance(caught.value.__cause__, ZeroDivisionError), "the traceback of the first one is shown"


def test_without_things_it_fails_and_with_skips_alone_it_is_skipped() -> None:
    with pytest.raises(AssertionError, match="there is nothing to check"):
        check_each({})
    with pytest.raises(pytest.skip.Exception, match="no GPU"):
        check_each({"a": lambda: pytest.skip("no GPU")})


def test_all_kinds_of_specs_have_one_each_day_and_others_another_day() -> None:
    days = [some_of_each_kind(seed) for seed in (20260101, 20260102)]
    assert {*map(kind_of, days[0])} == {*map(kind_of, days[1])} == {*map(kind_of, shipped_specs())}
    assert days[0] != days[1] and len(days[0]) == len(days[1]) < len(shipped_specs())
