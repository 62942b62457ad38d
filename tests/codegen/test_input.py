"""Whatever a user names or passes: it is read within bounds, or one line of a CodegenError says why not."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import re
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from each import looped
from stress import executions, loader
from stress.inputs import spelt
from typer.testing import CliRunner

from codegen import cli
from codegen.errors import CodegenError, FileError, MissingFileError, SpecError
from codegen.files import MOST_BYTES, holds, is_file, read_text, resolved, write_if_changed
from codegen.library import NamedSpec, find_spec, read_spec, shipped_names
from codegen.parse import parse_spec
from codegen.plain import MOST_CHARACTERS, json_model, json_value
from codegen.planning import plan_of
from codegen.receipts import MissingReceipt, Receipt, ReceiptError, ReceiptStatus, state
from codegen.render import render, render_plan, seal_is_intact
from codegen.select.problem import BsrProblem, parse_problem, problem_fields
from codegen.select.table import TableError, read_rows
from codegen.spec import BlockShape, Spec
from codegen.wording import FEW, MOST_SHOWN, alternatives, in_comment, in_shell, one_line, shown

HEAD = "op: attention\narch: sm_90a\nhead_dim: 128\n"
DENSE = HEAD + "pattern: {kind: dense}\n"
Write = Callable[..., Path]


def refusal(run: Callable[[], object]) -> str:
    """The message of what was refused: one line of bounded length."""
    with pytest.raises(CodegenError) as caught:
        run()
    message = str(caught.value)
    assert message.isprintable() and len(message) < 1000
    assert str(pickle.loads(pickle.dumps(caught.value))) == message
    return message


# Text that reaches a source


INJECTIONS = [
    *("mine.y\nint evil;", "mine.y\r\nint evil;", "mine.\\", "mine.??"),
    *("mine.\u2028é", "mine.y\x1b[31m", "mine.\udcff", "mine.y a'b"),
]


@pytest.mark.parametrize("name", INJECTIONS)
def test_a_file_name_stays_in_its_comment(write_yaml: Write, name: str) -> None:
    source = render(read_spec(write_yaml(DENSE, name)))
    plain = render(read_spec(write_yaml(DENSE, "mine.yaml")))
    banner, _, code = source.partition("\n\n")
    assert code == plain.partition("\n\n")[2]
    assert len(banner.splitlines()) == len(plain.partition("\n\n")[0].splitlines())
    assert executions.is_text_of_a_source(source)
    assert seal_is_intact(source)


@pytest.mark.parametrize("stem", ["k(){} int evil", "k\n", "", "é", "9k", "int", "kRows"])
def test_a_name_from_a_caller_is_a_symbol_or_refused(named: NamedSpec, stem: str) -> None:
    assert "names the kernel" in refusal(lambda: NamedSpec(stem, named.spec))
    assert "names the kernel" in refusal(lambda: render_plan(plan_of(named.spec, stem)))


def test_an_origin_from_a_caller_stays_in_its_comment(named: NamedSpec) -> None:
    source = render(NamedSpec("my_kernel", named.spec, "x/??/\nint evil;\\"))
    assert executions.is_text_of_a_source(source) and "\nint evil" not in source


@looped
@pytest.mark.parametrize("code", [*range(0x300), 0x2028, 0xD800, 0xDCFF, 0x1F600])
def test_a_comment_is_printable_ascii(code: int) -> None:
    text = in_comment(f"a{chr(code)}??/")
    assert text.isascii() and text.isprintable() and "??" not in text and not text.endswith("\\")
    assert text.startswith(f"a{chr(code)}?") == (chr(code) not in "\\?" and " " <= chr(code) <= "~")


# Exceptions of dependencies


@pytest.mark.parametrize(
    "text",
    [
        *("op: !!bool maybe", "op: &t {<<: *t}", r'op: "\UFFFFFFFF"', "op: !!set x", "op: !!int ''", "op: !!float ''"),
        *(r'op: "\uD800"', "op: !!timestamp x", "op: !!omap x", "op: !!binary é", "op: !!map [1]", "op: !!seq {a: 1}"),
        *("<<: 1", "<<: [1]", "? - *x", "%YAML 9.9\n---\nop: x", "op: |9\n x", "{{a: b}: c}: d", "!!set {? {a: 1}}"),
        *("[" * 100_000, "- " * 100_000, "{a: " * 50_000, "op: " + "1:" * 400_000 + "1", "op: " + "9" * 500_000),
        *("op: 0x" + "f" * 900_000, "a: [" + "x, " * 300_000 + "]", "a: &a [x]\nb: [" + "*a, " * 200_000 + "]"),
        *("a: &a {x: 1}\nb: {<<: [" + "*a, " * 3000 + "]}", "op: '" + "x" * 900_000 + "'", "é" * 400_000),
    ],
    ids=lambda text: f"{text[:14]!a} of {len(text)}",
)
def test_yaml_that_is_refused(write_yaml: Write, text: str) -> None:
    path = write_yaml(text)
    with executions.limited():
        assert refusal(lambda: read_spec(path)).startswith("kernel.yaml")


def test_an_anchor_on_a_boolean_changes_nothing(write_yaml: Write) -> None:
    assert read_spec(write_yaml(DENSE + "lse: &x false\n")).spec == read_spec(write_yaml(DENSE + "lse: false\n")).spec


def deep(levels: int = 50_000) -> dict[str, Any]:
    """Dictionaries in dictionaries. Collecting garbage takes longer while they exist."""
    data: dict[str, Any] = {}
    for _ in range(levels):
        data = {"tile": data}
    return data


class Odd:
    """Refuses to be printed."""

    def __repr__(self) -> str:
        raise RuntimeError


CYCLE: dict[str, Any] = {"op": "attention"}
CYCLE["tile"] = CYCLE


@looped
@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("stages", 10**5000, "stages: is an integer of 16610 bits; at most 63 are allowed"),
        ("stages", 1 << 63, "stages: is an integer of 64 bits"),
        ("op", "\ud800", "op: is '\\ud800'; half of a surrogate pair is not a character"),
        ("x\ud800", 1, "is 'x\\ud800'; half of a surrogate pair"),
        ("dtype", "x" * 10**6, f"dtype: has 1000000 characters; at most {MOST_CHARACTERS} are allowed"),
        ("dtype", "x" * 9999, "dtype: is 'xxx"),
        ("tile", deep, "is nested too deeply"),
        ("tile", CYCLE, "is nested too deeply"),
        ("tile", [[[1]]] * 3000, "has more than 2000 values"),
        ("tile", Odd(), "tile: is a value of type Odd that cannot be printed"),
        ("tile", {1, 2}, "tile: is {1, 2}; expected a mapping, a list, a word, a number"),
        ("tile", b"x", "tile: is b'x'; expected a mapping"),
        ("tile", BlockShape.model_construct(rows=Odd()), "tile: is not a valid BlockShape"),
        ("pattern", {None: 1}, "pattern.None: is of type NoneType; names of fields are words"),
        (10**5000, 1, "is an integer of 16610 bits"),
        ((1, 2), 1, "is (1, 2); expected a mapping"),
        ("a\nb" * 1000, 1, "a\\nba\\nb"),
    ],
    ids=lambda value: f"{type(value).__name__}",
)
def test_fields_that_are_refused(attention: dict[Any, Any], field: Any, value: Any, message: str) -> None:
    attention[field] = value() if value is deep else value
    assert refusal(lambda: parse_spec(attention)).startswith(message)
    assert refusal(lambda: find_spec(attention)).startswith(message)


def test_a_model_that_was_never_checked_is(named: NamedSpec) -> None:
    wrong: Spec = named.spec.model_copy(update={"tile": object(), "stages": 10**5000})
    assert "is not a valid AttentionSpec" in refusal(lambda: parse_spec(wrong))


@pytest.mark.parametrize(
    "text",
    [
        *("[" * 100_000, "9" * 5000, "{", "", "\ud800", '{"a": ' * 101 + "1" + "}" * 101, "nul"),
    ],
    ids=lambda text: f"{text[:6]!a} of {len(text)}",
)
def test_json_that_is_refused(text: str, tmp_path: Path) -> None:
    assert re.match("is not JSON|is nested too deeply", refusal(lambda: json_value(text)))
    path = tmp_path / "k.json"
    path.write_text(text, encoding="utf-8", errors="replace")
    refusal(lambda: Receipt.read(path))
    if text:
        refusal(lambda: read_rows(path))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"a": 1, "a": 1}', "has the name 'a' twice in one object"),
        ('[{"b": {"a": 1, "c": 2, "a": 3}}]', "has the name 'a' twice in one object"),
        ("NaN", "has the number NaN; JSON only has finite numbers"),
        ('{"a": [-Infinity]}', "has the number -Infinity; JSON only has finite numbers"),
        ("1e999", "has the number 1e999; JSON only has finite numbers"),
    ],
)
def test_json_of_two_meanings_is_refused(text: str, says: str) -> None:
    assert refusal(lambda: json_value(text)) == says
    assert refusal(lambda: json_value(text.encode())) == says
    assert refusal(lambda: json_model(Receipt, text)) == says


@looped
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("head_dim=64,pattern=" + "[" * 5000, "problem.pattern.kind: "),
        ("head_dim=64,pattern=causal,q_len=" + "9" * 5000, "problem.q_len: is '9999"),
        ("head_dim=64,pattern=causal,q_len=" + "9" * 30, "problem.q_len: is an integer of 100 bits"),
        ("op=bsr_spmm,block=64,evenness=1e999", "problem.evenness"),
        ("op=bsr_spmm,block=64,density=NaN", "problem.density"),
        ("op=bsr_spmm,block=64,\n" + "x" * 9999 + "=1", "problem.\\nxxx"),
        ("op=[1],block=64", "problem"),
        ("x" * 9999, "problem: has 'xxx"),
    ],
)
def test_problems_that_are_refused(text: str, message: str) -> None:
    assert refusal(lambda: parse_problem(problem_fields(text))).startswith(message)


def test_problems_that_are_no_mappings() -> None:
    assert refusal(lambda: parse_problem([])) == "problem: must be a mapping of fields, this is list"  # type: ignore[arg-type]
    assert "block" in refusal(lambda: BsrProblem.of_lengths([1], op="bsr_spmm", k=64))
    assert "op" in refusal(lambda: BsrProblem.of_lengths([1], block={"rows": 64, "cols": 64}, k=64))
    assert "block" in refusal(lambda: BsrProblem.of_lengths([1], op="bsr_spmm", block={"rows": 64}, k=64))


# Bounds of files


def special(folder: Path) -> dict[str, tuple[Path, str]]:
    """Paths that are no files to read, each with what is to be said."""
    large, loop, fifo = folder / "large.yaml", folder / "loop.yaml", folder / "fifo.yaml"
    with large.open("wb") as file:
        file.truncate(100 << 20)
    loop.symlink_to(loop)
    os.mkfifo(fifo)
    (folder / "folder.yaml").mkdir()
    (folder / "zero.yaml").symlink_to("/dev/zero")
    (folder / "deep.yaml").symlink_to(fifo)
    irregular = "is not a regular file"
    return {
        "large": (large, f"is too large: the limit is {MOST_BYTES >> 20} MiB"),
        "fifo": (fifo, irregular),
        "link to a fifo": (folder / "deep.yaml", irregular),
        "device": (folder / "zero.yaml", irregular),
        "folder": (folder / "folder.yaml", "cannot be read: Is a directory"),
        "loop": (loop, "cannot be read: Too many levels of symbolic links"),
        "null": (folder / "a\0.yaml", "is not the name of a file: embedded null byte"),
        "long": (folder / ("a" * 300 + ".yaml"), "cannot be read: File name too long"),
        "half": (folder / "a\ud800.yaml", "is not the name of a file: "),
        "below a file": (large / "a.yaml", "cannot be read: Not a directory"),
    }


KINDS = (
    "large",
    "fifo",
    "link to a fifo",
    "device",
    "folder",
    "loop",
    "null",
    "long",
    "half",
    "below a file",
)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_to_read(kind: str, tmp_path: Path, named: NamedSpec) -> None:
    path, reason = special(tmp_path)[kind]
    with executions.limited():
        assert reason in refusal(lambda: read_text(path))
        message = refusal(lambda: find_spec(path))
        assert reason in message or "names the kernel" in message or "no such file" in message
        assert reason in refusal(lambda: Receipt.read(path))
        assert reason in refusal(lambda: read_rows(path))
        assert not is_file(path) or kind == "large"
        assert not (is_file(path) and holds(path, "text"))
        assert resolved(path)
        origin = NamedSpec("k", named.spec, "k.yaml", path)
        assert not origin.is_shipped and origin.source_file and origin.place


def test_a_file_of_the_most_bytes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"x" * MOST_BYTES)
    assert len(read_text(path)) == MOST_BYTES
    path.write_bytes(b"x" * (MOST_BYTES + 1))
    with pytest.raises(FileError, match="too large"):
        read_text(path)


def test_a_larger_file_of_our_own_is_written_once(tmp_path: Path) -> None:
    text = "x" * (MOST_BYTES + 1)
    assert [write_if_changed(tmp_path / "rows", text) for _ in range(2)] == [True, False]


def test_a_file_that_is_not_there_has_an_error_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError):
        read_text(tmp_path / "absent")
    with pytest.raises(MissingReceipt):
        Receipt.read(tmp_path / "absent.json")
    with pytest.raises(TableError):
        read_rows(tmp_path / "absent.jsonl")


def test_errors_of_writing_are_ours(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for path in (tmp_path / "a\0", tmp_path / "file" / "x", tmp_path / ("x" * 300), loop / "x", tmp_path / "\ud800"):
        refusal(lambda path=path: write_if_changed(path, "text"))  # type: ignore[misc]


def test_what_is_no_file_is_not_written_over(tmp_path: Path) -> None:
    """The device is named by a link: were it replaced, only the link would be gone."""
    fifo, device = tmp_path / "fifo", tmp_path / "device"
    os.mkfifo(fifo)
    device.symlink_to("/dev/null")
    for path in (fifo, device):
        assert "is not a regular file and is not overwritten" in refusal(
            lambda path=path: write_if_changed(path, "text")
        )  # type: ignore[misc]
    assert fifo.is_fifo() and device.is_symlink() and len(list(tmp_path.iterdir())) == 2


def test_a_receipt_says_one_line(named: NamedSpec, receipt: Callable[..., Receipt], tmp_path: Path) -> None:
    source = render(named)
    told = json.loads(receipt(named, source).text)
    told["verification"]["device"] = "a\nb\x1b[31m" + "c" * 9999
    (tmp_path / f"{named.stem}.json").write_text(json.dumps(told))
    found = state(named, source, tmp_path)
    assert found.standing is ReceiptStatus.OK and found.explanation.isprintable() and len(found.explanation) < 300
    told["cubin"]["instructions"]["a\n" * 999] = -1
    (tmp_path / f"{named.stem}.json").write_text(json.dumps(told))
    with pytest.raises(ReceiptError):
        refusal(lambda: Receipt.read(tmp_path / f"{named.stem}.json"))
        Receipt.read(tmp_path / f"{named.stem}.json")


# Messages


@looped
@pytest.mark.parametrize("text", ["", "plain", "grün", "a\nb", "\x1b[31m", "\ud800", "x" * 10**6, "\n" * 10**6])
def test_one_line(text: str) -> None:
    line = one_line(text)
    assert line.isprintable() and len(line) <= MOST_SHOWN and one_line(line) == line
    assert line == text or not text.isprintable() or len(text) > MOST_SHOWN
    assert shown(text).isprintable() and len(shown(text)) <= MOST_SHOWN


def test_unknown_names_get_the_nearest() -> None:
    many = [f"name{i}" for i in range(30)]
    assert alternatives("name7x", many) == "did you mean name7 or name27 or name17?"
    assert alternatives("zzz", many[:FEW]) == f"there are {', '.join(many[:FEW])}"
    assert alternatives("zzz", many, "a list").startswith("there are 30, among them name")
    assert len(alternatives("y" * 10**6, shipped_names())) < 200


def test_an_unknown_spec_is_not_answered_with_all(attention: dict[str, Any]) -> None:
    for name in ("qqqq", "", "x" * 5000, "a\nb"):
        message = refusal(lambda name=name: find_spec(name))  # type: ignore[misc]
        assert sum(stem in message for stem in shipped_names()) < 20
        assert message.endswith("codegen list shows all")
    assert refusal(lambda: parse_spec({**attention, "qqqq": 1})).count(",") < 5


# The command line


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("command", [("render",), ("render", "--check"), ("explain",)])
def test_commands_refuse_it_in_one_line(command: tuple[str, ...], kind: str, tmp_path: Path) -> None:
    path, _ = special(tmp_path)[kind]
    with executions.limited():
        result = CliRunner().invoke(cli.app, [*command, str(path)])
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit)
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1


@pytest.mark.parametrize("name", INJECTIONS)
def test_commands_show_any_name(write_yaml: Write, name: str) -> None:
    path = write_yaml(DENSE, name)
    result = CliRunner().invoke(cli.app, ["render", str(path), "--out", "a\n\udcff"])
    assert result.exit_code == 0, result.exception
    assert result.stdout.startswith("wrote") and result.stdout.count("\n") == 1
    result = CliRunner().invoke(cli.app, ["render", str(path), "--check"])
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit)
    assert result.stdout.count("\n") == 2


@looped
@pytest.mark.parametrize("name", [*INJECTIONS, "plain", "a b", "grün", "it's"])
def test_a_shell_takes_the_word_for_the_name(name: str) -> None:
    word = in_shell(name)
    assert word.isprintable()
    printed = subprocess.run(["bash", "-c", f"printf %s {word}"], capture_output=True, check=True).stdout
    assert os.fsdecode(printed) == name


# All of it at once


@pytest.mark.parametrize("seed", range(4))  # for several processes
def test_some_thousand_attacks(seed: int) -> None:
    """tests/stress/loader.py has many more."""
    tally = executions.Tally()
    tally.add(executions.batch(seed, start) for start in range(0, 500, executions.BATCH))
    assert not tally.failures, tally.failures[0]
    assert tally.executions >= 500 and tally.refused > tally.accepted > len(tally.specs) >= 10


def test_an_attack_that_succeeds_is_told() -> None:
    def leaks(reader: executions.Reader, given: Mapping[str, str]) -> str:
        return given["absent"]

    tally, reader = executions.Tally(), executions.Reader()
    failure = tally.execute(reader, 5, leaks, {})
    assert failure is not None and failure.number == 5 and "KeyError" in failure.what and failure.given == "{}"

    def talks(reader: executions.Reader, given: str) -> str:
        if given == "accepted":
            return "hash"
        raise SpecError("", given) if given == "fine" else CodegenError(given)

    assert tally.execute(reader, 0, talks, "fine") is tally.execute(reader, 0, talks, "accepted") is None
    assert tally.execute(reader, 0, talks, "a\nb") is not None
    assert (tally.accepted, tally.refused, len(tally.failures), tally.specs) == (1, 1, 2, {"hash"})


def test_an_attack_is_known_by_seed_and_number() -> None:
    for number in range(100):
        first, again = executions.execution(3, number), executions.execution(3, number)
        assert first[0] is again[0] and re.sub("0x[0-9a-f]+", "", spelt(first[1])) == re.sub(
            "0x[0-9a-f]+", "", spelt(again[1])
        )


def test_what_attacks_remember_changes_no_outcome() -> None:
    def outcomes(*, remembers: bool) -> list[tuple[str, Any]]:
        reader, told = executions.Reader(remembers=remembers), []

        def noted(reader: executions.Reader, given: tuple[executions.Read, Any]) -> str:
            try:
                spec = given[0](reader, given[1])
            except CodegenError as error:
                told.append(re.sub(r"/tmp/\S+/|0x[0-9a-f]+", "", f"{type(error).__name__}: {error}"))
                raise
            told.append(spec)
            return spec

        with reader.in_use():
            for number in [*range(150), *range(150)]:  # the second time it remembers them
                executions.Tally().execute(reader, number, noted, executions.execution(1, number))
        return told

    assert outcomes(remembers=True) == outcomes(remembers=False)


def test_runs_of_attacks_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failure = executions.Failure(7, "KeyError: 'x'", "line 1", "{}")
    tallies = [
        executions.Tally(3, 96, [failure], {"a" * 64, "b" * 64}),
        executions.Tally(1, 98, [dataclasses.replace(failure, number=107)], {"b" * 64}),
    ]
    file, totals = tmp_path / "totals.json", loader.Totals(seed=5)
    for number, tally in enumerate(tallies):
        monkeypatch.setattr(loader, "attacked", lambda number=number: f"source {number}")
        assert totals.add(tally) == [[failure], []][number]
        totals.write(file)
        totals = loader.Totals.read(file)
    assert (totals.seed, totals.next, totals.accepted, totals.refused) == (5, 2 * executions.BATCH, 4, 194)
    assert totals.sources == {"source 0": 100, "source 1": 100} and len(totals.specs) == 2
    assert "200 executions" in str(totals) and "1 kinds of failure; go on: --seed 5 --start 200" in str(totals)
