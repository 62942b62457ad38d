"""From a rendered source to a cubin (or PTX), through the cache."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

from codegen.library import NamedSpec
from codegen.plan import Plan
from codegen.render import Generated, generate
from runtime.compile import child, jit, nvrtc_child, toolchain
from runtime.compile.cache import KernelCache
from runtime.compile.cache_entry import Identity, cache_key
from runtime.errors import CompileError, NoJitError, ToolchainError
from runtime.log import logger

Target = Literal["cubin", "ptx"]
OPTIONS = ("--std=c++17", "--ptxas-options=-v")


@dataclass(frozen=True)
class Compiled:
    """A kernel's machine code and its inputs.

    Attributes:
        generated: the spec, its plan and its source.
        target: "cubin" for the spec's architecture, "ptx" for it and every newer one.
        code: the cubin or the PTX.
        log: the compiler's log (registers, spills).
        options: compiler options, in order, without include folders.
        key: its key in the cache.
        was_cached: whether it came from there.
        findings: facts about the code that the cache stores beside the log: see ``runtime.compile.inspection``.
    """

    generated: Generated
    target: Target
    code: bytes
    log: str
    options: tuple[str, ...]
    key: str
    was_cached: bool
    findings: str = ""

    @property
    def identity(self) -> Identity:
        """Its identity in the cache."""
        return Identity(self.key, self.named.stem, arch_of(self.plan, self.target), self.target)

    @property
    def named(self) -> NamedSpec:
        """The spec and its name."""
        return self.generated.named

    @property
    def plan(self) -> Plan:
        """The spec's plan."""
        return self.generated.plan

    @property
    def source(self) -> str:
        """The rendered CUDA."""
        return self.generated.source


def compile_spec(named: NamedSpec, target: Target = "cubin", cache: KernelCache | None = None) -> Compiled:
    """Render a spec and compile it, or take it from the cache. Needs no GPU.

    Raises:
        SpecError: for a spec that cannot work on its architecture.
        ToolchainError, CompileError, CacheError: as ``compile_generated`` does.
    """
    return compile_generated(generate(named), target, cache)


def compile_generated(generated: Generated, target: Target = "cubin", cache: KernelCache | None = None) -> Compiled:
    """Compile a source, or take its code from the cache. Needs no GPU.

    Raises:
        ToolchainError: when NVRTC or a header is missing.
        CompileError: when NVRTC refuses the source, with its log.
        CacheError: if the cache cannot be written.
        NoJitError: if the cache does not have it and CODEGEN_NO_JIT=1 forbids compilation.
    """
    named, plan = generated.named, generated.plan
    if jit.is_forbidden():
        return _cached(generated, target, cache or KernelCache())
    options, key = options_of(plan, target), _key(generated, target)

    def build() -> tuple[bytes, str]:
        toolchain.check_arch(plan.arch)
        since = time.monotonic()
        made = run_nvrtc(generated.source, named.source_file, target, options, plan.headers)
        package = toolchain.compiler_version()[1]
        logger().info("%s: compiled in %.1f s with %s", named.stem, time.monotonic() - since, package)
        return made

    identity = Identity(key, named.stem, arch_of(plan, target), target)
    entry, was_cached = (cache or KernelCache()).get_or_build(identity, build)
    return Compiled(generated, target, entry.code, entry.log, options, key, was_cached, entry.findings)


def _cached(generated: Generated, target: Target, cache: KernelCache) -> Compiled:
    """A kernel from the cache, without writing to the cache.

    Raises:
        NoJitError: if the cache does not have it, or the lookup needs the version of a compiler that is not installed.
        CacheError: if the cache cannot be read.
    """
    named, plan = generated.named, generated.plan
    what = f"{arch_of(plan, target)} {target}"
    try:
        key = _key(generated, target)
    except ToolchainError as error:
        reason = f"the cache {cache.folder} keys its entries by their compiler, which was not found: {error}"
        raise jit.missing(named, what, reason) from None
    entry = cache.find(Identity(key, named.stem, arch_of(plan, target), target))
    if entry is None:
        compiler = toolchain.compiler_version()[1]
        raise jit.missing(named, what, f"the cache {cache.folder} has no entry {key}, the key for {compiler}")
    return Compiled(generated, target, entry.code, entry.log, options_of(plan, target), key, True, entry.findings)


def key_of(named: NamedSpec, target: Target = "cubin") -> str:
    """Cache key of a spec's code: a hash of everything that the code depends on.

    Raises:
        SpecError: for a spec that cannot work on its architecture.
        ToolchainError: when NVRTC or a header is missing.
    """
    return _key(generate(named), target)


def arch_of(plan: Plan, target: Target) -> str:
    """Target architecture of a kernel: "sm_90a", or "compute_89" for PTX."""
    return plan.arch.name if target == "cubin" else plan.arch.virtual


def options_of(plan: Plan, target: Target = "cubin") -> tuple[str, ...]:
    """The compiler's options for a kernel, in order, without include folders."""
    return (f"--gpu-architecture={arch_of(plan, target)}", *OPTIONS)


def _key(generated: Generated, target: Target) -> str:
    plan = generated.plan
    return cache_key(
        spec=plan.spec.canonical_json(),
        source=generated.source,
        compiler=" ".join(toolchain.compiler_version()),
        options=options_of(plan, target),
        headers=toolchain.headers_digest(plan.headers),
        target=target,
    )


def run_nvrtc(
    source: str, name: str, target: Target, options: tuple[str, ...], headers: tuple[str, ...] = ()
) -> tuple[bytes, str]:
    """Compile with NVRTC in a separate process (:mod:`runtime.compile.nvrtc_child` says why).

    Args:
        source: CUDA C++.
        name: file name for the log.
        target: "cubin" or "ptx".
        options: compiler options in order.
        headers: CUDA headers that the source includes.

    Returns:
        The code and the compiler's log.

    Raises:
        ToolchainError: if NVRTC or a header is missing or has changed, or the process failed.
        CompileError: with the whole log.
        NoJitError: if CODEGEN_NO_JIT=1 forbids compilation.
    """
    if jit.is_forbidden():
        raise NoJitError(name, "", "it is a source for NVRTC")
    request = {
        "library": child.text_of(toolchain.nvrtc().library),
        "folders": toolchain.folders_of_request(headers),
        "headers": headers,
        "source": source,
        "name": name,
        "target": target,
        "options": options,
    }
    told, code = child.ask(request, name)
    log = "\n".join(line for line in told["log"].splitlines() if "Compile time" not in line).strip()
    if told["status"] == nvrtc_child.REFUSED:
        raise CompileError(name, log or told["error"])
    if told["status"] != 0:
        raise ToolchainError(f"{toolchain.nvrtc()} failed on {name}: {told['error']}" + (f"\n{log}" if log else ""))
    toolchain.check_loaded(told["loaded"], headers)
    return code, log
