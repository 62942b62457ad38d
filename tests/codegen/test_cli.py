"""The commands, as a user types them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from each import check_each, some_of_each_kind
from typer.testing import CliRunner

from codegen import cli, commands, index, indexing, places
from codegen.errors import CodegenError
from codegen.library import NamedSpec, find_spec, find_specs, shipped_files, shipped_names
from codegen.planning import plan_for
from codegen.receipts import Receipt, ReceiptState, ReceiptStatus, receipt_path, write_receipt
from codegen.render import render
from codegen.spec import AttentionSpec
from codegen.tools import listing

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
    for module in (commands, indexing, places):
        monkeypatch.setattr(module, "GENERATED", folder)
    for module in (commands, indexing):
        monkeypatch.setattr(module, "shipped_specs", lambda: list(specs))
    commands.freshness.render_to(folder, list(few.values()))
    indexing.update(folder)
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


@pytest.mark.parametrize("command", COMMANDS)
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
    monkeypatch.setattr(places, "IN_SOURCE_TREE", False)
    assert run("render", "h100_dense") == (0, "wrote  h100_dense.cu\n", "")


def test_render_check(run: Run) -> None:
    code, out, err = run("render", "h100_dense", "--out", "out", "--check")
    assert (code, err) == (1, "1 problem\n")
    assert out == "out/h100_dense.cu: was not generated\n    run: codegen render h100_dense --out out\n"
    assert not Path("out").exists()
    run("render", "h100_dense", "--out", "out")
    assert run("render", "h100_dense", "--out", "out", "--check") == (0, "every file is up to date\n", "")


def test_render_needs_specs_or_all(run: Run) -> None:
    assert refused(run("render")) == "name one spec or more, or use --all"
    assert refused(run("render", "h100_dense", "--all")) == "name specs or use --all, not both"


@pytest.mark.parametrize("command", ["render", "explain"])
def test_unknown_spec(run: Run, command: str) -> None:
    assert "did you mean h100_topk32" in refused(run(command, "h100_topk23"))


def test_bad_spec_has_file_and_line(run: Run) -> None:
    Path("mine.yaml").write_text(OWN_SPEC + "stages: lots\n")
    assert refused(run("render", "mine.yaml")).startswith("mine.yaml:5: stages: is 'lots'")
    assert not Path("mine.cu").exists()


MISTAKES = """op: attention
arch: h100
dtype: float16
head_dim: 72
lse: yes
schedul: multistage
copy: tma-
pattern: {kind: sliding_windows, left: 3}
"""


def test_every_mistake_of_a_file_is_told_in_one_run(run: Run) -> None:
    Path("bad.yaml").write_text(MISTAKES)
    code, out, err = run("explain", "bad.yaml")
    assert (code, out) == (2, "")
    assert {line.removeprefix("error: bad.yaml:").partition("; allowed")[0] for line in err.splitlines()} == {
        "6: schedul: is not a field of this spec; did you mean schedule?",
        "2: arch: is 'h100'",
        "3: dtype: is 'float16'",
        "7: copy: is 'tma-'",
        "4: head_dim: is 72",
        "8: pattern.kind: is 'sliding_windows'",
        "5: lse: is 'yes'",
    }


def test_a_misspelt_field_is_told_once(run: Run) -> None:
    Path("bad.yaml").write_text(OWN_SPEC.replace("head_dim", "head_dims"))
    assert refused(run("explain", "bad.yaml")).startswith("bad.yaml:3: head_dims: is not a field of this spec")


def test_mistakes_of_one_file_stop_no_other(run: Run) -> None:
    for name in ("one", "other"):
        Path(f"{name}.yaml").write_text(OWN_SPEC)
    Path("bad.yaml").write_text(MISTAKES)
    Path("worse.yaml").write_text("op: flash_attention\n")
    code, out, err = run("render", "one.yaml", "bad.yaml", "worse.yaml", "other.yaml")
    assert (code, out) == (1, "wrote  one.cu\nwrote  other.cu\n")
    assert err.count("error: bad.yaml:") == 7 and err.splitlines()[-1].startswith("error: worse.yaml:1: op: ")
    assert run("render", "bad.yaml", "worse.yaml") == (2, "", err)


SUGGESTIONS = [
    ("schedule: ping-pong", "; did you mean ping_pong?"),
    ("schedule: pingpong", "; did you mean ping_pong?"),
    ("dtype: bfloat16", "; did you mean bf16?"),
    ("dtype: torch.float16", "; did you mean fp16?"),
    ("arch: RTX 4090", "; did you mean sm_89?"),
    ("arch: sm90", "; did you mean sm_90a?"),
    ("arch: sm_100a", "; data-center Blackwell GPUs (B200, B300, GB200: sm_100, sm_103) are not supported"),
    ("arch: GB200", "; data-center Blackwell GPUs (B200, B300, GB200: sm_100, sm_103) are not supported"),
    ("head_dim: 72", "; calls with smaller heads use the next size, 80"),
    ("head_dim: 512", "128, 192 or 256"),
    ('head_dim: "128"', "; write 128 without quotes"),
    ("pattern: {kind: sliding_windows}", "; did you mean sliding_window?"),
    ("pattern: {kind: sliding_window, window_size: 1024}", "; write left: 1023, right: 0"),
    ("pattern: {kind: sliding_window, window_size: [512, 0]}", "; write left: 512, right: 0"),
    ("op: flash_attention", "; did you mean attention?"),
    ("causal: true", "; write pattern: {kind: causal}"),
    ("softmax_scale: 0.1", "; the scale is an argument of the call: leave it out"),
    ("lse: yes", "; allowed: true, false"),
]


@pytest.mark.parametrize(("field", "says"), SUGGESTIONS, ids=[field for field, _ in SUGGESTIONS])
def test_a_wrong_value_gets_the_right_one(run: Run, field: str, says: str) -> None:
    name = field.partition(":")[0]
    lines = [line for line in OWN_SPEC.splitlines() if not line.startswith(f"{name}:")]
    Path("mine.yaml").write_text("\n".join([*lines, field]))
    assert refused(run("explain", "mine.yaml")).endswith(says)


def test_names_that_are_no_specs_get_a_hint(run: Run) -> None:
    Path("s01_window.yaml").write_text(OWN_SPEC)
    Path("folder").mkdir()
    Path("empty.yaml").write_text("\n")
    assert refused(run("render", "s01_window")).endswith("; did you mean the file s01_window.yaml?")
    assert refused(run("render", "folder")).endswith("; this is a folder: name a spec file in it")
    assert refused(run("render", "empty.yaml")).startswith("empty.yaml: is empty; a spec is a mapping of fields")
    assert refused(run("render", "specs/h100_topk32.yaml")).endswith(
        "; h100_topk32 is a shipped spec: leave out the folder and .yaml"
    )
    nearest = refused(run("render", "h100_zzzzzzzzzzzz")).partition("among them ")[2].partition(";")[0].split(", ")
    assert len(nearest) == 3 and all(name.startswith("h100_") for name in nearest)


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
    assert refused(run("render", "Params.yaml")).startswith("Params.yaml: 'Params' names the kernel, but is reserved")
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
    for named in sorted(commands.shipped_specs(), key=lambda named: named.twin_of is not None):
        write_receipt(named, receipt(named, render(named)), receipt_path(named, generated))
    indexing.update(generated)
    assert run("check", "--strict")[0] == 0
    (generated / "h100_dense.json").unlink()
    assert "generated/index.jsonl: a spec, a source or a receipt changed" in run("check")[1]
    indexing.update(generated)
    code, out, _ = run("check", "--json")
    assert code == 0 and json.loads(out)["complete"]
    code, out, _ = run("check", "--strict")
    assert code == 1
    assert "generated/h100_dense.json: there is no receipt" in out
    assert "run: codegen verify h100_dense" in out


def test_list_in_a_pipe_has_whole_fields_between_tabs(run: Run) -> None:
    code, out, _ = run("list")
    assert code == 0
    rows = [line.split("\t") for line in out.splitlines()]
    assert [row[0] for row in rows] == shipped_names()
    assert {len(row) for row in rows} == {6} and not any(line != line.rstrip() for line in out.splitlines())
    words = {row[0]: row[-1] for row in rows}
    assert words["h100_bsr_spmm_b128"] == "blocks 128 x 128"
    assert words["h100_bsr_spmm_b128_bias_gelu"] == "blocks 128 x 128, epilogue bias gelu"
    assert words["h100_bsr_spmm_b128_transposed"] == "blocks 128 x 128, transpose_a"
    assert words["h100_causal_softcap"] == "causal, d 128, softcap 30.0"
    assert words["h100_causal_alibi"] == "causal, d 128, score"


def test_list_selects(run: Run) -> None:
    names = [name for name in shipped_names() if name.startswith("h100_topk32")]
    assert [line.split("\t")[0] for line in run("list", "h100_topk32*")[1].splitlines()] == names
    rows = json.loads(run("list", "--op", "bsr_spmm", "--arch", "sm_89", "--dtype", "bf16", "--json")[1])["rows"]
    assert rows and {(row["operator"], row["arch"], row["type"]) for row in rows} == {("bsr_spmm", "sm_89", "bf16")}
    assert set(rows[0]) == set(indexing.row_of(find_spec(rows[0]["spec"]), ReceiptState(ReceiptStatus.OK, "")))
    assert len(run("list", "h100_topk32", "-v")[1].split("\t")) == 9
    assert refused(run("list", "h100_topk23")) == (
        "no kernel matches 'h100_topk23'; did you mean h100_topk32 or h100_topk or h100_topk_s3?"
    )
    assert "values: attention, " in refused(run("list", "--op", "gemm"))


@pytest.mark.parametrize("verbose", [False, True])
def test_lines_of_a_list_fit_the_terminal(verbose: bool) -> None:
    rows = index.read()
    lines = [re.sub(r"\x1b\[\d*m", "", line) for line in listing.lines_of(rows, 80, verbose=verbose)]
    assert len(lines) == len(rows) * (3 if verbose else 1) and max(map(len, lines)) <= 80
    assert all(row["spec"] in line.split() for row, line in zip(rows, lines[:: 3 if verbose else 1], strict=True))


def test_list_reads_a_spec_that_changed_after_the_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    specs = tmp_path / "specs"
    specs.mkdir()
    for module in (index, listing):
        monkeypatch.setattr(module, "SPECS", specs)
    (specs / "h100_own.yaml").write_text(OWN_SPEC)
    rows = [*index.read(), {"spec": "gone", "file": "gone.yaml", "digest": ""}]
    monkeypatch.setattr(index, "read", lambda folder=None: rows)
    monkeypatch.setattr(indexing.NamedSpec, "subfolder", Path())
    assert run("list") == (0, "h100_own\tmissing\tattention\tsm_90a\tfp16\tdense, d 64\n", "")


def test_a_broken_index_is_one_line(tmp_path: Path) -> None:
    (tmp_path / index.NAME).write_text('{"spec": "a"}\n{')
    with pytest.raises(CodegenError, match=r"index.jsonl: is not an index of kernels; run: codegen render --all"):
        index.read(tmp_path)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--version",),
        ("--help",),
        ("tune", "--help"),
        ("explain", "--help"),
        ("cache", "path"),
        ("list",),
        ("COMPLETE", "codegen rend"),
        ("COMPLETE", "codegen render h100_topk3"),
    ],
    ids=" ".join,
)
def test_what_answers_at_once_imports_no_specs_and_no_templates(arguments: tuple[str, ...]) -> None:
    environment = {**os.environ}
    if arguments[0] == "COMPLETE":
        words = arguments[1]
        environment |= {"_CODEGEN_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        arguments = ()
    code = (
        "import sys\n"
        f"sys.argv = ['codegen', *{list(arguments)!r}]\n"
        "from runtime.cli import main\n"
        "try:\n    main()\n"
        "finally:\n    print(*sorted(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout
    heavy = {
        "jinja2",
        "yaml",
        "torch",
        "numpy",
        "cuda",
        "rich.progress",
    }  # and not pydantic, which typer itself imports
    heavy |= {f"codegen.{name}" for name in ("library", "patterns", "plans", "render", "spec")}
    assert not heavy & set(done.stderr.split())


def test_explain_tells_the_choice(run: Run) -> None:
    _, out, _ = run("explain", "h100_causal", "--problem", "heads=16,q_len=1024,kv_len=1024")
    assert "chosen  h100_causal_few_tiles" in " ".join(out.split("\n")) and "h100_causal\n" in out
    _, out, _ = run("explain", "h100_causal", "--problem", "batch=2,heads=16,q_len=16384,kv_len=16384")
    assert "chosen  this one" in out and "measured: " in out
    dense = "op=bsr_spmm,block=16,m=8192,n=8192,k=8192,density=0.5,evenness=1,prepared=none"
    code, out, _ = run("explain", "--problem", dense)
    assert code == 0 and out.startswith("h100_bsr_spmm_b16\n") and "a dense product is faster" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "name a spec, or a problem with --problem"),
        (("h100_causal", "--problem", "head_dim=64"), "problem.head_dim: is set by the spec: leave it out"),
        (("h100_causal", "--problem", "length=64"), "problem.length: is not a field of a problem"),
        (("h100_causal", "--problem", "heads"), "problem: has 'heads'; expected FIELD=VALUE"),
        (("h100_tile_copy_tma", "--problem", "m=64"), "problem: is given, but a tile_copy is not"),
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
