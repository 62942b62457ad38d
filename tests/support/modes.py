"""The table of modes: every public function in every mode of torch has the right result, or is refused by name.

A cell is one call in one mode, the first of its kind: what the package keeps from call to call is dropped before. Its
result, and the gradients where a mode has some, are compared with the definition in float64. Then the process must be
as it was, and a plain call must be right, whatever the first one has left in caches.

    python tests/support/modes.py --json results.json          # on a GPU: every cell; a hang costs one cell
    python tests/support/modes.py --write-table results.json   # the section of docs/reference/guarantees.md

Names of rows or modes (``--only merge``) choose some. The suite runs those that need no GPU, with kernels by the
definition (``tests/runtime/ops/test_modes.py``).
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import queue
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from kept_calls import forget
from mode_rows import ROWS, Made, Row, full_name
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from codegen.errors import CodegenError

PROJECT = Path(__file__).resolve().parents[2]
PAGE = PROJECT / "docs" / "reference" / "guarantees.md"
BEGIN, END = "<!-- modes: written by tests/support/modes.py -->", "<!-- end of modes -->"
RIGHT, NOT_HERE, NOT_RUN = "right", "-", "?"
CELL_SECONDS = 20.0
PROCESSES = max(2, min(12, (os.cpu_count() or 2) * 3 // 4))
SLEEP = 300_000_000  # cycles, some 0.2 s, of each busy stream


class Wrong(Exception):
    """What is wrong with a result."""


class NotHere(Exception):
    """A mode that means nothing for a function, or that this machine does not have."""


# ---------------------------------------------------------------------------------------------------- what is right


def leaves(found: Any) -> list[Any]:
    return [leaf.values() if _is_sparse(leaf) else leaf for leaf in pytree.tree_leaves(found) if leaf is not None]


def _is_sparse(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.layout == torch.sparse_bsr


def is_float(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dtype.is_floating_point


def weights_of(found: list[Any]) -> list[Any]:
    """Return the gradients of results that backward passes begin with: numbers that any type holds."""
    return [((torch.arange(x.numel(), device=x.device) % 5 - 2) / 2).to(x.dtype).reshape(x.shape) for x in found]


def derived(row: Row, tensors: Iterable[Any], call: Callable[..., Any], *, of: tuple[int, ...] | None = None) -> Any:
    """Return the results of a call, and the gradients of the learned tensors."""
    places = row.learned if of is None else of
    given = [x.detach().clone().requires_grad_() if i in places else x for i, x in enumerate(tensors)]
    found = leaves(call(*given))
    if not places:
        return found, []
    floats = [x for x in found if is_float(x)]
    return found, list(torch.autograd.grad(floats, [given[i] for i in places], weights_of(floats)))


def exact(row: Row, made: Made) -> list[torch.Tensor]:
    return [x.double() if is_float(x) else x for x in made.tensors]


def expected(row: Row, made: Made) -> Any:
    """Return what is right: by the definition in float64, or as a plain call has it."""
    if row.right is None:
        return leaves(made.call(*made.tensors)), []
    return derived(row, exact(row, made), row.right)


@functools.cache
def right_of(row: Row, device: torch.device) -> Any:
    """Return what is right of the inputs of a row, which are the same each time."""
    return expected(row, row.make(device))


def together(found: Any) -> list[Any]:
    """Return results and gradients in one list."""
    return [*found[0], *found[1]]


def compare(row: Row, found: list[Any], right: list[Any], what: str = "result") -> None:
    if len(found) != len(right):
        raise Wrong(f"{len(found)} {what}s, expected {len(right)}")
    for place, (one, other) in enumerate(zip(found, right, strict=True)):
        if not isinstance(other, torch.Tensor):
            if one != other:
                raise Wrong(f"{what} {place} is {one!r}, expected {other!r}")
            continue
        if tuple(one.shape) != tuple(other.shape):
            raise Wrong(f"{what} {place} has shape {tuple(one.shape)}, expected {tuple(other.shape)}")
        off = error_of(one.detach().cpu(), other.detach().cpu())
        if not off <= (row.close if other.dtype.is_floating_point else 0):
            raise Wrong(f"{what} {place} is off by {off:.3g} of its norm")


def error_of(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the relative error, infinite where an infinity or NaN is in one alone."""
    one, other = one.double(), other.double()
    odd = ~other.isfinite()
    if not torch.equal(one.isfinite(), ~odd) or not torch.equal(one[odd], other[odd]):
        return float("inf")
    size = float(other[~odd].norm())
    return float((one - other)[~odd].norm()) / (size if size > 0 else 1.0)


def check(row: Row, made: Made, right: Any, found: Any) -> None:
    results, gradients = found
    compare(row, results, right[0])
    if gradients or not row.learned:
        compare(row, gradients, right[1] if gradients else [], "gradient")


# -------------------------------------------------------------------------------------------------------- the state


def state(row: Row | None = None) -> dict[str, Any]:
    """Return what of the process a call must leave as it was."""
    found = {
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")],
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
        ),
        "default type": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "threads": torch.get_num_threads(),
        "stance": repr(torch._dynamo.eval_frame._stance),
        "warnings": [
            (kind, str(text), category, str(module), line) for kind, text, category, module, line in warnings.filters
        ],
        "environment": dict(os.environ),
        "modes": (torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()),
        "transforms": torch._C._functorch.peek_interpreter_stack() is None,
        "dual level": forward_ad._current_level,
        "TF32": torch.get_float32_matmul_precision(),
    }
    if torch.cuda.is_available():
        found["stream"] = torch.cuda.current_stream().cuda_stream
        found["device"] = torch.cuda.current_device()
    return found


def restore() -> None:
    """Set back what a call may have left changed, so that other cells do not suffer for it."""
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    torch.compiler.set_stance("default")


# -------------------------------------------------------------------------------------------------------- the modes

Runner = Callable[[Row, Made, Any], None]
MODES: dict[str, Runner] = {}
NEED_GPU: set[str] = set()
MEANINGS: dict[str, str] = {}


def mode(name: str, meaning: str, *, gpu: bool = False) -> Callable[[Runner], Runner]:
    def add(function: Runner) -> Runner:
        MODES[name], MEANINGS[name] = function, meaning
        NEED_GPU.update([name] if gpu else [])
        return function

    return add


def wants_floats(row: Row) -> None:
    if not row.asked:
        raise NotHere("no input has a derivative")


def wants_tensors(row: Row, right: Any) -> None:
    if not all(isinstance(leaf, torch.Tensor) for leaf in right[0]):
        raise NotHere("the result is no tensor")


@mode("plain", "no mode")
def plain(row: Row, made: Made, right: Any) -> None:
    check(row, made, right, derived(row, made.tensors, made.call))


@mode("inference", "`torch.inference_mode()`")
def inference(row: Row, made: Made, right: Any) -> None:
    with torch.inference_mode():
        compare(row, leaves(made.call(*made.tensors)), right[0])


@mode("no_grad", "`torch.no_grad()`, of inputs that require gradients")
def no_grad(row: Row, made: Made, right: Any) -> None:
    given = [x.detach().clone().requires_grad_(i in row.asked) for i, x in enumerate(made.tensors)]
    with torch.no_grad():
        found = leaves(made.call(*given))
    compare(row, found, right[0])
    inputs = {id(x) for x in given}
    if any(is_float(x) and x.requires_grad and id(x) not in inputs for x in found):
        raise Wrong("a result requires a gradient")


def autocast(row: Row, made: Made, right: Any, dtype: torch.dtype) -> None:
    with torch.autocast("cuda", dtype):
        found = derived(row, made.tensors, made.call)
    check(row, made, right, found)


@mode("autocast fp16", '`torch.autocast("cuda", torch.float16)`', gpu=True)
def autocast_half(row: Row, made: Made, right: Any) -> None:
    autocast(row, made, right, torch.float16)


@mode("autocast bf16", "the same with bfloat16", gpu=True)
def autocast_bfloat(row: Row, made: Made, right: Any) -> None:
    autocast(row, made, right, torch.bfloat16)


@mode("deterministic", "`torch.use_deterministic_algorithms(True)`: twice the same bits")
def deterministic(row: Row, made: Made, right: Any) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        found, again = (derived(row, made.tensors, made.call) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    check(row, made, right, found)
    for one, other in zip(together(found), together(again), strict=True):
        if isinstance(one, torch.Tensor) and error_of(one.detach(), other.detach()) != 0:
            raise Wrong("two calls have different bits")


def alike(found: list[Any], right: list[Any], kinds: Callable[[torch.Tensor], bool], row: Row) -> None:
    """Check results without values: their shapes; those that have values are compared."""
    if len(found) != len(right):
        raise Wrong(f"{len(found)} results, expected {len(right)}")
    for one, other in zip(found, right, strict=True):
        if not isinstance(one, torch.Tensor) or not kinds(one):
            compare(row, [one], [other])
        elif tuple(one.shape) != tuple(other.shape):
            raise Wrong(f"shape {tuple(one.shape)}, expected {tuple(other.shape)}")


@mode("fake", "`FakeTensorMode`: shapes and types of results and gradients")
def fake(row: Row, made: Made, right: Any) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as about:
        results, gradients = derived(row, [about.from_tensor(x) for x in made.tensors], made.call)
        alike(results + gradients, together(right), lambda x: isinstance(x, FakeTensor), row)


@mode("meta", "tensors of the device meta; without tensors, meta as the default device")
def meta(row: Row, made: Made, right: Any) -> None:
    with nullcontext() if made.tensors else torch.device("meta"):
        found = leaves(made.call(*(x.to("meta") for x in made.tensors)))
    alike(found, right[0], lambda x: x.is_meta, row)


def tangent_of(x: torch.Tensor) -> torch.Tensor:
    return weights_of([x])[0]


@mode("dual", "dual numbers of `torch.autograd.forward_ad`")
def dual(row: Row, made: Made, right: Any) -> None:
    wants_floats(row)

    def tangents(tensors: Iterable[Any], call: Callable[..., Any]) -> tuple[list[Any], list[Any]]:
        with forward_ad.dual_level():
            given = [forward_ad.make_dual(x, tangent_of(x)) if i in row.asked else x for i, x in enumerate(tensors)]
            pairs = [forward_ad.unpack_dual(x) if is_float(x) else (x, None) for x in leaves(call(*given))]
            return [pair[0] for pair in pairs], [pair[1] for pair in pairs]

    found, slopes = tangents(made.tensors, made.call)
    compare(row, found, right[0])
    if row.constant:
        return
    if any(slope is None for slope, x in zip(slopes, found, strict=True) if is_float(x)):
        raise Wrong("the tangent is dropped")
    wanted = tangents(exact(row, made), row.right)[1]  # type: ignore[arg-type]
    compare(row, [x for x in slopes if x is not None], [x for x in wanted if x is not None], "tangent")


@mode("vmap", "`torch.vmap` over inputs with values that vary")
def vmap(row: Row, made: Made, right: Any) -> None:
    wants_tensors(row, right)
    if not made.tensors:
        raise NotHere("no tensors")
    mapped = row.asked or (0,)
    axes = tuple(0 if i in mapped else None for i in range(len(made.tensors)))
    given = [torch.stack((x, x)) if i in mapped else x for i, x in enumerate(made.tensors)]
    found = torch.vmap(lambda *one: tuple(leaves(made.call(*one))), axes)(*given)
    for place in range(2):
        compare(row, [x[place] for x in found], right[0])


@mode("func.grad", "`torch.func.grad`")
def functional(row: Row, made: Made, right: Any) -> None:
    wants_floats(row)
    if row.constant:
        raise NotHere("the result has no derivative")

    def weighted(*tensors: Any) -> torch.Tensor:
        found = [x for x in leaves(made.call(*tensors)) if is_float(x)]
        return sum(
            (x.float() * w.float()).nan_to_num(posinf=0, neginf=0).sum()
            for x, w in zip(found, weights_of(found), strict=True)
        )  # type: ignore[return-value]

    gradients = torch.func.grad(weighted, row.asked)(*made.tensors)
    wanted = derived(row, exact(row, made), row.right, of=row.asked)[1]  # type: ignore[arg-type]
    compare(row, list(gradients), wanted, "gradient")


@mode("compile", "`torch.compile(fullgraph=True)`, backend aot_eager")
def compiled(row: Row, made: Made, right: Any) -> None:
    torch._dynamo.reset()
    inner = torch.compile(made.inner, fullgraph=True, backend="aot_eager")
    check(row, made, right, derived(row, made.tensors, lambda *tensors: inner(*made.arguments(*tensors))))


class Called(torch.nn.Module):
    """A call as a module, as export takes it."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self._call = call

    def forward(self, *tensors: Any) -> Any:
        return leaves(self._call(*tensors))


@mode("export", "`torch.export.export`")
def exported(row: Row, made: Made, right: Any) -> None:
    wants_tensors(row, right)
    if not made.tensors:
        raise NotHere("no tensors")
    torch._dynamo.reset()
    given = made.arguments(*made.tensors)
    program = torch.export.export(Called(made.inner), given)
    compare(row, leaves(program.module()(*given)), right[0])


class Dispatched(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@mode("mode objects", "a `TorchDispatchMode` and a `TorchFunctionMode` that do nothing")
def watched(row: Row, made: Made, right: Any) -> None:
    with Dispatched(), Functions():
        found = derived(row, made.tensors, made.call)
    check(row, made, right, found)


@mode("threads", "two other threads at once")
def threads(row: Row, made: Made, right: Any) -> None:
    if row.one_thread:
        raise NotHere("torch allows one thread")
    begin, failed, found = threading.Barrier(2), [], []

    def one() -> None:
        try:
            begin.wait()
            found.append(derived(row, made.tensors, made.call))
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        except BaseException as error:  # it is raised in the thread that asked
            failed.append(error)

    both = [threading.Thread(target=one) for _ in range(2)]
    for each in both:
        each.start()
    for each in both:
        each.join()
    if failed:
        raise failed[0]
    for each in found:
        check(row, made, right, each)


@contextmanager
def on_stream(stream: Any) -> Iterator[None]:
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


@mode("side stream", "another stream, with a busy default stream", gpu=True)
def side_stream(row: Row, made: Made, right: Any) -> None:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    torch.cuda._sleep(SLEEP)
    with torch.cuda.stream(stream):
        found = derived(row, made.tensors, made.call)
        stream.synchronize()
        check(row, made, right, found)
    torch.cuda.synchronize()


@mode("busy pool", "the default stream, while streams of torch's pool are busy", gpu=True)
def busy_pool(row: Row, made: Made, right: Any) -> None:
    junk = []
    for _ in range(32):  # once around the pool: whichever stream comes next is busy, and has memory that is not 0
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            junk.append(torch.full((1 << 16,), 7, dtype=torch.int32, device="cuda"))
            torch.cuda._sleep(SLEEP)
            junk.pop()
    found = derived(row, made.tensors, made.call)
    torch.cuda.default_stream().synchronize()
    check(row, made, right, found)
    torch.cuda.synchronize()


def captured(row: Row, made: Made, right: Any, *, first: bool) -> None:
    """Capture a call, replay it with other values in its inputs, and compare with what is right of those."""
    stream = torch.cuda.Stream()
    given = [x.detach().clone().requires_grad_(i in row.learned) for i, x in enumerate(made.tensors)]

    def whole() -> Any:
        found = leaves(made.call(*given))
        if not row.learned:
            return found, []
        floats = [x for x in found if is_float(x)]
        return found, list(torch.autograd.grad(floats, [given[i] for i in row.learned], weights_of(floats)))

    if not first:
        with on_stream(stream):
            whole()
    graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, stream=stream):
            results, gradients = whole()
    finally:
        torch.cuda.set_stream(current)  # which torch leaves otherwise where a capture fails
    with torch.no_grad():
        for i, x in enumerate(given):
            if i in row.asked and row.right is not None:
                x.copy_(x.flip(0) if x.dim() == 1 else x.flip(-1))
    graph.replay()
    torch.cuda.synchronize()
    changed = Made(tuple(x.detach() for x in given), made.inner, made.outside)
    check(row, made, right if row.right is None else expected(row, changed), (results, gradients))


@mode("first capture", "a CUDA graph that captures the first call of all", gpu=True)
def first_capture(row: Row, made: Made, right: Any) -> None:
    captured(row, made, right, first=True)


@mode("capture", "a CUDA graph that captures a later one, replayed with other values", gpu=True)
def later_capture(row: Row, made: Made, right: Any) -> None:
    captured(row, made, right, first=False)


@mode("second device", "tensors of another device than torch's current one", gpu=True)
def second_device(row: Row, made: Made, right: Any) -> None:
    if torch.cuda.device_count() < 2:
        raise NotHere("one device")
    there = row.make(torch.device("cuda", 1))
    found = derived(row, there.tensors, there.call)
    if any(isinstance(x, torch.Tensor) and x.device == torch.device("cuda", 0) for x in together(found)):
        raise Wrong("a result is on the current device")
    check(row, made, right, found)


# -------------------------------------------------------------------------------------------------------- the cells

TORCHS_OWN = (
    *("NotImplementedError", "RuntimeError", "AcceleratorError", "ValueError"),
    *("DataDependentOutputException", "DynamicOutputShapeException", "UnsupportedOperatorException"),
    *("Unsupported", "UserError", "GuardOnDataDependentSymNode"),
)
"""Errors by which torch itself refuses, in modes of a row whose documentation names why (``Row.torch_refuses``)."""


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def one_line(text: object, most: int = 300) -> str:
    return " ".join(str(text).split())[:most]


def our_error(error: BaseException | None) -> CodegenError | None:
    """Return the error of ours that an error is, or that torch's tracer raised it from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, CodegenError):
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None


def outcome_of(row: Row, name: str, error: BaseException) -> str:
    """Return what a cell says of an error."""
    tracing = type(error).__module__.startswith(("torch._dynamo", "torch._subclasses", "torch.fx"))
    ours = our_error(error) if tracing else error
    if isinstance(ours, CodegenError):
        return f"refused: {type(ours).__name__}: {one_line(ours)}"
    if name in row.torch_refuses and type(error).__name__ in TORCHS_OWN:
        return f"refused: torch's {type(error).__name__}: {one_line(error, 110)}"
    if isinstance(error, NotHere):
        return NOT_HERE
    if isinstance(error, Wrong):
        return f"WRONG: {one_line(error)}"
    ours_last = [
        each for each in traceback.extract_tb(error.__traceback__) if str(PROJECT / "runtime") in each.filename
    ]
    where = f" from {Path(ours_last[-1].filename).name}:{ours_last[-1].lineno}" if ours_last else ""
    return f"WRONG: {type(error).__name__}{where}: {one_line(error)}"


def run_cell(row: Row, name: str, device: torch.device) -> str:
    """Return ``right``, ``refused: ...``, ``-``, or ``WRONG: ...``, which no cell may say."""
    right = right_of(row, device)
    made = row.make(device)
    forget()
    before = state()
    try:
        MODES[name](row, made, right)
        outcome = RIGHT
    except Exception as error:  # whatever it is, the cell says so
        outcome = outcome_of(row, name, error)
        error.__traceback__ = None
    after = state()
    changed = [what for what, value in before.items() if after[what] != value]
    restore()
    if changed and not outcome.startswith("WRONG"):
        outcome = f"WRONG: it leaves another {', '.join(changed)} ({outcome})"
    try:
        check(row, made, right, derived(row, made.tensors, made.call))
    except Exception as error:  # likewise
        if not outcome.startswith("WRONG"):
            told = outcome_of(row, "plain", error)
            outcome = f"WRONG: afterwards a plain call: {told} ({outcome})"
    return outcome


def cells(words: list[str], *, gpu: bool) -> list[tuple[Row, str]]:
    """Return the cells of a run, those whose row or mode has all the words."""
    return [
        (row, name)
        for row in ROWS
        for name in MODES
        if (gpu or not (row.gpu or name in NEED_GPU)) and all(word in f"{full_name(row)} / {name}" for word in words)
    ]


# ------------------------------------------------------------------------------------------------------- processes


def run_here(wanted: list[tuple[str, str]]) -> None:
    """Run cells in this process: a line of JSON when one begins and when it ends."""
    rows = {full_name(row): row for row in ROWS}
    device = torch.device("cuda", 0)
    torch.zeros(1, device=device)
    for name, which in wanted:
        say(json.dumps(["START", name, which]))
        began = time.monotonic()
        try:
            told = run_cell(rows[name], which, device)
        except BaseException as error:  # of whatever the inputs, or a plain call, may raise
            told = f"WRONG: before the mode: {type(error).__name__}: {one_line(error)}"
        say(json.dumps(["CELL", name, which, told, round(time.monotonic() - began, 2)]))
        lost = "CUDA error" in told or "ILLEGAL" in told.upper()
        if lost or (which in ("first capture", "capture") and told not in (RIGHT, NOT_HERE)):
            os._exit(3)  # the context is lost, or torch may still be in the capture: a new process goes on
        gc.collect()


def run_apart(wanted: list[tuple[str, str]], told: dict[str, dict[str, str]], until: float) -> None:
    """Run cells in a process; one that hangs or dies is told, and a new process goes on behind it."""
    while wanted and time.monotonic() < until:
        command = [sys.executable, "-W", "ignore", str(Path(__file__).resolve()), "--here"]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "32"},
        )
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(wanted))
        process.stdin.close()
        lines: queue.Queue[str | None] = queue.Queue()

        def read(stream: Any = process.stdout, into: Any = lines) -> None:
            for line in stream:
                into.put(line)
            into.put(None)

        threading.Thread(target=read, daemon=True).start()
        at: tuple[str, str] | None = None
        limit = 4 * CELL_SECONDS  # of the start
        while True:
            try:
                line = lines.get(timeout=limit) if time.monotonic() < until else None
            except queue.Empty:
                line = "hangs"
            if line is None or line == "hangs":
                break
            if not line.startswith('["'):  # what libraries print
                continue
            kind, name, which, *rest = json.loads(line)
            at = (name, which) if kind == "START" else None
            limit = CELL_SECONDS * (2 if which in ("compile", "export") else 1)
            if kind == "CELL":
                told.setdefault(name, {})[which] = rest[0]
                wanted = wanted[1:]
        process.kill()
        process.wait()
        if time.monotonic() >= until:
            return  # what is left was not run
        if at is None and line == "hangs" and wanted:
            at = wanted[0]
        if at is not None:
            how = f"hangs ({limit:.0f} s)" if line == "hangs" else f"its process dies with {process.returncode}"
            told.setdefault(at[0], {})[at[1]] = f"WRONG: {how}"
            wanted = wanted[1:]
        elif line is None and process.returncode not in (-9, 0, 3) and wanted:  # it did not start
            told.setdefault(wanted[0][0], {})[wanted[0][1]] = f"WRONG: its process ends with {process.returncode}"
            wanted = wanted[1:]


def run_all(words: list[str], seconds: float) -> dict[str, Any]:
    """Run all cells on a GPU, in processes side by side; what depends on a quiet GPU does not depend on speed."""
    told: dict[str, dict[str, str]] = {}
    chosen = [(full_name(row), name) for row, name in cells(words, gpu=True)]
    names = list(dict.fromkeys(name for name, _ in chosen))
    shares = [[cell for cell in chosen if names.index(cell[0]) % PROCESSES == i] for i in range(PROCESSES)]
    until = time.monotonic() + seconds
    workers = [threading.Thread(target=run_apart, args=(share, told, until)) for share in shares if share]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    ordered = {
        name: {which: told.get(name, {}).get(which, NOT_RUN) for n, which in chosen if n == name} for name in names
    }
    return {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cells": ordered}


# ----------------------------------------------------------------------------------------------------------- table


INTRODUCTION = """## Modes

Each cell is a public function in one mode of torch, as the first call of its kind. After each cell, the process is
unchanged and a plain call is right.

- *right*: the result, with gradients if the mode has them, matches the definition in float64.
- *refused*: an error before any launch that states the reason. The number refers to the list below the table.
- "-": the mode does not apply to the function, such as dual numbers for a function without derivatives.
- "?": not run.

Functions that return text, numbers or Python objects, and expressions as text, are called outside of code that
torch.compile or torch.export traces.

`tests/support/modes.py` writes this table; {device}, torch {torch}. The modes are

{meanings}"""


def short(outcome: str) -> str:
    """Return a cell of the page: an outcome without its words."""
    return outcome if outcome in (RIGHT, NOT_HERE, NOT_RUN) else "refused" if outcome.startswith("refused") else "WRONG"


def table(results: dict[str, Any]) -> str:
    """Return the section of the page: rows with the same cells together, and a footnote for each refusal."""
    names = [name for name in MODES if name != "plain"]
    notes: list[str] = []
    groups: dict[tuple[str, ...], list[str]] = {}
    for row in ROWS:
        name = full_name(row)
        shown = []
        for which in names:
            outcome = results["cells"].get(name, {}).get(which, NOT_RUN)
            cell = short(outcome)
            if cell == "refused":
                note = one_line(outcome.partition(": ")[2].replace("|", "/"), 160)
                notes.append(note) if note not in notes else None
                cell = f"refused[^{notes.index(note) + 1}]".replace("[^", " (").replace("]", ")")
            shown.append(cell)
        groups.setdefault(tuple(shown), []).append(name)
    lines = ["| " + " | ".join(("function", *names)) + " |", "| " + " | ".join("---" for _ in (*names, "")) + " |"]
    lines += [
        "| " + " | ".join((", ".join(f"`{name}`" for name in each), *shown)) + " |" for shown, each in groups.items()
    ]
    meanings = "\n".join(f"- *{name}*: {MEANINGS[name]}" for name in names)
    told = [f"{i}. {note}" for i, note in enumerate(notes, 1)]
    intro = INTRODUCTION.format(meanings=meanings, **results)
    return "\n".join((*intro.splitlines(), "", *lines, "", *told))


def cells_of_page(text: str) -> dict[str, dict[str, str]]:
    """Return the cells of the page's table, by row and mode."""
    inside = text.partition(BEGIN)[2].partition(END)[0]
    rows = [[part.strip() for part in line.strip("|").split(" | ")] for line in inside.splitlines() if line[:1] == "|"]
    head, body = rows[0], rows[2:]
    return {
        name.strip("` "): {which: cell.partition(" ")[0] for which, cell in zip(head[1:], row[1:], strict=True)}
        for row in body
        for name in row[0].split("`, `")
    }


def write_table(path: Path) -> None:
    results = json.loads(path.read_text(encoding="utf-8"))
    text = PAGE.read_text(encoding="utf-8")
    before, found, rest = text.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not (found and ended):
        sys.exit(f"{PAGE} has no markers")
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(results)}\n\n{END}{after}", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="run all cells on a GPU, and write what they say")
    parser.add_argument("--only", nargs="*", default=[], help="words of a row and a mode")
    parser.add_argument("--seconds", type=float, default=300.0, help="when to start no more processes")
    parser.add_argument("--write-table", type=Path, metavar="RESULTS", help="write the section of the page")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.here:
        run_here([(name, which) for name, which in json.load(sys.stdin)])
        return 0
    if given.write_table:
        write_table(given.write_table)
        return 0
    results = run_all(given.only, given.seconds)
    if given.json:
        given.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    wrong = 0
    for name, row in results["cells"].items():
        for which, outcome in row.items():
            if outcome.startswith("WRONG") or outcome == NOT_RUN:
                wrong += 1
                say(f"{name} / {which}: {outcome}")
    say(f"{sum(map(len, results['cells'].values()))} cells, {wrong} wrong or not run")
    return min(wrong, 100)


if __name__ == "__main__":
    sys.exit(main())
