"""Times attention over ranks beside one GPU on its part of the work, and beside others, in one run.

    torchrun --nproc-per-node 2 benchmarks/distributed.py --json benchmarks/results/distributed_2xh100.json
    torchrun --nproc-per-node 2 benchmarks/distributed.py --rows "topk32 random" "dense" --dtypes bf16

Rows are of 16 heads of 128 elements. "ours" sends by NCCL, with lists only listed blocks if these are few; "ours,
symmetric" reads the same from the memory of peers, "ours, shared keys" without a copy of the rank's own. "alone" is
what one rank computes, with all keys in its memory and nothing sent: both GPUs do it at once. "all-gather" gathers all
keys and values first, and then does the same. "torch CP" is torch.distributed.tensor.experimental.context_parallel with
SDPA, "FA4 all-gather" FlashAttention 4 behind the same all-gather. A call's time is that of the slowest rank. TFLOPS
are of a GPU.

Bytes are what the rank that receives most does in a forward pass: those that are sent, and those that lists need.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import can_plot, environment, free_memory, reason, save
from scale_out_model import Machine, predict, runs_of

from codegen.json_rows import json_rows
from runtime import block_sparse_attention
from runtime.distributed import (
    Layout,
    context_parallel_attention,
    head_parallel_attention,
    keys_received,
    local_lists,
    plan_sends,
    shared_keys,
)
from runtime.distributed.plan import Plan
from runtime.patterns import Causal, Dense, Pattern, SlidingWindow, TopK, scored_of
from runtime.tools.bench.timing import BLOCK_SECONDS, SETTLING_SHARE, calls_of_block, median

Call = Callable[[], Any]
HEADS, DIM, BLOCK, ENTRIES, WINDOW = 16, 128, 128, 32, 2048
NEAR = 64  # blocks of each other rank that lists with locality may name
REPEATS, WARM_UP, ROUNDS = 11, 4, 3
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
PACKAGES = ("torch", "flash-attn-4", "nvidia-cutlass-dsl")


@dataclass(frozen=True)
class Row:
    """One workload.

    Attributes:
        name: of the row.
        kind: dense, causal, window or topk.
        length: of the whole sequence.
        target: share of the speed alone that is aimed at.
        local: share of a list in the rank's own blocks; None: lists are random.
        backward: whether the gradients are timed.
        heads: whether ranks have heads of their own.
    """

    name: str
    kind: str
    length: int
    target: float
    local: float | None = None
    backward: bool = False
    heads: bool = False


S = 65536
ROWS = (
    Row("topk32 random", "topk", S, 0.85),
    Row("topk32 half local", "topk", S, 0.93, 0.5),
    Row("topk32 95% local", "topk", S, 0.97, 0.95),
    Row("window 2K", "window", 1 << 20, 0.97),
    Row("causal", "causal", S, 0.97),
    Row("dense", "dense", S, 0.97),
    Row("causal backward", "causal", S, 0.95, backward=True),
    Row("dense backward", "dense", S, 0.95, backward=True),
    Row("topk32 random backward", "topk", S, 0.85, backward=True),
    Row("dense by heads", "dense", S, 0.95, heads=True),
    Row("topk32 by heads", "topk", S, 0.75, heads=True),
)


class Problem:
    """A row on this rank: tensors, pattern, and who has what."""

    def __init__(self, row: Row, dtype: torch.dtype, group: Any) -> None:
        self.row, self.group = row, group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.layout = Layout.zigzag(self.ranks) if row.kind == "causal" else Layout.contiguous(self.ranks)
        made = torch.Generator("cuda").manual_seed(0)
        self.whole = [
            torch.randn(1, HEADS, row.length, DIM, generator=made, device="cuda", dtype=dtype) for _ in range(3)
        ]
        if row.heads:
            self.layout = Layout.contiguous(self.ranks)
        self.parts = [self.layout.shard(x, self.rank) for x in self.whole]
        self.pattern = self._pattern(made)
        self.send = None
        if row.kind == "topk" and not row.heads:
            self.send = plan_sends(*self.parts[:2], self.pattern, group, layout=self.layout)
        self.grads = row.backward

    def _pattern(self, made: torch.Generator) -> Pattern:
        kind = self.row.kind
        if kind != "topk":
            return {"dense": Dense(), "causal": Causal(), "window": SlidingWindow(WINDOW - 1)}[kind]
        blocks = self.row.length // BLOCK
        rank_of = torch.arange(blocks, device=made.device) * self.ranks // blocks
        order = torch.rand(HEADS, blocks, blocks, generator=made, device=made.device)
        if self.row.local is not None:
            own = rank_of[:, None] == rank_of[None, :]
            border = torch.arange(blocks, device=made.device) % (blocks // self.ranks) < NEAR
            others = ENTRIES * (1 - self.row.local)
            few = torch.rand(HEADS, blocks, 1, generator=made, device=made.device) < others % 1
            rank_in = torch.where(own, order, torch.inf).argsort(-1).argsort(-1)
            far = torch.where(own | (~border & (self.row.local > 0.9)), torch.inf, order).argsort(-1).argsort(-1)
            count = int(others) + few.int()
            order = torch.where(own, (rank_in >= ENTRIES - count).float(), (far >= count).float())
        lists = order.argsort(dim=-1, stable=True)[..., :ENTRIES].sort(-1).values.to(torch.int32)[None]
        if self.row.heads:
            each = HEADS // self.ranks
            return TopK(lists[:, self.rank * each : (self.rank + 1) * each].contiguous(), block=(BLOCK, BLOCK))
        return local_lists(TopK(lists.contiguous(), block=(BLOCK, BLOCK)), self.layout, self.rank)

    def flops(self) -> float:
        """The work of a rank; gradients have five products for two."""
        length = self.row.length
        keys = {
            "dense": float(length),
            "causal": (length + 1) / 2,
            "window": WINDOW - WINDOW * (WINDOW - 1) / 2 / length,
            "topk": float(ENTRIES * BLOCK),
        }
        return 4 * HEADS * DIM * length / self.ranks * keys[self.row.kind] * (2.5 if self.row.backward else 1)

    def alone(self, k: torch.Tensor, v: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """This rank's computation over all keys and values, without other ranks."""
        if self.row.kind == "causal":
            found, first = [], 0
            for span in self.layout.spans(self.rank, self.row.length):
                rows = q[:, :, first : first + span.size]
                found.append(block_sparse_attention(rows, k[:, :, : span.stop], v[:, :, : span.stop], Causal()))
                first += span.size
            return torch.cat(found, 2) if len(found) > 1 else found[0]
        if self.row.kind == "window":
            (span,) = self.layout.spans(self.rank, self.row.length)
            first = max(0, span.start - WINDOW + 1) // 8 * 8
            return block_sparse_attention(q, k[:, :, first : span.stop], v[:, :, first : span.stop], self.pattern)
        return block_sparse_attention(q, k, v, self.pattern)

    def gathered(self, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        """All keys and values."""
        every = []
        for part in (k, v):
            parts = [torch.empty_like(part) for _ in range(self.ranks)]
            dist.all_gather(parts, part.contiguous(), group=self.group)
            every.append(self.layout.join(parts))
        return every


def with_gradients(problem: Problem, tensors: list[torch.Tensor], forward: Callable[..., Any]) -> Call:
    """The call that is timed: the forward pass, or the gradients of one that was made before."""
    if not problem.grads:
        return lambda: forward(*tensors)
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    out = forward(*leaves)
    dout = torch.randn(out.shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda", dtype=out.dtype)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


@contextmanager
def ours(problem: Problem, **options: Any) -> Iterator[Call]:
    options["layout"] = problem.layout
    function: Any = head_parallel_attention
    if not problem.row.heads:
        function = context_parallel_attention
        options.setdefault("send", problem.send)
    yield with_gradients(
        problem, problem.parts, lambda q, k, v: function(q, k, v, problem.pattern, problem.group, **options)
    )


@contextmanager
def symmetric(problem: Problem) -> Iterator[Call]:
    with ours(problem, symmetric=True) as call:
        yield call


@contextmanager
def shared(problem: Problem) -> Iterator[Call]:
    if problem.row.heads or problem.grads or problem.layout != Layout.contiguous(problem.ranks):
        raise NotImplementedError("forward of contiguous parts alone")
    if problem.row.kind == "window":
        raise NotImplementedError("whole sequences alone")
    q, k, v = problem.parts
    there = shared_keys(k, problem.group)
    for target, source in zip(there, (k, v), strict=True):
        target.copy_(source)
    options: dict[str, Any] = {"layout": problem.layout, "symmetric": True}
    yield lambda: context_parallel_attention(q, *there, problem.pattern, problem.group, **options)


@contextmanager
def alone(problem: Problem) -> Iterator[Call]:
    q, (_, k, v) = problem.parts[0], problem.whole
    if problem.row.heads:
        each = HEADS // problem.ranks
        mine = slice(problem.rank * each, (problem.rank + 1) * each)
        q, k, v = (x[:, mine].contiguous() for x in problem.whole)
    yield with_gradients(problem, [q, k, v], lambda q, k, v: problem.alone(k, v, q))


@contextmanager
def all_gather(problem: Problem) -> Iterator[Call]:
    if problem.row.heads or problem.grads:
        raise NotImplementedError("forward by sequence alone")
    q, k, v = problem.parts
    yield lambda: problem.alone(*problem.gathered(k, v), q)


@contextmanager
def fa4_all_gather(problem: Problem) -> Iterator[Call]:
    from flash_attn.cute import flash_attn_func

    if problem.row.heads or problem.grads or problem.row.kind not in ("dense", "topk"):
        raise NotImplementedError("dense and lists, forward by sequence alone")
    options: dict[str, Any] = {}
    if isinstance(problem.pattern, TopK):
        from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

        full = problem.pattern.kv_indices
        partial = torch.zeros(full.shape[:3], dtype=torch.int32, device="cuda")
        options["block_sparse_tensors"] = BlockSparseTensorsTorch(
            mask_block_cnt=partial,
            mask_block_idx=partial[..., None].contiguous(),
            full_block_cnt=torch.full_like(partial, full.shape[3]),
            full_block_idx=full,
            block_size=problem.pattern.block,
        )
    q, k, v = (x.transpose(1, 2).contiguous() for x in problem.parts)

    def call() -> torch.Tensor:
        every = []
        for part in (k, v):
            gathered = part.new_empty((problem.ranks, *part.shape))
            dist.all_gather_into_tensor(gathered, part, group=problem.group)
            every.append(gathered.flatten(0, 2)[None] if part.shape[0] == 1 else gathered)
        out = flash_attn_func(q, *every, **options)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    yield call


@contextmanager
def torch_cp(problem: Problem) -> Iterator[Call]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import _attention as attention
    from torch.distributed.tensor.experimental import context_parallel

    if problem.row.heads or problem.row.kind not in ("dense", "causal"):
        raise NotImplementedError("dense and causal by sequence alone")
    mesh = init_device_mesh("cuda", (problem.ranks,))
    q, k, v = (x.clone() for x in problem.whole)
    causal = problem.row.kind == "causal"
    attention._cp_options.enable_load_balance = causal  # torch refuses it otherwise
    with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2], no_restore_buffers={q, k, v}):
        sdpa = torch.nn.functional.scaled_dot_product_attention
        yield with_gradients(problem, [q, k, v], lambda q, k, v: sdpa(q, k, v, is_causal=causal))


CALLS: dict[str, Any] = {
    "ours": ours,
    "ours, symmetric": symmetric,
    "ours, shared keys": shared,
    "alone": alone,
    "all-gather": all_gather,
    "FA4 all-gather": fa4_all_gather,
    "torch CP": torch_cp,
}


def slowest(seconds: float, group: Any) -> float:
    """The largest of all ranks' numbers."""
    number = torch.tensor(seconds, dtype=torch.float64, device="cuda")
    dist.all_reduce(number, dist.ReduceOp.MAX, group=group)
    return float(number)


def milliseconds_of(call: Call, calls: int, group: Any, *, asleep: bool = False) -> float:
    """The mean milliseconds of calls in a row, of the slowest rank; all begin together."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
    torch.cuda.synchronize()
    if asleep:
        torch.cuda._sleep(20_000_000)  # some 10 ms: the host is ahead then
        dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
    start.record()
    for _ in range(calls):
        call()
    stop.record()
    stop.synchronize()
    return slowest(start.elapsed_time(stop) / calls, group)


def timed(call: Call, group: Any) -> tuple[float, float]:
    """The milliseconds of a single call and of calls back to back, as docs/notebook/measuring.md says."""
    for _ in range(WARM_UP):
        call()
    single = median([milliseconds_of(call, 1, group, asleep=True) for _ in range(REPEATS)])
    long = []
    for _ in range(ROUNDS):
        settled = milliseconds_of(call, calls_of_block(SETTLING_SHARE * BLOCK_SECONDS, single), group)
        long.append(milliseconds_of(call, calls_of_block(BLOCK_SECONDS, settled), group))
    return single, median(long)


def link_speed(group: Any) -> float:
    """The bytes a second that a rank receives from the next one while it sends as many."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    sent, received = (torch.zeros(1 << 28, dtype=torch.uint8, device="cuda") for _ in range(2))

    def call() -> None:
        pairs = ((dist.isend, sent, (rank + 1) % ranks), (dist.irecv, received, (rank - 1) % ranks))
        for work in dist.batch_isend_irecv(
            [dist.P2POp(how, x, group=group, group_peer=peer) for how, x, peer in pairs]
        ):
            work.wait()

    call()
    return sent.numel() / milliseconds_of(call, 10, group) * 1e3


def outputs(found: Any) -> list[torch.Tensor]:
    return list(found) if isinstance(found, tuple | list) else [found]


def differs(label: str, found: Any, right: Any) -> float:
    """Return how far results are off those of one GPU, relative to the largest; gradients of q alone compare."""
    del label
    return float((outputs(found)[0].float() - outputs(right)[0].float()).abs().max() / outputs(right)[0].abs().max())


def measured(row: Row, dtype: str, group: Any, link: float, labels: Sequence[str]) -> dict[str, Any]:
    """Time a row: some calls beside the one alone."""
    problem = Problem(row, DTYPES[dtype], group)
    work, of_key = problem.flops(), 2 * HEADS * DIM * 2
    record: dict[str, Any] = {"name": row.name, "dtype": dtype, "target": row.target, "results": {}, "failed": {}}
    plan = Plan("", problem.layout, scored_of(problem.pattern), None, 0, False, 1.0)
    heads = HEADS // problem.ranks if row.heads else HEADS
    shape = (1, heads, row.length if row.heads else row.length // problem.ranks, DIM)
    every, lengths = range(problem.ranks), (row.length, row.length)
    received = max(keys_received(problem.pattern, problem.layout, rank, *lengths) for rank in every) * of_key
    record["bytes"] = {"moved": received, "needed": received}
    if row.heads:  # three quarters of four tensors, over two ranks half of them
        received = 2 * of_key * row.length // problem.ranks * (problem.ranks - 1) // problem.ranks
        record["bytes"] = {"moved": received, "needed": received}
    elif problem.send is not None:
        traffic = max((problem.send.traffic(rank, DIM) for rank in every), key=lambda each: each.moved)
        received = traffic.moved
        record["bytes"] = traffic._asdict()
    right = None
    for label in ("alone", *(name for name in labels if name != "alone")):
        try:
            with CALLS[label](problem) as call:
                found = call()
                if label == "alone":
                    right = found
                elif label != "torch CP" and not row.heads:
                    off = slowest(differs(label, found, right), group)  # all ranks go on, or none: timing has barriers
                    assert off < 2e-2, f"off by {off:.1e}"
                del found
                single, long = timed(call, group)
                record["results"][label] = {
                    "milliseconds": round(single, 4),
                    "tflops": round(work / single / 1e9, 1),
                    "back_to_back_milliseconds": round(long, 4),
                    "back_to_back_tflops": round(work / long / 1e9, 1),
                }
        except Exception as error:
            record["failed"][label] = reason(error)
    results = record["results"]
    if "alone" in results:
        base = results["alone"]
        for result in results.values():
            result["share"] = round(base["milliseconds"] / result["milliseconds"], 3)
            long = base["back_to_back_milliseconds"] / result["back_to_back_milliseconds"]
            result["back_to_back_share"] = round(long, 3)
        runs = [run.stop - run.start for run in plan.runs(shape, heads, gives_back=row.backward, by_heads=row.heads)]
        edge = WINDOW * problem.ranks / row.length if row.kind == "window" else 1.0
        parts = runs_of(work * edge, received, runs, received if row.backward else 0)
        machine = Machine(work / (base["milliseconds"] / 1e3), link)
        record["predicted_share"] = round(predict(machine, parts, work * (1 - edge)).efficiency, 3)
        stopped = predict(machine._replace(slowed=0.0), parts, work * (1 - edge)).efficiency
        record["predicted_share_without_overlap"] = round(stopped, 3)
    return record


def show(record: dict[str, Any]) -> None:
    print(f"{record['name']}, {record['dtype']} (target {record['target']}):")
    for label, result in record["results"].items():
        both = f"{result['milliseconds']:9.3f} / {result['back_to_back_milliseconds']:9.3f} ms"
        speeds = f"{result['tflops']:5.0f} / {result['back_to_back_tflops']:5.0f} TFLOPS"
        shares = f"{result.get('share', 0):.2f} / {result.get('back_to_back_share', 0):.2f} of alone"
        print(f"    {label:18} {both}  {speeds}  {shares}")
    for label, why in record["failed"].items():
        print(f"    {label:18} {why}")
    free, stopped = (record.get(f"predicted_share{name}") for name in ("", "_without_overlap"))
    print(f"    predicted share of alone {free}, without overlap {stopped}; bytes {record['bytes']}", flush=True)


def plot(report: dict[str, Any], path: Path) -> None:
    """Draw the share of the speed alone of each row, of single calls and back to back, and its target."""
    if not can_plot():
        return
    from matplotlib import pyplot

    rows = report["rows"][::-1]
    labels = [label for label in CALLS if label != "alone" and any(label in row["results"] for row in rows)]
    figure, axes = pyplot.subplots(1, 2, figsize=(12, 2 + 0.7 * len(rows)), layout="constrained", sharey=True)
    for axis, key, title in zip(axes, ("share", "back_to_back_share"), ("single calls", "back to back"), strict=True):
        for number, label in enumerate(labels):
            places = [place + 0.35 - 0.13 * number for place in range(len(rows))]
            shares = [row["results"].get(label, {}).get(key, 0) for row in rows]
            axis.barh(places, shares, height=0.12, label=label if key == "share" else None)
        axis.plot([row["target"] for row in rows], range(len(rows)), "|", markersize=40, color="black")
        axis.set_xlabel(f"speed of one GPU with its part of the work, {title}")
    axes[0].set_yticks(range(len(rows)), [f"{row['name']}, {row['dtype']}" for row in rows])
    figure.suptitle(f"{report['ranks']} x {report['device']}, driver {report['driver']}", fontsize=10)
    figure.legend(loc="outside lower center", ncols=3)
    save(figure, path)


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, allow_abbrev=False)
    names = [row.name for row in ROWS]
    parser.add_argument(
        "--rows",
        nargs="+",
        choices=names,
        default=names,
        metavar="NAME",
        help=f"of {', '.join(names).replace('%', '%%')}",
    )
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), metavar="NAME", help="bf16, fp16")
    parser.add_argument(
        "--calls", nargs="+", choices=CALLS, default=list(CALLS), metavar="NAME", help=f"of {', '.join(CALLS)}"
    )
    parser.add_argument(
        "--shorter", type=int, default=1, metavar="N", help="divide lengths by this number, for trial runs"
    )
    parser.add_argument(
        "--max-ctas", type=int, metavar="N", help="upper bound of NCCL's thread blocks, which occupy SMs"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write every median, after each row")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="where to draw them, as .svg")
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE", help="show an earlier run's JSON")
    return parser.parse_args(given)


def main() -> None:
    options = arguments()
    if options.source:
        report = json.loads(options.source.read_text(encoding="utf-8"))
        for record in report["rows"]:
            show(record)
        if options.plot:
            plot(report, options.plot)
        return
    if not torch.cuda.is_available():
        raise SystemExit("error: torch sees no GPU")
    if "RANK" not in os.environ:
        raise SystemExit("error: start it by torchrun --nproc-per-node 2")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # not used, and not to be had everywhere
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    nccl = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if options.max_ctas:
        nccl.config.max_ctas = options.max_ctas
    dist.init_process_group("nccl", device_id=device, pg_options=nccl, timeout=timedelta(seconds=120))
    group = dist.group.WORLD
    report = {**environment(PACKAGES), "ranks": dist.get_world_size(), "rows": []}
    report["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    report["link_bytes_per_second"] = link_speed(group)
    for dtype in options.dtypes:
        for row in ROWS:
            if row.name not in options.rows:
                continue
            free_memory()
            shorter = replace(row, length=row.length // options.shorter)
            record = measured(shorter, dtype, group, report["link_bytes_per_second"], options.calls)
            report["rows"].append(record)
            if dist.get_rank() == 0:
                show(record)
                if options.json:
                    options.json.write_text(json_rows(report), encoding="utf-8")
    if options.plot and dist.get_rank() == 0:
        plot(report, options.plot)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
