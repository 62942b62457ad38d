"""What the machine code of a kernel depends on, as a key for records of compilations."""

from __future__ import annotations

import dataclasses

from codegen.prune import without_comments
from codegen.render import Generated
from runtime.compile.compiler import _key


def code_key(generated: Generated) -> str:
    """SHA-256 of everything that the machine code depends on.

    That is the source without its comments, options, the compiler's version and package, the content of all headers.
    """
    source = without_comments(generated.source)
    return _key(dataclasses.replace(generated, source=source), "cubin")
