"""The Dockerfile and scripts/install.sh: linted, read, and run as far as stand-ins go.

tests/stress/clean_install.py executes both in clean Debian roots.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROJECT = Path(__file__).resolve().parents[2]
SCRIPT = PROJECT / "scripts" / "install.sh"
SCRIPTS = sorted([*(PROJECT / "scripts").glob("*.sh"), PROJECT / ".ci" / "run"])
DEBIAN = 'PRETTY_NAME="Debian GNU/Linux 12"\nID=debian\n'


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed: pip install -e '.[dev]'")
    return found


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_linted(path: Path) -> None:
    subprocess.run(["bash", "-n", path], check=True)
    done = subprocess.run([tool("shellcheck"), "--exclude=SC1091", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_dockerfile_is_linted() -> None:
    done = subprocess.run(
        [tool("hadolint"), "--no-color", PROJECT / "Dockerfile"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


@pytest.fixture(scope="module")
def instructions() -> list[tuple[str, str]]:
    parse = pytest.importorskip("dockerfile_parse").DockerfileParser
    every = parse(path=str(PROJECT / "Dockerfile"), cache_content=True).structure
    return [(each["instruction"], each["value"]) for each in every if each["instruction"] != "COMMENT"]


def test_stages_are_slim_and_end_in_the_command(instructions: list[tuple[str, str]]) -> None:
    bases = [value for name, value in instructions if name == "FROM"]
    assert [each.partition(" AS ")[2] for each in bases] == ["wheel", "codegen", "gpu"]
    assert all(each.startswith("python:${PYTHON}-slim") for each in bases[:2]) and bases[2].startswith("codegen ")
    assert ("ENTRYPOINT", '["codegen"]') in instructions
    assert not any("nvidia/cuda" in value or "cuda-toolkit" in value for _, value in instructions)


def test_no_image_runs_as_root(instructions: list[tuple[str, str]]) -> None:
    stages: list[str] = []
    for name, value in instructions:
        stages += ["0"] if name == "FROM" else []
        if name == "USER":
            stages[-1] = value
    assert stages == ["0", "1000", "1000"], "the first one makes the wheel, and is left"


def test_what_is_copied_is_there_and_not_ignored(instructions: list[tuple[str, str]]) -> None:
    ignored = (PROJECT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert "*" in ignored
    for name, value in instructions:
        if name == "COPY" and not value.startswith("--from"):
            for source in value.split()[:-1]:
                assert (PROJECT / source).exists() and f"!{source}" in ignored, source


def test_a_wheel_is_made_of_what_the_image_has(instructions: list[tuple[str, str]]) -> None:
    import tomllib

    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))
    copied = {word for name, value in instructions if name == "COPY" for word in value.split()[:-1]}
    needed = {*project["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"], project["project"]["readme"]}
    assert needed | set(project["project"]["license-files"]) <= copied
    named = [names for _, value in instructions for names in re.findall(r"codegen\[(.*?)\]", value)]
    extras = {name for names in named for name in names.split(",")}
    assert extras - {"${CUDA}"} <= set(project["project"]["optional-dependencies"])


# The script, with stand-ins


@pytest.fixture
def host(tmp_path: Path) -> Any:
    """A host: some programs, and what the script says there."""
    programs, release = tmp_path / "bin", tmp_path / "os-release"
    programs.mkdir()
    for name in ("bash", "sed", "tr", "head", "cut", "uname", "dirname", "cat"):
        (programs / name).symlink_to(str(shutil.which(name)))

    def run(*options: str, smi: str | None = "echo '580.65.06, NVIDIA H100'", **more: Any) -> tuple[int, str, str]:
        release.write_text(more.get("release", DEBIAN))
        stand_ins = {"nvidia-smi": smi, "python3.12": more.get("python", "exit 0"), **more.get("programs", {})}
        for name, body in stand_ins.items():
            (programs / name).unlink(missing_ok=True)
            if body is not None:
                (programs / name).write_text(f"#!/bin/bash\n{body}\n")
                (programs / name).chmod(0o755)
        done = subprocess.run(
            [str(shutil.which("bash")), SCRIPT, *options],
            env={"PATH": str(programs), "OS_RELEASE": str(release)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    return run


@pytest.mark.parametrize(
    ("driver", "extra"), [("580.65.06", "cu13"), ("610.1", "cu13"), ("575.51.03", "cu12"), ("525.60.13", "cu12")]
)
def test_the_extra_follows_from_the_driver(host: Any, driver: str, extra: str) -> None:
    code, out, err = host("--dry-run", smi=f"echo '{driver}, NVIDIA L4'")
    assert code == 0, err
    assert f"driver {driver}: {extra}" in out and "GPU: NVIDIA L4" in out
    assert out.splitlines()[-3].endswith(f" --editable {PROJECT}[{extra},torch]")
    assert ("--constraint" in out) == (extra == "cu13"), "torch 2.13 has no build of CUDA 12 on PyPI"


def test_a_dry_run_does_nothing(host: Any, tmp_path: Path) -> None:
    code, out, _ = host("--dry-run", "--venv", str(tmp_path / "venv"))
    assert code == 0 and not (tmp_path / "venv").exists()
    assert [line for line in out.splitlines() if line.startswith("+ ")] == [
        f"+ python3.12 -m venv {tmp_path}/venv",
        f"+ {tmp_path}/venv/bin/pip install --constraint {PROJECT}/tests/constraints.txt "
        f"--editable {PROJECT}[cu13,torch]",
        f"+ {tmp_path}/venv/bin/codegen doctor",
    ]


def test_without_a_gpu_neither_driver_nor_torch_is_asked_for(host: Any) -> None:
    code, out, _ = host("--dry-run", "--no-gpu", smi=None)
    assert code == 0 and "without a GPU: cu13" in out and f"--editable {PROJECT}[cu13]\n" in out


@pytest.mark.parametrize(
    ("options", "more", "says"),
    [
        ((), {"smi": None}, "nvidia-smi is not found: install NVIDIA's driver"),
        ((), {"smi": "echo 'driver mismatch'; exit 9"}, "nvidia-smi fails (driver mismatch): is the driver loaded?"),
        ((), {"smi": "echo 'No devices'"}, "nvidia-smi prints no driver version, but: No devices"),
        ((), {"smi": "echo '470.1, K80'"}, "the driver is 470.1; 525 or later is needed (CUDA 12), 580 for CUDA 13"),
        (("--cuda", "cu13"), {"smi": "echo '550.1, L4'"}, "--cuda is cu13, but the driver is 550.1; 580 or later"),
        (("--cuda", "cu11"), {}, "--cuda is cu11; allowed: cu12, cu13"),
        (("--cuda",), {}, "--cuda needs a value; see --help"),
        (("--frobnicate",), {}, "unknown option --frobnicate; see --help"),
        ((), {"release": "ID=fedora\n"}, "this is fedora: this script is for Debian and Ubuntu"),
        (
            (),
            {"python": None},
            "Python 3.11 or later is not found: apt-get install python3.11 python3.11-venv",
        ),
        ((), {"python": '[[ "$2" != *ensurepip* ]]'}, "python3.12 cannot create virtual environments: apt-get install"),
        (("--venv", "/etc"), {}, "/etc exists and is not a virtual environment"),
    ],
)
def test_what_is_missing_is_named_before_anything_is_written(
    host: Any, options: tuple[str, ...], more: dict[str, Any], says: str
) -> None:
    code, out, err = host("--dry-run", *options, **more)
    assert code == 1 and err.startswith("error: ") and says in err, (out, err)
    assert "+ " not in out


def test_missing_packages_are_installed_where_that_is_asked_for(host: Any) -> None:
    code, out, err = host("--apt", "--dry-run", python=None)
    assert code == 0, err
    assert "+ apt-get install --yes python3.11 python3.11-venv\n" in out and "+ python3.11 -m venv" in out


def test_a_derivative_of_ubuntu_is_one(host: Any) -> None:
    assert host("--dry-run", release='ID=linuxmint\nID_LIKE="ubuntu debian"\n')[0] == 0


VENV = """\
[ "$1" = -m ] || exit 0
mkdir -p {venv}/bin && touch {venv}/pyvenv.cfg
printf '#!/bin/bash\\n' > {venv}/bin/pip
printf '#!/bin/bash\\nexit {code}\\n' > {venv}/bin/codegen
chmod +x {venv}/bin/pip {venv}/bin/codegen
"""


@pytest.mark.parametrize("wrong", [0, 1])
def test_what_doctor_finds_is_the_scripts_exit_code(host: Any, tmp_path: Path, wrong: int) -> None:
    tools = {name: f'exec {shutil.which(name)} "$@"' for name in ("mkdir", "chmod", "touch")}
    python = VENV.format(venv=tmp_path / "venv", code=wrong)
    code, out, err = host("--venv", str(tmp_path / "venv"), python=python, programs=tools)
    assert code == wrong and ("done: . " in out) == (not wrong)
    assert ("the package is installed, but codegen doctor found a problem" in err) == bool(wrong)


def test_the_script_that_executes_both_is_a_program() -> None:
    pytest.importorskip("dockerfile_parse")
    done = subprocess.run(
        [sys.executable, str(PROJECT / "tests" / "stress" / "clean_install.py"), "--help"],
        env=os.environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and "--root" in done.stdout
