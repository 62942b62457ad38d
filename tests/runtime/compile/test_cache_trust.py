"""The cache loads nothing that others could have written, makes folders for the user alone, and finds its place."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from cache_values import acl_of, build, build_never, identity
from stress.cache_attacks import run_all
from typer.testing import CliRunner

from runtime import cli
from runtime.compile import cache_trust
from runtime.compile.cache import KernelCache
from runtime.compile.cache_environment import TRUST_OTHERS, default_folder
from runtime.errors import CacheError

KERNEL = identity("kernel")
OTHER_USER = 54321


@pytest.fixture
def cache(tmp_path: Path) -> KernelCache:
    """A cache with one kernel, in a folder of this test."""
    cache = KernelCache(tmp_path / "above" / "cache")
    cache.get_or_build(KERNEL, build)
    return cache


@pytest.fixture
def give_away() -> Callable[[Path], None]:
    """Make a file another user's."""

    def give(path: Path) -> None:
        if os.geteuid() != 0:
            pytest.skip("only root can give a file away")
        os.chown(path, OTHER_USER, OTHER_USER, follow_symlinks=False)

    return give


def give_write(path: Path, kind: str) -> None:
    """Let another user write by an access control list, of a file or folder itself or of what is made in a folder."""
    try:
        os.setxattr(path, f"system.posix_acl_{kind}", acl_of(OTHER_USER))
    except OSError as error:
        pytest.skip(f"no access control lists here: {error.strerror}")


def uses(cache: KernelCache) -> list[Callable[[], object]]:
    return [
        lambda: cache.get_or_build(KERNEL, build_never),
        lambda: cache.get_or_build(identity("missing"), build_never),
        lambda: list(cache.entries()),
        lambda: cache.file_of(KERNEL.key),
        cache.clear,
    ]


def refused(cache: KernelCache, path: Path, reason: str, remedy: str) -> None:
    """Check that every use is refused, and what is said of it."""
    for use in uses(cache):
        with pytest.raises(CacheError) as caught:
            use()
        assert f"{path} {reason}" in str(caught.value) and remedy in str(caught.value)
        assert f"CODEGEN_CACHE_DIR to a folder of your own; or set {TRUST_OTHERS}=1" in str(caught.value)


@pytest.mark.parametrize("place", [".", "..", "entries"])
@pytest.mark.parametrize("mode", [0o777, 0o702])
def test_a_folder_that_everybody_can_write_is_refused(cache: KernelCache, place: str, mode: int) -> None:
    path = (cache.folder / place).resolve()
    path.chmod(mode)
    refused(cache, path, f"is writable by everybody (mode {mode:04o})", f"run: chmod go-w {path}")
    path.chmod(path.stat().st_mode & ~0o022)  # as the message says
    assert cache.get_or_build(KERNEL, build_never)[1]


def test_the_folders_of_what_is_being_written_are_checked_too(cache: KernelCache) -> None:
    for name in ("tmp", "locks"):
        (cache.folder / name).chmod(0o777)
        refused(cache, cache.folder / name, "is writable by everybody", "chmod go-w")
        (cache.folder / name).chmod(0o700)


def test_a_group_may_write_above_the_cache_if_it_is_the_users_own(
    cache: KernelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    above = cache.folder.parent
    above.chmod(0o775)
    monkeypatch.setattr(cache_trust, "_is_private", lambda gid, uid: True)
    assert cache.get_or_build(KERNEL, build_never)[1]
    give_write(above, "access")
    refused(cache, above, f"is writable by its group, {above.stat().st_gid} and the users on its", "chmod go-w")
    above.chmod(0o755)  # as the message says
    assert cache.get_or_build(KERNEL, build_never)[1]
    above.chmod(0o775)
    monkeypatch.setattr(cache_trust, "_is_private", lambda gid, uid: False)
    refused(cache, above, f"is writable by its group, {above.stat().st_gid}", "chmod go-w")


@pytest.mark.parametrize("place", [".", "entries", "tmp", "locks", f"entries/{KERNEL.key}"])
@pytest.mark.parametrize("by", ["group", "access"])
def test_in_the_cache_only_the_owner_may_write(
    cache: KernelCache, place: str, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the group: who else has it, no list says. An access list shows in the bits of the group."""
    monkeypatch.setattr(cache_trust, "_is_private", lambda gid, uid: True)
    path, group = (cache.folder / place).resolve(), cache.folder.stat().st_gid
    if by == "group":
        path.chmod(path.stat().st_mode | 0o020)
    else:
        give_write(path, by)
    named = " and the users on its access control list" if by == "access" else ""
    with pytest.raises(CacheError, match=re.escape(f"{path} is writable by its group, {group}{named} (mode 0")):
        cache.get_or_build(KERNEL, build_never)
    path.chmod(path.stat().st_mode & ~0o022)
    assert cache.get_or_build(KERNEL, build_never)[1]


def test_a_default_list_of_a_folder_gives_nobody_anything(cache: KernelCache) -> None:
    for path in (cache.folder.parent, cache.folder, *(cache.folder / name for name in ("entries", "tmp", "locks"))):
        give_write(path, "default")
    other = identity("other")
    assert not cache.get_or_build(other, build)[1] and cache.get_or_build(other, build_never)[1]
    assert stat.S_IMODE((cache.folder / "entries" / other.key).stat().st_mode) == 0o600
    inner = KernelCache(cache.folder.parent / "inner")
    assert not inner.get_or_build(other, build)[1] and inner.get_or_build(other, build_never)[1]


def test_which_groups_are_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class User:
        pw_name, pw_gid = "me", 7

    class Group:
        gr_name, gr_mem = "me", ["me"]

    def private(gid: int = 7) -> bool:
        cache_trust._is_private.cache_clear()
        return cache_trust._is_private(gid, 5)

    monkeypatch.setattr(cache_trust.pwd, "getpwuid", lambda uid: User)
    monkeypatch.setattr(cache_trust.grp, "getgrgid", lambda gid: Group)
    assert private() and not private(8)
    monkeypatch.setattr(User, "pw_gid", 0)
    assert not private(0)  # in containers it is everybody's
    monkeypatch.setattr(User, "pw_gid", 7)
    monkeypatch.setattr(Group, "gr_mem", ["me", "somebody"])
    assert not private()
    monkeypatch.setattr(Group, "gr_mem", [])
    monkeypatch.setattr(Group, "gr_name", "staff")
    assert not private()
    monkeypatch.setattr(cache_trust.pwd, "getpwuid", {}.__getitem__)
    assert not private()
    cache_trust._is_private.cache_clear()


def test_a_sticky_folder_above_is_in_order_but_not_as_the_cache(cache: KernelCache) -> None:
    cache.folder.parent.chmod(0o1777)  # as /tmp
    assert cache.get_or_build(KERNEL, build_never)[1]
    cache.folder.chmod(0o1777)
    refused(cache, cache.folder, "is writable by everybody (mode 1777)", "chmod go-w")


@pytest.mark.parametrize("place", [".", "..", "entries"])
def test_a_folder_of_another_user_is_refused(cache: KernelCache, place: str, give_away: Callable[[Path], None]) -> None:
    path = (cache.folder / place).resolve()
    give_away(path)
    refused(cache, path, f"belongs to uid {OTHER_USER}", "others could put code there")


def test_another_users_link_in_a_sticky_folder_is_refused(
    cache: KernelCache, tmp_path: Path, give_away: Callable[[Path], None]
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    (shared / "link").symlink_to("../above/cache")
    linked = KernelCache(shared / "link")
    assert linked.get_or_build(KERNEL, build_never)[1]
    give_away(shared / "link")
    refused(linked, shared / "link", f"belongs to uid {OTHER_USER}", "set CODEGEN_CACHE_DIR")


def test_what_a_link_passes_is_checked_too(cache: KernelCache, tmp_path: Path) -> None:
    passed = tmp_path / "passed"
    passed.mkdir()
    (passed / "second").symlink_to(cache.folder)
    (tmp_path / "first").symlink_to("passed/second")
    linked = KernelCache(tmp_path / "first")
    assert linked.get_or_build(KERNEL, build_never)[1]
    passed.chmod(0o777)
    refused(linked, passed, "is writable by everybody", "chmod go-w")


def test_links_in_a_circle_are_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    for use in uses(KernelCache(tmp_path / "a")):
        with pytest.raises(CacheError, match=r"cannot be used \(Too many levels of symbolic links\)"):
            use()


def test_a_planted_entry_is_refused(cache: KernelCache, give_away: Callable[[Path], None]) -> None:
    path = cache.file_of(KERNEL.key)
    assert path is not None
    path.chmod(0o666)
    with pytest.raises(CacheError, match=rf"{path} is writable by everybody \(mode 0666\), .* run: rm {path}; or"):
        cache.get_or_build(KERNEL, build_never)
    path.chmod(0o600)
    assert cache.get_or_build(KERNEL, build_never)[1]
    give_away(path)
    with pytest.raises(CacheError, match=f"{path} belongs to uid {OTHER_USER}"):
        cache.get_or_build(KERNEL, build_never)
    assert cache.clear() == 1


def test_a_link_in_the_place_of_a_folder_of_the_cache_is_refused(cache: KernelCache, tmp_path: Path) -> None:
    (cache.folder / "entries").rename(tmp_path / "elsewhere")
    (cache.folder / "entries").symlink_to(tmp_path / "elsewhere")
    for use in uses(cache):
        with pytest.raises(CacheError, match=r"Not a directory.*it was .*entries"):
            use()
    assert len(list((tmp_path / "elsewhere").iterdir())) == 1


def test_who_insists_is_served(cache: KernelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (cache.folder, cache.folder / "entries", cache.folder / "entries" / KERNEL.key):
        path.chmod(0o777)
    monkeypatch.setenv(TRUST_OTHERS, "0")
    with pytest.raises(CacheError, match=f"{TRUST_OTHERS}=1"):
        KernelCache(cache.folder).get_or_build(KERNEL, build_never)
    monkeypatch.setenv(TRUST_OTHERS, "1")
    assert KernelCache(cache.folder).get_or_build(KERNEL, build_never)[1]
    monkeypatch.setenv(TRUST_OTHERS, "yes")
    with pytest.raises(CacheError, match=f"{TRUST_OTHERS} is 'yes'; expected 1 .* or 0"):
        KernelCache(cache.folder)


def test_folders_are_made_for_the_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        cache = KernelCache(tmp_path / "a" / "b" / "cache")
        cache.get_or_build(KERNEL, build)
    finally:
        os.umask(before)
    made = [path for path in (tmp_path / "a", *(tmp_path / "a").rglob("*")) if path.is_dir()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in made} == {0o700} and len(made) == 6
    assert cache.get_or_build(KERNEL, build_never)[1]


@pytest.mark.parametrize(
    ("ranges", "trusted"), [("0 0 4294967295\n", ()), ("1000 1000 1\n", (65534,)), ("0 1000 1\n1 100000 65536\n", ())]
)
def test_a_container_that_does_not_know_root_shows_it_as_another_user(
    ranges: str, trusted: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {"/proc/sys/kernel/overflowuid": "65534\n", "/proc/self/uid_map": ranges}
    monkeypatch.setattr(cache_trust.Path, "read_text", lambda path, encoding: told[str(path)])
    cache_trust._unknown_outside.cache_clear()
    assert cache_trust._unknown_outside() == trusted
    cache_trust._unknown_outside.cache_clear()


def test_a_home_folder_is_expanded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CODEGEN_CACHE_DIR", "~/cache")
    assert KernelCache().folder == default_folder() == tmp_path / "cache"
    monkeypatch.setenv("CODEGEN_CACHE_DIR", "~no_such_user/cache")
    with pytest.raises(CacheError, match=r"CODEGEN_CACHE_DIR is '~no_such_user/cache', and there is no such home"):
        KernelCache()


HOMELESS = """
import pwd, sys
from runtime.cli import main
pwd.getpwuid = {}.__getitem__  # an unknown user
sys.argv = ["codegen", *sys.argv[1:]]
main()
"""


@pytest.mark.parametrize("command", ["path", "list", "clear"])
def test_without_a_home_folder_commands_say_what_to_set(command: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    environ = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    call = [sys.executable, "-c", HOMELESS, "cache", command]
    result = subprocess.run(call, env=environ, capture_output=True, text=True, check=False, timeout=60)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: the cache lies in the user's home folder, and there is no such home folder")
    assert "set CODEGEN_CACHE_DIR to a writable folder, or HOME" in result.stderr
    environ["CODEGEN_CACHE_DIR"] = "/nowhere"
    result = subprocess.run(call, env=environ, capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 0


def test_errors_show_any_folder_in_one_line(tmp_path: Path) -> None:
    folder = tmp_path / ("a\n\udcff" + "x" * 200)
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(CacheError, match="run: chmod go-w") as caught:
        KernelCache(folder).clear()
    assert str(caught.value).isprintable()
    for nowhere in (tmp_path / "a\0", tmp_path / "\ud800"):
        with pytest.raises(CacheError, match="cannot be the folder of the kernel cache") as caught:
            KernelCache(nowhere).clear()
        assert str(caught.value).isprintable()


def test_a_folder_that_no_terminal_prints_is_told(tmp_path: Path) -> None:
    environ = os.environ | {"CODEGEN_CACHE_DIR": f"{tmp_path}/\udcff", "PYTHONIOENCODING": "utf-8:strict"}
    call = [sys.executable, "-m", "sparse_kernel_codegen", "cache"]
    for command in ("path", "list", "clear"):
        done = subprocess.run([*call, command], env=environ, capture_output=True, text=True, check=False, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")


def test_the_path_is_told_whatever_else_is_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CODEGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CODEGEN_CACHE_MAX_BYTES", "many")
    tmp_path.chmod(0o777)
    result = CliRunner().invoke(cli.app, ["cache", "path"])
    assert (result.exit_code, result.stdout) == (0, f"{tmp_path}\n")


def test_attacks_are_refused() -> None:
    """A small version of ``python tests/stress/cache_attacks.py --full``."""
    with tempfile.TemporaryDirectory() as folder:  # pytest's own is for its user alone
        rows = run_all(0.5, Path(folder))
    assert not [row for row in rows if not row[1]]
    tried = [name for name, _, _, told in rows if not told.startswith("not tried")]
    if len(tried) < len(rows):
        pytest.skip("tried " + ", ".join(tried) + "; " + "; ".join(row[3] for row in rows if row[0] not in tried))
