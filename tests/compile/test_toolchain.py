"""Where the compiler and its headers come from."""

from __future__ import annotations

import pytest

from runtime.compile import nvrtc_child, toolchain
from runtime.errors import ToolchainError


def test_the_compiler_tells_its_version_and_package() -> None:
    compiler, package = toolchain.compiler_version()
    assert compiler.startswith("NVRTC ")
    assert package == "system" or package.split()[1].startswith(compiler.split()[1] + ".")


def test_a_header_that_does_not_exist_is_named() -> None:
    with pytest.raises(ToolchainError, match=r"<no_such_header\.h> is not installed .*pip install"):
        toolchain.include_folders(("no_such_header.h",))


def test_the_digest_follows_includes_and_tells_headers_apart() -> None:
    assert toolchain.headers_digest(()) != toolchain.headers_digest(("cuda_fp16.h",))
    assert toolchain.headers_digest(("mma.h",)) != toolchain.headers_digest(("cuda_fp16.h",))
    folders = toolchain.include_folders(("mma.h",))
    assert "cuda_fp16.h" in nvrtc_child.included(["mma.h"], folders)
