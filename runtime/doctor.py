"""``codegen doctor``: what the machine has of what rendering, compiling and running kernels need, and what mends it."""

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
    """What one look found.

    Attributes:
        state: ``ok``; ``note``, where something is not there that only some commands need; ``wrong``.
        told: what was found.
        remedy: what to do about it; "" if all is well.
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
        return Finding("note", f"{told}, which is not installed, only found on sys.path", f"pip install -e {_root()}")
    found = {name: _version(name) for name in sorted(re.split("[^A-Za-z0-9._-]", n)[0] for n in needs if ";" not in n)}
    told = ", ".join([told, *(f"{name} {version}" for name, version in found.items() if version)])
    if missing := [name for name, version in found.items() if not version]:
        return Finding("wrong", f"{told}; without {', '.join(missing)}", f"pip install {' '.join(missing)}")
    if installed != codegen.__version__:
        return Finding("note", f"{told}; the package that is installed is {installed}", "see the names' line")
    return Finding("ok", told)


def names() -> Finding:
    """Look for another ``codegen`` or ``runtime`` that an import may find in place of this package's."""
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
        f"{', '.join(map(str, others))} has the same name, and whichever is first in sys.path is imported",
        f"{remedy}rename it, or leave its folder out of PYTHONPATH and sys.path",
    )


def compiler() -> Finding:
    """Compile a small kernel."""
    found = toolchain.nvrtc()
    new = [arch.name for arch in ARCHS.values() if found.version < arch.since_cuda]
    known = [name for name in ARCHS if name not in new]
    run_nvrtc('extern "C" __global__ void sample() {}', "sample.cu", "cubin", (f"--gpu-architecture={known[-1]}",))
    if new:
        remedy = toolchain.newer_nvrtc(max(ARCHS[name].since_cuda for name in new))
        return Finding("note", f"{found}, which is too old for {', '.join(new)}", remedy)
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
        remedy = "set CODEGEN_CACHE_DIR to a folder that can be written"
        return Finding("wrong", f"{found.folder} cannot be written ({error.strerror})", remedy)
    return Finding("ok", f"{found.folder}, {count} entries")


def cubins() -> Finding:
    """Look for compiled kernels that need no compiler."""
    place = prebuilt.folder()
    if place is None:
        return Finding("ok", "no wheel of cubins: kernels are compiled at their first call, or by codegen warm")
    count = sum(1 for path in place.iterdir() if path.suffix in (".cubin", ".ptx"))
    told = f"{place}, {count} compiled kernels"
    version = _version(prebuilt.DISTRIBUTION)
    if not os.environ.get(prebuilt.CUBINS) and version != codegen.__version__:
        remedy = f"pip install '{prebuilt.DISTRIBUTION}=={codegen.__version__}'"
        return Finding("note", f"{told}, of version {version}: those that receipts do not name are ignored", remedy)
    return Finding("ok", told)


def gpu_driver() -> Finding:
    """Ask the driver for its version."""
    try:
        number = call(driver().cuDriverGetVersion)
    except (ImportError, RuntimeError, OSError) as error:  # bindings of a library that is not there
        reason = str(error).splitlines()[0]
        return Finding("note", f"no CUDA driver: kernels are compiled, not run ({reason})", "install NVIDIA's driver")
    version = (number // 1000, number % 1000 // 10)
    told = f"CUDA {version[0]}.{version[1]}"
    try:
        nvrtc = toolchain.nvrtc().version
    except ToolchainError:  # its own line says so
        return Finding("ok", told)
    if version[0] < nvrtc[0]:
        remedy = f"update the driver, or {install_command(f'cu{version[0]}')}"
        return Finding("wrong", f"{told}, which loads no cubin of NVRTC {nvrtc[0]}.{nvrtc[1]}", remedy)
    if version < nvrtc:
        remedy = f"update the driver, or install NVRTC {version[0]}.{version[1]}"
        return Finding("note", f"{told}, which loads no PTX of NVRTC {nvrtc[0]}.{nvrtc[1]}: cubins run", remedy)
    return Finding("ok", told)


def gpus() -> Finding:
    """Ask the driver for the GPUs, and whether there are kernels for them."""
    try:
        cuda = driver()
        call(cuda.cuInit, 0)
    except (ImportError, RuntimeError, OSError, CodegenError) as error:
        return Finding("note", f"none can be used: {str(error).splitlines()[0]}", "see the driver's line")
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
        return Finding("note", "none: kernels are compiled, not run", "CUDA_VISIBLE_DEVICES may hide them")
    if unfit:
        return Finding("wrong", f"{', '.join(unfit)}: no kernel runs there", f"use one of {', '.join(ARCHS)}")
    return Finding("ok", ", ".join(found))


def torch() -> Finding:
    """Look at torch, and whether it sees what the driver does."""
    try:
        import torch as found  # noqa: PLC0415 - seconds
    except ImportError as error:
        return Finding("note", f"not there: kernels are compiled, not called ({error})", install_command("torch"))
    told = f"torch {found.__version__}, CUDA {found.version.cuda or 'none'}"
    if found.cuda.is_available():
        return Finding("ok", told)
    if gpus().state == "ok":
        return Finding("wrong", f"{told}, which sees no GPU", "install a build of torch for the driver's CUDA")
    return Finding("note", f"{told}, which sees no GPU", "see the GPU's line")


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
"""Looks at what only a compilation needs."""


def look(name: str) -> Finding:
    """Make one check; an error in it is a finding too."""
    try:
        return LOOKS[name]()
    except NoJitError:
        told = "not tried: CODEGEN_NO_JIT=1 forbids to compile"
        return Finding("note", told, "unset CODEGEN_NO_JIT to try; exported and cached kernels load all the same")
    except CodegenError as error:
        told, _, remedy = str(error).partition(": pip install ")
        remedy = f"pip install {remedy}" if remedy else "see the message"
        if name in NEED_COMPILER and prebuilt.is_there():
            return Finding("note", f"{told}; shipped kernels that come compiled run without", remedy)
        return Finding("wrong", told, remedy)
    except Exception as error:
        return Finding("wrong", f"{type(error).__name__}: {error}", "reinstall what it names, or report it")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _root() -> Path:
    """Return the folder that this package is in."""
    return Path(codegen.__file__).resolve().parents[1]
