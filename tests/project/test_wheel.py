"""The built wheel carries templates and specs: it renders in an environment that has never seen the source tree."""

from __future__ import annotations

import os
import shlex
import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest
from wheel import PROJECT, build_editable, build_from, built_wheel, call, install, installed_wheel, run

from codegen import __version__
from codegen.library import find_spec, shipped_names
from codegen.render import render


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_wheel(tmp_path_factory)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed_wheel(tmp_path_factory)


def test_contents(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("templates", "specs"):
        files = {path.relative_to(PROJECT).as_posix() for path in (PROJECT / folder).rglob("*") if path.is_file()}
        assert {f"codegen/data/{file}" for file in files} <= names
    assert {"codegen/select/measurements.jsonl", "runtime/tools/report/pages/report.css"} <= names
    assert {"codegen/py.typed", "runtime/py.typed", "codegen/__init__.py", "runtime/cli.py"} <= names
    assert {
        f"sparse_kernel_codegen/{name}" for name in ("__init__.py", "command.py", "patterns.py", "py.typed")
    } <= names
    assert not [name for name in names if name.startswith(("tests/", "docs/", "templates/", "specs/"))]


def copy_of_the_tree(place: Path, modified: int, mode: int) -> Path:
    """Copy what a release is made of, as another checkout would have it: another path, other times, other modes."""
    shutil.copytree(PROJECT, place, ignore=shutil.ignore_patterns(".*", "__pycache__", "dist", "build", "*.egg-info"))
    shutil.copy(PROJECT / ".gitignore", place)
    for path in place.rglob("*"):
        os.utime(path, (modified, modified))
        if path.is_file():
            path.chmod(mode)
    return place


def test_two_builds_of_a_release_have_the_same_bytes(tmp_path: Path) -> None:
    """With SOURCE_DATE_EPOCH, whatever the checkout; a wheel made of the sdist is that of the tree."""
    built = []
    for name, modified, mode in (("one", 10**9, 0o644), ("the other", 1_700_000_000, 0o600)):
        (folder := tmp_path / f"{name}.dist").mkdir()
        tree = copy_of_the_tree(tmp_path / name, modified, mode)
        build_from(tree, folder, SOURCE_DATE_EPOCH="1600000000")
        built.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert sorted(Path(name).suffix for name in built[0]) == [".gz", ".whl"]
    assert built[0].keys() == built[1].keys()
    assert not [name for name in built[0] if built[0][name] != built[1][name]]
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        assert {member.mtime for member in archive} == {1600000000}
        archive.extractall(tmp_path / "unpacked")  # of our own making: no filter, which Python 3.11.2 has not
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    (again := tmp_path / "again").mkdir()
    build_from(unpacked, again, "--wheel", SOURCE_DATE_EPOCH="1600000000")
    assert [built[0][path.name] == path.read_bytes() for path in again.iterdir()] == [True]


def test_renders_from_another_folder(installed: Path, tmp_path: Path) -> None:
    where = call(installed / "python", "-c", "import codegen; print(codegen.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(installed.parent)
    call(installed / "codegen", "render", "h100_topk32", "--out", "out", cwd=tmp_path)
    assert (tmp_path / "out" / "h100_topk32.cu").read_bytes() == render(find_spec("h100_topk32")).encode()


def test_lists_and_checks_what_it_carries(installed: Path, tmp_path: Path) -> None:
    listed = call(installed / "codegen", "list", cwd=tmp_path)
    assert [row.split()[0] for row in listed.splitlines()] == shipped_names()
    call(installed / "codegen", "check", cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_reports_what_it_carries(installed: Path, tmp_path: Path) -> None:
    call(installed / "codegen", "report", "l4_topk32", "--out", "report", cwd=tmp_path)
    text = (tmp_path / "report" / "kernel-l4_topk32.html").read_text(encoding="utf-8")
    assert "no repository" in text and "cases on NVIDIA" in text


def test_hints_name_packages_that_a_registry_has(installed: Path, tmp_path: Path) -> None:
    code = "from codegen.installation import install_command; print(install_command('torch'))"
    told = call(installed / "python", "-c", code, cwd=tmp_path)
    assert sorted(shlex.split(told)) == ["install", "numpy>=1.26", "pip", "torch>=2.6"]


def test_tells_its_version(wheel: Path, installed: Path, tmp_path: Path) -> None:
    assert call(installed / "codegen", "--version", cwd=tmp_path) == f"codegen {__version__}\n"
    assert wheel.name.startswith(f"sparse_kernel_codegen-{__version__}-")


@pytest.mark.parametrize("name", ["codegen", "runtime"])
@pytest.mark.parametrize("form", ["module", "package"])
def test_another_module_of_the_same_name_is_told(installed: Path, tmp_path: Path, name: str, form: str) -> None:
    other = tmp_path / f"{name}.py" if form == "module" else tmp_path / name / "__init__.py"
    other.parent.mkdir(exist_ok=True)
    other.touch()
    done = run(installed / "codegen", "list", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: the module {name} is found at {tmp_path}") and "PYTHONPATH" in done.stderr
    assert "Traceback" not in done.stderr
    for code in ("skc.CodegenError", "skc.__version__", "skc.patterns", "from sparse_kernel_codegen.nn import *"):
        python = (installed / "python", "-c", f"import sparse_kernel_codegen as skc; {code}")
        done = run(*python, cwd=tmp_path, PYTHONPATH=str(tmp_path))
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1].startswith(f"ImportError: the module {name} is found at {tmp_path}")


@pytest.fixture(scope="module")
def editable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(build_editable(tmp_path_factory.mktemp("dist")), tmp_path_factory.mktemp("env"))


def test_an_editable_install_copies_nothing(editable: Path, tmp_path: Path) -> None:
    (site,) = (editable.parent / "lib").glob("python*/site-packages")
    assert not [path for name in ("codegen*", "runtime*", "sparse_kernel_codegen") for path in site.glob(name)]
    code = "import sparse_kernel_codegen, codegen; print(sparse_kernel_codegen.__file__, codegen.__file__)"
    places = call(editable / "python", "-c", code, cwd=tmp_path).split()
    assert all(Path(place).is_relative_to(PROJECT) for place in places), places


def test_an_editable_install_takes_the_source_tree_that_pythonpath_names(editable: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    for name in ("codegen", "runtime", "sparse_kernel_codegen", "templates", "specs", "generated"):
        shutil.copytree(PROJECT / name, other / name, ignore=shutil.ignore_patterns("__pycache__"))
    for tree, version in ((None, __version__), (PROJECT, __version__), (other, "7.0")):
        if tree == other:
            (other / "codegen" / "__init__.py").write_text(f'__version__ = "{version}"\n')
        environment = {} if tree is None else {"PYTHONPATH": str(tree)}
        told = call(editable / "codegen", "--version", cwd=tmp_path, **environment)
        assert told == f"codegen {version}\n"
