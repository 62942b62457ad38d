"""Selection of a kernel for a problem: by the table of measurements, else by rules for unmeasured problems.

Fields that a spec gives are never changed; for a partial spec, only missing fields are chosen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from codegen.errors import SpecError
from codegen.library import NamedSpec, as_shipped, find_spec, unnamed_stem
from codegen.parse import parse_spec
from codegen.planning import plan_of
from codegen.select.calibration import candidate_plan, deviations, predicted
from codegen.select.default_tables import GATHERED_ROWS
from codegen.select.distance import MEASURED, NEAR, distance
from codegen.select.estimate import estimate
from codegen.select.problem import (
    AttentionProblem,
    BsrProblem,
    Problem,
    has_problem,
    is_chosen,
    parse_problem,
    plain_fields,
    problem_of,
    said_by,
)
from codegen.select.shipped import Shipped, Verified, alike, serving
from codegen.select.table import UNMEASURED, Measurement, Timing, measurements
from codegen.select.variations import FEW_COLUMNS, UNEVEN
from codegen.spec import Spec
from codegen.wording import shown

Fields = dict[str, Any]
Given = str | Path | Mapping[str, Any] | Spec | NamedSpec | Problem
Rule = Literal["written", "measured", "predicted", "nearest", "shipped", "model", "default"]
WORTH = 1.02
"""Largest ratio of the time of a shipped kernel, which has a receipt, to that of a kernel without."""
SETTLED = 2.0 + 2 * NEAR
"""Distance, in factors of two, up to which a row of attention with times of all candidates decides, not the model."""
SHARES, SHARES_WEIGHT = ("density", "evenness"), 4.0
"""Axes that decide whether a dense product is faster, and their weight in addition to that in a distance."""
STRIDED_COLUMNS = 8
"""Columns of B up to which a kernel reads B and writes C with any strides."""
FEW_COLUMNS_COPY = "ld_global"
"""Copy instruction of a kernel for at most FEW_COLUMNS columns; another one has narrow tiles of wgmma."""
WGMMA_ROWS = 64
"""Least rows of a block that fill a wgmma."""
WHOLE = ("tile", "stages")
"""Fields of a mapping with nothing to choose: rules fill in the rest."""


@dataclass(frozen=True)
class Timed:
    """The kernel whose measured time a reason quotes.

    Attributes:
        named: its spec.
        chosen: whether it is the chosen kernel.
        earlier_source: whether its source has changed since.
    """

    named: NamedSpec
    chosen: bool
    earlier_source: bool

    def __str__(self) -> str:
        """The timed kernel, in words."""
        since = ", whose source has changed since" if self.earlier_source else ""
        return f"of this kernel{since}" if self.chosen else f"of a similar kernel, {self.named.stem}{since}"


@dataclass(frozen=True)
class Choice:
    """A kernel for a problem.

    Attributes:
        named: the spec.
        rule: rule of the choice: ``written``, the spec was complete; ``measured``, the problem is in the table;
            ``predicted``, by the performance model, calibrated by the table; ``nearest``, a similar problem is in the
            table; ``shipped``, a kernel for similar problems is shipped; ``model``, by the performance model;
            ``default``, by the rules for missing fields.
        reason: the rule in a sentence.
        rows: rows of the table behind the choice.
        dense: time of a library's dense product, if it is faster in those rows, or in a row of similar density and
            evenness; else "".
        timed: kernel whose time the reason quotes; None if it quotes none.
    """

    named: NamedSpec
    rule: Rule
    reason: str
    rows: tuple[Measurement, ...] = ()
    dense: str = ""
    timed: Timed | None = None

    @property
    def spec(self) -> Spec:
        """The spec."""
        return self.named.spec


@dataclass(frozen=True)
class _Kernel:
    """A kernel of the rows, applied to the problem."""

    named: NamedSpec
    label: str


@dataclass(frozen=True)
class _Kernels:
    """The kernels of a problem.

    Attributes:
        written: required fields of their specs.
        problem: the problem.
        shipped: shipped kernels, or kernels with a receipt, by the label of their tuning.
        only: whether other kernels are excluded.
    """

    written: Fields
    problem: Problem
    shipped: Mapping[str, Shipped]
    only: bool = False

    @property
    def are_preferred(self) -> bool:
        """Whether shipped kernels are preferred to others that the model expects to be faster.

        For uneven matrices, too few kernels are shipped.
        """
        longest = None if isinstance(self.problem, AttentionProblem) else self.problem.longest_row
        return longest is None or longest < UNEVEN

    @property
    def kind(self) -> str:
        """Kind of the kernels in ``shipped``, in words."""
        return "kernels with receipts" if self.only else "shipped kernels"

    def of(self, timing: Timing) -> NamedSpec | None:
        """Kernel for the problem with the tuning of a measured one; None if required fields differ."""
        if timing.label in self.shipped:
            return self.shipped[timing.label].named
        if self.only:
            return None
        spec = _as_measured(self.written, self.problem, timing)
        return None if spec is None else _named(spec)


def choose(
    given: Given,
    problem: Problem | Mapping[str, Any] | None = None,
    *,
    device: str | None = None,
    rows: Sequence[Measurement] | None = None,
    general: bool = False,
    verified: Verified | None = None,
) -> Choice:
    """Choose a kernel: a shipped one, which has a receipt, unless another was measured to be over 2% faster.

    Args:
        given: a problem, or a partial spec: a mapping without ``tile`` or ``stages``. A mapping with both, and any
            other argument of :func:`~codegen.library.find_spec`, is a complete spec and is returned unchanged.
        problem: for a spec, its problem, or some of its sizes as a mapping.
        device: name of the GPU; its rows are preferred among those for the same problem.
        rows: the table; by default, the committed one.
        general: whether more general kernels are allowed, which take the numbers of the pattern from the call or pad
            heads. The caller then passes those numbers.
        verified: kernels with receipts, to choose only from these; a complete spec is returned unchanged.

    Returns:
        The spec of the kernel, and the rule and the rows of the choice.

    Raises:
        SpecError: for an invalid spec or problem, or contradictions between them; with ``verified``, if none of its
            kernels computes the problem.
    """
    if isinstance(given, AttentionProblem | BsrProblem):
        if problem is not None:
            raise SpecError("problem", "is given twice")
        strided = _strided(given, device, rows, verified)
        return strided or _chosen(_kernels(given.fields(), given, general, verified), device, rows)
    if not isinstance(given, Mapping):
        named = as_shipped(find_spec(given))
        _checked_problem(named.spec, problem)
        return Choice(named, "written", "the spec is complete and used unchanged")
    spec = parse_spec(given)
    asked = _checked_problem(spec, problem)
    if asked is None:
        why = f"{spec.op} has one kernel for each tile"
        if has_problem(spec):
            why = f"no kernel of dtype {spec.dtype} is in the table of measurements"
        return Choice(_named(spec), "default", f"{why}: the default")
    if all(given.get(name) for name in WHOLE):
        reason = "tile and stages are given; rules fill in the other fields"
        return Choice(_named(spec), "written", reason)
    return _chosen(_kernels(dict(given), asked, general, verified), device, rows)


def _strided(
    problem: Problem, device: str | None, rows: Sequence[Measurement] | None, verified: Verified | None
) -> Choice | None:
    """Kernel of a product with up to ``STRIDED_COLUMNS`` columns and any strides of B, or None.

    Kernels for B stored by rows or by columns need strides that are multiples of 16 bytes, which such a B seldom has.
    """
    if not isinstance(problem, BsrProblem) or problem.op != "bsr_spmm" or problem.is_fp8 or problem.transpose_a:
        return None
    if problem.n is None or problem.n > STRIDED_COLUMNS or problem.b_layout == "strided":
        return None
    own = problem.model_copy(update={"b_layout": "strided"})
    try:
        choice = planned(_chosen(_kernels(own.fields(), own, False, verified), device, rows))
    except SpecError:
        return None
    why = f"with up to {STRIDED_COLUMNS} columns B and C are read and written as they are, with any strides"
    return replace(choice, reason=f"{why}; {choice.reason}")


def planned(choice: Choice) -> Choice:
    """Check that a chosen kernel has a valid plan, as the default of the rules may not have one.

    Args:
        choice: result of ``choose``, or another choice.

    Returns:
        The same choice.

    Raises:
        SpecError: names the field that no kernel supports.
    """
    if not isinstance(choice, Choice):
        raise SpecError("choice", f"is {type(choice).__name__}, expected what choose returns")
    plan_of(choice.spec, choice.named.stem)
    return choice


def _checked_problem(spec: Spec, problem: Problem | Mapping[str, Any] | None) -> Problem | None:
    """Problem of a spec, with sizes.

    Raises:
        SpecError: if they contradict one another.
    """
    if not is_chosen(spec):
        if problem is not None:
            which = f"a {spec.op} of dtype {spec.dtype}" if has_problem(spec) else f"a {spec.op}"
            raise SpecError("problem", f"is given, but {which} is not chosen by problem")
        return None
    if not isinstance(problem, AttentionProblem | BsrProblem):
        own, sizes = said_by(spec), plain_fields({} if problem is None else problem)
        _check_same(own, {name: value for name, value in sizes.items() if name in own})
        return parse_problem({**sizes, **own})
    _check_same(problem_of(spec).fields(), problem.fields())
    return problem


def _check_same(spec: Fields, problem: Fields) -> None:
    for name in problem.keys() | spec.keys() if "op" in problem else problem:
        told, asked = spec.get(name), problem.get(name)
        if told != asked:
            raise SpecError(f"problem.{name}", f"is {shown(asked)}, but {shown(told)} in the spec")


def _named(spec: Spec) -> NamedSpec:
    return as_shipped(NamedSpec(stem=unnamed_stem(spec), spec=spec))


def _kernels(written: Fields, problem: Problem, general: bool, verified: Verified | None) -> _Kernels:
    """The kernels of a problem.

    Raises:
        SpecError: if only kernels with receipts are allowed, and none computes the problem.
    """
    found = serving(written, problem, general=general, verified=verified)
    if verified is None:
        return _Kernels(written, problem, found)
    found = {label: each for label, each in found.items() if _allowed(each.timing, problem)}
    if not found:
        raise SpecError("", f"no kernel with a receipt computes {problem}")
    return _Kernels(written, problem, found, only=True)


def _chosen(kernels: _Kernels, device: str | None, rows: Sequence[Measurement] | None) -> Choice:
    """Choice for a problem, among specs with the given fields."""
    written, problem = kernels.written, kernels.problem
    every = measurements() if rows is None else rows
    in_fp8 = problem.is_fp8
    table = [row for row in every if row.problem.key() == problem.key() and row.problem.is_fp8 == in_fp8]
    if in_fp8 and not table and not kernels.only:  # 16-bit rows, and the model fitted to them, do not apply
        reason = f"no kernel of dtype {problem.dtype} was measured: the default"
        return Choice(_named(parse_spec(written)), "default", reason)
    for away, group in _by_distance(problem, table):
        own = [row for row in group if row.device == device]
        if not _decides(kernels, group, away) and (choice := _predicted(kernels, every, group)):
            return choice
        if found := _winner(kernels, own or group, measured=away <= MEASURED):
            kernel, dense = found
            return _told(kernel, problem, own or group, away, dense)
    if not table and not in_fp8 and (choice := _predicted(kernels, every, ())):
        return choice
    return _by_rules(kernels, bool(table))


def _by_rules(kernels: _Kernels, has_rows: bool) -> Choice:
    """Choice without applicable rows and without a calibrated model.

    Args:
        kernels: kernels of the problem.
        has_rows: whether similar problems were measured.
    """
    if not has_rows and (choice := _unmeasured(kernels)):
        return choice
    if kernels.only:
        first, *others = (each.named for each in kernels.shipped.values())
        return Choice(first, "shipped", f"not measured: the first of {1 + len(others)} {kernels.kind}")
    beside = " with what the spec says" if has_rows else ""
    return Choice(_named(parse_spec(kernels.written)), "default", f"not measured{beside}: the plan's default")


def _by_distance(problem: Problem, table: Iterable[Measurement]) -> Iterator[tuple[float, list[Measurement]]]:
    """Yield the rows in groups of equal distance from a problem, nearest first."""
    far = sorted(((distance(problem, row.problem), i, row) for i, row in enumerate(table)), key=lambda each: each[:2])
    while far:
        nearest = far[0][0]
        group = [row for away, _, row in far if away <= nearest + NEAR]
        yield nearest, group
        far = far[len(group) :]


def _decides(kernels: _Kernels, rows: Sequence[Measurement], away: float) -> bool:
    """Whether rows decide, not the model: those of the problem, or near ones with times of all candidates.

    The candidates of near rows are shipped kernels.
    """
    if away <= MEASURED:
        return True
    if away > SETTLED or not isinstance(kernels.problem, AttentionProblem):
        return False
    candidates = set(_candidates(kernels, ()))
    shipped_alone = bool(candidates) and candidates <= kernels.shipped.keys()
    return shipped_alone and any(candidates <= {each.label for each in row.kernels} for row in rows)


def _allowed(timing: Timing, problem: Problem) -> bool:
    """Whether a kernel applies: A has the form of its measurement, and a kernel for few columns gets few."""
    if isinstance(problem, AttentionProblem):
        return True
    if problem.op == "bsr_spmm" and (problem.n or 0) > FEW_COLUMNS and _is_for_few_columns(timing.tuning, problem):
        return False
    if timing.prepared is None:
        return True
    if problem.prepared is None:  # kernels that gather block rows require a prepared A; others do not
        return bool(timing.tuning["tile"]["m"] != GATHERED_ROWS)
    return problem.prepared in ("packed", timing.prepared)


def _is_for_few_columns(tuning: Fields, problem: BsrProblem) -> bool:
    """Whether a kernel of BSR x dense is for at most FEW_COLUMNS columns."""
    width, shares = tuning["tile"].get("n", 2 * FEW_COLUMNS), tuning.get("ctas_per_sm", 1) > 1
    by_columns = problem.b_layout == "column_major" and problem.block.rows >= WGMMA_ROWS
    narrow = width < FEW_COLUMNS or (width == FEW_COLUMNS and by_columns and shares)
    return tuning.get("copy") == FEW_COLUMNS_COPY or (tuning.get("mma") == "wgmma" and narrow)


def _winner(kernels: _Kernels, rows: Sequence[Measurement], *, measured: bool) -> tuple[_Kernel, str] | None:
    """Best kernel on average over the rows, and the time of a dense product if that is faster.

    A shipped kernel is preferred to others that are faster by less than ``WORTH``, and to all others in rows of another
    problem.
    """
    losses: list[dict[str, float]] = []
    labels: dict[str, Timing] = {}
    refused: set[str] = set()
    weights: dict[str, float] = {}
    for row in rows:
        costs: dict[str, float] = {}
        for each, cost in zip(row.kernels, row.costs(), strict=True):
            label = each.label
            if label in refused or not _allowed(each, kernels.problem):
                continue
            if label in labels or kernels.of(each) is not None:
                labels.setdefault(label, each)
                costs[label] = min(cost, costs.get(label, math.inf))
            else:
                refused.add(label)
        if costs:
            best = min(costs.values())
            losses.append({label: math.log(cost / best) for label, cost in costs.items()})
            for label, loss in losses[-1].items():
                weights[label] = weights.get(label, 0.0) + best * (loss == 0)
    if not labels:
        return None
    mean = {label: sum(loss.get(label, math.log(UNMEASURED)) for loss in losses) for label in labels}
    order = sorted(labels, key=lambda each: (round(mean[each], 9), -weights[each]))
    most = math.log(WORTH) * len(losses) if measured or not kernels.are_preferred else math.inf
    label = next((each for each in order if each in kernels.shipped and mean[each] - mean[order[0]] <= most), order[0])
    named = kernels.of(labels[label])
    assert named is not None
    return _Kernel(named, label), _dense(rows, label, kernels.problem)


def _dense(rows: Sequence[Measurement], label: str, problem: Problem) -> str:
    """Time of a dense product, in words, in the first row in which it is faster than a kernel; else ""."""
    for row in rows:
        timing = next((each for each in row.kernels if each.label == label), None)
        if timing is not None and row.dense is not None and row.dense_wins(timing):
            ours = f"the measured kernel {timing.single_us:.4g} us"
            where = "" if distance(problem, row.problem) <= MEASURED else f", for {row.problem}"
            return f"{row.dense.name} {row.dense.single_us:.4g} us ({ours}){where}"
    return ""


def _dense_of_similar(rows: Sequence[Measurement], problem: Problem) -> str:
    """Time of a dense product, in words, if it is faster than all kernels of the most similar row; else "".

    The density and the evenness of a matrix decide more than sizes whether a dense product is faster.
    """
    if not isinstance(problem, BsrProblem):
        return ""
    place = problem.places()

    def away(row: Measurement) -> float:
        other = row.problem.places()
        apart = (abs(a - b) for name in SHARES if (a := place[name]) is not None and (b := other[name]) is not None)
        return distance(problem, row.problem) + SHARES_WEIGHT * sum(apart)

    similar = min((row for row in rows if row.dense is not None), key=away, default=None)
    if similar is None:
        return ""
    fastest = min(similar.kernels, key=lambda each: each.single_us)
    return _dense([similar], fastest.label, problem)


def _as_measured(written: Fields, problem: Problem, timing: Timing) -> Spec | None:
    """Spec for a problem with the tuning of a measured kernel; None if required fields differ.

    Sizes of a problem are not in its spec, so its name may differ from that of the measured kernel.
    """
    semantic, tuning = problem.fields(), timing.tuning
    try:
        own = {**semantic, **tuning}
        spec = parse_spec(own)
        required = {**own, **written, "tile": {**tuning["tile"], **written.get("tile", {})}}
        if required != own and parse_spec(required) != spec:
            return None
        candidate_plan(spec)
    except SpecError:
        return None
    return spec


def _told(kernel: _Kernel, problem: Problem, rows: Sequence[Measurement], away: float, dense: str) -> Choice:
    """Choice with its reason."""
    first = next(row for row in rows if kernel.label in {each.label for each in row.kernels})
    timing = next(each for each in first.kernels if each.label == kernel.label)
    figures = f"{timing.single_us:.4g} us"
    if timing.back_to_back_us:
        figures += f", {timing.back_to_back_us:.4g} us back to back"
    timed = _timed(kernel.named, first, timing)
    where = f"{figures} on {first.device}, {first.date}, {first.source}"
    where += "" if timed is None else f"; the time is {timed}"
    if away <= MEASURED and len(rows) == 1:
        rule: Rule = "measured"
        reason = f"measured: {where}"
    elif away <= MEASURED:
        rule = "measured"
        reason = f"best on average over {len(rows)} matching measurements; one of them: {first.problem}: {where}"
    else:
        rule = "nearest"
        reason = f"not measured; the nearest measured problem is {first.problem}: {where}"
    return Choice(kernel.named, rule, reason, tuple(rows), dense, timed)


def _timed(named: NamedSpec, row: Measurement, timing: Timing) -> Timed | None:
    """Kernel that was timed in a row, compared to the chosen one; None if the row's kernel is no longer legal."""
    try:
        spec = parse_spec({**row.problem.fields(), **timing.tuning})
    except SpecError:
        return None
    if spec == named.spec:
        return Timed(named, True, timing.earlier_source)
    return Timed(_named(spec), False, timing.earlier_source)


def _predicted(kernels: _Kernels, every: Sequence[Measurement], nearest: Sequence[Measurement]) -> Choice | None:
    """Kernel that the calibrated model expects to be fastest; None if it cannot decide.

    It considers shipped kernels; if there are none, kernels of rows for similar problems (or, without such rows, of all
    rows) and shipped kernels for similar problems.
    """
    problem = kernels.problem
    rows = [row for row in every if (row.problem.op, row.problem.arch) == (problem.op, problem.arch)]
    near = [row for row in rows if row.problem.key() == problem.key()]
    tried = _candidates(kernels, near or rows)
    if not any(deviations(row) for row in rows):
        return None
    expected = predicted(problem, tried, rows)
    if not expected:
        return None
    label = min(expected, key=lambda each: expected[each])
    which = kernels.kind if label in kernels.shipped else "kernels"
    reason = f"the fastest of {len(expected)} {which} in a model of waves and steps, calibrated by {len(rows)} rows"
    if nearest:
        reason += f"; the nearest measured problem is {nearest[0].problem}"
    dense = _dense(nearest, label, problem) or _dense_of_similar(near, problem)
    return Choice(tried[label], "predicted", reason, tuple(nearest), dense)


def _candidates(kernels: _Kernels, rows: Iterable[Measurement]) -> dict[str, NamedSpec]:
    """Kernels to estimate, by the label of their tuning: the shipped ones; else those of rows, and similar ones."""
    problem = kernels.problem
    timings = [each.timing for each in kernels.shipped.values() if _allowed(each.timing, problem)]
    if not kernels.only and not (timings and kernels.are_preferred):
        timings = [*(each for row in rows for each in row.kernels), *alike(problem)]
    tried: dict[str, NamedSpec | None] = {}  # rows repeat kernels
    for timing in timings:
        if (label := timing.label) not in tried and _allowed(timing, problem):
            tried[label] = kernels.of(timing)
    return {label: named for label, named in tried.items() if named is not None}


def _unmeasured(kernels: _Kernels) -> Choice | None:
    """Choice without measurements: the shipped kernel that the model expects to be fastest, or None.

    If no shipped kernel computes the problem, the tuning of one for similar problems. The model does not distinguish
    instructions, so only kernels with the default instructions are compared.
    """
    problem = kernels.problem
    shipped = [each.timing for each in kernels.shipped.values()] or ([] if kernels.only else alike(problem))
    found = [kernels.of(timing) for timing in shipped if _allowed(timing, problem)]
    named = list({each.spec.hash: each for each in found if each is not None}.values())
    default = parse_spec(kernels.written)
    named = [each for each in named if (each.spec.mma, each.spec.copy_) == (default.mma, default.copy_)]
    reason = f"not measured: the {'kernel with a receipt' if kernels.only else 'shipped kernel for similar problems'}"
    if len(named) == 1:
        return Choice(named[0], "shipped", reason)
    return _fastest_by_the_model(kernels, named) if named else None


def _fastest_by_the_model(kernels: _Kernels, named: Sequence[NamedSpec]) -> Choice | None:
    """Fastest of some kernels by the performance model; None if sizes are missing.

    If only the length of the lists is missing, the shipped kernel with the shortest name.
    """
    problem = kernels.problem
    guesses = [estimate(candidate_plan(each.spec), problem) for each in named]
    times = [guess.microseconds for guess in guesses if guess is not None]
    those = f"not measured: of {len(named)} {kernels.kind}"
    if len(times) == len(named):
        reason = f"{those} the fastest in a model of waves and steps"
        return Choice(named[times.index(min(times))], "model", reason)
    if not (kernels.shipped and isinstance(problem, AttentionProblem) and problem.kv_len):
        return None
    first = min(named, key=lambda each: (len(each.stem), each.stem))
    return Choice(first, "shipped", f"{those} the one with the shortest name")


__all__ = ["Choice", "choose", "distance", "planned"]
