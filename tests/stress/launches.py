"""Many launches over rotating shapes, streams and threads, and many replays of graphs, with memory that stays flat.

    python tests/stress/launches.py                                        # 20,000 and 2,000: some seconds
    python tests/stress/launches.py --launches 1000000 --threads 4         # one to two minutes on an H100
    python tests/stress/launches.py --launches 0 --replays 100000          # some seconds

Launches: each shape of each kernel on each of torch's streams; then threads take a kernel and one of its shapes, which
are more than it remembers, and call it BURST times in a row on a stream of torch's, which they change now and then. The
last result of each burst must have the bits of the first one of the same inputs. After each of ROUNDS rounds the
threads have ended, and what torch has allocated, what the GPU has left and what the process holds are looked at: after
the first WARM rounds they must not grow by more than LIMITS.

Replays: graphs of kernels with counters, scratch memory and orders of their own are replayed on a stream each, with
inputs that change between two sets; now and then a result that was overwritten before must have the bits of a call.

Prints a line for each round; exit code 1 if a result differs or memory grows. What hangs ends after --patience seconds
with the stacks of all threads.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import os
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "support")]

from stress.shapes import ADA, HOPPER, SHAPES, Shape, shapes_of  # noqa: E402 - not installed

from runtime import load_kernel  # noqa: E402

BURST = 32  # calls of one shape
BURSTS_OF_A_STREAM = 8
ROUNDS, WARM = 20, 3
MIB = 1 << 20
PAGE = os.sysconf("SC_PAGE_SIZE")
Stream = Callable[[], Any]
On = Callable[[Any], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Sample:
    """Bytes in use, when no thread runs and the GPU has nothing to do.

    Attributes:
        allocated: by torch, in tensors.
        taken: of the GPU's memory, by all.
        resident: of the process, on the host.
    """

    allocated: int
    taken: int
    resident: int

    def words(self) -> str:
        """Return it for a line."""
        tensors, gpu, host = (size / MIB for size in (self.allocated, self.taken, self.resident))
        return f"tensors {tensors:.2f} MiB, GPU {gpu:.0f} MiB, host {host:.0f} MiB"


LIMITS = Sample(allocated=1 * MIB, taken=64 * MIB, resident=64 * MIB)


def growth(samples: Sequence[Sample]) -> str:
    """Return what has grown since the first sample by more than LIMITS, or ""."""
    grown = {
        name: getattr(samples[-1], name) - getattr(samples[0], name) for name in ("allocated", "taken", "resident")
    }
    return ", ".join(
        f"{name} grew by {bytes_} bytes" for name, bytes_ in grown.items() if bytes_ > getattr(LIMITS, name)
    )


def sample() -> Sample:
    """Look at memory."""
    gc.collect()
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
    return Sample(torch.cuda.memory_allocated(), total - free, resident)


class Different(Exception):
    """A result that has other bits than the first one of the same inputs."""


def compare(shape: Shape, out: torch.Tensor) -> None:
    """Compare a result on the current stream.

    Raises:
        Different: if it has other bits.
    """
    if not torch.equal(out, shape.expected):
        raise Different(shape.name)


def burst(shape: Shape) -> None:
    """Call a kernel BURST times on the current stream, and compare the last result."""
    for _ in range(BURST):
        out = shape.call()
    compare(shape, out)


def launch(
    kernels: Sequence[Sequence[Shape]],
    launches: int,
    seed: int,
    new_stream: Stream = torch.cuda.Stream,
    on: On = torch.cuda.stream,
) -> None:
    """Launch as often as that, in whole bursts: what a thread does in a round."""
    draw = random.Random(seed)
    stream: Any = None
    for number in range(-(-launches // BURST)):
        if number % BURSTS_OF_A_STREAM == 0:
            stream = new_stream()
        with on(stream):
            burst(draw.choice(draw.choice(kernels)))


def pool(new_stream: Stream = torch.cuda.Stream) -> list[Any]:
    """Return all streams that torch hands out: it has 32, which take turns."""
    return list({stream.cuda_stream: stream for stream in (new_stream() for _ in range(64))}.values())


def warm_up(kernels: Sequence[Sequence[Shape]], streams: Sequence[Any], on: On = torch.cuda.stream) -> int:
    """Call each shape on each stream, so that each has the memory that it needs; return how many calls that were.

    Raises:
        Different: for a result that has other bits than on the first stream.
    """
    count = 0
    for shape in (shape for shapes in kernels for shape in shapes):
        for stream in streams:
            with on(stream):
                compare(shape, shape.call())
            count += 1
    return count


def in_threads(work: Callable[[int], None], threads: int) -> list[str]:
    """Do a work in new threads, each with its number; return what went wrong."""
    wrong: list[str] = []

    def run(number: int) -> None:
        try:
            work(number)
        except Different as error:
            wrong.append(f"another result: {error}")
        except BaseException:
            wrong.append(traceback.format_exc())

    started = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    return wrong


def launches(kernels: Sequence[Sequence[Shape]], options: argparse.Namespace) -> list[str]:
    """Launch from threads in rounds; return what went wrong."""
    each = -(-options.launches // (ROUNDS * options.threads))
    begun = time.monotonic()
    try:
        done = warm_up(kernels, pool())
    except Different as error:
        return [f"another result: {error}"]
    print(f"{done} launches in {time.monotonic() - begun:.1f} s, every shape on every stream", flush=True)
    samples: list[Sample] = []
    for number in range(ROUNDS):

        def work(thread: int, number: int = number) -> None:
            seed = 1000 * options.seed + ROUNDS * thread + number
            launch(kernels, each, seed)

        wrong = in_threads(work, options.threads)
        done += -(-each // BURST) * BURST * options.threads
        found = sample()
        print(f"{done} launches in {time.monotonic() - begun:.1f} s; {found.words()}", flush=True)
        if number >= WARM:
            samples.append(found)
        if wrong:
            return wrong
    grown = growth(samples)
    return [grown] if grown else []


@dataclass(frozen=True)
class Graph:
    """A captured call.

    Attributes:
        name: of the kernel and the shape.
        replay: of the graph.
        out: what it writes.
        set_inputs: each copies a set of inputs to where the graph reads them.
        expected: the result of each set.
        stream: the one on which it is replayed.
    """

    name: str
    replay: Callable[[], None]
    out: torch.Tensor
    set_inputs: tuple[Callable[[], None], ...]
    expected: tuple[torch.Tensor, ...]
    stream: Any


def _copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for to, source in pairs:
        to.copy_(source)


def captured(shape: Shape) -> Graph:
    """Capture a call, with two sets of inputs: those that it has, and others."""
    first = [tensor.clone() for tensor in shape.inputs]
    second = [tensor.roll(1, 0) if tensor.shape[0] > 1 else tensor.flip(-1) for tensor in first]
    sets = tuple(partial(_copy, list(zip(shape.inputs, values, strict=True))) for values in (first, second))
    expected = []
    for put in reversed(sets):
        put()
        expected.insert(0, shape.call().clone())
    assert not torch.equal(*expected)
    out, graph, stream = torch.empty_like(shape.expected), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        shape.call(out=out)
    torch.cuda.synchronize()
    return Graph(shape.name, graph.replay, out, sets, tuple(expected), stream)


def replay(
    graphs: Sequence[Graph],
    replays: int,
    seed: int,
    on: On = torch.cuda.stream,
) -> list[str]:
    """Replay graphs in turns; after every BURST replays of one compare its result. Return what went wrong."""
    draw = random.Random(seed)
    for _ in range(-(-replays // (BURST * len(graphs)))):
        which = [draw.randrange(2) for _ in graphs]
        for graph, number in zip(graphs, which, strict=True):
            with on(graph.stream):
                graph.set_inputs[number]()
                graph.out.fill_(float("nan"))
        for _ in range(BURST):
            for graph in graphs:  # side by side, each on its stream
                with on(graph.stream):
                    graph.replay()
        for graph, number in zip(graphs, which, strict=True):
            with on(graph.stream):
                if not torch.equal(graph.out, graph.expected[number]):
                    return [f"another result of a graph: {graph.name}, inputs {number}"]
    return []


def replays(kernels: Sequence[Sequence[Shape]], options: argparse.Namespace) -> list[str]:
    """Capture a shape of each kernel, and replay the graphs in rounds; return what went wrong."""
    graphs = [captured(shapes[SHAPES // 2]) for shapes in kernels]
    done, begun = 0, time.monotonic()
    samples: list[Sample] = []
    each = -(-options.replays // ROUNDS)
    for number in range(ROUNDS):
        wrong = replay(graphs, each, options.seed + number)
        done += -(-each // (BURST * len(graphs))) * BURST * len(graphs)
        samples.append(sample())
        print(f"{done} replays in {time.monotonic() - begun:.1f} s; {samples[-1].words()}", flush=True)
        if wrong:
            return wrong
    grown = growth(samples[WARM:])
    return [grown] if grown else []


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", type=int, default=20_000, help="of all threads (20000), rounded up")
    parser.add_argument("--replays", type=int, default=2_000, help="of all graphs (2000), rounded up")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--patience", type=float, default=560.0, help="seconds after which it hangs (560)")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("error: launches need a GPU, and torch sees none; nothing was run")
    faulthandler.dump_traceback_later(options.patience, exit=True)
    device = torch.device("cuda", torch.cuda.current_device())
    names = HOPPER if torch.cuda.get_device_capability() == (9, 0) else ADA
    kernels = [shapes_of(load_kernel(name, forward_compatible=True), device) for name in names]
    torch.cuda.synchronize()
    print(f"{len(kernels)} kernels of {SHAPES} shapes on {torch.cuda.get_device_name()}", flush=True)
    wrong = launches(kernels, options) if options.launches else []
    wrong += replays(kernels, options) if options.replays and not wrong else []
    print("\n".join(f"FAILED {line}" for line in wrong) or "ok: the same bits, and memory is flat")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
