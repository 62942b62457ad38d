"""What an execution does: it reads what one of ``inputs.py`` made, and its outcome is success or a CodegenError."""

from __future__ import annotations

import json
import random
import signal
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from stress import inputs
from stress.inputs import KEYS, plain, receipts, spelt

from codegen import library, rewriting
from codegen.errors import CodegenError, SpecError
from codegen.library import NamedSpec, find_spec, read_spec, shown_place, unnamed_stem
from codegen.parse import parse_spec
from codegen.planning import plan_of
from codegen.receipts import Receipt
from codegen.render import render_plan
from codegen.rewriting import rewritten
from codegen.select.choice import choose
from codegen.select.problem import parse_problem, problem_fields
from codegen.spec import Spec
from codegen.yaml_text import read_yaml

BATCH = 100
"""Executions between two reports of a process, and of one run of Hypothesis."""
DRAWN = 10
"""Of a batch, the executions that Hypothesis draws: the last ones."""
SECONDS = 20
LONGEST_MESSAGE = 3000
KERNEL = Path("kernel.yaml")
SMALL_SPEC = "h100_tile_copy_tma"
"""A spec whose source takes little time."""


class Hang(BaseException):
    """An execution that took too long; no handler of the package catches it."""


@contextmanager
def limited() -> Iterator[None]:
    """Raise Hang after SECONDS."""

    def late(number: int, frame: object) -> None:
        raise Hang(f"took more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class Reader:
    """Reads what it is given, and plans each spec that is accepted; one in sixteen is rendered too.

    It remembers what became of a spec, and what the parser made of the last text: planning a spec again, or parsing a
    text for ``read_spec`` after ``rewritten``, would give the same again. Each method returns the hash of the spec, or
    "" where there is none.

    Args:
        remembers: whether it does; for the test that this changes no outcome.
    """

    def __init__(self, *, remembers: bool = True) -> None:
        self.remembers = remembers
        self._folder = Path()
        self._refusals: dict[str, SpecError | None] = {}

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Have a folder for files, and give both readers of a text what the parser made of it the first time."""
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            self._folder = Path(folder)
            if self.remembers:
                once = lru_cache(maxsize=1)(read_yaml)
                for module in (library, rewriting):
                    stack.enter_context(patch.object(module, "read_yaml", once))
            yield

    def text(self, text: str) -> str:
        """Rewrite a spec as ``codegen migrate`` does, and read it."""
        rewritten(text, shown_place(KERNEL))
        return self._planned(read_spec(KERNEL, text).spec)

    def file(self, data: bytes) -> str:
        """Read a spec file."""
        path = self._folder / KERNEL
        path.write_bytes(data)
        return self._planned(find_spec(path).spec)

    def fields(self, data: Any) -> str:
        """Read the fields of a spec, as a caller gives them."""
        spec = parse_spec(data)
        return self._planned(NamedSpec(unnamed_stem(spec), spec).spec)

    def name(self, name: str) -> str:
        """Read a spec by any name, and a legal one from a file that is called so."""
        try:
            find_spec(name)
        except CodegenError as error:
            assert str(error).isprintable()
        named = read_spec(Path(name), library.shipped_files()[SMALL_SPEC].read_text(encoding="utf-8"))
        assert is_text_of_a_source(render_plan(plan_of(named.spec, named.stem), named.origin))
        return named.spec.hash

    def receipt(self, data: bytes) -> str:
        """Read a receipt."""
        path = self._folder / "kernel.json"
        path.write_bytes(data)
        Receipt.read(path)
        return ""

    def problem(self, data: Any) -> str:
        """Read a problem, and choose a kernel for it."""
        problem = parse_problem(data)
        assert str(problem)
        choose(problem)
        return ""

    def problem_text(self, text: str) -> str:
        """Read a problem of a command line."""
        return self.problem(problem_fields(text))

    def _planned(self, spec: Spec) -> str:
        """Plan a spec that was read, or do as it was done the first time."""
        key = spec.hash
        if key not in self._refusals or not self.remembers:
            try:
                plan = plan_of(spec, KERNEL.stem)
                assert not key.endswith("0") or is_text_of_a_source(render_plan(plan))
                self._refusals[key] = None
            except SpecError as error:
                self._refusals[key] = error
        if (refusal := self._refusals[key]) is not None:
            raise refusal.with_traceback(None)
        return key


def is_text_of_a_source(source: str) -> bool:
    """Return whether a source is printable ASCII, and each line of its banner a comment of one line."""
    banner = source.partition("\n\n")[0].split("\n")
    return (
        source.isascii()
        and source.replace("\n", "").isprintable()
        and all(line.startswith("//") and not line.endswith(("\\", "??/")) for line in banner)
    )


Read = Callable[[Reader, Any], str]


def execution(seed: int, number: int) -> tuple[Read, Any]:
    """Return what an execution does, and to what."""
    draw = random.Random(f"{seed}:{number}")
    kind = draw.randrange(20)
    if kind < 4:
        return Reader.file, inputs.by_bytes(draw, inputs.spec_text(draw).encode())
    if kind < 9:
        return Reader.text, inputs.by_tokens(draw, inputs.spec_text(draw))
    if kind < 12:
        text = inputs.yaml_of(inputs.by_structure(draw, inputs.spec_fields(draw)))
        return Reader.text, inputs.by_tokens(draw, text) if draw.randrange(2) else text
    if kind < 17:
        return Reader.fields, inputs.by_structure(draw, inputs.spec_fields(draw))
    if kind < 18:
        return Reader.problem, inputs.by_structure(draw, inputs.problem_fields_of(draw))
    if not draw.randrange(4):
        return Reader.name, inputs.name(draw)
    if kind < 19:
        return Reader.problem_text, inputs.problem_text(draw)
    return Reader.receipt, inputs.by_bytes(draw, draw.choice(receipts()))


@dataclass(frozen=True)
class Failure:
    """What went wrong, and with which input.

    Attributes:
        number: of the execution.
        what: the exception, or what is wrong with the message.
        where: the last lines of its traceback.
        given: the input.
    """

    number: int
    what: str
    where: str
    given: str


@dataclass
class Tally:
    """How executions ended.

    Attributes:
        accepted: how many succeeded.
        refused: how many ended with a CodegenError as it should be.
        failures: what others did.
        specs: hashes of the specs that were accepted.
    """

    accepted: int = 0
    refused: int = 0
    failures: list[Failure] = field(default_factory=list)
    specs: set[str] = field(default_factory=set)

    @property
    def executions(self) -> int:
        """How many there were."""
        return self.accepted + self.refused + len(self.failures)

    def execute(self, reader: Reader, number: int, read: Read, given: Any) -> Failure | None:
        """Execute once, and count it; return what is wrong, or None."""
        try:
            with limited():
                spec = read(reader, given)
        except CodegenError as error:
            message = str(error)
            if message.isprintable() and len(message) <= LONGEST_MESSAGE:
                self.refused += 1
                return None
            failure = Failure(number, f"a message of {len(message)} characters: {message[:300]!a}", "", spelt(given))
        except (Exception, Hang) as error:
            where = "".join(traceback.format_tb(error.__traceback__)[-3:])
            failure = Failure(number, f"{type(error).__name__}: {str(error)[:300]!a}", where, spelt(given))
        else:
            self.accepted += 1
            self.specs |= {spec} - {""}
            return None
        self.failures.append(failure)
        return failure

    def add(self, others: Iterable[Tally]) -> Tally:
        """Count those of others too, and return this."""
        for other in others:
            self.accepted += other.accepted
            self.refused += other.refused
            self.failures += other.failures
            self.specs |= other.specs
        return self


@cache
def _strategies() -> tuple[Any, Any]:
    """Return what Hypothesis draws: specs with some other fields, or anything; and what reads it."""
    from hypothesis import strategies as st

    scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(KEYS)
    anything = st.recursive(
        scalars,
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS) | st.text(), inner, max_size=4)
        ),
        max_leaves=8,
    )
    changes = st.dictionaries(st.sampled_from(KEYS), anything, max_size=3)
    specs = st.builds(lambda text, change: {**json.loads(text), **change}, st.sampled_from(plain()), changes)
    return specs | anything, st.sampled_from([Reader.fields, Reader.problem])


def _drawn(reader: Reader, seed: int, start: int, count: int) -> Tally:
    """Let Hypothesis draw dicts of a spec; of those that fail, tell the smallest."""
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as seeded

    tally = Tally()

    @seeded(f"{seed}:{start}")
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(*_strategies())
    def fails(data: Any, read: Read) -> None:
        assert tally.execute(reader, start, read, data) is None

    try:
        fails()
    except Exception:
        if not tally.failures:
            raise
        del tally.failures[:-1]
    return tally


@cache
def _reader() -> Reader:
    """Return the reader of this process: it remembers from one batch to the next."""
    return Reader()


def batch(seed: int, start: int, count: int = BATCH) -> Tally:
    """Execute the numbers from ``start``; the last of a whole batch are drawn by Hypothesis."""
    warnings.simplefilter("ignore")
    reader, tally = _reader(), Tally()
    random_ones = count - DRAWN if count == BATCH else count
    with reader.in_use():
        for number in range(start, start + random_ones):
            tally.execute(reader, number, *execution(seed, number))
        if count == BATCH:
            tally.add([_drawn(reader, seed, start + random_ones, DRAWN)])
    return tally
