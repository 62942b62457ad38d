"""Writes the tables of docs/reference/specs.md: fields from the models of specs, what goes together by trying it.

    python benchmarks/spec_page.py            # rewrites what is between the markers
    python benchmarks/spec_page.py --check    # exits 1 if that would change the page; tests look at a few rows

A combination is legal if a spec that has it can be planned; of tiles those are tried that the rules of a kernel allow.
Fields are found in the models, and values that a model does not list in the shipped specs: a field that gets another
name needs no change here.
"""

from __future__ import annotations

import argparse
import itertools
import json
import textwrap
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from annotated_types import Ge, Le
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from results_table import DASH, LONGEST_LINE, line, update, wrapped

from codegen.arch import ARCHS, Combination
from codegen.combinations import FP8_OPS, FP8_OPTIONS
from codegen.dtypes import FP8
from codegen.errors import SpecError
from codegen.library import ROOT, shipped_specs
from codegen.parse import parse_plain
from codegen.patterns import PATTERNS, PatternBase
from codegen.planning import plan_of, tiles_of
from codegen.select.defaults import COMBINED
from codegen.spec import FILLED_IN, MODELS, Spec, SpecBase
from codegen.tile_rules import Tile

Fields = Mapping[str, Any]
Model = type[SpecBase]
Rows = Iterable[Sequence[str]]

PAGE = ROOT / "docs" / "reference" / "specs.md"
STALE = "its tables do not fit the current specs; run: python benchmarks/spec_page.py"
FIELD_HEADINGS = ("field", "values", "if left out", "meaning")
FILLED = "filled in"
BLOCK_SIZES = (16, 32, 64, 112, 128, 256)  # that are tried
FEWER_STAGES = (2, 1)  # tried where those that are filled in do not fit
NARROWEST = 40  # characters of a table's last cell
FEW = 3  # sizes that are listed, not told as a range


# Text


def wrapped_table(headings: Sequence[str], rows: Rows) -> str:
    """A table. Where a line has no room for its last cell, that goes on in rows below."""
    lines = [line([*headings]), line(["---"] * len(headings))]
    for *cells, last in rows:
        width = max(NARROWEST, LONGEST_LINE - len(line([*cells, ""])))
        first, *more = textwrap.wrap(last, width, break_long_words=False, break_on_hyphens=False) or [""]
        lines += [line([*cells, first]), *(line([*[""] * len(cells), text]) for text in more)]
    return "\n".join(lines)


def code(names: Iterable[str]) -> str:
    """Names as an enumeration."""
    return ", ".join(f"`{name}`" for name in names)


def spelt(value: Any) -> str:
    """A value as a spec file has it."""
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def in_ranges(values: Sequence[int]) -> str:
    """Sizes in words, as a range if many have the same step."""
    steps = {after - before for before, after in itertools.pairwise(values)}
    if len(values) > FEW and len(steps) == 1:
        return f"{values[0]} to {values[-1]} in steps of {steps.pop()}"
    return ", ".join(map(str, values))


# Models


def op_of(model: Model) -> str:
    """The operator of a model."""
    return str(get_args(model.model_fields["op"].annotation)[0])


def kinds(field: FieldInfo) -> list[Any]:
    """The types that a field may be of, without None."""

    def parts(annotation: Any) -> Iterator[Any]:
        if get_origin(annotation) is Literal or isinstance(annotation, type):
            yield annotation
        else:
            for part in get_args(annotation):
                yield from parts(part)

    return [kind for kind in parts(field.annotation) if kind is not NoneType]


def is_pattern(field: FieldInfo) -> bool:
    """Whether a field is a sparsity pattern."""
    first = kinds(field)[0]
    return isinstance(first, type) and issubclass(first, PatternBase)


def inner_model(field: FieldInfo) -> type[BaseModel] | None:
    """The model of a field that is a mapping, a pattern aside."""
    first = kinds(field)[0]
    found = isinstance(first, type) and issubclass(first, BaseModel) and not is_pattern(field)
    return first if found else None


def sizes_of(field: FieldInfo) -> list[str]:
    """The fields of one that is a mapping."""
    inner = inner_model(field)
    return list(inner.model_fields) if inner else []


def required(model: Model) -> dict[str, FieldInfo]:
    """The fields that a spec of an operator must have: what is computed."""
    named = {field.alias or name: field for name, field in model.model_fields.items() if field.is_required()}
    return {name: field for name, field in named.items() if name not in (*FILLED_IN, "op", "arch")}


def tile_of(model: Model) -> str:
    """The field that is the tile: a mapping that is filled in."""
    (name,) = [name for name in FILLED_IN if name in model.model_fields and inner_model(model.model_fields[name])]
    return name


def pattern_fields() -> dict[Model, str]:
    """The operators that have a pattern, and the field that it is."""
    return {model: name for model in MODELS for name, field in model.model_fields.items() if is_pattern(field)}


# Fields


def values_of(field: FieldInfo) -> str:
    """Allowed values of a field."""
    first = kinds(field)[0]
    if get_origin(first) is Literal:
        return ", ".join(map(spelt, get_args(first)))
    if first is bool:
        return "`true`, `false`"
    if is_pattern(field):
        return "[a pattern](#patterns)"
    if inner_model(field):
        return "a mapping"
    if get_origin(field.annotation) is tuple:
        return "a list of texts"
    bounds = {type(bound): bound for bound in field.metadata}
    if {Ge, Le} <= bounds.keys():
        return f"{bounds[Ge].ge} to {bounds[Le].le}"
    if get_origin(first) is dict:
        return "names and texts"
    return {int: "an integer", str: "a text"}.get(first, "a number")


def default_of(name: str, field: FieldInfo, found: Iterable[Any]) -> str:
    """Default of a field.

    Args:
        name: the field, dotted.
        field: its model.
        found: its values in specs that leave it out.
    """
    if name.partition(".")[0] in FILLED_IN or any(value != plain_default(field) for value in found):
        return FILLED
    if field.is_required():
        return "required"
    return "none" if field.default is None else spelt(plain_default(field))


def plain_default(field: FieldInfo) -> Any:
    """The default of a field as plain data."""
    if isinstance(field.default, BaseModel):
        return field.default.model_dump(mode="json")
    return list(field.default) if isinstance(field.default, tuple) else field.default


def field_rows(model: type[BaseModel], found: Mapping[str, Sequence[Any]], prefix: str = "") -> Iterator[list[str]]:
    """A row for each field of a model, and for each of the mappings in it."""
    for key, field in model.model_fields.items():
        name = prefix + (field.alias or key)
        inner = inner_model(field)
        if inner is None or not field.is_required():
            text = field.description or ""
            yield [f"`{name}`", values_of(field), default_of(name, field, found.get(key, ())), text]
        if inner is not None:
            yield from field_rows(inner, {}, f"{name}.")


def base_table() -> str:
    """The fields that every spec has."""
    ops = [spelt(op_of(model)) for model in MODELS]
    half = len(ops) // 2  # a line has no room for all of them
    op = ["`op`", f"{', '.join(ops[:half])},", "required", MODELS[0].model_fields["op"].description or ""]
    return wrapped_table(FIELD_HEADINGS, [op, ["", ", ".join(ops[half:]), "", ""], *field_rows(SpecBase, {})])


def operator_table(model: Model) -> str:
    """The fields that specs of one operator have beside those of every spec."""
    specs = bare_specs(op_of(model))
    found = {name: [value_of(spec, name) for spec in specs] for name in model.options}
    base = {"`op`", *(row[0] for row in field_rows(SpecBase, {}))}
    return wrapped_table(FIELD_HEADINGS, [row for row in field_rows(model, found) if row[0] not in base])


def pattern_table() -> str:
    """The fields of each pattern, which keys a query sees, and the tensors that a call takes for it."""
    every = [getattr(spec, name) for model, name in pattern_fields().items() for spec in shipped(op_of(model))]
    rows: list[list[str]] = []
    for kind, pattern in PATTERNS.items():
        tensors = dict.fromkeys(tensor.name for found in every if found.kind == kind for tensor in found.index_tensors)
        summary = (pattern.__doc__ or "").partition("\n")[0].replace("``", "`")
        rows.append([f"`{kind}`", "", "", "", summary + (f" Tensors: {code(tensors)}." if tensors else "")])
        rows += [["", *cells] for cells in field_rows(pattern, {}) if cells[0] != "`kind`"]
    return wrapped_table(("`kind`", *FIELD_HEADINGS), rows)


# Specs that are tried


def value_of(spec: Spec, name: str) -> Any:
    """A field as plain data."""
    return spec.model_dump(mode="json")[name]


@cache
def shipped(op: str) -> tuple[Spec, ...]:
    """The shipped specs of an operator."""
    return tuple(named.spec for named in shipped_specs() if named.spec.op == op)


@cache
def problems(op: str) -> tuple[Fields, ...]:
    """The problems of an operator's shipped specs; one of those whose patterns differ only in lengths.

    Operators that have patterns share them: each with all values of what the shipped spec's operator has not.
    """
    own = next(model for model in MODELS if op_of(model) == op)
    sharing = pattern_fields() if own in pattern_fields() else (own,)
    found: dict[str, Fields] = {}
    for spec in (spec for model in sharing for spec in shipped(op_of(model))):
        parts = [
            [{name: value} for value in ([value_of(spec, name)] if name in type(spec).model_fields else choices(field))]
            for name, field in required(own).items()
        ]
        for fields in (with_its_options(own, each) for each in joined(parts)):
            found.setdefault(json.dumps({name: without_lengths(value) for name, value in fields.items()}), fields)
    return tuple(found.values())


def with_its_options(model: Model, fields: Fields) -> Fields:
    """Return fields with the options that one of their values has no kernel without."""
    listed = [name for name, field in required(model).items() if get_origin(kinds(field)[0]) is Literal]
    return {
        **fields,
        **{name: value for each in listed for name, value in options_of(model, each, fields[each]).items()},
    }


@cache
def options_of(model: Model, name: str, value: Any) -> Fields:
    """The options that all shipped specs of a value have, as the first one has them."""
    specs = [spec for spec in shipped(op_of(model)) if value_of(spec, name) == value]
    fields = model.model_fields
    of_all = [
        each for each in model.options if all(value_of(spec, each) != plain_default(fields[each]) for spec in specs)
    ]
    return {each: value_of(specs[0], each) for each in of_all if specs}


def choices(field: FieldInfo) -> tuple[Any, ...]:
    """The values that a model lists for a field."""
    return get_args(kinds(field)[0])


def joined(parts: Iterable[Iterable[Fields]]) -> list[Fields]:
    """Mappings with one element of each part."""
    return [{name: value for part in each for name, value in part.items()} for each in itertools.product(*parts)]


def without_lengths(value: Any) -> Any:
    """A field without the integers of a pattern, which say nothing about kernels; blocks are mappings."""
    is_kind = isinstance(value, Mapping) and "kind" in value
    return {name: part for name, part in value.items() if not isinstance(part, int)} if is_kind else value


@cache
def families(op: str) -> tuple[tuple[tuple[str, ...], str], ...]:
    """Return architectures that share the kernels of an operator, and the one of them that shipped specs are for.

    Without one it is the first.
    """
    groups: dict[tuple[bool, bool, tuple[Combination, ...]], list[str]] = {}
    for arch in ARCHS.values():
        if arch.of(op):
            has_fp8 = op == "attention" and arch.has_fp8
            groups.setdefault((arch.forward_compatible, has_fp8, arch.of(op)), []).append(arch.name)
    shipped_for = {named.spec.arch for named in shipped_specs()}
    return tuple(
        (tuple(names), next((name for name in names if name in shipped_for), names[0])) for names in groups.values()
    )


def combined(combination: Combination) -> dict[str, str]:
    """A combination as a spec has it."""
    return {name: getattr(combination, name) for name in COMBINED}


def attempt(fields: Fields) -> Spec | SpecError:
    """A spec that can be planned, or why there is none."""
    try:
        spec = parse_plain(dict(fields))
        plan_of(spec, "tried")
    except SpecError as error:
        return error
    return spec


def planned(fields: Fields) -> Spec | None:
    """A spec if it can be planned."""
    found = attempt(fields)
    return None if isinstance(found, SpecError) else found


@cache
def bare_specs(op: str) -> tuple[Spec, ...]:
    """The specs of an operator that have a problem and a combination and leave all options out."""
    bases = ({"op": op, "arch": arch, **combined(each)} for arch in ARCHS for each in ARCHS[arch].of(op))
    options = {option for model in MODELS if op_of(model) == op for option in model.options}
    bare = [problem for problem in problems(op) if not options & problem.keys()]
    found = (planned({**base, **problem}) for base in bases for problem in bare)
    return tuple(spec for spec in found if spec is not None)


# Combinations


def combination_table() -> str:
    """The combinations of each architecture, and the options that kernels have with them."""
    rows = [combination_row(*each) for each in tabled_combinations()]
    return wrapped_table(("`op`", "`arch`", *map(spelt, COMBINED), "options"), rows)


def tabled_combinations() -> list[tuple[Model, tuple[str, ...], str, Combination]]:
    """An operator, its architectures, the one that is tried and a combination, for each row of their table."""
    return [
        (model, archs, tried, combination)
        for model in MODELS
        for archs, tried in families(op_of(model))
        for combination in ARCHS[tried].of(op_of(model))
    ]


def combination_row(model: Model, archs: Sequence[str], tried: str, combination: Combination) -> list[str]:
    """Cells of one combination."""
    op = op_of(model)
    base = {"op": op, "arch": tried, **combined(combination)}
    names = code(options_with(model, base, problems(op))) or DASH
    return [f"`{op}`", code(archs), *map(spelt, combined(combination).values()), names]


def pattern_options_table() -> str:
    """The options that kernels have with each pattern."""
    rows = [pattern_options_row(kind, *each) for kind, each in itertools.product(PATTERNS, families("attention"))]
    return wrapped_table(("`kind`", "`arch`", "options"), rows)


def pattern_options_row(kind: str, archs: Sequence[str], tried: str) -> list[str]:
    """Cells of one pattern on architectures that share their kernels."""
    found: dict[str, None] = {}
    for model, field in pattern_fields().items():
        op = op_of(model)
        fitting = [problem for problem in problems(op) if problem[field]["kind"] == kind]
        bases = ({"op": op, "arch": tried, **combined(each)} for each in ARCHS[tried].of(op))
        names = {name for base in bases for name in options_with(model, base, fitting)}
        found |= dict.fromkeys(name for name in model.options if name in names)
    return [f"`{kind}`", code(archs), code(found) or DASH]


def options_with(model: Model, base: Fields, tried: Sequence[Fields]) -> list[str]:
    """The options that a kernel has, by themselves or with another one."""
    found: set[str] = set()
    for alone in (True, False):
        others = (
            [{}]
            if alone
            else [{other: value} for other in model.options if other in found for value in values_on(model, other)]
        )
        for name in model.options:
            types = {"dtype": FP8[0]} if name in FP8_OPTIONS and base["op"] in FP8_OPS else {}
            if types and not may_be_fp8(base, tried):
                continue
            settings = ({name: value, **types, **other} for other in others for value in values_on(model, name))
            if name not in found and has_some_kernel(base, settings, tried):
                found.add(name)
    return [name for name in model.options if name in found]


def has_some_kernel(base: Fields, settings: Iterable[Fields], tried: Sequence[Fields]) -> bool:
    """Whether one of the problems has a kernel with one of the settings."""
    every = ({**base, **problem, **setting} for setting in settings for problem in tried)
    return any(is_planned(json.dumps(fields, sort_keys=True)) for fields in every)


@cache
def is_planned(fields: str) -> bool:
    """Whether a spec, as JSON, can be planned."""
    return planned(json.loads(fields)) is not None


def may_be_fp8(base: Fields, tried: Iterable[Fields]) -> bool:
    """Whether a kernel of one of the problems is refused for anything but its type, if that is FP8."""
    found = (attempt({**base, **problem, "dtype": FP8[0]}) for problem in tried)
    return any(not isinstance(each, SpecError) or each.field != "dtype" for each in found)


def values_on(model: Model, name: str) -> list[Any]:
    """The values of an option other than its default: all where the model lists them, or those shipped."""
    field = model.model_fields[name]
    first = kinds(field)[0]
    sharing = (other for other in MODELS if name in other.model_fields)
    every: Iterable[Any] = (value_of(spec, name) for other in sharing for spec in shipped(op_of(other)))
    if first is bool:
        every = (False, True)
    elif get_origin(first) is Literal:
        every = get_args(first)
    return list({json.dumps(value): value for value in every if value != plain_default(field)}.values())


# Tiles


def kernels(model: Model) -> list[tuple[str, Fields]]:
    """The combinations of an operator, in words and as a spec has them."""
    found = [(tried, combined(each)) for _, tried in families(op_of(model)) for each in ARCHS[tried].of(op_of(model))]
    return [
        (" ".join(map(spelt, (arch, *each.values()))), {"op": op_of(model), "arch": arch, **each})
        for arch, each in found
    ]


def shapes(model: Model) -> list[Fields]:
    """The problems of an operator that tiles are tried for, without patterns."""
    parts: list[list[Fields]] = []
    for name, field in required(model).items():
        if inner := sizes_of(field):
            blocks = itertools.product(BLOCK_SIZES, repeat=len(inner))
            parts.append([{name: dict(zip(inner, block, strict=True))} for block in blocks])
        elif not is_pattern(field):
            parts.append([{name: value} for value in choices(field)])
    return joined(parts)


def patterns_beside(model: Model) -> list[Fields]:
    """The patterns that tiles are tried with, as a field; one empty dict without patterns."""
    names = [name for name, field in required(model).items() if is_pattern(field)]
    found = [{name: problem[name] for name in names} for problem in problems(op_of(model))]
    return list({json.dumps(beside): beside for beside in found}.values())


def tile_tables(model: Model) -> str:
    """The legal tiles of each kernel of an operator."""
    tables: dict[str, list[list[str]]] = {}
    for kernel, base in kernels(model):
        found: dict[tuple[str, ...], list[str]] = {}
        for shape in shapes(model):
            firsts: dict[tuple[str, ...], list[str]] = {}
            for first, *others in tile_words(model, base, shape):
                firsts.setdefault(tuple(others), []).append(first)
            for others, values in firsts.items():
                found.setdefault((", ".join(values), *others), []).append(in_words(shape))
        tables[kernel] = [[*words_of(words), *values] for values, words in found.items()]
    name = tile_of(model)
    sizes = (f"`{name}.{size}`" for size in sizes_of(model.model_fields[name]))
    return tables_by_kernel([*shape_names(model), *sizes], tables)


def tile_words(model: Model, base: Fields, shape: Fields) -> Iterator[tuple[str, ...]]:
    """Legal tiles of a kernel for one shape, in words: each first size with the others that it goes with."""
    name = tile_of(model)
    every = (with_its_options(model, {**base, **shape, **beside}) for beside in patterns_beside(model))
    variants = [fields for fields in every if not is_refused(fields, {*COMBINED, *shape})]
    for first, others in legal_tiles(variants, name, sizes_of(model.model_fields[name])):
        yield (size_in_words(first, shape), *others)


def legal_tiles(variants: Sequence[Fields], name: str, sizes: Sequence[str]) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Legal first sizes of a tile, each with the others that it goes with.

    Args:
        variants: specs without a tile; a tile is legal if one of them may have it.
        name: the field that is the tile.
        sizes: its fields.
    """
    first, *others = sizes
    allowed = [(fields, tiles_of(parse_plain(dict(fields)))) for fields in variants]
    if not may_have(allowed, name, {}):
        return
    for value in sorted({tile[first] for _, tiles in allowed for tile in tiles}):
        fitting = [tile for _, tiles in allowed for tile in tiles if tile[first] == value]
        alone = [
            [
                each
                for each in sorted({tile[size] for tile in fitting})
                if may_have(allowed, name, {first: value, size: each})
            ]
            for size in others
        ]
        given = {rest: {first: value, **dict(zip(others, rest, strict=True))} for rest in itertools.product(*alone)}
        legal = [rest for rest, tile in given.items() if len(others) == 1 or may_have(allowed, name, tile)]
        if legal:
            yield value, tuple(in_ranges(sorted(set(values))) for values in zip(*legal, strict=True))


def may_have(allowed: Iterable[tuple[Fields, Sequence[Tile]]], name: str, tile: Tile) -> bool:
    """Whether one of several specs, each with the tiles that its rules allow, may have some sizes of a tile."""
    return any(
        has_kernel({**fields, name: tile} if tile else fields)
        for fields, tiles in allowed
        if any(tile.items() <= each.items() for each in tiles)
    )


def is_refused(fields: Fields, names: Container[str]) -> bool:
    """Return whether a spec has no kernel because of a field that is one of these: whatever its tile is."""
    found = attempt(fields)
    return isinstance(found, SpecError) and found.field.partition(".")[0] in names


def has_kernel(fields: Fields) -> bool:
    """Return whether a spec can be planned with the stages that are filled in, or with fewer."""
    found = attempt(fields)
    for stages in FEWER_STAGES:
        if isinstance(found, SpecError) and found.field == "stages":
            found = attempt({**fields, "stages": stages})
    return not isinstance(found, SpecError)


def default_tables(model: Model) -> str:
    """The tile and the stages of specs that leave out both, for each kernel of an operator."""
    name = tile_of(model)
    blocks = ["blocks of the lists"] if model in pattern_fields() else []
    tables: dict[str, list[list[str]]] = {}
    for kernel, base in kernels(model):
        found: dict[tuple[str, ...], dict[str, None]] = {}
        for shape, beside in itertools.product(shapes(model), patterns_beside(model)):
            if spec := planned(with_its_options(model, {**base, **shape, **beside})):
                first, *others = value_of(spec, name).values()
                tile = " x ".join([size_in_words(first, shape), *map(str, others)])
                where = [blocks_in(beside) or "none"] if blocks else []
                found.setdefault((*where, tile, str(spec.stages)), {})[in_words(shape)] = None
        tables[kernel] = merged_blocks(found) if blocks else [[*words_of(list(w)), *v] for v, w in found.items()]
    tile = " x ".join(f"`{name}.{size}`" for size in sizes_of(model.model_fields[name]))
    return tables_by_kernel([*shape_names(model), *blocks, tile, "`stages`"], tables)


def merged_blocks(found: Mapping[tuple[str, ...], Iterable[str]]) -> list[list[str]]:
    """Rows in which the blocks of lists that get the same tile stand together."""
    rows: dict[tuple[tuple[str, ...], ...], list[str]] = {}
    for (blocks, *values), shapes_of_it in found.items():
        rows.setdefault((tuple(words_of([*shapes_of_it])), tuple(values)), []).append(blocks)
    return [[*shape, ", ".join(sorted(blocks, key="none".__ne__)), *values] for (shape, values), blocks in rows.items()]


def blocks_in(beside: Fields) -> str:
    """The blocks of a pattern's lists in words, and whether its mask is an expression that has tensors."""
    blocks = [pattern.get("block") for pattern in beside.values()]
    words = "".join(in_words({"block": block}) for block in blocks if isinstance(block, Mapping))
    return words + (" (expression)" if any("aux" in pattern for pattern in beside.values()) else "")


def tables_by_kernel(headings: Sequence[str], tables: Mapping[str, Rows]) -> str:
    """Tables, each for the kernels that share it."""
    found: dict[str, list[str]] = {}
    for kernel, rows in tables.items():
        found.setdefault(wrapped_table(headings, rows), []).append(kernel)
    return "\n\n".join(f"{wrapped('; '.join(names) + ':')}\n\n{table}" for table, names in found.items())


def shape_names(model: Model) -> list[str]:
    """The fields that the words for shapes describe; empty if a problem has no shape."""
    fields = {name: field for name, field in required(model).items() if not is_pattern(field)}
    parts = [[f"`{name}.{size}`" for size in sizes_of(field)] or [f"`{name}`"] for name, field in fields.items()]
    return [", ".join(" x ".join(part) for part in parts)] if parts else []


def words_of(shapes_in_words: Sequence[str]) -> list[str]:
    """The cell that has the shapes, if there are any; of two fields, those with equal second ones together."""
    if not any(shapes_in_words):
        return []
    seconds: dict[str, list[str]] = {}
    for first, _, second in (words.partition(": ") for words in shapes_in_words):
        seconds.setdefault(first, []).append(second)
    firsts: dict[str, list[str]] = {}
    for first, each in seconds.items():
        firsts.setdefault(", ".join(filter(None, each)), []).append(first)
    return ["; ".join(": ".join(filter(None, (", ".join(each), second))) for second, each in firsts.items())]


def size_in_words(size: int, shape: Fields) -> str:
    """The first size of a tile; where it is the first of a block, the name of that."""
    firsts = {f"`{name}.{next(iter(inner))}`": inner for name, inner in shape.items() if isinstance(inner, Mapping)}
    return next((name for name, inner in firsts.items() if next(iter(inner.values())) == size), str(size))


def in_words(shape: Fields) -> str:
    """The shape of a problem in a few words."""
    parts = [value.values() if isinstance(value, Mapping) else [value] for value in shape.values()]
    return ": ".join(" x ".join(map(str, part)) for part in parts)


# The page


def tables() -> dict[str, str]:
    """The tables by the names of their markers."""
    return {name: written() for name, written in writers().items()}


def writers() -> dict[str, Callable[[], str]]:
    """Functions that write the tables, by the names of their markers."""
    found: dict[str, Callable[[], str]] = {"fields": base_table, "combinations": combination_table}
    for model in MODELS:
        found[f"{op_of(model)}-fields"] = partial(operator_table, model)
        found[f"{op_of(model)}-tiles"] = partial(tile_tables, model)
        found[f"{op_of(model)}-defaults"] = partial(default_tables, model)
    return found | {"patterns": pattern_table, "pattern-options": pattern_options_table}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is not up to date")
    check = parser.parse_args(arguments).check
    return update(PAGE, tables(), check=check, stale=STALE)


if __name__ == "__main__":
    raise SystemExit(main())
