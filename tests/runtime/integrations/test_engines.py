"""The script that runs tests against the wheels of engines, without a download."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from scripts import SCRIPTS, load_script

engines = load_script("engines", SCRIPTS)


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Arguments of pip, which writes a small wheel in place of a download, and of pytest, which fails for 0.33.0."""
    called: list[tuple[str, ...]] = []

    def pip(*arguments: str) -> None:
        called.append(arguments)
        if arguments[0] == "download":
            folder, requirement = Path(arguments[3]), arguments[4]
            folder.mkdir(parents=True, exist_ok=True)
            with zipfile.ZipFile(folder / f"{requirement.replace('==', '-')}-cp38-abi3-linux.whl", "w") as wheel:
                for name in ("vllm/__init__.py", "vllm/_C.abi3.so", "vllm-0.dist-info/METADATA"):
                    wheel.writestr(name, "")
        else:
            Path(arguments[2]).mkdir(exist_ok=True)

    def run(command: list[str], *, env: dict[str, str], **options: Any) -> Any:
        site = (Path(env["PYTHONPATH"]) / "sitecustomize.py").read_text()
        called.append(("pytest", site))
        return SimpleNamespace(returncode=int("vllm-0.33.0" in site))

    monkeypatch.setattr(engines, "_pip", pip)
    monkeypatch.setattr(subprocess, "run", run)
    return called


def test_wheels_are_extracted_once_without_compiled_files(
    commands: list[tuple[str, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["engines.py", "--folder", str(tmp_path), "vllm==0.32.0"])
    engines.main()
    found = tmp_path / "vllm-0.32.0"
    names = {path.relative_to(found).as_posix() for path in found.rglob("*") if path.is_file()}
    assert names == {"vllm/__init__.py", "vllm-0.dist-info/METADATA"} and not any(tmp_path.glob("wheels/*"))
    assert [each[0] for each in commands] == ["download", "install", "install", "pytest"]
    assert str(found) in commands[-1][1] and str(tmp_path / "vllm-packages") in commands[-1][1]
    commands.clear()
    engines.main()
    assert [each[0] for each in commands] == ["pytest"]


def test_a_failed_version_is_named(
    commands: list[tuple[str, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["engines.py", "--folder", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"^failed: vllm 0\.33\.0$"):
        engines.main()
    monkeypatch.setattr(sys, "argv", ["engines.py", "--folder", str(tmp_path), "other"])
    with pytest.raises(SystemExit, match="2"):
        engines.main()


def test_tested_files_and_versions_are_there() -> None:
    from runtime.integrations.sglang import registration as sglang
    from runtime.integrations.vllm import registration as vllm

    root = SCRIPTS.parent
    assert all((root / path).is_file() for engine in engines.ENGINES.values() for path in engine.tests)
    assert tuple(version.rpartition(".")[0] for version in engines.ENGINES["vllm"].versions) == vllm.VERSIONS
    assert engines.ENGINES["sglang"].versions == sglang.VERSIONS
