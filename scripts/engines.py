"""Runs the tests of integrations against the Python of serving engines, without installing them.

    python scripts/engines.py --folder /tmp/engines                  # every engine and version
    python scripts/engines.py --folder /tmp/engines vllm==0.32.0     # this one

An engine's wheel needs its own torch and hundreds of packages. This script downloads the wheel alone, extracts its
Python files, and installs the few packages that the tested modules import. The tests run with the torch of this
environment, whose packages come before those of an engine. No GPU is needed: compiled files of an engine are left out.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SITE = "import sys\n\nsys.path += {folders!r}\n"
"""A module that Python imports when it starts."""
SUFFIXES = (".py", ".json", "METADATA", "entry_points.txt", ".cuh", ".h")
"""Ends of the names of extracted files. SGLang looks for the folders of its headers when it is imported."""


@dataclass(frozen=True)
class Engine:
    """An engine.

    Attributes:
        versions: those that the tests run with.
        packages: what the tested modules import, besides torch.
        alone: the same, of packages that need torch or the like to be installed.
        tests: test files.
    """

    versions: tuple[str, ...]
    packages: tuple[str, ...]
    alone: tuple[str, ...]
    tests: tuple[str, ...]


ENGINES = {
    "vllm": Engine(
        ("0.32.0", "0.33.0"),
        (
            *(
                "aiohttp",
                "apache-tvm-ffi",
                "blake3",
                "cachetools",
                "cbor2",
                "cloudpickle",
                "einops",
                "fastapi",
                "llguidance",
                "msgspec",
            ),
            *("openai", "openai-harmony", "orjson", "partial-json-parser", "pillow", "prometheus-client", "psutil"),
            *("py-cpuinfo", "pybase64", "pyzmq", "regex", "requests", "transformers>=5.16.1,<5.21", "uvloop"),
        ),
        ("xgrammar",),
        ("tests/runtime/integrations/test_vllm_interface.py",),
    ),
    "sglang": Engine(
        ("0.5.22", "0.5.23"),
        (
            *("addict==2.4.0", "aiohttp", "cloudpickle==3.1.2", "dill", "einops", "fastapi", "imageio==2.36.0"),
            *("interegular", "ipython", "llguidance", "loguru", "msgspec"),
            *(
                "nvidia-ml-py",
                "openai==2.8.0",
                "orjson",
                "partial-json-parser",
                "pillow",
                "prometheus-client",
                "psutil",
            ),
            *("pybase64", "python-dateutil", "python-multipart", "pytz", "pyzmq", "requests", "sentencepiece"),
            *("setproctitle", "tiktoken"),
            *("transformers==5.19.0", "uvicorn", "uvloop"),
        ),
        (
            *("apache-tvm-ffi==0.1.11", "cache-dit==1.5.1", "compressed-tensors==0.18.0", "diffusers==0.37.0"),
            *("gguf", "triton", "xgrammar==0.2.7"),
        ),
        (
            "tests/runtime/integrations/test_sglang_interface.py",
            "tests/runtime/integrations/test_sglang_diffusion_interface.py",
        ),
    ),
}


def extracted(name: str, version: str, folder: Path) -> Path:
    """Folder with the Python files of a wheel, downloaded unless it is there."""
    found = folder / f"{name}-{version}"
    if (found / name).is_dir():
        return found
    wheels = folder / "wheels"
    _pip("download", "--no-deps", "--dest", str(wheels), f"{name}=={version}")
    (wheel,) = wheels.glob(f"{name}-{version}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(found, [each for each in archive.namelist() if each.endswith(SUFFIXES)])
    wheel.unlink()
    return found


def installed(name: str, folder: Path) -> Path:
    """Folder with the packages of an engine, installed unless it is there."""
    found = folder / f"{name}-packages"
    if not found.is_dir():
        partial = found.with_suffix(".partial")
        _pip("install", "--target", str(partial), *ENGINES[name].packages)
        _pip("install", "--target", str(partial), "--no-deps", *ENGINES[name].alone)
        partial.rename(found)
    return found


def run(name: str, version: str, folder: Path, options: Sequence[str]) -> int:
    """Run the tests of an engine; return pytest's exit status."""
    folders = [str(extracted(name, version, folder)), str(installed(name, folder))]
    site = folder / f"{name}-{version}-site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(SITE.format(folders=folders))
    environment = os.environ | {"PYTHONPATH": str(site)}
    print(f"{name} {version}", flush=True)
    command = [sys.executable, "-m", "pytest", *ENGINES[name].tests, *options]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def _pip(*arguments: str) -> None:
    """Run pip of this environment."""
    subprocess.run([sys.executable, "-m", "pip", "--quiet", *arguments], check=True)


def main() -> None:
    """Run the tests that the command names, and end with 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", nargs="*", help="NAME or NAME==VERSION; default: all")
    parser.add_argument("--folder", type=Path, required=True, help="keeps extracted wheels and packages")
    parser.add_argument("--pytest", nargs=argparse.REMAINDER, default=[], help="options of pytest, last")
    given = parser.parse_args()
    wanted: list[tuple[str, str]] = []
    for each in given.engines or ENGINES:
        name, _, version = each.partition("==")
        if name not in ENGINES:
            parser.error(f"engine is {name!r}, expected one of {', '.join(ENGINES)}")
        wanted += [(name, version)] if version else [(name, known) for known in ENGINES[name].versions]
    folder = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    failed = [f"{name} {version}" for name, version in wanted if run(name, version, folder, given.pytest)]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
