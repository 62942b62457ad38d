"""``codegen doctor``: checks of the machine for rendering, compiling and running kernels, and their fixes."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import codegen
from codegen.arch import ARCHS
from codegen.errors import CodegenError
from codegen.installation import install_command
from codegen.wording import plural
from runtime.compile import compilers, inspection, prebuilt, toolchain
from runtime.compile.cache import KernelCache
from runtime.compile.compiler import run_nvrtc
from runtime.driver.api import call, driver
from runtime.errors import NoJitError, ToolchainError

HEADERS = ("cuda_fp16.h", "cuda_bf16.h", "mma.h")
PACKAGE = "sparse-kernel-codegen"
_SAMPLE = '#include <cuda_fp16.h>\nextern "C" __global__ void sample(half* p) { *p = __float2half(1.0f); }\n'
State = Literal["ok", "note", "wrong"]


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Attributes:
        state: ``ok``; ``note`` if something is missing that only some commands need; ``wrong``.
        told: the finding.
        remedy: the fix; "" if none is needed.
    """

    state: State
    told: str
    remedy: str = ""


def versions() -> Finding:
    """Look at Python, this package and those it needs."""
    told = f"{PACKAGE} {codegen.__version__} in {_root()}, Python {platform.python_version()}"
    try:
        installed, needs = importlib.metadata.version(PACKAGE), importlib.metadata.requires(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return Finding("note", f"{told}, not installed: found on sys.path", f"pip install -e {_root()}")
    found = {name: _version(name) for name in sorted(re.split("[^A-Za-z0-9._-]", n)[0] for n in needs if ";" not in n)}
    told = ", ".join([told, *(f"{name} {version}" for name, version in found.items() if version)])
    if missing := [name for name, version in found.items() if not version]:
        return Finding("wrong", f"{told}; missing: {', '.join(missing)}", f"pip install {' '.join(missing)}")
    if installed != codegen.__version__:
        return Finding("note", f"{told}; the installed package is {installed}", "see the line of names")
    return Finding("ok", told)


def names() -> Finding:
    """Look for another ``codegen`` or ``runtime`` that an import may find instead of this package's."""
    entries = dict.fromkeys([str(Path.cwd()), *(entry for entry in sys.path if isinstance(entry, str))])
    others = [
        place
        for name in ("codegen", "runtime")
        for entry in entries
        for place in (Path(entry) / name / "__init__.py", Path(entry) / f"{name}.py")
        if place.is_file() and place.resolve() != _root() / name / "__init__.py"
    ]
    if not others:
        return Finding("ok", "no other package is called codegen or runtime")
    packages = importlib.metadata.packages_distributions()
    owners = {owner for name in ("codegen", "runtime") for owner in packages.get(name, ())} - {PACKAGE}
    remedy = f"pip uninstall {' '.join(sorted(owners))}, or " if owners else ""
    return Finding(
        "note",
        f"same name as this package: {', '.join(map(str, others))}; Python imports the first on sys.path",
        f"{remedy}rename it, or remove its folder from PYTHONPATH and sys.path",
    )


def compiler() -> Finding:
    """Compile a small kernel."""
    found = toolchain.nvrtc()
    new = [arch.name for arch in ARCHS.values() if found.version < arch.since_cuda]
    known = [name for name in ARCHS if name not in new]
    run_nvrtc('extern "C" __global__ void sample() {}', "sample.cu", "cubin", (f"--gpu-architecture={known[-1]}",))
    if new:
        remedy = toolchain.newer_nvrtc(max(ARCHS[name].since_cuda for name in new))
        return Finding("note", f"{found}, too old for {', '.join(new)}", remedy)
    if found.package == compilers.record().compiler:
        return Finding("ok", str(found))
    told = f"{found}: {compilers.difference(found.package)}"
    if refused := compilers.troubles(found.package):
        told += f"; refused with it: {refused}"
    return Finding("note", told, compilers.mend())


def headers() -> Finding:
    """Compile a kernel that includes one."""
    folders = toolchain.include_folders(HEADERS)
    run_nvrtc(_SAMPLE, "sample.cu", "cubin", ("--gpu-architecture=sm_80",), ("cuda_fp16.h",))
    return Finding("ok", ", ".join(map(str, folders)))


def disassembler() -> Finding:
    """Disassemble a small kernel."""
    code, _ = run_nvrtc(_SAMPLE, "sample.cu", "cubin", ("--gpu-architecture=sm_80",), ("cuda_fp16.h",))
    inspection.count_instructions(code)
    return Finding("ok", toolchain.cuobjdump())


def cache() -> Finding:
    """Read the cache, and write a file where it is."""
    found = KernelCache()
    count = sum(1 for _ in found.entries())
    there = next(folder for folder in (found.folder, *found.folder.absolute().parents) if folder.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        remedy = "set CODEGEN_CACHE_DIR to a writable folder"
        return Finding("wrong", f"{found.folder} cannot be written ({error.strerror})", remedy)
    return Finding("ok", f"{found.folder}, {plural(count, 'entry')}")


def cubins() -> Finding:
    """Look for compiled kernels that need no compiler."""
    place = prebuilt.folder()
    if place is None:
        return Finding("ok", "no wheel of cubins: the first call, or codegen warm, compiles a kernel")
    count = sum(1 for path in place.iterdir() if path.suffix in (".cubin", ".ptx"))
    told = f"{place}, {plural(count, 'compiled kernel')}"
    version = _version(prebuilt.DISTRIBUTION)
    if not os.environ.get(prebuilt.CUBINS) and version != codegen.__version__:
        remedy = f"pip install '{prebuilt.DISTRIBUTION}=={codegen.__version__}'"
        return Finding("note", f"{told}, of version {version}: cubins without a receipt are ignored", remedy)
    return Finding("ok", told)


def gpu_driver() -> Finding:
    """Ask the driver for its version."""
    try:
        number = call(driver().cuDriverGetVersion)
    except (ImportError, RuntimeError, OSError) as error:  # bindings of a library that is not there
        reason = str(error).splitlines()[0]
        return Finding("note", f"no CUDA driver: kernels compile but cannot run ({reason})", "install NVIDIA's driver")
    version = (number // 1000, number % 1000 // 10)
    told = f"CUDA {version[0]}.{version[1]}"
    try:
        nvrtc = toolchain.nvrtc().version
    except ToolchainError:  # its own line says so
        return Finding("ok", told)
    if version[0] < nvrtc[0]:
        remedy = f"update the driver, or {install_command(f'cu{version[0]}')}"
        return Finding("wrong", f"{told}, which cannot load cubins of NVRTC {nvrtc[0]}.{nvrtc[1]}", remedy)
    if version < nvrtc:
        remedy = f"update the driver, or install NVRTC {version[0]}.{version[1]}"
        return Finding("note", f"{told}, which cannot load PTX of NVRTC {nvrtc[0]}.{nvrtc[1]}; cubins run", remedy)
    return Finding("ok", told)


def gpus() -> Finding:
    """Ask the driver for the GPUs, and whether there are kernels for them."""
    try:
        cuda = driver()
        call(cuda.cuInit, 0)
    except (ImportError, RuntimeError, OSError, CodegenError) as error:
        return Finding("note", f"none usable: {str(error).splitlines()[0]}", "see the line of the driver")
    attribute = cuda.CUdevice_attribute
    found, unfit = [], []
    for number in range(call(cuda.cuDeviceGetCount)):
        device = call(cuda.cuDeviceGet, number)
        name = call(cuda.cuDeviceGetName, 128, device).partition(b"\0")[0].decode()
        major = call(cuda.cuDeviceGetAttribute, attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)
        minor = call(cuda.cuDeviceGetAttribute, attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device)
        found.append(f"{name} ({major}.{minor})")
        if (major, minor) < min(arch.compute_capability for arch in ARCHS.values()):
            unfit.append(found[-1])
    if not found:
        return Finding("note", "none: kernels compile but cannot run", "CUDA_VISIBLE_DEVICES may hide GPUs")
    if unfit:
        return Finding("wrong", f"{', '.join(unfit)}: no kernel runs there", f"use one of {', '.join(ARCHS)}")
    return Finding("ok", ", ".join(found))


def torch() -> Finding:
    """Look at torch, and whether it sees what the driver does."""
    try:
        import torch as found  # noqa: PLC0415 - seconds
    except ImportError as error:
        return Finding("note", f"not installed: kernels compile but do not run ({error})", install_command("torch"))
    told = f"torch {found.__version__}, CUDA {found.version.cuda or 'none'}"
    if found.cuda.is_available():
        return Finding("ok", told)
    if gpus().state == "ok":
        return Finding("wrong", f"{told}, which sees no GPU", "install a build of torch for the driver's CUDA")
    return Finding("note", f"{told}, which sees no GPU", "see the line of the GPU")


LOOKS: dict[str, Callable[[], Finding]] = {
    "versions": versions,
    "names": names,
    "NVRTC": compiler,
    "headers": headers,
    "cuobjdump": disassembler,
    "cache": cache,
    "cubins": cubins,
    "driver": gpu_driver,
    "GPU": gpus,
    "torch": torch,
}


NEED_COMPILER = ("NVRTC", "headers", "cuobjdump")
"""Checks that only compilation needs."""


def look(name: str) -> Finding:
    """Run one check; an error in it is a finding too."""
    try:
        return LOOKS[name]()
    except NoJitError:
        told = "skipped: CODEGEN_NO_JIT=1 forbids compilation"
        return Finding("note", told, "to check it, unset CODEGEN_NO_JIT; exported and cached kernels still load")
    except CodegenError as error:
        told, _, remedy = str(error).partition(": pip install ")
        remedy = f"pip install {remedy}" if remedy else "see the message"
        if name in NEED_COMPILER and prebuilt.is_there():
            return Finding("note", f"{told}; kernels of the wheel of cubins run without it", remedy)
        return Finding("wrong", told, remedy)
    except Exception as error:
        return Finding("wrong", f"{type(error).__name__}: {error}", "reinstall the named package, or report this")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _root() -> Path:
    """Return the folder that this package is in."""
    return Path(codegen.__file__).resolve().parents[1]
