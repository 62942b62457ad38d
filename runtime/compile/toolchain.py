"""Discovery of NVRTC, the CUDA headers and the disassembler, with install commands in its errors.

Files of installed packages are found through the packages' file lists, anywhere on ``sys.path`` (``pip install
--target`` too). ``cuda.pathfinder`` finds files of conda, ``CUDA_HOME`` and the system.
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
MOST_OF_HEADER = 16 << 20  # bytes: the largest headers of CUDA have one or two MiB
RUNTIME_HEADER = "cuda_runtime_api.h"
INCLUDED = {"mma.h": "crt/mma.h"}  # included by these headers, from another package


def _suffixed(*names: str) -> tuple[str, ...]:
    """Names of packages: plain (CUDA 13 and later) and with the CUDA suffix of earlier packages."""
    return tuple(name + suffix for name in names for suffix in ("", "-cu13", "-cu12"))


@dataclass(frozen=True)
class Nvrtc:
    """The NVRTC library in use.

    Attributes:
        library: path of its file.
        version: major and minor, as the loaded library reports them.
        package: the package of the library, to the patch level: "nvidia-cuda-nvrtc 13.0.88".
        stamp: size and time of the file, which change when the file is replaced.
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
    """Find the NVRTC library.

    Raises:
        ToolchainError: if there is none, or its version differs from its package's.
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
            f"{library} belongs to {package}, but reports version {_dotted(version)}: another package "
            f"has overwritten it; pip install --force-reinstall --no-deps {package.replace(' ', '==')}"
        )
    return Nvrtc(library, version, package, tuple(stamp))


def compiler_version() -> tuple[str, str]:
    """Return NVRTC's version and the package it came from: ("NVRTC 13.0", "nvidia-cuda-nvrtc 13.0.88").

    NVRTC itself reports only major and minor; two packages of one minor version may differ.

    Raises:
        ToolchainError: as ``nvrtc`` does.
    """
    found = nvrtc()
    return f"NVRTC {_dotted(found.version)}", found.package


def check_arch(arch: Arch) -> None:
    """Refuse an NVRTC that does not support an architecture yet.

    Raises:
        ToolchainError: with the required version.
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
    """The command that installs an NVRTC of this version or later, although the present one satisfies the extras."""
    found = nvrtc()
    name = found.package.split()[0]
    of_a_package = name.startswith("nvidia-") and version[0] == found.version[0]
    return f"pip install '{name}>={_dotted(version)}'" if of_a_package else install()


def check_loaded(loaded: dict[str, Any], headers: tuple[str, ...]) -> None:
    """Refuse code whose compiler or headers differ from the cache key's: they were updated while this process ran.

    Args:
        loaded: the child's report of its NVRTC and headers.
        headers: headers that the source includes.

    Raises:
        ToolchainError: if they differ.
    """
    known = nvrtc()
    expected = {"version": list(known.version), "stamp": list(known.stamp), "headers": headers_digest(headers)}
    if changed := [name for name in expected if loaded[name] != expected[name]]:
        what = "headers" if changed == ["headers"] else "NVRTC"
        raise ToolchainError(
            f"the CUDA {what} changed since this process first read them ({known}); the compiled code was "
            "discarded: restart the process"
        )


@cache
def include_folders(headers: tuple[str, ...]) -> tuple[Path, ...]:
    """Folders of the CUDA headers of NVRTC's major version, in search order; () if none are needed.

    Raises:
        ToolchainError: if one of ``headers`` is in none of them.
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
    """Whether the folders have all headers, including the ones from other packages that they include."""
    wanted = {name for header in headers for name in (header, INCLUDED.get(header, header))}
    return all(any(is_file(folder / name) for folder in folders) for name in wanted)


def _no_header(header: str, looked_in: Iterable[Path], cuda: Mapping[Path, int]) -> ToolchainError:
    """Error for a header that is in none of the folders, or only in folders of another CUDA version."""
    other = [f"{folder} (CUDA {found})" for folder, found in cuda.items() if is_file(folder / header)]
    if other:
        major = nvrtc().version[0]
        return ToolchainError(
            f"<{header}> is only in {', '.join(other)}, and {nvrtc()} needs the headers of CUDA {major}: "
            f"{install_command(f'cu{major}')}"
        )
    places = ", ".join(str(folder) for folder in looked_in) or "no CUDA header folder"
    return ToolchainError(f"<{header}> is not installed (looked in {places}): {install()}")


@cache
def headers_digest(headers: tuple[str, ...]) -> str:
    """SHA-256 over every file that ``headers`` include, directly or indirectly.

    Raises:
        ToolchainError: if one of them is missing or cannot be read.
    """
    try:
        return nvrtc_child.headers_digest(headers, include_folders(headers))
    except (OSError, ValueError) as error:  # ValueError: an include that is not a valid file name
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
    """Path of the disassembler that prints source lines.

    Raises:
        ToolchainError: when it is not installed.
    """
    return _tool("nvdisasm", "prints a cubin's instructions with their source lines")


def _tool(name: str, what: str) -> str:
    """Path of a CUDA tool: from a package, else from ``cuda.pathfinder``."""
    for _, path in _packaged(_suffixed(f"nvidia-cuda-{name}"), rf"(.*/)?bin/{name}(\.exe)?"):
        return str(path)
    found = _located(pathfinder.find_nvidia_binary_utility, name)
    if found is None:
        raise ToolchainError(f"{name}, which {what}, is not installed: {install()}")
    return str(found)


def folders_of_request(headers: tuple[str, ...]) -> list[str]:
    """Header folders as the child process takes them."""
    return [child.text_of(folder) for folder in include_folders(headers)]


def _dotted(version: Iterable[int]) -> str:
    return ".".join(map(str, version))


def _library() -> tuple[Path, str]:
    """NVRTC's file and its package, or "". Of two packages, the one for cuda-bindings' CUDA version."""
    try:
        bindings = metadata.version("cuda-bindings").split(".")[0]
    except metadata.PackageNotFoundError:  # without a package, as in some distributions
        bindings = ""
    found = list(_packaged(_suffixed("nvidia-cuda-nvrtc"), LIBRARY))
    for package, path in sorted(found, key=lambda each: each[0].split()[1].split(".")[0] != bindings):
        return path, package
    loaded = _located(pathfinder.load_nvidia_dynamic_lib, "nvrtc")
    if loaded is None or loaded.abs_path is None:
        raise ToolchainError(f"NVRTC, the CUDA run-time compiler, is not installed: {install()}")
    return Path(loaded.abs_path), ""


def _packaged(names: Iterable[str], pattern: str) -> Iterator[tuple[str, Path]]:
    """Yield (name and version, path) of the files of installed packages whose path matches."""
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
    """Folders of CUDA headers from packages, with their CUDA version."""
    wanted = rf"(.*/)?include/({re.escape(RUNTIME_HEADER)}|crt/mma\.h)"
    folders: dict[Path, int] = {}
    for package, path in _packaged(_suffixed("nvidia-cuda-runtime", "nvidia-cuda-crt", "nvidia-cuda-nvcc"), wanted):
        folder = path.parents[1] if path.parent.name == "crt" else path.parent
        folders.setdefault(folder, int(package.split()[1].partition(".")[0]))
    return folders


def _other_folders() -> list[Path]:
    """Folders of CUDA headers without a package: conda's, ``CUDA_HOME``'s, the system's."""
    found = [_located(pathfinder.find_nvidia_header_directory, name) for name in ("cudart", "nvcc")]
    home = pathfinder.get_cuda_path_or_home()
    places = [*found, *([str(Path(home) / "include")] if home else [])]
    return [Path(place) for place in places if place and Path(place).is_dir()]


def _located(find: Callable[[str], Any], name: str) -> Any:
    """Look up a name with ``cuda.pathfinder``, which starts ``sys.executable``; None if it finds nothing.

    Raises:
        ToolchainError: if it fails.
    """
    try:
        return find(name)
    except pathfinder.DynamicLibNotFoundError:
        return None
    except Exception as error:
        raise ToolchainError(
            f"{name} is in no package, and the search of cuda.pathfinder failed ({error}): {install()}"
        ) from None


def _cuda_of(folder: Path) -> int | None:
    """Major CUDA version of the headers in a folder; None if they do not define it."""
    for header, name in ((RUNTIME_HEADER, b"CUDART_VERSION"), ("cuda.h", b"CUDA_VERSION")):
        path = folder / header
        try:
            text = read_bytes(path, MOST_OF_HEADER) if is_file(path) else b""
        except FileError as error:
            raise ToolchainError(f"{error}: fix it, or set CUDA_HOME to another CUDA") from None
        told = re.search(rb"^#define\s+" + name + rb"\s+(\d+)", text, re.M)
        if told is not None:
            return int(told[1]) // 1000
    return None
