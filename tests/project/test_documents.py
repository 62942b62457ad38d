"""What the documents say about commands, files and calls is so."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from each import for_each

import runtime

PROJECT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*PROJECT.glob("*.md"), *(PROJECT / "docs").rglob("*.md")])
README = (PROJECT / "README.md").read_text(encoding="utf-8")
CALLING = (PROJECT / "docs" / "guide" / "calling.md").read_text(encoding="utf-8")
LONGEST_LINE = 200  # bytes
MOST_OF_README = 75  # lines
WIDE_TABLE = re.compile(rb"<!-- modes: .*<!-- end of modes -->", re.DOTALL)  # a column for each of 19 modes


def path_name(path: Path) -> str:
    return path.relative_to(PROJECT).as_posix()


def anchors(path: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@for_each("path", lambda: DOCUMENTS, path_name)
def test_links_lead_somewhere(path: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text(encoding="utf-8"))
    assert not [t for t in targets if not t.startswith("https://") and not (path.parent / t).exists()]


@for_each("path", lambda: DOCUMENTS, path_name)
def test_links_lead_to_a_heading(path: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", path.read_text(encoding="utf-8")):
        assert anchor in anchors(path.parent / target if target else path), f"{target}#{anchor}"


def linked_from(path: Path) -> set[Path]:
    """The documents of the project that a document links to."""
    targets = re.findall(r"\]\(([^)#]+\.md)[^)]*\)", path.read_text(encoding="utf-8"))
    return {(path.parent / target).resolve() for target in targets if not target.startswith("https://")}


def test_every_document_is_reached_from_the_readme() -> None:
    reached, seen = {PROJECT / "README.md"}, set[Path]()
    while new := reached - seen:
        seen |= new
        reached |= {target for path in new for target in linked_from(path)}
    assert not [path_name(path) for path in DOCUMENTS if path not in reached]


@for_each("path", lambda: sorted((PROJECT / "docs").rglob("*.md")), path_name)
def test_no_line_is_longer_than_one_can_follow(path: Path) -> None:
    text = WIDE_TABLE.sub(b"", path.read_bytes())
    assert not [line for line in text.splitlines() if len(line) > LONGEST_LINE]


def test_ci_runs_the_command_of_the_readme() -> None:
    (command,) = [line.strip() for line in README.splitlines() if line.endswith("&& pytest")]
    script = (PROJECT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert f"({command})" in script, "in a shell of its own: mypy does not run where it fails"
    assert "set -euo pipefail" in script


def test_readme_is_one_screen() -> None:
    assert len(README.splitlines()) <= MOST_OF_README
    pictures = re.findall(r'(?:src|srcset)="([^"]+)"', README)
    assert len(pictures) == 2 and not [path for path in pictures if not (PROJECT / path).is_file()]


def test_calls_have_the_arguments_that_the_document_names() -> None:
    pytest.importorskip("torch")
    from runtime.kernels.attention import AttentionKernel
    from runtime.kernels.bsr_sddmm import BsrSddmmKernel
    from runtime.kernels.bsr_spgemm import BsrSpgemmKernel
    from runtime.kernels.bsr_spmm import BsrSpmmKernel

    kernels = {"attn": AttentionKernel, "spmm": BsrSpmmKernel, "sddmm": BsrSddmmKernel, "spgemm": BsrSpgemmKernel}
    told = dict(re.findall(r"^(\w+)\((.*validate=False[^)]*)\)", CALLING, re.MULTILINE))
    assert set(told) == set(kernels)
    for name, kernel in kernels.items():
        parameters = list(inspect.signature(kernel.__call__).parameters.values())[1:]
        called: list[str] = []
        for p in parameters:
            if p.kind is p.KEYWORD_ONLY and not any(name.startswith("*") for name in called):
                called.append("*")
            if p.kind is not p.VAR_KEYWORD:
                star = "*" if p.kind is p.VAR_POSITIONAL else ""
                called.append(star + p.name + ("" if p.default is p.empty else f"={p.default}"))
        assert told[name] == ", ".join(called)


def test_every_exception_is_documented() -> None:
    assert not [name for name in runtime.__all__ if name.endswith("Error") and f"`{name}`" not in CALLING]


def test_the_design_names_what_there_is() -> None:
    text = (PROJECT / "docs" / "reference" / "design.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 70, "one page"
    code = "\n".join(
        path.read_text(encoding="utf-8")
        for folder in ("codegen", "runtime")
        for path in (PROJECT / folder).rglob("*.py")
    )
    known = set(re.findall(r"\w+", code))
    told = set(re.findall(r"\b[a-z]+(?:_[a-z0-9]+)+\b|\b(?:[A-Z][a-z]+){2,}\b", text))
    assert {"parse_spec", "plan_for", "NamedSpec", "LaunchArgs", "load_kernel"} <= told
    assert told <= known, told - known
    files = re.findall(r"\bcodegen/[\w/]+(?:\.py)?", text)
    assert files
    assert not [name for name in files if not (PROJECT / name).exists()]


def words_of(*files: Path) -> set[str]:
    return {word for path in files for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))}


def names_there_are() -> set[str]:
    """Words of templates, specs and code, and names of files; not of the table of old names."""
    folders = (("templates", "*.j2"), ("codegen", "*.py"), ("runtime", "*.py"), ("specs", "*.yaml"))
    files = [path for folder, which in folders for path in (PROJECT / folder).rglob(which)]
    files.remove(PROJECT / "codegen" / "migrations.py")
    return words_of(*files) | {path.name.partition(".")[0] for path in files}


def test_the_glossary_names_what_there_is() -> None:
    page = (PROJECT / "docs" / "reference" / "glossary.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+?) \|", page, re.MULTILINE)
    told = {word for row in rows for name in re.findall(r"`([^`]+)`", row) for word in re.findall(r"\w+", name)}
    assert {"WorkTile", "PipelineState", "KvBlockIterator", "share_kv_loads", "PreparedBsr"} <= told
    known = names_there_are()
    assert "KeyBlocks" not in known, "an old name that would pass"
    assert told <= known, told - known


def test_the_recipes_name_what_there_is() -> None:
    """Names with an underscore or a capital inside: what is in no code is an old name."""
    text = (PROJECT / "docs" / "reference" / "adding.md").read_text(encoding="utf-8")
    code = " ".join(re.findall(r"`([^`]+)`", text))
    told = set(re.findall(r"\b[a-z]+(?:_[a-z0-9]+)+\b|\b\w*[a-z][A-Z]\w*", code))
    assert {"load_imbalanced", "kSubTileRows", "supports_stream_k", "KvBlockIterator"} <= told
    benchmarks, tests = ([*(PROJECT / folder).rglob("*.py")] for folder in ("benchmarks", "tests"))
    known = names_there_are() | {path.stem for path in benchmarks + tests} | words_of(*benchmarks)
    assert "KeyBlocks" not in known, "an old name that would pass"
    assert told <= known, told - known
