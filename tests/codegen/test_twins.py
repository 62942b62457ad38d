"""Specs with a list of types: two kernels of one file, one source and one receipt."""

from __future__ import annotations

import json
import multiprocessing
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from each import for_each
from typer.testing import CliRunner

from codegen import cli, commands, freshness, library, places
from codegen.dtypes import TWINS
from codegen.errors import CodegenError, SpecError
from codegen.freshness import check, check_twins, render_to
from codegen.library import GENERATED, NamedSpec, find_spec, find_specs, read_spec, read_specs, shipped_specs
from codegen.receipts import (
    MissingReceipt,
    Receipt,
    ReceiptError,
    ReceiptStatus,
    read_receipt,
    receipt_path,
    state,
    write_receipt,
)
from codegen.render import render, seal_is_intact
from codegen.spec import json_schema
from codegen.twins import twin_source

Make = Callable[[NamedSpec, str], Receipt]
NAME, TWIN = "h100_topk32", "h100_topk32_bf16"
OWN = "op: attention\narch: sm_90a\ndtype: {dtype}\nhead_dim: 64\npattern: {{kind: dense}}\n"

every_twin = for_each(
    "named", lambda: [named for named in shipped_specs() if named.twin_of is not None], lambda named: named.stem
)


def own_file(folder: Path, dtype: str = "[fp16, bf16]", more: str = "") -> Path:
    path = folder / "my_kernel.yaml"
    path.write_text(OWN.format(dtype=dtype) + more)
    return path


@every_twin
def test_the_committed_source_with_words_replaced_is_what_the_twin_renders_to(named: NamedSpec) -> None:
    committed = (GENERATED / named.subfolder / f"{named.main.stem}.cu").read_text(encoding="utf-8")
    source = twin_source(committed, named.main.stem)
    assert source == render(named)
    assert seal_is_intact(source)
    assert not re.search(r"\bf16(x2)?\b", source)


def test_every_first_type_has_a_twin() -> None:
    specs = shipped_specs()
    assert [named.stem for named in specs] == sorted(named.stem for named in specs)
    twins = {named.main.stem: named for named in specs if named.twin_of is not None}
    assert twins.keys() == {named.stem for named in specs if named.has_twin} and len(twins) >= 9
    for stem, twin in twins.items():
        assert twin.stem == f"{stem}_bf16" and (twin.main.spec.dtype, twin.spec.dtype) == TWINS
        assert find_spec(twin.stem) == twin and find_specs(stem) == (twin.main, twin)
        first, other = (json.loads(named.spec.canonical_json()) for named in (twin.main, twin))
        assert first | {"dtype": "bf16"} == other


def test_a_file_with_a_list_is_two_specs(tmp_path: Path) -> None:
    path = own_file(tmp_path)
    first, twin = read_specs(path)
    assert (first.stem, first.spec.dtype, first.has_twin, first.twin_of) == ("my_kernel", "fp16", True, None)
    assert (twin.stem, twin.spec.dtype, twin.has_twin, twin.twin_of) == ("my_kernel_bf16", "bf16", False, first)
    assert first == read_spec(path) == find_spec(path) == find_spec(str(path)) and find_specs(path) == (first, twin)
    assert first.spec.hash == find_spec(own_file(tmp_path, "fp16")).spec.hash != twin.spec.hash
    assert twin.main is twin.twin_of and first.main is first
    assert twin.source_file == first.source_file == "generated/my_kernel.cu"
    assert twin_source(render(first), "my_kernel") == render(twin)


def test_a_file_of_one_type_is_one_spec(tmp_path: Path) -> None:
    (only,) = read_specs(own_file(tmp_path, "bf16"))
    assert (only.stem, only.has_twin, only.twin_of) == ("my_kernel", False, None)
    assert find_specs("h100_e4m3_dense") == (find_spec("h100_e4m3_dense"),)
    assert find_specs(TWIN) == (find_spec(TWIN),)


@pytest.mark.parametrize(
    "dtype", ["[fp16]", "[bf16]", "[bf16, fp16]", "[fp16, fp16]", "[fp16, bf16, fp16]", "[e4m3, e5m2]", "[fp16, e4m3]"]
)
def test_other_lists_are_refused_by_name(dtype: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError) as error:
        read_specs(own_file(tmp_path, dtype))
    names = re.findall(r"\w+", dtype)
    assert str(error.value).startswith(f"{tmp_path}/my_kernel.yaml:3: dtype: is {names!r}; a list is [fp16, bf16]: ")


@pytest.mark.parametrize("dtype", ["[]", "[1, 2]", "[[fp16], [bf16]]", "[{}, bf16]", "{fp16: bf16}"])
def test_lists_of_anything_else_are_refused(dtype: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"my_kernel.yaml:3: dtype"):
        read_specs(own_file(tmp_path, dtype))


def test_types_that_another_field_has_too_are_refused(tmp_path: Path) -> None:
    mask = "pattern: {kind: block_lists, block: {q: 128, kv: 128}, mask: 'm[q_idx] > 0', aux: {m: 'DTYPE[q_len]'}}\n"
    for dtype, refused in (("fp16", True), ("bf16", False), ("fp32", False)):
        path = own_file(tmp_path)
        path.write_text(path.read_text().replace("pattern: {kind: dense}\n", mask.replace("DTYPE", dtype)))
        if refused:
            with pytest.raises(SpecError, match=r":3: dtype: lists types, and fp16 is in another field too"):
                read_specs(path)
        else:
            first, twin = read_specs(path)
            assert twin_source(render(first), "my_kernel") == render(twin)


def test_a_list_is_for_files(tmp_path: Path) -> None:
    fields = {"op": "attention", "arch": "sm_90a", "head_dim": 64, "pattern": {"kind": "dense"}, "dtype": [*TWINS]}
    with pytest.raises(SpecError, match=r"^dtype: is "):
        find_spec(fields)


def test_the_schema_has_lists() -> None:
    for name, definition in json_schema()["$defs"].items():
        if name.endswith("Spec"):
            one, both = definition["properties"]["dtype"]["anyOf"]
            assert set(TWINS) <= set(one["enum"]) and both == {"const": [*TWINS]}


def test_names_of_twins_that_there_are_not() -> None:
    for name in ("h100_e4m3_dense_bf16", f"{TWIN}_bf16", f"{NAME}_fp16", "_bf16"):
        assert library.shipped_file(name) is None
        with pytest.raises(SpecError, match="no spec is named"):
            find_spec(name)


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_rendering_a_twin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(places, "GENERATED", tmp_path / "generated")
    code, out = run("render", TWIN)
    assert code == 0 and "wrote  generated/h100_topk32.cu\n" in out
    assert f"{TWIN}: its source is generated/h100_topk32.cu with the kernel's name and some words replaced" in out
    assert "fp16 -> bf16" in out and f"codegen render {TWIN} --out DIR" in out
    assert [path.name for path in (tmp_path / "generated").iterdir()] == ["h100_topk32.cu"]
    assert run("render", TWIN, "--check") == (0, "every file is up to date\n")
    assert run("render", TWIN, "--out", "-") == (0, render(find_spec(TWIN)))
    assert run("render", TWIN, "--out", "out", "--check")[0] == 1
    assert run("render", TWIN, "--out", "out") == (0, f"wrote  out/{TWIN}.cu\n")
    assert (tmp_path / "out" / f"{TWIN}.cu").read_text() == render(find_spec(TWIN))
    assert run("render", TWIN, NAME, "--out", "out", "--check")[0] == 1


def test_check_compares_the_twin_with_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = [*find_specs(NAME)]
    render_to(tmp_path, specs[:1])
    assert check(tmp_path, specs) == []
    monkeypatch.setattr(freshness, "twin_source", lambda source, stem: source)
    (problem,) = check(tmp_path, specs)
    assert problem.path == tmp_path / "h100_topk32.cu" and TWIN in problem.message
    (tmp_path / "h100_topk32.cu").write_text("")
    assert check_twins(tmp_path, specs) == []  # the file has a problem of its own
    assert [problem.kind for problem in check(tmp_path, specs)] == ["hand_edited"]


def test_a_receipt_has_both_types(tmp_path: Path, receipt: Make) -> None:
    first, twin = find_specs(NAME)
    path = receipt_path(twin, tmp_path)
    assert path == receipt_path(first, tmp_path) == tmp_path / "h100_topk32.json"
    own, other = receipt(first, render(first)), receipt(twin, render(twin))
    with pytest.raises(MissingReceipt, match="no receipt of h100_topk32, the first type"):
        write_receipt(twin, other, path)
    assert not path.exists()
    assert write_receipt(first, own, path)
    alone = path.read_bytes()
    assert "twins" not in json.loads(alone)
    assert state(first, render(first), tmp_path).standing is ReceiptStatus.OK
    assert state(twin, render(twin), tmp_path).standing is ReceiptStatus.MISSING
    with pytest.raises(MissingReceipt, match=TWIN):
        read_receipt(twin, path)
    assert write_receipt(twin, other, path) and not write_receipt(twin, other, path)
    assert read_receipt(first, path) == own and read_receipt(twin, path) == other
    assert json.loads(path.read_bytes())["twins"]["bf16"] == json.loads(other.text)
    for named in (first, twin):
        assert state(named, render(named), tmp_path).standing is ReceiptStatus.OK
    # Each is written without the other, and says nothing of the other.
    unverified = own.model_copy(update={"verification": None})
    assert write_receipt(first, unverified, path)
    assert read_receipt(first, path) == unverified and read_receipt(twin, path) == other
    assert state(first, render(first), tmp_path).standing is ReceiptStatus.UNVERIFIED
    assert state(twin, render(twin), tmp_path).standing is ReceiptStatus.OK
    assert state(twin, render(first), tmp_path).standing is ReceiptStatus.STALE
    assert write_receipt(first, own, path) and write_receipt(twin, other, path) is False


def test_a_twins_receipt_makes_that_of_the_first_type(tmp_path: Path, receipt: Make) -> None:
    first, twin = find_specs(NAME)
    path, other = receipt_path(twin, tmp_path), receipt(twin, render(twin))
    unverified = receipt(first, render(first)).model_copy(update={"verification": None})
    assert write_receipt(twin, other, path, lambda: unverified)
    assert (read_receipt(first, path), read_receipt(twin, path)) == (unverified, other)
    path.write_text("{}")
    with pytest.raises(ReceiptError, match="spec"):
        read_receipt(twin, path)
    assert write_receipt(twin, other, path, lambda: unverified)
    assert (read_receipt(first, path), read_receipt(twin, path)) == (unverified, other)


def test_the_receipt_of_a_type_that_is_listed_no_longer(tmp_path: Path, receipt: Make) -> None:
    first, twin = find_specs(NAME)
    path = receipt_path(first, tmp_path)
    render_to(tmp_path, [first])
    for named in (first, twin):
        write_receipt(named, receipt(named, render(named)), path)
    assert check(tmp_path, [first, twin], strict=True) == []
    alone = NamedSpec(NAME, first.spec, first.origin, first.path)
    (problem,) = check(tmp_path, [alone], strict=True)
    assert (problem.kind, problem.path) == ("receipt_stale", path) and "does not list" in problem.message
    write_receipt(alone, read_receipt(alone, path), path)
    assert check(tmp_path, [alone], strict=True) == []


def test_problems_of_a_twins_receipt_name_it(tmp_path: Path, receipt: Make) -> None:
    first, twin = find_specs(NAME)
    render_to(tmp_path, [first])
    write_receipt(first, receipt(first, render(first)), receipt_path(first, tmp_path))
    (problem,) = check(tmp_path, [first, twin], strict=True)
    assert (problem.kind, problem.path.name) == ("receipt_missing", "h100_topk32.json")
    assert problem.message.startswith(f"of {TWIN}: ") and problem.fix.startswith(f"codegen verify {TWIN}")


def test_a_twin_has_no_twins(tmp_path: Path, receipt: Make) -> None:
    first, twin = find_specs(NAME)
    fields = json.loads(receipt(first, render(first)).text)
    other = json.loads(receipt(twin, render(twin)).text)
    path = tmp_path / "h100_topk32.json"
    for twins, reason in (
        ({"bf16": other | {"twins": {"bf16": other}}}, "a twin cannot have twins"),
        ({"fp16": other}, "twins.fp16"),
        ({"bf16": {}}, "twins.bf16.spec"),
        ([], "twins"),
    ):
        path.write_text(json.dumps(fields | {"twins": twins}))
        with pytest.raises(ReceiptError, match=reason):
            Receipt.read(path)


WRITES = 40


def _write_often(named: NamedSpec, receipt: Receipt, path: Path, start: object) -> None:
    start.wait()  # type: ignore[attr-defined]
    for i in range(WRITES):
        cubin = receipt.cubin.model_copy(update={"registers": 100 + i})
        write_receipt(named, receipt.model_copy(update={"cubin": cubin}), path)
        assert read_receipt(named, path).cubin.registers == 100 + i, "another process undid it"


def test_two_processes_that_write_one_file(tmp_path: Path, receipt: Make) -> None:
    first, twin = find_specs(NAME)
    path = receipt_path(first, tmp_path)
    write_receipt(first, receipt(first, render(first)), path)
    write_receipt(twin, receipt(twin, render(twin)), path)
    context = multiprocessing.get_context("fork")
    start = context.Barrier(2)
    processes = [
        context.Process(target=_write_often, args=(named, receipt(named, render(named)), path, start))
        for named in (first, twin)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert [read_receipt(named, path).cubin.registers for named in (first, twin)] == [99 + WRITES] * 2
    assert [found.name for found in tmp_path.iterdir()] == ["h100_topk32.json"]


def test_a_command_that_verifies_takes_all_types(tmp_path: Path) -> None:
    path = own_file(tmp_path)
    assert [named.stem for named in commands.chosen([str(path)], False, all_types=True)] == [
        "my_kernel",
        "my_kernel_bf16",
    ]
    assert [named.stem for named in commands.chosen([str(path)], False)] == ["my_kernel"]
    assert [named.stem for named in commands.chosen([NAME, TWIN], False, all_types=True)] == [NAME, TWIN]
    assert [named.stem for named in commands.chosen([TWIN], False, all_types=True)] == [TWIN]
    with pytest.raises(CodegenError, match="two specs are named my_kernel"):
        (tmp_path / "other").mkdir()
        commands.chosen([str(path), str(own_file(tmp_path / "other"))], False, all_types=True)
