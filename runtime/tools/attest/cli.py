"""The commands that attest, and that look at attestations."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from codegen.cli import CHECK_FAILED, AllOption, SpecsArgument, app, chosen
from codegen.errors import MOST_OF_PLACE, CodegenError
from codegen.files import write_all
from codegen.freshness import display_path
from codegen.library import IN_SOURCE_TREE, ROOT
from codegen.tools.report import JsonOption, Report, report
from codegen.wording import one_line

if TYPE_CHECKING:
    from runtime.tools.attest.statement import Statement, Tree
    from runtime.tools.attest.verification import Finding

ENVELOPE = "kernels.intoto.json"
FEW = 3  # files of a dirty tree that a message names


@app.command("attest")
def attest_command(
    specs: SpecsArgument = None,
    every: AllOption = False,
    *,
    key: Annotated[Path, typer.Option("--key", metavar="FILE", help="A private ed25519 key in PEM.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where to write the two files.")],
    allow_dirty: Annotated[
        bool, typer.Option("--allow-dirty", help="Allow a tree with changes; list the changed files.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a bill of materials (CycloneDX) and signed provenance (in-toto, SLSA) of shipped kernels. Needs no GPU.

    Subjects are sources, receipts and cubins by SHA-256, materials the specs, templates, code, compiler and headers.

    [bold]Examples[/bold]
      openssl genpkey -algorithm ed25519 -out key.pem
      codegen attest --all --key key.pem --out attestation
    """
    from runtime.tools.attest import keys  # noqa: PLC0415

    keys.require()
    from runtime.tools.attest.envelope import sealed  # noqa: PLC0415
    from runtime.tools.attest.statement import SBOM, attested, compiled_for  # noqa: PLC0415

    signer, named_specs = keys.private_key(key), chosen(specs, every)
    tree = _tree(out, allow_dirty=allow_dirty)
    with report(as_json=as_json) as told:
        compiled = [compiled_for(named) for named in told.steps("compiling", named_specs, lambda named: named.stem)]
        statement, bill = attested(compiled, tree)
        texts = {out / SBOM: bill, out / ENVELOPE: sealed(statement, signer)}
        for path, changed in write_all(texts).items():
            line = f"{'wrote' if changed else 'up to date'}  {display_path(path)}"
            told.row({"path": str(path), "changed": changed}, line)
        identity = keys.key_id(signer.public_key())
        told.note("key", identity, f"{len(compiled)} kernels, signed by the key {identity}")
        where = f"commit {tree.commit}" if tree.commit else "a tree that is in no repository"
        dirty = f", with {len(tree.changed)} files that are not as it has them" if tree.changed else ""
        told.note("commit", tree.commit, f"of {where}{dirty}")


def _tree(out: Path, *, allow_dirty: bool) -> Tree:
    """The tree that is attested.

    Raises:
        CodegenError: if it is not as its commit has it, and that was not allowed.
    """
    from runtime import git  # noqa: PLC0415
    from runtime.tools.attest.statement import SBOM, Tree  # noqa: PLC0415

    if not (IN_SOURCE_TREE and any((folder / ".git").exists() for folder in (ROOT, *ROOT.parents))):
        return Tree()
    commit = git.commit_of("HEAD", ROOT)
    changed = git.changed_files(ROOT, [out / SBOM, out / ENVELOPE])
    if changed and not allow_dirty:
        few = ", ".join(map(one_line, changed[:FEW])) + (", ..." if len(changed) > FEW else "")
        raise CodegenError(
            f"the tree is not as commit {commit[:12]} has it ({few}): commit or undo that, or say --allow-dirty"
        )
    return Tree(commit, tuple(map(one_line, changed)))


@app.command("verify-attestation")
def verify_attestation_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help=f"What codegen attest wrote: {ENVELOPE}.")],
    *,
    key: Annotated[Path, typer.Option("--key", metavar="FILE", help="The public key in PEM.")],
    tree: Annotated[
        Path | None,
        typer.Option(
            "--tree", metavar="DIR", help="The source tree to compare; else this package's.", show_default=False
        ),
    ] = None,
    cubins: Annotated[
        Path | None,
        typer.Option(
            "--cubins",
            metavar="WHEEL",
            help="Also compare the code in a wheel of cubins, or in a folder.",
            show_default=False,
        ),
    ] = None,
    rebuild: Annotated[
        int, typer.Option("--rebuild", metavar="N", min=0, help="Kernels to compile anew, other ones each day.")
    ] = 0,
    turn: Annotated[
        int | None,
        typer.Option(
            "--turn", metavar="N", min=0, help="Which turn of --rebuild it is; else the day's.", show_default=False
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check an attestation: its signature, each hash against the tree, and a sample of cubins against new ones.

    Needs neither a network nor a GPU, and NVRTC for --rebuild alone. The exit code is 1 if something differs.

    [bold]Examples[/bold]
      codegen verify-attestation attestation/kernels.intoto.json --key key.pub.pem
      codegen verify-attestation attestation/kernels.intoto.json --key key.pub.pem --rebuild 5
      codegen verify-attestation attestation/kernels.intoto.json --key key.pub.pem --cubins cubins.whl
    """
    from runtime.tools.attest import keys  # noqa: PLC0415

    keys.require()
    from runtime.tools.attest.envelope import opened  # noqa: PLC0415
    from runtime.tools.attest.statement import PACKAGE_FOLDER, statement_of  # noqa: PLC0415
    from runtime.tools.attest.verification import check_compiler, compared, compared_code, files_of  # noqa: PLC0415

    public = keys.public_key(key)
    statement = statement_of(opened(file, public), file)
    hashes = files_of(statement, file)
    if rebuild:
        check_compiler(statement)
    with report(as_json=as_json) as told:
        told.note("key", keys.key_id(public), f"signature: of the key {keys.key_id(public)}")
        commit = next((each.digest.gitCommit for each in statement.definition.resolvedDependencies), None)
        told.note("commit", commit or "", f"commit: {commit or 'none is told'}")
        folder = ROOT if tree is None else _source_tree(tree)
        code = PACKAGE_FOLDER if tree is None else tree / "codegen"
        found = list(compared(hashes, folder, code, file.parent))
        _tell(told, "tree", found)
        if cubins is not None:
            code_found = list(compared_code(hashes, cubins, folder))
            _tell(told, "cubins", code_found)
            found += code_found
        if rebuild:
            found += _rebuild(told, statement, hashes, rebuild, turn)
        if any(each.failed for each in found):
            raise typer.Exit(CHECK_FAILED)


def _source_tree(folder: Path) -> Path:
    """Return a folder that a user calls a source tree.

    Raises:
        CodegenError: if it has no generated/.
    """
    if not (folder / "generated").is_dir():
        raise CodegenError(
            f"--tree: {one_line(str(folder), MOST_OF_PLACE)} has no folder generated/: name a tree's root"
        )
    return folder


def _tell(told: Report, what: str, found: list[Finding]) -> None:
    """Tell what is not as it is attested, and how much is."""
    for each in found:
        line = f"{each.state}: {one_line(each.name)}" if each.failed else ""
        told.row({"checked": what, "name": each.name, "state": each.state}, line)
    others = [each.name for each in found if each.state == "not attested"]
    count = len(found) - len(others)
    told.say(f"{what}: {count - sum(each.failed for each in found)} of {count} as attested")
    if others:
        told.say(f"{len(others)} sources of the tree are not attested, such as {one_line(others[0])}")


def _rebuild(told: Report, statement: Statement, hashes: dict[str, str], count: int, turn: int | None) -> list[Finding]:
    """Compile a sample of kernels anew."""
    from runtime.tools.attest.verification import rebuilt, sample  # noqa: PLC0415

    turn = datetime.datetime.now(datetime.UTC).toordinal() if turn is None else turn
    stems = sample(statement.definition.externalParameters.kernels, count, turn)
    found = [rebuilt(stem, hashes) for stem in told.steps("rebuilding", stems, str)]
    _tell(told, "rebuilt", found)
    told.note("turn", turn, f"these are of turn {turn}: {', '.join(map(one_line, stems))}")
    return found
