"""The site of ``codegen report``: what its pages say, where their links lead, and what is refused."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from codegen.errors import CodegenError, FileError
from codegen.library import ROOT, find_spec, shipped_specs
from codegen.planning import plan_for
from codegen.prune import without_comments
from codegen.receipts import Receipt, source_sha256, state
from codegen.render import generate, render
from runtime.cli import app
from runtime.git import ELSEWHERE
from runtime.tools.report import cli, patterns, pipeline, site, tree
from runtime.tools.report.chain import links
from runtime.tools.report.changes import changes
from runtime.tools.report.kernels import Kernel, Record, kernel_of, known_records
from runtime.tools.report.measurements import by_spec, results, rows_of
from runtime.tools.report.resources import resources_of
from runtime.tools.report.roofline import machine_of, roofline
from runtime.tools.report.tree import Tree

# Lists and data sets; no ring, microseconds; PTX; no pattern.
KERNELS = ("h100_topk32", "h100_bsr_spmm_b128_n16", "l4_topk32", "h100_select_topk")
CLEAN = Tree("0123456789abcdef0123456789abcdef01234567")
Run = Callable[..., tuple[int, str, str]]


class Page(HTMLParser):
    """What a page refers to, what can be referred to, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.loads: list[str] = []
        self.words = ""
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        told = {name: value or "" for name, value in attrs}
        self.ids += [told["id"]] if "id" in told else []
        if tag == "a" and "href" in told:
            self.links.append(told["href"])
        else:
            self.loads += [told[name] for name in ("src", "href", "srcset", "data", "xlink:href") if name in told]
        if tag not in ("meta", "link", "br", "wbr", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in ("rect", "path"), tag

    def handle_data(self, data: str) -> None:
        self.words += data


def report(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["report", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site") / "report"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree, "tree_of", lambda out: CLEAN)
        code, out_text, err = report(*KERNELS, "--out", str(out))
    assert code == 0, err  # on a slow machine progress is written
    assert "4 kernels" in out_text
    return out


@pytest.fixture(scope="module")
def pages(folder: Path) -> dict[str, Page]:
    return {path.name: Page(path.read_text(encoding="utf-8")) for path in folder.glob("*.html")}


def kernel(name: str) -> Kernel:
    return kernel_of(find_spec(name), known_records())


def test_a_page_a_kernel(pages: dict[str, Page]) -> None:
    assert set(pages) == {"index.html", *(f"kernel-{name}.html" for name in KERNELS)}
    for name, page in pages.items():
        assert not page.open, f"{name}: {page.open} is not closed"
        assert len(page.ids) == len(set(page.ids)), name
        if name != "index.html":
            assert set(site.SECTIONS) <= set(page.ids)


def test_every_link_leads_somewhere(pages: dict[str, Page], folder: Path) -> None:
    for name, page in pages.items():
        for link in page.links:
            target, _, anchor = link.partition("#")
            assert target or anchor, f"{name}: an empty link"
            assert (folder / (target or name)).is_file(), f"{name}: {link}"
            assert not anchor or anchor in pages[target or name].ids, f"{name}: {link}"


def test_nothing_is_loaded_from_elsewhere(pages: dict[str, Page], folder: Path) -> None:
    for name, page in pages.items():
        assert set(page.loads) == {"data:,", "report.css"}, name
    style, script = (folder / "report.css").read_text(), (site.PAGES / "report.js").read_text()
    assert not re.search(r"url\(|@import|https?:", style)
    assert not re.search(r"https?:|\bfetch\b|XMLHttpRequest|\bimport\b|WebSocket|eval\(", script)


def test_a_page_says_what_is_known(pages: dict[str, Page]) -> None:
    found = kernel("h100_topk32")
    words = pages["kernel-h100_topk32.html"].words
    assert generate(found.named).source in words
    assert found.receipt is not None and found.receipt.verification is not None
    for case in found.receipt.verification.cases:
        assert f"{case.name}{case.description}{case.max_error:.1e}" in words.replace("\n", "")
    for sha256 in (found.named.spec.hash, found.source_sha256, found.receipt.cubin.sha256):
        assert sha256 in words
    for row in rows_of(found, by_spec(results())):
        for call in row.calls:
            assert call.single is None or f"{call.single:.1f}" in words
    assert "each block of 128 queries sees 32 listed blocks of 128 keys" in words
    assert "no sparsity pattern" in pages["kernel-h100_select_topk.html"].words
    assert "us, cold" in pages["kernel-h100_bsr_spmm_b128_n16.html"].words
    assert "PTX" in pages["kernel-l4_topk32.html"].words


def test_the_same_tree_gives_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    """In another process, with other hashes of strings, from another folder, and whatever was there before."""
    code = (
        "import sys; from pathlib import Path; from runtime.cli import app; from runtime.tools.report import tree\n"
        f"tree.tree_of = lambda out: tree.Tree({CLEAN.commit!r})\n"
        "app(['report', *sys.argv[1:]])"
    )
    environment = {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "47", "PATH": "/usr/bin:/bin", "TZ": "Asia/Tokyo"}
    command = [sys.executable, "-c", code, *reversed(KERNELS), "--out", "other"]
    subprocess.run(command, cwd=tmp_path, check=True, env=environment, capture_output=True)
    assert contents(tmp_path / "other") == contents(folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_dirty_tree_is_told_on_every_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "tree_of", lambda out: Tree(CLEAN.commit, ("specs/<b>.yaml",)))
    code, out, _ = report("l4_topk32", "--out", str(tmp_path / "out"))
    assert code == 0 and "the tree has 1 changed file since commit 0123456789ab" in out
    for path in (tmp_path / "out").glob("*.html"):
        text = path.read_text(encoding="utf-8")
        assert '<div class="banner"' in text
        assert "<code>specs/&lt;b&gt;.yaml</code>" in text


def test_a_clean_tree_has_no_banner(folder: Path) -> None:
    for path in folder.glob("*.html"):
        text = path.read_text(encoding="utf-8")
        assert "banner" not in text
        assert f"<code>{CLEAN.commit}</code>." in text


def git(folder: Path, *arguments: str) -> str:
    own = ("-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    return subprocess.run(
        ["git", "-C", str(folder), *own, *arguments], check=True, capture_output=True, text=True
    ).stdout


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with three kernels, two of them twins, and a row of one; the second commit has others."""
    root = tmp_path / "repository"
    (root / "generated").mkdir(parents=True)
    (root / "benchmarks" / "results").mkdir(parents=True)
    git(tmp_path, "init", "-q", str(root))
    for name in ("h100_topk32", "l4_topk32"):
        source, receipt = (ROOT / "generated" / f"{name}{suffix}" for suffix in (".cu", ".json"))
        (root / "generated" / source.name).write_bytes(source.read_bytes())
        found = Receipt.read(receipt).model_copy(update={} if name == "h100_topk32" else {"twins": {}})
        found.write(root / "generated" / receipt.name)
    write_row(root, 600.0)
    git(root, "add", "-A")
    git(root, "commit", "-qm", "one")
    path = root / "generated" / "h100_topk32.json"
    receipt = Receipt.read(path)
    changed = receipt.model_copy(update={"cubin": receipt.cubin.model_copy(update={"sha256": "ab" * 32})})
    changed.write(path)
    write_row(root, 660.0)
    (root / "generated" / "l4_topk32.cu").unlink()
    (root / "generated" / "l4_topk32.json").unlink()
    git(root, "add", "-A")
    git(root, "commit", "-qm", "two")
    return root


def write_row(root: Path, tflops: float) -> None:
    spec = json.loads(find_spec("h100_topk32").spec.canonical_json())
    row = {"device": "GPU", "name": "row", "data": "std1", "spec": spec, "results": {"ours": {"tflops": tflops}}}
    (root / "benchmarks" / "results" / "rows.jsonl").write_text(json.dumps(row) + "\n")


def test_what_two_commits_differ_in(repository: Path) -> None:
    found = changes(("HEAD~1", "HEAD"), repository)
    assert found.commits == tuple(git(repository, "rev-parse", "HEAD~1", "HEAD").split())
    assert found.count == 3
    topk, gone = found.changed
    assert (topk.stem, topk.told, gone.stem, gone.told) == ("h100_topk32", "", "l4_topk32", "removed")
    same = {part for part, (one, other) in topk.parts.items() if one == other}
    assert same == {"spec", "source"}
    assert topk.parts["cubin"][1] == "ab" * 32
    assert topk.parts["spec"][0] == find_spec("h100_topk32").spec.hash
    assert gone.parts["source"][1] == "" and gone.verified[1] == "no such kernel"
    (row,) = topk.rows
    assert (row.name, row.before, row.after, row.change) == ("row, std1, GPU (TFLOPS)", "600 / -", "660 / -", "+10.0%")
    assert changes(("HEAD", "HEAD"), repository).changed == ()
    page = Page(site.changes_page(found, CLEAN, ()))
    assert "+10.0%" in page.words and "removed" in page.words and not page.open


def test_a_twin_is_a_kernel_of_a_commit(repository: Path) -> None:
    path, twin = repository / "generated" / "h100_topk32.json", find_spec("h100_topk32_bf16")
    receipt = Receipt.read(path)
    own = receipt.twins["bf16"].model_copy(update={"verification": None})
    receipt.including(twin, own).write(path)
    git(repository, "commit", "-qam", "three")
    first, second = changes(("HEAD~1", "HEAD"), repository).changed
    assert (first.stem, second.stem) == ("h100_topk32", "h100_topk32_bf16")
    assert {part for part, (one, other) in first.parts.items() if one != other} == {"receipt"}  # the file is the same
    assert second.verified[1] == "compiled, never run on a GPU"
    assert second.parts["spec"] == (twin.spec.hash, twin.spec.hash)
    assert second.parts["source"][1] == source_sha256(render(twin))


def test_receipts_of_commits_that_cannot_be_read_are_named(repository: Path) -> None:
    path = repository / "generated" / "h100_topk32.json"
    receipt = json.loads(path.read_text())
    receipt["verification"]["cases"][0]["passed"] = "yes"
    path.write_text(json.dumps(receipt))
    git(repository, "commit", "-qam", "three")
    (topk,) = changes(("HEAD~1", "HEAD"), repository).changed
    assert topk.verified[1].startswith("a receipt that cannot be read: verification.cases.0.passed: is 'yes'")
    (repository / "benchmarks" / "results" / "rows.jsonl").write_text('{"name": "row", "spec": {}, "results": 1}\n')
    git(repository, "commit", "-qam", "four")
    with pytest.raises(CodegenError, match=r"^benchmarks/results/rows.jsonl:1 \(row\): results: is 1"):
        changes(("HEAD~1", "HEAD"), repository)


def test_the_tree_of_a_report(repository: Path) -> None:
    out = repository / "report"
    assert tree.tree_of((), repository) == Tree(git(repository, "rev-parse", "HEAD").strip())
    out.mkdir()
    (out / "index.html").write_text("")
    assert tree.tree_of([out / "index.html"], repository).changed == ()
    assert tree.tree_of([out], repository).changed == ("report/index.html",)
    assert tree.tree_of([repository / "link" / ".." / "report" / "index.html"], repository).changed == ()
    (repository / "new\n.py").write_text("")
    (repository / "generated" / "h100_topk32.cu").write_text("")
    changed = ("generated/h100_topk32.cu", "new\\n.py")
    assert tree.tree_of([out / "index.html"], repository).changed == changed
    # From a folder of the repository, as where the project is a part of another one.
    assert tree.tree_of([out / "index.html"], repository / "generated").changed == changed


def test_variables_of_git_name_no_other_tree(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other"
    git(tmp_path, "init", "-q", str(other))
    (other / "theirs.py").write_text("")
    (repository / "ours.py").write_text("")
    right = tree.tree_of((), repository), changes(("HEAD~1", "HEAD"), repository)
    assert right[0].changed == ("ours.py",)
    named = {"DIR": other / ".git", "WORK_TREE": other, "INDEX_FILE": other / "index", "COMMON_DIR": other / ".git"}
    for name, place in {**named, "OBJECT_DIRECTORY": other / "objects"}.items():
        monkeypatch.setenv(f"GIT_{name}", str(place))
        assert (tree.tree_of((), repository), changes(("HEAD~1", "HEAD"), repository)) == right, name
    assert set(os.environ) & ELSEWHERE == {f"GIT_{name}" for name in (*named, "OBJECT_DIRECTORY")}


def test_only_what_a_report_wrote_is_replaced(tmp_path: Path) -> None:
    """A mark alone owns nothing: each file has the hash that it names, or all of the folder is left as it is."""
    out = tmp_path / "out"
    made = site.with_mark({"index.html": "a page", "kernel-x.html": "another"})
    assert site.write(out, made)
    mark = json.loads(made["report.json"])
    zeros = {"thesis.tex": "0" * 64}
    forgeries: list[tuple[dict[str, bytes | None], object]] = [
        ({"thesis.tex": b"mine"}, mark | {"files": zeros}),
        ({"thesis.tex": b"mine"}, mark | {"files": {**mark["files"], **zeros}}),
        (
            {"thesis.tex": b"mine"},
            mark | {"files": mark["files"] | {"thesis.tex": hashlib.sha256(b"mine").hexdigest()}},
        ),
        ({"index.html": b"mine"}, mark),
        ({"index.html": b"mine"}, mark | {"files": mark["files"] | {"index.html": "0" * 64}}),
        ({"kernel-x.html": b"mine", "index.html": None}, mark),
        ({}, mark | {"files": {**mark["files"], "../thesis.tex": "0" * 64}}),
        ({}, mark | {"files": list(mark["files"])}),
        ({}, mark | {"files": dict.fromkeys(mark["files"], 0)}),
        ({}, mark | {"made_by": "another"}),
        ({}, mark | {"schema_version": 2}),
        ({}, mark | {"more": 1}),
        ({}, [mark]),
    ]
    for files, forged in forgeries:
        shutil.rmtree(out)
        site.write(out, made)
        (out / "report.json").write_text(json.dumps(forged))
        for name, data in files.items():
            (out / name).unlink(missing_ok=True)
            if data is not None:
                (out / name).write_bytes(data)
        before = contents(out)
        with pytest.raises(FileError, match="which no report wrote in this form"):
            site.write(out, site.with_mark({"index.html": "newer"}))
        assert contents(out) == before and list(tmp_path.iterdir()) == [out], forged


def test_a_file_that_comes_at_the_last_moment_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    site.write(out, site.with_mark({"index.html": "a page"}))
    rename = Path.rename

    def late(path: Path, target: Path) -> Path:
        if path == out:
            (out / "thesis.tex").write_text("mine")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", late)
    with pytest.raises(FileError, match=r"thesis\.tex"):
        site.write(out, site.with_mark({"index.html": "newer"}))
    assert (out / "thesis.tex").read_text() == "mine" and (out / "index.html").read_text() == "a page"
    assert list(tmp_path.iterdir()) == [out]


def test_diff_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "tree_of", lambda out: CLEAN)
    code, _, err = report("l4_topk32", "--out", str(tmp_path / "out"), "--diff", "no such", "HEAD")
    assert code == 2 and err.count("\n") == 1 and "'no such' is not a commit" in err
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(tree, "in_repository", lambda: False)
    code, _, err = report("l4_topk32", "--out", str(tmp_path / "out"), "--diff", "A", "B")
    assert code == 2 and "not in a repository" in err
    assert not (tmp_path / "out").exists()


def test_what_is_no_report_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for name, files in {"full": {"notes.txt": "mine"}, "fake": {"report.json": "{}", "index.html": "mine"}}.items():
        (tmp_path / name).mkdir()
        for file, text in files.items():
            (tmp_path / name / file).write_text(text)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for name, said in (("file", "is not a folder"), ("full", "no report wrote"), ("fake", "no report wrote")):
        code, out, err = report("l4_topk32", "--out", str(tmp_path / name))
        assert (code, out, err.count("\n")) == (2, "", 1) and said in err
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_bad_specs_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    for argument, said in (
        ("l4_topk33", "did you mean"),
        ("{op: attention, arch: sm_90a, pattern: {kind: dense}}", "head_dim"),
    ):
        code, _, err = report(argument, "--out", str(tmp_path / "out"))
        assert code == 2 and said in err and err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_an_older_report_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "tree_of", lambda out: CLEAN)
    out = tmp_path / "out"
    report("l4_topk32", "h100_select_topk", "--out", str(out))
    _, told, _ = report("l4_topk32", "h100_select_topk", "--out", str(out))
    assert told.startswith("up to date")
    code, told, _ = report("l4_topk32", "--out", str(out), "--json")
    assert code == 0 and json.loads(told)["rows"][0]["kernel"] == "l4_topk32"
    assert set(contents(out)) == {"index.html", "kernel-l4_topk32.html", "report.css", "report.json"}
    (out / "notes.txt").write_text("mine")
    code, _, err = report("h100_select_topk", "--out", str(out))
    assert code == 2 and "notes.txt" in err
    assert (out / "kernel-l4_topk32.html").is_file()


@pytest.mark.parametrize("place", ["kernel_page", "write_folder"])
def test_an_interrupted_run_leaves_no_half_site(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    def interrupt_last(file: Path, *arguments: object, **options: object) -> object:
        return interrupt() if file.name == "report.json" else opened(file, *arguments, **options)  # type: ignore[arg-type, func-returns-value]

    opened = Path.open
    if place == "kernel_page":
        monkeypatch.setattr(site, place, interrupt)
    else:
        monkeypatch.setattr(Path, "open", interrupt_last)
    CliRunner().invoke(app, ["report", "h100_select_topk", "--out", str(tmp_path / "out")])
    assert list(tmp_path.iterdir()) == []


def test_hashes_are_what_the_commands_print() -> None:
    """In a shell, from the tree: those that need no compiler."""
    found = kernel("h100_topk32")
    checked = []
    for link in links(found):
        if "sha256sum" in link.check:
            told = subprocess.run(
                ["bash", "-c", link.check], cwd=ROOT, check=True, capture_output=True, text=True
            ).stdout
            assert told.split()[0] == link.sha256, link.what
            checked.append(link.what)
    assert checked == ["spec", "source", "seal", "receipt"]
    assert all(link.fits is not False for link in links(found))


def test_a_receipt_of_another_source_is_told() -> None:
    found = kernel("h100_topk32")
    assert found.receipt is not None
    source = found.receipt.source.model_copy(update={"sha256": "0" * 64})
    older = replace(found, receipt=found.receipt.model_copy(update={"source": source}), record=None)
    assert {link.what for link in links(older) if link.fits is False} == {"source"}
    assert not older.is_of_receipt
    page = Page(site.kernel_page(site.view_of(older, {}), CLEAN, (None, None)))
    assert "The receipt is of an earlier source" in page.words
    assert "No row on record names the spec" in page.words


def test_a_kernel_without_receipt_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = {
        "op": "attention",
        "arch": "sm_90a",
        "head_dim": 64,
        "pattern": {"kind": "causal"},
        "tile": {"m": 64, "n": 64},
    }
    found = kernel_of(find_spec(spec), {})
    monkeypatch.setenv("CODEGEN_NO_JIT", "1")
    monkeypatch.setenv("CODEGEN_CACHE_DIR", str(tmp_path))
    used, why = resources_of(found)
    assert used is None and "could not be compiled" in why
    words = Page(site.kernel_page(site.view_of(found, {}), CLEAN, (None, None))).words
    assert "No GPU is on record" in words and why in words and "there is no receipt" in words


def test_records_that_are_none_are_told(tmp_path: Path) -> None:
    known = {"l4_topk32": {**known_records()["l4_topk32"], "registers": "many"}}
    with pytest.raises(CodegenError, match=r"^tests/records/kernels.json: l4_topk32.registers: is 'many'; Input"):
        kernel_of(find_spec("l4_topk32"), known)
    (tmp_path / "tests" / "records").mkdir(parents=True)
    for text, said in (('{"a": ', "is not JSON"), ("[]", "is not an object")):
        (tmp_path / "tests" / "records" / "kernels.json").write_text(text)
        with pytest.raises(CodegenError, match=rf"^tests/records/kernels.json: {said}"):
            known_records(tmp_path)
    assert known_records(tmp_path / "tests") == {}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"results": {"ours": {"tflops": "fast"}}}, "results.ours.tflops: is 'fast'; Input should be a valid number"),
        ({"results": {"ours": {"tflop": 1.0}}}, "results.ours: has no time; expected one of tflops"),
        ({"results": {"ours": 1.0}}, "results.ours: is 1.0; Input should be a valid dictionary"),
        ({"results": [1.0]}, r"results: is \[1.0\]; Input should be a valid dictionary"),
        ({"results": ..., "source_sha256": None}, "results: Field required"),
        ({"failed": {"peer": 1}}, "failed.peer: is 1; Input should be a valid string"),
        ({"heads": "4"}, "heads.int: is '4'; Input should be a valid integer"),
        ({"device": 100}, "device: is 100; Input should be a valid string"),
        ({"name": 5}, "name: is 5; Input should be a valid string"),
    ],
)
def test_a_row_with_a_wrong_field_is_refused(change: dict[str, Any], says: str) -> None:
    spec = json.loads(find_spec("l4_topk32").spec.canonical_json())
    row = {"name": "row", "spec": spec, "results": {"ours": {"tflops": 1.0}}}
    assert "rows.json" in [
        each.file for each in rows_of(kernel("l4_topk32"), by_spec({"rows.json": json.dumps([row])}))
    ]
    wrong = {name: value for name, value in (row | change).items() if value is not ...}
    with pytest.raises(CodegenError, match=rf"^rows.json: rows.1( \(row\))?: {says}"):
        by_spec({"rows.json": json.dumps({"rows": [row, wrong]})})
    with pytest.raises(CodegenError, match=rf"^rows.jsonl:2( \(row\))?: {says}"):
        by_spec({"rows.jsonl": "".join(f"{json.dumps(each)}\n" for each in (row, wrong))})


def test_files_of_rows_that_are_no_json_are_refused() -> None:
    row = json.dumps({"name": "row", "spec": {}, "results": {"ours": {"tflops": 1.0}}})
    with pytest.raises(CodegenError, match=r"^rows.json: is not JSON"):
        by_spec({"rows.json": row[:-1]})
    with pytest.raises(CodegenError, match=r"^rows.jsonl:1: is not JSON"):
        by_spec({"rows.jsonl": row[:-1] + "\n"})
    assert by_spec({"rows.jsonl": row[:-1]}) == {}, "of a killed run the last line may be short"


def test_two_specs_of_one_name_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "l4_dense_dq.yaml"
    named = find_spec("l4_dense_dq")
    assert named.path is not None
    path.write_bytes(named.path.read_bytes())
    code, _, err = report("l4_dense_dq", str(path), "--out", str(tmp_path / "out"))
    assert code == 2 and "two of the specs are called l4_dense_dq" in err
    assert not (tmp_path / "out").exists()


def test_resources_are_of_the_source() -> None:
    found = kernel("h100_topk32")
    used, _ = resources_of(found)
    assert used is not None and found.receipt is not None
    assert used.source == "the receipt" and used.registers == found.receipt.cubin.registers
    recorded = replace(found, receipt=None)
    again, _ = resources_of(recorded)
    assert again is not None and "kernels.json" in again.source
    assert (again.cubin_sha256, again.instructions) == (used.cubin_sha256, used.instructions)


def test_rings_have_the_stages_of_the_plan() -> None:
    """Each place of a ring has as many bytes as any other, and those that the source names."""
    for named in shipped_specs():
        plan = plan_for(named)
        constants = {constant.name: constant.value for constant in plan.constants}
        for region, ring in pipeline.rings(plan):
            where = f"{named.stem}: {region.name}"
            assert region.bytes % ring.stages == 0, where
            if plan.spec.op == "attention" and region.name in ("K", "V") and "kKvBytes" in constants:
                of_stage = constants["kVBytes" if region.name == "V" and "kVBytes" in constants else "kKvBytes"]
                assert region.bytes == ring.stages * of_stage, where
        loading, computing = pipeline.workers(plan)
        warps = computing.warps * computing.groups + (0 if plan.spec.schedule == "multistage" else loading.warps)
        assert 32 * warps == plan.threads, named.stem


def test_rings_name_barriers_that_the_source_lists() -> None:
    unlisted = {"h100_ladder_07_tma", "h100_tile_copy_tma"}  # kFullOffset, without a list in the overview
    for named in shipped_specs():
        made = generate(named)
        if named.stem in unlisted:
            assert {ring.full for _, ring in pipeline.rings(made.plan)} == {"full[i]"}
            assert any(region.name == "Full" for region in made.plan.shared)
            continue
        text = "\n".join(made.overview)
        for region, ring in pipeline.rings(made.plan):
            where = f"{named.stem}: {region.name}"
            assert bool(ring.full) == bool(ring.empty) == (made.plan.spec.copy_ == "tma"), where
            assert ring.full in text and ring.empty in text, where


def test_results_leave_through_the_regions_that_say_so() -> None:
    for named in shipped_specs():
        for region in plan_for(named).shared:
            assert region.stores or "staging of" not in region.doc, f"{named.stem}: {region.name}"


def test_the_picture_has_rings_barriers_and_consumers() -> None:
    made = generate(find_spec("h100_topk32"))
    picture = str(pipeline.picture(made.plan))
    assert picture.count('class="stage"') == 2 * 4  # Q, K, V, work tiles
    assert picture.count("box consumer") == 2
    for name in ("q_full[i]", "k_full[i]", "k_empty[i]", "v_empty[i]"):
        assert f">{name}<" in picture


def test_patterns_are_those_that_oracles_use() -> None:
    causal = patterns.example(plan_for(find_spec("h100_causal")))
    assert causal is not None
    assert str(causal.picture).count("M") == 32 + 31  # a cell of each row on the diagonal, and those before it
    dense = patterns.example(plan_for(find_spec("h100_dense")))
    assert dense is not None and 'class="some"' not in str(dense.picture)
    window = patterns.example(plan_for(find_spec("h100_window2k")))
    assert window is not None and "8192 queries" in window.caption


def test_rooflines_are_of_the_device_that_was_measured() -> None:
    assert (machine_of("NVIDIA H100 80GB HBM3"), machine_of("NVIDIA L4")) == ("sm_90a", "sm_89")
    assert machine_of("NVIDIA H1") == ""
    found = kernel("l4_topk32")
    rows = rows_of(found, by_spec(results()))
    drawn = roofline(found.plan, rows)
    assert drawn is not None and "sm_90a" in drawn.caption and "64 FLOP per byte" in drawn.caption
    assert roofline(plan_for(find_spec("h100_tile_copy_tma")), []) is None


def test_the_index_of_all_kernels_is_made_of_what_is_committed() -> None:
    """Nothing is compiled: each shipped kernel's resources are on record."""
    known, found = known_records(), by_spec(results())
    entries = [site.entry_of(site.view_of(kernel_of(named, known), found)) for named in shipped_specs()]
    page = Page(site.index_page(entries, CLEAN, None))
    assert {entry["page"] for entry in entries} <= set(page.links)
    assert all(entry["registers"] for entry in entries)
    assert cli.ROOT == ROOT


def test_a_full_disk_leaves_the_older_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = site.with_mark({"index.html": "one"})
    assert site.write(tmp_path / "out", files)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("codegen.folders._swap", full)
    with pytest.raises(FileError, match="No space left"):
        site.write(tmp_path / "out", site.with_mark({"index.html": "two"}))
    assert contents(tmp_path / "out") == files


ODD = (
    None,
    True,
    -1,
    0,
    1e-320,
    1e308,
    10**400,
    float("nan"),
    float("inf"),
    "",
    "NaN",
    "\x1b[2J",
    [],
    [[1]],
    {},
    {"a": {}},
)


EDITS = 60


def places_of(node: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """All parts of a JSON value by their keys and numbers."""
    if place:
        yield place
    if isinstance(node, dict | list):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield from places_of(value, (*place, key))


def edited(data: Any, draw: random.Random) -> Any:
    """A copy of a JSON value with one or two parts replaced, renamed or left out."""
    data = copy.deepcopy(data)
    for _ in range(draw.randint(1, 2)):
        *parents, key = draw.choice(list(places_of(data)) or [("x",)])
        at = data
        for parent in parents:
            at = at[parent]
        way = draw.random()
        if way < 0.8 or isinstance(at, list):
            at[key] = draw.choice(ODD)
        elif way < 0.9:
            at.pop(key, None)
        else:
            at[draw.choice(("EXIT", "x\n", ""))] = at.pop(key, None)
    return data


def test_edited_inputs_give_a_page_or_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Receipts, records of compilations and rows of results, whatever they say."""
    monkeypatch.setattr(site, "cuda_html", lambda source: "")
    monkeypatch.setattr(site, "yaml_html", lambda text: "")
    named = find_spec("l4_topk32")
    made, path = generate(named), tmp_path / "l4_topk32.json"
    receipt = json.loads((ROOT / "generated" / "l4_topk32.json").read_text())
    receipt["verification"]["cases"] = receipt["verification"]["cases"][:2]
    record = known_records()["l4_topk32"]
    row = {
        "device": "NVIDIA H200",
        "name": "row",
        "data": "normal",
        "length": 8192,
        "source_sha256": receipt["source"]["sha256"],
        "spec": json.loads(named.spec.canonical_json()),
        "results": {"ours": {"tflops": 400.0, "error": 1e-3}, "FA3": {"tflops": 300.0}, "SDPA": {"tflops": 200.0}},
        "failed": {"FA4": "is not installed"},
    }
    pages = errors = 0
    for seed in range(EDITS):
        draw = random.Random(seed)
        which = seed % 3
        told = [edited(each, draw) if which == i else each for i, each in enumerate((receipt, record, row))]
        path.write_text(json.dumps(told[0]))
        try:
            read = Receipt.read(path) if which != 1 else None
            if which == 1 and isinstance(told[1], dict):
                told[1]["code"] = told[1].get("code") and source_sha256(without_comments(made.source))
            record_of = Record.model_validate(told[1]) if which == 1 else None
            standing = state(named, made.source, tmp_path)
            found = Kernel(named, made.plan, made.source, made.overview, read, path, standing, record_of)
            view = site.view_of(found, by_spec({"rows.json": json.dumps([told[2]])}))
            page = site.kernel_page(view, CLEAN, (None, None)) + site.index_page([site.entry_of(view)], CLEAN, None)
            assert "\x1b" not in page, seed
            pages += 1
        except (CodegenError, ValidationError):
            errors += 1
    assert pages > EDITS / 8 and errors > EDITS / 8
