"""What is known of other compilers than that of the receipts, and what is refused with them."""

from __future__ import annotations

import contextlib
import pickle
import re
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement
from scripts import SCRIPTS, imported

from codegen.errors import CodegenError
from codegen.installation import install_command
from codegen.library import NamedSpec, find_spec, shipped_specs
from codegen.prune import without_comments
from codegen.receipts import MissingReceipt, Receipt, read_receipt, receipt_path, source_sha256
from codegen.render import generate
from runtime.compile import compilers, toolchain
from runtime.compile.compiler import Compiled, compile_spec
from runtime.errors import SpillError

pytestmark = pytest.mark.nvrtc

PROJECT = Path(__file__).resolve().parents[3]
OTHER = "nvidia-cuda-nvrtc 13.5.37"
NAME = "l4_topk32_d64"
UPDATE = "run: python scripts/compilers.py --folder DIR"


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with imported("compilers", SCRIPTS) as module:
        yield module


def receipts() -> dict[str, Receipt]:
    """The receipts of the shipped kernels that have one, by name."""
    found = {}
    for named in shipped_specs():
        with contextlib.suppress(MissingReceipt):
            found[named.stem] = read_receipt(named, receipt_path(named))
    return found


def asked_for(extra: str) -> list[Requirement]:
    told = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    return [Requirement(each) for each in told[extra]]


def test_the_default_extra_installs_the_compiler_of_the_receipts() -> None:
    packages = {receipt.cubin.compiler_package for receipt in receipts().values()}
    assert packages == {compilers.record().compiler}
    name, _, version = compilers.record().compiler.partition(" ")
    (nvrtc,) = (each for each in asked_for("cu13") if each.name == name)
    assert str(nvrtc.specifier) == f"=={version}"
    assert [extra for extra in ("cu13", "cu12") if compilers.mend().endswith(f"[{extra}]'")] == ["cu13"]
    for each in asked_for("cu13"):  # what the other extra allows beside it
        (wider,) = (other for other in asked_for("cu13-any") if other.name == each.name)
        assert version in wider.specifier or not each.name.startswith("nvidia-cuda-nvrtc")
    assert "13.5.37" in next(each for each in asked_for("cu13-any") if each.name == name).specifier


def test_the_record_has_a_version_of_each_cuda_that_the_extras_allow() -> None:
    record = compilers.record()
    assert list(record.versions) == sorted(record.versions, key=compilers.numbers)
    minors = {".".join(version.split(".")[:2]) for version in record.versions}
    assert minors >= {"12.6", "12.8", "12.9", "13.1", "13.2", "13.3", "13.4", "13.5"}
    assert {*record.spills, *record.refused} <= {*record.versions}


def test_what_the_record_says_is_of_the_sources_as_they_are() -> None:
    record = compilers.record()
    told = {stem for each in (*record.spills.values(), *record.refused.values()) for stem in each}
    assert told and told <= {*record.code}
    code = {stem: without_comments(generate(find_spec(stem)).source) for stem in told}
    stale = [stem for stem in told if record.code[stem] != source_sha256(code[stem])]
    assert not stale, f"{stale}: {UPDATE}"
    assert compilers.troubles(OTHER).startswith("h100_paged_prefill_d128 spills 36 bytes")
    page = (PROJECT / "docs" / "guide" / "install.md").read_text(encoding="utf-8")
    (line,) = (each for each in page.split("\n\n") if "compilers.json" in each)
    assert all(f"`{stem.removesuffix('_bf16')}`" in line for stem in told)
    assert {version.rpartition(".")[0] for version in record.spills} == {"13.4", "13.5"} and "13.4 and 13.5" in line
    assert compilers.troubles("system 13.5.37") == compilers.troubles(compilers.record().compiler) == ""


def test_the_record_has_every_verified_kernel() -> None:
    known = {*compilers.record().code}
    wrong = (receipts().keys() - known) | (known - {named.stem for named in shipped_specs()})
    assert not wrong, f"{sorted(wrong)}: {UPDATE}"


def test_another_compiler_is_told_by_name_with_the_command_that_mends_it() -> None:
    known = compilers.record().compiler
    assert compilers.caveat(known) == ""
    assert compilers.caveat(OTHER) == (
        f"{OTHER} is not the compiler of the receipts, {known}: its code differs and was not tested: "
        f"{install_command('cu13')}"
    )
    assert "for drivers of CUDA 13" in compilers.caveat("nvidia-cuda-nvrtc-cu12 12.8.93")


def spilling(named: NamedSpec, count: int) -> Compiled:
    """A kernel as a compiler would make it that spills so many bytes."""
    compiled = compile_spec(named)
    return replace(compiled, log=re.sub(r"\d+ bytes spill stores", f"{count} bytes spill stores", compiled.log))


def test_a_shipped_kernel_is_refused_where_its_code_spills(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilers, "compiler_version", lambda: ("NVRTC 13.5", OTHER))
    named = find_spec(NAME)
    compilers.check_spills(spilling(named, 0))
    for each in (named, find_spec(named.spec)):  # under whatever name it is called
        with pytest.raises(SpillError) as caught:
            compilers.check_spills(spilling(each, 24))
        assert str(caught.value) == (
            f"{NAME} is refused with {OTHER}, whose code spills 24 bytes; the code of {compilers.record().compiler}, "
            f"the compiler of its receipt, does not: {compilers.mend()}"
        )
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    own = find_spec({**named.spec.model_dump(mode="json", by_alias=True), "lse": not named.spec.lse})  # type: ignore[union-attr]
    assert own.spec not in [each.spec for each in shipped_specs()]
    compilers.check_spills(spilling(own, 24))


def test_the_script_records_what_each_version_makes_of_a_kernel(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = toolchain.nvrtc().library
    compiler = script.Compiler("13.0.88", library, ())
    kernel = generate(find_spec(NAME))
    row = script.outcome(compiler, kernel)
    assert (row["kernel"], row["spills"]) == (NAME, 0) and row["registers"] > 32
    broken = replace(kernel, source="#error no such thing\n")
    refused = script.outcome(compiler, broken)
    assert "no such thing" in refused["refused"] and "spills" not in refused
    results = script.Results(tmp_path / "results.jsonl")
    results.add(row)
    results.add({**refused, "version": "13.5.37", "code": row["code"]})
    again = script.Results(tmp_path / "results.jsonl")
    assert again.rows == results.rows
    todo = [(version, each.named.stem) for version, each in script.todo([kernel], ["12.6.85", "13.0.88"], again)]
    assert todo == [("12.6.85", NAME)]
    found = script.recorded([kernel], ["13.0.88", "13.5.37"], again.rows)
    assert found.spills == {} and [*found.refused["13.5.37"]] == [NAME] and found.code == {NAME: row["code"]}
    assert found.troubles("13.5.37") == {NAME: "does not compile"}
    assert not [*script.todo([kernel], ["13.0.88", "13.5.37"], script.Results(tmp_path / "none.jsonl", found))]
    assert (
        script.recorded([kernel], found.versions, {(r["version"], r["code"]): r for r in script.rows_of(found)})
        == found
    )
    other: Any = lambda named: Receipt.model_construct(cubin=type("C", (), {"compiler_package": named.stem}))  # noqa: E731
    monkeypatch.setattr(script, "receipt_of", other)
    with pytest.raises(CodegenError, match="receipts have several compilers"):
        script.recorded([kernel, generate(find_spec("l4_bsr_sddmm_b64"))], [], {})
