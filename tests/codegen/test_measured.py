"""Rows of benchmarks and the code that they were measured with; nothing is compiled."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from codegen.errors import CodegenError
from codegen.library import NamedSpec, find_spec
from codegen.receipts import source_sha256
from codegen.render import render

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "measured.py"
PACKAGE = "nvidia-cuda-nvrtc 13.0.88"
REPORT = {"versions": {"compiler": PACKAGE}}


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("measured", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, for which every kernel is compiled to the code "a"."""
    module = load()
    monkeypatch.setattr(module, "code_sha256", lambda named: "a")
    monkeypatch.setattr(module.toolchain, "compiler_version", lambda: ("NVRTC 13.0", PACKAGE))
    return module


def kernel_of(record: dict[str, Any]) -> NamedSpec:
    return find_spec(record["name"])


def test_a_record_names_spec_source_and_code(script: ModuleType, named: NamedSpec) -> None:
    found = script.kernel_fields(named)
    assert found["spec"]["op"] == "attention"
    assert (found["source_sha256"], found["code_sha256"]) == (source_sha256(render(named)), "a")
    failed = script.kernel_fields(named, ran=False)
    assert failed == {**found, "source_sha256": None, "code_sha256": None}


@pytest.mark.parametrize(
    ("code", "rebound"), [({"code_sha256": "a"}, True), ({"code_sha256": "b"}, False), ({}, False)]
)
def test_a_row_moves_to_todays_source_only_with_its_code(
    script: ModuleType, named: NamedSpec, code: dict[str, str], rebound: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    record = {"name": named.stem, "source_sha256": "0" * 64, "results": {"ours": 1}, **code}
    before = dict(record)
    script.rebind(REPORT, [record], kernel_of)
    assert record == (before | {"source_sha256": source_sha256(render(named))} if rebound else before)
    assert (named.stem in capsys.readouterr().out) is rebound


def test_a_row_of_todays_source_is_not_told(
    script: ModuleType, named: NamedSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    record = {"name": named.stem, **script.kernel_fields(named)}
    script.rebind(REPORT, [record], kernel_of)
    assert capsys.readouterr().out == "" and record == {"name": named.stem, **script.kernel_fields(named)}


def test_rows_that_did_not_run_or_whose_spec_is_gone_stay(script: ModuleType, named: NamedSpec) -> None:
    failed = {"name": named.stem, "source_sha256": None, "code_sha256": None}
    gone = {"name": "no_such_spec", "source_sha256": "0" * 64, "code_sha256": "a"}
    with pytest.raises(CodegenError):
        kernel_of(gone)
    records = [dict(failed), dict(gone)]
    script.rebind(REPORT, records, kernel_of)
    assert records == [failed, gone]


def test_the_hash_of_a_kernel_is_of_code_and_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    module = load()
    asked: list[str] = []

    def hash_of(name: str, code: bytes, launch: dict[str, int]) -> str:
        def compiled(named: NamedSpec, target: str) -> SimpleNamespace:
            asked.append(target)
            return SimpleNamespace(code=code, plan=SimpleNamespace(launch=lambda: launch))

        monkeypatch.setattr(module, "compile_spec", compiled)
        found: str = module.code_sha256(find_spec(name))
        return found

    first = hash_of("h100_topk32", b"a", {"threads": 384})
    assert first == hash_of("h100_topk32", b"a", {"threads": 384})
    others = hash_of("h100_topk32", b"b", {"threads": 384}), hash_of("h100_topk32", b"a", {"threads": 256})
    assert len({first, *others}) == 3
    hash_of("l4_dense", b"a", {})
    assert asked == ["cubin"] * 4 + ["ptx"]


def test_another_compiler_proves_nothing(script: ModuleType) -> None:
    report = {"versions": {"compiler": "nvidia-cuda-nvrtc 12.8.93"}}
    with pytest.raises(SystemExit, match=r"compiled with nvidia-cuda-nvrtc 12\.8\.93, and this is .*13\.0\.88"):
        script.rebind(report, [], kernel_of)
