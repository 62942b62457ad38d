"""What the documents say about commands, files and combinations is so."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import runtime
from codegen.arch import ARCHS
from codegen.patterns import PATTERNS
from codegen.spec import MODELS

PROJECT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*PROJECT.glob("*.md"), *(PROJECT / "docs").rglob("*.md")])
README = (PROJECT / "README.md").read_text(encoding="utf-8")
CALLING = (PROJECT / "docs" / "calling.md").read_text(encoding="utf-8")
SPECS = (PROJECT / "docs" / "specs.md").read_text(encoding="utf-8")
LONGEST_LINE = 200
# Rows of docs/specs.md, by their first cells, whose lines are longer: the tables are written from the models later.
LONG_FIELDS = {
    *("`attention`", "`tile.m`", "`tile.n`", "`warp_rows`", "up to about four times the SMs; in `causal` with"),
    *("`block_lists`", "`b_layout`", "`wmma`", "`blocks_per_sm`"),
}
# Tables of docs/results.md, by their markers, with a cell for each workload: figures of two or three results each.
WIDE_TABLES = ("data-tflops-h100", "data-error-h100", "data-ratio-h100")


def path_name(path: Path) -> str:
    return path.relative_to(PROJECT).as_posix()


def anchors(path: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=path_name)
def test_links_lead_somewhere(path: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text(encoding="utf-8"))
    assert not [t for t in targets if not t.startswith("https://") and not (path.parent / t).exists()]


@pytest.mark.parametrize("path", DOCUMENTS, ids=path_name)
def test_links_lead_to_a_heading(path: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", path.read_text(encoding="utf-8")):
        assert anchor in anchors(path.parent / target if target else path), f"{target}#{anchor}"


@pytest.mark.parametrize("path", sorted((PROJECT / "docs").rglob("*.md")), ids=path_name)
def test_no_line_is_longer_than_one_can_follow(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    if path.name == "results.md":
        for name in WIDE_TABLES:
            text = re.sub(f"<!-- {name}:begin -->.*?<!-- {name}:end -->", "", text, flags=re.DOTALL)
    long = [line for line in text.splitlines() if len(line) > LONGEST_LINE]
    if path.name == "specs.md":
        long = [line for line in long if not any(line.startswith(f"| {cell}") for cell in LONG_FIELDS)]
    assert not long


def test_ci_runs_the_command_of_the_readme() -> None:
    (command,) = [line.strip() for line in README.splitlines() if line.endswith("&& pytest")]
    script = (PROJECT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert script[-1] == command
    assert "set -euo pipefail" in script


def test_readme_is_one_screen() -> None:
    assert len(README.partition("<!-- results:begin -->")[0].splitlines()) <= 40
    assert README.count("<!-- results:begin -->") == README.count("<!-- results:end -->") == 1


def test_table_of_combinations_is_the_code() -> None:
    told = set(re.findall(r"^\| `(\w+)` \| `(sm_\w+)` \| `(\w+)` \| `(\w+)` \| `(\w+)` \|$", SPECS, re.MULTILINE))
    assert told == {(c.op, arch.name, c.mma, c.copy, c.schedule) for arch in ARCHS.values() for c in arch.combinations}


def test_every_field_and_pattern_is_documented() -> None:
    fields = {field.alias or name for model in MODELS for name, field in model.model_fields.items()}
    assert not [field for field in fields if f"| `{field}` |" not in SPECS]
    assert not [kind for kind in PATTERNS if f"| `{kind}` |" not in SPECS]


def test_calls_have_the_arguments_that_the_document_names() -> None:
    pytest.importorskip("torch")
    from runtime.attention import AttentionKernel
    from runtime.bsr_sddmm import BsrSddmmKernel
    from runtime.bsr_spgemm import BsrSpgemmKernel
    from runtime.bsr_spmm import BsrSpmmKernel

    kernels = {"attn": AttentionKernel, "spmm": BsrSpmmKernel, "sddmm": BsrSddmmKernel, "spgemm": BsrSpgemmKernel}
    told = dict(re.findall(r"^    (\w+)\((.*validate=False)\)", CALLING, re.MULTILINE))
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
