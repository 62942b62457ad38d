"""A search of a space that is too large to time whole: optuna proposes, within a budget."""

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
"""The same proposals for the same timings: a run that was interrupted asks for what it has."""
MOST_MISSES = 20
"""Proposals in a row that are illegal or known: then a candidate is drawn that was not tried."""
STARTUP = 10
"""Candidates that are drawn at random before TPE has seen enough; a third of the budget at most."""
Attempt = Callable[[Sequence[NamedSpec]], Sequence[float | None]]


def optuna() -> Any:
    """Return the library.

    Raises:
        CodegenError: where it is not installed.
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
    """Try candidates of a space, and return those that were tried, in order; the current spec is the first.

    Args:
        space: the space.
        trials: candidates to try.
        sampler: what proposes them.
        attempt: returns what each of some candidates costs; None for one that has no time.
        at_once: candidates of a proposal, at most.

    Raises:
        CodegenError: where optuna is not installed.
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
        warnings.simplefilter("ignore")  # fields that depend on each other are an experimental option of TPE
        made = library.samplers.TPESampler(
            seed=SEED, multivariate=True, n_startup_trials=max(1, min(STARTUP, trials // 3))
        )
    return library.create_study(sampler=made)


def _tell(library: Any, study: Any, trial: Any, cost: float | None) -> None:
    if cost is None:
        study.tell(trial, state=library.trial.TrialState.FAIL)
    else:
        study.tell(trial, cost)
