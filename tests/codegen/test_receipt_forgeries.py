"""Committed receipts, forged field by field: none that says something else passes."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from codegen.library import NamedSpec, find_spec, shipped_specs
from codegen.receipts import MissingReceipt, ReceiptState, ReceiptStatus, read_receipt, receipt_path, state
from codegen.render import generate

# Attention, a product, FP8, and a kernel whose results are exact and whose PTX ran.
STEMS = ("h100_topk32", "h100_bsr_spmm_b128", "h100_e4m3_dense", "l4_tile_copy_ld_global")
FORGED = (float("nan"), float("inf"), float("-inf"), "NaN", "Infinity", "-Infinity", -1, 0, 1e9, 1 << 70, "many", None)
COUNTS = ("registers", "spill_bytes", "stack_bytes", "static_shared_bytes", "instructions")

Data = dict[str, Any]


def committed(stem: str) -> tuple[NamedSpec, Data]:
    named = find_spec(stem)
    return named, json.loads(read_receipt(named, receipt_path(named)).text)


def state_of(named: NamedSpec, data: Data, folder: Path) -> ReceiptState:
    path = receipt_path(named, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data))
    return state(named, generate(named).source, folder)


def numbers(node: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Places of all numbers of a receipt."""
    if isinstance(node, dict | list):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield from numbers(value, (*place, key))
    elif isinstance(node, int | float) and not isinstance(node, bool):
        yield place


def is_possible(place: tuple[Any, ...], value: Any, worst: bool) -> bool:
    """Whether a GPU and a compiler may have said this as well: no reader of the receipt could know better.

    Counts of a compilation are compared by ``codegen compile --check``.
    """
    if place[0] == "cubin" and place[1] in COUNTS:
        return value == 0 or (place[1] == "instructions" and value == 1 << 70)
    figure = place[-1]
    if figure == "torch_error":
        return value in (0, 1e9, 1 << 70, None)
    return value == 0 and (figure in ("tflops", "peer_tflops") or (figure == "max_error" and not worst))


@pytest.mark.parametrize("stem", STEMS)
def test_a_number_that_is_another(stem: str, tmp_path: Path) -> None:
    named, data = committed(stem)
    assert state_of(named, data, tmp_path).standing is ReceiptStatus.OK
    # Of its cases the last, which is the random shapes where there are any, and the one of the worst error.
    cases = data["verification"]["cases"]
    worst = max(range(len(cases)), key=lambda i: cases[i]["max_error"])
    places = [
        each for each in numbers(data) if each[:2] != ("verification", "cases") or each[2] in (worst, len(cases) - 1)
    ]
    assert len(places) > 15
    for place in places:
        *parents, key = place
        forged = copy.deepcopy(data)
        at = forged
        for parent in parents:
            at = at[parent]
        was = at[key]
        for value in FORGED:
            if value == was or is_possible(place, value, worst in place):
                continue
            at[key] = value
            found = state_of(named, forged, tmp_path)
            assert found.standing is not ReceiptStatus.OK, (place, value)
            assert found.explanation.isprintable(), (place, value)


def _cases(change: Callable[[list[Data]], Any]) -> Callable[[Data], Any]:
    return lambda data: change(data["verification"]["cases"])


FORGERIES: dict[str, Callable[[Data], Any]] = {
    "no cases": _cases(lambda cases: cases.clear()),
    "the first case is left out": _cases(lambda cases: cases.pop(0)),
    "the last case is left out": _cases(lambda cases: cases.pop()),
    "one case is left": _cases(lambda cases: cases.__delitem__(slice(1, None))),
    "a case is there twice": _cases(lambda cases: cases.append(cases[0])),
    "a case has another one's name": _cases(lambda cases: cases[1].update(name=cases[0]["name"])),
    "a case has a name of its own": _cases(lambda cases: cases[1].update(name="another\x1b[2J")),
    "a case more": _cases(lambda cases: cases.append({**cases[0], "name": "another"})),
    "a flag is false": _cases(lambda cases: cases[0].update(passed=False)),
    "a flag is a word": _cases(lambda cases: cases[0].update(passed="true")),
    "an error beyond what is allowed": _cases(lambda cases: cases[0].update(max_error=1000.0, passed=True)),
    "more is allowed": _cases(lambda cases: cases[0].update(max_error=1000.0, tolerance=1001.0)),
    "all is a failure's": _cases(lambda cases: [case.update(max_error="NaN") for case in cases]),
    "the worst error is smaller": lambda data: data["verification"].update(worst_error=-0.0001),
    "another target": lambda data: data["verification"].update(target="sm_120a cubin"),
    "no verification": lambda data: data.update(verification=None),
    "a verification in a list": lambda data: data.update(verification=[data["verification"]]),
    "hashes of spec and source swapped": lambda data: data["spec"].update(hash=data["source"]["sha256"]),
    "hashes of source and cubin swapped": lambda data: data["source"].update(sha256=data["cubin"]["sha256"]),
    "the launch of another": lambda data: data["cubin"].update(launch_sha256=data["cubin"]["sha256"]),
    "a hash in capitals": lambda data: data["cubin"].update(sha256="A" * 64),
    "another architecture": lambda data: data["cubin"].update(arch="sm_120a"),
    "another architecture's options": lambda data: data["cubin"].update(options=["--gpu-architecture=sm_120a"]),
    "no options": lambda data: data["cubin"].update(options=[]),
    "other shared memory": lambda data: data["cubin"].update(dynamic_shared_bytes=16),
    "a field more": lambda data: data.update(author="me"),
    "version 1": lambda data: data.update(schema_version=1),
}


@pytest.mark.parametrize("stem", STEMS)
def test_forgeries(stem: str, tmp_path: Path) -> None:
    named, data = committed(stem)
    for name, forge in FORGERIES.items():
        forged = copy.deepcopy(data)
        forge(forged)
        found = state_of(named, forged, tmp_path)
        assert found.standing is not ReceiptStatus.OK, name
        assert found.explanation.isprintable(), name


@pytest.mark.parametrize("stem", [stem for stem in STEMS if stem != "h100_topk32"])
def test_the_receipt_of_another_kernel(stem: str, tmp_path: Path) -> None:
    _, data = committed(stem)
    named, own = committed("h100_topk32")
    assert state_of(named, data, tmp_path).standing is ReceiptStatus.STALE
    assert state_of(named, data | {each: own[each] for each in ("spec", "source")}, tmp_path).standing in (
        ReceiptStatus.STALE,
        ReceiptStatus.FAILED,
    )
    taken = copy.deepcopy(own) | {"verification": data["verification"]}
    assert state_of(named, taken, tmp_path).standing is ReceiptStatus.FAILED


def test_the_order_of_fields_and_cases_says_nothing(tmp_path: Path) -> None:
    named, data = committed("h100_topk32")
    data["verification"]["cases"].reverse()
    assert state_of(named, dict(reversed(data.items())), tmp_path).standing is ReceiptStatus.OK


def test_committed_receipts_hold_without_their_flags() -> None:
    found = 0
    for named in shipped_specs():
        try:
            verification = read_receipt(named, receipt_path(named)).verification
        except MissingReceipt:
            continue  # never verified: the page of receipts says so
        found += 1
        assert verification is not None and not verification.failed, named.stem
        assert verification.worst_error == max(case.max_error for case in verification.cases), named.stem
    assert found > 700
