"""A small project with two groups of a second tier (tests/support/tiers.py), and runs of its tests."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import tiers

GROUPS = {
    "tool": tiers.Group(("tests/test_tool.py",), ("tool", "page.md")),
    "script": tiers.Group(("tests/test_script.py",), ("benchmarks/script.py",)),
}
CONFTEST = f"""
import tiers
from tiers import Group

pytest_plugins = ["tiers"]
tiers.GROUPS = {GROUPS!r}


def pytest_addoption(parser):
    parser.addoption("--kernel-seed", type=int, default=1)
"""
FILES = {
    "pytest.ini": "[pytest]\ntestpaths = tests\npythonpath = tests/support .\naddopts = --import-mode=importlib\n"
    "markers = nightly: at night\n",
    "tests/conftest.py": CONFTEST,
    "tests/support/helper.py": "VALUE = 1\n",
    "tests/test_tool.py": "import helper\nfrom tool.run import run\n\n"
    "def test_one(): assert run() == helper.VALUE\ndef test_two(): pass\n",
    "tests/test_script.py": "def test_script(): pass\n",
    "tests/test_core.py": "import pytest\n\ndef test_core(): pass\n\n@pytest.mark.nightly\ndef test_at_night(): pass\n",
    "tool/run.py": "from core.values import value\n\ndef run(): return value()\n",
    "core/values.py": "import core.deep\n\ndef value(): return 1\n",
    "core/deep.py": "",
    "core/other.py": "",
    "page.md": "a page\n",
    "benchmarks/script.py": "import part\n",
    "benchmarks/part.py": "import part_of_part\n",
    "benchmarks/part_of_part.py": "",
}
TWO = ("-p", "xdist.plugin", "-n2")  # processes
TOOL, SCRIPT, CORE = {"test_one", "test_two"}, {"test_script"}, {"test_core"}


class Project:
    """A small project with two groups, and runs of its tests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, text in FILES.items():
            self.write(name, text)
        shutil.copy(tiers.__file__, folder / "tests" / "support")
        (folder / "tests" / "records").mkdir(exist_ok=True)

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def run(self, *arguments: str) -> tuple[set[str], str]:
        """The tests that passed or failed in a run, and its last lines."""
        command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", *arguments]
        environ = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": ""}
        done = subprocess.run(command, cwd=self.folder, env=environ, capture_output=True, text=True, check=False)
        names = re.findall(r"^(?:PASSED|FAILED) \S+::(\w+)", done.stdout, re.MULTILINE)
        return set(names), "\n".join(done.stdout.splitlines()[-12:]) + done.stderr

    def record(self) -> dict[str, dict[str, object]]:
        found: dict[str, dict[str, object]] = json.loads((self.folder / "tests" / "records" / "tiers.json").read_text())
        return found

    def seed_for(self, group: str) -> str:
        """An option with a seed whose group of the day is this one."""
        draws = {name: seed for seed in range(20) for name in [tiers.group_of_the_day(["script", "tool"], seed)]}
        return f"--kernel-seed={draws[group]}"
