"""Code that comes compiled: a wheel, a folder, or what ``codegen warm`` left in the cache."""

from __future__ import annotations

import hashlib
import logging
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from scripts import SCRIPTS, imported

from codegen.errors import CodegenError
from codegen.library import find_spec
from codegen.receipts import Receipt
from codegen.render import Generated, generate
from runtime.compile import compilers, loading, nvrtc_child, prebuilt, toolchain
from runtime.compile.compiler import Compiled, Target, compile_spec
from runtime.errors import NoJitError, ToolchainError

pytestmark = pytest.mark.nvrtc

PROJECT = Path(__file__).resolve().parents[3]
NAME = "l4_topk32_d64"
KERNELS = (NAME, "h100_select_topk")
KINDS: tuple[Target, ...] = ("cubin", "ptx")


@pytest.fixture(scope="module")
def generated() -> Generated:
    return generate(find_spec(NAME))


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with imported("cubin_wheel", SCRIPTS) as module:
        yield module


@pytest.fixture(scope="module")
def files(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a wheel of a few kernels."""
    if compilers.caveat():
        pytest.skip(compilers.caveat())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CODEGEN_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        found: dict[str, bytes] = script.files_of([find_spec(name) for name in KERNELS])
    return found


@pytest.fixture
def folder(files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The code in a folder that CODEGEN_CUBINS names."""
    place = tmp_path / "cubins"
    place.mkdir()
    for name, data in files.items():
        if name.startswith("sparse_kernel_codegen_cubins/"):
            (place / Path(name).name).write_bytes(data)
    monkeypatch.setenv("CODEGEN_CUBINS", str(place))
    return place


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which NVRTC, headers and tools are not installed."""

    def missing(*_: Any) -> None:
        raise ToolchainError("NVRTC is not installed")

    for name in ("nvrtc", "compiler_version", "include_folders", "headers_digest", "cuobjdump"):
        monkeypatch.setattr(toolchain, name, missing)
    monkeypatch.setattr(nvrtc_child, "answer", missing)


def is_of_the_receipt(compiled: Compiled) -> bool:
    cubin = Receipt.read(PROJECT / "generated" / f"{compiled.named.stem}.json").cubin
    known = cubin.sha256 if compiled.target == "cubin" else cubin.ptx_sha256
    return hashlib.sha256(compiled.code).hexdigest() == known == compiled.key


@pytest.mark.usefixtures("folder", "no_compiler")
@pytest.mark.parametrize("target", KINDS)
@pytest.mark.parametrize("no_jit", ["0", "1"])
def test_a_first_call_needs_no_compiler(
    target: Target, no_jit: str, own_cache: Path, generated: Generated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CODEGEN_NO_JIT", no_jit)
    compiled, way = loading.obtained(generated, target)
    assert way == "receipt" and compiled.was_cached and is_of_the_receipt(compiled)
    assert list(own_cache.iterdir()) == []


@pytest.mark.usefixtures("folder", "no_compiler")
@pytest.mark.parametrize("given", ["h100_select_topk", "fields"])
def test_load_kernel_takes_it_by_the_spec_whatever_the_kernel_is_called(
    given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    from runtime import kernel

    loaded: list[Compiled] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, value in (("current_device", 0), ("device_count", 1)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    for name, value in (("get_device_name", "an H100"), ("get_device_capability", (9, 0))):
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    monkeypatch.setattr(kernel, "_loaded", lambda compiled, where: loaded.append(compiled))
    spec = find_spec("h100_select_topk").spec.model_dump(mode="json", by_alias=True)
    kernel.load_kernel("h100_select_topk" if given != "fields" else spec)
    assert [each.named.stem for each in loaded] == ["h100_select_topk"] and is_of_the_receipt(loaded[0])


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("change", ["a byte", "cut short", "another kernel", "a folder", "source", "options"])
def test_what_is_not_the_receipts_is_ignored_with_a_line_in_the_log(
    change: str, folder: Path, generated: Generated, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = folder / f"{NAME}.cubin"
    code = path.read_bytes()
    if change == "a folder":
        path.unlink()
        path.mkdir()
    elif change == "source":
        generated = Generated(generated.named, generated.plan, generated.source + "\n")
    elif change == "options":
        monkeypatch.setattr(prebuilt, "options_of", lambda plan, target="cubin": ("--gpu-architecture=sm_89",))
    else:
        other = (folder / "h100_select_topk.cubin").read_bytes()
        path.write_bytes({"a byte": code[:-1] + bytes([code[-1] ^ 1]), "cut short": code[:-1]}.get(change, other))
    with caplog.at_level(logging.WARNING), pytest.raises(ToolchainError, match="NVRTC is not installed"):
        loading.obtained(generated, "cubin")
    lines = [record.getMessage() for record in caplog.records]
    if change != "a folder":  # which is no file of a cubin
        assert len(lines) == 1 and lines[0].startswith(f"{NAME}: {path} is ignored: ")
        assert caplog.records[0].name == "sparse_kernel_codegen"


def test_a_kernel_of_ones_own_is_compiled(folder: Path, generated: Generated) -> None:
    spec = generated.named.spec.model_dump(mode="json", by_alias=True)
    own = generate(find_spec({**spec, "lse": not spec["lse"]}))
    (folder / f"{own.named.stem}.cubin").write_bytes((folder / f"{NAME}.cubin").read_bytes())
    assert loading.obtained(own, "cubin")[1] == "NVRTC"
    with pytest.raises(CodegenError, match="is not a shipped kernel, so the package has no receipt"):
        prebuilt.read(own, "cubin", folder)


def test_the_variable_names_a_folder_or_none(
    folder: Path, generated: Generated, monkeypatch: pytest.MonkeyPatch
) -> None:
    with prebuilt.ignored():
        assert prebuilt.find(generated, "cubin") is None
    assert prebuilt.find(generated, "cubin") is not None
    monkeypatch.setenv("CODEGEN_CUBINS", "0")
    assert prebuilt.find(generated, "cubin") is None
    for given in (str(folder / "none"), str(folder / f"{NAME}.cubin"), "1", "~nobody/x"):
        monkeypatch.setenv("CODEGEN_CUBINS", given)
        with pytest.raises(ToolchainError, match=r"CODEGEN_CUBINS is '.*'; expected a folder of cubins, or 0"):
            prebuilt.find(generated, "cubin")


def test_what_was_kept_in_the_cache_needs_no_compiler_either(
    folder: Path, generated: Generated, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    code = prebuilt.read(generated, "cubin", folder)
    monkeypatch.delenv("CODEGEN_CUBINS")
    assert prebuilt.find(generated, "cubin") is None
    assert not prebuilt.keep(generated, "cubin", code) and prebuilt.keep(generated, "cubin", code)
    request.getfixturevalue("no_compiler")
    found = prebuilt.find(generated, "cubin")
    assert found is not None and is_of_the_receipt(found) and prebuilt.find(generated, "ptx") is None
    monkeypatch.setattr(prebuilt, "disagreement", lambda *_: "it is not")
    assert prebuilt.find(generated, "cubin") is None, "an entry of the cache is compared too"


def test_the_wheel_is_the_same_to_the_byte(script: ModuleType, files: dict[str, bytes], tmp_path: Path) -> None:
    kernels = [find_spec(name) for name in KERNELS]
    one, other = script.build(tmp_path / "1", kernels), script.build(tmp_path / "2", kernels[::-1])
    assert one.name == other.name and one.read_bytes() == other.read_bytes()
    with zipfile.ZipFile(one) as archive:
        names = archive.namelist()
        assert {*names} - {*files} == {name for name in names if name.endswith(".dist-info/RECORD")}
        assert {entry.date_time for entry in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
        assert str(PROJECT).encode() not in one.read_bytes()
    assert [each for each in names if each.startswith("sparse_kernel_codegen_cubins/")] == [
        f"sparse_kernel_codegen_cubins/{name}"
        for name in ("__init__.py", "h100_select_topk.cubin", f"{NAME}.cubin", f"{NAME}.ptx")
    ]


def test_an_installed_wheel_is_found_and_serves_without_a_compiler(
    script: ModuleType, files: dict[str, bytes], tmp_path: Path
) -> None:
    wheel = script.build(tmp_path, [find_spec(name) for name in KERNELS])
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", site, wheel]
    subprocess.run(pip, check=True)
    code = (
        "from codegen.library import find_spec; from codegen.render import generate\n"
        "from runtime.compile import loading, toolchain\n"
        "def missing(): raise SystemExit('a compiler is looked for')\n"
        "toolchain.nvrtc = toolchain.compiler_version = missing\n"
        f"for name, target in (({NAME!r}, 'cubin'), ({NAME!r}, 'ptx'), ('h100_select_topk', 'cubin')):\n"
        "    print(loading.obtained(generate(find_spec(name)), target)[1])\n"
    )
    environment = {"PYTHONPATH": f"{PROJECT}:{site}", "CODEGEN_CACHE_DIR": str(tmp_path / "none"), "CODEGEN_LOG": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "receipt\n" * 3), done.stderr
    assert f"codegen: {NAME}: from {site}/sparse_kernel_codegen_cubins/{NAME}.cubin\n" in done.stderr


def test_another_compiler_builds_no_wheel(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilers, "compiler_version", lambda: ("NVRTC 13.5", "nvidia-cuda-nvrtc 13.5.37"))
    with pytest.raises(CodegenError, match="is not the compiler of the receipts"):
        script.files_of([find_spec(NAME)])
    monkeypatch.undo()
    monkeypatch.setattr(prebuilt, "disagreement", lambda *_: "it is not")
    with pytest.raises(CodegenError, match=f"{NAME}: its cubin cannot go into the wheel: it is not"):
        script.code_of(find_spec(NAME), "cubin")


def test_without_a_wheel_a_kernel_that_is_missing_is_named(
    generated: Generated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CODEGEN_NO_JIT", "1")
    with pytest.raises(NoJitError, match=NAME):
        loading.obtained(generated, "cubin")
    monkeypatch.delenv("CODEGEN_NO_JIT")
    assert loading.obtained(generated, "cubin")[1] == "NVRTC"
    assert loading.obtained(generated, "cubin")[1] == "cache"
    assert compile_spec(generated.named).was_cached
