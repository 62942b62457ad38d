"""JSON files that users hand over: a name that stands twice and a number that is none are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from codegen.errors import CodegenError
from codegen.library import GENERATED
from codegen.receipts import Receipt
from codegen.select.table import measurements, read_rows
from runtime.tools.attest.envelope import opened, sealed
from runtime.tools.baselines.stored import read_baseline
from runtime.tools.tune.command import read_problems
from runtime.verify.rows import carried_over

PLACE = {"kernel": "k", "spec_hash": "h", "source_sha256": "s", "workload": "w", "flops": 1.0}
TIMES = {"single": [1.0, 1.0], "back_to_back": [1.0, 1.0]}
BASELINE = {
    "format": 1,
    "machine": {"device": "a", "driver": "b", "torch": "c", "compiler": "d"},
    "date": "2026-01-01",
    "rows": [{**PLACE, "own": TIMES, "peers": {}, "peer_flops": {}}],
}
PROBLEM = {"op": "bsr_spmm", "arch": "sm_90a", "block": {"rows": 64, "cols": 64}}
KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
FILES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "receipt": (min(GENERATED.glob("*.json")).read_text(), Receipt.read),
    "measurements": (measurements()[0].line(), read_rows),
    "envelope": (sealed({"a": 1}, KEY), lambda path: opened(path, KEY.public_key())),
    "baseline": (json.dumps(BASELINE), read_baseline),
    "problems": (json.dumps(PROBLEM), lambda path: read_problems((), path)),
    "results": (json.dumps([{"spec": {}, "results": {}}]), carried_over),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_name_that_stands_twice_and_a_number_that_is_none_are_refused(tmp_path: Path, kind: str) -> None:
    text, read = FILES[kind]
    path = tmp_path / "file.json"
    path.write_text(text)
    read(path)
    place = text.index("{") + 1
    name = text[place:].partition(":")[0].strip()
    for added, says in (
        (f"{name}: 0, ", f"has the name {name.replace(chr(34), chr(39))} twice"),
        ('"more": NaN, ', "NaN"),
    ):
        path.write_text(text[:place] + added + text[place:])
        with pytest.raises(CodegenError, match=f"file.json.*{says}"):
            read(path)
