"""Statements of attestations: in-toto (in-toto.io/Statement/v1) with SLSA 1.0 provenance."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

import codegen
from codegen import __version__
from codegen.errors import CodegenError, FileError
from codegen.files import is_file, read_bytes
from codegen.freshness import check_sources
from codegen.library import GENERATED, ROOT, SPECS, TEMPLATES, NamedSpec
from codegen.plain import first_reason
from codegen.receipts import Sha256, receipt_path, source_sha256
from codegen.render import render
from runtime.compile import toolchain
from runtime.compile.compiler import Compiled, compile_spec
from runtime.tools.attest.sbom import PACKAGE, TOOLS, purl, sbom

STATEMENT = "https://in-toto.io/Statement/v1"
PROVENANCE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = f"urn:{PACKAGE}:build:1"
"""Build type: ``codegen render`` makes sources from specs and templates, and NVRTC makes cubins from sources."""
BUILDER = f"urn:{PACKAGE}:codegen-attest"
"""Builder: a person's command, not a build service: SLSA level 1 (provenance exists), signed by the person's key."""
SBOM = "sbom.cdx.json"
CUBINS = "cubin/"
"""Prefix of the names of cubins, which are not in the tree; verification compiles them again."""


CODE = "codegen/**/*.py"
"""Name of the generator's code, which is one material as a whole."""
PACKAGE_FOLDER = Path(codegen.__file__).parent
MOST_OF_LIBRARY = 512 << 20  # bytes: NVRTC 13 has 109 MB


class _Read(BaseModel):
    model_config = ConfigDict(strict=True)


class Digest(_Read):
    """Hashes of an artifact."""

    sha256: Sha256 | None = None
    gitCommit: str | None = Field(default=None, max_length=64)


class Resource(_Read):
    """An input of a build."""

    name: Annotated[str, Field(max_length=1000)] = ""
    uri: Annotated[str, Field(max_length=1000)] = ""
    digest: Digest = Digest()


class Subject(_Read):
    """An output of a build."""

    name: Annotated[str, Field(min_length=1, max_length=1000)]
    digest: Digest


class Parameters(_Read):
    """External parameters of the build."""

    kernels: Annotated[list[str], Field(min_length=1)]


class Internal(_Read):
    """Internal parameters of the build."""

    compiler: str
    options: list[str]


class Definition(_Read):
    """The inputs of the build."""

    buildType: str
    externalParameters: Parameters
    internalParameters: Internal
    resolvedDependencies: list[Resource]


class Predicate(_Read):
    """The provenance."""

    buildDefinition: Definition


class Statement(_Read):
    """A statement as read from a file; unknown fields are ignored."""

    type_: Literal["https://in-toto.io/Statement/v1"] = Field(alias="_type")
    predicateType: Literal["https://slsa.dev/provenance/v1"]
    subject: Annotated[list[Subject], Field(min_length=1)]
    predicate: Predicate

    @property
    def definition(self) -> Definition:
        """The inputs of the build."""
        return self.predicate.buildDefinition


@dataclass(frozen=True)
class Tree:
    """The attested tree: its commit, or "" outside a repository, and the files that differ from it."""

    commit: str = ""
    changed: tuple[str, ...] = ()


def statement_of(value: Any, path: Path) -> Statement:
    """A validated statement from a file.

    Raises:
        FileError: if it is not a statement, or not one about these kernels.
    """
    try:
        found = Statement.model_validate(value)
    except ValidationError as error:
        raise FileError(path, f"is no statement with provenance: {first_reason(error)}") from None
    if found.definition.buildType != BUILD_TYPE:
        raise FileError(path, f"has another build type: {found.definition.buildType}")
    return found


def sha256_of(data: bytes) -> str:
    """Digest of subjects and materials."""
    return hashlib.sha256(data).hexdigest()


def code_sha256(folder: Path) -> str:
    """Hash of a folder of Python files: names, sizes and contents, in order."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py"), key=lambda path: path.relative_to(folder).as_posix()):
        content = read_bytes(path)
        digest.update(f"{path.relative_to(folder).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def attested(compiled: Sequence[Compiled], tree: Tree) -> tuple[dict[str, Any], str]:
    """The statement about compiled kernels, and the text of its bill of materials."""
    made: dict[str, str] = {}
    for each in compiled:
        named = each.named
        made[named.source_file] = source_sha256(render(named.main))
        receipt = receipt_path(named)
        if is_file(receipt):
            made[_name(receipt)] = sha256_of(read_bytes(receipt))
        made[f"{CUBINS}{named.stem}.cubin"] = sha256_of(each.code)
    bill = json.dumps(sbom(made), indent=2) + "\n"
    made[SBOM] = sha256_of(bill.encode())
    statement = {
        "_type": STATEMENT,
        "subject": [{"name": name, "digest": {"sha256": sha256}} for name, sha256 in made.items()],
        "predicateType": PROVENANCE,
        "predicate": {"buildDefinition": _definition(compiled, tree), "runDetails": _run_details()},
    }
    return statement, bill


def _definition(compiled: Sequence[Compiled], tree: Tree) -> dict[str, Any]:
    options = dict.fromkeys(option for each in compiled for option in each.options)
    return {
        "buildType": BUILD_TYPE,
        "externalParameters": {"kernels": [each.named.stem for each in compiled]},
        "internalParameters": {
            "compiler": toolchain.compiler_version()[1],
            "options": [*options],
            "changedFiles": [*tree.changed],
        },
        "resolvedDependencies": [
            *([{"name": "source tree", "digest": {"gitCommit": tree.commit}}] if tree.commit else []),
            *_materials(compiled),
            {"name": CODE, "digest": {"sha256": code_sha256(PACKAGE_FOLDER)}},
            *_packages(compiled),
        ],
    }


def _materials(compiled: Iterable[Compiled]) -> list[dict[str, Any]]:
    """The specs and templates of the sources, by hash."""
    files = {SPECS / each.named.subfolder / f"{each.named.main.stem}.yaml" for each in compiled}
    for each in compiled:
        files |= {TEMPLATES / name for name in each.generated.templates}
    return [{"name": _name(path), "digest": {"sha256": sha256_of(read_bytes(path))}} for path in sorted(files)]


def _packages(compiled: Iterable[Compiled]) -> list[dict[str, Any]]:
    """The generator, the compiler and the headers."""
    nvrtc = toolchain.nvrtc()
    name, _, version = nvrtc.package.partition(" ")
    library = sha256_of(read_bytes(nvrtc.library, MOST_OF_LIBRARY))
    compiler = {"uri": purl(name, version)} if name in TOOLS or name.startswith("nvidia-") else {}
    headers = sorted({each.plan.headers for each in compiled if each.plan.headers})
    return [
        {"name": PACKAGE, "uri": purl(PACKAGE, __version__)},
        {"name": nvrtc.library.name, **compiler, "digest": {"sha256": library}},
        *(
            {"name": f"headers: {', '.join(each)}", "digest": {"sha256": toolchain.headers_digest(each)}}
            for each in headers
        ),
    ]


def _run_details() -> dict[str, Any]:
    return {"builder": {"id": BUILDER, "version": {PACKAGE: __version__}}}


def _name(path: Path) -> str:
    """Name of a file in a statement, relative to the root of the tree."""
    return path.relative_to(ROOT).as_posix()


def compiled_for(named: NamedSpec) -> Compiled:
    """A kernel that can be attested: shipped, with an up-to-date source, compiled with the installed compiler.

    Raises:
        CodegenError: if it cannot be attested.
    """
    if not named.is_shipped:
        raise CodegenError(f"{named.stem} is not shipped: only kernels in specs/ and generated/ are attested")
    compiled = compile_spec(named)
    if problems := check_sources(GENERATED, [named.main, named]):
        raise CodegenError(str(problems[0]))
    return compiled
