"""Receipts in the user's own folder count if nobody else could have written them."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import platformdirs
import pytest

from codegen import provenance
from codegen.errors import FileError
from codegen.library import NamedSpec, find_spec, read_specs
from codegen.receipts import Receipt, ReceiptError, ReceiptStatus, receipt_path, write_receipt
from codegen.render import render
from runtime.errors import CacheError
from runtime.receipts import own, permit

Make = Callable[[NamedSpec, str], Receipt]
FIELDS = {"op": "attention", "arch": "sm_89", "head_dim": 64, "pattern": {"kind": "causal"}, "softcap": 25.0}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's empty folder; the package has no receipts."""
    monkeypatch.setattr(provenance, "GENERATED", tmp_path / "generated")
    monkeypatch.setenv("CODEGEN_RECEIPTS", str(tmp_path / "mine"))
    return tmp_path / "mine"


@pytest.fixture
def kernel() -> NamedSpec:
    return find_spec(FIELDS)


def keep(named: NamedSpec, receipt: Receipt, folder: Path, first: Callable[[], Receipt] | None = None) -> Path:
    own.make(folder)
    path = receipt_path(named, folder)
    write_receipt(named, receipt, path, first, source=render(named.main))
    own.protect(path)
    return path


def test_a_receipt_of_this_spec_and_this_source_counts(kernel: NamedSpec, receipt: Make, folder: Path) -> None:
    assert own.find(kernel) is None and not permit.is_verified(kernel)
    path = keep(kernel, receipt(kernel, render(kernel)), folder)
    found = own.find(kernel)
    assert found is not None and found.holds and found.file == str(path) and permit.is_verified(kernel)
    assert permit.provenance(kernel).is_verified
    other = find_spec({**FIELDS, "softcap": 26.0})
    assert not permit.is_verified(other)


def test_hashes_of_spec_and_source_have_to_agree(kernel: NamedSpec, receipt: Make, folder: Path) -> None:
    keep(kernel, receipt(kernel, "another source"), folder)
    found = own.find(kernel)
    assert found is not None and found.state.standing is ReceiptStatus.STALE and not permit.is_verified(kernel)
    right = receipt(kernel, render(kernel))
    keep(kernel, right.model_copy(update={"spec": right.spec.model_copy(update={"hash": "0" * 64})}), folder)
    found = own.find(kernel)
    assert found is not None and "the spec changed" in found.state.explanation and not permit.is_verified(kernel)


def test_a_shipped_kernel_may_have_its_receipt_there(receipt: Make, folder: Path) -> None:
    shipped = find_spec("h100_causal_dq_dkdv_bf16")
    assert shipped.subfolder == Path("backward") and shipped.twin_of is not None
    own.make(folder / shipped.subfolder)
    keep(shipped, receipt(shipped, render(shipped)), folder, lambda: receipt(shipped.main, render(shipped.main)))
    assert permit.is_verified(shipped) and permit.is_verified(shipped.main)
    assert permit.provenance(shipped).vouched is not None


@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_a_folder_that_others_can_write_counts_for_nothing(
    kernel: NamedSpec, receipt: Make, folder: Path, mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(kernel, receipt(kernel, render(kernel)), folder)
    folder.chmod(mode)
    found = own.find(kernel)
    assert found is not None and found.state.standing is ReceiptStatus.UNREADABLE and not permit.is_verified(kernel)
    assert str(folder) in found.state.explanation and f"chmod go-w {folder}" in found.state.explanation
    assert "others could write receipts there" in str(permit.refusal(kernel)) and own.kernels() == ()
    with pytest.raises(ReceiptError, match="others could write receipts there"):
        own.make(folder)
    monkeypatch.setenv("CODEGEN_CACHE_TRUST_OTHERS", "1")
    assert permit.is_verified(kernel) and len(own.kernels()) == 1


def test_a_file_that_others_can_write_counts_for_nothing(kernel: NamedSpec, receipt: Make, folder: Path) -> None:
    path = keep(kernel, receipt(kernel, render(kernel)), folder)
    path.chmod(0o666)
    found = own.find(kernel)
    assert found is not None and not found.holds and f"run: chmod go-w {path}" in found.state.explanation
    path.chmod(0o644)
    assert permit.is_verified(kernel)


def test_a_file_of_somebody_else_counts_for_nothing(kernel: NamedSpec, receipt: Make, folder: Path) -> None:
    path = keep(kernel, receipt(kernel, render(kernel)), folder)
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(path, 12345, -1)
    found = own.find(kernel)
    assert found is not None and not found.holds and "belongs to uid 12345" in found.state.explanation


def test_a_link_in_its_place_counts_for_nothing(kernel: NamedSpec, receipt: Make, folder: Path) -> None:
    path = keep(kernel, receipt(kernel, render(kernel)), folder)
    path.rename(folder.parent / "elsewhere.json")
    path.symlink_to(folder.parent / "elsewhere.json")
    found = own.find(kernel)
    assert found is not None and not found.holds


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff", b"x" * (2 << 20)], ids=["", "{", "[]", "bytes", "large"])
def test_what_is_no_receipt_is_told(kernel: NamedSpec, receipt: Make, folder: Path, text: bytes) -> None:
    path = keep(kernel, receipt(kernel, render(kernel)), folder)
    path.write_bytes(text)
    found = own.find(kernel)
    assert found is not None and found.state.standing is ReceiptStatus.UNREADABLE and found.state.explanation
    assert own.kernels() == ()
    path.unlink()
    path.mkdir()
    found = own.find(kernel)
    assert found is not None and not found.holds


def test_what_is_written_there_is_the_users_alone_whatever_the_umask(
    kernel: NamedSpec, receipt: Make, folder: Path
) -> None:
    before = os.umask(0)
    try:
        path = keep(kernel, receipt(kernel, render(kernel)), folder)
    finally:
        os.umask(before)
    for each in (folder, path, path.with_suffix(".cu")):
        assert not each.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH), each
    assert permit.is_verified(kernel)


def test_other_folders_are_left_as_they_are(kernel: NamedSpec, receipt: Make, folder: Path, tmp_path: Path) -> None:
    own.make(tmp_path / "other")
    assert not (tmp_path / "other").exists()
    path = tmp_path / "x.json"
    path.write_text("")
    path.chmod(0o666)
    own.protect(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666
    (tmp_path / "mine").write_text("a file")
    with pytest.raises(FileError, match="mine"):
        own.make(folder)
    assert own.find(kernel) is None and own.kernels() == ()


def test_kernels_that_are_not_shipped_are_listed(
    kernel: NamedSpec, receipt: Make, folder: Path, tmp_path: Path
) -> None:
    keep(kernel, receipt(kernel, render(kernel)), folder)
    source = tmp_path / "mine.yaml"
    text = "op: attention\narch: sm_89\nhead_dim: 128\ndtype: [fp16, bf16]\npattern: {kind: causal}\nsoftcap: 25.0\n"
    source.write_text(f"{text}stages: 2\ntile: {{m: 64, n: 64}}\n")
    for named in read_specs(source):
        keep(named, receipt(named, render(named)), folder)
    (folder / "strange.json").write_text("{}")
    found = {named.stem: named for named in own.kernels()}
    assert set(found) == {kernel.stem, "mine", "mine_bf16"}
    assert found[kernel.stem].spec == kernel.spec
    assert all(permit.is_verified(named) for named in found.values())
    assert render(found["mine_bf16"]) == render(read_specs(source)[1])


def test_the_folder_is_among_the_users_data_unless_it_is_named(
    kernel: NamedSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CODEGEN_RECEIPTS", raising=False)
    assert own.folder() == platformdirs.user_data_path("sparse-kernel-codegen") / "receipts"
    monkeypatch.setattr(platformdirs, "user_data_path", lambda name: Path("~") / name)
    assert own.find(kernel) is None and own.kernels() == ()
    with pytest.raises(ReceiptError, match="set CODEGEN_RECEIPTS to a folder of your own, or HOME"):
        own.folder()
    monkeypatch.setenv("CODEGEN_RECEIPTS", "~nobody-of-this-name/x")
    for look in (own.folder, own.kernels, lambda: own.find(kernel)):
        with pytest.raises(
            ReceiptError, match="CODEGEN_RECEIPTS is '~nobody-of-this-name/x', and there is no such home"
        ):
            look()
    monkeypatch.setenv("CODEGEN_RECEIPTS", str(tmp_path))
    monkeypatch.setenv("CODEGEN_CACHE_TRUST_OTHERS", "yes")
    with pytest.raises(CacheError, match="CODEGEN_CACHE_TRUST_OTHERS is 'yes'"):
        own.find(kernel)
