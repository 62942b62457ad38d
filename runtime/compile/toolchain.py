"""Finds NVRTC, the CUDA headers and the disassembler, and says how to install what is missing."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from cuda import pathfinder

from runtime.errors import ToolchainError

INSTALL = "pip install 'sparse-kernel-codegen[cu13]'   (or [cu12], to match torch's CUDA)"


@cache
def nvrtc() -> Any:
    """Return cuda.bindings.nvrtc with its library loaded.

    Raises:
        ToolchainError: when libnvrtc is not installed.
    """
    from cuda.bindings import nvrtc as bindings  # noqa: PLC0415 - only where something is compiled

    try:
        pathfinder.load_nvidia_dynamic_lib("nvrtc")
    except pathfinder.DynamicLibNotFoundError as error:
        reason = str(error).splitlines()[0]
        raise ToolchainError(f"NVRTC, the CUDA run-time compiler, is not installed ({reason}): {INSTALL}") from None
    return bindings


@cache
def compiler_version() -> tuple[str, str]:
    """Return NVRTC's version and the package it came from: ("NVRTC 13.0", "nvidia-cuda-nvrtc 13.0.88").

    NVRTC itself tells major and minor only; two packages of one minor version may differ.
    """
    status, major, minor = nvrtc().nvrtcVersion()
    if int(status) != 0:
        raise ToolchainError(f"NVRTC does not tell its version (error {int(status)}): {INSTALL}")
    package = "system"
    for name in ("nvidia-cuda-nvrtc", f"nvidia-cuda-nvrtc-cu{major}"):
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        if version.startswith(f"{major}.{minor}."):
            package = f"{name} {version}"
    return f"NVRTC {major}.{minor}", package


@cache
def include_folders(headers: tuple[str, ...]) -> tuple[Path, ...]:
    """Return the folders that hold the CUDA headers, in search order; () if none is needed.

    Raises:
        ToolchainError: when one of ``headers`` is in none of them.
    """
    if not headers:
        return ()
    found = [pathfinder.find_nvidia_header_directory(name) for name in ("cudart", "nvcc")]
    home = pathfinder.get_cuda_path_or_home()
    folders = [Path(folder) for folder in found if folder] + ([Path(home) / "include"] if home else [])
    folders = [folder for folder in dict.fromkeys(folders) if folder.is_dir()]
    for header in headers:
        if not any((folder / header).is_file() for folder in folders):
            places = ", ".join(str(folder) for folder in folders) or "no CUDA header folder"
            raise ToolchainError(f"<{header}> is not installed (looked in {places}): {INSTALL}")
    return tuple(folders)


@cache
def headers_digest(headers: tuple[str, ...]) -> str:
    """Return the SHA-256 of every file that ``headers`` include, directly or not."""
    folders = include_folders(headers)
    digest = hashlib.sha256()
    for name, content in sorted(_transitive(headers, folders).items()):
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _transitive(headers: Iterable[str], folders: tuple[Path, ...]) -> dict[str, bytes]:
    """Return name -> content of the headers reachable by #include, whatever the preprocessor would skip."""
    contents: dict[str, bytes] = {}
    todo = list(headers)
    while todo:
        name = todo.pop()
        path = next((folder / name for folder in folders if (folder / name).is_file()), None)
        if path is None or name in contents:
            continue
        contents[name] = path.read_bytes()
        for include in re.findall(rb'^\s*#\s*include\s*[<"]([^>"]+)[>"]', contents[name], re.MULTILINE):
            inner = include.decode()
            todo += [inner, (Path(name).parent / inner).as_posix()]
    return contents


@cache
def cuobjdump() -> str:
    """Return the path of the disassembler.

    Raises:
        ToolchainError: when it is not installed.
    """
    path = pathfinder.find_nvidia_binary_utility("cuobjdump")
    if path is None:
        raise ToolchainError(f"cuobjdump, which counts a cubin's instructions, is not installed: {INSTALL}")
    return str(path)
