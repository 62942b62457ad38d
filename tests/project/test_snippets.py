"""What documents show to be copied is there: names, arguments, commands; tests/gpu/test_snippets.py runs the Python."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import shlex
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import snippets
from each import for_each

pytest.importorskip("torch")

import typer

from codegen.library import find_spec
from runtime import load_kernel
from runtime.cli import app
from runtime.kernel import kernel_class

PROJECT = snippets.PROJECT
MOST_OF_QUICKSTART = 30  # lines of code
every_page = for_each("page", snippets.pages, snippets.page_name)
every_document = for_each("document", lambda: snippets.DOCUMENTS, snippets.page_name)


@dataclass(frozen=True)
class Instance:
    """What a name stands for that an object of this class was assigned to."""

    kind: type


@dataclass
class Names:
    """What is known of the names of a page, and what it says that is not so."""

    known: dict[str, Any] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def read(self, tree: ast.Module) -> None:
        """Follow the statements of a fence in their order."""
        for statement in tree.body:
            for node in ast.walk(statement):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    self._import(node)
            for node in ast.walk(statement):
                if isinstance(node, ast.Call):
                    self._call(node)
            for node in ast.walk(statement):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    self.known.pop(node.id, None)
            if isinstance(statement, ast.Assign):
                self._assign(statement)

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            name = alias.asname or alias.name
            if isinstance(node, ast.Import):
                module = importlib.import_module(alias.name)
                found = module if alias.asname else importlib.import_module(alias.name.partition(".")[0])
                self.known[name.partition(".")[0]] = found
                continue
            module = importlib.import_module(str(node.module))
            try:
                self.known[name] = getattr(module, alias.name)
            except AttributeError:
                try:
                    self.known[name] = importlib.import_module(f"{node.module}.{alias.name}")
                except ModuleNotFoundError:
                    self.wrong.append(f"{node.module} has no {alias.name}")

    def _assign(self, node: ast.Assign) -> None:
        """Keep of what class a name is, where that can be seen."""
        (target, *_), value = node.targets, node.value
        if isinstance(target, ast.Name) and isinstance(value, ast.Call):
            made = self._resolved(value.func)
            first = value.args[0] if value.args else None
            if made is load_kernel and isinstance(first, ast.Constant):
                stem = Path(first.value).name  # of a folder that `codegen export` wrote, too
                made = kernel_class(find_spec(stem).spec)
            if isinstance(made, type):
                self.known[target.id] = Instance(made)

    def _resolved(self, node: ast.expr) -> Any:
        """Return what an expression of names and dots stands for; None if that is not known."""
        if isinstance(node, ast.Name):
            return self.known.get(node.id)
        if not isinstance(node, ast.Attribute):
            return None
        owner = self._resolved(node.value)
        if owner is None:
            return None
        kind = owner.kind if isinstance(owner, Instance) else owner
        if not hasattr(kind, node.attr):
            if inspect.ismodule(kind) or isinstance(owner, Instance):
                self.wrong.append(f"line {node.lineno}: {ast.unparse(node)} is not there")
            return None
        found = getattr(kind, node.attr)
        is_method = isinstance(owner, Instance) and inspect.isfunction(found)
        return found.__get__(object()) if is_method else found

    def _call(self, node: ast.Call) -> None:
        """Check the arguments of a call, if it is known what is called."""
        called = self._resolved(node.func)
        if isinstance(called, Instance):
            called = called.kind.__call__.__get__(object())  # type: ignore[operator]
        if not callable(called):
            return
        try:
            signature = inspect.signature(called)
        except (TypeError, ValueError):  # built in
            return
        named = {keyword.arg: None for keyword in node.keywords if keyword.arg is not None}
        partly = len(named) < len(node.keywords) or any(isinstance(each, ast.Starred) for each in node.args)
        given = [None for each in node.args if not isinstance(each, ast.Starred)]
        try:
            (signature.bind_partial if partly else signature.bind)(*given, **named)
        except TypeError as error:
            self.wrong.append(f"line {node.lineno}: {ast.unparse(node.func)}: {error}")


def wrong_in(*texts: str) -> list[str]:
    """What fences of one page say that is not so."""
    names = Names()
    for text in texts:
        names.read(ast.parse(text))
    return names.wrong


@every_document
def test_fences_are_of_a_known_language_and_closed(document: Path) -> None:
    found = snippets.fences(document)
    assert not [f"line {each.line}: {each.language!r}" for each in found if each.language not in snippets.LANGUAGES]
    assert document.read_text(encoding="utf-8").count("```") == 2 * len(found)


@every_page
def test_names_and_arguments_are_there(page: Path) -> None:
    if absent := snippets.absent_packages(page):
        pytest.skip(f"its Python needs {', '.join(absent)}")
    for fence in snippets.python_of(page):
        fence.code()
    assert not wrong_in(*(fence.text for fence in snippets.python_of(page)))


@every_document
def test_indented_blocks_are_no_python(document: Path) -> None:
    """Python stands in fences, where it is run."""
    text = snippets.FENCE.sub("", document.read_text(encoding="utf-8"))
    blocks = re.findall(r"(?:^ {4}.*\n|^\n(?= {4}))+", text, re.MULTILINE)
    assert not [block for block in blocks if re.search(r"^ {4}(?:from \w\S* )?import \w|^ {4}\w+ = \w+\(", block, re.M)]


def test_the_quick_start_is_short() -> None:
    (fence,) = snippets.python_of(PROJECT / "docs" / "guide" / "quickstart.md")
    assert len([line for line in fence.text.splitlines() if line.strip()]) <= MOST_OF_QUICKSTART


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("from runtime import block_sparse_attentions", "has no block_sparse_attentions"),
        ("from runtime.patterns import TopK\nTopK(1, blocks=(64, 64))", "unexpected keyword argument 'blocks'"),
        ("from runtime.patterns import SinkWindow\nSinkWindow(4)", "missing a required argument: 'left'"),
        ("import runtime.convert\nruntime.convert.from_mask(1)", "runtime.convert.from_mask is not there"),
        ("from runtime import convert as c\nc.from_csr(1, 2, kv_len=3)", "missing a required argument: 'block'"),
        (
            "from runtime import load_kernel\na = load_kernel('h100_topk32')\na(1, 2, 3, scales=1)\na.prepared(1)",
            "not there",
        ),
        ("from runtime import load_kernel\na = load_kernel('h100_bsr_spmm_b128')\na(1, 2, betas=1)", "'betas'"),
        ("from runtime import merge_attention\nmerge_attention(*[1, 2], 3, 4, 5)", ""),
    ],
)
def test_what_is_not_there_is_found(text: str, said: str) -> None:
    found = wrong_in(text)
    assert any(said in each for each in found) if said else not found


def test_a_name_of_an_earlier_fence_is_known_and_a_new_one_forgotten() -> None:
    first = "from runtime.patterns import Causal\npattern = Causal()"
    assert wrong_in(first, "pattern.index_tensors(1)")
    assert not wrong_in(first, "pattern = object()", "pattern.index_tensors(1)")


def test_fences_in_lists_are_read_and_errors_name_the_line() -> None:
    text = "# A\n\n- item\n\n  ```python\n  x = 1\n  raise ValueError(x)\n  ```\n"
    (fence,) = snippets.fences(Path("page.md"), text)
    assert (fence.line, fence.text) == (6, "x = 1\nraise ValueError(x)\n")
    with pytest.raises(ValueError, match="1") as caught:
        exec(fence.code(), {})
    assert caught.traceback[-1].lineno == 6  # counts from 0


# Commands


@cache
def program() -> Any:
    """The command ``codegen``."""
    return typer.main.get_command(app)


def unknown_in(command: str) -> list[str]:
    """What a command of ``codegen`` has that there is not: a command, options."""
    words = shlex.split(command)[1:]
    found = program()
    options = {"-h", "--help"}
    while words and hasattr(found, "commands") and not words[0].startswith("-"):
        if words[0] not in found.commands:
            return [words[0]]
        found = found.commands[words.pop(0)]
    options |= {name for parameter in found.params for name in (*parameter.opts, *parameter.secondary_opts)}
    given = [word.partition("=")[0] for word in words if word.startswith("-")]
    takes_more = any(parameter.param_type_name == "argument" for parameter in found.params) or given
    return [option for option in given if option not in options] + ([] if takes_more else words)


@for_each("document", lambda: [path for path in snippets.DOCUMENTS if [*snippets.commands(path)]], snippets.page_name)
def test_commands_and_their_options_are_there(document: Path) -> None:
    assert not {command: unknown for command in snippets.commands(document) if (unknown := unknown_in(command))}


@pytest.mark.parametrize(
    ("command", "unknown"),
    [
        ("codegen verify --all --measure", []),
        ("codegen cache list", []),
        ("codegen compiles h100_topk32", ["compiles"]),
        ("codegen cache empty", ["empty"]),
        ("codegen compile --al --check", ["--al"]),
    ],
)
def test_a_command_that_is_not_there_is_found(command: str, unknown: list[str]) -> None:
    assert unknown_in(command) == unknown


@every_document
def test_scripts_that_are_named_are_there(document: Path) -> None:
    named = re.findall(r"\bpython3? ((?:benchmarks|examples|tests)/[\w/]+\.py)", document.read_text(encoding="utf-8"))
    assert not [name for name in named if not (PROJECT / name).is_file()]
