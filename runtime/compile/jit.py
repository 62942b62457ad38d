"""Permission to compile: CODEGEN_NO_JIT=1 forbids every compilation by the package."""

from __future__ import annotations

from codegen.library import NamedSpec
from runtime.environment import flag
from runtime.errors import NoJitError

NO_JIT = "CODEGEN_NO_JIT"


def is_forbidden() -> bool:
    """Whether compilation is forbidden.

    Raises:
        ToolchainError: if the value is neither 0 nor 1.
    """
    return flag(NO_JIT, "nothing is compiled")


def missing(named: NamedSpec, what: str, looked: str) -> NoJitError:
    """Build the error for a kernel that needs compilation.

    Args:
        named: the kernel's spec.
        what: the missing code: "sm_90a cubin".
        looked: the places that were searched, and the result.
    """
    spec = named.argument
    if what.endswith(" ptx"):
        remedy = f"`codegen compile --check {spec}` puts it into the cache where compilation is allowed"
        return NoJitError(named.stem, named.spec.hash, f"its {what} is missing ({looked})", remedy)
    remedy = (
        f"`codegen compile {spec}` puts it into the cache where compilation is allowed, "
        f"`codegen export {spec} --out DIR` makes a folder that load_kernel(DIR/NAME) loads"
    )
    return NoJitError(named.stem, named.spec.hash, f"its {what} is missing ({looked})", remedy)
