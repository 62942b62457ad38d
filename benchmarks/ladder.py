"""Times the ladder of BSR x dense kernels, from plain WMMA to WGMMA, and the tile copies, beside cuBLAS, in one run;
then rewrites its tables in docs/notebook/ladder-bsr.md and their plot. benchmarks/ladder_page.py writes the lists.

    python benchmarks/ladder.py                       # measures, writes JSON, page and plot
    python benchmarks/ladder.py --from ladder.json    # no GPU: page and plot of an earlier run

C = A B with A 8192 x 8192 of 16 random blocks in each block row, B 8192 x 8192, fp16. All steps and cuBLAS take turns.
Before a step is timed, some of its block rows are compared with the exact (float64) product; a step that fails or
computes something else gets no time, and the report has the reason.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from harness import environment, reason, save
from results_table import DASH, OLDER, line, rewritten

from codegen.errors import CodegenError
from codegen.json_rows import json_rows
from codegen.library import ROOT, NamedSpec, find_spec
from codegen.receipts import source_sha256
from codegen.render import render
from codegen.spec import BsrSpmmSpec, Spec
from runtime import load_kernel
from runtime.kernels.arguments import TORCH_DTYPES
from runtime.kernels.bsr_spmm import BsrSpmmKernel
from runtime.tools.bench.timing import Call, single_calls
from runtime.verify.rows import kernel_fields

Fields = dict[str, Any]
CUBLAS = "cuBLAS, dense A"
TORCH_COPY = "torch copy_"
SIZE, ROW_BLOCKS = 8192, 16
COPY_SIZE = 16384  # rows and columns of the copies: far more than an L2 holds
TOLERANCE = 1e-2  # of the largest element of a block row; a correct fp16 result is within about 1e-3
MMA_SYNC_CEILING = 570  # TFLOPS of mma.sync.m16n8k16 alone, measured on an H200 (docs/notebook/ladder/notes-bsr.md)
JSON, PAGE = ROOT / "benchmarks" / "results" / "ladder.json", ROOT / "docs" / "notebook" / "ladder-bsr.md"
HEADINGS = ("step", "kernel", "tile, stages", "claimed", "measured", "to the step before", "to cuBLAS", "why")
ALIGNMENT = ["---:", "---", "---", "---:", "---:", "---:", "---:", "---"]
COPY_HEADINGS = ("kernel", "tile, stages", "GB/s", "to torch's copy")
NOT_MEASURED = "Nothing is measured yet."


@dataclass(frozen=True)
class Step:
    """One rung.

    Attributes:
        name: of the spec.
        claimed: TFLOPS that the notes tell for it, if they do.
        why: its expected gain, and the reason, or the reasons against it.
    """

    name: str
    claimed: str
    why: str


STEPS = (
    Step(
        "h100_ladder_01_wmma",
        "111",
        "each step is loaded, awaited, then computed; only the SM's second thread block overlaps with it",
    ),
    Step(
        "h100_ladder_02_tall",
        "127.5",
        "32, not 21 FLOPs per byte of shared memory, 85, not 64 per byte of the L2; but one thread block per SM",
    ),
    Step("h100_ladder_03_cp_async", "230", "two steps are in flight while one is computed"),
    Step("h100_ladder_04_k64", DASH, "half as many barriers per product"),
    Step(
        "h100_ladder_05_k112",
        "607 (512 x 128 x 112)",
        "even fewer barriers, but only two stages fit; the claim exceeds the ceiling of mma.sync",
    ),
    Step(
        "h100_ladder_06_mma",
        DASH,
        "fragments of the next slice arrive while this one is multiplied; no padding, four stages",
    ),
    Step(
        "h100_ladder_07_tma",
        "150-200",
        "against step 4: no address arithmetic in the loop, fewer registers; the same products",
    ),
    Step(
        "h100_ladder_08_wgmma",
        "400-450, of attention",
        "wgmma reads its operands from shared memory: ceiling 834; a producer warp loads without gaps",
    ),
    Step("h100_ladder_09_stages", "450-500, of attention", "more bytes in flight hide the L2's latency"),
    Step(
        "h100_bsr_spmm_b128",
        DASH,
        "tiles of 128 x 256: A's blocks are read half as often, and products have twice the columns",
    ),
)
COPIES = ("l4_tile_copy_ld_global", "l4_tile_copy_cp_async", "h100_tile_copy_tma")


def random_bsr(spec: BsrSpmmSpec) -> torch.Tensor:
    """A; if SIZE is not a multiple of the block size, with as many columns as whole blocks fill."""
    rows, columns = SIZE // spec.block.rows, SIZE // spec.block.cols
    crow = torch.arange(0, rows + 1, device="cuda") * ROW_BLOCKS
    col = torch.rand((rows, columns), device="cuda").argsort(-1)[:, :ROW_BLOCKS].sort(-1).values.flatten()
    shape = (col.numel(), spec.block.rows, spec.block.cols)
    values = torch.randn(shape, device="cuda", dtype=TORCH_DTYPES[spec.dtype])
    size = (rows * spec.block.rows, columns * spec.block.cols)
    return torch.sparse_bsr_tensor(crow, col, values, size=size, check_invariants=False)


def largest_error(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> float:
    """The worst error of the first, middle and last block row, relative to its largest element."""
    crow, col, values = a.crow_indices().tolist(), a.col_indices(), a.values()
    height, width = values.shape[1:]
    errors = []
    for row in (0, (len(crow) - 1) // 2, len(crow) - 2):
        part = slice(crow[row], crow[row + 1])
        left = values[part].double().transpose(0, 1).flatten(1)
        right = b.unflatten(0, (-1, width))[col[part]].flatten(0, 1).double()
        expected = left @ right
        found = out[row * height : (row + 1) * height].double()
        errors.append((found - expected).abs().max() / expected.abs().max())
    return float(torch.stack(errors).max())  # NaN if there is one


def record(named: NamedSpec, milliseconds: float, error: float) -> Fields:
    """Fields of every kernel in the JSON."""
    return {
        "name": named.stem,
        **kernel_fields(named),
        "milliseconds": round(milliseconds, 4),
        "error": float(f"{error:.2e}"),
    }


def measure_steps(repeats: int) -> Fields:
    """Check all steps, then time them and cuBLAS in turns."""
    b = torch.randn((SIZE, SIZE), device="cuda", dtype=torch.float16)
    # Not A itself: a matrix that is mostly zeros draws less power, so that cuBLAS runs faster than on real data.
    dense, out = torch.randn_like(b), torch.empty_like(b)
    calls: dict[str, Call] = {CUBLAS: lambda: torch.mm(dense, b, out=out)}
    work: dict[str, float] = {CUBLAS: 2.0 * SIZE**3}
    matrices: dict[tuple[int, int], torch.Tensor] = {}
    errors: dict[str, float] = {}
    failed: dict[str, str] = {}
    for step in STEPS:
        try:
            kernel = load_kernel(step.name)
            assert isinstance(kernel, BsrSpmmKernel)
            block = (kernel.spec.block.rows, kernel.spec.block.cols)
            if block not in matrices:
                matrices[block] = random_bsr(kernel.spec)
            a = matrices[block]
            right = b[: a.shape[1]]

            def call(kernel: Any = kernel, a: torch.Tensor = a, right: torch.Tensor = right) -> None:
                kernel(a, right, out=out)

            out.fill_(torch.nan)
            call()
            error = largest_error(a, right, out)
        except Exception as found:
            failed[step.name] = reason(found)
            continue
        if error <= TOLERANCE:
            calls[step.name], errors[step.name], work[step.name] = call, error, 2.0 * a.values().numel() * SIZE
        else:
            failed[step.name] = f"wrong result: off by {error:.1e} of the largest element"
    times = single_calls(calls, repeats)

    def speed(name: str) -> Fields:
        return {"flops": work[name], "tflops": round(work[name] / times[name] / 1e9, 1)}

    steps = [
        {**record(find_spec(step.name), times[step.name], errors[step.name]), **speed(step.name)}
        for step in STEPS
        if step.name in times
    ]
    peer = {"milliseconds": round(times[CUBLAS], 4), **speed(CUBLAS)}
    return {"cublas": peer, "steps": steps, "failed": failed}


def measure_copies(repeats: int) -> Fields:
    """Check the tile copies, then time them and torch's copy in turns."""
    x = torch.randn((COPY_SIZE, COPY_SIZE), device="cuda", dtype=torch.float16)
    out = torch.empty_like(x)
    calls: dict[str, Call] = {TORCH_COPY: lambda: out.copy_(x)}
    failed: dict[str, str] = {}
    for name in COPIES:
        try:
            kernel = load_kernel(name, forward_compatible=True)

            def call(kernel: Any = kernel) -> None:
                kernel(x, out=out)

            out.zero_()
            call()
            same = torch.equal(out, x)
        except Exception as found:
            failed[name] = reason(found)
            continue
        if same:
            calls[name] = call
        else:
            failed[name] = "wrong result: not a copy"
    times = single_calls(calls, repeats)

    def speed(name: str) -> Fields:
        return {"gigabytes_per_second": round(2 * x.nbytes / times[name] / 1e6)}

    copies = [{**record(find_spec(name), times[name], 0.0), **speed(name)} for name in COPIES if name in times]
    peer = {"milliseconds": round(times[TORCH_COPY], 4), **speed(TORCH_COPY)}
    return {"torch_copy": peer, "copies": copies, "copies_failed": failed}


def mark(record: Fields) -> str:
    """A mark if the kernel's source has changed since."""
    try:
        current = source_sha256(render(find_spec(record["name"]))) == record["source_sha256"]
    except CodegenError:  # it is gone, or its spec is no longer legal
        current = False
    return "" if current else OLDER


def shape(spec: Spec) -> str:
    """Tile and stages, formatted for tables."""
    return f"{' x '.join(map(str, spec.tile.model_dump().values()))}, {spec.stages}"


def step_table(report: Fields | None) -> str:
    """The table of the steps; without a report, with nothing measured in it."""
    found = {record["name"]: record for record in report["steps"]} if report else {}
    dense = report["cublas"]["tflops"] if report else None
    rows, before = [], None
    for number, step in enumerate(STEPS, 1):
        named, own = find_spec(step.name), found.get(step.name)
        measured = [DASH, DASH, DASH]
        if own:
            gain = f"{own['tflops'] / before['tflops']:.2f}" if before else DASH
            measured = [f"{own['tflops']:.0f}{mark(own)}", gain, f"{own['tflops'] / dense:.2f}"]
        rows.append(line([str(number), f"`{step.name}`", shape(named.spec), step.claimed, *measured, step.why]))
        before = own
    text = NOT_MEASURED
    if report:
        text = (
            f"{report['device']}, driver {report['driver']}; effective TFLOPS, medians of one run "
            f"([how they are taken](measuring.md)); {CUBLAS}: {dense:.0f}."
        )
        if any(OLDER in row for row in rows):
            text += f" {OLDER}: measured with an earlier source of this kernel."
    failed = [f"- `{name}` has no time: {why}" for name, why in (report or {"failed": {}})["failed"].items()]
    table = [text, "", line([*HEADINGS]), line(ALIGNMENT), *rows]
    picture = ["", f"![claimed and measured TFLOPS of each step]({PAGE.stem}.svg)"] if report else []
    return "\n".join([*table, *(["", *failed] if failed else []), *picture])


def copy_table(report: Fields | None) -> str:
    """The table of the tile copies."""
    found = {record["name"]: record for record in report["copies"]} if report else {}
    rows = []
    for name in COPIES:
        own, cells = found.get(name), [DASH, DASH]
        if own and report:
            speed = own["gigabytes_per_second"]
            cells = [f"{speed}{mark(own)}", f"{speed / report['torch_copy']['gigabytes_per_second']:.2f}"]
        rows.append(line([f"`{name}`", shape(find_spec(name).spec), *cells]))
    text = NOT_MEASURED
    if report:
        peer = report["torch_copy"]["gigabytes_per_second"]
        text = f"{COPY_SIZE} x {COPY_SIZE} fp16, bytes read and written over time, same run; {TORCH_COPY}: {peer} GB/s."
    failed = [
        f"- `{name}` has no time: {why}" for name, why in (report or {"copies_failed": {}})["copies_failed"].items()
    ]
    table = [text, "", line([*COPY_HEADINGS]), line(["---", "---", "---:", "---:"]), *rows]
    return "\n".join([*table, *(["", *failed] if failed else [])])


def write_page(report: Fields | None, page: Path) -> None:
    """Rewrite what is between the markers of the page."""
    text = page.read_text(encoding="utf-8")
    for name, table in (("steps", step_table(report)), ("copies", copy_table(report))):
        text = rewritten(text, name, table)
    page.write_text(text, encoding="utf-8")
    print(f"wrote {page}")


def lowest_claim(step: Step) -> float | None:
    """Claimed gain of a step as a number, the lower end of a range."""
    digits = step.claimed.partition(" ")[0].partition("-")[0]
    return float(digits) if digits else None


def plot(report: Fields, path: Path) -> None:
    """Draw measured and claimed TFLOPS of each step, and the two ceilings, as a PNG and an SVG."""
    try:
        import matplotlib as mpl
    except ModuleNotFoundError:
        print("no plot: matplotlib is not installed; draw it elsewhere with --from FILE")
        return
    mpl.use("agg")
    mpl.rcParams["svg.hashsalt"] = "ladder"  # the same bytes for the same numbers
    from matplotlib import pyplot

    found = {record["name"]: record["tflops"] for record in report["steps"]}
    figure, axes = pyplot.subplots(figsize=(9, 1.5 + 0.42 * len(STEPS)), layout="constrained")
    places = [-place for place in range(len(STEPS))]  # the first step on top
    axes.barh(places, [found.get(step.name, 0) for step in STEPS], height=0.6, label="measured", color="#1b7f5c")
    claims = [(lowest_claim(step), place) for step, place in zip(STEPS, places, strict=True)]
    told = [(claim, place) for claim, place in claims if claim is not None]
    axes.plot(*zip(*told, strict=True), "|", markersize=18, color="black", label="claimed")
    axes.axvline(MMA_SYNC_CEILING, color="#b03030", linewidth=1, linestyle="--", label="ceiling of mma.sync")
    axes.axvline(report["cublas"]["tflops"], color="#707070", linewidth=1, label=CUBLAS)
    axes.set_yticks(places, [step.name for step in STEPS])
    axes.set_xlabel("effective TFLOPS")
    axes.set_title(f"BSR x dense, step by step, on {report['device']}", fontsize=10)
    figure.legend(loc="outside lower center", ncols=4)
    save(figure, path)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--json", type=Path, default=JSON, metavar="FILE", help="where to write what was measured")
    parser.add_argument("--page", type=Path, default=PAGE, metavar="FILE", help="the page; its plot lies beside it")
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE", help="an earlier run's JSON")
    return parser.parse_args(arguments)


@torch.no_grad()
def measure(options: argparse.Namespace) -> Fields:
    torch.manual_seed(0)
    repeats = 7 if options.quick else 21
    report: Fields = {**environment(("torch",)), **measure_steps(repeats)}
    torch.cuda.empty_cache()
    report |= measure_copies(repeats)
    write_report(report, options.json)
    return report


def write_report(report: Fields, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json_rows(report), encoding="utf-8")
    print(f"wrote {path}")


def main() -> None:
    options = parse_arguments()
    if options.source:
        report = json.loads(options.source.read_text(encoding="utf-8"))
    elif torch.cuda.is_available():
        report = measure(options)
    else:
        raise SystemExit("error: torch sees no GPU; --from FILE shows an earlier run")
    print(step_table(report), copy_table(report), sep="\n\n")
    plot(report, options.page.with_suffix(""))
    write_page(report, options.page)
    if report["failed"] or report["copies_failed"]:
        raise SystemExit("error: kernels without a time, see above")


if __name__ == "__main__":
    main()
