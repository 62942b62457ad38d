"""The tables of docs/reference/specs.md: what the models have, and nothing that a spec cannot have."""

from __future__ import annotations

import itertools
import random
import re
from pathlib import Path
from typing import get_args

import pytest
from scripts import load_script

from codegen.arch import ARCHS
from codegen.dtypes import FP8
from codegen.library import shipped_specs
from codegen.patterns import PATTERNS
from codegen.planning import tiles_of
from codegen.plans.bsr.spmm_sm90a_narrow import is_narrow
from codegen.spec import MODELS, AttentionSpec, BsrSpmmSpec, HalfName, SpecBase, json_schema

PROJECT = Path(__file__).resolve().parents[2]
PAGE = (PROJECT / "docs" / "reference" / "specs.md").read_text(encoding="utf-8")


script = load_script("spec_page")


def text_of(name: str) -> str:
    """What stands between the page's markers of that name."""
    (text,) = re.findall(f"<!-- {name}:begin -->\n(.*?)\n<!-- {name}:end -->", PAGE, re.DOTALL)
    return text


def rows_of(text: str) -> list[list[str]]:
    """The rows of a table, with those that go on in the next put together."""
    rows: list[list[str]] = []
    for line in text.splitlines()[2:]:
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if cells[0]:
            rows.append(cells)
        else:
            rows[-1][-1] = f"{rows[-1][-1]} {cells[-1]}".strip()
    return rows


def table_of(name: str) -> list[list[str]]:
    return rows_of(text_of(name))


def tiles_on_the_page(model: type[SpecBase]) -> dict[str, dict[str, set[tuple[str, ...]]]]:
    """Tiles of the page by the words for their kernel, and for their shape: a first size with the others."""
    found: dict[str, dict[str, set[tuple[str, ...]]]] = {}
    parts = text_of(f"{script.op_of(model)}-tiles").split("\n\n")
    for kernels, table in zip(parts[::2], parts[1::2], strict=True):
        for kernel in " ".join(kernels.split()).removesuffix(":").split("; "):
            shapes = found.setdefault(kernel, {})
            for words, firsts, *others in rows_of(table):
                for shape in shapes_in(words):
                    shapes.setdefault(shape, set()).update((first, *others) for first in firsts.split(", "))
    return found


def shapes_in(words: str) -> list[str]:
    """The shapes of a cell that has several, each as it would stand alone."""
    parts = (part.partition(": ") for part in words.split("; "))
    return [
        ": ".join(filter(None, (first, second)))
        for firsts, _, seconds in parts
        for first in firsts.split(", ")
        for second in seconds.split(", ")
    ]


@pytest.fixture
def kernel_seed(pytestconfig: pytest.Config) -> int:
    """The seed of the day's draws."""
    return int(pytestconfig.option.kernel_seed)


def names(cell: str) -> list[str]:
    return re.findall(r"`(\w+)`", cell)


TRIED = {"attention": 2, "attention_backward": 4}
"""Operators whose tiles each run tries for some shapes of a kernel, and for how many."""
DRAWN = {"combinations", "pattern-options", *(f"{op}-tiles" for op in TRIED)}
STALE = "docs/reference/specs.md is not what specs are today; run: python benchmarks/spec_page.py"


@pytest.mark.nightly
def test_the_page_is_what_the_models_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--check"]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("name", [name for name in script.writers() if name not in DRAWN])
def test_a_table_is_what_the_models_say(name: str) -> None:
    assert text_of(name) == script.writers()[name](), STALE


def test_drawn_rows_are_what_the_models_say(kernel_seed: int) -> None:
    draw = random.Random(kernel_seed)
    combination = draw.choice(script.tabled_combinations())
    pattern = draw.choice([*itertools.product(PATTERNS, script.families("attention"))])
    assert script.combination_row(*combination) in table_of("combinations"), STALE
    assert script.pattern_options_row(pattern[0], *pattern[1]) in table_of("pattern-options"), STALE


@pytest.mark.parametrize("op", TRIED)
def test_drawn_tiles_are_what_the_models_say(op: str, kernel_seed: int) -> None:
    (model,) = [model for model in MODELS if script.op_of(model) == op]
    page = tiles_on_the_page(model)
    known = {script.in_words(shape) for shape in script.shapes(model)}
    assert known >= {shape for shapes in page.values() for shape in shapes}, STALE
    draw = random.Random(kernel_seed)
    for kernel, base in draw.choices(script.kernels(model), k=TRIED[op]):
        shape = draw.choice(script.shapes(model))
        found = {*script.tile_words(model, base, shape)}
        assert found == page.get(kernel, {}).get(script.in_words(shape), set()), (STALE, kernel, shape)


def test_a_cell_of_several_shapes_is_read_as_it_was_written() -> None:
    shapes = ["dq: 192", "dq: 256", "daux: 192", "daux: 256", "dkdv: 64"]
    (words,) = script.words_of(shapes)
    assert words == "dq, daux: 192, 256; dkdv: 64"
    assert sorted(shapes_in(words)) == sorted(shapes)
    assert shapes_in("16 x 16, 32 x 16") == ["16 x 16", "32 x 16"]


def test_a_page_that_is_not_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "specs.md"
    page.write_text("above\n<!-- fields:begin -->\nold\n<!-- fields:end -->\nbelow\n")
    monkeypatch.setattr(script, "PAGE", page)
    monkeypatch.setattr(script, "tables", lambda: {"fields": "new"})
    assert script.main(["--check"]) == 1
    assert "run: python benchmarks/spec_page.py" in capsys.readouterr().out
    assert script.main([]) == 0
    assert page.read_text() == "above\n<!-- fields:begin -->\nnew\n<!-- fields:end -->\nbelow\n"


def test_combinations_are_those_of_the_architectures() -> None:
    told = {
        (*names(op), arch, *names(mma), *names(copy), *names(schedule))
        for op, archs, mma, copy, schedule, _ in table_of("combinations")
        for arch in names(archs)
    }
    assert told == {(c.op, arch.name, c.mma, c.copy, c.schedule) for arch in ARCHS.values() for c in arch.combinations}


def test_some_kernel_has_each_option() -> None:
    rows = table_of("combinations")
    for model in MODELS:
        found = {name for row in rows if names(row[0]) == [script.op_of(model)] for name in names(row[-1])}
        assert found == set(model.options)


def test_shipped_specs_have_the_options_that_the_table_says() -> None:
    table = {
        (*names(op), arch, *names(mma), *names(copy), *names(schedule)): set(names(options))
        for op, archs, mma, copy, schedule, options in table_of("combinations")
        for arch in names(archs)
    }
    patterns = {
        (*names(kind), arch): set(names(options))
        for kind, archs, options in table_of("pattern-options")
        for arch in names(archs)
    }
    for named in shipped_specs():
        spec = named.spec
        on = {name for name in spec.options if getattr(spec, name) != type(spec).model_fields[name].default}
        assert on <= table[spec.op, spec.arch, spec.mma, spec.copy_, spec.schedule], named.stem
        if isinstance(spec, AttentionSpec):
            assert on <= patterns[spec.pattern.kind, spec.arch], named.stem


@pytest.mark.parametrize("arch", ARCHS)
def test_every_combination_has_every_type(arch: str) -> None:
    for model in MODELS:
        op = script.op_of(model)
        for combination in ARCHS[arch].of(op):
            fields = {"op": op, "arch": arch, **script.combined(combination)}
            for dtype in get_args(HalfName):  # FP8 has kernels of its own
                found = [script.planned({**fields, **problem, "dtype": dtype}) for problem in script.problems(op)]
                assert any(found), (fields, dtype)


def test_every_field_has_a_row_with_its_description() -> None:
    rows = {model: table_of(f"{script.op_of(model)}-fields") for model in MODELS}
    base = table_of("fields")
    for model in MODELS:
        told = {row[0]: row[-1] for row in [*base, *rows[model]]}
        for name, field in model.model_fields.items():
            if f"`{field.alias or name}`" not in told:  # a mapping that a spec must have
                inner = script.sizes_of(field)
                assert inner
                assert all(told[f"`{name}.{part}`"] for part in inner)
            else:
                assert told[f"`{field.alias or name}`"] == field.description


def test_every_pattern_has_its_fields() -> None:
    (text,) = re.findall("<!-- patterns:begin -->\n(.*?)\n<!-- patterns:end -->", PAGE, re.DOTALL)
    parts = re.split(r"^\| `(\w+)` ", text, flags=re.MULTILINE)
    told = dict(zip(parts[3::2], parts[4::2], strict=True))  # behind the heading
    assert set(told) == set(PATTERNS)
    for kind, model in PATTERNS.items():
        assert all(f"| `{name}" in told[kind] for name in model.model_fields if name != "kind")


def test_what_is_required_is_what_the_schema_requires() -> None:
    definitions = json_schema()["$defs"]
    for model in MODELS:
        rows = [*table_of("fields"), *table_of(f"{script.op_of(model)}-fields")]
        fields = {row[0].strip("`"): row[2] for row in rows}
        needed = {name.partition(".")[0] for name, default in fields.items() if default == "required"}
        told = {name for name in needed if fields.get(name, "required") == "required"}  # not those of an optional one
        assert told == set(definitions[model.__name__]["required"])


# The text describes the tiles of others.
TABLED = [
    named
    for named in shipped_specs()
    if named.spec.op == "bsr_spmm"
    and named.spec.dtype not in FP8
    and named.spec.b_layout != "strided"
    and not (named.spec.mma == "wgmma" and is_narrow(named.spec))
]


@pytest.mark.parametrize("named", TABLED, ids=lambda named: named.stem)
def test_tiles_of_shipped_specs_are_in_the_tables(named: object) -> None:
    spec = named.spec  # type: ignore[attr-defined]
    assert isinstance(spec, BsrSpmmSpec)
    base = {"op": spec.op, "arch": spec.arch, "mma": spec.mma, "copy": spec.copy_, "schedule": spec.schedule}
    block = {"block": spec.block.model_dump()}
    legal = dict(script.legal_tiles([{**base, **block}], "tile", ["m", "n", "k"]))
    columns, depths = legal[spec.tile.m]
    assert str(spec.tile.n) in re.findall(r"\d+", columns)
    assert str(spec.tile.k) in re.findall(r"\d+", depths)


def test_sizes_that_are_filled_in_are_among_those_that_are_tried() -> None:
    for model in MODELS:
        specs = script.bare_specs(script.op_of(model))
        assert specs, script.op_of(model)
        for spec in specs:
            assert script.value_of(spec, script.tile_of(model)) in tiles_of(spec), spec.canonical_json()


def test_a_tile_that_no_kernel_has_is_not_legal() -> None:
    base = {"op": "bsr_spmm", "arch": "sm_90a", "mma": "wgmma", "copy": "tma", "schedule": "cooperative"}
    assert not list(script.legal_tiles([{**base, "block": {"rows": 48, "cols": 48}}], "tile", ["m", "n", "k"]))
    legal = dict(script.legal_tiles([{**base, "block": {"rows": 128, "cols": 128}}], "tile", ["m", "n", "k"]))
    assert legal == {128: ("128, 256", "32, 64")}


def test_fewer_stages_are_tried_where_those_that_are_filled_in_do_not_fit() -> None:
    block, tile = {"rows": 64, "cols": 64}, {"m": 64, "n": 512, "k": 64}
    fields = {"op": "bsr_spmm", "arch": "sm_90a", "mma": "wgmma", "block": block, "tile": tile}
    assert script.planned(fields) is None
    assert script.has_kernel(fields)
    assert not script.has_kernel({**fields, "tile": {**tile, "k": 256}})


def test_long_cells_go_on_in_the_row_below() -> None:
    text = "a description of many words " * 12
    lines = script.wrapped_table(("field", "what it is"), [["`a`", text], ["`b`", ""]]).splitlines()
    assert all(len(line) <= script.LONGEST_LINE for line in lines)
    assert [line.split(" | ")[0] for line in lines] == ["| field", "| ---", "| `a`", "| ", "| `b`"]
    assert " ".join(line.split(" | ")[1].strip(" |") for line in lines[2:4]) == text.strip()


def test_sizes_are_told_as_a_range_where_they_are_many() -> None:
    assert script.in_ranges([64, 80, 96]) == "64, 80, 96"
    assert script.in_ranges([64, 80, 96, 112]) == "64 to 112 in steps of 16"
    assert script.in_ranges([64, 80, 96, 128]) == "64, 80, 96, 128"


def test_the_script_knows_no_option_by_name() -> None:
    source = (PROJECT / "benchmarks" / "spec_page.py").read_text(encoding="utf-8")
    assert not [name for model in MODELS for name in model.options if re.search(rf"[\"'.]{name}\b", source)]
