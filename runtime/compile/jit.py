"""Permission to compile: CODEGEN_NO_JIT=1 forbids it wherever the package would."""

from __future__ import annotations

import os

from codegen.library import NamedSpec
from codegen.wording import shown
from runtime.errors import NoJitError, ToolchainError

NO_JIT = "CODEGEN_NO_JIT"


def is_forbidden() -> bool:
    """Whether compilation is forbidden.

    Raises:
        ToolchainError: for what is neither yes nor no.
    """
    given = os.environ.get(NO_JIT, "")
    if given not in ("", "0", "1"):
        raise ToolchainError(f"{NO_JIT} is {shown(given)}; 1 (nothing is compiled) or 0 is expected")
    return given == "1"


def missing(named: NamedSpec, what: str, looked: str) -> NoJitError:
    """Return the error of a kernel that would have to be compiled.

    Args:
        named: its spec.
        what: of its code is missing: "sm_90a cubin".
        looked: where, and what was there.
    """
    spec = named.argument
    if what.endswith(" ptx"):
        remedy = f"`codegen compile --check {spec}` where compiling is allowed puts it into the cache"
        return NoJitError(named.stem, named.spec.hash, f"its {what} is missing ({looked})", remedy)
    remedy = (
        f"`codegen compile {spec}` where compiling is allowed puts it into the cache, "
        f"`codegen export {spec} --out DIR` makes a folder that load_kernel(DIR/NAME) loads"
    )
    return NoJitError(named.stem, named.spec.hash, f"its {what} is missing ({looked})", remedy)
