"""One stem names the spec, the source, the symbol and the receipt."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from each import every_spec

from codegen.library import GENERATED, SPECS, NamedSpec, find_spec, shipped_names, shipped_specs
from codegen.receipts import receipt_path

PREFIX = {"sm_90a": "h100", "sm_89": "l4"}


@every_spec
def test_stem_is_file_symbol_and_receipt(named: NamedSpec) -> None:
    assert named.origin == ("specs" / named.subfolder / f"{named.stem}.yaml").as_posix()
    assert named.path == SPECS / named.subfolder / f"{named.stem}.yaml"
    assert receipt_path(named) == GENERATED / f"{named.stem}.json"
    assert named.source_file == named.origin.replace("specs/", "generated/").replace(".yaml", ".cu")
    source = (GENERATED / named.subfolder / f"{named.stem}.cu").read_text(encoding="utf-8")
    assert re.search(rf'extern "C" __global__ [^;{{]*\b{named.stem}\(', source)


@every_spec
def test_receipt_names_its_own_kernel(named: NamedSpec) -> None:
    path = receipt_path(named)
    if not path.exists():
        pytest.skip("no receipt yet")
    receipt = json.loads(path.read_bytes())
    assert receipt["spec"]["file"] == named.origin
    assert receipt["source"]["file"] == named.source_file
    assert receipt["cubin"]["arch"] == named.spec.arch


@every_spec
def test_stem_begins_with_the_device(named: NamedSpec) -> None:
    assert named.stem.startswith(f"{PREFIX[named.spec.arch]}_")


def test_folders_of_specs() -> None:
    assert {path.suffix for path in SPECS.rglob("*") if path.is_file()} == {".yaml"}
    assert {path.name for path in SPECS.iterdir() if path.is_dir()} == {"backward", "ladder"}
    stems = sorted(path.stem for path in SPECS.rglob("*.yaml"))
    assert shipped_names() == stems and len(set(stems)) == len(stems)


def test_specs_without_a_file_get_distinct_names(named: NamedSpec) -> None:
    stems = {find_spec(shipped.spec).stem for shipped in shipped_specs()}
    assert len(stems) == len(shipped_names())
    assert all(stem.isidentifier() and Path(stem).name == stem for stem in stems)
    assert find_spec(named.spec).stem not in shipped_names()
