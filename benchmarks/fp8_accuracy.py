"""Accuracy of FP8 attention: of its operands alone, of the kernels, and a needle among 131072 keys.

    python benchmarks/fp8_accuracy.py --operands --json benchmarks/results/fp8_operands.json    # no GPU
    python benchmarks/fp8_accuracy.py --json benchmarks/results/fp8_accuracy_h100.json          # a Hopper GPU
    python benchmarks/fp8_accuracy.py --from FILE [--plot docs/guide/fp8_accuracy]              # the page, the picture

Errors are root mean squares of what the result is off, beside attention in float64. Data: normal; normal with logits of
standard deviation 4; FlashAttention-3's outliers, where 0.1% of the elements have a normal number of standard deviation
10 added; and keys with a mean of their own, as those of language models have.

- Operands alone: codes and scales as the quantize kernels make them, bit for bit, by torch; attention in float64.
- Kernels: ours in fp16, and in FP8 with each promotion interval (``accumulate_every``); 0 is off. Beside them cuDNN's,
  where nvidia-cudnn-frontend is installed, on codes in e4m3 with one scale of each tensor; its result is e4m3 too.
- Needle: each query has one key with 30 to 60% of its row's weight, whose value is one of 1000 codes. It is found if
  the result's product with that code is the largest of all.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fp8_peers import cudnn_sdpa
from harness import Fields, can_plot, environment, reason, save
from results_table import line, update

from codegen.dtypes import LARGEST
from codegen.errors import CodegenError
from codegen.json_rows import json_rows
from codegen.library import ROOT, find_spec
from codegen.spec import QuantizeSpec
from runtime import load_kernel, quantize_attention
from runtime.verify.quantize import coded, expected, scales_of

PAGE = ROOT / "docs" / "notebook" / "fp8.md"
HEADS, LENGTH, HEAD_DIM = 4, 2048, 128
OFFSET = 3.0  # standard deviation of the mean of K's columns
OUTLIERS, OUTLIER_STD = 1e-3, 10.0
INTERVALS = (1, 4, 64, 0)
WAYS = ("one scale", "blocks", "and smoothed", "and rotated")
NEEDLE_KEYS, NEEDLE_QUERIES, NEEDLE_HEADS, CODES = 131072, 512, 8, 1000
WEIGHTS = (0.3, 0.6)
CUDNN = "cuDNN, e4m3"
PACKAGES = ("torch", "nvidia-cudnn-frontend")
Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def data_sets(device: str, length: int) -> dict[str, Operands]:
    """q, k and v of each kind, fp16."""
    draw = torch.Generator(device).manual_seed(0)
    shape = (1, HEADS, length, HEAD_DIM)

    def normal(*of: int) -> torch.Tensor:
        return torch.randn(of or shape, generator=draw, device=device)

    def with_outliers() -> torch.Tensor:
        where = torch.rand(shape, generator=draw, device=device) < OUTLIERS
        return normal() + OUTLIER_STD * normal() * where

    found = {
        "normal": (normal(), normal(), normal()),
        "logits of std 4": (4 * normal(), normal(), normal()),
        "outliers": (with_outliers(), with_outliers(), with_outliers()),
        "keys with a mean": (normal(), normal() + OFFSET * normal(1, HEADS, 1, HEAD_DIM), normal()),
    }
    return {name: (q.half(), k.half(), v.half()) for name, (q, k, v) in found.items()}


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention in float64."""
    heads = zip(*(x.double().unbind(1) for x in (q, k, v)), strict=True)
    return torch.stack([torch.softmax(a @ b.mT * HEAD_DIM**-0.5, -1) @ c for a, b, c in heads], 1)


def error(out: torch.Tensor, reference: torch.Tensor) -> dict[str, float]:
    """The root mean square of what a result is off, by itself and relative to the result's."""
    off = float((out.double() - reference).square().mean().sqrt())
    return {"rmse": off, "relative": off / float(reference.square().mean().sqrt())}


def dequantized(x: torch.Tensor, dtype: str, subtracted: torch.Tensor | None = None, **fields: Any) -> torch.Tensor:
    """Rows or columns as codes and scales have them, rotated if ``hadamard`` is set."""
    named = find_spec({"op": "quantize", "arch": "sm_90a", "head_dim": x.shape[3], "codes": dtype, **fields})
    assert isinstance(named.spec, QuantizeSpec)
    found = expected(x, named.spec, subtracted, None)
    rows = named.spec.tile.m
    return found.codes.double() * found.scales.double().repeat_interleave(rows, 2)[:, :, : x.shape[2], None]


def of_columns(v: torch.Tensor, dtype: str) -> torch.Tensor:
    """V rounded to codes with one scale per channel."""
    scales = scales_of(v.float().abs().amax(2, keepdim=True), dtype)
    return coded(v.float(), scales, dtype).double() * scales.double()


def of_tensor(x: torch.Tensor, dtype: str) -> torch.Tensor:
    """A tensor as codes with one scale have it."""
    scale = scales_of(x.float().abs().amax(), dtype)
    return coded(x.float(), scale.expand(x.shape), dtype).double() * scale.double()


def operands(way: str, dtype: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Operands:
    """q, k and v rounded by one of WAYS, for the error of attention over them."""
    if way == "one scale":
        return of_tensor(q, dtype), of_tensor(k, dtype), of_tensor(v, dtype)
    hadamard = way == "and rotated"
    smooth: Fields = {} if way == "blocks" else {"mean": "subtract"}
    mean = k.float().mean(2) if smooth else None
    of_q = dequantized(q, dtype, scales="row_block", hadamard=hadamard)
    return of_q, dequantized(k, dtype, mean, scales="row_block", hadamard=hadamard, **smooth), of_columns(v, dtype)


def operand_rows() -> list[Fields]:
    """The errors of operands alone, for each kind of data."""
    rows = []
    for name, (q, k, v) in data_sets("cpu", LENGTH).items():
        reference = exact(q, k, v)
        errors = {
            f"{dtype}, {way}": error(exact(*operands(way, dtype, q, k, v)), reference)
            for dtype in LARGEST
            for way in WAYS
        }
        rows.append({"data": name, "errors": errors})
        print(name, {label: f"{found['relative']:.2%}" for label, found in errors.items()}, flush=True)
    return rows


def kernel_of(dtype: str, **fields: Any) -> Any:
    """The dense kernel of a type of inputs."""
    output = {"output": "fp16"} if dtype in LARGEST else {}  # else bf16 would round more than FP8 costs
    spec = {"op": "attention", "arch": "sm_90a", "dtype": dtype, "head_dim": HEAD_DIM, "pattern": {"kind": "dense"}}
    return load_kernel({**spec, **output, **fields})


def kernels(dtype: str) -> dict[str, Callable[[Operands, Any], torch.Tensor]]:
    """Functions that compute attention of q, k and v, or of their quantized values, by label."""
    fp16 = kernel_of("fp16")
    found: dict[str, Callable[[Operands, Any], torch.Tensor]] = {"fp16": lambda given, _: fp16(*given)[0]}

    def of(kernel: Any) -> Callable[[Operands, Any], torch.Tensor]:
        names = ("q_scale", "k_scale", "v_scale")
        return lambda _, x: kernel(x.q, x.k, x.v_t, **{name: getattr(x, name) for name in names})[0]

    for every in (None, *INTERVALS):
        label = f"{dtype}, default" if every is None else f"{dtype}, n = {every or 'off'}"
        more: Fields = {} if every is None else {"accumulate_every": every}
        if every is not None and every > 1:
            more["tile"] = {"m": 128, "n": 128}  # P V of several steps has registers of its own
        try:
            found[label] = of(kernel_of(dtype, **more))
        except CodegenError as failure:
            print(label, reason(failure))
    return found


def with_cudnn(
    found: dict[str, Callable[[Operands, Any], torch.Tensor]], given: Operands, quantized: Any
) -> dict[str, torch.Tensor]:
    """The results of our kernels, and cuDNN's where it computes one: else the reason is printed."""
    results = {label: call(given, quantized) for label, call in found.items()}
    try:
        made = cudnn_sdpa(*given)
        results[CUDNN] = made.numbers(made.call())
    except Exception as failure:
        print(CUDNN, reason(failure))
    return results


def kernel_rows(dtype: str) -> list[Fields]:
    """The errors of kernels, for each kind of data; outliers are rotated."""
    rows, computed = [], kernels(dtype)
    for name, given in data_sets("cuda", 4 * LENGTH).items():
        reference = exact(*given)
        quantized = quantize_attention(*given, dtype=dtype, hadamard=name == "outliers")  # type: ignore[arg-type]
        results = with_cudnn(computed, given, quantized)
        errors = {label: error(out, reference) for label, out in results.items()}
        rows.append({"data": name, "errors": errors})
        print(name, {label: f"{found['rmse']:.2e}" for label, found in errors.items()}, flush=True)
    return rows


def needle(device: str) -> tuple[Operands, torch.Tensor, torch.Tensor]:
    """q, k and v, the codes, and the index of the code that each query should find (heads, queries)."""
    draw = torch.Generator(device).manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw, device=device)

    q, k = normal(NEEDLE_HEADS, NEEDLE_QUERIES, HEAD_DIM), normal(NEEDLE_HEADS, NEEDLE_KEYS, HEAD_DIM)
    codes = torch.nn.functional.normalize(normal(CODES, HEAD_DIM), dim=-1)
    which = torch.randint(CODES, (NEEDLE_HEADS, NEEDLE_KEYS), generator=draw, device=device)
    places = torch.stack([torch.randperm(NEEDLE_KEYS, generator=draw, device=device) for _ in range(NEEDLE_HEADS)])
    places = places[:, :NEEDLE_QUERIES]
    span = torch.rand((NEEDLE_HEADS, NEEDLE_QUERIES), generator=draw, device=device)
    weight = WEIGHTS[0] + (WEIGHTS[1] - WEIGHTS[0]) * span
    scale = HEAD_DIM**-0.5
    for head in range(NEEDLE_HEADS):
        others = torch.logsumexp(q[head] @ k[head].T * scale, -1)
        keys = k[head, places[head]]
        wanted = others + torch.log(weight[head] / (1 - weight[head])) - (q[head] * keys).sum(-1) * scale
        k[head, places[head]] = keys + (wanted / (scale * q[head].square().sum(-1)))[:, None] * q[head]
    found = which.gather(1, places)
    return (q.half()[None], k.half()[None], codes[which].half()[None]), codes, found


def needle_rows(dtype: str) -> list[Fields]:
    """The share of needles that are found."""
    given, codes, wanted = needle("cuda")
    quantized = quantize_attention(*given, dtype=dtype)  # type: ignore[arg-type]
    hits = {}
    for label, out in with_cudnn(kernels(dtype), given, quantized).items():
        products = out[0].float() @ codes.T
        hits[label] = float((products.argmax(-1) == wanted).float().mean())
    print("needle", hits, flush=True)
    return [{"data": f"needle, {NEEDLE_KEYS} keys", "hits": hits}]


def table(report: Fields) -> str:
    """The table of one part of the page."""
    rows = report["rows"]
    labels = list(dict.fromkeys(label for row in rows for label in row.get("errors", row.get("hits", {}))))
    lines = [line(["data", *labels]), line(["---", *["---:"] * len(labels)])]
    for row in rows:
        cells = {
            label: f"{found['rmse']:.1e}, {found['relative']:.1%}" for label, found in row.get("errors", {}).items()
        }
        cells |= {label: f"{found:.1%} found" for label, found in row.get("hits", {}).items()}
        lines.append(line([row["data"], *(cells.get(label, "-") for label in labels)]))
    return "\n".join(lines)


def plot(report: Fields, path: Path) -> None:
    """Draw the errors of each call, relative to the root mean square of the result, by data."""
    if not can_plot():
        return
    from matplotlib import pyplot

    rows = [row for row in report["rows"] if "errors" in row]
    labels = list(dict.fromkeys(label for row in rows for label in row["errors"]))
    figure, axis = pyplot.subplots(figsize=(9, 4), layout="constrained")
    width = 0.8 / len(labels)
    for number, label in enumerate(labels):
        places = [place + (number - (len(labels) - 1) / 2) * width for place in range(len(rows))]
        axis.bar(places, [row["errors"].get(label, {}).get("relative", 0.0) for row in rows], width, label=label)
    axis.set_yscale("log")
    axis.set_xticks(range(len(rows)), [row["data"] for row in rows])
    axis.set_ylabel("rms error relative to the result's")
    figure.legend(loc="outside lower center", ncols=4)
    axis.set_title(f"{report['device']}, driver {report['driver']}", fontsize=10)
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operands", action="store_true", help="errors of the operands alone, on the CPU")
    parser.add_argument("--dtype", default="e4m3", choices=[*LARGEST], help="dtype of the kernels")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the errors are written")
    parser.add_argument("--from", type=Path, dest="earlier", metavar="FILE", help="an earlier run, for the page")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="where to draw an earlier run of kernels, .svg")
    options = parser.parse_args()
    if options.plot and not options.earlier:
        parser.error("--plot is of an earlier run: --from FILE")
    if options.earlier:
        report = json.loads(options.earlier.read_text(encoding="utf-8"))
        if options.plot:
            plot(report, options.plot)
        raise SystemExit(update(PAGE, {report["marker"]: table(report)}))
    if options.operands:
        report = {"marker": "fp8-operands", "torch": torch.__version__, "rows": operand_rows()}
    elif torch.cuda.is_available():
        rows = [*kernel_rows(options.dtype), *needle_rows(options.dtype)]
        report = {"marker": "fp8-kernels", **environment(PACKAGES), "rows": rows}
    else:
        raise SystemExit("error: torch sees no GPU; --operands needs none")
    if options.json:
        options.json.write_text(json_rows(report), encoding="utf-8")


if __name__ == "__main__":
    main()
