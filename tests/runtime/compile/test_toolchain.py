"""Where the compiler and its headers come from."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from codegen.arch import ARCHS
from codegen.library import find_spec
from runtime.compile import nvrtc_child, toolchain
from runtime.compile.compiler import compile_spec
from runtime.errors import ToolchainError

pytestmark = pytest.mark.nvrtc


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


@pytest.fixture
def forgetful() -> Iterator[None]:
    """Lets the toolchain be looked for again, in the test and after it."""

    known = (
        toolchain.nvrtc,
        toolchain.include_folders,
        toolchain.headers_digest,
        toolchain.cuobjdump,
        toolchain.nvdisasm,
    )
    for each in known:
        each.cache_clear()
    yield
    for each in known:
        each.cache_clear()


@pytest.fixture
def nvrtc_of(monkeypatch: pytest.MonkeyPatch, forgetful: None) -> Callable[..., None]:
    """Makes NVRTC another version."""
    found = toolchain.nvrtc()

    def make(*version: int, package: str = found.package) -> None:
        other = dataclasses.replace(found, version=version, package=package)
        monkeypatch.setattr(toolchain, "nvrtc", lambda: other)

    return make


@pytest.mark.parametrize("name", ARCHS)
def test_an_nvrtc_that_is_older_than_the_architecture_is_refused(name: str, nvrtc_of: Callable[..., None]) -> None:
    arch = ARCHS[name]
    nvrtc_of(*arch.since_cuda)
    toolchain.check_arch(arch)
    major, minor = arch.since_cuda
    nvrtc_of(major, minor - 1) if minor else nvrtc_of(major - 1, 9)
    with pytest.raises(ToolchainError, match=rf"{name} needs NVRTC {major}\.{minor} or later, and NVRTC .* is older"):
        toolchain.check_arch(arch)


@pytest.mark.parametrize(
    ("package", "remedy"),
    [
        ("nvidia-cuda-nvrtc-cu12 12.6.85", "pip install 'nvidia-cuda-nvrtc-cu12>=12.8'"),
        ("system 12.6.85", toolchain.install()),
    ],
)
def test_the_remedy_replaces_an_nvrtc_that_the_extras_are_satisfied_with(
    package: str, remedy: str, nvrtc_of: Callable[..., None]
) -> None:
    nvrtc_of(12, 6, package=package)
    with pytest.raises(ToolchainError, match=rf"sm_120 needs NVRTC 12\.8 .* is older: {re.escape(remedy)}$"):
        toolchain.check_arch(ARCHS["sm_120"])
    assert toolchain.newer_nvrtc((13, 1)) == toolchain.install(), "another CUDA is another package"


def test_a_kernel_is_not_compiled_with_an_nvrtc_that_is_too_old(nvrtc_of: Callable[..., None]) -> None:
    nvrtc_of(11, 8)
    with pytest.raises(ToolchainError, match=r"sm_90a needs NVRTC 12\.0 or later"):
        compile_spec(find_spec("h100_tile_copy_tma"))


def include(folder: Path, version: int | None) -> Path:
    folder.mkdir()
    for name in ("mma.h", "crt/mma.h"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("// a header\n")
    if version is not None:
        (folder / "cuda_runtime_api.h").write_text(f"#define CUDART_VERSION  {version}\n")
    return folder


def test_headers_of_another_cuda_are_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgetful: None
) -> None:
    major = toolchain.nvrtc().version[0]
    old = include(tmp_path / "old", (major - 1) * 1000 + 80)
    monkeypatch.setattr(toolchain, "_packaged_folders", dict)
    monkeypatch.setattr(toolchain, "_other_folders", lambda: [old])
    with pytest.raises(ToolchainError, match=rf"<mma\.h> is only in {old} \(CUDA {major - 1}\), .* CUDA {major}: pip"):
        toolchain.include_folders(("mma.h",))
    right = include(tmp_path / "right", major * 1000)
    untold = include(tmp_path / "untold", None)
    monkeypatch.setattr(toolchain, "_other_folders", lambda: [old, untold, right])
    assert toolchain.include_folders(("mma.h",)) == (untold, right)
    # A package tells its CUDA where its headers do not.
    toolchain.include_folders.cache_clear()
    monkeypatch.setattr(toolchain, "_packaged_folders", lambda: {untold: major - 1})
    monkeypatch.setattr(toolchain, "_other_folders", list)
    with pytest.raises(ToolchainError, match=rf"<mma\.h> is only in {untold} \(CUDA {major - 1}\)"):
        toolchain.include_folders(("mma.h",))


def test_what_a_header_includes_of_another_package_is_looked_for_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgetful: None
) -> None:
    major = toolchain.nvrtc().version[0]
    packaged, system = (include(tmp_path / name, major * 1000) for name in ("packaged", "system"))
    (packaged / "crt" / "mma.h").unlink()
    monkeypatch.setattr(toolchain, "_packaged_folders", lambda: {packaged: major})
    monkeypatch.setattr(toolchain, "_other_folders", lambda: [system])
    assert toolchain.include_folders(("mma.h",)) == (system, packaged)


def test_a_header_that_cannot_be_one_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgetful: None) -> None:
    folder = include(tmp_path / "include", None)
    with (folder / "cuda_runtime_api.h").open("wb") as file:
        file.truncate(100 << 20)
    monkeypatch.setattr(toolchain, "_packaged_folders", dict)
    monkeypatch.setattr(toolchain, "_other_folders", lambda: [folder])
    with pytest.raises(ToolchainError, match=r"cuda_runtime_api\.h: is too large: the limit is 16 MiB: .* CUDA_HOME"):
        toolchain.include_folders(("mma.h",))


def test_a_header_that_includes_what_is_no_name_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgetful: None
) -> None:
    (tmp_path / "mma.h").write_bytes(b"#include <\xff>\n")
    monkeypatch.setattr(toolchain, "include_folders", lambda _: (tmp_path,))
    with pytest.raises(ToolchainError, match="CUDA's headers cannot be read"):
        toolchain.headers_digest(("mma.h",))


def test_headers_of_packages_are_not_mixed_with_those_of_the_system(
    monkeypatch: pytest.MonkeyPatch, forgetful: None
) -> None:
    if not toolchain._packaged_folders():
        pytest.skip("the headers are of no package")
    monkeypatch.setattr(toolchain, "_other_folders", lambda: pytest.fail("looked elsewhere"))
    assert set(toolchain.include_folders(("mma.h", "cuda_fp16.h"))) <= set(toolchain._packaged_folders())


def test_packages_are_found_wherever_on_the_path_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgetful: None
) -> None:
    """As ``pip install --target`` puts them."""
    packages = ("nvidia-cuda-nvrtc", "nvidia-cuda-runtime", "nvidia-cuda-crt", "nvidia-cuda-cuobjdump")
    try:
        found = [metadata.distribution(name) for name in packages]
    except metadata.PackageNotFoundError as error:
        pytest.skip(f"{error} is not installed")
    for package in found:
        for file in package.files or ():
            place = tmp_path / str(file)
            if ".." not in place.parts and Path(str(package.locate_file(file))).is_file():
                place.parent.mkdir(parents=True, exist_ok=True)
                place.symlink_to(str(package.locate_file(file)))
    monkeypatch.syspath_prepend(tmp_path)
    assert toolchain.nvrtc().library.is_relative_to(tmp_path)
    assert all(folder.is_relative_to(tmp_path) for folder in toolchain.include_folders(("mma.h", "cuda_fp16.h")))
    assert Path(toolchain.cuobjdump()).is_relative_to(tmp_path)
    assert compile_spec(find_spec("l4_dense_wmma")).code[:4] == b"\x7fELF"


@pytest.mark.parametrize(("bindings", "taken"), [("12.9.1", "12.8.93"), ("13.0.0", "13.0.88"), (None, "13.0.88")])
def test_of_two_compilers_that_of_the_bindings_cuda_is_taken(
    bindings: str | None, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if bindings is None:
            raise metadata.PackageNotFoundError(name)
        return bindings

    found = [(f"nvidia-cuda-nvrtc {version}", Path(version)) for version in ("13.0.88", "12.8.93")]
    monkeypatch.setattr(toolchain, "_packaged", lambda names, pattern: iter(found))
    monkeypatch.setattr(toolchain.metadata, "version", version)
    assert toolchain._library() == (Path(taken), f"nvidia-cuda-nvrtc {taken}")


def test_a_library_that_another_package_has_overwritten_is_told(
    monkeypatch: pytest.MonkeyPatch, forgetful: None
) -> None:
    library, _ = toolchain._library()
    monkeypatch.setattr(toolchain, "_library", lambda: (library, "nvidia-cuda-nvrtc 1.2.3"))
    with pytest.raises(
        ToolchainError, match=r"belongs to nvidia-cuda-nvrtc 1\.2\.3, but reports version .*--force-reinstall"
    ):
        toolchain.nvrtc()


def test_a_library_of_no_package_is_known_by_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgetful: None
) -> None:
    library, _ = toolchain._library()
    named = tmp_path / "libnvrtc.so.13.0.88"
    named.symlink_to(library)
    for path in (library, named):
        toolchain.nvrtc.cache_clear()
        monkeypatch.setattr(toolchain, "_library", lambda path=path: (path, ""))
        assert toolchain.nvrtc().package.startswith("system ")


@pytest.mark.parametrize("failure", [TypeError("expected str"), RuntimeError("a probe failed"), OSError("no")])
def test_what_cuda_pathfinder_raises_is_an_error_of_the_toolchain(
    failure: Exception, monkeypatch: pytest.MonkeyPatch, forgetful: None
) -> None:
    def fail(name: str) -> Any:
        raise failure

    monkeypatch.setattr(toolchain, "_packaged", lambda names, pattern: iter(()))
    for function in ("load_nvidia_dynamic_lib", "find_nvidia_binary_utility"):
        monkeypatch.setattr(toolchain.pathfinder, function, fail)
    for look in (toolchain.nvrtc, toolchain.cuobjdump):
        with pytest.raises(ToolchainError, match=r"cuda\.pathfinder failed .*pip install"):
            look()
