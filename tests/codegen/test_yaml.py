"""Spec files are read strictly; a message says file, line and field."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from codegen.errors import SpecError
from codegen.library import find_spec, read_spec

Write = Callable[..., Path]
HEAD = "op: attention\narch: sm_90a\nhead_dim: 128\n"
DENSE = HEAD + "pattern: {kind: dense}\n"
MANY = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 6)
)
"""Half a million values, were every alias copied."""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(DENSE + "op: attention\n", 'kernel.yaml:5: found duplicate key "op"', id="duplicate"),
        pytest.param(
            HEAD + "pattern:\n  kind: dense\n  kind: causal\n",
            'kernel.yaml:6: found duplicate key "kind"',
            id="duplicate-nested",
        ),
        pytest.param(DENSE + "warps: 4\n", "kernel.yaml:5: warps: is not a field of this spec", id="unknown"),
        pytest.param(
            HEAD + "pattern:\n  kind: dense\n  size: 3\n",
            "kernel.yaml:6: pattern.size: is not a field of this spec",
            id="unknown-nested",
        ),
        pytest.param(DENSE + "stages: two\n", "kernel.yaml:5: stages: is 'two'", id="string-for-integer"),
        pytest.param(DENSE + "stages: 2.0\n", "kernel.yaml:5: stages: is 2.0", id="float-for-integer"),
        pytest.param(DENSE + "stages: 1e0\n", "kernel.yaml:5: stages: is 1.0", id="exponent-for-integer"),
        pytest.param(DENSE + "lse: on\n", "kernel.yaml:5: lse: is 'on'", id="on-is-no-boolean"),
        pytest.param(DENSE + "lse: 1\n", "kernel.yaml:5: lse: is 1", id="integer-for-boolean"),
        pytest.param(DENSE + "1: 2\n", "kernel.yaml:5: 1: ", id="key-is-no-string"),
        pytest.param(HEAD + "pattern: 2001-01-01\n", "kernel.yaml:4: pattern: is ", id="date"),
        pytest.param(HEAD + "pattern: 2001-99-99\n", "kernel.yaml: is not YAML: month", id="impossible-date"),
        pytest.param(HEAD + "pattern:\n", "kernel.yaml:4: pattern: is None", id="null"),
        pytest.param(
            HEAD + "pattern: {kind: topk, k: 8}\n", "kernel.yaml:4: pattern.block: is missing", id="missing-nested"
        ),
        pytest.param("arch: sm_90a\n", "kernel.yaml: op: is missing", id="missing"),
        pytest.param("op: [\n", "kernel.yaml:2: ", id="unclosed"),
        pytest.param("op:\n\tx: 1\n", "kernel.yaml:2: found character '\\t'", id="tab"),
        pytest.param("op: *nothing\n", "kernel.yaml:1: found undefined alias", id="alias"),
        pytest.param("&a [*a]\n", "kernel.yaml: is nested too deeply", id="cycle"),
        pytest.param("[" * 500, "kernel.yaml:1: is nested too deeply", id="deep"),
        pytest.param(MANY, "kernel.yaml: has more than 2000 values", id="aliases-of-aliases"),
        pytest.param(f"op: [{'x, ' * 2000}]\n", "kernel.yaml:1: has more than 2000 values", id="many"),
        pytest.param(
            DENSE.replace("128", "9" * 26),
            "kernel.yaml:3: head_dim: is an integer of 87 bits; at most 63 are allowed",
            id="large-integer",
        ),
        pytest.param(
            DENSE.replace("128", "0x" + "f" * 5000), "kernel.yaml:3: head_dim: is an integer of 20000 bits", id="huge"
        ),
        pytest.param(
            DENSE.replace("128", "1:" * 10_000 + "1"),
            "kernel.yaml:3: has a value of 20001 characters; at most 10000 are allowed",
            id="long-scalar",
        ),
        pytest.param(
            DENSE.replace("128", "!!str 128"), "kernel.yaml:3: head_dim: is '128'; allowed: 64, ", id="tagged-string"
        ),
        pytest.param(DENSE.replace("128", "!size 128"), "kernel.yaml:3: head_dim: is '128'; allowed: 64, ", id="tag"),
        pytest.param(HEAD + "pattern: !!set {x, y}\n", "kernel.yaml:4: pattern: is ['x', 'y']; ", id="set"),
        pytest.param(DENSE + "!!str warps: 4\n", "kernel.yaml:5: warps: is not a field", id="tagged-key"),
        pytest.param(
            DENSE + "{a: 1}: 2\n", "kernel.yaml:5: {'a': 1}: is a mapping or a list; the name of a", id="mapping-as-key"
        ),
        pytest.param(DENSE + "[1, x]: 2\n", "kernel.yaml:5: [1, 'x']: is a mapping or a list", id="list-as-key"),
        pytest.param(
            DENSE + "? {a: [1]}\n: 2\n", "kernel.yaml: has a mapping or a list in the name of a field", id="key-in-key"
        ),
        pytest.param(DENSE + "---\nop: x\n", "kernel.yaml:5: expected a single document", id="two-documents"),
        pytest.param(DENSE + "\x00", "kernel.yaml: is not YAML: unacceptable character", id="nul"),
        pytest.param("", "kernel.yaml: a spec is a mapping of fields, this is NoneType", id="empty"),
        pytest.param("- op\n", "kernel.yaml: a spec is a mapping of fields, this is list", id="list"),
        pytest.param(b"op: \xff\n", "kernel.yaml: is not UTF-8 (byte 4 is 0xff)", id="not-utf-8"),
        pytest.param(DENSE.encode("utf-16"), "kernel.yaml: is not UTF-8", id="utf-16"),
    ],
)
def test_refused_with_place_and_field(write_yaml: Write, text: str | bytes, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        read_spec(write_yaml(text))
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_absent_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError, match=r"^absent\.yaml: cannot be read: No such file or directory$"):
        find_spec("absent.yaml")


def test_folder_in_place_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder.yaml").mkdir()
    with pytest.raises(SpecError, match=r"^folder\.yaml: cannot be read: Is a directory$"):
        find_spec("folder.yaml")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_file_without_permission(write_yaml: Write) -> None:
    path = write_yaml(DENSE)
    path.chmod(0)
    with pytest.raises(SpecError, match="cannot be read: Permission denied"):
        read_spec(path)


@pytest.mark.parametrize("name", ["two-words.yaml", "9lives.yaml", "grün.yaml"])
def test_file_name_must_name_a_kernel(write_yaml: Write, name: str) -> None:
    with pytest.raises(SpecError, match="must be a C identifier"):
        read_spec(write_yaml(DENSE, name))


KEYWORDS = "int and or not xor bitand compl or_eq char16_t co_await const_cast thread_local"
CUDA = "threadIdx blockIdx warpSize dim3 std size_t NULL min max printf assert half log2 log2f fmaxf wmma cudaSuccess"
RESERVED = "_ __x _Bool kRows CUDA_R_16F NV_IF_TARGET WARP_SZ"


@pytest.mark.parametrize("name", f"{KEYWORDS} {CUDA} {RESERVED}".split())
def test_file_name_must_mean_nothing_else(write_yaml: Write, name: str) -> None:
    with pytest.raises(SpecError) as caught:
        read_spec(write_yaml(DENSE, f"{name}.yaml"))
    assert str(caught.value) == (
        f"{name}.yaml: {name!r} names the kernel, but has a meaning in CUDA C++ or in the source"
    )


@pytest.mark.parametrize("name", ["kernel", "_x", "kernel_", "ints", "cuda_dense", "a__b", "logs2", "K"])
def test_other_file_names_are_fine(write_yaml: Write, name: str) -> None:
    assert read_spec(write_yaml(DENSE, f"{name}.yaml")).stem == name


@pytest.mark.parametrize(
    "text",
    [
        DENSE,
        "\ufeff" + DENSE,
        DENSE.replace("\n", "\r\n"),
        "# a comment\n" + DENSE + "# another\n",
        HEAD + "pattern:\n  kind: dense\n",
        HEAD.replace("128", "&d 128") + "pattern: {kind: dense}\ntile: {m: *d, n: *d}\n",
        HEAD + "pattern: {<<: {kind: dense}}\n",
        "&op op: attention\narch: sm_90a\nhead_dim: 128\npattern: &p {<<: [{kind: dense}]}\n",
        DENSE.replace("128", "!!int 128"),
    ],
)
def test_spelling_does_not_matter(write_yaml: Write, text: str) -> None:
    plain = read_spec(write_yaml(DENSE, "plain.yaml"))
    other = read_spec(write_yaml(text, "other.yaml"))
    assert other.spec == plain.spec
    assert other.spec.hash == plain.spec.hash


def test_origin_is_never_absolute(write_yaml: Write) -> None:
    path = write_yaml(DENSE)
    assert read_spec(path.resolve()).origin == read_spec(path).origin == "kernel.yaml"
