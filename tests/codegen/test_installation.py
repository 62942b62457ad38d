"""Commands that install what the package lacks: from a checkout, and from an installed wheel."""

from __future__ import annotations

import importlib.metadata
import json
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from codegen import installation
from codegen.installation import install_command, reinstall_command

PROJECT = Path(__file__).resolve().parents[2]
EXTRAS = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
REQUIRES = ["pyyaml>=6", 'torch>=2.6; extra == "torch"', "numpy>=1.26; extra == 'torch'", "optuna; extra == 'tune'"]


class Distribution:
    """An installed wheel that pip found in a folder."""

    def read_text(self, name: str) -> str:
        assert name == "direct_url.json"
        return json.dumps({"url": "file:///a folder/some.whl", "archive_info": {}})


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if the package were installed from a wheel."""
    monkeypatch.setattr(installation, "_TREE", tmp_path)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: REQUIRES)
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Distribution())
    installation._packages.cache_clear()
    yield
    installation._packages.cache_clear()


def test_a_checkout_installs_its_own_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PROJECT)
    assert install_command("torch") == "pip install -e '.[torch]'"
    monkeypatch.chdir(tmp_path)
    assert shlex.split(install_command("torch")) == ["pip", "install", "-e", f"{PROJECT}[torch]"]


def test_a_wheel_names_the_packages_of_the_extra(wheel: None) -> None:
    assert install_command("torch") == "pip install 'torch>=2.6' 'numpy>=1.26'"
    assert install_command("tune") == "pip install optuna"


def test_without_metadata_the_extra_is_named(wheel: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", missing)
    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    assert install_command("torch") == "pip install 'sparse-kernel-codegen[torch]'"
    assert reinstall_command() == "pip install --force-reinstall --no-deps WHEEL"


def test_the_wheel_is_installed_again_from_its_place(wheel: None) -> None:
    assert reinstall_command() == "pip install --force-reinstall --no-deps 'file:///a folder/some.whl'"


def test_torch_brings_numpy() -> None:
    assert any(each.startswith("numpy") for each in EXTRAS["torch"])
