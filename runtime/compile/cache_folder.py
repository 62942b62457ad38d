"""An open folder, and what is done in it: by its descriptor, whatever folder has its path by now.

What was checked by a path may be another folder when the path is used again. A descriptor stays what was checked.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass

# No right to read is needed for it, and a link is opened itself.
_PATH = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class Folder:
    """A folder, or a link on the way to one. Methods raise OSError with the whole path of what they are about.

    Attributes:
        path: where it was when it was opened, for messages.
        descriptor: of ``O_PATH``.
    """

    path: str
    descriptor: int

    @classmethod
    def at(cls, path: str) -> Folder:
        """Open the folder at a path."""
        return cls(path, os.open(path, _PATH))

    def close(self) -> None:
        """Give up the descriptor."""
        os.close(self.descriptor)

    def name(self, name: str) -> str:
        """Return the path of something in it, for messages."""
        return f"{self.path.rstrip('/')}/{name}"

    def inner(self, name: str, *, make: bool = False) -> Folder:
        """Open a folder or a link in it; a link is not followed. What is missing can be made, for the user alone."""
        try:
            return Folder(self.name(name), self.open(name, _PATH))
        except FileNotFoundError:
            if not make:
                raise
        with self._named(name), contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=self.descriptor)
        return Folder(self.name(name), self.open(name, _PATH))

    def target(self) -> str:
        """Return where it leads, if it is a link."""
        with self._named(""):
            return os.readlink("", dir_fd=self.descriptor)

    def open(self, name: str, flags: int) -> int:
        """Open something in it; what is made is for the user alone, and a link is not followed."""
        try:
            return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self.descriptor)
        except OSError as error:
            raise self._whole(error, name) from None

    def names(self) -> list[str]:
        """Return the names of all that is in it, in order."""
        with self._named(""):
            descriptor = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.descriptor)
            try:
                with os.scandir(descriptor) as found:
                    return sorted(each.name for each in found)
            finally:
                os.close(descriptor)

    def status(self, name: str) -> os.stat_result:
        """Return the status of something in it; a link's own."""
        try:
            return os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
        except OSError as error:
            raise self._whole(error, name) from None

    def set_time(self, name: str, time_ns: int) -> None:
        """Set the times of something in it; a link's own."""
        with self._named(name):
            os.utime(name, ns=(time_ns, time_ns), dir_fd=self.descriptor, follow_symlinks=False)

    def move(self, name: str, to: Folder, new: str) -> None:
        """Put a file of it into another folder, in the place of the file that is there."""
        with self._named(name):
            os.replace(name, new, src_dir_fd=self.descriptor, dst_dir_fd=to.descriptor)

    def remove(self, name: str) -> bool:
        """Remove something in it, a folder with all that it holds, and return whether it was still there."""
        with self._named(name):
            try:
                os.unlink(name, dir_fd=self.descriptor)
            except FileNotFoundError:
                return False
            except IsADirectoryError:
                try:
                    shutil.rmtree(name, dir_fd=self.descriptor)
                except FileNotFoundError:  # another process removes it too
                    return False
        return True

    @contextlib.contextmanager
    def _named(self, name: str) -> Iterator[None]:
        """Let an error name the whole path; ``open`` and ``status`` do so without the cost of a context."""
        try:
            yield
        except OSError as error:
            raise self._whole(error, name) from None

    def _whole(self, error: OSError, name: str) -> OSError:
        return OSError(error.errno, error.strerror, self.name(name) if name else self.path)
