"""The environment variables of the package: their one list, from which docs/guide/environment.md is written."""

from __future__ import annotations

from typing import NamedTuple


class Variable(NamedTuple):
    """An environment variable.

    Attributes:
        name: its name.
        meaning: its effect and its values, in one or two sentences.
        default: the behavior without it.
        module: the module that reads it.
        page: where the guide describes it, relative to docs/guide.
    """

    name: str
    meaning: str
    default: str
    module: str
    page: str


VARIABLES = (
    Variable(
        "CODEGEN_CACHE_DIR",
        "Folder of compiled kernels. A leading ~ is expanded.",
        "the user's cache folder (`codegen cache path`)",
        "runtime.compile.cache_environment",
        "cache.md",
    ),
    Variable(
        "CODEGEN_CACHE_LOCK_SECONDS",
        "Seconds to wait for another process that compiles the same kernel.",
        "600",
        "runtime.compile.cache_environment",
        "cache.md",
    ),
    Variable(
        "CODEGEN_CACHE_MAX_BYTES",
        "Size limit of the cache in bytes. The least recently used entries are evicted first.",
        "536870912 (512 MiB)",
        "runtime.compile.cache_environment",
        "cache.md",
    ),
    Variable(
        "CODEGEN_CACHE_TRUST_OTHERS",
        "1: use code and receipts from folders that other users can write. 0: refuse them.",
        "0",
        "runtime.compile.cache_environment",
        "cache.md#whom-the-cache-trusts",
    ),
    Variable(
        "CODEGEN_COMPILE_TIMEOUT",
        "Seconds that one compilation may take. 0: no limit.",
        "1800",
        "runtime.compile.child",
        "../reference/kernel-cache.md#the-compilers-process",
    ),
    Variable(
        "CODEGEN_CUBINS",
        "Folder of cubins to use instead of the installed wheel of cubins. 0: use neither.",
        "the installed wheel of cubins",
        "runtime.compile.prebuilt",
        "cache.md#deploy-without-a-compiler",
    ),
    Variable(
        "CODEGEN_KEY_PASSWORD",
        "Password of the private key of codegen attest.",
        "none: the key has no password",
        "runtime.tools.attest.keys",
        "tools.md#attestations-codegen-attest-and-codegen-verify-attestation",
    ),
    Variable(
        "CODEGEN_LOG",
        "1: log chosen kernels, the origin of their code, and compilations to standard error.",
        "0",
        "runtime.log",
        "cache.md#the-log",
    ),
    Variable(
        "CODEGEN_NO_JIT",
        "1: never compile: a kernel without compiled code is an error. 0: compile it.",
        "0",
        "runtime.compile.jit",
        "export.md#codegen_no_jit",
    ),
    Variable(
        "CODEGEN_RECEIPTS",
        "Folder of receipts of your own kernels. A leading ~ is expanded.",
        "`~/.local/share/sparse-kernel-codegen/receipts`",
        "runtime.receipts.own",
        "receipts.md#receipts-of-your-own-kernels",
    ),
    Variable(
        "CODEGEN_RECORD",
        "File that gets a line of JSON for each kernel that a process loads, for codegen warm.",
        "none: nothing is recorded",
        "runtime.compile.recording",
        "cache.md#before-the-first-call",
    ),
    Variable(
        "CODEGEN_VERIFIED_ONLY",
        "1: refuse kernels without a receipt. 0: run them.",
        "0",
        "runtime.receipts.mode",
        "receipts.md#only-kernels-with-receipts",
    ),
)
