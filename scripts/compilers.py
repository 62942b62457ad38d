"""Compiles every shipped kernel with other versions of NVRTC, and records which kernels spill registers.

    python scripts/compilers.py --folder /tmp/nvrtc                       # versions in the record
    python scripts/compilers.py --folder /tmp/nvrtc 12.6.85 13.5.37       # and these versions

The record is runtime/compile/compilers.json, which ``codegen doctor`` and ``codegen compile`` read. pip installs each
version into its own folder. Compilations in the record or in ``results.jsonl`` of the folder are not repeated, so that
an interrupted run continues, and a new or changed kernel only costs its own compilations.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from codegen.errors import CodegenError  # noqa: E402
from codegen.files import write_if_changed  # noqa: E402
from codegen.json_rows import json_rows  # noqa: E402
from codegen.library import NamedSpec, shipped_specs  # noqa: E402
from codegen.prune import without_comments  # noqa: E402
from codegen.receipts import MissingReceipt, Receipt, read_receipt, receipt_path, source_sha256  # noqa: E402
from codegen.render import Generated, generate  # noqa: E402
from runtime.compile import child, compilers, inspection  # noqa: E402
from runtime.compile.compiler import options_of  # noqa: E402


@dataclass(frozen=True)
class Compiler:
    """An installed NVRTC.

    Attributes:
        version: version of its package.
        library: path of the library.
        folders: folders of its CUDA headers.
    """

    version: str
    library: Path
    folders: tuple[Path, ...]


def packages(version: str) -> list[str]:
    """The packages of an NVRTC and of CUDA's headers, as requirements of pip."""
    major, minor, _ = version.split(".")
    suffix, headers = ("-cu12", "nvidia-cuda-nvcc-cu12") if major == "12" else ("", "nvidia-cuda-crt")
    wanted = f"=={major}.{minor}.*"
    return [f"nvidia-cuda-nvrtc{suffix}=={version}", f"nvidia-cuda-runtime{suffix}{wanted}", f"{headers}{wanted}"]


def installed(version: str, folder: Path) -> Compiler:
    """The NVRTC of a version; pip installs it if the folder does not have it."""
    place = folder / version
    if not place.is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(place)]
        subprocess.run([*command, *packages(version)], check=True)
    (library,) = place.glob("nvidia/*/lib/libnvrtc.so.*")
    return Compiler(version, library, tuple(sorted(place.glob("nvidia/*/include"))))


def code_of(generated: Generated) -> str:
    """SHA-256 of a kernel's source without comments, so that edits of comments need no compilation."""
    return source_sha256(without_comments(generated.source))


def outcome(compiler: Compiler, generated: Generated) -> dict[str, Any]:
    """Result of the compilation of a kernel: registers and spill bytes, or the first error."""
    stem = generated.named.stem
    request = {
        "library": child.text_of(compiler.library),
        "folders": [child.text_of(folder) for folder in compiler.folders],
        "headers": generated.plan.headers,
        "source": generated.source,
        "name": generated.named.source_file,
        "target": "cubin",
        "options": options_of(generated.plan),
    }
    told, _ = child.ask(request, stem)
    row = {"version": compiler.version, "kernel": stem, "code": code_of(generated)}
    if told["status"]:
        lines = [line for line in told["log"].splitlines() if "error" in line]
        return {**row, "refused": (lines or [told["error"]])[0]}
    used = inspection.told_by_compiler(stem, told["log"])
    return {**row, "registers": used.registers, "spills": used.spill_bytes}


def rows_of(record: compilers.CompilerRecord) -> Iterator[dict[str, Any]]:
    """The results that a record contains, without registers."""
    for version in record.versions:
        spills, refused = record.spills.get(version, {}), record.refused.get(version, {})
        for stem, code in record.code.items():
            row = {"version": version, "kernel": stem, "code": code}
            yield {**row, "refused": refused[stem]} if stem in refused else {**row, "spills": spills.get(stem, 0)}


class Results:
    """Results by version and code, stored in a file; those of a record first."""

    def __init__(self, path: Path, record: compilers.CompilerRecord | None = None) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path.is_file() else []
        rows = [*rows_of(record), *map(json.loads, lines)] if record else map(json.loads, lines)
        self.rows = {(row["version"], row["code"]): row for row in rows}

    def add(self, row: dict[str, Any]) -> None:
        """Store a result."""
        self.rows[row["version"], row["code"]] = row
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def receipt_of(named: NamedSpec) -> Receipt | None:
    """Receipt of a shipped kernel, or None."""
    try:
        return read_receipt(named, receipt_path(named))
    except MissingReceipt:
        return None


def registers_of(generated: Generated) -> int:
    """Registers per thread in the receipt of a kernel; the maximum if it has no receipt."""
    receipt = receipt_of(generated.named)
    return receipt.cubin.registers if receipt else 255


def todo(kernels: list[Generated], versions: list[str], results: Results) -> Iterator[tuple[str, Generated]]:
    """Missing compilations: all versions of a kernel before the next kernel."""
    for generated in kernels:
        for version in versions:
            if (version, code_of(generated)) not in results.rows:
                yield version, generated


def recorded(
    kernels: Sequence[Generated], versions: Sequence[str], rows: Mapping[tuple[str, str], Mapping[str, Any]]
) -> compilers.CompilerRecord:
    """The record of results by version and code.

    Args:
        kernels: the shipped kernels.
        versions: versions that compiled all of them.
        rows: results with ``spills``, or ``refused`` if a kernel does not compile.

    Raises:
        CodegenError: if the receipts have several compilers.
    """
    receipts = [receipt for each in kernels if (receipt := receipt_of(each.named))]
    packages = sorted({receipt.cubin.compiler_package for receipt in receipts})
    if len(packages) != 1:
        raise CodegenError(
            f"receipts have several compilers, {', '.join(packages)}: verify all kernels with one of them"
        )
    code = {each.named.stem: code_of(each) for each in kernels}

    def of(field: str) -> dict[str, dict[str, Any]]:
        found = {version: {stem: rows[version, sha].get(field) for stem, sha in code.items()} for version in versions}
        told = {version: {stem: value for stem, value in each.items() if value} for version, each in found.items()}
        return {version: each for version, each in told.items() if each}

    return compilers.CompilerRecord(
        compiler=packages[0], versions=tuple(versions), spills=of("spills"), refused=of("refused"), code=code
    )


def main() -> None:
    """Run the missing compilations, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", help="versions of the package, such as 13.5.37")
    parser.add_argument("--folder", type=Path, required=True, help="folder for the compilers and the results")
    parser.add_argument("--jobs", type=int, default=2, help="parallel compilations")
    arguments = parser.parse_args()
    record = compilers.record() if compilers.RECORD.is_file() else None
    versions = sorted({*(record.versions if record else ()), *arguments.versions}, key=compilers.numbers)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    compiler = {version: installed(version, arguments.folder) for version in versions}
    results = Results(arguments.folder / "results.jsonl", record)
    kernels = [generate(named) for named in shipped_specs()]
    likeliest = sorted(kernels, key=registers_of, reverse=True)
    work = list(todo(likeliest, versions, results))
    with ThreadPoolExecutor(arguments.jobs) as pool:
        rows = pool.map(lambda pair: outcome(compiler[pair[0]], pair[1]), work)
        for count, row in enumerate(rows, 1):
            results.add(row)
            print(f"{count}/{len(work)} {row}", flush=True)
    found = recorded(kernels, versions, results.rows)
    write_if_changed(compilers.RECORD, json_rows(found.model_dump(mode="json")))


if __name__ == "__main__":
    main()
