"""``codegen new``: a legal spec for a device and a problem, with reasons; and completion of words by the shell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from codegen.arch import ARCHS
from codegen.cli import app
from codegen.devices import DEVICES, arch_of, device_names
from codegen.errors import SpecError
from codegen.library import find_spec, read_spec, shipped_names
from codegen.select.choice import choose
from codegen.select.problem import parse_problem
from codegen.tools import new_cli
from codegen.tools.new import new_spec, pattern_fields

assert new_cli.new_command.__name__ == "new_command"  # it is registered
CAUSAL = ("--device", "H100", "--head-dim", "128", "--pattern", "causal")


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*arguments: str, answers: str = "") -> Any:
    result = CliRunner().invoke(app, ["new", *arguments], input=answers)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def refused(*arguments: str, answers: str = "") -> str:
    result = run(*arguments, answers=answers)
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.splitlines()[-1].startswith("error: ")
    return str(result.stderr.splitlines()[-1])


def test_it_writes_the_spec_that_is_chosen_and_tells_why() -> None:
    result = run("my_kernel.yaml", *CAUSAL, "--problem", "heads=16,q_len=16384,kv_len=16384")
    assert result.exit_code == 0
    problem = {"op": "attention", "head_dim": 128, "pattern": {"kind": "causal"}, "heads": 16}
    choice = choose(parse_problem({**problem, "q_len": 16384, "kv_len": 16384}))
    assert read_spec(Path("my_kernel.yaml")).spec == choice.spec
    told = " ".join(result.stdout.split())
    assert told.startswith("wrote my_kernel.yaml") and f"{choice.rule}: {choice.reason}" in told
    assert "limited by" in told and "next: codegen explain my_kernel.yaml" in told and "none are given" not in told


def test_without_sizes_it_says_that_none_decided() -> None:
    assert "not given, so they did not decide; to give them: --problem" in run("my_kernel.yaml", *CAUSAL).stdout


def test_a_shipped_kernel_is_named() -> None:
    run("my_kernel.yaml", *CAUSAL)
    (row,) = json.loads(run("my_kernel.yaml", *CAUSAL, "--json").stdout)["rows"]
    assert row["changed"] is False
    assert find_spec(row["shipped"]).spec == read_spec(Path("my_kernel.yaml")).spec
    assert row["spec_hash"] == find_spec(row["shipped"]).spec.hash


def test_a_file_is_not_written_over() -> None:
    run("my_kernel.yaml", *CAUSAL)
    before = Path("my_kernel.yaml").read_bytes()
    other = ("my_kernel.yaml", "--device", "H100", "--head-dim", "64", "--pattern", "causal")
    assert refused(*other) == "error: my_kernel.yaml exists and was not changed; --force overwrites it"
    assert refused("my_kernel.yaml", "-i").endswith("--force overwrites it")  # before it asks
    assert Path("my_kernel.yaml").read_bytes() == before
    assert run(*other, "--force").exit_code == 0
    assert Path("my_kernel.yaml").read_bytes() != before


def test_products_have_problems_too() -> None:
    result = run("my_kernel.yaml", "--device", "L4", "--problem", "op=bsr_spmm,block=64")
    assert result.exit_code == 0
    assert read_spec(Path("my_kernel.yaml")).spec == find_spec("l4_bsr_spmm_b64").spec, "the shipped, verified tile"
    told = " ".join(result.stdout.split())
    assert "--problem m=4096,n=4096,k=4096,density=0.1,..." in told
    assert "l4_bsr_spmm_b64 is the same kernel: use that name. Its receipt: " in told


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("my_kernel.yaml", "--head-dim", "64", "--pattern", "dense"), "--device: is missing; name a GPU"),
        (("my_kernel.yaml", "--device", "L4", "--pattern", "dense"), "--head-dim: is missing; give it"),
        (("my_kernel.yaml", "--device", "L4", "--head-dim", "64"), "--pattern: is missing; give it"),
        (("my_kernel.yaml", *CAUSAL[:4], "--pattern", "dens"), "problem.pattern.kind: is 'dens'; allowed: "),
        (("my_kernel.yaml", *CAUSAL[:4], "--pattern", "topk,k"), "problem: has 'pattern.k'; expected FIELD=VALUE"),
        (("my_kernel.yaml", *CAUSAL[:4], "--pattern", "topk,k=4"), "problem.pattern.block: "),
        (("my_kernel.yaml", "--device", "B200", *CAUSAL[2:]), "device: is 'B200'; data-center Blackwell GPUs "),
        (("my_kernel.yaml", "--device", "L4", "--head-dim", "65", *CAUSAL[4:]), "problem.head_dim: is 65; allowed: "),
        (("my_kernel.yaml", *CAUSAL, "--problem", "head_dim=64"), "problem.head_dim: is given twice"),
        (("my_kernel.yaml", *CAUSAL, "--problem", "length=64"), "problem.length: is not a field of a problem"),
        (("my_kernel.txt", *CAUSAL), "FILE: is 'my_kernel.txt'; the name of a spec file ends in .yaml or .yml"),
        (("Params.yaml", *CAUSAL), "Params.yaml: 'Params' names the kernel, but is reserved"),
        (("a-b.yaml", *CAUSAL), "a-b.yaml: "),
    ],
)
def test_what_makes_no_spec_is_one_line(arguments: tuple[str, ...], says: str) -> None:
    assert refused(*arguments).startswith(f"error: {says}")
    assert not list(Path().iterdir())


def test_a_folder_that_cannot_be_written() -> None:
    Path("file").touch()
    assert refused("file/my_kernel.yaml", *CAUSAL).startswith("error: file: ")


def test_the_wizard_asks_for_what_is_not_given() -> None:
    answers = "B200\nL4\n65\n64\ntopp\ntopk\n64\n8\n\n16\n\n4096\n4096\n"
    result = run("my_kernel.yaml", "--interactive", answers=answers)
    assert result.exit_code == 0 and result.stdout.startswith("wrote  my_kernel.yaml")
    assert "device: is 'B200'" in result.stderr and "head_dim must be one of 64" in result.stderr
    assert "For topk8_b64x64, d 64, fp16, heads 16, q_len 4096, kv_len 4096." in Path("my_kernel.yaml").read_text()
    asked = run("other.yaml", "-i", *CAUSAL, "--problem", "heads=16")
    assert asked.exit_code == 0 and asked.stderr == ""


@pytest.mark.parametrize("answers", ["", "L4\n", "L4\n64\ncausal\n"])
def test_answers_that_end_write_nothing(answers: str) -> None:
    assert refused("my_kernel.yaml", "-i", answers=answers).endswith("nothing was written")
    assert not list(Path().iterdir())


PATTERNS = ("dense", "causal", "prefix_lm", "sliding_window,left=100,right=0", "topk,block=64", "topk,k=4,block=128")


@settings(max_examples=10)
@given(
    st.sampled_from(sorted(ARCHS)),
    st.sampled_from((64, 96, 128, 192, 256)),
    st.sampled_from((*PATTERNS, "block_lists,block=128,mask=key-query<=aux_free", "strided,stride=4,local=1,block=64")),
    st.sampled_from(("fp16", "bf16")),
)
def test_what_is_written_is_the_choice(arch: str, head_dim: int, pattern: str, dtype: str) -> None:
    fields = {"op": "attention", "arch": arch, "head_dim": head_dim, "dtype": dtype}
    try:
        problem = parse_problem({**fields, "pattern": pattern_fields(pattern)})
        made = new_spec(Path("my_kernel.yaml"), problem)
    except SpecError as error:
        assert "\n" not in str(error)
        return
    assert read_spec(Path("my_kernel.yaml"), made.text).spec == made.choice.spec
    assert made.text.isascii() and max(map(len, made.text.splitlines())) <= 120


def test_devices_are_known_by_what_people_call_them() -> None:
    assert set(DEVICES) == set(ARCHS)
    assert all(arch_of(name) in ARCHS for name in device_names())
    assert {arch_of(name) for name in ("NVIDIA H100", "h200", "sm_90a")} == {"sm_90a"}
    assert {arch_of(name) for name in ("rtx4090", "NVIDIA GeForce RTX 4090", "L4")} == {"sm_89"}


def completed(shell: str, words: str) -> list[str]:
    """What a shell is offered for the last of these words."""
    number = len(words.split()) - (0 if words.endswith(" ") else 1)
    environment = {"COMP_WORDS": words, "COMP_CWORD": str(number), "_TYPER_COMPLETE_ARGS": words}
    environment |= {"_CODEGEN_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    result = CliRunner().invoke(app, [], env=environment, prog_name="codegen")
    return [line for line in result.stdout.splitlines() if line]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("codegen expl", "explain"),
        ("codegen explain h100_dense_d6", "h100_dense_d64"),
        ("codegen new a.yaml --device RTX4", "RTX4090"),
        ("codegen new a.yaml --pattern to", "topk"),
        ("codegen render --al", "--all"),
    ],
)
def test_shells_complete_commands_specs_and_values(shell: str, words: str, expected: str) -> None:
    assert expected in "\n".join(completed(shell, words))


def test_only_what_begins_so_is_offered() -> None:
    assert completed("bash", "codegen render h100_dense_d") == [
        name for name in shipped_names() if name.startswith("h100_dense_d")
    ]
