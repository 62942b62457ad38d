"""Verification and timing of the kernels of one problem on the current GPU."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from codegen.arch import ARCHS
from codegen.dtypes import FP8
from codegen.library import NamedSpec
from codegen.select.problem import Problem
from runtime.compile import prebuilt
from runtime.errors import DeviceError
from runtime.kernel import load_kernel
from runtime.receipts.mode import verified_only
from runtime.tools.bench.noise import REPEATS
from runtime.tools.bench.timing import Call, back_to_back, captured, single_calls
from runtime.tools.tune.columns import Figures
from runtime.tools.tune.data import AttentionInputs, BsrInputs, inputs_of
from runtime.tools.tune.database import Device
from runtime.verify.common import ROUNDOFF
from runtime.verify.run import driver_version, plain_failure

SINGLES = 15
MOST_SECONDS = 0.3  # maximum time of single calls; long calls have fewer repeats
FEWEST = 3
BLOCK, LONG_BLOCK = 0.06, 0.25  # seconds of calls back to back
LONG_ROUNDS = 3
GRAPH_SECONDS = 1e-3  # duration of the calls in a graph
ALLOWED = 8  # allowed difference between correct kernels, in roundings of the largest element
ALLOWED_OF_FP8 = 2.0**-3  # allowed relative RMS difference: weights are rounded by up to 2^-4


def device(problems: Iterable[Problem]) -> Device:
    """The current GPU.

    Raises:
        DeviceError: if its architecture differs from a problem's, because timings through PTX are not comparable.
    """
    name, have = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    for problem in problems:
        if ARCHS[problem.arch].compute_capability != have:
            raise DeviceError(f"{name} cannot time kernels for {problem.arch}: {problem}")
    return Device(name, driver_version())


class GpuBench:
    """A :class:`runtime.tools.tune.tuner.Bench` with fixed random inputs.

    Args:
        problem: the problem.
        reference: a kernel whose results others must match, after it passes its plain case.
    """

    def __init__(self, problem: Problem, reference: NamedSpec) -> None:
        torch.manual_seed(0)
        self._dtype = problem.dtype
        self._inputs: AttentionInputs | BsrInputs = inputs_of(problem)
        self._reference = reference
        self._expected: torch.Tensor | None = None
        self._kernels: dict[str, Any] = {}
        self._calls: dict[str, Call] = {}

    def verify(self, named: NamedSpec) -> str:
        """Check the operator's plain case against its oracle, then the problem against the reference kernel."""
        with _told():
            return self._verify(named)

    def _verify(self, named: NamedSpec) -> str:
        if wrong := plain_failure(self._kernel(named)):
            return wrong
        if self._expected is None:
            if named.spec != self._reference.spec and (wrong := plain_failure(self._kernel(self._reference))):
                return f"the reference kernel {self._reference.stem} is wrong: {wrong}"
            self._expected = self._call(self._reference)().clone()
        found, expected = self._call(named)(), self._expected
        if self._dtype in FP8:
            limit = ALLOWED_OF_FP8 * float(expected.float().square().mean().sqrt())
            error = float((found.float() - expected).square().mean().sqrt())
        else:
            limit = ALLOWED * ROUNDOFF[self._dtype] * float(expected.abs().max())
            error = float((found - expected).abs().max())
        return "" if error <= limit else f"on the problem {error:.3g} off {self._reference.stem}, allowed {limit:.3g}"

    def time(self, named: NamedSpec) -> Figures:
        """Time a kernel: the median of single calls, and one block back to back."""
        with _told():
            return _figures({named.stem: self._call(named)}, BLOCK, 1)[0]

    def again(self, named: Sequence[NamedSpec]) -> list[Figures]:
        """Time kernels in turns, several longer blocks of each."""
        with _told():
            return _figures({each.spec.hash: self._call(each) for each in named}, LONG_BLOCK, LONG_ROUNDS)

    def rounds(self, named: Sequence[NamedSpec]) -> list[list[Figures]]:
        """Time kernels in turns, several rounds; a round has single calls and one longer block of each kernel."""
        with _told():
            calls = {each.spec.hash: self._call(each) for each in named}
            return [list(each) for each in zip(*(_figures(calls, LONG_BLOCK, 1) for _ in range(REPEATS)), strict=True)]

    def lost(self) -> str:
        """The reason why the GPU's context is unusable, such as an illegal address, or ""."""
        try:
            torch.ones(1, device="cuda").item()
        except RuntimeError as error:
            return str(error).splitlines()[0]
        return ""

    def dense(self) -> tuple[str, Figures | None]:
        """Time SDPA, or cuBLAS on dense matrices."""
        found: list[tuple[str, Figures]] = []
        for name, call in self._inputs.dense().items():
            try:
                found.append((name, _figures({name: call}, BLOCK, 1)[0]))
            except RuntimeError:  # from torch: an unsupported problem, or out of memory
                continue
        return min(found, key=lambda each: each[1].single_us, default=("", None))

    def _kernel(self, named: NamedSpec) -> Any:
        if named.spec.hash not in self._kernels:
            with prebuilt.ignored(), verified_only(False):  # a candidate has no receipt yet
                self._kernels[named.spec.hash] = load_kernel(named)
        return self._kernels[named.spec.hash]

    def _call(self, named: NamedSpec) -> Call:
        if named.spec.hash not in self._calls:
            self._calls[named.spec.hash] = self._inputs.call(self._kernel(named))
        return self._calls[named.spec.hash]


@contextmanager
def _told() -> Iterator[None]:
    """Convert torch's exceptions of a failed kernel or of exhausted memory to errors of this package."""
    try:
        yield
    except RuntimeError as error:
        raise DeviceError(str(error).splitlines()[0]) from None


def _figures(calls: dict[str, Call], seconds: float, rounds: int) -> list[Figures]:
    """Time calls in turns, in both modes. Back-to-back calls are replayed as CUDA graphs, to exclude host time."""
    with torch.no_grad():
        longest = max(_seconds(call) for call in calls.values())
        repeats = max(FEWEST, min(SINGLES, int(MOST_SECONDS / longest)))
        singles = single_calls(calls, repeats, warm_up=min(4, repeats))
        held = max(1, math.ceil(GRAPH_SECONDS / longest))
        blocks = back_to_back({name: captured([call] * held) for name, call in calls.items()}, seconds, rounds)
    return [Figures(1e3 * singles[name], 1e3 * blocks[name] / held) for name in calls]


def _seconds(call: Call) -> float:
    """Approximate seconds per call, without the first call, which may allocate."""
    call()
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - began
