"""Repeated timing of a kernel and its peers, after checking their results."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from codegen.errors import CodegenError
from codegen.library import NamedSpec
from codegen.plain import json_value
from codegen.receipts import source_sha256
from codegen.wording import alternatives, one_line, shown
from runtime.compile import prebuilt, toolchain
from runtime.errors import DeviceError
from runtime.kernel import Kernel, load_kernel
from runtime.tools.baselines.peers import peers_of
from runtime.tools.baselines.stored import Machine, Row, Timings
from runtime.tools.bench.measurement import Workload, workload_of
from runtime.tools.bench.timing import Call, back_to_back, single_calls
from runtime.verify.run import driver_version, plain_failure

SAME = 2e-2
"""Allowed difference between peers of the same result, relative to the largest element."""
OWN = "ours"


@dataclass(frozen=True)
class Measured:
    """A row, and the reasons why peers are not timed."""

    row: Row
    missing: dict[str, str]


def machine() -> Machine:
    """The machine that timings depend on: device, driver, versions of torch and the compiler."""
    return Machine(
        device=torch.cuda.get_device_name(),
        driver=driver_version(),
        torch=torch.__version__,
        compiler=toolchain.compiler_version()[1],
    )


def sizes_of(named: NamedSpec, text: str) -> dict[str, int]:
    """Parse the sizes of a workload: NAME=NUMBER,..., names of the operator's reference workload.

    Raises:
        CodegenError: for an unknown name, or a value that is not a positive integer.
    """
    parameters = inspect.signature(workload_of(named.spec)).parameters
    known = [name for name in parameters if name != "kernel"]
    found: dict[str, int] = {}
    for part in filter(None, text.replace(" ", "").split(",")):
        name, _, value = part.partition("=")
        if name not in known:
            op, what = named.spec.op, alternatives(name, known) if known else "it has none"
            raise CodegenError(f"--workload {one_line(name)}: the workload of {op} has no such size; {what}")
        number = json_value(value) if value.isdecimal() and len(value) < 10 else value
        if not isinstance(number, int) or number < 1:
            raise CodegenError(f"--workload {name}: is {shown(number)}; a positive integer is expected")
        if name in found:
            raise CodegenError(f"--workload {name}: is given twice")
        found[name] = number
    return found


def measure(named: NamedSpec, sizes: Mapping[str, int], names: Collection[str], repeats: int) -> Measured:
    """Time a kernel beside its peers.

    Args:
        named: the kernel.
        sizes: sizes of the workload that differ from the reference's.
        names: requested peers; empty for all.
        repeats: number of repeats of each timing.

    Raises:
        CodegenError: if the kernel cannot be run, or its plain case is wrong.
    """
    with prebuilt.ignored():
        kernel = load_kernel(named, forward_compatible=True)
    torch._dynamo.reset()  # FlexAttention is compiled again for each kernel
    with torch.no_grad():
        if wrong := plain_failure(kernel):
            raise DeviceError(f"{named.stem} is wrong, so it is not timed: {wrong}")
        try:
            load = workload_of(named.spec)(kernel, **sizes)
            calls, missing = _right_calls(load, kernel, names)
            timings = _timings({OWN: load.call, **calls}, repeats)
        except RuntimeError as error:  # from torch, such as out of memory
            raise DeviceError(f"{named.stem} cannot be timed: {one_line(str(error).splitlines()[0])}") from None
    row = Row(
        kernel=named.stem,
        spec_hash=named.spec.hash,
        source_sha256=source_sha256(kernel.compiled.source),
        workload=load.shape,
        flops=float(load.flops),
        own=timings.pop(OWN),
        peers=timings,
        peer_flops={name: float(flops) for name, flops in load.peer_flops.items() if name in timings},
    )
    return Measured(row, missing)


def _right_calls(load: Workload, kernel: Kernel, names: Collection[str]) -> tuple[dict[str, Call], dict[str, str]]:
    """The calls of peers that run and agree with the kernel, and the reasons why others are not timed."""
    calls, missing = peers_of(load, kernel.spec, names)
    own = result_of(load.call())
    expected = None if own is None else own.float().clone()
    right: dict[str, Call] = {}
    for label, call in calls.items():
        try:
            found = result_of(call())
            torch.cuda.synchronize()
        except Exception as error:  # a foreign library may raise anything
            missing[label] = one_line(f"{type(error).__name__}: {error}")
            continue
        same = label not in load.peer_flops and expected is not None and found is not None
        if same and found.shape == expected.shape:  # type: ignore[union-attr]
            error_of = float((found.float() - expected).abs().max() / expected.abs().max())  # type: ignore
            if not error_of <= SAME:
                missing[label] = f"differs by {error_of:.2g} of the largest element, allowed {SAME:.2g}"
                continue
        right[label] = call
    return right, missing


def result_of(result: Any) -> torch.Tensor | None:
    """The result of a call as a dense tensor, or its stored blocks; None for results of another kind."""
    found = getattr(result, "out", result)
    if not isinstance(found, torch.Tensor):
        return None
    return found.values() if found.layout is torch.sparse_bsr else found


def _timings(calls: dict[str, Call], repeats: int) -> dict[str, Timings]:
    """Time calls in turns, in both modes, several times."""
    singles: dict[str, list[float]] = {name: [] for name in calls}
    blocks: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, found in single_calls(calls).items():
            singles[name].append(found)
        for name, found in back_to_back(calls, rounds=1).items():
            blocks[name].append(found)
    return {name: Timings(single=tuple(singles[name]), back_to_back=tuple(blocks[name])) for name in calls}
