"""One stem names the spec, the source, the symbol and the receipt."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from each import every_spec

from codegen.library import GENERATED, SPECS, NamedSpec, find_spec, shipped_files, shipped_names, shipped_specs
from codegen.receipts import MissingReceipt, read_receipt, receipt_path
from codegen.render import render

PREFIX = {"sm_90a": "h100", "sm_89": "l4"}


@every_spec
def test_stem_is_file_symbol_and_receipt(named: NamedSpec) -> None:
    stem = named.stem.removesuffix(f"_{named.spec.dtype}") if named.twin_of else named.stem
    assert named.origin == ("specs" / named.subfolder / f"{stem}.yaml").as_posix()
    assert named.path == SPECS / named.subfolder / f"{stem}.yaml"
    assert receipt_path(named) == GENERATED / named.subfolder / f"{stem}.json"
    assert named.source_file == named.origin.replace("specs/", "generated/").replace(".yaml", ".cu")
    source = (GENERATED / named.subfolder / f"{stem}.cu").read_text(encoding="utf-8")
    assert re.search(rf'extern "C" __global__ [^;{{]*\b{stem}\(', source)
    assert re.search(rf'extern "C" __global__ [^;{{]*\b{named.stem}\(', render(named))


@every_spec
def test_receipt_names_its_own_kernel(named: NamedSpec) -> None:
    try:
        receipt = read_receipt(named, receipt_path(named))
    except MissingReceipt:
        pytest.skip("no receipt yet")
    assert receipt.spec.file == named.origin
    assert receipt.source.file == named.source_file
    assert receipt.cubin.arch == named.spec.arch


@every_spec
def test_stem_begins_with_the_device(named: NamedSpec) -> None:
    assert named.stem.startswith(f"{PREFIX[named.spec.arch]}_")


def test_folders_of_specs() -> None:
    assert {path.suffix for path in SPECS.rglob("*") if path.is_file()} == {".yaml"}
    assert {path.name for path in SPECS.iterdir() if path.is_dir()} == {"backward", "ladder"}
    stems = sorted(path.stem for path in SPECS.rglob("*.yaml"))
    twins = [f"{named.stem}_bf16" for named in shipped_specs() if named.has_twin]
    assert list(shipped_files()) == stems and shipped_names() == sorted([*stems, *twins])
    assert len(set(shipped_names())) == len(shipped_names())


def test_specs_without_a_file_get_distinct_names(named: NamedSpec) -> None:
    stems = {find_spec(shipped.spec).stem for shipped in shipped_specs()}
    assert len(stems) == len(shipped_names())
    assert all(stem.isidentifier() and Path(stem).name == stem for stem in stems)
    assert find_spec(named.spec).stem not in shipped_names()
