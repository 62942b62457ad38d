"""Writes the tables of results (README.md, docs/results.md) from the receipts in generated/, and from nothing else.

python benchmarks/results_table.py            # rewrites what is between the markers
python benchmarks/results_table.py --check    # exits 1 if that would change a page
"""

from __future__ import annotations

import argparse
from pathlib import Path

from codegen.library import GENERATED, ROOT, NamedSpec, shipped_specs
from codegen.receipts import MeasurementRecord, Receipt, Standing, receipt_path, state
from codegen.render import render

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
HEADINGS = ("kernel", "workload", "TFLOPS", "best peer, same run", "its TFLOPS", "ratio", "worst error")
DASH = "-"
UNVERIFIED = ["unverified", DASH, DASH, DASH, DASH, DASH]
# What the README shows; docs/results.md shows every kernel.
HEADLINE = (
    "h100_topk16",
    "h100_topk32",
    "h100_topk32_b64",
    "h100_topk32_d64",
    "h100_block_lists",
    "h100_window2k",
    "h100_causal",
    "h100_dense",
    "h100_bsr_spmm_b128",
    "h100_bsr_spmm_b64",
    "l4_topk32",
    "l4_causal",
)
FAMILIES = (
    ("sm_90a", "attention"),
    ("sm_90a", "bsr_spmm"),
    ("sm_90a", "bsr_sddmm"),
    ("sm_90a", "bsr_spgemm"),
    ("sm_89", "attention"),
    ("sm_89", "bsr_spmm"),
)


def table(specs: list[NamedSpec], folder: Path, page_folder: Path = ROOT) -> str:
    """Return caption and table: a row for each spec, in families, with numbers only if a GPU verified this source."""
    verified: dict[str, Receipt] = {}
    for named in specs:
        if state(named, render(named), folder).standing is Standing.OK:
            verified[named.stem] = Receipt.read(receipt_path(named.stem, folder))
    rows = [
        line([f"`{named.stem}`", *(numbers(verified[named.stem]) if named.stem in verified else UNVERIFIED)])
        for named in sorted(specs, key=lambda named: (family(named), named.stem))
    ]
    alignment = ["---", "---", "---:", "---", "---:", "---:", "---:"]
    return "\n".join([caption(verified, page_folder), "", line([*HEADINGS]), line(alignment), *rows])


def family(named: NamedSpec) -> int:
    """Return where a kernel's group stands in the table; a family not listed comes last."""
    kind = (named.spec.arch, named.spec.op)
    return FAMILIES.index(kind) if kind in FAMILIES else len(FAMILIES)


def line(texts: list[str]) -> str:
    """Return one line of a table."""
    return f"| {' | '.join(texts)} |"


def numbers(receipt: Receipt) -> list[str]:
    """Return what a receipt says of its kernel's first workload, beside the peer that took the least time for it."""
    assert receipt.verification is not None
    error = f"{receipt.verification.worst_error:.1e}"
    if not receipt.measurement:
        return [DASH, DASH, DASH, DASH, DASH, error]
    own = receipt.measurement[0]
    best = min((m for m in receipt.measurement if m.shape == own.shape), key=lambda m: m.peer_milliseconds)
    ratio = f"{best.peer_milliseconds / best.milliseconds:.2f}"
    return [own.shape, f"{own.tflops:.0f}", best.peer, f"{useful_tflops(best):.0f}", ratio, error]


def useful_tflops(record: MeasurementRecord) -> float:
    """Return the peer's speed, counting the work that the kernel had to do (a dense peer does more than that)."""
    return record.tflops * record.milliseconds / record.peer_milliseconds


def caption(verified: dict[str, Receipt], page_folder: Path) -> str:
    """Return in one line where the numbers come from and what they mean."""
    records = [receipt.verification for receipt in verified.values() if receipt.verification]
    if not records:
        return "No kernel has been verified since its source last changed."
    devices = " and ".join(sorted({f"{record.device}, driver {record.driver}" for record in records}))
    measuring = "measuring.md" if page_folder.name == "docs" else "docs/measuring.md"
    text = f"{devices}; effective TFLOPS, medians ([how they are taken]({measuring})); error against float64."
    through_ptx = sorted({record.target for record in records if record.target.endswith(" PTX")})
    for target in through_ptx:
        arch = target.removesuffix(" PTX").replace("compute_", "sm_")
        text += f" {arch} kernels (`l4_*`) ran there through {target}: no speed on an L4 is claimed."
    return text


def rewritten(readme: str, results: str) -> str:
    """Return the README with other results.

    Raises:
        ValueError: unless each marker is there once, in order.
    """
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end) or BEGIN in rest or END in before + after:
        raise ValueError(f"{BEGIN} and {END} must be there once each, in this order")
    return f"{before}{BEGIN}\n{results}\n{END}{after}"


def update(page: Path, specs: list[NamedSpec], folder: Path = GENERATED, *, check: bool = False) -> int:
    """Rewrite one page's table, or with ``check`` only say whether it would change; return 0 if all is well."""
    found = page.read_text(encoding="utf-8")
    try:
        fresh = rewritten(found, table(specs, folder, page.parent))
    except ValueError as error:
        print(f"error: {page.name}: {error}")
        return 1
    if fresh == found:
        print(f"{page.name} is up to date")
        return 0
    if check:
        print(f"{page.name}: its results are not those of the receipts; run: python benchmarks/results_table.py")
        return 1
    page.write_text(fresh, encoding="utf-8")
    print(f"{page.name}: results rewritten")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is not up to date")
    check = parser.parse_args().check
    specs = shipped_specs()
    headline = [named for named in specs if named.stem in HEADLINE]
    pages = {ROOT / "README.md": headline, ROOT / "docs" / "results.md": specs}
    return max([update(page, shown, check=check) for page, shown in pages.items()])


if __name__ == "__main__":
    raise SystemExit(main())
