"""The commands that attest, and that look at attestations."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from codegen.cli import MAINTAIN, AllOption, SpecsArgument, command
from codegen.errors import MOST_OF_PLACE, CodegenError
from codegen.files import display_path, write_all
from codegen.project import IN_SOURCE_TREE, ROOT
from codegen.tools.report import CHECK_FAILED, JsonOption, Report, report
from codegen.wording import one_line, plural

if TYPE_CHECKING:
    from runtime.tools.attest.statement import Statement, Tree
    from runtime.tools.attest.verification import Finding

ENVELOPE = "kernels.intoto.json"
FEW = 3  # files of a dirty tree that a message names


@command("attest", MAINTAIN)
def attest_command(
    specs: SpecsArgument = None,
    every: AllOption = False,
    *,
    key: Annotated[Path, typer.Option("--key", metavar="FILE", help="A private ed25519 key in PEM.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The folder to write the two files to.")],
    allow_dirty: Annotated[
        bool, typer.Option("--allow-dirty", help="Allow uncommitted changes, and list the changed files.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a bill of materials (CycloneDX) and signed provenance (in-toto, SLSA) of shipped kernels.

    Subjects are sources, receipts and cubins, by SHA-256. Materials are specs, templates, code, compiler and headers.
    Needs no GPU.

    [bold]Examples[/bold]
      openssl genpkey -algorithm ed25519 -out key.pem
      codegen attest --all --key key.pem --out attestation
    """
    from runtime.tools.attest import keys

    keys.require()
    from codegen.commands import chosen
    from runtime.tools.attest.envelope import sealed
    from runtime.tools.attest.statement import SBOM, attested, compiled_for

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
        told.note("key", identity, f"{plural(len(compiled), 'kernel')}, signed by the key {identity}")
        where = f"commit {tree.commit}" if tree.commit else "a tree outside of any repository"
        dirty = f", with {plural(len(tree.changed), 'changed file')}" if tree.changed else ""
        told.note("commit", tree.commit, f"of {where}{dirty}")


def _tree(out: Path, *, allow_dirty: bool) -> Tree:
    """The tree to attest.

    Raises:
        CodegenError: for uncommitted changes, unless they are allowed.
    """
    from runtime import git
    from runtime.tools.attest.statement import SBOM, Tree

    if not (IN_SOURCE_TREE and any((folder / ".git").exists() for folder in (ROOT, *ROOT.parents))):
        return Tree()
    commit = git.commit_of("HEAD", ROOT)
    changed = git.changed_files(ROOT, [out / SBOM, out / ENVELOPE])
    if changed and not allow_dirty:
        few = ", ".join(map(one_line, changed[:FEW])) + (", ..." if len(changed) > FEW else "")
        raise CodegenError(
            f"the tree differs from commit {commit[:12]} ({few}): commit or undo the changes, or use --allow-dirty"
        )
    return Tree(commit, tuple(map(one_line, changed)))


@command("verify-attestation", MAINTAIN)
def verify_attestation_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help=f"The file that codegen attest wrote: {ENVELOPE}.")],
    *,
    key: Annotated[Path, typer.Option("--key", metavar="FILE", help="The public key in PEM.")],
    tree: Annotated[
        Path | None,
        typer.Option(
            "--tree", metavar="DIR", help="The source tree to compare. By default, this package.", show_default=False
        ),
    ] = None,
    cubins: Annotated[
        Path | None,
        typer.Option(
            "--cubins",
            metavar="WHEEL",
            help="Also compare the cubins in a wheel or a folder.",
            show_default=False,
        ),
    ] = None,
    rebuild: Annotated[
        int,
        typer.Option("--rebuild", metavar="N", min=0, help="Number of kernels to recompile: a new sample each day."),
    ] = 0,
    turn: Annotated[
        int | None,
        typer.Option(
            "--turn",
            metavar="N",
            min=0,
            help="Number of the sample of --rebuild. By default, the day's.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check the signature and the hashes of an attestation.

    Compares each hash with the tree. With --rebuild, also recompiles a sample of kernels and compares the cubins. Needs
    neither a network nor a GPU; only --rebuild needs NVRTC. The exit code is 1 if something differs.

    [bold]Examples[/bold]
      codegen verify-attestation attestation/kernels.intoto.json --key key.pub.pem
      codegen verify-attestation attestation/kernels.intoto.json --key key.pub.pem --rebuild 5
      codegen verify-attestation attestation/kernels.intoto.json --key key.pub.pem --cubins cubins.whl
    """
    from runtime.tools.attest import keys

    keys.require()
    from runtime.tools.attest.envelope import opened
    from runtime.tools.attest.statement import PACKAGE_FOLDER, statement_of
    from runtime.tools.attest.verification import check_compiler, compared, compared_code, files_of

    public = keys.public_key(key)
    statement = statement_of(opened(file, public), file)
    hashes = files_of(statement, file)
    if rebuild:
        check_compiler(statement)
    with report(as_json=as_json) as told:
        told.note("key", keys.key_id(public), f"signature: by the key {keys.key_id(public)}")
        commit = next((each.digest.gitCommit for each in statement.definition.resolvedDependencies), None)
        told.note("commit", commit or "", f"commit: {commit or 'not recorded'}")
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
    """The folder of ``--tree``.

    Raises:
        CodegenError: if it has no generated/.
    """
    if not (folder / "generated").is_dir():
        raise CodegenError(
            f"--tree: {one_line(str(folder), MOST_OF_PLACE)} has no folder generated/: name the root of a source tree"
        )
    return folder


def _tell(told: Report, what: str, found: list[Finding]) -> None:
    """Report each file that differs from the attestation, and counts."""
    for each in found:
        line = f"{each.state}: {one_line(each.name)}" if each.failed else ""
        told.row({"checked": what, "name": each.name, "state": each.state}, line)
    others = [each.name for each in found if each.state == "not attested"]
    count = len(found) - len(others)
    told.say(f"{what}: {count - sum(each.failed for each in found)} of {count} as attested")
    if others:
        told.say(f"not attested: {plural(len(others), 'source')} of the tree, such as {one_line(others[0])}")


def _rebuild(told: Report, statement: Statement, hashes: dict[str, str], count: int, turn: int | None) -> list[Finding]:
    """Recompile a sample of kernels."""
    from runtime.tools.attest.verification import rebuilt, sample

    turn = datetime.datetime.now(datetime.UTC).toordinal() if turn is None else turn
    stems = sample(statement.definition.externalParameters.kernels, count, turn)
    found = [rebuilt(stem, hashes) for stem in told.steps("rebuilding", stems, str)]
    _tell(told, "rebuilt", found)
    told.note("turn", turn, f"sample {turn} (--turn): {', '.join(map(one_line, stems))}")
    return found
