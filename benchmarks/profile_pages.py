"""Writes docs/notebook/profiles/: what bounds six kernels, by the findings of `codegen profile` in benchmarks/results/.

    python benchmarks/profile_pages.py --collect benchmarks/results/profiles.json    # profiles them; needs NVRTC
    python benchmarks/profile_pages.py            # writes the pages
    python benchmarks/profile_pages.py --check    # exits 1 if that would change one

Where Nsight Compute can count, pages have its counters; where a GPU is, power and clocks; else the static part, and why
it is alone. The file is written after each kernel, and what another run has found of one is kept unless this one has
found more: counters are not lost to a machine without.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from codegen.files import holds, write_if_changed
from codegen.json_rows import json_rows
from codegen.library import ROOT, find_spec
from codegen.receipts import source_sha256
from codegen.render import render

KERNELS = (
    "h100_dense",
    "h100_causal",
    "h100_topk32",
    "h100_topk32_b64_self_ordered",
    "h100_bsr_spmm_b128",
    "h100_causal_dq_dkdv_bf16",
)
RESULTS = ROOT / "benchmarks" / "results" / "profiles.json"
PAGES = ROOT / "docs" / "notebook" / "profiles"
WRITTEN = "<!-- written by benchmarks/profile_pages.py -->"
STALE = "differs from the results; run: python benchmarks/profile_pages.py"
MEASURED = ("power", "sustained clock")
"""Findings of nvidia-smi; other counted ones are of Nsight Compute."""
Found = dict[str, Any]


def profiled(stem: str, *, static: bool) -> Found:
    """Findings of `codegen profile` for a kernel, in a process of its own; without counters if ncu fails."""
    command = [sys.executable, "-m", "sparse_kernel_codegen", "profile", stem, "--json"]
    done = subprocess.run([*command, *(["--static"] if static else [])], capture_output=True, text=True, check=False)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    try:
        document: Found = json.loads(done.stdout)
    except ValueError:
        raise SystemExit(f"error: {stem}: {done.stderr.strip() or 'codegen profile printed nothing'}") from None
    if not document["rows"]:
        raise SystemExit(f"error: {stem}: {errors[-1] if errors else done.stderr.strip()}")
    document.pop("metrics", None)
    if errors:
        document["no_counters"] = errors[-1].removeprefix("error: ")
    return document | {"source_sha256": source_sha256(render(find_spec(stem)))}


def rank(found: Mapping[str, Any] | None) -> int:
    """Sort key of a profile's completeness; counters weigh most."""
    return 0 if found is None else 1 + 2 * bool(found.get("counters")) + bool(found.get("power"))


def machine() -> Found:
    """The device of this run, and its driver; empty without a GPU."""
    try:
        import torch
    except ModuleNotFoundError:
        return {}
    if not torch.cuda.is_available():
        return {}
    from runtime.verify.run import driver_version

    return {"device": torch.cuda.get_device_name(), "driver": driver_version()}


def collect(path: Path, seconds: float) -> None:
    """Profile the kernels, and write what was found after each; after so many seconds without counters.

    Those with the fewest findings come first, so that a second run adds what the first one had no time for.
    """
    known: dict[str, Found] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    here = machine() | {"date": datetime.datetime.now(datetime.UTC).date().isoformat()}
    began = time.monotonic()
    for stem in sorted(KERNELS, key=lambda stem: rank(known.get(stem))):
        late = time.monotonic() - began > seconds
        found = profiled(stem, static=late) | here
        if late:
            found["no_counters"] = "the run had no time left for it"
        current = known.get(stem)
        is_same = current is not None and current["source_sha256"] == found["source_sha256"]
        if is_same and rank(current) > rank(found):
            print(f"{stem}: kept what was found on {current['date']}, which has more")  # type: ignore[index]
        else:
            known[stem] = found
            print(f"{stem}: {standing(found)} ({time.monotonic() - began:.0f} s)")
        write_if_changed(path, json_rows(known))


def standing(found: Mapping[str, Any]) -> str:
    """Description of a profile's contents."""
    parts = {"power and clocks": found.get("power"), "counters": found.get("counters")}
    return ", ".join(["static part", *(name for name, there in parts.items() if there)])


def why(found: Mapping[str, Any]) -> str:
    """The reason why a profile has no counters, without the remedy."""
    return str(found["no_counters"]).partition("; ")[0]


def wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def page(stem: str, found: Mapping[str, Any]) -> str:
    """The page of a kernel."""
    rows = found["rows"]
    static = [row for row in rows if not row["counted"]]
    measured = [row for row in rows if row["counted"] and row["about"] in MEASURED]
    counted = [row for row in rows if row["counted"] and row["about"] not in MEASURED]
    place = f" on {found['device']}, driver {found['driver']}" if found.get("device") else ""
    source = f"the source with SHA-256 {found['source_sha256'][:12]}"
    told = f"Findings of `codegen profile {stem}` about {source}{place}, {found['date']}. "
    told += "[Tools](../../guide/tools.md) explains them."
    lines = [f"# Profile of {stem}", "", WRITTEN, "", wrapped(told)]
    lines += ["", "## By plan and machine code", "", *listed(static)]
    if measured:
        lines += ["", "## Measured while calls run back to back", "", *listed(measured)]
    lines += ["", "## Counted by Nsight Compute", ""]
    if counted:
        lines += [wrapped(f"{found['counters']}."), "", *listed(counted)]
    else:
        lines += [wrapped(f"No counters: {why(found)}.")]
    return "\n".join(lines) + "\n"


def listed(rows: list[Found]) -> list[str]:
    """Findings, one paragraph each."""
    return [wrapped(f"- **{row['about']}**: {row['text']}", "  ") for row in rows]


def index(known: Mapping[str, Found]) -> str:
    """The page that names the others."""
    lines = ["# Profiles", "", WRITTEN, "", "Limits of six kernels, by `codegen profile`.", ""]
    lines += ["| kernel | contents |", "| --- | --- |"]
    lines += [f"| [{stem}]({stem}.md) | {standing(known[stem])} |" for stem in KERNELS if stem in known]
    return "\n".join(lines) + "\n"


def pages(known: Mapping[str, Found]) -> dict[Path, str]:
    """The texts of all pages by their files."""
    found = {PAGES / f"{stem}.md": page(stem, known[stem]) for stem in KERNELS if stem in known}
    return {PAGES / "README.md": index(known), **found}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collect", type=Path, metavar="FILE", help="profile the kernels into a file")
    parser.add_argument("--seconds", type=float, default=600, metavar="S", help="profile no kernel after this time")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is not up to date")
    options = parser.parse_args(arguments)
    if options.collect:
        collect(options.collect, options.seconds)
        return 0
    texts = pages(json.loads(RESULTS.read_text(encoding="utf-8")))
    left = sorted(set(PAGES.glob("*.md")) - set(texts)) if PAGES.is_dir() else []
    stale = [path for path, text in texts.items() if not holds(path, text)]
    if options.check:
        for path in (*stale, *left):
            print(f"{path.relative_to(ROOT)} {STALE}")
        return int(bool(stale or left))
    for path, text in texts.items():
        if write_if_changed(path, text):
            print(f"wrote {path.relative_to(ROOT)}")
    for path in left:
        path.unlink()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
