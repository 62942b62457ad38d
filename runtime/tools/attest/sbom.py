"""A software bill of materials in CycloneDX 1.6 (cyclonedx.org/docs/1.6/json): packages, compiler, kernels."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from codegen import __version__
from runtime.errors import ToolchainError

PACKAGE = "sparse-kernel-codegen"
TOOLS = ("nvidia-cuda-nvrtc", "nvidia-cuda-runtime", "nvidia-cuda-crt")
"""Packages of the compiler, which are in an extra and not among the dependencies."""


def sbom(files: Mapping[str, str]) -> dict[str, Any]:
    """The bill of materials: this package, its dependencies with their installed versions, and files by hash.

    It has no date and no serial number, so that the bytes are reproducible.

    Args:
        files: SHA-256 of sources and cubins by name.

    Raises:
        ToolchainError: if this package is not installed, so that its dependencies are unknown.
    """
    needs = _needs(PACKAGE)
    names = _closure(needs)
    components = [_library(name) for name in names]
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {**_component(PACKAGE, __version__), "licenses": [{"license": {"id": "Apache-2.0"}}]}
        },
        "components": [*components, *(_file(name, sha256) for name, sha256 in files.items())],
        "dependencies": [
            {"ref": purl(PACKAGE, __version__), "dependsOn": sorted(map(_reference, {*needs, *_tools()}))},
            *(_dependency(name, names) for name in names),
        ],
    }


def purl(name: str, version: str) -> str:
    """The package URL of a PyPI package (github.com/package-url/purl-spec)."""
    return f"pkg:pypi/{canonicalize_name(name)}@{version}"


def _needs(name: str) -> list[str]:
    """Installed packages that a package requires, by its markers and without extras; [] if it is not installed."""
    try:
        told = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        if name == PACKAGE:
            raise ToolchainError(f"{PACKAGE} is not installed, only found on sys.path: pip install -e .") from None
        return []
    asked = [Requirement(line) for line in told]
    here = [each for each in asked if each.marker is None or each.marker.evaluate({"extra": ""})]
    return sorted({canonicalize_name(each.name) for each in here if _is_installed(each.name)})


def _tools() -> list[str]:
    return [name for name in TOOLS if _is_installed(name)]


def _closure(names: Iterable[str]) -> list[str]:
    """Packages with their transitive dependencies, sorted."""
    found, waiting = set(_tools()), [*names, *_tools()]
    while waiting:
        name = waiting.pop()
        found.add(name)
        waiting += [each for each in _needs(name) if each not in found]
    return sorted(found)


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _reference(name: str) -> str:
    return purl(name, metadata.version(name))


def _dependency(name: str, known: Iterable[str]) -> dict[str, Any]:
    return {"ref": _reference(name), "dependsOn": sorted(_reference(each) for each in _needs(name) if each in known)}


def _library(name: str) -> dict[str, Any]:
    told = metadata.metadata(name)
    component = _component(told["Name"], told["Version"])
    license = next(iter(told.get_all("License-Expression") or ()), "")
    return {**component, "licenses": [{"expression": license}]} if license else component


def _component(name: str, version: str) -> dict[str, Any]:
    reference = purl(name, version)
    return {"type": "library", "bom-ref": reference, "name": name, "version": version, "purl": reference}


def _file(name: str, sha256: str) -> dict[str, Any]:
    reference = f"file:{re.sub(r'[^A-Za-z0-9._/-]', '_', name)}"
    return {"type": "file", "bom-ref": reference, "name": name, "hashes": [{"alg": "SHA-256", "content": sha256}]}
