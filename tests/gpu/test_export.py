"""Exported kernels on a GPU: loaded by Python they compute what the compiled ones do, and a C program runs one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import driver_api  # noqa: E402
from kept_calls import forget  # noqa: E402

from codegen.library import find_spec  # noqa: E402
from runtime import ExportError, NoJitError, block_sparse_attention, load_kernel  # noqa: E402
from runtime.compile import toolchain  # noqa: E402
from runtime.errors import ToolchainError  # noqa: E402
from runtime.export import export  # noqa: E402
from runtime.patterns import Causal  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")
HERE = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
PREFIX = {(9, 0): "h100", (8, 9): "l4"}.get(HERE)
native = pytest.mark.skipif(PREFIX is None, reason="no shipped kernel is of this device's architecture")
hopper = pytest.mark.skipif(HERE != (9, 0), reason="the example's kernel is for compute capability 9.0")


def attention_call(kernel: Any) -> Any:
    q, k, v = (torch.randn(2, heads, 700, 128, device="cuda").to(kernel._dtype) for heads in (4, 2, 2))
    lists = torch.randint(0, 6, (1, 1, 6, 32), dtype=torch.int32, device="cuda")
    return lambda call: call(q, k, v, *((lists,) if call.spec.index_tensors else ()))


def spmm_call(kernel: Any) -> Any:
    rows, cols = kernel.spec.block.rows, kernel.spec.block.cols
    weight = torch.randn(4 * rows, 5 * cols, device="cuda").to(kernel._dtype).to_sparse_bsr((rows, cols))
    b = torch.randn(5 * cols, 256, device="cuda").to(kernel._dtype)
    return lambda call: call(call.prepare(weight), b)


def copy_call(kernel: Any) -> Any:
    x = torch.randn(500, 640, device="cuda").to(kernel._dtype)
    return lambda call: call(x)


def select_call(kernel: Any) -> Any:
    q, k = (torch.randn(1, 2, 4096, 128, device="cuda").to(kernel._dtype) for _ in range(2))
    return lambda call: call(q, k, (128, 128), 8, causal=True)


def quantize_call(kernel: Any) -> Any:
    x = torch.randn(1, 3, 1000, 128, device="cuda").to(kernel._dtype)
    return lambda call: call(x).codes.view(torch.uint8)


KERNELS = {
    "causal": attention_call,
    "topk32": attention_call,
    "bsr_spmm_b64": spmm_call,
    "quantize_v": quantize_call,
    "select_topk": select_call,
    "tile_copy_cp_async" if PREFIX == "l4" else "tile_copy_tma": copy_call,
}


@native
@pytest.mark.parametrize("name", KERNELS)
def test_an_exported_kernel_computes_what_the_compiled_one_does(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stem = f"{PREFIX}_{name}"
    compiled = load_kernel(stem)
    folder = export(find_spec(stem), tmp_path).folder

    def none() -> Any:
        raise ToolchainError("there is no compiler")

    monkeypatch.setattr(toolchain, "nvrtc", none)
    monkeypatch.setenv("CODEGEN_NO_JIT", "1")
    loaded = load_kernel(folder)
    torch.manual_seed(0)
    call = KERNELS[name](compiled)
    for one, other in zip(results(call(compiled)), results(call(loaded)), strict=True):
        assert torch.equal(one, other)  # bit for bit, as from run to run


def results(found: Any) -> list[Any]:
    return [each for each in (found if isinstance(found, tuple) else (found,)) if each is not None]


@native
def test_another_cubin_is_refused(tmp_path: Path) -> None:
    folder = export(find_spec(f"{PREFIX}_causal"), tmp_path).folder
    path = folder / f"{PREFIX}_causal.cubin"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ExportError, match="is not the exported file"):
        load_kernel(folder)


@native
def test_nothing_is_compiled_where_that_is_forbidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").mkdir(mode=0o700)
    monkeypatch.setenv("CODEGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CODEGEN_NO_JIT", "1")
    with pytest.raises(NoJitError, match=f"{PREFIX}_causal"):
        load_kernel(f"{PREFIX}_causal")
    forget()
    q, k, v = (torch.randn(1, 2, 200, 64, device="cuda").half() for _ in range(3))
    with pytest.raises(NoJitError, match="spec hash"):
        block_sparse_attention(q, k, v, Causal())
    assert not list((tmp_path / "cache").rglob("*"))
    monkeypatch.delenv("CODEGEN_NO_JIT")
    first = block_sparse_attention(q, k, v, Causal())
    forget()
    monkeypatch.setenv("CODEGEN_NO_JIT", "1")  # and now it is in the cache
    assert torch.equal(block_sparse_attention(q, k, v, Causal()), first)


def driver_library() -> str:
    """Return the driver's library, which this process has loaded."""
    torch.zeros(1, device="cuda")
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        if "/libcuda.so" in line:
            return line.split(maxsplit=5)[5]
    pytest.skip("this process has no file of libcuda loaded")


@hopper
@pytest.mark.skipif(driver_api.COMPILER is None, reason="there is no C compiler: cc, or what CC names")
def test_the_c_example_computes_attention(tmp_path: Path) -> None:
    if driver_api.cuda_headers() is None:
        pytest.skip("the packages of CUDA's headers have no cuda.h")
    sm_count = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    folder = driver_api.exported(tmp_path, sm_count)
    program = driver_api.built(folder, driver_library(), tmp_path / "attention")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0")}
    done = subprocess.run([program, folder], capture_output=True, text=True, check=False, env=environment, timeout=120)
    sys.stdout.write(done.stdout + done.stderr)
    assert done.returncode == 0 and done.stdout.startswith("ok: 200 rows, max difference of out"), done
