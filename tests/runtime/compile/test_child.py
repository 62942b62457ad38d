"""The process of a compilation: what of its surroundings reaches it, and what is said when it ends otherwise."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.compile import child, toolchain
from runtime.compile.compiler import run_nvrtc
from runtime.errors import CompileError, ToolchainError

pytestmark = pytest.mark.nvrtc

PROJECT = Path(__file__).resolve().parents[3]
SOURCE = '#include <cuda_fp16.h>\nextern "C" __global__ void f(half* p) { *p = __float2half(1.0f); }\n'
OPTIONS = ("--gpu-architecture=sm_89",)
# Compiles, and prints nothing but the number of bytes.
COMPILE = f"""
from runtime.compile.compiler import run_nvrtc
code, log = run_nvrtc({SOURCE!r}, "f.cu", "cubin", {OPTIONS!r}, ("cuda_fp16.h",))
assert code[:4] == b"\\x7fELF"
print("compiled")
"""


def compiles(before: str = "", flags: tuple[str, ...] = (), **environment: str) -> subprocess.CompletedProcess[str]:
    """Compile in a Python that is started in these surroundings."""
    given = {**os.environ, "PYTHONPATH": str(PROJECT), **environment}
    command = [sys.executable, *flags, "-c", before + COMPILE]
    return subprocess.run(command, env=given, capture_output=True, text=True, check=False, timeout=120)


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Makes a program that is started in Python's stead."""

    def make(text: str) -> Path:
        path = tmp_path / "program"
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(child.multiprocessing.spawn, "get_executable", lambda: os.fsencode(path))
        return path

    return make


def compile_here() -> bytes:
    return run_nvrtc(SOURCE, "f.cu", "cubin", OPTIONS, ("cuda_fp16.h",))[0]


def refusal() -> str:
    with pytest.raises(ToolchainError) as caught:
        compile_here()
    return str(caught.value)


def test_a_sitecustomize_that_prints_does_not_reach_it(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; print('noise'); print('noise', file=sys.stderr)\n")
    done = compiles(PYTHONPATH=f"{tmp_path}{os.pathsep}{PROJECT}")
    assert done.stdout == "noise\ncompiled\n", done.stderr


@pytest.mark.parametrize(
    "before",
    [
        "import pathlib, sys; sys.path.insert(0, pathlib.Path('/nowhere'))",
        "import sys; sys.path += [f'/nowhere/{i:0200}' for i in range(3000)]",
        "import sys; sys.path.append('/a:b')",
        "import sys; sys.path.append('/\\u00e9\\udcff')",
        "import os, tempfile; d = tempfile.mkdtemp(); os.chdir(d); os.rmdir(d)",
        "import runtime.compile.child, sys; sys.executable = None",
    ],
    ids=["path_object", "3000_entries", "colon", "bytes_that_are_no_text", "folder_is_gone", "no_executable_later"],
)
def test_what_the_callers_python_has_does_not_reach_it(before: str) -> None:
    done = compiles(before + "\n")
    assert done.stdout == "compiled\n", done.stderr


@pytest.mark.parametrize(
    "environment",
    [
        {"TMPDIR": "/nowhere"},
        {"PYTHONVERBOSE": "1"},
        {"PYTHONSTARTUP": "/nowhere"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    ],
    ids="_".join,
)
def test_what_the_environment_has_does_not_reach_it(environment: dict[str, str]) -> None:
    done = compiles(f"import os; os.environ.update({environment!r})\n", **environment)
    assert done.stdout == "compiled\n", done.stderr


@pytest.mark.parametrize("name", ["a:b", "\N{GREEK SMALL LETTER OMEGA}\N{SNOWMAN}", "with a space"])
@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_a_checkout_may_lie_anywhere(tmp_path: Path, name: str, locale: str) -> None:
    (tmp_path / name).mkdir()
    for folder in ("codegen", "runtime", "templates", "specs"):
        (tmp_path / name / folder).symlink_to(PROJECT / folder)
    # PYTHONPATH cannot have a colon; sys.path can.
    before = f"import os, sys; sys.path.insert(0, os.fsdecode({os.fsencode(tmp_path / name)!r}))\n"
    done = compiles(before, PYTHONPATH="", LC_ALL=locale, PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert done.stdout == "compiled\n", done.stderr


def test_headers_in_a_folder_of_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "\N{SNOWMAN} a:b"
    folder.mkdir()
    (folder / "mine.h").write_text("#define VALUE 1\n")
    monkeypatch.setattr(toolchain, "include_folders", lambda headers: (folder,))
    toolchain.headers_digest.cache_clear()
    try:
        code, _ = run_nvrtc("#include <mine.h>\n__device__ int x = VALUE;\n", "f.cu", "cubin", OPTIONS, ("mine.h",))
        assert code[:4] == b"\x7fELF"
        (folder / "mine.h").write_text("#define VALUE 2\n")
        with pytest.raises(ToolchainError, match=r"the CUDA headers changed .* restart the process"):
            run_nvrtc("#include <mine.h>\n__device__ int x = VALUE;\n", "f.cu", "cubin", OPTIONS, ("mine.h",))
    finally:
        toolchain.headers_digest.cache_clear()


def test_an_updated_compiler_is_not_taken_for_the_one_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = child.ask

    def updated(request: dict[str, object], name: str) -> tuple[dict[str, object], bytes]:
        told, code = answered(request, name)
        return {**told, "loaded": {**told["loaded"], "stamp": [1, 2]}}, code

    monkeypatch.setattr(child, "ask", updated)
    assert "the CUDA NVRTC changed since this process first read them" in refusal()


def test_a_wrapper_of_python_may_print(program: Callable[[str], Path]) -> None:
    program(f'#!/bin/sh\necho "loading modules"\nexec {sys.executable} "$@"\n')
    assert compile_here()[:4] == b"\x7fELF"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("#!/bin/sh\nexec cat\n", "gave no answer (ended with exit code 0): is "),
        ("#!/bin/sh\necho 'unknown option -S' >&2\nexit 2\n", "gave no answer (unknown option -S): is "),
        ("#!/bin/sh\nkill -9 $$\n", "was ended by SIGKILL, possibly by the system because memory ran out: free some"),
        ("#!/bin/sh\nexit 137\n", "was ended by SIGKILL, possibly by the system because memory ran out: free some"),
        ("#!/bin/sh\nkill -SEGV $$\n", "was ended by SIGSEGV"),
        ("no program", "Exec format error; multiprocessing.set_executable(PATH) names the Python"),
    ],
    ids=["cat", "other_program", "killed", "killed_in_a_shell", "crashed", "no_program"],
)
def test_a_process_without_an_answer_is_no_refused_source(program: Callable[[str], Path], text: str, says: str) -> None:
    path = program(text)
    found = refusal()
    assert says in found and "does not compile" not in found
    assert "is " not in says or f"is {path} Python 3.11 or later? multiprocessing.set_executable" in found


@pytest.mark.parametrize("nothing", [None, b""])
def test_without_a_python_it_says_how_to_name_one(nothing: bytes | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child.multiprocessing.spawn, "get_executable", lambda: nothing)
    assert refusal() == (
        "no Python executable is known that could run the compilation (sys.executable is empty); "
        "multiprocessing.set_executable(PATH) names the Python that is started"
    )


def test_only_what_nvrtc_refuses_does_not_compile() -> None:
    with pytest.raises(CompileError):
        run_nvrtc("int x = y;\n", "f.cu", "cubin", OPTIONS)
    with pytest.raises(ToolchainError, match=r"NVRTC .* failed on f\.cu: NVRTC_ERROR_INVALID_OPTION\n.*architecture"):
        run_nvrtc("int x;\n", "f.cu", "cubin", ("--gpu-architecture=sm_10",))


def test_a_library_that_is_none_is_told(tmp_path: Path) -> None:
    library = tmp_path / "libnvrtc.so.13"
    library.write_bytes(b"not a library")
    request = {"library": child.text_of(library), "folders": [], "headers": []}
    rest = {"source": "", "name": "f.cu", "target": "cubin", "options": []}
    with pytest.raises(ToolchainError, match=r"NVRTC cannot be used for f\.cu: .*libnvrtc\.so\.13"):
        child.ask({**request, **rest}, "f.cu")
    assert json.dumps(request)


def test_a_compiler_that_hangs_is_ended(program: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    program("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setenv(child.TIME_LIMIT, "0.3")
    assert "was stopped after 0.3 s; CODEGEN_COMPILE_TIMEOUT is the limit in seconds; 0 disables it" in refusal()
    monkeypatch.setenv(child.TIME_LIMIT, "soon")
    assert "CODEGEN_COMPILE_TIMEOUT is 'soon'; expected a number of seconds" in refusal()
    for given, seconds in (("", child.SECONDS), ("0", None), ("7.5", 7.5)):
        monkeypatch.setenv(child.TIME_LIMIT, given)
        assert child.time_limit() == seconds
