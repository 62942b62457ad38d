"""Spec files are read strictly; a message says file, line and field."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from codegen import yaml_nodes
from codegen.errors import SpecError
from codegen.library import find_spec, read_spec, shipped_files, spec_text
from codegen.yaml_text import read_yaml, with_values

Write = Callable[..., Path]
HEAD = "op: attention\narch: sm_90a\nhead_dim: 128\n"
DENSE = HEAD + "pattern: {kind: dense}\n"
MANY = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 6)
)
"""Half a million values, were every alias copied."""


SPELLINGS = [
    DENSE,
    "\ufeff" + DENSE,
    DENSE.replace("\n", "\r\n"),
    "# a comment\n" + DENSE + "# another\n",
    HEAD + "pattern:\n  kind: dense\n",
    HEAD.replace("128", "&d 128") + "pattern: {kind: dense}\ntile: {m: *d, n: *d}\n",
    "&op op: attention\narch: sm_90a\nhead_dim: 128\npattern: &p {kind: dense}\n",
]
"""The same spec in other words."""
REFUSED = [
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
    pytest.param(HEAD + "pattern: 2001-01-01\n", "kernel.yaml:4: pattern: is '2001-01-01'", id="date"),
    pytest.param(DENSE + "tile: !!omap [m: 1]\n", "kernel.yaml:5: has the tag 'tag:yaml.org,2002:omap'; ", id="omap"),
    pytest.param(DENSE.replace("128", "!!int 128"), "kernel.yaml:3: has the tag 'tag:yaml.org,2002:int'", id="tagged"),
    pytest.param(
        DENSE + "tile: {<<: {m: 64}}\n",
        "kernel.yaml:5: has the merge key <<, which is not supported; write the ",
        id="merge",
    ),
    pytest.param("%YAML 1.1\n---\n" + DENSE, "kernel.yaml:1: declares YAML 1.1; ", id="yaml-1.1"),
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
    pytest.param(DENSE.replace("128", "!size 128"), "kernel.yaml:3: has the tag '!size'; tags are not ", id="tag"),
    pytest.param(
        DENSE + "{a: 1}: 2\n", "kernel.yaml:5: {'a': 1}: is a mapping or a list; names of", id="mapping-as-key"
    ),
    pytest.param(DENSE + "[1, x]: 2\n", "kernel.yaml:5: [1, 'x']: is a mapping or a list", id="list-as-key"),
    pytest.param(
        DENSE + "? {a: [1]}\n: 2\n",
        "kernel.yaml:5: {'a': [1]}: is a mapping or a list; names of",
        id="key-in-key",
    ),
    pytest.param(DENSE + "---\nop: x\n", "kernel.yaml:5: expected a single document", id="two-documents"),
    pytest.param(DENSE + "\x00", "kernel.yaml: is not YAML: unacceptable character", id="nul"),
    pytest.param("", "kernel.yaml: is empty; a spec is a mapping of fields", id="empty"),
    pytest.param("- op\n", "kernel.yaml: a spec is a mapping of fields, and this is of type list", id="list"),
    pytest.param(b"op: \xff\n", "kernel.yaml: is not UTF-8 (byte 4 is 0xff)", id="not-utf-8"),
    pytest.param(DENSE.encode("utf-16"), "kernel.yaml: is not UTF-8", id="utf-16"),
]
"""Texts, and the beginnings of the messages that refuse them."""


@pytest.mark.parametrize(("text", "message"), REFUSED)
def test_refused_with_place_and_field(write_yaml: Write, text: str | bytes, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        read_spec(write_yaml(text))
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


VALUES: dict[str, object] = {
    **{"~": None, "null": None, "Null": None, "'null'": "null", "": None, "''": "", "=": "=", "<<": "<<"},
    **{"true": True, "True": True, "TRUE": True, "on": "on", "yes": "yes", "n": "n", "'true'": "true"},
    **{"17": 17, "+17": 17, "-17": -17, "017": 17, "0o17": 15, "0x1F": 31, "0b11": "0b11", "1_000": "1_000"},
    **{"'17'": "17", "1:30": "1:30", "-_": "-_", "0o9": "0o9", "2001-01-01": "2001-01-01"},
    **{"1.5": 1.5, ".5": 0.5, "5.": 5.0, "1e3": 1000.0, "1.5e-3": 0.0015, "1.5.1": "1.5.1", "'1.5'": "1.5"},
    **{".inf": float("inf"), "-.INF": float("-inf"), ".nan": float("nan"), "inf": "inf", "! 12": "12"},
    **{"[-x, y]": ["-x", "y"], "{a: c:d}": {"a": "c:d"}, '"\\/"': "/", '"\\u00e9"': "\u00e9"},
    **{"|\n x\n y": "x\ny", ">-\n x\n y": "x y", "x # y": "x", "x#y": "x#y", "'\t'": "\t"},
}
"""Values of a field, as a file has them, by what they are."""


@pytest.mark.parametrize("loader", [yaml.CSafeLoader, yaml.SafeLoader])
def test_scalars_are_those_of_yaml_1_2(loader: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yaml_nodes, "LOADER", loader)
    read = {value: read_yaml(f"a: {value}", "x").fields["a"] for value in VALUES}
    wrong = [f"{value!r}: {read[value]!r}" for value, wanted in VALUES.items() if repr(read[value]) != repr(wanted)]
    assert not wrong, "\n".join(wrong)


def test_the_parser_in_python_reads_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation without libyaml reads shipped specs with the same fields at the same places."""
    texts = [*SPELLINGS, *(spec_text(path) for path in list(shipped_files().values())[::10])]
    by_default = [repr(read_yaml(text, "x")) for text in texts]
    monkeypatch.setattr(yaml_nodes, "LOADER", yaml.SafeLoader)
    assert [repr(read_yaml(text, "x")) for text in texts] == by_default


@pytest.mark.parametrize(
    ("before", "values", "after"),
    [
        ("a: 1 # one\nb: 2\n", {"a": 3}, "a: 3 # one\nb: 2\n"),
        ("a: 1\n# end\n", {"b": "x", "c": True}, "a: 1\nb: x\nc: true\n# end\n"),
        ("a: 1", {"b": None}, "a: 1\nb: null\n"),
        ("a: 1\r\n", {"b": "on"}, 'a: 1\r\nb: "on"\r\n'),
        ("a:\nb: 1\n", {"a": {"m": 1}}, "a: {m: 1}\nb: 1\n"),
        ("a: {m: 1,  n: 2}  # x\n", {"a": {"n": 3, "k": 4}}, "a: {m: 1,  n: 3, k: 4}  # x\n"),
        ("a: {}\n", {"a": {"n": 3}}, "a: {n: 3}\n"),
        ("a:\n  m: 1 # x\n  n: 2\n\nb: 1\n", {"a": {"m": 3, "k": 4}}, "a:\n  m: 3 # x\n  n: 2\n  k: 4\n\nb: 1\n"),
        ("{a: 1, b: 2}", {"a": 3, "c": 4}, "{a: 3, b: 2, c: 4}"),
        ("a: &x 1\nb: *x\n", {"a": 2}, "a: &x 2\nb: *x\n"),
        ("a: &x {m: 1}\nb: *x\n", {"b": {"m": 2}}, "a: &x {m: 1}\nb: {m: 2}\n"),
        ("a: |\n  x\n  y\n", {"b": 1}, "a: |\n  x\n  y\nb: 1\n"),
        ("\ufeffa: 1\n", {"a": 2}, "\ufeffa: 2\n"),
        ("a: [1,\n  2]\nb: 'é'\n", {"a": 2, "b": "é"}, 'a: 2\nb: "\\u00e9"\n'),
    ],
)
def test_values_are_replaced_where_they_stand(before: str, values: dict[str, object], after: str) -> None:
    assert with_values(read_yaml(before, "x"), values) == after


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
        f"{name}.yaml: {name!r} names the kernel, but is reserved in CUDA C++ or in the source: use another name"
    )


@pytest.mark.parametrize("name", ["kernel", "_x", "kernel_", "ints", "cuda_dense", "a__b", "logs2", "K"])
def test_other_file_names_are_fine(write_yaml: Write, name: str) -> None:
    assert read_spec(write_yaml(DENSE, f"{name}.yaml")).stem == name


@pytest.mark.parametrize("text", SPELLINGS)
def test_spelling_does_not_matter(write_yaml: Write, text: str) -> None:
    plain = read_spec(write_yaml(DENSE, "plain.yaml"))
    other = read_spec(write_yaml(text, "other.yaml"))
    assert other.spec == plain.spec
    assert other.spec.hash == plain.spec.hash


def test_origin_is_never_absolute(write_yaml: Write) -> None:
    path = write_yaml(DENSE)
    assert read_spec(path.resolve()).origin == read_spec(path).origin == "kernel.yaml"
