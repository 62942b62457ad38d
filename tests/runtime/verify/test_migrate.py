"""Receipts follow names and comments as long as machine code and launch are the same; files get the names of today."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import IO, Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("torch")

from codegen import library, migrations
from codegen.cases import case_names, most_allowed
from codegen.json_rows import json_rows
from codegen.library import NamedSpec, find_spec, read_spec, read_specs
from codegen.migrations import Renamed
from codegen.planning import plan_for
from codegen.receipts import (
    CaseRecord,
    MeasurementRecord,
    Receipt,
    ReceiptStatus,
    VerificationRecord,
    read_receipt,
    state,
    write_receipt,
)
from codegen.render import render, seal, without_seal
from codegen.spec import canonical
from codegen.twins import twin_source
from runtime.cli import app
from runtime.compile import inspection
from runtime.verify import version1
from runtime.verify.receipts import receipt

pytestmark = pytest.mark.nvrtc

run = CliRunner()
disassemble = cache(inspection.disassemble)
NAME, HOPPER = "l4_tile_copy_cp_async", "h100_tile_copy_tma"
FACTS = {"device": "a device", "driver": "1.0", "oracle": "float64", "torch": "2"}
TIMING = MeasurementRecord(
    shape="a shape", milliseconds=1.0, tflops=2.0, peer="a peer", peer_milliseconds=2.0, peer_tflops=1.0
)


@pytest.fixture(scope="module")
def cache_of_all(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def compiled_once(cache_of_all: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile and disassemble a kernel for the first test that wants it; own_cache has nothing yet."""
    monkeypatch.setenv("CODEGEN_CACHE_DIR", str(cache_of_all))
    monkeypatch.setattr(inspection, "disassemble", disassemble)


def place(named: NamedSpec, folder: Path, suffix: str = "json") -> Path:
    path = folder / named.subfolder / f"{named.stem}.{suffix}"
    path.parent.mkdir(exist_ok=True)
    return path


def verified(named: NamedSpec) -> VerificationRecord:
    """A record of all cases of a spec, without an error."""
    plan = plan_for(named)
    facts: dict[str, Any] = {"description": "", "max_error": 0.0, "torch_error": None, "passed": True}
    cases = tuple(CaseRecord(name=name, tolerance=most_allowed(plan), **facts) for name in case_names(plan))
    return VerificationRecord(**FACTS, target=f"{named.spec.arch} cubin", worst_error=0.0, cases=cases)


def written(named: NamedSpec, folder: Path) -> Receipt:
    """Write a whole receipt and its source, and return it."""
    found = receipt(named, verified(named), (TIMING,))
    found.write(place(named, folder))
    place(named, folder, "cu").write_text(render(named))
    return found


def of_older(named: NamedSpec, folder: Path, *renamings: tuple[str, str], **values: Any) -> Receipt:
    """Write a receipt and a source as they were when fields of the spec were called otherwise (new, old)."""
    found = written(named, folder)
    today = named.spec.canonical_json()
    fields = json.loads(today)
    for new, old in renamings:
        fields[old] = fields.pop(new)
    json_then = canonical(fields | values)
    hash_then = hashlib.sha256(json_then.encode()).hexdigest()
    text = render(named).replace(today, json_then).replace(named.spec.hash, hash_then)
    place(named, folder, "cu").write_text(text)
    spec = found.spec.model_copy(update={"hash": hash_then})
    source = found.source.model_copy(update={"sha256": hashlib.sha256(text.encode()).hexdigest()})
    older = found.model_copy(update={"spec": spec, "source": source})
    older.write(place(named, folder))
    return older


def with_changes(earlier: Receipt, part: str, change: dict[str, Any]) -> Receipt:
    return earlier.model_copy(update={part: getattr(earlier, part).model_copy(update=change)})


def migrate(*arguments: str | Path) -> Any:
    return run.invoke(app, ["migrate", *map(str, arguments)])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", [NAME, HOPPER])
def test_another_comment_keeps_what_is_known_of_the_same_code(name: str, tmp_path: Path) -> None:
    named = find_spec(name)
    path, source = place(named, tmp_path), place(named, tmp_path, "cu")
    right = written(named, tmp_path)
    source.write_text(seal("// an older comment\n\nint x;\n"))
    with_changes(right, "source", {"sha256": "0" * 64}).write(path)
    assert state(named, render(named), tmp_path).standing is ReceiptStatus.STALE
    result = migrate(name, "--out", tmp_path)
    assert result.exit_code == 0 and result.output == f"carried over  {name}\n"
    assert Receipt.read(path) == right and source.read_text() == render(named)
    assert state(named, render(named), tmp_path).standing is ReceiptStatus.OK
    assert migrate(name, "--out", tmp_path).output == f"up to date  {name}\n"
    # What is bound already is not compiled again, so it needs no compiler of its own.
    with_changes(right, "cubin", {"compiler_package": "nvidia-cuda-nvrtc 12.8.93"}).write(path)
    assert migrate(name, "--out", tmp_path).output == f"up to date  {name}\n"


def test_a_source_that_differs_in_comments_alone_is_not_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiled(*arguments: object) -> None:
        raise AssertionError("is compiled")

    named = find_spec(NAME)
    right, source = written(named, tmp_path), place(named, tmp_path, "cu")
    monkeypatch.setattr("runtime.verify.migration.compile_spec", compiled)
    for line in ("// A comment more.\n", "\n/* Another */ // of two kinds\n", "constexpr int kOneMore = 1;\n"):
        text = render(named) + line
        source.write_text(text)
        older = with_changes(right, "source", {"sha256": hashlib.sha256(text.encode()).hexdigest()})
        older.write(place(named, tmp_path))
        result = migrate(NAME, "--out", tmp_path)
        if "constexpr" in line:
            assert result.exit_code and "is compiled" in str(result.exception)
        else:
            assert result.output == f"carried over  {NAME}\n" and Receipt.read(place(named, tmp_path)) == right


@pytest.mark.parametrize(
    ("part", "change", "says"),
    [
        ("cubin", {"sha256": "0" * 64}, "sha256 is "),
        ("cubin", {"ptx_sha256": "0" * 64}, "ptx_sha256 is "),
        ("cubin", {"launch_sha256": "0" * 64}, "launch_sha256 is "),
        ("cubin", {"launch_sha256": None}, "the receipt says None"),
        ("cubin", {"ptx_sha256": None}, "the receipt says None"),
        ("cubin", {"compiler_package": "nvidia-cuda-nvrtc 12.8.93"}, "the receipt says nvidia-cuda-nvrtc 12.8.93"),
        ("cubin", {"dynamic_shared_bytes": 1}, "the receipt says 1"),
        ("spec", {"hash": "0" * 64}, "its spec has changed, and "),
        ("source", {"file": "generated/l4_copy.cu"}, "its receipt describes a kernel named l4_copy, and the name is"),
    ],
)
@pytest.mark.parametrize("check", [(), ("--check",)])
def test_another_code_or_launch_is_refused(
    part: str, change: dict[str, Any], says: str, check: tuple[str, ...], tmp_path: Path
) -> None:
    named = find_spec(NAME)
    earlier = with_changes(written(named, tmp_path), "source", {"sha256": "0" * 64})
    with_changes(earlier, part, change).write(place(named, tmp_path))
    before = contents(tmp_path)
    result = migrate(NAME, "--out", tmp_path, *check)
    assert result.exit_code == 1 and says in result.stderr
    assert result.stderr.startswith(f"{NAME}: ") and result.stderr.endswith(f"; run: codegen verify {NAME}\n")
    assert contents(tmp_path) == before


def test_a_receipt_is_needed(tmp_path: Path) -> None:
    result = migrate(NAME, "--out", tmp_path)
    assert result.exit_code == 1 and result.stderr == f"{NAME}: has no receipt; run: codegen verify {NAME}\n"
    place(find_spec(NAME), tmp_path).write_text("{}")
    result = migrate(NAME, "--out", tmp_path)
    assert result.exit_code == 1 and f"{NAME}.json: spec: Field required; run: codegen verify" in result.stderr
    assert list(contents(tmp_path)) == [f"ladder/{NAME}.json"]


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if stages had been called depth, and their copy asynchronous."""
    table = (
        Renamed("tile_copy", "depth", "stages"),
        Renamed("tile_copy", "copy", "copy", {"asynchronous": "cp_async"}),
    )
    monkeypatch.setattr(migrations, "TABLE", table)


def test_a_receipt_follows_renamed_fields_and_values(table: None, tmp_path: Path) -> None:
    named = find_spec(NAME)
    path = place(named, tmp_path)
    right = written(named, tmp_path)
    older = of_older(named, tmp_path, ("stages", "depth"), copy="asynchronous")
    assert '"depth":' in place(named, tmp_path, "cu").read_text() and older.spec.hash != right.spec.hash
    before = contents(tmp_path)
    result = migrate(NAME, "--out", tmp_path, "--check")
    assert (result.exit_code, result.output) == (1, f"would change  {NAME}\n") and contents(tmp_path) == before
    result = migrate(NAME, "--out", tmp_path)
    assert (result.exit_code, result.output) == (0, f"carried over  {NAME}\n")
    assert Receipt.read(path) == right and place(named, tmp_path, "cu").read_text() == render(named)
    assert migrate(NAME, "--out", tmp_path, "--check").exit_code == 0


def test_the_table_must_say_all_that_changed(table: None, tmp_path: Path) -> None:
    of_older(find_spec(NAME), tmp_path, ("stages", "depth"), dtype="bf16", lse=True)
    before = contents(tmp_path)
    result = migrate(NAME, "--out", tmp_path)
    assert result.exit_code == 1 and f"{NAME}: its spec has changed by more than names: dtype, lse; " in result.stderr
    assert contents(tmp_path) == before


def test_renamed_fields_do_not_excuse_another_code(table: None, tmp_path: Path) -> None:
    named = find_spec(NAME)
    older = of_older(named, tmp_path, ("stages", "depth"))
    text = place(named, tmp_path, "cu").read_text() + "constexpr int kOfOld = 1;\n"
    place(named, tmp_path, "cu").write_text(text)
    older = with_changes(older, "source", {"sha256": hashlib.sha256(text.encode()).hexdigest()})
    for change in ({"sha256": "0" * 64}, {"launch_sha256": "0" * 64}):
        with_changes(older, "cubin", change).write(place(named, tmp_path))
        before = contents(tmp_path)
        result = migrate(NAME, "--out", tmp_path)
        assert result.exit_code == 1 and next(iter(change)) in result.stderr and contents(tmp_path) == before


def test_the_old_source_must_be_there(table: None, tmp_path: Path) -> None:
    named = find_spec(NAME)
    of_older(named, tmp_path, ("stages", "depth"))
    source = place(named, tmp_path, "cu")
    for text in (render(named), "int x;\n", None):  # as codegen render leaves it, and without a banner
        source.unlink() if text is None else source.write_text(text)
        result = migrate(NAME, "--out", tmp_path)
        assert result.exit_code == 1
        assert f"generated/ladder/{NAME}.cu is not the receipt's source" in result.stderr


def test_nothing_is_written_unless_all_can_be(table: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_older(find_spec(NAME), tmp_path, ("stages", "depth"))
    before = contents(tmp_path)
    opened = Path.open

    def full(self: Path, *how: Any, **more: Any) -> IO[Any]:
        if ".json." in self.name:
            raise OSError(28, "No space left on device")
        return opened(self, *how, **more)

    monkeypatch.setattr(Path, "open", full)
    result = migrate(NAME, "--out", tmp_path)
    assert result.exit_code == 2 and f"{NAME}.json: No space left on device" in result.stderr
    assert contents(tmp_path) == before


def version_1(right: Receipt, named: NamedSpec) -> Receipt:
    older = with_changes(right, "cubin", {"launch_sha256": version1.launch_sha256(plan_for(named))})
    return older.model_copy(update={"schema_version": 1})


def test_version_1_is_carried_over_once(tmp_path: Path) -> None:
    named = find_spec(HOPPER)
    path = place(named, tmp_path)
    right = written(named, tmp_path)
    older = version_1(right, named)
    assert older.cubin.launch_sha256 != right.cubin.launch_sha256
    older.write(path)
    found = state(named, render(named), tmp_path)
    assert (found.standing, found.explanation) == (
        ReceiptStatus.STALE,
        "it has version 1, whose launch hash includes names",
    )
    assert migrate(HOPPER, "--out", tmp_path).output == f"carried over  {HOPPER}\n"
    assert Receipt.read(path) == right
    with_changes(older, "source", {"sha256": "0" * 64}).write(path)  # and comments have changed meanwhile
    assert migrate(HOPPER, "--out", tmp_path).exit_code == 0 and Receipt.read(path) == right


@pytest.mark.parametrize("change", [{"launch_sha256": "0" * 64}, {"launch_sha256": None}])
def test_version_1_of_another_launch_is_told(change: dict[str, Any], tmp_path: Path) -> None:
    named = find_spec(HOPPER)
    path = place(named, tmp_path)
    with_changes(version_1(written(named, tmp_path), named), "cubin", change).write(path)
    before = contents(tmp_path)
    result = migrate(HOPPER, "--out", tmp_path)
    assert result.exit_code == 1 and "by version 1" in result.stderr and contents(tmp_path) == before


def test_compile_check_names_what_is_of_version_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = find_spec(HOPPER)
    monkeypatch.setattr("codegen.places.GENERATED", tmp_path)
    version_1(written(named, tmp_path), named).write(place(named, tmp_path))
    result = run.invoke(app, ["compile", HOPPER, "--check"])
    assert result.exit_code == 1
    assert result.stderr == f"{HOPPER}: its receipt has version 1; run: codegen migrate {HOPPER}\n"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with one spec, whose receipt is of today."""
    text = find_spec(NAME).path.read_text()  # type: ignore[union-attr]
    specs = tmp_path / "specs"
    specs.mkdir()
    (tmp_path / "generated").mkdir()
    (specs / "l4_copy.yaml").write_text(text)
    monkeypatch.setattr(library, "ROOT", tmp_path)
    monkeypatch.setattr(library, "SPECS", specs)
    written(read_spec(specs / "l4_copy.yaml"), tmp_path / "generated")
    return tmp_path


def move(project: Path, to: str) -> NamedSpec:
    path = project / "specs" / to
    path.parent.mkdir(exist_ok=True)
    (project / "specs" / "l4_copy.yaml").rename(path)
    return read_spec(path)


def test_a_receipt_follows_its_spec_into_another_folder(project: Path) -> None:
    generated = project / "generated"
    earlier = Receipt.read(generated / "l4_copy.json")
    named = move(project, "copies/l4_copy.yaml")
    assert migrate("l4_copy", "--out", generated).output == "carried over  l4_copy\n"
    assert sorted(contents(generated)) == ["copies/l4_copy.cu", "copies/l4_copy.json"]
    found = Receipt.read(generated / "copies" / "l4_copy.json")
    assert (found.spec.file, found.source.file) == ("specs/copies/l4_copy.yaml", "generated/copies/l4_copy.cu")
    assert (found.cubin, found.verification, found.measurement) == (
        earlier.cubin,
        earlier.verification,
        earlier.measurement,
    )
    assert state(named, render(named), generated).standing is ReceiptStatus.OK


def test_a_renamed_kernel_is_another(project: Path) -> None:
    generated = project / "generated"
    move(project, "l4_other.yaml")
    before = contents(generated)
    result = migrate("l4_other", "--out", generated)
    assert result.exit_code == 1 and contents(generated) == before
    assert result.stderr == (
        "l4_other: its receipt describes a kernel named l4_copy, and the name is part of the machine code; "
        "run: codegen verify l4_other\n"
    )
    for suffix in ("cu", "json"):
        (generated / f"l4_copy.{suffix}").rename(generated / f"l4_other.{suffix}")
    assert "a kernel named l4_copy" in migrate("l4_other", "--out", generated).stderr


@pytest.fixture
def write_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Writes a spec file into the current folder and returns its relative path."""
    monkeypatch.chdir(tmp_path)

    def write(text: str, name: str) -> Path:
        Path(name).write_text(text)
        return Path(name)

    return write


FILE = "# mine\nop: tile_copy\narch: sm_89\ncopy: asynchronous  # how\ndepth: 3\n"


def test_a_users_file_is_rewritten(table: None, write_yaml: Callable[..., Path]) -> None:
    path = write_yaml(FILE, "mine.yaml")
    told = "mine.yaml: depth -> stages\n{0}  mine.yaml: copy: asynchronous -> cp_async\n"
    result = migrate(path, "--check")
    assert (result.exit_code, result.output) == (1, "would change  " + told.format("would change"))
    assert path.read_text() == FILE
    result = migrate(path)
    assert (result.exit_code, result.output) == (0, "carried over  " + told.format("carried over"))
    assert path.read_text() == "# mine\nop: tile_copy\narch: sm_89\ncopy: cp_async  # how\nstages: 3\n"
    assert list(Path().iterdir()) == [path]
    result = migrate(path)
    assert (result.exit_code, result.output) == (0, "up to date  mine.yaml\n")


def test_a_users_file_with_a_receipt(table: None, write_yaml: Callable[..., Path]) -> None:
    """The old name is told with the command, and the command does all."""
    path = write_yaml(FILE.replace("asynchronous", "cp_async").replace("depth", "stages"), "mine.yaml")
    right = written(read_spec(path), Path())
    of_older(read_spec(path), Path(), ("stages", "depth"), copy="asynchronous")
    path.write_text(FILE)
    result = run.invoke(app, ["render", "mine.yaml"])
    assert result.exit_code == 2
    assert result.stderr == "error: mine.yaml:5: depth: is now named stages; run: codegen migrate mine.yaml\n"
    before = contents(Path())
    assert migrate(path, "--check").exit_code == 1 and contents(Path()) == before
    assert migrate(path).output.splitlines()[-1] == "carried over  mine"
    assert Receipt.read(Path("mine.json")) == right


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (FILE + "warps: 4\n", "error: mine.yaml:6: warps: is not a field of this spec"),
        (FILE + "stages: 2\n", "error: mine.yaml:5: depth: is now named stages, which is given too"),
        (FILE.replace("depth:", "depth: &d"), None),
        (FILE.replace("asynchronous", "&a asynchronous"), "error: mine.yaml:4: copy: is asynchronous, which is now"),
        ("op: [", "error: mine.yaml:2: "),
    ],
)
def test_what_cannot_be_mapped_is_refused(
    table: None, write_yaml: Callable[..., Path], text: str, says: str | None
) -> None:
    path = write_yaml(text, "mine.yaml")
    result = migrate(path)
    assert result.exit_code == (2 if says else 0)
    assert result.stderr.startswith(says or "") and (path.read_text() == text) == (says is not None)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "name specs or files, or say --all"),
        (["--all", NAME], "name specs or say --all, not both"),
        (["l4_topk23"], "no spec is named 'l4_topk23', and there is no such file; did you mean"),
        (["nothing.yaml"], "nothing.yaml: cannot be read: No such file"),
        (["nothing.json"], "nothing.json: "),
    ],
)
def test_arguments_that_are_refused(arguments: list[str], says: str) -> None:
    result = migrate(*arguments)
    assert result.exit_code == 2 and result.stderr.startswith(f"error: {says}")


def test_rows_follow_by_the_same_command(tmp_path: Path) -> None:
    from runtime.compile import toolchain
    from runtime.verify.rows import kernel_fields

    named = find_spec(NAME)
    right = {"name": NAME, **kernel_fields(named)}
    older = right | {"source_sha256": "0" * 64}
    path = tmp_path / "run.json"
    report = {"versions": {"compiler": toolchain.compiler_version()[1]}, "rows": [older, right | older | {"name": "x"}]}
    path.write_text(json_rows(report))
    before = path.read_bytes()
    assert migrate(path, "--check").exit_code == 1 and path.read_bytes() == before
    result = migrate(path)
    assert result.exit_code == 0
    assert "rows: 1 carried over, 0 up to date\n    unchanged, its machine code" in result.output
    report["rows"][0] = right
    assert path.read_text() == json_rows(report)
    assert migrate(path).output.startswith(f"unchanged  {path}: rows: 0 carried over, 1 up to date\n")


def test_the_receipt_of_a_twin_that_was_a_spec_of_its_own(project: Path) -> None:
    """Two specs become one with both types; the receipt of the other type, and its source, go into its files."""
    specs, generated = project / "specs", project / "generated"
    path = specs / "l4_copy.yaml"
    one, other = "dtype: fp16\n", "dtype: bf16\n"
    assert one in path.read_text()
    (specs / "l4_copy_bf16.yaml").write_text(path.read_text().replace(one, other))
    earlier = written(read_spec(specs / "l4_copy_bf16.yaml"), generated)
    (specs / "l4_copy_bf16.yaml").unlink()
    path.write_text(path.read_text().replace(one, "dtype: [fp16, bf16]\n"))
    told = migrate("l4_copy", "--out", generated)
    assert told.output == "carried over  l4_copy_bf16\nup to date  l4_copy\n" and told.exit_code == 0
    assert sorted(contents(generated)) == ["l4_copy.cu", "l4_copy.json"]
    first, twin = read_specs(path)
    for named in (first, twin):
        assert state(named, render(named), generated).standing is ReceiptStatus.OK
    found = read_receipt(twin, generated / "l4_copy.json")
    assert (found.spec.file, found.source.file) == ("specs/l4_copy.yaml", "generated/l4_copy.cu")
    assert (found.cubin, found.verification, found.measurement) == (
        earlier.cubin,
        earlier.verification,
        earlier.measurement,
    )
    assert migrate("l4_copy_bf16", "--out", generated).output == "up to date  l4_copy_bf16\nup to date  l4_copy\n"


def test_a_twin_whose_first_type_was_never_verified(project: Path) -> None:
    """Its receipt is kept; the other one says that the kernel was compiled."""
    specs, generated = project / "specs", project / "generated"
    path = specs / "l4_new.yaml"
    path.write_text((specs / "l4_copy.yaml").read_text().replace("dtype: fp16\n", "dtype: bf16\n"))
    path.rename(specs / "l4_new_bf16.yaml")
    written(read_spec(specs / "l4_new_bf16.yaml"), generated)
    (specs / "l4_new_bf16.yaml").rename(path)
    path.write_text(path.read_text().replace("dtype: bf16\n", "dtype: [fp16, bf16]\n"))
    assert migrate("l4_new", "--out", generated).exit_code == 0
    first, twin = read_specs(path)
    assert state(twin, render(twin), generated).standing is ReceiptStatus.OK
    assert state(first, render(first), generated).standing is ReceiptStatus.UNVERIFIED
    assert not (generated / "l4_new_bf16.cu").exists() and not (generated / "l4_new_bf16.json").exists()


def test_a_comment_of_a_source_with_a_twin(project: Path) -> None:
    """Both receipts follow the source, and no compiler is needed."""
    specs, generated = project / "specs", project / "generated"
    path = specs / "l4_copy.yaml"
    path.write_text(path.read_text().replace("dtype: fp16\n", "dtype: [fp16, bf16]\n"))
    first, twin = read_specs(path)
    right = {named.stem: written_into(named, generated) for named in (first, twin)}
    old = seal(without_seal(render(first)) + "// A remark.\n")
    (generated / "l4_copy.cu").write_text(old)
    for named, text in ((first, old), (twin, twin_source(old, "l4_copy"))):
        sha256 = hashlib.sha256(text.encode()).hexdigest()
        older = with_changes(right[named.stem], "source", {"sha256": sha256})
        write_receipt(named, older, generated / "l4_copy.json")
        assert state(named, render(named), generated).standing is ReceiptStatus.STALE
    told = migrate("l4_copy", "--out", generated)
    assert told.output == "carried over  l4_copy_bf16\ncarried over  l4_copy\n"
    for named in (first, twin):
        assert read_receipt(named, generated / "l4_copy.json") == right[named.stem]
        assert state(named, render(named), generated).standing is ReceiptStatus.OK


def written_into(named: NamedSpec, folder: Path) -> Receipt:
    """Write the receipt of one type into the file of both, and return it."""
    found = receipt(named, verified(named), (TIMING,))
    write_receipt(named, found, folder / f"{named.main.stem}.json")
    return found
