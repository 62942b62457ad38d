"""Attestations: written, signed, and checked again; whatever is changed is found."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("cryptography")

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from codegen.installation import install_command
from codegen.library import ROOT, find_spec
from codegen.render import render
from runtime.cli import app
from runtime.compile import toolchain
from runtime.compile.compiler import compile_spec
from runtime.tools.attest import cli, keys, statement, verification
from runtime.tools.attest.envelope import sealed, signed_bytes
from runtime.tools.attest.statement import Tree
from runtime.tools.attest.verification import Finding, sample

pytestmark = pytest.mark.nvrtc

KERNELS = ("l4_bsr_spmm_b64", "l4_bsr_spmm_b128")
PEM, PKCS8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
Write = Callable[..., Path]


def pem(key: Any, password: str = "") -> bytes:
    kind = serialization.BestAvailableEncryption(password.encode()) if password else serialization.NoEncryption()
    return key.private_bytes(PEM, PKCS8, kind)  # type: ignore[no-any-return]


def public_pem(key: Any) -> bytes:
    return key.public_key().public_bytes(PEM, serialization.PublicFormat.SubjectPublicKeyInfo)  # type: ignore[no-any-return]


KEY, OTHER_KEY = (ed25519.Ed25519PrivateKey.from_private_bytes(bytes([number] * 32)) for number in (1, 2))


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("key.pem").write_bytes(pem(KEY))
    Path("pub.pem").write_bytes(public_pem(KEY))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An attestation of two kernels."""
    folder = tmp_path_factory.mktemp("attested")
    (folder / "key.pem").write_bytes(pem(KEY))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CODEGEN_CACHE_DIR", str(folder / "cache"))
        patch.setattr(cli, "_tree", lambda out, *, allow_dirty: Tree("0" * 40))
        result = CliRunner().invoke(
            app, ["attest", *KERNELS, "--key", str(folder / "key.pem"), "--out", str(folder / "out")]
        )
    assert result.exit_code == 0, result.output
    return folder / "out"


@pytest.fixture
def attested(written: Path, tmp_path: Path) -> Path:
    """A copy of it, that a test may change; beside it is the project's tree, by links."""
    shutil.copytree(written, tmp_path / "attestation")
    (tmp_path / "tree").mkdir()
    for folder in ("specs", "templates", "generated", "codegen"):
        (tmp_path / "tree" / folder).symlink_to(ROOT / folder)
    return tmp_path / "attestation" / cli.ENVELOPE


@pytest.fixture
def changed(attested: Path) -> Callable[[Callable[[Any], object]], None]:
    """Changes the statement, and signs it again by the same key."""

    def change(how: Callable[[Any], object]) -> None:
        told = payload_of(attested)
        how(told)
        attested.write_text(sealed(told, KEY))

    return change


def own_copy(folder: str) -> None:
    """Make a folder of the tree one that a test may change."""
    place = Path("tree") / folder
    place.unlink()
    shutil.copytree(ROOT / folder, place, ignore=shutil.ignore_patterns("__pycache__"))


def payload_of(path: Path) -> Any:
    return json.loads(base64.b64decode(json.loads(path.read_text())["payload"]))


def check(*arguments: str, key: str = "pub.pem") -> Any:
    command = ["verify-attestation", f"attestation/{cli.ENVELOPE}", "--key", key, "--tree", "tree", *arguments]
    result = CliRunner().invoke(app, command)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def refused(result: Any) -> str:
    """The one line of the error; on a busy machine progress may have been told before."""
    assert result.exit_code == 2, result.output
    last = str(result.stderr.splitlines()[-1])
    assert last.startswith("error: "), result.stderr
    return last


def test_what_is_attested_holds(attested: Path) -> None:
    result = check("--rebuild", "1", "--turn", "0")
    assert result.exit_code == 0, result.output
    assert f"signature: by the key {keys.key_id(KEY.public_key())}" in result.stdout
    assert "commit: " + "0" * 40 in result.stdout
    assert "rebuilt: 1 of 1 as attested" in result.stdout and "sample 0 (--turn): l4_bsr_spmm_b128" in result.stdout
    document = json.loads(check("--json").stdout)
    assert document["complete"] and {row["state"] for row in document["rows"]} == {"ok", "not attested"}


@pytest.fixture(scope="module")
def code(written: Path) -> dict[str, bytes]:
    """The compiled code of the attested kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CODEGEN_CACHE_DIR", str(written.parent / "cache"))
        return {
            f"{name}.{kind}": compile_spec(find_spec(name), kind).code for name in KERNELS for kind in ("cubin", "ptx")
        }


@pytest.mark.parametrize("as_wheel", [True, False])
def test_the_code_of_a_wheel_is_compared(attested: Path, code: dict[str, bytes], as_wheel: bool) -> None:
    def checked(files: dict[str, bytes]) -> tuple[int, str]:
        place = Path("cubins.whl" if as_wheel else "cubins")
        if as_wheel:
            with zipfile.ZipFile(place, "w") as archive:
                for name, data in files.items():
                    archive.writestr(f"sparse_kernel_codegen_cubins/{name}", data)
        else:
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            for name, data in files.items():
                (place / name).write_bytes(data)
        result = check("--cubins", str(place))
        return result.exit_code, result.output

    exit_code, said = checked(code)
    assert exit_code == 0 and "cubins: 4 of 4 as attested\n" in said
    for name, data in code.items():
        exit_code, said = checked({**code, name: data + b"\0"})
        assert exit_code == 1 and f"changed: {name}\n" in said and "cubins: 3 of 4 as attested\n" in said
    exit_code, said = checked({**code, "h100_dense.cubin": b"code", "h100_dense.ptx": b"code"})
    assert exit_code == 1 and "missing: h100_dense.cubin\nmissing: h100_dense.ptx\n" in said
    exit_code, said = checked({})
    assert exit_code == 2 and "has no cubin; expected a wheel built by scripts/cubin_wheel.py" in said
    Path("cubins.whl").write_bytes(b"no zip")
    assert "cubins.whl: is no wheel: File is not a zip file" in refused(check("--cubins", "cubins.whl"))


def test_the_statement_names_sources_receipts_cubins_and_what_they_are_of(written: Path) -> None:
    told = payload_of(written / cli.ENVELOPE)
    assert told["_type"] == "https://in-toto.io/Statement/v1"
    assert told["predicateType"] == "https://slsa.dev/provenance/v1"
    names = {each["name"] for each in told["subject"]}
    assert {f"generated/{KERNELS[0]}.cu", f"generated/{KERNELS[0]}.json", f"cubin/{KERNELS[0]}.cubin"} <= names
    materials = {each["name"] for each in told["predicate"]["buildDefinition"]["resolvedDependencies"]}
    assert {f"specs/{KERNELS[1]}.yaml", "templates/ptx/mma_sync.cuh.j2", statement.CODE, "source tree"} <= materials
    assert toolchain.nvrtc().library.name in materials


def test_the_bill_of_materials_has_packages_and_files(written: Path) -> None:
    bill = json.loads((written / statement.SBOM).read_text())
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    by_name = {each["name"]: each for each in bill["components"]}
    assert {"pydantic", "Jinja2", "nvidia-cuda-nvrtc"} & {*by_name} and by_name["pydantic"]["purl"].startswith(
        "pkg:pypi/"
    )
    assert by_name[f"generated/{KERNELS[0]}.cu"]["hashes"][0]["alg"] == "SHA-256"
    references = [each["bom-ref"] for each in bill["components"]] + [bill["metadata"]["component"]["bom-ref"]]
    assert len(set(references)) == len(references)
    assert all({each["ref"], *each["dependsOn"]} <= set(references) for each in bill["dependencies"])


def test_the_bill_is_by_the_schema(written: Path) -> None:
    schema = pytest.importorskip("cyclonedx.schema")
    validators = pytest.importorskip("cyclonedx.validation.json")
    pytest.importorskip("jsonschema")
    validator = validators.JsonStrictValidator(schema.SchemaVersion.V1_6)
    assert validator.validate_str((written / statement.SBOM).read_text()) is None


def test_the_same_kernels_give_the_same_bytes(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_tree", lambda out, *, allow_dirty: Tree("0" * 40))
    monkeypatch.setenv("CODEGEN_CACHE_DIR", str(written.parent / "cache"))
    result = CliRunner().invoke(app, ["attest", *KERNELS, "--key", "key.pem", "--out", str(written)])
    assert result.stdout.count("up to date") == 2


def test_openssl_finds_the_signature_good(written: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    told = json.loads((written / cli.ENVELOPE).read_text())
    Path("message").write_bytes(signed_bytes(base64.b64decode(told["payload"])))
    Path("signature").write_bytes(base64.b64decode(told["signatures"][0]["sig"]))
    command = "openssl pkeyutl -verify -pubin -inkey pub.pem -rawin -in message -sigfile signature"
    assert subprocess.run(command.split(), capture_output=True, check=False).returncode == 0


# What was changed


@pytest.mark.parametrize(
    ("name", "state"),
    [
        (f"generated/{KERNELS[0]}.cu", "changed"),
        (f"generated/{KERNELS[0]}.json", "missing"),
        (f"specs/{KERNELS[1]}.yaml", "changed"),
        ("templates/ptx/mma_sync.cuh.j2", "missing"),
    ],
)
def test_a_tree_that_differs_is_told(attested: Path, name: str, state: str) -> None:
    own_copy(name.partition("/")[0])
    path = Path("tree") / name
    if state == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes() + b"\n")
    result = check()
    assert result.exit_code == 1 and f"{state}: {name}\n" in result.stdout


def test_other_code_and_another_bill_are_told(attested: Path) -> None:
    own_copy("codegen")
    Path("tree/codegen/more.py").write_text("")
    attested.with_name(statement.SBOM).write_text("{}")
    result = check()
    assert result.exit_code == 1
    assert f"changed: {statement.CODE}\n" in result.stdout and f"changed: {statement.SBOM}\n" in result.stdout


def test_a_source_that_is_not_attested_is_no_failure(attested: Path) -> None:
    result = check()
    assert result.exit_code == 0 and "sources of the tree, such as generated/" in result.stdout


def test_a_cubin_that_is_not_rebuilt_is_told(changed: Callable[[Callable[[Any], object]], None]) -> None:
    def other_cubins(told: Any) -> None:
        for each in told["subject"]:
            if each["name"].startswith("cubin/"):
                each["digest"]["sha256"] = "0" * 64

    changed(other_cubins)
    assert check().exit_code == 0
    result = check("--rebuild", "2")
    assert result.exit_code == 1 and f"changed: cubin/{KERNELS[0]}.cubin" in result.stdout


def test_a_kernel_that_is_gone_is_missing(attested: Path) -> None:
    assert verification.rebuilt("h100_gone", {}) == Finding("cubin/h100_gone.cubin", "missing")


def test_the_sample_rotates() -> None:
    names = [f"kernel_{number}" for number in range(7)]
    turns = [sample(names, 3, turn) for turn in range(7)]
    assert all(len(set(each)) == 3 for each in turns)
    assert {name for each in turns[:3] for name in each} == set(names)
    assert sample(names, 100, 5) and len(sample(names, 100, 5)) == 7


# Bad input


def test_another_key_and_a_changed_payload_are_refused(attested: Path) -> None:
    Path("other.pem").write_bytes(public_pem(OTHER_KEY))
    assert "is not signed by this key" in refused(check(key="other.pem"))
    told = json.loads(attested.read_text())
    payload = payload_of(attested)
    payload["subject"][0]["digest"]["sha256"] = "0" * 64
    told["payload"] = base64.b64encode(json.dumps(payload).encode()).decode()
    attested.write_text(json.dumps(told))
    assert "or was changed afterwards" in refused(check())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is no DSSE envelope"),
        ("[]", "is no DSSE envelope"),
        ('{"payloadType": 1}', "is no DSSE envelope: payloadType"),
        ('{"payloadType": "a", "payload": "", "signatures": []}', "is no DSSE envelope: signatures"),
        ('{"payloadType": "text/plain", "payload": "", "signatures": [{"sig": ""}]}', "of type text/plain"),
        (
            '{"payloadType": "application/vnd.in-toto+json", "payload": "?", "signatures": [{"sig": ""}]}',
            "payload is not base64",
        ),
        ("\udcff", "is no DSSE envelope"),
    ],
)
def test_what_is_no_envelope_is_refused(attested: Path, text: str, says: str) -> None:
    attested.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert says in refused(check())


def test_a_folder_that_is_no_tree(attested: Path) -> None:
    assert "--tree: attestation has no folder generated/" in refused(check("--tree", "attestation"))


def test_a_file_that_is_not_there_or_too_large(attested: Path) -> None:
    attested.write_bytes(b" " * ((16 << 20) + 1))
    assert "is too large" in refused(check())
    attested.unlink()
    assert "No such file" in refused(check())


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (lambda told: told.clear(), "is no statement with provenance: _type"),
        (lambda told: told.update(predicateType="https://spdx.dev/Document"), "predicateType"),
        (lambda told: told.update(subject=[]), "subject"),
        (lambda told: told["subject"][0]["digest"].update(sha256="0"), "subject.0.digest.sha256"),
        (lambda told: told["subject"][0].update(name="../../etc/passwd"), "which is not a file of a tree"),
        (lambda told: told["subject"][0].update(name="/etc/passwd"), "which is not a file of a tree"),
        (lambda told: told["subject"][0].update(name="generated/../../passwd"), "which is not a file of a tree"),
        (lambda told: told["subject"].append({**told["subject"][0], "digest": {"sha256": "0" * 64}}), "two hashes"),
        (lambda told: told["subject"][0].update(digest={}), "has no sha256"),
        (
            lambda told: told["predicate"]["buildDefinition"]["externalParameters"]["kernels"].append("more"),
            "names no cubin of 'more'",
        ),
        (lambda told: told["predicate"]["buildDefinition"].update(buildType="urn:other"), "has another build type"),
    ],
)
def test_a_signed_statement_of_something_else_is_refused(
    changed: Callable[[Callable[[Any], object]], None], how: Callable[[Any], object], says: str
) -> None:
    changed(how)
    assert says in refused(check())


def test_another_compiler_cannot_rebuild(changed: Callable[[Callable[[Any], object]], None]) -> None:
    def older(told: Any) -> None:
        told["predicate"]["buildDefinition"]["internalParameters"]["compiler"] = "nvidia-cuda-nvrtc 12.0.1"

    changed(older)
    assert check().exit_code == 0
    assert refused(check("--rebuild", "1")).endswith("pip install nvidia-cuda-nvrtc==12.0.1")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "is no private key in PEM"),
        (b"\xff\x00", "is no private key in PEM"),
        (public_pem(KEY), "is no private key in PEM"),
        (pem(ec.generate_private_key(ec.SECP256R1())), "is a key of another kind; ed25519 is wanted"),
        (pem(KEY, "secret"), "has a password: set CODEGEN_KEY_PASSWORD to it"),
    ],
)
def test_what_is_no_private_key_is_refused(data: bytes, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_tree", lambda out, *, allow_dirty: pytest.fail())
    Path("key.pem").write_bytes(data)
    told = refused(CliRunner().invoke(app, ["attest", KERNELS[0], "--key", "key.pem", "--out", "out"]))
    assert told.startswith("error: key.pem: ") and says in told
    assert not Path("out").exists()


def test_a_key_with_a_password(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("key.pem").write_bytes(pem(KEY, "secret"))
    monkeypatch.setenv(keys.PASSWORD, "secret")
    assert keys.key_id(keys.private_key(Path("key.pem")).public_key()) == keys.key_id(KEY.public_key())
    monkeypatch.setenv(keys.PASSWORD, "wrong")
    with pytest.raises(keys.FileError, match="is no private key in PEM"):
        keys.private_key(Path("key.pem"))
    Path("key.pem").write_bytes(pem(KEY))
    with pytest.raises(keys.FileError, match="has no password, but CODEGEN_KEY_PASSWORD is set"):
        keys.private_key(Path("key.pem"))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (pem(KEY), "is a private key; verification needs the public key"),
        (b"?", "is no public key in PEM"),
        (public_pem(ec.generate_private_key(ec.SECP256R1())), "is a key of another kind"),
    ],
)
def test_what_is_no_public_key_is_refused(attested: Path, data: bytes, says: str) -> None:
    Path("pub.pem").write_bytes(data)
    assert says in refused(check())


def test_own_specs_and_stale_sources_are_not_attested(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cli, "_tree", lambda out, *, allow_dirty: Tree())
    Path("own.yaml").write_bytes((find_spec(KERNELS[0]).path or Path()).read_bytes())
    command = ["attest", "own.yaml", "--key", "key.pem", "--out", "out"]
    assert "own is not shipped" in refused(CliRunner().invoke(app, command))
    monkeypatch.setattr(statement, "GENERATED", tmp_path)
    Path(f"{KERNELS[0]}.cu").write_text(render(find_spec(KERNELS[0])) + "// more\n")
    command[1] = KERNELS[0]
    assert f"run: codegen render {KERNELS[0]}" in refused(CliRunner().invoke(app, command))


def test_a_dirty_tree_is_refused_unless_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "ROOT", tmp_path)
    assert cli._tree(tmp_path / "out", allow_dirty=False) == Tree()  # in no repository
    for command in (
        ["init", "-q"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a", "--allow-empty"],
    ):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    with pytest.raises(cli.CodegenError, match=r"the tree differs from commit [0-9a-f]{12} \(key.pem, pub.pem\)"):
        cli._tree(tmp_path / "out", allow_dirty=False)
    dirty = cli._tree(tmp_path / "out", allow_dirty=True)
    assert len(dirty.commit) == 40 and dirty.changed == ("key.pem", "pub.pem")
    Path(".gitignore").write_text("*.pem\n.gitignore\n")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / statement.SBOM).touch()  # what it wrote itself the last time
    assert cli._tree(tmp_path / "out", allow_dirty=False).changed == ()
    # Another file is told wherever it is: beside the tree, in the folder of what is written, in a folder of the tree.
    (tmp_path / "out" / "names.py").touch()
    (tmp_path / "codegen").mkdir()
    (tmp_path / "codegen" / "names.py").touch()
    others = ("codegen/names.py", "out/names.py")
    for out in (tmp_path, tmp_path / "codegen", tmp_path / "codegen" / ".." / "out", Path("out"), Path(), Path("..")):
        found = cli._tree(out, allow_dirty=True).changed
        assert tuple(name for name in found if name.endswith(".py")) == others, out
    assert cli._tree(tmp_path / "codegen" / ".." / "out", allow_dirty=True).changed == others


def test_without_cryptography_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cryptography.hazmat.primitives", None)
    told = refused(CliRunner().invoke(app, ["attest", KERNELS[0], "--key", "key.pem", "--out", "out"]))
    assert told.endswith(install_command("attest"))
