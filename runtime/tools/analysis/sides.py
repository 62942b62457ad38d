"""The two sides of a comparison: a current spec, or a kernel of a commit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from codegen.arch import ARCHS
from codegen.errors import CodegenError
from codegen.files import is_file
from codegen.library import IN_SOURCE_TREE, OF_TWIN, ROOT, find_spec
from codegen.plain import json_value
from codegen.plan import Plan
from codegen.receipts import twin_receipt
from codegen.render import generate, spec_json_of
from codegen.twins import twin_source
from codegen.wording import alternatives, shown
from runtime import git
from runtime.compile import toolchain
from runtime.compile.compiler import OPTIONS, compile_generated, run_nvrtc
from runtime.compile.inspection import Usage, printed, told_by_compiler
from runtime.tools.analysis.sass import Function, parse

OF_COMMIT = re.compile(r"(?P<commit>[^:{\s]+):(?P<name>[\w./-]+)")
SOURCES = "generated"


@dataclass(frozen=True)
class Side:
    """A kernel to compare.

    Attributes:
        label: the caller's name for it.
        stem: name of the kernel.
        fields: fields of its spec.
        source: its source.
        plan: its plan; None for a kernel of a commit, whose planner is not available.
    """

    label: str
    stem: str
    fields: Mapping[str, Any]
    source: str
    plan: Plan | None = None

    @property
    def body(self) -> list[str]:
        """The lines of the source after its banner, without the kernel's name, which is also the file's."""
        text = self.source.partition("\n\n")[2]
        return re.sub(rf"\b{re.escape(self.stem)}(?=\b|_)", "KERNEL", text).splitlines()


@dataclass(frozen=True)
class Code:
    """The SASS of a side, its own kernel first, and the compiler's resource usage."""

    functions: tuple[Function, ...]
    usage: Usage


def side_of(text: str) -> Side:
    """Read one side of a comparison from a command line: a spec, or ``COMMIT:NAME``.

    NAME is the name of a kernel under generated/ in that commit, or its path.

    Raises:
        CodegenError: if there is no such spec, commit or kernel.
    """
    told = None if text.startswith("{") or is_file(Path(text)) else OF_COMMIT.fullmatch(text)
    if told is not None:
        return _of_commit(text, told["commit"], told["name"])
    made = generate(find_spec(text))
    fields = json_value(made.plan.spec.canonical_json())
    return Side(text, made.named.stem, fields, made.source, made.plan)


def _of_commit(label: str, revision: str, name: str) -> Side:
    folder = ROOT if IN_SOURCE_TREE else Path()
    commit = git.commit_of(revision, folder)
    path, is_twin = _source_of(commit, name, folder)
    source = git.file_of(commit, path, folder)
    stem = PurePosixPath(path).stem
    if is_twin:
        source, stem = twin_source(source, stem), f"{stem}{OF_TWIN}"
    told = spec_json_of(source)
    fields = None if told is None else json_value(told)
    if not isinstance(fields, dict) or fields.get("arch") not in ARCHS:
        raise CodegenError(f"{path} of {commit[:12]} has no banner with a spec: it is not a generated source")
    return Side(label, stem, fields, source)


def _source_of(commit: str, name: str, folder: Path) -> tuple[str, bool]:
    """Path of a kernel's source in a commit, and whether it is its twin's source with words replaced."""
    if name.endswith(".cu"):
        return name, False
    stem = PurePosixPath(name).stem if name.endswith((".yaml", ".json")) else name
    places = {PurePosixPath(path).stem: path for path in git.files_of(commit, SOURCES, folder) if path.endswith(".cu")}
    first = places.get(stem.removesuffix(OF_TWIN)) if stem.endswith(OF_TWIN) and stem not in places else None
    if first and twin_receipt(git.file_of(commit, f"{first.removesuffix('.cu')}.json", folder)) is not None:
        return first, True
    if stem not in places:
        where = f"{commit[:12]} has no {SOURCES}/{shown(stem)[1:-1]}.cu"
        raise CodegenError(f"{where}; {alternatives(stem, places)}" if places else where)
    return places[stem], False


def code_of(side: Side) -> Code:
    """The SASS of a side, compiled with the installed compiler.

    Raises:
        ToolchainError, CompileError: as raised by ``runtime.compile.compiler``.
    """
    tool = toolchain.nvdisasm()
    if side.plan is not None:
        compiled = compile_generated(generate(find_spec(side.label)))
        code, log = compiled.code, compiled.log
    else:
        arch = ARCHS[side.fields["arch"]]
        toolchain.check_arch(arch)
        headers = tuple(re.findall(r"^#include <([\w./]+)>$", side.source, re.MULTILINE))
        options = (f"--gpu-architecture={arch.name}", *OPTIONS)
        code, log = run_nvrtc(side.source, f"{side.stem}.cu", "cubin", options, headers)
    functions = parse(printed(tool, ("-c",), code))
    own_first = sorted(functions, key=lambda each: each.name != side.stem)
    return Code(tuple(own_first), told_by_compiler(side.stem, log))
