"""Commands that compile."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from typer.models import OptionInfo
from typer.testing import CliRunner

from codegen.cases import case_names
from codegen.library import NamedSpec, find_spec, find_specs, shipped_names
from codegen.planning import plan_for
from codegen.receipts import (
    CaseRecord,
    MeasurementRecord,
    Receipt,
    ReceiptStatus,
    VerificationRecord,
    read_receipt,
    receipt_path,
    state,
    write_receipt,
)
from codegen.render import generate, render
from runtime.cli import app
from runtime.compile import compilers, inspection, toolchain
from runtime.compile.compiler import compile_spec
from runtime.errors import ToolchainError

pytestmark = pytest.mark.nvrtc

run = CliRunner()
disassemble = cache(inspection.disassemble)


@pytest.fixture(scope="module")
def cache_of_all(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def compiled_once(cache_of_all: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile and disassemble a kernel for the first test that wants it; own_cache has nothing yet."""
    monkeypatch.setenv("CODEGEN_CACHE_DIR", str(cache_of_all))
    monkeypatch.setattr(inspection, "disassemble", disassemble)


def test_compile_reports_registers_spills_and_instructions(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODEGEN_CACHE_DIR", str(own_cache))
    result = run.invoke(app, ["compile", "l4_topk32_d64"])
    assert result.exit_code == 0, result.output
    header, row, counts, places = result.stdout.splitlines()
    cells = dict(zip(header.replace(" B", "").replace(" KB", "").split(), row.split(), strict=True))
    assert cells["kernel"] == "l4_topk32_d64" and cells["from"] == "NVRTC"
    assert int(cells["regs"]) > 32 and cells["spill"] == "0"
    assert " HMMA, " in counts and " LDGSTS, " in counts and "HGMMA" not in counts
    assert "cubin " in places
    assert run.invoke(app, ["compile", "l4_topk32_d64"]).stdout.splitlines()[1].endswith("cache")


def test_tune_compiles_candidates_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    problem = "op=bsr_sddmm,block=32,m=4096,n=4096,k=4096,density=0.1"
    for _ in range(2):
        result = run.invoke(app, ["tune", problem, "--compile-only", "--most", "1"])
        assert result.exit_code == 0 and result.stdout == "compiling 2 candidates of 1 problems\n"
    assert Path("tune.sqlite").is_file()
    assert run.invoke(app, ["tune", "--export", "rows.jsonl"]).stdout == "wrote 0 rows to rows.jsonl\n"
    assert "name one problem or more" in run.invoke(app, ["tune"]).stderr
    assert (
        "density: is 2; input should be less than or equal to 1"
        in run.invoke(app, ["tune", "op=bsr_spmm,block=64,density=2"]).stderr
    )


def test_cache_commands(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODEGEN_CACHE_DIR", str(own_cache))
    run.invoke(app, ["compile", "l4_topk32_d64"])
    assert "l4_topk32_d64 (sm_89 cubin)" in run.invoke(app, ["cache", "list"]).output
    assert run.invoke(app, ["cache", "clear"]).output == "removed 1 entry\n"
    assert "l4_topk32_d64" not in run.invoke(app, ["cache", "list"]).output


def test_missing_nvrtc_is_one_line_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ToolchainError(f"NVRTC, the CUDA run-time compiler, is not installed: {toolchain.install()}")

    monkeypatch.setattr(toolchain, "compiler_version", missing)
    result = run.invoke(app, ["compile", "h100_topk32"])
    assert result.exit_code == 2
    assert "pip install" in result.stderr and "Traceback" not in result.stderr


def test_an_unusable_cache_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CODEGEN_CACHE_DIR", str(tmp_path / "file"))
    result = run.invoke(app, ["compile", "h100_topk32"])
    assert result.exit_code == 2 and "CODEGEN_CACHE_DIR" in result.stderr


def record_of(named: NamedSpec) -> VerificationRecord:
    """A record of all cases of a spec, without an error."""
    facts: dict[str, Any] = {"description": "", "max_error": 0.0, "torch_error": None, "passed": True}
    cases = tuple(CaseRecord(name=name, tolerance=2e-3, **facts) for name in case_names(plan_for(named)))
    return VerificationRecord(
        device=f"a device for {named.spec.dtype}",
        driver="1.0",
        target=f"{named.spec.arch} cubin",
        oracle="float64",
        torch="2",
        worst_error=0.0,
        cases=cases,
    )


def test_verify_takes_both_types_of_a_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything of the command but the GPU: the name of a twin is that alone, the other's receipt stays."""
    torch = pytest.importorskip("torch")
    from runtime.verify import run as verification

    name, twin_name = "l4_dense_dq", "l4_dense_dq_bf16"
    first, twin = find_specs(name)
    ran: list[str] = []

    def verify(named: NamedSpec) -> tuple[None, VerificationRecord]:
        ran.append(named.stem)
        return None, record_of(named)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(verification, "verify", verify)
    path = tmp_path / "backward" / f"{name}.json"
    assert run.invoke(app, ["verify", twin_name, "--out", str(tmp_path)]).exit_code == 0
    assert ran == [twin_name] and [each.name for each in sorted(path.parent.iterdir())] == [f"{name}.cu", path.name]
    assert state(first, render(first), tmp_path).standing is ReceiptStatus.UNVERIFIED
    assert state(twin, render(twin), tmp_path).standing is ReceiptStatus.OK
    assert run.invoke(app, ["verify", name, "--out", str(tmp_path)]).exit_code == 0
    assert ran == [twin_name, name, twin_name]
    for named in (first, twin):
        found = read_receipt(named, path)
        assert found.verification is not None
        assert found.verification.device == f"a device for {named.spec.dtype}"
        assert state(named, render(named), tmp_path).standing is ReceiptStatus.OK
    assert read_receipt(first, path).cubin.sha256 != read_receipt(twin, path).cubin.sha256


@pytest.mark.parametrize("command", ["verify", "measure"])
def test_without_a_gpu_it_says_so_and_fails(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = run.invoke(app, [command, "h100_topk32"])
    assert result.exit_code == 2 and "needs a GPU" in result.stderr


@pytest.mark.parametrize("error", [1e-3, 1.0])
def test_verify_writes_source_and_receipt_and_fails_with_a_case(
    error: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything of the command but the GPU."""
    torch = pytest.importorskip("torch")
    from runtime.verify import run as verification

    facts: dict[str, Any] = {"description": "", "max_error": error, "torch_error": None, "passed": error < 2e-3}
    names = case_names(plan_for(find_spec("l4_topk32_d64")))
    case, *others = (CaseRecord(name=name, tolerance=2e-3, **facts) for name in names)
    record = VerificationRecord(
        device="a device",
        driver="1.0",
        target="sm_89 cubin",
        oracle="float64",
        torch="2",
        worst_error=error,
        cases=(case, *others),
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(verification, "verify", lambda named: (None, record))
    result = run.invoke(app, ["verify", "l4_topk32_d64", "--out", str(tmp_path)])
    named = find_spec("l4_topk32_d64")
    assert (tmp_path / "l4_topk32_d64.cu").read_text() == render(named)
    written = Receipt.read(tmp_path / "l4_topk32_d64.json")
    assert written.verification == record and written.cubin.registers > 32 and written.cubin.spill_bytes == 0
    # Verified once more, it keeps what was measured: of this source and cubin, on this device.
    timing = MeasurementRecord(
        shape="a shape", milliseconds=1.0, tflops=2.0, peer="a peer", peer_milliseconds=2.0, peer_tflops=1.0
    )
    path = tmp_path / "l4_topk32_d64.json"
    other_source = written.source.model_copy(update={"sha256": "0" * 64})
    other_device = record.model_copy(update={"device": "another"})
    for earlier, kept in (
        (written, (timing,)),
        (written.model_copy(update={"source": other_source}), ()),
        (written.model_copy(update={"verification": other_device}), ()),
    ):
        earlier.model_copy(update={"measurement": (timing,)}).write(path)
        result = run.invoke(app, ["verify", "l4_topk32_d64", "--out", str(tmp_path)])
        assert Receipt.read(path) == written.model_copy(update={"measurement": kept})
    standing = state(named, render(named), tmp_path).standing
    if case.passed:
        assert result.exit_code == 0 and standing is ReceiptStatus.OK
        told = f"ok     l4_topk32_d64: {len(names)} cases on a device (sm_89 cubin), worst error 0.001\n"
        assert result.output.startswith(told)
    else:
        assert result.exit_code == 1 and standing is ReceiptStatus.FAILED
        assert result.output.startswith(f"FAILED l4_topk32_d64: {len(names)} cases")
        assert "plain" in result.output and "repeat: codegen verify l4_topk32_d64" in result.output


def test_verify_goes_on_after_a_failure_and_may_measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from runtime.tools.bench import measurement
    from runtime.verify import run as verification

    def verify(named: Any) -> tuple[Any, VerificationRecord]:
        failed = named.stem == "l4_topk32_d64"
        case = CaseRecord(
            name="plain", description="", max_error=0.0, torch_error=None, tolerance=2e-3, passed=not failed
        )
        facts = {"device": "a device", "driver": "1.0", "target": "sm_89 cubin", "oracle": "float64", "torch": "2"}
        return named.stem, VerificationRecord(**facts, worst_error=0.0, cases=(case,))

    def measure(kernel: str) -> tuple[MeasurementRecord, ...]:
        facts = {"shape": kernel, "milliseconds": 1.0, "tflops": 2.0, "peer_milliseconds": 2.0, "peer_tflops": 1.0}
        return (MeasurementRecord(**facts, peer="a peer"),)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(verification, "verify", verify)
    monkeypatch.setattr(measurement, "measure", measure)
    names = ["l4_topk32_d64", "l4_bsr_sddmm_b64"]
    result = run.invoke(app, ["verify", *names, "--measure", "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert [line.split()[0] for line in result.stdout.splitlines() if line[0] != " "] == ["FAILED", "ok", "ok", "ok"]
    for named in (named for name in names for named in find_specs(name)):
        name = named.stem
        assert read_receipt(named, receipt_path(named, tmp_path)).measurement == measure(name)
        assert f"    {name}: 1.0 ms, 2.0 TFLOPS; a peer: 2.0 ms, 1.0 TFLOPS\n" in result.output


def test_compile_compares_with_the_receipt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from runtime.verify.receipts import receipt

    name, path = "l4_topk32_d64", tmp_path / "l4_topk32_d64.json"
    monkeypatch.setattr("codegen.places.GENERATED", tmp_path)
    assert run.invoke(app, ["compile", name]).exit_code == 0
    result = run.invoke(app, ["compile", name, "--check"])
    assert result.exit_code == 1 and result.stderr == f"{name}: has no receipt; run: codegen verify {name}\n"
    right = receipt(find_spec(name), None)
    right.write(path)
    result = run.invoke(app, ["compile", name, "--check"])
    assert result.exit_code == 0 and not result.stderr
    other = right.cubin.model_copy(update={"sha256": "0" * 64, "registers": 1})
    right.model_copy(update={"cubin": other}).write(path)
    result = run.invoke(app, ["compile", name, "--check"])
    assert result.exit_code == 1 and result.stderr == (
        f"{name}: sha256 is {right.cubin.sha256}, the receipt says {'0' * 64}\n"
        f"{name}: registers is {right.cubin.registers}, the receipt says 1\n"
    )
    other = other.model_copy(update={"compiler_package": "nvidia-cuda-nvrtc 12.8.93"})
    right.model_copy(update={"cubin": other}).write(path)
    result = run.invoke(app, ["compile", name, "--check"])
    assert result.exit_code == 3 and "0 of 1 compared with their receipts\n" in result.stdout
    _, package = toolchain.compiler_version()
    assert result.stderr == (
        f"nothing was compared: {package} is not the compiler of the receipts, nvidia-cuda-nvrtc 12.8.93: its "
        "code differs and was not tested; to compare: pip install nvidia-cuda-nvrtc==12.8.93\n"
    )
    document = json.loads(run.invoke(app, ["compile", name, "--check", "--json"]).stdout)
    assert (document["compared"], document["not_compared"]) == (0, 1) and document["complete"]
    assert [row["compared"] for row in document["rows"]] == ["other compiler"]


def test_measure_adds_to_the_receipt_of_this_very_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything of the command but the GPU."""
    torch = pytest.importorskip("torch")
    from runtime import kernel
    from runtime.tools.bench import measurement
    from runtime.verify.receipts import receipt

    timing = MeasurementRecord(
        shape="a shape", milliseconds=1.0, tflops=2.0, peer="a peer", peer_milliseconds=2.0, peer_tflops=1.0
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(kernel, "load_kernel", lambda named, forward_compatible: None)
    monkeypatch.setattr(measurement, "measure", lambda kernel: (timing,))
    name, path = "l4_topk32_d64", tmp_path / "l4_topk32_d64.json"
    result = run.invoke(app, ["measure", name, "--out", str(tmp_path)])
    assert result.exit_code == 1
    specs = find_specs(name)
    for named in specs:  # it takes both types
        assert f"{named.stem}: has no receipt; run: codegen verify {named.stem}\n" in result.stderr
    before = [receipt(named, None) for named in specs]
    for named, each in zip(specs, before, strict=True):
        write_receipt(named, each, path)
    result = run.invoke(app, ["measure", name, "--out", str(tmp_path)])
    assert result.exit_code == 0 and result.output.count("2.0 TFLOPS; a peer") == 2
    for named, each in zip(specs, before, strict=True):
        assert read_receipt(named, path) == each.model_copy(update={"measurement": (timing,)})
        for part in ("source", "cubin"):
            other = getattr(each, part).model_copy(update={"sha256": "0" * 64})
            write_receipt(named, each.model_copy(update={part: other}), path)
            result = run.invoke(app, ["measure", named.stem, "--out", str(tmp_path)])
            assert result.exit_code == 1 and part in result.stderr.replace("sha256", "cubin")
            assert read_receipt(named, path).measurement == ()


def test_load_kernel_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from runtime import DeviceError, load_kernel

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="sees no CUDA device"):
        load_kernel("h100_topk32")


def test_compile_check_of_some_that_cannot_be_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from runtime.verify.receipts import receipt

    monkeypatch.setattr("codegen.places.GENERATED", tmp_path)
    names = ["l4_topk32_d64", "l4_bsr_sddmm_b64"]
    for name, package in zip(names, (None, "nvidia-cuda-nvrtc 12.8.93"), strict=True):
        made = receipt(find_spec(name), None)
        other = made.cubin.model_copy(update={"compiler_package": package}) if package else made.cubin
        made.model_copy(update={"cubin": other}).write(tmp_path / f"{name}.json")
    result = run.invoke(app, ["compile", *names, "--check"])
    assert result.exit_code == 3 and "1 of 2 compared with their receipts\n" in result.stdout
    assert (
        "not all cubins were compared: " in result.stderr and "receipts, nvidia-cuda-nvrtc 12.8.93: " in result.stderr
    )
    rows = json.loads(run.invoke(app, ["compile", *names, "--check", "--json"]).stdout)["rows"]
    assert [row["compared"] for row in rows] == ["same", "other compiler"]
    (tmp_path / f"{names[0]}.json").unlink()
    assert run.invoke(app, ["compile", *names, "--check"]).exit_code == 1, "what differs comes first"


def test_a_shipped_kernel_that_spills_with_another_compiler_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from runtime import commands

    def compiled(named: NamedSpec) -> Any:
        made = compile_spec(named)
        log = made.log.replace("0 bytes spill stores", "8 bytes spill stores")
        return replace(made, log=log) if named.stem == "l4_topk32_d64" else made

    monkeypatch.setattr(commands, "compile_spec", compiled)
    monkeypatch.setattr(compilers, "compiler_version", lambda: ("NVRTC 13.9", "nvidia-cuda-nvrtc 13.9.1"))
    result = run.invoke(app, ["compile", "l4_topk32_d64", "l4_bsr_sddmm_b64", "--json"])
    assert result.exit_code == 1 and "l4_topk32_d64 is refused with nvidia-cuda-nvrtc 13.9.1" in result.stderr
    rows = json.loads(result.stdout)["rows"]
    assert [bool(row["refused"]) for row in rows] == [True, False] and rows[0]["spill_bytes"] == 8


@pytest.mark.parametrize("ending", [ToolchainError("no more"), KeyboardInterrupt(), RuntimeError("a defect")])
@pytest.mark.parametrize("as_json", [False, True])
def test_what_was_compiled_is_reported_whatever_ends_the_command(
    ending: BaseException, as_json: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from runtime import commands

    def compiled(named: NamedSpec) -> Any:
        if named.stem != "l4_topk32_d64":
            raise ending
        return compile_spec(named)

    monkeypatch.setattr(commands, "compile_spec", compiled)
    result = run.invoke(app, ["compile", "l4_topk32_d64", "h100_topk32", *(["--json"] if as_json else [])])
    assert result.exit_code not in (0, None)
    if as_json:
        document = json.loads(result.stdout)
        assert not document["complete"] and [row["kernel"] for row in document["rows"]] == ["l4_topk32_d64"]
    else:
        assert result.stdout.splitlines()[1].startswith("l4_topk32_d64 ")


def test_lines_of_compile_fit_80_columns_with_every_name_whole(capsys: pytest.CaptureFixture[str]) -> None:
    from runtime.compile import rows

    longest = max(shipped_names(), key=len)
    compiled = replace(compile_spec(find_spec("l4_topk32_d64")), generated=generate(find_spec(longest)))
    used = inspection.Usage(255, 99999, 99999, 0, 227 * 1024, dict.fromkeys(inspection.INSTRUCTIONS, 0))
    names = len(longest)
    text = f"{rows.header(names)}\n{rows.lines_of(compiled, used, names)}"
    assert all(len(line) <= 80 for line in text.splitlines()) and longest in text.split()


COMMANDS: list[tuple[str, ...]] = [
    ("render", "l4_topk32_d64", "--out", "out"),
    ("render", "l4_topk32_d64", "--out", "out", "--check"),
    ("list",),
    ("explain", "h100_topk32"),
    ("schema",),
    ("compile", "l4_topk32_d64"),
    ("compile", "l4_topk32_d64", "--check"),
    ("migrate", "h100_topk32", "--check"),
    ("tune", "op=bsr_sddmm,block=32,m=4096,n=4096,k=4096,density=0.1", "--compile-only", "--most", "0"),
    ("tune", "--export", "rows.jsonl"),
    ("cache", "path"),
    ("cache", "list"),
    ("cache", "clear"),
    ("doctor",),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_json_is_one_document(
    command: tuple[str, ...], own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if command[0] == "cache":
        monkeypatch.setenv("CODEGEN_CACHE_DIR", str(own_cache))
    result = run.invoke(app, [*command, *([] if command[0] == "schema" else ["--json"])])
    document = json.loads(result.stdout)
    assert document.get("complete", command[0] == "schema"), result.output
    assert (
        result.exit_code == (1 if command[-1] == "--check" and command[0] == "render" else 0) or command[0] == "doctor"
    )


def test_every_command_that_reports_can_do_so_as_json() -> None:
    from typer.main import get_command

    group: Any = get_command(app)
    leaves = {
        name: found
        for name, command in group.commands.items()
        for found in (command.commands.values() if hasattr(command, "commands") else [command])
    }
    assert len(leaves) > 8
    without = [name for name, found in leaves.items() if "--json" not in {o for p in found.params for o in p.opts}]
    assert without == ["schema"]  # which is JSON


def test_every_option_with_a_metavar_declares_its_name() -> None:
    """typer 0.27 takes the metavar of the others for their name where both differ in case alone: --SPEC."""
    apps = [app, *(group.typer_instance for group in app.registered_groups)]
    options: dict[str, OptionInfo] = {
        f"{command.callback.__name__}: {name}": found
        for each in apps
        for command in each.registered_commands
        for name, hint in get_type_hints(command.callback, include_extras=True).items()
        for found in getattr(hint, "__metadata__", ())
        if isinstance(found, OptionInfo) and found.metavar is not None
    }
    assert "tune_command: spec" in options
    # What is annotated has its first name as the default.
    declared = {name: [str(each) for each in (found.default, *found.param_decls)] for name, found in options.items()}
    assert [name for name, names in declared.items() if not any(each.startswith("--") for each in names)] == []
