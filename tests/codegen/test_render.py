"""Generated sources: the same bytes everywhere, sealed, self-contained, nothing unused."""

from __future__ import annotations

import dataclasses
import getpass
import hashlib
import json
import os
import re
import socket
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import jinja2
import pytest
from each import every_source
from hypothesis import given
from hypothesis import strategies as st

from codegen.errors import SpecError
from codegen.layout import lay_out
from codegen.library import TEMPLATES, NamedSpec, find_spec, shipped_specs
from codegen.planning import plan_for
from codegen.render import SEAL, environment, generate, render, render_plan, seal_is_intact

DEFINITION = re.compile(r"__device__ __forceinline__ (?:[\w:<>*&]+ )+[*&]?(\w+)\(")
CODE = re.compile(r"//[^\n]*")
LENGTHS = {"q_len", "kv_len", "kv_end", "position", "row"}
"""Methods of ``SeqlenInfo``, which is whole wherever a kernel asks for a length."""


@cache
def words(named: NamedSpec) -> Counter[str]:
    """How often each word is in a source, comments aside."""
    return Counter(re.findall(r"\w+", CODE.sub("", render(named))))


@pytest.mark.parametrize("seed", ["0", "4242"])  # beside that of the tests' own process
def test_same_bytes_in_every_process(seed: str, tmp_path: Path) -> None:
    code = (
        "import hashlib, sys; from codegen.library import shipped_specs; from codegen.render import render\n"
        "print(hashlib.sha256(''.join(render(n) for n in shipped_specs()[::12]).encode()).hexdigest())"
    )
    root = Path(__file__).resolve().parents[2]
    environ = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root), "LC_ALL": "C", "TZ": "Asia/Tokyo"}
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environ, capture_output=True, text=True, check=True
    )
    some = shipped_specs()[::12]
    assert len({named.spec.op for named in some}) > 4
    here = hashlib.sha256("".join(map(render, some)).encode()).hexdigest()
    assert found.stdout.strip() == here


@every_source
def test_banner(named: NamedSpec) -> None:
    banner = render(named).partition("\n\n")[0].splitlines()
    assert banner[:2] == [
        f"// Generated from {named.origin}. Do not edit:",
        "// change the spec or a template, then run",
    ]
    assert banner[2].strip("/ ") == f"codegen render {named.origin}"
    assert json.loads(banner[3].removeprefix("// spec: ")) == json.loads(named.spec.canonical_json())
    assert banner[4] == f"// spec hash: {named.spec.hash}"
    assert banner[5].startswith(SEAL)
    assert len(banner) == 6


def test_templates_of_a_source_are_files() -> None:
    generated = generate(find_spec("h100_topk32"))
    templates = generated.templates
    assert list(templates) == sorted(set(templates))
    assert generated.plan.template in templates
    assert all((TEMPLATES / template).is_file() for template in templates)


@every_source
def test_a_source_says_how_it_is_launched(named: NamedSpec) -> None:
    plan, source = plan_for(named), render(named)
    head, _, body = source.partition("struct Params {\n")
    clusters = f", clusters of {plan.cluster}" if plan.cluster > 1 else ""
    most = "at most " if plan.sized_by_launch else ""
    launch = f"// Launch: {most}{plan.threads} threads per block, {plan.shared_bytes} bytes of dynamic shared memory"
    before = f"// Prologue, with the same parameters: {plan.prologue.symbol}, " if plan.prologue else ""
    assert f"{launch}{clusters}.\n// Grid: {plan.grid_summary}.\n{before}" in head
    for param, line in zip(plan.params, body.partition("};")[0].splitlines(), strict=True):
        assert line.startswith(f"  {param.ctype} {param.name};  // {param.doc}")
        found = plan.tensor_maps.get(param.name)
        box = f": box {' x '.join(map(str, found.box))}, swizzle {found.swizzle}" if found else param.doc
        assert line.endswith(box)
    promoted = any(found.promotion == 128 for found in plan.tensor_maps.values())
    assert head.endswith("of all others: 256 bytes.\n") == promoted


@every_source
def test_seal_is_intact(named: NamedSpec) -> None:
    assert seal_is_intact(render(named))


def sealed() -> str:
    """A source with its seal."""
    return render(find_spec("h100_topk32"))


@given(
    st.deferred(lambda: st.integers(0, len(sealed()) - 1)),
    st.characters(codec="utf-8"),
    st.sampled_from(["replace", "insert", "delete"]),
)
def test_any_edit_breaks_the_seal(position: int, character: str, edit: str) -> None:
    source = sealed()
    kept = source[position + (edit != "insert") :]
    edited = source[:position] + ("" if edit == "delete" else character) + kept
    assert seal_is_intact(edited) == (edited == source)


def test_an_edit_of_any_banner_character_breaks_the_seal() -> None:
    source = sealed()
    for position in range(source.index("\n\n") + 3):
        other = "x" if source[position] != "x" else "y"
        assert not seal_is_intact(source[:position] + other + source[position + 1 :])
        assert not seal_is_intact(source[:position] + source[position + 1 :])


def test_a_removed_seal_is_a_broken_one() -> None:
    assert not seal_is_intact(re.sub(f"^{SEAL}.*\n", "", sealed(), flags=re.MULTILINE))
    assert not seal_is_intact("")


@every_source
def test_nothing_of_this_machine(named: NamedSpec) -> None:
    source = render(named)
    for word in (socket.gethostname(), getpass.getuser(), str(Path.cwd()), str(TEMPLATES.parent), str(Path.home())):
        is_in_text = len(word) > 2 and word in source
        assert not is_in_text or not re.search(rf"(?<!\w){re.escape(word)}(?!\w)", source), word
    assert not re.search(r"\b20\d\d-\d\d|(?<![\w.])/(?:home|usr|tmp|root|work|Users)/|__DATE__|__FILE__", source)


@every_source
def test_a_source_is_printable_ascii(named: NamedSpec) -> None:
    lines = render(named).split("\n")
    assert not [line for line in lines if not (line.isascii() and line.isprintable())]


@every_source
def test_layout_of_the_text(named: NamedSpec) -> None:
    source = render(named)
    assert "\n\n\n" not in source
    assert not re.search(r"[ \t]\n|\t|\r", source)
    assert source.endswith("}\n")
    assert not re.search(r"\{[{%#] | [}%#]\}", CODE.sub("", source))
    # The kernel has the name of its spec's file, which is as long as its author likes.
    body = source.partition("\n\n")[2].replace(named.stem, "kernel")
    assert max(map(len, body.splitlines())) <= 120


@every_source
def test_only_helpers_that_are_used(named: NamedSpec) -> None:
    code = CODE.sub("", render(named))
    names = set(DEFINITION.findall(code))
    assert len(names) >= 2
    assert not {name for name in names - LENGTHS if words(named)[name] < 2}


STRUCT = re.compile(r"^struct (\w+) \{\n(.*?)^\};", re.MULTILINE | re.DOTALL)
FIELDS = re.compile(r"^  (?:[\w:]+[ *&]+)+[^(\n;]*(?:=[^\n;]*)?;$", re.MULTILINE)


def unread_fields(source: str) -> list[tuple[str, str]]:
    """Find fields of structs that nothing reads: they are only initialized, or assigned to."""
    code = re.sub(r"[ \t]+$", "", CODE.sub("", source), flags=re.MULTILINE)
    found = []
    for struct, body in STRUCT.findall(code):
        lines = FIELDS.findall(body) if struct not in ("Params", "TensorMap") else []
        for declared in lines:
            methods = body.replace(declared, "")
            for part in re.sub(r"=[^,;]*", "", declared.rstrip(";")).split(","):
                field = re.sub(r"\[[^\]]*\]", "", part).split()[-1].lstrip("*&")
                read = rf"{field}\b(?!(?:\[[^\]]*\])*\s*=[^=])"  # but where it is assigned to
                if not re.search(rf"(?:\.|->){read}", code) and not re.search(rf"(?<![\w.]){read}(?!\()", methods):
                    found.append((struct, field))
    return found


@pytest.mark.parametrize(
    ("use", "unread"),
    [
        ("int x = pair.first + pair.second[0];", []),
        ("pair->second[i] = 1; f(pair.first == 2);", ["second"]),
        ("int first = 0, second = pair.firsts;", ["first", "second"]),
    ],
)
def test_unread_fields_are_found(use: str, unread: list[str]) -> None:
    fields = "  int first = 0, count;  // .second\n  int2 second[32];\n  Pair() : second() {}\n"
    source = f"struct Pair {{\n{fields}  int n() {{ return count; }}\n}};\n{use}\n"
    assert unread_fields(source) == [("Pair", field) for field in unread]


@every_source
def test_fields_are_read(named: NamedSpec) -> None:
    assert not unread_fields(render(named))


@cache
def pointers() -> set[str]:
    """Names of the tensors that any shipped kernel takes, if they are not words of every text."""
    plans = map(plan_for, shipped_specs())
    return {param.name for plan in plans for param in plan.params if param.type == "pointer" and "_" in param.name}


@every_source
def test_comments_name_no_tensor_that_the_kernel_lacks(named: NamedSpec) -> None:
    comments = " ".join(line for line in CODE.findall(render(named)) if not line.startswith("// spec"))
    others = pointers() - {param.name for param in plan_for(named).params}
    assert not others & set(re.findall(r"\w+", comments))


@every_source
def test_constants_are_used(named: NamedSpec) -> None:
    plan = plan_for(named)
    regions = [region.name for region in plan.shared if region.name != "OtherWarps"]  # kWarpBytes apart from the first
    names = [constant.name for constant in plan.constants] + [f"k{region}Offset" for region in regions]
    assert not [name for name in names if words(named)[name] < 2]


@every_source
def test_parameters_are_used(named: NamedSpec) -> None:
    code = CODE.sub("", render(named))
    plan = plan_for(named)
    names = {param.name for param in plan.params}
    if not plan.persistent:
        names -= {"tiles", "runs"}  # the grid itself
    if getattr(named.spec, "gradients", "") == "daux":
        names -= {"scale"}  # which all kernels of gradients are told
    if getattr(named.spec, "layout", "") == "varlen":
        names -= {"query_blocks"}  # rows of lists follow from the bounds
    assert not names - set(re.findall(r"\bp\.(\w+)", code))


@every_source
def test_self_contained(named: NamedSpec) -> None:
    included = re.findall(r"^#include (.+)$", render(named), re.MULTILINE)
    assert set(included) == {f"<{header}>" for header in plan_for(named).headers}
    if named.spec.mma != "wmma":
        assert not included


@every_source
def test_symbol(named: NamedSpec) -> None:
    cluster = r"(?:__cluster_dims__\(kCluster, 1, 1\) )?"
    limits = r"(?:__launch_bounds__\(kThreads, \d+\)|__maxnreg__\(\d+\))"
    start = rf'extern "C" __global__ void {cluster}{limits}'
    kernels = re.findall(rf"{start}\s+(\w+)\(", render(named))
    assert kernels == [named.stem]


@every_source
def test_the_name_of_a_kernel_is_in_its_source_once(named: NamedSpec) -> None:
    assert words(named)[named.stem] == 1


# A type, a type of every source, a function of CUDA, one of the source and a label of inline PTX.
@pytest.mark.parametrize("stem", ["Tile", "int64", "atomicAdd", "consume", "DONE"])
def test_a_name_that_the_source_needs_is_refused(named: NamedSpec, stem: str) -> None:
    for other in (dataclasses.replace(named, stem=stem), dataclasses.replace(named, stem=stem, path=None, origin="")):
        with pytest.raises(SpecError) as caught:
            render(other)
        place = "specs/h100_topk32.yaml: " if other.origin else ""
        assert str(caught.value) == (
            f"{place}{stem!r} names the kernel, but is reserved in CUDA C++ or in the source: use another name"
        )


@pytest.mark.parametrize("stem", ["Til", "Tiles", "int64_", "shipped"])
def test_a_name_that_only_comments_have_or_none_is_fine(named: NamedSpec, stem: str) -> None:
    assert f" {stem}(" in render(dataclasses.replace(named, stem=stem))


@every_source
def test_glossary_near_the_top(named: NamedSpec) -> None:
    source = render(named)
    assert "Symbols" in source[: source.index("struct Params")] or "Glossary" in source


def test_undefined_names_are_errors() -> None:
    env = environment()
    assert env.undefined is jinja2.StrictUndefined
    with pytest.raises(jinja2.UndefinedError):
        env.from_string("{{ nothing }}").render()


def test_a_spec_without_a_file_renders(named: NamedSpec) -> None:
    unnamed = find_spec(named.spec)
    source = render(unnamed)
    assert source.startswith("// Generated from a spec without a file.")
    assert named.spec.hash[:8] in unnamed.stem
    assert unnamed.stem.isidentifier()


def test_the_plan_is_all_that_a_source_depends_on(named: NamedSpec) -> None:
    plan = plan_for(named)
    assert render_plan(plan, named.origin) == render(named)
    other = dataclasses.replace(plan, stem="another_name")
    assert render_plan(other, named.origin) != render(named)


def test_a_macro_that_no_condition_defines_prints_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("codegen.render.TEMPLATES", tmp_path)
    (tmp_path / "turns").write_text("{% if several %}{% macro begin(w) %}begin {{ w }}{% endmacro %}{% endif %}")
    (tmp_path / "right").write_text("{% import 'turns' as turns with context %}[{{ turns.begin(1) }}]")
    (tmp_path / "wrong").write_text("{% import 'turns' as turns with context %}[{{ turns.start(1) }}]")
    texts = [lay_out(environment().get_template("right").render(several=several)) for several in (True, False)]
    assert texts == ["[begin 1]", "[]"]
    with pytest.raises(jinja2.UndefinedError, match="start"):
        environment().get_template("wrong").render(several=True)
