"""Attacks on the kernel cache and on exported kernels: no foreign byte may be served, no file of others lost.

    python tests/stress/cache_attacks.py           # some seconds
    python tests/stress/cache_attacks.py --full    # a minute of races, all edits of all fields

Prints a table and exits with 1 if a line of it is not ok. Nothing is compiled. Attacks by another user need root, those
by access control lists a file system that has them; else a line says that it was not tried.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "support")]

from cache_values import acl_of, build, identity  # noqa: E402 - not installed
from stress.export_attacks import exports_edited, members_replaced, sources_edited  # noqa: E402

from runtime.compile import inspection  # noqa: E402
from runtime.compile.cache import KernelCache  # noqa: E402
from runtime.compile.cache_entry import Entry  # noqa: E402
from runtime.errors import CacheError  # noqa: E402

STRANGER = 12345
KERNEL = identity("kernel")
FOREIGN = Entry(KERNEL, "", b"foreign code")
NOT_ROOT = "not tried: only root can become another user"
INNER = ("entries", "tmp", "locks")


def refused_or_own(cache: KernelCache) -> str:
    """Ask for the kernel; it is refused, or of this user's own making."""
    try:
        entry, _ = cache.get_or_build(KERNEL, build)
    except CacheError:
        return "refused"
    assert entry.code == build()[0], "foreign code is served"
    return "served"


def access_lists(folder: Path, seconds: float) -> str:
    """Another user may write a folder, or an entry, by an access control list."""
    cache = KernelCache(folder / "above" / "cache")
    cache.get_or_build(KERNEL, build)
    places = [cache.folder.parent, cache.folder, *(cache.folder / name for name in INNER)]
    for path in (*places, cache.folder / "entries" / KERNEL.key):
        mode = path.stat().st_mode
        try:
            os.setxattr(path, "system.posix_acl_access", acl_of(STRANGER))
        except OSError as error:
            return f"not tried: no access control lists here ({error.strerror})"
        assert refused_or_own(cache) == "refused", f"{path} is trusted"
        path.chmod(mode & 0o7755)  # as the message says
        assert refused_or_own(cache) == "served", f"{path}: the remedy does not help"
        os.removexattr(path, "system.posix_acl_access")
    for path in places:
        os.setxattr(path, "system.posix_acl_default", acl_of(STRANGER))
    shutil.rmtree(cache.folder)
    assert refused_or_own(cache) == "served" and refused_or_own(cache) == "served"
    return f"{len(places) + 1} places refused; what is made below a default list is the user's alone"


@contextlib.contextmanager
def stranger(run: Callable[[], None], gid: int = STRANGER) -> Iterator[None]:
    """Run something in a process of another user meanwhile, again and again."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(gid)
            os.setuid(STRANGER)
            while True:
                with contextlib.suppress(OSError):
                    run()
        finally:
            os._exit(1)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def groups(folder: Path, seconds: float) -> str:
    """A user with this one's group, of which no list tells, writes into an entry that its group may write."""
    if os.geteuid() != 0:
        return NOT_ROOT
    folder.chmod(0o755)
    cache, data = KernelCache(folder / "cache"), FOREIGN.pack()
    cache.get_or_build(KERNEL, build)
    entry = cache.folder / "entries" / KERNEL.key
    for path in (cache.folder, entry.parent):
        path.chmod(0o755)
    entry.chmod(0o660)
    with stranger(lambda: void(entry.write_bytes(data)), gid=os.getegid()):
        limit = time.monotonic() + 60
        while entry.read_bytes() != data:
            assert time.monotonic() < limit, "the stranger could not write"
            time.sleep(0.01)
    assert refused_or_own(cache) == "refused"
    entry.unlink()  # as the message says
    assert refused_or_own(cache) == "served"
    return "foreign code in the entry, refused"


def void(_: object) -> None:
    """Return nothing."""


def raced_links(folder: Path, seconds: float) -> str:
    """In a folder such as /tmp, another user swaps a link to well-formed entries in and out where the cache will be."""
    if os.geteuid() != 0:
        return NOT_ROOT
    folder.chmod(0o755)
    decoy, shared = KernelCache(folder / "decoy"), folder / "shared"
    decoy.get_or_build(KERNEL, lambda: (FOREIGN.code, ""))
    before = {path.name: path.read_bytes() for path in (decoy.folder / "entries").iterdir()}
    shared.mkdir()
    shared.chmod(0o1777)
    link, cache = shared / "cache", KernelCache(shared / "cache")
    uses: tuple[Callable[[], object], ...] = (
        lambda: cache.find(KERNEL),
        lambda: next(iter(cache.entries()), None),
        lambda: cache.file_of(KERNEL.key),
        lambda: cache.keep_findings(KERNEL, "{}"),
        cache.clear,
    )

    def swap() -> None:
        link.symlink_to(decoy.folder)
        link.unlink()

    looks, refusals, draw, until = 0, 0, random.Random(0), time.monotonic() + seconds
    with stranger(swap):
        while time.monotonic() < until or not refusals:
            assert time.monotonic() < until + 60, "the stranger never had a link there"
            looks += 1
            try:
                found = draw.choice(uses)()
                assert not found, f"what lies behind the link is served: {found}"
            except CacheError:
                refusals += 1
    # Where the cache is made while links come and go, it is this user's own folder, or refused.
    for _ in range(int(10 * seconds) + 1):
        with stranger(swap), contextlib.suppress(CacheError):
            entry, _ = cache.get_or_build(KERNEL, build)
            assert entry.code == build()[0], "foreign code is served"
        if link.is_symlink():
            link.unlink()
        shutil.rmtree(link, ignore_errors=True)
    after = {path.name: path.read_bytes() for path in (decoy.folder / "entries").iterdir()}
    assert after == before, "what lies behind the link was changed"
    return f"{looks} looks, {refusals} refused, none served, nothing changed behind the link"


VALUES: tuple[Any, ...] = ("", "x", "../x", "\x00", 0, -1, 1, 10**30, 1.5, None, True, [], {}, ["x"], {"x": 1})


def entries_edited(folder: Path, seconds: float) -> str:
    """Each field of an entry is replaced, added to or left out: it is built again, or its code is what it was."""
    cache, tried = KernelCache(folder), 0
    cache.get_or_build(KERNEL, build)
    own = Entry(KERNEL, build()[1], build()[0], "{}")
    path = folder / "entries" / KERNEL.key
    fields = {"magic": "", "log": "", "findings": "", "sha256": "", **asdict(KERNEL)}
    for name in fields:
        for value in VALUES:
            for resealed in (False, True):
                data = edited(own, name, value, resealed=resealed)
                if data == own.pack():
                    continue
                path.write_bytes(data)
                entry, was_there = cache.get_or_build(KERNEL, build)
                assert (entry.identity, entry.code) == (KERNEL, build()[0]), f"{name}: {value!r}"
                assert not was_there or (resealed and name in ("log", "findings")), f"{name}: {value!r} is served"
                assert inspection._counted(entry.findings, entry.code) is None
                tried += 1
    return f"{tried} edits of {len(fields)} fields built again, or without effect on the code"


def edited(entry: Entry, name: str, value: Any, *, resealed: bool) -> bytes:
    """Return an entry with another value of a field; with the digest that it should then have, if that can be."""
    if resealed and name in ("log", "findings"):
        return replace(entry, **{name: value}).pack()
    data = entry.pack()
    footer = json.loads(data[len(entry.code) : -8])
    text = json.dumps({**footer, name: value}, sort_keys=True).encode()
    return entry.code + text + len(text).to_bytes(8, "little")


ATTACKS = (
    *(access_lists, groups, raced_links, entries_edited),
    *(exports_edited, members_replaced, sources_edited),
)


def run_all(seconds: float, folder: Path) -> list[tuple[str, bool, float, str]]:
    """Return of each attack its name, whether it failed as it should, how long it took, and what it says."""
    rows = []
    folder.chmod(0o755)  # strangers go through it
    for attack in ATTACKS:
        place = folder / attack.__name__
        place.mkdir()
        begun = time.monotonic()
        try:
            told, well = attack(place, seconds), True
        except Exception as error:  # whatever it is, it should have been a refusal
            told, well = f"{type(error).__name__}: {error}", False
        rows.append((attack.__name__, well, time.monotonic() - begun, told))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="a minute of races, all edits of all fields")
    seconds = 60.0 if parser.parse_args().full else 1.0
    with tempfile.TemporaryDirectory() as folder:
        rows = run_all(seconds, Path(folder))
    for name, well, took, told in rows:
        print(f"{name.replace('_', ' '):18}  {'ok' if well else 'FAILED':6}  {took:6.1f} s  {told}")
    sys.exit(not all(well for _, well, _, _ in rows))


if __name__ == "__main__":
    main()
