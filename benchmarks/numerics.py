"""Errors of the softmax over many equal or nearly equal keys, compared with peers, in one run.

    python benchmarks/numerics.py --json benchmarks/results/numerics_h100.json
    python benchmarks/numerics.py --from benchmarks/results/numerics_h100.json    # no GPU: writes the page's table

With equal scores O is the mean of all values: 1, and 0.1 of standard normal noise on it. What is off then is what
adding up 2^16 to 2^20 numbers of one size loses. Few queries: their tiles are divided between the thread blocks of
kernels that do so. Many queries: each thread block has whole tiles. Errors are the largest of O, relative to its
exact value, over all rows (equal scores) or over ROWS of them (nearly equal ones).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import harness
import torch
from attention_peers import PEERS, Problem
from harness import OURS, Fields, environment, reason
from results_table import rewritten

from codegen.json_rows import json_rows
from codegen.library import ROOT, find_spec
from codegen.spec import AttentionSpec
from runtime import load_kernel
from runtime.tools.bench.timing import Call

PAGE, MARKER = ROOT / "docs" / "reference" / "numerics.md", "flat-scores"
LENGTHS = (16, 17, 18, 20)  # log2 of the keys
QUERIES = {"few queries": 128, "many queries": 132 * 192}
NEARLY = 0.01  # standard deviation of q where scores are nearly equal
ROWS = 8
KERNELS = {64: "h100_dense_d64", 128: "h100_dense"}
USUAL_PEERS = ("sdpa", "fa4", "fa3")
PACKAGES = ("torch", "flash-attn-4", "fa3-fwd")


def spec_of(head_dim: int) -> AttentionSpec:
    """The shipped dense kernel of a head dimension."""
    spec = find_spec(KERNELS[head_dim]).spec
    assert isinstance(spec, AttentionSpec)
    return spec


def exact(problem: Problem, rows: torch.Tensor) -> torch.Tensor:
    """O of some rows in float64."""
    scores = problem.q[0, 0, rows].double() @ problem.k[0, 0].double().T * problem.q.shape[-1] ** -0.5
    return scores.softmax(-1) @ problem.v[0, 0].double()


def errors(problem: Problem, equal: bool) -> tuple[dict[str, float], dict[str, str]]:
    """Relative errors by label, and why others have none."""
    queries = problem.q.shape[2]
    rows = torch.linspace(0, queries - 1, ROWS, device="cuda").long()
    reference = exact(problem, rows)
    found, failed = {}, {}

    def ours(_: Problem) -> dict[str, Call]:
        kernel = load_kernel(problem.spec)
        return {OURS: lambda: kernel(problem.q, problem.k, problem.v)[0]}

    for name in (OURS, *USUAL_PEERS):
        if name != OURS and not PEERS[name].installed:
            continue
        try:
            for label, call in (ours if name == OURS else PEERS[name].make)(problem).items():
                out = call()[0, 0]
                off = out.double() - reference[:1] if equal else out[rows].double() - reference
                found[label] = float((off.abs() / reference.abs().min()).max())
                del out, off
        except Exception as error:
            failed[name] = reason(error)
    return found, failed


@torch.no_grad()
def measure() -> Fields:
    """All rows of the table."""
    records = []
    for head_dim in KERNELS:
        for log_keys in LENGTHS:
            for kind, queries in QUERIES.items():
                for equal in (True, False):
                    torch.manual_seed(log_keys)
                    q = torch.randn(1, 1, queries, head_dim, device="cuda") * (0.0 if equal else NEARLY)
                    k, v = (torch.randn(1, 1, 1 << log_keys, head_dim, device="cuda") for _ in range(2))
                    v = 1.0 + 0.1 * v
                    problem = Problem(spec_of(head_dim), q.half(), k.half(), v.half(), ())
                    found, failed = errors(problem, equal)
                    record = {"head_dim": head_dim, "log2_keys": log_keys, "queries": kind, "equal": equal}
                    records.append({**record, "errors": found, "failed": failed})
                    print({**record, **{label: f"{error:.1e}" for label, error in found.items()}, **failed}, flush=True)
                    harness.free_memory()
    return {**environment(PACKAGES), "rows": records}


def table(report: Fields) -> str:
    """The page's table."""
    labels = list(dict.fromkeys(label for row in report["rows"] for label in row["errors"]))
    lines = [
        f"{report['device']}, driver {report['driver']}: largest error of O, relative.",
        "",
        f"| head_dim, keys, queries, scores | {' | '.join(labels)} |",
        f"| --- |{' ---: |' * len(labels)}",
    ]
    for row in report["rows"]:
        what = f"{row['head_dim']}, 2^{row['log2_keys']}, {row['queries'].split()[0]}"
        cells = [f"{row['errors'][label]:.1e}" if label in row["errors"] else "-" for label in labels]
        lines.append(f"| {what}, {'equal' if row['equal'] else 'nearly equal'} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the errors are written")
    parser.add_argument("--from", type=Path, dest="earlier", metavar="FILE", help="an earlier run, for the page")
    options = parser.parse_args()
    if options.earlier:
        report = json.loads(options.earlier.read_text(encoding="utf-8"))
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(rewritten(page, MARKER, table(report)), encoding="utf-8")
        return
    if not torch.cuda.is_available():
        raise SystemExit("error: torch sees no GPU")
    report = measure()
    if options.json:
        options.json.write_text(json_rows(report), encoding="utf-8")


if __name__ == "__main__":
    main()
