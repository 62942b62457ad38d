"""The package that users import: its names, when they are imported, and what they are."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import codegen
import runtime
import sparse_kernel_codegen as skc

PROJECT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "jinja2", "pydantic", "codegen", "runtime", "importlib.util")


def python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": str(PROJECT)}
    ).stdout


def test_the_import_alone_loads_nothing() -> None:
    loaded = python("import sys, sparse_kernel_codegen; print(*sys.modules)").split()
    assert "sparse_kernel_codegen" in loaded and not {*HEAVY} & {*loaded}


def test_errors_and_version_need_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import sparse_kernel_codegen as skc; print(skc.ArgumentError)"
    assert "runtime.errors.ArgumentError" in python(f"{code}; skc.__version__, skc.verified_only")


def test_without_torch_a_name_that_needs_it_says_so() -> None:
    code = """
import sys
sys.meta_path.insert(0, type("NoTorch", (), {"find_spec": staticmethod(lambda name, *_: missing(name))}))
def missing(name):
    if name == "torch":
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
import sparse_kernel_codegen as skc
for name in ("patterns", "load_kernel", "nn"):
    try:
        getattr(skc, name)
    except skc.ToolchainError as error:
        print(error)
"""
    lines = python(code).splitlines()
    assert [line.partition(" needs torch, which is not installed: ")[0] for line in lines] == [
        *("patterns", "load_kernel", "nn"),
    ]


def test_every_public_name_of_runtime_is_here() -> None:
    pytest.importorskip("torch")
    assert set(runtime.__all__) <= set(skc.__all__) == set(dir(skc))
    assert sorted(set(skc.__all__)) == sorted(skc.__all__)
    for name in runtime.__all__:
        if name not in skc._SUBMODULES:
            assert getattr(skc, name) is getattr(runtime, name), name
    assert skc.__version__ == codegen.__version__


@pytest.mark.parametrize("name", sorted(skc._SUBMODULES))
def test_submodules_have_the_objects_of_runtime(name: str) -> None:
    pytest.importorskip("torch")
    ours = importlib.import_module(f"sparse_kernel_codegen.{name}")
    theirs = importlib.import_module(f"codegen.{name}" if name == "select" else f"runtime.{name}")
    assert getattr(skc, name) is ours
    assert ours.__all__ and set(getattr(theirs, "__all__", ours.__all__)) <= set(ours.__all__)
    assert all(getattr(ours, each) is getattr(theirs, each) for each in ours.__all__)


def test_packages_of_runtime_that_users_import_are_submodules() -> None:
    packages = {
        path.parent.name
        for path in (PROJECT / "runtime").glob("*/__init__.py")
        if "__all__" in path.read_text(encoding="utf-8")
    }
    assert packages and packages <= skc._SUBMODULES


def test_another_name_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match=r"^module 'sparse_kernel_codegen' has no attribute 'nothing'$"):
        skc.nothing  # noqa: B018
    assert not hasattr(skc, "quantise_attention")


@pytest.mark.parametrize("name", ["codegen", "runtime", "sparse_kernel_codegen"])
def test_each_package_runs_the_command_line(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", name, "--version"], capture_output=True, text=True, check=True, cwd=PROJECT
    )
    assert (done.stdout, done.stderr) == (f"codegen {codegen.__version__}\n", "")
