"""Attacks what reads specs, problems and receipts: whatever the input, the outcome is success or a CodegenError.

    python tests/stress/loader.py --executions 1000000 --jobs 2
    python tests/stress/loader.py --seed 7 --start 40000 --executions 1000     # goes on, or repeats

An execution is known by the seed and its number. Its input is a shipped spec that was mutated by bytes, by tokens or by
structure, or a dict, a problem or a receipt; of each hundred some are drawn by Hypothesis. A failure is anything else
than success or a CodegenError of one line, or more than SECONDS; it is printed with its input and the command that
repeats it.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import random
import signal
import string
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from codegen.errors import CodegenError
from codegen.library import find_spec, read_spec, shipped_files, shipped_specs
from codegen.parse import parse_spec
from codegen.plans import plan_of
from codegen.receipts import Receipt, receipt_path
from codegen.render import render_plan
from codegen.rewriting import rewritten
from codegen.select.choice import choose
from codegen.select.problem import parse_problem, problem_fields, said_by
from codegen.spec import UnchosenSpec

BATCH = 100
"""Executions between two reports of a process, and of one run of Hypothesis."""
DRAWN = 20
"""Of a batch, the executions that Hypothesis draws: the last ones."""
SECONDS = 20
LONGEST_MESSAGE = 3000
DEEP = 6
"""Levels to which data that contain themselves are spelt."""

TOKENS = (
    *("!!bool maybe", "!!int ''", "!!float ''", "!!set x", "!!set {a, b}", "!!omap [a: 1]", "!!binary _", "!!null x"),
    *(
        "!!timestamp 2001-99-99",
        "!!python/object:os.system x",
        "!<tag> x",
        "!x",
        "!!str 128",
        "!!map [1]",
        "!!seq {a: 1}",
    ),
    *("&a", "*a", "&t {<<: *t}", "<<: *a", "<<: [*a, *a]", "<<: 1", "&a [*a]", "? ", "? [1, 2]\n: 3", "? {a: 1}\n: 3"),
    *(r'"\UFFFFFFFF"', r'"\uD800"', r'"\x"', "|", "|9", ">-", "---", "...", "%YAML 9.9", "%TAG ! !", "#", "# x\n"),
    *("{", "}", "[", "]", ",", ":", "- ", "'", '"', "\t", "\n", "\r\n", "\\", "@", "`", "\ufeff", "\u2028", "\0", "é"),
    *("0x" + "f" * 40, "9" * 30, "9" * 5000, "1e999", "-.inf", ".nan", "0o17", "1:59:59", "1_0", "0b1", "+1", "-0"),
    *("true", "no", "~", "null", "2001-01-01", "2001-01-01T00:00:00Z", "=", "<<", "[" * 50, "{a: " * 50, "- " * 50),
)
ATOMS: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 64, 128, 2**31, 2**62, 2**63, -(2**63), 10**5000, 0.0, -0.0, 0.5, 128.0),
    *(
        1e308,
        float("inf"),
        float("-inf"),
        float("nan"),
        "",
        "x",
        "\ud800",
        "\0",
        "a\nb",
        "128",
        "é" * 300,
        "x" * 100_000,
    ),
    *([], [1], [[]], {}, {"": None}, {"a": 1}, {1: 2}, {None: 1}, {(1, 2): 3}, b"x", (), (1,), {1}, object(), range(3)),
    *("sm_90a", "sm_89", "attention", "bsr_spmm", "causal", "topk", "wgmma", "tma", "dense", "none", "ping_pong"),
)
KEYS: tuple[Any, ...] = (
    *(
        "op",
        "arch",
        "dtype",
        "mma",
        "copy",
        "schedule",
        "stages",
        "tile",
        "m",
        "n",
        "k",
        "pattern",
        "kind",
        "block",
        "q",
    ),
    *(
        "kv",
        "head_dim",
        "lse",
        "softcap",
        "sink",
        "pack_gqa",
        "stream_k_tail",
        "kv_splits",
        "warp_rows",
        "rows",
        "cols",
    ),
    *("share_kv_loads", "query_grouping", "l2_lockstep", "epilogue", "bias", "activation", "accumulate", "scheduler"),
    *(
        "transpose_a",
        "b_layout",
        "ctas_per_sm",
        "output",
        "left",
        "right",
        "stride",
        "local",
        "causal",
        "align",
        "mask",
    ),
    *("share_kv", "balanced", "cluster", "blocks_per_sm", "paced", "query_order", "copy_", "", "x.y", "\n", "\ud800"),
    *(1, None, True, 1.5, (1,), "batch", "heads", "q_len", "kv_len", "density", "evenness", "overlap", "prepared"),
)


class Hang(BaseException):
    """An execution that took too long; no handler of the package catches it."""


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


@cache
def texts() -> list[str]:
    """The shipped specs, as YAML."""
    return [path.read_text(encoding="utf-8") for path in shipped_files().values()]


@cache
def plain() -> list[str]:
    """The same as JSON: each use makes its own data."""
    return [find_spec(name).spec.canonical_json() for name in shipped_files()]


@cache
def problems() -> list[str]:
    """What the shipped specs say of their problems, as JSON."""
    specs = [named.spec for named in shipped_specs() if not isinstance(named.spec, UnchosenSpec)]
    return [json.dumps(said_by(spec)) for spec in specs]


@cache
def receipts() -> list[bytes]:
    """Some of the shipped receipts."""
    return [path.read_bytes() for name in list(shipped_files())[:10] if (path := receipt_path(name)).is_file()]


def by_bytes(draw: random.Random, data: bytes) -> bytes:
    """Flip, insert, remove, repeat and cut bytes."""
    out = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 4, 16))):
        at = draw.randrange(len(out) + 1)
        end = min(len(out), at + draw.choice((1, 1, 2, 8, 64)))
        how = draw.randrange(5)
        if how == 0 and at < len(out):
            out[at] ^= 1 << draw.randrange(8)
        elif how == 1:
            out[at:at] = draw.randbytes(draw.choice((1, 2, 4)))
        elif how == 2:
            del out[at:end]
        elif how == 3:
            out[at:at] = out[at:end] * draw.choice((1, 2, 30))
        else:
            out[at:at] = draw.choice(string.printable).encode()
    return bytes(out)


def by_tokens(draw: random.Random, text: str) -> str:
    """Put tokens of YAML that parsers stumble over beside words, or in their place."""
    words = text.replace("\n", " \n ").replace("{", " { ").split(" ")
    for _ in range(draw.choice((1, 1, 2, 3, 8))):
        at = draw.randrange(len(words))
        token = draw.choice((draw.choice(TOKENS), draw.choice(words), str(draw.choice(KEYS))))
        words[at : at + draw.randrange(2)] = [token]
    return " ".join(words)


def atom(draw: random.Random) -> Any:
    """Return a value that a field may have or not, the caller's own."""
    return copy.deepcopy(draw.choice(ATOMS))


def by_structure(draw: random.Random, data: Any) -> Any:
    """Change names and values of a mapping, its own and those within."""
    for _ in range(draw.choice((1, 1, 2, 3, 6))):
        inner = data
        while isinstance(inner, dict) and (parts := [v for v in inner.values() if isinstance(v, dict)]):
            if draw.randrange(3):
                break
            inner = draw.choice(parts)
        how, key = draw.randrange(6), draw.choice(list(inner) or ["x"])
        if how == 0:
            inner.pop(key, None)
        elif how == 1:
            inner[draw.choice(KEYS)] = inner.pop(key, None)
        elif how == 2:
            inner[draw.choice(KEYS)] = atom(draw)
        elif how == 3:
            inner[draw.choice(KEYS)] = draw.choice((data, inner, [inner], json.loads(draw.choice(plain()))))
        else:
            inner[key] = draw.choice((atom(draw), draw.randrange(-4, 300), draw.getrandbits(draw.randrange(1, 70))))
    return data


def load_text(text: str) -> None:
    """Read a spec, and rewrite it as ``codegen migrate`` does."""
    rewritten(text, "kernel.yaml")
    plan_of(read_spec(Path("kernel.yaml"), text).spec, "kernel")


def load_file(data: bytes) -> None:
    """Read a spec file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.yaml"
        path.write_bytes(data)
        plan_of(find_spec(path).spec, "kernel")


def load_receipt(data: bytes) -> None:
    """Read a receipt."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.json"
        path.write_bytes(data)
        Receipt.read(path)


def load_fields(data: Any) -> None:
    """Read the fields of a spec, as a caller gives them; one in some sixteen of those that are legal is rendered."""
    plan = plan_of(parse_spec(data), "kernel")
    if find_spec(data).spec.hash.endswith("0"):
        assert is_text_of_a_source(render_plan(plan))


def load_name(name: str) -> None:
    """Read a spec by any name, and a legal one from a file that is called so."""
    try:
        find_spec(name)
    except CodegenError as error:
        assert str(error).isprintable()
    named = read_spec(Path(name), texts()[0])
    assert is_text_of_a_source(render_plan(plan_of(named.spec, named.stem), named.origin))


def is_text_of_a_source(source: str) -> bool:
    """Return whether a source is printable ASCII, and each line of its banner a comment of one line."""
    banner = source.partition("\n\n")[0].split("\n")
    return (
        source.isascii()
        and source.replace("\n", "").isprintable()
        and all(line.startswith("//") and not line.endswith(("\\", "??/")) for line in banner)
    )


def load_problem(data: Any) -> None:
    """Read a problem, and choose a kernel for it."""
    problem = parse_problem(data)
    assert str(problem)
    choose(problem)


def load_problem_text(text: str) -> None:
    """Read a problem of a command line."""
    load_problem(problem_fields(text))


Execution = tuple[Callable[[Any], None], Any]


def problem_text(draw: random.Random) -> str:
    """Return FIELD=VALUE,... of names and values that there are and of such that there are not."""
    values = (*map(spelt, ATOMS[:30]), "causal", "1e999", "[" * 2000, "{}", "[1]", '"x"', "9" * 5000, "64", "bsr_spmm")
    parts = ["head_dim=64,pattern=causal", "op=bsr_spmm,block=64,m=4096,n=16,k=4096"][: draw.randrange(3)]
    for _ in range(draw.randrange(1, 6)):
        name = draw.choice((str(draw.choice(KEYS)), f"{draw.choice(KEYS)}.{draw.choice(KEYS)}"))
        parts.append(f"{name}{draw.choice(('=', '=', '=', '==', ''))}{draw.choice(values)[:6000]}")
    return ",".join(parts)


def problem_fields_of(draw: random.Random) -> dict[str, Any]:
    """Return the fields of a problem that is one, with some sizes."""
    sizes = {
        name: draw.choice((1, 128, 4096)) for name in draw.choice(((), ("batch", "heads", "q_len"), ("m", "n", "k")))
    }
    return {**json.loads(draw.choice(problems())), **sizes}


def name(draw: random.Random) -> str:
    """Return the name of a file, or what is none."""
    parts = (
        "kernel",
        ".yaml",
        ".y",
        "\n",
        "\\",
        "??/",
        "é",
        "\udcff",
        "\0",
        "/",
        "..",
        " ",
        "int x;",
        "x" * 300,
        "'",
        "~",
    )
    return "kernel." + "".join(draw.choice(parts) for _ in range(draw.randrange(8)))


def execution(seed: int, number: int) -> Execution:
    """Return what an execution does, and to what."""
    draw = random.Random(f"{seed}:{number}")
    kind = draw.randrange(20)
    if kind < 4:
        return load_file, by_bytes(draw, draw.choice(texts()).encode())
    if kind < 9:
        return load_text, by_tokens(draw, draw.choice(texts()))
    if kind < 12:
        fields = by_structure(draw, json.loads(draw.choice(plain())))
        return load_text, by_tokens(draw, yaml_of(fields)) if draw.randrange(2) else yaml_of(fields)
    if kind < 17:
        return load_fields, by_structure(draw, json.loads(draw.choice(plain())))
    if kind < 18:
        return load_problem, by_structure(draw, problem_fields_of(draw))
    if not draw.randrange(4):
        return load_name, name(draw)
    return (
        (load_problem_text, problem_text(draw))
        if kind < 19
        else (load_receipt, by_bytes(draw, draw.choice(receipts())))
    )


def yaml_of(value: Any, level: int = 0) -> str:
    """Return data as YAML in braces; what YAML has no word for, by its Python spelling."""
    if isinstance(value, dict) and level < DEEP:
        return "{" + ", ".join(f"{yaml_of(key, DEEP)}: {yaml_of(part, level + 1)}" for key, part in value.items()) + "}"
    if isinstance(value, list) and level < DEEP:
        return "[" + ", ".join(yaml_of(part, level + 1) for part in value) + "]"
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return type(value).__name__


def failure_of(number: int, run: Callable[[Any], None], given: Any) -> Failure | None:
    """Execute once; return what is wrong, or None."""
    try:
        with limited():
            run(given)
    except CodegenError as error:
        message = str(error)
        if message.isprintable() and len(message) <= LONGEST_MESSAGE:
            return None
        return Failure(number, f"a message of {len(message)} characters: {message[:300]!a}", "", spelt(given))
    except (Exception, Hang) as error:
        where = "".join(traceback.format_tb(error.__traceback__)[-3:])
        return Failure(number, f"{type(error).__name__}: {str(error)[:300]!a}", where, spelt(given))
    return None


def spelt(given: Any) -> str:
    """Return an input as a failure shows it."""
    try:
        return ascii(given)[:4000]
    except (ValueError, RecursionError) as error:
        return f"({error})"


def drawn(seed: int, start: int, count: int) -> Failure | None:
    """Let Hypothesis draw dicts of a spec; return the smallest that fails."""
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as seeded
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
    fields = st.builds(lambda text, change: {**json.loads(text), **change}, st.sampled_from(plain()), changes)
    found: list[Failure] = []

    @seeded(f"{seed}:{start}")
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(fields | anything, st.sampled_from([load_fields, load_problem]))
    def fails(data: Any, run: Callable[[Any], None]) -> None:
        if failure := failure_of(start, run, data):
            found.append(failure)
            raise AssertionError

    try:
        fails()
    except AssertionError:
        return found[-1]
    return None


def batch(seed: int, start: int, count: int = BATCH) -> list[Failure]:
    """Execute the numbers from ``start``; the last of a whole batch are drawn by Hypothesis."""
    warnings.simplefilter("ignore")
    random_ones = count - DRAWN if count == BATCH else count
    failures = [failure_of(i, *execution(seed, i)) for i in range(start, start + random_ones)]
    if count == BATCH:
        failures.append(drawn(seed, start + random_ones, DRAWN))
    return [failure for failure in failures if failure is not None]


def _batch(task: tuple[int, int]) -> tuple[int, list[Failure]]:
    return task[1], batch(*task)


def main() -> int:
    """Run as many executions as asked for; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--executions", type=int, default=10_000, help=f"rounded up to whole batches of {BATCH}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="number of the first one: where an earlier run ended")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    options = parser.parse_args()
    begun, told, done, seen = time.monotonic(), time.monotonic(), 0, set()
    first = options.start - options.start % BATCH
    tasks = ((options.seed, start) for start in range(first, options.start + options.executions, BATCH))
    with multiprocessing.Pool(options.jobs) as pool:
        for start, failures in pool.imap(_batch, tasks):
            done = start + BATCH - first
            for failure in failures:
                if (key := (failure.what[:60], failure.where)) not in seen:
                    seen.add(key)
                    again = f"--seed {options.seed} --start {start} --executions {BATCH}"
                    print(f"FAILED {failure.number}: {failure.what}\n{failure.where}    given: {failure.given}")
                    print(f"    repeat: python tests/stress/loader.py {again}", flush=True)
            elapsed = time.monotonic() - begun
            if time.monotonic() - told > 30 or elapsed > options.seconds:
                told = time.monotonic()
                go_on = f"--seed {options.seed} --start {first + done}"
                print(f"{done} executions in {elapsed:.0f} s, {len(seen)} kinds of failure; go on: {go_on}", flush=True)
            if elapsed > options.seconds:
                break
    print(f"{done} executions in {time.monotonic() - begun:.0f} s, {len(seen)} kinds of failure")
    return 1 if seen else 0


if __name__ == "__main__":
    sys.exit(main())
