"""Finds NVRTC, the CUDA headers and the disassembler, and says how to install what is missing or does not fit.

What a package of the environment has is found by the package's list of files, wherever on ``sys.path`` it is (``pip
install --target`` too); what no package has, by ``cuda.pathfinder``: conda, ``CUDA_HOME``, the system.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from cuda import pathfinder

from codegen.arch import Arch
from codegen.errors import FileError
from codegen.files import is_file, read_bytes
from codegen.installation import install_command
from runtime.compile import child, nvrtc_child
from runtime.errors import ToolchainError

LIBRARY = r"(.*/)?(libnvrtc\.so\.\d+|nvrtc64_\d+_0\.dll)"
MOST_OF_HEADER = 16 << 20  # bytes: the largest of CUDA has one or two MiB
RUNTIME_HEADER = "cuda_runtime_api.h"
INCLUDED = {"mma.h": "crt/mma.h"}  # by these headers, from a package of its own


def _suffixed(*names: str) -> tuple[str, ...]:
    """Return names of packages, plain (CUDA 13 and later) and with the CUDA that earlier ones end in."""
    return tuple(name + suffix for name in names for suffix in ("", "-cu13", "-cu12"))


@dataclass(frozen=True)
class Nvrtc:
    """The NVRTC that compiles.

    Attributes:
        library: its file.
        version: major and minor, as the loaded library tells them.
        package: what the library is of, to the patch level: "nvidia-cuda-nvrtc 13.0.88".
        stamp: the file's size and time: another file in its place is another NVRTC.
    """

    library: Path
    version: tuple[int, int]
    package: str
    stamp: tuple[int, ...]

    def __str__(self) -> str:
        """The name in messages: version, package and library."""
        return f"NVRTC {_dotted(self.version)} ({self.package}, {self.library})"


@cache
def nvrtc() -> Nvrtc:
    """Return the NVRTC that compiles.

    Raises:
        ToolchainError: when there is none, or it is not what its package says.
    """
    library, package = _library()
    try:
        version = nvrtc_child.Nvrtc(os.fsencode(library)).version()
        stamp = nvrtc_child.stamp_of(os.fsencode(library))
    except (OSError, RuntimeError, AttributeError) as error:
        raise ToolchainError(f"NVRTC, {library}, cannot be used ({error}): {install()}") from None
    if not package:
        patch = re.search(r"\.so\.(\d+\.\d+\.\d+)$", library.resolve().name)
        package = f"system {patch[1]}" if patch else f"system {_dotted(version)}, {stamp[0]} bytes"
    elif not package.split()[1].startswith(f"{_dotted(version)}."):
        raise ToolchainError(
            f"{library} is of {package}, but tells version {_dotted(version)}: another package has overwritten it; "
            f"pip install --force-reinstall --no-deps {package.replace(' ', '==')}"
        )
    return Nvrtc(library, version, package, tuple(stamp))


def compiler_version() -> tuple[str, str]:
    """Return NVRTC's version and the package it came from: ("NVRTC 13.0", "nvidia-cuda-nvrtc 13.0.88").

    NVRTC itself tells major and minor only; two packages of one minor version may differ.

    Raises:
        ToolchainError: as ``nvrtc`` does.
    """
    found = nvrtc()
    return f"NVRTC {_dotted(found.version)}", found.package


def check_arch(arch: Arch) -> None:
    """Refuse an NVRTC that is older than an architecture.

    Raises:
        ToolchainError: with the version that is needed.
    """
    found = nvrtc()
    if found.version < arch.since_cuda:
        needed = _dotted(arch.since_cuda)
        remedy = newer_nvrtc(arch.since_cuda)
        raise ToolchainError(f"{arch.name} needs NVRTC {needed} or later, and {found} is older: {remedy}")


def install() -> str:
    """The command that installs NVRTC, CUDA's headers and the disassemblers."""
    return f"{install_command('cu13')}   (or the extra cu12, to match torch's CUDA)"


def newer_nvrtc(version: tuple[int, int]) -> str:
    """The command that installs an NVRTC of this version or later, where the present one satisfies the extras."""
    found = nvrtc()
    name = found.package.split()[0]
    of_a_package = name.startswith("nvidia-") and version[0] == found.version[0]
    return f"pip install '{name}>={_dotted(version)}'" if of_a_package else install()


def check_loaded(loaded: dict[str, Any], headers: tuple[str, ...]) -> None:
    """Refuse what was compiled with something else than the key says: an update while this process runs.

    Args:
        loaded: what the child tells of it.
        headers: that the source includes.

    Raises:
        ToolchainError: if it differs.
    """
    known = nvrtc()
    expected = {"version": list(known.version), "stamp": list(known.stamp), "headers": headers_digest(headers)}
    if changed := [name for name in expected if loaded[name] != expected[name]]:
        what = "headers" if changed == ["headers"] else "NVRTC"
        raise ToolchainError(
            f"the CUDA {what} changed since this process first read them ({known}); nothing was kept of what was "
            "compiled: start the process again"
        )


@cache
def include_folders(headers: tuple[str, ...]) -> tuple[Path, ...]:
    """Return the folders that hold the CUDA headers, of NVRTC's major version, in search order; () if none is needed.

    Raises:
        ToolchainError: when one of ``headers`` is in none of them.
    """
    if not headers:
        return ()
    major = nvrtc().version[0]
    cuda: dict[Path, int | None] = dict(_packaged_folders())
    if not _all_in(headers, [folder for folder, found in cuda.items() if found == major]):
        cuda = {**dict.fromkeys(_other_folders()), **cuda}
        cuda = {folder: _cuda_of(folder) or found for folder, found in cuda.items()}
    fitting = [folder for folder, found in cuda.items() if found in (None, major)]
    for header in headers:
        if not _all_in((header,), fitting):
            raise _no_header(header, fitting, {folder: found for folder, found in cuda.items() if found})
    return tuple(fitting)


def _all_in(headers: Iterable[str], folders: Iterable[Path]) -> bool:
    """Whether the folders have all headers, and those of another package that they include."""
    wanted = {name for header in headers for name in (header, INCLUDED.get(header, header))}
    return all(any(is_file(folder / name) for folder in folders) for name in wanted)


def _no_header(header: str, looked_in: Iterable[Path], cuda: Mapping[Path, int]) -> ToolchainError:
    """Return the error of a header that is in none of the folders, or in one of another CUDA."""
    other = [f"{folder} (CUDA {found})" for folder, found in cuda.items() if is_file(folder / header)]
    if other:
        major = nvrtc().version[0]
        return ToolchainError(
            f"<{header}> is in {', '.join(other)} alone, and {nvrtc()} wants the headers of CUDA {major}: "
            f"{install_command(f'cu{major}')}"
        )
    places = ", ".join(str(folder) for folder in looked_in) or "no CUDA header folder"
    return ToolchainError(f"<{header}> is not installed (looked in {places}): {install()}")


@cache
def headers_digest(headers: tuple[str, ...]) -> str:
    """Return the SHA-256 of every file that ``headers`` include, directly or not.

    Raises:
        ToolchainError: when one of them is missing or cannot be read.
    """
    try:
        return nvrtc_child.headers_digest(headers, include_folders(headers))
    except (OSError, ValueError) as error:  # ValueError: one that includes what is no name of a file
        raise ToolchainError(f"CUDA's headers cannot be read ({error}): {install()}") from None


@cache
def cuobjdump() -> str:
    """Return the path of the disassembler.

    Raises:
        ToolchainError: when it is not installed.
    """
    return _tool("cuobjdump", "counts a cubin's instructions")


@cache
def nvdisasm() -> str:
    """Return the path of the disassembler that knows lines of the source.

    Raises:
        ToolchainError: when it is not installed.
    """
    return _tool("nvdisasm", "prints a cubin's instructions with the lines that they are of")


def _tool(name: str, what: str) -> str:
    """Return the path of a tool of CUDA: of a package, or else where ``cuda.pathfinder`` finds it."""
    for _, path in _packaged(_suffixed(f"nvidia-cuda-{name}"), rf"(.*/)?bin/{name}(\.exe)?"):
        return str(path)
    found = _located(pathfinder.find_nvidia_binary_utility, name)
    if found is None:
        raise ToolchainError(f"{name}, which {what}, is not installed: {install()}")
    return str(found)


def folders_of_request(headers: tuple[str, ...]) -> list[str]:
    """Header folders in the form that the child process takes."""
    return [child.text_of(folder) for folder in include_folders(headers)]


def _dotted(version: Iterable[int]) -> str:
    return ".".join(map(str, version))


def _library() -> tuple[Path, str]:
    """Return NVRTC's file and the package that it is of, or ""; of two packages that of cuda-bindings' CUDA."""
    try:
        bindings = metadata.version("cuda-bindings").split(".")[0]
    except metadata.PackageNotFoundError:  # of no package, as some distributions have it
        bindings = ""
    found = list(_packaged(_suffixed("nvidia-cuda-nvrtc"), LIBRARY))
    for package, path in sorted(found, key=lambda each: each[0].split()[1].split(".")[0] != bindings):
        return path, package
    loaded = _located(pathfinder.load_nvidia_dynamic_lib, "nvrtc")
    if loaded is None or loaded.abs_path is None:
        raise ToolchainError(f"NVRTC, the CUDA run-time compiler, is not installed: {install()}")
    return Path(loaded.abs_path), ""


def _packaged(names: Iterable[str], pattern: str) -> Iterator[tuple[str, Path]]:
    """Yield (name and version, path) of the files of installed packages whose place matches."""
    for name in names:
        try:
            package = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        for file in package.files or ():
            path = Path(str(package.locate_file(file)))
            if re.fullmatch(pattern, file.as_posix()) and is_file(path):
                yield f"{name} {package.version}", path


def _packaged_folders() -> dict[Path, int]:
    """Return the folders of CUDA headers that are of packages, with their CUDA."""
    wanted = rf"(.*/)?include/({re.escape(RUNTIME_HEADER)}|crt/mma\.h)"
    folders: dict[Path, int] = {}
    for package, path in _packaged(_suffixed("nvidia-cuda-runtime", "nvidia-cuda-crt", "nvidia-cuda-nvcc"), wanted):
        folder = path.parents[1] if path.parent.name == "crt" else path.parent
        folders.setdefault(folder, int(package.split()[1].partition(".")[0]))
    return folders


def _other_folders() -> list[Path]:
    """Return the folders of CUDA headers that are of no package: conda's, of ``CUDA_HOME``, the system's."""
    found = [_located(pathfinder.find_nvidia_header_directory, name) for name in ("cudart", "nvcc")]
    home = pathfinder.get_cuda_path_or_home()
    places = [*found, *([str(Path(home) / "include")] if home else [])]
    return [Path(place) for place in places if place and Path(place).is_dir()]


def _located(find: Callable[[str], Any], name: str) -> Any:
    """Look up a name by ``cuda.pathfinder``, which starts ``sys.executable`` on the way; None if it finds nothing.

    Raises:
        ToolchainError: if it fails.
    """
    try:
        return find(name)
    except pathfinder.DynamicLibNotFoundError:
        return None
    except Exception as error:
        raise ToolchainError(
            f"{name} is in no package, and cuda.pathfinder fails to look elsewhere ({error}): {install()}"
        ) from None


def _cuda_of(folder: Path) -> int | None:
    """Return the major version of the CUDA that a folder's headers are of; None where they do not tell."""
    for header, name in ((RUNTIME_HEADER, b"CUDART_VERSION"), ("cuda.h", b"CUDA_VERSION")):
        path = folder / header
        try:
            text = read_bytes(path, MOST_OF_HEADER) if is_file(path) else b""
        except FileError as error:
            raise ToolchainError(f"{error}: mend it, or name another CUDA by CUDA_HOME") from None
        told = re.search(rb"^#define\s+" + name + rb"\s+(\d+)", text, re.M)
        if told is not None:
            return int(told[1]) // 1000
    return None
