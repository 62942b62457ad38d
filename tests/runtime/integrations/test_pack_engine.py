"""The script that packs an engine for a GPU machine, without a download."""

from __future__ import annotations

import struct
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
from scripts import SCRIPTS, load_script

packs = load_script("pack_engine", SCRIPTS)
CUBIN, PTX = packs.CUBIN, packs.PTX


def entry(kind: int, arch: int, content: bytes) -> bytes:
    return struct.pack("<HHIQIIII", kind, 0x101, 32, len(content), 0, 0, 0, arch) + content


def container(*entries: bytes) -> bytes:
    content = b"".join(entries)
    return struct.pack("<IHHQ", packs.CONTAINER, 1, 16, len(content)) + content


def library_of(*containers: bytes) -> bytes:
    """An ELF file with a section of kernels and one of names."""
    names, kernels = b"\0.nv_fatbin\0.shstrtab\0", b"".join(containers)
    rows = [(0, 0, 0), (1, 64, len(kernels)), (12, 64 + len(kernels), len(names))]
    table = b"".join(struct.pack("<IIQQQQ24x", name, 1, 0, 0, first, size) for name, first, size in rows)
    header = bytearray(64)
    struct.pack_into("<Q", header, 40, 64 + len(kernels) + len(names))
    struct.pack_into("<HHH", header, 58, 64, len(rows), 2)
    return bytes(header) + kernels + names + table


def found_in(library: bytes) -> list[list[tuple[int, int, bytes]]]:
    """Kind, architecture and content of the entries of each container."""
    data = bytearray(library)
    places = packs._containers(data, *packs._kernels_at(library))
    return [[(kind, arch, each[32:]) for kind, arch, each in packs._entries(data, *place)] for place in places]


def test_kernels_of_one_architecture_are_kept() -> None:
    """Without machine code for it, code that CUDA can compile for it. A container is never empty."""
    a, b, c = b"a" * 64, b"b" * 64, b"c" * 64
    library = library_of(
        container(entry(CUBIN, 80, a), entry(CUBIN, 90, b), entry(PTX, 90, c)),
        container(entry(CUBIN, 80, a), entry(PTX, 80, b)),
        container(entry(CUBIN, 100, a)),
        container(entry(CUBIN, 90, b"of half_t" + bytes(7)), entry(CUBIN, 80, bytes(16))),
    )
    reduced = packs.of_one_architecture(library, 90, [b"half_t"])
    nothing = [(CUBIN, packs.OTHER, b"of half_t" + bytes(7))]
    assert len(reduced) == len(library)
    assert found_in(reduced) == [[(CUBIN, 90, b)], [(PTX, 80, b)], nothing, nothing]
    assert packs.of_one_architecture(reduced, 90, [b"half_t"]) == reduced


def test_a_pack_has_the_engine_and_its_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(command: list[str], **options: Any) -> None:
        asked.append(command[-1])
        folder = Path(command[command.index("--dest") + 1])
        folder.mkdir(parents=True)
        with zipfile.ZipFile(folder / "package-1-py3-none-any.whl", "w") as wheel:
            for name in ("__init__.py", "tests/big.py", "kernels.so", "third_party/tml_fa4/big.py"):
                wheel.writestr(f"{'vllm' if '==' in command[-1] else 'package'}/{name}", "")
            for name in packs.PACKS["vllm"].libraries:
                wheel.writestr(name, library_of(container(entry(CUBIN, 90, b"a" * 8))))

    monkeypatch.setattr(packs.subprocess, "run", download)
    monkeypatch.setattr(sys, "argv", ["pack_engine.py", "--folder", str(tmp_path), "vllm==0.33.0"])
    packs.main()
    assert asked == ["vllm==0.33.0", *packs.PACKS["vllm"].packages]
    with tarfile.open(tmp_path / "vllm-0.33.0.tar.xz") as archive:
        names = archive.getnames()
    assert {"vllm/__init__.py", "vllm/tests/big.py", "package/kernels.so", *packs.PACKS["vllm"].libraries} <= set(names)
    assert not {"vllm/kernels.so", "vllm/third_party/tml_fa4/big.py", "package/tests/big.py"} & set(names)
    asked.clear()
    packs.main()
    assert not asked  # wheels are kept


@pytest.mark.parametrize("engine", ["vllm", "other==1"])
def test_another_engine_is_refused(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["pack_engine.py", "--folder", str(tmp_path), engine])
    with pytest.raises(SystemExit, match="2"):
        packs.main()
