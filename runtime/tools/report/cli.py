"""The command that writes the site."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from codegen.cli import SpecsArgument, app, chosen
from codegen.errors import MOST_OF_PLACE, CodegenError
from codegen.freshness import display_path
from codegen.library import ROOT
from codegen.tools.report import JsonOption, report
from codegen.wording import one_line

if TYPE_CHECKING:
    from runtime.tools.report.changes import Changes


@app.command("report")
def report_command(
    specs: SpecsArgument = None,
    *,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where to write: a folder of its own.")],
    diff: Annotated[
        tuple[str, str] | None,
        typer.Option(
            "--diff", metavar="COMMIT COMMIT", help="Also a page of what two commits differ in.", show_default=False
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a static site: a page for each kernel, of all shipped ones unless some are named. Needs no GPU.

    A page has the spec, the plan, the pipeline and the shared memory as pictures, the source, the hashes and how to
    check them, what the receipt says and what was measured. Nothing on it is loaded from elsewhere. The folder is whole
    or not there; one that holds anything else is not written over. Of a dirty tree every page says so.

    [bold]Examples[/bold]
      codegen report --out report
      codegen report h100_topk32 h100_causal --out report
      codegen report --out report --diff v1.0 HEAD
    """
    from runtime.tools.report import site  # noqa: PLC0415 - pygments and jinja's pages, not for other commands
    from runtime.tools.report.kernels import kernel_of, known_records  # noqa: PLC0415
    from runtime.tools.report.measurements import by_spec, results  # noqa: PLC0415
    from runtime.tools.report.tree import tree_of  # noqa: PLC0415

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
        told.note("changed", changed, f"{'wrote' if changed else 'up to date'}  {where}: {len(kernels)} kernels")
        told.note("commit", tree.commit)
        dirty = f"of a dirty tree: {len(tree.changed)} files are not as commit {tree.commit[:12]} has them"
        told.note("dirty", list(tree.changed), dirty if tree.changed else "")
        if changes is not None:
            told.say(f"{len(changes.changed)} of {changes.count} kernels differ: changes.html")


def _changes(labels: tuple[str, str]) -> Changes:
    """Compare two commits.

    Raises:
        CodegenError: where there is no repository.
    """
    from runtime.tools.report.changes import changes  # noqa: PLC0415
    from runtime.tools.report.tree import in_repository  # noqa: PLC0415

    if not in_repository():
        raise CodegenError("--diff compares two commits, and this package is in no repository")
    return changes(labels, ROOT)
