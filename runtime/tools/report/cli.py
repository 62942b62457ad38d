"""The command that writes the site."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from codegen.cli import LOOK, SpecsArgument, command
from codegen.errors import MOST_OF_PLACE, CodegenError
from codegen.files import display_path
from codegen.project import ROOT
from codegen.tools.report import JsonOption, report
from codegen.wording import one_line, plural

if TYPE_CHECKING:
    from runtime.tools.report.changes import Changes


@command("report", LOOK)
def report_command(
    specs: SpecsArgument = None,
    *,
    out: Annotated[
        Path,
        typer.Option("--out", metavar="DIR", help="The folder to write to: a new or empty one, or an earlier report."),
    ],
    diff: Annotated[
        tuple[str, str] | None,
        typer.Option(
            "--diff",
            metavar="COMMIT COMMIT",
            help="Also write a page with the differences of two commits.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a static site with a page for each kernel.

    A page shows the spec, the plan, pictures of the pipeline and of shared memory, the source, the hashes and how to
    check them, the receipt and the measurements. Pages load nothing from other places. The folder is written as a
    whole; a folder with other files is not overwritten. If the tree has uncommitted changes, each page says so. By
    default, all shipped kernels have pages. Needs no GPU.

    [bold]Examples[/bold]
      codegen report --out report
      codegen report h100_topk32 h100_causal --out report
      codegen report --out report --diff v1.0 HEAD
    """
    from codegen.commands import chosen
    from runtime.tools.report import site
    from runtime.tools.report.kernels import kernel_of, known_records
    from runtime.tools.report.measurements import by_spec, results
    from runtime.tools.report.tree import tree_of

    earlier = [out / name for name in site.check_place(out)]
    named_specs = sorted(chosen(specs, every=not specs), key=lambda named: named.stem)
    for one, other in pairwise(named_specs):
        if one.stem == other.stem:
            raise CodegenError(f"two of the specs are called {one.stem}: their pages would have one name")
    tree = tree_of(earlier)
    changes = None if diff is None else _changes(diff)
    with report(as_json=as_json) as told:
        known, found = known_records(), by_spec(results())
        kernels = [kernel_of(named, known) for named in named_specs]
        around = zip([None, *kernels[:-1]], kernels, [*kernels[1:], None], strict=True)
        pages, entries = {}, []
        for before, kernel, after in told.steps("writing", list(around), lambda each: each[1].stem):
            view = site.view_of(kernel, found)
            pages[kernel.page] = site.kernel_page(view, tree, (before, after))
            entries.append(site.entry_of(view))
            told.row({"kernel": kernel.stem, "page": str(out / kernel.page), "receipt": entries[-1]["receipt"]})
        pages["index.html"] = site.index_page(entries, tree, changes)
        if changes is not None:
            pages["changes.html"] = site.changes_page(changes, tree, kernels)
        changed = site.write(out, site.with_mark(pages))
        where = one_line(str(display_path(out / "index.html")), MOST_OF_PLACE)
        told.note(
            "changed", changed, f"{'wrote' if changed else 'up to date'}  {where}: {plural(len(kernels), 'kernel')}"
        )
        told.note("commit", tree.commit)
        dirty = f"the tree has {plural(len(tree.changed), 'changed file')} since commit {tree.commit[:12]}"
        told.note("dirty", list(tree.changed), dirty if tree.changed else "")
        if changes is not None:
            told.say(f"{len(changes.changed)} of {changes.count} kernels differ: changes.html")


def _changes(labels: tuple[str, str]) -> Changes:
    """Compare two commits.

    Raises:
        CodegenError: outside of a repository.
    """
    from runtime.tools.report.changes import changes
    from runtime.tools.report.tree import in_repository

    if not in_repository():
        raise CodegenError("--diff compares two commits, but this package is not in a repository")
    return changes(labels, ROOT)
