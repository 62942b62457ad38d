"""Commands that compile."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from runtime import toolchain
from runtime.cli import app
from runtime.errors import ToolchainError

run = CliRunner()


def test_compile_reports_registers_spills_and_instructions() -> None:
    result = run.invoke(app, ["compile", "l4_topk32_d64"])
    assert result.exit_code == 0, result.output
    header, row, places = result.output.splitlines()[:3]
    cells = dict(
        zip(header.replace("spill B", "spill").replace("shared KB", "shared").split(), row.split(), strict=True)
    )
    assert cells["kernel"] == "l4_topk32_d64" and cells["from"] == "NVRTC"
    assert int(cells["regs"]) > 32 and cells["spill"] == "0"
    assert int(cells["HMMA"]) > 0 and int(cells["LDGSTS"]) > 0 and cells["HGMMA"] == "0"
    assert "cubin " in places
    assert run.invoke(app, ["compile", "l4_topk32_d64"]).output.splitlines()[1].endswith("cache")


def test_cache_commands() -> None:
    run.invoke(app, ["compile", "l4_topk32_d64"])
    assert "l4_topk32_d64 (cubin)" in run.invoke(app, ["cache", "list"]).output
    assert run.invoke(app, ["cache", "clear"]).output == "removed 1 entries\n"
    assert "l4_topk32_d64" not in run.invoke(app, ["cache", "list"]).output


def test_missing_nvrtc_is_one_line_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ToolchainError(f"NVRTC, the CUDA run-time compiler, is not installed: {toolchain.INSTALL}")

    monkeypatch.setattr(toolchain, "compiler_version", missing)
    result = run.invoke(app, ["compile", "h100_topk32"])
    assert result.exit_code == 2
    assert "pip install" in result.stderr and "Traceback" not in result.stderr


def test_an_unusable_cache_is_one_line(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CODEGEN_CACHE_DIR", str(tmp_path / "file"))
    result = run.invoke(app, ["compile", "h100_topk32"])
    assert result.exit_code == 2 and "CODEGEN_CACHE_DIR" in result.stderr


def test_verify_without_a_gpu_says_so_and_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = run.invoke(app, ["verify", "h100_topk32"])
    assert result.exit_code == 2 and "needs a GPU" in result.stderr


def test_load_kernel_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from runtime import DeviceError, load_kernel

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="sees no CUDA device"):
        load_kernel("h100_topk32")
