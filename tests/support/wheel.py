"""The built wheel, and an environment that has it and has never seen the source tree."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Make a folder for all processes and test files of a run: one makes it, the others wait."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.with_suffix(".made").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            folder.with_suffix(".made").touch()
    return folder


def built_wheel(factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree, built once in a run."""
    (path,) = made_once(factory, "wheel", build).glob("*.whl")
    return path


def installed_wheel(factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment with that wheel, installed once in a run; tests write nothing there."""
    wheel = built_wheel(factory)
    return made_once(factory, "environment", lambda folder: install(wheel, folder)) / "bin"


def run(*command: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command; of Python's variables it gets those that are given."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")} | environment
    return subprocess.run(list(map(str, command)), cwd=cwd, env=environ, capture_output=True, text=True, check=False)


def call(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Run a command that succeeds; return what it printed."""
    done = run(*command, cwd=cwd, **environment)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def build(folder: Path) -> Path:
    """Build the wheel into a folder."""
    build_from(PROJECT, folder, "--wheel")
    (path,) = folder.glob("*.whl")
    return path


def build_from(tree: Path, folder: Path, *what: str, **environment: str) -> None:
    """Build into a folder what a source tree is released as: wheel and sdist, unless something else is asked for."""
    command = (sys.executable, "-m", "build", *(what or ("--wheel", "--sdist")), "--no-isolation", "--outdir", folder)
    call(*command, tree, cwd=folder, **environment)


def build_editable(folder: Path) -> Path:
    """Build into a folder what an editable install installs: a wheel that names this source tree."""
    code = "import hatchling.build, sys; hatchling.build.build_editable(sys.argv[1])"
    call(sys.executable, "-c", code, folder, cwd=PROJECT)
    (path,) = folder.glob("*.whl")
    return path


def install(wheel: Path, folder: Path) -> Path:
    """Install the wheel into a new environment, whose dependencies are those of this one; return its bin folder."""
    call(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    python = folder / "bin" / "python"
    call(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    site = Path(call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"
