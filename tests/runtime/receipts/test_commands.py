"""Commands that make receipts in the user's own folder, and that read them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

torch = pytest.importorskip("torch")

from codegen import provenance  # noqa: E402
from codegen.library import NamedSpec, find_spec  # noqa: E402
from codegen.receipts import Receipt, receipt_path  # noqa: E402
from codegen.render import render  # noqa: E402
from codegen.select import choose, parse_problem  # noqa: E402
from codegen.select.problem import problem_fields  # noqa: E402
from runtime.cli import app  # noqa: E402
from runtime.compile import compilers, toolchain  # noqa: E402
from runtime.receipts import mode, own, permit  # noqa: E402
from runtime.verify import receipts as verified_receipts  # noqa: E402
from runtime.verify import run as verification  # noqa: E402

Make = Callable[[NamedSpec, str], Receipt]
PROBLEM = "head_dim=64,arch=sm_89,pattern=causal,softcap=25,batch=1,heads=8,q_len=512,kv_len=512"

run = CliRunner()


@pytest.fixture(autouse=True)
def _verified_without_a_gpu(receipt: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every case passes on a device that is not there."""

    def verify(named: NamedSpec) -> tuple[Any, Any]:
        return None, receipt(named, render(named)).verification

    def made(named: NamedSpec, record: Any, measured: Any = ()) -> Receipt:
        return receipt(named, render(named)).model_copy(update={"verification": record, "measurement": tuple(measured)})

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a device")
    monkeypatch.setattr(verification, "verify", verify)
    monkeypatch.setattr(verified_receipts, "receipt", made)
    monkeypatch.setattr(provenance, "GENERATED", tmp_path / "generated")
    monkeypatch.setenv("CODEGEN_RECEIPTS", str(tmp_path / "mine"))
    monkeypatch.chdir(tmp_path)


def test_verify_of_a_problem_makes_a_receipt_that_the_runtime_finds(tmp_path: Path) -> None:
    problem = parse_problem(problem_fields(PROBLEM))
    named = choose(problem, device="a device", general=True).named
    assert not permit.is_verified(named)
    result = run.invoke(app, ["verify", "--problem", PROBLEM])
    assert result.exit_code == 0 and result.output.startswith(f"ok     {named.stem}: "), result.output
    assert sorted(path.name for path in own.folder().iterdir()) == [f"{named.stem}.cu", f"{named.stem}.json"]
    assert (own.folder() / f"{named.stem}.cu").read_text() == render(named)
    assert permit.is_verified(named) and [each.stem for each in own.kernels()] == [named.stem]
    assert not list(tmp_path.glob("*.json")), "nothing is written elsewhere"


def test_the_receipt_of_a_spec_without_a_file_goes_there_too() -> None:
    named = find_spec({"op": "attention", "arch": "sm_89", "head_dim": 64, "pattern": {"kind": "causal"}, "sink": True})
    result = run.invoke(app, ["verify", named.spec.canonical_json()])
    assert result.exit_code == 0 and permit.is_verified(named)


def test_a_shipped_kernel_of_a_problem_may_have_its_receipt_there() -> None:
    problem = "head_dim=64,arch=sm_89,pattern=causal,batch=1,heads=8,q_len=512,kv_len=512"
    named = choose(parse_problem(problem_fields(problem)), device="a device", general=True).named
    assert named.is_shipped and not permit.is_verified(named)
    assert run.invoke(app, ["verify", "--problem", problem]).exit_code == 0
    assert permit.is_verified(named) and receipt_path(named, own.folder()).is_file()


def test_the_command_of_an_error_makes_the_receipt_of_a_file(tmp_path: Path) -> None:
    text = "op: attention\narch: sm_89\nhead_dim: 64\npattern: {kind: causal}\nsoftcap: 25.0\n"
    Path("mine.yaml").write_text(text)
    named = find_spec("mine.yaml")
    command = permit.verify_command(named).split()
    assert run.invoke(app, command[1:]).exit_code == 0 and permit.is_verified(named)
    assert not (tmp_path / "mine.json").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["h100_topk32", "--problem", PROBLEM], "name specs, or a problem with --problem, not both"),
        (["--all", "--problem", PROBLEM], "name specs, or a problem with --problem, not both"),
        (["--problem", "head_dim=65"], "problem.head_dim: is 65"),
        (["--problem", "heads"], "problem: has 'heads'; expected FIELD=VALUE"),
    ],
)
def test_what_is_no_problem_is_refused(arguments: list[str], says: str) -> None:
    result = run.invoke(app, ["verify", *arguments])
    assert result.exit_code == 2 and result.stderr.startswith(f"error: {says}") and not own.folder().exists()


def test_a_folder_that_others_can_write_gets_no_receipt() -> None:
    own.folder().mkdir()
    own.folder().chmod(0o777)
    result = run.invoke(app, ["verify", "--problem", PROBLEM])
    assert result.exit_code == 2 and "others could write receipts there; run: chmod go-w" in result.stderr
    assert not list(own.folder().iterdir())


def test_verify_works_while_kernels_without_a_receipt_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def load(named: NamedSpec, **_: Any) -> None:
        seen.append(mode.is_on())
        raise KeyError

    monkeypatch.undo()
    monkeypatch.setattr(verification, "load_kernel", load)
    with mode.verified_only(), pytest.raises(KeyError):
        verification.verify(find_spec("h100_topk32"))
    assert seen == [False]


def test_explain_reads_the_users_receipts_and_names_another_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    named = choose(parse_problem(problem_fields(PROBLEM)), device="a device", general=True).named
    arguments = ["explain", named.spec.canonical_json(), "--json"]
    assert not json.loads(run.invoke(app, arguments, obj=permit.provenance).stdout)["verified"]
    run.invoke(app, ["verify", "--problem", PROBLEM])
    told = json.loads(run.invoke(app, arguments, obj=permit.provenance).stdout)
    assert told["verified"] and told["receipt"]["file"] == str(receipt_path(named, own.folder()))
    compiler = told["receipt"]["compiler"]
    monkeypatch.setattr(toolchain, "compiler_version", lambda: ("NVRTC", compiler))
    assert json.loads(run.invoke(app, arguments, obj=permit.provenance).stdout)["caveat"] == ""
    monkeypatch.setattr(toolchain, "compiler_version", lambda: ("NVRTC 99.0", "nvidia-cuda-nvrtc 99.0.1"))
    told = json.loads(run.invoke(app, arguments, obj=permit.provenance).stdout)
    assert told["caveat"] == compilers.caveat("nvidia-cuda-nvrtc 99.0.1")
    assert "nvidia-cuda-nvrtc 99.0.1 is not the compiler of the receipts" in told["caveat"]
    words = " ".join(run.invoke(app, arguments[:-1], obj=permit.provenance).stdout.split())
    assert "is not the compiler of the receipts" in words
