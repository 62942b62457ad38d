"""Builds a wheel with the compiled code of all shipped kernels, so that their first call need not compile.

    python scripts/cubin_wheel.py --out dist

Every file must match the hash in the receipt of its kernel, so the compiler must be that of the receipts. The wheel is
reproducible byte for byte: it does not depend on a clock, a host, or a compressor.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import io
import sys
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from codegen import __version__  # noqa: E402
from codegen.errors import CodegenError  # noqa: E402
from codegen.library import NamedSpec, find_spec, shipped_specs  # noqa: E402
from codegen.render import generate  # noqa: E402
from runtime.compile import compilers, prebuilt, toolchain  # noqa: E402
from runtime.compile.compiler import Target, compile_spec  # noqa: E402

NAME = "sparse_kernel_codegen_cubins"
DATE = (1980, 1, 1, 0, 0, 0)
"""Date of each file in the wheel: the earliest of zip files."""
METADATA = """\
Metadata-Version: 2.1
Name: sparse-kernel-codegen-cubins
Version: {version}
Summary: Compiled kernels of sparse-kernel-codegen {version}
License: Apache-2.0
Requires-Python: >=3.11
Requires-Dist: sparse-kernel-codegen

Machine code (sm_90a, sm_89) and PTX (sm_89) of the kernels that sparse-kernel-codegen {version} ships, compiled by
{compiler}. The package finds it automatically, and uses a file only if it matches the hash in the kernel's receipt.
"""
WHEEL = """\
Wheel-Version: 1.0
Generator: scripts/cubin_wheel.py
Root-Is-Purelib: true
Tag: py3-none-any
"""
MODULE = '"""Compiled kernels of sparse-kernel-codegen, which reads the files beside this one."""\n'


def targets_of(named: NamedSpec) -> tuple[Target, ...]:
    """Targets of a kernel: a cubin, and PTX if newer GPUs can run it."""
    return ("cubin", "ptx") if generate(named).plan.arch.forward_compatible else ("cubin",)


def code_of(named: NamedSpec, target: Target) -> bytes:
    """Code of a kernel, from the cache or NVRTC.

    Raises:
        CodegenError: if it does not match the receipt.
    """
    compiled = compile_spec(named, target)
    if why := prebuilt.disagreement(compiled.generated, target, compiled.code):
        raise CodegenError(f"{named.stem}: its {target} cannot go into the wheel: {why}")
    return compiled.code


def check_compiler() -> None:
    """Reject a compiler other than that of the receipts, before anything is compiled.

    Raises:
        CodegenError: gives the command that installs the right one.
    """
    if told := compilers.caveat():
        raise CodegenError(told)


def files_of(kernels: Iterable[NamedSpec]) -> dict[str, bytes]:
    """Files of the wheel by name, without its RECORD.

    Raises:
        CodegenError: for a kernel whose code does not match its receipt.
    """
    check_compiler()
    pairs = [(named, target) for named in kernels for target in targets_of(named)]
    code = {f"{NAME}/{named.stem}.{target}": code_of(named, target) for named, target in pairs}
    told = METADATA.format(version=__version__, compiler=toolchain.compiler_version()[1])
    about = f"{NAME}-{__version__}.dist-info"
    texts = {f"{NAME}/__init__.py": MODULE, f"{about}/METADATA": told, f"{about}/WHEEL": WHEEL}
    return {**code, **{name: text.encode() for name, text in texts.items()}}


def record_of(files: Mapping[str, bytes], name: str) -> bytes:
    """The RECORD of a wheel: hash and size of each file, and RECORD itself."""
    lines = [f"{each},sha256={_base64(data)},{len(data)}" for each, data in sorted(files.items())]
    return "\n".join([*lines, f"{name},,", ""]).encode()


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def wheel_of(files: Mapping[str, bytes]) -> bytes:
    """Bytes of the wheel: sorted files, uncompressed, as compressors differ between versions."""
    record = f"{NAME}-{__version__}.dist-info/RECORD"
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name, data in [*sorted(files.items()), (record, record_of(files, record))]:
            entry = zipfile.ZipInfo(name, DATE)
            entry.create_system, entry.external_attr = 3, 0o100644 << 16  # Unix attributes, on every system
            archive.writestr(entry, data)
    return out.getvalue()


def build(out: Path, kernels: Iterable[NamedSpec]) -> Path:
    """Write the wheel into a folder, and return its path.

    Raises:
        CodegenError: for a kernel whose code does not match its receipt.
    """
    data = wheel_of(files_of(kernels))
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{NAME}-{__version__}-py3-none-any.whl"
    path.write_bytes(data)
    return path


def main() -> None:
    """Build the wheel."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", nargs="*", metavar="KERNEL", help="names of shipped kernels; all by default")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the wheel")
    arguments = parser.parse_args()
    try:
        path = build(arguments.out, [find_spec(name) for name in arguments.kernels] or shipped_specs())
    except CodegenError as error:
        parser.exit(1, f"error: {error}\n")
    print(f"{path}: {path.stat().st_size} bytes, SHA-256 {hashlib.sha256(path.read_bytes()).hexdigest()}")


if __name__ == "__main__":
    main()
