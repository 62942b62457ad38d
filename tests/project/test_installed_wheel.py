"""What compiles works in an installed wheel, and what is recommended there is there."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from wheel import PROJECT, built_wheel, call, installed_wheel, run

from codegen.library import GENERATED
from codegen.receipts import Receipt
from runtime.compile import toolchain

pytestmark = pytest.mark.nvrtc

NAME = "l4_topk32_d64"
OWN_SPEC = "op: tile_copy\narch: sm_89\ntile: {m: 64, n: 64}\n"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_wheel(tmp_path_factory)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed_wheel(tmp_path_factory)


def of_this_compiler() -> bool:
    return Receipt.read(GENERATED / f"{NAME}.json").cubin.compiler_package == toolchain.compiler_version()[1]


def test_compile_finds_the_receipts_and_sources_of_the_package(installed: Path, tmp_path: Path) -> None:
    done = run(installed / "codegen", "compile", NAME, "--check", cwd=tmp_path)
    assert f"source {installed.parent}" in done.stdout and "has no receipt" not in done.stderr, done.stderr
    assert (done.returncode, "1 of 1 compared" in done.stdout) == ((0, True) if of_this_compiler() else (3, False))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", [("--check",), ()])
def test_migrate_finds_the_receipts_of_the_package(installed: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    told = f"up to date  {NAME}_bf16\nup to date  {NAME}\n"
    assert call(installed / "codegen", "migrate", NAME, *options, cwd=tmp_path) == told
    assert list(tmp_path.iterdir()) == []


def test_what_compile_recommends_for_a_spec_of_ones_own_works(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(OWN_SPEC)
    said = call(installed / "codegen", "compile", "mine.yaml", cwd=tmp_path)
    command = re.search(r"not written \((codegen .*?)\)", said)
    assert command is not None, said
    call(installed / "codegen", *command[1].split()[1:], cwd=tmp_path)
    assert "source mine.cu, cubin" in call(installed / "codegen", "compile", "mine.yaml", cwd=tmp_path)


def test_installed_into_a_folder_of_pythonpath(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    pip = (sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", target, wheel)
    call(*pip, cwd=tmp_path)
    code = "import runtime; print(runtime.__file__)"
    assert str(target) in call(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(target))
    command = (sys.executable, "-m", "sparse_kernel_codegen", "compile", NAME)
    assert f"source {target}" in call(*command, cwd=tmp_path, PYTHONPATH=str(target))
    assert not (tmp_path / "build").exists() and target != PROJECT
