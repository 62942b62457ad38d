"""Operations in an open folder through its descriptor, even if the folder at its path is replaced.

A path may lead to another folder after it was checked. A descriptor keeps the checked folder.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass

# O_PATH needs no read permission and opens a link itself.
_PATH = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class Folder:
    """A folder, or a link on the path to one. Methods raise OSError with the full path of the file concerned.

    Attributes:
        path: the path at which it was opened, for messages.
        descriptor: an ``O_PATH`` descriptor.
    """

    path: str
    descriptor: int

    @classmethod
    def at(cls, path: str) -> Folder:
        """Open the folder at a path."""
        return cls(path, os.open(path, _PATH))

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.descriptor)

    def name(self, name: str) -> str:
        """Path of a file in it, for messages."""
        return f"{self.path.rstrip('/')}/{name}"

    def inner(self, name: str, *, make: bool = False) -> Folder:
        """Open a folder or a link in it, without following the link. ``make`` creates a missing folder for the user
        only."""
        try:
            return Folder(self.name(name), self.open(name, _PATH))
        except FileNotFoundError:
            if not make:
                raise
        with self._named(name), contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=self.descriptor)
        return Folder(self.name(name), self.open(name, _PATH))

    def target(self) -> str:
        """Target of a link."""
        with self._named(""):
            return os.readlink("", dir_fd=self.descriptor)

    def open(self, name: str, flags: int) -> int:
        """Open a file in it without following links. A new file is accessible to the user only."""
        try:
            return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self.descriptor)
        except OSError as error:
            raise self._whole(error, name) from None

    def names(self) -> list[str]:
        """Sorted names of its files."""
        with self._named(""):
            descriptor = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.descriptor)
            try:
                with os.scandir(descriptor) as found:
                    return sorted(each.name for each in found)
            finally:
                os.close(descriptor)

    def status(self, name: str) -> os.stat_result:
        """Status of a file in it, without following links."""
        try:
            return os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
        except OSError as error:
            raise self._whole(error, name) from None

    def set_time(self, name: str, time_ns: int) -> None:
        """Set the times of a file in it, without following links."""
        with self._named(name):
            os.utime(name, ns=(time_ns, time_ns), dir_fd=self.descriptor, follow_symlinks=False)

    def move(self, name: str, to: Folder, new: str) -> None:
        """Move a file from it into another folder, where it replaces a file of that name."""
        with self._named(name):
            os.replace(name, new, src_dir_fd=self.descriptor, dst_dir_fd=to.descriptor)

    def remove(self, name: str) -> bool:
        """Remove a file or a whole folder in it, and return whether it still existed."""
        with self._named(name):
            try:
                os.unlink(name, dir_fd=self.descriptor)
            except FileNotFoundError:
                return False
            except IsADirectoryError:
                try:
                    shutil.rmtree(name, dir_fd=self.descriptor)
                except FileNotFoundError:  # another process removed it first
                    return False
        return True

    @contextlib.contextmanager
    def _named(self, name: str) -> Iterator[None]:
        """Add the full path to an error; ``open`` and ``status`` do so without the cost of a context."""
        try:
            yield
        except OSError as error:
            raise self._whole(error, name) from None

    def _whole(self, error: OSError, name: str) -> OSError:
        return OSError(error.errno, error.strerror, self.name(name) if name else self.path)
