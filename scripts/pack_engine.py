"""Packs a serving engine for a GPU machine that has torch and Triton, and no package registry.

    python scripts/pack_engine.py --folder /tmp/packs vllm==0.33.0
    python scripts/pack_engine.py --folder /tmp/packs sglang==0.5.23

The wheel of an engine has gigabytes of dependencies and kernels of many architectures. A pack has the Python files of
the engine, the packages that they import and a machine with torch and transformers lacks, and the extension that a
small model needs, with kernels of one architecture. On the GPU machine:

    mkdir -p /tmp/site && tar -xJf vllm-0.33.0.tar.xz -C /tmp/site
    PYTHONPATH=/tmp/site python -m pytest tests/gpu/test_vllm_engine.py
"""

from __future__ import annotations

import argparse
import io
import re
import struct
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

SUFFIXES = (".py", ".json", "METADATA", "entry_points.txt", ".cuh", ".h")
"""Ends of the names of packed files of an engine. SGLang looks for its headers when it is imported."""
GLIBC = (5, 12, 17, 24, 26, 27, 28, 31, 34)
"""Minor versions of glibc 2 whose wheels the machine runs."""
CONTAINER, CUBIN, PTX = 0xBA55ED50, 2, 1
"""First word of a container of kernels, and kinds of its entries."""
SHARED_BY_TYPES = b"FlashAttnFwdCombine"
"""Part of names of kernels that one piece of machine code has for all types: it adds the parts of divided keys."""
OTHER = 120
"""Architecture of the entry of a container without kernels: CUDA refuses an empty container."""


@dataclass(frozen=True)
class Pack:
    """What is packed of an engine.

    Attributes:
        packages: those that the engine imports, and a machine with torch, Triton and transformers lacks.
        libraries: extensions of the engine, each with parts of names of kernels that are left out.
        left_out: folders of the engine that its attention and a small model do not import.
    """

    packages: tuple[str, ...]
    libraries: Mapping[str, Sequence[bytes]] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()


SHARED = (
    *("annotated-types", "apache-tvm-ffi", "distro", "dill", "fastapi<0.137", "gguf", "interegular", "jiter"),
    *("llguidance", "loguru", "msgspec", "openai<3", "orjson", "partial-json-parser", "pybase64", "pydantic"),
    *("pydantic-core", "python-multipart", "pyzmq", "setproctitle", "sniffio", "starlette<2", "typing-inspection"),
    *("uvicorn", "xgrammar"),
)
PACKS = {
    "vllm": Pack(
        (
            *SHARED,
            *(
                "astor",
                "blake3",
                "cachetools",
                "cbor2",
                "compressed-tensors",
                "depyf",
                "ijson",
                "jsonschema",
                "jsonschema-specifications",
            ),
            *("lark", "openai-harmony", "python-json-logger", "referencing", "rpds-py", "watchfiles"),
        ),
        {
            "vllm/_C_stable_libtorch.abi3.so": (),
            "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so": (b"float_e4m3_t", b"half_t"),
        },
        ("vllm/third_party/fmha_sm100", "vllm/third_party/tml_fa4", "vllm/third_party/deep_gemm/include"),
    ),
    "sglang": Pack(
        (
            *SHARED,
            *("addict", "compressed-tensors", "ipython", "decorator", "pytz", "jedi", "parso", "traitlets"),
            *(
                "prompt-toolkit",
                "wcwidth",
                "stack-data",
                "executing",
                "asttokens",
                "pure-eval",
                "pexpect",
                "ptyprocess",
            ),
            *("matplotlib-inline",),
        ),
        left_out=("sglang/multimodal_gen/test", "sglang/test"),
    ),
}


def _downloaded(requirement: str, folder: Path, python: str) -> Path:
    """The wheel of a package for the GPU machine, downloaded unless it is there."""
    place = folder / re.sub(r"[^\w.]+", "-", requirement)
    if not list(place.glob("*.whl")):
        platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in GLIBC]
        options = ["--no-deps", "--only-binary=:all:", "--python-version", python, "--implementation", "cp"]
        command = [sys.executable, "-m", "pip", "--quiet", "download", *options, *platforms, "--dest", str(place)]
        subprocess.run([*command, requirement], check=True)
    (wheel,) = place.glob("*.whl")
    return wheel


def _containers(data: bytearray, first: int, end: int) -> Iterator[tuple[int, int]]:
    """First byte and end of the entries of each container of kernels."""
    while first < end:
        word, _, header, size = struct.unpack_from("<IHHQ", data, first)
        if word != CONTAINER:
            first += 8
            continue
        yield first + header, first + header + size
        first += header + size


def _entries(data: bytearray, first: int, end: int) -> Iterator[tuple[int, int, bytes]]:
    """Kind, architecture and bytes of each entry of a container."""
    while first < end:
        kind, _, header, length = struct.unpack_from("<HHIQ", data, first)
        (arch,) = struct.unpack_from("<I", data, first + 28)
        yield kind, arch, bytes(data[first : first + header + length])
        first += header + length


def _kernels_at(data: bytes) -> tuple[int, int]:
    """First byte and end of the section of kernels in an ELF file of 64 bits."""
    (sections,) = struct.unpack_from("<Q", data, 40)
    size, count, names = struct.unpack_from("<HHH", data, 58)
    rows = [struct.unpack_from("<IIQQQQ", data, sections + size * i) for i in range(count)]
    first_name = rows[names][4]
    for name, _, _, _, first, length in rows:
        if data[first_name + name :].startswith(b".nv_fatbin\0"):
            return first, first + length
    raise ValueError("the library has no section .nv_fatbin")


def of_one_architecture(library: bytes, arch: int, without: Sequence[bytes] = ()) -> bytes:
    """A library without the kernels of other architectures: zeros behind the others, which compress to nothing.

    Args:
        library: an ELF file.
        arch: ten times the major number plus the minor number of the compute capability, such as 90.
        without: parts of names of kernels. Machine code with one of them is left out too, if it is not compressed.
    """
    data = bytearray(library)
    containers = {
        (first, end): list(_entries(data, first, end)) for first, end in _containers(data, *_kernels_at(library))
    }
    smallest = min((each for entries in containers.values() for _, _, each in entries), key=len)
    nothing = smallest[:28] + struct.pack("<I", OTHER) + smallest[32:]
    for (first, end), entries in containers.items():
        cubins = [each for kind, of, each in entries if kind == CUBIN and of == arch]
        kept = [each for each in cubins if SHARED_BY_TYPES in each or not any(name in each for name in without)]
        if not cubins:
            kept = [each for kind, of, each in entries if kind == PTX and of <= arch]
        content = b"".join(kept) or nothing
        data[first:end] = content + bytes(end - first - len(content))
        struct.pack_into("<Q", data, first - 8, len(content))
    return bytes(data)


def _members(requirement: str, folder: Path, python: str, arch: int) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the files of a pack, those alike beside each other."""
    name, _, _ = requirement.partition("==")
    pack = PACKS[name]
    wheels = folder / "wheels"
    with zipfile.ZipFile(_downloaded(requirement, wheels, python)) as archive:
        for each in archive.namelist():
            if each.endswith(SUFFIXES) and not each.startswith(pack.left_out):
                yield each, archive.read(each)
        for each, without in pack.libraries.items():
            yield each, of_one_architecture(archive.read(each), arch, without)
    for package in pack.packages:
        with zipfile.ZipFile(_downloaded(package, wheels, python)) as archive:
            for each in archive.namelist():
                if not each.endswith("/") and "tests" not in PurePosixPath(each).parts:
                    yield each, archive.read(each)


def pack(requirement: str, folder: Path, python: str, arch: int) -> Path:
    """Write the pack of an engine; return its path."""
    path = folder / f"{requirement.replace('==', '-')}.tar.xz"
    with tarfile.open(path, "w:xz", preset=6) as archive:
        for name, content in _members(requirement, folder, python, arch):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def main() -> None:
    """Write the packs that the command names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", nargs="+", help="NAME==VERSION")
    parser.add_argument("--folder", type=Path, required=True, help="where to write packs; keeps downloaded wheels")
    parser.add_argument("--python", default="3.12", help="version of Python of the GPU machine; default: 3.12")
    parser.add_argument("--arch", type=int, default=90, help="architecture of its GPU, such as 90; default: 90")
    given = parser.parse_args()
    for each in given.engines:
        name, _, version = each.partition("==")
        if name not in PACKS or not version:
            parser.error(f"engine is {each!r}, expected NAME==VERSION with a name of {', '.join(PACKS)}")
        path = pack(each, given.folder.resolve(), given.python, given.arch)
        print(f"{path} {path.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
