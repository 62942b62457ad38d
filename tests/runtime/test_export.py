"""``codegen export``, ``load_kernel`` of a folder, and CODEGEN_NO_JIT, as far as they go without a GPU."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from codegen.errors import ExportError, SpecError
from codegen.library import find_spec
from codegen.places import place_of
from codegen.receipts import Receipt
from codegen.tools.exports import RECORD, read_export
from runtime.cli import app
from runtime.compile import compiler, toolchain
from runtime.compile.compiler import compile_spec, run_nvrtc
from runtime.compile.inspection import usage
from runtime.doctor import look
from runtime.errors import ArgumentError, DeviceError, NoJitError, ToolchainError
from runtime.verify.receipts import cubin_record

pytestmark = pytest.mark.nvrtc

run = CliRunner()
KERNEL = "l4_tile_copy_cp_async"  # small: compiles in a moment
FORBIDDEN = "and CODEGEN_NO_JIT=1 forbids compilation"


@pytest.fixture(scope="module")
def cache_of_all(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def compiled_once(cache_of_all: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile a kernel for the first test that wants it."""
    monkeypatch.setenv("CODEGEN_CACHE_DIR", str(cache_of_all))


@pytest.fixture
def empty_cache(compiled_once: None, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache without any kernel, for tests that look at what is compiled."""
    monkeypatch.setenv("CODEGEN_CACHE_DIR", str(own_cache))
    return own_cache


@pytest.fixture
def no_jit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODEGEN_NO_JIT", "1")


def exported(out: Path, *arguments: str) -> Any:
    result = run.invoke(app, ["export", *(arguments or (KERNEL,)), "--out", str(out), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["rows"]


@pytest.mark.usefixtures("empty_cache")
def test_a_folder_has_what_was_compiled(tmp_path: Path) -> None:
    (row,) = exported(tmp_path)
    assert row["folder"] == str(tmp_path / KERNEL) and row["changed"] and not row["was_cached"]
    found, compiled = read_export(tmp_path / KERNEL), compile_spec(find_spec(KERNEL))
    assert (found.cubin, found.generated.source, found.record.compiler_log) == (
        compiled.code,
        compiled.source,
        compiled.log,
    )
    assert found.receipt.cubin.sha256 == found.record.cubin.sha256
    assert not row["verified"], "the receipt is of PTX: no GPU of sm_89 ran this cubin"


def test_the_bytes_are_the_same_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exported(tmp_path / "one")
    monkeypatch.setenv("CODEGEN_CACHE_DIR", str(tmp_path / "other cache"))
    exported(tmp_path / "two")
    one, two = ({f.name: f.read_bytes() for f in (tmp_path / n / KERNEL).iterdir()} for n in ("one", "two"))
    assert one == two and len(one) == 5
    assert [row["changed"] for row in exported(tmp_path / "two")] == [False]
    result = run.invoke(app, ["export", KERNEL, "--out", str(tmp_path / "two")])
    assert result.stdout.startswith("up to date  ")


@pytest.mark.parametrize(
    ("name", "ran"), [("h100_ladder_01_wmma", "sm_90a cubin"), ("l4_bsr_sddmm_b64", "compute_89 PTX")]
)
def test_a_receipt_is_only_of_its_cubin(name: str, ran: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU made of another cubin, or of PTX, is not said of this one."""
    committed = Receipt.read(place_of(find_spec(name), ".json"))
    assert committed.verification is not None and committed.verification.target == ran
    own = cubin_record(compile_spec(find_spec(name)))
    known = committed.model_copy(update={"cubin": own})  # as if it were of this compiler, whichever that is
    monkeypatch.setattr(Receipt, "read", lambda path: known)
    (row,) = exported(tmp_path, name)
    assert row["verified"] == (ran == "sm_90a cubin")
    other = known.model_copy(update={"cubin": own.model_copy(update={"sha256": "0" * 64})})
    monkeypatch.setattr(Receipt, "read", lambda path: other)
    (row,) = exported(tmp_path, name)
    monkeypatch.undo()
    kept = read_export(tmp_path / name).receipt
    assert not row["verified"] and kept.verification is None and kept.cubin.sha256 == own.sha256


def test_a_shape_is_told_with_its_launch(tmp_path: Path) -> None:
    exported(tmp_path, KERNEL, "--shape", "rows=100,columns=64", "--sm-count", "58")
    record = read_export(tmp_path / KERNEL).record
    assert record.launch is not None and record.launch.shape == {"rows": 100, "columns": 64}
    assert "_LAUNCH_GRID " in (tmp_path / KERNEL / f"{KERNEL}.h").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "rows=1"], "sm_count: is missing"),
        (["--sm-count", "58"], "shape: is missing"),
        (["--shape", "rows=1", "--sm-count", "0"], "sm_count: is 0, expected 1 to 4096"),
        (["--shape", "rows", "--sm-count", "58"], "shape: has 'rows', expected FIELD=NUMBER"),
        (["--shape", "rows=1,rows=2", "--sm-count", "58"], "shape.rows: is given twice"),
        (["--shape", "rows=1", "--sm-count", "58"], "shape.columns: is missing"),
        (["--shape", "rows=1,columns=4", "--sm-count", "58"], "shape.columns: is 4, expected a multiple of 8"),
    ],
)
def test_bad_shapes_are_refused_before_anything_is_written(tmp_path: Path, arguments: list[str], message: str) -> None:
    result = run.invoke(app, ["export", KERNEL, "--out", str(tmp_path / "out"), *arguments])
    assert result.exit_code == 2 and message in result.stderr and not (tmp_path / "out").exists()


def test_a_foreign_folder_stops_all_before_anything_is_compiled(tmp_path: Path, empty_cache: Path) -> None:
    (tmp_path / "h100_tile_copy_tma").mkdir()
    (tmp_path / "h100_tile_copy_tma" / "mine").touch()
    result = run.invoke(app, ["export", KERNEL, "h100_tile_copy_tma", "--out", str(tmp_path)])
    assert result.exit_code == 2 and "holds mine, which no export wrote" in result.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["h100_tile_copy_tma"] and not list(empty_cache.iterdir())


# What follows has torch see a GPU that is not there.


class Loaded:
    """Stands for a kernel in the driver."""

    def __init__(self, compiled: Any) -> None:
        self.compiled = compiled

    def slots(self, device: int) -> int:
        return 58


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Make torch see a GPU of compute capability 8.9, on which kernels load and do not run."""
    torch = pytest.importorskip("torch")
    import contextlib

    from runtime import kernel

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA L4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 9))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(kernel, "entered", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(kernel, "LoadedKernel", Loaded)
    yield kernel.load_kernel


def without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Any:
        raise ToolchainError("NVRTC, the CUDA run-time compiler, is not installed")

    monkeypatch.setattr(toolchain, "nvrtc", none)


def test_a_folder_is_loaded_without_a_compiler(tmp_path: Path, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    exported(tmp_path)
    used = usage(compile_spec(find_spec(KERNEL)))
    without_a_compiler(monkeypatch)
    monkeypatch.setenv("CODEGEN_NO_JIT", "1")
    for folder in (tmp_path / KERNEL, str(tmp_path / KERNEL)):
        kernel = gpu(folder)
        assert kernel.compiled.code == (tmp_path / KERNEL / f"{KERNEL}.cubin").read_bytes()
        assert kernel._loaded.compiled is kernel.compiled and KERNEL in repr(kernel)
        assert usage(kernel.compiled) == used


def test_a_word_is_a_shipped_spec_before_it_is_a_folder(
    tmp_path: Path, gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(KERNEL).mkdir()
    assert gpu(KERNEL).compiled.named.is_shipped
    with pytest.raises(ExportError, match=r"is not an exported kernel: it has no kernel\.json"):
        gpu(Path(KERNEL))
    with pytest.raises(ExportError, match=r"is not an exported kernel"):
        gpu(f"./{KERNEL}")


def test_what_does_not_fit_a_folder_is_refused(tmp_path: Path, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    exported(tmp_path, KERNEL, "h100_tile_copy_tma")
    with pytest.raises(DeviceError, match=r"exported for sm_90a, and NVIDIA L4 is sm_89: export a kernel of its arch"):
        gpu(tmp_path / "h100_tile_copy_tma")
    with pytest.raises(ArgumentError, match=r"forward_compatible: is True, but .* has no PTX"):
        gpu(tmp_path / KERNEL, forward_compatible=True)
    with pytest.raises(SpecError, match="problem: is given with"):
        gpu(tmp_path / KERNEL, {"rows": 1})
    path = tmp_path / KERNEL / f"{KERNEL}.cubin"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(ExportError, match=f"{KERNEL}.cubin: is not the exported file"):
        gpu(tmp_path / KERNEL)
    assert RECORD in {each.name for each in (tmp_path / KERNEL).iterdir()}


def names_what_is_missing(error: NoJitError, hash_of_spec: str) -> None:
    assert error.spec_hash == hash_of_spec and hash_of_spec in str(error) and error.kernel in str(error)
    assert FORBIDDEN in str(error) and "codegen compile" in error.remedy and "codegen export" in error.remedy


@pytest.mark.usefixtures("no_jit")
@pytest.mark.parametrize("command", [["compile"], ["export", "--out", "out"], ["compile", "--check"]])
def test_commands_do_not_compile(
    command: list[str], empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run.invoke(app, [*command, KERNEL])
    spec_hash = find_spec(KERNEL).spec.hash
    assert result.exit_code == 2 and result.stderr.startswith(f"error: {KERNEL} (spec hash {spec_hash})")
    assert f"its sm_89 cubin is missing (the cache {empty_cache} has no entry " in result.stderr
    assert f"`codegen compile {KERNEL}` puts it into the cache where compilation is allowed" in result.stderr
    assert not list(empty_cache.iterdir()) and not list(tmp_path.iterdir())
    monkeypatch.delenv("CODEGEN_NO_JIT")
    compile_spec(find_spec(KERNEL))
    monkeypatch.setenv("CODEGEN_NO_JIT", "1")
    done = run.invoke(app, [*command, KERNEL])
    if "--check" in command:
        assert (
            f"`codegen compile --check {KERNEL}` puts it into the cache where compilation is allowed" in done.stderr
        )  # the PTX of the receipt
    else:
        assert done.exit_code == 0, done.output


@pytest.mark.usefixtures("no_jit")
def test_tuning_begins_no_candidate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is known to compile, and is not in the cache, is no candidate that failed."""
    monkeypatch.chdir(tmp_path)
    command = ["tune", "op=bsr_sddmm,block=32,m=4096,n=4096,k=4096,density=0.1", "--compile-only", "--most", "0"]
    monkeypatch.delenv("CODEGEN_NO_JIT")
    assert run.invoke(app, command).exit_code == 0
    monkeypatch.setenv("CODEGEN_NO_JIT", "1")
    assert run.invoke(app, command).exit_code == 0
    monkeypatch.setenv("CODEGEN_CACHE_DIR", str(tmp_path / "another"))
    done = run.invoke(app, command)
    assert done.exit_code == 2 and FORBIDDEN in done.stderr and not (tmp_path / "another").exists()


@pytest.mark.usefixtures("no_jit")
def test_load_kernel_does_not_compile(gpu: Any, empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoJitError) as caught:
        gpu(KERNEL)
    names_what_is_missing(caught.value, find_spec(KERNEL).spec.hash)
    assert str(empty_cache) in caught.value.reason
    monkeypatch.setenv("CODEGEN_NO_JIT", "0")
    assert not gpu(KERNEL).compiled.was_cached
    monkeypatch.setenv("CODEGEN_NO_JIT", "1")
    assert gpu(KERNEL).compiled.was_cached
    without_a_compiler(monkeypatch)
    with pytest.raises(NoJitError, match=r"keys its entries by their compiler, which was not found: NVRTC") as caught:
        gpu(KERNEL)
    names_what_is_missing(caught.value, find_spec(KERNEL).spec.hash)


@pytest.mark.usefixtures("no_jit")
def test_the_driver_compiles_no_ptx_either(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    with pytest.raises(NoJitError, match="the driver would compile its PTX for this device"):
        gpu(KERNEL, forward_compatible=True)


@pytest.mark.usefixtures("no_jit", "gpu", "empty_cache")
def test_the_first_use_of_an_operator_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    import oracle_kernel
    import torch

    from runtime import block_sparse_attention
    from runtime.ops import attention_calls, select_topk
    from runtime.patterns import Causal

    real = attention_calls._kernel_of
    oracle_kernel.install(monkeypatch, "sm_89")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA L4")
    monkeypatch.setattr(
        attention_calls, "_kernel_of", lambda shape_class, device: real(shape_class, torch.device("cuda", 0))
    )
    tensors = [torch.zeros(1, 2, 64, 64).half() for _ in range(3)]
    with pytest.raises(NoJitError) as caught:
        block_sparse_attention(*tensors, Causal())
    error = caught.value
    names_what_is_missing(error, error.spec_hash)
    # The command that it names makes the kernel.
    monkeypatch.delenv("CODEGEN_NO_JIT")
    command = shlex.split(error.remedy.partition("`")[2].partition("`")[0])
    done = run.invoke(app, command[1:])
    assert command[:2] == ["codegen", "compile"] and done.exit_code == 0, done.output
    monkeypatch.setenv("CODEGEN_NO_JIT", "1")
    kernel: Any = attention_calls._loaded(find_spec(command[2]).spec, torch.device("cuda", 0))
    assert kernel.compiled.was_cached and kernel.spec.hash == error.spec_hash
    select_topk._kernel.cache_clear()
    monkeypatch.setattr(select_topk, "arch_of", lambda device: "sm_89")
    with pytest.raises(NoJitError, match=FORBIDDEN):
        select_topk._kernel(0, "fp16")


@pytest.mark.usefixtures("no_jit")
def test_nothing_reaches_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler.child, "ask", lambda *arguments: pytest.fail("the compiler is asked"))
    with pytest.raises(NoJitError, match=r"^a\.cu: it is a source for NVRTC"):
        run_nvrtc("", "a.cu", "cubin", ())
    for name in ("NVRTC", "headers", "cuobjdump"):
        assert (look(name).state, look(name).told) == ("note", "skipped: CODEGEN_NO_JIT=1 forbids compilation")


@pytest.mark.parametrize("value", ["yes", "2", " 1"])
def test_a_value_that_is_neither_yes_nor_no(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODEGEN_NO_JIT", value)
    with pytest.raises(ToolchainError, match=f"^CODEGEN_NO_JIT is '{value}'; expected 1 .* or 0$"):
        compile_spec(find_spec(KERNEL))
