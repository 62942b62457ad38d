"""Folders of exported kernels: the same bytes each time, whole or not there, and read only as they were written."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from codegen import folders
from codegen.errors import CodegenError, ExportError, FileError, SpecError
from codegen.folders import check_folder, write_folder
from codegen.library import NamedSpec, find_spec
from codegen.receipts import Receipt
from codegen.render import generate
from codegen.tools import exports
from codegen.tools.descriptor import (
    GridRecord,
    KernelFacts,
    LaunchRecord,
    ParamRecord,
    PrologueRecord,
    TensorMapRecord,
    WorkspaceRecord,
)
from codegen.tools.exports import (
    RECORD,
    FileRecord,
    KernelRecord,
    check_exportable,
    exported_names,
    files_of,
    names_of,
    read_export,
)
from codegen.tools.sized_launch import sized_launch

CUBIN, LOG = b"\x7fELF, machine code", "ptxas info    : Used 168 registers"
OWNED = partial(exported_names, symbol="h100_topk32")
SIZES = {"batch": 1, "heads": 4, "kv_heads": 4, "q_len": 256, "kv_len": 256, "list_batches": 1, "list_heads": 4}
Make = Callable[..., Receipt]


@pytest.fixture
def receipt(receipt: Make) -> Make:
    """Makes a receipt of CUBIN."""

    def make(named: NamedSpec, source: str) -> Receipt:
        made, plan = receipt(named, source), generate(named).plan
        own = {"sha256": hashlib.sha256(CUBIN).hexdigest(), "launch_sha256": plan.launch_sha256}
        cubin = made.cubin.model_copy(update={**own, "dynamic_shared_bytes": plan.shared_bytes})
        return made.model_copy(update={"cubin": cubin})

    return make


@pytest.fixture
def files(named: NamedSpec, receipt: Callable[[NamedSpec, str], Receipt]) -> dict[str, bytes]:
    """The files of an exported h100_topk32."""
    generated = generate(named)
    sized = sized_launch(generated.plan, {**SIZES, "list_length": 32}, 132)
    return files_of(generated, CUBIN, LOG, receipt(named, generated.source), sized)


@pytest.fixture
def folder(files: dict[str, bytes], tmp_path: Path) -> Path:
    assert write_folder(tmp_path / "h100_topk32", files, RECORD, OWNED)
    return tmp_path / "h100_topk32"


def resealed(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the record as somebody would who knows how it is sealed."""
    told = json.loads((folder / RECORD).read_text())
    change(told)
    record = KernelRecord.model_validate_json(json.dumps(told)).sealed()
    (folder / RECORD).write_text(record.model_dump_json(indent=2) + "\n")


def test_what_was_exported_is_read(folder: Path, named: NamedSpec) -> None:
    found = read_export(folder)
    assert found.generated.plan == generate(named).plan
    assert (found.generated.source, found.cubin) == (generate(named).source, CUBIN)
    assert found.record.compiler_log == LOG and found.record.launch is not None
    assert found.record.launch.numbers["q_len"] == 256
    assert sorted(each.name for each in folder.iterdir()) == sorted((RECORD, *names_of("h100_topk32").values()))


def test_the_same_facts_are_the_same_bytes(folder: Path, files: dict[str, bytes]) -> None:
    before = {each.name: each.stat().st_mtime_ns for each in folder.iterdir()}
    assert not write_folder(folder, files, RECORD, OWNED)
    assert {each.name: each.stat().st_mtime_ns for each in folder.iterdir()} == before
    text = files[RECORD].decode()
    assert str(folder.parent) not in text and json.loads(text)["made_by"].startswith("codegen ")


def test_a_spec_without_a_file_is_exported_too(receipt: Any, tmp_path: Path) -> None:
    named = find_spec({"op": "attention", "arch": "sm_90a", "head_dim": 64, "pattern": {"kind": "causal"}})
    generated = generate(named)
    write_folder(tmp_path / "a", files_of(generated, CUBIN, "", receipt(named, generated.source)), RECORD, OWNED)
    assert read_export(tmp_path / "a").generated.source == generated.source


@pytest.mark.parametrize("what", ["source", "cubin", "header", "receipt", "record"])
@pytest.mark.parametrize("how", ["one bit", "cut short", "gone"])
def test_a_file_that_is_not_as_it_was_is_refused(folder: Path, what: str, how: str) -> None:
    path = folder / {**names_of("h100_topk32"), "record": RECORD}[what]
    data = bytearray(path.read_bytes())
    if how == "gone":
        path.unlink()
    elif how == "cut short":
        path.write_bytes(data[:-3])
    else:
        at = data.index(b"128") + 2 if what == "record" else len(data) // 2
        data[at] ^= 1
        path.write_bytes(data)
    with pytest.raises(FileError, match=re.escape(path.name)):
        read_export(folder)


def test_every_value_of_the_record_is_sealed(folder: Path) -> None:
    text = (folder / RECORD).read_text()
    numbers = list(re.finditer(r"(?<=[ \[])\d+(?=,?\n)", text))
    assert len(numbers) > 100
    for number in numbers:
        other = str(int(number[0]) + 1)
        (folder / RECORD).write_text(text[: number.start()] + other + text[number.end() :])
        with pytest.raises(ExportError, match=RECORD):
            read_export(folder)


def test_another_launch_than_this_versions_is_refused(folder: Path) -> None:
    resealed(folder, lambda told: told["kernel"].update(dynamic_shared_bytes=1024))
    message = r"export it again, or load it with the version that exported it \(codegen [\d.]+\); .* differently$"
    with pytest.raises(ExportError, match=message):
        read_export(folder)


def test_another_source_than_this_versions_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(named: NamedSpec) -> Any:
        made = generate(named)
        return replace(made, source=made.source.replace("kTileM = ", "kTileM = 1 * "))

    monkeypatch.setattr(exports, "generate", other)
    with pytest.raises(ExportError, match="renders this spec differently"):
        read_export(folder)


@pytest.mark.parametrize("fields", [{"op": "none"}, {"op": "attention", "arch": "sm_1"}, {}])
def test_a_spec_that_this_version_does_not_take_is_refused(folder: Path, fields: dict[str, Any]) -> None:
    resealed(folder, lambda told: told["kernel"].update(spec=fields))
    with pytest.raises(ExportError, match="export it again"):
        read_export(folder)


@pytest.mark.parametrize("name", ["../secret", "/dev/zero", "other.cu"])
def test_the_record_names_no_other_files(folder: Path, name: str) -> None:
    resealed(folder, lambda told: told["source"].update(file=name))
    with pytest.raises(ExportError, match=r"kernel.json: names the file .*, expected h100_topk32.cu"):
        read_export(folder)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema_version": 2}', "\x00", "[" * 100_000])
def test_what_is_no_record_is_refused(folder: Path, text: str) -> None:
    (folder / RECORD).write_text(text)
    with pytest.raises(CodegenError, match=rf"{RECORD}: .*") as caught:
        read_export(folder)
    assert "\n" not in str(caught.value)


def test_a_folder_of_exports_names_them(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"has no kernel\.json; it has exported kernels: h100_topk32: name one"):
        read_export(folder.parent)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ExportError, match=r"is not an exported kernel: it has no kernel\.json$"):
        read_export(tmp_path / "empty")


def test_an_older_export_is_replaced_whole(folder: Path, files: dict[str, bytes]) -> None:
    other = {**files, names_of("h100_topk32")["cubin"]: b"other code"}
    assert write_folder(folder, other, RECORD, OWNED)
    assert {each.name: each.read_bytes() for each in folder.iterdir()} == other
    assert [each.name for each in folder.parent.iterdir()] == ["h100_topk32"]


@pytest.mark.parametrize("what", ["source", "cubin", "header", "receipt", "record"])
def test_an_export_with_a_changed_file_is_left_alone(folder: Path, files: dict[str, bytes], what: str) -> None:
    name = RECORD if what == "record" else names_of("h100_topk32")[what]
    changed = files[name].replace(b"a", b"b", 1)
    (folder / name).write_bytes(changed)
    with pytest.raises(FileError, match=r"holds [\w.]+, which no export wrote in this form: nothing was replaced"):
        write_folder(folder, {**files, names_of("h100_topk32")["cubin"]: b"other"}, RECORD, OWNED)
    assert {each.name: each.read_bytes() for each in folder.iterdir()} == {**files, name: changed}


def test_an_export_of_another_version_is_replaced_by_its_hashes(folder: Path, files: dict[str, bytes]) -> None:
    record = json.loads((folder / RECORD).read_text()) | {"schema_version": 7, "more": [1]}
    del record["seal"]
    text = json.dumps(record, sort_keys=True, separators=(",", ":"))
    (folder / RECORD).write_text(json.dumps({**record, "seal": "0" * 64}))
    with pytest.raises(FileError, match="which no export wrote in this form"):
        write_folder(folder, files, RECORD, OWNED)
    (folder / RECORD).write_text(json.dumps({**record, "seal": hashlib.sha256(text.encode()).hexdigest()}))
    assert write_folder(folder, files, RECORD, OWNED)
    assert {each.name: each.read_bytes() for each in folder.iterdir()} == files


@pytest.mark.parametrize("foreign", ["notes.txt", "h100_topk32.cubin.old", "sub/file"])
def test_a_folder_with_other_things_is_left_alone(folder: Path, files: dict[str, bytes], foreign: str) -> None:
    (folder / foreign).parent.mkdir(exist_ok=True)
    (folder / foreign).write_text("mine")
    before = sorted(folder.rglob("*"))
    with pytest.raises(FileError, match=f"holds {foreign.partition('/')[0]}, which no export wrote"):
        write_folder(folder, files, RECORD, OWNED)
    assert sorted(folder.rglob("*")) == before


def test_files_of_ours_without_a_record_are_not_ours(tmp_path: Path, files: dict[str, bytes]) -> None:
    (tmp_path / "h100_topk32").mkdir()
    (tmp_path / "h100_topk32" / "h100_topk32.cu").write_text("a source of somebody")
    with pytest.raises(FileError, match=r"holds h100_topk32.cu, which no export"):
        check_folder(tmp_path / "h100_topk32", RECORD, OWNED)


def test_places_that_are_no_folders_are_left_alone(folder: Path, tmp_path: Path, files: dict[str, bytes]) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(folder)
    for name in ("file", "link"):
        with pytest.raises(FileError, match=f"{name}: exists and is not a folder"):
            write_folder(tmp_path / name, files, RECORD, OWNED)
    with pytest.raises(FileError, match="file"):
        write_folder(tmp_path / "file" / "below", files, RECORD, OWNED)
    assert write_folder(tmp_path / "new" / "below", files, RECORD, OWNED)
    (tmp_path / "empty").mkdir()
    assert write_folder(tmp_path / "empty", files, RECORD, OWNED)


@pytest.mark.parametrize("fails", ["open", "rename"])
def test_a_write_that_fails_changes_nothing(
    folder: Path, files: dict[str, bytes], fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(Path, fails)

    def failing(self: Path, *arguments: Any, **named: Any) -> Any:
        if self.name == RECORD or self.suffix == ".tmp":
            raise OSError(28, "No space left on device")
        return real(self, *arguments, **named)

    monkeypatch.setattr(Path, fails, failing)
    with pytest.raises(FileError, match="No space left on device"):
        write_folder(folder, {**files, names_of("h100_topk32")["cubin"]: b"other"}, RECORD, OWNED)
    monkeypatch.undo()
    assert {each.name: each.read_bytes() for each in folder.iterdir()} == files
    assert [each.name for each in folder.parent.iterdir()] == ["h100_topk32"]


def test_what_is_put_into_a_folder_while_it_is_written_anew_is_kept(
    folder: Path, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def swap(fresh: Path, to: Path, *arguments: Any) -> None:
        (to / "mine").write_text("mine")  # after the look, before the folder is replaced
        real(fresh, to, *arguments)

    real = folders._swap
    monkeypatch.setattr(folders, "_swap", swap)
    with pytest.raises(FileError, match="h100_topk32: holds mine, which no export wrote"):
        write_folder(folder, {**files, names_of("h100_topk32")["cubin"]: b"other"}, RECORD, OWNED)
    assert {each.name: each.read_bytes() for each in folder.iterdir()} == {**files, "mine": b"mine"}
    assert [each.name for each in folder.parent.iterdir()] == ["h100_topk32"]


def test_a_kernel_called_kernel_is_refused(named: NamedSpec) -> None:
    with pytest.raises(SpecError, match=r"receipt would be kernel.json"):
        check_exportable(replace(named, stem="kernel"))


def test_json_names_a_spec_on_the_command_line() -> None:
    named = find_spec({"op": "attention", "arch": "sm_90a", "head_dim": 64, "pattern": {"kind": "causal"}})
    assert find_spec(named.spec.canonical_json()) == named
    assert named.argument == f"'{named.spec.canonical_json()}'"
    for wrong in ("{", '{"op": 1}', '{"op": "attention", "op": "attention"}'):
        with pytest.raises(SpecError):
            find_spec(wrong)


def test_the_page_has_every_field() -> None:
    page = (Path(__file__).parents[3] / "docs" / "guide" / "export.md").read_text(encoding="utf-8")
    models = (
        *(KernelRecord, FileRecord, KernelFacts, LaunchRecord),
        *(GridRecord, PrologueRecord, ParamRecord, TensorMapRecord, WorkspaceRecord),
    )
    assert not [
        f"{model.__name__}.{name}" for model in models for name in model.model_fields if f"`{name}`" not in page
    ]
