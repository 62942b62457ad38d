"""Attacks on the folder of an exported kernel, by somebody who knows how it is sealed."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from codegen.errors import CodegenError
from codegen.library import find_spec
from codegen.receipts import Receipt, source_sha256
from codegen.render import SEAL, generate, seal
from codegen.tools.exports import RECORD, files_of, names_of, read_export
from codegen.tools.sized_launch import sized_launch

NAME = "h100_tile_copy_tma"
CUBIN, LOG = b"\x7fELF, machine code", "ptxas info    : Used 16 registers"
VALUES: tuple[Any, ...] = (
    "",
    "x",
    "../x",
    "\x00",
    "0" * 64,
    0,
    -1,
    7,
    10**30,
    1.5,
    None,
    True,
    [],
    {},
    ["x"],
    {"x": 1},
)
FREE = ("spec.file", "source.file", "verification", "measurement", "schema_version")
FREE_OF_CUBIN = ("compiler", "compiler_package", "ptx_sha256", "options", "instructions")
FREE_COUNTS = ("registers", "spill_bytes", "stack_bytes", "static_shared_bytes")
"""Fields of a receipt that no other file has: what a GPU made of the kernel cannot be seen from its files."""


@cache
def whole() -> dict[str, bytes]:
    """Return the files of an export."""
    named = find_spec(NAME)
    made = generate(named)
    cubin = {
        "sha256": hashlib.sha256(CUBIN).hexdigest(),
        "launch_sha256": made.plan.launch_sha256,
        "arch": named.spec.arch,
        **{"compiler": "NVRTC 13.0", "compiler_package": "nvidia-cuda-nvrtc 13.0.88", "options": ("-a",)},
        **{"registers": 16, "spill_bytes": 0, "stack_bytes": 0, "static_shared_bytes": 0},
        "dynamic_shared_bytes": made.plan.shared_bytes,
        "instructions": {"UTMALDG": 1},
    }
    told = {
        "spec": {"file": named.origin, "hash": named.spec.hash},
        "source": {"file": named.source_file, "sha256": source_sha256(made.source)},
        "cubin": cubin,
    }
    sized = sized_launch(made.plan, {"rows": 128, "columns": 128}, 132)
    return files_of(made, CUBIN, LOG, Receipt.model_validate(told), sized)


def meaning(folder: Path) -> Any:
    """Return what a host launches by an export, and what the header tells it."""
    found = read_export(folder)
    record = found.record.model_dump_json(include={"kernel", "launch"})
    header = (folder / f"{NAME}.h").read_bytes()
    return found.generated.plan, found.generated.named.spec, found.cubin, record, header


def put(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)


def resealed(files: dict[str, bytes], record: dict[str, Any] | None = None) -> dict[str, bytes]:
    """Return the files with the hashes that they now have, and the seal."""
    told = json.loads(files[RECORD]) if record is None else record
    for what, name in names_of(NAME).items():
        if record is None:
            told[what]["sha256"] = hashlib.sha256(files[name]).hexdigest()
    unsealed = {name: value for name, value in told.items() if name != "seal"}
    text = json.dumps(unsealed, sort_keys=True, separators=(",", ":"))
    told["seal"] = hashlib.sha256(text.encode()).hexdigest()
    return {**files, RECORD: json.dumps(told).encode()}


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield where each field is, those that hold others too."""
    if path:
        yield path
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in parts:
        yield from leaves(part, (*path, name))


def with_value(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """Return a copy with another value of a field; without the field if that is ``...``."""
    changed = copy.deepcopy(value)
    place = changed
    for name in path[:-1]:
        place = place[name]
    if new is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = new
    return changed


def refused(run: Callable[[], object], about: str) -> bool:
    """Return whether it is refused, in one line; another error than the package's own is the caller's."""
    try:
        run()
    except CodegenError as error:
        assert "\n" not in str(error), f"{about}: the message has lines: {error!r}"
        return True
    return False


def exports_edited(folder: Path, seconds: float) -> str:
    """Fields of the record and of the receipt are replaced or left out, sealed anew or not: refused, or no matter."""
    own, draw, tried, kept = whole(), random.Random(0), 0, 0
    put(folder / "kernel", own)
    before = meaning(folder / "kernel")
    receipt = names_of(NAME)["receipt"]
    for name in (RECORD, receipt):
        told = json.loads(own[name])
        places = list(leaves(told))
        for path in places:
            values = (*VALUES, ...) if seconds > 10 else draw.sample((*VALUES, ...), 2)
            for new in values:
                changed = with_value(told, path, new)
                if changed == told and json.dumps(changed) == json.dumps(told):
                    continue
                tried += 1
                about = f"{name}: {'.'.join(map(str, path))} = {new!r}"
                for seals in (False, True):
                    files = {**own, name: json.dumps(changed).encode()}
                    if seals:
                        files = resealed(files, changed if name == RECORD and path[0] != "seal" else None)
                    put(folder / "kernel", files)
                    if refused(lambda: meaning(folder / "kernel"), about):
                        continue
                    assert meaning(folder / "kernel") == before, f"{about}: it means something else"
                    allowed = seals and (name == receipt or path[0] in ("made_by", "compiler_log", "schema_version"))
                    allowed = allowed or (name == RECORD and seals and path[0] == "seal")
                    assert allowed or changed == told, f"{about}: not refused"
                    assert name == RECORD or is_free(path), f"{about}: not compared with the other files"
                    kept += 1
        put(folder / "kernel", own)
    return f"{tried} edits, {kept} of them of what no other file tells, all others refused"


def is_free(path: tuple[Any, ...]) -> bool:
    """Return whether a field of a receipt may be anything, as no other file tells it."""
    dotted = ".".join(map(str, path))
    cubin = path[0] == "cubin" and len(path) > 1 and path[1] in (*FREE_OF_CUBIN, *FREE_COUNTS)
    return cubin or dotted.startswith(FREE)


def members_replaced(folder: Path, seconds: float) -> str:
    """A file of the folder is cut short, no text, another kernel's, a pipe, a folder, a device, a link, or away."""
    own, tried = whole(), 0
    other = {"source": b"other", "cubin": b"other", "header": b"other", "receipt": b"{}", "record": b"{}"}
    names = {**names_of(NAME), "record": RECORD}
    makes: dict[str, Callable[[Path, str], object]] = {
        "cut short": lambda path, what: path.write_bytes(own[path.name][:-3]),
        "empty": lambda path, what: path.write_bytes(b""),
        "not UTF-8": lambda path, what: path.write_bytes(own[path.name][:40] + b"\xff" + own[path.name][40:]),
        "another": lambda path, what: path.write_bytes(other[what]),
        "deep": lambda path, what: path.write_bytes(b"[" * 100_000),
        "a huge number": lambda path, what: path.write_bytes(b'{"schema_version": ' + b"9" * 6000 + b"}"),
        "a pipe": lambda path, what: os.mkfifo(path),
        "a folder": lambda path, what: path.mkdir(),
        "a link to nowhere": lambda path, what: path.symlink_to("nowhere"),
        "a link to itself": lambda path, what: path.symlink_to(path.name),
        "a link to a device": lambda path, what: path.symlink_to("/dev/zero"),
        "away": lambda path, what: None,
    }
    for what, name in names.items():
        for kind, make in makes.items():
            for seals in (False, True):
                place = folder / f"{what} {kind} {seals}"
                put(place, own)
                (place / name).unlink()
                make(place / name, what)
                if seals:
                    if what == "record" or not (place / name).is_file():
                        continue
                    files = {**own, name: (place / name).read_bytes()}
                    put(place, resealed(files))
                tried += 1
                # The cubin is whatever the compiler made: what the receipt says of it is what is compared.
                assert refused(lambda place=place: meaning(place), f"{what}: {kind}"), f"{what}: {kind}: not refused"
    return f"{tried} replaced, all refused"


def sources_edited(folder: Path, seconds: float) -> str:
    """Lines are put into each place of a source's first hundred, sealed anew in all places: refused."""
    own, tried = whole(), 0
    names = names_of(NAME)
    source = own[names["source"]].decode()
    lines = [line for line in source.split("\n") if not line.startswith(SEAL)]
    line_ends = ("extern int hidden;", "// a comment \\", "// \u00fc", "//\r int hidden;", "", "/* */ int hidden;")
    for at in range(0, min(len(lines), 100), 1 if seconds > 10 else 3):
        for new in line_ends:
            text = seal("\n".join([*lines[:at], new, *lines[at:]]))
            files = {**own, names["source"]: text.encode()}
            receipt = json.loads(own[names["receipt"]])
            receipt["source"]["sha256"] = source_sha256(text)
            files[names["receipt"]] = json.dumps(receipt).encode()
            put(folder / "kernel", resealed(files))
            assert refused(lambda: meaning(folder / "kernel"), new), f"{new!r} in line {at} is not refused"
            tried += 1
    return f"{tried} lines put in, all refused"
