"""Rows of the table of measurements, from a database."""

from __future__ import annotations

from pydantic import ValidationError

from codegen.errors import CodegenError
from codegen.library import NamedSpec, find_spec
from codegen.plain import first_reason
from codegen.receipts import source_sha256
from codegen.render import render
from codegen.select.problem import preparation_of, tuning_of
from codegen.select.table import Dense, Measurement, Timing, ordered
from codegen.spec import canonical
from runtime.tools.tune.database import Database, DatabaseError

SOURCE = "codegen tune"
KEPT = 24  # fastest kernels of a problem in a row of the table; slow ones show where the model is wrong


def exported(database: Database, most: int = KEPT) -> list[Measurement]:
    """Rows of the table of measurements from a database: the ``most`` fastest kernels and shipped kernels.

    Kernels whose source has changed are skipped, because their current timing is unknown.

    Raises:
        CodegenError: for contents that are not from a tuner.
    """
    try:
        return _exported(database, most)
    except ValidationError as error:
        raise DatabaseError(f"{database.place}: holds what no tuner wrote there: {first_reason(error)}") from None


def _exported(database: Database, most: int) -> list[Measurement]:
    rows = []
    for problem, device in database.problems():
        timings: dict[str, Timing] = {}
        dates = []
        for timed in database.rows(problem, device):
            named = _named(timed.stem, timed.spec)
            if source_sha256(render(named)) != timed.source_sha256:
                continue
            packed = getattr(problem, "prepared", None) == "packed"
            timings[named.spec.hash] = Timing(
                spec=timed.stem if named.path is not None else tuning_of(named.spec),
                single_us=round(timed.single_us, 4),
                back_to_back_us=timed.back_to_back_us and round(timed.back_to_back_us, 4),
                prepared=preparation_of(named.spec, packed),
            )
            dates.append(timed.date)
        if not timings:
            continue
        known = database.dense(problem, device)
        dense = None
        if known is not None and known[1] is not None:
            dense = Dense(name=known[0], single_us=known[1].single_us, back_to_back_us=known[1].back_to_back_us)
        row = Measurement(
            problem=problem.model_copy(update={"prepared": None} if hasattr(problem, "prepared") else {}),
            device=device.name,
            date=max(dates),
            source=f"{SOURCE}, driver {device.driver}",
            kernels=tuple(timings.values()),
            dense=dense,
        )
        best = ordered(row)
        kept = [each for i, each in enumerate(best.kernels) if i < most or isinstance(each.spec, str)]
        rows.append(best.model_copy(update={"kernels": tuple(kept)}))
    return rows


def _named(stem: str, fields: dict[str, object]) -> NamedSpec:
    """A candidate under its recorded name."""
    named = find_spec(fields)
    if named.stem == stem:
        return named
    shipped = find_spec(stem)
    if canonical(fields) != shipped.spec.canonical_json():
        raise CodegenError(f"the spec of {stem} differs from the one in the database: tune again")
    return shipped
