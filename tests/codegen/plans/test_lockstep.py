"""`l2_lockstep`: for which specs there is a kernel, and where its counters lie."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from host_streams import pretend_stream  # noqa: E402

from codegen.errors import SpecError  # noqa: E402
from codegen.library import find_spec  # noqa: E402
from codegen.parse import parse_spec  # noqa: E402
from codegen.planning import plan_for  # noqa: E402
from codegen.problem import SCHEDULER_COUNTERS, LaunchArgs  # noqa: E402
from codegen.render import render  # noqa: E402
from runtime.driver import workspace  # noqa: E402
from runtime.driver.enqueue import enqueue  # noqa: E402

LONG = "h100_topk32_long"


def fields(name: str, **changes: Any) -> dict[str, Any]:
    return {**find_spec(name).spec.model_dump(mode="json", by_alias=True), **changes}


@pytest.mark.parametrize(
    ("name", "refused"),
    [
        ("h100_dense", "l2_lockstep: is true; dense on sm_90a does not support it"),
        ("h100_block_lists", "l2_lockstep: is true; block_lists on sm_90a does not support it"),
        ("l4_topk32", "l2_lockstep: is true; topk on sm_89 does not support it"),
        ("h100_topk32_d64_b64", "l2_lockstep: is true; tiles with 4 lists or parts of lists"),
    ],
)
def test_it_is_for_sorted_lists_of_one_length(name: str, refused: str) -> None:
    with pytest.raises(SpecError, match=refused):
        plan_for(find_spec(fields(name, l2_lockstep=True)))


def test_it_changes_the_kernel_and_what_explain_says_of_it() -> None:
    plain, l2_lockstep = (find_spec(fields("h100_topk32", l2_lockstep=value)) for value in (False, True))
    assert plain.spec.hash == find_spec("h100_topk32").spec.hash != l2_lockstep.spec.hash == find_spec(LONG).spec.hash
    assert "struct CtaLockstep" in render(l2_lockstep) and "struct CtaLockstep" not in render(plain)
    assert "lockstep" in dict(plan_for(l2_lockstep).summary) and "lockstep" not in dict(plan_for(plain).summary)
    assert "l2_lockstep" not in parse_spec(fields("h100_topk32")).canonical_json()


@pytest.mark.parametrize("stream_k_tail", [True, False])
def test_only_whole_tiles_are_marked(stream_k_tail: bool) -> None:
    source = render(find_spec(fields(LONG, stream_k_tail=stream_k_tail)))
    assert ("i == 0 && work.end == 0) lockstep.mark" in source) is stream_k_tail
    assert source.count("lockstep.mark(p)") == source.count("lockstep.wait(p)") == source.count("lockstep.end(p)") == 1


def test_counters_of_divided_tiles_are_not_those_of_the_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, int] = {}
    kept = torch.zeros(64, dtype=torch.int32)
    pretend_stream(monkeypatch)
    monkeypatch.setattr(workspace, "counters", lambda device, stream, number: kept[:number])
    monkeypatch.setattr(workspace, "scratch", lambda device, size: torch.empty(size, dtype=torch.uint8))
    loaded = SimpleNamespace(
        launch=lambda signature, addresses, stream, prologue: given.update(addresses), library=None
    )
    args = LaunchArgs({}, 1, counters={"progress": SCHEDULER_COUNTERS, "units_done": 16}, scratch={"partials": 4})
    enqueue(loaded, None, {}, torch.device("cuda", 0), workspace.Memory.of(args))  # type: ignore[arg-type]
    assert given["progress"] == kept.data_ptr()
    assert given["units_done"] == given["progress"] + 4 * SCHEDULER_COUNTERS
