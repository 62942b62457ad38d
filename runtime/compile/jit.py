"""Permission to compile: CODEGEN_NO_JIT=1 forbids it wherever the package would."""

from __future__ import annotations

from codegen.library import NamedSpec
from runtime.environment import flag
from runtime.errors import NoJitError

NO_JIT = "CODEGEN_NO_JIT"


def is_forbidden() -> bool:
    """Whether compilation is forbidden.

    Raises:
        ToolchainError: for what is neither yes nor no.
    """
    return flag(NO_JIT, "nothing is compiled")


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
