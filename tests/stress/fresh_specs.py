"""Draws specs that nobody chose, and runs each on the GPU through all cases of `codegen verify`, beside the oracle.

    python tests/stress/fresh_specs.py --count 300 --seed 1 --jobs 12 --json fresh_1.json

The specs are of all operators, with --fp8 of attention and products in FP8 alone; those of sm_90a run as cubin, those
of older architectures as PTX that the driver compiles. They are compiled first, --jobs at a time, into the kernel
cache, and then run by --gpu-jobs processes: each may take some 8 GB of the GPU's memory for the oracle. A kernel that
hangs, or ends its process, is a failure, and the others go on. The same seed gives the same specs as long as plans
accept the same.

Prints each failure with its spec as YAML and the command that repeats it; exit code 1 if there is one. What --json
names is written after every kernel: the same command again runs only what has not passed, of the same source.

In two steps, the first on any machine, of which the second needs the folder and the same compiler:

    CODEGEN_CACHE_DIR=kernels python tests/stress/fresh_specs.py --count 300 --seed 1 --compile-only
    CODEGEN_CACHE_DIR=kernels python tests/stress/fresh_specs.py --count 300 --seed 1 --json fresh_1.json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "support")]
os.environ.setdefault("OMP_NUM_THREADS", "1")  # processes share the cores

from likely_specs import accepted_specs, fp8_fields, likely_fields  # noqa: E402 - not installed
from stress.workers import Answer, answers  # noqa: E402

from codegen.arch import ARCHS  # noqa: E402
from codegen.errors import CodegenError  # noqa: E402
from codegen.files import write_if_changed  # noqa: E402
from codegen.library import NamedSpec, find_spec  # noqa: E402
from codegen.receipts import source_sha256  # noqa: E402
from codegen.render import render  # noqa: E402
from codegen.spec import Spec  # noqa: E402
from runtime.compile import toolchain  # noqa: E402
from runtime.compile.compiler import compile_spec  # noqa: E402

PATIENCE = 300.0  # seconds for a kernel; the search for clusters of its cases takes up to a minute
PROGRESS_SECONDS = 10.0
Row = dict[str, Any]


def archs_of(capability: tuple[int, int]) -> tuple[str, ...]:
    """Return the architectures whose kernels run on a device of a compute capability."""
    return tuple(
        arch.name
        for arch in ARCHS.values()
        if arch.compute_capability == capability or (arch.forward_compatible and arch.compute_capability < capability)
    )


def options_of(spec: Spec) -> list[str]:
    """Return the names of the fields of a spec that are not what they are by default."""
    fields = type(spec).model_fields
    return sorted(name for name, value in spec if not fields[name].is_required() and value != fields[name].default)


def verified(canonical: str) -> Row:
    """Run all cases of a spec, which is given as JSON, on the GPU. Runs in a process of its own."""
    import torch

    from runtime.verify.run import verify

    warnings.simplefilter("ignore")
    named, begun = find_spec(json.loads(canonical)), time.monotonic()
    kernel, record = verify(named)
    failed = [case for case in record.cases if not case.passed]
    told = "\n".join(
        f"{case.name} ({case.description}): error {case.max_error:.3g}, allowed {case.tolerance:.3g}" for case in failed
    )
    torch.cuda.empty_cache()
    return {
        "outcome": "failed" if failed else "passed",
        "told": told,
        "cases": len(record.cases),
        "worst_error": record.worst_error,
        "target": record.target,
        "device": f"{record.device}, driver {record.driver}, torch {record.torch}",
        "compiler": " ".join(toolchain.compiler_version()),
        "source_sha256": source_sha256(kernel.compiled.source),
        "seconds": round(time.monotonic() - begun, 2),
    }


def row_of(named: NamedSpec, answer: Answer) -> Row:
    """Return what is kept of a kernel."""
    how = answer.failure.split(":", 1)[0]
    found = answer.found or {"outcome": how if how in ("hung", "died") else "error", "told": answer.failure}
    return {"name": named.stem, "spec": json.loads(named.spec.canonical_json()), **found}


def compiled(specs: Iterable[NamedSpec], jobs: int) -> Iterator[tuple[NamedSpec, Answer]]:
    """Compile specs into the cache; yield those that cannot be, and why."""

    def build(named: NamedSpec) -> str:
        try:
            compile_spec(named, "ptx" if ARCHS[named.spec.arch].forward_compatible else "cubin")
        except CodegenError as error:
            return f"not compiled: {error}"
        return ""

    with ThreadPoolExecutor(jobs) as pool:
        futures = {pool.submit(build, named): named for named in specs}
        for future in as_completed(futures):
            if why := future.result():
                yield futures[future], Answer(None, None, why)


def yaml(fields: Mapping[str, Any], indent: str = "") -> str:
    """Return fields as YAML in blocks; numbers and words are as JSON has them."""
    return "".join(
        f"{indent}{name}:\n{yaml(value, indent + '  ')}"
        if isinstance(value, Mapping) and value
        else f"{indent}{name}: {json.dumps(value)}\n"
        for name, value in fields.items()
    )


def summary(rows: Iterable[Row], asked: int, seed: int) -> Row:
    """Return the document of --json: counts, and every row."""
    kept = sorted(rows, key=lambda row: str(row["name"]))
    specs = [find_spec(row["spec"]).spec for row in kept]
    options = Counter(name for spec in specs for name in options_of(spec))
    return {
        "seed": seed,
        "asked": asked,
        "outcomes": dict(Counter(row["outcome"] for row in kept)),
        "cases": sum(row.get("cases", 0) for row in kept),
        "operators": dict(Counter(f"{spec.op} {spec.arch}" for spec in specs)),
        "options": dict(sorted(options.items())),
        "seconds": round(sum(row.get("seconds", 0.0) for row in kept), 1),
        "specs": kept,
    }


def passed_before(path: Path | None, specs: Iterable[NamedSpec]) -> dict[str, Row]:
    """Return the rows of an earlier run that passed with the sources of today, by name."""
    if path is None or not path.is_file():
        return {}
    rows = {row["name"]: row for row in json.loads(path.read_text(encoding="utf-8"))["specs"]}
    kept = {}
    for named in specs:
        row = rows.get(named.stem, {})
        if row.get("outcome") == "passed" and row["source_sha256"] == source_sha256(render(named)):
            kept[named.stem] = row
    return kept


def run(specs: list[NamedSpec], options: argparse.Namespace) -> dict[str, Row]:
    """Compile and run what has not passed yet, tell of each failure, and return the rows of all."""
    rows = passed_before(options.json, specs)
    by_json = {named.spec.canonical_json(): named for named in specs if named.stem not in rows}
    print(f"{len(specs)} specs, {len(rows)} passed before", flush=True)
    begun = told = time.monotonic()

    def keep(named: NamedSpec, answer: Answer) -> None:
        row = rows[named.stem] = row_of(named, answer)
        if row["outcome"] != "passed":
            again = f"--count {options.count} --seed {options.seed}{' --fp8' * options.fp8} --only {named.stem}"
            print(f"{row['outcome'].upper()} {named.stem}\n{row['told']}\n\n{yaml(row['spec'])}", flush=True)
            print(f"repeat: python tests/stress/fresh_specs.py {again}\n", flush=True)
        if options.json:
            write_if_changed(
                options.json, json.dumps(summary(rows.values(), len(specs), options.seed), indent=1) + "\n"
            )

    for named, answer in compiled(by_json.values(), options.jobs):
        keep(named, answer)
    print(f"compiled in {time.monotonic() - begun:.0f} s", flush=True)
    if options.compile_only:
        return rows
    tasks = [text for text, named in by_json.items() if named.stem not in rows]
    for done, answer in enumerate(answers(tasks, verified, options.gpu_jobs, options.patience), 1):
        keep(by_json[answer.task], answer)
        if time.monotonic() - told > PROGRESS_SECONDS:
            told = time.monotonic()
            print(f"{done} of {len(tasks)} in {told - begun:.0f} s", file=sys.stderr, flush=True)
    return rows


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300, help="specs (300)")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (0)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilations at a time (all cores)")
    parser.add_argument("--gpu-jobs", type=int, default=6, help="processes that share the GPU (6)")
    parser.add_argument("--patience", type=float, default=PATIENCE, help=f"seconds for a kernel ({PATIENCE:g})")
    parser.add_argument("--json", type=Path, help="where outcomes are kept; what passed is not run again")
    parser.add_argument("--only", help="the name of the one spec to run")
    parser.add_argument("--fp8", action="store_true", help="attention and products in FP8 alone")
    parser.add_argument("--compile-only", action="store_true", help="fill the cache; needs no GPU")
    options = parser.parse_args()
    import torch

    if not options.compile_only and not torch.cuda.is_available():
        sys.exit("error: torch sees no GPU; --compile-only needs none; nothing was run")
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    draw = fp8_fields if options.fp8 else likely_fields
    specs = accepted_specs(options.count, options.seed, archs_of(capability), draw)
    if options.only:
        specs = [named for named in specs if named.stem == options.only]
        if not specs:
            sys.exit(f"error: no spec of --count {options.count} --seed {options.seed} is called {options.only}")
    rows = run(specs, options)
    counts = Counter(row["outcome"] for row in rows.values())
    if options.compile_only:
        failed = len(rows) - counts["passed"]
        print(f"{len(specs)} specs, {failed} that do not compile; seed {options.seed}")
        return int(failed > 0)
    words = ", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items()))
    cases = sum(row.get("cases", 0) for row in rows.values())
    print(f"{len(specs)} specs, {cases} cases: {words}; seed {options.seed}")
    return int(counts["passed"] < len(specs))


if __name__ == "__main__":
    sys.exit(main())
