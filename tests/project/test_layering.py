"""Imports point one way, and the templates keep the six rules as far as a machine can tell."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import fields, is_dataclass
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

from each import every_source, for_each

from codegen.library import TEMPLATES, NamedSpec, find_spec, shipped_specs
from codegen.planning import plan_for
from codegen.render import generate

PROJECT = Path(__file__).resolve().parents[2]
MODULES = sorted((PROJECT / "codegen").rglob("*.py"))
ABOUT_PLANS = {"spec_page.py"}  # launches nothing: tries which specs have a plan
HOST = sorted(
    path
    for folder in ("runtime", "benchmarks")
    for path in (PROJECT / folder).rglob("*.py")
    if path.name not in ABOUT_PLANS
)
TEMPLATE_FILES = sorted(TEMPLATES.rglob("*.j2"))
FOREIGN = {"torch", "cuda", "runtime", "numpy", "triton"}
RUNTIME = sorted((PROJECT / "runtime").rglob("*.py"))
# Of each room of runtime/, and of its modules that are in none: what it may import of the others.
ROOMS: dict[str, set[str]] = {
    "__main__": set(),
    "errors": set(),
    "block_maps": set(),
    "pattern_blocks": {"errors", "block_maps"},
    "pattern_sets": {"errors", "block_maps", "checks"},
    "operators": set(),  # names parts of the others, which those import that use them
    "checks": {"errors"},
    "kept": set(),
    "environment": {"errors"},
    "log": {"environment"},
    "compile": {"errors", "environment", "log"},
    "receipts": {"errors", "environment", "compile"},
    "driver": {"errors", "compile"},
    "prepare": {"errors", "checks"},
    "expressions": {"errors", "checks"},
    "patterns": {"errors", "checks", "expressions", "pattern_blocks", "pattern_sets"},
    "convert": {"errors", "block_maps", "checks", "expressions", "key_lists", "patterns", "prepare"},
    "kernels": {"errors", "checks", "compile", "driver", "expressions", "prepare"},
    "key_lists": {"errors", "checks", "kernels"},
    "kernel": {"receipts", "errors", "operators", "checks", "compile", "driver", "kernels", "log"},
    "video": {"errors", "checks", "kept", "patterns", "convert", "ops"},
    "integrations": {"errors", "log", "checks", "key_lists", "patterns", "convert", "ops", "video", "distributed"},
    "ops": {
        "receipts",
        "errors",
        "block_maps",
        "checks",
        "expressions",
        "kernels",
        "kernel",
        "log",
        "key_lists",
        "patterns",
        "convert",
        "prepare",
    },
    "nn": {"errors", "checks", "ops", "prepare"},
    "reference": {"errors", "checks", "convert", "expressions", "kernels", "ops", "patterns"},
    "compat": {"errors", "checks", "convert", "kernels", "ops", "patterns"},
    "tools.bench": {"errors", "operators", "expressions", "prepare", "kernels", "kernel"},
    "distributed": {"receipts", "errors", "checks", "kept", "driver", "expressions", "kernels", "ops", "patterns"},
    "verify": {
        "receipts",
        "errors",
        "operators",
        "compile",
        "driver",
        "expressions",
        "prepare",
        "kernels",
        "kernel",
        "result_rows",
    },
    "tools.tune": {"receipts", "errors", "operators", "compile", "kernels", "kernel", "tools.bench", "verify"},
    "tools.baselines": {"errors", "compile", "kernel", "tools.bench", "verify"},
    "export": {"errors", "compile", "verify"},
    "git": {"errors"},
    "result_rows": set(),
    "tools.analysis": {"errors", "compile", "git", "kernel", "tools.bench"},
    "tools.attest": {"errors", "compile", "git"},
    "tools.report": {"errors", "operators", "compile", "git", "result_rows"},
    "tools.warm": {"errors", "compile"},
    "doctor": {"errors", "compile", "driver"},
    "commands": {"receipts", "errors", "compile", "kernel", "tools.bench", "verify", "export", "doctor"},
    "cache_commands": {"compile"},
    "variables": set(),
    "cli": {
        "receipts",
        "compile",
        "commands",
        "cache_commands",
        "tools.analysis",
        "tools.attest",
        "tools.report",
        "tools.baselines",
        "tools.tune",
        "tools.warm",
    },
    "__init__": {
        "receipts",
        "errors",
        "compat",
        "kernel",
        "kernels",
        "key_lists",
        "ops",
        "nn",
        "patterns",
        "prepare",
        "reference",
    },
    "tools": set(),
}


def place(path: Path) -> str:
    """The path in the project."""
    return path.relative_to(PROJECT).as_posix()


every_template = for_each("path", lambda: TEMPLATE_FILES, place)


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Nodes of a module's syntax tree."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def imported(path: Path) -> set[str]:
    roots = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            roots |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            roots.add("." if node.level else str(node.module).partition(".")[0])
    return roots


@for_each("path", lambda: MODULES, place)
def test_codegen_is_pure(path: Path) -> None:
    assert not imported(path) & FOREIGN
    assert "." not in imported(path), "imports are absolute"


@for_each("path", lambda: HOST, place)
def test_a_host_knows_plans_and_nothing_below_them(path: Path) -> None:
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom):
            modules = {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
        else:
            modules = {alias.name for alias in node.names} if isinstance(node, ast.Import) else set()
        below = {name for name in modules if re.match(r"codegen\.(plans|stream_k)\b", name)}
        assert not below, f"{sorted(below)}: what it needs is a field of Plan or comes from Plan.problem"


def imports_of(path: Path) -> set[str]:
    """Return the modules and names that a file imports, in full."""
    found: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def room_named(module: str) -> str:
    """The room of a module of ``runtime``: its package, or itself; each tool is a room."""
    parts = module.split(".")[1:]
    return ".".join(parts[: 2 if parts[0] == "tools" and parts[1:] != ["__init__"] else 1])


def room_of(path: Path) -> str:
    return room_named(".".join(path.relative_to(PROJECT).with_suffix("").parts))


def test_each_module_of_runtime_is_in_a_room() -> None:
    assert {room_of(path) for path in RUNTIME} == set(ROOMS)


@for_each("path", lambda: RUNTIME, place)
def test_rooms_of_runtime_import_one_way(path: Path) -> None:
    room, others = room_of(path), {room_named(name) for name in imports_of(path) if name.startswith("runtime.")}
    assert others - {room} <= ROOMS[room]


@for_each("path", lambda: [path for path in RUNTIME if room_of(path) in ("prepare", "convert", "expressions")], place)
def test_preparation_needs_torch_and_no_driver(path: Path) -> None:
    assert not imported(path) & (FOREIGN - {"torch", "runtime"})


def test_no_circle_of_imports() -> None:
    """Imports within functions and for types count too."""
    modules = {".".join(path.relative_to(PROJECT).with_suffix("").parts): path for path in (*MODULES, *RUNTIME)}
    graph = {}
    for module, path in modules.items():
        names = imports_of(path)
        graph[module] = (names | {name.rpartition(".")[0] for name in names}) & set(modules) - {module}
    tuple(TopologicalSorter(graph).static_order())  # CycleError names the modules


def test_rendering_needs_neither_torch_nor_cuda(tmp_path: Path) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(PROJECT)!r})\n"
        f"for name in {sorted(FOREIGN)!r}: sys.modules[name] = None\n"  # importing them now fails
        "from codegen.cli import app; app(['render', 'h100_topk32', '--out', '.'])"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / "h100_topk32.cu").is_file()


def test_templates_and_specs_are_data() -> None:
    for folder in ("templates", "specs", "generated"):
        assert not list((PROJECT / folder).rglob("*.py"))


@every_template
def test_only_the_patterns_own_templates_know_their_kinds(path: Path) -> None:
    # What kernels do differently for a pattern is one of its properties, so that a new pattern needs no branch there.
    assert path.parent.name == "patterns" or "pattern.kind" not in path.read_text(encoding="utf-8")


@every_template
def test_insertions_are_names_and_numbers(path: Path) -> None:
    for expression in re.findall(r"\{\{-?(.*?)-?\}\}", path.read_text(encoding="utf-8"), re.DOTALL):
        assert "|" not in re.sub(r'"[^"]*"', "", expression), f"a filter: {expression}"
        assert "\\n" not in expression, f"several lines: {expression}"


@every_template
def test_loops_stand_where_cuda_has_none(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    # Names and values that Python has worked out.
    printed = r"plan\.\w+|aux|signs|\[fp8\.\w+|\w+_lines|\w*expression\.\w+|mask_ranges\.\w+|each\.parts|parts"
    ranges = printed if path.parent.name not in ("ptx", "common") else rf"{printed}|range\("
    for loop in re.findall(r"\{%-? *for .*?%\}", text):
        assert re.search(rf"\bin ({ranges})", loop), loop


@every_template
def test_no_inclusion_of_python_made_text(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"\{%-? *(filter|call|autoescape|raw)\b", text)


@every_source
def test_plan_values_are_single_lines(named: NamedSpec) -> None:
    plan = plan_for(named)
    texts = [value for value in atoms(tuple(plan.flags.named().values())) if isinstance(value, str)]
    texts += [constant.comment for constant in plan.constants] + [param.doc for param in plan.params]
    texts += [region.doc for region in plan.shared]
    assert not [text for text in texts if "\n" in text]
    assert all(isinstance(value, int | str | bool | None) for value in atoms(tuple(plan.flags.named().values())))


def atoms(value: Any) -> list[Any]:
    """What flags are made of: those of expressions have parts, in order."""
    if is_dataclass(value):
        value = tuple(getattr(value, field.name) for field in fields(value))
    return [atom for each in value for atom in atoms(each)] if isinstance(value, tuple) else [value]


def test_every_template_is_used() -> None:
    used = set()
    files = [Path(__file__).parents[1] / f"{name}.json" for name in ("unshipped_attention", "unshipped_bsr")]
    unshipped = [spec for file in files for spec in json.loads(file.read_text(encoding="utf-8"))]
    shared = {"op": "attention", "arch": "sm_90a", "head_dim": 128, "share_kv_loads": True, "stages": 6}
    pattern = {"kind": "topk", "k": 32, "block": {"q": 64, "kv": 64}}
    unshipped.append({**shared, "pattern": pattern, "tile": {"m": 128, "n": 64}, "schedule": "cooperative"})
    quantize = {"op": "quantize", "arch": "sm_90a", "dtype": "bf16", "scales": "row_block", "head_dim": 128}
    unshipped.append({**quantize, "rotary": "interleaved"})
    first = [named for named in shipped_specs() if named.twin_of is None]
    for named in (*first, *map(find_spec, unshipped)):
        used |= set(generate(named).templates)
    assert used == {path.relative_to(TEMPLATES).as_posix() for path in TEMPLATE_FILES}


def test_every_macro_is_used() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in TEMPLATE_FILES}
    everything = "\n".join(texts.values())
    named, made = (Counter(re.findall(rf"{before}(\w+)\(", everything)) for before in (r"\b", r"\{% macro "))
    unused = [
        f"{path.name}: {name}"
        for path, text in texts.items()
        for name in re.findall(r"\{% macro (\w+)\(", text)
        if named[name] == made[name]
    ]
    assert not unused


def asked_kinds(tree: ast.Module) -> list[str]:
    """Where a module compares a pattern's kind, or knows one pattern of all."""
    comparisons = [
        f"line {node.lineno}: compares a kind"
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare)
        for inner in ast.walk(node)
        if isinstance(inner, ast.Attribute) and inner.attr == "kind" and ast.unparse(inner.value).endswith("pattern")
    ]
    imports = [
        f"line {node.lineno}: imports {node.module}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and re.fullmatch(r"codegen\.patterns\.(?!base$)\w+", node.module or "")
    ]
    return comparisons + imports


@for_each("path", lambda: [path for path in MODULES if path.parent.name != "patterns"], place)
def test_only_patterns_know_their_kinds(path: Path) -> None:
    """What differs from pattern to pattern is a property of all of them, so that a new one is one module."""
    assert asked_kinds(ast.parse(path.read_text())) == []


def test_that_test_sees_them() -> None:
    """A comparison by any operator, in a tuple too, and an import."""
    source = "from codegen.patterns.topk import TopK\nx = (a.arch, spec.pattern.kind) == ('sm_90a', 'topk')\n"
    assert len(asked_kinds(ast.parse(source))) == 2
