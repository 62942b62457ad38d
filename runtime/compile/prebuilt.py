"""Prebuilt code of shipped kernels: from a wheel installed beside the package, or from a folder.

It is used if its bytes match the hash in the receipt, and the source and the options match the receipt too. Then no
compiler is needed. docs/guide/cache.md describes it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from codegen.errors import CodegenError, FileError
from codegen.files import is_file, read_bytes
from codegen.receipts import ReceiptError, read_receipt, receipt_path, source_sha256
from codegen.render import Generated
from codegen.wording import shown
from runtime.compile.cache import KernelCache
from runtime.compile.cache_entry import Identity, cache_key
from runtime.compile.compiler import Compiled, Target, arch_of, options_of
from runtime.errors import ToolchainError
from runtime.log import logger

PACKAGE = "sparse_kernel_codegen_cubins"
"""The import name of the wheel, in which the files lie as in a folder: ``h100_topk32.cubin``, ``l4_topk32.ptx``."""
DISTRIBUTION = "sparse-kernel-codegen-cubins"
"""The same to pip."""
CUBINS = "CODEGEN_CUBINS"
"""Environment variable: a folder to take code from instead of the wheel, or 0 to take none."""
OF_RECEIPT = "that of the receipt"
"""Stands for compiler and headers in the key of an entry of the cache: nothing needs to be installed to compute it."""
MOST_OF_CODE = 64 << 20
"""Bytes of a file: the largest of the project's own has a third of a MiB."""


_ignored: ContextVar[bool] = ContextVar("ignored", default=False)


@contextmanager
def ignored() -> Iterator[None]:
    """Ignore prebuilt code: for tools that examine the installed compiler."""
    token = _ignored.set(True)
    try:
        yield
    finally:
        _ignored.reset(token)


@dataclass(frozen=True)
class Found:
    """Prebuilt code and its location.

    Attributes:
        code: cubin or PTX.
        place: file or cache entry.
    """

    code: bytes
    place: str


def folder() -> Path | None:
    """Folder of prebuilt code: CODEGEN_CUBINS, else the installed wheel's; None without one.

    Raises:
        ToolchainError: if the variable does not name a folder.
    """
    given = os.environ.get(CUBINS, "")
    if given == "0":
        return None
    if given:
        try:
            place = Path(given).expanduser()
            is_folder = place.is_dir()
        except (OSError, ValueError, RuntimeError):
            is_folder = False
        if not is_folder:
            raise ToolchainError(
                f"{CUBINS} is {shown(given)}; expected a folder of cubins, or 0 to use no prebuilt cubins"
            )
        return place
    found = importlib.util.find_spec(PACKAGE)
    return None if found is None or not found.submodule_search_locations else Path(found.submodule_search_locations[0])


def is_there() -> bool:
    """Whether there is a folder of prebuilt code."""
    try:
        return folder() is not None
    except ToolchainError:
        return False


def find(generated: Generated, target: Target, cache: KernelCache | None = None) -> Compiled | None:
    """Find the code of a shipped kernel in the wheel, in the folder, or in the cache where ``keep`` put it.

    Code that does not match the receipt is ignored, with a line in the log.

    Raises:
        ToolchainError: if CODEGEN_CUBINS has an invalid value.
        CacheError: if the cache cannot be read, or other users could write to it.
    """
    if not generated.named.is_shipped or _ignored.get() or os.environ.get(CUBINS) == "0":
        return None
    for found in _candidates(generated, target, folder(), cache):
        if why := disagreement(generated, target, found.code):
            logger().warning("%s: %s is ignored: %s", generated.named.stem, found.place, why)
            continue
        logger().debug("%s: from %s", generated.named.stem, found.place)
        return _compiled(generated, target, found.code)
    return None


def read(generated: Generated, target: Target, place: Path) -> bytes:
    """Read the code of a shipped kernel from a folder.

    Raises:
        CodegenError: if the file is missing or does not match the receipt.
    """
    stem = generated.named.stem
    if not generated.named.is_shipped:
        raise CodegenError(f"{stem} is not a shipped kernel, so the package has no receipt of its code")
    path = place / f"{stem}.{target}"
    if not is_file(path):
        raise CodegenError(f"{stem}: {path} does not exist")
    code = read_bytes(path, MOST_OF_CODE)
    if why := disagreement(generated, target, code):
        raise CodegenError(f"{stem}: {path} is not used: {why}")
    return code


def keep(generated: Generated, target: Target, code: bytes, cache: KernelCache | None = None) -> bool:
    """Put code that ``read`` returned into the cache, where ``find`` finds it; return whether it was already there.

    Raises:
        CacheError: if the cache cannot be written.
    """
    _, was_there = (cache or KernelCache()).get_or_build(_identity(generated, target), lambda: (code, ""))
    return was_there


def disagreement(generated: Generated, target: Target, code: bytes) -> str:
    """Reason why code does not match the receipt of a shipped kernel; "" if it does."""
    named = generated.named
    try:
        receipt = read_receipt(named, receipt_path(named))
    except ReceiptError as error:
        return f"its receipt cannot be read: {error}"
    if receipt.source.sha256 != source_sha256(generated.source):
        return "its receipt describes another source"
    if receipt.cubin.options != options_of(generated.plan):
        return "its receipt has other compiler options"
    expected = receipt.cubin.sha256 if target == "cubin" else receipt.cubin.ptx_sha256
    found = hashlib.sha256(code).hexdigest()
    if found != expected:
        return f"its SHA-256 is {found}, expected {expected} from the receipt of {receipt.cubin.compiler_package}"
    return ""


def _candidates(generated: Generated, target: Target, place: Path | None, cache: KernelCache | None) -> Iterator[Found]:
    """Unchecked candidates for a kernel's code, in order of preference."""
    path = None if place is None else place / f"{generated.named.stem}.{target}"
    if path is not None and is_file(path):
        try:
            yield Found(read_bytes(path, MOST_OF_CODE), str(path))
        except FileError as error:
            logger().warning("%s: %s", generated.named.stem, error)
    identity = _identity(generated, target)
    kept = cache or KernelCache()
    entry = kept.find(identity)
    if entry is not None:
        yield Found(entry.code, f"the cache {kept.folder}, entry {identity.key}")


def _identity(generated: Generated, target: Target) -> Identity:
    """Cache identity of the code of a kernel's receipt."""
    plan = generated.plan
    key = cache_key(
        spec=plan.spec.canonical_json(),
        source=generated.source,
        compiler=OF_RECEIPT,
        options=options_of(plan, target),
        headers=OF_RECEIPT,
        target=target,
    )
    return Identity(key, generated.named.stem, arch_of(plan, target), target)


def _compiled(generated: Generated, target: Target, code: bytes) -> Compiled:
    """The code as a compiler result; its ``key`` is the hash of the code, not the key of a cache entry."""
    return Compiled(
        generated=generated,
        target=target,
        code=code,
        log="",
        options=options_of(generated.plan, target),
        key=hashlib.sha256(code).hexdigest(),
        was_cached=True,
    )
