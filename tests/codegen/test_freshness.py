"""The committed sources are what the specs render to, and every way in which they may not be is found."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from codegen import files, freshness
from codegen.errors import CodegenError, FileError
from codegen.files import write_if_changed
from codegen.freshness import check, render_to
from codegen.installation import reinstall_command
from codegen.library import GENERATED, NamedSpec, find_spec, shipped_specs
from codegen.receipts import Receipt, receipt_path
from codegen.render import render, seal

Make = Callable[[NamedSpec, str], Receipt]


@pytest.fixture
def specs() -> list[NamedSpec]:
    return [find_spec("h100_topk32"), find_spec("h100_dense")]


@pytest.fixture
def folder(tmp_path: Path, specs: list[NamedSpec], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh folder of generated sources, seen from the folder above it."""
    monkeypatch.chdir(tmp_path)
    out = Path("out")
    render_to(out, specs)
    return out


def test_the_committed_sources_are_fresh() -> None:
    assert [str(problem) for problem in check(GENERATED, shipped_specs())] == []


def test_fresh(folder: Path, specs: list[NamedSpec]) -> None:
    assert check(folder, specs) == []
    assert sorted(path.name for path in folder.iterdir()) == ["h100_dense.cu", "h100_topk32.cu"]
    assert (folder / "h100_topk32.cu").read_bytes() == render(specs[0]).encode()


def test_fresh_files_are_left_alone(folder: Path, specs: list[NamedSpec]) -> None:
    path = folder / "h100_topk32.cu"
    os.utime(path, ns=(1, 1))
    assert render_to(folder, specs) == {path: False, folder / "h100_dense.cu": False}
    assert path.stat().st_mtime_ns == 1


def test_missing(folder: Path, specs: list[NamedSpec]) -> None:
    (folder / "h100_dense.cu").unlink()
    (problem,) = check(folder, specs)
    assert (problem.kind, problem.path) == ("missing", folder / "h100_dense.cu")
    assert problem.fix == "codegen render h100_dense --out out"
    assert str(problem) == f"out/h100_dense.cu: was not generated; run: {problem.fix}"


def test_missing_folder(tmp_path: Path, specs: list[NamedSpec]) -> None:
    assert [problem.kind for problem in check(tmp_path / "nothing", specs)] == ["missing", "missing"]


def test_stale(folder: Path, specs: list[NamedSpec]) -> None:
    (folder / "h100_dense.cu").write_text(seal("// made by an older template\n\nint x;\n"))
    (problem,) = check(folder, specs)
    assert problem.kind == "stale"
    assert problem.fix == "codegen render h100_dense --out out"


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(lambda data: data.replace(b"kTileM = 128", b"kTileM = 64 "), id="number"),
        pytest.param(lambda data: data + b"\n", id="newline"),
        pytest.param(lambda data: data.replace(b"\n", b"\r\n"), id="line-ends"),
        pytest.param(lambda data: data.replace(b"// seal", b"// Seal"), id="seal"),
        pytest.param(lambda data: data + b"\xff", id="not-utf-8"),
        pytest.param(lambda data: b"", id="emptied"),
    ],
)
def test_hand_edited(folder: Path, specs: list[NamedSpec], edit: Callable[[bytes], bytes]) -> None:
    path = folder / "h100_topk32.cu"
    path.write_bytes(edit(path.read_bytes()))
    (problem,) = check(folder, specs)
    assert (problem.kind, problem.path) == ("hand_edited", path)
    assert "edited by hand" in problem.message


@pytest.mark.parametrize("name", ["gone.cu", "gone.json"])
def test_orphaned(folder: Path, specs: list[NamedSpec], name: str) -> None:
    (folder / name).write_text("")
    (problem,) = check(folder, specs)
    assert (problem.kind, problem.path) == ("orphaned", folder / name)
    assert problem.fix == f"rm out/{name}"
    assert "gone.yaml" in problem.message


def test_mending_a_project_file_needs_no_out(specs: list[NamedSpec]) -> None:
    assert freshness._fix(specs[0], GENERATED) == "codegen render h100_topk32"


def test_mend_command_mends(folder: Path, specs: list[NamedSpec]) -> None:
    (folder / "h100_dense.cu").write_text("int x;\n")
    (folder / "h100_topk32.cu").unlink()
    assert len(check(folder, specs)) == 2
    assert render_to(folder, specs) == {folder / "h100_topk32.cu": True, folder / "h100_dense.cu": True}
    assert check(folder, specs) == []


def test_strict_counts_receipts(folder: Path, specs: list[NamedSpec], receipt: Make) -> None:
    assert [p.kind for p in check(folder, specs, strict=True)] == ["receipt_missing", "receipt_missing"]
    for named in specs:
        receipt(named, render(named)).write(receipt_path(named, folder))
    assert check(folder, specs, strict=True) == []
    receipt(specs[0], "another source").write(receipt_path(specs[0], folder))
    receipt_path(specs[1], folder).write_text("{}")
    problems = check(folder, specs, strict=True)
    assert [p.kind for p in problems] == ["receipt_stale", "receipt_unreadable"]
    stale, unreadable = (f"codegen verify {named.stem} (on a GPU)" for named in specs)
    migrate = f"codegen migrate {specs[0].stem} (if only comments or names changed), or "
    assert [p.fix for p in problems] == [migrate + stale, unreadable]
    assert check(folder, specs) == []


def test_two_specs_of_one_name(tmp_path: Path, specs: list[NamedSpec]) -> None:
    with pytest.raises(CodegenError, match="two specs are named h100_dense"):
        render_to(tmp_path, [*specs, specs[1]])
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_unless_all_render(tmp_path: Path, specs: list[NamedSpec]) -> None:
    bad = find_spec({**specs[0].spec.model_dump(mode="json", by_alias=True), "stages": 8})
    with pytest.raises(CodegenError):
        render_to(tmp_path, [specs[0], bad])
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.cu"
    path.write_text("old")

    def fail(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr(files.Path, "replace", fail)
    with pytest.raises(FileError, match="No space left"):
        write_if_changed(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_in_the_place_of_a_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path, Path(), Path("/")):
        with pytest.raises(FileError, match="Is a directory") as caught:
            write_if_changed(path, "text")
        assert caught.value.path == path
    assert not list(tmp_path.iterdir())


def test_an_error_names_the_file_that_was_to_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Path, mode: str) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(files.Path, "open", fail)
    with pytest.raises(FileError, match="Permission denied") as caught:
        write_if_changed(tmp_path / "x.cu", "text")
    assert caught.value.path == tmp_path / "x.cu"


def test_a_name_that_is_too_long_is_named(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 250)  # the temporary file's is longer
    with pytest.raises(FileError, match="File name too long") as caught:
        write_if_changed(path, "text")
    assert caught.value.path == path


def test_a_link_in_the_place_of_the_temporary_file_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files.secrets, "token_hex", lambda _: "guessed")
    (tmp_path / "precious").write_text("as it was")
    for name in (".x.cu.guessed.tmp", f".x.cu.{os.getpid()}.tmp"):
        (tmp_path / name).symlink_to("precious")
    with pytest.raises(FileError, match="File exists"):
        write_if_changed(tmp_path / "x.cu", "text")
    assert (tmp_path / "precious").read_text() == "as it was" and (tmp_path / ".x.cu.guessed.tmp").is_symlink()


def test_written_files_have_ordinary_permissions(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.touch()
    write_if_changed(tmp_path / "x.cu", "text")
    assert (tmp_path / "x.cu").stat().st_mode == plain.stat().st_mode


def test_files_of_an_installed_package_are_mended_by_installing_it_again(
    folder: Path, specs: list[NamedSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(freshness, "IN_SOURCE_TREE", False)
    monkeypatch.setattr(freshness, "GENERATED", folder)
    (folder / "h100_dense.cu").unlink()
    problems = check(folder, specs, strict=True)
    assert [problem.kind for problem in problems] == ["missing", "receipt_missing", "receipt_missing"]
    assert {problem.fix for problem in problems} == {reinstall_command()}
