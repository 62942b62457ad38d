"""Memory bandwidth of quantize kernels, compared with a copy of the same bytes.

    python benchmarks/quantize.py                    # all shipped kernels of this device
    python benchmarks/quantize.py --json rows.json h100_quantise_k

Bytes are those of x, read once, and of the codes and scales, written once. A copy by torch of as many bytes, half of
them read and half written, is timed in the same run, and so is what torch makes of the same tensor without a kernel.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from codegen.json_rows import json_rows
from codegen.library import find_spec, shipped_names
from codegen.spec import QuantizeSpec
from runtime import load_kernel
from runtime.kernels.arguments import TORCH_DTYPES
from runtime.kernels.quantize import Quantized, QuantizeKernel
from runtime.tools.bench.timing import back_to_back, single_calls
from runtime.verify.quantize import expected

SHAPES = ((2, 16, 16384), (1, 8, 131072), (1, 16, 4096))  # batch, heads, length


def tensors(found: Quantized) -> list[torch.Tensor]:
    """Tensors that a call has written."""
    return [tensor for tensor in found if tensor is not None]


def row(kernel: QuantizeKernel, batch: int, heads: int, length: int) -> dict[str, object]:
    """Measure one kernel on one shape."""
    spec = kernel.spec
    x = torch.randn((batch, heads, length, spec.head_dim), device="cuda", dtype=TORCH_DTYPES[spec.dtype])
    mean = torch.randn((batch, heads, spec.head_dim), device="cuda") if spec.mean == "product" else None
    named: dict[str, Any] = {"mean": mean}
    if spec.scales == "given":
        named["scales"] = torch.full((1, heads, 1), 0.01, device="cuda")
    if spec.rotary != "none":
        angles = torch.rand((length, spec.head_dim // 2), device="cuda")
        named["rotary"] = angles.cos(), angles.sin()
    found = kernel(x, **named)
    moved = x.nbytes + sum(tensor.nbytes for tensor in (*tensors(found), *named.get("rotary", ())))
    source = torch.empty(moved // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    of_torch = found.mean if spec.mean == "subtract" else None
    calls = {
        "ours": lambda: kernel(x, **named),
        "copy": lambda: target.copy_(source),
        "torch": lambda: expected(x, spec, of_torch, named.get("scales"), named.get("rotary")),
    }
    if length > SHAPES[0][2]:
        del calls["torch"]  # its temporaries in fp32 say nothing more
    single, block = single_calls(calls, repeats=9), back_to_back(calls, 0.1, rounds=2)
    return {
        "kernel": kernel.compiled.named.stem,
        "shape": f"B{batch} H{heads} S{length} d{spec.head_dim}",
        "device": torch.cuda.get_device_name(),
        "bytes": moved,
        **{f"{name}_{how}_ms": times[name] for how, times in (("single", single), ("block", block)) for name in calls},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=["*_quantise_*"], help="names or globs of shipped specs")
    parser.add_argument("--json", type=Path, help="where to write the rows")
    options = parser.parse_args()
    capability = torch.cuda.get_device_capability()
    rows = []
    sys.stdout.write(f"{'kernel':32} {'shape':22} {'us':>8} {'GB/s':>6} of copy, back to back {'torch':>8}\n")
    for name in (found for given in options.names for found in fnmatch.filter(shipped_names(), given)):
        named = find_spec(name)
        if not isinstance(named.spec, QuantizeSpec) or (named.spec.arch == "sm_90a") != (capability == (9, 0)):
            continue
        kernel = load_kernel(named, forward_compatible=True)
        assert isinstance(kernel, QuantizeKernel)
        for shape in SHAPES:
            found = row(kernel, *shape)
            rows.append(found)
            ours, copied, alone = (
                float(str(found[f"{key}_ms"])) for key in ("ours_block", "copy_block", "ours_single")
            )
            rate = float(str(found["bytes"])) / alone / 1e6
            beside = found.get("torch_block_ms")
            sys.stdout.write(
                f"{name:32} {found['shape']!s:22} {1e3 * alone:8.1f} {rate:6.0f} {copied / ours:7.0%}, "
                f"{1e3 * ours:8.1f} us {f'{float(str(beside)) / ours:7.1f} x' if beside else ''}\n"
            )
            sys.stdout.flush()
    if options.json:
        options.json.write_text(json_rows(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
