"""Comparison of an attestation with a tree, and with freshly compiled kernels."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from codegen.errors import CodegenError, FileError, MissingFileError
from codegen.files import is_file, read_bytes
from codegen.library import find_spec
from codegen.receipts import read_receipt, receipt_path, source_sha256
from codegen.render import generate, render
from codegen.wording import in_shell, one_line, shown
from runtime.compile import toolchain
from runtime.compile.compiler import OPTIONS, run_nvrtc
from runtime.errors import ToolchainError
from runtime.tools.attest.statement import CODE, CUBINS, SBOM, Statement, code_sha256, sha256_of

FOLDERS = ("specs", "templates", "generated")
"""Folders of a tree whose files are attested individually."""
MOST_BYTES = 16 << 20
MOST_OF_WHEEL = 512 << 20
CODE_SUFFIXES = (".cubin", ".ptx")
State = Literal["ok", "changed", "missing", "not attested"]


@dataclass(frozen=True)
class Finding:
    """The state of an attested artifact, or of one that should be attested.

    Attributes:
        name: its name in the statement.
        state: ``ok``; ``changed``: the hash differs; ``missing``: the artifact does not exist, or the statement does
            not name code of a wheel; ``not attested``: the statement does not name a source of the tree, which is not a
            failure.
    """

    name: str
    state: State

    @property
    def failed(self) -> bool:
        """Whether verification failed."""
        return self.state in ("changed", "missing")


def files_of(statement: Statement, place: Path) -> dict[str, str]:
    """Hashes of the files that a statement names, products and materials.

    Raises:
        FileError: for a name that cannot be in a tree, a name with two hashes, or a kernel without a cubin.
    """
    materials = [each for each in statement.definition.resolvedDependencies if _is_of_the_tree(each.name)]
    found: dict[str, str] = {}
    for name, digest in ((each.name, each.digest) for group in (statement.subject, materials) for each in group):
        if not (_is_of_the_tree(name) or name == SBOM or name.startswith(CUBINS)):
            raise FileError(place, f"names {shown(name)}, which is not a file of a tree")
        if digest.sha256 is None or found.setdefault(name, digest.sha256) != digest.sha256:
            raise FileError(place, f"has {'two hashes' if name in found else 'no sha256'} of {one_line(name)}")
    for stem in statement.definition.externalParameters.kernels:
        if f"{CUBINS}{stem}.cubin" not in found:
            raise FileError(place, f"names no cubin of {shown(stem)}")
    return found


def _is_of_the_tree(name: str) -> bool:
    parts = PurePosixPath(name).parts
    return name == CODE or (len(parts) > 1 and parts[0] in FOLDERS and ".." not in parts and "\0" not in name)


def compared(hashes: Mapping[str, str], tree: Path, code: Path, beside: Path) -> Iterator[Finding]:
    """Findings about the attested files, then about sources that are not attested.

    Args:
        hashes: result of ``files_of``; cubins are not in the tree, and are skipped.
        tree: the folder with specs/, templates/ and generated/.
        code: the folder of the generator's code.
        beside: the folder of the attestation and the bill of materials.
    """
    for name, sha256 in hashes.items():
        if not name.startswith(CUBINS):
            yield Finding(name, _state(name, sha256, tree, code, beside))
    for path in sorted((tree / "generated").rglob("*.cu")):
        name = path.relative_to(tree).as_posix()
        if name not in hashes:
            yield Finding(name, "not attested")


def _state(name: str, sha256: str, tree: Path, code: Path, beside: Path) -> State:
    try:
        if name == CODE:
            found = code_sha256(code)
        else:
            found = sha256_of(read_bytes((beside if name == SBOM else tree) / name, MOST_BYTES))
    except MissingFileError:
        return "missing"
    return "ok" if found == sha256 else "changed"


def compared_code(hashes: Mapping[str, str], place: Path, tree: Path) -> Iterator[Finding]:
    """Findings about each compiled kernel of a wheel or a folder.

    Cubins are attested directly; PTX is attested through the receipts.

    Args:
        hashes: result of ``files_of``.
        place: a wheel built by scripts/cubin_wheel.py, or a folder with its files.
        tree: the folder with generated/.

    Raises:
        FileError: if it is neither, or has no compiled kernel.
    """
    code = dict(_code_in(place))
    if not code:
        raise FileError(
            place, "has no cubin; expected a wheel built by scripts/cubin_wheel.py, or a folder with its files"
        )
    for name, data in sorted(code.items()):
        stem, kind = PurePosixPath(name).stem, PurePosixPath(name).suffix
        known = hashes.get(f"{CUBINS}{stem}.cubin") if kind == ".cubin" else _attested_ptx(stem, hashes, tree)
        yield Finding(name, "missing" if known is None else "ok" if known == sha256_of(data) else "changed")


def _attested_ptx(stem: str, hashes: Mapping[str, str], tree: Path) -> str | None:
    """The hash of a kernel's PTX in its receipt; None if the kernel does not exist, or its receipt is not attested."""
    try:
        named = find_spec(stem)
    except CodegenError:
        return None
    path = receipt_path(named, tree / "generated")
    attested = hashes.get(path.relative_to(tree).as_posix())
    if attested is None or not is_file(path) or sha256_of(read_bytes(path, MOST_BYTES)) != attested:
        return None
    return read_receipt(named, path).cubin.ptx_sha256


def _code_in(place: Path) -> Iterator[tuple[str, bytes]]:
    """The compiled kernels of a wheel or a folder, by name."""
    if place.is_dir():
        for path in place.iterdir():
            if path.suffix in CODE_SUFFIXES:
                yield path.name, read_bytes(path, MOST_BYTES)
        return
    data = read_bytes(place, MOST_OF_WHEEL)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for entry in archive.infolist():
                name = PurePosixPath(entry.filename)
                if name.suffix in CODE_SUFFIXES and entry.file_size <= MOST_BYTES:
                    yield name.name, archive.read(entry)
    except (zipfile.BadZipFile, RuntimeError, NotImplementedError, zlib.error) as error:
        raise FileError(place, f"is no wheel: {error}") from None


def sample(kernels: Sequence[str], count: int, turn: int) -> list[str]:
    """The kernels to compile in a turn. Successive turns take successive kernels, so that all are compiled in time."""
    names = sorted(set(kernels))
    count = min(count, len(names))
    return [names[(turn * count + i) % len(names)] for i in range(count)]


def check_compiler(statement: Statement) -> None:
    """Refuse to rebuild with another compiler than that of the attested cubins.

    Raises:
        ToolchainError: with the command that installs the attested compiler.
    """
    wanted, here = statement.definition.internalParameters.compiler, toolchain.compiler_version()[1]
    if wanted != here:
        told = f"the attested cubins were compiled by {one_line(wanted)}, this is {here}"
        remedy = f": pip install {in_shell(wanted.replace(' ', '=='))}" if wanted.startswith("nvidia-") else ""
        raise ToolchainError(told + remedy)


def rebuilt(stem: str, hashes: Mapping[str, str]) -> Finding:
    """Render and compile a kernel again, without the cache, and compare source and cubin with the attested ones."""
    try:
        named = find_spec(stem)
    except CodegenError:
        return Finding(f"{CUBINS}{stem}.cubin", "missing")
    made = generate(named)
    if hashes.get(named.source_file) != source_sha256(render(named.main)):
        return Finding(named.source_file, "changed")
    options = (f"--gpu-architecture={made.plan.arch.name}", *OPTIONS)
    code, _ = run_nvrtc(made.source, named.source_file, "cubin", options, made.plan.headers)
    name = f"{CUBINS}{stem}.cubin"
    return Finding(name, "ok" if hashes[name] == sha256_of(code) else "changed")
