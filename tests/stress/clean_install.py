"""Runs the lines of the Dockerfile, and scripts/install.sh, in clean Debian roots: no container engine is needed.

    sudo python tests/stress/clean_install.py --root /var/tmp/bookworm                 # stages wheel and codegen
    sudo python tests/stress/clean_install.py --root /var/tmp/bookworm --stage gpu     # with torch: downloads 3 GB
    sudo python tests/stress/clean_install.py --root /var/tmp/bookworm --script        # scripts/install.sh

A root is made by debootstrap if it is not there; stages are copies of it beside it, which are removed at the end.
Python is Debian's there (3.11), where the image's base has its own: all else of a line is as it stands. ENV, ARG, USER,
WORKDIR and COPY are followed; what the container runtime does (ENTRYPOINT, GPUs) is not. The driver of scripts/
install.sh is a stand-in of nvidia-smi, so that `codegen doctor` ends in what a host without a driver gets.
--share copies files or folders of this machine into the root, as pip's configuration.
"""

from __future__ import annotations

import argparse
import os
import shutil
import string
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dockerfile_parse import DockerfileParser

PROJECT = Path(__file__).resolve().parents[2]
PACKAGES = "python3,python3-venv,python3-pip,ca-certificates"
NVIDIA_SMI = "#!/bin/sh\necho '580.65.06, NVIDIA H100 80GB HBM3'\n"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass
class Stage:
    """A root in which lines are executed, and what holds for the next one."""

    root: Path
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": PATH})
    arguments: dict[str, str] = field(default_factory=dict)
    user: str = "0"
    folder: str = "/"

    def run(self, line: str) -> None:
        """Execute a shell line as its user, in its folder; one that fails ends it all."""
        told = {**self.arguments, **self.environment, **pip_variables()}
        told["HOME"] = "/root" if self.user == "0" else "/home/codegen"
        command = ["chroot", f"--userspec={self.user}:{self.user}", str(self.root), "/bin/sh", "-ec"]
        began = time.monotonic()
        print(f"RUN  {line}", flush=True)
        proc = self.root / "proc"
        subprocess.run(["mount", "-t", "proc", "proc", str(proc)], check=True)  # programs find themselves by it
        try:
            subprocess.run([*command, f"cd {self.folder} && {line}"], env=told, check=True)
        finally:
            subprocess.run(["umount", str(proc)], check=True)
        print(f"     {time.monotonic() - began:.0f} s", flush=True)


def pip_variables() -> dict[str, str]:
    """Return what tells pip where it is; the rest of this machine's environment is left out."""
    return {name: value for name, value in os.environ.items() if name.startswith("PIP_") or name.endswith("_proxy")}


def instructions() -> Iterator[tuple[str, str]]:
    """Yield the instructions of the Dockerfile, with their values."""
    for each in DockerfileParser(path=str(PROJECT / "Dockerfile"), cache_content=True).structure:
        if each["instruction"] != "COMMENT":
            yield each["instruction"], each["value"]


def base_root(root: Path, mirror: str, shared: list[Path]) -> None:
    """Make the root that stages are copies of, if it is not there."""
    if not (root / "bin").exists():
        if not shutil.which("debootstrap"):
            raise SystemExit("error: debootstrap is not found: apt-get install debootstrap")
        command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(root), mirror]
        subprocess.run(command, check=True)
    for path in [Path("/etc/resolv.conf"), *shared]:
        target = root / path.relative_to("/")
        if not path.exists():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            shutil.copytree(path, target, symlinks=True, dirs_exist_ok=True)
        else:
            target.unlink(missing_ok=True)
            shutil.copy2(path, target)


def copied(source: Path, target: Path) -> Path:
    """Copy a root."""
    if target.exists():
        shutil.rmtree(target)
    subprocess.run(["cp", "--archive", "--reflink=auto", str(source), str(target)], check=True)
    return target


def copy(stage: Stage, value: str, stages: dict[str, Stage]) -> None:
    """Follow a COPY."""
    words = value.split()
    origin = PROJECT
    if words[0].startswith("--from="):
        origin = stages[words.pop(0).partition("=")[2]].root
    *sources, target = words
    for source in sources:
        path = origin / source.lstrip("/")
        place = stage.root / (Path(stage.folder) / target).relative_to("/")  # an absolute target stays one
        if path.is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(path, place, dirs_exist_ok=True, ignore=ignore)
        else:
            place.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, place)
    print(f"COPY {value}", flush=True)


def build(root: Path, last: str) -> list[str]:
    """Follow the Dockerfile up to a stage, and return the stages."""
    stages: dict[str, Stage] = {}
    arguments: dict[str, str] = {}
    current: Stage | None = None
    for name, value in instructions():
        if name == "FROM":
            if last in stages:
                break
            base, _, stage_name = value.partition(" AS ")
            source = stages.get(base)
            place = copied(source.root if source else root, root.with_name(f"{root.name}-{stage_name}"))
            current = Stage(place)
            if source is not None:
                current = replace(source, root=place, environment=dict(source.environment), arguments={})
            stages[stage_name] = current
            print(f"FROM {value}{'' if source else f': a copy of {root}'}", flush=True)
        elif current is None or name == "ARG":
            key, _, default = value.partition("=")
            (arguments if current is None else current.arguments)[key] = default or arguments.get(key, "")
        else:
            follow(current, name, value, stages)
    if last == "codegen" and current is not None:
        current.run("codegen compile h100_topk32 --check")  # the compiler is that of the receipts, and makes the same
    return list(stages)


def follow(stage: Stage, name: str, value: str, stages: dict[str, Stage]) -> None:
    """Follow an instruction of a stage."""
    expanded = string.Template(value).safe_substitute(stage.arguments | stage.environment)
    if name == "RUN":
        stage.run(value)
    elif name == "COPY":
        copy(stage, expanded, stages)
    elif name == "ENV":
        stage.environment |= dict(part.split("=", 1) for part in expanded.split())
    elif name == "USER":
        stage.user = value
    elif name == "WORKDIR":
        stage.folder = value
        (stage.root / value.lstrip("/")).mkdir(parents=True, exist_ok=True)
    elif name not in ("ENTRYPOINT", "CMD"):
        raise SystemExit(f"error: {name} is not followed by this script")


def install(root: Path, options: list[str]) -> None:
    """Run scripts/install.sh on a copy of the checkout in a clean root."""
    place = copied(root, root.with_name(f"{root.name}-script"))
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=PROJECT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        target = place / "checkout" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(PROJECT / name, target)
    smi = place / "usr/local/bin/nvidia-smi"
    smi.write_text(NVIDIA_SMI)
    smi.chmod(0o755)
    stage = Stage(place, folder="/checkout")
    stage.run(" ".join(["scripts/install.sh", *options]))
    stage.run(".venv/bin/codegen render h100_topk32 --check && .venv/bin/codegen compile h100_topk32 --check")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--root", type=Path, required=True, metavar="DIR", help="a Debian root; made if it is not there"
    )
    parser.add_argument("--stage", default="codegen", help="the last stage of the Dockerfile that is built")
    parser.add_argument(
        "--script", nargs="*", metavar="OPTION", help="run scripts/install.sh, without the dashes: no-gpu"
    )
    parser.add_argument("--share", nargs="*", type=Path, default=[], metavar="PATH", help="copied into the root")
    parser.add_argument("--mirror", default="http://deb.debian.org/debian", help="of Debian's packages")
    parser.add_argument("--keep", action="store_true", help="leave the copies of the root")
    options: Any = parser.parse_args()
    if os.geteuid() != 0:
        raise SystemExit("error: chroot needs root")
    base_root(options.root, options.mirror, options.share)
    try:
        if options.script is None:
            names = build(options.root, options.stage)
        else:
            names = ["script"]
            install(options.root, [f"--{option}" for option in options.script])
    except subprocess.CalledProcessError as error:
        sys.exit(f"error: exit code {error.returncode}: {error.cmd[-1]}")
    print("passed: " + ", ".join(names))
    if not options.keep:
        for name in names:
            shutil.rmtree(options.root.with_name(f"{options.root.name}-{name}"))


if __name__ == "__main__":
    main()
