"""The commands, as a user types them."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from each import check_each, some_of_each_kind
from typer.testing import CliRunner

from codegen import cli
from codegen.errors import CodegenError
from codegen.library import NamedSpec, find_spec, find_specs, shipped_files, shipped_names
from codegen.planning import plan_for
from codegen.receipts import Receipt, receipt_path, write_receipt
from codegen.render import render
from codegen.spec import AttentionSpec

Run = Callable[..., tuple[int, str, str]]
Make = Callable[[NamedSpec, str], Receipt]
COMMANDS = ("render", "check", "list", "explain", "schema")
OWN_SPEC = "op: attention\narch: sm_90a\nhead_dim: 64\npattern: {kind: dense}\n"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command in an empty folder; returns exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def invoke(*arguments: str) -> tuple[int, str, str]:
        result = CliRunner().invoke(cli.app, list(arguments))
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result.exit_code, result.stdout, result.stderr

    return invoke


@pytest.fixture
def generated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A generated/ of the test's own, with the source of a spec of each kind, as if no others were shipped."""
    folder = tmp_path / "generated"
    few = {each.main.stem: each.main for each in (find_spec("h100_dense"), *some_of_each_kind(0))}
    specs = [each for named in few.values() for each in find_specs(named.stem)]
    monkeypatch.setattr(cli, "GENERATED", folder)
    monkeypatch.setattr(cli, "shipped_specs", lambda: list(specs))
    cli.freshness.render_to(folder, list(few.values()))
    return folder


def refused(result: tuple[int, str, str]) -> str:
    """The one line that a refused command leaves on stderr."""
    code, _, err = result
    assert code == 2
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    return err.strip().removeprefix("error: ")


def test_help(run: Run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    assert all(command in out for command in COMMANDS)


@pytest.mark.parametrize("command", [c for c in COMMANDS if c != "list"])
def test_help_has_an_example(run: Run, command: str) -> None:
    code, out, _ = run(command, "--help")
    assert code == 0
    assert f"codegen {command}" in out.partition("Examples")[2]


def test_render_writes_and_then_leaves_alone(run: Run, named: NamedSpec) -> None:
    assert run("render", "h100_topk32", "--out", "a/b") == (0, "wrote  a/b/h100_topk32.cu\n", "")
    assert Path("a/b/h100_topk32.cu").read_bytes() == render(named).encode()
    assert run("render", "h100_topk32", "--out", "a/b") == (0, "up to date  a/b/h100_topk32.cu\n", "")


def test_render_to_stdout(run: Run, named: NamedSpec) -> None:
    assert run("render", "h100_topk32", "--out", "-") == (0, render(named), "")
    assert list(Path().iterdir()) == []


def test_render_all(run: Run) -> None:
    code, _, _ = run("render", "--all", "--out", "out")
    assert code == 0
    assert sorted(path.stem for path in Path("out").rglob("*.cu")) == [*shipped_files()]


def test_render_own_spec_to_the_current_folder(run: Run) -> None:
    Path("mine.yaml").write_text(OWN_SPEC)
    assert run("render", "mine.yaml") == (0, "wrote  mine.cu\n", "")
    assert " mine(const __grid_constant__ Params p)" in Path("mine.cu").read_text()


def test_render_shipped_spec_to_the_project(run: Run, generated: Path) -> None:
    (generated / "h100_dense.cu").unlink()
    assert run("render", "h100_dense")[0] == 0
    assert (generated / "h100_dense.cu").is_file()


def test_installed_specs_go_to_the_current_folder(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "IN_SOURCE_TREE", False)
    assert run("render", "h100_dense") == (0, "wrote  h100_dense.cu\n", "")


def test_render_check(run: Run) -> None:
    code, out, err = run("render", "h100_dense", "--out", "out", "--check")
    assert (code, err) == (1, "1 problem\n")
    assert out == "out/h100_dense.cu: was not generated\n    run: codegen render h100_dense --out out\n"
    assert not Path("out").exists()
    run("render", "h100_dense", "--out", "out")
    assert run("render", "h100_dense", "--out", "out", "--check") == (0, "every file is up to date\n", "")


def test_render_needs_specs_or_all(run: Run) -> None:
    assert refused(run("render")) == "name one spec or more, or say --all"
    assert refused(run("render", "h100_dense", "--all")) == "name specs or say --all, not both"


@pytest.mark.parametrize("command", ["render", "explain"])
def test_unknown_spec(run: Run, command: str) -> None:
    assert "did you mean h100_topk32" in refused(run(command, "h100_topk23"))


def test_bad_spec_has_file_and_line(run: Run) -> None:
    Path("mine.yaml").write_text(OWN_SPEC + "stages: lots\n")
    assert refused(run("render", "mine.yaml")).startswith("mine.yaml:5: stages: is 'lots'")
    assert not Path("mine.cu").exists()


def test_spec_that_does_not_fit(run: Run) -> None:
    Path("mine.yaml").write_text(OWN_SPEC.replace("64", "128") + "stages: 8\n")
    assert refused(run("explain", "mine.yaml")).startswith("mine.yaml:5: stages: 8 stages of tile 128 x 128 need ")


def test_unwritable_folder(run: Run) -> None:
    Path("file").touch()
    assert refused(run("render", "h100_dense", "--out", "file/out")).endswith(": Not a directory")
    assert refused(run("schema", "--out", "file/out.json")) == "file: File exists"


def test_folder_in_the_place_of_a_file(run: Run) -> None:
    assert refused(run("schema", "--out", "")) == ".: Is a directory"
    Path("out/h100_dense.cu").mkdir(parents=True)
    assert refused(run("schema", "--out", "out")) == "out: Is a directory"
    assert refused(run("render", "h100_dense", "--out", "out")) == "out/h100_dense.cu: Is a directory"


def test_name_that_the_source_needs(run: Run) -> None:
    Path("Params.yaml").write_text(OWN_SPEC)
    assert refused(run("render", "Params.yaml")).startswith("Params.yaml: 'Params' names the kernel, but has a meaning")
    assert not Path("Params.cu").exists()


def test_check(run: Run, generated: Path) -> None:
    assert run("check") == (0, "every file is up to date\n", "")
    path = generated / "h100_dense.cu"
    path.write_text(path.read_text() + "// a remark\n")
    (generated / "old.cu").touch()
    code, out, err = run("check")
    assert (code, err) == (1, "2 problems\n")
    assert "generated/h100_dense.cu: was edited by hand" in out
    assert "run: codegen render h100_dense\n" in out.replace(" --out generated", "")
    assert "generated/old.cu: there is no spec old.yaml\n    run: rm generated/old.cu\n" in out


def test_check_strict(run: Run, generated: Path, receipt: Make) -> None:
    for named in sorted(cli.shipped_specs(), key=lambda named: named.twin_of is not None):
        write_receipt(named, receipt(named, render(named)), receipt_path(named, generated))
    assert run("check", "--strict")[0] == 0
    (generated / "h100_dense.json").unlink()
    assert run("check")[0] == 0
    code, out, _ = run("check", "--strict")
    assert code == 1
    assert "generated/h100_dense.json: there is no receipt" in out
    assert "run: codegen verify h100_dense" in out


def test_list(run: Run) -> None:
    code, out, _ = run("list")
    assert code == 0
    rows = out.splitlines()
    assert rows[0].split() == ["spec", "operator", "arch", "type", "what", "tile", "how", "receipt"]
    assert [row.split()[0] for row in rows[1:]] == shipped_names()
    told = {row.split()[0]: row.partition("fp16")[2].split("  ")[1].strip() for row in rows[1:] if " fp16 " in row}
    assert told["h100_bsr_spmm_b128"] == "blocks 128 x 128"
    assert told["h100_bsr_spmm_b128_bias_gelu"] == "blocks 128 x 128, epilogue bias gelu"
    assert told["h100_bsr_spmm_b128_transposed"] == "blocks 128 x 128, transpose_a"
    assert told["h100_causal_softcap"] == "causal, d 128, softcap 30.0"


def test_explain_tells_the_choice(run: Run) -> None:
    _, out, _ = run("explain", "h100_causal", "--problem", "heads=16,q_len=1024,kv_len=1024")
    assert "chosen  h100_causal_few_tiles" in " ".join(out.split("\n")) and "h100_causal\n" in out
    _, out, _ = run("explain", "h100_causal", "--problem", "batch=2,heads=16,q_len=16384,kv_len=16384")
    assert "chosen  this one" in out and "measured: " in out
    dense = "op=bsr_spmm,block=16,m=8192,n=8192,k=8192,density=0.5,evenness=1,prepared=none"
    code, out, _ = run("explain", "--problem", dense)
    assert code == 0 and out.startswith("h100_bsr_spmm_b16\n") and "by the table a dense product is faster" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "name a spec, or a problem with --problem"),
        (("h100_causal", "--problem", "head_dim=64"), "problem.head_dim: is said by the spec: leave it out"),
        (("h100_causal", "--problem", "length=64"), "problem.length: is not a field of a problem"),
        (("h100_causal", "--problem", "heads"), "problem: has 'heads'; parts are FIELD=VALUE"),
        (("h100_tile_copy_tma", "--problem", "m=64"), "problem: is given: a tile_copy has none"),
        (("--problem", "op=gemm"), "problem.op: is 'gemm'; allowed: "),
    ],
)
def test_explain_refuses_what_is_no_problem(run: Run, arguments: tuple[str, ...], says: str) -> None:
    assert refused(run("explain", *arguments)).startswith(says)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("h100_topk32", "attention, fp16 in and out,"),
        ("h100_e4m3_topk32", "attention, e4m3 in and bf16 out,"),
        ("h100_e4m3_bsr_spmm_b64", "bsr_spmm, e4m3 in and bf16 out,"),
        ("h100_quantise_v_e5m2_bf16", "quantize, bf16 in and e5m2 out"),
    ],
)
def test_explain_tells_types(run: Run, name: str, says: str) -> None:
    assert says in run("explain", name)[1]


def test_explain(run: Run, request: pytest.FixtureRequest) -> None:
    specs = some_of_each_kind(request.config.getoption("--kernel-seed"))
    check_each({named.stem: partial(check_explained, run, named) for named in specs})


def check_explained(run: Run, named: NamedSpec) -> None:
    code, out, _ = run("explain", named.stem)
    plan = plan_for(named)
    assert code == 0
    assert out.startswith(f"{named.stem}\n")
    assert named.spec.hash in out
    assert f"{plan.shared_bytes} of {plan.arch.shared_memory_per_block} bytes" in out
    assert all(region.name in out and str(region.offset) in out for region in plan.shared)
    assert f"take {plan.registers.accumulators} of {plan.registers.limit}" in out
    assert "FLOP/byte" in out
    if isinstance(named.spec, AttentionSpec):
        for tensor in named.spec.index_tensors:
            heads = "heads" if named.spec.pack_gqa == 1 else f"heads / {named.spec.pack_gqa}"
            dims = ", ".join(heads if dim == "heads" else str(dim) for dim in tensor.dims)
            assert f"({dims})" in out


def test_schema(run: Run) -> None:
    code, out, _ = run("schema")
    assert code == 0
    assert json.loads(out)["discriminator"]["propertyName"] == "op"
    assert run("schema", "--out", "schema.json") == (0, "", "")
    assert Path("schema.json").read_text() == out


def test_errors_of_added_commands_are_reported_too() -> None:
    with pytest.raises(cli.typer.Exit) as caught, cli.reported_errors():
        raise CodegenError("no GPU")
    assert caught.value.exit_code == 2
    with pytest.raises(ZeroDivisionError), cli.reported_errors():
        _ = 1 / 0
