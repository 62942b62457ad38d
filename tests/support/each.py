"""A property of many things in one test: every thing is checked, and the message names those that fail.

An item of pytest takes a few milliseconds to collect in each process, which is more than most of these checks take.
"""

from __future__ import annotations

import functools
import inspect
import random
import traceback
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from codegen.dtypes import FP8
from codegen.library import NamedSpec, shipped_specs

Test = Callable[..., None]
MOST_OF_REASON = 300
"""Characters of a reason in the list of failures; the traceback of the first one is whole."""
MOST_OF_NAME = 80


def for_each(
    argument: str, things: Callable[[], Iterable[Any]], name: Callable[[Any], str] = str
) -> Callable[[Test], Test]:
    """Decorate a test that takes one thing, so that it loops over all of them.

    Args:
        argument: the parameter of the test that takes a thing; the others stay fixtures or parameters.
        things: lists them, when the test runs and not when it is collected.
        name: the name of a thing in messages.
    """

    def decorate(test: Test) -> Test:
        def loop(**fixtures: Any) -> None:
            _repeat(test, [(name(thing), {argument: thing}) for thing in things()], fixtures)

        loop.pytestmark = getattr(test, "pytestmark", [])  # type: ignore[attr-defined]
        return _without(test, loop, {argument})

    return decorate


def looped(test: Test) -> Test:
    """Decorate a test that ``pytest.mark.parametrize`` repeats, so that one item loops over its parameters.

    It stands above the marks. Fixtures are those of one test; of a dict, each case has a copy.
    """
    marks: list[pytest.Mark] = getattr(test, "pytestmark", [])
    cases: list[tuple[str, dict[str, Any]]] = [("", {})]
    for mark in marks:
        assert mark.name == "parametrize", f"{mark.name} cannot be of one case"
        given = _cases(*mark.args, **mark.kwargs)
        cases = [
            (f"{name}-{more}".strip("-"), {**values, **others}) for name, values in cases for more, others in given
        ]

    def loop(**fixtures: Any) -> None:
        _repeat(test, cases, fixtures)

    return _without(test, loop, set(cases[0][1]))


def _repeat(test: Test, cases: Sequence[tuple[str, dict[str, Any]]], fixtures: dict[str, Any]) -> None:
    """Run a test with the arguments of each case, and with fixtures, of which it has copies if they are dicts."""

    def run(values: dict[str, Any]) -> None:
        own = {name: deepcopy(each) if isinstance(each, dict) else each for name, each in fixtures.items()}
        test(**values, **own)

    names = [name for name, _ in cases]
    check_each(
        {
            f"{name}#{number}" if names.count(name) > 1 else name: functools.partial(run, values)
            for number, (name, values) in enumerate(cases)
        }
    )


def _cases(names: str | Sequence[str], values: Iterable[Any], ids: Any = None) -> list[tuple[str, dict[str, Any]]]:
    """Names and arguments of the cases of one mark."""
    arguments = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    cases: list[tuple[str, dict[str, Any]]] = []
    for number, value in enumerate(values):
        is_set = isinstance(value, type(pytest.param()))
        own = value.values if is_set else (value,) if len(arguments) == 1 else tuple(value)
        name = value.id if is_set else None
        if name is None and ids is not None:
            name = "-".join(str(ids(each)) for each in own) if callable(ids) else ids[number]
        name = name if name is not None else "-".join(repr(each)[:MOST_OF_NAME] for each in own)
        cases.append((str(name), dict(zip(arguments, own, strict=True))))
    return cases


def _without(test: Test, loop: Test, arguments: set[str]) -> Test:
    """The loop with the name of its test, and with its parameters but those that the loop gives."""
    functools.update_wrapper(loop, test, assigned=("__module__", "__name__", "__qualname__", "__doc__"), updated=())
    signature = inspect.signature(test)
    kept = [parameter for name, parameter in signature.parameters.items() if name not in arguments]
    loop.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    return loop


def check_each(checks: dict[str, Callable[[], object]]) -> None:
    """Run all checks, then fail with one line for each that failed: its name, the reason and the place.

    A check that calls ``pytest.skip`` is left out; the test is skipped if all of them do.
    """
    failed: dict[str, Exception] = {}
    skipped: list[str] = []
    for name, check in checks.items():
        try:
            check()
        except pytest.skip.Exception as skip:
            skipped.append(str(skip))
        except (Exception, pytest.fail.Exception) as error:
            failed[name] = error
    if failed:
        lines = [
            f"{len(failed)} of {len(checks)} fail",
            *(f"{name}: {_reason(error)}" for name, error in failed.items()),
        ]
        raise AssertionError("\n".join(lines)) from next(iter(failed.values()))
    assert checks, "there is nothing to check"
    if len(skipped) == len(checks):
        pytest.skip(skipped[0])


def _reason(error: BaseException) -> str:
    """The first line of an error and the place that raised it."""
    first = (str(error).strip() or "it has no message").splitlines()[0]
    kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{kind}{first[:MOST_OF_REASON]} ({Path(place.filename).name}:{place.lineno})"


every_spec = for_each("named", shipped_specs, lambda named: named.stem)
"""Loop over the shipped specs, twins among them."""

every_source = for_each(
    "named", lambda: [named for named in shipped_specs() if named.twin_of is None], lambda named: named.stem
)
"""Loop over the shipped specs with a source of their own. For what plans and texts have in common with those of twins,
which differ from them in words: ``test_twins.py`` holds that for each."""


def kind_of(named: NamedSpec) -> tuple[object, ...]:
    """The fields of a spec that decide which rules of the package concern it."""
    spec = named.spec.model_dump(by_alias=True)
    names = ("op", "arch", "gradients", "mma", "output", "query_grouping", "share_kv_loads", "scheduler", "transpose_a")
    return (spec["dtype"] in FP8, (spec.get("pattern") or {}).get("kind"), *(spec.get(name) for name in names))


def some_of_each_kind(seed: int) -> list[NamedSpec]:
    """A shipped spec of each kind, others for another seed: for checks that take longer."""
    specs = random.Random(seed).sample(shipped_specs(), len(shipped_specs()))
    return list({kind_of(named): named for named in specs}.values())
