"""The tables of results: receipts in, rows out, and nothing where a receipt does not vouch for the source."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripts import load_script

from codegen.library import NamedSpec, find_spec
from codegen.receipts import Receipt, receipt_path, source_sha256
from codegen.render import render

PROJECT = Path(__file__).resolve().parents[2]
Make = Callable[[NamedSpec, str], Receipt]
README = "above\n<!-- results:begin -->\nold\n<!-- results:end -->\nbelow\n"


script = load_script("results_table")


@pytest.fixture
def write(receipt: Make, tmp_path: Path) -> Callable[..., None]:
    """Writes the receipt of a spec, some of its fields changed."""

    def write(named: NamedSpec, **changes: Any) -> None:
        data = json.loads(receipt(named, render(named)).model_dump_json())
        for field, value in changes.items():
            data[field] = data[field] | value if isinstance(value, dict) else value
        receipt_path(named, tmp_path).write_text(json.dumps(data))

    return write


def timed(shape: str, peer: str, peer_milliseconds: float, peer_tflops: float) -> dict[str, Any]:
    return {
        "shape": shape,
        "milliseconds": 2.0,
        "tflops": 600.0,
        "peer": peer,
        "peer_milliseconds": peer_milliseconds,
        "peer_tflops": peer_tflops,
    }


def words(text: str) -> str:
    """The caption of a table, in one line."""
    return " ".join(text.partition("\n\n")[0].split())


def rows(text: str) -> dict[str, list[str]]:
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return {first.strip("`"): rest for first, *rest in cells}


def test_the_best_peer_is_the_one_that_took_the_least_time(
    named: NamedSpec, write: Callable[..., None], tmp_path: Path
) -> None:
    more_work = timed("long", "dense", 4.0, 900.0)  # more TFLOPS, because it multiplies zeros
    measurement = [timed("long", "slow", 6.0, 200.0), more_work, timed("short", "other", 1.0, 1200.0)]
    write(named, measurement=measurement)
    assert rows(script.table([named], tmp_path))[named.stem] == ["long", "600", "dense", "300", "2.00", "5.0e-04"]


def test_every_shipped_kernel_has_a_row_in_its_family(tmp_path: Path) -> None:
    specs = [find_spec(name) for name in ("l4_topk32", "h100_bsr_spmm_b64", "h100_topk32", "h100_dense")]
    found = rows(script.table(specs, tmp_path))
    assert list(found)[2:] == ["h100_dense", "h100_topk32", "h100_bsr_spmm_b64", "l4_topk32"]
    assert found["l4_topk32"] == ["unverified", "-", "-", "-", "-", "-"]


@pytest.mark.parametrize("change", [{"source": {"sha256": "0" * 64}}, {"verification": None}])
def test_no_number_without_a_receipt_of_this_source(
    named: NamedSpec, write: Callable[..., None], tmp_path: Path, change: dict[str, Any]
) -> None:
    write(named, **change)
    text = script.table([named], tmp_path)
    assert rows(text)[named.stem] == ["unverified", "-", "-", "-", "-", "-"]
    assert text.startswith("No kernel has been verified")


def test_verified_but_not_measured(named: NamedSpec, write: Callable[..., None], tmp_path: Path) -> None:
    write(named, measurement=[])
    assert rows(script.table([named], tmp_path))[named.stem] == ["-", "-", "-", "-", "-", "5.0e-04"]


def test_caption_names_device_and_what_ptx_means(named: NamedSpec, write: Callable[..., None], tmp_path: Path) -> None:
    other = find_spec("l4_topk32")
    write(named)
    caption = words(script.table([named, other], tmp_path))
    assert caption.startswith("a device, driver 580.0; ")
    assert "PTX" not in caption
    write(other, verification={"target": "compute_89 PTX"})
    caption = words(script.table([named, other], tmp_path))
    assert "sm_89 kernels (`l4_*`) ran there through compute_89 PTX" in caption


def record(name: str, spec: str = "h100_topk32", **changes: Any) -> dict[str, Any]:
    """A row of the attention benchmark whose kernel has not changed since."""
    named = find_spec(spec)
    return {
        "name": name,
        "groups": ["main"],
        "batch": 1,
        "heads": 16,
        "kv_heads": 16,
        "length": 32768,
        "spec": json.loads(named.spec.canonical_json()),
        "source_sha256": source_sha256(render(find_spec(named.spec))),
        "results": {
            "ours": {"milliseconds": 2.0, "tflops": 600.0, "error": 4e-4},
            "slow": {"milliseconds": 4.0, "tflops": 300.0, "error": 5e-4},
            "fast": {"milliseconds": 1.0, "tflops": 1200.0, "error": 3e-4},
        },
        "failed": {},
        **changes,
    }


def report(*records: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"device": "a device", "driver": "580.0", "rows": list(records), **more}


SHAPE = "B1 H16 S32768 d128, topk32 of 128x128"


BOTH = {  # the fast one is not the best back to back
    "ours": {"milliseconds": 2.0, "tflops": 600.0, "back_to_back_tflops": 500.0, "error": 4e-4},
    "slow": {"milliseconds": 4.0, "tflops": 300.0, "back_to_back_tflops": 400.0, "error": 5e-4},
    "fast": {"milliseconds": 1.0, "tflops": 500.0, "back_to_back_tflops": 300.0, "error": 3e-4},
}


def cell(name: str = "a", data: str = "std1", dtype: str = "fp16", spec: str = "h100_topk32", **changes: Any) -> Any:
    """A cell of benchmarks/data.py, and what it is found by."""
    results = {label: {**result, "absolute_error": 1e-4} for label, result in BOTH.items()}
    found = {"device": "a device", "driver": "580.0", "data": data, "results": results, **changes}
    return (name, data, dtype), record(name, spec, **found)


def test_the_overview_has_one_row_of_each_kind() -> None:
    models = script.model_rows()
    found = rows(script.overview(models))
    today = [name for name in script.OVERVIEW if script.models_page.is_current(models[name])]
    assert [name.strip("`") for name in list(found)[2:]] == today
    assert found["flux1-dev-4608"][:2] == ["FLUX.1 dev", "bf16"]
    kinds = [(models[name]["backward"], str(models[name]["shape"].get("pattern"))) for name in script.OVERVIEW]
    assert {True, False} == {backward for backward, _ in kinds}


def test_tables_of_the_data_have_dashes_for_what_was_not_measured() -> None:
    found = script.data_tables({})
    assert set(found) == {"data-ratio-h100", "data-tflops-h100", "data-error-h100"}
    for text in found.values():
        assert text.startswith("No cell has been measured.\n")
        cells = rows(text)
        assert list(cells)[2:] == [
            *script.data_cells.DATA["fp16"],
            *(f"{d}, bf16" for d in script.data_cells.DATA["bf16"]),
        ]
        assert all(row == ["-"] * 11 for row in list(cells.values())[2:])


def test_a_table_that_is_too_wide_goes_on_in_another() -> None:
    first_cell, cell = "y" * 11, "x" * 59  # three beside the first make a line of 201 bytes
    first, others = ["data", "---", first_cell], [[f"row {i}", "---:", cell] for i in range(5)]
    tables = script.narrow_tables(first, others)
    assert [text.splitlines()[0] for text in tables] == [
        "| data | row 0 | row 1 |",
        "| data | row 2 | row 3 |",
        "| data | row 4 |",
    ]
    assert all(text.splitlines()[2].startswith(f"| {first_cell} | {cell} |") for text in tables)
    assert len(script.line([first_cell, cell, cell, cell])) == script.LONGEST_LINE + 1
    shorter = [[name, line, cell[:-1]] for name, line, cell in others]
    assert len(script.narrow_tables(first, shorter)) == 2


def test_tables_of_the_data() -> None:
    first, second = script.data_cells.ROWS[:2]
    behind = {label: {**result, "absolute_error": 1e-4} for label, result in BOTH.items()}
    behind["ours"]["back_to_back_tflops"] = 380.0
    fa4 = {"FA4": {**BOTH["fast"], "absolute_error": 2e-4}, "SDPA cuDNN": {**BOTH["slow"], "absolute_error": 3e-4}}
    measured = dict(
        [
            cell(first),
            cell(first, "std4", results=behind),
            cell(second, "std4", results={"ours": {**BOTH["ours"], "absolute_error": 1e-4}, **fa4}),
            cell(second, "rising", results={}, failed={"ours": "wrong result: off by 1"}, not_installed=["fa3"]),
            cell(second, "heads", "bf16", source_sha256="0" * 64),
        ]
    )
    found = script.data_tables(measured)
    ratio, tflops, error = (rows(found[f"data-{name}-h100"]) for name in ("ratio", "tflops", "error"))
    assert ratio["std1"][:2] == ["1.20 / 1.25", "-"]
    assert ratio["std4"][:2] == ["**1.20 / 0.95**", "1.20 / 1.25"]  # behind in one of both ways
    assert ratio["rising"][:2] == ["-", "**no time**"]
    assert ratio["heads, bf16"][:2] == ["-", "1.20 / 1.25†"]
    assert tflops["std4"][:2] == ["600 / 380 (slow 300 / 400)", "600 / 500 (SDPA cuDNN 300 / 400)"]
    assert tflops["rising"][:2] == ["-", "-"]
    assert error["std1"][0] == "1.0e-04 / - / -"
    assert error["std4"][1] == "1.0e-04 / 2.0e-04 / 3.0e-04"
    assert words(found["data-ratio-h100"]).startswith("a device, driver 580.0; our TFLOPS over those of the best peer")
    assert "†: measured with an earlier source" in words(found["data-ratio-h100"])
    assert found["data-ratio-h100"].splitlines()[-3:] == [
        "",
        f"- `{second}, rising`: ours has no time: wrong result: off by 1",
        f"- peer not installed: `fa3`, for `{second}, rising`",
    ]


def bsr_record(name: str, spec: str, **changes: Any) -> dict[str, Any]:
    """A row of the benchmark of BSR products."""
    shape = {"kernel": spec, "size": 8192, "columns": 1024, "row_blocks": 16, "pattern": "random"}
    return record(name, spec, **(shape | changes))


def test_a_row_of_a_spec_that_is_not_shipped_is_marked(tmp_path: Path) -> None:
    other = record("b")
    other["spec"] = json.loads(json.dumps(other["spec"]))
    other["spec"]["pattern"]["k"] = 33
    text = script.full_table(report(record("a"), other))
    assert all(name in text for name in ("| `a` | `h100_topk32` |", "| `b`‡ | - |"))
    assert "‡: a spec that is not shipped" in words(text)
    assert "‡" not in script.full_table(report(record("a")))


def test_workloads_of_bsr_products() -> None:
    def told(spec: str, **changes: Any) -> str:
        return script.workload(bsr_record("a", spec, **changes))

    assert told("h100_bsr_spgemm_b128_balanced") == "M8192 K8192 N1024, 16 blocks 128x128 a row of A and B"
    assert told("h100_bsr_spgemm_b128_bsr") == "M8192 K8192 N1024, 16 blocks 128x128 a row of A, B and C"
    assert told("h100_bsr_sddmm_b128") == "M8192 K1024 N8192, 16 blocks 128x128 a row"
    power_law = told("h100_bsr_spmm_b32", pattern="power_law")
    assert power_law == "M8192 K8192 N1024, 16 blocks 32x32 a row on average, power law"
    assert told("h100_bsr_spmm_b64", pattern="clustered").endswith("a row, clustered")
    assert told("h100_bsr_spmm_b16_gathered", packed=True).endswith("16 blocks 16x16 a row, packed beforehand")


def test_full_table_has_every_row_peer_and_error(tmp_path: Path) -> None:
    failed = record("b", groups=["short"], results={}, failed={"FA4": "ImportError: no"}, heads=64, kv_heads=8)
    failed["not_installed"] = ["fa3"]
    text = script.full_table(report(record("a"), failed, not_run=["c", "d"]))
    found = rows(text)
    assert found["a"] == [
        "`h100_topk32`",
        SHAPE,
        "2.000",
        "600 / -",
        "4e-04",
        "fast 1200 (3e-04), slow 300 (5e-04)",
        "**0.50 / -**",
    ]
    timed_both = rows(script.full_table(report(record("a", results=BOTH))))["a"]
    assert timed_both[3:] == ["600 / 500", "4e-04", "fast 500 / 300 (3e-04), slow 300 / 400 (5e-04)", "1.20 / 1.25"]
    assert found["b"] == ["`h100_topk32`", SHAPE.replace("H16", "H64:8"), "-", "-", "-", "-", "-"]
    assert text.splitlines()[-3:] == [
        "- `b`: FA4 has no time: ImportError: no",
        "- not run: `c`, `d`",
        "- peer not installed: `fa3`, for `b`",
    ]
    assert "has no time" not in script.full_table(report(record("a")))


def test_peers_without_room_continue_in_the_next_row() -> None:
    every = {f"a peer with a long name, {number}": {**BOTH["slow"], "tflops": 300.0 - number} for number in range(12)}
    text = script.full_table(report(record("a", results={"ours": BOTH["ours"], **every})))
    lines = [line for line in text.splitlines() if "a peer with" in line]
    assert len(lines) > 2 and max(map(len, text.splitlines())) <= 200
    assert [line.count("|") for line in lines] == [9] * len(lines)
    assert lines[0].startswith("| `a` |") and lines[0].endswith(" | 2.00 / 1.25 |")
    assert all(line.startswith("|  |  |  |  |  |  | a peer") and line.endswith(" |  |") for line in lines[1:])
    told = ", ".join(line.split(" | ")[6].removesuffix(" |") for line in lines)
    assert told == ", ".join(f"a peer with a long name, {number} {300 - number} / 400 (5e-04)" for number in range(12))
    longest = {"ours": BOTH["ours"], "p" * 90: BOTH["slow"]}
    first, second = script.full_table(report(record("a", results=longest))).splitlines()[-2:]
    assert "| (below) | " in first and second.startswith(f"|  |  |  |  |  |  | {'p' * 90} 300 / 400 (5e-04) |")


def test_a_row_without_peers_has_no_ratio(tmp_path: Path) -> None:
    alone = record("a")
    alone["results"] = {"ours": alone["results"]["ours"]}
    assert rows(script.full_table(report(alone)))["a"][-2:] == ["-", "-"]


def test_a_kernel_of_no_family_comes_last(tmp_path: Path) -> None:
    specs = [find_spec(name) for name in ("h100_tile_copy_tma", "l4_bsr_spgemm_b64")]
    assert list(rows(script.table(specs, tmp_path)))[2:] == ["l4_bsr_spgemm_b64", "h100_tile_copy_tma"]


def test_a_copy_has_a_ratio_and_no_speed(named: NamedSpec, write: Callable[..., None], tmp_path: Path) -> None:
    write(named, measurement=[timed("shape", "copy_", 3.0, 0.0) | {"tflops": 0.0}])
    assert rows(script.table([named], tmp_path))[named.stem] == ["shape", "-", "copy_", "-", "1.50", "5.0e-04"]


PAGE = (
    *(
        "overview",
        "attention",
        "attention-h100",
        "bsr",
        "bsr-h100",
        "data-ratio-h100",
        "data-tflops-h100",
        "data-error-h100",
    ),
)


@pytest.mark.parametrize("changed", ["README.md", "results.md"])
def test_every_page_is_checked(changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []

    def update(page: Path, tables: dict[str, str], *, check: bool) -> int:
        checked.append((page.relative_to(PROJECT).as_posix(), sorted(tables), check))
        return int(page.name == changed)

    monkeypatch.setattr(script, "update", update)
    monkeypatch.setattr(script, "overview", lambda *given: "")
    monkeypatch.setattr(script, "readme_picture", lambda *given: "")
    monkeypatch.setattr(script, "table", lambda *given: "")
    monkeypatch.setattr(script, "full_table", lambda report: "")
    monkeypatch.setattr("sys.argv", ["results_table.py", "--check"])
    assert script.main() == 1
    assert checked == [
        ("README.md", ["picture"], True),
        ("docs/notebook/results.md", sorted([*PAGE, "results"]), True),
        ("docs/guide/training.md", ["model-gradients"], True),
        ("docs/notebook/measuring.md", ["few-columns", "host", "host-calls"], True),
        ("docs/reference/expressions.md", ["speed"], True),
        ("docs/notebook/fp8.md", ["fp8-speed"], True),
        ("docs/notebook/scale-out.md", ["measured", "measured-before", "measured-four"], True),
        ("docs/reference/select.md", ["selection", "tuning"], True),
    ]


@pytest.mark.parametrize(
    "change", [{"source_sha256": "0" * 64}, {"source_sha256": None}, {"spec": {"op": "attention", "gone": 1}}]
)
def test_a_kernel_that_changed_since_is_marked(change: dict[str, Any], tmp_path: Path) -> None:
    older = record("a")
    older["spec"] = older["spec"] | change.pop("spec", {})
    text = script.full_table(report(older | change))
    (row,) = (cells for name, cells in rows(text).items() if name.startswith("a"))  # an unknown spec has a mark too
    assert row[3] == "600 / -†"
    assert "†: measured with an earlier source" in words(text)
    assert "†" not in script.full_table(report(record("a")))


def test_workloads_are_told_as_in_receipts() -> None:
    def told(spec: str) -> str:
        return script.workload(record("a", spec)).partition(", ")[2]

    assert told("h100_causal") == "causal"
    assert told("h100_window2k") == "window2047_0"


def test_rewrites_only_what_is_between_the_markers(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text(README)
    assert script.update(path, {"results": "new"}, check=True) == 1
    assert path.read_text() == README
    assert script.update(path, {"results": "new"}) == 0
    assert path.read_text() == README.replace("old", "new")
    assert script.update(path, {"results": "new"}, check=True) == 0


def test_a_page_may_have_several_tables(tmp_path: Path) -> None:
    path = tmp_path / "results.md"
    path.write_text(README + README.replace("results", "attention"))
    assert script.update(path, {"attention": "first", "results": "second"}) == 0
    assert path.read_text() == README.replace("old", "second") + README.replace("results", "attention").replace(
        "old", "first"
    )


@pytest.mark.parametrize(
    "text",
    [
        *("", "<!-- results:begin -->", "<!-- results:end -->", "<!-- results:end --><!-- results:begin -->"),
        *(README + README, README + "<!-- results:begin -->", "<!-- results:end -->" + README),
    ],
)
def test_markers_must_be_there_once(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "README.md"
    path.write_text(text)
    assert script.update(path, {"results": "new"}) == 1
    assert path.read_text() == text
    assert "must be there once each" in capsys.readouterr().out


def test_the_pages_have_the_markers_that_are_written() -> None:
    for page, names in {"README.md": ["picture"], "docs/notebook/results.md": [*PAGE, "results"]}.items():
        text = (PROJECT / page).read_text(encoding="utf-8")
        for name in names:
            assert "\nnew\n" in script.rewritten(text, name, "new")
