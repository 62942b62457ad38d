"""The built wheel carries templates and specs: it renders in an environment that has never seen the source tree."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from codegen.library import find_spec, shipped_names
from codegen.render import render

PROJECT = Path(__file__).resolve().parents[2]


def call(*command: str | Path, cwd: Path) -> str:
    environ = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    call(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, PROJECT, cwd=out)
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a fresh environment that holds the wheel; its dependencies are those of this one."""
    folder = tmp_path_factory.mktemp("env")
    call(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    python = folder / "bin" / "python"
    call(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    site = Path(call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


def test_contents(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("templates", "specs"):
        files = {path.relative_to(PROJECT).as_posix() for path in (PROJECT / folder).rglob("*") if path.is_file()}
        assert {f"codegen/data/{file}" for file in files} <= names
    assert "codegen/select/measurements.jsonl" in names
    assert {"codegen/py.typed", "runtime/py.typed", "codegen/__init__.py", "runtime/cli.py"} <= names
    assert not [name for name in names if name.startswith(("tests/", "docs/", "templates/", "specs/"))]


def test_renders_from_another_folder(installed: Path, tmp_path: Path) -> None:
    where = call(installed / "python", "-c", "import codegen; print(codegen.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(installed.parent)
    call(installed / "codegen", "render", "h100_topk32", "--out", "out", cwd=tmp_path)
    assert (tmp_path / "out" / "h100_topk32.cu").read_bytes() == render(find_spec("h100_topk32")).encode()


def test_lists_and_checks_what_it_carries(installed: Path, tmp_path: Path) -> None:
    listed = call(installed / "codegen", "list", cwd=tmp_path)
    assert [row.split()[0] for row in listed.splitlines()[1:]] == shipped_names()
    call(installed / "codegen", "check", cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []
