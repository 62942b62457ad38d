"""Names that specs had: what the table makes of them, in plain data and in files, and what an old name is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from codegen import migrations
from codegen.errors import SpecError
from codegen.library import read_spec, shipped_specs
from codegen.migrations import LEFT_OUT, Renamed, migrated
from codegen.parse import parse_spec
from codegen.rewriting import rewritten

Use = Callable[..., None]
TABLE = (
    Renamed("attention", "shares", "share_kv_loads"),
    Renamed("attention", "schedule", "schedule", {"taking_turns": "ping_pong", "together": "cooperative"}),
    Renamed("attention", "unordered", "l2_lockstep", {False: True, True: LEFT_OUT}),
    Renamed("attention", "pattern.blk.keys", "kv"),
    Renamed("attention", "pattern.blk", "block"),
)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Use:
    """Puts another table in place of the project's."""
    return lambda *table: monkeypatch.setattr(migrations, "TABLE", table)


@pytest.fixture
def table(use: Use) -> None:
    use(*TABLE)


def test_names_of_the_table_are_not_legal_any_more() -> None:
    for named in shipped_specs():
        fields = json.loads(named.spec.canonical_json())
        assert migrated(fields) == (fields, [])


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ({"shares": True}, {"share_kv_loads": True}, "shares -> share_kv_loads"),
        ({"schedule": "taking_turns"}, {"schedule": "ping_pong"}, "schedule: taking_turns -> ping_pong"),
        ({"unordered": False}, {"l2_lockstep": True}, "unordered: false -> l2_lockstep: true"),
        ({"unordered": True}, {}, "unordered: true -> left out"),
        ({"pattern": {"blk": {"q": 64}}}, {"pattern": {"block": {"q": 64}}}, "pattern.blk -> block"),
    ],
)
def test_plain_data(table: None, old: dict[str, Any], new: dict[str, Any], says: str) -> None:
    given = {"op": "attention", "arch": "sm_90a", **old, "stages": 2}
    before = json.dumps(given)
    fields, changes = migrated(given)
    assert list(fields.items()) == list({"op": "attention", "arch": "sm_90a", **new, "stages": 2}.items())
    assert json.dumps(given) == before and [str(change) for change in changes] == [says]
    assert migrated(fields) == (fields, [])


@pytest.mark.parametrize(
    "fields",
    [
        {"op": "bsr_spmm", "shares": True},  # another operator's
        {"op": ["attention"], "shares": True},
        {"shares": True},
        {"op": "attention", "schedule": "ping_pong"},
        {"op": "attention", "unordered": 0},  # no boolean, though equal to one
        {"op": "attention", "unordered": None},
        {"op": "attention", "pattern": "blk"},
        {"op": "attention", "pattern": {"blk_": 1}},
    ],
)
def test_what_the_table_is_not_about(table: None, fields: dict[str, Any]) -> None:
    assert migrated(fields) == (fields, [])


@pytest.mark.parametrize("cluster", [1, 2])
def test_a_field_that_is_gone_is_told(cluster: int) -> None:
    fields = {"op": "bsr_spmm", "arch": "sm_90a", "block": {"rows": 128, "cols": 128}}
    with pytest.raises(SpecError, match=r"^cluster: is no longer a field: leave it out$"):
        parse_spec(fields | {"cluster": cluster})
    assert migrated(fields | {"cluster": cluster})[0] == fields


def test_lines_follow_one_another(use: Use) -> None:
    use(Renamed("attention", "a", "b"), Renamed("attention", "b", "share_kv_loads", {True: "given", False: LEFT_OUT}))
    assert migrated({"op": "attention", "a": True})[0] == {"op": "attention", "share_kv_loads": "given"}
    assert migrated({"op": "attention", "b": False})[0] == {"op": "attention"}
    with pytest.raises(SpecError, match=r"^a: is true, which is now share_kv_loads: given$"):
        parse_spec({"op": "attention", "a": True})


def test_two_booleans_become_one_field(use: Use) -> None:
    use(
        Renamed("attention", "given", "grouping", {True: "given", False: LEFT_OUT}),
        Renamed("attention", "searched", "grouping", {True: "search", False: LEFT_OUT}),
    )
    for given, searched, new in ((True, False, "given"), (False, True, "search"), (False, False, None)):
        fields, _ = migrated({"op": "attention", "given": given, "searched": searched})
        assert fields == {"op": "attention"} | ({"grouping": new} if new else {})
    with pytest.raises(SpecError, match=r"^searched: is now named grouping, which is given too: leave one of"):
        migrated({"op": "attention", "given": True, "searched": True})


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("shares: true", "5: shares: is now named share_kv_loads; run: codegen migrate kernel.yaml"),
        ("schedule: together", "5: schedule: is together, which is now cooperative; run: codegen migrate kern"),
        ("unordered: false", "5: unordered: is false, which is now l2_lockstep: true; run: codegen migrate"),
        ("unordered: true", "5: unordered: is now l2_lockstep; leave it out for true; run: codegen migrate"),
        (
            "share_kv_loads: true\nshares: true",
            "6: shares: is now named share_kv_loads, which is given too: leave one",
        ),
        ("shares: true\nstages: two", "5: shares: is now named share_kv_loads; run"),
        ("stages: two", "5: stages: is 'two'"),
    ],
)
def test_an_old_name_is_told_the_new_one(table: None, write_yaml: Callable[..., Path], line: str, says: str) -> None:
    text = f"op: attention\narch: sm_90a\nhead_dim: 128\npattern: {{kind: dense}}\n{line}\n"
    with pytest.raises(SpecError) as caught:
        read_spec(write_yaml(text))
    assert str(caught.value).startswith(f"kernel.yaml:{says}")


def test_the_former_name_of_an_operator(write_yaml: Callable[..., Path]) -> None:
    text = "# FP8\nop: quantise  # codes\narch: sm_90a\ndtype: bf16\nscales: row_block\nhead_dim: 128\n"
    path = write_yaml(text)
    with pytest.raises(SpecError, match=r"^kernel\.yaml:2: op: is quantise, which is now quantize; run: codegen mi"):
        read_spec(path)
    new, _ = rewritten(text, "kernel.yaml")
    assert new == text.replace("quantise", "quantize") and read_spec(path, new).spec.op == "quantize"


def test_without_a_file_there_is_no_command(table: None) -> None:
    with pytest.raises(SpecError, match=r"^pattern\.blk: is now named block$"):
        parse_spec({"op": "attention", "arch": "sm_90a", "pattern": {"kind": "topk", "k": 8, "blk": {"q": 64}}})


def test_a_legal_spec_is_not_looked_up(use: Use, attention: dict[str, Any]) -> None:
    """A name that meant something else once does not get in the way of today's."""
    use(Renamed("attention", "stages", "depth"))
    assert parse_spec(attention).stages == attention["stages"]


FILE = """\
# A kernel with a comment.

op:   attention      # what
arch: sm_90a
head_dim: 128
"shares": true  # as it was called

pattern: {kind: topk,  k: 8, blk: {q: 64, keys: 64}}   # lists
schedule: 'together'    # who
unordered: false # hm
tile:
    m: 128
    n: 64   # keys
# The end.
"""


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_file_keeps_all_but_names(table: None, end: str, tmp_path: Path) -> None:
    old = FILE.replace("\n", end)
    text, changes = rewritten(old, "x.yaml")
    expected = old.replace('"shares"', '"share_kv_loads"').replace("'together'", "'cooperative'")
    expected = expected.replace("unordered: false", "l2_lockstep: true").replace(
        "blk: {q: 64, keys", "block: {q: 64, kv"
    )
    assert text == expected
    assert [str(change) for change in changes] == [
        "shares -> share_kv_loads",
        "schedule: together -> cooperative",
        "unordered: false -> l2_lockstep: true",
        "pattern.blk.keys -> kv",
        "pattern.blk -> block",
    ]
    assert rewritten(text, "x.yaml") == (text, [])
    assert read_spec(tmp_path / "x.yaml", text).spec.schedule == "cooperative"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("lse: true\nunordered: true  # gone with its line\nstages: 2\n", "lse: true\nstages: 2\n"),
        ("unordered: true", ""),
        ("? unordered\n: false\n", "? l2_lockstep\n: true\n"),
        ("lse: {a: 1,  unordered: true}\nunordered: true\n", "lse: {a: 1,  unordered: true}\n"),
    ],
)
def test_a_line_is_replaced_or_goes(table: None, before: str, after: str) -> None:
    head = "op: attention\n"
    assert rewritten(head + before, "x.yaml")[0] == head + after


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("{unordered: true, op: attention, lse: true}", "{op: attention, lse: true}"),
        ("{op: attention, unordered: true, lse: true}", "{op: attention, lse: true}"),
        ("{op: attention, lse: true , unordered: true}", "{op: attention, lse: true }"),
    ],
)
def test_what_is_left_out_goes_with_its_comma(table: None, before: str, after: str) -> None:
    assert rewritten(before, "x.yaml")[0] == after


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("op: attention\nschedule: &who together\n", 2),
        ("op: attention\nschedule: >-\n  together\n", 2),
        ("op: attention\npattern: &p {blk: &b {keys: 64}}\nother: *b\n", 2),
    ],
)
def test_what_cannot_be_rewritten_is_refused(table: None, text: str, line: int | None) -> None:
    with pytest.raises(SpecError, match="it cannot be rewritten in place: change it by hand") as caught:
        rewritten(text, "x.yaml")
    assert str(caught.value).startswith(f"x.yaml:{line}: " if line else "x.yaml: ")


@pytest.mark.parametrize("text", ["op: [\n", "&a [*a]\n", "op: attention\nshares: true\nshare_kv_loads: true\n"])
def test_errors_of_files_have_their_place(table: None, text: str) -> None:
    with pytest.raises(SpecError, match=r"^x\.yaml"):
        rewritten(text, "x.yaml")


def test_other_files_stay_as_they_are(use: Use) -> None:
    use()
    assert rewritten("a:  [yaml ]", "x.yaml") == ("a:  [yaml ]", [])  # nothing to look for
