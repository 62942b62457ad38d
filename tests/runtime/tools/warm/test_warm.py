"""``codegen warm``, records of runs, and the log of what is compiled."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from codegen.errors import CodegenError, FileError
from codegen.library import NamedSpec, find_spec
from codegen.receipts import source_sha256
from codegen.render import generate
from codegen.select import choose, parse_problem
from runtime import log
from runtime.cli import app
from runtime.compile import loading, recording, toolchain
from runtime.compile.cache import KernelCache
from runtime.errors import ToolchainError
from runtime.tools.warm.requests import read_requests

pytestmark = pytest.mark.nvrtc

run = CliRunner()
NAME = "l4_topk32_d64"
PROBLEM: dict[str, Any] = {
    "op": "bsr_spmm",
    "arch": "sm_89",
    "block": {"rows": 64, "cols": 64},
    "m": 256,
    "n": 64,
    "k": 256,
}
OWN = {"op": "tile_copy", "arch": "sm_89", "tile": {"m": 64, "n": 64}}


def warm(*arguments: str | Path) -> Any:
    return run.invoke(app, ["warm", *map(str, arguments)])


def ways(*arguments: str | Path) -> dict[str, str]:
    result = warm(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return {row["kernel"]: row["from"] for row in json.loads(result.stdout)["rows"]}


def test_a_recorded_run_is_warmed_under_the_names_that_it_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.yaml").write_text("op: tile_copy\narch: sm_89\ntile: {m: 64, n: 64}\n")
    record = tmp_path / "run.jsonl"
    kernels = [find_spec(NAME), find_spec(tmp_path / "mine.yaml"), find_spec(OWN)]
    monkeypatch.setenv("CODEGEN_RECORD", str(record))
    for named in (*kernels, *kernels):
        loading.code_of(generate(named), "cubin")
    loading.code_of(generate(kernels[0]), "ptx")
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert [(line["name"], line["target"]) for line in lines] == [
        *((named.stem, "cubin") for named in kernels),
        (NAME, "ptx"),
    ]
    monkeypatch.delenv("CODEGEN_RECORD")
    (tmp_path / "mine.yaml").unlink()
    assert [source_sha256(generate(each.named).source) for each in read_requests(record)] == [
        source_sha256(generate(named).source) for named in (*kernels, kernels[0])
    ]
    assert set(ways(record).values()) == {"cache"}
    KernelCache().clear()
    assert set(ways(record, "--jobs", "2").values()) == {"NVRTC"}
    assert set(ways(record).values()) == {"cache"}
    assert loading.obtained(generate(kernels[1]), "cubin")[1] == "cache", "of a file that is named as this one was"


def test_processes_and_threads_append_whole_lines(tmp_path: Path) -> None:
    record = tmp_path / "run.jsonl"
    code = (
        "import sys, threading\n"
        "from codegen.library import NamedSpec, find_spec\n"
        "from runtime.compile import recording\n"
        "spec = find_spec('l4_topk32_d64').spec\n"
        "def note(thread):\n"
        "    for i in range(40):\n"
        "        recording.note(NamedSpec(f'kernel_{sys.argv[1]}_{thread}_{i}', spec), 'cubin')\n"
        "        recording.note(NamedSpec(f'shared_{sys.argv[1]}_{i}', spec), 'cubin')\n"
        "threads = [threading.Thread(target=note, args=(each,)) for each in range(4)]\n"
        "[each.start() for each in threads]; [each.join() for each in threads]\n"
    )
    environment = {"CODEGEN_RECORD": str(record), "PYTHONPATH": ":".join(sys.path)}
    started = [subprocess.Popen([sys.executable, "-c", code, str(each)], env=environment) for each in range(3)]
    assert [each.wait() for each in started] == [0, 0, 0]
    names = Counter(json.loads(line)["name"] for line in record.read_text().splitlines())
    assert set(names.values()) == {1} and len(names) == 3 * (4 * 40 + 40)


def test_a_record_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODEGEN_RECORD", str(tmp_path / "none" / "run.jsonl"))
    with pytest.raises(FileError, match=r"none/run\.jsonl"):
        recording.note(find_spec(NAME), "cubin")
    (tmp_path / "none").mkdir()
    recording.note(find_spec(NAME), "cubin")
    assert len((tmp_path / "none" / "run.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize("suffix", ["yaml", "jsonl"])
def test_problems_and_specs_are_chosen_and_compiled(suffix: str, tmp_path: Path) -> None:
    entries = [PROBLEM, NAME, {"spec": NAME, "target": "ptx"}, {"spec": OWN}, {"spec": OWN, "name": "mine"}, NAME]
    file = tmp_path / f"problems.{suffix}"
    lines = [json.dumps(each) for each in entries]
    file.write_text("".join(f"- {line}\n" for line in lines) if suffix == "yaml" else "\n\n".join(lines))
    found = read_requests(file)
    assert [(each.named.stem, each.target) for each in found] == [
        (choose(parse_problem(PROBLEM)).named.stem, "cubin"),
        (NAME, "cubin"),
        (NAME, "ptx"),
        (find_spec(OWN).stem, "cubin"),
        ("mine", "cubin"),
    ]
    result = warm(file)
    assert result.exit_code == 0 and result.stdout.count("compiled") == 5, result.output
    for each in found:
        assert loading.obtained(generate(each.named), each.target)[1] == "cache"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", "\n\n", "a.jsonl: has no entry, expected problems or specs"),
        ("a.yaml", "[]", "a.yaml: has no entry"),
        ("a.yaml", "op: attention", "a.yaml: is a mapping, expected a list of problems and specs"),
        ("a.jsonl", '"l4_topk32_d64"\n{', "a.jsonl:2: "),
        ("a.jsonl", "3", "a.jsonl:1: is 3, expected the name of a spec or a mapping"),
        ("a.jsonl", '"l4_topk33"', "a.jsonl:1: no spec is named 'l4_topk33'"),
        ("a.yaml", "- l4_topk32_d64\n- {op: bsr_spmm, density: 2}", "a.yaml: entry 2: problem."),
        ("a.jsonl", '{"spec": "l4_topk32_d64", "target": "sass"}', "a.jsonl:1: target"),
        ("a.jsonl", '{"spec": {"op": "tile_copy"}, "color": 1}', "a.jsonl:1: color"),
        ("a.jsonl", '{"spec": {"op": "no"}}', "a.jsonl:1: op"),
        ("a.jsonl", '{"spec": {"op": "tile_copy"}, "name": "a b"}', "a.jsonl:1: "),
        ("none.jsonl", None, "none.jsonl"),
    ],
)
def test_bad_entries_are_refused_by_file_and_line(name: str, text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(CodegenError) as caught:
        read_requests(tmp_path / name)
    assert str(tmp_path) in str(caught.value) and message in str(caught.value)
    result = warm(tmp_path / name)
    assert result.exit_code == 2 and "Traceback" not in result.stderr and message in result.stderr


def test_cubins_of_a_folder_go_into_the_cache_or_are_told(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.jsonl").write_text(f'"{NAME}"\n')
    cubins = tmp_path / "cubins"
    assert "--cubins takes a folder with cubins" in warm(tmp_path / "run.jsonl", "--cubins", cubins).stderr
    cubins.mkdir()
    code = loading.obtained(generate(find_spec(NAME)), "cubin")[0].code
    KernelCache().clear()
    (cubins / f"{NAME}.cubin").write_bytes(code)
    assert ways(tmp_path / "run.jsonl", "--cubins", cubins) == {NAME: "folder"}
    assert ways(tmp_path / "run.jsonl", "--cubins", cubins) == {NAME: "receipt"}

    def missing() -> None:
        raise ToolchainError("NVRTC is not installed")

    with monkeypatch.context() as patch:
        for name in ("nvrtc", "compiler_version"):
            patch.setattr(toolchain, name, missing)
        assert loading.obtained(generate(find_spec(NAME)), "cubin")[1] == "receipt"
    KernelCache().clear()
    (cubins / f"{NAME}.cubin").write_bytes(code[:-1])
    monkeypatch.setenv("CODEGEN_NO_JIT", "1")
    result = warm(tmp_path / "run.jsonl", "--cubins", cubins, "--json")
    (row,) = json.loads(result.stdout)["rows"]
    assert result.exit_code == 1 and row["from"] == "" and "is not used: its SHA-256 is" in row["error"]
    assert "CODEGEN_NO_JIT=1 forbids compilation" in row["error"]
    result = warm(tmp_path / "run.jsonl")
    assert result.exit_code == 1 and f"FAILED                {NAME}: " in result.stdout


def test_a_compilation_is_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    kernel = generate(find_spec(NAME))
    with caplog.at_level(logging.INFO):
        loading.obtained(kernel, "cubin")
        loading.obtained(kernel, "cubin")
    (record,) = caplog.records
    package = toolchain.compiler_version()[1]
    assert record.name == "sparse_kernel_codegen" and record.getMessage().startswith(f"{NAME}: compiled in ")
    assert record.getMessage().endswith(f" s with {package}")
    with caplog.at_level(logging.DEBUG):
        loading.obtained(kernel, "cubin")
    assert caplog.records[-1].getMessage().startswith(f"{NAME}: from the cache, entry ")


def test_codegen_log_shows_it_on_standard_error(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "from codegen.library import find_spec; from codegen.render import generate\n"
        "from runtime.compile import loading\n"
        f"for _ in range(2): loading.obtained(generate(find_spec({NAME!r})), 'cubin')\n"
    )

    def said(**environment: str) -> list[str]:
        path = {"PYTHONPATH": ":".join(sys.path), "CODEGEN_CACHE_DIR": str(own_cache)}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env={**path, **environment}, capture_output=True, text=True, check=True)
        return done.stderr.splitlines()

    assert said() == []
    assert [line.split(",")[0] for line in said(CODEGEN_LOG="1")] == [f"codegen: {NAME}: from the cache"] * 2
    monkeypatch.setenv("CODEGEN_LOG", "yes")
    with pytest.raises(ToolchainError, match="CODEGEN_LOG is 'yes'; expected 1"):
        log.logger()


def test_threads_log_and_record_while_others_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODEGEN_RECORD", str(tmp_path / "run.jsonl"))
    spec = find_spec(NAME).spec
    names = [f"kernel_{i}" for i in range(50)]
    threads = [
        threading.Thread(target=lambda: [recording.note(NamedSpec(name, spec), "cubin") for name in names])
        for _ in range(4)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    lines = (tmp_path / "run.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["name"] for line in lines) == sorted(names)
