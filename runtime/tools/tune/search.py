"""Search of a space that is too large to time completely: optuna proposes candidates within a budget."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from codegen.errors import CodegenError
from codegen.installation import install_command
from codegen.library import NamedSpec
from codegen.select.space import Space
from runtime.tools.tune.sampler import Sampler

SEED = 0
"""Seed that makes proposals reproducible, so that an interrupted run proposes the same candidates again."""
MOST_MISSES = 20
"""Maximum number of consecutive illegal or known proposals; then an untried candidate is drawn at random."""
STARTUP = 10
"""Random candidates before TPE starts; at most a third of the budget."""
Attempt = Callable[[Sequence[NamedSpec]], Sequence[float | None]]


def optuna() -> Any:
    """The optuna library.

    Raises:
        CodegenError: if it is not installed.
    """
    try:
        import optuna as found  # noqa: PLC0415
    except ModuleNotFoundError:
        raise CodegenError(
            f"--trials needs optuna: {install_command('tune')}; without --trials, and without optuna, "
            "every candidate of the space is tried"
        ) from None
    return found


def search(space: Space, trials: int, sampler: Sampler, attempt: Attempt, at_once: int = 1) -> list[NamedSpec]:
    """Try candidates of a space, and return the tried ones in order, the current spec first.

    Args:
        space: the space.
        trials: number of candidates to try.
        sampler: method that proposes them.
        attempt: a function that returns the cost of each candidate; None for a candidate without a time.
        at_once: maximum number of candidates per proposal.

    Raises:
        CodegenError: if optuna is not installed.
    """
    library = optuna()
    study = _study(library, sampler, trials)
    choices = {
        name: library.distributions.CategoricalDistribution(sorted({point[i] for point in space.members}))
        for i, name in enumerate(space.axes)
    }
    tried: dict[str, NamedSpec] = {space.current.spec.hash: space.current}
    costs: dict[str, float | None] = dict(zip(tried, attempt([space.current]), strict=True))
    drawn = random.Random(SEED)
    while len(tried) < min(trials, len(space.candidates)):
        group: list[tuple[Any, NamedSpec]] = []
        size = min(at_once, trials - len(tried), len(space.candidates) - len(tried))
        misses = 0
        while len(group) < size:
            if misses == MOST_MISSES:
                left = [point for point, named in space.members.items() if named.spec.hash not in tried]
                study.enqueue_trial(dict(zip(space.axes, drawn.choice(left), strict=True)))
                misses = 0
            trial = study.ask(choices)
            named = space.members.get(tuple(trial.params[name] for name in space.axes))
            if named is not None and named.spec.hash not in tried:
                tried[named.spec.hash] = named
                group.append((trial, named))
                misses = 0
                continue
            misses += 1
            _tell(library, study, trial, None if named is None else costs.get(named.spec.hash))
        for (trial, named), cost in zip(group, attempt([named for _, named in group]), strict=True):
            costs[named.spec.hash] = cost
            _tell(library, study, trial, cost)
    return list(tried.values())


def _study(library: Any, sampler: Sampler, trials: int) -> Any:
    library.logging.set_verbosity(library.logging.WARNING)
    if sampler is Sampler.RANDOM:
        return library.create_study(sampler=library.samplers.RandomSampler(seed=SEED))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # multivariate TPE is experimental
        made = library.samplers.TPESampler(
            seed=SEED, multivariate=True, n_startup_trials=max(1, min(STARTUP, trials // 3))
        )
    return library.create_study(sampler=made)


def _tell(library: Any, study: Any, trial: Any, cost: float | None) -> None:
    if cost is None:
        study.tell(trial, state=library.trial.TrialState.FAIL)
    else:
        study.tell(trial, cost)
