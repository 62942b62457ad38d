"""Reading of specs: plain data are validated, filled in and checked.

A partial spec is a model too, the spec's own with fields that may be left out: bad values are refused before fields are
filled in. Of several specs that it may become, the first one is taken that has a plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from operator import or_
from typing import Annotated, Any, get_args

from pydantic import BaseModel, Field, TypeAdapter, ValidationError, create_model

from codegen.arch import ARCHS, Combination
from codegen.combinations import check_combination, check_fp8
from codegen.errors import SpecError
from codegen.migrations import migrated, outdated
from codegen.operators import OPERATORS, operator_of
from codegen.patterns.base import SpecModel
from codegen.plain import PlainCopy
from codegen.select.defaults import COMBINED, Choice, Fields
from codegen.spec import FILLED_IN, SPEC_ADAPTER, Spec, SpecBase
from codegen.validation import every_error


def _may_lack(model: type[SpecModel], lacking: Mapping[str, tuple[Any, Any]]) -> type[Any]:
    """Return a model derived from another one, with types and defaults of fields that may be left out."""
    fields: dict[str, Any] = {
        name: (Annotated[kind, model.model_fields[name]], default) for name, (kind, default) in lacking.items()
    }
    return create_model(f"Partial{model.__name__}", __base__=model, __module__=__name__, **fields)


def _partial(model: type[SpecBase]) -> type[Any]:
    """Return the model of a spec with fields left out: those of FILLED_IN are then None, as are sizes of the tile."""
    lacking = {
        name: (field.annotation, None)
        for name, field in model.model_fields.items()
        if (field.alias or name) in FILLED_IN
    }
    whole: Any = model.model_fields["tile"].annotation
    tile = _may_lack(whole, {name: (field.annotation, None) for name, field in whole.model_fields.items()})
    return _may_lack(model, {**lacking, "tile": (tile, tile())})


def _partial_union() -> Any:
    """Return the union of all partial specs."""
    return Annotated[reduce(or_, (_partial(model) for model in get_args(Spec))), Field(discriminator="op")]


BY_OP: dict[str, type[BaseModel]] = {name: operator.model for name, operator in OPERATORS.items()}
PARTIAL_ADAPTER: TypeAdapter[Spec] = TypeAdapter(_partial_union())


def parse_spec(data: object, file: str = "") -> Spec:
    """Build a spec from plain data.

    Args:
        data: the fields, or a spec.
        file: where they are from, as the command that rewrites old names is to be given it.

    Raises:
        SpecError: names the first offending field (dotted), its value and what is allowed. Its ``others`` are the
            further mistakes that do not depend on it.
    """
    if not isinstance(data, Mapping | SpecBase):
        what = "empty" if data is None else f"of type {type(data).__name__}"
        raise SpecError("", f"a spec is a mapping of fields, and this is {what}")
    return parse_plain(PlainCopy().of(data), file)


def parse_plain(fields: dict[str, Any], file: str = "") -> Spec:
    """Build a spec from plain data of this package itself: what comes from outside is copied first.

    Raises:
        SpecError: as ``parse_spec``.
    """
    try:
        specs = [SPEC_ADAPTER.validate_python(each) for each in _filled_in(PARTIAL_ADAPTER.validate_python(fields))]
    except ValidationError as error:
        raise _mistakes(error, fields, file) from None
    check_combination(specs[0], fields)  # in which they do not differ
    check_fp8(specs[0])
    operator_of(specs[0]).check(specs[0])
    return next(filter(_is_enough, specs[:-1]), specs[-1])


def _mistakes(error: ValidationError, fields: dict[str, Any], file: str) -> SpecError:
    """The first mistake of a spec, with the others: a former name, then pydantic's errors."""
    old = outdated(fields, file)
    if old is None:
        found = every_error(error, BY_OP, "this spec")
    else:
        try:
            PARTIAL_ADAPTER.validate_python(migrated(fields)[0])
            found = []
        except ValidationError as rest:
            found = every_error(rest, BY_OP, "this spec")
        except SpecError:  # a field by its former name and by its present one
            found = []
    errors = [SpecError(*each) for each in found]
    first, others = (old, errors) if old is not None else (errors[0], errors[1:])
    return SpecError(first.field, first.reason, first.location, tuple(others))


def _is_enough(spec: Spec) -> bool:
    """Whether a spec works on its architecture, or would not with fewer stages either."""
    try:
        operator_of(spec).plan(spec, spec.op)
    except SpecError as error:
        return error.field not in ("stages", "ctas_per_sm")
    return True


def _filled_in(given: Spec) -> list[Fields]:
    """Fields of a partial spec with those that were left out, once for each number of stages, best first.

    Raises:
        SpecError: names ``arch``, where no kernel of this operator is written for it.
    """
    operator = operator_of(given)
    preferred, more = operator.features(given)
    choice = _combination(given, preferred)
    combined = {key: getattr(choice, key) for key in COMBINED}
    features: Fields = {**dict(given), **combined, **more}
    row = next(row for row in operator.rows if row.fits(features))
    sizes = zip(type(given.tile).model_fields, row.tile, strict=True)
    tile = {name: features[size] if isinstance(size, str) else size for name, size in sizes}
    fields = given.model_dump(by_alias=True, exclude_unset=True)
    tile |= fields.pop("tile", {})
    stages = row.stages if given.stages is None else row.stages[:1]
    return [{**combined, **row.options, "stages": number, **fields, "tile": tile} for number in stages]


def _combination(given: Spec, preferred: Choice | None) -> Combination:
    """The preferred combination, or else the first legal one, that agrees with a partial spec."""
    legal = ARCHS[given.arch].of(given.op)
    if not legal:
        written = ", ".join(arch.name for arch in ARCHS.values() if arch.of(given.op))
        raise SpecError("arch", f"is {given.arch}; {given.op} is written for {written}")
    said = (given.mma, given.copy_, given.schedule)

    def agrees(choice: Combination) -> bool:
        pairs = zip(said, (choice.mma, choice.copy, choice.schedule), strict=True)
        return all(one in (None, other) for one, other in pairs)

    first = () if preferred is None else (Combination(given.op, *preferred),)
    return next(filter(agrees, (*first, *legal)), legal[0])  # one that no kernel has is refused later
