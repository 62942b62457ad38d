"""Writes the tables of docs/reference/verified.md from receipts and records of compilations: what ran on which GPU.

    python benchmarks/verified_page.py            # rewrites what is between the markers
    python benchmarks/verified_page.py --check    # exits 1 if that would change the page

A kernel counts as verified if its receipt matches the source that its spec renders to, and every case passed.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from results_table import DASH, update, verified_receipts, wrapped
from spec_page import code, wrapped_table

from codegen.arch import ARCHS
from codegen.library import GENERATED, ROOT, NamedSpec, shipped_specs
from codegen.receipts import Receipt

PAGE = ROOT / "docs" / "reference" / "verified.md"
KNOWN = ROOT / "tests" / "records" / "kernels.json"
STALE = "its tables are not what the receipts say; run: python benchmarks/verified_page.py"


class Run(NamedTuple):
    """What receipts of several kernels have in common.

    Attributes:
        arch: architecture that the kernels are written for.
        target: what ran, as receipts say it.
        device: where.
    """

    arch: str
    target: str
    device: str


def runs(specs: Sequence[NamedSpec], receipts: Mapping[str, Receipt]) -> dict[Run, list[NamedSpec]]:
    """The verified kernels by what ran where, in the order of architectures."""
    found: dict[Run, list[NamedSpec]] = {}
    for named in sorted(specs, key=lambda named: list(ARCHS).index(named.spec.arch)):
        receipt = receipts.get(named.stem)
        if receipt is not None and receipt.verification is not None:
            ran = receipt.verification
            found.setdefault(Run(named.spec.arch, ran.target, ran.device), []).append(named)
    return dict(sorted(found.items(), key=lambda item: (list(ARCHS).index(item[0].arch), item[0])))


def compiled(specs: Iterable[NamedSpec], records: Iterable[str]) -> Counter[str]:
    """Number of kernels with a compilation record, by architecture."""
    archs = {named.stem: named.spec.arch for named in specs}
    unshipped = ((name, re.search(r"_(sm_\d+a?)_", name)) for name in records)
    return Counter(archs.get(name) or (match[1] if match else "") for name, match in unshipped)


def cases_of(specs: Iterable[NamedSpec], receipts: Mapping[str, Receipt]) -> int:
    """Number of passed cases."""
    found = (receipts[named.stem].verification for named in specs)
    return sum(len(ran.cases) for ran in found if ran is not None)


def worst_errors(specs: Iterable[NamedSpec], receipts: Mapping[str, Receipt]) -> str:
    """The largest error of each type."""
    worst: dict[str, float] = {}
    for named in specs:
        ran = receipts[named.stem].verification
        if ran is not None:
            worst[named.spec.dtype] = max(worst.get(named.spec.dtype, 0.0), ran.worst_error)
    return ", ".join(f"{dtype} {error:.1e}" for dtype, error in sorted(worst.items(), reverse=True))


def architecture_table(specs: Sequence[NamedSpec], records: Iterable[str], found: Mapping[Run, list[NamedSpec]]) -> str:
    """Return, of each architecture, how many kernels are shipped and compiled, and what ran where."""
    shipped, made = Counter(named.spec.arch for named in specs), compiled(specs, records)
    rows = []
    for arch in ARCHS:
        ran = [f"{len(those)} on {run.device} as {run.target}" for run, those in found.items() if run.arch == arch]
        rows.append([f"`{arch}`", str(shipped[arch]), str(made[arch]), "; ".join(ran) or DASH])
    return wrapped_table(
        ("architecture", "shipped kernels", "compiled, with unshipped ones", "shipped ones that ran"), rows
    )


def operator_table(receipts: Mapping[str, Receipt], found: Mapping[Run, list[NamedSpec]]) -> str:
    """Return, of each operator and each run, the kernels, their cases and the largest errors."""
    rows = []
    for op in dict.fromkeys(named.spec.op for those in found.values() for named in those):
        for run, those in found.items():
            if chosen := [named for named in those if named.spec.op == op]:
                counts = str(len(chosen)), str(cases_of(chosen, receipts))
                rows.append([f"`{op}`", run.target, run.device, *counts, worst_errors(chosen, receipts)])
    return wrapped_table(("operator", "what ran", "GPU", "kernels", "cases", "largest error"), sorted(rows))


def kernel_table(specs: Sequence[NamedSpec], found: Mapping[Run, list[NamedSpec]]) -> str:
    """The names of the kernels of each run, and of those without a valid receipt."""
    rows = [[run.target, run.device, code(named.stem for named in those)] for run, those in found.items()]
    counted = {named.stem for those in found.values() for named in those}
    if others := [named.stem for named in specs if named.stem not in counted]:
        rows.append(["not verified", DASH, code(others)])
    return wrapped_table(("what ran", "GPU", "kernels"), rows)


def caption(receipts: Mapping[str, Receipt]) -> str:
    """Compilers and devices of the kernels."""
    ran = [(receipt, receipt.verification) for receipt in receipts.values() if receipt.verification is not None]
    told = {
        "driver": {each.driver for _, each in ran},
        "torch": {each.torch for _, each in ran},
        "compiler": {receipt.cubin.compiler_package for receipt, _ in ran},
    }
    parts = "; ".join(f"{name} {', '.join(sorted(values))}" for name, values in told.items())
    return wrapped(f"{len(ran)} kernels, {sum(len(each.cases) for _, each in ran)} cases; {parts}.")


def tables() -> dict[str, str]:
    """The tables by the names of their markers."""
    specs = shipped_specs()
    receipts = verified_receipts(specs, GENERATED)
    records = json.loads(KNOWN.read_text(encoding="utf-8"))
    found = runs(specs, receipts)
    return {
        "architectures": architecture_table(specs, records, found),
        "operators": f"{caption(receipts)}\n\n{operator_table(receipts, found)}",
        "kernels": kernel_table(specs, found),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is not up to date")
    check = parser.parse_args(arguments).check
    return update(PAGE, tables(), check=check, stale=STALE)


if __name__ == "__main__":
    raise SystemExit(main())
