"""``codegen doctor``: what is there, what is wrong, and what mends it."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from codegen.installation import install_command
from runtime import doctor
from runtime.cli import app
from runtime.compile import compilers, toolchain
from runtime.errors import DeviceError, ToolchainError

pytestmark = pytest.mark.nvrtc

run = CliRunner()


@pytest.mark.parametrize("name", ["versions", "NVRTC", "headers", "cuobjdump", "cache"])
def test_here_all_is_well(name: str) -> None:
    found = doctor.look(name)
    assert found.state in ("ok", "note") and found.told and (found.state == "ok") == (not found.remedy)


def test_every_look_is_a_row_and_what_is_wrong_an_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = doctor.Finding("wrong", "no compiler", "pip install one")
    monkeypatch.setitem(doctor.LOOKS, "NVRTC", lambda: wrong)
    result = run.invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "wrong  NVRTC     no compiler\n                 -> pip install one\n" in result.stdout
    rows = json.loads(run.invoke(app, ["doctor", "--json"]).stdout)["rows"]
    assert [row["name"] for row in rows] == list(doctor.LOOKS)
    assert {"name": "NVRTC", "state": "wrong", "told": "no compiler", "remedy": "pip install one"} in rows
    for name in doctor.LOOKS:
        monkeypatch.setitem(doctor.LOOKS, name, lambda: doctor.Finding("note", "not there", "get it"))
    assert run.invoke(app, ["doctor"]).exit_code == 0


def test_what_goes_wrong_in_a_look_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ToolchainError(f"NVRTC is not installed: {toolchain.install()}")

    monkeypatch.setattr(toolchain, "nvrtc", missing)
    found = doctor.look("NVRTC")
    assert (found.state, found.told) == ("wrong", "NVRTC is not installed")
    assert found.remedy.startswith(install_command("cu13"))
    monkeypatch.setitem(doctor.LOOKS, "GPU", lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    assert doctor.look("GPU").told == "ZeroDivisionError: division by zero"


def test_another_compiler_than_that_of_the_receipts_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    found = replace(toolchain.nvrtc(), package=compilers.record().compiler)
    monkeypatch.setattr(toolchain, "nvrtc", lambda: found)
    assert doctor.compiler() == doctor.Finding("ok", str(found))
    other = replace(found, package="nvidia-cuda-nvrtc 13.5.37")
    monkeypatch.setattr(toolchain, "nvrtc", lambda: other)
    noted = doctor.compiler()
    assert (noted.state, noted.remedy) == ("note", compilers.mend())
    assert "its code differs and was not tested" in noted.told and compilers.record().compiler in noted.told
    assert "h100_select_topk spills 24 bytes" in noted.told


def test_cubins_are_counted_and_make_a_compiler_dispensable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ToolchainError(f"NVRTC is not installed: {toolchain.install()}")

    monkeypatch.setattr(toolchain, "nvrtc", missing)
    monkeypatch.setenv("CODEGEN_CUBINS", "0")
    assert doctor.look("cubins").state == "ok" and doctor.look("NVRTC").state == "wrong"
    monkeypatch.setenv("CODEGEN_CUBINS", str(tmp_path))
    (tmp_path / "h100_dense.cubin").touch()
    assert doctor.look("cubins") == doctor.Finding("ok", f"{tmp_path}, 1 compiled kernel")
    noted = doctor.look("NVRTC")
    assert noted.state == "note" and "kernels of the wheel of cubins run without it" in noted.told
    play(monkeypatch, 13000, (9, 0))
    assert doctor.look("driver") == doctor.Finding("ok", "CUDA 13.0")
    monkeypatch.setenv("CODEGEN_CUBINS", str(tmp_path / "none"))
    assert doctor.look("cubins").state == "wrong" and "CODEGEN_CUBINS" in doctor.look("cubins").told
    assert doctor.look("NVRTC").state == "wrong"
    monkeypatch.delenv("CODEGEN_CUBINS")
    monkeypatch.setattr(doctor.prebuilt, "folder", lambda: tmp_path)
    assert doctor.look("cubins").remedy.startswith("pip install 'sparse-kernel-codegen-cubins==")


@pytest.mark.parametrize("name", ["codegen", "runtime"])
def test_another_module_of_the_same_name_is_noted(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(doctor._root())])
    monkeypatch.chdir(doctor._root())
    assert doctor.names().state == "ok"
    (tmp_path / f"{name}.py").touch()
    (tmp_path / "other" / name).mkdir(parents=True)
    (tmp_path / "other" / name / "__init__.py").touch()
    for place in (tmp_path, tmp_path / "other"):
        monkeypatch.setattr(sys, "path", [str(doctor._root()), str(place)])
        found = doctor.names()
        assert found.state == "note" and str(place / name) in found.told and "PYTHONPATH" in found.remedy
    monkeypatch.setattr(sys, "path", [str(doctor._root())])
    monkeypatch.chdir(tmp_path)  # of a script, or of python -m
    assert doctor.names().state == "note"


def test_a_cache_that_cannot_be_written_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(dir: Path) -> None:
        raise PermissionError(13, "Permission denied", str(dir))

    monkeypatch.setenv("CODEGEN_CACHE_DIR", str(tmp_path / "none" / "yet"))
    assert doctor.look("cache").state == "ok" and not (tmp_path / "none").exists()
    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", refuse)
    found = doctor.look("cache")
    assert found.state == "wrong" and "CODEGEN_CACHE_DIR" in found.remedy
    (tmp_path / "file").touch()
    monkeypatch.setenv("CODEGEN_CACHE_DIR", str(tmp_path / "file"))
    assert doctor.look("cache").state == "wrong"


def play(monkeypatch: pytest.MonkeyPatch, version: int, capability: tuple[int, int] | None) -> None:
    """Play a driver of a version, with one GPU or none."""
    kinds = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=0, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=1
    )
    answers = {
        "cuInit": lambda flags: (0,),
        "cuDriverGetVersion": lambda: (0, version),
        "cuDeviceGetCount": lambda: (0, int(capability is not None)),
        "cuDeviceGet": lambda number: (0, number),
        "cuDeviceGetName": lambda size, device: (0, b"a GPU\0".ljust(size)),
        "cuDeviceGetAttribute": lambda kind, device: (0, capability[kind] if capability else 0),
    }
    bindings = SimpleNamespace(**answers, CUdevice_attribute=kinds)
    monkeypatch.setattr(doctor, "driver", lambda: bindings)

    def call(function: Any, *arguments: Any) -> Any:
        return next(iter(function(*arguments)[1:]), None)

    monkeypatch.setattr(doctor, "call", call)


@pytest.mark.parametrize(
    ("version", "state", "says"),
    [
        (13000, "ok", "CUDA 13.0"),
        (13020, "ok", "CUDA 13.2"),
        (12080, "wrong", "CUDA 12.8, which cannot load cubins of NVRTC 13.1"),
        (13000, "note", "CUDA 13.0, which cannot load PTX of NVRTC 13.1; cubins run"),
    ],
)
def test_a_driver_that_is_older_than_the_compiler(
    version: int, state: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvrtc = (13, 0) if state == "ok" else (13, 1)
    monkeypatch.setattr(toolchain, "nvrtc", lambda: SimpleNamespace(version=nvrtc))
    play(monkeypatch, version, (9, 0))
    found = doctor.look("driver")
    assert (found.state, found.told) == (state, says) and bool(found.remedy) == (state != "ok")


@pytest.mark.parametrize(
    ("capability", "state", "says"),
    [
        ((9, 0), "ok", "a GPU (9.0)"),
        ((7, 5), "wrong", "a GPU (7.5): no kernel runs there"),
        (None, "note", "none: kernels compile but cannot run"),
    ],
)
def test_gpus(capability: tuple[int, int] | None, state: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, 13000, capability)
    assert (doctor.look("GPU").state, doctor.look("GPU").told) == (state, says)


def test_torch_that_does_not_see_what_the_driver_does(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    play(monkeypatch, 13000, (9, 0))
    assert doctor.look("torch").state == "wrong"
    play(monkeypatch, 13000, None)
    assert doctor.look("torch").state == "note"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert doctor.look("torch").state == "ok"
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "not installed" in doctor.look("torch").told


@pytest.mark.parametrize("failure", [RuntimeError("no library"), ImportError("no bindings"), DeviceError("no device")])
def test_without_a_driver_kernels_are_compiled(failure: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise failure

    monkeypatch.setattr(doctor, "driver", fail)
    for name in ("driver", "GPU"):
        found = doctor.look(name)
        assert found.state == ("wrong" if name == "driver" and isinstance(failure, DeviceError) else "note")
